//! One endpoint's health: how much may be in flight there, and when to leave it alone.

use crate::dispatch::Outlet;
use crate::node::Sharing;
use http::Uri;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::probation::{Delay, Probation};
use postrider_core::time::Timestamp;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// An endpoint that has not answered yet gets this many requests at once, and no fewer unless it says that
/// it is busy.
const WINDOW_FIRST: usize = 16;
/// One that answers gets as many as this: enough to catch up after a pause, on either side.
const WINDOW_ANSWERING: usize = 32;
/// Beyond that the window is wide enough for this many requests a second at the endpoint's own pace. More at
/// once would only wait there, and cost us connections and wake-ups.
const REQUESTS_PER_SECOND: f64 = 16_000.0;
/// After this many answers the quickest one is measured anew: endpoints change.
const QUICKEST_OF: u32 = 2048;
/// Requests whose rate is limited may come early by as much: more often than this nobody is woken for one.
const PACED_EARLY: Duration = Duration::from_millis(100);

/// A value that changes only by what is said to it; the time comes in as an argument.
#[derive(Clone, Debug)]
pub struct Health {
    window: usize,
    window_max: usize,
    in_flight: usize,
    /// Different deliveries that have failed since the last success. One that fails again and again says
    /// something about itself rather than about the endpoint.
    failing: Vec<Delivery>,
    delay: Option<Delay>,
    /// The delay is over and a probe is under way.
    probing: bool,
    /// Someone wants it asked before the delay is over.
    asked: bool,
    pace: Pace,
    /// When the next request is due of those whose rate is limited.
    next_paced: Timestamp,
    /// Other nodes send to it as well.
    sharing: Sharing,
}

/// One event for one subscription.
pub type Delivery = (SubscriptionId, Position);

/// The permission to send one request, to be brought back when the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Pass {
    probe: bool,
    /// The delay was not over: someone wanted it.
    early: bool,
    /// How much of the time it takes up, if it is one of those whose rate is limited.
    share: Duration,
}

/// Who asks to send, as far as that decides whether it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// Its rules know delayed delivery.
    pub obeys: bool,
    /// The most requests a minute that the webhook asked for.
    pub rate_max: Option<u32>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    pub outcome: Outcome,
    pub took: Duration,
    /// The request's first delivery stands for all of them.
    pub delivery: Delivery,
    /// The rules of the subscription that sent it; without any its failures do not count.
    pub rules: Option<&'a Probation>,
}

impl Sender {
    /// How much of the time one request takes up, whoever sends it; none where the rate is not limited.
    fn interval(self) -> Option<Duration> {
        let rate = self.rate_max.filter(|rate| *rate > 0);
        rate.map(|rate| Duration::from_secs(60) / rate)
    }
}

/// Whether a request may go whose rate is limited.
enum Paced {
    /// It may; the next one not before then.
    Go {
        next: Timestamp,
    },
    Wait(Timestamp),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Go(Pass),
    /// As many as allowed are in flight; one of them will make room.
    Full,
    /// Left alone until then.
    Delayed(Timestamp),
}

impl Health {
    /// `delay`: what is known from an earlier life.
    pub fn new(window_max: usize, delay: Option<Delay>) -> Health {
        Health {
            window: WINDOW_FIRST.min(window_max),
            window_max,
            in_flight: 0,
            failing: Vec::new(),
            delay,
            probing: false,
            asked: false,
            pace: Pace::default(),
            next_paced: Timestamp::MIN,
            sharing: Sharing::ALONE,
        }
    }

