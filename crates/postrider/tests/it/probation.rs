//! Probation: an endpoint that keeps failing gets only probes for a while.

use crate::clock_lab::{ClockLab, TimedDelivery, seconds, seconds_and_counts, timestamp, whole_seconds};
use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};

const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";
const AUTHORIZATION: (&str, &str) = ("authorization", "Bearer hush");

fn setup(config: &str) -> ServerSetup {
    ServerSetup::test_clock(format!("{config}{CLIENT}"))
}

/// The status that a receiver answers with.
#[derive(Clone)]
struct AnswerStatus(Arc<AtomicU16>);

impl AnswerStatus {
    fn new(status: u16) -> AnswerStatus {
        AnswerStatus(Arc::new(AtomicU16::new(status)))
    }

    fn set(&self, status: u16) {
        self.0.store(status, Relaxed);
    }

    fn receiver(&self) -> TestReceiver {
        let mood = self.clone();
        TestReceiver::answering(move |_| ScriptedReply::Status(mood.0.load(Relaxed)))
    }
}

/// The API's report about an endpoint.
#[track_caller]
fn endpoint(server: &TestServer, url: &str) -> Value {
    let answer = server
        .send("GET", "/postrider/v1/endpoints", &[AUTHORIZATION], "")
        .expect(200);
    let all = answer.json()["value"].take();
    let found = all
        .as_array()
        .expect("a list")
        .iter()
        .find(|one| one["endpoint"] == url);
    found.unwrap_or_else(|| panic!("no {url} in {all}")).clone()
}

impl ClockLab {
    fn endpoint(&self) -> Value {
        endpoint(&self.server, &self.receiver.url("/"))
    }

    /// Cause, start and end of the endpoint's probation delay.
    #[track_caller]
    fn delay(&self) -> (String, u64, u64) {
        let endpoint = self.endpoint();
        assert_eq!(endpoint["state"], "delayed", "{endpoint}");
        let second = |name: &str| whole_seconds(timestamp(&endpoint[name]).since(self.start));
        let cause = endpoint["cause"].as_str().expect("a cause").to_owned();
        (cause, second("since"), second("until"))
    }

    /// Publishes that many events with this name prefix and waits for their attempts.
    #[track_caller]
    fn publish(&self, name: &str, count: usize) -> Vec<TimedDelivery> {
        let events: Vec<_> = (0..count).map(|n| event(format!("{name}{n}"))).collect();
        self.server.publish("orders", &events);
        self.at_once()
    }
}

#[test]
fn ten_different_failures_delay_all_deliveries_for_a_time_that_depends_on_the_cause() {
    for (profile, status, cause, wait) in [
        ("cloud-2020", 503, "Busy", 10),
        ("cloud-2021", 503, "Busy", 10),
        ("cloud-2021", 429, "Busy", 10),
        ("cloud-2021", 408, "TimedOut", 10),
        ("cloud-2021", 500, "GenericError", 10),
        ("cloud-2021", 302, "GenericError", 10),
        ("cloud-current", 404, "NotFound", 300),
        ("cloud-2020", 401, "Unauthorized", 300),
        ("cloud-2020", 403, "Forbidden", 300),
    ] {
        let context = format!("{profile} {status}");
        let mood = AnswerStatus::new(status);
        let lab = ClockLab::subscribed(setup("").profile(profile), mood.receiver(), json!(null));
        assert_eq!(lab.publish("early", 9).len(), 9);
        assert_eq!(lab.endpoint()["state"], "admitting", "{context}");
        assert_eq!(lab.publish("tenth", 1).len(), 1);
        assert_eq!(lab.delay(), (cause.to_owned(), 0, wait), "{context}");
        assert_eq!(lab.endpoint()["waiting"], 10);

        // New events are held back like the others.
        assert_eq!(lab.advance_to_second(2), 0);
        assert_eq!(lab.publish("new", 1).len(), 0, "{context}");
        assert_eq!(lab.endpoint()["waiting"], 11);
        assert_eq!(lab.advance_to_second(wait - 1), 0, "{context}");
        // At the end of the delay one delivery is tried.
        assert_eq!(lab.advance_to_second(wait), 1, "{context}");
        assert_eq!(lab.delay(), (cause.to_owned(), 0, wait + 2 * wait), "{context}");
        assert_eq!(lab.dropped(), json!({}));
    }
}

