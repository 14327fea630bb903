//! A search over the recordings of all nodes: their pages are merged in the order of time, and the
//! cursor holds the progress at each node.

use super::{PeerResponses, Peers, event_history, gather, note_missing};
use crate::Server;
use crate::attempts::{AttemptsQuery, bad_cursor, outcome_of, shown_attempt};
use crate::events;
use crate::own_api::Problem;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::time::Timestamp;
use postrider_engine::recorder::{EventQuery, EventState, SearchCursor};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Requests to the nodes for one page, when most of their events turn out not to match.
const ROUNDS_MAX: usize = 4;
/// Lines that each node is asked for when the lines are filtered afterwards.
const LOOKED_THROUGH: usize = 250;

/// Peer request for a page of events. Filters on outcomes are not part of it, because one node does
/// not know all outcomes of an event.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PeerSearchRequest {
    id: Option<String>,
    topic: Option<u64>,
    subscription: Option<u64>,
    event_type: Option<String>,
    subject: Option<String>,
    since: Option<i64>,
    until: Option<i64>,
    /// By node name. A node without a cursor begins with its latest event.
    cursors: BTreeMap<String, String>,
    limit: usize,
}

/// A page of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerSearchPage {
    lines: Vec<PeerSearchLine>,
    /// None when there are no more events.
    cursor: Option<String>,
    searched: Option<(i64, i64)>,
}

/// An event as the node that accepted it knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerSearchLine {
    line: Value,
    accepted: i64,
    place: Option<String>,
    /// Cursor of a page that begins with this event …
    before: String,
    /// … or after it.
    behind: String,
    /// The subscriptions that the event matched, with their names.
    matched: Vec<(u64, String)>,
}

pub async fn answer(server: &Arc<Server>, asked: PeerSearchRequest) -> Result<PeerSearchPage, String> {
    let own = server.peers.as_ref().and_then(|peers| {
        // If two nodes have the same name, each is called by its id too.
        let whole = format!("{} ({})", peers.name(), peers.id());
        asked
            .cursors
            .get(&whole)
            .or_else(|| asked.cursors.get(peers.name()))
    });
    let cursor = match own.map(String::as_str) {
        None => None,
        Some(ENDED) => return Ok(PeerSearchPage::default()),
        Some(text) => Some(
            text.parse::<SearchCursor>()
                .map_err(|()| "the cursor is not ours")?,
        ),
    };
    let query = EventQuery {
        id: asked.id,
        topic: asked.topic.map(TopicId),
        subscription: asked.subscription.map(SubscriptionId),
        event_type: asked.event_type,
        subject: asked.subject,
        since: asked.since.map(Timestamp::from_nanos),
        // A node that joins the search only now must not return events that are later than those
        // already shown.
        until: asked
            .until
            .filter(|_| cursor.is_none())
            .map(Timestamp::from_nanos),
        cursor,
        limit: asked.limit.min(events::LIMIT_MAX),
        ..EventQuery::default()
    };
    let page = events::ask(server, move |recordings| recordings.search(&query)).await;
    let page = page.map_err(|problem| problem.detail)?;
    let lines = page.events.iter().map(|line| PeerSearchLine {
        accepted: line.accepted.nanos(),
        place: line.place.map(|place| place.to_string()),
        before: SearchCursor {
            event: line.behind.event + 1,
            ..line.behind
        }
        .to_string(),
        behind: line.behind.to_string(),
        matched: line
            .subscriptions
            .iter()
            .map(|one| (one.id.0, one.name.clone()))
            .collect(),
        line: events::line(line),
    });
    Ok(PeerSearchPage {
        lines: lines.collect(),
        cursor: page.cursor.map(|cursor| cursor.to_string()),
        searched: page.searched.map(|(from, to)| (from.nanos(), to.nanos())),
    })
}

/// Cursor of a node that has no more events.
const ENDED: &str = "";

/// Progress of a search, encoded in its cursor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct SearchProgress {
    #[serde(rename = "n")]
    nodes: BTreeMap<String, String>,
    /// End of the searched time range, moved back as events are shown.
    #[serde(rename = "t")]
    until: Option<i64>,
    /// Position of an event of which only a part has been shown, and how many of its attempts
    /// remain: the oldest.
    #[serde(rename = "p", default, skip_serializing_if = "Option::is_none")]
    part: Option<(String, usize)>,
}

