//! What has happened so far, as numbers. Each arrow of the path has one.

use crate::meters::Meter;
use postrider_core::retry::Reason;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of one subscription, or of the whole engine.
#[derive(Debug, Default)]
pub struct Counters {
    pub matched: AtomicU64,
    pub attempts: AtomicU64,
    pub attempts_failed: AtomicU64,
    pub delivered: AtomicU64,
    /// Those of the delivered whose answer came after the time for it.
    pub delivered_late: AtomicU64,
    pub retried: AtomicU64,
    /// Given up, to be written to a blob.
    pub dead_lettered: [AtomicU64; Reason::ALL.len()],
    /// Those of them that are in a blob.
    pub dead_letters_written: AtomicU64,
    pub blobs_written: AtomicU64,
    /// Dead letters that were sent on their way again.
    pub replayed: AtomicU64,
    pub dropped: [AtomicU64; Reason::ALL.len()],
}

impl Counters {
    /// A number that changes with every attempt and every end.
    pub(crate) fn pulse(&self) -> u64 {
        let ends = [
            &self.attempts,
            &self.delivered,
            &self.retried,
            &self.dead_letters_written,
        ];
        let counts = ends
            .into_iter()
            .chain(&self.dead_lettered)
            .chain(&self.dropped)
            .map(|n| n.load(Relaxed));
        counts.fold(0, u64::wrapping_add)
    }
}

/// Counts of what was published.
#[derive(Debug, Default)]
pub struct Published {
    pub requests: AtomicU64,
    pub events: AtomicU64,
    pub unmatched: AtomicU64,
    pub refused: AtomicU64,
    /// Those of the refused that were not the publisher's fault.
    pub refused_by_trouble: AtomicU64,
    /// From the arrival of the accepted requests until they were durable, together.
    pub micros: AtomicU64,
    /// These and what became of them, minute by minute.
    pub meter: Meter,
    /// Whether those who keep numbers over time are shown this topic by itself, and how long its events take. It is
    /// decided once: a topic that changed sides would make both sides' numbers leap.
    pub labelled: OnceLock<bool>,
    pub labelled_in_full: OnceLock<bool>,
}

impl Counters {
    /// Adds what another one has counted; it is about to go.
    pub(crate) fn absorb(&self, other: &Counters) {
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
        single.into_iter().chain(&self.dead_lettered).chain(&self.dropped)
    }
}

pub fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Relaxed);
}

pub fn by_reason(counters: &[AtomicU64], reason: Reason) -> &AtomicU64 {
    &counters[usize::from(reason.code())]
}

/// The reasons that have occurred, with their counts.
pub fn reasons(counters: &[AtomicU64]) -> Vec<(Reason, u64)> {
    let counts = Reason::ALL
        .iter()
        .zip(counters)
        .map(|(r, n)| (*r, n.load(Relaxed)));
    counts.filter(|(_, n)| *n > 0).collect()
}

pub fn total(counters: &[AtomicU64]) -> u64 {
    counters.iter().map(|n| n.load(Relaxed)).sum()
}
