//! Anonymous clients, and clients with a single key, that use up shared resources.

use crate::client::TestConnection;
use crate::receiver::TestReceiver;
use crate::server::{EDGE_VERSION, ServerSetup, event};
use crate::wait;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// Whether the server has closed the connection.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    match stream.read(&mut [0; 1]) {
        Ok(count) => count == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn a_newcomer_need_not_wait_for_idle_strangers() {
    let server =
        ServerSetup::config("limits.connections_max = 40\nlimits.connections_per_address_max = 30\n").start();
    let mut idle: Vec<_> = (0..60)
        .map(|_| TcpStream::connect(server.http).expect("the server listens"))
        .collect();
    // At the limit of connections, a new one replaces an idle one; those in use stay.
    let mut used = server.connect();
    for _ in 0..50 {
        used.send("GET", "/healthz/live", &[], b"")
            .expect("it stays")
            .expect(200);
        idle.push(TcpStream::connect(server.http).expect("the server listens"));
    }
    let health = server.health();
    let clients = &health["clients"];
    assert_eq!(clients["connectionsMax"], 40);
    assert!(clients["connections"].as_u64().unwrap() <= 30, "{clients}");
    assert!(
        clients["idleConnectionsClosed"].as_u64().unwrap() >= 80,
        "{clients}"
    );
    let mut closed = || idle.iter_mut().map(is_closed).filter(|closed| *closed).count();
    assert!(wait::is_true_in_time(|| closed() >= 80));
    let lines = server
        .log()
        .iter()
        .filter(|line| line.contains("idle connection closed"))
        .count();
    assert!((1..=5).contains(&lines), "{lines} lines about one thing");
    let metrics = server.send("GET", "/metrics", &[], "").expect(200);
    assert!(
        metrics
            .text()
            .contains("postrider_client_limits_reached_total{limit=\"idle_connections\"}")
    );
}

#[test]
fn bodies_that_do_not_come_stop_nobody() {
    let config = "limits.body_stall_max = \"2s\"\nlimits.publish_body_bytes_max = 8000000\n";
    let server = ServerSetup::config(config).start();
    server.put_topic("orders");
    server.put_topic("other");
    let head = format!(
        "POST /topics/orders/events?{EDGE_VERSION} HTTP/1.1\r\nhost: localhost\r\n\
         content-type: application/json\r\ncontent-length: 1500000\r\n\r\n"
    );
    let mut stalled: Vec<TestConnection> = (0..135).map(|_| server.connect()).collect();
    for one in &mut stalled {
        one.write(head.as_bytes()).expect("the server reads");
    }
    server.publish("orders", &[event("a")]);
    // These connections send as much as they may and stop before the end.
    for one in stalled.iter_mut().take(8) {
        let _ = one.write(&vec![b' '; 1_400_000]);
    }
    server.publish("other", &[event("a")]);
    let answers: Vec<u16> = stalled
        .iter_mut()
        .map(|one| one.answer("POST").map_or(0, |answer| answer.status))
        .collect();
    let timed_out = answers.iter().filter(|status| **status == 408).count();
    assert!(timed_out >= 127, "{answers:?}");
    assert!(server.health()["clients"]["bodiesCut"].as_u64().unwrap() >= 127);
    server.logged(&["did not keep coming", "127.0.0.1"]);
}

#[test]
fn a_response_that_is_not_read_is_cut() {
    let server = ServerSetup::config("limits.response_stall_max = \"1s\"\n").start();
    let mut streams: Vec<TestConnection> = (0..5).map(|_| server.connect()).collect();
    let request = "GET /docs/api HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(400);
    for one in &mut streams {
        one.write(request.as_bytes()).expect("the server reads");
    }
    server.counted("/clients/responsesCut", 5);
    server.counted("/clients/connections", 1);
    server.logged(&["did not read its response", "127.0.0.1"]);
}

