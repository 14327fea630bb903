//! Who sends next: lanes claim what is due, fairly, within each endpoint's limits.
//!
//! A lane is a task that claims, attempts, settles, and claims again. A subscription has lanes only
//! while it has work; an idle one costs nothing.

use crate::attempt::{Attempted, BatchDefaults, Plan};
use crate::counters::{Counters, add, by_reason};
use crate::deliver::{Reply, Transport};
use crate::directory::TopicEntry;
use crate::endpoint::{Admission, Endpoint, Left};
use http::Uri;
use postrider_core::ids::SubscriptionId;
use postrider_core::outcome::Outcome;
use postrider_core::profile::Profile;
use postrider_core::retry::Next;
use postrider_core::subscription::Subscription;
use postrider_core::time::{Clock, Timestamp};
use postrider_store::log::LastAttempt;
use postrider_store::{Claim, EventLog, Listener, Settled};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A lane that finds nothing to claim stays this long before it ends: work often comes in bursts, and
/// waking a task is cheaper than making one.
const LINGER: Duration = Duration::from_secs(5);
/// A subscription whose log could not be read is tried again this much later.
const TROUBLE_PAUSE: Duration = Duration::from_secs(1);

/// How the engine delivers.
#[derive(Clone, Debug)]
pub struct Config {
    pub in_flight_per_endpoint_max: usize,
    pub batch_defaults: BatchDefaults,
    /// Seeds the jitter of retries.
    pub seed: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            in_flight_per_endpoint_max: 64,
            batch_defaults: BatchDefaults::default(),
            seed: 0,
        }
    }
}

/// One subscription's way out.
pub struct Outlet {
    pub id: SubscriptionId,
    plan: RwLock<Option<Arc<Plan>>>,
    lanes: AtomicUsize,
    /// Raised whenever there may be more to claim; a lane that found nothing looks whether it changed.
    signals: AtomicU64,
    /// It stands in its endpoint's queue.
    pub(crate) waiting: AtomicBool,
    /// Lanes that have nothing to do and wait to be woken.
    parked: AtomicUsize,
    unpark: Notify,
    /// Work came since the parked lanes were last looked at.
    busy: AtomicBool,
    /// Parked lanes are to be looked at, at a time that is set.
    reaping: AtomicBool,
    /// About how many deliveries can be claimed; too high at times, put right when none are found.
    ready: AtomicI64,
    pub counters: Counters,
}

impl Outlet {
    /// Wakes a parked lane, if there is one.
    fn unpark(&self) -> bool {
        let take = |parked: usize| parked.checked_sub(1);
        let woken = self.parked.fetch_update(AcqRel, Acquire, take).is_ok();
        if woken {
            self.unpark.notify_one();
        }
        woken
    }

    /// Wakes all parked lanes; those that find nothing to do then end.
    fn unpark_all(&self) {
        while self.unpark() {}
    }

    pub fn plan(&self) -> Option<Arc<Plan>> {
        self.plan.read().expect("no panic holds it").clone()
    }
}

pub struct Dispatcher {
    log: Arc<dyn EventLog>,
    transport: Arc<dyn Transport>,
    clock: Arc<dyn Clock>,
    config: Config,
    outlets: RwLock<FxHashMap<SubscriptionId, Arc<Outlet>>>,
    endpoints: Mutex<FxHashMap<String, Weak<Endpoint>>>,
    /// Endpoints and subscriptions to be looked at again at a point in time.
    alarms: Mutex<BTreeMap<(Timestamp, u64), Alarm>>,
    alarm_number: AtomicU64,
    changed: Notify,
    chance: AtomicU64,
    tasks: TaskTracker,
    /// No further claims.
    stop: CancellationToken,
    /// Attempts under way are given up.
    abort: CancellationToken,
    pub counters: Counters,
}

enum Alarm {
    Endpoint(Weak<Endpoint>),
    Outlet(Weak<Outlet>),
    /// Lanes of this outlet have been parked for a while.
    Parked(Weak<Outlet>),
}

