//! Waiting for something to become true, with an end to patience.

use std::time::{Duration, Instant};

/// Nothing that is promised takes longer, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// How often a condition that cannot be waited on is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[expect(clippy::disallowed_methods, reason = "tests of the real program live in real time")]
pub fn now() -> Instant {
    Instant::now()
}

/// Looks until `look` finds something.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Looks until it is so.
pub fn until_true(what: &str, mut look: impl FnMut() -> bool) {
    until(what, || look().then_some(()));
}
