//! Event histories and searches: `/postrider/v1/events`.

#[cfg(test)]
mod tests;

use crate::Server;
use crate::dead_letters::{read_query, read_since};
use crate::handshakes::resource_id;
use crate::lookup;
use crate::own_api::Problem;
use crate::peers::{event_history, note_missing, search};
use postrider_core::ids::SubscriptionId;
use postrider_core::outcome::Outcome;
use postrider_core::time::Timestamp;
use postrider_core::trace::TraceContext;
use postrider_engine::dead_letters::PendingDeadLetterFilter;
use postrider_engine::recorder::{
    AttemptDecision, AttemptHistory, DeadLetterBlobLocation, DeliveryDisposition, DeliveryHistory,
    DeliveryState, EventHistory, EventLine, EventPlace, EventQuery, EventState, RecordingQueries,
    RoutingVerdict, SearchCursor, SubscriptionFate, SubscriptionHistory, UnmetPredicate,
};
use postrider_wire::resources::schema_name;
use serde_json::{Value, json};
use std::time::Duration;

const LIMIT: usize = 50;
pub(crate) const LIMIT_MAX: usize = 1000;
/// Subscriptions that a line of a list names; the event history names all of them.
pub(crate) const NAMED_MAX: usize = 50;
/// Dead letters without a blob that are looked up in the log for one answer.
pub(crate) const PENDING_LOOKUPS_MAX: usize = 100;
/// Characters of a requested value that an error repeats.
const REPEATED_MAX: usize = 200;

/// Runs a query of the recordings on a blocking thread, because it reads files.
pub(crate) async fn ask<T: Send + 'static>(
    server: &Server,
    question: impl FnOnce(&dyn RecordingQueries) -> T + Send + 'static,
) -> Result<T, Problem> {
    let recordings = server.recordings.clone();
    let asked = tokio::task::spawn_blocking(move || question(&*recordings)).await;
    asked.map_err(|_| Problem::new(500, "the recordings could not be read"))
}

/// `GET events/{id}`
pub(crate) async fn trace(server: &Server, id: &str, query: &str) -> Result<Value, Problem> {
    read_query(query, &[])?;
    let (stories, missing) = match &server.peers {
        None => {
            let wanted = id.to_owned();
            let stories = ask(server, move |recordings| recordings.trace(&wanted)).await?;
            let mut shown: Vec<Value> = stories.iter().map(|one| story(server, one)).collect();
            let mut lookups = PENDING_LOOKUPS_MAX;
            for (shown, story) in shown.iter_mut().zip(&stories) {
                let each = shown["subscriptions"].as_array_mut().into_iter().flatten();
                for (shown, one) in each.zip(&story.subscriptions) {
                    show_pending(server, story.place, one, shown, &mut lookups).await;
                }
            }
            (shown, Vec::new())
        }
        Some(peers) => event_history::trace(server, &**peers, id).await,
    };
    if stories.is_empty() {
        let why = match server.recordings.status().on {
            true if !missing.is_empty() => format!("these nodes do not answer: {}", missing.join(", ")),
            true => "it was never accepted, or is older than what is kept".to_owned(),
            false => "recording is off".to_owned(),
        };
        let id: String = id.chars().take(REPEATED_MAX).collect();
        return Err(Problem {
            field: Some("id"),
            ..Problem::new(404, format!("id: nothing is recorded of event {id:?}: {why}"))
        });
    }
    let mut shown = json!({"id": id, "stories": stories});
    note_missing(&mut shown, missing);
    Ok(shown)
}

/// `GET events?…`
pub(crate) async fn search(server: &Server, query: &str) -> Result<Value, Problem> {
    if let Some(peers) = &server.peers {
        return search::search(server, &**peers, query).await;
    }
    let query = read_search(server, query)?;
    let page = ask(server, move |recordings| recordings.search(&query)).await?;
    let value: Vec<Value> = page.events.iter().map(line).collect();
    let mut found = json!({"value": value});
    if let Some(cursor) = page.cursor {
        found["cursor"] = json!(cursor.to_string());
    }
    if let Some((from, to)) = page.searched {
        found["searched"] = json!({"from": from.to_string(), "to": to.to_string()});
    }
    Ok(found)
}

const PARAMETERS: [&str; 11] = [
    "id",
    "topic",
    "subscription",
    "type",
    "subject",
    "state",
    "outcome",
    "since",
    "until",
    "limit",
    "cursor",
];

