//! The queue of one subscription: events in memory, events still in the log, claims, retries.

use crate::record::SubscriptionProgress;
use crate::state::RetryEntry;
use postrider_core::ids::Position;
use postrider_core::time::Timestamp;
use postrider_store::{Backlog, ClaimLimits, LogEntry};
use rustc_hash::FxHashSet;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum bytes of waiting events that a subscription keeps in memory; the rest stays in the log.
pub const HOT_BYTES_PER_SUBSCRIPTION_MAX: usize = 4 << 20;
/// Maximum for all subscriptions together.
pub const HOT_BYTES_MAX: usize = 48 << 20;

/// An event in memory, ready to be claimed.
#[derive(Clone, Debug)]
pub struct ReadyEvent {
    pub entry: Arc<LogEntry>,
    pub index: u32,
}

impl ReadyEvent {
    pub fn position(&self) -> Position {
        Position(self.entry.first.0 + u64::from(self.index))
    }

    fn received(&self) -> Timestamp {
        self.entry.batch.received
    }

    pub fn size(&self) -> usize {
        self.entry.batch.events[self.index as usize].object.len as usize
    }

    /// Memory that the whole publish request takes: it is kept for as long as any of its events is.
    pub fn entry_size(&self) -> usize {
        let batch = &self.entry.batch;
        batch.body.len() + std::mem::size_of_val(&*batch.events)
    }

    pub fn is_of_entry(&self, other: &ReadyEvent) -> bool {
        self.entry.first == other.entry.first
    }
}

/// Identifies a retry of a subscription: its due time and its event.
pub type RetryKey = (Timestamp, Position);

/// A due retry with its event.
#[derive(Clone, Debug)]
pub struct DueRetry {
    pub ready: ReadyEvent,
    pub retry: RetryEntry,
    /// Set for a retry whose request was read from the log for it.
    pub loaded: Option<Arc<LoadedBytes>>,
}

/// Counts a request that was read from the log, for as long as a retry that it was read for waits to be claimed. What is
/// claimed counts in the engine's budget.
#[derive(Debug)]
pub struct LoadedBytes {
    bytes: usize,
    total: Arc<AtomicUsize>,
}

impl LoadedBytes {
    pub fn new(bytes: usize, total: &Arc<AtomicUsize>) -> LoadedBytes {
        total.fetch_add(bytes, Relaxed);
        LoadedBytes {
            bytes,
            total: total.clone(),
        }
    }
}

impl Drop for LoadedBytes {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Relaxed);
    }
}

impl DueRetry {
    fn key(&self) -> RetryKey {
        (self.retry.due, self.ready.position())
    }
}

#[derive(Debug)]
pub struct DeliveryQueue {
    /// Everything below is claimed or settled, except for the positions in `open`.
    frontier: Position,
    /// First attempts that are claimed, or were claimed when the server stopped, and are not
    /// settled, each with the time its event was received; `Timestamp::MAX` if unknown.
    open: BTreeMap<Position, Timestamp>,
    /// The part of `open` that is not held since a restart or a release; these are offered again.
    lapsed: BTreeSet<Position>,
    /// Ordered by position.
    hot: VecDeque<ReadyEvent>,
    /// Bytes of the publish requests that events in `hot` belong to, each counted once.
    hot_bytes: usize,
    /// Every matching event below has been in `hot`, or cannot be read.
    seen: Position,
    /// Where to continue reading in the log, if not everything is in `hot`.
    lag: Option<Position>,
    /// Lower bound of the time at which events from `lag` on were received, if known.
    lag_since: Option<Timestamp>,
    /// The last matching event that was handed out. Later events in the log must not be read yet
    /// because they will still be pushed.
    last: Option<Position>,
    waiting: u64,
    pub loading: bool,
    pub closed: bool,
    /// Due retries in memory, ordered by due time.
    due: VecDeque<DueRetry>,
    /// Retries loaded or claimed, so that they are not loaded twice.
    held: FxHashSet<RetryKey>,
    /// Retries that are about to be removed from the disk: neither loaded nor claimed any more.
    withdrawing: FxHashSet<RetryKey>,
    /// The part of `held` that was let go while retries are being loaded: the load may still find
    /// them.
    let_go_late: FxHashSet<RetryKey>,
    /// The earliest retry added while retries are being loaded: the load may have missed it.
    added_late: Option<Timestamp>,
    /// Number of all retries, including claimed ones.
    retrying: u64,
    /// When the event of the oldest retry was received.
    pub oldest_retry: Option<Timestamp>,
    /// Due time of the earliest retry that is not held.
    pub retry_head: Option<Timestamp>,
    /// The retry behind `retry_head` may be held or withdrawn: it has to be read from the disk
    /// again.
    head_outdated: bool,
    /// Counts changes that affect a concurrent read of `retry_head` from the disk.
    head_changes: u64,
    /// Queued for the next progress record in the log.
    pub listed: bool,
    /// Queued for the next checkpoint of progress in the state database.
    pub listed_row: bool,
    loading_due: bool,
    /// Set while nothing is being claimed; events are then not kept in memory.
    resting: bool,
}