#[test]
fn a_wrong_code_delays_only_the_subscriptions_that_send_it() {
    for status in [401, 404, 409, 500] {
        wrong_code_answered_with(status);
    }
}

fn wrong_code_answered_with(status: u16) {
    let receiver = TestReceiver::answering(move |delivery| match delivery.path.ends_with("code=right") {
        true => ScriptedReply::Status(200),
        false => ScriptedReply::Status(status),
    });
    let server = setup("").start();
    server.put_topic("orders");
    server.subscribe("orders", "right", &receiver.url("/hook?code=right"), json!(null));
    server.subscribe("orders", "wrong", &receiver.url("/hook?code=wrong"), json!(null));
    let events: Vec<_> = (0..12).map(|n| event(format!("e{n}"))).collect();
    server.publish("orders", &events);
    let state = |name: &str| {
        let path = "/postrider/v1/endpoints";
        let all = server.send("GET", path, &[AUTHORIZATION], "").expect(200).json();
        let endpoint = &all["value"][0];
        assert_eq!(endpoint["state"], "admitting", "{all}");
        assert!(!all.to_string().contains("code="), "{all}");
        let subscriptions = endpoint["subscriptions"].as_array().expect("a list");
        let named = subscriptions.iter().find(|one| one["name"] == name);
        named.map(|one| one["state"].clone())
    };
    wait::until("the wrong code is left alone", || {
        (state("wrong")? == "delayed").then_some(())
    });
    server.publish("orders", &[event("after")]);
    wait::until("the right code gets everything", || {
        let arrived = receiver.take_received();
        arrived
            .iter()
            .any(|one| one.path.ends_with("right") && one.ids() == ["after"])
            .then_some(())
    });
    assert_eq!(state("right"), Some(json!(null)));
    let body = json!({"endpoint": receiver.url("/hook")}).to_string();
    let admitted = server.send("POST", "/postrider/v1/endpoints/admit", &[AUTHORIZATION], body);
    assert_eq!(admitted.expect(200).json()["ended"], true);
}

#[test]
fn a_refused_connection_is_a_cause_of_its_own() {
    // No program listens there.
    let url = "http://127.0.0.1:9/closed";
    let server = setup("").start();
    let start = server.now();
    server.put_topic("orders");
    server.subscribe("orders", "billing", url, json!(null));
    let events: Vec<_> = (0..10).map(|n| event(n.to_string())).collect();
    server.publish("orders", &events);
    assert_eq!(server.advance(&json!({"by": "29s"})).1, 0);
    assert_eq!(server.health()["deliveries"]["attempts"], 10);
    assert_eq!(endpoint(&server, url)["cause"], "SocketError");
    let mut probes = Vec::new();
    for _ in 0..4 {
        let (now, attempts) = server.advance(&json!({"toNextAttempt": true}));
        assert_eq!(attempts, 1);
        probes.push(whole_seconds(now.since(start)));
    }
    assert_eq!(probes, [30, 90, 210, 450]);
}

