//! The only writer of the state database: retries, dead letters, due times and progress.

use crate::queue::{DeliveryQueue, RetryKey};
use crate::segment::Segment;
use crate::state::{DeadLetterRow, RetryEntry, StateWrite};
use crate::{LogShared, SubscriptionState};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::NextStep;
use postrider_core::time::Timestamp;
use postrider_store::{DeadLetterKey, Error, Settlement};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// Minimum interval between commits, so that they do not compete with the log's own.
const COMMIT_EVERY: Duration = Duration::from_millis(10);
/// Maximum number of requests in one commit.
const COMMIT_REQUESTS_MAX: usize = 8192;
/// Delay before a failed commit is repeated.
const RETRY_EVERY: Duration = Duration::from_millis(250);

pub enum SettlerRequest {
    Settle(Arc<SubscriptionState>, Vec<Settlement>, OwnedSemaphorePermit),
    Withdraw(Withdrawal),
    Open(Arc<SubscriptionState>, oneshot::Sender<()>),
    /// Closes a subscription; replies with the number of deliveries that drops.
    Forget(Arc<SubscriptionState>, oneshot::Sender<u64>),
    /// Retries whose events cannot be read any more.
    Lost(Arc<SubscriptionState>, Vec<RetryEntry>),
    /// Dead letters that are written, or whose events cannot be read any more.
    LettersDone(Arc<SubscriptionState>, Vec<DeadLetterKey>, oneshot::Sender<()>),
    Seal(Arc<Segment>),
    Checkpoint,
    /// Commits immediately, including the progress of first attempts.
    Flush(oneshot::Sender<()>),
    Close(oneshot::Sender<()>),
}

/// Retries to end if they still wait; the reply contains those that did.
pub struct Withdrawal {
    pub sub: Arc<SubscriptionState>,
    pub waiting: Vec<RetryKey>,
    pub reply: oneshot::Sender<Vec<Position>>,
    pub permit: OwnedSemaphorePermit,
}

pub struct Settler {
    pub shared: Arc<LogShared>,
    pub requests: Receiver<SettlerRequest>,
}

/// Update of the memory once the commit is on disk.
enum CommitEffect {
    /// The consequence of a first attempt is recorded.
    Complete(Position),
    /// A retry entry has been removed.
    LetGo(Timestamp, Position),
    RetryAdded(Timestamp, Position),
}

/// A subscription affected by this commit.
struct TouchedSubscription {
    sub: Arc<SubscriptionState>,
    after: Vec<CommitEffect>,
    /// First attempts settled by this commit.
    done: FxHashSet<Position>,
}

/// `None` for a closed subscription: nobody would ever remove what is recorded for it now.
fn touch(
    touched: &mut FxHashMap<SubscriptionId, TouchedSubscription>,
    sub: Arc<SubscriptionState>,
) -> Option<&mut TouchedSubscription> {
    if sub.queue.lock().expect("no panic holds it").closed {
        return None;
    }
    Some(touched.entry(sub.of).or_insert_with(|| TouchedSubscription {
        sub,
        after: Vec::new(),
        done: FxHashSet::default(),
    }))
}

#[expect(
    clippy::disallowed_methods,
    reason = "paces a thread's own work; no rule depends on it"
)]
fn instant() -> Instant {
    Instant::now()
}

