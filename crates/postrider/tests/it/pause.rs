//! Paused subscriptions: events are accepted and held, nothing is sent and nothing ages.

use crate::clock_lab::{ClockLab, TimedDelivery, seconds_and_counts};
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";
const AUTHORIZATION: (&str, &str) = ("authorization", "Bearer hush");

fn setup() -> ServerSetup {
    ServerSetup::test_clock(CLIENT)
}

/// A receiver whose status can be changed.
fn receiver_with_status() -> (TestReceiver, Arc<AtomicU16>) {
    let mood = Arc::new(AtomicU16::new(500));
    let said = mood.clone();
    (
        TestReceiver::answering(move |_| ScriptedReply::Status(said.load(Relaxed))),
        mood,
    )
}

/// Pauses, resumes or probes the subscription `billing` of the topic `orders`.
#[track_caller]
fn control(server: &TestServer, verb: &str) -> Value {
    let path = format!("/postrider/v1/subscriptions/{verb}");
    let body = json!({"id": "orders/billing"}).to_string();
    server
        .send("POST", &path, &[AUTHORIZATION, JSON], body)
        .expect(200)
        .json()
}

#[track_caller]
fn shown(server: &TestServer) -> Value {
    let path = "/postrider/v1/subscription?id=orders/billing";
    server.send("GET", path, &[AUTHORIZATION], "").expect(200).json()
}

#[track_caller]
fn publish(server: &TestServer, ids: &[&str]) {
    let events: Vec<Value> = ids.iter().map(|id| event(*id)).collect();
    server.publish("orders", &events);
}

fn ids(arrivals: &[TimedDelivery]) -> BTreeSet<String> {
    arrivals.iter().map(TimedDelivery::id).collect()
}

fn set(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

// The machine's own clock and a real kill: the pause is as durable as the events that it holds.
#[test]
fn what_is_published_in_a_pause_survives_a_kill_and_arrives_when_it_ends() {
    let mut server = ServerSetup::config(CLIENT).start();
    let receiver = TestReceiver::start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let paused = control(&server, "pause");
    assert_eq!(paused["state"], "paused", "{paused}");
    publish(&server, &["a", "b"]);
    server.kill();
    server.start();
    let again = shown(&server);
    assert_eq!(
        (&again["state"], &again["waiting"]),
        (&json!("paused"), &json!(2))
    );
    assert_eq!(again["since"], paused["since"]);
    publish(&server, &["c"]);
    // Another subscription of the same topic shows that the event would have been delivered by now.
    server.subscribe("orders", "witness", &receiver.url("/witness"), json!(null));
    publish(&server, &["d"]);
    let witness = receiver.next();
    assert_eq!(
        (witness.path.as_str(), witness.ids()),
        ("/witness", vec!["d".to_owned()])
    );
    assert!(receiver.take_received().is_empty());
    // A change of the subscription does not end the pause.
    server.subscribe("orders", "billing", &receiver.url("/moved"), json!(null));
    assert_eq!(shown(&server)["state"], "paused");

    let resumed = control(&server, "resume");
    assert_eq!(resumed["state"], "admitting", "{resumed}");
    let arrived: BTreeSet<String> = (0..4)
        .flat_map(|_| {
            let delivery = receiver.next();
            assert_eq!(delivery.path, "/moved");
            delivery.ids()
        })
        .collect();
    assert_eq!(arrived, set(&["a", "b", "c", "d"]));
    server.counted("/deliveries/delivered", 5);
    server.kill();
    server.start();
    assert_eq!(shown(&server)["state"], "admitting");
}

#[test]
fn time_in_a_pause_does_not_count() {
    let (receiver, mood) = receiver_with_status();
    let mut lab = ClockLab::subscribed(
        setup(),
        receiver,
        json!({"retryPolicy": {"eventExpiryInMinutes": 10, "maxDeliveryAttempts": 30}}),
    );
    publish(&lab.server, &["old"]);
    assert_eq!(lab.at_once().len(), 1);
    assert_eq!(lab.advance_to_second(100), 3, "at 10, 40 and 100");
    control(&lab.server, "pause");
    publish(&lab.server, &["new"]);
    // Without the pause the next attempt would be due at 400; the events would expire at 600 and
    // 700.
    assert_eq!(lab.advance_to_second(3_600), 0);
    lab.server.kill();
    lab.server.start();
    assert_eq!(lab.advance_to_second(90_000), 0);
    assert_eq!(
        (lab.dropped(), shown(&lab.server)["retrying"].clone()),
        (json!({}), json!(1))
    );

    control(&lab.server, "resume");
    let arrived = lab.at_once();
    assert_eq!(ids(&arrived), set(&["old", "new"]));
    let mut counts = seconds_and_counts(&arrived);
    counts.sort_unstable();
    assert_eq!(counts, [(90_000, 0), (90_000, 4)]);
    // The first event had 500 s left, the second all of its 600 s.
    let later = lab.all_arrivals();
    let of = |id: &str| -> Vec<(u64, u64)> {
        let all = later.iter().filter(|one| one.id() == id);
        all.map(|one| (one.seconds() - 90_000, one.count())).collect()
    };
    assert_eq!(of("old"), []);
    assert_eq!(of("new"), [(10, 1), (40, 2), (100, 3), (400, 4)]);
    assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 2}));
    mood.store(200, Relaxed);
    publish(&lab.server, &["last"]);
    assert_eq!(lab.at_once().len(), 1);
    assert_eq!(lab.count("delivered"), 1);
}

