//! Reading a partition's stream: all of it in a take-over, and single messages when their events
//! are due.

use super::deliveries::{AppendedMessages, PartitionDeliveries};
use super::event_message::{self, EventMessage, EventMessageContent};
use super::snapshot::{self, SnapshotManifest, SnapshotMessage};
use super::{journal, place};
use crate::connection::{self, NatsConnection};
use crate::fenced_stream::{ChainFollower, ChainId, ChainStep};
use crate::node::NodeShared;
use async_nats::jetstream::consumer::{DeliverPolicy, push};
use async_nats::jetstream::stream::{DirectGetErrorKind, RawMessageErrorKind, Stream};
use async_nats::{HeaderMap, StatusCode};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use postrider_core::event::PublishedBatch;
use postrider_store::Error;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A read without data for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// Timeout of an answer when single messages are read.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Number of concurrent requests for single messages.
const SINGLE_READS_MAX: usize = 16;
/// Minimum number of neighbouring messages that are read together.
const TOGETHER_MIN: usize = 4;
/// Maximum number of unwanted messages between neighbours that are read along.
const GAP_MAX: u64 = 4;
/// Maximum bytes that are read for one claim.
const READ_BYTES_MAX: usize = 1 << 20;

/// A message of the stream.
struct StreamMessage {
    sequence: u64,
    subject: String,
    /// `None` for a message without a chain, which only occupies a sequence.
    id: Option<ChainId>,
    payload: Bytes,
}

/// Undecoded messages by sequence.
type RawMessages = BTreeMap<u64, (HeaderMap, Bytes)>;

/// Result of reading the stream in a take-over.
pub struct LoadedPartition {
    pub book: PartitionDeliveries,
    /// Number of the next chunk.
    pub chunk: u64,
    /// Bytes of journal and of events that were read after the snapshot.
    pub journal_bytes: u64,
    pub event_bytes: u64,
    pub snapshot_bytes: u64,
}

pub struct PartitionReader {
    connection: NatsConnection,
    stream: Stream,
    name: String,
    partition: u8,
    shared: Arc<NodeShared>,
}

/// A snapshot that was found: where it begins, and its content.
struct FoundSnapshot {
    first: u64,
    id: ChainId,
    bytes: Vec<u8>,
}

impl PartitionReader {
    pub async fn new(
        connection: &NatsConnection,
        partition: u8,
        shared: Arc<NodeShared>,
    ) -> Result<PartitionReader, Error> {
        let name = connection.names.partition(partition);
        let stream = connection.reading.get_stream(&name).await;
        let stream = stream
            .map_err(|e| Error::Unavailable(format!("stream {name}: {}", connection::error_chain(&e))))?;
        Ok(PartitionReader {
            connection: connection.clone(),
            stream,
            name,
            partition,
            shared,
        })
    }

    /// Reads everything that a new owner needs to know, up to its marker.
    pub async fn load(&self, epoch: u64, marker: u64) -> Result<LoadedPartition, Error> {
        let found = self.find_snapshot(marker).await?;
        let (book, from, next, snapshot_bytes) = match found {
            None => (PartitionDeliveries::default(), 1, ChainId { epoch: 0, n: 0 }, 0),
            Some(found) => {
                let book = snapshot::decode(self.partition, &found.bytes).ok_or_else(|| {
                    Error::Corrupt(format!(
                        "the snapshot {} of stream {} cannot be read",
                        found.id, self.name
                    ))
                })?;
                (book, found.first, found.id, found.bytes.len() as u64)
            }
        };
        let chunk = book
            .chunks
            .0
            .values()
            .map(|chunk| chunk.number)
            .max()
            .unwrap_or(0);
        let mut loading = PartitionLoad {
            reader: self,
            loaded: LoadedPartition {
                book,
                chunk,
                journal_bytes: 0,
                event_bytes: 0,
                snapshot_bytes,
            },
            follower: ChainFollower::at(from, next),
            parts: Vec::new(),
            ready: FxHashMap::default(),
            epoch,
        };
        self.follow(from, marker, Vec::new(), |stored| loading.see(stored))
            .await?;
        let mut loaded = loading.loaded;
        loaded.chunk += 1;
        Ok(loaded)
    }