impl Settler {
    pub fn run(self) {
        let mut unsealed: Vec<Arc<Segment>> = Vec::new();
        loop {
            let first = if unsealed.is_empty() {
                self.requests.recv().ok()
            } else {
                match self.requests.recv_timeout(RETRY_EVERY) {
                    Ok(message) => Some(message),
                    Err(RecvTimeoutError::Timeout) => Some(SettlerRequest::Checkpoint),
                    Err(RecvTimeoutError::Disconnected) => None,
                }
            };
            let Some(first) = first else { return };
            let started = instant();
            let mut until_commit = COMMIT_EVERY;
            let mut batch = vec![first];
            while batch.len() < COMMIT_REQUESTS_MAX {
                match batch.last() {
                    Some(SettlerRequest::Close(_)) => break,
                    // A caller waits for these, so commit now, with everything that is queued
                    // already.
                    Some(
                        SettlerRequest::Flush(_)
                        | SettlerRequest::Open(..)
                        | SettlerRequest::Forget(..)
                        | SettlerRequest::LettersDone(..)
                        | SettlerRequest::Withdraw(_),
                    ) => until_commit = Duration::ZERO,
                    _ => {}
                }
                match self
                    .requests
                    .recv_timeout(until_commit.saturating_sub(started.elapsed()))
                {
                    Ok(message) => batch.push(message),
                    Err(_) => break,
                }
            }
            if self.commit(batch, &mut unsealed) {
                return;
            }
        }
    }

    /// Records a batch of requests. Returns true if it was the last one.
    fn commit(&self, batch: Vec<SettlerRequest>, unsealed: &mut Vec<Arc<Segment>>) -> bool {
        let mut writes = Vec::new();
        let mut touched: FxHashMap<SubscriptionId, TouchedSubscription> = FxHashMap::default();
        let mut permits = Vec::new();
        let mut replies = Vec::new();
        let mut withdrawals = Vec::new();
        let mut forgotten = Vec::new();
        let mut letters_done = false;
        let mut checkpoint = false;
        let mut flush = false;
        let mut close = false;
        for message in batch {
            match message {
                SettlerRequest::Settle(sub, settled, permit) => {
                    permits.push(permit);
                    if let Some(touched) = touch(&mut touched, sub) {
                        for one in &settled {
                            self.record(touched, one, &mut writes);
                        }
                    }
                }
                SettlerRequest::Lost(sub, retries) => {
                    if let Some(touched) = touch(&mut touched, sub) {
                        for one in retries {
                            writes.push(StateWrite::RemoveRetry(
                                touched.sub.of,
                                one.due,
                                one.position,
                                one.segment,
                            ));
                            touched.after.push(CommitEffect::LetGo(one.due, one.position));
                        }
                    }
                }
                SettlerRequest::LettersDone(sub, letters, reply) => {
                    writes.push(StateWrite::RemoveLetters(sub.of, letters));
                    replies.push(reply);
                    letters_done = true;
                }
                SettlerRequest::Withdraw(withdrawal) => withdrawals.push(withdrawal),
                SettlerRequest::Open(sub, reply) => {
                    let progress = sub
                        .queue
                        .lock()
                        .expect("no panic holds it")
                        .progress(&FxHashSet::default());
                    writes.push(StateWrite::Cursor(sub.of, progress));
                    replies.push(reply);
                }
                SettlerRequest::Forget(sub, reply) => {
                    forgotten.push((sub, reply));
                }
                SettlerRequest::Seal(segment) => {
                    unsealed.push(segment);
                    checkpoint = true;
                }
                SettlerRequest::Checkpoint => checkpoint = true,
                SettlerRequest::Flush(reply) => {
                    replies.push(reply);
                    flush = true;
                }
                SettlerRequest::Close(reply) => {
                    replies.push(reply);
                    checkpoint = true;
                    close = true;
                }
            }
        }
        if checkpoint || flush {
            self.write_progress(&mut writes);
        }
        for touched in touched.values() {
            // In the same commit as the consequences of the attempts: otherwise a crash would
            // repeat the attempts.
            let queue = touched.sub.queue.lock().expect("no panic holds it");
            if !queue.closed {
                writes.push(StateWrite::Cursor(touched.sub.of, queue.progress(&touched.done)));
            }
        }
        let letters_added = writes
            .iter()
            .any(|write| matches!(write, StateWrite::PutLetter(..)));
        let mut released = false;
        if !writes.is_empty() {
            match self.write_until_done(&writes, close) {
                Some(segments_released) => released = segments_released,
                None => return close,
            }
        }
        for touched in touched.into_values() {
            let mut freed = 0;
            self.shared.settled(&touched.sub, |queue| {
                for one in touched.after {
                    match one {
                        CommitEffect::Complete(position) => freed += queue.complete(position),
                        CommitEffect::LetGo(due, position) => queue.let_go(due, position),
                        CommitEffect::RetryAdded(due, position) => queue.retry_added(due, position),
                    }
                }
            });
            self.shared.hot_bytes.fetch_sub(freed, Relaxed);
        }
        drop(permits);
        if !self.withdraw(withdrawals, close) {
            return close;
        }
        if letters_added && let Some(listener) = self.shared.listener.get() {
            listener.dead_letters_added();
        }
        // Sweep now if space may be released: without events there may be no checkpoint for a long
        // time.
        let sweep = checkpoint || !forgotten.is_empty() || (letters_done && released);
        if !self.forget(forgotten, close) {
            return close;
        }
        unsealed.retain(|segment| self.shared.is_current(segment));
        unsealed.retain(|segment| match segment.seal(&*self.shared.disk) {
            Ok(()) => false,
            Err(e) => {
                tracing::warn!(?segment, error = %e, "cannot write a segment's index; trying again");
                true
            }
        });
        if sweep {
            self.shared.sweep();
        }
        if checkpoint && !close {
            self.shared.prepare_spare();
        }
        for reply in replies {
            let _ = reply.send(());
        }
        close
    }