#[test]
fn no_answer_is_a_cause_of_its_own() {
    let lab = ClockLab::subscribed(
        setup(""),
        TestReceiver::answering(|_| ScriptedReply::Silence),
        json!(null),
    );
    let events: Vec<_> = (0..10).map(|n| event(n.to_string())).collect();
    lab.server.publish("orders", &events);
    events.iter().for_each(|_| drop(lab.receiver.next()));
    assert_eq!(lab.advance_to_second_unanswered(30), 0);
    assert_eq!(lab.delay(), ("TimedOut".to_owned(), 30, 40));
    lab.server.publish("orders", &[event("new")]);
    assert_eq!(lab.advance_to_second_unanswered(39), 0);
    assert!(lab.receiver.take_received().is_empty());
    assert_eq!(lab.advance_to_second_unanswered(40), 1);
    // The other deliveries wait for the result of the probe.
    assert_eq!(lab.endpoint()["state"], "probing");
    assert_eq!(lab.advance_to_second_unanswered(69), 0);
    assert_eq!(lab.advance_to_second_unanswered(70), 0);
    assert_eq!(lab.delay(), ("TimedOut".to_owned(), 30, 90));
    assert_eq!(lab.advance_to_second_unanswered(90), 1);
}

#[test]
fn failed_probes_double_the_wait_up_to_a_maximum() {
    let config = "probation.max = \"1m\"\n";
    let lab = ClockLab::subscribed(setup(config), AnswerStatus::new(503).receiver(), json!(null));
    lab.publish("early", 10);
    let probes: Vec<_> = (0..7).map(|_| lab.next_arrival().seconds()).collect();
    assert_eq!(
        probes,
        [30, 50, 90, 150, 210, 270, 330],
        "there is nothing to probe with at 10"
    );
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 390));
    assert_eq!(lab.dropped(), json!({}));
}

#[test]
fn the_wait_grows_to_hours_but_not_beyond_four() {
    let lab = ClockLab::subscribed(
        setup("").profile("cloud-current"),
        AnswerStatus::new(404).receiver(),
        json!(null),
    );
    lab.publish("early", 20);
    let probes: Vec<_> = (0..8).map(|_| lab.next_arrival().seconds()).collect();
    assert_eq!(probes, [300, 900, 2100, 4500, 9300, 18_900, 33_300, 47_700]);
}

#[test]
fn a_probe_that_succeeds_lets_everything_go() {
    let mood = AnswerStatus::new(503);
    let lab = ClockLab::subscribed(setup(""), mood.receiver(), json!(null));
    lab.publish("early", 10);
    lab.advance_to_second(5);
    assert_eq!(lab.publish("new", 5).len(), 0);
    let probe = lab.next_arrival();
    assert_eq!(
        (probe.seconds(), probe.count()),
        (10, 0),
        "the others are due in 30 s"
    );
    let probed = probe.id();
    assert!(probed.starts_with("new"), "{probed}");

    mood.set(200);
    let mut released: Vec<_> = lab.next_arrivals();
    assert_eq!(released.len(), 14);
    assert!(released.iter().all(|one| one.seconds() == 30));
    // A slot that was skipped does not count as an attempt.
    released.sort_by_key(TimedDelivery::id);
    let counts: Vec<_> = released.iter().map(TimedDelivery::count).collect();
    assert_eq!(counts, [[1; 10].as_slice(), &[0; 4]].concat());
    assert_eq!(lab.endpoint()["state"], "admitting");
    assert_eq!(lab.endpoint()["cause"], json!(null));

    let last = lab.next_arrival();
    assert_eq!((last.id(), last.seconds(), last.count()), (probed, 40, 1));
    assert!(lab.next_arrivals().is_empty());
    assert_eq!((lab.count("delivered"), lab.dropped()), (15, json!({})));
    // Probation is over: new events are sent at once.
    assert_eq!(lab.publish("later", 1).len(), 1);
}

#[test]
fn a_slot_that_was_passed_over_does_not_count_as_an_attempt() {
    let mood = AnswerStatus::new(404);
    let lab = ClockLab::subscribed(setup("").profile("cloud-current"), mood.receiver(), json!(null));
    lab.publish("early", 10);
    // Retries due at 10 s are skipped; so would be those at 40, 100 and so on.
    assert_eq!(lab.advance_to_second(299), 0);
    mood.set(500);
    let probe = lab.next_arrival();
    assert_eq!((probe.seconds(), probe.count()), (300, 1));
    mood.set(200);
    let released = lab.next_arrivals();
    let mut got = seconds_and_counts(&released);
    got.sort();
    let mut expected = [(900, 1); 10];
    expected[9] = (900, 2);
    assert_eq!(got, expected);
    assert_eq!((lab.count("attempts"), lab.count("delivered")), (21, 10));
}

