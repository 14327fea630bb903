//! The writer of dead-letter blobs: many dead letters per blob, some time after the last attempt.

use crate::attempt::DeliveryPlan;
use crate::blobs::{BlobError, BlobStore, WrittenBlobVersion};
use crate::counters::{add, by_reason};
use crate::dead_letter_blob::sha256;
use crate::directory::TopicEntry;
use crate::dispatch::metering::letters_by_cause;
use crate::meters::FailureCause;
use crate::recorder::{
    BlobWritten, DeadLetterBlobLocation, DeliveryDisposition, EndedDeliveries, EventPlace,
};
use crate::tasks::TaskKind;
use crate::{Engine, Error};
use bytes::Bytes;
use postrider_core::envelope::{EnvelopeField, EventEnvelope};
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers, PublishedBatch, system_id};
use postrider_core::filter::FilterBudget;
use postrider_core::ids::{Position, SubscriptionId, TopicId};
use postrider_core::json::{self, RawJson};
use postrider_core::outcome::Outcome;
use postrider_core::probation::EndpointProbationDelay;
use postrider_core::render::{self, DeadLetterDiagnostics, EventRendering};
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{DeadLetterDestination, TopicKind};
use postrider_core::time::Timestamp;
use postrider_store::{
    Archive, BlobId, BlobRecord, ClaimLimits, DeadLetterKey, DeadLetterMark, PendingDeadLetter,
    PendingDeadLetters,
};
use rustc_hash::FxHashMap;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

/// The most dead letters in one blob …
pub const LETTERS_PER_BLOB_MAX: usize = 5000;
/// … and its largest size, unless a single event is larger.
pub const BLOB_BYTES_MAX: usize = 4 << 20;
/// Blobs of one subscription that are being written at the same time.
pub const BLOBS_IN_FLIGHT_MAX: usize = 6;
/// Blobs of one subscription that are being written or recorded. A blob that is only being recorded
/// holds no events any more, and the more of them wait, the more are recorded by one commit.
const BLOBS_RECORDED_MAX: usize = 12;
/// Memory for all blobs being drafted or written, over all subscriptions: the events as read, and
/// the blobs' bodies.
const DRAFT_BYTES_MAX: usize = 64 << 20;
/// The part of [`DRAFT_BYTES_MAX`] reserved while dead letters are read; the unused rest is given
/// back afterwards.
const DRAFT_BYTES_READ: usize = 4 * BLOB_BYTES_MAX;
/// The approximate size of the diagnostics that are added to an event.
const DIAGNOSTICS_BYTES: usize = 320;
/// Waits before a failed write or announcement of a blob is retried; the last one repeats.
const TRY_AGAIN: [Duration; 4] = [
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
    Duration::from_secs(300),
];
/// How much later than due a failed retry may end; time beyond that counts as time in which nothing
/// was tried.
const TRY_LASTS_MAX: Duration = Duration::from_secs(5 * 60);
/// How long the announcement of a blob is retried before it is given up.
const ANNOUNCE_FOR: Duration = Duration::from_secs(4 * 60 * 60);
/// After a blob is written, the next one of its subscription waits for the dead-letter delay
/// divided by this: otherwise every blob would hold only a few dead letters under a steady stream.
const GATHER_PART: u32 = 100;
/// Dropped dead letters are named in the log, this many per line.
const NAMED_PER_LINE: usize = 100;

/// Selects pending dead letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingDeadLetterFilter {
    pub subscription: Option<SubscriptionId>,
    pub reason: Option<GiveUpReason>,
    /// Given up at this time or later.
    pub since: Option<Timestamp>,
    /// Only this dead letter.
    pub letter: Option<DeadLetterKey>,
}

impl PendingDeadLetterFilter {
    fn takes(&self, letter: &PendingDeadLetter) -> bool {
        self.reason.is_none_or(|reason| reason == letter.reason)
            && self.letter.is_none_or(|key| key == letter.key())
    }

    /// Whether the filter selects all dead letters of a subscription, so that they need not be
    /// read.
    fn takes_all(&self) -> bool {
        self.reason.is_none() && self.since.is_none() && self.letter.is_none()
    }

    /// The key before the first dead letter that may match; none if the first one may.
    fn after(&self) -> Option<DeadLetterKey> {
        let since = self.since.map(|since| (since, Position(0)));
        before(self.letter.max(since)?)
    }
}

/// The greatest key below this one; none if there is none.
pub fn before((decided, position): DeadLetterKey) -> Option<DeadLetterKey> {
    match position.0.checked_sub(1) {
        Some(position) => Some((decided, Position(position))),
        None if decided > Timestamp::MIN => Some((decided - Duration::from_nanos(1), Position(u64::MAX))),
        None => None,
    }
}

/// A count of pending dead letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingDeadLetterSummary {
    pub count: u64,
    /// When the first of them is due to be written.
    pub due: Option<Timestamp>,
}

/// The dead letters of a subscription that a writer takes.
#[derive(Clone, Copy)]
enum DeadLetterWriteOrder {
    /// Dead letters whose delay is over.
    Due,
    /// Dead letters that an operator wants written at once, given up by this time.
    Now(PendingDeadLetterFilter, Timestamp),
}

/// The state of the dead-letter writer of one subscription.
#[derive(Default)]
struct SubscriptionDeadLetterWriter {
    writing: bool,
    failures: usize,
    /// Since when every attempt to write has failed.
    failing_since: Option<Timestamp>,
    pause: Option<DeadLetterWritePause>,
    /// Why the last attempt to write failed.
    trouble: Option<String>,
}

/// A period in which no dead letters of a subscription are written.
#[derive(Clone, Copy)]
struct DeadLetterWritePause {
    begins: Timestamp,
    ends: Timestamp,
}

impl DeadLetterWritePause {
    /// A clock set back to before the pause began ends the pause: nothing bounds how long it would
    /// last.
    fn holds_at(&self, now: Timestamp) -> bool {
        self.begins <= now && now < self.ends
    }
}

type SubscriptionDeadLetterWriters = FxHashMap<SubscriptionId, SubscriptionDeadLetterWriter>;

/// Dead letters: where they are written, and the writers' state.
pub struct DeadLetterService {
    pub blobs: Arc<dyn BlobStore>,
    pub archive: Arc<dyn Archive>,
    /// The destination for subscriptions that name none.
    pub fallback: Option<DeadLetterDestination>,
    /// Blobs that were never announced because the log refused the event.
    pub announcements_given_up: AtomicU64,
    writers: Mutex<SubscriptionDeadLetterWriters>,
    /// Notified when a writer has ended.
    writer_ended: Notify,
    busy: AtomicUsize,
    drafts: DraftMemoryBudget,
    /// Held while marks are read and written back: a replay and a purge may change the same blob.
    pub(crate) marking: tokio::sync::Mutex<()>,
}

impl DeadLetterService {
    /// Returns once everything that other nodes have written and replayed before the call can be
    /// read here.
    pub async fn catch_up(&self) -> Result<(), Error> {
        Ok(self.archive.catch_up().await?)
    }

    pub fn new(
        blobs: Arc<dyn BlobStore>,
        archive: Arc<dyn Archive>,
        fallback: Option<DeadLetterDestination>,
    ) -> DeadLetterService {
        DeadLetterService {
            blobs,
            archive,
            fallback,
            announcements_given_up: AtomicU64::new(0),
            writers: Mutex::default(),
            writer_ended: Notify::new(),
            busy: AtomicUsize::new(0),
            drafts: DraftMemoryBudget::new(DRAFT_BYTES_MAX),
            marking: tokio::sync::Mutex::default(),
        }
    }

