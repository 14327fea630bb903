//! Contracts of the stores (event log, catalog, archive), independent of what they are built on.

pub mod catalog;
pub mod replica;
pub mod handshake;
pub mod record;
pub mod seal;
pub mod log;
pub mod archive;
pub mod moving;
pub mod memory;
pub mod conformance;

pub use archive::{
    Archive, BlobFault, BlobFilter, BlobId, BlobRecord, DeadLetterMark, ReplayJob, ReplayState,
    UNREADABLE_BLOBS_MAX, UnreadableBlob,
};
pub use catalog::{Catalog, CatalogChange, CatalogContent, CatalogFollower};
pub use handshake::{Handshake, HandshakeExchange, HandshakeResponse, HandshakeState};
pub use log::{
    Backlog, Claim, ClaimLimits, DeadLetterKey, EventLog, LogEntry, LogHealth, LogListener,
    PendingDeadLetter, PendingDeadLetters, Settlement,
};

/// Why a store could not serve a request.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// More data waits to be written than the bound allows; try again shortly.
    #[error("the log cannot keep up: {0}")]
    Busy(String),
    /// Nothing can be read or written now: the disk is full, or a write or flush failed.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// The stored data cannot be decoded.
    #[error("{0}")]
    Corrupt(String),
    /// Another node has changed the same thing concurrently and this node has not applied that
    /// change yet. Nothing was stored; a retry shortly after decides on the new state.
    #[error("{0} was changed by another node at the same time; try again")]
    Conflict(String),
    /// The store has been closed.
    #[error("the store is closed")]
    Closed,
}
