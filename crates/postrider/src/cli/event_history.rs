//! Event histories for people: one event as a timeline, several as a table.

use crate::output::outcome_words;
use crate::terminal::{Table, harmless, table, time_or_text};
use serde_json::Value;
use std::fmt::Write as _;

/// Longest part of an endpoint's response that is shown.
const SNIPPET_SHOWN_MAX: usize = 300;

/// All histories for an event's id, which may have been published more than once.
pub fn timeline(found: &Value) -> String {
    let stories = list(&found["stories"]);
    let all: Vec<String> = stories.iter().map(story).collect();
    all.join("\n")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => harmless(&time_or_text(text)),
        other => harmless(&other.to_string()),
    }
}

/// Names and values of those members that are present.
fn named(of: &Value, members: &[(&str, &str)]) -> Vec<String> {
    let some = members.iter().filter(|(member, _)| !of[*member].is_null());
    some.map(|(member, name)| format!("{name} {}", text(&of[*member])))
        .collect()
}

fn story(story: &Value) -> String {
    let mut out = format!(
        "event {}  {}  {}\n",
        text(&story["id"]),
        text(&story["type"]),
        text(&story["subject"])
    );
    let topic = match story["domainTopic"].is_null() {
        true => text(&story["topic"]),
        false => format!("{}/{}", text(&story["topic"]), text(&story["domainTopic"])),
    };
    let mut accepted = vec![format!("{}  accepted by {topic}", text(&story["acceptedAt"]))];
    if !matches!(story["publisher"].as_str(), None | Some("")) {
        accepted.push(format!("from {}", text(&story["publisher"])));
    }
    accepted.push(format!("{} bytes", text(&story["bytes"])));
    accepted.push(text(&story["schema"]));
    accepted.extend(named(
        story,
        &[
            ("source", "source"),
            ("trace", "trace"),
            ("replay", "replay number"),
        ],
    ));
    put(&mut out, 1, &accepted.join(", "));
    if !story["replayedFrom"].is_null() {
        put(
            &mut out,
            1,
            &format!("replayed from {}", blob(&story["replayedFrom"])),
        );
    }
    put(&mut out, 1, &format!("state: {}", text(&story["state"])));
    let subscriptions = list(&story["subscriptions"]);
    if subscriptions.is_empty() {
        put(&mut out, 1, "the topic had no subscription");
    }
    for one in subscriptions {
        subscription(&mut out, one);
    }
    out
}

fn put(out: &mut String, depth: usize, line: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{}{line}", "  ".repeat(depth));
}

fn blob(place: &Value) -> String {
    let part = |name: &str| text(&place[name]);
    format!("{}/{}/{}", part("account"), part("container"), part("path"))
}

fn subscription(out: &mut String, one: &Value) {
    let name = text(&one["name"]);
    if one["matched"] != Value::Bool(true) {
        let predicate = &one["predicate"];
        let line = format!(
            "{name}: not matched by {}: {}",
            text(&predicate["kind"]),
            text(&predicate["text"])
        );
        put(out, 1, &line);
        return;
    }
    put(out, 1, &format!("{name}: matched, {}", text(&one["state"])));
    for attempt in list(&one["attempts"]) {
        show_attempt(out, attempt);
    }
    for hold in list(&one["holds"]) {
        let until = match hold["released"].is_null() {
            true => format!("until {}", text(&hold["until"])),
            false => format!("ended {}", text(&hold["released"])),
        };
        let since = text(&hold["since"]);
        let cause = outcome_words(&hold["cause"], &hold["status"]);
        put(
            out,
            2,
            &format!("{since}  endpoint left alone ({cause}), {until}"),
        );
    }
    let next = &one["next"];
    if !next.is_null() {
        put(
            out,
            2,
            &format!("{}  next attempt: {}", text(&next["at"]), text(&next["text"])),
        );
    }
    let ended = &one["ended"];
    if !ended.is_null() {
        let mut line = format!("{}  {}", text(&ended["at"]), text(&ended["disposition"]));
        if ended["late"] == Value::Bool(true) {
            line += " (by an answer that came late)";
        }
        for detail in named(ended, &[("reason", "because of")]) {
            let _ = write!(line, ", {detail}");
        }
        if !ended["blob"].is_null() {
            let _ = write!(line, ", in {}", blob(&ended["blob"]));
        }
        put(out, 2, &line);
        let pending = &ended["pending"];
        if !pending.is_null() {
            put(
                out,
                2,
                &format!("{}  due: {}", text(&pending["due"]), text(&pending["text"])),
            );
        }
    }
}

fn show_attempt(out: &mut String, attempt: &Value) {
    let mut line = format!(
        "{}  attempt {}: {}",
        text(&attempt["at"]),
        text(&attempt["number"]),
        outcome_words(&attempt["outcome"], &attempt["status"])
    );
    let timings = &attempt["timings"];
    let _ = write!(line, " in {} ms", text(&timings["totalMs"]));
    let parts = [
        ("queuedMs", "queued"),
        ("connectMs", "connect"),
        ("firstByteMs", "first byte"),
    ];
    let parts = named(timings, &parts);
    if !parts.is_empty() {
        let _ = write!(line, " ({})", parts.join(", "));
    }
    let _ = write!(line, ", {}", text(&attempt["endpoint"]));
    if attempt["batch"].as_u64().is_some_and(|count| count > 1) {
        let _ = write!(line, ", {} events in the request", text(&attempt["batch"]));
    }
    put(out, 2, &line);
    if !attempt["failure"].is_null() {
        put(out, 3, &format!("failed: {}", text(&attempt["failure"])));
    }
    let response = &attempt["response"];
    let snippet = response["snippet"].as_str().unwrap_or_default();
    if !snippet.is_empty() {
        let shown: String = snippet.chars().take(SNIPPET_SHOWN_MAX).collect();
        let cut = shown.len() < snippet.len() || response["truncated"] == Value::Bool(true);
        let more = if cut { " …" } else { "" };
        put(out, 3, &format!("answered: {}{more}", harmless(&shown)));
    }
    let decision = &attempt["decision"];
    let then = match decision["kind"].as_str() {
        Some("retry") => format!("retry at {}: {}", text(&decision["at"]), text(&decision["text"])),
        Some("deadLetter") => format!("dead letter: {}", text(&decision["reason"])),
        Some("drop") => format!("dropped: {}", text(&decision["reason"])),
        _ => return,
    };
    put(out, 3, &format!("then: {then}"));
}

