//! Any node gives the whole answer: the history of events, the counts and the backlogs of all
//! nodes.

use crate::cli::CliShell;
use crate::client::HttpTestAnswer;
use crate::cluster::{ClusterPlan, TestCluster, partitions};
use crate::dead_letters::dead_letter_to;
use crate::listen::ListenProcess;
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, JSON, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";
const AUTHORIZATION: (&str, &str) = ("authorization", "Bearer hush");

fn crew(partitions: u8, config: &str) -> Option<TestCluster> {
    TestCluster::start(&ClusterPlan {
        partitions,
        config: format!("{config}{CLIENT}"),
        ..ClusterPlan::default()
    })
}

/// A topic `orders` with a subscription `billing`, known to all nodes.
fn subscribe(crew: &TestCluster, url: &str, properties: Value) {
    crew.nodes[0].put_topic("orders");
    crew.nodes[0].subscribe("orders", "billing", url, properties);
    for node in &crew.nodes {
        wait::until("the subscription is known", || {
            let known = ask(node, "subscription?id=orders/billing");
            (known.status == 200).then_some(())
        });
    }
}

fn ask(node: &TestServer, path: &str) -> HttpTestAnswer {
    node.send("GET", &format!("/postrider/v1/{path}"), &[AUTHORIZATION], "")
}

#[track_caller]
fn get(node: &TestServer, path: &str) -> Value {
    ask(node, path).expect(200).json()
}

fn post(node: &TestServer, path: &str, body: &Value) -> HttpTestAnswer {
    let path = format!("/postrider/v1/{path}");
    node.send("POST", &path, &[AUTHORIZATION, JSON], body.to_string())
}

/// Polls every node until its answer fits.
#[track_caller]
fn everywhere(crew: &TestCluster, path: &str, fits: impl Fn(&Value) -> bool) {
    for node in crew.nodes.iter().filter(|node| node.is_running()) {
        let mut last = Value::Null;
        let found = wait::is_true_in_time(|| {
            let answer = ask(node, path);
            last = if answer.text().is_empty() {
                Value::Null
            } else {
                answer.json()
            };
            answer.status == 200 && fits(&last)
        });
        assert!(found, "{path}: {last:#}");
    }
}

/// The node that owns the only partition, and the other one.
fn owner(crew: &TestCluster) -> (usize, usize) {
    let owns = |node: &TestServer| partitions(node).is_some_and(|(owned, _)| owned > 0);
    let owner = crew.nodes.iter().position(owns).expect("somebody owns it");
    (owner, 1 - owner)
}

fn texts<'a>(list: &'a Value, name: &str) -> Vec<&'a str> {
    let list = list.as_array().expect("a list").iter();
    list.map(|one| one[name].as_str().unwrap_or_default()).collect()
}

/// Both nodes show the same history of an event that one accepts and the other attempts.
#[test]
fn an_event_that_another_node_attempts_has_one_story() {
    let receiver = TestReceiver::start();
    let Some(crew) = crew(1, "") else { return };
    subscribe(&crew, &receiver.url("/"), json!(null));
    let (owner, other) = owner(&crew);
    crew.nodes[other].publish("orders", &[event("there")]);
    crew.nodes[owner].publish("orders", &[event("here")]);
    for _ in 0..2 {
        receiver.next();
    }
    let name = |number: usize| format!("node-{number}");
    for (id, accepted_by) in [("there", other), ("here", owner)] {
        everywhere(&crew, &format!("events/{id}"), |found| {
            let story = &found["stories"][0];
            let delivery = &story["subscriptions"][0];
            found["stories"].as_array().map(Vec::len) == Some(1)
                && found.get("missing").is_none()
                && story["acceptedBy"] == name(accepted_by)
                && story["state"] == "delivered"
                && delivery["name"] == "billing"
                && delivery["matched"] == true
                && delivery["ended"]["disposition"] == "delivered"
                && texts(&delivery["attempts"], "node") == [name(owner)]
                && delivery.get("number").is_none()
        });
    }
    let missing = ask(&crew.nodes[0], "events/never").expect(404).json();
    assert!(
        missing["detail"].as_str().unwrap().contains("never accepted"),
        "{missing}"
    );

    // Searches match the outcome at any node, not only what the accepting node knows.
    let listed = |found: &Value| found["value"].as_array().map(Vec::len) == Some(2);
    everywhere(&crew, "events?state=delivered", listed);
    everywhere(&crew, "events?outcome=Success", listed);
    everywhere(&crew, "events?state=pending", |found| found["value"] == json!([]));
    everywhere(&crew, "events", |found| {
        listed(found)
            && texts(&found["value"], "id") == ["here", "there"]
            && texts(&found["value"], "state") == ["delivered", "delivered"]
            && found["value"][1]["attempts"] == 1
            && found["value"][1]["subscriptions"][0]["lastOutcome"] == "Success"
    });
}

