//! One simulated run: publishers, receivers, crashes, and then peace until everything has come to rest.

use crate::audit::{Audit, Expected};
use crate::chance::Chance;
use crate::clock::SimClock;
use crate::crash::CrashLog;
use crate::receivers::{Manner, Receivers};
use bytes::Bytes;
use postrider_core::envelope::Envelope;
use postrider_core::event::{Batch, EventRef, Lacks, Schema, Span};
use postrider_core::filter::Filter;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::Raw;
use postrider_core::profile::CLOUD_2021;
use postrider_core::subscription::{
    Batching, DeadLetterDestination, Destination, Origin, RetryChoice, Subscription, Topic, TopicKind,
    WebHook,
};
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::directory::Router;
use postrider_engine::{Engine, Parts, dispatch};
use postrider_store::memory::{MemoryCatalog, MemoryLog};
use postrider_store::{Catalog, Change};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Faults stop after this long.
const FAULTS: Duration = Duration::from_secs(2 * 3600);
/// By then everything must have come to rest: the longest wait of the schedule that can still be due,
/// and the longest delay of an endpoint, with room to spare.
const REST: Duration = Duration::from_secs(40 * 3600);

/// How one run ended.
#[derive(Debug)]
pub struct Report {
    pub wrong: Vec<String>,
    pub events: u64,
    pub crashes: u32,
    pub attempts: usize,
}

/// Runs one seed to its end, in a runtime of its own whose time is paused.
pub fn run(seed: u64) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(World::new(seed).run())
}

