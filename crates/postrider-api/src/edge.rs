//! The edge module's API: topics and subscriptions by their short names, changed at once and
//! without handshakes.
//!
//! The API reaches topics that were made through it or declared with `edge = true`, whether it asks for keys or not.
//! Any other topic is answered as one that does not exist. Where no credential is asked for, a caller without one neither
//! changes subscriptions that were made elsewhere nor sees their secrets, and does not delete a topic that has any.

use crate::access::{AccessRefusal, RequiredPermission, bearer};
use crate::declare;
use crate::http::{Answer, ApiCall, BodyReadError, ResponseContent, decoded, empty, json, status};
use crate::own_address::request_base;
use crate::publish;
use crate::route::EdgeRoute;
use crate::throttle::{CredentialKind, LockedOut, are_unguessable};
use crate::{EdgeAccess, Server};
use bytes::Bytes;
use hyper::header::{ALLOW, HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use postrider_core::json::RawJson;
use postrider_core::subscription::{BatchDefaults, Destination, ResourceOrigin, Subscription, Topic};
use postrider_engine::directory::TopicEntry;
use postrider_wire::auth::edge_authorize;
use postrider_wire::error::{PublishError, edge_error_body};
use postrider_wire::publish::PublishApi;
use postrider_wire::resources::{
    self, BodyShape, EDGE_SUBSCRIPTION, EDGE_TOPIC, EdgeSubscription, UnknownMember, edge_subscription,
    edge_topic, read_body, unknown_members,
};
use serde::Serialize;
use std::sync::Arc;

/// Limit of the length of a resource body.
const BODY_MAX: usize = 256 << 10;

/// Why a request is refused, in the module's error format.
struct EdgeRefusal {
    status: u16,
    code: String,
    message: String,
}

impl EdgeRefusal {
    fn new(status: u16, code: &str, message: impl Into<String>) -> EdgeRefusal {
        EdgeRefusal {
            status,
            code: code.to_owned(),
            message: message.into(),
        }
    }

    fn topic_missing(name: &str) -> EdgeRefusal {
        EdgeRefusal::new(404, "TopicNotFound", format!("topic {name:?} does not exist"))
    }
}

impl From<PublishError> for EdgeRefusal {
    fn from(e: PublishError) -> EdgeRefusal {
        EdgeRefusal::new(e.status, e.detail, e.message)
    }
}

impl From<LockedOut> for EdgeRefusal {
    fn from(locked: LockedOut) -> EdgeRefusal {
        EdgeRefusal::new(429, "TooManyRequests", locked.reason())
    }
}

impl From<declare::Error> for EdgeRefusal {
    fn from(e: declare::Error) -> EdgeRefusal {
        match e {
            declare::Error::Field(e) => EdgeRefusal::new(400, e.code, e.to_string()),
            declare::Error::TopicMissing(name) => EdgeRefusal::topic_missing(&name),
            e @ declare::Error::NameTaken(_) => EdgeRefusal::new(409, "Conflict", e.to_string()),
            e @ declare::Error::Protected(_) => EdgeRefusal::new(403, "Forbidden", e.to_string()),
            declare::Error::Quota(e) => EdgeRefusal::new(409, "Conflict", e.to_string()),
            declare::Error::Engine(e) => EdgeRefusal::new(503, "ServiceUnavailable", e.to_string()),
        }
    }
}

pub(crate) async fn answer(server: &Arc<Server>, call: &mut ApiCall, route: EdgeRoute<'_>) -> Answer {
    let outcome = match admit(server, call, route) {
        Ok(rights) => dispatch(server, call, route, rights).await,
        Err(refusal) => Err(refusal),
    };
    outcome.unwrap_or_else(|refusal| {
        if matches!(route, EdgeRoute::Publish(_)) {
            server.note_publish_refused(call, refusal.status, &refusal.message);
        }
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

/// Rights of a caller beyond those that the method of its request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rights {
    /// An edge key, or a credential that may change everything.
    Full,
    /// No credential, where none is asked for.
    Anonymous,
    /// A credential that may not see secrets.
    Reader,
}

impl Rights {
    fn sees_secrets(self, subscription: &Subscription) -> bool {
        match self {
            Rights::Full => true,
            Rights::Anonymous => subscription.origin == ResourceOrigin::Edge,
            Rights::Reader => false,
        }
    }

    fn may_delete_topic(self, server: &Server, topic: &Topic) -> bool {
        let engine = &server.engine;
        // The edge API has no members for these: they were set elsewhere.
        let is_plain =
            !topic.local_auth_disabled && topic.public_network && topic.inbound_ip_rules.is_empty();
        let subscriptions = engine.directory.subscriptions(topic.id);
        self != Rights::Anonymous
            || (is_plain
                && subscriptions.iter().all(|one| one.origin == ResourceOrigin::Edge)
                && engine.handshakes.pending_of(topic.id).is_empty())
    }
}

fn admit(server: &Server, call: &ApiCall, route: EdgeRoute<'_>) -> Result<Rights, EdgeRefusal> {
    let presented = publish::presented(call);
    let with_token = || match server.caller(call, route.need(&call.method)) {
        Ok(caller) if caller.may(RequiredPermission::Write) => Ok(Rights::Full),
        Ok(_) => Ok(Rights::Reader),
        Err(AccessRefusal::Unknown(reason)) => Err(EdgeRefusal::new(401, "UnAuthorized", reason)),
        Err(AccessRefusal::Forbidden(reason)) => Err(EdgeRefusal::new(403, "Forbidden", reason)),
        Err(AccessRefusal::LockedOut(reason)) => Err(EdgeRefusal::new(429, "TooManyRequests", reason)),
    };
    let has_token = presented.key.is_none() && presented.authorization.and_then(bearer).is_some();
    match &server.config.edge {
        EdgeAccess::Open => {
            crate::own_address::addressed_by_name(server, call)
                .map_err(|message| EdgeRefusal::new(403, "Forbidden", message))?;
            check_not_a_page(call)?;
            if has_token {
                return with_token();
            }
            Ok(Rights::Anonymous)
        }
        EdgeAccess::Keys(_) if has_token => with_token(),
        EdgeAccess::Keys(keys) => {
            let (keys, kind) = ([&keys[0], &keys[1]], CredentialKind::EdgeKey);
            if presented.key.is_some() && !are_unguessable(keys) {
                server.check_lockout(call, kind)?;
            }
            let authorized = edge_authorize(&presented, keys);
            if authorized.is_err() && presented.key.is_some() {
                server.wrong_credential(call, kind, "")?;
            }
            authorized?;
            call.notes.actor("edge-key", &[], "edge-key");
            Ok(Rights::Full)
        }
    }
}

/// Refuses requests that pages of other origins make a browser send. Without a preflight request a
/// browser sends only what a form could send, and this server answers no preflight.
fn check_not_a_page(call: &ApiCall) -> Result<(), EdgeRefusal> {
    let from = call.header("sec-fetch-site");
    if !matches!(from, None | Some("same-origin" | "none")) {
        let message = "sec-fetch-site: pages of another origin may not use this server";
        return Err(EdgeRefusal::new(403, "Forbidden", message));
    }
    // A CloudEvent in binary mode may have data of any type; a form cannot send its headers.
    let binary = call.headers.contains_key("ce-id") || call.headers.contains_key("ce-specversion");
    if call.body_is_empty() || binary {
        return Ok(());
    }
    let given = call.header("content-type").unwrap_or_default();
    if is_json(given) {
        return Ok(());
    }
    let message = format!(
        "content-type: must be application/json, or application/cloudevents+json and such, for a body, was {given:?}"
    );
    Err(EdgeRefusal::new(415, "UnsupportedMediaType", message))
}

/// `application/json` and `application/…+json`, with or without parameters.
fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    let lower = essence.to_ascii_lowercase();
    let Some(subtype) = lower.strip_prefix("application/") else {
        return false;
    };
    let fits = subtype
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "+-._".contains(c));
    fits && (subtype == "json" || subtype.ends_with("+json"))
}

async fn dispatch(
    server: &Arc<Server>,
    call: &mut ApiCall,
    route: EdgeRoute<'_>,
    rights: Rights,
) -> Result<Answer, EdgeRefusal> {
    publish::check_version(call)?;
    match (call.method.clone(), route) {
        (Method::GET, EdgeRoute::Topics) => Ok(list_topics(server, call)),
        (Method::PUT, EdgeRoute::Topic(name)) => put_topic(server, call, &decoded(name)).await,
        (Method::GET, EdgeRoute::Topic(name)) => {
            let topic = find_topic(server, &decoded(name))?;
            Ok(body(
                call,
                &edge_topic(
                    &topic.topic,
                    &request_base(server, call),
                    &server.config.module_path,
                ),
            ))
        }
        (Method::DELETE, EdgeRoute::Topic(name)) => {
            let topic = find_topic(server, &decoded(name))?;
            if !rights.may_delete_topic(server, &topic.topic) {
                return Err(declare::Error::Protected(format!("topic {:?}", topic.topic.name)).into());
            }
            server
                .engine
                .delete_topic(topic.topic.id)
                .await
                .map_err(declare::Error::Engine)?;
            Ok(empty(StatusCode::OK, &call.id))
        }
        (Method::POST, EdgeRoute::Publish(name)) => {
            let topic = find_topic(server, &decoded(name))?;
            let accepted = match publish::check_edge(server, call, &topic) {
                Ok(()) => publish::accept(server, call, &topic, PublishApi::Edge, "edge").await,
                Err(refused) => Err(refused),
            };
            if let Err(error) = accepted {
                return Ok(publish::count_refusal(
                    server,
                    call,
                    &topic,
                    &error,
                    PublishApi::Edge,
                ));
            }
            Ok(empty(StatusCode::OK, &call.id))
        }
        (Method::GET, EdgeRoute::Subscriptions(name)) => {
            let topic = find_topic(server, &decoded(name))?;
            let found = server.engine.directory.subscriptions(topic.topic.id);
            if found
                .iter()
                .any(|one| rights.sees_secrets(one) && has_secret_url(one))
            {
                call.notes.secret_was_shown();
            }
            let module = server.config.module_path.clone();
            let defaults = server.config.resource_limits.batch_defaults;
            let bodies = found
                .into_iter()
                .map(move |s| text(&shown(&s, &topic.topic, &module, &defaults, rights)));
            Ok(list(call, bodies))
        }
        (
            Method::PUT,
            EdgeRoute::Subscription {
                topic: name,
                name: subscription,
            },
        ) => put_subscription(server, call, &decoded(name), &decoded(subscription), rights).await,
        (
            Method::GET,
            EdgeRoute::Subscription {
                topic: name,
                name: subscription,
            },
        ) => {
            let topic = find_topic(server, &decoded(name))?;
            let found = find_subscription(server, &topic, &decoded(subscription))?;
            if rights.sees_secrets(&found) && has_secret_url(&found) {
                call.notes.secret_was_shown();
            }
            let module = &server.config.module_path;
            let defaults = &server.config.resource_limits.batch_defaults;
            Ok(body(call, &shown(&found, &topic.topic, module, defaults, rights)))
        }
        (
            Method::DELETE,
            EdgeRoute::Subscription {
                topic: name,
                name: subscription,
            },
        ) => {
            let topic = find_topic(server, &decoded(name))?;
            let found = find_subscription(server, &topic, &decoded(subscription))?;
            if rights == Rights::Anonymous && found.origin != ResourceOrigin::Edge {
                return Err(declare::Error::Protected(format!("subscription {:?}", found.name)).into());
            }
            server
                .engine
                .delete_subscription(found.id)
                .await
                .map_err(declare::Error::Engine)?;
            Ok(empty(StatusCode::OK, &call.id))
        }
        (_, EdgeRoute::Unknown) => Err(EdgeRefusal::new(
            404,
            "ResourceNotFound",
            format!("nothing is at {}", call.uri.path()),
        )),
        (_, route) => Ok(not_allowed(call, route.allow())),
    }
}

/// A subscription as this API shows it to a caller.
fn shown(
    subscription: &Subscription,
    topic: &Topic,
    module_path: &str,
    batch_defaults: &BatchDefaults,
    rights: Rights,
) -> EdgeSubscription {
    let body = edge_subscription(subscription, topic, module_path, batch_defaults);
    match rights.sees_secrets(subscription) {
        true => body,
        false => body.without_secrets(),
    }
}

/// Whether this API shows a URL with a query, which the management API shows only with
/// `getFullUrl`.
fn has_secret_url(subscription: &Subscription) -> bool {
    match &subscription.destination {
        Destination::WebHook(hook) => hook.url.expose().contains('?'),
        _ => false,
    }
}

fn not_allowed(call: &ApiCall, allow: &'static str) -> Answer {
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

/// Size of the pieces in which a list is rendered.
const LIST_PIECE_BYTES_MIN: usize = 32 << 10;

/// A list of any length, rendered while it is read: only one piece at a time waits to be sent.
fn list(call: &ApiCall, bodies: impl Iterator<Item = Vec<u8>> + Send + 'static) -> Answer {
    let mut pieces = array_pieces(bodies).peekable();
    let first = pieces.next().unwrap_or_default();
    // A short list is sent with a length, for clients that do not support chunked encoding.
    if pieces.peek().is_none() {
        return json(StatusCode::OK, first, &call.id);
    }
    let mut answer = json(StatusCode::OK, Bytes::new(), &call.id);
    let pieces = std::iter::once(first).chain(pieces);
    *answer.body_mut() = ResponseContent::Pieces(Box::new(pieces));
    answer
}

/// The text of a JSON array, in pieces.
fn array_pieces(bodies: impl Iterator<Item = Vec<u8>>) -> impl Iterator<Item = Bytes> {
    let mut bodies = bodies.peekable();
    let (mut begun, mut ended) = (false, false);
    std::iter::from_fn(move || {
        if ended {
            return None;
        }
        let mut piece = Vec::new();
        if !std::mem::replace(&mut begun, true) {
            piece.push(b'[');
        }
        while piece.len() < LIST_PIECE_BYTES_MIN
            && let Some(body) = bodies.next()
        {
            piece.extend_from_slice(&body);
            if bodies.peek().is_some() {
                piece.push(b',');
            }
        }
        if bodies.peek().is_none() {
            piece.push(b']');
            ended = true;
        }
        Some(Bytes::from(piece))
    })
}

fn body(call: &ApiCall, value: &impl Serialize) -> Answer {
    json(StatusCode::OK, text(value), &call.id)
}

fn text(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("resource bodies have string keys and no failing parts")
}

fn find_topic(server: &Server, name: &str) -> Result<Arc<TopicEntry>, EdgeRefusal> {
    server
        .engine
        .directory
        .topic(name)
        .filter(|entry| entry.topic.is_edge())
        .ok_or_else(|| EdgeRefusal::topic_missing(name))
}

fn find_subscription(
    server: &Server,
    topic: &TopicEntry,
    name: &str,
) -> Result<Arc<Subscription>, EdgeRefusal> {
    let found = server.engine.directory.subscription(topic.topic.id, None, name);
    found.ok_or_else(|| {
        let message = format!(
            "subscription {name:?} of topic {:?} does not exist",
            topic.topic.name
        );
        EdgeRefusal::new(404, "EventSubscriptionNotFound", message)
    })
}

fn list_topics(server: &Server, call: &ApiCall) -> Answer {
    let (base, module) = (request_base(server, call), server.config.module_path.clone());
    let topics = server.engine.directory.topics().into_iter();
    let reached = topics.filter(|entry| entry.topic.is_edge());
    list(
        call,
        reached.map(move |t| text(&edge_topic(&t.topic, &base, &module))),
    )
}

async fn resource_body(call: &mut ApiCall) -> Result<Bytes, EdgeRefusal> {
    match call.read_body(BODY_MAX).await {
        Ok(Some(body)) => Ok(body),
        Ok(None) => Err(EdgeRefusal::new(
            413,
            "PayloadTooLarge",
            format!("the body is longer than {BODY_MAX} bytes"),
        )),
        Err(cut) => {
            let code = match cut {
                BodyReadError::Broken => "InvalidRequest",
                BodyReadError::TooSlow(_) => "RequestTimeout",
                BodyReadError::NoRoom => "TooManyRequests",
            };
            Err(EdgeRefusal::new(cut.status(), code, cut.reason()))
        }
    }
}

fn parse_body(bytes: &[u8]) -> Result<RawJson<'_>, EdgeRefusal> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        // A topic needs no body.
        return Ok(RawJson::trusted("null"));
    }
    read_body(bytes).map_err(|e| EdgeRefusal::new(400, e.code, e.to_string()))
}