impl SearchProgress {
    fn read(text: &str) -> Option<SearchProgress> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    fn write(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).expect("names are strings"))
    }

    fn is_over(&self, asked: &[String]) -> bool {
        asked
            .iter()
            .all(|node| self.nodes.get(node).is_some_and(|cursor| cursor == ENDED))
    }
}

pub async fn search(server: &Server, peers: &dyn Peers, query: &str) -> Result<Value, Problem> {
    let mut progress = SearchProgress::default();
    let query = events::read_search_from(server, query, |_, cursor| {
        progress = SearchProgress::read(cursor).ok_or_else(bad_cursor)?;
        Ok(())
    })?;
    let looks_through = query.state.is_some() || query.outcome.is_some();
    let mut value: Vec<Value> = Vec::new();
    let looked = look(peers, &query, looks_through, &mut progress, |found, happened| {
        value.extend(shown(&query, found, happened));
        match value.len() < query.limit {
            true => SearchStep::More,
            false => SearchStep::Full,
        }
    });
    let looked = looked.await;
    let mut found = json!({"value": value});
    if let Some((from, to)) = looked.searched {
        let text = |nanos| Timestamp::from_nanos(nanos).to_string();
        found["searched"] = json!({"from": text(from), "to": text(to)});
    }
    if !looked.over {
        found["cursor"] = json!(progress.write());
    }
    note_missing(&mut found, looked.missing);
    Ok(found)
}

/// Attempts of one subscription that a page shows of one event.
struct PickedAttempts {
    place: String,
    accepted: i64,
    event: Value,
    /// Range in the list of matching attempts, which is in the order of time.
    range: Range<usize>,
}

/// A page of the attempts of one subscription, whichever nodes made them.
pub(crate) async fn attempts(peers: &dyn Peers, asked: &AttemptsQuery) -> Result<Value, Problem> {
    let mut progress = match &asked.cursor {
        Some(text) => SearchProgress::read(text).ok_or_else(bad_cursor)?,
        None => SearchProgress::default(),
    };
    let query = EventQuery {
        subscription: Some(asked.of),
        limit: asked.limit,
        ..EventQuery::default()
    };
    let wanted = |delivery: Value| -> Vec<Value> {
        let mut delivery = delivery;
        let Value::Array(mut attempts) = delivery["attempts"].take() else {
            return Vec::new();
        };
        attempts.retain(|attempt| outcome_of(attempt).is_some_and(|outcome| asked.filter.takes(outcome)));
        attempts
    };
    let of_subscription = |happened: Vec<Value>| -> Vec<Value> {
        let told = event_history::group_by_subscription(happened).remove(&asked.of.0);
        wanted(event_history::merge_delivery(told.unwrap_or_default()))
    };
    let begun = progress.part.take();
    let (mut part, mut picked, mut count) = (None, Vec::new(), 0);
    let looked = look(peers, &query, true, &mut progress, |found, happened| {
        let Some(place) = found.place.as_ref().filter(|_| found.line.is_object()) else {
            return SearchStep::More;
        };
        let mut end = of_subscription(happened).len();
        if let Some((_, left)) = begun.as_ref().filter(|(at, _)| at == place) {
            end = end.min(*left);
        }
        let from = end.saturating_sub(asked.limit - count);
        count += end - from;
        if end > from {
            picked.push(PickedAttempts {
                place: place.clone(),
                accepted: found.accepted,
                event: json!({
                    "id": found.line["id"],
                    "type": found.line["type"],
                    "subject": found.line["subject"],
                }),
                range: from..end,
            });
        }
        match (from, count < asked.limit) {
            (0, true) => SearchStep::More,
            (0, false) => SearchStep::Full,
            _ => {
                part = Some((place.clone(), from));
                SearchStep::FullWithin
            }
        }
    });
    let looked = looked.await;
    progress.part = part;
    let places = picked.iter().map(|one| Some((one.place.clone(), one.accepted)));
    let (happened, more) = event_history::gather_deliveries(peers, places.collect(), false).await;
    let mut value: Vec<Value> = Vec::new();
    for (one, happened) in picked.iter().zip(happened) {
        let attempts = of_subscription(happened);
        let some = attempts.iter().skip(one.range.start).take(one.range.len());
        value.extend(some.map(|attempt| shown_attempt(&one.event, attempt)));
    }
    let mut found = json!({"value": value});
    if !looked.over {
        found["cursor"] = json!(progress.write());
    }
    let mut missing = looked.missing;
    missing.extend(more);
    note_missing(&mut found, missing);
    Ok(found)
}

