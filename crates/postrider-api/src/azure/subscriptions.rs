//! Event subscriptions: on topics, domains, domain topics, system topics, and resources of other
//! providers. Both spellings of a path, nested and as an extension, address the same subscriptions.

use super::lists::{ListItem, ListRequest};
use super::operations;
use super::topics;
use super::{
    ArmContext, Result, check_preconditions, empty_answer, etag, json_answer, lists, not_allowed,
    nothing_here, parse_json, put_etag, read_bytes, unavailable,
};
use crate::http::ApiCall;
use crate::quotas::{QuotaReached, QuotaReservation};
use crate::{Server, declare, locks};
use hyper::{Method, StatusCode};
use postrider_core::event::EventSchema;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::subscription::{Destination, Subscription, TopicKind};
use postrider_engine::Error;
use postrider_engine::directory::{CreationKey, TopicEntry};
use postrider_engine::manage::SubscriptionRead;
use postrider_store::{Handshake, HandshakeState};
use postrider_wire::arm::{
    ApiVersion, ArmError, ArmPath, EventGridId, ProvisioningState, Scope, SentMembers, SubscriptionView,
    delivery_attributes, full_url, parse_path,
};
use postrider_wire::resources::validate::check_name;
use postrider_wire::resources::{
    FieldError, Road, SubscriptionContext, SubscriptionSpec, TopicContext, parse_subscription,
    patch_subscription,
};
use std::sync::Arc;

/// How often a resource's hidden topic is created again when it is deleted while its first
/// subscription is being created.
const SCOPE_TRIES: usize = 5;

/// The API version in whose form our own API shows subscriptions: the newest stable one.
const SHOWN_AS: &str = "2025-02-15";

const SEPARATE: &str = "Microsoft.EventGrid/eventSubscriptions";

/// `{scope}[/providers/Microsoft.EventGrid]/eventSubscriptions[/{name}[/{action}]]`
pub async fn answer(
    server: &Arc<Server>,
    call: &mut ApiCall,
    scope: &Scope,
    nested: bool,
    name: Option<&str>,
    action: Option<&str>,
    context: &ArmContext,
) -> Result {
    let Some(name) = name else {
        if call.method != Method::GET {
            return Err(not_allowed(call, "GET"));
        }
        return match scope {
            Scope::Account | Scope::Group(_) => list_everywhere(server, call, scope, None, None, context),
            _ => list_of(server, call, scope, nested, context),
        };
    };
    let place = match ParentResource::find(server, scope) {
        // A resource that does not exist has no subscriptions, so there is nothing to delete.
        Err(error) if error.status == 404 && call.method == Method::DELETE && action.is_none() => {
            return Ok(empty_answer(call, StatusCode::NO_CONTENT));
        }
        place => place?,
    };
    let request = SubscriptionRequest {
        server,
        place: &place,
        nested,
        name,
        context,
    };
    match (call.method.clone(), action.map(str::to_lowercase).as_deref()) {
        (Method::GET, None) => request.get(call).await,
        (Method::PUT, None) => request.write(call, WriteMethod::Put).await,
        (Method::PATCH, None) => request.write(call, WriteMethod::Patch).await,
        (Method::DELETE, None) => request.delete(call).await,
        (_, None) => Err(not_allowed(call, "GET, PUT, PATCH, DELETE")),
        (Method::POST, Some("getfullurl")) => request.full_url(call),
        (Method::POST, Some("getdeliveryattributes")) => {
            let current = request.need_current()?;
            let body = delivery_attributes(&current.subscription.destination);
            Ok(json_answer(call, StatusCode::OK, &body))
        }
        (_, Some("getfullurl" | "getdeliveryattributes")) => Err(not_allowed(call, "POST")),
        _ => Err(nothing_here(call)),
    }
}

/// The resource that subscriptions belong to.
struct ParentResource {
    scope: Scope,
    /// The resource's whole id, in the casing of its creation.
    id: String,
    /// None for a resource of another provider that has no subscriptions yet.
    entry: Option<Arc<TopicEntry>>,
    domain_topic: Option<String>,
    /// The topic type of another provider's resource.
    topic_type: Option<String>,
    location: String,
}

