//! Topics, domains, domain topics and system topics as the management API shows them.

use super::{ApiVersion, stable_guid};
use crate::resources::schema_name;
use postrider_core::subscription::{DomainTopic, InputMapping, MappedField, Topic, TopicKind};
use serde_json::{Map, Value, json};

/// Parameters of a resource body besides the resource.
#[derive(Clone, Copy, Debug)]
pub struct TopicView<'a> {
    /// The Azure subscription's id.
    pub account: &'a str,
    pub tenant: &'a str,
    /// Prefix of endpoints.
    pub base_url: &'a str,
    pub version: &'a ApiVersion,
    /// `provisioningState`
    pub state: &'a str,
}

/// `topics`, `domains` or `systemTopics`.
pub fn type_of(kind: &TopicKind) -> &'static str {
    match kind {
        TopicKind::Custom => "topics",
        TopicKind::Domain { .. } => "domains",
        TopicKind::System { .. } | TopicKind::Scope { .. } => "systemTopics",
    }
}

/// The resource id of a topic, domain or system topic.
pub fn topic_id(account: &str, topic: &Topic) -> String {
    format!(
        "/subscriptions/{account}/resourceGroups/{}/providers/Microsoft.EventGrid/{}/{}",
        topic.resource_group,
        type_of(&topic.kind),
        topic.name
    )
}

/// The body of a topic, domain or system topic. Members that the API version did not know are left
/// out, and so are members that were never sent and have no default: as in the service,
/// `systemData`, `tags` and the members of an identity are null, everything else is absent.
pub fn topic_body(topic: &Topic, view: &TopicView<'_>) -> Value {
    let id = topic_id(view.account, topic);
    let extras = extras(topic);
    let kept = |name: &str| extras.get(name).cloned();
    let mut body = json!({
        "id": id,
        "name": topic.name,
        "type": format!("Microsoft.EventGrid/{}", type_of(&topic.kind)),
        "location": topic.location,
        "tags": if topic.tags.is_empty() { Value::Null } else { json!(topic.tags) },
        "systemData": null,
        "properties": properties(topic, &extras, &id, view),
    });
    if let Some(identity) = identity(kept("identity"), &id, view.tenant) {
        body["identity"] = identity;
    }
    if view.version.has_sku() && !matches!(topic.kind, TopicKind::System { .. }) {
        body["sku"] = kept("sku").unwrap_or_else(|| json!({"name": "Basic"}));
        if topic.kind == TopicKind::Custom {
            body["kind"] = kept("kind").unwrap_or_else(|| json!("Azure"));
            if let Some(location) = kept("extendedLocation") {
                body["extendedLocation"] = location;
            }
        }
    }
    body
}

/// The body in lists of resources of all types, without the members that only the resource's own
/// provider knows.
pub fn generic_body(topic: &Topic, account: &str) -> Value {
    json!({
        "id": topic_id(account, topic),
        "name": topic.name,
        "type": format!("Microsoft.EventGrid/{}", type_of(&topic.kind)),
        "location": topic.location,
        "tags": topic.tags,
    })
}

pub fn domain_topic_id(account: &str, domain: &Topic, name: &str) -> String {
    format!("{}/topics/{name}", topic_id(account, domain))
}

pub fn domain_topic_body(domain: &Topic, topic: &DomainTopic, view: &TopicView<'_>) -> Value {
    json!({
        "id": domain_topic_id(view.account, domain, &topic.name),
        "name": topic.name,
        "type": "Microsoft.EventGrid/domains/topics",
        "systemData": null,
        "properties": {"provisioningState": view.state},
    })
}

fn extras(topic: &Topic) -> Map<String, Value> {
    let text = topic.extras.as_deref().unwrap_or("{}");
    serde_json::from_str(text).unwrap_or_default()
}

