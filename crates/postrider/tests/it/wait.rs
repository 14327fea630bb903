//! Waiting for something to become true, with an end to patience.

use std::time::{Duration, Instant};

/// Nothing that is promised takes longer, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// How often a condition that cannot be waited on is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[expect(
    clippy::disallowed_methods,
    reason = "tests of the real program live in real time"
)]
pub fn now() -> Instant {
    Instant::now()
}

/// Looks until `look` finds something.
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

/// Looks until it is so; false if it did not become so.
pub fn is_true_in_time(look: impl FnMut() -> bool) -> bool {
    is_true_within(PATIENCE, look)
}

/// The same with a patience of its own.
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