impl ParentResource {
    /// Finds the resource; refused if it does not exist. A domain topic need not exist yet.
    fn find(server: &Server, scope: &Scope) -> Result<ParentResource> {
        let directory = &server.engine.directory;
        let grid = |kind: &str, id: &EventGridId, entry: Option<Arc<TopicEntry>>| {
            entry
                .filter(|entry| entry.topic.resource_group.eq_ignore_ascii_case(&id.group))
                .ok_or_else(|| {
                    ArmError::not_found(&format!("Microsoft.EventGrid/{kind}"), &id.name, &id.group)
                })
        };
        let entry = match scope {
            Scope::Topic(id) => grid("topics", id, directory.topic(&id.name))?,
            Scope::Domain(id) | Scope::DomainTopic { domain: id, .. } => {
                grid("domains", id, directory.domain(&id.name))?
            }
            Scope::SystemTopic(id) => grid("systemTopics", id, directory.system_topic(&id.group, &id.name))?,
            Scope::Account | Scope::Group(_) | Scope::Resource(_) => {
                return ParentResource::elsewhere(server, scope);
            }
        };
        let domain_topic = match scope {
            Scope::DomainTopic { name, .. } => {
                let known = directory.domain_topic(entry.topic.id, name);
                Some(known.map_or_else(|| name.clone(), |known| known.name))
            }
            _ => None,
        };
        Ok(ParentResource::of(server, entry, domain_topic))
    }

    /// The resource of existing subscriptions.
    fn of(server: &Server, entry: Arc<TopicEntry>, domain_topic: Option<String>) -> ParentResource {
        let topic = &entry.topic;
        let grid = || EventGridId {
            group: topic.resource_group.clone(),
            name: topic.name.clone(),
        };
        let account = &server.config.account;
        let mut topic_type = None;
        let (scope, id) = match (&topic.kind, &domain_topic) {
            (TopicKind::Custom, _) => (Scope::Topic(grid()), entry.full_id.to_string()),
            (TopicKind::Domain { .. }, Some(name)) => {
                let scope = Scope::DomainTopic {
                    domain: grid(),
                    name: name.clone(),
                };
                (scope, format!("{}/topics/{name}", entry.full_id))
            }
            (TopicKind::Domain { .. }, None) => (Scope::Domain(grid()), entry.full_id.to_string()),
            (TopicKind::System { .. }, _) => {
                let (group, name) = (&topic.resource_group, &topic.name);
                let id = format!(
                    "/subscriptions/{account}/resourceGroups/{group}/providers/Microsoft.EventGrid/systemTopics/{name}"
                );
                (Scope::SystemTopic(grid()), id)
            }
            (
                TopicKind::Scope {
                    source,
                    topic_type: kind,
                },
                _,
            ) => {
                topic_type = Some(kind.clone());
                (Scope::Resource(source.clone()), source.clone())
            }
        };
        ParentResource {
            scope,
            id,
            location: topic.location.clone(),
            domain_topic,
            topic_type,
            entry: Some(entry),
        }
    }

    /// A resource of another provider. Most are assumed to exist; storage accounts are checked,
    /// because this server lists them.
    fn elsewhere(server: &Server, scope: &Scope) -> Result<ParentResource> {
        let account = format!("/subscriptions/{}", server.config.account);
        let (id, topic_type, location) = match scope {
            Scope::Group(group) => (
                format!("{account}/resourceGroups/{group}"),
                "Microsoft.Resources.ResourceGroups".to_owned(),
                "global",
            ),
            Scope::Resource(id) => {
                let topic_type = topic_type_of(server, id)?;
                (id.clone(), topic_type, server.config.location.as_str())
            }
            _ => (account, "Microsoft.Resources.Subscriptions".to_owned(), "global"),
        };
        if let Some(entry) = server.engine.directory.scope_by_source(&id) {
            let mut place = ParentResource::of(server, entry, None);
            place.scope = scope.clone();
            return Ok(place);
        }
        Ok(ParentResource {
            scope: scope.clone(),
            id,
            entry: None,
            domain_topic: None,
            topic_type: Some(topic_type),
            location: location.to_owned(),
        })
    }

    fn topic(&self) -> Option<TopicId> {
        self.entry.as_ref().map(|entry| entry.topic.id)
    }

