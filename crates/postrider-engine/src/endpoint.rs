//! The health of one endpoint: how many requests may be in flight there, and when it is on
//! probation.

use crate::dispatch::SubscriptionDispatcher;
use crate::in_flight::{EndpointStanding, EndpointUsage};
use crate::node::SendingTurn;
use http::Uri;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::probation::{EndpointProbationDelay, ProbationRules};
use postrider_core::time::Timestamp;
use postrider_store::log::LastAttempt;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// The in-flight window of an endpoint that has not answered yet. The window shrinks below this
/// only if the endpoint says that it is busy.
const WINDOW_FIRST: usize = 16;
/// The in-flight window that an answering endpoint reaches at least: enough to catch up after a
/// pause, on either side.
const WINDOW_ANSWERING: usize = 32;
/// Beyond that, the window grows until this many requests a second fit at the endpoint's own
/// latency. More requests at once would only wait there, and cost connections and wake-ups.
const REQUESTS_PER_SECOND: f64 = 16_000.0;
/// The quickest answer is measured again after this many answers: endpoints change.
const QUICKEST_OF: u32 = 2048;
/// How early a rate-limited request may be sent: lanes are woken no more often than this for the
/// rate.
const PACED_EARLY: Duration = Duration::from_millis(100);

/// How long before its expiry an event is attempted that would expire while its endpoint is on
/// probation. The lead leaves time for events published with it, if the probe finds the endpoint
/// well.
pub const EXPIRY_PROBE_LEAD: Duration = Duration::from_secs(10);

/// A pure value: it changes only through its methods, and time is an argument.
#[derive(Clone, Debug)]
pub struct EndpointHealth {
    window: usize,
    window_max: usize,
    in_flight: usize,
    breaker: CircuitBreaker,
    /// Whether the last request failed.
    failed_last: bool,
    pace: ResponsePace,
    /// When the next rate-limited request is due.
    next_paced: Timestamp,
    /// This node's share of the rate, if other nodes send to the endpoint as well.
    sharing: SendingTurn,
}

/// The failures in a row, and the delay that they have led to.
#[derive(Clone, Debug, Default)]
struct CircuitBreaker {
    /// The different deliveries that have failed since the last success. A delivery that fails
    /// repeatedly counts once: its failures say more about the delivery than about the endpoint.
    failing: FxHashSet<EndpointDelivery>,
    delay: Option<EndpointProbationDelay>,
    /// The delay is over and a probe is under way.
    probing: bool,
    /// Whether a probe is wanted before the delay is over.
    probe_wanted: bool,
    /// When a probe was last sent early because an event was about to expire.
    expiry_probe_at: Option<Timestamp>,
}

/// The requests that a circuit breaker lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerGate {
    Open,
    /// A single request, as a probe; `early` if the delay is not over.
    Probe {
        early: bool,
    },
    ProbeUnderWay,
    ClosedUntil(Timestamp),
}

impl CircuitBreaker {
    fn delayed(delay: Option<EndpointProbationDelay>) -> CircuitBreaker {
        CircuitBreaker {
            delay,
            ..CircuitBreaker::default()
        }
    }

    fn gate(&self, now: Timestamp) -> BreakerGate {
        let Some(delay) = self.delay else {
            return BreakerGate::Open;
        };
        let early = now < delay.until;
        match () {
            () if early && !self.probe_wanted => BreakerGate::ClosedUntil(delay.until),
            () if self.probing => BreakerGate::ProbeUnderWay,
            () => BreakerGate::Probe { early },
        }
    }

    /// Whether deliveries are delayed at this time.
    fn holds_at(&self, now: Timestamp) -> bool {
        self.delay.is_some_and(|delay| now < delay.until)
    }

    /// When the next probe for an expiring event may be sent. The interval to the last one is at
    /// least the first delay for the cause, so that events that expire one by one do not undo the
    /// delay.
    fn next_expiry_probe(&self, rules: &ProbationRules, now: Timestamp) -> Timestamp {
        let Some(delay) = self.delay else {
            return now;
        };
        let wait = rules.first(delay.cause);
        match self.expiry_probe_at {
            _ if self.probing => now + wait,
            // The clock may have been set back since the last probe.
            Some(last) if last <= now => (last + wait).max(now),
            _ => now,
        }
    }

    fn begin_probe(&mut self) {
        self.probing = true;
        self.probe_wanted = false;
    }

    /// A request that was admitted as this kind of probe was not sent.
    fn probe_unsent(&mut self, early: bool) {
        self.probe_wanted |= early && self.delay.is_some();
    }

    fn fail(&mut self, probe: bool, ended: &EndedRequest<'_>, rules: &ProbationRules, now: Timestamp) {
        let cause = ended.outcome;
        match self.delay {
            // An early probe that failed leaves the delay as it is, so that asking costs nothing.
            // The same holds for a probe that failed after another node had prolonged the delay.
            Some(delay) if probe && now < delay.until => {}
            Some(delay) if probe => {
                self.delay = Some(EndpointProbationDelay {
                    status: ended.status,
                    ..rules.prolong(delay, cause, now)
                });
            }
            // The request was sent before the delay began.
            Some(_) => {}
            None => {
                let deliveries = ended.events.iter().map(|event| (ended.of, *event));
                self.failing.extend(deliveries);
                if self.failing.len() >= rules.failures as usize {
                    self.failing = FxHashSet::default();
                    self.delay = Some(EndpointProbationDelay {
                        status: ended.status,
                        ..rules.begin(cause, now)
                    });
                }
            }
        }
    }

    fn recover(&mut self) {
        self.failing.clear();
        self.delay = None;
        self.probe_wanted = false;
        self.expiry_probe_at = None;
    }

    /// Applies a delay of another node. A probe in flight still tells how the endpoint is.
    fn hold(&mut self, delay: EndpointProbationDelay) {
        self.failing.clear();
        self.delay = Some(delay);
    }

    /// Requests a probe although the delay is not over. Returns whether there is a probe to wait
    /// for.
    fn want_probe(&mut self, now: Timestamp) -> bool {
        self.probe_wanted = !self.probing && self.delay.is_some_and(|delay| now < delay.until);
        self.probe_wanted
    }
}

