//! `/metrics`: counters and gauges in Prometheus' format.

mod names;
mod nodes;
mod page;
#[cfg(test)]
mod tests;

pub use names::MetricNameSets;

use crate::Server;
use crate::cluster::{self, ClusterState};
use crate::http::{Answer, ApiCall, ResponseContent, empty};
use crate::limits::ClientLimit;
use crate::own_api::{Problem, open_on_loopback};
use crate::publish_refusals::PublishRefusalReason;
use crate::throttle::CredentialKind;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, StatusCode};
use page::{MetricKind, MetricsPage};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{Subscription, TopicKind};
use postrider_core::time::Timestamp;
use postrider_engine::counters::{DeliveryCounters, PublishCounters};
use postrider_engine::directory::TopicEntry;
use postrider_engine::meters::{DURATION_BOUNDS, Histogram, LATENCY_BOUNDS, Meter, MeterTotals};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// Topics with series of their own; the others are summed up. For subscriptions the engine decides.
const TOPICS_LABELLED_MAX: usize = 2000;
/// Topics with histograms of their own: a histogram has forty lines.
const HISTOGRAMS_MAX: usize = 200;
/// How long fresh facts about JetStream are waited for before the last known ones are shown.
const LOOK_PATIENCE: Duration = Duration::from_millis(300);
/// Name of the topic or subscription in series that are summed up. No real name can contain
/// parentheses.
const OTHERS: &str = "(others)";

/// State that `/metrics` keeps between requests.
#[derive(Debug, Default)]
pub(crate) struct MonotonicCounters {
    /// Last values of the counters that sum up several topics. Deleting a topic reduces the sum,
    /// which readers of counters would take for a restart, so a counter never shows less than
    /// before.
    least: Mutex<HashMap<String, f64>>,
}

pub async fn answer(server: &Server, call: &ApiCall) -> Answer {
    if !matches!(call.method, Method::GET | Method::HEAD) {
        return Problem::method("GET").answer(&call.id);
    }
    if let Err(problem) = open_on_loopback(server, call) {
        return problem.answer(&call.id);
    }
    let cluster = cluster::look(server, LOOK_PATIENCE).await;
    let mut answer = empty(StatusCode::OK, &call.id);
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, content_type);
    *answer.body_mut() = ResponseContent::Whole(Full::new(text(server, cluster.as_ref()).into()));
    answer
}

pub(crate) fn text(server: &Server, cluster: Option<&ClusterState>) -> String {
    page_of(server, cluster, &MetricValues::of(server))
}

/// All metric families, without the series of topics and subscriptions.
pub(crate) fn families(server: &Server, cluster: Option<&ClusterState>) -> String {
    page_of(server, cluster, &MetricValues::none(server.engine.clock.now()))
}

fn page_of(server: &Server, cluster: Option<&ClusterState>, numbers: &MetricValues) -> String {
    let mut page = MetricsPage::default();
    published(&mut page, numbers, &server.shown);
    deliveries(&mut page, numbers);
    histograms(&mut page, numbers, &server.shown);
    of_the_server(&mut page, server);
    of_clients(&mut page, server);
    publish_refusals(&mut page, server);
    if let Some(cluster) = cluster {
        nodes::cluster(&mut page, cluster);
    }
    if server.metric_names.azure {
        names::azure(&mut page, numbers);
    }
    if server.metric_names.edge {
        names::edge(&mut page, numbers);
    }
    page.text
}

/// The numbers of all topics and subscriptions at one moment.
struct MetricValues {
    now: Timestamp,
    topics: Vec<TopicMetrics>,
    /// Sum of the topics without series of their own; none if there are none.
    other_topics: Option<TopicMetrics>,
    subscriptions: Vec<SubscriptionMetrics>,
    /// By topic, for topics with a non-zero total.
    totals: Vec<(String, MeterTotals)>,
    other_totals: Option<MeterTotals>,
}

#[derive(Default)]
struct TopicMetrics {
    label: String,
    /// Whether the topic is a domain or lies in one. Azure's metric names differ for these.
    domain: bool,
    requests: u64,
    events: u64,
    unmatched: u64,
    refused: u64,
    refused_by_trouble: u64,
    micros: u64,
}

