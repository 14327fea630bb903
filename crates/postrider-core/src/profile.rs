//! Profiles: the delivery and retry rules of each Azure document, as data.

use crate::probation::ProbationRules;
use crate::subscription::ResourceOrigin;
use std::time::Duration;

/// The kind of a destination: the documents treat webhooks and Azure resources differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointKind {
    WebHook,
    /// Brokers, storage, functions.
    AzureResource,
}

/// The consequence of one failure status.
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

impl StatusRule {
    /// The least wait before a retry, if there is one.
    pub fn floor(self) -> Option<Duration> {
        match self {
            StatusRule::RetryAfter(floor) | StatusRule::FinalIfDeadLettered(floor) => Some(floor),
            StatusRule::Final => None,
        }
    }

    /// The same rule with another least wait, where it has one.
    pub fn with_floor(self, change: impl FnOnce(Duration) -> Duration) -> StatusRule {
        match self {
            StatusRule::RetryAfter(floor) => StatusRule::RetryAfter(change(floor)),
            StatusRule::FinalIfDeadLettered(floor) => StatusRule::FinalIfDeadLettered(change(floor)),
            StatusRule::Final => StatusRule::Final,
        }
    }
}

/// A least wait that exceeds waits of the schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverrulingFloor {
    /// The status that it follows; none stands for any status that is not listed, and for no answer
    /// at all.
    pub status: Option<u16>,
    /// The kinds of endpoint that it applies to.
    pub kinds: Vec<EndpointKind>,
    pub floor: Duration,
    /// The shorter waits of the schedule, in order.
    pub waits: Vec<Duration>,
}

/// A line of a profile's table of statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusLine {
    pub status: u16,
    pub web_hook: StatusRule,
    pub azure_resource: StatusRule,
}

/// When an event's time to live is checked. The time counts from publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeToLiveRule {
    /// Only when the next attempt is due: an event may outlive its time until then.
    WhenDue,
    /// Also after a failed attempt: an event whose next attempt would come too late is given up at
    /// once.
    BeforeWaiting,
}

/// How dead letters are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadLetterTiming {
    /// From the last attempt to the writing, so that many dead letters share a blob.
    pub delay: Duration,
    /// A dead letter is dropped when its store was out of reach for this long.
    pub give_up_after: Duration,
}

/// The rules in which the documents differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    pub name: &'static str,
    /// The origin of the profile, for people.
    pub about: &'static str,
    /// Waits after the first failure, the second, and so on; the last one repeats.
    pub schedule: &'static [Duration],
    /// The response timeout of a subscription without batches.
    pub response_timeout: Duration,
    /// The response timeout of a subscription whose requests may hold several events.
    pub batch_response_timeout: Duration,
    /// A timed-out attempt may still succeed until this long after it was sent; none if it may not.
    pub late_window: Option<Duration>,
    pub success: &'static [u16],
    pub statuses: &'static [StatusLine],
    /// Statuses after which a request with several events is sent again in halves, since each event
    /// may be accepted without its neighbours. The halves continue the same attempt.
    pub split_batches_on: &'static [u16],
    /// The least wait after any other failure, including a timeout or a broken connection.
    pub other_floor: Duration,
    /// Each wait is lengthened by at most this percentage, so that many retries do not come at
    /// once.
    pub jitter_percent: u32,
    pub attempts_max: u32,
    pub time_to_live: Duration,
    pub time_to_live_rule: TimeToLiveRule,
    /// Probation rules; none if the document has none.
    pub probation: Option<ProbationRules>,
    pub dead_letter: DeadLetterTiming,
    /// The validation window: how long after the handshake request a webhook may still be confirmed
    /// by a visit.
    pub validation_window: Duration,
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

/// The documents only say "small". Thirty hourly attempts leave thirteen minutes of a day: a
/// greater jitter, added up, could cost an event its last attempt.
const JITTER_PERCENT: u32 = 1;

const DEAD_LETTER: DeadLetterTiming = DeadLetterTiming {
    delay: mins(5),
    give_up_after: hours(4),
};

/// The document of 2018 dead-letters a 400 or a 413 "immediately" and names no delay for anything
/// else either. It does not say how long an unavailable store is retried: that value is from the
/// later documents.
const DEAD_LETTER_2018: DeadLetterTiming = DeadLetterTiming {
    delay: Duration::ZERO,
    ..DEAD_LETTER
};

