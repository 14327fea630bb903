//! Parsing of topics, domains and system topics.

use super::read::{JsonNode, check_chars};
use super::validate::{check_azure_topic_name, check_ip_mask, check_name};
use super::{EchoedMembers, FieldError, Road, SCHEMAS, check_same_name, parse_profile, schema_name};
use postrider_core::event::EventSchema;
use postrider_core::ids::{Secret, TopicId};
use postrider_core::json::{JsonKind, RawJson, unescape};
use postrider_core::subscription::{InputMapping, MappedField, Topic, TopicKind};
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;

/// Limit of the inbound IP rules of a topic.
const IP_RULES_MAX: usize = 128;

/// The properties of a topic that a body defines; the server assigns the others.
#[derive(Clone, Debug, PartialEq)]
pub struct TopicSpec {
    pub name: String,
    pub kind: TopicKind,
    /// Empty if none was given.
    pub location: String,
    pub tags: BTreeMap<String, String>,
    pub input_schema: EventSchema,
    pub mapping: Option<InputMapping>,
    pub local_auth_disabled: bool,
    pub public_network: bool,
    pub inbound_ip_rules: Vec<String>,
    pub profile: Option<String>,
    pub extras: Option<String>,
    /// Whether the edge API reaches the topic; see [`Topic::edge`].
    pub edge: Option<bool>,
}

impl TopicSpec {
    /// The properties that the topic has now.
    fn of(topic: &Topic) -> TopicSpec {
        TopicSpec {
            name: topic.name.clone(),
            kind: topic.kind.clone(),
            location: topic.location.clone(),
            tags: topic.tags.clone(),
            input_schema: topic.input_schema,
            mapping: topic.mapping.clone(),
            local_auth_disabled: topic.local_auth_disabled,
            public_network: topic.public_network,
            inbound_ip_rules: topic.inbound_ip_rules.clone(),
            profile: topic.profile.clone(),
            extras: topic.extras.clone(),
            edge: topic.edge,
        }
    }

    pub fn into_topic(
        self,
        id: TopicId,
        resource_group: String,
        keys: [Secret; 2],
        created: Timestamp,
    ) -> Topic {
        Topic {
            id,
            name: self.name,
            kind: self.kind,
            resource_group,
            location: self.location,
            tags: self.tags,
            input_schema: self.input_schema,
            mapping: self.mapping,
            keys,
            local_auth_disabled: self.local_auth_disabled,
            public_network: self.public_network,
            inbound_ip_rules: self.inbound_ip_rules,
            profile: self.profile,
            created,
            extras: self.extras,
            edge: self.edge,
        }
    }
}

/// Members that are stored only to be echoed, beside the properties and inside them. The last one
/// is also parsed; that it was sent is what makes answers contain it.
const BESIDE: [&str; 4] = ["sku", "identity", "kind", "extendedLocation"];
const INSIDE: [&str; 4] = [
    "dataResidencyBoundary",
    "minimumTlsVersionAllowed",
    "eventTypeInfo",
    "disableLocalAuth",
];

/// Further members of a PATCH, beside the properties and inside them. Fixed values may be repeated.
const CHANGED_BESIDE: [&str; 3] = ["tags", "name", "location"];
const CHANGED_INSIDE: [&str; 9] = [
    "publicNetworkAccess",
    "inboundIpRules",
    "postrider",
    "autoCreateTopicWithFirstSubscription",
    "autoDeleteTopicWithLastSubscription",
    "inputSchema",
    "inputSchemaMapping",
    "source",
    "topicType",
];

/// Parses a custom topic. The input schema must be that of the previous state; a body that omits
/// the schema or its mapping does not change them.
pub fn parse_topic(
    body: RawJson<'_>,
    road: Road,
    name: &str,
    previous: Option<&Topic>,
) -> Result<TopicSpec, FieldError> {
    parse(body, road, name, previous, |_| Ok(TopicKind::Custom))
}

/// Parses a domain.
pub fn parse_domain(
    body: RawJson<'_>,
    road: Road,
    name: &str,
    previous: Option<&Topic>,
) -> Result<TopicSpec, FieldError> {
    parse(body, road, name, previous, |properties| {
        Ok(TopicKind::Domain {
            auto_create: properties
                .bool("autoCreateTopicWithFirstSubscription")?
                .unwrap_or(true),
            auto_delete: properties
                .bool("autoDeleteTopicWithLastSubscription")?
                .unwrap_or(true),
        })
    })
}

