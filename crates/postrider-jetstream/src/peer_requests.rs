//! Peer requests: questions to all nodes of a cluster or to one of them, and their replies.

use crate::connection::NatsConnection;
use crate::membership::{MembershipHandle, NodeId};
use crate::message_parts::{self, PartAssembly};
use async_nats::{HeaderMap, Message, StatusCode, Subscriber};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use postrider_store::Error;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Header with the id of the requesting or replying node.
const NODE: &str = "Pr-Node";
/// Header of a reply that consists of an error only.
const ERROR: &str = "Pr-Error";
/// Maximum number of peer requests processed at once; further ones get an error. Requests to a
/// single node may take long and have a limit of their own.
const ANSWERING_MAX: usize = 64;
const ANSWERING_ALONE_MAX: usize = 4096;
/// Maximum number of peer requests of which only some parts have arrived.
const INCOMPLETE_MAX: usize = 64;

/// Replies to requests of other nodes.
#[async_trait]
pub trait PeerRequestHandler: Send + Sync {
    /// `Err` contains the reason why there is no answer.
    async fn answer(&self, question: &str, body: Bytes) -> Result<Bytes, String>;
}

/// The replies to a peer request.
#[derive(Clone, Debug, Default)]
pub struct PeerReplies {
    /// The answers, ordered by node.
    pub answers: Vec<(NodeId, Result<Bytes, String>)>,
    /// Nodes that are present and did not answer in time.
    pub missing: Vec<NodeId>,
}

/// Sends peer requests and processes those of other nodes.
pub struct PeerMessenger {
    connection: NatsConnection,
    handle: MembershipHandle,
    answers: OnceLock<Arc<dyn PeerRequestHandler>>,
    numbers: AtomicU64,
}

/// Incoming peer requests: those to all nodes, and those to this node alone.
pub struct PeerRequestStream {
    all: Subscriber,
    alone: Subscriber,
}

impl PeerMessenger {
    pub fn new(connection: NatsConnection, handle: MembershipHandle) -> Arc<PeerMessenger> {
        // Start at a random number so that the numbers of different nodes differ.
        let numbers = AtomicU64::new(handle.node().process);
        Arc::new(PeerMessenger {
            connection,
            handle,
            answers: OnceLock::new(),
            numbers,
        })
    }

    /// Sets the handler for peer requests; only the first call counts.
    pub fn set_handler(&self, answers: Arc<dyn PeerRequestHandler>) {
        let _ = self.answers.set(answers);
    }

    fn subject(&self, question: &str) -> String {
        format!("{}.ask.{question}", self.connection.names.prefix())
    }

    fn subject_alone(&self, node: NodeId, question: &str) -> String {
        format!("{}.ask-one.{node}.{question}", self.connection.names.prefix())
    }

    /// The membership, which determines the nodes that are asked.
    pub fn handle(&self) -> &MembershipHandle {
        &self.handle
    }

    async fn own(&self, question: &str, body: Bytes) -> Result<Bytes, String> {
        match self.answers.get() {
            Some(answers) => answers.answer(question, body).await,
            None => Err("the node has not started yet".into()),
        }
    }

    /// Asks every node, including this one. `question` is one token of a subject: letters, digits,
    /// `-`, `_`. Returns when all present nodes have answered, or after `within`.
    pub async fn request_all(&self, question: &str, body: Bytes, within: Duration) -> PeerReplies {
        let me = self.handle.node().id;
        let others: BTreeSet<NodeId> = self
            .handle
            .membership()
            .present()
            .map(|member| member.id)
            .filter(|id| *id != me)
            .collect();
        let mut answers = BTreeMap::new();
        let mut missing = others.clone();
        let gather = async {
            if let Err(e) = self
                .gather(question, body.clone(), &mut missing, &mut answers)
                .await
            {
                tracing::debug!(question, error = %e, "other nodes cannot be asked");
            }
        };
        let gather = async {
            if !others.is_empty() {
                let _ = tokio::time::timeout(within, gather).await;
            }
        };
        let own = async { tokio::time::timeout(within, self.own(question, body.clone())).await };
        let ((), own) = tokio::join!(gather, own);
        match own {
            Ok(own) => {
                answers.insert(me, own);
            }
            Err(_) => {
                missing.insert(me);
            }
        }
        PeerReplies {
            answers: answers.into_iter().collect(),
            missing: missing.into_iter().collect(),
        }
    }

