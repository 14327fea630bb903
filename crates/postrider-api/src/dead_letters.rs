//! Dead letters listed, replayed, written and purged: `/postrider/v1/deadletters`.

mod selection;
mod page;
mod pending;
mod replays;
#[cfg(test)]
mod tests;

pub(crate) use replays::request as replay_request;

use crate::Server;
use crate::http::{Answer, ApiCall, decoded, json};
use crate::own_api::{Problem, read_object};
use crate::peers::{PeerResponses, Peers, gather};
use crate::route::own::OwnEndpoint;
use hyper::StatusCode;
use postrider_core::ids::SubscriptionId;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::Engine;
use postrider_store::PendingDeadLetters;
use selection::{DeadLetterName, DeadLetterOperation, SelectionRequest, SubscriptionNames};
pub(crate) use selection::{read_query, read_since, unknown};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Answers a request below `deadletters`, whose sender is already authenticated.
pub(crate) async fn answer(
    server: &Server,
    call: &mut ApiCall,
    endpoint: OwnEndpoint,
    name: &str,
) -> Result<Answer, Problem> {
    let engine = &server.engine;
    let peers = server.peers.as_deref();
    let query = call.uri.query().unwrap_or("");
    if endpoint != OwnEndpoint::DeadLetters {
        selection::read_query(query, &[])?;
    }
    let id = &call.id;
    Ok(match endpoint {
        OwnEndpoint::DeadLetters => ok(id, &page::list(engine, peers, query).await?),
        OwnEndpoint::DeadLetterSummary => ok(id, &summary(engine, &*server.wall, peers).await?),
        OwnEndpoint::Replays => ok(
            id,
            &DeadLetterListBody {
                value: replays::list(engine).await?,
                missing: Vec::new(),
            },
        ),
        OwnEndpoint::Replay => ok(id, &replays::get(engine, name).await?),
        OwnEndpoint::ReplayDeadLetters => {
            let members = read_object(call).await?;
            match replays::start(engine, peers, &members).await? {
                replays::ReplayStart::Counted(counted) => ok(&call.id, &counted),
                replays::ReplayStart::UnderWay(job) => accepted(&call.id, &job),
            }
        }
        OwnEndpoint::CancelReplay => {
            nothing_said(call).await?;
            ok(&call.id, &replays::cancel(engine, &*server.wall, name).await?)
        }
        OwnEndpoint::ResumeReplay => {
            nothing_said(call).await?;
            // A replay that is resumed twice at the same time would replay every dead letter twice.
            let _one_at_a_time = server.resource_locks.hold(format!("replay/{name}")).await;
            accepted(&call.id, &replays::resume(engine, name).await?)
        }
        OwnEndpoint::PurgeDeadLetters => {
            let members = read_object(call).await?;
            ok(&call.id, &purge(engine, peers, &members).await?)
        }
        OwnEndpoint::WriteDeadLetters => {
            let members = match call.announced_bytes() {
                Some(0) => Map::new(),
                _ => read_object(call).await?,
            };
            let asked = SelectionRequest::read(&members, engine.clock.now(), DeadLetterOperation::Write)?;
            ok(&call.id, &pending::write(engine, peers, &asked).await?)
        }
        _ => ok(id, &page::show(engine, peers, &decoded(name)).await?),
    })
}

#[derive(Serialize)]
struct DeadLetterListBody<T> {
    value: Vec<T>,
    /// Nodes that did not answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    missing: Vec<String>,
}

fn ok(id: &str, body: &impl Serialize) -> Answer {
    written(StatusCode::OK, id, body)
}

fn accepted(id: &str, body: &impl Serialize) -> Answer {
    written(StatusCode::ACCEPTED, id, body)
}

fn written(status: StatusCode, id: &str, body: &impl Serialize) -> Answer {
    let text = serde_json::to_vec(body).expect("names are strings");
    json(status, text, id)
}

/// Refuses a body where none is expected.
async fn nothing_said(call: &mut ApiCall) -> Result<(), Problem> {
    if call.announced_bytes() == Some(0) {
        return Ok(());
    }
    match read_object(call).await?.keys().next() {
        Some(other) => Err(Problem::new(400, format!("{other}: is not known; nothing is"))),
        None => Ok(()),
    }
}

/// Error 503 for a failure of the store or the log.
fn store_unavailable(e: impl Into<postrider_engine::Error>) -> Problem {
    Problem::new(503, e.into().to_string())
}

