//! Event histories merged from the recordings of several nodes: one node accepted the event, the
//! owner of its partition attempted it, and after a take-over that was another node.

use super::{PeerResponses, Peers, gather};
use crate::Server;
use crate::events;
use postrider_core::ids::SubscriptionId;
use postrider_core::outcome::Outcome;
use postrider_core::time::Timestamp;
use postrider_engine::recorder::{DeliveryState, EventPlace, NextAttemptReason, SubscriptionHistory};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Events whose deliveries are requested at once.
pub const PLACES_MAX: usize = 1000;
/// Member with the id of a subscription in peer replies. It is not shown to clients.
const NUMBER: &str = "number";

#[derive(Serialize, Deserialize)]
pub struct EventHistoryRequest {
    pub id: String,
}

#[derive(Serialize, Deserialize)]
pub struct DeliveriesRequest {
    /// Positions, and when their events were accepted.
    pub events: Vec<(String, i64)>,
    /// Only the members that decide the state are wanted.
    pub brief: bool,
}

/// Deliveries of the requested events, in the order of the request. Only deliveries that have
/// recordings are listed.
pub type ReportedDeliveries = Vec<Vec<Value>>;

/// Recordings of this node about the events with an id.
pub async fn answer_trace(server: &Arc<Server>, asked: EventHistoryRequest) -> Result<Vec<Value>, String> {
    let stories = events::ask(server, move |recordings| recordings.trace(&asked.id)).await;
    let stories = stories.map_err(|problem| problem.detail)?;
    let shown = stories.iter().map(|story| {
        let mut shown = events::recorded_history(server, story);
        let numbers = story.subscriptions.iter().map(|one| one.id.0);
        for (one, number) in each_mut(&mut shown["subscriptions"]).zip(numbers) {
            one[NUMBER] = json!(number);
        }
        // Attempts are requested from all nodes, this one included. Probations are also known of
        // deliveries that have no recordings, so they are kept here.
        for one in each_mut(&mut shown["subscriptions"]) {
            if one["matched"] == true {
                keep_only(one, &["name", "id", "matched", "holds", "ended", NUMBER]);
            }
        }
        shown["accepted"] = json!(story.accepted.nanos());
        shown
    });
    Ok(shown.collect())
}

/// Recordings of this node about the deliveries of events that any node accepted.
pub async fn answer_deliveries(
    server: &Arc<Server>,
    asked: DeliveriesRequest,
) -> Result<ReportedDeliveries, String> {
    if asked.events.len() > PLACES_MAX {
        return Err(format!(
            "no more than {PLACES_MAX} events may be asked for at once"
        ));
    }
    let place = |(place, accepted): &(String, i64)| {
        let place: EventPlace = place.parse().ok()?;
        Some((place, Timestamp::from_nanos(*accepted)))
    };
    let places: Option<Vec<_>> = asked.events.iter().map(place).collect();
    let places = places.ok_or("a place cannot be understood")?;
    let asked_places: Vec<EventPlace> = places.iter().map(|(place, _)| *place).collect();
    let happened = events::ask(server, move |recordings| recordings.happened(&places)).await;
    let happened = happened.map_err(|problem| problem.detail)?;
    let node = server.peers.as_ref().map(|peers| peers.name().to_owned());
    let mut lookups = match asked.brief {
        true => 0,
        false => events::PENDING_LOOKUPS_MAX,
    };
    let mut all = ReportedDeliveries::new();
    for (stories, place) in happened.iter().zip(asked_places) {
        let mut of_one = Vec::new();
        for story in stories {
            if let Some(mut shown) = told(story, node.as_deref(), asked.brief) {
                events::show_pending(server, Some(place), story, &mut shown, &mut lookups).await;
                of_one.push(shown);
            }
        }
        all.push(of_one);
    }
    Ok(all)
}

/// A delivery in a peer reply.
fn told(one: &SubscriptionHistory, node: Option<&str>, brief: bool) -> Option<Value> {
    let mut shown = json!({"name": one.name});
    events::show_delivery_result(&mut shown, one)?;
    shown[NUMBER] = json!(one.id.0);
    for attempt in each_mut(&mut shown["attempts"]) {
        match brief {
            true => keep_only(attempt, &["number", "at", "outcome", "decision"]),
            false => attempt["node"] = json!(node),
        }
    }
    Some(shown)
}

