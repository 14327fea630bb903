//! Statistics of all nodes, added up. For latencies the counts behind the percentiles are added.

use super::{PeerResponses, gather};
use crate::Server;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::counters::DeliveryCounters;
use postrider_engine::endpoint::EndpointReportState;
use postrider_engine::meters::{
    FailureCause, FailureEffect, LATENCY_MINUTES, LatencyBucketCounts, LatencyQuantiles, Meter, MinuteTally,
    RecentCounts,
};
use postrider_engine::subscription_health::{
    DelayNumbers, HEALTH_MINUTES, HealthNumbers, HealthVerdict, LOSS_MINUTES, words_of,
};
use postrider_store::Backlog;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Subscriptions that need attention which a node reports at most.
pub const AILING_MAX: usize = 1000;

/// Subscriptions of an endpoint on probation which a node reports at most.
pub const SICK_SUBSCRIPTIONS_MAX: usize = 20;

/// Deliveries, counted by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryCounts {
    pub delivered: u64,
    pub attempts: u64,
    pub failed: u64,
    pub dead_lettered: u64,
    pub dropped: u64,
    pub matched: u64,
    /// By the codes of reasons.
    #[serde(default)]
    dead_lettered_by: BTreeMap<u8, u64>,
    #[serde(default)]
    dropped_by: BTreeMap<u8, u64>,
}

impl DeliveryCounts {
    /// The counts, including those of earlier processes.
    fn of(counters: &DeliveryCounters) -> DeliveryCounts {
        let totals = counters.totals();
        DeliveryCounts {
            delivered: totals.delivered,
            attempts: totals.attempts,
            failed: totals.attempts_failed,
            dead_lettered: totals.dead_lettered.iter().sum(),
            dropped: totals.dropped.iter().sum(),
            matched: totals.matched,
            dead_lettered_by: by_code(&totals.dead_lettered),
            dropped_by: by_code(&totals.dropped),
        }
    }

    /// The reasons that events were dropped for, with their counts.
    pub fn dropped_by(&self) -> impl Iterator<Item = (GiveUpReason, u64)> {
        let by = self.dropped_by.iter();
        by.map(|(code, count)| (GiveUpReason::from_code(*code), *count))
    }

    pub fn dead_lettered_by(&self) -> impl Iterator<Item = (GiveUpReason, u64)> {
        let by = self.dead_lettered_by.iter();
        by.map(|(code, count)| (GiveUpReason::from_code(*code), *count))
    }

    fn add(&mut self, other: &DeliveryCounts) {
        self.delivered += other.delivered;
        self.attempts += other.attempts;
        self.failed += other.failed;
        self.dead_lettered += other.dead_lettered;
        self.dropped += other.dropped;
        self.matched += other.matched;
        for (code, count) in &other.dead_lettered_by {
            *self.dead_lettered_by.entry(*code).or_default() += count;
        }
        for (code, count) in &other.dropped_by {
            *self.dropped_by.entry(*code).or_default() += count;
        }
    }
}

fn by_code(counts: &[u64]) -> BTreeMap<u8, u64> {
    let all = GiveUpReason::ALL
        .iter()
        .zip(counts)
        .filter(|(_, count)| **count > 0);
    all.map(|(reason, count)| (reason.code(), *count)).collect()
}

/// Readings of a meter: events and failed requests per second, and latencies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MeterReadings {
    pub published: f64,
    pub delivered: f64,
    pub failed: f64,
    latency: LatencyBucketCounts,
}

impl MeterReadings {
    fn of(meter: &Meter, now: Timestamp) -> MeterReadings {
        let rates = meter.rates(now);
        MeterReadings {
            published: rates.published,
            delivered: rates.delivered,
            failed: rates.failed,
            latency: meter.stretches(now, LATENCY_MINUTES),
        }
    }

    fn add(&mut self, other: MeterReadings) {
        self.published += other.published;
        self.delivered += other.delivered;
        self.failed += other.failed;
        self.latency.extend(other.latency);
    }

    /// None if nothing was delivered.
    pub fn latency(&self) -> Option<LatencyQuantiles> {
        LatencyQuantiles::of(&self.latency)
    }
}

