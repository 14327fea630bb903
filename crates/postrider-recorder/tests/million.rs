//! A million recorded attempts: every query stays within its budget.

mod support;

use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::recorder::{
    AttemptDecision, DeliveryState, EventQuery, EventRecorder, EventState, LiveStreamHappening, QueryWork,
    RecordingQueries,
};
use postrider_recorder::{BUDGET, Config, FlightRecorder, cost};
use std::sync::Arc;
use std::time::Duration;
use support::{SetClock, attempt, audience, one, retry, run};

const EVENTS: u64 = 500_000;
const TOPICS: u64 = 4;

/// The greatest cost of the last uninterrupted step: reading one frame of events with all records
/// about them.
const LAST_STEP: u64 = 20_000;

/// Two subscriptions for each event; every hundredth delivery fails once, every ten-thousandth
/// permanently; the retries are recorded minutes later, in other segments.
fn record(recorder: &FlightRecorder, clock: &SetClock) {
    let audiences: Vec<_> = (0..TOPICS).map(|topic| audience(topic, topic * 2, 2)).collect();
    let endpoint: Arc<str> = "https://receiver.example/hook".into();
    let mut waiting = Vec::new();
    for number in 0..EVENTS {
        let at = clock.now();
        let audience = &audiences[(number % TOPICS) as usize];
        recorder.accepted(one(audience, number, at));
        for subscription in &audience.subscriptions {
            let outcome = if number % 100 == 7 {
                Outcome::Busy
            } else {
                Outcome::Success
            };
            let decision = match outcome {
                Outcome::Success => AttemptDecision::Done,
                _ if number % 10_000 == 7 => AttemptDecision::DeadLetter(GiveUpReason::AttemptsExhausted),
                _ => {
                    waiting.push((subscription.clone(), number));
                    retry(at, 1)
                }
            };
            let runs = vec![run(number, 0, 1, 1, at, decision)];
            recorder.attempted(attempt(subscription, &endpoint, at, outcome, runs));
        }
        if number % 5_000 == 4_999 {
            recorder.flush();
            clock.advance(Duration::from_secs(7));
        }
        // The last ones are still waiting.
        if number % 50_000 == 49_999 && number < EVENTS - 1 {
            for (subscription, number) in waiting.drain(..) {
                let at = clock.now();
                let runs = vec![run(number, 0, 1, 2, at, AttemptDecision::Done)];
                recorder.attempted(attempt(&subscription, &endpoint, at, Outcome::Success, runs));
            }
        }
    }
    recorder.flush();
}

fn within_budget(what: &str, work: QueryWork) {
    assert!(cost(&work) <= BUDGET + LAST_STEP, "{what}: {work:?}");
}

