//! Two engines on one catalog: changes of one are in force on the other.

use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::envelope::EventEnvelope;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, PublishedBatch};
use postrider_core::filter::FilterBudget;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::outcome::Outcome;
use postrider_core::probation::{EndpointDelay, EndpointProbationDelay};
use postrider_core::profile::Profiles;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{Destination, ResourceOrigin, Subscription, Topic, WebHook};
use postrider_core::time::Clock;
use postrider_engine::counters::by_reason;
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::{
    DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport, TransportFailure, TransportFailureKind,
};
use postrider_engine::handshake::OperationState;
use postrider_engine::node::{NodeIdentity, SendingTurn};
use postrider_engine::replay::ReplayRequest;
use postrider_engine::{Engine, EngineParts, Error, dispatch, handshake};
use postrider_sim::blobs::MemoryBlobs;
use postrider_sim::clock::SimClock;
use postrider_store::memory::{MemoryArchive, MemoryLog, SharedCatalog};
use postrider_store::{Archive, Catalog, CatalogChange, HandshakeState, ReplayState};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

const HOOK: &str = "https://hook.example/1";

/// A receiver that answers with one status and records its requests.
struct StatusReceiver {
    status: AtomicU16,
    got: Mutex<Vec<String>>,
    /// While true, connections fail.
    unreachable: watch::Sender<bool>,
}

#[async_trait]
impl DeliveryTransport for StatusReceiver {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let mut unreachable = self.unreachable.subscribe();
        let connected = unreachable.wait_for(|unreachable| !unreachable).await;
        connected.expect("the receiver has the sender");
        if request.guard.is_some_and(|guard| !guard.may_send()) {
            return DeliveryReply::Failed(TransportFailure {
                kind: TransportFailureKind::Withdrawn,
                detail: String::new(),
            });
        }
        self.got.lock().unwrap().push(request.url.to_string());
        DeliveryReply::Answered(DeliveryAnswer {
            status: self.status.load(Relaxed),
            ..DeliveryAnswer::default()
        })
    }
}

struct TestNode {
    engine: Arc<Engine>,
    steward: watch::Sender<bool>,
    sharing: watch::Sender<SendingTurn>,
    receiver: Arc<StatusReceiver>,
}

struct TwoNodeSetup {
    clock: Arc<SimClock>,
    nodes: Vec<TestNode>,
    /// The catalog as a third node would change it.
    other: SharedCatalog,
    archive: Arc<MemoryArchive>,
}

impl TwoNodeSetup {
    async fn new() -> TwoNodeSetup {
        let clock = Arc::new(SimClock::start());
        clock.keep_steady();
        let mut catalogs = SharedCatalog::handles(3);
        let other = catalogs.pop().unwrap();
        let archive = Arc::new(MemoryArchive::default());
        let mut nodes = Vec::new();
        for (n, catalog) in catalogs.into_iter().enumerate() {
            let receiver = Arc::new(StatusReceiver {
                status: AtomicU16::new(200),
                got: Mutex::default(),
                unreachable: watch::Sender::new(false),
            });
            let (steward, is_steward) = watch::channel(n == 0);
            let (sharing, is_sharing) = watch::channel(SendingTurn::new(n, 2));
            let parts = EngineParts {
                log: Arc::new(MemoryLog::new(7)),
                catalog: Arc::new(catalog),
                transport: receiver.clone(),
                clock: clock.clone(),
                wall: clock.clone(),
                profiles: Profiles::default(),
                id_prefix: "/subscriptions/x".into(),
                dispatch: dispatch::Config::default(),
                dead_letters: DeadLetterService::new(Arc::new(MemoryBlobs::default()), archive.clone(), None),
                handshake: handshake::HandshakeRules::default(),
                recorder: Arc::new(postrider_engine::recorder::NoRecorder),
                node: NodeIdentity {
                    name: Some(format!("n{n}").into()),
                    coordinator: is_steward,
                    sharing: is_sharing,
                },
            };
            let engine = Engine::start(parts).await.unwrap();
            engine.set_replay_request_parser(Box::new(|_| Some(ReplayRequest::default())));
            nodes.push(TestNode {
                engine,
                steward,
                sharing,
                receiver,
            });
        }
        TwoNodeSetup {
            clock,
            nodes,
            other,
            archive,
        }
    }

    fn engine(&self, n: usize) -> &Arc<Engine> {
        &self.nodes[n].engine
    }

    async fn pass(&self, time: Duration) {
        self.clock.sleep_until(self.clock.now() + time).await;
    }

