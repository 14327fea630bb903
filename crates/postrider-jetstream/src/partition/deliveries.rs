//! The deliveries of a partition in memory, without the bytes of the events.
//!
//! A waiting delivery takes 16 bytes, a retry or a dead letter about 64. Every change by a
//! settlement or a withdrawal is added to the journal's buffer under the same lock, so that the
//! journal records what happened, in that order.

use super::journal::{AttemptState, JournalBuffer, JournalRecord};
use super::sequence_of;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use postrider_store::{Backlog, Claim, DeadLetterKey, PendingDeadLetters, Settlement};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

/// Number of closed subscriptions that are remembered: events that were routed to them before the
/// closing may reach the log after it.
const CLOSED_REMEMBERED_MAX: usize = 4_096;
/// Assumption on an owner's unrecorded last moments: its first attempts after the last journal record
/// are at most this multiple of `PartitionSubscription::pace`, …
const UNSAID_PERIODS: usize = 4;
/// … and its last retries were due at most this much later: the journal is written every 20 ms, and
/// stored later.
const UNSAID_DUE: Duration = Duration::from_millis(100);

/// A reception time in seconds: exact enough for the age of a backlog.
pub type ReceivedSecond = u32;

pub fn second(at: Timestamp) -> ReceivedSecond {
    u32::try_from(at.nanos() / 1_000_000_000).unwrap_or(u32::MAX)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingDelivery {
    pub position: Position,
    pub received: ReceivedSecond,
}

/// A delivery that waits for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryingDelivery {
    pub tried: AttemptState,
    pub received: ReceivedSecond,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClaimedDelivery {
    due: Option<Timestamp>,
    tried: AttemptState,
    received: ReceivedSecond,
}

/// State of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadLetterState {
    pub tried: AttemptState,
    pub reason: GiveUpReason,
}

/// The deliveries of a subscription in this partition. A delivery is in exactly one of the four
/// collections.
#[derive(Debug, Default)]
pub struct PartitionSubscription {
    /// Ordered by position.
    pub waiting: VecDeque<WaitingDelivery>,
    pub(crate) claimed: BTreeMap<Position, ClaimedDelivery>,
    pub retrying: BTreeMap<(Timestamp, Position), RetryingDelivery>,
    pub letters: BTreeMap<DeadLetterKey, DeadLetterState>,
    /// Number of claimed and retrying deliveries by the second of their reception.
    ages: BTreeMap<ReceivedSecond, u32>,
    /// The last first attempt that was ever claimed.
    pub upto: Option<Position>,
    /// Retries that an earlier owner had claimed.
    again: BTreeSet<(Timestamp, Position)>,
    /// First attempts by an earlier owner that ended since the journal last advanced `upto`.
    pace: usize,
    /// Due time of the last retry that the earlier owner had claimed.
    handed: Option<Timestamp>,
}

impl PartitionSubscription {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty()
            && self.claimed.is_empty()
            && self.retrying.is_empty()
            && self.letters.is_empty()
    }

    fn head(&self) -> Option<Timestamp> {
        self.retrying.first_key_value().map(|((due, _), _)| *due)
    }

    fn born(&mut self, received: ReceivedSecond) {
        *self.ages.entry(received).or_default() += 1;
    }

    fn gone(&mut self, received: ReceivedSecond) {
        if let Some(count) = self.ages.get_mut(&received) {
            *count -= 1;
            if *count == 0 {
                self.ages.remove(&received);
            }
        }
    }

    fn wait_again(&mut self, position: Position, received: ReceivedSecond) {
        let at = self.waiting.partition_point(|other| other.position < position);
        self.waiting.insert(at, WaitingDelivery { position, received });
    }

    fn put_retry(&mut self, due: Timestamp, position: Position, retry: RetryingDelivery) {
        if self.retrying.insert((due, position), retry).is_none() {
            self.born(retry.received);
        }
    }

    fn take_retry(&mut self, due: Timestamp, position: Position) -> Option<RetryingDelivery> {
        self.again.remove(&(due, position));
        let retry = self.retrying.remove(&(due, position))?;
        self.gone(retry.received);
        Some(retry)
    }

    /// Removes a delivery that waits for its first attempt or, if `was` is given, for a retry at
    /// that time. Returns when its event was received.
    fn take_waiting(&mut self, was: Option<Timestamp>, position: Position) -> Option<ReceivedSecond> {
        if let Some(due) = was {
            return self.take_retry(due, position).map(|retry| retry.received);
        }
        let at = self
            .waiting
            .binary_search_by_key(&position, |other| other.position)
            .ok()?;
        self.waiting.remove(at).map(|waiting| waiting.received)
    }

    /// Ends a claim; `None` if the claim is not held.
    fn end_claim(&mut self, claim: &Claim) -> Option<ClaimedDelivery> {
        let position = claim.position();
        let held = self.claimed.get(&position)?;
        if held.due != claim.due || held.tried.attempts != claim.attempts_made {
            return None;
        }
        let held = self.claimed.remove(&position)?;
        self.gone(held.received);
        Some(held)
    }

    fn wait_as_before(&mut self, position: Position, held: ClaimedDelivery) {
        match held.due {
            None => self.wait_again(position, held.received),
            Some(due) => self.put_retry(
                due,
                position,
                RetryingDelivery {
                    tried: held.tried,
                    received: held.received,
                },
            ),
        }
    }
}

/// A group of messages that are purged together, once none of their deliveries is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventChunk {
    pub number: u64,
    /// The sequence of the last message.
    pub last: u64,
    pub bytes: u64,
    /// Number of open deliveries of the chunk's events.
    pub outstanding: u64,
}

/// Chunks by the sequence of their first message.
#[derive(Debug, Default)]
pub struct EventChunks(pub BTreeMap<u64, EventChunk>);

impl EventChunks {
    fn of(&mut self, position: Position) -> Option<&mut EventChunk> {
        let sequence = sequence_of(position);
        let (_, chunk) = self.0.range_mut(..=sequence).next_back()?;
        (sequence <= chunk.last).then_some(chunk)
    }

    pub fn began(&mut self, position: Position) {
        if let Some(chunk) = self.of(position) {
            chunk.outstanding += 1;
        }
    }

