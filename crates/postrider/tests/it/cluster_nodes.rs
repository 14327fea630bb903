//! A few nodes on one NATS server and their cooperation, without the faults that `jepsen` injects.

use crate::client::TestConnection;
use crate::cluster::{ClusterPlan, TestCluster, partitions};
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};
use std::time::Duration;

const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";
const AUTHORIZATION: (&str, &str) = ("authorization", "Bearer hush");

/// Starts two nodes with a topic `orders` and a subscription `billing` on it, created at the first,
/// to the receiver.
fn two(receiver: &TestReceiver, config: &str) -> Option<TestCluster> {
    let crew = TestCluster::start(&ClusterPlan {
        config: config.into(),
        ..ClusterPlan::default()
    })?;
    crew.nodes[0].put_topic("orders");
    crew.nodes[0].subscribe("orders", "billing", &receiver.url("/"), json!(null));
    Some(crew)
}

/// Publishes `count` events one by one. Returns their ids.
fn publish(node: &TestServer, prefix: &str, count: usize) -> BTreeSet<String> {
    let ids: BTreeSet<String> = (0..count).map(|n| format!("{prefix}-{n}")).collect();
    for id in &ids {
        node.publish("orders", &[event(id)]);
    }
    ids
}

fn delivered(node: &TestServer) -> u64 {
    node.health()["deliveries"]["delivered"]
        .as_u64()
        .expect("a number")
}

/// Deliveries of these events, once all have arrived.
#[track_caller]
fn arrivals(receiver: &TestReceiver, ids: &BTreeSet<String>) -> BTreeMap<String, Vec<ReceivedDelivery>> {
    let mut arrived: BTreeMap<String, Vec<ReceivedDelivery>> = BTreeMap::new();
    let mut take = |delivery: ReceivedDelivery| {
        for id in delivery.ids() {
            arrived.entry(id).or_default().push(delivery.clone());
        }
        arrived.len()
    };
    while take(receiver.next()) < ids.len() {}
    for delivery in receiver.take_received() {
        take(delivery);
    }
    assert!(arrived.keys().eq(ids), "{:?} instead of {ids:?}", arrived.keys());
    arrived
}

/// Counts of earlier attempts in the deliveries' headers.
fn counts(deliveries: &[ReceivedDelivery]) -> Vec<&str> {
    deliveries
        .iter()
        .map(|delivery| delivery.header("aeg-delivery-count").expect("a count"))
        .collect()
}

/// Pauses or resumes the subscription at this node.
#[track_caller]
fn control(node: &TestServer, verb: &str, subscription: &str) {
    let path = format!("/postrider/v1/subscriptions/{verb}");
    let body = json!({"id": format!("orders/{subscription}")}).to_string();
    node.send("POST", &path, &[AUTHORIZATION, JSON], body).expect(200);
}

#[test]
fn two_nodes_share_the_deliveries_of_what_either_takes() {
    let receiver = TestReceiver::start();
    let Some(crew) = two(&receiver, "") else { return };
    let [one, other] = &crew.nodes[..] else {
        unreachable!()
    };
    // The other node knows the topic and the subscription from the shared catalog.
    let mut ids = publish(other, "other", 20);
    ids.extend(publish(one, "one", 20));
    let arrived = arrivals(&receiver, &ids);
    assert!(arrived.values().all(|each| each.len() == 1), "{arrived:#?}");
    wait::until("all is counted", || {
        (delivered(one) + delivered(other) == 40).then_some(())
    });
    assert_eq!(
        (delivered(one), delivered(other)),
        (20, 20),
        "each delivers what it took"
    );

    // A subscription is known to the other node by the time its creation is answered.
    other.subscribe("orders", "audit", &receiver.url("/audit"), json!(null));
    one.edge("GET", "/topics/orders/eventSubscriptions/audit", &Value::Null)
        .expect(200);
    one.publish("orders", &[event("both")]);
    let paths: BTreeSet<String> = (0..2).map(|_| receiver.next().path).collect();
    assert_eq!(paths, BTreeSet::from(["/".to_owned(), "/audit".to_owned()]));
    other.unsubscribe("orders", "billing");
    wait::until("the first node knows it", || {
        let path = format!("/topics/orders/eventSubscriptions/billing?{EDGE_VERSION}");
        (one.send("GET", &path, &[], "").status == 404).then_some(())
    });
    one.publish("orders", &[event("audited")]);
    assert_eq!(receiver.next().path, "/audit");
}