/// Numbers of one subscription, or the sum of those without series of their own.
#[derive(Default)]
struct SubscriptionMetrics {
    topic: String,
    domain: bool,
    domain_topic: Option<String>,
    name: String,
    labels: String,
    matched: u64,
    attempts: u64,
    failed: u64,
    delivered: u64,
    late: u64,
    retried: u64,
    waiting: u64,
    retrying: u64,
    oldest: Option<Timestamp>,
    dead_lettered: [u64; GiveUpReason::ALL.len()],
    dropped: [u64; GiveUpReason::ALL.len()],
    totals: MeterTotals,
}

impl MetricValues {
    fn none(now: Timestamp) -> MetricValues {
        MetricValues {
            now,
            topics: Vec::new(),
            other_topics: None,
            subscriptions: Vec::new(),
            totals: Vec::new(),
            other_totals: None,
        }
    }

    fn of(server: &Server) -> MetricValues {
        let engine = &server.engine;
        let directory = &engine.directory;
        let mut entries = directory.topics();
        entries.extend(directory.domains());
        entries.extend(directory.system_topics());
        entries.extend(directory.scopes());
        let alive = |of: fn(&PublishCounters) -> &OnceLock<bool>| {
            let labelled = entries
                .iter()
                .filter(|entry| of(&entry.published).get() == Some(&true));
            labelled.count()
        };
        let mut labelled = alive(|of| &of.labelled);
        let mut in_full = alive(|of| &of.labelled_in_full);
        let mut numbers = MetricValues::none(engine.clock.now());
        numbers.topics.reserve(entries.len());
        let mut taken = HashSet::new();
        let mut others = SubscriptionMetrics {
            topic: OTHERS.into(),
            name: OTHERS.into(),
            ..SubscriptionMetrics::default()
        };
        let mut any_others = false;
        for entry in &entries {
            let label = label(entry, &mut taken);
            let domain = matches!(entry.topic.kind, TopicKind::Domain { .. });
            let totals = entry.published.meter.totals();
            if let Some(totals) = totals {
                match decide(&entry.published.labelled_in_full, &mut in_full, HISTOGRAMS_MAX) {
                    true => numbers.totals.push((label.clone(), totals)),
                    false => numbers.other_totals.get_or_insert_default().merge(&totals),
                }
            }
            for subscription in directory.subscriptions(entry.topic.id) {
                let outlet = engine.dispatcher.outlet(subscription.id);
                if outlet.as_ref().is_some_and(|outlet| !outlet.labelled) {
                    any_others = true;
                    others.add(server, &subscription);
                    continue;
                }
                let mut one = SubscriptionMetrics {
                    topic: label.clone(),
                    domain,
                    domain_topic: subscription.domain_topic.clone(),
                    name: subscription.name.clone(),
                    ..SubscriptionMetrics::default()
                };
                one.add(server, &subscription);
                numbers.subscriptions.push(one);
            }
            let labelled = decide(&entry.published.labelled, &mut labelled, TOPICS_LABELLED_MAX);
            let mut fresh = TopicMetrics {
                label,
                domain,
                ..TopicMetrics::default()
            };
            match labelled {
                true => {
                    fresh.add(&entry.published);
                    numbers.topics.push(fresh);
                }
                false => numbers
                    .other_topics
                    .get_or_insert_with(TopicMetrics::others)
                    .add(&entry.published),
            }
        }
        let gone = &engine.dispatcher.unlabelled;
        if any_others || gone.counters.attempts.load(Relaxed) > 0 {
            others.count(&gone.counters, &gone.meter);
            numbers.subscriptions.push(others);
        }
        for one in &mut numbers.subscriptions {
            let name = match &one.domain_topic {
                Some(inside) => format!("{inside}/{}", one.name),
                None => one.name.clone(),
            };
            one.labels = page::labels(&[("topic", &one.topic), ("subscription", &name)]);
        }
        numbers
    }
}

