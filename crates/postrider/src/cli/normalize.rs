//! The writable part of a resource, and the differences between two states of it.
//!
//! A file has only the members that its author cares for; an answer of the server has all of them.
//! Both are normalized to a form without members that have their default, and compared in it.

use super::ids::name_of;
use postrider_core::time::Timestamp;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Properties that only the server writes.
const READ_ONLY: [&str; 6] = [
    "provisioningState",
    "endpoint",
    "metricResourceId",
    "privateEndpointConnections",
    "topic",
    "systemData",
];

/// Writable members of a topic beside `properties`.
const BESIDE: [&str; 6] = ["location", "tags", "sku", "identity", "kind", "extendedLocation"];

/// Members that are compared only if a file sets them: the server, or az, fills them in.
const OF_NO_CONCERN: [&str; 7] = [
    "location",
    "sku",
    "identity",
    "kind",
    "extendedLocation",
    "properties.dataResidencyBoundary",
    "properties.minimumTlsVersionAllowed",
];

/// The writable part of a topic, domain or system topic.
pub fn writable(body: &Value) -> Value {
    let mut written = Map::new();
    for name in BESIDE {
        if let Some(value) = body.get(name).filter(|value| !value.is_null()) {
            written.insert(name.to_owned(), without_nulls(value));
        }
    }
    let properties = body.get("properties").unwrap_or(&Value::Null);
    written.insert(
        "properties".into(),
        Value::Object(writable_properties(properties)),
    );
    Value::Object(written)
}

/// The writable part of any resource's properties.
pub fn writable_properties(properties: &Value) -> Map<String, Value> {
    let Value::Object(mut properties) = without_nulls(properties) else {
        return Map::new();
    };
    for name in READ_ONLY {
        properties.remove(name);
    }
    if let Some(destination) = destination_mut(&mut properties)
        && let Some(Value::Object(inner)) = destination.get_mut("properties")
    {
        inner.remove("endpointBaseUrl");
    }
    properties
}

fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(name, value)| (name.clone(), without_nulls(value)))
                .collect(),
        ),
        Value::Array(items) => Value::Array(items.iter().map(without_nulls).collect()),
        other => other.clone(),
    }
}

/// The destination, with or without an identity.
pub fn destination_mut(properties: &mut Map<String, Value>) -> Option<&mut Value> {
    let plain = properties.get("destination").is_some_and(Value::is_object);
    match plain {
        true => properties.get_mut("destination"),
        false => properties
            .get_mut("deliveryWithResourceIdentity")?
            .get_mut("destination"),
    }
}

/// Batch limits that a server uses for subscriptions which set only one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerBatchDefaults {
    pub events: u64,
    pub kilobytes: u64,
}

impl ServerBatchDefaults {
    /// Limits of a server with the default configuration.
    pub const USUAL: ServerBatchDefaults = ServerBatchDefaults {
        events: 10,
        kilobytes: 64,
    };

    /// Adds the limits that the server fills in, as reads show them.
    pub fn fill_in(self, properties: &Value) -> Value {
        let mut filled = properties.clone();
        let Value::Object(members) = &mut filled else {
            return filled;
        };
        let Some(destination) = destination_mut(members) else {
            return filled;
        };
        let kind = destination["endpointType"].as_str().unwrap_or_default();
        if !["WebHook", "AzureFunction"]
            .iter()
            .any(|batched| batched.eq_ignore_ascii_case(kind))
        {
            return filled;
        }
        let given = &mut destination["properties"];
        let (events, size) = ("maxEventsPerBatch", "preferredBatchSizeInKilobytes");
        if given[events].is_null() {
            let is_batched = !given[size].is_null();
            given[events] = json!(if is_batched { self.events } else { 1 });
        }
        if given[size].is_null() {
            given[size] = json!(self.kilobytes);
        }
        filled
    }
}

/// Properties of a subscription with second names of members replaced by those that reads show.
pub fn with_usual_names(properties: &Value) -> Value {
    let mut renamed = properties.clone();
    let rename = |object: Option<&mut Value>, from: &str, to: &str| {
        if let Some(Value::Object(members)) = object
            && let Some(value) = members.remove(from).filter(|value| !value.is_null())
        {
            let there = members.entry(to).or_insert(Value::Null);
            if there.is_null() {
                *there = value;
            }
        }
    };
    rename(
        renamed.get_mut("retryPolicy"),
        "eventExpiryInMinutes",
        "eventTimeToLiveInMinutes",
    );
    rename(
        renamed.get_mut("filter"),
        "subjectIsCaseSensitive",
        "isSubjectCaseSensitive",
    );
    let advanced = renamed
        .get_mut("filter")
        .and_then(|filter| filter["advancedFilters"].as_array_mut());
    for filter in advanced.into_iter().flatten() {
        rename(Some(filter), "operator", "operatorType");
    }
    renamed
}

