//! A state machine that every node holds in memory, fed by a stream that any node may write to.
//!
//! A message names the last message that its author had seen, and is stored only if that is still
//! the last. An author that was overtaken reads on, checks whether its commit is still permitted,
//! and tries again. So all nodes apply the same commits in the same order, and every commit was
//! checked against the state before it. After a lost acknowledgement the stream shows whether the
//! commit is stored, because each place in it is taken once.
//!
//! Once the log has become long, a node writes a snapshot of the state in parts, and purges what
//! came before.

mod replica_buffer;
mod frame;

pub(crate) use frame::{ByteReader, put_bytes};

use crate::connection::NatsConnection;
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::push::OrderedConfig;
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{DirectGetErrorKind, LastRawMessageErrorKind, Stream};
use bytes::Bytes;
use frame::{HEAD_BYTES, ReplicaManifest, ReplicationMessage};
use futures_util::StreamExt;
use postrider_store::Error;
use replica_buffer::{ReplicaBuffer, TakeOutcome};
use std::fmt::Display;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Timeout of a commit: a cluster that has lost a leader needs up to nine seconds to elect another.
const COMMIT_PATIENCE: Duration = Duration::from_secs(12);
/// Timeout of opening while no message arrives.
const OPEN_PATIENCE: Duration = Duration::from_secs(20);
/// Delay after a failure.
const AGAIN: Duration = Duration::from_millis(50);
/// How long an announced message may be missing before it is requested explicitly.
const TAIL_PATIENCE: Duration = Duration::from_millis(200);
/// Number of attempts to read a snapshot, which may be superseded meanwhile.
const OPEN_TRIES: usize = 8;

/// The replicated state. It changes only by applied commits, in the same way on all nodes.
pub(crate) trait StateMachine: Send + 'static {
    /// Input of the check whether a commit is still permitted.
    type Draft: Send + 'static;
    /// Result of a commit, for the caller.
    type Output: Send + 'static;
    /// Name of the state for messages.
    const WHAT: &'static str;

    fn check(&self, draft: &Self::Draft, me: u64) -> Result<(), Error>;
    /// Applies a commit. The error says why it cannot be decoded.
    fn apply(&mut self, commit: AppliedCommit<'_>) -> Result<Self::Output, String>;
    /// Appends the encoded state.
    fn snapshot(&self, out: &mut Vec<u8>);
    /// Replaces the state with a snapshot that was taken after the message `sequence`.
    fn restore(&mut self, bytes: &[u8], sequence: u64) -> Result<(), String>;
}

pub(crate) struct AppliedCommit<'a> {
    pub records: &'a [&'a [u8]],
    pub by: u64,
    /// Whether this node made the commit and its caller waits for it.
    pub known_here: bool,
    pub sequence: u64,
}

/// Where a state is stored.
#[derive(Clone)]
pub(crate) struct ReplicaLocation {
    pub connection: NatsConnection,
    /// Prefix of the subjects.
    pub subject: String,
    pub stream: String,
    /// Minimum size of the log at which a snapshot is written.
    pub snapshot_bytes: u64,
}

impl ReplicaLocation {
    pub fn new(connection: &NatsConnection, of: &str) -> ReplicaLocation {
        let prefix = connection.names.prefix();
        ReplicaLocation {
            subject: format!("{prefix}.{of}"),
            stream: format!("{prefix}-{of}"),
            connection: connection.clone(),
            snapshot_bytes: SNAPSHOT_BYTES,
        }
    }
}

/// Size of the log at which a snapshot is written, unless the last snapshot was larger.
const SNAPSHOT_BYTES: u64 = 4 << 20;

pub(crate) struct Replicated<M: StateMachine> {
    shared: Arc<ReplicationShared<M>>,
    tasks: TaskTracker,
}

