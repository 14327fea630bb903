//! Resource bodies: topics and event subscriptions as the edge API, the configuration and the
//! management API write them, parsed into the core's model and rendered again.
//!
//! One parser serves all of these. Property names and words such as `WebHook` may be written in any
//! case, unknown members are ignored, and null is the same as absent. A refusal names the path of
//! the field and the reason.

mod destination;
mod edge;
mod event_grid;
mod filter;
mod members;
mod read;
mod subscription;
mod topic;
pub mod validate;

pub(crate) use destination::show_attribute;
pub use destination::{CLOUD_BATCH_EVENTS_MAX, CLOUD_BATCH_KILOBYTES_MAX, DestinationBody, HIDDEN};
pub use edge::{
    EdgeRetryPolicy, EdgeSubscription, EdgeSubscriptionProperties, EdgeTopic, EdgeTopicProperties,
    edge_subscription, edge_topic,
};
pub use event_grid::{EventGridHostPattern, EventGridHosts, PlainHttp};
pub use filter::{AdvancedFilterBody, FilterBody, FilterLimits};
pub use members::{
    BodyShape, DECLARED_TOPIC, EDGE_SUBSCRIPTION, EDGE_TOPIC, SUBSCRIPTION_PROPERTIES, UnknownMember,
    unknown_members,
};
pub use read::{FieldError, read_body};
pub use subscription::{
    EffectiveSettings, SubscriptionContext, SubscriptionSpec, TopicContext, parse_subscription,
    patch_subscription,
};
pub use topic::{TopicSpec, parse_domain, parse_resource_tags, parse_system_topic, parse_topic, patch_topic};

use postrider_core::event::EventSchema;
use postrider_core::json::RawJson;
use postrider_core::subscription::BatchDefaults;
/// The API that a body came through; stored as the resource's origin.
pub use postrider_core::subscription::ResourceOrigin as Road;
use read::JsonNode;

/// Limits that the operator sets, in addition to those that the API's documents define.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceLimits {
    /// `api__deliveryPolicyLimits__maxEventsPerBatch`; only for the edge API.
    pub edge_batch_events_max: u32,
    /// `api__deliveryPolicyLimits__maxpreferredBatchSizeInKilobytes`; only for the edge API.
    pub edge_batch_kilobytes_max: u32,
    /// Whether webhooks over plain HTTP are refused. The cloud always refuses them; the edge module
    /// does unless `outbound__webhook__httpsOnly` is false.
    pub web_hook_https_only: bool,
    /// For destinations of type EventGrid.
    pub event_grid_hosts: EventGridHosts,
    /// For subscriptions that the configuration declares. The cloud's limits apply to all others.
    pub declared_filters: FilterLimits,
    pub batch_defaults: BatchDefaults,
}

impl ResourceLimits {
    fn of_filters(&self, road: Road) -> FilterLimits {
        match road {
            Road::Config => self.declared_filters,
            Road::Azure | Road::Edge => FilterLimits::default(),
        }
    }
}

/// The edge module's own values, except that webhooks on a laptop may use plain HTTP.
impl Default for ResourceLimits {
    fn default() -> ResourceLimits {
        ResourceLimits {
            edge_batch_events_max: 50,
            edge_batch_kilobytes_max: 1033,
            web_hook_https_only: false,
            event_grid_hosts: EventGridHosts::default(),
            declared_filters: FilterLimits::default(),
            batch_defaults: BatchDefaults::default(),
        }
    }
}

/// Profiles that a topic or subscription may name.
pub const PROFILES: [&str; 7] = [
    "cloud-2018",
    "cloud-2019",
    "cloud-2020",
    "cloud-2021",
    "cloud-current",
    "edge",
    "custom",
];

/// Parses `properties.postrider.profile`.
fn parse_profile(properties: &JsonNode<'_>) -> Result<Option<String>, FieldError> {
    let Some(ours) = properties.object("postrider")? else {
        return Ok(None);
    };
    let words = PROFILES.map(|profile| (profile, profile));
    Ok(ours.word("profile", &words)?.map(str::to_owned))
}

/// Every spelling of a schema: topics and the edge module use `CustomEventSchema`, subscriptions in
/// the cloud `CustomInputSchema`, and some articles `CustomSchema`.
const SCHEMAS: [(&str, EventSchema); 5] = [
    ("EventGridSchema", EventSchema::EventGrid),
    ("CloudEventSchemaV1_0", EventSchema::CloudEvent),
    ("CustomEventSchema", EventSchema::Custom),
    ("CustomInputSchema", EventSchema::Custom),
    ("CustomSchema", EventSchema::Custom),
];

/// The schema as topics and the edge module spell it.
pub fn schema_name(schema: EventSchema) -> &'static str {
    match schema {
        EventSchema::EventGrid => "EventGridSchema",
        EventSchema::CloudEvent => "CloudEventSchemaV1_0",
        EventSchema::Custom => "CustomEventSchema",
    }
}

/// The schema as event subscriptions in the cloud spell it.
pub fn delivery_schema_name(schema: EventSchema) -> &'static str {
    match schema {
        EventSchema::Custom => "CustomInputSchema",
        other => schema_name(other),
    }
}

/// A name in the body must be the one in the URL. Azure compares names without case.
fn check_same_name(node: &JsonNode<'_>, member: &str, road: Road, name: &str) -> Result<(), FieldError> {
    let Some(given) = node.string(member)? else {
        return Ok(());
    };
    let same = match road {
        Road::Azure => given.eq_ignore_ascii_case(name),
        Road::Edge | Road::Config => given == name,
    };
    if same {
        return Ok(());
    }
    let reason = format!("must be {name:?} like the resource it is sent to, was {given:?}");
    Err(node.at(member).fail(reason))
}

/// Properties that are stored only to be echoed, as the text of a JSON object.
#[derive(Default)]
struct EchoedMembers(Vec<(&'static str, String)>);

impl EchoedMembers {
    const MEMBER_BYTES_MAX: usize = 64 << 10;

    fn keep(&mut self, name: &'static str, json: impl Into<String>) {
        self.0.push((name, json.into()));
    }

    fn keep_member(&mut self, node: &JsonNode<'_>, name: &'static str) -> Result<(), FieldError> {
        if let Some(member) = node.get(name) {
            let bytes = member.value.text().len();
            if bytes > EchoedMembers::MEMBER_BYTES_MAX {
                let most = EchoedMembers::MEMBER_BYTES_MAX;
                return Err(member.fail(format!("must not be longer than {most} bytes, was {bytes}")));
            }
            self.keep(name, member.value.text());
        }
        Ok(())
    }

    /// Copies some members of the previous extras.
    fn keep_all(&mut self, kept: Option<RawJson<'_>>, names: &[&'static str]) {
        for name in names {
            if let Some(value) = kept.and_then(|kept| kept.get(name)) {
                self.keep(name, value.text());
            }
        }
    }

    fn into_text(self) -> Option<String> {
        let members: Vec<_> = self
            .0
            .into_iter()
            .map(|(name, json)| format!("\"{name}\":{json}"))
            .collect();
        (!members.is_empty()).then(|| format!("{{{}}}", members.join(",")))
    }
}
