//! Parsing of event subscriptions.

use super::destination::{parse_dead_letter, parse_destination, parse_identity, patch_destination};
use super::filter::{key_style, parse_filter};
use super::read::JsonNode;
use super::validate::{check_azure_subscription_name, check_name};
use super::{
    EchoedMembers, FieldError, ResourceLimits, Road, SCHEMAS, check_same_name, parse_profile, schema_name,
};
use postrider_core::event::EventSchema;
use postrider_core::filter::EventFilter;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::profile::Profile;
use postrider_core::subscription::{
    BatchDefaults, BatchLimits, BatchSettings, DeadLetterDestination, Destination, InputMapping,
    ResourceIdentity, Subscription, SubscriptionRetrySettings,
};
use postrider_core::time::Timestamp;

const LABELS_MAX: usize = 100;
const LABEL_CHARS_MAX: usize = 256;

/// The properties of a subscription that a body defines; the server assigns the others.
#[derive(Clone, Debug, PartialEq)]
pub struct SubscriptionSpec {
    pub name: String,
    pub destination: Destination,
    pub identity: Option<ResourceIdentity>,
    pub filter: EventFilter,
    pub labels: Vec<String>,
    pub expires: Option<Timestamp>,
    pub delivery_schema: EventSchema,
    pub retry: SubscriptionRetrySettings,
    pub dead_letter: Option<DeadLetterDestination>,
    pub dead_letter_identity: Option<ResourceIdentity>,
    pub profile: Option<String>,
    pub origin: Road,
    pub extras: Option<String>,
}

impl SubscriptionSpec {
    fn of(subscription: &Subscription) -> SubscriptionSpec {
        SubscriptionSpec {
            name: subscription.name.clone(),
            destination: subscription.destination.clone(),
            identity: subscription.identity.clone(),
            filter: subscription.filter.clone(),
            labels: subscription.labels.clone(),
            expires: subscription.expires,
            delivery_schema: subscription.delivery_schema,
            retry: subscription.retry,
            dead_letter: subscription.dead_letter.clone(),
            dead_letter_identity: subscription.dead_letter_identity.clone(),
            profile: subscription.profile.clone(),
            origin: subscription.origin,
            extras: subscription.extras.clone(),
        }
    }

    pub fn into_subscription(
        self,
        id: SubscriptionId,
        topic: TopicId,
        domain_topic: Option<String>,
        created: Timestamp,
    ) -> Subscription {
        Subscription {
            domain_topic,
            identity: self.identity,
            filter: self.filter,
            labels: self.labels,
            expires: self.expires,
            delivery_schema: self.delivery_schema,
            retry: self.retry,
            dead_letter: self.dead_letter,
            dead_letter_identity: self.dead_letter_identity,
            profile: self.profile,
            created,
            origin: self.origin,
            extras: self.extras,
            ..Subscription::new(id, topic, self.name, self.destination)
        }
    }
}

/// Facts about the topic that a subscription is made for.
#[derive(Clone, Copy, Debug)]
pub struct TopicContext<'a> {
    pub name: &'a str,
    pub input_schema: EventSchema,
    pub mapping: Option<&'a InputMapping>,
    /// Event types that a subscription gets if it names none; empty means all.
    pub default_types: &'a [&'a str],
}

/// Facts that are needed to validate a body.
#[derive(Clone, Copy, Debug)]
pub struct SubscriptionContext<'a> {
    pub road: Road,
    /// The name in the URL.
    pub name: &'a str,
    pub topic: TopicContext<'a>,
    pub limits: &'a ResourceLimits,
    pub now: Timestamp,
    /// The subscription that is replaced. Masked secrets are taken from it.
    pub previous: Option<&'a Subscription>,
    /// The version of the management API that was requested; empty for other APIs.
    pub api_version: &'a str,
    /// Values that reads of the previous subscription show: a client may always send these back.
    pub shown: Option<EffectiveSettings>,
}

/// Settings of a subscription as reads show them: its own, and defaults where it sets nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EffectiveSettings {
    pub batch: BatchLimits,
    pub attempts_max: u32,
    /// None if the time to live in force is no whole number of minutes.
    pub time_to_live_minutes: Option<u32>,
}

impl EffectiveSettings {
    pub fn of(subscription: &Subscription, profile: &Profile, defaults: &BatchDefaults) -> EffectiveSettings {
        let batching = subscription.destination.batching();
        let retry = subscription.retry;
        let seconds = retry.time_to_live(profile).as_secs();
        let minutes = u32::try_from(seconds / 60).unwrap_or(u32::MAX);
        EffectiveSettings {
            batch: batching.in_force(defaults.of(subscription.origin)),
            attempts_max: retry.attempts_max.unwrap_or(profile.attempts_max),
            time_to_live_minutes: (seconds > 0 && seconds.is_multiple_of(60)).then_some(minutes),
        }
    }
}

/// Parses a whole number between 1 and a limit. Above the limit only the shown value is accepted: a
/// client may send back what it has read.
pub(super) fn count_or_shown(
    node: &JsonNode<'_>,
    member: &str,
    limit: u32,
    shown: Option<u32>,
) -> Result<Option<u32>, FieldError> {
    let unchanged = shown.filter(|shown| *shown > limit);
    match unchanged.map(|shown| node.count(member, shown)) {
        Some(Ok(given)) if given == unchanged => Ok(given),
        _ => node.count(member, limit),
    }
}

impl SubscriptionContext<'_> {
    /// The API that created the subscription. It stays the origin when another API changes the
    /// subscription, since the spelling of its events, the spelling of its filters' keys and its
    /// defaults depend on it.
    fn origin(&self) -> Road {
        self.previous.map_or(self.road, |previous| previous.origin)
    }
}

