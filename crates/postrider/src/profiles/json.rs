//! Profiles as JSON. Existing names and meanings are stable; new fields may be added.
//!
//! Durations are numbers of seconds, possibly fractional; `null` means never, or absent.
//!
//! `postrider profiles -o json` prints a list of [`ProfileSummaryJson`], `postrider profiles show NAME -o
//! json` a [`ProfileDetailsJson`].

use super::attempt_schedule::{ATTEMPTS_RANGE, AttemptSchedule, ScheduleEnd, TIME_TO_LIVE_MINUTES_RANGE};
use crate::config::NEVER;
use postrider_core::profile::{EndpointKind, OverrulingFloor, Profile, Profiles, StatusRule, TimeToLiveRule};
use serde::{Serialize, Serializer};
use std::time::Duration;

pub fn list(profiles: &Profiles) -> String {
    let summary = |profile: &'static Profile| ProfileSummaryJson {
        name: profile.name,
        default: profile.name == profiles.fallback().name,
        about: profile.about,
        response_timeout: SecondsJson(profile.response_timeout),
        time_to_live: SecondsJson(profile.time_to_live),
        attempts_fitting: AttemptSchedule::of(profile).attempts,
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
struct ProfileSummaryJson<'a> {
    name: &'a str,
    /// Whether this is the default profile.
    default: bool,
    about: &'a str,
    response_timeout: SecondsJson,
    /// Time to live of a subscription that sets none.
    time_to_live: SecondsJson,
    /// Number of attempts within the time to live, if each fails at once.
    attempts_fitting: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ProfileDetailsJson<'a> {
    name: &'a str,
    default: bool,
    about: &'a str,
    /// Waits between attempts; the last repeats.
    schedule: Vec<SecondsJson>,
    /// Largest random lengthening of each wait, in percent.
    jitter_percent: u32,
    response_timeout: SecondsJson,
    /// Response timeout of a subscription that allows several events per request.
    batch_response_timeout: SecondsJson,
    /// How long after sending a late response counts; `null`: late responses do not count.
    late_window: Option<SecondsJson>,
    success: &'a [u16],
    /// Statuses after which a batch is sent again in halves, as the same attempt.
    split_batches_on: &'a [u16],
    statuses: Vec<StatusJson>,
    /// Rule for any other failure, no answer included.
    other: StatusRuleJson,
    /// Floors that are longer than waits of the schedule, and overrule them.
    overruling_floors: Vec<OverrulingFloorJson>,
    retry_policy: RetryPolicyJson,
    /// At most the first thousand attempts, if each fails at once with a failure without a rule of
    /// its own, without jitter.
    attempts: Vec<AttemptJson>,
    attempts_fitting: usize,
    end: ScheduleEndJson,
    /// `null`: the profile has no probation.
    probation: Option<ProbationJson>,
    dead_letter: DeadLetterJson,
    /// How long the validation URL of a webhook may be visited.
    validation_window: SecondsJson,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StatusJson {
    status: u16,
    web_hook: StatusRuleJson,
    azure_resource: StatusRuleJson,
}

/// `{"rule": "final"}`, `{"rule": "retry", "floor": 300}` or `{"rule": "finalIfDeadLettered",
/// "floor": 300}`; the floor is the least wait.
#[derive(Serialize)]
#[serde(tag = "rule", rename_all = "camelCase")]
enum StatusRuleJson {
    Final,
    Retry { floor: SecondsJson },
    FinalIfDeadLettered { floor: SecondsJson },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OverrulingFloorJson {
    /// `null`: any status that is not listed, and no answer at all.
    status: Option<u16>,
    /// Kinds of destinations: `webHook` and `azureResource`, or one of them.
    kinds: Vec<&'static str>,
    floor: SecondsJson,
    /// Shorter waits of the schedule, which the floor overrules.
    waits: Vec<SecondsJson>,
}

/// Default limits of a subscription, and the ranges that the management API accepts.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RetryPolicyJson {
    attempts_max: u32,
    attempts_range: [u32; 2],
    time_to_live: SecondsJson,
    time_to_live_minutes_range: [u32; 2],
    /// `when-due` or `before-waiting`.
    time_to_live_check: &'static str,
}

#[derive(Serialize)]
struct AttemptJson {
    /// Number of the attempt; the first is 1.
    attempt: usize,
    /// Wait since the previous attempt; `null` for the first.
    wait: Option<SecondsJson>,
    /// Time since the first attempt.
    offset: SecondsJson,
}

/// The limit that ends the attempts. `offset` is that of the last attempt, or of the slot at which
/// the time to live is found to have passed.
#[derive(Serialize)]
struct ScheduleEndJson {
    /// `attempts` or `timeToLive`.
    by: &'static str,
    offset: SecondsJson,
}

#[derive(Serialize)]
struct ProbationJson {
    /// Number of different deliveries that must fail.
    failures: u32,
    /// First probation delay, by cause.
    causes: Vec<ProbationCauseJson>,
    /// First probation delay for any other cause.
    other: SecondsJson,
    /// Upper bound of the probation delay, which each failed probe doubles.
    max: SecondsJson,
}

#[derive(Serialize)]
struct ProbationCauseJson {
    outcome: &'static str,
    wait: SecondsJson,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeadLetterJson {
    delay: SecondsJson,
    /// `null`: never.
    give_up_after: SecondsJson,
}

struct SecondsJson(Duration);

impl Serialize for SecondsJson {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            NEVER => to.serialize_none(),
            whole if whole.subsec_nanos() == 0 => to.serialize_u64(whole.as_secs()),
            fraction => to.serialize_f64(fraction.as_secs_f64()),
        }
    }
}

