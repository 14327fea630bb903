//! Topics, domains and system topics: the same methods and actions for all three.

use super::lists::{self, ListItem, ListRequest};
use super::{
    ArmContext, Result, check_preconditions, empty_answer, etag, groups, json_answer, not_allowed,
    operations, parse_json, put_etag, read_bytes, unavailable,
};
use crate::Server;
use crate::declare::{self, TopicResourceKind};
use crate::http::{Answer, ApiCall};
use crate::quotas::QuotaReached;
use hyper::{Method, StatusCode};
use postrider_core::subscription::{Topic, TopicKind};
use postrider_engine::directory::{CreationKey, TopicEntry};
use postrider_wire::arm::{ArmError, EventGridId, TopicView, event_type_body, topic_body, topic_id};
use postrider_wire::auth::fresh_key;
use postrider_wire::resources::{FieldError, Road, TopicSpec, patch_topic};
use serde_json::{Value, json};
use std::sync::Arc;

impl TopicResourceKind {
    pub fn type_name(self) -> &'static str {
        match self {
            TopicResourceKind::Topic => "topics",
            TopicResourceKind::Domain => "domains",
            TopicResourceKind::SystemTopic => "systemTopics",
        }
    }
}

/// A request for a topic, domain or system topic, or for one of its actions or lists. `rest` is in
/// lower case, `sent` as it was sent.
pub(super) async fn answer(
    server: &Arc<Server>,
    call: &mut ApiCall,
    kind: TopicResourceKind,
    id: &EventGridId,
    rest: &[&str],
    sent: &[String],
    context: &ArmContext,
) -> Result {
    let has_keys = kind != TopicResourceKind::SystemTopic;
    match rest {
        [] => match call.method {
            Method::GET | Method::HEAD => show(server, call, kind, id, context),
            Method::PUT | Method::PATCH => put(server, call, kind, id, context).await,
            Method::DELETE => delete(server, call, kind, id, context).await,
            _ => Err(not_allowed(call, "GET, PUT, PATCH, DELETE")),
        },
        ["listkeys"] if has_keys => match call.method {
            Method::POST => Ok(keys(call, &find(server, kind, id)?.topic)),
            _ => Err(not_allowed(call, "POST")),
        },
        ["regeneratekey"] if has_keys => match call.method {
            Method::POST => regenerate(server, call, kind, id).await,
            _ => Err(not_allowed(call, "POST")),
        },
        ["providers", "microsoft.eventgrid", "eventtypes"] => match call.method {
            Method::GET => event_types(server, call, kind, id),
            _ => Err(not_allowed(call, "GET")),
        },
        ["privatelinkresources"] if has_keys => match call.method {
            Method::GET => {
                let link = private_link(server, kind, id)?;
                Ok(json_answer(call, StatusCode::OK, &json!({"value": [link]})))
            }
            _ => Err(not_allowed(call, "GET")),
        },
        ["privateendpointconnections"] if has_keys => match call.method {
            Method::GET => {
                find(server, kind, id)?;
                Ok(json_answer(call, StatusCode::OK, &json!({"value": []})))
            }
            _ => Err(not_allowed(call, "GET")),
        },
        ["privatelinkresources", name] if has_keys => {
            let link = private_link(server, kind, id)?;
            match (&call.method, link["name"] == json!(name)) {
                (&Method::GET, true) => Ok(json_answer(call, StatusCode::OK, &link)),
                (_, true) => Err(not_allowed(call, "GET")),
                (_, false) => Err(missing_behind(kind, id, "privateLinkResources", &sent[1])),
            }
        }
        ["privateendpointconnections", _] if has_keys => {
            find(server, kind, id)?;
            Err(missing_behind(kind, id, "privateEndpointConnections", &sent[1]))
        }
        _ => Err(super::nothing_here(call)),
    }
}