impl DeliveryQueue {
    pub fn new(progress: SubscriptionProgress) -> DeliveryQueue {
        let open = progress.open.iter().map(|position| (*position, Timestamp::MAX));
        DeliveryQueue {
            frontier: progress.frontier,
            open: open.collect(),
            lapsed: progress.open.into_iter().collect(),
            hot: VecDeque::new(),
            hot_bytes: 0,
            seen: progress.frontier,
            lag: None,
            lag_since: None,
            last: None,
            waiting: 0,
            loading: false,
            closed: false,
            due: VecDeque::new(),
            held: FxHashSet::default(),
            withdrawing: FxHashSet::default(),
            let_go_late: FxHashSet::default(),
            added_late: None,
            retrying: 0,
            oldest_retry: None,
            retry_head: None,
            head_outdated: false,
            head_changes: 0,
            listed: false,
            listed_row: false,
            loading_due: false,
            resting: false,
        }
    }

    /// Initializes first attempts after a start: the log has `waiting` events for this
    /// subscription, none after `last`; the first was received at `since`, if that could be read.
    pub fn recovered(&mut self, waiting: u64, last: Position, since: Option<Timestamp>) {
        let last = self
            .open
            .last_key_value()
            .map_or(last, |(open, _)| last.max(*open));
        self.lag_since = since;
        self.waiting = waiting;
        self.last = Some(last);
        self.lag = Some(self.lowest());
    }

    /// Initializes retries after a start: `count` retries wait, the first one until `head`.
    pub fn recovered_retries(&mut self, count: u64, head: Timestamp) {
        self.retrying = count;
        self.retry_head = Some(head);
    }

    /// Whether a position still has to be offered.
    pub fn wants(&self, position: Position) -> bool {
        position >= self.frontier || self.lapsed.contains(&position)
    }

    /// Whether the first attempt at a position is still to be made or settled.
    pub fn is_open(&self, position: Position) -> bool {
        !self.closed && (position >= self.frontier || self.open.contains_key(&position))
    }

    /// The lowest position whose first attempt is not settled.
    pub fn lowest(&self) -> Position {
        self.open
            .first_key_value()
            .map_or(self.frontier, |(position, _)| *position)
    }

    /// Whether any first attempt at or below `last`, a matching event, is still to be made or
    /// settled.
    pub fn needs(&self, last: Position) -> bool {
        !self.closed && self.lowest() <= last
    }

    /// Keeps a new event in memory if there is room. Returns the bytes that takes.
    pub fn push(&mut self, ready: ReadyEvent, room: bool) -> usize {
        let position = ready.position();
        if position < self.frontier {
            // Published before the subscription was opened.
            return 0;
        }
        self.last = Some(position);
        self.waiting += 1;
        if self.lag.is_some() {
            return 0;
        }
        let size = match self.hot.back() {
            Some(last) if last.is_of_entry(&ready) => 0,
            _ => ready.entry_size(),
        };
        if !room || self.resting || self.hot_bytes + size > HOT_BYTES_PER_SUBSCRIPTION_MAX {
            self.lag = Some(position);
            self.lag_since = Some(ready.received());
            return 0;
        }
        self.seen = Position(position.0 + 1);
        self.put_hot(self.hot.len(), ready)
    }

