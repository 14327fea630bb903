//! The health of a subscription, judged from recent events in one place for every reader.

use crate::meters::{FailureCause, FailureEffect, RecentCounts};
use http::StatusCode;
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use std::time::Duration;

/// The minutes that failures are judged by.
pub const HEALTH_MINUTES: usize = 5;
/// The minutes for which given-up events are still mentioned.
pub const LOSS_MINUTES: usize = 60;
/// An event that has waited for longer needs attention.
const BACKLOG_AGE_MAX: Duration = Duration::from_secs(5 * 60);
/// The percentage of failed attempts that needs attention.
const FAILED_PERCENT: u64 = 10;
/// The percentage of dead letters among ended events from which a subscription is failing.
const DEAD_LETTERED_PERCENT: u64 = 50;
/// The number of attempts without any success from which a subscription is failing.
const FAILED_IN_A_ROW: u64 = 3;
/// The most causes that a reason names.
const CAUSES_NAMED_MAX: usize = 2;

/// Ordered from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SubscriptionHealth {
    /// Nothing happened recently, and nothing waits.
    Idle,
    Healthy,
    Paused,
    Attention,
    Failing,
}

impl SubscriptionHealth {
    pub const ALL: [SubscriptionHealth; 5] = [
        SubscriptionHealth::Idle,
        SubscriptionHealth::Healthy,
        SubscriptionHealth::Paused,
        SubscriptionHealth::Attention,
        SubscriptionHealth::Failing,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            SubscriptionHealth::Idle => "idle",
            SubscriptionHealth::Healthy => "healthy",
            SubscriptionHealth::Paused => "paused",
            SubscriptionHealth::Attention => "attention",
            SubscriptionHealth::Failing => "failing",
        }
    }

    /// Whether an operator should look at it.
    pub fn needs_attention(self) -> bool {
        self >= SubscriptionHealth::Attention
    }
}

/// The numbers that health is judged by. Those of several nodes can be added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthNumbers {
    /// Counts of the last [`HEALTH_MINUTES`].
    pub recent: RecentCounts,
    /// Counts of the last [`LOSS_MINUTES`], which include the former.
    pub hour: RecentCounts,
    pub waiting: u64,
    pub retrying: u64,
    /// Events that were given up and are not in a blob yet.
    pub letters_waiting: u64,
    /// Why the last try to write them failed.
    pub letters_trouble: Option<String>,
    /// How long the oldest undelivered event has waited.
    pub oldest_age: Option<Duration>,
    pub delay: Option<DelayNumbers>,
    pub paused_since: Option<Timestamp>,
}

/// The probation that holds deliveries back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayNumbers {
    /// Nothing if a probe is due.
    pub left: Duration,
    pub cause: Option<Outcome>,
    /// The status of the causing answer, where it is known.
    pub status: Option<u16>,
}

/// Why a subscription is not just healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthReason {
    pub kind: HealthReasonKind,
    /// The reason in plain words, without the subscription's name.
    pub text: String,
    pub health: SubscriptionHealth,
    /// The count, the total and the minutes, where the reason is a count.
    pub share: Option<RecentShare>,
    pub causes: Vec<(FailureCause, u64)>,
}

