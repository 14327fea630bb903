//! Nodes and servers that fail silently.

use super::test_nodes::{LEASE, epochs, even, node, open, settings, shares, standing, until};
use crate::nats::{NatsProcesses, PATIENCE};
use bytes::Bytes;
use postrider_jetstream::JetStreamCluster;
use postrider_jetstream::membership::NodeStatus;
use postrider_store::conformance::{WANT, at, claim_all, events, sub};
use postrider_store::{Catalog, Error, EventLog};
use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::Duration;
use tokio::time::Instant;

// The node's heartbeats stop, but it still has all of its partitions and continues to write.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_falls_silent_is_replaced_and_its_writes_are_refused() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 4, 1).await;
    until(&a, "one has all", |known| even(known, &[1], 4)).await;
    let b = open(&servers, 4, 2).await;
    let c = open(&servers, 4, 3).await;
    for one in [&a, &b, &c] {
        until(one, "three share", |known| even(known, &[1, 2, 3], 4)).await;
    }
    let mut accepted = BTreeSet::new();
    for n in 0..20 {
        let text = format!("before {n}");
        a.log.append(events(&[(&text, &[1])])).await.unwrap();
        accepted.insert(text);
    }
    let lost = a.log.partitions();
    assert!(!lost.is_empty());
    a.members.abandon().await;
    let died = Instant::now();
    assert!(a.log.append(events(&[("without a lease", &[1])])).await.is_err());
    assert!(a.log.claim(sub(1), at(0), WANT).await.is_err());
    until(&b, "two share", |known| {
        standing(known, 1) == Some(NodeStatus::Dead) && even(known, &[2, 3], 4)
    })
    .await;
    let took = died.elapsed();
    println!("replaced after {took:?} with a lease of {LEASE:?}");
    assert!(took >= LEASE, "not before its lease has run out");
    // A lease and a half, a heartbeat or two, the next node in line; the rest allows for a busy
    // machine.
    assert!(took < LEASE * 3 / 2 + LEASE + Duration::from_secs(15), "{took:?}");
    for partition in lost.iter() {
        let late = partition.append(events(&[("too late", &[1])])).await;
        assert!(late.is_err(), "{late:?}");
        let ended = tokio::time::timeout(PATIENCE, partition.ended().cancelled_owned()).await;
        assert!(ended.is_ok(), "it knows that it is another's");
    }
    let mut found = BTreeSet::new();
    for one in [&b, &c] {
        let claims = claim_all(&*one.log, sub(1), at(0)).await;
        for claim in &claims {
            assert!(
                found.insert(claim.object().to_owned()),
                "{} twice",
                claim.object()
            );
        }
        one.log.release(sub(1), claims);
    }
    assert_eq!(found, accepted);
    until(&c, "it is counted", |known| known.counts.takeovers > 4).await;
    b.close().await;
    c.close().await;
}

// The whole process is suspended for longer than its lease, with everything it has in memory, and
// then continues.
#[test]
fn a_node_that_stood_still_claims_nothing_when_it_wakes() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let urls = settings(&servers, 4);
    let (ready, is_ready) = mpsc::channel();
    let (wake, woken) = mpsc::channel::<()>();
    let (said, says) = mpsc::channel();
    let (leave, leaves) = tokio::sync::oneshot::channel::<()>();
    let stills = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async move {
            let a = JetStreamCluster::open(urls, node(1)).await.unwrap();
            until(&a, "two share", |known| even(known, &[1, 2], 4)).await;
            for n in 0..8 {
                a.log.append(events(&[(&format!("{n}"), &[1])])).await.unwrap();
            }
            let before = epochs(&a);
            ready.send(()).unwrap();
            // The only thread of this node: it is blocked until the test continues.
            woken.recv().unwrap();
            let at_once = a.log.claim(sub(1), at(0), WANT).await;
            let append = a.log.append(events(&[("too late", &[1])])).await;
            said.send((at_once.is_err(), append.is_err())).unwrap();
            // Partitions that the node serves afterwards were taken again.
            until(&a, "it takes part again", |known| {
                let mut mine = known
                    .partitions
                    .iter()
                    .filter(|one| one.owner == Some(a.members.node().id));
                even(known, &[1, 2], 4) && mine.all(|one| one.epoch > before[usize::from(one.number)])
            })
            .await;
            leaves.await.unwrap();
            a.close().await;
        });
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let b = open(&servers, 4, 2).await;
        until(&b, "two share", |known| even(known, &[1, 2], 4)).await;
        is_ready.recv_timeout(PATIENCE).unwrap();
        until(&b, "the other one has all", |known| even(known, &[2], 4)).await;
        assert_eq!(b.log.backlog(sub(1)).waiting, 8);
        let mine = claim_all(&*b.log, sub(1), at(0)).await;
        assert_eq!(mine.len(), 8);
        wake.send(()).unwrap();
        assert_eq!(
            says.recv_timeout(PATIENCE).unwrap(),
            (true, true),
            "it claims and appends nothing"
        );
        // Node 2 still holds what it claimed.
        b.log.release(sub(1), mine);
        until(&b, "two share again", |known| even(known, &[1, 2], 4)).await;
        leave.send(()).unwrap();
        until(&b, "the first one has left", |known| even(known, &[2], 4)).await;
        b.close().await;
    });
    stills.join().unwrap();
}

