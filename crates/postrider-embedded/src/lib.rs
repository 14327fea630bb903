//! The stores on local files: a segmented log for events, and redb for small, ordered data.

pub mod disk;
mod block_file;
mod pages;
pub mod generations;
mod entry_cache;
pub mod record;
pub mod segment;
mod queue;
pub mod database;
mod state;
mod writer;
mod settler;
mod losses;
pub mod segment_gaps;
mod recover;
mod export;
mod catalog;
mod archive;
pub mod restore;
mod scrub;

pub use archive::EmbeddedArchive;
pub use catalog::{EmbeddedCatalog, catalog_key, rewrite_catalog};
pub use disk::{compact, erase, replace_with};
pub use recover::{Examination, examine};
pub use scrub::{Scrub, ScrubStep};

use async_trait::async_trait;
use disk::{Disk, DiskFile};
use entry_cache::EntryCache;
use generations::Generations;
use losses::Loss;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::NextStep;
use postrider_core::time::Timestamp;
use postrider_store::log::LostEvents;
use postrider_store::moving::MovableLog;
use postrider_store::{
    Backlog, Claim, ClaimLimits, DeadLetterKey, Error, EventLog, LogEntry, LogHealth, LogListener,
    PendingDeadLetter, PendingDeadLetters, Settlement,
};
use queue::{DeliveryQueue, DueRetry, HOT_BYTES_MAX, LoadedBytes, ReadyEvent};
use record::RecordKind;
use rustc_hash::FxHashMap;
use segment::Segment;
use settler::{Settler, SettlerRequest, Withdrawal};
use state::{DeadLetterRow, StateDatabase, StateWrite};
use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed},
};
use std::sync::{Arc, Mutex, OnceLock, RwLock, mpsc};
use std::thread::JoinHandle;
use tokio::sync::{Semaphore, oneshot};
use writer::{CommittedEntry, LogAppend, LogWriter, WriterRequest};

/// Bytes of publish requests on their way to the disk; beyond it publishers are asked to retry
/// later.
const APPENDING_BYTES_MAX: usize = 32 << 20;
/// A lagging subscription reads about this many bytes of the log at once …
const LAG_BYTES: usize = 512 << 10;
/// … from at most this many records.
const LAG_RECORDS: usize = 1024;
/// Number of due retries that are loaded into memory at once.
const DUE_MAX: usize = 256;
/// Beyond this many bytes of retries that are read and not claimed, all subscriptions together, each reads one retry
/// at a time.
const DUE_BYTES_MAX: usize = 32 << 20;
/// Subscriptions that read retries from the disk at the same time, and as many again that read first attempts: what
/// is read is in memory before it is known whether it may be sent.
const LOADING_MAX: usize = 16;
/// Number of dead letters that are looked up at once …
const LETTER_ROWS: usize = 1024;
/// … and the total size of the records that they are read from, unless more is wanted.
const LETTER_RECORD_BYTES: usize = 16 << 20;
/// Settled claims on their way to the state database.
const SETTLING_MAX: usize = 1 << 16;
/// Number of damaged places that are remembered by location; all are counted and logged.
const CORRUPT_REMEMBERED: usize = 64;

struct SubscriptionState {
    of: SubscriptionId,
    queue: Mutex<DeliveryQueue>,
}

struct LogShared {
    disk: Arc<dyn Disk>,
    state: StateDatabase,
    identity: u64,
    /// The position of the next event.
    next: AtomicU64,
    segments: RwLock<BTreeMap<u64, Arc<Segment>>>,
    entries: EntryCache,
    /// An empty file for the next segment.
    spare: Mutex<Option<(&'static str, Arc<dyn DiskFile>)>>,
    /// Number of spare files so far, which alternates their names.
    spares: AtomicUsize,
    references: Mutex<FxHashMap<u64, u64>>,
    /// Segments according to the state database.
    recorded: Mutex<segment_gaps::RecordedSegments>,
    /// For subscriptions with dead letters: when the first was given up, and their number.
    letters: Mutex<BTreeMap<SubscriptionId, (Timestamp, u64)>>,
    subs: RwLock<FxHashMap<SubscriptionId, Arc<SubscriptionState>>>,
    /// Due time of each subscription's next retry.
    heads: Mutex<BTreeSet<(Timestamp, SubscriptionId)>>,
    listed: Mutex<Vec<Arc<SubscriptionState>>>,
    listed_rows: Mutex<Vec<Arc<SubscriptionState>>>,
    hot_bytes: AtomicUsize,
    /// Requests that were read for retries which are not claimed yet.
    due_bytes: Arc<AtomicUsize>,
    appending_bytes: AtomicUsize,
    refusing: Mutex<Option<String>>,
    corrupt: Mutex<Vec<String>>,
    corrupt_records: AtomicU64,
    corrupt_deliveries: AtomicU64,
    /// Damaged places that the state database has not recorded yet.
    unrecorded_damage: Mutex<Vec<Loss>>,
    /// Why settlements cannot be recorded, while that is so.
    state_trouble: Mutex<Option<String>>,
    /// Lost events found at this start or an earlier one.
    lost: Vec<LostEvents>,
    redelivered: AtomicU64,
    /// Set when the state database is no longer waited for.
    closing: AtomicBool,
    /// Set when nothing is written to the log any more.
    writer_ended: AtomicBool,
    writer: mpsc::Sender<WriterRequest>,
    listener: OnceLock<Arc<dyn LogListener>>,
}

/// The event log on local files.
pub struct EmbeddedLog {
    shared: Arc<LogShared>,
    settler: mpsc::Sender<SettlerRequest>,
    settling: Arc<Semaphore>,
    loading_due: Semaphore,
    loading_lag: Semaphore,
    threads: Mutex<Vec<JoinHandle<()>>>,
    acknowledging: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

impl EmbeddedLog {
    /// Opens the log in `directory` and repairs what a crash left behind. A new log takes
    /// `fresh_identity` as its identity. Must be called within a tokio runtime.
    pub async fn open(directory: &Path, fresh_identity: u64) -> Result<EmbeddedLog, Error> {
        EmbeddedLog::open_with(directory, fresh_identity, Arc::default()).await
    }

    /// Like `open`, next to other files that record each other's generations.
    pub async fn open_with(
        directory: &Path,
        fresh_identity: u64,
        generations: Arc<Generations>,
    ) -> Result<EmbeddedLog, Error> {
        let unusable = |e: io::Error| Error::Unavailable(format!("{}: {e}", directory.display()));
        let disk = disk::LocalDirectory::open(directory.join("log")).map_err(unusable)?;
        let state = directory.join("state.redb");
        EmbeddedLog::open_all(
            Arc::new(disk),
            &state,
            fresh_identity,
            segment::SEGMENT_BYTES_MAX,
            generations,
        )
        .await
    }

