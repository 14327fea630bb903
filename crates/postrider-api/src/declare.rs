//! Creates and changes topics and subscriptions from the bodies that an API or the configuration
//! file gives.

use crate::quotas::{QuotaReached, QuotaReservation};
use crate::{EdgeAccess, Server, listen, locks};
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::subscription::{
    DeadLetterDestination, Destination, ResourceOrigin, Subscription, Topic, TopicKind,
};
use postrider_engine::blobs::BlobError;
use postrider_engine::directory::{CatalogDirectory, TopicEntry};
use postrider_engine::manage::SubscriptionRead;
use postrider_wire::arm::RESOURCE_EVENT_TYPES;
use postrider_wire::auth::fresh_key;
use postrider_wire::resources::validate::{check_header_not_reserved, resource_names};
use postrider_wire::resources::{
    EffectiveSettings, FieldError, Road, SubscriptionContext, SubscriptionSpec, TopicContext, TopicSpec,
    parse_domain, parse_subscription, parse_system_topic, parse_topic,
};
use std::sync::Arc;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Field(FieldError),
    #[error("topic {0:?} does not exist")]
    TopicMissing(String),
    /// The name belongs to a topic that the edge API does not reach.
    #[error(
        "topic {0:?} cannot be made through the edge API: the name is taken; choose another, or have the operator \
         set edge = true on the topic of that name"
    )]
    NameTaken(String),
    /// A caller of the edge API without a credential has named something that was made, or set, elsewhere.
    #[error(
        "{0} was made or changed through another API, or has subscriptions that were: the edge API without a credential \
         does not change it; use a token of a client that may write, or the management API"
    )]
    Protected(String),
    #[error(transparent)]
    Quota(#[from] QuotaReached),
    #[error(transparent)]
    Engine(#[from] postrider_engine::Error),
}

impl From<FieldError> for Error {
    fn from(e: FieldError) -> Error {
        Error::Field(e)
    }
}

/// Creates or changes a topic. Keys that are given replace the existing ones.
pub async fn topic(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    name: &str,
    keys: Option<[Option<String>; 2]>,
) -> Result<Arc<TopicEntry>, Error> {
    put(server, body, road, name, keys, TopicResourceKind::Topic).await
}

/// Creates or changes a domain.
pub async fn domain(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    name: &str,
    keys: Option<[Option<String>; 2]>,
) -> Result<Arc<TopicEntry>, Error> {
    put(server, body, road, name, keys, TopicResourceKind::Domain).await
}

/// Creates or changes a system topic, to which only its source publishes.
pub async fn system_topic(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    name: &str,
) -> Result<Arc<TopicEntry>, Error> {
    put(server, body, road, name, None, TopicResourceKind::SystemTopic).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TopicResourceKind {
    Topic,
    Domain,
    SystemTopic,
}

impl TopicResourceKind {
    /// Key of the lock that must be held to change the resource.
    pub fn lock(self, group: &str, name: &str) -> String {
        match self {
            TopicResourceKind::Topic => locks::topic(name),
            TopicResourceKind::Domain => locks::domain(name),
            TopicResourceKind::SystemTopic => locks::system_topic(group, name),
        }
    }

    /// The existing resource with this name. Topics and domains are identified by name alone,
    /// regardless of their group.
    pub fn find(self, server: &Server, group: &str, name: &str) -> Option<Arc<TopicEntry>> {
        let directory = &server.engine.directory;
        match self {
            TopicResourceKind::Topic => directory.topic(name),
            TopicResourceKind::Domain => directory.domain(name),
            TopicResourceKind::SystemTopic => directory.system_topic(group, name),
        }
    }

    pub fn parse(
        self,
        body: RawJson<'_>,
        road: Road,
        name: &str,
        previous: Option<&Topic>,
    ) -> Result<TopicSpec, FieldError> {
        match self {
            TopicResourceKind::Topic => parse_topic(body, road, name, previous),
            TopicResourceKind::Domain => parse_domain(body, road, name, previous),
            TopicResourceKind::SystemTopic => parse_system_topic(body, road, name, previous),
        }
    }
}

async fn put(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    name: &str,
    keys: Option<[Option<String>; 2]>,
    kind: TopicResourceKind,
) -> Result<Arc<TopicEntry>, Error> {
    let group = &server.config.resource_group;
    let _one_at_a_time = server.resource_locks.hold(kind.lock(group, name)).await;
    let known = kind.find(server, group, name);
    let previous = known.as_ref().map(|entry| &*entry.topic);
    if road == Road::Edge && previous.is_some_and(|topic| !topic.is_edge()) {
        return Err(Error::NameTaken(name.to_owned()));
    }
    let spec = kind.parse(body, road, name, previous)?;
    // A quota must not keep a server from starting with the resources of its configuration.
    let _place = match road {
        Road::Config => None,
        Road::Edge | Road::Azure => reserve_topic_quota(server, &spec, previous)?,
    };
    store(server, spec, group, known, keys).await
}

/// Reservation below the quota for a topic that is to be created, or that is to count against
/// another quota than before.
pub(crate) fn reserve_topic_quota<'a>(
    server: &'a Server,
    spec: &TopicSpec,
    previous: Option<&Topic>,
) -> Result<Option<QuotaReservation<'a>>, QuotaReached> {
    let edge = spec.edge == Some(true);
    if previous.is_some_and(|previous| previous.is_edge() == edge) {
        return Ok(None);
    }
    let (directory, quotas) = (&server.engine.directory, &server.config.quotas);
    let (what, key, count, most): (_, _, fn(&CatalogDirectory) -> usize, _) = match spec.kind {
        TopicKind::Custom if edge => (
            "topics of the edge API",
            "quotas.edge_topics",
            CatalogDirectory::edge_topic_count,
            quotas.edge_topics,
        ),
        TopicKind::Custom => (
            "topics",
            "quotas.topics",
            CatalogDirectory::managed_topic_count,
            quotas.topics,
        ),
        TopicKind::Domain { .. } => (
            "domains",
            "quotas.domains",
            CatalogDirectory::domain_count,
            quotas.domains,
        ),
        TopicKind::System { .. } => (
            "system topics",
            "quotas.system_topics",
            CatalogDirectory::system_topic_count,
            quotas.system_topics,
        ),
        TopicKind::Scope { .. } => return Ok(None),
    };
    let place = server
        .quota_reservations
        .reserve(key.to_owned(), || count(directory), most);
    place.map(Some).ok_or_else(|| QuotaReached {
        owner: format!("The subscription '{}'", server.config.account),
        what,
        most,
        key,
    })
}

