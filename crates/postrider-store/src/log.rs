//! The event log's promise.

use crate::Error;
use crate::moving::Moving;
use async_trait::async_trait;
use postrider_core::event::Batch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::{Next, Reason};
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One publish request in the log.
#[derive(Debug)]
pub struct Entry {
    pub batch: Batch,
    /// The position of the request's first event; the others follow without a gap.
    pub first: Position,
    /// Where the store keeps it; means nothing to anyone else.
    pub place: u64,
}

/// One delivery that is now this holder's to attempt: an event for a subscription.
#[derive(Clone, Debug)]
pub struct Claim {
    pub entry: Arc<Entry>,
    /// Which event of the entry.
    pub index: u32,
    /// Attempts made before this claim.
    pub attempts_made: u32,
    pub last_attempt: Option<LastAttempt>,
    /// When it came due: the retry's time, or none for a first attempt.
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

/// What follows a claim.
#[derive(Clone, Debug)]
pub struct Settled {
    pub claim: Claim,
    /// When it was decided what follows.
    pub at: Timestamp,
    /// Attempts made, this one included if there was one.
    pub attempts_made: u32,
    pub last_attempt: Option<LastAttempt>,
    pub next: Next,
}

impl Settled {
    /// From when on the letter of a given-up event waits for its blob: from its last attempt if its time to live was
    /// over, which shows only later; otherwise from the decision, which follows the attempt.
    pub fn letter_since(&self) -> Timestamp {
        match (self.next, self.last_attempt) {
            (Next::DeadLetter(Reason::TimeToLiveExceeded), Some(last)) => last.at.min(self.at),
            _ => self.at,
        }
    }

    /// The name of the letter, if the event is given up for one.
    pub fn letter_key(&self) -> Option<LetterKey> {
        match self.next {
            Next::DeadLetter(_) => Some((self.letter_since(), self.claim.position())),
            Next::Done | Next::RetryAt(_) | Next::Drop(_) => None,
        }
    }
}

/// An event that was given up, to be written where its subscription's dead letters go.
#[derive(Clone, Debug)]
pub struct Letter {
    pub entry: Arc<Entry>,
    /// Which event of the entry.
    pub index: u32,
    pub attempts_made: u32,
    pub last_attempt: Option<LastAttempt>,
    pub reason: Reason,
    /// When its wait began, see [`Settled::letter_since`].
    pub decided: Timestamp,
}

/// Names a letter of a subscription: when its wait began ([`Settled::letter_since`]), and its position.
pub type LetterKey = (Timestamp, Position);

impl Letter {
    pub fn position(&self) -> Position {
        Position(self.entry.first.0 + u64::from(self.index))
    }

    pub fn key(&self) -> LetterKey {
        (self.decided, self.position())
    }

    /// The event as published.
    pub fn object(&self) -> &str {
        self.entry.batch.object(self.index as usize)
    }
}

/// Letters of one subscription that have not been written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LettersWaiting {
    pub of: SubscriptionId,
    /// When the wait of the first of them began.
    pub oldest: Timestamp,
    pub count: u64,
}

/// How much to claim at once.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    pub events_max: usize,
    /// The events' sizes and the overhead of each stay within this; a larger event comes alone.
    pub bytes_max: usize,
    /// Bytes that rendering adds to an event.
    pub overhead: usize,
}

/// What waits for a subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Matched and never claimed.
    pub waiting: u64,
    /// Claimed and not settled.
    pub claimed: u64,
    /// Attempted, failed, due later.
    pub retrying: u64,
    /// When the oldest of all of these was received, right to a second or earlier. None if there are none, or where
    /// an older program did not note it.
    pub oldest: Option<Timestamp>,
}

/// Acknowledged events that the log should hold and does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostEvents {
    pub from: Position,
    /// The position after the last of them, as far as that is known.
    pub to: Position,
    /// Whether `to` is known for certain; otherwise there may have been more.
    pub end_known: bool,
    pub cause: String,
    pub deliveries: BTreeMap<SubscriptionId, LostDeliveries>,
}

/// Deliveries of one subscription that are lost with their events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostDeliveries {
    /// Never attempted, or attempted without a recorded result.
    pub first_attempts: u64,
    /// Whether that is the number. Otherwise it is at most that, or not known at all if the end of the lost events
    /// is not.
    pub exact: bool,
    pub retries: u64,
    /// Given up, and in no blob yet.
    pub letters: u64,
}

impl LostDeliveries {
    pub fn total(&self) -> u64 {
        self.first_attempts + self.retries + self.letters
    }
}

/// Whether publishes would be accepted, and what has been noticed.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Why not, if not.
    pub refusing: Option<String>,
    /// Damaged records found, each with its place.
    pub corrupt: Vec<String>,
    pub corrupt_records: u64,
    /// Deliveries that were dropped because their record is damaged.
    pub corrupt_deliveries: u64,
    /// Lost events, also named in `corrupt` and counted in the two numbers above. Like `corrupt`, those that earlier
    /// lives found too, until the operator has taken note of them.
    pub lost: Vec<LostEvents>,
    /// Why what is settled cannot be recorded, if so: retries and dead letters wait.
    pub unrecorded: Option<String>,
    /// Deliveries offered again after a restart that were under way by the last progress on disk. What was claimed and
    /// settled after that may be offered again too, uncounted: on disk it looks like what was never claimed.
    pub redelivered: u64,
    pub segments: u64,
    pub bytes: u64,
}

