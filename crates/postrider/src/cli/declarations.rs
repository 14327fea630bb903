//! Declaration files: topics, domains, system topics and subscriptions in YAML, JSON or TOML, with
//! the properties of the management API as the configuration file takes them.

use super::UsageError;
use super::ids::{ResourceIds, ResourceKind};
use super::normalize::destination_mut;
use crate::config::{DeclaredDomain, DeclaredSubscription, DeclaredSystemTopic, DeclaredTopic, nearest};
use anyhow::Result;
use postrider_wire::resources::{BodyShape, DECLARED_TOPIC, SUBSCRIPTION_PROPERTIES, unknown_members};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Declarations of all files together.
#[derive(Debug, Default, PartialEq)]
pub struct DeclarationSet {
    pub resources: Vec<ResourceToApply>,
    pub subscriptions: Vec<SubscriptionToApply>,
    pub warnings: Vec<String>,
}

/// A topic, domain or system topic.
#[derive(Debug, PartialEq)]
pub struct ResourceToApply {
    pub kind: ResourceKind,
    pub name: String,
    pub group: Option<String>,
    /// `location` and `tags` if they are given, and `properties`.
    pub body: Value,
    /// The topics of a domain.
    pub topics: Vec<String>,
}

#[derive(Debug, PartialEq)]
pub struct SubscriptionToApply {
    pub on: SubscriptionParent,
    pub group: Option<String>,
    pub name: String,
    pub properties: Map<String, Value>,
}

/// The resource that a subscription belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SubscriptionParent {
    Resource(ResourceKind, String),
    DomainTopic(String, String),
    Scope(String),
}

impl SubscriptionParent {
    pub fn text(&self) -> String {
        match self {
            SubscriptionParent::Resource(_, name) => name.clone(),
            SubscriptionParent::DomainTopic(domain, topic) => format!("{domain}/{topic}"),
            SubscriptionParent::Scope(id) => id.clone(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeclarationFile {
    #[serde(alias = "resourceGroup", alias = "resource_group")]
    group: Option<String>,
    location: Option<String>,
    #[serde(default, alias = "topic")]
    topics: Vec<ParsedTopic>,
    #[serde(default, alias = "domain")]
    domains: Vec<ParsedDomain>,
    #[serde(
        default,
        alias = "system_topics",
        alias = "system_topic",
        alias = "systemTopic"
    )]
    #[serde(rename = "systemTopics")]
    system_topics: Vec<ParsedSystemTopic>,
    #[serde(
        default,
        alias = "subscription",
        alias = "event_subscriptions",
        alias = "eventSubscriptions"
    )]
    subscriptions: Vec<ParsedSubscription>,
}

/// Conversion during parsing validates each declaration, so that errors carry the line.
#[derive(Deserialize)]
#[serde(try_from = "DeclaredTopic")]
struct ParsedTopic(ResourceToApply, Vec<SubscriptionToApply>, bool);

#[derive(Deserialize)]
#[serde(try_from = "DeclaredDomain")]
struct ParsedDomain(ResourceToApply, Vec<SubscriptionToApply>, bool);

#[derive(Deserialize)]
#[serde(try_from = "DeclaredSystemTopic")]
struct ParsedSystemTopic(ResourceToApply, Vec<SubscriptionToApply>);

#[derive(Deserialize)]
#[serde(try_from = "DeclaredSubscription")]
struct ParsedSubscription(SubscriptionToApply);

const BESIDE: [&str; 6] = ["location", "tags", "sku", "identity", "kind", "extendedLocation"];
const OF_TOPICS: [&str; 10] = [
    "edge",
    "inputSchema",
    "inputSchemaMapping",
    "publicNetworkAccess",
    "inboundIpRules",
    "disableLocalAuth",
    "dataResidencyBoundary",
    "minimumTlsVersionAllowed",
    "eventTypeInfo",
    "postrider",
];
const OF_DOMAINS: [&str; 2] = [
    "autoCreateTopicWithFirstSubscription",
    "autoDeleteTopicWithLastSubscription",
];
const OF_SUBSCRIPTIONS: [&str; 10] = [
    "destination",
    "deliveryWithResourceIdentity",
    "filter",
    "labels",
    "expirationTimeUtc",
    "eventDeliverySchema",
    "retryPolicy",
    "deadLetterDestination",
    "deadLetterWithResourceIdentity",
    "postrider",
];

