//! Profiles: what each document says about delivery and retry, as data. One engine reads them.

use std::time::Duration;

/// What kind of place a destination is; documents treat webhooks and Azure resources differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointKind {
    WebHook,
    /// Brokers, storage, functions.
    AzureResource,
}

/// What follows from one failure status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusRule {
    /// Retry, but not sooner than this.
    RetryAfter(Duration),
    /// Never retry.
    Final,
    /// Never retry when the subscription has a dead-letter destination; otherwise retry, not sooner
    /// than this.
    FinalIfDeadLettered(Duration),
}

/// One line of a profile's table of statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusLine {
    pub status: u16,
    pub web_hook: StatusRule,
    pub azure_resource: StatusRule,
}

/// Everything in which the documents differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    pub name: &'static str,
    /// Waits after the first failure, the second, and so on; the last one repeats.
    pub schedule: &'static [Duration],
    pub response_timeout: Duration,
    pub success: &'static [u16],
    pub statuses: &'static [StatusLine],
    /// The least wait after any other failure, a timed-out or broken attempt included.
    pub other_floor: Duration,
    /// Each wait is lengthened or shortened by at most this share of itself.
    pub jitter_percent: u32,
    pub attempts_max: u32,
    pub time_to_live: Duration,
}

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}
const fn mins(n: u64) -> Duration {
    Duration::from_secs(n * 60)
}
const fn hours(n: u64) -> Duration {
    Duration::from_secs(n * 3600)
}

const SCHEDULE_2021: &[Duration] = &[
    secs(10),
    secs(30),
    mins(1),
    mins(5),
    mins(10),
    mins(30),
    hours(1),
    hours(3),
    hours(6),
    hours(12),
];

const fn both(status: u16, rule: StatusRule) -> StatusLine {
    StatusLine {
        status,
        web_hook: rule,
        azure_resource: rule,
    }
}

const STATUSES_2021: &[StatusLine] = &[
    both(400, StatusRule::Final),
    StatusLine {
        status: 401,
        web_hook: StatusRule::Final,
        azure_resource: StatusRule::RetryAfter(mins(5)),
    },
    both(403, StatusRule::Final),
    StatusLine {
        status: 404,
        web_hook: StatusRule::Final,
        azure_resource: StatusRule::RetryAfter(mins(5)),
    },
    both(408, StatusRule::RetryAfter(mins(2))),
    both(413, StatusRule::Final),
    both(503, StatusRule::RetryAfter(secs(30))),
];

/// The newest cloud document, 2021-07: the default.
pub static CLOUD_2021: Profile = Profile {
    name: "cloud-2021",
    schedule: SCHEDULE_2021,
    response_timeout: secs(30),
    success: &[200, 201, 202, 203, 204],
    statuses: STATUSES_2021,
    other_floor: secs(10),
    jitter_percent: 10,
    attempts_max: 30,
    time_to_live: hours(24),
};

const HOURLY: &[Duration] = &[secs(10), secs(30), mins(1), mins(5), mins(10), mins(30), hours(1)];

/// Without a dead-letter destination every failure is retried, by the schedule alone.
const STATUSES_2018: &[StatusLine] = &[
    both(400, StatusRule::FinalIfDeadLettered(Duration::ZERO)),
    both(413, StatusRule::FinalIfDeadLettered(Duration::ZERO)),
];

/// 2018-09: a minute for an answer, 200 and 202 only.
pub static CLOUD_2018: Profile = Profile {
    name: "cloud-2018",
    schedule: HOURLY,
    response_timeout: secs(60),
    success: &[200, 202],
    statuses: STATUSES_2018,
    other_floor: Duration::ZERO,
    jitter_percent: 10,
    attempts_max: 30,
    time_to_live: hours(24),
};

/// 2019-05: half a minute for an answer.
pub static CLOUD_2019: Profile = Profile {
    name: "cloud-2019",
    response_timeout: secs(30),
    ..CLOUD_2018
};

const STATUSES_2020: &[StatusLine] = &[
    both(400, StatusRule::FinalIfDeadLettered(mins(5))),
    both(401, StatusRule::RetryAfter(mins(5))),
    both(403, StatusRule::RetryAfter(mins(5))),
    both(404, StatusRule::RetryAfter(mins(5))),
    both(408, StatusRule::RetryAfter(mins(2))),
    both(413, StatusRule::FinalIfDeadLettered(secs(10))),
    both(503, StatusRule::RetryAfter(secs(30))),
];

