//! The publish API of the cloud: publishing to topics and domains.

use crate::Server;
use crate::access::{AccessRefusal, Caller, RequiredPermission};
use crate::body_memory::BodyCharge;
use crate::connections::client_network;
use crate::http::{Answer, ApiCall, BodyReadError, compute_off_worker, empty, json, status};
use crate::throttle::{CredentialKind, LockedOut, are_unguessable};
use bytes::Bytes;
use hyper::header::{ALLOW, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, StatusCode};
use postrider_core::event::{EventSchema, PublishedBatch};
use postrider_core::filter::FilterBudget;
use postrider_core::subscription::TopicKind;
use postrider_core::trace::{TRACEPARENT, TRACESTATE, stored_context};
use postrider_engine::attempt::HOPS;
use postrider_engine::directory::{BudgetScope, TopicEntry};
use postrider_store::Error as StoreError;
use postrider_wire::arm::ip_allowed;
use postrider_wire::auth::{AuthorizedBy, PresentedCredentials, TopicCredentials, authorize};
use postrider_wire::error::{cloud_error_body, edge_error_body, schema_name};
use postrider_wire::publish::{EventRules, PublishApi, PublishError, PublishHeaders, parse};
use std::borrow::Cow;
use std::sync::Arc;

pub const API_VERSION: &str = "2018-01-01";
const EDGE_API_VERSION: &str = "2019-01-01-preview";
const SUPPORTED: HeaderName = HeaderName::from_static("api-supported-versions");
const INPUT_SCHEMA: HeaderName = HeaderName::from_static("aeg-input-event-schema");

/// Filters that examine at most this many bytes are evaluated on the worker thread that read the
/// request. More would delay the other connections of that thread.
const FILTER_INLINE_BYTES_MAX: u64 = 2 << 20;
/// The byte budget of the filters for one request is that of this many events.
pub const FILTER_REQUEST_EVENTS: u64 = 4;

/// `POST /topics/{topic}/api/events`
pub async fn topic(server: &Arc<Server>, call: &mut ApiCall, name: &str) -> Answer {
    match server.engine.directory.topic(name) {
        Some(topic) => events(server, call, topic).await,
        None => unknown(server, call),
    }
}

/// `POST /domains/{domain}/api/events`
pub async fn domain(server: &Arc<Server>, call: &mut ApiCall, name: &str) -> Answer {
    match server.engine.directory.domain(name) {
        Some(topic) => events(server, call, topic).await,
        None => unknown(server, call),
    }
}

/// `POST /api/events`, with the topic or domain in the host's first label.
pub async fn by_host(server: &Arc<Server>, call: &mut ApiCall) -> Answer {
    let name = call.host().split(['.', ':']).next().unwrap_or("").to_owned();
    let directory = &server.engine.directory;
    match directory.topic(&name).or_else(|| directory.domain(&name)) {
        Some(topic) => events(server, call, topic).await,
        None => unknown(server, call),
    }
}

/// Answers for a topic or domain that does not exist, or for a publish URL without `/api/events`.
/// Counted as a refused publish request.
pub fn unknown(server: &Server, call: &ApiCall) -> Answer {
    refuse(server, call, &not_found(call), PublishApi::Cloud)
}

/// Answers for a path that does not exist. Nobody publishes there, so it is not counted as a
/// refused publish request.
pub fn no_such_path(call: &ApiCall) -> Answer {
    answer_refused(call, &not_found(call), PublishApi::Cloud)
}

fn not_found(call: &ApiCall) -> PublishError {
    let uri = format!("{}://{}{}", call.scheme, call.host(), call.uri.path());
    PublishError::not_found(&uri)
}

async fn events(server: &Arc<Server>, call: &mut ApiCall, topic: Arc<TopicEntry>) -> Answer {
    match call.method {
        Method::POST => {}
        Method::OPTIONS => {
            let mut answer = empty(StatusCode::OK, &call.id);
            let headers = answer.headers_mut();
            headers.insert(ALLOW, HeaderValue::from_static("POST, OPTIONS"));
            headers.insert(SUPPORTED, HeaderValue::from_static(API_VERSION));
            let schema = schema_name(topic.topic.input_schema);
            headers.insert(INPUT_SCHEMA, HeaderValue::from_static(schema));
            return answer;
        }
        Method::HEAD => return empty(StatusCode::NOT_FOUND, &call.id),
        _ => {
            let error = PublishError::method_not_allowed(call.method.as_str());
            let mut answer = refuse(server, call, &error, PublishApi::Cloud);
            answer
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("OPTIONS, POST"));
            return answer;
        }
    }
    let publisher = match check(server, call, &topic) {
        Ok(publisher) => publisher,
        Err(error) => return count_refusal(server, call, &topic, &error, PublishApi::Cloud),
    };
    match accept(server, call, &topic, PublishApi::Cloud, &publisher).await {
        Ok(()) => {
            let mut answer = empty(StatusCode::OK, &call.id);
            answer
                .headers_mut()
                .insert(SUPPORTED, HeaderValue::from_static(API_VERSION));
            answer
        }
        Err(error) => count_refusal(server, call, &topic, &error, PublishApi::Cloud),
    }
}

