//! Retries after failed attempts.

use crate::clock_lab::ClockLab;
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use serde_json::json;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Long enough to write settled attempts to disk, which takes at most a tenth of a second, and to
/// notice a retry that comes too early.
const MOMENT: Duration = Duration::from_millis(400);

fn is(delivery: &ReceivedDelivery, id: &str) -> bool {
    delivery.ids() == [id]
}

#[test]
fn a_retry_comes_when_it_is_due_with_its_count_even_if_the_server_was_killed_meanwhile() {
    // The first attempt of "a" fails; everything else succeeds.
    let failed = AtomicBool::new(false);
    let receiver = TestReceiver::answering(move |delivery| {
        let fail = is(delivery, "a") && !failed.swap(true, Relaxed);
        ScriptedReply::Status(if fail { 500 } else { 200 })
    });
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("a")]);
    let first = receiver.next();
    assert_eq!(first.header("aeg-delivery-count"), Some("0"));
    server.counted("/deliveries/attemptsFailed", 1);
    receiver.nothing_within(MOMENT);

    server.kill();
    server.start();
    // Other events are delivered while "a" waits.
    server.publish("orders", &[event("b")]);
    let other = receiver.next();
    assert!(is(&other, "b"), "{other:?}");
    receiver.nothing_within(MOMENT);
    assert_eq!(server.health()["deliveries"]["attempts"], 1);

    // After a 500 the schedule of 2021 waits 10 seconds plus at most a tenth.
    let second = receiver.next();
    assert!(is(&second, "a"), "{second:?}");
    assert_eq!(second.header("aeg-delivery-count"), Some("1"));
    let waited = second.at - first.at;
    assert!(
        (Duration::from_millis(9_900)..Duration::from_secs(13)).contains(&waited),
        "{waited:?}"
    );
    server.counted("/deliveries/delivered", 2);
    assert_eq!(
        server.health()["deliveries"]["attemptsFailed"],
        0,
        "since the restart"
    );
}

#[test]
fn a_busy_endpoint_is_not_asked_again_at_once() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(503));
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("a")]);
    receiver.next();
    server.counted("/deliveries/attemptsFailed", 1);
    receiver.nothing_within(MOMENT);
    let deliveries = &server.health()["deliveries"];
    assert_eq!(
        (&deliveries["attempts"], &deliveries["delivered"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(deliveries["dropped"], json!({}), "it still waits");
}

#[test]
fn events_that_cannot_succeed_are_dropped_and_counted_by_reason() {
    let receiver =
        TestReceiver::answering(|delivery| ScriptedReply::Status(delivery.path[1..].parse().unwrap()));
    let server = TestServer::start_plain();
    for status in [400, 401, 403, 404, 413] {
        let topic = format!("t{status}");
        server.put_topic(&topic);
        server.subscribe(
            &topic,
            "billing",
            &receiver.url(&format!("/{status}")),
            json!(null),
        );
        server.publish(&topic, &[event("a")]);
        receiver.next();
    }
    server.counted("/deliveries/dropped/UndeliverableDueToHttpBadRequest", 1);
    server.counted("/deliveries/dropped/UndeliverableDueToClientError", 4);
    server.logged(&[
        "WARN",
        "events dropped",
        "ids=\"a\"",
        "UndeliverableDueToHttpBadRequest",
    ]);
    assert_eq!(server.health()["deliveries"]["attempts"], 5);
    receiver.nothing_within(Duration::from_millis(50));
}

#[test]
fn the_last_attempt_that_the_policy_allows_is_the_last() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe(
        "orders",
        "billing",
        &receiver.url("/"),
        json!({"retryPolicy": {"maxDeliveryAttempts": 1}}),
    );
    server.publish("orders", &[event("a"), event("b")]);
    server.counted("/deliveries/dropped/MaxDeliveryAttemptsExceeded", 2);
    server.stop();
    server.start();
    assert_eq!(receiver.take_received().len(), 2);
    receiver.nothing_within(Duration::from_millis(100));
    assert_eq!(server.health()["deliveries"]["attempts"], 0);
}

#[test]
fn every_success_status_ends_it_and_a_broken_connection_does_not() {
    let receiver = TestReceiver::answering(|delivery| match delivery.path.as_str() {
        "/reset" => ScriptedReply::Reset,
        "/garbage" => ScriptedReply::Bytes(b"SSH-2.0-OpenSSH\r\n".to_vec()),
        "/half" => ScriptedReply::Bytes(b"HTTP/1.1 200 OK\r\ncontent-le".to_vec()),
        status => ScriptedReply::Status(status[1..].parse().unwrap()),
    });
    let server = TestServer::start_plain();
    server.put_topic("orders");
    for path in [
        "/200", "/201", "/202", "/203", "/204", "/205", "/301", "/500", "/reset", "/garbage", "/half",
    ] {
        server.subscribe(
            "orders",
            &format!("to-{}", &path[1..]),
            &receiver.url(path),
            json!(null),
        );
    }
    server.publish("orders", &[event("a")]);
    server.counted("/deliveries/delivered", 5);
    server.counted("/deliveries/attemptsFailed", 6);
    assert_eq!(server.health()["deliveries"]["dropped"], json!({}));
}

#[test]
fn a_connection_that_is_closed_between_two_deliveries_costs_nothing() {
    // The receiver promises to keep the connection open, and closes it.
    let count = AtomicU32::new(0);
    let receiver = TestReceiver::answering(move |_| {
        count.fetch_add(1, Relaxed);
        ScriptedReply::Bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec())
    });
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    for n in 0..20 {
        server.publish("orders", &[event(n.to_string())]);
        receiver.next();
    }
    server.counted("/deliveries/delivered", 20);
    assert_eq!(server.health()["deliveries"]["attemptsFailed"], 0);
}

#[test]
fn a_batch_answered_413_comes_again_at_once_in_halves() {
    // The receiver accepts at most two events at once, and one of them never.
    let receiver = TestReceiver::answering(|delivery| {
        let ids = delivery.ids();
        ScriptedReply::Status(if ids.len() > 2 || ids.contains(&"e4".to_owned()) {
            413
        } else {
            200
        })
    });
    let batches = json!({"destination": {"properties": {"maxEventsPerBatch": 10}}});
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock("").profile("cloud-2021"),
        receiver,
        batches,
    );
    let events: Vec<_> = (0..8).map(|n| event(format!("e{n}"))).collect();
    lab.server.publish("orders", &events);
    let arrivals = lab.at_once();
    let mut sizes: Vec<usize> = arrivals.iter().map(|one| one.delivery.ids().len()).collect();
    sizes.sort();
    sizes.reverse();
    // Which of the pairs meet depends on the order of claims.
    assert_eq!(sizes[..3], [8, 4, 4]);
    assert!(
        sizes[3..].iter().all(|size| *size <= 2) && sizes.contains(&2),
        "{sizes:?}"
    );
    assert!(
        arrivals.iter().all(|one| one.count() == 0),
        "the same attempt goes on"
    );
    let attempts = arrivals.len() as u64;
    assert_eq!((lab.count("attempts"), lab.count("delivered")), (attempts, 7));
    assert_eq!(lab.dropped(), json!({"UndeliverableDueToClientError": 1}));
    assert_eq!(lab.pass(24 * 3600), 0);
}
