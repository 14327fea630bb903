//! Outcomes of replayed events, counted per replay as they end, until the server stops.
//!
//! Positions are kept as ranges of whole appends, not one by one. Events replayed before a restart,
//! or delivered by another node, are not counted: the numbers may be incomplete, but are never
//! wrong.

use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::NextStep;
use postrider_store::Settlement;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Mutex, MutexGuard};

/// Replays that are counted; the oldest is forgotten first. More than the list of replays keeps.
const JOBS_MAX: usize = 128;
/// Ranges of positions that are kept; the oldest is forgotten first.
const RANGES_MAX: usize = 16 * 1024;
/// Ends of deliveries that are kept while the position of their append is not known yet.
const EARLY_MAX: usize = 4096;

/// The counts of a replay's events by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayedEventCounts {
    pub delivered: u64,
    /// Dead-lettered or dropped again.
    pub failed: u64,
    /// Not attempted yet, or waiting for a retry.
    pub waiting: u64,
}

impl ReplayedEventCounts {
    /// All counted events.
    pub fn total(&self) -> u64 {
        self.delivered + self.failed + self.waiting
    }
}

/// How one delivery of a replayed event ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayedEnd {
    Delivered,
    Failed,
}

impl ReplayedEnd {
    fn of(next: NextStep) -> Option<ReplayedEnd> {
        match next {
            NextStep::Done => Some(ReplayedEnd::Delivered),
            NextStep::DeadLetter(_) | NextStep::Drop(_) => Some(ReplayedEnd::Failed),
            NextStep::RetryAt(_) => None,
        }
    }
}

/// Counts the ends of replayed events.
#[derive(Debug, Default)]
pub struct ReplayOutcomes {
    /// Whether anything is to be counted; readable without the lock.
    active: AtomicBool,
    counts: Mutex<ReplayCountState>,
}

#[derive(Debug, Default)]
struct ReplayCountState {
    jobs: BTreeMap<u64, ReplayedEventCounts>,
    /// By subscription and first position.
    ranges: BTreeMap<(SubscriptionId, Position), AppendedRange>,
    /// The keys of the ranges, the oldest first.
    order: VecDeque<(SubscriptionId, Position)>,
    /// Appends whose positions are not known yet.
    appending: usize,
    /// Ends of deliveries that are in no range: they may belong to such an append.
    early: FxHashMap<(SubscriptionId, Position), ReplayedEnd>,
    /// Whether more early ends came than are kept.
    early_lost: bool,
}

/// The positions of one append of a replay.
#[derive(Debug)]
struct AppendedRange {
    job: u64,
    /// The position after the last.
    end: Position,
    /// Deliveries that have not ended.
    waiting: u64,
    /// Deliveries that were given up: a late answer may still turn out to be a success.
    failed: u64,
}

impl ReplayCountState {
    fn find(&mut self, of: SubscriptionId, position: Position) -> Option<&mut AppendedRange> {
        let (key, range) = self.ranges.range_mut(..=(of, position)).next_back()?;
        (key.0 == of && position < range.end).then_some(range)
    }

    fn ended(&mut self, of: SubscriptionId, position: Position, end: ReplayedEnd) -> bool {
        let Some(range) = self.find(of, position) else {
            return false;
        };
        // A store may offer a delivery again after its end, so that it ends twice.
        if range.waiting == 0 {
            return true;
        }
        range.waiting -= 1;
        if end == ReplayedEnd::Failed {
            range.failed += 1;
        }
        let job = range.job;
        if let Some(outcome) = self.jobs.get_mut(&job) {
            outcome.waiting -= 1;
            match end {
                ReplayedEnd::Delivered => outcome.delivered += 1,
                ReplayedEnd::Failed => outcome.failed += 1,
            }
        }
        true
    }

    /// Counts a given-up delivery as delivered.
    fn recovered(&mut self, of: SubscriptionId, position: Position) {
        let Some(range) = self.find(of, position).filter(|range| range.failed > 0) else {
            return;
        };
        range.failed -= 1;
        let job = range.job;
        if let Some(outcome) = self.jobs.get_mut(&job) {
            outcome.failed -= 1;
            outcome.delivered += 1;
        }
    }

