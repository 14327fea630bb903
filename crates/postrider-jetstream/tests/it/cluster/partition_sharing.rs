//! Nodes that join, leave and share the partitions.

use super::test_nodes::{
    LEASE, epochs, even, node, open, open_with, served, settings, shares, standing, until,
};
use crate::nats::{NatsProcesses, PATIENCE};
use postrider_core::ids::{Secret, TopicId};
use postrider_core::subscription::Topic;
use postrider_jetstream::bucket::Bucket;
use postrider_jetstream::membership::{NodeId, NodeStatus};
use postrider_jetstream::{JetStreamCluster, JetStreamSettings, NatsConnection};
use postrider_store::conformance::events;
use postrider_store::seal::{Keyring, key_of};
use postrider_store::{Catalog, CatalogChange, EventLog};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::time::Instant;

#[tokio::test(flavor = "multi_thread")]
async fn nodes_share_the_partitions_evenly() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 8, 1).await;
    until(&a, "one has all", |known| {
        even(known, &[1], 8) && *a.members.coordinator().borrow()
    })
    .await;
    let b = open(&servers, 8, 2).await;
    until(&b, "two share", |known| even(known, &[1, 2], 8)).await;
    let c = open(&servers, 8, 3).await;
    for one in [&a, &b, &c] {
        until(one, "three share", |known| even(known, &[1, 2, 3], 8)).await;
    }
    // Heartbeats announce a share shortly before or after a node serves it. The owner of partition
    // 0, which on a busy machine is not always the first node, is the coordinator.
    until(&a, "every partition is served once", |_| {
        let shares = [&a, &b, &c].map(served);
        let stewards = [&a, &b, &c].map(|node| *node.members.coordinator().borrow());
        shares.iter().map(BTreeSet::len).sum::<usize>() == 8
            && shares.iter().flatten().collect::<BTreeSet<_>>().len() == 8
            && stewards == shares.map(|partitions| partitions.contains(&0))
    })
    .await;
    // Every epoch is new and greater than those before.
    let known = a.members.membership();
    assert_eq!(known.nodes.len(), 3);
    assert!(
        known
            .partitions
            .iter()
            .all(|one| one.epoch > 0 && one.waiting.is_some())
    );
    assert_eq!(known.nodes[1].url, "https://node-2.example");

    // A node that leaves in an orderly way is removed and does not count as dead.
    c.close().await;
    until(&a, "two share again", |known| even(known, &[1, 2], 8)).await;
    assert_eq!(standing(&a.members.membership(), 3), None);
    a.close().await;
    until(&b, "one has all again", |known| {
        even(known, &[2], 8) && *b.members.coordinator().borrow()
    })
    .await;
    b.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_drains_gives_everything_away_and_hands_on_what_is_published() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 4, 1).await;
    until(&a, "one has all", |known| even(known, &[1], 4)).await;
    let early = a.log.append(events(&[("early", &[1])])).await.unwrap();
    let b = open(&servers, 4, 2).await;
    until(&b, "two share", |known| even(known, &[1, 2], 4)).await;
    a.members.drain().await;
    let mut drained = a.members.drained();
    tokio::time::timeout(PATIENCE, drained.wait_for(|drained| *drained))
        .await
        .unwrap()
        .unwrap();
    assert!(served(&a).is_empty());
    for one in [&a, &b] {
        let all = |known: &_| standing(known, 1) == Some(NodeStatus::Draining) && served(&b).len() == 4;
        until(one, "the other has all", all).await;
    }
    // An event accepted by one node is delivered by the other; a request to the drained node is
    // appended by the other.
    assert_eq!(
        b.log.backlog(postrider_store::conformance::sub(1)).waiting,
        1,
        "{early}"
    );
    let owners = |known: &postrider_jetstream::Membership| known.owners().map(|id| id.0).collect::<Vec<_>>();
    until(&a, "it is known who owns", |known| owners(known) == [2]).await;
    a.log.append(events(&[("small", &[1])])).await.unwrap();
    let large = "x".repeat(3 << 20);
    a.log.append(events(&[(&large, &[1])])).await.unwrap();
    assert_eq!(b.log.backlog(postrider_store::conformance::sub(1)).waiting, 3);
    until(&b, "it is counted", |known| known.counts.forwarded == 2).await;
    a.close().await;
    until(&b, "it has left", |known| standing(known, 1).is_none()).await;
    b.close().await;
}

