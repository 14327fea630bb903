//! The lanes of one subscription: how many there are, which of them wait for work, and how they are
//! woken.
//!
//! A lane is a task that claims deliveries and attempts them. The pool decides when a lane is
//! started, parked, woken and ended; it never touches deliveries.
//!
//! Invariants, all of them under one lock:
//! 1. Work announced after a lane has read the epoch is never slept through: `park` with an outdated
//!    epoch returns at once.
//! 2. A wake-up belongs to exactly one parked lane and is never lost or shared.
//! 3. A lane that ends is uncounted in the same step, and its caller learns of work announced
//!    meanwhile: `start_lane` is never refused on account of a lane that will not claim again.
//! 4. A closed pool has no parked lanes and never gets one again: every lane ends.
//!
//! `tests/lane_model.rs` compiles this file against loom and checks them for every interleaving.

use super::lane_sync::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// How a lane that wanted to park goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParkOutcome {
    /// Work may be available: claim again.
    Claim,
    /// The lane is surplus, or the pool is closed: end. The pool does not count the lane any more.
    End,
}

/// The result of asking for one more working lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneStart {
    /// A parked lane was woken.
    Woken,
    /// The caller has to spawn a lane, which the pool has already counted.
    Spawn,
    /// The allowed number of lanes is at work, or the pool is closed.
    Refused,
}

#[derive(Debug)]
pub struct LanePool {
    state: Mutex<LaneState>,
}

#[derive(Debug)]
struct LaneState {
    lanes: usize,
    /// Raised by every announcement of work.
    epoch: u64,
    /// Estimate of claimable deliveries; corrected to zero whenever a claim finds none.
    ready: i64,
    slots: Vec<ParkingSlot>,
    /// Slots of parked lanes; the last to park is the first to be woken.
    parked: Vec<usize>,
    /// Slots that no lane uses.
    free: Vec<usize>,
    /// Whether work was announced since parked lanes were last checked.
    used_lately: bool,
    /// Whether the caller has been told to check parked lanes later, by `reap`.
    reap_scheduled: bool,
    closed: bool,
}

#[derive(Debug)]
enum ParkingSlot {
    Free,
    /// The waker is missing until the lane's future is polled for the first time.
    Parked(Option<Waker>),
    Resumed(ParkOutcome),
}

/// Counts for tests, `/healthz` and the test clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneCounts {
    pub lanes: usize,
    pub parked: usize,
}

impl LanePool {
    pub fn new() -> LanePool {
        LanePool {
            state: Mutex::new(LaneState {
                lanes: 0,
                epoch: 0,
                ready: 0,
                slots: Vec::new(),
                parked: Vec::new(),
                free: Vec::new(),
                used_lately: false,
                reap_scheduled: false,
                closed: false,
            }),
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut LaneState) -> T) -> T {
        change(&mut self.state.lock().expect("no lane panics while it holds the lock"))
    }

    /// Announces that about `count` more deliveries can be claimed. A lane that parks from now on
    /// with an older epoch claims again instead.
    pub fn announce(&self, count: usize) {
        self.with(|state| {
            state.ready = state.ready.saturating_add(count as i64);
            state.epoch += 1;
            state.used_lately = true;
        });
    }

    /// The epoch to hand to [`LanePool::park`]; to be read before claiming.
    pub fn epoch(&self) -> u64 {
        self.with(|state| state.epoch)
    }

    /// Puts one more lane to work: a parked one, or a new one unless there are `lanes_max`.
    pub fn start_lane(&self, lanes_max: usize) -> LaneStart {
        let (start, waker) = self.with(|state| {
            if state.closed {
                return (LaneStart::Refused, None);
            }
            if let Some(slot) = state.parked.pop() {
                return (LaneStart::Woken, state.resume(slot, ParkOutcome::Claim));
            }
            if state.lanes >= lanes_max {
                return (LaneStart::Refused, None);
            }
            state.lanes += 1;
            (LaneStart::Spawn, None)
        });
        if let Some(waker) = waker {
            waker.wake();
        }
        start
    }

    /// Counts a lane that the caller spawns with a pass from its endpoint. The lane is started even
    /// in a closed pool: it returns the pass and ends.
    pub fn add_lane(&self) {
        self.with(|state| state.lanes += 1);
    }

    /// A lane that read `epoch` before it last looked for work ends without parking. Returns
    /// whether work was announced since: the announcement may have counted on this lane.
    pub fn end_lane(&self, epoch: u64) -> bool {
        self.with(|state| {
            state.lanes -= 1;
            !state.closed && state.epoch != epoch
        })
    }

    /// Whether no lane is at work: all are parked, or there are none.
    pub fn is_idle(&self) -> bool {
        self.with(|state| state.lanes <= state.parked.len())
    }

