//! Statistics and health: `/postrider/v1/server`, `stats`, `stats/series`, `subscriptions` and
//! `subscription`.

#[cfg(test)]
mod tests;

use crate::Server;
use crate::dead_letters::read_query;
use crate::events::age;
use crate::handshakes::resource_id;
use crate::own_api::Problem;
use crate::peers::note_missing;
use crate::peers::statistics::{
    self, DeliveryCounts, MeterReadings, NodeStatistics, ProbationDelay, SICK_SUBSCRIPTIONS_MAX,
    SeriesRequest, SubscriptionBacklog, SubscriptionDetail, TopicPublishCounts,
};
use crate::{azure, lookup};
use postrider_core::duration;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{BatchLimits, Subscription, TopicKind};
use postrider_core::time::Timestamp;
use postrider_engine::directory::TopicEntry;
use postrider_engine::meters::{
    FailureCause, FailureEffect, LatencyQuantiles, MINUTES_OF_ALL, MINUTES_OF_ONE, MinuteSeries,
};
use postrider_engine::subscription_health::{
    HEALTH_MINUTES, HealthReason, HealthVerdict, SubscriptionHealth, describe,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const TOP: usize = 50;
const TOP_MAX: usize = 1000;
/// Topics that are shown if the query names none.
const TOPICS_MAX: usize = 1000;
/// Minutes that are shown if the query gives no number.
const SERIES_MINUTES: usize = 60;
/// Subscriptions that the verdict lists individually; all of them are counted.
const VERDICT_NAMED_MAX: usize = 50;
/// Health values that need an operator's attention.
const ATTENTION: [&str; 2] = [
    SubscriptionHealth::Attention.name(),
    SubscriptionHealth::Failing.name(),
];
/// The same names as in `endpoints`.
const STATES: [&str; 4] = ["admitting", "delayed", "probing", "paused"];

/// `GET server`
pub(crate) fn server(server: &Server, query: &str) -> Result<Value, Problem> {
    read_query(query, &[])?;
    let config = &server.config;
    let profiles: Vec<&str> = server.engine.profiles.iter().map(|one| one.name).collect();
    let accounts: Vec<&str> = config
        .storage_accounts
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    let mut shown = json!({
        "version": config.version,
        "profile": config.profile,
        "profiles": profiles,
        "azure": {
            "subscription": config.account,
            "tenant": config.tenant,
            "resourceGroup": config.resource_group,
            "location": config.location,
        },
        "storageAccounts": accounts,
        "recorder": recorder(server),
        "batchDefaults": batch_limits(config.resource_limits.batch_defaults.cloud),
        "testClock": server.virtual_time.is_some(),
    });
    if let Some(place) = &server.engine.dead_letters.fallback {
        let account = place.account_name();
        shown["deadLetterDefault"] = json!(format!("{account}/{}", place.container));
    }
    if let Some(url) = &config.public_url {
        shown["publicUrl"] = json!(url);
    }
    Ok(shown)
}

fn batch_limits(limits: BatchLimits) -> Value {
    json!({"maxEventsPerBatch": limits.events_max, "preferredBatchSizeInKilobytes": limits.kilobytes})
}

fn recorder(server: &Server) -> Value {
    let status = server.recordings.status();
    let mut shown = json!({"enabled": status.on});
    if let Some(bounds) = server.recording_bounds {
        shown["keep"] = json!(duration::print(bounds.keep));
        shown["bytes"] = json!(bounds.bytes_max);
    }
    if status.on {
        shown["used"] = json!(status.bytes);
        shown["segments"] = json!(status.segments);
        shown["lost"] = json!(status.lost);
        shown["indexing"] = json!(status.indexing);
    }
    if let Some(oldest) = status.oldest {
        shown["oldest"] = json!(oldest.to_string());
    }
    if let Some(trouble) = status.trouble {
        shown["trouble"] = json!(trouble);
    }
    shown
}

/// `GET stats`: all counters; rates over the last minute, percentiles over the last quarter of an
/// hour.
pub(crate) async fn stats(server: &Server, query: &str) -> Result<Value, Problem> {
    let mut topics: Option<Vec<String>> = None;
    let mut window = ListWindow::default();
    for (name, value) in read_query(query, &["topics", "top", "skip"])? {
        match name {
            "topics" => topics = Some(value.split(',').map(str::to_lowercase).collect()),
            _ => window.read(name, &value)?,
        }
    }
    let engine = &server.engine;
    let now = engine.clock.now();
    let (numbers, mut missing) = statistics::all(server, now).await;
    let directory = &engine.directory;
    let mut all = directory.topics();
    all.extend(directory.domains());
    all.extend(directory.system_topics());
    let hidden = directory.scopes();
    let sum = |counter: fn(&TopicPublishCounts) -> u64| -> u64 {
        let topics = all.iter().chain(&hidden);
        topics
            .map(|entry| counter(&numbers.published(entry.topic.id)))
            .sum()
    };
    let mut subscriptions = directory.all_subscriptions();
    let ailing: Vec<Arc<Subscription>> = subscriptions
        .iter()
        .filter(|one| numbers.ailing.contains(&one.id.0))
        .cloned()
        .collect();
    let letters = WrittenDeadLetters::count(server).await;
    let (examined, more) = show_all(server, &letters, &ailing, now).await;
    missing.extend(more);
    let mut totals = counts(&numbers.counted, letters.all());
    totals["deadLettersPending"] = json!(numbers.letters);
    totals["published"] = json!(sum(|published| published.events));
    totals["publishRefused"] = json!(sum(|published| published.refused));
    totals["unmatched"] = json!(sum(|published| published.unmatched));
    totals["matched"] = json!(numbers.counted.matched);
    totals["pending"] = json!(numbers.busy.values().map(SubscriptionBacklog::all).sum::<u64>());
    // Hidden topics of other providers' resources have no name, so that no query selects them; the
    // totals above include them.
    if let Some(names) = &topics {
        all.retain(|entry| names.contains(&entry.topic.name.to_lowercase()));
    }
    all.sort_by_key(|entry| std::cmp::Reverse(numbers.published(entry.topic.id).events));
    all.truncate(TOPICS_MAX);
    let topics: Vec<Value> = all.iter().map(|entry| topic(server, entry, &numbers)).collect();
    let sick = numbers.sick.iter().map(|(endpoint, sick)| {
        let named = sick.subscriptions.iter().filter_map(|id| {
            let subscription = directory.subscription_by_id(SubscriptionId(*id))?;
            let topic = directory.topic_by_id(subscription.topic)?;
            let id = resource_id(server, &subscription);
            Some(json!({"topic": topic.topic.name, "name": subscription.name, "id": id}))
        });
        let mut shown = json!({
            "endpoint": endpoint,
            "state": endpoint_state(true, sick.probing),
            "cause": sick.delay.cause,
            "causeText": sick.delay.cause_text(),
            "since": sick.delay.since().to_string(),
            "until": sick.delay.until().to_string(),
            "waiting": sick.waiting,
            "subscriptions": named.take(SICK_SUBSCRIPTIONS_MAX).collect::<Vec<_>>(),
        });
        if let Some(status) = sick.delay.status {
            shown["status"] = json!(status);
        }
        shown
    });
    let rates = &numbers.metered;
    let mut shown = json!({
        "now": now.to_string(),
        "since": numbers.since().unwrap_or(now).to_string(),
        "verdict": verdict(examined, &missing),
        "totals": totals,
        "rates": {
            "publishedPerSec": rounded(rates.published),
            "deliveredPerSec": rounded(rates.delivered),
            "failedPerSec": rounded(rates.failed),
        },
        "sick": sick.collect::<Vec<_>>(),
        "topics": topics,
    });
    if let Some(latency) = latency(&numbers.metered) {
        shown["latencyMs"] = latency;
    }
    if let Some(oldest) = numbers
        .busy
        .values()
        .filter_map(SubscriptionBacklog::oldest)
        .min()
    {
        shown["oldestUndeliveredSeconds"] = json!(age(now, oldest));
    }
    // Subscriptions with the largest backlog first.
    subscriptions.sort_by_key(|one| (std::cmp::Reverse(numbers.waiting(one.id)), one.id));
    let (page, more) = show_all(server, &letters, window.of(&subscriptions), now).await;
    shown["subscriptions"] = json!(page);
    missing.extend(more);
    note_missing(&mut shown, missing);
    Ok(shown)
}

/// The server's verdict, from the subscriptions that may need attention and the nodes that did not
/// reply.
fn verdict(examined: Vec<Value>, missing: &[String]) -> Value {
    let mut found: Vec<Value> = examined
        .into_iter()
        .filter(|one| ATTENTION.iter().any(|health| one["health"] == *health))
        .collect();
    // Failing subscriptions first, then by the number of lost events.
    found.sort_by_cached_key(|one| {
        let failing = one["health"] == SubscriptionHealth::Failing.name();
        let count = |at: usize| one["reasons"][at]["count"].as_u64();
        std::cmp::Reverse((failing, count(0)))
    });
    let count = found.len();
    let text = match (count, missing.len()) {
        (0, 0) => "All well".to_owned(),
        (0, 1) => "1 node did not answer".to_owned(),
        (0, nodes) => format!("{nodes} nodes did not answer"),
        (1, _) => "1 subscription needs attention".to_owned(),
        (statistics::AILING_MAX.., _) => format!("at least {count} subscriptions need attention"),
        (_, _) => format!("{count} subscriptions need attention"),
    };
    let status = match (count, missing) {
        (0, []) => "well",
        _ => "attention",
    };
    found.truncate(VERDICT_NAMED_MAX);
    let named = found.iter().map(|one| {
        let mut named = json!({});
        for member in [
            "name",
            "id",
            "topic",
            "domainTopic",
            "endpoint",
            "health",
            "reasons",
        ] {
            if let Some(value) = one.get(member) {
                named[member] = value.clone();
            }
        }
        named
    });
    json!({"status": status, "text": text, "count": count, "subscriptions": named.collect::<Vec<_>>()})
}

fn topic(server: &Server, entry: &TopicEntry, numbers: &NodeStatistics) -> Value {
    let published = numbers.published(entry.topic.id);
    let kind = match entry.topic.kind {
        TopicKind::Custom => "topic",
        TopicKind::Domain { .. } => "domain",
        TopicKind::System { .. } => "systemTopic",
        TopicKind::Scope { .. } => "other",
    };
    json!({
        "name": entry.topic.name,
        "kind": kind,
        "resourceId": lookup::id(server, entry),
        "published": published.events,
        "refused": published.refused,
        "unmatched": published.unmatched,
        "publishedPerSec": rounded(published.per_sec),
    })
}

/// `GET stats/series`: counts of each of the last minutes, of everything, of a topic or of a
/// subscription.
pub(crate) async fn series(server: &Server, query: &str) -> Result<Value, Problem> {
    let (mut of_topic, mut of_subscription, mut minutes) = (None, None, None);
    for (name, value) in read_query(query, &["subscription", "topic", "minutes"])? {
        match name {
            _ if value.is_empty() => {}
            "topic" => of_topic = Some(lookup::topic(server, &value)?),
            "subscription" => of_subscription = Some(lookup::subscription(server, "subscription", &value)?),
            _ => minutes = Some(value),
        }
    }
    let one = of_topic.is_some() || of_subscription.is_some();
    let max = if one { MINUTES_OF_ONE } else { MINUTES_OF_ALL };
    let minutes = match minutes {
        None => SERIES_MINUTES,
        Some(text) => {
            let of = if one { " for one topic or subscription" } else { "" };
            let reason = || format!("must be a number from 1 to {max}{of}");
            let number = text.parse().ok().filter(|n| (1..=max).contains(n));
            number.ok_or_else(|| Problem::field("minutes", reason()))?
        }
    };
    if of_subscription.is_some() && of_topic.is_some() {
        let reason = "cannot be given with subscription, which has a topic";
        return Err(Problem::field("topic", reason));
    }
    let now = server.engine.clock.now();
    let asked = SeriesRequest {
        topic: of_topic.map(|entry| entry.topic.id.0),
        subscription: of_subscription.as_ref().map(|subscription| subscription.id.0),
        minutes,
        now: now.nanos(),
    };
    let (tallies, missing) = statistics::tallies(server, asked).await;
    let series = MinuteSeries::of(now, minutes, &tallies);
    let percentile = |which: fn(&LatencyQuantiles) -> Duration| -> Value {
        let all = series.latency.iter();
        all.map(|one| one.as_ref().map(|one| millis(which(one))))
            .collect()
    };
    let mut shown = json!({
        "since": server.engine.counted_since().to_string(),
        "start": series.start.to_string(),
        "stepSeconds": 60,
        "delivered": series.delivered,
        "failed": series.failed,
        "deadLettered": series.dead_lettered,
        "dropped": series.dropped,
        "p50Ms": percentile(|one| one.p50),
        "p95Ms": percentile(|one| one.p95),
        "p99Ms": percentile(|one| one.p99),
    });
    // Events are not published to a subscription.
    if of_subscription.is_none() {
        shown["published"] = json!(series.published);
    }
    note_missing(&mut shown, missing);
    Ok(shown)
}

fn latency(metered: &MeterReadings) -> Option<Value> {
    let found = metered.latency()?;
    Some(json!({"p50": millis(found.p50), "p95": millis(found.p95), "p99": millis(found.p99)}))
}

fn millis(took: Duration) -> f64 {
    rounded(took.as_secs_f64() * 1000.0)
}

/// Three decimal places; more are of no use to readers.
fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

/// `GET subscriptions`
pub(crate) async fn subscriptions(server: &Server, query: &str) -> Result<Value, Problem> {
    let (mut topic, mut state, mut health, mut text) = (None, None, None, None);
    let mut window = ListWindow::default();
    for (name, value) in read_query(query, &["topic", "state", "health", "q", "top", "skip"])? {
        match name {
            _ if value.is_empty() => {}
            "topic" => topic = Some(lookup::topic(server, &value)?.topic.id),
            "state" => {
                let known = STATES
                    .into_iter()
                    .find(|known| known.eq_ignore_ascii_case(&value));
                let reason = || format!("{value:?} is not one of {}", STATES.join(", "));
                state = Some(known.ok_or_else(|| Problem::field("state", reason()))?);
            }
            "health" => {
                let names = SubscriptionHealth::ALL.map(SubscriptionHealth::name);
                let known = names.into_iter().find(|known| known.eq_ignore_ascii_case(&value));
                let reason = || format!("{value:?} is not one of {}", names.join(", "));
                health = Some(known.ok_or_else(|| Problem::field("health", reason()))?);
            }
            "q" => text = Some(value.to_lowercase()),
            _ => window.read(name, &value)?,
        }
    }
    let directory = &server.engine.directory;
    let mut found = match topic {
        Some(topic) => directory.subscriptions(topic),
        None => directory.all_subscriptions(),
    };
    let has =
        |whole: Option<String>, part: &str| whole.is_some_and(|text| text.to_lowercase().contains(part));
    found.retain(|one| {
        state.is_none_or(|state| ShownEndpointState::of(server, one.id).state == state)
            && text
                .as_deref()
                .is_none_or(|text| one.name.to_lowercase().contains(text) || has(endpoint(server, one), text))
    });
    let now = server.engine.clock.now();
    let mut missing = Vec::new();
    if let Some(health) = health {
        let mut kept = Vec::new();
        for some in found.chunks(TOP_MAX) {
            let (details, more) = statistics::details(server, some.iter().map(|one| one.id), now).await;
            missing.extend(more);
            let is = |(one, detail): &(&Arc<Subscription>, SubscriptionDetail)| {
                let judged = detail.health_numbers(now, one.pauses.since());
                HealthVerdict::of(&judged).health.name() == health
            };
            let all = some.iter().zip(details).filter(is);
            kept.extend(all.map(|(one, _)| one.clone()));
        }
        found = kept;
    }
    let letters = WrittenDeadLetters::count(server).await;
    let (value, more) = show_all(server, &letters, window.of(&found), now).await;
    missing.extend(more);
    let mut shown = json!({"value": value, "total": found.len()});
    note_missing(&mut shown, missing);
    Ok(shown)
}

/// `GET subscription?id=`
pub(crate) async fn subscription(server: &Server, query: &str) -> Result<Value, Problem> {
    let mut id = None;
    for (_, value) in read_query(query, &["id"])? {
        id = Some(value);
    }
    let (found, resource) = find_with_resource(server, id)?;
    let mut shown = show(server, &found).await;
    shown["resource"] = resource;
    Ok(shown)
}

/// The subscription that a query names, also one whose handshake is pending, and its resource body.
pub(crate) fn find_with_resource(
    server: &Server,
    id: Option<String>,
) -> Result<(Arc<Subscription>, Value), Problem> {
    let id = id.filter(|id| !id.is_empty());
    let id = id.ok_or_else(|| Problem::field("id", "must be the resource id of a subscription"))?;
    let seen = match id.starts_with('/') {
        true => azure::subscriptions::find_visible(server, &id),
        false => {
            let found = lookup::subscription(server, "id", &id)?;
            resource_id(server, &found).and_then(|id| azure::subscriptions::find_visible(server, &id))
        }
    };
    seen.ok_or_else(|| lookup::missing("id", &id))
}

/// A subscription as lists show it.
pub(crate) async fn show(server: &Server, subscription: &Arc<Subscription>) -> Value {
    let now = server.engine.clock.now();
    let letters = WrittenDeadLetters::count(server).await;
    let (mut shown, missing) = show_all(server, &letters, std::slice::from_ref(subscription), now).await;
    let mut shown = shown.pop().unwrap_or_default();
    note_missing(&mut shown, missing);
    shown
}

/// Dead letters that are in blobs and not purged, by subscription and reason, as
/// `deadletters/summary` counts them. None if they cannot be read now.
struct WrittenDeadLetters(Option<BTreeMap<SubscriptionId, DeadLettersByReason>>);

type DeadLettersByReason = BTreeMap<&'static str, u64>;

impl WrittenDeadLetters {
    async fn count(server: &Server) -> WrittenDeadLetters {
        let counts = match server.engine.dead_letters.archive.counts().await {
            Ok(counts) => counts,
            Err(e) => {
                tracing::debug!(error = %e, "dead letters cannot be counted");
                return WrittenDeadLetters(None);
            }
        };
        let mut written: BTreeMap<SubscriptionId, DeadLettersByReason> = BTreeMap::new();
        for (of, reason, count) in counts.into_iter().filter(|(.., count)| *count > 0) {
            *written.entry(of).or_default().entry(reason.name()).or_default() += count;
        }
        WrittenDeadLetters(Some(written))
    }

    fn of(&self, id: SubscriptionId) -> Option<DeadLettersByReason> {
        let written = self.0.as_ref()?;
        Some(written.get(&id).cloned().unwrap_or_default())
    }

    /// Over all subscriptions, including deleted ones.
    fn all(&self) -> Option<DeadLettersByReason> {
        let mut all = DeadLettersByReason::new();
        for (reason, count) in self.0.as_ref()?.values().flatten() {
            *all.entry(reason).or_default() += count;
        }
        Some(all)
    }
}

/// Subscriptions as lists show them, and the nodes that did not reply.
async fn show_all(
    server: &Server,
    letters: &WrittenDeadLetters,
    subscriptions: &[Arc<Subscription>],
    now: Timestamp,
) -> (Vec<Value>, Vec<String>) {
    let ids = subscriptions.iter().map(|one| one.id);
    let (details, missing) = statistics::details(server, ids, now).await;
    let all = subscriptions.iter().zip(details);
    let shown = all
        .map(|(one, detail)| show_one(server, letters, one, &detail, now))
        .collect();
    (shown, missing)
}

/// The requested part of a list.
struct ListWindow {
    top: usize,
    skip: usize,
}

impl Default for ListWindow {
    fn default() -> ListWindow {
        ListWindow { top: TOP, skip: 0 }
    }
}

impl ListWindow {
    fn read(&mut self, name: &'static str, value: &str) -> Result<(), Problem> {
        let number: Option<usize> = value.parse().ok();
        match name {
            "top" => {
                let number = number.filter(|n| *n <= TOP_MAX);
                let reason = format!("must be a number from 0 to {TOP_MAX}");
                self.top = number.ok_or_else(|| Problem::field("top", reason))?;
            }
            _ => self.skip = number.ok_or_else(|| Problem::field("skip", "must be a number"))?,
        }
        Ok(())
    }

    fn of<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        let rest = all.get(self.skip..).unwrap_or_default();
        rest.get(..self.top).unwrap_or(rest)
    }
}

