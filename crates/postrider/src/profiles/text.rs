//! Profiles as tables for a terminal.

use super::attempt_schedule::{ATTEMPTS_RANGE, AttemptSchedule, ScheduleEnd, TIME_TO_LIVE_MINUTES_RANGE};
use crate::config::{NEVER, print_hours};
use crate::terminal::columns;
use postrider_core::profile::{EndpointKind, OverrulingFloor, Profile, Profiles, StatusRule, TimeToLiveRule};
use std::time::Duration;

/// A table with a line for each profile.
pub fn list(profiles: &Profiles) -> String {
    let mut rows = vec![["", "profile", "response timeout", "attempts", "about"].map(String::from)];
    for profile in profiles.iter() {
        let default = profile.name == profiles.fallback().name;
        rows.push([
            if default { "*" } else { "" }.into(),
            profile.name.into(),
            print_hours(profile.response_timeout),
            format!(
                "{} in {}",
                AttemptSchedule::of(profile).attempts,
                print_hours(profile.time_to_live)
            ),
            profile.about.into(),
        ]);
    }
    if profiles.named(super::custom::NAME).is_none() {
        let about = "your own; the configuration has no [profile_custom] yet";
        rows.push(["", super::custom::NAME, "-", "-", about].map(String::from));
    }
    let table = columns("", &rows);
    format!("{table}\n* holds where neither a subscription nor its topic names a profile\n")
}

/// All properties of one profile.
pub fn show(profile: &Profile, profiles: &Profiles) -> String {
    let default = match profile.name == profiles.fallback().name {
        true => " (the default)",
        false => "",
    };
    [
        format!("{}{default}: {}\n", profile.name, profile.about),
        columns("", &settings(profile)),
        attempts(profile),
        answers(profile),
        overruled(profile),
        retry_policy(profile),
        probation(profile),
        dead_letters(profile),
    ]
    .join("\n")
}

fn settings(profile: &Profile) -> Vec<[String; 2]> {
    let waits: Vec<_> = profile.schedule.iter().copied().map(print_hours).collect();
    let repeats = match waits.len() {
        1 => "each time",
        _ => "the last repeats",
    };
    let success: Vec<_> = profile.success.iter().map(u16::to_string).collect();
    let late = profile.late_window.map_or("do not count".into(), |window| {
        format!("count until {} after sending", print_hours(window))
    });
    let jitter = match profile.jitter_percent {
        0 => "none".into(),
        percent => format!("each wait of the schedule up to {percent} % longer"),
    };
    let batch = match profile.batch_response_timeout {
        same if same == profile.response_timeout => "the same".into(),
        other => print_hours(other),
    };
    let split: Vec<_> = profile.split_batches_on.iter().map(u16::to_string).collect();
    let split = match &split[..] {
        [] => "never".into(),
        statuses => format!(
            "sent again in halves after {}, as the same attempt, down to single events",
            statuses.join(" or ")
        ),
    };
    [
        ("schedule", format!("{}; {repeats}", waits.join(", "))),
        ("jitter", jitter),
        ("response timeout", print_hours(profile.response_timeout)),
        (
            "for batches",
            format!("{batch}, with more than one event per request allowed"),
        ),
        ("late responses", late),
        ("success", success.join(", ")),
        ("batches", split),
        (
            "validation",
            format!("may be visited for {}", print_hours(profile.validation_window)),
        ),
    ]
    .map(|(name, value)| [name.into(), value])
    .into()
}

fn attempts(profile: &Profile) -> String {
    let course = AttemptSchedule::of(profile);
    let mut rows = vec![["attempt", "wait", "offset"].map(String::from)];
    for (number, wait, offset) in course.steps() {
        let overruled = number > 1 && profile.step(number as u32 - 1) < profile.other_floor;
        let wait = wait.map_or("-".into(), |wait| match overruled {
            true => format!("{} (floor)", print_hours(wait)),
            false => print_hours(wait),
        });
        rows.push([number.to_string(), wait, print_hours(offset)]);
    }
    let table = columns("  ", &rows);
    let unlisted = match course.attempts - course.offsets.len() {
        0 => String::new(),
        more => format!("  … and {more} more\n"),
    };
    let time_to_live = print_hours(profile.time_to_live);
    let end = match (course.end, profile.time_to_live_rule) {
        (ScheduleEnd::Attempts(at), _) => format!(
            "attempts end it, {} of them, at {}",
            course.attempts,
            print_hours(at)
        ),
        (ScheduleEnd::TimeToLive(at), TimeToLiveRule::WhenDue) => format!(
            "the time to live of {time_to_live} ends it, looked at at {}",
            print_hours(at)
        ),
        (ScheduleEnd::TimeToLive(at), TimeToLiveRule::BeforeWaiting) => format!(
            "the time to live of {time_to_live} ends it, looked at before waiting, at {}",
            print_hours(at)
        ),
    };
    format!(
        "attempts, if each fails at once with \"any other\" failure, jitter left out\n{table}{unlisted}  {end}\n"
    )
}