    /// Inserts an event into `hot`. Returns the bytes that takes.
    fn put_hot(&mut self, at: usize, ready: ReadyEvent) -> usize {
        let before = at.checked_sub(1).and_then(|before| self.hot.get(before));
        let mut neighbours = before.into_iter().chain(self.hot.get(at));
        let bytes = match neighbours.any(|other| other.is_of_entry(&ready)) {
            true => 0,
            false => ready.entry_size(),
        };
        self.hot_bytes += bytes;
        self.hot.insert(at, ready);
        bytes
    }

    /// Removes the first event from `hot`. Also returns the bytes that frees.
    fn take_hot(&mut self) -> Option<(ReadyEvent, usize)> {
        let first = self.hot.pop_front()?;
        let bytes = match self.hot.front() {
            Some(next) if next.is_of_entry(&first) => 0,
            _ => first.entry_size(),
        };
        self.hot_bytes -= bytes;
        Some((first, bytes))
    }

    /// The range of the log that must be read before more can be claimed: from where, and the last
    /// event.
    pub fn must_load(&self) -> Option<(Position, Position)> {
        let needed = self.hot.is_empty() && !self.loading && !self.closed;
        needed.then_some((self.lag?, self.last?))
    }

    /// Adds what was read from the log between `from` and `upto`. Returns the bytes that takes.
    pub fn loaded(&mut self, ready: Vec<ReadyEvent>, from: Position, upto: Position) -> usize {
        if self.closed {
            return 0;
        }
        let mut bytes = 0;
        for ready in ready {
            bytes += self.put_hot(self.hot.len(), ready);
        }
        // Events that were expected and not found can never be offered: their records are damaged.
        let lapsed: Vec<Position> = self.lapsed.range(from..upto).copied().collect();
        for position in lapsed {
            if self
                .hot
                .binary_search_by_key(&position, ReadyEvent::position)
                .is_err()
            {
                self.lapsed.remove(&position);
                self.open.remove(&position);
            }
        }
        self.seen = self.seen.max(upto);
        // Appends that were skipped meanwhile have raised `last`; then the log must be read
        // further.
        self.lag = self.last.is_some_and(|last| upto <= last).then_some(upto);
        if self.lag.is_none() {
            // Everything that waits is in memory now; damaged records may have been counted before.
            self.waiting = self.hot.len() as u64;
        }
        self.advance();
        bytes
    }

    /// Notes that nothing will be claimed for a while and drops events from memory until then. They
    /// are read from the log again when needed. Returns the bytes that frees.
    pub fn rest(&mut self) -> usize {
        self.resting = true;
        self.spill_due();
        self.spill()
    }

    /// Drops due retries that were loaded and not claimed.
    fn spill_due(&mut self) {
        // A load in progress relies on these retries being in memory: what it brings comes after
        // them.
        if self.loading_due || self.closed {
            return;
        }
        let Some(first) = self.due.front().map(|first| first.retry.due) else {
            return;
        };
        for due in std::mem::take(&mut self.due) {
            self.held.remove(&due.key());
        }
        self.retry_head = Some(self.retry_head.map_or(first, |head| head.min(first)));
        self.head_changes += 1;
    }

    fn spill(&mut self) -> usize {
        // With events claimed or being loaded, a release or the load would insert at the wrong
        // place.
        let claimed = self.open.len() > self.lapsed.len();
        if !self.resting || claimed || self.loading || self.closed {
            return 0;
        }
        let Some((first, since)) = self.hot.front().map(|first| (first.position(), first.received())) else {
            return 0;
        };
        self.lag = Some(first);
        self.lag_since = Some(since);
        self.seen = first;
        self.hot = VecDeque::new();
        std::mem::take(&mut self.hot_bytes)
    }

    /// With `hot` empty, the frontier passes events that cannot be read.
    fn advance(&mut self) {
        if self.hot.is_empty() {
            self.frontier = self.frontier.max(self.seen);
        }
    }

