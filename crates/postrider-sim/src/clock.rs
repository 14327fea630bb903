//! A clock that follows the test runtime: paused time carries wall time with it.

use postrider_core::time::{Clock, Sleep, Timestamp};
use tokio::time::Instant;

/// When simulated time begins.
pub const EPOCH: Timestamp = Timestamp::from_secs(1_700_000_000);

#[derive(Clone, Copy, Debug)]
pub struct SimClock {
    started: Instant,
}

impl SimClock {
    /// Must be called within the simulation's runtime.
    pub fn start() -> SimClock {
        SimClock {
            started: Instant::now(),
        }
    }
}

impl Clock for SimClock {
    fn now(&self) -> Timestamp {
        EPOCH + self.started.elapsed()
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        Box::pin(tokio::time::sleep_until(self.started + deadline.since(EPOCH)))
    }
}
