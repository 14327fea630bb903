//! The API that moves a test clock.

use crate::clock_lab::{ClockLab, seconds_and_counts, timestamp};
use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const CLOCK: &str = "/postrider/v1/clock";
const ADVANCE: &str = "/postrider/v1/clock/advance";
const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";

#[test]
fn it_stands_still_and_goes_where_it_is_told() {
    let server = ServerSetup::test_clock("").start();
    let start = server.now();
    assert_eq!(server.now(), start);
    assert_eq!(
        server.advance(&json!({"by": "10m"})),
        (start + Duration::from_secs(600), 0)
    );
    assert_eq!(
        server.advance(&json!({"by": "0s"})),
        (start + Duration::from_secs(600), 0)
    );
    let to = start + Duration::from_secs(3600);
    assert_eq!(server.advance(&json!({"to": to.to_string()})), (to, 0));
    assert_eq!(
        server.advance(&json!({"to": to.to_string()})),
        (to, 0),
        "it is there"
    );
    // A time with an offset is accepted, too.
    let (now, _) = server.advance(&json!({"to": "2030-01-01T02:00:00+02:00"}));
    assert_eq!(now, timestamp(&json!("2030-01-01T00:00:00Z")));
    assert_eq!(
        server.advance(&json!({"toNextAttempt": true})),
        (now, 0),
        "there is none"
    );
    assert_eq!(server.now(), now);

    let health = server.health();
    assert_eq!(timestamp(&health["testClock"]["now"]), now, "{health}");
    assert!(health["testClock"]["warning"].is_string(), "{health}");
    server.logged(&["WARN", "TEST CLOCK"]);
}

#[test]
fn it_counts_the_attempts_on_its_way() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        json!(null),
    );
    lab.server.publish("orders", &[event("a"), event("b")]);
    lab.at_once();
    let (now, attempts) = lab.server.advance(&json!({"toNextAttempt": true}));
    assert_eq!((now.since(lab.start).as_secs(), attempts), (10, 2));
    let (now, attempts) = lab
        .server
        .advance(&json!({"to": (lab.start + Duration::from_secs(400)).to_string()}));
    assert_eq!((now.since(lab.start).as_secs(), attempts), (400, 6));
    let (now, attempts) = lab.server.advance(&json!({"by": "24h"}));
    assert_eq!((now.since(lab.start).as_secs(), attempts), (86_800, 12));
    // The remaining events are given up without an attempt.
    let (_, attempts) = lab.server.advance(&json!({"toNextAttempt": true}));
    assert_eq!(attempts, 0);
    assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 2}));
    assert_eq!(lab.receiver.take_received().len(), 20);
}

