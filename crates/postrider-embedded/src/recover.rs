//! Recovery: builds the state in memory from the files, and repairs what a crash interrupted.

use crate::disk::{Disk, DryDisk};
use crate::entry_cache::EntryCache;
use crate::generations::{self, FileKind, Generations};
use crate::losses::Loss;
use crate::queue::DeliveryQueue;
use crate::record::{self, RecordKind, STATE_GENERATION, SubscriptionProgress, VarintReader};
use crate::segment::{
    POSITIONS_MAX, SPARE_NAMES, Segment, SegmentDamage, SegmentHead, base_of, index_base_of, index_name,
    log_name, orphan_name, retired_base_of, retired_name, scan_is_empty,
};
use crate::segment_gaps::{self, ExpectedEnd, SegmentGap};
use crate::state::{RecoveredState, RetryEntry, StateDatabase, StateWrite};
use crate::writer::WriterRequest;
use crate::{LogShared, SubscriptionState};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::Timestamp;
use postrider_store::log::{LostDeliveries, LostEvents};
use postrider_store::{DeadLetterKey, Error};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, RwLock, mpsc};

pub struct Recovery {
    pub shared: Arc<LogShared>,
    /// A new, empty segment to write to.
    pub segment: Arc<Segment>,
    pub commit: u64,
}