    /// Claims due retries and first attempts. Returns them and the bytes that frees.
    pub fn claim(&mut self, now: Timestamp, want: ClaimLimits) -> (Vec<DueRetry>, Vec<ReadyEvent>, usize) {
        self.resting = false;
        let mut events = 0;
        let mut bytes = 0;
        let mut fits = |size: usize| {
            let size = size + want.overhead;
            let fits = events < want.events_max && (events == 0 || bytes + size <= want.bytes_max);
            if fits {
                events += 1;
                bytes += size;
            }
            fits
        };
        let mut retries = Vec::new();
        let is_due = |due: &DueRetry| due.retry.due <= now;
        while self
            .due
            .front()
            .is_some_and(|due| is_due(due) && fits(due.ready.size()))
        {
            retries.extend(self.due.pop_front());
        }
        let mut fresh = Vec::new();
        let mut freed = 0;
        if self.due.front().is_some_and(is_due) {
            // The next due retry does not fit into this claim; first attempts must not overtake it.
            return (retries, fresh, freed);
        }
        while self.hot.front().is_some_and(|ready| fits(ready.size())) {
            let (ready, bytes) = self.take_hot().expect("just seen");
            freed += bytes;
            let position = ready.position();
            if position >= self.frontier {
                self.frontier = Position(position.0 + 1);
            } else {
                self.lapsed.remove(&position);
            }
            self.open.insert(position, ready.received());
            // Later events, in memory or not, were received later.
            self.lag_since = Some(ready.received());
            self.waiting = self.waiting.saturating_sub(1);
            fresh.push(ready);
        }
        self.advance();
        (retries, fresh, freed)
    }

    /// Puts unattempted claims of first attempts back in their old order. Returns the bytes that
    /// takes.
    pub fn release(&mut self, ready: Vec<ReadyEvent>) -> usize {
        let mut bytes = 0;
        for ready in ready {
            let position = ready.position();
            if !self.open.contains_key(&position) || !self.lapsed.insert(position) {
                continue;
            }
            self.waiting += 1;
            let at = self.hot.partition_point(|other| other.position() < position);
            bytes += self.put_hot(at, ready);
        }
        bytes
    }

    /// A first attempt is settled, or its retry is now on disk. Returns the bytes that frees.
    pub fn complete(&mut self, position: Position) -> usize {
        // The claim may have been released since; then its settlement changes nothing.
        if !self.lapsed.contains(&position) {
            self.open.remove(&position);
        }
        self.spill()
    }

    /// The progress as if these first attempts were settled as well.
    pub fn progress(&self, without: &FxHashSet<Position>) -> SubscriptionProgress {
        let open = self.open.keys().filter(|p| !without.contains(p));
        SubscriptionProgress {
            frontier: self.frontier,
            open: open.copied().collect(),
        }
    }

    /// Whether a retry must not be loaded: it is already loaded, claimed, or being withdrawn.
    pub fn is_held(&self, due: Timestamp, position: Position) -> bool {
        self.held.contains(&(due, position)) || self.withdrawing.contains(&(due, position))
    }

    /// Whether something can be claimed, immediately or after reading the log, or will be due.
    pub fn has_work(&self) -> bool {
        self.waiting > 0 || self.lag.is_some() || self.retrying > 0
    }

    /// Whether retries must be loaded before more can be claimed.
    pub fn must_load_due(&self, now: Timestamp) -> bool {
        self.due.is_empty() && !self.loading_due && self.retry_head.is_some_and(|head| head <= now)
    }

    pub fn load_due(&mut self) {
        self.loading_due = true;
        self.added_late = None;
        // Withdrawals from now on set the flag again.
        self.head_outdated = false;
        self.head_changes += 1;
    }

    /// Ends a load: holds the loaded and the unreadable retries, except those withdrawn meanwhile,
    /// and queues the loaded ones. `head` is the due time of the next one after them. Leaves in
    /// both lists what was accepted.
    pub fn loaded_due(
        &mut self,
        due: &mut Vec<DueRetry>,
        lost: &mut Vec<RetryEntry>,
        head: Option<Timestamp>,
    ) {
        let DeliveryQueue {
            held, withdrawing, ..
        } = self;
        let mut take = |key: RetryKey| !withdrawing.contains(&key) && held.insert(key);
        lost.retain(|retry| take((retry.due, retry.position)));
        due.retain(|one| take(one.key()));
        self.due.extend(due.iter().cloned());
        self.retry_head = head;
        self.loading_due_ended();
    }

