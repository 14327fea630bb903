//! Event subscriptions, on the way in.

use super::destination::{parse_dead_letter, parse_destination, parse_identity};
use super::filter::{key_style, parse_filter};
use super::read::Node;
use super::validate::{check_azure_subscription_name, check_name};
use super::{Extras, FieldError, Limits, Road, SCHEMAS, check_same_name, parse_profile, schema_name};
use postrider_core::event::Schema;
use postrider_core::filter::Filter;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::json::Raw;
use postrider_core::subscription::{
    Batching, DeadLetterDestination, Destination, Identity, InputMapping, RetryChoice, Subscription,
};
use postrider_core::time::Timestamp;

/// What a body says about a subscription; the rest is the server's to give.
#[derive(Clone, Debug, PartialEq)]
pub struct SubscriptionSpec {
    pub name: String,
    pub destination: Destination,
    pub identity: Option<Identity>,
    pub filter: Filter,
    pub labels: Vec<String>,
    pub expires: Option<Timestamp>,
    pub delivery_schema: Schema,
    pub retry: RetryChoice,
    pub dead_letter: Option<DeadLetterDestination>,
    pub dead_letter_identity: Option<Identity>,
    pub profile: Option<String>,
    pub origin: Road,
    pub extras: Option<String>,
}

impl SubscriptionSpec {
    pub fn into_subscription(
        self,
        id: SubscriptionId,
        topic: TopicId,
        domain_topic: Option<String>,
        created: Timestamp,
    ) -> Subscription {
        Subscription {
            id,
            name: self.name,
            topic,
            domain_topic,
            destination: self.destination,
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
        }
    }
}

/// The topic that a subscription is made for.
#[derive(Clone, Copy, Debug)]
pub struct TopicContext<'a> {
    pub name: &'a str,
    pub input_schema: Schema,
    pub mapping: Option<&'a InputMapping>,
}

/// What must be known to judge a body.
#[derive(Clone, Copy, Debug)]
pub struct SubscriptionContext<'a> {
    pub road: Road,
    /// The name in the URL.
    pub name: &'a str,
    pub topic: TopicContext<'a>,
    pub limits: &'a Limits,
    pub now: Timestamp,
    /// The subscription that is replaced. Masked secrets are taken from it.
    pub previous: Option<&'a Subscription>,
}

