//! The budget for bytes in flight: how much memory deliveries under way may hold, all together.
//!
//! Every attempt is charged for what it keeps in memory: a fixed overhead, the bytes written for it
//! alone, and the stored events that it refers to. A large stored entry is charged once, however
//! many deliveries refer to it. An attempt that does not fit waits in line, without its events.
//!
//! Failing endpoints cannot use up the budget: one part of it is reserved for endpoints that have
//! not failed, and another part for those that have answered. An endpoint that holds a large share
//! of what is free is treated as failing for anything more. A last part is reserved for endpoints
//! that hold nothing, so that something stays free for a newcomer however much the others take.

use postrider_core::ids::Position;
use rustc_hash::FxHashMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Charged for every attempt: its task, its connection's buffers and its headers.
pub const ATTEMPT_OVERHEAD: usize = 24 * 1024;
/// Stored entries from this size on are charged once for all deliveries that refer to them. Smaller
/// ones are charged to each: the bookkeeping would cost more than it saves.
pub const SHARED_ENTRY_MIN: usize = 64 * 1024;
/// The smallest budget: it must hold a few of the largest events.
pub const BUDGET_BYTES_MIN: usize = 16 << 20;
pub const BUDGET_BYTES_DEFAULT: usize = 256 << 20;
/// Permits are given out in units of this many bytes.
const UNIT: usize = 1024;
/// Parts of the budget, each contained in the next.
const PARTS: usize = 4;
/// The divisor of the share reserved for endpoints that hold nothing.
const FIRST_ATTEMPTS_SHARE: u32 = 8;
/// Beyond its first attempt, an endpoint may hold at most what is free divided by this.
const ENDPOINT_SHARE: u32 = 4;

/// An endpoint's recent answers, which decide how much of the budget it may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointStanding {
    /// The last answer was no failure of the endpoint: all of the budget.
    Answering,
    /// Never tried: three quarters.
    Untried,
    /// Failing: half.
    Failing,
}

/// The parts of the budget that an attempt is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AttemptClass {
    standing: EndpointStanding,
    /// Whether the endpoint holds something already.
    further: bool,
}

/// The memory that an attempt keeps.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct InFlightNeed {
    /// Bytes that only this attempt keeps.
    pub own: usize,
    /// Large stored entries that the attempt refers to, by their first position, with their sizes.
    pub shared: Vec<(Position, usize)>,
}

pub struct InFlightBudget {
    all: Arc<Semaphore>,
    /// For attempts at endpoints that hold something already.
    further: Arc<Semaphore>,
    not_failing: Arc<Semaphore>,
    failing: Arc<Semaphore>,
    units: u32,
    /// The least charge of an attempt: each takes a connection, and connections may be scarcer than
    /// memory.
    attempt_units: u32,
    entries: Arc<SharedEntries>,
    waiting: AtomicUsize,
}

#[derive(Default)]
struct SharedEntries {
    charged: Mutex<FxHashMap<Position, Weak<EntryCharge>>>,
}

/// The charge of an attempt, released when its last clone is dropped.
#[derive(Debug, Default)]
pub struct InFlightCharge {
    _own: InFlightPermits,
    _shared: Vec<Arc<EntryCharge>>,
    _of_endpoint: EndpointCharge,
}

/// The units that the attempts of one endpoint hold. A shared stored entry counts for the endpoint
/// that was charged for it.
#[derive(Debug, Default)]
pub struct EndpointUsage {
    units: AtomicU32,
}

#[derive(Debug, Default)]
struct EndpointCharge {
    usage: Arc<EndpointUsage>,
    units: u32,
}

impl EndpointCharge {
    fn new(usage: &Arc<EndpointUsage>, units: u32) -> EndpointCharge {
        usage.units.fetch_add(units, AcqRel);
        EndpointCharge {
            usage: usage.clone(),
            units,
        }
    }
}

impl Drop for EndpointCharge {
    fn drop(&mut self) {
        self.usage.units.fetch_sub(self.units, AcqRel);
    }
}

/// The charge for a stored entry that several attempts may refer to.
struct EntryCharge {
    entry: Position,
    entries: Weak<SharedEntries>,
    _permits: InFlightPermits,
}

/// Units of the budget, with permits from each part that they are charged to.
#[derive(Debug, Default)]
pub struct InFlightPermits {
    units: u32,
    /// Whether the permits are the most that an attempt can get, for an attempt larger than that.
    alone: bool,
    parts: [Option<OwnedSemaphorePermit>; PARTS],
}

impl InFlightPermits {
    fn split(&mut self, units: u32) -> InFlightPermits {
        self.units -= units;
        let split = |part: &mut Option<OwnedSemaphorePermit>| part.as_mut()?.split(units as usize);
        InFlightPermits {
            units,
            alone: false,
            parts: self.parts.each_mut().map(split),
        }
    }
}

