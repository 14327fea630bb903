//! A partition: a stream, the deliveries of its events in memory, and the task that writes to the
//! stream.

pub mod journal;
pub mod deliveries;
pub mod snapshot;
pub mod event_message;
pub mod reader;
pub mod writer;

use crate::connection::NatsConnection;
use crate::fenced_stream::{FencedWriter, retry_through_election};
use crate::node::NodeShared;
use deliveries::{DeadLetterState, ListenerNotice, PartitionDeliveries};
use event_message::EventMessage;
use journal::{AttemptState, JournalRecord};
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::Timestamp;
use postrider_store::record::batch::encode_batch_head;
use postrider_store::{Claim, ClaimLimits, DeadLetterKey, Error, LogEntry, Settlement};
use reader::PartitionReader;
use rustc_hash::FxHashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use writer::{PartitionWriter, StreamAppend, WriterOrder, WriterStart};

/// Number of bits of a position that contain the index of the event in its message.
pub const EVENT_BITS: u32 = 20;
/// Maximum number of events in a message.
pub const EVENTS_PER_MESSAGE_MAX: usize = 1 << EVENT_BITS;
const SEQUENCE_BITS: u32 = 36;
/// Maximum sequence of a stream: reached after two years of a thousand messages per second.
pub const SEQUENCE_MAX: u64 = (1 << SEQUENCE_BITS) - 1;
/// Events are accepted up to this sequence: the rest is for recording what becomes of existing
/// ones.
pub const EVENT_SEQUENCE_MAX: u64 = SEQUENCE_MAX - (1 << 24);
const PARTITION_SHIFT: u32 = EVENT_BITS + SEQUENCE_BITS;
/// Maximum number of partitions that positions can name.
pub const PARTITIONS_MAX: u8 = 64;

/// Maximum number of requests that wait to be written, and of their bytes.
const APPENDS_WAITING_MAX: usize = 16 << 10;
const APPEND_BYTES_WAITING_MAX: usize = 64 << 20;
/// How long a publisher is kept waiting: long enough for a cluster to elect another leader.
const APPEND_PATIENCE: Duration = Duration::from_secs(15);
/// If nothing is stored for longer than this, requests go to other partitions.
const STUCK_AFTER: Duration = Duration::from_millis(100);
/// Settling waits while more deliveries than this are not in the journal.
const JOURNAL_WAITING_MAX: usize = 200_000;
const ORDERS_MAX: usize = 1024;
/// Error text for a full partition, with the remedy.
pub const SPENT: &str =
    "its stream has used up its numbers; move to another store.jetstream.prefix with `postrider migrate`";
/// Maximum number of messages that are read back for one claim.
const READ_MESSAGES_MAX: usize = 64;

/// The position of an event: its partition, the sequence of its message, and its index in the
/// message.
pub fn place(partition: u8, sequence: u64, event: u32) -> Position {
    Position(u64::from(partition) << PARTITION_SHIFT | sequence << EVENT_BITS | u64::from(event))
}

pub fn partition_of(position: Position) -> u8 {
    (position.0 >> PARTITION_SHIFT) as u8
}

pub fn sequence_of(position: Position) -> u64 {
    position.0 >> EVENT_BITS & SEQUENCE_MAX
}

pub fn event_of(position: Position) -> u32 {
    (position.0 & ((1 << EVENT_BITS) - 1)) as u32
}

/// State shared by the writer and the other users of a partition.
pub struct PartitionShared {
    pub number: u8,
    pub node: Arc<NodeShared>,
    book: Mutex<PartitionDeliveries>,
    /// Signals that the journal's buffer is not empty any more.
    journal_begun: Notify,
    journal_taken: Notify,
    waiting_bytes: AtomicUsize,
    made: Instant,
    /// When something was last stored or began to wait, in milliseconds since the partition was
    /// created.
    moved: AtomicU64,
    retired: AtomicBool,
    /// Set when the stream has reached the last sequence that positions can name.
    full: AtomicBool,
    /// Signals that no claim is held any more.
    claims_ended: Notify,
    ended: CancellationToken,
    why_ended: OnceLock<String>,
}

