//! Storage accounts for dead letters: in a local directory, in Azure Blob Storage, in S3 or in
//! Google Cloud Storage, all behind the engine's trait [`BlobStore`].

mod name;
mod directory_account;
mod cloud_account;
mod http;
mod store_errors;

use async_trait::async_trait;
use bytes::Bytes;
use cloud_account::CloudAccount;
use directory_account::DirectoryAccount;
pub use http::{StoreConnect, StoreStream};
use postrider_core::ids::Secret;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::blobs::{BlobError, BlobStore, WrittenBlobVersion};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// The largest blob that is written or read. Dead-letter blobs are far smaller.
pub const BLOB_BYTES_MAX: usize = 64 << 20;

/// A storage account as configured.
#[derive(Clone, Debug)]
pub struct BlobAccountConfig {
    /// The name by which subscriptions refer to the account.
    pub name: String,
    pub place: AccountLocation,
    /// Whether a missing container is created on the first write. Azure, directories and S3 without
    /// a bucket support that; elsewhere this has no effect.
    pub create_containers: bool,
}

/// The store of an account's containers.
#[derive(Clone, Debug)]
pub enum AccountLocation {
    /// Containers are directories: `<root>/<container>/<path>`.
    Directory { root: PathBuf },
    /// `endpoint` is `https://<account>.blob.core.windows.net`, or that of a compatible service with the
    /// account in its path, such as Azurite's `http://127.0.0.1:10000/devstoreaccount1`.
    Azure {
        account: String,
        endpoint: String,
        key: Secret,
    },
    /// S3 or a compatible service, always addressed as `<endpoint>/<bucket>/<key>`. With a bucket,
    /// containers are folders in it; without one, each container is a bucket.
    S3 {
        endpoint: Option<String>,
        region: String,
        bucket: Option<String>,
        access_key_id: String,
        secret_access_key: Secret,
    },
    /// Google Cloud Storage. `service_account` is the text of the JSON key. Containers work as with
    /// S3.
    Gcs {
        endpoint: Option<String>,
        bucket: Option<String>,
        service_account: Secret,
    },
}

/// An account that cannot be used as configured. Contains none of its secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("storage account {account:?}: {reason}")]
pub struct Error {
    pub account: String,
    pub reason: String,
}

/// All configured accounts.
///
/// Nothing is retried: a failure is reported once, within 30 seconds, and the caller decides when
/// to retry. A call whose future is dropped may or may not have taken effect.
pub struct ObjectStores {
    accounts: BTreeMap<String, OpenedAccount>,
}

enum OpenedAccount {
    Directory(Arc<DirectoryAccount>),
    Remote(Box<CloudAccount>),
}

impl ObjectStores {
    /// Checks the accounts without contacting any store. `wall` provides the version names of blobs
    /// whose store has none; requests are signed with the machine's time, which the stores compare
    /// with theirs.
    pub fn new(
        accounts: Vec<BlobAccountConfig>,
        wall: Arc<dyn Clock>,
        connect: Arc<dyn StoreConnect>,
    ) -> Result<ObjectStores, Error> {
        let http = http::StoreHttpClient::new(connect);
        let mut kept = BTreeMap::new();
        for account in accounts {
            let name = account.name.clone();
            let wrong = |reason: String| Error {
                account: name.clone(),
                reason,
            };
            if name.is_empty() {
                return Err(wrong("the name is empty".to_owned()));
            }
            let one = match account.place {
                AccountLocation::Directory { root } => {
                    DirectoryAccount::new(account.name, &root, account.create_containers, wall.clone())
                        .map(|d| OpenedAccount::Directory(Arc::new(d)))
                }
                _ => CloudAccount::new(account, http.clone(), wall.clone())
                    .map(|r| OpenedAccount::Remote(Box::new(r))),
            };
            if kept.insert(name.clone(), one.map_err(wrong)?).is_some() {
                return Err(wrong("is configured twice".to_owned()));
            }
        }
        Ok(ObjectStores { accounts: kept })
    }

    fn account(&self, name: &str) -> Result<&OpenedAccount, BlobError> {
        let unknown = || BlobError::UnknownAccount(name.to_owned());
        self.accounts.get(name).ok_or_else(unknown)
    }

    /// The account, if it exists and could have a container of this name.
    fn account_of(&self, name: &str, container: &str) -> Result<&OpenedAccount, BlobError> {
        let account = self.account(name)?;
        match name::check_container(container) {
            Ok(()) => Ok(account),
            Err(_) => Err(BlobError::NoContainer {
                account: name.to_owned(),
                container: container.to_owned(),
            }),
        }
    }
}

#[async_trait]
impl BlobStore for ObjectStores {
    fn accounts(&self) -> Vec<String> {
        self.accounts.keys().cloned().collect()
    }

    /// Azure's rules apply to every kind of account, so that a subscription can move between them.
    fn check_name(&self, account: &str, container: &str) -> Result<(), String> {
        self.account(account).map_err(|e| e.to_string())?;
        name::check_container(container)
    }

    async fn probe(&self, account: &str, container: &str) -> Result<(), BlobError> {
        match self.account_of(account, container)? {
            OpenedAccount::Directory(directory) => directory.probe(container).await,
            OpenedAccount::Remote(remote) => remote.probe(container).await,
        }
    }

    async fn put(
        &self,
        account: &str,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        let at = self.account_of(account, container)?;
        check_path(account, path)?;
        if body.len() > BLOB_BYTES_MAX {
            let detail = format!("a blob of {} bytes is larger than {BLOB_BYTES_MAX}", body.len());
            return Err(unreachable(account, detail));
        }
        match at {
            OpenedAccount::Directory(directory) => directory.put(container, path, body).await,
            OpenedAccount::Remote(remote) => remote.put(container, path, body).await,
        }
    }

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError> {
        let at = self.account_of(account, container)?;
        check_path(account, path)?;
        match at {
            OpenedAccount::Directory(directory) => directory.get(container, path).await,
            OpenedAccount::Remote(remote) => remote.get(container, path).await,
        }
    }

    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError> {
        let at = self.account_of(account, container)?;
        check_path(account, path)?;
        let deleted = match at {
            OpenedAccount::Directory(directory) => directory.delete(container, path).await,
            OpenedAccount::Remote(remote) => remote.delete(container, path).await,
        };
        match deleted {
            Err(BlobError::NotFound(_) | BlobError::NoContainer { .. }) => Ok(()),
            other => other,
        }
    }
}

fn check_path(account: &str, path: &str) -> Result<(), BlobError> {
    name::check_path(path).map_err(|detail| unreachable(account, detail))
}

fn unreachable(account: &str, detail: String) -> BlobError {
    BlobError::Unreachable {
        account: account.to_owned(),
        detail,
    }
}

/// Names a version of a blob by the time at which it was written, in Azure's form: ticks of 100 ns
/// since the year 1.
fn made_up_etag(now: Timestamp) -> String {
    const UNIX_EPOCH_TICKS: u64 = 621_355_968_000_000_000;
    format!("0x{:X}", UNIX_EPOCH_TICKS + now.nanos().unsigned_abs() / 100)
}