fn show_one(
    server: &Server,
    letters: &WrittenDeadLetters,
    subscription: &Subscription,
    detail: &SubscriptionDetail,
    now: Timestamp,
) -> Value {
    let topic = server.engine.directory.topic_by_id(subscription.topic);
    let endpoint_state = ShownEndpointState::of(server, subscription.id).with(detail);
    let mut shown = counts(&detail.counted, letters.of(subscription.id));
    shown["deliveredPerSec"] = json!(rounded(detail.metered.delivered));
    shown["failedPerSec"] = json!(rounded(detail.metered.failed));
    if let Some(latency) = latency(&detail.metered) {
        shown["latencyMs"] = latency;
    }
    let failed = shown["attemptsFailed"].take();
    if let Some(members) = shown.as_object_mut() {
        members.remove("attemptsFailed");
    }
    shown["failed"] = failed;
    let judged = detail.health_numbers(now, subscription.pauses.since());
    let verdict = HealthVerdict::of(&judged);
    shown["health"] = json!(verdict.health.name());
    shown["reasons"] = verdict.reasons.iter().map(reason).collect();
    shown["recent"] = json!({
        "minutes": HEALTH_MINUTES,
        "attempts": judged.recent.attempts,
        "failed": judged.recent.failed,
        "delivered": judged.recent.delivered,
        "deadLettered": judged.recent.dead_lettered,
        "dropped": judged.recent.dropped,
    });
    shown["name"] = json!(subscription.name);
    shown["id"] = json!(resource_id(server, subscription));
    shown["topic"] = json!(topic.map(|entry| entry.topic.name.clone()));
    shown["endpoint"] = json!(endpoint(server, subscription));
    shown["state"] = json!(endpoint_state.state);
    shown["waiting"] = json!(detail.waits.waiting);
    shown["retrying"] = json!(detail.waits.retrying);
    shown["deadLettersPending"] = json!(detail.letters);
    if let Some(name) = &subscription.domain_topic {
        shown["domainTopic"] = json!(name);
    }
    if let Some(since) = endpoint_state.paused {
        shown["since"] = json!(since.to_string());
    }
    if let Some(delay) = endpoint_state.delay {
        shown["cause"] = json!(delay.cause);
        shown["causeText"] = json!(delay.cause_text());
        shown["since"] = json!(delay.since().to_string());
        shown["until"] = json!(delay.until().to_string());
    }
    if let Some(oldest) = detail.waits.oldest() {
        shown["oldestUndeliveredSeconds"] = json!(age(now, oldest));
    }
    shown
}

