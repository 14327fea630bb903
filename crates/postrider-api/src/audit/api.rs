//! `GET /postrider/v1/audit` and `/audit/verify`: for owners and contributors only, since lines
//! name clients and addresses.

use crate::Server;
use crate::dead_letters::{read_query, read_since};
use crate::http::{Answer, ApiCall, json as json_answer};
use crate::own_api::{Problem, body};
use crate::peers::{gather, note_missing};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use postrider_audit::{AuditLog, AuditQuery, LineOrder, LinePosition};
use postrider_core::time::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::Arc;

const LIMIT: usize = 100;
const LIMIT_MAX: usize = 1000;
const KNOWN: [&str; 8] = [
    "since", "until", "actor", "action", "resource", "order", "cursor", "limit",
];
/// Header with the cursor of the next page. An answer in JSON lines has no member for it.
const CURSOR: HeaderName = HeaderName::from_static("x-postrider-cursor");

/// Peer request for a page of audit log lines.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct AuditPageRequest {
    since: Option<i64>,
    until: Option<i64>,
    actor: Option<String>,
    action: Option<String>,
    resource: Option<String>,
    oldest_first: bool,
    after: Option<(i64, String, u64)>,
    limit: usize,
}

/// An audit log line with its sort key among the lines of all nodes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AuditPageLine {
    at: (i64, String, u64),
    text: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct AuditPageReply {
    rows: Vec<AuditPageLine>,
    next: Option<(i64, String, u64)>,
}

/// The audit log of this node, if it keeps one.
fn log_of(server: &Server) -> Result<Arc<AuditLog>, Problem> {
    let missing = || Problem::new(404, "this server keeps no audit log: audit.enabled is false");
    server.audit.clone().ok_or_else(missing)
}

fn read(query: &str, now: Timestamp) -> Result<AuditPageRequest, Problem> {
    let mut asked = AuditPageRequest {
        limit: LIMIT,
        ..AuditPageRequest::default()
    };
    for (name, value) in read_query(query, &KNOWN)? {
        match name {
            "since" => asked.since = Some(read_since(&value, now)?.nanos()),
            "until" => {
                let until = read_since(&value, now).map_err(|_| {
                    Problem::field("until", "must be a time, or how long ago, such as \"2h\"")
                })?;
                asked.until = Some(until.nanos());
            }
            "actor" => asked.actor = Some(value),
            "action" => asked.action = Some(value),
            "resource" => asked.resource = Some(value),
            "order" => {
                asked.oldest_first = match value.as_str() {
                    "asc" => true,
                    "desc" => false,
                    _ => return Err(Problem::field("order", "must be asc or desc")),
                }
            }
            "cursor" => {
                let place = read_cursor(&value);
                asked.after =
                    Some(place.ok_or_else(|| Problem::field("cursor", "must be that of an earlier answer"))?);
            }
            _ => {
                let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                asked.limit = limit.ok_or_else(|| {
                    Problem::field("limit", format!("must be a whole number from 1 to {LIMIT_MAX}"))
                })?;
            }
        }
    }
    Ok(asked)
}

fn read_cursor(text: &str) -> Option<(i64, String, u64)> {
    let (time, rest) = text.split_once('.')?;
    let (seq, node) = rest.split_once('.')?;
    Some((time.parse().ok()?, node.to_owned(), seq.parse().ok()?))
}

fn cursor((time, node, seq): &(i64, String, u64)) -> String {
    format!("{time}.{seq}.{node}")
}

/// Lines of this node's audit log.
pub(crate) async fn own(server: &Server, asked: AuditPageRequest) -> Result<AuditPageReply, String> {
    let Some(audit) = server.audit.clone() else {
        return Ok(AuditPageReply::default());
    };
    let query = AuditQuery {
        since: asked.since.map(Timestamp::from_nanos),
        until: asked.until.map(Timestamp::from_nanos),
        actor: asked.actor,
        action: asked.action,
        resource: asked.resource,
        order: match asked.oldest_first {
            true => LineOrder::OldestFirst,
            false => LineOrder::NewestFirst,
        },
        after: asked.after.map(|(time, node, seq)| LinePosition {
            time: Timestamp::from_nanos(time),
            node,
            seq,
        }),
        limit: asked.limit,
    };
    let node = server.peers.as_ref().map_or("", |peers| peers.name()).to_owned();
    let page = tokio::task::spawn_blocking(move || audit.read(&query)).await;
    let page = page.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
    let rows = page.rows.into_iter().map(|row| AuditPageLine {
        at: (row.time.nanos(), node.clone(), row.seq),
        text: row.text,
    });
    Ok(AuditPageReply {
        rows: rows.collect(),
        next: page.next.map(|next| (next.time.nanos(), next.node, next.seq)),
    })
}

