//! `kill -9` in the middle of a schedule, by the test clock: due attempts stay due, settled ones
//! stay settled.

use crate::clock_lab::{ClockLab, TimedDelivery, seconds_and_counts};
use crate::docs::SECRET;
use crate::receiver::{ReceivedDelivery, ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// All attempts of an event that always fails, with the counts of earlier attempts.
const SCHEDULE: [(u64, u64); 11] = [
    (0, 0),
    (10, 1),
    (40, 2),
    (100, 3),
    (400, 4),
    (1000, 5),
    (2800, 6),
    (6400, 7),
    (17_200, 8),
    (38_800, 9),
    (82_000, 10),
];

fn failing() -> TestReceiver {
    TestReceiver::answering(|_| ScriptedReply::Status(500))
}

impl ClockLab {
    /// Kills and restarts the server, and continues from the same clock time.
    #[track_caller]
    fn restart(&mut self) {
        let stood = self.server.now();
        self.server.kill();
        self.server.start();
        assert_eq!(self.server.now(), stood);
    }
}

#[test]
fn a_restart_anywhere_changes_neither_times_nor_counts() {
    // Restarts between every two attempts, right after one and just before the next.
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.server.publish("orders", &[event("a")]);
    let mut made = lab.at_once();
    for (next, _) in &SCHEDULE[1..] {
        lab.restart();
        assert!(lab.at_once().is_empty(), "nothing is attempted twice");
        assert_eq!(lab.advance_to_second(next - 1), 0);
        lab.restart();
        made.push(lab.next_arrival());
    }
    assert_eq!(seconds_and_counts(&made), SCHEDULE);
    lab.restart();
    assert_eq!(lab.advance_to_second(125_199), 0);
    lab.restart();
    assert_eq!(lab.dropped(), json!({}));
    assert_eq!(lab.advance_to_second(125_200), 0);
    assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 1}));
    lab.restart();
    assert!(lab.all_arrivals().is_empty(), "it stays dropped");
}

#[test]
fn one_restart_in_the_middle_changes_nothing_for_events_of_all_kinds() {
    for at in [0, 5, 10, 400, 3000] {
        let receiver = TestReceiver::answering(|delivery| {
            let id = delivery.ids().concat();
            let count = delivery.header("aeg-delivery-count").unwrap_or_default();
            ScriptedReply::Status(match (id.as_str(), count) {
                ("good", _) | ("recovering", "3") => 200,
                ("bad", _) => 400,
                ("busy", _) => 503,
                _ => 500,
            })
        });
        let mut lab = ClockLab::subscribed(ServerSetup::test_clock(""), receiver, json!(null));
        let ids = ["good", "bad", "busy", "failing", "recovering"];
        lab.server.publish("orders", &ids.map(event));
        let mut arrivals = lab.at_once();
        let mut restarted = false;
        loop {
            if !restarted && arrivals.last().is_some_and(|last| last.seconds() >= at) {
                lab.restart();
                restarted = true;
            }
            let next = lab.next_arrivals();
            if next.is_empty() {
                break;
            }
            arrivals.extend(next);
        }
        assert!(restarted);
        let mut by_id: BTreeMap<String, Vec<TimedDelivery>> = BTreeMap::new();
        for arrival in arrivals {
            by_id.entry(arrival.id()).or_default().push(arrival);
        }
        let of = |id: &str| seconds_and_counts(&by_id[id]);
        assert_eq!(of("good"), [(0, 0)], "{at}");
        assert_eq!(of("bad"), [(0, 0)], "{at}");
        assert_eq!(of("recovering"), SCHEDULE[..4], "{at}");
        assert_eq!(of("failing"), SCHEDULE, "{at}");
        let busy = [0, 30, 60, 120, 420, 1020, 2820, 6420, 17_220, 38_820, 82_020];
        let busy: Vec<_> = busy.into_iter().zip(0..).collect();
        assert_eq!(of("busy"), busy, "{at}");
    }
}

