//! The budget for bytes in flight: how much memory deliveries under way may hold, all together.
//!
//! Every attempt is charged for what it keeps in memory: a fixed overhead, the bytes written for it
//! alone, and the stored events that it refers to. A large stored entry is charged once, however many
//! deliveries refer to it. An attempt that does not fit waits in line, without its events.
//!
//! Endpoints that fail may not use up the budget: a part of it is open only to endpoints that have not
//! failed, and another part only to those that have answered.

use postrider_core::ids::Position;
use rustc_hash::FxHashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Charged for every attempt: its task, its connection's buffers and its headers.
pub const ATTEMPT_OVERHEAD: usize = 24 * 1024;
/// Stored entries from this size on are charged once for all deliveries that refer to them. Smaller ones
/// are charged to each: the bookkeeping would cost more than it saves.
pub const SHARED_ENTRY_MIN: usize = 64 * 1024;
/// A budget below this could not hold a few of the largest events.
pub const BUDGET_BYTES_MIN: usize = 16 << 20;
pub const BUDGET_BYTES_DEFAULT: usize = 256 << 20;
/// Permits are given out in units of this many bytes.
const UNIT: usize = 1024;
/// Parts of the budget, each inside the next.
const PARTS: usize = 3;

/// How an endpoint has answered lately, which decides how much of the budget is open to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointStanding {
    /// The last answer was no failure of the endpoint: all of the budget.
    Answering,
    /// Never tried: three quarters.
    Untried,
    /// Failing: half.
    Failing,
}

/// What an attempt keeps in memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct InFlightNeed {
    /// Bytes that only this attempt keeps.
    pub own: usize,
    /// Large stored entries that it refers to, by their first position, with their sizes.
    pub shared: Vec<(Position, usize)>,
}

pub struct InFlightBudget {
    all: Arc<Semaphore>,
    not_failing: Arc<Semaphore>,
    failing: Arc<Semaphore>,
    units: u32,
    entries: Arc<SharedEntries>,
    waiting: AtomicUsize,
}

#[derive(Default)]
struct SharedEntries {
    charged: Mutex<FxHashMap<Position, Weak<EntryCharge>>>,
}

/// What an attempt was charged; given back when the last clone of it is dropped.
#[derive(Debug, Default)]
pub struct InFlightCharge {
    _own: InFlightPermits,
    _shared: Vec<Arc<EntryCharge>>,
}

/// The charge for a stored entry that several attempts may refer to.
struct EntryCharge {
    entry: Position,
    entries: Weak<SharedEntries>,
    _permits: InFlightPermits,
}

/// Units of the budget, from each part of it that they had to be taken from.
#[derive(Debug, Default)]
pub struct InFlightPermits {
    units: u32,
    parts: [Option<OwnedSemaphorePermit>; PARTS],
}

impl InFlightPermits {
    fn split(&mut self, units: u32) -> InFlightPermits {
        self.units -= units;
        let split = |part: &mut Option<OwnedSemaphorePermit>| part.as_mut()?.split(units as usize);
        InFlightPermits {
            units,
            parts: self.parts.each_mut().map(split),
        }
    }
}

/// The budget is used up for now: this much more would be needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetShortage {
    units: u32,
}

/// Numbers for `/healthz` and `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightUsage {
    pub bytes: usize,
    pub bytes_max: usize,
    /// Attempts that wait for room.
    pub waiting: usize,
}

impl InFlightBudget {
    pub fn new(bytes: usize) -> InFlightBudget {
        let units = (bytes / UNIT).clamp(1, u32::MAX as usize / 2) as u32;
        let part = |share: u32| Arc::new(Semaphore::new((units / 4 * share).max(1) as usize));
        InFlightBudget {
            all: Arc::new(Semaphore::new(units as usize)),
            not_failing: part(3),
            failing: part(2),
            units,
            entries: Arc::default(),
            waiting: AtomicUsize::new(0),
        }
    }

