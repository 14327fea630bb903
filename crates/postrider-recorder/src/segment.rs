//! Segments: the files that records are kept in, begun anew every few minutes and dropped whole.

use crate::frame::{FRAME_HEAD, FRAME_MAX, SEGMENT_HEAD, SEGMENT_MAGIC};
use crate::index::{self, FileIndex, Index, MemIndex, Notes};
use crate::record::Frame;
use crate::writer::notes_of;
use postrider_engine::recorder::Work;
use rustc_hash::FxHashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};

/// Most frames are read with one call.
const FIRST_READ: usize = 512;

pub struct Segment {
    /// When it was begun, in nanoseconds; also its name.
    pub start: i64,
    pub path: PathBuf,
    file: File,
    /// How much of the file is good.
    len: AtomicU64,
    pub index: RwLock<Index>,
}

impl Segment {
    /// Begins an empty one.
    pub fn create(directory: &Path, start: i64) -> io::Result<Segment> {
        let path = directory.join(format!("{start:020}.rec"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        let mut head = [0; SEGMENT_HEAD];
        head[..8].copy_from_slice(&SEGMENT_MAGIC);
        head[8..].copy_from_slice(&start.to_le_bytes());
        file.write_all_at(&head, 0)?;
        Ok(Segment {
            start,
            path,
            file,
            len: AtomicU64::new(SEGMENT_HEAD as u64),
            index: RwLock::new(Index::Memory(MemIndex::default())),
        })
    }

    /// Opens one of an earlier life. None if it is not a segment.
    pub fn open(path: &Path) -> io::Result<Option<Segment>> {
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
            Ok(index) => Index::File(index),
            Err(_) => Index::Missing,
        };
        Ok(Some(Segment {
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

    /// What it takes on disk.
    pub fn bytes(&self) -> u64 {
        let index = match &*self.index.read().expect("no panic holds it") {
            Index::File(index) => index.bytes(),
            Index::Memory(_) | Index::Missing => 0,
        };
        self.len() + index
    }

    /// Appends frames, then lets queries find them.
    pub fn append(&self, bytes: &[u8], notes: &mut Notes) -> io::Result<()> {
        let at = self.len();
        self.file.write_all_at(bytes, at)?;
        self.len.store(at + bytes.len() as u64, Release);
        if let Index::Memory(index) = &mut *self.index.write().expect("no panic holds it") {
            index.add(notes);
        }
        Ok(())
    }

    /// Nothing more will be written: the index is put in order and goes into its file.
    pub fn seal(&self) -> io::Result<()> {
        match &mut *self.index.write().expect("no panic holds it") {
            Index::Memory(index) => index.finish(),
            Index::File(_) | Index::Missing => return Ok(()),
        }
        // Queries go on meanwhile.
        let encoded = match &*self.index.read().expect("no panic holds it") {
            Index::Memory(index) => index.encode(),
            Index::File(_) | Index::Missing => return Ok(()),
        };
        let index = index::write(&self.path.with_extension("idx"), &encoded)?;
        *self.index.write().expect("no panic holds it") = Index::File(index);
        Ok(())
    }

    /// Makes the index anew from the frames, up to the first that is not whole.
    pub fn rebuild(&self) -> io::Result<()> {
        let bytes = std::fs::read(&self.path)?;
        let mut index = MemIndex::default();
        let (mut notes, mut sets) = (Notes::default(), FxHashMap::default());
        let mut at = SEGMENT_HEAD;
        while let Some(content) = frame_at(&bytes, at) {
            let Some(frame) = Frame::read(content, self.start) else {
                break;
            };
            notes_of(&frame, at as u32, &mut sets, &mut notes);
            at += FRAME_HEAD + content.len();
            index.add(&mut notes);
        }
        self.len.store(at as u64, Release);
        *self.index.write().expect("no panic holds it") = Index::Memory(index);
        self.seal()
    }

    /// Reads the content of the frame at `offset` into `buffer`. None if it is not whole.
    pub fn read<'b>(&self, offset: u32, buffer: &'b mut Vec<u8>, work: &mut Work) -> Option<&'b [u8]> {
        work.frames += 1;
        let offset = u64::from(offset);
        let left = usize::try_from(self.len().checked_sub(offset)?).ok()?;
        buffer.resize(FIRST_READ.min(left), 0);
        self.file.read_exact_at(buffer, offset).ok()?;
        let len = frame_len(buffer)?;
        let whole = FRAME_HEAD + len;
        if whole > left {
            return None;
        }
        let had = buffer.len();
        if whole > had {
            buffer.resize(whole, 0);
            self.file
                .read_exact_at(&mut buffer[had..], offset + had as u64)
                .ok()?;
        }
        frame_at(buffer, 0)
    }

    /// Deletes its files. Queries that have it open can go on.
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

fn frame_len(bytes: &[u8]) -> Option<usize> {
    let len = u32::from_le_bytes(bytes.get(..4)?.try_into().expect("four bytes")) as usize;
    (1..=FRAME_MAX).contains(&len).then_some(len)
}

/// The content of the frame that begins at `at`, if it is whole.
fn frame_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let bytes = bytes.get(at..)?;
    let len = frame_len(bytes)?;
    let crc = u32::from_le_bytes(bytes.get(4..8)?.try_into().expect("four bytes"));
    let content = bytes.get(FRAME_HEAD..FRAME_HEAD + len)?;
    (crc32fast::hash(content) == crc).then_some(content)
}
