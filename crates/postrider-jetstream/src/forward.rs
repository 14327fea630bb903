//! Forwarding of publish requests from a node without partitions to a node with some.

use crate::catalog::JetStreamCatalog;
use crate::connection::NatsConnection;
use crate::log::{ForwardAppend, JetStreamLog};
use crate::membership::{MembershipHandle, MembershipService, NodeId};
use crate::message_parts::{self, PartAssembly};
use async_nats::{HeaderMap, Message, Request, RequestErrorKind, Subscriber};
use async_trait::async_trait;
use bytes::{Buf, Bytes, BytesMut};
use futures_util::StreamExt;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::Position;
use postrider_store::Error;
use postrider_store::record::batch::{decode_batch, encode_batch_head};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Time for all owners together to accept a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long an owner waits for the catalog version that a request was routed with.
const CATALOG_PATIENCE: Duration = Duration::from_secs(3);
/// Maximum number of forwarded requests that are processed at once.
const TAKING_MAX: usize = 256;
/// Maximum number of requests of which only some parts have arrived.
const INCOMPLETE_MAX: usize = 64;

/// An owner's reply to a forwarded request.
#[derive(Debug, PartialEq, Eq)]
enum ForwardReply {
    Appended(Position),
    /// The request was certainly not accepted.
    Refused(String),
    /// The request may have been accepted.
    Failed(String),
}

impl ForwardReply {
    fn write(&self) -> Bytes {
        let (kind, rest) = match self {
            ForwardReply::Appended(position) => (b'a', position.0.to_be_bytes().to_vec()),
            ForwardReply::Refused(why) => (b'r', why.clone().into_bytes()),
            ForwardReply::Failed(why) => (b'f', why.clone().into_bytes()),
        };
        [vec![kind], rest].concat().into()
    }

    fn read(mut bytes: Bytes) -> Option<ForwardReply> {
        if bytes.is_empty() {
            return None;
        }
        let kind = bytes.get_u8();
        let text = || String::from_utf8_lossy(&bytes).into_owned();
        match kind {
            b'a' => Some(ForwardReply::Appended(Position(u64::from_be_bytes(
                bytes.as_ref().try_into().ok()?,
            )))),
            b'r' => Some(ForwardReply::Refused(text())),
            b'f' => Some(ForwardReply::Failed(text())),
            _ => None,
        }
    }
}

fn write(sequence: u64, batch: &PublishedBatch) -> Bytes {
    let head = encode_batch_head(batch);
    let mut out = BytesMut::with_capacity(8 + head.len() + batch.body.len());
    out.extend_from_slice(&sequence.to_be_bytes());
    out.extend_from_slice(&head);
    out.extend_from_slice(&batch.body);
    out.freeze()
}

fn read(mut bytes: Bytes) -> Option<(u64, PublishedBatch)> {
    let sequence = bytes.try_get_u64().ok()?;
    Some((sequence, decode_batch(&bytes)?))
}

/// Subject of messages to a single node.
pub(crate) fn subject(connection: &NatsConnection, node: NodeId, what: &str) -> String {
    format!("{}.node.{node}.{what}", connection.names.prefix())
}

/// Forwards publish requests to owners of partitions.
pub struct Forwarder {
    connection: NatsConnection,
    handle: MembershipHandle,
    catalog: Arc<JetStreamCatalog>,
    turn: AtomicUsize,
    numbers: AtomicU64,
}

impl Forwarder {
    pub fn new(
        connection: NatsConnection,
        handle: MembershipHandle,
        catalog: Arc<JetStreamCatalog>,
    ) -> Forwarder {
        let process = handle.node().process;
        Forwarder {
            connection,
            handle,
            catalog,
            turn: AtomicUsize::new(0),
            // Start at a random number so that the numbers of different nodes differ.
            numbers: AtomicU64::new(process),
        }
    }

    /// Offers the request to an owner.
    async fn offer(&self, to: NodeId, request: &Bytes) -> ForwardReply {
        let number = self.numbers.fetch_add(1, Relaxed);
        let to = subject(&self.connection, to, "append");
        let client = &self.connection.client;
        let mut pieces = message_parts::cut(request.clone(), self.connection.message_max(), number);
        let Some((last, said)) = pieces.pop() else {
            return ForwardReply::Refused("there is nothing to append".into());
        };
        let headers = |said: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(message_parts::PART, said);
            headers
        };
        for (piece, said) in pieces {
            if let Err(e) = client
                .publish_with_headers(to.clone(), headers(&said), piece)
                .await
            {
                return ForwardReply::Refused(e.to_string());
            }
        }
        let request = Request::new()
            .payload(last)
            .headers(headers(&said))
            .timeout(Some(PATIENCE));
        match client.send_request(to, request).await {
            Ok(message) => ForwardReply::read(message.payload)
                .unwrap_or_else(|| ForwardReply::Failed("the owner's answer cannot be understood".into())),
            Err(e) if e.kind() == RequestErrorKind::NoResponders => {
                ForwardReply::Refused("it is away".into())
            }
            Err(e) => ForwardReply::Failed(e.to_string()),
        }
    }
}

