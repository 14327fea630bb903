//! Log lines about failed attempts and dropped events, limited so that they never become a flood.

use super::recording::FinishedAttempt;
use super::{Dispatcher, SubscriptionDispatcher};
use crate::attempt::DeliveryPlan;
use crate::tasks::TaskKind;
use postrider_core::envelope::{EnvelopeField, EventEnvelope};
use postrider_core::ids::SubscriptionId;
use postrider_core::json::RawJson;
use postrider_core::outcome::Outcome;
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use postrider_store::{Claim, Settlement};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing::Level;

/// The window in which lines are counted.
const WINDOW: Duration = Duration::from_secs(10);
/// The most lines of one subscription per window; the rest is only counted.
const LINES_PER_SUBSCRIPTION_MAX: u32 = 5;
/// The most lines of all subscriptions per window.
const LINES_MAX: usize = 50;
/// The most subscriptions that are counted separately; the rest is counted as one.
const SUBSCRIPTIONS_MAX: usize = 1024;
/// The subscriptions with the most suppressed lines that get a summary line of their own.
const COUNTED_LINES_MAX: usize = 10;
/// The most events that a line names.
const IDS_MAX: usize = 5;
/// Ids are chosen by publishers and may be long.
const ID_CHARS_MAX: usize = 64;

/// The limits for failed attempts and for drops. Separate: many of one kind must not hide the
/// other.
#[derive(Default)]
pub(super) struct FailureLogLimits {
    failed: Mutex<LogLineLimiter>,
    dropped: Mutex<LogLineLimiter>,
}

#[derive(Clone, Copy)]
enum LogLineSubject {
    Failed,
    Dropped,
}

impl FailureLogLimits {
    fn limiter(&self, about: LogLineSubject) -> &Mutex<LogLineLimiter> {
        match about {
            LogLineSubject::Failed => &self.failed,
            LogLineSubject::Dropped => &self.dropped,
        }
    }
}

/// Passes the first lines of a window and counts the others.
#[derive(Debug, Default)]
struct LogLineLimiter {
    window: Option<LogLineWindow>,
}

#[derive(Debug)]
struct LogLineWindow {
    begun: Timestamp,
    said: usize,
    /// Suppressed lines in all.
    left_out: u64,
    each: BTreeMap<SubscriptionId, SubscriptionLogLines>,
    /// Suppressed lines of subscriptions that are not counted separately.
    others: u64,
}

#[derive(Debug, Default)]
struct SubscriptionLogLines {
    said: u32,
    left_out: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct LogLineVerdict {
    say: bool,
    /// Lines that an earlier window suppressed and that are not reported yet.
    untold: SuppressedLogLines,
    /// Set for the first suppressed line of a window: when to report the suppressed ones.
    tell_at: Option<Timestamp>,
}

/// The numbers of suppressed lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct SuppressedLogLines {
    /// The subscriptions with the most suppressed lines come first.
    each: Vec<(SubscriptionId, u64)>,
    others: u64,
}

impl LogLineLimiter {
    /// Decides whether a line that stands for `count` things is written.
    fn judge(&mut self, of: SubscriptionId, count: u64, now: Timestamp) -> LogLineVerdict {
        // A clock that was set back begins a new window.
        let over = |window: &LogLineWindow| now < window.begun || now >= window.begun + WINDOW;
        let untold = match &self.window {
            Some(window) if over(window) => self.close(),
            _ => SuppressedLogLines::default(),
        };
        let window = self.window.get_or_insert_with(|| LogLineWindow {
            begun: now,
            said: 0,
            left_out: 0,
            each: BTreeMap::new(),
            others: 0,
        });
        let first = window.left_out == 0;
        let room = window.each.len() < SUBSCRIPTIONS_MAX || window.each.contains_key(&of);
        let line = room.then(|| window.each.entry(of).or_default());
        let said = line.as_ref().map_or(0, |line| line.said);
        let say = window.said < LINES_MAX && said < LINES_PER_SUBSCRIPTION_MAX;
        if !say {
            window.left_out += count;
        }
        match (say, line) {
            (true, line) => {
                window.said += 1;
                if let Some(line) = line {
                    line.said += 1;
                }
            }
            (false, Some(line)) => line.left_out += count,
            (false, None) => window.others += count,
        }
        LogLineVerdict {
            say,
            untold,
            tell_at: (!say && first).then_some(window.begun + WINDOW),
        }
    }