struct ReplicationShared<M: StateMachine> {
    place: ReplicaLocation,
    me: u64,
    book: Mutex<ReplicaBuffer<M>>,
    /// Sequence of the last applied message.
    last: watch::Sender<u64>,
    /// Set when the state can neither be read nor changed any more; `broken` has the reason.
    broken: AtomicBool,
    /// Signals that there is something to write.
    waiting: Notify,
    stop: CancellationToken,
}

impl<M: StateMachine> Replicated<M> {
    /// Sequence of the stream's last message, according to its leader.
    pub async fn head(&self) -> Result<u64, Error> {
        let stream = self.shared.stream().await?;
        let info = stream.get_info().await.map_err(unavailable::<M>)?;
        Ok(info.state.last_sequence)
    }

    /// Waits until everything stored before the call is applied. Returns the sequence of the last
    /// of it.
    pub async fn catch_up(&self) -> Result<u64, Error> {
        let head = self.head().await?;
        loop {
            let seen = self.shared.known()?;
            if seen >= head {
                return Ok(head);
            }
            self.shared.catch_up(seen).await?;
        }
    }

    /// `me` must differ from the number of every other node and of every earlier process of this
    /// node.
    pub async fn open(place: ReplicaLocation, machine: M, me: u64) -> Result<Replicated<M>, Error> {
        let shared = Arc::new(ReplicationShared {
            me,
            book: Mutex::new(ReplicaBuffer::new(me, machine)),
            last: watch::Sender::new(0),
            broken: AtomicBool::new(false),
            waiting: Notify::new(),
            stop: CancellationToken::new(),
            place,
        });
        let tasks = TaskTracker::new();
        let opened = timeout(OPEN_PATIENCE, shared.open(&tasks)).await;
        let opened = opened.unwrap_or_else(|_| Err(unavailable::<M>("JetStream does not answer")));
        if let Err(e) = opened {
            shared.stop.cancel();
            return Err(e);
        }
        tasks.spawn(shared.clone().write());
        tasks.close();
        Ok(Replicated { shared, tasks })
    }

    /// Reads the state.
    pub fn read<T>(&self, look: impl FnOnce(&M) -> T) -> T {
        look(&self.shared.book().machine)
    }

    /// Changes the part of the state that is local to this node.
    pub fn local<T>(&self, change: impl FnOnce(&mut M) -> T) -> T {
        change(&mut self.shared.book().machine)
    }

    /// Why the state can neither be read nor changed any more, if that is so.
    pub fn broken(&self) -> Option<Error> {
        self.shared.book().broken.clone()
    }

    /// Like `broken`; cheap enough to be called often.
    pub fn is_broken(&self) -> bool {
        self.shared.broken.load(Relaxed)
    }

    /// Reads the state together with the sequence of the last applied message.
    pub fn read_at<T>(&self, look: impl FnOnce(&M, u64) -> T) -> T {
        let book = self.shared.book();
        look(&book.machine, book.last)
    }

    /// Increases shortly after each applied message.
    pub fn last(&self) -> watch::Receiver<u64> {
        self.shared.last.subscribe()
    }

    /// Makes a commit durable, even if the caller goes away.
    pub fn commit(
        &self,
        records: &[Vec<u8>],
        draft: M::Draft,
    ) -> impl Future<Output = Result<M::Output, Error>> + use<M> {
        let until = Instant::now() + COMMIT_PATIENCE;
        let stored = self.shared.book().commit(records, draft, until);
        self.shared.waiting.notify_one();
        async move { stored.await.map_err(|_| Error::Closed)? }
    }

    /// Stops. Waiting commits are not made.
    pub async fn close(&self) {
        self.shared.stop.cancel();
        self.tasks.wait().await;
        self.shared.book().close();
    }
}