#[test]
fn answers_that_are_final_delay_the_endpoint_too_but_nothing_is_dropped_unattempted() {
    let mood = AnswerStatus::new(401);
    let lab = ClockLab::subscribed(setup(""), mood.receiver(), json!(null));
    lab.publish("early", 10);
    assert_eq!(lab.dropped(), json!({"UndeliverableDueToClientError": 10}));
    assert_eq!(lab.delay(), ("Unauthorized".to_owned(), 0, 300));
    lab.publish("new", 3);
    assert_eq!(lab.advance_to_second(299), 0);
    mood.set(200);
    assert_eq!(lab.advance_to_second(300), 3);
    assert_eq!(lab.count("delivered"), 3);
    assert_eq!(lab.dropped(), json!({"UndeliverableDueToClientError": 10}));
}

#[test]
fn an_event_that_would_expire_during_the_delay_is_the_probe() {
    let minute = json!({"retryPolicy": {"eventExpiryInMinutes": 1}});
    for well in [true, false] {
        let mood = AnswerStatus::new(404);
        let lab = ClockLab::subscribed(
            setup("").profile("cloud-current"),
            mood.receiver(),
            minute.clone(),
        );
        // The probe comes at most ten seconds before the expiry, which is known to within a second.
        lab.publish("early", 10);
        assert_eq!(lab.advance_to_second(48), 0);
        assert_eq!(lab.delay(), ("NotFound".to_owned(), 0, 300));
        if well {
            mood.set(200);
            assert_eq!(
                lab.advance_to_second(50),
                10,
                "the probe, and then the others in time"
            );
            assert_eq!((lab.count("delivered"), lab.dropped()), (10, json!({})));
            assert_eq!(lab.endpoint()["state"], "admitting");
            continue;
        }
        assert_eq!(lab.advance_to_second(50), 1);
        assert_eq!(lab.delay(), ("NotFound".to_owned(), 0, 300), "as long as it was");
        // No further probe before the first probation delay is over.
        assert_eq!(lab.advance_to_second(299), 0);
        assert_eq!(lab.advance_to_second(300), 0);
        assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 10}));
        // No delivery was left to probe with: the next event is the probe.
        mood.set(200);
        assert_eq!(lab.publish("new", 1).len(), 1);
        assert_eq!(lab.endpoint()["state"], "admitting");
    }
}

#[test]
fn nothing_without_an_attempt_is_dropped_while_the_endpoint_may_be_well_again() {
    let mood = AnswerStatus::new(404);
    let properties = json!({"retryPolicy": {"eventExpiryInMinutes": 4}});
    let lab = ClockLab::subscribed(setup("").profile("cloud-current"), mood.receiver(), properties);
    lab.publish("early", 10);
    lab.advance_to_second(5);
    // The new event is not attempted while older ones are used as probes, and expires at 245
    // seconds.
    lab.publish("new", 1);
    lab.advance_to_second(229);
    mood.set(200);
    lab.advance_to_second(245);
    assert_eq!((lab.count("delivered"), lab.dropped()), (11, json!({})));
}

#[test]
fn ten_failed_events_of_one_batch_start_the_delay() {
    let mood = AnswerStatus::new(503);
    let batches = json!({"destination": {"properties": {"maxEventsPerBatch": 10}}});
    let lab = ClockLab::subscribed(setup(""), mood.receiver(), batches);
    assert_eq!(lab.publish("nine", 9).len(), 1);
    assert_eq!(lab.endpoint()["state"], "admitting");
    assert_eq!(lab.publish("tenth", 1).len(), 1);
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 10));

    let lab = ClockLab::subscribed(
        setup(""),
        mood.receiver(),
        json!({"destination": {"properties": {"maxEventsPerBatch": 10}}}),
    );
    assert_eq!(lab.publish("ten", 10).len(), 1);
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 10));
    assert_eq!(lab.count("attemptsFailed"), 1);
}