/// An event for one subscription.
pub type EndpointDelivery = (SubscriptionId, Position);

/// The permission to send one request, to be returned when the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct SendPass {
    /// The endpoint's standing when the pass was granted.
    pub standing: EndpointStanding,
    /// Set if the request probes the endpoint; true if the delay was not over.
    probe: Option<bool>,
    /// Set if the request probes for the subscription alone, whose own deliveries are delayed.
    own_probe: Option<bool>,
    /// The time that the request takes of the rate, if it is rate-limited.
    share: Duration,
    /// Whether the pass was granted before the end of the delay, because an event is about to
    /// expire.
    pub before_expiry: bool,
}

/// Limits that a subscription's profile and webhook put on its sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderLimits {
    /// Whether its profile has probation.
    pub has_probation: bool,
    /// The most requests a minute that the webhook allows.
    pub rate_max: Option<u32>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedRequest<'a> {
    pub outcome: Outcome,
    /// The status of the answer, if there was one.
    pub status: Option<u16>,
    pub took: Duration,
    /// The subscription that sent the request.
    pub of: SubscriptionId,
    /// The request's events: each is a delivery of its own. May be left out for a success.
    pub events: &'a [Position],
    /// The probation rules of the subscription; without them its failures do not count.
    pub rules: Option<&'a ProbationRules>,
}

impl SenderLimits {
    /// The interval between two requests, whichever node sends them; none without a rate limit.
    fn interval(self) -> Option<Duration> {
        let rate = self.rate_max.filter(|rate| *rate > 0);
        rate.map(|rate| Duration::from_secs(60) / rate)
    }
}

/// Whether a rate-limited request may be sent.
enum RateAdmission {
    /// The request may be sent; the next one not before `next`.
    Go {
        next: Timestamp,
    },
    Wait(Timestamp),
}

/// The response times of an endpoint.
#[derive(Clone, Copy, Debug, Default)]
struct ResponsePace {
    /// The quickest recent answer, in seconds: the round trip with the least waiting.
    quickest: f64,
    quickest_next: f64,
    answers: u32,
    /// Answers since the window was last adjusted.
    since_look: usize,
    /// Whether the window was full at some time since then.
    was_full: bool,
}

impl ResponsePace {
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

    /// The useful number of requests at once.
    fn window(&self, max: usize) -> usize {
        let enough = (self.quickest * REQUESTS_PER_SECOND).ceil() as usize;
        enough.clamp(WINDOW_ANSWERING.min(max), max)
    }
}

/// Whether a request may be sent before the delay is over, because an event is about to expire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryProbe {
    Go(SendPass),
    /// Not before this time: another probe was sent too recently, or is in flight.
    Later(Timestamp),
    /// Nothing holds the event back until it expires.
    NotNeeded,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointAdmission {
    Go(SendPass),
    /// The in-flight window is full; a request that ends makes space.
    Full,
    /// A probe is in flight; its result decides.
    ProbeUnderWay,
    /// On probation, or limited by the rate, until then.
    Delayed(Timestamp),
}

impl EndpointHealth {
    /// `delay` is the delay that was stored by an earlier process.
    pub fn new(window_max: usize, delay: Option<EndpointProbationDelay>) -> EndpointHealth {
        EndpointHealth {
            window: WINDOW_FIRST.min(window_max),
            window_max,
            in_flight: 0,
            breaker: CircuitBreaker::delayed(delay),
            failed_last: false,
            pace: ResponsePace::default(),
            next_paced: Timestamp::MIN,
            sharing: SendingTurn::ALONE,
        }
    }

    /// Sets which of the nodes that send to the endpoint this one is.
    pub fn share(&mut self, sharing: SendingTurn) {
        self.sharing = sharing;
    }

    /// How many more requests would be admitted now.
    pub fn room(&self) -> usize {
        match self.breaker.delay {
            Some(_) => 0,
            None => self.window.saturating_sub(self.in_flight),
        }
    }

    pub fn delay(&self) -> Option<EndpointProbationDelay> {
        self.breaker.delay
    }

    fn standing(&self) -> EndpointStanding {
        if self.breaker.delay.is_some() || !self.breaker.failing.is_empty() || self.failed_last {
            EndpointStanding::Failing
        } else if self.pace.quickest == 0.0 {
            EndpointStanding::Untried
        } else {
            EndpointStanding::Answering
        }
    }

    /// Asks to send one request. Only a sender whose profile has probation is held back by a delay,
    /// and only one whose webhook set a rate is held to a rate.
    pub fn enter(&mut self, sender: SenderLimits, now: Timestamp) -> EndpointAdmission {
        let gate = match sender.has_probation {
            true => self.breaker.gate(now),
            false => BreakerGate::Open,
        };
        if let BreakerGate::ClosedUntil(until) = gate {
            return EndpointAdmission::Delayed(until);
        }
        let paced = sender.interval().map(|interval| self.paced(interval, now));
        if let Some(RateAdmission::Wait(until)) = paced {
            return EndpointAdmission::Delayed(until);
        }
        let probe = match gate {
            BreakerGate::ProbeUnderWay => return EndpointAdmission::ProbeUnderWay,
            BreakerGate::Probe { early } => {
                self.breaker.begin_probe();
                Some(early)
            }
            _ if self.in_flight >= self.window => return EndpointAdmission::Full,
            _ => None,
        };
        self.in_flight += 1;
        self.pace.was_full |= self.in_flight >= self.window;
        let mut share = Duration::ZERO;
        if let (Some(RateAdmission::Go { next }), Some(interval)) = (paced, sender.interval()) {
            self.next_paced = next;
            share = interval * self.sharing.of();
        }
        EndpointAdmission::Go(SendPass {
            standing: self.standing(),
            probe,
            own_probe: None,
            share,
            before_expiry: false,
        })
    }

