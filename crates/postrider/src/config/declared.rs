//! Topics, domains, system topics and subscriptions declared in the configuration.
//!
//! Declarations carry the management API's own properties, which are not validated here. A property
//! may stand beside `name` or inside a `properties` table, in snake_case or as the API spells it.

use super::secret::{ConfigSecret, MASK};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use std::fmt;

/// A `[[topic]]`.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "TopicDeclaration")]
pub struct DeclaredTopic {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key1: Option<ConfigSecret>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key2: Option<ConfigSecret>,
    /// An object with the API's property names; `tags` and other siblings of `properties` in the
    /// API are in here too.
    #[serde(serialize_with = "masked")]
    pub properties: Value,
    #[serde(rename = "subscription", skip_serializing_if = "Vec::is_empty")]
    pub subscriptions: Vec<DeclaredSubscription>,
}

/// A `[[domain]]`: a topic that may hold topics.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "TopicDeclaration")]
pub struct DeclaredDomain {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key1: Option<ConfigSecret>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key2: Option<ConfigSecret>,
    #[serde(serialize_with = "masked")]
    pub properties: Value,
    #[serde(rename = "subscription", skip_serializing_if = "Vec::is_empty")]
    pub subscriptions: Vec<DeclaredSubscription>,
    #[serde(rename = "topic", skip_serializing_if = "Vec::is_empty")]
    pub topics: Vec<DeclaredTopic>,
}

/// A `[[system_topic]]`: events that a resource emits about itself.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SystemTopicDeclaration")]
pub struct DeclaredSystemTopic {
    pub name: String,
    /// The resource's id, or just the name of a storage account.
    pub source: String,
    pub topic_type: String,
    #[serde(serialize_with = "masked")]
    pub properties: Value,
    #[serde(rename = "subscription", skip_serializing_if = "Vec::is_empty")]
    pub subscriptions: Vec<DeclaredSubscription>,
}

/// Default topic type of system topics.
const STORAGE_ACCOUNTS: &str = "Microsoft.Storage.StorageAccounts";

/// A `[[topic.subscription]]`, or a `[[subscription]]` that names its topic.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SubscriptionDeclaration")]
pub struct DeclaredSubscription {
    pub name: String,
    #[serde(serialize_with = "masked")]
    pub properties: Value,
}

/// A topic or domain as written in the file.
#[derive(Deserialize)]
struct TopicDeclaration {
    name: String,
    key1: Option<ConfigSecret>,
    key2: Option<ConfigSecret>,
    #[serde(
        default,
        alias = "event_subscription",
        alias = "eventSubscription",
        alias = "subscriptions"
    )]
    subscription: Vec<DeclaredSubscription>,
    #[serde(default, alias = "topics")]
    topic: Vec<DeclaredTopic>,
    #[serde(default)]
    properties: Map<String, Value>,
    #[serde(flatten)]
    beside: Map<String, Value>,
}

#[derive(Deserialize)]
struct SystemTopicDeclaration {
    name: String,
    #[serde(
        default,
        alias = "event_subscription",
        alias = "eventSubscription",
        alias = "subscriptions"
    )]
    subscription: Vec<DeclaredSubscription>,
    #[serde(default)]
    properties: Map<String, Value>,
    #[serde(flatten)]
    beside: Map<String, Value>,
}

#[derive(Deserialize)]
struct SubscriptionDeclaration {
    name: String,
    #[serde(default)]
    properties: Map<String, Value>,
    #[serde(flatten)]
    beside: Map<String, Value>,
}

/// A top-level subscription, which names its topic.
#[derive(Deserialize)]
struct FlatSubscriptionDeclaration {
    topic: String,
    name: String,
    #[serde(default)]
    properties: Map<String, Value>,
    #[serde(flatten)]
    beside: Map<String, Value>,
}

impl TryFrom<TopicDeclaration> for DeclaredTopic {
    type Error = String;
    fn try_from(written: TopicDeclaration) -> Result<DeclaredTopic, String> {
        if !written.topic.is_empty() {
            return Err("a topic holds no topics; declare a domain".into());
        }
        Ok(DeclaredTopic {
            name: named(written.name)?,
            key1: written.key1,
            key2: written.key2,
            properties: properties(written.properties, written.beside)?,
            subscriptions: written.subscription,
        })
    }
}

