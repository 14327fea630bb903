//! The flight recorder on the real engine: the history of events is complete.

use async_trait::async_trait;
use bytes::Bytes;
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use postrider_core::envelope::EventEnvelope;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers, PublishedBatch};
use postrider_core::filter::FilterBudget;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::outcome::Outcome;
use postrider_core::profile::Profiles;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{
    BatchSettings, DeadLetterDestination, Destination, Subscription, Topic, TopicKind, WebHook,
};
use postrider_core::time::Clock;
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::{
    AttemptTimings, DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport, TransportFailure,
    TransportFailureKind,
};
use postrider_engine::recorder::{
    AttemptDecision, DeliveryDisposition, DeliveryHistory, DeliveryState, EventHistory, EventState,
    RecordingQueries, RetryTimeRule, RoutingVerdict, SubscriptionFate,
};
use postrider_engine::replay::ReplayRequest;
use postrider_engine::{Engine, EngineParts, dispatch, handshake};
use postrider_recorder::{Config, FlightRecorder};
use postrider_sim::blobs::{ACCOUNT, MemoryBlobs};
use postrider_sim::clock::SimClock;
use postrider_store::memory::{MemoryArchive, MemoryCatalog, MemoryLog};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ORDERS: TopicId = TopicId(1);
const TENANTS: TopicId = TopicId(2);

/// An endpoint's reaction to a request.
#[derive(Clone, Copy)]
enum EndpointAct {
    Answer(u16, &'static str),
    /// Succeeds after this many seconds.
    Late(u64),
    Refused,
    /// Answers 413 to every request with the event of this id, and 200 to others.
    TooLargeWith(&'static str),
}

/// Endpoints that react in sequence; the last reaction repeats.
struct ScriptedEndpoints {
    clock: Arc<SimClock>,
    acts: Mutex<HashMap<String, Vec<EndpointAct>>>,
}

#[async_trait]
impl DeliveryTransport for ScriptedEndpoints {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let act = {
            let mut acts = self.acts.lock().unwrap();
            let acts = acts.get_mut(request.url.host().unwrap()).expect("it is known");
            if acts.len() > 1 { acts.remove(0) } else { acts[0] }
        };
        let (status, body) = match act {
            EndpointAct::TooLargeWith(id) => {
                let body = request.body_bytes();
                let text = std::str::from_utf8(&body).unwrap();
                let found = text.contains(&format!("\"{id}\""));
                (if found { 413 } else { 200 }, "")
            }
            EndpointAct::Answer(status, body) => (status, body),
            EndpointAct::Late(seconds) => {
                self.clock.pass(Duration::from_secs(seconds)).await;
                (200, "")
            }
            EndpointAct::Refused => {
                return DeliveryReply::Failed(TransportFailure {
                    kind: TransportFailureKind::Socket,
                    detail: "connection refused".into(),
                });
            }
        };
        let mut answer = DeliveryAnswer {
            status,
            body: Bytes::from_static(body.as_bytes()),
            timings: AttemptTimings {
                connect: Duration::from_millis(1),
                first_byte: Duration::from_millis(2),
                total: Duration::from_millis(3),
            },
            ..DeliveryAnswer::default()
        };
        if !body.is_empty() {
            answer
                .headers
                .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        }
        DeliveryReply::Answered(answer)
    }
}

fn topic(id: TopicId, name: &str, kind: TopicKind) -> Topic {
    Topic {
        kind,
        resource_group: "rg".into(),
        ..Topic::custom(id, name, [Secret::new("a"), Secret::new("b")])
    }
}

/// A subscription named like its host.
fn subscription(id: u64, topic: TopicId, name: &str) -> Subscription {
    Subscription::new(
        SubscriptionId(id),
        topic,
        name,
        Destination::WebHook(WebHook::new(format!("http://{name}/hook?code=secret"))),
    )
}

struct RecorderSetup {
    clock: Arc<SimClock>,
    hooks: Arc<ScriptedEndpoints>,
    engine: Arc<Engine>,
    recorder: Arc<FlightRecorder>,
    _directory: tempfile::TempDir,
}

impl RecorderSetup {
    async fn new() -> RecorderSetup {
        let clock = Arc::new(SimClock::start());
        clock.keep_steady();
        let hooks = Arc::new(ScriptedEndpoints {
            clock: clock.clone(),
            acts: Mutex::default(),
        });
        let directory = tempfile::tempdir().unwrap();
        let config = Config::new(directory.path().to_owned());
        let recorder = FlightRecorder::open(config, clock.clone()).unwrap();
        let engine = Engine::start(EngineParts {
            log: Arc::new(MemoryLog::new(7)),
            catalog: Arc::new(MemoryCatalog::default()),
            transport: hooks.clone(),
            clock: clock.clone(),
            wall: clock.clone(),
            profiles: Profiles::default(),
            id_prefix: "/subscriptions/s".into(),
            dispatch: dispatch::Config::default(),
            dead_letters: DeadLetterService::new(
                Arc::new(MemoryBlobs::default()),
                Arc::new(MemoryArchive::default()),
                None,
            ),
            handshake: handshake::HandshakeRules::default(),
            recorder: recorder.clone(),
            node: postrider_engine::node::NodeIdentity::alone(),
        })
        .await
        .unwrap();
        let orders = topic(ORDERS, "orders", TopicKind::Custom);
        engine.put_topic(orders).await.unwrap();
        RecorderSetup {
            clock,
            hooks,
            engine,
            recorder,
            _directory: directory,
        }
    }

