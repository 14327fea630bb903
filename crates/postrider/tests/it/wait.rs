//! Waiting for conditions, with a deadline.

use std::time::{Duration, Instant};

/// Longest wait, enough for a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Polling interval of conditions.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[expect(
    clippy::disallowed_methods,
    reason = "tests of the real program live in real time"
)]
pub fn now() -> Instant {
    Instant::now()
}

/// Polls until `look` returns a value.
#[track_caller]
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let mut found = None;
    let in_time = is_true_in_time(|| {
        found = look();
        found.is_some()
    });
    assert!(in_time, "not within {PATIENCE:?}: {what}");
    found.expect("it was found")
}

/// Polls until `look` returns true; false if it does not in time.
pub fn is_true_in_time(look: impl FnMut() -> bool) -> bool {
    is_true_within(PATIENCE, look)
}

/// Like `is_true_in_time`, with another patience.
pub fn is_true_within(patience: Duration, mut look: impl FnMut() -> bool) -> bool {
    let deadline = now() + patience;
    loop {
        if look() {
            return true;
        }
        if now() > deadline {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