    /// The last snapshot that is complete and was not written by an owner that had lost the stream.
    async fn find_snapshot(&self, marker: u64) -> Result<Option<FoundSnapshot>, Error> {
        let names = &self.connection.names;
        let journal = names.journal(self.partition);
        let snapshots = names.snapshots(self.partition);
        let mut latest = 0;
        let mut parts: BTreeMap<ChainId, (u64, Bytes)> = BTreeMap::new();
        let mut manifests: Vec<(ChainId, SnapshotManifest)> = Vec::new();
        let mut unknown = None;
        self.follow(1, marker, vec![journal, snapshots.clone()], |stored| {
            // A writer's marker came before its messages, though it may have been purged since.
            let Some(id) = stored.id.filter(|id| id.epoch >= latest) else {
                return Ok(());
            };
            latest = id.epoch;
            if stored.subject == snapshots {
                match snapshot::piece(&stored.payload) {
                    // A message may have been stored twice; the later one is in the chain.
                    Some(SnapshotMessage::Part(part)) => {
                        parts.insert(id, (stored.sequence, part));
                    }
                    Some(SnapshotMessage::Manifest(manifest)) => manifests.push((id, manifest)),
                    None => unknown = Some(stored.sequence),
                }
            }
            Ok(())
        })
        .await?;
        if let Some(sequence) = unknown {
            return Err(Error::Corrupt(format!(
                "message {sequence} of stream {} is no snapshot that this program can read",
                self.name
            )));
        }
        for (id, manifest) in manifests.into_iter().rev() {
            let Some(first) = id.n.checked_sub(manifest.parts) else {
                continue;
            };
            let ids = (first..id.n).map(|n| ChainId { epoch: id.epoch, n });
            let Some(all) = ids.map(|id| parts.get(&id)).collect::<Option<Vec<_>>>() else {
                continue;
            };
            let bytes: Vec<u8> = all.iter().flat_map(|(_, part)| part.iter().copied()).collect();
            if let Some((sequence, _)) = all.first()
                && bytes.len() as u64 == manifest.bytes
            {
                return Ok(Some(FoundSnapshot {
                    first: *sequence,
                    id: ChainId {
                        epoch: id.epoch,
                        n: first,
                    },
                    bytes,
                }));
            }
        }
        Ok(None)
    }

    /// Reads the stream in order from one sequence to another, where a message exists.
    async fn follow(
        &self,
        from: u64,
        upto: u64,
        filter_subjects: Vec<String>,
        mut see: impl FnMut(StreamMessage) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let unreadable =
            |reason: String| Error::Unavailable(format!("stream {} cannot be read: {reason}", self.name));
        let config = push::OrderedConfig {
            deliver_subject: self.connection.reading.client().new_inbox(),
            deliver_policy: DeliverPolicy::ByStartSequence {
                start_sequence: from.max(1),
            },
            filter_subjects,
            ..push::OrderedConfig::default()
        };
        let consumer = self.stream.create_consumer(config).await;
        let consumer = consumer.map_err(|e| unreadable(connection::error_chain(&e)))?;
        let messages = consumer.messages().await;
        let mut messages = messages.map_err(|e| unreadable(connection::error_chain(&e)))?;
        let mut last = from.max(1) - 1;
        loop {
            let next = tokio::time::timeout(SILENCE_MAX, messages.next()).await;
            let next = next.map_err(|_| unreadable("nothing came for a while".into()))?;
            let message = match next.ok_or_else(|| unreadable("it ended too soon".into()))? {
                Ok(message) => message,
                // The consumer is re-created automatically.
                Err(e) => {
                    tracing::debug!(stream = self.name, error = %e, "reading goes on after an error");
                    continue;
                }
            };
            let sequence = message
                .info()
                .map_err(|e| unreadable(e.to_string()))?
                .stream_sequence;
            // A consumer that is re-created before its first message may start at any sequence.
            if sequence <= last {
                continue;
            }
            last = sequence;
            if sequence > upto {
                return Err(unreadable(format!("message {upto} is not there")));
            }
            see(StreamMessage {
                sequence,
                subject: message.subject.to_string(),
                id: message.headers.as_ref().and_then(ChainId::of),
                payload: message.payload.clone(),
            })?;
            if sequence == upto {
                return Ok(());
            }
        }
    }

