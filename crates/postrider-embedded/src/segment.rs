//! A segment, one file of the log: a sequence of records, and an index from subscriptions to
//! records.

use crate::disk::{Disk, DiskFile};
use crate::record::{HEADER_LEN, MAGIC, RecordHeader};
use crate::segment_gaps::RecordedSegments;
use bytes::Bytes;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use rustc_hash::FxHashMap;
use std::fmt;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// A segment is closed before it grows beyond this size …
pub const SEGMENT_BYTES_MAX: u64 = 64 << 20;
/// … and when its index has this many entries.
pub const INDEX_ENTRIES_MAX: usize = 1 << 20;
/// Upper bound of positions in a segment: its index counts them from the base in 32 bits.
pub const POSITIONS_MAX: u64 = 1 << 32;
/// Offset of the first record; the segment's head is before it.
pub const FIRST_RECORD: u64 = 64;
const SEGMENT_MAGIC: &[u8; 8] = b"PRlog1\0\0";
const INDEX_MAGIC: &[u8; 8] = b"PRidx2\0\0";
/// Magic of indexes by older programs, which do not name their segment.
const UNNAMED_INDEX_MAGIC: &[u8; 8] = b"PRidx1\0\0";
/// Number of bytes per read during a scan.
const SCAN_BYTES: usize = 1 << 20;
/// Records that are no farther apart are read with one call.
const NEAR_BYTES: u64 = 32 << 10;

/// Empty files created ahead of time, so that starting a segment need not sync the directory. Two
/// names alternate: a new spare must not reuse the name of one whose rename may not be durable yet.
pub const SPARE_NAMES: [&str; 2] = ["spare.0", "spare.1"];

pub fn log_name(base: Position) -> String {
    format!("{:020}.log", base.0)
}

pub fn index_name(base: Position) -> String {
    format!("{:020}.idx", base.0)
}

/// Name of an unneeded segment that was emptied while the state database could not record its end.
pub fn retired_name(base: Position) -> String {
    format!("{:020}.done", base.0)
}

/// Name of an index whose segment is missing.
pub fn orphan_name(base: Position) -> String {
    format!("{:020}.idx.orphan", base.0)
}

pub fn retired_base_of(name: &str) -> Option<Position> {
    name.strip_suffix(".done")?.parse().ok().map(Position)
}

/// The base position in a segment's file name.
pub fn base_of(name: &str) -> Option<Position> {
    name.strip_suffix(".log")?.parse().ok().map(Position)
}

/// The base position in the name of an index, finished or not.
pub fn index_base_of(name: &str) -> Option<Position> {
    let stem = name.strip_suffix(".new").unwrap_or(name);
    stem.strip_suffix(".idx")?.parse().ok().map(Position)
}

/// A record with events of one subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    pub offset: u32,
    /// The record's first position, relative to the segment's base.
    pub first: u32,
    /// Number of its events that matched the subscription.
    pub matches: u32,
}

/// A row of the index table: the entries of one subscription in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubscriptionIndex {
    pub of: SubscriptionId,
    start: u32,
    count: u32,
    /// The last matching event, relative to the segment's base.
    last: u32,
    pub matches: u32,
}

enum SegmentIndex {
    /// The segment is active, or its index file is not written yet.
    Open {
        entries: FxHashMap<SubscriptionId, (Vec<IndexEntry>, u32)>,
        total: usize,
    },
    /// The index is in its file; only the table is in memory, ordered by subscription.
    Sealed {
        lines: Vec<SubscriptionIndex>,
        file: Arc<dyn DiskFile>,
        entries_at: u64,
    },
}

pub struct Segment {
    pub base: Position,
    pub file: Arc<dyn DiskFile>,
    /// The position after the last event.
    end: AtomicU64,
    /// Number of bytes in use.
    bytes: AtomicU64,
    /// Whether bytes after the last good record may exist, which must not be read again.
    tail: AtomicBool,
    index: Mutex<SegmentIndex>,
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({})", self.base)
    }
}