/// Parses a system topic.
pub fn parse_system_topic(
    body: RawJson<'_>,
    road: Road,
    name: &str,
    previous: Option<&Topic>,
) -> Result<TopicSpec, FieldError> {
    parse(body, road, name, previous, |properties| {
        let source = properties.need_string("source")?;
        let topic_type = properties.need_string("topicType")?;
        let fixed = previous.filter(|_| road == Road::Azure).map(|topic| &topic.kind);
        if let Some(TopicKind::System {
            source: kept,
            topic_type: kept_type,
        }) = fixed
        {
            let words = [("source", &source, kept), ("topicType", &topic_type, kept_type)];
            for (member, given, kept) in words {
                if !given.eq_ignore_ascii_case(kept) {
                    let reason = format!("cannot be changed from {kept:?} to {given:?}");
                    return Err(properties.at(member).fail(reason));
                }
            }
        }
        Ok(TopicKind::System { source, topic_type })
    })
}

fn parse(
    body: RawJson<'_>,
    road: Road,
    name: &str,
    previous: Option<&Topic>,
    kind: impl Fn(&JsonNode<'_>) -> Result<TopicKind, FieldError>,
) -> Result<TopicSpec, FieldError> {
    // At the edge, every property of a topic is optional, and so is the body.
    let body = if road == Road::Edge && body.is_null() {
        RawJson::trusted("{}")
    } else {
        body
    };
    let root = JsonNode::root(body)?;
    let properties = match root.object("properties")? {
        Some(properties) => properties,
        None => JsonNode {
            path: "properties".into(),
            value: RawJson::trusted("{}"),
        },
    };
    let kind = kind(&properties)?;
    match road {
        Road::Azure => check_azure_resource_name(name, &kind)?,
        Road::Edge | Road::Config => check_name(name)?,
    }
    check_same_name(&root, "name", road, name)?;

    // The configuration may put everything into `properties`.
    let beside = |name: &str| match road {
        Road::Config if root.get(name).is_none() => properties.clone(),
        _ => root.clone(),
    };
    // Documented as required, but az omits it unless it is told a location.
    let location = match beside("location").string("location")? {
        Some(location) => location.replace(' ', "").to_lowercase(),
        None => String::new(),
    };
    let input_schema = parse_input_schema(&properties, previous)?;
    let mut extras = EchoedMembers::default();
    for member in BESIDE {
        extras.keep_member(&beside(member), member)?;
    }
    for member in INSIDE {
        extras.keep_member(&properties, member)?;
    }
    if road == Road::Azure {
        check_extras(&root, &properties)?;
    }
    let edge = match (&kind, road) {
        (TopicKind::Custom, Road::Edge) => Some(true),
        (TopicKind::Custom, _) => {
            let kept = previous
                .filter(|_| road == Road::Azure)
                .and_then(|topic| topic.edge);
            Some(parse_edge(&properties, road, &kind)?.or(kept).unwrap_or(false))
        }
        _ => {
            parse_edge(&properties, road, &kind)?;
            None
        }
    };
    if let Some(previous) = previous.filter(|_| road == Road::Edge) {
        return Ok(TopicSpec {
            input_schema,
            mapping: parse_mapping(&properties, road, input_schema, Some(previous))?,
            profile: parse_profile(&properties)?.or_else(|| previous.profile.clone()),
            ..TopicSpec::of(previous)
        });
    }
    Ok(TopicSpec {
        edge,
        name: name.to_owned(),
        kind,
        location,
        tags: parse_tags(&beside("tags"))?,
        input_schema,
        mapping: parse_mapping(&properties, road, input_schema, previous)?,
        local_auth_disabled: properties.bool("disableLocalAuth")?.unwrap_or(false),
        public_network: parse_public_network(&properties)?.unwrap_or(true),
        inbound_ip_rules: parse_ip_rules(&properties)?,
        profile: parse_profile(&properties)?,
        extras: extras.into_text(),
    })
}

/// Parses a PATCH; members that it does not mention stay unchanged. Members that cannot be changed
/// may be repeated.
pub fn patch_topic(body: RawJson<'_>, previous: &Topic) -> Result<TopicSpec, FieldError> {
    let root = JsonNode::root(body)?;
    let properties = match root.object("properties")? {
        Some(properties) => properties,
        None => JsonNode {
            path: "properties".into(),
            value: RawJson::trusted("{}"),
        },
    };
    if !root.has_any(&BESIDE)
        && !root.has_any(&CHANGED_BESIDE)
        && !properties.has_any(&INSIDE)
        && !properties.has_any(&CHANGED_INSIDE)
    {
        return Err(root.fail("must name something to change, such as tags"));
    }
    check_same_name(&root, "name", Road::Azure, &previous.name)?;
    check_extras(&root, &properties)?;
    check_unchanged(&root, &properties, previous)?;
    let mut spec = TopicSpec::of(previous);
    if root.get("tags").is_some() {
        spec.tags = parse_tags(&root)?;
    }
    if let TopicKind::Domain {
        auto_create,
        auto_delete,
    } = &mut spec.kind
    {
        let given = |name: &str, kept: bool| Ok(properties.bool(name)?.unwrap_or(kept));
        *auto_create = given("autoCreateTopicWithFirstSubscription", *auto_create)?;
        *auto_delete = given("autoDeleteTopicWithLastSubscription", *auto_delete)?;
    }
    if let Some(disabled) = properties.bool("disableLocalAuth")? {
        spec.local_auth_disabled = disabled;
    }
    if let Some(public) = parse_public_network(&properties)? {
        spec.public_network = public;
    }
    if properties.get("inboundIpRules").is_some() {
        spec.inbound_ip_rules = parse_ip_rules(&properties)?;
    }
    if let Some(profile) = parse_profile(&properties)? {
        spec.profile = Some(profile);
    }
    if let Some(edge) = parse_edge(&properties, Road::Azure, &spec.kind)? {
        spec.edge = Some(edge);
    }
    let kept = RawJson::trusted(previous.extras.as_deref().unwrap_or("{}"));
    let kept = JsonNode {
        path: String::new(),
        value: kept,
    };
    let mut extras = EchoedMembers::default();
    for (members, given) in [(&BESIDE[..], &root), (&INSIDE[..], &properties)] {
        for member in members {
            // These two members cannot be changed, so another spelling of the same value is
            // ignored.
            let fixed = matches!(*member, "kind" | "extendedLocation");
            let from = if !fixed && given.get(member).is_some() {
                given
            } else {
                &kept
            };
            extras.keep_member(from, member)?;
        }
    }
    spec.extras = extras.into_text();
    Ok(spec)
}

/// Parses `properties.postrider.edge`; in the configuration also `edge` beside the name.
fn parse_edge(properties: &JsonNode<'_>, road: Road, kind: &TopicKind) -> Result<Option<bool>, FieldError> {
    let beside = match road {
        Road::Config => properties.bool("edge")?.map(|edge| (edge, properties.at("edge"))),
        _ => None,
    };
    let inside = match properties.object("postrider")? {
        Some(ours) => ours.bool("edge")?.map(|edge| (edge, ours.at("edge"))),
        None => None,
    };
    match inside.or(beside) {
        Some((true, at)) if *kind != TopicKind::Custom => Err(at.fail("is for custom topics only")),
        given => Ok(given.map(|(edge, _)| edge)),
    }
}

/// Refuses changes of members that are fixed at creation.
fn check_unchanged(
    root: &JsonNode<'_>,
    properties: &JsonNode<'_>,
    previous: &Topic,
) -> Result<(), FieldError> {
    let same = |node: &JsonNode<'_>, name: &str, kept: &str| match node.string(name)? {
        Some(given) if !given.eq_ignore_ascii_case(kept) => Err(node
            .at(name)
            .fail(format!("cannot be changed from {kept:?} to {given:?}"))),
        _ => Ok(()),
    };
    if let Some(given) = root.string("location")? {
        let given = given.replace(' ', "").to_lowercase();
        if given != previous.location {
            let reason = format!("cannot be changed from {:?} to {given:?}", previous.location);
            return Err(root.at("location").fail(reason));
        }
    }
    let kept = previous.extras.as_deref().unwrap_or("{}");
    let kept = RawJson::trusted(kept).get_any_case("kind");
    let kept = kept
        .as_ref()
        .and_then(|kind| kind.as_str())
        .unwrap_or("Azure".into());
    same(root, "kind", &kept)?;
    if root.get("extendedLocation").is_some() {
        return Err(root.at("extendedLocation").fail("cannot be changed"));
    }
    if let TopicKind::System { source, topic_type } = &previous.kind {
        same(properties, "source", source)?;
        return same(properties, "topicType", topic_type);
    }
    parse_input_schema(properties, Some(previous))?;
    if properties.get("inputSchemaMapping").is_some() {
        let given = parse_mapping(properties, Road::Azure, previous.input_schema, Some(previous))?;
        if given != previous.mapping {
            return Err(properties.at("inputSchemaMapping").fail("cannot be changed"));
        }
    }
    Ok(())
}

