//! Profiles as JSON. Existing names and meanings are stable; new fields may be added.
//!
//! Durations are numbers of seconds, possibly fractional; `null` means never, or absent.
//!
//! `postrider profiles -o json` prints a list of [`Summary`], `postrider profiles show NAME -o
//! json` a [`Shown`].

use super::course::{ATTEMPTS_RANGE, Course, End, TIME_TO_LIVE_MINUTES_RANGE};
use crate::config::NEVER;
use postrider_core::profile::{EndpointKind, OverrulingFloor, Profile, Profiles, StatusRule, TimeToLiveRule};
use serde::{Serialize, Serializer};
use std::time::Duration;

pub fn list(profiles: &Profiles) -> String {
    let summary = |profile: &'static Profile| Summary {
        name: profile.name,
        default: profile.name == profiles.fallback().name,
        about: profile.about,
        response_timeout: Seconds(profile.response_timeout),
        time_to_live: Seconds(profile.time_to_live),
        attempts_fitting: Course::of(profile).attempts,
    };
    print(&profiles.iter().map(summary).collect::<Vec<_>>())
}

pub fn show(profile: &Profile, profiles: &Profiles) -> String {
    print(&shown(profile, profiles))
}

fn print(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("it has a JSON form") + "\n"
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary<'a> {
    name: &'a str,
    /// Whether this is the default profile.
    default: bool,
    about: &'a str,
    response_timeout: Seconds,
    /// Time to live of a subscription that sets none.
    time_to_live: Seconds,
    /// Number of attempts within the time to live, if each fails at once.
    attempts_fitting: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown<'a> {
    name: &'a str,
    default: bool,
    about: &'a str,
    /// Waits between attempts; the last repeats.
    schedule: Vec<Seconds>,
    /// Largest random lengthening of each wait, in percent.
    jitter_percent: u32,
    response_timeout: Seconds,
    /// Response timeout of a subscription that allows several events per request.
    batch_response_timeout: Seconds,
    /// How long after sending a late response counts; `null`: late responses do not count.
    late_window: Option<Seconds>,
    success: &'a [u16],
    /// Statuses after which a batch is sent again in halves, as the same attempt.
    split_batches_on: &'a [u16],
    statuses: Vec<Status>,
    /// Rule for any other failure, no answer included.
    other: Rule,
    /// Floors that are longer than waits of the schedule, and overrule them.
    overruling_floors: Vec<Overruling>,
    retry_policy: RetryPolicy,
    /// At most the first thousand attempts, if each fails at once with a failure without a rule of
    /// its own, without jitter.
    attempts: Vec<Attempt>,
    attempts_fitting: usize,
    end: Ending,
    /// `null`: the profile has no probation.
    probation: Option<Probation>,
    dead_letter: DeadLetter,
    /// How long the validation URL of a webhook may be visited.
    validation_window: Seconds,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    status: u16,
    web_hook: Rule,
    azure_resource: Rule,
}

/// `{"rule": "final"}`, `{"rule": "retry", "floor": 300}` or `{"rule": "finalIfDeadLettered",
/// "floor": 300}`; the floor is the least wait.
#[derive(Serialize)]
#[serde(tag = "rule", rename_all = "camelCase")]
enum Rule {
    Final,
    Retry { floor: Seconds },
    FinalIfDeadLettered { floor: Seconds },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Overruling {
    /// `null`: any status that is not listed, and no answer at all.
    status: Option<u16>,
    /// Kinds of destinations: `webHook` and `azureResource`, or one of them.
    kinds: Vec<&'static str>,
    floor: Seconds,
    /// Shorter waits of the schedule, which the floor overrules.
    waits: Vec<Seconds>,
}

/// Default limits of a subscription, and the ranges that the management API accepts.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RetryPolicy {
    attempts_max: u32,
    attempts_range: [u32; 2],
    time_to_live: Seconds,
    time_to_live_minutes_range: [u32; 2],
    /// `when-due` or `before-waiting`.
    time_to_live_check: &'static str,
}

#[derive(Serialize)]
struct Attempt {
    /// Number of the attempt; the first is 1.
    attempt: usize,
    /// Wait since the previous attempt; `null` for the first.
    wait: Option<Seconds>,
    /// Time since the first attempt.
    offset: Seconds,
}