/// Backlog of a subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscriptionBacklog {
    /// Includes deliveries that are being sent right now.
    pub waiting: u64,
    pub retrying: u64,
    oldest: Option<i64>,
}

impl SubscriptionBacklog {
    fn of(backlog: &Backlog) -> SubscriptionBacklog {
        SubscriptionBacklog {
            waiting: backlog.waiting + backlog.claimed,
            retrying: backlog.retrying,
            oldest: backlog.oldest.map(Timestamp::nanos),
        }
    }

    fn add(&mut self, other: &SubscriptionBacklog) {
        self.waiting += other.waiting;
        self.retrying += other.retrying;
        self.oldest = self.oldest.into_iter().chain(other.oldest).min();
    }

    pub fn all(&self) -> u64 {
        self.waiting + self.retrying
    }

    /// Since when the oldest delivery has waited.
    pub fn oldest(&self) -> Option<Timestamp> {
        self.oldest.map(Timestamp::from_nanos)
    }
}

/// Events that were published to a topic, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TopicPublishCounts {
    pub events: u64,
    pub refused: u64,
    pub unmatched: u64,
    pub per_sec: f64,
}

/// Recent outcomes of a subscription's deliveries, in a peer reply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentDeliveryOutcomes {
    attempts: u64,
    delivered: u64,
    failures: Vec<FailureCount>,
}

/// Failures with one cause, in the codes of the stored records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FailureCount {
    /// 0: the attempt failed and is repeated, 1: dead-lettered, 2: dropped.
    effect: u8,
    /// Why the event was given up; meaningless for effect 0.
    reason: u8,
    outcome: Option<u8>,
    status: Option<u16>,
    count: u64,
}

impl From<RecentCounts> for RecentDeliveryOutcomes {
    fn from(counts: RecentCounts) -> RecentDeliveryOutcomes {
        let failure = |(cause, count): (FailureCause, u64)| {
            let (effect, reason) = match cause.effect {
                FailureEffect::AttemptFailed => (0, 0),
                FailureEffect::DeadLettered(reason) => (1, reason.code()),
                FailureEffect::Dropped(reason) => (2, reason.code()),
            };
            FailureCount {
                effect,
                reason,
                outcome: cause.outcome.map(Outcome::code),
                status: cause.status,
                count,
            }
        };
        RecentDeliveryOutcomes {
            attempts: counts.attempts,
            delivered: counts.delivered,
            failures: counts.causes.into_iter().map(failure).collect(),
        }
    }
}

impl From<&RecentDeliveryOutcomes> for RecentCounts {
    fn from(recent: &RecentDeliveryOutcomes) -> RecentCounts {
        let mut counts = RecentCounts {
            attempts: recent.attempts,
            delivered: recent.delivered,
            ..RecentCounts::default()
        };
        for failures in &recent.failures {
            let reason = GiveUpReason::from_code(failures.reason);
            let (effect, sum) = match failures.effect {
                0 => (FailureEffect::AttemptFailed, &mut counts.failed),
                1 => (FailureEffect::DeadLettered(reason), &mut counts.dead_lettered),
                _ => (FailureEffect::Dropped(reason), &mut counts.dropped),
            };
            *sum += failures.count;
            let cause = FailureCause {
                effect,
                outcome: failures.outcome.map(Outcome::from_code),
                status: failures.status,
            };
            *counts.causes.entry(cause).or_default() += failures.count;
        }
        counts
    }
}

impl RecentDeliveryOutcomes {
    fn add(&mut self, other: &RecentDeliveryOutcomes) {
        let mut sum = RecentCounts::from(&*self);
        sum.add(&RecentCounts::from(other));
        *self = sum.into();
    }
}

/// An endpoint on probation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointOnProbation {
    pub probing: bool,
    pub delay: ProbationDelay,
    pub waiting: u64,
    /// The ids of subscriptions that use the endpoint, at most [`SICK_SUBSCRIPTIONS_MAX`] of each
    /// node.
    #[serde(default)]
    pub subscriptions: BTreeSet<u64>,
}