/// Members that are only echoed must still have values that the service knows.
fn check_extras(root: &JsonNode<'_>, properties: &JsonNode<'_>) -> Result<(), FieldError> {
    if let Some(sku) = root.object("sku")? {
        sku.word("name", &[("Basic", ()), ("Premium", ())])?;
    }
    root.word("kind", &[("Azure", ()), ("AzureArc", ())])?;
    root.object("extendedLocation")?;
    if let Some(identity) = root.object("identity")? {
        let words = [
            "None",
            "SystemAssigned",
            "UserAssigned",
            "SystemAssigned, UserAssigned",
        ];
        let given = identity.string("type")?;
        let known = |given: &str| {
            let given = given.replace(' ', "");
            words
                .iter()
                .any(|word| word.replace(' ', "").eq_ignore_ascii_case(&given))
        };
        if let Some(given) = given.filter(|given| !known(given)) {
            let reason = format!("must be one of {}, was {given:?}", words.join("; "));
            return Err(identity.at("type").fail(reason));
        }
        identity.object("userAssignedIdentities")?;
    }
    let boundaries = [("WithinGeopair", ()), ("WithinRegion", ())];
    properties.word("dataResidencyBoundary", &boundaries)?;
    let versions = [("1.0", ()), ("1.1", ()), ("1.2", ())];
    properties.word("minimumTlsVersionAllowed", &versions)?;
    if let Some(types) = properties.object("eventTypeInfo")? {
        types.word("kind", &[("Inline", ())])?;
        types.object("inlineEventTypes")?;
    }
    Ok(())
}