/// The limit that ends the attempts. `offset` is that of the last attempt, or of the slot at which
/// the time to live is found to have passed.
#[derive(Serialize)]
struct Ending {
    /// `attempts` or `timeToLive`.
    by: &'static str,
    offset: Seconds,
}

#[derive(Serialize)]
struct Probation {
    /// Number of different deliveries that must fail.
    failures: u32,
    /// First probation delay, by cause.
    causes: Vec<Cause>,
    /// First probation delay for any other cause.
    other: Seconds,
    /// Upper bound of the probation delay, which each failed probe doubles.
    max: Seconds,
}

#[derive(Serialize)]
struct Cause {
    outcome: &'static str,
    wait: Seconds,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeadLetter {
    delay: Seconds,
    /// `null`: never.
    give_up_after: Seconds,
}

struct Seconds(Duration);

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            NEVER => to.serialize_none(),
            whole if whole.subsec_nanos() == 0 => to.serialize_u64(whole.as_secs()),
            fraction => to.serialize_f64(fraction.as_secs_f64()),
        }
    }
}

fn shown<'a>(profile: &'a Profile, profiles: &Profiles) -> Shown<'a> {
    let course = Course::of(profile);
    let status = |line: &postrider_core::profile::StatusLine| Status {
        status: line.status,
        web_hook: rule(line.web_hook),
        azure_resource: rule(line.azure_resource),
    };
    let attempt = |(attempt, wait, offset): (usize, Option<Duration>, Duration)| Attempt {
        attempt,
        wait: wait.map(Seconds),
        offset: Seconds(offset),
    };
    let (by, offset) = match course.end {
        End::Attempts(offset) => ("attempts", offset),
        End::TimeToLive(offset) => ("timeToLive", offset),
    };
    Shown {
        name: profile.name,
        default: profile.name == profiles.fallback().name,
        about: profile.about,
        schedule: profile.schedule.iter().copied().map(Seconds).collect(),
        jitter_percent: profile.jitter_percent,
        response_timeout: Seconds(profile.response_timeout),
        batch_response_timeout: Seconds(profile.batch_response_timeout),
        late_window: profile.late_window.map(Seconds),
        success: profile.success,
        split_batches_on: profile.split_batches_on,
        statuses: profile.statuses.iter().map(status).collect(),
        other: rule(StatusRule::RetryAfter(profile.other_floor)),
        overruling_floors: profile.overruling_floors().into_iter().map(overruling).collect(),
        retry_policy: RetryPolicy {
            attempts_max: profile.attempts_max,
            attempts_range: ATTEMPTS_RANGE,
            time_to_live: Seconds(profile.time_to_live),
            time_to_live_minutes_range: TIME_TO_LIVE_MINUTES_RANGE,
            time_to_live_check: match profile.time_to_live_rule {
                TimeToLiveRule::WhenDue => "when-due",
                TimeToLiveRule::BeforeWaiting => "before-waiting",
            },
        },
        attempts: course.steps().map(attempt).collect(),
        attempts_fitting: course.attempts,
        end: Ending {
            by,
            offset: Seconds(offset),
        },
        probation: profile.probation.map(|rules| Probation {
            failures: rules.failures,
            causes: rules
                .causes
                .iter()
                .map(|(cause, _)| Cause {
                    outcome: cause.name(),
                    wait: Seconds(rules.first(*cause)),
                })
                .collect(),
            other: Seconds(rules.other.min(rules.max)),
            max: Seconds(rules.max),
        }),
        dead_letter: DeadLetter {
            delay: Seconds(profile.dead_letter.delay),
            give_up_after: Seconds(profile.dead_letter.give_up_after),
        },
        validation_window: Seconds(profile.validation_window),
    }
}

fn overruling(floor: OverrulingFloor) -> Overruling {
    let kind = |kind: &EndpointKind| match kind {
        EndpointKind::WebHook => "webHook",
        EndpointKind::AzureResource => "azureResource",
    };
    Overruling {
        status: floor.status,
        kinds: floor.kinds.iter().map(kind).collect(),
        floor: Seconds(floor.floor),
        waits: floor.waits.into_iter().map(Seconds).collect(),
    }
}

fn rule(rule: StatusRule) -> Rule {
    match rule {
        StatusRule::Final => Rule::Final,
        StatusRule::RetryAfter(floor) => Rule::Retry {
            floor: Seconds(floor),
        },
        StatusRule::FinalIfDeadLettered(floor) => Rule::FinalIfDeadLettered {
            floor: Seconds(floor),
        },
    }
}
