//! Topics and event subscriptions: the whole resource model, independent of any API's spelling.

use crate::event::EventSchema;
use crate::filter::EventFilter;
use crate::ids::{Secret, SubscriptionId, TopicId};
use crate::pause::SubscriptionPauses;
use crate::profile::Profile;
use crate::time::Timestamp;
use std::collections::BTreeMap;
use std::time::Duration;

/// Anything that events are published to.
#[derive(Clone, Debug, PartialEq)]
pub struct Topic {
    pub id: TopicId,
    pub name: String,
    pub kind: TopicKind,
    pub resource_group: String,
    pub location: String,
    pub tags: BTreeMap<String, String>,
    pub input_schema: EventSchema,
    pub mapping: Option<InputMapping>,
    pub keys: [Secret; 2],
    pub local_auth_disabled: bool,
    pub public_network: bool,
    pub inbound_ip_rules: Vec<String>,
    /// A named profile for all subscriptions of the topic; none for the server's default.
    pub profile: Option<String>,
    pub created: Timestamp,
    /// Properties that the API only stores and returns (identity, sku, …), as the text of a JSON
    /// object.
    pub extras: Option<String>,
    /// Whether the edge API serves the topic. `None` was stored by a version that did not record
    /// it; the edge API does not serve such a topic until it is known (see
    /// `postrider_api::edge::adopt_earlier_topics`).
    pub edge: Option<bool>,
}

impl Topic {
    /// Whether the edge API serves the topic: created through it, or declared with `edge = true`.
    pub fn is_edge(&self) -> bool {
        self.edge == Some(true)
    }

