//! Answers after the response timeout.

use crate::clock_lab::{ClockLab, seconds};
use crate::dead_letters::{dead_letter_to, letter_counts};
use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, event};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A lab whose receiver holds back its first answers, each until its gate is opened.
struct LateAnswerLab {
    lab: ClockLab,
    gates: Vec<Arc<ReplyGate>>,
}

impl LateAnswerLab {
    /// The first requests are answered with `held` when their gates are opened, the others with 500
    /// at once.
    fn start<const N: usize>(setup: ServerSetup, held: [u16; N], properties: Value) -> LateAnswerLab {
        let gates: Vec<Arc<ReplyGate>> = held.iter().map(|_| Arc::default()).collect();
        let number = AtomicUsize::new(0);
        let receiver = TestReceiver::answering({
            let gates = gates.clone();
            move |_| {
                let number = number.fetch_add(1, Relaxed);
                let Some(gate) = gates.get(number) else {
                    return ScriptedReply::Status(500);
                };
                gate.wait();
                ScriptedReply::Status(held[number])
            }
        });
        let lab = ClockLab::subscribed(setup, receiver, properties);
        LateAnswerLab { lab, gates }
    }

    /// Starts with one event, whose first attempt has reached the receiver.
    fn attempted<const N: usize>(profile: &'static str, held: [u16; N], properties: Value) -> LateAnswerLab {
        let late = LateAnswerLab::start(ServerSetup::test_clock("").profile(profile), held, properties);
        late.lab.server.publish("orders", &[event("a")]);
        late.lab.receiver.next();
        late
    }
}

impl Drop for LateAnswerLab {
    /// Opens all gates, so that no thread of the receiver stays blocked after the test.
    fn drop(&mut self) {
        self.gates.iter().for_each(|gate| gate.open());
    }
}

#[test]
fn a_late_success_within_three_minutes_ends_it() {
    // The attempt times out after 30 s; the next ones come 10, 30 and 60 s after each other.
    let in_2021: &[(u64, usize)] = &[(31, 0), (39, 0), (179, 3)];
    for (profile, answers) in [
        ("cloud-2019", &in_2021[2..]),
        ("cloud-2020", &in_2021[2..]),
        ("cloud-2021", in_2021),
        ("cloud-current", &in_2021[..1]),
    ] {
        for &(answered_at, attempts_before) in answers {
            let late = LateAnswerLab::attempted(profile, [200], json!(null));
            let lab = &late.lab;
            let before = lab.advance_to_second_unanswered(answered_at);
            assert_eq!(before, attempts_before, "{profile} {answered_at}");
            assert_eq!((lab.count("delivered"), lab.count("deliveredLate")), (0, 0));
            late.gates[0].open();
            lab.server.counted("/deliveries/deliveredLate", 1);
            assert_eq!(lab.pass(48 * 3600), 0, "{profile} {answered_at}");
            assert_eq!(lab.count("delivered"), 1);
            assert_eq!(lab.count("attempts"), 1 + attempts_before as u64);
            assert_eq!(lab.dropped(), json!({}));
        }
    }
}

#[test]
fn after_three_minutes_it_is_too_late() {
    let late = LateAnswerLab::attempted("cloud-2021", [200], json!(null));
    let lab = &late.lab;
    let mut attempts = Vec::new();
    for _ in 0..3 {
        attempts.push(lab.next_arrival().seconds());
    }
    assert_eq!(attempts, [40, 70, 130]);
    lab.advance_to_second(181);
    late.gates[0].open();
    // The delivery continues as if there had been no answer.
    let more = lab.all_arrivals();
    assert_eq!(seconds(&more), [430, 1030, 2830, 6430, 17_230, 38_830, 82_030]);
    assert_eq!((lab.count("delivered"), lab.count("deliveredLate")), (0, 0));
    assert_eq!(lab.dropped(), json!({"TimeToLiveExceeded": 1}));
}

#[test]
fn an_answer_in_time_is_not_late() {
    for (profile, answered_at) in [("cloud-2021", 29), ("cloud-2018", 59), ("edge", 59)] {
        let late = LateAnswerLab::attempted(profile, [200], json!(null));
        let lab = &late.lab;
        assert_eq!(lab.advance_to_second_unanswered(answered_at), 0);
        late.gates[0].open();
        lab.server.counted("/deliveries/delivered", 1);
        assert_eq!(lab.pass(48 * 3600), 0, "{profile}");
        assert_eq!(
            (lab.count("deliveredLate"), lab.count("attemptsFailed")),
            (0, 0),
            "{profile}"
        );
    }
}

#[test]
fn profiles_without_a_window_hear_nothing_late() {
    for (profile, retries) in [("cloud-2018", [70, 100, 160]), ("edge", [120, 720, 1320])] {
        let late =
            LateAnswerLab::attempted(profile, [200], json!({"retryPolicy": {"maxDeliveryAttempts": 4}}));
        let lab = &late.lab;
        assert_eq!(lab.advance_to_second_unanswered(59), 0);
        assert_eq!(lab.count("attemptsFailed"), 0, "{profile} waits for a minute");
        assert_eq!(lab.advance_to_second_unanswered(61), 0);
        assert_eq!(lab.count("attemptsFailed"), 1);
        late.gates[0].open();
        assert_eq!(seconds(&lab.all_arrivals()), retries, "{profile}");
        assert_eq!((lab.count("delivered"), lab.count("deliveredLate")), (0, 0));
        assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 1}));
    }
}