pub fn recover(
    disk: Arc<dyn Disk>,
    state: &Path,
    fresh_identity: u64,
    generations: Arc<Generations>,
    writer: mpsc::Sender<WriterRequest>,
) -> Result<Recovery, Error> {
    let directory = state.parent().unwrap_or(state);
    let state = StateDatabase::open_with(state, fresh_identity, generations.clone())?;
    let known = state.recover()?;
    generations.set_identity(known.identity);
    let unreadable = |e: io::Error| Error::Unavailable(format!("reading the log: {e}"));
    let mut progress: FxHashMap<SubscriptionId, SubscriptionProgress> =
        known.cursors.iter().cloned().collect();
    let mut found = FoundSegments::default();
    found.check_heads(&*disk, &known)?;
    found.check_generation(&state, directory)?;
    found.open_all(&*disk, &known, &mut progress)?;
    found.check_generation(&state, directory)?;
    let (lost, mut writes) = found.account(&state, &known, &mut progress)?;

    let frontier = progress.values().map(|p| p.frontier.0).max().unwrap_or(0);
    let next = found.next.max(known.next.0).max(frontier);

    // The checkpoint below makes the log's own progress records obsolete.
    writes.extend(progress.iter().map(|(of, p)| StateWrite::Cursor(*of, p.clone())));
    let there = found.segments.iter().filter(|one| one.end() > one.base);
    let recorded: segment_gaps::RecordedSegments = there.map(|one| (one.base.0, one.end().0)).collect();
    let gone = known.segments.keys().filter(|base| !recorded.contains_key(base));
    writes.push(StateWrite::SegmentsGone(gone.copied().collect()));
    writes.push(StateWrite::Segments(recorded.clone().into_iter().collect()));
    writes.push(StateWrite::Facts {
        next: Position(next),
        replay_from: Position(next),
    });
    // Recorded in the same commit as the changes that hide these losses from the next start.
    let mut losses: Vec<Loss> = lost.iter().cloned().map(Loss::Events).collect();
    let known_damage = |place: &String| known.losses.contains(&Loss::Damage(place.clone()));
    let rolled_back = generations.rolled_back().into_iter();
    let undone = rolled_back
        .filter(|kind| *kind != FileKind::State)
        .map(generations::undone);
    found.corrupt.extend(undone);
    let new_damage = found.corrupt.iter().filter(|place| !known_damage(place));
    losses.extend(new_damage.cloned().map(Loss::Damage));
    if !losses.is_empty() {
        writes.push(StateWrite::Losses(losses));
    }
    state.write(&writes)?;
    let earlier = known.losses;
    // Read again, now without the retries and dead letters that are lost.
    let known = state.recover()?;
    for base in found.retired {
        disk.remove(&retired_name(base)).map_err(unreadable)?;
    }

    generations.listen({
        let writer = writer.clone();
        // Fails only while the store shuts down.
        move || drop(writer.send(WriterRequest::CheckpointDue))
    });
    let shared = Arc::new(LogShared {
        disk,
        state,
        identity: known.identity,
        next: AtomicU64::new(next),
        segments: RwLock::new(BTreeMap::new()),
        entries: EntryCache::default(),
        spare: Mutex::new(None),
        spares: AtomicUsize::new(0),
        references: Mutex::new(known.references),
        recorded: Mutex::new(recorded),
        letters: Mutex::new(
            known
                .letters
                .into_iter()
                .map(|(of, first, count)| (of, (first, count)))
                .collect(),
        ),
        subs: RwLock::new(FxHashMap::default()),
        heads: Mutex::new(BTreeSet::new()),
        listed: Mutex::new(Vec::new()),
        listed_rows: Mutex::new(Vec::new()),
        hot_bytes: AtomicUsize::new(0),
        due_bytes: Arc::default(),
        appending_bytes: AtomicUsize::new(0),
        refusing: Mutex::new(None),
        corrupt: Mutex::new(Vec::new()),
        corrupt_records: AtomicU64::new(0),
        corrupt_deliveries: AtomicU64::new(0),
        unrecorded_damage: Mutex::new(Vec::new()),
        state_trouble: Mutex::new(None),
        lost: {
            let earlier = earlier.iter().filter_map(|loss| match loss {
                Loss::Events(lost) => Some(lost.clone()),
                Loss::Damage(_) => None,
            });
            lost.iter().cloned().chain(earlier).collect()
        },
        redelivered: AtomicU64::new(0),
        closing: AtomicBool::new(false),
        writer_ended: AtomicBool::new(false),
        writer,
        listener: OnceLock::new(),
    });
    for place in found.corrupt {
        tracing::error!(%place, "damaged record in the log; it is not served");
        shared.remember_corrupt(place);
    }
    for one in &lost {
        let what = segment_gaps::describe(one);
        tracing::error!(
            "{what}; they were acknowledged and are not delivered. Their files can be put back from a backup of \
             the whole data directory only"
        );
        shared.remember_corrupt(what);
        let deliveries = one.deliveries.values().map(|lost| lost.total()).sum();
        shared.corrupt_deliveries.fetch_add(deliveries, Relaxed);
    }
    for loss in earlier {
        let what = match loss {
            Loss::Events(lost) => segment_gaps::describe(&lost),
            Loss::Damage(place) => place,
        };
        tracing::warn!(%what, "lost or damaged earlier; \"postrider restore --forget-losses\" ends this report");
        shared.remember_corrupt(what);
    }

    for segment in found.segments {
        if segment.end() == segment.base {
            // The segment has never contained an event, or none that can be read.
            set_aside_or_remove(&*shared.disk, &segment).map_err(unreadable)?;
        } else {
            shared.add_segment(Arc::new(segment));
        }
    }
    shared.restore(progress, &known.retries).map_err(unreadable)?;
    shared.note_oldest_retries(
        known
            .oldest_retries
            .into_iter()
            .map(|(of, oldest)| (of, Some(oldest)))
            .collect(),
    );
    let segment = shared.create_segment(&*shared.disk, Position(next), found.commit + 1);
    let segment = Arc::new(segment.map_err(|e| Error::Unavailable(format!("making a segment: {e}")))?);
    shared.add_segment(segment.clone());
    Ok(Recovery {
        shared,
        segment,
        commit: found.commit,
    })
}

/// Findings of a start, without the start.
#[derive(Debug, Default)]
pub struct Examination {
    /// Why it would refuse the files.
    pub refused: Option<String>,
    pub lost: Vec<LostEvents>,
    /// Damaged places at which no event stood.
    pub damaged: Vec<String>,
}