/// A range of a segment whose content differs from what was written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentDamage {
    pub from: u64,
    pub to: u64,
    /// Whether only the segment's last commit is affected; unless the commit is known to have been
    /// acknowledged, a crash interrupted it.
    pub torn: bool,
    /// The positions of the affected events, as far as known.
    pub events: std::ops::Range<u64>,
}

/// Result of a scan.
#[derive(Debug, Default)]
pub struct SegmentScan {
    /// Offset of the next record.
    pub end: u64,
    pub next: Position,
    pub commit: u64,
    pub damage: Vec<SegmentDamage>,
}

/// Head of a segment, before the first record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHead {
    pub base: Position,
    pub identity: u64,
    /// The first commit that can be in the segment.
    pub commit: u64,
    /// Generation of the state database when the segment was started; 0 if by an older program.
    pub generation: u64,
}

impl SegmentHead {
    fn encode(&self) -> [u8; FIRST_RECORD as usize] {
        let mut out = [0; FIRST_RECORD as usize];
        out[0..8].copy_from_slice(SEGMENT_MAGIC);
        out[8..16].copy_from_slice(&self.base.0.to_le_bytes());
        out[16..24].copy_from_slice(&self.identity.to_le_bytes());
        out[24..32].copy_from_slice(&self.commit.to_le_bytes());
        let crc = crc32fast::hash(&out[..32]);
        out[32..36].copy_from_slice(&crc.to_le_bytes());
        if self.generation > 0 {
            out[36..44].copy_from_slice(&self.generation.to_le_bytes());
            let crc = crc32fast::hash(&out[36..44]);
            out[44..48].copy_from_slice(&crc.to_le_bytes());
        }
        out
    }

    /// `None` if the checksum is invalid: the bytes are damaged or never reached the disk.
    pub fn read(file: &dyn DiskFile) -> io::Result<Option<SegmentHead>> {
        let mut bytes = [0; FIRST_RECORD as usize];
        file.read_at(&mut bytes, 0)?;
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let head = SegmentHead {
            base: Position(u64_at(8)),
            identity: u64_at(16),
            commit: u64_at(24),
            generation: u64_at(36),
        };
        Ok((head.encode() == bytes).then_some(head))
    }
}

impl Segment {
    /// Creates an empty segment. The file becomes durable with the directory's sync.
    pub fn create(disk: &dyn Disk, head: SegmentHead) -> io::Result<Segment> {
        Segment::begin(disk.create(&log_name(head.base))?, head)
    }

    /// Starts a segment in the spare file, whose old name is durable. If the rename is lost in a
    /// crash, the head still identifies the segment.
    pub fn of_spare(
        disk: &dyn Disk,
        name: &str,
        spare: Arc<dyn DiskFile>,
        head: SegmentHead,
    ) -> io::Result<Segment> {
        let segment = Segment::begin(spare, head)?;
        disk.rename(name, &log_name(head.base))?;
        Ok(segment)
    }

    fn begin(file: Arc<dyn DiskFile>, head: SegmentHead) -> io::Result<Segment> {
        file.write_at(&mut [IoSlice::new(&head.encode())], 0)?;
        // The head is durable before any record, so that later damage differs from an interrupted
        // write.
        file.sync()?;
        Ok(Segment::over(head.base, file))
    }

    fn over(base: Position, file: Arc<dyn DiskFile>) -> Segment {
        Segment {
            base,
            file,
            end: AtomicU64::new(base.0),
            bytes: AtomicU64::new(FIRST_RECORD),
            tail: AtomicBool::new(false),
            index: Mutex::new(SegmentIndex::Open {
                entries: FxHashMap::default(),
                total: 0,
            }),
        }
    }

    /// Opens a segment by its index; `None` without a valid index, in which case it must be
    /// scanned.
    pub fn open_sealed(disk: &dyn Disk, base: Position) -> io::Result<Option<Segment>> {
        let index = Segment::open_index(disk, base)?;
        let Some(mut segment) = index else {
            return Ok(None);
        };
        segment.file = disk.open(&log_name(base))?;
        Ok(Some(segment))
    }

