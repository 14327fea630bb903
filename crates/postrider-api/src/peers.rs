//! Peer requests: one answer from all nodes of a cluster. Each node knows only what it has done
//! itself: the history of the events that it accepted or attempted, its counters, the backlogs of
//! its partitions. The node that a client asks sends a peer request to all nodes and merges their
//! replies. A single server uses none of this.

pub(crate) mod event_history;
pub(crate) mod search;
pub(crate) mod statistics;
pub(crate) mod live;

use crate::Server;
use crate::{audit, catch_up, dead_letters, filters, listen, logins, own_api, subscription_control};
use async_trait::async_trait;
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// The nodes of the cluster, this one included.
#[async_trait]
pub trait Peers: Send + Sync {
    /// This node's name for people.
    fn name(&self) -> &str;
    /// This node's id.
    fn id(&self) -> &str;
    /// Whether the node with this id is present, as far as this one knows.
    fn is_present(&self, id: &str) -> bool;
    /// Sends a peer request to every node, this one included, and waits one second at most.
    /// `question` names the request.
    async fn ask(&self, question: &str, body: Bytes) -> RawPeerReplies;
    /// Sends a peer request to the node with this id. `Err` is the reason for the lack of a reply.
    /// Dropping the future gives the request up.
    async fn ask_one(&self, id: &str, question: &str, body: Bytes, within: Duration)
    -> Result<Bytes, String>;
    /// Sends a message to the nodes that currently subscribe to `what`.
    async fn tell(&self, what: &str, body: Bytes);
    /// Subscribes to messages of the other nodes from now on; none if that is impossible.
    async fn hear(&self, what: &str) -> Option<mpsc::Receiver<Bytes>>;
}

/// Replies to a peer request.
#[derive(Clone, Debug, Default)]
pub struct RawPeerReplies {
    /// By the names of the nodes.
    pub answers: Vec<(String, Result<Bytes, String>)>,
    /// The names of nodes that did not reply.
    pub missing: Vec<String>,
}

/// Replies of all nodes, deserialized.
pub(crate) struct PeerResponses<T> {
    pub answers: Vec<(String, T)>,
    pub missing: Vec<String>,
}

/// Sends a peer request to all nodes. A node whose reply cannot be parsed counts as missing.
pub(crate) async fn gather<T: DeserializeOwned>(
    peers: &dyn Peers,
    question: &str,
    asked: &impl Serialize,
) -> PeerResponses<T> {
    let body = serde_json::to_vec(asked).expect("names are strings");
    read(question, peers.ask(question, body.into()).await)
}

pub(crate) fn read<T: DeserializeOwned>(question: &str, gathered: RawPeerReplies) -> PeerResponses<T> {
    let mut heard = PeerResponses {
        answers: Vec::with_capacity(gathered.answers.len()),
        missing: gathered.missing,
    };
    for (node, answer) in gathered.answers {
        let read = answer.and_then(|bytes| serde_json::from_slice(&bytes).map_err(|e| e.to_string()));
        match read {
            Ok(answer) => heard.answers.push((node, answer)),
            Err(why) => {
                tracing::debug!(node, question, why, "a node did not answer");
                heard.missing.push(node);
            }
        }
    }
    heard
}

/// Adds the names of nodes that did not reply to an answer.
pub(crate) fn note_missing(shown: &mut Value, mut missing: Vec<String>) {
    if !missing.is_empty() {
        missing.sort();
        missing.dedup();
        shown["missing"] = json!(missing);
    }
}

/// Answers a peer request. `Err` is the reason for the lack of a reply.
pub async fn answer(server: &Arc<Server>, question: &str, body: Bytes) -> Result<Bytes, String> {
    match question {
        catch_up::CATCH_UP => catch_up::answer_catch_up(server).await,
        "access" => {
            server.refresh_access().await?;
            Ok(Bytes::from_static(b"{}"))
        }
        "logins" => written(&logins::own_logins(server)),
        "trace" => written(&event_history::answer_trace(server, asked(&body)?).await?),
        "happened" => written(&event_history::answer_deliveries(server, asked(&body)?).await?),
        "search" => written(&search::answer(server, asked(&body)?).await?),
        "events-at" => written(&live::answer_events_at(server, asked(&body)?).await?),
        "watch" => {
            server.live.watched(server);
            Ok(Bytes::from_static(b"{}"))
        }
        "numbers" => written(&statistics::own(server, asked(&body)?)),
        "details" => written(&statistics::own_details(server, asked(&body)?)),
        "series" => written(&statistics::own_series(server, asked(&body)?)),
        "endpoints" => written(&own_api::own_endpoints(server)),
        "admit" => written(&own_api::own_admit(server, asked(&body)?)),
        "probe" => written(&subscription_control::own_probe(server, asked(&body)?)),
        "audit" => written(&audit::api::own(server, asked(&body)?).await?),
        "audit-verify" => match server.audit.clone() {
            Some(audit) => written(&audit::api::own_verify(audit).await?),
            None => Err("this node keeps no audit log".to_owned()),
        },
        "letters" => written(&dead_letters::own_letters(server, asked(&body)?).await?),
        "letter" => written(&dead_letters::local_pending_letter(server, asked(&body)?).await?),
        "letters-pending" => written(&dead_letters::own_pending(server, asked(&body)?).await?),
        "letters-write" => written(&dead_letters::own_write(server, asked(&body)?).await?),
        "letters-waiting" => written(&dead_letters::own_waiting(&server.engine)),
        "filter-test" => written(&filters::test_local_events(server, &body).await?),
        "listen-deliver" => listen::remote::answer_delivery(server, body).await,
        "listen-answer" => listen::remote::answer_answer(server, body).await,
        other => Err(format!("{other:?} is not a question that this version knows")),
    }
}

fn asked<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|e| format!("the question cannot be understood: {e}"))
}

fn written(answer: &impl Serialize) -> Result<Bytes, String> {
    let text = serde_json::to_vec(answer);
    text.map(Bytes::from).map_err(|e| e.to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_well_is_missing() {
        let gathered = RawPeerReplies {
            answers: vec![
                ("a".into(), Ok(Bytes::from_static(b"[1,2]"))),
                ("b".into(), Err("no".into())),
                ("c".into(), Ok(Bytes::from_static(b"{}"))),
            ],
            missing: vec!["d".into()],
        };
        let heard: PeerResponses<Vec<u64>> = read("what", gathered);
        assert_eq!(heard.answers, [("a".to_owned(), vec![1, 2])]);
        let mut shown = json!({});
        note_missing(&mut shown, heard.missing);
        assert_eq!(shown, json!({"missing": ["b", "c", "d"]}));
        let mut whole = json!({});
        note_missing(&mut whole, Vec::new());
        assert_eq!(whole, json!({}));
    }
}
