//! Time that advances only on request, so that a day of retries can be tried out in a second.

use crate::deliver::{DeliveryReply, DeliveryRequest, DeliveryTransport};
use crate::dispatch::Dispatcher;
use crate::{Engine, Error};
use async_trait::async_trait;
use postrider_core::time::{Clock, Sleep, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::sync::Notify;

/// How often to check whether the engine is at rest, in real time.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How often to yield to other tasks before that wait.
const YIELDS: usize = 64;
/// The real time that an answer gets to arrive which was sent just before the clock is advanced.
const ON_ITS_WAY: Duration = Duration::from_millis(50);

/// Stores the clock's time, so that the next process continues from there.
pub type StoreClockTime = Box<dyn Fn(Timestamp) + Send + Sync>;

/// A clock that stands still until it is set.
pub struct SteppedClock {
    inner: Mutex<SteppedClockState>,
    keep: StoreClockTime,
}

struct SteppedClockState {
    now: Timestamp,
    sleepers: BTreeMap<(Timestamp, u64), Waker>,
    /// Sleepers whose deadline has passed and that have not been polled yet.
    woken: BTreeSet<u64>,
    next_number: u64,
}

impl SteppedClock {
    pub fn new(now: Timestamp, keep: StoreClockTime) -> SteppedClock {
        keep(now);
        SteppedClock {
            inner: Mutex::new(SteppedClockState {
                now,
                sleepers: BTreeMap::new(),
                woken: BTreeSet::new(),
                next_number: 0,
            }),
            keep,
        }
    }

    fn hands(&self) -> MutexGuard<'_, SteppedClockState> {
        self.inner.lock().expect("no panic holds it")
    }

    /// Advances the clock, never back, and wakes sleepers whose deadline has passed.
    fn set(&self, to: Timestamp) {
        // Stored first: nothing may be recorded for a time that the next process would not know.
        (self.keep)(to);
        let mut hands = self.hands();
        hands.now = hands.now.max(to);
        let later = hands.sleepers.split_off(&(to + Duration::from_nanos(1), 0));
        let woken = std::mem::replace(&mut hands.sleepers, later);
        hands.woken.extend(woken.keys().map(|key| key.1));
        drop(hands);
        woken.into_values().for_each(Waker::wake);
    }

    fn next_sleeper(&self) -> Option<Timestamp> {
        self.hands().sleepers.first_key_value().map(|(key, _)| key.0)
    }

    fn anyone_getting_up(&self) -> bool {
        !self.hands().woken.is_empty()
    }
}

impl Clock for SteppedClock {
    fn now(&self) -> Timestamp {
        self.hands().now
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        Box::pin(PendingSleep {
            clock: self,
            deadline,
            number: None,
        })
    }
}

/// Counts as waking up until it is dropped: by then the task is at work, or asleep again.
struct PendingSleep<'a> {
    clock: &'a SteppedClock,
    deadline: Timestamp,
    number: Option<u64>,
}

impl Future for PendingSleep<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut hands = self.clock.hands();
        if hands.now >= self.deadline {
            return Poll::Ready(());
        }
        let number = self.number.unwrap_or_else(|| {
            hands.next_number += 1;
            hands.next_number
        });
        hands.sleepers.insert((self.deadline, number), cx.waker().clone());
        drop(hands);
        self.number = Some(number);
        Poll::Pending
    }
}

impl Drop for PendingSleep<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let mut hands = self.clock.hands();
            hands.sleepers.remove(&(self.deadline, number));
            hands.woken.remove(&number);
        }
    }
}

/// A transport that knows which attempts are in flight, and since when in real time.
pub struct WatchedTransport {
    inner: Arc<dyn DeliveryTransport>,
    wall: Arc<dyn Clock>,
    made: AtomicU64,
    /// When each attempt was made, by the real clock.
    under_way: Mutex<BTreeMap<u64, Timestamp>>,
    /// Notified when an attempt ends.
    ended: Notify,
}

