//! What one subscription has before it: events in memory, events still in the log, claims, retries.

use crate::record::Progress;
use crate::state::RetryEntry;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::Timestamp;
use postrider_store::{Backlog, Entry, Want};
use rustc_hash::FxHashSet;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

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

    pub fn size(&self) -> usize {
        self.entry.batch.events[self.index as usize].object.len as usize
    }
}

/// A retry that is due, with its event.
#[derive(Clone, Debug)]
pub struct DueRetry {
    pub ready: Ready,
    pub retry: RetryEntry,
}

#[derive(Debug)]
pub struct Queue {
    pub of: SubscriptionId,
    /// Everything below is claimed or settled, but for what is in `open`.
    frontier: Position,
    /// First attempts that are claimed or were claimed when the server stopped, and are not settled.
    open: BTreeSet<Position>,
    /// Of `open`, those that nobody holds since a restart; they are offered again.
    lapsed: FxHashSet<Position>,
    hot: VecDeque<Ready>,
    hot_bytes: usize,
    /// Where to go on reading in the log, when not everything is in `hot`.
    lag: Option<Position>,
    /// The last event that matched, if any is known to wait.
    last: Option<Position>,
    waiting: u64,
    pub loading: bool,
    pub closed: bool,
    /// Retries that are due and loaded.
    due: VecDeque<DueRetry>,
    /// Retries loaded or claimed, so that they are not loaded twice.
    held: FxHashSet<(Timestamp, Position)>,
    pub retrying: u64,
    /// When the earliest retry that is not held comes due.
    pub retry_head: Option<Timestamp>,
    /// It is on the list of those whose progress goes into the log with the next commit.
    pub listed: bool,
    /// … and of those whose progress goes into the state database with the next checkpoint.
    pub listed_row: bool,
    pub loading_due: bool,
}

impl Queue {
    pub fn new(of: SubscriptionId, progress: Progress) -> Queue {
        let open: BTreeSet<Position> = progress.open.into_iter().collect();
        Queue {
            of,
            frontier: progress.frontier,
            lapsed: open.iter().copied().collect(),
            open,
            hot: VecDeque::new(),
            hot_bytes: 0,
            lag: None,
            last: None,
            waiting: 0,
            loading: false,
            closed: false,
            due: VecDeque::new(),
            held: FxHashSet::default(),
            retrying: 0,
            retry_head: None,
            listed: false,
            listed_row: false,
            loading_due: false,
        }
    }

    /// After a start: the log holds `waiting` events for this subscription, the last one at `last`.
    pub fn recovered(&mut self, waiting: u64, last: Position) {
        self.waiting = waiting;
        self.last = Some(last);
        self.lag = Some(self.lowest());
    }

    pub fn frontier(&self) -> Position {
        self.frontier
    }

    /// Whether a position still has to be offered.
    pub fn wants(&self, position: Position) -> bool {
        position >= self.frontier || self.lapsed.contains(&position)
    }

    /// The lowest position that is not settled, as far as first attempts go.
    pub fn lowest(&self) -> Position {
        self.open.first().copied().unwrap_or(self.frontier)
    }

    /// Whether any first attempt at or below `last` is still to be made or settled.
    pub fn needs(&self, last: Position) -> bool {
        !self.closed && self.lowest() <= last && (self.waiting > 0 || !self.open.is_empty())
    }

    /// Takes a fresh event into memory if there is room. Returns the bytes it takes there.
    pub fn push(&mut self, ready: Ready, room: bool) -> usize {
        let position = ready.position();
        let size = ready.size();
        self.last = Some(position);
        self.waiting += 1;
        if self.lag.is_some() {
            return 0;
        }
        if !room || self.hot_bytes + size > HOT_BYTES_PER_SUBSCRIPTION_MAX {
            self.lag = Some(position);
            return 0;
        }
        self.hot_bytes += size;
        self.hot.push_back(ready);
        size
    }

    /// Where reading from the log must go on, if claiming needs it.
    pub fn must_load(&self) -> Option<Position> {
        (self.hot.is_empty() && !self.loading && !self.closed).then_some(self.lag)?
    }

