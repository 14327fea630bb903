//! What is measured of deliveries.

use super::noting::Sent;
use super::{Dispatcher, Outlet};
use crate::counters::{Counters, add};
use crate::meters::{Attempt, Meter, Noted};
use postrider_core::event::Batch;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::Next;
use postrider_core::time::Timestamp;
use postrider_store::Settled;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// So many subscriptions are shown one by one to those who keep numbers over time; the others are added up. It is
/// decided when a subscription is taken up: one that changed sides would make both sides' numbers leap.
pub const LABELLED_MAX: usize = 2000;

/// What is counted of subscriptions that are not shown one by one, once they are gone.
#[derive(Debug, Default)]
pub struct Unlabelled {
    pub counters: Counters,
    pub meter: Meter,
    /// How many are shown one by one.
    labelled: AtomicUsize,
}

impl Unlabelled {
    /// Whether one more subscription is shown by itself.
    pub(super) fn label(&self) -> bool {
        let more = |labelled: usize| (labelled < LABELLED_MAX).then_some(labelled + 1);
        self.labelled.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    pub(super) fn gone(&self, outlet: &Outlet) {
        if outlet.labelled {
            self.labelled.fetch_sub(1, Relaxed);
        } else {
            self.counters.absorb(&outlet.counters);
            self.meter.absorb(&outlet.meter);
        }
    }
}

/// The subscriptions that the events of a request go to: distinct sets, each with the number of events.
pub(crate) struct Wanted(Vec<(Box<[SubscriptionId]>, usize)>);

impl Wanted {
    pub(crate) fn of(batch: &Batch) -> Wanted {
        let mut counts = vec![0; batch.matched.len()];
        for event in &batch.events {
            counts[event.matched as usize] += 1;
        }
        Wanted(batch.matched.iter().cloned().zip(counts).collect())
    }

    pub(crate) fn deliveries(&self) -> usize {
        self.0.iter().map(|(set, events)| set.len() * events).sum()
    }
}

impl Dispatcher {
    /// Events were appended.
    pub(crate) fn count_matched(&self, wanted: &Wanted) {
        add(&self.counters.matched, wanted.deliveries());
        let outlets = self.outlets.read().expect("no panic holds it");
        for (set, events) in &wanted.0 {
            for outlet in set.iter().filter_map(|of| outlets.by_id.get(of)) {
                add(&outlet.counters.matched, *events);
            }
        }
    }

    fn meters<'a>(&'a self, outlet: &'a Outlet) -> [&'a Meter; 3] {
        [&self.meter, &outlet.topic.meter, &outlet.meter]
    }

    pub(crate) fn meter_dropped(&self, outlet: &Outlet, now: Timestamp, dropped: usize) {
        let noted = Noted {
            dropped,
            ..Noted::default()
        };
        for meter in self.meters(outlet) {
            meter.note(now, &noted);
        }
    }

    pub(super) fn meter_late(
        &self,
        outlet: &Outlet,
        now: Timestamp,
        received: impl Iterator<Item = Timestamp>,
    ) {
        let delivered = together(now, received);
        let noted = Noted {
            delivered: &delivered,
            ..Noted::default()
        };
        for meter in self.meters(outlet) {
            meter.note(now, &noted);
        }
    }

    pub(super) fn meter_settled(&self, outlet: &Outlet, settled: &[Settled], sent: Option<&Sent<'_>>) {
        let attempt = sent.map(|sent| {
            let first = settled.get(sent.from).map(|one| &one.claim);
            let fresh = first.filter(|claim| claim.attempts_made == 0);
            Attempt {
                outcome: sent.attempted.outcome,
                took: sent.ended.since(sent.begun),
                waited: fresh.map(|claim| sent.begun.since(claim.received())),
            }
        });
        let count = |is: fn(&Next) -> bool| settled.iter().filter(|one| is(&one.next)).count();
        let done = settled.iter().filter(|one| one.next == Next::Done);
        let now = settled.last().map_or_else(|| self.clock.now(), |one| one.at);
        let delivered = together(now, done.map(|one| one.claim.received()));
        let noted = Noted {
            attempt,
            delivered: &delivered,
            dead_lettered: count(|next| matches!(next, Next::DeadLetter(_))),
            dropped: count(|next| matches!(next, Next::Drop(_))),
        };
        for meter in self.meters(outlet) {
            meter.note(now, &noted);
        }
    }
}

/// How long ago events were received, and how many of them: those of one publish request were together.
fn together(now: Timestamp, received: impl Iterator<Item = Timestamp>) -> Vec<(Duration, usize)> {
    let mut found: Vec<(Duration, usize)> = Vec::new();
    for at in received {
        let latency = now.since(at);
        match found.last_mut() {
            Some((known, count)) if *known == latency => *count += 1,
            _ => found.push((latency, 1)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_is_added_up_stays_when_its_subscription_goes() {
        let unlabelled = Unlabelled::default();
        let outlet = |n| Outlet::new(SubscriptionId(n), Arc::default(), unlabelled.label());
        let labelled: Vec<Outlet> = (0..LABELLED_MAX as u64).map(outlet).collect();
        assert!(labelled.iter().all(|one| one.labelled));
        let other = outlet(9999);
        assert!(!other.labelled);
        let delivered = [(Duration::from_secs(1), 3)];
        let noted = Noted {
            delivered: &delivered,
            ..Noted::default()
        };
        for one in [&labelled[0], &other] {
            add(&one.counters.delivered, 3);
            one.meter.note(Timestamp::MIN, &noted);
            unlabelled.gone(one);
        }
        // Only one of the two was added up; the other one's lines go with it, and leave room for one more.
        assert_eq!(unlabelled.counters.delivered.load(Relaxed), 3);
        assert_eq!(
            unlabelled.meter.totals().map(|totals| totals.latency.count()),
            Some(3)
        );
        assert!(outlet(1).labelled);
        assert!(!outlet(2).labelled);
    }

    #[test]
    fn events_of_one_request_are_measured_together() {
        let at = Timestamp::from_secs;
        let received = [at(1), at(1), at(4), at(1)].into_iter();
        let secs = Duration::from_secs;
        assert_eq!(
            together(at(5), received),
            [(secs(4), 2), (secs(1), 1), (secs(4), 1)]
        );
    }
}