/// Does what a start does to find out what is lost, and changes nothing but `state`, which is a copy of the state
/// database. Nobody may be writing the log.
pub fn examine(state: &Path, disk: Arc<dyn Disk>) -> Result<Examination, Error> {
    let directory = state.parent().unwrap_or(state);
    let state = StateDatabase::open(state, 0)?;
    let known = state.recover()?;
    let mut progress = known.cursors.iter().cloned().collect();
    let disk = DryDisk::over(disk);
    let mut found = FoundSegments::default();
    let mut look = || {
        found.check_heads(&disk, &known)?;
        found.check_generation(&state, directory)?;
        found.open_all(&disk, &known, &mut progress)?;
        found.check_generation(&state, directory)?;
        found.account(&state, &known, &mut progress)
    };
    match look() {
        Ok((lost, _)) => Ok(Examination {
            refused: None,
            lost,
            damaged: found.corrupt,
        }),
        Err(Error::Corrupt(why)) => Ok(Examination {
            refused: Some(why),
            ..Examination::default()
        }),
        Err(e) => Err(e),
    }
}

#[derive(Default)]
struct FoundSegments {
    segments: Vec<Segment>,
    next: u64,
    commit: u64,
    corrupt: Vec<String>,
    /// Lost events, each with the index of the lost segment if there is one.
    gaps: Vec<(SegmentGap, Option<Segment>)>,
    /// Damaged places within segments that held events, each with the index that says whose, if there is one.
    damaged: Vec<(SegmentGap, Option<Segment>, String)>,
    retired: Vec<Position>,
    /// The latest generation of the state database that the log has recorded.
    generation: u64,
}

impl FoundSegments {
    /// Opens every segment by its index if that suffices, otherwise by reading it.
    fn open_all(
        &mut self,
        disk: &dyn Disk,
        known: &RecoveredState,
        progress: &mut FxHashMap<SubscriptionId, SubscriptionProgress>,
    ) -> Result<(), Error> {
        let unreadable = |e: io::Error| Error::Unavailable(format!("reading the log: {e}"));
        let names = disk.names().map_err(unreadable)?;
        let bases: Vec<Position> = names.iter().filter_map(|n| base_of(n)).collect();
        self.retired = names.iter().filter_map(|n| retired_base_of(n)).collect();
        let mut recorded = known.segments.clone();
        recorded.retain(|base, _| !self.retired.contains(&Position(*base)));
        let present: BTreeSet<u64> = bases.iter().map(|base| base.0).collect();
        for (i, &base) in bases.iter().enumerate() {
            let limit = bases.get(i + 1).copied();
            let sealed = if limit.is_none() || base >= known.replay_from {
                None
            } else {
                self.open_sealed(disk, base, &recorded, &names)
                    .map_err(unreadable)?
            };
            let segment = match sealed {
                Some(segment) => segment,
                None => {
                    let expected = segment_gaps::expected_end(&recorded, &present, base.0, known.next.0);
                    let scanned = self.scan(
                        disk,
                        base,
                        limit,
                        (known.next, known.replay_from),
                        expected,
                        progress,
                    );
                    let segment = scanned.map_err(unreadable)?;
                    // With its head, the active segment has lost all of its events.
                    if recorded.get(&base.0) == Some(&base.0)
                        && segment.end() == base
                        && segment_gaps::is_headless(disk, base, known.identity).map_err(unreadable)?
                    {
                        self.gaps.retain(|(gap, _)| gap.base != base);
                        let gap = segment_gaps::whole_segment(&recorded, &present, base.0, known.next.0);
                        self.gaps.push((gap, None));
                    }
                    segment
                }
            };
            self.next = self.next.max(segment.end().0);
            self.segments.push(segment);
        }
        self.find_missing(disk, known, &recorded, &present, &names, progress)
            .map_err(unreadable)
    }

    /// Checks the heads of all segments before anything is changed.
    fn check_heads(&mut self, disk: &dyn Disk, known: &RecoveredState) -> Result<(), Error> {
        let unreadable = |e: io::Error| Error::Unavailable(format!("reading the log: {e}"));
        settle_spares(disk, known.identity).map_err(unreadable)?;
        let names = disk.names().map_err(unreadable)?;
        for base in names.iter().filter_map(|name| base_of(name)) {
            self.check_head(disk, base, known.identity)?;
        }
        Ok(())
    }

