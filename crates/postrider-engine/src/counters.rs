//! Counters of the event path: at least one for each step.

use crate::meters::Meter;
use postrider_core::retry::GiveUpReason;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of one subscription, or of the whole engine.
#[derive(Debug, Default)]
pub struct DeliveryCounters {
    pub matched: AtomicU64,
    pub attempts: AtomicU64,
    pub attempts_failed: AtomicU64,
    pub delivered: AtomicU64,
    /// Deliveries among `delivered` whose answer came after the response timeout.
    pub delivered_late: AtomicU64,
    pub retried: AtomicU64,
    /// Deliveries given up whose dead letters are to be written to a blob. Each is counted again
    /// when that ends: as dead-lettered, as dropped because it could not be written, or as
    /// withdrawn.
    pub given_up: [AtomicU64; GiveUpReason::ALL.len()],
    /// Dead letters withdrawn because a late answer reported success. Their deliveries count as
    /// delivered.
    pub letters_withdrawn: [AtomicU64; GiveUpReason::ALL.len()],
    /// Dead letters that are in a blob.
    pub dead_lettered: [AtomicU64; GiveUpReason::ALL.len()],
    /// Dead letters written for any reason, including those of subscriptions deleted since.
    pub dead_letters_written: AtomicU64,
    pub blobs_written: AtomicU64,
    /// Dead letters that were replayed.
    pub replayed: AtomicU64,
    pub dropped: [AtomicU64; GiveUpReason::ALL.len()],
    /// Counts of earlier processes, not included in the counters above.
    earlier: OnceLock<DeliveryTotals>,
}

/// The counts that continue over restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryTotals {
    pub matched: u64,
    pub attempts: u64,
    pub attempts_failed: u64,
    pub delivered: u64,
    pub dead_lettered: [u64; GiveUpReason::ALL.len()],
    pub dropped: [u64; GiveUpReason::ALL.len()],
}

impl DeliveryTotals {
    fn add(&mut self, other: &DeliveryTotals) {
        self.matched += other.matched;
        self.attempts += other.attempts;
        self.attempts_failed += other.attempts_failed;
        self.delivered += other.delivered;
        let given_up = self.dead_lettered.iter_mut().chain(&mut self.dropped);
        let others = other.dead_lettered.iter().chain(&other.dropped);
        for (count, more) in given_up.zip(others) {
            *count += more;
        }
    }
}

impl DeliveryCounters {
    /// Sets the counts of earlier processes; only the first call has an effect.
    pub fn set_earlier(&self, earlier: DeliveryTotals) {
        // A second value would count the same deliveries again.
        let _ = self.earlier.set(earlier);
    }

    /// The counts including those of earlier processes.
    pub fn totals(&self) -> DeliveryTotals {
        let each = |counters: &[AtomicU64; GiveUpReason::ALL.len()]| {
            std::array::from_fn(|reason| counters[reason].load(Relaxed))
        };
        let mut totals = DeliveryTotals {
            matched: self.matched.load(Relaxed),
            attempts: self.attempts.load(Relaxed),
            attempts_failed: self.attempts_failed.load(Relaxed),
            delivered: self.delivered.load(Relaxed),
            dead_lettered: each(&self.dead_lettered),
            dropped: each(&self.dropped),
        };
        if let Some(earlier) = self.earlier.get() {
            totals.add(earlier);
        }
        totals
    }

    /// A number that changes with every attempt and every end of a delivery.
    pub(crate) fn pulse(&self) -> u64 {
        let ends = [
            &self.attempts,
            &self.delivered,
            &self.retried,
            &self.dead_letters_written,
        ];
        let counts = ends
            .into_iter()
            .chain(&self.given_up)
            .chain(&self.dropped)
            .map(|n| n.load(Relaxed));
        counts.fold(0, u64::wrapping_add)
    }
}

/// Counts of publish requests and their events.
#[derive(Debug, Default)]
pub struct PublishCounters {
    pub requests: AtomicU64,
    pub events: AtomicU64,
    pub unmatched: AtomicU64,
    pub refused: AtomicU64,
    /// Refused requests among `refused` that failed on the server's side.
    pub refused_by_trouble: AtomicU64,
    /// The time from arrival to durability, summed over all accepted requests.
    pub micros: AtomicU64,
    /// The same counts and the fate of the events, minute by minute.
    pub meter: Meter,
    /// Whether exported metrics show this topic separately, and (`labelled_in_full`) with its
    /// latencies. Decided once: a topic that changed sides would make both series jump.
    pub labelled: OnceLock<bool>,
    pub labelled_in_full: OnceLock<bool>,
    /// Counts of earlier processes, not included in the counters above.
    earlier: OnceLock<PublishTotals>,
}

/// The publish counts that continue over restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishTotals {
    pub events: u64,
    pub unmatched: u64,
    pub refused: u64,
}

impl PublishCounters {
    /// Sets the counts of earlier processes; only the first call has an effect.
    pub fn set_earlier(&self, earlier: PublishTotals) {
        let _ = self.earlier.set(earlier);
    }

    /// The counts including those of earlier processes.
    pub fn totals(&self) -> PublishTotals {
        let earlier = self.earlier.get().copied().unwrap_or_default();
        PublishTotals {
            events: earlier.events + self.events.load(Relaxed),
            unmatched: earlier.unmatched + self.unmatched.load(Relaxed),
            refused: earlier.refused + self.refused.load(Relaxed),
        }
    }
}

impl DeliveryCounters {
    /// Adds the counts of counters that are about to be dropped.
    pub(crate) fn absorb(&self, other: &DeliveryCounters) {
        for (counter, more) in self.all().zip(other.all()) {
            counter.fetch_add(more.load(Relaxed), Relaxed);
        }
    }

    fn all(&self) -> impl Iterator<Item = &AtomicU64> {
        let single = [
            &self.matched,
            &self.attempts,
            &self.attempts_failed,
            &self.delivered,
            &self.delivered_late,
            &self.retried,
            &self.dead_letters_written,
            &self.blobs_written,
            &self.replayed,
        ];
        let given_up = self.given_up.iter().chain(&self.letters_withdrawn);
        let ends = given_up.chain(&self.dead_lettered).chain(&self.dropped);
        single.into_iter().chain(ends)
    }
}

pub fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Relaxed);
}

pub fn by_reason(counters: &[AtomicU64], reason: GiveUpReason) -> &AtomicU64 {
    &counters[usize::from(reason.code())]
}

/// The reasons with a count above zero.
pub fn reasons(counters: &[AtomicU64]) -> Vec<(GiveUpReason, u64)> {
    let counts = GiveUpReason::ALL
        .iter()
        .zip(counters)
        .map(|(r, n)| (*r, n.load(Relaxed)));
    counts.filter(|(_, n)| *n > 0).collect()
}

pub fn total(counters: &[AtomicU64]) -> u64 {
    counters.iter().map(|n| n.load(Relaxed)).sum()
}
