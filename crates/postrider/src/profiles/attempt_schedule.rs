//! Attempts of a delivery that always fails, with the default limits of a subscription.

use postrider_core::profile::{Profile, TimeToLiveRule};
use std::time::Duration;

/// Most attempts that are listed; a schedule of seconds and a long time to live have more.
pub const LISTED_MAX: usize = 1000;

/// Attempts if each is answered at once with a failure without a rule of its own, the first is made
/// at the time of publishing, and there is no jitter.
pub struct AttemptSchedule {
    /// Times of the attempts since the first; at most [`LISTED_MAX`] of them.
    pub offsets: Vec<Duration>,
    /// Total number of attempts.
    pub attempts: usize,
    pub end: ScheduleEnd,
}

/// The limit that ends the attempts, and its time since the first attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleEnd {
    Attempts(Duration),
    TimeToLive(Duration),
}

impl AttemptSchedule {
    pub fn of(profile: &Profile) -> AttemptSchedule {
        let attempts_max = profile.attempts_max as usize;
        let alive = |offset: &Duration| *offset < profile.time_to_live;
        let attempts = profile.offsets().take(attempts_max).take_while(alive).count();
        let nth = |index| profile.offsets().nth(index).expect("offsets do not end");
        let last = nth(attempts - 1);
        let end = if attempts == attempts_max {
            ScheduleEnd::Attempts(last)
        } else {
            match profile.time_to_live_rule {
                TimeToLiveRule::WhenDue => ScheduleEnd::TimeToLive(nth(attempts)),
                TimeToLiveRule::BeforeWaiting => ScheduleEnd::TimeToLive(last),
            }
        };
        AttemptSchedule {
            offsets: profile.offsets().take(attempts.min(LISTED_MAX)).collect(),
            attempts,
            end,
        }
    }

    /// Attempts by number, with the wait before each and its offset.
    pub fn steps(&self) -> impl Iterator<Item = (usize, Option<Duration>, Duration)> {
        self.offsets.iter().enumerate().map(|(index, offset)| {
            let before = index.checked_sub(1).map(|before| self.offsets[before]);
            (index + 1, before.map(|before| *offset - before), *offset)
        })
    }
}

/// Ranges of a subscription's retry policy in the management API, as `postrider_wire` checks them;
/// the edge API and the configuration accept any number.
pub const ATTEMPTS_RANGE: [u32; 2] = [1, 30];
pub const TIME_TO_LIVE_MINUTES_RANGE: [u32; 2] = [1, 1440];