    /// The log records a generation of the state database only once it is durable there, so a lower
    /// one means an older copy.
    fn check_generation(&self, state: &StateDatabase, directory: &Path) -> Result<(), Error> {
        let (own, seen) = (state.generation(), self.generation);
        if seen <= own {
            return Ok(());
        }
        let what = format!("state.redb is an older copy: generation {own}, where the log has seen {seen}");
        Err(Error::Corrupt(generations::mixed(directory, &what)))
    }

    /// Finds segments whose files are missing. Their remains are set aside, not deleted.
    fn find_missing(
        &mut self,
        disk: &dyn Disk,
        known: &RecoveredState,
        recorded: &segment_gaps::RecordedSegments,
        present: &BTreeSet<u64>,
        names: &[String],
        progress: &FxHashMap<SubscriptionId, SubscriptionProgress>,
    ) -> io::Result<()> {
        let mut gaps = segment_gaps::missing(recorded, present, known.next.0);
        if recorded.is_empty() && present.is_empty() && known.next.0 > 0 && self.retired.is_empty() {
            // The whole log is missing, and the state database predates the recording of segments.
            let lowest = progress
                .values()
                .map(|p| p.open.first().copied().unwrap_or(p.frontier));
            let from = lowest.min().unwrap_or(known.next).0;
            gaps.push(SegmentGap {
                base: Position(from),
                from,
                to: known.next.0,
                end_known: true,
            });
        }
        for name in names {
            let Some(base) = index_base_of(name).filter(|base| !present.contains(&base.0)) else {
                continue;
            };
            let index = match *name == index_name(base) {
                true => Segment::open_index(disk, base)?,
                false => None,
            };
            let of_gap = gaps.iter().any(|gap| gap.base == base);
            // A program that did not record segments may have left the index of a deleted one.
            let unrecorded = recorded.is_empty() && !self.retired.contains(&base);
            let needed = |index: &Segment| {
                let gap = SegmentGap {
                    base,
                    from: base.0,
                    to: index.end().0,
                    end_known: true,
                };
                segment_gaps::losses(gap, Some(index), progress).map(|lost| (gap, !lost.is_empty()))
            };
            let lost = match index.as_ref().filter(|_| unrecorded).map(needed).transpose()? {
                Some((gap, true)) => {
                    gaps.push(gap);
                    true
                }
                _ => of_gap,
            };
            if !lost {
                // A crash came between deleting a segment and deleting its index.
                disk.remove(name)?;
                continue;
            }
            disk.rename(name, &orphan_name(base))?;
            if let Some(index) = index
                && let Some(gap) = gaps.iter().position(|gap| gap.base == base)
            {
                let mut gap = gaps.swap_remove(gap);
                gap.end_at(Some(&index));
                self.gaps.push((gap, Some(index)));
            }
        }
        self.gaps.extend(gaps.into_iter().map(|gap| (gap, None)));
        self.gaps.sort_by_key(|(gap, _)| gap.from);
        let ends = self.gaps.iter().map(|(gap, _)| gap.beyond());
        // Positions within the gaps are not allocated again.
        self.next = ends.fold(self.next, u64::max);
        Ok(())
    }