#[test]
fn pages_go_through_what_all_nodes_have() {
    let receiver = TestReceiver::start();
    let Some(crew) = crew(2, "") else { return };
    subscribe(&crew, &receiver.url("/"), json!(null));
    let mut ids = Vec::new();
    for n in 0..12 {
        let id = format!("e{n:02}");
        // Both nodes publish in turns, sometimes several events in a row.
        crew.nodes[usize::from(n % 5 < 2)].publish("orders", &[event(&id)]);
        ids.push(id);
    }
    receiver.all_of(&ids.iter().cloned().collect());
    ids.reverse();
    everywhere(&crew, "events?state=delivered&limit=100", |found| {
        texts(&found["value"], "id") == ids
    });
    for node in &crew.nodes {
        for (limit, filter) in [(1, ""), (5, ""), (5, "&state=delivered"), (12, ""), (100, "")] {
            let (mut seen, mut cursor) = (Vec::new(), String::new());
            // More pages than needed, though the last ones may be empty.
            for _ in 0..30 {
                let page = get(node, &format!("events?limit={limit}{filter}{cursor}"));
                assert!(page["value"].as_array().unwrap().len() <= limit, "{page}");
                seen.extend(texts(&page["value"], "id").into_iter().map(str::to_owned));
                match page["cursor"].as_str() {
                    Some(next) => cursor = format!("&cursor={next}"),
                    None => break,
                }
            }
            assert_eq!(seen, ids, "limit {limit} {filter}");
        }
    }
    let refused = ask(&crew.nodes[0], "events?cursor=1-2-3").expect(400).json();
    assert_eq!(refused["field"], "cursor");
}

// The owner fails with the event and is drained; the next owner delivers it.
#[test]
fn after_a_takeover_the_attempts_of_both_owners_are_told() {
    let mood = Arc::new(AtomicU16::new(500));
    let said = mood.clone();
    let receiver = TestReceiver::answering(move |_| ScriptedReply::Status(said.load(Relaxed)));
    let profile = "profile = \"custom\"\n[profile_custom]\nschedule = [\"10s\", \"1h\"]\njitter_percent = 0\nprobation = \"off\"\n";
    let Some(mut crew) = crew(1, profile) else { return };
    subscribe(&crew, &receiver.url("/"), json!(null));
    let (first, second) = owner(&crew);
    crew.nodes[first].publish("orders", &[event("e1")]);
    receiver.next();
    everywhere(&crew, "events/e1", |found| {
        let delivery = &found["stories"][0]["subscriptions"][0];
        delivery["state"] == "retrying" && delivery["next"]["at"].is_string()
    });
    mood.store(200, Relaxed);
    post(
        &crew.nodes[second],
        "cluster/drain",
        &json!({"node": format!("node-{first}")}),
    )
    .expect(202);
    receiver.next();
    let nodes = [format!("node-{first}"), format!("node-{second}")];
    everywhere(&crew, "events/e1", |found| {
        let delivery = &found["stories"][0]["subscriptions"][0];
        let attempts = &delivery["attempts"];
        delivery["state"] == "delivered"
            && texts(attempts, "node") == nodes
            && attempts[0]["number"] == 1
            && attempts[1]["number"] == 2
            && texts(attempts, "outcome")[1] == "Success"
    });
    // Recordings of an unavailable node are missing, and reported as such.
    crew.nodes[first].kill();
    let left = &crew.nodes[second];
    let away = format!("node-{first}");
    let stats = get(left, "stats");
    assert_eq!(stats["missing"], json!([away]));
    assert_eq!(stats["totals"]["delivered"], 1);
    let unknown = ask(left, "events/e1").expect(404).json();
    assert!(unknown["detail"].as_str().unwrap().contains(&away), "{unknown}");
    assert_eq!(get(left, "events")["missing"], json!([away]));
    let search = ["event", "search", "--secret", "hush"];
    let said = CliShell::of(left).aside(&search);
    assert!(said.contains("incomplete") && said.contains(&away), "{said}");
    crew.nodes[first].start();
    everywhere(&crew, "events/e1", |found| {
        found.get("missing").is_none() && found["stories"][0]["state"] == "delivered"
    });
    assert_eq!(CliShell::of(&crew.nodes[second]).aside(&search), "");
}