    /// Like `open`, on an injected disk, with segments that are closed before they grow beyond
    /// `segment_bytes_max`.
    pub async fn open_on(
        disk: Arc<dyn Disk>,
        state: &Path,
        fresh_identity: u64,
        segment_bytes_max: u64,
    ) -> Result<EmbeddedLog, Error> {
        EmbeddedLog::open_all(disk, state, fresh_identity, segment_bytes_max, Arc::default()).await
    }

    async fn open_all(
        disk: Arc<dyn Disk>,
        state: &Path,
        fresh_identity: u64,
        segment_bytes_max: u64,
        generations: Arc<Generations>,
    ) -> Result<EmbeddedLog, Error> {
        let (to_writer, writer_requests) = mpsc::channel();
        let (to_settler, settler_requests) = mpsc::channel();
        let (committed, commits) = tokio::sync::mpsc::unbounded_channel();
        let state_path = state.to_owned();
        let recovered = tokio::task::spawn_blocking(move || {
            recover::recover(disk, &state_path, fresh_identity, generations, to_writer)
        });
        let recovered = recovered.await.map_err(|_| Error::Closed)??;
        let shared = recovered.shared;
        let writer = LogWriter {
            shared: shared.clone(),
            requests: writer_requests,
            committed,
            settler: to_settler.clone(),
            segment: recovered.segment,
            offset: segment::FIRST_RECORD,
            allocated: segment::FIRST_RECORD,
            commit: recovered.commit,
            next: Position(shared.next.load(Relaxed)),
            spoiled: false,
            segment_bytes_max,
        };
        let settler = Settler {
            shared: shared.clone(),
            requests: settler_requests,
        };
        let thread = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let builder = std::thread::Builder::new().name(name.to_owned());
            builder
                .spawn(work)
                .map_err(|e| Error::Unavailable(format!("starting the {name} thread: {e}")))
        };
        // The settler's first task is to create a spare segment.
        let _ = to_settler.send(SettlerRequest::Checkpoint);
        let threads = vec![
            thread("log-writer", Box::new(move || writer.run()))?,
            thread("settler", Box::new(move || settler.run()))?,
        ];
        #[expect(clippy::disallowed_methods, reason = "joined by close()")]
        let acknowledging = tokio::spawn(acknowledge(shared.clone(), commits));
        Ok(EmbeddedLog {
            shared,
            settler: to_settler,
            settling: Arc::new(Semaphore::new(SETTLING_MAX)),
            loading_due: Semaphore::new(LOADING_MAX),
            loading_lag: Semaphore::new(LOADING_MAX),
            threads: Mutex::new(threads),
            acknowledging: Mutex::new(Some(acknowledging)),
        })
    }
}

impl EmbeddedLog {
    /// A scrub of the whole log and of the databases next to it.
    pub fn scrub(&self, catalog: &EmbeddedCatalog, archive: &EmbeddedArchive) -> Scrub {
        Scrub::new(self.shared.clone(), catalog, archive)
    }
}

/// A log that is dropped without `close` stops as after a crash: what is not written is not
/// durable.
impl Drop for EmbeddedLog {
    fn drop(&mut self) {
        self.shared.closing.store(true, Relaxed);
        let _ = self
            .shared
            .writer
            .send(WriterRequest::Close(oneshot::channel().0));
        let _ = self.settler.send(SettlerRequest::Close(oneshot::channel().0));
    }
}

/// Passes each commit on, first to the subscriptions and then to the publishers that wait for it.
async fn acknowledge(
    shared: Arc<LogShared>,
    mut commits: tokio::sync::mpsc::UnboundedReceiver<Vec<CommittedEntry>>,
) {
    while let Some(group) = commits.recv().await {
        for committed in group {
            shared.append_ended(committed.bytes);
            shared.hand_out(&shared.entries.share(committed.entry.clone()));
            // The publisher may have gone away; the events are stored all the same.
            let _ = committed.done.send(Ok(committed.entry.first));
        }
    }
}

impl LogShared {
    fn sub(&self, of: SubscriptionId) -> Option<Arc<SubscriptionState>> {
        self.subs.read().expect("no panic holds it").get(&of).cloned()
    }

    /// Queues a new entry's events, in order, for every subscription that they matched.
    fn hand_out(&self, entry: &Arc<LogEntry>) {
        let batch = &entry.batch;
        let mut several = Vec::new();
        let ids = match &*batch.matched {
            [one] => one,
            sets => {
                several.extend(sets.iter().flatten().copied());
                several.sort_unstable();
                several.dedup();
                &several[..]
            }
        };
        for of in ids {
            let Some(sub) = self.sub(*of) else {
                continue;
            };
            let mut count = 0;
            {
                let mut queue = sub.queue.lock().expect("no panic holds it");
                for index in 0..batch.events.len() {
                    let ours = batch.matched.len() == 1 || batch.matched(index).contains(of);
                    if ours && !queue.closed {
                        let room = self.hot_bytes.load(Relaxed) < HOT_BYTES_MAX;
                        let ready = ReadyEvent {
                            entry: entry.clone(),
                            index: index as u32,
                        };
                        self.hot_bytes.fetch_add(queue.push(ready, room), Relaxed);
                        count += 1;
                    }
                }
            }
            self.tell_ready(*of, count);
        }
    }

    fn tell_ready(&self, of: SubscriptionId, count: usize) {
        if count > 0
            && let Some(listener) = self.listener.get()
        {
            listener.ready(of, count);
        }
    }

    fn append_ended(&self, bytes: usize) {
        self.appending_bytes.fetch_sub(bytes, Relaxed);
    }

    fn refusing(&self) -> Option<String> {
        self.refusing.lock().expect("no panic holds it").clone()
    }

    fn set_refusing(&self, reason: Option<String>) {
        *self.refusing.lock().expect("no panic holds it") = reason;
    }

    fn add_segment(&self, segment: Arc<Segment>) {
        let mut segments = self.segments.write().expect("no panic holds it");
        segments.insert(segment.base.0, segment);
    }

    /// Whether this segment has been neither deleted nor replaced.
    fn is_current(&self, segment: &Arc<Segment>) -> bool {
        let segments = self.segments.read().expect("no panic holds it");
        segments
            .get(&segment.base.0)
            .is_some_and(|known| Arc::ptr_eq(known, segment))
    }

    fn last_segment_base(&self) -> Position {
        let segments = self.segments.read().expect("no panic holds it");
        Position(segments.keys().next_back().copied().unwrap_or(0))
    }

    fn segment_of(&self, position: Position) -> Option<Arc<Segment>> {
        let segments = self.segments.read().expect("no panic holds it");
        let (_, segment) = segments.range(..=position.0).next_back()?;
        Some(segment.clone())
    }

    /// Returns whether there are segments that nothing refers to any more.
    fn note_references(&self, changed: FxHashMap<u64, u64>) -> bool {
        let mut references = self.references.lock().expect("no panic holds it");
        let mut released = false;
        for (segment, count) in changed {
            if count == 0 {
                released |= references.remove(&segment).is_some();
            } else {
                references.insert(segment, count);
            }
        }
        released
    }

