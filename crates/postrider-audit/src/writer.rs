//! The writer thread: all waiting entries become one write and one fdatasync.

use crate::Config;
use crate::checkpoint;
use crate::line::{ActionResult, AuditEntry, AuditOutcome, ChainHead, hash_of, parse};
use crate::log::{AuditUnwritable, SharedAuditState};
use crate::segment::{self, AuditSegment, open_to_write, path_of};
use crate::verify::verify_end;
use postrider_core::time::{Clock, Timestamp};
use serde_json::{Map, Value, json};
use std::cell::LazyCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Action that records the dropping of the oldest lines.
pub const PRUNE: &str = "audit.prune";
/// Smallest unit that a disk writes.
const SECTOR: usize = 512;
/// Action that records the removal of an unfinished end of the log after a crash.
const REPAIR: &str = "audit.repair";
/// Action that records how many lines were lost while the disk was failing.
const LOST: &str = "audit.lost";
/// How often the age of the oldest lines is checked and a failing disk is tried again.
const TICK: Duration = Duration::from_secs(30);
/// Limit of the entries that share a write.
const BATCH_MAX: usize = 256;
/// Bytes of lines that wait in memory for a failing disk.
const PENDING_BYTES_MAX: usize = 4 << 20;
/// Disk space that is reserved ahead of the lines, so that no change begins which could not be
/// recorded.
const RESERVE_BYTES: u64 = 1 << 20;
/// Segments hold this fraction of the log's limits, since whole segments are dropped …
const PIECES: u32 = 8;
/// … within these sizes.
const SEGMENT_BYTES: [u64; 2] = [64 << 10, 16 << 20];
/// The newest lines that every start verifies.
const VERIFIED_BYTES_MAX: u64 = 64 << 20;
const SEGMENT_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

pub type AppendResult = Result<u64, AuditUnwritable>;

pub enum WriterCommand {
    Append(Box<AuditEntry>, Option<oneshot::Sender<AppendResult>>),
    /// Tries a failed disk again.
    Retry(oneshot::Sender<AppendResult>),
    Close,
}

/// Operations of the disk, replaceable in tests.
pub trait AuditDisk: Send {
    fn write_at(&mut self, file: &File, bytes: &[u8], at: u64) -> io::Result<()>;
    fn sync(&mut self, file: &File) -> io::Result<()>;
    /// Reserves space without making the file longer.
    fn reserve(&mut self, file: &File, at: u64, bytes: u64) -> io::Result<()>;
}

pub struct RealAuditDisk;

impl AuditDisk for RealAuditDisk {
    fn write_at(&mut self, file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        file.write_all_at(bytes, at)
    }

    fn sync(&mut self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    fn reserve(&mut self, file: &File, at: u64, bytes: u64) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        match fallocate(file, FallocateFlags::KEEP_SIZE, at, bytes) {
            // The file system does not support reservation.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            result => Ok(result?),
        }
    }
}

/// State of the log that an earlier process left.
pub struct OpenedAuditLog {
    pub segments: Vec<AuditSegment>,
    pub head: ChainHead,
    /// The entry that records a repair, if there was one.
    pub repaired: Option<AuditEntry>,
    /// Why lines that were durable are missing or changed.
    pub damage: Option<String>,
}

fn make_directory(directory: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory)
}

/// Finds the end of the log, cuts off what a crash left unfinished there, and verifies the newest lines.
pub fn open(directory: &Path) -> io::Result<OpenedAuditLog> {
    make_directory(directory)?;
    let mut opened = open_end(directory)?;
    let checkpoint = checkpoint::read(directory)?;
    opened.damage = verify_end(&opened.segments, checkpoint.clone(), VERIFIED_BYTES_MAX)?;
    // The chain continues the line that is gone, so that the gap shows from then on.
    if let Some(kept) = checkpoint
        && (kept.seq > opened.head.seq || (kept.seq == opened.head.seq && kept.hash != opened.head.hash))
    {
        opened.head = kept.head(opened.head.time);
    }
    Ok(opened)
}

