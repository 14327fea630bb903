//! The task that writes to a partition's stream: events as they arrive, the journal, and snapshots.

use super::PartitionShared;
use super::deliveries::AppendedMessages;
use super::event_message::{self, EventMessage};
use super::snapshot;
use crate::connection::NatsConnection;
use crate::fenced_stream::{FencedWriter, StreamLost};
use async_nats::jetstream::stream::Stream;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_store::Error;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Maximum size of a group of waiting requests that share a message.
const GROUP_BYTES: usize = 128 << 10;
/// A smaller group waits while others are in flight: fewer and larger messages increase the
/// throughput.
const GROUP_BYTES_SMALL: usize = 16 << 10;
/// Maximum number of small groups in flight.
const SMALL_IN_FLIGHT_MAX: usize = 2;
/// Maximum delay of settlements until they are sent to the journal.
const JOURNAL_EVERY: Duration = Duration::from_millis(20);
/// Maximum size of a message of the journal or of a snapshot.
const RECORDS_BYTES_MAX: usize = 512 << 10;
/// A publish request on its way into the stream.
pub struct StreamAppend {
    pub batch: PublishedBatch,
    pub head: Vec<u8>,
    pub reply: oneshot::Sender<Result<Position, Error>>,
    /// Returns the request's bytes to the bound on waiting bytes when dropped.
    pub room: super::QueuedBytes,
}

impl StreamAppend {
    fn len(&self) -> usize {
        self.head.len() + self.batch.body.len() + 8
    }
}

type CompletionSender = oneshot::Sender<Result<(), Error>>;

pub enum WriterOrder {
    /// Make everything settled so far durable.
    Flush(CompletionSender),
    /// Write everything and a snapshot, then end.
    Release(CompletionSender),
}

/// Action to take once a message is stored.
enum StoredAction {
    /// A part of a request, with its size.
    Part(u64),
    Events {
        appends: Vec<StreamAppend>,
        chunk: u64,
        bytes: u64,
    },
    Journal(Vec<CompletionSender>, u64),
    Piece,
    /// The last message of a snapshot.
    Manifest(SnapshotPurge),
}

/// Messages that a snapshot makes removable from the stream.
#[derive(Clone, Debug)]
struct SnapshotPurge {
    /// Where the snapshot begins; known once its first part is stored.
    from: u64,
    /// The first sequence that is still needed, if any.
    needed: Option<u64>,
    chunks: Vec<u64>,
}

pub struct PartitionWriter {
    shared: Arc<PartitionShared>,
    connection: NatsConnection,
    stream: Stream,
    chain: FencedWriter,
    appends: mpsc::Receiver<StreamAppend>,
    orders: mpsc::Receiver<WriterOrder>,
    reconnects: watch::Receiver<u64>,
    stop: CancellationToken,
    /// Taken from the queue but too large for the last group.
    kept: Option<StreamAppend>,
    /// Messages to be sent, in this order.
    outbox: VecDeque<(String, Bytes, StoredAction)>,
    /// Messages sent and not committed.
    sent: VecDeque<StoredAction>,
    /// The first message of a split request, and the bytes of its parts stored so far.
    cut: Option<(u64, u64)>,
    snapshot_first: Option<u64>,
    chunk: u64,
    chunk_bytes: u64,
    chunk_messages: u64,
    journal_due: Option<Instant>,
    journal_bytes: u64,
    event_bytes: u64,
    snapshot_bytes: u64,
    snapshot_wanted: bool,
    releasing: Vec<CompletionSender>,
    /// Whether the last snapshot was written for a release.
    released: bool,
    purging: Option<BoxFuture<'static, ()>>,
    ready: FxHashMap<SubscriptionId, usize>,
}

pub struct WriterStart {
    pub shared: Arc<PartitionShared>,
    pub connection: NatsConnection,
    pub stream: Stream,
    pub chain: FencedWriter,
    pub appends: mpsc::Receiver<StreamAppend>,
    pub orders: mpsc::Receiver<WriterOrder>,
    pub stop: CancellationToken,
    pub chunk: u64,
    pub journal_bytes: u64,
    pub event_bytes: u64,
    pub snapshot_bytes: u64,
}

