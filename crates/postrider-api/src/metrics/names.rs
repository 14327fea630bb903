//! The metrics again under the names of Azure Monitor and of the edge module, for dashboards made
//! for those.
//!
//! Azure counts per minute and the edge module since its start; counters here run since the start
//! of this server. Which dimensions and values exist beyond the documented ones is unknown, so the
//! names of this server's outcomes and reasons are used.

use super::page::{MetricKind, MetricsPage, labels};
use super::{MetricValues, SubscriptionMetrics, TopicMetrics, by_outcome, by_reason};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use std::time::Duration;

/// Sets of metric names that are enabled besides our own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetricNameSets {
    pub azure: bool,
    pub edge: bool,
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A sum and a count under one name.
fn average(page: &mut MetricsPage, name: &str, labels: &str, sum: f64, count: u64) {
    page.line(&format!("{name}_sum"), labels, sum);
    page.line(&format!("{name}_count"), labels, count);
}

pub(super) fn azure(page: &mut MetricsPage, numbers: &MetricValues) {
    let topics: Vec<(String, &TopicMetrics)> = numbers
        .topics
        .iter()
        .map(|topic| (labels(&[("Resource", &topic.label)]), topic))
        .collect();
    let subscriptions: Vec<(String, &SubscriptionMetrics)> = numbers
        .subscriptions
        .iter()
        .map(|one| (azure_labels(one), one))
        .collect();

    type OfTopics = fn(&TopicMetrics) -> Option<u64>;
    let counts: [(&str, &str, OfTopics); 3] = [
        (
            "PublishSuccessCount",
            "Counter: events that were accepted.",
            |t| Some(t.events),
        ),
        (
            "PublishFailCount",
            "Counter: publish requests that were refused.",
            |t| Some(t.refused),
        ),
        (
            "UnmatchedEventCount",
            "Counter: accepted events that no subscription wanted.",
            |t| (!t.domain).then_some(t.unmatched),
        ),
    ];
    for (name, help, count) in counts {
        page.family(name, MetricKind::Untyped, help);
        for (labels, topic) in &topics {
            if let Some(count) = count(topic) {
                page.line(name, labels, count);
            }
        }
    }
    let name = "PublishSuccessLatencyInMs";
    page.family(name, MetricKind::Summary, "What accepted publish requests took.");
    for (labels, topic) in &topics {
        average(page, name, labels, topic.micros as f64 / 1e3, topic.requests);
    }

    type OfSubscriptions = fn(&SubscriptionMetrics) -> u64;
    let counts: [(&str, &str, OfSubscriptions); 2] = [
        (
            "MatchedEventCount",
            "Counter: events that a subscription wanted.",
            |s| s.matched,
        ),
        ("DeliverySuccessCount", "Counter: events that arrived.", |s| {
            s.delivered
        }),
    ];
    for (name, help, count) in counts {
        page.family(name, MetricKind::Untyped, help);
        for (labels, one) in &subscriptions {
            page.line(name, labels, count(one));
        }
    }
    let name = "DeliveryAttemptFailCount";
    page.family(
        name,
        MetricKind::Untyped,
        "Counter: delivery requests that failed.",
    );
    for (labels, one) in &subscriptions {
        for (outcome, count) in by_outcome(&one.totals).filter(|(outcome, _)| *outcome != Outcome::Success) {
            let labels = format!("{labels},ErrorType=\"{outcome}\",Error=\"{outcome}\"");
            page.line(name, &labels, count);
        }
    }
    let name = "DestinationProcessingDurationInMs";
    page.family(name, MetricKind::Summary, "What delivery requests took.");
    for (labels, one) in &subscriptions {
        let duration = &one.totals.duration;
        average(page, name, labels, millis(duration.sum), duration.count());
    }
    type ByReason = fn(&SubscriptionMetrics) -> &[u64];
    let with_reasons: [(&str, &str, &str, ByReason); 2] = [
        (
            "DeadLetteredCount",
            "DeadLetterReason",
            "Counter: events that were dead-lettered.",
            |s| &s.dead_lettered,
        ),
        (
            "DroppedEventCount",
            "DropReason",
            "Counter: events that were given up for good.",
            |s| &s.dropped,
        ),
    ];
    for (name, dimension, help, counts) in with_reasons {
        page.family(name, MetricKind::Untyped, help);
        for (labels, one) in &subscriptions {
            for (reason, count) in by_reason(counts(one)) {
                page.line(name, &format!("{labels},{dimension}=\"{reason}\""), count);
            }
        }
    }
}