/// The latest cloud document, 2021-07: the default. Its section on batches gives subscribers a
/// minute to answer one.
pub static CLOUD_2021: Profile = Profile {
    name: "cloud-2021",
    about: "the cloud service as documented in July 2021",
    schedule: SCHEDULE_2021,
    response_timeout: secs(30),
    batch_response_timeout: secs(60),
    late_window: Some(mins(3)),
    success: &[200, 201, 202, 203, 204],
    statuses: STATUSES_2021,
    split_batches_on: &[413],
    other_floor: secs(10),
    jitter_percent: JITTER_PERCENT,
    attempts_max: 30,
    time_to_live: hours(24),
    time_to_live_rule: TimeToLiveRule::WhenDue,
    probation: Some(ProbationRules::DOCUMENTED),
    dead_letter: DEAD_LETTER,
    validation_window: mins(5),
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
    about: "the cloud service as documented in September 2018",
    schedule: HOURLY,
    response_timeout: secs(60),
    batch_response_timeout: secs(60),
    late_window: None,
    success: &[200, 202],
    statuses: STATUSES_2018,
    split_batches_on: &[413],
    other_floor: Duration::ZERO,
    jitter_percent: JITTER_PERCENT,
    attempts_max: 30,
    time_to_live: hours(24),
    time_to_live_rule: TimeToLiveRule::WhenDue,
    probation: None,
    dead_letter: DEAD_LETTER_2018,
    validation_window: mins(5),
};

/// 2019-05: a response timeout of half a minute, and a late window of three minutes. The document
/// allows skipping retries, which is not the same as delaying first deliveries; nothing is skipped
/// here.
pub static CLOUD_2019: Profile = Profile {
    name: "cloud-2019",
    about: "the cloud service as documented in May 2019",
    response_timeout: secs(30),
    batch_response_timeout: secs(30),
    late_window: Some(mins(3)),
    dead_letter: DEAD_LETTER,
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

/// 2020-10: least waits by status, success from 200 to 204, probation.
pub static CLOUD_2020: Profile = Profile {
    name: "cloud-2020",
    about: "the cloud service as documented in October 2020",
    success: &[200, 201, 202, 203, 204],
    statuses: STATUSES_2020,
    other_floor: secs(10),
    probation: Some(ProbationRules::DOCUMENTED),
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

/// Like 2021, but a webhook's 404 is retried, and a batch has the response timeout of a single
/// event.
pub static CLOUD_CURRENT: Profile = Profile {
    name: "cloud-current",
    about: "as cloud-2021, but a webhook's 404 is retried and a batch has 30 seconds",
    response_timeout: secs(30),
    batch_response_timeout: secs(30),
    statuses: STATUSES_CURRENT,
    validation_window: mins(10),
    ..CLOUD_2021
};

/// The IoT Edge module: one pass through the one-minute queue, then the ten-minute queue.
pub static EDGE: Profile = Profile {
    name: "edge",
    about: "the Event Grid module for IoT Edge",
    schedule: &[mins(1), mins(10)],
    response_timeout: secs(60),
    batch_response_timeout: secs(60),
    late_window: None,
    success: &[200, 201, 202, 203, 204],
    statuses: &[],
    split_batches_on: &[413],
    other_floor: Duration::ZERO,
    jitter_percent: 0,
    attempts_max: 30,
    time_to_live: secs(7200),
    time_to_live_rule: TimeToLiveRule::WhenDue,
    probation: None,
    dead_letter: DEAD_LETTER,
    validation_window: mins(5),
};

static STANDARD: [&Profile; 6] = [
    &CLOUD_2018,
    &CLOUD_2019,
    &CLOUD_2020,
    &CLOUD_2021,
    &CLOUD_CURRENT,
    &EDGE,
];

/// The profiles that a server knows, and the default.
#[derive(Clone, Debug, PartialEq)]
pub struct Profiles {
    all: Vec<&'static Profile>,
    default: &'static Profile,
    /// The default for subscriptions created through the edge API.
    edge_default: Option<&'static Profile>,
}

impl Default for Profiles {
    /// The profiles of Azure's documents.
    fn default() -> Profiles {
        Profiles {
            all: STANDARD.to_vec(),
            default: &CLOUD_2021,
            edge_default: None,
        }
    }
}

impl Profiles {
    /// Adds a profile, or replaces the one with the same name. The profile lives as long as the
    /// process.
    pub fn put(&mut self, profile: Profile) {
        let profile: &'static Profile = Box::leak(Box::new(profile));
        match self.all.iter_mut().find(|known| known.name == profile.name) {
            Some(known) => *known = profile,
            None => self.all.push(profile),
        }
        if self.default.name == profile.name {
            self.default = profile;
        }
    }

    /// Makes the profile of this name the default. False if there is none.
    #[must_use]
    pub fn set_default(&mut self, name: &str) -> bool {
        let found = self.named(name);
        self.default = found.unwrap_or(self.default);
        found.is_some()
    }

    pub fn named(&self, name: &str) -> Option<&'static Profile> {
        self.all.iter().copied().find(|profile| profile.name == name)
    }

    /// Sets the profile of subscriptions created through the edge API that name none, nor does
    /// their topic. The profile lives as long as the process.
    pub fn set_edge_default(&mut self, profile: Profile) {
        self.edge_default = Some(Box::leak(Box::new(profile)));
    }

    /// The default profile.
    pub fn fallback(&self) -> &'static Profile {
        self.default
    }

    /// The profile in force for a subscription of this origin, given the name set on it or its
    /// topic.
    pub fn in_force(&self, named: Option<&str>, origin: ResourceOrigin) -> &'static Profile {
        let named = named.and_then(|name| self.named(name));
        let default = match (origin, self.edge_default) {
            (ResourceOrigin::Edge, Some(edge_default)) => edge_default,
            _ => self.default,
        };
        named.unwrap_or(default)
    }

    pub fn iter(&self) -> impl Iterator<Item = &'static Profile> {
        self.all.iter().copied()
    }
}

