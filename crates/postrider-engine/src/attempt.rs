//! The values of an attempt: claims are turned into a request, and a reply into an outcome.

pub mod sign;
pub mod queue;
pub mod broker;
pub mod trace;

use crate::deliver::{
    DeliveryReply, DeliveryRequest, DeliveryTransport, PendingReply, SendGuard, TransportFailure,
    TransportFailureKind,
};
use crate::destinations::{ConfiguredDestinations, DestinationAccess};
use crate::directory::TopicEntry;
use crate::endpoint;
use crate::in_flight::{ATTEMPT_OVERHEAD, InFlightCharge, InFlightNeed, SHARED_ENTRY_MIN};
use crate::masking::{ConfiguredSecret, SentSecrets};
use broker::{BROKER_PROPERTIES, BrokerEntity, SERVICE_BUS_AUTHORIZATION, quoted};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, ORIGIN, RETRY_AFTER};
use http::{Method, Uri};
use postrider_core::body::{BodyBuilder, DeliveryBody, RenderOutput, SHARED_PIECE_MIN};
use postrider_core::envelope::{EventEnvelope, KeyStyle};
use postrider_core::event::{EventSchema, system_id};
use postrider_core::json::RawJson;
use postrider_core::outcome::Outcome;
use postrider_core::profile::{EndpointKind, Profile};
use postrider_core::render::{self, EventRendering, TopicValue};
use postrider_core::retry::{MadeAttempt, RetryPolicy};
use postrider_core::subscription::{
    AttributeValue, BatchDefaults, Destination, ResourceOrigin, Subscription, Topic, TopicKind,
};
use postrider_core::time::{Clock, Timestamp};
use postrider_store::{Claim, ClaimLimits, LogEntry};
use queue::StorageQueueTarget;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;
use trace::AttemptTracing;

/// Everything that an attempt for one subscription needs, derived once from its configuration.
pub struct DeliveryPlan {
    pub subscription: Arc<Subscription>,
    pub topic: AttemptTopic,
    pub profile: &'static Profile,
    pub policy: RetryPolicy,
    pub kind: EndpointKind,
    pub want: ClaimLimits,
    /// The response timeout.
    pub response_wait: Duration,
    pub endpoint: Arc<endpoint::Endpoint>,
    url: Arc<Uri>,
    /// Headers that are the same for every attempt.
    headers: Arc<HeaderMap>,
    dynamic: Vec<(HeaderName, String)>,
    /// `<domain id>/topics/`
    domain_prefix: String,
    delivery: EventSchema,
    /// Whether the body is a JSON array.
    array: bool,
    keys: KeyStyle,
    log: u64,
    rate_max: Option<u32>,
    way: DeliveryMethod,
    /// Secrets from the configuration that requests carry; masked in whatever is recorded.
    secrets: Box<[ConfiguredSecret]>,
}

/// How claims are turned into requests.
#[derive(Debug)]
pub(crate) enum DeliveryMethod {
    /// The events are posted as they are, as to a webhook.
    Plain,
    /// Like [`DeliveryMethod::Plain`], through a relay that requires authorization of the sender.
    Relay {
        url: String,
        access: broker::BrokerAccess,
    },
    Queue(Arc<StorageQueueTarget>),
    Broker(BrokerEntity),
    /// The destination cannot be reached; the text says why.
    Unreachable(String),
}

impl DeliveryMethod {
    /// Whether a message is a single event object that is not wrapped in an array.
    fn one_object(&self) -> bool {
        match self {
            DeliveryMethod::Queue(_) => true,
            DeliveryMethod::Broker(broker) => broker.takes_single_objects(),
            DeliveryMethod::Plain | DeliveryMethod::Relay { .. } | DeliveryMethod::Unreachable(_) => false,
        }
    }

    /// Whether 201 means that the message was accepted, whatever statuses the profile counts as
    /// success.
    fn accepts_with_201(&self) -> bool {
        matches!(self, DeliveryMethod::Queue(_) | DeliveryMethod::Broker(_))
    }
}

/// The part of a topic that an attempt needs. Routes are left out: they change with every
/// subscription.
pub struct AttemptTopic {
    pub topic: Arc<Topic>,
    pub full_id: Arc<str>,
}

