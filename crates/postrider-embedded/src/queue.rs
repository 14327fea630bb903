//! What one subscription has before it: events in memory, events still in the log, claims, retries.

use crate::record::Progress;
use crate::state::RetryEntry;
use postrider_core::ids::Position;
use postrider_core::time::Timestamp;
use postrider_store::{Backlog, Entry, Want};
use rustc_hash::FxHashSet;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// One subscription keeps at most this many bytes of waiting events in memory; the rest stays in the log.
pub const HOT_BYTES_PER_SUBSCRIPTION_MAX: usize = 4 << 20;
/// All subscriptions together keep at most this.
pub const HOT_BYTES_MAX: usize = 48 << 20;

/// An event in memory, ready to be claimed.
#[derive(Clone, Debug)]
pub struct Ready {
    pub entry: Arc<Entry>,
    pub index: u32,
}

impl Ready {
    pub fn position(&self) -> Position {
        Position(self.entry.first.0 + u64::from(self.index))
    }

    fn received(&self) -> Timestamp {
        self.entry.batch.received
    }

    pub fn size(&self) -> usize {
        self.entry.batch.events[self.index as usize].object.len as usize
    }

    /// Bytes that its request takes in memory: all of it is kept for as long as one of its events is.
    pub fn entry_size(&self) -> usize {
        let batch = &self.entry.batch;
        batch.body.len() + std::mem::size_of_val(&*batch.events)
    }

    pub fn is_of_entry(&self, other: &Ready) -> bool {
        self.entry.first == other.entry.first
    }
}

/// What names a retry of a subscription: when it comes due, and its event.
pub type RetryKey = (Timestamp, Position);

