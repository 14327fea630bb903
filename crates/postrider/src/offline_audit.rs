//! Audit log entries of commands that change the directory of a stopped server.

use crate::serve::AUDIT_DIRECTORY;
use anyhow::Result;
use postrider_audit::{ActionResult, Actor, AuditEntry, AuditLog, AuditOutcome, Config};
use postrider_engine::clock::SystemClock;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Client name in entries of commands.
const COMMAND: &str = "command";

/// Records a command's action on this data directory, which the caller has locked, and its result.
/// Nothing is recorded without an audit log in the directory. A log that cannot be written is
/// reported but does not stop the command: these commands are for damaged directories.
pub fn record<T>(data_dir: &Path, action: &str, details: Value, result: &Result<T>) {
    let directory = data_dir.join(AUDIT_DIRECTORY);
    if !directory.is_dir() {
        return;
    }
    // Old lines are kept: only the server, which knows the configuration, drops them.
    let config = Config {
        directory: directory.clone(),
        keep: Duration::MAX,
        bytes_max: u64::MAX,
        node: String::new(),
    };
    let mut details = match details {
        Value::Object(details) => details,
        _ => Map::new(),
    };
    details.insert("user".into(), json!(rustix::process::getuid().as_raw()));
    let entry = AuditEntry {
        actor: Actor {
            id: COMMAND.into(),
            roles: Vec::new(),
            via: COMMAND.into(),
        },
        action: action.into(),
        resource: data_dir.display().to_string(),
        outcome: AuditOutcome {
            result: if result.is_ok() {
                ActionResult::Done
            } else {
                ActionResult::Failed
            },
            status: None,
            error: result.as_ref().err().map(|error| format!("{error:#}")),
        },
        details,
        ..AuditEntry::default()
    };
    let trouble = match AuditLog::open(config, Arc::new(SystemClock)) {
        Ok(log) => {
            log.note(entry);
            log.close();
            log.status().trouble.map(|(_, why)| why)
        }
        Err(error) => Some(error.to_string()),
    };
    if let Some(why) = trouble {
        eprintln!(
            "warning: the audit log in {} does not have a line about this command: {why}",
            directory.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;
    use postrider_audit::{AuditQuery, LineOrder, verify};

    #[test]
    fn commands_get_lines_in_the_log_of_the_directory_and_make_none() {
        let directory = tempfile::tempdir().unwrap();
        let audit = directory.path().join(AUDIT_DIRECTORY);
        record(directory.path(), "store.compact", json!({}), &Ok(()));
        assert!(!audit.exists());
        std::fs::create_dir(&audit).unwrap();
        record(directory.path(), "store.compact", json!({}), &Ok(()));
        let failed: Result<()> = Err(anyhow!("no").context("opening it"));
        record(
            directory.path(),
            "store.migrate",
            json!({"to": "jetstream"}),
            &failed,
        );

        assert!(verify(&audit).unwrap().broken.is_none());
        let config = Config {
            directory: audit,
            keep: Duration::MAX,
            bytes_max: u64::MAX,
            node: String::new(),
        };
        let log = AuditLog::open(config, Arc::new(SystemClock)).unwrap();
        let query = AuditQuery {
            order: LineOrder::OldestFirst,
            limit: 10,
            ..AuditQuery::default()
        };
        let rows = log.read(&query).unwrap().rows;
        let lines: Vec<Value> = rows
            .iter()
            .map(|row| serde_json::from_str(&row.text).unwrap())
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(
            (&lines[0]["action"], &lines[0]["outcome"]["result"]),
            (&json!("store.compact"), &json!("done"))
        );
        assert_eq!(
            lines[1]["outcome"],
            json!({"result": "failed", "error": "opening it: no"})
        );
        assert_eq!(
            (&lines[1]["details"]["to"], &lines[1]["actor"]["via"]),
            (&json!("jetstream"), &json!("command"))
        );
    }
}