    fn desks(&self) -> MutexGuard<'_, SubscriptionDeadLetterWriters> {
        self.writers.lock().expect("no panic holds it")
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Acquire) > 0
    }

    /// Since when dead letters of a subscription cannot be written; called right after a failed
    /// attempt. Time in which no attempt was made, because the machine slept or its clock was set
    /// forward, does not count.
    fn failing_since(&self, of: SubscriptionId, now: Timestamp) -> Timestamp {
        let mut desks = self.desks();
        let desk = desks.entry(of).or_default();
        let since = desk.failing_since.map_or(now, |since| {
            let expected = desk.pause.map_or(now, |pause| pause.ends) + TRY_LASTS_MAX;
            since + now.since(expected)
        });
        *desk.failing_since.insert(since.min(now))
    }

    /// Restores the failure state from an earlier process.
    fn remember(&self, of: SubscriptionId, trouble: EndpointProbationDelay) {
        let desk = SubscriptionDeadLetterWriter {
            failing_since: Some(trouble.since),
            pause: Some(DeadLetterWritePause {
                begins: trouble.until - trouble.step,
                ends: trouble.until,
            }),
            ..SubscriptionDeadLetterWriter::default()
        };
        self.desks().insert(of, desk);
    }

    /// Why the last attempt to write dead letters of a subscription failed.
    pub fn trouble(&self, of: SubscriptionId) -> Option<String> {
        self.desks().get(&of)?.trouble.clone()
    }
}

/// Begins the names under which the catalogue keeps, beside the delays of endpoints, since when dead letters cannot be
/// written.
const WRITE_DELAY: &str = "dead letters of ";

fn write_delay_name(of: SubscriptionId) -> String {
    format!("{WRITE_DELAY}{of}")
}

/// The subscription whose dead letters cannot be written, if that is what a delay in the catalogue is about.
pub fn write_delay_of(name: &str) -> Option<SubscriptionId> {
    name.strip_prefix(WRITE_DELAY)?.parse().ok().map(SubscriptionId)
}

/// The memory budget for blobs being drafted or written. First come, first served.
struct DraftMemoryBudget {
    free: Arc<Semaphore>,
}

/// A share of the budget, given back when it is dropped.
struct DraftMemoryPermit {
    permit: OwnedSemaphorePermit,
}

impl DraftMemoryBudget {
    /// The budget is given out in units of this many bytes.
    const UNIT: usize = 1024;

    fn new(bytes: usize) -> DraftMemoryBudget {
        DraftMemoryBudget {
            free: Arc::new(Semaphore::new(bytes / DraftMemoryBudget::UNIT)),
        }
    }

    /// Waits for enough memory to read the dead letters of one blob.
    async fn take(&self) -> DraftMemoryPermit {
        let units = (DRAFT_BYTES_READ / DraftMemoryBudget::UNIT) as u32;
        let permit = self.free.clone().acquire_many_owned(units).await;
        DraftMemoryPermit {
            permit: permit.expect("never closed"),
        }
    }
}

impl DraftMemoryPermit {
    /// Reduces the share to these bytes and gives the rest back.
    fn keep(&mut self, bytes: usize) {
        let units = bytes.div_ceil(DraftMemoryBudget::UNIT);
        let more = self.permit.num_permits().saturating_sub(units);
        drop(self.permit.split(more));
    }
}

/// The memory that dead letters take: the publish requests that they belong to, each counted once,
/// and the blob's body.
fn draft_bytes(letters: &[PendingDeadLetter], body: usize) -> usize {
    let mut requests: Vec<(Position, usize)> = letters
        .iter()
        .map(|letter| (letter.entry.first, letter.entry.batch.body.len()))
        .collect();
    requests.sort_unstable();
    requests.dedup();
    requests.iter().map(|(_, bytes)| bytes).sum::<usize>() + body
}

/// Dead letters for one blob that is not written yet, with its name.
struct BlobDraft {
    permit: DraftMemoryPermit,
    plan: Arc<DeliveryPlan>,
    place: DeadLetterDestination,
    letters: Vec<PendingDeadLetter>,
    record: BlobRecord,
}

/// A blob that is stored but not recorded yet.
struct UnrecordedBlob {
    of: SubscriptionId,
    letters: Vec<DeadLetterKey>,
    /// The causes for which events were given up, with their counts.
    causes: Vec<(FailureCause, usize)>,
    /// The same dead letters by the recorder's places; empty without a recorder.
    places: Vec<EventPlace>,
    record: BlobRecord,
    news: PendingBlobAnnouncement,
}

/// The announcement of a new blob to the topics that have not received it yet.
struct PendingBlobAnnouncement {
    /// System topics of the storage account that have not received the announcement.
    unannounced: VecDeque<TopicId>,
    container: String,
    path: String,
    length: usize,
    stored: WrittenBlobVersion,
}

impl Engine {
    /// Restores the writers' failure states. Runs before the restored delays are discarded.
    pub(crate) fn restore_letter_writers(&self) {
        for waiting in self.log.pending_dead_letters() {
            if let Some(trouble) = self
                .dispatcher
                .delays
                .take_restored(&write_delay_name(waiting.of))
            {
                self.dead_letters.remember(waiting.of, trouble);
            }
        }
    }

    /// Starts writers for all dead letters that are due by `now`.
    pub(crate) fn start_due_letter_writers(self: &Arc<Self>, now: Timestamp) {
        if self.dispatcher.stop.is_cancelled() {
            return;
        }
        let all = self.log.pending_dead_letters();
        // A subscription without pending dead letters needs no writer state.
        let waits = |of: &SubscriptionId| all.binary_search_by_key(of, |one| one.of).is_ok();
        self.dead_letters.desks().retain(|of, desk| {
            desk.writing || desk.pause.is_some_and(|pause| pause.holds_at(now)) || waits(of)
        });
        for waiting in all {
            if !self.become_due_letter_writer(&waiting, now) {
                continue;
            }
            let writing = self.clone().write_letters(waiting.of, DeadLetterWriteOrder::Due);
            self.dispatcher.tasks.spawn(TaskKind::DeadLetterWriter, writing);
        }
    }

    /// Writes dead letters at once instead of after their delay. Returns how many are in blobs.
    /// Runs to completion even if the caller goes away.
    pub async fn write_pending(self: &Arc<Self>, filter: PendingDeadLetterFilter) -> Result<u64, String> {
        let writing = self.clone().write_pending_of_all(filter);
        let task = self.dispatcher.tasks.spawn(TaskKind::DeadLetterWriter, writing);
        joined(task.await)
    }

    async fn write_pending_of_all(self: Arc<Self>, filter: PendingDeadLetterFilter) -> Result<u64, String> {
        let now = self.clock.now();
        let mut written = 0;
        for waiting in self.pending_subscriptions(&filter) {
            let of = waiting.of;
            let Some(plan) = self.dispatcher.outlet(of).and_then(|outlet| outlet.plan()) else {
                continue;
            };
            if self.letter_destination(&plan).is_none() {
                let name = &plan.subscription.name;
                return Err(format!(
                    "subscription {name:?} names no place for dead letters; {written} were written"
                ));
            }
            if !self.wait_to_become_letter_writer(of).await {
                return Err("the server is shutting down".to_owned());
            }
            let (count, outcome) = self
                .clone()
                .write_letters(of, DeadLetterWriteOrder::Now(filter, now))
                .await;
            written += count as u64;
            outcome.map_err(|trouble| {
                let name = &plan.subscription.name;
                format!("dead letters of subscription {name:?} cannot be written: {trouble}; {written} were written")
            })?;
        }
        Ok(written)
    }

