//! The scene: the subscriptions, the receiver's behaviour for each, and the published events.

use super::DemoArgs;
use postrider_core::profile::CLOUD_2021;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

pub const TOPIC: &str = "orders";
/// Every so many-th event is about a return, the others are about orders.
const RETURN_EVERY: u64 = 5;
const RETURNS: &str = "/returns/";

/// A subscription and the endpoint it delivers to; both go by the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DemoSubscription {
    Healthy,
    Flaky,
    SlowStart,
    Buggy,
    Picky,
    Careless,
    Broken,
}

/// Parameters of one demo.
#[derive(Clone, Copy, Debug)]
pub struct DemoScenario {
    /// How long [`DemoSubscription::SlowStart`] is unavailable.
    pub slow_for: Duration,
    /// Last event that may fail at [`DemoSubscription::Buggy`].
    pub buggy_event_last: u64,
    pub buggy_attempts_max: u32,
    pub broken_minutes_to_live: u32,
}

impl DemoScenario {
    /// Parameters with which all deliveries end soon after the last event is published.
    pub fn of(args: &DemoArgs) -> DemoScenario {
        let long = Duration::from_secs(args.secs) * args.speed;
        DemoScenario {
            slow_for: long / 3,
            // While other events arrive, failing ones are retried by the schedule. Once only
            // failing events are left, the endpoint goes on probation with ever longer delays, so
            // they must have ended before.
            buggy_event_last: (args.events_max() / 4).max(1),
            buggy_attempts_max: attempts_within(long * 2 / 3).max(2),
            broken_minutes_to_live: (long.as_secs() / 60).div_ceil(8).clamp(1, 1440) as u32,
        }
    }

    /// The configuration file, with the API's own property names.
    pub fn config(&self, key: &str, receiver: SocketAddr) -> String {
        let mut text =
            format!("[[topic]]\nname = \"{TOPIC}\"\ninputSchema = \"EventGridSchema\"\nkey1 = \"{key}\"\n");
        for part in DemoSubscription::ALL {
            text += &self.subscription(part, receiver);
        }
        text
    }

    fn subscription(&self, part: DemoSubscription, receiver: SocketAddr) -> String {
        let name = part.name();
        let batching = if part == DemoSubscription::SlowStart {
            "maxEventsPerBatch = 20\n"
        } else {
            ""
        };
        let mut text = format!("\n[[topic.subscription]]\nname = \"{name}\"\n");
        match part {
            DemoSubscription::Healthy => text += "eventDeliverySchema = \"CloudEventSchemaV1_0\"\n",
            DemoSubscription::Buggy => {
                text += &format!("retryPolicy.maxDeliveryAttempts = {}\n", self.buggy_attempts_max)
            }
            DemoSubscription::Broken => {
                text += &format!(
                    "retryPolicy.eventTimeToLiveInMinutes = {}\n",
                    self.broken_minutes_to_live
                );
                text += &format!("filter.subjectBeginsWith = \"{RETURNS}\"\n");
            }
            DemoSubscription::Flaky
            | DemoSubscription::SlowStart
            | DemoSubscription::Picky
            | DemoSubscription::Careless => {}
        }
        text += &format!(
            "[topic.subscription.destination]\nendpointType = \"WebHook\"\n\
             [topic.subscription.destination.properties]\nendpointUrl = \"http://{receiver}/{name}\"\n{batching}"
        );
        if part.dead_letters() {
            text += "[topic.subscription.deadLetterDestination]\nendpointType = \"StorageBlob\"\n\
                     [topic.subscription.deadLetterDestination.properties]\n\
                     resourceId = \"local\"\nblobContainerName = \"dead-letters\"\n";
        }
        text
    }

    /// Reason to give up an event whose attempt number `attempt` was answered with `status`, if
    /// any.
    pub fn given_up(&self, part: DemoSubscription, attempt: u32, status: u16) -> Option<GiveUpReason> {
        match (part, status) {
            (_, 400) => Some(GiveUpReason::BadRequest),
            (DemoSubscription::Buggy, 500) if attempt >= self.buggy_attempts_max => {
                Some(GiveUpReason::AttemptsExhausted)
            }
            _ => None,
        }
    }