#[test]
fn an_event_that_waits_in_a_pause_says_so() {
    let (receiver, mood) = receiver_with_status();
    let lab = ClockLab::subscribed(setup(), receiver, json!(null));
    let story = |id: &str| {
        let path = format!("/postrider/v1/events/{id}");
        let story = lab
            .server
            .send("GET", &path, &[AUTHORIZATION], "")
            .expect(200)
            .json();
        story["stories"][0]["subscriptions"][0].clone()
    };
    publish(&lab.server, &["tried"]);
    lab.at_once();
    control(&lab.server, "pause");
    publish(&lab.server, &["fresh"]);
    lab.at_once();
    for (id, attempts) in [("tried", 1), ("fresh", 0)] {
        let told = crate::wait::until("it is recorded", || {
            let told = story(id);
            (told["attempts"].as_array().map(Vec::len) == Some(attempts)).then_some(told)
        });
        assert_eq!(
            (&told["state"], &told["next"]["why"]),
            (&json!("held"), &json!("paused")),
            "{told}"
        );
        assert_eq!(told["next"]["at"].is_string(), id == "tried", "{told}");
    }
    mood.store(200, Relaxed);
    control(&lab.server, "resume");
    lab.pass(10);
    let told = crate::wait::until("its end is recorded", || {
        let told = story("tried");
        (told["ended"] != json!(null)).then_some(told)
    });
    assert_eq!(
        (&told["state"], &told["next"]),
        (&json!("delivered"), &json!(null)),
        "{told}"
    );
}

#[test]
fn one_that_is_deleted_or_expires_while_paused_is_gone() {
    let (receiver, _) = receiver_with_status();
    let lab = ClockLab::subscribed(setup(), receiver, json!(null));
    control(&lab.server, "pause");
    publish(&lab.server, &["a", "b"]);
    lab.server.unsubscribe("orders", "billing");
    assert_eq!(lab.dropped(), json!({"SubscriptionDeleted": 2}));

    let end = (lab.server.now() + std::time::Duration::from_secs(60)).to_string();
    lab.subscribe("billing", "/", json!({"expirationTimeUtc": end}));
    assert_eq!(shown(&lab.server)["state"], "admitting", "it is another one");
    control(&lab.server, "pause");
    publish(&lab.server, &["c"]);
    assert_eq!(lab.pass(61), 0);
    assert_eq!(
        lab.dropped(),
        json!({"SubscriptionDeleted": 2, "SubscriptionExpired": 1})
    );
    assert!(lab.receiver.take_received().is_empty());
}

#[test]
fn whoever_asks_an_endpoint_that_is_left_alone_asks_it_once() {
    let (receiver, mood) = receiver_with_status();
    let lab = ClockLab::subscribed(setup(), receiver, json!(null));
    let events: Vec<Value> = (0..10).map(|n| event(format!("e{n}"))).collect();
    lab.server.publish("orders", &events);
    assert_eq!(lab.at_once().len(), 10);
    publish(&lab.server, &["x", "y", "z"]);
    assert!(lab.at_once().is_empty());
    let before = shown(&lab.server);
    assert_eq!(before["state"], "delayed", "{before}");

    lab.pass(2);
    control(&lab.server, "probe");
    assert_eq!(lab.at_once().len(), 1, "one probe and no flood");
    let after = shown(&lab.server);
    assert_eq!(
        (&after["state"], &after["until"]),
        (&json!("delayed"), &before["until"]),
        "asking in vain costs nothing"
    );
    mood.store(200, Relaxed);
    control(&lab.server, "probe");
    // A successful probe releases the others.
    assert_eq!(lab.at_once().len(), 2);
    assert_eq!(shown(&lab.server)["state"], "admitting");
    assert_eq!(control(&lab.server, "probe")["state"], "admitting");
    assert!(lab.at_once().is_empty());
}

#[test]
fn the_command_line_pauses_and_resumes() {
    let server = ServerSetup::config("[validation]\nenabled = false\n").start();
    let receiver = TestReceiver::start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
            .env_clear()
            .env("POSTRIDER_SERVER", format!("http://{}", server.http))
            .env("POSTRIDER_DATA_DIR", server.data_dir())
            .arg("subscription")
            .args(arguments)
            .output()
            .expect("the program can be run");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, err) = run(&["pause", "billing", "--topic", "orders"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(
        out.contains("billing is paused since ") && out.contains("nothing waits"),
        "{out}"
    );
    publish(&server, &["a"]);
    let (code, out, err) = run(&["pause", "billing", "--topic", "orders", "--output", "json"]);
    assert_eq!(code, Some(0), "{out}{err}");
    let now: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((&now["state"], &now["waiting"]), (&json!("paused"), &json!(1)));
    let (code, out, err) = run(&["probe", "billing", "--topic", "orders"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("1 event waits"), "{out}");
    assert!(receiver.take_received().is_empty());
    let (code, out, err) = run(&["resume", "billing", "--topic", "orders"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("billing is not held back"), "{out}");
    assert_eq!(receiver.next().ids(), ["a"]);

    let (code, _, err) = run(&["pause", "nobody", "--topic", "orders"]);
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains("error: ") && err.contains("nobody") && err.contains("does not exist"),
        "{err}"
    );
    let (code, _, err) = run(&["pause", "billing"]);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("--topic"), "{err}");
}