    /// Waits until nobody writes dead letters of a subscription and makes the caller its writer.
    /// False when the server is shutting down.
    async fn wait_to_become_letter_writer(&self, of: SubscriptionId) -> bool {
        loop {
            let writer_ended = self.dead_letters.writer_ended.notified();
            tokio::pin!(writer_ended);
            writer_ended.as_mut().enable();
            if self.dispatcher.stop.is_cancelled() {
                return false;
            }
            if self.become_letter_writer(of) {
                return true;
            }
            tokio::select! {
                biased;
                () = self.dispatcher.stop.cancelled() => {}
                () = writer_ended => {}
            }
        }
    }

    /// Takes dead letters out of the log whose events turned out to be delivered, unless they are
    /// already written. Returns those that were found. Waits for a blob that is being written.
    pub(crate) async fn withdraw_letters(
        &self,
        of: SubscriptionId,
        letters: Vec<DeadLetterKey>,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        if !self.wait_to_become_letter_writer(of).await {
            return Ok(Vec::new());
        }
        let withdrawn = self.withdraw_unwritten(of, letters).await;
        self.dead_letters.desks().entry(of).or_default().writing = false;
        // The writer may have come due during the withdrawal.
        self.dispatcher.letters_changed.notify_one();
        self.dead_letters.writer_ended.notify_waiters();
        self.dead_letters.busy.fetch_sub(1, AcqRel);
        withdrawn
    }

    async fn withdraw_unwritten(
        &self,
        of: SubscriptionId,
        letters: Vec<DeadLetterKey>,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        const ONE: ClaimLimits = ClaimLimits {
            events_max: 1,
            bytes_max: BLOB_BYTES_MAX,
            overhead: 0,
        };
        // Settled events are listed among the dead letters only after a flush.
        self.log.flush().await?;
        let mut found = Vec::new();
        for key in letters {
            let first = self.log.letters(of, before(key), key.0, ONE).await?;
            found.extend(first.into_iter().filter(|letter| letter.key() == key));
        }
        if !found.is_empty() {
            let keys = found.iter().map(PendingDeadLetter::key).collect();
            self.log.dead_letters_done(of, keys).await?;
        }
        Ok(found)
    }

    fn pending_subscriptions(
        &self,
        filter: &PendingDeadLetterFilter,
    ) -> impl Iterator<Item = PendingDeadLetters> {
        let meant = filter.subscription;
        let waiting = self.log.pending_dead_letters().into_iter();
        waiting.filter(move |one| meant.is_none_or(|of| of == one.of))
    }

    /// Counts the dead letters that are pending on this node.
    pub async fn pending_letters(
        &self,
        filter: &PendingDeadLetterFilter,
    ) -> Result<PendingDeadLetterSummary, Error> {
        let mut pending = PendingDeadLetterSummary::default();
        for waiting in self.pending_subscriptions(filter) {
            let (count, oldest) = match filter.takes_all() {
                true => (waiting.count, Some(waiting.oldest)),
                false => self.count_pending(waiting.of, filter).await?,
            };
            let Some(oldest) = oldest else {
                continue;
            };
            pending.count += count;
            let due = self.letter_due(waiting.of, oldest);
            pending.due = pending.due.into_iter().chain(due).min();
        }
        Ok(pending)
    }

    /// The number of one subscription's dead letters that a filter selects, and when the first of
    /// them was given up.
    async fn count_pending(
        &self,
        of: SubscriptionId,
        filter: &PendingDeadLetterFilter,
    ) -> Result<(u64, Option<Timestamp>), Error> {
        let want = ClaimLimits {
            events_max: LETTERS_PER_BLOB_MAX,
            bytes_max: BLOB_BYTES_MAX,
            overhead: 0,
        };
        let until = filter.letter.map_or(Timestamp::MAX, |(decided, _)| decided);
        let (mut count, mut oldest, mut after) = (0, None, filter.after());
        loop {
            let letters = self.log.letters(of, after, until, want).await?;
            let Some(last) = letters.last() else {
                return Ok((count, oldest));
            };
            after = Some(last.key());
            for letter in letters.iter().filter(|letter| filter.takes(letter)) {
                count += 1;
                oldest = oldest.or(Some(letter.decided));
            }
        }
    }

    /// When a dead letter is due to be written whose delay began at this time; later while the
    /// store is out of reach.
    pub fn letter_due(&self, of: SubscriptionId, begun: Timestamp) -> Option<Timestamp> {
        let plan = self.dispatcher.outlet(of)?.plan()?;
        let due = begun + plan.profile.dead_letter.delay;
        let desks = self.dead_letters.desks();
        let failing = desks.get(&of).filter(|desk| desk.failing_since.is_some());
        let again = failing.and_then(|desk| desk.pause).map(|pause| pause.ends);
        Some(again.map_or(due, |again| again.max(due)))
    }

    /// Makes the caller the writer of a subscription if there is none. Returns whether it did.
    fn become_letter_writer(&self, of: SubscriptionId) -> bool {
        let mut desks = self.dead_letters.desks();
        let desk = desks.entry(of).or_default();
        let take = !std::mem::replace(&mut desk.writing, true);
        if take {
            self.dead_letters.busy.fetch_add(1, AcqRel);
        }
        take
    }

    /// The dead-letter destination of a subscription, if there is one.
    fn letter_destination<'a>(&'a self, plan: &'a DeliveryPlan) -> Option<&'a DeadLetterDestination> {
        let named = plan.subscription.dead_letter.as_ref();
        named.or(self.dead_letters.fallback.as_ref())
    }

    /// Makes the caller the writer of a subscription if dead letters are due by `now` and there is
    /// no writer. Returns whether it did.
    fn become_due_letter_writer(&self, waiting: &PendingDeadLetters, now: Timestamp) -> bool {
        let mut desks = self.dead_letters.desks();
        let take = self
            .letters_due(&desks, waiting, now)
            .is_some_and(|due| due <= now);
        if take {
            desks.entry(waiting.of).or_default().writing = true;
            self.dead_letters.busy.fetch_add(1, AcqRel);
        }
        take
    }

    /// When dead letters are next due after `now`.
    pub(crate) fn next_letters_due(&self, now: Timestamp) -> Option<Timestamp> {
        let waiting = self.log.pending_dead_letters();
        let desks = self.dead_letters.desks();
        let due = waiting
            .iter()
            .filter_map(|one| self.letters_due(&desks, one, now));
        due.filter(|due| *due > now).min()
    }

    /// When the oldest dead letter of a subscription is due. None while a writer runs, or while the
    /// subscription is unknown: it is about to be removed with its dead letters.
    fn letters_due(
        &self,
        desks: &SubscriptionDeadLetterWriters,
        waiting: &PendingDeadLetters,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let desk = desks.get(&waiting.of);
        if desk.is_some_and(|desk| desk.writing) {
            return None;
        }
        let plan = self.dispatcher.outlet(waiting.of)?.plan()?;
        let due = waiting.oldest + plan.profile.dead_letter.delay;
        let pause = desk
            .and_then(|desk| desk.pause)
            .filter(|pause| pause.holds_at(now));
        Some(pause.map_or(due, |pause| pause.ends.max(due)))
    }

    /// Runs the loop that writes dead letters as they come due.
    pub(crate) async fn run_letter_writers(self: Arc<Self>) {
        loop {
            let now = self.clock.now();
            self.start_due_letter_writers(now);
            let next = self.next_letters_due(now);
            tokio::select! {
                biased;
                () = self.dispatcher.stop.cancelled() => return,
                () = self.dispatcher.letters_changed.notified() => {}
                () = self.clock.sleep_until(next.unwrap_or(Timestamp::MAX)), if next.is_some() => {}
            }
        }
    }