fn reason(reason: &HealthReason) -> Value {
    let mut shown = json!({"code": reason.kind.name(), "text": reason.text});
    if let Some(share) = reason.share {
        shown["count"] = json!(share.count);
        shown["of"] = json!(share.of);
        shown["minutes"] = json!(share.minutes);
        shown["causes"] = reason.causes.iter().map(cause).collect();
    }
    if let Some(todo) = reason.todo() {
        shown["todo"] = json!(todo);
    }
    shown
}

fn cause((cause, count): &(FailureCause, u64)) -> Value {
    let mut shown = json!({"count": count, "text": describe(cause)});
    if let FailureEffect::DeadLettered(reason) | FailureEffect::Dropped(reason) = cause.effect {
        shown["reason"] = json!(reason.name());
    }
    if let Some(outcome) = cause.outcome {
        shown["outcome"] = json!(outcome.name());
    }
    if let Some(status) = cause.status {
        shown["status"] = json!(status);
    }
    shown
}

/// State of a subscription's endpoint as it affects the subscription.
struct ShownEndpointState {
    state: &'static str,
    delay: Option<ProbationDelay>,
    /// Since when the subscription has been paused by an operator.
    paused: Option<Timestamp>,
}

impl ShownEndpointState {
    /// The state known to this node.
    fn of(server: &Server, id: SubscriptionId) -> ShownEndpointState {
        let outlet = server.engine.dispatcher.outlet(id);
        let Some(plan) = outlet.and_then(|outlet| outlet.plan()) else {
            return ShownEndpointState {
                state: endpoint_state(false, false),
                delay: None,
                paused: None,
            };
        };
        let paused = plan.subscription.pauses.since();
        if paused.is_some() {
            // A paused subscription sends nothing, so the state of its endpoint does not matter.
            return ShownEndpointState {
                state: STATES[3],
                delay: None,
                paused,
            };
        }
        let state = plan.endpoint.state_for(plan.subscription.id);
        // Some profiles have no probation.
        let delay = ProbationDelay::of(&state).filter(|_| plan.sender().has_probation);
        ShownEndpointState {
            state: endpoint_state(delay.is_some(), state.probing),
            delay,
            paused,
        }
    }

