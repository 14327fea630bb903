//! Time that moves only when told to, so that a day of retries can be tried out in a second.

use crate::deliver::{Reply, Request, Transport};
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

/// How often it is looked whether everything has come to rest, in real time.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Before that, others are let go first this many times.
const YIELDS: usize = 64;
/// An answer that was sent just before the clock is told to move gets this much real time to arrive.
const ON_ITS_WAY: Duration = Duration::from_millis(50);

/// Keeps what the clock shows, so that the next life goes on from there.
pub type Keep = Box<dyn Fn(Timestamp) + Send + Sync>;

/// A clock that stands still until it is set.
pub struct TestClock {
    inner: Mutex<Hands>,
    keep: Keep,
}

struct Hands {
    now: Timestamp,
    sleepers: BTreeMap<(Timestamp, u64), Waker>,
    /// Sleepers whose time has come and who have not got up yet.
    woken: BTreeSet<u64>,
    next_number: u64,
}

impl TestClock {
    pub fn new(now: Timestamp, keep: Keep) -> TestClock {
        keep(now);
        TestClock {
            inner: Mutex::new(Hands {
                now,
                sleepers: BTreeMap::new(),
                woken: BTreeSet::new(),
                next_number: 0,
            }),
            keep,
        }
    }

    fn hands(&self) -> MutexGuard<'_, Hands> {
        self.inner.lock().expect("no panic holds it")
    }

    /// Moves on, never back, and wakes whoever slept until then.
    fn set(&self, to: Timestamp) {
        // First of all: nothing may be recorded for a time that the next life would not know of.
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

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        self.hands().now
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        Box::pin(Sleeper {
            clock: self,
            deadline,
            number: None,
        })
    }
}

/// Counts as getting up until it is dropped: by then whoever slept is at work, or asleep again.
struct Sleeper<'a> {
    clock: &'a TestClock,
    deadline: Timestamp,
    number: Option<u64>,
}

impl Future for Sleeper<'_> {
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

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let mut hands = self.clock.hands();
            hands.sleepers.remove(&(self.deadline, number));
            hands.woken.remove(&number);
        }
    }
}

/// A transport that knows which attempts are under way, and since when in real time.
pub struct WatchedTransport {
    inner: Arc<dyn Transport>,
    wall: Arc<dyn Clock>,
    made: AtomicU64,
    /// When each attempt was made, by the real clock.
    under_way: Mutex<BTreeMap<u64, Timestamp>>,
    /// One of them has ended.
    ended: Notify,
}

impl WatchedTransport {
    pub fn new(inner: Arc<dyn Transport>, wall: Arc<dyn Clock>) -> WatchedTransport {
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

    /// Whether an attempt is unanswered that was made after attempt number `after`, and not longer ago than
    /// `patience`.
    fn awaits_answer(&self, after: u64, patience: Duration) -> bool {
        let now = self.wall.now();
        let under_way = self.under_way();
        let mut made_here = under_way.range(after..);
        made_here.any(|(_, since)| now.since(*since) < patience)
    }
}

impl WatchedTransport {
    /// Whether an attempt is unanswered that was made at least this long ago.
    fn any_older_than(&self, age: Duration) -> bool {
        let now = self.wall.now();
        self.under_way().values().any(|since| now.since(*since) >= age)
    }
}

/// Takes an attempt off the list however it ends.
struct UnderWay<'a> {
    transport: &'a WatchedTransport,
    number: u64,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.transport.under_way().remove(&self.number);
        self.transport.ended.notify_waiters();
    }
}

#[async_trait]
impl Transport for WatchedTransport {
    async fn send(self: Arc<Self>, request: Request) -> Reply {
        let under_way = UnderWay {
            number: self.made.fetch_add(1, AcqRel),
            transport: &self,
        };
        self.under_way().insert(under_way.number, self.wall.now());
        self.inner.clone().send(request).await
    }
}

/// How far to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    By(Duration),
    To(Timestamp),
    /// To the next instant at which an attempt is made; nowhere if nothing is left to attempt.
    NextAttempt,
}