    /// Asks one node. The question may be of any size; dropping the future abandons the answer.
    pub async fn request_one(
        &self,
        node: NodeId,
        question: &str,
        body: Bytes,
        within: Duration,
    ) -> Result<Bytes, String> {
        let asked = async {
            if node == self.handle.node().id {
                return self.own(question, body).await;
            }
            let mut missing = BTreeSet::from([node]);
            let mut answers = BTreeMap::new();
            let client = &self.connection.client;
            let inbox = client.new_inbox();
            let mut replies = client.subscribe(inbox.clone()).await.map_err(|e| e.to_string())?;
            let number = self.numbers.fetch_add(1, Relaxed);
            for (part, said) in message_parts::cut(body, self.connection.message_max(), number) {
                let mut headers = HeaderMap::new();
                headers.insert(NODE, self.handle.node().id.to_string().as_str());
                headers.insert(message_parts::PART, said.as_str());
                client
                    .publish_with_reply_and_headers(
                        self.subject_alone(node, question),
                        inbox.clone(),
                        headers,
                        part,
                    )
                    .await
                    .map_err(|e| e.to_string())?;
            }
            hear(&mut replies, &mut missing, &mut answers).await;
            answers.remove(&node).unwrap_or(Err("the node is away".into()))
        };
        match tokio::time::timeout(within, asked).await {
            Ok(answer) => answer,
            Err(_) => Err("the node did not answer in time".into()),
        }
    }

    /// Broadcasts a message to all nodes that subscribe to it.
    pub async fn broadcast(&self, what: &str, body: Bytes) -> Result<(), Error> {
        let mut headers = HeaderMap::new();
        headers.insert(NODE, self.handle.node().id.to_string().as_str());
        let subject = format!("{}.tell.{what}", self.connection.names.prefix());
        let told = self
            .connection
            .client
            .publish_with_headers(subject, headers, body)
            .await;
        told.map_err(|e| Error::Unavailable(e.to_string()))
    }

    /// Subscribes to broadcasts of the other nodes.
    pub async fn subscribe_broadcast(
        &self,
        what: &str,
    ) -> Result<impl Stream<Item = Bytes> + Send + use<>, Error> {
        let subject = format!("{}.tell.{what}", self.connection.names.prefix());
        let told = self.connection.client.subscribe(subject).await;
        let told = told.map_err(|e| Error::Unavailable(e.to_string()))?;
        let me = self.handle.node().id.to_string();
        Ok(told.filter_map(move |message| {
            let from = message.headers.as_ref().and_then(|headers| headers.get(NODE));
            let other = from.is_some_and(|from| from.as_str() != me);
            std::future::ready(other.then_some(message.payload))
        }))
    }

    async fn gather(
        &self,
        question: &str,
        body: Bytes,
        missing: &mut BTreeSet<NodeId>,
        answers: &mut BTreeMap<NodeId, Result<Bytes, String>>,
    ) -> Result<(), Error> {
        let away = |e: &dyn std::fmt::Display| Error::Unavailable(e.to_string());
        let client = &self.connection.client;
        let inbox = client.new_inbox();
        let mut replies = client.subscribe(inbox.clone()).await.map_err(|e| away(&e))?;
        let mut headers = HeaderMap::new();
        headers.insert(NODE, self.handle.node().id.to_string().as_str());
        client
            .publish_with_reply_and_headers(self.subject(question), inbox, headers, body)
            .await
            .map_err(|e| away(&e))?;
        hear(&mut replies, missing, answers).await;
        let _ = replies.unsubscribe().await;
        Ok(())
    }

    /// Subscribes to peer requests.
    pub async fn listen(&self) -> Result<PeerRequestStream, Error> {
        let client = &self.connection.client;
        let away = |e: async_nats::SubscribeError| Error::Unavailable(e.to_string());
        let me = self.handle.node().id;
        Ok(PeerRequestStream {
            all: client.subscribe(self.subject("*")).await.map_err(away)?,
            alone: client
                .subscribe(self.subject_alone(me, "*"))
                .await
                .map_err(away)?,
        })
    }

