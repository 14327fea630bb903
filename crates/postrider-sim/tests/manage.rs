//! The engine's catalog changes: what is created and deleted together, in parallel and across
//! restarts.

use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::envelope::EventEnvelope;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, PublishedBatch};
use postrider_core::filter::FilterBudget;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::profile::{CLOUD_2021, Profile, Profiles, TimeToLiveRule};
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{Destination, DomainTopic, Subscription, Topic, TopicKind, WebHook};
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::counters::by_reason;
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::{
    DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport, TransportFailure, TransportFailureKind,
};
use postrider_engine::in_flight::ATTEMPT_OVERHEAD;
use postrider_engine::{Engine, EngineParts, Error, dispatch, handshake};
use postrider_sim::blobs::MemoryBlobs;
use postrider_sim::clock::SimClock;
use postrider_store::memory::{MemoryArchive, MemoryCatalog, MemoryLog};
use postrider_store::{Catalog, CatalogChange, CatalogContent};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// A receiver that records its requests.
#[derive(Default)]
struct RecordingReceiver {
    got: Mutex<Vec<String>>,
    came: Notify,
    /// A held answer: the status to send once notified. None: success at once.
    answers: Mutex<Option<(u16, Arc<Notify>)>>,
}

#[async_trait]
impl DeliveryTransport for RecordingReceiver {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        self.got.lock().unwrap().push(request.url.to_string());
        self.came.notify_one();
        let answers = self.answers.lock().unwrap().clone();
        let status = match answers {
            Some((status, let_go)) => {
                let_go.notified().await;
                status
            }
            None => 200,
        };
        DeliveryReply::Answered(DeliveryAnswer {
            status,
            ..DeliveryAnswer::default()
        })
    }
}

/// A catalog whose commits are held until they are released.
#[derive(Default)]
struct SlowCatalog {
    inner: MemoryCatalog,
    held: std::sync::atomic::AtomicBool,
    /// Whether the disk is full.
    full: std::sync::atomic::AtomicBool,
    waiting: AtomicUsize,
    arrived: Notify,
    go: Notify,
}

impl SlowCatalog {
    async fn wait_for(&self, count: usize) {
        while self.waiting.load(SeqCst) < count {
            self.arrived.notified().await;
        }
    }

    fn hold(&self) {
        self.held.store(true, SeqCst);
    }

    fn let_go(&self) {
        self.held.store(false, SeqCst);
        self.go.notify_waiters();
    }
}

#[async_trait]
impl Catalog for SlowCatalog {
    async fn load(&self) -> Result<CatalogContent, postrider_store::Error> {
        self.inner.load().await
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), postrider_store::Error> {
        let go = self.go.notified();
        if self.held.load(SeqCst) {
            self.waiting.fetch_add(1, SeqCst);
            self.arrived.notify_one();
            go.await;
            self.waiting.fetch_sub(1, SeqCst);
        }
        if self.full.load(SeqCst) {
            return Err(postrider_store::Error::Unavailable("no room".into()));
        }
        self.inner.commit(changes).await
    }

    async fn next_id(&self) -> Result<u64, postrider_store::Error> {
        self.inner.next_id().await
    }
}

struct CatalogSetup {
    clock: Arc<SimClock>,
    catalog: Arc<SlowCatalog>,
    receiver: Arc<RecordingReceiver>,
    engine: Arc<Engine>,
}

impl CatalogSetup {
    async fn new() -> CatalogSetup {
        CatalogSetup::with(Arc::default(), MemoryLog::new(7)).await
    }

    async fn with(catalog: Arc<SlowCatalog>, log: MemoryLog) -> CatalogSetup {
        let clock = Arc::new(SimClock::start());
        let receiver = Arc::new(RecordingReceiver::default());
        let parts = parts(catalog.clone(), log, receiver.clone(), clock.clone());
        let engine = Engine::start(parts).await.unwrap();
        CatalogSetup {
            clock,
            catalog,
            receiver,
            engine,
        }
    }

    /// The next life, with the same catalog and an empty log.
    async fn restart(self) -> CatalogSetup {
        self.engine.stop(async {}).await.unwrap();
        CatalogSetup::with(self.catalog, MemoryLog::new(7)).await
    }