    /// Like `open_sealed`, but only if the index fits the file: its length, and the recorded end.
    pub fn open_fitting(
        disk: &dyn Disk,
        base: Position,
        recorded: &RecordedSegments,
    ) -> io::Result<Option<Segment>> {
        let Some(segment) = Segment::open_sealed(disk, base)? else {
            return Ok(None);
        };
        // If the length differs, the segment was truncated, the index is another segment's, or the
        // reserved space was not released when the segment was closed.
        let is_long_enough = segment.file.size()? == segment.bytes();
        let end = segment.end().0;
        let is_recorded = recorded.get(&base.0).is_none_or(|recorded| *recorded == end);
        Ok((is_long_enough && is_recorded && end > base.0).then_some(segment))
    }

    /// Opens only the index, to find out what a segment contained. `None` without a valid index.
    pub fn open_index(disk: &dyn Disk, base: Position) -> io::Result<Option<Segment>> {
        let index = match disk.open(&index_name(base)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            index => index?,
        };
        let mut bytes = vec![0; index.size()? as usize];
        index.read_at(&mut bytes, 0)?;
        let Some(read) = read_index(&bytes).filter(|read| read.base.is_none_or(|of| of == base)) else {
            return Ok(None);
        };
        let ReadIndex {
            lines,
            entries_at,
            end,
            used,
            ..
        } = read;
        let segment = Segment::over(base, index.clone());
        segment.end.store(end, Relaxed);
        segment.bytes.store(used, Relaxed);
        *segment.index.lock().expect("no panic holds it") = SegmentIndex::Sealed {
            lines,
            file: index,
            entries_at,
        };
        Ok(Some(segment))
    }

    /// Opens a segment by reading all of it. `found` is called for every good record in order.
    /// Events from `limit` on are leftovers of a failed write and are skipped, because the next
    /// segment contains them.
    pub fn open_scanned(
        disk: &dyn Disk,
        base: Position,
        limit: Position,
        mut found: impl FnMut(&Segment, u64, &RecordHeader, &Bytes),
    ) -> io::Result<(Segment, SegmentScan)> {
        let file = disk.open(&log_name(base))?;
        let segment = Segment::over(base, file.clone());
        let scan = scan(&*file, base, limit, |offset, header, payload| {
            found(&segment, offset, header, payload);
        })?;
        segment.end.store(scan.next.0, Relaxed);
        segment.bytes.store(scan.end, Relaxed);
        Ok((segment, scan))
    }