/// What moving came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advanced {
    pub now: Timestamp,
    /// Attempts that were made at instants after the one at which the clock stood.
    pub attempts: u64,
}

/// An engine on a test clock.
pub struct VirtualTime {
    clock: Arc<TestClock>,
    transport: Arc<WatchedTransport>,
    wall: Arc<dyn Clock>,
    engine: Arc<Engine>,
    /// Held by whoever moves the clock; knows up to where everything is durable.
    moving: tokio::sync::Mutex<Option<u64>>,
}

impl VirtualTime {
    pub fn new(
        clock: Arc<TestClock>,
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

    /// Moves through every instant at which something is due, in order. At each it waits until every attempt
    /// made there is answered, or has been out for `settle` of real time; such an attempt stays under way.
    /// Cancelled, the clock stays at the instant that it had reached. What has happened is durable on return.
    pub async fn advance(&self, target: Target, settle: Duration) -> Result<Advanced, Error> {
        let mut durable = self.moving.lock().await;
        let end = match target {
            Target::By(by) => self.clock.now() + by,
            Target::To(at) => at,
            Target::NextAttempt => Timestamp::MAX,
        };
        if self.transport.any_older_than(settle) {
            self.pause(ON_ITS_WAY).await;
        }
        self.come_to_rest(&mut durable, 0, settle).await?;
        let start = self.transport.made();
        loop {
            let made = self.transport.made();
            if target == Target::NextAttempt && (made > start || !self.anything_left()) {
                break;
            }
            let next = self.next_instant().filter(|at| *at <= end);
            let Some(next) = next else {
                break;
            };
            self.move_to(&mut durable, next, made, settle).await?;
        }
        if target != Target::NextAttempt && self.clock.now() < end {
            let made = self.transport.made();
            self.move_to(&mut durable, end, made, settle).await?;
        }
        Ok(Advanced {
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
        self.engine.look_for_letters(at);
        self.come_to_rest(durable, made, settle).await
    }

    fn next_instant(&self) -> Option<Timestamp> {
        let now = self.clock.now();
        let known = [
            self.clock.next_sleeper(),
            self.dispatcher().next_instant(now),
            self.engine.next_letters(now),
        ];
        known.into_iter().flatten().min()
    }

    /// Whether an attempt is still to come or under way.
    fn anything_left(&self) -> bool {
        self.transport.any_older_than(Duration::ZERO)
            || self.dispatcher().next_instant(self.clock.now()).is_some()
            || self.engine.handshakes.asks()
    }

    /// Waits until nothing more happens at this instant, except that attempts made before number `made`, or
    /// longer than `settle` ago, may stay unanswered. Makes it all durable.
    async fn come_to_rest(
        &self,
        durable: &mut Option<u64>,
        made: u64,
        settle: Duration,
    ) -> Result<(), Error> {
        loop {
            // Nothing is claimed any more: what is due would be passed by.
            if self.engine.is_stopping() {
                return Err(Error::Stopping);
            }
            let pulse = self.pulse();
            if self.at_rest(made, settle) && self.still_at_rest(pulse, made, settle).await {
                if *durable == Some(pulse) {
                    return Ok(());
                }
                // What was settled shows among what is due only then; and that may set something going.
                self.dispatcher().flush().await?;
                self.engine.look_for_letters(self.clock.now());
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

    /// Looked at twice: a task may be between two states.
    async fn still_at_rest(&self, pulse: u64, made: u64, settle: Duration) -> bool {
        for _ in 0..3 {
            tokio::task::yield_now().await;
            if !self.at_rest(made, settle) || self.pulse() != pulse {
                return false;
            }
        }
        true
    }

    /// Until something may have changed.
    async fn wait_a_little(&self, made: u64, settle: Duration) {
        if self.transport.awaits_answer(made, settle) {
            tokio::select! {
                biased;
                () = self.transport.ended.notified() => {}
                () = self.pause(LOOK_EVERY) => {}
            }
            return;
        }
        // Someone is at work: most often that takes microseconds.
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
