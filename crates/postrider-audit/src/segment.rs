//! The files of the log: `<number of the first line, 20 digits>.jsonl`.

use crate::line::parse;
use postrider_core::time::Timestamp;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const EXTENSION: &str = "jsonl";
/// Only the server's own user may read the log.
const MODE: u32 = 0o600;

/// A file of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditSegment {
    pub path: PathBuf,
    /// The number of the segment's first line.
    pub first: u64,
    /// Length up to which lines are durable.
    pub bytes: u64,
    /// The time of the segment's first line; none if no line can be read.
    pub begins: Option<Timestamp>,
}

impl AuditSegment {
    pub fn name(&self) -> String {
        name_of(&self.path)
    }
}

pub fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

pub fn path_of(directory: &Path, first: u64) -> PathBuf {
    directory.join(format!("{first:020}.{EXTENSION}"))
}

/// The segments of a directory, the oldest first. Other files are ignored.
pub fn find(directory: &Path) -> io::Result<Vec<AuditSegment>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        let number = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or_default();
        let Ok(first) = number.parse() else { continue };
        let bytes = std::fs::metadata(&path)?.len();
        let begins = first_time(&path)?;
        found.push(AuditSegment {
            path,
            first,
            bytes,
            begins,
        });
    }
    found.sort_by_key(|segment| segment.first);
    Ok(found)
}

fn first_time(path: &Path) -> io::Result<Option<Timestamp>> {
    let mut line = Vec::new();
    BufReader::new(File::open(path)?).read_until(b'\n', &mut line)?;
    Ok(parse(line.trim_ascii_end()).map(|parsed| parsed.time))
}

/// Opens a segment for writing at any offset; created if it does not exist.
pub fn open_to_write(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(MODE)
        .open(path)
}