impl Dispatcher {
    pub fn new(
        log: Arc<dyn EventLog>,
        transport: Arc<dyn Transport>,
        clock: Arc<dyn Clock>,
        config: Config,
    ) -> Arc<Dispatcher> {
        let dispatcher = Arc::new(Dispatcher {
            chance: AtomicU64::new(config.seed),
            log,
            transport,
            clock,
            config,
            outlets: RwLock::default(),
            endpoints: Mutex::default(),
            alarms: Mutex::default(),
            alarm_number: AtomicU64::new(0),
            changed: Notify::new(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            counters: Counters::default(),
        });
        dispatcher.log.listen(Arc::new(Ears(Arc::downgrade(&dispatcher))));
        dispatcher.tasks.spawn(dispatcher.clone().keep_time());
        dispatcher
    }

    /// Takes up a subscription, or what has changed about it.
    pub fn put(
        self: &Arc<Self>,
        subscription: Arc<Subscription>,
        topic: Arc<TopicEntry>,
        profile: &'static Profile,
    ) {
        let id = subscription.id;
        let find = |url: &Uri| self.endpoint(url);
        let defaults = self.config.batch_defaults;
        let plan = Plan::new(subscription, topic, profile, defaults, self.log.identity(), find);
        let outlet = {
            let mut outlets = self.outlets.write().expect("no panic holds it");
            let outlet = outlets.entry(id).or_insert_with(|| {
                Arc::new(Outlet {
                    id,
                    plan: RwLock::new(None),
                    lanes: AtomicUsize::new(0),
                    signals: AtomicU64::new(0),
                    waiting: AtomicBool::new(false),
                    parked: AtomicUsize::new(0),
                    unpark: Notify::new(),
                    busy: AtomicBool::new(false),
                    reaping: AtomicBool::new(false),
                    ready: AtomicI64::new(0),
                    counters: Counters::default(),
                })
            });
            outlet.clone()
        };
        *outlet.plan.write().expect("no panic holds it") = plan.map(Arc::new);
        // Its old endpoint may have been holding it up.
        outlet.waiting.store(false, Relaxed);
        self.wake(&outlet, 1);
    }

    pub fn remove(&self, id: SubscriptionId) {
        let outlet = self.outlets.write().expect("no panic holds it").remove(&id);
        if let Some(outlet) = outlet {
            *outlet.plan.write().expect("no panic holds it") = None;
            outlet.unpark_all();
        }
    }

    pub fn outlet(&self, id: SubscriptionId) -> Option<Arc<Outlet>> {
        self.outlets.read().expect("no panic holds it").get(&id).cloned()
    }

    fn endpoint(&self, url: &Uri) -> Arc<Endpoint> {
        let scheme = url.scheme_str().unwrap_or("http");
        let authority = url.authority().map_or("", |a| a.as_str()).to_lowercase();
        let name = format!("{scheme}://{authority}{}", url.path());
        let mut endpoints = self.endpoints.lock().expect("no panic holds it");
        if let Some(known) = endpoints.get(&name).and_then(Weak::upgrade) {
            return known;
        }
        endpoints.retain(|_, weak| weak.strong_count() > 0);
        let endpoint = Arc::new(Endpoint::new(
            name.clone(),
            self.config.in_flight_per_endpoint_max,
        ));
        endpoints.insert(name, Arc::downgrade(&endpoint));
        endpoint
    }

    /// Says that about `count` deliveries more can be claimed: starts lanes for them.
    fn wake(self: &Arc<Self>, outlet: &Arc<Outlet>, count: usize) {
        outlet.ready.fetch_add(count as i64, Relaxed);
        outlet.busy.store(true, Relaxed);
        outlet.signals.fetch_add(1, AcqRel);
        if self.stop.is_cancelled() || outlet.waiting.load(Relaxed) {
            return;
        }
        let Some(plan) = outlet.plan() else {
            return;
        };
        let mut wanted = count.div_ceil(plan.want.events_max).min(plan.endpoint.room());
        // Without a lane nobody would learn that there is room again, or that a delay is over.
        let idle = outlet.lanes.load(Acquire) <= outlet.parked.load(Acquire);
        if wanted == 0 && idle {
            wanted = 1;
        }
        for _ in 0..wanted {
            if !self.start_lane(outlet) {
                return;
            }
        }
    }

    /// Puts one more lane to work, a parked one if there is one.
    fn start_lane(self: &Arc<Self>, outlet: &Arc<Outlet>) -> bool {
        if outlet.unpark() {
            return true;
        }
        let max = self.config.in_flight_per_endpoint_max;
        let add = |lanes: usize| (lanes < max).then_some(lanes + 1);
        let added = outlet.lanes.fetch_update(AcqRel, Acquire, add).is_ok();
        if added {
            self.tasks.spawn(self.clone().lane(outlet.clone(), false));
        }
        added
    }

    /// A lane that has found work calls for another one if there is more and a place to send it.
    fn wake_sibling(self: &Arc<Self>, outlet: &Arc<Outlet>, plan: &Plan, claimed: usize) {
        let left = outlet.ready.fetch_sub(claimed as i64, Relaxed) - claimed as i64;
        if left > 0 && plan.endpoint.room() > 0 && !self.stop.is_cancelled() {
            self.start_lane(outlet);
        }
    }

    /// Claims, attempts and settles until there is nothing to claim or no place to send it.
    /// `admitted`: the endpoint has given a place already.
    async fn lane(self: Arc<Self>, outlet: Arc<Outlet>, mut admitted: bool) {
        loop {
            let signals = outlet.signals.load(Acquire);
            let Some(plan) = outlet.plan() else {
                outlet.lanes.fetch_sub(1, AcqRel);
                return;
            };
            if !std::mem::take(&mut admitted) && !self.admit(&plan, &outlet) {
                outlet.lanes.fetch_sub(1, AcqRel);
                return;
            }
            let claims = self.claim(&plan, &outlet).await;
            if claims.is_empty() {
                outlet.ready.store(0, Relaxed);
                let left = plan
                    .endpoint
                    .leave(&outlet, None, Duration::ZERO, self.clock.now());
                self.after_leaving(&plan, left);
                if self.park(&outlet, signals).await {
                    continue;
                }
                outlet.lanes.fetch_sub(1, AcqRel);
                return;
            }
            self.wake_sibling(&outlet, &plan, claims.len());
            if !self.deliver(&plan, &outlet, claims).await {
                outlet.lanes.fetch_sub(1, AcqRel);
                return;
            }
        }
    }

    /// Waits for work. False when the lane should end instead.
    async fn park(self: &Arc<Self>, outlet: &Arc<Outlet>, signals: u64) -> bool {
        outlet.parked.fetch_add(1, AcqRel);
        // Something may have come between looking and parking; or it is time to stop.
        let more = outlet.signals.load(Acquire) != signals;
        if (more || self.stop.is_cancelled()) && outlet.unpark() {
            // Whichever lane takes this wake-up goes on; it need not be this one.
        } else if !outlet.reaping.swap(true, AcqRel) {
            self.alarm(self.clock.now() + LINGER, Alarm::Parked(Arc::downgrade(outlet)));
        }
        let before = outlet.signals.load(Acquire);
        outlet.unpark.notified().await;
        if self.stop.is_cancelled() {
            return false;
        }
        // Woken without new work: it was left standing for too long.
        more || outlet.signals.load(Acquire) != before || outlet.ready.load(Relaxed) > 0
    }

    fn admit(self: &Arc<Self>, plan: &Arc<Plan>, outlet: &Arc<Outlet>) -> bool {
        match plan.endpoint.enter(outlet, self.clock.now()) {
            Admission::Go => true,
            Admission::Full => false,
            Admission::Delayed(until) => {
                self.log.rest(outlet.id);
                self.alarm(until, Alarm::Endpoint(Arc::downgrade(&plan.endpoint)));
                false
            }
        }
    }

    async fn claim(self: &Arc<Self>, plan: &Plan, outlet: &Arc<Outlet>) -> Vec<Claim> {
        if self.stop.is_cancelled() {
            return Vec::new();
        }
        let now = self.clock.now();
        match self.log.claim(outlet.id, now, plan.want).await {
            Ok(claims) => claims,
            Err(e) => {
                tracing::error!(subscription = %plan.subscription.name, error = %e, "cannot claim deliveries");
                self.alarm(now + TROUBLE_PAUSE, Alarm::Outlet(Arc::downgrade(outlet)));
                Vec::new()
            }
        }
    }

    /// Makes one attempt for the claims that are still in time, and settles all of them.
    /// False when the engine is being torn down.
    async fn deliver(self: &Arc<Self>, plan: &Arc<Plan>, outlet: &Arc<Outlet>, claims: Vec<Claim>) -> bool {
        let now = self.clock.now();
        let mut settled = Vec::with_capacity(claims.len());
        let mut in_time = claims;
        if in_time
            .iter()
            .any(|c| plan.policy.expired(c.received(), now).is_some())
        {
            let (late, timely) = in_time
                .into_iter()
                .partition(|c| plan.policy.expired(c.received(), now).is_some());
            in_time = timely;
            settled = expire(plan, late, now);
        }
        if in_time.is_empty() {
            let left = plan.endpoint.leave(outlet, None, Duration::ZERO, now);
            self.after_leaving(plan, left);
        } else {
            let Some(attempted) = self.attempt(plan, &in_time).await else {
                plan.endpoint.give_back(self.clock.now());
                self.log.release(outlet.id, in_time);
                self.settle(outlet, settled).await;
                return false;
            };
            let ended = self.clock.now();
            let left = plan
                .endpoint
                .leave(outlet, Some(attempted.outcome), ended.since(now), ended);
            self.after_leaving(plan, left);
            self.count_attempt(outlet, attempted.outcome);
            for claim in in_time {
                settled.push(self.follow_up(plan, claim, attempted, ended));
            }
        }
        self.settle(outlet, settled).await;
        true
    }

    /// One HTTP request; none if the engine gives up waiting because it is torn down.
    async fn attempt(&self, plan: &Plan, claims: &[Claim]) -> Option<Attempted> {
        let deadline = self.clock.now() + plan.profile.response_timeout;
        let request = plan.request(claims);
        tokio::select! {
            biased;
            reply = self.transport.send(request) => {
                let now = self.clock.now();
                let attempted = plan.outcome(&reply, now);
                if attempted.outcome != Outcome::Success {
                    report(plan, claims, attempted, &reply);
                }
                Some(attempted)
            }
            () = self.abort.cancelled() => None,
            () = self.clock.sleep_until(deadline) => {
                tracing::debug!(subscription = %plan.subscription.name, endpoint = %plan.endpoint.name, "no answer in time");
                Some(Attempted::TIMED_OUT)
            }
        }
    }

    fn follow_up(&self, plan: &Plan, claim: Claim, attempted: Attempted, now: Timestamp) -> Settled {
        let number = claim.attempts_made + 1;
        let chance = if attempted.outcome == Outcome::Success {
            0.0
        } else {
            self.next_chance()
        };
        let next = plan
            .policy
            .next(plan.profile, plan.kind, attempted.number(number), now, chance);
        Settled {
            claim,
            attempts_made: number,
            last_attempt: Some(LastAttempt {
                at: now,
                outcome: attempted.outcome,
                status: attempted.status,
            }),
            next,
        }
    }

    /// Uniform in 0..1, the same sequence for the same seed.
    fn next_chance(&self) -> f64 {
        // SplitMix64: small, and good enough to spread retries.
        let mut z = self.chance.fetch_add(0x9E37_79B9_7F4A_7C15, Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }

    fn count_attempt(&self, outlet: &Outlet, outcome: Outcome) {
        for counters in [&self.counters, &outlet.counters] {
            add(&counters.attempts, 1);
            if outcome != Outcome::Success {
                add(&counters.attempts_failed, 1);
            }
        }
    }

    async fn settle(&self, outlet: &Outlet, settled: Vec<Settled>) {
        if settled.is_empty() {
            return;
        }
        for counters in [&self.counters, &outlet.counters] {
            for one in &settled {
                let counter = match one.next {
                    Next::Done => &counters.delivered,
                    Next::RetryAt(_) => &counters.retried,
                    Next::DeadLetter(reason) => by_reason(&counters.dead_lettered, reason),
                    Next::Drop(reason) => by_reason(&counters.dropped, reason),
                };
                add(counter, 1);
            }
        }
        for one in &settled {
            if let Next::Drop(reason) = one.next {
                tracing::warn!(position = %one.claim.position(), attempts = one.attempts_made, %reason, "event dropped");
            }
        }
        if let Err(e) = self.log.settle(outlet.id, settled).await {
            tracing::error!(error = %e, "cannot settle; the deliveries will be offered again");
        }
    }

    fn after_leaving(self: &Arc<Self>, plan: &Arc<Plan>, left: Left) {
        if let Some(until) = left.delayed_until {
            self.alarm(until, Alarm::Endpoint(Arc::downgrade(&plan.endpoint)));
        }
        for next in left.admitted {
            let same = next
                .plan()
                .is_some_and(|p| Arc::ptr_eq(&p.endpoint, &plan.endpoint));
            if same && !self.stop.is_cancelled() {
                next.lanes.fetch_add(1, AcqRel);
                self.tasks.spawn(self.clone().lane(next, true));
            } else {
                plan.endpoint.give_back(self.clock.now());
                // It points elsewhere now: it asks there.
                self.wake(&next, 1);
            }
        }
    }

    fn alarm(&self, at: Timestamp, alarm: Alarm) {
        let number = self.alarm_number.fetch_add(1, Relaxed);
        let mut alarms = self.alarms.lock().expect("no panic holds it");
        let first = alarms.first_key_value().map(|(key, _)| key.0);
        let known = alarms
            .range((at, 0)..=(at, u64::MAX))
            .any(|(_, other)| other.same(&alarm));
        if !known {
            alarms.insert((at, number), alarm);
        }
        drop(alarms);
        if first.is_none_or(|first| at < first) {
            self.changed.notify_one();
        }
    }

    /// Wakes subscriptions when their retries come due and endpoints when their delays are over.
    async fn keep_time(self: Arc<Self>) {
        let mut looked = Timestamp::MIN;
        loop {
            let now = self.clock.now();
            for id in self.log.due(now) {
                if let Some(outlet) = self.outlet(id) {
                    self.wake(&outlet, self.config.in_flight_per_endpoint_max);
                }
            }
            for alarm in self.take_alarms(now) {
                self.ring(&alarm);
            }
            looked = looked.max(now);
            let alarm = self
                .alarms
                .lock()
                .expect("no panic holds it")
                .first_key_value()
                .map(|(key, _)| key.0);
            let next = [self.log.next_due_after(looked), alarm]
                .into_iter()
                .flatten()
                .min();
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.changed.notified() => {}
                () = self.clock.sleep_until(next.unwrap_or(Timestamp::MAX)), if next.is_some() => {}
            }
        }
    }

    fn take_alarms(&self, now: Timestamp) -> Vec<Alarm> {
        let mut alarms = self.alarms.lock().expect("no panic holds it");
        let later = alarms.split_off(&(now + Duration::from_nanos(1), 0));
        std::mem::replace(&mut *alarms, later).into_values().collect()
    }

    fn ring(self: &Arc<Self>, alarm: &Alarm) {
        match alarm {
            Alarm::Endpoint(endpoint) => {
                let waiting = endpoint.upgrade().map(|e| e.take_waiting()).unwrap_or_default();
                for outlet in waiting {
                    self.wake(&outlet, 1);
                }
            }
            Alarm::Outlet(outlet) => {
                if let Some(outlet) = outlet.upgrade() {
                    self.wake(&outlet, 1);
                }
            }
            Alarm::Parked(outlet) => {
                let Some(outlet) = outlet.upgrade() else {
                    return;
                };
                if outlet.busy.swap(false, AcqRel) {
                    self.alarm(self.clock.now() + LINGER, Alarm::Parked(Arc::downgrade(&outlet)));
                } else {
                    outlet.reaping.store(false, Release);
                    outlet.unpark_all();
                }
            }
        }
    }

    /// Claims nothing more, waits for attempts under way until `grace` is over, gives up the rest.
    pub async fn stop(&self, grace: Duration) {
        self.stop.cancel();
        self.tasks.close();
        for outlet in self.outlets.read().expect("no panic holds it").values() {
            outlet.unpark_all();
        }
        let deadline = self.clock.now() + grace;
        tokio::select! {
            biased;
            () = self.tasks.wait() => return,
            () = self.clock.sleep_until(deadline) => {}
        }
        self.abort.cancel();
        self.tasks.wait().await;
    }
}

impl Alarm {
    fn same(&self, other: &Alarm) -> bool {
        match (self, other) {
            (Alarm::Endpoint(a), Alarm::Endpoint(b)) => a.ptr_eq(b),
            (Alarm::Outlet(a), Alarm::Outlet(b)) | (Alarm::Parked(a), Alarm::Parked(b)) => a.ptr_eq(b),
            _ => false,
        }
    }
}

/// Too late to be attempted again.
fn expire(plan: &Plan, late: Vec<Claim>, now: Timestamp) -> Vec<Settled> {
    let settle = |claim: Claim| Settled {
        attempts_made: claim.attempts_made,
        last_attempt: claim.last_attempt,
        next: plan.policy.expired(claim.received(), now).unwrap_or(Next::Done),
        claim,
    };
    late.into_iter().map(settle).collect()
}

fn report(plan: &Plan, claims: &[Claim], attempted: Attempted, reply: &Reply) {
    let detail = match reply {
        Reply::Failed(failure) => failure.detail.as_str(),
        Reply::Answered(_) => "",
    };
    tracing::debug!(
        subscription = %plan.subscription.name,
        endpoint = %plan.endpoint.name,
        events = claims.len(),
        attempt = claims.first().map_or(0, |c| c.attempts_made + 1),
        outcome = %attempted.outcome,
        status = attempted.status,
        detail,
        "attempt failed"
    );
}

/// What the log tells the dispatcher.
struct Ears(Weak<Dispatcher>);

impl Listener for Ears {
    fn ready(&self, of: SubscriptionId, count: usize) {
        if let Some(dispatcher) = self.0.upgrade()
            && let Some(outlet) = dispatcher.outlet(of)
        {
            dispatcher.wake(&outlet, count);
        }
    }

    fn due_changed(&self) {
        if let Some(dispatcher) = self.0.upgrade() {
            dispatcher.changed.notify_one();
        }
    }
}