    /// Subtracts claimed deliveries from the estimate. Returns whether more seem to wait.
    pub fn claimed(&self, count: usize) -> bool {
        self.with(|state| {
            state.ready = state.ready.saturating_sub(count as i64);
            state.ready > 0
        })
    }

    /// Reports that a claim found nothing.
    pub fn found_nothing(&self) {
        self.with(|state| state.ready = 0);
    }

    /// Parks a lane that read `epoch` before it claimed and found nothing. Returns the future to
    /// wait for, and whether the caller has to schedule a call of [`LanePool::reap`].
    pub fn park(&self, epoch: u64) -> (ParkedLane<'_>, bool) {
        self.with(|state| {
            let slot = state.free.pop().unwrap_or_else(|| {
                state.slots.push(ParkingSlot::Free);
                state.slots.len() - 1
            });
            state.slots[slot] = if state.closed {
                ParkingSlot::Resumed(ParkOutcome::End)
            } else if state.epoch != epoch {
                ParkingSlot::Resumed(ParkOutcome::Claim)
            } else {
                state.parked.push(slot);
                ParkingSlot::Parked(None)
            };
            let schedule = !state.parked.is_empty() && !std::mem::replace(&mut state.reap_scheduled, true);
            let parked = ParkedLane {
                pool: self,
                slot: Some(slot),
                epoch,
            };
            (parked, schedule)
        })
    }

    /// Ends parked lanes if no work was announced since the last call. Returns whether the caller
    /// has to call again later.
    pub fn reap(&self) -> bool {
        let (again, wakers) = self.with(|state| {
            if std::mem::take(&mut state.used_lately) && !state.parked.is_empty() {
                return (true, Vec::new());
            }
            state.reap_scheduled = false;
            (false, state.resume_all(ParkOutcome::End))
        });
        wakers.into_iter().for_each(Waker::wake);
        again
    }

    /// Ends parked lanes at once: they will have no work for a while.
    pub fn end_parked(&self) {
        let wakers = self.with(|state| state.resume_all(ParkOutcome::End));
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends parked lanes now, and every other lane when it parks.
    pub fn close(&self) {
        let wakers = self.with(|state| {
            state.closed = true;
            state.resume_all(ParkOutcome::End)
        });
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn counts(&self) -> LaneCounts {
        self.with(|state| LaneCounts {
            lanes: state.lanes,
            parked: state.parked.len(),
        })
    }
}

impl LaneState {
    fn resume(&mut self, slot: usize, outcome: ParkOutcome) -> Option<Waker> {
        match std::mem::replace(&mut self.slots[slot], ParkingSlot::Resumed(outcome)) {
            ParkingSlot::Parked(waker) => waker,
            ParkingSlot::Free | ParkingSlot::Resumed(_) => None,
        }
    }

    fn vacate(&mut self, slot: usize) {
        self.slots[slot] = ParkingSlot::Free;
        self.free.push(slot);
    }

    fn resume_all(&mut self, outcome: ParkOutcome) -> Vec<Waker> {
        let parked = std::mem::take(&mut self.parked);
        parked
            .into_iter()
            .filter_map(|slot| self.resume(slot, outcome))
            .collect()
    }
}

/// A parked lane. Completes when the lane is woken or has to end.
#[must_use]
pub struct ParkedLane<'a> {
    pool: &'a LanePool,
    slot: Option<usize>,
    epoch: u64,
}

impl Future for ParkedLane<'_> {
    type Output = ParkOutcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<ParkOutcome> {
        let Some(slot) = self.slot else {
            return Poll::Ready(ParkOutcome::End);
        };
        let epoch = self.epoch;
        let polled = self.pool.with(|state| match &mut state.slots[slot] {
            ParkingSlot::Parked(waker) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            ParkingSlot::Resumed(outcome) => {
                let outcome = *outcome;
                state.vacate(slot);
                // Work announced after the lane was told to end found no parked lane to wake.
                if outcome == ParkOutcome::Claim || (!state.closed && state.epoch != epoch) {
                    return Poll::Ready(ParkOutcome::Claim);
                }
                state.lanes -= 1;
                Poll::Ready(ParkOutcome::End)
            }
            ParkingSlot::Free => unreachable!("a slot is vacated only by the lane that holds it"),
        });
        if polled.is_ready() {
            self.slot = None;
        }
        polled
    }
}

impl Drop for ParkedLane<'_> {
    /// A lane that is torn down while it is parked leaves the pool, and hands on a wake-up that it
    /// did not get to see.
    fn drop(&mut self) {
        let Some(slot) = self.slot else {
            return;
        };
        let waker = self.pool.with(|state| {
            let unseen = matches!(state.slots[slot], ParkingSlot::Resumed(ParkOutcome::Claim));
            state.parked.retain(|parked| *parked != slot);
            state.vacate(slot);
            state.lanes -= 1;
            let heir = unseen.then(|| state.parked.pop()).flatten()?;
            state.resume(heir, ParkOutcome::Claim)
        });
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