    fn note_letters(&self, changed: FxHashMap<SubscriptionId, Option<(Timestamp, u64)>>) {
        let mut letters = self.letters.lock().expect("no panic holds it");
        for (of, waiting) in changed {
            match waiting {
                Some(waiting) => letters.insert(of, waiting),
                None => letters.remove(&of),
            };
        }
    }

    fn note_oldest_retries(&self, changed: FxHashMap<SubscriptionId, Option<Timestamp>>) {
        for (of, oldest) in changed {
            if let Some(sub) = self.sub(of) {
                sub.queue.lock().expect("no panic holds it").oldest_retry = oldest;
            }
        }
    }

    fn note_corrupt(&self, place: String) {
        tracing::error!(%place, "damaged record in the log; it is not served");
        self.add_corrupt(place);
    }

    /// Whether a place is among those that [`LogShared::corrupt`] remembers.
    fn knows_corrupt(&self, place: &str) -> bool {
        let corrupt = self.corrupt.lock().expect("no panic holds it");
        corrupt.iter().any(|known| known == place)
    }

    /// Records a damaged place, for this process and later ones.
    fn add_corrupt(&self, place: String) {
        if self.remember_corrupt(place.clone()) {
            let mut unrecorded = self.unrecorded_damage.lock().expect("no panic holds it");
            unrecorded.push(Loss::Damage(place));
            // Fails only while the store shuts down.
            let _ = self.writer.send(WriterRequest::CheckpointDue);
        }
    }

    /// Returns whether the place is new and was remembered.
    fn remember_corrupt(&self, place: String) -> bool {
        self.corrupt_records.fetch_add(1, Relaxed);
        let mut corrupt = self.corrupt.lock().expect("no panic holds it");
        let is_new = corrupt.len() < CORRUPT_REMEMBERED && !corrupt.contains(&place);
        if is_new {
            corrupt.push(place);
        }
        is_new
    }

    /// Damaged places found since the last recording.
    fn take_unrecorded_damage(&self) -> Vec<Loss> {
        std::mem::take(&mut *self.unrecorded_damage.lock().expect("no panic holds it"))
    }

    /// Records why the state database cannot be used, or with `None` that it can be again.
    fn set_state_trouble(&self, trouble: Option<String>) {
        *self.state_trouble.lock().expect("no panic holds it") = trouble;
    }

    /// Reports damage of the state database that is noticed during operation.
    fn note_state_error(&self, error: &Error) {
        let is_damage = matches!(error, Error::Corrupt(_)) || error.to_string().contains("is damaged");
        let place = format!("state.redb: {error}");
        if is_damage && !self.knows_corrupt(&place) {
            tracing::error!(%place, "the state database is damaged; retries and dead letters behind it wait");
            self.add_corrupt(place);
        }
    }

    /// Changes a queue and updates when its next retry comes due.
    fn change<T>(&self, sub: &SubscriptionState, change: impl FnOnce(&mut DeliveryQueue) -> T) -> T {
        let mut queue = sub.queue.lock().expect("no panic holds it");
        let before = queue.retry_head;
        let result = change(&mut queue);
        // The queue must still be locked: two concurrent changes must reach `heads` in the same
        // order.
        let changed = self.move_head(sub.of, before, queue.retry_head);
        drop(queue);
        if changed && let Some(listener) = self.listener.get() {
            listener.due_changed();
        }
        result
    }

    /// Changes a queue after a settlement and schedules its progress to be written.
    fn settled(&self, sub: &Arc<SubscriptionState>, change: impl FnOnce(&mut DeliveryQueue)) {
        let (list, list_row) = self.change(sub, |queue| {
            if queue.closed {
                return (false, false);
            }
            change(queue);
            let list = !std::mem::replace(&mut queue.listed, true);
            let list_row = !std::mem::replace(&mut queue.listed_row, true);
            (list, list_row)
        });
        if list_row {
            self.listed_rows
                .lock()
                .expect("no panic holds it")
                .push(sub.clone());
        }
        if list {
            let mut listed = self.listed.lock().expect("no panic holds it");
            listed.push(sub.clone());
            if listed.len() == 1 {
                // The writer may be asleep. One wake-up per progress record is enough.
                let _ = self.writer.send(WriterRequest::Progress);
            }
        }
    }

    /// Returns whether the earliest due time of all subscriptions has changed.
    fn move_head(&self, of: SubscriptionId, before: Option<Timestamp>, after: Option<Timestamp>) -> bool {
        if before == after {
            return false;
        }
        let mut heads = self.heads.lock().expect("no panic holds it");
        let earliest = heads.first().map(|head| head.0);
        if let Some(before) = before {
            heads.remove(&(before, of));
        }
        if let Some(after) = after {
            heads.insert((after, of));
        }
        heads.first().map(|head| head.0) != earliest
    }

    /// Encodes the progress of the listed subscriptions as the payload of a record; also returns
    /// whether that is all of them. Those that do not fit into `bytes_max` stay listed.
    fn take_progress(&self, bytes_max: usize) -> (Vec<u8>, bool) {
        let mut listed = std::mem::take(&mut *self.listed.lock().expect("no panic holds it"));
        let mut payload = Vec::new();
        if !listed.is_empty() {
            let durable = record::SubscriptionProgress {
                frontier: Position(self.state.generation()),
                open: Vec::new(),
            };
            durable.encode(record::STATE_GENERATION, &mut payload);
        }
        let mut taken = 0;
        for sub in &listed {
            if payload.len() >= bytes_max {
                break;
            }
            taken += 1;
            let mut queue = sub.queue.lock().expect("no panic holds it");
            queue.listed = false;
            if !queue.closed {
                queue.progress(&Default::default()).encode(sub.of, &mut payload);
            }
        }
        listed.drain(..taken);
        let is_all = listed.is_empty();
        if !is_all {
            // Put these before the ones that were listed meanwhile.
            let mut newer = self.listed.lock().expect("no panic holds it");
            listed.append(&mut newer);
            *newer = listed;
        }
        (payload, is_all)
    }

    fn take_rows(&self) -> Vec<Arc<SubscriptionState>> {
        let rows = std::mem::take(&mut *self.listed_rows.lock().expect("no panic holds it"));
        for sub in &rows {
            sub.queue.lock().expect("no panic holds it").listed_row = false;
        }
        rows
    }

    /// Deletes segments that nobody needs any more, oldest first.
    fn sweep(&self) {
        let done = self.unneeded_segments();
        if done.is_empty() {
            return;
        }
        // Forget the segments before their files are deleted: a recorded segment without a file
        // counts as a loss.
        let bases: Vec<u64> = done.iter().map(|segment| segment.base.0).collect();
        let forgotten = self
            .state
            .write(&[StateWrite::SegmentsGone(bases.clone())])
            .is_ok();
        if forgotten {
            let mut recorded = self.recorded.lock().expect("no panic holds it");
            recorded.retain(|base, _| !bases.contains(base));
        }
        self.remove_segments(done, forgotten);
    }

