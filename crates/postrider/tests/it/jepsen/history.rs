//! The history of a run as seen from outside, and the check whether it is valid.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

/// An event of one publish request. A publisher that was refused sends the event again as another
/// try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SentEvent {
    pub event: u64,
    pub tries: u32,
}

/// A publish request and its result. Times are since the run's start.
#[derive(Clone, Debug)]
pub struct PublishRecord {
    pub sendings: Vec<(SentEvent, SentKind)>,
    pub node: usize,
    pub began: Duration,
    pub ended: Duration,
    pub answer: String,
    pub acknowledged: bool,
}

/// Kind of an event, which decides which subscriptions match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SentKind {
    Plain,
    /// The only kind that the filtered subscription matches.
    Chosen,
    /// Also matched by the subscription whose receiver always fails.
    Doomed,
}

impl SentKind {
    pub const ALL: [SentKind; 3] = [SentKind::Plain, SentKind::Chosen, SentKind::Doomed];

    pub fn name(self) -> &'static str {
        match self {
            SentKind::Plain => "plain",
            SentKind::Chosen => "chosen",
            SentKind::Doomed => "doomed",
        }
    }
}

/// A subscription of the run.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedSubscription {
    pub name: &'static str,
    /// `None`: every kind.
    pub only: Option<SentKind>,
    /// Whether its events are delivered in the end; otherwise they become dead letters.
    pub arrives: bool,
}

impl ExpectedSubscription {
    fn wants(&self, kind: SentKind) -> bool {
        self.only.is_none_or(|only| only == kind)
    }
}

/// An attempt as the receiver saw it.
#[derive(Clone, Debug)]
pub struct ObservedAttempt {
    pub subscription: String,
    pub sending: SentEvent,
    pub kind: String,
    /// Number of earlier attempts, from the request's header.
    pub count: u64,
    pub began: Duration,
    pub ended: Duration,
    pub took: bool,
    /// Whether the event is complete.
    pub whole: bool,
}

/// A period of the run with a fault.
#[derive(Clone, Debug)]
pub struct FaultPeriod {
    pub what: String,
    pub began: Duration,
    pub healed: Duration,
}

/// Effects of a fault, while it lasted and in its aftermath.
#[derive(Debug)]
pub struct FaultCost<'h> {
    pub trouble: &'h FaultPeriod,
    /// Longest time without an acknowledged request.
    pub unacknowledged: Duration,
    /// Longest delay of an attempt past its due time.
    pub late: Duration,
}

#[derive(Clone, Debug, Default)]
pub struct RunHistory {
    pub publishes: Vec<PublishRecord>,
    pub attempts: Vec<ObservedAttempt>,
    pub letters: Vec<(String, SentEvent)>,
    pub troubles: Vec<FaultPeriod>,
}

/// Permitted behaviour, and how long faults have effects.
#[derive(Clone, Copy, Debug)]
pub struct HistoryRules {
    /// Waits after failed attempts; the last repeats.
    pub waits: &'static [Duration],
    /// How long after its end a fault can still have effects.
    pub aftermath: Duration,
}

/// Precision of two processes' clocks and a timer.
const EARLY_MAX: Duration = Duration::from_millis(10);

impl HistoryRules {
    /// Wait before the attempt with this count.
    fn wait(&self, count: u64) -> Duration {
        let at = usize::try_from(count).unwrap_or(usize::MAX).min(self.waits.len());
        at.checked_sub(1).map_or(Duration::ZERO, |at| self.waits[at])
    }
}

/// Numbers of a valid run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryTally {
    pub requests: usize,
    pub acknowledged: usize,
    pub attempts: usize,
    pub retries: usize,
    /// Attempts of events that had already arrived.
    pub again: usize,
    /// Attempts that began during another one of the same delivery.
    pub overlapping: usize,
    /// Attempts whose count does not continue the previous one.
    pub recounted: usize,
    /// Attempts beyond one of each count: repeated after a partition was taken over.
    pub beyond: usize,
    pub letters: usize,
    pub letters_again: usize,
}

/// Most take-overs of a partition because of one fault: away and back. At each, an attempt whose
/// outcome could not be recorded is repeated, and a dead letter may be written again.
const TAKEOVERS_MAX: usize = 2;

