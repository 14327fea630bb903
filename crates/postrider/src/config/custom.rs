//! `[profile_custom]`: the operator's own profile as written, and the checks on it.

use super::check::{
    CheckResult, JITTER_PERCENT_MOST, PROBATION_FAILURES_MOST, WAIT_MOST, check_split_batches_on, refuse,
    wait_within, within,
};
use super::{duration, model, nearest};
use postrider_core::outcome::Outcome;
use postrider_core::profile::{self, Profile, Profiles};
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The only success on the edge profile with `edge.strict_success`.
pub const EDGE_SUCCESS_STRICT: &[u16] = &[200];

const WAITS_MOST: usize = 100;
const ANSWER_WITHIN_MOST: Duration = Duration::from_secs(3600);

/// Differences from the base profile; `None` keeps the base's value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProfileCustom {
    /// The name of a standard profile.
    #[serde(deserialize_with = "model::standard_profile")]
    pub base: String,
    /// Waits between attempts; the last one repeats.
    #[serde(with = "duration::optional_list")]
    pub schedule: Option<Vec<Duration>>,
    #[serde(with = "duration::optional")]
    pub response_timeout: Option<Duration>,
    /// Response timeout for subscriptions with batches; defaults to `response_timeout` if only that
    /// is set.
    #[serde(with = "duration::optional")]
    pub batch_response_timeout: Option<Duration>,
    /// How long after sending a late answer counts.
    #[serde(with = "duration::optional_or_off")]
    pub late_window: Option<OrOff<Duration>>,
    pub success: Option<Vec<u16>>,
    /// Statuses that are never retried. Those of the base that are not listed are retried.
    #[serde(rename = "final")]
    pub finals: Option<Vec<u16>>,
    /// Statuses that are never retried where there is a dead-letter destination. Those of the base
    /// that are not listed are retried.
    pub final_if_dead_lettered: Option<Vec<u16>>,
    /// Least wait after any other failure.
    #[serde(with = "duration::optional")]
    pub other_floor: Option<Duration>,
    pub jitter_percent: Option<u32>,
    /// Statuses after which a batch is sent again in halves.
    pub split_batches_on: Option<Vec<u16>>,
    pub attempts_max: Option<u32>,
    #[serde(with = "duration::optional")]
    pub time_to_live: Option<Duration>,
    pub time_to_live_check: Option<TimeToLiveCheck>,
    /// Least waits by status; merged over those of the base.
    #[serde(with = "floors")]
    pub floors: Option<BTreeMap<u16, Duration>>,
    pub probation: Option<OrOff<ProbationCustom>>,
}

impl Default for ProfileCustom {
    fn default() -> ProfileCustom {
        ProfileCustom {
            base: profile::CLOUD_2021.name.into(),
            schedule: None,
            response_timeout: None,
            batch_response_timeout: None,
            late_window: None,
            success: None,
            finals: None,
            final_if_dead_lettered: None,
            other_floor: None,
            jitter_percent: None,
            split_batches_on: None,
            attempts_max: None,
            time_to_live: None,
            time_to_live_check: None,
            floors: None,
            probation: None,
        }
    }
}

/// When an event's time to live is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeToLiveCheck {
    WhenDue,
    BeforeWaiting,
}

/// Probation. `None`: the value of `[probation]`, or else the documented one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProbationCustom {
    pub failures: Option<u32>,
    #[serde(with = "duration::optional")]
    pub max: Option<Duration>,
    /// First probation delay for a cause that is not listed.
    #[serde(with = "duration::optional")]
    pub other: Option<Duration>,
    /// First probation delays by cause; merged over the documented ones.
    #[serde(with = "causes")]
    pub causes: Option<BTreeMap<Outcome, Duration>>,
}

/// A setting that may be switched off by writing `"off"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OrOff<T> {
    Off,
    On(T),
}

impl From<Duration> for OrOff<Duration> {
    fn from(duration: Duration) -> OrOff<Duration> {
        OrOff::On(duration)
    }
}

impl<T: Serialize> Serialize for OrOff<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            OrOff::Off => to.serialize_str("off"),
            OrOff::On(value) => value.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for OrOff<ProbationCustom> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<OrOff<ProbationCustom>, D::Error> {
        struct OrOffVisitor;
        impl<'de> Visitor<'de> for OrOffVisitor {
            type Value = OrOff<ProbationCustom>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table or \"off\"")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                match text.trim() {
                    "off" => Ok(OrOff::Off),
                    _ => Err(E::custom(format!("\"{text}\" is not a table, nor \"off\""))),
                }
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                let table = serde::de::value::MapAccessDeserializer::new(map);
                ProbationCustom::deserialize(table).map(OrOff::On)
            }
        }
        from.deserialize_any(OrOffVisitor)
    }
}