    /// Like `sweep`, while the state database cannot be written, perhaps because the disk is full.
    fn sweep_without_state(&self) {
        self.remove_segments(self.unneeded_segments(), false);
    }

    fn unneeded_segments(&self) -> Vec<Arc<Segment>> {
        let segments: Vec<Arc<Segment>> = {
            let segments = self.segments.read().expect("no panic holds it");
            let sealed = segments.len().saturating_sub(1);
            segments.values().take(sealed).cloned().collect()
        };
        segments.into_iter().filter(|one| !self.is_needed(one)).collect()
    }

    fn remove_segments(&self, done: Vec<Arc<Segment>>, forgotten: bool) {
        for segment in done {
            let removed = match forgotten {
                true => segment.remove(&*self.disk),
                // The next start finds the emptied file and does not count the segment as lost.
                false => segment.retire(&*self.disk),
            };
            if let Err(e) = removed {
                tracing::warn!(?segment, error = %e, "cannot delete a segment that is done");
                continue;
            }
            self.segments
                .write()
                .expect("no panic holds it")
                .remove(&segment.base.0);
        }
    }

    /// Whether a retry, a dead letter or a first attempt still needs the segment.
    fn is_needed(&self, segment: &Segment) -> bool {
        let references = self.references.lock().expect("no panic holds it");
        if references.contains_key(&segment.base.0) {
            return true;
        }
        drop(references);
        let needed = segment.find_subscription(|of, last| {
            self.sub(of)
                .is_some_and(|sub| sub.queue.lock().expect("no panic holds it").needs(last))
        });
        needed.is_some()
    }

    /// The active segment if it contains no event at shutdown: its file may be deleted.
    fn empty_at_end(&self) -> Option<u64> {
        let segments = self.segments.read().expect("no panic holds it");
        let (base, active) = segments.last_key_value()?;
        (self.writer_ended.load(Acquire) && active.end() == active.base).then_some(*base)
    }

    /// Segments started or closed since the last recording. The active segment has no end yet,
    /// except at shutdown.
    fn take_unrecorded(&self) -> Vec<(u64, u64)> {
        let segments = self.segments.read().expect("no panic holds it");
        let active = segments.keys().next_back().copied();
        let is_written_to = !self.writer_ended.load(Acquire);
        let mut recorded = self.recorded.lock().expect("no panic holds it");
        let mut changed = Vec::new();
        for (base, segment) in segments.iter() {
            let end = match is_written_to && Some(*base) == active {
                true => *base,
                false => segment.end().0,
            };
            if recorded.insert(*base, end) != Some(end) {
                changed.push((*base, end));
            }
        }
        changed
    }

    /// Reads events of a lagging subscription from the log up to `last`. Returns them and the
    /// position to continue from.
    fn load(
        &self,
        sub: &SubscriptionState,
        from: Position,
        last: Position,
    ) -> io::Result<(Vec<ReadyEvent>, Position)> {
        let mut from = from;
        while from <= last {
            let Some(segment) = self.segment_of_or_after(from) else {
                break;
            };
            let end = segment.end();
            // An additional entry shows where the last one read ends for this subscription.
            let mut entries = segment.entries(sub.of, from, LAG_RECORDS + 1)?;
            let beyond = entries.get(LAG_RECORDS).map(|entry| entry.first);
            entries.truncate(LAG_RECORDS);
            let read = self.read_entries(&segment, &entries)?;
            let next = entries.get(read.len()).map(|entry| entry.first).or(beyond);
            let mut ready = Vec::new();
            for (entry, found) in read.into_iter().zip(&entries) {
                let first = Position(segment.base.0 + u64::from(found.first));
                let Some(entry) = entry else {
                    self.note_corrupt(format!(
                        "{} at byte {}, event {first} and following",
                        segment::log_name(segment.base),
                        found.offset
                    ));
                    self.corrupt_deliveries
                        .fetch_add(u64::from(found.matches), Relaxed);
                    continue;
                };
                let queue = sub.queue.lock().expect("no panic holds it");
                for index in 0..entry.batch.events.len() {
                    let one = ReadyEvent {
                        entry: entry.clone(),
                        index: index as u32,
                    };
                    let position = one.position();
                    let ours =
                        position >= from && position <= last && entry.batch.matched(index).contains(&sub.of);
                    if ours && queue.wants(position) {
                        ready.push(one);
                    }
                }
            }
            let upto = next.map_or(end, |next| Position(segment.base.0 + u64::from(next)));
            let upto = upto.max(from).min(Position(last.0 + 1));
            if !ready.is_empty() {
                return Ok((ready, upto));
            }
            if upto == from {
                break;
            }
            from = upto;
        }
        // No event in the range could be read.
        Ok((Vec::new(), Position(last.0 + 1)))
    }

    /// Reads about [`LAG_BYTES`] of a segment's entries, at least one, in order; `None` for a
    /// damaged one.
    fn read_entries(
        &self,
        segment: &Segment,
        found: &[segment::IndexEntry],
    ) -> io::Result<Vec<Option<Arc<LogEntry>>>> {
        let cached = |one: &segment::IndexEntry| {
            let first = Position(segment.base.0 + u64::from(one.first));
            self.entries.find(first)
        };
        // Only the first entry is looked up: a subscription with large events reads them one at a
        // time.
        if let Some(entry) = found.first().and_then(cached) {
            return Ok(vec![Some(entry)]);
        }
        let offsets: Vec<u64> = found.iter().map(|one| u64::from(one.offset)).collect();
        let records = segment.read_many(&offsets, LAG_BYTES)?;
        let entry = |(offset, record): (u64, Option<segment::VerifiedRecord>)| {
            let (header, payload) = record?;
            self.entry(offset, &header, &payload)
        };
        Ok(records.into_iter().map(entry).collect())
    }

    fn segment_of_or_after(&self, position: Position) -> Option<Arc<Segment>> {
        let segments = self.segments.read().expect("no panic holds it");
        let before = segments.range(..=position.0).next_back();
        let fits =
            before.filter(|(base, s)| s.end() > position || segments.range(*base + 1..).next().is_none());
        let found = fits.or_else(|| segments.range(position.0..).next())?;
        Some(found.1.clone())
    }

    fn entry(
        &self,
        offset: u64,
        header: &record::RecordHeader,
        payload: &bytes::Bytes,
    ) -> Option<Arc<LogEntry>> {
        (header.kind == RecordKind::Batch).then_some(())?;
        let batch = record::decode_batch(payload)?;
        Some(self.entries.share(Arc::new(LogEntry {
            batch,
            first: header.first,
            place: offset,
        })))
    }

