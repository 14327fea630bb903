//! Handshakes with webhooks, listed and repeated: `/postrider/v1/handshakes`.

use crate::dead_letters::{read_query, unknown};
use crate::http::{Answer, ApiCall, decoded, json};
use crate::own_address::validation_base;
use crate::own_api::{Problem, read_object};
use crate::route::own::OwnEndpoint;
use crate::{Server, locks};
use hyper::{Method, StatusCode};
use postrider_core::ids::SubscriptionId;
use postrider_core::subscription::{Destination, Subscription, TopicKind};
use postrider_engine::Error;
use postrider_engine::directory::TopicEntry;
use postrider_engine::handshake::{HandshakeEnd, HandshakeReport};
use postrider_store::{HandshakeExchange, HandshakeResponse, HandshakeState};
use postrider_wire::arm::{ArmPath, Scope, parse_path, topic_id};
use postrider_wire::resources::delivery_schema_name;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const LIMIT: usize = 100;
const LIMIT_MAX: usize = 1000;
/// API version in the validation URLs of handshakes that this API begins.
const API_VERSION: &str = "2022-06-15";
const STATES: [&str; 5] = ["asking", "awaiting", "failed", "succeeded", "cancelled"];

/// Answers a request below `handshakes`, whose sender is already authenticated. `caller` is the
/// sender's id, which handshakes are attributed to.
pub(crate) async fn answer(
    server: &Server,
    call: &mut ApiCall,
    caller: &str,
    endpoint: OwnEndpoint,
    operation: &str,
) -> Result<Answer, Problem> {
    let query = call.uri.query().unwrap_or("").to_owned();
    if endpoint != OwnEndpoint::Handshakes {
        read_query(&query, &[])?;
    }
    match endpoint {
        OwnEndpoint::RepeatHandshake => repeat(server, call, caller, operation).await,
        OwnEndpoint::Handshake => {
            let seen = find(server, operation)?;
            let mut shown = summary(server, &seen);
            let transcript = seen.handshake.transcript.iter().map(exchange);
            shown["transcript"] = transcript.collect();
            Ok(written(call, StatusCode::OK, &shown))
        }
        _ if call.method == Method::POST => {
            let members = read_object(call).await?;
            ask(server, call, caller, &members).await
        }
        _ => Ok(written(call, StatusCode::OK, &list(server, &query)?)),
    }
}

fn written(call: &ApiCall, status: StatusCode, body: &Value) -> Answer {
    json(status, body.to_string(), &call.id)
}

fn find(server: &Server, operation: &str) -> Result<HandshakeReport, Problem> {
    let operation = decoded(operation);
    let seen = server.engine.handshakes.seen(&operation);
    seen.ok_or_else(|| {
        Problem::new(
            404,
            format!("handshake {operation:?} does not exist, or was long ago"),
        )
    })
}

fn list(server: &Server, query: &str) -> Result<Value, Problem> {
    let (mut state, mut subscription, mut limit) = (None, None, LIMIT);
    for (name, value) in read_query(query, &["state", "subscription", "limit"])? {
        match name {
            "state" => {
                if !STATES.contains(&value.as_str()) {
                    let known = STATES.join(", ");
                    return Err(Problem::field(
                        "state",
                        format!("{value:?} is not one of {known}"),
                    ));
                }
                state = Some(value);
            }
            "subscription" => subscription = Some(value),
            _ => {
                let number = value.parse().ok().filter(|n| (1..=LIMIT_MAX).contains(n));
                let reason = format!("must be a number from 1 to {LIMIT_MAX}");
                limit = number.ok_or_else(|| Problem::field("limit", reason))?;
            }
        }
    }
    let wanted = |seen: &HandshakeReport| {
        let named = subscription.as_deref().is_none_or(|wanted| {
            let handshake = &seen.handshake;
            handshake.subscription.name.eq_ignore_ascii_case(wanted)
                || resource_id(server, &handshake.subscription)
                    .is_some_and(|id| id.eq_ignore_ascii_case(wanted.trim_end_matches('/')))
        });
        state.as_deref().is_none_or(|wanted| state_of(seen) == wanted) && named
    };
    let mut found = server.engine.handshakes.all();
    found.retain(wanted);
    let all = found.len();
    let value: Vec<Value> = found
        .iter()
        .take(limit)
        .map(|seen| summary(server, seen))
        .collect();
    Ok(json!({"value": value, "count": all}))
}

