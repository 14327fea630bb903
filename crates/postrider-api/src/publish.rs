//! The Azure data plane: publishing to topics and domains.

use crate::Server;
use crate::access::{Need, NoAccess};
use crate::http::{Answer, Call, empty, json, off_worker, status};
use hyper::header::{ALLOW, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, StatusCode};
use postrider_core::event::{Batch, Schema};
use postrider_core::filter::FilterBudget;
use postrider_core::subscription::TopicKind;
use postrider_core::trace::{TRACEPARENT, TRACESTATE, kept};
use postrider_engine::directory::TopicEntry;
use postrider_store::Error as StoreError;
use postrider_wire::arm::ip_allowed;
use postrider_wire::auth::{Authorized, Guard, Presented, authorize};
use postrider_wire::error::{cloud_error_body, edge_error_body, schema_name};
use postrider_wire::publish::{Head, PublishError, Road, Rules, parse};
use std::borrow::Cow;
use std::sync::Arc;

pub const API_VERSION: &str = "2018-01-01";
const EDGE_API_VERSION: &str = "2019-01-01-preview";
const SUPPORTED: HeaderName = HeaderName::from_static("api-supported-versions");
const INPUT_SCHEMA: HeaderName = HeaderName::from_static("aeg-input-event-schema");

/// Filters that look at no more than this are evaluated by the worker thread that has read the request.
/// More would hold up the other connections of that thread.
const FILTER_INLINE_BYTES_MAX: usize = 2 << 20;

/// `POST /topics/{topic}/api/events`
pub async fn topic(server: &Arc<Server>, call: &mut Call, name: &str) -> Answer {
    match server.engine.directory.topic(name) {
        Some(topic) => events(server, call, topic).await,
        None => unknown(server, call),
    }
}

/// `POST /domains/{domain}/api/events`
pub async fn domain(server: &Arc<Server>, call: &mut Call, name: &str) -> Answer {
    match server.engine.directory.domain(name) {
        Some(topic) => events(server, call, topic).await,
        None => unknown(server, call),
    }
}

/// `POST /api/events`, the topic or domain named by the host's first label.
pub async fn by_host(server: &Arc<Server>, call: &mut Call) -> Answer {
    let name = call.host().split(['.', ':']).next().unwrap_or("").to_owned();
    let directory = &server.engine.directory;
    match directory.topic(&name).or_else(|| directory.domain(&name)) {
        Some(topic) => events(server, call, topic).await,
        None => unknown(server, call),
    }
}

pub fn unknown(server: &Server, call: &Call) -> Answer {
    let uri = format!("{}://{}{}", call.scheme, call.host(), call.uri.path());
    refuse(server, call, &PublishError::not_found(&uri), Road::Cloud)
}

async fn events(server: &Arc<Server>, call: &mut Call, topic: Arc<TopicEntry>) -> Answer {
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
            let mut answer = refuse(server, call, &error, Road::Cloud);
            answer
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("OPTIONS, POST"));
            return answer;
        }
    }
    let publisher = match check(server, call, &topic) {
        Ok(publisher) => publisher,
        Err(error) => return count_refusal(server, call, &topic, &error, Road::Cloud),
    };
    match accept(server, call, &topic, Road::Cloud, &publisher).await {
        Ok(()) => {
            let mut answer = empty(StatusCode::OK, &call.id);
            answer
                .headers_mut()
                .insert(SUPPORTED, HeaderValue::from_static(API_VERSION));
            answer
        }
        Err(error) => count_refusal(server, call, &topic, &error, Road::Cloud),
    }
}

pub fn count_refusal(
    server: &Server,
    call: &Call,
    topic: &TopicEntry,
    error: &PublishError,
    road: Road,
) -> Answer {
    postrider_engine::counters::add(&topic.published.refused, 1);
    if error.status >= 500 {
        postrider_engine::counters::add(&topic.published.refused_by_trouble, 1);
    }
    refuse(server, call, error, road)
}

/// The version and the credential.
fn check(server: &Server, call: &Call, topic: &TopicEntry) -> Result<Cow<'static, str>, PublishError> {
    check_version(call)?;
    check_network(call, topic)?;
    let presented = presented(call);
    let signed = presented.token.is_some() || presented.authorization.is_some();
    // Only what is signed for a URL needs to know by which one it came.
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
    let guard = Guard {
        keys: [&topic.topic.keys[0], &topic.topic.keys[1]],
        local_auth_disabled: topic.topic.local_auth_disabled,
        url_used: &url_used,
        also_known_as: &also_known_as,
        host: call.host(),
    };
    match authorize(&presented, &guard, server.wall.now())? {
        Authorized::Key(1) => Ok("key1".into()),
        Authorized::Key(_) => Ok("key2".into()),
        Authorized::SasToken => Ok("SAS token".into()),
        Authorized::Bearer(token) => {
            let caller = server.caller_of_token(token).and_then(|c| c.need(Need::Send));
            let caller = caller.map_err(|refused| match refused {
                NoAccess::Unknown(reason) => PublishError::key_unauthorized(call.host(), Some(&reason)),
                NoAccess::Forbidden(reason) => PublishError::forbidden(&reason),
            })?;
            Ok(format!("client {}", caller.id).into())
        }
    }
}