// Clients behind a load balancer reach another node with every request.
#[test]
fn what_one_node_has_made_no_other_says_is_missing() {
    let receiver = TestReceiver::start();
    let Some(crew) = two(&receiver, CLIENT) else {
        return;
    };
    let nodes = |n: usize| (&crew.nodes[n % 2], &crew.nodes[(n + 1) % 2]);
    for n in 0..40 {
        let (one, other) = nodes(n);
        let topic = format!("t{n}");
        one.put_topic(&topic);
        other.subscribe(&topic, "s", &receiver.url("/"), json!(null));
        one.publish(&topic, &[event(&topic)]);
        other.unsubscribe(&topic, "s");
        one.subscribe(&topic, "again", &receiver.url("/"), json!(null));
        other
            .edge(
                "GET",
                &format!("/topics/{topic}/eventSubscriptions/again"),
                &Value::Null,
            )
            .expect(200);
        one.edge("DELETE", &format!("/topics/{topic}"), &Value::Null)
            .expect(200);
        let path = format!("/postrider/v1/subscription?id={topic}/never");
        other.send("GET", &path, &[AUTHORIZATION], "").expect(404);
    }
}

#[test]
fn a_node_without_a_partition_hands_over_what_it_takes() {
    let receiver = TestReceiver::start();
    let Some(crew) = TestCluster::start(&ClusterPlan {
        partitions: 1,
        ..ClusterPlan::default()
    }) else {
        return;
    };
    let owns = |node: &&TestServer| partitions(node).is_some_and(|(owned, _)| owned > 0);
    let owner = crew.nodes.iter().find(owns).expect("somebody owns it");
    let other = crew
        .nodes
        .iter()
        .find(|node| !owns(node))
        .expect("somebody owns nothing");
    // A resource created here is known there when the events arrive.
    other.put_topic("orders");
    other.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let ids = publish(other, "e", 10);
    let arrived = arrivals(&receiver, &ids);
    assert!(arrived.values().all(|each| each.len() == 1), "{arrived:#?}");
    owner.counted("/deliveries/delivered", 10);
    assert_eq!(delivered(other), 0);
    // A request too large for a single message between nodes.
    let mut large = event("large");
    large["data"] = json!("x".repeat(1_000_000));
    other.publish("orders", &[large.clone()]);
    let arrived = receiver.next();
    assert_eq!(arrived.json()[0]["data"], large["data"]);
}

// Some events wait, others have failed once; the node that holds half of them is killed.
#[test]
fn what_a_killed_node_had_is_delivered_by_the_other_with_its_counts() {
    let mood = Arc::new(AtomicU16::new(500));
    let said = mood.clone();
    let receiver = TestReceiver::answering(move |_| ScriptedReply::Status(said.load(Relaxed)));
    let profile = "profile = \"custom\"\n[profile_custom]\nschedule = [\"20s\", \"1h\"]\njitter_percent = 0\nprobation = \"off\"\n";
    let Some(mut crew) = two(&receiver, &format!("{profile}{CLIENT}")) else {
        return;
    };
    // A subscription for which all events wait.
    crew.nodes[0].subscribe("orders", "other", &receiver.url("/other"), json!(null));
    control(&crew.nodes[0], "pause", "other");
    let mut failed = publish(&crew.nodes[0], "failed-0", 5);
    failed.extend(publish(&crew.nodes[1], "failed-1", 5));
    let first = arrivals(&receiver, &failed);
    for node in &crew.nodes {
        node.counted("/deliveries/attemptsFailed", 5);
    }
    control(&crew.nodes[0], "pause", "billing");
    wait::until("the other node knows", || {
        let path = "/postrider/v1/subscription?id=orders/billing";
        let shown = crew.nodes[1].send("GET", path, &[AUTHORIZATION], "").json();
        (shown["state"] == "paused").then_some(())
    });
    let mut waiting = publish(&crew.nodes[0], "waiting-0", 5);
    waiting.extend(publish(&crew.nodes[1], "waiting-1", 5));
    mood.store(200, Relaxed);
    // A deletion is recorded before it is answered, and with it everything that happened before;
    // otherwise the results of the last attempts might be lost with the node.
    crew.nodes[0]
        .edge("DELETE", "/topics/orders/eventSubscriptions/other", &Value::Null)
        .expect(200);
    crew.nodes[0].kill();
    wait::until("the other has everything", || {
        (partitions(&crew.nodes[1]) == Some((4, 4))).then_some(())
    });
    control(&crew.nodes[1], "resume", "billing");

    let all = failed.union(&waiting).cloned().collect();
    let arrived = arrivals(&receiver, &all);
    for (id, deliveries) in &arrived {
        let expected = if waiting.contains(id) { "0" } else { "1" };
        assert_eq!(counts(deliveries), [expected], "{id}");
        if let Some(before) = first.get(id) {
            let waited = deliveries[0].at - before[0].at;
            assert!(
                waited >= Duration::from_millis(19_900),
                "{id} came after {waited:?}"
            );
        }
    }
    crew.nodes[1].counted("/deliveries/delivered", 20);

    // The node comes back, gets its share of partitions, and delivers.
    crew.nodes[0].start();
    crew.shared_evenly();
    let ids = publish(&crew.nodes[0], "back", 5);
    arrivals(&receiver, &ids);
    crew.nodes[0].counted("/deliveries/delivered", 5);
}

