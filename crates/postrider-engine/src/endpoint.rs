//! One endpoint's health: how much may be in flight there, and when to leave it alone.

use crate::dispatch::Outlet;
use postrider_core::outcome::Outcome;
use postrider_core::time::Timestamp;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// An endpoint that has not answered yet gets this many requests at once.
const WINDOW_FIRST: usize = 8;
/// One that answers gets as many as this: enough to catch up after a pause, on either side.
const WINDOW_ANSWERING: usize = 32;
/// Beyond that the window is wide enough for this many requests a second at the endpoint's own pace. More at
/// once would only wait there, and cost us connections and wake-ups.
const REQUESTS_PER_SECOND: f64 = 16_000.0;
/// After this many answers the quickest one is measured anew: endpoints change.
const QUICKEST_OF: u32 = 2048;
/// After this many failures in a row, with no success between, the endpoint is left alone for a while.
pub const FAILURES_BEFORE_DELAY: u32 = 10;
/// The longest that an endpoint is left alone between two probes.
pub const DELAY_MAX: Duration = Duration::from_secs(4 * 3600);

/// A value that changes only by what is said to it; the time comes in as an argument.
#[derive(Clone, Debug)]
pub struct Health {
    window: usize,
    window_max: usize,
    in_flight: usize,
    failures: u32,
    delay: Option<Delay>,
    pace: Pace,
}

/// How quickly an endpoint answers.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// The quickest answer lately, in seconds: the way there and back with the least waiting.
    quickest: f64,
    quickest_next: f64,
    answers: u32,
    /// Answers since the window was last looked at.
    since_look: usize,
    /// The window was full at some time since then.
    was_full: bool,
}

impl Pace {
    fn answered(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.quickest = if self.quickest == 0.0 {
            took
        } else {
            self.quickest.min(took)
        };
        self.quickest_next = if self.answers == 0 {
            took
        } else {
            self.quickest_next.min(took)
        };
        self.answers += 1;
        if self.answers == QUICKEST_OF {
            self.quickest = self.quickest_next;
            self.answers = 0;
        }
        self.since_look += 1;
    }

    /// How many requests at once make sense.
    fn window(&self, max: usize) -> usize {
        let enough = (self.quickest * REQUESTS_PER_SECOND).ceil() as usize;
        enough.clamp(WINDOW_ANSWERING.min(max), max)
    }
}

/// Deliveries are held back until `until`; then one probe goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    pub cause: Outcome,
    pub since: Timestamp,
    pub until: Timestamp,
    pub step: Duration,
    pub probing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Go,
    /// As many as allowed are in flight; one of them will make room.
    Full,
    /// Left alone until then.
    Delayed(Timestamp),
}

impl Health {
    pub fn new(window_max: usize) -> Health {
        Health {
            window: WINDOW_FIRST.min(window_max),
            window_max,
            in_flight: 0,
            failures: 0,
            delay: None,
            pace: Pace::default(),
        }
    }

    /// How many more requests would be admitted now.
    pub fn room(&self) -> usize {
        match self.delay {
            Some(_) => 0,
            None => self.window.saturating_sub(self.in_flight),
        }
    }