/// Since when an endpoint is on probation, until when, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbationDelay {
    until: i64,
    since: i64,
    pub cause: String,
    /// HTTP status of the answer that caused the probation, if there was one and it is known.
    #[serde(default)]
    pub status: Option<u16>,
}

impl ProbationDelay {
    pub fn of(state: &EndpointReportState) -> Option<ProbationDelay> {
        let delay = state.delay?;
        Some(ProbationDelay {
            until: delay.until.nanos(),
            since: delay.since.nanos(),
            cause: delay.cause.name().to_owned(),
            status: delay.status,
        })
    }

    fn outcome(&self) -> Option<Outcome> {
        let mut outcomes = Outcome::ALL.into_iter();
        outcomes.find(|outcome| outcome.name() == self.cause)
    }

    /// The cause in plain words.
    pub fn cause_text(&self) -> String {
        words_of(self.outcome(), self.status)
    }

    pub fn since(&self) -> Timestamp {
        Timestamp::from_nanos(self.since)
    }

    pub fn until(&self) -> Timestamp {
        Timestamp::from_nanos(self.until)
    }

    /// The probation that lasts longer, with the earlier beginning of the two.
    pub fn longer(one: Option<ProbationDelay>, other: Option<ProbationDelay>) -> Option<ProbationDelay> {
        let (Some(one), Some(other)) = (&one, &other) else {
            return one.or(other);
        };
        let since = one.since.min(other.since);
        let (longer, shorter) = match other.until > one.until {
            true => (other, one),
            false => (one, other),
        };
        // Only the node that got the answer knows its status.
        let status = longer
            .status
            .or(shorter.status.filter(|_| shorter.cause == longer.cause));
        Some(ProbationDelay {
            since,
            status,
            ..longer.clone()
        })
    }
}

/// Everything that `stats` shows of a node, except numbers of single subscriptions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeStatistics {
    pub counted: DeliveryCounts,
    pub metered: MeterReadings,
    /// By subscription id; only subscriptions with a backlog.
    pub busy: HashMap<u64, SubscriptionBacklog>,
    /// By topic id; only topics that were published to.
    pub topics: HashMap<u64, TopicPublishCounts>,
    /// By endpoint name.
    pub sick: BTreeMap<String, EndpointOnProbation>,
    /// Subscriptions whose health at this node needs attention. A subscription that needs it at no
    /// node cannot need it in the cluster as a whole.
    #[serde(default)]
    pub ailing: BTreeSet<u64>,
    /// Pending dead letters.
    #[serde(default)]
    pub letters: u64,
    /// When counting began, in nanoseconds.
    #[serde(default)]
    since: Option<i64>,
}

impl NodeStatistics {
    fn add(&mut self, other: NodeStatistics) {
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
        self.ailing.extend(other.ailing);
        self.letters += other.letters;
        self.since = self.since.into_iter().chain(other.since).min();
        for (endpoint, sick) in other.sick {
            match self.sick.get_mut(&endpoint) {
                None => drop(self.sick.insert(endpoint, sick)),
                Some(known) => {
                    known.waiting += sick.waiting;
                    known.probing |= sick.probing;
                    known.subscriptions.extend(sick.subscriptions);
                    let both = ProbationDelay::longer(Some(known.delay.clone()), Some(sick.delay));
                    known.delay = both.expect("of two there is one");
                }
            }
        }
    }

    pub fn published(&self, id: TopicId) -> TopicPublishCounts {
        self.topics.get(&id.0).copied().unwrap_or_default()
    }

    /// When counting began at the node that has counted longest.
    pub fn since(&self) -> Option<Timestamp> {
        self.since.map(Timestamp::from_nanos)
    }

    pub fn waiting(&self, id: SubscriptionId) -> u64 {
        self.busy.get(&id.0).map_or(0, SubscriptionBacklog::all)
    }
}

/// Peer request for statistics. It carries the time, because the clocks of nodes may differ and
/// their replies must be about the same minutes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct StatisticsRequest {
    now: i64,
}