    /// A custom topic with default properties.
    pub fn custom(id: TopicId, name: impl Into<String>, keys: [Secret; 2]) -> Topic {
        Topic {
            id,
            name: name.into(),
            kind: TopicKind::Custom,
            resource_group: String::new(),
            location: String::new(),
            tags: BTreeMap::new(),
            input_schema: EventSchema::EventGrid,
            mapping: None,
            keys,
            local_auth_disabled: false,
            public_network: true,
            inbound_ip_rules: Vec::new(),
            profile: None,
            created: Timestamp::MIN,
            extras: None,
            edge: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum TopicKind {
    Custom,
    Domain {
        /// Whether a domain topic is created with its first subscription.
        auto_create: bool,
        /// Whether a domain topic is deleted with its last subscription.
        auto_delete: bool,
    },
    System {
        source: String,
        topic_type: String,
    },
    /// The hidden topic of event subscriptions that belong directly to another provider's resource.
    /// Never listed; created with the first subscription and deleted with the last.
    Scope {
        /// The resource's id, in the casing in which it was first given.
        source: String,
        topic_type: String,
    },
}

/// A topic inside a domain.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainTopic {
    pub domain: TopicId,
    pub name: String,
    /// Whether it was created with its first subscription, not explicitly: it may be deleted with
    /// the last one too.
    pub automatic: bool,
    pub created: Timestamp,
}

/// The sources of a custom event's envelope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InputMapping {
    pub id: MappedField,
    pub topic: MappedField,
    pub event_time: MappedField,
    pub event_type: MappedField,
    pub subject: MappedField,
    pub data_version: MappedField,
}

/// A field of the event, a default for events without it, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MappedField {
    pub source_field: Option<String>,
    pub default_value: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Subscription {
    pub id: SubscriptionId,
    pub name: String,
    pub topic: TopicId,
    /// The domain topic it is attached to; none for the whole topic or domain.
    pub domain_topic: Option<String>,
    pub destination: Destination,
    /// Set when the destination was given with a resource identity.
    pub identity: Option<ResourceIdentity>,
    pub filter: EventFilter,
    pub labels: Vec<String>,
    pub expires: Option<Timestamp>,
    pub delivery_schema: EventSchema,
    /// The subscription's own retry settings; missing ones come from its profile.
    pub retry: SubscriptionRetrySettings,
    pub dead_letter: Option<DeadLetterDestination>,
    pub dead_letter_identity: Option<ResourceIdentity>,
    pub profile: Option<String>,
    pub created: Timestamp,
    pub origin: ResourceOrigin,
    /// Times in which an operator has paused sending. No API sets them along with the other
    /// properties.
    pub pauses: SubscriptionPauses,
    /// Properties that the API only stores and returns, as the text of a JSON object.
    pub extras: Option<String>,
}

impl Subscription {
    /// A subscription to all events of a topic, with default properties.
    pub fn new(
        id: SubscriptionId,
        topic: TopicId,
        name: impl Into<String>,
        destination: Destination,
    ) -> Subscription {
        Subscription {
            id,
            name: name.into(),
            topic,
            domain_topic: None,
            destination,
            identity: None,
            filter: EventFilter::default(),
            labels: Vec::new(),
            expires: None,
            delivery_schema: EventSchema::EventGrid,
            retry: SubscriptionRetrySettings::default(),
            dead_letter: None,
            dead_letter_identity: None,
            profile: None,
            created: Timestamp::MIN,
            origin: ResourceOrigin::Config,
            pauses: SubscriptionPauses::default(),
            extras: None,
        }
    }
}

/// The API that created a resource. Decides the spelling of events and the limits, never the retry
/// rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceOrigin {
    Edge,
    Config,
    Azure,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceIdentity {
    pub kind: String,
    pub user_assigned: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubscriptionRetrySettings {
    pub attempts_max: Option<u32>,
    pub time_to_live_minutes: Option<u32>,
}

impl SubscriptionRetrySettings {
    pub fn time_to_live(self, profile: &Profile) -> Duration {
        let chosen = self.time_to_live_minutes;
        chosen.map_or(profile.time_to_live, |minutes| {
            Duration::from_secs(u64::from(minutes) * 60)
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterDestination {
    /// The storage account's resource id or name, as given.
    pub account: String,
    pub container: String,
}

impl DeadLetterDestination {
    /// The storage account's name.
    pub fn account_name(&self) -> &str {
        self.account.rsplit('/').next().unwrap_or(&self.account)
    }
}

/// The destination of a subscription's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    WebHook(WebHook),
    /// The edge module's upstream: another Event Grid's publish endpoint.
    EventGrid {
        url: String,
        sas_key: Secret,
        topic_name: Option<String>,
        batching: BatchSettings,
    },
    EdgeHub {
        output: String,
    },
    AzureFunction {
        resource: String,
        batching: BatchSettings,
        attributes: Vec<DeliveryAttribute>,
    },
    StorageQueue {
        resource: String,
        queue: String,
        message_ttl_secs: Option<i64>,
    },
    EventHub {
        resource: BrokerAddress,
        attributes: Vec<DeliveryAttribute>,
    },
    HybridConnection {
        resource: BrokerAddress,
        attributes: Vec<DeliveryAttribute>,
    },
    ServiceBusQueue {
        resource: BrokerAddress,
        attributes: Vec<DeliveryAttribute>,
    },
    ServiceBusTopic {
        resource: BrokerAddress,
        attributes: Vec<DeliveryAttribute>,
    },
}

/// A broker's entity: the cloud names it by resource id, the edge module by connection string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerAddress {
    Resource(String),
    Connection(Secret),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebHook {
    /// The full URL with its query string. The query is a secret: it often carries a code.
    pub url: Secret,
    pub batching: BatchSettings,
    pub attributes: Vec<DeliveryAttribute>,
    pub aad_tenant: Option<String>,
    pub aad_application: Option<String>,
    /// The most requests a minute that the webhook asked for in its handshake.
    pub rate_max: Option<u32>,
}

impl WebHook {
    pub fn new(url: impl Into<String>) -> WebHook {
        WebHook {
            url: Secret::new(url),
            batching: BatchSettings::default(),
            attributes: Vec::new(),
            aad_tenant: None,
            aad_application: None,
            rate_max: None,
        }
    }
}

/// The batch settings of a subscription; either one turns batching on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchSettings {
    pub events_max: Option<u32>,
    pub preferred_kilobytes: Option<u32>,
}

/// Limits of one delivery request. The size is soft: a larger event is sent alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    pub events_max: u32,
    pub kilobytes: u32,
}

/// Batch limits of subscriptions that set only one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchDefaults {
    pub cloud: BatchLimits,
    /// For subscriptions created through the edge API.
    pub edge: BatchLimits,
}

impl Default for BatchDefaults {
    /// The cloud's default size and the edge module's defaults. The cloud documents no number of
    /// events for a subscription that sets only the size, so the edge module's number is used for
    /// it too.
    fn default() -> BatchDefaults {
        BatchDefaults {
            cloud: BatchLimits {
                events_max: 10,
                kilobytes: 64,
            },
            // 1 058 576 bytes, in whole kilobytes: settings have no smaller unit.
            edge: BatchLimits {
                events_max: 10,
                kilobytes: 1033,
            },
        }
    }
}

impl BatchDefaults {
    pub fn of(&self, origin: ResourceOrigin) -> BatchLimits {
        match origin {
            ResourceOrigin::Edge => self.edge,
            ResourceOrigin::Config | ResourceOrigin::Azure => self.cloud,
        }
    }
}

impl BatchSettings {
    /// Either setting turns batching on, with the default for the other one. Without any, a request
    /// has one event.
    pub fn in_force(self, defaults: BatchLimits) -> BatchLimits {
        let events_max = match self {
            BatchSettings {
                events_max: Some(events_max),
                ..
            } => events_max,
            BatchSettings {
                preferred_kilobytes: Some(_),
                ..
            } => defaults.events_max,
            _ => 1,
        };
        BatchLimits {
            events_max,
            kilobytes: self.preferred_kilobytes.unwrap_or(defaults.kilobytes),
        }
    }

    pub fn is_set(self) -> bool {
        self.events_max.is_some() || self.preferred_kilobytes.is_some()
    }
}

impl BatchLimits {
    /// A limit of one event is no batching, whatever set it.
    pub fn is_batched(self) -> bool {
        self.events_max > 1
    }
}

/// A header (or message property) that is added to each delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryAttribute {
    pub name: String,
    pub value: AttributeValue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeValue {
    Static {
        value: Secret,
        secret: bool,
    },
    /// Looked up in each event, like a filter's key.
    Dynamic {
        source_field: String,
    },
}

impl Destination {
    pub fn attributes(&self) -> &[DeliveryAttribute] {
        match self {
            Destination::WebHook(hook) => &hook.attributes,
            Destination::AzureFunction { attributes, .. }
            | Destination::EventHub { attributes, .. }
            | Destination::HybridConnection { attributes, .. }
            | Destination::ServiceBusQueue { attributes, .. }
            | Destination::ServiceBusTopic { attributes, .. } => attributes,
            Destination::EventGrid { .. }
            | Destination::EdgeHub { .. }
            | Destination::StorageQueue { .. } => &[],
        }
    }

    pub fn batching(&self) -> BatchSettings {
        match self {
            Destination::WebHook(hook) => hook.batching,
            Destination::AzureFunction { batching, .. } | Destination::EventGrid { batching, .. } => {
                *batching
            }
            _ => BatchSettings::default(),
        }
    }
}
