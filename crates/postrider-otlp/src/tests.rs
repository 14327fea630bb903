//! The exporter against a scripted collector, in paused time.

use super::*;
use crate::export::{ExportVerdict, FLUSH_MAX, TRY_FOR, judge};
use async_trait::async_trait;
use postrider_core::event::{EventRef, EventSchema, PublishedBatch};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{Destination, Subscription, Topic, WebHook};
use postrider_core::time::{Sleep, Timestamp};
use postrider_core::trace::TraceContext;
use postrider_engine::attempt::trace::AttemptSpan;
use postrider_engine::deliver::{DeliveryAnswer, DeliveryReply, TransportFailure, TransportFailureKind};
use postrider_engine::recorder::{
    AttemptDecision, EventPlace, EventRun, RetryTimeRule, RoutingVerdicts, TopicAudience,
};
use serde_json::{Value, json};
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

/// A clock that follows the runtime's, which jumps when all tasks wait.
struct PausedRuntimeClock(Instant);

impl Clock for PausedRuntimeClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_secs(1_700_000_000) + self.0.elapsed()
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        Box::pin(async move {
            let left = deadline.since(self.now());
            tokio::time::sleep_until(Instant::now() + left).await;
        })
    }
}

/// A collector with a status for each request; the last one repeats.
struct ScriptedCollector {
    script: Vec<u16>,
    seen: Mutex<Vec<(Instant, Value)>>,
}

/// The collector does not answer.
const SILENT: u16 = 0;
/// The collector is unreachable.
const AWAY: u16 = 1;

#[async_trait]
impl DeliveryTransport for ScriptedCollector {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let number = {
            let mut seen = self.seen.lock().unwrap();
            assert_eq!(request.url.to_string(), "http://collector:4318/v1/traces");
            assert_eq!(request.header("x-key"), Some("secret"));
            assert_eq!(request.header("content-type"), Some("application/json"));
            seen.push((
                Instant::now(),
                serde_json::from_slice(&request.body_bytes()).unwrap(),
            ));
            seen.len() - 1
        };
        match self.script[number.min(self.script.len() - 1)] {
            SILENT => std::future::pending().await,
            AWAY => DeliveryReply::Failed(TransportFailure {
                kind: TransportFailureKind::Socket,
                detail: "connection refused".into(),
            }),
            status => DeliveryReply::Answered(DeliveryAnswer {
                status,
                ..DeliveryAnswer::default()
            }),
        }
    }
}

impl ScriptedCollector {
    fn spans(&self) -> Vec<Value> {
        let seen = self.seen.lock().unwrap();
        let requests = seen.iter().map(|(_, body)| body);
        let spans = requests.flat_map(|body| {
            body["resourceSpans"][0]["scopeSpans"][0]["spans"]
                .as_array()
                .unwrap()
        });
        spans.cloned().collect()
    }

    fn asked(&self) -> Vec<u64> {
        let seen = self.seen.lock().unwrap();
        let first = seen.first().map(|(at, _)| *at);
        let since = |at: &Instant| at.duration_since(first.unwrap()).as_secs();
        seen.iter().map(|(at, _)| since(at)).collect()
    }
}

fn start(script: &[u16]) -> (Arc<ScriptedCollector>, Arc<Exporter>) {
    let collector = Arc::new(ScriptedCollector {
        script: script.to_vec(),
        seen: Mutex::default(),
    });
    let config = Config {
        url: "http://collector:4318/v1/traces".parse().unwrap(),
        protocol: OtlpEncoding::HttpJson,
        headers: vec![("x-key".parse().unwrap(), Secret::new("secret"))],
        service_name: "grid".into(),
        service_version: "1.2.3",
        log: 7,
        chance: 8,
        share: TraceShare::ALL,
    };
    let clock = Arc::new(PausedRuntimeClock(Instant::now()));
    let exporter = Exporter::start(config, collector.clone(), clock.clone(), clock);
    (collector, exporter.unwrap())
}

