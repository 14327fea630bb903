//! The edge module's API: topics and subscriptions by their short names, all at once, no handshake.

use crate::access::{Need, NoAccess, bearer};
use crate::declare;
use crate::http::{Answer, Call, Segments, decoded, empty, json, status};
use crate::publish;
use crate::{EdgeAccess, Server};
use hyper::header::{ALLOW, HeaderValue};
use hyper::{Method, StatusCode};
use postrider_core::json::Raw;
use postrider_engine::directory::TopicEntry;
use postrider_wire::auth::edge_authorize;
use postrider_wire::error::{PublishError, edge_error_body};
use postrider_wire::publish::Road;
use postrider_wire::resources::{self, edge_subscription, edge_topic, read_body};
use serde::Serialize;
use std::sync::Arc;

/// A resource body is never longer than this.
const BODY_MAX: usize = 256 << 10;

/// Why a request is refused, in the module's dialect.
struct Refusal {
    status: u16,
    code: String,
    message: String,
}

impl Refusal {
    fn new(status: u16, code: &str, message: impl Into<String>) -> Refusal {
        Refusal {
            status,
            code: code.to_owned(),
            message: message.into(),
        }
    }

    fn topic_missing(name: &str) -> Refusal {
        Refusal::new(404, "TopicNotFound", format!("topic {name:?} does not exist"))
    }
}

impl From<PublishError> for Refusal {
    fn from(e: PublishError) -> Refusal {
        Refusal::new(e.status, e.detail, e.message)
    }
}

impl From<declare::Error> for Refusal {
    fn from(e: declare::Error) -> Refusal {
        match e {
            declare::Error::Field(e) => Refusal::new(400, e.code, e.to_string()),
            declare::Error::TopicMissing(name) => Refusal::topic_missing(&name),
            declare::Error::Engine(e) => Refusal::new(503, "ServiceUnavailable", e.to_string()),
        }
    }
}

