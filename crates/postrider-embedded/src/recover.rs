//! Opening the log: what is on disk becomes what is known, and what a crash cut short is repaired.

use crate::disk::Disk;
use crate::entry_cache::EntryCache;
use crate::queue::Queue;
use crate::record::{self, Kind, Progress, Reader};
use crate::segment::{
    FIRST_RECORD, Head, SPARE_NAMES, Segment, base_of, index_base_of, index_name, log_name, scan_is_empty,
};
use crate::state::{Recovered, State, Write};
use crate::writer::ToWriter;
use crate::{Shared, Sub};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::Timestamp;
use postrider_store::Error;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, RwLock, mpsc};

pub struct Recovery {
    pub shared: Arc<Shared>,
    /// A new, empty segment to write to.
    pub segment: Arc<Segment>,
    pub commit: u64,
}

pub fn recover(
    disk: Arc<dyn Disk>,
    state: &Path,
    fresh_identity: u64,
    writer: mpsc::Sender<ToWriter>,
) -> Result<Recovery, Error> {
    let state = State::open(state, fresh_identity)?;
    let known = state.recover()?;
    let unreadable = |e: io::Error| Error::Unavailable(format!("reading the log: {e}"));
    let mut progress: FxHashMap<SubscriptionId, Progress> = known.cursors.iter().cloned().collect();
    let mut found = Found::default();
    found.open_all(&*disk, &known, &mut progress)?;

    let frontier = progress.values().map(|p| p.frontier.0).max().unwrap_or(0);
    let next = found.next.max(known.next.0).max(frontier);
    let shared = Arc::new(Shared {
        disk,
        state,
        identity: known.identity,
        next: AtomicU64::new(next),
        segments: RwLock::new(BTreeMap::new()),
        entries: EntryCache::default(),
        spare: Mutex::new(None),
        spares: AtomicUsize::new(0),
        references: Mutex::new(known.references),
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
        appending_bytes: AtomicUsize::new(0),
        refusing: Mutex::new(None),
        corrupt: Mutex::new(Vec::new()),
        corrupt_records: AtomicU64::new(0),
        corrupt_deliveries: AtomicU64::new(0),
        redelivered: AtomicU64::new(0),
        closing: AtomicBool::new(false),
        writer,
        listener: OnceLock::new(),
    });
    for place in found.corrupt {
        shared.note_corrupt(place);
    }

    // From here on the log's own progress records are no longer needed.
    let mut writes: Vec<Write> = progress
        .iter()
        .map(|(of, p)| Write::Cursor(*of, p.clone()))
        .collect();
    writes.push(Write::Facts {
        next: Position(next),
        replay_from: Position(next),
    });
    shared.state.write(&writes)?;

    for segment in found.segments {
        if segment.end() == segment.base {
            // It never held an event, or none that can be read.
            segment.remove(&*shared.disk).map_err(unreadable)?;
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

#[derive(Default)]
struct Found {
    segments: Vec<Segment>,
    next: u64,
    commit: u64,
    corrupt: Vec<String>,
}

impl Found {
    /// Opens every segment: by its index where that is enough, by reading it where it is not.
    fn open_all(
        &mut self,
        disk: &dyn Disk,
        known: &Recovered,
        progress: &mut FxHashMap<SubscriptionId, Progress>,
    ) -> Result<(), Error> {
        let unreadable = |e: io::Error| Error::Unavailable(format!("reading the log: {e}"));
        settle_spares(disk, known.identity).map_err(unreadable)?;
        let names = disk.names().map_err(unreadable)?;
        let bases: Vec<Position> = names.iter().filter_map(|n| base_of(n)).collect();
        for orphan in names
            .iter()
            .filter(|n| index_base_of(n).is_some_and(|base| !bases.contains(&base)))
        {
            // A crash came between the deletion of a segment and that of its index.
            disk.remove(orphan).map_err(unreadable)?;
        }
        let mut noted = 0;
        for (i, &base) in bases.iter().enumerate() {
            noted = self.corrupt.len();
            let limit = bases.get(i + 1).copied();
            self.check_head(disk, base, known.identity)?;
            let sealed = if limit.is_none() || base >= known.replay_from {
                None
            } else {
                self.open_sealed(disk, base, &names).map_err(unreadable)?
            };
            let segment = match sealed {
                Some(segment) => segment,
                None => self
                    .scan(disk, base, limit, known.next, progress)
                    .map_err(unreadable)?,
            };
            self.next = self.next.max(segment.end().0);
            self.segments.push(segment);
        }
        if self.next < known.next.0 && !bases.is_empty() && self.corrupt.len() == noted {
            let (from, to) = (self.next, known.next);
            self.corrupt.push(format!(
                "the log ends with event {from}, but events up to {to} were in it"
            ));
        }
        Ok(())
    }

    /// A segment that is not ours must neither be delivered nor deleted.
    fn check_head(&mut self, disk: &dyn Disk, base: Position, identity: u64) -> Result<(), Error> {
        let name = log_name(base);
        let unreadable = |e: io::Error| Error::Unavailable(format!("reading {name}: {e}"));
        let file = disk.open(&name).map_err(unreadable)?;
        match Head::read(&*file).map_err(unreadable)? {
            Some(head) if head.base != base || head.identity != identity => Err(Error::Corrupt(format!(
                "{name} belongs to another log, or the state database is not the one it was written with"
            ))),
            Some(_) => Ok(()),
            None => {
                // Before the first commit it need not have reached the disk.
                let empty = scan_is_empty(&*file).map_err(unreadable)?;
                if !empty {
                    self.corrupt.push(format!(
                        "{name} at bytes 0 to {FIRST_RECORD}: the segment's own facts"
                    ));
                }
                Ok(())
            }
        }
    }

    fn open_sealed(
        &mut self,
        disk: &dyn Disk,
        base: Position,
        names: &[String],
    ) -> io::Result<Option<Segment>> {
        let segment = Segment::open_sealed(disk, base)?;
        let name = index_name(base);
        if segment.is_none() && names.contains(&name) {
            // A power cut may have taken it: it is not flushed. Nothing but time is lost.
            tracing::warn!(%name, "an index is damaged and is made anew from its segment");
        }
        Ok(segment)
    }

    fn scan(
        &mut self,
        disk: &dyn Disk,
        base: Position,
        limit: Option<Position>,
        known_next: Position,
        progress: &mut FxHashMap<SubscriptionId, Progress>,
    ) -> io::Result<Segment> {
        let mut unreadable = Vec::new();
        let before = limit.unwrap_or(Position(u64::MAX));
        let (segment, scan) = Segment::open_scanned(
            disk,
            base,
            before,
            |segment, offset, header, payload| match header.kind {
                Kind::Batch => match record::decode_batch(payload) {
                    Some(batch) => segment.index_batch(offset, header.first, &batch),
                    None => unreadable.push(offset),
                },
                Kind::Progress => {
                    let mut reader = Reader::new(payload);
                    while let Some((of, newer)) = Progress::decode(&mut reader) {
                        if let Some(known) = progress.get_mut(&of) {
                            *known = merge(known, &newer);
                        }
                    }
                }
            },
        )?;
        self.commit = self.commit.max(scan.commit);
        let name = log_name(base);
        for offset in unreadable {
            self.corrupt
                .push(format!("{name} at byte {offset}: not a record of this version"));
        }
        for damage in &scan.damage {
            let (from, to) = (damage.events.start, damage.events.end);
            let what = format!(
                "{name} at bytes {} to {}, events {from} to {to}",
                damage.from, damage.to
            );
            let acknowledged = limit.unwrap_or(known_next).0;
            if damage.torn && from >= acknowledged {
                tracing::warn!(place = %what, "a commit was cut short; it was never acknowledged");
            } else {
                self.corrupt.push(what);
                // Somebody may have seen these events: their positions are not given out again.
                self.next = self.next.max(to);
            }
        }
        // What is behind the last record is of no use to anyone.
        segment.file.truncate(scan.end)?;
        segment.has_tail();
        if let Err(e) = segment.seal(disk) {
            // A full disk, most likely. The index stays in memory; the next start reads the segment again.
            tracing::warn!(?segment, error = %e, "cannot write a segment's index");
        }
        Ok(segment)
    }
}

/// A spare file is a segment if it has a head: its new name was lost. Otherwise it is nothing.
fn settle_spares(disk: &dyn Disk, identity: u64) -> io::Result<()> {
    for name in SPARE_NAMES {
        let file = match disk.open(name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        if let Some(head) = Head::read(&*file)?
            && head.identity == identity
            // A segment that has its name was begun after the spare had failed.
            && disk.open(&log_name(head.base)).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
        {
            disk.rename(name, &log_name(head.base))?;
        }
    }
    Ok(())
}

/// What is settled stays settled: a position is open only if neither of the two knows better.
fn merge(a: &Progress, b: &Progress) -> Progress {
    let (low, high) = if a.frontier <= b.frontier { (a, b) } else { (b, a) };
    let low_open: FxHashSet<Position> = low.open.iter().copied().collect();
    let open = high.open.iter().copied();
    Progress {
        frontier: high.frontier,
        open: open
            .filter(|p| *p >= low.frontier || low_open.contains(p))
            .collect(),
    }
}

impl Shared {
    /// Builds the subscriptions' queues from how far they had come and what the segments hold.
    fn restore(
        &self,
        progress: FxHashMap<SubscriptionId, Progress>,
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
        let mut ages = Ages::default();
        let mut subs = self.subs.write().expect("no panic holds it");
        for (of, progress) in progress {
            self.redelivered.fetch_add(progress.open.len() as u64, Relaxed);
            let interrupted = !progress.open.is_empty();
            let mut queue = Queue::new(progress);
            match waiting.get(&of) {
                Some((count, last)) => {
                    let since = ages.first_from(&segments, of, queue.lowest());
                    queue.recovered(*count, *last, since);
                }
                // Their record is damaged; reading the log will show it.
                None if interrupted => queue.recovered(0, Position(0), None),
                None => {}
            }
            subs.insert(
                of,
                Arc::new(Sub {
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

/// When records were received: those that are the first of many subscriptions are read once.
#[derive(Default)]
struct Ages(FxHashMap<(Position, u32), Option<Timestamp>>);

impl Ages {
    /// When the first event of a subscription at or after `from` was received. None if it cannot be read: it is
    /// only shown to people.
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
                // It begins before, and may end before.
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

/// How many events of a subscription a segment holds from `from` on.
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