    fn insert(&mut self, job: u64, of: SubscriptionId, first: Position, count: u64) {
        if !self.jobs.contains_key(&job) && self.jobs.len() >= JOBS_MAX {
            self.jobs.pop_first();
        }
        self.jobs.entry(job).or_default().waiting += count;
        let end = Position(first.0 + count);
        let before = self.ranges.range_mut(..(of, first)).next_back();
        let before = before.filter(|(key, range)| key.0 == of && range.end == first && range.job == job);
        if let Some((_, before)) = before {
            before.end = end;
            before.waiting += count;
        } else {
            let range = AppendedRange {
                job,
                end,
                waiting: count,
                failed: 0,
            };
            self.ranges.insert((of, first), range);
            self.order.push_back((of, first));
        }
        let early: Vec<((SubscriptionId, Position), ReplayedEnd)> = self
            .early
            .extract_if(|(id, position), _| *id == of && first <= *position && *position < end)
            .collect();
        for ((of, position), end) in early {
            self.ended(of, position, end);
        }
        self.forget_oldest();
    }

    /// Forgets ranges that are complete, and the oldest ones if there are too many.
    fn forget_oldest(&mut self) {
        while let Some(key) = self.order.front().copied() {
            let over = |range: &AppendedRange| range.waiting == 0 && range.failed == 0;
            let done = self.ranges.get(&key).is_none_or(over);
            if !done && self.order.len() <= RANGES_MAX {
                return;
            }
            self.order.pop_front();
            if let Some(range) = self.ranges.remove(&key)
                && let Some(outcome) = self.jobs.get_mut(&range.job)
            {
                // The outcomes of these events remain unknown.
                outcome.waiting -= range.waiting;
            }
        }
    }
}

/// An append of replayed events whose position is not known yet.
pub(crate) struct ReplayAppend<'a> {
    outcomes: &'a ReplayOutcomes,
    job: u64,
    of: SubscriptionId,
}

impl ReplayAppend<'_> {
    /// Reports the position of the append.
    pub(crate) fn appended(self, first: Position, count: usize) {
        let mut counts = self.outcomes.counts();
        if !counts.early_lost {
            counts.insert(self.job, self.of, first, count as u64);
        }
    }
}

impl Drop for ReplayAppend<'_> {
    fn drop(&mut self) {
        let mut counts = self.outcomes.counts();
        counts.appending -= 1;
        if counts.appending == 0 {
            counts.early = FxHashMap::default();
            counts.early_lost = false;
        }
        self.outcomes.note_active(&counts);
    }
}

