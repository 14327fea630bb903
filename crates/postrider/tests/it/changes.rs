//! Deliveries in progress when a subscription changes, is deleted, or expires.

use crate::clock_lab::{ClockLab, seconds, timestamp};
use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, event};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

fn failing() -> TestReceiver {
    TestReceiver::answering(|_| ScriptedReply::Status(500))
}

#[test]
fn what_waits_for_a_subscription_goes_with_it_and_is_counted() {
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.subscribe("other", "/other", json!(null));
    lab.server
        .publish("orders", &[event("a"), event("b"), event("c")]);
    assert_eq!(lab.at_once().len(), 6);
    lab.server.unsubscribe("orders", "billing");
    assert_eq!(lab.dropped(), json!({"SubscriptionDeleted": 3}));
    let left = lab.next_arrivals();
    assert_eq!(seconds(&left), [10; 3]);
    assert!(left.iter().all(|one| one.delivery.path == "/other"));

    lab.server
        .edge("DELETE", "/topics/orders", &Value::Null)
        .expect(200);
    assert_eq!(lab.dropped(), json!({"SubscriptionDeleted": 6}));
    assert_eq!(lab.pass(48 * 3600), 0);
    assert!(lab.receiver.take_received().is_empty());
}

#[test]
fn a_subscription_that_is_made_again_does_not_inherit() {
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.server.publish("orders", &[event("a")]);
    assert_eq!(lab.at_once().len(), 1);
    lab.server.unsubscribe("orders", "billing");
    lab.subscribe("billing", "/", json!(null));
    assert!(lab.all_arrivals().is_empty());
    assert_eq!(lab.dropped(), json!({"SubscriptionDeleted": 1}));
}

/// Publishes one event, deletes its subscription during the first attempt, then lets the attempt
/// end.
fn deleted_under_way(delete: impl FnOnce(&ClockLab), status: u16) -> (u64, Value) {
    let gate = Arc::new(ReplyGate::default());
    let receiver = TestReceiver::answering({
        let gate = gate.clone();
        move |_| {
            gate.wait();
            ScriptedReply::Status(status)
        }
    });
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), receiver, json!(null));
    lab.server.publish("orders", &[event("a")]);
    lab.receiver.next();
    delete(&lab);
    gate.open();
    lab.server.counted("/deliveries/attempts", 1);
    assert_eq!(lab.pass(48 * 3600), 0);
    assert!(lab.receiver.take_received().is_empty());
    (lab.count("delivered"), lab.dropped())
}

#[test]
fn an_event_under_way_when_its_subscription_goes_has_one_end() {
    for status in [200, 500] {
        let ends = deleted_under_way(|lab| lab.server.unsubscribe("orders", "billing"), status);
        let dropped = ends
            .1
            .get("SubscriptionDeleted")
            .and_then(Value::as_u64)
            .unwrap_or(0);
        assert_eq!(ends.0 + dropped, 1, "{status}: {ends:?}");
        if status == 500 {
            assert_eq!(ends, (0, json!({"SubscriptionDeleted": 1})));
        }
    }
}

#[test]
fn another_endpoint_holds_for_the_next_attempt() {
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.server.publish("orders", &[event("a")]);
    assert_eq!(lab.at_once().len(), 1);
    lab.advance_to_second(5);
    lab.subscribe("billing", "/moved", json!(null));
    assert!(lab.at_once().is_empty(), "it is not due yet");
    let second = lab.next_arrival();
    assert_eq!((second.seconds(), second.count()), (10, 1));
    assert_eq!(second.delivery.path, "/moved");
}

#[test]
fn other_limits_hold_for_the_next_failure() {
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.subscribe("billing", "/", json!({"retryPolicy": {"maxDeliveryAttempts": 2}}));
    assert_eq!(seconds(&lab.all_arrivals()), [10]);
    assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 1}));
}

#[test]
fn a_subscription_ends_when_its_time_is_over() {
    let receiver = failing();
    let end = json!("2030-01-01T00:00:00Z");
    // A declared subscription, and one that was created by request.
    let config = format!(
        "[[topic]]\nname = \"orders\"\n[[topic.subscription]]\nname = \"declared\"\nexpiration_time_utc = {end}\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{}\" }} }}\n",
        receiver.url("/declared")
    );
    let mut lab = ClockLab::start(ServerSetup::test_clock(config), receiver);
    lab.subscribe("made", "/made", json!({"expirationTimeUtc": end}));
    lab.subscribe("lasting", "/lasting", json!(null));
    assert_eq!(lab.server.advance(&json!({"to": "2029-12-31T23:58:00Z"})).1, 0);
    lab.start = timestamp(&json!("2029-12-31T23:58:00Z"));
    lab.server.publish("orders", &[event("a"), event("b")]);
    assert_eq!(lab.at_once().len(), 6);

    // Attempts are due at 10, 40 and 100 s; the subscription expires at 120 s.
    assert_eq!(lab.advance_to_second(119), 18);
    assert_eq!(lab.dropped(), json!({}));
    let show = |lab: &ClockLab, name: &str| {
        let path = format!("/topics/orders/eventSubscriptions/{name}");
        lab.server.edge("GET", &path, &Value::Null).status
    };
    assert_eq!(
        ["declared", "made", "lasting"].map(|name| show(&lab, name)),
        [200; 3]
    );
    assert_eq!(lab.advance_to_second(120), 0);
    assert_eq!(lab.dropped(), json!({"SubscriptionExpired": 4}));
    assert_eq!(
        ["declared", "made", "lasting"].map(|name| show(&lab, name)),
        [404, 404, 200]
    );
    lab.server.publish("orders", &[event("c")]);
    let arrived = lab.at_once();
    assert_eq!(arrived.len(), 1);
    assert_eq!(arrived[0].delivery.path, "/lasting");

    // The configuration still declares the expired subscription, which must not prevent a start.
    for stop_gently in [false, true] {
        match stop_gently {
            true => lab.server.stop(),
            false => lab.server.kill(),
        }
        lab.server.start();
        assert_eq!(show(&lab, "declared"), 404);
    }
    let paths: Vec<_> = lab
        .all_arrivals()
        .into_iter()
        .map(|one| one.delivery.path)
        .collect();
    assert!(
        !paths.is_empty() && paths.iter().all(|path| path == "/lasting"),
        "{paths:?}"
    );
}