/// Whether a topic gets series of its own: decided when it is first seen, and never changed.
fn decide(decided: &OnceLock<bool>, so_far: &mut usize, max: usize) -> bool {
    *decided.get_or_init(|| {
        let room = *so_far < max;
        *so_far += usize::from(room);
        room
    })
}

/// Unique label of a topic. Topics of different kinds can have the same name.
fn label(entry: &TopicEntry, taken: &mut HashSet<String>) -> String {
    let topic = &entry.topic;
    let plain = match &topic.kind {
        TopicKind::Scope { source, .. } => source.clone(),
        _ => topic.name.clone(),
    };
    if taken.insert(plain.to_lowercase()) {
        return plain;
    }
    match &topic.kind {
        TopicKind::Domain { .. } => format!("domains/{plain}"),
        _ => format!("systemTopics/{}/{plain}", topic.resource_group),
    }
}

impl TopicMetrics {
    fn others() -> TopicMetrics {
        TopicMetrics {
            label: OTHERS.into(),
            ..TopicMetrics::default()
        }
    }

    fn add(&mut self, published: &PublishCounters) {
        let sums: [(&mut u64, &AtomicU64); 6] = [
            (&mut self.requests, &published.requests),
            (&mut self.events, &published.events),
            (&mut self.unmatched, &published.unmatched),
            (&mut self.refused, &published.refused),
            (&mut self.refused_by_trouble, &published.refused_by_trouble),
            (&mut self.micros, &published.micros),
        ];
        for (sum, count) in sums {
            *sum += count.load(Relaxed);
        }
    }
}

impl SubscriptionMetrics {
    fn add(&mut self, server: &Server, subscription: &Subscription) {
        let backlog = server.engine.log().backlog(subscription.id);
        self.waiting += backlog.waiting + backlog.claimed;
        self.retrying += backlog.retrying;
        self.oldest = self.oldest.into_iter().chain(backlog.oldest).min();
        if let Some(outlet) = server.engine.dispatcher.outlet(subscription.id) {
            self.count(&outlet.counters, &outlet.meter);
        }
    }

    fn count(&mut self, counters: &DeliveryCounters, meter: &Meter) {
        let sums: [(&mut u64, &AtomicU64); 6] = [
            (&mut self.matched, &counters.matched),
            (&mut self.attempts, &counters.attempts),
            (&mut self.failed, &counters.attempts_failed),
            (&mut self.delivered, &counters.delivered),
            (&mut self.late, &counters.delivered_late),
            (&mut self.retried, &counters.retried),
        ];
        for (sum, count) in sums {
            *sum += count.load(Relaxed);
        }
        for (sums, counts) in [
            (&mut self.dead_lettered, &counters.dead_lettered),
            (&mut self.dropped, &counters.dropped),
        ] {
            for (sum, count) in sums.iter_mut().zip(counts) {
                *sum += count.load(Relaxed);
            }
        }
        if let Some(totals) = meter.totals() {
            self.totals.merge(&totals);
        }
    }
}

/// The non-zero counts with their reasons.
fn by_reason(counts: &[u64]) -> impl Iterator<Item = (&'static str, u64)> {
    let named = GiveUpReason::ALL.iter().zip(counts);
    named
        .filter(|(_, n)| **n > 0)
        .map(|(reason, n)| (reason.name(), *n))
}

/// The outcomes with a non-zero count.
fn by_outcome(totals: &MeterTotals) -> impl Iterator<Item = (Outcome, u64)> {
    let named = Outcome::ALL.into_iter().zip(totals.outcomes);
    named.filter(|(_, n)| *n > 0)
}