#[test]
fn a_late_failure_changes_nothing() {
    // The same holds for a late status that would have been final.
    for status in [500, 400, 503] {
        let four = json!({"retryPolicy": {"maxDeliveryAttempts": 4}});
        let late = LateAnswerLab::attempted("cloud-2021", [status], four);
        let lab = &late.lab;
        lab.advance_to_second_unanswered(31);
        late.gates[0].open();
        assert_eq!(seconds(&lab.all_arrivals()), [40, 70, 130], "{status}");
        assert_eq!((lab.count("attempts"), lab.count("delivered")), (4, 0));
        assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 1}));
    }
}

#[test]
fn a_late_success_counts_although_the_next_attempt_is_under_way() {
    // The second attempt may end with a failure, with a success, or not at all in time.
    for second in [Some(500), Some(200), None] {
        let late = LateAnswerLab::attempted("cloud-2021", [200, second.unwrap_or(200)], json!(null));
        let lab = &late.lab;
        assert_eq!(lab.advance_to_second_unanswered(41), 1);
        late.gates[0].open();
        // The late success arrives during the second attempt, which shows only when that ends.
        assert_eq!(lab.advance_to_second_unanswered(42), 0);
        if second.is_some() {
            late.gates[1].open();
        }
        assert_eq!(lab.pass(48 * 3600), 0, "{second:?}");
        assert_eq!(
            (lab.count("attempts"), lab.count("delivered")),
            (2, 1),
            "{second:?}"
        );
        assert_eq!(lab.dropped(), json!({}));
    }
}

#[test]
fn a_late_success_ends_it_for_the_whole_batch() {
    let batches = json!({"destination": {"properties": {"maxEventsPerBatch": 10}}});
    let late = LateAnswerLab::start(ServerSetup::test_clock(""), [200], batches);
    let lab = &late.lab;
    lab.server
        .publish("orders", &[event("a"), event("b"), event("c")]);
    assert_eq!(lab.receiver.next().ids(), ["a", "b", "c"]);
    // In cloud-2021 a batch has 60 seconds for its answer.
    lab.advance_to_second_unanswered(61);
    late.gates[0].open();
    lab.server.counted("/deliveries/deliveredLate", 3);
    assert_eq!(lab.pass(48 * 3600), 0);
    assert_eq!((lab.count("attempts"), lab.count("delivered")), (1, 3));
}

#[test]
fn the_last_attempt_is_over_when_its_time_is() {
    let late = LateAnswerLab::attempted(
        "cloud-2021",
        [200],
        json!({"retryPolicy": {"maxDeliveryAttempts": 1}}),
    );
    let lab = &late.lab;
    lab.advance_to_second_unanswered(29);
    assert_eq!(lab.dropped(), json!({}));
    lab.advance_to_second_unanswered(30);
    assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 1}));
    late.gates[0].open();
    assert_eq!(lab.pass(3600), 0);
    assert_eq!((lab.count("attempts"), lab.count("delivered")), (1, 0));
    assert_eq!(lab.dropped(), json!({"MaxDeliveryAttemptsExceeded": 1}));
}

#[test]
fn a_late_success_for_the_last_attempt_withdraws_its_dead_letter() {
    let once = json!({"retryPolicy": {"maxDeliveryAttempts": 1}});
    let late = LateAnswerLab::attempted("cloud-2021", [200], dead_letter_to("local", "dead", once));
    let lab = &late.lab;
    lab.advance_to_second_unanswered(179);
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    late.gates[0].open();
    lab.server.counted("/deliveries/deliveredLate", 1);
    assert_eq!(letter_counts(&lab.server), [0, 0, 0]);
    assert_eq!(lab.pass(3600), 0);
    assert_eq!(letter_counts(&lab.server), [0, 0, 0]);
    assert_eq!(
        (lab.count("delivered"), lab.count("deadLettered"), lab.dropped()),
        (1, 0, json!({}))
    );
}

#[test]
fn after_three_minutes_its_dead_letter_stays() {
    let once = json!({"retryPolicy": {"maxDeliveryAttempts": 1}});
    let late = LateAnswerLab::attempted("cloud-2021", [200], dead_letter_to("local", "dead", once));
    let lab = &late.lab;
    lab.advance_to_second_unanswered(181);
    late.gates[0].open();
    lab.advance_to_second(330);
    assert_eq!(letter_counts(&lab.server), [0, 1, 1]);
    assert_eq!((lab.count("delivered"), lab.count("deadLettered")), (0, 1));
}

#[test]
fn a_restart_forgets_that_an_answer_may_come_but_not_the_retry() {
    let mut late = LateAnswerLab::attempted("cloud-2021", [200], json!(null));
    late.lab.advance_to_second_unanswered(31);
    late.lab.server.kill();
    late.gates[0].open();
    late.lab.server.start();
    let second = late.lab.next_arrival();
    assert_eq!((second.seconds(), second.count()), (40, 1));
}