    /// Loads due retries into memory.
    fn load_due(&self, sub: &SubscriptionState, now: Timestamp) -> Result<LoadedRetries, Error> {
        let held = |due, position| {
            let queue = sub.queue.lock().expect("no panic holds it");
            queue.is_held(due, position)
        };
        let (entries, head) = self.state.due(sub.of, now, DUE_MAX, held)?;
        let mut loaded = LoadedRetries {
            retries: Vec::with_capacity(entries.len()),
            lost: Vec::new(),
            head,
        };
        let mut bytes = 0;
        for retry in entries {
            let is_full = self.due_bytes.load(Relaxed) > DUE_BYTES_MAX && !loaded.retries.is_empty();
            if bytes > LAG_BYTES || is_full {
                loaded.head = Some(retry.due);
                break;
            }
            // Events of one publish request often fail together, so their record is read once.
            let known = loaded.retries.last().filter(|last| {
                last.ready.entry.place == u64::from(retry.offset) && last.retry.segment == retry.segment
            });
            let entry = match known {
                Some(last) => Some(last.ready.entry.clone()),
                None => self
                    .read_entry(&retry)
                    .map_err(|e| Error::Unavailable(format!("reading the log: {e}")))?,
            };
            match entry.filter(|entry| (retry.index as usize) < entry.batch.events.len()) {
                Some(entry) => {
                    // The request is kept whole, and once for all subscriptions that have it in memory.
                    let counted = match known {
                        Some(last) => last.loaded.clone(),
                        None => {
                            let size = entry.batch.memory_len();
                            bytes += size;
                            let is_new = Arc::strong_count(&entry) == 1;
                            is_new.then(|| Arc::new(LoadedBytes::new(size, &self.due_bytes)))
                        }
                    };
                    let ready = ReadyEvent {
                        entry,
                        index: retry.index,
                    };
                    loaded.retries.push(DueRetry {
                        ready,
                        retry,
                        loaded: counted,
                    });
                }
                None => {
                    let place = segment::log_name(retry.segment);
                    self.note_corrupt(format!(
                        "{place} at byte {}, event {}",
                        retry.offset, retry.position
                    ));
                    loaded.lost.push(retry);
                }
            }
        }
        Ok(loaded)
    }

    /// Reads the due time of a subscription's next retry if the known one is outdated.
    fn read_head(&self, sub: &SubscriptionState) {
        loop {
            let changes = sub.queue.lock().expect("no panic holds it").must_read_head();
            let Some(changes) = changes else { return };
            let held = |due, position| {
                let queue = sub.queue.lock().expect("no panic holds it");
                queue.is_held(due, position)
            };
            match self.state.due(sub.of, Timestamp::MIN, 0, held) {
                Ok((_, head)) => self.change(sub, |queue| queue.head_read(head, changes)),
                Err(e) => {
                    // The known time is at worst too early, which is corrected when it comes.
                    tracing::debug!(error = %e, "cannot read when the next retry comes due");
                    return;
                }
            }
        }
    }