impl HealthReason {
    /// The next step for an operator.
    pub fn todo(&self) -> Option<&'static str> {
        let lacks = |(cause, _): &(FailureCause, u64)| match cause.effect {
            FailureEffect::Dropped(reason) => lacks_destination(reason),
            _ => false,
        };
        let unwritten = FailureEffect::Dropped(GiveUpReason::DeadLetterUnavailable);
        let is_unwritten = |(cause, _): &(FailureCause, u64)| cause.effect == unwritten;
        match self.kind {
            HealthReasonKind::Dropped if self.causes.iter().any(lacks) => Some(
                "correct the endpoint, and set a dead-letter destination (such as the storage account \"local\"), \
                 which keeps what is given up",
            ),
            HealthReasonKind::Dropped if self.causes.iter().any(is_unwritten) => Some(
                "make the dead-letter destination writable: the log and `postrider doctor` say what is wrong with it",
            ),
            HealthReasonKind::Dropped => Some("see the traces of the dropped events"),
            HealthReasonKind::DeadLetterStore => Some(
                "make the dead-letter destination writable before its letters are dropped; then they are written by \
                 themselves",
            ),
            HealthReasonKind::DeadLettered => Some("correct the endpoint, then replay the dead letters"),
            HealthReasonKind::AttemptsFailed | HealthReasonKind::Delayed | HealthReasonKind::Backlog => {
                Some("look at what the endpoint answers")
            }
            HealthReasonKind::Paused => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthReasonKind {
    Dropped,
    DeadLetterStore,
    DeadLettered,
    AttemptsFailed,
    Delayed,
    Backlog,
    Paused,
}

impl HealthReasonKind {
    pub const ALL: [HealthReasonKind; 7] = [
        HealthReasonKind::Dropped,
        HealthReasonKind::DeadLetterStore,
        HealthReasonKind::DeadLettered,
        HealthReasonKind::AttemptsFailed,
        HealthReasonKind::Delayed,
        HealthReasonKind::Backlog,
        HealthReasonKind::Paused,
    ];

    pub fn name(self) -> &'static str {
        match self {
            HealthReasonKind::Dropped => "dropped",
            HealthReasonKind::DeadLetterStore => "deadLetterStore",
            HealthReasonKind::DeadLettered => "deadLettered",
            HealthReasonKind::AttemptsFailed => "attemptsFailed",
            HealthReasonKind::Delayed => "delayed",
            HealthReasonKind::Backlog => "backlog",
            HealthReasonKind::Paused => "paused",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentShare {
    pub count: u64,
    pub of: u64,
    pub minutes: usize,
}

/// A subscription's health with its reasons, the worst first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthVerdict {
    pub health: SubscriptionHealth,
    pub reasons: Vec<HealthReason>,
}

impl HealthVerdict {
    /// Judges the numbers of one subscription. The sum of several nodes' numbers needs attention
    /// only if those of some node do.
    pub fn of(numbers: &HealthNumbers) -> HealthVerdict {
        let mut reasons: Vec<HealthReason> = [
            dropped(numbers),
            dead_letter_store(numbers),
            dead_lettered(numbers),
            attempts_failed(&numbers.recent),
            delayed(numbers),
            backlog(numbers),
            paused(numbers),
        ]
        .into_iter()
        .flatten()
        .collect();
        reasons.sort_by_key(|reason| std::cmp::Reverse(reason.health));
        let is_idle = numbers.recent.attempts == 0
            && numbers.recent.ended() == 0
            && numbers.waiting + numbers.retrying == 0;
        let least = match is_idle {
            true => SubscriptionHealth::Idle,
            false => SubscriptionHealth::Healthy,
        };
        HealthVerdict {
            health: reasons.first().map_or(least, |worst| worst.health),
            reasons,
        }
    }
}

fn dropped(numbers: &HealthNumbers) -> Option<HealthReason> {
    let (counts, minutes, health) = match (numbers.recent.dropped, numbers.hour.dropped) {
        (0, 0) => return None,
        (0, _) => (&numbers.hour, LOSS_MINUTES, SubscriptionHealth::Attention),
        _ => (&numbers.recent, HEALTH_MINUTES, SubscriptionHealth::Failing),
    };
    let is = |effect: FailureEffect| matches!(effect, FailureEffect::Dropped(_));
    Some(given_up(
        HealthReasonKind::Dropped,
        health,
        counts,
        minutes,
        counts.dropped,
        is,
    ))
}

fn dead_letter_store(numbers: &HealthNumbers) -> Option<HealthReason> {
    let trouble = numbers.letters_trouble.as_ref()?;
    let waiting = numbers.letters_waiting;
    let text = format!(
        "{waiting} {} cannot be written to the dead-letter destination: {trouble}",
        plural(waiting, "dead letter")
    );
    let (kind, health) = (HealthReasonKind::DeadLetterStore, SubscriptionHealth::Failing);
    (waiting > 0).then(|| plain(kind, health, text))
}

fn dead_lettered(numbers: &HealthNumbers) -> Option<HealthReason> {
    if numbers.letters_waiting > 0 {
        return Some(letters_waiting(numbers));
    }
    let recent = &numbers.recent;
    let (counts, minutes, health) = match (recent.dead_lettered, numbers.hour.dead_lettered) {
        (0, 0) => return None,
        (0, _) => (&numbers.hour, LOSS_MINUTES, SubscriptionHealth::Attention),
        (count, _) if count * 100 >= recent.ended() * DEAD_LETTERED_PERCENT => {
            (recent, HEALTH_MINUTES, SubscriptionHealth::Failing)
        }
        _ => (recent, HEALTH_MINUTES, SubscriptionHealth::Attention),
    };
    let is = |effect: FailureEffect| matches!(effect, FailureEffect::DeadLettered(_));
    let count = counts.dead_lettered;
    Some(given_up(
        HealthReasonKind::DeadLettered,
        health,
        counts,
        minutes,
        count,
        is,
    ))
}

/// Pending dead letters. Events count as dead-lettered only once they are in a blob, minutes after
/// they were given up; health reports them earlier.
fn letters_waiting(numbers: &HealthNumbers) -> HealthReason {
    let recent = &numbers.recent;
    let waiting = numbers.letters_waiting;
    let count = recent.dead_lettered + waiting;
    let of = recent.ended() + waiting;
    let health = match count * 100 >= of * DEAD_LETTERED_PERCENT {
        true => SubscriptionHealth::Failing,
        false => SubscriptionHealth::Attention,
    };
    let is_letter = |effect: FailureEffect| matches!(effect, FailureEffect::DeadLettered(_));
    let is_attempt = |effect: FailureEffect| effect == FailureEffect::AttemptFailed;
    // Of letters that wait it is only known how attempts failed lately: in these minutes, or before.
    let causes = [
        causes(recent, is_letter),
        causes(recent, is_attempt),
        causes(&numbers.hour, is_attempt),
    ]
    .into_iter()
    .find(|found| !found.is_empty())
    .unwrap_or_default();
    let text = format!(
        "{count} of {of} {} given up; {waiting} of them not written to a dead-letter blob yet{}",
        plural(of, "event"),
        in_parentheses(&causes)
    );
    HealthReason {
        kind: HealthReasonKind::DeadLettered,
        text,
        health,
        share: Some(RecentShare {
            count,
            of,
            minutes: HEALTH_MINUTES,
        }),
        causes,
    }
}

fn given_up(
    kind: HealthReasonKind,
    health: SubscriptionHealth,
    counts: &RecentCounts,
    minutes: usize,
    count: u64,
    is: impl Fn(FailureEffect) -> bool,
) -> HealthReason {
    let of = counts.ended();
    let verb = match kind {
        HealthReasonKind::Dropped => "dropped",
        _ => "dead-lettered",
    };
    let causes = causes(counts, is);
    let text = format!(
        "{count} of {of} {} {verb} in the last {minutes} minutes{}",
        plural(of, "event"),
        in_parentheses(&causes)
    );
    HealthReason {
        kind,
        text,
        health,
        share: Some(RecentShare { count, of, minutes }),
        causes,
    }
}

fn attempts_failed(recent: &RecentCounts) -> Option<HealthReason> {
    let (failed, of) = (recent.failed, recent.attempts);
    if failed == 0 || failed * 100 < of * FAILED_PERCENT {
        return None;
    }
    let health = match failed == of && failed >= FAILED_IN_A_ROW {
        true => SubscriptionHealth::Failing,
        false => SubscriptionHealth::Attention,
    };
    let causes = causes(recent, |effect| effect == FailureEffect::AttemptFailed);
    let text = format!(
        "{failed} of {of} delivery {} failed in the last {HEALTH_MINUTES} minutes{}",
        plural(of, "attempt"),
        in_parentheses(&causes)
    );
    Some(HealthReason {
        kind: HealthReasonKind::AttemptsFailed,
        text,
        health,
        share: Some(RecentShare {
            count: failed,
            of,
            minutes: HEALTH_MINUTES,
        }),
        causes,
    })
}

fn delayed(numbers: &HealthNumbers) -> Option<HealthReason> {
    let delay = numbers.delay.as_ref()?;
    let health = match numbers.recent.delivered {
        0 => SubscriptionHealth::Failing,
        _ => SubscriptionHealth::Attention,
    };
    let cause = delay.cause.map(|outcome| words_of(Some(outcome), delay.status));
    let because = cause.map_or(String::new(), |cause| format!(" ({cause})"));
    let text = match delay.left {
        Duration::ZERO => format!("deliveries are delayed until a probe, which is due, succeeds{because}"),
        left => format!(
            "deliveries are delayed for {} because the endpoint keeps failing{because}",
            rough(left).replacen(' ', " more ", 1)
        ),
    };
    Some(plain(HealthReasonKind::Delayed, health, text))
}

fn backlog(numbers: &HealthNumbers) -> Option<HealthReason> {
    let age = numbers.oldest_age.filter(|age| *age >= BACKLOG_AGE_MAX)?;
    if numbers.paused_since.is_some() {
        return None;
    }
    let count = numbers.waiting + numbers.retrying;
    let retrying = match numbers.retrying {
        0 => String::new(),
        retrying => format!(" ({retrying} to be tried again)"),
    };
    let text = format!(
        "{count} {} not delivered yet{retrying}; the oldest has waited for {}",
        plural(count, "event"),
        rough(age)
    );
    Some(plain(
        HealthReasonKind::Backlog,
        SubscriptionHealth::Attention,
        text,
    ))
}

fn paused(numbers: &HealthNumbers) -> Option<HealthReason> {
    let since = numbers.paused_since?;
    let text = format!("paused since {}", to_the_second(since));
    Some(plain(HealthReasonKind::Paused, SubscriptionHealth::Paused, text))
}

fn plain(kind: HealthReasonKind, health: SubscriptionHealth, text: String) -> HealthReason {
    HealthReason {
        kind,
        text,
        health,
        share: None,
        causes: Vec::new(),
    }
}

/// The causes of one kind, the most frequent first.
fn causes(counts: &RecentCounts, is: impl Fn(FailureEffect) -> bool) -> Vec<(FailureCause, u64)> {
    let found = counts.causes.iter().filter(|(cause, _)| is(cause.effect));
    let mut found: Vec<_> = found.map(|(cause, count)| (*cause, *count)).collect();
    found.sort_by_key(|(cause, count)| (std::cmp::Reverse(*count), *cause));
    found
}

fn in_parentheses(causes: &[(FailureCause, u64)]) -> String {
    match causes {
        [] => String::new(),
        [(only, _)] => format!(" ({})", describe(only)),
        several => {
            let named = several.iter().take(CAUSES_NAMED_MAX);
            let mut parts: Vec<String> = named
                .map(|(cause, count)| format!("{count}: {}", describe(cause)))
                .collect();
            let rest: u64 = several
                .iter()
                .skip(CAUSES_NAMED_MAX)
                .map(|(_, count)| count)
                .sum();
            if rest > 0 {
                parts.push(format!("{rest}: other causes"));
            }
            format!(" ({})", parts.join("; "))
        }
    }
}

/// A cause in plain words: `HTTP 400 Bad Request, no dead-letter destination`.
pub fn describe(cause: &FailureCause) -> String {
    let last = words_of(cause.outcome, cause.status);
    let lasted = |what: &str| match cause.outcome {
        None => what.to_owned(),
        Some(_) => format!("{what}, the last attempt: {last}"),
    };
    let why = |reason: GiveUpReason| match reason {
        GiveUpReason::AttemptsExhausted => lasted("all attempts used up"),
        GiveUpReason::TimeToLiveExceeded => lasted("time to live exceeded"),
        GiveUpReason::BadRequest | GiveUpReason::ClientError => last.clone(),
        GiveUpReason::SubscriptionGone => "the subscription was deleted".into(),
        GiveUpReason::Corrupt => "the stored event is damaged".into(),
        GiveUpReason::SubscriptionExpired => "the subscription expired".into(),
        GiveUpReason::DeadLetterUnavailable => "the dead-letter destination could not be written".into(),
        GiveUpReason::DeadLetterWithoutDestination => "the dead-letter destination was removed".into(),
        GiveUpReason::TooManyHops => "forwarded in a loop".into(),
    };
    match cause.effect {
        FailureEffect::AttemptFailed => last,
        FailureEffect::DeadLettered(reason) => why(reason),
        FailureEffect::Dropped(reason) if lacks_destination(reason) => {
            format!("{}, no dead-letter destination", why(reason))
        }
        FailureEffect::Dropped(reason) => why(reason),
    }
}

/// Whether an event dropped for this reason would have been dead-lettered, had there been a
/// destination.
pub fn lacks_destination(reason: GiveUpReason) -> bool {
    matches!(
        reason,
        GiveUpReason::AttemptsExhausted
            | GiveUpReason::TimeToLiveExceeded
            | GiveUpReason::BadRequest
            | GiveUpReason::ClientError
    )
}

/// An outcome in plain words: by the status where there was an answer, such as `HTTP 500 Internal
/// Server Error`.
pub fn words_of(outcome: Option<Outcome>, status: Option<u16>) -> String {
    if let Some(status) = status.and_then(|status| StatusCode::from_u16(status).ok()) {
        let name = status
            .canonical_reason()
            .map_or(String::new(), |name| format!(" {name}"));
        return format!("HTTP {}{name}", status.as_u16());
    }
    let words = match outcome {
        None => "unknown cause",
        Some(Outcome::Success) => "success",
        Some(Outcome::NotFound) => "not found",
        Some(Outcome::Disabled) => "destination disabled",
        Some(Outcome::Full) => "destination full",
        Some(Outcome::Unauthorized) => "not authorized",
        Some(Outcome::BadRequest) => "refused as a bad request",
        Some(Outcome::TimedOut) => "no answer in time",
        Some(Outcome::Busy) => "endpoint busy",
        Some(Outcome::PayloadTooLarge) => "payload too large",
        Some(Outcome::Probation) => "endpoint on probation",
        Some(Outcome::Canceled) => "canceled",
        Some(Outcome::Aborted) => "connection closed before an answer",
        Some(Outcome::SocketError) => "no connection",
        Some(Outcome::ResolutionError) => "host name not resolved",
        Some(Outcome::SessionQueueNotSupported) => "queue with sessions not supported",
        Some(Outcome::Forbidden) => "forbidden",
        Some(Outcome::InvalidAzureFunctionDestination) => "invalid Azure Function",
        Some(Outcome::GenericError) => "the endpoint answered with an error",
        Some(Outcome::ProxyError) => "the proxy failed",
    };
    words.to_owned()
}

fn to_the_second(at: Timestamp) -> String {
    let text = at.to_string();
    format!("{}Z", text.split('.').next().unwrap_or_default())
}

fn plural(count: u64, noun: &str) -> String {
    match count {
        1 => noun.to_owned(),
        _ => format!("{noun}s"),
    }
}

fn rough(age: Duration) -> String {
    let minutes = age.as_secs() / 60;
    let (count, unit) = match minutes {
        0..2 => (age.as_secs().max(1), "second"),
        2..120 => (minutes, "minute"),
        120..2880 => (minutes / 60, "hour"),
        _ => (minutes / 1440, "day"),
    };
    format!("{count} {}", plural(count, unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);

    fn cause(effect: FailureEffect, outcome: Outcome, status: u16) -> FailureCause {
        FailureCause {
            effect,
            outcome: Some(outcome),
            status: (status > 0).then_some(status),
        }
    }

    fn refused(effect: FailureEffect) -> FailureCause {
        cause(effect, Outcome::BadRequest, 400)
    }

    const DROPPED: FailureEffect = FailureEffect::Dropped(GiveUpReason::BadRequest);
    const LETTER: FailureEffect = FailureEffect::DeadLettered(GiveUpReason::AttemptsExhausted);

    fn counts(delivered: u64, attempts: u64, causes: &[(FailureCause, u64)]) -> RecentCounts {
        let sum = |is: fn(FailureEffect) -> bool| {
            let matching = causes.iter().filter(|(cause, _)| is(cause.effect));
            matching.map(|(_, count)| count).sum::<u64>()
        };
        RecentCounts {
            attempts,
            failed: sum(|effect| effect == FailureEffect::AttemptFailed),
            delivered,
            dead_lettered: sum(|effect| matches!(effect, FailureEffect::DeadLettered(_))),
            dropped: sum(|effect| matches!(effect, FailureEffect::Dropped(_))),
            causes: causes.iter().copied().collect(),
        }
    }

    fn lately(recent: RecentCounts) -> HealthNumbers {
        HealthNumbers {
            hour: recent.clone(),
            recent,
            ..HealthNumbers::default()
        }
    }

    #[track_caller]
    fn check(numbers: &HealthNumbers, health: SubscriptionHealth, texts: &[&str]) {
        let verdict = HealthVerdict::of(numbers);
        let found: Vec<&str> = verdict.reasons.iter().map(|one| &*one.text).collect();
        assert_eq!((verdict.health, &found[..]), (health, texts));
    }

    #[test]
    fn health_comes_from_what_happens_to_events() {
        use SubscriptionHealth::{Attention, Failing, Healthy, Idle, Paused};
        check(&HealthNumbers::default(), Idle, &[]);
        check(&lately(counts(5, 5, &[])), Healthy, &[]);
        let waiting = HealthNumbers {
            waiting: 3,
            oldest_age: Some(Duration::from_secs(2)),
            ..HealthNumbers::default()
        };
        check(&waiting, Healthy, &[]);

        // Loss is never healthy: nine of ten delivered, or one of a million lost.
        check(
            &lately(counts(69, 97, &[(refused(DROPPED), 28)])),
            Failing,
            &[
                "28 of 97 events dropped in the last 5 minutes (HTTP 400 Bad Request, no dead-letter destination)",
            ],
        );
        check(
            &lately(counts(1_000_000, 1_000_001, &[(refused(DROPPED), 1)])),
            Failing,
            &[
                "1 of 1000001 events dropped in the last 5 minutes (HTTP 400 Bad Request, no dead-letter destination)",
            ],
        );
        let earlier = HealthNumbers {
            recent: counts(5, 5, &[]),
            hour: counts(9, 10, &[(refused(DROPPED), 1)]),
            ..HealthNumbers::default()
        };
        check(
            &earlier,
            Attention,
            &[
                "1 of 10 events dropped in the last 60 minutes (HTTP 400 Bad Request, no dead-letter destination)",
            ],
        );

        let busy = cause(LETTER, Outcome::Busy, 503);
        check(
            &lately(counts(3, 9, &[(busy, 1)])),
            Attention,
            &[
                "1 of 4 events dead-lettered in the last 5 minutes (all attempts used up, the last attempt: HTTP 503 Service Unavailable)",
            ],
        );
        check(
            &lately(counts(1, 9, &[(busy, 1)])),
            Failing,
            &[
                "1 of 2 events dead-lettered in the last 5 minutes (all attempts used up, the last attempt: HTTP 503 Service Unavailable)",
            ],
        );

        let failed = cause(FailureEffect::AttemptFailed, Outcome::TimedOut, 0);
        check(&lately(counts(99, 100, &[(failed, 1)])), Healthy, &[]);
        check(
            &lately(counts(9, 10, &[(failed, 1)])),
            Attention,
            &["1 of 10 delivery attempts failed in the last 5 minutes (no answer in time)"],
        );
        check(
            &lately(counts(0, 1, &[(failed, 1)])),
            Attention,
            &["1 of 1 delivery attempt failed in the last 5 minutes (no answer in time)"],
        );
        check(
            &lately(counts(0, 3, &[(failed, 3)])),
            Failing,
            &["3 of 3 delivery attempts failed in the last 5 minutes (no answer in time)"],
        );

        let old = HealthNumbers {
            waiting: 1,
            retrying: 2,
            oldest_age: Some(Duration::from_secs(42 * 60)),
            ..HealthNumbers::default()
        };
        check(
            &old,
            Attention,
            &["3 events not delivered yet (2 to be tried again); the oldest has waited for 42 minutes"],
        );
        let delayed = HealthNumbers {
            delay: Some(DelayNumbers {
                left: Duration::from_secs(12 * 60 + 3),
                cause: Some(Outcome::Busy),
                status: Some(503),
            }),
            waiting: 1,
            ..HealthNumbers::default()
        };
        let text = "deliveries are delayed for 12 more minutes because the endpoint keeps failing (HTTP 503 Service Unavailable)";
        check(&delayed, Failing, &[text]);
        let partly = HealthNumbers {
            recent: counts(1, 1, &[]),
            ..delayed
        };
        check(&partly, Attention, &[text]);
        let due = HealthNumbers {
            delay: Some(DelayNumbers {
                left: Duration::ZERO,
                cause: Some(Outcome::Busy),
                status: Some(503),
            }),
            ..partly
        };
        check(
            &due,
            Attention,
            &["deliveries are delayed until a probe, which is due, succeeds (HTTP 503 Service Unavailable)"],
        );

        // A pause excuses waiting, not loss.
        let pause = "paused since 2023-11-14T22:13:20Z";
        let resting = HealthNumbers {
            paused_since: Some(NOW),
            ..old
        };
        check(&resting, Paused, &[pause]);
        let lossy = HealthNumbers {
            paused_since: Some(NOW),
            ..lately(counts(0, 1, &[(refused(DROPPED), 1)]))
        };
        check(
            &lossy,
            Failing,
            &[
                "1 of 1 event dropped in the last 5 minutes (HTTP 400 Bad Request, no dead-letter destination)",
                pause,
            ],
        );
    }

    // Events count as dead-lettered once they are written, minutes later.
    #[test]
    fn letters_that_wait_to_be_written_show_at_once() {
        let refused = cause(FailureEffect::AttemptFailed, Outcome::BadRequest, 400);
        let waiting = |recent: RecentCounts, letters_waiting: u64| HealthNumbers {
            letters_waiting,
            ..lately(recent)
        };
        let health = |numbers: &HealthNumbers| HealthVerdict::of(numbers).health;
        assert_eq!(
            health(&waiting(counts(0, 0, &[]), 1)),
            SubscriptionHealth::Failing
        );
        assert_eq!(
            health(&waiting(counts(99, 100, &[]), 1)),
            SubscriptionHealth::Attention
        );
        check(
            &waiting(counts(95, 100, &[(refused, 5)]), 5),
            SubscriptionHealth::Attention,
            &[
                "5 of 100 events given up; 5 of them not written to a dead-letter blob yet (HTTP 400 Bad Request)",
            ],
        );
        // The cause stays while the letters wait for longer than these minutes.
        let older = HealthNumbers {
            hour: counts(0, 1, &[(refused, 1)]),
            ..waiting(counts(0, 0, &[]), 1)
        };
        let text =
            "1 of 1 event given up; 1 of them not written to a dead-letter blob yet (HTTP 400 Bad Request)";
        check(&older, SubscriptionHealth::Failing, &[text]);
        let unwritable = HealthNumbers {
            letters_trouble: Some("no container \"dead\"".into()),
            ..older
        };
        let store = "1 dead letter cannot be written to the dead-letter destination: no container \"dead\"";
        check(&unwritable, SubscriptionHealth::Failing, &[store, text]);
        let todo = HealthVerdict::of(&unwritable).reasons[0].todo();
        assert!(todo.is_some_and(|todo| todo.contains("dead-letter destination writable")));
        let given_up = lately(counts(
            0,
            0,
            &[(
                cause(
                    FailureEffect::Dropped(GiveUpReason::DeadLetterUnavailable),
                    Outcome::BadRequest,
                    400,
                ),
                1,
            )],
        ));
        let todo = HealthVerdict::of(&given_up).reasons[0].todo();
        assert!(todo.is_some_and(|todo| todo.contains("dead-letter destination writable")));

        let busy = cause(LETTER, Outcome::Busy, 503);
        check(
            &waiting(counts(3, 9, &[(busy, 1)]), 2),
            SubscriptionHealth::Failing,
            &[
                "3 of 6 events given up; 2 of them not written to a dead-letter blob yet (all attempts used up, the last attempt: HTTP 503 Service Unavailable)",
            ],
        );
    }

    #[test]
    fn several_causes_are_named_by_their_share() {
        let dropped = |reason: GiveUpReason| FailureEffect::Dropped(reason);
        let numbers = lately(counts(
            0,
            60,
            &[
                (cause(dropped(GiveUpReason::TooManyHops), Outcome::Success, 0), 1),
                (
                    cause(dropped(GiveUpReason::ClientError), Outcome::NotFound, 404),
                    40,
                ),
                (refused(DROPPED), 20),
            ],
        ));
        check(
            &numbers,
            SubscriptionHealth::Failing,
            &[
                "61 of 61 events dropped in the last 5 minutes (40: HTTP 404 Not Found, no dead-letter destination; \
                 20: HTTP 400 Bad Request, no dead-letter destination; 1: other causes)",
            ],
        );
        let never_attempted = FailureCause {
            effect: dropped(GiveUpReason::TimeToLiveExceeded),
            outcome: None,
            status: None,
        };
        assert_eq!(
            describe(&never_attempted),
            "time to live exceeded, no dead-letter destination"
        );
        let unavailable = cause(dropped(GiveUpReason::DeadLetterUnavailable), Outcome::Busy, 503);
        assert_eq!(
            describe(&unavailable),
            "the dead-letter destination could not be written"
        );
    }

    // A node with only good numbers is not asked for details: the sum must not need attention then.
    #[test]
    fn a_sum_needs_attention_only_if_a_part_does() {
        let failed = cause(FailureEffect::AttemptFailed, Outcome::Busy, 503);
        let letter = cause(LETTER, Outcome::Busy, 503);
        let some = [0, 1, 2, 9, 10, 11, 100];
        let mut parts = Vec::new();
        for good in some {
            for bad in some {
                for (cause, attempts) in [(failed, good + bad), (letter, good), (refused(DROPPED), good)] {
                    parts.push(counts(good, attempts, &[(cause, bad)]));
                }
            }
        }
        let needs = |counts: &RecentCounts| {
            let verdict = HealthVerdict::of(&lately(counts.clone()));
            verdict.health.needs_attention()
        };
        for one in &parts {
            for other in &parts {
                let mut sum = one.clone();
                sum.add(other);
                assert!(!needs(&sum) || needs(one) || needs(other), "{one:?} {other:?}");
            }
        }
    }
}