    fn lock(&self, name: &str) -> String {
        match (&self.topic_type, self.topic()) {
            // The hidden topic of such a resource may be deleted and created again while a request
            // waits, so its id cannot be part of the key.
            (None, Some(topic)) => locks::subscription(topic, self.domain_topic.as_deref(), name),
            _ => format!("subscription/{}/{}", self.id, name).to_lowercase(),
        }
    }

    fn topic_context(&self) -> TopicContext<'_> {
        match &self.entry {
            Some(entry) => declare::topic_context(&entry.topic),
            None => TopicContext {
                name: &self.id,
                input_schema: EventSchema::EventGrid,
                mapping: None,
                default_types: declare::default_types(&self.id),
            },
        }
    }

    /// The subscription of this name as clients see it: while a handshake is pending, as it will be
    /// afterwards.
    fn current(&self, server: &Server, name: &str) -> Option<VisibleSubscription> {
        let topic = self.topic()?;
        let domain_topic = self.domain_topic.as_deref();
        let pending = server.engine.handshakes.pending(topic, domain_topic, name);
        if let Some(handshake) = pending {
            return Some(VisibleSubscription::of(&handshake));
        }
        let known = server.engine.directory.subscription(topic, domain_topic, name)?;
        Some(VisibleSubscription {
            subscription: known,
            state: ProvisioningState::Succeeded,
        })
    }

    /// The state that the request read. A change is refused if the state is different when it is
    /// committed.
    fn read(&self, server: &Server, name: &str) -> SubscriptionRead {
        let domain_topic = self.domain_topic.as_deref();
        let read = |topic| server.engine.snapshot_subscription(topic, domain_topic, name);
        self.topic().map(read).unwrap_or_default()
    }

    /// All subscriptions of the resource, as clients see them.
    fn all(&self, server: &Server) -> Vec<VisibleSubscription> {
        let Some(topic) = self.topic() else {
            return Vec::new();
        };
        let domain_topic = self.domain_topic.as_deref();
        let here = |one: &Arc<Handshake>| match (&one.subscription.domain_topic, domain_topic) {
            (Some(of), Some(here)) => of.eq_ignore_ascii_case(here),
            (None, None) => true,
            _ => false,
        };
        let mut pending = server.engine.handshakes.pending_of(topic);
        pending.retain(here);
        let known = server.engine.directory.subscriptions_of(topic, domain_topic);
        as_seen(known, &pending)
    }

    fn missing(&self, name: &str) -> ArmError {
        let kind = match &self.scope {
            Scope::Topic(id) => format!("Microsoft.EventGrid/topics/{}/eventSubscriptions", id.name),
            Scope::Domain(id) => format!("Microsoft.EventGrid/domains/{}/eventSubscriptions", id.name),
            Scope::DomainTopic { domain, name } => {
                let domain = &domain.name;
                format!("Microsoft.EventGrid/domains/{domain}/topics/{name}/eventSubscriptions")
            }
            Scope::SystemTopic(id) => {
                format!("Microsoft.EventGrid/systemTopics/{}/eventSubscriptions", id.name)
            }
            Scope::Account | Scope::Group(_) | Scope::Resource(_) => SEPARATE.to_owned(),
        };
        match group_of(&self.id) {
            Some(group) => ArmError::not_found(&kind, name, group),
            None => {
                let message = format!("The Resource '{kind}/{name}' was not found.");
                ArmError::new(404, "ResourceNotFound", message)
            }
        }
    }
}