fn open_end(directory: &Path) -> io::Result<OpenedAuditLog> {
    let mut segments = segment::find(directory)?;
    let mut repaired = None;
    while let Some(last) = segments.last_mut() {
        let content = std::fs::read(&last.path)?;
        let tail = SegmentTail::of(&content, last.first);
        let cut = content.len() as u64 - tail.bytes;
        if cut > 0 {
            let file = open_to_write(&last.path)?;
            file.set_len(tail.bytes)?;
            file.sync_all()?;
            last.bytes = tail.bytes;
            tracing::warn!(file = %last.path.display(), bytes = cut, "the audit log ended in an unfinished line: cut off");
            repaired = Some(server_entry(
                REPAIR,
                &last.path,
                json!({"file": last.name(), "bytesRemoved": cut}),
            ));
        }
        if let Some(head) = tail.head {
            return Ok(OpenedAuditLog {
                segments,
                head,
                repaired,
                damage: None,
            });
        }
        // Created by a process that ended before its first line was durable.
        std::fs::remove_file(&last.path)?;
        segments.pop();
    }
    Ok(OpenedAuditLog {
        segments,
        head: ChainHead::default(),
        repaired,
        damage: None,
    })
}

/// The end of the last segment.
struct SegmentTail {
    /// Length up to which lines are whole.
    bytes: u64,
    head: Option<ChainHead>,
}

impl SegmentTail {
    fn of(content: &[u8], first: u64) -> SegmentTail {
        let mut tail = SegmentTail { bytes: 0, head: None };
        let mut seq = first;
        let last_intact = LazyCell::new(|| end_of_last_intact_line(content));
        for piece in content.split_inclusive(|byte| *byte == b'\n') {
            let at = tail.bytes as usize;
            // After a power cut some pages of the last write are on disk and others are zeros. A
            // zero within a sector is damage, and no reason to drop the lines after it.
            let is_cut_short = |line: &&[u8]| {
                line.contains(&0) && (has_empty_sector(content, at, line.len()) || *last_intact <= at)
            };
            let line = piece.strip_suffix(b"\n");
            let Some(line) = line.filter(|line| !is_cut_short(line)) else {
                return tail;
            };
            // A line that was edited is kept, so that verification reports it.
            let before = tail.head.take();
            tail.head = Some(match parse(line) {
                Some(parsed) => ChainHead {
                    seq: parsed.header.seq,
                    hash: parsed.hash.to_owned(),
                    time: parsed.time,
                },
                None => ChainHead {
                    seq,
                    hash: hash_of(line),
                    time: before.map_or(Timestamp::MIN, |head| head.time),
                },
            });
            seq = tail.head.as_ref().map_or(seq, |head| head.seq) + 1;
            tail.bytes += piece.len() as u64;
        }
        tail
    }
}

/// The offset after the last line whose hash matches its content; 0 if there is none.
fn end_of_last_intact_line(content: &[u8]) -> usize {
    let mut end = content.len();
    while end > 0 {
        let begin = content[..end - 1]
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |newline| newline + 1);
        let line = content[begin..end].strip_suffix(b"\n");
        if line.and_then(parse).is_some_and(|line| line.intact) {
            return end;
        }
        end = begin;
    }
    0
}

/// Whether a whole sector of the file within these bytes is zero.
fn has_empty_sector(content: &[u8], at: usize, len: usize) -> bool {
    let sectors = at.div_ceil(SECTOR)..(at + len) / SECTOR;
    sectors
        .map(|sector| &content[sector * SECTOR..(sector + 1) * SECTOR])
        .any(|sector| sector.iter().all(|byte| *byte == 0))
}

fn server_entry(action: &str, path: &Path, details: Value) -> AuditEntry {
    let details = match details {
        Value::Object(details) => details,
        _ => Map::new(),
    };
    AuditEntry {
        actor: crate::Actor {
            id: "server".into(),
            roles: Vec::new(),
            via: "server".into(),
        },
        action: action.to_owned(),
        resource: path.display().to_string(),
        outcome: AuditOutcome {
            result: ActionResult::Done,
            ..AuditOutcome::default()
        },
        details,
        ..AuditEntry::default()
    }
}

/// How many of the closed segments, the oldest first, are to be dropped, and why. The last segment
/// is the one being written.
fn to_drop(segments: &[AuditSegment], config: &Config, now: Timestamp) -> (usize, &'static str) {
    let closed = segments.len().saturating_sub(1);
    let too_old = |index: usize| {
        let newest = segments.get(index + 1).and_then(|next| next.begins);
        newest.is_some_and(|newest| newest + config.keep <= now)
    };
    let old = (0..closed).take_while(|index| too_old(*index)).count();
    let mut left: u64 = segments.iter().map(|segment| segment.bytes).sum();
    let mut many = 0;
    while left > config.bytes_max && many < closed {
        left -= segments[many].bytes;
        many += 1;
    }
    match old >= many {
        true => (old, "age"),
        false => (many, "bytes"),
    }
}

