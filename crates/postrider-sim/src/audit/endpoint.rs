//! The auditor's view of one endpoint, from its receiver's requests: whether it should be on
//! probation.
//!
//! Where the order of events cannot be determined from outside, the view makes no claim until it is
//! certain again.

use super::rules::{DELAY_AFTER, DELAY_MAX, EXPIRY_LEAD, ReceiverOutcome, first_delay};
use postrider_core::time::Timestamp;
use std::collections::BTreeSet;
use std::time::Duration;

/// The engine's timers may fire this late.
pub const TICK: Duration = Duration::from_millis(2);

/// The age of the oldest event in the log is known to the second.
const OLDEST_RIGHT_TO: Duration = Duration::from_millis(1100);
/// The shortest first delay, for an unknown cause.
const FIRST_LEAST: Duration = Duration::from_secs(10);

/// A delay until this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditedDelay {
    pub until: Timestamp,
    pub step: Duration,
}

/// An endpoint of a receiver as seen by all its subscriptions, or by a single one: they count
/// failures differently.
#[derive(Debug, Default)]
pub struct AuditedEndpoint {
    /// Whether this is the view of a single subscription, for which only answered failures count.
    own: bool,
    /// Different deliveries that have failed since the last success.
    failing: BTreeSet<(usize, u64)>,
    delay: Option<AuditedDelay>,
    /// When the auditor learned of the delay.
    since: Timestamp,
    /// Requests in flight, with the time at which they time out.
    open: Vec<OpenRequest>,
    /// Whether a probe was requested before the delay is over.
    asked: bool,
    /// The first delay for the last cause.
    first: Option<Duration>,
    /// When the last early probe for an expiring event was sent.
    expiry_probe: Option<Timestamp>,
    /// Whether something happened whose order cannot be determined.
    unsure: bool,
    /// Whether deliveries may have been delayed at some time in this life.
    pub suspect: bool,
    /// The delay in the catalog.
    pub kept: Option<AuditedDelay>,
    /// Whether the receiver answers at once, whatever the answer.
    pub quick: bool,
    /// When a pause of a subscription to this receiver last ended, and how many deliveries waited
    /// then.
    pub flood: Option<(Timestamp, u32)>,
}

#[derive(Clone, Debug)]
struct OpenRequest {
    request: usize,
    deadline: Timestamp,
    deliveries: Vec<(usize, u64)>,
    obeys: bool,
    probe: bool,
    /// Whether it is a requested probe: the delay was not over.
    early: bool,
    /// Whether it probed for a delay that has ended since.
    stray: bool,
    /// Whether the clock was set meanwhile, so that the time of its timeout is unknown.
    unclear: bool,
}

/// A request that arrives.
#[derive(Clone)]
pub struct RequestArrival {
    pub request: usize,
    /// Each event of a batch is a delivery.
    pub deliveries: Vec<(usize, u64)>,
    pub obeys: bool,
    pub timeout: Duration,
    /// When the subscription's first unfinished event expires, as far as it matters here.
    pub expires: Option<Timestamp>,
}

/// Whether a failure shows that the endpoint is up: an answered failure counts for the subscription
/// alone.
fn is_own(came: ReceiverOutcome) -> bool {
    matches!(came, ReceiverOutcome::Answered(status) if !matches!(status, 408 | 429 | 503))
}

impl AuditedEndpoint {
    pub fn of_one_subscription() -> AuditedEndpoint {
        AuditedEndpoint {
            own: true,
            ..AuditedEndpoint::default()
        }
    }

    /// The objection to a request that arrives now, if there is one.
    pub fn arrive(&mut self, arrival: RequestArrival, now: Timestamp) -> Option<String> {
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
        self.open.push(OpenRequest {
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

    /// Whether an expiring event that the delay would outlast may be used as the probe. The least
    /// interval is the first delay of the endpoint.
    fn may_ask_before_expiry(&self, delay: AuditedDelay, expires: Option<Timestamp>, now: Timestamp) -> bool {
        let soon =
            |at: Timestamp| at <= now + EXPIRY_LEAD + OLDEST_RIGHT_TO && at <= delay.until + OLDEST_RIGHT_TO;
        let wait = self.first.unwrap_or(FIRST_LEAST);
        let again = |last: Timestamp| now < last || now + TICK >= last + wait;
        expires.is_some_and(soon) && self.expiry_probe.is_none_or(again)
    }

    /// Requests that have timed out have failed.
    fn give_up(&mut self, now: Timestamp) {
        let mut over: Vec<OpenRequest> = Vec::new();
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
            self.fail(open, ReceiverOutcome::TimedOut, deadline);
        }
    }

    /// A request has been answered or aborted; `well` if that shows that the endpoint is well.
    pub fn answer(&mut self, request: usize, came: ReceiverOutcome, well: bool, now: Timestamp) {
        let close = |open: &OpenRequest| open.deadline <= now + TICK && now <= open.deadline + TICK;
        let unsure = self.open.iter().any(close);
        self.give_up(now);
        let at = self.open.iter().position(|open| open.request == request);
        let open = at.map(|at| self.open.remove(at));
        if unsure || open.as_ref().is_some_and(|open| open.unclear) {
            self.unsure = true;
            self.suspect = true;
        }
        if well || (is_own(came) && !self.own && open.is_some()) {
            // A late success counts too: it ends the delay for all.
            self.recover();
        } else if let Some(open) = open {
            self.fail(open, came, now);
        }
    }

    fn fail(&mut self, open: OpenRequest, came: ReceiverOutcome, at: Timestamp) {
        if !open.obeys || self.unsure || (self.own && !is_own(came)) {
            return;
        }
        if open.stray && self.delay.is_some() {
            self.forget();
            return;
        }
        match self.delay {
            // Whether the delay was over by then cannot be determined from outside.
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
        self.delay = Some(AuditedDelay {
            until: at + step,
            step,
        });
        self.suspect = true;
    }

    /// A probe was requested.
    pub fn ask(&mut self, now: Timestamp) {
        self.give_up(now);
        self.asked = self.delay.is_some();
    }

    /// An operator says that the endpoint is well.
    pub fn admit_again(&mut self, now: Timestamp) {
        self.give_up(now);
        self.recover();
    }

    /// The endpoint has shown that it is well, or an operator says so.
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

    /// Makes no more claims until the endpoint recovers or the server starts again.
    pub fn forget(&mut self) {
        self.unsure = true;
        self.suspect = true;
        self.delay = None;
        self.failing.clear();
        for open in &mut self.open {
            open.stray |= std::mem::take(&mut open.probe);
        }
    }

    /// No subscription uses the endpoint any more: its state is forgotten, unless one returns soon.
    pub fn abandon(&mut self) {
        self.kept = None;
        self.forget();
    }

    /// The clock was set: requests in flight may time out at any moment. A delay ends by the clock.
    pub fn clock_set(&mut self) {
        self.since = Timestamp::MIN;
        self.expiry_probe = None;
        if !self.open.is_empty() {
            self.forget();
            self.open.iter_mut().for_each(|open| open.unclear = true);
        }
    }

    /// The server starts again with only the state in the catalog.
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
