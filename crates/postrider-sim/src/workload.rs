//! The setting of every simulated run: a topic, some subscriptions, and a publisher.

use crate::audit::Auditor;
use crate::blobs::ACCOUNT;
use crate::receivers::{HOST, LISTENER, number};
use crate::seeded_chance::SeededChance;
use bytes::Bytes;
use postrider_core::envelope::EventEnvelope;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers, PublishedBatch};
use postrider_core::filter::EventFilter;
use postrider_core::filter::FilterBudget;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::profile::{DeadLetterTiming, Profile, Profiles};
use postrider_core::subscription::{
    BatchSettings, DeadLetterDestination, Destination, Subscription, SubscriptionRetrySettings, Topic,
    TopicKind, WebHook,
};
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::Engine;
use postrider_store::{Catalog, CatalogChange};
use std::sync::Arc;
use std::time::Duration;

const PROFILES: [&str; 6] = [
    "cloud-2018",
    "cloud-2019",
    "cloud-2020",
    "cloud-2021",
    "cloud-current",
    "edge",
];

/// The storage account's system topic, for announcements of blobs.
pub const ACCOUNT_TOPIC: TopicId = TopicId(2);
/// The subscription to announcements of blobs.
pub const BLOB_LISTENER: SubscriptionId = SubscriptionId(1000);

pub struct SimulatedWorkload {
    pub audit: Arc<Auditor>,
    pub clock: Arc<dyn Clock>,
    pub topic: Topic,
    /// The existing subscriptions, as far as the publisher knows.
    pub subscriptions: Vec<Subscription>,
    pub server_profile: &'static str,
    profiles: Profiles,
    /// Whether there is a subscription to the storage account.
    pub announced: bool,
    next_event: u64,
}

impl SimulatedWorkload {
    pub fn any(chance: &mut SeededChance, clock: Arc<dyn Clock>, audit: Arc<Auditor>) -> SimulatedWorkload {
        let profile = |chance: &mut SeededChance| PROFILES[chance.below(6) as usize];
        let server_profile = profile(chance);
        let topic_profile = chance.percent(20).then(|| profile(chance).to_owned());
        let mut profiles = Profiles::default();
        assert!(profiles.set_default(server_profile));
        if chance.percent(50) {
            change_letter_timing(&mut profiles, chance, &audit);
        }
        if chance.percent(30) {
            audit.halves_after_400();
            change(&mut profiles, |profile| profile.split_batches_on = &[400, 413]);
        }
        let announced = chance.percent(40);
        if announced {
            audit.subscribes_to_blobs();
        }
        SimulatedWorkload {
            audit,
            clock,
            topic: topic(topic_profile),
            subscriptions: Vec::new(),
            server_profile,
            profiles,
            announced,
            next_event: 0,
        }
    }

    /// Adds a subscription that points to this receiver.
    pub fn subscribe(&mut self, chance: &mut SeededChance, receiver: usize, expires: Option<Timestamp>) {
        let mut subscription = any_subscription(chance, self.subscriptions.len() as u64, receiver);
        subscription.expires = expires;
        if chance.percent(30) {
            subscription.profile = Some(PROFILES[chance.below(6) as usize].to_owned());
        }
        let fallback = self.topic.profile.as_deref().unwrap_or(self.server_profile);
        self.audit.subscribe(&subscription, fallback, receiver);
        self.subscriptions.push(subscription);
    }

    /// The documents' profiles with the server's default, and the operator's changes.
    pub fn profiles(&self) -> Profiles {
        self.profiles.clone()
    }

    pub async fn declare(&self, catalog: &dyn Catalog) {
        let mut changes = vec![CatalogChange::PutTopic(self.topic.clone())];
        changes.extend(
            self.subscriptions
                .iter()
                .cloned()
                .map(CatalogChange::PutSubscription),
        );
        if self.announced {
            changes.push(CatalogChange::PutTopic(account_topic()));
            changes.push(CatalogChange::PutSubscription(blob_listener()));
        }
        catalog.commit(changes).await.expect("memory does not fail");
    }

