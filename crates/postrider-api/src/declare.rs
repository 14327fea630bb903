//! Making topics and subscriptions from what a road or the configuration file says about them.

use crate::Server;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::Raw;
use postrider_core::subscription::{DeadLetterDestination, Destination, Subscription};
use postrider_engine::blobs::BlobError;
use postrider_engine::directory::TopicEntry;
use postrider_wire::auth::fresh_key;
use postrider_wire::resources::{
    FieldError, Road, SubscriptionContext, SubscriptionSpec, TopicContext, parse_domain, parse_subscription,
    parse_system_topic, parse_topic,
};
use std::sync::Arc;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Field(FieldError),
    #[error("topic {0:?} does not exist")]
    TopicMissing(String),
    #[error(transparent)]
    Engine(#[from] postrider_engine::Error),
}

impl From<FieldError> for Error {
    fn from(e: FieldError) -> Error {
        Error::Field(e)
    }
}

/// Makes a topic or changes it. Keys that are given replace those it has.
pub async fn topic(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    name: &str,
    keys: Option<[Option<String>; 2]>,
) -> Result<Arc<TopicEntry>, Error> {
    put(server, body, road, name, keys, Kind::Topic).await
}

/// The same for a domain.
pub async fn domain(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    name: &str,
    keys: Option<[Option<String>; 2]>,
) -> Result<Arc<TopicEntry>, Error> {
    put(server, body, road, name, keys, Kind::Domain).await
}

/// The same for a system topic, to which nobody but its source publishes.
pub async fn system_topic(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    name: &str,
) -> Result<Arc<TopicEntry>, Error> {
    put(server, body, road, name, None, Kind::SystemTopic).await
}

#[derive(Clone, Copy)]
enum Kind {
    Topic,
    Domain,
    SystemTopic,
}

async fn put(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    name: &str,
    keys: Option<[Option<String>; 2]>,
    kind: Kind,
) -> Result<Arc<TopicEntry>, Error> {
    let _one_at_a_time = server.declaring.lock().await;
    let directory = &server.engine.directory;
    let known = match kind {
        Kind::Topic => directory.topic(name),
        Kind::Domain => directory.domain(name),
        Kind::SystemTopic => directory.system_topic(name),
    };
    let previous = known.as_ref().map(|entry| &entry.topic);
    let mut spec = match kind {
        Kind::Topic => parse_topic(body, road, name, previous)?,
        Kind::Domain => parse_domain(body, road, name, previous)?,
        Kind::SystemTopic => parse_system_topic(body, road, name, previous)?,
    };
    check_profile(server, spec.profile.as_deref())?;
    if spec.location.is_empty() {
        spec.location = server.config.location.clone();
    }
    let (id, created, group, kept) = match previous {
        Some(topic) => (
            topic.id,
            topic.created,
            topic.resource_group.clone(),
            topic.keys.clone(),
        ),
        None => {
            let id = TopicId(server.engine.next_id().await?);
            let keys = [fresh_key(), fresh_key()];
            (
                id,
                server.engine.clock.now(),
                server.config.resource_group.clone(),
                keys,
            )
        }
    };
    let [key1, key2] = keys.unwrap_or_default();
    let [kept1, kept2] = kept;
    let keys = [key1.map_or(kept1, Secret::new), key2.map_or(kept2, Secret::new)];
    let topic = spec.into_topic(id, group, keys, created);
    if previous == Some(&topic)
        && let Some(known) = known
    {
        return Ok(known);
    }
    Ok(server.engine.put_topic(topic).await?)
}

/// Makes a subscription of a topic or changes it.
pub async fn subscription(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    topic: &str,
    name: &str,
) -> Result<(Arc<TopicEntry>, Arc<Subscription>), Error> {
    let _one_at_a_time = server.declaring.lock().await;
    let directory = &server.engine.directory;
    let Some(topic) = directory.topic(topic) else {
        return Err(Error::TopicMissing(topic.to_owned()));
    };
    let made = put_subscription(server, body, road, &topic, None, name).await?;
    Ok((topic, made))
}

/// The same for a domain, or a topic inside it.
pub async fn domain_subscription(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    domain: &str,
    domain_topic: Option<&str>,
    name: &str,
) -> Result<Arc<Subscription>, Error> {
    let _one_at_a_time = server.declaring.lock().await;
    let Some(topic) = server.engine.directory.domain(domain) else {
        return Err(Error::TopicMissing(domain.to_owned()));
    };
    put_subscription(server, body, road, &topic, domain_topic, name).await
}

/// The same for a system topic.
pub async fn system_subscription(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    topic: &str,
    name: &str,
) -> Result<Arc<Subscription>, Error> {
    let _one_at_a_time = server.declaring.lock().await;
    let Some(topic) = server.engine.directory.system_topic(topic) else {
        return Err(Error::TopicMissing(topic.to_owned()));
    };
    put_subscription(server, body, road, &topic, None, name).await
}