    async fn domain(&self, id: u64, auto_create: bool, auto_delete: bool) -> TopicId {
        let kind = TopicKind::Domain {
            auto_create,
            auto_delete,
        };
        let topic = topic(id, "d", kind);
        self.engine.put_topic(topic).await.unwrap().topic.id
    }

    async fn stored(&self) -> CatalogContent {
        self.catalog.load().await.unwrap()
    }

    async fn publish(&self, topic: TopicId, inside: Option<&str>) -> Vec<SubscriptionId> {
        publish(&self.engine, self.clock.now(), topic, inside).await
    }
}

fn parts(
    catalog: Arc<SlowCatalog>,
    log: MemoryLog,
    transport: Arc<dyn DeliveryTransport>,
    clock: Arc<SimClock>,
) -> EngineParts {
    EngineParts {
        log: Arc::new(log),
        catalog,
        transport,
        clock: clock.clone(),
        wall: clock,
        profiles: profiles(),
        id_prefix: "/subscriptions/x".into(),
        dispatch: dispatch::Config::default(),
        dead_letters: DeadLetterService::new(
            Arc::new(MemoryBlobs::default()),
            Arc::new(MemoryArchive::default()),
            None,
        ),
        handshake: handshake::HandshakeRules::default(),
        recorder: Arc::new(postrider_engine::recorder::NoRecorder),
        node: postrider_engine::node::NodeIdentity::alone(),
    }
}

/// Publishes one event and says to whom it goes.
async fn publish(
    engine: &Arc<Engine>,
    now: Timestamp,
    topic: TopicId,
    inside: Option<&str>,
) -> Vec<SubscriptionId> {
    let entry = engine.directory.topic_by_id(topic).expect("it is there");
    let text = r#"{"id":"1","subject":"s","eventType":"t","eventTime":"2026-01-01T00:00:00Z","dataVersion":"1","data":{}}"#;
    let mut router = engine.router(&entry, now, FilterBudget::UNLIMITED);
    let event = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(text).unwrap(), None);
    let matched = router.route(&event, inside);
    let (sets, routed) = router.finish().expect("the budget has no limit");
    let found = sets[matched as usize].to_vec();
    let events = vec![EventRef {
        object: ByteSpan::new(0, text.len()),
        matched,
        ..EventRef::default()
    }];
    let batch = PublishedBatch {
        topic,
        schema: EventSchema::EventGrid,
        received: now,
        publisher: "test".into(),
        trace: None,
        replay: 0,
        hops: 0,
        body: Bytes::from_static(text.as_bytes()),
        events,
        matched: sets,
    };
    engine.accept(&entry, batch, routed).await.unwrap();
    found
}

/// The documents' profiles, and `hasty`, which gives up at once what would come too late.
fn profiles() -> Profiles {
    let mut profiles = Profiles::default();
    profiles.put(Profile {
        name: "hasty",
        time_to_live_rule: TimeToLiveRule::BeforeWaiting,
        ..CLOUD_2021
    });
    profiles
}

fn topic(id: u64, name: &str, kind: TopicKind) -> Topic {
    Topic {
        kind,
        resource_group: "rg1".into(),
        location: "here".into(),
        ..Topic::custom(TopicId(id), name, [Secret::new("a"), Secret::new("b")])
    }
}

fn subscription(id: u64, topic: TopicId, inside: Option<&str>) -> Subscription {
    Subscription {
        domain_topic: inside.map(str::to_owned),
        ..Subscription::new(
            SubscriptionId(id),
            topic,
            format!("s{id}"),
            Destination::WebHook(WebHook::new(format!("https://hook.example/{id}"))),
        )
    }
}

