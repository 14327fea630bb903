//! Stored form of topics, subscriptions, handshakes, endpoint delays, dead-letter blobs and
//! replays: JSON with a version.
//!
//! Readers ignore unknown members, so an older program can read what a newer program of the same
//! version wrote. A record of a newer version is refused rather than read partially. Secrets are in
//! plain text here: a store seals the record (`seal.rs`) before it writes it.

pub mod batch;

use crate::{
    BlobFault, BlobId, BlobRecord, DeadLetterMark, Handshake, HandshakeExchange, HandshakeResponse,
    HandshakeState, ReplayJob, ReplayState, UnreadableBlob,
};
use postrider_core::decimal::Decimal;
use postrider_core::event::EventSchema;
use postrider_core::filter::{
    AdvancedFilter, EventFilter, FilterOperands, KeyStyle, OperandKind, operator_from_name,
};
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::pause::{SubscriptionPause, SubscriptionPauses};
use postrider_core::probation::{EndpointDelay, EndpointProbationDelay};
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{
    AttributeValue, BatchSettings, BrokerAddress, DeadLetterDestination, DeliveryAttribute, Destination,
    DomainTopic, InputMapping, MappedField, ResourceIdentity, ResourceOrigin, Subscription,
    SubscriptionRetrySettings, Topic, TopicKind, WebHook,
};
use postrider_core::time::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The version that is written, and the newest that can be read.
pub const VERSION: u32 = 1;
/// First bytes of every record of this version as this program writes it.
const BEGINNING: &[u8] = br#"{"v":1,"#;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("the stored {what} has version {found}, but this program reads versions up to {VERSION}")]
    Newer { what: &'static str, found: u32 },
    /// The text itself is never part of the reason because it contains secrets.
    #[error("the stored {what} cannot be read: {reason}")]
    Damaged { what: &'static str, reason: String },
}

/// A resource that can be stored.
pub trait StoredRecord: Sized {
    fn encode(&self) -> Vec<u8>;
    fn decode(bytes: &[u8]) -> Result<Self, RecordError>;
}

impl StoredRecord for Topic {
    fn encode(&self) -> Vec<u8> {
        write(&TopicRecord::of(self))
    }
    fn decode(bytes: &[u8]) -> Result<Topic, RecordError> {
        Ok(read::<TopicRecord>("topic", bytes)?.into_topic())
    }
}

impl StoredRecord for DomainTopic {
    fn encode(&self) -> Vec<u8> {
        write(&DomainTopicRecord {
            v: VERSION,
            domain: self.domain.0,
            name: self.name.clone(),
            automatic: self.automatic,
            created: self.created.nanos(),
        })
    }
    fn decode(bytes: &[u8]) -> Result<DomainTopic, RecordError> {
        let record: DomainTopicRecord = read("domain topic", bytes)?;
        Ok(DomainTopic {
            domain: TopicId(record.domain),
            name: record.name,
            automatic: record.automatic,
            created: Timestamp::from_nanos(record.created),
        })
    }
}

impl StoredRecord for Subscription {
    fn encode(&self) -> Vec<u8> {
        write(&SubscriptionRecord::of(self))
    }
    fn decode(bytes: &[u8]) -> Result<Subscription, RecordError> {
        let what = "subscription";
        let record: SubscriptionRecord = read(what, bytes)?;
        record
            .into_subscription()
            .map_err(|reason| RecordError::Damaged { what, reason })
    }
}

impl StoredRecord for Handshake {
    fn encode(&self) -> Vec<u8> {
        write(&HandshakeRecord {
            v: VERSION,
            operation: self.operation.clone(),
            subscription: SubscriptionRecord::of(&self.subscription),
            replaces: self.replaces,
            trial: self.trial,
            code: self.code.clone(),
            token: exposed(&self.token),
            callback: self.callback.as_ref().map(exposed),
            begun: self.begun.nanos(),
            by: self.by.clone(),
            state: match &self.state {
                HandshakeState::Asking => HandshakeStateRecord::Asking,
                HandshakeState::Awaiting { until } => HandshakeStateRecord::Awaiting { until: until.nanos() },
                HandshakeState::Failed { at, message } => HandshakeStateRecord::Failed {
                    at: at.nanos(),
                    message: message.clone(),
                },
            },
            transcript: self.transcript.iter().map(ExchangeRecord::of).collect(),
        })
    }
    fn decode(bytes: &[u8]) -> Result<Handshake, RecordError> {
        let what = "handshake";
        let record: HandshakeRecord = read(what, bytes)?;
        let subscription = record.subscription.into_subscription();
        Ok(Handshake {
            operation: record.operation,
            subscription: subscription.map_err(|reason| RecordError::Damaged { what, reason })?,
            replaces: record.replaces,
            trial: record.trial,
            code: record.code,
            token: Secret::new(record.token),
            callback: record.callback.map(Secret::new),
            begun: Timestamp::from_nanos(record.begun),
            by: record.by,
            state: match record.state {
                HandshakeStateRecord::Asking => HandshakeState::Asking,
                HandshakeStateRecord::Awaiting { until } => HandshakeState::Awaiting {
                    until: Timestamp::from_nanos(until),
                },
                HandshakeStateRecord::Failed { at, message } => HandshakeState::Failed {
                    at: Timestamp::from_nanos(at),
                    message,
                },
            },
            transcript: record
                .transcript
                .into_iter()
                .map(ExchangeRecord::into_exchange)
                .collect(),
        })
    }
}

impl StoredRecord for EndpointDelay {
    fn encode(&self) -> Vec<u8> {
        let EndpointProbationDelay {
            cause,
            status,
            since,
            until,
            step,
        } = self.delay;
        write(&EndpointDelayRecord {
            v: VERSION,
            endpoint: self.endpoint.clone(),
            cause: cause.code(),
            since: since.nanos(),
            until: until.nanos(),
            step: u64::try_from(step.as_nanos()).unwrap_or(u64::MAX),
            status,
            by: self.by.clone(),
        })
    }
    fn decode(bytes: &[u8]) -> Result<EndpointDelay, RecordError> {
        let record: EndpointDelayRecord = read("endpoint delay", bytes)?;
        Ok(EndpointDelay {
            endpoint: record.endpoint,
            delay: EndpointProbationDelay {
                cause: Outcome::from_code(record.cause),
                status: record.status,
                since: Timestamp::from_nanos(record.since),
                until: Timestamp::from_nanos(record.until),
                step: Duration::from_nanos(record.step),
            },
            by: record.by,
        })
    }
}

/// Everything but the marks, which change often and are stored separately with two bytes each.
impl StoredRecord for BlobRecord {
    fn encode(&self) -> Vec<u8> {
        write(&BlobHeadRecord {
            v: VERSION,
            id: self.id.0,
            subscription: self.subscription.0,
            subscription_name: self.subscription_name.clone(),
            topic_name: self.topic_name.clone(),
            account: self.account.clone(),
            container: self.container.clone(),
            path: self.path.clone(),
            written: self.written.nanos(),
            bytes: self.bytes,
            sha256: self
                .sha256
                .map(|hash| hash.iter().map(|byte| format!("{byte:02x}")).collect()),
        })
    }
    fn decode(bytes: &[u8]) -> Result<BlobRecord, RecordError> {
        let record: BlobHeadRecord = read("blob of dead letters", bytes)?;
        let sha256 = record.sha256.map(|text| {
            parse_sha256(&text).ok_or_else(|| RecordError::Damaged {
                what: "blob of dead letters",
                reason: "sha256 is not 64 hexadecimal digits".into(),
            })
        });
        Ok(BlobRecord {
            id: BlobId(record.id),
            subscription: SubscriptionId(record.subscription),
            subscription_name: record.subscription_name,
            topic_name: record.topic_name,
            account: record.account,
            container: record.container,
            path: record.path,
            written: Timestamp::from_nanos(record.written),
            bytes: record.bytes,
            sha256: sha256.transpose()?,
            marks: Vec::new(),
        })
    }
}

fn parse_sha256(text: &str) -> Option<[u8; 32]> {
    let mut hash = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).ok()?;
    }
    Some(hash)
}

