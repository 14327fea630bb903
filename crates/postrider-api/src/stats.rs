//! How everything is: `/postrider/v1/server`, `stats`, `stats/series`, `subscriptions` and `subscription`.

#[cfg(test)]
mod tests;

use crate::Server;
use crate::dead_letters::read_query;
use crate::events::age;
use crate::handshakes::resource_id;
use crate::ours::Problem;
use crate::peers::note_missing;
use crate::peers::numbers::{
    self, Counted, Delayed, Detail, Metered, Numbers, Published, SeriesAsked, Waits,
};
use crate::{azure, named};
use postrider_core::duration;
use postrider_core::ids::SubscriptionId;
use postrider_core::subscription::{Subscription, TopicKind};
use postrider_core::time::Timestamp;
use postrider_engine::directory::TopicEntry;
use postrider_engine::meters::{MINUTES_OF_ALL, MINUTES_OF_ONE, Percentiles, Series};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const TOP: usize = 50;
const TOP_MAX: usize = 1000;
/// Topics that are shown where nobody says which.
const TOPICS_MAX: usize = 1000;
/// So many minutes are shown where nobody says how many.
const SERIES_MINUTES: usize = 60;
/// As `endpoints` says it too.
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
        "testClock": server.virtual_time.is_some(),
    });
    if let Some(url) = &config.public_url {
        shown["publicUrl"] = json!(url);
    }
    Ok(shown)
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

/// `GET stats`: everything that is counted; rates of the last minute, percentiles of the last quarter of an hour.
pub(crate) async fn stats(server: &Server, query: &str) -> Result<Value, Problem> {
    let mut topics: Option<Vec<String>> = None;
    let mut window = Window::default();
    for (name, value) in read_query(query, &["topics", "top", "skip"])? {
        match name {
            "topics" => topics = Some(value.split(',').map(str::to_lowercase).collect()),
            _ => window.read(name, &value)?,
        }
    }
    let engine = &server.engine;
    let now = engine.clock.now();
    let (numbers, mut missing) = numbers::all(server, now).await;
    let directory = &engine.directory;
    let mut all = directory.topics();
    all.extend(directory.domains());
    all.extend(directory.system_topics());
    let hidden = directory.scopes();
    let sum = |counter: fn(&Published) -> u64| -> u64 {
        let topics = all.iter().chain(&hidden);
        topics
            .map(|entry| counter(&numbers.published(entry.topic.id)))
            .sum()
    };
    let mut subscriptions = directory.all_subscriptions();
    let mut totals = counts(&numbers.counted);
    totals["published"] = json!(sum(|published| published.events));
    totals["publishRefused"] = json!(sum(|published| published.refused));
    totals["unmatched"] = json!(sum(|published| published.unmatched));
    totals["matched"] = json!(numbers.counted.matched);
    totals["pending"] = json!(numbers.busy.values().map(Waits::all).sum::<u64>());
    // Those of other resources have no name of their own, but count.
    if let Some(names) = &topics {
        all.retain(|entry| names.contains(&entry.topic.name.to_lowercase()));
    }
    all.sort_by_key(|entry| std::cmp::Reverse(numbers.published(entry.topic.id).events));
    all.truncate(TOPICS_MAX);
    let topics: Vec<Value> = all.iter().map(|entry| topic(server, entry, &numbers)).collect();
    let sick = numbers.sick.iter().map(|(endpoint, sick)| {
        json!({
            "endpoint": endpoint,
            "state": health(true, sick.probing),
            "cause": sick.delay.cause,
            "since": sick.delay.since().to_string(),
            "until": sick.delay.until().to_string(),
            "waiting": sick.waiting,
        })
    });
    let rates = &numbers.metered;
    let mut shown = json!({
        "now": now.to_string(),
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
    if let Some(oldest) = numbers.busy.values().filter_map(Waits::oldest).min() {
        shown["oldestUndeliveredSeconds"] = json!(age(now, oldest));
    }
    // Those with the most to do first.
    subscriptions.sort_by_key(|one| (std::cmp::Reverse(numbers.waiting(one.id)), one.id));
    let (page, more) = show_all(server, window.of(&subscriptions), now).await;
    shown["subscriptions"] = json!(page);
    missing.extend(more);
    note_missing(&mut shown, missing);
    Ok(shown)
}

fn topic(server: &Server, entry: &TopicEntry, numbers: &Numbers) -> Value {
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
        "resourceId": named::id(server, entry),
        "published": published.events,
        "refused": published.refused,
        "unmatched": published.unmatched,
        "publishedPerSec": rounded(published.per_sec),
    })
}