// Both nodes get events throughout; attempts take a moment, so that some are always in progress.
#[test]
fn a_node_that_is_asked_to_end_hands_over_without_a_duplicate() {
    let receiver = TestReceiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(20));
        ScriptedReply::Status(200)
    });
    let Some(mut crew) = two(&receiver, "") else {
        return;
    };
    let stop = AtomicBool::new(false);
    let published: Vec<PublishedEvents> = std::thread::scope(|scope| {
        let publishers: Vec<_> = (0..2)
            .map(|n| {
                let (address, stop) = (crew.nodes[n].http, &stop);
                scope.spawn(move || publish_until(address, n, stop))
            })
            .collect();
        wait::until("some have arrived", || {
            (delivered(&crew.nodes[1]) > 50).then_some(())
        });
        crew.nodes[0].stop();
        wait::until("the other has everything", || {
            (partitions(&crew.nodes[1]) == Some((4, 4))).then_some(())
        });
        let before = delivered(&crew.nodes[1]);
        wait::until("it goes on", || {
            (delivered(&crew.nodes[1]) > before + 50).then_some(())
        });
        crew.nodes[0].start();
        crew.shared_evenly();
        stop.store(true, Relaxed);
        publishers
            .into_iter()
            .map(|one| one.join().expect("it publishes"))
            .collect()
    });
    let taken: BTreeSet<&String> = published.iter().flat_map(|one| &one.taken).collect();
    let refused: BTreeSet<&String> = published.iter().flat_map(|one| &one.refused).collect();
    assert!(taken.len() > 150, "{}", taken.len());
    let mut arrived: BTreeMap<String, Vec<ReceivedDelivery>> = BTreeMap::new();
    let mut missing = taken.clone();
    while !missing.is_empty() {
        let delivery = receiver.next();
        for id in delivery.ids() {
            missing.remove(&id);
            arrived.entry(id).or_default().push(delivery.clone());
        }
    }
    for delivery in receiver.take_received() {
        for id in delivery.ids() {
            arrived.entry(id).or_default().push(delivery.clone());
        }
    }
    let unknown = |id: &&String| !taken.contains(id) && !refused.contains(id);
    let strangers: Vec<_> = arrived.keys().filter(unknown).collect();
    assert!(strangers.is_empty(), "{strangers:?} were not published");
    let twice: Vec<_> = arrived.iter().filter(|(_, each)| each.len() > 1).collect();
    assert!(twice.is_empty(), "{} of {}: {twice:#?}", twice.len(), taken.len());
}

/// Events of one publisher, by result.
#[derive(Default)]
struct PublishedEvents {
    taken: Vec<String>,
    /// Answered with 429 or 503, or not at all: these may be stored nevertheless.
    refused: Vec<String>,
}

/// Publishes one event after the other until `stop`.
fn publish_until(address: std::net::SocketAddr, publisher: usize, stop: &AtomicBool) -> PublishedEvents {
    let target = format!("/topics/orders/events?{EDGE_VERSION}");
    let mut published = PublishedEvents::default();
    let mut number = 0;
    while !stop.load(Relaxed) {
        let Ok(mut connection) = TestConnection::open(address) else {
            std::thread::yield_now();
            continue;
        };
        while !stop.load(Relaxed) {
            number += 1;
            let id = format!("{publisher}-{number}");
            let body = json!([event(&id)]).to_string();
            match connection.send("POST", &target, &[JSON], body.as_bytes()) {
                Ok(answer) if answer.status == 200 => published.taken.push(id),
                Ok(answer) => {
                    assert!(matches!(answer.status, 429 | 503), "{}", answer.text());
                    published.refused.push(id);
                }
                Err(_) => {
                    published.refused.push(id);
                    break;
                }
            }
        }
    }
    published
}