/// Told by the log that there may be something to claim. Called often and from anywhere: must be
/// quick, must not block, must not call back into the log.
pub trait Listener: Send + Sync {
    /// About `count` more deliveries of `of` can be claimed.
    fn ready(&self, of: SubscriptionId, count: usize);
    /// The earliest retry may have changed.
    fn due_changed(&self);
    /// There are more letters to be written.
    fn letters_added(&self);
}

/// Keeps events until every subscription that they matched is done with them.
#[async_trait]
pub trait EventLog: Send + Sync {
    /// Makes the request's events and the subscriptions they matched durable, together or not at all.
    /// `Ok` means they survive power loss. Only then may the publisher see 200. After an `Err` the
    /// events may still turn up: at least once, never a promise broken.
    async fn append(&self, batch: Batch) -> Result<Position, Error>;

    /// Claims deliveries of one subscription: retries due by `now` first, then first attempts in the
    /// order of publishing. A claim is held until it is settled; a restart gives it up.
    async fn claim(&self, of: SubscriptionId, now: Timestamp, want: Want) -> Result<Vec<Claim>, Error>;

    /// Records the attempts and what follows each. An attempt and what follows from it become durable
    /// together, within a tenth of a second; a crash before that offers the delivery again.
    /// Waits only while too much is already waiting to be recorded. `Err` means that the log is closed.
    async fn settle(&self, of: SubscriptionId, settled: Vec<Settled>) -> Result<(), Error>;

    /// Ends deliveries that wait to be retried: they turned out to have been delivered. Each is named by the
    /// time at which its retry is due and its position. One that does not wait with just that due time (it is
    /// claimed, has ended, or waits for another time) stays as it is. Returns the positions that were ended.
    /// Becomes durable like a settle: a crash before that offers the retry again.
    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error>;

    /// Whether deliveries of an event at this position are this log's to attempt: where there are several nodes, it may
    /// have become another one's.
    fn keeps(&self, _position: Position) -> bool {
        true
    }

    /// Returns once everything that was settled or withdrawn before the call is durable and shows in
    /// `next_due`, `due`, `backlog`, `letters_waiting` and `letters`.
    async fn flush(&self) -> Result<(), Error>;

    /// Gives claims back unattempted; they are offered again at once, in their old order.
    fn release(&self, of: SubscriptionId, claims: Vec<Claim>);

    /// Says that nothing of a subscription will be claimed for a while, so that the memory it takes
    /// can serve others.
    fn rest(&self, _of: SubscriptionId) {}

    /// The subscriptions with letters that have not been written, in the order of their ids.
    fn letters_waiting(&self) -> Vec<LettersWaiting>;

    /// Reads letters of a subscription in the order of their keys: those that come after `after` and wait since
    /// `until` or longer, no more than `want` allows, at least one if there is one (and it allows
    /// any). They stay until they are done. A letter whose event is damaged is dropped, counted and left out.
    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<LetterKey>,
        until: Timestamp,
        want: Want,
    ) -> Result<Vec<Letter>, Error>;

    /// Forgets letters: they have been written, or dropped for good. Durable on return. One that is not there
    /// is fine.
    async fn letters_done(&self, of: SubscriptionId, letters: Vec<LetterKey>) -> Result<(), Error>;

    /// When the next retry of any subscription comes due.
    fn next_due(&self) -> Option<Timestamp>;

    /// When the next retry comes due that is not due by `after`.
    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp>;

    /// The subscriptions with a retry due by `now`.
    fn due(&self, now: Timestamp) -> Vec<SubscriptionId>;

    /// Starts keeping events for a subscription, from the next append on. Does nothing if it is known.
    async fn open_subscription(&self, of: SubscriptionId) -> Result<(), Error>;

    /// Forgets a subscription and whatever waits for it, letters that have not been written included. Returns
    /// how many deliveries that drops.
    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error>;

    /// Subscriptions with something to claim or to retry: where to begin after a start.
    fn subscriptions(&self) -> Vec<SubscriptionId>;

    fn backlog(&self, of: SubscriptionId) -> Backlog;

    fn health(&self) -> Health;

    /// A number that is this log's own, for event ids that stay the same.
    fn identity(&self) -> u64;

    /// Who is told of new work. There is one; it is set before anything is appended.
    fn listen(&self, listener: Arc<dyn Listener>);

    /// How its contents are moved to another log, if they can be.
    fn moving(&self) -> Option<&dyn Moving> {
        None
    }

    /// Makes everything durable that can be and stops. Nothing may be called afterwards.
    async fn close(&self) -> Result<(), Error>;
}