    /// As many nodes as this send to the endpoint now, and this one takes these turns among them.
    pub fn share(&mut self, sharing: Sharing) {
        self.sharing = sharing;
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

    /// Asks to send one request. Only a sender whose rules know delayed delivery is held back by it, and only one
    /// whose webhook asked for it is held to a rate.
    pub fn enter(&mut self, sender: Sender, now: Timestamp) -> Admission {
        let held = self.delay.filter(|_| sender.obeys);
        let early = self.asked && held.is_some_and(|delay| now < delay.until);
        let paced = sender.interval().map(|interval| self.paced(interval, now));
        if let Some(Paced::Wait(until)) = paced
            && (early || held.is_none_or(|delay| delay.until <= now))
        {
            return Admission::Delayed(until);
        }
        if let Some(delay) = held {
            if now < delay.until && !early {
                return Admission::Delayed(delay.until);
            }
            if self.probing {
                return Admission::Full;
            }
            self.probing = true;
            self.asked = false;
        } else if self.in_flight >= self.window {
            return Admission::Full;
        }
        self.in_flight += 1;
        self.pace.was_full |= self.in_flight >= self.window;
        let mut share = Duration::ZERO;
        if let (Some(Paced::Go { next }), Some(interval)) = (paced, sender.interval()) {
            self.next_paced = next;
            share = interval * self.sharing.of();
        }
        Admission::Go(Pass {
            probe: held.is_some(),
            early,
            share,
        })
    }

    /// Whether a request may go where all nodes together may send one in every `interval`.
    fn paced(&self, interval: Duration, now: Timestamp) -> Paced {
        let share = interval * self.sharing.of();
        // A slow one is never early: it would come too often.
        let early = if share < PACED_EARLY {
            PACED_EARLY
        } else {
            Duration::ZERO
        };
        // Fewer nodes may send than when it was last decided: then it is due sooner.
        let next = self.next_paced.min(now + early + share);
        if self.sharing.of() > 1 && interval >= PACED_EARLY {
            // So few that several nodes which all begin at once would send too many: each waits for its own turn.
            let current = now - interval + Duration::from_nanos(1);
            let turn = self.sharing.slot_from(next.max(current), interval);
            return match turn > now {
                true => Paced::Wait(turn),
                false => Paced::Go { next: turn + share },
            };
        }
        // Whoever has to wait then waits for a whole portion.
        match next > now + early {
            true => Paced::Wait(next),
            false => Paced::Go {
                next: next.max(now) + share,
            },
        }
    }

    /// A request that was admitted has ended, or was not sent after all (none).
    pub fn leave(&mut self, pass: Pass, ended: Option<Ended<'_>>, now: Timestamp) {
        self.in_flight -= 1;
        if pass.probe {
            self.probing = false;
        }
        let Some(ended) = ended else {
            // Nothing was sent: the next need not wait for it.
            self.asked |= pass.early && self.delay.is_some();
            self.next_paced = self.next_paced - pass.share;
            return;
        };
        match ended.outcome {
            // What is wrong with these is the event: the endpoint is well enough to say so.
            Outcome::Success | Outcome::BadRequest | Outcome::PayloadTooLarge => {
                self.recover();
                self.pace.answered(ended.took);
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
            cause => {
                let least = if cause == Outcome::Busy {
                    1
                } else {
                    WINDOW_FIRST.min(self.window)
                };
                self.window = (self.window / 2).max(least);
                if let Some(rules) = ended.rules {
                    self.fail(pass, cause, ended.delivery, rules, now);
                }
            }
        }
    }

    fn fail(&mut self, pass: Pass, cause: Outcome, of: Delivery, rules: &Probation, now: Timestamp) {
        match self.delay {
            // The endpoint is left alone for as long as it would have been: asking costs nothing. So does a probe that
            // has failed elsewhere meanwhile.
            Some(delay) if pass.probe && now < delay.until => {}
            Some(delay) if pass.probe => self.delay = Some(rules.prolong(delay, cause, now)),
            // One that was still under way when the delay began.
            Some(_) => {}
            None => {
                if !self.failing.contains(&of) {
                    self.failing.push(of);
                }
                if self.failing.len() >= rules.failures as usize {
                    self.failing.clear();
                    self.delay = Some(rules.begin(cause, now));
                }
            }
        }
    }

    /// The endpoint has shown that it is well, or someone says so.
    pub fn recover(&mut self) {
        self.failing.clear();
        self.delay = None;
        self.asked = false;
    }

    /// Somebody else has found that the endpoint is to be left alone. A probe under way still says how it is.
    pub fn hold(&mut self, delay: Delay) {
        self.failing.clear();
        self.delay = Some(delay);
    }

    /// The next delivery is sent as a probe though the delay is not over. Whether there is anything to wait for.
    pub fn ask(&mut self, now: Timestamp) -> bool {
        self.asked = !self.probing && self.delay.is_some_and(|delay| now < delay.until);
        self.asked
    }
}

/// An endpoint that subscriptions share: scheme, host, port and path.
pub struct Endpoint {
    /// Without the query string.
    pub name: Arc<str>,
    sharing: watch::Receiver<Sharing>,
    inner: Mutex<Inner>,
}

struct Inner {
    health: Health,
    /// Subscriptions that want to send and may not, in the order in which they asked.
    waiting: VecDeque<Weak<Outlet>>,
}

/// What is the same for all subscriptions that point to one endpoint: scheme, host, port and path. A port that
/// goes without saying is left out.
pub fn name(url: &Uri) -> String {
    let scheme = url.scheme_str().unwrap_or("http");
    let host = url.host().unwrap_or("").to_lowercase();
    let port = match (scheme, url.port_u16()) {
        ("http", Some(80)) | ("https", Some(443)) | (_, None) => String::new(),
        (_, Some(port)) => format!(":{port}"),
    };
    format!("{scheme}://{host}{port}{}", url.path())
}

/// What a lane that has left the endpoint must see to.
#[derive(Default)]
pub struct Left {
    /// These may send now; a place is kept for each.
    pub admitted: Vec<(Arc<Outlet>, Pass)>,
    /// The delay of the endpoint, if it is another one than before.
    pub changed: Option<Option<Delay>>,
    /// Someone waits whose rate lets it go only then.
    pub again: Option<Timestamp>,
}

/// How an endpoint is, for whoever looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub in_flight: usize,
    pub delay: Option<Delay>,
    pub probing: bool,
}

impl Endpoint {
    pub fn new(
        name: String,
        window_max: usize,
        delay: Option<Delay>,
        sharing: watch::Receiver<Sharing>,
    ) -> Endpoint {
        Endpoint {
            name: name.into(),
            sharing,
            inner: Mutex::new(Inner {
                health: Health::new(window_max, delay),
                waiting: VecDeque::new(),
            }),
        }
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic holds it")
    }