/// Result of examining an event during a search.
enum SearchStep {
    More,
    /// The page is full after this event …
    Full,
    /// … or with a part of this event.
    FullWithin,
}

/// Coverage of a search for one page.
struct SearchCoverage {
    /// Whether there are no more events.
    over: bool,
    searched: Option<(i64, i64)>,
    missing: Vec<String>,
}

/// Passes events to `take`, the latest first, with a brief form of their deliveries at all nodes,
/// until `take` has a full page. `looks_through` says that `take` filters events, so more are
/// requested at a time.
async fn look(
    peers: &dyn Peers,
    query: &EventQuery,
    looks_through: bool,
    progress: &mut SearchProgress,
    mut take: impl FnMut(&PeerSearchLine, Vec<Value>) -> SearchStep,
) -> SearchCoverage {
    let mut looked = SearchCoverage {
        over: false,
        searched: None,
        missing: Vec::new(),
    };
    for _ in 0..ROUNDS_MAX {
        let asked = PeerSearchRequest {
            id: query.id.clone(),
            topic: query.topic.map(|id| id.0),
            subscription: query.subscription.map(|id| id.0),
            event_type: query.event_type.clone(),
            subject: query.subject.clone(),
            since: query.since.map(Timestamp::nanos),
            until: query
                .until
                .map(Timestamp::nanos)
                .into_iter()
                .chain(progress.until)
                .min(),
            cursors: progress.nodes.clone(),
            limit: match looks_through {
                true => LOOKED_THROUGH.max(query.limit),
                false => query.limit,
            },
        };
        let heard: PeerResponses<PeerSearchPage> = gather(peers, "search", &asked).await;
        looked.missing.extend(heard.missing);
        let nodes: Vec<String> = heard.answers.iter().map(|(node, _)| node.clone()).collect();
        let most = match looks_through {
            true => event_history::PLACES_MAX,
            false => query.limit,
        };
        let merged = merge(heard.answers, most);
        if let Some((from, to)) = merged.searched {
            let known = looked.searched.unwrap_or((from, to));
            looked.searched = Some((known.0.min(from), known.1.max(to)));
        }
        let places = merged.lines.iter().map(|(_, found)| {
            let place = found.place.clone()?;
            Some((place, found.accepted))
        });
        let (happened, more) = event_history::gather_deliveries(peers, places.collect(), true).await;
        looked.missing.extend(more);
        let (mut used, mut full) = (0, false);
        for ((_, found), happened) in merged.lines.iter().zip(happened) {
            let taken = take(found, happened);
            full = !matches!(taken, SearchStep::More);
            if matches!(taken, SearchStep::FullWithin) {
                break;
            }
            used += 1;
            let until = progress.until.unwrap_or(i64::MAX);
            progress.until = Some(until.min(found.accepted));
            if full {
                break;
            }
        }
        let cursors = merged.cursors_after(used);
        progress.nodes.extend(cursors);
        looked.over = progress.is_over(&nodes);
        if looked.over || full || !looks_through {
            break;
        }
    }
    looked
}

/// The merged pages of several nodes.
#[derive(Debug, PartialEq)]
struct MergedSearchPages {
    /// Each line with the node that has it. The lines of one node stay in their order.
    lines: Vec<(String, PeerSearchLine)>,
    /// Cursor of each node when all these lines have been shown.
    cursors: BTreeMap<String, String>,
    searched: Option<(i64, i64)>,
}

impl MergedSearchPages {
    /// Cursor of each node when only the first `used` lines have been shown.
    fn cursors_after(&self, used: usize) -> BTreeMap<String, String> {
        let mut cursors = self.cursors.clone();
        let unused = self.lines.get(used..).unwrap_or_default();
        for (node, found) in unused.iter().rev() {
            cursors.insert(node.clone(), found.before.clone());
        }
        cursors
    }
}

