//! Event histories and searches as the API shows them; filter tests and the live stream, which show
//! the same recordings.

use crate::azure::subscriptions::tests::test_server::{ApiTestServer, GROUP, TestAnswer, web_hook};
use crate::sessions::PortalSessions;
use bytes::Bytes;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers, PublishedBatch};
use postrider_core::ids::{Position, SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::deliver::AttemptTimings;
use postrider_engine::recorder::{
    AnswerSnippet, AttemptDecision, AttemptFilter, AttemptHistory, DeadLetterBlobLocation,
    DeliveryDisposition, DeliveryHistory, DeliveryLine, DeliveryState, EventHistory, EventLine, EventPage,
    EventPlace, EventQuery, EventState, LiveStreamHappening, LiveStreamLine, NextAttempt, NextAttemptReason,
    RecentEvent, RecordedDeliveryEnd, RecorderStatus, RecordingQueries, RetryTimeRule, RoutingVerdict,
    SearchCursor, SubscriptionFate, SubscriptionHistory, TopicAudience, UnmetPredicate,
};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::broadcast;

const NOW: Timestamp = Timestamp::from_secs(1_790_000_000);
const CURSOR: SearchCursor = SearchCursor {
    segment: 5,
    record: 6,
    event: 7,
};

/// Recordings with event `e1` and a single page. Remembers the queries.
#[derive(Default)]
struct FakeRecordings {
    asked: Mutex<Vec<EventQuery>>,
    ids: Mutex<Vec<String>>,
    recent: Vec<RecentEvent>,
    lines: Vec<LiveStreamLine>,
    /// Senders that are kept, so that their streams do not end by themselves.
    open: Option<Mutex<Vec<broadcast::Sender<Arc<LiveStreamLine>>>>>,
}

impl RecordingQueries for FakeRecordings {
    fn trace(&self, id: &str) -> Vec<EventHistory> {
        self.ids.lock().unwrap().push(id.to_owned());
        match id {
            "e1" | "a/b ü" => vec![story(id)],
            _ => Vec::new(),
        }
    }

    fn search(&self, query: &EventQuery) -> EventPage {
        self.asked.lock().unwrap().push(query.clone());
        EventPage {
            events: vec![event_line()],
            cursor: Some(CURSOR),
            searched: Some((NOW - Duration::from_secs(60), NOW)),
            ..EventPage::default()
        }
    }

    fn recent(&self, topic: Option<TopicId>, max: usize) -> Vec<RecentEvent> {
        assert!(topic.is_some());
        self.recent.iter().take(max).cloned().collect()
    }

    fn subscribe(&self) -> broadcast::Receiver<Arc<LiveStreamLine>> {
        let (sender, receiver) = broadcast::channel(16);
        for line in &self.lines {
            sender.send(Arc::new(line.clone())).unwrap();
        }
        if let Some(open) = &self.open {
            open.lock().unwrap().push(sender);
        }
        receiver
    }

    fn status(&self) -> RecorderStatus {
        RecorderStatus {
            on: true,
            ..RecorderStatus::default()
        }
    }
}

async fn lab(told: FakeRecordings) -> (ApiTestServer, Arc<FakeRecordings>) {
    let told = Arc::new(told);
    let recordings = told.clone();
    let lab = ApiTestServer::with(false, |server| server.recordings = recordings).await;
    lab.topic("t1").await;
    let path = format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1/eventSubscriptions/sub1");
    let made = lab
        .arm("PUT", &path, Some(web_hook("/x", json!({}))))
        .await
        .expect(201);
    assert_eq!(lab.ends(&made).await.0, "Succeeded");
    (lab, told)
}

async fn get(lab: &ApiTestServer, path: &str) -> TestAnswer {
    lab.send("GET", &format!("/postrider/v1/{path}"), None, &[]).await
}

fn story(id: &str) -> EventHistory {
    let attempt = AttemptHistory {
        number: 1,
        begun: NOW,
        ended: NOW + Duration::from_millis(9),
        queued: Duration::from_micros(1500),
        endpoint: "https://hook/x".into(),
        outcome: Outcome::Busy,
        status: Some(503),
        batch: 3,
        timings: Some(AttemptTimings {
            connect: Duration::ZERO,
            first_byte: Duration::from_millis(2),
            total: Duration::from_millis(3),
        }),
        response: Some(AnswerSnippet {
            content_type: Some("text/html".into()),
            text: "<script>".into(),
            truncated: true,
        }),
        failure: None,
        decision: AttemptDecision::Retry {
            at: NOW + Duration::from_secs(30),
            why: RetryTimeRule::Floor {
                wait: Duration::from_secs(30),
            },
        },
    };
    let unanswered = AttemptHistory {
        number: 2,
        outcome: Outcome::SocketError,
        status: None,
        timings: None,
        response: None,
        failure: Some("refused".into()),
        decision: AttemptDecision::DeadLetter(GiveUpReason::AttemptsExhausted),
        ..attempt.clone()
    };
    let delivery = |state: DeliveryState| DeliveryHistory {
        state,
        attempts: Vec::new(),
        next: None,
        end: None,
        holds: Vec::new(),
    };
    let blob = DeadLetterBlobLocation {
        account: "local".into(),
        container: "dead".into(),
        path: "x.json".into(),
    };
    let fates = [
        SubscriptionFate::Matched(DeliveryHistory {
            attempts: vec![attempt, unanswered],
            end: Some(RecordedDeliveryEnd {
                at: NOW,
                disposition: DeliveryDisposition::DeadLettered(GiveUpReason::AttemptsExhausted),
                blob: Some(blob.clone()),
            }),
            ..delivery(DeliveryState::DeadLettered)
        }),
        SubscriptionFate::Matched(DeliveryHistory {
            next: Some(NextAttempt {
                at: NOW,
                why: NextAttemptReason::Probation {
                    cause: Outcome::TimedOut,
                },
            }),
            ..delivery(DeliveryState::Held)
        }),
        SubscriptionFate::Matched(DeliveryHistory {
            end: Some(RecordedDeliveryEnd {
                at: NOW,
                disposition: DeliveryDisposition::DeliveredLate,
                blob: None,
            }),
            ..delivery(DeliveryState::Delivered)
        }),
        SubscriptionFate::Refused(UnmetPredicate {
            verdict: RoutingVerdict::Advanced(0),
            text: "data.n NumberGreaterThan 5".into(),
        }),
    ];
    let subscriptions = fates
        .into_iter()
        .zip(1000..)
        .map(|(fate, id)| SubscriptionHistory {
            id: SubscriptionId(id),
            name: format!("gone{id}"),
            domain_topic: None,
            fate,
        });
    EventHistory {
        id: id.into(),
        topic: TopicId(1),
        topic_name: "t1".into(),
        topic_resource: "/r/t1".into(),
        domain_topic: None,
        event_type: "T".into(),
        subject: "s".into(),
        source: None,
        schema: EventSchema::EventGrid,
        accepted: NOW,
        publisher: "key1".into(),
        bytes: 200,
        trace: None,
        replay: 0,
        replayed_from: None,
        place: Some(EventPlace {
            first: Position(12345),
            index: 2,
        }),
        state: EventState::Mixed,
        subscriptions: subscriptions.collect(),
    }
}

fn event_line() -> EventLine {
    EventLine {
        behind: SearchCursor {
            segment: 1,
            record: 2,
            event: 3,
        },
        place: None,
        id: "e1".into(),
        topic: TopicId(1),
        topic_name: "t1".into(),
        domain_topic: None,
        event_type: "T".into(),
        subject: "s".into(),
        accepted: NOW,
        state: EventState::All(DeliveryState::Retrying),
        attempts: 2,
        subscriptions: vec![DeliveryLine {
            id: SubscriptionId(1),
            name: "s1".into(),
            state: DeliveryState::Retrying,
            last_outcome: Some(Outcome::Busy),
            attempts: Vec::new(),
        }],
    }
}

#[test]
fn a_line_names_fifty_subscriptions_and_counts_the_others() {
    let mut many = event_line();
    many.subscriptions = vec![many.subscriptions[0].clone(); 52];
    let shown = super::line(&many);
    assert_eq!(shown["subscriptions"].as_array().map(Vec::len), Some(50));
    assert_eq!(shown["subscriptionsLeftOut"], json!(2));
    many.subscriptions.truncate(50);
    assert_eq!(super::line(&many)["subscriptionsLeftOut"], Value::Null);
}

#[tokio::test]
async fn the_story_of_an_event_is_told() {
    let (lab, _) = lab(FakeRecordings::default()).await;
    let got = get(&lab, "events/e1").await.expect(200).body;
    assert_eq!(got["id"], "e1");
    let story = &got["stories"][0];
    assert_eq!(story["position"], "12345:2");
    assert_eq!(story["schema"], "EventGridSchema");
    assert_eq!(story["state"], "mixed");
    assert_eq!(story["acceptedAt"], NOW.to_string());
    assert!(story.get("replay").is_none() && story.get("source").is_none());

    let dead = &story["subscriptions"][0];
    assert_eq!(dead["name"], "gone1000");
    assert_eq!(
        dead["id"],
        "/r/t1/providers/Microsoft.EventGrid/eventSubscriptions/gone1000"
    );
    assert_eq!(
        (&dead["matched"], &dead["state"]),
        (&json!(true), &json!("deadLettered"))
    );
    let expected = json!({
        "number": 1,
        "at": NOW.to_string(),
        "endpoint": "https://hook/x",
        "outcome": "Busy",
        "status": 503,
        "batch": 3,
        "timings": {"queuedMs": 1.5, "connectMs": 0.0, "firstByteMs": 2.0, "totalMs": 3.0},
        "response": {"contentType": "text/html", "snippet": "<script>", "truncated": true},
        "decision": {
            "kind": "retry",
            "at": (NOW + Duration::from_secs(30)).to_string(),
            "why": "floor",
            "text": "after this status at least 30s are waited",
        },
    });
    assert_eq!(dead["attempts"][0], expected);
    let second = &dead["attempts"][1];
    assert_eq!(second["timings"], json!({"queuedMs": 1.5, "totalMs": 9.0}));
    assert_eq!(second["decision"]["kind"], "deadLetter");
    assert_eq!(second["failure"], "refused");
    assert_eq!(dead["ended"]["disposition"], "deadLettered");
    assert_eq!(
        dead["ended"]["blob"],
        json!({"account": "local", "container": "dead", "path": "x.json"})
    );
    assert_eq!(story["subscriptions"][1]["next"]["why"], "probation");
    let late = &story["subscriptions"][2]["ended"];
    assert_eq!(
        (&late["disposition"], &late["late"]),
        (&json!("delivered"), &json!(true))
    );
    assert_eq!(
        story["subscriptions"][3]["predicate"],
        json!({"kind": "advanced", "text": "data.n NumberGreaterThan 5", "index": 0})
    );
}

#[tokio::test]
async fn hostile_ids_are_only_looked_up() {
    let (lab, told) = lab(FakeRecordings::default()).await;
    get(&lab, "events/a%2Fb%20%C3%BC").await.expect(200);
    let long = "x".repeat(5000);
    for (sent, meant) in [
        ("%2e%2e%2f%2e%2e", "../.."),
        ("%00", "\0"),
        ("%ff", "\u{fffd}"),
        ("%3Cscript%3E", "<script>"),
        ("a+b", "a+b"),
        (&long, &long),
    ] {
        told.ids.lock().unwrap().clear();
        let got = get(&lab, &format!("events/{sent}")).await.expect(404);
        assert_eq!(*told.ids.lock().unwrap(), [meant]);
        assert_eq!(got.header("content-type"), "application/problem+json");
        assert_eq!(got.header("x-content-type-options"), "nosniff");
        assert_eq!(got.body["field"], "id");
        let detail = got.body["detail"].as_str().unwrap();
        assert!(detail.len() < 1000, "{detail}");
        assert!(detail.contains("older than what is kept"), "{detail}");
    }
    get(&lab, "events/e1/x").await.expect(404);
    get(&lab, "events/e1?x=1").await.expect(400);
    lab.send("DELETE", "/postrider/v1/events/e1", None, &[])
        .await
        .expect(405);
    // If recording is off, the error says so.
    let off = ApiTestServer::new(false).await;
    let got = get(&off, "events/e1").await.expect(404);
    assert!(got.body["detail"].as_str().unwrap().ends_with("recording is off"));
    let got = get(&off, "events/stream").await.expect(404);
    assert!(
        got.body["detail"]
            .as_str()
            .unwrap()
            .starts_with("recording is off")
    );
    assert_eq!(get(&off, "events").await.expect(200).body, json!({"value": []}));
}

#[tokio::test]
async fn a_search_is_asked_as_it_is_meant() {
    let (lab, told) = lab(FakeRecordings::default()).await;
    let query = "topic=T1&subscription=sub1&type=T&subject=a+b%2B&state=DEADLETTERED&outcome=busy\
                 &since=2026-01-01T00:00:00Z&until=1h&limit=7&cursor=5-6-7&id=e1";
    let got = get(&lab, &format!("events?{query}")).await.expect(200).body;
    let expected = json!({
        "value": [{
            "id": "e1", "topic": "t1", "type": "T", "subject": "s", "acceptedAt": NOW.to_string(),
            "state": "retrying", "attempts": 2,
            "subscriptions": [{"name": "s1", "state": "retrying", "lastOutcome": "Busy"}],
        }],
        "cursor": CURSOR.to_string(),
        "searched": {"from": (NOW - Duration::from_secs(60)).to_string(), "to": NOW.to_string()},
    });
    assert_eq!(got, expected);
    let asked = told.asked.lock().unwrap().pop().unwrap();
    let directory = &lab.server.engine.directory;
    let topic = directory.topic("t1").unwrap().topic.id;
    assert_eq!(asked.topic, Some(topic));
    assert_eq!(
        asked.subscription,
        directory.subscription(topic, None, "sub1").map(|one| one.id)
    );
    assert_eq!(asked.id.as_deref(), Some("e1"));
    assert_eq!(asked.event_type.as_deref(), Some("T"));
    assert_eq!(asked.subject.as_deref(), Some("a b+"));
    assert_eq!(asked.state, Some(EventState::All(DeliveryState::DeadLettered)));
    assert_eq!(asked.outcome, Some(Outcome::Busy));
    assert_eq!(asked.since, Timestamp::parse("2026-01-01T00:00:00Z"));
    assert_eq!(asked.until, Some(NOW - Duration::from_secs(3600)));
    assert_eq!((asked.limit, asked.cursor), (7, Some(CURSOR)));

    get(&lab, "events?topic=&state=&cursor=").await.expect(200);
    let id = format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1");
    get(&lab, &format!("events?topic={id}")).await.expect(200);
    let id = format!("{id}/providers/Microsoft.EventGrid/eventSubscriptions/SUB1");
    get(&lab, &format!("events?subscription={id}")).await.expect(200);
    get(&lab, "events?subscription=t1/sub1").await.expect(200);
    for (bad, status, field) in [
        ("state=happy", 400, json!("state")),
        ("outcome=Good", 400, json!("outcome")),
        ("since=later", 400, json!("since")),
        ("until=later", 400, json!("until")),
        ("limit=0", 400, json!("limit")),
        ("limit=1001", 400, json!("limit")),
        ("cursor=1", 400, json!("cursor")),
        ("topic=t2", 404, json!("topic")),
        ("subscription=s2", 404, json!("subscription")),
        ("limit=1&limit=2", 400, json!("limit")),
        ("nothing=1", 400, Value::Null),
    ] {
        let got = get(&lab, &format!("events?{bad}")).await.expect(status);
        assert_eq!(got.body["field"], field, "{bad}");
    }
}

#[tokio::test]
async fn a_question_for_attempts_is_read_as_it_is_meant() {
    let (lab, told) = lab(FakeRecordings::default()).await;
    let path = |query: &str| format!("subscription/attempts?{query}");
    let id = format!(
        "{GROUP}/providers/Microsoft.EventGrid/topics/t1/providers/Microsoft.EventGrid/eventSubscriptions/SUB1"
    );
    for (query, filter, limit) in [
        (format!("id={id}"), AttemptFilter::All, 50),
        ("id=sub1&outcome=FAILED&limit=7".into(), AttemptFilter::Failed, 7),
        (
            "id=t1/sub1&outcome=busy&cursor=5-6-7~3".into(),
            AttemptFilter::Outcome(Outcome::Busy),
            50,
        ),
    ] {
        let got = get(&lab, &path(&query)).await.expect(200).body;
        // Lines of other subscriptions are not shown.
        assert_eq!(got, json!({"value": [], "cursor": CURSOR.to_string()}));
        let asked = told.asked.lock().unwrap().pop().unwrap();
        assert!(asked.subscription.is_some());
        assert_eq!((asked.attempts, asked.limit), (Some(filter), limit));
        assert_eq!(asked.cursor, query.contains("cursor").then_some(CURSOR));
    }
    for (bad, status, field) in [
        ("", 400, json!("id")),
        ("id=s2", 404, json!("id")),
        ("id=sub1&outcome=Good", 400, json!("outcome")),
        ("id=sub1&limit=0", 400, json!("limit")),
        ("id=sub1&limit=1001", 400, json!("limit")),
        ("id=sub1&cursor=1", 400, json!("cursor")),
        ("id=sub1&cursor=5-6-7~x", 400, json!("cursor")),
        ("id=sub1&state=held", 400, Value::Null),
    ] {
        let got = get(&lab, &path(bad)).await.expect(status);
        assert_eq!(got.body["field"], field, "{bad}");
    }
    get(&lab, "subscription/other?id=sub1").await.expect(404);
}

fn recent(data: &str) -> RecentEvent {
    let event = format!(
        r#"{{"id":"e","subject":"s","eventType":"T","eventTime":"2026-01-01T00:00:00Z","dataVersion":"","data":{data}}}"#
    );
    let batch = PublishedBatch {
        topic: TopicId(1),
        schema: EventSchema::EventGrid,
        received: NOW,
        publisher: "key1".into(),
        trace: None,
        replay: 0,
        hops: 0,
        events: vec![EventRef {
            object: ByteSpan::new(0, event.len()),
            matched: 0,
            data_version: ByteSpan::default(),
            topic: ByteSpan::default(),
            lacks: MissingMembers::default(),
        }],
        body: Bytes::from(event),
        matched: vec![Box::default()],
    };
    RecentEvent {
        audience: Arc::new(TopicAudience {
            topic: TopicId(1),
            name: "t1".into(),
            full_id: "/r/t1".into(),
            domain: false,
            mapping: None,
            subscriptions: Vec::new(),
        }),
        batch: Arc::new(batch),
        index: 0,
    }
}

#[tokio::test]
async fn a_filter_is_tried_on_the_latest_events() {
    let told = FakeRecordings {
        recent: vec![recent(r#"{"n":6}"#), recent(r#"{"n":5}"#), recent("null")],
        ..FakeRecordings::default()
    };
    let (lab, _) = lab(told).await;
    let test = async |body: Value, headers: &[(&str, &str)]| {
        lab.send("POST", "/postrider/v1/filters/test", Some(&body), headers)
            .await
    };
    let filter =
        json!({"advancedFilters": [{"operatorType": "NumberGreaterThan", "key": "data.n", "value": 5}]});
    // A filter test changes nothing, so readers may run one.
    let reader = [("authorization", "Bearer reader secret")];
    let got = test(json!({"topic": "t1", "filter": filter, "limit": 2}), &reader)
        .await
        .expect(200);
    let expected = json!({"value": [
        {"id": "e", "type": "T", "subject": "s", "at": NOW.to_string(), "matched": true},
        {"id": "e", "type": "T", "subject": "s", "at": NOW.to_string(), "matched": false, "predicate":
            {"kind": "advanced", "index": 0, "text": "data.n NumberGreaterThan 5"}},
    ]});
    assert_eq!(got.body, expected);
    let all = test(json!({"topic": "t1"}), &[]).await.expect(200);
    assert_eq!(all.body["value"].as_array().unwrap().len(), 3);

    let bad = json!({"advancedFilters": [{"operatorType": "Like", "key": "data.n", "value": 5}]});
    for (body, status, field) in [
        (
            json!({"topic": "t1", "filter": bad}),
            400,
            json!("filter.advancedFilters[0].operatorType"),
        ),
        (json!({"topic": "t1", "filter": 5}), 400, json!("filter")),
        (json!({"topic": "t2"}), 404, json!("topic")),
        (json!({"filter": {}}), 400, json!("topic")),
        (json!({"topic": "t1", "limit": 501}), 400, json!("limit")),
        (json!({"topic": "t1", "more": 1}), 400, Value::Null),
        (json!([]), 400, Value::Null),
    ] {
        let got = test(body.clone(), &[]).await;
        assert_eq!(
            (got.status, &got.body["field"]),
            (status, &field),
            "{body}: {}",
            got.body
        );
    }
    lab.send("GET", "/postrider/v1/filters/test", None, &[])
        .await
        .expect(405);
    test(json!({"topic": "t1"}), &[("authorization", "Bearer x")])
        .await
        .expect(401);
}

// Regression: a test with 500 large events was evaluated without a limit.
#[tokio::test]
async fn a_filter_test_has_the_budget_of_a_publish_request() {
    let large = format!(r#"{{"n":"{}"}}"#, "x".repeat(100_000));
    let told = FakeRecordings {
        recent: vec![recent(&large); 60],
        ..FakeRecordings::default()
    };
    let (lab, _) = lab(told).await;
    let filter =
        json!({"advancedFilters": [{"operatorType": "StringContains", "key": "data.n", "values": ["y"]}]});
    let test = async |limit: usize| {
        let body = json!({"topic": "t1", "filter": filter, "limit": limit});
        lab.send("POST", "/postrider/v1/filters/test", Some(&body), &[])
            .await
    };
    let some = test(8).await.expect(200);
    assert_eq!(some.body["value"].as_array().unwrap().len(), 8);
    let refused = test(60).await.expect(413);
    assert_eq!(refused.body["field"], "filter");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(
        detail.contains("latest 60 events") && detail.contains("4194304 bytes"),
        "{detail}"
    );
}

#[tokio::test]
async fn the_stream_tells_what_happens_until_it_ends() {
    let line = |what: LiveStreamHappening, subscription: Option<u64>| LiveStreamLine {
        what,
        at: NOW,
        id: "e\n1".into(),
        topic: TopicId(1),
        topic_name: "t1".into(),
        domain_topic: None,
        event_type: "T".into(),
        subject: "s".into(),
        subscription: subscription.map(|id| (SubscriptionId(id), format!("s{id}"))),
        elsewhere: None,
    };
    let attempted = LiveStreamHappening::Attempted {
        outcome: Outcome::Busy,
        status: Some(503),
        state: DeliveryState::Retrying,
    };
    let ended = LiveStreamHappening::Ended(DeliveryDisposition::Dropped(GiveUpReason::TimeToLiveExceeded));
    let told = FakeRecordings {
        lines: vec![
            line(LiveStreamHappening::Accepted { matched: 1 }, None),
            line(attempted, Some(1)),
            line(ended, Some(2)),
        ],
        ..FakeRecordings::default()
    };
    let (lab, _) = lab(told).await;
    let got = get(&lab, "events/stream").await.expect(200);
    assert_eq!(got.header("content-type"), "text/event-stream");
    assert_eq!(got.header("cache-control"), "no-store");
    let text = String::from_utf8(got.bytes.to_vec()).unwrap();
    let mut events = text.split("\n\n").filter(|event| event.starts_with("event: "));
    let mut next = || {
        let (event, data) = events.next().unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        (event.to_owned(), data)
    };
    let whole = json!({"id": "e\n1", "topic": "t1", "type": "T", "subject": "s", "at": NOW.to_string(), "matched": 1});
    assert_eq!(next(), ("event: accepted".into(), whole));
    let (event, data) = next();
    assert_eq!(event, "event: attempted");
    assert_eq!(
        (
            &data["subscription"],
            &data["outcome"],
            &data["status"],
            &data["state"]
        ),
        (&json!("s1"), &json!("Busy"), &json!(503), &json!("retrying"))
    );
    let (event, data) = next();
    assert_eq!(
        (event.as_str(), &data["state"]),
        ("event: ended", &json!("dropped"))
    );

    get(&lab, "events/stream?topic=t2").await.expect(404);
    get(&lab, "events/stream?x=1").await.expect(400);
    lab.send("POST", "/postrider/v1/events/stream", None, &[])
        .await
        .expect(405);
}

/// Waits until a client follows the stream.
async fn followed(told: &FakeRecordings) {
    while told.open.as_ref().unwrap().lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn streams_end_with_the_server_and_with_their_session() {
    let open = || FakeRecordings {
        open: Some(Mutex::default()),
        ..FakeRecordings::default()
    };
    let (first, told) = lab(open()).await;
    let stop = async {
        followed(&told).await;
        first.server.streams.end().await;
    };
    let (got, ()) = tokio::join!(get(&first, "events/stream"), stop);
    got.expect(200);
    get(&first, "events/stream").await.expect(200);

    let (second, told) = lab(open()).await;
    let (seal, now) = (second.server.access.session_seal(), second.server.wall.now());
    let (id, token, session) = PortalSessions::begin("reader", seal, now);
    let cookie = format!("__Host-postrider_session_443={}", id.expose());
    let headers = [
        ("host", "localhost"),
        ("cookie", cookie.as_str()),
        ("x-csrf-token", token.expose()),
    ];
    let path = "/postrider/v1/events/stream";
    let sign_out = async {
        followed(&told).await;
        second.server.sessions.end(&session);
        // The next line must not reach the client that has signed out.
        let line = Arc::new(accepted());
        for sender in told.open.as_ref().unwrap().lock().unwrap().iter() {
            sender.send(line.clone()).unwrap();
        }
    };
    let (got, ()) = tokio::join!(second.exchange("GET", path, None, &headers), sign_out);
    let got = got.expect(200);
    assert!(!String::from_utf8_lossy(&got.bytes).contains("event:"));
}

#[tokio::test]
async fn a_stream_ends_when_the_token_that_opened_it_is_revoked() {
    let (lab, told) = lab(FakeRecordings {
        open: Some(Mutex::default()),
        ..FakeRecordings::default()
    })
    .await;
    let (revoked, other) = (lab.token_of("reader"), lab.token_of("owner"));
    let tell = |line: LiveStreamLine| {
        let line = Arc::new(line);
        for sender in told.open.as_ref().unwrap().lock().unwrap().iter() {
            let _ = sender.send(line.clone());
        }
    };
    let path = "/postrider/v1/events/stream";
    let read = async |token: &str| {
        let headers = [("host", "localhost"), ("authorization", token)];
        let got = lab.exchange("GET", path, None, &headers).await.expect(200);
        String::from_utf8(got.bytes.to_vec()).unwrap()
    };
    let end = async {
        while told.open.as_ref().unwrap().lock().unwrap().len() < 2 {
            tokio::task::yield_now().await;
        }
        let body = json!({"client": "reader"});
        let path = "/postrider/v1/sessions/revoke";
        lab.send("POST", path, Some(&body), &[]).await.expect(200);
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        // Nothing has happened to events meanwhile.
        let read_by = |sender: &broadcast::Sender<_>| sender.receiver_count();
        let readers: usize = told
            .open
            .as_ref()
            .unwrap()
            .lock()
            .unwrap()
            .iter()
            .map(read_by)
            .sum();
        assert_eq!(readers, 1, "the stream ends with the revocation");
        tell(accepted());
        // The stream of the other client continues until the server stops.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        lab.server.streams.end().await;
    };
    let (revoked, other, ()) = tokio::join!(read(&revoked), read(&other), end);
    assert!(!revoked.contains("event:"), "{revoked}");
    assert!(other.contains("event: accepted"), "{other}");
}

#[tokio::test]
async fn slow_readers_are_told_what_they_lost() {
    let told = FakeRecordings {
        lines: vec![accepted(); 20],
        ..FakeRecordings::default()
    };
    let (lab, _) = lab(told).await;
    let got = get(&lab, "events/stream").await.expect(200);
    let text = String::from_utf8(got.bytes.to_vec()).unwrap();
    assert!(text.contains("\n\n: 4 lines were lost\n\n"), "{text}");
    assert_eq!(text.matches("event: accepted\n").count(), 16);
    let got = get(&lab, "events/stream?subscription=sub1").await.expect(200);
    assert!(!String::from_utf8_lossy(&got.bytes).contains("event:"));
}

fn accepted() -> LiveStreamLine {
    LiveStreamLine {
        what: LiveStreamHappening::Accepted { matched: 1 },
        at: NOW,
        id: "e1".into(),
        topic: TopicId(1),
        topic_name: "t1".into(),
        domain_topic: None,
        event_type: "T".into(),
        subject: "s".into(),
        subscription: None,
        elsewhere: None,
    }
}
