use super::*;
use crate::conformance::{SeededRandom, at, topic};
use crate::memory::SharedCatalog;
use crate::{Catalog, CatalogFollower};
use async_trait::async_trait;
use postrider_core::subscription::{Destination, ResourceOrigin};
use std::sync::{Arc, Mutex};

fn subscription(id: u64, topic: u64, inside: Option<&str>) -> Subscription {
    Subscription {
        domain_topic: inside.map(str::to_owned),
        created: at(1),
        origin: ResourceOrigin::Azure,
        ..Subscription::new(
            SubscriptionId(id),
            TopicId(topic),
            format!("S{id}"),
            Destination::EdgeHub { output: "out".into() },
        )
    }
}

fn inside(domain: u64, name: &str) -> DomainTopic {
    DomainTopic {
        domain: TopicId(domain),
        name: name.into(),
        automatic: true,
        created: at(2),
    }
}

/// A replica with two topics, a topic inside the first, and subscriptions of each.
fn replica() -> CatalogReplica {
    let mut replica = CatalogReplica::default();
    let changes = vec![
        CatalogChange::PutTopic(topic(1, "one")),
        CatalogChange::PutTopic(topic(2, "two")),
        CatalogChange::PutDomainTopic(inside(1, "a")),
        CatalogChange::PutSubscription(subscription(3, 1, None)),
        CatalogChange::PutSubscription(subscription(4, 1, Some("A"))),
        CatalogChange::PutSubscription(subscription(5, 1, Some("a"))),
    ];
    replica.apply(changes, 1, true, 1);
    replica.load();
    replica
}

/// Whether a commit is refused while another node's commit is not applied yet.
fn refused(theirs: CatalogChange, ours: CatalogChange) -> bool {
    let mut replica = replica();
    replica.apply(vec![theirs], 2, false, 2);
    let refused = replica.check(std::slice::from_ref(&ours), 1).is_err();
    replica.done();
    assert_eq!(replica.oldest_unapplied(), None);
    assert!(replica.unapplied.reads.is_empty() && replica.unapplied.writes.is_empty());
    refused
}

#[test]
fn changes_to_what_another_node_has_changed_are_refused_until_it_is_in_force() {
    use CatalogChange::*;
    let sub = |id| PutSubscription(subscription(id, 1, None));
    let in_a = |id| PutSubscription(subscription(id, 1, Some("a")));
    let check = |theirs: CatalogChange, ours: CatalogChange, expected: bool| {
        assert_eq!(
            refused(theirs.clone(), ours.clone()),
            expected,
            "{theirs:?} then {ours:?}"
        );
        assert_eq!(refused(ours, theirs), expected, "and the other way round");
    };
    check(PutTopic(topic(1, "x")), PutTopic(topic(1, "y")), true);
    check(PutTopic(topic(1, "x")), PutTopic(topic(2, "y")), false);
    check(PutTopic(topic(8, "New")), PutTopic(topic(9, "new")), true);
    // The old name of the renamed topic conflicts as well.
    check(PutTopic(topic(1, "x")), PutTopic(topic(9, "One")), true);
    check(DeleteTopic(TopicId(1)), PutTopic(topic(9, "one")), true);
    check(DeleteTopic(TopicId(1)), sub(9), true);
    check(DeleteTopic(TopicId(2)), sub(9), false);
    check(sub(8), sub(9), false);
    check(sub(3), sub(3), true);
    check(sub(3), DeleteSubscription(SubscriptionId(3)), true);
    check(sub(3), DeleteSubscription(SubscriptionId(4)), false);
    // Of two concurrent deletions in one domain topic, the second must know that it deletes the
    // last.
    let (four, five) = (SubscriptionId(4), SubscriptionId(5));
    check(DeleteSubscription(four), DeleteSubscription(five), true);
    check(in_a(9), DeleteSubscription(four), true);
    check(in_a(9), in_a(10), false);
    check(DeleteDomainTopic(TopicId(1), "A".into()), in_a(9), true);
    check(DeleteDomainTopic(TopicId(1), "b".into()), in_a(9), false);
    check(PutDomainTopic(inside(1, "b")), DeleteTopic(TopicId(1)), true);
    let delay = |name: &str| DeleteEndpointDelay(name.into());
    check(delay("x"), delay("x"), true);
    check(delay("x"), delay("X"), false);
    check(DeleteHandshake("o".into()), DeleteHandshake("o".into()), true);
    check(DeleteHandshake("o".into()), DeleteHandshake("p".into()), false);
}

