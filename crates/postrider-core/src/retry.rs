//! The retry rule: decides after each attempt between done, retry, dead letter and drop.

use crate::outcome::Outcome;
use crate::profile::{EndpointKind, Profile, StatusRule, TimeToLiveRule};
use crate::time::Timestamp;
use std::fmt;
use std::time::Duration;

/// The retry limits of one subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    pub attempts_max: u32,
    pub time_to_live: Duration,
    /// Whether the subscription has a dead-letter destination.
    pub dead_letter: bool,
    /// Whether dead letters are kept where they would be dropped otherwise. Does not change what is
    /// retried.
    pub safety_net: bool,
}

/// A finished attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadeAttempt {
    /// The first is 1.
    pub number: u32,
    pub outcome: Outcome,
    /// The status of the answer, if there was one.
    pub status: Option<u16>,
    /// The wait that the receiver asked for.
    pub retry_after: Option<Duration>,
}

/// The consequence of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    Done,
    RetryAt(Timestamp),
    DeadLetter(GiveUpReason),
    Drop(GiveUpReason),
}

/// Why an event was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GiveUpReason {
    AttemptsExhausted,
    TimeToLiveExceeded,
    BadRequest,
    ClientError,
    /// The subscription was deleted.
    SubscriptionGone,
    /// The stored event failed its checksum; there is nothing to deliver.
    Corrupt,
    /// The subscription expired.
    SubscriptionExpired,
    /// A dead letter could not be written until its time for that was over.
    DeadLetterUnavailable,
    /// The subscription of a dead letter no longer has a dead-letter destination.
    DeadLetterWithoutDestination,
    /// Deliveries led back to a server so often that there must be a loop. Never a dead letter.
    TooManyHops,
}

impl GiveUpReason {
    pub const ALL: [GiveUpReason; 10] = [
        GiveUpReason::AttemptsExhausted,
        GiveUpReason::TimeToLiveExceeded,
        GiveUpReason::BadRequest,
        GiveUpReason::ClientError,
        GiveUpReason::SubscriptionGone,
        GiveUpReason::Corrupt,
        GiveUpReason::SubscriptionExpired,
        GiveUpReason::DeadLetterUnavailable,
        GiveUpReason::DeadLetterWithoutDestination,
        GiveUpReason::TooManyHops,
    ];

    /// The spelling in dead letters, metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            GiveUpReason::AttemptsExhausted => "MaxDeliveryAttemptsExceeded",
            GiveUpReason::TimeToLiveExceeded => "TimeToLiveExceeded",
            GiveUpReason::BadRequest => "UndeliverableDueToHttpBadRequest",
            GiveUpReason::ClientError => "UndeliverableDueToClientError",
            GiveUpReason::SubscriptionGone => "SubscriptionDeleted",
            GiveUpReason::Corrupt => "StoredEventCorrupt",
            GiveUpReason::SubscriptionExpired => "SubscriptionExpired",
            GiveUpReason::DeadLetterUnavailable => "DeadLetterDestinationUnavailable",
            GiveUpReason::DeadLetterWithoutDestination => "DeadLetterDestinationRemoved",
            GiveUpReason::TooManyHops => "TooManyHops",
        }
    }

    /// The reason's number in stored records; never changes.
    pub fn code(self) -> u8 {
        GiveUpReason::ALL
            .iter()
            .position(|r| *r == self)
            .expect("every reason is listed") as u8
    }

    pub fn from_code(code: u8) -> GiveUpReason {
        GiveUpReason::ALL
            .get(usize::from(code))
            .copied()
            .unwrap_or(GiveUpReason::ClientError)
    }
}

impl fmt::Display for GiveUpReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl RetryPolicy {
    /// Whether a delivery that is due for an attempt has expired; returns what follows.
    pub fn expired(&self, published: Timestamp, now: Timestamp) -> Option<NextStep> {
        (now.since(published) >= self.time_to_live).then(|| self.give_up(GiveUpReason::TimeToLiveExceeded))
    }

