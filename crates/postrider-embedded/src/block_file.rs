//! A file for redb in which every block carries a checksum.
//!
//! redb verifies its own checksums only after a crash. This layer stores each 4 KiB of the database
//! after the CRC-32 of its number and content. A flipped bit anywhere (key, value, branch, root)
//! then fails the read that meets it, and the whole file can be verified without knowing its
//! structure. redb never overwrites a page in use, except for its header, which lies within one
//! sector together with its checksum.

use redb::StorageBackend;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// The first bytes of a file of this kind.
pub const MAGIC: &[u8; 16] = b"PRblocks1\0\0\0\0\0\0\0";
/// The first bytes of a plain redb file, as older programs wrote it.
pub const PLAIN_MAGIC: &[u8; 9] = b"redb\x1A\x0A\xA9\x0D\x0A";
/// redb reads and writes whole multiples of this size.
pub const BLOCK: usize = 4096;
/// CRC-32 of the block's number and content, and its complement.
const PREFIX: usize = 8;
const STORED: usize = PREFIX + BLOCK;
const FIRST: u64 = MAGIC.len() as u64;
/// Number of blocks per read when all are verified.
const VERIFY_BLOCKS: u64 = 256;
/// Number of blocks examined to recognize a file whose magic is damaged.
const LOOKED_AT: u64 = 8;

#[derive(Debug)]
pub struct BlockFile {
    file: File,
    /// After a crash redb searches for torn pages by its own checksums, so damaged blocks are
    /// returned as they are.
    lenient: AtomicBool,
    /// Held while a block is written, and by a verification that re-reads a block which looks
    /// damaged.
    writing: Mutex<()>,
}

/// The storage backend that redb uses.
#[derive(Debug)]
pub struct BlockFileBackend(pub Arc<BlockFile>);

fn checksum(number: u64, block: &[u8]) -> [u8; PREFIX] {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&number.to_le_bytes());
    crc.update(block);
    let crc = crc.finalize();
    let mut prefix = [0; PREFIX];
    prefix[..4].copy_from_slice(&crc.to_le_bytes());
    prefix[4..].copy_from_slice(&(!crc).to_le_bytes());
    prefix
}

/// Byte offset of a block in the file.
pub fn block_offset(number: u64) -> u64 {
    FIRST + number * STORED as u64
}

/// Whether a stored block is intact, or was never written.
fn holds(number: u64, stored: &[u8]) -> bool {
    let (prefix, block) = stored.split_at(PREFIX);
    prefix == checksum(number, block) || is_unwritten(stored)
}

fn is_unwritten(stored: &[u8]) -> bool {
    stored.iter().all(|byte| *byte == 0)
}

/// Whether most of the first blocks of a file are intact, regardless of its magic.
pub fn looks_like_blocks(file: &File) -> bool {
    let whole = |number: &u64| {
        let mut stored = vec![0; STORED];
        let read = file.read_exact_at(&mut stored, block_offset(*number));
        read.is_ok() && holds(*number, &stored) && !is_unwritten(&stored)
    };
    (0..LOOKED_AT).filter(whole).count() > 1
}

impl BlockFile {
    /// Opens a file that begins with [`MAGIC`], or an empty one.
    pub fn new(file: File) -> io::Result<BlockFile> {
        if file.metadata()?.len() < FIRST {
            file.write_all_at(MAGIC, 0)?;
        }
        let made = BlockFile {
            file,
            lenient: AtomicBool::new(false),
            writing: Mutex::new(()),
        };
        Ok(made)
    }

    /// Whether redb is shown damaged blocks as they are. Otherwise every damaged block is an error.
    pub fn set_lenient(&self, lenient: bool) {
        self.lenient.store(lenient, Relaxed);
    }

    /// Number of blocks in the file.
    pub fn blocks(&self) -> io::Result<u64> {
        let len = self.file.metadata()?.len();
        Ok(len.saturating_sub(FIRST) / STORED as u64)
    }

