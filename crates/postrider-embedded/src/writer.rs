//! The only writer of the log: everything that waits is written with one write and one fdatasync.

use crate::LogShared;
use crate::disk::Disk;
use crate::record::{HEADER_LEN, RecordHeader, RecordKind};
use crate::segment::{FIRST_RECORD, SPARE_NAMES, Segment, SegmentHead, index_name, log_name};
use crate::settler::SettlerRequest;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::Position;
use postrider_store::{Error, LogEntry};
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc::UnboundedSender, oneshot};

/// Maximum number of publish requests in one commit …
const COMMIT_REQUESTS_MAX: usize = 512;
/// … and this many bytes.
const COMMIT_BYTES_MAX: usize = 8 << 20;
/// Maximum delay until settlements are on disk, if no commit of publish requests takes them along
/// earlier.
const PROGRESS_EVERY: Duration = Duration::from_millis(20);
/// Bytes of progress that a commit of publish requests takes along; the rest is written when it is
/// due.
const PROGRESS_BYTES_ALONG: usize = 8 << 10;
/// Interval of checkpoints into the state database while there is work.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(2);
/// Disk space is reserved in steps of this size.
const ALLOCATE_BYTES: u64 = 8 << 20;
/// Interval of attempts to write again after a failure.
const RECOVER_EVERY: Duration = Duration::from_millis(250);
/// Disk space reserved for bookkeeping: the log stops before the state database has to.
const RESERVE_BYTES_MAX: u64 = 16 << 20;

/// A publish request on its way into the log.
pub struct LogAppend {
    pub batch: PublishedBatch,
    /// The first part of the payload; the body follows.
    pub head: Vec<u8>,
    pub payload_crc: u32,
    pub done: oneshot::Sender<Result<Position, Error>>,
}

impl LogAppend {
    fn payload_len(&self) -> usize {
        self.head.len() + self.batch.body.len()
    }

    pub fn record_len(&self) -> usize {
        HEADER_LEN + self.payload_len()
    }
}

/// Publish requests of one commit; they arrive boxed through the channel and stay so.
type CommitGroup = Vec<Box<LogAppend>>;

pub enum WriterRequest {
    Append(Box<LogAppend>),
    /// Progress waits to be written.
    Progress,
    /// Something else waits for the state database's next checkpoint.
    CheckpointDue,
    /// A timeout, without a request.
    Nothing,
    Close(oneshot::Sender<()>),
}

/// A publish request that is now durable.
pub struct CommittedEntry {
    pub entry: Arc<LogEntry>,
    pub bytes: usize,
    pub done: oneshot::Sender<Result<Position, Error>>,
}

pub struct LogWriter {
    pub shared: Arc<LogShared>,
    pub requests: Receiver<WriterRequest>,
    pub committed: UnboundedSender<Vec<CommittedEntry>>,
    pub settler: Sender<SettlerRequest>,
    pub segment: Arc<Segment>,
    pub offset: u64,
    pub allocated: u64,
    pub commit: u64,
    pub next: Position,
    /// Whether the segment cannot be trusted any more after a failed write or flush.
    pub spoiled: bool,
    pub segment_bytes_max: u64,
}

#[expect(
    clippy::disallowed_methods,
    reason = "paces a thread's own work; no rule depends on it"
)]
fn instant() -> Instant {
    Instant::now()
}