/// The topic type for the id of a resource: `Microsoft.Storage.StorageAccounts` for a storage
/// account, and so on.
fn topic_type_of(server: &Server, id: &str) -> Result<String> {
    let missing = || {
        let message = format!("The Resource '{id}' was not found.");
        ArmError::new(404, "ResourceNotFound", message)
    };
    let segments: Vec<&str> = id.split('/').filter(|segment| !segment.is_empty()).collect();
    let at = segments
        .iter()
        .rposition(|segment| segment.eq_ignore_ascii_case("providers"))
        .ok_or_else(missing)?;
    let behind = &segments[at + 1..];
    let (Some(provider), types) = (behind.first(), behind.get(1..).unwrap_or_default()) else {
        return Err(missing());
    };
    if provider.eq_ignore_ascii_case("Microsoft.EventGrid") || types.is_empty() || types.len() % 2 != 0 {
        return Err(missing());
    }
    if provider.eq_ignore_ascii_case("Microsoft.Storage") {
        let known = |name: &str| {
            let accounts = server.engine.dead_letters.blobs.accounts();
            let shown = server.config.storage_accounts.iter().map(|account| &account.name);
            accounts
                .iter()
                .chain(shown)
                .any(|account| account.eq_ignore_ascii_case(name))
        };
        return match types {
            [kind, name] if kind.eq_ignore_ascii_case("storageAccounts") && known(name) => {
                Ok("Microsoft.Storage.StorageAccounts".into())
            }
            [kind, name] => {
                let kind = format!("{provider}/{kind}");
                Err(ArmError::not_found(&kind, name, group_of(id).unwrap_or_default()))
            }
            _ => Err(missing()),
        };
    }
    let types = types.iter().step_by(2).map(|word| {
        let mut letters = word.chars();
        let first = letters.next().map(|letter| letter.to_ascii_uppercase());
        first.into_iter().chain(letters).collect::<String>()
    });
    let words: Vec<String> = std::iter::once((*provider).to_owned()).chain(types).collect();
    Ok(words.join("."))
}

/// The resource group in an id.
fn group_of(id: &str) -> Option<&str> {
    let mut segments = id.split('/').filter(|segment| !segment.is_empty()).skip(2);
    let word = segments.next()?;
    segments
        .next()
        .filter(|_| word.eq_ignore_ascii_case("resourceGroups"))
}

/// A subscription as clients see it.
#[derive(Clone)]
struct VisibleSubscription {
    subscription: Arc<Subscription>,
    state: ProvisioningState,
}

impl VisibleSubscription {
    fn of(handshake: &Handshake) -> VisibleSubscription {
        let state = match (&handshake.state, handshake.replaces) {
            (HandshakeState::Awaiting { .. }, _) => ProvisioningState::AwaitingManualAction,
            (_, true) => ProvisioningState::Updating,
            (_, false) => ProvisioningState::Creating,
        };
        VisibleSubscription {
            subscription: Arc::new(handshake.subscription.clone()),
            state,
        }
    }
}

/// Subscriptions in force. A subscription with a pending handshake is listed as it will be
/// afterwards.
fn as_seen(known: Vec<Arc<Subscription>>, pending: &[Arc<Handshake>]) -> Vec<VisibleSubscription> {
    let is_pending = |id: SubscriptionId| pending.iter().any(|one| one.subscription.id == id);
    let in_force = known.into_iter().filter(|known| !is_pending(known.id));
    let in_force = in_force.map(|subscription| VisibleSubscription {
        subscription,
        state: ProvisioningState::Succeeded,
    });
    let asked = pending.iter().map(|one| VisibleSubscription::of(one));
    asked.chain(in_force).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteMethod {
    Put,
    Patch,
}

/// A request about one subscription.
struct SubscriptionRequest<'a> {
    server: &'a Arc<Server>,
    place: &'a ParentResource,
    nested: bool,
    name: &'a str,
    context: &'a ArmContext,
}