    pub fn end(&self) -> Position {
        Position(self.end.load(Relaxed))
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Whether the segment's index has been written to its own file.
    pub fn is_sealed(&self) -> bool {
        let index = self.index.lock().expect("no panic holds it");
        matches!(*index, SegmentIndex::Sealed { .. })
    }

    /// Notes that a write failed half-way or was interrupted by a crash.
    pub fn has_tail(&self) {
        self.tail.store(true, Relaxed);
    }

    /// Notes what the writer has appended so far.
    pub fn grown(&self, end: Position, bytes: u64) {
        self.end.store(end.0, Relaxed);
        self.bytes.store(bytes, Relaxed);
    }

    /// Adds an appended record to the index.
    pub fn index_batch(&self, offset: u64, first: Position, batch: &PublishedBatch) {
        let mut index = self.index.lock().expect("no panic holds it");
        let SegmentIndex::Open { entries, total } = &mut *index else {
            debug_assert!(false, "a sealed segment takes no records");
            return;
        };
        let (offset, first) = (offset as u32, (first.0 - self.base.0) as u32);
        for (i, event) in batch.events.iter().enumerate() {
            for of in &*batch.matched[event.matched as usize] {
                let (list, last) = entries.entry(*of).or_default();
                *last = first + i as u32;
                match list.last_mut() {
                    Some(entry) if entry.offset == offset => entry.matches += 1,
                    _ => {
                        *total += 1;
                        list.push(IndexEntry {
                            offset,
                            first,
                            matches: 1,
                        });
                    }
                }
            }
        }
    }

    pub fn index_is_full(&self) -> bool {
        match &*self.index.lock().expect("no panic holds it") {
            SegmentIndex::Open { total, .. } => *total >= INDEX_ENTRIES_MAX,
            SegmentIndex::Sealed { .. } => true,
        }
    }

    /// Writes the index to its file and frees the memory. Must be called once the segment is
    /// complete.
    pub fn seal(&self, disk: &dyn Disk) -> io::Result<()> {
        // Releases reserved space; a failure only wastes it.
        let cut = self.file.truncate(self.bytes());
        let tail = self.tail.load(Relaxed);
        if tail {
            cut.and_then(|()| self.file.sync())?;
        }
        let bytes = {
            let index = self.index.lock().expect("no panic holds it");
            let SegmentIndex::Open { entries, .. } = &*index else {
                return Ok(());
            };
            write_index(entries, self.base, self.end().0, self.bytes())
        };
        let name = index_name(self.base);
        let temporary = format!("{name}.new");
        // Remove a leftover of an earlier crash.
        let _ = disk.remove(&temporary);
        let file = disk.create(&temporary)?;
        file.write_at(&mut [IoSlice::new(&bytes)], 0)?;
        // Without a tail the index is not flushed: a flush would delay the log, and a lost index is
        // rebuilt.
        if tail {
            file.sync()?;
        }
        disk.rename(&temporary, &name)?;
        let ReadIndex {
            lines, entries_at, ..
        } = read_index(&bytes).expect("just written");
        *self.index.lock().expect("no panic holds it") = SegmentIndex::Sealed {
            lines,
            file,
            entries_at,
        };
        Ok(())
    }

    /// Empties the segment and leaves a marker file, which the next start removes.
    pub fn retire(&self, disk: &dyn Disk) -> io::Result<()> {
        disk.rename(&log_name(self.base), &retired_name(self.base))?;
        disk.sync()?;
        self.file.truncate(0)?;
        match disk.remove(&index_name(self.base)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    pub fn remove(&self, disk: &dyn Disk) -> io::Result<()> {
        disk.remove(&log_name(self.base))?;
        match disk.remove(&index_name(self.base)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// For every subscription in the segment: its last matching position and the number of matches.
    pub fn subscriptions(&self) -> Vec<(SubscriptionId, Position, u64)> {
        let position = |last: u32| Position(self.base.0 + u64::from(last));
        match &*self.index.lock().expect("no panic holds it") {
            SegmentIndex::Open { entries, .. } => entries
                .iter()
                .map(|(of, (list, last))| {
                    let matches = list.iter().map(|e| u64::from(e.matches)).sum();
                    (*of, position(*last), matches)
                })
                .collect(),
            SegmentIndex::Sealed { lines, .. } => lines
                .iter()
                .map(|line| (line.of, position(line.last), u64::from(line.matches)))
                .collect(),
        }
    }

    /// Finds a subscription in the segment for which the condition on its last position holds.
    pub fn find_subscription(
        &self,
        mut wanted: impl FnMut(SubscriptionId, Position) -> bool,
    ) -> Option<SubscriptionId> {
        let position = |last: u32| Position(self.base.0 + u64::from(last));
        match &*self.index.lock().expect("no panic holds it") {
            SegmentIndex::Open { entries, .. } => entries
                .iter()
                .find(|(of, (_, last))| wanted(**of, position(*last)))
                .map(|(of, _)| *of),
            SegmentIndex::Sealed { lines, .. } => lines
                .iter()
                .find(|line| wanted(line.of, position(line.last)))
                .map(|line| line.of),
        }
    }

    /// Records of a subscription with positions from `from` on, at most `max`.
    pub fn entries(&self, of: SubscriptionId, from: Position, max: usize) -> io::Result<Vec<IndexEntry>> {
        let from = from.0.saturating_sub(self.base.0);
        // The record that begins at or before `from` may extend beyond it.
        let start = |list: &[IndexEntry]| {
            list.partition_point(|e| u64::from(e.first) <= from)
                .saturating_sub(1)
        };
        let index = self.index.lock().expect("no panic holds it");
        match &*index {
            SegmentIndex::Open { entries, .. } => {
                let Some((list, _)) = entries.get(&of) else {
                    return Ok(Vec::new());
                };
                Ok(list[start(list)..].iter().take(max).copied().collect())
            }
            SegmentIndex::Sealed {
                lines,
                file,
                entries_at,
            } => {
                let Ok(found) = lines.binary_search_by_key(&of, |line| line.of) else {
                    return Ok(Vec::new());
                };
                let (line, file, entries_at) = (lines[found], file.clone(), *entries_at);
                drop(index);
                read_entries(&*file, entries_at, line, from, max)
            }
        }
    }

    /// Reads and verifies the record at `offset`.
    pub fn read(&self, offset: u64) -> Result<VerifiedRecord, ReadError> {
        let mut head = [0; HEADER_LEN];
        let got = self.file.read_at(&mut head, offset)?;
        let header = RecordHeader::decode(&head[..got]).ok_or(ReadError::Damaged)?;
        let mut payload = vec![0; header.payload_len as usize];
        let got = self.file.read_at(&mut payload, offset + HEADER_LEN as u64)?;
        if got < payload.len() || crc32fast::hash(&payload) != header.payload_crc {
            return Err(ReadError::Damaged);
        }
        Ok((header, payload.into()))
    }

    /// Reads many records with few calls: `offsets` must ascend, and neighbours are read together.
    pub fn read_many(
        &self,
        offsets: &[u64],
        bytes_max: usize,
    ) -> io::Result<Vec<(u64, Option<VerifiedRecord>)>> {
        let mut found = Vec::with_capacity(offsets.len());
        let mut at = 0;
        let mut total = 0;
        while at < offsets.len() && total < bytes_max {
            let start = offsets[at];
            let near = offsets[at..]
                .windows(2)
                .take_while(|pair| pair[1] - pair[0] <= NEAR_BYTES)
                .count();
            let span = offsets[at + near] - start + NEAR_BYTES;
            let mut window = vec![0; (span as usize).min(bytes_max - total)];
            let got = self.file.read_at(&mut window, start)?;
            window.truncate(got);
            let window = Bytes::from(window);
            let mut in_window = false;
            while at < offsets.len() {
                let from = (offsets[at] - start) as usize;
                let Some(header) = window.get(from..).and_then(RecordHeader::decode) else {
                    break;
                };
                let end = from + header.record_len();
                if end > window.len() {
                    break;
                }
                let payload = window.slice(from + HEADER_LEN..end);
                let good = crc32fast::hash(&payload) == header.payload_crc;
                // Each record gets its own memory, so that an event that is kept does not keep the
                // whole window.
                let record = good.then(|| (header, Bytes::copy_from_slice(&payload)));
                found.push((offsets[at], record));
                total += header.record_len();
                in_window = true;
                at += 1;
            }
            if !in_window {
                // The record is larger than the window, or damaged.
                let record = match self.read(start) {
                    Ok(record) => Some(record),
                    Err(ReadError::Damaged) => None,
                    Err(ReadError::Io(e)) => return Err(e),
                };
                total += record.as_ref().map_or(1, |(header, _)| header.record_len());
                found.push((start, record));
                at += 1;
            }
        }
        Ok(found)
    }
}

/// A header and its payload, both verified.
pub type VerifiedRecord = (RecordHeader, Bytes);

#[derive(Debug)]
pub enum ReadError {
    Damaged,
    Io(io::Error),
}

impl From<io::Error> for ReadError {
    fn from(e: io::Error) -> ReadError {
        ReadError::Io(e)
    }
}

const LINE_LEN: usize = 24;
const ENTRY_LEN: usize = 12;
const INDEX_HEAD_LEN: usize = 44;
const UNNAMED_INDEX_HEAD_LEN: usize = 36;

fn write_index(
    entries: &FxHashMap<SubscriptionId, (Vec<IndexEntry>, u32)>,
    base: Position,
    end: u64,
    used: u64,
) -> Vec<u8> {
    let mut ordered: Vec<_> = entries.iter().collect();
    ordered.sort_by_key(|(of, _)| **of);
    let mut out = Vec::new();
    out.extend_from_slice(INDEX_MAGIC);
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&end.to_le_bytes());
    out.extend_from_slice(&used.to_le_bytes());
    out.extend_from_slice(&(ordered.len() as u64).to_le_bytes());
    out.extend_from_slice(&base.0.to_le_bytes());
    let mut start = 0u32;
    for (of, (list, last)) in &ordered {
        let matches: u32 = list.iter().map(|e| e.matches).sum();
        out.extend_from_slice(&of.0.to_le_bytes());
        for n in [start, list.len() as u32, *last, matches] {
            out.extend_from_slice(&n.to_le_bytes());
        }
        start += list.len() as u32;
    }
    for (_, (list, _)) in &ordered {
        for entry in list {
            for n in [entry.offset, entry.first, entry.matches] {
                out.extend_from_slice(&n.to_le_bytes());
            }
        }
    }
    let crc = crc32fast::hash(&out[12..]);
    out[8..12].copy_from_slice(&crc.to_le_bytes());
    out
}

struct ReadIndex {
    lines: Vec<SubscriptionIndex>,
    entries_at: u64,
    end: u64,
    used: u64,
    /// `None` in an index of an older program.
    base: Option<Position>,
}

fn read_index(bytes: &[u8]) -> Option<ReadIndex> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let magic = bytes.get(..8)?;
    let is_named = magic == INDEX_MAGIC;
    if !(is_named || magic == UNNAMED_INDEX_MAGIC) || u32_at(8)? != crc32fast::hash(bytes.get(12..)?) {
        return None;
    }
    let (base, head_len) = match is_named {
        true => (Some(Position(u64_at(36)?)), INDEX_HEAD_LEN),
        false => (None, UNNAMED_INDEX_HEAD_LEN),
    };
    let (end, used, count) = (u64_at(12)?, u64_at(20)?, u64_at(28)? as usize);
    let mut lines = Vec::with_capacity(count.min(bytes.len() / LINE_LEN));
    for i in 0..count {
        let at = head_len + i * LINE_LEN;
        lines.push(SubscriptionIndex {
            of: SubscriptionId(u64_at(at)?),
            start: u32_at(at + 8)?,
            count: u32_at(at + 12)?,
            last: u32_at(at + 16)?,
            matches: u32_at(at + 20)?,
        });
    }
    Some(ReadIndex {
        lines,
        entries_at: (head_len + count * LINE_LEN) as u64,
        end,
        used,
        base,
    })
}

fn read_entries(
    file: &dyn DiskFile,
    entries_at: u64,
    line: SubscriptionIndex,
    from: u64,
    max: usize,
) -> io::Result<Vec<IndexEntry>> {
    let read = |index: u32, count: usize| -> io::Result<Vec<IndexEntry>> {
        let mut bytes = vec![0; count * ENTRY_LEN];
        let at = entries_at + u64::from(line.start + index) * ENTRY_LEN as u64;
        let got = file.read_at(&mut bytes, at)?;
        bytes.truncate(got);
        let number = |b: &[u8]| u32::from_le_bytes(b.try_into().expect("four bytes"));
        Ok(bytes
            .chunks_exact(ENTRY_LEN)
            .map(|b| IndexEntry {
                offset: number(&b[0..4]),
                first: number(&b[4..8]),
                matches: number(&b[8..12]),
            })
            .collect())
    };
    let (mut low, mut high) = (0, line.count);
    while low < high {
        let middle = low + (high - low) / 2;
        let entry = read(middle, 1)?;
        if entry.first().is_some_and(|e| u64::from(e.first) <= from) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    let start = low.saturating_sub(1);
    read(start, max.min((line.count - start) as usize))
}

/// Reads a segment from the first record to the last and skips damaged places.
fn scan(
    file: &dyn DiskFile,
    base: Position,
    limit: Position,
    mut found: impl FnMut(u64, &RecordHeader, &Bytes),
) -> io::Result<SegmentScan> {
    let len = file.size()?;
    let head = SegmentHead::read(file)?;
    let mut result = SegmentScan {
        end: FIRST_RECORD,
        next: base,
        commit: 0,
        damage: Vec::new(),
    };
    // For each damaged place, the earliest commit that it can belong to.
    let mut concerned = Vec::new();
    let mut expected = head.map_or(0, |head| head.commit);
    let mut window = ScanWindow::new(file, len);
    let mut at = FIRST_RECORD;
    while at < len {
        let Some(header) = RecordHeader::decode(window.get(at, HEADER_LEN)?) else {
            // Nothing is readable here; later records are still used.
            let next = window.find_header(at + 1)?;
            if next.is_none() && window.is_zero_from(at)? {
                break;
            }
            let (to, first) = next.map_or((len, result.next), |(to, header)| (to, header.first));
            result.damage.push(SegmentDamage {
                from: at,
                to,
                torn: false,
                events: result.next.0..first.0.max(result.next.0),
            });
            concerned.push(expected);
            at = to;
            continue;
        };
        let end = at + header.record_len() as u64;
        let after = Position(header.first.0.saturating_add(u64::from(header.count)));
        if header.first < result.next || after > limit || header.commit < result.commit {
            // A leftover of a failed write: no segment is written to afterwards, so nothing that
            // follows was acknowledged.
            break;
        }
        let payload = window.get(at + HEADER_LEN as u64, header.payload_len as usize)?;
        let whole = payload.len() == header.payload_len as usize;
        if whole && crc32fast::hash(payload) == header.payload_crc {
            let payload = Bytes::copy_from_slice(payload);
            found(at, &header, &payload);
            result.next = after;
            result.end = end;
        } else {
            result.damage.push(SegmentDamage {
                from: at,
                to: end.min(len),
                torn: false,
                events: header.first.0..after.0,
            });
            concerned.push(header.commit);
        }
        // A valid header proves that every commit before its own was complete.
        result.commit = header.commit;
        expected = header.commit + u64::from(header.ends_commit);
        at = end;
    }
    for (damage, concerned) in result.damage.iter_mut().zip(concerned) {
        damage.torn = concerned >= result.commit;
    }
    Ok(result)
}

/// Whether a segment contains no record, valid or damaged.
pub fn scan_is_empty(file: &dyn DiskFile) -> io::Result<bool> {
    ScanWindow::new(file, file.size()?).is_zero_from(FIRST_RECORD)
}

/// The part of a file that is in memory during a scan.
struct ScanWindow<'a> {
    file: &'a dyn DiskFile,
    len: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl<'a> ScanWindow<'a> {
    fn new(file: &'a dyn DiskFile, len: u64) -> ScanWindow<'a> {
        ScanWindow {
            file,
            len,
            start: 0,
            bytes: Vec::new(),
        }
    }

    /// Bytes at `at`: as many as requested, or fewer at the end of the file.
    fn get(&mut self, at: u64, count: usize) -> io::Result<&[u8]> {
        let count = count.min((self.len.saturating_sub(at)) as usize);
        let inside = at >= self.start && at + count as u64 <= self.start + self.bytes.len() as u64;
        if !inside {
            self.bytes.resize(count.max(SCAN_BYTES), 0);
            let got = self.file.read_at(&mut self.bytes, at)?;
            self.bytes.truncate(got);
            self.start = at;
        }
        let from = (at - self.start) as usize;
        let to = (from + count).min(self.bytes.len());
        Ok(&self.bytes[from..to])
    }

    /// The next place from `at` on with a header whose checksum is valid.
    fn find_header(&mut self, mut at: u64) -> io::Result<Option<(u64, RecordHeader)>> {
        while at + HEADER_LEN as u64 <= self.len {
            self.get(at, HEADER_LEN)?;
            let bytes = &self.bytes[(at - self.start) as usize..];
            if bytes.len() < HEADER_LEN {
                break;
            }
            // The magic may cross the boundary of two windows.
            let found = memchr::memmem::find(bytes, &MAGIC).unwrap_or(bytes.len() - (MAGIC.len() - 1));
            at += found as u64;
            if let Some(header) = RecordHeader::decode(self.get(at, HEADER_LEN)?) {
                return Ok(Some((at, header)));
            }
            if self.get(at, MAGIC.len())? == MAGIC {
                at += 1;
            }
        }
        Ok(None)
    }

    fn is_zero_from(&mut self, mut at: u64) -> io::Result<bool> {
        while at < self.len {
            let bytes = self.get(at, SCAN_BYTES)?;
            if bytes.is_empty() {
                return Ok(true);
            }
            if bytes.iter().any(|b| *b != 0) {
                return Ok(false);
            }
            at += bytes.len() as u64;
        }
        Ok(true)
    }
}