    /// Computes what subscriptions lose with the gaps, and adds the writes that stop waiting for
    /// it.
    fn account(
        &mut self,
        state: &StateDatabase,
        known: &RecoveredState,
        progress: &mut FxHashMap<SubscriptionId, SubscriptionProgress>,
    ) -> Result<(Vec<LostEvents>, Vec<StateWrite>), Error> {
        let unreadable = |e: io::Error| Error::Unavailable(format!("reading the log: {e}"));
        let mut lost = Vec::new();
        let gaps = std::mem::take(&mut self.gaps).into_iter();
        let gaps = gaps.map(|(gap, index)| (gap, index, segment_gaps::cause(gap)));
        for (gap, index, cause) in gaps.chain(std::mem::take(&mut self.damaged)) {
            let deliveries = segment_gaps::losses(gap, index.as_ref(), progress).map_err(unreadable)?;
            segment_gaps::settle_lost(gap, progress);
            lost.push(LostEvents {
                from: Position(gap.from),
                to: Position(gap.to),
                end_known: gap.end_known,
                cause,
                deliveries,
            });
        }
        // An index that could not be written makes the next start read the segment again.
        let is_known = |one: &LostEvents| {
            known.losses.iter().any(|known| match known {
                Loss::Events(known) => (known.from, known.to, &known.cause) == (one.from, one.to, &one.cause),
                Loss::Damage(_) => false,
            })
        };
        lost.retain(|one| !is_known(one));
        let ranges: Vec<(Position, Position)> = lost.iter().map(|one| (one.from, one.to)).collect();
        let ends: BTreeMap<u64, u64> = self
            .segments
            .iter()
            .map(|one| (one.base.0, one.end().0))
            .collect();
        let is_lost = |delivery: &RetryEntry| {
            let end = ends.get(&delivery.segment.0);
            end.is_none_or(|end| delivery.position.0 >= *end)
                || ranges
                    .iter()
                    .any(|(from, to)| (*from..*to).contains(&delivery.position))
        };
        let mut writes = Vec::new();
        if lost.is_empty() && known.references.keys().all(|base| ends.contains_key(base)) {
            return Ok((lost, writes));
        }
        let mut letters: BTreeMap<SubscriptionId, Vec<DeadLetterKey>> = BTreeMap::new();
        for (of, delivery, reason) in state.open_within(Position(0)..Position(u64::MAX))? {
            if !is_lost(&delivery) {
                continue;
            }
            let holds = |one: &&mut LostEvents| (one.from..one.to).contains(&delivery.position);
            let one = match lost.iter_mut().find(holds) {
                Some(one) => one,
                None => {
                    let (from, to) = (delivery.position, Position(delivery.position.0 + 1));
                    let name = log_name(delivery.segment);
                    let same = lost.iter().position(|one| one.cause.contains(&name));
                    let at = same.unwrap_or(lost.len());
                    if same.is_none() {
                        lost.push(LostEvents {
                            from,
                            to,
                            end_known: true,
                            cause: segment_gaps::cause(SegmentGap {
                                base: delivery.segment,
                                from: delivery.segment.0,
                                to: to.0,
                                end_known: true,
                            }),
                            deliveries: BTreeMap::new(),
                        });
                    }
                    let one = &mut lost[at];
                    (one.from, one.to) = (one.from.min(from), one.to.max(to));
                    one
                }
            };
            let count = one.deliveries.entry(of).or_insert(LostDeliveries {
                exact: true,
                ..LostDeliveries::default()
            });
            if reason.is_some() {
                count.letters += 1;
                letters
                    .entry(of)
                    .or_default()
                    .push((delivery.due, delivery.position));
            } else {
                count.retries += 1;
                let RetryEntry {
                    due,
                    position,
                    segment,
                    ..
                } = delivery;
                writes.push(StateWrite::RemoveRetry(of, due, position, segment));
            }
        }
        writes.extend(
            letters
                .into_iter()
                .map(|(of, keys)| StateWrite::RemoveLetters(of, keys)),
        );
        Ok((lost, writes))
    }