impl SubscriptionRequest<'_> {
    fn current(&self) -> Option<VisibleSubscription> {
        self.place.current(self.server, self.name)
    }

    fn need_current(&self) -> Result<VisibleSubscription> {
        self.current().ok_or_else(|| self.place.missing(self.name))
    }

    async fn get(&self, call: &ApiCall) -> Result {
        let mut current = self.need_current()?;
        let is_webhook = matches!(current.subscription.destination, Destination::WebHook(_));
        // The webhook may have agreed just now, and then the subscription is in force at this node
        // first. Changes without a handshake were in force everywhere before they were answered.
        if self.server.cluster.is_some()
            && is_webhook
            && current.state == ProvisioningState::Succeeded
            && let Err(e) = self.server.engine.in_force_everywhere().await
        {
            tracing::debug!(error = %e, subscription = self.name, "not in force at every node yet");
            current.state = ProvisioningState::Updating;
        }
        let body = view(
            self.server,
            self.place,
            &current,
            self.nested,
            &self.context.api_version,
        )
        .body();
        let mut answer = json_answer(call, StatusCode::OK, &body);
        put_etag(&mut answer, &tag_of(self.server, &current.subscription));
        Ok(answer)
    }

    fn full_url(&self, call: &ApiCall) -> Result {
        let current = self.need_current()?;
        let body = full_url(&current.subscription.destination).ok_or_else(|| {
            let message = format!(
                "The destination of event subscription '{}' has no URL.",
                self.name
            );
            ArmError::new(400, "InvalidRequest", message)
        })?;
        Ok(json_answer(call, StatusCode::OK, &body))
    }

    /// Creates or changes a subscription. Everything that could refuse the request is checked
    /// before anything is changed.
    async fn write(&self, call: &mut ApiCall, how: WriteMethod) -> Result {
        let bytes = read_bytes(call).await?;
        let body = parse_json(&bytes)?;
        let _one_at_a_time = self.server.resource_locks.hold(self.place.lock(self.name)).await;
        // The resource, too, may have changed while the request waited for the lock.
        let place = &ParentResource::find(self.server, &self.place.scope)?;
        let current = place.current(self.server, self.name);
        let read = place.read(self.server, self.name);
        if how == WriteMethod::Patch && current.is_none() {
            return Err(place.missing(self.name));
        }
        let tag = current
            .as_ref()
            .map(|current| tag_of(self.server, &current.subscription));
        check_preconditions(call, tag.as_deref())?;
        let previous = current.as_ref().map(|current| &*current.subscription);
        let spec = self.read(place, body, how, previous).await?;
        let _room = match previous {
            Some(_) => Vec::new(),
            None => room(self.server, place)?,
        };
        // A subscription whose first handshake is pending exists for clients but is not in force.
        let in_force = place.topic().is_some_and(|topic| {
            let directory = &self.server.engine.directory;
            let known = directory.subscription(topic, place.domain_topic.as_deref(), self.name);
            known.is_some()
        });
        let (subscription, operation) = self.put(place, spec, previous, &read).await?;

        let state = match in_force {
            true => ProvisioningState::Updating,
            false => ProvisioningState::Creating,
        };
        let written = VisibleSubscription {
            subscription: Arc::new(subscription),
            state,
        };
        let view = view(
            self.server,
            place,
            &written,
            self.nested,
            &self.context.api_version,
        );
        let shown = match how {
            WriteMethod::Put => view.first_answer(SentMembers::of(body)),
            WriteMethod::Patch => view.body(),
        };
        let mut answer = json_answer(call, StatusCode::CREATED, &shown);
        operations::announce(&mut answer, &operation);
        put_etag(&mut answer, &tag_of(self.server, &written.subscription));
        Ok(answer)
    }

    async fn read(
        &self,
        place: &ParentResource,
        body: RawJson<'_>,
        how: WriteMethod,
        previous: Option<&Subscription>,
    ) -> Result<SubscriptionSpec> {
        let context = SubscriptionContext {
            road: Road::Azure,
            name: self.name,
            topic: place.topic_context(),
            limits: &self.server.config.resource_limits,
            now: self.server.engine.clock.now(),
            previous,
            api_version: self.context.api_version.as_str(),
            shown: previous
                .map(|previous| declare::shown_settings(self.server, previous, place.entry.as_deref())),
        };
        let refused = |error: FieldError| ArmError::from(error.of_event_subscription());
        let mut spec = match how {
            WriteMethod::Put => parse_subscription(body, &context).map_err(refused)?,
            WriteMethod::Patch => patch_subscription(body, &context).map_err(refused)?,
        };
        if let Some(previous) = previous {
            // The name keeps the casing of its creation.
            spec.name.clone_from(&previous.name);
        }
        let checked = declare::check_subscription(self.server, Road::Azure, &spec, previous).await;
        checked.map_err(|mut error| {
            let wrapped = body
                .get_any_case("properties")
                .is_some_and(|member| !member.is_null());
            if let (WriteMethod::Patch, false, Some(path)) =
                (how, wrapped, error.path.strip_prefix("properties."))
            {
                error.path = path.to_owned();
            }
            refused(error)
        })?;
        Ok(spec)
    }

    /// The subscription as it will be, and the URL of the operation that puts it in force.
    async fn put(
        &self,
        place: &ParentResource,
        spec: SubscriptionSpec,
        previous: Option<&Subscription>,
        read: &SubscriptionRead,
    ) -> Result<(Subscription, String)> {
        let engine = &self.server.engine;
        let (id, created) = match previous {
            Some(known) => (known.id, known.created),
            None => {
                let id = engine.next_id().await.map_err(|e| unavailable(&e))?;
                (SubscriptionId(id), engine.clock.now())
            }
        };
        let location = Some(place.location.as_str());
        let mut tries = 0;
        loop {
            tries += 1;
            let entry = self.entry(place).await?;
            let domain_topic = place.domain_topic.clone();
            let subscription = spec
                .clone()
                .into_subscription(id, entry.topic.id, domain_topic, created);
            let done = match engine.needs_handshake(&subscription.destination) {
                true => {
                    let version = self.context.api_version.as_str();
                    let base = &self.context.validation_base;
                    let caller = &self.context.caller.id;
                    let asked = engine
                        .begin_handshake_if_unchanged(subscription, read.clone(), base, version, caller)
                        .await;
                    asked.map(|handshake| {
                        let url = operations::url(self.server, self.context, &handshake.operation, location);
                        (handshake.subscription.clone(), url)
                    })
                }
                false => {
                    let put = declare::put_without_handshake(self.server, subscription, read.clone()).await;
                    put.map(|put| {
                        let (url, _) = operations::finished(self.server, self.context, location);
                        (Subscription::clone(&put), url)
                    })
                }
            };
            match done {
                Ok(done) => return Ok(done),
                Err(Error::Gone) if place.topic_type.is_some() && tries < SCOPE_TRIES => {}
                Err(error) => {
                    if place.topic_type.is_some() {
                        // The hidden topic may have been created for this subscription.
                        let _ = engine.release_scope(entry.topic.id).await;
                    }
                    return Err(self.failed(place, &error));
                }
            }
        }
    }

    /// The topic of the resource. For a resource of another provider it is created now.
    async fn entry(&self, place: &ParentResource) -> Result<Arc<TopicEntry>> {
        match (&place.topic_type, &place.entry) {
            (None, Some(entry)) => Ok(entry.clone()),
            (topic_type, _) => {
                let topic_type = topic_type.as_deref().unwrap_or_default();
                let made = self.server.engine.scope(&place.id, topic_type, &place.location);
                made.await.map_err(|e| unavailable(&e))
            }
        }
    }

    fn failed(&self, place: &ParentResource, error: &Error) -> ArmError {
        match error {
            Error::Gone => {
                let message = format!("The Resource '{}' was not found.", place.id);
                ArmError::new(404, "ResourceNotFound", message)
            }
            Error::DomainTopicMissing { .. } => domain_topic_missing(place),
            Error::Store(postrider_store::Error::Busy(why)) => ArmError::new(429, "TooManyRequests", why),
            other => unavailable(other),
        }
    }

    async fn delete(&self, call: &ApiCall) -> Result {
        let server = self.server;
        let _one_at_a_time = server.resource_locks.hold(self.place.lock(self.name)).await;
        let place = &ParentResource::find(server, &self.place.scope)?;
        let current = place.current(server, self.name);
        let tag = current
            .as_ref()
            .map(|current| tag_of(server, &current.subscription));
        check_preconditions(call, tag.as_deref())?;
        let (Some(current), Some(topic)) = (current, place.topic()) else {
            return Ok(empty_answer(call, StatusCode::NO_CONTENT));
        };
        let domain_topic = place.domain_topic.as_deref();
        let name = &current.subscription.name;
        let engine = &server.engine;
        // Cancelling also removes whatever was created for a subscription that never came in force.
        engine
            .cancel_handshake(topic, domain_topic, name)
            .await
            .map_err(|e| unavailable(&e))?;
        if let Some(known) = engine.directory.subscription(topic, domain_topic, name) {
            engine
                .delete_subscription(known.id)
                .await
                .map_err(|e| unavailable(&e))?;
        }
        Ok(operations::accepted(
            server,
            call,
            self.context,
            Some(&place.location),
        ))
    }
}

