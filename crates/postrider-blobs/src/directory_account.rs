//! An account in a local directory: `<root>/<container>/<path>`, each blob a file.

use crate::name::{TEMPORARY, encode};
use crate::{BLOB_BYTES_MAX, made_up_etag};
use bytes::Bytes;
use postrider_core::time::Clock;
use postrider_engine::blobs::{BlobError, WrittenBlobVersion};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The most directories that are remembered as durable.
const DURABLE_MAX: usize = 4096;

/// A storage account in a local directory. A crash while a blob is written may leave a file next to
/// it whose name begins with `.postrider-`; such files are never read and can be deleted.
pub(crate) struct DirectoryAccount {
    account: String,
    root: PathBuf,
    create_containers: bool,
    wall: Arc<dyn Clock>,
    /// Directories whose entry in their parent this process has flushed.
    durable: Mutex<BTreeSet<PathBuf>>,
    temporaries_made: AtomicU64,
}

impl DirectoryAccount {
    pub fn new(
        account: String,
        root: &Path,
        create_containers: bool,
        wall: Arc<dyn Clock>,
    ) -> Result<DirectoryAccount, String> {
        let root = std::path::absolute(root).map_err(|e| format!("root {root:?}: {e}"))?;
        if root.to_str().is_none() {
            return Err(format!(
                "root {root:?} is not UTF-8, so its blobs would have no URL"
            ));
        }
        Ok(DirectoryAccount {
            account,
            root,
            create_containers,
            wall,
            durable: Mutex::default(),
            temporaries_made: AtomicU64::new(0),
        })
    }

    pub async fn probe(self: &Arc<Self>, container: &str) -> Result<(), BlobError> {
        let container = container.to_owned();
        self.blocking(move |this| {
            let mut at = this.container(&container)?;
            // Missing directories are created on the first write, so the nearest existing one is
            // checked.
            while !at.exists() && at.pop() {}
            let temporary = this.temporary(&at, b"").map_err(|e| this.error(&at, e))?;
            fs::remove_file(&temporary).map_err(|e| this.error(&temporary, e))
        })
        .await
    }