const DELIVERY_COUNT: HeaderName = HeaderName::from_static("aeg-delivery-count");
const DATA_VERSION: HeaderName = HeaderName::from_static("aeg-data-version");
const METADATA_VERSION: HeaderName = HeaderName::from_static("aeg-metadata-version");
const OUTPUT_EVENT_ID: HeaderName = HeaderName::from_static("aeg-output-event-id");
const SUBSCRIPTION_NAME: HeaderName = HeaderName::from_static("aeg-subscription-name");
const EVENT_TYPE: HeaderName = HeaderName::from_static("aeg-event-type");
const REPLAY: HeaderName = HeaderName::from_static("postrider-replay");
/// The number of deliveries that have led to this one, itself included. Always sent: a loop may
/// lead back here under another name or through a forwarder that this server does not know.
pub const HOPS: HeaderName = HeaderName::from_static("postrider-hops");
const FUNCTIONS_KEY: HeaderName = HeaderName::from_static("x-functions-key");
const SAS_KEY: HeaderName = HeaderName::from_static("aeg-sas-key");

/// The JSON that stamping adds to an Event Grid event, besides the topic's id.
const STAMPS: usize = r#","topic":"","dataVersion":"","metadataVersion":"1","#.len();

impl DeliveryPlan {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is something else, and only the dispatcher calls it"
    )]
    pub fn new(
        subscription: Arc<Subscription>,
        topic: &TopicEntry,
        profile: &'static Profile,
        defaults: BatchDefaults,
        safety_net: bool,
        log: u64,
        destinations: &ConfiguredDestinations,
        endpoint: impl FnOnce(&Uri) -> Arc<endpoint::Endpoint>,
    ) -> DeliveryPlan {
        let reach = destinations
            .reach(&subscription.destination)
            .unwrap_or_else(|why| {
                let (subscription, reason) = (&subscription.name, &why.reason);
                tracing::warn!(%subscription, field = why.field, %reason, "events cannot be delivered");
                DestinationAccess::nowhere(&why)
            });
        let DestinationAccess {
            url,
            kind,
            way,
            function_key,
            secrets,
        } = reach;
        let rate_max = match &subscription.destination {
            Destination::WebHook(hook) => hook.rate_max,
            _ => None,
        };
        let input = topic.topic.input_schema;
        let delivery = render::delivered_schema(input, subscription.delivery_schema);
        let edge = subscription.origin == ResourceOrigin::Edge;
        let batching = subscription.destination.batching();
        let limits = batching.in_force(defaults.of(subscription.origin));
        let bytes_max = limits.kilobytes as usize * 1024;
        let array = (delivery != EventSchema::CloudEvent || limits.is_batched()) && !way.one_object();
        let domain = matches!(topic.topic.kind, TopicKind::Domain { .. });
        let retry = subscription.retry;
        let policy = RetryPolicy {
            attempts_max: retry.attempts_max.unwrap_or(profile.attempts_max),
            time_to_live: retry.time_to_live(profile),
            dead_letter: subscription.dead_letter.is_some(),
            safety_net,
        };
        let (mut headers, mut dynamic) = fixed_headers(&subscription, delivery, array);
        if let DeliveryMethod::Broker(broker) = &way {
            broker.adapt(&mut headers, &mut dynamic);
        }
        if let Some(key) = function_key {
            headers.insert(FUNCTIONS_KEY, key);
        }
        let overhead = 1 + if delivery == input {
            STAMPS + topic.full_id.len()
        } else {
            // Conversion to the other schema writes the envelope again.
            STAMPS + topic.full_id.len() + 256
        };
        DeliveryPlan {
            profile,
            policy,
            kind,
            response_wait: profile.response_wait(limits.events_max as usize),
            want: ClaimLimits {
                events_max: limits.events_max as usize,
                bytes_max: bytes_max.saturating_sub(2),
                overhead,
            },
            endpoint: endpoint(&url),
            url,
            headers: Arc::new(headers),
            dynamic,
            domain_prefix: if domain {
                format!("{}/topics/", topic.full_id)
            } else {
                String::new()
            },
            delivery,
            array,
            keys: if edge { KeyStyle::Edge } else { KeyStyle::Cloud },
            log,
            rate_max,
            way,
            secrets,
            subscription,
            topic: AttemptTopic {
                topic: topic.topic.clone(),
                full_id: topic.full_id.clone(),
            },
        }
    }

    /// The secrets that requests carry, to be masked in recorded answers.
    pub fn sent_secrets(&self) -> SentSecrets {
        SentSecrets::of(&self.subscription, &self.secrets)
    }

    /// Limits that the subscription's endpoint puts on sending: rate and probation.
    pub fn sender(&self) -> endpoint::SenderLimits {
        endpoint::SenderLimits {
            has_probation: self.profile.probation.is_some(),
            rate_max: self.rate_max,
        }
    }

    /// Whether an operator has paused the subscription.
    pub fn is_paused(&self) -> bool {
        self.subscription.pauses.is_paused()
    }

    /// The value of `topic` that the subscriber sees.
    fn topic_value(&self) -> TopicValue<'_> {
        match &self.subscription.destination {
            // A CloudEvent must have a source. Without a configured name the source is the topic
            // that the event was first published to.
            Destination::EventGrid { topic_name, .. }
                if topic_name.is_some() || self.delivery != EventSchema::CloudEvent =>
            {
                TopicValue::Overwrite(topic_name.as_deref())
            }
            _ if !self.domain_prefix.is_empty() => TopicValue::InDomain {
                prefix: &self.domain_prefix,
            },
            _ => TopicValue::Stamp(self.topic_name()),
        }
    }

    /// The topic's name for dynamic attributes: the edge module uses short names.
    fn topic_name(&self) -> &str {
        match self.subscription.origin {
            ResourceOrigin::Edge => &self.topic.topic.name,
            ResourceOrigin::Config | ResourceOrigin::Azure => &self.topic.full_id,
        }
    }

    pub fn rendering(&self) -> EventRendering<'_> {
        EventRendering {
            delivery: self.delivery,
            topic: self.topic_value(),
            mapping: self.topic.topic.mapping.as_ref(),
        }
    }

    /// The memory that an attempt for these claims keeps, for the budget of bytes in flight.
    pub fn in_flight_need(&self, claims: &[Claim]) -> InFlightNeed {
        let mut need = InFlightNeed {
            own: ATTEMPT_OVERHEAD,
            shared: Vec::new(),
        };
        let mut last: Option<&Arc<LogEntry>> = None;
        for claim in claims {
            let size = claim.object().len();
            need.own += match self.way {
                DeliveryMethod::Plain | DeliveryMethod::Relay { .. } if size >= SHARED_PIECE_MIN => 0,
                DeliveryMethod::Plain | DeliveryMethod::Relay { .. } | DeliveryMethod::Unreachable(_) => size,
                // The message is an encoded copy that exists next to the original event.
                DeliveryMethod::Queue(_) | DeliveryMethod::Broker(_) => 2 * size,
            };
            // Events of one publish request are mostly adjacent.
            if last.is_some_and(|last| Arc::ptr_eq(last, &claim.entry)) {
                continue;
            }
            last = Some(&claim.entry);
            match claim.entry.batch.memory_len() {
                bytes if bytes < SHARED_ENTRY_MIN => need.own += bytes,
                bytes if !need.shared.contains(&(claim.entry.first, bytes)) => {
                    need.shared.push((claim.entry.first, bytes));
                }
                _ => {}
            }
        }
        need
    }

    /// Sends one request that delivers these claims. Signatures use the machine's clock, not
    /// simulated time.
    pub fn send(
        &self,
        transport: Arc<dyn DeliveryTransport>,
        claims: &[Claim],
        charge: &Arc<InFlightCharge>,
        traced: &AttemptTracing,
        guard: &SendGuard,
        wall: &dyn Clock,
    ) -> PendingReply {
        let charged = |mut request: DeliveryRequest| {
            request.body.charge = Some(charge.clone());
            request.guard = Some(guard.clone());
            request
        };
        match &self.way {
            DeliveryMethod::Plain => transport.send(charged(self.request(claims, traced))),
            DeliveryMethod::Relay { url, access } => {
                let mut request = charged(self.request(claims, traced));
                let token = access.token(url, wall.now());
                request
                    .more
                    .extend(token.map(|token| (SERVICE_BUS_AUTHORIZATION, token)));
                transport.send(request)
            }
            DeliveryMethod::Queue(queue) => {
                let event = self.body(claims, &self.rendering()).to_bytes();
                queue.send(transport, &event, charge, guard, wall.now())
            }
            DeliveryMethod::Broker(broker) => {
                transport.send(charged(self.message(broker, claims, traced, wall.now())))
            }
            DeliveryMethod::Unreachable(why) => {
                Box::pin(std::future::ready(DeliveryReply::Failed(TransportFailure {
                    kind: TransportFailureKind::Resolution,
                    detail: why.clone(),
                })))
            }
        }
    }

    /// The request that delivers these claims.
    fn request(&self, claims: &[Claim], traced: &AttemptTracing) -> DeliveryRequest {
        let how = self.rendering();
        let mut more = self.more(claims, &how);
        self.tell(traced, &mut more);
        DeliveryRequest {
            method: Method::POST,
            url: self.url.clone(),
            headers: self.headers.clone(),
            more,
            body: self.body(claims, &how).into(),
            guard: None,
        }
    }

    /// The request for a broker, whose messages are one event each.
    fn message(
        &self,
        broker: &BrokerEntity,
        claims: &[Claim],
        traced: &AttemptTracing,
        now: Timestamp,
    ) -> DeliveryRequest {
        let mut request = self.request(claims, traced);
        for (_, value) in &mut request.more {
            *value = quoted(value);
        }
        if let Some(first) = claims.first() {
            let id = system_id(self.log, first.position());
            // Most subscriptions have no property that is looked up in the event: parse it only on
            // demand.
            let envelope = OnceCell::new();
            let properties = broker.properties(&id, |field| {
                self.look_up(envelope.get_or_init(|| self.envelope(first)), field)
            });
            request
                .more
                .extend(properties.map(|value| (BROKER_PROPERTIES, value)));
        }
        let authorization = broker.authorization(now);
        request
            .more
            .extend(authorization.map(|value| (AUTHORIZATION, value)));
        request
    }

    fn body(&self, claims: &[Claim], how: &EventRendering<'_>) -> DeliveryBody {
        // Events that the body refers to instead of copying need no space here; their stamps do.
        let copied = |claim: &Claim| {
            let len = render::delivered_len_hint(&claim.entry.batch, claim.index as usize, how) + 1;
            let event = claim.object().len();
            if event < SHARED_PIECE_MIN {
                len
            } else {
                len - event
            }
        };
        let mut body = BodyBuilder::with_capacity(claims.iter().map(copied).sum::<usize>() + 2);
        for (i, claim) in claims.iter().enumerate() {
            if self.array {
                body.text().push(if i == 0 { b'[' } else { b',' });
            }
            body.refer_to(&claim.entry.batch.body);
            let system_id = || system_id(self.log, claim.position());
            render::write_event(
                &mut body,
                &claim.entry.batch,
                claim.index as usize,
                how,
                system_id,
            );
        }
        if self.array {
            body.text().push(b']');
        }
        body.finish()
    }

    fn envelope<'a>(&'a self, claim: &'a Claim) -> EventEnvelope<'a> {
        let object = RawJson::trusted(claim.object());
        EventEnvelope::read(
            claim.entry.batch.schema,
            object,
            self.topic.topic.mapping.as_ref(),
        )
    }

    /// The value of a dynamic attribute.
    fn look_up<'a>(&'a self, envelope: &EventEnvelope<'a>, field: &str) -> Option<Cow<'a, str>> {
        render::dynamic_attribute(envelope, field, self.keys, self.topic_name())
    }

    /// The headers that differ from attempt to attempt.
    fn more(&self, claims: &[Claim], how: &EventRendering<'_>) -> Vec<(HeaderName, HeaderValue)> {
        let mut more = Vec::with_capacity(4 + self.dynamic.len());
        let made = claims.iter().map(|c| c.attempts_made).max().unwrap_or(0);
        let count = match made {
            0 => HeaderValue::from_static("0"),
            n => HeaderValue::from(n),
        };
        more.push((DELIVERY_COUNT, count));
        let Some(first) = claims.first() else {
            return more;
        };
        if let Ok(id) = HeaderValue::from_maybe_shared(Bytes::from(system_id(self.log, first.position()))) {
            more.push((OUTPUT_EVENT_ID, id));
        }
        let replays = claims.iter().map(|c| c.entry.batch.replay).max().unwrap_or(0);
        if replays > 0 {
            more.push((REPLAY, HeaderValue::from(replays)));
        }
        if matches!(self.way, DeliveryMethod::Plain | DeliveryMethod::Relay { .. }) {
            let hops = claims.iter().map(|c| c.entry.batch.hops).max().unwrap_or(0);
            more.push((HOPS, HeaderValue::from(hops.saturating_add(1))));
        }
        if self.delivery != EventSchema::CloudEvent {
            let version = render::data_version(&first.entry.batch, first.index as usize, how);
            if let Ok(version) = HeaderValue::from_bytes(version.as_bytes()) {
                more.push((DATA_VERSION, version));
            }
        }
        if !self.dynamic.is_empty() {
            let envelope = self.envelope(first);
            for (name, field) in &self.dynamic {
                let value = self.look_up(&envelope, field);
                if let Some(value) = value.and_then(|v| HeaderValue::from_bytes(v.as_bytes()).ok()) {
                    more.push((name.clone(), value));
                }
            }
        }
        more
    }

    /// The outcome of an attempt that got this reply.
    pub fn outcome(&self, reply: &DeliveryReply, now: Timestamp) -> AttemptResult {
        match reply {
            DeliveryReply::Answered(answer) => {
                let status = answer.status;
                let success =
                    self.profile.is_success(status) || (status == 201 && self.way.accepts_with_201());
                AttemptResult {
                    outcome: if success {
                        Outcome::Success
                    } else if status == 410 && matches!(self.way, DeliveryMethod::Broker(_)) {
                        // Brokers answer 410 for an entity that does not exist.
                        Outcome::NotFound
                    } else {
                        Outcome::of_failure_status(status)
                    },
                    status: Some(status),
                    retry_after: matches!(status, 429 | 503)
                        .then(|| retry_after(&answer.headers, now))
                        .flatten(),
                }
            }
            DeliveryReply::Failed(failure) => AttemptResult {
                outcome: match failure.kind {
                    TransportFailureKind::Resolution => Outcome::ResolutionError,
                    TransportFailureKind::Forbidden => Outcome::Forbidden,
                    TransportFailureKind::Socket => Outcome::SocketError,
                    TransportFailureKind::Proxy => Outcome::ProxyError,
                    // A withdrawn request is no attempt: the dispatcher releases its claims.
                    TransportFailureKind::Withdrawn => Outcome::SocketError,
                },
                status: None,
                retry_after: None,
            },
        }
    }
}