    async fn subscribe(&self, subscription: Subscription, acts: &[EndpointAct]) {
        let host = subscription.name.clone();
        self.hooks.acts.lock().unwrap().insert(host, acts.to_vec());
        self.engine.put_subscription(subscription).await.unwrap();
    }

    /// Publishes events in one request: their ids, and their domain topics.
    async fn publish(&self, topic: TopicId, events: &[(&str, Option<&str>)]) {
        let entry = self.engine.directory.topic_by_id(topic).unwrap();
        let mut router = self
            .engine
            .router(&entry, self.clock.now(), FilterBudget::UNLIMITED);
        let (mut body, mut refs) = (String::from("["), Vec::new());
        for (id, inside) in events {
            if !refs.is_empty() {
                body.push(',');
            }
            let text = format!(
                r#"{{"id":"{id}","topic":"{}","subject":"/orders/1","eventType":"Made","eventTime":"2026-01-01T00:00:00Z","dataVersion":"1","data":{{}}}}"#,
                inside.unwrap_or("")
            );
            let event = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(&text).unwrap(), None);
            let matched = router.route(&event, *inside);
            let start = body.len();
            body.push_str(&text);
            refs.push(EventRef {
                object: ByteSpan::new(start, body.len()),
                matched,
                lacks: MissingMembers::default(),
                ..EventRef::default()
            });
        }
        body.push(']');
        let (matched, routed) = router.finish().expect("the budget has no limit");
        let batch = PublishedBatch {
            topic,
            schema: EventSchema::EventGrid,
            received: self.clock.now(),
            publisher: "test".into(),
            trace: None,
            replay: 0,
            hops: 0,
            body: Bytes::from(body),
            events: refs,
            matched,
        };
        self.engine.accept(&entry, batch, routed).await.unwrap();
    }

    fn stories(&self, id: &str) -> Vec<EventHistory> {
        self.recorder.flush();
        self.recorder.trace(id)
    }

    fn story(&self, id: &str) -> EventHistory {
        let mut stories = self.stories(id);
        assert_eq!(stories.len(), 1, "{stories:?}");
        stories.remove(0)
    }
}

fn fate<'a>(story: &'a EventHistory, name: &str) -> &'a SubscriptionFate {
    let of = story.subscriptions.iter().find(|of| of.name == name);
    &of.unwrap_or_else(|| panic!("{name} in {story:?}")).fate
}

fn delivery<'a>(story: &'a EventHistory, name: &str) -> &'a DeliveryHistory {
    match fate(story, name) {
        SubscriptionFate::Matched(delivery) => delivery,
        SubscriptionFate::Refused(predicate) => panic!("{name}: {predicate:?}"),
    }
}

