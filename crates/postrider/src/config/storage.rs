//! `[[storage_account]]` and `dead_letter.default`: where dead letters can go, and the checks on
//! it.

use super::check::{CheckResult, refuse};
use super::model::{Config, base_url};
use super::nearest;
use super::secret::ConfigSecret;
use base64::Engine;
use postrider_wire::resources::validate::{check_account_name, check_storage_name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Account that exists unless it is configured otherwise.
pub const LOCAL: &str = "local";
/// The container of `dead_letter.default` if it names none.
const DEFAULT_CONTAINER: &str = "deadletters";

/// A storage account. The keys it may have depend on its kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StorageAccountConfig {
    pub name: String,
    pub kind: AccountKind,
    /// Whether missing containers are created. `None`: only in directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub create_containers: Option<bool>,

    /// Base64, as Azure hands it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<ConfigSecret>,
    #[serde(deserialize_with = "base_url", skip_serializing_if = "Option::is_none")]
    pub blob_endpoint: Option<String>,
    #[serde(deserialize_with = "base_url", skip_serializing_if = "Option::is_none")]
    pub queue_endpoint: Option<String>,

    #[serde(deserialize_with = "base_url", skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// `None`: each container is a bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket: Option<String>,

    #[serde(skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_key_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_access_key: Option<ConfigSecret>,

    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_file: Option<PathBuf>,

    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccountKind {
    #[default]
    Azure,
    S3,
    Gcs,
    Directory,
}

impl AccountKind {
    fn name(self) -> &'static str {
        match self {
            AccountKind::Azure => "azure",
            AccountKind::S3 => "s3",
            AccountKind::Gcs => "gcs",
            AccountKind::Directory => "directory",
        }
    }

    /// Keys that apply to the kind, and those of them that are required.
    fn keys(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            AccountKind::Azure => (&["key", "blob_endpoint", "queue_endpoint"], &["key"]),
            AccountKind::S3 => (
                &[
                    "endpoint",
                    "region",
                    "bucket",
                    "access_key_id",
                    "secret_access_key",
                ],
                &["access_key_id", "secret_access_key"],
            ),
            AccountKind::Gcs => (
                &["endpoint", "bucket", "service_account_file"],
                &["service_account_file"],
            ),
            AccountKind::Directory => (&["path"], &["path"]),
        }
    }
}

impl StorageAccountConfig {
    pub fn creates_containers(&self) -> bool {
        self.create_containers
            .unwrap_or(self.kind == AccountKind::Directory)
    }

    /// Keys that only some kinds have. `None`: not set; otherwise whether the value is empty.
    fn given(&self) -> [(&'static str, Option<bool>); 10] {
        let text = |value: &Option<String>| value.as_ref().map(String::is_empty);
        let secret = |value: &Option<ConfigSecret>| value.as_ref().map(|secret| secret.expose().is_empty());
        let path = |value: &Option<PathBuf>| value.as_ref().map(|path| path.as_os_str().is_empty());
        [
            ("key", secret(&self.key)),
            ("blob_endpoint", text(&self.blob_endpoint)),
            ("queue_endpoint", text(&self.queue_endpoint)),
            ("endpoint", text(&self.endpoint)),
            ("bucket", text(&self.bucket)),
            ("region", text(&self.region)),
            ("access_key_id", text(&self.access_key_id)),
            ("secret_access_key", secret(&self.secret_access_key)),
            ("service_account_file", path(&self.service_account_file)),
            ("path", path(&self.path)),
        ]
    }
}

impl Config {
    /// The configured accounts, and the local one unless it is among them.
    pub fn all_storage_accounts(&self) -> Vec<StorageAccountConfig> {
        let mut all = self.storage_accounts.clone();
        if !all.iter().any(|account| account.name == LOCAL) {
            all.push(StorageAccountConfig {
                name: LOCAL.into(),
                kind: AccountKind::Directory,
                path: Some(self.data_dir.join("deadletters")),
                ..StorageAccountConfig::default()
            });
        }
        all
    }

    /// The account and the container of `dead_letter.default`.
    pub fn default_dead_letter_container(&self) -> Option<(&str, &str)> {
        let place = self.dead_letter.default.as_deref()?;
        Some(place.split_once('/').unwrap_or((place, DEFAULT_CONTAINER)))
    }

    /// Message that no such account exists, with the known ones; `None` if it exists.
    fn unknown_account(&self, name: &str) -> Option<String> {
        let known: Vec<String> = self
            .all_storage_accounts()
            .into_iter()
            .map(|account| account.name)
            .collect();
        if known.iter().any(|account| account == name) {
            return None;
        }
        let hint = nearest(name, known.iter().map(String::as_str));
        let hint = hint.map(|near| format!("; did you mean \"{near}\"?"));
        Some(format!(
            "storage account \"{name}\" is not configured, only {}{}",
            known.join(", "),
            hint.unwrap_or_default()
        ))
    }
}

pub fn check(config: &Config) -> CheckResult {
    let mut seen = BTreeSet::new();
    for (index, account) in config.storage_accounts.iter().enumerate() {
        let key = |name: &str| format!("storage_account[{index}].{name}");
        let name = &account.name;
        if name.is_empty() {
            return refuse(key("name"), "is required");
        }
        if check_account_name(name).is_err() {
            let reason = format!("must have 3 to 24 lowercase letters and digits, was \"{name}\"");
            return refuse(key("name"), reason);
        }
        if !seen.insert(name) {
            return refuse(key("name"), format!("\"{name}\" is given twice"));
        }
        let (own, needed) = account.kind.keys();
        let kind = account.kind.name();
        for (name, empty) in account.given() {
            match empty {
                Some(_) if !own.contains(&name) => {
                    return refuse(key(name), format!("is not for an account of kind \"{kind}\""));
                }
                Some(true) => return refuse(key(name), "must not be empty"),
                None if needed.contains(&name) => {
                    return refuse(
                        key(name),
                        format!("is required for an account of kind \"{kind}\""),
                    );
                }
                _ => {}
            }
        }
        let shared = account.key.as_ref().map(|key| key.expose()).unwrap_or_default();
        if base64::engine::general_purpose::STANDARD.decode(shared).is_err() {
            return refuse(key("key"), "is not base64");
        }
    }
    check_safety_net(config)?;
    check_sources(config)
}

fn check_safety_net(config: &Config) -> CheckResult {
    let Some((account, container)) = config.default_dead_letter_container() else {
        return Ok(());
    };
    if let Some(reason) = config.unknown_account(account) {
        return refuse("dead_letter.default", reason);
    }
    match check_storage_name(container) {
        Ok(()) => Ok(()),
        Err(reason) => refuse("dead_letter.default", format!("the container {reason}")),
    }
}

/// A source that is only a name must be that of a storage account.
fn check_sources(config: &Config) -> CheckResult {
    for (index, topic) in config.system_topics.iter().enumerate() {
        if topic.source.starts_with('/') {
            continue;
        }
        if let Some(reason) = config.unknown_account(&topic.source) {
            return refuse(format!("system_topic[{index}].source"), reason);
        }
    }
    Ok(())
}