/// Kinds of private endpoints. None can be created here, but clients read the list.
fn private_link(server: &Server, kind: TopicResourceKind, id: &EventGridId) -> Result<Value> {
    let entry = find(server, kind, id)?;
    let (name, display_name) = match kind {
        TopicResourceKind::Domain => ("domain", "Event Grid domain"),
        TopicResourceKind::Topic | TopicResourceKind::SystemTopic => ("topic", "Event Grid topic"),
    };
    let of = topic_id(&server.config.account, &entry.topic);
    Ok(json!({
        "properties": {
            "groupId": name,
            "displayName": display_name,
            "requiredMembers": [name],
            "requiredZoneNames": ["privatelink.eventgrid.azure.net"],
        },
        "id": format!("{of}/privateLinkResources/{name}"),
        "name": name,
        "type": format!("Microsoft.EventGrid/{}/privateLinkResources", kind.type_name()),
    }))
}

fn missing_behind(kind: TopicResourceKind, id: &EventGridId, behind: &str, name: &str) -> ArmError {
    let kind = format!("Microsoft.EventGrid/{}/{}/{behind}", kind.type_name(), id.name);
    ArmError::not_found(&kind, name, &id.group)
}

/// An existing topic of this kind in this group.
pub(super) fn find(server: &Server, kind: TopicResourceKind, id: &EventGridId) -> Result<Arc<TopicEntry>> {
    let found = kind.find(server, &id.group, &id.name);
    found
        .filter(|entry| entry.topic.resource_group.eq_ignore_ascii_case(&id.group))
        .ok_or_else(|| missing(kind, id))
}

fn missing(kind: TopicResourceKind, id: &EventGridId) -> ArmError {
    let kind = format!("Microsoft.EventGrid/{}", kind.type_name());
    ArmError::not_found(&kind, &id.name, &id.group)
}

pub(super) fn body(server: &Server, context: &ArmContext, topic: &Topic, state: &str) -> Value {
    topic_body(topic, &view(server, context, state))
}

pub(super) fn view<'a>(server: &'a Server, context: &'a ArmContext, state: &'a str) -> TopicView<'a> {
    TopicView {
        account: &server.config.account,
        tenant: &server.config.tenant,
        base_url: &context.base_url,
        version: &context.api_version,
        state,
    }
}

fn show(
    server: &Server,
    call: &ApiCall,
    kind: TopicResourceKind,
    id: &EventGridId,
    context: &ArmContext,
) -> Result {
    let entry = find(server, kind, id)?;
    let body = body(server, context, &entry.topic, "Succeeded");
    let mut answer = json_answer(call, StatusCode::OK, &body);
    put_etag(&mut answer, &etag(server, &*entry.topic));
    Ok(answer)
}

