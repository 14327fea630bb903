//! Resources for people. Control characters in others' text are escaped.

use super::ids::{group_of, name_of};
use super::status;
use crate::terminal::{Table, harmless, table, time_or_text};
use serde_json::Value;

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => harmless(&time_or_text(text)),
        other => harmless(&other.to_string()),
    }
}

fn group(resource: &Value) -> String {
    let group = resource["id"].as_str().and_then(group_of);
    harmless(group.unwrap_or("-"))
}

pub fn topics(resources: &[Value]) -> Table {
    let columns = ["name", "group", "location", "input schema", "endpoint", "state"];
    let mut table = table(&columns, &[]);
    for one in resources {
        let properties = &one["properties"];
        table.add_row([
            text(&one["name"]),
            group(one),
            text(&one["location"]),
            text(&properties["inputSchema"]),
            text(&properties["endpoint"]),
            text(&properties["provisioningState"]),
        ]);
    }
    table
}

pub fn system_topics(resources: &[Value]) -> Table {
    let mut table = table(&["name", "group", "type", "source", "state"], &[]);
    for one in resources {
        let properties = &one["properties"];
        table.add_row([
            text(&one["name"]),
            group(one),
            text(&properties["topicType"]),
            text(&properties["source"]),
            text(&properties["provisioningState"]),
        ]);
    }
    table
}

/// State of a subscription in a sentence.
pub fn status_sentence(now: &Value) -> String {
    let waits = ["waiting", "retrying"].map(|name| now[name].as_u64().unwrap_or(0));
    let waits = match waits.iter().sum() {
        0 => "nothing waits".to_owned(),
        1 => "1 event waits".to_owned(),
        many => format!("{many} events wait"),
    };
    let name = text(&now["name"]);
    let state = match now["state"].as_str() {
        Some("paused") => format!("is paused since {}", text(&now["since"])),
        Some("delayed") => format!(
            "is delayed until {}: its endpoint keeps failing ({})",
            text(&now["until"]),
            // Servers of earlier versions send only the name of the cause.
            text(now.get("causeText").unwrap_or(&now["cause"]))
        ),
        Some("probing") => "is delayed, and its endpoint is being asked".to_owned(),
        _ => "is not held back".to_owned(),
    };
    format!("subscription {name} {state}; {waits}")
}

pub fn domain_topics(resources: &[Value]) -> Table {
    let mut table = table(&["name", "state"], &[]);
    for one in resources {
        table.add_row([text(&one["name"]), text(&one["properties"]["provisioningState"])]);
    }
    table
}

pub fn subscriptions(resources: &[Value]) -> Table {
    let columns = [
        "name",
        "on",
        "health",
        "waiting",
        "oldest",
        "failed",
        "destination",
        "endpoint",
        "state",
    ];
    let mut table = table(&columns, &[3, 4, 5]);
    for one in resources {
        let (properties, now) = (&one["properties"], &one[status::MEMBER]);
        let destination = match &properties["destination"] {
            Value::Null => &properties["deliveryWithResourceIdentity"]["destination"],
            plain => plain,
        };
        let inner = &destination["properties"];
        let endpoint = match (inner["endpointBaseUrl"].as_str(), inner["resourceId"].as_str()) {
            (Some(url), _) => harmless(url),
            (None, Some(id)) => harmless(name_of(id)),
            (None, None) => "-".to_owned(),
        };
        table.add_row([
            text(&one["name"]),
            harmless(properties["topic"].as_str().map_or("-", name_of)),
            harmless(&status::health(now)),
            status::waiting(now),
            status::oldest(now),
            status::failed_share(now),
            text(&destination["endpointType"]),
            endpoint,
            text(&properties["provisioningState"]),
        ]);
    }
    table
}

pub fn keys(keys: &Value) -> Table {
    let mut table = table(&["name", "key"], &[]);
    for name in ["key1", "key2"] {
        table.add_row([name.to_owned(), text(&keys[name])]);
    }
    table
}

/// A table of all values of one resource.
pub fn show(resource: &Value) -> Table {
    let mut table = table(&["field", "value"], &[]);
    let mut rows = Vec::new();
    flatten("", resource, &mut rows);
    // Name and id come first.
    let rank = |field: &str| {
        ["name", "id", "type", "location"]
            .iter()
            .position(|first| *first == field)
            .unwrap_or(usize::MAX)
    };
    rows.sort_by_key(|(field, _)| rank(field));
    for (field, value) in rows {
        table.add_row([harmless(&field), value]);
    }
    table
}

fn flatten(path: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match value {
        Value::Null => {}
        Value::Object(map) => {
            for (name, value) in map {
                // The `properties` envelope is left out of field names.
                let path = match (path, name.as_str()) {
                    ("", "properties") => String::new(),
                    ("", name) => name.to_owned(),
                    (path, name) => format!("{path}.{name}"),
                };
                flatten(&path, value, rows);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (at, item) in items.iter().enumerate() {
                flatten(&format!("{path}[{at}]"), item, rows);
            }
        }
        Value::Array(items) if items.is_empty() => {}
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(text).collect();
            rows.push((path.to_owned(), items.join(", ")));
        }
        leaf => rows.push((path.to_owned(), text(leaf))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_resource_is_a_line_for_each_value() {
        let mut rows = Vec::new();
        let resource = json!({
            "name": "s", "tags": null,
            "properties": {"labels": ["a", "b"], "filter": {"advancedFilters": [{"key": "k\u{1b}[2J"}]}},
        });
        flatten("", &resource, &mut rows);
        let rows: Vec<_> = rows.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(
            rows,
            [
                ("name", "s"),
                ("filter.advancedFilters[0].key", r"k\u001b[2J"),
                ("labels", "a, b"),
            ]
        );
        assert!(show(&resource).to_string().contains("│ name"));
    }

    #[test]
    fn a_list_names_where_events_go() {
        let one = json!({"name": "s", "properties": {"topic": "/x/topics/orders", "destination": {
            "endpointType": "WebHook", "properties": {"endpointUrl": null, "endpointBaseUrl": "https://x/y"}}}});
        let shown = subscriptions(&[one]).to_string();
        assert!(
            shown.contains("https://x/y") && shown.contains("orders"),
            "{shown}"
        );
    }
}
