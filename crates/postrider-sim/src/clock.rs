//! A clock that follows the test runtime's paused time, and can be set.

use postrider_core::time::{Clock, Sleep, Timestamp};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::time::Duration;
use tokio::time::Instant;

/// The beginning of simulated time.
pub const EPOCH: Timestamp = Timestamp::from_secs(1_700_000_000);
/// The longest sleep before the time is read again, as with the real clock.
const NAP_MAX: Duration = Duration::from_secs(60);

/// A wall clock that may be set forward and back.
#[derive(Debug)]
pub struct SimClock {
    started: Instant,
    /// How far the clock has been set, in nanoseconds.
    set_by: AtomicI64,
    /// The latest time shown before the clock was set back.
    latest: AtomicI64,
    /// Whether the clock will not be set any more, so that sleeps need not be split.
    steady: AtomicBool,
}

impl SimClock {
    /// Must be called within the simulation's runtime.
    pub fn start() -> SimClock {
        SimClock {
            started: Instant::now(),
            set_by: AtomicI64::new(0),
            latest: AtomicI64::new(0),
            steady: AtomicBool::new(false),
        }
    }

    /// The time that has really passed.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn set_forward(&self, by: Duration) {
        self.set_by.fetch_add(by.as_nanos() as i64, Relaxed);
    }

    pub fn set_back(&self, by: Duration) {
        self.latest.fetch_max(self.now().nanos(), Relaxed);
        self.set_by.fetch_sub(by.as_nanos() as i64, Relaxed);
    }

    /// The latest time that the clock ever showed.
    pub fn latest(&self) -> Timestamp {
        Timestamp::from_nanos(self.latest.load(Relaxed)).max(self.now())
    }

    /// Promises that the clock is not set any more.
    pub fn keep_steady(&self) {
        self.steady.store(true, Relaxed);
    }

    /// Waits for this much time to pass, whatever the clock shows.
    pub async fn pass(&self, time: Duration) {
        tokio::time::sleep_until(Instant::now() + time).await;
    }
}

impl Clock for SimClock {
    fn now(&self) -> Timestamp {
        let set_by = self.set_by.load(Relaxed);
        let shown = EPOCH + self.started.elapsed();
        Timestamp::from_nanos(shown.nanos() + set_by)
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        Box::pin(async move {
            loop {
                let left = deadline.since(self.now());
                if left.is_zero() {
                    return;
                }
                let nap = if self.steady.load(Relaxed) {
                    left
                } else {
                    left.min(NAP_MAX)
                };
                self.pass(nap).await;
            }
        })
    }
}
