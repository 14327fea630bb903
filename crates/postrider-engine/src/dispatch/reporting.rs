//! What is logged of attempts that failed and of events that were dropped: a line for each, but never a flood.

use super::noting::Sent;
use super::{Dispatcher, Outlet};
use crate::attempt::Plan;
use crate::tasks::TaskKind;
use postrider_core::envelope::{Envelope, Field};
use postrider_core::ids::SubscriptionId;
use postrider_core::json::Raw;
use postrider_core::outcome::Outcome;
use postrider_core::retry::{Next, Reason};
use postrider_core::time::Timestamp;
use postrider_store::{Claim, Settled};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing::Level;

/// So long lines are counted together.
const WINDOW: Duration = Duration::from_secs(10);
/// Lines of one subscription within it; beyond them it is only said how many there were.
const LINES_PER_SUBSCRIPTION_MAX: u32 = 5;
/// Lines of all subscriptions together.
const LINES_MAX: usize = 50;
/// Subscriptions that are told apart; the rest is counted as one.
const SUBSCRIPTIONS_MAX: usize = 1024;
/// Those with the most left out that get a line of their own about it.
const COUNTED_LINES_MAX: usize = 10;
/// Events that a line names.
const IDS_MAX: usize = 5;
/// An id is whatever the publisher took for one.
const ID_CHARS_MAX: usize = 64;

/// Which lines are written, of attempts and of drops apart: many of the one must not hide the other.
#[derive(Default)]
pub(super) struct Reports {
    failed: Mutex<Limiter>,
    dropped: Mutex<Limiter>,
}

#[derive(Clone, Copy)]
enum About {
    Failed,
    Dropped,
}

impl Reports {
    fn limiter(&self, about: About) -> &Mutex<Limiter> {
        match about {
            About::Failed => &self.failed,
            About::Dropped => &self.dropped,
        }
    }
}

/// Lets the first lines of a window through and counts the others.
#[derive(Debug, Default)]
struct Limiter {
    window: Option<Window>,
}

#[derive(Debug)]
struct Window {
    begun: Timestamp,
    said: usize,
    /// In all.
    left_out: u64,
    each: BTreeMap<SubscriptionId, Line>,
    /// Of subscriptions that are not told apart.
    others: u64,
}

#[derive(Debug, Default)]
struct Line {
    said: u32,
    left_out: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    say: bool,
    /// What an earlier window left out and nobody has told yet.
    untold: LeftOut,
    /// Something of this window was left out for the first time: it is to be told then.
    tell_at: Option<Timestamp>,
}

/// What was left out of the log.
#[derive(Debug, Default, PartialEq, Eq)]
struct LeftOut {
    /// Those with the most first.
    each: Vec<(SubscriptionId, u64)>,
    others: u64,
}