    /// Whether a request may be sent where all nodes together may send one in every `interval`.
    fn paced(&self, interval: Duration, now: Timestamp) -> RateAdmission {
        let share = interval * self.sharing.of();
        // A long interval allows no early request: the rate would be exceeded.
        let early = if share < PACED_EARLY {
            PACED_EARLY
        } else {
            Duration::ZERO
        };
        // The time was computed for more nodes than send now: with fewer the request is due sooner.
        let next = self.next_paced.min(now + early + share);
        if self.sharing.of() > 1 && interval >= PACED_EARLY {
            // At a rate this low, nodes that all begin at once would send too many: each waits for
            // its own slot.
            let current = now - interval + Duration::from_nanos(1);
            let turn = self.sharing.slot_from(next.max(current), interval);
            return match turn > now {
                true => RateAdmission::Wait(turn),
                false => RateAdmission::Go { next: turn + share },
            };
        }
        // A request that would come too early waits until a full interval has passed.
        match next > now + early {
            true => RateAdmission::Wait(next),
            false => RateAdmission::Go {
                next: next.max(now) + share,
            },
        }
    }

    /// A request that was admitted has ended, or (none) was not sent.
    pub fn leave(&mut self, pass: SendPass, ended: Option<EndedRequest<'_>>, now: Timestamp) {
        self.in_flight -= 1;
        if pass.probe.is_some() {
            self.breaker.probing = false;
        }
        let Some(ended) = ended else {
            // The next request need not wait for one that was not sent.
            self.breaker.probe_unsent(pass.probe == Some(true));
            self.next_paced = self.next_paced - pass.share;
            return;
        };
        match ended.outcome {
            // The attempt says nothing about the endpoint. A requested probe is not repeated at
            // once: every waiting delivery would spend an attempt while the proxy is away.
            Outcome::ProxyError => {}
            // The fault lies with the event or the subscription: the endpoint is well enough to say
            // so.
            outcome if is_well(outcome) || (is_own(outcome) && outcome != Outcome::GenericError) => {
                self.breaker.recover();
                self.failed_last = false;
                self.pace.answered(ended.took);
                // Adjusted once per window's worth of answers, so that each change can take effect.
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
                // An endpoint that has answered is up, whatever it thinks of one subscription's
                // request.
                self.failed_last = !is_own(cause);
                let least = if cause == Outcome::Busy {
                    1
                } else {
                    WINDOW_FIRST.min(self.window)
                };
                self.window = (self.window / 2).max(least);
                if is_own(cause) {
                    // An answer shows that the endpoint is up.
                    self.breaker.recover();
                } else if let Some(rules) = ended.rules {
                    let probe = pass.probe.is_some();
                    self.breaker.fail(probe, &ended, rules, now);
                }
            }
        }
    }
}

/// Answers that show no fault of the endpoint, nor of the request apart from the event.
fn is_well(outcome: Outcome) -> bool {
    matches!(
        outcome,
        Outcome::Success | Outcome::BadRequest | Outcome::PayloadTooLarge
    )
}

/// Failures that the endpoint itself has answered, except "busy" and "timed out". They count for
/// the subscription alone, because its part of the request (a code in the query, a header) may be
/// at fault; they do not delay other subscriptions of the endpoint.
fn is_own(outcome: Outcome) -> bool {
    match outcome {
        Outcome::Success | Outcome::BadRequest | Outcome::PayloadTooLarge | Outcome::ProxyError => false,
        Outcome::SocketError | Outcome::ResolutionError | Outcome::TimedOut | Outcome::Busy => false,
        Outcome::NotFound
        | Outcome::Disabled
        | Outcome::Full
        | Outcome::Unauthorized
        | Outcome::Probation
        | Outcome::Canceled
        | Outcome::Aborted
        | Outcome::SessionQueueNotSupported
        | Outcome::Forbidden
        | Outcome::InvalidAzureFunctionDestination
        | Outcome::GenericError => true,
    }
}

/// An endpoint that subscriptions share: scheme, host, port and path.
pub struct Endpoint {
    /// The name, without the query string.
    pub name: Arc<str>,
    /// The endpoint's use of the budget of bytes in flight.
    pub(crate) in_flight: Arc<EndpointUsage>,
    sharing: watch::Receiver<SendingTurn>,
    inner: Mutex<Inner>,
}

struct Inner {
    health: EndpointHealth,
    /// The latest request that has ended since the start.
    last: Option<LastAttempt>,
    /// The circuit breakers of subscriptions whose requests the endpoint has answered with a
    /// failure since their last success.
    own_breakers: FxHashMap<SubscriptionId, CircuitBreaker>,
    /// Subscriptions that wait to send, in the order in which they asked.
    waiting: VecDeque<Weak<SubscriptionDispatcher>>,
}

/// The identity that subscriptions with the same endpoint share: scheme, host, port and path. A
/// default port is left out.
pub fn name(url: &Uri) -> String {
    let scheme = url.scheme_str().unwrap_or("http");
    let host = url.host().unwrap_or("").to_lowercase();
    let port = match (scheme, url.port_u16()) {
        ("http", Some(80)) | ("https", Some(443)) | (_, None) => String::new(),
        (_, Some(port)) => format!(":{port}"),
    };
    format!("{scheme}://{host}{port}{}", url.path())
}

/// The work that a request leaves to its lane when it has ended.
#[derive(Default)]
pub struct DepartureEffects {
    /// Subscriptions that may send now, each with its pass.
    pub admitted: Vec<(Arc<SubscriptionDispatcher>, SendPass)>,
    /// Delays that have changed: of the endpoint, or of the subscription.
    pub changed: Vec<DelayChange>,
    /// When the next rate-limited subscription in the queue may send.
    pub again: Option<Timestamp>,
}

/// A delay that has begun, been prolonged or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelayChange {
    pub scope: DelayScope,
    pub delay: Option<EndpointProbationDelay>,
}

/// The deliveries to an endpoint that a delay holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelayScope {
    /// The deliveries of all subscriptions.
    Endpoint,
    /// Deliveries of this subscription only, whose requests the endpoint answers with failures.
    Subscription(SubscriptionId),
}

impl DelayScope {
    const MARK: &str = " (subscription ";