fn answers(profile: &Profile) -> String {
    let mut rows = vec![["status", "webhook", "Azure resource"].map(String::from)];
    let kinds = [EndpointKind::WebHook, EndpointKind::AzureResource];
    for line in profile.statuses {
        let [web_hook, azure_resource] = kinds.map(|kind| rule(profile.rule(Some(line.status), kind)));
        rows.push([line.status.to_string(), web_hook, azure_resource]);
    }
    let [web_hook, azure_resource] = kinds.map(|kind| rule(profile.rule(None, kind)));
    rows.push(["any other".into(), web_hook, azure_resource]);
    format!(
        "what follows a failure (any other: also no answer in time, and no connection)\n{}",
        columns("  ", &rows)
    )
}

fn rule(rule: StatusRule) -> String {
    let retry = |floor: Duration| match floor.is_zero() {
        true => "retry".into(),
        false => format!("retry, at least {}", print_hours(floor)),
    };
    match rule {
        StatusRule::Final => "final".into(),
        StatusRule::RetryAfter(floor) => retry(floor),
        StatusRule::FinalIfDeadLettered(floor) => {
            format!("final with a dead-letter destination, else {}", retry(floor))
        }
    }
}

/// Waits of the schedule that a floor overrules.
fn overruled(profile: &Profile) -> String {
    let floors = profile.overruling_floors();
    if floors.is_empty() {
        return "no floor is longer than a wait of the schedule: the schedule holds\n".into();
    }
    let rows: Vec<[String; 2]> = floors.iter().map(overruling).collect();
    format!(
        "floors that are longer than waits of the schedule, and hold instead\n{}",
        columns("  ", &rows)
    )
}

/// The failures to which a floor applies, and the waits it replaces.
pub fn overruling(floor: &OverrulingFloor) -> [String; 2] {
    let after = floor
        .status
        .map_or("any other".into(), |status| status.to_string());
    let kind = match floor.kinds[..] {
        [EndpointKind::WebHook] => " (webhooks)",
        [EndpointKind::AzureResource] => " (Azure resources)",
        _ => "",
    };
    let waits: Vec<_> = floor.waits.iter().copied().map(print_hours).collect();
    [
        format!("{after}{kind}"),
        format!(
            "{}, not the schedule's {}",
            print_hours(floor.floor),
            waits.join(", ")
        ),
    ]
}

fn retry_policy(profile: &Profile) -> String {
    let looked_at = match profile.time_to_live_rule {
        TimeToLiveRule::WhenDue => {
            "looked at only when the next attempt comes due: an event may outlive it until then"
        }
        TimeToLiveRule::BeforeWaiting => {
            "looked at also after a failed attempt: an event whose next attempt would come too late is given up \
             at once"
        }
    };
    let ([least, most], [minutes_least, minutes_most]) = (ATTEMPTS_RANGE, TIME_TO_LIVE_MINUTES_RANGE);
    let rows = [
        [
            "attempts".into(),
            profile.attempts_max.to_string(),
            format!("{least} to {most}"),
        ],
        [
            "time to live".into(),
            print_hours(profile.time_to_live),
            format!("{minutes_least} to {minutes_most} minutes"),
        ],
    ];
    format!(
        "retry policy, if the subscription names none, and what the management API lets it name\n{}  \
         the time to live counts from publishing; {looked_at}\n",
        columns("  ", &rows)
    )
}

fn probation(profile: &Profile) -> String {
    let Some(rules) = &profile.probation else {
        return "delayed delivery: none\n".into();
    };
    let listed = rules.causes.iter().map(|(cause, _)| *cause);
    let mut rows: Vec<_> = listed
        .map(|cause| [cause.to_string(), print_hours(rules.first(cause))])
        .collect();
    rows.push(["any other".into(), print_hours(rules.other.min(rules.max))]);
    format!(
        "delayed delivery, once {} different deliveries have failed with no success between\n{}  \
         doubled by each probe that fails, up to {}\n",
        rules.failures,
        columns("  ", &rows),
        print_hours(rules.max)
    )
}

fn dead_letters(profile: &Profile) -> String {
    let timing = profile.dead_letter;
    let rows = [
        [
            "written".into(),
            match timing.delay {
                Duration::ZERO => "at once after the last attempt".into(),
                delay => format!("{} after the last attempt", print_hours(delay)),
            },
        ],
        [
            "dropped".into(),
            match timing.give_up_after {
                NEVER => "never, however long the place for them cannot be reached".into(),
                long => format!(
                    "when the place for them could not be reached for {}",
                    print_hours(long)
                ),
            },
        ],
    ];
    format!("dead letters\n{}", columns("  ", &rows))
}
