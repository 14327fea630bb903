//! Storage of revocations, token keys and the list of logins: files in the data directory, or
//! JetStream where nodes share them.

use crate::config::Config;
use crate::credentials;
use async_trait::async_trait;
use bytes::Bytes;
use postrider_api::access_state::AccessStore;
use postrider_api::logins::LoginJournal;
use postrider_jetstream::JetStreamCluster;
use postrider_store::seal::Keyring;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Log of logins, one line each.
const LOGINS_FILE: &str = "logins.jsonl";
/// Name in JetStream of what a lone server keeps in its access file.
const SHARED_NAME: &str = "access";

pub fn store(
    config: &Config,
    keys: Arc<Keyring>,
    cluster: Option<&Arc<JetStreamCluster>>,
) -> Arc<dyn AccessStore> {
    match cluster {
        Some(cluster) => Arc::new(ClusterAccessStorage(cluster.clone())),
        None => Arc::new(AccessFile {
            data_dir: config.data_dir.clone(),
            keys,
        }),
    }
}

/// Sealed access file of a server that is not in a cluster. Only this process writes it: the data
/// directory is locked.
struct AccessFile {
    data_dir: PathBuf,
    keys: Arc<Keyring>,
}

#[async_trait]
impl AccessStore for AccessFile {
    async fn read(&self) -> Result<Option<(Bytes, u64)>, String> {
        let text = credentials::read_access(&self.data_dir, &self.keys).map_err(|e| format!("{e:#}"))?;
        Ok(text.map(|text| (Bytes::from(text), 1)))
    }

    async fn swap(&self, text: Bytes, _: u64) -> Result<bool, String> {
        let text = std::str::from_utf8(&text).map_err(|e| e.to_string())?;
        postrider_api::http::compute_off_worker(|| {
            credentials::write_access(&self.data_dir, text, &self.keys)
        })
        .map_err(|e| format!("{e:#}"))?;
        Ok(true)
    }
}

struct ClusterAccessStorage(Arc<JetStreamCluster>);

#[async_trait]
impl AccessStore for ClusterAccessStorage {
    async fn read(&self) -> Result<Option<(Bytes, u64)>, String> {
        let read = self.0.shared_text(SHARED_NAME).await;
        read.map_err(|e| e.to_string())
    }

    async fn swap(&self, text: Bytes, expected: u64) -> Result<bool, String> {
        let swapped = self.0.swap_shared_text(SHARED_NAME, text, expected).await;
        swapped.map_err(|e| e.to_string())
    }
}

/// The list of this node's logins.
pub struct LoginFile(PathBuf);

impl LoginFile {
    pub fn new(data_dir: &Path) -> LoginFile {
        LoginFile(data_dir.join(LOGINS_FILE))
    }
}

impl LoginJournal for LoginFile {
    fn read(&self) -> Result<String, String> {
        let text = credentials::read_if_there(&self.0).map_err(|e| format!("{e:#}"))?;
        Ok(text.unwrap_or_default())
    }

    fn append(&self, line: &str) -> Result<(), String> {
        let appended = || {
            let mut options = OpenOptions::new();
            let mut file = options.create(true).append(true).mode(0o600).open(&self.0)?;
            file.write_all(format!("{line}\n").as_bytes())
        };
        appended().map_err(|e: std::io::Error| format!("{}: {e}", self.0.display()))
    }

    fn replace(&self, text: &str) -> Result<(), String> {
        credentials::write_private(&self.0, text).map_err(|e| format!("{e:#}"))
    }
}