/// Read-only members that `show` prints, so that files made of its output have them.
const SHOWN_ONLY: [&str; 7] = [
    "id",
    "type",
    "status",
    "systemData",
    "provisioningState",
    "metricResourceId",
    "privateEndpointConnections",
];

impl TryFrom<DeclaredTopic> for ParsedTopic {
    type Error = String;
    fn try_from(declared: DeclaredTopic) -> Result<ParsedTopic, String> {
        let keys = declared.key1.is_some() || declared.key2.is_some();
        let (name, on) = (
            declared.name.clone(),
            SubscriptionParent::Resource(ResourceKind::Topic, declared.name),
        );
        let about = |reason| format!("topic {name:?}: {reason}");
        let resource =
            resource(ResourceKind::Topic, &name, declared.properties, &[&OF_TOPICS]).map_err(about)?;
        let subscriptions = subscriptions(&on, &resource.group, declared.subscriptions).map_err(about)?;
        Ok(ParsedTopic(resource, subscriptions, keys))
    }
}

impl TryFrom<DeclaredDomain> for ParsedDomain {
    type Error = String;
    fn try_from(declared: DeclaredDomain) -> Result<ParsedDomain, String> {
        let keys = declared.key1.is_some() || declared.key2.is_some();
        let name = declared.name;
        let about = |reason| format!("domain {name:?}: {reason}");
        let known: [&[&str]; 2] = [&OF_TOPICS, &OF_DOMAINS];
        let mut resource =
            resource(ResourceKind::Domain, &name, declared.properties, &known).map_err(about)?;
        let on = SubscriptionParent::Resource(ResourceKind::Domain, name.clone());
        let mut all = subscriptions(&on, &resource.group, declared.subscriptions).map_err(about)?;
        for topic in declared.topics {
            if topic
                .properties
                .as_object()
                .is_some_and(|given| !given.is_empty())
                || topic.key1.is_some()
            {
                return Err(about(format!(
                    "topic {:?} of a domain has subscriptions and nothing else",
                    topic.name
                )));
            }
            let on = SubscriptionParent::DomainTopic(name.clone(), topic.name.clone());
            all.extend(subscriptions(&on, &resource.group, topic.subscriptions).map_err(about)?);
            resource.topics.push(topic.name);
        }
        Ok(ParsedDomain(resource, all, keys))
    }
}

impl TryFrom<DeclaredSystemTopic> for ParsedSystemTopic {
    type Error = String;
    fn try_from(declared: DeclaredSystemTopic) -> Result<ParsedSystemTopic, String> {
        let name = declared.name;
        let about = |reason| format!("system topic {name:?}: {reason}");
        let mut resource = resource(
            ResourceKind::SystemTopic,
            &name,
            declared.properties,
            &[&["postrider"]],
        )
        .map_err(about)?;
        resource.body["properties"]["source"] = json!(declared.source);
        resource.body["properties"]["topicType"] = json!(declared.topic_type);
        let on = SubscriptionParent::Resource(ResourceKind::SystemTopic, name.clone());
        let subscriptions = subscriptions(&on, &resource.group, declared.subscriptions).map_err(about)?;
        Ok(ParsedSystemTopic(resource, subscriptions))
    }
}