#[test]
fn subscriptions_share_an_endpoint_by_its_path_and_not_by_its_query() {
    let lab = ClockLab::start(
        setup(""),
        TestReceiver::answering(|delivery| {
            ScriptedReply::Status(if delivery.path.starts_with("/sick") {
                503
            } else {
                200
            })
        }),
    );
    for (topic, path) in [("a", "/sick?code=1"), ("b", "/sick?code=2"), ("c", "/well")] {
        lab.server.put_topic(topic);
        lab.server
            .subscribe(topic, "billing", &lab.receiver.url(path), json!(null));
    }
    // Five failures of each of two subscriptions make ten.
    let five: Vec<_> = (0..5).map(|n| event(n.to_string())).collect();
    lab.server.publish("a", &five);
    lab.server.publish("b", &five);
    assert_eq!(lab.at_once().len(), 10);
    let sick = endpoint(&lab.server, &lab.receiver.url("/sick"));
    assert_eq!(sick["state"], "delayed");
    let both = json!([{"topic": "a", "name": "billing"}, {"topic": "b", "name": "billing"}]);
    assert_eq!(sick["subscriptions"], both);
    assert_eq!(
        endpoint(&lab.server, &lab.receiver.url("/well"))["state"],
        "admitting"
    );

    for topic in ["a", "b", "c"] {
        lab.server.publish(topic, &[event("new")]);
    }
    let arrived = lab.at_once();
    assert_eq!(arrived.len(), 1);
    assert_eq!(arrived[0].delivery.path, "/well");
    let probe = lab.next_arrival();
    assert_eq!((probe.seconds(), probe.id()), (10, "new".to_owned()));
}

#[test]
fn a_restart_does_not_forget_a_delay() {
    let mood = AnswerStatus::new(503);
    let mut lab = ClockLab::subscribed(setup(""), mood.receiver(), json!(null));
    lab.publish("early", 10);
    lab.advance_to_second(5);
    lab.publish("new", 1);
    // The last answer is known to the process that was answered; the delay and its cause to the next one.
    let delayed = |mut endpoint: Value| {
        endpoint.as_object_mut().expect("an object").remove("last");
        endpoint
    };
    let before = delayed(lab.endpoint());
    assert_eq!(before["causeText"], "HTTP 503 Service Unavailable");
    lab.server.kill();
    lab.server.start();
    assert_eq!(delayed(lab.endpoint()), before);
    assert!(lab.at_once().is_empty());
    assert_eq!(lab.next_arrival().seconds(), 10);
    // A restart keeps the length of the delay.
    lab.server.kill();
    lab.server.start();
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 30));
    assert_eq!(lab.next_arrival().seconds(), 30);
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 70));
    // A restart keeps the end of the delay.
    mood.set(200);
    assert_eq!(lab.advance_to_second(70), 11);
    lab.server.kill();
    lab.server.start();
    assert_eq!(lab.endpoint()["state"], "admitting");
    assert!(lab.all_arrivals().is_empty());
}

