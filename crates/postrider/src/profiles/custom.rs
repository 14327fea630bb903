//! The operator's own profile, built from `[profile_custom]` and its base profile.

use crate::config::{OrOff, ProbationCustom, ProfileCustom, TimeToLiveCheck};
use postrider_core::outcome::Outcome;
use postrider_core::probation::ProbationRules;
use postrider_core::profile::{Profile, StatusLine, StatusRule, TimeToLiveRule};
use std::collections::BTreeMap;
use std::time::Duration;

pub const NAME: &str = "custom";

/// The base with the operator's settings laid over it. `documented` is the probation used where the
/// base has none. Lists and texts are leaked, so call this once per configuration.
pub fn profile(written: &ProfileCustom, base: &Profile, documented: ProbationRules) -> Profile {
    let success: &[u16] = match &written.success {
        Some(success) => success.clone().leak(),
        None => base.success,
    };
    let other_floor = written
        .other_floor
        .unwrap_or_else(|| inherited_floor(written, base.other_floor));
    Profile {
        name: NAME,
        about: format!("from the configuration, based on {}", base.name).leak(),
        schedule: match &written.schedule {
            Some(schedule) => schedule.clone().leak(),
            None => base.schedule,
        },
        response_timeout: written.response_timeout.unwrap_or(base.response_timeout),
        // The operator's response timeout applies to batches, too.
        batch_response_timeout: match (written.batch_response_timeout, written.response_timeout) {
            (Some(batch), _) => batch,
            (None, Some(single)) => single,
            (None, None) => base.batch_response_timeout,
        },
        late_window: match written.late_window {
            Some(OrOff::On(window)) => Some(window),
            Some(OrOff::Off) => None,
            None => base.late_window,
        },
        success,
        statuses: statuses(written, base.statuses, success, other_floor).leak(),
        other_floor,
        split_batches_on: match &written.split_batches_on {
            Some(statuses) => statuses.clone().leak(),
            None => base.split_batches_on,
        },
        jitter_percent: written.jitter_percent.unwrap_or(base.jitter_percent),
        attempts_max: written.attempts_max.unwrap_or(base.attempts_max),
        time_to_live: written.time_to_live.unwrap_or(base.time_to_live),
        time_to_live_rule: match written.time_to_live_check {
            Some(TimeToLiveCheck::WhenDue) => TimeToLiveRule::WhenDue,
            Some(TimeToLiveCheck::BeforeWaiting) => TimeToLiveRule::BeforeWaiting,
            None => base.time_to_live_rule,
        },
        probation: match &written.probation {
            Some(OrOff::On(rules)) => Some(probation(rules, base.probation.unwrap_or(documented))),
            Some(OrOff::Off) => None,
            None => base.probation,
        },
        dead_letter: base.dead_letter,
        validation_window: base.validation_window,
    }
}

/// A floor of the base as it applies in the custom profile. The operator's schedule must hold as
/// written unless floors written beside it overrule it, so inherited floors are lowered to its
/// shortest wait.
fn inherited_floor(written: &ProfileCustom, floor: Duration) -> Duration {
    let shortest = written.schedule.iter().flatten().min();
    shortest.map_or(floor, |shortest| floor.min(*shortest))
}

/// Status rules of the base, without the finality that the operator replaced, overlaid by the
/// operator's own.
fn statuses(
    written: &ProfileCustom,
    base: &[StatusLine],
    success: &[u16],
    other_floor: Duration,
) -> Vec<StatusLine> {
    let kept = |rule: StatusRule| {
        let rule = rule.with_floor(|floor| inherited_floor(written, floor));
        match rule {
            StatusRule::Final if written.finals.is_some() => StatusRule::RetryAfter(other_floor),
            StatusRule::FinalIfDeadLettered(floor) if written.final_if_dead_lettered.is_some() => {
                StatusRule::RetryAfter(floor)
            }
            rule => rule,
        }
    };
    let mut lines: BTreeMap<u16, StatusLine> = BTreeMap::new();
    for line in base {
        let kept = StatusLine {
            status: line.status,
            web_hook: kept(line.web_hook),
            azure_resource: kept(line.azure_resource),
        };
        lines.insert(line.status, kept);
    }
    // Without a dead-letter destination these statuses are retried with the base's floor, the
    // longer one if it has two.
    let floor = |status: u16| {
        let line = base.iter().find(|line| line.status == status);
        let rules = line
            .into_iter()
            .flat_map(|line| [line.web_hook, line.azure_resource]);
        let floors = rules.filter_map(StatusRule::floor);
        let floors = floors.map(|floor| inherited_floor(written, floor));
        floors.max().unwrap_or(other_floor)
    };
    let finals = written.finals.iter().flatten();
    let finals = finals.map(|status| (*status, StatusRule::Final));
    let if_dead_lettered = written.final_if_dead_lettered.iter().flatten();
    let if_dead_lettered =
        if_dead_lettered.map(|status| (*status, StatusRule::FinalIfDeadLettered(floor(*status))));
    let floors = written.floors.iter().flatten();
    let floors = floors.map(|(status, floor)| (*status, StatusRule::RetryAfter(*floor)));
    for (status, rule) in finals.chain(if_dead_lettered).chain(floors) {
        let line = StatusLine {
            status,
            web_hook: rule,
            azure_resource: rule,
        };
        lines.insert(status, line);
    }
    lines.retain(|status, _| !success.contains(status));
    lines.into_values().collect()
}

fn probation(written: &ProbationCustom, rules: ProbationRules) -> ProbationRules {
    let mut causes: Vec<(Outcome, Duration)> = rules.causes.to_vec();
    for (&cause, &wait) in written.causes.iter().flatten() {
        match causes.iter_mut().find(|(known, _)| *known == cause) {
            Some(known) => known.1 = wait,
            None => causes.push((cause, wait)),
        }
    }
    ProbationRules {
        failures: written.failures.unwrap_or(rules.failures),
        causes: causes.leak(),
        other: written.other.unwrap_or(rules.other),
        max: written.max.unwrap_or(rules.max),
    }
}