/// Reservation below the quota for another topic of a domain.
pub(crate) fn reserve_domain_topic_quota<'a>(
    server: &'a Server,
    domain: &Topic,
) -> Result<QuotaReservation<'a>, QuotaReached> {
    let most = server.config.quotas.domain_topics;
    let count = || server.engine.directory.domain_topic_count(domain.id);
    let place = server
        .quota_reservations
        .reserve(format!("domain_topics/{}", domain.id.0), count, most);
    place.ok_or_else(|| QuotaReached {
        owner: format!("The domain '{}'", domain.name),
        what: "topics",
        most,
        key: "quotas.domain_topics",
    })
}

/// Reservation below the quota for another subscription of an edge topic.
fn edge_subscription_place<'a>(
    server: &'a Server,
    topic: &Topic,
) -> Result<QuotaReservation<'a>, QuotaReached> {
    let most = server.config.quotas.edge_subscriptions_per_topic;
    let count = || server.engine.directory.subscription_count(topic.id);
    let place = server
        .quota_reservations
        .reserve(format!("subscriptions/{}", topic.id.0), count, most);
    place.ok_or_else(|| QuotaReached {
        owner: format!("The topic '{}'", topic.name),
        what: "event subscriptions",
        most,
        key: "quotas.edge_subscriptions_per_topic",
    })
}

/// Makes a parsed topic durable. The caller holds the topic's lock and has read `known` while
/// holding it.
pub(crate) async fn store(
    server: &Server,
    mut spec: TopicSpec,
    group: &str,
    known: Option<Arc<TopicEntry>>,
    keys: Option<[Option<String>; 2]>,
) -> Result<Arc<TopicEntry>, Error> {
    check_profile(server, spec.profile.as_deref())?;
    if spec.location.is_empty() {
        spec.location = server.config.location.clone();
    }
    let previous = known.as_ref().map(|entry| &*entry.topic);
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
            (id, server.engine.clock.now(), group.to_owned(), keys)
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
    Ok(server.engine.replace_topic_if_unchanged(topic, known).await?)
}