async fn put(
    server: &Arc<Server>,
    call: &mut ApiCall,
    kind: TopicResourceKind,
    id: &EventGridId,
    context: &ArmContext,
) -> Result {
    let bytes = read_bytes(call).await?;
    let raw = parse_json(&bytes)?;
    let _one_at_a_time = server.resource_locks.hold(kind.lock(&id.group, &id.name)).await;
    let known = kind.find(server, &id.group, &id.name);
    let here = |entry: &Arc<TopicEntry>| entry.topic.resource_group.eq_ignore_ascii_case(&id.group);
    let known_here = known.as_ref().filter(|entry| here(entry));
    let current = known_here.map(|entry| etag(server, &*entry.topic));
    let patch = call.method == Method::PATCH;
    if patch && known_here.is_none() {
        return Err(missing(kind, id));
    }
    check_preconditions(call, current.as_deref())?;
    let previous = known_here.map(|entry| &*entry.topic);
    let mut spec = match previous {
        Some(previous) if patch => patch_topic(raw, previous)?,
        _ => kind.parse(raw, Road::Azure, &id.name, previous)?,
    };
    if known.is_some() && known_here.is_none() {
        return Err(taken(kind));
    }
    let created = previous.is_none();
    // The name keeps the casing of its creation.
    spec.name = previous.map_or(spec.name, |topic| topic.name.clone());
    spec.location = place(server, id, previous, &spec)?;
    let _place = declare::reserve_topic_quota(server, &spec, previous).map_err(over_quota)?;
    let entry = if kind == TopicResourceKind::SystemTopic && created {
        let source = check_source(server, &spec.kind)?;
        // Two system topics can have different names and the same source: the second request must
        // see the result of the first.
        let lock = format!("systemtopicsource/{source}");
        let _one_per_source = server.resource_locks.hold(lock).await;
        check_only_one(server, &source)?;
        declare::store(server, spec, &id.group, None, None).await
    } else {
        declare::store(server, spec, &id.group, known.clone(), None).await
    };
    let topic = &entry.map_err(refused)?.topic;
    if !created {
        declare::warn_if_open(server, topic);
    }
    let mut answer = if kind == TopicResourceKind::SystemTopic {
        // Azure has no long-running operation for a PUT of a system topic: when the request is
        // answered, the topic is in force.
        if let Err(e) = server.engine.in_force_everywhere().await {
            tracing::warn!(error = %e, topic = %topic.name, "system topic is not in force at every node yet");
        }
        json_answer(call, StatusCode::OK, &body(server, context, topic, "Succeeded"))
    } else {
        let state = if created { "Creating" } else { "Updating" };
        let body = body(server, context, topic, state);
        let mut answer = json_answer(call, StatusCode::CREATED, &body);
        let (operation, _) = operations::finished(server, context, Some(&topic.location));
        operations::announce(&mut answer, &operation);
        answer
    };
    put_etag(&mut answer, &etag(server, &**topic));
    Ok(answer)
}

/// The messages of Azure's documents, including the missing word in the second.
fn taken(kind: TopicResourceKind) -> ArmError {
    let message = match kind {
        TopicResourceKind::Topic => {
            "Topic with the specified name already exists. Choose a different topic name."
        }
        TopicResourceKind::Domain => {
            "Domain with the specified already exists. Choose a different domain name."
        }
        TopicResourceKind::SystemTopic => "System topic with the specified name already exists.",
    };
    ArmError::new(409, "Conflict", message).at("name")
}

/// The location of a topic: the existing one, the one in the body, the group's or the server's.
fn place(server: &Server, id: &EventGridId, previous: Option<&Topic>, spec: &TopicSpec) -> Result<String> {
    let Some(previous) = previous else {
        return Ok(match spec.location.is_empty() {
            true => groups::location(server, &id.group),
            false => spec.location.clone(),
        });
    };
    if spec.location.is_empty() || spec.location == previous.location {
        return Ok(previous.location.clone());
    }
    let message = format!(
        "The resource '{}' already exists in location '{}' in resource group '{}'. A resource with the same name \
         cannot be created in location '{}'. Please select a new resource name.",
        previous.name, previous.location, previous.resource_group, spec.location
    );
    Err(ArmError::new(409, "InvalidResourceLocation", message).at("location"))
}