fn names(domain_topics: &[DomainTopic]) -> Vec<(&str, bool)> {
    domain_topics
        .iter()
        .map(|t| (t.name.as_str(), t.automatic))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_domain_topic_comes_with_the_first_subscription_and_goes_with_the_last() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    let domain = world.domain(1, true, true).await;
    engine
        .put_subscription(subscription(11, domain, Some("East")))
        .await
        .unwrap();
    engine
        .put_subscription(subscription(12, domain, Some("EAST")))
        .await
        .unwrap();
    engine
        .put_subscription(subscription(13, domain, None))
        .await
        .unwrap();
    assert_eq!(names(&engine.directory.domain_topics(domain)), [("East", true)]);
    assert_eq!(names(&world.stored().await.domain_topics), [("East", true)]);
    engine.delete_subscription(SubscriptionId(11)).await.unwrap();
    assert_eq!(names(&engine.directory.domain_topics(domain)), [("East", true)]);
    engine.delete_subscription(SubscriptionId(12)).await.unwrap();
    assert!(engine.directory.domain_topics(domain).is_empty());
    assert!(world.stored().await.domain_topics.is_empty());
    assert_eq!(world.stored().await.subscriptions.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_domain_topic_that_someone_wished_for_stays() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    let domain = world.domain(1, true, true).await;
    let made = engine.put_domain_topic(domain, "wished").await.unwrap();
    engine
        .put_subscription(subscription(11, domain, Some("wished")))
        .await
        .unwrap();
    engine.delete_subscription(SubscriptionId(11)).await.unwrap();
    assert_eq!(engine.directory.domain_topic(domain, "WISHED"), Some(made));
    // A domain topic that was created automatically stays, too, once it has been put explicitly.
    engine
        .put_subscription(subscription(12, domain, Some("auto")))
        .await
        .unwrap();
    engine.put_domain_topic(domain, "Auto").await.unwrap();
    engine.delete_subscription(SubscriptionId(12)).await.unwrap();
    let stored = world.stored().await.domain_topics;
    assert_eq!(names(&stored), [("auto", false), ("wished", false)]);
    // Where the domain does not delete automatically, nothing goes.
    let other = topic(
        2,
        "keeps",
        TopicKind::Domain {
            auto_create: true,
            auto_delete: false,
        },
    );
    let other = engine.put_topic(other).await.unwrap().topic.id;
    engine
        .put_subscription(subscription(13, other, Some("x")))
        .await
        .unwrap();
    engine.delete_subscription(SubscriptionId(13)).await.unwrap();
    assert_eq!(names(&engine.directory.domain_topics(other)), [("x", true)]);
}

#[tokio::test(start_paused = true)]
async fn a_domain_that_makes_no_topics_says_which_one_is_missing() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    let domain = world.domain(1, false, true).await;
    let refused = engine.put_subscription(subscription(11, domain, Some("x"))).await;
    let error = refused.unwrap_err();
    assert!(
        matches!(&error, Error::DomainTopicMissing { name, .. } if name == "x"),
        "{error}"
    );
    assert!(
        world.stored().await.subscriptions.is_empty(),
        "nothing has changed"
    );
    engine.put_domain_topic(domain, "x").await.unwrap();
    engine
        .put_subscription(subscription(11, domain, Some("X")))
        .await
        .unwrap();
    assert!(matches!(
        engine.put_domain_topic(TopicId(99), "x").await,
        Err(Error::Gone)
    ));
}

#[tokio::test(start_paused = true)]
async fn deleting_a_domain_topic_takes_its_subscriptions_and_nothing_else() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    let domain = world.domain(1, true, true).await;
    for (id, inside) in [(11, Some("a")), (12, Some("a")), (13, Some("b")), (14, None)] {
        engine
            .put_subscription(subscription(id, domain, inside))
            .await
            .unwrap();
    }
    assert_eq!(world.publish(domain, Some("A")).await.len(), 3);
    assert!(engine.delete_domain_topic(domain, "A").await.unwrap());
    assert!(!engine.delete_domain_topic(domain, "A").await.unwrap());
    let stored = world.stored().await;
    let ids: Vec<u64> = stored.subscriptions.iter().map(|s| s.id.0).collect();
    assert_eq!(
        (ids, names(&stored.domain_topics)),
        (vec![13, 14], vec![("b", true)])
    );
    assert_eq!(world.publish(domain, Some("a")).await, [SubscriptionId(14)]);
    assert_eq!(
        world.publish(domain, Some("b")).await,
        [13, 14].map(SubscriptionId)
    );
    engine.delete_topic(domain).await.unwrap();
    assert_eq!(world.stored().await, CatalogContent::default());
}

