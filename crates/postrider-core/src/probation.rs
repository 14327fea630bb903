//! Probation (Azure: delayed delivery): when an endpoint is on probation, and for how long.

use crate::outcome::Outcome;
use crate::time::Timestamp;
use std::time::Duration;

/// The rules of probation, as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbationRules {
    /// The number of different deliveries that must fail, without a success in between, before it
    /// begins.
    pub failures: u32,
    /// The first delay by cause.
    pub causes: &'static [(Outcome, Duration)],
    /// The first delay for any other cause.
    pub other: Duration,
    /// Each failed probe doubles the delay, up to this.
    pub max: Duration,
}

/// The delay of an endpoint on probation: until `until`, when one probe is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointProbationDelay {
    pub cause: Outcome,
    /// The status of the answer that began or prolonged the delay, if there was one.
    pub status: Option<u16>,
    /// When it began.
    pub since: Timestamp,
    pub until: Timestamp,
    /// The length of the current delay.
    pub step: Duration,
}

/// The delay of one endpoint, as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointDelay {
    /// Scheme, host, port and path; never the query string.
    pub endpoint: String,
    pub delay: EndpointProbationDelay,
    /// The node that set the delay; none without a cluster.
    pub by: Option<String>,
}

impl ProbationRules {
    /// The values of Azure's documentation, for the profiles with probation.
    pub const DOCUMENTED: ProbationRules = ProbationRules {
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

    /// The first delay for a cause.
    pub fn first(&self, cause: Outcome) -> Duration {
        let listed = self.causes.iter().find(|(known, _)| *known == cause);
        listed.map_or(self.other, |(_, wait)| *wait).min(self.max)
    }

    /// A delay that begins at `now`.
    pub fn begin(&self, cause: Outcome, now: Timestamp) -> EndpointProbationDelay {
        let step = self.first(cause);
        EndpointProbationDelay {
            cause,
            status: None,
            since: now,
            until: now + step,
            step,
        }
    }

    /// The delay after a failed probe: twice as long.
    pub fn prolong(
        &self,
        delay: EndpointProbationDelay,
        cause: Outcome,
        now: Timestamp,
    ) -> EndpointProbationDelay {
        let step = (delay.step * 2).max(self.first(cause)).min(self.max);
        EndpointProbationDelay {
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
        let rules = ProbationRules::DOCUMENTED;
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
        let rules = ProbationRules::DOCUMENTED;
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