async fn put_subscription(
    server: &Server,
    body: Raw<'_>,
    road: Road,
    topic: &TopicEntry,
    domain_topic: Option<&str>,
    name: &str,
) -> Result<Arc<Subscription>, Error> {
    let engine = &server.engine;
    let previous = engine.directory.subscription(topic.topic.id, domain_topic, name);
    let now = engine.clock.now();
    let context = SubscriptionContext {
        road,
        name,
        topic: TopicContext {
            name: &topic.topic.name,
            input_schema: topic.topic.input_schema,
            mapping: topic.topic.mapping.as_ref(),
        },
        limits: &server.config.resource_limits,
        now,
        previous: previous.as_deref(),
    };
    let spec = parse_subscription(body, &context)?;
    check_deliverable(&spec.destination)?;
    check_profile(server, spec.profile.as_deref())?;
    check_dead_letter(server, road, &spec, previous.as_deref()).await?;
    let (id, created) = match &previous {
        Some(known) => (known.id, known.created),
        None => (SubscriptionId(engine.next_id().await?), now),
    };
    let domain_topic = domain_topic.map(str::to_owned);
    let subscription = spec.into_subscription(id, topic.topic.id, domain_topic, created);
    if let Some(known) = previous.filter(|known| **known == subscription) {
        return Ok(known);
    }
    Ok(engine.put_subscription(subscription).await?)
}

/// A profile that is made by the configuration may be missing there.
fn check_profile(server: &Server, name: Option<&str>) -> Result<(), FieldError> {
    match name {
        Some(name) if server.engine.profiles.named(name).is_none() => Err(FieldError::new(
            "properties.postrider.profile",
            format!("{name} needs a [profile_{name}] section in the server's configuration"),
        )),
        _ => Ok(()),
    }
}

/// Dead letters must have somewhere to go. What was accepted before is not asked for again: a store that has
/// changed since must not keep a server from starting.
async fn check_dead_letter(
    server: &Server,
    road: Road,
    spec: &SubscriptionSpec,
    previous: Option<&Subscription>,
) -> Result<(), FieldError> {
    let Some(place) = &spec.dead_letter else {
        return Ok(());
    };
    if previous.is_some_and(|known| known.dead_letter.as_ref() == Some(place)) {
        return Ok(());
    }
    let (account, container) = (place.account_name(), &place.container);
    let refused = match judge(server, place).await {
        Ok(()) => return Ok(()),
        Err(Judgement::Doubtful(reason)) => {
            tracing::warn!(subscription = %spec.name, account, container, %reason, "dead letters could not be written now");
            return Ok(());
        }
        Err(Judgement::Refused { member, reason }) => {
            let outer = match spec.dead_letter_identity {
                Some(_) => "properties.deadLetterWithResourceIdentity.deadLetterDestination",
                None => "properties.deadLetterDestination",
            };
            FieldError::new(format!("{outer}.properties.{member}"), reason)
        }
    };
    if road == Road::Edge {
        // The module knows no dead letters and refuses nothing about them.
        tracing::warn!(subscription = %spec.name, account, container, reason = %refused, "dead letters cannot be written");
        return Ok(());
    }
    Err(refused)
}

/// Why dead letters cannot be written to a place.
enum Judgement {
    /// It is wrong, in this member.
    Refused { member: &'static str, reason: String },
    /// It may be otherwise by the time there are any.
    Doubtful(String),
}

async fn judge(server: &Server, place: &DeadLetterDestination) -> Result<(), Judgement> {
    let blobs = &server.engine.dead_letters.blobs;
    let account = place.account_name();
    let refused = |member, reason| Err(Judgement::Refused { member, reason });
    let known = blobs.accounts();
    if !known.iter().any(|name| name == account) {
        let reason = format!(
            "names storage account {account:?}, which is not configured; configured are {}",
            known.join(", ")
        );
        return refused("resourceId", reason);
    }
    if let Err(reason) = blobs.check_name(account, &place.container) {
        return refused("blobContainerName", format!("is refused: {reason}"));
    }
    match blobs.probe(account, &place.container).await {
        Ok(()) => Ok(()),
        Err(BlobError::Refused { detail, .. }) => refused(
            "resourceId",
            format!(
                "names storage account {account:?}, which refuses the credentials in the server's configuration: {detail}"
            ),
        ),
        Err(other) => Err(Judgement::Doubtful(other.to_string())),
    }
}

/// Events must not pile up for a destination that nobody can send to.
fn check_deliverable(destination: &Destination) -> Result<(), FieldError> {
    let kind = match destination {
        Destination::WebHook(_) | Destination::EventGrid { .. } => return Ok(()),
        Destination::EdgeHub { .. } => "EdgeHub",
        Destination::AzureFunction { .. } => "AzureFunction",
        Destination::StorageQueue { .. } => "StorageQueue",
        Destination::EventHub { .. } => "EventHub",
        Destination::HybridConnection { .. } => "HybridConnection",
        Destination::ServiceBusQueue { .. } => "ServiceBusQueue",
        Destination::ServiceBusTopic { .. } => "ServiceBusTopic",
    };
    Err(FieldError::new(
        "properties.destination.endpointType",
        format!("{kind} is not supported by this server; supported: WebHook, EventGrid"),
    ))
}