/// The histories of all events with this id, the latest first, and the names of nodes that did not
/// reply.
pub async fn trace(server: &Server, peers: &dyn Peers, id: &str) -> (Vec<Value>, Vec<String>) {
    let asked = EventHistoryRequest { id: id.to_owned() };
    let heard: PeerResponses<Vec<Value>> = gather(peers, "trace", &asked).await;
    let mut missing = heard.missing;
    let mut stories: Vec<Value> = Vec::new();
    for (node, some) in heard.answers {
        // A node of another version may reply anything.
        stories.extend(some.into_iter().filter(Value::is_object).map(|mut story| {
            story["acceptedBy"] = json!(node);
            story
        }));
    }
    stories.sort_by_key(|story| std::cmp::Reverse(story["accepted"].as_i64()));
    stories.truncate(PLACES_MAX);
    let (happened, more) = gather_deliveries(peers, stories.iter().map(placed).collect(), false).await;
    missing.extend(more);
    for (story, happened) in stories.iter_mut().zip(happened) {
        put_together(story, happened);
        for one in each_mut(&mut story["subscriptions"]) {
            let number = one[NUMBER].as_u64();
            drop_member(one, NUMBER);
            if let Some(number) = number {
                events::show_names(server, SubscriptionId(number), one);
            }
        }
        drop_member(story, "accepted");
    }
    (stories, missing)
}

/// Position of a history's event, and when the event was accepted.
fn placed(story: &Value) -> Option<(String, i64)> {
    Some((
        story["position"].as_str()?.to_owned(),
        story["accepted"].as_i64()?,
    ))
}

/// Deliveries of each event at all nodes, and the names of nodes that did not reply. Events without
/// a position had no deliveries.
pub async fn gather_deliveries(
    peers: &dyn Peers,
    places: Vec<Option<(String, i64)>>,
    brief: bool,
) -> (ReportedDeliveries, Vec<String>) {
    let mut all: ReportedDeliveries = places.iter().map(|_| Vec::new()).collect();
    let events: Vec<(String, i64)> = places.iter().flatten().cloned().collect();
    if events.is_empty() {
        return (all, Vec::new());
    }
    let asked = DeliveriesRequest { events, brief };
    let heard: PeerResponses<ReportedDeliveries> = gather(peers, "happened", &asked).await;
    for (_, answer) in heard.answers {
        let slots = all.iter_mut().zip(&places).filter(|(_, place)| place.is_some());
        for ((slot, _), more) in slots.zip(answer) {
            slot.extend(more);
        }
    }
    (all, heard.missing)
}

/// Adds deliveries to an event history.
fn put_together(story: &mut Value, happened: Vec<Value>) {
    let Some(matched) = story["subscriptions"].as_array_mut() else {
        return;
    };
    let mut left = group_by_subscription(happened);
    let mut states = Vec::new();
    for one in matched.iter_mut().filter(|one| one["matched"] == true) {
        let number = one[NUMBER].as_u64().unwrap_or(0);
        let mut told = left.remove(&number).unwrap_or_default();
        told.push(one.clone());
        states.push(take_over(one, merge_delivery(told)));
    }
    // Deliveries that are known only to the nodes that attempted them.
    let mut more = Vec::new();
    for (number, told) in left {
        let delivery = merge_delivery(told);
        let mut one = json!({"name": delivery["name"], "matched": true, NUMBER: number});
        states.push(take_over(&mut one, delivery));
        more.push(one);
    }
    let first_refused = matched.iter().position(|one| one["matched"] != true);
    let at = first_refused.unwrap_or(matched.len());
    matched.splice(at..at, more);
    story["state"] = json!(state_of_all(&states));
}

/// Moves the members of a delivery into a subscription of an event history. Returns its state.
fn take_over(one: &mut Value, delivery: Value) -> String {
    let state = delivery["state"].as_str().unwrap_or_default().to_owned();
    if let (Some(one), Value::Object(delivery)) = (one.as_object_mut(), delivery) {
        for (name, value) in delivery {
            if name != "name" {
                one.insert(name, value);
            }
        }
    }
    state
}