    fn ended(&mut self, position: Position) {
        if let Some(chunk) = self.of(position) {
            chunk.outstanding = chunk.outstanding.saturating_sub(1);
        }
    }
}

/// Notifications for the listener after a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerNotice {
    /// The earliest due time has changed.
    pub due: bool,
    pub letters: bool,
}

/// Location of the messages of an append.
#[derive(Clone, Copy, Debug)]
pub struct AppendedMessages {
    pub chunk: u64,
    /// The sequence of the first message; equal to the last except for a request that was split.
    pub first: u64,
    pub sequence: u64,
    pub bytes: u64,
}

#[derive(Debug, Default)]
pub struct PartitionDeliveries {
    pub subs: FxHashMap<SubscriptionId, PartitionSubscription>,
    /// Due time of the first retry of each subscription that has one.
    heads: BTreeSet<(Timestamp, SubscriptionId)>,
    pub chunks: EventChunks,
    closed: FxHashSet<SubscriptionId>,
    pub closed_order: VecDeque<SubscriptionId>,
    pub journal: JournalBuffer,
    claims_held: u64,
}

impl PartitionDeliveries {
    /// Adds a subscription from a snapshot.
    pub fn restore(&mut self, of: SubscriptionId, mut sub: PartitionSubscription) {
        let retries: Vec<ReceivedSecond> = sub.retrying.values().map(|retry| retry.received).collect();
        for received in retries {
            sub.born(received);
        }
        let waiting = sub.waiting.iter().map(|waiting| waiting.position);
        let later = sub
            .retrying
            .keys()
            .chain(sub.letters.keys())
            .map(|(_, position)| *position);
        for position in waiting.chain(later) {
            self.chunks.began(position);
        }
        self.heads.extend(sub.head().map(|head| (head, of)));
        self.subs.insert(of, sub);
    }

    pub fn remember_closed(&mut self, of: SubscriptionId) {
        if self.closed.insert(of) {
            self.closed_order.push_back(of);
        }
        if self.closed_order.len() > CLOSED_REMEMBERED_MAX
            && let Some(forgotten) = self.closed_order.pop_front()
        {
            self.closed.remove(&forgotten);
        }
    }

    /// Changes a subscription and updates the due times derived from it.
    fn change<T>(
        &mut self,
        of: SubscriptionId,
        change: impl FnOnce(&mut PartitionSubscription, &mut EventChunks, &mut JournalBuffer, &mut u64) -> T,
    ) -> Option<T> {
        let sub = self.subs.get_mut(&of)?;
        let before = sub.head();
        let result = change(sub, &mut self.chunks, &mut self.journal, &mut self.claims_held);
        let after = sub.head();
        if before != after {
            before.map(|head| self.heads.remove(&(head, of)));
            self.heads.extend(after.map(|head| (head, of)));
        }
        Some(result)
    }

    /// Adds the requests of a message, each with the position of its first event. Counts the new
    /// claimable deliveries by subscription.
    pub fn append<'b>(
        &mut self,
        appended: AppendedMessages,
        requests: impl IntoIterator<Item = (Position, &'b PublishedBatch)>,
        ready: &mut FxHashMap<SubscriptionId, usize>,
    ) {
        let mut outstanding = 0;
        for (first, batch) in requests {
            let received = second(batch.received);
            for index in 0..batch.events.len() {
                let position = Position(first.0 + index as u64);
                for of in batch.matched(index) {
                    if !self.closed.is_empty() && self.closed.contains(of) {
                        continue;
                    }
                    let sub = self.subs.entry(*of).or_default();
                    sub.waiting.push_back(WaitingDelivery { position, received });
                    *ready.entry(*of).or_default() += 1;
                    outstanding += 1;
                }
            }
        }
        match self.chunks.0.last_entry() {
            Some(mut last) if last.get().number == appended.chunk => {
                let chunk = last.get_mut();
                chunk.last = appended.sequence;
                chunk.bytes += appended.bytes;
                chunk.outstanding += outstanding;
            }
            _ => {
                let chunk = EventChunk {
                    number: appended.chunk,
                    last: appended.sequence,
                    bytes: appended.bytes,
                    outstanding,
                };
                self.chunks.0.insert(appended.first, chunk);
            }
        }
    }

    /// Claims a retry that waits for exactly this time.
    pub fn claim_retry(
        &mut self,
        of: SubscriptionId,
        due: Timestamp,
        position: Position,
    ) -> Option<AttemptState> {
        self.change(of, |sub, _, journal, claims_held| {
            let retry = sub.retrying.remove(&(due, position))?;
            let held = ClaimedDelivery {
                due: Some(due),
                tried: retry.tried,
                received: retry.received,
            };
            sub.claimed.insert(position, held);
            *claims_held += 1;
            journal.push(again(of, due, position));
            Some(retry.tried)
        })?
    }

    /// Offers first attempts of a subscription in order while `offer` accepts them. Accepted ones
    /// are claimed.
    pub fn claim_waiting(&mut self, of: SubscriptionId, mut offer: impl FnMut(Position) -> bool) {
        let Some(sub) = self.subs.get_mut(&of) else { return };
        let before = sub.upto;
        while let Some(&WaitingDelivery { position, received }) = sub.waiting.front() {
            if !offer(position) {
                break;
            }
            sub.waiting.pop_front();
            let held = ClaimedDelivery {
                due: None,
                tried: AttemptState {
                    attempts: 0,
                    last: None,
                },
                received,
            };
            sub.claimed.insert(position, held);
            sub.born(received);
            sub.upto = sub.upto.max(Some(position));
            self.claims_held += 1;
        }
        if sub.upto != before {
            self.journal.touch(of, sub.upto);
        }
    }

    /// Records all claims again, because the journal that contains them is purged with the next
    /// snapshot.
    pub fn note_claims(&mut self) {
        for (of, sub) in &self.subs {
            let retried: Vec<(Timestamp, Position)> = {
                let due = sub.claimed.iter().filter_map(|(at, held)| Some((held.due?, *at)));
                due.collect()
            };
            if sub.claimed.len() > retried.len() {
                self.journal.touch(*of, sub.upto);
            }
            if !retried.is_empty() {
                self.journal.push(JournalRecord::Again { of: *of, retried });
            }
        }
    }

