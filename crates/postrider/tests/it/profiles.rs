//! Reaction of each profile to every status: times and number of attempts, and the end.
//!
//! The tables here are typed from the documents, not taken from the program.

use crate::clock_lab::ClockLab;
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, event};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// End of a delivery.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DeliveryEnd {
    Delivered,
    /// Dropped or, with a dead-letter destination, dead-lettered.
    GivenUp(&'static str),
}

const BAD_REQUEST: DeliveryEnd = DeliveryEnd::GivenUp("UndeliverableDueToHttpBadRequest");
const CLIENT_ERROR: DeliveryEnd = DeliveryEnd::GivenUp("UndeliverableDueToClientError");
const ATTEMPTS: DeliveryEnd = DeliveryEnd::GivenUp("MaxDeliveryAttemptsExceeded");
const TIME_TO_LIVE: DeliveryEnd = DeliveryEnd::GivenUp("TimeToLiveExceeded");

/// Times of all attempts in seconds, and the end.
type ExpectedCourse = (Vec<u64>, DeliveryEnd);

fn once(end: DeliveryEnd) -> ExpectedCourse {
    (vec![0], end)
}

/// Attempts at these seconds, then every hour: thirty in all.
fn hourly(first: [u64; 8]) -> ExpectedCourse {
    let more = (1..=22).map(|hour| first[7] + hour * 3600);
    (first.into_iter().chain(more).collect(), ATTEMPTS)
}

/// 2018 and 2019 have no floors: every failure is retried alike.
fn cloud_2018(status: u16, dead_letter: bool) -> ExpectedCourse {
    match status {
        200 | 202 => once(DeliveryEnd::Delivered),
        400 if dead_letter => once(BAD_REQUEST),
        413 if dead_letter => once(CLIENT_ERROR),
        _ => hourly([0, 10, 40, 100, 400, 1000, 2800, 6400]),
    }
}

fn cloud_2020(status: u16, dead_letter: bool) -> ExpectedCourse {
    match status {
        200..=204 => once(DeliveryEnd::Delivered),
        400 if dead_letter => once(BAD_REQUEST),
        413 if dead_letter => once(CLIENT_ERROR),
        // A floor of five minutes applies. The thirtieth attempt would come when the day is over.
        400 | 401 | 403 | 404 => {
            let (mut attempts, _) = hourly([0, 300, 600, 900, 1200, 1800, 3600, 7200]);
            assert_eq!(attempts.pop(), Some(86_400));
            (attempts, TIME_TO_LIVE)
        }
        408 => hourly([0, 120, 240, 360, 660, 1260, 3060, 6660]),
        503 => hourly([0, 30, 60, 120, 420, 1020, 2820, 6420]),
        _ => hourly([0, 10, 40, 100, 400, 1000, 2800, 6400]),
    }
}

fn cloud_2021(status: u16, _dead_letter: bool) -> ExpectedCourse {
    match status {
        200..=204 => once(DeliveryEnd::Delivered),
        400 => once(BAD_REQUEST),
        401 | 403 | 404 | 413 => once(CLIENT_ERROR),
        408 => day(&[0, 120, 240, 360, 660, 1260, 3060, 6660, 17_460, 39_060, 82_260]),
        503 => day(&[0, 30, 60, 120, 420, 1020, 2820, 6420, 17_220, 38_820, 82_020]),
        _ => day(&[0, 10, 40, 100, 400, 1000, 2800, 6400, 17_200, 38_800, 82_000]),
    }
}

/// Attempts that fit into the time to live of a day.
fn day(attempts: &[u64]) -> ExpectedCourse {
    (attempts.to_vec(), TIME_TO_LIVE)
}

fn cloud_current(status: u16, dead_letter: bool) -> ExpectedCourse {
    match status {
        404 => cloud_2021(500, dead_letter),
        _ => cloud_2021(status, dead_letter),
    }
}

fn edge(status: u16, _dead_letter: bool) -> ExpectedCourse {
    match status {
        200..=204 => once(DeliveryEnd::Delivered),
        _ => day(&[
            0, 60, 660, 1260, 1860, 2460, 3060, 3660, 4260, 4860, 5460, 6060, 6660,
        ]),
    }
}