#[tokio::test(start_paused = true)]
async fn the_unseen_topic_of_a_resource_is_found_again_and_goes_with_its_last_subscription() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    let account = "/subscriptions/X/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/Acct";
    let kind = "Microsoft.Storage.StorageAccounts";
    let made = engine.scope(account, kind, "here").await.unwrap();
    let again = engine
        .scope(&account.to_uppercase(), kind, "there")
        .await
        .unwrap();
    assert_eq!(made.topic.id, again.topic.id);
    assert_eq!(&*made.full_id, account, "in the casing of its creation");
    assert!(engine.directory.topics().is_empty() && engine.directory.system_topics().is_empty());
    assert_eq!(engine.directory.storage_topics("acct").len(), 1);
    let id = made.topic.id;
    engine.put_subscription(subscription(11, id, None)).await.unwrap();
    engine.put_subscription(subscription(12, id, None)).await.unwrap();
    assert!(!engine.release_scope(id).await.unwrap(), "it is used");
    engine.delete_subscription(SubscriptionId(11)).await.unwrap();

    let world = world.restart().await;
    let engine = &world.engine;
    assert_eq!(engine.directory.scope_by_source(account).unwrap().topic.id, id);
    engine.delete_subscription(SubscriptionId(12)).await.unwrap();
    assert!(engine.directory.scope_by_source(account).is_none());
    assert_eq!(world.stored().await, CatalogContent::default());
    let late = engine.put_subscription(subscription(13, id, None)).await;
    assert!(matches!(late, Err(Error::Gone)));
    let fresh = engine.scope(account, kind, "here").await.unwrap();
    assert_ne!(fresh.topic.id, id);
    assert!(engine.release_scope(fresh.topic.id).await.unwrap());
    assert!(engine.directory.scope_by_source(account).is_none());
}

#[tokio::test(start_paused = true)]
async fn domain_topics_that_an_older_program_did_not_record_are_there_after_a_start() {
    let world = CatalogSetup::new().await;
    let domain = world.domain(1, false, true).await;
    let old = [
        CatalogChange::PutSubscription(subscription(11, domain, Some("a"))),
        CatalogChange::PutSubscription(subscription(12, domain, Some("A"))),
    ];
    world.catalog.commit(old.to_vec()).await.unwrap();
    let world = world.restart().await;
    assert_eq!(
        names(&world.engine.directory.domain_topics(domain)),
        [("a", true)]
    );
    assert_eq!(names(&world.stored().await.domain_topics), [("a", true)]);
    assert_eq!(world.publish(domain, Some("a")).await.len(), 2);
}

// Commits are held: changes of different resources must wait for them together, changes of the same
// resource in turn.
#[tokio::test(start_paused = true)]
async fn changes_to_different_things_do_not_wait_for_each_other() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    let first = engine.put_topic(topic(1, "a", TopicKind::Custom)).await.unwrap();
    world.catalog.hold();
    let topic_id = first.topic.id;
    let changes = async {
        let (a, b, c, d) = tokio::join!(
            engine.put_subscription(subscription(11, topic_id, None)),
            engine.put_subscription(subscription(12, topic_id, None)),
            engine.put_topic(topic(2, "b", TopicKind::Custom)),
            engine.put_topic(topic(3, "c", TopicKind::Custom)),
        );
        a.unwrap();
        b.unwrap();
        c.unwrap();
        d.unwrap();
    };
    let watch = async {
        world.catalog.wait_for(4).await;
        // Publishing is not held up, and sees only durable changes.
        assert!(world.publish(topic_id, None).await.is_empty());
        world.catalog.let_go();
    };
    tokio::join!(changes, watch);
    assert_eq!(world.publish(topic_id, None).await, [11, 12].map(SubscriptionId));
}

#[tokio::test(start_paused = true)]
async fn what_is_seen_last_is_what_was_stored_last() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    engine.put_topic(topic(1, "a", TopicKind::Custom)).await.unwrap();
    let labelled = |label: usize| Subscription {
        labels: vec![label.to_string()],
        ..subscription(11, TopicId(1), None)
    };
    world.catalog.hold();
    let mut puts: Vec<_> = (0..20)
        .map(|n| Box::pin(engine.put_subscription(labelled(n))))
        .collect();
    let all = async {
        for put in &mut puts {
            put.await.unwrap();
        }
    };
    let watch = async {
        world.catalog.wait_for(1).await;
        assert_eq!(
            world.catalog.waiting.load(SeqCst),
            1,
            "the others wait for their turn"
        );
        world.catalog.let_go();
    };
    tokio::join!(all, watch);
    let stored = world.stored().await.subscriptions.remove(0);
    let seen = engine.directory.subscription_by_id(SubscriptionId(11)).unwrap();
    assert_eq!(*seen, stored);
}

