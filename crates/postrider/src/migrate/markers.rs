//! Migration markers in a data directory: files beside the store that every server checks.

use crate::credentials::{read_if_there, write_private};
use crate::private_files;
use anyhow::{Context, Result, bail};
use postrider_core::time::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The embedded store's files and directories.
pub const STORE: [&str; 4] = ["log", "state.redb", "catalog.redb", "archive.redb"];
const MOVED_TO: &str = "moved-to.json";
const MOVING_IN: &str = "moving-in.json";

/// Marker: everything in the embedded store was moved away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedTo {
    /// Id of the cluster, in hexadecimal.
    pub cluster: String,
    /// Address of the cluster, for messages.
    pub place: String,
    pub at: String,
}

/// Marker: a migration into the embedded store is in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovingIn {
    pub cluster: String,
    pub place: String,
    pub at: String,
    /// Whether everything was copied and verified.
    pub verified: bool,
}

pub fn hex(identity: u64) -> String {
    format!("{identity:016x}")
}

fn read<T: DeserializeOwned>(data_dir: &Path, name: &str) -> Result<Option<T>> {
    let path = data_dir.join(name);
    let Some(text) = read_if_there(&path)? else {
        return Ok(None);
    };
    let wrong = || format!("{} is not one that this program understands", path.display());
    serde_json::from_str(&text).map(Some).with_context(wrong)
}

fn write<T: Serialize>(data_dir: &Path, name: &str, mark: &T) -> Result<()> {
    write_private(
        &data_dir.join(name),
        &format!("{}\n", serde_json::to_string_pretty(mark)?),
    )
}

fn remove(data_dir: &Path, name: &str) -> Result<()> {
    let path = data_dir.join(name);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", path.display()))
        }
        _ => sync(data_dir),
    }
}

fn sync(directory: &Path) -> Result<()> {
    let opened = fs::File::open(directory).and_then(|directory| directory.sync_all());
    opened.with_context(|| format!("flushing {}", directory.display()))
}

impl MovedTo {
    pub fn read(data_dir: &Path) -> Result<Option<MovedTo>> {
        read(data_dir, MOVED_TO)
    }

    pub fn write(&self, data_dir: &Path) -> Result<()> {
        write(data_dir, MOVED_TO, self)
    }

    pub fn remove(data_dir: &Path) -> Result<()> {
        remove(data_dir, MOVED_TO)
    }
}

impl MovingIn {
    pub fn read(data_dir: &Path) -> Result<Option<MovingIn>> {
        read(data_dir, MOVING_IN)
    }

    pub fn write(&self, data_dir: &Path) -> Result<()> {
        write(data_dir, MOVING_IN, self)
    }

    pub fn remove(data_dir: &Path) -> Result<()> {
        remove(data_dir, MOVING_IN)
    }
}

/// Refuses an embedded store that was moved away, or whose migration is incomplete.
pub fn check(data_dir: &Path) -> Result<()> {
    let shown = data_dir.display();
    if let Some(MovingIn { place, at, .. }) = MovingIn::read(data_dir)? {
        bail!(
            "a migration into {shown}, from {place}, was begun at {at} and has not ended: run \
             \"postrider migrate --to embedded\" again, or take it back with --undo"
        );
    }
    if let Some(MovedTo { place, at, .. }) = MovedTo::read(data_dir)? {
        bail!(
            "everything in {shown} was moved to {place} at {at}: set store.kind = \"jetstream\". To use what was \
             left here all the same, run \"postrider migrate --to jetstream --undo\" or remove {}",
            data_dir.join(MOVED_TO).display()
        );
    }
    Ok(())
}

/// Existing files of an embedded store.
pub fn store_files(data_dir: &Path) -> Vec<PathBuf> {
    let all = STORE.iter().map(|name| data_dir.join(name));
    all.filter(|path| path.exists()).collect()
}

/// Removes an incomplete store.
pub fn wipe(data_dir: &Path) -> Result<()> {
    for path in store_files(data_dir) {
        let removed = match path.is_dir() {
            true => fs::remove_dir_all(&path),
            false => fs::remove_file(&path),
        };
        removed.with_context(|| format!("removing {}", path.display()))?;
    }
    sync(data_dir)
}

/// Renames a store that was moved away; its marker is moved last, so that an interrupted run can
/// continue.
pub fn set_aside(data_dir: &Path, now: Timestamp) -> Result<PathBuf> {
    let aside = data_dir.join(format!("moved-{}", now.nanos() / 1_000_000_000));
    private_files::make_directory(&aside)?;
    let files = store_files(data_dir).into_iter().chain([data_dir.join(MOVED_TO)]);
    for from in files.filter(|path| path.exists()) {
        let to = aside.join(from.file_name().context("a file has a name")?);
        fs::rename(&from, &to).with_context(|| format!("moving {} to {}", from.display(), to.display()))?;
        sync(data_dir)?;
    }
    Ok(aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marked_directory_is_refused_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let here = directory.path();
        check(here).unwrap();
        let mark = MovedTo {
            cluster: hex(7),
            place: "nats://there".into(),
            at: "2026-01-02T03:04:05Z".into(),
        };
        mark.write(here).unwrap();
        assert_eq!(MovedTo::read(here).unwrap(), Some(mark));
        let refused = check(here).unwrap_err().to_string();
        for part in [
            "nats://there",
            "2026-01-02",
            "jetstream",
            "--undo",
            "moved-to.json",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        MovedTo::remove(here).unwrap();
        MovedTo::remove(here).unwrap();
        check(here).unwrap();
        let mark = MovingIn {
            cluster: hex(7),
            place: "nats://there".into(),
            at: String::new(),
            verified: false,
        };
        mark.write(here).unwrap();
        let refused = check(here).unwrap_err().to_string();
        assert!(refused.contains("has not ended"), "{refused}");
        fs::write(here.join(MOVING_IN), "{").unwrap();
        assert!(check(here).is_err());
    }

    #[test]
    fn a_store_is_set_aside_whole() {
        let directory = tempfile::tempdir().unwrap();
        let here = directory.path();
        for name in STORE {
            fs::create_dir(here.join(name)).unwrap();
        }
        fs::write(here.join("node-id"), "1").unwrap();
        fs::write(here.join(MOVED_TO), "{}").unwrap();
        let aside = set_aside(here, Timestamp::from_secs(9)).unwrap();
        assert!(store_files(here).is_empty() && !here.join(MOVED_TO).exists());
        assert_eq!(store_files(&aside).len(), STORE.len());
        assert!(aside.join(MOVED_TO).exists() && here.join("node-id").exists());
    }
}