/// The units that are missing because the budget is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetShortage {
    units: u32,
    class: AttemptClass,
}

/// Numbers for `/healthz` and `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightUsage {
    pub bytes: usize,
    pub bytes_max: usize,
    /// Attempts that wait for the budget.
    pub waiting: usize,
}

impl InFlightBudget {
    /// `attempts_max` bounds the attempts in flight, however little memory they take.
    pub fn new(bytes: usize, attempts_max: usize) -> InFlightBudget {
        let units = (bytes / UNIT).clamp(1, u32::MAX as usize / 2) as u32;
        let part = |share: u32| Arc::new(Semaphore::new((units / 4 * share).max(1) as usize));
        InFlightBudget {
            all: Arc::new(Semaphore::new(units as usize)),
            further: Arc::new(Semaphore::new((units - units / FIRST_ATTEMPTS_SHARE) as usize)),
            not_failing: part(3),
            failing: part(2),
            units,
            attempt_units: (units as usize / attempts_max.max(1)) as u32,
            entries: Arc::default(),
            waiting: AtomicUsize::new(0),
        }
    }

    /// The parts of the budget that an attempt is charged to, the narrowest first, and the size of
    /// the narrowest in units.
    fn parts(&self, class: AttemptClass) -> ([Option<&Arc<Semaphore>>; PARTS], u32) {
        let (not_failing, failing) = (Some(&self.not_failing), Some(&self.failing));
        let (all, further) = (Some(&self.all), class.further.then_some(&self.further));
        let quarter = self.units / 4;
        match class.standing {
            EndpointStanding::Answering if class.further => {
                let units_max = self.units - self.units / FIRST_ATTEMPTS_SHARE;
                ([further, all, None, None], units_max)
            }
            EndpointStanding::Answering => ([all, None, None, None], self.units),
            EndpointStanding::Untried => ([not_failing, further, all, None], (quarter * 3).max(1)),
            EndpointStanding::Failing => ([failing, not_failing, further, all], (quarter * 2).max(1)),
        }
    }

    /// The class of an attempt at an endpoint that holds this many units and wants so many more.
    fn class_of(&self, standing: EndpointStanding, held: u32, wanted: u32) -> AttemptClass {
        let free = self.all.available_permits().min(self.units as usize) as u32;
        let further = held > 0;
        let is_large = further && held.saturating_add(wanted) > free / ENDPOINT_SHARE;
        AttemptClass {
            standing: if is_large {
                EndpointStanding::Failing
            } else {
                standing
            },
            further,
        }
    }