/// Reads a subscription that is made or replaced as a whole. Destinations of every type are read;
/// whether events can be delivered to them is for the caller to judge.
pub fn parse_subscription(
    body: Raw<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<SubscriptionSpec, FieldError> {
    let road = context.road;
    let root = Node::root(body)?;
    match road {
        Road::Azure => check_azure_subscription_name(context.name)?,
        Road::Edge | Road::Config => check_name(context.name)?,
    }
    check_same_name(&root, "name", road, context.name)?;
    let properties = root.need_object("properties")?;
    check_topic(&properties, context)?;

    let (place, identity) = one_of_two(&properties, "destination", "deliveryWithResourceIdentity")?;
    let Some(place) = place else {
        return Err(properties.at("destination").fail("is required"));
    };
    let destination = old_batching(&properties, context)
        .and_then(|batching| parse_destination(&place, batching, context))
        .map_err(|error| if road == Road::Edge { error.of_edge_destination() } else { error })?;

    let (dead_letter, dead_letter_identity) =
        one_of_two(&properties, "deadLetterDestination", "deadLetterWithResourceIdentity")?;
    let dead_letter = dead_letter.map(|node| parse_dead_letter(&node, road)).transpose()?;

    let mut extras = Extras::default();
    let filter = match properties.object("filter")? {
        Some(node) => {
            let filter = parse_filter(&node, road)?;
            extras.keep("filter", sent_defaults(&node, &filter));
            filter
        }
        None => Filter { keys: key_style(road), ..Filter::default() },
    };
    if let Some(policy) = parse_persistence(&properties, context)? {
        extras.keep("persistencePolicy", policy);
    }

    Ok(SubscriptionSpec {
        name: context.name.to_owned(),
        destination,
        identity,
        filter,
        labels: properties.strings("labels")?.unwrap_or_default(),
        expires: parse_expiry(&properties, context)?,
        delivery_schema: parse_delivery_schema(&properties, &place, context)?,
        retry: parse_retry(&properties, road)?,
        dead_letter,
        dead_letter_identity,
        profile: parse_profile(&properties)?,
        origin: road,
        extras: extras.into_text(),
    })
}

/// The topic's name in the body, if it is there, must be the one in the URL. It may be the last
/// part of an id, as answers have it. In the cloud the member is an id that only answers have.
fn check_topic(properties: &Node<'_>, context: &SubscriptionContext<'_>) -> Result<(), FieldError> {
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

/// A destination is given as it is, or inside an object that adds an identity.
fn one_of_two<'a>(
    properties: &Node<'a>,
    plain: &str,
    with_identity: &str,
) -> Result<(Option<Node<'a>>, Option<Identity>), FieldError> {
    match (properties.object(plain)?, properties.object(with_identity)?) {
        (Some(_), Some(other)) => Err(other.fail(format!("must be left out beside {plain}"))),
        (destination, None) => Ok((destination, None)),
        (None, Some(node)) => {
            let identity = parse_identity(&node.need_object("identity")?)?;
            Ok((Some(node.need_object(plain)?), Some(identity)))
        }
    }
}

/// The old place of the batching limits on the edge, in bytes.
fn old_batching(properties: &Node<'_>, context: &SubscriptionContext<'_>) -> Result<Batching, FieldError> {
    let policy = match context.road {
        Road::Edge => properties.object("deliveryPolicy")?,
        Road::Config | Road::Azure => None,
    };
    let Some(policy) = policy else {
        return Ok(Batching::default());
    };
    // The documented most is 1058576 bytes, a little more than the 1033 kilobytes it became.
    let bytes_max = context.limits.edge_batch_kilobytes_max.saturating_add(1).saturating_mul(1024) - 1;
    let bytes = policy.count("approxBatchSizeInBytes", bytes_max)?;
    Ok(Batching {
        events_max: policy.count("maxEventsPerBatch", context.limits.edge_batch_events_max)?,
        preferred_kilobytes: bytes.map(|bytes| (bytes / 1024).max(1)),
    })
}

/// The members of a filter that were sent with the value they have anyway. The model does not keep
/// them, but an answer has what was sent.
fn sent_defaults(node: &Node<'_>, filter: &Filter) -> String {
    let mut sent = Extras::default();
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

/// Events are always kept on disk here; the edge's policy is checked and echoed. It cannot change.
fn parse_persistence(
    properties: &Node<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<Option<String>, FieldError> {
    if context.road != Road::Edge {
        return Ok(None);
    }
    let before = context.previous.filter(|previous| previous.origin == Road::Edge);
    let kept = before.and_then(|previous| Raw::parse(previous.extras.as_deref()?).ok()?.get("persistencePolicy"));
    let is_persisted = |policy: &Node<'_>| {
        if let Some(inner) = policy.get("isPersisted") {
            return inner.as_bool();
        }
        if policy.value.kind() == postrider_core::json::Kind::Object {
            return Ok(false);
        }
        policy.as_bool()
    };
    let Some(given) = properties.get("persistencePolicy") else {
        return Ok(kept.map(|kept| kept.text().to_owned()));
    };
    let now = is_persisted(&given)?;
    let kept = kept.map(|value| Node { path: given.path.clone(), value });
    let was = kept.map_or(Ok(false), |kept| is_persisted(&kept))?;
    if before.is_some() && now != was {
        return Err(given.fail("cannot be changed: delete the subscription and create it again"));
    }
    Ok(Some(given.value.text().to_owned()))
}

fn parse_expiry(
    properties: &Node<'_>,
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

/// Events are delivered as the topic takes them, or in another form that they can be turned into.
fn parse_delivery_schema(
    properties: &Node<'_>,
    destination: &Node<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<Schema, FieldError> {
    let member = "eventDeliverySchema";
    let mut place = properties.clone();
    // Two samples of the edge put it beside the URL.
    if place.get(member).is_none() && context.road != Road::Azure {
        place = destination.at("properties");
    }
    let input = context.topic.input_schema;
    let unmapped = input == Schema::Custom && context.topic.mapping.is_none();
    let Some(given) = place.word(member, &SCHEMAS)? else {
        return Ok(match (context.road, input) {
            (Road::Edge, input) => input,
            (_, Schema::CloudEvent) => Schema::CloudEvent,
            (_, Schema::Custom) if unmapped => Schema::Custom,
            _ => Schema::EventGrid,
        });
    };
    let possible = match (context.road, input) {
        (Road::Edge, input) => given == input,
        (_, Schema::EventGrid) => given != Schema::Custom,
        (_, Schema::CloudEvent) => given == Schema::CloudEvent,
        (_, Schema::Custom) => given == Schema::Custom || !unmapped,
    };
    if possible {
        return Ok(given);
    }
    let (given, input) = (schema_name(given), schema_name(input));
    let without = if unmapped { " without inputSchemaMapping" } else { "" };
    let reason = format!("cannot be {given}: the topic's input schema is {input}{without}");
    Err(place.at(member).fail(reason))
}

/// The cloud has `eventTimeToLiveInMinutes` and narrow limits, the edge `eventExpiryInMinutes` and
/// none; the configuration takes either name and leaves the limits to its author.
fn parse_retry(properties: &Node<'_>, road: Road) -> Result<RetryChoice, FieldError> {
    let Some(policy) = properties.object("retryPolicy")? else {
        return Ok(RetryChoice::default());
    };
    let (attempts_most, minutes_most) = match road {
        Road::Azure => (30, 1440),
        Road::Edge | Road::Config => (u32::MAX, u32::MAX),
    };
    let (cloud, edge) = ("eventTimeToLiveInMinutes", "eventExpiryInMinutes");
    let time_to_live_minutes = match road {
        Road::Azure => policy.count(cloud, minutes_most)?,
        Road::Edge => policy.count(edge, minutes_most)?,
        Road::Config => match (policy.count(cloud, minutes_most)?, policy.count(edge, minutes_most)?) {
            (Some(a), Some(b)) if a != b => {
                return Err(policy.at(edge).fail(format!("must be left out beside {cloud}")));
            }
            (a, b) => a.or(b),
        },
    };
    Ok(RetryChoice { attempts_max: policy.count("maxDeliveryAttempts", attempts_most)?, time_to_live_minutes })
}