#[test]
fn a_delay_can_be_ended_by_hand() {
    let mood = AnswerStatus::new(503);
    let mut lab = ClockLab::subscribed(setup(""), mood.receiver(), json!(null));
    lab.publish("early", 10);
    lab.advance_to_second(5);
    lab.publish("new", 1);
    let admit = |lab: &ClockLab, body: Value| {
        let path = "/postrider/v1/endpoints/admit";
        lab.server.send("POST", path, &[AUTHORIZATION], body.to_string())
    };
    let url = lab.receiver.url("/");
    let path = "/postrider/v1/endpoints/admit";
    lab.server
        .send("POST", path, &[], json!({"endpoint": url}).to_string())
        .expect(401);
    let unknown = admit(&lab, json!({"endpoint": format!("{url}other")})).expect(404);
    assert_eq!(unknown.header("content-type"), Some("application/problem+json"));
    for body in [
        json!({}),
        json!({"endpoint": 1}),
        json!({"endpoint": url, "force": true}),
        json!([]),
    ] {
        admit(&lab, body.clone()).expect(400);
    }
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 10));

    mood.set(200);
    let ended = admit(&lab, json!({"endpoint": url})).expect(200).json();
    assert_eq!(ended, json!({"endpoint": url, "ended": true}));
    let released = lab.at_once();
    assert_eq!(
        (released.len(), released[0].id()),
        (1, "new0".to_owned()),
        "the others are not due"
    );
    assert_eq!(lab.endpoint()["state"], "admitting");
    let again = admit(&lab, json!({"endpoint": url})).expect(200).json();
    assert_eq!(again["ended"], false);
    lab.server.kill();
    lab.server.start();
    assert_eq!(lab.endpoint()["state"], "admitting");
    assert_eq!(seconds(&lab.next_arrivals()), [30; 10]);
}

#[test]
fn one_event_that_keeps_failing_says_nothing_about_the_endpoint() {
    let lab = ClockLab::subscribed(
        setup("").profile("cloud-2020"),
        AnswerStatus::new(500).receiver(),
        json!(null),
    );
    // Nine failing events are not enough either.
    lab.publish("early", 9);
    let mut rounds = 1;
    loop {
        assert_eq!(lab.endpoint()["state"], "admitting");
        match lab.next_arrivals().len() {
            0 => break,
            n => assert_eq!(n, 9),
        }
        rounds += 1;
    }
    assert_eq!(rounds, 30);
    assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 9}));
}

#[test]
fn a_success_in_between_or_an_answer_about_the_event_starts_the_count_again() {
    for between in [200, 400, 413] {
        let mood = AnswerStatus::new(500);
        let lab = ClockLab::subscribed(setup(""), mood.receiver(), json!(null));
        for (name, status, count) in [("early", 500, 9), ("between", between, 1), ("late", 500, 9)] {
            mood.set(status);
            lab.publish(name, count);
            assert_eq!(lab.endpoint()["state"], "admitting", "{between}");
        }
        mood.set(500);
        lab.publish("last", 1);
        assert_eq!(lab.endpoint()["state"], "delayed", "{between}");
    }
}

#[test]
fn answers_about_events_delay_nothing() {
    for status in [400, 413] {
        let lab = ClockLab::subscribed(setup(""), AnswerStatus::new(status).receiver(), json!(null));
        lab.publish("early", 20);
        assert_eq!(lab.endpoint()["state"], "admitting");
        assert_eq!(lab.publish("new", 1).len(), 1);
    }
}

#[test]
fn profiles_that_know_no_delay_never_delay() {
    for (profile, retry) in [("cloud-2018", 10), ("cloud-2019", 10), ("edge", 60)] {
        let lab = ClockLab::subscribed(
            setup("").profile(profile),
            AnswerStatus::new(503).receiver(),
            json!(null),
        );
        assert_eq!(lab.publish("early", 30).len(), 30);
        assert_eq!(lab.endpoint()["state"], "admitting", "{profile}");
        assert_eq!(lab.publish("new", 1).len(), 1);
        assert_eq!(seconds(&lab.next_arrivals()), [retry; 31], "{profile}");
    }
}