#[test]
fn a_node_says_that_nats_is_away_and_goes_on_when_it_is_back() {
    let receiver = TestReceiver::start();
    let Some(mut crew) = two(&receiver, "") else {
        return;
    };
    crew.nats.servers[0].kill();
    crew.nodes[1].kill();
    crew.nodes[1].launch();
    let status = crew.nodes[1].ended();
    let log = crew.nodes[1].log();
    assert_eq!(status.code(), Some(1), "{log:#?}");
    let last = log.last().expect("it says something");
    assert!(last.contains("cannot connect to nats://127.0.0.1:"), "{last}");

    wait::until("it is not ready", || {
        let health = crew.nodes[0].send("GET", "/healthz", &[], "");
        (health.status == 503).then_some(())
    });
    crew.nats.servers[0].start();
    wait::until("it takes events again", || {
        let path = format!("/topics/orders/events?{EDGE_VERSION}");
        let body = json!([event("again")]).to_string();
        (crew.nodes[0].send("POST", &path, &[JSON], body).status == 200).then_some(())
    });
    assert_eq!(receiver.next().ids(), ["again"]);
    crew.nodes[1].start();
    crew.shared_evenly();
}

#[test]
fn a_token_of_one_node_is_good_at_the_other() {
    let receiver = TestReceiver::start();
    let Some(crew) = two(&receiver, "") else { return };
    let credentials: Vec<String> = crew
        .nodes
        .iter()
        .map(|node| std::fs::read_to_string(node.data_dir().join("credentials.toml")).expect("it is there"))
        .collect();
    assert_eq!(credentials[0], credentials[1], "they were made once");
    let value = |name: &str| {
        let line = credentials[0]
            .lines()
            .find(|line| line.starts_with(name))
            .expect("it is in there");
        line.split('"').nth(1).expect("a text").to_owned()
    };
    let form = format!(
        "grant_type=client_credentials&client_id={}&client_secret={}&scope=https%3A%2F%2Fmanagement.azure.com%2F%2F.default",
        value("client_id"),
        value("client_secret")
    );
    let headers = [("content-type", "application/x-www-form-urlencoded")];
    let answer = crew.nodes[0]
        .send("POST", "/common/oauth2/v2.0/token", &headers, form)
        .expect(200);
    let token: Value = answer.json();
    let bearer = format!("Bearer {}", token["access_token"].as_str().expect("a token"));
    for node in &crew.nodes {
        let asked = |bearer: &str| {
            node.send("GET", "/postrider/v1/stats", &[("authorization", bearer)], "")
                .status
        };
        assert_eq!(asked(&bearer), 200);
        assert_eq!(asked("Bearer wrong"), 401);
    }
}

#[test]
fn two_processes_cannot_be_the_same_node() {
    let receiver = TestReceiver::start();
    let Some(crew) = two(&receiver, "") else { return };
    let copied = tempfile::tempdir().expect("a temporary directory");
    let from = crew.nodes[0].data_dir().join("node-id");
    std::fs::copy(from, copied.path().join("node-id")).expect("it can be copied");
    let setup = ServerSetup {
        config: crew.nodes[0].config().to_owned(),
        data_dir: Some(copied.path().to_owned()),
        ..ServerSetup::default()
    };
    let refusal = setup.refusal();
    assert!(
        refusal.contains("another process already runs as node"),
        "{refusal}"
    );
    assert!(refusal.contains("data directory of its own"), "{refusal}");
}

#[test]
fn a_node_that_says_that_it_is_ready_takes_events_in() {
    let receiver = TestReceiver::start();
    let plan = ClusterPlan {
        nodes: 1,
        ..ClusterPlan::default()
    };
    let Some(mut crew) = TestCluster::start(&plan) else {
        return;
    };
    let node = &mut crew.nodes[0];
    node.put_topic("orders");
    node.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    for (id, in_order) in [("stopped", true), ("killed", false)] {
        if in_order {
            node.stop();
        } else {
            node.kill();
        }
        node.start();
        node.publish("orders", &[event(id)]);
        let health = node.send("GET", "/healthz", &[], "").expect(200).json();
        assert_eq!((&health["ready"], &health["reasons"]), (&json!(true), &json!([])));
        let Value::Object(partitions) = &health["store"]["partitions"] else {
            panic!("{health}");
        };
        // Partitions become served one by one; a server that reports ready serves all that it owns.
        assert_eq!(partitions["owned"], partitions["served"], "{health}");
        assert_ne!(partitions["owned"], 0, "{health}");
        // A kill may cause the previous event to be delivered again.
        while receiver.next().ids() != [id] {}
    }
}
