//! `[[destination]]`: addresses of functions, brokers and relays, which subscriptions name by
//! resource id alone.

use super::check::{CheckResult, refuse};
use super::model::Config;
use super::secret::{ConfigSecret, MASK};
use postrider_wire::resources::validate::{UrlParts, resource_names};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeSet;
use std::fmt;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegisteredDestination {
    /// Resource id, compared without regard to case.
    pub resource: String,
    /// URL that events are posted to for a function; URL of the entity otherwise.
    pub url: SecretUrl,
    /// Not used for functions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<ConfigSecret>,
}

/// A URL whose query is masked: it may hold a function's key.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretUrl(String);

impl SecretUrl {
    pub fn expose(&self) -> &str {
        &self.0
    }

    fn shown(&self) -> String {
        match self.0.split_once('?') {
            Some((before, _)) => format!("{before}?{MASK}"),
            None => self.0.clone(),
        }
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}

impl Serialize for SecretUrl {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.shown())
    }
}

/// Supported resource types: provider, type segments, and whether it is a function.
const KINDS: [(&str, &[&str], bool); 6] = [
    ("Microsoft.Web", &["sites", "functions"], true),
    ("Microsoft.Web", &["sites", "slots", "functions"], true),
    ("Microsoft.EventHub", &["namespaces", "eventhubs"], false),
    ("Microsoft.ServiceBus", &["namespaces", "queues"], false),
    ("Microsoft.ServiceBus", &["namespaces", "topics"], false),
    ("Microsoft.Relay", &["namespaces", "hybridConnections"], false),
];

pub fn check(config: &Config) -> CheckResult {
    let mut seen = BTreeSet::new();
    for (index, destination) in config.destinations.iter().enumerate() {
        let key = |name: &str| format!("destination[{index}].{name}");
        let id = &destination.resource;
        if id.is_empty() {
            return refuse(key("resource"), "is required");
        }
        let kind = KINDS.iter().find(|(provider, types, _)| {
            resource_names(id, provider, types).is_some_and(|(_, rest)| rest.is_empty())
        });
        let Some((.., function)) = kind else {
            let reason = format!(
                "\"{id}\" is not the resource id of a function, an event hub, a queue or topic of Service Bus, \
                 or a hybrid connection"
            );
            return refuse(key("resource"), reason);
        };
        if !seen.insert(id.to_lowercase()) {
            return refuse(key("resource"), format!("\"{id}\" is given twice"));
        }
        check_url(destination.url.expose(), *function).or_else(|reason| refuse(key("url"), reason))?;
        let sendable = |text: &str| http::HeaderValue::from_str(text).is_ok();
        match (&destination.key_name, &destination.key) {
            (Some(_), _) if *function => {
                return refuse(key("key_name"), "is not for a function, which has only a key");
            }
            (Some(name), _) if name.is_empty() => return refuse(key("key_name"), "must not be empty"),
            (_, Some(secret)) if secret.expose().is_empty() => {
                return refuse(key("key"), "must not be empty");
            }
            (Some(_), None) => return refuse(key("key"), "is required with key_name"),
            (None, Some(_)) if !function => return refuse(key("key_name"), "is required with key"),
            (None, Some(secret)) if !sendable(secret.expose()) => {
                return refuse(key("key"), "cannot be sent in a header");
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_url(text: &str, function: bool) -> Result<(), String> {
    if text.is_empty() {
        return Err("is required".into());
    }
    let url = UrlParts::parse(text)?;
    if !function && url.query.is_some() {
        return Err("must be that of the entity, without a query".into());
    }
    Ok(())
}