/// The ETag of a subscription in the management API. Pauses are not part of it.
fn tag_of(server: &Server, subscription: &Subscription) -> String {
    if subscription.pauses.is_empty() {
        return etag(server, subscription);
    }
    let shown = Subscription {
        pauses: Default::default(),
        ..subscription.clone()
    };
    etag(server, &shown)
}

/// Reservations below the quotas for another subscription of this resource, and for the domain
/// topic that may be created with it.
fn room<'a>(server: &'a Server, place: &ParentResource) -> Result<Vec<QuotaReservation<'a>>> {
    let mut places = Vec::new();
    if let (Some(name), Some(entry)) = (&place.domain_topic, &place.entry) {
        let known = server.engine.directory.domain_topic(entry.topic.id, name);
        let auto_create = matches!(
            entry.topic.kind,
            TopicKind::Domain {
                auto_create: true,
                ..
            }
        );
        if known.is_none() && !auto_create {
            return Err(domain_topic_missing(place));
        }
        if known.is_none() {
            check_name(name)?;
            places
                .push(declare::reserve_domain_topic_quota(server, &entry.topic).map_err(topics::over_quota)?);
        }
    }
    let quotas = &server.config.quotas;
    let is_edge = place.entry.as_ref().is_some_and(|entry| entry.topic.is_edge());
    let (most, key) = match place.scope {
        Scope::Domain(_) => (quotas.subscriptions_per_domain, "quotas.subscriptions_per_domain"),
        _ if is_edge => (
            quotas.edge_subscriptions_per_topic,
            "quotas.edge_subscriptions_per_topic",
        ),
        _ => (quotas.subscriptions_per_topic, "quotas.subscriptions_per_topic"),
    };
    let against = match &place.entry {
        Some(entry) if place.domain_topic.is_none() => format!("subscriptions/{}", entry.topic.id.0),
        _ => format!("subscriptions/{}", place.id.to_lowercase()),
    };
    let free = server
        .quota_reservations
        .reserve(against, || place.all(server).len(), most);
    let free = free.ok_or_else(|| QuotaReached {
        owner: format!("'{}'", place.id),
        what: "event subscriptions",
        most,
        key,
    });
    places.push(free.map_err(topics::over_quota)?);
    Ok(places)
}