    /// Reads event messages: as many of them, in this order, as are read at once, and at least the
    /// first. Messages that are missing or invalid are returned without content.
    pub async fn read(&self, sequences: &[u64]) -> Result<FxHashMap<u64, Option<Arc<EventMessage>>>, Error> {
        let mut found: FxHashMap<u64, Option<Arc<EventMessage>>> = FxHashMap::default();
        let mut bytes = 0;
        let mut rest = sequences;
        while !rest.is_empty() && bytes < READ_BYTES_MAX {
            let near = |two: &&[u64]| two[0] < two[1] && two[1] - two[0] <= GAP_MAX;
            let together = rest.windows(2).take_while(near).count() + 1;
            if together >= TOGETHER_MIN {
                let raw = self.read_run(rest[0], rest[together - 1]).await?;
                let before = found.len();
                for sequence in &rest[..together] {
                    let Some((headers, payload)) = raw.get(sequence) else {
                        break;
                    };
                    let message = self.understand(*sequence, headers, payload, &raw).await?;
                    bytes += message.as_ref().map_or(0, |message| message.bytes);
                    found.insert(*sequence, message);
                }
                rest = &rest[found.len() - before..];
                if found.len() > before {
                    continue;
                }
                // The message may be gone, or the replica that answered may lag behind.
            }
            // Read one by one up to the next group of neighbours.
            let single = rest
                .windows(TOGETHER_MIN)
                .take_while(|some| !some.windows(2).all(|two| near(&two)))
                .count();
            let single = if single + TOGETHER_MIN > rest.len() {
                rest.len()
            } else {
                single.max(1)
            };
            let reads = stream::iter(rest[..single].to_vec()).map(|sequence| async move {
                let message = match self.read_one(sequence).await? {
                    Some((headers, payload)) => {
                        self.understand(sequence, &headers, &payload, &BTreeMap::new())
                            .await?
                    }
                    None => None,
                };
                Ok::<_, Error>((sequence, message))
            });
            let mut reads = reads.buffered(SINGLE_READS_MAX);
            while let Some(read) = reads.next().await {
                let (sequence, message) = read?;
                bytes += message.as_ref().map_or(0, |message| message.bytes);
                found.insert(sequence, message);
                if bytes >= READ_BYTES_MAX {
                    break;
                }
            }
            rest = &rest[single..];
        }
        self.shared
            .counters
            .read_back
            .fetch_add(found.len() as u64, Relaxed);
        Ok(found)
    }

    /// Reads the event messages between two sequences together, as many as fit, from any replica.
    async fn read_run(&self, first: u64, last: u64) -> Result<RawMessages, Error> {
        let unreadable =
            |reason: String| Error::Unavailable(format!("stream {} cannot be read: {reason}", self.name));
        let client = self.connection.reading.client();
        let inbox = client.new_inbox();
        let answers = client.subscribe(inbox.clone()).await;
        let mut answers = answers.map_err(|e| unreadable(e.to_string()))?;
        let question = serde_json::json!({
            "seq": first,
            "batch": last - first + 1,
            "max_bytes": READ_BYTES_MAX,
            "next_by_subj": self.connection.names.all_events(self.partition),
        });
        let asked = client
            .publish_with_reply(
                format!("$JS.API.DIRECT.GET.{}", self.name),
                inbox,
                question.to_string().into(),
            )
            .await;
        asked.map_err(|e| unreadable(e.to_string()))?;
        let mut read = RawMessages::new();
        loop {
            let answer = tokio::time::timeout(ANSWER_WAIT, answers.next()).await;
            let Ok(Some(answer)) = answer else {
                // Messages received so far are valid.
                if read.is_empty() {
                    return Err(unreadable("no answer".into()));
                }
                return Ok(read);
            };
            let sequence = answer.headers.as_ref().and_then(sequence_in);
            match (answer.status, sequence, answer.headers) {
                (None | Some(StatusCode::OK), Some(sequence), Some(headers)) => {
                    read.insert(sequence, (headers, answer.payload));
                }
                // The end of the batch, or no message exists.
                (Some(status), _, _) if status == StatusCode::NOT_FOUND || status.as_u16() == 204 => {
                    return Ok(read);
                }
                (status, _, _) => return Err(unreadable(format!("status {status:?}"))),
            }
        }
    }