#[test]
fn nonsense_is_refused_by_name_and_nothing_moves() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        json!(null),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    for (body, field) in [
        (r#"{"by":600}"#, Some("by")),
        (r#"{"by":"soon"}"#, Some("by")),
        (r#"{"by":"-5m"}"#, Some("by")),
        (r#"{"by":null}"#, Some("by")),
        (r#"{"by":"never"}"#, Some("by")),
        (r#"{"by":"4000d"}"#, Some("by")),
        (r#"{"to":"tomorrow"}"#, Some("to")),
        (r#"{"to":1893456000}"#, Some("to")),
        (r#"{"to":"2020-01-01T00:00:00Z"}"#, Some("to")),
        (r#"{"to":"2999-01-01T00:00:00Z"}"#, Some("to")),
        (r#"{"toNextAttempt":false}"#, Some("toNextAttempt")),
        (r#"{"toNextAttempt":"yes"}"#, Some("toNextAttempt")),
        (r#"{"by":"1m","settle":"1h"}"#, Some("settle")),
        (r#"{"by":"1m","settle":5}"#, Some("settle")),
        (r#"{"until":"1m"}"#, None),
        (r#"{"by":"1m","to":"2030-01-01T00:00:00Z"}"#, None),
        (r#"{"by":"1m","toNextAttempt":true}"#, None),
        (r#"{"settle":"1s"}"#, None),
        ("{}", None),
        ("[]", None),
        ("\"1m\"", None),
        ("10m", None),
        (r#"{"by":"1m""#, None),
        ("", None),
    ] {
        let answer = lab.server.send("POST", ADVANCE, &[], body).expect(400);
        assert_eq!(
            answer.header("content-type"),
            Some("application/problem+json"),
            "{body}"
        );
        let problem = answer.json();
        assert_eq!(problem["status"], 400, "{body}");
        let detail = problem["detail"].as_str().expect("what is wrong");
        assert_eq!(
            problem.get("field"),
            field.map(Value::from).as_ref(),
            "{body}: {detail}"
        );
        if let Some(field) = field {
            assert!(detail.starts_with(field), "{body}: {detail}");
        }
    }
    let unknown = lab.server.send("POST", ADVANCE, &[], r#"{"until":"1m"}"#).json();
    assert!(
        unknown["detail"].as_str().expect("text").starts_with("until"),
        "{unknown}"
    );
    assert_eq!(lab.now(), 0);
    assert_eq!(lab.count("attempts"), 1);
    assert_eq!(lab.next_arrival().seconds(), 10);
}

#[test]
fn only_the_right_methods_and_paths_exist() {
    let server = ServerSetup::test_clock(CLIENT).start();
    for (method, path, allow) in [
        ("POST", CLOCK, "GET"),
        ("DELETE", CLOCK, "GET"),
        ("GET", ADVANCE, "POST"),
        ("PUT", ADVANCE, "POST"),
    ] {
        let answer = server.send(method, path, &[], "").expect(405);
        assert_eq!(answer.header("allow"), Some(allow), "{method} {path}");
    }
    let bearer = ("authorization", "Bearer hush");
    for path in [
        "/postrider/v1/clocks",
        "/postrider/v1/clock/advance/more",
        "/postrider/v2/clock",
        "/postrider",
    ] {
        server.send("GET", path, &[bearer], "").expect(404);
        server.send("GET", path, &[], "").expect(401);
    }
}

#[test]
fn without_a_test_clock_there_is_none_to_move() {
    let server = TestServer::start_plain();
    for (method, path) in [("GET", CLOCK), ("POST", ADVANCE)] {
        let answer = server.send(method, path, &[], r#"{"by":"1m"}"#).expect(404);
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert!(answer.text().contains("--test-clock"), "{}", answer.text());
    }
    assert_eq!(server.health().get("testClock"), None);
}

#[test]
fn strangers_may_not_move_it() {
    let server = ServerSetup::test_clock(CLIENT).start();
    let start = server.now();
    let by = r#"{"by":"1m"}"#;
    let send = |header: (&str, &str)| {
        server
            .send("GET", CLOCK, &[header], "")
            .expect(server.send("POST", ADVANCE, &[header], by).status)
    };
    for wrong in ["Bearer other", "Bearer ", "Basic aHVzaA==", "hush"] {
        let refused = send(("authorization", wrong)).expect(401);
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"), "{wrong}");
        assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    }
    for foreign in ["evil.example", "127.0.0.1.evil.example", ""] {
        send(("host", foreign)).expect(403);
    }
    for page in ["https://evil.example", "null"] {
        send(("origin", page)).expect(403);
    }
    assert_eq!(server.now(), start);
    send(("authorization", "Bearer hush")).expect(200);
    send(("host", "localhost:1")).expect(200);
    assert_eq!(server.now(), start + Duration::from_secs(120));
}

#[test]
fn where_others_can_reach_it_a_secret_is_asked_for() {
    let setup = ServerSetup {
        flags: Some(["--http=0.0.0.0:0", "--https=off"].map(String::from).into()),
        ..ServerSetup::test_clock(format!("edge.allow_open = true\n{CLIENT}"))
    };
    let server = setup.start();
    let local = std::net::SocketAddr::from(([127, 0, 0, 1], server.http.port()));
    let send = |headers: &[(&str, &str)]| {
        let mut connection = crate::client::TestConnection::open(local).expect("the server listens");
        connection
            .send("POST", ADVANCE, headers, br#"{"by":"1m"}"#)
            .expect("an answer")
    };
    send(&[]).expect(401);
    send(&[("authorization", "Bearer other")]).expect(401);
    send(&[("authorization", "Bearer hush")]).expect(200);
}

#[test]
fn two_who_move_it_do_so_one_after_the_other() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        json!(null),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    let total: u64 = std::thread::scope(|scope| {
        let moving: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| lab.server.advance(&json!({"by": "100s"})).1))
            .collect();
        moving.into_iter().map(|one| one.join().expect("no panic")).sum()
    });
    assert_eq!((lab.now(), total), (400, 4));
}

#[test]
fn an_event_published_later_has_its_own_time() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), receiver, json!(null));
    for (id, at) in [("a", 0), ("b", 7), ("c", 25)] {
        lab.advance_to_second(at);
        lab.server.publish("orders", &[event(id)]);
        lab.at_once();
    }
    let mut next = Vec::new();
    while next.len() < 5 {
        next.extend(
            lab.next_arrivals()
                .iter()
                .map(|one| (one.seconds(), one.id(), one.count())),
        );
    }
    let expected = [
        (35, "c", 1),
        (40, "a", 2),
        (47, "b", 2),
        (65, "c", 2),
        (100, "a", 3),
    ];
    assert_eq!(next, expected.map(|(at, id, count)| (at, id.to_owned(), count)));
}

#[test]
fn attempts_that_wait_for_each_other_are_made_at_the_same_instant() {
    let config = "limits.in_flight_per_endpoint_max = 1\nprobation.failures = 10000\n";
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(503));
    let lab = ClockLab::subscribed(ServerSetup::test_clock(config), receiver, json!(null));
    let events: Vec<_> = (0..50).map(|n| event(n.to_string())).collect();
    lab.server.publish("orders", &events);
    assert_eq!(lab.at_once().len(), 50);
    for second in [30, 60, 120] {
        let arrivals = lab.next_arrivals();
        assert_eq!(arrivals.len(), 50);
        assert!(arrivals.iter().all(|one| one.seconds() == second));
    }
}

#[test]
fn the_end_of_time_is_an_end_and_not_a_crash() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        json!(null),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    for _ in 0..30 {
        let answer = lab.server.send("POST", ADVANCE, &[], r#"{"by":"3650d"}"#);
        assert!(matches!(answer.status, 200 | 400), "{}", answer.text());
    }
    assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 1}));
    lab.server.publish("orders", &[event("b")]);
    lab.server.health();
}

#[test]
fn whoever_goes_away_while_it_moves_leaves_it_to_others() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Silence),
        json!(null),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.receiver.next();
    let mut connection = lab.server.connect();
    let body = r#"{"by":"5s","settle":"10m"}"#;
    let head = format!(
        "POST {ADVANCE} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}",
        lab.server.http,
        body.len()
    );
    connection
        .write(format!("{head}\r\n\r\n{body}").as_bytes())
        .unwrap();
    drop(connection);
    // The other request waits for an answer that does not come; this one must not have to.
    let (now, _) = lab.server.advance(&json!({"by": "20s", "settle": "100ms"}));
    assert_eq!(now.since(lab.start).as_secs(), 20);
}

#[test]
fn a_server_whose_time_stands_still_can_be_stopped() {
    let mut lab = ClockLab::subscribed(
        ServerSetup::test_clock("shutdown.grace = \"1s\"\n"),
        TestReceiver::answering(|_| ScriptedReply::Silence),
        json!(null),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.receiver.next();
    lab.server.stop();
    // The attempt in progress was abandoned, and is made again after the restart.
    lab.server.start();
    assert_eq!(lab.receiver.next().header("aeg-delivery-count"), Some("0"));
    assert_eq!(lab.now(), 0);
}

#[test]
fn time_does_not_go_on_while_the_server_stops() {
    // The silent receiver never answers, so that stopping takes a while; the third attempt at the
    // other one is held up until stopping has begun.
    let gate = Arc::new(ReplyGate::default());
    let receiver = TestReceiver::answering({
        let gate = gate.clone();
        move |delivery| match (delivery.path.as_str(), delivery.header("aeg-delivery-count")) {
            ("/silent", _) => ScriptedReply::Silence,
            (_, count) => {
                if count == Some("2") {
                    gate.wait();
                }
                ScriptedReply::Status(500)
            }
        }
    });
    let config = "shutdown.grace = \"2s\"\n";
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(config), receiver, json!(null));
    // A profile with a response timeout of a minute.
    let patient = json!({"postrider": {"profile": "cloud-2018"}});
    lab.subscribe("silent", "/silent", patient);
    lab.server.publish("orders", &[event("a")]);
    let mut connection = lab.server.connect();
    let moving = std::thread::spawn(move || {
        let days = br#"{"by":"48h","settle":"2s"}"#;
        connection
            .send("POST", ADVANCE, &[], days)
            .map(|answer| answer.status)
    });
    wait::until("the third attempt", || {
        let delivery = lab.receiver.next();
        (delivery.header("aeg-delivery-count") == Some("2")).then_some(())
    });
    lab.server.terminate();
    lab.server.logged(&["shutting down"]);
    gate.open();
    assert_eq!(lab.server.ended().code(), Some(0));
    let answered = moving.join().expect("no panic");
    assert!(!matches!(answered, Ok(200)), "{answered:?}");

    // No due attempt was skipped.
    lab.server.start();
    assert_eq!(lab.now(), 40);
    assert_eq!(lab.receiver.next().path, "/silent", "it is attempted again");
    lab.server.unsubscribe("orders", "silent");
    let next: Vec<_> = (0..3).map(|_| lab.next_arrival()).collect();
    assert_eq!(seconds_and_counts(&next), [(100, 3), (400, 4), (1000, 5)]);
}