    /// Whether a retry waits for exactly this time.
    pub fn waits(&self, of: SubscriptionId, due: Timestamp, position: Position) -> bool {
        let sub = self.subs.get(&of);
        sub.is_some_and(|sub| sub.retrying.contains_key(&(due, position)))
    }

    /// The due retries of a subscription, in order, at most `max`.
    pub fn due_of(&self, of: SubscriptionId, now: Timestamp, max: usize) -> Vec<(Timestamp, Position)> {
        let Some(sub) = self.subs.get(&of) else {
            return Vec::new();
        };
        let due = sub.retrying.keys().take_while(|(due, _)| *due <= now);
        due.take(max).copied().collect()
    }

    /// The first deliveries that wait for a first attempt, at most `max`.
    pub fn waiting_of(&self, of: SubscriptionId, max: usize) -> Vec<Position> {
        let waiting = self.subs.get(&of).into_iter().flat_map(|sub| &sub.waiting);
        waiting.take(max).map(|waiting| waiting.position).collect()
    }

    /// Settles claims. A claim that is not held is ignored.
    pub fn settle(&mut self, of: SubscriptionId, settled: &[Settlement]) -> ListenerNotice {
        let earliest = self.next_due();
        let mut letters = false;
        self.change(of, |sub, chunks, journal, claims_held| {
            for one in settled {
                let position = one.claim.position();
                let Some(held) = sub.end_claim(&one.claim) else {
                    continue;
                };
                *claims_held -= 1;
                let tried = AttemptState {
                    attempts: one.attempts_made,
                    last: one.last_attempt,
                };
                let was = held.due;
                match one.next {
                    NextStep::RetryAt(due) => {
                        let received = held.received;
                        sub.put_retry(due, position, RetryingDelivery { tried, received });
                        journal.push(JournalRecord::Retry {
                            of,
                            was,
                            position,
                            due,
                            tried,
                        });
                    }
                    NextStep::DeadLetter(reason) => {
                        let decided = one.dead_letter_since();
                        sub.letters
                            .insert((decided, position), DeadLetterState { tried, reason });
                        letters = true;
                        journal.push(JournalRecord::Letter {
                            of,
                            was,
                            position,
                            decided,
                            tried,
                            reason,
                        });
                    }
                    NextStep::Done | NextStep::Drop(_) => {
                        chunks.ended(position);
                        match was {
                            None => journal.ended(of, sub.upto, position),
                            Some(due) => journal.push(ended_retries(of, vec![(due, position)])),
                        }
                        continue;
                    }
                }
                if was.is_none() {
                    journal.touch(of, sub.upto);
                }
            }
        });
        ListenerNotice {
            due: self.next_due() != earliest,
            letters,
        }
    }

    /// Ends retries that wait for exactly these times. Returns those that did.
    pub fn withdraw(
        &mut self,
        of: SubscriptionId,
        waiting: &[(Timestamp, Position)],
    ) -> (Vec<Position>, ListenerNotice) {
        let earliest = self.next_due();
        let ended = self.change(of, |sub, chunks, journal, _| {
            let mut ended = Vec::new();
            for (due, position) in waiting {
                if sub.take_retry(*due, *position).is_some() {
                    chunks.ended(*position);
                    ended.push((*due, *position));
                }
            }
            if !ended.is_empty() {
                journal.push(ended_retries(of, ended.clone()));
            }
            ended.into_iter().map(|(_, position)| position).collect()
        });
        let changed = ListenerNotice {
            due: self.next_due() != earliest,
            letters: false,
        };
        (ended.unwrap_or_default(), changed)
    }

    /// Returns claims to where they were.
    pub fn release(&mut self, of: SubscriptionId, claims: &[Claim]) {
        self.change(of, |sub, _, _, claims_held| {
            for claim in claims {
                if let Some(held) = sub.end_claim(claim) {
                    *claims_held -= 1;
                    sub.wait_as_before(claim.position(), held);
                }
            }
        });
    }

    /// Dead letters of a subscription after `after` that were given up by `until`, in order, at
    /// most `max`.
    pub fn letters_of(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        max: usize,
    ) -> Vec<(DeadLetterKey, DeadLetterState)> {
        let Some(sub) = self.subs.get(&of) else {
            return Vec::new();
        };
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let letters = sub.letters.range((from, Bound::Unbounded));
        let letters = letters.take_while(|((decided, _), _)| *decided <= until);
        letters.take(max).map(|(key, letter)| (*key, *letter)).collect()
    }

    /// Removes dead letters. Returns false if none of them existed.
    pub fn letters_done(&mut self, of: SubscriptionId, keys: &[DeadLetterKey]) -> bool {
        let done = self.change(of, |sub, chunks, journal, _| {
            let mut done = Vec::new();
            for key in keys {
                if sub.letters.remove(key).is_some() {
                    chunks.ended(key.1);
                    done.push(*key);
                }
            }
            let any = !done.is_empty();
            if any {
                journal.push(JournalRecord::LettersDone { of, letters: done });
            }
            any
        });
        done.unwrap_or(false)
    }

    /// Removes a subscription. Returns how many deliveries that drops; claimed ones are counted by
    /// their holder.
    pub fn close(&mut self, of: SubscriptionId) -> u64 {
        self.remember_closed(of);
        // Recorded even if nothing is there: events routed to the subscription may be on their way
        // to the stream.
        self.journal.push(JournalRecord::Closed { of });
        self.drop_sub(of).unwrap_or(0)
    }

    fn drop_sub(&mut self, of: SubscriptionId) -> Option<u64> {
        let sub = self.subs.remove(&of)?;
        if let Some(head) = sub.head() {
            self.heads.remove(&(head, of));
        }
        let waiting = sub.waiting.iter().map(|waiting| waiting.position);
        let later = sub
            .retrying
            .keys()
            .chain(sub.letters.keys())
            .map(|(_, position)| *position);
        for position in waiting.chain(later).chain(sub.claimed.keys().copied()) {
            self.chunks.ended(position);
        }
        self.claims_held -= sub.claimed.len() as u64;
        Some((sub.waiting.len() + sub.retrying.len() + sub.letters.len()) as u64)
    }