/// Durations by status.
mod floors {
    use super::*;

    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    struct StatusKey(u16);

    impl<'de> Deserialize<'de> for StatusKey {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<StatusKey, D::Error> {
            let text = String::deserialize(from)?;
            let number = text.parse().ok().filter(|_| text.len() == 3);
            let status = number.filter(|status| STATUSES.contains(status));
            let refused = || D::Error::custom(format!("\"{text}\" is not a status such as \"503\""));
            status.map(StatusKey).ok_or_else(refused)
        }
    }

    pub fn serialize<S: Serializer>(floors: &FloorsByStatus, to: S) -> Result<S::Ok, S::Error> {
        floors
            .as_ref()
            .map(|floors| by_text(floors, u16::to_string))
            .serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<FloorsByStatus, D::Error> {
        let floors = Option::<BTreeMap<StatusKey, duration::DurationItem>>::deserialize(from)?;
        Ok(floors.map(|floors| {
            floors
                .into_iter()
                .map(|(status, floor)| (status.0, floor.0))
                .collect()
        }))
    }

    type FloorsByStatus = Option<BTreeMap<u16, Duration>>;
}

/// Durations by outcome.
mod causes {
    use super::*;

    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    struct CauseKey(Outcome);

    impl<'de> Deserialize<'de> for CauseKey {
        /// Case is ignored, since names of environment variables have none.
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<CauseKey, D::Error> {
            let text = String::deserialize(from)?;
            let failures = || {
                let no_failures = [Outcome::Success, Outcome::Probation];
                Outcome::ALL
                    .into_iter()
                    .filter(move |outcome| !no_failures.contains(outcome))
            };
            let found = failures().find(|outcome| outcome.name().eq_ignore_ascii_case(&text));
            found.map(CauseKey).ok_or_else(|| {
                let names: Vec<_> = failures().map(Outcome::name).collect();
                let hint = nearest(&text, names.iter().copied());
                let hint = hint
                    .map(|near| format!("; did you mean \"{near}\"?"))
                    .unwrap_or_default();
                D::Error::custom(format!("\"{text}\" is not one of {}{hint}", names.join(", ")))
            })
        }
    }

