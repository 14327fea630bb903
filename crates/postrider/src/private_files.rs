//! Access rights of the data directory: directories 0700, files 0600.

use anyhow::{Context, Result};
use rustix::fs::Mode;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Permission bits of the group and of everybody else.
const OTHERS: u32 = 0o077;
/// Directory of the storage account "local": it may hold very many blobs, all created with mode
/// 0600.
const MANY_FILES: &str = "deadletters";

/// Makes all files that this process creates private to its owner, whatever the umask was.
pub fn restrict_new_files() {
    rustix::process::umask(Mode::from_raw_mode(OTHERS));
}

/// Creates the directory for its owner only; missing parents get the usual rights.
pub fn make_directory(path: &Path) -> Result<()> {
    let make = || {
        if path.is_dir() {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            made => made,
        }
    };
    make().with_context(|| format!("creating the directory {}", path.display()))
}

/// Opens a file for writing, and creates it for its owner only if it is missing. Existing content
/// stays until it is overwritten.
pub fn open_or_create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

/// Replaces a file's text. The mode of an existing file is not changed.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())
}

/// Removes the rights of other users from everything below the data directory that belongs to us.
/// Returns a warning for what stays open: the directory itself, whose rights are the operator's
/// choice, and files of other users.
pub fn tighten(data_dir: &Path) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    let reading = || format!("reading the access rights of {}", data_dir.display());
    let mode = fs::metadata(data_dir).with_context(reading)?.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        let shown = data_dir.display();
        warnings.push(format!(
            "data directory {shown} has mode {mode:04o}, so other users of this machine can reach it: run \"chmod 700 {shown}\""
        ));
    }
    let mut left = UnchangedPaths::default();
    below(data_dir, &mut left).with_context(reading)?;
    if let Some((path, mode)) = left.first {
        let (count, shown) = (left.count, path.display());
        warnings.push(format!(
            "{count} files or directories in {} stay open to other users because they belong to another user; the \
             first is {shown} with mode {mode:04o}: run \"chown -R\" to the server's user, or \"chmod -R go= {}\" as \
             their owner",
            data_dir.display(),
            data_dir.display()
        ));
    }
    Ok(warnings)
}

/// Paths whose rights could not be changed.
#[derive(Default)]
struct UnchangedPaths {
    count: usize,
    first: Option<(PathBuf, u32)>,
}

fn below(directory: &Path, left: &mut UnchangedPaths) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        let metadata = match entry.metadata() {
            // Removed since the directory was listed.
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        // Links are skipped: their targets are the operator's responsibility.
        if !metadata.is_dir() && !metadata.is_file() {
            continue;
        }
        let mode = metadata.permissions().mode() & 0o7777;
        let open = mode & OTHERS != 0;
        if open && fs::set_permissions(&path, fs::Permissions::from_mode(mode & !OTHERS)).is_err() {
            left.count += 1;
            left.first.get_or_insert((path.clone(), mode));
        }
        let look_below = open || entry.file_name() != MANY_FILES;
        if metadata.is_dir() && look_below {
            match below(&path, left) {
                // An unreadable directory, such as lost+found at the root of a volume, is closed to
                // others as well.
                Err(e) if e.kind() == ErrorKind::PermissionDenied => {}
                done => done?,
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn files_of_older_versions_are_tightened_and_the_directory_is_warned_of() {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("data");
        fs::create_dir_all(data.join("recorder")).unwrap();
        fs::create_dir_all(data.join("deadletters/c")).unwrap();
        let files = ["lock", "recorder/1.rec", "deadletters/c/blob"];
        for name in files {
            fs::write(data.join(name), "x").unwrap();
            fs::set_permissions(data.join(name), fs::Permissions::from_mode(0o666)).unwrap();
        }
        for name in ["", "recorder", "deadletters", "deadletters/c"] {
            fs::set_permissions(data.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        std::os::unix::fs::symlink(directory.path(), data.join("link")).unwrap();
        let around = mode(directory.path());
        let warnings = tighten(&data).unwrap();
        let [warning] = &warnings[..] else {
            panic!("{warnings:?}")
        };
        for word in ["0755", "chmod 700", &data.display().to_string()] {
            assert!(warning.contains(word), "{warning}");
        }
        for name in files {
            assert_eq!(mode(&data.join(name)), 0o600, "{name}");
        }
        for name in ["recorder", "deadletters", "deadletters/c"] {
            assert_eq!(mode(&data.join(name)), 0o700, "{name}");
        }
        assert_eq!(mode(&data), 0o755);
        assert_eq!(mode(directory.path()), around);

        fs::set_permissions(&data, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(tighten(&data).unwrap(), Vec::<String>::new());
    }
}