fn refused(story: &EventHistory, name: &str) -> (RoutingVerdict, String) {
    match fate(story, name) {
        SubscriptionFate::Refused(predicate) => (predicate.verdict, predicate.text.clone()),
        SubscriptionFate::Matched(delivery) => panic!("{name}: {delivery:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_story_has_who_matched_who_did_not_every_attempt_and_the_end() {
    let world = RecorderSetup::new().await;
    let mut choosy = subscription(11, ORDERS, "choosy");
    choosy.filter.subject_begins_with = Some("/returns".into());
    let mut typed = subscription(12, ORDERS, "typed");
    typed.filter.included_event_types = Some(vec!["Deleted".into()]);
    world.subscribe(choosy, &[EndpointAct::Answer(200, "")]).await;
    world.subscribe(typed, &[EndpointAct::Answer(200, "")]).await;
    let acts = [
        EndpointAct::Answer(500, "try later"),
        EndpointAct::Refused,
        EndpointAct::Answer(200, ""),
    ];
    world.subscribe(subscription(13, ORDERS, "shaky"), &acts).await;
    let accepted = world.clock.now();
    world.publish(ORDERS, &[("e1", None)]).await;
    world.clock.pass(Duration::from_secs(600)).await;

    let story = world.story("e1");
    assert_eq!(story.state, EventState::All(DeliveryState::Delivered));
    assert_eq!(story.accepted, accepted);
    assert_eq!(
        (story.topic_name.as_str(), story.subject.as_str()),
        ("orders", "/orders/1")
    );
    assert_eq!(refused(&story, "choosy").0, RoutingVerdict::SubjectBeginsWith);
    assert_eq!(
        refused(&story, "typed"),
        (RoutingVerdict::EventType, "eventType in [\"Deleted\"]".to_owned())
    );
    let shaky = delivery(&story, "shaky");
    let outcomes: Vec<_> = shaky.attempts.iter().map(|a| (a.number, a.status)).collect();
    assert_eq!(outcomes, [(1, Some(500)), (2, None), (3, Some(200))]);
    let [first, second, third] = &shaky.attempts[..] else {
        unreachable!("there are three");
    };
    let AttemptDecision::Retry { at, why } = first.decision else {
        panic!("{:?}", first.decision);
    };
    assert_eq!(
        why,
        RetryTimeRule::Schedule {
            after: 1,
            wait: Duration::from_secs(10)
        }
    );
    assert_eq!(first.endpoint, "http://shaky/hook", "without the query");
    assert_eq!(first.response.as_ref().unwrap().text, "try later");
    assert_eq!(first.timings.unwrap().total, Duration::from_millis(3));
    assert!(
        second.begun >= at && second.queued == second.begun.since(at),
        "{second:?}"
    );
    assert_eq!(second.outcome, Outcome::SocketError);
    assert_eq!(second.failure.as_deref(), Some("connection refused"));
    assert_eq!(third.decision, AttemptDecision::Done);
    let end = shaky.end.as_ref().unwrap();
    assert_eq!(
        (end.disposition, end.at),
        (DeliveryDisposition::Delivered, third.ended)
    );
}

#[tokio::test(start_paused = true)]
async fn nobody_wanted_it() {
    let world = RecorderSetup::new().await;
    world.publish(ORDERS, &[("alone", None)]).await;
    let story = world.story("alone");
    assert_eq!((story.state, story.place), (EventState::Unmatched, None));
    assert_eq!(story.subscriptions, []);
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_leads_to_its_blob_and_the_blob_to_the_replay() {
    let world = RecorderSetup::new().await;
    let mut one = subscription(11, ORDERS, "refusing");
    one.dead_letter = Some(DeadLetterDestination {
        account: ACCOUNT.into(),
        container: "letters".into(),
    });
    let acts = [EndpointAct::Answer(400, "no"), EndpointAct::Answer(200, "")];
    world.subscribe(one, &acts).await;
    world.publish(ORDERS, &[("e1", None)]).await;
    world.clock.pass(Duration::from_secs(600)).await;
    let story = world.story("e1");
    let refusing = delivery(&story, "refusing");
    assert_eq!(refusing.state, DeliveryState::DeadLettered);
    let reason = match refusing.attempts[0].decision {
        AttemptDecision::DeadLetter(reason) => reason,
        other => panic!("{other:?}"),
    };
    let end = refusing.end.clone().unwrap();
    assert_eq!(end.disposition, DeliveryDisposition::DeadLettered(reason));
    let blob = end.blob.expect("it is written");
    assert_eq!(
        (blob.account.as_str(), blob.container.as_str()),
        (ACCOUNT, "letters")
    );

    let replay = world
        .engine
        .start_replay(None, ReplayRequest::default(), String::new());
    replay.await.unwrap().unwrap();
    world.clock.pass(Duration::from_secs(60)).await;
    let stories = world.stories("e1");
    assert_eq!(stories.len(), 2, "{stories:?}");
    let again = stories.iter().find(|story| story.replay == 1).unwrap();
    assert_eq!(again.replayed_from.as_ref(), Some(&blob));
    assert_eq!(delivery(again, "refusing").state, DeliveryState::Delivered);
}

#[tokio::test(start_paused = true)]
async fn ends_without_an_attempt_are_told() {
    let world = RecorderSetup::new().await;
    // The first answer is late, and comes before the retry.
    let late = subscription(11, ORDERS, "late");
    world
        .subscribe(late, &[EndpointAct::Late(35), EndpointAct::Refused])
        .await;
    let mut going = subscription(12, ORDERS, "going");
    going.retry.attempts_max = Some(5);
    world.subscribe(going, &[EndpointAct::Refused]).await;
    world.publish(ORDERS, &[("e1", None)]).await;
    world.clock.pass(Duration::from_secs(20)).await;
    world
        .engine
        .delete_subscription(SubscriptionId(12))
        .await
        .unwrap();
    world.clock.pass(Duration::from_secs(60)).await;
    let story = world.story("e1");
    let late = delivery(&story, "late");
    assert_eq!(late.attempts[0].outcome, Outcome::TimedOut);
    assert_eq!(
        late.end.as_ref().unwrap().disposition,
        DeliveryDisposition::DeliveredLate,
        "{late:?}"
    );
    let going = delivery(&story, "going");
    assert_eq!(
        going.end.as_ref().unwrap().disposition,
        DeliveryDisposition::Dropped(GiveUpReason::SubscriptionGone),
        "{going:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn what_expires_while_it_waits_is_told_and_a_letter_without_a_place_too() {
    let world = RecorderSetup::new().await;
    let minute = Duration::from_secs(60);
    let mut brief = subscription(11, ORDERS, "brief");
    brief.retry.time_to_live_minutes = Some(1);
    world.subscribe(brief, &[EndpointAct::Refused]).await;
    let mut shelved = subscription(12, ORDERS, "shelved");
    shelved.dead_letter = Some(DeadLetterDestination {
        account: ACCOUNT.into(),
        container: "letters".into(),
    });
    world
        .subscribe(shelved.clone(), &[EndpointAct::Answer(400, "")])
        .await;
    world.publish(ORDERS, &[("e1", None)]).await;
    world.clock.pass(minute).await;
    // Its dead letter is pending, and now there is no destination for it.
    shelved.dead_letter = None;
    world.subscribe(shelved, &[EndpointAct::Answer(400, "")]).await;
    world.clock.pass(60 * minute).await;
    let story = world.story("e1");
    let end = |name: &str| delivery(&story, name).end.clone().unwrap();
    let (brief, shelved) = (end("brief"), end("shelved"));
    assert_eq!(
        brief.disposition,
        DeliveryDisposition::Dropped(GiveUpReason::TimeToLiveExceeded)
    );
    let last = delivery(&story, "brief").attempts.last().unwrap();
    assert!(
        last.ended < brief.at && matches!(last.decision, AttemptDecision::Retry { .. }),
        "{last:?}"
    );
    assert_eq!(
        shelved.disposition,
        DeliveryDisposition::Dropped(GiveUpReason::DeadLetterWithoutDestination)
    );
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_left_alone_holds_what_waits_for_it() {
    let world = RecorderSetup::new().await;
    world
        .subscribe(subscription(11, ORDERS, "down"), &[EndpointAct::Refused])
        .await;
    for number in 0..20 {
        world.publish(ORDERS, &[(&format!("e{number}"), None)]).await;
    }
    world.clock.pass(Duration::from_secs(5)).await;
    let story = world.story("e19");
    let down = delivery(&story, "down");
    assert_eq!(down.state, DeliveryState::Held, "{down:?}");
    assert_eq!(down.holds[0].cause, Outcome::SocketError);
    assert_eq!(down.holds[0].released, None);
    assert!(world.engine.dispatcher.end_delays_by_operator("http://down/hook"));
    let story = world.story("e19");
    assert!(delivery(&story, "down").holds[0].released.is_some());
}

#[tokio::test(start_paused = true)]
async fn in_a_domain_it_is_told_who_is_attached_elsewhere() {
    let world = RecorderSetup::new().await;
    let kind = TopicKind::Domain {
        auto_create: true,
        auto_delete: true,
    };
    world
        .engine
        .put_topic(topic(TENANTS, "tenants", kind))
        .await
        .unwrap();
    world
        .subscribe(subscription(11, TENANTS, "all"), &[EndpointAct::Answer(200, "")])
        .await;
    for (id, name) in [(12, "a"), (13, "b")] {
        let mut one = subscription(id, TENANTS, name);
        one.domain_topic = Some(name.to_uppercase());
        world.subscribe(one, &[EndpointAct::Answer(200, "")]).await;
    }
    world
        .publish(
            TENANTS,
            &[("in-a", Some("a")), ("in-b", Some("b")), ("in-c", Some("c"))],
        )
        .await;
    world.clock.pass(Duration::from_secs(5)).await;
    let story = world.story("in-a");
    assert_eq!(story.domain_topic.as_deref(), Some("a"));
    for name in ["all", "a"] {
        assert_eq!(delivery(&story, name).state, DeliveryState::Delivered);
    }
    assert_eq!(refused(&story, "b").0, RoutingVerdict::DomainTopic);
    let story = world.story("in-c");
    assert_eq!(delivery(&story, "all").state, DeliveryState::Delivered);
    assert_eq!(refused(&story, "a").0, RoutingVerdict::DomainTopic);

    // In a domain with very many subscriptions, those of the request's domain topics are reported.
    for id in 100..300 {
        let mut one = subscription(id, TENANTS, &format!("many-{id}"));
        one.domain_topic = Some(format!("t{}", id / 2));
        one.filter.subject_begins_with = (id % 2 == 0).then(|| "/returns".into());
        world.subscribe(one, &[EndpointAct::Answer(200, "")]).await;
    }
    world
        .publish(TENANTS, &[("in-t60", Some("t60")), ("in-T61", Some("T61"))])
        .await;
    world.clock.pass(Duration::from_secs(5)).await;
    let story = world.story("in-T61");
    let names: Vec<&str> = story.subscriptions.iter().map(|of| of.name.as_str()).collect();
    assert_eq!(names, ["all", "many-123", "many-120", "many-121", "many-122"]);
    assert_eq!(refused(&story, "many-120").0, RoutingVerdict::DomainTopic);
    assert_eq!(refused(&story, "many-122").0, RoutingVerdict::SubjectBeginsWith);
    assert_eq!(delivery(&story, "many-123").state, DeliveryState::Delivered);
}

fn batched(id: u64, name: &str, events_max: u32) -> Subscription {
    let mut one = subscription(id, ORDERS, name);
    if let Destination::WebHook(hook) = &mut one.destination {
        hook.batching = BatchSettings {
            events_max: Some(events_max),
            preferred_kilobytes: None,
        };
    }
    one
}

/// The number, status and request size of each attempt.
fn attempts(of: &DeliveryHistory) -> Vec<(u32, Option<u16>, u32)> {
    let each = of.attempts.iter();
    each.map(|one| (one.number, one.status, one.batch)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_too_large_is_halved_and_costs_no_event_an_attempt() {
    let world = RecorderSetup::new().await;
    let mut one = batched(11, "small", 10);
    // The event has a single attempt.
    one.retry.attempts_max = Some(1);
    world.subscribe(one, &[EndpointAct::TooLargeWith("big")]).await;
    let events = ["a", "b", "c", "d", "big"].map(|id| (id, None));
    world.publish(ORDERS, &events).await;
    world.clock.pass(Duration::from_secs(5)).await;
    let whole = (1, Some(413), 5);
    for (id, expected) in [
        ("a", vec![whole, (1, Some(200), 3)]),
        ("c", vec![whole, (1, Some(200), 3)]),
        ("d", vec![whole, (1, Some(413), 2), (1, Some(200), 1)]),
        ("big", vec![whole, (1, Some(413), 2), (1, Some(413), 1)]),
    ] {
        let story = world.story(id);
        let delivery = delivery(&story, "small");
        assert_eq!(attempts(delivery), expected, "{id}");
        let AttemptDecision::Retry { at, why } = delivery.attempts[0].decision else {
            panic!("{:?}", delivery.attempts[0].decision);
        };
        assert_eq!((why, at), (RetryTimeRule::Halved, delivery.attempts[0].ended));
        let state = match id {
            "big" => DeliveryState::Dropped,
            _ => DeliveryState::Delivered,
        };
        assert_eq!(delivery.state, state, "{id}");
    }
}