fn published(page: &mut MetricsPage, numbers: &MetricValues, shown: &MonotonicCounters) {
    type Count = fn(&TopicMetrics) -> f64;
    let counts: [(&str, &str, Count); 5] = [
        (
            "postrider_publish_requests_total",
            "Publish requests that were accepted.",
            |t| t.requests as f64,
        ),
        (
            "postrider_published_events_total",
            "Events that were accepted.",
            |t| t.events as f64,
        ),
        (
            "postrider_unmatched_events_total",
            "Accepted events that no subscription wanted.",
            |t| t.unmatched as f64,
        ),
        (
            "postrider_publish_refused_total",
            "Publish requests that were refused.",
            |t| t.refused as f64,
        ),
        (
            "postrider_publish_seconds_total",
            "What accepted publish requests took together, from their arrival until they were durable.",
            |t| t.micros as f64 / 1e6,
        ),
    ];
    for (name, help, count) in counts {
        page.family(name, MetricKind::Counter, help);
        for topic in &numbers.topics {
            page.line(name, &page::labels(&[("topic", &topic.label)]), count(topic));
        }
        if let Some(others) = &numbers.other_topics {
            let labels = page::labels(&[("topic", OTHERS)]);
            let value = shown.at_least(name, count(others));
            page.line(name, &labels, value);
        }
    }
}

impl MonotonicCounters {
    fn at_least(&self, line: &str, value: f64) -> f64 {
        let mut least = self.least.lock().expect("no panic holds it");
        let known = least.entry(line.to_owned()).or_default();
        *known = known.max(value);
        *known
    }
}

fn deliveries(page: &mut MetricsPage, numbers: &MetricValues) {
    let all = &numbers.subscriptions;
    type Count = fn(&SubscriptionMetrics) -> u64;
    let counts: [(&str, MetricKind, &str, Count); 8] = [
        (
            "postrider_matched_events_total",
            MetricKind::Counter,
            "Events that a subscription wanted.",
            |s| s.matched,
        ),
        (
            "postrider_delivery_attempts_total",
            MetricKind::Counter,
            "Requests made to destinations.",
            |s| s.attempts,
        ),
        (
            "postrider_delivery_attempts_failed_total",
            MetricKind::Counter,
            "Those of them that failed.",
            |s| s.failed,
        ),
        (
            "postrider_delivered_events_total",
            MetricKind::Counter,
            "Events that arrived.",
            |s| s.delivered,
        ),
        (
            "postrider_delivered_late_events_total",
            MetricKind::Counter,
            "Those of them whose answer came after the time for it.",
            |s| s.late,
        ),
        (
            "postrider_retried_events_total",
            MetricKind::Counter,
            "Failed deliveries that were put off to a later time.",
            |s| s.retried,
        ),
        (
            "postrider_waiting_events",
            MetricKind::Gauge,
            "Events that wait for their first attempt or are under way.",
            |s| s.waiting,
        ),
        (
            "postrider_retrying_events",
            MetricKind::Gauge,
            "Events that wait for another attempt.",
            |s| s.retrying,
        ),
    ];
    for (name, kind, help, count) in counts {
        page.family(name, kind, help);
        for one in all {
            page.line(name, &one.labels, count(one));
        }
    }
    type ByReason = fn(&SubscriptionMetrics) -> &[u64];
    let with_reasons: [(&str, &str, ByReason); 2] = [
        (
            "postrider_dead_lettered_events_total",
            "Events that were given up and are in a dead-letter blob.",
            |s| &s.dead_lettered,
        ),
        (
            "postrider_dropped_events_total",
            "Events that were given up for good.",
            |s| &s.dropped,
        ),
    ];
    for (name, help, counts) in with_reasons {
        page.family(name, MetricKind::Counter, help);
        for one in all {
            for (reason, count) in by_reason(counts(one)) {
                page.line(name, &format!("{},reason=\"{reason}\"", one.labels), count);
            }
        }
    }
    let name = "postrider_delivery_attempt_outcomes_total";
    page.family(
        name,
        MetricKind::Counter,
        "Requests made to destinations, by what they came to.",
    );
    for one in all {
        for (outcome, count) in by_outcome(&one.totals) {
            page.line(name, &format!("{},outcome=\"{outcome}\"", one.labels), count);
        }
    }
    let name = "postrider_delivery_attempt_seconds_total";
    page.family(
        name,
        MetricKind::Counter,
        "What requests made to destinations took together.",
    );
    for one in all {
        page.line(name, &one.labels, one.totals.duration.sum.as_secs_f64());
    }
    let name = "postrider_oldest_undelivered_seconds";
    let help = "Age of the oldest event that has not arrived and is not given up; 0 if there is none.";
    page.family(name, MetricKind::Gauge, help);
    for one in all {
        let age = one
            .oldest
            .map_or(0.0, |oldest| numbers.now.since(oldest).as_secs_f64());
        page.line(name, &one.labels, age);
    }
}