    /// Ends waiting retries, after earlier settlements are recorded, so that their retries are
    /// found.
    fn withdraw(&self, withdrawals: Vec<Withdrawal>, closing: bool) -> bool {
        let mut writes = Vec::new();
        let mut found = Vec::new();
        for Withdrawal {
            sub,
            waiting,
            reply,
            permit,
        } in withdrawals
        {
            let begun = sub.queue.lock().expect("no panic holds it").withdraw(&waiting);
            // Read before removal: after a failed commit it may be unclear whether the rows were
            // removed.
            let Some(retries) = self.until_done(closing, || self.shared.state.retries(sub.of, &begun)) else {
                return false;
            };
            for one in &retries {
                writes.push(StateWrite::RemoveRetry(
                    sub.of,
                    one.due,
                    one.position,
                    one.segment,
                ));
            }
            found.push((sub, begun, retries, reply, permit));
        }
        if !writes.is_empty() && self.write_until_done(&writes, closing).is_none() {
            return false;
        }
        for (sub, begun, retries, reply, _permit) in found {
            let removed: FxHashSet<RetryKey> = retries.iter().map(|one| (one.due, one.position)).collect();
            if !begun.is_empty() {
                self.shared.settled(&sub, |queue| {
                    for key in begun {
                        queue.withdrawn(key, removed.contains(&key));
                    }
                });
                self.shared.read_head(&sub);
            }
            // The caller may have gone away; the retries are withdrawn all the same.
            let _ = reply.send(retries.iter().map(|one| one.position).collect());
        }
        true
    }

    /// Closes subscriptions, after earlier settlements are recorded, so that their retries and dead
    /// letters are counted.
    fn forget(&self, forgotten: Vec<(Arc<SubscriptionState>, oneshot::Sender<u64>)>, closing: bool) -> bool {
        if forgotten.is_empty() {
            return true;
        }
        let mut writes = Vec::new();
        let mut replies = Vec::new();
        for (sub, reply) in forgotten {
            let (dropped, bytes) = self.shared.change(&sub, DeliveryQueue::close);
            self.shared
                .subs
                .write()
                .expect("no panic holds it")
                .remove(&sub.of);
            self.shared.hot_bytes.fetch_sub(bytes, Relaxed);
            let letters = self.shared.letters.lock().expect("no panic holds it");
            let letters = letters.get(&sub.of).map_or(0, |waiting| waiting.1);
            writes.push(StateWrite::Forget(sub.of));
            replies.push((reply, dropped + letters));
        }
        let written = self.write_until_done(&writes, closing).is_some();
        if written {
            for (reply, dropped) in replies {
                let _ = reply.send(dropped);
            }
        }
        written
    }