impl DeclaredTopic {
    /// Whether the edge API may reach the topic: `postrider.edge` is the boolean true.
    pub fn is_edge(&self) -> bool {
        let ours = self.properties.get("postrider").and_then(|ours| ours.get("edge"));
        ours.or(self.properties.get("edge")) == Some(&Value::Bool(true))
    }
}

impl TryFrom<TopicDeclaration> for DeclaredDomain {
    type Error = String;
    fn try_from(written: TopicDeclaration) -> Result<DeclaredDomain, String> {
        Ok(DeclaredDomain {
            name: named(written.name)?,
            key1: written.key1,
            key2: written.key2,
            properties: properties(written.properties, written.beside)?,
            subscriptions: written.subscription,
            topics: written.topic,
        })
    }
}

impl TryFrom<SystemTopicDeclaration> for DeclaredSystemTopic {
    type Error = String;
    fn try_from(written: SystemTopicDeclaration) -> Result<DeclaredSystemTopic, String> {
        let mut properties = properties(written.properties, written.beside)?;
        let mut take = |key: &str| match properties.as_object_mut().and_then(|all| all.remove(key)) {
            None => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(_) => Err(format!("{key}: must be text that is not empty")),
        };
        let source = take("source")?.ok_or("source: is required")?;
        let topic_type = take("topicType")?.unwrap_or_else(|| STORAGE_ACCOUNTS.into());
        Ok(DeclaredSystemTopic {
            name: named(written.name)?,
            source,
            topic_type,
            properties,
            subscriptions: written.subscription,
        })
    }
}

impl TryFrom<SubscriptionDeclaration> for DeclaredSubscription {
    type Error = String;
    fn try_from(written: SubscriptionDeclaration) -> Result<DeclaredSubscription, String> {
        Ok(DeclaredSubscription {
            name: named(written.name)?,
            properties: properties(written.properties, written.beside)?,
        })
    }
}

/// Reads and prints `[[subscription]]`, which are kept as pairs of topic and subscription.
pub mod flat {
    use super::*;

    #[derive(Deserialize)]
    #[serde(try_from = "FlatSubscriptionDeclaration")]
    struct FlatSubscription(String, DeclaredSubscription);

    impl TryFrom<FlatSubscriptionDeclaration> for FlatSubscription {
        type Error = String;
        fn try_from(flat: FlatSubscriptionDeclaration) -> Result<FlatSubscription, String> {
            let FlatSubscriptionDeclaration {
                topic,
                name,
                properties,
                beside,
            } = flat;
            let subscription = SubscriptionDeclaration {
                name,
                properties,
                beside,
            };
            Ok(FlatSubscription(topic, subscription.try_into()?))
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<(String, DeclaredSubscription)>, D::Error> {
        let flat = Vec::<FlatSubscription>::deserialize(from)?;
        Ok(flat
            .into_iter()
            .map(|FlatSubscription(topic, subscription)| (topic, subscription))
            .collect())
    }

    #[derive(Serialize)]
    struct PrintedSubscription<'a> {
        topic: &'a str,
        #[serde(flatten)]
        subscription: &'a DeclaredSubscription,
    }

    pub fn serialize<S: Serializer>(
        flat: &[(String, DeclaredSubscription)],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(
            flat.iter()
                .map(|(topic, subscription)| PrintedSubscription { topic, subscription }),
        )
    }
}

impl fmt::Debug for DeclaredTopic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_masked(self, f)
    }
}

impl fmt::Debug for DeclaredDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_masked(self, f)
    }
}

impl fmt::Debug for DeclaredSystemTopic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_masked(self, f)
    }
}

impl fmt::Debug for DeclaredSubscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_masked(self, f)
    }
}

/// Formats with secrets masked: properties may hold some, and serializing masks them.
fn debug_masked(declared: &impl Serialize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(&serde_json::to_string(declared).map_err(|_| fmt::Error)?)
}

fn named(name: String) -> Result<String, String> {
    if name.is_empty() {
        Err("name: must not be empty".into())
    } else {
        Ok(name)
    }
}

/// Merges the `properties` table with the properties that stand beside `name`.
fn properties(inside: Map<String, Value>, beside: Map<String, Value>) -> Result<Value, String> {
    let (mut all, beside) = (camel_keys(inside)?, camel_keys(beside)?);
    // Answers of the server show a subscription's topic there, by its id.
    let is_id = |topic: &Value| topic.as_str().is_some_and(|topic| topic.starts_with('/'));
    all.retain(|name, value| name != "topic" || !is_id(value));
    for (key, value) in beside {
        if all.contains_key(&key) {
            return Err(format!("{key} is given both beside \"properties\" and inside it"));
        }
        all.insert(key, value);
    }
    Ok(Value::Object(all))
}