fn read_search(server: &Server, query: &str) -> Result<EventQuery, Problem> {
    let reason = "is not one that an earlier answer gave";
    read_search_from(server, query, |query, cursor| {
        let cursor = cursor.parse::<SearchCursor>();
        query.cursor = Some(cursor.map_err(|()| Problem::field("cursor", reason))?);
        Ok(())
    })
}

/// Cursors are read by `read_cursor`, which belongs to the module that issued them.
pub(crate) fn read_search_from(
    server: &Server,
    query: &str,
    mut read_cursor: impl FnMut(&mut EventQuery, &str) -> Result<(), Problem>,
) -> Result<EventQuery, Problem> {
    let now = server.engine.clock.now();
    let mut read = EventQuery {
        limit: LIMIT,
        ..EventQuery::default()
    };
    for (name, value) in read_query(query, &PARAMETERS)? {
        if value.is_empty() {
            continue;
        }
        match name {
            "id" => read.id = Some(value),
            "topic" => read.topic = Some(lookup::topic(server, &value)?.topic.id),
            "subscription" => read.subscription = Some(lookup::subscription(server, name, &value)?.id),
            "type" => read.event_type = Some(value),
            "subject" => read.subject = Some(value),
            "state" => {
                let known = EventState::ALL.map(EventState::name);
                let state = EventState::from_name(&value);
                read.state = Some(state.ok_or_else(|| none_of("state", &value, &known))?);
            }
            "outcome" => {
                let named = |outcome: &Outcome| outcome.name().eq_ignore_ascii_case(&value);
                let known = Outcome::ALL.map(Outcome::name);
                let outcome = Outcome::ALL.into_iter().find(named);
                read.outcome = Some(outcome.ok_or_else(|| none_of("outcome", &value, &known))?);
            }
            "since" => read.since = Some(read_since(&value, now)?),
            "until" => {
                let reason =
                    "must be a time such as 2030-01-01T00:00:00Z, or how long ago it was, such as 1h";
                let until = read_since(&value, now);
                read.until = Some(until.map_err(|_| Problem::field("until", reason))?);
            }
            "limit" => {
                let number = value.parse().ok().filter(|n| (1..=LIMIT_MAX).contains(n));
                let reason = format!("must be a number from 1 to {LIMIT_MAX}");
                read.limit = number.ok_or_else(|| Problem::field("limit", reason))?;
            }
            _ => read_cursor(&mut read, &value)?,
        }
    }
    Ok(read)
}

pub(crate) fn none_of(field: &'static str, value: &str, known: &[&str]) -> Problem {
    Problem::field(field, format!("{value:?} is not one of {}", known.join(", ")))
}

pub(crate) fn line(line: &EventLine) -> Value {
    let named = line.subscriptions.iter().take(NAMED_MAX);
    let left_out = line.subscriptions.len().saturating_sub(NAMED_MAX);
    let subscriptions = named.map(|one| {
        let mut shown = json!({"name": one.name, "state": one.state.name()});
        if let Some(outcome) = one.last_outcome {
            shown["lastOutcome"] = json!(outcome.name());
        }
        shown
    });
    let mut shown = json!({
        "id": line.id,
        "topic": line.topic_name,
        "type": line.event_type,
        "subject": line.subject,
        "acceptedAt": line.accepted.to_string(),
        "state": line.state.name(),
        "attempts": line.attempts,
        "subscriptions": subscriptions.collect::<Vec<_>>(),
    });
    if left_out > 0 {
        shown["subscriptionsLeftOut"] = json!(left_out);
    }
    if let Some(name) = &line.domain_topic {
        shown["domainTopic"] = json!(name);
    }
    shown
}

fn story(server: &Server, story: &EventHistory) -> Value {
    let mut shown = recorded_history(server, story);
    if let Some(shown) = shown["subscriptions"].as_array_mut() {
        for (shown, one) in shown.iter_mut().zip(&story.subscriptions) {
            show_names(server, one.id, shown);
        }
    }
    shown
}

