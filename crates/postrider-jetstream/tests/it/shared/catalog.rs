//! The catalog on several nodes.

use super::proxy::InterruptibleProxy;
use crate::nats::NatsProcess;
use crate::support::named;
use async_trait::async_trait;
use postrider_core::ids::TopicId;
use postrider_core::subscription::DomainTopic;
use postrider_jetstream::catalog::JetStreamCatalog;
use postrider_jetstream::connection::NatsConnection;
use postrider_store::conformance::{self, CatalogUnderTest, at, topic};
use postrider_store::{Catalog, CatalogChange, CatalogContent, CatalogFollower, Error};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::task::JoinSet;

/// Source of unique node numbers across all tests.
static NODES: AtomicU64 = AtomicU64::new(1);

fn me() -> u64 {
    NODES.fetch_add(1, Relaxed)
}

struct JetStreamCatalogUnderTest {
    nats: NatsProcess,
    opened: Mutex<Option<NatsConnection>>,
}

#[async_trait]
impl CatalogUnderTest for JetStreamCatalogUnderTest {
    async fn open(&self) -> Arc<dyn Catalog> {
        let connection = named(self.nats.connect().await, &format!("c{}", me()));
        *self.opened.lock().unwrap() = Some(connection.clone());
        Arc::new(JetStreamCatalog::open(&connection, me()).await.unwrap())
    }