    /// Drops every delivery of an unreadable message, except claimed ones, whose events were read
    /// before. Returns the number of dropped deliveries.
    pub fn drop_message(&mut self, sequence: u64) -> u64 {
        let mut dropped = 0;
        let there = |position: &Position| sequence_of(*position) == sequence;
        let all: Vec<SubscriptionId> = self.subs.keys().copied().collect();
        for of in all {
            self.change(of, |sub, chunks, journal, _| {
                let mut fresh = Vec::new();
                sub.waiting.retain(|waiting| {
                    let gone = there(&waiting.position);
                    fresh.extend(gone.then_some(waiting.position));
                    !gone
                });
                let retries: Vec<_> = sub.retrying.keys().filter(|(_, p)| there(p)).copied().collect();
                let letters: Vec<_> = sub.letters.keys().filter(|(_, p)| there(p)).copied().collect();
                dropped += (fresh.len() + retries.len() + letters.len()) as u64;
                for position in fresh {
                    chunks.ended(position);
                    journal.ended(of, sub.upto, position);
                }
                for (due, position) in &retries {
                    sub.take_retry(*due, *position);
                    chunks.ended(*position);
                }
                for key in &letters {
                    sub.letters.remove(key);
                    chunks.ended(key.1);
                }
                if !retries.is_empty() {
                    journal.push(ended_retries(of, retries));
                }
                if !letters.is_empty() {
                    journal.push(JournalRecord::LettersDone { of, letters });
                }
            });
        }
        dropped
    }

    /// Applies a journal record as when it was written. Changes to deliveries that no longer exist
    /// are ignored.
    pub fn apply(&mut self, record: &JournalRecord) {
        match record {
            JournalRecord::Ended {
                of,
                upto,
                fresh,
                retried,
            } => {
                self.change(*of, |sub, chunks, _, _| {
                    if sub.upto < *upto {
                        sub.upto = *upto;
                        sub.pace = 0;
                    }
                    sub.pace += fresh.len();
                    let fresh = fresh.iter().map(|position| (None, *position));
                    let retried = retried.iter().map(|(due, position)| (Some(*due), *position));
                    for (was, position) in fresh.chain(retried) {
                        if sub.take_waiting(was, position).is_some() {
                            chunks.ended(position);
                        }
                    }
                });
            }
            JournalRecord::Retry {
                of,
                was,
                position,
                due,
                tried,
            } => {
                self.change(*of, |sub, _, _, _| {
                    if let Some(received) = sub.take_waiting(*was, *position) {
                        sub.pace += usize::from(was.is_none());
                        let tried = *tried;
                        sub.put_retry(*due, *position, RetryingDelivery { tried, received });
                    }
                });
            }
            JournalRecord::Letter {
                of,
                was,
                position,
                decided,
                tried,
                reason,
            } => {
                self.change(*of, |sub, _, _, _| {
                    if sub.take_waiting(*was, *position).is_some() {
                        sub.pace += usize::from(was.is_none());
                        let (tried, reason) = (*tried, *reason);
                        sub.letters
                            .insert((*decided, *position), DeadLetterState { tried, reason });
                    }
                });
            }
            JournalRecord::LettersDone { of, letters } => {
                self.change(*of, |sub, chunks, _, _| {
                    for key in letters {
                        if sub.letters.remove(key).is_some() {
                            chunks.ended(key.1);
                        }
                    }
                });
            }
            JournalRecord::Again { of, retried } => {
                if let Some(sub) = self.subs.get_mut(of) {
                    let waits = |key: &&(Timestamp, Position)| sub.retrying.contains_key(*key);
                    let found: Vec<_> = retried.iter().filter(waits).copied().collect();
                    sub.again.extend(found);
                    sub.handed = sub.handed.max(retried.iter().map(|(due, _)| *due).max());
                }
            }
            JournalRecord::Closed { of } => {
                self.remember_closed(*of);
                self.drop_sub(*of);
            }
            JournalRecord::Marker { .. } => {}
        }
    }

    /// Offers everything again that an earlier owner had claimed, after a take-over. Returns an
    /// upper estimate of its number: the journal lacks the owner's last moments, which are assumed
    /// to resemble those before.
    pub fn begin(&mut self) -> u64 {
        let mut again = 0;
        for sub in self.subs.values_mut() {
            let upto = sub.upto.take();
            let said = sub
                .waiting
                .partition_point(|waiting| Some(waiting.position) <= upto);
            let unsaid = UNSAID_PERIODS * std::mem::take(&mut sub.pace);
            again += sub.waiting.len().min(said + unsaid);
            if let Some(handed) = sub.handed.take() {
                let next = (handed, Position(0))..(handed + UNSAID_DUE, Position(0));
                let unsaid = sub
                    .retrying
                    .range(next)
                    .filter(|(key, _)| !sub.again.contains(key));
                again += unsaid.count();
            }
            again += std::mem::take(&mut sub.again).len();
        }
        again as u64
    }

    /// Ends all claims because nobody will settle them any more. Returns their number.
    pub fn lapse(&mut self) -> u64 {
        let lapsed = self.claims_held();
        let holding: Vec<SubscriptionId> = {
            let holding = self.subs.iter().filter(|(_, sub)| !sub.claimed.is_empty());
            holding.map(|(of, _)| *of).collect()
        };
        for of in holding {
            self.change(of, |sub, _, _, claims_held| {
                for (position, held) in std::mem::take(&mut sub.claimed) {
                    *claims_held -= 1;
                    sub.gone(held.received);
                    sub.wait_as_before(position, held);
                }
            });
        }
        // Claims under way are counted here, so the next owner must not count them again.
        for sub in self.subs.values_mut() {
            sub.upto = None;
            sub.again.clear();
        }
        lapsed
    }

    /// Removes subscriptions without deliveries, and chunks without open deliveries. Returns the
    /// numbers of those chunks: they can be purged once this is durable.
    pub fn tidy(&mut self) -> Vec<u64> {
        self.subs.retain(|_, sub| !sub.is_empty());
        let mut finished = Vec::new();
        self.chunks.0.retain(|_, chunk| {
            if chunk.outstanding == 0 {
                finished.push(chunk.number);
            }
            chunk.outstanding > 0
        });
        finished
    }