impl LogWriter {
    pub fn run(mut self) {
        let mut progress_since: Option<Instant> = None;
        let mut checkpointed = instant();
        let mut checkpoint_due = false;
        let mut refused_at: Option<Instant> = None;
        let mut closing = None;
        loop {
            let mut group = Vec::new();
            let mut bytes = 0;
            let wait = match (refused_at, progress_since) {
                (Some(_), _) => Some(RECOVER_EVERY),
                (None, Some(since)) => Some(PROGRESS_EVERY.saturating_sub(since.elapsed())),
                (None, None) if checkpoint_due => {
                    Some(CHECKPOINT_EVERY.saturating_sub(checkpointed.elapsed()))
                }
                (None, None) => None,
            };
            let mut message = match wait {
                None => self.requests.recv().ok(),
                Some(wait) => match self.requests.recv_timeout(wait) {
                    Ok(message) => Some(message),
                    Err(RecvTimeoutError::Timeout) => Some(WriterRequest::Nothing),
                    Err(RecvTimeoutError::Disconnected) => None,
                },
            };
            loop {
                match message {
                    Some(WriterRequest::Append(append)) => {
                        bytes += append.record_len();
                        group.push(append);
                    }
                    Some(WriterRequest::Progress) => {
                        if progress_since.is_none() {
                            progress_since = Some(instant());
                        }
                    }
                    Some(WriterRequest::CheckpointDue) => checkpoint_due = true,
                    Some(WriterRequest::Nothing) => {}
                    Some(WriterRequest::Close(done)) => closing = Some(done),
                    None => return,
                }
                if group.len() >= COMMIT_REQUESTS_MAX || bytes >= COMMIT_BYTES_MAX || closing.is_some() {
                    break;
                }
                match self.requests.try_recv() {
                    Ok(next) => message = Some(next),
                    Err(_) => break,
                }
            }
            if let Some(since) = refused_at {
                if since.elapsed() < RECOVER_EVERY && closing.is_none() {
                    self.refuse(group);
                    continue;
                }
                match self.recover() {
                    Ok(()) => {
                        refused_at = None;
                        self.shared.set_refusing(None);
                        tracing::info!("the log can be written again");
                    }
                    Err(e) => {
                        self.failed(&e, group);
                        refused_at = Some(instant());
                        // Settlements still become durable meanwhile, and may free disk space.
                        let _ = self.settler.send(SettlerRequest::Checkpoint);
                        if let Some(done) = closing.take() {
                            self.end(done);
                            return;
                        }
                        continue;
                    }
                }
            }
            let progress_due = progress_since.is_some_and(|s| s.elapsed() >= PROGRESS_EVERY);
            let progress = if progress_due || closing.is_some() {
                progress_since = None;
                self.shared.take_progress(usize::MAX).0
            } else if progress_since.is_some() && !group.is_empty() {
                let (progress, is_all) = self.shared.take_progress(PROGRESS_BYTES_ALONG);
                if is_all {
                    progress_since = None;
                }
                progress
            } else {
                Vec::new()
            };
            if !group.is_empty() || !progress.is_empty() {
                checkpoint_due |= !progress.is_empty();
                if let Err((e, group)) = self.write(group, &progress, bytes) {
                    self.failed(&e, group);
                    refused_at = Some(instant());
                    // The progress is not in the log, so a checkpoint must record it.
                    let _ = self.settler.send(SettlerRequest::Checkpoint);
                }
            }
            if checkpoint_due && checkpointed.elapsed() >= CHECKPOINT_EVERY {
                checkpoint_due = false;
                checkpointed = instant();
                let _ = self.settler.send(SettlerRequest::Checkpoint);
            }
            if let Some(done) = closing.take() {
                self.end(done);
                return;
            }
        }
    }

    fn end(&self, done: oneshot::Sender<()>) {
        self.shared.writer_ended.store(true, Release);
        let _ = done.send(());
    }

    /// Commits: writes the records, flushes, and hands the result over.
    fn write(
        &mut self,
        group: CommitGroup,
        progress: &[u8],
        bytes: usize,
    ) -> Result<(), (io::Error, CommitGroup)> {
        let progress_len = if progress.is_empty() {
            0
        } else {
            HEADER_LEN + progress.len()
        };
        let total = (bytes + progress_len) as u64;
        if let Err(e) = self.make_room(total) {
            return Err((e, group));
        }
        self.commit += 1;
        let mut headers = Vec::with_capacity(group.len() + 1);
        let mut next = self.next;
        for append in &group {
            headers.push(
                RecordHeader {
                    kind: RecordKind::Batch,
                    payload_len: append.payload_len() as u32,
                    payload_crc: append.payload_crc,
                    first: next,
                    count: append.batch.events.len() as u32,
                    commit: self.commit,
                    ends_commit: progress.is_empty() && headers.len() + 1 == group.len(),
                }
                .encode(),
            );
            next = Position(next.0 + append.batch.events.len() as u64);
        }
        if !progress.is_empty() {
            headers.push(
                RecordHeader {
                    kind: RecordKind::Progress,
                    payload_len: progress.len() as u32,
                    payload_crc: crc32fast::hash(progress),
                    first: next,
                    count: 0,
                    commit: self.commit,
                    ends_commit: true,
                }
                .encode(),
            );
        }
        let mut slices = Vec::with_capacity(group.len() * 3 + 2);
        for (append, header) in group.iter().zip(&headers) {
            slices.push(IoSlice::new(header));
            slices.push(IoSlice::new(&append.head));
            slices.push(IoSlice::new(&append.batch.body));
        }
        if !progress.is_empty() {
            slices.push(IoSlice::new(&headers[group.len()]));
            slices.push(IoSlice::new(progress));
        }
        let file = &self.segment.file;
        if let Err(e) = file.write_at(&mut slices, self.offset).and_then(|()| file.sync()) {
            self.spoiled = true;
            self.segment.has_tail();
            return Err((e, group));
        }
        let mut committed = Vec::with_capacity(group.len());
        for append in group {
            let (first, len) = (self.next, append.record_len());
            let offset = self.offset;
            self.segment.index_batch(offset, first, &append.batch);
            self.next = Position(first.0 + append.batch.events.len() as u64);
            self.offset += len as u64;
            committed.push(CommittedEntry {
                entry: Arc::new(LogEntry {
                    batch: append.batch,
                    first,
                    place: offset,
                }),
                bytes: len,
                done: append.done,
            });
        }
        self.offset += progress_len as u64;
        self.segment.grown(self.next, self.offset);
        self.shared.next.store(self.next.0, Relaxed);
        if !committed.is_empty() {
            // The receiver is gone only while the store shuts down.
            let _ = self.committed.send(committed);
        }
        Ok(())
    }