#[test]
fn a_reader_does_not_take_the_streams_of_the_owner() {
    let clients = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n\
                   [[client]]\nid = \"eye\"\nsecret = \"glance\"\nrole = \"reader\"\n";
    let server = ServerSetup::config(clients).start();
    let open = |secret: &str| {
        let address = server.http;
        let mut stream =
            TestConnection::open_within(address, Duration::from_secs(60)).expect("the server listens");
        let bearer = format!("Bearer {secret}");
        let answer = stream.send(
            "GET",
            "/postrider/v1/events/stream",
            &[("authorization", &bearer)],
            b"",
        );
        (stream, answer.expect("an answer").status)
    };
    let streams: Vec<_> = (0..70).map(|_| open("glance")).collect();
    let statuses: Vec<u16> = streams.iter().map(|(_, status)| *status).collect();
    assert_eq!(statuses[..16], [200; 16]);
    assert_eq!(statuses[16..], [429; 54]);
    assert_eq!(open("hush").1, 200);
    assert_eq!(server.health()["clients"]["streamsRefused"], 54);
}

/// A filter that scans a long text once for each of its conditions.
fn costly_filter(conditions: usize) -> Value {
    let condition = |n: usize| json!({"operatorType": "StringContains", "key": "data.text", "values": ["end", format!("absent {n}")]});
    let conditions: Vec<Value> = (0..conditions).map(condition).collect();
    json!({"filter": {"advancedFilters": conditions}})
}

fn long_event(id: &str, length: usize) -> Value {
    let mut event = event(id);
    event["data"] = json!({"text": "x".repeat(length) + "end"});
    event
}

#[test]
fn events_that_cost_filters_too_much_are_refused_and_nothing_else_is() {
    let receiver = TestReceiver::start();
    // The smallest permitted budget: the largest event, once.
    let server = ServerSetup::config("limits.filter_bytes_per_event_max = 1049600\n").start();
    server.put_topic("orders");
    for n in 0..5 {
        server.subscribe("orders", &format!("all{n}"), &receiver.url("/"), costly_filter(5));
    }
    let publish = |events: &[Value]| server.edge("POST", "/topics/orders/events", &json!(events));
    // Each condition of each subscription scans the event, which is parsed and case-folded once.
    let refused = publish(&[long_event("short", 1), long_event("costly", 60_000)]).expect(413);
    for told in ["at index 1", "1049600 bytes", "limits.filter_bytes_per_event_max"] {
        assert!(refused.text().contains(told), "{}", refused.text());
    }
    let several: Vec<Value> = (0..6)
        .map(|n| long_event(&format!("several{n}"), 29_000))
        .collect();
    let refused = publish(&several).expect(413);
    for told in ["event at index 5", "4198400 bytes", "fewer events in one request"] {
        assert!(refused.text().contains(told), "{}", refused.text());
    }
    publish(&several[..2]).expect(200);
    publish(&several[2..4]).expect(200);
    server.counted("/deliveries/delivered", 4 * 5);
    assert!(
        receiver
            .take_received()
            .iter()
            .all(|one| !one.text().contains("costly"))
    );
}

#[test]
fn the_server_is_live_while_it_evaluates_costly_filters() {
    let receiver = TestReceiver::start();
    let server = ServerSetup::config("threads = 1\n").start();
    server.put_topic("orders");
    // The event is small enough to be evaluated where it was read; its conditions are too many.
    server.subscribe("orders", "all", &receiver.url("/"), costly_filter(12));
    let answered = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            server.publish("orders", &[long_event("costly", 1_000_000)]);
            answered.store(true, SeqCst);
        });
        let mut live = server.connect();
        let mut before = 0;
        // If the only worker thread were busy, none after the first would be answered before the
        // publish request.
        while !answered.load(SeqCst) {
            let answer = live.send("GET", "/healthz/live", &[], b"");
            answer.expect("it stays").expect(200);
            before += 1;
        }
        assert!(before > 1, "{before} answers while filters were evaluated");
    });
}