impl ReplayOutcomes {
    fn counts(&self) -> MutexGuard<'_, ReplayCountState> {
        self.counts.lock().expect("no panic holds it")
    }

    fn note_active(&self, counts: &ReplayCountState) {
        let active = counts.appending > 0 || !counts.ranges.is_empty();
        self.active.store(active, Release);
    }

    /// To be called before events are appended: they may end before their position is known.
    pub(crate) fn begin_append(&self, job: u64, of: SubscriptionId) -> ReplayAppend<'_> {
        let mut counts = self.counts();
        counts.appending += 1;
        self.note_active(&counts);
        drop(counts);
        ReplayAppend {
            outcomes: self,
            job,
            of,
        }
    }

    /// Reports settled deliveries.
    pub(crate) fn settled(&self, of: SubscriptionId, settled: &[Settlement]) {
        if !self.active.load(Acquire) {
            return;
        }
        let replayed = settled.iter().filter(|one| one.claim.entry.batch.replay > 0);
        let ends = replayed.filter_map(|one| Some((one.claim.position(), ReplayedEnd::of(one.next)?)));
        self.note_ends(of, ends);
    }

    /// Reports deliveries that waited for a retry and turned out to be delivered.
    pub(crate) fn delivered_late(&self, of: SubscriptionId, positions: &[Position]) {
        if !self.active.load(Acquire) {
            return;
        }
        let ends = positions
            .iter()
            .map(|position| (*position, ReplayedEnd::Delivered));
        self.note_ends(of, ends);
    }

    fn note_ends(&self, of: SubscriptionId, ends: impl Iterator<Item = (Position, ReplayedEnd)>) {
        let mut ends = ends.peekable();
        if ends.peek().is_none() {
            return;
        }
        let mut counts = self.counts();
        for (position, end) in ends {
            if counts.ended(of, position, end) || counts.appending == 0 {
                continue;
            }
            match counts.early.len() < EARLY_MAX {
                true => drop(counts.early.insert((of, position), end)),
                false => counts.early_lost = true,
            }
        }
        counts.forget_oldest();
        self.note_active(&counts);
    }

    /// Reports given-up deliveries that turned out to be delivered.
    pub(crate) fn recovered(&self, of: SubscriptionId, positions: &[Position]) {
        if !self.active.load(Acquire) {
            return;
        }
        let mut counts = self.counts();
        for position in positions {
            counts.recovered(of, *position);
        }
    }

    /// Reports the removal of a subscription, whose backlog was dropped.
    pub(crate) fn subscription_gone(&self, of: SubscriptionId) {
        if !self.active.load(Acquire) {
            return;
        }
        let mut counts = self.counts();
        let ReplayCountState { jobs, ranges, .. } = &mut *counts;
        for (_, range) in ranges.range_mut((of, Position(0))..=(of, Position(u64::MAX))) {
            let dropped = std::mem::take(&mut range.waiting);
            range.failed += dropped;
            if let Some(outcome) = jobs.get_mut(&range.job) {
                outcome.waiting -= dropped;
                outcome.failed += dropped;
            }
        }
    }

    /// The outcomes of a replay's events, as far as they were counted. None if nothing was.
    pub fn of(&self, job: u64) -> Option<ReplayedEventCounts> {
        let counts = self.counts();
        counts
            .jobs
            .get(&job)
            .copied()
            .filter(|outcome| outcome.total() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUB: SubscriptionId = SubscriptionId(1);
    const OTHER: SubscriptionId = SubscriptionId(2);

    fn ends(outcomes: &ReplayOutcomes, of: SubscriptionId, positions: &[u64], end: ReplayedEnd) {
        outcomes.note_ends(of, positions.iter().map(|n| (Position(*n), end)));
    }

    fn append(outcomes: &ReplayOutcomes, job: u64, of: SubscriptionId, first: u64, count: usize) {
        outcomes.begin_append(job, of).appended(Position(first), count);
    }

    fn outcome(delivered: u64, failed: u64, waiting: u64) -> Option<ReplayedEventCounts> {
        Some(ReplayedEventCounts {
            delivered,
            failed,
            waiting,
        })
    }

    #[test]
    fn ends_are_counted_for_their_replay() {
        let outcomes = ReplayOutcomes::default();
        assert_eq!(outcomes.of(7), None);
        append(&outcomes, 7, SUB, 10, 5);
        append(&outcomes, 8, OTHER, 15, 1);
        append(&outcomes, 7, SUB, 16, 2);
        assert_eq!(outcomes.of(7), outcome(0, 0, 7));
        ends(&outcomes, SUB, &[10, 11, 17], ReplayedEnd::Delivered);
        ends(&outcomes, SUB, &[12], ReplayedEnd::Failed);
        // Positions outside of the replay: between, before and after its ranges, and of another
        // subscription.
        ends(&outcomes, SUB, &[9, 15, 18], ReplayedEnd::Delivered);
        ends(&outcomes, OTHER, &[10, 16], ReplayedEnd::Delivered);
        assert_eq!(
            (outcomes.of(7), outcomes.of(8)),
            (outcome(3, 1, 3), outcome(0, 0, 1))
        );
        // A late answer to the last attempt of the given-up event.
        outcomes.recovered(SUB, &[Position(12)]);
        assert_eq!(outcomes.of(7), outcome(4, 0, 3));
        ends(&outcomes, SUB, &[13, 14, 16], ReplayedEnd::Delivered);
        ends(&outcomes, SUB, &[16], ReplayedEnd::Failed);
        ends(&outcomes, OTHER, &[15], ReplayedEnd::Delivered);
        assert_eq!(
            (outcomes.of(7), outcomes.of(8)),
            (outcome(7, 0, 0), outcome(1, 0, 0))
        );
        assert!(!outcomes.active.load(Acquire), "nothing is left to count");
    }

    #[test]
    fn an_end_may_come_before_the_position_is_known() {
        let outcomes = ReplayOutcomes::default();
        let append = outcomes.begin_append(1, SUB);
        ends(&outcomes, SUB, &[4, 5, 9], ReplayedEnd::Delivered);
        append.appended(Position(4), 3);
        assert_eq!(outcomes.of(1), outcome(2, 0, 1));
        assert!(outcomes.counts().early.is_empty());
        // A failed append leaves nothing behind.
        drop(outcomes.begin_append(1, SUB));
        ends(&outcomes, SUB, &[6], ReplayedEnd::Failed);
        assert_eq!(outcomes.of(1), outcome(2, 1, 0));
    }

    #[test]
    fn appends_in_a_row_are_one_range() {
        let outcomes = ReplayOutcomes::default();
        for n in 0..1000 {
            append(&outcomes, 1, SUB, n * 100, 100);
        }
        assert_eq!(outcomes.counts().ranges.len(), 1);
        assert_eq!(outcomes.of(1), outcome(0, 0, 100_000));
    }

    #[test]
    fn what_is_kept_is_bounded_and_never_wrong() {
        let outcomes = ReplayOutcomes::default();
        let all = RANGES_MAX as u64 + 10;
        for n in 0..all {
            append(&outcomes, 1, SUB, n * 2, 1);
        }
        let counts = outcomes.counts();
        assert_eq!(
            (counts.ranges.len(), counts.order.len()),
            (RANGES_MAX, RANGES_MAX)
        );
        drop(counts);
        assert_eq!(outcomes.of(1), outcome(0, 0, RANGES_MAX as u64));
        ends(&outcomes, SUB, &[0], ReplayedEnd::Delivered);
        assert_eq!(outcomes.of(1), outcome(0, 0, RANGES_MAX as u64));
        for job in 2..1000 {
            append(&outcomes, job, OTHER, job * 2, 1);
        }
        assert_eq!(outcomes.counts().jobs.len(), JOBS_MAX);
        assert_eq!((outcomes.of(1), outcomes.of(999)), (None, outcome(0, 0, 1)));
        // Ends of forgotten ranges change nothing for others.
        ends(&outcomes, SUB, &[40], ReplayedEnd::Failed);
        let early = outcomes.begin_append(999, SUB);
        ends(
            &outcomes,
            OTHER,
            &(5000..15_000).collect::<Vec<_>>(),
            ReplayedEnd::Failed,
        );
        assert_eq!(outcomes.counts().early.len(), EARLY_MAX);
        early.appended(Position(1), 3);
        assert_eq!(
            outcomes.of(999),
            outcome(0, 0, 1),
            "its ends may be among those lost"
        );
    }

    #[test]
    fn what_waits_for_a_subscription_fails_with_it() {
        let outcomes = ReplayOutcomes::default();
        append(&outcomes, 1, SUB, 0, 3);
        append(&outcomes, 2, OTHER, 3, 1);
        ends(&outcomes, SUB, &[0], ReplayedEnd::Delivered);
        outcomes.subscription_gone(SUB);
        assert_eq!(
            (outcomes.of(1), outcomes.of(2)),
            (outcome(1, 2, 0), outcome(0, 0, 1))
        );
        ends(&outcomes, SUB, &[1], ReplayedEnd::Failed);
        assert_eq!(outcomes.of(1), outcome(1, 2, 0));
    }
}