async fn put_topic(server: &Arc<Server>, call: &mut ApiCall, name: &str) -> Result<Answer, EdgeRefusal> {
    let bytes = resource_body(call).await?;
    let raw = parse_body(&bytes)?;
    let topic = declare::topic(server, raw, resources::Road::Edge, name, None).await?;
    let shown = edge_topic(
        &topic.topic,
        &request_base(server, call),
        &server.config.module_path,
    );
    let unknown = unknown_members_of(&bytes, &EDGE_TOPIC);
    Ok(with_warning(
        body(call, &shown),
        &format!("topic {name:?}"),
        &unknown,
    ))
}

/// Members that were ignored, because the module ignores members that it does not know.
fn unknown_members_of(bytes: &[u8], shape: &BodyShape) -> Vec<UnknownMember> {
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    match serde_json::from_slice(text) {
        Ok(body) => unknown_members(&body, shape),
        // The body is absent.
        Err(_) => Vec::new(),
    }
}

const WARNING: HeaderName = HeaderName::from_static("postrider-warning");
/// Limit of the characters of a warning in a header.
const WARNING_CHARS_MAX: usize = 1024;

/// Reports ignored members in a header of the answer and in the log.
fn with_warning(mut answer: Answer, of: &str, unknown: &[UnknownMember]) -> Answer {
    if unknown.is_empty() {
        return answer;
    }
    let paths: Vec<&str> = unknown.iter().map(|one| one.path.as_str()).collect();
    let members = paths.join(", ");
    tracing::warn!(%members, "{of}: members that the edge API does not know were ignored");
    let visible = |letter: char| {
        if letter == ' ' || letter.is_ascii_graphic() {
            letter
        } else {
            '?'
        }
    };
    let text = format!("ignored because unknown: {members}");
    let text: String = text.chars().take(WARNING_CHARS_MAX).map(visible).collect();
    if let Ok(value) = HeaderValue::from_str(&text) {
        answer.headers_mut().insert(WARNING, value);
    }
    answer
}