pub fn count_refusal(
    server: &Server,
    call: &ApiCall,
    topic: &TopicEntry,
    error: &PublishError,
    road: PublishApi,
) -> Answer {
    postrider_engine::counters::add(&topic.published.refused, 1);
    if error.status >= 500 {
        postrider_engine::counters::add(&topic.published.refused_by_trouble, 1);
    }
    refuse(server, call, error, road)
}

/// Checks the API version, the network rules and the credential.
fn check(server: &Server, call: &ApiCall, topic: &TopicEntry) -> Result<Cow<'static, str>, PublishError> {
    check_version(call)?;
    check_network(call, topic)?;
    let presented = presented(call);
    let signed = presented.token.is_some() || presented.authorization.is_some();
    // Only signatures depend on the URL that was used.
    let (mut url_used, mut also_known_as) = (String::new(), Vec::new());
    if signed {
        url_used = format!("{}://{}{}", call.scheme, call.host(), call.uri.path());
        also_known_as.extend(
            server
                .config
                .public_url
                .as_ref()
                .map(|url| format!("{url}{}", call.uri.path())),
        );
    }
    let guard = TopicCredentials {
        keys: [&topic.topic.keys[0], &topic.topic.keys[1]],
        local_auth_disabled: topic.topic.local_auth_disabled,
        url_used: &url_used,
        also_known_as: &also_known_as,
        host: call.host(),
    };
    let kind = CredentialKind::TopicKey(topic.topic.id);
    let locked_out = |locked: LockedOut| PublishError::locked_out(locked.reason());
    let is_key = presented.is_key_or_signature();
    if is_key && !are_unguessable(guard.keys) {
        server.check_lockout(call, kind).map_err(locked_out)?;
    }
    let authorized = authorize(&presented, &guard, server.wall.now());
    if is_key && authorized.is_err() && guard.is_unknown(&presented) {
        server
            .wrong_credential(call, kind, &topic.topic.name)
            .map_err(locked_out)?;
    }
    match authorized? {
        AuthorizedBy::Key(1) => Ok("key1".into()),
        AuthorizedBy::Key(_) => Ok("key2".into()),
        AuthorizedBy::SasToken => Ok("SAS token".into()),
        AuthorizedBy::Bearer(token) => {
            let caller = check_token(server, call, token)?;
            Ok(format!("client {}", caller.id).into())
        }
    }
}

/// Checks `publicNetworkAccess` and `inboundIpRules`. Private endpoints do not exist here, so a
/// topic without public access accepts no events at all.
fn check_network(call: &ApiCall, topic: &TopicEntry) -> Result<(), PublishError> {
    let allowed = topic.topic.public_network && ip_allowed(&topic.topic.inbound_ip_rules, call.peer);
    if allowed {
        return Ok(());
    }
    let why = format!(
        "Publishing to {} from {} is not allowed by the network rules of the resource.",
        topic.topic.name, call.peer
    );
    Err(PublishError::forbidden(&why))
}

pub fn check_version(call: &ApiCall) -> Result<(), PublishError> {
    match call.query("api-version") {
        None | Some(API_VERSION | EDGE_API_VERSION) => Ok(()),
        Some(other) => Err(PublishError::api_version_unsupported(
            &crate::http::decoded(other),
            API_VERSION,
        )),
    }
}

pub fn presented(call: &ApiCall) -> PresentedCredentials<'_> {
    // A credential that is not text is wrong, not absent.
    let header = |name: &str| call.headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    PresentedCredentials {
        key: header("aeg-sas-key"),
        token: header("aeg-sas-token"),
        authorization: header("authorization"),
        query_key: call.query("aeg-sas-key"),
    }
}