    /// Decides what follows an attempt that ended at `now`, of an event published at `published`.
    /// `chance` is uniform in 0..=1 and spreads the retries of many events.
    pub fn next(
        &self,
        profile: &Profile,
        kind: EndpointKind,
        attempt: MadeAttempt,
        published: Timestamp,
        now: Timestamp,
        chance: f64,
    ) -> NextStep {
        if attempt.outcome == Outcome::Success {
            return NextStep::Done;
        }
        // Checked before the status: the documents' samples give this reason for a webhook's 404,
        // which is final, with a single attempt allowed.
        if attempt.number >= self.attempts_max {
            return self.give_up(GiveUpReason::AttemptsExhausted);
        }
        let floor = match profile.rule(attempt.status, kind) {
            StatusRule::RetryAfter(floor) => floor,
            StatusRule::FinalIfDeadLettered(floor) if !self.dead_letter => floor,
            StatusRule::Final | StatusRule::FinalIfDeadLettered(_) => {
                return self.give_up(match attempt.status {
                    Some(400) => GiveUpReason::BadRequest,
                    _ => GiveUpReason::ClientError,
                });
            }
        };
        let step = jittered(profile.step(attempt.number), profile.jitter_percent, chance);
        let due = now + step.max(floor);
        // A receiver may ask for a longer wait, never a shorter one, and not past the end of the
        // event's time to live, when the event is checked in any case.
        let end = published + self.time_to_live;
        let asked = now + attempt.retry_after.unwrap_or_default();
        let due = due.max(asked.min(end));
        if due >= end && profile.time_to_live_rule == TimeToLiveRule::BeforeWaiting {
            return self.give_up(GiveUpReason::TimeToLiveExceeded);
        }
        NextStep::RetryAt(due)
    }

    fn give_up(&self, reason: GiveUpReason) -> NextStep {
        if self.dead_letter || self.safety_net {
            NextStep::DeadLetter(reason)
        } else {
            NextStep::Drop(reason)
        }
    }
}