/// A state, as paths and what is there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NormalizedState(BTreeMap<String, Value>);

/// A difference between two states.
#[derive(Clone, Debug, PartialEq)]
pub struct StateDifference {
    pub field: String,
    /// Displayable values, without secrets.
    pub old: String,
    pub new: String,
}

impl NormalizedState {
    /// State of a topic, domain or system topic.
    pub fn of_topic(body: &Value) -> NormalizedState {
        let mut normal = NormalizedState::default();
        normal.add("", &writable(body));
        normal
    }

    /// State of a subscription; `schema` is the default delivery schema.
    pub fn of_subscription(properties: &Value, schema: &str) -> NormalizedState {
        let mut normal = NormalizedState::default();
        normal.add("", &Value::Object(writable_properties(properties)));
        normal
            .0
            .retain(|path, value| path != "eventDeliverySchema" || !same(path, value, &json!(schema)));
        normal
    }

    fn add(&mut self, path: &str, value: &Value) {
        match value {
            Value::Null => {}
            Value::Object(map) => {
                for (name, value) in map {
                    let path = match path {
                        "" => name.clone(),
                        _ => format!("{path}.{name}"),
                    };
                    self.add(&path, value);
                }
            }
            Value::Array(items) if items.is_empty() => {}
            // Attributes are keyed by name, so that their order does not matter.
            Value::Array(items) if path.ends_with("deliveryAttributeMappings") => {
                for item in items {
                    let name = item["name"].as_str().unwrap_or_default().to_ascii_lowercase();
                    let mut item = item.clone();
                    if let Value::Object(item) = &mut item {
                        item.remove("name");
                        item["type"] = json!(item.get("type").and_then(Value::as_str).unwrap_or_default());
                    }
                    self.add(&format!("{path}[{name}]"), &item);
                }
            }
            leaf => {
                if !default_of(path).is_some_and(|default| same(path, leaf, &default)) {
                    self.0.insert(path.to_owned(), leaf.clone());
                }
            }
        }
    }

    /// Removes a field that the file does not manage.
    pub fn forget(&mut self, field: &str) {
        self.0.remove(field);
    }

    /// Differences of `self`, the present state, from the wanted one.
    pub fn differences(&self, wanted: &NormalizedState) -> Vec<StateDifference> {
        let mut fields: Vec<&String> = self.0.keys().chain(wanted.0.keys()).collect();
        fields.sort();
        fields.dedup();
        let under = |field: &str, name: &str| field == name || field.starts_with(&format!("{name}."));
        let concerns = |field: &str| match OF_NO_CONCERN.iter().find(|name| under(field, name)) {
            Some(name) => wanted.0.keys().any(|key| under(key, name)),
            None => true,
        };
        let mut found = Vec::new();
        for field in fields {
            let (old, new) = (self.0.get(field), wanted.0.get(field));
            let equal = matches!((old, new), (Some(old), Some(new)) if same(field, old, new));
            if equal || !concerns(field) {
                continue;
            }
            let shown = |state: &NormalizedState, value: Option<&Value>| match value {
                Some(value) => state.shown(field, value),
                None => default_of(field).map_or("(none)".to_owned(), |default| default.to_string()),
            };
            let (old, new) = (shown(self, old), shown(wanted, new));
            let new = match old == new {
                true => format!("{new} (another one)"),
                false => new,
            };
            found.push(StateDifference {
                field: field.clone(),
                old,
                new,
            });
        }
        found
    }

    /// A displayable value, without secrets.
    fn shown(&self, field: &str, value: &Value) -> String {
        let secret = field.strip_suffix(".properties.value").is_some_and(|attribute| {
            self.0.get(&format!("{attribute}.properties.isSecret")) == Some(&json!(true))
        });
        match value {
            _ if secret => "(a secret)".to_owned(),
            Value::String(url) if field.ends_with("endpointUrl") => match url.split_once('?') {
                Some((base, _)) => format!("\"{base}?…\""),
                None => value.to_string(),
            },
            _ => value.to_string(),
        }
    }
}