/// Merges pages, the latest event first, up to `most` lines. Lines older than the end of any
/// unfinished page are left for later: that node could still have newer ones.
fn merge(pages: Vec<(String, PeerSearchPage)>, most: usize) -> MergedSearchPages {
    let going_on = pages.iter().filter(|(_, page)| page.cursor.is_some());
    let horizon = going_on
        .filter_map(|(_, page)| page.searched)
        .map(|(from, _)| from)
        .max();
    let latest = pages
        .iter()
        .filter_map(|(_, page)| page.searched)
        .map(|(_, to)| to)
        .max();
    let oldest = pages
        .iter()
        .filter_map(|(_, page)| page.searched)
        .map(|(from, _)| from)
        .min();
    let mut cursors = BTreeMap::new();
    let mut heads: Vec<(String, std::vec::IntoIter<PeerSearchLine>)> = Vec::new();
    for (node, page) in pages {
        cursors.insert(node.clone(), page.cursor.unwrap_or_else(|| ENDED.to_owned()));
        heads.push((node, page.lines.into_iter()));
    }
    let mut lines = Vec::new();
    while lines.len() < most {
        let first = |(at, (_, rest)): (usize, &(String, std::vec::IntoIter<PeerSearchLine>))| {
            let accepted = rest.as_slice().first()?.accepted;
            Some((accepted, std::cmp::Reverse(at)))
        };
        let Some((accepted, std::cmp::Reverse(at))) = heads.iter().enumerate().filter_map(first).max() else {
            break;
        };
        if horizon.is_some_and(|horizon| accepted < horizon) {
            break;
        }
        let (node, rest) = &mut heads[at];
        lines.extend(rest.next().map(|found| (node.clone(), found)));
    }
    for (node, rest) in &heads {
        if let Some(first) = rest.as_slice().first() {
            cursors.insert(node.clone(), first.before.clone());
        }
    }
    MergedSearchPages {
        lines,
        cursors,
        searched: horizon
            .or(oldest)
            .zip(latest)
            .map(|(from, to)| (from.min(to), to)),
    }
}

