//! Format of a log line, and how lines are chained.
//!
//! `{"seq":…,"time":…, …,"prev":"<hash of the line before>","hash":"<hash of this line>"}`. The
//! hash is the SHA-256 of the line's bytes from `{` up to, not including, `,"hash":`.

use postrider_core::time::Timestamp;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// `prev` of the very first line.
pub const GENESIS: &str = "0000000000000000000000000000000000000000000000000000000000000000";
const HASH_LEN: usize = GENESIS.len();
const HASH_MEMBER: &str = ",\"hash\":\"";
/// Length from the comma before `hash` to the closing brace.
const SEAL_LEN: usize = HASH_MEMBER.len() + HASH_LEN + "\"}".len();
/// A longer line is recorded without the values of its changes before and after.
pub const LINE_BYTES_MAX: usize = 128 << 10;

/// The client, or the part of the server, that performed an action.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    /// The client's id; empty if there was no valid credential.
    pub id: String,
    pub roles: Vec<String>,
    /// Kind of credential: `secret`, `token`, `issuer`, `session`, `edge-key`, `none`; `server` and
    /// `configuration` for actions that no client requested, `command` for commands on the
    /// directory of a stopped server.
    pub via: String,
}

/// Result of an action.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActionResult {
    #[default]
    Done,
    /// Refused by the server: missing permission or bad input. Nothing was changed.
    Refused,
    Failed,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditOutcome {
    pub result: ActionResult,
    /// The HTTP status of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditedRequest {
    pub id: String,
    pub method: String,
    /// Without the query.
    pub path: String,
}

/// An action to be recorded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    pub actor: Actor,
    /// The address that the request came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    pub action: String,
    pub resource: String,
    pub outcome: AuditOutcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<AuditedRequest>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub details: Map<String, Value>,
    /// Each changed resource, with the members that differ before and after.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Value>,
}

/// The members of a line that searches filter by.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct LineHeader {
    pub seq: u64,
    pub time: String,
    pub actor: Actor,
    pub action: String,
    pub resource: String,
    #[serde(default)]
    pub details: Map<String, Value>,
}

#[derive(Serialize)]
struct UnhashedLine<'a> {
    seq: u64,
    time: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    node: &'a str,
    #[serde(flatten)]
    entry: &'a AuditEntry,
    prev: &'a str,
}

/// End of the chain, which the next line continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainHead {
    /// The number of the last line; 0 if there is none.
    pub seq: u64,
    pub hash: String,
    pub time: Timestamp,
}

impl Default for ChainHead {
    fn default() -> ChainHead {
        ChainHead {
            seq: 0,
            hash: GENESIS.to_owned(),
            time: Timestamp::MIN,
        }
    }
}

impl ChainHead {
    /// Renders the next line, with its newline, and makes it the end of the chain. Times never
    /// decrease.
    pub fn append(&mut self, entry: &AuditEntry, node: &str, now: Timestamp) -> String {
        let time = now.max(self.time);
        let seq = self.seq + 1;
        let mut line = sealed(seq, time, node, entry, &self.hash);
        if line.len() > LINE_BYTES_MAX {
            let mut short = entry.clone();
            short.changes = vec![json!({"omitted": "too long", "count": entry.changes.len()})];
            short.details = Map::new();
            short.details.insert("omittedBytes".into(), json!(line.len()));
            line = sealed(seq, time, node, &short, &self.hash);
        }
        let hash = hash_of(line.as_bytes());
        let _ = writeln!(line, "{HASH_MEMBER}{hash}\"}}");
        *self = ChainHead { seq, hash, time };
        line
    }
}

/// Renders a line without its hash and closing brace.
fn sealed(seq: u64, time: Timestamp, node: &str, entry: &AuditEntry, prev: &str) -> String {
    let line = UnhashedLine {
        seq,
        time: time.to_string(),
        node,
        entry,
        prev,
    };
    let mut text = serde_json::to_string(&line).expect("keys are strings");
    text.pop();
    text
}

pub fn hash_of(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(HASH_LEN);
    for byte in digest(&SHA256, bytes).as_ref() {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// A line that was read, without its newline.
#[derive(Debug)]
pub struct ParsedLine<'a> {
    pub header: LineHeader,
    pub time: Timestamp,
    pub prev: &'a str,
    pub hash: &'a str,
    /// Whether `hash` matches the content.
    pub intact: bool,
}

/// None if the bytes cannot be a line of this log.
pub fn parse(line: &[u8]) -> Option<ParsedLine<'_>> {
    let text = std::str::from_utf8(line).ok()?;
    let (content, seal) = text.split_at_checked(text.len().checked_sub(SEAL_LEN)?)?;
    let hash = seal.strip_prefix(HASH_MEMBER)?.strip_suffix("\"}")?;
    let prev = content.strip_suffix('"')?;
    let prev = prev.get(prev.len().checked_sub(HASH_LEN)?..)?;
    let header: LineHeader = serde_json::from_str(text).ok()?;
    Some(ParsedLine {
        time: Timestamp::parse(&header.time)?,
        intact: hash_of(content.as_bytes()) == hash,
        header,
        prev,
        hash,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(action: &str) -> AuditEntry {
        AuditEntry {
            actor: Actor {
                id: "ci".into(),
                roles: vec!["owner".into()],
                via: "secret".into(),
            },
            action: action.into(),
            ..AuditEntry::default()
        }
    }

    #[test]
    fn each_line_names_the_hash_of_the_line_before() {
        let mut head = ChainHead::default();
        let now = Timestamp::from_secs(1_700_000_000);
        let first = head.append(&entry("topic.write"), "a", now);
        let second = head.append(&entry("topic.delete"), "a", now);
        let first = parse(first.trim_end().as_bytes()).unwrap();
        let second = parse(second.trim_end().as_bytes()).unwrap();
        assert!(first.intact && second.intact);
        assert_eq!((first.prev, second.prev), (GENESIS, first.hash));
        assert_eq!(
            (second.header.seq, second.header.action.as_str()),
            (2, "topic.delete")
        );
        assert_eq!(head.hash, second.hash);
    }

    #[test]
    fn an_edit_shows_and_nonsense_is_no_line() {
        let mut head = ChainHead::default();
        let line = head.append(&entry("topic.write"), "", Timestamp::from_secs(1));
        let edited = line.replace("\"ci\"", "\"me\"");
        assert!(!parse(edited.trim_end().as_bytes()).unwrap().intact);
        for nonsense in ["", "{}", "\0\0", &line[..line.len() / 2]] {
            assert!(parse(nonsense.as_bytes()).is_none(), "{nonsense:?}");
        }
    }

    #[test]
    fn time_never_goes_back_and_a_long_line_is_shortened() {
        let mut head = ChainHead::default();
        head.append(&entry("a"), "", Timestamp::from_secs(100));
        let mut long = entry("b");
        long.changes = vec![json!({"after": "x".repeat(LINE_BYTES_MAX)})];
        let line = head.append(&long, "", Timestamp::from_secs(50));
        assert!(line.len() < 2048, "{}", line.len());
        let parsed = parse(line.trim_end().as_bytes()).unwrap();
        assert_eq!(parsed.time, Timestamp::from_secs(100));
        assert!(parsed.intact);
    }
}