/// Default of a field; `None` if it has none.
fn default_of(path: &str) -> Option<Value> {
    let path = path.strip_prefix("deliveryWithResourceIdentity.").unwrap_or(path);
    Some(match path {
        "properties.inputSchema" => json!("EventGridSchema"),
        "properties.publicNetworkAccess" => json!("Enabled"),
        "properties.disableLocalAuth" | "properties.postrider.edge" => json!(false),
        "properties.autoCreateTopicWithFirstSubscription"
        | "properties.autoDeleteTopicWithLastSubscription" => {
            json!(true)
        }
        "destination.properties.maxEventsPerBatch" => json!(1),
        "destination.properties.preferredBatchSizeInKilobytes" => json!(64),
        "filter.subjectBeginsWith" | "filter.subjectEndsWith" => json!(""),
        "filter.isSubjectCaseSensitive" | "filter.enableAdvancedFilteringOnArrays" => json!(false),
        "retryPolicy.maxDeliveryAttempts" => json!(30),
        "retryPolicy.eventTimeToLiveInMinutes" => json!(1440),
        _ if path.ends_with("].properties.isSecret") => json!(false),
        _ => return None,
    })
}

/// Members whose values compare without regard to case.
const WITHOUT_CASE: [&str; 10] = [
    "endpointType",
    "inputSchema",
    "inputSchemaMappingType",
    "eventDeliverySchema",
    "operatorType",
    "publicNetworkAccess",
    "type",
    "topicType",
    "profile",
    "action",
];

/// Whether two values at a path are equivalent.
fn same(path: &str, a: &Value, b: &Value) -> bool {
    let last = path.rsplit('.').next().unwrap_or(path);
    match (a, b) {
        (Value::String(a), Value::String(b)) => match last {
            "expirationTimeUtc" if Timestamp::parse(a).is_some() => {
                Timestamp::parse(a) == Timestamp::parse(b)
            }
            "location" => place(a) == place(b),
            // A schema has different names in requests and in responses.
            "inputSchema" | "eventDeliverySchema" => schema(a) == schema(b),
            "resourceId" | "source" => same_resource(a, b),
            _ if WITHOUT_CASE.contains(&last) => a.eq_ignore_ascii_case(b),
            _ => a == b,
        },
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(path, a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(name, a)| b.get(name).is_some_and(|b| same(name, a, b)))
        }
        (a, b) => a == b,
    }
}

/// Compares ids, or, as the configuration may write them, names of resources in the server's own
/// group.
fn same_resource(a: &str, b: &str) -> bool {
    let is_id = |text: &str| text.starts_with('/');
    match (is_id(a), is_id(b)) {
        (true, false) => name_of(a).eq_ignore_ascii_case(b),
        (false, true) => name_of(b).eq_ignore_ascii_case(a),
        _ => a.eq_ignore_ascii_case(b),
    }
}

fn place(location: &str) -> String {
    location.replace(' ', "").to_lowercase()
}