pub fn own(server: &Server, asked: StatisticsRequest) -> NodeStatistics {
    let engine = &server.engine;
    let now = Timestamp::from_nanos(asked.now);
    let directory = &engine.directory;
    let topics = engine.published_to();
    let topics = topics.iter().filter_map(|entry| {
        let totals = entry.published.totals();
        if totals.events == 0 && totals.refused == 0 {
            return None;
        }
        let published = TopicPublishCounts {
            events: totals.events,
            refused: totals.refused,
            unmatched: totals.unmatched,
            per_sec: entry.published.meter.rates(now).published,
        };
        Some((entry.topic.id.0, published))
    });
    let log = engine.log();
    let subscriptions = directory.all_subscriptions();
    let busy = subscriptions
        .iter()
        .map(|one| (one.id.0, SubscriptionBacklog::of(&log.backlog(one.id))));
    let sick = engine.dispatcher.endpoints();
    let sick = sick.iter().filter_map(|status| {
        let sick = EndpointOnProbation {
            probing: status.state.probing,
            delay: ProbationDelay::of(&status.state)?,
            waiting: status.waiting,
            subscriptions: status
                .subscriptions
                .iter()
                .map(|id| id.0)
                .take(SICK_SUBSCRIPTIONS_MAX)
                .collect(),
        };
        Some((status.name.clone(), sick))
    });
    let letters = letters_by_subscription(server);
    let ailing = subscriptions.iter().filter(|one| {
        let condition = own_condition(server, one.id, now, &letters);
        let verdict = HealthVerdict::of(&condition.health_numbers(now, one.pauses.since()));
        verdict.health.needs_attention()
    });
    NodeStatistics {
        ailing: ailing.map(|one| one.id.0).take(AILING_MAX).collect(),
        since: Some(engine.counted_since().nanos()),
        letters: log
            .pending_dead_letters()
            .iter()
            .map(|letters| letters.count)
            .sum(),
        counted: DeliveryCounts::of(&engine.dispatcher.counters),
        metered: MeterReadings::of(&engine.dispatcher.meter, now),
        busy: busy.filter(|(_, waits)| waits.all() > 0).collect(),
        topics: topics
            .filter(|(_, published)| *published != TopicPublishCounts::default())
            .collect(),
        sick: sick.collect(),
    }
}

/// The sum of all nodes, and the names of nodes that did not reply.
pub async fn all(server: &Server, now: Timestamp) -> (NodeStatistics, Vec<String>) {
    let asked = StatisticsRequest { now: now.nanos() };
    let Some(peers) = &server.peers else {
        return (own(server, asked), Vec::new());
    };
    let heard: PeerResponses<NodeStatistics> = gather(&**peers, "numbers", &asked).await;
    let mut sum = NodeStatistics::default();
    for (_, numbers) in heard.answers {
        sum.add(numbers);
    }
    (sum, heard.missing)
}

/// State of one subscription.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SubscriptionDetail {
    pub counted: DeliveryCounts,
    pub metered: MeterReadings,
    pub waits: SubscriptionBacklog,
    /// Pending dead letters.
    pub letters: u64,
    /// Why the last try to write them failed.
    #[serde(default)]
    letters_trouble: Option<String>,
    pub delay: Option<ProbationDelay>,
    pub probing: bool,
    /// Outcomes of the last [`HEALTH_MINUTES`] …
    #[serde(default)]
    recent: RecentDeliveryOutcomes,
    /// … and of the last [`LOSS_MINUTES`].
    #[serde(default)]
    hour: RecentDeliveryOutcomes,
}

impl SubscriptionDetail {
    /// The numbers that health is judged by.
    pub fn health_numbers(&self, now: Timestamp, paused_since: Option<Timestamp>) -> HealthNumbers {
        HealthNumbers {
            recent: (&self.recent).into(),
            hour: (&self.hour).into(),
            waiting: self.waits.waiting,
            retrying: self.waits.retrying,
            letters_waiting: self.letters,
            letters_trouble: self.letters_trouble.clone(),
            oldest_age: self.waits.oldest().map(|oldest| now.since(oldest)),
            delay: self
                .delay
                .as_ref()
                .filter(|_| paused_since.is_none())
                .map(|delay| DelayNumbers {
                    left: delay.until().since(now),
                    cause: delay.outcome(),
                    status: delay.status,
                }),
            paused_since,
        }
    }