    pub fn serialize<S: Serializer>(causes: &DelaysByCause, to: S) -> Result<S::Ok, S::Error> {
        causes
            .as_ref()
            .map(|causes| by_text(causes, Outcome::to_string))
            .serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DelaysByCause, D::Error> {
        let causes = Option::<BTreeMap<CauseKey, duration::DurationItem>>::deserialize(from)?;
        Ok(causes.map(|causes| {
            causes
                .into_iter()
                .map(|(cause, wait)| (cause.0, wait.0))
                .collect()
        }))
    }

    type DelaysByCause = Option<BTreeMap<Outcome, Duration>>;
}

fn by_text<K>(
    durations: &BTreeMap<K, Duration>,
    text: fn(&K) -> String,
) -> BTreeMap<String, duration::DurationItem> {
    durations
        .iter()
        .map(|(key, duration)| (text(key), duration::DurationItem(*duration)))
        .collect()
}

const STATUSES: std::ops::RangeInclusive<u16> = 100..=599;

/// Refuses a profile that no engine could follow, or that contradicts itself about a status.
pub fn check(custom: &ProfileCustom, edge_strict_success: bool) -> CheckResult {
    let profiles = Profiles::default();
    let base = profiles
        .named(&custom.base)
        .expect("the base is a standard profile");
    check_waits(custom, base)?;
    check_statuses(custom, base, edge_strict_success)?;
    if let Some(percent) = custom.jitter_percent {
        within("profile_custom.jitter_percent", percent, 0, JITTER_PERCENT_MOST)?;
    }
    let split = custom.split_batches_on.as_deref();
    check_split_batches_on("profile_custom.split_batches_on", split)?;
    if custom.attempts_max == Some(0) {
        return refuse("profile_custom.attempts_max", "must be at least 1");
    }
    if custom.time_to_live == Some(Duration::ZERO) {
        return refuse("profile_custom.time_to_live", "must be more than 0");
    }
    match &custom.probation {
        Some(OrOff::On(probation)) => check_probation(probation),
        Some(OrOff::Off) | None => Ok(()),
    }
}

fn check_waits(custom: &ProfileCustom, base: &Profile) -> CheckResult {
    if let Some(schedule) = &custom.schedule {
        let key = "profile_custom.schedule";
        if schedule.is_empty() {
            return refuse(key, "must have at least one wait");
        }
        if schedule.len() > WAITS_MOST {
            let reason = format!("must have at most {WAITS_MOST} waits, has {}", schedule.len());
            return refuse(key, reason);
        }
        for (index, wait) in schedule.iter().enumerate() {
            wait_within(format!("{key}[{index}]"), *wait, WAIT_MOST)?;
        }
    }
    let floors = custom.floors.iter().flatten();
    let floors = floors.map(|(status, floor)| (format!("profile_custom.floors.{status}"), *floor));
    let other = custom
        .other_floor
        .map(|floor| ("profile_custom.other_floor".to_owned(), floor));
    for (key, floor) in floors.chain(other) {
        if floor > WAIT_MOST {
            let (most, was) = (duration::print(WAIT_MOST), duration::print(floor));
            return refuse(key, format!("must be at most {most}, was {was}"));
        }
    }

    let single = custom.response_timeout.unwrap_or(base.response_timeout);
    wait_within("profile_custom.response_timeout", single, ANSWER_WITHIN_MOST)?;
    if let Some(batch) = custom.batch_response_timeout {
        wait_within("profile_custom.batch_response_timeout", batch, ANSWER_WITHIN_MOST)?;
    }
    let key = "profile_custom.late_window";
    // An inherited batch timeout may exceed the late window: late answers to batches do not count
    // then.
    let (longest, timeout) = match custom.batch_response_timeout {
        Some(batch) if batch > single => ("batch_response_timeout", batch),
        _ => ("response_timeout", single),
    };
    let answered_by = format!("{longest}, which is {}", duration::print(timeout));
    match (custom.late_window, base.late_window) {
        (Some(OrOff::On(window)), _) => {
            wait_within(key, window, ANSWER_WITHIN_MOST)?;
            if window <= timeout {
                return refuse(key, format!("must be longer than {answered_by}"));
            }
        }
        (None, Some(window)) if window <= timeout => {
            let (window, base) = (duration::print(window), base.name);
            let reason = format!("{window}, as in \"{base}\", is not longer than {answered_by}");
            return refuse(key, format!("{reason}: set it longer, or \"off\""));
        }
        _ => {}
    }
    Ok(())
}

fn check_statuses(custom: &ProfileCustom, base: &Profile, edge_strict_success: bool) -> CheckResult {
    if custom.success.as_ref().is_some_and(Vec::is_empty) {
        return refuse("profile_custom.success", "must have at least one status");
    }
    let listed = [
        ("profile_custom.success", &custom.success),
        ("profile_custom.final", &custom.finals),
        (
            "profile_custom.final_if_dead_lettered",
            &custom.final_if_dead_lettered,
        ),
    ];
    let listed = listed.into_iter().flat_map(|(list, statuses)| {
        let at = move |(index, status): (usize, &u16)| (list, format!("{list}[{index}]"), *status);
        statuses.iter().flatten().enumerate().map(at)
    });
    let floors = "profile_custom.floors";
    let with_floors = custom.floors.iter().flatten();
    let with_floors = with_floors.map(|(status, _)| (floors, format!("{floors}.{status}"), *status));

    let success = match base.name {
        "edge" if edge_strict_success => EDGE_SUCCESS_STRICT,
        _ => base.success,
    };
    let mut seen = BTreeMap::new();
    for (list, key, status) in listed.chain(with_floors) {
        if !STATUSES.contains(&status) {
            return refuse(key, format!("must be between 100 and 599, was {status}"));
        }
        match seen.insert(status, list) {
            Some(earlier) if earlier == list => return refuse(key, format!("{status} is given twice")),
            Some(earlier) => return refuse(key, format!("{status} is also in {earlier}")),
            None => {}
        }
        if custom.success.is_none() && success.contains(&status) {
            let reason = format!("{status} is a success in \"{}\"", base.name);
            return refuse(key, format!("{reason}: set profile_custom.success without it"));
        }
    }
    Ok(())
}

fn check_probation(probation: &ProbationCustom) -> CheckResult {
    let key = "profile_custom.probation";
    if let Some(failures) = probation.failures {
        within(format!("{key}.failures"), failures, 1, PROBATION_FAILURES_MOST)?;
    }
    let named = [("max", probation.max), ("other", probation.other)];
    let named = named
        .into_iter()
        .filter_map(|(name, wait)| Some((format!("{key}.{name}"), wait?)));
    let causes = probation.causes.iter().flatten();
    let causes = causes.map(|(cause, wait)| (format!("{key}.causes.{cause}"), *wait));
    for (key, wait) in named.chain(causes) {
        wait_within(key, wait, WAIT_MOST)?;
    }
    Ok(())
}