// The caller goes away while the change is being made durable: the change becomes visible all the
// same.
#[tokio::test(start_paused = true)]
async fn a_change_is_seen_through_without_whoever_asked_for_it() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    engine.put_topic(topic(1, "a", TopicKind::Custom)).await.unwrap();
    world.catalog.hold();
    {
        let mut putting = std::pin::pin!(engine.put_subscription(subscription(11, TopicId(1), None)));
        tokio::select! {
            biased;
            _ = &mut putting => panic!("it is held up"),
            () = world.catalog.wait_for(1) => {}
        }
    }
    world.catalog.let_go();
    // The earlier change's turn has ended when this one begins.
    engine
        .put_subscription(subscription(11, TopicId(1), None))
        .await
        .unwrap();
    engine
        .put_subscription(subscription(12, TopicId(1), None))
        .await
        .unwrap();
    assert_eq!(
        world.publish(TopicId(1), None).await,
        [11, 12].map(SubscriptionId)
    );
}

#[tokio::test(start_paused = true)]
async fn very_many_expire_at_once() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    let domain = world.domain(1, true, true).await;
    let over = world.clock.now() + Duration::from_secs(60);
    for id in 0..600 {
        let one = Subscription {
            expires: Some(over + Duration::from_secs(id % 2)),
            ..subscription(100 + id, domain, Some(&format!("t{}", id % 7)))
        };
        engine.put_subscription(one).await.unwrap();
    }
    engine
        .put_subscription(subscription(99, domain, None))
        .await
        .unwrap();
    world.clock.pass(Duration::from_secs(59)).await;
    assert_eq!(engine.directory.all_subscriptions().len(), 601);
    world.clock.pass(Duration::from_secs(5)).await;
    assert_eq!(engine.directory.all_subscriptions().len(), 1);
    let stored = world.stored().await;
    assert_eq!((stored.subscriptions.len(), stored.domain_topics.len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_new_subscription_gets_the_next_event() {
    let world = CatalogSetup::new().await;
    let engine = &world.engine;
    engine.put_topic(topic(1, "a", TopicKind::Custom)).await.unwrap();
    engine
        .put_subscription(subscription(11, TopicId(1), None))
        .await
        .unwrap();
    world.publish(TopicId(1), None).await;
    world.receiver.came.notified().await;
    assert_eq!(*world.receiver.got.lock().unwrap(), ["https://hook.example/11"]);
}

const ELEVEN: SubscriptionId = SubscriptionId(11);

impl CatalogSetup {
    /// A topic with a single subscription that `change` has adapted.
    async fn with_subscription(change: impl FnOnce(&mut Subscription)) -> CatalogSetup {
        let world = CatalogSetup::new().await;
        let engine = &world.engine;
        engine.put_topic(topic(1, "a", TopicKind::Custom)).await.unwrap();
        let mut one = subscription(11, TopicId(1), None);
        change(&mut one);
        engine.put_subscription(one).await.unwrap();
        world
    }

    fn attempts(&self) -> usize {
        self.receiver.got.lock().unwrap().len()
    }

    fn expired(&self) -> u64 {
        by_reason(
            &self.engine.dispatcher.counters.dropped,
            GiveUpReason::TimeToLiveExceeded,
        )
        .load(SeqCst)
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_in_a_pause_and_everything_after_it() {
    let world = CatalogSetup::with_subscription(|_| {}).await;
    let engine = &world.engine;
    let paused = engine.pause_subscription(ELEVEN).await.unwrap().unwrap();
    assert_eq!(paused.pauses.since(), Some(world.clock.now()));
    for _ in 0..100 {
        world.publish(TopicId(1), None).await;
    }
    world.clock.pass(Duration::from_secs(3 * 86_400)).await;
    // A repeated pause, and a pause of an unknown subscription.
    assert_eq!(engine.pause_subscription(ELEVEN).await.unwrap(), Some(paused));
    assert_eq!(engine.pause_subscription(SubscriptionId(12)).await.unwrap(), None);
    assert_eq!((world.attempts(), engine.log().backlog(ELEVEN).waiting), (0, 100));
    engine.resume_subscription(ELEVEN).await.unwrap();
    world.clock.pass(Duration::from_secs(1)).await;
    assert_eq!((world.attempts(), world.expired()), (100, 0));
    assert!(
        !engine
            .dispatcher
            .outlet(ELEVEN)
            .unwrap()
            .plan()
            .unwrap()
            .is_paused()
    );
}

// A time to live of one minute, and an answer after which the least wait is two minutes: the retry
// would be too late.
#[tokio::test(start_paused = true)]
async fn what_is_under_way_when_a_pause_begins_ends_as_it_would_but_for_its_age() {
    for paused in [false, true] {
        let world = CatalogSetup::with_subscription(|one| {
            one.profile = Some("hasty".into());
            one.retry.time_to_live_minutes = Some(1);
        })
        .await;
        let engine = &world.engine;
        let let_go = Arc::new(Notify::new());
        *world.receiver.answers.lock().unwrap() = Some((408, let_go.clone()));
        world.publish(TopicId(1), None).await;
        world.receiver.came.notified().await;
        if paused {
            engine.pause_subscription(ELEVEN).await.unwrap();
        }
        let_go.notify_one();
        world.clock.pass(Duration::from_secs(1)).await;
        let retrying = engine.log().backlog(ELEVEN).retrying;
        assert_eq!((retrying, world.expired()), if paused { (1, 0) } else { (0, 1) });
        if paused {
            world.clock.pass(Duration::from_secs(86_400)).await;
            assert_eq!((world.attempts(), world.expired()), (1, 0));
            *world.receiver.answers.lock().unwrap() = None;
            engine.resume_subscription(ELEVEN).await.unwrap();
            world.clock.pass(Duration::from_secs(1)).await;
            assert_eq!((world.attempts(), world.expired()), (2, 0));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_cannot_be_stored_does_not_begin() {
    let world = CatalogSetup::with_subscription(|_| {}).await;
    let engine = &world.engine;
    world.catalog.full.store(true, SeqCst);
    assert!(matches!(
        engine.pause_subscription(ELEVEN).await,
        Err(Error::Store(_))
    ));
    let seen = engine.directory.subscription_by_id(ELEVEN).unwrap();
    assert!(seen.pauses.is_empty());
    world.publish(TopicId(1), None).await;
    world.receiver.came.notified().await;
    world.catalog.full.store(false, SeqCst);
    engine.pause_subscription(ELEVEN).await.unwrap();
    world.catalog.full.store(true, SeqCst);
    assert!(engine.resume_subscription(ELEVEN).await.is_err());
    world.publish(TopicId(1), None).await;
    world.clock.pass(Duration::from_secs(60)).await;
    assert_eq!(world.attempts(), 1, "it goes on");
}

// The change was read before the pause, and is stored after it.
#[tokio::test(start_paused = true)]
async fn a_change_that_knows_nothing_of_a_pause_does_not_end_it() {
    let world = CatalogSetup::with_subscription(|_| {}).await;
    let engine = &world.engine;
    let changed = Subscription {
        labels: vec!["changed".into()],
        ..subscription(11, TopicId(1), None)
    };
    world.catalog.hold();
    let both = async {
        let (paused, put) = tokio::join!(
            engine.pause_subscription(ELEVEN),
            engine.put_subscription(changed.clone())
        );
        paused.unwrap();
        put.unwrap();
    };
    let watch = async {
        world.catalog.wait_for(1).await;
        world.catalog.let_go();
    };
    tokio::join!(both, watch);
    let world = world.restart().await;
    let seen = world.engine.directory.subscription_by_id(ELEVEN).unwrap();
    assert_eq!((seen.pauses.is_paused(), &seen.labels), (true, &changed.labels));
    assert_eq!(world.stored().await.subscriptions, [Subscription::clone(&seen)]);
    world.publish(TopicId(1), None).await;
    world.clock.pass(Duration::from_secs(60)).await;
    assert_eq!(world.attempts(), 0);
}

// A subscription is paused and resumed all day: the stored pauses stay few.
#[tokio::test(start_paused = true)]
async fn pauses_that_matter_to_nobody_are_forgotten() {
    let world = CatalogSetup::with_subscription(|one| one.retry.time_to_live_minutes = Some(10)).await;
    let engine = &world.engine;
    for _ in 0..200 {
        engine.pause_subscription(ELEVEN).await.unwrap();
        world.clock.pass(Duration::from_secs(60)).await;
        engine.resume_subscription(ELEVEN).await.unwrap();
        world.clock.pass(Duration::from_secs(120)).await;
    }
    let kept = world.stored().await.subscriptions.remove(0).pauses;
    // The pauses of the last ten unpaused minutes, and the one that has just ended.
    assert_eq!(kept.iter().count(), 5);
    world.clock.pass(Duration::from_secs(600)).await;
    engine.pause_subscription(ELEVEN).await.unwrap();
    let kept = world.stored().await.subscriptions.remove(0).pauses;
    assert_eq!(kept.iter().count(), 1);
}

/// Hosts that refuse connections at first and then say nothing for a while, and one that answers.
struct DeadHosts {
    clock: Arc<SimClock>,
    silent: std::sync::atomic::AtomicBool,
    under_way: Arc<AtomicUsize>,
    most: AtomicUsize,
    served: AtomicUsize,
}

struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[async_trait]
impl DeliveryTransport for DeadHosts {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        if request.url.host() == Some("well.example") {
            self.served.fetch_add(1, SeqCst);
            return DeliveryReply::Answered(DeliveryAnswer {
                status: 200,
                ..DeliveryAnswer::default()
            });
        }
        if self.silent.load(SeqCst) {
            let count = self.under_way.fetch_add(1, SeqCst) + 1;
            let _under_way = UnderWay(self.under_way.clone());
            self.most.fetch_max(count, SeqCst);
            self.clock
                .sleep_until(self.clock.now() + Duration::from_secs(5))
                .await;
        }
        DeliveryReply::Failed(TransportFailure {
            kind: TransportFailureKind::Socket,
            detail: "connection refused".into(),
        })
    }
}

// 10 000 retries that came due together took 2 GB.
#[tokio::test(start_paused = true)]
async fn very_many_retries_are_worked_off_in_portions_beside_an_endpoint_that_is_well() {
    const DEAD: u64 = 2_000;
    const BUDGET: usize = 24 << 20;
    let clock = Arc::new(SimClock::start());
    let hosts = Arc::new(DeadHosts {
        clock: clock.clone(),
        silent: false.into(),
        under_way: Arc::default(),
        most: AtomicUsize::new(0),
        served: AtomicUsize::new(0),
    });
    let mut parts = parts(Arc::default(), MemoryLog::new(7), hosts.clone(), clock.clone());
    parts.dispatch.in_flight_bytes_max = BUDGET;
    let engine = Engine::start(parts).await.unwrap();
    let topic = engine.put_topic(topic(1, "t", TopicKind::Custom)).await.unwrap();
    let topic = topic.topic.id;
    for id in 0..=DEAD {
        let url = match id {
            DEAD => "https://well.example/".to_owned(),
            id => format!("https://dead{id}.example/"),
        };
        let destination = Destination::WebHook(WebHook::new(url));
        let made = Subscription::new(SubscriptionId(10 + id), topic, format!("s{id}"), destination);
        engine.put_subscription(made).await.unwrap();
    }
    let attempts = || engine.dispatcher.counters.attempts.load(SeqCst);
    publish(&engine, clock.now(), topic, None).await;
    clock.sleep_until(clock.now() + Duration::from_secs(5)).await;
    assert_eq!(attempts(), DEAD + 1, "all but one wait to be retried");
    hosts.silent.store(true, SeqCst);
    clock.sleep_until(clock.now() + Duration::from_secs(8)).await;
    let most = BUDGET / 2 / ATTEMPT_OVERHEAD;
    let held = hosts.under_way.load(SeqCst);
    assert!(held > most / 2, "{held} retries are under way");
    publish(&engine, clock.now(), topic, None).await;
    clock.sleep_until(clock.now() + Duration::from_secs(1)).await;
    assert_eq!(hosts.served.load(SeqCst), 2, "served beside them within a second");
    clock.sleep_until(clock.now() + Duration::from_secs(60)).await;
    assert!(hosts.most.load(SeqCst) <= most, "{:?} at once", hosts.most);
    assert!(
        attempts() > 2 * (DEAD + 1),
        "all were retried: {} attempts",
        attempts()
    );
    engine.stop(async {}).await.unwrap();
}