    /// Ends the window and returns the numbers of its suppressed lines.
    fn close(&mut self) -> SuppressedLogLines {
        let Some(window) = self.window.take() else {
            return SuppressedLogLines::default();
        };
        let each = window.each.into_iter().map(|(of, line)| (of, line.left_out));
        let mut each: Vec<_> = each.filter(|(_, left_out)| *left_out > 0).collect();
        each.sort_by_key(|(_, left_out)| std::cmp::Reverse(*left_out));
        let rest = each.split_off(each.len().min(COUNTED_LINES_MAX));
        let rest: u64 = rest.iter().map(|(_, left_out)| left_out).sum();
        SuppressedLogLines {
            each,
            others: window.others + rest,
        }
    }
}

impl Dispatcher {
    /// Logs failed attempts and dropped events. `sent` is the attempt that some of these were part
    /// of.
    pub(super) fn report(
        self: &Arc<Self>,
        outlet: &SubscriptionDispatcher,
        settled: &[Settlement],
        sent: Option<&FinishedAttempt<'_>>,
    ) {
        if !tracing::enabled!(Level::WARN) {
            return;
        }
        if let Some(sent) = sent.filter(|sent| sent.attempted.outcome != Outcome::Success) {
            self.report_failed(outlet, &settled[sent.from..], sent);
        }
        let reason = |one: &Settlement| match one.next {
            NextStep::Drop(reason) => Some(reason),
            _ => None,
        };
        for alike in settled.chunk_by(|a, b| reason(a) == reason(b)) {
            if let Some(reason) = alike.first().and_then(reason) {
                self.report_dropped(outlet, alike, reason);
            }
        }
    }

    fn report_failed(
        self: &Arc<Self>,
        outlet: &SubscriptionDispatcher,
        settled: &[Settlement],
        sent: &FinishedAttempt<'_>,
    ) {
        let plan = sent.plan;
        let say = self.judged(LogLineSubject::Failed, outlet.id, 1);
        // Suppressed lines are still written at debug level.
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    topic = %plan.topic.topic.name,
                    subscription = %plan.subscription.name,
                    endpoint = %plan.endpoint.name,
                    events = settled.len(),
                    ids = ids(Some(plan), settled),
                    attempt = settled.iter().map(|one| one.attempts_made).max().unwrap_or(0),
                    outcome = %sent.attempted.outcome,
                    status = sent.attempted.status,
                    detail = sent.heard.failure(),
                    next = next_of(settled),
                    "attempt failed"
                )
            };
        }
        match say {
            true => line!(warn),
            false => line!(debug),
        }
    }

    /// Logs that a request was too large as a whole.
    pub(super) fn report_split(
        self: &Arc<Self>,
        outlet: &SubscriptionDispatcher,
        events: usize,
        sent: &FinishedAttempt<'_>,
    ) {
        if !tracing::enabled!(Level::WARN) {
            return;
        }
        let plan = sent.plan;
        let say = self.judged(LogLineSubject::Failed, outlet.id, 1);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    topic = %plan.topic.topic.name,
                    subscription = %plan.subscription.name,
                    endpoint = %plan.endpoint.name,
                    events,
                    outcome = %sent.attempted.outcome,
                    status = sent.attempted.status,
                    next = "the same attempt in two halves",
                    "batch refused"
                )
            };
        }
        match say {
            true => line!(warn),
            false => line!(debug),
        }
    }

    fn report_dropped(
        self: &Arc<Self>,
        outlet: &SubscriptionDispatcher,
        settled: &[Settlement],
        reason: GiveUpReason,
    ) {
        let plan = outlet.plan();
        let plan = plan.as_deref();
        let say = self.judged(LogLineSubject::Dropped, outlet.id, settled.len() as u64);
        let (topic, subscription) = names(plan, outlet.id);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    topic,
                    subscription,
                    events = settled.len(),
                    ids = ids(plan, settled),
                    attempts = settled.iter().map(|one| one.attempts_made).max().unwrap_or(0),
                    %reason,
                    "events dropped"
                )
            };
        }
        match say {
            true => line!(warn),
            false => line!(debug),
        }
    }

    /// Decides whether a line is written; a suppressed line is reported later, in a count. Uses the
    /// machine's clock, which readers of the log live by.
    fn judged(self: &Arc<Self>, about: LogLineSubject, of: SubscriptionId, count: u64) -> bool {
        let now = self.wall.now();
        let limiter = self.reports.limiter(about);
        let verdict = limiter.lock().expect("no panic holds it").judge(of, count, now);
        self.tell(about, &verdict.untold);
        if let Some(at) = verdict.tell_at {
            let dispatcher = self.clone();
            self.tasks.spawn(TaskKind::FailureReport, async move {
                tokio::select! {
                    biased;
                    () = dispatcher.stop.cancelled() => {}
                    () = dispatcher.wall.sleep_until(at) => {}
                }
                let limiter = dispatcher.reports.limiter(about);
                let left_out = limiter.lock().expect("no panic holds it").close();
                dispatcher.tell(about, &left_out);
            });
        }
        verdict.say
    }

    fn tell(&self, about: LogLineSubject, left_out: &SuppressedLogLines) {
        for (of, count) in &left_out.each {
            let plan = self.outlet(*of).and_then(|outlet| outlet.plan());
            let (topic, subscription) = names(plan.as_deref(), *of);
            match about {
                LogLineSubject::Failed => {
                    tracing::warn!(topic, subscription, count, "more attempts failed like it")
                }
                LogLineSubject::Dropped => {
                    tracing::warn!(topic, subscription, count, "more events dropped like it")
                }
            }
        }
        let count = left_out.others;
        if count > 0 {
            match about {
                LogLineSubject::Failed => {
                    tracing::warn!(count, "more attempts failed, of other subscriptions")
                }
                LogLineSubject::Dropped => {
                    tracing::warn!(count, "more events dropped, of other subscriptions")
                }
            }
        }
    }
}