    /// The name under which a delay of this scope is stored and shown.
    pub fn name(self, endpoint: &str) -> String {
        match self {
            DelayScope::Endpoint => endpoint.to_owned(),
            DelayScope::Subscription(id) => format!("{endpoint}{}{})", DelayScope::MARK, id.0),
        }
    }

    /// The endpoint and the scope of a name.
    pub fn parse(name: &str) -> (&str, DelayScope) {
        let own = name.split_once(DelayScope::MARK).and_then(|(endpoint, id)| {
            let id = id.strip_suffix(')')?.parse().ok()?;
            Some((endpoint, DelayScope::Subscription(SubscriptionId(id))))
        });
        own.unwrap_or((name, DelayScope::Endpoint))
    }
}

/// The state of an endpoint, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointReportState {
    pub in_flight: usize,
    pub delay: Option<EndpointProbationDelay>,
    pub probing: bool,
}

impl Endpoint {
    pub fn new(
        name: String,
        window_max: usize,
        delay: Option<EndpointProbationDelay>,
        sharing: watch::Receiver<SendingTurn>,
    ) -> Endpoint {
        Endpoint {
            name: name.into(),
            in_flight: Arc::default(),
            sharing,
            inner: Mutex::new(Inner {
                health: EndpointHealth::new(window_max, delay),
                last: None,
                own_breakers: FxHashMap::default(),
                waiting: VecDeque::new(),
            }),
        }
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic holds it")
    }

    /// Asks to send one request. A subscription that may not send is queued and woken later.
    pub fn enter(
        &self,
        outlet: &Arc<SubscriptionDispatcher>,
        sender: SenderLimits,
        now: Timestamp,
    ) -> EndpointAdmission {
        let mut inner = self.inner();
        let admission = self.ask_for_place(&mut inner, outlet.id, sender, now);
        if !matches!(admission, EndpointAdmission::Go(_)) && !outlet.waiting.swap(true, Relaxed) {
            inner.waiting.push_back(Arc::downgrade(outlet));
        }
        admission
    }

    /// Asks to probe with an event that expires before the delay is over.
    pub fn enter_before_expiry(
        &self,
        outlet: &Arc<SubscriptionDispatcher>,
        sender: SenderLimits,
        rules: &ProbationRules,
        expires: Timestamp,
        now: Timestamp,
    ) -> ExpiryProbe {
        let mut inner = self.inner();
        let until = inner
            .breakers_of(outlet.id)
            .filter(|breaker| breaker.holds_at(now));
        let until = until
            .filter_map(|breaker| breaker.delay)
            .map(|delay| delay.until)
            .max();
        if !sender.has_probation || until.is_none_or(|until| until < expires) {
            return ExpiryProbe::NotNeeded;
        }
        let waits = inner.breakers_of(outlet.id).filter_map(|breaker| breaker.delay);
        let wait = waits
            .map(|delay| rules.first(delay.cause))
            .max()
            .unwrap_or_default();
        // An event that expired earlier waits for its retry, and says nothing about other events.
        if now > expires + wait + EXPIRY_PROBE_LEAD {
            return ExpiryProbe::NotNeeded;
        }
        let next = inner
            .breakers_of(outlet.id)
            .map(|breaker| breaker.next_expiry_probe(rules, now));
        let next = next.max().unwrap_or(now);
        if next > now {
            return ExpiryProbe::Later(next);
        }
        for breaker in inner.breakers_of(outlet.id) {
            breaker.probe_wanted |= breaker.holds_at(now);
        }
        let admission = self.ask_for_place(&mut inner, outlet.id, sender, now);
        for breaker in inner
            .breakers_of(outlet.id)
            .filter(|breaker| breaker.holds_at(now))
        {
            // The probe was granted for this event only: if it is not sent, no other event becomes
            // the probe.
            breaker.probe_wanted = false;
            breaker.expiry_probe_at = Some(now);
        }
        let EndpointAdmission::Go(pass) = admission else {
            return match admission {
                EndpointAdmission::Delayed(until) => ExpiryProbe::Later(until),
                _ => ExpiryProbe::NotNeeded,
            };
        };
        inner
            .waiting
            .retain(|waiting| !std::ptr::eq(waiting.as_ptr(), Arc::as_ptr(outlet)));
        outlet.waiting.store(false, Relaxed);
        ExpiryProbe::Go(SendPass {
            probe: pass.probe.map(|_| false),
            own_probe: pass.own_probe.map(|_| false),
            before_expiry: true,
            ..pass
        })
    }

    fn ask_for_place(
        &self,
        inner: &mut Inner,
        of: SubscriptionId,
        sender: SenderLimits,
        now: Timestamp,
    ) -> EndpointAdmission {
        if sender.rate_max.is_some() {
            inner.health.share(*self.sharing.borrow());
        }
        let own = match sender.has_probation && !inner.own_breakers.is_empty() {
            true => inner.own_breakers.get_mut(&of),
            false => None,
        };
        let gate = own.as_ref().map_or(BreakerGate::Open, |own| own.gate(now));
        match gate {
            BreakerGate::ClosedUntil(until) => return EndpointAdmission::Delayed(until),
            BreakerGate::ProbeUnderWay => return EndpointAdmission::ProbeUnderWay,
            BreakerGate::Open | BreakerGate::Probe { .. } => {}
        }
        let mut admission = inner.health.enter(sender, now);
        if let (EndpointAdmission::Go(pass), Some(own), BreakerGate::Probe { early }) =
            (&mut admission, own, gate)
        {
            own.begin_probe();
            pass.own_probe = Some(early);
        }
        admission
    }

    /// How many more requests would be admitted now.
    pub fn room(&self) -> usize {
        self.inner().health.room()
    }