impl<M: StateMachine> Drop for Replicated<M> {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

fn unavailable<M: StateMachine>(why: impl Display) -> Error {
    Error::Unavailable(format!("{}: {why}", M::WHAT))
}

/// A snapshot that is being written.
struct SnapshotInProgress {
    at: u64,
    bytes: u64,
    chunks: Vec<Bytes>,
}

impl<M: StateMachine> ReplicationShared<M> {
    fn book(&self) -> MutexGuard<'_, ReplicaBuffer<M>> {
        self.book.lock().expect("no panic holds it")
    }

    /// The sequence of the last applied message, or why no more can be applied.
    fn known(&self) -> Result<u64, Error> {
        let book = self.book();
        match &book.broken {
            Some(broken) => Err(broken.clone()),
            None => Ok(book.last),
        }
    }

    fn fail(&self, why: Error) {
        tracing::error!(error = %why, "nothing more can be read or changed");
        self.book().fail(why);
        self.broken.store(true, Relaxed);
        // Wake all waiters so that they see the failure.
        self.last.send_modify(|_| {});
    }

    fn subject(&self, of: &str) -> String {
        format!("{}.{of}", self.place.subject)
    }

    fn payload_max(&self) -> usize {
        self.place.connection.message_max()
    }

    /// Returns true when it is time to stop.
    async fn pause(&self, pause: Duration) -> bool {
        timeout(pause, self.stop.cancelled()).await.is_ok()
    }

    async fn open(self: &Arc<Self>, tasks: &TaskTracker) -> Result<(), Error> {
        let ReplicaLocation {
            connection,
            stream,
            subject,
            ..
        } = &self.place;
        while let Err(e) = connection.stream(stream, vec![format!("{subject}.>")]).await {
            tracing::debug!(error = %e, "cannot make the stream yet");
            self.pause(AGAIN).await;
        }
        let upto = self.load().await?;
        // Subscribe before the tail starts, so that no step is missed.
        let mut last = self.last.subscribe();
        tasks.spawn(self.clone().tail());
        loop {
            last.mark_unchanged();
            if self.known()? >= upto {
                return Ok(());
            }
            last.changed().await.map_err(|_| Error::Closed)?;
        }
    }

    async fn stream(&self) -> Result<Stream<()>, Error> {
        let stream = self
            .place
            .connection
            .asking
            .get_stream_no_info(&self.place.stream)
            .await;
        stream.map_err(unavailable::<M>)
    }

    /// Loads the last snapshot, if there is one. Returns the sequence of the stream's last message.
    async fn load(&self) -> Result<u64, Error> {
        let stream = self.stream().await?;
        for _ in 0..OPEN_TRIES {
            let info = match stream.get_info().await {
                Ok(info) => info,
                Err(e) => {
                    tracing::debug!(error = %e, "{}: the stream does not answer", M::WHAT);
                    if self.pause(AGAIN).await {
                        return Err(Error::Closed);
                    }
                    continue;
                }
            };
            match self.load_snapshot(&stream, info.state.first_sequence).await {
                Ok(true) => return Ok(info.state.last_sequence),
                // Another snapshot has replaced it meanwhile.
                Ok(false) => {}
                Err(e @ Error::Corrupt(_)) => return Err(e),
                Err(e) => {
                    tracing::debug!(error = %e, "the snapshot cannot be read yet");
                    if self.pause(AGAIN).await {
                        return Err(Error::Closed);
                    }
                }
            }
        }
        Err(unavailable::<M>("the last snapshot cannot be read"))
    }