/// 2020-10: floors by status, 200 to 204.
pub static CLOUD_2020: Profile = Profile {
    name: "cloud-2020",
    success: &[200, 201, 202, 203, 204],
    statuses: STATUSES_2020,
    other_floor: secs(10),
    ..CLOUD_2019
};

const STATUSES_CURRENT: &[StatusLine] = &[
    both(400, StatusRule::Final),
    StatusLine {
        status: 401,
        web_hook: StatusRule::Final,
        azure_resource: StatusRule::RetryAfter(mins(5)),
    },
    both(403, StatusRule::Final),
    StatusLine {
        status: 404,
        web_hook: StatusRule::RetryAfter(secs(10)),
        azure_resource: StatusRule::RetryAfter(mins(5)),
    },
    both(408, StatusRule::RetryAfter(mins(2))),
    both(413, StatusRule::Final),
    both(503, StatusRule::RetryAfter(secs(30))),
];

/// As 2021, but a webhook's 404 is retried.
pub static CLOUD_CURRENT: Profile = Profile {
    name: "cloud-current",
    statuses: STATUSES_CURRENT,
    ..CLOUD_2021
};

/// The module for IoT Edge: once through the one-minute queue, then the ten-minute queue.
pub static EDGE: Profile = Profile {
    name: "edge",
    schedule: &[mins(1), mins(10)],
    response_timeout: secs(60),
    success: &[200, 201, 202, 203, 204],
    statuses: &[],
    other_floor: Duration::ZERO,
    jitter_percent: 0,
    attempts_max: 30,
    time_to_live: secs(7200),
};

static ALL: [&Profile; 6] = [
    &CLOUD_2018,
    &CLOUD_2019,
    &CLOUD_2020,
    &CLOUD_2021,
    &CLOUD_CURRENT,
    &EDGE,
];

/// The profile of this name.
pub fn named(name: &str) -> Option<&'static Profile> {
    ALL.into_iter().find(|profile| profile.name == name)
}

impl Profile {
    pub fn is_success(&self, status: u16) -> bool {
        self.success.contains(&status)
    }

    /// What follows from a failure with this status (none: no answer at all).
    pub fn rule(&self, status: Option<u16>, kind: EndpointKind) -> StatusRule {
        let line = self.statuses.iter().find(|line| Some(line.status) == status);
        match (line, kind) {
            (Some(line), EndpointKind::WebHook) => line.web_hook,
            (Some(line), EndpointKind::AzureResource) => line.azure_resource,
            (None, _) => StatusRule::RetryAfter(self.other_floor),
        }
    }

    /// The wait after the failure of attempt number `attempt` (the first is 1), before floors.
    pub fn step(&self, attempt: u32) -> Duration {
        let index = (attempt.max(1) as usize - 1).min(self.schedule.len() - 1);
        self.schedule[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When attempts fall, from the first, if each is answered at once with a failure of no special kind.
    fn offsets(profile: &Profile, count: u32) -> Vec<u64> {
        let mut at = 0;
        let mut offsets = vec![0];
        for attempt in 1..count {
            at += profile.step(attempt).max(profile.other_floor).as_secs();
            offsets.push(at);
        }
        offsets
    }

    #[test]
    fn attempts_fall_where_the_documents_say() {
        let newest = [
            0, 10, 40, 100, 400, 1000, 2800, 6400, 17_200, 38_800, 82_000, 125_200,
        ];
        assert_eq!(offsets(&CLOUD_2021, 12), newest);
        let hourly = [0, 10, 40, 100, 400, 1000, 2800, 6400, 10_000, 13_600];
        for profile in [&CLOUD_2018, &CLOUD_2019, &CLOUD_2020] {
            assert_eq!(offsets(profile, 10), hourly, "{}", profile.name);
        }
        // Thirty attempts end just inside a day: only waits between attempts make the defaults agree.
        assert_eq!(offsets(&CLOUD_2018, 30)[29], 23 * 3600 + 46 * 60 + 40);
        assert_eq!(
            offsets(&EDGE, 13),
            [
                0, 60, 660, 1260, 1860, 2460, 3060, 3660, 4260, 4860, 5460, 6060, 6660
            ]
        );
    }

    #[test]
    fn every_profile_is_found_by_its_name() {
        for profile in ALL {
            assert_eq!(named(profile.name), Some(profile));
        }
        assert_eq!(named("cloud-1999"), None);
    }
}
