//! A change of the catalog as the audit log shows it: the members that differ, before and after,
//! without secrets.

use crate::Server;
use crate::declare::shown_settings;
use crate::lookup;
use postrider_core::subscription::{
    AttributeValue, BrokerAddress, Destination, DomainTopic, Subscription, Topic, TopicKind,
};
use postrider_engine::directory::TopicEntry;
use postrider_engine::observed_catalog::{CommittedChange, ResourceBeforeChange};
use postrider_store::CatalogChange;
use postrider_wire::arm::{
    ApiVersion, ProvisioningState, Scope, SubscriptionView, TopicView, domain_topic_body, domain_topic_id,
    parse_scope, topic_body, topic_id,
};
use serde_json::{Map, Value, json};

/// The API version whose resource bodies are compared.
const API_VERSION: &str = "2022-06-15";

pub struct ChangeDescription {
    /// `topic`, `domain`, `systemTopic`, `domainTopic` or `subscription`.
    kind: &'static str,
    operation: &'static str,
    pub id: String,
    /// Not in force yet: the handshake with its webhook comes first.
    pub pending: bool,
    pub body: Value,
}

impl ChangeDescription {
    pub fn action(&self) -> String {
        let verb = if self.operation == "delete" {
            "delete"
        } else {
            "write"
        };
        format!("{}.{verb}", self.kind)
    }
}

/// Describes a committed change; none if it is not about a resource.
pub fn describe(server: &Server, committed: &CommittedChange) -> Option<ChangeDescription> {
    let entry = committed.topic.as_deref();
    let before = match &committed.before {
        ResourceBeforeChange::Nothing => None,
        ResourceBeforeChange::Topic(entry) => Some(AuditedResource::topic(server, &entry.topic)),
        ResourceBeforeChange::DomainTopic(topic) => {
            Some(AuditedResource::domain_topic(server, topic, entry?))
        }
        ResourceBeforeChange::Subscription(one) => Some(AuditedResource::subscription(server, one, entry?)),
    };
    let mut pending = false;
    let after = match &committed.change {
        CatalogChange::PutTopic(topic) => Some(AuditedResource::topic(server, topic)),
        CatalogChange::PutDomainTopic(topic) => Some(AuditedResource::domain_topic(server, topic, entry?)),
        CatalogChange::PutSubscription(one) => Some(AuditedResource::subscription(server, one, entry?)),
        CatalogChange::PutHandshake(handshake) => {
            pending = true;
            Some(AuditedResource::subscription(
                server,
                &handshake.subscription,
                entry?,
            ))
        }
        CatalogChange::DeleteTopic(_)
        | CatalogChange::DeleteDomainTopic(..)
        | CatalogChange::DeleteSubscription(_) => None,
        CatalogChange::DeleteHandshake(_)
        | CatalogChange::PutEndpointDelay(_)
        | CatalogChange::DeleteEndpointDelay(_) => {
            return None;
        }
    };
    let operation = match (&before, &after) {
        (None, Some(_)) => "create",
        (Some(_), Some(_)) => "update",
        (_, None) => "delete",
    };
    let (kind, id) = after
        .as_ref()
        .or(before.as_ref())
        .map(|one| (one.kind, one.id.clone()))?;
    let mut body = json!({"kind": kind, "id": id, "operation": operation});
    if pending {
        body["awaitsValidation"] = json!(true);
    }
    let secrets = changed_secrets(before.as_ref(), after.as_ref());
    if !secrets.is_empty() && operation == "update" {
        body["secretsChanged"] = json!(secrets);
    }
    let (before, after) = differing(
        before.map(|one| one.body).unwrap_or_default(),
        after.map(|one| one.body).unwrap_or_default(),
    );
    body["before"] = before;
    body["after"] = after;
    Some(ChangeDescription {
        kind,
        operation,
        id,
        pending,
        body,
    })
}

/// A resource's body without secrets, and its secrets separately.
struct AuditedResource {
    kind: &'static str,
    id: String,
    body: Value,
    /// By name. Compared, never shown.
    secrets: Vec<(String, String)>,
}

