//! Answers of the edge API.
//!
//! An answer contains what was sent, in the API's own spelling, and what the server added: the id,
//! the type and the schema. The URL of a webhook is shown with its query, as in the module: clients
//! of this API own the module. Keys and connection strings are masked.

use super::filter::FilterBody;
use super::{DestinationBody, schema_name};
use postrider_core::json::RawJson;
use postrider_core::subscription::{BatchDefaults, Subscription, Topic};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// The only version of the edge API.
const API_VERSION: &str = "2019-01-01-preview";

#[derive(Clone, Debug, Serialize)]
pub struct EdgeTopic {
    pub id: String,
    pub name: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub properties: EdgeTopicProperties,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeTopicProperties {
    pub endpoint: String,
    pub input_schema: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postrider: Option<Value>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EdgeSubscription {
    pub id: String,
    pub name: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub properties: EdgeSubscriptionProperties,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeSubscriptionProperties {
    pub topic_name: String,
    pub event_delivery_schema: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_policy: Option<EdgeRetryPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistence_policy: Option<Box<RawValue>>,
    pub destination: DestinationBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<FilterBody>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expiration_time_utc: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead_letter_destination: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postrider: Option<Value>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeRetryPolicy {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_expiry_in_minutes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_delivery_attempts: Option<u32>,
}

/// `base_url` is that of the request, such as `http://eventgridmodule:5888`; `module_path` is
/// `/iotHubs/<hub>/devices/<device>/modules/<module>`.
pub fn edge_topic(topic: &Topic, base_url: &str, module_path: &str) -> EdgeTopic {
    let base_url = base_url.trim_end_matches('/');
    EdgeTopic {
        id: topic_id(module_path, &topic.name),
        name: topic.name.clone(),
        kind: "Microsoft.EventGrid/topics",
        properties: EdgeTopicProperties {
            endpoint: format!(
                "{base_url}/topics/{}/events?api-version={API_VERSION}",
                topic.name
            ),
            input_schema: schema_name(topic.input_schema),
            postrider: profile_body(topic.profile.as_deref()),
        },
    }
}

pub fn edge_subscription(
    subscription: &Subscription,
    topic: &Topic,
    module_path: &str,
    batch_defaults: &BatchDefaults,
) -> EdgeSubscription {
    let batching = subscription.destination.batching();
    let mut destination = DestinationBody::of(&subscription.destination);
    if batching.is_set() {
        let limits = batching.in_force(batch_defaults.of(subscription.origin));
        destination = destination.with_batch_limits(&subscription.destination, limits);
    }
    let retry = subscription.retry;
    let retry_policy = EdgeRetryPolicy {
        event_expiry_in_minutes: retry.time_to_live_minutes,
        max_delivery_attempts: retry.attempts_max,
    };
    let dead_letter = subscription.dead_letter.as_ref().map(|place| {
        let properties = json!({"resourceId": place.account, "blobContainerName": place.container});
        json!({"endpointType": "StorageBlob", "properties": properties})
    });
    let extras = subscription
        .extras
        .as_deref()
        .and_then(|text| RawJson::parse(text).ok());
    let extra = |name: &str| extras.and_then(|extras| extras.get(name));
    EdgeSubscription {
        id: format!(
            "{}/eventSubscriptions/{}",
            topic_id(module_path, &topic.name),
            subscription.name
        ),
        name: subscription.name.clone(),
        kind: "Microsoft.EventGrid/eventSubscriptions",
        properties: EdgeSubscriptionProperties {
            topic_name: topic.name.clone(),
            event_delivery_schema: schema_name(subscription.delivery_schema),
            retry_policy: (retry != Default::default()).then_some(retry_policy),
            persistence_policy: extra("persistencePolicy")
                .and_then(|raw| RawValue::from_string(raw.text().to_owned()).ok()),
            destination,
            filter: filter_body(subscription, extra("filter")),
            labels: subscription.labels.clone(),
            expiration_time_utc: subscription.expires.map(|expires| expires.to_string()),
            dead_letter_destination: dead_letter,
            postrider: profile_body(subscription.profile.as_deref()),
        },
    }
}

impl EdgeSubscription {
    /// Removes secrets for callers that may not see them: the query of a webhook's URL, where keys
    /// are kept.
    pub fn without_secrets(mut self) -> EdgeSubscription {
        let destination = &mut self.properties.destination;
        if destination.endpoint_type == "WebHook"
            && let Some(Value::String(url)) = destination.properties.get_mut("endpointUrl")
            && let Some(base) = url.find('?')
        {
            url.truncate(base);
        }
        self
    }
}

fn topic_id(module_path: &str, name: &str) -> String {
    format!("{}/topics/{name}", module_path.trim_end_matches('/'))
}

fn profile_body(profile: Option<&str>) -> Option<Value> {
    profile.map(|profile| json!({"profile": profile}))
}

/// The filter in force. Values that equal their default are included only if they were sent.
fn filter_body(subscription: &Subscription, sent: Option<RawJson<'_>>) -> Option<FilterBody> {
    let mut body = FilterBody::of(&subscription.filter);
    let was_sent = |name: &str| sent.is_some_and(|sent| sent.get(name).is_some());
    if was_sent("isSubjectCaseSensitive") {
        body.is_subject_case_sensitive.get_or_insert(false);
    }
    if was_sent("enableAdvancedFilteringOnArrays") {
        body.enable_advanced_filtering_on_arrays.get_or_insert(false);
    }
    if was_sent("advancedFilters") {
        body.advanced_filters.get_or_insert_default();
    }
    (sent.is_some() || !body.is_empty()).then_some(body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::{
        ResourceLimits, Road, SubscriptionContext, TopicContext, parse_subscription, parse_topic,
    };
    use postrider_core::ids::{SubscriptionId, TopicId};
    use postrider_core::time::Timestamp;

    const MODULE: &str = "/iotHubs/h/devices/d/modules/eventgridmodule";

    fn topic(body: &str) -> Topic {
        let spec = parse_topic(RawJson::parse(body).unwrap(), Road::Edge, "t1", None).unwrap();
        spec.into_topic(TopicId(1), String::new(), Default::default(), Timestamp::MIN)
    }

    /// Creates a subscription from properties and returns the properties of the answer.
    fn answer(road: Road, properties: &str) -> Value {
        let topic = topic("{}");
        let body = format!("{{\"properties\":{properties}}}");
        let context = SubscriptionContext {
            road,
            name: "sub",
            topic: TopicContext {
                name: "t1",
                input_schema: topic.input_schema,
                mapping: None,
                default_types: &[],
            },
            limits: &ResourceLimits::default(),
            now: Timestamp::MIN,
            previous: None,
            api_version: "",
            shown: None,
        };
        let spec = parse_subscription(RawJson::parse(&body).unwrap(), &context).unwrap();
        let subscription = spec.into_subscription(SubscriptionId(1), TopicId(1), None, Timestamp::MIN);
        let answer = edge_subscription(&subscription, &topic, MODULE, &BatchDefaults::default());
        assert_eq!(answer.id, format!("{MODULE}/topics/t1/eventSubscriptions/sub"));
        assert_eq!(
            (answer.name.as_str(), answer.kind),
            ("sub", "Microsoft.EventGrid/eventSubscriptions")
        );
        serde_json::to_value(answer.properties).unwrap()
    }

    #[test]
    fn topics() {
        let check = |body: &str, schema: &str| {
            let expected = format!(
                r#"{{"id":"{MODULE}/topics/t1","name":"t1","type":"Microsoft.EventGrid/topics","properties":{{"endpoint":"http://eventgridmodule:5888/topics/t1/events?api-version=2019-01-01-preview","inputSchema":"{schema}"}}}}"#
            );
            let answer = edge_topic(&topic(body), "http://eventgridmodule:5888/", MODULE);
            assert_eq!(serde_json::to_string(&answer).unwrap(), expected);
        };
        check(
            r#"{"name":"t1","properties":{"inputSchema":"EventGridSchema"}}"#,
            "EventGridSchema",
        );
        check(
            r#"{"properties":{"inputschema":"customschema"}}"#,
            "CustomEventSchema",
        );
        check("{}", "EventGridSchema");
    }

    // The exchange recorded with a stand-in for the module. The stand-in adds a member `topic` of
    // its own and spells ids differently.
    #[test]
    fn the_recorded_subscription() {
        let sent = json!({
            "eventDeliverySchema": "EventGridSchema",
            "retryPolicy": {"eventExpiryInMinutes": 120, "maxDeliveryAttempts": 50},
            "destination": {"endpointType": "WebHook", "properties": {
                "endpointUrl": "http://127.0.0.1:7000/e1", "maxEventsPerBatch": 10, "preferredBatchSizeInKilobytes": 1033}},
            "filter": {"subjectBeginsWith": "/keep",
                "advancedFilters": [{"operatorType": "NumberLessThan", "key": "data.n", "value": 100}]},
        });
        let mut expected = sent.clone();
        expected["topicName"] = "t1".into();
        assert_eq!(answer(Road::Edge, &sent.to_string()), expected);
    }

    #[test]
    fn what_was_sent_is_echoed_in_one_spelling() {
        let destination =
            r#""destination":{"endpointType":"WebHook","properties":{"endpointUrl":"https://a/x?code=1"}}"#;
        let check = |sent: &str, echoed: &str| {
            let got = answer(Road::Edge, &format!("{{{destination}{sent}}}"));
            let expected = format!(
                r#"{{"topicName":"t1","eventDeliverySchema":"EventGridSchema",{destination}{echoed}}}"#
            );
            assert_eq!(got, serde_json::from_str::<Value>(&expected).unwrap(), "{sent}");
        };
        let same = |sent: &str| check(sent, sent);
        same("");
        same(r#","filter":{}"#);
        same(
            r#","filter":{"isSubjectCaseSensitive":false,"includedEventTypes":["All"],"advancedFilters":[]}"#,
        );
        same(r#","filter":{"subjectBeginsWith":"","subjectEndsWith":"x","isSubjectCaseSensitive":true}"#);
        same(r#","retryPolicy":{"maxDeliveryAttempts":3}"#);
        same(r#","persistencePolicy":{"isPersisted":"true"}"#);
        same(r#","persistencePolicy":"true""#);
        same(r#","labels":["a"],"postrider":{"profile":"edge"}"#);
        same(
            r#","deadLetterDestination":{"endpointType":"StorageBlob","properties":{"resourceId":"acc","blobContainerName":"dead"}}"#,
        );
        check(
            r#","expirationTimeUtc":"2030-01-01T00:00:00Z""#,
            r#","expirationTimeUtc":"2030-01-01T00:00:00.0000000Z""#,
        );
        check(r#","retryPolicy":{},"unknown":1,"topic":"t1""#, "");
        check(
            r#","Filter":{"AdvancedFilters":[{"OperatorType":"stringin","KEY":"data.a","Values":["x"],"more":1}]}"#,
            r#","filter":{"advancedFilters":[{"operatorType":"StringIn","key":"data.a","values":["x"]}]}"#,
        );
    }

    #[test]
    fn numbers_keep_their_digits() {
        let body = r#"{"destination":{"endpointType":"WebHook","properties":{"endpointUrl":"https://a/x"}},
            "filter":{"advancedFilters":[{"operatorType":"NumberIn","key":"n","values":[12345678901234567890.12345]}]}}"#;
        let topic = topic("{}");
        let limits = ResourceLimits::default();
        let context = SubscriptionContext {
            road: Road::Edge,
            name: "sub",
            topic: TopicContext {
                name: "t1",
                input_schema: topic.input_schema,
                mapping: None,
                default_types: &[],
            },
            limits: &limits,
            now: Timestamp::MIN,
            previous: None,
            api_version: "",
            shown: None,
        };
        let spec = parse_subscription(
            RawJson::parse(&format!("{{\"properties\":{body}}}")).unwrap(),
            &context,
        )
        .unwrap();
        let subscription = spec.into_subscription(SubscriptionId(1), TopicId(1), None, Timestamp::MIN);
        let text = serde_json::to_string(&edge_subscription(
            &subscription,
            &topic,
            MODULE,
            &BatchDefaults::default(),
        ))
        .unwrap();
        assert!(text.contains("12345678901234567890.12345"), "{text}");
    }

    #[test]
    fn resources_of_other_roads_are_shown_too() {
        let got = answer(
            Road::Config,
            r#"{"destination":{"endpointType":"WebHook","properties":{"endpointUrl":"https://a/x"}},
                "retryPolicy":{"eventTimeToLiveInMinutes":5},"filter":{"subjectEndsWith":"x"}}"#,
        );
        assert_eq!(got["retryPolicy"], json!({"eventExpiryInMinutes": 5}));
        assert_eq!(got["filter"], json!({"subjectEndsWith": "x"}));
    }
}