    fn add(&mut self, other: SubscriptionDetail) {
        self.counted.add(&other.counted);
        self.metered.add(other.metered);
        self.waits.add(&other.waits);
        self.letters += other.letters;
        self.letters_trouble = self.letters_trouble.take().or(other.letters_trouble);
        self.delay = ProbationDelay::longer(self.delay.take(), other.delay);
        self.probing |= other.probing;
        self.recent.add(&other.recent);
        self.hour.add(&other.hour);
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SubscriptionDetailsRequest {
    now: i64,
    ids: Vec<u64>,
}

/// Replies in the order of the requested ids.
pub fn own_details(server: &Server, asked: SubscriptionDetailsRequest) -> Vec<SubscriptionDetail> {
    let now = Timestamp::from_nanos(asked.now);
    let letters = letters_by_subscription(server);
    let detail = |id: &u64| own_detail(server, SubscriptionId(*id), now, &letters);
    asked.ids.iter().map(detail).collect()
}

/// Pending dead letters by subscription id.
fn letters_by_subscription(server: &Server) -> HashMap<u64, u64> {
    let letters = server.engine.log().pending_dead_letters().into_iter();
    letters.map(|letters| (letters.of.0, letters.count)).collect()
}

fn own_detail(
    server: &Server,
    id: SubscriptionId,
    now: Timestamp,
    letters: &HashMap<u64, u64>,
) -> SubscriptionDetail {
    let mut detail = own_condition(server, id, now, letters);
    if let Some(outlet) = server.engine.dispatcher.outlet(id) {
        detail.counted = DeliveryCounts::of(&outlet.counters);
        detail.metered = MeterReadings::of(&outlet.meter, now);
    }
    detail
}

/// The part of a subscription's numbers that its health is judged by.
fn own_condition(
    server: &Server,
    id: SubscriptionId,
    now: Timestamp,
    letters: &HashMap<u64, u64>,
) -> SubscriptionDetail {
    let letters = letters.get(&id.0).copied().unwrap_or(0);
    let letters_trouble = server.engine.dead_letters.trouble(id).filter(|_| letters > 0);
    // Events that are being sent right now are in no list of busy ones.
    let waits = SubscriptionBacklog::of(&server.engine.log().backlog(id));
    let Some(outlet) = server.engine.dispatcher.outlet(id) else {
        return SubscriptionDetail {
            waits,
            letters,
            letters_trouble,
            ..SubscriptionDetail::default()
        };
    };
    // Some profiles have no probation.
    let state = outlet
        .plan()
        .filter(|plan| plan.sender().has_probation)
        .map(|plan| plan.endpoint.state_for(id));
    let delay = state.as_ref().and_then(ProbationDelay::of);
    SubscriptionDetail {
        waits,
        letters,
        letters_trouble,
        probing: delay.is_some() && state.is_some_and(|state| state.probing),
        delay,
        recent: outlet.meter.recent(now, HEALTH_MINUTES).into(),
        hour: outlet.meter.recent(now, LOSS_MINUTES).into(),
        ..SubscriptionDetail::default()
    }
}

/// The state of subscriptions over all nodes, in their order, and the names of nodes that did not
/// reply.
pub async fn details(
    server: &Server,
    ids: impl Iterator<Item = SubscriptionId>,
    now: Timestamp,
) -> (Vec<SubscriptionDetail>, Vec<String>) {
    let asked = SubscriptionDetailsRequest {
        now: now.nanos(),
        ids: ids.map(|id| id.0).collect(),
    };
    let Some(peers) = &server.peers else {
        return (own_details(server, asked), Vec::new());
    };
    let heard: PeerResponses<Vec<SubscriptionDetail>> = gather(&**peers, "details", &asked).await;
    let mut sums = vec![SubscriptionDetail::default(); asked.ids.len()];
    for (_, details) in heard.answers {
        for (sum, detail) in sums.iter_mut().zip(details) {
            sum.add(detail);
        }
    }
    (sums, heard.missing)
}

/// Peer request for a series: of one topic, of one subscription, or of everything.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SeriesRequest {
    pub topic: Option<u64>,
    pub subscription: Option<u64>,
    pub minutes: usize,
    pub now: i64,
}

/// Counts of one minute, in a peer reply.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MinuteCounts {
    number: i64,
    counts: [u64; 5],
    latency: LatencyBucketCounts,
}

