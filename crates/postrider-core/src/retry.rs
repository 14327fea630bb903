//! What follows an attempt: the one rule that decides between done, later, dead letter and drop.

use crate::outcome::Outcome;
use crate::profile::{EndpointKind, Profile, StatusRule};
use crate::time::Timestamp;
use std::fmt;
use std::time::Duration;

/// The limits that one subscription puts on retrying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    pub attempts_max: u32,
    pub time_to_live: Duration,
    pub dead_letter: bool,
}

/// One attempt that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The first is 1.
    pub number: u32,
    pub outcome: Outcome,
    /// The status that was answered, if one was.
    pub status: Option<u16>,
    /// How long the receiver asked us to wait.
    pub retry_after: Option<Duration>,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Done,
    RetryAt(Timestamp),
    DeadLetter(Reason),
    Drop(Reason),
}

/// Why an event was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    AttemptsExhausted,
    TimeToLiveExceeded,
    BadRequest,
    ClientError,
    /// The subscription was deleted or expired.
    SubscriptionGone,
    /// The stored event failed its checksum; there is nothing to deliver.
    Corrupt,
}

impl Reason {
    pub const ALL: [Reason; 6] = [
        Reason::AttemptsExhausted,
        Reason::TimeToLiveExceeded,
        Reason::BadRequest,
        Reason::ClientError,
        Reason::SubscriptionGone,
        Reason::Corrupt,
    ];

    /// The spelling in dead letters, metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Reason::AttemptsExhausted => "MaxDeliveryAttemptsExceeded",
            Reason::TimeToLiveExceeded => "TimeToLiveExceeded",
            Reason::BadRequest => "UndeliverableDueToHttpBadRequest",
            Reason::ClientError => "UndeliverableDueToClientError",
            Reason::SubscriptionGone => "SubscriptionDeleted",
            Reason::Corrupt => "StoredEventCorrupt",
        }
    }

    /// The reason's number in stored records; never changes.
    pub fn code(self) -> u8 {
        Reason::ALL
            .iter()
            .position(|r| *r == self)
            .expect("every reason is listed") as u8
    }

    pub fn from_code(code: u8) -> Reason {
        Reason::ALL
            .get(usize::from(code))
            .copied()
            .unwrap_or(Reason::ClientError)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl RetryPolicy {
    /// Looked at only when an attempt comes due: is it too late to make it?
    pub fn expired(&self, published: Timestamp, now: Timestamp) -> Option<Next> {
        (now.since(published) >= self.time_to_live).then(|| self.give_up(Reason::TimeToLiveExceeded))
    }

    /// Decides what follows an attempt that ended at `now`. `chance` is uniform in 0..=1 and spreads
    /// the retries of many events.
    pub fn next(
        &self,
        profile: &Profile,
        kind: EndpointKind,
        attempt: Attempt,
        now: Timestamp,
        chance: f64,
    ) -> Next {
        if attempt.outcome == Outcome::Success {
            return Next::Done;
        }
        let floor = match profile.rule(attempt.status, kind) {
            StatusRule::RetryAfter(floor) => floor,
            StatusRule::FinalIfDeadLettered(floor) if !self.dead_letter => floor,
            StatusRule::Final | StatusRule::FinalIfDeadLettered(_) => {
                return self.give_up(match attempt.status {
                    Some(400) => Reason::BadRequest,
                    _ => Reason::ClientError,
                });
            }
        };
        if attempt.number >= self.attempts_max {
            return self.give_up(Reason::AttemptsExhausted);
        }
        let step = jittered(profile.step(attempt.number), profile.jitter_percent, chance);
        // A receiver may ask us to slow down, never to hurry up.
        let asked = attempt.retry_after.unwrap_or_default();
        Next::RetryAt(now + step.max(floor).max(asked.min(self.time_to_live)))
    }

    fn give_up(&self, reason: Reason) -> Next {
        if self.dead_letter {
            Next::DeadLetter(reason)
        } else {
            Next::Drop(reason)
        }
    }
}

/// `step` moved by up to `percent` of itself in either direction.
fn jittered(step: Duration, percent: u32, chance: f64) -> Duration {
    let spread = f64::from(percent) / 100.0;
    step.mul_f64(1.0 + spread * (2.0 * chance.clamp(0.0, 1.0) - 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::CLOUD_2021;
    use proptest::prelude::*;

    const NOW: Timestamp = Timestamp::from_secs(1_000_000);

    fn policy(dead_letter: bool) -> RetryPolicy {
        RetryPolicy {
            attempts_max: 30,
            time_to_live: Duration::from_secs(86_400),
            dead_letter,
        }
    }

    fn answered(number: u32, status: u16) -> Attempt {
        Attempt {
            number,
            outcome: if CLOUD_2021.is_success(status) {
                Outcome::Success
            } else {
                Outcome::of_failure_status(status)
            },
            status: Some(status),
            retry_after: None,
        }
    }

    fn decide(attempt: Attempt, dead_letter: bool) -> Next {
        policy(dead_letter).next(&CLOUD_2021, EndpointKind::WebHook, attempt, NOW, 0.5)
    }

    #[test]
    fn the_2021_waits_and_floors() {
        let wait = |number, status, seconds| {
            let expected = Next::RetryAt(NOW + Duration::from_secs(seconds));
            assert_eq!(
                decide(answered(number, status), false),
                expected,
                "{number} {status}"
            );
        };
        let waits = [10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 43_200];
        for (i, seconds) in waits.into_iter().enumerate() {
            wait(i as u32 + 1, 500, seconds);
        }
        wait(1, 503, 30);
        wait(1, 408, 120);
        wait(4, 408, 300);
        wait(1, 302, 10);
        wait(1, 429, 10);
    }

    #[test]
    fn final_statuses_end_it_at_once() {
        for status in [400, 401, 403, 404, 413] {
            let reason = if status == 400 {
                Reason::BadRequest
            } else {
                Reason::ClientError
            };
            assert_eq!(decide(answered(1, status), false), Next::Drop(reason));
            assert_eq!(decide(answered(1, status), true), Next::DeadLetter(reason));
        }
        for status in 200..=204 {
            assert_eq!(decide(answered(1, status), true), Next::Done);
        }
    }

    #[test]
    fn the_last_attempt_is_the_last() {
        assert_eq!(
            decide(answered(30, 500), true),
            Next::DeadLetter(Reason::AttemptsExhausted)
        );
        assert!(matches!(decide(answered(29, 500), true), Next::RetryAt(_)));
    }

    #[test]
    fn retry_after_lengthens_only() {
        let ask = |seconds| {
            let attempt = Attempt {
                retry_after: Some(Duration::from_secs(seconds)),
                ..answered(1, 503)
            };
            decide(attempt, false)
        };
        assert_eq!(ask(5), Next::RetryAt(NOW + Duration::from_secs(30)));
        assert_eq!(ask(90), Next::RetryAt(NOW + Duration::from_secs(90)));
    }

    proptest! {
        #[test]
        fn never_sooner_than_the_floor(number in 1u32..30, status in 205u16..600, chance in 0.0f64..=1.0) {
            let next = policy(true).next(&CLOUD_2021, EndpointKind::WebHook, answered(number, status), NOW, chance);
            if let Next::RetryAt(at) = next {
                let step = CLOUD_2021.step(number);
                let wait = at.since(NOW);
                prop_assert!(wait >= Duration::from_secs(10));
                prop_assert!(wait <= step.mul_f64(1.1).max(Duration::from_secs(120)));
            }
        }
    }
}