/// Table of found events.
pub fn events(found: &[Value]) -> Table {
    let columns = [
        "accepted",
        "id",
        "topic",
        "type",
        "subject",
        "state",
        "attempts",
        "subscriptions",
    ];
    let mut table = table(&columns, &[6]);
    for one in found {
        let of = |one: &Value| {
            let outcome = match one["lastOutcome"].is_null() {
                true => String::new(),
                false => format!(" ({})", outcome_words(&one["lastOutcome"], &Value::Null)),
            };
            format!("{}: {}{outcome}", text(&one["name"]), text(&one["state"]))
        };
        let mut subscriptions: Vec<String> = list(&one["subscriptions"]).iter().map(of).collect();
        if let Some(more) = one["subscriptionsLeftOut"].as_u64() {
            subscriptions.push(format!("and {more} more"));
        }
        let topic = match one["domainTopic"].is_null() {
            true => text(&one["topic"]),
            false => format!("{}/{}", text(&one["topic"]), text(&one["domainTopic"])),
        };
        table.add_row([
            text(&one["acceptedAt"]),
            text(&one["id"]),
            topic,
            text(&one["type"]),
            text(&one["subject"]),
            text(&one["state"]),
            text(&one["attempts"]),
            subscriptions.join("\n"),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_story_is_told_in_order() {
        let found = json!({"id": "e1", "stories": [{
        "id": "e1", "topic": "orders", "type": "Made", "subject": "/o/1", "schema": "EventGridSchema",
        "acceptedAt": "T0", "publisher": "key1", "bytes": 120, "state": "mixed", "position": "1:0",
        "subscriptions": [
            {"name": "billing", "matched": true, "state": "deadLettered", "attempts": [
                {"number": 1, "at": "T1", "endpoint": "https://h/x", "outcome": "Busy", "status": 503, "batch": 2,
                 "timings": {"queuedMs": 1.5, "connectMs": 0.5, "firstByteMs": 2.0, "totalMs": 3.0},
                 "response": {"snippet": "later\n\u{1b}[2J", "truncated": true},
                 "decision": {"kind": "retry", "at": "T2", "why": "schedule", "text": "the wait is 10s"}},
                {"number": 2, "at": "T2", "endpoint": "https://h/x", "outcome": "SocketError", "batch": 1,
                 "timings": {"queuedMs": 0.0, "totalMs": 1.0}, "failure": "refused",
                 "decision": {"kind": "deadLetter", "reason": "MaxDeliveryAttemptsExceeded"}}],
             "ended": {"at": "T3", "disposition": "deadLettered", "reason": "MaxDeliveryAttemptsExceeded",
                       "blob": {"account": "acc", "container": "dead", "path": "a/b.json"}}},
            {"name": "audit", "matched": true, "state": "held", "attempts": [],
             "holds": [{"cause": "Busy", "since": "T1", "until": "T9"}],
             "next": {"at": "T9", "why": "probation", "text": "the endpoint keeps failing"}},
            {"name": "big", "matched": false,
             "predicate": {"kind": "advanced", "text": "data.n NumberGreaterThan 5", "index": 0}},
        ]}]});
        let expected = "\
event e1  Made  /o/1
  T0  accepted by orders, from key1, 120 bytes, EventGridSchema
  state: mixed
  billing: matched, deadLettered
    T1  attempt 1: HTTP 503 Service Unavailable in 3.0 ms (queued 1.5, connect 0.5, first byte 2.0), https://h/x, 2 events in the request
      answered: later\\u000a\\u001b[2J …
      then: retry at T2: the wait is 10s
    T2  attempt 2: no connection in 1.0 ms (queued 0.0), https://h/x
      failed: refused
      then: dead letter: MaxDeliveryAttemptsExceeded
    T3  deadLettered, because of MaxDeliveryAttemptsExceeded, in acc/dead/a/b.json
  audit: matched, held
    T1  endpoint left alone (endpoint busy), until T9
    T9  next attempt: the endpoint keeps failing
  big: not matched by advanced: data.n NumberGreaterThan 5
";
        assert_eq!(timeline(&found), expected);
    }

    #[test]
    fn found_events_are_a_table() {
        let found = [
            json!({"id": "e\u{1b}1", "topic": "d", "domainTopic": "t", "type": "Made", "subject": "/o",
            "acceptedAt": "T0", "state": "retrying", "attempts": 3,
            "subscriptions": [{"name": "s", "state": "retrying", "lastOutcome": "Busy"}]}),
        ];
        let text = events(&found).to_string();
        for part in [
            "e\\u001b1",
            "d/t",
            "retrying",
            "s: retrying (endpoint busy)",
            " 3 ",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains('\u{1b}'));
    }
}
