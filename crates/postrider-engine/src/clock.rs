//! The machine's clock, and the only code that reads the machine's time.

use postrider_core::time::{Clock, Sleep, Timestamp};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest sleep before the time is read again: the machine's clock can jump.
const NAP_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the clock that is handed in")]
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_nanos(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
    }

    #[expect(clippy::disallowed_methods, reason = "this is the clock that is handed in")]
    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        Box::pin(async move {
            loop {
                let left = deadline.since(self.now());
                if left.is_zero() {
                    return;
                }
                // Exempt from the task's cooperative budget: a read loop that always finds data
                // uses the budget up at every poll, and a deadline polled after it would never
                // pass.
                tokio::task::unconstrained(tokio::time::sleep(left.min(NAP_MAX))).await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::coop::consume_budget;

    #[tokio::test]
    async fn a_busy_loop_in_the_same_task_does_not_starve_a_deadline() {
        let clock = SystemClock;
        let begun = clock.now();
        let busy = async {
            while clock.now().since(begun) < Duration::from_secs(5) {
                consume_budget().await;
            }
        };
        let passed = tokio::select! {
            biased;
            () = busy => false,
            () = clock.sleep_until(begun + Duration::from_millis(10)) => true,
        };
        assert!(passed, "the deadline was starved");
    }
}
