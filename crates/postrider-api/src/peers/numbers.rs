//! What nodes count, added up. Of how long events took, it is the counts behind percentiles that are added.

use super::{Heard, gather};
use crate::Server;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::time::Timestamp;
use postrider_engine::counters::{Counters, total};
use postrider_engine::meters::{LATENCY_MINUTES, Meter, Percentiles, Stretches, Tally};
use postrider_store::Backlog;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering::Relaxed;

/// Deliveries, by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    pub delivered: u64,
    pub attempts: u64,
    pub failed: u64,
    pub dead_lettered: u64,
    pub dropped: u64,
    pub matched: u64,
}

impl Counted {
    fn of(counters: &Counters) -> Counted {
        Counted {
            delivered: counters.delivered.load(Relaxed),
            attempts: counters.attempts.load(Relaxed),
            failed: counters.attempts_failed.load(Relaxed),
            dead_lettered: total(&counters.dead_lettered),
            dropped: total(&counters.dropped),
            matched: counters.matched.load(Relaxed),
        }
    }

    fn add(&mut self, other: &Counted) {
        self.delivered += other.delivered;
        self.attempts += other.attempts;
        self.failed += other.failed;
        self.dead_lettered += other.dead_lettered;
        self.dropped += other.dropped;
        self.matched += other.matched;
    }
}

/// What a meter shows: events and failed requests per second, and how long events took.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metered {
    pub published: f64,
    pub delivered: f64,
    pub failed: f64,
    latency: Stretches,
}

impl Metered {
    fn of(meter: &Meter, now: Timestamp) -> Metered {
        let rates = meter.rates(now);
        Metered {
            published: rates.published,
            delivered: rates.delivered,
            failed: rates.failed,
            latency: meter.stretches(now, LATENCY_MINUTES),
        }
    }

    fn add(&mut self, other: Metered) {
        self.published += other.published;
        self.delivered += other.delivered;
        self.failed += other.failed;
        self.latency.extend(other.latency);
    }

    /// None if nothing was delivered.
    pub fn latency(&self) -> Option<Percentiles> {
        Percentiles::of(&self.latency)
    }
}

/// What waits for a subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Those that are being sent right now are among them.
    pub waiting: u64,
    pub retrying: u64,
    oldest: Option<i64>,
}

impl Waits {
    fn of(backlog: &Backlog) -> Waits {
        Waits {
            waiting: backlog.waiting + backlog.claimed,
            retrying: backlog.retrying,
            oldest: backlog.oldest.map(Timestamp::nanos),
        }
    }

    fn add(&mut self, other: &Waits) {
        self.waiting += other.waiting;
        self.retrying += other.retrying;
        self.oldest = self.oldest.into_iter().chain(other.oldest).min();
    }

    pub fn all(&self) -> u64 {
        self.waiting + self.retrying
    }

    /// Since when the oldest has waited.
    pub fn oldest(&self) -> Option<Timestamp> {
        self.oldest.map(Timestamp::from_nanos)
    }
}

/// What was published to a topic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Published {
    pub events: u64,
    pub refused: u64,
    pub unmatched: u64,
    pub per_sec: f64,
}

/// An endpoint that is left alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sick {
    pub probing: bool,
    pub delay: Delayed,
    pub waiting: u64,
}

/// Since when an endpoint is left alone, until when, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delayed {
    until: i64,
    since: i64,
    pub cause: String,
}

impl Delayed {
    pub fn of(delay: &postrider_core::probation::Delay) -> Delayed {
        Delayed {
            until: delay.until.nanos(),
            since: delay.since.nanos(),
            cause: delay.cause.name().to_owned(),
        }
    }

    pub fn since(&self) -> Timestamp {
        Timestamp::from_nanos(self.since)
    }

    pub fn until(&self) -> Timestamp {
        Timestamp::from_nanos(self.until)
    }

    /// The one that lasts longer, begun when the first of them did.
    pub fn longer(one: Option<Delayed>, other: Option<Delayed>) -> Option<Delayed> {
        let (Some(one), Some(other)) = (&one, &other) else {
            return one.or(other);
        };
        let since = one.since.min(other.since);
        let longer = if other.until > one.until { other } else { one };
        Some(Delayed {
            since,
            ..longer.clone()
        })
    }
}

