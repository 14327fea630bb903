//! The contract of the event log.

use crate::Error;
use crate::moving::MovableLog;
use async_trait::async_trait;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A publish request in the log.
#[derive(Debug)]
pub struct LogEntry {
    pub batch: PublishedBatch,
    /// The position of the request's first event; the others follow without a gap.
    pub first: Position,
    /// Where the store keeps the request; meaningful to that store only.
    pub place: u64,
}

/// The right to attempt one delivery, that is, one event for one subscription.
#[derive(Clone, Debug)]
pub struct Claim {
    pub entry: Arc<LogEntry>,
    /// Index of the event in the entry.
    pub index: u32,
    /// Attempts made before this claim.
    pub attempts_made: u32,
    pub last_attempt: Option<LastAttempt>,
    /// Due time of the retry, or `None` for a first attempt.
    pub due: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastAttempt {
    pub at: Timestamp,
    pub outcome: Outcome,
    pub status: Option<u16>,
}

impl Claim {
    pub fn position(&self) -> Position {
        Position(self.entry.first.0 + u64::from(self.index))
    }

    pub fn received(&self) -> Timestamp {
        self.entry.batch.received
    }

    /// The event as published.
    pub fn object(&self) -> &str {
        self.entry.batch.object(self.index as usize)
    }
}

/// The result of a claim: attempts made, and what happens next.
#[derive(Clone, Debug)]
pub struct Settlement {
    pub claim: Claim,
    /// When the next step was decided.
    pub at: Timestamp,
    /// Attempts made, including this one if there was one.
    pub attempts_made: u32,
    pub last_attempt: Option<LastAttempt>,
    pub next: NextStep,
}

impl Settlement {
    /// Since when the dead letter waits for its blob. If the time to live is over, the wait began
    /// with the last attempt, because expiry is noticed only later; otherwise with the decision
    /// that followed the attempt.
    pub fn dead_letter_since(&self) -> Timestamp {
        match (self.next, self.last_attempt) {
            (NextStep::DeadLetter(GiveUpReason::TimeToLiveExceeded), Some(last)) => last.at.min(self.at),
            _ => self.at,
        }
    }

    /// The key of the dead letter, if the event is given up for one.
    pub fn dead_letter_key(&self) -> Option<DeadLetterKey> {
        match self.next {
            NextStep::DeadLetter(_) => Some((self.dead_letter_since(), self.claim.position())),
            NextStep::Done | NextStep::RetryAt(_) | NextStep::Drop(_) => None,
        }
    }
}

/// A pending dead letter: an event that was given up, to be written to its dead-letter destination.
#[derive(Clone, Debug)]
pub struct PendingDeadLetter {
    pub entry: Arc<LogEntry>,
    /// Index of the event in the entry.
    pub index: u32,
    pub attempts_made: u32,
    pub last_attempt: Option<LastAttempt>,
    pub reason: GiveUpReason,
    /// When its wait began, see [`Settlement::dead_letter_since`].
    pub decided: Timestamp,
}

/// Identifies a dead letter of a subscription: when its wait began ([`Settlement::dead_letter_since`]), and
/// its position.
pub type DeadLetterKey = (Timestamp, Position);

impl PendingDeadLetter {
    pub fn position(&self) -> Position {
        Position(self.entry.first.0 + u64::from(self.index))
    }

    pub fn key(&self) -> DeadLetterKey {
        (self.decided, self.position())
    }

    /// The event as published.
    pub fn object(&self) -> &str {
        self.entry.batch.object(self.index as usize)
    }
}

/// Pending dead letters of one subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingDeadLetters {
    pub of: SubscriptionId,
    /// When the wait of the oldest of them began.
    pub oldest: Timestamp,
    pub count: u64,
}

/// Limits of one claim.
#[derive(Clone, Copy, Debug)]
pub struct ClaimLimits {
    pub events_max: usize,
    /// The events' sizes plus the overhead of each stay within this; a larger event is claimed
    /// alone.
    pub bytes_max: usize,
    /// Bytes that rendering adds to each event.
    pub overhead: usize,
}

/// Deliveries of a subscription that have not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Matched and never claimed.
    pub waiting: u64,
    /// Claimed and not settled.
    pub claimed: u64,
    /// Attempted and failed, with a retry scheduled.
    pub retrying: u64,
    /// When the oldest of all these deliveries was received; exact to the second or earlier. `None`
    /// if there are none, or if an older program did not record the time.
    pub oldest: Option<Timestamp>,
}

/// Acknowledged events that the log should contain and does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostEvents {
    pub from: Position,
    /// The position after the last lost event, as far as known.
    pub to: Position,
    /// Whether `to` is certain; otherwise more events may be lost.
    pub end_known: bool,
    pub cause: String,
    pub deliveries: BTreeMap<SubscriptionId, LostDeliveries>,
}

/// Deliveries of one subscription that are lost with their events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostDeliveries {
    /// Deliveries never attempted, or attempted without a recorded result.
    pub first_attempts: u64,
    /// Whether `first_attempts` is exact. Otherwise it is an upper bound, or unknown if the end of
    /// the lost events is unknown.
    pub exact: bool,
    pub retries: u64,
    /// Given up and not yet in a blob.
    pub letters: u64,
}

impl LostDeliveries {
    pub fn total(&self) -> u64 {
        self.first_attempts + self.retries + self.letters
    }
}