    /// Reads dead letters with their events, each record once.
    fn load_letters(
        &self,
        of: SubscriptionId,
        mut after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<LoadedDeadLetters, Error> {
        let mut loaded = LoadedDeadLetters::default();
        let mut records: FxHashMap<(Position, u32), Option<Arc<LogEntry>>> = FxHashMap::default();
        let record_bytes_max = LETTER_RECORD_BYTES.max(want.bytes_max);
        let mut record_bytes = 0;
        let mut bytes = 0;
        loop {
            let rows_max = LETTER_ROWS.min(want.events_max - loaded.letters.len());
            let rows = self.state.letters(of, after, until, rows_max)?;
            for row in &rows {
                let delivery = &row.delivery;
                let entry = match records.entry((delivery.segment, delivery.offset)) {
                    Occupied(read) => read.into_mut(),
                    Vacant(unread) => {
                        // The whole record stays in memory, however few of its events are dead
                        // letters.
                        if record_bytes >= record_bytes_max && !loaded.letters.is_empty() {
                            return Ok(loaded);
                        }
                        let entry = self.read_entry(delivery);
                        let entry = entry.map_err(|e| Error::Unavailable(format!("reading the log: {e}")))?;
                        record_bytes += entry.as_ref().map_or(0, |entry| entry.batch.body.len());
                        unread.insert(entry)
                    }
                };
                let index = delivery.index as usize;
                let Some(entry) = entry.as_ref().filter(|entry| index < entry.batch.events.len()) else {
                    // The dead letter may have been removed meanwhile, together with its segment:
                    // that is no loss.
                    if self.state.has_letter(of, row.key())? {
                        loaded.lost.push(*row);
                    }
                    continue;
                };
                let size = entry.batch.events[index].object.len as usize + want.overhead;
                if !loaded.letters.is_empty() && bytes + size > want.bytes_max {
                    return Ok(loaded);
                }
                bytes += size;
                loaded.letters.push(letter(row, entry.clone()));
            }
            after = rows.last().map(DeadLetterRow::key);
            if rows.len() < rows_max || loaded.letters.len() == want.events_max {
                return Ok(loaded);
            }
        }
    }

    /// Counts dead letters whose events cannot be read any more, and reports their records.
    fn note_lost(&self, lost: &[DeadLetterRow]) {
        self.corrupt_deliveries.fetch_add(lost.len() as u64, Relaxed);
        for same in lost.chunk_by(|a, b| {
            (a.delivery.segment, a.delivery.offset) == (b.delivery.segment, b.delivery.offset)
        }) {
            let first = &same[0].delivery;
            let place = segment::log_name(first.segment);
            self.note_corrupt(format!(
                "{place} at byte {}, event {} and following",
                first.offset, first.position
            ));
        }
    }

    /// The entry of a retry or a dead letter; `None` if it cannot be read any more.
    fn read_entry(&self, retry: &state::RetryEntry) -> io::Result<Option<Arc<LogEntry>>> {
        let segment = self
            .segments
            .read()
            .expect("no panic holds it")
            .get(&retry.segment.0)
            .cloned();
        let Some(segment) = segment else {
            return Ok(None);
        };
        let first = Position(retry.position.0.saturating_sub(u64::from(retry.index)));
        if let Some(entry) = self.entries.find(first) {
            return Ok(Some(entry));
        }
        match segment.read(u64::from(retry.offset)) {
            Ok((header, payload)) => Ok(self.entry(u64::from(retry.offset), &header, &payload)),
            Err(segment::ReadError::Damaged) => Ok(None),
            Err(segment::ReadError::Io(e)) => Err(e),
        }
    }
}

/// Dead letters with their events.
#[derive(Default)]
struct LoadedDeadLetters {
    letters: Vec<PendingDeadLetter>,
    /// Dead letters whose event cannot be read any more.
    lost: Vec<DeadLetterRow>,
}

/// Due retries loaded into memory.
struct LoadedRetries {
    retries: Vec<DueRetry>,
    /// Retries whose event cannot be read any more.
    lost: Vec<state::RetryEntry>,
    /// Due time of the next retry after these.
    head: Option<Timestamp>,
}

fn fresh_claim(ready: ReadyEvent) -> Claim {
    Claim {
        entry: ready.entry,
        index: ready.index,
        attempts_made: 0,
        last_attempt: None,
        due: None,
    }
}

fn letter(row: &DeadLetterRow, entry: Arc<LogEntry>) -> PendingDeadLetter {
    PendingDeadLetter {
        entry,
        index: row.delivery.index,
        attempts_made: row.delivery.attempts_made,
        last_attempt: row.delivery.last,
        reason: row.reason,
        decided: row.delivery.due,
    }
}

fn retry_claim(due: DueRetry) -> Claim {
    Claim {
        entry: due.ready.entry,
        index: due.ready.index,
        attempts_made: due.retry.attempts_made,
        last_attempt: due.retry.last,
        due: Some(due.retry.due),
    }
}

impl EmbeddedLog {
    /// Loads from the disk what claiming needs next. Returns false when there is nothing to load.
    async fn load(&self, sub: &Arc<SubscriptionState>, now: Timestamp) -> Result<bool, Error> {
        let (range, due) = {
            let mut queue = sub.queue.lock().expect("no panic holds it");
            if queue.closed {
                return Ok(false);
            }
            let due = queue.must_load_due(now);
            if due {
                queue.load_due();
            }
            let range = queue.must_load();
            queue.loading |= range.is_some();
            (range, due)
        };
        if range.is_none() && !due {
            return Ok(false);
        }
        // Separate permits: retries of very many subscriptions that come due together must not
        // delay first attempts.
        let turns = if due { &self.loading_due } else { &self.loading_lag };
        let _turn = turns.acquire().await;
        let (shared, sub, settler) = (self.shared.clone(), sub.clone(), self.settler.clone());
        let work = tokio::task::spawn_blocking(move || {
            let mut count = 0;
            let mut result = Ok(());
            if due {
                let mut loaded = shared.load_due(&sub, now);
                shared.change(&sub, |queue| match &mut loaded {
                    Ok(loaded) if !queue.closed => {
                        queue.loaded_due(&mut loaded.retries, &mut loaded.lost, loaded.head);
                        count += loaded.retries.len();
                    }
                    _ => queue.loading_due_ended(),
                });
                shared.read_head(&sub);
                match loaded {
                    Ok(loaded) if !loaded.lost.is_empty() => {
                        shared
                            .corrupt_deliveries
                            .fetch_add(loaded.lost.len() as u64, Relaxed);
                        // Fails only while the store shuts down.
                        let _ = settler.send(SettlerRequest::Lost(sub.clone(), loaded.lost));
                    }
                    Ok(_) => {}
                    Err(e) => {
                        shared.note_state_error(&e);
                        result = Err(e);
                    }
                }
            }
            if let Some((from, last)) = range {
                let loaded = shared.load(&sub, from, last);
                let mut queue = sub.queue.lock().expect("no panic holds it");
                queue.loading = false;
                match loaded {
                    Ok((ready, upto)) => {
                        count += ready.len();
                        let bytes = queue.loaded(ready, from, upto);
                        shared.hot_bytes.fetch_add(bytes, Relaxed);
                    }
                    Err(e) => result = Err(Error::Unavailable(format!("reading the log: {e}"))),
                }
            }
            shared.tell_ready(sub.of, count);
            result
        });
        work.await.map_err(|_| Error::Closed)??;
        Ok(true)
    }
}

#[async_trait]
impl EventLog for EmbeddedLog {
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        if let Some(reason) = self.shared.refusing() {
            return Err(Error::Unavailable(reason));
        }
        let head = record::encode_batch_head(&batch);
        let mut crc = crc32fast::Hasher::new();
        crc.update(&head);
        crc.update(&batch.body);
        let (done, on_disk) = oneshot::channel();
        let append = Box::new(LogAppend {
            head,
            payload_crc: crc.finalize(),
            batch,
            done,
        });
        let bytes = append.record_len();
        if self.shared.appending_bytes.fetch_add(bytes, Relaxed) + bytes > APPENDING_BYTES_MAX {
            self.shared.append_ended(bytes);
            return Err(Error::Busy(format!(
                "{} MiB of publishes are waiting for the disk",
                APPENDING_BYTES_MAX >> 20
            )));
        }
        if self.shared.writer.send(WriterRequest::Append(append)).is_err() {
            self.shared.append_ended(bytes);
            return Err(Error::Closed);
        }
        on_disk.await.map_err(|_| Error::Closed)?
    }