    /// Must also be called when loading failed.
    pub fn loading_due_ended(&mut self) {
        self.loading_due = false;
        self.head_changes += 1;
        for key in std::mem::take(&mut self.let_go_late) {
            self.held.remove(&key);
        }
        if let Some(due) = self.added_late.take()
            && self.retry_head.is_none_or(|head| due < head)
        {
            self.retry_head = Some(due);
            // If the load has found the added retry after all, it is held now and `retry_head` is
            // wrong.
            self.head_outdated = true;
        }
    }

    /// Puts back a retry that was claimed but not attempted.
    pub fn release_due(&mut self, due: DueRetry) {
        let here = due.key();
        let before = self.due.partition_point(|other| other.key() < here);
        if self.held.contains(&here) && self.due.get(before).is_none_or(|other| other.key() != here) {
            self.due.insert(before, due);
        }
    }

    /// Begins to withdraw those of these retries that are not claimed: from now on they are not
    /// offered. Returns them; some of them may not exist on disk.
    pub fn withdraw(&mut self, waiting: &[RetryKey]) -> Vec<RetryKey> {
        if self.closed {
            return Vec::new();
        }
        let loaded: FxHashSet<RetryKey> = self.due.iter().map(DueRetry::key).collect();
        let mut begun = Vec::new();
        for &key in waiting {
            // A retry in `let_go_late` can be on disk again: it failed again and is due at the same
            // time.
            let claimed =
                self.held.contains(&key) && !loaded.contains(&key) && !self.let_go_late.contains(&key);
            if !claimed && self.withdrawing.insert(key) {
                begun.push(key);
            }
            if loaded.contains(&key) {
                self.held.remove(&key);
            }
        }
        let DeliveryQueue { due, withdrawing, .. } = self;
        due.retain(|one| !withdrawing.contains(&one.key()));
        self.head_changes += 1;
        begun
    }

    /// Ends a withdrawal; `removed` if the retry was on disk and has been deleted.
    pub fn withdrawn(&mut self, key: RetryKey, removed: bool) {
        self.withdrawing.remove(&key);
        self.head_changes += 1;
        if !removed || self.closed {
            return;
        }
        self.retrying = self.retrying.saturating_sub(1);
        if self.loading_due {
            // The load may have found the retry, and may have taken it for the next due one.
            self.held.insert(key);
            self.let_go_late.insert(key);
            self.head_outdated = true;
        } else {
            self.head_outdated |= self.retry_head == Some(key.0);
        }
    }

    /// Returns the change counter if `retry_head` must be read from the disk again. During a load
    /// that is not necessary: the loading task checks again afterwards.
    pub fn must_read_head(&self) -> Option<u64> {
        (self.head_outdated && !self.loading_due && !self.closed).then_some(self.head_changes)
    }

    /// Sets `retry_head` to what was read, unless something has changed since `must_read_head`.
    pub fn head_read(&mut self, head: Option<Timestamp>, changes: u64) {
        if self.must_read_head() == Some(changes) {
            self.retry_head = head;
            self.head_outdated = false;
        }
    }

    /// A retry is settled and its entry is deleted from the disk.
    pub fn let_go(&mut self, due: Timestamp, position: Position) {
        self.retrying = self.retrying.saturating_sub(1);
        self.head_changes += 1;
        if self.loading_due {
            self.let_go_late.insert((due, position));
        } else {
            self.held.remove(&(due, position));
        }
    }

    /// A retry has been written to the disk.
    pub fn retry_added(&mut self, due: Timestamp, position: Position) {
        let earlier = |than: Option<Timestamp>| Some(than.map_or(due, |other| other.min(due)));
        let key = (due, position);
        self.retrying += 1;
        self.head_changes += 1;
        if self.held.contains(&key) && !self.let_go_late.contains(&key) {
            // A load has found the retry already, after it was written and before this call.
            return;
        }
        self.retry_head = earlier(self.retry_head);
        if self.loading_due {
            self.added_late = earlier(self.added_late);
        }
    }

    fn retries_claimed(&self) -> u64 {
        let loaded = self.let_go_late.len() + self.due.len();
        self.held.len().saturating_sub(loaded) as u64
    }

