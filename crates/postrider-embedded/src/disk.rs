//! The disk, handed in: real files in production, faults on demand in tests.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One directory of files.
pub trait Disk: Send + Sync {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Fails if the file exists.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    fn names(&self) -> io::Result<Vec<String>>;
    fn remove(&self, name: &str) -> io::Result<()>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable.
    fn sync(&self) -> io::Result<()>;
    /// Bytes available to us, and in all.
    fn space(&self) -> io::Result<(u64, u64)>;
}

pub trait DiskFile: Send + Sync {
    /// Writes all of it or fails.
    fn write_at(&self, slices: &mut [IoSlice<'_>], offset: u64) -> io::Result<()>;
    /// Reads until the buffer is full or the file ends; returns how much.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    fn sync(&self) -> io::Result<()>;
    /// Makes the file at least this long and reserves the space.
    fn allocate(&self, len: u64) -> io::Result<()>;
    fn truncate(&self, len: u64) -> io::Result<()>;
    fn size(&self) -> io::Result<u64>;
}

/// A directory of the machine.
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Directory> {
        let path = path.into();
        std::fs::create_dir_all(&path)?;
        Ok(Directory { path })
    }

    fn file(&self, name: &str, create: bool) -> io::Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(create)
            .mode(0o600)
            .open(self.path.join(name))?;
        Ok(Arc::new(RealFile(file)))
    }
}

impl Disk for Directory {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.file(name, false)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.file(name, true)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
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

struct RealFile(File);

impl DiskFile for RealFile {
    fn write_at(&self, slices: &mut [IoSlice<'_>], mut offset: u64) -> io::Result<()> {
        // The kernel takes at most this many slices at once.
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
            // The file system cannot reserve: the file grows as it is written.
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

/// Opens a redb database that only its owner can read. A damaged file makes redb panic: that is said
/// with the file's name instead.
pub fn open_database(path: &Path, cache_bytes: usize) -> Result<redb::Database, String> {
    let open = || {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|e| e.to_string())?;
        let mut builder = redb::Database::builder();
        builder.set_cache_size(cache_bytes);
        builder.create_file(file).map_err(|e| e.to_string())
    };
    let named = |why: &str| format!("opening {}: {why}", path.display());
    match std::panic::catch_unwind(open) {
        Ok(opened) => opened.map_err(|e| named(&e)),
        Err(_) => Err(named("the file is damaged")),
    }
}