    /// A line about the receiver's behaviour for a part and the subscription's settings.
    pub fn about(&self, part: DemoSubscription) -> String {
        match part {
            DemoSubscription::Healthy => "200, always; wants CloudEvents".into(),
            DemoSubscription::Flaky => "503 to half of the first attempts, to fewer of the next".into(),
            DemoSubscription::SlowStart => {
                "503 for the first third of the time; wants batches of up to 20".into()
            }
            DemoSubscription::Buggy => {
                let attempts = self.buggy_attempts_max;
                format!("500 to some early events, always; dead-lettered after {attempts} attempts")
            }
            DemoSubscription::Picky => "400 to some events; dead-lettered at once".into(),
            DemoSubscription::Careless => {
                "400 to the same events; dropped, having no dead-letter destination".into()
            }
            DemoSubscription::Broken => {
                let minutes = self.broken_minutes_to_live;
                format!("500, always; wants only returns; dead-lettered when {minutes} min old")
            }
        }
    }
}

impl DemoSubscription {
    pub const ALL: [DemoSubscription; 7] = [
        DemoSubscription::Healthy,
        DemoSubscription::Flaky,
        DemoSubscription::SlowStart,
        DemoSubscription::Buggy,
        DemoSubscription::Picky,
        DemoSubscription::Careless,
        DemoSubscription::Broken,
    ];

    pub fn name(self) -> &'static str {
        match self {
            DemoSubscription::Healthy => "healthy",
            DemoSubscription::Flaky => "flaky",
            DemoSubscription::SlowStart => "slow-start",
            DemoSubscription::Buggy => "buggy",
            DemoSubscription::Picky => "picky",
            DemoSubscription::Careless => "careless",
            DemoSubscription::Broken => "broken",
        }
    }

    pub fn named(name: &str) -> Option<DemoSubscription> {
        DemoSubscription::ALL.into_iter().find(|part| part.name() == name)
    }

    pub fn dead_letters(self) -> bool {
        matches!(
            self,
            DemoSubscription::Buggy | DemoSubscription::Picky | DemoSubscription::Broken
        )
    }

    /// Whether failures depend on the event, so that following a single event is instructive.
    pub fn fails_by_event(self) -> bool {
        matches!(
            self,
            DemoSubscription::Flaky
                | DemoSubscription::Buggy
                | DemoSubscription::Picky
                | DemoSubscription::Careless
        )
    }

    /// Whether the subscription's filter lets the event through.
    pub fn wants(self, event: u64) -> bool {
        self != DemoSubscription::Broken || is_return(event)
    }

    /// The status that answers attempt number `attempt` (the first is 1) at an event, `after` the
    /// start.
    pub fn answer(self, scene: &DemoScenario, event: u64, attempt: u32, after: Duration) -> u16 {
        match self {
            DemoSubscription::Healthy => 200,
            DemoSubscription::Flaky if one_in(1 << attempt.min(16), event, u64::from(attempt)) => 503,
            DemoSubscription::SlowStart if after < scene.slow_for => 503,
            DemoSubscription::Buggy if event <= scene.buggy_event_last && one_in(8, event, 100) => 500,
            DemoSubscription::Picky | DemoSubscription::Careless if one_in(10, event, 200) => 400,
            DemoSubscription::Broken => 500,
            DemoSubscription::Flaky
            | DemoSubscription::SlowStart
            | DemoSubscription::Buggy
            | DemoSubscription::Picky
            | DemoSubscription::Careless => 200,
        }
    }
}

/// Number of attempts that the retry schedule makes in that time.
fn attempts_within(long: Duration) -> u32 {
    let due = CLOUD_2021.schedule.iter().scan(Duration::ZERO, |sum, wait| {
        *sum += *wait;
        Some(*sum)
    });
    1 + due.take_while(|at| *at <= long).count() as u32
}

/// Time until the receiver answers: 200 ms to 2 s.
pub fn answer_time(event: u64, attempt: u32) -> Duration {
    Duration::from_millis(200 + hash(event, 300 + u64::from(attempt)) % 1800)
}

/// The event as published. Its number is its id.
pub fn event(number: u64, at: Timestamp) -> Value {
    let (kind, subject) = match is_return(number) {
        true => ("Shop.OrderReturned", format!("{RETURNS}{number}")),
        false => ("Shop.OrderPlaced", format!("/orders/{number}")),
    };
    let things = [
        "a saddle",
        "a lantern",
        "a post horn",
        "two oat bags",
        "a map of the roads",
    ];
    let item = things[(hash(number, 400) % things.len() as u64) as usize];
    json!({
        "id": number.to_string(),
        "eventType": kind,
        "subject": subject,
        "eventTime": at.to_string(),
        "dataVersion": "1",
        "data": {"item": item, "amount": 5 + hash(number, 500) % 200},
    })
}

fn is_return(event: u64) -> bool {
    event.is_multiple_of(RETURN_EVERY)
}

