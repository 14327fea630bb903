//! Counters and meters of deliveries.

use super::recording::FinishedAttempt;
use super::{Dispatcher, SubscriptionDispatcher};
use crate::counters::{DeliveryCounters, add, by_reason};
use crate::meters::{AttemptMeasurement, FailureCause, FailureEffect, Meter, MeterNote};
use postrider_core::event::PublishedBatch;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use postrider_store::log::LastAttempt;
use postrider_store::{PendingDeadLetter, Settlement};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// The number of subscriptions that exported metrics show separately; all others are summed up.
/// Decided once per subscription: one that changed sides would make both series jump.
pub const LABELLED_MAX: usize = 2000;

/// The counts of deleted subscriptions that are not shown separately.
#[derive(Debug, Default)]
pub struct UnlabelledCounts {
    pub counters: DeliveryCounters,
    pub meter: Meter,
    /// The number of subscriptions that are shown separately.
    labelled: AtomicUsize,
}

impl UnlabelledCounts {
    /// Decides whether one more subscription is shown separately.
    pub(super) fn label(&self) -> bool {
        let more = |labelled: usize| (labelled < LABELLED_MAX).then_some(labelled + 1);
        self.labelled.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    pub(super) fn gone(&self, outlet: &SubscriptionDispatcher) {
        if outlet.labelled {
            self.labelled.fetch_sub(1, Relaxed);
        } else {
            self.counters.absorb(&outlet.counters);
            self.meter.absorb(&outlet.meter);
        }
    }
}

/// The subscriptions that the events of a request match: distinct sets, each with its number of
/// events.
pub(crate) struct MatchedSubscriptions(Vec<(Box<[SubscriptionId]>, usize)>);

impl MatchedSubscriptions {
    pub(crate) fn of(batch: &PublishedBatch) -> MatchedSubscriptions {
        let mut counts = vec![0; batch.matched.len()];
        for event in &batch.events {
            counts[event.matched as usize] += 1;
        }
        MatchedSubscriptions(batch.matched.iter().cloned().zip(counts).collect())
    }

    pub(crate) fn deliveries(&self) -> usize {
        self.0.iter().map(|(set, events)| set.len() * events).sum()
    }
}

impl Dispatcher {
    /// Counts events that were appended.
    pub(crate) fn count_matched(&self, wanted: &MatchedSubscriptions) {
        add(&self.counters.matched, wanted.deliveries());
        let outlets = self.outlets.read().expect("no panic holds it");
        for (set, events) in &wanted.0 {
            for outlet in set.iter().filter_map(|of| outlets.by_id.get(of)) {
                add(&outlet.counters.matched, *events);
            }
        }
    }

    fn meters<'a>(&'a self, outlet: &'a SubscriptionDispatcher) -> [&'a Meter; 3] {
        [&self.meter, &outlet.topic.meter, &outlet.meter]
    }

    /// Counts dead letters that are in their blob. Their subscription may be gone by now.
    pub(crate) fn count_dead_lettered(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        letters: &[(FailureCause, usize)],
    ) {
        let outlet = self.outlet(of);
        let counters = outlet.iter().map(|outlet| &outlet.counters);
        for counters in counters.chain([&self.counters]) {
            for (cause, count) in letters {
                if let FailureEffect::DeadLettered(reason) = cause.effect {
                    add(by_reason(&counters.dead_lettered, reason), *count);
                }
            }
        }
        let noted = MeterNote {
            given_up: letters,
            ..MeterNote::default()
        };
        match &outlet {
            Some(outlet) => self
                .meters(outlet)
                .iter()
                .for_each(|meter| meter.note(now, &noted)),
            None => self.meter.note(now, &noted),
        }
    }

    /// Meters dead letters that could not be written.
    pub(crate) fn meter_dropped(
        &self,
        outlet: &SubscriptionDispatcher,
        now: Timestamp,
        letters: &[PendingDeadLetter],
        reason: GiveUpReason,
    ) {
        let effect = FailureEffect::Dropped(reason);
        let given_up = by_cause(letters.iter().map(|letter| (effect, letter.last_attempt)));
        let noted = MeterNote {
            given_up: &given_up,
            ..MeterNote::default()
        };
        for meter in self.meters(outlet) {
            meter.note(now, &noted);
        }
    }