/// Checks the topic's own restrictions for events that the edge API accepts: network rules and
/// disabled local authentication.
pub fn check_edge(server: &Server, call: &ApiCall, topic: &TopicEntry) -> Result<(), PublishError> {
    check_network(call, topic)?;
    if !topic.topic.local_auth_disabled {
        return Ok(());
    }
    let presented = presented(call);
    let token = presented.authorization.and_then(crate::access::bearer);
    match token.filter(|_| presented.key.is_none()) {
        Some(token) => check_token(server, call, token).map(|_| ()),
        None => Err(PublishError::key_unauthorized(
            call.host(),
            Some("Local authentication is disabled"),
        )),
    }
}

/// The caller of a bearer token, if it may publish.
fn check_token(server: &Server, call: &ApiCall, token: &str) -> Result<Caller, PublishError> {
    let caller = server
        .caller_of_token(call, token)
        .and_then(|c| c.need(RequiredPermission::Send));
    caller.map_err(|refused| match refused {
        AccessRefusal::Unknown(reason) => PublishError::key_unauthorized(call.host(), Some(&reason)),
        AccessRefusal::Forbidden(reason) => PublishError::forbidden(&reason),
        AccessRefusal::LockedOut(reason) => PublishError::locked_out(reason),
    })
}

/// Reads the events, routes them, and returns when they are durable.
pub async fn accept(
    server: &Server,
    call: &mut ApiCall,
    topic: &TopicEntry,
    road: PublishApi,
    publisher: &str,
) -> Result<(), PublishError> {
    let limits = server.config.limits;
    let room = &call.limits.publish_bodies;
    let address = client_network(call.peer);
    let shares = room.shares(topic.topic.id, publisher, address);
    call.charge = Some(BodyCharge::new(room.clone(), shares, 0));
    let body = match call.read_body(limits.request_bytes).await {
        Ok(Some(body)) => body,
        Ok(None) => return Err(PublishError::request_too_large(limits.request_bytes)),
        Err(BodyReadError::Broken) => {
            return Err(PublishError::nonconforming(
                topic.topic.input_schema,
                "The body was cut short.",
            ));
        }
        Err(BodyReadError::NoRoom) => return Err(PublishError::too_many_requests()),
        Err(cut @ BodyReadError::TooSlow(_)) => return Err(PublishError::request_timeout(&cut.reason())),
    };
    // Not admitted earlier: a body that does not arrive would hold the slot.
    let Some(_place) = server.admit_publish() else {
        return Err(PublishError::too_many_requests());
    };
    let hops = hops(call)?;
    let renewed;
    let topic = match server.cluster.is_some() {
        false => topic,
        // The body may have taken a while. Events are matched by what is in force once they have
        // arrived.
        true => {
            check_current(server)?;
            let uri = format!("{}://{}{}", call.scheme, call.host(), call.uri.path());
            let known = server.engine.directory.topic_by_id(topic.topic.id);
            renewed = known.ok_or_else(|| PublishError::not_found(&uri))?;
            &*renewed
        }
    };
    let now = server.engine.clock.now();
    let rules = EventRules {
        road,
        schema: topic.topic.input_schema,
        mapping: topic.topic.mapping.as_ref(),
        topic_id: match road {
            PublishApi::Cloud => &topic.full_id,
            PublishApi::Edge => &topic.topic.name,
        },
        domain: matches!(topic.topic.kind, TopicKind::Domain { .. }),
        limits,
    };
    let event_budget = FilterBudget::bytes(server.config.filter_bytes_max);
    let request_bytes_max = server
        .config
        .filter_bytes_max
        .saturating_mul(FILTER_REQUEST_EVENTS);
    let request_budget = FilterBudget::bytes(request_bytes_max);
    let route = |body: Bytes, request_budget: FilterBudget| {
        let ce_headers = ce_headers(call, topic.topic.input_schema);
        let head = PublishHeaders {
            content_type: call.header("content-type"),
            ce_headers: &ce_headers,
        };
        let router = server.engine.router(topic, now, event_budget);
        let mut router = router.within(request_budget);
        let parsed = parse(&rules, &head, body, |event| {
            router.route(&event.envelope, event.domain_topic.as_deref())
        })?;
        let batch = |(matched, routed)| {
            let batch = PublishedBatch {
                topic: topic.topic.id,
                schema: topic.topic.input_schema,
                received: now,
                publisher: publisher.into(),
                trace: trace(call),
                replay: 0,
                hops,
                body: parsed.body,
                events: parsed.events,
                matched,
            };
            (batch, routed)
        };
        Ok::<_, PublishError>(router.finish().map(batch))
    };
    let inline_budget = FilterBudget::bytes(FILTER_INLINE_BYTES_MAX).min(request_budget);
    let mut routed = None;
    let filter_bytes = topic.filter_bytes(body.len());
    if filter_bytes == 0 {
        routed = Some(route(body.clone(), request_budget)?);
    } else if filter_bytes as u64 <= FILTER_INLINE_BYTES_MAX {
        let inline = route(body.clone(), inline_budget)?;
        // Filters that examine more than the inline budget are evaluated again, on another thread.
        routed =
            Some(inline).filter(|inline| !matches!(inline, Err(over) if over.scope == BudgetScope::Request));
    }
    let routed = match routed {
        Some(routed) => routed,
        None => {
            let _turn = server.filter_turns.take(topic.topic.id).await;
            compute_off_worker(|| route(body, request_budget))?
        }
    };
    let (batch, routed) = routed.map_err(|over| match over.scope {
        BudgetScope::Event => PublishError::filters_too_costly(over.index, server.config.filter_bytes_max),
        BudgetScope::Request => PublishError::batch_filters_too_costly(over.index, request_bytes_max),
    })?;
    server
        .engine
        .accept(topic, batch, routed)
        .await
        .map_err(|e| match e {
            postrider_engine::Error::Store(StoreError::Busy(_)) => PublishError::too_many_requests(),
            other => PublishError::unavailable(&other.to_string()),
        })
}

