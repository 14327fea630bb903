//! A clock that runs faster than the machine's.

use postrider_core::time::{Clock, Sleep, Timestamp};
use std::time::Duration;
use tokio::time::Instant;

/// A clock on which `speed` seconds pass in one real second.
pub struct FastClock {
    epoch: Timestamp,
    started: Instant,
    speed: u32,
}

impl FastClock {
    /// Starts a clock that shows `epoch` now.
    pub fn new(epoch: Timestamp, speed: u32) -> FastClock {
        FastClock {
            epoch,
            started: Instant::now(),
            speed,
        }
    }

    /// Time on this clock since its start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed() * self.speed
    }
}

impl Clock for FastClock {
    fn now(&self) -> Timestamp {
        self.epoch + self.elapsed()
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        let real = deadline.since(self.epoch) / self.speed;
        Box::pin(async move {
            tokio::time::sleep_until(self.started + real).await;
            // The division may have dropped a fraction of a real nanosecond.
            while self.now() < deadline {
                tokio::time::sleep_until(Instant::now() + Duration::from_nanos(1)).await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Timestamp = Timestamp::from_secs(1_000_000);

    #[tokio::test(start_paused = true)]
    async fn a_day_passes_in_minutes() {
        let clock = FastClock::new(EPOCH, 300);
        let real = Instant::now();
        clock.sleep_until(EPOCH + Duration::from_secs(86_400)).await;
        assert_eq!(real.elapsed(), Duration::from_secs(288));
        assert_eq!(clock.now(), EPOCH + Duration::from_secs(86_400));
        assert_eq!(clock.elapsed(), Duration::from_secs(86_400));
    }

    #[tokio::test(start_paused = true)]
    async fn a_sleep_never_ends_early() {
        let clock = FastClock::new(EPOCH, 300);
        for nanos in [0, 1, 299, 301, 1_000_003, 10_000_000_007] {
            let deadline = clock.now() + Duration::from_nanos(nanos);
            clock.sleep_until(deadline).await;
            assert!(clock.now() >= deadline, "{nanos}");
            assert!(clock.now().since(deadline) <= Duration::from_secs(1), "{nanos}");
        }
        let past = clock.now() - Duration::from_secs(1);
        let before = clock.now();
        clock.sleep_until(past).await;
        assert_eq!(clock.now(), before, "the past is over");
    }
}
