//! The attempts of one subscription: `GET /postrider/v1/subscription/attempts`.

use crate::Server;
use crate::dead_letters::read_query;
use crate::events::{self, ask, none_of};
use crate::own_api::Problem;
use crate::peers::search;
use crate::stats;
use postrider_core::ids::SubscriptionId;
use postrider_core::outcome::Outcome;
use postrider_engine::recorder::{AttemptFilter, AttemptHistory, EventQuery, SearchCursor};
use postrider_engine::subscription_health::words_of;
use serde_json::{Value, json};

const LIMIT: usize = 50;
const LIMIT_MAX: usize = events::LIMIT_MAX;
/// The value of `outcome` that stands for every outcome but success.
const FAILED: &str = "failed";

/// A request for the attempts of a subscription.
#[derive(Clone, Debug)]
pub(crate) struct AttemptsQuery {
    pub of: SubscriptionId,
    pub filter: AttemptFilter,
    pub limit: usize,
    /// Read by the module that issued the cursor: [`own_page`] on a single server,
    /// [`search::attempts`] in a cluster.
    pub cursor: Option<String>,
}

impl AttemptsQuery {
    fn read(server: &Server, query: &str) -> Result<AttemptsQuery, Problem> {
        let (mut id, mut filter, mut limit, mut cursor) = (None, AttemptFilter::All, LIMIT, None);
        for (name, value) in read_query(query, &["id", "outcome", "limit", "cursor"])? {
            match name {
                _ if value.is_empty() => {}
                "id" => id = Some(value),
                "outcome" => filter = read_filter(&value)?,
                "limit" => {
                    let number = value.parse().ok().filter(|n| (1..=LIMIT_MAX).contains(n));
                    let reason = format!("must be a number from 1 to {LIMIT_MAX}");
                    limit = number.ok_or_else(|| Problem::field("limit", reason))?;
                }
                _ => cursor = Some(value),
            }
        }
        Ok(AttemptsQuery {
            of: stats::find_with_resource(server, id)?.0.id,
            filter,
            limit,
            cursor,
        })
    }
}

fn read_filter(value: &str) -> Result<AttemptFilter, Problem> {
    if value.eq_ignore_ascii_case(FAILED) {
        return Ok(AttemptFilter::Failed);
    }
    let mut outcomes = Outcome::ALL.into_iter();
    let found = outcomes.find(|outcome| outcome.name().eq_ignore_ascii_case(value));
    let known: Vec<&str> = std::iter::once(FAILED)
        .chain(Outcome::ALL.map(Outcome::name))
        .collect();
    let found = found.ok_or_else(|| none_of("outcome", value, &known))?;
    Ok(AttemptFilter::Outcome(found))
}

/// `GET subscription/attempts?id=`: one page of attempts of the latest events. Within the page,
/// failed attempts come first.
pub(crate) async fn attempts(server: &Server, query: &str) -> Result<Value, Problem> {
    let asked = AttemptsQuery::read(server, query)?;
    let mut found = match &server.peers {
        None => own_page(server, &asked).await?,
        Some(peers) => search::attempts(&**peers, &asked).await?,
    };
    if let Some(shown) = found["value"].as_array_mut() {
        let at = |one: &Value| one["at"].as_str().unwrap_or_default().to_owned();
        shown.sort_by_cached_key(|one| {
            let succeeded = one["outcome"] == Outcome::Success.name();
            (succeeded, std::cmp::Reverse(at(one)))
        });
    }
    Ok(found)
}

/// Start of a page of attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageStart {
    cursor: SearchCursor,
    /// How many attempts of the first event have not been shown yet: its oldest ones. None: all of
    /// them.
    left: Option<usize>,
}

impl PageStart {
    fn read(text: &str) -> Result<PageStart, Problem> {
        let (cursor, left) = match text.split_once('~') {
            Some((cursor, left)) => (cursor, Some(left.parse().map_err(|_| bad_cursor())?)),
            None => (text, None),
        };
        let cursor = cursor.parse().map_err(|()| bad_cursor())?;
        Ok(PageStart { cursor, left })
    }

    fn write(self) -> String {
        match self.left {
            Some(left) => format!("{}~{left}", self.cursor),
            None => self.cursor.to_string(),
        }
    }
}

pub(crate) fn bad_cursor() -> Problem {
    Problem::field("cursor", "is not one that an earlier answer gave")
}

/// A page of attempts that this node recorded, for a server that is no node of a cluster.
async fn own_page(server: &Server, asked: &AttemptsQuery) -> Result<Value, Problem> {
    let start = asked.cursor.as_deref().map(PageStart::read).transpose()?;
    let query = EventQuery {
        subscription: Some(asked.of),
        attempts: Some(asked.filter),
        cursor: start.map(|start| start.cursor),
        limit: asked.limit,
        ..EventQuery::default()
    };
    let page = ask(server, move |recordings| recordings.search(&query)).await?;
    let mut next = page.cursor.map(|cursor| PageStart { cursor, left: None });
    let mut value: Vec<Value> = Vec::new();
    for line in &page.events {
        let before = SearchCursor {
            event: line.behind.event + 1,
            ..line.behind
        };
        let of = line.subscriptions.iter().filter(|one| one.id == asked.of);
        let mut attempts: Vec<&AttemptHistory> = of.flat_map(|one| &one.attempts).collect();
        if let Some(left) = start
            .filter(|start| start.cursor == before)
            .and_then(|start| start.left)
        {
            attempts.truncate(left);
        }
        let left = attempts.len().saturating_sub(asked.limit - value.len());
        let event = event(&line.id, &line.event_type, &line.subject);
        let shown = attempts.drain(left..);
        value.extend(shown.map(|attempt| shown_attempt(&event, &events::attempt(attempt))));
        if left > 0 {
            next = Some(PageStart {
                cursor: before,
                left: Some(left),
            });
            break;
        }
    }
    let mut found = json!({"value": value});
    if let Some(next) = next {
        found["cursor"] = json!(next.write());
    }
    Ok(found)
}

/// The members that identify the event of an attempt.
fn event(id: &str, event_type: &str, subject: &str) -> Value {
    json!({"id": id, "type": event_type, "subject": subject})
}

/// An entry of the attempts list, from an attempt as the event history shows it.
pub(crate) fn shown_attempt(event: &Value, attempt: &Value) -> Value {
    let status = attempt["status"]
        .as_u64()
        .and_then(|status| u16::try_from(status).ok());
    let mut shown = json!({
        "at": attempt["at"],
        "event": event,
        "attempt": attempt["number"],
        "outcome": attempt["outcome"],
        "text": words_of(outcome_of(attempt), status),
        "latencyMs": attempt["timings"]["totalMs"],
    });
    let answer = &attempt["response"]["snippet"];
    for (name, value) in [
        ("status", &attempt["status"]),
        ("answer", answer),
        ("failure", &attempt["failure"]),
        ("node", &attempt["node"]),
    ] {
        if !value.is_null() {
            shown[name] = value.clone();
        }
    }
    shown
}

/// Parses the outcome of an attempt from the form that nodes and event histories write.
pub(crate) fn outcome_of(attempt: &Value) -> Option<Outcome> {
    let name = attempt["outcome"].as_str()?;
    Outcome::ALL.into_iter().find(|outcome| outcome.name() == name)
}