/// Merges the lines of all nodes in order. Lines beyond the point where some node's page ended are
/// left for the next page.
fn join(pages: Vec<AuditPageReply>, oldest_first: bool, limit: usize) -> AuditPageReply {
    let before = |one: &(i64, String, u64), other: &(i64, String, u64)| match oldest_first {
        true => one.cmp(other),
        false => other.cmp(one),
    };
    let left_off = pages
        .iter()
        .filter_map(|page| page.next.clone())
        .min_by(|a, b| before(a, b));
    let mut rows: Vec<AuditPageLine> = pages.into_iter().flat_map(|page| page.rows).collect();
    rows.sort_by(|a, b| before(&a.at, &b.at));
    if let Some(left_off) = &left_off {
        rows.retain(|row| before(&row.at, left_off).is_le());
    }
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = match more {
        true => rows.last().map(|row| row.at.clone()),
        false => left_off,
    };
    AuditPageReply { rows, next }
}

pub(crate) async fn list(server: &Server, call: &ApiCall, query: &str) -> Result<Answer, Problem> {
    log_of(server)?;
    let asked = read(query, server.wall.now())?;
    let mut missing = Vec::new();
    let pages = match &server.peers {
        None => {
            let own = own(server, asked.clone()).await;
            vec![own.map_err(|why| Problem::new(503, format!("reading the audit log: {why}")))?]
        }
        Some(peers) => {
            let heard = gather::<AuditPageReply>(&**peers, "audit", &asked).await;
            missing = heard.missing;
            heard.answers.into_iter().map(|(_, told)| told).collect()
        }
    };
    let found = join(pages, asked.oldest_first, asked.limit);
    let next = found.next.as_ref().map(cursor);
    let lines_wanted = call
        .header("accept")
        .is_some_and(|accept| accept.contains("application/jsonl"));
    if lines_wanted {
        let text: String = found.rows.iter().map(|row| format!("{}\n", row.text)).collect();
        let mut answer = json_answer(StatusCode::OK, text, &call.id);
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/jsonl"));
        if let Some(Ok(next)) = next.map(|next| HeaderValue::from_str(&next)) {
            headers.insert(CURSOR, next);
        }
        return Ok(answer);
    }
    #[derive(Serialize)]
    struct Page<'a> {
        value: Vec<&'a RawValue>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cursor: Option<String>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        missing: Vec<String>,
    }
    // The original bytes of each line, so that its hash can be computed again.
    let value = found.rows.iter().map(|row| serde_json::from_str(&row.text));
    let page = Page {
        value: value.filter_map(Result::ok).collect(),
        cursor: next,
        missing,
    };
    let text = serde_json::to_vec(&page).expect("names are strings");
    Ok(json_answer(StatusCode::OK, text, &call.id))
}

/// Result of verifying this node's audit log.
pub(crate) async fn own_verify(audit: Arc<AuditLog>) -> Result<Value, String> {
    let found = tokio::task::spawn_blocking(move || audit.verify()).await;
    let found = found.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
    serde_json::to_value(found).map_err(|e| e.to_string())
}

pub(crate) async fn verify(server: &Server, call: &ApiCall, query: &str) -> Result<Answer, Problem> {
    let audit = log_of(server)?;
    read_query(query, &[])?;
    let Some(peers) = &server.peers else {
        let found = own_verify(audit).await;
        let found = found.map_err(|why| Problem::new(503, format!("reading the audit log: {why}")))?;
        return Ok(body(call, found));
    };
    let heard = gather::<Value>(&**peers, "audit-verify", &json!({})).await;
    let intact = heard.answers.iter().all(|(_, found)| found["intact"] == true);
    let nodes = heard.answers.into_iter().map(|(node, mut found)| {
        found["node"] = json!(node);
        found
    });
    let mut shown = json!({"intact": intact, "nodes": nodes.collect::<Vec<_>>()});
    note_missing(&mut shown, heard.missing);
    Ok(body(call, shown))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(node: &str, times: &[i64], next: bool) -> AuditPageReply {
        let at = |time: &i64| (*time, node.to_owned(), *time as u64);
        AuditPageReply {
            rows: times
                .iter()
                .map(|time| AuditPageLine {
                    at: at(time),
                    text: String::new(),
                })
                .collect(),
            next: times.last().filter(|_| next).map(at),
        }
    }

    #[test]
    fn lines_of_all_nodes_come_in_one_order_and_none_is_left_out() {
        let pages = vec![page("a", &[9, 7, 5], true), page("b", &[8, 4, 1], false)];
        let joined = join(pages, false, 10);
        let times: Vec<i64> = joined.rows.iter().map(|row| row.at.0).collect();
        // Node a may have more lines between 5 and 4.
        assert_eq!(times, [9, 8, 7, 5]);
        assert_eq!(joined.next, Some((5, "a".into(), 5)));
        let joined = join(vec![page("a", &[1, 3], false), page("b", &[2], false)], true, 2);
        let times: Vec<i64> = joined.rows.iter().map(|row| row.at.0).collect();
        assert_eq!(times, [1, 2]);
        let next = joined.next.unwrap();
        assert_eq!(read_cursor(&cursor(&next)), Some(next));
        let last = join(vec![page("a", &[1], false)], true, 2);
        assert_eq!(last.next, None);
    }
}
