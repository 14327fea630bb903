//! A storage account in memory, which outlives the server's crashes.

use async_trait::async_trait;
use bytes::Bytes;
use postrider_engine::blobs::{BlobError, Blobs, Stored};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

const ACCOUNT: &str = "local";

#[derive(Default)]
pub struct MemoryBlobs {
    blobs: Mutex<BTreeMap<(String, String), Bytes>>,
}

impl MemoryBlobs {
    fn blobs(&self) -> MutexGuard<'_, BTreeMap<(String, String), Bytes>> {
        self.blobs.lock().expect("no panic holds it")
    }
}

fn check(account: &str) -> Result<(), BlobError> {
    match account {
        ACCOUNT => Ok(()),
        other => Err(BlobError::UnknownAccount(other.to_owned())),
    }
}

#[async_trait]
impl Blobs for MemoryBlobs {
    fn accounts(&self) -> Vec<String> {
        vec![ACCOUNT.to_owned()]
    }

    fn check_name(&self, account: &str, _container: &str) -> Result<(), String> {
        check(account).map_err(|e| e.to_string())
    }

    async fn probe(&self, account: &str, _container: &str) -> Result<(), BlobError> {
        check(account)
    }

    async fn put(
        &self,
        account: &str,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<Stored, BlobError> {
        check(account)?;
        self.blobs().insert((container.to_owned(), path.to_owned()), body);
        Ok(Stored {
            etag: "0x1".to_owned(),
            url: format!("memory:///{account}/{container}/{path}"),
        })
    }

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError> {
        check(account)?;
        let blobs = self.blobs();
        let found = blobs.get(&(container.to_owned(), path.to_owned()));
        found.cloned().ok_or_else(|| BlobError::NotFound(path.to_owned()))
    }

    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError> {
        check(account)?;
        self.blobs().remove(&(container.to_owned(), path.to_owned()));
        Ok(())
    }
}
