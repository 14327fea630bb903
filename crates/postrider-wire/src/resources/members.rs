//! Members that resource bodies may have, at every depth, in the spelling of the APIs.
//!
//! The parsers ignore members that they do not know, as the cloud does. In a body that a person has
//! written an unknown member is a mistake: [`unknown_members`] finds it.

use serde_json::Value;

/// Allowed members of a value in a body.
#[derive(Debug)]
pub enum BodyShape {
    /// Anything: a plain value, or an object with arbitrary members.
    Any,
    Object(&'static [ShapeMembers]),
    List(&'static BodyShape),
}

/// Members of an object: several names, and the shape that each of them has.
pub type ShapeMembers = (&'static [&'static str], &'static BodyShape);

/// A member that no API knows in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownMember {
    /// The path in the body, such as `properties.filter.subjectStartsWith`.
    pub path: String,
    /// The last segment of the path.
    pub name: String,
    /// The members that are known there.
    pub known: Vec<&'static str>,
}

/// Limit of the unknown members that are reported at once.
const UNKNOWN_MAX: usize = 20;
/// Limit of the characters of a name that are repeated.
const NAME_CHARS_MAX: usize = 64;

/// The members of `body` that `shape` does not know, at most [`UNKNOWN_MAX`]. Names compare without
/// case, as in the parsers. A value of another type than its shape is ignored here: the parsers
/// refuse it.
pub fn unknown_members(body: &Value, shape: &BodyShape) -> Vec<UnknownMember> {
    let mut found = Vec::new();
    collect("", body, shape, &mut found);
    found
}

fn collect(path: &str, value: &Value, shape: &BodyShape, found: &mut Vec<UnknownMember>) {
    match (shape, value) {
        (BodyShape::Object(groups), Value::Object(members)) => {
            let all = || {
                groups
                    .iter()
                    .flat_map(|(names, shape)| names.iter().map(move |name| (*name, *shape)))
            };
            for (name, value) in members {
                if found.len() == UNKNOWN_MAX {
                    return;
                }
                let shown: String = name.chars().take(NAME_CHARS_MAX).collect();
                let path = match path {
                    "" => shown.clone(),
                    _ => format!("{path}.{shown}"),
                };
                match all().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
                    Some((_, shape)) => collect(&path, value, shape, found),
                    None => found.push(UnknownMember {
                        path,
                        name: shown,
                        known: all().map(|(name, _)| name).collect(),
                    }),
                }
            }
        }
        (BodyShape::List(each), Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                collect(&format!("{path}[{index}]"), item, each, found);
            }
        }
        _ => {}
    }
}

const ANY: BodyShape = BodyShape::Any;

/// An event subscription's `properties`, including members that only answers have, because clients
/// send them back.
pub static SUBSCRIPTION_PROPERTIES: BodyShape = BodyShape::Object(&[
    (&["destination"], &DESTINATION),
    (
        &["deliveryWithResourceIdentity"],
        &BodyShape::Object(&[(&["identity"], &IDENTITY), (&["destination"], &DESTINATION)]),
    ),
    (&["filter"], &FILTER),
    (
        &["retryPolicy"],
        &BodyShape::Object(&[(
            &[
                "maxDeliveryAttempts",
                "eventTimeToLiveInMinutes",
                "eventExpiryInMinutes",
            ],
            &ANY,
        )]),
    ),
    (&["deadLetterDestination"], &DEAD_LETTER_DESTINATION),
    (
        &["deadLetterWithResourceIdentity"],
        &BodyShape::Object(&[
            (&["identity"], &IDENTITY),
            (&["deadLetterDestination"], &DEAD_LETTER_DESTINATION),
        ]),
    ),
    (
        &["persistencePolicy"],
        &BodyShape::Object(&[(&["isPersisted"], &ANY)]),
    ),
    (
        &["deliveryPolicy"],
        &BodyShape::Object(&[(&["approxBatchSizeInBytes", "maxEventsPerBatch"], &ANY)]),
    ),
    (&["postrider"], &BodyShape::Object(&[(&["profile"], &ANY)])),
    (
        &[
            "labels",
            "expirationTimeUtc",
            "eventDeliverySchema",
            "topic",
            "topicName",
            "provisioningState",
        ],
        &ANY,
    ),
]);