/// Statuses that are also tested with a dead-letter destination.
const DEAD_LETTERED: [u16; 9] = [200, 204, 302, 400, 401, 404, 413, 500, 503];

/// A subscription for every status, and for some of them one with a dead-letter destination.
fn every_status(receiver: &TestReceiver) -> String {
    let plain = (200..600).map(|status| (status, false));
    let dead_lettered = DEAD_LETTERED.map(|status| (status, true));
    let subscription = |(status, dead_letter): (u16, bool)| {
        let path = path(status, dead_letter);
        let url = receiver.url(&path);
        let name = path[1..].replace('/', "-");
        let place = "endpoint_type = \"StorageBlob\", properties = { resource_id = \"local\", blob_container_name = \"dead\" }";
        let place = format!("dead_letter_destination = {{ {place} }}\n");
        format!(
            "[[topic.subscription]]\nname = \"{name}\"\n\
             destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\" }} }}\n{}",
            if dead_letter { &place } else { "" },
        )
    };
    let subscriptions: String = plain.chain(dead_lettered).map(subscription).collect();
    format!("[[topic]]\nname = \"orders\"\n{subscriptions}")
}

fn path(status: u16, dead_letter: bool) -> String {
    format!("/{status}{}", if dead_letter { "/dead-letter" } else { "" })
}

/// Publishes one event for every status and follows each to its end, the last of which is at
/// `last`.
fn check(profile: &'static str, expected: fn(u16, bool) -> ExpectedCourse, last: u64) {
    let receiver = TestReceiver::by_path();
    let setup = ServerSetup::test_clock(every_status(&receiver)).profile(profile);
    let lab = ClockLab::start(setup, receiver);
    lab.server.publish("orders", &[event("a")]);
    let mut attempts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for arrival in lab.all_arrivals() {
        let before = attempts.entry(arrival.delivery.path.clone()).or_default();
        assert_eq!(arrival.count(), before.len() as u64, "{}", arrival.delivery.path);
        before.push(arrival.seconds());
    }
    assert_eq!(lab.now(), last);

    let (mut delivered, mut dead_lettered, mut dropped) = (0, 0, Map::new());
    let plain = (200..600).map(|status| (status, false));
    for (status, dead_letter) in plain.chain(DEAD_LETTERED.map(|status| (status, true))) {
        let path = path(status, dead_letter);
        let (expected, end) = expected(status, dead_letter);
        assert_eq!(attempts[&path], expected, "{profile} {path}");
        match end {
            DeliveryEnd::Delivered => delivered += 1,
            DeliveryEnd::GivenUp(_) if dead_letter => dead_lettered += 1,
            DeliveryEnd::GivenUp(reason) => {
                let count = dropped.entry(reason).or_insert(json!(0));
                *count = json!(count.as_u64().expect("a count") + 1);
            }
        }
    }
    assert_eq!(
        lab.count("attempts"),
        attempts.values().map(|a| a.len() as u64).sum::<u64>()
    );
    assert_eq!(lab.count("delivered"), delivered);
    assert_eq!(lab.dropped(), Value::Object(dropped));

    // Nothing comes after that.
    assert_eq!(lab.pass(12 * 3600), 0);
    assert!(lab.receiver.take_received().is_empty());
    assert_eq!(
        lab.count("deadLettered"),
        dead_lettered,
        "they are in blobs by now"
    );
}

#[test]
fn every_status_under_cloud_2018() {
    check("cloud-2018", cloud_2018, 85_600);
}

#[test]
fn every_status_under_cloud_2019() {
    check("cloud-2019", cloud_2018, 85_600);
}

#[test]
fn every_status_under_cloud_2020() {
    check("cloud-2020", cloud_2020, 86_400);
}

#[test]
fn every_status_under_cloud_2021() {
    check("cloud-2021", cloud_2021, 82_260 + 43_200);
}

#[test]
fn every_status_under_cloud_current() {
    check("cloud-current", cloud_current, 82_260 + 43_200);
}

#[test]
fn every_status_under_edge() {
    check("edge", edge, 7260);
}

