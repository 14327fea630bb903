//! Background verification of the embedded store, at the configured rate.

use crate::config::{StoreConfig, StoreKind};
use postrider_core::time::Clock;
use postrider_embedded::{Scrub, ScrubStep};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A file that cannot be read is tried again in the next round; the pause gives the disk a rest.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(10);

/// Interval and read rate of the scrub.
#[derive(Clone, Copy, Debug)]
pub struct ScrubPace {
    every: Duration,
    bytes_per_second: u64,
}

impl ScrubPace {
    /// `None` if no scrub is configured.
    pub fn configured(store: &StoreConfig) -> Option<ScrubPace> {
        let wanted = store.kind == StoreKind::Embedded && store.scrub_every != Duration::MAX;
        wanted.then_some(ScrubPace {
            every: store.scrub_every,
            bytes_per_second: store.scrub_bytes_per_second,
        })
    }

    /// Pause that keeps the rate after this many bytes.
    fn pause_after(self, bytes: u64) -> Duration {
        Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / self.bytes_per_second.max(1))
    }

    /// Pause after a round of this duration, pauses included.
    fn pause_between_rounds(self, took: Duration) -> Duration {
        self.every.saturating_sub(took)
    }
}

/// Scrubs round after round until `stop` is cancelled.
pub async fn run(mut scrub: Scrub, pace: ScrubPace, clock: Arc<dyn Clock>, stop: CancellationToken) {
    loop {
        let begun = clock.now();
        let (mut bytes, mut damaged) = (0, 0);
        loop {
            let verified = tokio::task::spawn_blocking(move || {
                let step = scrub.step();
                (scrub, step)
            });
            let Ok((returned, step)) = verified.await else {
                return tracing::error!("verifying what is stored has panicked; it goes on after a restart");
            };
            scrub = returned;
            let pause = match step {
                Ok(ScrubStep { is_last: true, .. }) => break,
                Ok(step) => {
                    bytes += step.bytes;
                    damaged += step.damaged;
                    pace.pause_after(step.bytes)
                }
                Err(e) => {
                    tracing::warn!(error = %e, "verifying what is stored: a file cannot be read; the next ones are");
                    PAUSE_AFTER_ERROR
                }
            };
            if wait(&*clock, pause, &stop).await.is_err() {
                return;
            }
        }
        let took = clock.now().since(begun);
        tracing::info!(
            bytes,
            damaged,
            seconds = took.as_secs(),
            "verified everything that is stored"
        );
        if wait(&*clock, pace.pause_between_rounds(took), &stop)
            .await
            .is_err()
        {
            return;
        }
    }
}

/// Error that ends a round because the server is stopping.
struct ScrubStopped;

async fn wait(clock: &dyn Clock, pause: Duration, stop: &CancellationToken) -> Result<(), ScrubStopped> {
    tokio::select! {
        biased;
        () = stop.cancelled() => Err(ScrubStopped),
        () = clock.sleep_until(clock.now() + pause) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_sets_the_pause() {
        let pace = ScrubPace {
            every: Duration::from_secs(60),
            bytes_per_second: 1 << 20,
        };
        assert_eq!(pace.pause_after(0), Duration::ZERO);
        assert_eq!(pace.pause_after(1 << 20), Duration::from_secs(1));
        assert_eq!(pace.pause_after(1 << 18), Duration::from_millis(250));
        assert_eq!(pace.pause_after(u64::MAX), Duration::from_nanos(u64::MAX >> 20));
        assert_eq!(
            pace.pause_between_rounds(Duration::from_secs(20)),
            Duration::from_secs(40)
        );
        assert_eq!(pace.pause_between_rounds(Duration::from_secs(90)), Duration::ZERO);
    }
}