async fn put_subscription(
    server: &Arc<Server>,
    call: &mut ApiCall,
    topic: &str,
    name: &str,
    rights: Rights,
) -> Result<Answer, EdgeRefusal> {
    let bytes = resource_body(call).await?;
    let raw = parse_body(&bytes)?;
    let (topic, made) = match rights {
        Rights::Anonymous => declare::edge_subscription_unless_protected(server, raw, topic, name).await?,
        Rights::Full | Rights::Reader => {
            declare::subscription(server, raw, resources::Road::Edge, topic, name).await?
        }
    };
    let unknown = unknown_members_of(&bytes, &EDGE_SUBSCRIPTION);
    let config = &server.config;
    let defaults = &config.resource_limits.batch_defaults;
    let shown = edge_subscription(&made, &topic.topic, &config.module_path, defaults);
    let answer = body(call, &shown);
    Ok(with_warning(answer, &format!("subscription {name:?}"), &unknown))
}

/// Decides for topics of versions that did not record how a topic was made: a topic whose
/// subscriptions were all made through the edge API is an edge topic. A topic without subscriptions
/// is not, since nothing shows how it was made.
pub async fn adopt_earlier_topics(server: &Server) -> Result<(), postrider_engine::Error> {
    let directory = &server.engine.directory;
    for entry in directory.topics() {
        if entry.topic.edge.is_some() {
            continue;
        }
        let subscriptions = directory.subscriptions(entry.topic.id);
        let through_edge = |s: &&Arc<Subscription>| s.origin == ResourceOrigin::Edge;
        let count = subscriptions.iter().filter(through_edge).count();
        // Without subscriptions the topic is not reachable by the edge API, so it cannot get an
        // edge subscription later either; the decision need not be stored.
        if count == 0 {
            continue;
        }
        let edge = count == subscriptions.len();
        let topic = Topic {
            edge: Some(edge),
            ..(*entry.topic).clone()
        };
        server
            .engine
            .replace_topic_if_unchanged(topic, Some(entry.clone()))
            .await?;
        tracing::info!(
            topic = %entry.topic.name,
            edge,
            "topic of an earlier version: whether the edge API reaches it was decided by its subscriptions"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