#[test]
fn what_nodes_count_is_added_up() {
    let receiver = TestReceiver::start();
    let Some(crew) = crew(2, "") else { return };
    subscribe(&crew, &receiver.url("/"), json!(null));
    crew.nodes[0].publish("orders", &[event("a1"), event("a2")]);
    crew.nodes[1].publish("orders", &[event("b1")]);
    for _ in 0..3 {
        receiver.next();
    }
    let health = |node: &TestServer| node.health()["deliveries"]["delivered"].as_u64();
    for node in &crew.nodes {
        wait::until("each has delivered its own", || {
            health(node).filter(|count| *count > 0)
        });
    }
    everywhere(&crew, "stats", |found| {
        found["totals"]["published"] == 3
            && found["totals"]["delivered"] == 3
            && found["totals"]["pending"] == 0
            && found["topics"][0]["published"] == 3
            && found["subscriptions"][0]["delivered"] == 3
            && found["latencyMs"]["p99"]
                .as_f64()
                .is_some_and(|millis| millis > 0.0)
    });
    let sum = |list: &Value| -> u64 { list.as_array().unwrap().iter().filter_map(Value::as_u64).sum() };
    everywhere(&crew, "stats/series?minutes=5", |found| {
        sum(&found["published"]) == 3 && sum(&found["delivered"]) == 3
    });
    everywhere(
        &crew,
        "stats/series?minutes=5&subscription=orders/billing",
        |found| sum(&found["delivered"]) == 3,
    );
    everywhere(&crew, "subscription?id=orders/billing", |found| {
        found["delivered"] == 3
    });
    everywhere(&crew, "subscriptions", |found| {
        found["value"][0]["delivered"] == 3
    });
    // Filters are tried on events that any node has accepted.
    let body = json!({"topic": "orders", "filter": {"subjectBeginsWith": "/orders"}});
    for node in &crew.nodes {
        let tried = post(node, "filters/test", &body).expect(200).json();
        let ids: BTreeSet<&str> = texts(&tried["value"], "id").into_iter().collect();
        assert_eq!(ids, BTreeSet::from(["a1", "a2", "b1"]), "{tried}");
    }
}

// Each node gives up its own deliveries; none has written a dead letter yet.
#[test]
fn dead_letters_on_their_way_are_seen_from_everywhere() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let Some(crew) = crew(2, "") else { return };
    let properties = dead_letter_to("local", "dead", json!(null));
    subscribe(&crew, &receiver.url("/"), properties);
    for n in 0..3 {
        crew.nodes[0].publish("orders", &[event(format!("a{n}"))]);
        crew.nodes[1].publish("orders", &[event(format!("b{n}"))]);
    }
    everywhere(&crew, "deadletters/summary", |found| {
        found["value"][0]["pending"] == 6
    });
    for node in &crew.nodes {
        let all = get(node, "deadletters");
        let ids: BTreeSet<&str> = texts(&all["value"], "eventId").into_iter().collect();
        assert_eq!(ids, BTreeSet::from(["a0", "a1", "a2", "b0", "b1", "b2"]), "{all}");
        let (mut seen, mut next) = (Vec::new(), String::new());
        for _ in 0..10 {
            let page = get(node, &format!("deadletters?limit=1{next}"));
            seen.extend(texts(&page["value"], "id").into_iter().map(str::to_owned));
            match page["continuation"].as_str() {
                Some(continuation) => next = format!("&continuation={continuation}"),
                None => break,
            }
        }
        assert_eq!(seen, texts(&all["value"], "id"));
        for id in seen {
            let letter = get(node, &format!("deadletters/{id}"));
            assert_eq!(letter["state"], "pending");
            assert_eq!(letter["event"]["id"], letter["eventId"]);
        }
        let detail = get(node, "subscription?id=orders/billing");
        assert_eq!(detail["deadLettersPending"], 6);
    }
}