static DESTINATION: BodyShape = BodyShape::Object(&[
    (&["endpointType"], &ANY),
    (
        &["properties"],
        &BodyShape::Object(&[
            (
                &[
                    "endpointUrl",
                    "endpointBaseUrl",
                    "resourceId",
                    "connectionString",
                    "queueName",
                    "queueMessageTimeToLiveInSeconds",
                    "sasKey",
                    "topicName",
                    "outputName",
                    "maxEventsPerBatch",
                    "preferredBatchSizeInKilobytes",
                    "azureActiveDirectoryTenantId",
                    "azureActiveDirectoryApplicationIdOrUri",
                    "minimumTlsVersionAllowed",
                    "eventDeliverySchema",
                ],
                &ANY,
            ),
            (
                &["deliveryAttributeMappings"],
                &BodyShape::List(&DELIVERY_ATTRIBUTE),
            ),
        ]),
    ),
]);

static DELIVERY_ATTRIBUTE: BodyShape = BodyShape::Object(&[
    (&["name", "type"], &ANY),
    (
        &["properties"],
        &BodyShape::Object(&[(&["value", "isSecret", "sourceField"], &ANY)]),
    ),
]);

static IDENTITY: BodyShape = BodyShape::Object(&[(&["type", "userAssignedIdentity"], &ANY)]);

static DEAD_LETTER_DESTINATION: BodyShape = BodyShape::Object(&[
    (&["endpointType"], &ANY),
    (
        &["properties"],
        &BodyShape::Object(&[(&["resourceId", "blobContainerName"], &ANY)]),
    ),
]);

static FILTER: BodyShape = BodyShape::Object(&[
    (
        &[
            "includedEventTypes",
            "subjectBeginsWith",
            "subjectEndsWith",
            "isSubjectCaseSensitive",
            "subjectIsCaseSensitive",
            "enableAdvancedFilteringOnArrays",
        ],
        &ANY,
    ),
    (
        &["advancedFilters"],
        &BodyShape::List(&BodyShape::Object(&[(
            &["operatorType", "operator", "key", "value", "values"],
            &ANY,
        )])),
    ),
]);

/// A topic's or domain's `properties`, including members that only answers have.
pub static TOPIC_PROPERTIES: BodyShape = BodyShape::Object(&[
    TOPIC_MEMBERS,
    MAPPING_MEMBER,
    RULES_MEMBER,
    TYPES_MEMBER,
    OWN_MEMBER,
]);

/// A topic or domain as files declare it: the properties and the members beside them in one object.
pub static DECLARED_TOPIC: BodyShape = BodyShape::Object(&[
    TOPIC_MEMBERS,
    MAPPING_MEMBER,
    RULES_MEMBER,
    TYPES_MEMBER,
    OWN_MEMBER,
    (
        &["edge", "location", "tags", "kind", "group", "resourceGroup"],
        &ANY,
    ),
    (&["sku"], &BodyShape::Object(&[(&["name"], &ANY)])),
    (
        &["extendedLocation"],
        &BodyShape::Object(&[(&["name", "type"], &ANY)]),
    ),
    (
        &["identity"],
        &BodyShape::Object(&[(
            &["type", "principalId", "tenantId", "userAssignedIdentities"],
            &ANY,
        )]),
    ),
]);

const TOPIC_MEMBERS: ShapeMembers = (
    &[
        "inputSchema",
        "publicNetworkAccess",
        "disableLocalAuth",
        "dataResidencyBoundary",
        "minimumTlsVersionAllowed",
        "autoCreateTopicWithFirstSubscription",
        "autoDeleteTopicWithLastSubscription",
        "endpoint",
        "metricResourceId",
        "provisioningState",
        "privateEndpointConnections",
        "systemData",
    ],
    &ANY,
);