fn parse_public_network(properties: &JsonNode<'_>) -> Result<Option<bool>, FieldError> {
    properties.word("publicNetworkAccess", &[("Enabled", true), ("Disabled", false)])
}

/// Azure's rules for names, with its messages where they are known.
fn check_azure_resource_name(name: &str, kind: &TopicKind) -> Result<(), FieldError> {
    let what = match kind {
        TopicKind::Custom => "Topic",
        TopicKind::Domain { .. } => "Domain",
        TopicKind::System { .. } | TopicKind::Scope { .. } => {
            let letters = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
            if (3..=128).contains(&name.len()) && letters {
                return Ok(());
            }
            let reason = format!("must have 3 to 128 letters, digits or '-', was {name:?}");
            return Err(FieldError::new("name", reason));
        }
    };
    if !(3..=50).contains(&name.len()) {
        let error = FieldError::new("name", "must have 3 to 50 letters, digits or '-'");
        return Err(error.saying(format!(
            "{what} name must be between 3 and 50 characters in length."
        )));
    }
    check_azure_topic_name(name)
}

fn parse_input_schema(
    properties: &JsonNode<'_>,
    previous: Option<&Topic>,
) -> Result<EventSchema, FieldError> {
    let given = properties.word("inputSchema", &SCHEMAS)?;
    match (given, previous.map(|topic| topic.input_schema)) {
        (Some(given), Some(fixed)) if given != fixed => {
            let reason = format!(
                "cannot be changed from {} to {}",
                schema_name(fixed),
                schema_name(given)
            );
            Err(properties.at("inputSchema").fail(reason))
        }
        (given, fixed) => Ok(given.or(fixed).unwrap_or(EventSchema::EventGrid)),
    }
}

fn parse_mapping(
    properties: &JsonNode<'_>,
    road: Road,
    schema: EventSchema,
    previous: Option<&Topic>,
) -> Result<Option<InputMapping>, FieldError> {
    let Some(node) = properties.object("inputSchemaMapping")? else {
        if let Some(topic) = previous {
            return Ok(topic.mapping.clone());
        }
        // The edge module has custom schemas without mappings, and so may the configuration.
        return match (road, schema) {
            (Road::Azure, EventSchema::Custom) => Err(properties
                .at("inputSchemaMapping")
                .fail("is required with CustomEventSchema")),
            _ => Ok(None),
        };
    };
    if schema == EventSchema::EventGrid {
        return Err(node.fail("must be left out: EventGridSchema is not mapped"));
    }
    node.word("inputSchemaMappingType", &[("Json", ())])?;
    let fields = node.need_object("properties")?;
    let field = |name: &str, defaults: bool| {
        let Some(field) = fields.object(name)? else {
            return Ok(MappedField::default());
        };
        if let Some(value) = field.get("defaultValue") {
            if !defaults {
                return Err(value.fail(format!("must be left out: {name} has no default")));
            }
            if schema == EventSchema::CloudEvent {
                return Err(value.fail("must be left out: CloudEventSchemaV1_0 has no defaults"));
            }
        }
        let source_field = field.string("sourceField")?;
        if source_field.as_deref() == Some("") {
            return Err(field.at("sourceField").fail("must not be empty"));
        }
        Ok(MappedField {
            source_field,
            default_value: field.string("defaultValue")?,
        })
    };
    let mapping = InputMapping {
        id: field("id", false)?,
        topic: field("topic", false)?,
        event_time: field("eventTime", false)?,
        event_type: field("eventType", true)?,
        subject: field("subject", true)?,
        data_version: field("dataVersion", true)?,
    };
    if mapping == InputMapping::default() {
        return Err(fields.fail("must map at least one field"));
    }
    Ok(Some(mapping))
}

// Limits of Azure Resource Manager.
const TAGS_MAX: usize = 50;
const TAG_NAME_CHARS_MAX: usize = 512;
const TAG_VALUE_CHARS_MAX: usize = 256;

/// Parses the tags of a resource of which nothing else is stored, such as a resource group.
pub fn parse_resource_tags(body: RawJson<'_>) -> Result<BTreeMap<String, String>, FieldError> {
    parse_tags(&JsonNode::root(body)?)
}