    async fn read_one(&self, sequence: u64) -> Result<Option<(HeaderMap, Bytes)>, Error> {
        let unreadable = |reason: String| {
            Error::Unavailable(format!(
                "message {sequence} of stream {} cannot be read: {reason}",
                self.name
            ))
        };
        match self.stream.direct_get(sequence).await {
            Ok(message) => return Ok(Some((message.headers, message.payload))),
            Err(e) if e.kind() == DirectGetErrorKind::NotFound => {}
            Err(e) => return Err(unreadable(connection::error_chain(&e))),
        }
        // A replica may lag behind. The leader knows, unless it is cut off and has been replaced by
        // one that has more messages. So it is trusted only if it has reached this sequence, before
        // and after the request.
        for _ in 0..2 {
            match self.stream.get_raw_message(sequence).await {
                Ok(message) => return Ok(Some((message.headers, message.payload))),
                Err(e) if e.kind() == RawMessageErrorKind::NoMessageFound => {}
                Err(e) => return Err(unreadable(connection::error_chain(&e))),
            }
            let info = self.stream.get_info().await;
            let last = info
                .map_err(|e| unreadable(connection::error_chain(&e)))?
                .state
                .last_sequence;
            if last < sequence {
                return Err(unreadable(format!(
                    "the server that answers has come to {last} only"
                )));
            }
        }
        Ok(None)
    }

    async fn understand(
        &self,
        sequence: u64,
        headers: &HeaderMap,
        payload: &Bytes,
        near: &RawMessages,
    ) -> Result<Option<Arc<EventMessage>>, Error> {
        let requests = match event_message::decode(payload) {
            Some(EventMessageContent::Requests(requests)) => requests,
            Some(EventMessageContent::Last(parts, part)) => {
                let Some(id) = ChainId::of(headers) else {
                    return Ok(None);
                };
                match self.read_parts(sequence, id, parts, part, near).await? {
                    Some(batch) => vec![batch],
                    None => return Ok(None),
                }
            }
            Some(EventMessageContent::Part(_)) | None => return Ok(None),
        };
        Ok(Some(Arc::new(EventMessage::new(
            self.partition,
            sequence,
            requests,
        ))))
    }

    /// Reads the parts of a request before its last one, which was found at `sequence`.
    async fn read_parts(
        &self,
        sequence: u64,
        id: ChainId,
        count: u64,
        last: Bytes,
        near: &RawMessages,
    ) -> Result<Option<PublishedBatch>, Error> {
        let mut parts = vec![last];
        let mut at = sequence;
        while (parts.len() as u64) < count {
            at -= 1;
            if at == 0 {
                return Ok(None);
            }
            // Messages of a stale owner may be in between.
            let read = match near.get(&at) {
                Some(read) => Some(read.clone()),
                None => self.read_one(at).await?,
            };
            let Some((headers, payload)) = read else { continue };
            let Some(n) = id.n.checked_sub(parts.len() as u64) else {
                return Ok(None);
            };
            let wanted = ChainId { epoch: id.epoch, n };
            match (ChainId::of(&headers), event_message::decode(&payload)) {
                (Some(found), Some(EventMessageContent::Part(part))) if found == wanted => parts.push(part),
                // An earlier message of this owner: a part is missing.
                (Some(found), _) if found.epoch == id.epoch && found < wanted => return Ok(None),
                _ => {}
            }
        }
        parts.reverse();
        Ok(event_message::join(&parts))
    }
}