fn domain_topic_missing(place: &ParentResource) -> ArmError {
    match &place.scope {
        Scope::DomainTopic { domain, name } => {
            let kind = format!("Microsoft.EventGrid/domains/{}/topics", domain.name);
            ArmError::not_found(&kind, name, &domain.group)
        }
        _ => ArmError::new(
            404,
            "ResourceNotFound",
            format!("The Resource '{}' was not found.", place.id),
        ),
    }
}

fn view<'a>(
    server: &Server,
    place: &'a ParentResource,
    current: &'a VisibleSubscription,
    nested: bool,
    api_version: &'a ApiVersion,
) -> SubscriptionView<'a> {
    SubscriptionView {
        subscription: &current.subscription,
        state: current.state,
        scope: &place.scope,
        scope_id: &place.id,
        nested,
        api_version,
        shown: declare::shown_settings(server, &current.subscription, place.entry.as_deref()),
    }
}

/// A subscription as clients see it, with the body that a GET answers; none if no subscription has
/// this resource id.
pub fn find_visible(server: &Server, id: &str) -> Option<(Arc<Subscription>, serde_json::Value)> {
    let segments: Vec<String> = id
        .split('/')
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
        .collect();
    let Ok(ArmPath::EventSubscriptions {
        scope,
        nested,
        name: Some(name),
        action: None,
    }) = parse_path(&segments, &server.config.account)
    else {
        return None;
    };
    let place = ParentResource::find(server, &scope).ok()?;
    let current = place.current(server, &name)?;
    let api_version = ApiVersion::parse(SHOWN_AS)?;
    let body = view(server, &place, &current, nested, &api_version).body();
    Some((current.subscription, body))
}

