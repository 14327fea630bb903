//! Measures the recorder's cost: `cargo run --release -p postrider-recorder --example figures`.
//!
//! Prints nanoseconds per recorded item for the caller, microseconds of processor time for the
//! writer's thread, and the cost of queries with a million recorded attempts.

#[path = "../tests/support/mod.rs"]
mod support;

use postrider_core::ids::SubscriptionId;
use postrider_core::outcome::Outcome;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::deliver::AttemptTimings;
use postrider_engine::recorder::{
    AnswerBody, AttemptDecision, DeliveryState, EventQuery, EventRecorder, EventState, RecordingQueries,
};
use postrider_recorder::{Config, FlightRecorder};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{SetClock, attempt, audience, one, retry, run};

#[expect(clippy::disallowed_methods, reason = "this measures real time")]
fn now() -> Instant {
    Instant::now()
}

/// The processor time of the thread of this name, in nanoseconds.
fn thread_time(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("this is Linux");
    for task in tasks.flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        if read("comm").trim() == name {
            let text = read("schedstat");
            return text.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        }
    }
    0
}

fn main() {
    const BURST: u64 = 5_000;
    const EVENTS: u64 = 500_000;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let clock = SetClock::new();
    let recorder =
        FlightRecorder::open(Config::new(directory.path().to_owned()), clock.clone()).expect("opening");
    let audience = audience(1, 10, 2);
    let endpoints: Vec<Arc<str>> = [
        "https://receiver-10.example/hook",
        "https://receiver-11.example/hook",
    ]
    .map(Arc::from)
    .into();
    let (mut accepting, mut attempting) = (Duration::ZERO, Duration::ZERO);
    let mut writer = [0u64; 2];
    for burst in 0..EVENTS / BURST {
        let at = clock.now();
        let numbers = burst * BURST..(burst + 1) * BURST;
        let accepted: Vec<_> = numbers.clone().map(|number| one(&audience, number, at)).collect();
        let before = thread_time("recorder");
        let begun = now();
        for accepted in accepted {
            recorder.accepted(accepted);
        }
        accepting += begun.elapsed();
        recorder.flush();
        let between = thread_time("recorder");
        let body = bytes::Bytes::from_static(b"{\"ok\":true}");
        let begun = now();
        for number in numbers {
            for (subscription, endpoint) in audience.subscriptions.iter().zip(&endpoints) {
                // Every hundredth attempt fails, and every ten-thousandth permanently.
                let outcome = if number % 100 == 7 {
                    Outcome::Busy
                } else {
                    Outcome::Success
                };
                let decision = match outcome {
                    Outcome::Success => AttemptDecision::Done,
                    _ if number % 10_000 == 7 => {
                        AttemptDecision::DeadLetter(postrider_core::retry::GiveUpReason::AttemptsExhausted)
                    }
                    _ => retry(at, 1),
                };
                let mut attempted = attempt(
                    subscription,
                    endpoint,
                    at,
                    outcome,
                    vec![run(number, 0, 1, 1, at, decision)],
                );
                attempted.timings = Some(AttemptTimings {
                    connect: Duration::ZERO,
                    first_byte: Duration::from_micros(800),
                    total: Duration::from_micros(900),
                });
                attempted.answer = Some(AnswerBody {
                    content_type: None,
                    body: body.clone(),
                });
                recorder.attempted(attempted);
            }
        }
        attempting += begun.elapsed();
        recorder.flush();
        writer[0] += between - before;
        writer[1] += thread_time("recorder") - between;
        clock.advance(Duration::from_millis(250));
    }
    let per = |total: Duration, count: u64| total.as_nanos() as f64 / count as f64;
    println!("caller: {:.0} ns per accepted event", per(accepting, EVENTS));
    println!(
        "caller: {:.0} ns per attempt (building the record included)",
        per(attempting, EVENTS * 2)
    );
    println!(
        "writer: {:.2} µs per accepted event",
        writer[0] as f64 / EVENTS as f64 / 1000.0
    );
    println!(
        "writer: {:.2} µs per attempt",
        writer[1] as f64 / (EVENTS * 2) as f64 / 1000.0
    );
    println!(
        "indexer: {:.2} µs per attempt",
        thread_time("recorder-index") as f64 / (EVENTS * 2) as f64 / 1000.0
    );
    println!("{:?}", recorder.status());

    let time = |what: &str, ask: &dyn Fn() -> String| {
        let begun = now();
        let answer = ask();
        println!(
            "{what}: {:.2} ms, {answer}",
            begun.elapsed().as_secs_f64() * 1000.0
        );
    };
    for number in [5, EVENTS / 2, EVENTS - 1] {
        time("trace", &|| {
            let stories = recorder.trace(&format!("event-{number:012}"));
            format!("{} story", stories.len())
        });
    }
    let page = |what: &str, query: EventQuery| {
        time(what, &|| {
            let page = recorder.search(&EventQuery {
                limit: 50,
                ..query.clone()
            });
            format!(
                "{} events, more: {}, {:?}",
                page.events.len(),
                page.cursor.is_some(),
                page.work
            )
        });
    };
    page("latest", EventQuery::default());
    page(
        "subscription",
        EventQuery {
            subscription: Some(SubscriptionId(11)),
            ..EventQuery::default()
        },
    );
    page(
        "outcome Busy",
        EventQuery {
            outcome: Some(Outcome::Busy),
            ..EventQuery::default()
        },
    );
    page(
        "outcome never",
        EventQuery {
            outcome: Some(Outcome::Forbidden),
            ..EventQuery::default()
        },
    );
    page(
        "dead letters",
        EventQuery {
            state: Some(EventState::All(DeliveryState::DeadLettered)),
            ..EventQuery::default()
        },
    );
    page(
        "retrying",
        EventQuery {
            state: Some(EventState::All(DeliveryState::Retrying)),
            ..EventQuery::default()
        },
    );
    page(
        "pending (none)",
        EventQuery {
            state: Some(EventState::All(DeliveryState::Pending)),
            ..EventQuery::default()
        },
    );
    page(
        "type",
        EventQuery {
            event_type: Some("Type.3".into()),
            ..EventQuery::default()
        },
    );
    page(
        "unknown type",
        EventQuery {
            event_type: Some("Nothing".into()),
            ..EventQuery::default()
        },
    );
    page(
        "subject",
        EventQuery {
            subject: Some("orders/3/33".into()),
            ..EventQuery::default()
        },
    );
    page(
        "subject (none)",
        EventQuery {
            subject: Some("nothing".into()),
            ..EventQuery::default()
        },
    );
    let until = Some(Timestamp::from_nanos(support::EPOCH) + Duration::from_secs(5));
    page(
        "old",
        EventQuery {
            until,
            ..EventQuery::default()
        },
    );
}