/// Whether the log accepts publish requests, and which damage it has found.
#[derive(Clone, Debug, Default)]
pub struct LogHealth {
    /// Why publish requests are refused, if they are.
    pub refusing: Option<String>,
    /// Damaged records found, each with its location.
    pub corrupt: Vec<String>,
    pub corrupt_records: u64,
    /// Deliveries that were dropped because their record is damaged.
    pub corrupt_deliveries: u64,
    /// Lost events, also named in `corrupt` and counted in the two numbers above. Like `corrupt`,
    /// this includes what earlier processes found, until the operator acknowledges it.
    pub lost: Vec<LostEvents>,
    /// Why settlements cannot be recorded, if so: retries and dead letters wait.
    pub unrecorded: Option<String>,
    /// Deliveries offered again after a restart that were under way by the last progress on disk. What was claimed and
    /// settled after that may be offered again too, uncounted: on disk it looks like what was never claimed.
    pub redelivered: u64,
    pub segments: u64,
    pub bytes: u64,
}

/// Receives hints of the log that there is work. Called often and from any thread: implementations
/// must be quick and must neither block nor call back into the log.
pub trait LogListener: Send + Sync {
    /// About `count` more deliveries of `of` can be claimed.
    fn ready(&self, of: SubscriptionId, count: usize);
    /// The earliest due time of a retry may have changed.
    fn due_changed(&self);
    /// New dead letters are pending.
    fn dead_letters_added(&self);
}

/// Keeps every event until all deliveries of it have ended.
#[async_trait]
pub trait EventLog: Send + Sync {
    /// Makes the events and their match sets durable, atomically. `Ok` means that they survive
    /// power loss; only then may the publisher get a 200. After an `Err` the events may still be
    /// delivered: delivery is at least once, and an error promises nothing.
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error>;

    /// Claims deliveries of one subscription: first the retries due by `now`, then first attempts
    /// in the order of publishing. A claim is held until it is settled; a restart ends it.
    async fn claim(&self, of: SubscriptionId, now: Timestamp, want: ClaimLimits)
    -> Result<Vec<Claim>, Error>;

    /// Records attempts and what follows from them. An attempt and its consequence become durable
    /// together, within a tenth of a second; after a crash before that the delivery is offered
    /// again. Waits only while too much is already queued to be recorded. `Err` means that the log
    /// is closed.
    async fn settle(&self, of: SubscriptionId, settled: Vec<Settlement>) -> Result<(), Error>;

    /// Ends deliveries that wait for a retry, because they turned out to have been delivered. Each
    /// is identified by its due time and position. A delivery that does not wait with exactly that
    /// due time (because it is claimed, has ended, or was rescheduled) is left unchanged. Returns
    /// the positions of the deliveries that were ended. Becomes durable like a settlement: after a
    /// crash before that the retry is offered again.
    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error>;

    /// Whether this log still owns deliveries of the event at this position; in a cluster another
    /// node may have taken them over.
    fn owns_position(&self, _position: Position) -> bool {
        true
    }

    /// Returns once everything that was settled or withdrawn before the call is durable and visible
    /// in `next_due`, `due`, `backlog`, `pending_dead_letters` and `letters`.
    async fn flush(&self) -> Result<(), Error>;

    /// Returns claims without an attempt; they are offered again immediately, in their old order.
    fn release(&self, of: SubscriptionId, claims: Vec<Claim>);

    /// Hints that nothing of a subscription will be claimed for a while, so that its memory can be
    /// freed.
    fn release_memory(&self, _of: SubscriptionId) {}

    /// Subscriptions with pending dead letters, ordered by id.
    fn pending_dead_letters(&self) -> Vec<PendingDeadLetters>;

    /// Reads pending dead letters of a subscription in the order of their keys: those after `after`
    /// that wait since `until` or longer, within the limits of `want`, but at least one if there is
    /// one (unless `want` allows none). They stay until `dead_letters_done`. A dead letter whose event
    /// is damaged is dropped, counted and left out.
    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, Error>;

    /// Forgets dead letters that have been written or finally dropped. Durable on return. Unknown
    /// keys are ignored.
    async fn dead_letters_done(&self, of: SubscriptionId, letters: Vec<DeadLetterKey>) -> Result<(), Error>;

    /// When the next retry of any subscription comes due.
    fn next_due(&self) -> Option<Timestamp>;

    /// When the first retry comes due that is not due by `after` already.
    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp>;

    /// The subscriptions with a retry due by `now`.
    fn due(&self, now: Timestamp) -> Vec<SubscriptionId>;

    /// Starts keeping events for a subscription, from the next append on. Does nothing if it is
    /// open.
    async fn open_subscription(&self, of: SubscriptionId) -> Result<(), Error>;

    /// Forgets a subscription with its deliveries and pending dead letters. Returns how many
    /// deliveries and dead letters that drops.
    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error>;

    /// Subscriptions with something to claim or to retry: where dispatch begins after a start.
    fn subscriptions(&self) -> Vec<SubscriptionId>;

    fn backlog(&self, of: SubscriptionId) -> Backlog;

    fn health(&self) -> LogHealth;

    /// A number unique to this log, from which stable event ids are derived.
    fn identity(&self) -> u64;

    /// Registers the listener for new work. There is only one, set before the first append.
    fn listen(&self, listener: Arc<dyn LogListener>);

    /// The interface for moving the content to another log, if the store supports it.
    fn as_movable(&self) -> Option<&dyn MovableLog> {
        None
    }

    /// Makes everything pending durable and stops. No method may be called afterwards.
    async fn close(&self) -> Result<(), Error>;
}