fn names(plan: Option<&DeliveryPlan>, of: SubscriptionId) -> (Option<&str>, String) {
    match plan {
        Some(plan) => (
            Some(plan.topic.topic.name.as_str()),
            plan.subscription.name.clone(),
        ),
        // The subscription is deleted, and its name with it.
        None => (None, of.to_string()),
    }
}

/// The publisher's ids of the first events, or their positions where they have none.
fn ids(plan: Option<&DeliveryPlan>, settled: &[Settlement]) -> String {
    let named = settled.iter().take(IDS_MAX);
    let mut ids: Vec<String> = named.map(|one| id_of(plan, &one.claim)).collect();
    if settled.len() > IDS_MAX {
        ids.push("…".to_owned());
    }
    ids.join(", ")
}

fn id_of(plan: Option<&DeliveryPlan>, claim: &Claim) -> String {
    let mapping = plan.and_then(|plan| plan.topic.topic.mapping.as_ref());
    let envelope = EventEnvelope::read(
        claim.entry.batch.schema,
        RawJson::trusted(claim.object()),
        mapping,
    );
    match envelope.id_field().and_then(EnvelopeField::scalar_text) {
        Some(id) => shortened(&id),
        None => format!("at position {}", claim.position()),
    }
}

fn shortened(id: &str) -> String {
    match id.char_indices().nth(ID_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &id[..at]),
        None => id.to_owned(),
    }
}