#[test]
fn an_endpoint_that_is_left_alone_is_so_everywhere_and_is_let_go_by_any_node() {
    let mood = Arc::new(AtomicU16::new(500));
    let said = mood.clone();
    let receiver = TestReceiver::answering(move |_| ScriptedReply::Status(said.load(Relaxed)));
    let Some(crew) = crew(2, "") else { return };
    subscribe(&crew, &receiver.url("/"), json!(null));
    for n in 0..30 {
        crew.nodes[n % 2].publish("orders", &[event(format!("e{n}"))]);
    }
    everywhere(&crew, "endpoints", |found| {
        let one = &found["value"][0];
        one["state"] != "admitting"
            && one["waiting"] == 30
            && one["until"].is_string()
            && one["subscriptions"][0]["name"] == "billing"
            && one["nodes"].as_array().map(Vec::len) == Some(2)
    });
    everywhere(&crew, "stats", |found| {
        found["sick"].as_array().map(Vec::len) == Some(1) && found["sick"][0]["waiting"] == 30
    });
    everywhere(&crew, "subscription?id=orders/billing", |found| {
        found["state"] != "admitting" && found["retrying"].as_u64() > Some(0) && found["until"].is_string()
    });
    mood.store(200, Relaxed);
    let endpoint = get(&crew.nodes[0], "endpoints")["value"][0]["endpoint"].take();
    let ended = post(&crew.nodes[0], "endpoints/admit", &json!({"endpoint": endpoint}));
    assert_eq!(
        ended.expect(200).json(),
        json!({"endpoint": endpoint, "ended": true})
    );
    everywhere(&crew, "endpoints", |found| {
        let one = &found["value"][0];
        one["state"] == "admitting" && one.get("until").is_none()
    });
}

/// A stream of server-sent events.
struct NodeEventStream(BufReader<TcpStream>);

impl NodeEventStream {
    #[track_caller]
    fn begin(node: &TestServer, method: &str, path: &str, body: &str) -> NodeEventStream {
        let stream = TcpStream::connect(node.http).expect("the node listens");
        stream
            .set_read_timeout(Some(wait::PATIENCE))
            .expect("it can have one");
        let mut reader = BufReader::new(stream);
        let head = format!(
            "{method} /postrider/v1/{path} HTTP/1.1\r\nhost: {}\r\n{}: {}\r\ncontent-length: {}\r\n\r\n{body}",
            node.http,
            AUTHORIZATION.0,
            AUTHORIZATION.1,
            body.len()
        );
        reader
            .get_mut()
            .write_all(head.as_bytes())
            .expect("it can be written");
        let mut following = NodeEventStream(reader);
        let first = following.line();
        assert!(first.starts_with("HTTP/1.1 200"), "{first}");
        while !following.line().is_empty() {}
        following
    }

    #[track_caller]
    fn line(&mut self) -> String {
        let mut line = String::new();
        let read = self.0.read_line(&mut line).expect("a line comes");
        assert!(read > 0, "the stream ended");
        line.trim_end_matches(['\r', '\n']).to_owned()
    }

    /// Name and data of the next event. Signs of life are skipped.
    #[track_caller]
    fn next(&mut self) -> (String, Value) {
        let mut name = String::new();
        let deadline = wait::now() + wait::PATIENCE;
        loop {
            assert!(wait::now() < deadline, "nothing comes");
            let line = self.line();
            if let Some(event) = line.strip_prefix("event: ") {
                name = event.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                return (name, serde_json::from_str(data).expect("data is JSON"));
            }
        }
    }
}

#[test]
fn whoever_watches_sees_what_happens_at_any_node() {
    let receiver = TestReceiver::start();
    let Some(crew) = crew(1, "") else { return };
    subscribe(&crew, &receiver.url("/"), json!(null));
    let (owner, other) = owner(&crew);
    // Each node is watched, and each accepts something; only one of them attempts.
    for (watching, accepting) in [(owner, other), (other, owner), (other, other)] {
        let mut following =
            NodeEventStream::begin(&crew.nodes[watching], "GET", "events/stream?topic=orders", "");
        let id = format!("w{watching}{accepting}");
        crew.nodes[accepting].publish("orders", &[event(&id)]);
        let mut seen = Vec::new();
        while seen.len() < 2 {
            let (what, line) = following.next();
            // News of the previous event may arrive only now.
            if line["id"] != id {
                continue;
            }
            assert_eq!(
                (&line["topic"], &line["type"]),
                (&json!("orders"), &json!("Orders.Created"))
            );
            if what == "attempted" {
                assert_eq!(
                    (&line["subscription"], &line["state"]),
                    (&json!("billing"), &json!("delivered"))
                );
            }
            seen.push(what);
        }
        seen.sort();
        assert_eq!(seen, ["accepted", "attempted"]);
    }
}