fn properties(topic: &Topic, extras: &Map<String, Value>, id: &str, view: &TopicView<'_>) -> Value {
    let kept = |name: &str| extras.get(name).cloned();
    // Stays the same for the lifetime of the resource.
    let metric = stable_guid(
        b"metricResourceId",
        &format!("{}\n{}", id.to_lowercase(), topic.created.nanos()),
    );
    let mut properties = json!({
        "provisioningState": view.state,
        "metricResourceId": metric,
    });
    let path = match &topic.kind {
        TopicKind::Custom => "topics",
        TopicKind::Domain { .. } => "domains",
        TopicKind::System { source, topic_type } | TopicKind::Scope { source, topic_type } => {
            properties["source"] = json!(source);
            properties["topicType"] = json!(topic_type);
            put_profile(&mut properties, topic);
            return properties;
        }
    };
    properties["endpoint"] = json!(format!("{}/{path}/{}/api/events", view.base_url, topic.name));
    properties["inputSchema"] = json!(schema_name(topic.input_schema));
    if let Some(kept) = &topic.mapping {
        properties["inputSchemaMapping"] = mapping(kept);
    }
    properties["publicNetworkAccess"] = json!(if topic.public_network {
        "Enabled"
    } else {
        "Disabled"
    });
    let rules = topic.inbound_ip_rules.iter();
    let rules: Vec<Value> = rules
        .map(|mask| json!({"ipMask": mask, "action": "Allow"}))
        .collect();
    if !rules.is_empty() {
        properties["inboundIpRules"] = json!(rules);
    }
    let version = view.version;
    // Shown as false only if a client sent it.
    let local_auth_is_known = topic.local_auth_disabled || extras.contains_key("disableLocalAuth");
    if version.has_local_auth() && local_auth_is_known {
        properties["disableLocalAuth"] = json!(topic.local_auth_disabled);
    }
    if version.has_data_residency() {
        let boundary = kept("dataResidencyBoundary");
        properties["dataResidencyBoundary"] = boundary.unwrap_or_else(|| json!("WithinGeopair"));
    }
    if version.has_minimum_tls() {
        let tls = kept("minimumTlsVersionAllowed");
        properties["minimumTlsVersionAllowed"] = tls.unwrap_or_else(|| json!("1.0"));
        if let Some(types) = kept("eventTypeInfo") {
            properties["eventTypeInfo"] = types;
        }
    }
    if let TopicKind::Domain {
        auto_create,
        auto_delete,
    } = topic.kind
        && version.has_local_auth()
    {
        properties["autoCreateTopicWithFirstSubscription"] = json!(auto_create);
        properties["autoDeleteTopicWithLastSubscription"] = json!(auto_delete);
    }
    put_profile(&mut properties, topic);
    properties
}

/// Our own extension, shown only where it is used.
fn put_profile(properties: &mut Value, topic: &Topic) {
    if let Some(profile) = &topic.profile {
        properties["postrider"]["profile"] = json!(profile);
    }
    if topic.is_edge() {
        properties["postrider"]["edge"] = json!(true);
    }
}

fn mapping(mapping: &InputMapping) -> Value {
    let source = |mapped: &MappedField| json!({"sourceField": mapped.source_field});
    let both = |mapped: &MappedField| json!({"sourceField": mapped.source_field, "defaultValue": mapped.default_value});
    json!({
        "inputSchemaMappingType": "Json",
        "properties": {
            "id": source(&mapping.id),
            "topic": source(&mapping.topic),
            "eventTime": source(&mapping.event_time),
            "eventType": both(&mapping.event_type),
            "subject": both(&mapping.subject),
            "dataVersion": both(&mapping.data_version),
        },
    })
}