/// Times of four attempts for each of a hundred failing events, with jitter.
fn spread(config: &str, profile: &'static str) -> BTreeMap<String, Vec<Duration>> {
    let setup = ServerSetup {
        config: config.to_owned(),
        ..ServerSetup::test_clock("").profile(profile)
    };
    let four = json!({"retryPolicy": {"maxDeliveryAttempts": 4}});
    let lab = ClockLab::subscribed(
        setup,
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        four,
    );
    let events: Vec<_> = (0..100).map(|n| event(format!("e{n}"))).collect();
    lab.server.publish("orders", &events);
    let mut attempts: BTreeMap<String, Vec<Duration>> = BTreeMap::new();
    for arrival in lab.all_arrivals() {
        attempts.entry(arrival.id()).or_default().push(arrival.at);
    }
    assert_eq!(attempts.len(), 100);
    attempts
}

/// Different waits before attempt number `attempt`.
fn waits(spread: &BTreeMap<String, Vec<Duration>>, attempt: usize) -> BTreeSet<Duration> {
    let wait = |attempts: &Vec<Duration>| attempts[attempt - 1] - attempts[attempt - 2];
    spread.values().map(wait).collect()
}

#[test]
fn chance_lengthens_every_wait_by_a_hundredth_at_most_and_a_seed_repeats_it() {
    // Probation would interfere, under the profiles that have it.
    let none = "probation.failures = 10000\n";
    let by_chance = spread(none, "cloud-2021");
    for (attempt, step) in [(2, 10), (3, 30), (4, 60)] {
        let step = Duration::from_secs(step);
        let waits = waits(&by_chance, attempt);
        assert!(
            waits
                .iter()
                .all(|wait| (step..=step.mul_f64(1.01)).contains(wait)),
            "{waits:?}"
        );
        assert!(waits.len() > 50, "they hardly differ: {waits:?}");
        let far = waits.iter().filter(|wait| **wait > step.mul_f64(1.005)).count();
        assert!((waits.len() / 4..waits.len() * 3 / 4).contains(&far), "{waits:?}");
    }
    let seeded = |seed: u32| spread(&format!("{none}retry.jitter_seed = {seed}\n"), "cloud-2021");
    let seven = seeded(7);
    assert_eq!(seven, seeded(7));
    assert_ne!(seven, seeded(8));
    assert_ne!(seven, by_chance);
}

#[test]
fn the_share_of_chance_can_be_set_and_edge_has_none() {
    let wide = spread(
        "probation.failures = 10000\nretry.jitter_percent = 50\n",
        "cloud-2021",
    );
    let waits_of = |attempt| waits(&wide, attempt);
    let range = Duration::from_secs(10)..=Duration::from_secs(15);
    assert!(
        waits_of(2).iter().all(|wait| range.contains(wait)),
        "{:?}",
        waits_of(2)
    );
    assert!(
        waits_of(2).iter().any(|wait| *wait > Duration::from_secs(13)),
        "{:?}",
        waits_of(2)
    );
    for config in ["", "retry.jitter_percent = 50\n"] {
        let exact = spread(config, "edge");
        assert_eq!(waits(&exact, 2), [Duration::from_secs(60)].into());
        assert_eq!(waits(&exact, 4), [Duration::from_secs(600)].into());
    }
}

#[test]
fn a_start_says_which_floors_overrule_a_written_schedule() {
    let overruled = |custom: &str| -> Vec<String> {
        let server = ServerSetup::config(format!("profile = \"custom\"\n[profile_custom]\n{custom}")).start();
        server.logged(&["ready"]);
        let lines = server.log().into_iter();
        lines.filter(|line| line.contains("a retry after")).collect()
    };
    let said = overruled("schedule = [\"5s\", \"5m\"]\nfloors = { 503 = \"1m\" }\n");
    let [line] = &said[..] else { panic!("{said:?}") };
    for part in [
        "WARN",
        "profile \"custom\": a retry after status 503 waits for 1m, not the schedule's 5s",
    ] {
        assert!(line.contains(part), "{line}");
    }
    // Documented floors that overrule the documented schedule are not reported.
    assert_eq!(overruled("response_timeout = \"5s\"\n"), [""; 0]);
}