/// `GET stats/series`: what happened in each of the last minutes, of everything, of a topic or of a subscription.
pub(crate) async fn series(server: &Server, query: &str) -> Result<Value, Problem> {
    let (mut of_topic, mut of_subscription, mut minutes) = (None, None, None);
    for (name, value) in read_query(query, &["subscription", "topic", "minutes"])? {
        match name {
            _ if value.is_empty() => {}
            "topic" => of_topic = Some(named::topic(server, &value)?),
            "subscription" => of_subscription = Some(named::subscription(server, "subscription", &value)?),
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
    let asked = SeriesAsked {
        topic: of_topic.map(|entry| entry.topic.id.0),
        subscription: of_subscription.as_ref().map(|subscription| subscription.id.0),
        minutes,
        now: now.nanos(),
    };
    let (tallies, missing) = numbers::tallies(server, asked).await;
    let series = Series::of(now, minutes, &tallies);
    let percentile = |which: fn(&Percentiles) -> Duration| -> Value {
        let all = series.latency.iter();
        all.map(|one| one.as_ref().map(|one| millis(which(one))))
            .collect()
    };
    let mut shown = json!({
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
    // Nobody publishes to a subscription.
    if of_subscription.is_none() {
        shown["published"] = json!(series.published);
    }
    note_missing(&mut shown, missing);
    Ok(shown)
}

fn latency(metered: &Metered) -> Option<Value> {
    let found = metered.latency()?;
    Some(json!({"p50": millis(found.p50), "p95": millis(found.p95), "p99": millis(found.p99)}))
}

fn millis(took: Duration) -> f64 {
    rounded(took.as_secs_f64() * 1000.0)
}

/// Nobody reads more digits.
fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

/// `GET subscriptions`
pub(crate) async fn subscriptions(server: &Server, query: &str) -> Result<Value, Problem> {
    let (mut topic, mut state, mut text) = (None, None, None);
    let mut window = Window::default();
    for (name, value) in read_query(query, &["topic", "state", "q", "top", "skip"])? {
        match name {
            _ if value.is_empty() => {}
            "topic" => topic = Some(named::topic(server, &value)?.topic.id),
            "state" => {
                let known = STATES
                    .into_iter()
                    .find(|known| known.eq_ignore_ascii_case(&value));
                let reason = || format!("{value:?} is not one of {}", STATES.join(", "));
                state = Some(known.ok_or_else(|| Problem::field("state", reason()))?);
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
        state.is_none_or(|state| Health::of(server, one.id).state == state)
            && text
                .as_deref()
                .is_none_or(|text| one.name.to_lowercase().contains(text) || has(endpoint(server, one), text))
    });
    found.sort_by_cached_key(|one| (one.name.to_lowercase(), one.id));
    let now = server.engine.clock.now();
    let (value, missing) = show_all(server, window.of(&found), now).await;
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
    let id = id.filter(|id| !id.is_empty());
    let id = id.ok_or_else(|| Problem::field("id", "must be the resource id of a subscription"))?;
    // One whose webhook is still being asked is seen too.
    let seen = match id.starts_with('/') {
        true => azure::subscriptions::seen(server, &id),
        false => {
            let found = named::subscription(server, "id", &id)?;
            resource_id(server, &found).and_then(|id| azure::subscriptions::seen(server, &id))
        }
    };
    let (found, resource) = seen.ok_or_else(|| named::missing("id", &id))?;
    let mut shown = show(server, &found).await;
    shown["resource"] = resource;
    Ok(shown)
}

/// One subscription as lists show it.
pub(crate) async fn show(server: &Server, subscription: &Arc<Subscription>) -> Value {
    let now = server.engine.clock.now();
    let (mut shown, missing) = show_all(server, std::slice::from_ref(subscription), now).await;
    let mut shown = shown.pop().unwrap_or_default();
    note_missing(&mut shown, missing);
    shown
}

/// Subscriptions as lists show them, and the nodes that did not say what they know of them.
async fn show_all(
    server: &Server,
    subscriptions: &[Arc<Subscription>],
    now: Timestamp,
) -> (Vec<Value>, Vec<String>) {
    let ids = subscriptions.iter().map(|one| one.id);
    let (details, missing) = numbers::details(server, ids, now).await;
    let all = subscriptions.iter().zip(details);
    let shown = all
        .map(|(one, detail)| show_one(server, one, &detail, now))
        .collect();
    (shown, missing)
}

/// Which part of a list is asked for.
struct Window {
    top: usize,
    skip: usize,
}

impl Default for Window {
    fn default() -> Window {
        Window { top: TOP, skip: 0 }
    }
}

impl Window {
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

fn show_one(server: &Server, subscription: &Subscription, detail: &Detail, now: Timestamp) -> Value {
    let topic = server.engine.directory.topic_by_id(subscription.topic);
    let health = Health::of(server, subscription.id).with(detail);
    let mut shown = counts(&detail.counted);
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
    shown["name"] = json!(subscription.name);
    shown["id"] = json!(resource_id(server, subscription));
    shown["topic"] = json!(topic.map(|entry| entry.topic.name.clone()));
    shown["endpoint"] = json!(endpoint(server, subscription));
    shown["state"] = json!(health.state);
    shown["waiting"] = json!(detail.waits.waiting);
    shown["retrying"] = json!(detail.waits.retrying);
    shown["deadLettersPending"] = json!(detail.letters);
    if let Some(name) = &subscription.domain_topic {
        shown["domainTopic"] = json!(name);
    }
    if let Some(since) = health.paused {
        shown["since"] = json!(since.to_string());
    }
    if let Some(delay) = health.delay {
        shown["cause"] = json!(delay.cause);
        shown["since"] = json!(delay.since().to_string());
        shown["until"] = json!(delay.until().to_string());
    }
    if let Some(oldest) = detail.waits.oldest() {
        shown["oldestUndeliveredSeconds"] = json!(age(now, oldest));
    }
    shown
}

/// How the endpoint of a subscription treats it.
struct Health {
    state: &'static str,
    delay: Option<Delayed>,
    /// Since when nothing is sent by someone's wish.
    paused: Option<Timestamp>,
}

impl Health {
    /// As far as this node knows.
    fn of(server: &Server, id: SubscriptionId) -> Health {
        let outlet = server.engine.dispatcher.outlet(id);
        let Some(plan) = outlet.and_then(|outlet| outlet.plan()) else {
            return Health {
                state: health(false, false),
                delay: None,
                paused: None,
            };
        };
        let paused = plan.subscription.pauses.since();
        if paused.is_some() {
            // How its endpoint is does not matter to it now.
            return Health {
                state: STATES[3],
                delay: None,
                paused,
            };
        }
        let state = plan.endpoint.state_for(plan.subscription.id);
        // Not all rules know delays.
        let delay = state.delay.filter(|_| plan.sender().obeys);
        Health {
            state: health(delay.is_some(), state.probing),
            delay: delay.as_ref().map(Delayed::of),
            paused,
        }
    }

    /// As all nodes know it.
    fn with(self, detail: &Detail) -> Health {
        if self.paused.is_some() {
            return self;
        }
        Health {
            state: health(detail.delay.is_some(), detail.probing),
            delay: detail.delay.clone(),
            paused: None,
        }
    }
}

fn health(delayed: bool, probing: bool) -> &'static str {
    match (delayed, probing) {
        (false, _) => STATES[0],
        (true, false) => STATES[1],
        (true, true) => STATES[2],
    }
}

fn counts(counted: &Counted) -> Value {
    json!({
        "delivered": counted.delivered,
        "attempts": counted.attempts,
        "attemptsFailed": counted.failed,
        "deadLettered": counted.dead_lettered,
        "dropped": counted.dropped,
    })
}

/// Where events go, without what is secret about it.
fn endpoint(server: &Server, subscription: &Subscription) -> Option<String> {
    let outlet = server.engine.dispatcher.outlet(subscription.id);
    let plan = outlet.and_then(|outlet| outlet.plan());
    plan.map(|plan| plan.endpoint.name.to_string())
        .or_else(|| crate::handshakes::endpoint(subscription))
}