#[test]
fn waits_that_chance_has_lengthened_stay_as_they_are() {
    let setup = ServerSetup {
        config: String::new(),
        ..ServerSetup::test_clock("")
    };
    let mut lab = ClockLab::subscribed(setup, failing(), json!(null));
    let events: Vec<_> = (0..5).map(|n| event(n.to_string())).collect();
    lab.server.publish("orders", &events);
    assert_eq!(lab.at_once().len(), 5);
    lab.server.kill();
    // The same state is continued twice. Each process has its own random seed, but these waits are
    // already chosen.
    let data = lab.server.data_dir();
    let kept = data.with_extension("kept");
    copy(&data, &kept);
    let mut instants = || {
        lab.server.start();
        let next: Vec<_> = (0..5).map(|_| lab.next_arrival()).collect();
        lab.server.kill();
        next.iter().map(|one| (one.id(), one.at)).collect::<Vec<_>>()
    };
    let once = instants();
    std::fs::remove_dir_all(&data).expect("it can be removed");
    copy(&kept, &data);
    assert_eq!(instants(), once);
    let lengthened = once.iter().filter(|(_, at)| at.subsec_nanos() > 0).count();
    assert!(lengthened > 0, "{once:?}");
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-r").arg(from).arg(to).status();
    assert!(copied.expect("cp can be run").success());
}

#[test]
fn an_attempt_that_was_under_way_is_made_again_at_once() {
    // The first attempt, or the second, is not answered when the server is killed.
    for (silent, sent_at, killed_at, more) in [(0, 0, 15, [25, 55, 115]), (1, 10, 20, [50, 110, 410])] {
        let number = AtomicUsize::new(0);
        let receiver = TestReceiver::answering(move |_| match number.fetch_add(1, Relaxed) == silent {
            true => ScriptedReply::Silence,
            false => ScriptedReply::Status(500),
        });
        let mut lab = ClockLab::subscribed(ServerSetup::test_clock(""), receiver, json!(null));
        lab.server.publish("orders", &[event("a")]);
        lab.receiver.next();
        if sent_at > 0 {
            assert_eq!(lab.advance_to_second_unanswered(sent_at), 1);
        }
        assert_eq!(lab.advance_to_second_unanswered(killed_at), 0);
        lab.restart();
        // The result of the attempt is unknown: it does not count, and is made again.
        let again = lab.at_once();
        let count = silent as u64;
        assert_eq!(seconds_and_counts(&again), [(killed_at, count)]);
        let next: Vec<_> = (0..3).map(|_| lab.next_arrival()).collect();
        let expected: Vec<_> = more.into_iter().zip(count + 1..).collect();
        assert_eq!(seconds_and_counts(&next), expected);
    }
}

/// Number of retries before the one that is held up.
const HELD: usize = 110;

#[test]
fn a_restart_while_time_is_moving_loses_no_attempt_that_was_made() {
    // An attempt in the middle of the schedule is held up until the server is killed.
    let gate = Arc::new(ReplyGate::default());
    let number = AtomicUsize::new(0);
    let receiver = TestReceiver::answering({
        let gate = gate.clone();
        move |_| {
            if number.fetch_add(1, Relaxed) == 20 + HELD {
                gate.wait();
            }
            ScriptedReply::Status(500)
        }
    });
    let mut lab = ClockLab::subscribed(
        ServerSetup::test_clock("").profile("cloud-2018"),
        receiver,
        json!(null),
    );
    let events: Vec<_> = (0..20).map(|n| event(n.to_string())).collect();
    lab.server.publish("orders", &events);
    assert_eq!(lab.at_once().len(), 20);
    let mut arrived: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut note = |delivery: &ReceivedDelivery| {
        let count = delivery.header("aeg-delivery-count").expect("a count");
        let counts = arrived.entry(delivery.ids().concat()).or_default();
        counts.push(count.parse().expect("a number"));
    };
    let mut connection = lab.server.connect();
    let moving = std::thread::spawn(move || {
        let days = json!({"by": "48h"}).to_string();
        connection
            .send("POST", "/postrider/v1/clock/advance", &[], days.as_bytes())
            .is_err()
    });
    for _ in 0..=HELD {
        note(&lab.receiver.next());
    }
    lab.server.kill();
    gate.open();
    assert!(moving.join().expect("no panic"), "it was killed on the way");
    lab.receiver.take_received().iter().for_each(&mut note);
    lab.server.start();
    for arrival in lab.all_arrivals() {
        note(&arrival.delivery);
    }
    assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 20}));
    assert_eq!(arrived.len(), 20);
    for (id, mut counts) in arrived {
        // The attempt in progress at the kill is made again, with the same count.
        assert!(counts.len() <= 30, "{id}: {counts:?}");
        counts.dedup();
        assert_eq!(counts, (1..30).collect::<Vec<_>>(), "{id}");
    }
}