#[test]
fn who_knows_no_delay_is_not_held_by_one() {
    let mood = AnswerStatus::new(503);
    let lab = ClockLab::subscribed(setup(""), mood.receiver(), json!(null));
    let old = json!({"postrider": {"profile": "cloud-2018"}, "filter": {"subjectBeginsWith": "/old"}});
    lab.subscribe("old", "/", old);
    lab.publish("early", 10);
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 10));
    let mut old = event("old");
    old["subject"] = json!("/old/1");
    lab.server.publish("orders", &[old]);
    let arrived = lab.at_once();
    assert_eq!(arrived.len(), 1);
    assert_eq!(arrived[0].delivery.header("aeg-subscription-name"), Some("OLD"));
    // A failure under the profile without probation changes nothing, and a success under it ends the
    // probation.
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 10));
    mood.set(200);
    lab.advance_to_second(10);
    assert_eq!(lab.endpoint()["state"], "admitting");
}

#[test]
fn how_many_failures_it_takes_can_be_set() {
    let lab = ClockLab::subscribed(
        setup("probation.failures = 3\n"),
        AnswerStatus::new(503).receiver(),
        json!(null),
    );
    lab.publish("early", 2);
    assert_eq!(lab.endpoint()["state"], "admitting");
    lab.publish("third", 1);
    assert_eq!(lab.delay(), ("Busy".to_owned(), 0, 10));
}

#[test]
fn a_late_success_ends_a_delay() {
    let gate = Arc::new(ReplyGate::default());
    let first = AtomicBool::new(true);
    let lab = ClockLab::subscribed(
        setup(""),
        TestReceiver::answering({
            let gate = gate.clone();
            move |delivery| {
                if first.swap(false, Relaxed) {
                    gate.wait();
                    return ScriptedReply::Status(200);
                }
                match delivery.header("aeg-delivery-count") {
                    Some("0") => ScriptedReply::Silence,
                    _ => ScriptedReply::Status(200),
                }
            }
        }),
        json!(null),
    );
    let events: Vec<_> = (0..10).map(|n| event(n.to_string())).collect();
    lab.server.publish("orders", &events);
    events.iter().for_each(|_| drop(lab.receiver.next()));
    lab.advance_to_second_unanswered(31);
    assert_eq!(lab.delay(), ("TimedOut".to_owned(), 30, 40));
    gate.open();
    lab.server.counted("/deliveries/deliveredLate", 1);
    assert_eq!(lab.endpoint()["state"], "admitting");
    assert_eq!(seconds(&lab.next_arrivals()), [40; 9]);
    lab.server.counted("/deliveries/delivered", 10);
}

#[test]
fn moving_to_another_endpoint_leaves_the_delay_behind() {
    let lab = ClockLab::subscribed(
        setup(""),
        TestReceiver::answering(|delivery| {
            ScriptedReply::Status(if delivery.path == "/" { 503 } else { 200 })
        }),
        json!(null),
    );
    lab.publish("early", 10);
    lab.advance_to_second(5);
    lab.publish("new", 2);
    lab.subscribe("billing", "/well", json!(null));
    let released = lab.at_once();
    assert_eq!(released.len(), 2);
    assert!(released.iter().all(|one| one.delivery.path == "/well"));
    assert_eq!(seconds(&lab.next_arrivals()), [30; 10], "these were not due");
    assert_eq!((lab.count("delivered"), lab.dropped()), (12, json!({})));
    // A subscription that returns to the old endpoint finds it without probation.
    lab.subscribe("billing", "/", json!(null));
    assert_eq!(lab.endpoint()["state"], "admitting");
}

#[test]
fn a_probe_whose_subscription_goes_makes_room_for_the_next() {
    let lab = ClockLab::start(
        setup(""),
        TestReceiver::answering(|delivery| match delivery.header("aeg-subscription-name") {
            Some("SILENT") => ScriptedReply::Silence,
            _ => ScriptedReply::Status(503),
        }),
    );
    for (topic, name) in [("orders", "busy"), ("silent", "silent")] {
        lab.server.put_topic(topic);
        lab.server
            .subscribe(topic, name, &lab.receiver.url("/"), json!(null));
    }
    lab.publish("early", 10);
    lab.server.publish("silent", &[event("probe")]);
    assert_eq!(lab.advance_to_second_unanswered(10), 1);
    assert_eq!(lab.endpoint()["state"], "probing");
    lab.server.unsubscribe("silent", "silent");
    // The attempt ends in any case, at the latest when the timeout is over at 40 s.
    let next = lab.next_arrival();
    assert!((30..=90).contains(&next.seconds()), "{}", next.seconds());
    assert_eq!(next.delivery.header("aeg-subscription-name"), Some("BUSY"));
}