#[async_trait]
impl ForwardAppend for Forwarder {
    /// Tries another owner only if the previous one certainly did not accept the request:
    /// at-least-once delivery would permit duplicates, but they help nobody. After an `Err` the
    /// events may still be delivered.
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        let me = self.handle.node().id;
        let owners: Vec<NodeId> = self
            .handle
            .membership()
            .owners()
            .filter(|owner| *owner != me)
            .collect();
        if owners.is_empty() {
            return Err(Error::Unavailable("no node owns a partition now".into()));
        }
        let request = write(self.catalog.sequence(), &batch);
        let turn = self.turn.fetch_add(1, Relaxed);
        let forward = async {
            let mut refusal = String::new();
            for n in 0..owners.len() {
                match self.offer(owners[(turn + n) % owners.len()], &request).await {
                    ForwardReply::Appended(position) => {
                        self.handle.count_forwarded();
                        return Ok(position);
                    }
                    ForwardReply::Failed(why) => return Err(Error::Unavailable(why)),
                    ForwardReply::Refused(why) => refusal = why,
                }
            }
            Err(Error::Busy(format!(
                "no owner of a partition takes the request: {refusal}"
            )))
        };
        match tokio::time::timeout(PATIENCE, forward).await {
            Ok(done) => done,
            Err(_) => Err(Error::Unavailable(
                "the owner of a partition did not answer in time".into(),
            )),
        }
    }
}

/// Subscribes to messages for this node alone.
pub async fn listen(connection: &NatsConnection, node: NodeId) -> Result<Subscriber, Error> {
    let heard = connection.client.subscribe(subject(connection, node, "*")).await;
    heard.map_err(|e| Error::Unavailable(e.to_string()))
}

/// Accepts publish requests of other nodes, unless the cluster is being migrated, and answers
/// pings. Runs until stopped.
pub async fn serve(
    mut requests: Subscriber,
    connection: NatsConnection,
    log: Arc<JetStreamLog>,
    catalog: Arc<JetStreamCatalog>,
    members: Arc<MembershipService>,
    moving: bool,
    stop: CancellationToken,
) {
    let room = Arc::new(Semaphore::new(TAKING_MAX));
    let mut taking = JoinSet::new();
    let mut incomplete: BTreeMap<u64, PartAssembly> = BTreeMap::new();
    loop {
        let request = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(ended) = taking.join_next(), if !taking.is_empty() => {
                if let Err(e) = ended {
                    tracing::error!(error = %e, "what another node passed on could not be taken in");
                }
                continue;
            }
            request = requests.next() => request,
        };
        let Some(request) = request else { break };
        let simple = match request.subject.rsplit('.').next() {
            Some("ping") => true,
            Some("drain") => {
                members.drain().await;
                true
            }
            Some("undrain") => {
                members.undrain().await;
                true
            }
            _ => false,
        };
        if simple {
            reply(&connection, &request, Bytes::from_static(b"here")).await;
            continue;
        }
        let whole = assemble(&mut incomplete, &request);
        if request.reply.is_none() {
            continue;
        }
        let (connection, log, catalog) = (connection.clone(), log.clone(), catalog.clone());
        let turn = room.clone().try_acquire_owned();
        taking.spawn(async move {
            let answer = match (whole.and_then(read), turn) {
                _ if moving => ForwardReply::Refused("the cluster is being moved".into()),
                (None, _) => ForwardReply::Refused("the request did not arrive whole".into()),
                (_, Err(_)) => ForwardReply::Refused("too many requests at once".into()),
                (Some((sequence, batch)), Ok(_turn)) => take(&log, &catalog, sequence, batch).await,
            };
            reply(&connection, &request, answer.write()).await;
        });
    }
}

fn assemble(incomplete: &mut BTreeMap<u64, PartAssembly>, request: &Message) -> Option<Bytes> {
    let headers = request.headers.as_ref()?;
    let (of, _, _) = message_parts::part_of(headers)?;
    let whole = incomplete
        .entry(of)
        .or_default()
        .add(headers, request.payload.clone());
    // Only the last part expects a reply.
    if request.reply.is_some() {
        incomplete.remove(&of);
    } else if incomplete.len() > INCOMPLETE_MAX {
        incomplete.pop_first();
    }
    whole
}

async fn take(
    log: &JetStreamLog,
    catalog: &JetStreamCatalog,
    sequence: u64,
    batch: PublishedBatch,
) -> ForwardReply {
    // The request may have been routed with a catalog that this node does not know yet: without
    // waiting, its subscriptions could be mistaken for deleted ones.
    match tokio::time::timeout(CATALOG_PATIENCE, catalog.applied(sequence)).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => return ForwardReply::Refused(e.to_string()),
        Err(_) => return ForwardReply::Refused("this node's catalogue is behind".into()),
    }
    let able = log.accepts_events();
    if !able {
        return ForwardReply::Refused("this node owns no partition".into());
    }
    match log.append_here(batch).await {
        Ok(position) => ForwardReply::Appended(position),
        Err(e @ (Error::Busy(_) | Error::Closed)) => ForwardReply::Refused(e.to_string()),
        Err(e) => ForwardReply::Failed(e.to_string()),
    }
}

async fn reply(connection: &NatsConnection, request: &Message, payload: Bytes) {
    if let Some(to) = request.reply.clone()
        && let Err(e) = connection.client.publish(to, payload).await
    {
        tracing::debug!(error = %e, "an answer could not be sent");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_written() {
        for answer in [
            ForwardReply::Appended(Position(u64::MAX - 1)),
            ForwardReply::Refused("it is away".into()),
            ForwardReply::Failed(String::new()),
        ] {
            assert_eq!(ForwardReply::read(answer.write()), Some(answer));
        }
        for wrong in [&b""[..], b"a", b"a123", b"x"] {
            assert_eq!(ForwardReply::read(Bytes::copy_from_slice(wrong)), None);
        }
        assert!(read(Bytes::from_static(b"1234567")).is_none());
        assert!(read(Bytes::from_static(b"12345678junk")).is_none());
    }
}