impl TryFrom<DeclaredSubscription> for ParsedSubscription {
    type Error = String;
    fn try_from(mut declared: DeclaredSubscription) -> Result<ParsedSubscription, String> {
        let about = |reason: String| format!("subscription {:?}: {reason}", declared.name);
        let given = declared
            .properties
            .as_object_mut()
            .expect("declared properties are an object");
        let mut take = |name: &str| match given.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(_) => Err(format!("{name} must be a name")),
        };
        let mut owners = ["topic", "domain", "domainTopic", "systemTopic", "scope"]
            .map(|name| take(name).map_err(about).transpose());
        let mut owner = |at: usize| owners[at].take().transpose();
        let on = match (owner(0)?, owner(1)?, owner(2)?, owner(3)?, owner(4)?) {
            (Some(topic), None, None, None, None) => SubscriptionParent::Resource(ResourceKind::Topic, topic),
            (None, Some(domain), None, None, None) => {
                SubscriptionParent::Resource(ResourceKind::Domain, domain)
            }
            (None, Some(domain), Some(topic), None, None) => SubscriptionParent::DomainTopic(domain, topic),
            (None, None, None, Some(topic), None) => {
                SubscriptionParent::Resource(ResourceKind::SystemTopic, topic)
            }
            (None, None, None, None, Some(id)) if id.starts_with("/subscriptions/") => {
                SubscriptionParent::Scope(id.trim_end_matches('/').to_owned())
            }
            (None, None, None, None, Some(_)) => {
                return Err(about("scope must be a resource id: /subscriptions/…".into()));
            }
            _ => {
                let reason = "needs one of topic, domain, domain with domainTopic, systemTopic and scope";
                return Err(about(reason.into()));
            }
        };
        let mut made = subscriptions(&on, &None, vec![declared])?;
        Ok(ParsedSubscription(made.remove(0)))
    }
}

/// Splits the members of a declaration into the API's body and what is beside `properties`.
fn resource(
    kind: ResourceKind,
    name: &str,
    declared: Value,
    known: &[&[&str]],
) -> Result<ResourceToApply, String> {
    let Value::Object(mut given) = declared else {
        unreachable!("declared properties are an object");
    };
    let group = take_group(&mut given)?;
    given.retain(|name, _| name != "endpoint" && !SHOWN_ONLY.contains(&name.as_str()));
    check_members(&given, &DECLARED_TOPIC)?;
    let mut body = json!({"properties": {}});
    if kind == ResourceKind::Topic
        && let Some(edge) = given.remove("edge")
    {
        if !edge.is_boolean() {
            return Err("edge must be true or false".into());
        }
        let ours = given.entry("postrider").or_insert_with(|| json!({}));
        ours["edge"] = edge;
    }
    for (member, value) in given {
        if BESIDE.contains(&member.as_str()) {
            body[member] = value;
            continue;
        }
        check_known(
            &member,
            known.iter().flat_map(|some| some.iter().copied()).chain(BESIDE),
        )?;
        body["properties"][member] = value;
    }
    Ok(ResourceToApply {
        kind,
        name: name.to_owned(),
        group,
        body,
        topics: Vec::new(),
    })
}

fn subscriptions(
    on: &SubscriptionParent,
    group: &Option<String>,
    declared: Vec<DeclaredSubscription>,
) -> Result<Vec<SubscriptionToApply>, String> {
    let one = |declared: DeclaredSubscription| {
        let about = |reason| format!("subscription {:?}: {reason}", declared.name);
        let Value::Object(mut properties) = declared.properties else {
            unreachable!("declared properties are an object");
        };
        let own = take_group(&mut properties).map_err(about)?;
        properties.retain(|name, _| !SHOWN_ONLY.contains(&name.as_str()));
        check_members(&properties, &SUBSCRIPTION_PROPERTIES).map_err(about)?;
        for member in properties.keys() {
            check_known(member, OF_SUBSCRIPTIONS).map_err(about)?;
        }
        Ok(SubscriptionToApply {
            on: on.clone(),
            group: own.or_else(|| group.clone()),
            name: declared.name,
            properties,
        })
    };
    declared.into_iter().map(one).collect()
}