/// `publicNetworkAccess` and `inboundIpRules`. There are no private endpoints, so that a topic without public
/// access takes no events at all.
fn check_network(call: &Call, topic: &TopicEntry) -> Result<(), PublishError> {
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

pub fn check_version(call: &Call) -> Result<(), PublishError> {
    match call.query("api-version") {
        None | Some(API_VERSION | EDGE_API_VERSION) => Ok(()),
        Some(other) => Err(PublishError::api_version_unsupported(
            &crate::http::decoded(other),
            API_VERSION,
        )),
    }
}

pub fn presented(call: &Call) -> Presented<'_> {
    Presented {
        key: call.header("aeg-sas-key"),
        token: call.header("aeg-sas-token"),
        authorization: call.header("authorization"),
        query_key: call.query("aeg-sas-key"),
    }
}

/// Reads the events, decides who gets them, and waits until they are durable.
pub async fn accept(
    server: &Server,
    call: &mut Call,
    topic: &TopicEntry,
    road: Road,
    publisher: &str,
) -> Result<(), PublishError> {
    let limits = server.config.limits;
    let announced = call.announced_bytes().unwrap_or(limits.request_bytes);
    let Some(_place) = server.admit_publish(announced.min(limits.request_bytes)) else {
        return Err(PublishError::too_many_requests());
    };
    let body = match call.read_body(limits.request_bytes).await {
        Ok(Some(body)) => body,
        Ok(None) => return Err(PublishError::request_too_large(limits.request_bytes)),
        Err(_) => {
            return Err(PublishError::nonconforming(
                topic.topic.input_schema,
                "The body was cut short.",
            ));
        }
    };
    let now = server.engine.clock.now();
    let rules = Rules {
        road,
        schema: topic.topic.input_schema,
        mapping: topic.topic.mapping.as_ref(),
        topic_id: match road {
            Road::Cloud => &topic.full_id,
            Road::Edge => &topic.topic.name,
        },
        domain: matches!(topic.topic.kind, TopicKind::Domain { .. }),
        limits,
    };
    let budget = FilterBudget::bytes(server.config.filter_bytes_max);
    let filter_bytes = topic.filter_bytes(body.len());
    let route = || {
        let ce_headers = ce_headers(call, topic.topic.input_schema);
        let head = Head {
            content_type: call.header("content-type"),
            ce_headers: &ce_headers,
        };
        let mut router = server.engine.router(topic, now, budget);
        let parsed = parse(&rules, &head, body, |event| {
            router.route(&event.envelope, event.domain_topic.as_deref())
        })?;
        let (matched, routed) = router
            .finish()
            .map_err(|over| PublishError::filters_too_costly(over.index, server.config.filter_bytes_max))?;
        let batch = Batch {
            topic: topic.topic.id,
            schema: topic.topic.input_schema,
            received: now,
            publisher: publisher.into(),
            trace: trace(call),
            replay: 0,
            body: parsed.body,
            events: parsed.events,
            matched,
        };
        Ok::<_, PublishError>((batch, routed))
    };
    let (batch, routed) = if filter_bytes <= FILTER_INLINE_BYTES_MAX {
        route()?
    } else {
        let _turn = server.long_filtering.acquire().await;
        off_worker(route)?
    };
    server
        .engine
        .accept(topic, batch, routed)
        .await
        .map_err(|e| match e {
            postrider_engine::Error::Store(StoreError::Busy(_)) => PublishError::too_many_requests(),
            other => PublishError::unavailable(&other.to_string()),
        })
}

/// The trace that the request is part of. What is not well-formed is ignored; two parents are no parent.
fn trace(call: &Call) -> Option<Box<str>> {
    let mut parents = call.headers.get_all(TRACEPARENT).iter();
    let (Some(parent), None) = (parents.next(), parents.next()) else {
        return None;
    };
    let states = call.headers.get_all(TRACESTATE).iter();
    // A value that is not text makes the whole state malformed.
    let states = states.map(|state| state.to_str().unwrap_or("="));
    Some(kept(parent.to_str().ok()?, states)?.into())
}

/// Headers of a CloudEvent in binary mode. A value that is not text becomes one that no rule accepts.
fn ce_headers(call: &Call, schema: Schema) -> Vec<(&str, &str)> {
    if schema != Schema::CloudEvent {
        return Vec::new();
    }
    let ours = call
        .headers
        .iter()
        .filter(|(name, _)| name.as_str().starts_with("ce-"));
    ours.map(|(name, value)| (name.as_str(), value.to_str().unwrap_or("%")))
        .collect()
}

pub fn refuse(server: &Server, call: &Call, error: &PublishError, road: Road) -> Answer {
    let body = match road {
        Road::Cloud => cloud_error_body(error, &call.id, server.engine.clock.now()),
        Road::Edge => edge_error_body(error.status, error.detail, &error.message),
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
