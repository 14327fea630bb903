//! Status of subscriptions: joins the state that our own API reports to the resources of the
//! management API.

use super::management_client::ManagementClient;
use crate::client::encoded;
use anyhow::Result;
use http::Method;
use serde_json::Value;
use std::collections::HashMap;

/// Member added to a subscription as the management API shows it.
pub const MEMBER: &str = "status";
const PATH: &str = "/postrider/v1/subscriptions";
/// Largest page of the server.
const PAGE_MAX: usize = 1000;

/// Selection of subscriptions.
#[derive(Clone, Copy, Debug, Default)]
pub struct StatusQuery<'a> {
    /// Resource id of the topic, domain or system topic.
    pub topic: Option<&'a str>,
    /// Part of the name.
    pub name: Option<&'a str>,
}

impl StatusQuery<'_> {
    fn path(self, skip: usize) -> String {
        let mut path = format!("{PATH}?top={PAGE_MAX}&skip={skip}");
        for (name, value) in [("topic", self.topic), ("q", self.name)] {
            if let Some(value) = value {
                path.push_str(&format!("&{name}={}", encoded(value)));
            }
        }
        path
    }
}

/// Adds the status to each subscription. A subscription that was created or deleted between the two
/// requests has none.
pub async fn add(arm: &ManagementClient, subscriptions: &mut [Value], asked: StatusQuery<'_>) -> Result<()> {
    let mut found = HashMap::new();
    let mut skip = 0;
    loop {
        let answer = arm.send(Method::GET, &asked.path(skip), None).await?;
        let mut page: Value = serde_json::from_slice(&answer.body)?;
        let Value::Array(items) = page["value"].take() else {
            break;
        };
        skip += items.len();
        let is_last = items.len() < PAGE_MAX;
        for item in items {
            if let Some(id) = item["id"].as_str() {
                found.insert(key(id), item);
            }
        }
        if is_last {
            break;
        }
    }
    for one in subscriptions {
        let id = one["id"].as_str().unwrap_or_default();
        let Some(Value::Object(mut status)) = found.remove(&key(id)) else {
            continue;
        };
        // The resource has these members itself.
        for member in ["id", "name", "topic", "domainTopic", "endpoint"] {
            status.remove(member);
        }
        one[MEMBER] = Value::Object(status);
    }
    Ok(())
}

/// Key of a subscription that is the same for both of its paths: nested in a topic, and as an
/// extension of it.
fn key(id: &str) -> String {
    let id = id.to_lowercase();
    match id.rsplit_once("/eventsubscriptions/") {
        Some((on, name)) => {
            let on = on.strip_suffix("/providers/microsoft.eventgrid").unwrap_or(on);
            format!("{on} {name}")
        }
        None => id,
    }
}

/// Health in a word, and whether the subscription is paused.
pub fn health(status: &Value) -> String {
    let health = status["health"].as_str().unwrap_or("-");
    match status["state"].as_str() {
        Some("paused") if health != "paused" => format!("{health}, paused"),
        _ => health.to_owned(),
    }
}

/// Number of events that are neither delivered nor given up.
pub fn waiting(status: &Value) -> String {
    let count = |name: &str| status[name].as_u64();
    match (count("waiting"), count("retrying")) {
        (None, None) => "-".to_owned(),
        (waiting, retrying) => (waiting.unwrap_or(0) + retrying.unwrap_or(0)).to_string(),
    }
}

pub fn oldest(status: &Value) -> String {
    let seconds = status["oldestUndeliveredSeconds"].as_f64();
    seconds.map_or_else(|| "-".to_owned(), age)
}

/// Share of failed attempts in the last minutes.
pub fn failed_share(status: &Value) -> String {
    let recent = |name: &str| status["recent"][name].as_u64();
    match (recent("failed"), recent("attempts")) {
        (Some(failed), Some(attempts)) if attempts > 0 => {
            let percent = 100.0 * failed as f64 / attempts as f64;
            match percent {
                some if some > 0.0 && some < 1.0 => "<1%".to_owned(),
                percent => format!("{percent:.0}%"),
            }
        }
        _ => "-".to_owned(),
    }
}

/// A duration in its two largest units.
fn age(seconds: f64) -> String {
    let seconds = seconds as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m {}s", seconds % 60),
        3600..86_400 => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_paths_of_a_subscription_are_the_same_one() {
        let topic = "/subscriptions/0/resourceGroups/rg1/providers/Microsoft.EventGrid/topics/orders";
        let nested = key(&format!("{topic}/eventSubscriptions/Shop"));
        let extension = key(&format!(
            "{topic}/providers/Microsoft.EventGrid/eventSubscriptions/shop"
        ));
        assert_eq!(nested, extension);
        assert_ne!(nested, key(&format!("{topic}2/eventSubscriptions/shop")));
    }

    #[test]
    fn cells_of_a_list() {
        let check = |status: Value, expected: [&str; 4]| {
            let cells = [
                health(&status),
                waiting(&status),
                oldest(&status),
                failed_share(&status),
            ];
            assert_eq!(cells, expected, "{status}");
        };
        check(
            json!({"health": "failing", "state": "paused", "waiting": 2, "retrying": 3,
                   "oldestUndeliveredSeconds": 3725.9, "recent": {"failed": 28, "attempts": 97}}),
            ["failing, paused", "5", "1h 2m", "29%"],
        );
        check(
            json!({"health": "paused", "state": "paused", "waiting": 0, "retrying": 0,
                   "oldestUndeliveredSeconds": 7.2, "recent": {"failed": 1, "attempts": 1000}}),
            ["paused", "0", "7s", "<1%"],
        );
        check(
            json!({"health": "idle", "waiting": 0, "retrying": 0, "recent": {"failed": 0, "attempts": 0}}),
            ["idle", "0", "-", "-"],
        );
        check(Value::Null, ["-", "-", "-", "-"]);
        assert_eq!([age(90.0), age(90_000.0)], ["1m 30s", "1d 1h"]);
    }
}