fn shown<'a>(profile: &'a Profile, profiles: &Profiles) -> ProfileDetailsJson<'a> {
    let course = AttemptSchedule::of(profile);
    let status = |line: &postrider_core::profile::StatusLine| StatusJson {
        status: line.status,
        web_hook: rule(line.web_hook),
        azure_resource: rule(line.azure_resource),
    };
    let attempt = |(attempt, wait, offset): (usize, Option<Duration>, Duration)| AttemptJson {
        attempt,
        wait: wait.map(SecondsJson),
        offset: SecondsJson(offset),
    };
    let (by, offset) = match course.end {
        ScheduleEnd::Attempts(offset) => ("attempts", offset),
        ScheduleEnd::TimeToLive(offset) => ("timeToLive", offset),
    };
    ProfileDetailsJson {
        name: profile.name,
        default: profile.name == profiles.fallback().name,
        about: profile.about,
        schedule: profile.schedule.iter().copied().map(SecondsJson).collect(),
        jitter_percent: profile.jitter_percent,
        response_timeout: SecondsJson(profile.response_timeout),
        batch_response_timeout: SecondsJson(profile.batch_response_timeout),
        late_window: profile.late_window.map(SecondsJson),
        success: profile.success,
        split_batches_on: profile.split_batches_on,
        statuses: profile.statuses.iter().map(status).collect(),
        other: rule(StatusRule::RetryAfter(profile.other_floor)),
        overruling_floors: profile.overruling_floors().into_iter().map(overruling).collect(),
        retry_policy: RetryPolicyJson {
            attempts_max: profile.attempts_max,
            attempts_range: ATTEMPTS_RANGE,
            time_to_live: SecondsJson(profile.time_to_live),
            time_to_live_minutes_range: TIME_TO_LIVE_MINUTES_RANGE,
            time_to_live_check: match profile.time_to_live_rule {
                TimeToLiveRule::WhenDue => "when-due",
                TimeToLiveRule::BeforeWaiting => "before-waiting",
            },
        },
        attempts: course.steps().map(attempt).collect(),
        attempts_fitting: course.attempts,
        end: ScheduleEndJson {
            by,
            offset: SecondsJson(offset),
        },
        probation: profile.probation.map(|rules| ProbationJson {
            failures: rules.failures,
            causes: rules
                .causes
                .iter()
                .map(|(cause, _)| ProbationCauseJson {
                    outcome: cause.name(),
                    wait: SecondsJson(rules.first(*cause)),
                })
                .collect(),
            other: SecondsJson(rules.other.min(rules.max)),
            max: SecondsJson(rules.max),
        }),
        dead_letter: DeadLetterJson {
            delay: SecondsJson(profile.dead_letter.delay),
            give_up_after: SecondsJson(profile.dead_letter.give_up_after),
        },
        validation_window: SecondsJson(profile.validation_window),
    }
}

fn overruling(floor: OverrulingFloor) -> OverrulingFloorJson {
    let kind = |kind: &EndpointKind| match kind {
        EndpointKind::WebHook => "webHook",
        EndpointKind::AzureResource => "azureResource",
    };
    OverrulingFloorJson {
        status: floor.status,
        kinds: floor.kinds.iter().map(kind).collect(),
        floor: SecondsJson(floor.floor),
        waits: floor.waits.into_iter().map(SecondsJson).collect(),
    }
}

fn rule(rule: StatusRule) -> StatusRuleJson {
    match rule {
        StatusRule::Final => StatusRuleJson::Final,
        StatusRule::RetryAfter(floor) => StatusRuleJson::Retry {
            floor: SecondsJson(floor),
        },
        StatusRule::FinalIfDeadLettered(floor) => StatusRuleJson::FinalIfDeadLettered {
            floor: SecondsJson(floor),
        },
    }
}