    /// The file is flushed, then renamed, then the rename is flushed too: at every moment a reader
    /// sees the old blob or the new one, and on return the new one survives a power cut.
    pub async fn put(
        self: &Arc<Self>,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        let (container, path) = (container.to_owned(), path.to_owned());
        self.blocking(move |this| {
            let target = this.container(&container)?.join(path);
            let written = match this.write(&container, &target, &body) {
                // A directory that this process had created was removed.
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    this.lock().clear();
                    this.write(&container, &target, &body)
                }
                other => other,
            };
            written.map_err(|e| this.error(&target, e))?;
            let path = target.to_str().expect("root, container and path are UTF-8");
            Ok(WrittenBlobVersion {
                etag: made_up_etag(this.wall.now()),
                url: format!("file://{}", encode(path)),
            })
        })
        .await
    }

    pub async fn get(self: &Arc<Self>, container: &str, path: &str) -> Result<Bytes, BlobError> {
        let (container, path) = (container.to_owned(), path.to_owned());
        self.blocking(move |this| {
            // A missing root is an unmounted volume: its blobs are not known to be gone.
            fs::metadata(&this.root).map_err(|e| this.error(&this.root, e))?;
            let target = this.existing(&container)?.join(&path);
            let read = File::open(&target).and_then(|file| {
                let mut body = Vec::new();
                file.take(BLOB_BYTES_MAX as u64 + 1).read_to_end(&mut body)?;
                Ok(Bytes::from(body))
            });
            let body = read.map_err(|e| this.missing_or(path.clone(), &target, e))?;
            match body.len() > BLOB_BYTES_MAX {
                true => Err(BlobError::TooLarge {
                    path,
                    max: BLOB_BYTES_MAX,
                }),
                false => Ok(body),
            }
        })
        .await
    }

    /// Not flushed: after a power cut the blob may be back. Directories that become empty stay.
    pub async fn delete(self: &Arc<Self>, container: &str, path: &str) -> Result<(), BlobError> {
        let (container, path) = (container.to_owned(), path.to_owned());
        self.blocking(move |this| {
            let target = this.existing(&container)?.join(&path);
            if target.is_dir() {
                return Err(BlobError::NotFound(path));
            }
            fs::remove_file(&target).map_err(|e| this.missing_or(path, &target, e))
        })
        .await
    }

    /// Runs blocking disk operations on a thread for them. The operation continues if the caller
    /// goes away.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&DirectoryAccount) -> Result<T, BlobError> + Send + 'static,
    ) -> Result<T, BlobError> {
        let this = self.clone();
        match tokio::task::spawn_blocking(move || work(&this)).await {
            Ok(result) => result,
            Err(e) => Err(crate::unreachable(&self.account, e.to_string())),
        }
    }

    /// The directory of the container, existing or not.
    fn container(&self, name: &str) -> Result<PathBuf, BlobError> {
        match self.create_containers {
            true => Ok(self.root.join(name)),
            false => self.existing(name),
        }
    }

    fn existing(&self, container: &str) -> Result<PathBuf, BlobError> {
        let directory = self.root.join(container);
        match directory.is_dir() {
            true => Ok(directory),
            false => Err(BlobError::NoContainer {
                account: self.account.clone(),
                container: container.to_owned(),
            }),
        }
    }

    fn write(&self, container: &str, target: &Path, body: &[u8]) -> io::Result<()> {
        let folder = target.parent().expect("a blob lies in its container");
        self.make(container, folder)?;
        let temporary = self.temporary(folder, body)?;
        if let Err(e) = fs::rename(&temporary, target) {
            // The rename's error is more useful than one about the leftover file.
            let _ = fs::remove_file(&temporary);
            return Err(e);
        }
        flush(folder)
    }

    /// Creates the missing part of `folder` and makes all of it below the root durable. The lock is
    /// held meanwhile, so that a directory found there is always durable.
    fn make(&self, container: &str, folder: &Path) -> io::Result<()> {
        let mut durable = self.lock();
        if durable.len() >= DURABLE_MAX {
            durable.clear();
        }
        let base = match self.create_containers {
            true => {
                make_root(&self.root)?;
                self.root.clone()
            }
            false => self.root.join(container),
        };
        let doubtful: Vec<&Path> = folder
            .ancestors()
            .take_while(|a| *a != base && !durable.contains(*a))
            .collect();
        for directory in doubtful.into_iter().rev() {
            match DirBuilder::new().mode(0o700).create(directory) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
                _ => flush(directory.parent().expect("it lies below the base"))?,
            }
            durable.insert(directory.to_owned());
        }
        Ok(())
    }

    /// Writes a file with a unique name and flushes it; leaves none if that fails.
    fn temporary(&self, folder: &Path, body: &[u8]) -> io::Result<PathBuf> {
        let process = std::process::id();
        loop {
            let number = self.temporaries_made.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("{TEMPORARY}{process}-{number}"));
            let created = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path);
            let mut file = match created {
                // Left behind by an earlier process with the same id, or written by another
                // machine.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
                other => other?,
            };
            return match file.write_all(body).and_then(|()| file.sync_all()) {
                Ok(()) => Ok(path),
                Err(e) => {
                    // The first error is the one to report.
                    let _ = fs::remove_file(&path);
                    Err(e)
                }
            };
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<PathBuf>> {
        self.durable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn missing_or(&self, blob: String, target: &Path, error: io::Error) -> BlobError {
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => {
                BlobError::NotFound(blob)
            }
            _ => self.error(target, error),
        }
    }

    fn error(&self, at: &Path, error: io::Error) -> BlobError {
        let account = self.account.clone();
        let detail = format!("{}: {error}", at.display());
        match error.kind() {
            ErrorKind::PermissionDenied => BlobError::Refused { account, detail },
            _ => BlobError::Unreachable { account, detail },
        }
    }
}

/// Creates the root and its missing parents, and flushes only what it created: existing parents may
/// not be readable.
fn make_root(root: &Path) -> io::Result<()> {
    if root.is_dir() {
        return Ok(());
    }
    if let Some(parent) = root.parent() {
        make_root(parent)?;
        match DirBuilder::new().mode(0o700).create(root) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
            _ => flush(parent)?,
        }
    }
    Ok(())
}

/// Flushes the entries of a directory.
fn flush(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