    /// A segment of another log must be neither delivered nor deleted.
    fn check_head(&mut self, disk: &dyn Disk, base: Position, identity: u64) -> Result<(), Error> {
        let name = log_name(base);
        let unreadable = |e: io::Error| Error::Unavailable(format!("reading {name}: {e}"));
        let file = disk.open(&name).map_err(unreadable)?;
        match SegmentHead::read(&*file).map_err(unreadable)? {
            Some(head) if head.base != base || head.identity != identity => {
                let empty = scan_is_empty(&*file).map_err(unreadable)?;
                if empty && head.base == base {
                    // A first start was interrupted before its state database reached the disk.
                    // Nothing is lost.
                    return Ok(());
                }
                if head.identity == identity {
                    return Err(Error::Corrupt(format!(
                        "log/{name} holds the segment that begins at position {}, not at {base}: files of the log were \
                         exchanged or renamed. Its name must be {}; rename the files back, or put back all files of one \
                         backup",
                        head.base,
                        log_name(head.base)
                    )));
                }
                Err(Error::Corrupt(format!(
                    "log/{name} belongs to another log than state.redb: one of them was replaced, or state.redb is \
                     missing. Put back all files of one backup, or use another data directory"
                )))
            }
            Some(head) => {
                self.generation = self.generation.max(head.generation);
                Ok(())
            }
            None => {
                // The head may not have reached the disk before the first commit.
                let empty = scan_is_empty(&*file).map_err(unreadable)?;
                if !empty {
                    self.corrupt.push(segment_gaps::headless(base));
                }
                Ok(())
            }
        }
    }

    fn open_sealed(
        &mut self,
        disk: &dyn Disk,
        base: Position,
        recorded: &segment_gaps::RecordedSegments,
        names: &[String],
    ) -> io::Result<Option<Segment>> {
        let segment = Segment::open_fitting(disk, base, recorded)?;
        let name = index_name(base);
        if segment.is_none() && names.contains(&name) {
            // The index is not flushed, so a power loss may have damaged it. Rebuilding costs only
            // time.
            tracing::warn!(%name, "an index is damaged or does not fit its segment, which is read instead");
        }
        Ok(segment)
    }

    fn scan(
        &mut self,
        disk: &dyn Disk,
        base: Position,
        limit: Option<Position>,
        (known_next, replay_from): (Position, Position),
        expected_end: Option<ExpectedEnd>,
        progress: &mut FxHashMap<SubscriptionId, SubscriptionProgress>,
    ) -> io::Result<Segment> {
        let mut unreadable = Vec::new();
        let mut generation = 0;
        let before = limit.unwrap_or(Position(u64::MAX));
        let (segment, scan) = Segment::open_scanned(
            disk,
            base,
            before,
            |segment, offset, header, payload| match header.kind {
                RecordKind::Batch => match record::decode_batch(payload) {
                    Some(batch) => segment.index_batch(offset, header.first, &batch),
                    None => unreadable.push(offset),
                },
                RecordKind::Progress => {
                    let mut reader = VarintReader::new(payload);
                    while let Some((of, newer)) = SubscriptionProgress::decode(&mut reader) {
                        if of == STATE_GENERATION {
                            generation = generation.max(newer.frontier.0);
                        }
                        // Progress from before the last checkpoint is in the state database, which
                        // may since have been reset in order to deliver again.
                        if base >= replay_from
                            && let Some(known) = progress.get_mut(&of)
                        {
                            *known = merge(known, &newer);
                        }
                    }
                }
            },
        )?;
        self.commit = self.commit.max(scan.commit);
        self.generation = self.generation.max(generation);
        let name = log_name(base);
        let mut damages = scan.damage.clone();
        if let Some(ExpectedEnd { end, exact }) = expected_end.filter(|expected| expected.end > scan.next.0) {
            match damages.last_mut().filter(|last| last.events.end >= scan.next.0) {
                // The number of events in the damaged part is unknown.
                Some(last) if last.events.is_empty() && last.from >= scan.end => last.events.end = end,
                _ => {}
            }
            let reported = damages
                .iter()
                .map(|one| one.events.end)
                .fold(scan.next.0, u64::max);
            if reported < end {
                // The index describes the former content, not what is left.
                let index = Segment::open_index(disk, base)?.filter(|index| index.end().0 >= end);
                if index.is_some() {
                    disk.rename(&index_name(base), &orphan_name(base))?;
                }
                let mut gap = SegmentGap {
                    base,
                    from: reported,
                    to: end,
                    end_known: exact,
                };
                gap.end_at(index.as_ref());
                self.gaps.push((gap, index));
            } else if !exact {
                // The damaged part may have contained more events than were recorded.
                self.next = self.next.max(base.0.saturating_add(POSITIONS_MAX));
            }
        }
        for offset in unreadable {
            self.corrupt
                .push(format!("{name} at byte {offset}: not a record of this version"));
        }
        let mut counted = base.0;
        for damage in &damages {
            let (from, to) = (damage.events.start, damage.events.end);
            let what = segment_gaps::place_text(base, damage);
            let acknowledged = limit.unwrap_or(known_next).0;
            if damage.torn && from >= acknowledged {
                tracing::warn!(place = %what, "a commit was cut short; it was never acknowledged");
                continue;
            }
            // Somebody may have seen these events: their positions are not given out again.
            self.next = self.next.max(to);
            let gap = SegmentGap {
                base,
                from: from.max(counted),
                to,
                end_known: true,
            };
            counted = counted.max(to);
            let tail = self.gaps.last_mut().map(|(tail, _)| tail);
            if let Some(tail) = tail.filter(|tail| tail.base == base && tail.from == to) {
                // The record that was cut and all that followed it count as one loss.
                tail.from = gap.from;
                continue;
            }
            if gap.from == to {
                self.corrupt.push(what);
                continue;
            }
            let index = Segment::open_index(disk, base)?.filter(|index| index.end().0 >= to);
            let SegmentDamage { from, to, .. } = damage;
            let cause = format!("damaged record: {name} at bytes {from} to {to}");
            self.damaged.push((gap, index, cause));
        }
        if segment.end() == base && damages.iter().any(|damage| !damage.torn) {
            // Nothing in the segment is readable: it is set aside unchanged.
            return Ok(segment);
        }
        // Bytes after the last record are useless.
        segment.file.truncate(scan.end)?;
        segment.has_tail();
        if let Err(e) = segment.seal(disk) {
            // Most likely the disk is full. The index stays in memory; the next start reads the
            // segment again.
            tracing::warn!(?segment, error = %e, "cannot write a segment's index");
        }
        Ok(segment)
    }
}