    /// A request of `leaving` has ended; free places in the window go to those that have waited
    /// longest.
    pub fn leave(
        &self,
        leaving: &Arc<SubscriptionDispatcher>,
        pass: SendPass,
        ended: Option<EndedRequest<'_>>,
        now: Timestamp,
    ) -> DepartureEffects {
        let mut inner = self.inner();
        if let Some(ended) = &ended {
            inner.last = Some(LastAttempt {
                at: now,
                outcome: ended.outcome,
                status: ended.status,
            });
        }
        let before = inner.health.delay();
        inner.health.leave(pass, ended, now);
        let after = inner.health.delay();
        let mut left = DepartureEffects::default();
        if before != after {
            left.changed.push(DelayChange {
                scope: DelayScope::Endpoint,
                delay: after,
            });
        }
        left.changed.extend(inner.leave_own(leaving.id, pass, ended, now));
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
            match self.ask_for_place(&mut inner, outlet.id, sender, now) {
                EndpointAdmission::Go(pass) => {
                    inner.waiting.remove(place);
                    outlet.waiting.store(false, Relaxed);
                    left.admitted.push((outlet, pass));
                }
                // A delay holds this one back, not the window: those behind it may not have
                // probation.
                _ if sender.has_probation && after.is_some() => place += 1,
                EndpointAdmission::ProbeUnderWay => place += 1,
                EndpointAdmission::Delayed(until) => {
                    left.again = Some(left.again.map_or(until, |at| at.min(until)));
                    place += 1;
                }
                _ => break,
            }
        }
        left
    }

    /// Returns a pass that was granted to a subscription which no longer sends here.
    pub fn return_pass(&self, of: SubscriptionId, pass: SendPass, now: Timestamp) {
        let mut inner = self.inner();
        inner.health.leave(pass, None, now);
        inner.leave_own(of, pass, None, now);
    }

    /// The endpoint accepted a delivery of this subscription, or (none) an operator says that it is
    /// well. Returns the delays that this ended.
    pub fn recover(&self, of: Option<SubscriptionId>) -> Vec<DelayChange> {
        let mut inner = self.inner();
        let mut ended = Vec::new();
        if inner.health.delay().is_some() {
            ended.push(DelayScope::Endpoint);
        }
        inner.health.breaker.recover();
        let is_meant = |id: &SubscriptionId| of.is_none_or(|of| of == *id);
        inner.own_breakers.retain(|id, own| {
            if is_meant(id) && own.delay.is_some() {
                ended.push(DelayScope::Subscription(*id));
            }
            !is_meant(id)
        });
        let over = |scope| DelayChange { scope, delay: None };
        ended.into_iter().map(over).collect()
    }

    /// Ends a delay that another node has found to be over. Returns whether there was one.
    pub fn release(&self, scope: DelayScope) -> bool {
        let mut inner = self.inner();
        match scope {
            DelayScope::Endpoint => {
                let held = inner.health.delay().is_some();
                inner.health.breaker.recover();
                held
            }
            DelayScope::Subscription(id) => {
                let known = inner.own_breakers.remove(&id);
                known.is_some_and(|own| own.delay.is_some())
            }
        }
    }

    /// Applies a delay that another node has set, or an earlier process has stored.
    pub fn hold(&self, scope: DelayScope, delay: EndpointProbationDelay) {
        let mut inner = self.inner();
        match scope {
            DelayScope::Endpoint => inner.health.breaker.hold(delay),
            DelayScope::Subscription(id) => inner.own_breakers.entry(id).or_default().hold(delay),
        }
    }

    /// Forgets a subscription that no longer sends here. Returns whether its own deliveries were
    /// delayed.
    pub fn forget(&self, of: SubscriptionId) -> bool {
        self.release(DelayScope::Subscription(of))
    }

    /// Probes the endpoint with the subscription's next delivery, whether or not the delay is over.
    /// Returns whether deliveries were delayed.
    pub fn want_probe(&self, of: SubscriptionId, now: Timestamp) -> bool {
        let mut inner = self.inner();
        let own = inner.own_breakers.get_mut(&of);
        let own = own.is_some_and(|own| own.want_probe(now));
        let shared = inner.health.breaker.want_probe(now);
        own || shared
    }

    /// Takes all waiting subscriptions to be woken: the delay is over, or something else has
    /// changed.
    pub fn take_waiting(&self) -> Vec<Arc<SubscriptionDispatcher>> {
        let mut inner = self.inner();
        let waiting = std::mem::take(&mut inner.waiting);
        let outlets: Vec<Arc<SubscriptionDispatcher>> = waiting.iter().filter_map(Weak::upgrade).collect();
        for outlet in &outlets {
            outlet.waiting.store(false, Relaxed);
        }
        outlets
    }

    pub fn state(&self) -> EndpointReportState {
        let health = &self.inner().health;
        EndpointReportState {
            in_flight: health.in_flight,
            delay: health.delay(),
            probing: health.breaker.probing,
        }
    }

    /// The latest request that has ended since the start, whichever subscription sent it.
    pub fn last(&self) -> Option<LastAttempt> {
        self.inner().last
    }

    /// The state of the endpoint for one subscription.
    pub fn state_for(&self, of: SubscriptionId) -> EndpointReportState {
        self.own_delay_state(of).unwrap_or_else(|| self.state())
    }

    /// The state of a subscription whose own deliveries are delayed.
    pub fn own_delay_state(&self, of: SubscriptionId) -> Option<EndpointReportState> {
        let inner = self.inner();
        let own = inner.own_breakers.get(&of).filter(|own| own.delay.is_some())?;
        Some(EndpointReportState {
            in_flight: inner.health.in_flight,
            delay: own.delay,
            probing: own.probing,
        })
    }
}

impl Inner {
    /// The circuit breakers that apply to a subscription.
    fn breakers_of(&mut self, of: SubscriptionId) -> impl Iterator<Item = &mut CircuitBreaker> {
        let own = self.own_breakers.get_mut(&of);
        own.into_iter().chain([&mut self.health.breaker])
    }

