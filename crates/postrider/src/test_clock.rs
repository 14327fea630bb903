//! Position of a test clock, stored beside the data that was made under it.
//!
//! Times in the data directory are the test clock's, so a later server must continue with its time.

use crate::private_files;
use anyhow::{Context, Result, bail};
use postrider_core::time::Timestamp;
use postrider_engine::virtual_time::SteppedClock;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn file(data_dir: &Path) -> PathBuf {
    data_dir.join("test-clock")
}

/// Opens the clock at the stored position, or at `now`.
pub fn open(data_dir: &Path, now: Timestamp) -> Result<SteppedClock> {
    // The time is rounded to milliseconds, the precision of the API, so that a time read there
    // compares equal.
    let now = Timestamp::from_nanos(now.nanos() / 1_000_000 * 1_000_000);
    let stood = read(data_dir)?.unwrap_or(now);
    let path = file(data_dir);
    write(&path, stood).with_context(|| format!("writing {}", path.display()))?;
    let keep = move |at: Timestamp| {
        if let Err(e) = write(&path, at) {
            tracing::error!(file = %path.display(), error = %e, "cannot keep the test clock's time");
        }
    };
    Ok(SteppedClock::new(stood, Box::new(keep)))
}

/// Refuses a directory whose events lie in the future of the machine's clock.
pub fn check_unused(data_dir: &Path, now: Timestamp) -> Result<()> {
    let path = file(data_dir);
    match read(data_dir)? {
        Some(stood) if stood > now + Duration::from_secs(60) => bail!(
            "{} says that this data directory was used with a test clock which stood at {stood}, in the \
             future: start with --test-clock, or with another data directory",
            path.display()
        ),
        Some(_) => std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display())),
        None => Ok(()),
    }
}

/// Stored position of the last test clock in this directory.
pub fn stored_position(data_dir: &Path) -> Result<Option<Timestamp>> {
    read(data_dir)
}

fn read(data_dir: &Path) -> Result<Option<Timestamp>> {
    let path = file(data_dir);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
    };
    let nanos = text.trim().parse().ok().map(Timestamp::from_nanos);
    let damaged = || format!("{} does not hold a time; remove it", path.display());
    nanos.map(Some).with_context(damaged)
}

/// Replaces the file atomically.
fn write(path: &Path, at: Timestamp) -> std::io::Result<()> {
    let draft = path.with_extension("new");
    private_files::write(&draft, &format!("{}\n", at.nanos()))?;
    std::fs::rename(&draft, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::time::Clock;

    const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);

    #[test]
    fn the_next_clock_goes_on_where_the_last_one_stood() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(open(dir.path(), NOW).unwrap().now(), NOW);
        let later = NOW + Duration::from_secs(3600);
        assert_eq!(open(dir.path(), later).unwrap().now(), NOW);
        write(&file(dir.path()), later).unwrap();
        assert_eq!(open(dir.path(), NOW).unwrap().now(), later);
    }

    #[test]
    fn real_time_does_not_go_on_with_events_of_the_future() {
        let dir = tempfile::tempdir().unwrap();
        check_unused(dir.path(), NOW).unwrap();
        write(&file(dir.path()), NOW + Duration::from_secs(7200)).unwrap();
        let refused = check_unused(dir.path(), NOW).unwrap_err().to_string();
        assert!(
            refused.contains("in the future: start with --test-clock"),
            "{refused}"
        );
        // The stored position has no effect once real time has passed it.
        check_unused(dir.path(), NOW + Duration::from_secs(7200)).unwrap();
        assert!(!file(dir.path()).exists());
    }

    #[test]
    fn a_damaged_file_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(file(dir.path()), "noon").unwrap();
        let refused = open(dir.path(), NOW).err().unwrap().to_string();
        assert!(refused.contains("test-clock does not hold a time"), "{refused}");
    }
}