struct World {
    chance: Chance,
    clock: Arc<SimClock>,
    audit: Arc<Audit>,
    catalog: Arc<MemoryCatalog>,
    receivers: Arc<Receivers>,
    subscriptions: Vec<Subscription>,
    next_event: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut chance = Chance::new(seed);
        let clock = Arc::new(SimClock::start());
        let audit = Arc::new(Audit::default());
        let mut subscriptions = Vec::new();
        let mut manners = Vec::new();
        for number in 0..2 + chance.below(4) {
            // Two subscriptions may share one receiver.
            let receiver = if number > 1 && chance.percent(20) {
                0
            } else {
                manners.len()
            };
            if receiver == manners.len() {
                manners.push(if number == 0 {
                    Manner::Healthy
                } else {
                    any_manner(&mut chance)
                });
            }
            let subscription = any_subscription(&mut chance, number, receiver);
            audit.expect(expected(&subscription, manners[receiver]));
            subscriptions.push(subscription);
        }
        let now = clock.now();
        let receivers = Receivers {
            manners,
            clock: clock.clone(),
            audit: audit.clone(),
            chance: std::sync::Mutex::new(Chance::new(chance.any())),
            faults_until: now + FAULTS,
            started: now,
        };
        World {
            chance,
            clock,
            audit,
            catalog: Arc::new(MemoryCatalog::default()),
            receivers: Arc::new(receivers),
            subscriptions,
            next_event: 0,
        }
    }

    async fn run(mut self) -> Report {
        let mut changes = vec![Change::PutTopic(topic())];
        changes.extend(self.subscriptions.iter().cloned().map(Change::PutSubscription));
        self.catalog.commit(changes).await.expect("memory does not fail");
        let end_of_faults = self.clock.now() + FAULTS;
        let mut log = MemoryLog::new(7);
        let mut crashes = 0;
        while self.clock.now() < end_of_faults {
            let crash_at = if crashes < 6 {
                1 + self.chance.below(120)
            } else {
                u64::MAX
            };
            let checkpoint_every = 1 + self.chance.below(5);
            let crash_log = Arc::new(CrashLog::new(log, self.audit.clone(), crash_at, checkpoint_every));
            let engine = self.start(crash_log.clone()).await;
            self.publish_until(&engine, &crash_log, end_of_faults).await;
            if crash_log.crashed() {
                crashes += 1;
                self.audit.crashed(self.clock.now());
                engine.dispatcher.stop(Duration::ZERO).await;
            } else {
                engine.dispatcher.stop(Duration::ZERO).await;
                crash_log.inner.checkpoint();
                self.audit.restarted(self.clock.now());
            }
            log = crash_log.inner.crash();
        }
        let calm = Arc::new(CrashLog::new(log, self.audit.clone(), u64::MAX, 1));
        let engine = self.start(calm).await;
        self.rest().await;
        engine.dispatcher.stop(Duration::ZERO).await;
        Report {
            wrong: self.audit.verdict(),
            events: self.next_event,
            crashes,
            attempts: self.audit.attempts(),
        }
    }

    async fn start(&self, log: Arc<CrashLog>) -> Engine {
        let parts = Parts {
            log,
            catalog: self.catalog.clone(),
            transport: self.receivers.clone(),
            clock: self.clock.clone(),
            profile: &CLOUD_2021,
            id_prefix: "/subscriptions/s".into(),
            dispatch: dispatch::Config::default(),
        };
        Engine::start(parts).await.expect("memory does not fail")
    }

    async fn publish_until(&mut self, engine: &Engine, log: &CrashLog, end: Timestamp) {
        loop {
            // Bursts, then silence: retries come due while nothing else happens.
            let pause = match self.chance.below(10) {
                0 => Duration::from_secs(self.chance.below(1800)),
                1..=3 => Duration::from_secs(self.chance.below(60)),
                _ => Duration::from_millis(self.chance.below(200)),
            };
            let until = self.clock.now() + pause;
            tokio::select! {
                biased;
                () = log.down.notified() => return,
                () = self.clock.sleep_until(until) => {}
            }
            if self.clock.now() >= end {
                return;
            }
            self.publish(engine).await;
            if log.crashed() {
                return;
            }
        }
    }

    async fn publish(&mut self, engine: &Engine) {
        let topic = engine.directory.topic("orders").expect("declared");
        let now = self.clock.now();
        let count = 1 + self.chance.below(4);
        let ids: Vec<u64> = (0..count).map(|i| self.next_event + i).collect();
        self.next_event += count;
        let (body, spans) = body(&ids, &mut self.chance);
        let text = std::str::from_utf8(&body).expect("our own text").to_owned();
        let mut router = Router::new(&topic, now);
        let mut events = Vec::new();
        for (span, id) in spans.iter().zip(&ids) {
            let object = Raw::parse(&text[span.range()]).expect("our own JSON");
            let envelope = Envelope::read(Schema::EventGrid, object, None);
            let matched = router.route(&envelope, None);
            // The auditor works out for itself who should get it.
            let subject = envelope.subject.and_then(Raw::as_str).expect("our own subject");
            let wanted = self
                .subscriptions
                .iter()
                .filter(|s| wants(s, &subject))
                .map(|s| s.name.clone());
            self.audit.publishing(*id, now, wanted.collect::<BTreeSet<_>>());
            events.push(EventRef {
                object: *span,
                matched,
                lacks: Lacks {
                    topic: true,
                    data_version: false,
                    metadata_version: true,
                },
                ..EventRef::default()
            });
        }
        let unmatched = router.unmatched;
        let batch = Batch {
            topic: topic.topic.id,
            schema: Schema::EventGrid,
            received: now,
            publisher: "sim".into(),
            trace: None,
            body,
            events,
            matched: router.into_sets(),
        };
        if engine.accept(&topic, batch, unmatched).await.is_ok() {
            for id in ids {
                self.audit.acknowledged(id);
            }
        }
    }

    /// Lets time pass until nothing is left to do, or far too much of it has passed.
    async fn rest(&self) {
        let deadline = self.clock.now() + REST;
        while self.audit.unfinished() > 0 && self.clock.now() < deadline {
            self.clock
                .sleep_until(self.clock.now() + Duration::from_secs(60))
                .await;
        }
    }
}