/// Maps whose keys are user data and are not respelled.
const USER_KEYED: [&str; 3] = ["tags", "userAssignedIdentities", "inlineEventTypes"];

/// Spells every key as the API does, at every depth.
fn camel_keys(map: Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut spelled = Map::new();
    for (key, value) in map {
        let key = camel(&key);
        let value = if USER_KEYED.contains(&key.as_str()) {
            value
        } else {
            camel_values(value)?
        };
        if spelled.insert(key.clone(), value).is_some() {
            return Err(format!("{key} is given in two spellings"));
        }
    }
    Ok(spelled)
}

fn camel_values(value: Value) -> Result<Value, String> {
    Ok(match value {
        Value::Object(map) => Value::Object(camel_keys(map)?),
        Value::Array(items) => Value::Array(items.into_iter().map(camel_values).collect::<Result<_, _>>()?),
        scalar => scalar,
    })
}

/// `input_schema` becomes `inputSchema`; keys without an underscore are unchanged.
fn camel(key: &str) -> String {
    let mut words = key.split('_');
    let mut spelled = words.next().unwrap_or_default().to_owned();
    for word in words {
        let mut letters = word.chars();
        spelled.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        spelled.push_str(letters.as_str());
    }
    spelled
}

fn masked<S: Serializer>(properties: &Value, to: S) -> Result<S::Ok, S::Error> {
    let mut shown = properties.clone();
    mask(&mut shown);
    shown.serialize(to)
}

/// Masks values that the API never returns: the query of an endpoint's URL, which carries function
/// keys, the values of secret delivery attributes, and anything called a key.
fn mask(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(mask),
        Value::Object(map) => {
            let secret_attribute = map.get("isSecret") == Some(&Value::Bool(true))
                || map.get("properties").and_then(|p| p.get("isSecret")) == Some(&Value::Bool(true));
            for (key, value) in map.iter_mut() {
                match (key.as_str(), &mut *value) {
                    ("key1" | "key2" | "accessKey" | "sharedKey" | "connectionString", v) => {
                        *v = MASK.into();
                    }
                    (name, v) if name.to_ascii_lowercase().ends_with("secret") && v.is_string() => {
                        *v = MASK.into();
                    }
                    ("value", v) if secret_attribute => *v = MASK.into(),
                    ("properties", Value::Object(inner)) if secret_attribute => {
                        inner.insert("value".into(), MASK.into());
                    }
                    ("endpointUrl", Value::String(url)) => {
                        if let Some(query) = url.find('?') {
                            url.replace_range(query + 1.., MASK);
                        }
                    }
                    (_, nested) => mask(nested),
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_are_spelled_as_the_api_does() {
        let check = |written: &str, spelled: &str| assert_eq!(camel(written), spelled);
        check("input_schema", "inputSchema");
        check("inputSchema", "inputSchema");
        check("event_time_to_live_in_minutes", "eventTimeToLiveInMinutes");
        check("key1", "key1");
        check("name", "name");

        let map = json!({
            "tags": {"cost_center": "a_b"},
            "filter": {"advanced_filters": [{"operator_type": "StringIn", "values": ["a_b"]}]},
        });
        let Value::Object(map) = map else { unreachable!() };
        assert_eq!(
            Value::Object(camel_keys(map).unwrap()),
            json!({
                "tags": {"cost_center": "a_b"},
                "filter": {"advancedFilters": [{"operatorType": "StringIn", "values": ["a_b"]}]},
            })
        );
    }

    #[test]
    fn secrets_inside_properties_are_masked() {
        let mut shown = json!({
            "destination": {"endpointType": "WebHook", "properties": {
                "endpointUrl": "https://f.example/api?code=hunter2",
                "deliveryAttributeMappings": [
                    {"name": "a", "type": "Static", "properties": {"value": "hunter2", "isSecret": true}},
                    {"name": "b", "type": "Static", "properties": {"value": "open", "isSecret": false}},
                ]}},
            "accessKey": "hunter2",
        });
        mask(&mut shown);
        let text = shown.to_string();
        assert!(!text.contains("hunter2"), "{text}");
        assert!(
            text.contains("https://f.example/api?********") && text.contains("open"),
            "{text}"
        );
    }
}
