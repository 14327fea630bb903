//! What the auditor knows about one endpoint from what its receiver saw: is it to be left alone?
//!
//! Where the order of things cannot be told from outside, it says nothing until it is sure again.

use super::rules::{Came, DELAY_AFTER, DELAY_MAX, EXPIRY_LEAD, first_delay};
use postrider_core::time::Timestamp;
use std::collections::BTreeSet;
use std::time::Duration;

/// The engine's timers go off this much late at most.
pub const TICK: Duration = Duration::from_millis(2);

/// The age of the oldest event in the log is known to the second.
const OLDEST_RIGHT_TO: Duration = Duration::from_millis(1100);
/// How long an endpoint is left alone at least, if nobody knows why.
const FIRST_LEAST: Duration = Duration::from_secs(10);

/// Left alone until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    pub until: Timestamp,
    pub step: Duration,
}

/// Of all subscriptions that point to a receiver, or of one of them: whose failures count differs.
#[derive(Debug, Default)]
pub struct Endpoint {
    /// Only answered failures count here, and only those of one subscription.
    own: bool,
    /// Different deliveries that have failed since the last success.
    failing: BTreeSet<(usize, u64)>,
    delay: Option<Delay>,
    /// When the auditor came to know of the delay.
    since: Timestamp,
    /// Requests whose answer is awaited, with the time at which they are given up.
    open: Vec<Open>,
    /// Someone wants it asked before the delay is over.
    asked: bool,
    /// How long it is left alone at first for what went wrong last.
    first: Option<Duration>,
    /// When it was last asked early because an event was about to expire.
    expiry_probe: Option<Timestamp>,
    /// Something happened whose order cannot be told.
    unsure: bool,
    /// Deliveries may have been held back at some time in this life.
    pub suspect: bool,
    /// What the catalogue says.
    pub kept: Option<Delay>,
    /// The receiver answers at once, whatever it answers.
    pub quick: bool,
    /// When a pause last ended of a subscription that points here, and how much waited then.
    pub flood: Option<(Timestamp, u32)>,
}

#[derive(Clone, Debug)]
struct Open {
    request: usize,
    deadline: Timestamp,
    deliveries: Vec<(usize, u64)>,
    obeys: bool,
    probe: bool,
    /// Someone wanted it: the delay was not over.
    early: bool,
    /// It was a probe of a delay that has ended since.
    stray: bool,
    /// The clock was set meanwhile: nobody knows when it is given up.
    unclear: bool,
}

/// A request arrives.
#[derive(Clone)]
pub struct Arrival {
    pub request: usize,
    /// Each event of a batch is a delivery.
    pub deliveries: Vec<(usize, u64)>,
    pub obeys: bool,
    pub timeout: Duration,
    /// When the first event of the subscription expires that has not ended, as far as that matters here.
    pub expires: Option<Timestamp>,
}

/// A failure that was answered says that the endpoint is there: it counts for the subscription alone.
fn is_own(came: Came) -> bool {
    matches!(came, Came::Answered(status) if !matches!(status, 408 | 429 | 503))
}

impl Endpoint {
    pub fn of_one_subscription() -> Endpoint {
        Endpoint {
            own: true,
            ..Endpoint::default()
        }
    }

    /// What is wrong with a request that arrives now, if anything.
    pub fn arrive(&mut self, arrival: Arrival, now: Timestamp) -> Option<String> {
        self.give_up(now);
        let mut wrong = None;
        let (mut probe, mut early) = (false, false);
        if arrival.obeys
            && let Some(delay) = self.delay
            && now > self.since + TICK
        {
            early = std::mem::take(&mut self.asked) && now < delay.until;
            if now < delay.until && !early && self.may_ask_before_expiry(delay, arrival.expires, now) {
                self.expiry_probe = Some(now);
                early = true;
            }
            if now < delay.until && !early {
                wrong = Some(format!("left alone until {}", delay.until));
            } else if self.open.iter().any(|open| open.probe) {
                wrong = Some(format!("a probe is under way already, since {}", self.since));
            }
            probe = true;
        }
        self.open.push(Open {
            request: arrival.request,
            deadline: now + arrival.timeout,
            deliveries: arrival.deliveries,
            obeys: arrival.obeys,
            probe,
            early,
            stray: false,
            unclear: false,
        });
        wrong
    }

    pub fn delayed_until(&self) -> Option<Timestamp> {
        self.delay.map(|delay| delay.until)
    }