const PURGED: u8 = 0x80;

pub fn encode_marks(marks: &[DeadLetterMark]) -> Vec<u8> {
    let mut out = Vec::with_capacity(marks.len() * 2);
    for mark in marks {
        let purged = if mark.purged { PURGED } else { 0 };
        out.extend_from_slice(&[mark.reason.code() | purged, mark.replays]);
    }
    out
}

pub fn decode_marks(bytes: &[u8]) -> Vec<DeadLetterMark> {
    let (marks, _) = bytes.as_chunks();
    let mark = |[reason, replays]: &[u8; 2]| DeadLetterMark {
        reason: GiveUpReason::from_code(reason & !PURGED),
        replays: *replays,
        purged: reason & PURGED != 0,
    };
    marks.iter().map(mark).collect()
}

impl StoredRecord for ReplayJob {
    fn encode(&self) -> Vec<u8> {
        write(&ReplayJobRecord {
            v: VERSION,
            id: self.id,
            request: self.request.clone(),
            created: self.created.nanos(),
            next: (self.next.0.0, self.next.1),
            last: self.last.0,
            replayed: self.replayed,
            failed: self.failed,
            unreadable: self.unreadable,
            unreadable_blobs: self
                .unreadable_blobs
                .iter()
                .map(UnreadableBlobRecord::of)
                .collect(),
            state: match self.state {
                ReplayState::Running => ReplayStateRecord::Running,
                ReplayState::Cancelled => ReplayStateRecord::Cancelled,
                ReplayState::Done => ReplayStateRecord::Done,
            },
        })
    }
    fn decode(bytes: &[u8]) -> Result<ReplayJob, RecordError> {
        let record: ReplayJobRecord = read("replay", bytes)?;
        Ok(ReplayJob {
            id: record.id,
            request: record.request,
            created: Timestamp::from_nanos(record.created),
            next: (BlobId(record.next.0), record.next.1),
            last: BlobId(record.last),
            replayed: record.replayed,
            failed: record.failed,
            unreadable: record.unreadable,
            unreadable_blobs: record
                .unreadable_blobs
                .into_iter()
                .map(UnreadableBlobRecord::read)
                .collect(),
            state: match record.state {
                ReplayStateRecord::Running => ReplayState::Running,
                ReplayStateRecord::Cancelled => ReplayState::Cancelled,
                ReplayStateRecord::Done => ReplayState::Done,
            },
        })
    }
}

fn write(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("records have only string keys")
}

fn read<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, RecordError> {
    #[derive(Deserialize)]
    struct RecordVersion {
        v: u32,
    }
    let damaged = |error: serde_json::Error| {
        let reason = format!("{:?} error at byte {}", error.classify(), error.column());
        RecordError::Damaged { what, reason }
    };
    // Finding the version without this prefix takes as long as reading the whole record.
    if !bytes.starts_with(BEGINNING) {
        let RecordVersion { v } = serde_json::from_slice(bytes).map_err(damaged)?;
        if v > VERSION {
            return Err(RecordError::Newer { what, found: v });
        }
    }
    serde_json::from_slice(bytes).map_err(damaged)
}