impl PartitionShared {
    pub fn book(&self) -> MutexGuard<'_, PartitionDeliveries> {
        self.book.lock().expect("no panic holds it")
    }

    /// Changes the deliveries, and wakes the writer if that adds to the journal.
    fn change<T>(&self, change: impl FnOnce(&mut PartitionDeliveries) -> T) -> T {
        let mut book = self.book();
        let before = (book.journal.is_empty(), book.claims_held());
        let changed = change(&mut book);
        let after = (book.journal.is_empty(), book.claims_held());
        drop(book);
        if before.0 && !after.0 {
            self.journal_begun.notify_one();
        }
        if after.1 == 0 && before.1 > 0 {
            self.claims_ended.notify_waiters();
        }
        changed
    }

    fn waiting_bytes(&self) -> usize {
        self.waiting_bytes.load(Relaxed)
    }

    fn moved(&self) {
        self.moved.store(self.made.elapsed().as_millis() as u64, Relaxed);
    }

    /// Whether requests have waited for long without anything being stored.
    fn is_stuck(&self) -> bool {
        if self.waiting_bytes() == 0 {
            return false;
        }
        let now = self.made.elapsed().as_millis() as u64;
        let still = now.saturating_sub(self.moved.load(Relaxed));
        still > STUCK_AFTER.as_millis() as u64
    }

    pub fn is_retired(&self) -> bool {
        self.retired.load(Relaxed)
    }

    /// Whether a stream with this last sequence still accepts events.
    fn has_numbers(&self, last: u64) -> bool {
        let has = last < EVENT_SEQUENCE_MAX;
        if !has && !self.full.swap(true, Relaxed) {
            tracing::error!(
                partition = self.number,
                last,
                "a partition takes no events any more: {SPENT}"
            );
        }
        has
    }

    fn refusal(&self) -> Error {
        Error::Unavailable(format!("partition {:02}: {SPENT}", self.number))
    }

    fn end(&self, why: &str) {
        let _ = self.why_ended.set(why.into());
        self.ended.cancel();
        self.journal_taken.notify_waiters();
        self.claims_ended.notify_waiters();
    }

    fn why_ended(&self) -> String {
        let why = self
            .why_ended
            .get()
            .map_or("its writer has ended", String::as_str);
        format!("partition {:02}: {why}", self.number)
    }
}

/// The publish requests that wait to be written to a partition or are in flight.
#[derive(Clone, Copy, Debug)]
pub struct QueuedAppends {
    pub bytes: usize,
    /// Whether nothing was stored for long: the stream may have no leader.
    pub stuck: bool,
}

/// A share of the bytes that may wait to be written, returned on drop.
pub struct QueuedBytes {
    shared: Arc<PartitionShared>,
    bytes: usize,
}