    async fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let end = self.clock.now() + Duration::from_secs(3600);
        while !holds() {
            assert!(self.clock.now() < end, "never came true: {what}");
            self.pass(Duration::from_millis(10)).await;
        }
    }

    /// Creates a topic with a subscription on the first node, and waits for the second.
    async fn with_subscription(&self) -> Arc<Subscription> {
        self.engine(0).put_topic(topic(1, "orders")).await.unwrap();
        let made = self.engine(0).put_subscription(subscription(2)).await.unwrap();
        let second = &self.engine(1).directory;
        self.until("it is in force", || second.subscription_by_id(made.id).is_some())
            .await;
        made
    }

    async fn publish(&self, n: usize) -> Vec<SubscriptionId> {
        let engine = self.engine(n);
        let entry = engine.directory.topic_by_id(TopicId(1)).expect("it is there");
        let text = r#"{"id":"1","subject":"s","eventType":"t","eventTime":"2026-01-01T00:00:00Z","dataVersion":"1","data":{}}"#;
        let mut router = engine.router(&entry, self.clock.now(), FilterBudget::UNLIMITED);
        let event = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(text).unwrap(), None);
        let matched = router.route(&event, None);
        let (sets, routed) = router.finish().expect("the budget has no limit");
        let found = sets[matched as usize].to_vec();
        let batch = PublishedBatch {
            topic: TopicId(1),
            schema: EventSchema::EventGrid,
            received: self.clock.now(),
            publisher: "test".into(),
            trace: None,
            replay: 0,
            hops: 0,
            body: Bytes::from_static(text.as_bytes()),
            events: vec![EventRef {
                object: ByteSpan::new(0, text.len()),
                matched,
                ..EventRef::default()
            }],
            matched: sets,
        };
        engine.accept(&entry, batch, routed).await.unwrap();
        found
    }

    fn delay(&self, n: usize) -> Option<EndpointProbationDelay> {
        let all = self.engine(n).dispatcher.endpoints();
        all.iter()
            .find(|one| one.name == HOOK)
            .and_then(|one| one.state.delay)
    }

    async fn change(&self, change: CatalogChange) {
        while let Err(e) = self.other.commit(vec![change.clone()]).await {
            // The third node applies no changes of others by itself.
            assert!(matches!(e, postrider_store::Error::Conflict(_)), "{e}");
            self.other.load().await.unwrap();
        }
    }
}

fn topic(id: u64, name: &str) -> Topic {
    Topic {
        resource_group: "rg1".into(),
        location: "here".into(),
        ..Topic::custom(TopicId(id), name, [Secret::new("a"), Secret::new("b")])
    }
}

fn subscription(id: u64) -> Subscription {
    Subscription::new(
        SubscriptionId(id),
        TopicId(1),
        format!("s{id}"),
        Destination::WebHook(WebHook::new(HOOK)),
    )
}

#[tokio::test(start_paused = true)]
async fn what_is_made_and_changed_on_one_node_is_in_force_on_the_other() {
    let world = TwoNodeSetup::new().await;
    let made = world.with_subscription().await;
    let got = || world.nodes[1].receiver.got.lock().unwrap().len();
    assert_eq!(world.publish(1).await, [made.id]);
    world.until("it is delivered there", || got() == 1).await;
    assert!(world.nodes[0].receiver.got.lock().unwrap().is_empty());

    // Paused on the second node, the subscription is paused on the first, and is resumed there.
    world.engine(1).pause_subscription(made.id).await.unwrap();
    let paused = |n: usize| {
        let known = world.engine(n).directory.subscription_by_id(made.id);
        known.is_some_and(|known| known.pauses.is_paused())
    };
    world.until("it is paused", || paused(0)).await;
    world.publish(0).await;
    world.engine(0).resume_subscription(made.id).await.unwrap();
    let first = || world.nodes[0].receiver.got.lock().unwrap().len();
    world.until("it goes on", || first() == 1 && !paused(1)).await;

    let mut renamed = topic(1, "Sales");
    renamed.location = "there".into();
    world.engine(1).put_topic(renamed).await.unwrap();
    world
        .until("it is renamed", || {
            world.engine(0).directory.topic("sales").is_some()
        })
        .await;
    assert!(world.engine(0).directory.topic("orders").is_none());
    assert_eq!(world.publish(0).await, [made.id], "it kept its routes");
}

