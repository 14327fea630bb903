//! Expiry of events, and receivers that ask for more time.

use crate::clock_lab::{ClockLab, seconds, seconds_and_counts, timestamp};
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, event};
use serde_json::{Value, json};

fn failing(status: u16) -> TestReceiver {
    TestReceiver::answering(move |_| ScriptedReply::Status(status))
}

fn retry_policy(attempts_max: u32, minutes: u32) -> Value {
    json!({"retryPolicy": {"maxDeliveryAttempts": attempts_max, "eventExpiryInMinutes": minutes}})
}

#[test]
fn expiry_between_two_slots_is_noticed_at_the_slot() {
    for (profile, attempts, slot) in [
        ("cloud-2018", vec![0, 10, 40, 100, 400, 1000], 2800),
        ("cloud-2021", vec![0, 10, 40, 100, 400, 1000], 2800),
        ("edge", vec![0, 60, 660, 1260], 1860),
    ] {
        let setup = ServerSetup::test_clock("").profile(profile);
        // The documents' own example: of ten attempts six fit into half an hour.
        let lab = ClockLab::subscribed(setup, failing(500), retry_policy(10, 30));
        lab.server.publish("orders", &[event("a")]);
        let mut made = seconds(&lab.at_once());
        while made.len() < attempts.len() {
            made.push(lab.next_arrival().seconds());
        }
        assert_eq!(made, attempts, "{profile}");
        for waiting in [1800, slot - 1] {
            assert_eq!(lab.advance_to_second(waiting), 0, "{profile}");
            assert_eq!(lab.dropped(), json!({}), "{profile} at {waiting}");
        }
        assert_eq!(lab.advance_to_second(slot), 0, "{profile}");
        assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 1}), "{profile}");
        assert_eq!(lab.count("attempts"), attempts.len() as u64);
    }
}

#[test]
fn whichever_limit_is_reached_first_ends_it() {
    for (attempts_max, minutes, attempts, reason) in [
        (3, 1440, vec![0, 10, 40], "MaxDeliveryAttemptsExceeded"),
        (4, 2, vec![0, 10, 40, 100], "MaxDeliveryAttemptsExceeded"),
        (5, 2, vec![0, 10, 40, 100], "TimeToLiveExceeded"),
        (30, 1, vec![0, 10, 40], "TimeToLiveExceeded"),
        (1, 1, vec![0], "MaxDeliveryAttemptsExceeded"),
    ] {
        let lab = ClockLab::subscribed(
            ServerSetup::test_clock(""),
            failing(500),
            retry_policy(attempts_max, minutes),
        );
        lab.server.publish("orders", &[event("a")]);
        assert_eq!(seconds(&lab.all_arrivals()), attempts, "{attempts_max} {minutes}");
        assert_eq!(lab.dropped(), json!({reason: 1}), "{attempts_max} {minutes}");
    }
}

#[test]
fn the_last_attempt_ends_it_at_once() {
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(500), retry_policy(3, 1440));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    assert_eq!(lab.advance_to_second(39), 1);
    assert_eq!(lab.dropped(), json!({}));
    assert_eq!(lab.advance_to_second(40), 1);
    assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 1}));
}

#[test]
fn time_counts_from_publishing_for_each_event() {
    let lab = ClockLab::subscribed(ServerSetup::test_clock(""), failing(500), retry_policy(30, 1));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.advance_to_second(35);
    lab.server.publish("orders", &[event("b")]);
    lab.at_once();
    lab.advance_to_second(99);
    assert_eq!(lab.dropped(), json!({}));
    lab.advance_to_second(100);
    assert_eq!(
        lab.dropped(),
        json!({"TimeToLiveExceeded": 1}),
        "a, whose fourth slot this is"
    );
    lab.advance_to_second(134);
    assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 1}));
    lab.advance_to_second(135);
    assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 2}));
    assert_eq!(lab.count("attempts"), 6);
}

/// A receiver that answers with this status and `Retry-After`.
fn asking(status: u16, retry_after: &'static str) -> TestReceiver {
    TestReceiver::answering(move |_| {
        let head =
            format!("HTTP/1.1 {status} Later\r\nretry-after: {retry_after}\r\ncontent-length: 0\r\n\r\n");
        ScriptedReply::Bytes(head.into_bytes())
    })
}

#[test]
fn a_busy_receiver_may_ask_for_more_time_but_not_for_less() {
    for (status, retry_after, attempts) in [
        (429, "120", [0, 120, 240]),
        (503, "120", [0, 120, 240]),
        // Shorter than the schedule's step or the floor: no effect.
        (429, "5", [0, 10, 40]),
        (503, "5", [0, 30, 60]),
        (429, "0", [0, 10, 40]),
        // Between one step and the next.
        (429, "20", [0, 20, 50]),
        // Meaningless, or not supported for this status: no effect.
        (429, "soon", [0, 10, 40]),
        (429, "-60", [0, 10, 40]),
        (500, "600", [0, 10, 40]),
        (502, "600", [0, 10, 40]),
        (429, "Fri, 31 Feb 2031 25:00:00 GMT", [0, 10, 40]),
    ] {
        let lab = ClockLab::subscribed(
            ServerSetup::test_clock(""),
            asking(status, retry_after),
            retry_policy(3, 1440),
        );
        lab.server.publish("orders", &[event("a")]);
        let arrivals = lab.all_arrivals();
        let expected = [(attempts[0], 0), (attempts[1], 1), (attempts[2], 2)];
        assert_eq!(seconds_and_counts(&arrivals), expected, "{status} {retry_after}");
    }
}

#[test]
fn a_date_to_come_back_at_is_one_by_the_test_clock() {
    for status in [429, 503] {
        let receiver = asking(status, "Tue, 01 Jan 2030 00:05:00 GMT");
        let mut lab = ClockLab::subscribed(ServerSetup::test_clock(""), receiver, retry_policy(3, 1440));
        let new_year = json!("2030-01-01T00:00:00Z");
        assert_eq!(lab.server.advance(&json!({"to": new_year})).1, 0);
        lab.start = timestamp(&new_year);
        lab.server.publish("orders", &[event("a")]);
        // The second answer names a time that has passed: the schedule holds.
        let next = 300 + 30;
        assert_eq!(seconds(&lab.all_arrivals()), [0, 300, next], "{status}");
    }
}

#[test]
fn who_asks_for_more_time_than_an_event_has_is_not_heard_past_its_end() {
    for retry_after in [
        "7200",
        "1801",
        "4294967296",
        "9223372036854775807",
        "18446744073709551615",
        "Fri, 31 Dec 9999 23:59:59 GMT",
    ] {
        for status in [429, 503] {
            let receiver = asking(status, retry_after);
            let lab = ClockLab::subscribed(ServerSetup::test_clock(""), receiver, retry_policy(30, 30));
            lab.server.publish("orders", &[event("a")]);
            assert_eq!(seconds(&lab.at_once()), [0]);
            assert_eq!(lab.advance_to_second(1799), 0, "{status} {retry_after}");
            assert_eq!(lab.dropped(), json!({}));
            assert_eq!(lab.advance_to_second(1800), 0);
            assert_eq!(
                lab.dropped(),
                json!({"TimeToLiveExceeded": 1}),
                "{status} {retry_after}"
            );
        }
    }
}