impl RunHistory {
    /// Acknowledged events that a subscription has not got yet.
    pub fn missing(&self, wanted: &[ExpectedSubscription]) -> Vec<(&'static str, SentEvent)> {
        let took = self.attempts.iter().filter(|attempt| attempt.took);
        let took: BTreeSet<(&str, SentEvent)> = took
            .map(|attempt| (attempt.subscription.as_str(), attempt.sending))
            .chain(self.letters.iter().map(|(of, sending)| (of.as_str(), *sending)))
            .collect();
        let mut missing = Vec::new();
        for (sending, kind) in self.acknowledged() {
            let wanting = wanted.iter().filter(|one| one.wants(kind));
            let lacks = wanting.filter(|one| !took.contains(&(one.name, sending)));
            missing.extend(lacks.map(|one| (one.name, sending)));
        }
        missing
    }

    fn acknowledged(&self) -> impl Iterator<Item = (SentEvent, SentKind)> {
        let publishes = self.publishes.iter().filter(|one| one.acknowledged);
        publishes.flat_map(|one| one.sendings.iter().copied())
    }

    /// Checks all rules; returns the violations.
    pub fn audit(
        &self,
        wanted: &[ExpectedSubscription],
        rules: HistoryRules,
    ) -> Result<HistoryTally, Vec<String>> {
        let mut wrong = Vec::new();
        for (of, sending) in self.missing(wanted) {
            wrong.push(format!(
                "lost: {sending:?} never reached {of}\n{}",
                self.story(sending)
            ));
        }
        self.strangers(wanted, &mut wrong);
        let mut tally = HistoryTally {
            requests: self.publishes.len(),
            acknowledged: self.acknowledged().count(),
            attempts: self.attempts.len(),
            letters: self.letters.len(),
            ..HistoryTally::default()
        };
        let distinct: BTreeSet<_> = self.letters.iter().collect();
        tally.letters_again = self.letters.len() - distinct.len();
        for letter in distinct {
            let copies = self.letters.iter().filter(|other| *other == letter).count();
            if copies > 1 + TAKEOVERS_MAX * self.troubles.len() {
                wrong.push(format!("{copies} copies of a dead letter: {letter:?}"));
            }
        }
        for ((of, sending), attempts) in self.deliveries() {
            let mut say = |what: &str| {
                wrong.push(format!("{what}: {sending:?} at {of}\n{}", self.story(sending)));
            };
            self.course(&attempts, rules, &mut tally, &mut say);
        }
        if wrong.is_empty() { Ok(tally) } else { Err(wrong) }
    }