    /// Takes what was read from the log up to `upto`. Returns the bytes it takes in memory.
    pub fn loaded(&mut self, ready: Vec<Ready>, upto: Position) -> usize {
        self.loading = false;
        if self.closed {
            return 0;
        }
        let bytes = ready.iter().map(Ready::size).sum();
        self.hot_bytes += bytes;
        self.hot.extend(ready);
        // Appends that were skipped meanwhile have raised `last`; then the log is read further.
        self.lag = self.last.is_some_and(|last| upto <= last).then_some(upto);
        bytes
    }

    /// Events of a record that turned out to be damaged: nobody can be offered them.
    pub fn drop_corrupt(&mut self, matches: u64, first: Position) {
        let open: Vec<Position> = self.lapsed.iter().filter(|p| p.0 >= first.0 && p.0 < first.0 + matches).copied().collect();
        for position in open {
            self.lapsed.remove(&position);
            self.open.remove(&position);
        }
        self.waiting = self.waiting.saturating_sub(matches);
    }

    /// Gives up the events in memory; they are read from the log again when their time comes.
    pub fn spill(&mut self) -> usize {
        if let Some(first) = self.hot.front() {
            self.lag = Some(first.position());
        }
        self.hot = VecDeque::new();
        std::mem::take(&mut self.hot_bytes)
    }

    /// Claims retries that are due and first attempts. Returns them and the bytes no longer in memory.
    pub fn claim(&mut self, want: Want) -> (Vec<DueRetry>, Vec<Ready>, usize) {
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
        while self.due.front().is_some_and(|due| fits(due.ready.size())) {
            retries.extend(self.due.pop_front());
        }
        let mut fresh = Vec::new();
        let mut freed = 0;
        while self.hot.front().is_some_and(|ready| fits(ready.size())) {
            let ready = self.hot.pop_front().expect("just seen");
            freed += ready.size();
            let position = ready.position();
            if position >= self.frontier {
                self.frontier = Position(position.0 + 1);
                self.open.insert(position);
            } else {
                self.lapsed.remove(&position);
            }
            self.waiting = self.waiting.saturating_sub(1);
            fresh.push(ready);
        }
        self.hot_bytes -= freed;
        (retries, fresh, freed)
    }

    /// Puts unattempted claims of first attempts back at the front. Returns the bytes they take.
    pub fn release(&mut self, ready: Vec<Ready>) -> usize {
        let mut bytes = 0;
        for ready in ready.into_iter().rev() {
            bytes += ready.size();
            self.lapsed.insert(ready.position());
            self.waiting += 1;
            self.hot.push_front(ready);
        }
        self.hot_bytes += bytes;
        bytes
    }

    /// A first attempt is settled, or its retry is now on disk.
    pub fn complete(&mut self, position: Position) {
        self.open.remove(&position);
    }

    /// The progress as it would be with these first attempts settled too.
    pub fn progress(&self, without: &FxHashSet<Position>) -> Progress {
        let open = self.open.iter().filter(|p| !without.contains(p));
        Progress {
            frontier: self.frontier,
            open: open.copied().collect(),
        }
    }

    pub fn is_held(&self, due: Timestamp, position: Position) -> bool {
        self.held.contains(&(due, position))
    }

    pub fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    pub fn has_work(&self) -> bool {
        !self.hot.is_empty() || self.lag.is_some() || !self.due.is_empty()
    }

    pub fn hold_due(&mut self, due: DueRetry) {
        self.held.insert((due.retry.due, due.ready.position()));
        self.due.push_back(due);
    }

    /// Puts retries back that were claimed but not attempted.
    pub fn release_due(&mut self, due: DueRetry) {
        self.due.push_front(due);
    }

    /// A retry is settled and its entry is gone from the disk.
    pub fn let_go(&mut self, due: Timestamp, position: Position) {
        self.held.remove(&(due, position));
    }

    pub fn backlog(&self) -> Backlog {
        Backlog {
            waiting: self.waiting,
            claimed: (self.open.len() - self.lapsed.len()) as u64,
            retrying: self.retrying,
            oldest: self.hot.front().map(|ready| ready.entry.batch.received),
        }
    }

    /// Everything that ends when the subscription is closed, claims in flight excepted.
    pub fn close(&mut self) -> (u64, usize) {
        self.closed = true;
        let dropped = self.waiting + self.retrying;
        let bytes = self.hot_bytes;
        self.hot = VecDeque::new();
        self.hot_bytes = 0;
        self.due = VecDeque::new();
        self.lag = None;
        self.waiting = 0;
        self.retrying = 0;
        self.retry_head = None;
        (dropped, bytes)
    }
}