    /// Asks to send one request for an outlet. If it may not, it will be woken when it may.
    pub fn enter(&self, outlet: &Arc<Outlet>, sender: Sender, now: Timestamp) -> Admission {
        let mut inner = self.inner();
        let admission = self.ask_for_place(&mut inner.health, sender, now);
        if !matches!(admission, Admission::Go(_)) && !outlet.waiting.swap(true, Relaxed) {
            inner.waiting.push_back(Arc::downgrade(outlet));
        }
        admission
    }

    fn ask_for_place(&self, health: &mut Health, sender: Sender, now: Timestamp) -> Admission {
        if sender.rate_max.is_some() {
            health.share(*self.sharing.borrow());
        }
        health.enter(sender, now)
    }

    /// How many more requests would be admitted now.
    pub fn room(&self) -> usize {
        self.inner().health.room()
    }

    /// A request of `leaving` has ended; places that are free now go to those who have waited longest.
    pub fn leave(&self, leaving: &Arc<Outlet>, pass: Pass, ended: Option<Ended<'_>>, now: Timestamp) -> Left {
        let mut inner = self.inner();
        let before = inner.health.delay;
        inner.health.leave(pass, ended, now);
        let after = inner.health.delay;
        let mut left = Left {
            admitted: Vec::new(),
            changed: (before != after).then_some(after),
            again: None,
        };
        let mut place = 0;
        while let Some(waiting) = inner.waiting.get(place) {
            let Some(outlet) = waiting.upgrade() else {
                inner.waiting.remove(place);
                continue;
            };
            if Arc::ptr_eq(&outlet, leaving) {
                // The lane that leaves asks again by itself.
                inner.waiting.remove(place);
                outlet.waiting.store(false, Relaxed);
                continue;
            }
            let sender = outlet.sender();
            match self.ask_for_place(&mut inner.health, sender, now) {
                Admission::Go(pass) => {
                    inner.waiting.remove(place);
                    outlet.waiting.store(false, Relaxed);
                    left.admitted.push((outlet, pass));
                }
                // The delay holds it back, not the window: those behind it may know nothing of delays.
                _ if sender.obeys && after.is_some() => place += 1,
                Admission::Delayed(until) => {
                    left.again = Some(left.again.map_or(until, |at| at.min(until)));
                    place += 1;
                }
                _ => break,
            }
        }
        left
    }