    /// Ensures that the next commit has reserved space, in this segment or a new one.
    fn make_room(&mut self, bytes: u64) -> io::Result<()> {
        let full = self.offset + bytes > self.segment_bytes_max || self.segment.index_is_full();
        if self.spoiled || (full && self.offset > FIRST_RECORD) {
            if !self.spoiled && self.next == self.segment.base {
                // The segment is full of progress records only. Segments are named by their first
                // position, so the next one needs another position.
                self.next = Position(self.next.0 + 1);
                self.shared.next.store(self.next.0, Relaxed);
            }
            self.roll()?;
        }
        if self.offset + bytes > self.allocated {
            self.allocated = self.allocate(bytes)?;
        }
        Ok(())
    }

    /// Reserves space for at least `bytes` more, if the disk has that beyond the reserve.
    fn allocate(&self, bytes: u64) -> io::Result<u64> {
        let (available, total) = self.shared.disk.space()?;
        let reserve = RESERVE_BYTES_MAX.min(total / 8);
        let need = self.offset + bytes;
        let wish = (self.allocated + ALLOCATE_BYTES).max(need);
        for target in [wish, need.next_multiple_of(64 << 10)] {
            if available < (target - self.allocated) + reserve {
                continue;
            }
            match self.segment.file.allocate(target) {
                Ok(()) => return Ok(target),
                Err(e) if e.kind() == io::ErrorKind::StorageFull => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::StorageFull,
            format!(
                "the disk is full: {} KiB are left and {} KiB are kept for bookkeeping",
                available >> 10,
                reserve >> 10
            ),
        ))
    }

    fn roll(&mut self) -> io::Result<()> {
        let disk = self.shared.disk.clone();
        let segment = Arc::new(self.shared.create_segment(&*disk, self.next, self.commit + 1)?);
        let complete = self.segment.clone();
        self.shared.add_segment(segment.clone());
        let _ = self.settler.send(SettlerRequest::Seal(complete));
        self.segment = segment;
        self.offset = FIRST_RECORD;
        self.allocated = self.offset;
        self.spoiled = false;
        Ok(())
    }

    /// Checks whether a commit could succeed now.
    fn recover(&mut self) -> io::Result<()> {
        let result = self.make_room(64 << 10);
        let full = result
            .as_ref()
            .is_err_and(|e| e.kind() == io::ErrorKind::StorageFull);
        if full && self.next > self.segment.base {
            // Only a closed segment can be deleted once everything in it is settled.
            self.roll()?;
        }
        result
    }

    fn refuse(&self, group: CommitGroup) {
        let reason = self.shared.refusing().unwrap_or_default();
        for append in group {
            self.shared.append_ended(append.record_len());
            let _ = append.done.send(Err(Error::Unavailable(reason.clone())));
        }
    }

    fn failed(&mut self, e: &io::Error, group: CommitGroup) {
        if self.shared.refusing().is_none() {
            tracing::error!(error = %e, "the log cannot be written; publishes are refused");
        }
        self.shared.set_refusing(Some(e.to_string()));
        self.refuse(group);
    }
}

impl LogShared {
    /// Starts a segment in the spare file if there is one, which takes one flush; otherwise in a
    /// new file, which takes a flush of the directory as well.
    pub fn create_segment(&self, disk: &dyn Disk, base: Position, commit: u64) -> io::Result<Segment> {
        let head = SegmentHead {
            base,
            identity: self.identity,
            commit,
            generation: self.state.generation(),
        };
        // Held to the end: a spare that is being created must not be mistaken for a leftover.
        let mut spare = self.spare.lock().expect("no panic holds it");
        if let Some((name, file)) = spare.take() {
            // A file of that name can only be left over from a failed attempt. Then the slow path
            // makes sure that it is gone, because of two files with one base the one with the
            // segment's name counts.
            let fresh = [log_name(base), index_name(base)].iter().all(|name| {
                let found = disk.open(name);
                found.is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
            });
            if fresh {
                return Segment::of_spare(disk, name, file, head);
            }
        }
        let names = disk.names()?;
        let left_behind = [log_name(base), index_name(base)];
        let left_behind = left_behind.iter().map(String::as_str).chain(SPARE_NAMES);
        for name in left_behind {
            if names.iter().any(|known| known == name) {
                disk.remove(name)?;
            }
        }
        let segment = Segment::create(disk, head)?;
        disk.sync()?;
        Ok(segment)
    }

    /// Creates a spare file if there is none and the disk permits it.
    pub fn prepare_spare(&self) {
        let mut spare = self.spare.lock().expect("no panic holds it");
        if spare.is_some() {
            return;
        }
        let name = SPARE_NAMES[self.spares.fetch_add(1, Relaxed) % SPARE_NAMES.len()];
        let make = || {
            match self.disk.remove(name) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let file = self.disk.create(name)?;
            // The directory sync also makes the last spare's rename durable.
            self.disk.sync()?;
            Ok(file)
        };
        match make() {
            Ok(file) => *spare = Some((name, file)),
            Err(e) => tracing::debug!(error = %e, "no spare segment"),
        }
    }
}