/// Everything that `stats` shows of a node, but for single subscriptions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    pub counted: Counted,
    pub metered: Metered,
    /// By the numbers of their subscriptions; of those that have something to do.
    pub busy: HashMap<u64, Waits>,
    /// By the numbers of topics; of those that were published to.
    pub topics: HashMap<u64, Published>,
    /// By the names of endpoints.
    pub sick: BTreeMap<String, Sick>,
}

impl Numbers {
    fn add(&mut self, other: Numbers) {
        self.counted.add(&other.counted);
        self.metered.add(other.metered);
        for (id, waits) in &other.busy {
            self.busy.entry(*id).or_default().add(waits);
        }
        for (id, published) in other.topics {
            let sum = self.topics.entry(id).or_default();
            sum.events += published.events;
            sum.refused += published.refused;
            sum.unmatched += published.unmatched;
            sum.per_sec += published.per_sec;
        }
        for (endpoint, sick) in other.sick {
            match self.sick.get_mut(&endpoint) {
                None => drop(self.sick.insert(endpoint, sick)),
                Some(known) => {
                    known.waiting += sick.waiting;
                    known.probing |= sick.probing;
                    let both = Delayed::longer(Some(known.delay.clone()), Some(sick.delay));
                    known.delay = both.expect("of two there is one");
                }
            }
        }
    }

    pub fn published(&self, id: TopicId) -> Published {
        self.topics.get(&id.0).copied().unwrap_or_default()
    }

    pub fn waiting(&self, id: SubscriptionId) -> u64 {
        self.busy.get(&id.0).map_or(0, Waits::all)
    }
}

/// The time that is meant by now: nodes' clocks may differ, and what they say is of the same minutes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct NumbersAsked {
    now: i64,
}

pub fn own(server: &Server, asked: NumbersAsked) -> Numbers {
    let engine = &server.engine;
    let now = Timestamp::from_nanos(asked.now);
    let directory = &engine.directory;
    let mut topics = directory.topics();
    topics.extend(directory.domains());
    topics.extend(directory.system_topics());
    topics.extend(directory.scopes());
    let topics = topics.iter().filter_map(|entry| {
        let published = &entry.published;
        let events = published.events.load(Relaxed);
        let refused = published.refused.load(Relaxed);
        if events == 0 && refused == 0 {
            return None;
        }
        let published = Published {
            events,
            refused,
            unmatched: published.unmatched.load(Relaxed),
            per_sec: published.meter.rates(now).published,
        };
        Some((entry.topic.id.0, published))
    });
    let log = engine.log();
    let subscriptions = directory.all_subscriptions();
    let busy = subscriptions
        .iter()
        .map(|one| (one.id.0, Waits::of(&log.backlog(one.id))));
    let sick = engine.dispatcher.endpoints();
    let sick = sick.iter().filter_map(|status| {
        let sick = Sick {
            probing: status.state.probing,
            delay: Delayed::of(&status.state.delay?),
            waiting: status.waiting,
        };
        Some((status.name.clone(), sick))
    });
    Numbers {
        counted: Counted::of(&engine.dispatcher.counters),
        metered: Metered::of(&engine.dispatcher.meter, now),
        busy: busy.filter(|(_, waits)| waits.all() > 0).collect(),
        topics: topics
            .filter(|(_, published)| *published != Published::default())
            .collect(),
        sick: sick.collect(),
    }
}

/// Of all nodes together, and who did not answer.
pub async fn all(server: &Server, now: Timestamp) -> (Numbers, Vec<String>) {
    let asked = NumbersAsked { now: now.nanos() };
    let Some(peers) = &server.peers else {
        return (own(server, asked), Vec::new());
    };
    let heard: Heard<Numbers> = gather(&**peers, "numbers", &asked).await;
    let mut sum = Numbers::default();
    for (_, numbers) in heard.answers {
        sum.add(numbers);
    }
    (sum, heard.missing)
}

/// How a subscription is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Detail {
    pub counted: Counted,
    pub metered: Metered,
    pub waits: Waits,
    /// Dead letters that have not been written.
    pub letters: u64,
    pub delay: Option<Delayed>,
    pub probing: bool,
}

