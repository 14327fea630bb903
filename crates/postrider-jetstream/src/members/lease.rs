//! Until when this node may act for its partitions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

/// Shared by everything on this node that claims or appends. Extended by the members' loop with each heartbeat that
/// was stored; runs out by itself, so that a loop that hangs, or a process that was stopped, leaves nothing valid.
#[derive(Debug)]
pub struct LeaseUntil {
    began: Instant,
    /// Nanoseconds after `began`.
    until: AtomicU64,
    /// Nanoseconds of the wall clock. A machine that slept finds its monotonic clock where it was; the wall clock has
    /// gone on. A wall clock that is set forward costs no more than the time to the next heartbeat.
    wall_until: AtomicU64,
    /// For good: another process took this node's place, or it has left.
    ended: AtomicBool,
}

impl LeaseUntil {
    /// Not valid until it is extended.
    pub fn new() -> LeaseUntil {
        LeaseUntil {
            began: Instant::now(),
            until: AtomicU64::new(0),
            wall_until: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// Valid for good: for a node that shares its partitions with nobody, and for tests.
    pub fn forever() -> LeaseUntil {
        LeaseUntil {
            began: Instant::now(),
            until: AtomicU64::new(u64::MAX),
            wall_until: AtomicU64::new(u64::MAX),
            ended: AtomicBool::new(false),
        }
    }

    /// What the lease's times are counted from.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Whether it is valid `now`, which is counted as [`LeaseUntil::elapsed`] counts.
    pub fn valid(&self, now: Duration) -> bool {
        nanos(now) < self.until.load(Ordering::Acquire)
    }

    /// Whether it is valid at this moment, by both clocks.
    pub fn valid_now(&self) -> bool {
        self.valid(self.elapsed()) && wall() < self.wall_until.load(Ordering::Acquire)
    }

    /// For how long it is valid yet.
    pub fn left(&self) -> Duration {
        if !self.valid_now() {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.until.load(Ordering::Acquire)).saturating_sub(self.elapsed())
    }

    /// Valid until then, if that is later than before. `now` is the time by which `until` was decided.
    pub fn extend(&self, until: Duration, now: Duration) {
        let left = nanos(until.saturating_sub(now));
        self.wall_until
            .store(wall().saturating_add(left), Ordering::Release);
        self.until.fetch_max(nanos(until), Ordering::AcqRel);
    }

    /// Not valid any more.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.until.store(0, Ordering::Release);
    }
}

impl crate::node::Lease for LeaseUntil {
    fn valid(&self) -> bool {
        self.valid_now()
    }

    fn takes_in(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }
}

impl Default for LeaseUntil {
    fn default() -> LeaseUntil {
        LeaseUntil::new()
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

    #[test]
    fn runs_out_by_itself() {
        let lease = LeaseUntil::new();
        assert!(!lease.valid(Duration::ZERO));
        assert!(!lease.valid_now());
        lease.extend(Duration::from_secs(3600), Duration::ZERO);
        assert!(lease.valid_now());
        assert!(lease.valid(Duration::from_secs(3599)));
        assert!(!lease.valid(Duration::from_secs(3600)));
        lease.extend(Duration::from_secs(10), Duration::ZERO);
        assert!(lease.valid(Duration::from_secs(3599)), "it is never shortened");
        let left = lease.left();
        assert!(
            left > Duration::from_secs(3000) && left <= Duration::from_secs(3600),
            "{left:?}"
        );
        assert!(crate::node::Lease::takes_in(&lease));
        lease.end();
        assert!(!crate::node::Lease::takes_in(&lease));
        assert_eq!(lease.left(), Duration::ZERO);
        assert!(!lease.valid(Duration::from_secs(1)));
        assert!(LeaseUntil::forever().valid_now());
    }
}