fn state_of(seen: &HandshakeReport) -> &'static str {
    match (seen.ended, &seen.handshake.state) {
        (Some((_, HandshakeEnd::Granted)), _) => "succeeded",
        (Some((_, HandshakeEnd::Cancelled)), _) => "cancelled",
        (None, HandshakeState::Asking) => "asking",
        (None, HandshakeState::Awaiting { .. }) => "awaiting",
        (None, HandshakeState::Failed { .. }) => "failed",
    }
}

fn summary(server: &Server, seen: &HandshakeReport) -> Value {
    let handshake = &seen.handshake;
    let subscription = &handshake.subscription;
    let topic = server.engine.directory.topic_by_id(subscription.topic);
    let mut shown = json!({
        "operation": handshake.operation,
        "subscription": resource_id(server, subscription),
        "name": subscription.name,
        "topic": topic.map(|entry| entry.topic.name.clone()),
        "endpoint": endpoint(subscription),
        "deliverySchema": delivery_schema_name(subscription.delivery_schema),
        "state": state_of(seen),
        "replaces": handshake.replaces,
        "trial": handshake.trial,
        "begun": handshake.begun.to_string(),
        "asked": handshake.transcript.len(),
    });
    if let Some((at, _)) = seen.ended {
        shown["ended"] = json!(at.to_string());
        return shown;
    }
    match &handshake.state {
        HandshakeState::Asking => {}
        HandshakeState::Awaiting { until } => shown["until"] = json!(until.to_string()),
        HandshakeState::Failed { at, message } => {
            shown["ended"] = json!(at.to_string());
            shown["message"] = json!(message);
        }
    }
    shown
}

fn exchange(one: &HandshakeExchange) -> Value {
    let headers = |all: &[(String, String)]| -> Value {
        all.iter()
            .map(|(name, value)| json!({"name": name, "value": value}))
            .collect()
    };
    let mut shown = json!({
        "at": one.at.to_string(),
        "method": one.method,
        "url": one.url,
        "headers": headers(&one.headers),
        "verdict": one.verdict,
    });
    match &one.received {
        HandshakeResponse::Nothing(why) => shown["failure"] = json!(why),
        HandshakeResponse::Answer {
            status,
            headers: theirs,
            body,
        } => shown["answer"] = json!({"status": status, "headers": headers(theirs), "body": body}),
    }
    shown
}

/// The URL of a webhook without its query, which is a secret.
pub(crate) fn endpoint(subscription: &Subscription) -> Option<String> {
    match &subscription.destination {
        Destination::WebHook(hook) => {
            let url = hook.url.expose();
            Some(url.split(['?', '#']).next().unwrap_or(url).to_owned())
        }
        _ => None,
    }
}

/// The resource id of a subscription; none if its topic is gone.
pub(crate) fn resource_id(server: &Server, subscription: &Subscription) -> Option<String> {
    let entry = server.engine.directory.topic_by_id(subscription.topic)?;
    let name = &subscription.name;
    if let TopicKind::System { .. } = entry.topic.kind {
        let id = topic_id(&server.config.account, &entry.topic);
        return Some(format!("{id}/eventSubscriptions/{name}"));
    }
    let inside = subscription.domain_topic.as_ref();
    let inside = inside.map_or(String::new(), |name| format!("/topics/{name}"));
    let id = &entry.full_id;
    Some(format!(
        "{id}{inside}/providers/Microsoft.EventGrid/eventSubscriptions/{name}"
    ))
}

/// Key of the lock under which the management API changes the subscription.
fn lock_key(entry: &TopicEntry, subscription: &Subscription) -> String {
    let name = &subscription.name;
    match &entry.topic.kind {
        TopicKind::Scope { source, .. } => format!("subscription/{source}/{name}").to_lowercase(),
        _ => locks::subscription(entry.topic.id, subscription.domain_topic.as_deref(), name),
    }
}