/// State of an event whose deliveries have these states.
pub fn state_of_all(states: &[String]) -> &str {
    match states {
        [] => "unmatched",
        [first, rest @ ..] if rest.iter().all(|state| state == first) => first,
        _ => "mixed",
    }
}

/// Groups the deliveries of one event that nodes reported by subscription id.
pub fn group_by_subscription(told: Vec<Value>) -> BTreeMap<u64, Vec<Value>> {
    let mut by_number: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
    for one in told {
        if let Some(number) = one[NUMBER].as_u64() {
            by_number.entry(number).or_default().push(one);
        }
    }
    by_number
}

/// Merges what nodes reported of one delivery: attempts in the order of time, and the state that
/// follows from all of them.
pub fn merge_delivery(told: Vec<Value>) -> Value {
    let mut attempts: Vec<Value> = Vec::new();
    let (mut ends, mut holds, mut name) = (Vec::new(), Vec::new(), Value::Null);
    for mut one in told {
        take_all(&mut one, "attempts", &mut attempts);
        take_all(&mut one, "holds", &mut holds);
        ends.extend(one.get("ended").cloned());
        if name.as_str().is_none_or(str::is_empty) {
            name = one["name"].take();
        }
    }
    let at = |value: &Value| value["at"].as_str().unwrap_or_default().to_owned();
    attempts.sort_by_key(|attempt| (at(attempt), attempt["number"].as_u64()));
    attempts.dedup();
    let last = attempts.last();
    let retry = last.filter(|last| last["decision"]["kind"] == "retry");
    let end = end_of(ends).filter(|end| {
        // An owner that has lost the partition may end a delivery that the next owner continues:
        // the later record counts.
        retry.is_none_or(|retry| at(retry) <= at(end))
    });
    let holds = holds_of(holds);
    let held = holds
        .last()
        .filter(|hold| hold.get("released").is_none() && end.is_none());
    let state = match (&end, held, last) {
        (Some(end), ..) => end["disposition"].as_str().unwrap_or_default().to_owned(),
        (None, Some(_), _) => DeliveryState::Held.name().to_owned(),
        (None, None, Some(_)) => DeliveryState::Retrying.name().to_owned(),
        (None, None, None) => DeliveryState::Pending.name().to_owned(),
    };
    let next = match (&end, held, retry) {
        (Some(_), ..) => None,
        (None, Some(hold), retry)
            if retry.is_none_or(|retry| retry["decision"]["at"].as_str() <= hold["until"].as_str()) =>
        {
            Some(probation(hold))
        }
        (None, _, Some(retry)) => {
            let decision = &retry["decision"];
            Some(json!({"at": decision["at"], "why": decision["why"], "text": decision["text"]}))
        }
        (None, _, None) => None,
    };
    let mut shown = json!({"name": name, "state": state, "attempts": attempts});
    if let Some(next) = next {
        shown["next"] = next;
    }
    if let Some(end) = end {
        shown["ended"] = end;
    }
    if !holds.is_empty() {
        shown["holds"] = json!(holds);
    }
    shown
}

/// The end of a delivery that counts: the first if all nodes agree, otherwise the last.
fn end_of(mut ends: Vec<Value>) -> Option<Value> {
    ends.sort_by_key(|end| end["at"].as_str().unwrap_or_default().to_owned());
    let blob = ends.iter().find_map(|end| end.get("blob").cloned());
    let pending = ends.iter().find_map(|end| end.get("pending").cloned());
    let same = ends
        .windows(2)
        .all(|two| two[0]["disposition"] == two[1]["disposition"]);
    let mut end = match same {
        true => ends.into_iter().next()?,
        false => ends.pop()?,
    };
    drop_member(&mut end, "pending");
    if end["disposition"] == DeliveryState::DeadLettered.name() {
        // The node that has the dead letter reports it as pending until some node has written it.
        match (blob, pending) {
            (Some(blob), _) => end["blob"] = blob,
            (None, Some(pending)) => end["pending"] = pending,
            (None, None) => {}
        }
    }
    Some(end)
}