#[test]
fn an_end_that_is_to_come_is_not_forgotten_by_a_restart() {
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    let at = lab.server.now() + Duration::from_secs(5);
    lab.subscribe("billing", "/", json!({"expirationTimeUtc": at.to_string()}));
    lab.server.kill();
    lab.server.start();
    assert_eq!(lab.advance_to_second(5), 0);
    assert_eq!(lab.dropped(), json!({"SubscriptionExpired": 1}));
    assert!(lab.all_arrivals().is_empty());
}

#[test]
fn profiles_of_topics_and_subscriptions_win_over_the_servers() {
    let lab = ClockLab::start(ServerSetup::test_clock("").profile("cloud-2018"), failing());
    let named = |profile: &str| json!({"postrider": {"profile": profile}});
    lab.server.put_topic("orders");
    let edge = json!({"properties": named("edge")});
    lab.server.edge("PUT", "/topics/local", &edge).expect(200);
    lab.subscribe("default", "/default", json!(null));
    lab.subscribe("own", "/own", named("cloud-2021"));
    for (name, properties) in [("default", json!(null)), ("own", named("cloud-2021"))] {
        let url = lab.receiver.url(&format!("/local-{name}"));
        lab.server.subscribe("local", name, &url, properties);
    }
    lab.server.publish("orders", &[event("a")]);
    lab.server.publish("local", &[event("a")]);
    let arrivals = lab.all_arrivals();
    let attempts = |path: &str| {
        let to_path = arrivals.iter().filter(|one| one.delivery.path == path);
        let seconds: Vec<_> = to_path.map(|one| one.seconds()).collect();
        (seconds.len(), seconds[1], seconds[seconds.len() - 1])
    };
    assert_eq!(attempts("/default"), (30, 10, 85_600));
    assert_eq!(attempts("/own"), (11, 10, 82_000));
    assert_eq!(attempts("/local-default"), (13, 60, 6660));
    assert_eq!(attempts("/local-own"), (11, 10, 82_000));
}

#[test]
fn another_profile_holds_for_the_next_failure() {
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(), json!(null));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    // The wait that was already chosen stays; later ones follow the module's profile.
    let edge = json!({"properties": {"postrider": {"profile": "edge"}}});
    lab.server.edge("PUT", "/topics/orders", &edge).expect(200);
    let next: Vec<_> = (0..3).map(|_| lab.next_arrival().seconds()).collect();
    assert_eq!(next, [10, 610, 1210]);
}

#[test]
fn a_profile_of_ones_own_is_made_in_the_configuration() {
    let config = "profile = \"custom\"\n[profile_custom]\nbase = \"cloud-2018\"\nschedule = [\"1s\", \"5s\"]\n\
        success = [200, 418]\nfinal = [410]\nfloors = { \"503\" = \"1m\" }\nattempts_max = 4\ntime_to_live = \"100s\"\n";
    let lab = ClockLab::start(ServerSetup::test_clock(config), TestReceiver::by_path());
    lab.server.put_topic("orders");
    for status in [200, 202, 410, 418, 503] {
        lab.subscribe(&format!("to-{status}"), &format!("/{status}"), json!(null));
    }
    lab.server.publish("orders", &[event("a")]);
    let arrivals = lab.all_arrivals();
    let attempts = |path: &str| {
        let to_path = arrivals.iter().filter(|one| one.delivery.path == path);
        to_path.map(|one| one.seconds()).collect::<Vec<_>>()
    };
    assert_eq!(attempts("/200"), [0]);
    assert_eq!(attempts("/418"), [0]);
    assert_eq!(attempts("/410"), [0]);
    assert_eq!(attempts("/202"), [0, 1, 6, 11]);
    assert_eq!(attempts("/503"), [0, 60]);
    let dropped = json!({
        "UndeliverableDueToClientError": 1,
        "MaxDeliveryAttemptsExceeded": 1,
        "TimeToLiveExceeded": 1,
    });
    assert_eq!((lab.count("delivered"), lab.dropped()), (2, dropped));
}