/// Removes a segment without readable events; if it has damaged content, it is kept under another
/// name.
fn set_aside_or_remove(disk: &dyn Disk, segment: &Segment) -> io::Result<()> {
    if scan_is_empty(&*segment.file)? {
        return segment.remove(disk);
    }
    let name = log_name(segment.base);
    disk.rename(&name, &format!("{name}.orphan"))?;
    match disk.remove(&index_name(segment.base)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// A spare file with a head is a segment whose rename was lost; other spare files are removed.
fn settle_spares(disk: &dyn Disk, identity: u64) -> io::Result<()> {
    for name in SPARE_NAMES {
        let file = match disk.open(name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        if let Some(head) = SegmentHead::read(&*file)?
            && head.identity == identity
            // If a segment of that name exists, it was started after the spare had failed.
            && disk.open(&log_name(head.base)).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
        {
            disk.rename(name, &log_name(head.base))?;
        }
    }
    Ok(())
}

/// Merges two states of progress: a position is open only if it is open according to both.
fn merge(a: &SubscriptionProgress, b: &SubscriptionProgress) -> SubscriptionProgress {
    let (low, high) = if a.frontier <= b.frontier { (a, b) } else { (b, a) };
    let low_open: FxHashSet<Position> = low.open.iter().copied().collect();
    let open = high.open.iter().copied();
    SubscriptionProgress {
        frontier: high.frontier,
        open: open
            .filter(|p| *p >= low.frontier || low_open.contains(p))
            .collect(),
    }
}

impl LogShared {
    /// Builds the subscriptions' queues from their progress and the content of the segments.
    fn restore(
        &self,
        progress: FxHashMap<SubscriptionId, SubscriptionProgress>,
        retries: &[(SubscriptionId, Timestamp, u64)],
    ) -> io::Result<()> {
        let segments: Vec<Arc<Segment>> = {
            let segments = self.segments.read().expect("no panic holds it");
            segments.values().cloned().collect()
        };
        let mut waiting: FxHashMap<SubscriptionId, (u64, Position)> = FxHashMap::default();
        for segment in &segments {
            for (of, last, matches) in segment.subscriptions() {
                let Some(known) = progress.get(&of) else {
                    continue;
                };
                let count = if known.frontier <= segment.base {
                    matches
                } else if last >= known.frontier {
                    count_from(segment, of, known.frontier)?
                } else {
                    0
                };
                let here = known
                    .open
                    .iter()
                    .filter(|p| **p >= segment.base && **p < segment.end());
                let count = count + here.count() as u64;
                if count > 0 {
                    let line = waiting.entry(of).or_default();
                    line.0 += count;
                    line.1 = last;
                }
            }
        }
        let mut ages = ReceptionTimes::default();
        let mut subs = self.subs.write().expect("no panic holds it");
        for (of, progress) in progress {
            self.redelivered.fetch_add(progress.open.len() as u64, Relaxed);
            let interrupted = !progress.open.is_empty();
            let mut queue = DeliveryQueue::new(progress);
            match waiting.get(&of) {
                Some((count, last)) => {
                    let since = ages.first_from(&segments, of, queue.lowest());
                    queue.recovered(*count, *last, since);
                }
                // The record is damaged; reading the log will report it.
                None if interrupted => queue.recovered(0, Position(0), None),
                None => {}
            }
            subs.insert(
                of,
                Arc::new(SubscriptionState {
                    of,
                    queue: Mutex::new(queue),
                }),
            );
        }
        for (of, head, count) in retries {
            if let Some(sub) = subs.get(of) {
                let mut queue = sub.queue.lock().expect("no panic holds it");
                queue.recovered_retries(*count, *head);
                drop(queue);
                self.move_head(*of, None, Some(*head));
            }
        }
        Ok(())
    }
}

/// Reception times of records; a record that is the first of many subscriptions is read once.
#[derive(Default)]
struct ReceptionTimes(FxHashMap<(Position, u32), Option<Timestamp>>);

impl ReceptionTimes {
    /// When the first event of a subscription at or after `from` was received. `None` if it cannot
    /// be read, since the value is only displayed.
    fn first_from(
        &mut self,
        segments: &[Arc<Segment>],
        of: SubscriptionId,
        from: Position,
    ) -> Option<Timestamp> {
        let at = segments.partition_point(|segment| segment.end() <= from);
        for segment in &segments[at..] {
            for entry in segment.entries(of, from, 2).ok()? {
                let read = || {
                    let (header, payload) = segment.read(u64::from(entry.offset)).ok()?;
                    Some((header.first, record::decode_batch(&payload)?))
                };
                if segment.base.0 + u64::from(entry.first) >= from.0 {
                    let key = (segment.base, entry.offset);
                    let received = || Some(read()?.1.received);
                    return *self.0.entry(key).or_insert_with(received);
                }
                // The record begins before `from`, and its matching events may all be before it.
                let (first, batch) = read()?;
                let beyond = (0..batch.events.len()).filter(|i| first.0 + *i as u64 >= from.0);
                if beyond.into_iter().any(|i| batch.matched(i).contains(&of)) {
                    return Some(batch.received);
                }
            }
        }
        None
    }
}

/// Number of events of a subscription in a segment from `from` on.
fn count_from(segment: &Segment, of: SubscriptionId, from: Position) -> io::Result<u64> {
    let mut count = 0;
    for entry in segment.entries(of, from, usize::MAX)? {
        if segment.base.0 + u64::from(entry.first) >= from.0 {
            count += u64::from(entry.matches);
        } else if let Ok((header, payload)) = segment.read(u64::from(entry.offset))
            && let Some(batch) = record::decode_batch(&payload)
        {
            let beyond = (0..batch.events.len()).filter(|i| header.first.0 + *i as u64 >= from.0);
            count += beyond.filter(|i| batch.matched(*i).contains(&of)).count() as u64;
        }
    }
    Ok(count)
}
