//! Spans from the engine's reports. Attribute names are OpenTelemetry's for messaging and HTTP
//! where it has some.

use crate::message::{
    KIND_CLIENT, KIND_SERVER, KeyValue, LOCAL, Link, REMOTE, STATUS_ERROR, Span, Status, Value,
};
use http::Uri;
use postrider_core::outcome::Outcome;
use postrider_core::time::Timestamp;
use postrider_core::trace::{SpanStanding, TraceContext};
use postrider_engine::attempt::trace::AttemptSpan;
use postrider_engine::recorder::{AttemptDecision, AttemptedRequest, TopicAudience};
use std::sync::Arc;

/// `messaging.system`: OpenTelemetry's name of the service that Postrider replaces.
const SYSTEM: &str = "eventgrid";
/// Texts from outside are truncated.
const TEXT_BYTES_MAX: usize = 256;

/// A publish request that was accepted.
#[derive(Clone, Debug)]
pub struct PublishSpan {
    pub standing: SpanStanding,
    pub state: Box<str>,
    pub audience: Arc<TopicAudience>,
    pub begun: Timestamp,
    pub ended: Timestamp,
    pub events: usize,
    pub bytes: usize,
    /// The number of deliveries that result from it.
    pub deliveries: usize,
    /// The ids of the first events.
    pub ids: Vec<Box<str>>,
    pub publisher: Box<str>,
}

pub fn of_publish(published: &PublishSpan) -> Span {
    let mut attributes = messages(
        "publish",
        &published.audience.name,
        published.events,
        &published.ids,
    );
    let mut put = |key: &str, value: Value| attributes.push(KeyValue::new(key, value));
    put("messaging.operation.type", "receive".into());
    put("http.request.body.size", whole(published.bytes));
    put("http.request.method", "POST".into());
    put("http.response.status_code", 200.into());
    put("postrider.topic.id", clip(&published.audience.full_id).into());
    put("postrider.publisher", clip(&published.publisher).into());
    put("postrider.deliveries", whole(published.deliveries));
    Span {
        kind: KIND_SERVER,
        name: format!("publish {}", published.audience.name),
        start_time_unix_nano: nanos(published.begun),
        end_time_unix_nano: nanos(published.ended),
        attributes,
        ..standing(&published.standing, &published.state, REMOTE)
    }
}

pub fn of_attempt(attempted: &AttemptedRequest, span: &AttemptSpan) -> Span {
    let mut attributes = messages("deliver", &span.topic.name, span.events, &span.ids);
    let mut put = |key: &str, value: Value| attributes.push(KeyValue::new(key, value));
    let subscription = &attempted.subscription;
    put("messaging.operation.type", "send".into());
    put(
        "messaging.destination.subscription.name",
        clip(&subscription.name).into(),
    );
    put("http.request.method", "POST".into());
    put("url.full", clip(&attempted.endpoint).into());
    if let Ok(url) = attempted.endpoint.parse::<Uri>() {
        if let Some(host) = url.host() {
            put("server.address", clip(host.trim_matches(['[', ']'])).into());
        }
        let usual = match url.scheme_str() {
            Some("http") => 80,
            _ => 443,
        };
        put("server.port", i64::from(url.port_u16().unwrap_or(usual)).into());
    }
    if let Some(status) = attempted.status {
        put("http.response.status_code", i64::from(status).into());
    }
    let outcome = attempted.outcome.to_string();
    let failed = attempted.outcome != Outcome::Success;
    if failed {
        let kind = attempted.status.map(|status| status.to_string());
        put("error.type", kind.unwrap_or_else(|| outcome.clone()).into());
    }
    put("postrider.outcome", outcome.as_str().into());
    // A delivery request has one outcome, but its events may have different consequences: the first
    // stands for all.
    if let Some(run) = attempted.runs.first() {
        put("postrider.attempt", i64::from(run.number).into());
        if run.number > 1 {
            put("http.request.resend_count", i64::from(run.number - 1).into());
        }
        let waited = attempted.begun.since(run.since).as_millis();
        put(
            "postrider.queued_ms",
            i64::try_from(waited).unwrap_or(i64::MAX).into(),
        );
        match run.decision {
            AttemptDecision::Done => put("postrider.next", "done".into()),
            AttemptDecision::Retry { at, why } => {
                put("postrider.next", "retry".into());
                put("postrider.next.at", at.to_string().into());
                put("postrider.next.why", why.name().into());
            }
            AttemptDecision::DeadLetter(reason) => {
                put("postrider.next", "deadLetter".into());
                put("postrider.next.reason", reason.name().into());
            }
            AttemptDecision::Drop(reason) => {
                put("postrider.next", "drop".into());
                put("postrider.next.reason", reason.name().into());
            }
        }
    }
    let message = match (&attempted.failure, attempted.status) {
        (Some(why), _) => clip(why).to_owned(),
        (None, Some(status)) => format!("{outcome}: status {status}"),
        (None, None) => outcome,
    };
    // The parent is the producer's span, or else our span of the publish request, in which case
    // there are no links.
    let parent = match span.standing.links.is_empty() {
        true => LOCAL,
        false => REMOTE,
    };
    Span {
        kind: KIND_CLIENT,
        name: format!("deliver {}", span.topic.name),
        start_time_unix_nano: nanos(attempted.begun),
        end_time_unix_nano: nanos(attempted.ended),
        attributes,
        status: failed.then_some(Status {
            code: STATUS_ERROR,
            message,
        }),
        ..standing(&span.standing, &span.state, parent)
    }
}

/// The attributes that both kinds of spans have about their events.
fn messages(operation: &str, topic: &str, events: usize, ids: &[Box<str>]) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("messaging.system", SYSTEM),
        KeyValue::new("messaging.operation.name", operation),
        KeyValue::new("messaging.destination.name", topic),
    ];
    match (events, ids) {
        (1, [id]) => attributes.push(KeyValue::new("messaging.message.id", &**id)),
        (1, _) => {}
        _ => {
            attributes.push(KeyValue::new("messaging.batch.message_count", whole(events)));
            attributes.push(KeyValue::new("postrider.event.ids", ids));
        }
    }
    attributes
}

fn standing(standing: &SpanStanding, state: &str, parent: u32) -> Span {
    let links = standing.links.iter().map(|link| Link {
        trace_id: trace(*link),
        span_id: span(*link),
        flags: u32::from(link.flags) | REMOTE,
    });
    let context = standing.context;
    let parent_flags = if standing.parent.is_some() { parent } else { LOCAL };
    Span {
        trace_id: trace(context),
        span_id: span(context),
        trace_state: state.to_owned(),
        parent_span_id: standing.parent.map(span).unwrap_or_default(),
        flags: u32::from(context.flags) | parent_flags,
        links: links.collect(),
        ..Span::default()
    }
}

fn trace(context: TraceContext) -> Vec<u8> {
    context.trace.to_be_bytes().to_vec()
}

fn span(context: TraceContext) -> Vec<u8> {
    context.span.to_be_bytes().to_vec()
}

fn whole(count: usize) -> Value {
    i64::try_from(count).unwrap_or(i64::MAX).into()
}

fn nanos(at: Timestamp) -> u64 {
    u64::try_from(at.nanos()).unwrap_or(0)
}

fn clip(text: &str) -> &str {
    let end = TEXT_BYTES_MAX.min(text.len());
    let end = (0..=end).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}
