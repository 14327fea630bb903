//! Failures of one endpoint do not affect others.

use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, JSON, ServerSetup, TestServer, event, slow_tests};
use crate::wait;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::TcpListener;

/// URL of an address without a listener.
fn refused_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    format!("http://{address}/")
}

#[test]
fn a_black_hole_and_a_refused_port_do_not_delay_a_healthy_endpoint() {
    let black_hole = TestReceiver::answering(|_| ScriptedReply::Silence);
    let healthy = TestReceiver::start();
    // The clock stands still, so attempts at the black hole cannot time out.
    let server = ServerSetup::test_clock("").start();
    server.put_topic("orders");
    server.subscribe("orders", "hole", &black_hole.url("/"), json!(null));
    server.subscribe("orders", "refused", &refused_url(), json!(null));
    server.subscribe("orders", "healthy", &healthy.url("/"), json!(null));
    let mut ids = BTreeSet::new();
    for request in 0..20 {
        let events: Vec<Value> = (0..100).map(|n| event(format!("{request}-{n}"))).collect();
        server.publish("orders", &events);
        ids.extend(
            events
                .iter()
                .map(|e| e["id"].as_str().expect("it has one").to_owned()),
        );
    }
    healthy.all_of(&ids);
    assert!(!black_hole.take_received().is_empty(), "it was tried");

    // A subscription created meanwhile on the same topic is not delayed either.
    let late = TestReceiver::start();
    server.subscribe("orders", "late", &late.url("/"), json!(null));
    server.publish("orders", &[event("late")]);
    assert_eq!(late.next().ids(), ["late"]);
}

#[test]
fn a_backlog_behind_a_dead_endpoint_stays_on_disk() {
    let black_hole = TestReceiver::answering(|_| ScriptedReply::Silence);
    let healthy = TestReceiver::start();
    let mut server = TestServer::start_plain();
    for (topic, receiver) in [("dead", &black_hole), ("alive", &healthy)] {
        server.put_topic(topic);
        server.subscribe(topic, "all", &receiver.url("/"), json!(null));
    }
    let mut sample = event("e");
    sample["data"] = json!("x".repeat(1024 - sample.to_string().len()));
    let body = Value::Array(vec![sample; 1000]).to_string();
    let mut connection = server.connect();
    let requests = if slow_tests() { 1000 } else { 100 };
    for _ in 0..requests {
        let target = format!("/topics/dead/events?{EDGE_VERSION}");
        connection
            .send("POST", &target, &[JSON], body.as_bytes())
            .unwrap()
            .expect(200);
    }
    let megabytes_max = if slow_tests() { 300 } else { 200 };
    let megabytes = server.resident() >> 20;
    assert!(
        megabytes < megabytes_max,
        "{megabytes} MB with {requests} 000 events undelivered"
    );
    server.publish("alive", &[event("e1")]);
    assert_eq!(healthy.next().ids(), ["e1"]);

    server.kill();
    server.start();
    server.publish("alive", &[event("e2")]);
    let next = healthy.next();
    // The last delivery before the kill may not have been recorded.
    let next = if next.ids() == ["e1"] {
        healthy.next()
    } else {
        next
    };
    assert_eq!(next.ids(), ["e2"]);
    let megabytes = server.resident() >> 20;
    assert!(megabytes < megabytes_max, "{megabytes} MB after the restart");
}

/// Receivers that accept connections and never read the bodies.
#[test]
fn large_events_for_many_receivers_that_read_nothing_are_in_memory_once() {
    let unread = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = unread.local_addr().expect("it is bound");
    let healthy = TestReceiver::start();
    let server = ServerSetup::config("limits.in_flight_bytes_max = 67108864").start();
    server.put_topic("orders");
    for n in 0..40 {
        let url = format!("http://{address}/{n}");
        server.subscribe("orders", &format!("unread{n}"), &url, json!(null));
    }
    server.subscribe("orders", "healthy", &healthy.url("/"), json!(null));
    let before = server.resident();
    let mut ids = BTreeSet::new();
    for n in 0..20 {
        let mut large = event(format!("large-{n}"));
        large["data"] = json!("x".repeat(1_000_000));
        server.publish("orders", &[large]);
        ids.insert(format!("large-{n}"));
    }
    healthy.all_of(&ids);
    let health = server.health();
    assert!(
        health["deliveries"]["inFlightBytes"].as_u64() <= Some(67_108_864),
        "{health}"
    );
    // 40 receivers with 16 requests each: separate copies would take 640 MB.
    let grown = server.resident().saturating_sub(before) >> 20;
    assert!(grown < 250, "{grown} MB more: {health}");
}