/// Uniform in 0..1 for one attempt of one delivery: the same for the same seed, independent of
/// everything else.
pub fn chance(seed: u64, subscription: u64, position: u64, attempt: u32) -> f64 {
    let mut z = seed;
    for part in [subscription, position, u64::from(attempt)] {
        // SplitMix64: small, and good enough to spread retries.
        z = (z ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
    }
    (z >> 11) as f64 / (1u64 << 53) as f64
}

/// `step` lengthened by up to `percent` of itself, never shortened.
fn jittered(step: Duration, percent: u32, chance: f64) -> Duration {
    step.mul_f64(1.0 + f64::from(percent) / 100.0 * chance.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{CLOUD_2018, CLOUD_2021};
    use proptest::prelude::*;

    const NOW: Timestamp = Timestamp::from_secs(1_000_000);

    fn policy(dead_letter: bool) -> RetryPolicy {
        RetryPolicy {
            attempts_max: 30,
            time_to_live: Duration::from_secs(86_400),
            dead_letter,
            safety_net: false,
        }
    }

    fn answered(number: u32, status: u16) -> MadeAttempt {
        MadeAttempt {
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

    fn decide(attempt: MadeAttempt, dead_letter: bool) -> NextStep {
        policy(dead_letter).next(&CLOUD_2021, EndpointKind::WebHook, attempt, NOW, NOW, 0.0)
    }

    #[test]
    fn the_2021_waits_and_floors() {
        let wait = |number, status, seconds| {
            let expected = NextStep::RetryAt(NOW + Duration::from_secs(seconds));
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
                GiveUpReason::BadRequest
            } else {
                GiveUpReason::ClientError
            };
            assert_eq!(decide(answered(1, status), false), NextStep::Drop(reason));
            assert_eq!(decide(answered(1, status), true), NextStep::DeadLetter(reason));
        }
        for status in 200..=204 {
            assert_eq!(decide(answered(1, status), true), NextStep::Done);
        }
    }

    #[test]
    fn a_safety_net_keeps_what_would_be_dropped_and_changes_nothing_else() {
        let net = RetryPolicy {
            safety_net: true,
            ..policy(false)
        };
        let next = |profile: &Profile, status| {
            net.next(profile, EndpointKind::WebHook, answered(1, status), NOW, NOW, 0.0)
        };
        assert_eq!(
            next(&CLOUD_2021, 400),
            NextStep::DeadLetter(GiveUpReason::BadRequest)
        );
        assert!(matches!(next(&CLOUD_2018, 400), NextStep::RetryAt(_)));
    }

    #[test]
    fn the_last_attempt_is_the_last() {
        assert!(matches!(decide(answered(29, 500), true), NextStep::RetryAt(_)));
        // Any status: it was the last attempt in any case.
        for status in [400, 401, 403, 404, 413, 500, 503] {
            for attempts_max in [1, 30] {
                let check = |dead_letter, expected| {
                    let policy = RetryPolicy {
                        attempts_max,
                        ..policy(dead_letter)
                    };
                    let attempt = answered(attempts_max, status);
                    let next = policy.next(&CLOUD_2021, EndpointKind::WebHook, attempt, NOW, NOW, 0.0);
                    assert_eq!(next, expected, "{status}, attempt {attempts_max}");
                };
                check(true, NextStep::DeadLetter(GiveUpReason::AttemptsExhausted));
                check(false, NextStep::Drop(GiveUpReason::AttemptsExhausted));
            }
        }
        let single = RetryPolicy {
            attempts_max: 1,
            ..policy(true)
        };
        let answer = answered(1, 200);
        let next = single.next(&CLOUD_2021, EndpointKind::WebHook, answer, NOW, NOW, 0.0);
        assert_eq!(next, NextStep::Done);
    }

    #[test]
    fn retry_after_lengthens_only() {
        let ask = |seconds| {
            let attempt = MadeAttempt {
                retry_after: Some(Duration::from_secs(seconds)),
                ..answered(1, 503)
            };
            decide(attempt, false)
        };
        assert_eq!(ask(5), NextStep::RetryAt(NOW + Duration::from_secs(30)));
        assert_eq!(ask(90), NextStep::RetryAt(NOW + Duration::from_secs(90)));
    }

    #[test]
    fn retry_after_never_pushes_past_the_end_of_the_events_time() {
        let policy = RetryPolicy {
            time_to_live: Duration::from_secs(600),
            ..policy(false)
        };
        let attempt = MadeAttempt {
            retry_after: Some(Duration::from_secs(7200)),
            ..answered(1, 429)
        };
        let next = |published| policy.next(&CLOUD_2021, EndpointKind::WebHook, attempt, published, NOW, 0.0);
        assert_eq!(next(NOW), NextStep::RetryAt(NOW + Duration::from_secs(600)));
        assert_eq!(
            policy.expired(NOW, NOW + Duration::from_secs(600)),
            Some(NextStep::Drop(GiveUpReason::TimeToLiveExceeded))
        );
        // The schedule's own step may lie beyond the end: the event is checked then.
        let published = NOW - Duration::from_secs(595);
        assert_eq!(next(published), NextStep::RetryAt(NOW + Duration::from_secs(10)));
    }

    #[test]
    fn a_profile_may_give_up_before_waiting_in_vain() {
        let early = Profile {
            time_to_live_rule: TimeToLiveRule::BeforeWaiting,
            ..CLOUD_2021
        };
        let next = |profile: &Profile, published| {
            policy(true).next(
                profile,
                EndpointKind::WebHook,
                answered(10, 500),
                published,
                NOW,
                0.5,
            )
        };
        let old = NOW - Duration::from_secs(50_000);
        assert_eq!(
            next(&early, old),
            NextStep::DeadLetter(GiveUpReason::TimeToLiveExceeded)
        );
        assert!(matches!(next(&CLOUD_2021, old), NextStep::RetryAt(_)));
        assert!(matches!(next(&early, NOW), NextStep::RetryAt(_)));
    }

    /// The defaults of 2018 to 2020 agree with each other only if thirty attempts fit into a day;
    /// jitter must not add up to the thirteen minutes that are left.
    #[test]
    fn chance_does_not_cost_an_event_its_last_attempt() {
        for position in 0..2000 {
            let (mut at, mut attempts) = (NOW, 1);
            while let NextStep::RetryAt(due) = policy(false).next(
                &CLOUD_2018,
                EndpointKind::WebHook,
                answered(attempts, 500),
                NOW,
                at,
                chance(0, 1, position, attempts),
            ) {
                assert_eq!(policy(false).expired(NOW, due), None, "{position} {attempts}");
                (at, attempts) = (due, attempts + 1);
            }
            assert_eq!(attempts, 30);
        }
    }

    #[test]
    fn chance_is_the_same_for_the_same_attempt_and_spreads_over_many() {
        assert_eq!(chance(7, 1, 2, 3), chance(7, 1, 2, 3));
        let all: Vec<f64> = (0..1000).map(|position| chance(7, 1, position, 1)).collect();
        assert!(all.iter().all(|c| (0.0..1.0).contains(c)));
        let low = all.iter().filter(|c| **c < 0.5).count();
        assert!((400..600).contains(&low), "{low}");
        assert_ne!(chance(7, 1, 2, 3), chance(8, 1, 2, 3));
        assert_ne!(chance(7, 1, 2, 3), chance(7, 1, 2, 4));
    }

    proptest! {
        #[test]
        fn never_sooner_than_the_step_and_the_floor_and_hardly_later(number in 1u32..30, status in 205u16..600, chance in 0.0f64..=1.0) {
            let next = policy(true).next(&CLOUD_2021, EndpointKind::WebHook, answered(number, status), NOW, NOW, chance);
            if let NextStep::RetryAt(at) = next {
                let step = CLOUD_2021.step(number);
                let wait = at.since(NOW);
                prop_assert!(wait >= step.max(Duration::from_secs(10)));
                prop_assert!(wait <= step.mul_f64(1.01).max(Duration::from_secs(120)));
            }
        }
    }
}