/// The probations of an endpoint. One node begins a probation, and the others learn of it a moment
/// later, so their records are merged.
fn holds_of(mut all: Vec<Value>) -> Vec<Value> {
    all.retain(Value::is_object);
    let text = |hold: &Value, name: &str| hold[name].as_str().map(str::to_owned);
    all.sort_by_key(|hold| text(hold, "since"));
    let mut joined: Vec<Value> = Vec::new();
    for hold in all {
        let since = text(&hold, "since");
        let same = joined
            .last()
            .is_some_and(|last| text(last, "released").is_none_or(|released| since <= Some(released)));
        let Some(last) = joined.last_mut().filter(|_| same) else {
            joined.push(hold);
            continue;
        };
        if text(last, "until") < text(&hold, "until") {
            last["until"] = hold["until"].clone();
            last["cause"] = hold["cause"].clone();
        }
        // Nodes that have not learnt of the end yet will do so.
        if let Some(released) = text(&hold, "released").max(text(last, "released")) {
            last["released"] = json!(released);
        }
    }
    joined
}

fn probation(hold: &Value) -> Value {
    let cause = hold["cause"].as_str().unwrap_or_default();
    let cause = Outcome::ALL.into_iter().find(|outcome| outcome.name() == cause);
    let why = NextAttemptReason::Probation {
        cause: cause.unwrap_or(Outcome::SocketError),
    };
    json!({"at": hold["until"], "why": why.name(), "text": why.to_string()})
}

fn take_all(from: &mut Value, name: &str, to: &mut Vec<Value>) {
    if let Some(Value::Array(all)) = from.get_mut(name).map(Value::take) {
        to.extend(all);
    }
}

fn each_mut(of: &mut Value) -> impl Iterator<Item = &mut Value> {
    let all = of.as_array_mut().into_iter().flatten();
    all.filter(|one| one.is_object())
}

fn keep_only(of: &mut Value, names: &[&str]) {
    if let Some(members) = of.as_object_mut() {
        members.retain(|name, _| names.contains(&name.as_str()));
    }
}