/// Parses a subscription that is created or replaced as a whole. Destinations of every type are
/// accepted; the caller decides whether events can be delivered to them.
pub fn parse_subscription(
    body: RawJson<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<SubscriptionSpec, FieldError> {
    let road = context.road;
    let root = JsonNode::root(body)?;
    match road {
        Road::Azure => check_azure_subscription_name(context.name)?,
        Road::Edge | Road::Config => check_name(context.name)?,
    }
    check_same_name(&root, "name", road, context.name)?;
    let properties = root.need_object("properties")?;
    check_topic(&properties, context)?;

    let (place, identity) = one_of_two(&properties, "destination", "deliveryWithResourceIdentity", road)?;
    let Some(place) = place else {
        return Err(properties.at("destination").fail("is required"));
    };
    let destination = old_batching(&properties, context)
        .and_then(|batching| parse_destination(&place, batching, context))
        .map_err(|error| {
            if road == Road::Edge {
                error.of_edge_destination()
            } else {
                error
            }
        })?;

    let (dead_letter, dead_letter_identity) = one_of_two(
        &properties,
        "deadLetterDestination",
        "deadLetterWithResourceIdentity",
        road,
    )?;
    let dead_letter = dead_letter
        .map(|node| parse_dead_letter(&node, context))
        .transpose()?;

    let mut extras = EchoedMembers::default();
    let origin = context.origin();
    let filter = match properties.object("filter")? {
        Some(node) => {
            let mut filter = parse_filter(&node, road, origin, context.limits)?;
            extras.keep("filter", sent_defaults(&node, &filter));
            name_event_types(&mut filter, &node, context)?;
            filter
        }
        None => {
            let included_event_types = default_types(context);
            EventFilter {
                keys: key_style(origin),
                included_event_types,
                ..EventFilter::default()
            }
        }
    };
    keep_tls_version(&mut extras, &place, None)?;
    if let Some(policy) = parse_persistence(&properties, context)? {
        extras.keep("persistencePolicy", policy);
    }

    Ok(SubscriptionSpec {
        name: context.name.to_owned(),
        destination,
        identity,
        filter,
        labels: properties
            .strings("labels", LABELS_MAX, LABEL_CHARS_MAX)?
            .unwrap_or_default(),
        expires: parse_expiry(&properties, context)?,
        delivery_schema: parse_delivery_schema(&properties, &place, context)?,
        retry: parse_retry(&properties, context)?,
        dead_letter,
        dead_letter_identity,
        profile: parse_profile(&properties)?,
        origin,
        extras: extras.into_text(),
    })
}

/// Members that a PATCH can change. Other members of answers may be sent back with them.
const CHANGEABLE: [&str; 10] = [
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

/// Parses a change of the subscription that `context` names as the previous one. Members that the
/// change does not mention, or mentions as null, stay as they are; filters and lists are replaced
/// whole. The properties are in the body itself or, as in an answer, in its member `properties`.
/// Only what was sent is validated again.
pub fn patch_subscription(
    body: RawJson<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<SubscriptionSpec, FieldError> {
    let previous = context.previous.expect("a change has something to change");
    let road = context.road;
    let root = JsonNode::root(body)?;
    let properties = match root.object("properties")? {
        Some(wrapped) => wrapped,
        None => root,
    };
    if !properties.has_any(&CHANGEABLE) {
        return Err(properties.fail("must name something to change, such as labels"));
    }
    let mut extras = EchoedMembers::default();
    let kept_extras = previous
        .extras
        .as_deref()
        .and_then(|text| RawJson::parse(text).ok());
    let mut spec = SubscriptionSpec::of(previous);

    let (place, identity) = one_of_two(&properties, "destination", "deliveryWithResourceIdentity", road)?;
    if let Some(place) = &place {
        spec.destination = patch_destination(place, &previous.destination, context)?;
        spec.identity = identity;
    }
    let same_type =
        std::mem::discriminant(&spec.destination) == std::mem::discriminant(&previous.destination);
    match &place {
        Some(place) => keep_tls_version(&mut extras, place, kept_extras.filter(|_| same_type))?,
        None => extras.keep_all(kept_extras, &[TLS_VERSION]),
    }
    let (dead_letter, dead_letter_identity) = one_of_two(
        &properties,
        "deadLetterDestination",
        "deadLetterWithResourceIdentity",
        road,
    )?;
    if let Some(node) = dead_letter {
        spec.dead_letter = Some(parse_dead_letter(&node, context)?);
        spec.dead_letter_identity = dead_letter_identity;
    }
    match properties.object("filter")? {
        Some(node) => {
            spec.filter = parse_filter(&node, road, previous.origin, context.limits)?;
            extras.keep("filter", sent_defaults(&node, &spec.filter));
            name_event_types(&mut spec.filter, &node, context)?;
        }
        None => extras.keep_all(kept_extras, &["filter"]),
    }
    extras.keep_all(kept_extras, &["persistencePolicy"]);
    if let Some(labels) = properties.strings("labels", LABELS_MAX, LABEL_CHARS_MAX)? {
        spec.labels = labels;
    }
    spec.expires = parse_expiry(&properties, context)?.or(previous.expires);
    if properties.get("eventDeliverySchema").is_some() {
        // A PATCH has it only in this place; it is not searched beside the URL.
        spec.delivery_schema = parse_delivery_schema(&properties, &properties, context)?;
    }
    let retry = parse_retry(&properties, context)?;
    spec.retry = SubscriptionRetrySettings {
        attempts_max: retry.attempts_max.or(previous.retry.attempts_max),
        time_to_live_minutes: retry.time_to_live_minutes.or(previous.retry.time_to_live_minutes),
    };
    if properties.get("postrider").is_some() {
        spec.profile = parse_profile(&properties)?;
    }
    spec.extras = extras.into_text();
    Ok(spec)
}

/// Sets the event types of a filter. `["All"]` meant every type before a certain version of the
/// cloud's API.
fn name_event_types(
    filter: &mut EventFilter,
    node: &JsonNode<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<(), FieldError> {
    if context.road != Road::Azure {
        return Ok(());
    }
    let field = node.at("includedEventTypes");
    // The edge API and the configuration allow what is refused or a default here, and reads show it.
    let previous = context
        .previous
        .and_then(|previous| previous.filter.included_event_types.as_ref());
    if previous.is_some() && previous == filter.included_event_types.as_ref() {
        return Ok(());
    }
    match filter.included_event_types.as_deref() {
        None | Some([]) => filter.included_event_types = default_types(context),
        Some([word]) if word.eq_ignore_ascii_case("All") => {
            // Only the date counts, whether or not the version is a preview.
            if context
                .api_version
                .get(..10)
                .is_none_or(|day| day >= "2019-02-01")
            {
                let reason = "must be left out for all types: [\"All\"] is refused since 2019-02-01-preview";
                return Err(field.fail(reason));
            }
            filter.included_event_types = None;
        }
        Some(types) => {
            if let Some(at) = types.iter().position(String::is_empty) {
                let path = format!("{}[{at}]", field.path);
                return Err(FieldError::new(path, "must not be empty"));
            }
        }
    }
    Ok(())
}

fn default_types(context: &SubscriptionContext<'_>) -> Option<Vec<String>> {
    let types = context.topic.default_types;
    (context.road == Road::Azure && !types.is_empty())
        .then(|| types.iter().map(|name| (*name).to_owned()).collect())
}

const TLS_VERSION: &str = "minimumTlsVersionAllowed";

/// The oldest TLS version for a webhook is validated and echoed; this server uses none as old as
/// those.
fn keep_tls_version(
    extras: &mut EchoedMembers,
    place: &JsonNode<'_>,
    kept: Option<RawJson<'_>>,
) -> Result<(), FieldError> {
    let properties = place.at("properties");
    let words = [("1.0", "\"1.0\""), ("1.1", "\"1.1\""), ("1.2", "\"1.2\"")];
    match properties.word(TLS_VERSION, &words)? {
        Some(version) => extras.keep(TLS_VERSION, version),
        None => extras.keep_all(kept, &[TLS_VERSION]),
    }
    Ok(())
}

/// A topic name in the body must be the one in the URL. It may be the last segment of an id, as in
/// answers. In the cloud the member is an id that only answers have.
fn check_topic(properties: &JsonNode<'_>, context: &SubscriptionContext<'_>) -> Result<(), FieldError> {
    if context.road == Road::Azure {
        return Ok(());
    }
    for member in ["topicName", "topic"] {
        let Some(given) = properties.string(member)? else {
            continue;
        };
        let name = match given.rsplit_once("/topics/") {
            Some((id, name)) if id.starts_with('/') => name,
            _ => given.as_str(),
        };
        if name != context.topic.name {
            let expected = context.topic.name;
            let reason = format!("must be {expected:?} like the topic it is sent to, was {given:?}");
            return Err(properties.at(member).fail(reason));
        }
    }
    Ok(())
}

/// The destination, given directly or inside an object that adds an identity.
fn one_of_two<'a>(
    properties: &JsonNode<'a>,
    plain: &str,
    with_identity: &str,
    road: Road,
) -> Result<(Option<JsonNode<'a>>, Option<ResourceIdentity>), FieldError> {
    match (properties.object(plain)?, properties.object(with_identity)?) {
        (Some(_), Some(other)) => Err(other.fail(format!("must be left out beside {plain}"))),
        (destination, None) => Ok((destination, None)),
        (None, Some(node)) => {
            let identity = parse_identity(&node.need_object("identity")?, road)?;
            Ok((Some(node.need_object(plain)?), Some(identity)))
        }
    }
}

/// The batch limits in their old place at the edge, in bytes.
fn old_batching(
    properties: &JsonNode<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<BatchSettings, FieldError> {
    let policy = match context.road {
        Road::Edge => properties.object("deliveryPolicy")?,
        Road::Config | Road::Azure => None,
    };
    let Some(policy) = policy else {
        return Ok(BatchSettings::default());
    };
    // The documented maximum is 1058576 bytes, slightly more than the 1033 kilobytes that replaced
    // it.
    let bytes_max = context
        .limits
        .edge_batch_kilobytes_max
        .saturating_add(1)
        .saturating_mul(1024)
        - 1;
    let bytes = policy.count("approxBatchSizeInBytes", bytes_max)?;
    Ok(BatchSettings {
        events_max: policy.count("maxEventsPerBatch", context.limits.edge_batch_events_max)?,
        preferred_kilobytes: bytes.map(|bytes| (bytes / 1024).max(1)),
    })
}

/// The members of a filter that were sent with their default value. The model does not keep them,
/// but answers contain what was sent.
fn sent_defaults(node: &JsonNode<'_>, filter: &EventFilter) -> String {
    let mut sent = EchoedMembers::default();
    let flag = |name| node.get(name).is_some();
    if flag("isSubjectCaseSensitive") && !filter.subject_case_sensitive {
        sent.keep("isSubjectCaseSensitive", "false");
    }
    if flag("enableAdvancedFilteringOnArrays") && !filter.arrays {
        sent.keep("enableAdvancedFilteringOnArrays", "false");
    }
    if flag("advancedFilters") && filter.advanced.is_empty() {
        sent.keep("advancedFilters", "[]");
    }
    sent.into_text().unwrap_or_else(|| "{}".into())
}

/// Validates and echoes the edge's persistence policy, which cannot change: events are always
/// stored on disk here.
fn parse_persistence(
    properties: &JsonNode<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<Option<String>, FieldError> {
    let before = context.previous.filter(|previous| previous.origin == Road::Edge);
    let kept = before.and_then(|previous| {
        RawJson::parse(previous.extras.as_deref()?)
            .ok()?
            .get("persistencePolicy")
    });
    if context.road != Road::Edge {
        return Ok(kept.map(|kept| kept.text().to_owned()));
    }
    let is_persisted = |policy: &JsonNode<'_>| {
        if let Some(inner) = policy.get("isPersisted") {
            return inner.as_bool();
        }
        if policy.value.kind() == postrider_core::json::JsonKind::Object {
            return Ok(false);
        }
        policy.as_bool()
    };
    let Some(given) = properties.get("persistencePolicy") else {
        return Ok(kept.map(|kept| kept.text().to_owned()));
    };
    let now = is_persisted(&given)?;
    let kept = kept.map(|value| JsonNode {
        path: given.path.clone(),
        value,
    });
    let was = kept.map_or(Ok(false), |kept| is_persisted(&kept))?;
    if before.is_some() && now != was {
        return Err(given.fail("cannot be changed: delete the subscription and create it again"));
    }
    Ok(Some(given.value.text().to_owned()))
}

fn parse_expiry(
    properties: &JsonNode<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<Option<Timestamp>, FieldError> {
    let Some(text) = properties.string("expirationTimeUtc")? else {
        return Ok(None);
    };
    let reason = match Timestamp::parse(&text) {
        Some(expires) if expires > context.now => return Ok(Some(expires)),
        Some(_) => format!("must be in the future, was {text:?}"),
        None => format!("must be a time such as 2030-01-01T00:00:00Z, was {text:?}"),
    };
    let error = properties.at("expirationTimeUtc").fail(reason);
    Err(match context.road {
        Road::Azure => error.saying("Invalid expiration time."),
        Road::Edge | Road::Config => error,
    })
}

/// Parses the delivery schema: the topic's own, or another one that its events can be converted to.
fn parse_delivery_schema(
    properties: &JsonNode<'_>,
    destination: &JsonNode<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<EventSchema, FieldError> {
    let member = "eventDeliverySchema";
    let mut place = properties.clone();
    // Two samples of the edge put it beside the URL.
    if place.get(member).is_none() && context.road != Road::Azure {
        place = destination.at("properties");
    }
    let input = context.topic.input_schema;
    let unmapped = input == EventSchema::Custom && context.topic.mapping.is_none();
    let Some(given) = place.word(member, &SCHEMAS)? else {
        // The only property that a PUT in the cloud keeps although it is absent.
        if let (Road::Azure, Some(previous)) = (context.road, context.previous) {
            return Ok(previous.delivery_schema);
        }
        return Ok(match (context.road, input) {
            (Road::Edge, input) => input,
            (_, EventSchema::CloudEvent) => EventSchema::CloudEvent,
            (_, EventSchema::Custom) if unmapped => EventSchema::Custom,
            _ => EventSchema::EventGrid,
        });
    };
    let unchanged = context
        .previous
        .is_some_and(|previous| previous.delivery_schema == given);
    let possible = match (context.road, input) {
        _ if unchanged => true,
        (Road::Edge, input) => given == input,
        (_, EventSchema::EventGrid) => given != EventSchema::Custom,
        (_, EventSchema::CloudEvent) => given == EventSchema::CloudEvent,
        (_, EventSchema::Custom) => given == EventSchema::Custom || !unmapped,
    };
    if possible {
        return Ok(given);
    }
    let (given, input) = (schema_name(given), schema_name(input));
    let without = if unmapped {
        " without inputSchemaMapping"
    } else {
        ""
    };
    let reason = format!("cannot be {given}: the topic's input schema is {input}{without}");
    Err(place.at(member).fail(reason))
}

/// Parses the retry policy. The cloud has `eventTimeToLiveInMinutes` and narrow limits, the edge
/// `eventExpiryInMinutes` and none. Every API accepts either name: ignoring one silently would
/// change how long events live.
fn parse_retry(
    properties: &JsonNode<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<SubscriptionRetrySettings, FieldError> {
    let Some(policy) = properties.object("retryPolicy")? else {
        return Ok(SubscriptionRetrySettings::default());
    };
    let (attempts_most, minutes_most) = match context.road {
        Road::Azure => (30, 1440),
        Road::Edge | Road::Config => (u32::MAX, u32::MAX),
    };
    let shown = context.shown;
    let minutes = |member| {
        let shown = shown.and_then(|shown| shown.time_to_live_minutes);
        count_or_shown(&policy, member, minutes_most, shown)
    };
    let (cloud, edge) = ("eventTimeToLiveInMinutes", "eventExpiryInMinutes");
    let time_to_live_minutes = match (minutes(cloud)?, minutes(edge)?) {
        (Some(a), Some(b)) if a != b => {
            return Err(policy.at(edge).fail(format!("must be left out beside {cloud}")));
        }
        (a, b) => a.or(b),
    };
    let attempts = shown.map(|shown| shown.attempts_max);
    Ok(SubscriptionRetrySettings {
        attempts_max: count_or_shown(&policy, "maxDeliveryAttempts", attempts_most, attempts)?,
        time_to_live_minutes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::subscription::WebHook;

    const HOOK: &str =
        r#""destination":{"endpointType":"WebHook","properties":{"endpointUrl":"https://a/x"}}"#;
    const NOW: Timestamp = Timestamp::from_secs(1_900_000_000); // 2030-03-17

    fn parse_for(
        road: Road,
        (input_schema, mapped): (EventSchema, bool),
        body: &str,
        previous: Option<&Subscription>,
    ) -> Result<SubscriptionSpec, FieldError> {
        let mapping = InputMapping::default();
        let topic = TopicContext {
            name: "orders",
            input_schema,
            mapping: mapped.then_some(&mapping),
            default_types: &[],
        };
        let limits = ResourceLimits::default();
        let context = SubscriptionContext {
            road,
            name: "sub",
            topic,
            limits: &limits,
            now: NOW,
            previous,
            api_version: "2022-06-15",
            shown: None,
        };
        parse_subscription(RawJson::parse(body).unwrap(), &context)
    }

    /// A webhook with these further properties.
    fn parse_with(road: Road, properties: &str) -> Result<SubscriptionSpec, FieldError> {
        let body = format!("{{\"properties\":{{{HOOK}{properties}}}}}");
        parse_for(road, (EventSchema::EventGrid, false), &body, None)
    }

    fn check_error(road: Road, properties: &str, expected: &str) {
        let error = parse_with(road, properties).expect_err(properties);
        assert_eq!(error.to_string(), expected, "{properties}");
    }

    #[test]
    fn the_least_that_makes_a_subscription() {
        let spec = parse_with(Road::Config, "").unwrap();
        let expected = SubscriptionSpec {
            name: "sub".into(),
            destination: Destination::WebHook(WebHook {
                url: postrider_core::ids::Secret::new("https://a/x"),
                batching: BatchSettings::default(),
                attributes: Vec::new(),
                aad_tenant: None,
                aad_application: None,
                rate_max: None,
            }),
            identity: None,
            filter: EventFilter::default(),
            labels: Vec::new(),
            expires: None,
            delivery_schema: EventSchema::EventGrid,
            retry: SubscriptionRetrySettings::default(),
            dead_letter: None,
            dead_letter_identity: None,
            profile: None,
            origin: Road::Config,
            extras: None,
        };
        assert_eq!(spec, expected);
        assert_eq!(
            parse_with(Road::Edge, "").unwrap().filter.keys,
            key_style(Road::Edge)
        );
    }

    #[test]
    fn names_in_the_body_are_those_in_the_url() {
        let check = |road: Road, body: &str, expected: Result<(), &str>| {
            let got = parse_for(road, (EventSchema::EventGrid, false), body, None);
            assert_eq!(
                got.map(drop).map_err(|error| error.to_string()),
                expected.map_err(Into::into),
                "{body}"
            );
        };
        let with = |name: &str, properties: &str| format!("{{{name}\"properties\":{{{properties}{HOOK}}}}}");
        check(
            Road::Edge,
            &with(r#""name":"sub","#, r#""topicName":"orders","#),
            Ok(()),
        );
        check(Road::Edge, &with("", r#""Topic":"orders","#), Ok(()));
        check(
            Road::Edge,
            &with("", r#""topic":"/iotHubs/h/devices/d/modules/m/topics/orders","#),
            Ok(()),
        );
        check(
            Road::Azure,
            &with(r#""name":"SUB","#, r#""topic":"/subscriptions/s/other","#),
            Ok(()),
        );
        check(
            Road::Edge,
            &with(r#""name":"SUB","#, ""),
            Err("name must be \"sub\" like the resource it is sent to, was \"SUB\""),
        );
        check(
            Road::Edge,
            &with("", r#""topicName":"others","#),
            Err("properties.topicName must be \"orders\" like the topic it is sent to, was \"others\""),
        );
        check(
            Road::Config,
            &with("", r#""topic":"/x/topics/others","#),
            Err("properties.topic must be \"orders\" like the topic it is sent to, was \"/x/topics/others\""),
        );
        check(Road::Edge, "{}", Err("properties is required"));
        check(
            Road::Edge,
            r#"{"properties":{}}"#,
            Err("properties.destination is required"),
        );
        check(Road::Edge, "1", Err("the body must be an object, was a number"));
    }

    #[test]
    fn names_follow_the_rules_of_the_road() {
        let limits = ResourceLimits::default();
        let topic = TopicContext {
            name: "orders",
            input_schema: EventSchema::EventGrid,
            mapping: None,
            default_types: &[],
        };
        let body = format!("{{\"properties\":{{{HOOK}}}}}");
        let check = |road: Road, name: &str, good: bool| {
            let context = SubscriptionContext {
                road,
                name,
                topic,
                limits: &limits,
                now: NOW,
                previous: None,
                api_version: "",
                shown: None,
            };
            assert_eq!(
                parse_subscription(RawJson::parse(&body).unwrap(), &context).is_ok(),
                good,
                "{name}"
            );
        };
        check(Road::Edge, "a.b_c", true);
        check(Road::Config, "a.b_c", true);
        check(Road::Azure, "a.b_c", false);
        check(Road::Azure, "abc-1", true);
        check(Road::Edge, "a b", false);
    }

    #[test]
    fn delivery_schemas() {
        use EventSchema::{CloudEvent, Custom, EventGrid};
        let check =
            |road: Road, topic: (EventSchema, bool), given: &str, expected: Result<EventSchema, &str>| {
                let given = if given.is_empty() {
                    String::new()
                } else {
                    format!(r#","EventDeliverySchema":"{given}""#)
                };
                let body = format!("{{\"properties\":{{{HOOK}{given}}}}}");
                let got = parse_for(road, topic, &body, None).map(|spec| spec.delivery_schema);
                let expected =
                    expected.map_err(|reason| format!("properties.eventDeliverySchema cannot be {reason}"));
                assert_eq!(
                    got.map_err(|error| error.to_string()),
                    expected,
                    "{road:?} {topic:?} {given}"
                );
            };
        for road in [Road::Azure, Road::Config] {
            let events = (EventGrid, false);
            check(road, events, "", Ok(EventGrid));
            check(road, events, "eventgridschema", Ok(EventGrid));
            check(road, events, "CloudEventSchemaV1_0", Ok(CloudEvent));
            check(
                road,
                events,
                "CustomInputSchema",
                Err("CustomEventSchema: the topic's input schema is EventGridSchema"),
            );
            let cloud = (CloudEvent, false);
            check(road, cloud, "", Ok(CloudEvent));
            check(road, cloud, "CloudEventSchemaV1_0", Ok(CloudEvent));
            check(
                road,
                cloud,
                "EventGridSchema",
                Err("EventGridSchema: the topic's input schema is CloudEventSchemaV1_0"),
            );
            check(
                road,
                cloud,
                "CustomInputSchema",
                Err("CustomEventSchema: the topic's input schema is CloudEventSchemaV1_0"),
            );
            let mapped = (Custom, true);
            check(road, mapped, "", Ok(EventGrid));
            check(road, mapped, "EventGridSchema", Ok(EventGrid));
            check(road, mapped, "CloudEventSchemaV1_0", Ok(CloudEvent));
            check(road, mapped, "CustomInputSchema", Ok(Custom));
            check(road, mapped, "CustomEventSchema", Ok(Custom));
            let unmapped = (Custom, false);
            check(road, unmapped, "", Ok(Custom));
            check(
                road,
                unmapped,
                "EventGridSchema",
                Err(
                    "EventGridSchema: the topic's input schema is CustomEventSchema without inputSchemaMapping",
                ),
            );
        }
        for (schema, name) in [
            (EventGrid, "EventGridSchema"),
            (CloudEvent, "CloudEventSchemaV1_0"),
            (Custom, "CustomEventSchema"),
        ] {
            check(Road::Edge, (schema, false), "", Ok(schema));
            check(Road::Edge, (schema, false), name, Ok(schema));
        }
        check(
            Road::Edge,
            (EventGrid, false),
            "CloudEventSchemaV1_0",
            Err("CloudEventSchemaV1_0: the topic's input schema is EventGridSchema"),
        );

        // Beside the URL, as in two samples of the edge; the usual place takes precedence.
        let body = |outside: &str, inside: &str| {
            let hook = HOOK.replace(
                "\"https://a/x\"",
                &format!("\"https://a/x\",\"eventDeliverySchema\":\"{inside}\""),
            );
            format!("{{\"properties\":{{{outside}{hook}}}}}")
        };
        let parse = |road, body: String| {
            let got = parse_for(road, (EventGrid, false), &body, None);
            got.map(|spec| spec.delivery_schema)
                .map_err(|error| error.to_string())
        };
        assert_eq!(parse(Road::Edge, body("", "eventgridschema")), Ok(EventGrid));
        assert_eq!(
            parse(Road::Edge, body("", "CustomSchema")),
            Err("properties.destination.properties.eventDeliverySchema cannot be CustomEventSchema: the topic's \
                 input schema is EventGridSchema"
                .into())
        );
        assert_eq!(
            parse(
                Road::Edge,
                body(r#""eventDeliverySchema":"EventGridSchema","#, "CustomSchema")
            ),
            Ok(EventGrid)
        );
        assert_eq!(
            parse(Road::Azure, body("", "CloudEventSchemaV1_0")),
            Ok(EventGrid)
        );
    }

    #[test]
    fn retry_policies() {
        let check = |road: Road, policy: &str, expected: Result<(Option<u32>, Option<u32>), &str>| {
            let got = parse_with(road, &format!(r#","retryPolicy":{policy}"#));
            let got = got.map(|spec| (spec.retry.attempts_max, spec.retry.time_to_live_minutes));
            let expected = expected.map_err(|reason| format!("properties.retryPolicy{reason}"));
            assert_eq!(
                got.map_err(|error| error.to_string()),
                expected,
                "{road:?} {policy}"
            );
        };
        let (cloud, edge) = ("eventTimeToLiveInMinutes", "eventExpiryInMinutes");
        check(Road::Azure, "{}", Ok((None, None)));
        check(Road::Azure, r#"{"maxDeliveryAttempts":30}"#, Ok((Some(30), None)));
        check(
            Road::Azure,
            &format!(r#"{{"{cloud}":1440,"{edge}":7}}"#),
            Err(".eventExpiryInMinutes must be left out beside eventTimeToLiveInMinutes"),
        );
        check(Road::Azure, &format!(r#"{{"{edge}":7}}"#), Ok((None, Some(7))));
        check(Road::Edge, &format!(r#"{{"{cloud}":7}}"#), Ok((None, Some(7))));
        check(Road::Azure, "[]", Err(" must be an object, was a list"));
        check(
            Road::Azure,
            r#"{"maxDeliveryAttempts":31}"#,
            Err(".maxDeliveryAttempts must be between 1 and 30, was 31"),
        );
        check(
            Road::Azure,
            &format!(r#"{{"{cloud}":1441}}"#),
            Err(".eventTimeToLiveInMinutes must be between 1 and 1440, was 1441"),
        );
        check(
            Road::Edge,
            &format!(r#"{{"{edge}":100000,"maxDeliveryAttempts":50,"{cloud}":100000}}"#),
            Ok((Some(50), Some(100_000))),
        );
        check(
            Road::Edge,
            &format!(r#"{{"{edge}":0}}"#),
            Err(".eventExpiryInMinutes must be between 1 and 4294967295, was 0"),
        );
        check(
            Road::Config,
            &format!(r#"{{"{edge}":2000}}"#),
            Ok((None, Some(2000))),
        );
        check(
            Road::Config,
            &format!(r#"{{"{cloud}":2000,"maxDeliveryAttempts":99}}"#),
            Ok((Some(99), Some(2000))),
        );
        check(
            Road::Config,
            &format!(r#"{{"{cloud}":9,"{edge}":9}}"#),
            Ok((None, Some(9))),
        );
        check(
            Road::Config,
            &format!(r#"{{"{cloud}":8,"{edge}":9}}"#),
            Err(".eventExpiryInMinutes must be left out beside eventTimeToLiveInMinutes"),
        );
    }

    #[test]
    fn labels_profile_and_expiry() {
        let spec = parse_with(
            Road::Azure,
            r#","labels":["a","b"],"expirationTimeUtc":"2031-01-01T00:00:00Z","postrider":{"profile":"EDGE"}"#,
        )
        .unwrap();
        assert_eq!(spec.labels, ["a", "b"]);
        assert_eq!(spec.expires, Timestamp::parse("2031-01-01T00:00:00Z"));
        assert_eq!(spec.profile.as_deref(), Some("edge"));
        check_error(
            Road::Azure,
            r#","labels":["a",1]"#,
            "properties.labels[1] must be a string, was a number",
        );
        check_error(
            Road::Azure,
            r#","postrider":1"#,
            "properties.postrider must be an object, was a number",
        );
        check_error(
            Road::Config,
            r#","expirationTimeUtc":"2020-01-01T00:00:00Z""#,
            "properties.expirationTimeUtc must be in the future, was \"2020-01-01T00:00:00Z\"",
        );
        check_error(
            Road::Config,
            r#","expirationTimeUtc":"soon""#,
            "properties.expirationTimeUtc must be a time such as 2030-01-01T00:00:00Z, was \"soon\"",
        );
        check_error(
            Road::Azure,
            r#","expirationTimeUtc":"2020-01-01T00:00:00Z""#,
            "Invalid expiration time.",
        );
    }

    #[test]
    fn dead_letters() {
        let account = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/a";
        let blob = |properties: &str| {
            format!(r#","deadLetterDestination":{{"endpointType":"StorageBlob","properties":{properties}}}"#)
        };
        let check = |road: Road, properties: &str, expected: Result<(&str, &str), &str>| {
            let got = parse_with(road, &blob(properties)).map(|spec| spec.dead_letter.unwrap());
            let got = got
                .map(|place| (place.account, place.container))
                .map_err(|error| error.to_string());
            let expected = expected.map(|(a, c)| (a.into(), c.into()));
            let expected =
                expected.map_err(|reason| format!("properties.deadLetterDestination.properties{reason}"));
            assert_eq!(got, expected, "{properties}");
        };
        for road in [Road::Azure, Road::Config, Road::Edge] {
            check(
                road,
                &format!(r#"{{"resourceId":"{account}","blobContainerName":"dead"}}"#),
                Ok((account, "dead")),
            );
            let whole = format!(r#"{{"resourceId":"{account}/blobServices/default/containers/dead"}}"#);
            check(road, &whole, Ok((account, "dead")));
            check(
                road,
                &whole.replace('}', r#","blobContainerName":"dead"}"#),
                Ok((account, "dead")),
            );
            check(
                road,
                &whole.replace('}', r#","blobContainerName":"other"}"#),
                Err(".blobContainerName must be \"dead\" like in resourceId, was \"other\""),
            );
        }
        let named = r#"{"resourceId":"devstoreaccount1","blobContainerName":"dead"}"#;
        check(Road::Config, named, Ok(("devstoreaccount1", "dead")));
        let form = ".resourceId must be a resource id …/providers/Microsoft.Storage/storageAccounts/<name>";
        check(Road::Azure, named, Err(form));
        check(
            Road::Azure,
            &format!(r#"{{"resourceId":"{account}/x","blobContainerName":"dead"}}"#),
            Err(form),
        );
        check(Road::Azure, "{}", Err(".resourceId is required"));
        check(
            Road::Azure,
            &format!(r#"{{"resourceId":"{account}"}}"#),
            Err(".blobContainerName is required"),
        );
        check(
            Road::Config,
            r#"{"resourceId":"Dev","blobContainerName":"dead"}"#,
            Err(
                ".resourceId must be a storage account: its resource id, or 3 to 24 lowercase letters and digits, \
                 was \"Dev\"",
            ),
        );
        check(
            Road::Config,
            r#"{"resourceId":"dev","blobContainerName":"Dead"}"#,
            Err(
                ".blobContainerName must have 3 to 63 lowercase letters, digits or single hyphens between them, \
                 was \"Dead\"",
            ),
        );
        check_error(
            Road::Azure,
            r#","deadLetterDestination":{"endpointType":"Tape"}"#,
            "properties.deadLetterDestination.endpointType must be one of StorageBlob, was \"Tape\"",
        );
    }

    #[test]
    fn identities() {
        let destination = r#"{"endpointType":"WebHook","properties":{"endpointUrl":"https://a/x"}}"#;
        let blob =
            r#"{"endpointType":"StorageBlob","properties":{"resourceId":"dev","blobContainerName":"dead"}}"#;
        let system = r#"{"type":"systemassigned"}"#;
        let user = r#"{"type":"UserAssigned","userAssignedIdentity":"/u"}"#;
        let body = format!(
            r#"{{"properties":{{
                "deliveryWithResourceIdentity":{{"identity":{system},"destination":{destination}}},
                "deadLetterWithResourceIdentity":{{"identity":{user},"deadLetterDestination":{blob}}},
                "destination":null}}}}"#
        );
        let spec = parse_for(Road::Config, (EventSchema::EventGrid, false), &body, None).unwrap();
        assert_eq!(
            spec.identity,
            Some(ResourceIdentity {
                kind: "SystemAssigned".into(),
                user_assigned: None
            })
        );
        let user = ResourceIdentity {
            kind: "UserAssigned".into(),
            user_assigned: Some("/u".into()),
        };
        assert_eq!(spec.dead_letter_identity, Some(user));
        assert_eq!(spec.dead_letter.unwrap().container, "dead");

        check_error(
            Road::Config,
            r#","deliveryWithResourceIdentity":{}"#,
            "properties.deliveryWithResourceIdentity must be left out beside destination",
        );
        check_error(
            Road::Config,
            &format!(r#","deadLetterDestination":{blob},"deadLetterWithResourceIdentity":{{}}"#),
            "properties.deadLetterWithResourceIdentity must be left out beside deadLetterDestination",
        );
        let identity = |identity: &str, reason: &str| {
            check_error(
                Road::Config,
                &format!(
                    r#","deadLetterWithResourceIdentity":{{"identity":{identity},"deadLetterDestination":{blob}}}"#
                ),
                &format!("properties.deadLetterWithResourceIdentity.identity{reason}"),
            );
        };
        identity("null", " is required");
        identity("{}", ".type is required");
        identity(
            r#"{"type":"None"}"#,
            ".type must be one of SystemAssigned, UserAssigned, was \"None\"",
        );
        identity(r#"{"type":"UserAssigned"}"#, ".userAssignedIdentity is required");
        check_error(
            Road::Config,
            r#","deadLetterWithResourceIdentity":{"identity":{"type":"SystemAssigned"}}"#,
            "properties.deadLetterWithResourceIdentity.deadLetterDestination is required",
        );
    }

    #[test]
    fn the_old_delivery_policy_of_the_edge() {
        let check = |policy: &str, expected: Result<(Option<u32>, Option<u32>), &str>| {
            let got = parse_with(Road::Edge, &format!(r#","deliveryPolicy":{policy}"#));
            let got = got.map(|spec| spec.destination.batching());
            let got = got.map(|batching| (batching.events_max, batching.preferred_kilobytes));
            let expected = expected.map_err(|reason| format!("properties.deliveryPolicy.{reason}"));
            assert_eq!(
                got.map_err(|e| format!("{} {}", e.path, e.reason)),
                expected,
                "{policy}"
            );
        };
        check(r#"{"maxEventsPerBatch":5}"#, Ok((Some(5), None)));
        check(r#"{"approxBatchSizeInBytes":1058576}"#, Ok((None, Some(1033))));
        check(r#"{"approxBatchSizeInBytes":10}"#, Ok((None, Some(1))));
        check(
            r#"{"maxEventsPerBatch":51}"#,
            Err("maxEventsPerBatch must be between 1 and 50, was 51"),
        );
        check(
            r#"{"approxBatchSizeInBytes":1058816}"#,
            Err("approxBatchSizeInBytes must be between 1 and 1058815, was 1058816"),
        );
    }

    #[test]
    fn the_persistence_policy_cannot_change() {
        let parse = |policy: &str, previous: Option<&Subscription>| {
            let body = format!("{{\"properties\":{{{HOOK}{policy}}}}}");
            parse_for(Road::Edge, (EventSchema::EventGrid, false), &body, previous)
        };
        let made = |policy: &str| {
            let spec = parse(policy, None).unwrap();
            spec.into_subscription(SubscriptionId(1), TopicId(1), None, NOW)
        };
        let with = |policy: &str| format!(r#","persistencePolicy":{policy}"#);
        let check = |before: &str, after: &str, expected: Result<Option<&str>, &str>| {
            let got = parse(after, Some(&made(before))).map(|spec| spec.extras);
            let expected =
                expected.map(|extras| extras.map(|kept| format!(r#"{{"persistencePolicy":{kept}}}"#)));
            let expected = expected.map_err(|reason| format!("properties.persistencePolicy{reason}"));
            assert_eq!(
                got.map_err(|error| error.to_string()),
                expected,
                "{before} {after}"
            );
        };
        let word = r#"{"isPersisted":"true"}"#;
        let fixed = Err(" cannot be changed: delete the subscription and create it again");
        check(&with(word), &with(word), Ok(Some(word)));
        check(&with(word), &with("\"true\""), Ok(Some("\"true\"")));
        check(&with(word), &with("true"), Ok(Some("true")));
        check(&with(word), "", Ok(Some(word)));
        check("", "", Ok(None));
        check("", &with("{}"), Ok(Some("{}")));
        check(
            "",
            &with(r#"{"isPersisted":false}"#),
            Ok(Some(r#"{"isPersisted":false}"#)),
        );
        check("", &with(word), fixed);
        check(&with("true"), &with("false"), fixed);
        check(
            "",
            &with(r#"{"isPersisted":1}"#),
            Err(".isPersisted must be true or false, was a number"),
        );
        check(
            "",
            &with("\"often\""),
            Err(" must be true or false, was a string"),
        );
    }

    // Damage a body that uses everything, one byte at a time: it is accepted or refused, and never
    // causes a panic.
    #[test]
    fn damaged_bodies_never_panic() {
        let account = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/a";
        let body = format!(
            r#"{{"name":"sub","properties":{{"topicName":"orders","labels":["a"],
            "destination":{{"endpointType":"WebHook","properties":{{"endpointUrl":"http://[::1]:80/x?y",
            "maxEventsPerBatch":5,"deliveryAttributeMappings":[
            {{"name":"X","type":"Static","properties":{{"value":"v","isSecret":true}}}},
            {{"name":"Y","type":"Dynamic","properties":{{"sourceField":"data.y"}}}}]}}}},
            "filter":{{"advancedFilters":[{{"operatorType":"NumberIn","key":"a","values":[1.5e3]}}]}},
            "retryPolicy":{{"maxDeliveryAttempts":3}},"persistencePolicy":{{"isPersisted":"true"}},
            "deadLetterDestination":{{"endpointType":"StorageBlob","properties":{{
            "resourceId":"{account}/blobServices/default/containers/dead"}}}}}}}}"#
        );
        let mut read = 0;
        for at in 0..body.len() {
            for byte in b"\"[,/0x" {
                let mut bytes = body.clone().into_bytes();
                bytes[at] = *byte;
                let text = String::from_utf8(bytes).expect("the body is ASCII");
                if RawJson::parse(&text).is_err() {
                    continue;
                }
                for road in [Road::Edge, Road::Config, Road::Azure] {
                    read +=
                        usize::from(parse_for(road, (EventSchema::EventGrid, false), &text, None).is_ok());
                }
            }
        }
        assert!(read > 500, "{read}");
    }

    #[test]
    fn a_filter_is_read_at_its_path() {
        check_error(
            Road::Azure,
            r#","filter":{"advancedFilters":[{"operatorType":"StringIn","values":["x"]}]}"#,
            "properties.filter.advancedFilters[0].key is required",
        );
        check_error(
            Road::Azure,
            r#","filter":[]"#,
            "properties.filter must be an object, was a list",
        );
    }
}