fn parse_tags(node: &JsonNode<'_>) -> Result<BTreeMap<String, String>, FieldError> {
    let Some(tags) = node.object("tags")? else {
        return Ok(BTreeMap::new());
    };
    let mut read = BTreeMap::new();
    for member in tags.value.members().filter(|member| !member.value.is_null()) {
        let name = unescape(member.name);
        check_chars(&name, TAG_NAME_CHARS_MAX)
            .map_err(|reason| tags.fail(format!("has a name that {reason}")))?;
        let tag = JsonNode {
            path: format!("{}.{name}", tags.path),
            value: member.value,
        };
        read.insert(name.into_owned(), tag.as_short_string(TAG_VALUE_CHARS_MAX)?);
    }
    if read.len() > TAGS_MAX {
        return Err(tags.fail(format!(
            "must not have more than {TAGS_MAX} tags, had {}",
            read.len()
        )));
    }
    Ok(read)
}

fn parse_ip_rules(properties: &JsonNode<'_>) -> Result<Vec<String>, FieldError> {
    let rules = properties.list("inboundIpRules")?.unwrap_or_default();
    if rules.len() > IP_RULES_MAX {
        let reason = format!(
            "must not have more than {IP_RULES_MAX} rules, had {}",
            rules.len()
        );
        return Err(properties.at("inboundIpRules").fail(reason));
    }
    let rule = |rule: JsonNode<'_>| {
        let rule = rule.of_kind(JsonKind::Object)?;
        rule.word("action", &[("Allow", ())])?;
        let mask = rule.need_string("ipMask")?;
        check_ip_mask(&mask).map_err(|reason| rule.at("ipMask").fail(reason))?;
        Ok(mask)
    };
    rules.into_iter().map(rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_as(road: Road, body: &str) -> Result<TopicSpec, String> {
        let body = RawJson::parse(body).unwrap();
        parse_topic(body, road, "orders", None).map_err(|error| error.to_string())
    }

    fn spec() -> TopicSpec {
        TopicSpec {
            name: "orders".into(),
            kind: TopicKind::Custom,
            location: String::new(),
            tags: BTreeMap::new(),
            input_schema: EventSchema::EventGrid,
            mapping: None,
            local_auth_disabled: false,
            public_network: true,
            inbound_ip_rules: Vec::new(),
            profile: None,
            edge: Some(false),
            extras: None,
        }
    }

    #[test]
    fn edge_topics() {
        let check = |body: &str, expected: Result<EventSchema, &str>| {
            let expected = expected.map(|input_schema| TopicSpec {
                input_schema,
                edge: Some(true),
                ..spec()
            });
            assert_eq!(parse_as(Road::Edge, body), expected.map_err(Into::into), "{body}");
        };
        check("null", Ok(EventSchema::EventGrid));
        check("{}", Ok(EventSchema::EventGrid));
        check(
            r#"{"name":"orders","properties":null}"#,
            Ok(EventSchema::EventGrid),
        );
        check(
            r#"{"NAME":"orders","Properties":{"inputschema":"eventgridschema"}}"#,
            Ok(EventSchema::EventGrid),
        );
        check(
            r#"{"properties":{"inputSchema":"CloudEventSchemaV1_0","x":1}}"#,
            Ok(EventSchema::CloudEvent),
        );
        check(
            r#"{"properties":{"inputSchema":"customEventSchema"}}"#,
            Ok(EventSchema::Custom),
        );
        check(
            r#"{"properties":{"inputSchema":"CustomSchema"}}"#,
            Ok(EventSchema::Custom),
        );
        check(
            r#"{"properties":{"inputSchema":"Xml"}}"#,
            Err(
                "properties.inputSchema must be one of EventGridSchema, CloudEventSchemaV1_0, \
                 CustomEventSchema, CustomInputSchema, CustomSchema, was \"Xml\"",
            ),
        );
        check(
            r#"{"name":"Orders"}"#,
            Err("name must be \"orders\" like the resource it is sent to, was \"Orders\""),
        );
        check("[]", Err("the body must be an object, was a list"));
        check(
            r#"{"properties":[]}"#,
            Err("properties must be an object, was a list"),
        );
    }

    #[test]
    fn azure_topics() {
        let check = |body: &str, expected: Result<TopicSpec, &str>| {
            assert_eq!(
                parse_as(Road::Azure, body),
                expected.map_err(Into::into),
                "{body}"
            );
        };
        // As az sends it.
        check(
            r#"{"location":"Central US","sku":{"name":"Basic"},"identity":{"type":"None"},"kind":"Azure",
                "name":"ORDERS","tags":{"a":"b","c":null},
                "properties":{"inputSchema":"EventGridSchema","disableLocalAuth":true,
                "publicNetworkAccess":"disabled","inboundIpRules":[{"ipMask":"10.0.0.0/8","action":"Allow"}],
                "postrider":{"profile":"Cloud-2019"},"dataResidencyBoundary":"WithinRegion"}}"#,
            Ok(TopicSpec {
                location: "centralus".into(),
                tags: [("a".into(), "b".into())].into(),
                local_auth_disabled: true,
                public_network: false,
                inbound_ip_rules: vec!["10.0.0.0/8".into()],
                profile: Some("cloud-2019".into()),
                extras: Some(
                    r#"{"sku":{"name":"Basic"},"identity":{"type":"None"},"kind":"Azure","dataResidencyBoundary":"WithinRegion","disableLocalAuth":true}"#
                        .into(),
                ),
                ..spec()
            }),
        );
        check(
            "{}",
            Ok(TopicSpec {
                location: String::new(),
                ..spec()
            }),
        );
        let bad = |properties: &str, reason: &str| {
            check(
                &format!(r#"{{"location":"x","properties":{properties}}}"#),
                Err(reason),
            );
        };
        bad(
            r#"{"disableLocalAuth":1}"#,
            "properties.disableLocalAuth must be true or false, was a number",
        );
        bad(
            r#"{"publicNetworkAccess":"Maybe"}"#,
            "properties.publicNetworkAccess must be one of Enabled, Disabled, was \"Maybe\"",
        );
        bad(
            r#"{"inboundIpRules":[{"ipMask":"10/8"}]}"#,
            "properties.inboundIpRules[0].ipMask must be an IP address or network such as 10.0.0.0/8, was \"10/8\"",
        );
        bad(
            r#"{"inboundIpRules":[{"ipMask":"1.1.1.1","action":"Deny"}]}"#,
            "properties.inboundIpRules[0].action must be one of Allow, was \"Deny\"",
        );
        bad(
            &format!(
                r#"{{"inboundIpRules":[{}]}}"#,
                vec![r#"{"ipMask":"1.1.1.1"}"#; 129].join(",")
            ),
            "properties.inboundIpRules must not have more than 128 rules, had 129",
        );
        bad(
            r#"{"postrider":{"profile":"mine"}}"#,
            "properties.postrider.profile must be one of cloud-2018, cloud-2019, cloud-2020, \
             cloud-2021, cloud-current, edge, custom, was \"mine\"",
        );
        check(
            r#"{"location":"x","tags":{"a":1}}"#,
            Err("tags.a must be a string, was a number"),
        );
    }

    #[test]
    fn mappings() {
        let check = |schema: &str, mapping: &str, expected: Result<InputMapping, &str>| {
            let body = format!(
                r#"{{"location":"x","properties":{{"inputSchema":"{schema}","inputSchemaMapping":{mapping}}}}}"#
            );
            let got = parse_as(Road::Azure, &body).map(|spec| spec.mapping.unwrap());
            assert_eq!(got, expected.map_err(Into::into), "{schema} {mapping}");
        };
        let from = |field: &str| MappedField {
            source_field: Some(field.into()),
            default_value: None,
        };
        check(
            "CustomEventSchema",
            r#"{"inputSchemaMappingType":"Json","properties":{"id":{"sourceField":"a"},"topic":{"sourceField":"b"},
                "eventTime":{"sourceField":"c"},"eventType":{"sourceField":"d","defaultValue":"e"},
                "subject":{"sourceField":"f"},"dataVersion":{"defaultValue":"g"}}}"#,
            Ok(InputMapping {
                id: from("a"),
                topic: from("b"),
                event_time: from("c"),
                event_type: MappedField {
                    default_value: Some("e".into()),
                    ..from("d")
                },
                subject: from("f"),
                data_version: MappedField {
                    source_field: None,
                    default_value: Some("g".into()),
                },
            }),
        );
        check(
            "CloudEventSchemaV1_0",
            r#"{"properties":{"topic":{"sourceField":"source"}}}"#,
            Ok(InputMapping {
                topic: from("source"),
                ..InputMapping::default()
            }),
        );
        let at = "properties.inputSchemaMapping";
        let bad = |schema: &str, mapping: &str, reason: &str| {
            check(schema, mapping, Err(&format!("{at}{reason}")));
        };
        bad(
            "EventGridSchema",
            "{}",
            " must be left out: EventGridSchema is not mapped",
        );
        bad("CustomEventSchema", "null", " is required with CustomEventSchema");
        bad("CustomEventSchema", "{}", ".properties is required");
        bad(
            "CustomEventSchema",
            r#"{"properties":{}}"#,
            ".properties must map at least one field",
        );
        bad(
            "CustomEventSchema",
            r#"{"inputSchemaMappingType":"Xml"}"#,
            ".inputSchemaMappingType must be one of Json, was \"Xml\"",
        );
        bad(
            "CustomEventSchema",
            r#"{"properties":{"id":{"defaultValue":"x"}}}"#,
            ".properties.id.defaultValue must be left out: id has no default",
        );
        bad(
            "CustomEventSchema",
            r#"{"properties":{"id":{"sourceField":""}}}"#,
            ".properties.id.sourceField must not be empty",
        );
        bad(
            "CloudEventSchemaV1_0",
            r#"{"properties":{"subject":{"defaultValue":"x"}}}"#,
            ".properties.subject.defaultValue must be left out: CloudEventSchemaV1_0 has no defaults",
        );
        let unmapped = r#"{"properties":{"inputSchema":"CustomEventSchema"}}"#;
        assert_eq!(parse_as(Road::Config, unmapped).unwrap().mapping, None);
    }

    #[test]
    fn domains_and_system_topics() {
        let azure = |properties: &str| format!(r#"{{"location":"x","properties":{properties}}}"#);
        let body = azure(r#"{"autoDeleteTopicWithLastSubscription":false}"#);
        let domain = parse_domain(RawJson::parse(&body).unwrap(), Road::Azure, "orders", None).unwrap();
        assert_eq!(
            domain.kind,
            TopicKind::Domain {
                auto_create: true,
                auto_delete: false
            }
        );

        let body = azure(r#"{"source":"/subscriptions/s","topicType":"Microsoft.Storage.StorageAccounts"}"#);
        let system =
            parse_system_topic(RawJson::parse(&body).unwrap(), Road::Azure, "System-1", None).unwrap();
        let (source, topic_type) = (
            "/subscriptions/s".into(),
            "Microsoft.Storage.StorageAccounts".into(),
        );
        assert_eq!(system.kind, TopicKind::System { source, topic_type });
        let error = parse_system_topic(RawJson::trusted("{}"), Road::Azure, "orders", None).unwrap_err();
        assert_eq!(error.to_string(), "properties.source is required");
    }

    #[test]
    fn azure_names() {
        let check = |name: &str, expected: Result<(), &str>| {
            let body = RawJson::trusted("{}");
            let read = parse_topic(body, Road::Azure, name, None);
            assert_eq!(
                read.map(|_| ()).map_err(|e| e.to_string()),
                expected.map_err(Into::into)
            );
        };
        let length = "Topic name must be between 3 and 50 characters in length.";
        check("t-1", Ok(()));
        check("t1", Err(length));
        check(&"t".repeat(51), Err(length));
        check(
            "t_1",
            Err("name must have 3 to 50 letters, digits or '-', was \"t_1\""),
        );
        check(
            "systemic",
            Err("name must not begin with System, was \"systemic\""),
        );
        let domain = parse_domain(RawJson::trusted("{}"), Road::Azure, "d1", None).unwrap_err();
        let said = "Domain name must be between 3 and 50 characters in length.";
        assert_eq!(
            (domain.to_string().as_str(), domain.path.as_str()),
            (said, "name")
        );
    }

    #[test]
    fn a_patch_changes_what_it_names() {
        let body = r#"{"location":"here","tags":{"a":"b"},"kind":"Azure","identity":{"type":"None"},"sku":{"name":"Basic"},
            "properties":{"inputSchema":"CloudEventSchemaV1_0","inboundIpRules":[{"ipMask":"10.0.0.0/8"}],
            "dataResidencyBoundary":"WithinRegion","postrider":{"profile":"edge"}}}"#;
        let spec = parse_as(Road::Azure, body).unwrap();
        let topic = spec
            .clone()
            .into_topic(TopicId(1), "g".into(), Default::default(), Timestamp::MIN);
        let check = |body: &str, expected: Result<TopicSpec, &str>| {
            let got = patch_topic(RawJson::parse(body).unwrap(), &topic).map_err(|e| e.to_string());
            assert_eq!(got, expected.map_err(Into::into), "{body}");
        };
        for nothing in [
            "{}",
            r#"{"properties":{}}"#,
            r#"{"properties":null,"colour":"red"}"#,
        ] {
            check(
                nothing,
                Err("the body must name something to change, such as tags"),
            );
        }
        check(
            r#"{"tags":null,"properties":{"inboundIpRules":null}}"#,
            Ok(spec.clone()),
        );
        check(
            r#"{"tags":{"c":"d"}}"#,
            Ok(TopicSpec {
                tags: [("c".into(), "d".into())].into(),
                ..spec.clone()
            }),
        );
        check(
            r#"{"tags":{},"identity":{"type":"SystemAssigned"},
                "properties":{"inboundIpRules":[],"disableLocalAuth":true,"publicNetworkAccess":"Disabled",
                "minimumTlsVersionAllowed":"1.2","postrider":{"profile":"cloud-2019"}}}"#,
            Ok(TopicSpec {
                tags: BTreeMap::new(),
                inbound_ip_rules: Vec::new(),
                local_auth_disabled: true,
                public_network: false,
                profile: Some("cloud-2019".into()),
                extras: Some(
                    r#"{"sku":{"name":"Basic"},"identity":{"type":"SystemAssigned"},"kind":"Azure","dataResidencyBoundary":"WithinRegion","minimumTlsVersionAllowed":"1.2","disableLocalAuth":true}"#
                        .into(),
                ),
                ..spec.clone()
            }),
        );
        // Members that cannot be changed may be repeated.
        check(
            r#"{"name":"ORDERS","location":"Here","kind":"azure","properties":{"inputSchema":"cloudEventSchemaV1_0"}}"#,
            Ok(spec.clone()),
        );
        check(
            r#"{"location":"there"}"#,
            Err("location cannot be changed from \"here\" to \"there\""),
        );
        check(
            r#"{"kind":"AzureArc"}"#,
            Err("kind cannot be changed from \"Azure\" to \"AzureArc\""),
        );
        check(
            r#"{"properties":{"inputSchema":"EventGridSchema"}}"#,
            Err("properties.inputSchema cannot be changed from CloudEventSchemaV1_0 to EventGridSchema"),
        );
        check(
            r#"{"properties":{"inputSchemaMapping":{"properties":{"id":{"sourceField":"x"}}}}}"#,
            Err("properties.inputSchemaMapping cannot be changed"),
        );
        check(
            r#"{"identity":{"type":"Mine"}}"#,
            Err(
                "identity.type must be one of None; SystemAssigned; UserAssigned; SystemAssigned, UserAssigned, was \"Mine\"",
            ),
        );
        check(
            r#"{"properties":{"minimumTlsVersionAllowed":"2"}}"#,
            Err("properties.minimumTlsVersionAllowed must be one of 1.0, 1.1, 1.2, was \"2\""),
        );
        check("[]", Err("the body must be an object, was a list"));
    }

    #[test]
    fn a_patch_of_a_domain_or_system_topic() {
        let body = r#"{"properties":{"autoDeleteTopicWithLastSubscription":false}}"#;
        let domain = parse_domain(RawJson::trusted(body), Road::Azure, "orders", None).unwrap();
        let domain = domain.into_topic(TopicId(1), "g".into(), Default::default(), Timestamp::MIN);
        let body = RawJson::trusted(r#"{"properties":{"autoCreateTopicWithFirstSubscription":false}}"#);
        assert_eq!(
            patch_topic(body, &domain).unwrap().kind,
            TopicKind::Domain {
                auto_create: false,
                auto_delete: false
            }
        );
        let body = r#"{"properties":{"source":"/a/b","topicType":"T.T"}}"#;
        let system = parse_system_topic(RawJson::trusted(body), Road::Azure, "orders", None).unwrap();
        let system = system.into_topic(TopicId(1), "g".into(), Default::default(), Timestamp::MIN);
        let error = |body| {
            patch_topic(RawJson::trusted(body), &system)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error("{}"),
            "the body must name something to change, such as tags"
        );
        assert_eq!(
            error(r#"{"properties":{"source":"/a/c"}}"#),
            "properties.source cannot be changed from \"/a/b\" to \"/a/c\""
        );
        assert!(
            patch_topic(
                RawJson::trusted(r#"{"tags":{"x":"y"},"properties":{"source":"/A/B"}}"#),
                &system
            )
            .is_ok()
        );
    }

    #[test]
    fn the_configuration_may_put_everything_into_properties() {
        let body = r#"{"name":"orders","properties":{"tags":{"a":"b"},"location":"here","kind":"Azure"}}"#;
        let expected = TopicSpec {
            location: "here".into(),
            tags: [("a".into(), "b".into())].into(),
            extras: Some(r#"{"kind":"Azure"}"#.into()),
            ..spec()
        };
        assert_eq!(parse_as(Road::Config, body), Ok(expected));
    }

    #[test]
    fn the_input_schema_is_fixed_at_creation() {
        let spec = TopicSpec {
            input_schema: EventSchema::Custom,
            ..spec()
        };
        let topic = spec.into_topic(TopicId(1), "g".into(), Default::default(), Timestamp::MIN);
        let check = |body: &str, expected: Result<EventSchema, &str>| {
            let got = parse_topic(RawJson::parse(body).unwrap(), Road::Edge, "orders", Some(&topic));
            assert_eq!(
                got.map(|s| s.input_schema).map_err(|e| e.to_string()),
                expected.map_err(Into::into)
            );
        };
        check("{}", Ok(EventSchema::Custom));
        check(
            r#"{"properties":{"inputSchema":"CustomEventSchema"}}"#,
            Ok(EventSchema::Custom),
        );
        check(
            r#"{"properties":{"inputSchema":"EventGridSchema"}}"#,
            Err("properties.inputSchema cannot be changed from CustomEventSchema to EventGridSchema"),
        );
    }
}