fn successes(one: &SubscriptionMetrics) -> u64 {
    one.totals.outcomes[usize::from(Outcome::Success.code())]
}

/// Labels of a subscription. In a domain, subscriptions of a domain topic and those of the whole
/// domain have different labels.
fn azure_labels(one: &SubscriptionMetrics) -> String {
    let mut all = vec![("Resource", one.topic.as_str())];
    match &one.domain_topic {
        Some(inside) => all.extend([("Topic", inside.as_str()), ("EventSubscriptionName", &one.name)]),
        None if one.domain => all.push(("DomainEventSubscriptionName", &one.name)),
        None => all.push(("EventSubscriptionName", &one.name)),
    }
    labels(&all)
}

pub(super) fn edge(page: &mut MetricsPage, numbers: &MetricValues) {
    type OfTopics = fn(&TopicMetrics) -> u64;
    let counts: [(&str, &str, OfTopics); 5] = [
        ("EventsReceived", "Counter: events that were accepted.", |t| {
            t.events
        }),
        (
            "UnmatchedEvents",
            "Counter: accepted events that no subscription wanted.",
            |t| t.unmatched,
        ),
        (
            "SuccessRequests",
            "Counter: publish requests that were accepted.",
            |t| t.requests,
        ),
        (
            "SystemErrorRequests",
            "Counter: publish requests that were refused through no fault of their own.",
            |t| t.refused_by_trouble,
        ),
        (
            "UserErrorRequests",
            "Counter: publish requests that were refused for what they were.",
            |t| t.refused - t.refused_by_trouble,
        ),
    ];
    let topics: Vec<(String, &TopicMetrics)> = numbers
        .topics
        .iter()
        .map(|topic| (labels(&[("topic", &topic.label)]), topic))
        .collect();
    for (name, help, count) in counts {
        page.family(name, MetricKind::Untyped, help);
        for (labels, topic) in &topics {
            page.line(name, labels, count(topic));
        }
    }
    let name = "SuccessRequestLatencyMs";
    page.family(name, MetricKind::Summary, "What accepted publish requests took.");
    for (labels, topic) in &topics {
        average(page, name, labels, topic.micros as f64 / 1e3, topic.requests);
    }

    let subscriptions = &numbers.subscriptions;
    type OfSubscriptions = fn(&SubscriptionMetrics) -> u64;
    let counts: [(&str, &str, OfSubscriptions); 4] = [
        ("DeliverySuccessCounts", "Counter: events that arrived.", |s| {
            s.delivered
        }),
        (
            "DeliveryFailureCounts",
            "Counter: delivery requests that failed.",
            |s| s.failed,
        ),
        ("DeliveryAttemptsCount", "Counter: delivery requests.", |s| {
            s.attempts
        }),
        (
            "ExpiredCounts",
            "Counter: events whose time to live was over.",
            |s| {
                let code = usize::from(GiveUpReason::TimeToLiveExceeded.code());
                s.dead_lettered[code] + s.dropped[code]
            },
        ),
    ];
    for (name, help, count) in counts {
        page.family(name, MetricKind::Untyped, help);
        for one in subscriptions {
            page.line(name, &one.labels, count(one));
        }
    }
    type Average = fn(&SubscriptionMetrics) -> (Duration, u64);
    let averages: [(&str, &str, Average); 3] = [
        (
            "DeliverySuccessLatencyMs",
            "What delivery requests took that succeeded.",
            |s| (s.totals.succeeded, successes(s)),
        ),
        (
            "DeliveryFailureLatencyMs",
            "What delivery requests took that failed.",
            |s| (s.totals.failed, s.totals.duration.count() - successes(s)),
        ),
        (
            "SystemDelayForFirstAttemptMs",
            "How long events waited for their first attempt.",
            |s| (s.totals.waited, s.totals.first_attempts),
        ),
    ];
    for (name, help, of) in averages {
        page.family(name, MetricKind::Summary, help);
        for one in subscriptions {
            let (sum, count) = of(one);
            average(page, name, &one.labels, millis(sum), count);
        }
    }
}