impl From<MinuteTally> for MinuteCounts {
    fn from(tally: MinuteTally) -> MinuteCounts {
        MinuteCounts {
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

impl From<MinuteCounts> for MinuteTally {
    fn from(minute: MinuteCounts) -> MinuteTally {
        let [published, delivered, failed, dead_lettered, dropped] = minute.counts;
        MinuteTally {
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

fn own_tallies(server: &Server, asked: SeriesRequest) -> Vec<MinuteTally> {
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

pub fn own_series(server: &Server, asked: SeriesRequest) -> Vec<MinuteCounts> {
    let tallies = own_tallies(server, asked).into_iter();
    tallies.map(MinuteCounts::from).collect()
}

/// Counts of each minute over all nodes, and the names of nodes that did not reply.
pub async fn tallies(server: &Server, asked: SeriesRequest) -> (Vec<MinuteTally>, Vec<String>) {
    let Some(peers) = &server.peers else {
        return (own_tallies(server, asked), Vec::new());
    };
    let heard: PeerResponses<Vec<MinuteCounts>> = gather(&**peers, "series", &asked).await;
    let minutes = heard.answers.into_iter().flat_map(|(_, minutes)| minutes);
    (minutes.map(MinuteTally::from).collect(), heard.missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delayed(since: i64, until: i64, cause: &str) -> ProbationDelay {
        ProbationDelay {
            until,
            since,
            cause: cause.into(),
            status: None,
        }
    }

    #[test]
    fn what_nodes_count_is_added_up() {
        let one = NodeStatistics {
            letters: 2,
            since: Some(70),
            ailing: BTreeSet::from([3]),
            counted: DeliveryCounts {
                delivered: 1,
                matched: 10,
                ..DeliveryCounts::default()
            },
            metered: MeterReadings {
                published: 1.5,
                latency: vec![(10, 90)],
                ..MeterReadings::default()
            },
            busy: HashMap::from([(
                1,
                SubscriptionBacklog {
                    waiting: 5,
                    retrying: 1,
                    oldest: Some(100),
                },
            )]),
            topics: HashMap::from([(
                7,
                TopicPublishCounts {
                    events: 3,
                    per_sec: 0.5,
                    ..TopicPublishCounts::default()
                },
            )]),
            sick: BTreeMap::from([(
                "e".to_owned(),
                EndpointOnProbation {
                    probing: false,
                    delay: delayed(10, 20, "Busy"),
                    waiting: 2,
                    subscriptions: BTreeSet::from([1]),
                },
            )]),
        };
        let mut other = one.clone();
        other.metered.latency = vec![(80, 10)];
        other.ailing = BTreeSet::from([4]);
        other.since = Some(60);
        other.busy.insert(
            2,
            SubscriptionBacklog {
                waiting: 0,
                retrying: 9,
                oldest: None,
            },
        );
        other.busy.insert(
            1,
            SubscriptionBacklog {
                waiting: 1,
                retrying: 0,
                oldest: Some(50),
            },
        );
        let sick = EndpointOnProbation {
            probing: true,
            delay: delayed(12, 30, "TimedOut"),
            waiting: 3,
            subscriptions: BTreeSet::from([1, 2]),
        };
        other.sick.insert("e".into(), sick);
        let mut sum = NodeStatistics::default();
        sum.add(one.clone());
        sum.add(other);
        assert_eq!((sum.counted.delivered, sum.counted.matched), (2, 20));
        assert_eq!(sum.metered.published, 3.0);
        assert_eq!((sum.letters, sum.since()), (4, Some(Timestamp::from_nanos(60))));
        assert_eq!(sum.ailing, BTreeSet::from([3, 4]));
        // A tenth of the deliveries was slow, at one of the nodes: the median is not slow, the
        // ninety-fifth percentile is.
        let found = sum.metered.latency().unwrap();
        let slow = LatencyQuantiles::of(&[(80, 1)]).unwrap().p50;
        assert!(found.p50 < slow / 10 && found.p95 > slow / 2, "{found:?}");
        assert_eq!(
            sum.busy[&1],
            SubscriptionBacklog {
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
        assert_eq!(sum.published(TopicId(8)), TopicPublishCounts::default());
        let expected = EndpointOnProbation {
            probing: true,
            delay: delayed(10, 30, "TimedOut"),
            waiting: 5,
            subscriptions: BTreeSet::from([1, 2]),
        };
        assert_eq!(sum.sick["e"], expected);
        // Serialized as between nodes.
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<NodeStatistics>(&text).unwrap(), one);
    }

    #[test]
    fn an_endpoint_that_is_delayed_anywhere_is_delayed() {
        let mut sum = SubscriptionDetail::default();
        sum.add(SubscriptionDetail {
            letters: 2,
            ..SubscriptionDetail::default()
        });
        sum.add(SubscriptionDetail {
            letters: 3,
            delay: Some(delayed(1, 2, "Busy")),
            ..SubscriptionDetail::default()
        });
        sum.add(SubscriptionDetail {
            probing: true,
            ..SubscriptionDetail::default()
        });
        assert_eq!((sum.letters, sum.probing), (5, true));
        assert!(sum.health_numbers(Timestamp::MIN, None).delay.is_some());
        let paused = sum.health_numbers(Timestamp::MIN, Some(Timestamp::MIN));
        assert_eq!(paused.delay, None, "a paused subscription waits for nothing else");
        assert_eq!(sum.delay, Some(delayed(1, 2, "Busy")));
        // The node that got the answer knows its status; another node may keep the endpoint on
        // probation for longer.
        let answered = ProbationDelay {
            status: Some(503),
            ..delayed(1, 2, "Busy")
        };
        let both = ProbationDelay::longer(Some(delayed(1, 9, "Busy")), Some(answered.clone())).unwrap();
        assert_eq!(both.cause_text(), "HTTP 503 Service Unavailable");
        let both = ProbationDelay::longer(Some(delayed(1, 9, "TimedOut")), Some(answered)).unwrap();
        assert_eq!(both.cause_text(), "no answer in time");
    }

    #[test]
    fn recent_counts_of_nodes_are_added_up() {
        let counts = |delivered: u64, status: u16, dropped: u64| {
            let cause = FailureCause {
                effect: FailureEffect::Dropped(GiveUpReason::BadRequest),
                outcome: Some(Outcome::BadRequest),
                status: Some(status),
            };
            let attempt = FailureCause {
                effect: FailureEffect::AttemptFailed,
                ..cause
            };
            RecentCounts {
                attempts: delivered + dropped,
                failed: dropped,
                delivered,
                dead_lettered: 0,
                dropped,
                causes: [(cause, dropped), (attempt, dropped)].into(),
            }
        };
        let mut sum = RecentDeliveryOutcomes::from(counts(5, 400, 2));
        // Serialized as between nodes.
        let text = serde_json::to_string(&RecentDeliveryOutcomes::from(counts(1, 404, 3))).unwrap();
        sum.add(&serde_json::from_str(&text).unwrap());
        let mut expected = counts(5, 400, 2);
        expected.add(&counts(1, 404, 3));
        assert_eq!(RecentCounts::from(&sum), expected);
        // Replies of nodes of an older version lack these members.
        let mut old = serde_json::to_value(SubscriptionDetail::default()).unwrap();
        for member in ["recent", "hour"] {
            old.as_object_mut().unwrap().remove(member);
        }
        assert_eq!(
            serde_json::from_value::<SubscriptionDetail>(old).unwrap(),
            SubscriptionDetail::default()
        );
    }
}