// Any node can be asked to drain another, and a drained node can be told to participate again.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_drained_by_another_and_takes_part_again() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 4, 1).await;
    let b = open(&servers, 4, 2).await;
    until(&a, "two share", |known| even(known, &[1, 2], 4)).await;
    a.drain(NodeId(2), true).await.unwrap();
    until(&a, "one has all", |known| {
        shares(known) == [(1, 4), (2, 0)] && standing(known, 2) == Some(NodeStatus::Draining)
    })
    .await;
    assert!(served(&b).is_empty());
    a.drain(NodeId(2), false).await.unwrap();
    until(&a, "two share again", |known| {
        even(known, &[1, 2], 4) && standing(known, 2) == Some(NodeStatus::Live)
    })
    .await;
    let refused = a.drain(NodeId(7), true).await.unwrap_err();
    assert!(refused.to_string().contains("away"), "{refused}");
    a.close().await;
    b.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_comes_back_has_its_partitions_at_once() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 4, 1).await;
    until(&a, "one has all", |known| even(known, &[1], 4)).await;
    a.log.append(events(&[("kept", &[1])])).await.unwrap();
    let before = epochs(&a);
    a.abandon().await;
    let again = Instant::now();
    let a = open(&servers, 4, 1).await;
    until(&a, "it has all again", |known| {
        even(known, &[1], 4) && served(&a).len() == 4
    })
    .await;
    let took = again.elapsed();
    assert!(epochs(&a).iter().zip(before).all(|(now, before)| *now > before));
    assert_eq!(a.log.backlog(postrider_store::conformance::sub(1)).waiting, 1);
    println!("back after {took:?}, with a lease of {LEASE:?}");
    a.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_cannot_be_one_node() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 2, 7).await;
    until(&a, "it is there", |known| even(known, &[7], 2)).await;
    let refused = JetStreamCluster::open(settings(&servers, 2), node(7)).await;
    let why = refused.err().expect("it is refused").to_string();
    assert!(
        why.contains("another process already runs as node 0000000000000007"),
        "{why}"
    );
    assert!(why.contains("node-7") && why.contains("data directory"), "{why}");
    assert_eq!(served(&a).len(), 2, "the first one is not disturbed");
    assert!(a.members.failed().borrow().is_none());
    a.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_replaced_says_so_and_ends() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 2, 7).await;
    until(&a, "it is there", |known| even(known, &[7], 2)).await;
    // Pretend that the first process was unreachable when the other one began.
    let bucket = postrider_jetstream::bucket::Bucket::open(&a.connection)
        .await
        .unwrap();
    let beat = bucket
        .read("node.0000000000000007")
        .await
        .unwrap()
        .unwrap()
        .value
        .unwrap();
    let beat = String::from_utf8(beat.to_vec()).unwrap();
    let other = beat
        .replacen("\"incarnation\":1", "\"incarnation\":2", 1)
        .replacen(
            &format!("{:016x}", a.members.node().process),
            "00000000000000ff",
            1,
        );
    assert_ne!(beat, other);
    bucket.put("node.0000000000000007", other.into()).await.unwrap();
    let mut failed = a.members.failed();
    let why = tokio::time::timeout(PATIENCE, failed.wait_for(Option::is_some))
        .await
        .unwrap()
        .unwrap()
        .clone();
    assert!(
        why.unwrap()
            .contains("another process has taken the place of this node")
    );
    assert!(!a.members.lease().valid_now());
    assert!(a.log.append(events(&[("no more", &[1])])).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_facts_of_a_cluster_are_fixed_and_its_secrets_shared() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 4, 1).await;
    let refused = JetStreamCluster::open(settings(&servers, 8), node(2)).await;
    let why = refused.err().expect("it is refused").to_string();
    assert!(
        why.contains("made with 4 partitions") && why.contains("8"),
        "{why}"
    );
    let b = open(&servers, 4, 2).await;
    assert_eq!(a.facts, b.facts);
    assert_eq!(a.log.identity(), b.log.identity());

    let mine = a.secret("token-key", || Secret::new("made by a")).await.unwrap();
    let theirs = b.secret("token-key", || panic!("there is one")).await.unwrap();
    assert_eq!((mine.expose(), theirs.expose()), ("made by a", "made by a"));
    let (x, y) = tokio::join!(
        a.secret("client", || Secret::new("x")),
        b.secret("client", || Secret::new("y"))
    );
    assert_eq!(
        x.unwrap().expose(),
        y.unwrap().expose(),
        "both have what the first made"
    );
    assert!(a.secret("a.b", || Secret::new("x")).await.is_err());
    a.close().await;
    b.close().await;
    let again = open_with(settings(&servers, 4), node(3)).await;
    assert_eq!(again.facts.identity, a.facts.identity);
    again.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_key_secrets_are_sealed_and_nodes_without_it_are_refused() {
    const A: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    const B: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let keyed = |keys: &str| JetStreamSettings {
        keys: Some(Arc::new(Keyring::parse(keys, "secrets.key").unwrap())),
        ..settings(&servers, 4)
    };
    // A cluster that was started without a key.
    let plain = open(&servers, 4, 1).await;
    plain.secret("old", || Secret::new("hunter-2")).await.unwrap();
    plain.close().await;

    let a = open_with(keyed(A), node(2)).await;
    let secret = |name: &'static str| a.secret(name, || Secret::new("hunter-2"));
    assert_eq!(secret("old").await.unwrap().expose(), "hunter-2");
    assert_eq!(secret("new").await.unwrap().expose(), "hunter-2");
    assert!(a.swap_shared_text("access", "hunter-2".into(), 0).await.unwrap());
    let topic = Topic::custom(TopicId(1), "orders", ["hunter-2", "x"].map(Secret::new));
    a.catalog
        .commit(vec![CatalogChange::PutTopic(topic.clone())])
        .await
        .unwrap();

    let connection = NatsConnection::open(&settings(&servers, 4), "test")
        .await
        .unwrap();
    let bucket = Bucket::open(&connection).await.unwrap();
    for key in ["secret.old", "secret.new", "shared.access"] {
        let stored = bucket.read(key).await.unwrap().unwrap().value.unwrap();
        assert!(key_of(&stored).is_some(), "{key}: {stored:?}");
    }
    let stream = connection.js.get_stream("t-catalog").await.unwrap();
    let last = stream.get_raw_message(a.catalog.sequence()).await.unwrap();
    assert!(!last.payload.windows(8).any(|part| part == b"hunter-2"));

    let b = open_with(keyed(A), node(3)).await;
    assert_eq!(b.catalog.load().await.unwrap().topics, [topic]);
    let (text, _) = b.shared_text("access").await.unwrap().unwrap();
    assert_eq!(&text[..], b"hunter-2");
    for (id, refused, named) in [
        (4, keyed(B), "secrets.key (it holds"),
        (5, settings(&servers, 4), "secrets.key_file is set"),
    ] {
        let refused = JetStreamCluster::open(refused, node(id)).await;
        let why = refused.err().expect("it is refused").to_string();
        assert!(why.contains("sealed under key") && why.contains(named), "{why}");
    }
    a.close().await;
    b.close().await;
}
