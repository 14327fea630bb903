//! The disk as an injected dependency: real files in production, injected faults in tests.

pub use crate::database::open_database;
use postrider_store::Error;
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const COMPACT_CACHE_BYTES: usize = 32 << 20;

/// A flat directory of files.
pub trait Disk: Send + Sync {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Creates a file; fails if it exists.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    fn names(&self) -> io::Result<Vec<String>>;
    fn remove(&self, name: &str) -> io::Result<()>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable.
    fn sync(&self) -> io::Result<()>;
    /// Available and total bytes of the file system.
    fn space(&self) -> io::Result<(u64, u64)>;
}

pub trait DiskFile: Send + Sync {
    /// Writes everything or fails.
    fn write_at(&self, slices: &mut [IoSlice<'_>], offset: u64) -> io::Result<()>;
    /// Reads until the buffer is full or the file ends; returns the number of bytes.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    fn sync(&self) -> io::Result<()>;
    /// Makes the file at least this long and reserves the disk space.
    fn allocate(&self, len: u64) -> io::Result<()>;
    fn truncate(&self, len: u64) -> io::Result<()>;
    fn size(&self) -> io::Result<u64>;
}

/// A directory of the local file system.
pub struct LocalDirectory {
    path: PathBuf,
}

impl LocalDirectory {
    pub fn open(path: impl Into<PathBuf>) -> io::Result<LocalDirectory> {
        let path = path.into();
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        Ok(LocalDirectory { path })
    }

    /// Opens a directory for reading only; a missing directory counts as empty.
    pub fn look_at(path: impl Into<PathBuf>) -> LocalDirectory {
        LocalDirectory { path: path.into() }
    }

    fn file(&self, name: &str, create: bool) -> io::Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(create)
            .mode(0o600)
            .open(self.path.join(name))?;
        Ok(Arc::new(LocalFile(file)))
    }
}

impl Disk for LocalDirectory {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.file(name, false)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.file(name, true)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        let entries = match std::fs::read_dir(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(names),
            entries => entries?,
        };
        for entry in entries {
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn space(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::statvfs(&self.path)?;
        let block = if stat.f_frsize > 0 {
            stat.f_frsize
        } else {
            stat.f_bsize
        };
        Ok((stat.f_bavail * block, stat.f_blocks * block))
    }
}

struct LocalFile(File);

impl DiskFile for LocalFile {
    fn write_at(&self, slices: &mut [IoSlice<'_>], mut offset: u64) -> io::Result<()> {
        // The kernel accepts at most this many slices per call.
        const SLICES_MAX: usize = 1024;
        let mut rest = slices;
        while !rest.is_empty() {
            let now = rest.len().min(SLICES_MAX);
            let written = match rustix::io::pwritev(&self.0, &rest[..now], offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => n,
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            offset += written as u64;
            IoSlice::advance_slices(&mut rest, written);
        }
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match self.0.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        match rustix::fs::fallocate(&self.0, rustix::fs::FallocateFlags::empty(), 0, len) {
            // The file system does not support reservation: the file grows as it is written.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            result => Ok(result?),
        }
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}

/// A disk on which changes of names and lengths only seem to happen, and nothing can be written.
pub struct DryDisk {
    disk: Arc<dyn Disk>,
    /// Names as they seem to be, and what they are on the disk.
    names: Mutex<Option<BTreeMap<String, String>>>,
}

struct DryFile(Arc<dyn DiskFile>);

impl DryDisk {
    pub fn over(disk: Arc<dyn Disk>) -> DryDisk {
        let names = Mutex::default();
        DryDisk { disk, names }
    }

    fn with_names<T>(&self, work: impl FnOnce(&mut BTreeMap<String, String>) -> T) -> io::Result<T> {
        let mut names = self.names.lock().expect("no panic holds it");
        let names = match &mut *names {
            Some(names) => names,
            unread => {
                let all = self.disk.names()?.into_iter();
                unread.insert(all.map(|name| (name.clone(), name)).collect())
            }
        };
        Ok(work(names))
    }
}

impl Disk for DryDisk {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let found = self.with_names(|names| names.get(name).cloned())?;
        let file = self.disk.open(&found.ok_or(io::ErrorKind::NotFound)?)?;
        Ok(Arc::new(DryFile(file)))
    }

    fn create(&self, _: &str) -> io::Result<Arc<dyn DiskFile>> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.with_names(|names| names.keys().cloned().collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.with_names(|names| drop(names.remove(name)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.with_names(|names| {
            if let Some(found) = names.remove(from) {
                names.insert(to.to_owned(), found);
            }
        })
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn space(&self) -> io::Result<(u64, u64)> {
        self.disk.space()
    }
}

impl DiskFile for DryFile {
    fn write_at(&self, _: &mut [IoSlice<'_>], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn truncate(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }
}

/// Makes a new file beside this one, puts it in its place and overwrites the old one. A crash leaves the old file or the
/// new one; what it leaves beside them is taken away by the next call.
pub fn replace_file(path: &Path, make: impl FnOnce(&Path) -> Result<(), Error>) -> Result<(), Error> {
    let failed = |e: io::Error| Error::Unavailable(format!("replacing {}: {e}", path.display()));
    let new = path.with_extension("new");
    match erase(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    if let Err(e) = make(&new) {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&new);
        return Err(e);
    }
    replace_with(path, &new).map_err(failed)
}

/// Replaces a file with another and overwrites the old one.
pub fn replace_with(path: &Path, new: &Path) -> io::Result<()> {
    let old = OpenOptions::new().write(true).open(path)?;
    std::fs::rename(new, path)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
    overwrite(&old)
}

/// Shrinks a database file to the size of its content.
pub fn compact(path: &Path) -> Result<(), Error> {
    let failed = |e: redb::CompactionError| Error::Unavailable(format!("compacting {}: {e}", path.display()));
    let mut database = open_database(path, COMPACT_CACHE_BYTES).map_err(Error::Unavailable)?;
    database.compact().map(drop).map_err(failed)
}

/// Overwrites a file and removes it.
pub fn erase(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    overwrite(&file)?;
    std::fs::remove_file(path)
}

/// Fills a file with zeros. Copy-on-write file systems and flash disks may keep the old content for
/// a while.
pub fn overwrite(file: &File) -> io::Result<()> {
    static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
    let len = file.metadata()?.len();
    let mut at = 0;
    while at < len {
        let now = ZEROS.len().min((len - at) as usize);
        file.write_all_at(&ZEROS[..now], at)?;
        at += now as u64;
    }
    file.sync_all()
}