/// Repeats a failed handshake, as if the same change were requested again.
async fn repeat(server: &Server, call: &ApiCall, caller: &str, operation: &str) -> Result<Answer, Problem> {
    let seen = find(server, operation)?;
    let handshake = &seen.handshake;
    if state_of(&seen) != "failed" {
        let detail = format!(
            "only a failed handshake can be repeated, and this one is {}",
            state_of(&seen)
        );
        return Err(Problem::new(409, detail));
    }
    let engine = &server.engine;
    let topic = engine.directory.topic_by_id(handshake.subscription.topic);
    let topic = topic.ok_or_else(|| trouble(&Error::Gone))?;
    let _one_at_a_time = server
        .resource_locks
        .hold(lock_key(&topic, &handshake.subscription))
        .await;
    let mut subscription = handshake.subscription.clone();
    let known = in_force(server, &subscription);
    let base = validation_base(server, call);
    let begun = match (handshake.trial, known) {
        (true, Some(known)) => engine.repeat_handshake(&known, &base, API_VERSION, caller).await,
        (true, None) => return Err(Problem::new(409, "the subscription does not exist any more")),
        (false, known) => {
            if known.is_none() {
                // The subscription's previous id may have been in force and deleted since.
                let id = engine.next_id().await.map_err(|e| trouble(&e))?;
                subscription.id = SubscriptionId(id);
            }
            engine.ask(subscription, &base, API_VERSION, caller).await
        }
    };
    begun_answer(server, call, begun)
}

/// `{"subscription": resource id}`: begins a handshake for a subscription that is in force.
async fn ask(
    server: &Server,
    call: &ApiCall,
    caller: &str,
    members: &Map<String, Value>,
) -> Result<Answer, Problem> {
    if let Some(other) = members.keys().find(|key| *key != "subscription") {
        return Err(unknown(other, &["subscription"]));
    }
    let Some(id) = members.get("subscription").and_then(Value::as_str) else {
        return Err(Problem::field(
            "subscription",
            "must be the resource id of a subscription",
        ));
    };
    let known = by_resource_id(server, id).ok_or_else(|| Problem {
        field: Some("subscription"),
        ..Problem::new(404, format!("subscription: {id:?} does not exist"))
    })?;
    if !matches!(known.destination, Destination::WebHook(_)) {
        return Err(Problem::field(
            "subscription",
            "has no webhook that could be asked",
        ));
    }
    let base = validation_base(server, call);
    let begun = server
        .engine
        .repeat_handshake(&known, &base, API_VERSION, caller)
        .await;
    begun_answer(server, call, begun)
}

fn begun_answer(
    server: &Server,
    call: &ApiCall,
    begun: Result<Arc<postrider_store::Handshake>, Error>,
) -> Result<Answer, Problem> {
    let handshake = begun.map_err(|e| trouble(&e))?;
    let seen = HandshakeReport {
        handshake,
        ended: None,
    };
    Ok(written(call, StatusCode::ACCEPTED, &summary(server, &seen)))
}

fn trouble(error: &Error) -> Problem {
    let status = match error {
        Error::Gone | Error::DomainTopicMissing { .. } | Error::HandshakeOver => 409,
        Error::Store(_) | Error::Stopping | Error::TasksLeft(_) => 503,
    };
    Problem::new(status, error.to_string())
}

fn in_force(server: &Server, like: &Subscription) -> Option<Arc<Subscription>> {
    let directory = &server.engine.directory;
    directory.subscription(like.topic, like.domain_topic.as_deref(), &like.name)
}

pub(crate) fn by_resource_id(server: &Server, id: &str) -> Option<Arc<Subscription>> {
    let segments: Vec<String> = id
        .split('/')
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
        .collect();
    let Ok(ArmPath::EventSubscriptions {
        scope,
        name: Some(name),
        action: None,
        ..
    }) = parse_path(&segments, &server.config.account)
    else {
        return None;
    };
    let directory = &server.engine.directory;
    let account = format!("/subscriptions/{}", server.config.account);
    let (entry, inside) = match scope {
        Scope::Topic(id) => (directory.topic(&id.name), None),
        Scope::Domain(id) => (directory.domain(&id.name), None),
        Scope::DomainTopic { domain, name } => (directory.domain(&domain.name), Some(name)),
        Scope::SystemTopic(id) => (directory.system_topic(&id.group, &id.name), None),
        Scope::Account => (directory.scope_by_source(&account), None),
        Scope::Group(group) => {
            let source = format!("{account}/resourceGroups/{group}");
            (directory.scope_by_source(&source), None)
        }
        Scope::Resource(source) => (directory.scope_by_source(&source), None),
    };
    directory.subscription(entry?.topic.id, inside.as_deref(), &name)
}