impl AuditedResource {
    fn view<'a>(server: &'a Server, version: &'a ApiVersion) -> TopicView<'a> {
        TopicView {
            account: &server.config.account,
            tenant: &server.config.tenant,
            base_url: "",
            version,
            state: "Succeeded",
        }
    }

    fn topic(server: &Server, topic: &Topic) -> AuditedResource {
        let kind = match &topic.kind {
            TopicKind::Custom => "topic",
            TopicKind::Domain { .. } => "domain",
            TopicKind::System { .. } | TopicKind::Scope { .. } => "systemTopic",
        };
        let id = match &topic.kind {
            TopicKind::Scope { source, .. } => source.clone(),
            _ => topic_id(&server.config.account, topic),
        };
        let names = ["key1", "key2"].map(str::to_owned);
        let keys = topic.keys.iter().map(|key| key.expose().to_owned());
        AuditedResource {
            kind,
            id,
            body: topic_body(topic, &AuditedResource::view(server, &version())),
            secrets: names.into_iter().zip(keys).collect(),
        }
    }

    fn domain_topic(server: &Server, topic: &DomainTopic, domain: &TopicEntry) -> AuditedResource {
        AuditedResource {
            kind: "domainTopic",
            id: domain_topic_id(&server.config.account, &domain.topic, &topic.name),
            body: domain_topic_body(&domain.topic, topic, &AuditedResource::view(server, &version())),
            secrets: Vec::new(),
        }
    }

    fn subscription(server: &Server, one: &Subscription, entry: &TopicEntry) -> AuditedResource {
        let scope_id = match &one.domain_topic {
            Some(name) => domain_topic_id(&server.config.account, &entry.topic, name),
            None => lookup::id(server, entry),
        };
        let scope = parse_scope(&scope_id, &server.config.account);
        let view = SubscriptionView {
            subscription: one,
            state: ProvisioningState::Succeeded,
            scope: &scope.unwrap_or_else(|| Scope::Resource(scope_id.clone())),
            scope_id: &scope_id,
            nested: false,
            api_version: &version(),
            shown: shown_settings(server, one, Some(entry)),
        };
        let mut body = view.body();
        body["properties"]["paused"] = json!(one.pauses.is_paused());
        AuditedResource {
            kind: "subscription",
            id: view.id(),
            body,
            secrets: secrets_of(&one.destination),
        }
    }
}

fn version() -> ApiVersion {
    ApiVersion::parse(API_VERSION).expect("it is a date")
}

fn secrets_of(destination: &Destination) -> Vec<(String, String)> {
    let mut secrets = Vec::new();
    let mut put = |name: &str, secret: &str| secrets.push((format!("destination.{name}"), secret.to_owned()));
    match destination {
        Destination::WebHook(hook) => {
            if let Some((_, query)) = hook.url.expose().split_once('?') {
                put("endpointUrl", query);
            }
        }
        Destination::EventGrid { sas_key, .. } => put("sasKey", sas_key.expose()),
        Destination::EventHub { resource, .. }
        | Destination::HybridConnection { resource, .. }
        | Destination::ServiceBusQueue { resource, .. }
        | Destination::ServiceBusTopic { resource, .. } => {
            if let BrokerAddress::Connection(connection) = resource {
                put("connectionString", connection.expose());
            }
        }
        // Without `=` the value is the name or the id of an account, which is no secret.
        Destination::StorageQueue { resource, .. } if resource.contains('=') => {
            put("connectionString", resource)
        }
        Destination::StorageQueue { .. }
        | Destination::AzureFunction { .. }
        | Destination::EdgeHub { .. } => {}
    }
    for attribute in destination.attributes() {
        if let AttributeValue::Static { value, secret: true } = &attribute.value {
            let name = format!("destination.deliveryAttributeMappings.{}", attribute.name);
            secrets.push((name, value.expose().to_owned()));
        }
    }
    secrets
}

