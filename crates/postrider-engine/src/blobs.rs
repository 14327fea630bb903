//! The trait for storage accounts, whose containers take dead letters. Implementations are handed
//! in.

use async_trait::async_trait;
use bytes::Bytes;

/// A blob that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenBlobVersion {
    /// The store's ETag of this version of the blob, without quotes; made up if the store has none.
    pub etag: String,
    /// The URL at which readers find the blob.
    pub url: String,
}

/// Why a blob could not be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    #[error("storage account {0:?} is not configured")]
    UnknownAccount(String),
    #[error("container {container:?} does not exist in storage account {account:?}")]
    NoContainer { account: String, container: String },
    /// The store is reachable and rejects our credentials.
    #[error("storage account {account:?} refuses our credentials: {detail}")]
    Refused { account: String, detail: String },
    #[error("blob {0:?} does not exist")]
    NotFound(String),
    /// Larger than any dead-letter blob: the blob was replaced by something else.
    #[error("blob {path:?} is larger than {max} bytes, the largest that is read")]
    TooLarge { path: String, max: usize },
    /// A failure that may go away by itself.
    #[error("storage account {account:?} cannot be reached: {detail}")]
    Unreachable { account: String, detail: String },
}

/// Storage accounts by name, each with containers that hold blobs.
#[async_trait]
pub trait BlobStore: Send + Sync {
    /// The names of the accounts, in order.
    fn accounts(&self) -> Vec<String>;

    /// Whether a container of this name can exist in the account; the error is for people.
    fn check_name(&self, account: &str, container: &str) -> Result<(), String>;

    /// Checks that blobs could be written now. Writes nothing permanent. A missing container that
    /// the first write would create is fine.
    async fn probe(&self, account: &str, container: &str) -> Result<(), BlobError>;

    /// Writes a whole blob, which on return survives a power cut as far as the store can promise.
    /// Creates the container if the account is configured so. Writing the same path again replaces
    /// the blob.
    async fn put(
        &self,
        account: &str,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError>;

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError>;

    /// Deletes a blob; a missing one is no error.
    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError>;
}