    /// Writes as many dead letters of a subscription as possible. Returns their number, and why the
    /// others are not written. The caller has become the writer, and counts as busy until this
    /// ends.
    async fn write_letters(
        self: Arc<Self>,
        of: SubscriptionId,
        order: DeadLetterWriteOrder,
    ) -> (usize, Result<(), String>) {
        let mut count = 0;
        let written = tokio::select! {
            biased;
            () = self.dispatcher.abort.cancelled() => Err("the server is shutting down".to_owned()),
            written = self.write_some(of, order, &mut count) => written,
        };
        // A write cut short by a shutdown says nothing about the store: the next process tries at
        // once.
        if written.is_err() && self.dispatcher.stop.is_cancelled() {
            self.dead_letters.desks().entry(of).or_default().writing = false;
        } else {
            self.note_written(of, &written).await;
            self.dispatcher.letters_changed.notify_one();
        }
        self.dead_letters.writer_ended.notify_waiters();
        self.dead_letters.busy.fetch_sub(1, AcqRel);
        (count, written)
    }

    /// Decides when dead letters of a subscription are written next, and drops those whose time is
    /// up.
    async fn note_written(&self, of: SubscriptionId, written: &Result<(), String>) {
        let now = self.clock.now();
        let retry = match written {
            Ok(()) => None,
            Err(trouble) => {
                let since = self.dead_letters.failing_since(of, now);
                let give_up_at = self.give_up_late(of, now, since, trouble).await;
                Some((trouble.clone(), give_up_at))
            }
        };
        {
            let mut desks = self.dead_letters.desks();
            match retry {
                // Dead letters that come due within the gathering time share the next blob.
                None => {
                    let plan = self.dispatcher.outlet(of).and_then(|outlet| outlet.plan());
                    let delay = plan.map_or(Duration::ZERO, |plan| plan.profile.dead_letter.delay);
                    let gather = delay / GATHER_PART;
                    let desk = SubscriptionDeadLetterWriter {
                        pause: Some(DeadLetterWritePause {
                            begins: now,
                            ends: now + gather,
                        }),
                        ..SubscriptionDeadLetterWriter::default()
                    };
                    let before = desks.insert(of, desk);
                    if before.is_some_and(|desk| desk.failing_since.is_some()) {
                        self.dispatcher.delays.note(&write_delay_name(of), None);
                    }
                }
                Some((trouble, give_up_at)) => {
                    let desk = desks.entry(of).or_default();
                    let wait = TRY_AGAIN[desk.failures.min(TRY_AGAIN.len() - 1)];
                    desk.failures += 1;
                    desk.writing = false;
                    let again = now + wait;
                    let until = give_up_at.map_or(again, |at| at.min(again).max(now));
                    desk.pause = Some(DeadLetterWritePause {
                        begins: now,
                        ends: until,
                    });
                    if let Some(since) = desk.failing_since {
                        let delay = EndpointProbationDelay {
                            cause: Outcome::SocketError,
                            status: None,
                            since,
                            until,
                            step: wait,
                        };
                        self.dispatcher.delays.note(&write_delay_name(of), Some(delay));
                    }
                    tracing::warn!(subscription = %of, reason = %trouble, again = ?wait, "dead letters cannot be written");
                    desk.trouble = Some(trouble);
                }
            }
        }
    }

    /// `count` receives the number of dead letters that are in blobs, also when this fails.
    async fn write_some(
        self: &Arc<Self>,
        of: SubscriptionId,
        order: DeadLetterWriteOrder,
        count: &mut usize,
    ) -> Result<(), String> {
        let mut writing: JoinSet<Result<UnrecordedBlob, String>> = JoinSet::new();
        let mut recording: JoinSet<Result<usize, String>> = JoinSet::new();
        let mut after = None;
        let mut more = true;
        let mut outcome = Ok(());
        loop {
            // Writes that have begun are completed even after a failure or a stop.
            more &= outcome.is_ok() && !self.dispatcher.stop.is_cancelled();
            let room = writing.len() < BLOBS_IN_FLIGHT_MAX && recording.len() < BLOBS_RECORDED_MAX;
            tokio::select! {
                biased;
                Some(ended) = writing.join_next() => match joined(ended) {
                    Ok(written) => {
                        recording.spawn(self.clone().record_blob(written));
                    }
                    Err(trouble) => outcome = outcome.and(Err(trouble)),
                },
                Some(ended) = recording.join_next() => match joined(ended) {
                    Ok(recorded) => *count += recorded,
                    Err(trouble) => outcome = outcome.and(Err(trouble)),
                },
                permit = self.draft_permit(), if more && room => match self.draft(of, order, &mut after, permit).await {
                    Ok(Some(draft)) => {
                        writing.spawn(self.clone().write_blob(draft));
                    }
                    Ok(None) => more = false,
                    Err(trouble) => outcome = Err(trouble),
                },
                else => return outcome,
            }
        }
    }

    /// Waits for memory for another blob; none when the server is stopping.
    async fn draft_permit(&self) -> Option<DraftMemoryPermit> {
        tokio::select! {
            biased;
            () = self.dispatcher.stop.cancelled() => None,
            permit = self.dead_letters.drafts.take() => Some(permit),
        }
    }

    /// The next blob to write; none when no dead letters are left. `after` is the last dead letter
    /// that was looked at.
    async fn draft(
        &self,
        of: SubscriptionId,
        order: DeadLetterWriteOrder,
        after: &mut Option<DeadLetterKey>,
        permit: Option<DraftMemoryPermit>,
    ) -> Result<Option<BlobDraft>, String> {
        let Some(mut permit) = permit else {
            return Ok(None);
        };
        let Some(plan) = self.dispatcher.outlet(of).and_then(|outlet| outlet.plan()) else {
            return Ok(None);
        };
        let now = self.clock.now();
        let want = ClaimLimits {
            events_max: LETTERS_PER_BLOB_MAX,
            bytes_max: BLOB_BYTES_MAX,
            overhead: plan.want.overhead + DIAGNOSTICS_BYTES,
        };
        let letters = self.next_letters_to_write(of, order, after, &plan, want).await;
        let letters = letters.map_err(|e| e.to_string())?;
        if letters.is_empty() {
            return Ok(None);
        }
        let Some(place) = self.letter_destination(&plan) else {
            let reason = GiveUpReason::DeadLetterWithoutDestination;
            self.drop_letters(
                &plan,
                &letters,
                reason,
                "the subscription names no place for them",
            )
            .await?;
            return Ok(None);
        };
        let alone = self.node.name.is_none();
        let keys = letters.iter().map(PendingDeadLetter::key);
        let guid = blob_guid(of, keys, self.log.identity(), alone);
        let path = blob_path(&plan.subscription.name, &guid, now);
        let record = BlobRecord {
            id: BlobId(0),
            subscription: of,
            subscription_name: plan.subscription.name.clone(),
            topic_name: plan.topic.topic.name.clone(),
            account: place.account_name().to_owned(),
            container: place.container.clone(),
            path,
            written: now,
            bytes: 0,
            sha256: None,
            marks: letters.iter().map(mark).collect(),
        };
        permit.keep(draft_bytes(&letters, body_size(&plan, &letters)));
        Ok(Some(BlobDraft {
            permit,
            place: place.clone(),
            letters,
            record,
            plan,
        }))
    }