    /// A description of the subscriptions, for people.
    pub fn about(&self) -> String {
        let line = |s: &Subscription| {
            let profile = s.profile.as_deref().or(self.topic.profile.as_deref());
            format!(
                "{} to {} by {}, {:?}, dead letters {}, batches {:?}, until {:?}\n",
                s.name,
                receiver_of(s),
                profile.unwrap_or(self.server_profile),
                s.retry,
                s.dead_letter.is_some(),
                s.destination.batching().events_max,
                s.expires.map(|at| at.to_string())
            )
        };
        let who: String = self.subscriptions.iter().map(line).collect();
        let timing = self.profiles.fallback().dead_letter;
        format!("{who}{timing:?}, blobs announced {}\n", self.announced)
    }

    pub fn events(&self) -> u64 {
        self.next_event
    }

    /// Publishes a few events. Returns those that were accepted; none if the server could not.
    pub async fn publish(&mut self, engine: &Engine, chance: &mut SeededChance) -> Vec<u64> {
        let topic = engine.directory.topic("orders").expect("declared");
        let now = self.clock.now();
        let count = 1 + chance.below(4);
        let ids: Vec<u64> = (0..count).map(|i| self.next_event + i).collect();
        self.next_event += count;
        let (body, spans) = body(&ids, chance);
        let text = std::str::from_utf8(&body).expect("our own text").to_owned();
        let mut router = engine.router(&topic, now, FilterBudget::UNLIMITED);
        let mut events = Vec::new();
        for (span, id) in spans.iter().zip(&ids) {
            let object = RawJson::parse(&text[span.range()]).expect("our own JSON");
            let envelope = EventEnvelope::read(EventSchema::EventGrid, object, None);
            let matched = router.route(&envelope, None);
            // The expected subscriptions are computed independently of the engine.
            let subject = envelope
                .subject
                .and_then(RawJson::as_str)
                .expect("our own subject");
            let wanted = self.subscriptions.iter().filter(|s| wants(s, &subject, now));
            self.audit.publishing(*id, now, wanted.map(|s| s.id));
            events.push(EventRef {
                object: *span,
                matched,
                lacks: MissingMembers {
                    topic: true,
                    data_version: false,
                    metadata_version: true,
                },
                ..EventRef::default()
            });
        }
        let (matched, routed) = router.finish().expect("the budget has no limit");
        let batch = PublishedBatch {
            topic: topic.topic.id,
            schema: EventSchema::EventGrid,
            received: now,
            publisher: "sim".into(),
            trace: None,
            replay: 0,
            hops: 0,
            body,
            events,
            matched,
        };
        match engine.accept(&topic, batch, routed).await {
            Ok(()) => ids,
            Err(_) => Vec::new(),
        }
    }
}

/// The same subscription with another receiver.
pub fn pointing_to(subscription: &Subscription, receiver: usize) -> Subscription {
    let mut moved = subscription.clone();
    match &mut moved.destination {
        Destination::WebHook(hook) => hook.url = Secret::new(format!("{HOST}{receiver}")),
        Destination::EventGrid { url, .. } => *url = format!("{HOST}{receiver}"),
        other => unreachable!("{other:?}"),
    }
    moved
}

/// The number of the receiver that a subscription points to.
pub fn receiver_of(subscription: &Subscription) -> usize {
    match &subscription.destination {
        Destination::WebHook(hook) => number(hook.url.expose()),
        Destination::EventGrid { url, .. } => number(url),
        other => unreachable!("{other:?}"),
    }
}