#[test]
fn what_a_test_clock_has_touched_is_not_gone_on_with_in_real_time() {
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.advance_to_second(3600);
    lab.server.kill();
    let refused = lab.server.start_second("127.0.0.1:0", "127.0.0.1:0");
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{told}");
    let file = lab.server.data_dir().join("test-clock");
    for words in [file.to_str().expect("text"), "--test-clock"] {
        assert!(told.contains(words), "{words} in {told}");
    }
    // The refused start has changed nothing.
    lab.server.start();
    assert_eq!(lab.now(), 3600);
    assert_eq!(lab.next_arrival().seconds(), 6400);
}

/// An answer of the server's own API.
#[track_caller]
fn own(server: &TestServer, path: &str) -> Value {
    let path = format!("/postrider/v1/{path}");
    server.send("GET", &path, &[SECRET], "").expect(200).json()
}

/// Numbers that people see: totals, the verdict, charts, the subscription.
fn seen(server: &TestServer) -> Value {
    let stats = own(server, "stats");
    let lossy = own(server, "subscription?id=orders/lossy");
    let series = |of: &str| own(server, &format!("stats/series?minutes=30{of}"));
    let counts = |one: &Value| {
        let names = [
            "delivered",
            "attempts",
            "failed",
            "deadLettered",
            "dropped",
            "droppedBy",
            "recent",
            "health",
            "latencyMs",
        ];
        let some = names.iter().map(|name| ((*name).to_owned(), one[*name].clone()));
        Value::Object(some.collect())
    };
    json!({
        "since": stats["since"],
        "totals": stats["totals"],
        "verdict": stats["verdict"],
        "topic": [stats["topics"][0]["published"], stats["topics"][0]["unmatched"]],
        "lossy": counts(&lossy),
        "all": series(""),
        "ofTopic": series("&topic=orders"),
        "ofLossy": series("&subscription=orders/lossy"),
    })
}

/// A server whose subscriptions deliver, drop and dead-letter.
fn with_losses() -> ClockLab {
    let receiver = TestReceiver::answering(|delivery| {
        let refused = delivery.path.starts_with("/refuse");
        ScriptedReply::Status(if refused { 400 } else { 200 })
    });
    let client = "client = [{ id = \"me\", secret = \"hush\" }]\n";
    let lab = ClockLab::subscribed(ServerSetup::test_clock(client), receiver, json!(null));
    lab.subscribe("lossy", "/refuse", json!(null));
    let place = json!({"deadLetterDestination": {
        "endpointType": "StorageBlob",
        "properties": {"resourceId": "local", "blobContainerName": "dead"},
    }});
    lab.subscribe("kept", "/refuse/kept", place);
    lab.server
        .publish("orders", &[event("a"), event("b"), event("c")]);
    lab.at_once();
    lab
}