    /// The parts of the budget that an endpoint's attempts are taken from, the narrowest first, and how
    /// many units the narrowest has.
    fn parts(&self, standing: EndpointStanding) -> ([Option<&Arc<Semaphore>>; PARTS], u32) {
        let (all, not_failing, failing) = (Some(&self.all), Some(&self.not_failing), Some(&self.failing));
        let quarter = self.units / 4;
        match standing {
            EndpointStanding::Answering => ([all, None, None], self.units),
            EndpointStanding::Untried => ([not_failing, all, None], (quarter * 3).max(1)),
            EndpointStanding::Failing => ([failing, not_failing, all], (quarter * 2).max(1)),
        }
    }

    /// Charges an attempt, with permits that were waited for or with none. Fails with what is missing.
    pub fn try_charge(
        &self,
        standing: EndpointStanding,
        need: &InFlightNeed,
        mut permits: InFlightPermits,
    ) -> Result<InFlightCharge, BudgetShortage> {
        // Declared before the lock, so that it is dropped after it: the last reference to a charge locks.
        let mut shared = Vec::with_capacity(need.shared.len());
        let mut missing = Vec::new();
        let mut charged = match need.shared.is_empty() {
            true => None,
            false => Some(self.entries.charged.lock().expect("no panic while it is locked")),
        };
        if let Some(charged) = &charged {
            for &(entry, bytes) in &need.shared {
                match charged.get(&entry).and_then(Weak::upgrade) {
                    Some(known) => shared.push(known),
                    None => missing.push((entry, units_of(bytes))),
                }
            }
        }
        let (_, units_max) = self.parts(standing);
        let missing_units: u32 = missing.iter().map(|(_, units)| units).sum();
        // One attempt that is larger than the budget goes alone.
        let wanted = units_of(need.own).saturating_add(missing_units).min(units_max);
        if permits.units < wanted {
            drop(permits);
            permits = self.try_acquire(standing, wanted)?;
        }
        let mut left = permits.units;
        for (entry, units) in missing {
            let units = units.min(left);
            left -= units;
            let charge = Arc::new(EntryCharge {
                entry,
                entries: Arc::downgrade(&self.entries),
                _permits: permits.split(units),
            });
            if let Some(charged) = &mut charged {
                charged.insert(entry, Arc::downgrade(&charge));
            }
            shared.push(charge);
        }
        Ok(InFlightCharge {
            _own: permits,
            _shared: shared,
        })
    }

    fn try_acquire(&self, standing: EndpointStanding, units: u32) -> Result<InFlightPermits, BudgetShortage> {
        let mut permits = InFlightPermits::default();
        let (parts, _) = self.parts(standing);
        for (place, part) in parts.into_iter().flatten().enumerate() {
            let permit = part.clone().try_acquire_many_owned(units);
            permits.parts[place] = Some(permit.map_err(|_| BudgetShortage { units })?);
        }
        permits.units = units;
        Ok(permits)
    }

    /// Waits in line for what was missing. First come, first served, among endpoints of one standing.
    pub async fn wait(&self, standing: EndpointStanding, shortage: BudgetShortage) -> InFlightPermits {
        let _counted = WaitingCount::of(&self.waiting);
        let mut permits = InFlightPermits::default();
        let (parts, _) = self.parts(standing);
        for (place, part) in parts.into_iter().flatten().enumerate() {
            let permit = part.clone().acquire_many_owned(shortage.units).await;
            permits.parts[place] = Some(permit.expect("the budget is never closed"));
        }
        permits.units = shortage.units;
        permits
    }

    pub fn usage(&self) -> InFlightUsage {
        let free = self.all.available_permits().min(self.units as usize);
        InFlightUsage {
            bytes: (self.units as usize - free) * UNIT,
            bytes_max: self.units as usize * UNIT,
            waiting: self.waiting.load(Acquire),
        }
    }
}

fn units_of(bytes: usize) -> u32 {
    bytes.div_ceil(UNIT).min(u32::MAX as usize / 2) as u32
}

struct WaitingCount<'a>(&'a AtomicUsize);

impl<'a> WaitingCount<'a> {
    fn of(count: &'a AtomicUsize) -> WaitingCount<'a> {
        count.fetch_add(1, AcqRel);
        WaitingCount(count)
    }
}

impl Drop for WaitingCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

impl Drop for EntryCharge {
    fn drop(&mut self) {
        let Some(entries) = self.entries.upgrade() else {
            return;
        };
        let mut charged = entries.charged.lock().expect("no panic while it is locked");
        // Another attempt may have charged the entry anew since the last reference went.
        if charged
            .get(&self.entry)
            .is_some_and(|known| known.strong_count() == 0)
        {
            charged.remove(&self.entry);
        }
    }
}

impl std::fmt::Debug for EntryCharge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EntryCharge({})", self.entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointStanding::{Answering, Failing, Untried};