    pub fn backlog(&self) -> Backlog {
        let retries_claimed = self.retries_claimed();
        Backlog {
            waiting: self.waiting,
            claimed: (self.open.len() - self.lapsed.len()) as u64 + retries_claimed,
            retrying: self.retrying.saturating_sub(retries_claimed),
            oldest: self.oldest(),
        }
    }

    /// Relies on positions being in the order of reception, except for requests received at the
    /// same moment.
    fn oldest(&self) -> Option<Timestamp> {
        let next = self.hot.front().map(ReadyEvent::received).or(self.lag_since);
        let waiting = next.filter(|_| self.waiting > 0);
        let open = self.open.first_key_value().map(|(_, received)| *received);
        let claimed = open.filter(|received| *received != Timestamp::MAX);
        let retrying = self.oldest_retry.filter(|_| self.retrying > 0);
        [waiting, claimed, retrying].into_iter().flatten().min()
    }

    /// Drops everything except claims in flight when the subscription is closed.
    pub fn close(&mut self) -> (u64, usize) {
        self.closed = true;
        let dropped = self.waiting + self.retrying.saturating_sub(self.retries_claimed());
        let bytes = self.hot_bytes;
        self.hot = VecDeque::new();
        self.hot_bytes = 0;
        self.due = VecDeque::new();
        self.held = FxHashSet::default();
        self.withdrawing = FxHashSet::default();
        self.let_go_late = FxHashSet::default();
        self.lag = None;
        self.waiting = 0;
        self.retrying = 0;
        self.retry_head = None;
        (dropped, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_store::conformance::{WANT, at, events};

    fn ready(position: u64) -> ReadyEvent {
        let entry = LogEntry {
            batch: events(&[("x", &[1])]),
            first: Position(position),
            place: 0,
        };
        ReadyEvent {
            entry: Arc::new(entry),
            index: 0,
        }
    }

    fn due(secs: i64, position: u64) -> DueRetry {
        DueRetry {
            ready: ready(position),
            retry: RetryEntry {
                due: at(secs),
                position: Position(position),
                attempts_made: 1,
                last: None,
                segment: Position(0),
                offset: 64,
                index: 0,
                received: at(0),
            },
            loaded: None,
        }
    }

    fn queue(frontier: u64, open: &[u64]) -> DeliveryQueue {
        DeliveryQueue::new(SubscriptionProgress {
            frontier: Position(frontier),
            open: open.iter().copied().map(Position).collect(),
        })
    }

    fn claim(queue: &mut DeliveryQueue) -> Vec<u64> {
        let (_, fresh, _) = queue.claim(at(0), WANT);
        fresh.iter().map(|ready| ready.position().0).collect()
    }

    // An event is in the log shortly before it is handed out. Reading it there would offer it
    // twice.
    #[test]
    fn reading_stops_at_the_last_event_that_was_handed_out() {
        let mut queue = queue(0, &[]);
        queue.push(ready(3), false);
        assert_eq!(queue.must_load(), Some((Position(3), Position(3))));
        queue.loading = true;
        queue.push(ready(5), true);
        queue.loading = false;
        queue.loaded(vec![ready(3)], Position(3), Position(4));
        assert_eq!(claim(&mut queue), [3]);
        assert_eq!(queue.must_load(), Some((Position(4), Position(5))));
        queue.loaded(vec![ready(5)], Position(4), Position(6));
        queue.push(ready(6), true);
        assert_eq!(claim(&mut queue), [5, 6]);
        assert_eq!((queue.must_load(), queue.backlog().waiting), (None, 0));
    }

    // A small event of each large request: what counts is the requests that stay in memory.
    #[test]
    fn events_in_memory_are_counted_with_their_requests() {
        let request = |position: u64, events_of: usize| {
            let text = "x".repeat(1 << 20);
            let entry = LogEntry {
                batch: events(&[(text.as_str(), &[]), ("x", &[1]), ("y", &[1])]),
                first: Position(position),
                place: 0,
            };
            let entry = Arc::new(entry);
            (1..=events_of).map(move |index| ReadyEvent {
                entry: entry.clone(),
                index: index as u32,
            })
        };
        let mut queue = queue(0, &[]);
        let mut taken = 0;
        for n in 0..10 {
            for ready in request(3 * n, 2) {
                taken += queue.push(ready, true);
            }
        }
        assert_eq!((queue.hot.len(), queue.hot_bytes), (2 * 3, taken));
        assert!(
            taken > 3 << 20 && taken <= HOT_BYTES_PER_SUBSCRIPTION_MAX,
            "{taken}"
        );
        // Claim one by one, release in another order, and claim again.
        let one = ClaimLimits {
            events_max: 1,
            ..WANT
        };
        let mut claimed = Vec::new();
        let mut freed = [0; 3];
        for freed in &mut freed {
            let (_, fresh, bytes) = queue.claim(at(0), one);
            *freed = bytes;
            claimed.extend(fresh);
        }
        assert_eq!(freed, [0, taken / 3, 0]);
        claimed.rotate_left(1);
        assert_eq!(queue.release(claimed), taken / 3);
        assert_eq!(queue.hot_bytes, taken);
        let all = ClaimLimits {
            events_max: 100,
            bytes_max: usize::MAX / 2,
            ..WANT
        };
        let (_, fresh, freed) = queue.claim(at(0), all);
        assert_eq!((fresh.len(), freed, queue.hot_bytes), (6, taken, 0));
    }

    // The segment of an event that is written but not handed out yet must not be deleted.
    #[test]
    fn an_event_not_yet_handed_out_is_needed() {
        assert!(queue(4, &[]).needs(Position(4)));
        assert!(!queue(5, &[]).needs(Position(4)));
        assert!(queue(9, &[4]).needs(Position(4)));
    }

    #[test]
    fn what_cannot_be_read_is_passed_over() {
        let mut queue = queue(6, &[2, 4]);
        queue.recovered(5, Position(8), Some(at(0)));
        assert_eq!(queue.must_load(), Some((Position(2), Position(8))));
        // The records of 2 and 8 are damaged.
        queue.loaded(vec![ready(4), ready(6)], Position(2), Position(9));
        assert_eq!(claim(&mut queue), [4, 6]);
        assert_eq!(
            queue.backlog(),
            Backlog {
                claimed: 2,
                oldest: Some(at(0)),
                ..Backlog::default()
            }
        );
        queue.complete(Position(4));
        queue.complete(Position(6));
        assert!(!queue.needs(Position(8)));
    }

    #[test]
    fn a_settled_claim_that_was_given_back_changes_nothing() {
        let mut queue = queue(0, &[]);
        queue.push(ready(1), true);
        assert_eq!(claim(&mut queue), [1]);
        queue.release(vec![ready(1)]);
        queue.release(vec![ready(1)]);
        queue.complete(Position(1));
        assert!(queue.needs(Position(1)));
        assert_eq!(claim(&mut queue), [1]);
        queue.complete(Position(1));
        queue.release(vec![ready(1)]);
        assert_eq!(claim(&mut queue), [0; 0]);
    }

    // The database is read without the queue's lock: retries recorded meanwhile must not be
    // forgotten, and retries removed meanwhile must not be offered again.
    #[test]
    fn retries_may_come_and_go_while_they_are_loaded() {
        let mut queue = queue(0, &[]);
        queue.retry_added(at(0), Position(1));
        queue.load_due();
        queue.loaded_due(&mut vec![due(0, 1)], &mut vec![], None);
        assert_eq!(queue.claim(at(0), WANT).0.len(), 1);
        queue.retry_added(at(0), Position(2));
        queue.load_due();
        queue.let_go(at(0), Position(1));
        queue.retry_added(at(5), Position(3));
        assert!(
            queue.is_held(at(0), Position(1)),
            "the load may see it in an older state of the database"
        );
        queue.loaded_due(&mut vec![due(0, 2)], &mut vec![], None);
        assert!(!queue.is_held(at(0), Position(1)));
        assert_eq!(queue.retry_head, Some(at(5)));
        assert_eq!(queue.backlog().retrying, 2);
    }

    // A load reads the database without the queue's lock, so it may find retries that are being
    // withdrawn.
    #[test]
    fn retries_may_be_withdrawn_while_they_are_loaded() {
        let mut queue = queue(0, &[]);
        for n in [0, 1, 2, 3] {
            queue.retry_added(at(n), Position(1 + n as u64));
        }
        queue.load_due();
        let keys = [(at(0), Position(1)), (at(1), Position(2)), (at(2), Position(3))];
        assert_eq!(queue.withdraw(&keys), keys);
        assert_eq!(queue.withdraw(&keys), [], "that has begun already");
        queue.withdrawn(keys[0], true);
        assert!(queue.is_held(at(0), Position(1)), "the load may have seen it");
        // The load has found all three: the second with a damaged record, the third as the next due
        // one.
        let (mut loaded, mut lost) = (vec![due(0, 1)], vec![due(1, 2).retry]);
        queue.loaded_due(&mut loaded, &mut lost, Some(at(2)));
        assert!(loaded.is_empty() && lost.is_empty());
        assert_eq!(queue.claim(at(9), WANT).0.len(), 0);
        assert!(!queue.is_held(at(0), Position(1)));
        let backlog = |retrying| Backlog {
            retrying,
            ..Backlog::default()
        };
        assert_eq!(queue.backlog(), backlog(3));
        queue.withdrawn(keys[1], true);
        queue.withdrawn(keys[2], true);
        assert_eq!(queue.backlog(), backlog(1));

        // A result that was read before a change is discarded and read again.
        let changes = queue.must_read_head().unwrap();
        queue.retry_added(at(1), Position(9));
        queue.head_read(Some(at(3)), changes);
        assert_eq!(queue.retry_head, Some(at(1)));
        let changes = queue.must_read_head().unwrap();
        queue.head_read(Some(at(1)), changes);
        assert_eq!((queue.retry_head, queue.must_read_head()), (Some(at(1)), None));
    }

    // A retry that failed again with the same due time: the same key for a new retry, while a load
    // may still find the old one.
    #[test]
    fn a_retry_of_the_same_name_can_be_withdrawn_while_retries_are_loaded() {
        let mut queue = queue(0, &[]);
        let key = (at(0), Position(1));
        queue.retry_added(at(0), Position(1));
        queue.load_due();
        queue.loaded_due(&mut vec![due(0, 1)], &mut vec![], None);
        assert_eq!(queue.claim(at(0), WANT).0.len(), 1);
        assert_eq!(queue.withdraw(&[key]), [], "it is claimed");
        queue.retry_added(at(0), Position(2));
        queue.load_due();
        queue.let_go(at(0), Position(1));
        queue.retry_added(at(0), Position(1));
        assert_eq!(queue.backlog().retrying, 2);
        assert_eq!(queue.withdraw(&[key]), [key]);
        queue.loaded_due(&mut vec![due(0, 2)], &mut vec![], None);
        assert!(queue.is_held(at(0), Position(1)), "the disk still has it");
        queue.withdrawn(key, true);
        assert!(!queue.is_held(at(0), Position(1)));
        let backlog = Backlog {
            retrying: 1,
            ..Backlog::default()
        };
        assert_eq!(queue.backlog(), backlog);
    }

    // A retry is on disk shortly before the queue is told of it, and may already have been loaded.
    #[test]
    fn a_retry_that_is_held_is_not_the_next_to_come_due() {
        let mut queue = queue(0, &[]);
        queue.retry_added(at(0), Position(1));
        queue.load_due();
        queue.loaded_due(&mut vec![due(0, 1), due(1, 2)], &mut vec![], Some(at(7)));
        queue.retry_added(at(1), Position(2));
        assert_eq!(queue.retry_head, Some(at(7)));
        assert_eq!(queue.backlog().retrying, 2);

        // The retry is added during a load, so it is unknown whether the load finds it.
        queue.retry_added(at(2), Position(3));
        assert_eq!(queue.claim(at(1), WANT).0.len(), 2);
        queue.load_due();
        queue.retry_added(at(2), Position(4));
        queue.loaded_due(&mut vec![due(2, 3), due(2, 4)], &mut vec![], Some(at(7)));
        let changes = queue.must_read_head().unwrap();
        queue.head_read(Some(at(7)), changes);
        assert_eq!(queue.retry_head, Some(at(7)));
    }
}