    pub fn delay(&self) -> Option<Delay> {
        self.delay
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Asks to send one request.
    pub fn enter(&mut self, now: Timestamp) -> Admission {
        if let Some(delay) = &mut self.delay {
            if now < delay.until {
                return Admission::Delayed(delay.until);
            }
            if delay.probing {
                return Admission::Full;
            }
            delay.probing = true;
        } else if self.in_flight >= self.window {
            return Admission::Full;
        }
        self.in_flight += 1;
        self.pace.was_full |= self.in_flight >= self.window;
        Admission::Go
    }

    /// A request that was admitted has ended after `took`, or was not sent after all (none).
    pub fn leave(&mut self, outcome: Option<Outcome>, took: Duration, now: Timestamp) {
        self.in_flight -= 1;
        match outcome {
            None => {
                if let Some(delay) = &mut self.delay {
                    delay.probing = false;
                }
            }
            // What is wrong with these is the event: the endpoint is well enough to say so.
            Some(Outcome::Success | Outcome::BadRequest | Outcome::PayloadTooLarge) => {
                self.failures = 0;
                self.delay = None;
                self.pace.answered(took);
                // Looked at once for every window's worth of answers, so that each change can show.
                if self.pace.since_look >= self.window {
                    self.pace.since_look = 0;
                    let was_full = std::mem::take(&mut self.pace.was_full);
                    let enough = self.pace.window(self.window_max);
                    if enough < self.window {
                        self.window = (self.window - 1 - self.window / 8).max(enough);
                    } else if was_full {
                        self.window = (self.window + 1 + self.window / 8).min(enough);
                    }
                }
            }
            Some(cause) => {
                self.failures = self.failures.saturating_add(1);
                self.window = (self.window / 2).max(1);
                self.delay = self.delayed(cause, now);
            }
        }
    }

    fn delayed(&self, cause: Outcome, now: Timestamp) -> Option<Delay> {
        let first = delay_after(cause);
        match self.delay {
            // A failed probe: leave it alone for twice as long.
            Some(delay) if delay.probing => {
                let step = (delay.step * 2).max(first).min(DELAY_MAX);
                Some(Delay {
                    cause,
                    since: delay.since,
                    until: now + step,
                    step,
                    probing: false,
                })
            }
            // One that was still under way when the delay began.
            Some(delay) => Some(delay),
            None if self.failures >= FAILURES_BEFORE_DELAY => Some(Delay {
                cause,
                since: now,
                until: now + first,
                step: first,
                probing: false,
            }),
            None => None,
        }
    }
}

/// How long an endpoint is left alone at first, by what went wrong.
fn delay_after(cause: Outcome) -> Duration {
    Duration::from_secs(match cause {
        Outcome::Busy | Outcome::TimedOut => 10,
        Outcome::SocketError => 30,
        Outcome::NotFound
        | Outcome::ResolutionError
        | Outcome::Disabled
        | Outcome::Full
        | Outcome::Unauthorized
        | Outcome::Forbidden => 300,
        Outcome::InvalidAzureFunctionDestination => 600,
        _ => 10,
    })
}

/// An endpoint that subscriptions share: scheme, host, port and path.
pub struct Endpoint {
    /// Without the query string.
    pub name: String,
    inner: Mutex<Inner>,
}

struct Inner {
    health: Health,
    /// Subscriptions that want to send and may not, in the order in which they asked.
    waiting: VecDeque<Weak<Outlet>>,
}

/// What a lane that has left the endpoint must see to.
#[derive(Default)]
pub struct Left {
    /// These may send now; a place is kept for each.
    pub admitted: Vec<Arc<Outlet>>,
    /// Everyone is to be woken at this time.
    pub delayed_until: Option<Timestamp>,
}

impl Endpoint {
    pub fn new(name: String, window_max: usize) -> Endpoint {
        Endpoint {
            name,
            inner: Mutex::new(Inner {
                health: Health::new(window_max),
                waiting: VecDeque::new(),
            }),
        }
    }

    /// Asks to send one request for an outlet. If it may not, it will be woken when it may.
    pub fn enter(&self, outlet: &Arc<Outlet>, now: Timestamp) -> Admission {
        let mut inner = self.inner.lock().expect("no panic holds it");
        let admission = inner.health.enter(now);
        if admission != Admission::Go && !outlet.waiting.swap(true, Relaxed) {
            inner.waiting.push_back(Arc::downgrade(outlet));
        }
        admission
    }

    /// How many more requests would be admitted now.
    pub fn room(&self) -> usize {
        self.inner.lock().expect("no panic holds it").health.room()
    }

    /// A request of `leaving` has ended; places that are free now go to those who have waited longest.
    pub fn leave(
        &self,
        leaving: &Arc<Outlet>,
        outcome: Option<Outcome>,
        took: Duration,
        now: Timestamp,
    ) -> Left {
        let mut inner = self.inner.lock().expect("no panic holds it");
        let before = inner.health.delay.map(|d| d.until);
        inner.health.leave(outcome, took, now);
        let after = inner.health.delay.map(|d| d.until);
        let mut left = Left {
            admitted: Vec::new(),
            delayed_until: after.filter(|until| before != Some(*until)),
        };
        while let Some(first) = inner.waiting.front() {
            let Some(outlet) = first.upgrade() else {
                inner.waiting.pop_front();
                continue;
            };
            if Arc::ptr_eq(&outlet, leaving) {
                // The lane that leaves asks again by itself.
                inner.waiting.pop_front();
                outlet.waiting.store(false, Relaxed);
                continue;
            }
            if inner.health.enter(now) != Admission::Go {
                break;
            }
            inner.waiting.pop_front();
            outlet.waiting.store(false, Relaxed);
            left.admitted.push(outlet);
        }
        left
    }