#[tokio::test(start_paused = true)]
async fn a_pause_elsewhere_keeps_back_what_is_connecting() {
    let world = TwoNodeSetup::new().await;
    let made = world.with_subscription().await;
    let receiver = &world.nodes[1].receiver;
    let got = || receiver.got.lock().unwrap().len();
    receiver.unreachable.send_replace(true);
    world.publish(1).await;
    world
        .until("it connects", || receiver.unreachable.receiver_count() == 1)
        .await;
    world.engine(0).pause_subscription(made.id).await.unwrap();
    let known = || world.engine(1).directory.subscription_by_id(made.id);
    world
        .until("it is paused", || {
            known().is_some_and(|known| known.pauses.is_paused())
        })
        .await;
    receiver.unreachable.send_replace(false);
    world.pass(Duration::from_secs(60)).await;
    let attempts = || world.engine(1).dispatcher.counters.attempts.load(Relaxed);
    assert_eq!((got(), attempts()), (0, 0));
    world.engine(0).resume_subscription(made.id).await.unwrap();
    world.until("it goes on", || got() == 1).await;
    assert_eq!(attempts(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_a_subscription_that_is_deleted_elsewhere_is_dropped_and_counted() {
    let world = TwoNodeSetup::new().await;
    let made = world.with_subscription().await;
    world.nodes[1].receiver.status.store(503, Relaxed);
    world.publish(1).await;
    let backlog = || world.engine(1).log().backlog(made.id);
    world
        .until("it is to be tried again", || backlog().retrying == 1)
        .await;
    world.engine(0).delete_subscription(made.id).await.unwrap();
    let dropped = || {
        let dropped = &world.engine(1).dispatcher.counters.dropped;
        by_reason(dropped, GiveUpReason::SubscriptionGone).load(Relaxed)
    };
    world.until("it is dropped", || dropped() == 1).await;
    assert!(world.engine(1).dispatcher.outlet(made.id).is_none());
    assert_eq!(world.publish(1).await, []);
    // The deletion of a topic deletes its subscriptions.
    let again = world.engine(1).put_subscription(subscription(3)).await.unwrap();
    world
        .until("it is in force", || {
            world.engine(0).dispatcher.outlet(again.id).is_some()
        })
        .await;
    world.engine(1).delete_topic(TopicId(1)).await.unwrap();
    world
        .until("all of it is gone", || {
            let engine = world.engine(0);
            engine.directory.topic_by_id(TopicId(1)).is_none() && engine.dispatcher.outlet(again.id).is_none()
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_one_node_leaves_alone_is_left_alone_by_the_other() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    world.nodes[0].receiver.status.store(503, Relaxed);
    for _ in 0..10 {
        world.publish(0).await;
    }
    world
        .until("it is delayed there", || world.delay(0).is_some())
        .await;
    world.until("and here", || world.delay(1).is_some()).await;
    let (first, second) = (world.delay(0).unwrap(), world.delay(1).unwrap());
    // The response timeout of a batch in cloud-2021, and ten seconds of grace.
    let grace = Duration::from_secs(60 + 10);
    assert_eq!(
        second.until,
        first.until + grace,
        "the node that set the delay probes first"
    );
    world.publish(1).await;
    let got = |n: usize| world.nodes[n].receiver.got.lock().unwrap().len();
    assert_eq!(got(1), 0);
    world.nodes[0].receiver.status.store(200, Relaxed);
    world.publish(0).await;
    // The first node probes when the delay is over, and both continue.
    world.until("it is well again", || world.delay(0).is_none()).await;
    assert!(world.clock.now() < second.until);
    world.until("and here", || got(1) == 1).await;
    assert!(world.clock.now() < second.until);

    // No node probes first for a node that is gone: after the grace period the others do.
    let delay = EndpointProbationDelay {
        cause: Outcome::NotFound,
        status: Some(404),
        since: world.clock.now(),
        until: world.clock.now() + Duration::from_secs(300),
        step: Duration::from_secs(300),
    };
    let of_the_third = EndpointDelay {
        endpoint: HOOK.into(),
        delay,
        by: Some("n2".into()),
    };
    world.change(CatalogChange::PutEndpointDelay(of_the_third)).await;
    world.until("it holds", || world.delay(1).is_some()).await;
    world.publish(1).await;
    world.until("it is asked", || got(1) == 2).await;
    assert!(world.clock.now() >= delay.until + grace);
    world
        .until("it is well everywhere", || {
            world.delay(0).is_none() && world.delay(1).is_none()
        })
        .await;
}

const BASE: &str = "https://here";
const API: &str = "2020-06-01";

fn asked(id: u64) -> Subscription {
    Subscription {
        origin: ResourceOrigin::Azure,
        ..subscription(id)
    }
}

impl TwoNodeSetup {
    /// A handshake run by the first node, until both nodes see that a visit is awaited.
    async fn awaiting(&self, id: u64) -> Arc<postrider_store::Handshake> {
        self.engine(0).ask(asked(id), BASE, API, "").await.unwrap();
        let waits = |n: usize| {
            let pending = self
                .engine(n)
                .handshakes
                .pending(TopicId(1), None, &format!("s{id}"));
            pending.filter(|one| matches!(one.state, HandshakeState::Awaiting { .. }))
        };
        self.until("a visit is awaited", || waits(0).is_some() && waits(1).is_some())
            .await;
        waits(1).unwrap()
    }

    fn in_force(&self, n: usize, id: u64) -> bool {
        let found = self.engine(n).directory.subscription_by_id(SubscriptionId(id));
        found.is_some()
    }
}

#[tokio::test(start_paused = true)]
async fn a_webhook_that_one_node_asks_may_answer_to_the_other() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    let handshake = world.awaiting(5).await;
    assert_eq!(handshake.by.as_deref(), Some("n0"));
    let token = handshake.token.expose();
    let visited = world.engine(1).confirm("s5", &handshake.operation, token).await;
    assert_eq!(visited.unwrap().operation, handshake.operation);
    assert!(world.in_force(1, 5));
    world.until("it is in force", || world.in_force(0, 5)).await;
    let state = |n: usize| world.engine(n).handshakes.operation(&handshake.operation);
    world
        .until("both know", || {
            state(0) == Some(OperationState::Succeeded) && state(1) == Some(OperationState::Succeeded)
        })
        .await;
    assert_eq!(world.other.load().await.unwrap().handshakes, []);
    assert_eq!(world.engine(0).handshakes.under_way(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_is_superseded_elsewhere_ends() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    let handshake = world.awaiting(5).await;
    world.engine(1).put_subscription(subscription(5)).await.unwrap();
    let state = |n: usize| world.engine(n).handshakes.operation(&handshake.operation);
    world
        .until("it is cancelled", || state(0) == Some(OperationState::Canceled))
        .await;
    assert_eq!(state(1), Some(OperationState::Canceled));
    world.until("it is in force", || world.in_force(0, 5)).await;
    // Long after the handshake would have failed.
    world.pass(Duration::from_secs(3600)).await;
    assert_eq!(world.other.load().await.unwrap().handshakes, []);
}

#[tokio::test(start_paused = true)]
async fn handshakes_of_a_node_that_is_gone_are_taken_up() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    let handshake = world.awaiting(5).await;
    world.engine(0).stop(async {}).await.unwrap();
    world
        .engine(1)
        .take_over_handshakes(|by| by == Some("n0"))
        .await
        .unwrap();
    let stored = world.other.load().await.unwrap().handshakes;
    assert_eq!(stored[0].by.as_deref(), Some("n1"));
    // No visit comes: the handshake fails in time, and its own node reports that.
    let state = || world.engine(1).handshakes.operation(&handshake.operation);
    world
        .until("it has failed", || {
            matches!(state(), Some(OperationState::Failed { .. }))
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn only_the_steward_ends_what_has_expired() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    world.nodes[0].steward.send_replace(false);
    let expiring = Subscription {
        expires: Some(world.clock.now() + Duration::from_secs(60)),
        ..subscription(5)
    };
    world.engine(0).put_subscription(expiring).await.unwrap();
    world.pass(Duration::from_secs(600)).await;
    assert!(world.in_force(0, 5) && world.in_force(1, 5));
    assert_eq!(
        world.publish(1).await,
        [SubscriptionId(2)],
        "it gets nothing any more"
    );
    world.nodes[1].steward.send_replace(true);
    world
        .until("it is gone", || !world.in_force(0, 5) && !world.in_force(1, 5))
        .await;
    assert!(world.in_force(0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_replay_is_run_by_whoever_is_the_steward() {
    let world = TwoNodeSetup::new().await;
    world.nodes[0].steward.send_replace(false);
    let started = world
        .engine(0)
        .start_replay(None, ReplayRequest::default(), "{}".into());
    let job = started.await.unwrap().unwrap();
    world.pass(Duration::from_secs(60)).await;
    let stored = world.archive.jobs().await.unwrap();
    assert_eq!(stored[0].state, ReplayState::Running);
    assert!(world.engine(0).is_under_way(&stored[0]) && !world.engine(0).is_replaying(job.id));
    world.nodes[1].steward.send_replace(true);
    // The archive is empty, so the replay ends at once.
    world.pass(Duration::from_secs(1)).await;
    assert_eq!(world.archive.jobs().await.unwrap()[0].state, ReplayState::Done);
}

// Both nodes change the same subscription repeatedly; a refused change is retried.
#[tokio::test(start_paused = true)]
async fn nodes_that_change_the_same_end_with_the_same() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    let change = async |n: usize| {
        let mut refused = 0;
        for round in 0..50 {
            let changed = Subscription {
                labels: vec![format!("n{n} {round}")],
                ..subscription(2)
            };
            loop {
                match world.engine(n).put_subscription(changed.clone()).await {
                    Ok(_) => break,
                    Err(Error::Store(postrider_store::Error::Conflict(_))) => refused += 1,
                    Err(other) => panic!("{other}"),
                }
                tokio::task::yield_now().await;
            }
        }
        refused
    };
    tokio::join!(change(0), change(1));
    let labels = |n: usize| {
        let known = world.engine(n).directory.subscription_by_id(SubscriptionId(2));
        known.unwrap().labels.clone()
    };
    world.until("both are the same", || labels(0) == labels(1)).await;
    world.pass(Duration::from_secs(1)).await;
    let stored = world.other.load().await.unwrap().subscriptions;
    assert_eq!(
        (labels(0), labels(1)),
        (stored[0].labels.clone(), stored[0].labels.clone())
    );
}

// Both nodes change a subscription based on what they read: the second change must not overwrite
// the first.
#[tokio::test(start_paused = true)]
async fn what_was_read_before_another_node_changed_it_changes_nothing() {
    let world = TwoNodeSetup::new().await;
    let made = world.with_subscription().await;
    let read = world.engine(1).snapshot_subscription(TopicId(1), None, "S2");
    assert_eq!(read.in_force.as_deref(), Some(&*made));
    let labelled = |label: &str| Subscription {
        labels: vec![label.into()],
        ..subscription(2)
    };
    let first = world.engine(0).put_subscription(labelled("first")).await.unwrap();
    let known = |n: usize| world.engine(n).directory.subscription_by_id(made.id).unwrap();
    // The first change is in force already: only the outdated read reveals the conflict.
    world.until("it is in force", || known(1) == first).await;
    let second = world.engine(1);
    let refused = second
        .replace_subscription_if_unchanged(labelled("second"), read)
        .await;
    assert!(
        matches!(refused, Err(Error::Store(postrider_store::Error::Conflict(_)))),
        "{refused:?}"
    );
    assert_eq!(known(1).labels, ["first"]);
    // A pause does not conflict with a change, and is kept.
    let read = second.snapshot_subscription(TopicId(1), None, "s2");
    second.pause_subscription(made.id).await.unwrap();
    let put = second
        .replace_subscription_if_unchanged(labelled("second"), read)
        .await
        .unwrap();
    assert!(put.pauses.is_paused());

    // The same for its topic, and for the topic's deletion.
    let entry = second.directory.topic_by_id(TopicId(1)).unwrap();
    world.engine(0).put_topic(topic(1, "sales")).await.unwrap();
    world
        .until("it is renamed", || second.directory.topic("sales").is_some())
        .await;
    let refused = second
        .replace_topic_if_unchanged(topic(1, "orders"), Some(entry))
        .await;
    assert!(matches!(
        refused.map(drop),
        Err(Error::Store(postrider_store::Error::Conflict(_)))
    ));
    let entry = second.directory.topic_by_id(TopicId(1)).unwrap();
    world.engine(0).delete_topic(TopicId(1)).await.unwrap();
    world
        .until("it is gone", || {
            second.directory.topic_by_id(TopicId(1)).is_none()
        })
        .await;
    let refused = second
        .replace_topic_if_unchanged(topic(1, "orders"), Some(entry))
        .await;
    assert!(refused.is_err(), "it does not come back");
    assert!(world.other.load().await.unwrap().topics.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_wish_that_another_node_asks_a_webhook_about_is_not_lost() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    let (first, second) = (world.engine(0), world.engine(1));
    let read = second.snapshot_subscription(TopicId(1), None, "s5");
    let handshake = world.awaiting(5).await;
    let conflict = |result: Result<(), Error>| {
        assert!(
            matches!(result, Err(Error::Store(postrider_store::Error::Conflict(_)))),
            "{result:?}"
        );
    };
    let again = second
        .begin_handshake_if_unchanged(asked(5), read.clone(), BASE, API, "")
        .await;
    conflict(again.map(drop));
    conflict(
        second
            .replace_subscription_if_unchanged(subscription(5), read)
            .await
            .map(drop),
    );
    let pending = |n: usize| world.engine(n).handshakes.pending(TopicId(1), None, "s5");
    let still = |n: usize| pending(n).is_some_and(|one| one.operation == handshake.operation);
    assert!(still(0) && still(1), "it is asked on");
    // A change that has read the pending handshake may supersede it.
    let read = second.snapshot_subscription(TopicId(1), None, "s5");
    second
        .replace_subscription_if_unchanged(subscription(5), read)
        .await
        .unwrap();
    world.until("it is in force", || world.in_force(0, 5)).await;
    assert_eq!(first.handshakes.pending(TopicId(1), None, "s5"), None);
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_is_cancelled_elsewhere_takes_the_topic_of_its_resource_with_it() {
    let world = TwoNodeSetup::new().await;
    let (first, second) = (world.engine(0), world.engine(1));
    let scope = first.scope("/subscriptions/x/rg/1", "a.b", "here").await.unwrap();
    let id = scope.topic.id;
    let wish = Subscription {
        topic: id,
        ..asked(5)
    };
    first.ask(wish, BASE, API, "").await.unwrap();
    let pending = |n: usize| world.engine(n).handshakes.pending(id, None, "s5");
    world.until("it is known", || pending(1).is_some()).await;
    second.cancel_handshake(id, None, "s5").await.unwrap();
    let gone = |n: usize| world.engine(n).directory.topic_by_id(id).is_none();
    world.until("all of it is gone", || gone(0) && gone(1)).await;
    let stored = world.other.load().await.unwrap();
    assert!(stored.topics.is_empty() && stored.handshakes.is_empty());

    // A scope that is still used stays.
    let scope = second
        .scope("/subscriptions/x/rg/1", "a.b", "here")
        .await
        .unwrap();
    let id = scope.topic.id;
    let there = |n: usize| world.engine(n).directory.topic_by_id(id).is_some();
    world.until("it is there", || there(0)).await;
    let of = |one: Subscription| Subscription { topic: id, ..one };
    first.put_subscription(of(subscription(7))).await.unwrap();
    second.ask(of(asked(5)), BASE, API, "").await.unwrap();
    let pending = |n: usize| world.engine(n).handshakes.pending(id, None, "s5");
    world.until("it is known", || pending(0).is_some()).await;
    first.cancel_handshake(id, None, "s5").await.unwrap();
    world.until("it is cancelled", || pending(1).is_none()).await;
    assert!(there(0) && there(1));
}

// The webhook allows six requests a minute: both nodes together keep to it, and a single remaining
// node may use all of it.
#[tokio::test(start_paused = true)]
async fn nodes_share_the_rate_that_a_webhook_allows() {
    let world = TwoNodeSetup::new().await;
    world.with_subscription().await;
    let mut paced = subscription(2);
    if let Destination::WebHook(hook) = &mut paced.destination {
        hook.rate_max = Some(6);
    }
    world.engine(0).put_subscription(paced.clone()).await.unwrap();
    let paces = |n: usize| {
        let known = world.engine(n).directory.subscription_by_id(paced.id);
        known.is_some_and(|known| known.destination == paced.destination)
    };
    world.until("it is known", || paces(1)).await;
    for n in [0, 1] {
        for _ in 0..60 {
            world.publish(n).await;
        }
    }
    let got = |n: usize| world.nodes[n].receiver.got.lock().unwrap().len();
    for _ in 0..5 {
        let before = (got(0), got(1));
        world.pass(Duration::from_secs(60)).await;
        let sent = (got(0) - before.0, got(1) - before.1);
        assert!(sent.0 + sent.1 <= 7, "{sent:?} in a minute");
        assert!(sent.0 >= 2 && sent.1 >= 2, "{sent:?}: each has its share");
    }
    // The second node is gone.
    world.nodes[1].engine.stop(async {}).await.unwrap();
    world.nodes[0].sharing.send_replace(SendingTurn::ALONE);
    world.pass(Duration::from_secs(30)).await;
    let before = got(0);
    world.pass(Duration::from_secs(60)).await;
    assert!(
        (5..=7).contains(&(got(0) - before)),
        "{} in a minute",
        got(0) - before
    );
}