fn histograms(page: &mut MetricsPage, numbers: &MetricValues, shown: &MonotonicCounters) {
    fn family<const BOUNDS: usize>(
        page: &mut MetricsPage,
        numbers: &MetricValues,
        shown: &MonotonicCounters,
        (name, help): (&str, &str),
        bounds: &[f64; BOUNDS],
        of: fn(&MeterTotals) -> &Histogram<BOUNDS>,
    ) {
        page.family(name, MetricKind::Histogram, help);
        for (topic, totals) in &numbers.totals {
            let labels = page::labels(&[("topic", topic)]);
            page.histogram(name, &labels, bounds, of(totals), |_, value| value);
        }
        if let Some(totals) = &numbers.other_totals {
            let labels = page::labels(&[("topic", OTHERS)]);
            page.histogram(name, &labels, bounds, of(totals), |line, value| {
                shown.at_least(line, value)
            });
        }
    }
    let latency = (
        "postrider_delivery_latency_seconds",
        "From the moment an event was accepted until it arrived.",
    );
    family(page, numbers, shown, latency, &LATENCY_BOUNDS, |t| &t.latency);
    let duration = (
        "postrider_attempt_duration_seconds",
        "From the beginning of a request to a destination until its answer, or the end of waiting for one.",
    );
    family(page, numbers, shown, duration, &DURATION_BOUNDS, |t| &t.duration);
}

/// Counted by reason only: unauthenticated clients can invent any number of topic names. The log
/// names topic and client.
fn publish_refusals(page: &mut MetricsPage, server: &Server) {
    let name = "postrider_publish_refused_by_reason_total";
    let help = "Publish requests that were refused, to unknown topics too, by reason.";
    page.family(name, MetricKind::Counter, help);
    for reason in PublishRefusalReason::ALL {
        let labels = page::labels(&[("reason", reason.name())]);
        page.line(name, &labels, server.publish_refusals.count(reason));
    }
}

/// Use of the resources that all clients share.
fn of_clients(page: &mut MetricsPage, server: &Server) {
    let name = "postrider_connections";
    page.family(name, MetricKind::Gauge, "Connections of clients that are open.");
    page.line(name, "", server.connections.count());
    let name = "postrider_client_limits_reached_total";
    let help = "Connections, requests and streams refused or cut because a client reached a limit, by limit.";
    page.family(name, MetricKind::Counter, help);
    for limit in ClientLimit::ALL {
        let labels = page::labels(&[("limit", limit.name())]);
        page.line(name, &labels, server.client_limits.count(limit));
    }
}

/// Counted by kind only: labels by address would be unbounded. The log names the addresses.
fn wrong_credentials(page: &mut MetricsPage, server: &Server) {
    let counts = server.throttle.counts();
    for (name, help, values) in [
        (
            "postrider_wrong_credentials_total",
            "Wrong secrets, keys and tokens that were looked at.",
            counts.wrong,
        ),
        (
            "postrider_throttled_credentials_total",
            "Attempts with a credential that were answered with 429, since wrong ones came from the same address.",
            counts.refused,
        ),
    ] {
        page.family(name, MetricKind::Counter, help);
        for (kind, value) in CredentialKind::NAMES.into_iter().zip(values) {
            page.line(name, &page::labels(&[("kind", kind)]), value);
        }
    }
    let name = "postrider_credential_lockouts_total";
    page.family(
        name,
        MetricKind::Counter,
        "Waits that wrong credentials have begun for an address.",
    );
    page.line(name, "", counts.lockouts);
}

