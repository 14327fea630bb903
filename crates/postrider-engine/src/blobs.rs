//! Where dead letters go: containers of storage accounts. The trait is ours, the stores are handed in.

use async_trait::async_trait;
use bytes::Bytes;

/// A blob that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// As the store names this version of the blob, without quotes; made up if it names none.
    pub etag: String,
    /// Where the blob can be read, as its readers would address it.
    pub url: String,
}

/// Why a blob could not be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    #[error("storage account {0:?} is not configured")]
    UnknownAccount(String),
    #[error("container {container:?} does not exist in storage account {account:?}")]
    NoContainer { account: String, container: String },
    /// The store is there and does not accept our credentials.
    #[error("storage account {account:?} refuses our credentials: {detail}")]
    Refused { account: String, detail: String },
    #[error("blob {0:?} does not exist")]
    NotFound(String),
    /// Larger than any blob of dead letters: something else has taken its place.
    #[error("blob {path:?} is larger than {max} bytes, the largest that is read")]
    TooLarge { path: String, max: usize },
    /// Anything that may be otherwise in a while.
    #[error("storage account {account:?} cannot be reached: {detail}")]
    Unreachable { account: String, detail: String },
}

/// Storage accounts by name, each with containers that hold blobs.
#[async_trait]
pub trait Blobs: Send + Sync {
    /// The names of the accounts, in order.
    fn accounts(&self) -> Vec<String>;

    /// Whether a container of this name can exist in the account; the error is for people.
    fn check_name(&self, account: &str, container: &str) -> Result<(), String>;

    /// Whether blobs could be written there now: asks the store, writes nothing that stays. A container that
    /// would be made on the first write is fine.
    async fn probe(&self, account: &str, container: &str) -> Result<(), BlobError>;

    /// Writes a whole blob, which survives a power cut on return as far as the store can promise it. Makes
    /// the container if the account says so. Writing the same blob again replaces it.
    async fn put(&self, account: &str, container: &str, path: &str, body: Bytes)
    -> Result<Stored, BlobError>;

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError>;

    /// Deletes a blob; one that is not there is fine.
    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError>;
}
