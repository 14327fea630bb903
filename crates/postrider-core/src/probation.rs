//! Delayed delivery: when an endpoint is left alone, and for how long.

use crate::outcome::Outcome;
use crate::time::Timestamp;
use std::time::Duration;

/// The rules of delayed delivery, as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probation {
    /// This many different deliveries must have failed, with no success between, before it begins.
    pub failures: u32,
    /// How long an endpoint is left alone at first, by what went wrong.
    pub causes: &'static [(Outcome, Duration)],
    /// For any other cause.
    pub other: Duration,
    /// Each failed probe doubles the time, up to this.
    pub max: Duration,
}

/// An endpoint is left alone until `until`; then one probe goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    pub cause: Outcome,
    /// The status of the answer that began or prolonged the delay, if there was one.
    pub status: Option<u16>,
    /// When it began.
    pub since: Timestamp,
    pub until: Timestamp,
    /// How long the last wait was chosen to be.
    pub step: Duration,
}

/// The delay of one endpoint, as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointDelay {
    /// Scheme, host, port and path; never the query string.
    pub endpoint: String,
    pub delay: Delay,
    /// The node that has set it, where there are several.
    pub by: Option<String>,
}

impl Probation {
    /// What the reference lists, for the profiles that know delayed delivery.
    pub const DOCUMENTED: Probation = Probation {
        failures: 10,
        causes: &[
            (Outcome::Busy, Duration::from_secs(10)),
            (Outcome::TimedOut, Duration::from_secs(10)),
            (Outcome::SocketError, Duration::from_secs(30)),
            (Outcome::NotFound, Duration::from_secs(300)),
            (Outcome::ResolutionError, Duration::from_secs(300)),
            (Outcome::Disabled, Duration::from_secs(300)),
            (Outcome::Full, Duration::from_secs(300)),
            (Outcome::Unauthorized, Duration::from_secs(300)),
            (Outcome::Forbidden, Duration::from_secs(300)),
            (Outcome::InvalidAzureFunctionDestination, Duration::from_secs(600)),
        ],
        other: Duration::from_secs(10),
        max: Duration::from_secs(4 * 3600),
    };

    /// How long an endpoint is left alone at first.
    pub fn first(&self, cause: Outcome) -> Duration {
        let listed = self.causes.iter().find(|(known, _)| *known == cause);
        listed.map_or(self.other, |(_, wait)| *wait).min(self.max)
    }

    /// Left alone from `now` on.
    pub fn begin(&self, cause: Outcome, now: Timestamp) -> Delay {
        let step = self.first(cause);
        Delay {
            cause,
            status: None,
            since: now,
            until: now + step,
            step,
        }
    }

    /// A probe has failed: left alone for twice as long.
    pub fn prolong(&self, delay: Delay, cause: Outcome, now: Timestamp) -> Delay {
        let step = (delay.step * 2).max(self.first(cause)).min(self.max);
        Delay {
            cause,
            status: None,
            since: delay.since,
            until: now + step,
            step,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_cause_has_its_wait_and_probes_double_it_up_to_the_maximum() {
        let rules = Probation::DOCUMENTED;
        let now = Timestamp::from_secs(1_000_000);
        let check = |cause, seconds| {
            let mut delay = rules.begin(cause, now);
            let mut expected = Duration::from_secs(seconds);
            for _ in 0..20 {
                assert_eq!(delay.step, expected, "{cause}");
                delay = rules.prolong(delay, cause, delay.until);
                expected = (expected * 2).min(Duration::from_secs(14_400));
                assert_eq!(delay.since, now);
            }
            assert_eq!(delay.step, rules.max);
        };
        check(Outcome::Busy, 10);
        check(Outcome::TimedOut, 10);
        check(Outcome::SocketError, 30);
        check(Outcome::NotFound, 300);
        check(Outcome::ResolutionError, 300);
        check(Outcome::Unauthorized, 300);
        check(Outcome::Forbidden, 300);
        check(Outcome::InvalidAzureFunctionDestination, 600);
        check(Outcome::GenericError, 10);
    }

    #[test]
    fn another_cause_never_shortens_the_wait_but_may_lengthen_it() {
        let rules = Probation::DOCUMENTED;
        let now = Timestamp::from_secs(1_000_000);
        let busy = rules.begin(Outcome::Busy, now);
        assert_eq!(
            rules.prolong(busy, Outcome::NotFound, now).step,
            Duration::from_secs(300)
        );
        let absent = rules.begin(Outcome::NotFound, now);
        assert_eq!(
            rules.prolong(absent, Outcome::Busy, now).step,
            Duration::from_secs(600)
        );
    }
}