    /// Effects of each fault on publishers and on deliveries.
    pub fn costs(&self, rules: HistoryRules) -> Vec<FaultCost<'_>> {
        let mut acknowledged: Vec<&PublishRecord> =
            self.publishes.iter().filter(|one| one.acknowledged).collect();
        acknowledged.sort_by_key(|one| one.ended);
        let late = self.lateness(&acknowledged, rules);
        let costs = self.troubles.iter().enumerate().map(|(n, trouble)| {
            let next = self.troubles.get(n + 1).map_or(Duration::MAX, |next| next.began);
            let end = next.min(trouble.healed + rules.aftermath);
            let within = |at: Duration| (trouble.began..end).contains(&at);
            let gaps = acknowledged
                .windows(2)
                .filter(|pair| within(pair[0].ended) || within(pair[1].ended))
                .map(|pair| pair[1].ended - pair[0].ended);
            let late = late.iter().filter(|(at, _)| within(*at)).map(|(_, late)| *late);
            FaultCost {
                trouble,
                unacknowledged: gaps.max().unwrap_or_default(),
                late: late.max().unwrap_or_default(),
            }
        });
        costs.collect()
    }

    /// Start of each attempt, and its delay past the due time.
    fn lateness(&self, acknowledged: &[&PublishRecord], rules: HistoryRules) -> Vec<(Duration, Duration)> {
        let sendings = acknowledged
            .iter()
            .flat_map(|one| one.sendings.iter().map(|(sending, _)| (*sending, one.ended)));
        let acknowledged: BTreeMap<SentEvent, Duration> = sendings.collect();
        let mut late = Vec::new();
        for ((_, sending), attempts) in self.deliveries() {
            let mut ended: Option<(u64, Duration)> = None;
            for attempt in attempts {
                let due = match ended {
                    None if attempt.count == 0 => acknowledged.get(&sending).copied(),
                    Some((count, at)) if attempt.count == count + 1 => Some(at + rules.wait(attempt.count)),
                    _ => None,
                };
                late.extend(due.map(|due| (attempt.began, attempt.began.saturating_sub(due))));
                ended = Some((attempt.count, attempt.ended));
            }
        }
        late
    }

    /// Attempts by delivery, in the order in which they began.
    fn deliveries(&self) -> BTreeMap<(&str, SentEvent), Vec<&ObservedAttempt>> {
        let mut deliveries: BTreeMap<(&str, SentEvent), Vec<&ObservedAttempt>> = BTreeMap::new();
        for attempt in &self.attempts {
            let key = (attempt.subscription.as_str(), attempt.sending);
            deliveries.entry(key).or_default().push(attempt);
        }
        for attempts in deliveries.values_mut() {
            attempts.sort_by_key(|attempt| attempt.began);
        }
        deliveries
    }

    /// Reports events that arrived at the wrong subscription, or were never published.
    fn strangers(&self, wanted: &[ExpectedSubscription], wrong: &mut Vec<String>) {
        let published = self.publishes.iter().flat_map(|one| &one.sendings);
        let published: BTreeMap<SentEvent, SentKind> = published.copied().collect();
        for attempt in &self.attempts {
            let ObservedAttempt {
                subscription,
                sending,
                kind,
                ..
            } = attempt;
            let Some(known) = published.get(sending).filter(|known| known.name() == kind) else {
                wrong.push(format!("never published: {attempt:?}"));
                continue;
            };
            let Some(one) = wanted.iter().find(|one| one.name == subscription) else {
                continue;
            };
            if !one.wants(*known) {
                wrong.push(format!("does not match: {attempt:?}"));
            }
            if !attempt.whole {
                wrong.push(format!("damaged: {attempt:?}"));
            }
        }
        for (of, sending) in &self.letters {
            let one = wanted.iter().find(|one| one.name == of);
            if one.is_none_or(|one| one.arrives) || !published.contains_key(sending) {
                wrong.push(format!("should not be a dead letter: {sending:?} of {of}"));
            }
        }
    }

    /// Checks the attempts of one delivery in order.
    fn course(
        &self,
        attempts: &[&ObservedAttempt],
        rules: HistoryRules,
        tally: &mut HistoryTally,
        say: &mut impl FnMut(&str),
    ) {
        let mut arrived: Option<Duration> = None;
        // Earliest end of the attempts with this count.
        let mut ended: BTreeMap<u64, Duration> = BTreeMap::new();
        let mut last: Option<&ObservedAttempt> = None;
        let counts: BTreeSet<u64> = attempts.iter().map(|attempt| attempt.count).collect();
        let beyond = attempts.len() - counts.len();
        tally.beyond += beyond;
        if let [first, .., last] = attempts {
            let meets =
                |one: &&FaultPeriod| one.began <= last.began && one.healed + rules.aftermath >= first.began;
            let troubles = self.troubles.iter().filter(meets).count();
            if beyond > TAKEOVERS_MAX * troubles {
                say("more attempts than the policy and the faults allow");
            }
        }
        for attempt in attempts {
            tally.retries += usize::from(attempt.count > 0);
            if let Some(last) = last {
                let excused = self.troubled(last.began, attempt.began, rules.aftermath);
                if arrived.is_some_and(|arrived| arrived <= attempt.began) {
                    tally.again += 1;
                    if !excused {
                        say("delivered again though nothing was broken");
                    }
                }
                if attempt.began < last.ended {
                    tally.overlapping += 1;
                    if !excused {
                        say("two attempts at once though nothing was broken");
                    }
                }
                if attempt.count != last.count + 1 {
                    tally.recounted += 1;
                    if !excused {
                        say("a count that does not go on though nothing was broken");
                    }
                }
            }
            if attempt.count > 0 {
                let due = ended
                    .get(&(attempt.count - 1))
                    .map(|ended| *ended + rules.wait(attempt.count));
                match due {
                    None => {
                        // The previous attempt may never have reached the receiver, if its node was
                        // killed.
                        let start = self.published(attempt.sending).unwrap_or_default();
                        if !self.troubled(start, attempt.began, rules.aftermath) {
                            say("a count without an attempt before it");
                        }
                    }
                    Some(due) if attempt.began + EARLY_MAX < due => say("a retry before it was due"),
                    Some(_) => {}
                }
            }
            let end = ended.entry(attempt.count).or_insert(attempt.ended);
            *end = attempt.ended.min(*end);
            if attempt.took {
                arrived.get_or_insert(attempt.ended);
            }
            last = Some(attempt);
        }
    }

    fn published(&self, sending: SentEvent) -> Option<Duration> {
        let of = |one: &&PublishRecord| one.sendings.iter().any(|(known, _)| *known == sending);
        self.publishes.iter().find(of).map(|one| one.began)
    }

    /// Whether there was a fault in this period, or just before.
    fn troubled(&self, from: Duration, to: Duration, aftermath: Duration) -> bool {
        let meets = |one: &FaultPeriod| one.began <= to && one.healed + aftermath >= from;
        self.troubles.iter().any(meets)
    }

    /// Everything that is known about an event.
    fn story(&self, sending: SentEvent) -> String {
        let mut text = String::new();
        let of = |one: &&PublishRecord| one.sendings.iter().any(|(known, _)| known.event == sending.event);
        for one in self.publishes.iter().filter(of) {
            let tries = one.sendings.first().map_or(0, |(sending, _)| sending.tries);
            let _ = writeln!(
                text,
                "  published (try {tries}) to node {} from {:?} to {:?}: {}",
                one.node, one.began, one.ended, one.answer
            );
        }
        for attempt in self.attempts.iter().filter(|one| one.sending == sending) {
            let _ = writeln!(
                text,
                "  at {} with count {} from {:?} to {:?}, taken: {}",
                attempt.subscription, attempt.count, attempt.began, attempt.ended, attempt.took
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: [ExpectedSubscription; 3] = [
        ExpectedSubscription {
            name: "all",
            only: None,
            arrives: true,
        },
        ExpectedSubscription {
            name: "chosen",
            only: Some(SentKind::Chosen),
            arrives: true,
        },
        ExpectedSubscription {
            name: "doomed",
            only: Some(SentKind::Doomed),
            arrives: false,
        },
    ];
    const RULES: HistoryRules = HistoryRules {
        waits: &[Duration::from_secs(1), Duration::from_secs(2)],
        aftermath: Duration::from_secs(5),
    };

    fn sending(event: u64) -> SentEvent {
        SentEvent { event, tries: 1 }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn publish(event: u64, kind: SentKind, acknowledged: bool) -> PublishRecord {
        PublishRecord {
            sendings: vec![(sending(event), kind)],
            node: 0,
            began: at(10),
            ended: at(11),
            answer: String::new(),
            acknowledged,
        }
    }

    fn attempt(of: &str, event: u64, kind: SentKind, count: u64, began: u64, took: bool) -> ObservedAttempt {
        ObservedAttempt {
            subscription: of.into(),
            sending: sending(event),
            kind: kind.name().into(),
            count,
            began: at(began),
            ended: at(began) + Duration::from_millis(100),
            took,
            whole: true,
        }
    }

    /// A valid history with a retry, a filter, a dead letter, and an event that was never answered
    /// 200.
    fn good() -> RunHistory {
        RunHistory {
            publishes: vec![
                publish(1, SentKind::Plain, true),
                publish(2, SentKind::Chosen, true),
                publish(3, SentKind::Doomed, true),
                publish(4, SentKind::Plain, false),
            ],
            attempts: vec![
                attempt("all", 1, SentKind::Plain, 0, 20, false),
                attempt("all", 1, SentKind::Plain, 1, 22, true),
                attempt("all", 2, SentKind::Chosen, 0, 20, true),
                attempt("chosen", 2, SentKind::Chosen, 0, 20, true),
                attempt("all", 3, SentKind::Doomed, 0, 20, true),
                attempt("doomed", 3, SentKind::Doomed, 0, 20, false),
            ],
            letters: vec![("doomed".into(), sending(3))],
            troubles: Vec::new(),
        }
    }

    #[track_caller]
    fn check(change: impl FnOnce(&mut RunHistory), found: &str) {
        let mut history = good();
        change(&mut history);
        let wrong = history.audit(&WANTED, RULES).expect_err(found);
        assert!(
            wrong.len() == 1 && wrong[0].starts_with(found),
            "{found}: {wrong:?}"
        );
    }

    // An audit that finds nothing would let every run pass.
    #[test]
    fn the_audit_finds_what_is_wrong() {
        let tally = good().audit(&WANTED, RULES).unwrap();
        assert_eq!((tally.acknowledged, tally.retries, tally.again), (3, 1, 0));
        check(|h| h.attempts[1].took = false, "lost");
        check(|h| h.letters.clear(), "lost");
        check(|h| h.attempts[2].whole = false, "damaged");
        check(|h| drop(h.attempts.remove(3)), "lost");
        let stray = attempt("chosen", 1, SentKind::Plain, 0, 20, true);
        check(|h| h.attempts.push(stray), "does not match");
        let unknown = attempt("all", 9, SentKind::Plain, 0, 20, true);
        check(|h| h.attempts.push(unknown), "never published");
        check(
            |h| h.letters.push(("all".into(), sending(1))),
            "should not be a dead letter",
        );
        let early = Duration::from_millis(20_900);
        check(|h| h.attempts[1].began = early, "a retry before it was due");
    }

    #[test]
    fn attempts_beyond_the_policy_are_counted_and_bounded() {
        let mut history = good();
        history.troubles.push(FaultPeriod {
            what: "somebody was killed".into(),
            began: at(20),
            healed: at(40),
        });
        let more = (3..8).map(|n| attempt("all", 1, SentKind::Plain, 2, 22 + n, true));
        history.attempts.extend(more);
        let wrong = history.audit(&WANTED, RULES).expect_err("too many");
        assert!(
            wrong.iter().any(|one| one.starts_with("more attempts than")),
            "{wrong:?}"
        );
        history.attempts.truncate(history.attempts.len() - 2);
        let tally = history.audit(&WANTED, RULES).expect("two are allowed");
        assert_eq!(tally.beyond, 2);
        history
            .letters
            .extend([("doomed".into(), sending(3)), ("doomed".into(), sending(3))]);
        assert_eq!(
            history.audit(&WANTED, RULES).map(|tally| tally.letters_again),
            Ok(2)
        );
        history.letters.push(("doomed".into(), sending(3)));
        assert!(history.audit(&WANTED, RULES).is_err());
    }

    #[test]
    fn a_fault_costs_what_waits_longest() {
        let mut history = good();
        history.troubles.push(FaultPeriod {
            what: "somebody was killed".into(),
            began: at(10),
            healed: at(16),
        });
        history.publishes[1].ended = at(14);
        let costs = history.costs(RULES);
        let [cost] = &costs[..] else { panic!("{costs:?}") };
        // The second was acknowledged at 14 and arrived at 20, the others at 11.
        assert_eq!((cost.unacknowledged, cost.late), (at(3), at(9)));
        history.attempts[1].began = at(30);
        let late = history.lateness(&[], RULES);
        assert_eq!(
            late,
            [(at(30), Duration::from_millis(8_900))],
            "nobody was told 200"
        );
    }

    #[test]
    fn what_only_a_fault_may_cause_needs_one() {
        let again = attempt("all", 2, SentKind::Chosen, 1, 23, true);
        let twice = attempt("all", 2, SentKind::Chosen, 0, 20, true);
        let recounted = attempt("all", 1, SentKind::Plain, 0, 21, false);
        for (more, found) in [
            (again, "delivered again"),
            (twice, "two attempts at once"),
            (recounted, "a count that does not go on"),
        ] {
            let mut history = good();
            history.attempts.push(more);
            let wrong = history.audit(&WANTED, RULES).expect_err(found);
            assert!(
                wrong.iter().any(|one| one.starts_with(found)),
                "{found}: {wrong:?}"
            );
            history.troubles.push(FaultPeriod {
                what: "somebody was killed".into(),
                began: at(12),
                healed: at(16),
            });
            assert_eq!(
                history
                    .audit(&WANTED, RULES)
                    .map_err(|wrong| wrong.len())
                    .map(|_| ()),
                Ok(())
            );
            history.troubles[0].healed = at(14);
            assert!(history.audit(&WANTED, RULES).is_err(), "it was long over");
        }
    }
}