/// The event history as recorded, without facts about the present.
pub(crate) fn recorded_history(server: &Server, story: &EventHistory) -> Value {
    let subscriptions = story.subscriptions.iter();
    let subscriptions = subscriptions.map(|one| {
        let mut shown = json!({"name": one.name, "id": id_of(server, story, one)});
        if show_delivery_result(&mut shown, one).is_some() {
            shown["matched"] = json!(true);
        } else if let SubscriptionFate::Refused(refused) = &one.fate {
            shown["matched"] = json!(false);
            shown["predicate"] = predicate(refused);
        }
        shown
    });
    let mut shown = json!({
        "id": story.id,
        "topic": story.topic_name,
        "type": story.event_type,
        "subject": story.subject,
        "schema": schema_name(story.schema),
        "acceptedAt": story.accepted.to_string(),
        "publisher": story.publisher,
        "bytes": story.bytes,
        "state": story.state.name(),
        "subscriptions": subscriptions.collect::<Vec<_>>(),
    });
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            shown[name] = value;
        }
    };
    put("domainTopic", story.domain_topic.as_ref().map(|name| json!(name)));
    put("source", story.source.as_ref().map(|source| json!(source)));
    put(
        "trace",
        trace_of(server, story).map(|trace| json!(trace.trace_id())),
    );
    put("replay", (story.replay > 0).then(|| json!(story.replay)));
    put("replayedFrom", story.replayed_from.as_ref().map(blob));
    put("position", story.place.map(|place| json!(place.to_string())));
    shown
}

/// The trace context of an event: its publisher's, or the one that began here.
fn trace_of(server: &Server, story: &EventHistory) -> Option<TraceContext> {
    let carried = story.trace.as_deref().and_then(TraceContext::parse);
    carried.or_else(|| server.engine.dispatcher.publish_trace_context(story.place?.first))
}

/// The resource id of a subscription, which may have been deleted since.
fn id_of(server: &Server, story: &EventHistory, one: &SubscriptionHistory) -> String {
    let known = server.engine.directory.subscription_by_id(one.id);
    let known = known.and_then(|known| resource_id(server, &known));
    known.unwrap_or_else(|| {
        let inside = one.domain_topic.as_ref();
        let inside = inside.map_or(String::new(), |name| format!("/topics/{name}"));
        format!(
            "{}{inside}/providers/Microsoft.EventGrid/eventSubscriptions/{}",
            story.topic_resource, one.name
        )
    })
}

/// Shows the outcome of a delivery, if the subscription matched.
pub(crate) fn show_delivery_result(shown: &mut Value, one: &SubscriptionHistory) -> Option<()> {
    let SubscriptionFate::Matched(delivery) = &one.fate else {
        return None;
    };
    show_delivery(shown, delivery);
    Some(())
}

/// For a delivery that was dead-lettered and is in no blob: adds that the dead letter is pending
/// and when it is due, if the log of this node has it.
pub(crate) async fn show_pending(
    server: &Server,
    place: Option<EventPlace>,
    one: &SubscriptionHistory,
    shown: &mut Value,
    lookups: &mut usize,
) {
    let SubscriptionFate::Matched(delivery) = &one.fate else {
        return;
    };
    let (Some(place), Some(since)) = (place, delivery.pending_letter_since()) else {
        return;
    };
    if *lookups == 0 {
        return;
    }
    *lookups -= 1;
    let filter = PendingDeadLetterFilter {
        subscription: Some(one.id),
        letter: Some((since, place.position())),
        ..PendingDeadLetterFilter::default()
    };
    // Dead letters that cannot be read now are left out.
    let Ok(pending) = server.engine.pending_letters(&filter).await else {
        return;
    };
    if pending.count == 0 {
        return;
    }
    let mut text = "waits to be written to a blob".to_owned();
    if let Some(trouble) = server.engine.dead_letters.trouble(one.id) {
        text += &format!("; the last try failed: {trouble}");
    }
    let mut waits = json!({"text": text});
    if let Some(due) = pending.due {
        waits["due"] = json!(due.to_string());
    }
    shown["ended"]["pending"] = waits;
}

/// Adds facts about the present: a name if none was recorded, and that a delivery is held because
/// its subscription is paused.
pub(crate) fn show_names(server: &Server, id: SubscriptionId, shown: &mut Value) {
    let then = shown["name"].as_str().unwrap_or_default();
    shown["name"] = json!(name_of(server, id, then));
    let known = server.engine.directory.subscription_by_id(id);
    if shown.get("id").is_none() {
        let id = known.as_ref().and_then(|known| resource_id(server, known));
        shown["id"] = json!(id);
    }
    let waits = shown["matched"] == true && shown.get("ended").is_none();
    let paused = known.and_then(|known| known.pauses.since());
    if let Some(since) = paused.filter(|_| waits) {
        show_pause(shown, since);
    }
}