/// All subscriptions of one resource.
fn list_of(
    server: &Arc<Server>,
    call: &ApiCall,
    scope: &Scope,
    nested: bool,
    context: &ArmContext,
) -> Result {
    let asked = ListRequest::read(call)?;
    let place = ParentResource::find(server, scope)?;
    let all = place.all(server);
    if let (Some(name), Some(topic), true) = (&place.domain_topic, place.topic(), all.is_empty())
        && server.engine.directory.domain_topic(topic, name).is_none()
    {
        return Err(domain_topic_missing(&place));
    }
    let items = all.into_iter().map(|current| ListItem {
        position: CreationKey::of_subscription(&current.subscription).into(),
        name: current.subscription.name.clone(),
        of: current,
    });
    let show =
        |current: &VisibleSubscription| view(server, &place, current, nested, &context.api_version).body();
    Ok(lists::page(call, context, &asked, items, show))
}

/// All subscriptions of an account or of a group, optionally only those on resources in one
/// location or of one type.
pub fn list_everywhere(
    server: &Arc<Server>,
    call: &ApiCall,
    scope: &Scope,
    location: Option<&str>,
    topic_type: Option<&str>,
    context: &ArmContext,
) -> Result {
    if call.method != Method::GET {
        return Err(not_allowed(call, "GET"));
    }
    let asked = ListRequest::read(call)?;
    let after = asked.after_key()?;
    let wanted = |current: &VisibleSubscription| {
        let entry = server.engine.directory.topic_by_id(current.subscription.topic)?;
        let place = ParentResource::of(server, entry, current.subscription.domain_topic.clone());
        let group = match scope {
            Scope::Group(group) => group_of(&place.id).is_some_and(|of| of.eq_ignore_ascii_case(group)),
            _ => true,
        };
        let here = location.is_none_or(|location| same_location(location, &place.location));
        let kind = topic_type.is_none_or(|kind| kind.eq_ignore_ascii_case(kind_of(&place)));
        let named = asked.filter.as_ref();
        let named = named.is_none_or(|filter| filter.takes(&current.subscription.name));
        (group && here && kind && named).then_some(place)
    };
    let item = |current: VisibleSubscription| {
        let place = wanted(&current)?;
        Some(ListItem {
            position: CreationKey::of_subscription(&current.subscription).into(),
            name: current.subscription.name.clone(),
            of: (place, current),
        })
    };
    // The list can be very long. Subscriptions in force are taken in order of creation until the
    // page is full; pending handshakes are few and are taken as a whole.
    let pending = server.engine.handshakes.all_pending();
    let mut items: Vec<ListItem<(ParentResource, VisibleSubscription)>> = as_seen(Vec::new(), &pending)
        .into_iter()
        .filter_map(item)
        .collect();
    let asked_about: std::collections::HashSet<u64> =
        pending.iter().map(|one| one.subscription.id.0).collect();
    let (mut from, mut found) = (after, 0);
    loop {
        let some = server
            .engine
            .directory
            .all_subscriptions_after(from, LOOKED_AT_ONCE);
        let more = some.len() == LOOKED_AT_ONCE;
        from = some
            .last()
            .map(|last| CreationKey::of_subscription(last))
            .or(from);
        for subscription in some {
            if asked_about.contains(&subscription.id.0) {
                continue;
            }
            let state = ProvisioningState::Succeeded;
            let one = item(VisibleSubscription { subscription, state });
            found += usize::from(one.is_some());
            items.extend(one);
        }
        if !more || found > asked.top {
            break;
        }
    }
    let show = |(place, current): &(ParentResource, VisibleSubscription)| {
        view(server, place, current, false, &context.api_version).body()
    };
    Ok(lists::page(call, context, &asked, items, show))
}

/// Number of subscriptions that are examined at a time to fill a page.
const LOOKED_AT_ONCE: usize = 1024;

/// Compares locations: `West US 2` and `westus2` are the same.
fn same_location(a: &str, b: &str) -> bool {
    let plain = |text: &str| text.replace(' ', "").to_lowercase();
    plain(a) == plain(b)
}

fn kind_of(place: &ParentResource) -> &str {
    match &place.entry {
        Some(entry) => match &entry.topic.kind {
            TopicKind::Custom => "Microsoft.EventGrid.Topics",
            TopicKind::Domain { .. } => "Microsoft.EventGrid.Domains",
            TopicKind::System { topic_type, .. } | TopicKind::Scope { topic_type, .. } => topic_type,
        },
        None => place.topic_type.as_deref().unwrap_or_default(),
    }
}

#[cfg(test)]
pub(crate) mod tests;
