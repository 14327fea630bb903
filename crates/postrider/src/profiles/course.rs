//! How a delivery goes that always fails, under the limits of a subscription that names none.

use postrider_core::profile::{Profile, TimeToLiveRule};
use std::time::Duration;

/// So many attempts are listed; a schedule of seconds and a long time to live have more.
pub const LISTED_MAX: usize = 1000;

/// Each attempt is answered at once with a failure of no special kind, the first falls together with
/// publishing, and chance is left out.
pub struct Course {
    /// When attempts fall, counted from the first; the first [`LISTED_MAX`] of them.
    pub offsets: Vec<Duration>,
    /// How many there are in all.
    pub attempts: usize,
    pub end: End,
}

/// What ends it, and when, counted from the first attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Attempts(Duration),
    TimeToLive(Duration),
}

impl Course {
    pub fn of(profile: &Profile) -> Course {
        let attempts_max = profile.attempts_max as usize;
        let alive = |offset: &Duration| *offset < profile.time_to_live;
        let attempts = profile.offsets().take(attempts_max).take_while(alive).count();
        let nth = |index| profile.offsets().nth(index).expect("offsets do not end");
        let last = nth(attempts - 1);
        let end = if attempts == attempts_max {
            End::Attempts(last)
        } else {
            match profile.time_to_live_rule {
                TimeToLiveRule::WhenDue => End::TimeToLive(nth(attempts)),
                TimeToLiveRule::BeforeWaiting => End::TimeToLive(last),
            }
        };
        Course {
            offsets: profile.offsets().take(attempts.min(LISTED_MAX)).collect(),
            attempts,
            end,
        }
    }

    /// Attempts, each with the wait before it and its offset.
    pub fn steps(&self) -> impl Iterator<Item = (usize, Option<Duration>, Duration)> {
        self.offsets.iter().enumerate().map(|(index, offset)| {
            let before = index.checked_sub(1).map(|before| self.offsets[before]);
            (index + 1, before.map(|before| *offset - before), *offset)
        })
    }
}

/// What a subscription's retry policy may say in the management API, as `postrider_wire` reads it; the edge
/// API and the configuration take any number.
pub const ATTEMPTS_RANGE: [u32; 2] = [1, 30];
pub const TIME_TO_LIVE_MINUTES_RANGE: [u32; 2] = [1, 1440];