// The budget of bytes in flight is used up by receivers that never answer, each with an event of
// its own. A healthy receiver waits at most until the first attempts at the others have ended.
#[test]
fn a_healthy_endpoint_gets_its_event_within_the_first_attempts_of_dead_ones() {
    const DEAD: usize = 200;
    let dead = TestReceiver::answering(|_| ScriptedReply::Silence);
    let healthy = TestReceiver::start();
    let server = ServerSetup::test_clock("limits.in_flight_bytes_max = 16777216\n").start();
    server.put_topic("orders");
    let only = |event_type: &str| json!({"filter": {"includedEventTypes": [event_type]}});
    let large = |event_type: &str| {
        let mut event = event(event_type);
        event["eventType"] = json!(event_type);
        event["data"] = json!("x".repeat(200_000));
        event
    };
    for n in 0..DEAD {
        let name = format!("dead{n}");
        server.subscribe("orders", &name, &dead.url(&format!("/{n}")), only(&name));
    }
    server.subscribe("orders", "healthy", &healthy.url("/"), only("healthy"));
    for n in 0..DEAD {
        server.publish("orders", &[large(&format!("dead{n}"))]);
    }
    server.publish("orders", &[large("healthy")]);
    wait::until("the budget is used up", || {
        let deliveries = server.health()["deliveries"].clone();
        let bytes = |name: &str| deliveries[name].as_u64().expect("a number");
        assert!(
            bytes("inFlightBytes") <= bytes("inFlightBytesMax"),
            "{deliveries}"
        );
        (bytes("inFlightWaiting") > 100).then_some(())
    });
    wait::until("the healthy endpoint has its event", || {
        let arrived = healthy.take_received();
        if arrived.is_empty() {
            server.advance(&json!({"by": "10s"}));
        }
        (!arrived.is_empty()).then_some(())
    });
    let attempts = server.health()["deliveries"]["attempts"]
        .as_u64()
        .expect("a number");
    assert!(attempts <= 2 * DEAD as u64, "{attempts} attempts went before it");
}

#[test]
fn subscriptions_that_share_an_endpoint_share_it_fairly() {
    let receiver = TestReceiver::start();
    let server = TestServer::start_plain();
    for topic in ["busy", "quiet"] {
        server.put_topic(topic);
        server.subscribe(topic, topic, &receiver.url("/"), json!(null));
    }
    let many: Vec<Value> = (0..3000).map(|n| event(format!("busy-{n}"))).collect();
    for part in many.chunks(1000) {
        server.publish("busy", part);
    }
    server.publish("quiet", &[event("quiet")]);
    let mut before = 0;
    while receiver.next().ids() != ["quiet"] {
        before += 1;
    }
    assert!(before < 2900, "{before} of 3000 went before it");
}

#[test]
fn idle_strangers_leave_file_descriptors_to_others() {
    let receiver = TestReceiver::start();
    let setup = ServerSetup {
        open_files_max: Some(64),
        ..ServerSetup::default()
    };
    let server = setup.start();
    server.put_topic("orders");
    server.subscribe("orders", "all", &receiver.url("/"), json!(null));
    let idle: Vec<_> = (0..100).map(|_| server.connect()).collect();
    server.logged(&["limits.connections_max is lowered to 32"]);
    server.logged(&["idle connection closed", "127.0.0.1"]);
    server.publish("orders", &[event("e1")]);
    assert_eq!(receiver.next().ids(), ["e1"]);
    drop(idle);
    let complaints = server
        .log()
        .iter()
        .filter(|line| line.contains("cannot accept"))
        .count();
    assert!(complaints < 20, "{complaints} lines about one thing");
}