    async fn reopen(&self, catalog: Arc<dyn Catalog>) -> Arc<dyn Catalog> {
        drop(catalog);
        let connection = self.opened.lock().unwrap().clone().unwrap();
        Arc::new(JetStreamCatalog::open(&connection, me()).await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_the_catalogues_promise() {
    let Some(nats) = NatsProcess::start() else { return };
    let subject = JetStreamCatalogUnderTest {
        nats,
        opened: Mutex::default(),
    };
    conformance::catalog(&subject).await;
}

pub fn put(name: &str, created: i64) -> CatalogChange {
    CatalogChange::PutDomainTopic(DomainTopic {
        domain: TopicId(1),
        name: name.into(),
        automatic: true,
        created: at(created),
    })
}

/// The number that was passed to `put`.
fn seconds(topic: &DomainTopic) -> i64 {
    (topic.created.nanos() - at(0).nanos()) / 1_000_000_000
}

pub fn created(loaded: &CatalogContent) -> BTreeMap<String, i64> {
    let topics = loaded.domain_topics.iter();
    topics.map(|topic| (topic.name.clone(), seconds(topic))).collect()
}

/// Follower that records the changes it is told.
#[derive(Default)]
struct RecordingFollower {
    state: Mutex<(u64, BTreeMap<String, i64>)>,
    changes: AtomicU64,
}

#[async_trait]
impl CatalogFollower for RecordingFollower {
    async fn changed(&self, changes: Vec<CatalogChange>, sequence: u64) {
        let mut state = self.state.lock().unwrap();
        let in_order = sequence >= state.0;
        state.0 = if in_order { sequence } else { u64::MAX };
        for change in changes {
            self.changes.fetch_add(1, Relaxed);
            match change {
                CatalogChange::PutDomainTopic(topic) => {
                    let created = seconds(&topic);
                    state.1.insert(topic.name, created);
                }
                CatalogChange::DeleteDomainTopic(_, name) => {
                    state.1.remove(&name);
                }
                _ => {}
            }
        }
    }
}

/// A node of a test: a catalog with a follower.
pub struct FollowedCatalog {
    pub catalog: Arc<JetStreamCatalog>,
    told: Arc<RecordingFollower>,
    _following: JoinSet<()>,
}

impl FollowedCatalog {
    async fn open(connection: &NatsConnection, snapshot_bytes: u64) -> FollowedCatalog {
        let opened = FollowedCatalog::try_open(connection, snapshot_bytes).await;
        opened.expect("it opens")
    }

    pub async fn try_open(connection: &NatsConnection, snapshot_bytes: u64) -> Option<FollowedCatalog> {
        let catalog = JetStreamCatalog::open_with(connection, me(), snapshot_bytes)
            .await
            .ok()?;
        let catalog = Arc::new(catalog);
        catalog.load().await.unwrap();
        let told = Arc::new(RecordingFollower::default());
        let mut following = JoinSet::new();
        let (follow, follower) = (catalog.clone(), told.clone());
        following.spawn(async move { follow.follow(follower).await });
        Some(FollowedCatalog {
            catalog,
            told,
            _following: following,
        })
    }

    /// The recorded state; fails if changes came out of order.
    fn told(&self) -> BTreeMap<String, i64> {
        let state = self.told.state.lock().unwrap();
        assert_ne!(state.0, u64::MAX, "it came in order");
        state.1.clone()
    }

    /// Commits until the commit is not refused; returns the number of refusals.
    async fn insist(&self, change: CatalogChange) -> usize {
        for refused in 0.. {
            match self.catalog.commit(vec![change.clone()]).await {
                Ok(()) => return refused,
                Err(Error::Conflict(_)) => tokio::task::yield_now().await,
                Err(other) => panic!("{other}"),
            }
        }
        unreachable!()
    }
}

pub const LARGE: u64 = 1 << 30;

// A node that is asked directly after another node's change must know of the change.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_caught_up_knows_what_was_stored_before() {
    let Some(nats) = NatsProcess::start() else { return };
    let one = FollowedCatalog::open(&nats.connect().await, LARGE).await;
    let other = Arc::new(FollowedCatalog::open(&nats.connect().await, LARGE).await);
    for commit in 0..100 {
        let name = format!("n{commit}");
        one.catalog.commit(vec![put(&name, commit)]).await.unwrap();
        // Concurrent catch-ups share a look, but never one that began before they were requested.
        let mut asking = JoinSet::new();
        for _ in 0..4 {
            let (other, name) = (other.clone(), name.clone());
            asking.spawn(async move {
                other.catalog.catch_up().await.unwrap();
                assert!(other.told().contains_key(&name), "{name}");
            });
        }
        asking.join_all().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_change_different_things_do_not_disturb_each_other() {
    let Some(nats) = NatsProcess::start() else { return };
    let mut nodes = Vec::new();
    for _ in 0..3 {
        let connection = nats.connect().await;
        nodes.push(Arc::new(FollowedCatalog::open(&connection, LARGE).await));
    }
    let mut writing = JoinSet::new();
    for (n, node) in nodes.iter().enumerate() {
        for commit in 0..100 {
            let node = node.clone();
            writing.spawn(async move {
                let change = put(&format!("n{n}-{commit}"), commit);
                node.catalog.commit(vec![change]).await.unwrap();
            });
        }
    }
    writing.join_all().await;
    let last = nodes.iter().map(|node| node.catalog.sequence()).max().unwrap();
    for (n, node) in nodes.iter().enumerate() {
        node.catalog.applied(last).await.unwrap();
        let loaded = created(&node.catalog.load().await.unwrap());
        assert_eq!(loaded.len(), 300);
        let told = node.told();
        let own = format!("n{n}-");
        assert_eq!(told.len(), 200, "nobody is told of what is its own");
        assert!(
            told.iter()
                .all(|(name, at)| !name.starts_with(&own) && loaded[name] == *at)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_who_change_the_same_one_is_refused_and_nothing_is_lost() {
    const ROUNDS: i64 = 60;
    let Some(nats) = NatsProcess::start() else { return };
    let one = Arc::new(FollowedCatalog::open(&nats.connect().await, LARGE).await);
    let two = Arc::new(FollowedCatalog::open(&nats.connect().await, LARGE).await);
    let mut writing = JoinSet::new();
    for (node, own) in [(&one, 0), (&two, 1)] {
        let node = node.clone();
        writing.spawn(async move {
            let mut refused = 0;
            for n in 0..ROUNDS {
                refused += node.insist(put("same", n * 2 + own)).await;
                refused += node.insist(put(&format!("own{own}"), n)).await;
            }
            refused
        });
    }
    let refused: usize = writing.join_all().await.into_iter().sum();
    assert!(refused > 0, "they got in each other's way at least once");
    let last = one.catalog.sequence().max(two.catalog.sequence());
    for node in [&one, &two] {
        node.catalog.applied(last).await.unwrap();
    }
    let (first, second) = (
        one.catalog.load().await.unwrap(),
        two.catalog.load().await.unwrap(),
    );
    assert_eq!(first, second);
    let stored = created(&first);
    assert_eq!((stored["own0"], stored["own1"]), (ROUNDS - 1, ROUNDS - 1));
    for node in [&one, &two] {
        assert_eq!(
            node.told.changes.load(Relaxed),
            ROUNDS as u64 * 2,
            "each is told of everything that the other has done"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_given_once() {
    let Some(nats) = NatsProcess::start() else { return };
    let one = FollowedCatalog::open(&nats.connect().await, LARGE).await;
    let two = FollowedCatalog::open(&nats.connect().await, LARGE).await;
    one.catalog
        .commit(vec![CatalogChange::PutTopic(topic(1, "Orders"))])
        .await
        .unwrap();
    // The change is applied there, but a client may have looked up the name before that.
    two.catalog.applied(one.catalog.sequence()).await.unwrap();
    let change = || vec![CatalogChange::PutTopic(topic(2, "orders"))];
    let refused = two.catalog.commit(change()).await.unwrap_err();
    assert!(matches!(refused, Error::Conflict(_)), "{refused}");
    assert_eq!(
        refused.to_string(),
        "the topic was changed by another node at the same time; try again"
    );
    one.catalog
        .commit(vec![CatalogChange::DeleteTopic(TopicId(1))])
        .await
        .unwrap();
    two.catalog.applied(one.catalog.sequence()).await.unwrap();
    two.catalog.commit(change()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_is_purged_once_a_snapshot_holds_what_was_in_it() {
    let Some(nats) = NatsProcess::start() else { return };
    let connection = nats.connect().await;
    let one = FollowedCatalog::open(&connection, 20_000).await;
    let two = FollowedCatalog::open(&nats.connect().await, 20_000).await;
    let long = "x".repeat(500);
    let mut ids = Vec::new();
    for n in 0..200 {
        let node = if n % 3 == 0 { &one } else { &two };
        node.insist(put(&format!("{long}{}", n % 40), n)).await;
        if n % 50 == 0 {
            ids.push(node.catalog.next_id().await.unwrap());
        }
    }
    let mut stream = connection.js.get_stream("postrider-catalog").await.unwrap();
    let state = stream.info().await.unwrap().state.clone();
    assert!(state.first_sequence > 50, "purged: {state:?}");
    assert!(state.messages < 150, "{state:?}");
    let three = FollowedCatalog::open(&nats.connect().await, 20_000).await;
    let expected = one.catalog.load().await.unwrap();
    assert_eq!(created(&expected).len(), 40);
    assert_eq!(three.catalog.load().await.unwrap(), expected);
    let fresh = three.catalog.next_id().await.unwrap();
    assert!(ids.iter().all(|id| *id < fresh), "{ids:?} {fresh}");
}

// A commit of several megabytes does not fit into a message.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_may_be_longer_than_a_message() {
    let Some(nats) = NatsProcess::start() else { return };
    let one = FollowedCatalog::open(&nats.connect().await, 20_000).await;
    let two = FollowedCatalog::open(&nats.connect().await, 20_000).await;
    let long = "y".repeat(10_000);
    let changes: Vec<CatalogChange> = (0..300).map(|n| put(&format!("{long}{n}"), n)).collect();
    let (large, small) = tokio::join!(
        one.catalog.commit(changes),
        two.catalog.commit(vec![put("small", 1)])
    );
    large.unwrap();
    small.unwrap();
    two.catalog.applied(one.catalog.sequence()).await.unwrap();
    assert_eq!(two.told.changes.load(Relaxed), 300);
    let expected = one.catalog.load().await.unwrap();
    assert_eq!(expected.domain_topics.len(), 301);
    let three = FollowedCatalog::open(&nats.connect().await, 20_000).await;
    assert_eq!(three.catalog.load().await.unwrap(), expected);
}

// The server is killed while two nodes write; each counts its acknowledged commits.
#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_commit_is_there_once_after_a_kill() {
    const COMMITS: i64 = 400;
    let Some(mut nats) = NatsProcess::start() else {
        return;
    };
    let mut writing = JoinSet::new();
    let mut nodes = Vec::new();
    let done = Arc::new(AtomicU64::new(0));
    for _ in 0..2 {
        let node = FollowedCatalog::open(&nats.connect().await, 30_000).await;
        nodes.push(Arc::new(node));
    }
    for (n, node) in nodes.iter().enumerate() {
        let (node, done) = (node.clone(), done.clone());
        writing.spawn(async move {
            let mut stored = Vec::new();
            for commit in 0..COMMITS {
                let name = format!("n{n}-{commit}");
                // Commits are sequential, each with a new name, so that the names show which were
                // stored.
                match node.catalog.commit(vec![put(&name, commit)]).await {
                    Ok(()) => stored.push(name),
                    Err(Error::Unavailable(_)) => {}
                    Err(other) => panic!("{other}"),
                }
                done.fetch_add(1, Relaxed);
            }
            stored
        });
    }
    for kill in 1..=2 {
        let reached = || done.load(Relaxed) >= kill * 200;
        conformance::eventually("some are stored", reached).await;
        nats.kill();
        nats.run();
    }
    let mut stored: Vec<String> = writing.join_all().await.into_iter().flatten().collect();
    stored.sort();
    assert_eq!(stored.len(), COMMITS as usize * 2, "none was given up");
    let fresh = FollowedCatalog::open(&nats.connect().await, LARGE).await;
    let mut found: Vec<String> = created(&fresh.catalog.load().await.unwrap())
        .into_keys()
        .collect();
    found.sort();
    assert_eq!(found, stored);
    let last = fresh.catalog.sequence();
    for node in &nodes {
        node.catalog.applied(last).await.unwrap();
        assert_eq!(
            node.told.changes.load(Relaxed),
            COMMITS as u64,
            "each was told once"
        );
    }
}

// A message was removed that no snapshot contains.
#[tokio::test(flavor = "multi_thread")]
async fn a_hole_in_the_log_is_said() {
    let Some(nats) = NatsProcess::start() else { return };
    let connection = nats.connect().await;
    let one = FollowedCatalog::open(&connection, LARGE).await;
    for n in 0..5 {
        one.insist(put(&format!("n{n}"), n)).await;
    }
    let last = one.catalog.sequence();
    let stream = connection.js.get_stream("postrider-catalog").await.unwrap();
    stream.delete_message(last - 2).await.unwrap();
    let Err(refused) = JetStreamCatalog::open(&connection, me()).await else {
        panic!("it opens");
    };
    assert!(
        matches!(&refused, Error::Corrupt(why) if why.contains(&format!("message {} of stream", last - 2))),
        "{refused}"
    );
    // A node that received the message before continues.
    one.insist(put("more", 9)).await;
    assert!(one.catalog.trouble().is_none());
}

// A node that is disconnected until the log is purged learns from the snapshot what has changed.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_away_is_told_what_has_become_of_the_catalogue() {
    let Some(nats) = NatsProcess::start() else { return };
    let direct = nats.connect().await;
    let one = FollowedCatalog::open(&direct, 5_000).await;
    let line = InterruptibleProxy::to(&nats).await;
    let two = FollowedCatalog::open(&line.connect().await, 5_000).await;
    for n in 0..10 {
        one.insist(put(&format!("early{n}"), n)).await;
    }
    two.catalog.applied(one.catalog.sequence()).await.unwrap();
    let seen = two.catalog.sequence();
    line.cut();
    for n in 0..300 {
        one.insist(put(&format!("late{}", n % 20), n)).await;
        let gone = CatalogChange::DeleteDomainTopic(TopicId(1), format!("early{}", n % 10));
        one.insist(gone).await;
    }
    let mut stream = direct.js.get_stream("postrider-catalog").await.unwrap();
    let first = stream.info().await.unwrap().state.first_sequence;
    assert!(
        first > seen + 1,
        "{first}: what it has missed is gone from the log"
    );
    line.mend();
    // The commit is refused until the node has caught up.
    two.insist(put("mine", 1)).await;
    one.catalog.applied(two.catalog.sequence()).await.unwrap();
    let expected = one.catalog.load().await.unwrap();
    assert_eq!(two.catalog.load().await.unwrap(), expected);
    let mut told = two.told();
    told.insert("mine".into(), 1);
    assert_eq!(told, created(&expected));
}
