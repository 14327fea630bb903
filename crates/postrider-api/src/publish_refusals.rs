//! Refused publish requests: counted by reason, and logged in a way that publishers cannot fill the
//! log.
//!
//! A publisher with a wrong key or URL often shows nobody the answer that it gets, so the operator
//! has to find the reason here.

use crate::Server;
use crate::http::ApiCall;
use crate::login::shortened;
use hyper::Method;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;

/// A refusal of the same target for the same reason is logged again only after this time.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// Lines within that time, over all reasons and targets.
const LINES_MAX: usize = 50;
/// Targets that are tracked individually; the others of a reason are tracked together.
const TARGETS_MAX: usize = 256;
/// Stands for targets that are not tracked individually. No URL begins with a parenthesis.
const OTHERS: &str = "(others)";

/// Why a publish request was refused, as shown in `/metrics` and the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PublishRefusalReason {
    BadRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    Timeout,
    TooLarge,
    UnsupportedMediaType,
    TooManyRequests,
    Unavailable,
    Other,
}

impl PublishRefusalReason {
    pub const ALL: [PublishRefusalReason; 10] = [
        PublishRefusalReason::BadRequest,
        PublishRefusalReason::Unauthorized,
        PublishRefusalReason::Forbidden,
        PublishRefusalReason::NotFound,
        PublishRefusalReason::Timeout,
        PublishRefusalReason::TooLarge,
        PublishRefusalReason::UnsupportedMediaType,
        PublishRefusalReason::TooManyRequests,
        PublishRefusalReason::Unavailable,
        PublishRefusalReason::Other,
    ];

    fn of_status(status: u16) -> PublishRefusalReason {
        match status {
            400 => PublishRefusalReason::BadRequest,
            401 => PublishRefusalReason::Unauthorized,
            403 => PublishRefusalReason::Forbidden,
            404 => PublishRefusalReason::NotFound,
            408 => PublishRefusalReason::Timeout,
            413 => PublishRefusalReason::TooLarge,
            415 => PublishRefusalReason::UnsupportedMediaType,
            429 => PublishRefusalReason::TooManyRequests,
            500.. => PublishRefusalReason::Unavailable,
            _ => PublishRefusalReason::Other,
        }
    }

    /// Label in `/metrics`.
    pub fn name(self) -> &'static str {
        match self {
            PublishRefusalReason::BadRequest => "bad_request",
            PublishRefusalReason::Unauthorized => "unauthorized",
            PublishRefusalReason::Forbidden => "forbidden",
            PublishRefusalReason::NotFound => "not_found",
            PublishRefusalReason::Timeout => "timeout",
            PublishRefusalReason::TooLarge => "too_large",
            PublishRefusalReason::UnsupportedMediaType => "unsupported_media_type",
            PublishRefusalReason::TooManyRequests => "too_many_requests",
            PublishRefusalReason::Unavailable => "unavailable",
            PublishRefusalReason::Other => "other",
        }
    }
}

/// Counts of refused publish requests, and the state of their logging.
#[derive(Default)]
pub(crate) struct PublishRefusals {
    counts: [AtomicU64; PublishRefusalReason::ALL.len()],
    limiter: Mutex<RefusalLineLimiter>,
}

impl PublishRefusals {
    pub fn count(&self, reason: PublishRefusalReason) -> u64 {
        self.counts[reason as usize].load(Relaxed)
    }
}

/// Decides which refusals are logged.
#[derive(Debug, Default)]
struct RefusalLineLimiter {
    targets: BTreeMap<(PublishRefusalReason, String), LoggedTarget>,
    window: Option<Instant>,
    lines: usize,
}

#[derive(Debug)]
struct LoggedTarget {
    /// When the target was last logged, or first refused if it never was.
    at: Instant,
    unlogged: u64,
}

impl RefusalLineLimiter {
    /// How many refusals a line stands for; none if no line is written now.
    fn judge(&mut self, reason: PublishRefusalReason, target: &str, now: Instant) -> Option<u64> {
        let is_over = |begun: Instant| now.duration_since(begun) >= LOG_EVERY;
        if self.window.is_none_or(is_over) {
            (self.window, self.lines) = (Some(now), 0);
        }
        let mut key = (reason, target.to_owned());
        if !self.targets.contains_key(&key) && self.targets.len() >= TARGETS_MAX {
            self.forget(is_over);
            if self.targets.len() >= TARGETS_MAX {
                key.1 = OTHERS.to_owned();
            }
        }
        // Lines for targets that are tracked together are always allowed, so that the count of
        // unlogged refusals reaches the log.
        let room = self.lines < LINES_MAX || key.1 == OTHERS;
        let line = match self.targets.get_mut(&key) {
            Some(known) if !room || !is_over(known.at) => {
                known.unlogged += 1;
                None
            }
            Some(known) => {
                known.at = now;
                Some(std::mem::take(&mut known.unlogged) + 1)
            }
            None => {
                let unlogged = u64::from(!room);
                self.targets.insert(key, LoggedTarget { at: now, unlogged });
                room.then_some(1)
            }
        };
        self.lines += usize::from(line.is_some());
        line
    }