    /// Returns false if the snapshot does not connect to the rest of the log.
    async fn load_snapshot(&self, stream: &Stream<()>, first: u64) -> Result<bool, Error> {
        let subject = self.subject("manifest");
        let found = match stream.get_last_raw_message_by_subject(&subject).await {
            Ok(message) => Some(message),
            Err(e) if e.kind() == LastRawMessageErrorKind::NoMessageFound => None,
            Err(e) => return Err(unavailable::<M>(e)),
        };
        let Some(found) = found else {
            // The log is complete, or its beginning is just being purged after a snapshot.
            return Ok(first <= self.book().last + 1);
        };
        let damaged = || {
            Error::Corrupt(format!(
                "{}: the manifest {} cannot be read",
                M::WHAT,
                found.sequence
            ))
        };
        let Some(ReplicationMessage::Manifest(manifest)) = frame::decode(&found.payload) else {
            return Err(damaged());
        };
        if manifest.at + 1 < first {
            return Ok(false);
        }
        if manifest.at <= self.book().last && self.book().last > 0 && first <= self.book().last + 1 {
            // The known state is newer, and the log continues from there.
            return Ok(true);
        }
        let mut whole = Vec::new();
        for (place, sequence) in manifest.chunks.iter().enumerate() {
            let Some(message) = self.get(stream, *sequence).await? else {
                return Ok(false);
            };
            match frame::decode(&message) {
                Some(ReplicationMessage::Chunk { at, index, bytes, .. })
                    if at == manifest.at && index == place as u64 =>
                {
                    whole.extend_from_slice(bytes)
                }
                _ => return Err(damaged()),
            }
        }
        self.book().restore(&manifest, &whole)?;
        self.last.send_replace(manifest.at);
        Ok(true)
    }

    /// A single message, if it exists.
    async fn get(&self, stream: &Stream<()>, sequence: u64) -> Result<Option<Bytes>, Error> {
        match stream.direct_get(sequence).await {
            Ok(message) => return Ok(Some(message.payload)),
            // Any replica answers, and it may lag behind.
            Err(e) if e.kind() == DirectGetErrorKind::NotFound => {}
            Err(e) => tracing::debug!(error = %e, sequence, "direct get failed"),
        }
        match stream.get_raw_message(sequence).await {
            Ok(message) => Ok(Some(message.payload)),
            Err(e) if e.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
            Err(e) => Err(unavailable::<M>(e)),
        }
    }

    /// Applies a message if it is the next one.
    fn take(&self, sequence: u64, payload: &[u8]) -> TakeOutcome {
        let (took, last) = {
            let mut book = self.book();
            let took = book.take(sequence, payload);
            if let (TakeOutcome::Next, Some(broken)) = (took, &book.broken) {
                tracing::error!(error = %broken, "nothing more can be read or changed");
                self.broken.store(true, Relaxed);
            }
            (took, book.last)
        };
        if took == TakeOutcome::Next {
            self.last.send_replace(last);
        }
        took
    }

    /// Applies messages as they arrive.
    async fn tail(self: Arc<Self>) {
        while !self.stop.is_cancelled() {
            if let Err(e) = self.read_on().await {
                tracing::debug!(error = %e, "{}: reading is begun anew", M::WHAT);
            }
            if self.pause(AGAIN).await {
                return;
            }
        }
    }