/// The identity as it was sent, with the ids that the service assigns.
fn identity(sent: Option<Value>, id: &str, tenant: &str) -> Option<Value> {
    let Some(Value::Object(sent)) = sent else {
        return None;
    };
    // Member names may be in any case.
    let member = |name: &str| {
        sent.iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.clone())
    };
    let kind = member("type").unwrap_or_else(|| json!("None"));
    let has = |word: &str| {
        let kinds = kind.as_str().unwrap_or_default().to_lowercase();
        kinds.split(',').any(|kind| kind.trim() == word)
    };
    let guid = |what: &str| {
        json!(stable_guid(
            b"identity",
            &format!("{what}\n{}", id.to_lowercase())
        ))
    };
    let (principal, tenant) = match has("systemassigned") {
        true => (guid("principal"), json!(tenant)),
        false => (Value::Null, Value::Null),
    };
    let assigned = match member("userAssignedIdentities") {
        Some(Value::Object(assigned)) if has("userassigned") => {
            let of = |id: &str| {
                let guid = |what: &str| stable_guid(b"identity", &format!("{what}\n{}", id.to_lowercase()));
                json!({"principalId": guid("principal"), "clientId": guid("client")})
            };
            let assigned = assigned.keys().map(|id| (id.clone(), of(id)));
            Value::Object(assigned.collect())
        }
        _ => Value::Null,
    };
    let shown = json!({"type": kind, "principalId": principal, "tenantId": tenant, "userAssignedIdentities": assigned});
    Some(shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::{Road, parse_domain, parse_system_topic, parse_topic, patch_topic};
    use postrider_core::ids::TopicId;
    use postrider_core::json::RawJson;
    use postrider_core::time::Timestamp;

    fn shown(topic: &Topic, version: &str) -> Value {
        let version = ApiVersion::parse(version).unwrap();
        let view = TopicView {
            account: "s",
            tenant: "t",
            base_url: "https://host:8443",
            version: &version,
            state: "Succeeded",
        };
        topic_body(topic, &view)
    }

    fn topic(body: &str) -> Topic {
        let spec = parse_topic(RawJson::parse(body).unwrap(), Road::Azure, "Orders", None).unwrap();
        spec.into_topic(
            TopicId(1),
            "Rg".into(),
            Default::default(),
            Timestamp::from_secs(1),
        )
    }

    const CLI: &str = r#"{"location":"westus2","sku":{"name":"Basic"},"identity":{"type":"None"},"kind":"Azure",
        "properties":{"inputSchema":"EventGridSchema","disableLocalAuth":false}}"#;

    #[test]
    fn a_topic_as_the_command_line_knows_it() {
        let mut body = shown(&topic(CLI), "2021-10-15-preview");
        let metric = body["properties"]["metricResourceId"].take();
        assert_eq!(metric.as_str().map(str::len), Some(36));
        let expected = json!({
            "id": "/subscriptions/s/resourceGroups/Rg/providers/Microsoft.EventGrid/topics/Orders",
            "name": "Orders",
            "type": "Microsoft.EventGrid/topics",
            "location": "westus2",
            "tags": null,
            "systemData": null,
            "sku": {"name": "Basic"},
            "kind": "Azure",
            "identity": {"type": "None", "principalId": null, "tenantId": null, "userAssignedIdentities": null},
            "properties": {
                "provisioningState": "Succeeded",
                "endpoint": "https://host:8443/topics/Orders/api/events",
                "inputSchema": "EventGridSchema",
                "metricResourceId": null,
                "publicNetworkAccess": "Enabled",
                "disableLocalAuth": false,
                "dataResidencyBoundary": "WithinGeopair",
            },
        });
        assert_eq!(body, expected);
    }

    #[test]
    fn what_was_never_sent_is_absent() {
        let mut made =
            topic(r#"{"location":"westus2","properties":{"inboundIpRules":[{"ipMask":"1.1.1.1"}]}}"#);
        let members = |body: &Value| -> Vec<String> {
            let members = body.as_object().unwrap();
            members.keys().cloned().collect()
        };
        let body = shown(&made, "2024-06-01-preview");
        let beside = [
            "id",
            "kind",
            "location",
            "name",
            "properties",
            "sku",
            "systemData",
            "tags",
            "type",
        ];
        assert_eq!(members(&body), beside);
        let inside = [
            "dataResidencyBoundary",
            "endpoint",
            "inboundIpRules",
            "inputSchema",
            "metricResourceId",
            "minimumTlsVersionAllowed",
            "provisioningState",
            "publicNetworkAccess",
        ];
        assert_eq!(members(&body["properties"]), inside);
        assert_eq!(body["properties"]["minimumTlsVersionAllowed"], "1.0");
        assert_eq!((&body["systemData"], &body["tags"]), (&Value::Null, &Value::Null));
        // For a topic of an earlier version only the value is known, not whether it was sent.
        made.local_auth_disabled = true;
        assert_eq!(shown(&made, "2025-02-15")["properties"]["disableLocalAuth"], true);
        let patched = patch_topic(
            RawJson::trusted(r#"{"properties":{"disableLocalAuth":false}}"#),
            &made,
        )
        .unwrap();
        let patched = patched.into_topic(made.id, "Rg".into(), Default::default(), made.created);
        let properties = shown(&patched, "2025-02-15")["properties"].take();
        assert_eq!(properties["disableLocalAuth"], false);
        let patched = patch_topic(RawJson::trusted(r#"{"tags":{"a":"b"}}"#), &patched).unwrap();
        let patched = patched.into_topic(made.id, "Rg".into(), Default::default(), made.created);
        let properties = shown(&patched, "2025-02-15")["properties"].take();
        assert_eq!(
            properties["disableLocalAuth"], false,
            "a change keeps that it was sent"
        );
    }

    #[test]
    fn each_version_shows_what_it_knew() {
        let all = r#"{"location":"x","tags":{"a":"b"},"sku":{"name":"Premium"},"kind":"Azure",
            "properties":{"minimumTlsVersionAllowed":"1.1","dataResidencyBoundary":"WithinRegion","disableLocalAuth":true,
            "eventTypeInfo":{"kind":"Inline","inlineEventTypes":{"a":{}}},"inboundIpRules":[{"ipMask":"1.1.1.1"}],
            "publicNetworkAccess":"Disabled","postrider":{"profile":"edge"}}}"#;
        let topic = topic(all);
        let check = |version: &str, expected: [bool; 4]| {
            let body = shown(&topic, version);
            let properties = &body["properties"];
            let there = [
                body.get("sku").is_some(),
                properties.get("disableLocalAuth").is_some(),
                properties.get("dataResidencyBoundary").is_some(),
                properties.get("eventTypeInfo").is_some()
                    && properties.get("minimumTlsVersionAllowed").is_some(),
            ];
            assert_eq!(there, expected, "{version}");
            assert_eq!(body["tags"], json!({"a": "b"}));
            assert_eq!(properties["publicNetworkAccess"], "Disabled");
            assert_eq!(
                properties["inboundIpRules"],
                json!([{"ipMask": "1.1.1.1", "action": "Allow"}])
            );
            assert_eq!(properties["postrider"], json!({"profile": "edge"}));
            assert_eq!(body.get("identity"), None);
        };
        check("2020-06-01", [false, false, false, false]);
        check("2020-10-15-preview", [true, false, false, false]);
        check("2021-10-15-preview", [true, true, true, false]);
        check("2022-06-15", [false, true, true, false]);
        check("2024-06-01-preview", [true, true, true, true]);
        check("2025-02-15", [false, true, true, true]);
    }

    #[test]
    fn mappings_come_back_as_they_were_sent() {
        let body = r#"{"properties":{"inputSchema":"CustomEventSchema","inputSchemaMapping":{"inputSchemaMappingType":"Json",
            "properties":{"id":{"sourceField":"myId"},"topic":{},"eventTime":{},"eventType":{"sourceField":"myType"},
            "subject":{"defaultValue":"none"},"dataVersion":{"defaultValue":"1.0"}}}}}"#;
        let made = topic(body);
        let properties = &shown(&made, "2022-06-15")["properties"];
        let expected = json!({
            "id": {"sourceField": "myId"},
            "topic": {"sourceField": null},
            "eventTime": {"sourceField": null},
            "eventType": {"sourceField": "myType", "defaultValue": null},
            "subject": {"sourceField": null, "defaultValue": "none"},
            "dataVersion": {"sourceField": null, "defaultValue": "1.0"},
        });
        assert_eq!(properties["inputSchemaMapping"]["properties"], expected);
        assert_eq!(properties["inputSchemaMapping"]["inputSchemaMappingType"], "Json");
        // A body that was read can be sent again.
        let again = json!({ "properties": properties }).to_string();
        let again = parse_topic(
            RawJson::parse(&again).unwrap(),
            Road::Azure,
            "Orders",
            Some(&made),
        )
        .unwrap();
        assert_eq!(again.mapping, made.mapping);
    }

    #[test]
    fn identities_get_ids() {
        let made = topic(
            r#"{"identity":{"type":"SystemAssigned, UserAssigned","userAssignedIdentities":{"/a/b":{}}}}"#,
        );
        let identity = &shown(&made, "2022-06-15")["identity"];
        assert_eq!(identity["type"], "SystemAssigned, UserAssigned");
        assert_eq!(identity["tenantId"], "t");
        assert!(identity["principalId"].is_string());
        assert!(identity["userAssignedIdentities"]["/a/b"]["clientId"].is_string());
        assert_eq!(identity, &shown(&made, "2025-02-15")["identity"]);
    }

    #[test]
    fn domains_and_system_topics() {
        let domain = parse_domain(RawJson::trusted("{}"), Road::Azure, "dom", None).unwrap();
        let domain = domain.into_topic(TopicId(1), "g".into(), Default::default(), Timestamp::MIN);
        let body = shown(&domain, "2021-10-15-preview");
        assert_eq!(
            body["properties"]["endpoint"],
            "https://host:8443/domains/dom/api/events"
        );
        assert_eq!(body["properties"]["autoCreateTopicWithFirstSubscription"], true);
        assert_eq!((&body["sku"]["name"], body.get("kind")), (&json!("Basic"), None));

        let text = r#"{"location":"l","properties":{"source":"/S","topicType":"A.B"}}"#;
        let system = parse_system_topic(RawJson::trusted(text), Road::Azure, "sys", None).unwrap();
        let system = system.into_topic(TopicId(1), "g".into(), Default::default(), Timestamp::MIN);
        let mut body = shown(&system, "2021-10-15-preview");
        body["properties"]["metricResourceId"].take();
        let expected = json!({
            "id": "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/systemTopics/sys",
            "name": "sys",
            "type": "Microsoft.EventGrid/systemTopics",
            "location": "l",
            "tags": null,
            "systemData": null,
            "properties": {
                "source": "/S",
                "topicType": "A.B",
                "provisioningState": "Succeeded",
                "metricResourceId": null,
            },
        });
        assert_eq!(body, expected);
    }
}
