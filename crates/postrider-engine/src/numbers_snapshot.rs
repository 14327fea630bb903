//! Counts that outlive the process: totals and minutes of the engine, its topics and subscriptions.

use crate::Engine;
use crate::counters::{DeliveryTotals, PublishTotals};
use crate::meters::MeterMinute;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;

/// The most subscriptions, and the most topics, of a snapshot. The ones that have been idle for
/// longest are left out.
pub const ENTRIES_MAX: usize = 20_000;
/// The most minutes of all topics and subscriptions of a snapshot together. The most recently
/// active ones come first; of the others only the totals are kept.
pub const MINUTES_MAX: usize = 100_000;

/// Counts of an engine since [`NumbersSnapshot::since`], across restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumbersSnapshot {
    pub since: Timestamp,
    pub counts: DeliveryTotals,
    pub minutes: Vec<MeterMinute>,
    pub subscriptions: BTreeMap<SubscriptionId, CountedResource<DeliveryTotals>>,
    pub topics: BTreeMap<TopicId, CountedResource<PublishTotals>>,
}

/// The totals of one topic or subscription with its last minutes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountedResource<T> {
    pub totals: T,
    pub minutes: Vec<MeterMinute>,
}

impl Engine {
    /// When counting began: with the first start, or with the first start after the snapshot was
    /// lost.
    pub fn counted_since(&self) -> Timestamp {
        self.counted_since.get().copied().unwrap_or(self.started)
    }

    /// Totals and minutes for the next start to restore.
    pub fn numbers_snapshot(&self) -> NumbersSnapshot {
        let now = self.clock.now();
        let mut minutes_left = MINUTES_MAX;
        let mut within_bounds = |minutes: Vec<MeterMinute>| {
            let fits = minutes.len() <= minutes_left;
            let minutes = if fits { minutes } else { Vec::new() };
            minutes_left -= minutes.len();
            minutes
        };
        let mut subscriptions: Vec<_> = self
            .directory
            .all_subscriptions()
            .iter()
            .filter_map(|one| self.dispatcher.outlet(one.id))
            .map(|outlet| (outlet.meter.last_minute(), outlet))
            .collect();
        subscriptions.sort_by_key(|(last, _)| std::cmp::Reverse(*last));
        let subscriptions = subscriptions.iter().filter_map(|(_, outlet)| {
            let totals = outlet.counters.totals();
            let minutes = outlet.meter.minutes(now);
            let counted = totals != DeliveryTotals::default() || !minutes.is_empty();
            counted.then_some((outlet.id, totals, minutes))
        });
        let subscriptions = subscriptions.take(ENTRIES_MAX).map(|(id, totals, minutes)| {
            let minutes = within_bounds(minutes);
            (id, CountedResource { totals, minutes })
        });
        let subscriptions = subscriptions.collect();
        let mut topics: Vec<_> = self
            .published_to()
            .into_iter()
            .map(|entry| (entry.published.meter.last_minute(), entry))
            .collect();
        topics.sort_by_key(|(last, _)| std::cmp::Reverse(*last));
        let topics = topics.iter().filter_map(|(_, entry)| {
            let totals = entry.published.totals();
            let minutes = entry.published.meter.minutes(now);
            let counted = totals != PublishTotals::default() || !minutes.is_empty();
            counted.then_some((entry.topic.id, totals, minutes))
        });
        let topics = topics.take(ENTRIES_MAX).map(|(id, totals, minutes)| {
            let minutes = within_bounds(minutes);
            (id, CountedResource { totals, minutes })
        });
        let topics = topics.collect();
        NumbersSnapshot {
            since: self.counted_since(),
            counts: self.dispatcher.counters.totals(),
            minutes: self.dispatcher.meter.minutes(now),
            subscriptions,
            topics,
        }
    }

    /// Continues the counts of an earlier process; to be called once. Topics and subscriptions that
    /// are gone are left out.
    pub fn restore_numbers(&self, snapshot: NumbersSnapshot) {
        let now = self.clock.now();
        let since = snapshot.since.min(self.started);
        if self.counted_since.set(since).is_err() {
            return;
        }
        self.dispatcher.counters.set_earlier(snapshot.counts);
        self.dispatcher.meter.restore(now, &snapshot.minutes);
        for (id, counted) in snapshot.subscriptions {
            if let Some(outlet) = self.dispatcher.outlet(id) {
                outlet.counters.set_earlier(counted.totals);
                outlet.meter.restore(now, &counted.minutes);
            }
        }
        for (id, counted) in snapshot.topics {
            if let Some(entry) = self.directory.topic_by_id(id) {
                entry.published.set_earlier(counted.totals);
                entry.published.meter.restore(now, &counted.minutes);
            }
        }
    }
}