/// The consequences of an attempt in words: events of one request may differ.
fn next_of(settled: &[Settlement]) -> String {
    let mut retries = 0;
    let mut soonest = None::<Timestamp>;
    let mut done = 0;
    let mut ends: BTreeMap<(bool, GiveUpReason), usize> = BTreeMap::new();
    for one in settled {
        match one.next {
            NextStep::Done => done += 1,
            NextStep::RetryAt(at) => {
                retries += 1;
                soonest = Some(soonest.map_or(at, |soonest| soonest.min(at)));
            }
            NextStep::DeadLetter(reason) => *ends.entry((true, reason)).or_default() += 1,
            NextStep::Drop(reason) => *ends.entry((false, reason)).or_default() += 1,
        }
    }
    let of = |count: usize| match count == settled.len() {
        true => String::new(),
        false => format!("{count} "),
    };
    let mut parts = Vec::new();
    if let Some(at) = soonest {
        let first = if retries > 1 { "from " } else { "" };
        parts.push(format!("{}retry {first}{at}", of(retries)));
    }
    for ((dead_letter, reason), count) in ends {
        let end = if dead_letter { "dead letter" } else { "dropped" };
        parts.push(format!("{}{end} ({reason})", of(count)));
    }
    if done > 0 {
        parts.push(format!("{}delivered by an earlier attempt", of(done)));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use postrider_core::event::{ByteSpan, EventRef, EventSchema, PublishedBatch};
    use postrider_core::ids::{Position, TopicId};
    use postrider_store::LogEntry;

    fn id(number: u64) -> SubscriptionId {
        SubscriptionId(number)
    }

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_nanos((1_900_000_000_000 + millis) * 1_000_000)
    }

    fn said(limiter: &mut LogLineLimiter, of: u64, now: Timestamp) -> bool {
        limiter.judge(id(of), 1, now).say
    }

    #[test]
    fn one_subscription_gets_a_few_lines_and_then_a_number() {
        let mut limiter = LogLineLimiter::default();
        for _ in 0..LINES_PER_SUBSCRIPTION_MAX {
            assert!(said(&mut limiter, 1, at(0)));
        }
        let first = limiter.judge(id(1), 1, at(1));
        assert_eq!((first.say, first.tell_at), (false, Some(at(10_000))));
        // Only the first suppressed line schedules a report.
        let second = limiter.judge(id(1), 3, at(2));
        assert_eq!((second.say, second.tell_at), (false, None));
        // Another subscription has lines of its own.
        assert!(said(&mut limiter, 2, at(3)));
        let expected = SuppressedLogLines {
            each: vec![(id(1), 4)],
            others: 0,
        };
        assert_eq!(limiter.close(), expected);
        // A closed window is not reported again, and new lines are written.
        assert_eq!(limiter.close(), SuppressedLogLines::default());
        assert!(said(&mut limiter, 1, at(4)));
    }

    #[test]
    fn a_new_window_tells_what_the_last_one_left_out() {
        let mut limiter = LogLineLimiter::default();
        for _ in 0..LINES_PER_SUBSCRIPTION_MAX + 2 {
            limiter.judge(id(1), 1, at(0));
        }
        assert!(!said(&mut limiter, 1, at(9_999)));
        let next = limiter.judge(id(1), 1, at(10_000));
        assert!(next.say);
        assert_eq!(next.untold.each, [(id(1), 3)]);
        // A clock that was set back begins a new window, instead of silence until it has caught up.
        for _ in 0..LINES_PER_SUBSCRIPTION_MAX {
            limiter.judge(id(1), 1, at(10_000));
        }
        let back = limiter.judge(id(1), 1, at(5_000));
        assert!(back.say);
        assert_eq!(back.untold.each, [(id(1), 1)]);
    }

    #[test]
    fn all_together_are_bounded_too() {
        let mut limiter = LogLineLimiter::default();
        let many = SUBSCRIPTIONS_MAX as u64 + 100;
        let lines = (0..many).filter(|n| said(&mut limiter, *n, at(0))).count();
        assert_eq!(lines, LINES_MAX);
        assert_eq!(limiter.window.as_ref().unwrap().each.len(), SUBSCRIPTIONS_MAX);
        for _ in 0..7 {
            limiter.judge(id(999), 1, at(0));
        }
        let left_out = limiter.close();
        assert_eq!(left_out.each.len(), COUNTED_LINES_MAX);
        assert_eq!(
            left_out.each[0],
            (id(999), 8),
            "the one with the most comes first"
        );
        let counted: u64 = left_out.each.iter().map(|(_, count)| count).sum();
        // Every line is counted.
        assert_eq!(counted + left_out.others, many - LINES_MAX as u64 + 7);
    }

    fn settled(next: NextStep) -> Settlement {
        let batch = PublishedBatch {
            topic: TopicId(1),
            schema: EventSchema::EventGrid,
            received: at(0),
            publisher: "key1".into(),
            trace: None,
            replay: 0,
            hops: 0,
            body: Bytes::from_static(b"{}"),
            events: vec![EventRef {
                object: ByteSpan::new(0, 2),
                ..EventRef::default()
            }],
            matched: vec![Box::new([id(1)])],
        };
        Settlement {
            claim: Claim {
                entry: Arc::new(LogEntry {
                    batch,
                    first: Position(7),
                    place: 0,
                }),
                index: 0,
                attempts_made: 0,
                last_attempt: None,
                due: None,
            },
            at: at(0),
            attempts_made: 1,
            last_attempt: None,
            next,
        }
    }

    #[test]
    fn what_follows_is_said_in_words() {
        let check = |nexts: &[NextStep], expected: &str| {
            let settled: Vec<_> = nexts.iter().map(|next| settled(*next)).collect();
            assert_eq!(next_of(&settled), expected);
        };
        let (soon, later) = (NextStep::RetryAt(at(1_000)), NextStep::RetryAt(at(2_000)));
        check(&[soon], &format!("retry {}", at(1_000)));
        check(&[later, soon], &format!("retry from {}", at(1_000)));
        let reason = GiveUpReason::AttemptsExhausted;
        check(
            &[NextStep::DeadLetter(reason)],
            &format!("dead letter ({reason})"),
        );
        check(
            &[
                soon,
                NextStep::Drop(reason),
                NextStep::Drop(reason),
                NextStep::Done,
            ],
            &format!(
                "1 retry {}; 2 dropped ({reason}); 1 delivered by an earlier attempt",
                at(1_000)
            ),
        );
    }

    #[test]
    fn a_line_names_only_some_events_and_no_long_names() {
        let many: Vec<_> = (0..IDS_MAX + 1).map(|_| settled(NextStep::Done)).collect();
        let named = ids(None, &many);
        assert_eq!(named.matches("at position 7").count(), IDS_MAX);
        assert!(named.ends_with(", …"), "{named}");
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"é".repeat(100)).chars().count(), ID_CHARS_MAX + 1);
    }
}