    /// Lets go of a place that was kept for an outlet which no longer sends here.
    pub fn give_back(&self, pass: Pass, now: Timestamp) {
        self.inner().health.leave(pass, None, now);
    }

    /// The endpoint has shown that it is well, or someone says so. Whether that ended a delay.
    pub fn recover(&self) -> bool {
        let mut inner = self.inner();
        let delayed = inner.health.delay.is_some();
        inner.health.recover();
        delayed
    }

    /// Somebody else has found that it is to be left alone.
    pub fn hold(&self, delay: Delay) {
        self.inner().health.hold(delay);
    }

    /// Has it asked by the next delivery, whether or not its delay is over. Whether it was to be left alone.
    pub fn ask(&self, now: Timestamp) -> bool {
        self.inner().health.ask(now)
    }

    /// Everyone who waits, to be woken: the delay is over, or something else has changed.
    pub fn take_waiting(&self) -> Vec<Arc<Outlet>> {
        let mut inner = self.inner();
        let waiting = std::mem::take(&mut inner.waiting);
        let outlets: Vec<Arc<Outlet>> = waiting.iter().filter_map(Weak::upgrade).collect();
        for outlet in &outlets {
            outlet.waiting.store(false, Relaxed);
        }
        outlets
    }

    pub fn state(&self) -> State {
        let health = &self.inner().health;
        State {
            in_flight: health.in_flight,
            delay: health.delay,
            probing: health.probing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(secs)
    }

    const RULES: Probation = Probation::DOCUMENTED;
    const OBEYS: Sender = Sender {
        obeys: true,
        rate_max: None,
    };
    const FREE: Sender = Sender {
        obeys: false,
        rate_max: None,
    };

    /// Makes one request, for an event of its own.
    fn send(health: &mut Health, event: u64, now: Timestamp, outcome: Outcome) {
        let Admission::Go(pass) = health.enter(OBEYS, now) else {
            panic!("not admitted");
        };
        health.leave(pass, Some(ended(event, outcome)), now);
    }

    fn ended(event: u64, outcome: Outcome) -> Ended<'static> {
        Ended {
            outcome,
            took: Duration::from_millis(5),
            delivery: (SubscriptionId(1), Position(event)),
            rules: Some(&RULES),
        }
    }

