//! Dead letters and replays for people. Control characters in publishers' text are escaped.

use super::follow::{ReplayOutcomeCounts, ReplayStatus};
use crate::output::outcome_words;
use crate::receiver::{indented, printable};
use crate::terminal::{Table, harmless, table, time, time_or_text};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A dead letter as the server reports it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterItem {
    id: String,
    state: String,
    topic: String,
    subscription: String,
    reason: String,
    delivery_attempts: Option<u64>,
    last_delivery_outcome: Option<String>,
    publish_time: Option<String>,
    last_delivery_attempt_time: Option<String>,
    dead_lettered_time: String,
    due: Option<String>,
    trouble: Option<String>,
    event_id: Option<String>,
    event_type: Option<String>,
    subject: Option<String>,
    blob: Option<BlobReference>,
    replays: Option<u64>,
    event: Option<Box<RawValue>>,
}

#[derive(Debug, Deserialize)]
struct BlobReference {
    account: String,
    container: String,
    path: String,
    /// Number of dead letters written to the blob, if the blob cannot be read.
    letters: Option<u64>,
}

impl BlobReference {
    fn full_path(&self) -> String {
        format!("{}/{}/{}", self.account, self.container, self.path)
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterGroup {
    topic: String,
    subscription: String,
    subscription_id: u64,
    #[serde(default)]
    deleted: bool,
    written: u64,
    #[serde(default)]
    missing: u64,
    #[serde(default)]
    damaged: u64,
    #[serde(default)]
    unchecked: u64,
    reasons: BTreeMap<String, u64>,
    pending: u64,
    trouble: Option<String>,
}

pub fn list(entries: &[DeadLetterItem]) -> Table {
    let columns = [
        "id",
        "subscription",
        "reason",
        "attempts",
        "last outcome",
        "dead-lettered",
        "event",
        "type",
        "replays",
    ];
    let mut table = table(&columns, &[3, 8]);
    for entry in entries {
        let or_dash = |text: &Option<String>| text.as_deref().map_or("-".into(), harmless);
        let number = |number: Option<u64>| number.map_or("-".into(), |number| number.to_string());
        let when = time(&entry.dead_lettered_time);
        let when = match (&entry.due, entry.state.as_str(), &entry.blob) {
            (Some(due), ..) => format!("to be written {}", time(due)),
            (None, state @ ("missing" | "damaged"), Some(blob)) => {
                let letters = blob
                    .letters
                    .map_or(String::new(), |letters| format!(", {letters} letters"));
                format!("{when} ({state}: blob {}{letters})", harmless(&blob.full_path()))
            }
            _ => when,
        };
        table.add_row([
            harmless(&entry.id),
            harmless(&format!("{}/{}", entry.topic, entry.subscription)),
            harmless(&entry.reason),
            number(entry.delivery_attempts),
            outcome(entry).unwrap_or_else(|| "-".into()),
            when,
            or_dash(&entry.event_id),
            or_dash(&entry.event_type),
            number(entry.replays),
        ]);
    }
    table
}

/// The letter does not have the status.
fn outcome(entry: &DeadLetterItem) -> Option<String> {
    let name = entry.last_delivery_outcome.as_deref()?;
    Some(outcome_words(&json!(name), &Value::Null))
}

pub fn show(entry: &DeadLetterItem) -> String {
    let subscription = format!("{}/{}", entry.topic, entry.subscription);
    let blob = entry.blob.as_ref().map(BlobReference::full_path);
    let outcome = outcome(entry);
    let attempts = entry.delivery_attempts.map(|attempts| attempts.to_string());
    let replays = entry.replays.map(|replays| replays.to_string());
    let [published, attempted, due] = [&entry.publish_time, &entry.last_delivery_attempt_time, &entry.due]
        .map(|time| time.as_deref().map(time_or_text));
    let lines = [
        ("id", Some(entry.id.as_str())),
        ("state", Some(&entry.state)),
        ("subscription", Some(&subscription)),
        ("reason", Some(&entry.reason)),
        ("attempts", attempts.as_deref()),
        ("last outcome", outcome.as_deref()),
        ("published", published.as_deref()),
        ("last attempt", attempted.as_deref()),
        ("dead-lettered", Some(&time_or_text(&entry.dead_lettered_time))),
        ("to be written", due.as_deref()),
        ("trouble", entry.trouble.as_deref()),
        ("blob", blob.as_deref()),
        ("replays", replays.as_deref()),
        ("event", entry.event_id.as_deref()),
        ("type", entry.event_type.as_deref()),
        ("subject", entry.subject.as_deref()),
    ];
    let mut text = String::new();
    for (name, value) in lines {
        if let Some(value) = value {
            text.push_str(&format!("{name:<15}{}\n", harmless(value)));
        }
    }
    if let Some(event) = &entry.event {
        text.push_str(&format!(
            "\n{}",
            printable(&indented(event.get(), usize::MAX), true)
        ));
    }
    text.trim_end().to_owned()
}

pub fn summary(tallies: &[DeadLetterGroup]) -> Table {
    let columns = [
        "subscription",
        "number",
        "reason",
        "written",
        "missing",
        "damaged",
        "pending",
        "trouble",
    ];
    let mut table = table(&columns, &[1, 3, 4, 5, 6]);
    for tally in tallies {
        let deleted = if tally.deleted { " (deleted)" } else { "" };
        let name = format!("{}/{}{deleted}", tally.topic, tally.subscription);
        let unchecked = match tally.unchecked {
            0 => None,
            letters => Some(format!("{letters} letters not checked")),
        };
        let trouble: Vec<String> = unchecked.into_iter().chain(tally.trouble.clone()).collect();
        table.add_row([
            harmless(&name),
            tally.subscription_id.to_string(),
            "all".to_owned(),
            tally.written.to_string(),
            tally.missing.to_string(),
            tally.damaged.to_string(),
            tally.pending.to_string(),
            harmless(&trouble.join("; ")),
        ]);
        for (reason, count) in &tally.reasons {
            let row = ["", "", &harmless(reason), &count.to_string(), "", "", "", ""].map(str::to_owned);
            table.add_row(row);
        }
    }
    table
}

pub fn replays(jobs: &[ReplayStatus]) -> Table {
    let columns = [
        "replay",
        "state",
        "begun",
        "replayed",
        "failed",
        "of",
        "delivered",
        "failed again",
        "waiting",
        "what",
    ];
    let mut table = table(&columns, &[0, 3, 4, 5, 6, 7, 8]);
    for job in jobs {
        let became = |count: fn(ReplayOutcomeCounts) -> u64| {
            job.outcome.map_or("-".into(), |of| count(of).to_string())
        };
        table.add_row([
            job.id.to_string(),
            harmless(&job.state),
            time(&job.created),
            job.replayed.to_string(),
            job.failed.to_string(),
            job.total.to_string(),
            became(|outcome| outcome.delivered),
            became(|outcome| outcome.failed),
            became(|outcome| outcome.waiting),
            what(job),
        ]);
    }
    table
}

/// Selection of a replay, in short.
fn what(job: &ReplayStatus) -> String {
    let told = ["subscription", "reason", "since", "id", "to", "rate"]
        .iter()
        .filter_map(|name| {
            let value = match &job.request[name] {
                serde_json::Value::Null => return None,
                serde_json::Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            Some(format!("{name} {}", harmless(&value)))
        });
    let told: Vec<_> = told.collect();
    match told.is_empty() {
        true => "all".to_owned(),
        false => told.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_that_cannot_be_read_names_its_blob() {
        let entry: DeadLetterItem = serde_json::from_str(
            r#"{"id":"1-0","state":"damaged","topic":"t","subscription":"s","reason":"r",
                "deadLetteredTime":"2023-11-10T19:13:20.0000000Z","trouble":"the blob is not JSON",
                "blob":{"account":"local","container":"dead","path":"p.json","letters":7}}"#,
        )
        .unwrap();
        let shown = list(&[entry]).to_string();
        let expected = "2023-11-10T19:13:20Z (damaged: blob local/dead/p.json, 7 letters)";
        assert!(shown.contains(expected), "{shown}");
    }

    #[test]
    fn a_replay_tells_what_became_of_its_events() {
        let job: ReplayStatus = serde_json::from_str(
            r#"{"id":1,"state":"done","created":"2023-11-10T19:13:20Z","replayed":10,"failed":0,"total":10,
                "request":{"all":true},"outcome":{"delivered":1,"failed":7,"waiting":2}}"#,
        )
        .unwrap();
        let shown = replays(&[job]).to_string();
        let last = shown.lines().rev().nth(1).unwrap();
        let cells: Vec<&str> = last.split(['│', '┆']).map(str::trim).collect();
        assert_eq!(cells[4..10], ["10", "0", "10", "1", "7", "2"], "{shown}");
    }

    #[test]
    fn a_publisher_does_not_reach_the_terminal() {
        let entry: DeadLetterItem = serde_json::from_str(
            r#"{"id":"1-0","state":"written","topic":"t","subscription":"s","reason":"r",
                "deadLetteredTime":"2023-11-10T19:13:20.0000000Z","eventId":"\u001b[2Jx\n"}"#,
        )
        .unwrap();
        assert!(list(&[entry]).to_string().contains(r"\u001b[2Jx\u000a"));
    }
}
