//! The lease: until when this node may act for its partitions.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

/// A wall clock that has advanced by this much more than the monotonic clock indicates a suspended
/// machine.
const SLEPT_AT_LEAST: Duration = Duration::from_millis(500);

/// A moment according to both clocks.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    /// Time as counted by [`NodeLease::elapsed`].
    pub at: Duration,
    wall: u64,
    /// Whether the machine was suspended since the last call.
    pub slept: bool,
}

/// The end of this node's lease, shared by everything that claims or appends. The membership loop
/// extends it with each stored heartbeat. Expires by itself, so that nothing stays valid when the
/// loop hangs or the process is stopped.
#[derive(Debug)]
pub struct NodeLease {
    began: Instant,
    /// Nanoseconds after `began`.
    until: AtomicU64,
    /// Nanoseconds of the wall clock. While a machine is suspended, the monotonic clock stands
    /// still and the wall clock advances. A wall clock that is set forward costs at most the time
    /// to the next heartbeat.
    wall_until: AtomicU64,
    /// Nanoseconds by which the wall clock was seen to run ahead because the machine was suspended.
    slept: AtomicU64,
    /// Readings of both clocks at the last call.
    seen: Mutex<(u64, u64)>,
    /// Ended for good: another process took this node's place, or the node has left.
    ended: AtomicBool,
}

impl NodeLease {
    /// A lease that is not valid until it is extended.
    pub fn new() -> NodeLease {
        NodeLease {
            began: Instant::now(),
            until: AtomicU64::new(0),
            wall_until: AtomicU64::new(0),
            slept: AtomicU64::new(0),
            seen: Mutex::new((0, wall())),
            ended: AtomicBool::new(false),
        }
    }

    /// The time base of the lease: age of this process, including time in which the machine was
    /// suspended.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed() + Duration::from_nanos(self.slept.load(Ordering::Acquire))
    }

    /// The current time, after a check whether the machine was suspended.
    pub fn now(&self) -> ClockReading {
        self.now_by(nanos(self.began.elapsed()), wall())
    }

    fn now_by(&self, awake: u64, wall: u64) -> ClockReading {
        let mut seen = self.seen.lock().expect("no panic holds it");
        let (awake_before, wall_before) = std::mem::replace(&mut *seen, (awake, wall));
        let ahead = wall
            .saturating_sub(wall_before)
            .saturating_sub(awake.saturating_sub(awake_before));
        // Smaller differences are adjustments of the wall clock.
        let slept = ahead > nanos(SLEPT_AT_LEAST);
        if slept {
            self.slept.fetch_add(ahead, Ordering::AcqRel);
        }
        let all = self.slept.load(Ordering::Acquire);
        ClockReading {
            at: Duration::from_nanos(awake.saturating_add(all)),
            wall,
            slept,
        }
    }

    /// Whether the lease is valid at `now`, a time as counted by [`NodeLease::elapsed`].
    pub fn valid(&self, now: Duration) -> bool {
        nanos(now) < self.until.load(Ordering::Acquire)
    }

    /// Whether the lease is valid at this moment, by both clocks.
    pub fn valid_now(&self) -> bool {
        self.valid(self.elapsed()) && wall() < self.wall_until.load(Ordering::Acquire)
    }

    /// The remaining validity.
    pub fn left(&self) -> Duration {
        if !self.valid_now() {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.until.load(Ordering::Acquire)).saturating_sub(self.elapsed())
    }

    /// Extends the lease to `until`, if that is later. `now` is the time that `until` was computed
    /// from.
    pub fn extend(&self, until: Duration, now: ClockReading) {
        let left = nanos(until.saturating_sub(now.at));
        self.wall_until
            .store(now.wall.saturating_add(left), Ordering::Release);
        self.until.fetch_max(nanos(until), Ordering::AcqRel);
    }

    /// Ends the lease for good.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.until.store(0, Ordering::Release);
    }
}

impl crate::node::Lease for NodeLease {
    fn valid(&self) -> bool {
        self.valid_now()
    }

    fn takes_in(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }
}

impl Default for NodeLease {
    fn default() -> NodeLease {
        NodeLease::new()
    }
}

fn nanos(of: Duration) -> u64 {
    u64::try_from(of.as_nanos()).unwrap_or(u64::MAX)
}

#[expect(
    clippy::disallowed_methods,
    reason = "compared with itself only, to notice that the machine slept"
)]
fn wall() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn runs_out_by_itself() {
        let lease = NodeLease::new();
        assert!(!lease.valid(Duration::ZERO));
        assert!(!lease.valid_now());
        let now = lease.now();
        lease.extend(Duration::from_secs(3600), now);
        assert!(lease.valid_now());
        assert!(lease.valid(Duration::from_secs(3599)));
        assert!(!lease.valid(Duration::from_secs(3600)));
        let left = lease.left();
        assert!(
            left > Duration::from_secs(3000) && left <= Duration::from_secs(3600),
            "{left:?}"
        );
        lease.extend(Duration::from_secs(10), now);
        assert!(lease.valid(Duration::from_secs(3599)), "it is never shortened");
        assert!(crate::node::Lease::takes_in(&lease));
        lease.end();
        assert!(!crate::node::Lease::takes_in(&lease));
        assert_eq!(lease.left(), Duration::ZERO);
        assert!(!lease.valid(Duration::from_secs(1)));
    }

    #[test]
    fn time_goes_on_while_the_machine_sleeps() {
        let lease = NodeLease::new();
        let start = lease.seen.lock().unwrap().1;
        let at = |awake: u64, wall: u64| lease.now_by(awake * SECOND, start + wall * SECOND).at.as_secs();
        assert_eq!(at(1, 1), 1);
        assert_eq!(at(2, 62), 62, "a minute of sleep");
        assert_eq!(at(3, 63), 63);
        // The wall clock is set back; later the machine is suspended again.
        assert_eq!(at(4, 10), 64);
        assert_eq!(at(5, 41), 95);
        assert!(lease.elapsed() >= Duration::from_secs(90));
        // Small adjustments do not count as a suspension.
        let now = lease.now_by(6 * SECOND, start + 42 * SECOND + SECOND / 4);
        assert_eq!(now.at.as_secs(), 96);
    }

    #[test]
    fn what_was_decided_before_a_sleep_is_not_valid_after_it() {
        let lease = NodeLease::new();
        let began = lease.now();
        lease.extend(began.at + Duration::from_secs(5), began);
        assert!(lease.valid_now());
        // The wall clock advances by an hour while the monotonic clock stands still.
        let after = lease.now_by(nanos(began.at), began.wall + 3600 * SECOND);
        assert!(after.at >= began.at + Duration::from_secs(3600));
        assert!(!lease.valid_now());
    }
}