pub struct AuditWriter {
    pub shared: Arc<SharedAuditState>,
    pub clock: Arc<dyn Clock>,
    pub disk: Box<dyn AuditDisk>,
    /// End of the chain, including the lines in `pending`.
    head: ChainHead,
    /// The open last segment; none until there is something to write.
    file: Option<File>,
    reserved: u64,
    /// Lines that are not durable yet.
    pending: String,
    pending_first: u64,
    /// Lines that were lost because the memory for pending lines was full.
    lost: u64,
    /// The last dropped line for which a record exists or is being written.
    dropped_through: u64,
    /// Whether a new file must be started: after a failed fdatasync the content of the current one
    /// is unknown.
    renew: bool,
    /// The line of the checkpoint, as far as this life has written one.
    checkpoint_seq: u64,
}

impl AuditWriter {
    pub fn new(
        shared: Arc<SharedAuditState>,
        clock: Arc<dyn Clock>,
        disk: Box<dyn AuditDisk>,
        opened: OpenedAuditLog,
    ) -> AuditWriter {
        let mut writer = AuditWriter {
            shared,
            clock,
            disk,
            head: opened.head,
            file: None,
            reserved: 0,
            pending: String::new(),
            pending_first: 0,
            lost: 0,
            dropped_through: 0,
            renew: false,
            checkpoint_seq: 0,
        };
        if let Some(repaired) = opened.repaired {
            writer.add(&repaired);
        }
        writer
    }

    /// Runs until the log is closed.
    pub fn run(mut self, commands: &Receiver<WriterCommand>) {
        // Reserves space before the first change, and writes the record of a repair.
        let _ = self.flush();
        loop {
            let mut waiting = Vec::new();
            let mut closing = false;
            let mut next = match commands.recv_timeout(TICK) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            while let Some(command) = next.take() {
                match command {
                    WriterCommand::Append(entry, waiter) => {
                        let seq = self.add(&entry);
                        waiting.extend(waiter.map(|waiter| (waiter, seq)));
                    }
                    WriterCommand::Retry(waiter) => waiting.push((waiter, Some(self.head.seq))),
                    WriterCommand::Close => closing = true,
                }
                if waiting.len() < BATCH_MAX && !closing {
                    next = commands.try_recv().ok();
                }
            }
            let result = self.flush();
            for (waiter, seq) in waiting {
                let told = match (&result, seq) {
                    (Err(why), _) => Err(why.clone()),
                    (Ok(()), None) => Err(AuditUnwritable("the queue of the audit log is full".into())),
                    (Ok(()), Some(seq)) => Ok(seq),
                };
                // The caller may have been cancelled.
                let _ = waiter.send(told);
            }
            if closing {
                self.release();
                return;
            }
        }
    }

    /// Adds a line. Returns its number; none if too many lines wait already.
    fn add(&mut self, entry: &AuditEntry) -> Option<u64> {
        if self.pending.len() > PENDING_BYTES_MAX {
            self.lost += 1;
            return None;
        }
        let now = self.clock.now();
        if self.pending.is_empty() {
            self.pending_first = self.head.seq + 1;
        }
        let line = self.head.append(entry, &self.shared.config.node, now);
        self.pending.push_str(&line);
        Some(self.head.seq)
    }

    /// Makes all pending lines durable, and reserves space for further ones.
    fn flush(&mut self) -> Result<(), AuditUnwritable> {
        let result = self.try_flush().map_err(|e| AuditUnwritable(reason(&e)));
        let trouble = result.as_ref().err().map(|why| (self.clock.now(), why.0.clone()));
        self.shared.set_trouble(trouble);
        result
    }