impl Profile {
    /// The response timeout of requests that hold at most this many events.
    pub fn response_wait(&self, events_max: usize) -> Duration {
        match events_max {
            0 | 1 => self.response_timeout,
            _ => self.batch_response_timeout,
        }
    }

    pub fn is_success(&self, status: u16) -> bool {
        self.success.contains(&status)
    }

    /// Whether a request with this many events and this answer is sent again in halves. The answer
    /// then says nothing about any of the events; only the answer to a single event does.
    pub fn splits(&self, status: Option<u16>, events: usize) -> bool {
        let refused = status.is_some_and(|status| self.split_batches_on.contains(&status));
        events > 1 && refused
    }

    /// The consequence of a failure with this status; none stands for no answer at all.
    pub fn rule(&self, status: Option<u16>, kind: EndpointKind) -> StatusRule {
        let line = self.statuses.iter().find(|line| Some(line.status) == status);
        match (line, kind) {
            (Some(line), EndpointKind::WebHook) => line.web_hook,
            (Some(line), EndpointKind::AzureResource) => line.azure_resource,
            (None, _) => StatusRule::RetryAfter(self.other_floor),
        }
    }

    /// The times of attempts, counted from the first, if each is answered at once with an unlisted
    /// failure and jitter is left out. The iterator is infinite.
    pub fn offsets(&self) -> impl Iterator<Item = Duration> {
        let mut at = Duration::ZERO;
        (1..).map(move |attempt| {
            let this = at;
            at = at.saturating_add(self.step(attempt).max(self.other_floor));
            this
        })
    }