    async fn next_letters_to_write(
        &self,
        of: SubscriptionId,
        order: DeadLetterWriteOrder,
        after: &mut Option<DeadLetterKey>,
        plan: &DeliveryPlan,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, postrider_store::Error> {
        let (until, filter) = match order {
            DeadLetterWriteOrder::Due => {
                let until = self.clock.now() - plan.profile.dead_letter.delay;
                (until, PendingDeadLetterFilter::default())
            }
            DeadLetterWriteOrder::Now(filter, until) => (until, filter),
        };
        loop {
            let from = (*after).max(filter.after());
            let mut letters = self.log.letters(of, from, until, want).await?;
            let Some(last) = letters.last() else {
                return Ok(letters);
            };
            *after = Some(last.key());
            letters.retain(|letter| filter.takes(letter));
            if !letters.is_empty() {
                return Ok(letters);
            }
        }
    }

    /// The order makes a crash harmless: the blob is written here; `record_blob` then records its
    /// location, announces it, and removes the dead letters from the log. A crash in between writes
    /// them again and loses none.
    async fn write_blob(self: Arc<Self>, draft: BlobDraft) -> Result<UnrecordedBlob, String> {
        let BlobDraft {
            mut permit,
            plan,
            place,
            letters,
            mut record,
        } = draft;
        // Rendered here, not where the dead letters are read, so that blobs are rendered in
        // parallel.
        let body = Bytes::from(write_body(&plan, &letters, self.log.identity()));
        let (length, path) = (body.len(), record.path.clone());
        record.bytes = length as u64;
        record.sha256 = Some(sha256(&body));
        let untold = match letters.iter().all(|letter| self.is_announcement(letter)) {
            true => Vec::new(),
            false => self.directory.storage_topics(place.account_name()),
        };
        let keys = letters.iter().map(PendingDeadLetter::key).collect();
        let causes = letters_by_cause(&letters);
        let places = self.places(&letters);
        // The body now holds the events: drop the originals before the write.
        drop(letters);
        permit.keep(length);
        let put = self
            .dead_letters
            .blobs
            .put(place.account_name(), &place.container, &path, body);
        let stored = put.await.map_err(|e: BlobError| e.to_string())?;
        drop(permit);
        Ok(UnrecordedBlob {
            of: plan.subscription.id,
            letters: keys,
            causes,
            places,
            record,
            news: PendingBlobAnnouncement {
                unannounced: untold.iter().map(|topic| topic.topic.id).collect(),
                container: place.container,
                path,
                length,
                stored,
            },
        })
    }

    /// Records the blob in the archive. From then on its dead letters count as written, announced
    /// or not.
    async fn record_blob(self: Arc<Self>, written: UnrecordedBlob) -> Result<usize, String> {
        let UnrecordedBlob {
            of,
            letters,
            causes,
            places,
            record,
            mut news,
        } = written;
        let internal = |e: postrider_store::Error| e.to_string();
        let blob = (!places.is_empty()).then(|| BlobWritten {
            subscription: of,
            at: record.written,
            blob: Arc::new(blob_place(&record)),
            letters: places,
        });
        self.dead_letters.archive.add(record).await.map_err(internal)?;
        if let Some(blob) = blob {
            self.recorder.blob(blob);
        }
        let told = self.announce(&mut news).await;
        if let Err(e @ Error::Stopping) = told {
            // The next process writes the same blob again, and announces it.
            return Err(e.to_string());
        }
        let count = letters.len();
        self.log.dead_letters_done(of, letters).await.map_err(internal)?;
        // Counted here and not when they were given up: a dead letter that cannot be written counts
        // as dropped.
        self.dispatcher.count_dead_lettered(of, self.clock.now(), &causes);
        add(&self.dispatcher.counters.dead_letters_written, count);
        add(&self.dispatcher.counters.blobs_written, 1);
        if let Err(trouble) = told {
            let announcing = self.clone().retry_announcement(news, trouble);
            self.dispatcher
                .tasks
                .spawn(TaskKind::BlobAnnouncement, announcing);
        }
        Ok(count)
    }

    /// Drops the dead letters for which the store has been out of reach for too long. Returns when
    /// the next ones would be.
    async fn give_up_late(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        failing_since: Timestamp,
        trouble: &str,
    ) -> Option<Timestamp> {
        let plan = self.dispatcher.outlet(of)?.plan()?;
        let timing = plan.profile.dead_letter;
        // Dead letters may be old although no write was tried: the server was down, or its clock
        // was set forward.
        let tried_enough_at = failing_since + timing.give_up_after;
        if now < tried_enough_at {
            return Some(tried_enough_at);
        }
        let patience = timing.delay.saturating_add(timing.give_up_after);
        let want = ClaimLimits {
            events_max: LETTERS_PER_BLOB_MAX,
            bytes_max: BLOB_BYTES_MAX,
            overhead: 0,
        };
        loop {
            let _permit = self.draft_permit().await?;
            let late = self.log.letters(of, None, now - patience, want).await.ok()?;
            if late.is_empty() {
                break;
            }
            if let Err(e) = self
                .drop_letters(&plan, &late, GiveUpReason::DeadLetterUnavailable, trouble)
                .await
            {
                tracing::error!(subscription = %plan.subscription.name, error = %e, "cannot drop dead letters");
                return None;
            }
        }
        let waiting = self.log.pending_dead_letters();
        let oldest = waiting.iter().find(|one| one.of == of)?.oldest;
        Some(oldest + patience)
    }

    async fn drop_letters(
        &self,
        plan: &DeliveryPlan,
        letters: &[PendingDeadLetter],
        reason: GiveUpReason,
        trouble: &str,
    ) -> Result<(), String> {
        for named in letters.chunks(NAMED_PER_LINE) {
            let ids: Vec<String> = named.iter().map(|letter| event_id(plan, letter)).collect();
            tracing::error!(
                subscription = %plan.subscription.name,
                count = named.len(),
                %reason,
                trouble,
                ids = ids.join(", "),
                "dead letters dropped"
            );
        }
        let keys = letters.iter().map(PendingDeadLetter::key).collect();
        let done = self.log.dead_letters_done(plan.subscription.id, keys).await;
        done.map_err(|e| e.to_string())?;
        let outlet = self.dispatcher.outlet(plan.subscription.id);
        let counted = outlet.iter().map(|outlet| &outlet.counters);
        for counters in counted.chain([&self.dispatcher.counters]) {
            add(by_reason(&counters.dropped, reason), letters.len());
        }
        if let Some(outlet) = outlet {
            self.dispatcher
                .meter_dropped(&outlet, self.clock.now(), letters, reason);
        }
        if self.recorder.on() {
            self.recorder.ended(EndedDeliveries {
                subscription: plan.subscription.id,
                events: self.places(letters),
                at: self.clock.now(),
                disposition: DeliveryDisposition::Dropped(reason),
            });
        }
        Ok(())
    }

    /// The recorder's places of dead letters; empty without a recorder.
    fn places(&self, letters: &[PendingDeadLetter]) -> Vec<EventPlace> {
        let place = |letter: &PendingDeadLetter| EventPlace {
            first: letter.entry.first,
            index: letter.index,
        };
        match self.recorder.on() {
            true => letters.iter().map(place).collect(),
            false => Vec::new(),
        }
    }

    /// Whether a dead letter is itself the announcement of a dead-letter blob: announcing its blob
    /// would never end.
    fn is_announcement(&self, letter: &PendingDeadLetter) -> bool {
        let topic = self.directory.topic_by_id(letter.entry.batch.topic);
        topic.is_some_and(|topic| {
            matches!(
                topic.topic.kind,
                TopicKind::System { .. } | TopicKind::Scope { .. }
            )
        })
    }

    /// Retries an announcement until [`ANNOUNCE_FOR`] has passed.
    async fn retry_announcement(self: Arc<Self>, mut news: PendingBlobAnnouncement, mut trouble: Error) {
        let busy = &self.dead_letters.busy;
        let give_up_at = self.clock.now() + ANNOUNCE_FOR;
        for failures in 0.. {
            let again = self.clock.now() + TRY_AGAIN[failures.min(TRY_AGAIN.len() - 1)];
            if again > give_up_at {
                break;
            }
            let mut wait = self.clock.sleep_until(again);
            tokio::select! {
                biased;
                () = self.dispatcher.stop.cancelled() => break,
                () = &mut wait => {}
            }
            // Counted as busy before the wait ends: a test clock must not advance in between.
            busy.fetch_add(1, AcqRel);
            drop(wait);
            let told = self.announce(&mut news).await;
            busy.fetch_sub(1, AcqRel);
            match told {
                Ok(()) => return,
                Err(e) => trouble = e,
            }
        }
        add(&self.dead_letters.announcements_given_up, 1);
        tracing::error!(blob = %news.stored.url, %trouble, "nobody was told of a blob of dead letters");
    }

    /// Publishes `Microsoft.Storage.BlobCreated` to the storage account's system topics that have
    /// not received it.
    async fn announce(&self, news: &mut PendingBlobAnnouncement) -> Result<(), Error> {
        let now = self.clock.now();
        while let Some(&id) = news.unannounced.front() {
            let Some(topic) = self.directory.topic_by_id(id) else {
                news.unannounced.pop_front();
                continue;
            };
            let batch = announcement(&topic, news, now);
            let text = std::str::from_utf8(&batch.body)
                .expect("made of strings")
                .to_owned();
            let object = RawJson::trusted(&text);
            let mut router = self.router(&topic, now, FilterBudget::UNLIMITED);
            router.route(&EventEnvelope::read(EventSchema::EventGrid, object, None), None);
            let (matched, routed) = router.finish().expect("the budget has no limit");
            let batch = PublishedBatch { matched, ..batch };
            self.accept(&topic, batch, routed).await?;
            news.unannounced.pop_front();
        }
        Ok(())
    }
}

pub(crate) fn blob_place(record: &BlobRecord) -> DeadLetterBlobLocation {
    DeadLetterBlobLocation {
        account: record.account.clone(),
        container: record.container.clone(),
        path: record.path.clone(),
    }
}

fn joined<T>(ended: Result<Result<T, String>, tokio::task::JoinError>) -> Result<T, String> {
    ended.unwrap_or_else(|e| Err(format!("writing ended badly: {e}")))
}

fn mark(letter: &PendingDeadLetter) -> DeadLetterMark {
    DeadLetterMark {
        reason: letter.reason,
        replays: u8::try_from(letter.entry.batch.replay).unwrap_or(u8::MAX),
        purged: false,
    }
}

/// The approximate length of a blob's body with these dead letters.
fn body_size(plan: &DeliveryPlan, letters: &[PendingDeadLetter]) -> usize {
    let how = plan.rendering();
    let size = |l: &PendingDeadLetter| {
        render::delivered_len_hint(&l.entry.batch, l.index as usize, &how) + DIAGNOSTICS_BYTES
    };
    letters.iter().map(size).sum::<usize>() + 2
}

fn write_body(plan: &DeliveryPlan, letters: &[PendingDeadLetter], identity: u64) -> Vec<u8> {
    let how = plan.rendering();
    let mut body = Vec::with_capacity(body_size(plan, letters));
    let (mut published, mut attempted) = (CachedTimeText::default(), CachedTimeText::default());
    for (i, letter) in letters.iter().enumerate() {
        body.push(if i == 0 { b'[' } else { b',' });
        write_timed(&mut body, &how, letter, identity, &mut published, &mut attempted);
    }
    body.push(b']');
    body
}

/// Appends a dead letter in the format of the blob.
pub fn write_letter(out: &mut Vec<u8>, plan: &DeliveryPlan, letter: &PendingDeadLetter, identity: u64) {
    let (mut published, mut attempted) = (CachedTimeText::default(), CachedTimeText::default());
    write_timed(
        out,
        &plan.rendering(),
        letter,
        identity,
        &mut published,
        &mut attempted,
    );
}

/// A formatted time, cached for the next dead letter: events published or attempted together share
/// it.
#[derive(Default)]
struct CachedTimeText {
    of: Option<Timestamp>,
    text: String,
}

impl CachedTimeText {
    fn of(&mut self, at: Timestamp) -> &str {
        if self.of != Some(at) {
            self.of = Some(at);
            self.text = at.to_string();
        }
        &self.text
    }
}

fn write_timed(
    out: &mut Vec<u8>,
    how: &EventRendering<'_>,
    letter: &PendingDeadLetter,
    identity: u64,
    published: &mut CachedTimeText,
    attempted: &mut CachedTimeText,
) {
    // A dead letter without an attempt has waited for an endpoint on probation.
    let outcome = letter
        .last_attempt
        .map_or(Outcome::Probation, |last| last.outcome);
    let diagnostics = DeadLetterDiagnostics {
        reason: letter.reason.name(),
        attempts: letter.attempts_made,
        last_outcome: outcome.name(),
        publish_time: published.of(letter.entry.batch.received),
        last_attempt_time: letter.last_attempt.map(|last| attempted.of(last.at)),
    };
    let id = || system_id(identity, letter.position());
    let (batch, index) = (&letter.entry.batch, letter.index as usize);
    render::write_dead_letter(out, batch, index, how, id, &diagnostics);
}

/// `<SUBSCRIPTION>/<year>/<month>/<day>/<hour>/<guid>.json`, in UTC, without zero padding.
fn blob_path(subscription: &str, guid: &str, now: Timestamp) -> String {
    let c = now.civil();
    let name = subscription.to_uppercase();
    format!("{name}/{}/{}/{}/{}/{guid}.json", c.year, c.month, c.day, c.hour)
}

/// The name of a blob with these dead letters. On a single node the guid derives from the first
/// dead letter alone: what is written again after a crash mostly replaces the earlier blob and
/// holds all of its dead letters. In a cluster a node may take over only a part of another's dead
/// letters, or write late what is already written: there the guid derives from all dead letters, so
/// that no blob replaces one that holds more.
fn blob_guid(
    of: SubscriptionId,
    letters: impl Iterator<Item = DeadLetterKey>,
    identity: u64,
    alone: bool,
) -> String {
    const MIX: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut letters = letters.peekable();
    let first = letters.peek().map_or(Position(0), |(_, position)| *position);
    let mix = |all: u64, (_, position): DeadLetterKey| (all.rotate_left(23) ^ position.0).wrapping_mul(MIX);
    let all = if alone { 0 } else { letters.fold(1, mix) };
    system_id(identity ^ of.0.wrapping_mul(MIX) ^ all, first)
}

/// The publisher's id of an event; empty if it has none.
fn event_id(plan: &DeliveryPlan, letter: &PendingDeadLetter) -> String {
    let batch = &letter.entry.batch;
    let object = RawJson::trusted(batch.object(letter.index as usize));
    let envelope = EventEnvelope::read(batch.schema, object, plan.topic.topic.mapping.as_ref());
    let id = envelope.id_field().and_then(EnvelopeField::scalar_text);
    id.map_or_else(|| format!("at position {}", letter.position()), Cow::into_owned)
}

/// The `BlobCreated` event, exactly as the storage service writes it.
fn announcement(topic: &TopicEntry, news: &PendingBlobAnnouncement, now: Timestamp) -> PublishedBatch {
    let PendingBlobAnnouncement {
        container,
        path,
        length,
        stored,
        ..
    } = news;
    let quoted = |text: &str| {
        let mut out = Vec::new();
        json::write_string(text, &mut out);
        String::from_utf8(out).expect("a string is text")
    };
    let guid = path
        .rsplit('/')
        .next()
        .and_then(|name| name.strip_suffix(".json"))
        .unwrap_or(path);
    let subject = format!("/blobServices/default/containers/{container}/blobs/{path}");
    let body = format!(
        concat!(
            r#"{{"topic":{topic},"subject":{subject},"eventType":"Microsoft.Storage.BlobCreated","id":{id},"#,
            r#""data":{{"api":"PutBlob","clientRequestId":{id},"requestId":{id},"eTag":{etag},"#,
            r#""contentType":"application/json","contentLength":{length},"blobType":"BlockBlob","url":{url},"#,
            r#""sequencer":"{sequencer:048x}","storageDiagnostics":{{"batchId":{id}}}}},"#,
            r#""dataVersion":"","metadataVersion":"1","eventTime":"{now}"}}"#
        ),
        topic = quoted(&topic.full_id),
        subject = quoted(&subject),
        id = quoted(guid),
        etag = quoted(&stored.etag),
        length = length,
        url = quoted(&stored.url),
        sequencer = now.nanos(),
        now = now,
    );
    let object = ByteSpan::new(0, body.len());
    PublishedBatch {
        topic: topic.topic.id,
        schema: EventSchema::EventGrid,
        received: now,
        publisher: "dead letters".into(),
        trace: None,
        replay: 0,
        hops: 0,
        body: Bytes::from(body),
        events: vec![EventRef {
            object,
            lacks: MissingMembers::default(),
            ..EventRef::default()
        }],
        matched: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::counters::total;
    use crate::deliver::{DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport};
    use crate::virtual_time::{AdvanceTarget, SteppedClock, VirtualTime, WatchedTransport};
    use crate::{EngineParts, dispatch};
    use async_trait::async_trait;

    use postrider_core::ids::Secret;
    use postrider_core::profile::Profiles;
    use postrider_core::subscription::{Destination, Subscription, Topic, WebHook};
    use postrider_store::memory::{MemoryArchive, MemoryCatalog, MemoryLog};
    use postrider_store::{Catalog, CatalogChange, EventLog};
    use std::sync::atomic::Ordering::Relaxed;

    const ORDERS: TopicId = TopicId(1);
    const STORAGE: TopicId = TopicId(2);
    const REFUSED: &str = "http://refusing.invalid/";
    const SETTLE: Duration = Duration::from_secs(60);

    // Regression: one large event that 10 000 subscriptions gave up was read and written by 10 000
    // writers at once.
    #[tokio::test]
    async fn blobs_of_all_subscriptions_share_room_in_memory() {
        use std::future::poll_fn;
        use std::task::Poll;

        let room = DraftMemoryBudget::new(2 * DRAFT_BYTES_READ);
        let mut first = room.take().await;
        let mut second = room.take().await;
        let mut third = std::pin::pin!(room.take());
        let mut is_ready = async || poll_fn(|cx| Poll::Ready(third.as_mut().poll(cx).is_ready())).await;
        assert!(!is_ready().await);
        // Once the dead letters are read, the memory that they need is known.
        first.keep(DRAFT_BYTES_READ / 2);
        assert!(!is_ready().await);
        second.keep(DRAFT_BYTES_READ);
        drop(first);
        assert!(is_ready().await);
        drop(second);
    }

    #[test]
    fn one_before_another() {
        let at = Timestamp::from_nanos;
        assert_eq!(before((at(5), Position(3))), Some((at(5), Position(2))));
        assert_eq!(before((at(5), Position(0))), Some((at(4), Position(u64::MAX))));
        assert_eq!(before((at(0), Position(0))), None);
    }

    // Regression: a node removed one half of a blob's dead letters and died; the other half then
    // overwrote all of them.
    #[test]
    fn of_several_nodes_no_blob_takes_the_place_of_one_with_other_letters() {
        let guid = |positions: &[u64], alone| {
            let letters = positions.iter().map(|n| (Timestamp::from_secs(1), Position(*n)));
            blob_guid(SubscriptionId(7), letters, 3, alone)
        };
        assert_eq!(guid(&[1, 2, 3], true), guid(&[1, 3], true));
        assert_eq!(guid(&[1, 2, 3], false), guid(&[1, 2, 3], false));
        for other in [&[1, 3][..], &[1, 2], &[1, 2, 3, 4], &[1, 3, 2], &[1]] {
            assert_ne!(guid(&[1, 2, 3], false), guid(other, false), "{other:?}");
        }
    }

    /// A blob store that refuses one container and accepts all others.
    struct OneContainerRefused;

    #[async_trait]
    impl DeliveryTransport for OneContainerRefused {
        async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
            DeliveryReply::Answered(DeliveryAnswer {
                status: if *request.url == REFUSED { 400 } else { 200 },
                ..DeliveryAnswer::default()
            })
        }
    }

    /// A blob store that accepts every blob and keeps none.
    struct DiscardingBlobStore;

    #[async_trait]
    impl BlobStore for DiscardingBlobStore {
        fn accounts(&self) -> Vec<String> {
            vec!["shelf".to_owned()]
        }

        fn check_name(&self, _: &str, _: &str) -> Result<(), String> {
            Ok(())
        }

        async fn probe(&self, _: &str, _: &str) -> Result<(), BlobError> {
            Ok(())
        }

        async fn put(&self, _: &str, _: &str, path: &str, _: Bytes) -> Result<WrittenBlobVersion, BlobError> {
            Ok(WrittenBlobVersion {
                etag: "0x1".to_owned(),
                url: format!("memory:///{path}"),
            })
        }

        async fn get(&self, _: &str, _: &str, path: &str) -> Result<Bytes, BlobError> {
            Err(BlobError::NotFound(path.to_owned()))
        }

        async fn delete(&self, _: &str, _: &str, _: &str) -> Result<(), BlobError> {
            Ok(())
        }
    }

    fn topic(id: TopicId, name: &str, kind: TopicKind) -> Topic {
        Topic {
            kind,
            resource_group: "group".into(),
            location: "here".into(),
            ..Topic::custom(id, name, [Secret::new("a"), Secret::new("b")])
        }
    }

    fn subscription(id: u64, topic: TopicId, url: &str, container: Option<&str>) -> Subscription {
        Subscription {
            dead_letter: container.map(|container| DeadLetterDestination {
                account: "shelf".into(),
                container: container.into(),
            }),
            ..Subscription::new(
                SubscriptionId(id),
                topic,
                format!("subscription-{id}"),
                Destination::WebHook(WebHook::new(url)),
            )
        }
    }

    /// A server whose only event is a dead letter about to be written while its log is full.
    async fn with_a_letter_and_a_full_log() -> (Arc<Engine>, VirtualTime, Arc<MemoryLog>) {
        let storage = TopicKind::System {
            source: "/subscriptions/s/providers/Microsoft.Storage/storageAccounts/shelf".into(),
            topic_type: "Microsoft.Storage.StorageAccounts".into(),
        };
        let changes = vec![
            CatalogChange::PutTopic(topic(ORDERS, "orders", TopicKind::Custom)),
            CatalogChange::PutTopic(topic(STORAGE, "storage", storage)),
            CatalogChange::PutSubscription(subscription(3, ORDERS, REFUSED, Some("letters"))),
            CatalogChange::PutSubscription(subscription(4, STORAGE, "http://taking.invalid/", None)),
        ];
        let (engine, time, log) = started(changes, Arc::new(DiscardingBlobStore)).await;
        let body = r#"{"id":"1","topic":"/t","dataVersion":"","metadataVersion":"1"}"#;
        accept(&engine, body.to_owned(), Box::new([SubscriptionId(3)])).await;
        time.advance(AdvanceTarget::By(Duration::ZERO), SETTLE)
            .await
            .unwrap();
        assert_eq!(log.pending_dead_letters().len(), 1);
        log.refuse_appends(Some("full"));
        (engine, time, log)
    }

    /// A server with these resources.
    async fn started(
        changes: Vec<CatalogChange>,
        blobs: Arc<dyn BlobStore>,
    ) -> (Arc<Engine>, VirtualTime, Arc<MemoryLog>) {
        let catalog = MemoryCatalog::default();
        catalog.commit(changes).await.unwrap();
        let wall = Arc::new(SystemClock);
        let clock = Arc::new(SteppedClock::new(
            Timestamp::from_secs(1_000_000),
            Box::new(|_| {}),
        ));
        let transport = Arc::new(WatchedTransport::new(Arc::new(OneContainerRefused), wall.clone()));
        let log = Arc::new(MemoryLog::new(7));
        let engine = Engine::start(EngineParts {
            log: log.clone(),
            catalog: Arc::new(catalog),
            transport: transport.clone(),
            clock: clock.clone(),
            wall: wall.clone(),
            profiles: Profiles::default(),
            id_prefix: "/subscriptions/s".into(),
            dispatch: dispatch::Config::default(),
            dead_letters: DeadLetterService::new(blobs, Arc::new(MemoryArchive::default()), None),
            handshake: crate::handshake::HandshakeRules::default(),
            recorder: Arc::new(crate::recorder::NoRecorder),
            node: crate::node::NodeIdentity::alone(),
        })
        .await
        .unwrap();
        let time = VirtualTime::new(clock, transport, wall, engine.clone());
        (engine, time, log)
    }

    /// Publishes an event that these subscriptions matched.
    async fn accept(engine: &Engine, body: String, matched: Box<[SubscriptionId]>) {
        let batch = PublishedBatch {
            topic: ORDERS,
            schema: EventSchema::EventGrid,
            received: engine.clock.now(),
            publisher: "test".into(),
            trace: None,
            replay: 0,
            hops: 0,
            events: vec![EventRef {
                object: ByteSpan::new(0, body.len()),
                ..EventRef::default()
            }],
            body: Bytes::from(body),
            matched: vec![matched],
        };
        let orders = engine.directory.topic_by_id(ORDERS).unwrap();
        engine.accept(&orders, batch, Default::default()).await.unwrap();
    }

    /// A slow blob store that measures how many bytes it is given at once.
    #[derive(Default)]
    struct SlowBlobStore {
        bytes: AtomicUsize,
        bytes_max: AtomicUsize,
    }

    #[async_trait]
    impl BlobStore for SlowBlobStore {
        fn accounts(&self) -> Vec<String> {
            DiscardingBlobStore.accounts()
        }

        fn check_name(&self, _: &str, _: &str) -> Result<(), String> {
            Ok(())
        }

        async fn probe(&self, _: &str, _: &str) -> Result<(), BlobError> {
            Ok(())
        }

        async fn put(
            &self,
            account: &str,
            of: &str,
            path: &str,
            body: Bytes,
        ) -> Result<WrittenBlobVersion, BlobError> {
            let bytes = self.bytes.fetch_add(body.len(), AcqRel) + body.len();
            self.bytes_max.fetch_max(bytes, AcqRel);
            // Long enough for every other writer to start.
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            self.bytes.fetch_sub(body.len(), AcqRel);
            DiscardingBlobStore.put(account, of, path, body).await
        }

        async fn get(&self, account: &str, of: &str, path: &str) -> Result<Bytes, BlobError> {
            DiscardingBlobStore.get(account, of, path).await
        }

        async fn delete(&self, _: &str, _: &str, _: &str) -> Result<(), BlobError> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_large_event_that_many_subscriptions_gave_up_is_not_written_by_all_at_once() {
        const SUBSCRIPTIONS: u64 = 100;
        let mut changes = vec![CatalogChange::PutTopic(topic(
            ORDERS,
            "orders",
            TopicKind::Custom,
        ))];
        changes
            .extend((3..3 + SUBSCRIPTIONS).map(|id| {
                CatalogChange::PutSubscription(subscription(id, ORDERS, REFUSED, Some("letters")))
            }));
        let blobs = Arc::new(SlowBlobStore::default());
        let (engine, time, log) = started(changes, blobs.clone()).await;
        let large = "x".repeat(1_000_000);
        let body =
            format!(r#"{{"id":"1","topic":"/t","dataVersion":"","metadataVersion":"1","data":"{large}"}}"#);
        let all = (3..3 + SUBSCRIPTIONS).map(SubscriptionId).collect();
        accept(&engine, body, all).await;
        time.advance(AdvanceTarget::By(Duration::from_secs(400)), SETTLE)
            .await
            .unwrap();
        assert_eq!(log.pending_dead_letters(), []);
        let counters = &engine.dispatcher.counters;
        assert_eq!(counters.dead_letters_written.load(Relaxed), SUBSCRIPTIONS);
        let bytes_max = blobs.bytes_max.load(Acquire);
        assert!((2_000_000..=DRAFT_BYTES_MAX).contains(&bytes_max), "{bytes_max}");
    }

    /// Checks that the dead letter is in its blob and nowhere else.
    async fn check_written(engine: &Engine, log: &MemoryLog) {
        let counters = &engine.dispatcher.counters;
        assert_eq!(counters.dead_letters_written.load(Relaxed), 1);
        assert_eq!(total(&counters.dropped), 0);
        assert_eq!(log.pending_dead_letters(), []);
        let archived = engine.dead_letters.archive.last().await.unwrap();
        assert_eq!(archived, Some(BlobId(1)), "once");
    }

    #[tokio::test]
    async fn a_blob_is_told_of_once_the_log_takes_it() {
        let (engine, time, log) = with_a_letter_and_a_full_log().await;
        let counters = &engine.dispatcher.counters;
        time.advance(AdvanceTarget::By(Duration::from_secs(400)), SETTLE)
            .await
            .unwrap();
        check_written(&engine, &log).await;
        assert_eq!(counters.delivered.load(Relaxed), 0);

        log.refuse_appends(None);
        time.advance(AdvanceTarget::By(Duration::from_secs(300)), SETTLE)
            .await
            .unwrap();
        assert_eq!(counters.delivered.load(Relaxed), 1, "the announcement");
        assert_eq!(engine.dead_letters.announcements_given_up.load(Relaxed), 0);
        check_written(&engine, &log).await;
    }

    #[tokio::test]
    async fn letters_of_a_blob_that_cannot_be_told_of_are_written() {
        let (engine, time, log) = with_a_letter_and_a_full_log().await;
        let hours = |n: u64| AdvanceTarget::By(Duration::from_secs(n * 60 * 60));
        time.advance(hours(3), SETTLE).await.unwrap();
        let given_up = &engine.dead_letters.announcements_given_up;
        assert_eq!(given_up.load(Relaxed), 0);
        time.advance(hours(2), SETTLE).await.unwrap();
        assert_eq!(given_up.load(Relaxed), 1);

        log.refuse_appends(None);
        time.advance(hours(24), SETTLE).await.unwrap();
        assert_eq!(engine.dispatcher.counters.delivered.load(Relaxed), 0);
        assert_eq!(given_up.load(Relaxed), 1, "that was the end of it");
        check_written(&engine, &log).await;
    }
}