impl PartitionWriter {
    pub fn new(start: WriterStart) -> PartitionWriter {
        PartitionWriter {
            reconnects: start.connection.reconnects(),
            shared: start.shared,
            connection: start.connection,
            stream: start.stream,
            chain: start.chain,
            appends: start.appends,
            orders: start.orders,
            stop: start.stop,
            kept: None,
            outbox: VecDeque::new(),
            sent: VecDeque::new(),
            cut: None,
            snapshot_first: None,
            chunk: start.chunk,
            chunk_bytes: 0,
            chunk_messages: 0,
            journal_due: None,
            journal_bytes: start.journal_bytes,
            event_bytes: start.event_bytes,
            snapshot_bytes: start.snapshot_bytes,
            snapshot_wanted: false,
            releasing: Vec::new(),
            released: false,
            purging: None,
            ready: FxHashMap::default(),
        }
    }

    /// Runs until the partition is released, lost or stopped.
    pub async fn run(mut self) {
        let ended = self.work().await;
        match ended {
            Ok(()) => self.shared.end("this node has given the partition up"),
            Err(StreamLost(reason)) => {
                tracing::warn!(partition = self.shared.number, reason, "a partition is lost");
                self.shared.node.counters.lost.fetch_add(1, Relaxed);
                self.shared.end(&reason);
            }
        }
        let refused = || Error::Unavailable(self.shared.why_ended());
        let waiting = self.outbox.drain(..).map(|(_, _, meaning)| meaning);
        for meaning in self.sent.drain(..).chain(waiting) {
            match meaning {
                StoredAction::Events { appends, .. } => {
                    self.shared
                        .node
                        .counters
                        .fenced
                        .fetch_add(appends.len() as u64, Relaxed);
                    for append in appends {
                        let _ = append.reply.send(Err(refused()));
                    }
                }
                StoredAction::Journal(done, _) => {
                    for done in done {
                        let _ = done.send(Err(refused()));
                    }
                }
                StoredAction::Part(_) | StoredAction::Piece | StoredAction::Manifest(_) => {}
            }
        }
    }