#[test]
fn a_million_attempts() {
    let directory = tempfile::tempdir().unwrap();
    let clock = SetClock::new();
    let config = Config {
        segment_bytes: 8 << 20,
        ..Config::new(directory.path().to_owned())
    };
    let recorder = FlightRecorder::open(config.clone(), clock.clone()).unwrap();
    record(&recorder, &clock);
    let status = recorder.status();
    assert_eq!(status.lost, 0);
    assert!(status.segments > 5, "{status:?}");

    // Once after writing, once from files alone.
    let check = |recorder: &FlightRecorder| {
        for number in [0, 7, 107, EVENTS / 2, EVENTS - 93, EVENTS - 1] {
            let stories = recorder.trace(&format!("event-{number:012}"));
            assert_eq!(stories.len(), 1);
            assert_eq!(stories[0].place.unwrap().first.0, number);
        }
        assert!(recorder.trace("event-x").is_empty());
        let all = |state| Some(EventState::All(state));
        let early = Timestamp::from_nanos(support::EPOCH) + Duration::from_secs(60);
        let queries = [
            ("all", EVENTS, EventQuery::default()),
            (
                "id",
                1,
                EventQuery {
                    id: Some("event-000000000777".into()),
                    ..EventQuery::default()
                },
            ),
            (
                "topic",
                EVENTS / TOPICS,
                EventQuery {
                    topic: Some(TopicId(2)),
                    ..EventQuery::default()
                },
            ),
            (
                "subscription",
                EVENTS / TOPICS,
                EventQuery {
                    subscription: Some(SubscriptionId(3)),
                    ..EventQuery::default()
                },
            ),
            (
                "type",
                EVENTS.div_ceil(7),
                EventQuery {
                    event_type: Some("Type.1".into()),
                    ..EventQuery::default()
                },
            ),
            (
                "no such type",
                0,
                EventQuery {
                    event_type: Some("Type.9".into()),
                    ..EventQuery::default()
                },
            ),
            (
                "subject",
                1,
                EventQuery {
                    subject: Some("orders/3/33153".into()),
                    ..EventQuery::default()
                },
            ),
            (
                "no such subject",
                0,
                EventQuery {
                    subject: Some("nothing".into()),
                    ..EventQuery::default()
                },
            ),
            (
                "busy",
                EVENTS / 100,
                EventQuery {
                    outcome: Some(Outcome::Busy),
                    ..EventQuery::default()
                },
            ),
            (
                "never",
                0,
                EventQuery {
                    outcome: Some(Outcome::Forbidden),
                    ..EventQuery::default()
                },
            ),
            (
                "dead letters",
                EVENTS / 10_000,
                EventQuery {
                    state: all(DeliveryState::DeadLettered),
                    ..EventQuery::default()
                },
            ),
            (
                "retrying",
                495,
                EventQuery {
                    state: all(DeliveryState::Retrying),
                    ..EventQuery::default()
                },
            ),
            (
                "pending",
                0,
                EventQuery {
                    state: all(DeliveryState::Pending),
                    ..EventQuery::default()
                },
            ),
            (
                "dropped",
                0,
                EventQuery {
                    state: all(DeliveryState::Dropped),
                    ..EventQuery::default()
                },
            ),
            (
                "unmatched",
                0,
                EventQuery {
                    state: Some(EventState::Unmatched),
                    ..EventQuery::default()
                },
            ),
            (
                "early",
                9 * 5_000,
                EventQuery {
                    until: Some(early),
                    ..EventQuery::default()
                },
            ),
        ];
        for (what, expected, query) in queries {
            let mut query = EventQuery { limit: 50, ..query };
            let (mut found, mut pages) = (0, 0);
            loop {
                let page = recorder.search(&query);
                within_budget(what, page.work);
                found += page.events.len() as u64;
                pages += 1;
                query.cursor = page.cursor;
                // For frequent values a few pages suffice.
                if page.cursor.is_none() || pages == 40 {
                    break;
                }
            }
            if query.cursor.is_none() {
                assert_eq!(found, expected, "{what}");
            } else {
                assert_eq!(found, 40 * 50, "{what}: pages of what is common are full");
            }
        }
    };
    check(&recorder);
    drop(recorder);
    let recorder = FlightRecorder::open(config, clock.clone()).unwrap();
    recorder.wait_indexed();
    check(&recorder);

    // The live stream has the texts of events that were accepted long before it had a subscriber.
    let mut lines = recorder.subscribe();
    let audience = audience(3, 6, 2);
    let endpoint: Arc<str> = "https://receiver.example/hook".into();
    let runs = vec![run(7, 0, 1, 2, clock.now(), AttemptDecision::Done)];
    recorder.attempted(attempt(
        &audience.subscriptions[0],
        &endpoint,
        clock.now(),
        Outcome::Success,
        runs,
    ));
    recorder.flush();
    let line = lines.try_recv().unwrap();
    assert_eq!(
        (line.id.as_str(), line.subject.as_str()),
        ("event-000000000007", "orders/7/7")
    );
    assert!(matches!(
        line.what,
        LiveStreamHappening::Attempted {
            state: DeliveryState::Delivered,
            ..
        }
    ));
}
