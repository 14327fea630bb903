//! A disk in memory that fails on demand and loses unflushed data at a power loss.

use postrider_embedded::disk::{Disk, DiskFile};
use postrider_store::conformance::SeededRandom;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, MutexGuard};

const SECTOR: usize = 512;
/// Bytes of reserved, unwritten space that an image includes.
const RESERVED_SHOWN: usize = 4096;

/// The files of a disk as a restart finds them.
pub type DiskImage = BTreeMap<String, Vec<u8>>;

#[derive(Clone, Default)]
pub struct FaultDisk {
    disk: Arc<Mutex<FaultDiskState>>,
}

#[derive(Default)]
struct FaultDiskState {
    /// The directory after each change since its last sync; the first state is the durable one.
    directories: Vec<BTreeMap<String, usize>>,
    contents: Vec<FaultFileContent>,
    /// Total capacity in bytes, if limited.
    room: Option<u64>,
    syncs_to_fail: u32,
    writes_to_fail: u32,
    at_sync: Option<SyncHook>,
}

/// Called before and after every flush of a file with an image that a power loss could leave.
type SyncHook = Box<dyn FnMut(DiskImage) + Send>;

#[derive(Clone, Default)]
struct FaultFileContent {
    bytes: Vec<u8>,
    /// Length of the file; reserved bytes beyond those written read as zero.
    len: usize,
    durable: Vec<u8>,
    durable_len: usize,
    dirty: BTreeSet<usize>,
    /// The content before a truncation that is not durable yet.
    before_truncation: Option<Box<FaultFileContent>>,
}

impl FaultFileContent {
    fn put(&mut self, bytes: &[u8], at: usize) {
        let end = at + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[at..end].copy_from_slice(bytes);
        self.len = self.len.max(end);
        self.dirty.extend(at / SECTOR..end.div_ceil(SECTOR));
    }

    fn sync(&mut self) {
        self.durable = self.bytes.clone();
        self.durable_len = self.len;
        self.dirty.clear();
        self.before_truncation = None;
    }

    /// The content after a power loss: each sector written since the last sync is either old or
    /// new.
    fn cut(&self, random: &mut SeededRandom) -> Vec<u8> {
        if let Some(before) = &self.before_truncation
            && random.one_in(2)
        {
            return before.cut(random);
        }
        let mut bytes = self.durable.clone();
        let reserved = if random.one_in(2) {
            self.len
        } else {
            self.durable_len
        };
        bytes.resize(reserved.min(self.bytes.len() + RESERVED_SHOWN), 0);
        // Sometimes keep all or none, which random choices alone would hardly produce.
        let chance = random.below(4);
        for sector in &self.dirty {
            let kept = match chance {
                0 => false,
                1 => true,
                _ => random.one_in(2),
            };
            let from = sector * SECTOR;
            let to = (from + SECTOR).min(self.bytes.len());
            if kept && from < to {
                if bytes.len() < to {
                    bytes.resize(to, 0);
                }
                bytes[from..to].copy_from_slice(&self.bytes[from..to]);
            }
        }
        bytes
    }
}

impl FaultDiskState {
    fn now(&mut self) -> &mut BTreeMap<String, usize> {
        self.directories.last_mut().expect("there is one")
    }

    fn change(&mut self, change: impl FnOnce(&mut BTreeMap<String, usize>)) {
        let mut next = self.now().clone();
        change(&mut next);
        self.directories.push(next);
    }

    fn used(&mut self) -> u64 {
        let inodes: Vec<usize> = self.now().values().copied().collect();
        inodes.iter().map(|inode| self.contents[*inode].len as u64).sum()
    }