/// A retry that is due, with its event.
#[derive(Clone, Debug)]
pub struct DueRetry {
    pub ready: Ready,
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
pub struct Queue {
    /// Everything below is claimed or settled, but for what is in `open`.
    frontier: Position,
    /// First attempts that are claimed or were claimed when the server stopped, and are not settled.
    /// Each with when it was received; the end of all time where that is not known.
    open: BTreeMap<Position, Timestamp>,
    /// Of `open`, those that nobody holds since a restart or a release; they are offered again.
    lapsed: BTreeSet<Position>,
    /// Ordered by position.
    hot: VecDeque<Ready>,
    /// The requests that events in `hot` belong to, each counted once.
    hot_bytes: usize,
    /// Every matching event below has been in `hot`, or cannot be read.
    seen: Position,
    /// Where to go on reading in the log, when not everything is in `hot`.
    lag: Option<Position>,
    /// What is read from there was not received before this, as far as that is known.
    lag_since: Option<Timestamp>,
    /// The last event that matched and was handed out. Later ones in the log are not ours to read yet:
    /// they are still to be pushed.
    last: Option<Position>,
    waiting: u64,
    pub loading: bool,
    pub closed: bool,
    /// Retries that are due and loaded, ordered by due time.
    due: VecDeque<DueRetry>,
    /// Retries loaded or claimed, so that they are not loaded twice.
    held: FxHashSet<RetryKey>,
    /// Retries that are about to be removed from the disk: neither loaded nor claimed any more.
    withdrawing: FxHashSet<RetryKey>,
    /// Of `held`, those let go while retries are being loaded: the load may still come across them.
    let_go_late: FxHashSet<RetryKey>,
    /// The earliest retry added while retries are being loaded: the load may have missed it.
    added_late: Option<Timestamp>,
    /// All retries, the claimed ones too.
    retrying: u64,
    /// When the event of the oldest of them was received.
    pub oldest_retry: Option<Timestamp>,
    /// When the earliest retry that is not held comes due.
    pub retry_head: Option<Timestamp>,
    /// The retry that `retry_head` was about may be held or withdrawn: it is to be read from the disk again.
    head_outdated: bool,
    /// How often something has changed that reading `retry_head` from the disk depends on.
    head_changes: u64,
    /// It is on the list of those whose progress goes into the log with the next commit.
    pub listed: bool,
    /// … and of those whose progress goes into the state database with the next checkpoint.
    pub listed_row: bool,
    loading_due: bool,
    /// Nothing is being claimed; events are not kept in memory.
    resting: bool,
}

impl Queue {
    pub fn new(progress: Progress) -> Queue {
        let open = progress.open.iter().map(|position| (*position, Timestamp::MAX));
        Queue {
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

    /// After a start: the log holds `waiting` events for this subscription, none of them after `last`, the first
    /// received at `since` if that could be read.
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

    /// After a start: so many retries wait, the first one until `head`.
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

    /// The lowest position that is not settled, as far as first attempts go.
    pub fn lowest(&self) -> Position {
        self.open
            .first_key_value()
            .map_or(self.frontier, |(position, _)| *position)
    }

    /// Whether any first attempt at or below `last`, a matching event, is still to be made or settled.
    pub fn needs(&self, last: Position) -> bool {
        !self.closed && self.lowest() <= last
    }

    /// Takes a fresh event into memory if there is room. Returns the bytes it takes there.
    pub fn push(&mut self, ready: Ready, room: bool) -> usize {
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

    /// Puts an event into `hot`. Returns the bytes that it takes there.
    fn put_hot(&mut self, at: usize, ready: Ready) -> usize {
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

    /// Takes the first event out of `hot`. Returns the bytes that it no longer takes there, too.
    fn take_hot(&mut self) -> Option<(Ready, usize)> {
        let first = self.hot.pop_front()?;
        let bytes = match self.hot.front() {
            Some(next) if next.is_of_entry(&first) => 0,
            _ => first.entry_size(),
        };
        self.hot_bytes -= bytes;
        Some((first, bytes))
    }

    /// What must be read from the log before more can be claimed: from where, and up to which event.
    pub fn must_load(&self) -> Option<(Position, Position)> {
        let needed = self.hot.is_empty() && !self.loading && !self.closed;
        needed.then_some((self.lag?, self.last?))
    }

    /// Takes what was read from the log between `from` and `upto`. Returns the bytes it takes in memory.
    pub fn loaded(&mut self, ready: Vec<Ready>, from: Position, upto: Position) -> usize {
        if self.closed {
            return 0;
        }
        let mut bytes = 0;
        for ready in ready {
            bytes += self.put_hot(self.hot.len(), ready);
        }
        // What should have been there and was not can never be offered: its record is damaged.
        let lapsed: Vec<Position> = self.lapsed.range(from..upto).copied().collect();
        for position in lapsed {
            if self.hot.binary_search_by_key(&position, Ready::position).is_err() {
                self.lapsed.remove(&position);
                self.open.remove(&position);
            }
        }
        self.seen = self.seen.max(upto);
        // Appends that were skipped meanwhile have raised `last`; then the log is read further.
        self.lag = self.last.is_some_and(|last| upto <= last).then_some(upto);
        if self.lag.is_none() {
            // All that waits is in memory now; damaged records may have been counted before.
            self.waiting = self.hot.len() as u64;
        }
        self.advance();
        bytes
    }

    /// Nothing will be claimed for a while: keeps no events in memory until something is. They are read
    /// from the log again when their turn comes. Returns the bytes no longer in memory.
    pub fn rest(&mut self) -> usize {
        self.resting = true;
        self.spill_due();
        self.spill()
    }

    /// Lets go of retries that were loaded and not claimed.
    fn spill_due(&mut self) {
        // What is being loaded would be taken for what comes after them.
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
        // A claim that is given back, or what is being loaded, would end up in the wrong place.
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

    /// With nothing left in `hot`, the frontier passes events that cannot be read.
    fn advance(&mut self) {
        if self.hot.is_empty() {
            self.frontier = self.frontier.max(self.seen);
        }
    }

    /// Claims retries that are due and first attempts. Returns them and the bytes no longer in memory.
    pub fn claim(&mut self, now: Timestamp, want: Want) -> (Vec<DueRetry>, Vec<Ready>, usize) {
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
            // There is no room for it; what comes after it must not overtake it.
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
            // What comes after it, in memory or not, was received after it.
            self.lag_since = Some(ready.received());
            self.waiting = self.waiting.saturating_sub(1);
            fresh.push(ready);
        }
        self.advance();
        (retries, fresh, freed)
    }

    /// Puts unattempted claims of first attempts back in their old order. Returns the bytes they take.
    pub fn release(&mut self, ready: Vec<Ready>) -> usize {
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

    /// A first attempt is settled, or its retry is now on disk. Returns the bytes no longer in memory.
    pub fn complete(&mut self, position: Position) -> usize {
        // A claim that was given back changes nothing.
        if !self.lapsed.contains(&position) {
            self.open.remove(&position);
        }
        self.spill()
    }

    /// The progress as it would be with these first attempts settled too.
    pub fn progress(&self, without: &FxHashSet<Position>) -> Progress {
        let open = self.open.keys().filter(|p| !without.contains(p));
        Progress {
            frontier: self.frontier,
            open: open.copied().collect(),
        }
    }

    /// Whether a retry is not to be loaded: it is loaded already, claimed, or being withdrawn.
    pub fn is_held(&self, due: Timestamp, position: Position) -> bool {
        self.held.contains(&(due, position)) || self.withdrawing.contains(&(due, position))
    }

    /// Whether something can be claimed, at once or after reading the log, or will be due.
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
        // What is withdrawn from now on sets it again.
        self.head_outdated = false;
        self.head_changes += 1;
    }

    /// Takes the retries that were loaded and those that cannot be read, but for what was withdrawn
    /// meanwhile; `head` is when the next of the others is due. Leaves in both lists what was taken.
    pub fn loaded_due(
        &mut self,
        due: &mut Vec<DueRetry>,
        lost: &mut Vec<RetryEntry>,
        head: Option<Timestamp>,
    ) {
        let Queue {
            held, withdrawing, ..
        } = self;
        let mut take = |key: RetryKey| !withdrawing.contains(&key) && held.insert(key);
        lost.retain(|retry| take((retry.due, retry.position)));
        due.retain(|one| take(one.key()));
        self.due.extend(due.iter().cloned());
        self.retry_head = head;
        self.loading_due_ended();
    }

    /// Also called when loading failed.
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
            // Or the load has come across it after all, and it is held now.
            self.head_outdated = true;
        }
    }

    /// Puts a retry back that was claimed but not attempted.
    pub fn release_due(&mut self, due: DueRetry) {
        let here = due.key();
        let before = self.due.partition_point(|other| other.key() < here);
        if self.held.contains(&here) && self.due.get(before).is_none_or(|other| other.key() != here) {
            self.due.insert(before, due);
        }
    }

    /// Begins to withdraw those of these retries that nobody has claimed: from now on they are not
    /// offered. Returns them; whether they are on disk at all is not known here.
    pub fn withdraw(&mut self, waiting: &[RetryKey]) -> Vec<RetryKey> {
        if self.closed {
            return Vec::new();
        }
        let loaded: FxHashSet<RetryKey> = self.due.iter().map(DueRetry::key).collect();
        let mut begun = Vec::new();
        for &key in waiting {
            // One that was let go late can be on disk again, when it failed and is due at the same time.
            let claimed =
                self.held.contains(&key) && !loaded.contains(&key) && !self.let_go_late.contains(&key);
            if !claimed && self.withdrawing.insert(key) {
                begun.push(key);
            }
            if loaded.contains(&key) {
                self.held.remove(&key);
            }
        }
        let Queue { due, withdrawing, .. } = self;
        due.retain(|one| !withdrawing.contains(&one.key()));
        self.head_changes += 1;
        begun
    }

    /// A withdrawal has ended; `removed` if the retry was on disk and is gone from there.
    pub fn withdrawn(&mut self, key: RetryKey, removed: bool) {
        self.withdrawing.remove(&key);
        self.head_changes += 1;
        if !removed || self.closed {
            return;
        }
        self.retrying = self.retrying.saturating_sub(1);
        if self.loading_due {
            // The load may have come across it, and taken it for the next one that is due.
            self.held.insert(key);
            self.let_go_late.insert(key);
            self.head_outdated = true;
        } else {
            self.head_outdated |= self.retry_head == Some(key.0);
        }
    }

    /// What `retry_head` depends on, as a number, if it must be read from the disk again. While retries
    /// are being loaded it need not: whoever loads them looks here afterwards.
    pub fn must_read_head(&self) -> Option<u64> {
        (self.head_outdated && !self.loading_due && !self.closed).then_some(self.head_changes)
    }

    /// Takes what was read, unless something has changed since `must_read_head` gave this number.
    pub fn head_read(&mut self, head: Option<Timestamp>, changes: u64) {
        if self.must_read_head() == Some(changes) {
            self.retry_head = head;
            self.head_outdated = false;
        }
    }

    /// A retry is settled and its entry is gone from the disk.
    pub fn let_go(&mut self, due: Timestamp, position: Position) {
        self.retrying = self.retrying.saturating_sub(1);
        self.head_changes += 1;
        if self.loading_due {
            self.let_go_late.insert((due, position));
        } else {
            self.held.remove(&(due, position));
        }
    }

    /// A retry is on disk.
    pub fn retry_added(&mut self, due: Timestamp, position: Position) {
        let earlier = |than: Option<Timestamp>| Some(than.map_or(due, |other| other.min(due)));
        let key = (due, position);
        self.retrying += 1;
        self.head_changes += 1;
        if self.held.contains(&key) && !self.let_go_late.contains(&key) {
            // It was loaded since it is on disk.
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

    /// Positions follow the order in which events were received, but for requests that came at the same moment.
    fn oldest(&self) -> Option<Timestamp> {
        let next = self.hot.front().map(Ready::received).or(self.lag_since);
        let waiting = next.filter(|_| self.waiting > 0);
        let open = self.open.first_key_value().map(|(_, received)| *received);
        let claimed = open.filter(|received| *received != Timestamp::MAX);
        let retrying = self.oldest_retry.filter(|_| self.retrying > 0);
        [waiting, claimed, retrying].into_iter().flatten().min()
    }

    /// Everything that ends when the subscription is closed, claims in flight excepted.
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

    fn ready(position: u64) -> Ready {
        let entry = Entry {
            batch: events(&[("x", &[1])]),
            first: Position(position),
            place: 0,
        };
        Ready {
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

    fn queue(frontier: u64, open: &[u64]) -> Queue {
        Queue::new(Progress {
            frontier: Position(frontier),
            open: open.iter().copied().map(Position).collect(),
        })
    }

    fn claim(queue: &mut Queue) -> Vec<u64> {
        let (_, fresh, _) = queue.claim(at(0), WANT);
        fresh.iter().map(|ready| ready.position().0).collect()
    }

    // An event is in the log a moment before it is handed out. Reading it there would offer it twice.
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

    // One small event of each large request: the events were counted, and the requests kept.
    #[test]
    fn events_in_memory_are_counted_with_their_requests() {
        let request = |position: u64, events_of: usize| {
            let text = "x".repeat(1 << 20);
            let entry = Entry {
                batch: events(&[(text.as_str(), &[]), ("x", &[1]), ("y", &[1])]),
                first: Position(position),
                place: 0,
            };
            let entry = Arc::new(entry);
            (1..=events_of).map(move |index| Ready {
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
        // Claimed one by one, given back in another order, and claimed again.
        let one = Want {
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
        let all = Want {
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

    // The database is read without the queue's lock: what is recorded meanwhile must not be forgotten,
    // nor what is removed meanwhile be offered again.
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

    // A load reads the database without the queue's lock: it may come across what is being withdrawn.
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
        // It has seen all of them, the second with a record that is damaged, the third as the next one.
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

        // What was read before something changed is read again.
        let changes = queue.must_read_head().unwrap();
        queue.retry_added(at(1), Position(9));
        queue.head_read(Some(at(3)), changes);
        assert_eq!(queue.retry_head, Some(at(1)));
        let changes = queue.must_read_head().unwrap();
        queue.head_read(Some(at(1)), changes);
        assert_eq!((queue.retry_head, queue.must_read_head()), (Some(at(1)), None));
    }

    // It failed and is due at the same time as before: the same name for a new retry, while a load may still
    // come across the old one.
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

    // A retry is on disk a moment before the queue is told of it, and may have been loaded by then.
    #[test]
    fn a_retry_that_is_held_is_not_the_next_to_come_due() {
        let mut queue = queue(0, &[]);
        queue.retry_added(at(0), Position(1));
        queue.load_due();
        queue.loaded_due(&mut vec![due(0, 1), due(1, 2)], &mut vec![], Some(at(7)));
        queue.retry_added(at(1), Position(2));
        assert_eq!(queue.retry_head, Some(at(7)));
        assert_eq!(queue.backlog().retrying, 2);

        // Told of it while the load is under way, nobody knows whether that comes across it.
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