impl QueuedBytes {
    fn take(shared: &Arc<PartitionShared>, bytes: usize) -> Result<QueuedBytes, Error> {
        let before = shared.waiting_bytes.fetch_add(bytes, Relaxed);
        if before == 0 {
            shared.moved();
        }
        let room = QueuedBytes {
            shared: shared.clone(),
            bytes,
        };
        if before > 0 && before + bytes > APPEND_BYTES_WAITING_MAX {
            return Err(Error::Busy(format!(
                "{before} bytes wait to be written to partition {:02}",
                shared.number
            )));
        }
        Ok(room)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.shared.waiting_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// The part of a claim's limits that is not used yet.
pub struct ClaimBudget {
    want: ClaimLimits,
    events: usize,
    bytes: usize,
}

impl ClaimBudget {
    pub fn new(want: ClaimLimits) -> ClaimBudget {
        ClaimBudget {
            want,
            events: 0,
            bytes: 0,
        }
    }

    /// Accounts for another event of this size if it fits.
    pub fn fits(&mut self, size: usize) -> bool {
        let bytes = self.bytes.saturating_add(size).saturating_add(self.want.overhead);
        let fits = self.events < self.want.events_max && (self.events == 0 || bytes <= self.want.bytes_max);
        if fits {
            self.events += 1;
            self.bytes = bytes;
        }
        fits
    }

    pub fn events(&self) -> usize {
        self.want.events_max.saturating_sub(self.events)
    }
}

/// Messages that were read for a claim; the cache may evict them before the claim is made.
pub type ReadMessages = FxHashMap<u64, Arc<EventMessage>>;

/// Why a claim stopped.
#[derive(Debug, PartialEq, Eq)]
pub enum ClaimStop {
    /// Nothing more waits.
    Empty,
    Full,
    /// An event is not in memory.
    Unread,
}

/// A partition that this node owns. Dropping it stops its writer like a crash.
pub struct Partition {
    shared: Arc<PartitionShared>,
    epoch: u64,
    appends: mpsc::Sender<StreamAppend>,
    orders: mpsc::Sender<WriterOrder>,
    reader: PartitionReader,
    /// Only one task reads at a time: what is read for one subscription is in memory for the next.
    reading: tokio::sync::Mutex<()>,
    stop: CancellationToken,
    _writer: Mutex<JoinSet<()>>,
}

impl Partition {
    /// Takes a partition over. `epoch` must be greater than that of all earlier owners, whose
    /// writes do not count from now on. Deliveries that they had claimed are offered again.
    pub async fn take(
        connection: &NatsConnection,
        number: u8,
        epoch: u64,
        node: Arc<NodeShared>,
    ) -> Result<Partition, Error> {
        let names = &connection.names;
        let name = names.partition(number);
        let subjects = names.partition_subjects(number);
        let stream = retry_through_election(|| connection.stream(&name, vec![subjects.clone()])).await?;
        let marker = JournalRecord::Marker {
            epoch,
            node: node.node.clone(),
        };
        let marker = journal::encode(&[marker], usize::MAX).remove(0);
        let (chain, sequence) =
            FencedWriter::take(connection, &name, epoch, names.journal(number), marker).await?;
        let reader = PartitionReader::new(connection, number, node.clone()).await?;
        let mut loaded = retry_through_election(|| reader.load(epoch, sequence)).await?;
        let redelivered = loaded.book.begin();
        node.counters.redelivered.fetch_add(redelivered, Relaxed);
        node.counters.takeovers.fetch_add(1, Relaxed);
        let shared = Arc::new(PartitionShared {
            number,
            node,
            book: Mutex::new(loaded.book),
            journal_begun: Notify::new(),
            journal_taken: Notify::new(),
            waiting_bytes: AtomicUsize::new(0),
            made: Instant::now(),
            moved: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            full: AtomicBool::new(false),
            claims_ended: Notify::new(),
            ended: CancellationToken::new(),
            why_ended: OnceLock::new(),
        });
        shared.has_numbers(sequence);
        let (appends, appends_taken) = mpsc::channel(APPENDS_WAITING_MAX);
        let (orders, orders_taken) = mpsc::channel(ORDERS_MAX);
        let stop = CancellationToken::new();
        let writer = PartitionWriter::new(WriterStart {
            shared: shared.clone(),
            connection: connection.clone(),
            stream,
            chain,
            appends: appends_taken,
            orders: orders_taken,
            stop: stop.clone(),
            chunk: loaded.chunk,
            journal_bytes: loaded.journal_bytes,
            event_bytes: loaded.event_bytes,
            snapshot_bytes: loaded.snapshot_bytes,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(writer.run());
        Ok(Partition {
            shared,
            epoch,
            appends,
            orders,
            reader,
            reading: tokio::sync::Mutex::new(()),
            stop,
            _writer: Mutex::new(tasks),
        })
    }

    pub fn number(&self) -> u8 {
        self.shared.number
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Cancelled when the partition is not this node's any more: released, or lost to another node.
    pub fn ended(&self) -> CancellationToken {
        self.shared.ended.clone()
    }

    /// Whether claims may be made and events accepted.
    pub fn is_open(&self) -> bool {
        !self.shared.is_retired() && !self.shared.ended.is_cancelled()
    }

    /// Whether events may be accepted.
    pub fn takes_in(&self) -> bool {
        self.is_open() && !self.is_full()
    }

    /// Whether the stream has run out of numbers.
    pub fn is_full(&self) -> bool {
        self.shared.full.load(Relaxed)
    }

    /// Stops accepting and handing out; deliveries under way can still be settled.
    pub fn retire(&self) {
        self.shared.retired.store(true, Relaxed);
    }

    /// Returns once no claim is held, or the partition has ended.
    pub async fn settled(&self) {
        loop {
            let ended = self.shared.claims_ended.notified();
            if self.shared.book().claims_held() == 0 || self.shared.ended.is_cancelled() {
                return;
            }
            ended.await;
        }
    }

    /// Releases the partition: records everything, and a snapshot for the next owner.
    pub async fn release(&self) -> Result<(), Error> {
        self.retire();
        self.order(WriterOrder::Release).await?;
        self.shared.node.forget(self.number());
        Ok(())
    }

    /// Stops without writing anything more, as if the process had ended.
    pub fn abandon(&self) {
        self.retire();
        self.stop.cancel();
        self.shared.node.forget(self.number());
    }

    async fn order(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<(), Error>>) -> WriterOrder,
    ) -> Result<(), Error> {
        let (done, answer) = oneshot::channel();
        let gone = |_| Error::Unavailable(self.shared.why_ended());
        self.orders
            .send(order(done))
            .await
            .map_err(|_| Error::Unavailable(self.shared.why_ended()))?;
        answer.await.map_err(gone)?
    }

    /// Read access only: changes must also reach the journal.
    pub fn book(&self) -> impl Deref<Target = PartitionDeliveries> {
        self.shared.book()
    }

    pub fn waiting(&self) -> QueuedAppends {
        QueuedAppends {
            bytes: self.shared.waiting_bytes(),
            stuck: self.shared.is_stuck(),
        }
    }

    pub async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        let refused = || Error::Unavailable(self.shared.why_ended());
        if batch.events.len() > EVENTS_PER_MESSAGE_MAX {
            return Err(Error::Unavailable(format!(
                "a request has more than {EVENTS_PER_MESSAGE_MAX} events"
            )));
        }
        if self.is_full() {
            return Err(self.shared.refusal());
        }
        let head = encode_batch_head(&batch);
        let room = QueuedBytes::take(&self.shared, head.len() + batch.body.len())?;
        let (reply, answer) = oneshot::channel();
        let append = StreamAppend {
            batch,
            head,
            reply,
            room,
        };
        self.appends.try_send(append).map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => Error::Busy(format!(
                "{APPENDS_WAITING_MAX} requests wait to be written to partition {:02}",
                self.number()
            )),
            mpsc::error::TrySendError::Closed(_) => refused(),
        })?;
        match tokio::time::timeout(APPEND_PATIENCE, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(refused()),
            Err(_) => Err(Error::Unavailable(format!(
                "JetStream has not acknowledged within {} s",
                APPEND_PATIENCE.as_secs()
            ))),
        }
    }

    /// An event that is in memory.
    pub(crate) fn find(&self, position: Position, read: &ReadMessages) -> Option<(Arc<LogEntry>, u32)> {
        let sequence = sequence_of(position);
        let message = read.get(&sequence).cloned();
        let message = message.or_else(|| self.shared.node.find(self.number(), sequence))?;
        let (entry, index) = message.find(event_of(position))?;
        Some((entry.clone(), index))
    }

    /// Claims first attempts that are in memory, in order, while they fit.
    pub fn claim_waiting(
        &self,
        of: SubscriptionId,
        left: &mut ClaimBudget,
        read: &ReadMessages,
        claims: &mut Vec<Claim>,
    ) -> ClaimStop {
        let mut stopped = ClaimStop::Empty;
        // Consecutive events are mostly in the same message.
        let mut last: Option<(u64, Arc<EventMessage>)> = None;
        let mut offer = |position| {
            let sequence = sequence_of(position);
            if last.as_ref().is_none_or(|(known, _)| *known != sequence) {
                let message = read.get(&sequence).cloned();
                last = message
                    .or_else(|| self.shared.node.find(self.shared.number, sequence))
                    .map(|message| (sequence, message));
            }
            let Some((entry, index)) = last.as_ref().and_then(|(_, m)| m.find(event_of(position))) else {
                stopped = ClaimStop::Unread;
                return false;
            };
            if !left.fits(entry.batch.events[index as usize].object.len as usize) {
                stopped = ClaimStop::Full;
                return false;
            }
            claims.push(Claim {
                entry: entry.clone(),
                index,
                attempts_made: 0,
                last_attempt: None,
                due: None,
            });
            true
        };
        self.shared.change(|book| {
            // The partition may have been retired during the reads; its claims are counted already.
            if !self.shared.is_retired() {
                book.claim_waiting(of, &mut offer);
            }
        });
        stopped
    }

    /// Claims a retry if it still waits and fits.
    pub fn claim_retry(
        &self,
        of: SubscriptionId,
        (due, position): (Timestamp, Position),
        left: &mut ClaimBudget,
        read: &ReadMessages,
        claims: &mut Vec<Claim>,
    ) -> ClaimStop {
        let Some((entry, index)) = self.find(position, read) else {
            return ClaimStop::Unread;
        };
        let claimed = self.shared.change(|book| {
            // The retry may have been withdrawn or claimed meanwhile; then it must not use up the
            // limits.
            if self.shared.is_retired() || !book.waits(of, due, position) {
                return Err(ClaimStop::Empty);
            }
            if !left.fits(entry.batch.events[index as usize].object.len as usize) {
                return Err(ClaimStop::Full);
            }
            book.claim_retry(of, due, position).ok_or(ClaimStop::Empty)
        });
        let AttemptState { attempts, last } = match claimed {
            Ok(tried) => tried,
            Err(stopped) => return stopped,
        };
        claims.push(Claim {
            entry,
            index,
            attempts_made: attempts,
            last_attempt: last,
            due: Some(due),
        });
        ClaimStop::Empty
    }

    /// The messages of events that are not in memory, in order.
    fn unread(&self, positions: impl Iterator<Item = Position>) -> Vec<u64> {
        let mut sequences: Vec<u64> = Vec::new();
        for position in positions {
            let sequence = sequence_of(position);
            if sequences.last() != Some(&sequence) && self.shared.node.find(self.number(), sequence).is_none()
            {
                sequences.push(sequence);
            }
        }
        sequences
    }

    /// Reads some of the messages of these events that are not in memory, at least the first.
    /// Messages that are permanently unreadable are dropped.
    pub async fn read(&self, positions: &[Position], read: &mut ReadMessages) -> Result<(), Error> {
        let _turn = self.reading.lock().await;
        let mut sequences = self.unread(positions.iter().copied());
        sequences.retain(|sequence| !read.contains_key(sequence));
        if sequences.is_empty() {
            // A task that held the lock before has read them; keep them so that they are not
            // evicted before use.
            for position in positions.iter().take(READ_MESSAGES_MAX) {
                let sequence = sequence_of(*position);
                if let Some(message) = self.shared.node.find(self.number(), sequence) {
                    read.insert(sequence, message);
                }
            }
            return Ok(());
        }
        let first = sequences[0];
        sequences.truncate(READ_MESSAGES_MAX);
        sequences.sort_unstable();
        sequences.dedup();
        // Rotate so that the first wanted message is certainly read.
        let at = sequences.partition_point(|sequence| *sequence < first);
        sequences.rotate_left(at);
        let (later, earlier) = sequences.split_at(sequences.len() - at);
        let mut found = self.reader.read(later).await?;
        if !earlier.is_empty() {
            found.extend(self.reader.read(earlier).await?);
        }
        for (sequence, message) in found {
            match message {
                Some(message) => {
                    let kept = self.shared.node.keep(self.number(), sequence, message);
                    read.insert(sequence, kept);
                }
                None => self.drop_message(sequence),
            }
        }
        Ok(())
    }

    fn drop_message(&self, sequence: u64) {
        let dropped = self.shared.change(|book| book.drop_message(sequence));
        if dropped > 0 {
            let what = format!("message {sequence} of partition {:02}", self.number());
            self.shared.node.damaged(what, dropped);
        }
    }

    /// The first events that wait for a first attempt, as candidates for reading.
    pub fn waiting_of(&self, of: SubscriptionId) -> Vec<Position> {
        // About as many events as the messages that are read together may contain.
        self.shared.book().waiting_of(of, 4 * READ_MESSAGES_MAX)
    }

    /// Settles claims. Waits while too much is queued to be written.
    pub async fn settle(&self, of: SubscriptionId, settled: &[Settlement]) -> ListenerNotice {
        if self.shared.ended.is_cancelled() {
            self.shared
                .node
                .counters
                .fenced
                .fetch_add(settled.len() as u64, Relaxed);
            return ListenerNotice::default();
        }
        let changed = self.shared.change(|book| book.settle(of, settled));
        self.journal_has_room().await;
        changed
    }

    /// Applies these records and writes them to the journal. Waits while too much is queued to be
    /// written.
    pub(crate) async fn note(&self, records: Vec<JournalRecord>) {
        if records.is_empty() {
            return;
        }
        self.shared.change(|book| {
            for record in records {
                book.apply(&record);
                book.journal.push(record);
            }
        });
        self.journal_has_room().await;
    }

    async fn journal_has_room(&self) {
        loop {
            let taken = self.shared.journal_taken.notified();
            if self.shared.book().journal.len() < JOURNAL_WAITING_MAX || self.shared.ended.is_cancelled() {
                return;
            }
            taken.await;
        }
    }

    pub fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: &[(Timestamp, Position)],
    ) -> (Vec<Position>, ListenerNotice) {
        if self.shared.ended.is_cancelled() {
            return Default::default();
        }
        self.shared.change(|book| book.withdraw(of, waiting))
    }