impl Detail {
    fn add(&mut self, other: Detail) {
        self.counted.add(&other.counted);
        self.metered.add(other.metered);
        self.waits.add(&other.waits);
        self.letters += other.letters;
        self.delay = Delayed::longer(self.delay.take(), other.delay);
        self.probing |= other.probing;
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DetailsAsked {
    now: i64,
    ids: Vec<u64>,
}

/// In the order of what was asked for.
pub fn own_details(server: &Server, asked: DetailsAsked) -> Vec<Detail> {
    let engine = &server.engine;
    let now = Timestamp::from_nanos(asked.now);
    let letters = engine.log().letters_waiting().into_iter();
    let letters: HashMap<u64, u64> = letters.map(|letters| (letters.of.0, letters.count)).collect();
    let detail = |id: &u64| {
        // Events that are being sent right now are in no list of busy ones.
        let waits = Waits::of(&engine.log().backlog(SubscriptionId(*id)));
        let letters = letters.get(id).copied().unwrap_or(0);
        let Some(outlet) = engine.dispatcher.outlet(SubscriptionId(*id)) else {
            return Detail {
                waits,
                letters,
                ..Detail::default()
            };
        };
        let plan = outlet.plan();
        // Not all rules know delays.
        let state = plan
            .filter(|plan| plan.sender().obeys)
            .map(|plan| plan.endpoint.state_for(SubscriptionId(*id)));
        let delay = state
            .as_ref()
            .and_then(|state| state.delay.as_ref())
            .map(Delayed::of);
        Detail {
            counted: Counted::of(&outlet.counters),
            metered: Metered::of(&outlet.meter, now),
            waits,
            letters,
            probing: delay.is_some() && state.is_some_and(|state| state.probing),
            delay,
        }
    };
    asked.ids.iter().map(detail).collect()
}

/// How subscriptions are in view of all nodes, in their order, and who did not answer.
pub async fn details(
    server: &Server,
    ids: impl Iterator<Item = SubscriptionId>,
    now: Timestamp,
) -> (Vec<Detail>, Vec<String>) {
    let asked = DetailsAsked {
        now: now.nanos(),
        ids: ids.map(|id| id.0).collect(),
    };
    let Some(peers) = &server.peers else {
        return (own_details(server, asked), Vec::new());
    };
    let heard: Heard<Vec<Detail>> = gather(&**peers, "details", &asked).await;
    let mut sums = vec![Detail::default(); asked.ids.len()];
    for (_, details) in heard.answers {
        for (sum, detail) in sums.iter_mut().zip(details) {
            sum.add(detail);
        }
    }
    (sums, heard.missing)
}

/// Which meter is meant: that of everything unless it is said.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SeriesAsked {
    pub topic: Option<u64>,
    pub subscription: Option<u64>,
    pub minutes: usize,
    pub now: i64,
}

/// A minute, as nodes tell each other of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Minute {
    number: i64,
    counts: [u64; 5],
    latency: Stretches,
}

impl From<Tally> for Minute {
    fn from(tally: Tally) -> Minute {
        Minute {
            number: tally.number,
            counts: [
                tally.published,
                tally.delivered,
                tally.failed,
                tally.dead_lettered,
                tally.dropped,
            ],
            latency: tally.latency,
        }
    }
}

impl From<Minute> for Tally {
    fn from(minute: Minute) -> Tally {
        let [published, delivered, failed, dead_lettered, dropped] = minute.counts;
        Tally {
            number: minute.number,
            published,
            delivered,
            failed,
            dead_lettered,
            dropped,
            latency: minute.latency,
        }
    }
}

fn own_tallies(server: &Server, asked: SeriesAsked) -> Vec<Tally> {
    let engine = &server.engine;
    let now = Timestamp::from_nanos(asked.now);
    let tallies = |meter: &Meter| meter.tallies(now, asked.minutes);
    match (asked.subscription, asked.topic) {
        (Some(id), _) => {
            let outlet = engine.dispatcher.outlet(SubscriptionId(id));
            outlet.map_or_else(Vec::new, |outlet| tallies(&outlet.meter))
        }
        (None, Some(id)) => {
            let entry = engine.directory.topic_by_id(TopicId(id));
            entry.map_or_else(Vec::new, |entry| tallies(&entry.published.meter))
        }
        (None, None) => tallies(&engine.dispatcher.meter),
    }
}

