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