    async fn work(&mut self) -> Result<(), StreamLost> {
        loop {
            self.prepare();
            while self.chain.has_room() {
                let Some((subject, payload, meaning)) = self.outbox.pop_front() else {
                    break;
                };
                if self.chain.in_flight() == 0 {
                    // Reconnects before this moment do not matter, because nothing was in flight.
                    self.reconnects.mark_unchanged();
                }
                self.sent.push_back(meaning);
                self.chain.send(subject, payload).await;
            }
            if self.released && self.sent.is_empty() && self.outbox.is_empty() {
                if let Some(purging) = self.purging.take() {
                    purging.await;
                }
                for done in self.releasing.drain(..) {
                    let _ = done.send(Ok(()));
                }
                return Ok(());
            }
            if self.chain.is_broken() {
                self.shared.node.counters.recoveries.fetch_add(1, Relaxed);
                let committed = tokio::select! {
                    biased;
                    () = self.stop.cancelled() => return Ok(()),
                    committed = self.chain.recover() => committed?,
                };
                for sequence in committed {
                    self.committed(sequence);
                }
                continue;
            }
            let takes = self.takes_appends();
            let in_flight = self.chain.in_flight() > 0;
            let due = self.journal_due;
            let has_journal = due.is_none();
            let shared = self.shared.clone();
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Ok(()),
                sequence = self.chain.acked(), if in_flight => {
                    if let Some(sequence) = sequence {
                        self.committed(sequence);
                    }
                }
                Ok(()) = self.reconnects.changed(), if in_flight => self.chain.doubt(),
                Some(order) = self.orders.recv() => self.obey(order),
                () = until(due), if due.is_some() && self.outbox.is_empty() && !self.snapshot_wanted => {
                    self.write_journal(Vec::new());
                }
                () = shared.journal_begun.notified(), if has_journal => {
                    self.journal_due = Some(Instant::now() + JOURNAL_EVERY);
                }
                append = self.appends.recv(), if takes && self.releasing.is_empty() => match append {
                    Some(append) => self.take_group(append),
                    // The partition was dropped, so nobody can append any more.
                    None => return Ok(()),
                },
                () = finished(&mut self.purging) => self.purging = None,
            }
        }
    }

    fn takes_appends(&self) -> bool {
        self.kept.is_none() && self.outbox.is_empty() && self.chain.has_room() && !self.snapshot_wanted
            // Small groups wait for more requests, but never longer than an acknowledgement takes.
            && (self.chain.in_flight() < SMALL_IN_FLIGHT_MAX || self.queued_bytes() >= GROUP_BYTES_SMALL)
    }

    /// Bytes that wait and are not in flight.
    fn queued_bytes(&self) -> usize {
        let sent = self.sent.iter().map(|meaning| match meaning {
            StoredAction::Events { appends, .. } => appends.iter().map(|one| one.room.bytes()).sum(),
            _ => 0,
        });
        self.shared.waiting_bytes().saturating_sub(sent.sum())
    }

    /// Does everything that is possible without waiting.
    fn prepare(&mut self) {
        if !self.snapshot_wanted
            && self.outbox.is_empty()
            && self.chain.has_room()
            && let Some(append) = self.kept.take()
        {
            self.take_group(append);
        }
        let idle = self.sent.is_empty() && self.outbox.is_empty() && !self.chain.is_broken();
        if !idle {
            return;
        }
        if !self.releasing.is_empty() && !self.released && self.kept.is_none() {
            match self.appends.try_recv() {
                Ok(append) => self.take_group(append),
                Err(_) => {
                    self.released = true;
                    let mut book = self.shared.book();
                    let lapsed = book.lapse();
                    let changed = self.journal_bytes + self.event_bytes > 0 || !book.journal.is_empty();
                    drop(book);
                    if lapsed > 0 {
                        self.shared.node.counters.redelivered.fetch_add(lapsed, Relaxed);
                        tracing::info!(
                            partition = self.shared.number,
                            attempts = lapsed,
                            "given up with attempts under way: they are made again"
                        );
                    }
                    if changed {
                        self.write_journal(Vec::new());
                        self.snapshot_wanted = true;
                    }
                }
            }
        }
        if self.snapshot_wanted && self.outbox.is_empty() {
            self.write_snapshot();
        }
    }

    fn obey(&mut self, order: WriterOrder) {
        match order {
            WriterOrder::Flush(done) => self.write_journal(vec![done]),
            WriterOrder::Release(done) => {
                self.releasing.push(done);
                self.appends.close();
            }
        }
    }

    /// Puts a request together with others that wait.
    fn take_group(&mut self, first: StreamAppend) {
        let ahead = (self.sent.len() + self.outbox.len()) as u64;
        if !self.shared.has_numbers(self.chain.last() + ahead) {
            let _ = first.reply.send(Err(self.shared.refusal()));
            return;
        }
        let bytes_max = self.connection.message_max();
        if first.len() > bytes_max {
            self.take_cut(first, bytes_max);
            return;
        }
        let mut bytes = first.len();
        let mut events = first.batch.events.len();
        let mut appends = vec![first];
        while bytes < GROUP_BYTES {
            let Ok(append) = self.appends.try_recv() else {
                break;
            };
            if bytes + append.len() > GROUP_BYTES.min(bytes_max)
                || !event_message::has_room(events, append.batch.events.len())
            {
                self.kept = Some(append);
                break;
            }
            bytes += append.len();
            events += append.batch.events.len();
            appends.push(append);
        }
        let requests = appends
            .iter_mut()
            .map(|one| (one.head.as_slice(), &mut one.batch.body));
        let payload = event_message::whole(requests, bytes);
        let bytes = payload.len() as u64;
        let chunk = self.chunk_for(1, bytes);
        let subject = self.connection.names.events(self.shared.number, chunk);
        let meaning = StoredAction::Events {
            appends,
            chunk,
            bytes,
        };
        self.outbox.push_back((subject, payload, meaning));
    }

    /// Splits a request that does not fit into one message.
    fn take_cut(&mut self, append: StreamAppend, bytes_max: usize) {
        let mut messages = event_message::cut(&append.head, &append.batch.body, bytes_max - 64);
        let bytes = messages.iter().map(|message| message.len() as u64).sum();
        let chunk = self.chunk_for(messages.len() as u64, bytes);
        let subject = self.connection.names.events(self.shared.number, chunk);
        let Some(last) = messages.pop() else { return };
        for message in messages {
            let meaning = StoredAction::Part(message.len() as u64);
            self.outbox.push_back((subject.clone(), message, meaning));
        }
        let meaning = StoredAction::Events {
            appends: vec![append],
            chunk,
            bytes: last.len() as u64,
        };
        self.outbox.push_back((subject, last, meaning));
    }

    fn chunk_for(&mut self, messages: u64, bytes: u64) -> u64 {
        let bounds = &self.shared.node.bounds;
        if self.chunk_bytes >= bounds.chunk_bytes || self.chunk_messages >= bounds.chunk_messages {
            self.begin_chunk();
        }
        self.chunk_bytes += bytes;
        self.chunk_messages += messages;
        self.chunk
    }

    fn begin_chunk(&mut self) {
        if self.chunk_messages > 0 {
            self.chunk += 1;
            self.chunk_bytes = 0;
            self.chunk_messages = 0;
        }
    }

    /// Sends what has been settled. `done` is notified once it is stored.
    fn write_journal(&mut self, mut done: Vec<CompletionSender>) {
        self.journal_due = None;
        let bytes_max = RECORDS_BYTES_MAX.min(self.connection.message_max() / 2);
        // Take the buffer out first: settling must not wait for its encoding.
        let mut journal = std::mem::take(&mut self.shared.book().journal);
        let messages = journal.take(bytes_max);
        self.shared.journal_taken.notify_waiters();
        if messages.is_empty() {
            // The journal is in flight already, or stored.
            let mut waiting = self.outbox.iter_mut().map(|(_, _, meaning)| meaning).rev();
            let journal = |meaning: &&mut StoredAction| matches!(meaning, StoredAction::Journal(..));
            let last = waiting
                .find(journal)
                .or_else(|| self.sent.iter_mut().rev().find(journal));
            match last {
                Some(StoredAction::Journal(waiting, _)) => waiting.append(&mut done),
                _ => {
                    for done in done {
                        let _ = done.send(Ok(()));
                    }
                }
            }
            return;
        }
        let subject = self.connection.names.journal(self.shared.number);
        let count = messages.len();
        for (n, message) in messages.into_iter().enumerate() {
            let done = if n + 1 == count {
                std::mem::take(&mut done)
            } else {
                Vec::new()
            };
            let len = message.len() as u64;
            self.outbox
                .push_back((subject.clone(), message, StoredAction::Journal(done, len)));
        }
    }

    /// Writes a snapshot. Everything that was sent is stored, so the deliveries in memory agree with
    /// the stream, except for the content of the journal's buffer, which may be applied twice.
    fn write_snapshot(&mut self) {
        self.snapshot_wanted = false;
        // Begin a new chunk, so that earlier chunks can be purged as a whole.
        self.begin_chunk();
        let bytes_max = RECORDS_BYTES_MAX.min(self.connection.message_max() / 2);
        let (purge, bytes) = self.shared.change(|book| {
            let chunks = book.tidy();
            let needed = book.first_needed();
            let purge = SnapshotPurge {
                from: 0,
                needed,
                chunks,
            };
            let bytes = snapshot::encode(book);
            book.note_claims();
            (purge, bytes)
        });
        self.snapshot_bytes = bytes.len() as u64;
        self.journal_bytes = 0;
        self.event_bytes = 0;
        self.snapshot_first = None;
        let subject = self.connection.names.snapshots(self.shared.number);
        let mut messages = snapshot::cut(&bytes, bytes_max);
        let Some(manifest) = messages.pop() else { return };
        for message in messages {
            self.outbox
                .push_back((subject.clone(), message, StoredAction::Piece));
        }
        self.outbox
            .push_back((subject, manifest, StoredAction::Manifest(purge)));
    }

    /// The oldest message in flight is stored at this sequence, and so are all before it.
    fn committed(&mut self, sequence: u64) {
        let Some(meaning) = self.sent.pop_front() else {
            return;
        };
        let journalled = matches!(meaning, StoredAction::Journal(..));
        match meaning {
            StoredAction::Part(bytes) => {
                let (_, before) = *self.cut.get_or_insert((sequence, 0));
                self.cut = self.cut.map(|(first, _)| (first, before + bytes));
                self.event_bytes += bytes;
            }
            StoredAction::Events {
                appends,
                chunk,
                bytes,
            } => {
                self.event_bytes += bytes;
                let (first, parts) = self.cut.take().unwrap_or((sequence, 0));
                let appended = AppendedMessages {
                    chunk,
                    first,
                    sequence,
                    bytes: bytes + parts,
                };
                self.accepted(appended, appends);
            }
            StoredAction::Journal(done, bytes) => {
                self.journal_bytes += bytes;
                let counters = &self.shared.node.counters;
                counters.journal_messages.fetch_add(1, Relaxed);
                counters.journal_bytes.fetch_add(bytes, Relaxed);
                for done in done {
                    let _ = done.send(Ok(()));
                }
            }
            StoredAction::Piece => {
                self.snapshot_first.get_or_insert(sequence);
            }
            StoredAction::Manifest(purge) => {
                self.shared.node.counters.snapshots.fetch_add(1, Relaxed);
                if let Some(from) = self.snapshot_first.take() {
                    self.purge(SnapshotPurge { from, ..purge });
                }
            }
        }
        if self.releasing.is_empty() && !self.snapshot_wanted {
            self.snapshot_wanted = self.is_much(journalled);
        }
    }

    /// Whether enough has happened since the last snapshot to justify another.
    fn is_much(&self, journalled: bool) -> bool {
        let pending =
            |meaning: &StoredAction| matches!(meaning, StoredAction::Piece | StoredAction::Manifest(..));
        if self.sent.iter().any(pending) || self.outbox.iter().any(|(_, _, meaning)| pending(meaning)) {
            return false;
        }
        let bounds = &self.shared.node.bounds;
        let events_max = bounds.snapshot_event_bytes.max(8 * self.snapshot_bytes);
        self.journal_bytes > bounds.snapshot_journal_bytes.max(self.snapshot_bytes)
            || self.event_bytes > events_max
            || (journalled && self.shared.book().finished_bytes() > events_max)
    }

    /// The events are stored: makes them claimable, and answers their publishers.
    fn accepted(&mut self, appended: AppendedMessages, appends: Vec<StreamAppend>) {
        let shared = &self.shared;
        shared.moved();
        let mut batches = Vec::with_capacity(appends.len());
        let mut replies = Vec::with_capacity(appends.len());
        for append in appends {
            batches.push(append.batch);
            replies.push(append.reply);
        }
        let message = Arc::new(EventMessage::new(shared.number, appended.sequence, batches));
        self.ready.clear();
        let requests = message.entries.iter().map(|entry| (entry.first, &entry.batch));
        {
            let mut book = shared.book();
            book.append(appended, requests, &mut self.ready);
            if !self.ready.is_empty() {
                shared
                    .node
                    .keep(shared.number, appended.sequence, message.clone());
            }
        }
        if !shared.is_retired() {
            shared.node.tell(|listener| {
                for (of, count) in &self.ready {
                    listener.ready(*of, *count);
                }
            });
        }
        for (reply, entry) in replies.into_iter().zip(&message.entries) {
            // The publisher may have gone away; the events are stored all the same.
            let _ = reply.send(Ok(entry.first));
        }
    }

    /// Removes what the snapshot makes unnecessary, concurrently with everything else. What cannot
    /// be removed now is removed with a later snapshot.
    fn purge(&mut self, purge: SnapshotPurge) {
        let stream = self.stream.clone();
        let names = self.connection.names.clone();
        let number = self.shared.number;
        let before = self.purging.take();
        self.purging = Some(Box::pin(async move {
            if let Some(before) = before {
                before.await;
            }
            let mut results = Vec::new();
            for subject in [names.journal(number), names.snapshots(number)] {
                results.push(stream.purge().filter(subject).sequence(purge.from).await);
            }
            let below = purge.needed.map_or(purge.from, |needed| needed.min(purge.from));
            if below > 1 {
                results.push(stream.purge().sequence(below).await);
            }
            for chunk in purge.chunks {
                // Bounded by sequence: the purge may be executed late, after the next owner has
                // begun a chunk of the same number.
                let events = names.events(number, chunk);
                results.push(stream.purge().filter(events).sequence(purge.from).await);
            }
            for failed in results.into_iter().filter_map(Result::err) {
                tracing::warn!(partition = number, error = %failed, "what is done with cannot be removed yet");
            }
        }));
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

async fn finished(work: &mut Option<BoxFuture<'static, ()>>) {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}
