//! A recorder in a cluster: events are accepted at one node and attempted at another.

mod support;

use postrider_core::ids::Position;
use postrider_core::outcome::Outcome;
use postrider_core::time::Clock;
use postrider_engine::recorder::{
    AttemptDecision, DeliveryState, EventPlace, EventQuery, EventRecorder, LiveStreamHappening,
    RecordingQueries, SubscriptionFate,
};
use postrider_recorder::{Config, FlightRecorder};
use std::sync::Arc;
use std::time::Duration;
use support::{SetClock, attempt, audience, one, retry, run};

const MINUTE: Duration = Duration::from_secs(60);

fn place(first: u64) -> EventPlace {
    EventPlace {
        first: Position(first),
        index: 0,
    }
}

#[test]
fn what_was_recorded_before_a_question_is_found_by_it() {
    let directory = tempfile::tempdir().unwrap();
    let clock = SetClock::new();
    let recorder = FlightRecorder::open(Config::new(directory.path().to_owned()), clock.clone()).unwrap();
    let audience = audience(1, 10, 1);
    for n in 0..200 {
        recorder.accepted(one(&audience, n, clock.now()));
        let found = recorder
            .events_at(&[place(n)])
            .remove(0)
            .expect("it was recorded");
        assert_eq!(recorder.trace(&found.id).len(), 1);
        assert_eq!(recorder.recent(None, 1)[0].batch.received, clock.now());
        clock.advance(Duration::from_secs(1));
    }
}

#[test]
fn what_happened_to_events_of_other_nodes_is_found_by_their_places() {
    let directory = tempfile::tempdir().unwrap();
    let clock = SetClock::new();
    let config = Config {
        segment_span: MINUTE,
        ..Config::new(directory.path().to_owned())
    };
    let recorder = FlightRecorder::open(config.clone(), clock.clone()).unwrap();
    let audience = audience(1, 10, 1);
    let subscription = &audience.subscriptions[0];
    let endpoint: Arc<str> = "https://receiver-10.example/hook".into();
    let accepted = clock.now();
    // The first event is accepted here, the other elsewhere; both are attempted here, in different
    // segments.
    recorder.accepted(one(&audience, 7, accepted));
    let tries = |first: u64, number: u32, outcome: Outcome| {
        let now = clock.now();
        let decision = match outcome {
            Outcome::Success => AttemptDecision::Done,
            _ => retry(now, number),
        };
        let run = run(first, 0, 1, number, now, decision);
        recorder.attempted(attempt(subscription, &endpoint, now, outcome, vec![run]));
    };
    for first in [7, 900] {
        tries(first, 1, Outcome::Busy);
    }
    recorder.flush();
    for _ in 0..3 {
        clock.advance(2 * MINUTE);
        recorder.accepted(one(
            &audience,
            1000 + clock.now().nanos() as u64 % 1000,
            clock.now(),
        ));
        recorder.flush();
    }
    for first in [7, 900] {
        tries(first, 2, Outcome::Success);
    }
    recorder.flush();

    let look = |recorder: &FlightRecorder| {
        let found = recorder.happened(&[
            (place(900), accepted),
            (place(5), accepted),
            (place(7), accepted),
            // By a clock that is too far ahead: earlier segments are not searched.
            (place(900), accepted + 20 * MINUTE),
        ]);
        let numbers = |at: usize| -> Vec<(u64, u32, Outcome)> {
            let each = found[at].iter().flat_map(|one| match &one.fate {
                SubscriptionFate::Matched(delivery) => {
                    let attempts = delivery.attempts.iter();
                    let each = |attempt: &_| {
                        let postrider_engine::recorder::AttemptHistory { number, outcome, .. } = attempt;
                        (one.id.0, *number, *outcome)
                    };
                    attempts.map(each).collect::<Vec<_>>()
                }
                SubscriptionFate::Refused(_) => Vec::new(),
            });
            each.collect()
        };
        let both = [(10, 1, Outcome::Busy), (10, 2, Outcome::Success)];
        assert_eq!(numbers(0), both);
        assert_eq!(numbers(1), []);
        assert_eq!(numbers(2), both);
        assert_eq!(found[0][0].name, "sub-10");
        assert_eq!(numbers(3), [(10, 2, Outcome::Success)]);
        // Only events accepted here can be named here.
        let events = recorder.events_at(&[place(900), place(7)]);
        assert!(events[0].is_none());
        assert_eq!(events[1].as_ref().unwrap().id, "event-000000000007");
    };
    look(&recorder);
    recorder.stop();
    drop(recorder);
    let recorder = FlightRecorder::open(config, clock.clone()).unwrap();
    recorder.wait_indexed();
    look(&recorder);
}