    /// The least waits that exceed waits of the schedule, each with those waits: there the least
    /// wait applies.
    pub fn overruling_floors(&self) -> Vec<OverrulingFloor> {
        let of_line = |line: &StatusLine| {
            [EndpointKind::WebHook, EndpointKind::AzureResource].map(|kind| (Some(line.status), kind))
        };
        let others = [(None, EndpointKind::WebHook), (None, EndpointKind::AzureResource)];
        let mut found: Vec<OverrulingFloor> = Vec::new();
        for (status, kind) in self.statuses.iter().flat_map(of_line).chain(others) {
            let Some(floor) = self.rule(status, kind).floor() else {
                continue;
            };
            let shorter = |wait: &Duration| *wait < floor;
            let waits: Vec<Duration> = self.schedule.iter().copied().filter(shorter).collect();
            if waits.is_empty() {
                continue;
            }
            match found.last_mut() {
                Some(last) if (last.status, last.floor) == (status, floor) => last.kinds.push(kind),
                _ => found.push(OverrulingFloor {
                    status,
                    kinds: vec![kind],
                    floor,
                    waits,
                }),
            }
        }
        found
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

    fn offsets(profile: &Profile, count: usize) -> Vec<u64> {
        profile.offsets().take(count).map(|at| at.as_secs()).collect()
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
        // Thirty attempts end just inside a day: the defaults agree only if waits count between
        // attempts.
        assert_eq!(offsets(&CLOUD_2018, 30)[29], 23 * 3600 + 46 * 60 + 40);
        assert_eq!(
            offsets(&EDGE, 13),
            [
                0, 60, 660, 1260, 1860, 2460, 3060, 3660, 4260, 4860, 5460, 6060, 6660
            ]
        );
    }

    #[test]
    fn dead_letters_wait_as_the_documents_say() {
        for profile in STANDARD {
            let delay = if profile.name == "cloud-2018" { 0 } else { 300 };
            let expected = DeadLetterTiming {
                delay: secs(delay),
                give_up_after: hours(4),
            };
            assert_eq!(profile.dead_letter, expected, "{}", profile.name);
        }
    }

    #[test]
    fn a_batch_has_a_minute_in_2021_and_no_more_than_a_single_event_elsewhere() {
        for profile in STANDARD {
            let batch = match profile.name {
                "cloud-2021" => secs(60),
                _ => profile.response_timeout,
            };
            assert_eq!(profile.response_wait(10), batch, "{}", profile.name);
            assert_eq!(
                profile.response_wait(1),
                profile.response_timeout,
                "{}",
                profile.name
            );
        }
    }

    #[test]
    fn only_a_batch_that_is_too_large_is_split() {
        let lenient = Profile {
            split_batches_on: &[400, 413],
            ..CLOUD_2021
        };
        for profile in STANDARD {
            assert!(profile.splits(Some(413), 2), "{}", profile.name);
            assert!(!profile.splits(Some(413), 1) && !profile.splits(Some(400), 9));
            assert!(!profile.splits(None, 9) && !profile.splits(Some(500), 9));
        }
        assert!(lenient.splits(Some(400), 2) && !lenient.splits(Some(400), 1));
    }

    #[test]
    fn floors_that_overrule_the_schedule_are_found() {
        let check = |profile: &Profile, expected: &[(Option<u16>, usize, u64, &[u64])]| {
            let found: Vec<_> = profile
                .overruling_floors()
                .into_iter()
                .map(|one| {
                    let waits: Vec<u64> = one.waits.iter().map(Duration::as_secs).collect();
                    (one.status, one.kinds.len(), one.floor.as_secs(), waits)
                })
                .collect();
            let expected: Vec<_> = expected
                .iter()
                .map(|(status, kinds, floor, waits)| (*status, *kinds, *floor, waits.to_vec()))
                .collect();
            assert_eq!(found, expected);
        };
        check(
            &CLOUD_2021,
            &[
                (Some(401), 1, 300, &[10, 30, 60]),
                (Some(404), 1, 300, &[10, 30, 60]),
                (Some(408), 2, 120, &[10, 30, 60]),
                (Some(503), 2, 30, &[10]),
            ],
        );
        check(&CLOUD_2018, &[]);
        check(&EDGE, &[]);
        let impatient = Profile {
            schedule: const { &[secs(5), secs(30)] },
            statuses: &[],
            ..CLOUD_2021
        };
        check(&impatient, &[(None, 2, 10, &[5])]);
    }

    #[test]
    fn every_profile_is_found_by_its_name() {
        let mut profiles = Profiles::default();
        for profile in STANDARD {
            assert_eq!(profiles.named(profile.name), Some(profile));
        }
        assert_eq!(profiles.named("cloud-1999"), None);
        assert!(!profiles.set_default("cloud-1999"));
        assert_eq!(profiles.fallback().name, "cloud-2021");
        assert!(profiles.set_default("edge"));
        profiles.put(Profile {
            attempts_max: 3,
            ..EDGE
        });
        assert_eq!(profiles.fallback().attempts_max, 3);
        assert_eq!(profiles.iter().count(), STANDARD.len());
    }
}