fn counts(exporter: &Exporter) -> (u64, u64) {
    let counts = &exporter.counts;
    (counts.exported.load(Relaxed), counts.dropped.load(Relaxed))
}

fn subscription() -> Arc<Subscription> {
    Arc::new(Subscription {
        created: Timestamp::from_secs(1),
        ..Subscription::new(
            SubscriptionId(3),
            TopicId(1),
            "billing",
            Destination::WebHook(WebHook::new("https://hooks.example/in?code=secret")),
        )
    })
}

fn topic() -> Arc<Topic> {
    Arc::new(Topic {
        resource_group: "rg1".into(),
        location: "here".into(),
        created: Timestamp::from_secs(1),
        ..Topic::custom(TopicId(1), "orders", [Secret::default(), Secret::default()])
    })
}

fn accepted(
    first: Option<u64>,
    schema: EventSchema,
    trace: Option<&str>,
    events: &[&str],
) -> AcceptedRequest {
    let mut body = String::new();
    let mut refs = Vec::new();
    for event in events {
        let start = body.len();
        body.push_str(event);
        refs.push(EventRef {
            object: postrider_core::event::ByteSpan::new(start, body.len()),
            ..EventRef::default()
        });
    }
    AcceptedRequest {
        first: first.map(Position),
        batch: Arc::new(PublishedBatch {
            topic: TopicId(1),
            schema,
            received: Timestamp::from_secs(1_600_000_000),
            publisher: "key1".into(),
            trace: trace.map(Into::into),
            replay: 0,
            hops: 0,
            body: body.into(),
            events: refs,
            matched: vec![Box::from([SubscriptionId(3)])],
        }),
        audience: Arc::new(TopicAudience::new(
            &topic(),
            "/topics/orders",
            vec![subscription()],
        )),
        verdicts: RoutingVerdicts::default(),
    }
}

fn standing() -> SpanStanding {
    let mut gathered = GatheredContexts::default();
    gathered.add(CarriedContext::of_request(PARENT));
    TraceIds { log: 7 }.attempt(&gathered, SubscriptionId(3), Position(9), 2)
}

fn attempted(outcome: Outcome, status: Option<u16>, decision: AttemptDecision) -> AttemptedRequest {
    AttemptedRequest {
        subscription: subscription(),
        endpoint: "https://hooks.example/in".into(),
        begun: Timestamp::from_secs(1_600_000_001),
        ended: Timestamp::from_secs(1_600_000_002),
        outcome,
        status,
        timings: None,
        answer: None,
        failure: None,
        span: Some(Box::new(AttemptSpan {
            standing: standing(),
            state: "a=1".into(),
            topic: topic(),
            events: 1,
            ids: vec!["e1".into()],
        })),
        runs: vec![EventRun {
            start: EventPlace {
                first: Position(9),
                index: 0,
            },
            count: 1,
            number: 2,
            since: Timestamp::from_secs(1_600_000_000),
            decision,
        }],
    }
}

fn success() -> AttemptedRequest {
    attempted(Outcome::Success, Some(200), AttemptDecision::Done)
}

/// The attributes by name, with their values without type names.
fn attributes(span: &Value) -> Value {
    let all = span["attributes"].as_array().unwrap().iter().map(|one| {
        let value = one["value"].as_object().unwrap().values().next().unwrap().clone();
        (one["key"].as_str().unwrap().to_owned(), value)
    });
    Value::Object(all.collect())
}