/// The outcome of one request, which holds for every event in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptResult {
    pub outcome: Outcome,
    pub status: Option<u16>,
    pub retry_after: Option<Duration>,
}

impl AttemptResult {
    pub const TIMED_OUT: AttemptResult = AttemptResult {
        outcome: Outcome::TimedOut,
        status: None,
        retry_after: None,
    };

    pub fn number(self, number: u32) -> MadeAttempt {
        MadeAttempt {
            number,
            outcome: self.outcome,
            status: self.status,
            retry_after: self.retry_after,
        }
    }
}

/// `Retry-After` in seconds or as a date.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    match text.parse::<u64>() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => Timestamp::parse_http_date(text).map(|at| at.since(now)),
    }
}

pub(crate) type FixedHeaders = (HeaderMap, Vec<(HeaderName, String)>);

pub(crate) fn fixed_headers(subscription: &Subscription, delivery: EventSchema, array: bool) -> FixedHeaders {
    // Sized for the usual number of headers: every subscription keeps its own map, idle or not.
    let attributes = subscription.destination.attributes();
    let mut headers = HeaderMap::with_capacity(if attributes.is_empty() { 6 } else { 12 });
    let content_type = match (delivery, array) {
        (EventSchema::CloudEvent, false) => "application/cloudevents+json; charset=utf-8",
        (EventSchema::CloudEvent, true) => "application/cloudevents-batch+json; charset=utf-8",
        _ => "application/json; charset=utf-8",
    };
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(EVENT_TYPE, HeaderValue::from_static("Notification"));
    if let Ok(name) = HeaderValue::from_str(&subscription.name.to_uppercase()) {
        headers.insert(SUBSCRIPTION_NAME, name);
    }
    let metadata = if delivery == EventSchema::CloudEvent {
        "1.0"
    } else {
        "1"
    };
    headers.insert(METADATA_VERSION, HeaderValue::from_static(metadata));
    if delivery == EventSchema::CloudEvent {
        headers.insert(ORIGIN, HeaderValue::from_static("eventgrid.azure.net"));
        let origin = HeaderName::from_static("webhook-request-origin");
        headers.insert(origin, HeaderValue::from_static("eventgrid.azure.net"));
    }
    if let Destination::EventGrid { sas_key, .. } = &subscription.destination
        && let Ok(mut key) = HeaderValue::from_str(sas_key.expose())
    {
        key.set_sensitive(true);
        headers.insert(SAS_KEY, key);
    }
    let mut dynamic = Vec::new();
    for attribute in attributes {
        let Ok(name) = HeaderName::from_bytes(attribute.name.as_bytes()) else {
            continue;
        };
        match &attribute.value {
            AttributeValue::Static { value, secret } => {
                if let Ok(mut value) = HeaderValue::from_bytes(value.expose().as_bytes()) {
                    value.set_sensitive(*secret);
                    headers.insert(name, value);
                }
            }
            AttributeValue::Dynamic { source_field } => dynamic.push((name, source_field.clone())),
        }
    }
    (headers, dynamic)
}