/// The names of secrets that were added, removed or changed.
fn changed_secrets(before: Option<&AuditedResource>, after: Option<&AuditedResource>) -> Vec<String> {
    let of = |shown: Option<&AuditedResource>| shown.map(|one| one.secrets.clone()).unwrap_or_default();
    let (before, after) = (of(before), of(after));
    let mut names: Vec<String> = before
        .iter()
        .filter(|one| !after.contains(one))
        .chain(after.iter().filter(|one| !before.contains(one)))
        .map(|(name, _)| name.clone())
        .collect();
    names.sort();
    names.dedup();
    names
}

/// The members that differ, of both values. A value that exists on one side only is shown whole.
fn differing(before: Value, after: Value) -> (Value, Value) {
    let (Value::Object(mut before), Value::Object(mut after)) = (before.clone(), after.clone()) else {
        return (before, after);
    };
    let (mut left, mut right) = (Map::new(), Map::new());
    let names: Vec<String> = before.keys().chain(after.keys()).cloned().collect();
    for name in names {
        let (old, new) = (before.remove(&name), after.remove(&name));
        if old == new {
            continue;
        }
        let (old, new) = match (old, new) {
            (Some(old @ Value::Object(_)), Some(new @ Value::Object(_))) => {
                let (old, new) = differing(old, new);
                (Some(old), Some(new))
            }
            other => other,
        };
        left.extend(old.map(|old| (name.clone(), old)));
        right.extend(new.map(|new| (name, new)));
    }
    (Value::Object(left), Value::Object(right))
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ids::Secret;
    use postrider_core::subscription::WebHook;

    #[test]
    fn every_secret_of_a_destination_is_compared_by_its_name() {
        let hub = |connection: &str| Destination::EventHub {
            resource: BrokerAddress::Connection(Secret::new(connection)),
            attributes: Vec::new(),
        };
        let queue = |connection: &str| Destination::StorageQueue {
            resource: connection.to_owned(),
            queue: "q".into(),
            message_ttl_secs: None,
        };
        let grid = |key: &str| Destination::EventGrid {
            url: "https://grid.example/api/events?api-version=2018-01-01".into(),
            sas_key: Secret::new(key),
            topic_name: None,
            batching: Default::default(),
        };
        let hook = |query: &str| Destination::WebHook(WebHook::new(format!("https://hook.example/x{query}")));
        let check = |before: Destination, after: Destination, name: &str| {
            let shown = |one: &Destination| AuditedResource {
                kind: "subscription",
                id: String::new(),
                body: Value::Null,
                secrets: secrets_of(one),
            };
            let changed = changed_secrets(Some(&shown(&before)), Some(&shown(&after)));
            assert_eq!(changed, [format!("destination.{name}")]);
            assert!(changed_secrets(Some(&shown(&before)), Some(&shown(&before))).is_empty());
        };
        check(grid("a"), grid("b"), "sasKey");
        check(hub("Endpoint=a"), hub("Endpoint=b"), "connectionString");
        check(queue("AccountKey=a"), queue("AccountKey=b"), "connectionString");
        check(hook("?code=1"), hook("?code=2"), "endpointUrl");
        check(hook(""), hook("?code=2"), "endpointUrl");
        assert_eq!(secrets_of(&queue("account")), []);
    }

    #[test]
    fn only_what_differs_is_shown() {
        let check = |before: Value, after: Value, expected: (Value, Value)| {
            assert_eq!(differing(before, after), expected);
        };
        check(
            json!({"a": 1, "b": {"c": 2, "d": [1]}, "gone": true}),
            json!({"a": 1, "b": {"c": 3, "d": [1]}, "new": null}),
            (
                json!({"b": {"c": 2}, "gone": true}),
                json!({"b": {"c": 3}, "new": null}),
            ),
        );
        check(json!({"a": 1}), json!({"a": 1}), (json!({}), json!({})));
        check(Value::Null, json!({"a": 1}), (Value::Null, json!({"a": 1})));
        check(json!({"a": 1}), Value::Null, (json!({"a": 1}), Value::Null));
    }
}
