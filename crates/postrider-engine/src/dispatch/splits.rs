//! Batches that were too large for their endpoint: which of their events may go together from now
//! on.
//!
//! The events of such a batch are released to the log and claimed again, so that pauses, limits and
//! the end of a subscription apply as usual. The state kept here only prevents that they meet again
//! in one request. A restart loses it: then the batch is refused once more, which costs no event an
//! attempt.

use postrider_core::ids::Position;
use rustc_hash::FxHashMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// With more split events than this in one subscription, all groups are forgotten.
const SPLIT_EVENTS_MAX: usize = 100_000;

/// The halves, and halves of halves, that are still to be sent for one subscription.
#[derive(Default)]
pub struct BatchSplits {
    /// The number of events in groups, readable without the lock.
    count: AtomicUsize,
    groups: Mutex<SplitGroups>,
}

#[derive(Debug, Default)]
struct SplitGroups {
    group_of: FxHashMap<Position, u32>,
    /// The groups that bound the size of a claim, with their sizes; the last is claimed next.
    next: Vec<(u32, usize)>,
    last_number: u32,
}

impl BatchSplits {
    fn change<T>(&self, change: impl FnOnce(&mut SplitGroups) -> T) -> T {
        let mut groups = self.groups.lock().expect("no panic holds it");
        let result = change(&mut groups);
        self.count.store(groups.group_of.len(), Release);
        result
    }

    fn is_empty(&self) -> bool {
        self.count.load(Acquire) == 0
    }

    /// Splits a request that was refused as a whole. `events` are in the order of their claims.
    pub fn split(&self, events: &[Position]) {
        let (first, second) = events.split_at(events.len().div_ceil(2));
        self.change(|groups| {
            groups.forget(events);
            if groups.group_of.len() + events.len() > SPLIT_EVENTS_MAX {
                *groups = SplitGroups::default();
            }
            groups.add(second);
            groups.add(first);
        });
    }

    /// The most events to claim at once, if there are groups to be sent.
    pub fn claim_max(&self) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        self.change(|groups| groups.next.last().map(|(_, size)| *size))
    }

    /// How many of the first claims may go in one request: those of one group, or those of none.
    pub fn together(&self, mut claimed: impl Iterator<Item = Position>) -> usize {
        if self.is_empty() {
            return claimed.count();
        }
        self.change(|groups| {
            let Some(first) = claimed.next() else {
                return 0;
            };
            let group = groups.group_of.get(&first).copied();
            if groups.next.last().is_some_and(|(next, _)| Some(*next) != group) {
                // The group is gone, or other events are claimed before it: its size must not bound
                // every claim.
                groups.next.pop();
            }
            let alike = claimed.take_while(|event| groups.group_of.get(event).copied() == group);
            1 + alike.count()
        })
    }

    /// Forgets events whose outcome is decided: a further attempt may batch them with any others.
    pub fn forget(&self, events: impl Iterator<Item = Position>) {
        if !self.is_empty() {
            let events: Vec<Position> = events.collect();
            self.change(|groups| groups.forget(&events));
        }
    }
}

impl SplitGroups {
    fn add(&mut self, events: &[Position]) {
        self.last_number = self.last_number.wrapping_add(1);
        let number = self.last_number;
        self.group_of.extend(events.iter().map(|event| (*event, number)));
        self.next.push((number, events.len()));
    }

    fn forget(&mut self, events: &[Position]) {
        for event in events {
            let Some(group) = self.group_of.remove(event) else {
                continue;
            };
            if let Some((_, size)) = self.next.iter_mut().rev().find(|(number, _)| *number == group) {
                *size -= 1;
            }
        }
        self.next.retain(|(_, size)| *size > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions(of: std::ops::Range<u64>) -> Vec<Position> {
        of.map(Position).collect()
    }

    /// Sends everything as the dispatcher does, to a receiver that refuses every request with one
    /// of `bad` and another event. Returns the sizes of the requests.
    fn sent(count: u64, bad: &[u64]) -> Vec<usize> {
        let splits = BatchSplits::default();
        let mut waiting = positions(0..count);
        let mut sizes = Vec::new();
        while !waiting.is_empty() {
            let max = splits.claim_max().unwrap_or(usize::MAX).min(waiting.len());
            let together = splits.together(waiting[..max].iter().copied());
            let request: Vec<Position> = waiting[..together].to_vec();
            sizes.push(request.len());
            if request.len() > 1 && request.iter().any(|event| bad.contains(&event.0)) {
                splits.split(&request);
            } else {
                splits.forget(request.iter().copied());
                waiting.drain(..together);
            }
        }
        assert!(splits.is_empty());
        assert!(splits.change(|groups| groups.next.is_empty()));
        sizes
    }

    #[test]
    fn a_batch_is_halved_until_what_is_too_large_is_alone() {
        assert_eq!(sent(8, &[]), [8]);
        assert_eq!(sent(8, &[0]), [8, 4, 2, 1, 1, 2, 4]);
        assert_eq!(sent(8, &[7]), [8, 4, 4, 2, 2, 1, 1]);
        assert_eq!(sent(5, &[2]), [5, 3, 2, 1, 2]);
        assert_eq!(sent(3, &[0, 1, 2]), [3, 2, 1, 1, 1]);
        let all: Vec<u64> = (0..64).collect();
        assert_eq!(sent(64, &all).len(), 2 * 64 - 1);
    }

    #[test]
    fn events_of_a_refused_batch_do_not_meet_newcomers_or_each_other() {
        let splits = BatchSplits::default();
        let together = |events: &[u64]| splits.together(events.iter().copied().map(Position));
        assert_eq!(together(&[1, 2, 3, 9]), 4);
        splits.split(&positions(1..5));
        assert_eq!(splits.claim_max(), Some(2));
        assert_eq!(together(&[1, 2, 3, 4, 9]), 2);
        assert_eq!(together(&[3, 4, 9]), 2);
        assert_eq!(
            together(&[9, 10, 1]),
            2,
            "what goes before them goes without them"
        );
        splits.forget(positions(1..3).into_iter());
        assert_eq!(
            together(&[1, 2, 9]),
            3,
            "another attempt of theirs is as any other"
        );
        splits.forget(positions(3..5).into_iter());
        assert_eq!(splits.claim_max(), None);
    }

    #[test]
    fn a_group_that_is_never_offered_again_does_not_bound_claims_for_ever() {
        let splits = BatchSplits::default();
        splits.split(&positions(1..3));
        for _ in 0..2 {
            assert_eq!(splits.claim_max(), Some(1));
            splits.together(positions(50..51).into_iter());
        }
        assert_eq!(splits.claim_max(), None);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let splits = BatchSplits::default();
        for batch in 0..200 {
            splits.split(&positions(batch * 5000..batch * 5000 + 5000));
            assert!(splits.count.load(Acquire) <= SPLIT_EVENTS_MAX);
        }
    }
}