pub fn own_series(server: &Server, asked: SeriesAsked) -> Vec<Minute> {
    let tallies = own_tallies(server, asked).into_iter();
    tallies.map(Minute::from).collect()
}

/// What happened in each minute at any node, and who did not answer.
pub async fn tallies(server: &Server, asked: SeriesAsked) -> (Vec<Tally>, Vec<String>) {
    let Some(peers) = &server.peers else {
        return (own_tallies(server, asked), Vec::new());
    };
    let heard: Heard<Vec<Minute>> = gather(&**peers, "series", &asked).await;
    let minutes = heard.answers.into_iter().flat_map(|(_, minutes)| minutes);
    (minutes.map(Tally::from).collect(), heard.missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delayed(since: i64, until: i64, cause: &str) -> Delayed {
        Delayed {
            until,
            since,
            cause: cause.into(),
        }
    }

    #[test]
    fn what_nodes_count_is_added_up() {
        let one = Numbers {
            counted: Counted {
                delivered: 1,
                matched: 10,
                ..Counted::default()
            },
            metered: Metered {
                published: 1.5,
                latency: vec![(10, 90)],
                ..Metered::default()
            },
            busy: HashMap::from([(
                1,
                Waits {
                    waiting: 5,
                    retrying: 1,
                    oldest: Some(100),
                },
            )]),
            topics: HashMap::from([(
                7,
                Published {
                    events: 3,
                    per_sec: 0.5,
                    ..Published::default()
                },
            )]),
            sick: BTreeMap::from([(
                "e".to_owned(),
                Sick {
                    probing: false,
                    delay: delayed(10, 20, "Busy"),
                    waiting: 2,
                },
            )]),
        };
        let mut other = one.clone();
        other.metered.latency = vec![(80, 10)];
        other.busy.insert(
            2,
            Waits {
                waiting: 0,
                retrying: 9,
                oldest: None,
            },
        );
        other.busy.insert(
            1,
            Waits {
                waiting: 1,
                retrying: 0,
                oldest: Some(50),
            },
        );
        let sick = Sick {
            probing: true,
            delay: delayed(12, 30, "TimedOut"),
            waiting: 3,
        };
        other.sick.insert("e".into(), sick);
        let mut sum = Numbers::default();
        sum.add(one.clone());
        sum.add(other);
        assert_eq!((sum.counted.delivered, sum.counted.matched), (2, 20));
        assert_eq!(sum.metered.published, 3.0);
        // One in ten was slow, at one of the nodes: the median is not, the ninety-fifth is.
        let found = sum.metered.latency().unwrap();
        let slow = Percentiles::of(&[(80, 1)]).unwrap().p50;
        assert!(found.p50 < slow / 10 && found.p95 > slow / 2, "{found:?}");
        assert_eq!(
            sum.busy[&1],
            Waits {
                waiting: 6,
                retrying: 1,
                oldest: Some(50)
            }
        );
        assert_eq!(
            (sum.waiting(SubscriptionId(2)), sum.waiting(SubscriptionId(3))),
            (9, 0)
        );
        assert_eq!(sum.published(TopicId(7)).events, 6);
        assert_eq!(sum.published(TopicId(8)), Published::default());
        let expected = Sick {
            probing: true,
            delay: delayed(10, 30, "TimedOut"),
            waiting: 5,
        };
        assert_eq!(sum.sick["e"], expected);
        // As it goes from node to node.
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<Numbers>(&text).unwrap(), one);
    }

    #[test]
    fn an_endpoint_that_is_delayed_anywhere_is_delayed() {
        let mut sum = Detail::default();
        sum.add(Detail {
            letters: 2,
            ..Detail::default()
        });
        sum.add(Detail {
            letters: 3,
            delay: Some(delayed(1, 2, "Busy")),
            ..Detail::default()
        });
        sum.add(Detail {
            probing: true,
            ..Detail::default()
        });
        assert_eq!((sum.letters, sum.probing), (5, true));
        assert_eq!(sum.delay, Some(delayed(1, 2, "Busy")));
    }
}
