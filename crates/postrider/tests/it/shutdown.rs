//! Stopping: acknowledged events are not lost, deliveries are not repeated.

use crate::client::TestConnection;
use crate::durability::{DurabilityLoad, ReproducibleRandom};
use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, JSON, ServerSetup, TestServer, event, slow_tests};
use crate::wait;
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

fn held_up(gate: &Arc<ReplyGate>) -> TestReceiver {
    let gate = gate.clone();
    TestReceiver::answering(move |_| {
        gate.wait();
        ScriptedReply::Status(200)
    })
}

#[test]
fn an_attempt_under_way_may_end_and_is_not_repeated() {
    let gate = Arc::new(ReplyGate::default());
    let receiver = held_up(&gate);
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("slow")]);
    assert_eq!(receiver.next().ids(), ["slow"]);

    let mut before = server.connect();
    server.terminate();
    server.logged(&["shutting down"]);
    wait::until("no new connections", || {
        crate::client::TestConnection::open(server.http)
            .is_err()
            .then_some(())
    });
    // A connection from before gets a refusal, or finds itself closed.
    if let Ok(answer) = before.send(
        "POST",
        "/topics/orders/events",
        &[JSON],
        json!([event("late")]).to_string().as_bytes(),
    ) {
        answer.expect(503);
    }
    gate.open();
    assert_eq!(server.ended().code(), Some(0));

    server.start();
    assert_eq!(server.health()["store"]["redelivered"], 0);
    server.publish("orders", &[event("next")]);
    assert_eq!(receiver.next().ids(), ["next"]);
    server.counted("/deliveries/delivered", 1);
    assert_eq!(server.health()["deliveries"]["attempts"], 1);
}

#[test]
fn an_attempt_that_outlasts_the_grace_is_made_again() {
    let gate = Arc::new(ReplyGate::default());
    let receiver = held_up(&gate);
    let mut server = ServerSetup::config("shutdown.grace = \"100ms\"").start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("slow")]);
    assert_eq!(receiver.next().header("aeg-delivery-count"), Some("0"));
    server.stop();
    gate.open();
    server.start();
    let again = receiver.next();
    assert_eq!(
        (again.ids(), again.header("aeg-delivery-count")),
        (vec!["slow".to_owned()], Some("0"))
    );
}

#[test]
fn nothing_acknowledged_is_lost_when_the_server_is_stopped_under_load() {
    let receiver = TestReceiver::start();
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let load = DurabilityLoad::new(&server);
    std::thread::scope(|scope| {
        for publisher in 0..4 {
            let load = &load;
            scope.spawn(move || load.publish(publisher));
        }
        for _ in 0..3 {
            load.progress(50);
            server.stop();
            server.start();
        }
        load.progress(10);
        load.stop();
    });
    receiver.all_of(&load.ids.into_inner().expect("no panic holds it"));
    assert_eq!(server.health()["store"]["corruptRecords"], 0);
}

/// Subscriptions are created and deleted under load, on endpoints that answer, fail and hang, when
/// the server is told to stop.
#[test]
fn a_stop_ends_while_subscriptions_are_made_and_deleted_under_load() {
    let gate = Arc::new(ReplyGate::default());
    let receivers = [
        TestReceiver::start(),
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        held_up(&gate),
    ];
    let urls: Vec<String> = receivers.iter().map(|receiver| receiver.url("/")).collect();
    let mut server = ServerSetup::config("shutdown.grace = \"100ms\"").start();
    server.put_topic("orders");
    let load = DurabilityLoad::new(&server);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for publisher in 0..2 {
            let load = &load;
            scope.spawn(move || load.publish(publisher));
        }
        for churner in 0..2 {
            let (stop, urls, address) = (&stop, &urls, server.http);
            scope.spawn(move || churn(address, churner, urls, stop));
        }
        for _ in 0..if slow_tests() { 100 } else { 5 } {
            load.progress(50);
            server.stop();
            server.start();
        }
        load.stop();
        stop.store(true, Relaxed);
    });
    gate.open();
    server.counted("/tasks/ofRemovedSubscriptions", 0);
}

fn churn(address: SocketAddr, churner: u64, urls: &[String], stop: &AtomicBool) {
    let mut chance = ReproducibleRandom(churner);
    while !stop.load(Relaxed) {
        let Ok(mut connection) = TestConnection::open(address) else {
            std::thread::yield_now();
            continue;
        };
        loop {
            let name = format!("churn{churner}-{}", chance.below(4));
            let path = format!("/topics/orders/eventSubscriptions/{name}?{EDGE_VERSION}");
            let url = &urls[chance.below(urls.len() as u64) as usize];
            let destination = json!({"endpointType": "WebHook", "properties": {"endpointUrl": url}});
            let body = json!({"properties": {"destination": destination}}).to_string();
            let sent = match chance.below(5) {
                0 | 1 => connection.send("DELETE", &path, &[], b""),
                _ => connection.send("PUT", &path, &[JSON], body.as_bytes()),
            };
            if sent.is_err() || stop.load(Relaxed) {
                break;
            }
        }
    }
}

#[test]
fn an_interrupt_from_the_keyboard_stops_it_too_and_idle_connections_do_not_hold_it_up() {
    // Waiting for the end of the grace period would take longer than the test.
    let mut server = ServerSetup::config("shutdown.grace = \"10m\"").start();
    let _idle: Vec<_> = (0..5).map(|_| server.connect()).collect();
    let mut used = server.connect();
    used.send("GET", "/healthz", &[], b"").unwrap().expect(200);
    server.interrupt();
    assert_eq!(server.ended().code(), Some(0));
}

// The signal used to wait for the end of the start, which may never come.
#[test]
fn a_server_that_is_still_starting_can_be_stopped() {
    let nats = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = nats.local_addr().expect("it is bound");
    let mut server = TestServer::start_plain();
    server.stop();
    server.configure(format!(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nurls = [\"nats://{address}\"]\n"
    ));
    server.launch();
    // A NATS server that never answers.
    let _connection = nats.accept().expect("a connection");
    server.terminate();
    assert_eq!(server.ended().code(), Some(0), "{:#?}", server.log());
    server.logged(&["stopped before it was ready"]);
}

#[test]
fn a_second_server_on_the_same_data_or_port_refuses_to_start() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let before = std::fs::read(server.ca()).unwrap();
    let second = server.start_second("127.0.0.1:0", "127.0.0.1:0");
    let told = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{told}");
    assert!(told.contains(server.data_dir().to_str().unwrap()), "{told}");
    assert!(told.contains("in use"), "{told}");

    let setup = ServerSetup {
        flags: Some(vec![format!("--http={}", server.http), "--https=off".into()]),
        ..ServerSetup::default()
    };
    let told = setup.refusal();
    assert!(
        told.contains(&format!("listening on {}", server.http)) && told.contains("in use"),
        "{told}"
    );

    server.put_topic("still-there");
    assert_eq!(std::fs::read(server.ca()).unwrap(), before);
}