    /// Counts a request for the subscription that sent it. Returns its own delay, if that has
    /// changed.
    fn leave_own(
        &mut self,
        of: SubscriptionId,
        pass: SendPass,
        ended: Option<EndedRequest<'_>>,
        now: Timestamp,
    ) -> Option<DelayChange> {
        let refused = ended.filter(|ended| is_own(ended.outcome));
        let rules = refused.and_then(|ended| ended.rules);
        if self.own_breakers.is_empty() && rules.is_none() {
            return None;
        }
        let before = self.own_breakers.get(&of).and_then(|own| own.delay);
        match (ended, rules) {
            (Some(ended), Some(rules)) => {
                let own = self.own_breakers.entry(of).or_default();
                own.probing &= pass.own_probe.is_none();
                own.fail(pass.own_probe.is_some(), &ended, rules, now);
            }
            (Some(ended), None) if is_well(ended.outcome) => drop(self.own_breakers.remove(&of)),
            _ => {
                if let (Some(early), Some(own)) = (pass.own_probe, self.own_breakers.get_mut(&of)) {
                    own.probing = false;
                    // Only a probe that was not sent is still wanted: one that failed for another
                    // reason would be repeated at once, to an endpoint that is failing.
                    own.probe_unsent(early && ended.is_none());
                }
            }
        }
        let delay = self.own_breakers.get(&of).and_then(|own| own.delay);
        (before != delay).then_some(DelayChange {
            scope: DelayScope::Subscription(of),
            delay,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(secs)
    }

    const RULES: ProbationRules = ProbationRules::DOCUMENTED;
    const OBEYS: SenderLimits = SenderLimits {
        has_probation: true,
        rate_max: None,
    };
    const FREE: SenderLimits = SenderLimits {
        has_probation: false,
        rate_max: None,
    };

    /// Makes one request, for a new event.
    fn send(health: &mut EndpointHealth, event: u64, now: Timestamp, outcome: Outcome) {
        let EndpointAdmission::Go(pass) = health.enter(OBEYS, now) else {
            panic!("not admitted");
        };
        health.leave(pass, Some(ended(event, outcome)), now);
    }

    fn ended(event: u64, outcome: Outcome) -> EndedRequest<'static> {
        EndedRequest {
            outcome,
            status: (outcome == Outcome::GenericError).then_some(500),
            took: Duration::from_millis(5),
            of: SubscriptionId(1),
            events: vec![Position(event)].leak(),
            rules: Some(&RULES),
        }
    }

    fn go(admission: EndpointAdmission) -> SendPass {
        match admission {
            EndpointAdmission::Go(pass) => pass,
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

    // Regression: one 500 for one subscription cost all others at the endpoint their share of the
    // budget of bytes in flight.
    #[test]
    fn an_endpoint_that_answers_with_an_error_of_its_own_is_not_failing() {
        let mut health = EndpointHealth::new(64, None);
        assert_eq!(health.standing(), EndpointStanding::Untried);
        let mut standing = |event: u64, outcome: Outcome| {
            send(&mut health, event, at(0), outcome);
            health.standing()
        };
        assert_eq!(standing(1, Outcome::Success), EndpointStanding::Answering);
        assert_eq!(standing(2, Outcome::GenericError), EndpointStanding::Answering);
        assert_eq!(standing(3, Outcome::TimedOut), EndpointStanding::Failing);
        assert_eq!(standing(4, Outcome::Unauthorized), EndpointStanding::Answering);
        assert_eq!(standing(5, Outcome::Busy), EndpointStanding::Failing);
    }

    #[test]
    fn ten_failures_in_a_row_delay_everything_and_probes_double_it() {
        let mut health = EndpointHealth::new(64, None);
        for event in 0..9 {
            send(&mut health, event, at(0), Outcome::SocketError);
        }
        assert_eq!(health.delay(), None);
        send(&mut health, 9, at(0), Outcome::SocketError);
        assert_eq!(health.enter(OBEYS, at(29)), EndpointAdmission::Delayed(at(30)));
        let probe = go(health.enter(OBEYS, at(30)));
        assert_eq!(
            health.enter(OBEYS, at(30)),
            EndpointAdmission::ProbeUnderWay,
            "one probe at a time"
        );
        health.leave(probe, Some(ended(10, Outcome::SocketError)), at(31));
        assert_eq!(health.enter(OBEYS, at(32)), EndpointAdmission::Delayed(at(91)));
        let probe = go(health.enter(OBEYS, at(91)));
        health.leave(probe, Some(ended(10, Outcome::Success)), at(91));
        assert_eq!(health.delay(), None);
        let _ = go(health.enter(OBEYS, at(91)));
    }

    /// An endpoint after ten failures: delayed from 0 to 30.
    fn delayed() -> EndpointHealth {
        let mut health = EndpointHealth::new(64, None);
        for event in 0..10 {
            send(&mut health, event, at(0), Outcome::SocketError);
        }
        assert_eq!(health.enter(OBEYS, at(1)), EndpointAdmission::Delayed(at(30)));
        health
    }

    #[test]
    fn whoever_asks_for_a_probe_gets_one() {
        let mut health = delayed();
        assert!(health.breaker.want_probe(at(5)));
        let probe = go(health.enter(OBEYS, at(5)));
        assert_eq!(
            health.enter(OBEYS, at(5)),
            EndpointAdmission::Delayed(at(30)),
            "one, and no flood"
        );
        assert!(!health.breaker.want_probe(at(5)), "one is under way");
        health.leave(probe, Some(ended(11, Outcome::Success)), at(6));
        assert_eq!(health.delay(), None);
        assert!(!health.breaker.want_probe(at(6)), "there is nothing to wait for");
    }

    #[test]
    fn a_probe_that_was_asked_for_and_fails_costs_nothing() {
        let mut health = delayed();
        let before = health.delay();
        assert!(health.breaker.want_probe(at(5)));
        let probe = go(health.enter(OBEYS, at(5)));
        health.leave(probe, Some(ended(11, Outcome::TimedOut)), at(6));
        assert_eq!(health.delay(), before);
        assert_eq!(health.enter(OBEYS, at(7)), EndpointAdmission::Delayed(at(30)));
        // The regular probe doubles the delay as usual.
        send(&mut health, 12, at(30), Outcome::SocketError);
        assert_eq!(health.enter(OBEYS, at(31)), EndpointAdmission::Delayed(at(90)));
    }

    #[test]
    fn an_event_that_expires_during_a_delay_is_the_probe_and_not_too_often() {
        let endpoint = Endpoint::new("http://x/".into(), 64, None, watch::channel(SendingTurn::ALONE).1);
        let outlet = Arc::new(SubscriptionDispatcher::new(
            SubscriptionId(7),
            Arc::default(),
            true,
        ));
        let ask = |expires: i64, now: i64| {
            endpoint.enter_before_expiry(&outlet, OBEYS, &RULES, at(expires), at(now))
        };
        assert_eq!(ask(10, 0), ExpiryProbe::NotNeeded, "no delay");
        endpoint.inner().health = delayed();
        assert_eq!(ask(31, 5), ExpiryProbe::NotNeeded, "the delay ends before");
        assert!(matches!(
            endpoint.enter(&outlet, OBEYS, at(5)),
            EndpointAdmission::Delayed(_)
        ));
        let ExpiryProbe::Go(pass) = ask(30, 5) else {
            panic!("it expires with the delay");
        };
        assert!(!outlet.waiting.load(Relaxed) && endpoint.take_waiting().is_empty());
        assert_eq!(ask(30, 6), ExpiryProbe::Later(at(36)), "one at a time");
        // Nothing was sent, and no other event becomes the probe.
        drop(endpoint.leave(&outlet, pass, None, at(6)));
        assert_eq!(
            endpoint.enter(&outlet, OBEYS, at(6)),
            EndpointAdmission::Delayed(at(30))
        );
        assert_eq!(ask(30, 7), ExpiryProbe::Later(at(35)), "as long as at first");
        let mut health = delayed();
        health.breaker.delay.as_mut().unwrap().until = at(1000);
        endpoint.inner().health = health;
        let ExpiryProbe::Go(pass) = ask(50, 40) else {
            panic!("a new delay");
        };
        let failed = endpoint.leave(&outlet, pass, Some(ended(1, Outcome::SocketError)), at(41));
        assert!(failed.changed.is_empty(), "a probe that was early costs nothing");
        assert_eq!(ask(50, 69), ExpiryProbe::Later(at(70)));
        let ExpiryProbe::Go(pass) = ask(50, 70) else {
            panic!("what has expired makes room for what has not");
        };
        drop(endpoint.leave(&outlet, pass, Some(ended(1, Outcome::Success)), at(71)));
        assert_eq!(ask(75, 71), ExpiryProbe::NotNeeded, "it is well");
        endpoint.inner().health = delayed();
        assert!(matches!(ask(-20, 20), ExpiryProbe::Go(_)));
        endpoint.inner().health = delayed();
        assert_eq!(ask(-21, 20), ExpiryProbe::NotNeeded, "that is long past");
    }

    #[test]
    fn a_probe_that_has_failed_elsewhere_meanwhile_counts_once() {
        let mut health = delayed();
        let probe = go(health.enter(OBEYS, at(30)));
        let set_elsewhere = EndpointProbationDelay {
            until: at(100),
            ..health.delay().unwrap()
        };
        health.breaker.hold(set_elsewhere);
        health.leave(probe, Some(ended(10, Outcome::TimedOut)), at(60));
        assert_eq!(health.delay(), Some(set_elsewhere));
        // A success ends the delay, whichever request it came from.
        let mut health = delayed();
        let probe = go(health.enter(OBEYS, at(30)));
        health.breaker.hold(set_elsewhere);
        health.leave(probe, Some(ended(10, Outcome::Success)), at(60));
        assert_eq!(health.delay(), None);
    }

    #[test]
    fn a_probe_is_still_wanted_when_there_was_nothing_to_send() {
        let mut health = delayed();
        assert!(health.breaker.want_probe(at(5)));
        let probe = go(health.enter(OBEYS, at(5)));
        health.leave(probe, None, at(5));
        let probe = go(health.enter(OBEYS, at(9)));
        health.leave(probe, None, at(9));
        health.breaker.recover();
        for event in 20..30 {
            send(&mut health, event, at(10), Outcome::SocketError);
        }
        assert_eq!(
            health.enter(OBEYS, at(11)),
            EndpointAdmission::Delayed(at(40)),
            "that was about another delay"
        );
    }

    #[test]
    fn every_event_of_a_batch_counts_and_none_counts_twice() {
        const EVENTS: [Position; 11] = {
            let mut events = [Position(0); 11];
            let mut n = 0;
            while n < 11 {
                events[n] = Position(n as u64);
                n += 1;
            }
            events
        };
        let fail = |health: &mut EndpointHealth, events: &'static [Position]| {
            let pass = go(health.enter(OBEYS, at(0)));
            let ended = EndedRequest {
                events,
                ..ended(0, Outcome::SocketError)
            };
            health.leave(pass, Some(ended), at(0));
            health.delay().is_some()
        };
        assert!(fail(&mut EndpointHealth::new(64, None), &EVENTS[..10]));
        let mut health = EndpointHealth::new(64, None);
        for _ in 0..5 {
            assert!(!fail(&mut health, &EVENTS[..9]), "nine events, again and again");
        }
        assert!(fail(&mut health, &EVENTS[8..10]), "the tenth");
    }

    #[test]
    fn a_success_between_failures_starts_the_count_again() {
        let mut health = EndpointHealth::new(64, None);
        for round in 0..5 {
            for event in 0..9 {
                send(&mut health, round * 10 + event, at(0), Outcome::TimedOut);
            }
            send(&mut health, round * 10 + 9, at(0), Outcome::Success);
        }
        assert_eq!(health.delay(), None);
    }

    #[test]
    fn a_fault_of_the_proxy_says_nothing_of_the_endpoint() {
        let mut health = EndpointHealth::new(64, None);
        for event in 0..30 {
            send(&mut health, event, at(0), Outcome::ProxyError);
        }
        assert_eq!(health.delay(), None);
        // A proxy error ends no delay either: the next delivery is the probe.
        let mut health = delayed();
        let before = health.delay();
        send(&mut health, 20, at(30), Outcome::ProxyError);
        assert_eq!(health.delay(), before);
        let _ = go(health.enter(OBEYS, at(31)));
        // A requested probe is not repeated at once.
        let mut health = delayed();
        assert!(health.breaker.want_probe(at(5)));
        send(&mut health, 21, at(5), Outcome::ProxyError);
        assert_eq!(health.enter(OBEYS, at(6)), EndpointAdmission::Delayed(at(30)));
    }

    #[test]
    fn one_event_that_fails_again_and_again_delays_nothing() {
        let mut health = EndpointHealth::new(64, None);
        for hour in 0..30 {
            send(&mut health, 7, at(hour * 3600), Outcome::TimedOut);
        }
        assert_eq!(health.delay(), None);
    }

    #[test]
    fn the_delay_is_bounded() {
        let mut health = EndpointHealth::new(64, None);
        for event in 0..10 {
            send(&mut health, event, at(0), Outcome::Busy);
        }
        for _ in 0..20 {
            let until = health.delay().unwrap().until;
            send(&mut health, 1, until, Outcome::Busy);
        }
        assert_eq!(health.delay().unwrap().step, RULES.max);
        assert_eq!(health.delay().unwrap().since, at(0));
    }

    #[test]
    fn attempts_under_way_when_the_delay_began_neither_prolong_it_nor_count_as_the_probe() {
        let mut health = EndpointHealth::new(64, None);
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
            EndpointAdmission::ProbeUnderWay,
            "the probe is still out"
        );
        assert_eq!(health.delay().unwrap().until, at(10));
        health.leave(probe, Some(ended(22, Outcome::Busy)), at(12));
        assert_eq!(health.delay().unwrap().until, at(32));
    }

    #[test]
    fn senders_without_such_rules_neither_cause_nor_obey_a_delay() {
        let mut health = EndpointHealth::new(64, None);
        let lawless = |event| EndedRequest {
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
        assert_eq!(health.enter(OBEYS, at(1)), EndpointAdmission::Delayed(at(30)));
        health.leave(pass, Some(lawless(40)), at(1));
        assert_eq!(health.delay().unwrap().until, at(30));
        // An answer from any sender ends the delay for all.
        let pass = go(health.enter(FREE, at(2)));
        health.leave(pass, Some(ended(41, Outcome::Success)), at(2));
        assert_eq!(health.delay(), None);
    }

    /// The window after many answers from an endpoint whose latency depends on the number of
    /// requests in flight.
    fn window_at(takes: impl Fn(usize) -> Duration) -> usize {
        let mut health = EndpointHealth::new(64, None);
        for _ in 0..2000 {
            let mut entered = Vec::new();
            while let EndpointAdmission::Go(pass) = health.enter(OBEYS, at(0)) {
                entered.push(pass);
            }
            let took = takes(entered.len());
            for pass in entered {
                let ended = EndedRequest {
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
        // The endpoint answers one request after another: further requests only wait there.
        let busy = window_at(|entered| Duration::from_micros(50) * entered as u32);
        assert_eq!(busy, WINDOW_ANSWERING);
    }

    #[test]
    fn a_rate_that_was_asked_for_is_kept() {
        let per_minute = |rate: u32| SenderLimits {
            has_probation: true,
            rate_max: Some(rate),
        };
        // The requests of a sender that asks for five minutes whenever it may.
        let sent = |rate: u32| {
            let mut health = EndpointHealth::new(64, None);
            let mut now = at(0);
            let mut times = Vec::new();
            while now < at(300) {
                match health.enter(per_minute(rate), now) {
                    EndpointAdmission::Go(pass) => {
                        times.push(now);
                        health.leave(pass, Some(ended(times.len() as u64, Outcome::Success)), now);
                    }
                    EndpointAdmission::Delayed(until) => {
                        assert!(until > now, "it would ask for ever");
                        now = until;
                    }
                    EndpointAdmission::Full | EndpointAdmission::ProbeUnderWay => {
                        panic!("everything was answered")
                    }
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

        let mut health = EndpointHealth::new(64, None);
        let pass = go(health.enter(per_minute(1), at(0)));
        // Senders without a rate are not held up, and do not take the rate's turn.
        let other = go(health.enter(OBEYS, at(1)));
        health.leave(other, Some(ended(1, Outcome::Success)), at(1));
        assert_eq!(
            health.enter(per_minute(1), at(1)),
            EndpointAdmission::Delayed(at(60))
        );
        // A request that was not sent does not count.
        health.leave(pass, None, at(2));
        let _ = go(health.enter(per_minute(1), at(2)));
    }

    /// The times at which several nodes send that ask whenever they may, each with its own share.
    fn all_sent(
        rate: u32,
        sharing: impl Fn(usize, Timestamp) -> SendingTurn,
        from: &[i64],
    ) -> Vec<Timestamp> {
        let sender = SenderLimits {
            has_probation: true,
            rate_max: Some(rate),
        };
        let mut times = Vec::new();
        for (node, begins) in from.iter().enumerate() {
            let mut health = EndpointHealth::new(64, None);
            let mut now = at(*begins);
            while now < at(1200) {
                health.share(sharing(node, now));
                match health.enter(sender, now) {
                    EndpointAdmission::Go(pass) => {
                        times.push(now);
                        health.leave(pass, Some(ended(times.len() as u64, Outcome::Success)), now);
                    }
                    EndpointAdmission::Delayed(until) => {
                        assert!(until > now, "it would ask for ever");
                        now = until.min(now + Duration::from_secs(60));
                    }
                    EndpointAdmission::Full | EndpointAdmission::ProbeUnderWay => {
                        panic!("everything was answered")
                    }
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
            // Each node begins at a different time.
            let from: Vec<i64> = (0..nodes).map(|node| node as i64 * 17).collect();
            let times = all_sent(rate, |node, _| SendingTurn::new(node, nodes), &from);
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
        // The second node dies after ten minutes; the first learns of it.
        let alone_from = at(600);
        let sharing = |_: usize, now: Timestamp| match now < alone_from {
            true => SendingTurn::new(0, 3),
            false => SendingTurn::ALONE,
        };
        let times = all_sent(2, sharing, &[0]);
        let before = times.iter().filter(|t| **t < alone_from).count();
        let after = times.len() - before;
        assert!((6..=8).contains(&before), "a third of 20: {before}");
        assert!((19..=21).contains(&after), "all of 20: {after}");
    }
}