#[tokio::test(start_paused = true)]
async fn an_attempt_is_a_span_with_everything_that_is_known() {
    let (collector, exporter) = start(&[200]);
    let retry = AttemptDecision::Retry {
        at: Timestamp::from_secs(1_600_000_012),
        why: RetryTimeRule::Floor {
            wait: Duration::from_secs(10),
        },
    };
    exporter.attempted(attempted(Outcome::Busy, Some(503), retry));
    exporter.stop(FLUSH_MAX).await;
    let spans = collector.spans();
    let [span] = &spans[..] else { panic!("{spans:?}") };
    let (parent, context) = (TraceContext::parse(PARENT).unwrap(), standing().context);
    assert_eq!(span["traceId"], parent.trace_id());
    assert_eq!(span["spanId"], format!("{:016x}", context.span));
    assert_eq!(span["parentSpanId"], "00f067aa0ba902b7");
    assert_eq!(span["traceState"], "a=1");
    assert_eq!(
        (&span["name"], &span["kind"]),
        (&json!("deliver orders"), &json!(3))
    );
    assert_eq!(span["startTimeUnixNano"], "1600000001000000000");
    assert_eq!(span["endTimeUnixNano"], "1600000002000000000");
    assert_eq!(span["links"][0]["spanId"], "00f067aa0ba902b7");
    assert_eq!(span["flags"], 0x301);
    assert_eq!(span["status"], json!({"code": 2, "message": "Busy: status 503"}));
    let expected = json!({
        "messaging.system": "eventgrid",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.destination.subscription.name": "billing",
        "messaging.message.id": "e1",
        "http.request.method": "POST",
        "http.request.resend_count": "1",
        "http.response.status_code": "503",
        "url.full": "https://hooks.example/in",
        "server.address": "hooks.example",
        "server.port": "443",
        "error.type": "503",
        "postrider.outcome": "Busy",
        "postrider.attempt": "2",
        "postrider.queued_ms": "1000",
        "postrider.next": "retry",
        "postrider.next.at": "2020-09-13T12:26:52.0000000Z",
        "postrider.next.why": "floor",
    });
    assert_eq!(attributes(span), expected);
    let seen = collector.seen.lock().unwrap();
    let resource = attributes(&seen[0].1["resourceSpans"][0]["resource"]);
    assert_eq!(resource["service.name"], "grid");
    assert_eq!(resource["service.version"], "1.2.3");
}

