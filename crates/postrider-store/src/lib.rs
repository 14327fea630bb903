//! The promise: what an event log and a catalogue must hold, whatever they are built on.

pub mod catalog;
pub mod handshake;
pub mod record;
pub mod log;
pub mod archive;
pub mod memory;
pub mod conformance;

pub use archive::{Archive, BlobFilter, BlobId, BlobRecord, Mark, ReplayJob, ReplayState};
pub use catalog::{Catalog, Change, Loaded};
pub use handshake::{Exchange, Handshake, HandshakeState, Received};
pub use log::{
    Backlog, Claim, Entry, EventLog, Health, Letter, LetterKey, LettersWaiting, Listener, Settled, Want,
};

/// Why a store could not do its part.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// More is waiting to be written than the bound allows; try again shortly.
    #[error("the log cannot keep up: {0}")]
    Busy(String),
    /// Nothing can be read or written now: the disk is full, or a write or flush failed.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// What is stored cannot be understood.
    #[error("{0}")]
    Corrupt(String),
    /// The store has been closed.
    #[error("the store is closed")]
    Closed,
}
