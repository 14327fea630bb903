//! The audit log: JSON lines in files under `audit/` of the data directory. Each line holds the
//! SHA-256 of the line before it, so that a line that is edited, removed or moved later breaks the
//! chain. The crate knows neither HTTP nor the catalog: the caller decides what is recorded and
//! masks secrets first.

mod line;
mod segment;
mod checkpoint;
mod writer;
mod log;
mod read;
mod verify;

pub use line::{ActionResult, Actor, AuditEntry, AuditOutcome, AuditedRequest, LineHeader};
pub use log::{AuditLog, AuditStatus, AuditUnwritable, Config};
pub use read::{AuditLinePage, AuditQuery, AuditRow, LineOrder, LinePosition};
pub use verify::{BrokenLine, Verification, verify};

use std::path::PathBuf;

/// The audit log could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct Error {
    pub path: PathBuf,
    pub source: std::io::Error,
}
