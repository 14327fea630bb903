//! Log lines of failures: one for each, with all that is needed to investigate, and never a flood.

use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, event};
use serde_json::{Value, json};

/// Number in a field of a text line.
#[track_caller]
fn number(line: &str, field: &str) -> u64 {
    let (_, rest) = line
        .split_once(&format!(" {field}="))
        .unwrap_or_else(|| panic!("no {field} in {line}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|e| panic!("{e}: {line}"))
}

#[test]
fn a_failed_attempt_is_one_line_that_says_what_follows_and_nothing_secret() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(503));
    let server = ServerSetup::test_clock("").start();
    server.put_topic("orders");
    server.subscribe(
        "orders",
        "billing",
        &receiver.url("/hook?code=hidden"),
        json!(null),
    );
    server.publish("orders", &[event("e-1")]);
    let line = server.logged(&["attempt failed"]);
    let due = server.now() + std::time::Duration::from_secs(30);
    let endpoint = receiver.url("/hook");
    for part in [
        "WARN",
        "topic=orders",
        "subscription=billing",
        &format!("endpoint={endpoint} "),
        "ids=\"e-1\"",
        "attempt=1",
        "status=503",
        &format!("next=\"retry {due}\""),
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    server.advance(&json!({"toNextAttempt": true}));
    server.logged(&["attempt failed", "ids=\"e-1\"", "attempt=2"]);
    assert!(!server.log().join("\n").contains("hidden"));
}

#[test]
fn an_attempt_that_cannot_even_be_made_says_why() {
    let server = ServerSetup::test_clock("").start();
    server.put_topic("orders");
    // Nobody listens there once the receiver is gone.
    let url = TestReceiver::start().url("/");
    server.subscribe(
        "orders",
        "billing",
        &url,
        json!({"retryPolicy": {"maxDeliveryAttempts": 1}}),
    );
    server.publish("orders", &[event("lost")]);
    let line = server.logged(&["attempt failed"]);
    assert!(
        line.contains("could not connect") && line.contains("next=\"dropped ("),
        "{line}"
    );
    let line = server.logged(&["events dropped"]);
    for part in [
        "WARN",
        "topic=\"orders\"",
        "subscription=\"billing\"",
        "ids=\"lost\"",
        "attempts=1",
        "reason=",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[test]
fn many_failures_are_some_lines_and_a_number() {
    const EVENTS: u64 = 200;
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    // The clock stands still, so nothing is retried.
    let mut server = ServerSetup::test_clock("probation.failures = 10000\n").start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let events: Vec<Value> = (0..EVENTS).map(|n| event(format!("e-{n}"))).collect();
    server.publish("orders", &events);
    server.counted("/deliveries/attemptsFailed", EVENTS);
    // The number of suppressed lines is logged at the end of the interval, or when the server
    // stops.
    server.stop();
    let log = server.log();
    let with = |words: &'static str| log.iter().filter(move |line| line.contains(words));
    let lines = with("attempt failed").count() as u64;
    let told: u64 = with("more attempts failed")
        .map(|line| number(line, "count"))
        .sum();
    assert!(
        with("more attempts failed").all(|line| line.contains("subscription=\"billing\"")),
        "{log:#?}"
    );
    assert_eq!(lines + told, EVENTS, "{log:#?}");
    // A slow machine may need more than one interval.
    assert!(lines < EVENTS / 2, "{lines} lines");
}

#[test]
fn whoever_asks_for_more_than_warnings_gets_every_line() {
    const EVENTS: u64 = 50;
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    let mut server = ServerSetup::test_clock("probation.failures = 10000\nlog.level = \"debug\"\n").start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let events: Vec<Value> = (0..EVENTS).map(|n| event(format!("e-{n}"))).collect();
    server.publish("orders", &events);
    server.counted("/deliveries/attemptsFailed", EVENTS);
    server.stop();
    let log = server.log();
    let lines = log.iter().filter(|line| line.contains("attempt failed")).count() as u64;
    assert_eq!(lines, EVENTS);
}

#[test]
fn where_nobody_sits_at_a_terminal_every_line_is_json() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    let mut server = ServerSetup::default()
        .with("POSTRIDER_LOG__FORMAT", "auto")
        .start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("e-\u{1b}[31m\"1")]);
    server.logged(&["attempt failed"]);
    server.stop();
    let lines: Vec<Value> = server
        .log()
        .iter()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    for line in &lines {
        assert!(
            line["level"].is_string() && line["timestamp"].is_string(),
            "{line}"
        );
    }
    let failed = lines
        .iter()
        .find(|line| line["message"] == "attempt failed")
        .unwrap();
    let of = |name: &str| failed[name].clone();
    assert_eq!(
        json!([
            of("level"),
            of("topic"),
            of("subscription"),
            of("attempt"),
            of("status"),
            of("events"),
            of("ids")
        ]),
        json!(["WARN", "orders", "billing", 1, 500, 1, "e-\u{1b}[31m\"1"])
    );
}

#[test]
fn text_shows_no_escapes_of_publishers() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    let server = ServerSetup::default().start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("e-\u{1b}[31m\n1")]);
    let line = server.logged(&["attempt failed"]);
    assert!(!line.contains('\u{1b}'), "{line:?}");
    assert!(line.contains("next="), "it is still one line: {line}");
}