    /// Drops targets that have been quiet. Their unlogged refusals are added up by reason.
    fn forget(&mut self, is_over: impl Fn(Instant) -> bool) {
        let (gone, kept) = std::mem::take(&mut self.targets)
            .into_iter()
            .partition(|(key, known)| key.1 != OTHERS && is_over(known.at));
        self.targets = kept;
        let gone: BTreeMap<_, LoggedTarget> = gone;
        for ((reason, _), known) in gone.into_iter().filter(|(_, known)| known.unlogged > 0) {
            let others = self.targets.entry((reason, OTHERS.to_owned()));
            let others = others.or_insert(LoggedTarget {
                at: known.at,
                unlogged: 0,
            });
            others.unlogged += known.unlogged;
        }
    }
}

impl Server {
    /// Counts a publish request that is refused with this status, and logs it. Requests that
    /// publish nothing, such as a GET of a topic's URL, are ignored.
    pub(crate) fn note_publish_refused(&self, call: &ApiCall, status: u16, why: &str) {
        if call.method != Method::POST {
            return;
        }
        let reason = PublishRefusalReason::of_status(status);
        let refusals = &self.publish_refusals;
        refusals.counts[reason as usize].fetch_add(1, Relaxed);
        // Without the query, which may hold a key.
        let target = shortened(&format!("{}{}", call.host(), call.uri.path()));
        let mut limiter = refusals.limiter.lock().expect("no panic holds it");
        let line = limiter.judge(reason, &target, Instant::now());
        drop(limiter);
        if let Some(times) = line {
            tracing::warn!(
                status, reason = reason.name(), %target, client = %call.peer, credential = credential(call), times,
                why = %why.chars().filter(|c| !c.is_control()).collect::<String>(),
                "publish refused"
            );
        }
    }
}

/// The kind of credential that came with a request.
fn credential(call: &ApiCall) -> &'static str {
    let names = ["aeg-sas-key", "aeg-sas-token", "authorization"];
    let sent = names.into_iter().find(|name| call.headers.contains_key(*name));
    match sent {
        Some(name) => name,
        None if call.query("aeg-sas-key").is_some() => "aeg-sas-key in the query",
        None => "none",
    }
}

#[cfg(test)]
mod tests {
    use super::PublishRefusalReason::{NotFound, Unauthorized};
    use super::*;

    #[test]
    fn reasons_are_in_the_order_of_counters_and_have_names_of_their_own() {
        let mut names: Vec<&str> = PublishRefusalReason::ALL.iter().map(|one| one.name()).collect();
        for (at, reason) in PublishRefusalReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, at);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PublishRefusalReason::ALL.len());
    }

    #[test]
    fn every_status_has_a_reason() {
        let check = |status: u16, expected: &str| {
            assert_eq!(
                PublishRefusalReason::of_status(status).name(),
                expected,
                "{status}"
            );
        };
        for (status, expected) in [
            (400, "bad_request"),
            (401, "unauthorized"),
            (403, "forbidden"),
            (404, "not_found"),
            (408, "timeout"),
            (413, "too_large"),
            (415, "unsupported_media_type"),
            (429, "too_many_requests"),
            (500, "unavailable"),
            (503, "unavailable"),
            (409, "other"),
        ] {
            check(status, expected);
        }
    }

    #[test]
    fn a_target_has_a_line_for_each_reason_now_and_then() {
        let mut limiter = RefusalLineLimiter::default();
        let now = Instant::now();
        assert_eq!(limiter.judge(Unauthorized, "a", now), Some(1));
        assert_eq!(limiter.judge(Unauthorized, "a", now), None);
        assert_eq!(limiter.judge(NotFound, "a", now), Some(1));
        assert_eq!(limiter.judge(Unauthorized, "b", now), Some(1));
        assert_eq!(limiter.judge(Unauthorized, "a", now + LOG_EVERY / 2), None);
        assert_eq!(limiter.judge(Unauthorized, "a", now + LOG_EVERY), Some(3));
        assert_eq!(limiter.judge(Unauthorized, "a", now + LOG_EVERY * 2), Some(1));
    }

    #[test]
    fn strangers_with_ever_new_targets_fill_neither_the_log_nor_the_memory() {
        let mut limiter = RefusalLineLimiter::default();
        let now = Instant::now();
        let judged = |limiter: &mut RefusalLineLimiter, from: usize, now: Instant| {
            let targets = (from..from + 10_000).map(|number| format!("h/topics/{number}/api/events"));
            let lines: Vec<u64> = targets
                .filter_map(|target| limiter.judge(NotFound, &target, now))
                .collect();
            lines
        };
        assert_eq!(judged(&mut limiter, 0, now).len(), LINES_MAX + 1);
        assert!(limiter.targets.len() <= TARGETS_MAX + 1);
        // Targets that were tracked earlier do not keep later ones from being tracked individually.
        assert_eq!(limiter.judge(Unauthorized, "late", now + LOG_EVERY), Some(1));
        assert!(limiter.targets.contains_key(&(Unauthorized, "late".into())));
        // Refusals that were not logged are logged with the others of their reason.
        let lines = judged(&mut limiter, 10_000, now + LOG_EVERY);
        assert!(lines.iter().any(|times| *times > 5_000), "{lines:?}");
        assert!(lines.len() <= LINES_MAX + 1 && limiter.targets.len() <= TARGETS_MAX + 1);
    }
}