/// A line with the outcome of its event; none if the query filters by another outcome.
fn shown(query: &EventQuery, found: &PeerSearchLine, happened: Vec<Value>) -> Option<Value> {
    let mut told = event_history::group_by_subscription(happened);
    let mut deliveries = Vec::with_capacity(found.matched.len());
    for (number, name) in &found.matched {
        let delivery = event_history::merge_delivery(told.remove(number).unwrap_or_default());
        deliveries.push((*number, name, delivery));
    }
    let state = |delivery: &Value| delivery["state"].as_str().unwrap_or_default().to_owned();
    let states: Vec<String> = deliveries.iter().map(|(.., delivery)| state(delivery)).collect();
    let of_all = event_history::state_of_all(&states).to_owned();
    let looked_at = deliveries.iter().filter(|(number, ..)| {
        let wanted = query.subscription;
        wanted.is_none_or(|wanted| wanted.0 == *number)
    });
    let fits = |wanted: EventState| {
        looked_at
            .clone()
            .any(|(.., delivery)| state(delivery) == wanted.name())
            || (query.subscription.is_none() && of_all == wanted.name())
    };
    let came_to = |wanted: &str| {
        let mut attempts = looked_at
            .clone()
            .flat_map(|(.., delivery)| delivery["attempts"].as_array().into_iter().flatten());
        attempts.any(|attempt| attempt["outcome"] == wanted)
    };
    let meant = query.state.is_none_or(fits) && query.outcome.is_none_or(|outcome| came_to(outcome.name()));
    if !meant || !found.line.is_object() {
        return None;
    }
    let mut line = found.line.clone();
    let attempts = |delivery: &Value| delivery["attempts"].as_array().map_or(0, Vec::len);
    line["state"] = json!(of_all);
    line["attempts"] = json!(
        deliveries
            .iter()
            .map(|(.., delivery)| attempts(delivery))
            .sum::<usize>()
    );
    let subscriptions = deliveries
        .iter()
        .take(events::NAMED_MAX)
        .map(|(_, name, delivery)| {
            let mut shown = json!({"name": name, "state": delivery["state"]});
            let last = delivery["attempts"].as_array().and_then(|all| all.last());
            if let Some(last) = last {
                shown["lastOutcome"] = last["outcome"].clone();
            }
            shown
        });
    line["subscriptions"] = subscriptions.collect();
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::RawPeerReplies;
    use async_trait::async_trait;
    use bytes::Bytes;
    use postrider_core::outcome::Outcome;
    use postrider_engine::recorder::{AttemptFilter, DeliveryState};
    use std::collections::BTreeSet;
    use std::time::Duration;
    use tokio::sync::mpsc;

    fn found(accepted: i64) -> PeerSearchLine {
        PeerSearchLine {
            line: json!({"id": accepted.to_string()}),
            accepted,
            before: format!("before {accepted}"),
            behind: format!("behind {accepted}"),
            ..PeerSearchLine::default()
        }
    }

    fn page(accepted: &[i64], cursor: bool) -> PeerSearchPage {
        let from = accepted.iter().min().copied();
        let to = accepted.iter().max().copied();
        PeerSearchPage {
            lines: accepted.iter().map(|at| found(*at)).collect(),
            cursor: cursor.then(|| format!("behind {}", from.unwrap_or(0))),
            searched: from.zip(to),
        }
    }

    fn times(merged: &MergedSearchPages) -> Vec<i64> {
        merged.lines.iter().map(|(_, found)| found.accepted).collect()
    }

    #[test]
    fn pages_become_one_in_the_order_of_time() {
        let pages = || {
            vec![
                ("a".to_owned(), page(&[9, 6, 3], false)),
                ("b".to_owned(), page(&[8, 7, 1], false)),
            ]
        };
        let merged = merge(pages(), 10);
        assert_eq!(times(&merged), [9, 8, 7, 6, 3, 1]);
        assert!(merged.cursors.values().all(|cursor| cursor == ENDED));
        assert_eq!(merged.searched, Some((1, 9)));
        let merged = merge(pages(), 4);
        assert_eq!(times(&merged), [9, 8, 7, 6]);
        assert_eq!(merged.cursors["a"], "before 3");
        assert_eq!(merged.cursors["b"], "before 1");
        // As if only the first line had been shown.
        assert_eq!(merged.cursors_after(1)["a"], "before 6");
        assert_eq!(merged.cursors_after(1)["b"], "before 8");
        assert_eq!(merged.cursors_after(4), merged.cursors);
    }

    #[test]
    fn nothing_is_shown_that_a_later_page_would_have_to_go_back_behind() {
        // The first node's page reaches back to 5 only: older events of the other node are left for
        // later.
        let pages = vec![
            ("a".to_owned(), page(&[9, 5], true)),
            ("b".to_owned(), page(&[8, 4, 2], false)),
        ];
        let merged = merge(pages, 10);
        assert_eq!(times(&merged), [9, 8, 5]);
        assert_eq!(merged.cursors["a"], "behind 5");
        assert_eq!(merged.cursors["b"], "before 4");
        assert_eq!(merged.searched, Some((5, 9)));
    }

    // However the pages are cut, every event is shown once, the latest first.
    #[test]
    fn turning_pages_shows_everything_once() {
        let nodes: [(&str, Vec<i64>); 3] = [
            ("a", vec![90, 80, 70, 60, 50, 40]),
            ("b", vec![85, 84, 83, 82]),
            ("c", vec![99, 1]),
        ];
        for limit in 1..8 {
            let mut cursors: BTreeMap<String, String> = BTreeMap::new();
            let mut seen = Vec::new();
            for _ in 0..40 {
                let pages = nodes.iter().map(|(name, all)| {
                    let from = match cursors.get(*name).map(String::as_str) {
                        None => 0,
                        Some(ENDED) => all.len(),
                        Some(cursor) => {
                            let (word, at) = cursor.split_once(' ').unwrap();
                            let at = all.iter().position(|one| one.to_string() == at).unwrap();
                            at + usize::from(word == "behind")
                        }
                    };
                    let some: Vec<i64> = all[from..].iter().take(limit).copied().collect();
                    let more = from + some.len() < all.len();
                    ((*name).to_owned(), page(&some, more))
                });
                let merged = merge(pages.collect(), limit);
                seen.extend(times(&merged));
                cursors = merged.cursors;
                if cursors.values().all(|cursor| cursor == ENDED) {
                    break;
                }
            }
            let mut expected: Vec<i64> = nodes.iter().flat_map(|(_, all)| all.clone()).collect();
            expected.sort_by_key(|at| std::cmp::Reverse(*at));
            assert_eq!(seen, expected, "limit {limit}");
        }
    }

    #[test]
    fn progress_is_read_as_it_was_written() {
        let progress = SearchProgress {
            nodes: BTreeMap::from([("a".into(), "1-2-3".into()), ("b".into(), String::new())]),
            until: Some(5),
            part: Some(("1:0".into(), 2)),
        };
        assert_eq!(SearchProgress::read(&progress.write()), Some(progress.clone()));
        assert!(!progress.is_over(&["a".into(), "b".into()]) && progress.is_over(&["b".into()]));
        assert!(!progress.is_over(&["new".into()]));
        for bad in ["", "1-2-3", "bm90IGpzb24"] {
            assert_eq!(SearchProgress::read(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_line_is_judged_by_what_all_nodes_know() {
        let found = PeerSearchLine {
            matched: vec![(1, "one".into()), (2, "two".into())],
            ..found(10)
        };
        let attempt = |outcome: &str, kind: &str| json!({"at": "1", "number": 1, "outcome": outcome, "decision": {"kind": kind}});
        let happened = vec![
            json!({"number": 1, "attempts": [attempt("Success", "done")], "ended": {"at": "2", "disposition": "delivered"}}),
            json!({"number": 2, "attempts": [attempt("Busy", "retry")]}),
        ];
        let look = |query: EventQuery| shown(&query, &found, happened.clone());
        let line = look(EventQuery::default()).unwrap();
        assert_eq!((&line["state"], &line["attempts"]), (&json!("mixed"), &json!(2)));
        assert_eq!(
            line["subscriptions"],
            json!([
                {"name": "one", "state": "delivered", "lastOutcome": "Success"},
                {"name": "two", "state": "retrying", "lastOutcome": "Busy"},
            ])
        );
        let state = |state, subscription: Option<u64>| EventQuery {
            state: Some(state),
            subscription: subscription.map(SubscriptionId),
            ..EventQuery::default()
        };
        assert!(look(state(EventState::Mixed, None)).is_some());
        let delivered = EventState::All(DeliveryState::Delivered);
        assert!(look(state(delivered, None)).is_some());
        assert!(look(state(delivered, Some(1))).is_some());
        assert!(look(state(delivered, Some(2))).is_none());
        assert!(look(state(EventState::All(DeliveryState::Pending), None)).is_none());
        let outcome = |outcome, subscription: Option<u64>| EventQuery {
            outcome: Some(outcome),
            subscription: subscription.map(SubscriptionId),
            ..EventQuery::default()
        };
        assert!(look(outcome(Outcome::Busy, None)).is_some());
        assert!(look(outcome(Outcome::Busy, Some(1))).is_none());
        assert!(look(outcome(Outcome::NotFound, None)).is_none());
    }

    /// Two nodes: one accepted the events, both attempted them.
    struct TwoNodes {
        places: Vec<String>,
    }

    impl TwoNodes {
        /// The attempts of an event for subscription 1 that a node made: the first node made the
        /// first, the second node the others.
        fn attempts(&self, place: &str, second: bool, brief: bool) -> Value {
            let number = self.places.iter().position(|known| known == place).unwrap();
            let numbers = if second { 2..4 } else { 1..2 };
            let attempt = |n: usize| {
                let outcome = if n == 3 { "Success" } else { "GenericError" };
                let mut shown = json!({
                    "at": format!("T{number}-{n}"), "number": n, "outcome": outcome,
                    "decision": {"kind": if n == 3 { "done" } else { "retry" }},
                });
                if !brief {
                    shown["status"] = json!(if n == 3 { 200 } else { 500 });
                    shown["timings"] = json!({"totalMs": 1.5});
                    shown["response"] = json!({"snippet": "sorry", "truncated": false});
                    shown["node"] = json!(if second { "b" } else { "a" });
                }
                shown
            };
            json!([
                {"number": 1, "name": "one", "attempts": numbers.map(attempt).collect::<Vec<_>>()},
                {"number": 2, "name": "two", "attempts": [{"at": "T", "number": 1, "outcome": "Busy"}]},
            ])
        }
    }

    #[async_trait]
    impl Peers for TwoNodes {
        fn name(&self) -> &str {
            "a"
        }
        fn id(&self) -> &str {
            "1"
        }
        fn is_present(&self, _: &str) -> bool {
            true
        }
        async fn ask(&self, question: &str, body: Bytes) -> RawPeerReplies {
            let asked: Value = serde_json::from_slice(&body).unwrap();
            let answers = match question {
                "search" => {
                    assert_eq!(asked["subscription"], 1);
                    // Newest first. The cursor is the number of events that were already returned.
                    let told = asked["cursors"]["a"].as_str().map_or(0, |text| match text {
                        ENDED => self.places.len(),
                        text => text.parse::<usize>().unwrap(),
                    });
                    let events = self.places.iter().enumerate().skip(told);
                    let lines = events.map(|(at, place)| PeerSearchLine {
                        line: json!({"id": format!("e{at}"), "type": "T", "subject": "s", "topic": "t"}),
                        accepted: 100 - at as i64,
                        place: Some(place.clone()),
                        before: at.to_string(),
                        behind: (at + 1).to_string(),
                        matched: vec![(1, "one".into()), (2, "two".into())],
                    });
                    let page = PeerSearchPage {
                        lines: lines.collect(),
                        cursor: None,
                        searched: Some((0, 100)),
                    };
                    [("a", json!(page)), ("b", json!(PeerSearchPage::default()))]
                }
                "happened" => {
                    let events = asked["events"].as_array().unwrap();
                    let brief = asked["brief"] == true;
                    let told = |second: bool| {
                        let place = |event: &Value| event[0].as_str().unwrap().to_owned();
                        let all = events.iter().map(|one| self.attempts(&place(one), second, brief));
                        all.collect::<Vec<Value>>()
                    };
                    [("a", json!(told(false))), ("b", json!(told(true)))]
                }
                other => panic!("{other}"),
            };
            RawPeerReplies {
                answers: answers
                    .into_iter()
                    .map(|(node, answer)| (node.to_owned(), Ok(answer.to_string().into())))
                    .collect(),
                missing: vec!["c".into()],
            }
        }
        async fn ask_one(&self, _: &str, _: &str, _: Bytes, _: Duration) -> Result<Bytes, String> {
            Err("nobody".into())
        }
        async fn tell(&self, _: &str, _: Bytes) {}
        async fn hear(&self, _: &str) -> Option<mpsc::Receiver<Bytes>> {
            None
        }
    }

    #[tokio::test]
    async fn attempts_of_all_nodes_are_turned_through_page_by_page() {
        let nodes = TwoNodes {
            places: (0..4).map(|n| format!("{n}:0")).collect(),
        };
        for (filter, expected) in [
            (AttemptFilter::All, 12),
            (AttemptFilter::Failed, 8),
            (AttemptFilter::Outcome(Outcome::Success), 4),
            (AttemptFilter::Outcome(Outcome::Busy), 0),
        ] {
            for limit in 1..14 {
                let mut asked = AttemptsQuery {
                    of: SubscriptionId(1),
                    filter,
                    limit,
                    cursor: None,
                };
                let mut seen = Vec::new();
                for _ in 0..20 {
                    let page = attempts(&nodes, &asked).await.unwrap();
                    assert_eq!(page["missing"], json!(["c"]));
                    let some = page["value"].as_array().unwrap();
                    assert!(some.len() <= limit);
                    seen.extend(some.iter().map(|one| one["at"].as_str().unwrap().to_owned()));
                    asked.cursor = page["cursor"].as_str().map(str::to_owned);
                    if asked.cursor.is_none() {
                        break;
                    }
                }
                assert_eq!(asked.cursor, None);
                let distinct: BTreeSet<&String> = seen.iter().collect();
                assert_eq!((seen.len(), distinct.len()), (expected, expected), "{limit}");
            }
        }
        let asked = AttemptsQuery {
            of: SubscriptionId(1),
            filter: AttemptFilter::Failed,
            limit: 2,
            cursor: None,
        };
        let page = attempts(&nodes, &asked).await.unwrap();
        let expected = |at: &str, number: u64, node: &str| {
            json!({
                "at": at, "event": {"id": "e0", "type": "T", "subject": "s"}, "attempt": number,
                "outcome": "GenericError", "text": "HTTP 500 Internal Server Error", "status": 500,
                "latencyMs": 1.5, "answer": "sorry", "node": node,
            })
        };
        assert_eq!(
            page["value"],
            json!([expected("T0-1", 1, "a"), expected("T0-2", 2, "b")])
        );
        let asked = AttemptsQuery {
            cursor: Some("nonsense".into()),
            ..asked
        };
        assert_eq!(attempts(&nodes, &asked).await.unwrap_err().field, Some("cursor"));
    }
}