/// The number of the chunk in a subject.
fn chunk_in(subject: &str) -> Option<u64> {
    subject.rsplit_once(".e.")?.1.parse().ok()
}

fn sequence_in(headers: &HeaderMap) -> Option<u64> {
    headers.get("Nats-Sequence")?.as_str().parse().ok()
}

struct PartitionLoad<'r> {
    reader: &'r PartitionReader,
    loaded: LoadedPartition,
    follower: ChainFollower,
    /// Parts of an incomplete request, each with its sequence.
    parts: Vec<(u64, Bytes)>,
    ready: FxHashMap<postrider_core::ids::SubscriptionId, usize>,
    epoch: u64,
}

impl PartitionLoad<'_> {
    fn see(&mut self, stored: StreamMessage) -> Result<(), Error> {
        let reader = self.reader;
        let Some(id) = stored.id else {
            self.follower.pass(stored.sequence);
            return Ok(());
        };
        if id.epoch > self.epoch {
            return Err(Error::Unavailable(format!(
                "another node has taken stream {} over",
                reader.name
            )));
        }
        match self.follower.see(stored.sequence, id) {
            ChainStep::PassOver => return Ok(()),
            ChainStep::Marker => {
                // An incomplete request was never acknowledged.
                self.parts.clear();
                return Ok(());
            }
            ChainStep::Next { missing: 0 } => {}
            ChainStep::Next { missing } => {
                self.parts.clear();
                let what = format!(
                    "{missing} messages before {} of stream {}",
                    stored.sequence, reader.name
                );
                reader.shared.damaged(what, 0);
            }
        }
        let len = stored.payload.len() as u64;
        let Some(chunk) = chunk_in(&stored.subject) else {
            if stored.subject == reader.connection.names.journal(reader.partition) {
                self.loaded.journal_bytes += len;
                let records = journal::decode(reader.partition, &stored.payload).ok_or_else(|| {
                    Error::Corrupt(format!(
                        "message {} of stream {} is no journal that this program can read",
                        stored.sequence, reader.name
                    ))
                })?;
                for record in &records {
                    self.loaded.book.apply(record);
                }
            }
            return Ok(());
        };
        self.loaded.event_bytes += len;
        self.loaded.chunk = self.loaded.chunk.max(chunk);
        let requests = match event_message::decode(&stored.payload) {
            Some(EventMessageContent::Requests(requests)) => {
                self.parts.clear();
                requests
            }
            Some(EventMessageContent::Part(part)) => {
                self.parts.push((stored.sequence, part));
                return Ok(());
            }
            Some(EventMessageContent::Last(count, part)) => {
                self.parts.push((stored.sequence, part));
                let parts: Vec<Bytes> = self.parts.iter().map(|(_, part)| part.clone()).collect();
                match event_message::join(&parts) {
                    Some(batch) if parts.len() as u64 == count => vec![batch],
                    _ => {
                        self.parts.clear();
                        return self.damaged(stored.sequence);
                    }
                }
            }
            None => return self.damaged(stored.sequence),
        };
        let first = self.parts.first().map_or(stored.sequence, |(first, _)| *first);
        let bytes = len + self.parts.iter().map(|(_, part)| part.len() as u64).sum::<u64>();
        self.parts.clear();
        let appended = AppendedMessages {
            chunk,
            first,
            sequence: stored.sequence,
            bytes,
        };
        let message = EventMessage::new(reader.partition, stored.sequence, requests);
        let requests = message.entries.iter().map(|entry| (entry.first, &entry.batch));
        self.ready.clear();
        self.loaded.book.append(appended, requests, &mut self.ready);
        if !self.ready.is_empty() {
            reader
                .shared
                .keep(reader.partition, stored.sequence, Arc::new(message));
        }
        Ok(())
    }

    fn damaged(&self, sequence: u64) -> Result<(), Error> {
        let position = place(self.reader.partition, sequence, 0);
        let what = format!(
            "message {sequence} of stream {} (position {position})",
            self.reader.name
        );
        self.reader.shared.damaged(what, 0);
        Ok(())
    }
}