#[tokio::test(start_paused = true)]
async fn a_success_is_no_error_and_an_end_says_why() {
    let (collector, exporter) = start(&[200]);
    exporter.attempted(success());
    let mut away = attempted(
        Outcome::SocketError,
        None,
        AttemptDecision::DeadLetter(GiveUpReason::AttemptsExhausted),
    );
    away.failure = Some("hooks.example: connection refused".into());
    exporter.attempted(away);
    exporter.stop(FLUSH_MAX).await;
    let spans = collector.spans();
    assert_eq!(spans[0].get("status"), None);
    assert_eq!(attributes(&spans[0])["postrider.next"], "done");
    assert_eq!(attributes(&spans[0]).get("error.type"), None);
    assert_eq!(spans[1]["status"]["message"], "hooks.example: connection refused");
    assert_eq!(attributes(&spans[1])["error.type"], "SocketError");
    let reason = GiveUpReason::AttemptsExhausted.name();
    assert_eq!(attributes(&spans[1])["postrider.next.reason"], reason);
    assert_eq!(counts(&exporter), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_publish_request_is_a_span_in_its_producer_s_trace_or_begins_one() {
    let (collector, exporter) = start(&[200]);
    let event = r#"{"id":"e1"}"#;
    let own = format!(r#"{{"id":"e2","traceparent":"{PARENT}"}}"#);
    use EventSchema::{CloudEvent, EventGrid};
    exporter.accepted(accepted(Some(9), EventGrid, Some(PARENT), &[event]));
    exporter.accepted(accepted(Some(10), EventGrid, None, &[event, event]));
    exporter.accepted(accepted(Some(11), CloudEvent, None, &[&own, &own]));
    exporter.accepted(accepted(Some(12), CloudEvent, None, &[&own, event]));
    exporter.accepted(accepted(None, EventGrid, None, &[event]));
    exporter.accepted(accepted(None, EventGrid, None, &[event]));
    // The producer does not want the trace recorded.
    exporter.accepted(accepted(Some(13), EventGrid, Some(UNSAMPLED), &[event]));
    exporter.stop(FLUSH_MAX).await;
    let spans = collector.spans();
    assert_eq!(spans.len(), 6);
    let parent = TraceContext::parse(PARENT).unwrap();
    let ids = TraceIds { log: 7 };
    let begun = |first| ids.begin_trace(Position(first), TraceShare::ALL);
    let of = |span: &Value| {
        let text = |name: &str| span[name].as_str().unwrap_or_default().to_owned();
        (text("traceId"), text("spanId"), text("parentSpanId"))
    };
    let joined = |first| {
        (
            parent.trace_id(),
            format!("{:016x}", ids.of_publish(Position(first))),
            "00f067aa0ba902b7".to_owned(),
        )
    };
    let alone = |first| {
        (
            begun(first).trace_id(),
            format!("{:016x}", begun(first).span),
            String::new(),
        )
    };
    assert_eq!(of(&spans[0]), joined(9));
    assert_eq!(of(&spans[1]), alone(10));
    assert_eq!(of(&spans[2]), joined(11));
    assert_eq!(of(&spans[3]), alone(12));
    assert_eq!(spans[3]["links"][0]["traceId"], parent.trace_id());
    // No subscription matched these, so they have no position in the log; still their spans differ.
    assert_ne!(of(&spans[4]), of(&spans[5]));
    assert_eq!(
        (&spans[0]["name"], &spans[0]["kind"]),
        (&json!("publish orders"), &json!(2))
    );
    let told = attributes(&spans[1]);
    assert_eq!(told["messaging.batch.message_count"], "2");
    assert_eq!(told["postrider.event.ids"]["values"][1]["stringValue"], "e1");
    assert_eq!(told["postrider.deliveries"], "2");
    assert_eq!(told["postrider.publisher"], "key1");
    assert_eq!(spans[0]["startTimeUnixNano"], "1600000000000000000");
}

#[tokio::test(start_paused = true)]
async fn what_nobody_wants_to_see_is_not_sent() {
    let (collector, exporter) = start(&[200]);
    let mut unseen = success();
    unseen.span = None;
    exporter.attempted(unseen);
    exporter.stop(FLUSH_MAX).await;
    assert_eq!((collector.spans().len(), counts(&exporter)), (0, (0, 0)));
}

async fn settled(exporter: &Exporter, expected: (u64, u64)) {
    let began = Instant::now();
    while counts(exporter) != expected {
        assert!(
            began.elapsed() < 10 * TRY_FOR,
            "{:?} instead of {expected:?}",
            counts(exporter)
        );
        tokio::time::sleep_until(Instant::now() + Duration::from_millis(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_is_away_is_tried_again_with_growing_waits() {
    let (collector, exporter) = start(&[AWAY, 503, 429, 200]);
    exporter.attempted(success());
    settled(&exporter, (1, 0)).await;
    assert_eq!(collector.asked(), [0, 1, 3, 7]);
}

#[tokio::test(start_paused = true)]
async fn spans_are_given_up_in_time() {
    let (collector, exporter) = start(&[AWAY]);
    exporter.attempted(success());
    settled(&exporter, (0, 1)).await;
    let last = *collector.asked().last().unwrap();
    assert_eq!(collector.asked(), [0, 1, 3, 7, 15, 23]);
    assert!(last <= TRY_FOR.as_secs());
    // Later spans are tried independently.
    exporter.attempted(success());
    settled(&exporter, (0, 2)).await;
    assert_eq!(collector.asked().len(), 12);
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_is_not_sent_again() {
    let (collector, exporter) = start(&[400, 200]);
    exporter.attempted(success());
    settled(&exporter, (0, 1)).await;
    exporter.attempted(success());
    settled(&exporter, (1, 1)).await;
    assert_eq!(collector.asked().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_says_nothing_is_not_waited_for_for_ever() {
    let (collector, exporter) = start(&[SILENT, 200]);
    exporter.attempted(success());
    settled(&exporter, (1, 0)).await;
    assert_eq!(collector.asked(), [0, 11]);
}

// While the runtime does not run, nothing is taken out of the queue.
#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded_and_what_does_not_fit_is_counted() {
    let (_, exporter) = start(&[200]);
    for _ in 0..WAITING_MAX + 5 {
        exporter.attempted(success());
    }
    assert_eq!(counts(&exporter), (0, 5));
    settled(&exporter, (WAITING_MAX as u64, 5)).await;
}

#[tokio::test(start_paused = true)]
async fn the_end_is_put_off_only_for_so_long() {
    let scripts = [&[SILENT][..], &[AWAY], &[AWAY, SILENT]];
    let patience = [FLUSH_MAX / 3, 2 * FLUSH_MAX];
    for (script, patience) in scripts
        .into_iter()
        .flat_map(|script| patience.map(|one| (script, one)))
    {
        let (_, exporter) = start(script);
        let count = 3 * export::BATCH_MAX as u64;
        for _ in 0..count {
            exporter.attempted(success());
        }
        // The first batch is being sent.
        tokio::time::sleep_until(Instant::now() + Duration::from_millis(600)).await;
        let began = Instant::now();
        exporter.stop(patience).await;
        // The test clock counts whole milliseconds.
        let most = patience.min(FLUSH_MAX) + Duration::from_millis(2);
        assert!(
            began.elapsed() <= most,
            "{:?} for {script:?} within {patience:?}",
            began.elapsed()
        );
        assert_eq!(counts(&exporter), (0, count), "{script:?}");
        exporter.attempted(success());
        assert_eq!(
            counts(&exporter),
            (0, count + 1),
            "what comes after the end is lost"
        );
    }
}

#[test]
fn answers_mean_what_otlp_says() {
    let check = |status: u16, retry_after: Option<&str>, body: &[u8], protocol, expected: ExportVerdict| {
        let mut answer = DeliveryAnswer {
            status,
            body: bytes::Bytes::copy_from_slice(body),
            ..DeliveryAnswer::default()
        };
        if let Some(wait) = retry_after {
            answer.headers.insert("retry-after", wait.parse().unwrap());
        }
        assert_eq!(judge(&DeliveryReply::Answered(answer), protocol), expected);
    };
    let taken = |rejected, why: &str| ExportVerdict::Taken {
        rejected,
        why: why.into(),
    };
    use OtlpEncoding::{HttpJson, HttpProtobuf};
    check(200, None, b"", HttpProtobuf, taken(0, ""));
    let partial = [0x0a, 0x06, 0x08, 0x03, 0x12, 0x02, 0x6e, 0x6f];
    check(200, None, &partial, HttpProtobuf, taken(3, "no"));
    let partial = br#"{"partialSuccess":{"rejectedSpans":"2","errorMessage":"no"}}"#;
    check(200, None, partial, HttpJson, taken(2, "no"));
    check(200, None, b"{}", HttpJson, taken(0, ""));
    check(200, None, b"not json", HttpJson, taken(0, ""));
    let again = |wait: Option<u64>, status: u16| {
        ExportVerdict::Later(
            wait.map(Duration::from_secs),
            format!("the collector answered {status}"),
        )
    };
    check(503, Some("7"), b"", HttpJson, again(Some(7), 503));
    check(429, Some("soon"), b"", HttpJson, again(None, 429));
    check(502, None, b"", HttpJson, again(None, 502));
    for status in [301, 400, 401, 404, 413, 500] {
        let never = ExportVerdict::Never(format!("the collector answered {status}"));
        check(status, None, b"", HttpJson, never);
    }
}