fn take_group(given: &mut Map<String, Value>) -> Result<Option<String>, String> {
    match given.remove("group").or_else(|| given.remove("resourceGroup")) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(group)) if !group.is_empty() => Ok(Some(group)),
        Some(_) => Err("group must be a name".into()),
    }
}

/// Refuses members, at any depth, that no API knows.
fn check_members(given: &Map<String, Value>, shape: &BodyShape) -> Result<(), String> {
    let unknown = unknown_members(&Value::Object(given.clone()), shape);
    match unknown.first() {
        Some(unknown) => Err(unknown_property(&unknown.path, &unknown.name, &unknown.known)),
        None => Ok(()),
    }
}

fn unknown_property(path: &str, name: &str, known: &[&str]) -> String {
    let hint = nearest(name, known.iter().copied())
        .map(|near| format!("; did you mean {near}?"))
        .unwrap_or_default();
    format!("unknown property {path}{hint}")
}

/// Refuses an unknown member: it was surely meant to have an effect.
fn check_known<'a>(member: &str, known: impl IntoIterator<Item = &'a str>) -> Result<(), String> {
    let known: Vec<&str> = known.into_iter().collect();
    if known.contains(&member) {
        return Ok(());
    }
    Err(unknown_property(member, member, &known))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    Yaml,
    Json,
    Toml,
}

impl FileFormat {
    /// Format by the file's extension. JSON is YAML too, so text without a name is parsed as YAML.
    pub fn of(path: &str) -> FileFormat {
        let lower = path.to_lowercase();
        match () {
            () if lower.ends_with(".toml") => FileFormat::Toml,
            () if lower.ends_with(".json") => FileFormat::Json,
            () => FileFormat::Yaml,
        }
    }
}

/// Reads one file. `name` is for messages.
fn read(text: &str, format: FileFormat, name: &str) -> Result<DeclarationFile> {
    let refused = |line: Option<u64>, reason: String| {
        let line = line.map(|line| format!(" line {line}")).unwrap_or_default();
        anyhow::Error::from(UsageError::new(format!("{name}{line}: {reason}")))
    };
    if text.trim().is_empty() {
        return Err(refused(None, "is empty".into()));
    }
    match format {
        FileFormat::Toml => toml::from_str(text).map_err(|e| {
            let before = e.span().map(|span| &text[..span.start.min(text.len())]);
            let line = before.map(|before| before.matches('\n').count() as u64 + 1);
            refused(line, e.message().to_owned())
        }),
        // The YAML parser reports the line of an error inside a declaration, which the JSON parser
        // does not.
        FileFormat::Yaml | FileFormat::Json => {
            let options = serde_saphyr::options! { with_snippet: false, strict_booleans: true };
            serde_saphyr::from_str_with_options(text, options).map_err(|e| {
                let line = e.location().map(|at| at.line());
                refused(line, without_place(&e.without_snippet().to_string()))
            })
        }
    }
}

/// Removes the position from a message: the line is printed in front.
fn without_place(message: &str) -> String {
    let end = message.find(" at line ").unwrap_or(message.len());
    message[..end].to_owned()
}