impl Limiter {
    /// Whether a line that stands for `count` things is written.
    fn judge(&mut self, of: SubscriptionId, count: u64, now: Timestamp) -> Verdict {
        // The clock may have been set back.
        let over = |window: &Window| now < window.begun || now >= window.begun + WINDOW;
        let untold = match &self.window {
            Some(window) if over(window) => self.close(),
            _ => LeftOut::default(),
        };
        let window = self.window.get_or_insert_with(|| Window {
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
        Verdict {
            say,
            untold,
            tell_at: (!say && first).then_some(window.begun + WINDOW),
        }
    }

    /// Ends the window and says what it left out.
    fn close(&mut self) -> LeftOut {
        let Some(window) = self.window.take() else {
            return LeftOut::default();
        };
        let each = window.each.into_iter().map(|(of, line)| (of, line.left_out));
        let mut each: Vec<_> = each.filter(|(_, left_out)| *left_out > 0).collect();
        each.sort_by_key(|(_, left_out)| std::cmp::Reverse(*left_out));
        let rest = each.split_off(each.len().min(COUNTED_LINES_MAX));
        let rest: u64 = rest.iter().map(|(_, left_out)| left_out).sum();
        LeftOut {
            each,
            others: window.others + rest,
        }
    }
}

impl Dispatcher {
    /// Says what failed, and what was dropped. `sent` is the attempt that some of these were part of.
    pub(super) fn report(self: &Arc<Self>, outlet: &Outlet, settled: &[Settled], sent: Option<&Sent<'_>>) {
        if !tracing::enabled!(Level::WARN) {
            return;
        }
        if let Some(sent) = sent.filter(|sent| sent.attempted.outcome != Outcome::Success) {
            self.report_failed(outlet, &settled[sent.from..], sent);
        }
        let reason = |one: &Settled| match one.next {
            Next::Drop(reason) => Some(reason),
            _ => None,
        };
        for alike in settled.chunk_by(|a, b| reason(a) == reason(b)) {
            if let Some(reason) = alike.first().and_then(reason) {
                self.report_dropped(outlet, alike, reason);
            }
        }
    }

    fn report_failed(self: &Arc<Self>, outlet: &Outlet, settled: &[Settled], sent: &Sent<'_>) {
        let plan = sent.plan;
        let say = self.judged(About::Failed, outlet.id, 1);
        // Whoever wants to see everything asks for more than warnings.
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

    /// Says that a request was too large as a whole.
    pub(super) fn report_split(self: &Arc<Self>, outlet: &Outlet, events: usize, sent: &Sent<'_>) {
        if !tracing::enabled!(Level::WARN) {
            return;
        }
        let plan = sent.plan;
        let say = self.judged(About::Failed, outlet.id, 1);
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

    fn report_dropped(self: &Arc<Self>, outlet: &Outlet, settled: &[Settled], reason: Reason) {
        let plan = outlet.plan();
        let plan = plan.as_deref();
        let say = self.judged(About::Dropped, outlet.id, settled.len() as u64);
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

    /// Whether a line is written. One that is not is told of later, in a number. By the machine's clock: readers of
    /// the log live by it.
    fn judged(self: &Arc<Self>, about: About, of: SubscriptionId, count: u64) -> bool {
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

    fn tell(&self, about: About, left_out: &LeftOut) {
        for (of, count) in &left_out.each {
            let plan = self.outlet(*of).and_then(|outlet| outlet.plan());
            let (topic, subscription) = names(plan.as_deref(), *of);
            match about {
                About::Failed => tracing::warn!(topic, subscription, count, "more attempts failed like it"),
                About::Dropped => tracing::warn!(topic, subscription, count, "more events dropped like it"),
            }
        }
        let count = left_out.others;
        if count > 0 {
            match about {
                About::Failed => tracing::warn!(count, "more attempts failed, of other subscriptions"),
                About::Dropped => tracing::warn!(count, "more events dropped, of other subscriptions"),
            }
        }
    }
}

fn names(plan: Option<&Plan>, of: SubscriptionId) -> (Option<&str>, String) {
    match plan {
        Some(plan) => (
            Some(plan.topic.topic.name.as_str()),
            plan.subscription.name.clone(),
        ),
        // It is gone; nobody remembers its name.
        None => (None, of.to_string()),
    }
}

/// The publisher's names of the first events, or their positions where they have none.
fn ids(plan: Option<&Plan>, settled: &[Settled]) -> String {
    let named = settled.iter().take(IDS_MAX);
    let mut ids: Vec<String> = named.map(|one| id_of(plan, &one.claim)).collect();
    if settled.len() > IDS_MAX {
        ids.push("…".to_owned());
    }
    ids.join(", ")
}

fn id_of(plan: Option<&Plan>, claim: &Claim) -> String {
    let mapping = plan.and_then(|plan| plan.topic.topic.mapping.as_ref());
    let envelope = Envelope::read(claim.entry.batch.schema, Raw::trusted(claim.object()), mapping);
    match envelope.id_field().and_then(Field::scalar_text) {
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

/// What follows an attempt, in words: events of one request may go different ways.
fn next_of(settled: &[Settled]) -> String {
    let mut retries = 0;
    let mut soonest = None::<Timestamp>;
    let mut done = 0;
    let mut ends: BTreeMap<(bool, Reason), usize> = BTreeMap::new();
    for one in settled {
        match one.next {
            Next::Done => done += 1,
            Next::RetryAt(at) => {
                retries += 1;
                soonest = Some(soonest.map_or(at, |soonest| soonest.min(at)));
            }
            Next::DeadLetter(reason) => *ends.entry((true, reason)).or_default() += 1,
            Next::Drop(reason) => *ends.entry((false, reason)).or_default() += 1,
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
    use postrider_core::event::{Batch, EventRef, Schema, Span};
    use postrider_core::ids::{Position, TopicId};
    use postrider_store::Entry;

    fn id(number: u64) -> SubscriptionId {
        SubscriptionId(number)
    }

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_nanos((1_900_000_000_000 + millis) * 1_000_000)
    }

    fn said(limiter: &mut Limiter, of: u64, now: Timestamp) -> bool {
        limiter.judge(id(of), 1, now).say
    }

    #[test]
    fn one_subscription_gets_a_few_lines_and_then_a_number() {
        let mut limiter = Limiter::default();
        for _ in 0..LINES_PER_SUBSCRIPTION_MAX {
            assert!(said(&mut limiter, 1, at(0)));
        }
        let first = limiter.judge(id(1), 1, at(1));
        assert_eq!((first.say, first.tell_at), (false, Some(at(10_000))));
        // Only once: one teller is enough.
        let second = limiter.judge(id(1), 3, at(2));
        assert_eq!((second.say, second.tell_at), (false, None));
        // Another one has lines of its own.
        assert!(said(&mut limiter, 2, at(3)));
        let expected = LeftOut {
            each: vec![(id(1), 4)],
            others: 0,
        };
        assert_eq!(limiter.close(), expected);
        // What was told is not told again, and lines are written again.
        assert_eq!(limiter.close(), LeftOut::default());
        assert!(said(&mut limiter, 1, at(4)));
    }

    #[test]
    fn a_new_window_tells_what_the_last_one_left_out() {
        let mut limiter = Limiter::default();
        for _ in 0..LINES_PER_SUBSCRIPTION_MAX + 2 {
            limiter.judge(id(1), 1, at(0));
        }
        assert!(!said(&mut limiter, 1, at(9_999)));
        let next = limiter.judge(id(1), 1, at(10_000));
        assert!(next.say);
        assert_eq!(next.untold.each, [(id(1), 3)]);
        // A clock that was set back begins anew rather than being silent until it has caught up.
        for _ in 0..LINES_PER_SUBSCRIPTION_MAX {
            limiter.judge(id(1), 1, at(10_000));
        }
        let back = limiter.judge(id(1), 1, at(5_000));
        assert!(back.say);
        assert_eq!(back.untold.each, [(id(1), 1)]);
    }

    #[test]
    fn all_together_are_bounded_too() {
        let mut limiter = Limiter::default();
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
        // Nothing is left uncounted.
        assert_eq!(counted + left_out.others, many - LINES_MAX as u64 + 7);
    }

    fn settled(next: Next) -> Settled {
        let batch = Batch {
            topic: TopicId(1),
            schema: Schema::EventGrid,
            received: at(0),
            publisher: "key1".into(),
            trace: None,
            replay: 0,
            hops: 0,
            body: Bytes::from_static(b"{}"),
            events: vec![EventRef {
                object: Span::new(0, 2),
                ..EventRef::default()
            }],
            matched: vec![Box::new([id(1)])],
        };
        Settled {
            claim: Claim {
                entry: Arc::new(Entry {
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
        let check = |nexts: &[Next], expected: &str| {
            let settled: Vec<_> = nexts.iter().map(|next| settled(*next)).collect();
            assert_eq!(next_of(&settled), expected);
        };
        let (soon, later) = (Next::RetryAt(at(1_000)), Next::RetryAt(at(2_000)));
        check(&[soon], &format!("retry {}", at(1_000)));
        check(&[later, soon], &format!("retry from {}", at(1_000)));
        let reason = Reason::AttemptsExhausted;
        check(&[Next::DeadLetter(reason)], &format!("dead letter ({reason})"));
        check(
            &[soon, Next::Drop(reason), Next::Drop(reason), Next::Done],
            &format!(
                "1 retry {}; 2 dropped ({reason}); 1 delivered by an earlier attempt",
                at(1_000)
            ),
        );
    }

    #[test]
    fn a_line_names_only_some_events_and_no_long_names() {
        let many: Vec<_> = (0..IDS_MAX + 1).map(|_| settled(Next::Done)).collect();
        let named = ids(None, &many);
        assert_eq!(named.matches("at position 7").count(), IDS_MAX);
        assert!(named.ends_with(", …"), "{named}");
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"é".repeat(100)).chars().count(), ID_CHARS_MAX + 1);
    }
}