pub async fn answer(server: &Arc<Server>, call: &mut Call, segments: &Segments<'_>) -> Answer {
    let outcome = match admit(server, call, segments) {
        Ok(()) => route(server, call, segments).await,
        Err(refusal) => Err(refusal),
    };
    outcome.unwrap_or_else(|refusal| {
        let body = edge_error_body(refusal.status, &refusal.code, &refusal.message);
        let mut answer = json(status(refusal.status), body, &call.id);
        if matches!(refusal.status, 429 | 503) {
            answer
                .headers_mut()
                .insert(hyper::header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        answer
    })
}

fn admit(server: &Server, call: &Call, segments: &Segments<'_>) -> Result<(), Refusal> {
    match &server.config.edge {
        EdgeAccess::Open => crate::ours::addressed_by_name(server, call)
            .map_err(|message| Refusal::new(403, "Forbidden", message)),
        EdgeAccess::Keys(keys) => {
            let presented = publish::presented(call);
            if presented.key.is_none() && presented.authorization.and_then(bearer).is_some() {
                return match server.caller(call, need(call, segments)) {
                    Ok(_) => Ok(()),
                    Err(NoAccess::Unknown(reason)) => Err(Refusal::new(401, "UnAuthorized", reason)),
                    Err(NoAccess::Forbidden(reason)) => Err(Refusal::new(403, "Forbidden", reason)),
                };
            }
            edge_authorize(&presented, [&keys[0], &keys[1]])?;
            Ok(())
        }
    }
}

fn need(call: &Call, segments: &Segments<'_>) -> Need {
    let publishes = segments.get(2).eq_ignore_ascii_case("events");
    match call.method {
        Method::GET | Method::HEAD => Need::Read,
        Method::POST if publishes => Need::Send,
        _ => Need::Write,
    }
}

async fn route(server: &Arc<Server>, call: &mut Call, segments: &Segments<'_>) -> Result<Answer, Refusal> {
    publish::check_version(call)?;
    let subscriptions = |at: usize| segments.get(at).eq_ignore_ascii_case("eventSubscriptions");
    let events = |at: usize| segments.get(at).eq_ignore_ascii_case("events");
    let name = |at: usize| decoded(segments.get(at));
    match (call.method.clone(), segments.count()) {
        (Method::GET, 1) => Ok(list_topics(server, call)),
        (Method::PUT, 2) => put_topic(server, call, &name(1)).await,
        (Method::GET, 2) => {
            let topic = find_topic(server, &name(1))?;
            Ok(body(
                call,
                &edge_topic(&topic.topic, &base_url(call), &server.config.module_path),
            ))
        }
        (Method::DELETE, 2) => {
            let topic = find_topic(server, &name(1))?;
            server
                .engine
                .delete_topic(topic.topic.id)
                .await
                .map_err(declare::Error::Engine)?;
            Ok(empty(StatusCode::OK, &call.id))
        }
        (Method::POST, 3 | 4) if events(2) => {
            let topic = find_topic(server, &name(1))?;
            let accepted = publish::accept(server, call, &topic, Road::Edge, "edge").await;
            if let Err(error) = accepted {
                return Ok(publish::count_refusal(server, call, &topic, &error, Road::Edge));
            }
            Ok(empty(StatusCode::OK, &call.id))
        }
        (Method::GET, 3) if subscriptions(2) => {
            let topic = find_topic(server, &name(1))?;
            let found = server.engine.directory.subscriptions(topic.topic.id);
            let module = &server.config.module_path;
            let list: Vec<_> = found
                .iter()
                .map(|s| edge_subscription(s, &topic.topic, module))
                .collect();
            Ok(body(call, &list))
        }
        (Method::PUT, 4) if subscriptions(2) => put_subscription(server, call, &name(1), &name(3)).await,
        (Method::GET, 4) if subscriptions(2) => {
            let topic = find_topic(server, &name(1))?;
            let found = find_subscription(server, &topic, &name(3))?;
            Ok(body(
                call,
                &edge_subscription(&found, &topic.topic, &server.config.module_path),
            ))
        }
        (Method::DELETE, 4) if subscriptions(2) => {
            let topic = find_topic(server, &name(1))?;
            let found = find_subscription(server, &topic, &name(3))?;
            server
                .engine
                .delete_subscription(found.id)
                .await
                .map_err(declare::Error::Engine)?;
            Ok(empty(StatusCode::OK, &call.id))
        }
        (_, 1) => Ok(not_allowed(call, "GET")),
        (_, 2) => Ok(not_allowed(call, "GET, PUT, DELETE")),
        (_, 3 | 4) if events(2) => Ok(not_allowed(call, "POST")),
        (_, 3) if subscriptions(2) => Ok(not_allowed(call, "GET")),
        (_, 4) if subscriptions(2) => Ok(not_allowed(call, "GET, PUT, DELETE")),
        _ => Err(Refusal::new(
            404,
            "ResourceNotFound",
            format!("nothing is at {}", call.uri.path()),
        )),
    }
}

fn not_allowed(call: &Call, allow: &'static str) -> Answer {
    let message = format!("{} is not allowed here; allowed: {allow}", call.method);
    let mut answer = json(
        StatusCode::METHOD_NOT_ALLOWED,
        edge_error_body(405, "MethodNotAllowed", &message),
        &call.id,
    );
    answer
        .headers_mut()
        .insert(ALLOW, HeaderValue::from_static(allow));
    answer
}

/// `endpoint` is derived from the base URL of the current request.
fn base_url(call: &Call) -> String {
    format!("{}://{}", call.scheme, call.host())
}

fn body(call: &Call, value: &impl Serialize) -> Answer {
    let text = serde_json::to_vec(value).expect("resource bodies have string keys and no failing parts");
    json(StatusCode::OK, text, &call.id)
}

fn find_topic(server: &Server, name: &str) -> Result<Arc<TopicEntry>, Refusal> {
    server
        .engine
        .directory
        .topic(name)
        .ok_or_else(|| Refusal::topic_missing(name))
}

fn find_subscription(
    server: &Server,
    topic: &TopicEntry,
    name: &str,
) -> Result<Arc<postrider_core::subscription::Subscription>, Refusal> {
    let found = server.engine.directory.subscription(topic.topic.id, None, name);
    found.ok_or_else(|| {
        let message = format!(
            "subscription {name:?} of topic {:?} does not exist",
            topic.topic.name
        );
        Refusal::new(404, "EventSubscriptionNotFound", message)
    })
}

fn list_topics(server: &Server, call: &Call) -> Answer {
    let base = base_url(call);
    let topics = server.engine.directory.topics();
    let list: Vec<_> = topics
        .iter()
        .map(|t| edge_topic(&t.topic, &base, &server.config.module_path))
        .collect();
    body(call, &list)
}

async fn resource_body(call: &mut Call) -> Result<bytes::Bytes, Refusal> {
    match call.read_body(BODY_MAX).await {
        Ok(Some(body)) => Ok(body),
        Ok(None) => Err(Refusal::new(
            413,
            "PayloadTooLarge",
            format!("the body is longer than {BODY_MAX} bytes"),
        )),
        Err(_) => Err(Refusal::new(400, "InvalidRequest", "the body was cut short")),
    }
}

fn parse_body(bytes: &[u8]) -> Result<Raw<'_>, Refusal> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        // A topic needs no body at all.
        return Ok(Raw::trusted("null"));
    }
    read_body(bytes).map_err(|e| Refusal::new(400, e.code, e.to_string()))
}

async fn put_topic(server: &Arc<Server>, call: &mut Call, name: &str) -> Result<Answer, Refusal> {
    let bytes = resource_body(call).await?;
    let raw = parse_body(&bytes)?;
    let topic = declare::topic(server, raw, resources::Road::Edge, name, None).await?;
    Ok(body(
        call,
        &edge_topic(&topic.topic, &base_url(call), &server.config.module_path),
    ))
}

async fn put_subscription(
    server: &Arc<Server>,
    call: &mut Call,
    topic: &str,
    name: &str,
) -> Result<Answer, Refusal> {
    let bytes = resource_body(call).await?;
    let raw = parse_body(&bytes)?;
    let (topic, made) = declare::subscription(server, raw, resources::Road::Edge, topic, name).await?;
    Ok(body(
        call,
        &edge_subscription(&made, &topic.topic, &server.config.module_path),
    ))
}