// A page that begins after any line continues with the next one.
#[test]
fn every_line_says_how_to_go_on_behind_it() {
    let directory = tempfile::tempdir().unwrap();
    let clock = SetClock::new();
    let recorder = FlightRecorder::open(Config::new(directory.path().to_owned()), clock.clone()).unwrap();
    let audience = audience(1, 10, 1);
    for number in 0..40 {
        recorder.accepted(one(&audience, number, clock.now()));
        clock.advance(Duration::from_secs(1));
    }
    recorder.flush();
    let query = EventQuery {
        limit: 100,
        ..EventQuery::default()
    };
    let all = recorder.search(&query).events;
    assert_eq!(all.len(), 40);
    for (at, line) in all.iter().enumerate() {
        assert_eq!(line.place, Some(place(39 - at as u64)));
        let cursor = Some(line.behind);
        let rest = recorder
            .search(&EventQuery {
                cursor,
                ..query.clone()
            })
            .events;
        assert_eq!(rest, all[at + 1..]);
        let mut from = line.behind;
        from.event += 1;
        let cursor = Some(from);
        let rest = recorder
            .search(&EventQuery {
                cursor,
                ..query.clone()
            })
            .events;
        assert_eq!(rest, all[at..], "with itself");
    }
}

#[test]
fn watchers_are_told_where_to_ask_for_what_is_not_known_here() {
    for among_others in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let clock = SetClock::new();
        let config = Config {
            among_others,
            ..Config::new(directory.path().to_owned())
        };
        let recorder = FlightRecorder::open(config, clock.clone()).unwrap();
        let mut lines = recorder.subscribe();
        let audience = audience(1, 10, 1);
        let now = clock.now();
        recorder.accepted(one(&audience, 7, now));
        let endpoint: Arc<str> = "https://receiver-10.example/hook".into();
        for first in [7, 900] {
            let run = run(first, 0, 1, 1, now, AttemptDecision::Done);
            let subscription = &audience.subscriptions[0];
            recorder.attempted(attempt(subscription, &endpoint, now, Outcome::Success, vec![run]));
        }
        recorder.flush();
        let mut told = Vec::new();
        while let Ok(line) = lines.try_recv() {
            let attempted = matches!(line.what, LiveStreamHappening::Attempted { .. });
            told.push((attempted, line.id.clone(), line.elsewhere));
        }
        let known = "event-000000000007".to_owned();
        let mut expected = vec![(false, known.clone(), None), (true, known, None)];
        if among_others {
            expected.push((true, String::new(), Some(place(900))));
        }
        assert_eq!(told, expected);
    }
}

#[test]
fn an_attempt_that_overtakes_its_event_is_told_after_it() {
    let directory = tempfile::tempdir().unwrap();
    let clock = SetClock::new();
    let config = Config::new(directory.path().to_owned());
    let recorder = FlightRecorder::open(config, clock.clone()).unwrap();
    let mut lines = recorder.subscribe();
    let audience = audience(1, 10, 1);
    let now = clock.now();
    let endpoint: Arc<str> = "https://receiver-10.example/hook".into();
    let attempted = |first, decision| {
        let runs = vec![run(first, 0, 1, 1, now, decision)];
        let subscription = &audience.subscriptions[0];
        recorder.attempted(attempt(subscription, &endpoint, now, Outcome::Success, runs));
    };
    let mut told = || {
        recorder.flush();
        let mut told = Vec::new();
        while let Ok(line) = lines.try_recv() {
            assert_eq!(line.elsewhere, None);
            let state = match line.what {
                LiveStreamHappening::Accepted { .. } => None,
                LiveStreamHappening::Attempted { state, .. } => Some(state),
                LiveStreamHappening::Ended(_) => panic!("it has not ended: {line:?}"),
            };
            told.push((line.id.clone(), state));
        }
        told
    };
    attempted(7, retry(now, 1));
    assert_eq!(told(), [], "there are no words for it yet");
    attempted(7, AttemptDecision::Done);
    assert_eq!(told(), []);
    recorder.accepted(one(&audience, 7, now));
    let seven = "event-000000000007".to_owned();
    let expected = [
        (seven.clone(), None),
        (seven.clone(), Some(DeliveryState::Retrying)),
        (seven, Some(DeliveryState::Delivered)),
    ];
    assert_eq!(told(), expected);
    // Both records may be written together.
    attempted(8, AttemptDecision::Done);
    recorder.accepted(one(&audience, 8, now));
    let eight = "event-000000000008".to_owned();
    assert_eq!(
        told(),
        [(eight.clone(), None), (eight, Some(DeliveryState::Delivered))]
    );
}