impl DeclarationSet {
    /// Adds a file's declarations.
    pub fn add(&mut self, text: &str, format: FileFormat, name: &str) -> Result<()> {
        let DeclarationFile {
            group,
            location,
            topics,
            domains,
            system_topics,
            subscriptions,
        } = read(text, format, name)?;
        let mut resources = Vec::new();
        let mut all = Vec::new();
        let mut with_keys = Vec::new();
        for ParsedTopic(topic, its, keys) in topics {
            with_keys.extend(keys.then(|| format!("topic {:?}", topic.name)));
            resources.push(topic);
            all.extend(its);
        }
        for ParsedDomain(domain, its, keys) in domains {
            with_keys.extend(keys.then(|| format!("domain {:?}", domain.name)));
            resources.push(domain);
            all.extend(its);
        }
        for ParsedSystemTopic(topic, its) in system_topics {
            resources.push(topic);
            all.extend(its);
        }
        all.extend(subscriptions.into_iter().map(|ParsedSubscription(one)| one));
        for resource in &mut resources {
            resource.group = resource.group.take().or_else(|| group.clone());
            if let (None, Some(location)) = (resource.body.get("location"), &location) {
                resource.body["location"] = json!(location);
            }
        }
        for one in &mut all {
            one.group = one.group.take().or_else(|| group.clone());
        }
        self.resources.extend(resources);
        self.subscriptions.extend(all);
        self.warnings.extend(with_keys.into_iter().map(|what| {
            format!("{name}: the keys of {what} are not applied: the server makes them, or its configuration says them")
        }));
        self.check(name)
    }

    /// Refuses duplicate declarations.
    fn check(&self, name: &str) -> Result<()> {
        let mut seen = BTreeSet::new();
        for one in &self.resources {
            let group = match one.kind {
                ResourceKind::SystemTopic => one.group.as_deref().map(str::to_lowercase),
                ResourceKind::Topic | ResourceKind::Domain => None,
            };
            if !seen.insert((one.kind, group, one.name.to_lowercase())) {
                let reason = format!("{name}: {} {:?} is there twice", one.kind.noun(), one.name);
                return Err(UsageError::new(reason).into());
            }
        }
        let mut seen = BTreeSet::new();
        for one in &self.subscriptions {
            let on = one.on.text().to_lowercase();
            if !seen.insert((of_kind(&one.on), on, one.name.to_lowercase())) {
                let reason = format!(
                    "{name}: subscription {:?} on {} is there twice",
                    one.name,
                    one.on.text()
                );
                return Err(UsageError::new(reason).into());
            }
        }
        Ok(())
    }
}

fn of_kind(on: &SubscriptionParent) -> u8 {
    match on {
        SubscriptionParent::Resource(ResourceKind::Topic, _) => 0,
        SubscriptionParent::Resource(ResourceKind::Domain, _) => 1,
        SubscriptionParent::Resource(ResourceKind::SystemTopic, _) => 2,
        SubscriptionParent::DomainTopic(..) => 3,
        SubscriptionParent::Scope(_) => 4,
    }
}