    fn take_room(&mut self, inode: usize, len: usize) -> io::Result<()> {
        let more = len.saturating_sub(self.contents[inode].len) as u64;
        let used = self.used();
        match self.room {
            Some(room) if used + more > room => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    fn cut(&self, random: &mut SeededRandom) -> DiskImage {
        let directory = &self.directories[random.below(self.directories.len() as u64) as usize];
        let files = directory.iter();
        files
            .map(|(name, inode)| (name.clone(), self.contents[*inode].cut(random)))
            .collect()
    }

    fn tell(&mut self, seed: u64) {
        if let Some(mut at_sync) = self.at_sync.take() {
            at_sync(self.cut(&mut SeededRandom(seed)));
            self.at_sync = Some(at_sync);
        }
    }
}

impl FaultDisk {
    pub fn new(image: DiskImage) -> FaultDisk {
        let disk = FaultDisk::default();
        let mut files = disk.lock();
        let mut directory = BTreeMap::new();
        for (name, bytes) in image {
            directory.insert(name, files.contents.len());
            let len = bytes.len();
            files.contents.push(FaultFileContent {
                bytes: bytes.clone(),
                len,
                durable: bytes,
                durable_len: len,
                ..FaultFileContent::default()
            });
        }
        files.directories.push(directory);
        drop(files);
        disk
    }

    fn lock(&self) -> MutexGuard<'_, FaultDiskState> {
        self.disk.lock().expect("no panic holds it")
    }

    /// The image that a power loss would leave now.
    pub fn cut(&self, seed: u64) -> DiskImage {
        self.lock().cut(&mut SeededRandom(seed))
    }

    /// The current content, as the death of the process alone leaves it.
    pub fn image(&self) -> DiskImage {
        let mut files = self.lock();
        let directory = files.now().clone();
        let content = |inode: usize| {
            let content = &files.contents[inode];
            let mut bytes = content.bytes.clone();
            bytes.resize(content.len.min(bytes.len() + RESERVED_SHOWN), 0);
            bytes
        };
        directory
            .into_iter()
            .map(|(name, inode)| (name, content(inode)))
            .collect()
    }

    /// Flips a bit of a file, as a failing disk does.
    pub fn flip(&self, name: &str, at: usize) {
        let mut files = self.lock();
        let inode = files.now()[name];
        files.contents[inode].bytes[at] ^= 0x10;
    }

    pub fn limit(&self, room: Option<u64>) {
        self.lock().room = room;
    }

    pub fn fail_syncs(&self, count: u32) {
        self.lock().syncs_to_fail = count;
    }

    pub fn fail_writes(&self, count: u32) {
        self.lock().writes_to_fail = count;
    }

    pub fn at_sync(&self, at_sync: impl FnMut(DiskImage) + Send + 'static) {
        self.lock().at_sync = Some(Box::new(at_sync));
    }

    pub fn no_more_at_sync(&self) {
        self.lock().at_sync = None;
    }

    fn file(&self, inode: usize) -> Arc<dyn DiskFile> {
        Arc::new(FaultFile {
            disk: self.clone(),
            inode,
        })
    }
}

impl Disk for FaultDisk {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let inode = self.lock().now().get(name).copied();
        inode
            .map(|inode| self.file(inode))
            .ok_or(io::ErrorKind::NotFound.into())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut files = self.lock();
        if files.now().contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = files.contents.len();
        files.contents.push(FaultFileContent::default());
        files.change(|names| {
            names.insert(name.into(), inode);
        });
        drop(files);
        Ok(self.file(inode))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.lock().now().keys().cloned().collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut files = self.lock();
        if !files.now().contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        files.change(|names| {
            names.remove(name);
        });
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut files = self.lock();
        let Some(inode) = files.now().get(from).copied() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        files.change(|names| {
            names.remove(from);
            names.insert(to.into(), inode);
        });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut files = self.lock();
        let now = files.now().clone();
        files.directories = vec![now];
        Ok(())
    }

    fn space(&self) -> io::Result<(u64, u64)> {
        let mut files = self.lock();
        let room = files.room.unwrap_or(1 << 40);
        let used = files.used();
        Ok((room.saturating_sub(used), room))
    }
}

struct FaultFile {
    disk: FaultDisk,
    inode: usize,
}

impl DiskFile for FaultFile {
    fn write_at(&self, slices: &mut [IoSlice<'_>], offset: u64) -> io::Result<()> {
        let mut files = self.disk.lock();
        let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        let at = offset as usize;
        files.take_room(self.inode, at + bytes.len())?;
        if files.writes_to_fail > 0 {
            files.writes_to_fail -= 1;
            // Half of the bytes are written.
            files.contents[self.inode].put(&bytes[..bytes.len() / 2], at);
            return Err(io::Error::other("the write failed"));
        }
        files.contents[self.inode].put(&bytes, at);
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let files = self.disk.lock();
        let content = &files.contents[self.inode];
        let from = (offset as usize).min(content.len);
        let count = buffer.len().min(content.len - from);
        buffer[..count].fill(0);
        let written = content.bytes.len().min(from + count).saturating_sub(from);
        if written > 0 {
            buffer[..written].copy_from_slice(&content.bytes[from..from + written]);
        }
        Ok(count)
    }

    fn sync(&self) -> io::Result<()> {
        let mut files = self.disk.lock();
        let seed = files
            .contents
            .iter()
            .map(|c| c.len as u64 + c.dirty.len() as u64)
            .sum();
        files.tell(seed);
        if files.syncs_to_fail > 0 {
            files.syncs_to_fail -= 1;
            return Err(io::Error::other("the flush failed"));
        }
        files.contents[self.inode].sync();
        files.tell(seed + 2);
        Ok(())
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let mut files = self.disk.lock();
        files.take_room(self.inode, len as usize)?;
        let content = &mut files.contents[self.inode];
        content.len = content.len.max(len as usize);
        Ok(())
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        let content = &mut self.disk.lock().contents[self.inode];
        content.before_truncation = Some(Box::new(content.clone()));
        content.bytes.truncate(len as usize);
        content.len = len as usize;
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.lock().contents[self.inode].len as u64)
    }
}