impl WatchedTransport {
    pub fn new(inner: Arc<dyn DeliveryTransport>, wall: Arc<dyn Clock>) -> WatchedTransport {
        WatchedTransport {
            inner,
            wall,
            made: AtomicU64::new(0),
            under_way: Mutex::default(),
            ended: Notify::new(),
        }
    }

    fn under_way(&self) -> MutexGuard<'_, BTreeMap<u64, Timestamp>> {
        self.under_way.lock().expect("no panic holds it")
    }

    fn made(&self) -> u64 {
        self.made.load(Acquire)
    }

    /// Whether an attempt with a number above `after` is unanswered, and not older than `patience`.
    fn awaits_answer(&self, after: u64, patience: Duration) -> bool {
        let now = self.wall.now();
        let under_way = self.under_way();
        let mut made_here = under_way.range(after..);
        made_here.any(|(_, since)| now.since(*since) < patience)
    }
}

impl WatchedTransport {
    /// Whether an unanswered attempt is at least this old.
    fn any_older_than(&self, age: Duration) -> bool {
        let now = self.wall.now();
        self.under_way().values().any(|since| now.since(*since) >= age)
    }
}

/// Removes an attempt from the list however it ends.
struct AttemptInFlight<'a> {
    transport: &'a WatchedTransport,
    number: u64,
}

impl Drop for AttemptInFlight<'_> {
    fn drop(&mut self) {
        self.transport.under_way().remove(&self.number);
        self.transport.ended.notify_waiters();
    }
}

#[async_trait]
impl DeliveryTransport for WatchedTransport {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let under_way = AttemptInFlight {
            number: self.made.fetch_add(1, AcqRel),
            transport: &self,
        };
        self.under_way().insert(under_way.number, self.wall.now());
        self.inner.clone().send(request).await
    }
}

/// How far to advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdvanceTarget {
    By(Duration),
    To(Timestamp),
    /// To the next time at which an attempt is made; not at all if there is nothing to attempt.
    NextAttempt,
}

/// The result of advancing the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvanceReport {
    pub now: Timestamp,
    /// Attempts made after the time at which the clock stood.
    pub attempts: u64,
}

/// An engine on a test clock.
pub struct VirtualTime {
    clock: Arc<SteppedClock>,
    transport: Arc<WatchedTransport>,
    wall: Arc<dyn Clock>,
    engine: Arc<Engine>,
    /// Held while the clock is advanced; contains the pulse up to which everything is durable.
    moving: tokio::sync::Mutex<Option<u64>>,
}

impl VirtualTime {
    pub fn new(
        clock: Arc<SteppedClock>,
        transport: Arc<WatchedTransport>,
        wall: Arc<dyn Clock>,
        engine: Arc<Engine>,
    ) -> VirtualTime {
        VirtualTime {
            clock,
            transport,
            wall,
            engine,
            moving: tokio::sync::Mutex::default(),
        }
    }

    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn dispatcher(&self) -> &Arc<Dispatcher> {
        &self.engine.dispatcher
    }

    /// Advances through every time at which something is due, in order. At each it waits until
    /// every attempt made there is answered, or has been in flight for `settle` of real time; such
    /// an attempt stays in flight. If cancelled, the clock stays at the time that it had reached.
    /// Everything that has happened is durable on return.
    pub async fn advance(&self, target: AdvanceTarget, settle: Duration) -> Result<AdvanceReport, Error> {
        let mut durable = self.moving.lock().await;
        let end = match target {
            AdvanceTarget::By(by) => self.clock.now() + by,
            AdvanceTarget::To(at) => at,
            AdvanceTarget::NextAttempt => Timestamp::MAX,
        };
        if self.transport.any_older_than(settle) {
            self.pause(ON_ITS_WAY).await;
        }
        self.come_to_rest(&mut durable, 0, settle).await?;
        let start = self.transport.made();
        loop {
            let made = self.transport.made();
            if target == AdvanceTarget::NextAttempt && (made > start || !self.anything_left()) {
                break;
            }
            let next = self.next_instant().filter(|at| *at <= end);
            let Some(next) = next else {
                break;
            };
            self.move_to(&mut durable, next, made, settle).await?;
        }
        if target != AdvanceTarget::NextAttempt && self.clock.now() < end {
            let made = self.transport.made();
            self.move_to(&mut durable, end, made, settle).await?;
        }
        Ok(AdvanceReport {
            now: self.clock.now(),
            attempts: self.transport.made() - start,
        })
    }