/// Expands the short names that the configuration accepts, too, to whole ids.
pub fn with_whole_ids(properties: &mut Map<String, Value>, ids: &ResourceIds, group: &str) -> Result<()> {
    let account = |place: &mut Value| {
        if let Some(Value::String(name)) = place.pointer_mut("/properties/resourceId") {
            *name = ids.storage_account(name, group);
        }
    };
    if let Some(place) = properties.get_mut("deadLetterDestination") {
        account(place);
    }
    if let Some(place) = properties
        .get_mut("deadLetterWithResourceIdentity")
        .and_then(|with| with.get_mut("deadLetterDestination"))
    {
        account(place);
    }
    let Some(destination) = destination_mut(properties) else {
        return Ok(());
    };
    let kind = destination["endpointType"]
        .as_str()
        .unwrap_or_default()
        .to_ascii_lowercase();
    let broker = match kind.as_str() {
        "storagequeue" => {
            account(destination);
            return Ok(());
        }
        "eventhub" => ("Microsoft.EventHub", "eventhubs"),
        "servicebusqueue" => ("Microsoft.ServiceBus", "queues"),
        "servicebustopic" => ("Microsoft.ServiceBus", "topics"),
        "hybridconnection" => ("Microsoft.Relay", "hybridConnections"),
        _ => return Ok(()),
    };
    if let Some(Value::String(id)) = destination.pointer_mut("/properties/resourceId") {
        *id = ids.in_namespace(id, group, broker.0, broker.1)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, format: FileFormat) -> Result<DeclarationSet> {
        let mut grid = DeclarationSet::default();
        grid.add(text, format, "grid")?;
        Ok(grid)
    }

    const YAML: &str = r#"
group: rg1
topics:
  - name: orders
    input_schema: EventGridSchema   # as the configuration file has it
    tags: {cost_center: a_b}
    subscriptions:
      - name: billing
        destination:
          endpointType: WebHook
          properties: {endpointUrl: "http://127.0.0.1:9000/?code=1"}
        retry_policy: {max_delivery_attempts: 5}
domains:
  - name: tenants
    group: rg2
    properties: {autoCreateTopicWithFirstSubscription: false}
    topics:
      - name: t1
        subscriptions:
          - {name: s, destination: {endpointType: WebHook, properties: {endpointUrl: "http://x"}}}
systemTopics:
  - {name: dead, source: local}
subscriptions:
  - topic: orders
    name: audit
    labels: [a, "1.0", "true"]
  - {domain: tenants, domain_topic: t2, name: all}
  - {scope: /subscriptions/0/resourceGroups/g/, name: scoped}
"#;

    #[test]
    fn yaml_says_what_json_and_toml_say() {
        let grid = read(YAML, FileFormat::Yaml).unwrap();
        let [orders, tenants, dead] = &grid.resources[..] else {
            panic!("{grid:#?}")
        };
        assert_eq!(
            (orders.kind, orders.group.as_deref()),
            (ResourceKind::Topic, Some("rg1"))
        );
        assert_eq!(
            orders.body,
            json!({"tags": {"cost_center": "a_b"}, "properties": {"inputSchema": "EventGridSchema"}})
        );
        assert_eq!(tenants.group.as_deref(), Some("rg2"));
        assert_eq!(tenants.topics, ["t1"]);
        assert_eq!(
            dead.body["properties"],
            json!({"source": "local", "topicType": "Microsoft.Storage.StorageAccounts"})
        );
        let told: Vec<_> = grid
            .subscriptions
            .iter()
            .map(|one| (one.on.text(), one.name.as_str()))
            .collect();
        let told: Vec<_> = told.iter().map(|(on, name)| (on.as_str(), *name)).collect();
        assert_eq!(
            told,
            [
                ("orders", "billing"),
                ("tenants/t1", "s"),
                ("orders", "audit"),
                ("tenants/t2", "all"),
                ("/subscriptions/0/resourceGroups/g", "scoped"),
            ]
        );
        assert_eq!(
            grid.subscriptions[0].properties["retryPolicy"],
            json!({"maxDeliveryAttempts": 5})
        );
        let labels = &grid.subscriptions[2].properties["labels"];
        assert_eq!(*labels, json!(["a", "1.0", "true"]), "quotes make text");

        let value: Value = serde_saphyr::from_str(YAML).unwrap();
        assert_eq!(read(&value.to_string(), FileFormat::Json).unwrap(), grid);
        let toml = toml::to_string(&value).unwrap();
        assert_eq!(read(&toml, FileFormat::Toml).unwrap(), grid);
        // TOML with the names of the configuration file.
        let toml = "[[topic]]\nname = 'a'\nkey1 = 'k'\n[[topic.subscription]]\nname = 's'\n";
        let grid = read(toml, FileFormat::Toml).unwrap();
        assert_eq!((grid.resources.len(), grid.subscriptions.len()), (1, 1));
        assert!(
            grid.warnings[0].contains("the keys of topic \"a\""),
            "{:?}",
            grid.warnings
        );
    }

    #[track_caller]
    fn refused(text: &str, format: FileFormat, expected: &[&str]) {
        let refused = read(text, format).unwrap_err().to_string();
        for word in expected {
            assert!(refused.contains(word), "{word:?} in {refused}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line_and_name() {
        let yaml = |text: &str, expected: &[&str]| refused(text, FileFormat::Yaml, expected);
        yaml("topics:\n  - name: a\n  - naem: b\n", &["line 3", "name"]);
        yaml(
            "topics:\n  - name: abc\n    inputShema: x\n",
            &[
                "line 2",
                "topic \"abc\"",
                "inputShema",
                "did you mean inputSchema?",
            ],
        );
        yaml(
            "topics:\n  - name: abc\n    subscriptions:\n      - name: s\n        destinaton: {}\n",
            &["line ", "subscription \"s\"", "did you mean destination?"],
        );
        yaml(
            "topics:\n  - name: abc\n    subscriptions:\n      - name: s\n        filter: {subjectStartsWith: /}\n",
            &[
                "subscription \"s\"",
                "filter.subjectStartsWith",
                "did you mean subjectBeginsWith?",
            ],
        );
        yaml("topcs: []\n", &["line 1", "topcs"]);
        yaml("topics: [\n", &["line "]);
        yaml("topics:\n  - {name: a, name: b}\n", &["line 2"]);
        yaml("subscriptions:\n  - name: s\n", &["line 2", "needs one of topic"]);
        yaml(
            "subscriptions:\n  - {name: s, scope: x}\n",
            &["scope must be a resource id"],
        );
        yaml(
            "domains:\n  - {name: d, topics: [{name: t, inputSchema: x}]}\n",
            &["has subscriptions and nothing else"],
        );
        yaml(
            "topics: [{name: abc}, {name: ABC}]",
            &["topic \"ABC\" is there twice"],
        );
        yaml("", &["is empty"]);
        refused("{\"topics\": [\n{\"name\": []}]}", FileFormat::Json, &["line 2"]);
        refused(
            "[[topic]]\nname = 'a'\n[[topic]]\n",
            FileFormat::Toml,
            &["line 3", "name"],
        );
    }

    #[test]
    fn what_show_prints_can_be_put_into_a_file() {
        let id = "/subscriptions/0/resourceGroups/g/providers/Microsoft.EventGrid/topics/a";
        let file = json!({
            "topics": [{"name": "a", "id": id, "type": "Microsoft.EventGrid/topics", "systemData": null,
                "properties": {"endpoint": "https://h/", "provisioningState": "Succeeded", "metricResourceId": "1"}}],
            "subscriptions": [{"topic": "a", "name": "s", "id": format!("{id}/eventSubscriptions/s"),
                "type": "Microsoft.EventGrid/topics/eventSubscriptions", "status": {"health": "well"},
                "properties": {"topic": id, "provisioningState": "Succeeded", "labels": ["x"]}}],
        });
        let grid = read(&file.to_string(), FileFormat::Json).unwrap();
        assert_eq!(grid.resources[0].body["properties"], json!({}));
        let subscription = &grid.subscriptions[0];
        assert_eq!(subscription.on.text(), "a");
        assert_eq!(
            Value::Object(subscription.properties.clone()),
            json!({"labels": ["x"]})
        );
    }

    #[test]
    fn short_names_are_spelled_out() {
        let ids = ResourceIds::new("0");
        let expanded = |properties: Value| {
            let Value::Object(mut properties) = properties else {
                unreachable!()
            };
            with_whole_ids(&mut properties, &ids, "g").map(|()| Value::Object(properties))
        };
        let storage = "/subscriptions/0/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/local";
        let dead = |id: &str| {
            json!({"deadLetterDestination": {"endpointType": "StorageBlob",
                   "properties": {"resourceId": id, "blobContainerName": "dead"}}})
        };
        assert_eq!(expanded(dead("local")).unwrap(), dead(storage));
        assert_eq!(expanded(dead(storage)).unwrap(), dead(storage));
        let hub =
            |id: &str| json!({"destination": {"endpointType": "EventHub", "properties": {"resourceId": id}}});
        let id = "/subscriptions/0/resourceGroups/g/providers/Microsoft.EventHub/namespaces/ns/eventhubs/h";
        assert_eq!(expanded(hub("ns/h")).unwrap(), hub(id));
        assert!(expanded(hub("h")).is_err());
    }
}