    async fn read_on(&self) -> Result<(), Error> {
        let from = self.book().last + 1;
        let stream = self
            .place
            .connection
            .reading
            .get_stream_no_info(&self.place.stream)
            .await;
        let stream = stream.map_err(unavailable::<M>)?;
        let config = OrderedConfig {
            deliver_subject: self.place.connection.client.new_inbox(),
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: from },
            ..OrderedConfig::default()
        };
        let made = tokio::select! {
            biased;
            () = self.stop.cancelled() => return Ok(()),
            made = stream.create_consumer(config) => made,
        };
        let mut messages = made
            .map_err(unavailable::<M>)?
            .messages()
            .await
            .map_err(unavailable::<M>)?;
        loop {
            let message = tokio::select! {
                biased;
                () = self.stop.cancelled() => return Ok(()),
                message = messages.next() => message,
            };
            let message = match message {
                Some(Ok(message)) => message,
                // The consumer recovers by itself.
                Some(Err(e)) => {
                    tracing::debug!(error = %e, "{}: a pause in what is read", M::WHAT);
                    continue;
                }
                None => return Ok(()),
            };
            let sequence = message.info().map_err(unavailable::<M>)?.stream_sequence;
            if self.take(sequence, &message.payload) == TakeOutcome::Gap {
                return self.mend().await;
            }
        }
    }

    /// Handles a missing message: it was purged while this node was disconnected, or has yet to
    /// arrive.
    async fn mend(&self) -> Result<(), Error> {
        let stream = self.stream().await?;
        let info = stream.get_info().await.map_err(unavailable::<M>)?;
        let next = self.book().last + 1;
        if info.state.first_sequence > next {
            tracing::warn!(
                from = next,
                to = info.state.first_sequence,
                "{}: what was missed is gone from the log; the snapshot is taken up",
                M::WHAT
            );
            self.load().await?;
            return Ok(());
        }
        if next > info.state.last_sequence {
            return Ok(());
        }
        if let Some(payload) = self.get(&stream, next).await? {
            // The replica that the consumer reads from does not have the message yet.
            self.take(next, &payload);
            return Ok(());
        }
        // A snapshot may contain the message before anything is purged.
        let loaded = self.load().await;
        if self.book().last < next && self.is_lost(&stream, next).await? {
            self.fail(Error::Corrupt(format!(
                "{}: message {next} of stream {} is lost, and no snapshot holds it; once another node has written one, \
                 restart this node",
                M::WHAT,
                self.place.stream
            )));
            return Ok(());
        }
        loaded.map(drop)
    }

    /// Whether a message is missing without having been purged, according to a server that has
    /// progressed far enough.
    async fn is_lost(&self, stream: &Stream<()>, sequence: u64) -> Result<bool, Error> {
        if self.get(stream, sequence).await?.is_some() {
            return Ok(false);
        }
        let info = stream.get_info().await.map_err(unavailable::<M>)?;
        Ok((info.state.first_sequence..=info.state.last_sequence).contains(&sequence))
    }

    /// Waits until everything stored before the call is applied, as far as the leader knows.
    async fn catch_up(&self, seen: u64) -> Result<(), Error> {
        let mut last = self.last.subscribe();
        let moved = async { drop(last.wait_for(|last| *last > seen).await) };
        if timeout(TAIL_PATIENCE, moved).await.is_ok() {
            return Ok(());
        }
        let stream = self.stream().await?;
        let info = stream.get_info().await.map_err(unavailable::<M>)?;
        if info.state.last_sequence < seen {
            let (ends, was) = (info.state.last_sequence, seen);
            let behind = format!("the stream ends at {ends} though {was} was stored");
            tracing::error!(
                "{}: {behind}: a NATS server is cut off from the others, or messages are lost; if it stays so, restart \
                 the node to go on with what is left",
                M::WHAT
            );
            return Err(unavailable::<M>(behind));
        }
        loop {
            let next = self.known()? + 1;
            if next > info.state.last_sequence {
                return Ok(());
            }
            if next < info.state.first_sequence {
                self.load().await?;
                continue;
            }
            match stream.get_raw_message(next).await {
                Ok(message) => {
                    self.take(next, &message.payload);
                }
                Err(e) => return Err(unavailable::<M>(e)),
            }
        }
    }

    /// Writes waiting commits, one message at a time.
    async fn write(self: Arc<Self>) {
        let mut snapshot: Option<SnapshotInProgress> = None;
        while !self.stop.is_cancelled() {
            // A message must have been checked against the state after exactly `seen`.
            let (message, seen) = {
                let mut book = self.book();
                (book.next_message(self.payload_max(), Instant::now()), book.last)
            };
            if let Some(message) = message {
                self.publish("log", message.into(), seen).await;
            } else if snapshot.is_none() && !self.wants_snapshot() {
                tokio::select! {
                    biased;
                    () = self.stop.cancelled() => {}
                    () = self.waiting.notified() => {}
                }
            }
            if snapshot.is_none() && self.wants_snapshot() {
                snapshot = Some(self.begin_snapshot());
            }
            if let Some(writing) = &snapshot
                && self.write_snapshot(writing).await
            {
                snapshot = None;
            }
        }
        self.book().close();
    }

    /// Publishes a message to be stored directly after `seen`. Whether it was shows when the stream
    /// is read.
    async fn publish(&self, subject: &str, payload: Bytes, seen: u64) {
        let message = PublishMessage::build()
            .payload(payload.clone())
            .expected_last_sequence(seen);
        let sent = async {
            let ack = self
                .place
                .connection
                .js
                .send_publish(self.subject(subject), message)
                .await?;
            ack.await
        };
        let sent = tokio::select! {
            biased;
            () = self.stop.cancelled() => return,
            sent = sent => sent,
        };
        let error = match sent {
            Ok(ack) => {
                // Does nothing if the tail was faster.
                self.take(ack.sequence, &payload);
                return;
            }
            Err(e) => e,
        };
        let caught_up = match error.kind() {
            PublishErrorKind::WrongLastSequence => self.catch_up(seen).await,
            // The message may be stored now or later: the next message at this place decides.
            _ => Err(unavailable::<M>(&error)),
        };
        if let Err(e) = caught_up {
            tracing::debug!(error = %e, "{}: a message could not be stored yet", M::WHAT);
            self.pause(AGAIN).await;
        }
    }

    fn wants_snapshot(&self) -> bool {
        self.book().wants_snapshot(self.place.snapshot_bytes)
    }

    fn begin_snapshot(&self) -> SnapshotInProgress {
        let (at, whole) = {
            let mut book = self.book();
            book.own_chunks.clear();
            (book.last, Bytes::from(book.snapshot()))
        };
        let room = self.payload_max().saturating_sub(HEAD_BYTES).max(1);
        let count = whole.len().div_ceil(room).max(1);
        let part = |n: usize| whole.slice(n * room..((n + 1) * room).min(whole.len()));
        SnapshotInProgress {
            at,
            bytes: whole.len() as u64,
            chunks: (0..count).map(part).collect(),
        }
    }

    /// Stores the next message of a snapshot. Returns true when nothing remains to be done.
    async fn write_snapshot(&self, writing: &SnapshotInProgress) -> bool {
        let (stored, superseded, seen) = {
            let book = self.book();
            let superseded = book.snapshot_at > writing.at || book.last < writing.at;
            let superseded = superseded || book.broken.is_some();
            (book.own_chunks.clone(), superseded, book.last)
        };
        if superseded {
            return true;
        }
        if self.book().snapshot_at == writing.at {
            self.purge(writing.at).await;
            return true;
        }
        let next = stored.len() as u64;
        if let Some(bytes) = writing.chunks.get(stored.len()) {
            // Another node was faster.
            if next == 0 && !self.wants_snapshot() {
                return true;
            }
            let chunk = frame::encode_chunk(self.me, writing.at, next, bytes);
            self.publish("snap", chunk.into(), seen).await;
            return false;
        }
        let manifest = ReplicaManifest {
            by: self.me,
            at: writing.at,
            chunks: stored.into_values().collect(),
            bytes: writing.bytes,
        };
        let manifest = frame::encode_manifest(&manifest);
        self.publish("manifest", manifest.into(), seen).await;
        false
    }

    /// Purges the log before a complete snapshot, and earlier snapshots.
    async fn purge(&self, at: u64) {
        let purged = async {
            let stream = self.stream().await?;
            let purged = stream.purge().sequence(at + 1).await;
            purged.map_err(unavailable::<M>)
        };
        match purged.await {
            Ok(purged) => tracing::debug!(messages = purged.purged, "{}: purged the log", M::WHAT),
            Err(e) => tracing::warn!(error = %e, "cannot purge the log; the next snapshot does"),
        }
    }
}