    async fn move_to(
        &self,
        durable: &mut Option<u64>,
        at: Timestamp,
        made: u64,
        settle: Duration,
    ) -> Result<(), Error> {
        if self.engine.is_stopping() {
            return Err(Error::Stopping);
        }
        self.clock.set(at);
        self.dispatcher().look(at);
        self.engine.start_due_letter_writers(at);
        self.come_to_rest(durable, made, settle).await
    }

    fn next_instant(&self) -> Option<Timestamp> {
        let now = self.clock.now();
        let known = [
            self.clock.next_sleeper(),
            self.dispatcher().next_instant(now),
            self.engine.next_letters_due(now),
        ];
        known.into_iter().flatten().min()
    }

    /// Whether an attempt is still to come or in flight.
    fn anything_left(&self) -> bool {
        self.transport.any_older_than(Duration::ZERO)
            || self.dispatcher().next_instant(self.clock.now()).is_some()
            || self.engine.handshakes.asks()
    }

    /// Waits until nothing more happens at this time, except that attempts made before number
    /// `made`, or longer than `settle` ago, may stay unanswered. Makes everything durable.
    async fn come_to_rest(
        &self,
        durable: &mut Option<u64>,
        made: u64,
        settle: Duration,
    ) -> Result<(), Error> {
        loop {
            // A stopping engine claims nothing: due work would be skipped.
            if self.engine.is_stopping() {
                return Err(Error::Stopping);
            }
            let pulse = self.pulse();
            if self.at_rest(made, settle) && self.still_at_rest(pulse, made, settle).await {
                if *durable == Some(pulse) {
                    return Ok(());
                }
                // Settled deliveries have their next due times only after a flush, which may start
                // more work.
                self.dispatcher().flush().await?;
                self.engine.start_due_letter_writers(self.clock.now());
                *durable = Some(pulse);
            } else {
                self.wait_a_little(made, settle).await;
            }
        }
    }

    fn pulse(&self) -> u64 {
        self.dispatcher().pulse().wrapping_add(self.transport.made())
    }

    fn at_rest(&self, made: u64, settle: Duration) -> bool {
        !self.clock.anyone_getting_up()
            && !self.dispatcher().is_busy()
            && !self.engine.dead_letters.is_busy()
            && !self.engine.handshakes.is_busy()
            && !self.transport.awaits_answer(made, settle)
    }

    /// Checks repeatedly: a task may be between two states.
    async fn still_at_rest(&self, pulse: u64, made: u64, settle: Duration) -> bool {
        for _ in 0..3 {
            tokio::task::yield_now().await;
            if !self.at_rest(made, settle) || self.pulse() != pulse {
                return false;
            }
        }
        true
    }

    /// Waits until something may have changed.
    async fn wait_a_little(&self, made: u64, settle: Duration) {
        if self.transport.awaits_answer(made, settle) {
            tokio::select! {
                biased;
                () = self.transport.ended.notified() => {}
                () = self.pause(LOOK_EVERY) => {}
            }
            return;
        }
        // A task is at work: usually that takes microseconds.
        for _ in 0..YIELDS {
            tokio::task::yield_now().await;
            if self.at_rest(made, settle) {
                return;
            }
        }
        self.pause(LOOK_EVERY).await;
    }

    async fn pause(&self, real: Duration) {
        self.wall.sleep_until(self.wall.now() + real).await;
    }
}