/// Checks that the source of a system topic exists, as far as this server can know. Returns the key
/// by which sources are compared.
fn check_source(server: &Server, kind: &TopicKind) -> Result<String> {
    let TopicKind::System { source, topic_type } = kind else {
        return Ok(String::new());
    };
    let field = |name: &str, reason: String| Err(ArmError::from(FieldError::new(name, reason)));
    let parts: Vec<&str> = source.trim_end_matches('/').split('/').collect();
    let is_id = source.starts_with('/') && parts.len() >= 3 && parts[1..].iter().all(|part| !part.is_empty());
    if !is_id {
        let reason =
            format!("must be a resource id such as /subscriptions/…/storageAccounts/a, was {source:?}");
        return field("properties.source", reason);
    }
    let storage_type = topic_type.eq_ignore_ascii_case("Microsoft.Storage.StorageAccounts");
    let is = |at: usize, word: &str| {
        let part = parts.len().checked_sub(at).and_then(|at| parts.get(at));
        part.is_some_and(|part| part.eq_ignore_ascii_case(word))
    };
    if !(is(2, "storageAccounts") && is(3, "Microsoft.Storage")) {
        return match storage_type {
            true => field(
                "properties.source",
                format!("must be the id of a storage account for {topic_type}, was {source:?}"),
            ),
            false => Ok(source.trim_end_matches('/').to_lowercase()),
        };
    }
    if !storage_type {
        let reason =
            format!("must be Microsoft.Storage.StorageAccounts for a storage account, was {topic_type:?}");
        return field("properties.topicType", reason);
    }
    let name = parts.last().copied().unwrap_or_default();
    let accounts = server.engine.dead_letters.blobs.accounts();
    if !accounts.iter().any(|known| known.eq_ignore_ascii_case(name)) {
        let reason = format!(
            "names storage account {name:?}, which does not exist; there are {}",
            accounts.join(", ")
        );
        return field("properties.source", reason);
    }
    // Names of storage accounts are unique across groups.
    Ok(format!("storage account {}", name.to_lowercase()))
}

fn check_only_one(server: &Server, source: &str) -> Result<()> {
    let same = |entry: &Arc<TopicEntry>| check_source(server, &entry.topic.kind).is_ok_and(|of| of == source);
    match server.engine.directory.system_topics().into_iter().find(same) {
        None => Ok(()),
        Some(known) => {
            let message = format!(
                "Only one system topic is allowed per source; {:?} is there already.",
                known.topic.name
            );
            Err(ArmError::new(400, "InvalidRequest", message).at("properties.source"))
        }
    }
}

pub(super) fn over_quota(reached: QuotaReached) -> ArmError {
    ArmError::new(409, "Conflict", reached.to_string())
}

pub(super) fn refused(error: declare::Error) -> ArmError {
    match error {
        declare::Error::Field(error) => error.into(),
        declare::Error::TopicMissing(name) => {
            ArmError::new(404, "ResourceNotFound", format!("topic {name:?} does not exist"))
        }
        e @ (declare::Error::NameTaken(_) | declare::Error::Protected(_)) => {
            ArmError::new(409, "Conflict", e.to_string())
        }
        declare::Error::Quota(reached) => over_quota(reached),
        declare::Error::Engine(error) => unavailable(&error),
    }
}

async fn delete(
    server: &Arc<Server>,
    call: &ApiCall,
    kind: TopicResourceKind,
    id: &EventGridId,
    context: &ArmContext,
) -> Result {
    let _one_at_a_time = server.resource_locks.hold(kind.lock(&id.group, &id.name)).await;
    let Ok(entry) = find(server, kind, id) else {
        return Ok(empty_answer(call, StatusCode::NO_CONTENT));
    };
    check_preconditions(call, Some(&etag(server, &*entry.topic)))?;
    let deleted = server.engine.delete_topic(entry.topic.id).await;
    deleted.map_err(|e| unavailable(&e))?;
    Ok(operations::accepted(
        server,
        call,
        context,
        Some(&entry.topic.location),
    ))
}

fn keys(call: &ApiCall, topic: &Topic) -> Answer {
    let [key1, key2] = &topic.keys;
    let body = json!({"key1": key1.expose(), "key2": key2.expose()});
    json_answer(call, StatusCode::OK, &body)
}