/// Tells the operator when the management API changes a topic that callers without a credential reach.
pub(crate) fn warn_if_open(server: &Server, topic: &Topic) {
    if topic.is_edge() && matches!(server.config.edge, EdgeAccess::Open) {
        tracing::warn!(
            topic = %topic.name,
            "the edge API, which asks for no credential, reaches this topic and may publish to it; to end that, set \
             properties.postrider.edge to false"
        );
    }
}

/// Makes a subscription of a topic or changes it.
pub async fn subscription(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    topic: &str,
    name: &str,
) -> Result<(Arc<TopicEntry>, Arc<Subscription>), Error> {
    put_topic_subscription(server, body, road, topic, name, Overwrite::Any).await
}

/// The same for a caller of the edge API without a credential: what was made elsewhere stays.
pub async fn edge_subscription_unless_protected(
    server: &Server,
    body: RawJson<'_>,
    topic: &str,
    name: &str,
) -> Result<(Arc<TopicEntry>, Arc<Subscription>), Error> {
    put_topic_subscription(server, body, Road::Edge, topic, name, Overwrite::EdgeOnly).await
}

/// Subscriptions that a request may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overwrite {
    Any,
    /// Only those that were made through the edge API.
    EdgeOnly,
}

async fn put_topic_subscription(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    topic: &str,
    name: &str,
    overwrite: Overwrite,
) -> Result<(Arc<TopicEntry>, Arc<Subscription>), Error> {
    let directory = &server.engine.directory;
    let missing = || Error::TopicMissing(topic.to_owned());
    let entry = directory
        .topic(topic)
        .filter(|entry| road != Road::Edge || entry.topic.is_edge())
        .ok_or_else(missing)?;
    let made = put_subscription(server, body, road, &entry, None, name, overwrite).await;
    // The topic may have been deleted during the await above.
    if matches!(made, Err(Error::Engine(_))) && directory.topic_by_id(entry.topic.id).is_none() {
        return Err(missing());
    }
    Ok((entry, made?))
}

/// Creates or changes a subscription of a domain or of a topic inside it.
pub async fn domain_subscription(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    domain: &str,
    domain_topic: Option<&str>,
    name: &str,
) -> Result<Arc<Subscription>, Error> {
    let Some(topic) = server.engine.directory.domain(domain) else {
        return Err(Error::TopicMissing(domain.to_owned()));
    };
    put_subscription(server, body, road, &topic, domain_topic, name, Overwrite::Any).await
}

/// Creates or changes a subscription of a system topic.
pub async fn system_subscription(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    topic: &str,
    name: &str,
) -> Result<Arc<Subscription>, Error> {
    let Some(topic) = server
        .engine
        .directory
        .system_topic(&server.config.resource_group, topic)
    else {
        return Err(Error::TopicMissing(topic.to_owned()));
    };
    put_subscription(server, body, road, &topic, None, name, Overwrite::Any).await
}

async fn put_subscription(
    server: &Server,
    body: RawJson<'_>,
    road: Road,
    topic: &TopicEntry,
    domain_topic: Option<&str>,
    name: &str,
    overwrite: Overwrite,
) -> Result<Arc<Subscription>, Error> {
    let lock = locks::subscription(topic.topic.id, domain_topic, name);
    let _one_at_a_time = server.resource_locks.hold(lock).await;
    let engine = &server.engine;
    let read = engine.snapshot_subscription(topic.topic.id, domain_topic, name);
    let previous = read.in_force.clone();
    let is_foreign = previous
        .as_ref()
        .is_some_and(|known| known.origin != ResourceOrigin::Edge)
        || read.pending.is_some();
    if overwrite == Overwrite::EdgeOnly && is_foreign {
        return Err(Error::Protected(format!("subscription {name:?}")));
    }
    let context = SubscriptionContext {
        road,
        name,
        topic: topic_context(&topic.topic),
        limits: &server.config.resource_limits,
        now: engine.clock.now(),
        previous: previous.as_deref(),
        api_version: "",
        shown: previous
            .as_deref()
            .map(|previous| shown_settings(server, previous, Some(topic))),
    };
    let spec = parse_subscription(body, &context)?;
    check_subscription(server, road, &spec, previous.as_deref()).await?;
    let _place = match &previous {
        None if road == Road::Edge => Some(edge_subscription_place(server, &topic.topic)?),
        _ => None,
    };
    let (id, created) = match &previous {
        Some(known) => (known.id, known.created),
        None => (SubscriptionId(engine.next_id().await?), context.now),
    };
    let domain_topic = domain_topic.map(str::to_owned);
    let subscription = spec.into_subscription(id, topic.topic.id, domain_topic, created);
    Ok(put_without_handshake(server, subscription, read).await?)
}