#[derive(Serialize, Deserialize)]
struct TopicRecord {
    v: u32,
    id: u64,
    name: String,
    kind: TopicKindRecord,
    resource_group: String,
    location: String,
    tags: BTreeMap<String, String>,
    input_schema: SchemaRecord,
    mapping: Option<MappingRecord>,
    keys: [String; 2],
    local_auth_disabled: bool,
    public_network: bool,
    inbound_ip_rules: Vec<String>,
    profile: Option<String>,
    created: i64,
    extras: Option<String>,
    /// Whether the edge API reaches the topic; absent in records of versions before 0.2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    edge: Option<bool>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum TopicKindRecord {
    Custom,
    Domain { auto_create: bool, auto_delete: bool },
    System { source: String, topic_type: String },
    Scope { source: String, topic_type: String },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SchemaRecord {
    EventGrid,
    CloudEvent,
    Custom,
}

#[derive(Serialize, Deserialize)]
struct MappingRecord {
    id: MappedFieldRecord,
    topic: MappedFieldRecord,
    event_time: MappedFieldRecord,
    event_type: MappedFieldRecord,
    subject: MappedFieldRecord,
    data_version: MappedFieldRecord,
}

#[derive(Serialize, Deserialize)]
struct MappedFieldRecord {
    source_field: Option<String>,
    default_value: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct DomainTopicRecord {
    v: u32,
    domain: u64,
    name: String,
    /// Absent in records of older programs.
    #[serde(default)]
    automatic: bool,
    created: i64,
}

#[derive(Serialize, Deserialize)]
struct HandshakeRecord {
    v: u32,
    operation: String,
    subscription: SubscriptionRecord,
    replaces: bool,
    trial: bool,
    code: String,
    token: String,
    callback: Option<String>,
    begun: i64,
    /// Present only in clusters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    by: Option<String>,
    state: HandshakeStateRecord,
    transcript: Vec<ExchangeRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum HandshakeStateRecord {
    Asking,
    Awaiting { until: i64 },
    Failed { at: i64, message: String },
}

#[derive(Serialize, Deserialize)]
struct ExchangeRecord {
    at: i64,
    method: String,
    url: String,
    headers: Vec<(String, String)>,
    received: HandshakeResponseRecord,
    verdict: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HandshakeResponseRecord {
    Answer {
        status: u16,
        headers: Vec<(String, String)>,
        body: String,
    },
    Nothing(String),
}

/// Times and durations are in nanoseconds.
#[derive(Serialize, Deserialize)]
struct EndpointDelayRecord {
    v: u32,
    endpoint: String,
    /// The outcome's number.
    cause: u8,
    since: i64,
    until: i64,
    step: u64,
    /// Of the answer that is the cause, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    /// Only where there are several nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    by: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct BlobHeadRecord {
    v: u32,
    id: u64,
    subscription: u64,
    subscription_name: String,
    topic_name: String,
    account: String,
    container: String,
    path: String,
    written: i64,
    bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct ReplayJobRecord {
    v: u32,
    id: u64,
    request: String,
    created: i64,
    /// A blob's number, and the index of a dead letter in the blob.
    next: (u64, u32),
    last: u64,
    replayed: u64,
    failed: u64,
    // Absent in records of versions before 0.2.
    #[serde(default, skip_serializing_if = "is_zero")]
    unreadable: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unreadable_blobs: Vec<UnreadableBlobRecord>,
    state: ReplayStateRecord,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[derive(Serialize, Deserialize)]
struct UnreadableBlobRecord {
    id: u64,
    account: String,
    container: String,
    path: String,
    letters: u64,
    fault: BlobFaultRecord,
    reason: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BlobFaultRecord {
    Missing,
    Damaged,
    NoAccount,
}

impl UnreadableBlobRecord {
    fn of(blob: &UnreadableBlob) -> UnreadableBlobRecord {
        UnreadableBlobRecord {
            id: blob.id.0,
            account: blob.account.clone(),
            container: blob.container.clone(),
            path: blob.path.clone(),
            letters: blob.letters,
            fault: match blob.fault {
                BlobFault::Missing => BlobFaultRecord::Missing,
                BlobFault::Damaged => BlobFaultRecord::Damaged,
                BlobFault::NoAccount => BlobFaultRecord::NoAccount,
            },
            reason: blob.reason.clone(),
        }
    }

    fn read(self) -> UnreadableBlob {
        UnreadableBlob {
            id: BlobId(self.id),
            account: self.account,
            container: self.container,
            path: self.path,
            letters: self.letters,
            fault: match self.fault {
                BlobFaultRecord::Missing => BlobFault::Missing,
                BlobFaultRecord::Damaged => BlobFault::Damaged,
                BlobFaultRecord::NoAccount => BlobFault::NoAccount,
            },
            reason: self.reason,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ReplayStateRecord {
    Running,
    Cancelled,
    Done,
}

#[derive(Serialize, Deserialize)]
struct SubscriptionRecord {
    v: u32,
    id: u64,
    name: String,
    topic: u64,
    domain_topic: Option<String>,
    destination: DestinationRecord,
    identity: Option<IdentityRecord>,
    filter: FilterRecord,
    labels: Vec<String>,
    expires: Option<i64>,
    delivery_schema: SchemaRecord,
    attempts_max: Option<u32>,
    time_to_live_minutes: Option<u32>,
    dead_letter: Option<DeadLetterRecord>,
    dead_letter_identity: Option<IdentityRecord>,
    profile: Option<String>,
    created: i64,
    origin: OriginRecord,
    extras: Option<String>,
    /// Pauses as (from, until) in order; the last may have no end. Absent in records of older
    /// programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pauses: Vec<(i64, Option<i64>)>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum DestinationRecord {
    WebHook {
        url: String,
        batching: BatchingRecord,
        attributes: Vec<AttributeRecord>,
        aad_tenant: Option<String>,
        aad_application: Option<String>,
        /// Absent in records of older programs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rate_max: Option<u32>,
    },
    EventGrid {
        url: String,
        sas_key: String,
        topic_name: Option<String>,
        batching: BatchingRecord,
    },
    EdgeHub {
        output: String,
    },
    AzureFunction {
        resource: String,
        batching: BatchingRecord,
        attributes: Vec<AttributeRecord>,
    },
    StorageQueue {
        resource: String,
        queue: String,
        message_ttl_secs: Option<i64>,
    },
    EventHub {
        broker: BrokerRecord,
        attributes: Vec<AttributeRecord>,
    },
    HybridConnection {
        broker: BrokerRecord,
        attributes: Vec<AttributeRecord>,
    },
    ServiceBusQueue {
        broker: BrokerRecord,
        attributes: Vec<AttributeRecord>,
    },
    ServiceBusTopic {
        broker: BrokerRecord,
        attributes: Vec<AttributeRecord>,
    },
}

#[derive(Serialize, Deserialize)]
struct BatchingRecord {
    events_max: Option<u32>,
    preferred_kilobytes: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BrokerRecord {
    Resource(String),
    Connection(String),
}

#[derive(Serialize, Deserialize)]
struct AttributeRecord {
    name: String,
    #[serde(flatten)]
    value: AttributeValueRecord,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum AttributeValueRecord {
    Static { value: String, secret: bool },
    Dynamic { source_field: String },
}

#[derive(Serialize, Deserialize)]
struct IdentityRecord {
    kind: String,
    user_assigned: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct DeadLetterRecord {
    account: String,
    container: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OriginRecord {
    Edge,
    Config,
    Azure,
}

#[derive(Serialize, Deserialize)]
struct FilterRecord {
    included_event_types: Option<Vec<String>>,
    subject_begins_with: Option<String>,
    subject_ends_with: Option<String>,
    subject_case_sensitive: bool,
    arrays: bool,
    advanced: Vec<AdvancedFilterRecord>,
    keys: KeysRecord,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KeysRecord {
    Cloud,
    Edge,
}

#[derive(Serialize, Deserialize)]
struct AdvancedFilterRecord {
    /// Name of the operator in Azure's API.
    operator: String,
    key: String,
    operand: OperandRecord,
}

/// Numbers are stored as strings, which preserve all digits.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OperandRecord {
    Number(String),
    Numbers(Vec<String>),
    Ranges(Vec<[String; 2]>),
    Bool(bool),
    Strings(Vec<String>),
    Nothing,
}

impl TopicRecord {
    fn of(topic: &Topic) -> TopicRecord {
        TopicRecord {
            v: VERSION,
            id: topic.id.0,
            name: topic.name.clone(),
            kind: match topic.kind.clone() {
                TopicKind::Custom => TopicKindRecord::Custom,
                TopicKind::Domain {
                    auto_create,
                    auto_delete,
                } => TopicKindRecord::Domain {
                    auto_create,
                    auto_delete,
                },
                TopicKind::System { source, topic_type } => TopicKindRecord::System { source, topic_type },
                TopicKind::Scope { source, topic_type } => TopicKindRecord::Scope { source, topic_type },
            },
            resource_group: topic.resource_group.clone(),
            location: topic.location.clone(),
            tags: topic.tags.clone(),
            input_schema: SchemaRecord::of(topic.input_schema),
            mapping: topic.mapping.as_ref().map(MappingRecord::of),
            keys: topic.keys.each_ref().map(exposed),
            local_auth_disabled: topic.local_auth_disabled,
            public_network: topic.public_network,
            inbound_ip_rules: topic.inbound_ip_rules.clone(),
            profile: topic.profile.clone(),
            created: topic.created.nanos(),
            extras: topic.extras.clone(),
            edge: topic.edge,
        }
    }

    fn into_topic(self) -> Topic {
        Topic {
            id: TopicId(self.id),
            name: self.name,
            kind: match self.kind {
                TopicKindRecord::Custom => TopicKind::Custom,
                TopicKindRecord::Domain {
                    auto_create,
                    auto_delete,
                } => TopicKind::Domain {
                    auto_create,
                    auto_delete,
                },
                TopicKindRecord::System { source, topic_type } => TopicKind::System { source, topic_type },
                TopicKindRecord::Scope { source, topic_type } => TopicKind::Scope { source, topic_type },
            },
            resource_group: self.resource_group,
            location: self.location,
            tags: self.tags,
            input_schema: self.input_schema.into_schema(),
            mapping: self.mapping.map(MappingRecord::into_mapping),
            keys: self.keys.map(Secret::new),
            local_auth_disabled: self.local_auth_disabled,
            public_network: self.public_network,
            inbound_ip_rules: self.inbound_ip_rules,
            profile: self.profile,
            created: Timestamp::from_nanos(self.created),
            extras: self.extras,
            edge: self.edge,
        }
    }
}

impl SubscriptionRecord {
    fn of(subscription: &Subscription) -> SubscriptionRecord {
        SubscriptionRecord {
            v: VERSION,
            id: subscription.id.0,
            name: subscription.name.clone(),
            topic: subscription.topic.0,
            domain_topic: subscription.domain_topic.clone(),
            destination: DestinationRecord::of(&subscription.destination),
            identity: subscription.identity.as_ref().map(IdentityRecord::of),
            filter: FilterRecord::of(&subscription.filter),
            labels: subscription.labels.clone(),
            expires: subscription.expires.map(Timestamp::nanos),
            delivery_schema: SchemaRecord::of(subscription.delivery_schema),
            attempts_max: subscription.retry.attempts_max,
            time_to_live_minutes: subscription.retry.time_to_live_minutes,
            dead_letter: subscription
                .dead_letter
                .clone()
                .map(|DeadLetterDestination { account, container }| DeadLetterRecord { account, container }),
            dead_letter_identity: subscription.dead_letter_identity.as_ref().map(IdentityRecord::of),
            profile: subscription.profile.clone(),
            created: subscription.created.nanos(),
            origin: match subscription.origin {
                ResourceOrigin::Edge => OriginRecord::Edge,
                ResourceOrigin::Config => OriginRecord::Config,
                ResourceOrigin::Azure => OriginRecord::Azure,
            },
            extras: subscription.extras.clone(),
            pauses: subscription
                .pauses
                .iter()
                .map(|pause| (pause.from.nanos(), pause.until.map(Timestamp::nanos)))
                .collect(),
        }
    }

    fn into_subscription(self) -> Result<Subscription, String> {
        Ok(Subscription {
            id: SubscriptionId(self.id),
            name: self.name,
            topic: TopicId(self.topic),
            domain_topic: self.domain_topic,
            destination: self.destination.into_destination(),
            identity: self.identity.map(IdentityRecord::into_identity),
            filter: self.filter.into_filter()?,
            labels: self.labels,
            expires: self.expires.map(Timestamp::from_nanos),
            delivery_schema: self.delivery_schema.into_schema(),
            retry: SubscriptionRetrySettings {
                attempts_max: self.attempts_max,
                time_to_live_minutes: self.time_to_live_minutes,
            },
            dead_letter: self
                .dead_letter
                .map(|DeadLetterRecord { account, container }| DeadLetterDestination { account, container }),
            dead_letter_identity: self.dead_letter_identity.map(IdentityRecord::into_identity),
            profile: self.profile,
            created: Timestamp::from_nanos(self.created),
            origin: match self.origin {
                OriginRecord::Edge => ResourceOrigin::Edge,
                OriginRecord::Config => ResourceOrigin::Config,
                OriginRecord::Azure => ResourceOrigin::Azure,
            },
            pauses: SubscriptionPauses::of(
                self.pauses
                    .into_iter()
                    .map(|(from, until)| SubscriptionPause {
                        from: Timestamp::from_nanos(from),
                        until: until.map(Timestamp::from_nanos),
                    })
                    .collect(),
            ),
            extras: self.extras,
        })
    }
}

impl ExchangeRecord {
    fn of(exchange: &HandshakeExchange) -> ExchangeRecord {
        let exchange = exchange.clone();
        ExchangeRecord {
            at: exchange.at.nanos(),
            method: exchange.method,
            url: exchange.url,
            headers: exchange.headers,
            received: match exchange.received {
                HandshakeResponse::Answer {
                    status,
                    headers,
                    body,
                } => HandshakeResponseRecord::Answer {
                    status,
                    headers,
                    body,
                },
                HandshakeResponse::Nothing(why) => HandshakeResponseRecord::Nothing(why),
            },
            verdict: exchange.verdict,
        }
    }

    fn into_exchange(self) -> HandshakeExchange {
        HandshakeExchange {
            at: Timestamp::from_nanos(self.at),
            method: self.method,
            url: self.url,
            headers: self.headers,
            received: match self.received {
                HandshakeResponseRecord::Answer {
                    status,
                    headers,
                    body,
                } => HandshakeResponse::Answer {
                    status,
                    headers,
                    body,
                },
                HandshakeResponseRecord::Nothing(why) => HandshakeResponse::Nothing(why),
            },
            verdict: self.verdict,
        }
    }
}

impl SchemaRecord {
    fn of(schema: EventSchema) -> SchemaRecord {
        match schema {
            EventSchema::EventGrid => SchemaRecord::EventGrid,
            EventSchema::CloudEvent => SchemaRecord::CloudEvent,
            EventSchema::Custom => SchemaRecord::Custom,
        }
    }

    fn into_schema(self) -> EventSchema {
        match self {
            SchemaRecord::EventGrid => EventSchema::EventGrid,
            SchemaRecord::CloudEvent => EventSchema::CloudEvent,
            SchemaRecord::Custom => EventSchema::Custom,
        }
    }
}

impl MappingRecord {
    fn of(mapping: &InputMapping) -> MappingRecord {
        let field = |mapped: &MappedField| MappedFieldRecord {
            source_field: mapped.source_field.clone(),
            default_value: mapped.default_value.clone(),
        };
        MappingRecord {
            id: field(&mapping.id),
            topic: field(&mapping.topic),
            event_time: field(&mapping.event_time),
            event_type: field(&mapping.event_type),
            subject: field(&mapping.subject),
            data_version: field(&mapping.data_version),
        }
    }

    fn into_mapping(self) -> InputMapping {
        let field = |MappedFieldRecord {
                         source_field,
                         default_value,
                     }| MappedField {
            source_field,
            default_value,
        };
        InputMapping {
            id: field(self.id),
            topic: field(self.topic),
            event_time: field(self.event_time),
            event_type: field(self.event_type),
            subject: field(self.subject),
            data_version: field(self.data_version),
        }
    }
}

impl IdentityRecord {
    fn of(identity: &ResourceIdentity) -> IdentityRecord {
        IdentityRecord {
            kind: identity.kind.clone(),
            user_assigned: identity.user_assigned.clone(),
        }
    }

    fn into_identity(self) -> ResourceIdentity {
        ResourceIdentity {
            kind: self.kind,
            user_assigned: self.user_assigned,
        }
    }
}

impl DestinationRecord {
    fn of(destination: &Destination) -> DestinationRecord {
        let batching = BatchingRecord::of(destination.batching());
        let attributes = destination.attributes().iter().map(AttributeRecord::of).collect();
        match destination.clone() {
            Destination::WebHook(hook) => DestinationRecord::WebHook {
                url: exposed(&hook.url),
                batching,
                attributes,
                aad_tenant: hook.aad_tenant,
                aad_application: hook.aad_application,
                rate_max: hook.rate_max,
            },
            Destination::EventGrid {
                url,
                sas_key,
                topic_name,
                ..
            } => DestinationRecord::EventGrid {
                url,
                sas_key: exposed(&sas_key),
                topic_name,
                batching,
            },
            Destination::EdgeHub { output } => DestinationRecord::EdgeHub { output },
            Destination::AzureFunction { resource, .. } => DestinationRecord::AzureFunction {
                resource,
                batching,
                attributes,
            },
            Destination::StorageQueue {
                resource,
                queue,
                message_ttl_secs,
            } => DestinationRecord::StorageQueue {
                resource,
                queue,
                message_ttl_secs,
            },
            Destination::EventHub { resource, .. } => DestinationRecord::EventHub {
                broker: BrokerRecord::of(resource),
                attributes,
            },
            Destination::HybridConnection { resource, .. } => DestinationRecord::HybridConnection {
                broker: BrokerRecord::of(resource),
                attributes,
            },
            Destination::ServiceBusQueue { resource, .. } => DestinationRecord::ServiceBusQueue {
                broker: BrokerRecord::of(resource),
                attributes,
            },
            Destination::ServiceBusTopic { resource, .. } => DestinationRecord::ServiceBusTopic {
                broker: BrokerRecord::of(resource),
                attributes,
            },
        }
    }

    fn into_destination(self) -> Destination {
        let read = |attributes: Vec<AttributeRecord>| -> Vec<DeliveryAttribute> {
            attributes
                .into_iter()
                .map(AttributeRecord::into_attribute)
                .collect()
        };
        match self {
            DestinationRecord::WebHook {
                url,
                batching,
                attributes,
                aad_tenant,
                aad_application,
                rate_max,
            } => Destination::WebHook(WebHook {
                url: Secret::new(url),
                batching: batching.into_batching(),
                attributes: read(attributes),
                aad_tenant,
                aad_application,
                rate_max,
            }),
            DestinationRecord::EventGrid {
                url,
                sas_key,
                topic_name,
                batching,
            } => Destination::EventGrid {
                url,
                sas_key: Secret::new(sas_key),
                topic_name,
                batching: batching.into_batching(),
            },
            DestinationRecord::EdgeHub { output } => Destination::EdgeHub { output },
            DestinationRecord::AzureFunction {
                resource,
                batching,
                attributes,
            } => Destination::AzureFunction {
                resource,
                batching: batching.into_batching(),
                attributes: read(attributes),
            },
            DestinationRecord::StorageQueue {
                resource,
                queue,
                message_ttl_secs,
            } => Destination::StorageQueue {
                resource,
                queue,
                message_ttl_secs,
            },
            DestinationRecord::EventHub { broker, attributes } => Destination::EventHub {
                resource: broker.into_broker(),
                attributes: read(attributes),
            },
            DestinationRecord::HybridConnection { broker, attributes } => Destination::HybridConnection {
                resource: broker.into_broker(),
                attributes: read(attributes),
            },
            DestinationRecord::ServiceBusQueue { broker, attributes } => Destination::ServiceBusQueue {
                resource: broker.into_broker(),
                attributes: read(attributes),
            },
            DestinationRecord::ServiceBusTopic { broker, attributes } => Destination::ServiceBusTopic {
                resource: broker.into_broker(),
                attributes: read(attributes),
            },
        }
    }
}

impl BatchingRecord {
    fn of(batching: BatchSettings) -> BatchingRecord {
        BatchingRecord {
            events_max: batching.events_max,
            preferred_kilobytes: batching.preferred_kilobytes,
        }
    }

    fn into_batching(self) -> BatchSettings {
        BatchSettings {
            events_max: self.events_max,
            preferred_kilobytes: self.preferred_kilobytes,
        }
    }
}

impl BrokerRecord {
    fn of(broker: BrokerAddress) -> BrokerRecord {
        match broker {
            BrokerAddress::Resource(id) => BrokerRecord::Resource(id),
            BrokerAddress::Connection(connection) => BrokerRecord::Connection(exposed(&connection)),
        }
    }

    fn into_broker(self) -> BrokerAddress {
        match self {
            BrokerRecord::Resource(id) => BrokerAddress::Resource(id),
            BrokerRecord::Connection(connection) => BrokerAddress::Connection(Secret::new(connection)),
        }
    }
}

impl AttributeRecord {
    fn of(attribute: &DeliveryAttribute) -> AttributeRecord {
        let value = match &attribute.value {
            AttributeValue::Static { value, secret } => AttributeValueRecord::Static {
                value: exposed(value),
                secret: *secret,
            },
            AttributeValue::Dynamic { source_field } => AttributeValueRecord::Dynamic {
                source_field: source_field.clone(),
            },
        };
        AttributeRecord {
            name: attribute.name.clone(),
            value,
        }
    }

    fn into_attribute(self) -> DeliveryAttribute {
        let value = match self.value {
            AttributeValueRecord::Static { value, secret } => AttributeValue::Static {
                value: Secret::new(value),
                secret,
            },
            AttributeValueRecord::Dynamic { source_field } => AttributeValue::Dynamic { source_field },
        };
        DeliveryAttribute {
            name: self.name,
            value,
        }
    }
}

impl FilterRecord {
    fn of(filter: &EventFilter) -> FilterRecord {
        FilterRecord {
            included_event_types: filter.included_event_types.clone(),
            subject_begins_with: filter.subject_begins_with.clone(),
            subject_ends_with: filter.subject_ends_with.clone(),
            subject_case_sensitive: filter.subject_case_sensitive,
            arrays: filter.arrays,
            advanced: filter.advanced.iter().map(AdvancedFilterRecord::of).collect(),
            keys: match filter.keys {
                KeyStyle::Cloud => KeysRecord::Cloud,
                KeyStyle::Edge => KeysRecord::Edge,
            },
        }
    }

    fn into_filter(self) -> Result<EventFilter, String> {
        Ok(EventFilter {
            included_event_types: self.included_event_types,
            subject_begins_with: self.subject_begins_with,
            subject_ends_with: self.subject_ends_with,
            subject_case_sensitive: self.subject_case_sensitive,
            arrays: self.arrays,
            advanced: self
                .advanced
                .into_iter()
                .map(AdvancedFilterRecord::into_filter)
                .collect::<Result<_, _>>()?,
            keys: match self.keys {
                KeysRecord::Cloud => KeyStyle::Cloud,
                KeysRecord::Edge => KeyStyle::Edge,
            },
        })
    }
}

impl AdvancedFilterRecord {
    fn of(filter: &AdvancedFilter) -> AdvancedFilterRecord {
        let operand = match filter.test.operands() {
            FilterOperands::Numbers(numbers) => {
                OperandRecord::Numbers(numbers.iter().map(Decimal::to_string).collect())
            }
            FilterOperands::Number(number) => OperandRecord::Number(number.to_string()),
            FilterOperands::Ranges(ranges) => OperandRecord::Ranges(
                ranges
                    .iter()
                    .map(|(a, b)| [a.to_string(), b.to_string()])
                    .collect(),
            ),
            FilterOperands::Bool(value) => OperandRecord::Bool(value),
            FilterOperands::Strings(values) => OperandRecord::Strings(values.to_vec()),
            FilterOperands::Nothing => OperandRecord::Nothing,
        };
        AdvancedFilterRecord {
            operator: filter.test.operator().into(),
            key: filter.key.clone(),
            operand,
        }
    }

    fn into_filter(self) -> Result<AdvancedFilter, String> {
        let name = self.operator;
        let operator = operator_from_name(&name).ok_or_else(|| format!("there is no operator {name:?}"))?;
        let number = |text: String| {
            Decimal::parse(&text).ok_or_else(|| format!("a number of the operator {name} is none"))
        };
        let test = match (operator.operand, self.operand) {
            (OperandKind::Number(test), OperandRecord::Number(text)) => test(number(text)?),
            (OperandKind::Numbers(test), OperandRecord::Numbers(texts)) => {
                test(texts.into_iter().map(number).collect::<Result<_, _>>()?)
            }
            (OperandKind::Ranges(test), OperandRecord::Ranges(ranges)) => {
                let range = |[from, to]: [String; 2]| Ok((number(from)?, number(to)?));
                test(ranges.into_iter().map(range).collect::<Result<_, String>>()?)
            }
            (OperandKind::Bool(test), OperandRecord::Bool(value)) => test(value),
            (OperandKind::Strings(test), OperandRecord::Strings(values)) => test(values),
            (OperandKind::Nothing(test), OperandRecord::Nothing) => test(),
            _ => return Err(format!("the operator {name} has an operand of the wrong kind")),
        };
        Ok(AdvancedFilter { key: self.key, test })
    }
}

fn exposed(secret: &Secret) -> String {
    secret.expose().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::filter::{FilterCondition, OPERATORS};

    /// Pseudo-random values; the same seed gives the same sequence.
    struct RandomValues(u64);

    impl RandomValues {
        fn roll(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut x = self.0;
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        }
        fn below(&mut self, n: u64) -> u64 {
            self.roll() % n
        }
        fn bool(&mut self) -> bool {
            self.below(2) == 1
        }
        fn text(&mut self) -> String {
            let letters = [
                'a', 'Z', '0', '/', '"', '\\', '\n', '\0', '\u{7f}', 'ü', '\u{2028}', '😀',
            ];
            (0..self.below(8))
                .map(|_| letters[self.below(letters.len() as u64) as usize])
                .collect()
        }
        fn secret(&mut self) -> Secret {
            Secret::new(self.text())
        }
        fn maybe<T>(&mut self, make: impl FnOnce(&mut RandomValues) -> T) -> Option<T> {
            self.bool().then(|| make(self))
        }
        fn some<T>(&mut self, mut make: impl FnMut(&mut RandomValues) -> T) -> Vec<T> {
            (0..self.below(4)).map(|_| make(self)).collect()
        }
        fn time(&mut self) -> Timestamp {
            Timestamp::from_nanos(self.roll() as i64)
        }
        fn count(&mut self) -> u32 {
            self.roll() as u32
        }
        fn schema(&mut self) -> EventSchema {
            [
                EventSchema::EventGrid,
                EventSchema::CloudEvent,
                EventSchema::Custom,
            ][self.below(3) as usize]
        }
        fn decimal(&mut self) -> Decimal {
            let (sign, whole, fraction) = (["", "-"][self.below(2) as usize], self.roll(), self.roll());
            let exponent = self.below(19_999) as i64 - 9_999;
            let text = match self.below(4) {
                0 => "0".into(),
                1 => format!("{sign}{}", whole % 100),
                2 => format!("{sign}{whole}.{fraction}"),
                _ => format!("{sign}{whole}.{fraction}e{exponent}"),
            };
            Decimal::parse(&text).unwrap()
        }
        fn test(&mut self) -> FilterCondition {
            match OPERATORS[self.below(OPERATORS.len() as u64) as usize].operand {
                OperandKind::Number(test) => test(self.decimal()),
                OperandKind::Numbers(test) => test(self.some(RandomValues::decimal)),
                OperandKind::Ranges(test) => test(self.some(|dice| (dice.decimal(), dice.decimal()))),
                OperandKind::Bool(test) => test(self.bool()),
                OperandKind::Strings(test) => test(self.some(RandomValues::text)),
                OperandKind::Nothing(test) => test(),
            }
        }
        fn mapped(&mut self) -> MappedField {
            MappedField {
                source_field: self.maybe(RandomValues::text),
                default_value: self.maybe(RandomValues::text),
            }
        }
        fn identity(&mut self) -> ResourceIdentity {
            ResourceIdentity {
                kind: self.text(),
                user_assigned: self.maybe(RandomValues::text),
            }
        }
        fn batching(&mut self) -> BatchSettings {
            BatchSettings {
                events_max: self.maybe(RandomValues::count),
                preferred_kilobytes: self.maybe(RandomValues::count),
            }
        }
        fn broker(&mut self) -> BrokerAddress {
            if self.bool() {
                BrokerAddress::Resource(self.text())
            } else {
                BrokerAddress::Connection(self.secret())
            }
        }
        fn attribute(&mut self) -> DeliveryAttribute {
            let value = match self.bool() {
                true => AttributeValue::Static {
                    value: self.secret(),
                    secret: self.bool(),
                },
                false => AttributeValue::Dynamic {
                    source_field: self.text(),
                },
            };
            DeliveryAttribute {
                name: self.text(),
                value,
            }
        }
        fn destination(&mut self) -> Destination {
            match self.below(9) {
                0 => Destination::WebHook(WebHook {
                    url: self.secret(),
                    batching: self.batching(),
                    attributes: self.some(RandomValues::attribute),
                    aad_tenant: self.maybe(RandomValues::text),
                    aad_application: self.maybe(RandomValues::text),
                    rate_max: self.maybe(RandomValues::count),
                }),
                1 => Destination::EventGrid {
                    url: self.text(),
                    sas_key: self.secret(),
                    topic_name: self.maybe(RandomValues::text),
                    batching: self.batching(),
                },
                2 => Destination::EdgeHub { output: self.text() },
                3 => Destination::AzureFunction {
                    resource: self.text(),
                    batching: self.batching(),
                    attributes: self.some(RandomValues::attribute),
                },
                4 => Destination::StorageQueue {
                    resource: self.text(),
                    queue: self.text(),
                    message_ttl_secs: self.maybe(|dice| dice.roll() as i64),
                },
                5 => Destination::EventHub {
                    resource: self.broker(),
                    attributes: self.some(RandomValues::attribute),
                },
                6 => Destination::HybridConnection {
                    resource: self.broker(),
                    attributes: self.some(RandomValues::attribute),
                },
                7 => Destination::ServiceBusQueue {
                    resource: self.broker(),
                    attributes: self.some(RandomValues::attribute),
                },
                _ => Destination::ServiceBusTopic {
                    resource: self.broker(),
                    attributes: self.some(RandomValues::attribute),
                },
            }
        }
        fn filter(&mut self) -> EventFilter {
            EventFilter {
                included_event_types: self.maybe(|dice| dice.some(RandomValues::text)),
                subject_begins_with: self.maybe(RandomValues::text),
                subject_ends_with: self.maybe(RandomValues::text),
                subject_case_sensitive: self.bool(),
                arrays: self.bool(),
                advanced: self.some(|dice| AdvancedFilter {
                    key: dice.text(),
                    test: dice.test(),
                }),
                keys: if self.bool() {
                    KeyStyle::Edge
                } else {
                    KeyStyle::Cloud
                },
            }
        }
        fn pauses(&mut self) -> SubscriptionPauses {
            let mut pauses = SubscriptionPauses::default();
            let mut now = 0;
            for _ in 0..self.below(5) {
                now += 1 + self.below(1 << 40) as i64;
                let at = Timestamp::from_nanos(now);
                if !pauses.end(at) {
                    pauses.begin(at);
                }
            }
            pauses
        }
        fn subscription(&mut self) -> Subscription {
            Subscription {
                id: SubscriptionId(self.roll()),
                name: self.text(),
                topic: TopicId(self.roll()),
                domain_topic: self.maybe(RandomValues::text),
                destination: self.destination(),
                identity: self.maybe(RandomValues::identity),
                filter: self.filter(),
                labels: self.some(RandomValues::text),
                expires: self.maybe(RandomValues::time),
                delivery_schema: self.schema(),
                retry: SubscriptionRetrySettings {
                    attempts_max: self.maybe(RandomValues::count),
                    time_to_live_minutes: self.maybe(RandomValues::count),
                },
                dead_letter: self.maybe(|dice| DeadLetterDestination {
                    account: dice.text(),
                    container: dice.text(),
                }),
                dead_letter_identity: self.maybe(RandomValues::identity),
                profile: self.maybe(RandomValues::text),
                created: self.time(),
                origin: [
                    ResourceOrigin::Edge,
                    ResourceOrigin::Config,
                    ResourceOrigin::Azure,
                ][self.below(3) as usize],
                pauses: self.pauses(),
                extras: self.maybe(RandomValues::text),
            }
        }
        fn headers(&mut self) -> Vec<(String, String)> {
            self.some(|dice| (dice.text(), dice.text()))
        }
        fn exchange(&mut self) -> HandshakeExchange {
            HandshakeExchange {
                at: self.time(),
                method: self.text(),
                url: self.text(),
                headers: self.headers(),
                received: match self.bool() {
                    true => HandshakeResponse::Answer {
                        status: self.roll() as u16,
                        headers: self.headers(),
                        body: self.text(),
                    },
                    false => HandshakeResponse::Nothing(self.text()),
                },
                verdict: self.text(),
            }
        }
        fn handshake(&mut self) -> Handshake {
            Handshake {
                operation: self.text(),
                subscription: self.subscription(),
                replaces: self.bool(),
                trial: self.bool(),
                code: self.text(),
                token: self.secret(),
                callback: self.maybe(RandomValues::secret),
                begun: self.time(),
                by: self.maybe(RandomValues::text),
                state: match self.below(3) {
                    0 => HandshakeState::Asking,
                    1 => HandshakeState::Awaiting { until: self.time() },
                    _ => HandshakeState::Failed {
                        at: self.time(),
                        message: self.text(),
                    },
                },
                transcript: self.some(RandomValues::exchange),
            }
        }
        fn topic(&mut self) -> Topic {
            Topic {
                id: TopicId(self.roll()),
                name: self.text(),
                kind: match self.below(4) {
                    0 => TopicKind::Custom,
                    1 => TopicKind::Domain {
                        auto_create: self.bool(),
                        auto_delete: self.bool(),
                    },
                    2 => TopicKind::System {
                        source: self.text(),
                        topic_type: self.text(),
                    },
                    _ => TopicKind::Scope {
                        source: self.text(),
                        topic_type: self.text(),
                    },
                },
                resource_group: self.text(),
                location: self.text(),
                tags: self.some(|dice| (dice.text(), dice.text())).into_iter().collect(),
                input_schema: self.schema(),
                mapping: self.maybe(|dice| InputMapping {
                    id: dice.mapped(),
                    topic: dice.mapped(),
                    event_time: dice.mapped(),
                    event_type: dice.mapped(),
                    subject: dice.mapped(),
                    data_version: dice.mapped(),
                }),
                keys: [self.secret(), self.secret()],
                local_auth_disabled: self.bool(),
                public_network: self.bool(),
                inbound_ip_rules: self.some(RandomValues::text),
                profile: self.maybe(RandomValues::text),
                created: self.time(),
                extras: self.maybe(RandomValues::text),
                edge: self.maybe(RandomValues::bool),
            }
        }
    }

    fn check<T: StoredRecord + PartialEq + std::fmt::Debug>(value: &T, seed: u64) {
        let bytes = value.encode();
        assert!(bytes.starts_with(BEGINNING));
        assert_eq!(T::decode(&bytes).as_ref(), Ok(value), "seed {seed}");
        // Members that a newer program of the same version adds are ignored.
        let text = String::from_utf8(bytes).unwrap();
        let more = text.replacen('{', "{\"added\":{\"later\":[1]},", 1);
        assert_eq!(T::decode(more.as_bytes()).as_ref(), Ok(value), "seed {seed}");
    }

    #[test]
    fn everything_comes_back_as_it_was() {
        for seed in 0..3000 {
            let mut dice = RandomValues(seed);
            check(&dice.subscription(), seed);
            check(&dice.topic(), seed);
            check(&dice.handshake(), seed);
            let topic = DomainTopic {
                domain: TopicId(dice.roll()),
                name: dice.text(),
                automatic: dice.bool(),
                created: dice.time(),
            };
            check(&topic, seed);
            let delay = EndpointDelay {
                endpoint: dice.text(),
                delay: EndpointProbationDelay {
                    cause: Outcome::ALL[dice.below(Outcome::ALL.len() as u64) as usize],
                    status: dice.maybe(|dice| dice.roll() as u16),
                    since: dice.time(),
                    until: dice.time(),
                    step: Duration::from_nanos(dice.roll()),
                },
                by: dice.maybe(RandomValues::text),
            };
            check(&delay, seed);
            let mut blob = BlobRecord {
                id: BlobId(dice.roll()),
                subscription: SubscriptionId(dice.roll()),
                subscription_name: dice.text(),
                topic_name: dice.text(),
                account: dice.text(),
                container: dice.text(),
                path: dice.text(),
                written: dice.time(),
                bytes: dice.roll(),
                sha256: dice.maybe(|dice| std::array::from_fn(|_| dice.roll() as u8)),
                marks: dice.some(|dice| DeadLetterMark {
                    reason: GiveUpReason::ALL[dice.below(GiveUpReason::ALL.len() as u64) as usize],
                    replays: dice.roll() as u8,
                    purged: dice.bool(),
                }),
            };
            assert_eq!(
                decode_marks(&encode_marks(&blob.marks)),
                blob.marks,
                "seed {seed}"
            );
            blob.marks.clear();
            check(&blob, seed);
            let states = [ReplayState::Running, ReplayState::Cancelled, ReplayState::Done];
            let job = ReplayJob {
                id: dice.roll(),
                request: dice.text(),
                created: dice.time(),
                next: (BlobId(dice.roll()), dice.count()),
                last: BlobId(dice.roll()),
                replayed: dice.roll(),
                failed: dice.roll(),
                unreadable: dice.roll(),
                unreadable_blobs: (0..dice.below(3))
                    .map(|_| UnreadableBlob {
                        id: BlobId(dice.roll()),
                        account: dice.text(),
                        container: dice.text(),
                        path: dice.text(),
                        letters: dice.roll(),
                        fault: [BlobFault::Missing, BlobFault::Damaged, BlobFault::NoAccount]
                            [dice.below(3) as usize],
                        reason: dice.text(),
                    })
                    .collect(),
                state: states[dice.below(3) as usize],
            };
            check(&job, seed);
        }
    }

    #[test]
    fn refuses_newer_and_damaged_records() {
        let check = |bytes: &[u8], expected: &str| {
            let error = DomainTopic::decode(bytes).unwrap_err().to_string();
            assert_eq!(error, expected);
        };
        check(
            br#"{"v":2,"domain":"now a string"}"#,
            "the stored domain topic has version 2, but this program reads versions up to 1",
        );
        check(b"", "the stored domain topic cannot be read: Eof error at byte 0");
        check(
            b"{}",
            "the stored domain topic cannot be read: Data error at byte 2",
        );
        check(
            br#"{"v":1,"domain":"hunter2","name":"n","created":1}"#,
            "the stored domain topic cannot be read: Data error at byte 25",
        );

        let text = String::from_utf8(RandomValues(1).subscription().encode()).unwrap();
        for end in 0..text.len() {
            if text.is_char_boundary(end) {
                assert!(Subscription::decode(&text.as_bytes()[..end]).is_err(), "{end}");
            }
        }
    }

    #[test]
    fn refuses_operands_of_the_wrong_kind() {
        let check = |operator: &str, operand: OperandRecord, expected: &str| {
            let record = AdvancedFilterRecord {
                operator: operator.into(),
                key: "k".into(),
                operand,
            };
            assert_eq!(record.into_filter().unwrap_err(), expected);
        };
        check("Near", OperandRecord::Nothing, "there is no operator \"Near\"");
        check(
            "NumberIn",
            OperandRecord::Bool(true),
            "the operator NumberIn has an operand of the wrong kind",
        );
        check(
            "NumberLessThan",
            OperandRecord::Number("x".into()),
            "a number of the operator NumberLessThan is none",
        );
    }

    // A golden record: data on disk must stay readable for as long as version 1 exists.
    #[test]
    fn the_stored_form_stays() {
        let text = r#"{"v":1,"id":7,"name":"s","topic":3,"domain_topic":null,"destination":{"type":"web_hook","url":"https://a/?k=1","batching":{"events_max":10,"preferred_kilobytes":null},"attributes":[{"name":"X","type":"static","value":"v","secret":true},{"name":"Y","type":"dynamic","source_field":"data.y"}],"aad_tenant":null,"aad_application":null},"identity":null,"filter":{"included_event_types":["a"],"subject_begins_with":"/","subject_ends_with":null,"subject_case_sensitive":false,"arrays":true,"advanced":[{"operator":"NumberInRange","key":"data.n","operand":{"ranges":[["1","2.5"]]}},{"operator":"IsNotNull","key":"data.m","operand":"nothing"}],"keys":"edge"},"labels":["l"],"expires":5,"delivery_schema":"event_grid","attempts_max":3,"time_to_live_minutes":null,"dead_letter":{"account":"a","container":"c"},"dead_letter_identity":null,"profile":"edge","created":1,"origin":"edge","extras":"{}"}"#;
        let subscription = Subscription::decode(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(subscription.encode()).unwrap(), text);
        assert!(subscription.pauses.is_empty());
        let paused = text.replace(r#""extras":"{}"}"#, r#""extras":"{}","pauses":[[5,7],[9,null]]}"#);
        let subscription = Subscription::decode(paused.as_bytes()).unwrap();
        assert_eq!(subscription.pauses.since(), Some(Timestamp::from_nanos(9)));
        assert_eq!(String::from_utf8(subscription.encode()).unwrap(), paused);

        let text = r#"{"v":1,"id":3,"name":"t","kind":{"type":"domain","auto_create":true,"auto_delete":false},"resource_group":"g","location":"here","tags":{"a":"b"},"input_schema":"custom","mapping":{"id":{"source_field":"i","default_value":null},"topic":{"source_field":null,"default_value":null},"event_time":{"source_field":null,"default_value":null},"event_type":{"source_field":null,"default_value":"d"},"subject":{"source_field":null,"default_value":null},"data_version":{"source_field":null,"default_value":null}},"keys":["k1","k2"],"local_auth_disabled":false,"public_network":true,"inbound_ip_rules":[],"profile":null,"created":1,"extras":null}"#;
        let topic = Topic::decode(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(topic.encode()).unwrap(), text);
        assert_eq!(topic.edge, None);
        let of_edge = Topic {
            edge: Some(true),
            ..topic
        };
        let stored = String::from_utf8(of_edge.encode()).unwrap();
        assert_eq!(
            stored,
            text.replace(r#""extras":null}"#, r#""extras":null,"edge":true}"#)
        );
        assert_eq!(Topic::decode(stored.as_bytes()), Ok(of_edge));

        let text = r#"{"v":1,"domain":3,"name":"d","automatic":true,"created":1}"#;
        let topic = DomainTopic::decode(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(topic.encode()).unwrap(), text);
        // The record as older programs wrote it.
        let older = DomainTopic::decode(br#"{"v":1,"domain":3,"name":"d","created":1}"#).unwrap();
        assert_eq!((older.automatic, older.name), (false, topic.name));

        let text = r#"{"v":1,"id":4,"name":"store","kind":{"type":"scope","source":"/subscriptions/x","topic_type":"Microsoft.Resources.Subscriptions"},"resource_group":"","location":"","tags":{},"input_schema":"event_grid","mapping":null,"keys":["",""],"local_auth_disabled":true,"public_network":false,"inbound_ip_rules":[],"profile":null,"created":1,"extras":null}"#;
        let topic = Topic::decode(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(topic.encode()).unwrap(), text);

        let text = r#"{"v":1,"id":9,"subscription":7,"subscription_name":"s","topic_name":"t","account":"a","container":"c","path":"T/S/1.json","written":1,"bytes":2}"#;
        let blob = BlobRecord::decode(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(blob.encode()).unwrap(), text);
        let marks = [0x02, 3, 0x81, 255];
        assert_eq!(encode_marks(&decode_marks(&marks)), marks);

        let text = r#"{"v":1,"id":2,"request":"{}","created":1,"next":[9,3],"last":12,"replayed":4,"failed":5,"state":"running"}"#;
        let job = ReplayJob::decode(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(job.encode()).unwrap(), text);

        let text = r#"{"v":1,"endpoint":"https://a:8443/b","cause":7,"since":1000000000,"until":11000000000,"step":10000000000}"#;
        let delay = EndpointDelay::decode(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(delay.encode()).unwrap(), text);
        assert_eq!(delay.by, None);
        let text = text.replace("}", r#","status":503,"by":"node-1"}"#);
        let of_node = EndpointDelay::decode(text.as_bytes()).unwrap();
        assert_eq!(
            (of_node.by.as_deref(), of_node.delay.status),
            (Some("node-1"), Some(503))
        );
        assert_eq!(String::from_utf8(of_node.encode()).unwrap(), text);
        let expected = EndpointProbationDelay {
            cause: Outcome::Busy,
            status: None,
            since: Timestamp::from_secs(1),
            until: Timestamp::from_secs(11),
            step: Duration::from_secs(10),
        };
        assert_eq!(
            (delay.endpoint.as_str(), delay.delay),
            ("https://a:8443/b", expected)
        );
    }
}