fn any_subscription(chance: &mut SeededChance, number: u64, receiver: usize) -> Subscription {
    let batched = chance.percent(40);
    let retry = if chance.percent(50) {
        SubscriptionRetrySettings {
            attempts_max: Some(1 + chance.below(8) as u32),
            time_to_live_minutes: Some(1 + chance.below(300) as u32),
        }
    } else {
        SubscriptionRetrySettings::default()
    };
    let batching = BatchSettings {
        events_max: batched.then(|| 1 + chance.below(5) as u32),
        preferred_kilobytes: None,
    };
    let url = format!("{HOST}{receiver}");
    let destination = if chance.percent(15) {
        Destination::EventGrid {
            url,
            sas_key: Secret::new("k"),
            topic_name: None,
            batching,
        }
    } else {
        Destination::WebHook(WebHook {
            batching,
            ..WebHook::new(url)
        })
    };
    Subscription {
        filter: EventFilter {
            subject_begins_with: chance.percent(40).then(|| "/even".to_owned()),
            ..EventFilter::default()
        },
        retry,
        dead_letter: chance.percent(50).then(|| DeadLetterDestination {
            account: ACCOUNT.into(),
            container: ["dead", "letters"][number as usize % 2].into(),
        }),
        ..Subscription::new(
            SubscriptionId(number + 1),
            TopicId(1),
            format!("s{number}"),
            destination,
        )
    }
}

/// The operator sets another delay and patience for dead letters.
fn change_letter_timing(profiles: &mut Profiles, chance: &mut SeededChance, audit: &Auditor) {
    let delay = Duration::from_secs([0, 60, 300, 1200][chance.below(4) as usize]);
    let give_up_after = Duration::from_secs([1800, 3600, 4 * 3600][chance.below(3) as usize]);
    audit.letter_timing(delay, give_up_after);
    change(profiles, |profile| {
        profile.dead_letter = DeadLetterTiming { delay, give_up_after };
    });
}

/// The operator changes something in every profile.
fn change(profiles: &mut Profiles, change: impl Fn(&mut Profile)) {
    let all: Vec<Profile> = profiles.iter().copied().collect();
    for mut profile in all {
        change(&mut profile);
        profiles.put(profile);
    }
}

fn account_topic() -> Topic {
    Topic {
        id: ACCOUNT_TOPIC,
        name: "account".into(),
        kind: TopicKind::System {
            source: format!(
                "/subscriptions/s/resourceGroups/rg1/providers/Microsoft.Storage/storageAccounts/{ACCOUNT}"
            ),
            topic_type: "Microsoft.Storage.StorageAccounts".into(),
        },
        ..topic(None)
    }
}

fn blob_listener() -> Subscription {
    Subscription {
        id: BLOB_LISTENER,
        name: "blobs".into(),
        topic: ACCOUNT_TOPIC,
        destination: Destination::WebHook(WebHook::new(format!("{HOST}{LISTENER}"))),
        filter: EventFilter::default(),
        retry: SubscriptionRetrySettings::default(),
        dead_letter: None,
        ..any_subscription(&mut SeededChance::new(0), 0, 0)
    }
}

fn wants(subscription: &Subscription, subject: &str, now: Timestamp) -> bool {
    let prefix = subscription.filter.subject_begins_with.as_deref().unwrap_or("");
    let over = subscription.expires.is_some_and(|at| at <= now);
    !over && subject.to_lowercase().starts_with(prefix)
}

fn topic(profile: Option<String>) -> Topic {
    Topic {
        resource_group: "rg1".into(),
        location: "here".into(),
        profile,
        ..Topic::custom(TopicId(1), "orders", [Secret::new("a"), Secret::new("b")])
    }
}

/// The text of a publish request, and the positions of its events.
fn body(ids: &[u64], chance: &mut SeededChance) -> (Bytes, Vec<ByteSpan>) {
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
        spans.push(ByteSpan::new(start, text.len()));
    }
    text.push(']');
    (Bytes::from(text), spans)
}

/// Bursts, then silence: retries come due while nothing else happens.
pub fn any_pause(chance: &mut SeededChance) -> Duration {
    match chance.below(10) {
        0 => Duration::from_secs(chance.below(1800)),
        1..=3 => Duration::from_secs(chance.below(60)),
        _ => Duration::from_millis(chance.below(200)),
    }
}