    /// An event about to expire that the delay would outlast may be used as the probe, but not more often than the
    /// endpoint would be left alone at first.
    fn may_ask_before_expiry(&self, delay: Delay, expires: Option<Timestamp>, now: Timestamp) -> bool {
        let soon =
            |at: Timestamp| at <= now + EXPIRY_LEAD + OLDEST_RIGHT_TO && at <= delay.until + OLDEST_RIGHT_TO;
        let wait = self.first.unwrap_or(FIRST_LEAST);
        let again = |last: Timestamp| now < last || now + TICK >= last + wait;
        expires.is_some_and(soon) && self.expiry_probe.is_none_or(again)
    }

    /// Attempts whose time is over have failed.
    fn give_up(&mut self, now: Timestamp) {
        let mut over: Vec<Open> = Vec::new();
        self.open.retain(|open| {
            let gone = open.deadline <= now && !open.unclear;
            if gone {
                over.push(open.clone());
            }
            !gone
        });
        over.sort_by_key(|open| open.deadline);
        for open in over {
            let deadline = open.deadline;
            self.fail(open, Came::TimedOut, deadline);
        }
    }

    /// A request has been answered or broken off, `well` if that shows that the endpoint is well.
    pub fn answer(&mut self, request: usize, came: Came, well: bool, now: Timestamp) {
        let close = |open: &Open| open.deadline <= now + TICK && now <= open.deadline + TICK;
        let unsure = self.open.iter().any(close);
        self.give_up(now);
        let at = self.open.iter().position(|open| open.request == request);
        let open = at.map(|at| self.open.remove(at));
        if unsure || open.as_ref().is_some_and(|open| open.unclear) {
            self.unsure = true;
            self.suspect = true;
        }
        if well || (is_own(came) && !self.own && open.is_some()) {
            // A late success too: it is news for everyone.
            self.recover();
        } else if let Some(open) = open {
            self.fail(open, came, now);
        }
    }

    fn fail(&mut self, open: Open, came: Came, at: Timestamp) {
        if !open.obeys || self.unsure || (self.own && !is_own(came)) {
            return;
        }
        if open.stray && self.delay.is_some() {
            self.forget();
            return;
        }
        match self.delay {
            // Whether the delay was over by then nobody can tell who looks from outside.
            Some(delay) if open.early && at <= delay.until + TICK && delay.until <= at + TICK => {
                self.forget();
            }
            Some(delay) if open.early && at < delay.until => {}
            Some(delay) if open.probe => {
                let step = (delay.step * 2).max(first_delay(came)).min(DELAY_MAX);
                self.begin(step, at);
                self.first = Some(first_delay(came));
            }
            Some(_) => {}
            None => {
                self.failing.extend(open.deliveries);
                if self.failing.len() * 2 >= DELAY_AFTER {
                    self.suspect = true;
                }
                if self.failing.len() >= DELAY_AFTER {
                    self.begin(first_delay(came), at);
                    self.first = Some(first_delay(came));
                }
            }
        }
    }

    fn begin(&mut self, step: Duration, at: Timestamp) {
        self.failing.clear();
        self.since = at;
        self.delay = Some(Delay {
            until: at + step,
            step,
        });
        self.suspect = true;
    }

    /// Someone wants it asked now.
    pub fn ask(&mut self, now: Timestamp) {
        self.give_up(now);
        self.asked = self.delay.is_some();
    }

    /// Someone says that it is well.
    pub fn admit_again(&mut self, now: Timestamp) {
        self.give_up(now);
        self.recover();
    }

    /// The endpoint has shown that it is well, or someone says so.
    fn recover(&mut self) {
        self.failing.clear();
        self.delay = None;
        self.asked = false;
        self.expiry_probe = None;
        self.unsure = self.open.iter().any(|open| open.unclear);
        for open in &mut self.open {
            open.stray |= std::mem::take(&mut open.probe);
        }
    }

    /// Nothing can be told any more until it recovers or the server starts again.
    pub fn forget(&mut self) {
        self.unsure = true;
        self.suspect = true;
        self.delay = None;
        self.failing.clear();
        for open in &mut self.open {
            open.stray |= std::mem::take(&mut open.probe);
        }
    }

    /// Nobody points here any more: it is forgotten, unless someone comes back soon.
    pub fn abandon(&mut self) {
        self.kept = None;
        self.forget();
    }

    /// The clock was set: what is under way may end at any time. A delay ends when the clock says so.
    pub fn clock_set(&mut self) {
        self.since = Timestamp::MIN;
        self.expiry_probe = None;
        if !self.open.is_empty() {
            self.forget();
            self.open.iter_mut().for_each(|open| open.unclear = true);
        }
    }

    /// The server starts again, knowing only what the catalogue says.
    pub fn restart(&mut self) {
        self.failing.clear();
        self.asked = false;
        self.first = None;
        self.expiry_probe = None;
        self.open.clear();
        self.unsure = false;
        self.delay = self.kept;
        self.since = Timestamp::MIN;
        self.suspect = self.kept.is_some();
    }
}