const MAPPING_MEMBER: ShapeMembers = (
    &["inputSchemaMapping"],
    &BodyShape::Object(&[
        (&["inputSchemaMappingType"], &ANY),
        (
            &["properties"],
            &BodyShape::Object(&[(
                &["id", "topic", "eventTime", "eventType", "subject", "dataVersion"],
                &BodyShape::Object(&[(&["sourceField", "defaultValue"], &ANY)]),
            )]),
        ),
    ]),
);

const RULES_MEMBER: ShapeMembers = (
    &["inboundIpRules"],
    &BodyShape::List(&BodyShape::Object(&[(&["ipMask", "action"], &ANY)])),
);

/// The event types inside are named by the user.
const TYPES_MEMBER: ShapeMembers = (
    &["eventTypeInfo"],
    &BodyShape::Object(&[(&["kind", "inlineEventTypes"], &ANY)]),
);

const OWN_MEMBER: ShapeMembers = (
    &["postrider"],
    &BodyShape::Object(&[(&["profile", "edge"], &ANY)]),
);

/// The body of a topic in the edge API.
pub static EDGE_TOPIC: BodyShape = BodyShape::Object(&[
    (&["id", "name", "type"], &ANY),
    (&["properties"], &TOPIC_PROPERTIES),
]);

/// The body of a subscription in the edge API.
pub static EDGE_SUBSCRIPTION: BodyShape = BodyShape::Object(&[
    (&["id", "name", "type"], &ANY),
    (&["properties"], &SUBSCRIPTION_PROPERTIES),
]);

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(body: Value, shape: &BodyShape, unknown: &[&str]) {
        let found = unknown_members(&body, shape);
        let paths: Vec<&str> = found.iter().map(|one| one.path.as_str()).collect();
        assert_eq!(paths, unknown, "{body}");
    }

    #[test]
    fn members_are_looked_for_at_every_depth() {
        check(
            json!({"destination": {"endpointType": "WebHook", "properties": {
                "endpointURL": "https://a", "max_events": 3,
                "deliveryAttributeMappings": [
                    {"name": "a", "type": "Static", "properties": {"value": "b", "secret": true}}]}},
                "filter": {"subjectStartsWith": "/", "advancedFilters": [{"key": "a", "operators": "x"}]},
                "retry": {}}),
            &SUBSCRIPTION_PROPERTIES,
            &[
                "destination.properties.deliveryAttributeMappings[0].properties.secret",
                "destination.properties.max_events",
                "filter.advancedFilters[0].operators",
                "filter.subjectStartsWith",
                "retry",
            ],
        );
        check(
            json!({"tags": {"anything": "goes"}, "input_schema": "x", "eventTypeInfo": {"inlineEventTypes": {"T": {}}},
                "inputSchemaMapping": {"properties": {"subject": {"sourceFeild": "a"}}}}),
            &DECLARED_TOPIC,
            &[
                "inputSchemaMapping.properties.subject.sourceFeild",
                "input_schema",
            ],
        );
        // Values of the wrong type are for the parsers to refuse.
        check(
            json!({"filter": 3, "labels": {"a": 1}}),
            &SUBSCRIPTION_PROPERTIES,
            &[],
        );
    }

    #[test]
    fn few_of_many_are_told() {
        let many: serde_json::Map<String, Value> = (0..1000)
            .map(|n| (format!("{n}{}", "x".repeat(1000)), Value::Null))
            .collect();
        let found = unknown_members(&Value::Object(many), &DECLARED_TOPIC);
        assert_eq!(found.len(), UNKNOWN_MAX);
        assert!(found.iter().all(|one| one.path.len() == NAME_CHARS_MAX));
    }
}