async fn purge(
    engine: &Arc<Engine>,
    peers: Option<&dyn Peers>,
    members: &Map<String, Value>,
) -> Result<Value, Problem> {
    let asked = SelectionRequest::read(members, engine.clock.now(), DeadLetterOperation::Purge)?;
    let meant = asked.meant(engine).await?;
    let filter = meant.filter();
    if !asked.dry_run {
        return Ok(json!({"purged": engine.purge_letters(&filter).await.map_err(store_unavailable)?}));
    }
    let mut answer = json!({"count": engine.count_letters(&filter).await.map_err(store_unavailable)?});
    if let Some(pending) = pending::excluded_pending(&meant) {
        pending::show(&mut answer, &pending::count(engine, peers, &pending).await?);
    }
    Ok(answer)
}

/// Dead letters of one subscription, counted.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeadLetterTally {
    topic: String,
    subscription: String,
    subscription_id: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    deleted: bool,
    written: u64,
    /// Of `written`: dead letters whose blob is gone.
    missing: u64,
    /// Of `written`: dead letters whose blob does not hold them as they were written.
    damaged: u64,
    /// Of `written`: dead letters whose blob was not read.
    #[serde(skip_serializing_if = "is_zero")]
    unchecked: u64,
    reasons: BTreeMap<&'static str, u64>,
    pending: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_pending: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trouble: Option<String>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Pending dead letters of one subscription at one node.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PendingDeadLetterTally {
    of: u64,
    oldest: i64,
    count: u64,
    trouble: Option<String>,
}

pub(crate) fn own_waiting(engine: &Engine) -> Vec<PendingDeadLetterTally> {
    let waiting = engine.log().pending_dead_letters().into_iter();
    let each = |PendingDeadLetters { of, oldest, count }| PendingDeadLetterTally {
        of: of.0,
        oldest: oldest.nanos(),
        count,
        trouble: engine.dead_letters.trouble(of),
    };
    waiting.map(each).collect()
}

pub(crate) use page::{local_pending_letter, own_letters};
pub(crate) use pending::{own_pending, own_write};

impl DeadLetterTally {
    fn add(&mut self, waiting: PendingDeadLetterTally) {
        self.pending += waiting.count;
        let oldest = Timestamp::from_nanos(waiting.oldest).to_string();
        // Timestamps sort the same as text.
        self.oldest_pending = self.oldest_pending.take().into_iter().chain([oldest]).min();
        self.trouble = self.trouble.take().or(waiting.trouble);
    }
}

async fn summary(
    engine: &Arc<Engine>,
    wall: &dyn Clock,
    peers: Option<&dyn Peers>,
) -> Result<DeadLetterListBody<DeadLetterTally>, Problem> {
    let mut tallies: BTreeMap<_, DeadLetterTally> = BTreeMap::new();
    let counts = engine
        .dead_letters
        .archive
        .counts()
        .await
        .map_err(store_unavailable)?;
    for (of, reason, count) in counts.into_iter().filter(|(.., count)| *count > 0) {
        let tally = tallies.entry(of).or_default();
        tally.written += count;
        tally.reasons.insert(reason.name(), count);
    }
    for (of, unreadable) in page::check_blobs(engine, wall).await? {
        // Blobs that were written after the count are not part of it.
        if let Some(tally) = tallies.get_mut(&of) {
            tally.missing = unreadable.missing;
            tally.damaged = unreadable.damaged;
            tally.unchecked = unreadable.unchecked;
            tally.trouble = unreadable.trouble;
        }
    }
    let (waiting, missing) = match peers {
        None => (own_waiting(engine), Vec::new()),
        Some(peers) => {
            let heard: PeerResponses<Vec<PendingDeadLetterTally>> =
                gather(peers, "letters-waiting", &json!({})).await;
            let all = heard.answers.into_iter().flat_map(|(_, waiting)| waiting);
            (all.collect(), heard.missing)
        }
    };
    for waiting in waiting {
        let of = SubscriptionId(waiting.of);
        tallies.entry(of).or_default().add(waiting);
    }
    for (of, tally) in &mut tallies {
        tally.subscription_id = of.0;
        if let Some(names) = SubscriptionNames::of(engine, *of).await? {
            tally.topic = names.topic;
            tally.subscription = names.subscription;
            tally.deleted = names.deleted;
        }
    }
    Ok(DeadLetterListBody {
        value: tallies.into_values().collect(),
        missing,
    })
}

/// Error 404 for a dead letter that does not exist (any more).
fn no_such_letter(name: &DeadLetterName) -> Problem {
    let detail = match name {
        DeadLetterName::Written(_) => format!("dead letter {name} does not exist, or was purged"),
        DeadLetterName::Pending { .. } => {
            format!("dead letter {name} does not wait to be written: it has been by now, or never was")
        }
    };
    Problem {
        field: Some("id"),
        ..Problem::new(404, detail)
    }
}