fn any_manner(chance: &mut Chance) -> Manner {
    match chance.below(8) {
        0 => Manner::Healthy,
        1 => Manner::Slow(1 + chance.below(45)),
        2 => Manner::Flaky(10 + chance.below(80)),
        3 => Manner::DownFor(60 + chance.below(7000)),
        4 => Manner::HangsFor(60 + chance.below(7000)),
        5 => Manner::Answers([400, 401, 403, 404, 413, 500, 503][chance.below(7) as usize]),
        6 => Manner::TakesAndResets(10 + chance.below(50)),
        _ => Manner::Flaky(95),
    }
}

fn any_subscription(chance: &mut Chance, number: u64, receiver: usize) -> Subscription {
    let batched = chance.percent(40);
    let retry = if chance.percent(50) {
        RetryChoice {
            attempts_max: Some(1 + chance.below(8) as u32),
            time_to_live_minutes: Some(1 + chance.below(300) as u32),
        }
    } else {
        RetryChoice::default()
    };
    Subscription {
        id: SubscriptionId(number + 1),
        name: format!("s{number}"),
        topic: TopicId(1),
        domain_topic: None,
        destination: Destination::WebHook(WebHook {
            url: Secret::new(format!("http://receiver.example/{receiver}")),
            batching: Batching {
                events_max: batched.then(|| 1 + chance.below(5) as u32),
                preferred_kilobytes: None,
            },
            attributes: Vec::new(),
            aad_tenant: None,
            aad_application: None,
        }),
        identity: None,
        filter: Filter {
            subject_begins_with: chance.percent(40).then(|| "/even".to_owned()),
            ..Filter::default()
        },
        labels: Vec::new(),
        expires: None,
        delivery_schema: Schema::EventGrid,
        retry,
        dead_letter: chance.percent(50).then(|| DeadLetterDestination {
            account: "local".into(),
            container: "dead".into(),
        }),
        dead_letter_identity: None,
        profile: None,
        created: Timestamp::MIN,
        origin: Origin::Config,
        extras: None,
    }
}

fn expected(subscription: &Subscription, manner: Manner) -> Expected {
    let minutes = subscription.retry.time_to_live_minutes.unwrap_or(1440);
    Expected {
        id: subscription.id,
        name: subscription.name.clone(),
        attempts_max: subscription.retry.attempts_max.unwrap_or(30),
        time_to_live: Duration::from_secs(u64::from(minutes) * 60),
        batch_max: subscription.destination.batching().events_max.unwrap_or(1) as usize,
        always_healthy: manner == Manner::Healthy,
    }
}

fn wants(subscription: &Subscription, subject: &str) -> bool {
    let prefix = subscription.filter.subject_begins_with.as_deref().unwrap_or("");
    subject.to_lowercase().starts_with(prefix)
}

fn topic() -> Topic {
    Topic {
        id: TopicId(1),
        name: "orders".into(),
        kind: TopicKind::Custom,
        resource_group: "rg1".into(),
        location: "here".into(),
        tags: Default::default(),
        input_schema: Schema::EventGrid,
        mapping: None,
        keys: [Secret::new("a"), Secret::new("b")],
        local_auth_disabled: false,
        public_network: true,
        inbound_ip_rules: Vec::new(),
        profile: None,
        created: Timestamp::MIN,
        extras: None,
    }
}

/// A publish request's text and where its events are.
fn body(ids: &[u64], chance: &mut Chance) -> (Bytes, Vec<Span>) {
    let mut text = String::from("[");
    let mut spans = Vec::new();
    for (i, id) in ids.iter().enumerate() {
        if i > 0 {
            text.push(',');
        }
        let start = text.len();
        let side = if chance.percent(50) { "even" } else { "odd" };
        text.push_str(&format!(
            r#"{{"id":"{id}","subject":"/{side}/{id}","eventType":"t","eventTime":"2026-01-01T00:00:00Z","dataVersion":"1","data":{{}}}}"#
        ));
        spans.push(Span::new(start, text.len()));
    }
    text.push(']');
    (Bytes::from(text), spans)
}