fn drop_member(of: &mut Value, name: &str) {
    if let Some(members) = of.as_object_mut() {
        members.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(at: &str, number: u64, outcome: &str, kind: &str, node: &str) -> Value {
        let mut decision = json!({"kind": kind});
        if kind == "retry" {
            decision = json!({"kind": kind, "at": format!("{at}+"), "why": "schedule", "text": "soon"});
        }
        json!({"at": at, "number": number, "outcome": outcome, "decision": decision, "node": node})
    }

    fn ended(at: &str, disposition: &str) -> Value {
        json!({"at": at, "disposition": disposition})
    }

    #[test]
    fn attempts_of_two_owners_are_one_course() {
        let first = json!({"number": 7, "name": "", "attempts": [
            attempt("10", 1, "Busy", "retry", "a"), attempt("30", 2, "Busy", "retry", "a"),
        ]});
        let second = json!({"number": 7, "name": "s", "attempts": [attempt("50", 3, "Success", "done", "b")],
            "ended": ended("51", "delivered")});
        let whole = merge_delivery(vec![second.clone(), first.clone()]);
        let nodes: Vec<&str> = each(&whole["attempts"])
            .map(|one| one["node"].as_str().unwrap())
            .collect();
        assert_eq!(nodes, ["a", "a", "b"]);
        assert_eq!(
            (&whole["state"], &whole["name"]),
            (&json!("delivered"), &json!("s"))
        );
        assert_eq!(whole["ended"]["at"], "51");
        assert_eq!(whole.get("next"), None);
        // Until the second owner has made an attempt, the first owner's schedule is shown.
        let before = merge_delivery(vec![first]);
        assert_eq!(before["state"], "retrying");
        assert_eq!(
            before["next"],
            json!({"at": "30+", "why": "schedule", "text": "soon"})
        );
        // Duplicate reports are merged.
        assert_eq!(
            merge_delivery(vec![second.clone(), second])["attempts"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
    }

    fn each(of: &Value) -> impl Iterator<Item = &Value> {
        of.as_array().unwrap().iter()
    }

    #[test]
    fn of_several_ends_one_counts() {
        let of = |ends: &[Value]| {
            let told = ends.iter().map(|end| json!({"attempts": [], "ended": end}));
            merge_delivery(told.collect())["ended"].clone()
        };
        // Delivered before a take-over and again after it: the first delivery counts.
        assert_eq!(
            of(&[ended("20", "delivered"), ended("10", "delivered")])["at"],
            "10"
        );
        // The owner that lost the partition had given up; the next owner delivered.
        let both = of(&[ended("10", "deadLettered"), ended("20", "delivered")]);
        assert_eq!(both["disposition"], "delivered");
        let mut written = ended("10", "deadLettered");
        written["blob"] = json!({"path": "p"});
        let both = of(&[ended("09", "deadLettered"), written]);
        assert_eq!((&both["at"], &both["blob"]["path"]), (&json!("09"), &json!("p")));
        // The node that has the dead letter reports it as pending, until one of the nodes has
        // written it.
        let mut waits = ended("10", "deadLettered");
        waits["pending"] = json!({"text": "waits"});
        let both = of(&[ended("09", "deadLettered"), waits.clone()]);
        assert_eq!(both["pending"]["text"], "waits");
        let mut written = ended("10", "deadLettered");
        written["blob"] = json!({"path": "p"});
        let both = of(&[waits.clone(), written]);
        assert_eq!((both.get("pending"), &both["blob"]["path"]), (None, &json!("p")));
        let both = of(&[waits, ended("20", "delivered")]);
        assert_eq!((both.get("pending"), both.get("blob")), (None, None));
    }

    #[test]
    fn an_end_that_the_next_owner_went_past_does_not_count() {
        let stale = json!({"attempts": [attempt("10", 1, "Success", "done", "a")], "ended": ended("11", "delivered")});
        let next = json!({"attempts": [attempt("20", 1, "Busy", "retry", "b")]});
        let whole = merge_delivery(vec![stale, next]);
        assert_eq!((&whole["state"], whole.get("ended")), (&json!("retrying"), None));
        assert_eq!(whole["next"]["at"], "20+");
    }

    #[test]
    fn a_hold_that_all_nodes_tell_is_one() {
        let hold = |since: &str, until: &str, released: Option<&str>| {
            let mut hold = json!({"cause": "Busy", "since": since, "until": until});
            if let Some(at) = released {
                hold["released"] = json!(at);
            }
            hold
        };
        let told = |holds: Vec<Value>| json!({"attempts": [], "holds": holds});
        let whole = merge_delivery(vec![
            told(vec![hold("10", "20", Some("21")), hold("30", "40", None)]),
            told(vec![hold("11", "20", Some("22")), hold("31", "45", None)]),
        ]);
        assert_eq!(
            whole["holds"],
            json!([hold("10", "20", Some("22")), hold("30", "45", None)])
        );
        assert_eq!(whole["state"], "held");
        assert_eq!(
            (&whole["next"]["at"], &whole["next"]["why"]),
            (&json!("45"), &json!("probation"))
        );
        // A node that has not learnt of the end yet does not prolong the probation.
        let over = merge_delivery(vec![
            told(vec![hold("10", "20", Some("21"))]),
            told(vec![hold("11", "20", None)]),
        ]);
        assert_eq!(
            (&over["state"], over["holds"].as_array().unwrap().len()),
            (&json!("pending"), 1)
        );
    }

    #[test]
    fn a_story_gets_what_happened_elsewhere() {
        let mut story = json!({"state": "pending", "subscriptions": [
            {"name": "a", "matched": true, "number": 1},
            {"name": "b", "matched": true, "number": 2},
            {"name": "c", "matched": false, "number": 3},
        ]});
        let happened = vec![
            json!({"number": 2, "name": "b", "attempts": [attempt("1", 1, "Success", "done", "n")],
                "ended": ended("2", "delivered")}),
            json!({"number": 9, "name": "late", "attempts": [attempt("1", 1, "Busy", "retry", "n")]}),
        ];
        put_together(&mut story, happened);
        let names: Vec<(&Value, &Value)> = each(&story["subscriptions"])
            .map(|one| (&one["name"], &one["state"]))
            .collect();
        let expected = [
            (json!("a"), json!("pending")),
            (json!("b"), json!("delivered")),
            (json!("late"), json!("retrying")),
            (json!("c"), Value::Null),
        ];
        assert_eq!(names, expected.iter().map(|(n, s)| (n, s)).collect::<Vec<_>>());
        assert_eq!(story["state"], "mixed");
    }
}