    async fn claim(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<Claim>, Error> {
        let Some(sub) = self.shared.sub(of) else {
            return Ok(Vec::new());
        };
        loop {
            let (retries, fresh, freed, due_later) = {
                let mut queue = sub.queue.lock().expect("no panic holds it");
                // Due retries that are not in memory yet go first.
                let due_later = queue.must_load_due(now);
                if due_later {
                    (Vec::new(), Vec::new(), 0, true)
                } else {
                    let (retries, fresh, freed) = queue.claim(now, want);
                    (retries, fresh, freed, false)
                }
            };
            self.shared.hot_bytes.fetch_sub(freed, Relaxed);
            if !retries.is_empty() || !fresh.is_empty() {
                let retries = retries.into_iter().map(retry_claim);
                return Ok(retries.chain(fresh.into_iter().map(fresh_claim)).collect());
            }
            if !self.load(&sub, now).await? && !due_later {
                return Ok(Vec::new());
            }
        }
    }

    async fn settle(&self, of: SubscriptionId, settled: Vec<Settlement>) -> Result<(), Error> {
        let Some(sub) = self.shared.sub(of) else {
            return Ok(());
        };
        let at_once =
            |s: &Settlement| s.claim.due.is_none() && matches!(s.next, NextStep::Done | NextStep::Drop(_));
        let mut recorded = Vec::new();
        if settled.iter().any(at_once) {
            let mut freed = 0;
            self.shared.settled(&sub, |queue| {
                for one in settled {
                    if at_once(&one) {
                        freed += queue.complete(one.claim.position());
                    } else {
                        recorded.push(one);
                    }
                }
            });
            self.shared.hot_bytes.fetch_sub(freed, Relaxed);
        } else {
            recorded = settled;
        }
        if recorded.is_empty() {
            return Ok(());
        }
        let count = recorded.len().min(SETTLING_MAX) as u32;
        let permit = self.settling.clone().acquire_many_owned(count).await;
        let permit = permit.map_err(|_| Error::Closed)?;
        let message = SettlerRequest::Settle(sub, recorded, permit);
        self.settler.send(message).map_err(|_| Error::Closed)
    }

    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error> {
        let sub = self.shared.sub(of).filter(|_| !waiting.is_empty());
        let Some(sub) = sub else {
            return Ok(Vec::new());
        };
        let count = waiting.len().min(SETTLING_MAX) as u32;
        let permit = self.settling.clone().acquire_many_owned(count).await;
        let permit = permit.map_err(|_| Error::Closed)?;
        let (reply, done) = oneshot::channel();
        let withdrawal = Withdrawal {
            sub,
            waiting,
            reply,
            permit,
        };
        self.settler
            .send(SettlerRequest::Withdraw(withdrawal))
            .map_err(|_| Error::Closed)?;
        done.await.map_err(|_| Error::Closed)
    }

    async fn flush(&self) -> Result<(), Error> {
        let (reply, done) = oneshot::channel();
        self.settler
            .send(SettlerRequest::Flush(reply))
            .map_err(|_| Error::Closed)?;
        done.await.map_err(|_| Error::Closed)
    }

    fn release(&self, of: SubscriptionId, claims: Vec<Claim>) {
        let Some(sub) = self.shared.sub(of) else {
            return;
        };
        let mut fresh = Vec::new();
        let mut queue = sub.queue.lock().expect("no panic holds it");
        if queue.closed {
            return;
        }
        for claim in claims {
            let ready = ReadyEvent {
                entry: claim.entry,
                index: claim.index,
            };
            match claim.due {
                None => fresh.push(ready),
                Some(due) => {
                    let Some(segment) = self.shared.segment_of(ready.position()) else {
                        continue;
                    };
                    let retry = state::RetryEntry {
                        due,
                        position: ready.position(),
                        attempts_made: claim.attempts_made,
                        last: claim.last_attempt,
                        segment: segment.base,
                        offset: ready.entry.place as u32,
                        index: ready.index,
                        received: ready.entry.batch.received,
                    };
                    queue.release_due(DueRetry {
                        ready,
                        retry,
                        loaded: None,
                    });
                }
            }
        }
        let bytes = queue.release(fresh);
        self.shared.hot_bytes.fetch_add(bytes, Relaxed);
    }

    fn release_memory(&self, of: SubscriptionId) {
        if let Some(sub) = self.shared.sub(of) {
            let bytes = self.shared.change(&sub, DeliveryQueue::rest);
            self.shared.hot_bytes.fetch_sub(bytes, Relaxed);
        }
    }

    fn pending_dead_letters(&self) -> Vec<PendingDeadLetters> {
        let letters = self.shared.letters.lock().expect("no panic holds it");
        let waiting = letters.iter().map(|(of, (oldest, count))| PendingDeadLetters {
            of: *of,
            oldest: *oldest,
            count: *count,
        });
        waiting.collect()
    }

    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        let Some(sub) = self.shared.sub(of) else {
            return Ok(Vec::new());
        };
        let (shared, settler) = (self.shared.clone(), self.settler.clone());
        let work = tokio::task::spawn_blocking(move || {
            let loaded = shared.load_letters(of, after, until, want)?;
            if loaded.lost.is_empty() {
                return Ok((loaded.letters, None));
            }
            shared.note_lost(&loaded.lost);
            let lost = loaded.lost.iter().map(DeadLetterRow::key).collect();
            let (reply, done) = oneshot::channel();
            settler
                .send(SettlerRequest::LettersDone(sub, lost, reply))
                .map_err(|_| Error::Closed)?;
            Ok((loaded.letters, Some(done)))
        });
        let (letters, dropped) = work.await.map_err(|_| Error::Closed)??;
        if let Some(dropped) = dropped {
            dropped.await.map_err(|_| Error::Closed)?;
        }
        Ok(letters)
    }

    async fn dead_letters_done(&self, of: SubscriptionId, letters: Vec<DeadLetterKey>) -> Result<(), Error> {
        let sub = self.shared.sub(of).filter(|_| !letters.is_empty());
        let Some(sub) = sub else {
            return Ok(());
        };
        let (reply, done) = oneshot::channel();
        self.settler
            .send(SettlerRequest::LettersDone(sub, letters, reply))
            .map_err(|_| Error::Closed)?;
        done.await.map_err(|_| Error::Closed)
    }

    fn next_due(&self) -> Option<Timestamp> {
        let heads = self.shared.heads.lock().expect("no panic holds it");
        heads.first().map(|head| head.0)
    }

    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp> {
        let heads = self.shared.heads.lock().expect("no panic holds it");
        let beyond = heads.range((after, SubscriptionId(u64::MAX))..);
        beyond.map(|head| head.0).find(|due| *due > after)
    }

    fn due(&self, now: Timestamp) -> Vec<SubscriptionId> {
        let heads = self.shared.heads.lock().expect("no panic holds it");
        heads
            .iter()
            .take_while(|head| head.0 <= now)
            .map(|head| head.1)
            .collect()
    }

    async fn open_subscription(&self, of: SubscriptionId) -> Result<(), Error> {
        let sub = {
            let mut subs = self.shared.subs.write().expect("no panic holds it");
            if subs.contains_key(&of) {
                return Ok(());
            }
            let progress = record::SubscriptionProgress {
                frontier: Position(self.shared.next.load(Relaxed)),
                open: Vec::new(),
            };
            let sub = Arc::new(SubscriptionState {
                of,
                queue: Mutex::new(DeliveryQueue::new(progress)),
            });
            subs.insert(of, sub.clone());
            sub
        };
        let (reply, done) = oneshot::channel();
        self.settler
            .send(SettlerRequest::Open(sub, reply))
            .map_err(|_| Error::Closed)?;
        done.await.map_err(|_| Error::Closed)
    }

    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        // The settler removes the queue from the map after what was settled before, which still
        // needs it.
        let Some(sub) = self.shared.sub(of) else {
            return Ok(0);
        };
        let (reply, done) = oneshot::channel();
        self.settler
            .send(SettlerRequest::Forget(sub, reply))
            .map_err(|_| Error::Closed)?;
        done.await.map_err(|_| Error::Closed)
    }

    fn subscriptions(&self) -> Vec<SubscriptionId> {
        let subs = self.shared.subs.read().expect("no panic holds it");
        let busy = subs
            .values()
            .filter(|sub| sub.queue.lock().expect("no panic holds it").has_work());
        busy.map(|sub| sub.of).collect()
    }

    fn backlog(&self, of: SubscriptionId) -> Backlog {
        self.shared.sub(of).map_or_else(Backlog::default, |sub| {
            sub.queue.lock().expect("no panic holds it").backlog()
        })
    }