/// Settings as reads of a subscription show them, with defaults where the subscription sets
/// nothing.
pub(crate) fn shown_settings(
    server: &Server,
    subscription: &Subscription,
    topic: Option<&TopicEntry>,
) -> EffectiveSettings {
    let profile = server.engine.profile(subscription, topic);
    EffectiveSettings::of(
        subscription,
        profile,
        &server.config.resource_limits.batch_defaults,
    )
}

/// The facts about a topic that the parser of its subscriptions needs.
pub(crate) fn topic_context(topic: &Topic) -> TopicContext<'_> {
    let source = match &topic.kind {
        TopicKind::System { source, .. } | TopicKind::Scope { source, .. } => source,
        TopicKind::Custom | TopicKind::Domain { .. } => "",
    };
    TopicContext {
        name: &topic.name,
        input_schema: topic.input_schema,
        mapping: topic.mapping.as_ref(),
        default_types: default_types(source),
    }
}

/// Event types that a subscription on this resource gets if it names none.
pub(crate) fn default_types(source: &str) -> &'static [&'static str] {
    match resource_names(source, "Microsoft.Storage", &["storageAccounts"]) {
        Some((_, rest)) if rest.is_empty() => {
            &["Microsoft.Storage.BlobCreated", "Microsoft.Storage.BlobDeleted"]
        }
        _ if is_group_or_account(source) => RESOURCE_EVENT_TYPES,
        _ => &[],
    }
}

/// Whether an id is that of an Azure subscription or of a resource group.
fn is_group_or_account(id: &str) -> bool {
    let parts: Vec<&str> = id.trim_matches('/').split('/').collect();
    match *parts {
        [word, account] => word.eq_ignore_ascii_case("subscriptions") && !account.is_empty(),
        [word, _, groups, group] => {
            word.eq_ignore_ascii_case("subscriptions")
                && groups.eq_ignore_ascii_case("resourceGroups")
                && !group.is_empty()
        }
        _ => false,
    }
}

/// Puts a subscription in force without a handshake. A pending handshake for an earlier change is
/// cancelled: the last writer wins. `read` is the state that the decision was based on.
pub(crate) async fn put_without_handshake(
    server: &Server,
    mut subscription: Subscription,
    read: SubscriptionRead,
) -> Result<Arc<Subscription>, postrider_engine::Error> {
    let engine = &server.engine;
    let (topic, name) = (subscription.topic, subscription.name.clone());
    let domain_topic = subscription.domain_topic.clone();
    // Checked first, so that no handshake is cancelled that the caller has not read.
    engine
        .snapshot_subscription(topic, domain_topic.as_deref(), &name)
        .check_pending(&read)?;
    engine
        .handshakes
        .cancel(topic, domain_topic.as_deref(), &name)
        .await?;
    let known = engine
        .directory
        .subscription(topic, domain_topic.as_deref(), &name);
    if let Some(known) = known {
        // The subscription may have come in force just now.
        subscription.id = known.id;
        subscription.created = known.created;
        subscription.pauses = known.pauses.clone();
        if *known == subscription {
            return Ok(known);
        }
    }
    engine.replace_subscription_if_unchanged(subscription, read).await
}

/// Checks that a parser cannot make: whether this server can deliver to the destination, and has
/// the profile and the storage account.
pub(crate) async fn check_subscription(
    server: &Server,
    road: Road,
    spec: &SubscriptionSpec,
    previous: Option<&Subscription>,
) -> Result<(), FieldError> {
    check_deliverable(server, spec)?;
    check_profile(server, spec.profile.as_deref())?;
    check_dead_letter(server, road, spec, previous).await
}

