//! Resource ids and their short forms.

use anyhow::{Result, bail, ensure};

pub const PROVIDER: &str = "providers/Microsoft.EventGrid";

/// Kind of a resource that has keys, subscriptions and a resource group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ResourceKind {
    Topic,
    Domain,
    SystemTopic,
}

impl ResourceKind {
    pub fn noun(self) -> &'static str {
        match self {
            ResourceKind::Topic => "topic",
            ResourceKind::Domain => "domain",
            ResourceKind::SystemTopic => "system topic",
        }
    }

    fn segment(self) -> &'static str {
        match self {
            ResourceKind::Topic => "topics",
            ResourceKind::Domain => "domains",
            ResourceKind::SystemTopic => "systemTopics",
        }
    }
}

/// Builds ids of one server's resources.
#[derive(Clone, Debug)]
pub struct ResourceIds {
    account: String,
}

impl ResourceIds {
    pub fn new(account: &str) -> ResourceIds {
        ResourceIds {
            account: account.to_owned(),
        }
    }

    /// `/subscriptions/{id}`
    pub fn account(&self) -> String {
        format!("/subscriptions/{}", self.account)
    }

    pub fn group(&self, group: &str) -> String {
        format!("{}/resourceGroups/{group}", self.account())
    }

    /// Id of the list of all resources of a kind, in every group.
    pub fn all(&self, kind: ResourceKind) -> String {
        format!("{}/{PROVIDER}/{}", self.account(), kind.segment())
    }

    /// Id of the list of all resources of a kind in one group.
    pub fn all_in(&self, group: &str, kind: ResourceKind) -> String {
        format!("{}/{PROVIDER}/{}", self.group(group), kind.segment())
    }

    pub fn resource(&self, group: &str, kind: ResourceKind, name: &str) -> String {
        format!("{}/{name}", self.all_in(group, kind))
    }

    /// Id of another provider's resource in the same group.
    fn of(&self, group: &str, provider: &str, types: &[&str], names: &[&str]) -> String {
        let mut id = format!("{}/providers/{provider}", self.group(group));
        for (kind, name) in types.iter().zip(names) {
            id.push_str(&format!("/{kind}/{name}"));
        }
        id
    }

    /// Id of a storage account, given its id or its name.
    pub fn storage_account(&self, text: &str, group: &str) -> String {
        match text.starts_with('/') {
            true => text.to_owned(),
            false => self.of(group, "Microsoft.Storage", &["storageAccounts"], &[text]),
        }
    }

    /// `account/container`, or the container's id, as the account's id and the container's name.
    pub fn container(&self, text: &str, group: &str) -> Result<(String, String)> {
        self.in_account(text, group, "/blobServices/default/containers/", "container")
    }

    /// `account/queue`, or the queue's id, as the account's id and the queue's name.
    pub fn queue(&self, text: &str, group: &str) -> Result<(String, String)> {
        self.in_account(text, group, "/queueServices/default/queues/", "queue")
    }

    fn in_account(&self, text: &str, group: &str, between: &str, what: &str) -> Result<(String, String)> {
        let parts = match text.starts_with('/') {
            true => split_without_case(text, between),
            false => text.split_once('/'),
        };
        match parts {
            Some((account, name)) if !account.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok((self.storage_account(account, group), name.to_owned()))
            }
            _ => {
                bail!("{text:?} must be ACCOUNT/{what}, or a resource id …/storageAccounts/ACCOUNT{between}…")
            }
        }
    }

    /// Id of a broker's entity, given `namespace/name` or an id.
    pub fn in_namespace(&self, text: &str, group: &str, provider: &str, kind: &str) -> Result<String> {
        if text.starts_with('/') {
            return Ok(text.to_owned());
        }
        let parts: Vec<_> = text.split('/').collect();
        let [namespace, name] = parts.as_slice() else {
            bail!(
                "{text:?} must be NAMESPACE/NAME, or a resource id …/providers/{provider}/namespaces/…/{kind}/…"
            );
        };
        ensure!(
            !namespace.is_empty() && !name.is_empty(),
            "{text:?} must be NAMESPACE/NAME"
        );
        Ok(self.of(group, provider, &["namespaces", kind], &[namespace, name]))
    }
}

fn split_without_case<'a>(text: &'a str, between: &str) -> Option<(&'a str, &'a str)> {
    let at = text.to_ascii_lowercase().find(&between.to_ascii_lowercase())?;
    Some((&text[..at], &text[at + between.len()..]))
}

/// The group in an id.
pub fn group_of(id: &str) -> Option<&str> {
    let mut parts = id.split('/');
    parts.find(|part| part.eq_ignore_ascii_case("resourceGroups"))?;
    parts.next()
}

/// The last name in an id.
pub fn name_of(id: &str) -> &str {
    id.rsplit('/').next().unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_their_short_forms() {
        let ids = ResourceIds::new("0");
        let account = "/subscriptions/0/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/acc";
        assert_eq!(
            ids.resource("g", ResourceKind::SystemTopic, "s"),
            "/subscriptions/0/resourceGroups/g/providers/Microsoft.EventGrid/systemTopics/s"
        );
        assert_eq!(ids.storage_account("acc", "g"), account);
        assert_eq!(ids.storage_account(account, "x"), account);
        let place = (account.to_owned(), "dead".to_owned());
        assert_eq!(ids.container("acc/dead", "g").unwrap(), place);
        let whole = format!("{account}/blobservices/Default/containers/dead");
        assert_eq!(ids.container(&whole, "x").unwrap(), place);
        for bad in ["acc", "acc/", "/x/y", "a/b/c", account] {
            assert!(ids.container(bad, "g").is_err(), "{bad}");
        }
        assert_eq!(
            ids.in_namespace("ns/hub", "g", "Microsoft.EventHub", "eventhubs")
                .unwrap(),
            "/subscriptions/0/resourceGroups/g/providers/Microsoft.EventHub/namespaces/ns/eventhubs/hub"
        );
        assert!(
            ids.in_namespace("hub", "g", "Microsoft.EventHub", "eventhubs")
                .is_err()
        );
        assert_eq!(group_of(account), Some("g"));
        assert_eq!(group_of("/subscriptions/0"), None);
        assert_eq!(name_of(account), "acc");
    }
}
