//! Pending dead letters: counted, and written at once on request.

use super::selection::{DeadLetterSelection, SelectionRequest};
use super::{no_such_letter, store_unavailable};
use crate::Server;
use crate::own_api::Problem;
use crate::peers::{PeerResponses, Peers, gather};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::Engine;
use postrider_engine::dead_letters::{PendingDeadLetterFilter, PendingDeadLetterSummary};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// Peer request for pending dead letters that match a filter.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct PendingFilterRequest {
    subscription: Option<u64>,
    reason: Option<u8>,
    since: Option<i64>,
    letter: Option<(i64, u64)>,
}

impl PendingFilterRequest {
    fn of(filter: &PendingDeadLetterFilter) -> PendingFilterRequest {
        PendingFilterRequest {
            subscription: filter.subscription.map(|id| id.0),
            reason: filter.reason.map(GiveUpReason::code),
            since: filter.since.map(Timestamp::nanos),
            letter: filter
                .letter
                .map(|(decided, position)| (decided.nanos(), position.0)),
        }
    }

    fn filter(&self) -> PendingDeadLetterFilter {
        PendingDeadLetterFilter {
            subscription: self.subscription.map(SubscriptionId),
            reason: self.reason.map(GiveUpReason::from_code),
            since: self.since.map(Timestamp::from_nanos),
            letter: self
                .letter
                .map(|(decided, position)| (Timestamp::from_nanos(decided), Position(position))),
        }
    }
}

/// Pending dead letters of one node, counted.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PendingCountReply {
    count: u64,
    due: Option<i64>,
}

/// Number of dead letters that one node has written.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct WritePendingReply {
    written: u64,
}

pub async fn own_pending(server: &Server, asked: PendingFilterRequest) -> Result<PendingCountReply, String> {
    let pending = server.engine.pending_letters(&asked.filter()).await;
    let PendingDeadLetterSummary { count, due } = pending.map_err(|e| e.to_string())?;
    Ok(PendingCountReply {
        count,
        due: due.map(Timestamp::nanos),
    })
}

pub async fn own_write(server: &Server, asked: PendingFilterRequest) -> Result<WritePendingReply, String> {
    let written = server.engine.write_pending(asked.filter()).await?;
    Ok(WritePendingReply { written })
}

/// Counts the pending dead letters of all nodes that answer.
pub async fn count(
    engine: &Engine,
    peers: Option<&dyn Peers>,
    filter: &PendingDeadLetterFilter,
) -> Result<PendingDeadLetterSummary, Problem> {
    let Some(peers) = peers else {
        return engine.pending_letters(filter).await.map_err(store_unavailable);
    };
    let question = PendingFilterRequest::of(filter);
    let heard: PeerResponses<PendingCountReply> = gather(peers, "letters-pending", &question).await;
    let mut all = PendingDeadLetterSummary::default();
    for (_, answer) in heard.answers {
        all.count += answer.count;
        let due = answer.due.map(Timestamp::from_nanos);
        all.due = all.due.into_iter().chain(due).min();
    }
    Ok(all)
}

/// Dead letters that a replay or a purge leaves out because they are not written yet.
pub fn excluded_pending(meant: &DeadLetterSelection) -> Option<PendingDeadLetterFilter> {
    let filter = meant.filter();
    filter.letter.is_none().then_some(PendingDeadLetterFilter {
        subscription: filter.subscription,
        reason: filter.reason,
        since: filter.since,
        letter: None,
    })
}

/// Adds to an answer how many dead letters are pending, and when the first of them will be written.
pub fn show(answer: &mut Value, pending: &PendingDeadLetterSummary) {
    answer["pending"] = json!(pending.count);
    if let Some(due) = pending.due {
        answer["due"] = json!(due.to_string());
    }
}

/// Writes pending dead letters at once. Returns when they are in their blobs.
pub async fn write(
    engine: &Arc<Engine>,
    peers: Option<&dyn Peers>,
    asked: &SelectionRequest,
) -> Result<Value, Problem> {
    let filter = asked.pending(engine).await?;
    if asked.dry_run {
        let mut answer = json!({});
        let pending = count(engine, peers, &filter).await?;
        answer["count"] = json!(pending.count);
        show(&mut answer, &pending);
        return Ok(answer);
    }
    if let Some(name) = asked.id()
        && count(engine, peers, &filter).await?.count == 0
    {
        return Err(no_such_letter(&name));
    }
    let written = match peers {
        None => {
            let written = engine.write_pending(filter).await;
            written.map_err(|reason| Problem::new(503, reason))?
        }
        Some(peers) => write_everywhere(peers, &filter).await?,
    };
    Ok(json!({"written": written}))
}

async fn write_everywhere(peers: &dyn Peers, filter: &PendingDeadLetterFilter) -> Result<u64, Problem> {
    let question = serde_json::to_vec(&PendingFilterRequest::of(filter)).expect("numbers");
    let gathered = peers.ask("letters-write", question.into()).await;
    let (mut written, mut troubles) = (0, Vec::new());
    for (node, answer) in gathered.answers {
        let answer = answer.and_then(|bytes| {
            serde_json::from_slice::<WritePendingReply>(&bytes)
                .map_err(|e| format!("its answer is not understood: {e}"))
        });
        match answer {
            Ok(answer) => written += answer.written,
            Err(reason) => troubles.push(format!("node {node}: {reason}")),
        }
    }
    let late = |node: String| format!("node {node} has not answered yet and may still be writing");
    troubles.extend(gathered.missing.into_iter().map(late));
    match troubles.is_empty() {
        true => Ok(written),
        false => Err(Problem::new(
            503,
            format!(
                "{} ({written} were written by the other nodes)",
                troubles.join("; ")
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_understand_each_others_filters() {
        let filters = [
            PendingDeadLetterFilter::default(),
            PendingDeadLetterFilter {
                subscription: Some(SubscriptionId(7)),
                reason: Some(GiveUpReason::BadRequest),
                since: Some(Timestamp::from_secs(5)),
                letter: Some((Timestamp::from_secs(6), Position(9))),
            },
        ];
        for filter in filters {
            assert_eq!(PendingFilterRequest::of(&filter).filter(), filter);
        }
    }
}