/// True for about one event in `n`, the same events in every run.
fn one_in(n: u64, event: u64, salt: u64) -> bool {
    hash(event, salt).is_multiple_of(n)
}

/// SplitMix64 of both.
fn hash(event: u64, salt: u64) -> u64 {
    let mut z = (event ^ salt.rotate_left(32))
        .wrapping_add(1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCENE: DemoScenario = DemoScenario {
        slow_for: Duration::from_secs(100),
        buggy_event_last: 900,
        buggy_attempts_max: 4,
        broken_minutes_to_live: 2,
    };

    #[test]
    fn the_receiver_answers_as_it_is_described() {
        let answers = |part: DemoSubscription, attempt: u32, after: u64| -> Vec<u16> {
            let after = Duration::from_secs(after);
            (1..=1000)
                .map(|event| part.answer(&SCENE, event, attempt, after))
                .collect()
        };
        let check = |part: DemoSubscription,
                     attempt,
                     after,
                     failure: u16,
                     expected: std::ops::RangeInclusive<usize>| {
            let answers = answers(part, attempt, after);
            let failed = answers.iter().filter(|status| **status == failure).count();
            let fine = answers.iter().filter(|status| **status == 200).count();
            assert!(
                expected.contains(&failed),
                "{part:?} attempt {attempt} after {after} s: {failed}"
            );
            assert_eq!(failed + fine, 1000, "{part:?} attempt {attempt} after {after} s");
        };
        check(DemoSubscription::Healthy, 1, 0, 503, 0..=0);
        check(DemoSubscription::Flaky, 1, 0, 503, 450..=550);
        check(DemoSubscription::Flaky, 2, 0, 503, 200..=300);
        check(DemoSubscription::Flaky, 9, 0, 503, 0..=10);
        check(DemoSubscription::SlowStart, 1, 99, 503, 1000..=1000);
        check(DemoSubscription::SlowStart, 5, 100, 503, 0..=0);
        check(DemoSubscription::Buggy, 1, 0, 500, 80..=140);
        check(DemoSubscription::Picky, 1, 0, 400, 70..=130);
        check(DemoSubscription::Broken, 1, 1000, 500, 1000..=1000);
        assert_eq!(
            answers(DemoSubscription::Buggy, 1, 0),
            answers(DemoSubscription::Buggy, 4, 50),
            "a bug stays"
        );
        assert_eq!(
            answers(DemoSubscription::Picky, 1, 0),
            answers(DemoSubscription::Careless, 1, 0)
        );
    }

    #[test]
    fn a_showing_ends_soon_after_its_last_event() {
        let check = |speed, secs, attempts, minutes| {
            let args = DemoArgs {
                speed,
                secs,
                rate: 40,
                keep: false,
            };
            let scene = DemoScenario::of(&args);
            let found = (scene.buggy_attempts_max, scene.broken_minutes_to_live);
            assert_eq!(found, (attempts, minutes), "{speed}× for {secs} s");
        };
        check(300, 15, 7, 10);
        check(300, 5, 6, 4);
        check(300, 1, 4, 1);
        check(1, 1, 2, 1);
    }

    #[test]
    fn an_event_is_given_up_when_its_subscription_says_so() {
        let check = |part, attempt, status, expected| {
            assert_eq!(
                SCENE.given_up(part, attempt, status),
                expected,
                "{part:?} {attempt} {status}"
            );
        };
        check(DemoSubscription::Picky, 1, 400, Some(GiveUpReason::BadRequest));
        check(DemoSubscription::Careless, 1, 400, Some(GiveUpReason::BadRequest));
        check(DemoSubscription::Buggy, 3, 500, None);
        check(
            DemoSubscription::Buggy,
            4,
            500,
            Some(GiveUpReason::AttemptsExhausted),
        );
        check(DemoSubscription::Flaky, 4, 503, None);
        check(DemoSubscription::Healthy, 1, 200, None);
    }

    #[test]
    fn one_event_in_five_is_a_return_and_only_those_are_wanted_by_broken() {
        let returns: Vec<u64> = (1..=12).filter(|n| is_return(*n)).collect();
        assert_eq!(returns, [5, 10]);
        assert!(
            DemoSubscription::Broken.wants(5)
                && !DemoSubscription::Broken.wants(6)
                && DemoSubscription::Healthy.wants(6)
        );
        assert_eq!(event(5, Timestamp::MIN)["subject"], "/returns/5");
        assert_eq!(event(6, Timestamp::MIN)["subject"], "/orders/6");
    }
}
