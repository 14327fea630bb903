//! The last line that was durable, kept beside the log's directory: shows that the directory was removed, or its end
//! cut off or rewritten.

use crate::line::{ChainHead, GENESIS};
use crate::segment::open_to_write;
use postrider_core::time::Timestamp;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The number and the hash of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub seq: u64,
    pub hash: String,
}

fn path_of(directory: &Path) -> PathBuf {
    directory.with_extension("checkpoint")
}

/// None if there is none, as before the first line, or none that can be read, as after a power loss.
pub fn read(directory: &Path) -> io::Result<Option<Checkpoint>> {
    let text = match std::fs::read(path_of(directory)) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let Some((seq, hash)) = text.trim_end().split_once(' ') else {
        return Ok(None);
    };
    let seq = seq.parse().ok().filter(|_| hash.len() == GENESIS.len());
    Ok(seq.map(|seq| Checkpoint {
        seq,
        hash: hash.to_owned(),
    }))
}

/// Replaces the checkpoint in place. Not synced: after a power loss an older one tells less, and nothing wrong.
pub fn write(directory: &Path, head: &ChainHead) -> io::Result<()> {
    let text = format!("{:020} {}\n", head.seq, head.hash);
    open_to_write(&path_of(directory))?.write_all_at(text.as_bytes(), 0)
}

impl Checkpoint {
    /// The end of a chain whose last lines are gone: the next line continues the line that is missing.
    pub fn head(&self, time: Timestamp) -> ChainHead {
        ChainHead {
            seq: self.seq,
            hash: self.hash.clone(),
            time,
        }
    }
}