    const ENTRY: Position = Position(7);

    fn own(bytes: usize) -> InFlightNeed {
        InFlightNeed {
            own: bytes,
            shared: Vec::new(),
        }
    }

    fn referring(entry: Position, bytes: usize) -> InFlightNeed {
        InFlightNeed {
            own: UNIT,
            shared: vec![(entry, bytes)],
        }
    }

    fn charge(
        budget: &InFlightBudget,
        standing: EndpointStanding,
        need: &InFlightNeed,
    ) -> Result<InFlightCharge, BudgetShortage> {
        budget.try_charge(standing, need, InFlightPermits::default())
    }

    #[test]
    fn a_large_entry_is_charged_once_until_its_last_delivery_ends() {
        let budget = InFlightBudget::new(100 * UNIT);
        let first = charge(&budget, Answering, &referring(ENTRY, 50 * UNIT)).unwrap();
        assert_eq!(budget.usage().bytes, 51 * UNIT);
        let second = charge(&budget, Answering, &referring(ENTRY, 50 * UNIT)).unwrap();
        assert_eq!(budget.usage().bytes, 52 * UNIT);
        drop(first);
        assert_eq!(budget.usage().bytes, 51 * UNIT);
        drop(second);
        assert_eq!(budget.usage().bytes, 0);
        assert!(budget.entries.charged.lock().unwrap().is_empty());
    }

    #[test]
    fn failing_endpoints_leave_room_for_others() {
        let budget = InFlightBudget::new(100 * UNIT);
        let _failing = charge(&budget, Failing, &own(50 * UNIT)).unwrap();
        assert!(charge(&budget, Failing, &own(UNIT)).is_err());
        let _untried = charge(&budget, Untried, &own(25 * UNIT)).unwrap();
        assert!(charge(&budget, Untried, &own(UNIT)).is_err());
        let _answering = charge(&budget, Answering, &own(25 * UNIT)).unwrap();
        assert!(charge(&budget, Answering, &own(UNIT)).is_err());
    }

    #[test]
    fn an_attempt_larger_than_the_budget_goes_alone() {
        let budget = InFlightBudget::new(100 * UNIT);
        let alone = charge(&budget, Failing, &referring(ENTRY, 500 * UNIT)).unwrap();
        assert!(charge(&budget, Failing, &own(UNIT)).is_err());
        drop(alone);
        assert_eq!(budget.usage().bytes, 0);
        assert_eq!(budget.failing.available_permits(), 50);
    }

    #[tokio::test]
    async fn who_waits_is_served_in_line_and_keeps_what_was_waited_for() {
        let budget = InFlightBudget::new(100 * UNIT);
        let held = charge(&budget, Answering, &own(90 * UNIT)).unwrap();
        let shortage = charge(&budget, Answering, &own(60 * UNIT)).unwrap_err();
        let mut waiting = std::pin::pin!(budget.wait(Answering, shortage));
        assert!(futures_poll(waiting.as_mut()).await.is_none());
        assert_eq!(budget.usage().waiting, 1);
        drop(held);
        // A newcomer does not overtake.
        assert!(charge(&budget, Answering, &own(50 * UNIT)).is_err());
        let permits = waiting.await;
        let charged = budget.try_charge(Answering, &own(60 * UNIT), permits).unwrap();
        assert_eq!(budget.usage().bytes, 60 * UNIT);
        drop(charged);
        assert_eq!(
            budget.usage(),
            InFlightUsage {
                bytes: 0,
                bytes_max: 100 * UNIT,
                waiting: 0
            }
        );
    }

    /// Polls once.
    async fn futures_poll<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        let mut future = Some(future);
        std::future::poll_fn(move |context| {
            let polled = future.take().expect("polled once").poll(context);
            std::task::Poll::Ready(match polled {
                std::task::Poll::Ready(output) => Some(output),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }
}