    /// Lets go of a place that was kept for an outlet which no longer sends here.
    pub fn give_back(&self, now: Timestamp) {
        let mut inner = self.inner.lock().expect("no panic holds it");
        inner.health.leave(None, Duration::ZERO, now);
    }

    /// Everyone who waits, to be woken: the delay is over, or something else has changed.
    pub fn take_waiting(&self) -> Vec<Arc<Outlet>> {
        let mut inner = self.inner.lock().expect("no panic holds it");
        let waiting = std::mem::take(&mut inner.waiting);
        let outlets: Vec<Arc<Outlet>> = waiting.iter().filter_map(Weak::upgrade).collect();
        for outlet in &outlets {
            outlet.waiting.store(false, Relaxed);
        }
        outlets
    }

    pub fn delay(&self) -> Option<Delay> {
        self.inner.lock().expect("no panic holds it").health.delay
    }

    pub fn in_flight(&self) -> usize {
        self.inner.lock().expect("no panic holds it").health.in_flight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(secs)
    }

    fn fail(health: &mut Health, now: Timestamp, cause: Outcome) {
        assert_eq!(health.enter(now), Admission::Go);
        health.leave(Some(cause), Duration::from_millis(5), now);
    }

    #[test]
    fn ten_failures_in_a_row_delay_everything_and_probes_double_it() {
        let mut health = Health::new(64);
        for _ in 0..9 {
            fail(&mut health, at(0), Outcome::SocketError);
        }
        assert_eq!(health.delay(), None);
        fail(&mut health, at(0), Outcome::SocketError);
        assert_eq!(health.enter(at(29)), Admission::Delayed(at(30)));
        assert_eq!(health.enter(at(30)), Admission::Go);
        assert_eq!(health.enter(at(30)), Admission::Full, "one probe at a time");
        health.leave(Some(Outcome::SocketError), Duration::ZERO, at(31));
        assert_eq!(health.enter(at(32)), Admission::Delayed(at(91)));
        assert_eq!(health.enter(at(91)), Admission::Go);
        health.leave(Some(Outcome::Success), Duration::ZERO, at(91));
        assert_eq!(health.delay(), None);
        assert_eq!(health.enter(at(91)), Admission::Go);
    }

    #[test]
    fn a_success_between_failures_starts_the_count_again() {
        let mut health = Health::new(64);
        for _ in 0..5 {
            for _ in 0..9 {
                fail(&mut health, at(0), Outcome::GenericError);
            }
            fail(&mut health, at(0), Outcome::Success);
        }
        assert_eq!(health.delay(), None);
    }

    #[test]
    fn the_delay_is_bounded() {
        let mut health = Health::new(64);
        for _ in 0..10 {
            fail(&mut health, at(0), Outcome::NotFound);
        }
        for _ in 0..20 {
            let until = health.delay().unwrap().until;
            fail(&mut health, until, Outcome::NotFound);
        }
        assert_eq!(health.delay().unwrap().step, DELAY_MAX);
    }

    /// The window after many answers from an endpoint whose answers take this long, given how many
    /// requests are with it.
    fn window_at(takes: impl Fn(usize) -> Duration) -> usize {
        let mut health = Health::new(64);
        for _ in 0..2000 {
            let mut entered = 0;
            while health.enter(at(0)) == Admission::Go {
                entered += 1;
            }
            for _ in 0..entered {
                health.leave(Some(Outcome::Success), takes(entered), at(0));
            }
        }
        health.window
    }

    #[test]
    fn a_distant_endpoint_gets_a_wide_window_and_a_busy_one_a_narrow_one() {
        assert_eq!(window_at(|_| Duration::from_millis(200)), 64);
        // It answers one request after the other: more at once only wait there.
        let busy = window_at(|entered| Duration::from_micros(50) * entered as u32);
        assert_eq!(busy, WINDOW_ANSWERING);
    }
}
