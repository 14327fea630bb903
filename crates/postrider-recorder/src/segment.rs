//! Segments: the files that records are stored in. A new one begins every few minutes; old ones are
//! deleted whole.

use crate::frame::{FRAME_HEAD, FRAME_MAX, SEGMENT_HEAD, SEGMENT_MAGIC};
use crate::index::{self, FileIndex, IndexNotes, MemoryIndex, RecordIndex};
use crate::record::RecordFrame;
use crate::writer::notes_of;
use postrider_engine::recorder::QueryWork;
use rustc_hash::FxHashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};

/// The least size of a read, which covers most frames …
const READ_MIN: usize = 512;
/// … and the greatest, while frames are read sequentially.
const READ_MAX: usize = 64 << 10;

/// The longest frame that is found after a damaged part of unknown length.
const RESYNC_MAX: usize = 64 << 10;

pub struct RecorderSegment {
    /// When the segment was begun, in nanoseconds; also its file name.
    pub start: i64,
    pub path: PathBuf,
    file: File,
    /// The length of the valid part of the file.
    len: AtomicU64,
    pub index: RwLock<RecordIndex>,
}

impl RecorderSegment {
    /// Begins an empty segment.
    pub fn create(directory: &Path, start: i64) -> io::Result<RecorderSegment> {
        let path = directory.join(format!("{start:020}.rec"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        let mut head = [0; SEGMENT_HEAD];
        head[..8].copy_from_slice(&SEGMENT_MAGIC);
        head[8..].copy_from_slice(&start.to_le_bytes());
        file.write_all_at(&head, 0)?;
        Ok(RecorderSegment {
            start,
            path,
            file,
            len: AtomicU64::new(SEGMENT_HEAD as u64),
            index: RwLock::new(RecordIndex::Memory(MemoryIndex::default())),
        })
    }

    /// Opens a segment of an earlier process. None if the file is not a segment.
    pub fn open(path: &Path) -> io::Result<Option<RecorderSegment>> {
        let file = File::open(path)?;
        let mut head = [0; SEGMENT_HEAD];
        match file.read_exact_at(&mut head, 0) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        if head[..8] != SEGMENT_MAGIC {
            return Ok(None);
        }
        let start = i64::from_le_bytes(head[8..].try_into().expect("eight bytes"));
        let index = match FileIndex::open(&path.with_extension("idx")) {
            Ok(index) => RecordIndex::File(index),
            Err(_) => RecordIndex::Missing,
        };
        Ok(Some(RecorderSegment {
            start,
            path: path.to_owned(),
            len: AtomicU64::new(file.metadata()?.len()),
            file,
            index: RwLock::new(index),
        }))
    }

    pub fn len(&self) -> u64 {
        self.len.load(Acquire)
    }

    /// The size of the segment and its index on disk.
    pub fn bytes(&self) -> u64 {
        let index = match &*self.index.read().expect("no panic holds it") {
            RecordIndex::File(index) => index.bytes(),
            RecordIndex::Memory(_) | RecordIndex::Missing => 0,
        };
        self.len() + index
    }

    /// Appends frames, then makes them visible to queries.
    pub fn append(&self, bytes: &[u8], notes: &mut IndexNotes) -> io::Result<()> {
        let at = self.len();
        self.file.write_all_at(bytes, at)?;
        self.len.store(at + bytes.len() as u64, Release);
        if let RecordIndex::Memory(index) = &mut *self.index.write().expect("no panic holds it") {
            index.add(notes);
        }
        Ok(())
    }

    /// Completes the index and writes it to its file. Nothing more may be appended.
    pub fn seal(&self) -> io::Result<()> {
        match &mut *self.index.write().expect("no panic holds it") {
            RecordIndex::Memory(index) => index.finish(),
            RecordIndex::File(_) | RecordIndex::Missing => return Ok(()),
        }
        // Queries continue meanwhile.
        let encoded = match &*self.index.read().expect("no panic holds it") {
            RecordIndex::Memory(index) => index.encode(),
            RecordIndex::File(_) | RecordIndex::Missing => return Ok(()),
        };
        let index = index::write(&self.path.with_extension("idx"), &encoded)?;
        *self.index.write().expect("no panic holds it") = RecordIndex::File(index);
        Ok(())
    }

    /// Rebuilds the index from the valid frames. Damaged frames are left out with a warning;
    /// anything after the last valid frame was cut short by a crash.
    pub fn rebuild(&self) -> io::Result<()> {
        let bytes = std::fs::read(&self.path)?;
        let mut index = MemoryIndex::default();
        let (mut notes, mut sets) = (IndexNotes::default(), FxHashMap::default());
        let (mut end, mut damaged) = (SEGMENT_HEAD, 0);
        while let Some((at, content, frame)) = next_frame(&bytes, end, self.start) {
            damaged += at - end;
            notes_of(&frame, at as u32, &mut sets, &mut notes);
            end = at + FRAME_HEAD + content.len();
            index.add(&mut notes);
        }
        if damaged > 0 {
            tracing::warn!(
                segment = %self.path.display(),
                bytes = damaged,
                "damaged records in a file of the flight recorder; what was between the whole ones is not shown"
            );
        }
        self.len.store(end as u64, Release);
        *self.index.write().expect("no panic holds it") = RecordIndex::Memory(index);
        self.seal()
    }

    /// Fills `buffer` from `offset`, with up to `wanted` bytes.
    fn read_at(&self, offset: u64, wanted: usize, buffer: &mut Vec<u8>) -> Option<()> {
        let left = usize::try_from(self.len().checked_sub(offset)?).ok()?;
        buffer.resize(wanted.min(left), 0);
        self.file.read_exact_at(buffer, offset).ok()
    }

    /// Deletes the files. Queries that have them open can continue.
    pub fn delete(&self) -> io::Result<()> {
        for path in [self.path.with_extension("idx"), self.path.clone()] {
            match std::fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Reads frames. Requests are often close to each other: the more sequential they are, the further
/// it reads ahead.
pub struct RecordFrameReader {
    /// The segment that was read, and the offset.
    from: Option<(i64, u64)>,
    bytes: Vec<u8>,
    ahead: usize,
}

impl Default for RecordFrameReader {
    fn default() -> RecordFrameReader {
        RecordFrameReader {
            from: None,
            bytes: Vec::new(),
            ahead: READ_MIN,
        }
    }
}

impl RecordFrameReader {
    /// The content of the frame at `offset`. None if the frame is not valid.
    pub fn read(&mut self, segment: &RecorderSegment, offset: u32, work: &mut QueryWork) -> Option<&[u8]> {
        work.frames += 1;
        let offset = u64::from(offset);
        let known = self.from.filter(|(start, _)| *start == segment.start);
        let within = known.and_then(|(_, from)| usize::try_from(offset.checked_sub(from)?).ok());
        if let Some(at) = within.filter(|at| self.holds(*at)) {
            return frame_at(&self.bytes, at);
        }
        let near = within.is_some_and(|at| at < self.bytes.len() + READ_MAX);
        self.ahead = if near {
            (self.ahead * 2).min(READ_MAX)
        } else {
            READ_MIN
        };
        self.from = None;
        segment.read_at(offset, self.ahead, &mut self.bytes)?;
        let whole = FRAME_HEAD + frame_len(&self.bytes)?;
        if whole > self.bytes.len() {
            segment.read_at(offset, whole, &mut self.bytes)?;
        }
        self.from = Some((segment.start, offset));
        frame_at(&self.bytes, 0)
    }

    /// Whether the frame at this offset is complete in the buffer.
    fn holds(&self, at: usize) -> bool {
        let frame = self.bytes.get(at..).unwrap_or_default();
        frame_len(frame).is_some_and(|len| FRAME_HEAD + len <= frame.len())
    }
}

/// Files of the flight recorder with damage before their last valid frame, or with a damaged index.
pub fn damaged_files(directory: &Path) -> io::Result<Vec<String>> {
    let mut damaged = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "rec") {
            continue;
        }
        let bytes = std::fs::read(&path)?;
        let Some(segment) = RecorderSegment::open(&path)? else {
            damaged.push(path.display().to_string());
            continue;
        };
        let (mut end, mut is_damaged) = (SEGMENT_HEAD, false);
        while let Some((at, content, _)) = next_frame(&bytes, end, segment.start) {
            is_damaged |= at > end;
            end = at + FRAME_HEAD + content.len();
        }
        let index = path.with_extension("idx");
        is_damaged |= match &*segment.index.read().expect("no panic holds it") {
            RecordIndex::File(index) => !index.is_whole(),
            RecordIndex::Memory(_) => false,
            RecordIndex::Missing => index.exists(),
        };
        if is_damaged {
            damaged.push(path.display().to_string());
        }
    }
    damaged.sort();
    Ok(damaged)
}

fn frame_len(bytes: &[u8]) -> Option<usize> {
    let len = u32::from_le_bytes(bytes.get(..4)?.try_into().expect("four bytes")) as usize;
    (1..=FRAME_MAX).contains(&len).then_some(len)
}

/// The first valid frame at or after `from`. After damage only frames up to [`RESYNC_MAX`] are
/// considered: a random length must not cost a checksum over megabytes.
fn next_frame(bytes: &[u8], from: usize, start: i64) -> Option<(usize, &[u8], RecordFrame<'_>)> {
    let whole = |at: usize| {
        let content = frame_at(bytes, at)?;
        Some((at, content, RecordFrame::read(content, start)?))
    };
    let is_short = |at: &usize| {
        let len = bytes.get(*at..).and_then(frame_len);
        len.is_some_and(|len| len <= RESYNC_MAX)
    };
    let after_damaged = || {
        // Usually the length of the damaged frame is right.
        let next = from + FRAME_HEAD + bytes.get(from..).and_then(frame_len)?;
        whole(next)
    };
    whole(from)
        .or_else(after_damaged)
        .or_else(|| (from + 1..bytes.len()).filter(is_short).find_map(whole))
}

/// The content of the frame that begins at `at`, if it is valid.
fn frame_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let bytes = bytes.get(at..)?;
    let len = frame_len(bytes)?;
    let crc = u32::from_le_bytes(bytes.get(4..8)?.try_into().expect("four bytes"));
    let content = bytes.get(FRAME_HEAD..FRAME_HEAD + len)?;
    (crc32fast::hash(content) == crc).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::kind;

    fn frame(name: &str) -> Vec<u8> {
        let mut content = vec![kind::TOPIC];
        for text in [name, "/id"] {
            content.push(text.len() as u8);
            content.extend_from_slice(text.as_bytes());
        }
        let mut frame = (content.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(&crc32fast::hash(&content).to_le_bytes());
        frame.extend_from_slice(&content);
        frame
    }

    #[test]
    fn frames_behind_a_damaged_one_are_found() {
        let names: Vec<String> = (0..9).map(|n| format!("topic {n}")).collect();
        let frames: Vec<Vec<u8>> = names.iter().map(|name| frame(name)).collect();
        let whole = frames.concat();
        let len = frames[0].len();
        // A byte of the content, of the checksum, of the length; then the greatest length.
        for (at, with) in [(12, 1u8), (4, 1), (0, 1), (3, 0xff)] {
            let mut bytes = whole.clone();
            bytes[3 * len + at] ^= with;
            // Followed by a frame that a crash cut short.
            bytes.extend_from_slice(&frames[0][..len - 2]);
            let mut found = Vec::new();
            let mut end = 0;
            while let Some((at, content, frame)) = next_frame(&bytes, end, 0) {
                end = at + FRAME_HEAD + content.len();
                match frame {
                    RecordFrame::Topic(topic) => found.push(topic.name.to_owned()),
                    _ => panic!("not a topic at {at}"),
                }
            }
            let mut expected = names.clone();
            expected.remove(3);
            assert_eq!(found, expected, "byte {at}");
            assert_eq!(end, whole.len());
        }
    }
}