fn schema(name: &str) -> String {
    match name.to_ascii_lowercase().as_str() {
        "custominputschema" | "customschema" => "customeventschema".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(old: &NormalizedState, new: &NormalizedState) -> Vec<String> {
        let line = |one: StateDifference| format!("{}: {} → {}", one.field, one.old, one.new);
        old.differences(new).into_iter().map(line).collect()
    }

    #[test]
    fn what_a_server_fills_in_is_no_difference() {
        let read = json!({
            "provisioningState": "Succeeded", "topic": "/subscriptions/x", "labels": null,
            "destination": {"endpointType": "WebHook", "properties": {
                "endpointUrl": "https://x/y?code=1", "endpointBaseUrl": "https://x/y",
                "maxEventsPerBatch": 1, "preferredBatchSizeInKilobytes": 64,
                "deliveryAttributeMappings": [
                    {"name": "K", "type": "Static", "properties": {"value": "v", "isSecret": true}},
                    {"name": "a", "type": "Static", "properties": {"value": "b", "isSecret": false}}]}},
            "filter": {"subjectBeginsWith": "", "subjectEndsWith": "", "includedEventTypes": null,
                "advancedFilters": [{"operatorType": "NumberIn", "key": "data.n", "values": [1.0]}]},
            "eventDeliverySchema": "EventGridSchema", "expirationTimeUtc": "2030-01-01T00:00:00Z",
            "retryPolicy": {"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": 1440},
        });
        let written = json!({
            "destination": {"endpointType": "webhook", "properties": {"endpointUrl": "https://x/y?code=1",
                "deliveryAttributeMappings": [
                    {"name": "a", "type": "Static", "properties": {"value": "b"}},
                    {"name": "k", "type": "static", "properties": {"value": "v", "isSecret": true}}]}},
            "filter": {"advancedFilters": [{"operatorType": "numberin", "key": "data.n", "values": [1]}]},
            "expirationTimeUtc": "2030-01-01T00:00:00.000Z",
        });
        let old = NormalizedState::of_subscription(&read, "EventGridSchema");
        let new = NormalizedState::of_subscription(&written, "EventGridSchema");
        assert_eq!(told(&old, &new), [""; 0]);
    }

    #[test]
    fn a_resource_may_be_named_shortly() {
        let id = "/subscriptions/0/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/local";
        assert!(
            same_resource(id, "local") && same_resource("local", id) && same_resource(id, &id.to_uppercase())
        );
        assert!(!same_resource(id, "other") && !same_resource(id, &id.replace("/g/", "/h/")));
    }

    #[test]
    fn differences_name_the_field_and_no_secret() {
        let of = |value: Value| NormalizedState::of_subscription(&value, "EventGridSchema");
        let hook = |url: &str, secret: &str| {
            json!({"endpointType": "WebHook", "properties": {"endpointUrl": url, "deliveryAttributeMappings": [
                {"name": "k", "type": "Static", "properties": {"value": secret, "isSecret": true}}]}})
        };
        let old = of(json!({"destination": hook("https://x?code=hunter1", "hunter1"), "labels": ["a"]}));
        let new = of(json!({"destination": hook("https://x?code=hunter2", "hunter2"),
            "retryPolicy": {"maxDeliveryAttempts": 5}, "eventDeliverySchema": "CloudEventSchemaV1_0"}));
        let told = told(&old, &new);
        assert_eq!(
            told,
            [
                "destination.properties.deliveryAttributeMappings[k].properties.value: (a secret) → (a secret) \
                 (another one)",
                "destination.properties.endpointUrl: \"https://x?…\" → \"https://x?…\" (another one)",
                "eventDeliverySchema: (none) → \"CloudEventSchemaV1_0\"",
                "labels: [\"a\"] → (none)",
                "retryPolicy.maxDeliveryAttempts: 30 → 5",
            ]
        );
        assert!(!told.join("").contains("hunter"));
    }

    #[test]
    fn topics_differ_in_what_a_file_speaks_of() {
        let read = json!({
            "id": "/x", "name": "t", "type": "y", "location": "westus2", "tags": {"a": "b"},
            "sku": {"name": "Basic"}, "identity": {"type": "None", "principalId": null}, "kind": "Azure",
            "properties": {"inputSchema": "EventGridSchema", "endpoint": "https://e", "metricResourceId": "m",
                "publicNetworkAccess": "Enabled", "disableLocalAuth": false, "dataResidencyBoundary": "WithinGeopair"},
        });
        let check = |written: Value, expected: &[&str]| {
            let told = told(
                &NormalizedState::of_topic(&read),
                &NormalizedState::of_topic(&written),
            );
            assert_eq!(told, expected, "{written}");
        };
        check(json!({"tags": {"a": "b"}}), &[]);
        check(json!({"tags": {"a": "b"}, "location": "West US 2"}), &[]);
        check(
            json!({"location": "eastus", "properties": {"disableLocalAuth": true}}),
            &[
                "location: \"westus2\" → \"eastus\"",
                "properties.disableLocalAuth: false → true",
                "tags.a: \"b\" → (none)",
            ],
        );
        check(
            json!({"tags": {"a": "b"}, "identity": {"type": "SystemAssigned"}}),
            &["identity.type: \"None\" → \"SystemAssigned\""],
        );
    }

    #[test]
    fn what_only_the_server_writes_is_not_sent_back() {
        let read = json!({
            "id": "/x", "name": "t", "location": "westus2", "tags": null,
            "properties": {"endpoint": "https://e", "provisioningState": "Succeeded", "inputSchema": "EventGridSchema"},
        });
        assert_eq!(
            writable(&read),
            json!({"location": "westus2", "properties": {"inputSchema": "EventGridSchema"}})
        );
    }
}