/// The same checks for the subscription of a listen session, except that its destination is always
/// this server.
pub(crate) async fn check_listener(server: &Server, spec: &SubscriptionSpec) -> Result<(), FieldError> {
    check_profile(server, spec.profile.as_deref())?;
    check_dead_letter(server, Road::Azure, spec, None).await
}

/// A profile that the configuration defines may be missing from it.
fn check_profile(server: &Server, name: Option<&str>) -> Result<(), FieldError> {
    match name {
        Some(name) if server.engine.profiles.named(name).is_none() => Err(FieldError::new(
            "properties.postrider.profile",
            format!("{name} needs a [profile_{name}] section in the server's configuration"),
        )),
        _ => Ok(()),
    }
}

/// Dead letters must have somewhere to go. A destination that was accepted before is not checked
/// again: a storage account that has changed since must not keep a server from starting.
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
        Err(DeadLetterDestinationProblem::Doubtful(reason)) => {
            tracing::warn!(subscription = %spec.name, account, container, %reason, "dead letters could not be written now");
            return Ok(());
        }
        Err(DeadLetterDestinationProblem::Refused { member, reason }) => {
            let outer = match spec.dead_letter_identity {
                Some(_) => "properties.deadLetterWithResourceIdentity.deadLetterDestination",
                None => "properties.deadLetterDestination",
            };
            FieldError::new(format!("{outer}.properties.{member}"), reason)
        }
    };
    if road == Road::Edge {
        // The edge module has no dead letters and refuses nothing about them.
        tracing::warn!(subscription = %spec.name, account, container, reason = %refused, "dead letters cannot be written");
        return Ok(());
    }
    Err(refused)
}

/// Why dead letters cannot be written to a container.
enum DeadLetterDestinationProblem {
    /// The destination is wrong, in this member.
    Refused { member: &'static str, reason: String },
    /// The container cannot be reached now, but may be by the time there are dead letters.
    Doubtful(String),
}

async fn judge(server: &Server, place: &DeadLetterDestination) -> Result<(), DeadLetterDestinationProblem> {
    let blobs = &server.engine.dead_letters.blobs;
    let account = place.account_name();
    let refused = |member, reason| Err(DeadLetterDestinationProblem::Refused { member, reason });
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
        Err(other) => Err(DeadLetterDestinationProblem::Doubtful(other.to_string())),
    }
}

/// Refuses destinations that nobody can deliver to: their events would pile up.
fn check_deliverable(server: &Server, spec: &SubscriptionSpec) -> Result<(), FieldError> {
    let destination = &spec.destination;
    let outer = match spec.identity {
        Some(_) => "properties.deliveryWithResourceIdentity.destination",
        None => "properties.destination",
    };
    if listen::is_listen_session(destination) {
        let reason = format!(
            "must not be at {}: whatever is there is listened to with \"postrider listen\", and cannot be changed",
            listen::HOST
        );
        return Err(FieldError::new(format!("{outer}.properties.endpointUrl"), reason));
    }
    if let Err(why) = server.engine.dispatcher.destinations().reach(destination) {
        return Err(FieldError::new(format!("{outer}.{}", why.field), why.reason));
    }
    if matches!(destination, Destination::WebHook(_)) {
        return Ok(());
    }
    // Attributes become headers beside the ones that deliveries to brokers, relays and functions
    // use.
    for (index, attribute) in destination.attributes().iter().enumerate() {
        let name = &attribute.name;
        let ours = OUR_HEADERS.iter().any(|header| header.eq_ignore_ascii_case(name));
        let reason = match check_header_not_reserved(name) {
            Err(reason) => reason,
            Ok(()) if ours => format!("must not be a header that the delivery itself sets, was {name:?}"),
            Ok(()) => continue,
        };
        let path = format!("{outer}.properties.deliveryAttributeMappings[{index}].name");
        return Err(FieldError::new(path, reason));
    }
    Ok(())
}

/// Headers that only deliveries to brokers, relays and functions carry.
const OUR_HEADERS: [&str; 4] = [
    "authorization",
    "brokerproperties",
    "servicebusauthorization",
    "x-functions-key",
];