    fn go(admission: Admission) -> Pass {
        match admission {
            Admission::Go(pass) => pass,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_endpoint_is_known_by_scheme_host_port_and_path() {
        let check = |url: &str, expected: &str| {
            assert_eq!(name(&url.parse().unwrap()), expected, "{url}");
        };
        check("https://Hooks.Example/a/B?key=1", "https://hooks.example/a/B");
        check("https://hooks.example:443/a/B?key=2", "https://hooks.example/a/B");
        check("http://hooks.example:443/", "http://hooks.example:443/");
        check("http://[::1]:80", "http://[::1]/");
        check("http://user:pass@127.0.0.1:9000/x", "http://127.0.0.1:9000/x");
    }

    #[test]
    fn ten_failures_in_a_row_delay_everything_and_probes_double_it() {
        let mut health = Health::new(64, None);
        for event in 0..9 {
            send(&mut health, event, at(0), Outcome::SocketError);
        }
        assert_eq!(health.delay(), None);
        send(&mut health, 9, at(0), Outcome::SocketError);
        assert_eq!(health.enter(OBEYS, at(29)), Admission::Delayed(at(30)));
        let probe = go(health.enter(OBEYS, at(30)));
        assert_eq!(
            health.enter(OBEYS, at(30)),
            Admission::Full,
            "one probe at a time"
        );
        health.leave(probe, Some(ended(10, Outcome::SocketError)), at(31));
        assert_eq!(health.enter(OBEYS, at(32)), Admission::Delayed(at(91)));
        let probe = go(health.enter(OBEYS, at(91)));
        health.leave(probe, Some(ended(10, Outcome::Success)), at(91));
        assert_eq!(health.delay(), None);
        let _ = go(health.enter(OBEYS, at(91)));
    }

    /// Ten failures: left alone from 0 to 30.
    fn delayed() -> Health {
        let mut health = Health::new(64, None);
        for event in 0..10 {
            send(&mut health, event, at(0), Outcome::SocketError);
        }
        assert_eq!(health.enter(OBEYS, at(1)), Admission::Delayed(at(30)));
        health
    }

    #[test]
    fn whoever_asks_for_a_probe_gets_one() {
        let mut health = delayed();
        assert!(health.ask(at(5)));
        let probe = go(health.enter(OBEYS, at(5)));
        assert_eq!(
            health.enter(OBEYS, at(5)),
            Admission::Delayed(at(30)),
            "one, and no flood"
        );
        assert!(!health.ask(at(5)), "one is under way");
        health.leave(probe, Some(ended(11, Outcome::Success)), at(6));
        assert_eq!(health.delay(), None);
        assert!(!health.ask(at(6)), "there is nothing to wait for");
    }

    #[test]
    fn a_probe_that_was_asked_for_and_fails_costs_nothing() {
        let mut health = delayed();
        let before = health.delay();
        assert!(health.ask(at(5)));
        let probe = go(health.enter(OBEYS, at(5)));
        health.leave(probe, Some(ended(11, Outcome::GenericError)), at(6));
        assert_eq!(health.delay(), before);
        assert_eq!(health.enter(OBEYS, at(7)), Admission::Delayed(at(30)));
        // Its own probe doubles the delay as ever.
        send(&mut health, 12, at(30), Outcome::SocketError);
        assert_eq!(health.enter(OBEYS, at(31)), Admission::Delayed(at(90)));
    }

    #[test]
    fn a_probe_that_has_failed_elsewhere_meanwhile_counts_once() {
        let mut health = delayed();
        let probe = go(health.enter(OBEYS, at(30)));
        let set_elsewhere = Delay {
            until: at(100),
            ..health.delay().unwrap()
        };
        health.hold(set_elsewhere);
        health.leave(probe, Some(ended(10, Outcome::TimedOut)), at(60));
        assert_eq!(health.delay(), Some(set_elsewhere));
        // A success counts, whoever was first.
        let mut health = delayed();
        let probe = go(health.enter(OBEYS, at(30)));
        health.hold(set_elsewhere);
        health.leave(probe, Some(ended(10, Outcome::Success)), at(60));
        assert_eq!(health.delay(), None);
    }

    #[test]
    fn a_probe_is_still_wanted_when_there_was_nothing_to_send() {
        let mut health = delayed();
        assert!(health.ask(at(5)));
        let probe = go(health.enter(OBEYS, at(5)));
        health.leave(probe, None, at(5));
        let probe = go(health.enter(OBEYS, at(9)));
        health.leave(probe, None, at(9));
        health.recover();
        for event in 20..30 {
            send(&mut health, event, at(10), Outcome::SocketError);
        }
        assert_eq!(
            health.enter(OBEYS, at(11)),
            Admission::Delayed(at(40)),
            "that was about another delay"
        );
    }

    #[test]
    fn a_success_between_failures_starts_the_count_again() {
        let mut health = Health::new(64, None);
        for round in 0..5 {
            for event in 0..9 {
                send(&mut health, round * 10 + event, at(0), Outcome::GenericError);
            }
            send(&mut health, round * 10 + 9, at(0), Outcome::Success);
        }
        assert_eq!(health.delay(), None);
    }

    #[test]
    fn one_event_that_fails_again_and_again_delays_nothing() {
        let mut health = Health::new(64, None);
        for hour in 0..30 {
            send(&mut health, 7, at(hour * 3600), Outcome::GenericError);
        }
        assert_eq!(health.delay(), None);
    }

    #[test]
    fn the_delay_is_bounded() {
        let mut health = Health::new(64, None);
        for event in 0..10 {
            send(&mut health, event, at(0), Outcome::NotFound);
        }
        for _ in 0..20 {
            let until = health.delay().unwrap().until;
            send(&mut health, 1, until, Outcome::NotFound);
        }
        assert_eq!(health.delay().unwrap().step, RULES.max);
        assert_eq!(health.delay().unwrap().since, at(0));
    }

    #[test]
    fn attempts_under_way_when_the_delay_began_neither_prolong_it_nor_count_as_the_probe() {
        let mut health = Health::new(64, None);
        let under_way = [go(health.enter(OBEYS, at(0))), go(health.enter(OBEYS, at(0)))];
        for event in 0..10 {
            send(&mut health, event, at(0), Outcome::TimedOut);
        }
        health.leave(under_way[0], Some(ended(20, Outcome::TimedOut)), at(5));
        assert_eq!(health.delay().unwrap().until, at(10));
        let probe = go(health.enter(OBEYS, at(10)));
        health.leave(under_way[1], Some(ended(21, Outcome::TimedOut)), at(11));
        assert_eq!(
            health.enter(OBEYS, at(11)),
            Admission::Full,
            "the probe is still out"
        );
        assert_eq!(health.delay().unwrap().until, at(10));
        health.leave(probe, Some(ended(22, Outcome::Busy)), at(12));
        assert_eq!(health.delay().unwrap().until, at(32));
    }

    #[test]
    fn senders_without_such_rules_neither_cause_nor_obey_a_delay() {
        let mut health = Health::new(64, None);
        let lawless = |event| Ended {
            rules: None,
            ..ended(event, Outcome::SocketError)
        };
        for event in 0..30 {
            let pass = go(health.enter(FREE, at(0)));
            health.leave(pass, Some(lawless(event)), at(0));
        }
        assert_eq!(health.delay(), None);
        for event in 0..10 {
            send(&mut health, event, at(0), Outcome::SocketError);
        }
        let pass = go(health.enter(FREE, at(1)));
        assert_eq!(health.enter(OBEYS, at(1)), Admission::Delayed(at(30)));
        health.leave(pass, Some(lawless(40)), at(1));
        assert_eq!(health.delay().unwrap().until, at(30));
        // That it answers is news for everyone.
        let pass = go(health.enter(FREE, at(2)));
        health.leave(pass, Some(ended(41, Outcome::Success)), at(2));
        assert_eq!(health.delay(), None);
    }

    /// The window after many answers from an endpoint whose answers take this long, given how many
    /// requests are with it.
    fn window_at(takes: impl Fn(usize) -> Duration) -> usize {
        let mut health = Health::new(64, None);
        for _ in 0..2000 {
            let mut entered = Vec::new();
            while let Admission::Go(pass) = health.enter(OBEYS, at(0)) {
                entered.push(pass);
            }
            let took = takes(entered.len());
            for pass in entered {
                let ended = Ended {
                    took,
                    ..ended(0, Outcome::Success)
                };
                health.leave(pass, Some(ended), at(0));
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

    #[test]
    fn a_rate_that_was_asked_for_is_kept() {
        let per_minute = |rate: u32| Sender {
            obeys: true,
            rate_max: Some(rate),
        };
        // All that a sender gets in five minutes of asking whenever it may.
        let sent = |rate: u32| {
            let mut health = Health::new(64, None);
            let mut now = at(0);
            let mut times = Vec::new();
            while now < at(300) {
                match health.enter(per_minute(rate), now) {
                    Admission::Go(pass) => {
                        times.push(now);
                        health.leave(pass, Some(ended(times.len() as u64, Outcome::Success)), now);
                    }
                    Admission::Delayed(until) => {
                        assert!(until > now, "it would ask for ever");
                        now = until;
                    }
                    Admission::Full => panic!("everything was answered"),
                }
            }
            times
        };
        for rate in [1, 7, 60, 120, 6_000, 60_000] {
            let times = sent(rate);
            let all = times.len();
            let burst = (rate / 600 + 1) as usize;
            let expected = rate as usize * 5;
            assert!((expected..=expected + burst).contains(&all), "{rate}: {all}");
            for (first, start) in times.iter().enumerate() {
                let within = times[first..]
                    .iter()
                    .take_while(|t| t.since(*start) < Duration::from_secs(60));
                let most = rate as usize + burst;
                assert!(within.take(most + 1).count() <= most, "{rate} from {start}");
                if first > 100 {
                    break;
                }
            }
        }

        let mut health = Health::new(64, None);
        let pass = go(health.enter(per_minute(1), at(0)));
        // Others are not held up by it, nor do they take its turn.
        let other = go(health.enter(OBEYS, at(1)));
        health.leave(other, Some(ended(1, Outcome::Success)), at(1));
        assert_eq!(health.enter(per_minute(1), at(1)), Admission::Delayed(at(60)));
        // What was not sent after all does not count.
        health.leave(pass, None, at(2));
        let _ = go(health.enter(per_minute(1), at(2)));
    }

    /// Several nodes ask whenever they may, each with its own share; when and how often that lets them go.
    fn all_sent(rate: u32, sharing: impl Fn(usize, Timestamp) -> Sharing, from: &[i64]) -> Vec<Timestamp> {
        let sender = Sender {
            obeys: true,
            rate_max: Some(rate),
        };
        let mut times = Vec::new();
        for (node, begins) in from.iter().enumerate() {
            let mut health = Health::new(64, None);
            let mut now = at(*begins);
            while now < at(1200) {
                health.share(sharing(node, now));
                match health.enter(sender, now) {
                    Admission::Go(pass) => {
                        times.push(now);
                        health.leave(pass, Some(ended(times.len() as u64, Outcome::Success)), now);
                    }
                    Admission::Delayed(until) => {
                        assert!(until > now, "it would ask for ever");
                        now = until.min(now + Duration::from_secs(60));
                    }
                    Admission::Full => panic!("everything was answered"),
                }
            }
        }
        times.sort();
        times
    }

    fn most_in_a_minute(times: &[Timestamp]) -> usize {
        let within = |from: usize| {
            let start = times[from];
            times[from..].partition_point(|t| t.since(start) < Duration::from_secs(60))
        };
        (0..times.len()).map(within).max().unwrap_or(0)
    }

    #[test]
    fn nodes_together_keep_the_rate_that_was_asked_for() {
        for (rate, nodes) in [(1, 2), (1, 3), (7, 3), (60, 2), (600, 5), (6_000, 3), (60_000, 4)] {
            // None of them begins when another does.
            let from: Vec<i64> = (0..nodes).map(|node| node as i64 * 17).collect();
            let times = all_sent(rate, |node, _| Sharing::new(node, nodes), &from);
            let burst = (rate / 600) as usize * nodes + nodes * usize::from(rate > 600) + 1;
            let most = most_in_a_minute(&times);
            assert!(most <= rate as usize + burst, "{rate} among {nodes}: {most}");
            let (all, expected) = (times.len(), rate as usize * 20);
            assert!(
                all + nodes * rate as usize + nodes >= expected,
                "{rate} among {nodes}: only {all} of {expected}"
            );
        }
    }

    #[test]
    fn a_node_that_is_left_alone_has_the_whole_rate_again() {
        // The second dies after ten minutes; the first hears of it.
        let alone_from = at(600);
        let sharing = |_: usize, now: Timestamp| match now < alone_from {
            true => Sharing::new(0, 3),
            false => Sharing::ALONE,
        };
        let times = all_sent(2, sharing, &[0]);
        let before = times.iter().filter(|t| **t < alone_from).count();
        let after = times.len() - before;
        assert!((6..=8).contains(&before), "a third of 20: {before}");
        assert!((19..=21).contains(&after), "all of 20: {after}");
    }
}