    /// Adds what a settled claim means for the disk and, after the commit, for the memory.
    fn record(&self, touched: &mut TouchedSubscription, settled: &Settlement, writes: &mut Vec<StateWrite>) {
        let TouchedSubscription { sub, after, done } = touched;
        let claim = &settled.claim;
        let position = claim.position();
        let Some(segment) = self.shared.segment_of(position) else {
            return;
        };
        let entry = RetryEntry {
            due: Timestamp::MIN,
            position,
            attempts_made: settled.attempts_made,
            last: settled.last_attempt,
            segment: segment.base,
            offset: claim.entry.place as u32,
            index: claim.index,
            received: claim.received(),
        };
        match claim.due {
            Some(due) => {
                writes.push(StateWrite::RemoveRetry(sub.of, due, position, segment.base));
                after.push(CommitEffect::LetGo(due, position));
            }
            None => {
                done.insert(position);
                after.push(CommitEffect::Complete(position));
            }
        }
        match settled.next {
            NextStep::RetryAt(due) => {
                writes.push(StateWrite::PutRetry(sub.of, RetryEntry { due, ..entry }));
                after.push(CommitEffect::RetryAdded(due, position));
            }
            NextStep::DeadLetter(reason) => {
                let delivery = RetryEntry {
                    due: settled.dead_letter_since(),
                    ..entry
                };
                writes.push(StateWrite::PutLetter(sub.of, DeadLetterRow { delivery, reason }));
            }
            NextStep::Done | NextStep::Drop(_) => {}
        }
    }

    fn write_progress(&self, writes: &mut Vec<StateWrite>) {
        // Determine where to replay from before reading the progress: settlements in between are
        // then in both.
        let replay_from = self.shared.last_segment_base();
        let next = Position(self.shared.next.load(Relaxed));
        for sub in self.shared.take_rows() {
            let queue = sub.queue.lock().expect("no panic holds it");
            if !queue.closed {
                writes.push(StateWrite::Cursor(sub.of, queue.progress(&FxHashSet::default())));
            }
        }
        writes.push(StateWrite::Segments(self.shared.take_unrecorded()));
        if let Some(empty) = self.shared.empty_at_end() {
            writes.push(StateWrite::SegmentsGone(vec![empty]));
        }
        let damage = self.shared.take_unrecorded_damage();
        if !damage.is_empty() {
            writes.push(StateWrite::Losses(damage));
        }
        writes.push(StateWrite::Facts { next, replay_from });
    }

    /// Returns whether there are segments that nothing refers to any more; `None` like
    /// `until_done`.
    fn write_until_done(&self, writes: &[StateWrite], closing: bool) -> Option<bool> {
        let changed = self.until_done(closing, || self.shared.state.write(writes))?;
        self.shared.note_letters(changed.letters);
        self.shared.note_oldest_retries(changed.oldest_retries);
        Some(self.shared.note_references(changed.references))
    }

    /// Repeats `work` until it succeeds, because no settlement may be forgotten while the process
    /// lives. `None` if the store is closing and the work fails.
    fn until_done<T>(&self, closing: bool, work: impl Fn() -> Result<T, Error>) -> Option<T> {
        let mut reported = false;
        loop {
            match work() {
                Ok(done) => {
                    if reported {
                        tracing::info!("the state database can be used again");
                        self.shared.set_state_trouble(None);
                    }
                    return Some(done);
                }
                Err(e) => {
                    if !reported {
                        tracing::error!(error = %e, "cannot record what was settled; trying again");
                        reported = true;
                        self.shared.set_state_trouble(Some(e.to_string()));
                    }
                    self.shared.note_state_error(&e);
                    if closing || self.shared.closing.load(Relaxed) {
                        return None;
                    }
                    self.shared.sweep_without_state();
                    if let Err(Error::Unavailable(e)) = self.shared.state.reopen() {
                        tracing::debug!(error = %e, "cannot open the state database again yet");
                    }
                    std::thread::sleep(RETRY_EVERY);
                }
            }
        }
    }
}