async fn regenerate(
    server: &Arc<Server>,
    call: &mut ApiCall,
    kind: TopicResourceKind,
    id: &EventGridId,
) -> Result {
    let bytes = read_bytes(call).await?;
    let sent: Value = serde_json::from_str(parse_json(&bytes)?.text()).unwrap_or_default();
    let number = match sent["keyName"].as_str() {
        Some(name) if name.eq_ignore_ascii_case("key1") => 0,
        Some(name) if name.eq_ignore_ascii_case("key2") => 1,
        given => {
            let reason = match given {
                Some(given) => format!("must be key1 or key2, was {given:?}"),
                None => "must be \"key1\" or \"key2\"".to_owned(),
            };
            return Err(FieldError::new("keyName", reason).into());
        }
    };
    let _one_at_a_time = server.resource_locks.hold(kind.lock(&id.group, &id.name)).await;
    let entry = find(server, kind, id)?;
    check_preconditions(call, Some(&etag(server, &*entry.topic)))?;
    let mut topic = Topic::clone(&entry.topic);
    topic.keys[number] = fresh_key();
    let entry = server
        .engine
        .replace_topic_if_unchanged(topic, Some(entry))
        .await
        .map_err(|e| unavailable(&e))?;
    Ok(keys(call, &entry.topic))
}

/// The event types that a topic's owner has named; for a system topic those of its source.
fn event_types(server: &Server, call: &ApiCall, kind: TopicResourceKind, id: &EventGridId) -> Result {
    let entry = find(server, kind, id)?;
    let value = match &entry.topic.kind {
        TopicKind::System { topic_type, .. } | TopicKind::Scope { topic_type, .. } => {
            let known = postrider_wire::arm::topic_type(topic_type);
            known.map_or_else(Vec::new, |known| known.event_type_bodies())
        }
        TopicKind::Custom | TopicKind::Domain { .. } => named_types(&entry.topic),
    };
    Ok(json_answer(call, StatusCode::OK, &json!({ "value": value })))
}

fn named_types(topic: &Topic) -> Vec<Value> {
    let extras: Value = serde_json::from_str(topic.extras.as_deref().unwrap_or("{}")).unwrap_or_default();
    let Some(types) = extras["eventTypeInfo"]["inlineEventTypes"].as_object() else {
        return Vec::new();
    };
    let kind = match topic.kind {
        TopicKind::Domain { .. } => "Microsoft.EventGrid.Domains",
        _ => "Microsoft.EventGrid.Topics",
    };
    let of = format!("providers/Microsoft.EventGrid/topicTypes/{kind}");
    let text = |info: &Value, name: &str| info[name].as_str().unwrap_or_default().to_owned();
    types
        .iter()
        .map(|(name, info)| {
            let shown = Some(text(info, "displayName")).filter(|shown| !shown.is_empty());
            event_type_body(
                &of,
                name,
                shown.as_deref().unwrap_or(name),
                &text(info, "description"),
                true,
            )
        })
        .collect()
}

/// Lists topics of the whole subscription, or of one group.
pub(super) fn list(
    server: &Server,
    call: &ApiCall,
    kind: TopicResourceKind,
    group: Option<&str>,
    context: &ArmContext,
) -> Result {
    if call.method != Method::GET {
        return Err(not_allowed(call, "GET"));
    }
    let asked = ListRequest::read(call)?;
    let directory = &server.engine.directory;
    // Filters by group and name are applied afterwards, so all topics must be examined for them.
    let limit = match (group, &asked.filter) {
        (None, None) => asked.top + 1,
        _ => usize::MAX,
    };
    let after = asked.after_key()?;
    let found = match kind {
        TopicResourceKind::Topic => directory.topics_after(after, limit),
        TopicResourceKind::Domain => directory.domains_after(after, limit),
        TopicResourceKind::SystemTopic => directory.system_topics_after(after, limit),
    };
    let found = found
        .into_iter()
        .filter(|entry| group.is_none_or(|group| entry.topic.resource_group.eq_ignore_ascii_case(group)));
    let items = found.map(|entry| ListItem {
        position: CreationKey::of_topic(&entry.topic).into(),
        name: entry.topic.name.clone(),
        of: entry,
    });
    Ok(lists::page(call, context, &asked, items, |entry| {
        body(server, context, &entry.topic, "Succeeded")
    }))
}
