//! A million recorded attempts: every query stays within its budget.

mod support;

use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::Reason;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::recorder::{
    Decision, DeliveryState, EventState, Happening, Query, Recorder, Recordings, Work,
};
use postrider_recorder::{BUDGET, Config, FlightRecorder, cost};
use std::sync::Arc;
use std::time::Duration;
use support::{HandClock, attempt, audience, one, retry, run};

const EVENTS: u64 = 500_000;
const TOPICS: u64 = 4;

/// The greatest cost of the last uninterrupted step: reading one frame of events with all records
/// about them.
const LAST_STEP: u64 = 20_000;

/// Two subscriptions for each event; every hundredth delivery fails once, every ten-thousandth
/// permanently; the retries are recorded minutes later, in other segments.
fn record(recorder: &FlightRecorder, clock: &HandClock) {
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
                Outcome::Success => Decision::Done,
                _ if number % 10_000 == 7 => Decision::DeadLetter(Reason::AttemptsExhausted),
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
                let runs = vec![run(number, 0, 1, 2, at, Decision::Done)];
                recorder.attempted(attempt(&subscription, &endpoint, at, Outcome::Success, runs));
            }
        }
    }
    recorder.flush();
}

fn within_budget(what: &str, work: Work) {
    assert!(cost(&work) <= BUDGET + LAST_STEP, "{what}: {work:?}");
}

#[test]
fn a_million_attempts() {
    let directory = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
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
            ("all", EVENTS, Query::default()),
            (
                "id",
                1,
                Query {
                    id: Some("event-000000000777".into()),
                    ..Query::default()
                },
            ),
            (
                "topic",
                EVENTS / TOPICS,
                Query {
                    topic: Some(TopicId(2)),
                    ..Query::default()
                },
            ),
            (
                "subscription",
                EVENTS / TOPICS,
                Query {
                    subscription: Some(SubscriptionId(3)),
                    ..Query::default()
                },
            ),
            (
                "type",
                EVENTS.div_ceil(7),
                Query {
                    event_type: Some("Type.1".into()),
                    ..Query::default()
                },
            ),
            (
                "no such type",
                0,
                Query {
                    event_type: Some("Type.9".into()),
                    ..Query::default()
                },
            ),
            (
                "subject",
                1,
                Query {
                    subject: Some("orders/3/33153".into()),
                    ..Query::default()
                },
            ),
            (
                "no such subject",
                0,
                Query {
                    subject: Some("nothing".into()),
                    ..Query::default()
                },
            ),
            (
                "busy",
                EVENTS / 100,
                Query {
                    outcome: Some(Outcome::Busy),
                    ..Query::default()
                },
            ),
            (
                "never",
                0,
                Query {
                    outcome: Some(Outcome::Forbidden),
                    ..Query::default()
                },
            ),
            (
                "dead letters",
                EVENTS / 10_000,
                Query {
                    state: all(DeliveryState::DeadLettered),
                    ..Query::default()
                },
            ),
            (
                "retrying",
                495,
                Query {
                    state: all(DeliveryState::Retrying),
                    ..Query::default()
                },
            ),
            (
                "pending",
                0,
                Query {
                    state: all(DeliveryState::Pending),
                    ..Query::default()
                },
            ),
            (
                "dropped",
                0,
                Query {
                    state: all(DeliveryState::Dropped),
                    ..Query::default()
                },
            ),
            (
                "unmatched",
                0,
                Query {
                    state: Some(EventState::Unmatched),
                    ..Query::default()
                },
            ),
            (
                "early",
                9 * 5_000,
                Query {
                    until: Some(early),
                    ..Query::default()
                },
            ),
        ];
        for (what, expected, query) in queries {
            let mut query = Query { limit: 50, ..query };
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
    let runs = vec![run(7, 0, 1, 2, clock.now(), Decision::Done)];
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
        Happening::Attempted {
            state: DeliveryState::Delivered,
            ..
        }
    ));
}