#[test]
fn of_a_batch_that_was_held_back_only_what_is_in_time_is_sent() {
    let mood = AnswerStatus::new(404);
    let properties = json!({
        "retryPolicy": {"eventExpiryInMinutes": 4},
        "destination": {"properties": {"maxEventsPerBatch": 10}},
    });
    let setup = setup("probation.failures = 1\n").profile("cloud-current");
    let lab = ClockLab::subscribed(setup, mood.receiver(), properties);
    assert_eq!(lab.publish("old", 3).len(), 1);
    assert_eq!(lab.advance_to_second(200), 0);
    assert_eq!(lab.publish("new", 2).len(), 0);
    // Deliveries about to expire are the probe, and take the others of their batch along.
    let probe = lab.next_arrival();
    assert!((229..=230).contains(&probe.seconds()), "{}", probe.seconds());
    assert_eq!(probe.delivery.ids().len(), 5);
    mood.set(200);
    let probe = lab.next_arrival();
    assert_eq!((probe.seconds(), probe.count()), (300, 1));
    assert_eq!(probe.delivery.ids(), ["new0", "new1"]);
    assert_eq!(
        (lab.count("delivered"), lab.dropped()),
        (2, json!({"TimeToLiveExceeded": 3}))
    );
}

#[test]
fn a_sick_endpoint_names_its_subscriptions_and_what_it_last_answered() {
    let mood = AnswerStatus::new(500);
    let lab = ClockLab::subscribed(setup(""), mood.receiver(), json!(null));
    assert_eq!(lab.endpoint().get("last"), None, "nothing was sent there yet");
    let own = |path: &str| {
        let path = format!("/postrider/v1/{path}");
        lab.server
            .send("GET", &path, &[AUTHORIZATION], "")
            .expect(200)
            .json()
    };
    lab.publish("early", 10);
    let words = "HTTP 500 Internal Server Error";
    let endpoint = lab.endpoint();
    assert_eq!(
        (&endpoint["cause"], &endpoint["causeText"]),
        (&json!("GenericError"), &json!(words))
    );
    let last = &endpoint["last"];
    assert_eq!(
        (&last["outcome"], &last["status"], &last["text"]),
        (&json!("GenericError"), &json!(500), &json!(words))
    );
    let stats = own("stats");
    let sick = &stats["sick"][0];
    assert_eq!(
        (&sick["causeText"], &sick["status"]),
        (&json!(words), &json!(500)),
        "{sick:#}"
    );
    let named = &sick["subscriptions"][0];
    assert_eq!(
        (&named["topic"], &named["name"]),
        (&json!("orders"), &json!("billing"))
    );
    let id = named["id"].as_str().expect("a resource id");
    assert!(id.ends_with("/eventSubscriptions/billing"), "{id}");
    let one = own(&format!("subscription?id={id}"));
    assert_eq!(one["causeText"], words);
    let reasons = one["reasons"].as_array().expect("a list").iter();
    let delayed = reasons.clone().find(|one| one["code"] == "delayed");
    let text = delayed.map(|one| one["text"].to_string()).unwrap_or_default();
    assert!(text.contains(words), "{one:#}");
    // The endpoint is healthy again.
    mood.set(200);
    lab.all_arrivals();
    let endpoint = lab.endpoint();
    assert_eq!(
        (&endpoint["state"], &endpoint["last"]["text"]),
        (&json!("admitting"), &json!("HTTP 200 OK"))
    );
    assert_eq!(endpoint.get("causeText"), None);
}