    pub fn put_back(&self, of: SubscriptionId, claims: &[Claim]) {
        self.shared.change(|book| book.release(of, claims));
    }

    /// Returns once everything that was settled before is durable.
    pub async fn flush(&self) -> Result<(), Error> {
        self.order(WriterOrder::Flush).await
    }

    pub async fn letters_done(&self, of: SubscriptionId, keys: &[DeadLetterKey]) -> Result<(), Error> {
        if self.shared.change(|book| book.letters_done(of, keys)) {
            self.flush().await?;
        }
        Ok(())
    }

    /// Removes closed subscriptions, if they are here.
    pub fn forget(&self, closed: impl IntoIterator<Item = SubscriptionId>) {
        self.shared.change(|book| {
            for of in closed {
                if book.subs.contains_key(&of) {
                    book.close(of);
                }
            }
        });
    }

    /// Removes a subscription; durable on return.
    pub async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        let (known, dropped) = self
            .shared
            .change(|book| (book.subs.contains_key(&of), book.close(of)));
        if known {
            self.flush().await?;
        }
        Ok(dropped)
    }

    /// A dead letter with its event, if that is in memory.
    pub fn letter(
        &self,
        key: DeadLetterKey,
        letter: &DeadLetterState,
        read: &ReadMessages,
    ) -> Option<postrider_store::PendingDeadLetter> {
        let (entry, index) = self.find(key.1, read)?;
        Some(postrider_store::PendingDeadLetter {
            entry,
            index,
            attempts_made: letter.tried.attempts,
            last_attempt: letter.tried.last,
            reason: letter.reason,
            decided: key.0,
        })
    }
}