fn of_the_server(page: &mut MetricsPage, server: &Server) {
    let engine = &server.engine;
    let counters = &engine.dispatcher.counters;
    let store = engine.log().health();
    let pending: u64 = engine
        .log()
        .pending_dead_letters()
        .iter()
        .map(|letters| letters.count)
        .sum();
    let delayed = engine.dispatcher.endpoints();
    let delayed = delayed.iter().filter(|one| one.state.delay.is_some()).count() as u64;
    let recorder = server.recordings.status();
    let cut_off = server
        .cluster
        .as_ref()
        .is_some_and(|view| !cluster::publish_refusal_reasons(&view.now()).is_empty());
    let up = store.refusing.is_none() && !engine.is_stopping() && !cut_off;
    let in_flight = engine.dispatcher.in_flight.usage();
    let lines: [(&str, MetricKind, &str, u64); 13] = [
        (
            "postrider_in_flight_bytes",
            MetricKind::Gauge,
            "Memory charged to deliveries under way; at most limits.in_flight_bytes_max.",
            in_flight.bytes as u64,
        ),
        (
            "postrider_in_flight_waiting",
            MetricKind::Gauge,
            "Deliveries that wait for room in limits.in_flight_bytes_max.",
            in_flight.waiting as u64,
        ),
        (
            "postrider_orphaned_tasks",
            MetricKind::Gauge,
            "Tasks under way for subscriptions that have been removed.",
            engine.dispatcher.orphaned_tasks() as u64,
        ),
        (
            "postrider_dead_letters_pending",
            MetricKind::Gauge,
            "Dead letters that are not in a blob yet.",
            pending,
        ),
        (
            "postrider_dead_letters_written_total",
            MetricKind::Counter,
            "Dead letters that are in a blob.",
            counters.dead_letters_written.load(Relaxed),
        ),
        (
            "postrider_blobs_written_total",
            MetricKind::Counter,
            "Blobs of dead letters.",
            counters.blobs_written.load(Relaxed),
        ),
        (
            "postrider_blobs_not_told_total",
            MetricKind::Counter,
            "Blobs that nobody could be told of.",
            engine.dead_letters.announcements_given_up.load(Relaxed),
        ),
        (
            "postrider_delayed_endpoints",
            MetricKind::Gauge,
            "Endpoints that are left alone.",
            delayed,
        ),
        (
            "postrider_log_bytes",
            MetricKind::Gauge,
            "Size of the log.",
            store.bytes,
        ),
        (
            "postrider_log_segments",
            MetricKind::Gauge,
            "Files of the log.",
            store.segments,
        ),
        (
            "postrider_log_corrupt_records_total",
            MetricKind::Counter,
            "Records that could not be read.",
            store.corrupt_records,
        ),
        (
            "postrider_recorder_lost_total",
            MetricKind::Counter,
            "What the flight recorder had no room for.",
            recorder.lost,
        ),
        (
            "postrider_up",
            MetricKind::Gauge,
            "1 while publishes would be accepted.",
            u64::from(up),
        ),
    ];
    for (name, kind, help, value) in lines {
        page.family(name, kind, help);
        page.line(name, "", value);
    }
    let spans = server.spans.as_deref();
    let spans = spans.map_or((0, 0), |c| (c.exported.load(Relaxed), c.dropped.load(Relaxed)));
    for (name, help, value) in [
        (
            "postrider_traces_exported_total",
            "Spans that a collector has taken.",
            spans.0,
        ),
        (
            "postrider_traces_dropped_total",
            "Spans that could not be exported.",
            spans.1,
        ),
    ] {
        page.family(name, MetricKind::Counter, help);
        page.line(name, "", value);
    }
    wrong_credentials(page, server);
    let name = "postrider_proxy_faults_total";
    page.family(
        name,
        MetricKind::Counter,
        "Tunnels that the proxy of egress.proxy did not open.",
    );
    page.line(
        name,
        "",
        server.proxy.as_ref().map_or(0, |proxy| proxy.state().faults),
    );
    let name = "postrider_build_info";
    page.family(name, MetricKind::Gauge, "Which program this is; always 1.");
    let labels = [
        ("version", server.config.version),
        ("profile", server.config.profile.as_str()),
    ];
    page.line(name, &page::labels(&labels), 1);
}
