//! Answers of the edge API.
//!
//! An answer has what was sent, in the API's own spelling, and what the server added: the id, the
//! type and the schema. The URL of a webhook is shown with its query, as the module does: whoever
//! may use this API owns the module. Keys and connection strings are masked.

use super::filter::FilterBody;
use super::{DestinationBody, schema_name};
use postrider_core::json::Raw;
use postrider_core::subscription::{Subscription, Topic};
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
            endpoint: format!("{base_url}/topics/{}/events?api-version={API_VERSION}", topic.name),
            input_schema: schema_name(topic.input_schema),
            postrider: profile_body(topic.profile.as_deref()),
        },
    }
}

pub fn edge_subscription(subscription: &Subscription, topic: &Topic, module_path: &str) -> EdgeSubscription {
    let retry = subscription.retry;
    let retry_policy = EdgeRetryPolicy {
        event_expiry_in_minutes: retry.time_to_live_minutes,
        max_delivery_attempts: retry.attempts_max,
    };
    let dead_letter = subscription.dead_letter.as_ref().map(|place| {
        let properties = json!({"resourceId": place.account, "blobContainerName": place.container});
        json!({"endpointType": "StorageBlob", "properties": properties})
    });
    let extras = subscription.extras.as_deref().and_then(|text| Raw::parse(text).ok());
    let extra = |name: &str| extras.and_then(|extras| extras.get(name));
    EdgeSubscription {
        id: format!("{}/eventSubscriptions/{}", topic_id(module_path, &topic.name), subscription.name),
        name: subscription.name.clone(),
        kind: "Microsoft.EventGrid/eventSubscriptions",
        properties: EdgeSubscriptionProperties {
            topic_name: topic.name.clone(),
            event_delivery_schema: schema_name(subscription.delivery_schema),
            retry_policy: (retry != Default::default()).then_some(retry_policy),
            persistence_policy: extra("persistencePolicy")
                .and_then(|raw| RawValue::from_string(raw.text().to_owned()).ok()),
            destination: DestinationBody::of(&subscription.destination),
            filter: filter_body(subscription, extra("filter")),
            labels: subscription.labels.clone(),
            expiration_time_utc: subscription.expires.map(|expires| expires.to_string()),
            dead_letter_destination: dead_letter,
            postrider: profile_body(subscription.profile.as_deref()),
        },
    }
}

fn topic_id(module_path: &str, name: &str) -> String {
    format!("{}/topics/{name}", module_path.trim_end_matches('/'))
}

fn profile_body(profile: Option<&str>) -> Option<Value> {
    profile.map(|profile| json!({"profile": profile}))
}

/// The filter that is in force, and of what is at its default that which was sent.
fn filter_body(subscription: &Subscription, sent: Option<Raw<'_>>) -> Option<FilterBody> {
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