    fn health(&self) -> LogHealth {
        let segments = self.shared.segments.read().expect("no panic holds it");
        LogHealth {
            refusing: self.shared.refusing(),
            corrupt: self.shared.corrupt.lock().expect("no panic holds it").clone(),
            corrupt_records: self.shared.corrupt_records.load(Relaxed),
            corrupt_deliveries: self.shared.corrupt_deliveries.load(Relaxed),
            redelivered: self.shared.redelivered.load(Relaxed),
            lost: self.shared.lost.clone(),
            unrecorded: self
                .shared
                .state_trouble
                .lock()
                .expect("no panic holds it")
                .clone(),
            segments: segments.len() as u64,
            bytes: segments.values().map(|s| s.bytes()).sum(),
        }
    }

    fn identity(&self) -> u64 {
        self.shared.identity
    }

    fn listen(&self, listener: Arc<dyn LogListener>) {
        if self.shared.listener.set(listener).is_err() {
            tracing::warn!("the log has a listener already; the second one is ignored");
        }
    }

    fn as_movable(&self) -> Option<&dyn MovableLog> {
        Some(self)
    }

    async fn close(&self) -> Result<(), Error> {
        self.shared.closing.store(true, Relaxed);
        let (reply, done) = oneshot::channel();
        if self.shared.writer.send(WriterRequest::Close(reply)).is_ok() {
            let _ = done.await;
        }
        let (reply, done) = oneshot::channel();
        if self.settler.send(SettlerRequest::Close(reply)).is_ok() {
            let _ = done.await;
        }
        let acknowledging = self.acknowledging.lock().expect("no panic holds it").take();
        if let Some(task) = acknowledging {
            let _ = task.await;
        }
        let threads = std::mem::take(&mut *self.threads.lock().expect("no panic holds it"));
        let state = self.shared.state.database();
        let joined = tokio::task::spawn_blocking(move || {
            let joined = threads.into_iter().try_for_each(|t| t.join().map_err(|_| ()));
            state.close();
            joined
        });
        match joined.await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Error::Unavailable("a thread of the log panicked".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_store::conformance::{WANT, at, claim_all, events, eventually, settled, sub};

    // Events are in the log shortly before they are handed out; a reader that reads ahead of that
    // would offer them twice.
    #[tokio::test]
    async fn the_log_is_read_no_further_than_asked() {
        let directory = tempfile::tempdir().unwrap();
        let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
        log.open_subscription(sub(1)).await.unwrap();
        for _ in 0..3 {
            log.append(events(&[("a", &[1]), ("b", &[1])])).await.unwrap();
        }
        let queue = log.shared.sub(sub(1)).unwrap();
        let read = |from, last| {
            let (ready, upto) = log.shared.load(&queue, Position(from), Position(last)).unwrap();
            let positions: Vec<u64> = ready.iter().map(|ready| ready.position().0).collect();
            (positions, upto.0)
        };
        assert_eq!(read(0, 2), (vec![0, 1, 2], 3));
        assert_eq!(read(1, 5), (vec![1, 2, 3, 4, 5], 6));
        assert_eq!(read(5, 5), (vec![5], 6));
        assert_eq!(log.claim(sub(1), at(0), WANT).await.unwrap().len(), 6);
        assert_eq!(read(0, 5), (vec![], 6), "all are claimed");
        log.close().await.unwrap();
    }

    // 10 000 subscriptions that retried one tiny event each had a copy of the request in memory, which names all of
    // them: 100 KB each.
    #[tokio::test]
    async fn retries_of_one_event_for_very_many_subscriptions_share_it() {
        let directory = tempfile::tempdir().unwrap();
        let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
        let subs: Vec<u64> = (1..=600).collect();
        for of in &subs[..2] {
            log.open_subscription(sub(*of)).await.unwrap();
        }
        log.append(events(&[("a", &subs)])).await.unwrap();
        for of in &subs[..2] {
            let claims = claim_all(&log, sub(*of), at(0)).await;
            let retry = settled(&claims[0], NextStep::RetryAt(at(5)));
            log.settle(sub(*of), vec![retry]).await.unwrap();
        }
        log.flush().await.unwrap();
        let first = claim_all(&log, sub(1), at(5)).await;
        let second = claim_all(&log, sub(2), at(5)).await;
        assert!(Arc::ptr_eq(&first[0].entry, &second[0].entry));
        log.close().await.unwrap();
    }

    #[tokio::test]
    async fn retries_that_are_read_and_not_claimed_are_counted_and_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
        log.open_subscription(sub(1)).await.unwrap();
        for _ in 0..3 {
            log.append(events(&[("a", &[1])])).await.unwrap();
        }
        let claims = claim_all(&log, sub(1), at(0)).await;
        let retries = claims
            .iter()
            .map(|claim| settled(claim, NextStep::RetryAt(at(5))));
        log.settle(sub(1), retries.collect()).await.unwrap();
        log.flush().await.unwrap();
        let one = ClaimLimits {
            events_max: 1,
            ..WANT
        };
        let counted = || log.shared.due_bytes.load(Relaxed);
        let first = log.claim(sub(1), at(5), one).await.unwrap();
        assert_eq!(counted(), 2 * first[0].entry.batch.memory_len());
        log.release_memory(sub(1));
        assert_eq!(counted(), 0);
        log.shared.due_bytes.store(DUE_BYTES_MAX + 1, Relaxed);
        for _ in 0..2 {
            assert_eq!(log.claim(sub(1), at(5), one).await.unwrap().len(), 1);
            assert_eq!(counted(), DUE_BYTES_MAX + 1, "one was read, and is claimed");
        }
        log.close().await.unwrap();
    }

    #[tokio::test]
    async fn a_withdrawn_retry_lets_its_segment_go() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Arc::new(disk::LocalDirectory::open(directory.path().join("log")).unwrap());
        let state = directory.path().join("state.redb");
        let log = EmbeddedLog::open_on(disk, &state, 7, 8 << 10).await.unwrap();
        log.open_subscription(sub(1)).await.unwrap();
        let text = "p".repeat(1_000);
        for _ in 0..50 {
            log.append(events(&[(&text, &[1])])).await.unwrap();
        }
        let claims = claim_all(&log, sub(1), at(0)).await;
        let (retries, done) = claims.split_at(2);
        let settle_all = async |claims: &[Claim], next| {
            let all = claims.iter().map(|claim| settled(claim, next));
            log.settle(sub(1), all.collect()).await.unwrap();
        };
        settle_all(retries, NextStep::RetryAt(at(5))).await;
        settle_all(done, NextStep::Done).await;
        eventually("the other segments are gone", || log.health().segments == 2).await;
        let waiting = retries.iter().map(|claim| (at(5), claim.position()));
        let ended = log.withdraw(sub(1), waiting.collect()).await.unwrap();
        assert_eq!(ended.len(), 2);
        assert!(log.shared.references.lock().unwrap().is_empty());
        eventually("the last segment is gone", || log.health().segments == 1).await;
        log.close().await.unwrap();
        drop(log);
        let known = StateDatabase::open(&state, 7).unwrap().recover().unwrap();
        assert!(known.references.is_empty() && known.retries.is_empty());
    }
}