/// Number of hops that led to this request, as stated by the delivering server.
fn hops(call: &ApiCall) -> Result<u32, PublishError> {
    let mut values = call.headers.get_all(HOPS).iter();
    let Some(value) = values.next() else { return Ok(0) };
    let digits = value.to_str().unwrap_or_default();
    let plain = (1..=9).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    let read = plain.then(|| digits.parse().ok()).flatten();
    read.filter(|_| values.next().is_none())
        .ok_or_else(|| PublishError::header_invalid(HOPS.as_str(), "a whole number"))
}

/// Refuses events while this node cannot know whether its catalog contains every change that other
/// nodes have answered.
pub fn check_current(server: &Server) -> Result<(), PublishError> {
    match server.engine.is_current() {
        true => Ok(()),
        false => Err(PublishError::unavailable(
            "this node's lease has run out: subscriptions may have changed at other nodes; publish to another node",
        )),
    }
}

/// The trace context of the request. Malformed values are ignored; two parents count as none.
fn trace(call: &ApiCall) -> Option<Box<str>> {
    let mut parents = call.headers.get_all(TRACEPARENT).iter();
    let (Some(parent), None) = (parents.next(), parents.next()) else {
        return None;
    };
    let states = call.headers.get_all(TRACESTATE).iter();
    // A value that is not text makes the whole state malformed.
    let states = states.map(|state| state.to_str().unwrap_or("="));
    Some(stored_context(parent.to_str().ok()?, states)?.into())
}

/// Headers of a CloudEvent in binary mode. A value that is not text becomes one that no rule
/// accepts.
fn ce_headers(call: &ApiCall, schema: EventSchema) -> Vec<(&str, &str)> {
    if schema != EventSchema::CloudEvent {
        return Vec::new();
    }
    let ours = call
        .headers
        .iter()
        .filter(|(name, _)| name.as_str().starts_with("ce-"));
    ours.map(|(name, value)| (name.as_str(), value.to_str().unwrap_or("%")))
        .collect()
}

pub fn refuse(server: &Server, call: &ApiCall, error: &PublishError, road: PublishApi) -> Answer {
    server.note_publish_refused(call, error.status, &error.message);
    answer_refused(call, error, road)
}

fn answer_refused(call: &ApiCall, error: &PublishError, road: PublishApi) -> Answer {
    let body = match road {
        PublishApi::Cloud => cloud_error_body(error),
        PublishApi::Edge => edge_error_body(error.status, error.detail, &error.message),
    };
    let mut answer = json(status(error.status), body, &call.id);
    match error.status {
        429 | 503 => {
            answer
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        401 => {
            let challenge = HeaderValue::from_static("SharedAccessSignature");
            answer
                .headers_mut()
                .insert(hyper::header::WWW_AUTHENTICATE, challenge);
        }
        _ => {}
    }
    answer
}