    /// Charges an attempt at an endpoint, using permits that it has waited for, if any. Fails with
    /// the units that are missing.
    pub fn try_charge(
        &self,
        standing: EndpointStanding,
        usage: &Arc<EndpointUsage>,
        need: &InFlightNeed,
        mut permits: InFlightPermits,
    ) -> Result<InFlightCharge, BudgetShortage> {
        // Declared before the lock, and so dropped after it: dropping the last reference to a
        // charge takes the lock.
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
        let missing_units: u32 = missing.iter().map(|(_, units)| units).sum();
        let wanted = units_of(need.own).saturating_add(missing_units);
        let wanted = wanted.max(self.attempt_units);
        let class = self.class_of(standing, usage.units.load(Acquire), wanted);
        // An attempt larger than the budget is admitted alone.
        let (_, units_max) = self.parts(class);
        if permits.units < wanted && !permits.alone {
            drop(permits);
            permits = self.try_acquire(class, wanted.min(units_max))?;
        }
        let of_endpoint = EndpointCharge::new(usage, permits.units);
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
            _of_endpoint: of_endpoint,
        })
    }

    fn try_acquire(&self, class: AttemptClass, units: u32) -> Result<InFlightPermits, BudgetShortage> {
        let mut permits = InFlightPermits::default();
        let (parts, _) = self.parts(class);
        for (place, part) in parts.into_iter().flatten().enumerate() {
            let permit = part.clone().try_acquire_many_owned(units);
            permits.parts[place] = Some(permit.map_err(|_| BudgetShortage { units, class })?);
        }
        permits.units = units;
        Ok(permits)
    }

    /// Waits for the missing units. First come, first served, among endpoints of the same class.
    pub async fn wait(&self, shortage: BudgetShortage) -> InFlightPermits {
        let _counted = WaitingCount::of(&self.waiting);
        let mut permits = InFlightPermits::default();
        let (parts, _) = self.parts(shortage.class);
        for (place, part) in parts.into_iter().flatten().enumerate() {
            let permit = part.clone().acquire_many_owned(shortage.units).await;
            permits.parts[place] = Some(permit.expect("the budget is never closed"));
        }
        let (_, units_max) = self.parts(shortage.class);
        permits.units = shortage.units;
        permits.alone = shortage.units == units_max;
        permits
    }

    /// Whether attempts wait for the budget.
    pub fn is_short(&self) -> bool {
        self.waiting.load(Acquire) > 0
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
        // Another attempt may have charged the entry again since the last reference was dropped.
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
        budget.try_charge(standing, &Arc::default(), need, InFlightPermits::default())
    }

    #[test]
    fn a_large_entry_is_charged_once_until_its_last_delivery_ends() {
        let budget = InFlightBudget::new(100 * UNIT, usize::MAX);
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
        let budget = InFlightBudget::new(100 * UNIT, usize::MAX);
        let _failing = charge(&budget, Failing, &own(50 * UNIT)).unwrap();
        assert!(charge(&budget, Failing, &own(UNIT)).is_err());
        let _untried = charge(&budget, Untried, &own(25 * UNIT)).unwrap();
        assert!(charge(&budget, Untried, &own(UNIT)).is_err());
        let _answering = charge(&budget, Answering, &own(25 * UNIT)).unwrap();
        assert!(charge(&budget, Answering, &own(UNIT)).is_err());
    }

    // Regression: four endpoints that had answered once and then read nothing held all of the
    // budget.
    #[test]
    fn however_many_endpoints_hold_what_they_can_get_another_finds_room() {
        let budget = InFlightBudget::new(10_000 * UNIT, usize::MAX);
        let mut held = Vec::new();
        for endpoints in [1, 4, 40] {
            for _ in 0..endpoints {
                let usage = Arc::new(EndpointUsage::default());
                let one =
                    || budget.try_charge(Answering, &usage, &own(10 * UNIT), InFlightPermits::default());
                held.extend(std::iter::from_fn(|| one().ok()));
            }
            let free = budget.all.available_permits();
            assert!(free > 100, "{free} units are free beside {endpoints} more");
            let newcomer = Arc::new(EndpointUsage::default());
            let charge = budget.try_charge(Answering, &newcomer, &own(50 * UNIT), InFlightPermits::default());
            charge.unwrap();
            assert_eq!(newcomer.units.load(Acquire), 0, "it was given back");
        }
    }

    // Regression: 10 900 attempts fit into the memory, and used up all file descriptors.
    #[test]
    fn attempts_are_no_more_than_there_are_connections_for() {
        let budget = InFlightBudget::new(100 * UNIT, 10);
        let one = |standing| charge(&budget, standing, &own(UNIT)).ok();
        let failing: Vec<_> = std::iter::from_fn(|| one(Failing)).collect();
        let answering: Vec<_> = std::iter::from_fn(|| one(Answering)).collect();
        assert_eq!((failing.len(), answering.len()), (5, 5));
    }

    #[test]
    fn one_endpoint_alone_may_hold_more_than_half() {
        let budget = InFlightBudget::new(1000 * UNIT, usize::MAX);
        let usage = Arc::new(EndpointUsage::default());
        let one = || budget.try_charge(Untried, &usage, &own(UNIT), InFlightPermits::default());
        let held: Vec<_> = std::iter::from_fn(|| one().ok()).collect();
        assert!((600..750).contains(&held.len()), "{}", held.len());
    }

    #[test]
    fn an_attempt_larger_than_the_budget_goes_alone() {
        let budget = InFlightBudget::new(100 * UNIT, usize::MAX);
        let alone = charge(&budget, Failing, &referring(ENTRY, 500 * UNIT)).unwrap();
        assert!(charge(&budget, Failing, &own(UNIT)).is_err());
        drop(alone);
        assert_eq!(budget.usage().bytes, 0);
        assert_eq!(budget.failing.available_permits(), 50);
    }

    #[tokio::test]
    async fn who_waits_is_served_in_line_and_keeps_what_was_waited_for() {
        let budget = InFlightBudget::new(100 * UNIT, usize::MAX);
        let held = charge(&budget, Answering, &own(90 * UNIT)).unwrap();
        let shortage = charge(&budget, Answering, &own(60 * UNIT)).unwrap_err();
        let mut waiting = std::pin::pin!(budget.wait(shortage));
        assert!(futures_poll(waiting.as_mut()).await.is_none());
        assert_eq!(budget.usage().waiting, 1);
        drop(held);
        // A newcomer does not overtake.
        assert!(charge(&budget, Answering, &own(50 * UNIT)).is_err());
        let permits = waiting.await;
        let charged = budget
            .try_charge(Answering, &Arc::default(), &own(60 * UNIT), permits)
            .unwrap();
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

    /// Polls a future once.
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
