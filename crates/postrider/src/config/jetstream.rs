//! `[store.jetstream]`: address, credentials and layout of the cluster in JetStream.

use super::Config;
use super::check::{CheckResult, refuse};
use super::duration;
use super::model::StoreKind;
use super::secret::ConfigSecret;
use postrider_core::ids;
use postrider_jetstream::{JetStreamSettings, NatsAuth, NatsTls};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JetStreamConfig {
    /// Servers of one NATS cluster, not necessarily all.
    pub urls: Vec<String>,
    pub user: Option<String>,
    pub password: Option<ConfigSecret>,
    pub token: Option<ConfigSecret>,
    /// Seed of an nkey.
    pub nkey: Option<ConfigSecret>,
    /// A file with a JWT and a seed.
    pub credentials_file: Option<PathBuf>,
    pub tls: bool,
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    pub replicas: usize,
    pub prefix: String,
    pub partitions: u8,
    #[serde(with = "duration")]
    pub lease: Duration,
    /// Display name of this node. `None`: the machine's name.
    pub node_name: Option<String>,
    pub monitor_urls: Vec<String>,
    pub system_user: Option<String>,
    pub system_password: Option<ConfigSecret>,
    pub system_credentials_file: Option<PathBuf>,
}

impl Default for JetStreamConfig {
    fn default() -> JetStreamConfig {
        let JetStreamSettings {
            urls,
            replicas,
            prefix,
            partitions,
            lease,
            ..
        } = JetStreamSettings::default();
        JetStreamConfig {
            urls,
            user: None,
            password: None,
            token: None,
            nkey: None,
            credentials_file: None,
            tls: false,
            ca_file: None,
            cert_file: None,
            key_file: None,
            replicas,
            prefix,
            partitions,
            lease,
            node_name: None,
            monitor_urls: Vec::new(),
            system_user: None,
            system_password: None,
            system_credentials_file: None,
        }
    }
}

fn exposed(secret: &ConfigSecret) -> ids::Secret {
    ids::Secret::new(secret.expose())
}

impl JetStreamConfig {
    /// The same settings as the store's own type.
    pub fn settings(&self) -> JetStreamSettings {
        let password = |user: &Option<String>, password: &Option<ConfigSecret>| {
            let (user, password) = (user.clone()?, password.as_ref()?);
            let password = exposed(password);
            Some(NatsAuth::Password { user, password })
        };
        let auth = password(&self.user, &self.password)
            .or_else(|| self.token.as_ref().map(|token| NatsAuth::Token(exposed(token))))
            .or_else(|| self.nkey.as_ref().map(|seed| NatsAuth::Nkey(exposed(seed))))
            .or_else(|| self.credentials_file.clone().map(NatsAuth::Credentials));
        JetStreamSettings {
            urls: self.urls.clone(),
            auth: auth.unwrap_or(NatsAuth::None),
            tls: NatsTls {
                required: self.tls,
                ca: self.ca_file.clone(),
                client: self.cert_file.clone().zip(self.key_file.clone()),
            },
            replicas: self.replicas,
            prefix: self.prefix.clone(),
            partitions: self.partitions,
            lease: self.lease,
            monitor_urls: self.monitor_urls.clone(),
            system: password(&self.system_user, &self.system_password)
                .or_else(|| self.system_credentials_file.clone().map(NatsAuth::Credentials)),
            keys: None,
        }
    }
}

pub fn check(config: &Config) -> CheckResult {
    if config.store.kind != StoreKind::Jetstream {
        return Ok(());
    }
    let here = &config.store.jetstream;
    let key = |name: &str| format!("store.jetstream.{name}");
    for url in here.urls.iter() {
        check_url(url).or_else(|why| refuse(key("urls"), why))?;
    }
    let together = [
        ("user", here.user.is_some(), "password", here.password.is_some()),
        (
            "cert_file",
            here.cert_file.is_some(),
            "key_file",
            here.key_file.is_some(),
        ),
        (
            "system_user",
            here.system_user.is_some(),
            "system_password",
            here.system_password.is_some(),
        ),
    ];
    for (one, has_one, other, has_other) in together {
        if has_one != has_other {
            let (missing, there) = if has_one { (other, one) } else { (one, other) };
            return refuse(key(missing), format!("is required with {}", key(there)));
        }
    }
    let ways = [
        ("user", here.user.is_some()),
        ("token", here.token.is_some()),
        ("nkey", here.nkey.is_some()),
        ("credentials_file", here.credentials_file.is_some()),
    ];
    let mut ways = ways.iter().filter(|(_, given)| *given);
    if let (Some((first, _)), Some((second, _))) = (ways.next(), ways.next()) {
        return refuse(key(second), format!("cannot be given beside {}", key(first)));
    }
    if here.system_user.is_some() && here.system_credentials_file.is_some() {
        return refuse(
            key("system_credentials_file"),
            format!("cannot be given beside {}", key("system_user")),
        );
    }
    let fits = |name: &str| {
        (1..=64).contains(&name.len())
            && name
                .bytes()
                .all(|b| b.is_ascii_graphic() && !b"\"\\<>".contains(&b))
    };
    if here.node_name.as_deref().is_some_and(|name| !fits(name)) {
        return refuse(key("node_name"), "must have 1 to 64 letters without spaces");
    }
    for url in &here.monitor_urls {
        let well = url
            .strip_prefix("http://")
            .is_some_and(|rest| !rest.is_empty() && !rest.contains('@'));
        if !well {
            return refuse(
                key("monitor_urls"),
                format!("\"{}\" is not such as \"http://127.0.0.1:8222\"", shown(url)),
            );
        }
    }
    // Messages of the store's own check begin with the key.
    match postrider_jetstream::check(&here.settings()) {
        Ok(()) => Ok(()),
        Err(refused) => match refused.split_once(' ') {
            Some((name, why)) => refuse(key(name), why),
            None => refuse("store.jetstream", refused),
        },
    }
}

/// Refuses credentials in URLs: passwords belong in keys that are masked.
fn check_url(url: &str) -> Result<(), String> {
    let rest = ["nats://", "tls://"]
        .into_iter()
        .find_map(|scheme| url.strip_prefix(scheme));
    match rest {
        Some(rest) if rest.contains('@') => Err(
            "must not hold a user name or password; user, password and token are keys of their own".into(),
        ),
        Some(rest) if !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_graphic()) => Ok(()),
        _ => Err(format!(
            "\"{}\" is not such as \"nats://127.0.0.1:4222\"",
            shown(url)
        )),
    }
}

/// A URL without its credentials, for messages.
fn shown(url: &str) -> &str {
    url.rsplit_once('@').map_or(url, |(_, rest)| rest)
}