    pub(super) fn meter_late(
        &self,
        outlet: &SubscriptionDispatcher,
        now: Timestamp,
        received: impl Iterator<Item = Timestamp>,
    ) {
        let delivered = together(now, received);
        let noted = MeterNote {
            delivered: &delivered,
            ..MeterNote::default()
        };
        for meter in self.meters(outlet) {
            meter.note(now, &noted);
        }
    }

    /// Meters a request that was refused as a whole and is sent again in halves.
    pub(super) fn meter_split(&self, outlet: &SubscriptionDispatcher, sent: &FinishedAttempt<'_>) {
        let attempt = AttemptMeasurement {
            outcome: sent.attempted.outcome,
            status: sent.attempted.status,
            took: sent.ended.since(sent.begun),
            waited: None,
        };
        for meter in self.meters(outlet) {
            meter.note_split(attempt);
        }
    }

    pub(super) fn meter_settled(
        &self,
        outlet: &SubscriptionDispatcher,
        settled: &[Settlement],
        sent: Option<&FinishedAttempt<'_>>,
    ) {
        let attempt = sent.map(|sent| {
            let first = settled.get(sent.from).map(|one| &one.claim);
            let fresh = first.filter(|claim| claim.attempts_made == 0);
            AttemptMeasurement {
                outcome: sent.attempted.outcome,
                status: sent.attempted.status,
                took: sent.ended.since(sent.begun),
                waited: fresh.map(|claim| sent.begun.since(claim.received())),
            }
        });
        let given_up = by_cause(settled.iter().filter_map(|one| {
            let effect = match one.next {
                NextStep::Drop(reason) => FailureEffect::Dropped(reason),
                // Whether a dead letter can be written is not known yet.
                NextStep::DeadLetter(_) | NextStep::Done | NextStep::RetryAt(_) => return None,
            };
            Some((effect, one.last_attempt))
        }));
        let done = settled.iter().filter(|one| one.next == NextStep::Done);
        let now = settled.last().map_or_else(|| self.clock.now(), |one| one.at);
        let delivered = together(now, done.map(|one| one.claim.received()));
        let noted = MeterNote {
            attempt,
            delivered: &delivered,
            given_up: &given_up,
        };
        for meter in self.meters(outlet) {
            meter.note(now, &noted);
        }
    }
}

/// Dead letters by cause, counted as dead-lettered events.
pub(crate) fn letters_by_cause(letters: &[PendingDeadLetter]) -> Vec<(FailureCause, usize)> {
    by_cause(letters.iter().map(|letter| {
        let effect = FailureEffect::DeadLettered(letter.reason);
        (effect, letter.last_attempt)
    }))
}

/// Events that were given up, by cause. The events of one batch have the same cause.
fn by_cause(
    given_up: impl Iterator<Item = (FailureEffect, Option<LastAttempt>)>,
) -> Vec<(FailureCause, usize)> {
    let mut found: Vec<(FailureCause, usize)> = Vec::new();
    for (effect, last) in given_up {
        let cause = FailureCause {
            effect,
            outcome: last.map(|last| last.outcome),
            status: last.and_then(|last| last.status),
        };
        match found.iter_mut().find(|(known, _)| *known == cause) {
            Some((_, count)) => *count += 1,
            None => found.push((cause, 1)),
        }
    }
    found
}

/// Ages of events with their number: events of one publish request have the same age.
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
        let unlabelled = UnlabelledCounts::default();
        let outlet = |n| SubscriptionDispatcher::new(SubscriptionId(n), Arc::default(), unlabelled.label());
        let labelled: Vec<SubscriptionDispatcher> = (0..LABELLED_MAX as u64).map(outlet).collect();
        assert!(labelled.iter().all(|one| one.labelled));
        let other = outlet(9999);
        assert!(!other.labelled);
        let delivered = [(Duration::from_secs(1), 3)];
        let noted = MeterNote {
            delivered: &delivered,
            ..MeterNote::default()
        };
        for one in [&labelled[0], &other] {
            add(&one.counters.delivered, 3);
            one.meter.note(Timestamp::MIN, &noted);
            unlabelled.gone(one);
        }
        // Only one of the two is in the sum; the separate series of the other is gone and leaves
        // space for a new one.
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