    /// The first sequence that is still needed.
    pub fn first_needed(&self) -> Option<u64> {
        self.chunks.0.first_key_value().map(|(first, _)| *first)
    }

    /// Bytes of chunks without open deliveries.
    pub fn finished_bytes(&self) -> u64 {
        let finished = self.chunks.0.values().filter(|chunk| chunk.outstanding == 0);
        finished.map(|chunk| chunk.bytes).sum()
    }

    pub fn event_bytes(&self) -> u64 {
        self.chunks.0.values().map(|chunk| chunk.bytes).sum()
    }

    pub fn claims_held(&self) -> u64 {
        self.claims_held
    }

    pub fn next_due(&self) -> Option<Timestamp> {
        self.heads.first().map(|(due, _)| *due)
    }

    /// Leaves out retries behind a retry of the same subscription that is due by `after`.
    pub fn next_due_after(&self, after: Timestamp) -> Option<Timestamp> {
        let later = (
            Bound::Excluded((after, SubscriptionId(u64::MAX))),
            Bound::Unbounded,
        );
        self.heads.range(later).next().map(|(due, _)| *due)
    }

    pub fn due(&self, now: Timestamp) -> impl Iterator<Item = SubscriptionId> {
        self.heads
            .range(..=(now, SubscriptionId(u64::MAX)))
            .map(|(_, of)| *of)
    }

    /// Subscriptions with something to claim or to retry, and their number of waiting deliveries.
    pub fn busy(&self) -> impl Iterator<Item = (SubscriptionId, usize)> {
        let busy = |sub: &PartitionSubscription| !sub.waiting.is_empty() || !sub.retrying.is_empty();
        let busy = self.subs.iter().filter(move |(_, sub)| busy(sub));
        busy.map(|(of, sub)| (*of, sub.waiting.len()))
    }

    pub fn letters_waiting(&self) -> impl Iterator<Item = PendingDeadLetters> {
        self.subs.iter().filter_map(|(of, sub)| {
            let ((oldest, _), _) = sub.letters.first_key_value()?;
            Some(PendingDeadLetters {
                of: *of,
                oldest: *oldest,
                count: sub.letters.len() as u64,
            })
        })
    }

    pub fn backlog(&self, of: SubscriptionId) -> Backlog {
        let Some(sub) = self.subs.get(&of) else {
            return Backlog::default();
        };
        let oldest = sub.ages.keys().next().copied();
        let oldest = oldest
            .into_iter()
            .chain(sub.waiting.front().map(|w| w.received))
            .min();
        Backlog {
            waiting: sub.waiting.len() as u64,
            claimed: sub.claimed.len() as u64,
            retrying: sub.retrying.len() as u64,
            oldest: oldest.map(|secs| Timestamp::from_secs(i64::from(secs))),
        }
    }

    /// A subscription's first attempts and retries as if nothing were claimed.
    pub fn unclaimed(
        sub: &PartitionSubscription,
    ) -> (
        Vec<WaitingDelivery>,
        BTreeMap<(Timestamp, Position), RetryingDelivery>,
    ) {
        let mut waiting: Vec<WaitingDelivery> = sub.waiting.iter().copied().collect();
        let mut retrying = sub.retrying.clone();
        for (position, held) in &sub.claimed {
            let (position, received, tried) = (*position, held.received, held.tried);
            match held.due {
                None => waiting.push(WaitingDelivery { position, received }),
                Some(due) => {
                    retrying.insert((due, position), RetryingDelivery { tried, received });
                }
            }
        }
        waiting.sort_unstable_by_key(|waiting| waiting.position);
        (waiting, retrying)
    }
}

fn again(of: SubscriptionId, due: Timestamp, position: Position) -> JournalRecord {
    JournalRecord::Again {
        of,
        retried: vec![(due, position)],
    }
}