// The listen session is at one node; both nodes have deliveries for it, and one is too large for a
// single message between nodes.
#[test]
fn a_listener_at_one_node_gets_what_any_node_delivers() {
    // The command finds the generated secret, which the nodes share.
    let Some(crew) = TestCluster::start(&ClusterPlan {
        partitions: 2,
        ..ClusterPlan::default()
    }) else {
        return;
    };
    crew.nodes[0].put_topic("orders");
    let listener = ListenProcess::start(
        &crew.nodes[1],
        &["--topic", "orders", "--name", "ear", "--output", "json"],
    );
    wait::until("the other node knows the listener", || {
        let path = format!("/topics/orders/eventSubscriptions/ear?{EDGE_VERSION}");
        (crew.nodes[0].send("GET", &path, &[], "").status == 200).then_some(())
    });
    crew.nodes[0].publish("orders", &[event("there")]);
    crew.nodes[1].publish("orders", &[event("here")]);
    let mut large = event("large");
    large["data"] = json!("x".repeat(1_000_000));
    crew.nodes[0].publish("orders", &[large]);
    let printed = listener.prints(3);
    let said = |id: &str| printed.iter().any(|line| line.contains(&format!("\"{id}\"")));
    assert!(
        ["here", "there", "large"].into_iter().all(said),
        "{} lines",
        printed.len()
    );
    for (node, count) in [(0, 2), (1, 1)] {
        crew.nodes[node].counted("/deliveries/delivered", count);
    }
}

// A listen session's answer may come to any node, as behind a balancer; it counts like a webhook's.
#[test]
fn a_listener_answers_through_any_node() {
    let Some(crew) = crew(2, "") else { return };
    crew.nodes[0].put_topic("orders");
    let mut listener = NodeEventStream::begin(
        &crew.nodes[0],
        "POST",
        "listen",
        "{\"topic\":\"orders\",\"name\":\"ear\"}",
    );
    let (what, made) = listener.next();
    assert_eq!((what.as_str(), &made["name"]), ("subscription", &json!("ear")));
    let token = made["token"].as_str().unwrap().to_owned();
    wait::until("the other node knows the listener", || {
        let found = get(&crew.nodes[1], "subscriptions");
        (found["total"] == 1).then_some(())
    });
    for (n, status) in [(0, 200), (1, 200), (1, 400)] {
        let id = format!("e-{n}-{status}");
        crew.nodes[n].publish("orders", &[event(&id)]);
        let (what, delivery) = listener.next();
        assert_eq!(what, "delivery");
        assert!(delivery["body"].as_str().unwrap().contains(&id), "{delivery}");
        assert_eq!(delivery["headers"]["aeg-event-type"], "Notification");
        let number = delivery["delivery"].as_u64().unwrap();
        let path = format!("listen/{token}/{number}");
        post(&crew.nodes[1], &path, &json!({"status": status})).expect(204);
        post(&crew.nodes[1], &path, &json!({"status": status})).expect(404);
        everywhere(&crew, &format!("events/{id}"), |found| {
            let attempts = &found["stories"][0]["subscriptions"][0]["attempts"];
            attempts[0]["status"] == status && attempts[0]["node"] == format!("node-{n}")
        });
    }
    post(&crew.nodes[1], "listen/nonsense/1", &json!({"status": 200})).expect(404);
    drop(listener);
    everywhere(&crew, "subscriptions", |found| found["total"] == 0);
}

// The node of the listen session is killed; the others delete its subscription.
#[test]
fn a_listener_of_a_dead_node_leaves_nothing_behind() {
    let Some(mut crew) = crew(2, "") else { return };
    crew.nodes[0].put_topic("orders");
    let _listener = NodeEventStream::begin(&crew.nodes[0], "POST", "listen", "{\"topic\":\"orders\"}");
    let mut kept = NodeEventStream::begin(
        &crew.nodes[1],
        "POST",
        "listen",
        "{\"topic\":\"orders\",\"name\":\"kept\"}",
    );
    assert_eq!(kept.next().0, "subscription");
    everywhere(&crew, "subscriptions", |found| found["total"] == 2);
    crew.nodes[0].kill();
    everywhere(&crew, "subscriptions", |found| {
        found["total"] == 1 && found["value"][0]["name"] == "kept"
    });
    // A node that comes back does not treat the listen sessions of others as its own.
    crew.nodes[0].start();
    crew.shared_evenly();
    crew.nodes[0].publish("orders", &[event("e1")]);
    let (what, delivery) = kept.next();
    assert_eq!(what, "delivery", "{delivery}");
}