/// The name recorded with the event, or without one the present name.
fn name_of(server: &Server, id: SubscriptionId, then: &str) -> String {
    if !then.is_empty() {
        return then.to_owned();
    }
    let known = server.engine.directory.subscription_by_id(id);
    known.map_or_else(|| id.to_string(), |known| known.name.clone())
}

pub(crate) fn predicate(refused: &UnmetPredicate) -> Value {
    let mut shown = json!({"kind": refused.verdict.name(), "text": refused.text});
    if let RoutingVerdict::Advanced(index) = refused.verdict {
        shown["index"] = json!(index);
    }
    shown
}

fn show_delivery(shown: &mut Value, delivery: &DeliveryHistory) {
    shown["state"] = json!(delivery.state.name());
    shown["attempts"] = delivery.attempts.iter().map(attempt).collect();
    if let Some(next) = &delivery.next {
        shown["next"] = json!({
            "at": next.at.to_string(),
            "why": next.why.name(),
            "text": next.why.to_string(),
        });
    }
    if let Some(end) = &delivery.end {
        let mut ended = json!({
            "at": end.at.to_string(),
            "disposition": end.disposition.state().name(),
        });
        if end.disposition == DeliveryDisposition::DeliveredLate {
            ended["late"] = json!(true);
        }
        if let Some(reason) = end.disposition.reason() {
            ended["reason"] = json!(reason.name());
        }
        if let Some(place) = &end.blob {
            ended["blob"] = blob(place);
        }
        shown["ended"] = ended;
    }
    if !delivery.holds.is_empty() {
        let holds = delivery.holds.iter().map(|hold| {
            let mut shown = json!({
                "cause": hold.cause.name(),
                "since": hold.since.to_string(),
                "until": hold.until.to_string(),
            });
            if let Some(at) = hold.released {
                shown["released"] = json!(at.to_string());
            }
            shown
        });
        shown["holds"] = holds.collect();
    }
}

/// Shows a held delivery. When it will continue is unknown; its original due time stays visible.
fn show_pause(shown: &mut Value, since: Timestamp) {
    shown["state"] = json!(DeliveryState::Held.name());
    let mut next = json!({
        "why": "paused",
        "text": format!("the subscription is paused since {since}"),
    });
    if let Some(at) = shown["next"].get("at") {
        next["at"] = at.clone();
    }
    shown["next"] = next;
}

pub(crate) fn attempt(attempt: &AttemptHistory) -> Value {
    let total = attempt.timings.map(|timings| timings.total);
    let total = total.unwrap_or_else(|| attempt.ended.since(attempt.begun));
    let mut timings = json!({"queuedMs": millis(attempt.queued), "totalMs": millis(total)});
    if let Some(measured) = attempt.timings {
        timings["connectMs"] = json!(millis(measured.connect));
        timings["firstByteMs"] = json!(millis(measured.first_byte));
    }
    let mut shown = json!({
        "number": attempt.number,
        "at": attempt.begun.to_string(),
        "endpoint": attempt.endpoint,
        "outcome": attempt.outcome.name(),
        "batch": attempt.batch,
        "timings": timings,
        "decision": decision(attempt.decision),
    });
    if let Some(status) = attempt.status {
        shown["status"] = json!(status);
    }
    if let Some(failure) = &attempt.failure {
        shown["failure"] = json!(failure);
    }
    if let Some(snippet) = &attempt.response {
        let mut response = json!({"snippet": snippet.text, "truncated": snippet.truncated});
        if let Some(content_type) = &snippet.content_type {
            response["contentType"] = json!(content_type);
        }
        shown["response"] = response;
    }
    shown
}

fn decision(decision: AttemptDecision) -> Value {
    match decision {
        AttemptDecision::Done => json!({"kind": "done"}),
        AttemptDecision::Retry { at, why } => {
            json!({"kind": "retry", "at": at.to_string(), "why": why.name(), "text": why.to_string()})
        }
        AttemptDecision::DeadLetter(reason) => json!({"kind": "deadLetter", "reason": reason.name()}),
        AttemptDecision::Drop(reason) => json!({"kind": "drop", "reason": reason.name()}),
    }
}

fn blob(place: &DeadLetterBlobLocation) -> Value {
    json!({"account": place.account, "container": place.container, "path": place.path})
}

/// In milliseconds, to the microsecond.
fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

/// Age in seconds.
pub(crate) fn age(now: Timestamp, then: Timestamp) -> f64 {
    now.since(then).as_millis() as f64 / 1000.0
}