    /// The state known to all nodes.
    fn with(self, detail: &SubscriptionDetail) -> ShownEndpointState {
        if self.paused.is_some() {
            return self;
        }
        ShownEndpointState {
            state: endpoint_state(detail.delay.is_some(), detail.probing),
            delay: detail.delay.clone(),
            paused: None,
        }
    }
}

fn endpoint_state(delayed: bool, probing: bool) -> &'static str {
    match (delayed, probing) {
        (false, _) => STATES[0],
        (true, false) => STATES[1],
        (true, true) => STATES[2],
    }
}

/// Counts, with the dead letters that there are in blobs. Where they cannot be counted, those that were ever written.
fn counts(counted: &DeliveryCounts, written: Option<DeadLettersByReason>) -> Value {
    let by = |counts: &mut dyn Iterator<Item = (GiveUpReason, u64)>| -> DeadLettersByReason {
        counts.map(|(reason, count)| (reason.name(), count)).collect()
    };
    let (dead_lettered, dead_lettered_by) = match written {
        Some(written) => (written.values().sum::<u64>(), written),
        None => (counted.dead_lettered, by(&mut counted.dead_lettered_by())),
    };
    json!({
        "delivered": counted.delivered,
        "attempts": counted.attempts,
        "attemptsFailed": counted.failed,
        "deadLettered": dead_lettered,
        "deadLetteredBy": dead_lettered_by,
        "dropped": counted.dropped,
        "droppedBy": by(&mut counted.dropped_by()),
    })
}

/// Where events are delivered, without secrets.
fn endpoint(server: &Server, subscription: &Subscription) -> Option<String> {
    let outlet = server.engine.dispatcher.outlet(subscription.id);
    let plan = outlet.and_then(|outlet| outlet.plan());
    plan.map(|plan| plan.endpoint.name.to_string())
        .or_else(|| crate::handshakes::endpoint(subscription))
}
