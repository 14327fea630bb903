//! Numbers of the demo as the server counts them, and whether they add up.

use super::publisher::AcceptedCounts;
use super::scenario::{DemoSubscription, TOPIC};
use anyhow::{Context, Result};
use postrider_core::probation::EndpointProbationDelay;
use postrider_core::retry::GiveUpReason;
use postrider_engine::Engine;
use postrider_engine::counters::{DeliveryCounters, reasons};
use postrider_engine::dispatch::SubscriptionDispatcher;
use postrider_store::log::Backlog;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Access to the counters of each part.
pub struct SubscriptionGauges {
    engine: Arc<Engine>,
    outlets: Vec<(DemoSubscription, Arc<SubscriptionDispatcher>)>,
}

/// All the numbers at one moment.
#[derive(Clone, Debug, Default)]
pub struct DemoCounts {
    pub published: AcceptedCounts,
    /// Deliveries that the server created, over all subscriptions.
    pub matched: u64,
    pub rows: Vec<SubscriptionCounts>,
}

/// Numbers of one subscription.
#[derive(Clone, Debug)]
pub struct SubscriptionCounts {
    pub part: DemoSubscription,
    /// Published events that the subscription's filter lets through, counted by the publisher.
    pub expected: u64,
    pub waiting: u64,
    pub in_flight: u64,
    pub retrying: u64,
    pub attempts: u64,
    pub failed: u64,
    pub delivered: u64,
    pub dead_lettered: Vec<(GiveUpReason, u64)>,
    pub dropped: Vec<(GiveUpReason, u64)>,
    pub delay: Option<EndpointProbationDelay>,
    /// Different events that the receiver accepted.
    pub accepted: u64,
}

impl SubscriptionGauges {
    pub fn new(engine: Arc<Engine>) -> Result<SubscriptionGauges> {
        let topic = engine
            .directory
            .topic(TOPIC)
            .context("the topic was not made")?
            .topic
            .id;
        let find = |part: DemoSubscription| {
            let subscription = engine.directory.subscription(topic, None, part.name());
            let outlet = subscription.and_then(|s| engine.dispatcher.outlet(s.id));
            Ok((
                part,
                outlet.with_context(|| format!("subscription {:?} was not made", part.name()))?,
            ))
        };
        let outlets = DemoSubscription::ALL
            .into_iter()
            .map(find)
            .collect::<Result<_>>()?;
        Ok(SubscriptionGauges { engine, outlets })
    }

    /// Deliveries go on during the reading, so sums may be off by those that are being settled. The
    /// caller fills in `accepted`, later, so that no accepted event is missing.
    pub fn read(&self, published: AcceptedCounts) -> DemoCounts {
        let log = self.engine.log();
        let rows = self.outlets.iter().map(|(part, outlet)| {
            // Open deliveries are read before ended ones: a delivery may be counted twice, but
            // never missed.
            let Backlog {
                waiting,
                claimed,
                retrying,
                ..
            } = log.backlog(outlet.id);
            let counters = &outlet.counters;
            SubscriptionCounts {
                part: *part,
                expected: published.wanted[*part as usize],
                waiting,
                in_flight: claimed,
                retrying,
                attempts: counters.attempts.load(Relaxed),
                failed: counters.attempts_failed.load(Relaxed),
                delivered: counters.delivered.load(Relaxed),
                dead_lettered: still_given_up(counters),
                dropped: reasons(&counters.dropped),
                delay: outlet
                    .plan()
                    .and_then(|plan| plan.endpoint.state_for(outlet.id).delay),
                accepted: 0,
            }
        });
        DemoCounts {
            published,
            matched: self.engine.dispatcher.counters.matched.load(Relaxed),
            rows: rows.collect(),
        }
    }
}

/// Events that were given up, whether or not they are in a blob yet, less those that arrived late.
fn still_given_up(counters: &DeliveryCounters) -> Vec<(GiveUpReason, u64)> {
    let withdrawn = reasons(&counters.letters_withdrawn);
    let less = |(reason, count): (GiveUpReason, u64)| {
        let back = withdrawn.iter().find(|(other, _)| *other == reason);
        (reason, count.saturating_sub(back.map_or(0, |(_, count)| *count)))
    };
    let left = reasons(&counters.given_up).into_iter().map(less);
    left.filter(|(_, count)| *count > 0).collect()
}

impl SubscriptionCounts {
    pub fn dead_lettered_total(&self) -> u64 {
        self.dead_lettered.iter().map(|(_, n)| n).sum()
    }

    pub fn dropped_total(&self) -> u64 {
        self.dropped.iter().map(|(_, n)| n).sum()
    }

    /// Deliveries that have not ended.
    pub fn open(&self) -> u64 {
        self.waiting + self.in_flight + self.retrying
    }

    /// Whether every event published for the subscription is either open or has exactly one end,
    /// and all delivered events have arrived.
    pub fn adds_up(&self) -> bool {
        let ended = self.delivered + self.dead_lettered_total() + self.dropped_total();
        self.expected == ended + self.open() && self.delivered <= self.accepted
    }
}

impl DemoCounts {
    pub fn sum(&self, of: impl Fn(&SubscriptionCounts) -> u64) -> u64 {
        self.rows.iter().map(of).sum()
    }

    pub fn at_rest(&self) -> bool {
        self.published.over && self.sum(SubscriptionCounts::open) == 0
    }

    /// Whether the publisher's, the router's and the receiver's counts agree.
    pub fn adds_up(&self) -> bool {
        self.rows.iter().all(SubscriptionCounts::adds_up) && self.sum(|row| row.expected) == self.matched
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn row(part: DemoSubscription, expected: u64) -> SubscriptionCounts {
        SubscriptionCounts {
            part,
            expected,
            waiting: 0,
            in_flight: 0,
            retrying: 0,
            attempts: 0,
            failed: 0,
            delivered: 0,
            dead_lettered: Vec::new(),
            dropped: Vec::new(),
            delay: None,
            accepted: expected,
        }
    }

    #[test]
    fn what_is_missing_or_counted_twice_is_noticed() {
        let mut row = SubscriptionCounts {
            waiting: 1,
            retrying: 2,
            delivered: 3,
            dead_lettered: vec![
                (GiveUpReason::BadRequest, 3),
                (GiveUpReason::TimeToLiveExceeded, 1),
            ],
            ..row(DemoSubscription::Picky, 10)
        };
        assert!(row.adds_up());
        row.delivered = 2;
        assert!(!row.adds_up());
        row.delivered = 4;
        assert!(!row.adds_up());
        row.expected = 11;
        row.accepted = 3;
        assert!(!row.adds_up(), "one that counts as delivered never arrived");
        row.accepted = 4;
        let mut tally = DemoCounts {
            matched: 11,
            rows: vec![row],
            ..DemoCounts::default()
        };
        assert!(tally.adds_up() && !tally.at_rest());
        tally.matched = 12;
        assert!(!tally.adds_up());
    }
}