#[test]
fn totals_charts_and_the_verdict_are_the_same_after_a_restart() {
    let mut lab = with_losses();
    lab.pass(60);
    lab.server.publish("orders", &[event("d")]);
    lab.at_once();
    let before = seen(&lab.server);
    assert_eq!(before["totals"]["delivered"], 4, "{before:#}");
    assert_eq!(
        before["totals"]["droppedBy"],
        json!({"UndeliverableDueToHttpBadRequest": 4})
    );
    assert_eq!(before["totals"]["deadLettersPending"], 4);
    assert_eq!(before["verdict"]["status"], "attention");
    assert_eq!(before["lossy"]["health"], "failing");
    for crash in [true, false] {
        match crash {
            true => lab.server.kill(),
            false => lab.server.stop(),
        }
        lab.server.start();
        let after = seen(&lab.server);
        assert_eq!(after, before, "crash: {crash}");
        // Counters of `/healthz` start with the process.
        let health = lab.server.health();
        assert_eq!(health["deliveries"]["delivered"], 0, "{health}");
    }
    // Counting continues.
    lab.server.publish("orders", &[event("e")]);
    lab.at_once();
    let after = seen(&lab.server);
    assert_eq!(after["totals"]["delivered"], 5);
    assert_eq!(after["topic"], json!([5, 0]));
    assert_eq!(after["since"], before["since"]);
    let path = lab.server.data_dir().join("numbers.json");
    let mode = std::fs::metadata(&path).expect("it is there").permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);

    // An unreadable file is reported, and counts start at zero.
    lab.server.stop();
    std::fs::write(&path, "{").expect("it can be written");
    lab.server.start();
    lab.server.logged(&["counting begins anew", "numbers.json"]);
    let anew = seen(&lab.server);
    assert_eq!(anew["totals"]["delivered"], 0);
    assert!(anew["since"].as_str() > before["since"].as_str(), "{anew:#}");
    // Dead letters are counted in the archive and the log, not in this file.
    assert_eq!(anew["totals"]["deadLettersPending"], 5);
}

#[test]
fn dead_letters_are_counted_as_their_summary_counts_them() {
    let mut lab = with_losses();
    let check = |server: &TestServer, written: u64, pending: u64| {
        let summary = own(server, "deadletters/summary");
        let all = summary["value"].as_array().expect("a list");
        let sum = |member: &str| all.iter().map(|one| one[member].as_u64().unwrap()).sum::<u64>();
        assert_eq!(
            [sum("written"), sum("pending")],
            [written, pending],
            "{summary:#}"
        );
        let stats = own(server, "stats");
        for counts in [&stats["totals"], &own(server, "subscription?id=orders/kept")] {
            assert_eq!(counts["deadLettered"], written, "{counts:#}");
            assert_eq!(counts["deadLettersPending"], pending, "{counts:#}");
        }
    };
    check(&lab.server, 0, 3);
    lab.pass(600);
    lab.server.counted("/deadLetters/written", 3);
    check(&lab.server, 3, 0);
    lab.restart();
    check(&lab.server, 3, 0);
    let body = json!({"all": true}).to_string();
    let path = "/postrider/v1/deadletters/purge";
    let headers = [SECRET, crate::server::JSON];
    lab.server.send("POST", path, &headers, body).expect(200);
    check(&lab.server, 0, 0);
    lab.server.publish("orders", &[event("z")]);
    lab.at_once();
    check(&lab.server, 0, 1);
}

#[test]
fn drops_reach_the_verdict_and_the_doctor() {
    let lab = with_losses();
    let stats = own(&lab.server, "stats");
    let verdict = &stats["verdict"];
    assert_eq!(verdict["status"], "attention", "{verdict:#}");
    let lossy = verdict["subscriptions"].as_array().expect("a list").iter();
    let lossy = lossy.clone().find(|one| one["name"] == "lossy");
    let lossy = lossy.unwrap_or_else(|| panic!("{verdict:#}"));
    assert_eq!(lossy["health"], "failing");
    assert_eq!(
        lossy["reasons"][0]["text"],
        "3 of 3 events dropped in the last 5 minutes (HTTP 400 Bad Request, no dead-letter destination)"
    );
    let todo = lossy["reasons"][0]["todo"].as_str().unwrap_or_default();
    assert!(todo.contains("set a dead-letter destination"), "{todo}");
    let told = crate::doctor::doctor_of(&lab.server, "json");
    let (level, todo) = told.about(
        "subscriptions",
        "subscription \"lossy\" of topic \"orders\": 3 of 3 events dropped",
    );
    assert_eq!(level, "warning");
    assert!(todo.contains("dead-letter destination"), "{todo}");
}