fn ended_retries(of: SubscriptionId, retried: Vec<(Timestamp, Position)>) -> JournalRecord {
    JournalRecord::Ended {
        of,
        upto: None,
        fresh: Vec::new(),
        retried,
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal::{self, tests::PARTITION};
    use super::super::{place, snapshot};
    use super::*;
    use bytes::Bytes;
    use postrider_store::LogEntry;
    use postrider_store::conformance::{at, events, settled, sub};
    use proptest::prelude::*;
    use std::sync::Arc;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum ModelState {
        Waiting,
        Retrying(Timestamp, u32),
        GivenUp(Timestamp, u32),
    }

    #[derive(Clone, Debug)]
    enum DeliveryModelStep {
        /// The subscriptions of each event, as bits; whether a chunk begins with it.
        Append(Vec<u8>, bool),
        Claim(u64, usize),
        /// Which of the held claims, and the outcome.
        Settle(u64, Vec<(usize, u8)>),
        Release(u64, Vec<usize>),
        Withdraw(u64, usize),
        LettersDone(u64, usize),
        Close(u64),
        Later(i64),
        Write,
        Snapshot,
        Damaged(usize),
    }

    fn any_step() -> impl Strategy<Value = DeliveryModelStep> {
        let of = || 1..4u64;
        prop_oneof![
            4 => (prop::collection::vec(any::<u8>(), 1..5), prop::bool::weighted(0.3)).prop_map(|(e, c)| DeliveryModelStep::Append(e, c)),
            6 => (of(), 0..6usize).prop_map(|(of, max)| DeliveryModelStep::Claim(of, max)),
            6 => (of(), prop::collection::vec((0..9usize, 0..5u8), 0..5)).prop_map(|(of, all)| DeliveryModelStep::Settle(of, all)),
            1 => (of(), prop::collection::vec(0..9usize, 0..5)).prop_map(|(of, all)| DeliveryModelStep::Release(of, all)),
            1 => (of(), 0..4usize).prop_map(|(of, count)| DeliveryModelStep::Withdraw(of, count)),
            1 => (of(), 0..4usize).prop_map(|(of, count)| DeliveryModelStep::LettersDone(of, count)),
            1 => prop::bool::weighted(0.2).prop_map(|close| if close { DeliveryModelStep::Close(3) } else { DeliveryModelStep::Write }),
            2 => (0..6i64).prop_map(DeliveryModelStep::Later),
            3 => Just(DeliveryModelStep::Write),
            1 => Just(DeliveryModelStep::Snapshot),
            1 => (0..40usize).prop_map(DeliveryModelStep::Damaged),
        ]
    }

    /// A message of the simulated stream.
    enum ModelMessage {
        Events(AppendedMessages, PublishedBatch),
        Journal(Bytes),
    }

    #[derive(Default)]
    struct DeliveryModel {
        book: PartitionDeliveries,
        deliveries: BTreeMap<(SubscriptionId, Position), ModelState>,
        held: BTreeMap<SubscriptionId, Vec<Claim>>,
        entries: BTreeMap<u64, Arc<LogEntry>>,
        stored: Vec<ModelMessage>,
        snapshot: Option<(Vec<u8>, usize)>,
        closed: BTreeSet<SubscriptionId>,
        chunk: u64,
        now: i64,
    }

    impl DeliveryModel {
        fn take_held(&mut self, of: SubscriptionId, which: usize) -> Option<Claim> {
            let held = self.held.entry(of).or_default();
            (!held.is_empty()).then(|| held.swap_remove(which % held.len()))
        }

        fn claim(&self, position: Position, due: Option<Timestamp>, tried: &AttemptState) -> Claim {
            Claim {
                entry: self.entries[&sequence_of(position)].clone(),
                index: super::super::event_of(position),
                attempts_made: tried.attempts,
                last_attempt: tried.last,
                due,
            }
        }

        fn step(&mut self, step: DeliveryModelStep) {
            match step {
                DeliveryModelStep::Append(masks, new_chunk) => {
                    let ids: Vec<Vec<u64>> = masks
                        .iter()
                        .map(|m| (1..4).filter(|id| m >> id & 1 == 1).collect())
                        .collect();
                    let texts: Vec<(&str, &[u64])> = ids.iter().map(|ids| ("x", ids.as_slice())).collect();
                    let mut batch = events(&texts);
                    batch.received = at(self.now);
                    self.chunk += u64::from(new_chunk);
                    let sequence = self.stored.len() as u64 + 1;
                    let appended = AppendedMessages {
                        chunk: self.chunk,
                        first: sequence,
                        sequence,
                        bytes: 10,
                    };
                    let first = place(PARTITION, sequence, 0);
                    let mut ready = FxHashMap::default();
                    self.book.append(appended, [(first, &batch)], &mut ready);
                    let mut count = 0;
                    for (n, ids) in ids.iter().enumerate() {
                        for of in ids
                            .iter()
                            .map(|id| sub(*id))
                            .filter(|of| !self.closed.contains(of))
                        {
                            let key = (of, Position(first.0 + n as u64));
                            self.deliveries.insert(key, ModelState::Waiting);
                            count += 1;
                        }
                    }
                    assert_eq!(ready.values().sum::<usize>(), count);
                    let entry = LogEntry {
                        batch: batch.clone(),
                        first,
                        place: 0,
                    };
                    self.entries.insert(sequence, Arc::new(entry));
                    self.stored.push(ModelMessage::Events(appended, batch));
                }
                DeliveryModelStep::Claim(of, max) => {
                    let of = sub(of);
                    let held: BTreeSet<Position> = self
                        .held
                        .get(&of)
                        .into_iter()
                        .flatten()
                        .map(Claim::position)
                        .collect();
                    let free = |(key, stands): (&(SubscriptionId, Position), &ModelState)| {
                        (key.0 == of && !held.contains(&key.1)).then_some((key.1, *stands))
                    };
                    let mut due = BTreeSet::new();
                    let mut waiting = Vec::new();
                    for (position, stands) in self.deliveries.iter().filter_map(free) {
                        match stands {
                            ModelState::Retrying(time, _) if time <= at(self.now) => {
                                due.insert((time, position));
                            }
                            ModelState::Waiting => waiting.push(position),
                            _ => {}
                        }
                    }
                    let due: Vec<(Timestamp, Position)> = due.into_iter().collect();
                    assert_eq!(self.book.due_of(of, at(self.now), max), due[..due.len().min(max)]);
                    assert_eq!(self.book.waiting_of(of, max), waiting[..waiting.len().min(max)]);
                    let mut claimed = Vec::new();
                    let mut book = std::mem::take(&mut self.book);
                    for (due, position) in due.iter().take(max) {
                        let tried = book.claim_retry(of, *due, *position).unwrap();
                        claimed.push(self.claim(*position, Some(*due), &tried));
                    }
                    let retries = claimed.len();
                    assert_eq!(retries, due.len().min(max));
                    book.claim_waiting(of, |position| {
                        let take = claimed.len() < max;
                        claimed.extend(take.then(|| {
                            self.claim(
                                position,
                                None,
                                &AttemptState {
                                    attempts: 0,
                                    last: None,
                                },
                            )
                        }));
                        take
                    });
                    self.book = book;
                    let fresh: Vec<Position> = claimed[retries..].iter().map(Claim::position).collect();
                    assert_eq!(fresh, waiting[..fresh.len()]);
                    assert_eq!(claimed.len(), (due.len() + waiting.len()).min(max));
                    self.held.entry(of).or_default().extend(claimed);
                }
                DeliveryModelStep::Settle(of, all) => {
                    let of = sub(of);
                    let mut decided = Vec::new();
                    for (which, kind) in all {
                        let Some(claim) = self.take_held(of, which) else {
                            continue;
                        };
                        let key = (of, claim.position());
                        let time = at(self.now + i64::from(kind));
                        let mut one = settled(&claim, NextStep::Done);
                        one.at = time;
                        // A claim may be settled twice, or by an earlier claimant.
                        let known = self.deliveries.contains_key(&key);
                        match kind {
                            0..2 => {
                                self.deliveries.remove(&key);
                            }
                            2..4 => {
                                one.next = NextStep::RetryAt(time);
                                if known {
                                    self.deliveries
                                        .insert(key, ModelState::Retrying(time, one.attempts_made));
                                }
                            }
                            _ => {
                                one.next = NextStep::DeadLetter(match kind % 2 {
                                    0 => GiveUpReason::BadRequest,
                                    _ => GiveUpReason::TimeToLiveExceeded,
                                });
                                if known {
                                    let since = one.dead_letter_since();
                                    self.deliveries
                                        .insert(key, ModelState::GivenUp(since, one.attempts_made));
                                }
                            }
                        }
                        decided.push(one.clone());
                        decided.push(one);
                    }
                    self.book.settle(of, &decided);
                }
                DeliveryModelStep::Release(of, all) => {
                    let of = sub(of);
                    let claims: Vec<Claim> = all
                        .into_iter()
                        .filter_map(|which| self.take_held(of, which))
                        .collect();
                    self.book.release(of, &claims);
                    self.book.release(of, &claims);
                }
                DeliveryModelStep::Withdraw(of, count) => {
                    let of = sub(of);
                    let retries = self.deliveries.iter().filter_map(|(key, stands)| match stands {
                        ModelState::Retrying(due, _) if key.0 == of => Some((*due, key.1)),
                        _ => None,
                    });
                    let retries: Vec<_> = retries.take(count).collect();
                    let held: BTreeSet<Position> = self
                        .held
                        .get(&of)
                        .into_iter()
                        .flatten()
                        .map(Claim::position)
                        .collect();
                    let (ended, _) = self.book.withdraw(of, &retries);
                    let expected: Vec<Position> = retries
                        .iter()
                        .map(|(_, p)| *p)
                        .filter(|p| !held.contains(p))
                        .collect();
                    assert_eq!(ended, expected);
                    for position in ended {
                        self.deliveries.remove(&(of, position));
                    }
                }
                DeliveryModelStep::LettersDone(of, count) => {
                    let of = sub(of);
                    let letters = self.deliveries.iter().filter_map(|(key, stands)| match stands {
                        ModelState::GivenUp(decided, _) if key.0 == of => Some((*decided, key.1)),
                        _ => None,
                    });
                    let letters: Vec<DeadLetterKey> = letters.take(count).collect();
                    assert_eq!(self.book.letters_done(of, &letters), !letters.is_empty());
                    assert!(!self.book.letters_done(of, &letters));
                    for (_, position) in letters {
                        self.deliveries.remove(&(of, position));
                    }
                }
                DeliveryModelStep::Close(of) => {
                    let of = sub(of);
                    let held = self.held.remove(&of).unwrap_or_default().len();
                    let ours = self.deliveries.keys().filter(|key| key.0 == of).count();
                    assert_eq!(self.book.close(of), (ours - held) as u64);
                    assert_eq!(self.book.close(of), 0);
                    self.deliveries.retain(|key, _| key.0 != of);
                    self.closed.insert(of);
                }
                DeliveryModelStep::Later(secs) => self.now += secs,
                DeliveryModelStep::Write => {
                    let messages = self.book.journal.take(40);
                    self.stored
                        .extend(messages.into_iter().map(ModelMessage::Journal));
                }
                DeliveryModelStep::Snapshot => {
                    let finished = self.book.tidy();
                    // Chunks without references are removed from the stream.
                    let chunks: BTreeSet<u64> = finished.into_iter().collect();
                    for key in self.deliveries.keys() {
                        let ModelMessage::Events(appended, _) = &self.stored[sequence_of(key.1) as usize - 1]
                        else {
                            panic!("no event at {}", key.1)
                        };
                        assert!(
                            !chunks.contains(&appended.chunk),
                            "{key:?} is in a chunk that is finished"
                        );
                    }
                    self.chunk += 1;
                    self.snapshot = Some((snapshot::encode(&self.book), self.stored.len()));
                    self.book.note_claims();
                }
                DeliveryModelStep::Damaged(which) => {
                    let held: BTreeSet<u64> = self
                        .held
                        .values()
                        .flatten()
                        .map(|claim| sequence_of(claim.position()))
                        .collect();
                    let sequence = which as u64 + 1;
                    if !held.contains(&sequence) {
                        let before = self.deliveries.len();
                        self.deliveries.retain(|key, _| sequence_of(key.1) != sequence);
                        let dropped = self.book.drop_message(sequence);
                        assert_eq!(dropped, (before - self.deliveries.len()) as u64);
                    }
                }
            }
            self.check();
        }

        fn check(&self) {
            let mut retries = Vec::new();
            for of in (1..4).map(sub) {
                let held: BTreeSet<Position> = self
                    .held
                    .get(&of)
                    .into_iter()
                    .flatten()
                    .map(Claim::position)
                    .collect();
                let mut backlog = Backlog::default();
                let mut letters = BTreeMap::new();
                let mut oldest = Vec::new();
                let mut ours = Vec::new();
                for (key, stands) in self.deliveries.iter().filter(|(key, _)| key.0 == of) {
                    match stands {
                        ModelState::GivenUp(decided, attempts) => {
                            letters.insert((*decided, key.1), *attempts);
                            continue;
                        }
                        _ if held.contains(&key.1) => backlog.claimed += 1,
                        ModelState::Waiting => backlog.waiting += 1,
                        ModelState::Retrying(due, _) => {
                            backlog.retrying += 1;
                            ours.push(*due);
                        }
                    }
                    oldest.push(self.entries[&sequence_of(key.1)].batch.received);
                }
                retries.extend(ours.into_iter().min());
                backlog.oldest = oldest.into_iter().min();
                assert_eq!(self.book.backlog(of), backlog, "subscription {of}");
                let found = self.book.letters_of(of, None, Timestamp::MAX, 999);
                let found: Vec<_> = found
                    .into_iter()
                    .map(|(key, letter)| (key, letter.tried.attempts))
                    .collect();
                assert_eq!(found, letters.into_iter().collect::<Vec<_>>());
            }
            retries.sort();
            assert_eq!(self.book.next_due(), retries.first().copied());
            assert_eq!(
                self.book.claims_held(),
                self.held.values().map(|held| held.len() as u64).sum::<u64>()
            );
            let outstanding: u64 = self.book.chunks.0.values().map(|chunk| chunk.outstanding).sum();
            assert_eq!(outstanding, self.deliveries.len() as u64);
        }

        fn replay(&self, mut book: PartitionDeliveries, from: usize) -> PartitionDeliveries {
            for one in &self.stored[from..] {
                match one {
                    ModelMessage::Events(appended, batch) => {
                        let first = place(PARTITION, appended.sequence, 0);
                        book.append(*appended, [(first, batch)], &mut FxHashMap::default());
                    }
                    ModelMessage::Journal(message) => {
                        for record in journal::decode(PARTITION, message).unwrap() {
                            book.apply(&record);
                        }
                    }
                }
            }
            book
        }
    }

    type Dump = (
        Vec<(
            SubscriptionId,
            Vec<WaitingDelivery>,
            Vec<((Timestamp, Position), RetryingDelivery)>,
            Vec<(DeadLetterKey, DeadLetterState)>,
        )>,
        Option<Timestamp>,
    );

    fn dump(book: &PartitionDeliveries) -> Dump {
        let mut subs = Vec::new();
        for (of, sub) in &book.subs {
            let (waiting, retrying) = PartitionDeliveries::unclaimed(sub);
            let letters = sub.letters.iter().map(|(key, letter)| (*key, *letter)).collect();
            let all = (*of, waiting, retrying.into_iter().collect::<Vec<_>>(), letters);
            if !sub.is_empty() {
                subs.push(all);
            }
        }
        subs.sort_by_key(|sub| sub.0);
        (subs, book.next_due())
    }

    proptest! {
        // Compares the deliveries with a simple model, and then with what is rebuilt from journal
        // and snapshots.
        #[test]
        fn any_sequence_follows_the_model_and_can_be_read_again(steps in prop::collection::vec(any_step(), 0..120)) {
            let mut world = DeliveryModel::default();
            for step in steps {
                world.step(step);
            }
            world.step(DeliveryModelStep::Write);
            let again = world.replay(PartitionDeliveries::default(), 0);
            let held: usize = world.held.values().map(Vec::len).sum();
            let late = world.snapshot.take().map(|(bytes, from)| {
                world.replay(snapshot::decode(PARTITION, &bytes).unwrap(), from)
            });
            world.book.lapse();
            prop_assert_eq!(world.book.claims_held(), 0);
            let expected = dump(&world.book);
            prop_assert!(dump(&again) == expected, "held {}", held);
            let mut taken_over = again;
            prop_assert!(taken_over.begin() >= held as u64, "what was held is counted, all {}", held);
            let again = taken_over;
            let count = |book: &PartitionDeliveries| book.chunks.0.values().map(|chunk| chunk.outstanding).sum::<u64>();
            prop_assert_eq!(count(&again), count(&world.book));
            if let Some(mut late) = late {
                prop_assert!(late.begin() >= held as u64, "from the snapshot, held {}", held);
                prop_assert!(dump(&late) == expected, "from the snapshot, held {}", held);
                prop_assert_eq!(count(&late), count(&world.book));
            }
        }

        #[test]
        fn damaged_snapshots_never_panic(
            steps in prop::collection::vec(any_step(), 0..60),
            changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..4),
            cut in any::<usize>(),
        ) {
            let mut world = DeliveryModel::default();
            for step in steps {
                world.step(step);
            }
            let mut bytes = snapshot::encode(&world.book);
            let whole = snapshot::decode(PARTITION, &bytes).unwrap();
            prop_assert_eq!(snapshot::encode(&whole), bytes.clone());
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            bytes.truncate(bytes.len() - cut % bytes.len());
            let _ = snapshot::decode(PARTITION, &bytes);
        }
    }

    // The journal lags behind: deliveries made twice because of that must be counted, too.
    #[test]
    fn the_last_moments_of_an_owner_are_taken_to_be_like_those_before() {
        let again = |steps: &[DeliveryModelStep]| {
            let mut world = DeliveryModel::default();
            for step in steps {
                world.step(step.clone());
            }
            world.replay(PartitionDeliveries::default(), 0).begin()
        };
        let twenty = || DeliveryModelStep::Append(vec![1 << 1; 20], false);
        assert_eq!(again(&[twenty()]), 0, "nothing was handed out");
        for kind in [0, 3, 4] {
            let mut steps = vec![
                twenty(),
                DeliveryModelStep::Claim(1, 3),
                DeliveryModelStep::Settle(1, vec![(0, kind), (0, kind)]),
                DeliveryModelStep::Write,
            ];
            assert_eq!(again(&steps), 1 + 4 * 2);
            steps.extend([
                DeliveryModelStep::Claim(1, 4),
                DeliveryModelStep::Settle(1, vec![(0, kind); 5]),
            ]);
            assert_eq!(
                again(&steps),
                1 + 4 * 2,
                "what is not in the stream cannot be known"
            );
            steps.push(DeliveryModelStep::Write);
            assert_eq!(again(&steps), 20 - 7, "no more than there are");
            steps.extend([DeliveryModelStep::Claim(1, 2), DeliveryModelStep::Write]);
            assert_eq!(
                again(&steps),
                2,
                "nothing has ended since: that is all that was handed out"
            );
        }
        let mut steps = vec![
            DeliveryModelStep::Append(vec![1 << 1; 5], false),
            DeliveryModelStep::Claim(1, 5),
            DeliveryModelStep::Settle(1, vec![(0, 2), (0, 2), (0, 2), (0, 3), (0, 3)]),
            DeliveryModelStep::Later(2),
            DeliveryModelStep::Write,
        ];
        assert_eq!(again(&steps), 0);
        steps.extend([DeliveryModelStep::Claim(1, 1), DeliveryModelStep::Write]);
        assert_eq!(
            again(&steps),
            3,
            "those that were due with it, not those of a second later"
        );
    }

    #[test]
    fn a_snapshot_is_cut_and_put_together() {
        let bytes: Vec<u8> = (0..1_000u32).map(|n| n as u8).collect();
        let mut joined = Vec::new();
        let messages = snapshot::cut(&bytes, 300);
        for message in &messages {
            match snapshot::piece(message) {
                Some(snapshot::SnapshotMessage::Part(part)) => joined.extend_from_slice(&part),
                Some(snapshot::SnapshotMessage::Manifest(manifest)) => {
                    assert_eq!((manifest.parts, manifest.bytes), (4, 1_000));
                }
                None => panic!("neither a part nor a manifest"),
            }
        }
        assert_eq!((joined, messages.len()), (bytes, 5));
        assert_eq!(snapshot::piece(&Bytes::from_static(&[9, 1])), None);
        assert_eq!(snapshot::piece(&Bytes::new()), None);
    }
}