// All servers of the bucket are suspended for longer than the lease: no node can send heartbeats,
// and no node may take anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stands_still_stops_all_and_moves_nothing() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let a = open(&servers, 4, 1).await;
    let b = open(&servers, 4, 2).await;
    for one in [&a, &b] {
        until(one, "two share", |known| even(known, &[1, 2], 4)).await;
    }
    let before = epochs(&a);
    let mut steward = a.members.coordinator();
    assert!(*steward.borrow() || *b.members.coordinator().borrow());
    if !*steward.borrow() {
        steward = b.members.coordinator();
    }
    servers.all[0].pause();
    tokio::time::timeout(PATIENCE, steward.wait_for(|steward| !*steward))
        .await
        .unwrap()
        .unwrap();
    assert!(
        a.log.append(events(&[("now", &[1])])).await.is_err()
            || b.log.append(events(&[("now", &[1])])).await.is_err()
    );
    servers.all[0].resume();
    tokio::time::timeout(PATIENCE, steward.wait_for(|steward| *steward))
        .await
        .unwrap()
        .unwrap();
    for one in [&a, &b] {
        until(one, "two share", |known| even(known, &[1, 2], 4)).await;
        let appended = async {
            while one.log.append(events(&[("again", &[1])])).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, appended).await.unwrap();
    }
    assert_eq!(epochs(&a), before, "everybody has what it had");
    a.close().await;
    b.close().await;
}

// A later version of the program has changed something that this one cannot decode.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_cannot_read_the_catalogue_takes_nothing_in() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let one = open(&servers, 1, 1).await;
    until(&one, "it serves", |known| even(known, &[1], 1)).await;
    one.log.append(events(&[("a", &[1])])).await.unwrap();
    let later = Bytes::from_static(b"\xff what is this?");
    let sent = one.connection.js.publish("t.catalog.log", later).await.unwrap();
    let unreadable = sent.await.unwrap().sequence;
    let refused = tokio::time::timeout(PATIENCE, one.catalog.applied(unreadable)).await;
    assert!(matches!(refused, Ok(Err(Error::Corrupt(_)))), "{refused:?}");
    assert!(one.catalog.trouble().is_some());
    assert!(one.catalog.catch_up().await.is_err());
    let refused = one.log.append(events(&[("b", &[1])])).await;
    assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
    one.close().await;
}

// Three servers with three replicas. One is suspended, then the leader of the bucket is killed.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_of_servers_carries_on_without_one() {
    let Some(mut servers) = NatsProcesses::three() else {
        return;
    };
    let a = open(&servers, 4, 1).await;
    let b = open(&servers, 4, 2).await;
    for one in [&a, &b] {
        until(one, "two share", |known| even(known, &[1, 2], 4)).await;
    }
    let leader = |cluster: &JetStreamCluster| {
        let health = cluster.health.clone();
        async move {
            let report = health.look().await;
            assert_eq!(report.replicas, 3, "{:?}", report.trouble());
            assert!(
                report.guarantee.contains("any one of its 3 servers"),
                "{}",
                report.guarantee
            );
            let bucket = report.streams.last().unwrap().clone();
            assert_eq!(bucket.name, "KV_t-nodes");
            assert_eq!(bucket.others.len(), 2);
            let name = bucket.leader.expect("it has a leader");
            name.trim_start_matches('n').parse::<usize>().unwrap()
        }
    };
    let first = leader(&a).await;
    servers.all[first].pause();
    let mut accepted = BTreeSet::new();
    publish(&a, "paused", &mut accepted).await;
    servers.all[first].resume();
    for one in [&a, &b] {
        until(one, "two share", |known| even(known, &[1, 2], 4)).await;
    }
    let second = loop {
        let report = a.health.look().await;
        match &report.streams.last().unwrap().leader {
            Some(name) if report.trouble().is_empty() => {
                break name.trim_start_matches('n').parse::<usize>().unwrap();
            }
            _ => tokio::task::yield_now().await,
        }
    };
    let before = epochs(&a);
    let killed = Instant::now();
    servers.all[second].kill();
    publish(&b, "killed", &mut accepted).await;
    println!("events are taken in again after {:?}", killed.elapsed());
    // The bucket has no leader for longer than the lease.
    let leads_again = async {
        let gone = format!("n{second}");
        loop {
            let report = a.health.look().await;
            let leader = report.streams.last().unwrap().leader.clone();
            if leader.is_some_and(|leader| leader != gone) {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, leads_again)
        .await
        .expect("another server leads");
    for one in [&a, &b] {
        // Events are accepted before heartbeats are stored again; claims are possible only
        // afterwards.
        until(one, "two share", |known| {
            one.members.lease().valid_now() && even(known, &[1, 2], 4)
        })
        .await;
    }
    println!(
        "and handed out after {:?}, with a lease of {LEASE:?}",
        killed.elapsed()
    );
    println!("{:?}", shares(&a.members.membership()));
    assert_eq!(
        epochs(&a),
        before,
        "while nobody can store a heartbeat nobody takes anything"
    );
    let mut found = BTreeSet::new();
    for one in [&a, &b] {
        let claims = claim_all(&*one.log, sub(1), at(0)).await;
        found.extend(claims.iter().map(|claim| claim.object().to_owned()));
        one.log.release(sub(1), claims);
    }
    assert!(found.is_superset(&accepted), "{accepted:?} {found:?}");
    servers.all[second].run();
    a.close().await;
    b.close().await;
}

/// Publishes until this many requests have been accepted again, whatever is refused meanwhile.
async fn publish(to: &JetStreamCluster, what: &str, accepted: &mut BTreeSet<String>) {
    let publish = async {
        let mut count = 0;
        for n in 0.. {
            let text = format!("{what} {n}");
            if to.log.append(events(&[(&text, &[1])])).await.is_ok() {
                accepted.insert(text);
                count += 1;
            } else {
                tokio::task::yield_now().await;
            }
            if count == 20 {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, publish)
        .await
        .expect("events are accepted again");
}