    fn try_flush(&mut self) -> io::Result<()> {
        let now = self.clock.now();
        if self.lost > 0 && self.pending.len() <= PENDING_BYTES_MAX {
            let lost = std::mem::take(&mut self.lost);
            let entry = server_entry(LOST, &self.shared.config.directory, json!({"lines": lost}));
            self.add(&entry);
        }
        let mut segments = self.shared.segments();
        let damage = segments.last().map_or(Ok(None), |last| self.damage_of(last))?;
        if let Some(why) = &damage {
            self.shared.set_damage(why);
            make_directory(&self.shared.config.directory)?;
            segments.retain(|segment| segment.path.exists());
        }
        if damage.is_some() || self.must_rotate(&segments, now) {
            if damage.is_none() {
                self.release();
            }
            self.file = None;
            segments.push(self.begin_segment(now)?);
        }
        if self.file.is_none()
            && let Some(last) = segments.last()
        {
            self.file = Some(open_to_write(&last.path)?);
            self.reserved = 0;
        }
        let (dropped, why) = to_drop(&segments, &self.shared.config, now);
        if dropped > 0 {
            let through = segments[dropped].first - 1;
            let details = json!({
                "fromSeq": segments[0].first,
                "throughSeq": through,
                "files": dropped,
                "reason": why,
            });
            if through > self.dropped_through {
                self.dropped_through = through;
                self.add(&server_entry(PRUNE, &self.shared.config.directory, details));
            }
        }
        let (Some(file), Some(last)) = (&self.file, segments.last_mut()) else {
            return Ok(());
        };
        if !self.pending.is_empty() {
            if let Err(e) = self.disk.write_at(file, self.pending.as_bytes(), last.bytes) {
                // Removes a partly written line.
                let _ = file.set_len(last.bytes);
                self.reserved = 0;
                return Err(e);
            }
            if let Err(e) = self.disk.sync(file) {
                let _ = file.set_len(last.bytes);
                self.renew = true;
                return Err(e);
            }
            last.bytes += self.pending.len() as u64;
            last.begins = last.begins.or(Some(now));
            self.pending.clear();
        }
        // Files are removed only after the record is durable: a crash in between leaves files that
        // the next process drops.
        for segment in segments.drain(..dropped) {
            if let Err(e) = std::fs::remove_file(&segment.path) {
                tracing::warn!(file = %segment.path.display(), error = %e, "an old file of the audit log cannot be removed");
            }
        }
        let end = segments.last().map_or(0, |last| last.bytes);
        self.shared.publish(segments, self.head.clone());
        if self.checkpoint_seq < self.head.seq {
            match checkpoint::write(&self.shared.config.directory, &self.head) {
                Ok(()) => self.checkpoint_seq = self.head.seq,
                Err(e) => {
                    tracing::warn!(error = %e, "the checkpoint of the audit log cannot be written: removed lines would not be noticed")
                }
            }
        }
        if end + RESERVE_BYTES / 2 > self.reserved {
            self.disk.reserve(file, end, RESERVE_BYTES)?;
            self.reserved = end + RESERVE_BYTES;
        }
        Ok(())
    }

    /// Why the open file is not the one that has its name any more.
    fn damage_of(&self, last: &AuditSegment) -> io::Result<Option<String>> {
        let Some(file) = &self.file else { return Ok(None) };
        let ours = file.metadata()?;
        let why = match std::fs::metadata(&last.path) {
            Ok(named) if (named.dev(), named.ino()) != (ours.dev(), ours.ino()) => "was replaced",
            Ok(named) if named.len() < last.bytes => "was cut short",
            Ok(_) => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => "was removed",
            Err(e) => return Err(e),
        };
        Ok(Some(format!(
            "{} {why} while the server ran",
            last.path.display()
        )))
    }

    fn must_rotate(&self, segments: &[AuditSegment], now: Timestamp) -> bool {
        let config = &self.shared.config;
        let Some(last) = segments.last() else {
            return !self.pending.is_empty();
        };
        let bytes = config.bytes_max / u64::from(PIECES);
        let full = last.bytes >= bytes.clamp(SEGMENT_BYTES[0], SEGMENT_BYTES[1]);
        let age = (config.keep / PIECES).min(SEGMENT_AGE_MAX);
        let old = last.begins.is_some_and(|begins| begins + age <= now);
        let expired = last.bytes > 0 && self.head.time + config.keep <= now;
        (!self.pending.is_empty() && (full || old || self.renew)) || (self.pending.is_empty() && expired)
    }

    fn begin_segment(&mut self, now: Timestamp) -> io::Result<AuditSegment> {
        let directory = &self.shared.config.directory;
        let first = match self.pending.is_empty() {
            true => self.head.seq + 1,
            false => self.pending_first,
        };
        let path = path_of(directory, first);
        let file = open_to_write(&path)?;
        file.set_len(0)?;
        File::open(directory)?.sync_all()?;
        self.file = Some(file);
        self.reserved = 0;
        self.renew = false;
        Ok(AuditSegment {
            path,
            first,
            bytes: 0,
            begins: Some(now),
        })
    }

    /// Gives back the space that was reserved and not used.
    fn release(&mut self) {
        if let (Some(file), Some(last)) = (&self.file, self.shared.segments().last()) {
            let _ = file.set_len(last.bytes);
        }
    }
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("the disk is full: {error}")
        }
        _ => error.to_string(),
    }
}