    /// Processes peer requests until stopped.
    pub async fn run(self: Arc<Self>, mut questions: PeerRequestStream, stop: CancellationToken) {
        let room = Arc::new(Semaphore::new(ANSWERING_MAX));
        let room_alone = Arc::new(Semaphore::new(ANSWERING_ALONE_MAX));
        let mut answering = JoinSet::new();
        let mut incomplete: BTreeMap<u64, PartAssembly> = BTreeMap::new();
        let me = self.handle.node().id.to_string();
        loop {
            let (question, turn) = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(ended) = answering.join_next(), if !answering.is_empty() => {
                    if let Err(e) = ended {
                        tracing::error!(error = %e, "a question of another node could not be answered");
                    }
                    continue;
                }
                question = questions.all.next() => {
                    let Some(question) = question else { break };
                    let from = question.headers.as_ref().and_then(|headers| headers.get(NODE));
                    if from.is_none_or(|from| from.as_str() == me) {
                        continue;
                    }
                    (question, room.clone().try_acquire_owned())
                }
                question = questions.alone.next() => {
                    let Some(question) = question else { break };
                    let Some(question) = whole(&mut incomplete, question) else { continue };
                    (question, room_alone.clone().try_acquire_owned())
                }
            };
            let asker = self.clone();
            answering.spawn(async move {
                let answer = match turn {
                    Ok(_turn) => asker.answer(&question).await,
                    Err(_) => Err("too many questions at once".into()),
                };
                asker.reply(question, answer).await;
            });
        }
    }

    async fn answer(&self, question: &Message) -> Result<Bytes, String> {
        let word = question.subject.rsplit('.').next().unwrap_or_default();
        self.own(word, question.payload.clone()).await
    }

    async fn reply(&self, question: Message, answer: Result<Bytes, String>) {
        let Some(to) = question.reply else { return };
        let client = &self.connection.client;
        let mut headers = HeaderMap::new();
        headers.insert(NODE, self.handle.node().id.to_string().as_str());
        let sent = match answer {
            Err(why) => {
                headers.insert(ERROR, message_parts::header_text(&why).as_str());
                client.publish_with_headers(to, headers, Bytes::new()).await
            }
            Ok(whole) => {
                let mut sent = Ok(());
                for (part, more) in message_parts::cut(whole, self.connection.message_max(), 0) {
                    let mut headers = headers.clone();
                    headers.insert(message_parts::PART, more.as_str());
                    sent = sent.and(client.publish_with_headers(to.clone(), headers, part).await);
                }
                sent
            }
        };
        if let Err(e) = sent {
            tracing::debug!(error = %e, "an answer could not be sent");
        }
    }
}

/// Waits for the answers of all missing nodes; in vain if none of them is subscribed.
async fn hear(
    replies: &mut Subscriber,
    missing: &mut BTreeSet<NodeId>,
    answers: &mut BTreeMap<NodeId, Result<Bytes, String>>,
) {
    let mut parts: BTreeMap<NodeId, PartAssembly> = BTreeMap::new();
    while !missing.is_empty() {
        let Some(reply) = replies.next().await else { break };
        // No node is subscribed.
        if reply.status == Some(StatusCode::NO_RESPONDERS) {
            break;
        }
        let Some(headers) = &reply.headers else {
            continue;
        };
        let node = headers.get(NODE).and_then(|node| NodeId::parse(node.as_str()));
        let Some(node) = node.filter(|node| missing.contains(node)) else {
            continue;
        };
        if let Some(error) = headers.get(ERROR) {
            answers.insert(node, Err(error.as_str().into()));
        } else if let Some(whole) = parts.entry(node).or_default().add(headers, reply.payload.clone()) {
            answers.insert(node, Ok(whole));
        } else {
            continue;
        }
        missing.remove(&node);
    }
}

/// Returns the question once its last part is there. Questions with missing parts are dropped in
/// favour of later ones.
fn whole(incomplete: &mut BTreeMap<u64, PartAssembly>, mut question: Message) -> Option<Message> {
    let headers = question.headers.as_ref()?;
    let (of, number, count) = message_parts::part_of(headers)?;
    if !incomplete.contains_key(&of) && incomplete.len() >= INCOMPLETE_MAX {
        incomplete.pop_first();
    }
    let put = incomplete
        .entry(of)
        .or_default()
        .add(headers, question.payload.clone());
    if put.is_some() || number + 1 == count {
        incomplete.remove(&of);
    }
    question.payload = put?;
    Some(question)
}
