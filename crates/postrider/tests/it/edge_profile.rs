//! The IoT Edge module's profile: limits, variables, and success statuses.

use crate::clock_lab::{ClockLab, seconds};
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, event};
use serde_json::{Value, json};

const ATTEMPTS_VARIABLE: &str = "broker__defaultMaxDeliveryAttempts";
const TIME_VARIABLE: &str = "broker__defaultEventTimeToLiveInSeconds";

fn edge() -> ServerSetup {
    ServerSetup::test_clock("").profile("edge")
}

/// Times of the attempts of an event that always fails, and the reason for which it was dropped.
#[track_caller]
fn attempts(setup: ServerSetup, properties: Value) -> (Vec<u64>, Value) {
    let lab = ClockLab::subscribed(
        setup,
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        properties,
    );
    lab.server.publish("orders", &[event("a")]);
    (seconds(&lab.all_arrivals()), lab.dropped())
}

#[test]
fn thirteen_attempts_fit_into_two_hours() {
    let minutes = [0, 1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 111];
    let expected = minutes.map(|minute| minute * 60).to_vec();
    assert_eq!(
        attempts(edge(), json!(null)),
        (expected, json!({"TimeToLiveExceeded": 1}))
    );
}

#[test]
fn the_modules_variables_change_its_limits() {
    let attempts_max = (vec![0, 60, 660], json!({"MaxDeliveryAttemptsExceeded": 1}));
    for name in [ATTEMPTS_VARIABLE, "broker:defaultMaxDeliveryAttempts"] {
        assert_eq!(
            attempts(edge().with(name, "3"), json!(null)),
            attempts_max,
            "{name}"
        );
    }
    let time_to_live = (vec![0, 60, 660, 1260], json!({"TimeToLiveExceeded": 1}));
    for name in [TIME_VARIABLE, "broker:defaultEventTimeToLiveInSeconds"] {
        assert_eq!(
            attempts(edge().with(name, "1800"), json!(null)),
            time_to_live,
            "{name}"
        );
    }
    let both = edge().with(ATTEMPTS_VARIABLE, "3").with(TIME_VARIABLE, "1800");
    assert_eq!(attempts(both, json!(null)), attempts_max);
    let both = edge().with(ATTEMPTS_VARIABLE, "3").with(TIME_VARIABLE, "90");
    assert_eq!(
        attempts(both, json!(null)),
        (vec![0, 60], json!({"TimeToLiveExceeded": 1}))
    );
}

#[test]
fn a_subscription_has_the_last_word_about_its_limits() {
    let setup = || edge().with(ATTEMPTS_VARIABLE, "3").with(TIME_VARIABLE, "1800");
    // The module's own sample asks for fifty attempts, which end at 1 + 48 * 10 minutes.
    let sample = json!({"retryPolicy": {"eventExpiryInMinutes": 490, "maxDeliveryAttempts": 50}});
    let mut expected: Vec<u64> = (0..49).map(|n| 60 + n * 600).collect();
    expected.insert(0, 0);
    assert_eq!(
        attempts(setup(), sample),
        (expected, json!({"MaxDeliveryAttemptsExceeded": 1}))
    );
    // Omitted settings are the module's.
    let more = json!({"retryPolicy": {"maxDeliveryAttempts": 50}});
    assert_eq!(
        attempts(setup(), more),
        (vec![0, 60, 660, 1260], json!({"TimeToLiveExceeded": 1}))
    );
    let longer = json!({"retryPolicy": {"eventExpiryInMinutes": 120}});
    assert_eq!(
        attempts(setup(), longer),
        (vec![0, 60, 660], json!({"MaxDeliveryAttemptsExceeded": 1}))
    );
}

#[test]
fn the_modules_variables_hold_for_the_edge_api_whatever_the_profile() {
    let cloud = || ServerSetup::test_clock("");
    let three = (vec![0, 10, 40], json!({"MaxDeliveryAttemptsExceeded": 1}));
    let setup = cloud().with(ATTEMPTS_VARIABLE, "3");
    assert_eq!(attempts(setup, json!(null)), three);
    // 1800 seconds end between the waits of ten and thirty minutes.
    let (made, dropped) = attempts(cloud().with(TIME_VARIABLE, "1800"), json!(null));
    assert_eq!((made.len(), dropped), (6, json!({"TimeToLiveExceeded": 1})));
    let minutes = json!({"retryPolicy": {"eventTimeToLiveInMinutes": 30}});
    assert_eq!(attempts(cloud(), minutes).0.len(), 6, "the cloud's name of it");
}

#[test]
fn the_modules_variables_do_not_change_a_profile_that_is_named() {
    let setup = ServerSetup::test_clock("")
        .with(ATTEMPTS_VARIABLE, "3")
        .with(TIME_VARIABLE, "1800");
    let named = json!({"postrider": {"profile": "cloud-2021"}});
    let (attempts, dropped) = attempts(setup, named);
    assert_eq!((attempts.len(), dropped), (11, json!({"TimeToLiveExceeded": 1})));
}

#[test]
fn a_variable_that_is_misspelled_in_the_documents_is_warned_of() {
    let setup = edge().with("brokers__defaultMaxDeliveryAttempts", "3");
    let lab = ClockLab::subscribed(
        setup,
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        json!(null),
    );
    lab.server
        .logged(&["WARN", "brokers__defaultMaxDeliveryAttempts", ATTEMPTS_VARIABLE]);
    lab.server.publish("orders", &[event("a")]);
    assert_eq!(lab.all_arrivals().len(), 13, "it has no effect");
}

#[test]
fn a_limit_that_is_no_number_is_refused() {
    for value in ["0", "-1", "many", ""] {
        for name in [ATTEMPTS_VARIABLE, TIME_VARIABLE] {
            let told = edge().with(name, value).refusal();
            assert!(told.contains(name), "{value:?}: {told}");
        }
    }
}

#[test]
fn strictly_only_200_is_success() {
    for (strict, delivered) in [("false", vec![200, 201, 202, 203, 204]), ("true", vec![200])] {
        let config = format!("edge.strict_success = {strict}\n");
        let lab = ClockLab::start(
            ServerSetup::test_clock(config).profile("edge"),
            TestReceiver::by_path(),
        );
        lab.server.put_topic("orders");
        for status in 200..=205 {
            lab.subscribe(&format!("to-{status}"), &format!("/{status}"), json!(null));
        }
        lab.server.publish("orders", &[event("a")]);
        assert_eq!(lab.at_once().len(), 6);
        let mut retried: Vec<_> = lab
            .next_arrivals()
            .iter()
            .map(|one| one.delivery.path.clone())
            .collect();
        retried.sort();
        let failures = (200..=205).filter(|status| !delivered.contains(status));
        let expected: Vec<_> = failures.map(|status| format!("/{status}")).collect();
        assert_eq!(retried, expected, "{strict}");
        assert_eq!(lab.count("delivered"), delivered.len() as u64);
    }
}

#[test]
fn strictness_is_the_edge_profiles_alone() {
    let lab = ClockLab::start(
        ServerSetup::test_clock("edge.strict_success = true\n"),
        TestReceiver::by_path(),
    );
    lab.server.put_topic("orders");
    lab.subscribe("billing", "/204", json!(null));
    lab.server.publish("orders", &[event("a")]);
    assert_eq!(lab.all_arrivals().len(), 1);
    assert_eq!(lab.count("delivered"), 1);
}