    fn read_stored(&self, first: u64, count: u64) -> io::Result<Vec<u8>> {
        let mut stored = vec![0; count as usize * STORED];
        self.file.read_exact_at(&mut stored, block_offset(first))?;
        Ok(stored)
    }

    /// The content of blocks, and whether all of them were written and are whole.
    pub fn read_unverified(&self, first: u64, count: u64) -> io::Result<(Vec<u8>, bool)> {
        let stored = self.read_stored(first, count)?;
        let mut blocks = Vec::with_capacity(count as usize * BLOCK);
        let mut is_whole = true;
        for (number, one) in (first..).zip(stored.chunks_exact(STORED)) {
            is_whole &= holds(number, one) && !is_unwritten(one);
            blocks.extend_from_slice(&one[PREFIX..]);
        }
        Ok((blocks, is_whole))
    }

    fn read_blocks(&self, first: u64, count: u64) -> io::Result<Vec<u8>> {
        let stored = self.read_stored(first, count)?;
        let mut blocks = Vec::with_capacity(count as usize * BLOCK);
        for (number, one) in (first..).zip(stored.chunks_exact(STORED)) {
            // The header lies within one sector and is never torn.
            let strict = number == 0 || !self.lenient.load(Relaxed);
            // Only the header is read before it is written: any other block of zeros has lost its write.
            let is_lost = number > 0 && is_unwritten(one);
            if strict && (is_lost || !holds(number, one)) {
                let what = format!("the block at byte {} is damaged", block_offset(number));
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            blocks.extend_from_slice(&one[PREFIX..]);
        }
        Ok(blocks)
    }

    fn write_blocks(&self, first: u64, blocks: &[u8]) -> io::Result<()> {
        let mut stored = Vec::with_capacity(blocks.len() / BLOCK * STORED);
        for (number, block) in (first..).zip(blocks.chunks_exact(BLOCK)) {
            stored.extend_from_slice(&checksum(number, block));
            stored.extend_from_slice(block);
        }
        let _writing = self.writing.lock().expect("no panic holds it");
        self.file.write_all_at(&stored, block_offset(first))
    }

    /// Verifies some blocks from `first` on. Returns the numbers of damaged blocks and the next
    /// block to verify, `None` after the last.
    pub fn verify(&self, first: u64) -> io::Result<(Vec<u64>, Option<u64>)> {
        let end = self.blocks()?;
        let count = end.saturating_sub(first).min(VERIFY_BLOCKS);
        let mut damaged = Vec::new();
        for (number, one) in (first..).zip(self.read_stored(first, count)?.chunks_exact(STORED)) {
            if holds(number, one) {
                continue;
            }
            // The block may have been written during the read: look again while no write is
            // possible.
            let _writing = self.writing.lock().expect("no panic holds it");
            if self
                .read_stored(number, 1)
                .is_ok_and(|again| !holds(number, &again))
            {
                damaged.push(number);
            }
        }
        let next = first + count;
        Ok((damaged, (next < end).then_some(next)))
    }

    pub fn verify_all(&self) -> io::Result<Vec<u64>> {
        let (mut damaged, mut next) = self.verify(0)?;
        while let Some(first) = next {
            let (more, following) = self.verify(first)?;
            damaged.extend(more);
            next = following;
        }
        Ok(damaged)
    }

    /// Makes the checksum of a block anew whose content is known to be right.
    pub fn reseal(&self, number: u64) -> io::Result<()> {
        let (block, _) = self.read_unverified(number, 1)?;
        self.write_blocks(number, &block)
    }

    /// Empties a block that nothing refers to.
    pub fn clear(&self, number: u64) -> io::Result<()> {
        let _writing = self.writing.lock().expect("no panic holds it");
        self.file.write_all_at(&[0; STORED], block_offset(number))
    }

    /// Copies a plain redb file into this empty one.
    pub fn take_over(&self, plain: &File) -> io::Result<()> {
        let blocks = plain.metadata()?.len().div_ceil(BLOCK as u64);
        for number in 0..blocks {
            let mut block = [0; BLOCK];
            let mut got = 0;
            while got < BLOCK {
                match plain.read_at(&mut block[got..], number * BLOCK as u64 + got as u64)? {
                    0 => break,
                    more => got += more,
                }
            }
            self.write_blocks(number, &block)?;
        }
        self.file.sync_all()
    }
}

impl StorageBackend for BlockFileBackend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.blocks()? * BLOCK as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let (first, within) = (offset / BLOCK as u64, offset as usize % BLOCK);
        let count = (within + out.len()).div_ceil(BLOCK) as u64;
        let blocks = self.0.read_blocks(first, count)?;
        out.copy_from_slice(&blocks[within..within + out.len()]);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.file.set_len(block_offset(len.div_ceil(BLOCK as u64)))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (first, within) = (offset / BLOCK as u64, offset as usize % BLOCK);
        if within == 0 && data.len().is_multiple_of(BLOCK) {
            return self.0.write_blocks(first, data);
        }
        // Only the header is smaller than a block.
        let count = (within + data.len()).div_ceil(BLOCK) as u64;
        let mut blocks = self.0.read_blocks(first, count)?;
        blocks[within..within + data.len()].copy_from_slice(data);
        self.0.write_blocks(first, &blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> (Arc<BlockFile>, File) {
        let file = tempfile::tempfile().unwrap();
        let same = file.try_clone().unwrap();
        (Arc::new(BlockFile::new(file).unwrap()), same)
    }

    #[test]
    fn what_is_written_is_read_and_what_lost_its_write_is_an_error() {
        let (blocks, _) = file();
        let backend = BlockFileBackend(blocks.clone());
        assert_eq!(backend.len().unwrap(), 0);
        backend.set_len(5 * BLOCK as u64).unwrap();
        let mut header = vec![1; BLOCK];
        backend.read(0, &mut header).unwrap();
        assert!(header.iter().all(|byte| *byte == 0));
        // Nothing reads what it has not written: these zeros are those of a lost write.
        assert!(backend.read(BLOCK as u64, &mut header).is_err());
        assert_eq!(blocks.verify_all().unwrap(), [0; 0]);
        backend.write(BLOCK as u64, &vec![7; 3 * BLOCK]).unwrap();
        backend.write(10, b"header").unwrap();
        let mut some = [0; 8];
        backend.read(9, &mut some).unwrap();
        assert_eq!(&some, b"\0header\0");
        backend.read(3 * BLOCK as u64 - 4, &mut some).unwrap();
        assert_eq!(some, [7; 8]);
        assert_eq!(blocks.verify_all().unwrap(), [0; 0]);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let (blocks, file) = file();
        let backend = BlockFileBackend(blocks.clone());
        backend.set_len(3 * BLOCK as u64).unwrap();
        backend.write(0, &vec![3; 2 * BLOCK]).unwrap();
        for at in [
            FIRST,
            FIRST + 5,
            FIRST + 100,
            block_offset(1) + 2,
            block_offset(1) + 4000,
            block_offset(2),
            block_offset(2) + 77,
        ] {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
            let number = (at - FIRST) / STORED as u64;
            assert_eq!(blocks.verify_all().unwrap(), [number], "byte {at}");
            let read = backend.read(number * BLOCK as u64, &mut [0; BLOCK]);
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
            file.write_all_at(&byte, at).unwrap();
        }
        // A block copied to another position counts as damaged.
        let one = blocks.read_stored(0, 1).unwrap();
        file.write_all_at(&one, block_offset(1)).unwrap();
        assert_eq!(blocks.verify_all().unwrap(), [1]);
        blocks.clear(1).unwrap();
        assert_eq!(blocks.verify_all().unwrap(), [0; 0]);
    }
}