#[test]
fn a_name_that_another_node_gave_is_not_given_again() {
    let mut replica = replica();
    let news = vec![
        CatalogChange::PutTopic(topic(7, "News")),
        CatalogChange::PutSubscription(subscription(8, 7, None)),
    ];
    replica.apply(news, 2, false, 2);
    replica.done();
    let mut same = subscription(9, 7, None);
    same.name = "s8".into();
    let check = |changes: &[CatalogChange], refused: bool| {
        assert_eq!(replica.check(changes, 1).is_err(), refused, "{changes:?}");
    };
    check(&[CatalogChange::PutTopic(topic(10, "news"))], true);
    check(&[CatalogChange::PutTopic(topic(7, "news"))], false);
    check(&[CatalogChange::PutSubscription(same.clone())], true);
    // The name is released in the same commit.
    let gone = CatalogChange::DeleteSubscription(SubscriptionId(8));
    check(&[gone, CatalogChange::PutSubscription(same)], false);
    // Names that this node assigned itself are checked elsewhere.
    check(&[CatalogChange::PutTopic(topic(10, "one"))], false);
}

#[test]
fn what_was_missed_is_told_as_changes() {
    let mut random = SeededRandom(7);
    for _ in 0..200 {
        let (mut before, mut after) = (CatalogState::default(), CatalogState::default());
        for _ in 0..random.below(30) {
            let change = random_change(&mut random);
            if random.one_in(2) {
                before.apply(change.clone(), 1);
            }
            after.apply(change, 2);
        }
        for change in after.changes_since(&before) {
            before.apply(change, 3);
        }
        assert_eq!(before.loaded(), after.loaded());
        assert_eq!(after.changes_since(&before), []);
    }
}

fn random_change(random: &mut SeededRandom) -> CatalogChange {
    let id = 1 + random.below(6);
    let name = ["a", "b", "C"][random.below(3) as usize];
    match random.below(8) {
        0 => CatalogChange::PutTopic(topic(id, name)),
        1 => CatalogChange::DeleteTopic(TopicId(id)),
        2 => CatalogChange::PutDomainTopic(inside(id, name)),
        3 => CatalogChange::DeleteDomainTopic(TopicId(id), name.to_uppercase()),
        4 => {
            let mut one = subscription(10 + id, 1 + random.below(3), random.one_in(2).then_some(name));
            one.labels = vec![random.below(5).to_string()];
            CatalogChange::PutSubscription(one)
        }
        5 => CatalogChange::DeleteSubscription(SubscriptionId(10 + id)),
        6 => CatalogChange::DeleteEndpointDelay(name.into()),
        _ => CatalogChange::DeleteHandshake(name.into()),
    }
}

/// Follower that applies changes to what it has loaded.
struct CopyingFollower(Mutex<CatalogState>);

#[async_trait]
impl CatalogFollower for CopyingFollower {
    async fn changed(&self, changes: Vec<CatalogChange>, _: u64) {
        // Let the other tasks run.
        tokio::task::yield_now().await;
        let mut copy = self.0.lock().unwrap();
        changes.into_iter().for_each(|change| copy.apply(change, 0));
    }
}

// Three nodes make random changes; each keeps a copy from its own commits and what it is told, like
// an engine does.
#[tokio::test]
async fn whoever_follows_knows_what_is_there() {
    for seed in 0..20 {
        let handles: Vec<Arc<SharedCatalog>> = SharedCatalog::handles(3).into_iter().map(Arc::new).collect();
        let mut following = tokio::task::JoinSet::new();
        let mut copies = Vec::new();
        for handle in &handles {
            handle.load().await.unwrap();
            let copy = Arc::new(CopyingFollower(Mutex::default()));
            copies.push(copy.clone());
            let handle = handle.clone();
            following.spawn(async move { handle.follow(copy).await });
        }
        let mut random = SeededRandom(seed);
        let mut refused = 0;
        for _ in 0..300 {
            let node = random.below(3) as usize;
            let changes = vec![random_change(&mut random), random_change(&mut random)];
            match handles[node].commit(changes.clone()).await {
                Ok(()) => {
                    let mut copy = copies[node].0.lock().unwrap();
                    changes.into_iter().for_each(|change| copy.apply(change, 0));
                }
                Err(Error::Conflict(_)) => refused += 1,
                Err(other) => panic!("{other}"),
            }
            for _ in 0..random.below(4) {
                tokio::task::yield_now().await;
            }
        }
        assert!((1..290).contains(&refused), "{refused}");
        for _ in 0..10_000 {
            tokio::task::yield_now().await;
        }
        let expected = handles[0].load().await.unwrap();
        for copy in &copies {
            assert_eq!(copy.0.lock().unwrap().loaded(), expected, "seed {seed}");
        }
    }
}
