//! The dispatcher: lanes claim deliveries that are due, fairly, within each endpoint's limits.
//!
//! A lane is a task that claims, attempts, settles, and claims again. A subscription has lanes only
//! while it has work; an idle one costs nothing.

mod endpoints;
mod lanes;
/// The lock of [`lanes`]; the model test replaces the standard library's lock with loom's.
mod lane_sync {
    pub use std::sync::Mutex;
}
mod late_answers;
pub(crate) mod metering;
mod recording;
mod failure_log;
mod splits;
mod time;

use endpoints::EndpointRegistry;
pub use endpoints::EndpointStatus;
use failure_log::FailureLogLimits;
use lanes::{LanePool, LaneStart, ParkOutcome};
pub use metering::{LABELLED_MAX, UnlabelledCounts};
use recording::{FinishedAttempt, RecordedReply, place};
use splits::BatchSplits;
use time::DispatchAlarm;

use crate::attempt::{AttemptResult, DeliveryPlan};
use crate::counters::{DeliveryCounters, PublishCounters, add, by_reason};
use crate::deliver::{
    DeliveryReply, DeliveryTransport, PendingReply, SendGuard, TransportFailure, TransportFailureKind,
};
use crate::destinations::ConfiguredDestinations;
use crate::directory::TopicEntry;
use crate::endpoint::{
    DepartureEffects, EXPIRY_PROBE_LEAD, EndedRequest, Endpoint, EndpointAdmission, ExpiryProbe, SendPass,
    SenderLimits,
};
use crate::endpoint_delays::EndpointDelays;
use crate::in_flight::{
    BUDGET_BYTES_DEFAULT, EndpointStanding, InFlightBudget, InFlightCharge, InFlightPermits,
};
use crate::late_answer_registry::LateAnswerRegistry;
use crate::meters::Meter;
use crate::recorder::EventRecorder;
use crate::replay_outcomes::ReplayOutcomes;
use crate::tasks::{TaskKind, TaskRegistry};
use crate::{Engine, Error};
use http::Uri;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::pause::SubscriptionPauses;
use postrider_core::profile::{Profile, TimeToLiveRule};
use postrider_core::retry::{GiveUpReason, NextStep, chance};
use postrider_core::subscription::{BatchDefaults, Subscription};
use postrider_core::time::{Clock, Timestamp};
use postrider_core::trace::{TraceContext, TraceIds, TraceShare};
use postrider_store::log::LastAttempt;
use postrider_store::{Backlog, Catalog, Claim, DeadLetterKey, EventLog, LogListener, Settlement};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::future::Future;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

/// How long a lane without work stays before it ends: work often comes in bursts, and waking a task
/// is cheaper than spawning one.
const LINGER: Duration = Duration::from_secs(5);
/// Wait before a subscription is tried again whose log could not be read.
const TROUBLE_PAUSE: Duration = Duration::from_secs(1);
/// The least interval between two log lines about failing claims.
const TROUBLE_SAID_EVERY: Duration = Duration::from_secs(10);
/// If nothing can be sent for longer than this, events need not stay in memory.
const REST_FROM: Duration = Duration::from_secs(5);
/// Tasks that still run this long after attempts were aborted are abandoned: they would never end.
const ABORT_PATIENCE: Duration = Duration::from_secs(5);
/// Timed-out attempts whose connections are kept for a late answer. Further ones are closed.
pub const LATE_ANSWERS_MAX: usize = 1024;

/// The default for the deliveries that may have led to an event.
pub const HOPS_MAX: u32 = 8;

/// The dispatcher's settings.
#[derive(Clone, Debug)]
pub struct Config {
    pub in_flight_per_endpoint_max: usize,
    /// Bytes that all attempts in flight may keep in memory.
    pub in_flight_bytes_max: usize,
    /// Attempts in flight at once: each takes a connection.
    pub attempts_max: usize,
    /// Timed-out attempts whose late answers are awaited, each with its connection.
    pub late_answers_max: usize,
    pub batch_defaults: BatchDefaults,
    /// Seeds the jitter of retries.
    pub seed: u64,
    /// Whether dead letters are kept for subscriptions that name no dead-letter destination.
    pub safety_net: bool,
    /// An event that more deliveries than this have led to is dropped: it is in a loop.
    pub hops_max: u32,
    pub destinations: Arc<ConfiguredDestinations>,
    /// Set if spans are exported: the share of the traces begun here that is.
    pub spans: Option<TraceShare>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            in_flight_per_endpoint_max: 64,
            in_flight_bytes_max: BUDGET_BYTES_DEFAULT,
            attempts_max: usize::MAX,
            late_answers_max: LATE_ANSWERS_MAX,
            batch_defaults: BatchDefaults::default(),
            seed: 0,
            safety_net: false,
            hops_max: HOPS_MAX,
            destinations: Arc::default(),
            spans: None,
        }
    }
}

/// The dispatch state of one subscription.
pub struct SubscriptionDispatcher {
    pub id: SubscriptionId,
    plan: RwLock<Option<Arc<DeliveryPlan>>>,
    lanes: LanePool,
    /// Whether the subscription stands in its endpoint's queue.
    pub(crate) waiting: AtomicBool,
    /// Lanes that are about to claim: each comes across all that is announced until then.
    claiming: AtomicUsize,
    /// Lanes that wait for an answer, or for the budget of bytes in flight.
    sending: AtomicUsize,
    /// Whether a lane waits for the budget of bytes in flight. Other lanes would only queue behind
    /// it.
    waits_for_memory: AtomicBool,
    /// Notified when the plan changes: what a lane waits for may have become irrelevant.
    plan_changed: Notify,
    /// When the subscription is next checked because an event may expire while the endpoint is on
    /// probation, in nanoseconds.
    expiry_alarm: AtomicI64,
    late: LateAnswerRegistry,
    splits: BatchSplits,
    /// Timed-out attempts whose answers are still awaited.
    late_listeners: AtomicUsize,
    /// Cancelled once the subscription is removed.
    closed: CancellationToken,
    /// Why the subscription was removed, once it is. Held for reading while anything but a success
    /// is settled: a settlement after the removal would be lost without being counted.
    gone: tokio::sync::RwLock<Option<GiveUpReason>>,
    pub counters: DeliveryCounters,
    pub meter: Meter,
    /// The counts of the subscription's topic.
    topic: Arc<PublishCounters>,
    /// Whether exported metrics show the subscription separately.
    pub labelled: bool,
}

impl SubscriptionDispatcher {
    pub(crate) fn new(
        id: SubscriptionId,
        topic: Arc<PublishCounters>,
        labelled: bool,
    ) -> SubscriptionDispatcher {
        SubscriptionDispatcher {
            id,
            topic,
            labelled,
            meter: Meter::default(),
            plan: RwLock::new(None),
            lanes: LanePool::new(),
            waiting: AtomicBool::new(false),
            claiming: AtomicUsize::new(0),
            sending: AtomicUsize::new(0),
            waits_for_memory: AtomicBool::new(false),
            plan_changed: Notify::new(),
            expiry_alarm: AtomicI64::new(i64::MAX),
            late: LateAnswerRegistry::default(),
            splits: BatchSplits::default(),
            late_listeners: AtomicUsize::new(0),
            closed: CancellationToken::new(),
            gone: tokio::sync::RwLock::new(None),
            counters: DeliveryCounters::default(),
        }
    }

    /// Limits that the subscription's endpoint puts on sending: rate and probation.
    pub(crate) fn sender(&self) -> SenderLimits {
        let nobody = SenderLimits {
            has_probation: false,
            rate_max: None,
        };
        self.plan().map_or(nobody, |plan| plan.sender())
    }

    /// Ends parked lanes and the wait for late answers; attempts in flight end by themselves.
    fn close(&self) {
        self.lanes.close();
        self.closed.cancel();
    }

    pub fn plan(&self) -> Option<Arc<DeliveryPlan>> {
        self.plan.read().expect("no panic holds it").clone()
    }

    /// Whether this plan is still in force.
    fn has_plan(&self, plan: &DeliveryPlan) -> bool {
        let now = self.plan.read().expect("no panic holds it");
        now.as_ref().is_some_and(|now| std::ptr::eq(&**now, plan))
    }

    /// The current pauses: new ones may have come since the lane took its plan.
    fn pauses(&self, plan: &DeliveryPlan) -> SubscriptionPauses {
        let now = self.plan.read().expect("no panic holds it");
        let subscription = now.as_ref().map_or(&plan.subscription, |now| &now.subscription);
        subscription.pauses.clone()
    }
}

/// The subscriptions that are delivered to.
#[derive(Default)]
struct SubscriptionDispatchers {
    by_id: FxHashMap<SubscriptionId, Arc<SubscriptionDispatcher>>,
    /// Removed subscriptions whose lanes or late answers may still be in progress.
    removed: Vec<Weak<SubscriptionDispatcher>>,
    /// Set once the dispatcher has stopped: lanes end, including those of subscriptions put later.
    stopped: bool,
}

pub struct Dispatcher {
    log: Arc<dyn EventLog>,
    transport: Arc<dyn DeliveryTransport>,
    clock: Arc<dyn Clock>,
    /// The machine's clock, for times that other systems compare with theirs.
    wall: Arc<dyn Clock>,
    config: Config,
    /// The catalog, if other nodes change it too.
    shared_catalog: Option<Arc<dyn Catalog>>,
    recorder: Arc<dyn EventRecorder>,
    outlets: RwLock<SubscriptionDispatchers>,
    endpoints: Mutex<EndpointRegistry>,
    /// Endpoints and subscriptions to be checked again at a point in time.
    alarms: Mutex<BTreeMap<(Timestamp, u64), DispatchAlarm>>,
    alarm_number: AtomicU64,
    changed: Notify,
    /// Notified when there may be dead letters to write.
    pub(crate) letters_changed: Notify,
    /// When due work is next looked for, in nanoseconds.
    looks_at: AtomicI64,
    /// When a failing claim was last logged, in nanoseconds.
    claim_trouble_said: AtomicI64,
    pub(crate) delays: EndpointDelays,
    reports: FailureLogLimits,
    late_room: Arc<Semaphore>,
    pub in_flight: InFlightBudget,
    /// Late answers that are being processed.
    late_busy: AtomicUsize,
    pub(crate) tasks: TaskRegistry,
    /// Cancelled to stop further claims.
    pub(crate) stop: CancellationToken,
    /// Cancelled to abort attempts in flight.
    pub(crate) abort: CancellationToken,
    pub counters: DeliveryCounters,
    pub meter: Meter,
    pub unlabelled: UnlabelledCounts,
    pub replay_outcomes: ReplayOutcomes,
    /// The engine that this dispatcher belongs to: it writes and withdraws dead letters.
    engine: OnceLock<Weak<Engine>>,
}

impl Dispatcher {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is something else, and only the engine calls it"
    )]
    pub fn new(
        log: Arc<dyn EventLog>,
        delays: EndpointDelays,
        transport: Arc<dyn DeliveryTransport>,
        clock: Arc<dyn Clock>,
        wall: Arc<dyn Clock>,
        config: Config,
        recorder: Arc<dyn EventRecorder>,
        shared_catalog: Option<Arc<dyn Catalog>>,
    ) -> Arc<Dispatcher> {
        let dispatcher = Arc::new(Dispatcher {
            delays,
            reports: FailureLogLimits::default(),
            late_room: Arc::new(Semaphore::new(config.late_answers_max.min(LATE_ANSWERS_MAX))),
            in_flight: InFlightBudget::new(config.in_flight_bytes_max, config.attempts_max),
            late_busy: AtomicUsize::new(0),
            log,
            transport,
            clock,
            wall,
            config,
            recorder,
            shared_catalog,
            outlets: RwLock::default(),
            endpoints: Mutex::default(),
            alarms: Mutex::default(),
            alarm_number: AtomicU64::new(0),
            changed: Notify::new(),
            letters_changed: Notify::new(),
            looks_at: AtomicI64::new(i64::MAX),
            claim_trouble_said: AtomicI64::new(i64::MIN),
            tasks: TaskRegistry::default(),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            counters: DeliveryCounters::default(),
            meter: Meter::of_all(),
            unlabelled: UnlabelledCounts::default(),
            replay_outcomes: ReplayOutcomes::default(),
            engine: OnceLock::new(),
        });
        dispatcher
            .log
            .listen(Arc::new(DispatcherLogListener(Arc::downgrade(&dispatcher))));
        let tasks = &dispatcher.tasks;
        tasks.spawn(TaskKind::RetryTimer, dispatcher.clone().run_timers());
        tasks.spawn(TaskKind::ProbationSaver, dispatcher.clone().run_delay_saver());
        dispatcher
    }

    /// Sets the engine that this dispatcher belongs to. To be called once, before anything is
    /// delivered.
    pub(crate) fn set_engine(&self, engine: Weak<Engine>) {
        // A second call has no effect.
        let _ = self.engine.set(engine);
    }

    /// The trace that a publish request without a trace context began, by the position of its first
    /// event. None without span export.
    pub fn publish_trace_context(&self, first: Position) -> Option<TraceContext> {
        let ids = TraceIds {
            log: self.log.identity(),
        };
        let context = ids.begin_trace(first, self.config.spans?);
        context.sampled().then_some(context)
    }

    /// The configured destinations.
    pub fn destinations(&self) -> &ConfiguredDestinations {
        &self.config.destinations
    }

    /// Adds a subscription, or applies its changes. A new one gets a lane only if work is waiting:
    /// it may be one of very many that nothing is published for.
    pub fn put(
        self: &Arc<Self>,
        subscription: Arc<Subscription>,
        topic: &TopicEntry,
        profile: &'static Profile,
    ) {
        let id = subscription.id;
        let find = |url: &Uri| self.endpoint(url);
        let plan = DeliveryPlan::new(
            subscription,
            topic,
            profile,
            self.config.batch_defaults,
            self.config.safety_net,
            self.log.identity(),
            &self.config.destinations,
            find,
        );
        let (outlet, known) = {
            let mut outlets = self.outlets.write().expect("no panic holds it");
            let stopped = outlets.stopped;
            match outlets.by_id.entry(id) {
                Occupied(known) => (known.get().clone(), true),
                Vacant(free) => {
                    let outlet =
                        SubscriptionDispatcher::new(id, topic.published.clone(), self.unlabelled.label());
                    if stopped {
                        outlet.lanes.close();
                    }
                    (free.insert(Arc::new(outlet)).clone(), false)
                }
            }
        };
        let plan = Arc::new(plan);
        let paused = plan.is_paused();
        self.restore_own_delay(&plan.endpoint, id);
        let endpoint = plan.endpoint.clone();
        let before = outlet.plan.write().expect("no panic holds it").replace(plan);
        let resumed = before.as_ref().is_some_and(|before| before.is_paused()) && !paused;
        if let Some(before) = before {
            if !Arc::ptr_eq(&before.endpoint, &endpoint) {
                self.forget_own_delay(&before.endpoint, id);
            }
            self.forget_unless_used(before);
        }
        // The subscription may have been waiting for its old endpoint.
        outlet.waiting.store(false, Relaxed);
        outlet.plan_changed.notify_waiters();
        if paused {
            // A paused backlog need not stay in memory.
            self.log.release_memory(id);
            outlet.lanes.end_parked();
            return;
        }
        // Read after the plan is set: any work that arrives later wakes a lane by itself.
        let waits = |backlog: Backlog| backlog.waiting + backlog.retrying > 0;
        if resumed {
            self.wake(&outlet, self.config.in_flight_per_endpoint_max);
        } else if known || waits(self.log.backlog(id)) {
            self.wake(&outlet, 1);
        }
    }

    /// Looks for work for a subscription that was put.
    pub(crate) fn begin(self: &Arc<Self>, id: SubscriptionId) {
        if let Some(outlet) = self.outlet(id) {
            self.wake(&outlet, 1);
        }
    }

    /// Removes a subscription. Attempts in flight end, but nothing follows from them.
    pub async fn remove(&self, id: SubscriptionId, reason: GiveUpReason) {
        let outlet = self.outlets.write().expect("no panic holds it").remove(id);
        if let Some(outlet) = outlet {
            *outlet.gone.write().await = Some(reason);
            self.replay_outcomes.subscription_gone(id);
            self.unlabelled.gone(&outlet);
            let before = outlet.plan.write().expect("no panic holds it").take();
            outlet.close();
            if let Some(before) = before {
                self.forget_own_delay(&before.endpoint, id);
                self.forget_unless_used(before);
            }
        }
    }

    pub fn outlet(&self, id: SubscriptionId) -> Option<Arc<SubscriptionDispatcher>> {
        let outlets = self.outlets.read().expect("no panic holds it");
        outlets.by_id.get(&id).cloned()
    }

    /// Tasks still running for removed subscriptions: attempts whose answer is awaited, or tasks
    /// that should have ended.
    pub fn orphaned_tasks(&self) -> usize {
        let outlets = self.outlets.read().expect("no panic holds it");
        let removed = outlets.removed.iter().filter_map(Weak::upgrade);
        removed
            .map(|outlet| outlet.lanes.counts().lanes + outlet.late_listeners.load(Acquire))
            .sum()
    }

    /// Lanes under way, of all subscriptions; some of them may be parked.
    pub fn lanes(&self) -> usize {
        self.tasks.running(TaskKind::DeliveryLane)
    }

    /// Announces that about `count` more deliveries can be claimed, and starts lanes for them.
    fn wake(self: &Arc<Self>, outlet: &Arc<SubscriptionDispatcher>, count: usize) {
        outlet.lanes.announce(count);
        self.start_lanes(outlet, count);
    }

    /// Starts as many lanes as `count` deliveries need and the endpoint admits.
    fn start_lanes(self: &Arc<Self>, outlet: &Arc<SubscriptionDispatcher>, count: usize) {
        let waits = outlet.waiting.load(Relaxed) || outlet.waits_for_memory.load(Acquire);
        if self.stop.is_cancelled() || waits {
            return;
        }
        let Some(plan) = outlet.plan().filter(|plan| !plan.is_paused()) else {
            return;
        };
        let mut wanted = count.div_ceil(plan.want.events_max).min(plan.endpoint.room());
        // At least one lane must learn that the endpoint admits again, or that a delay is over.
        if wanted == 0 && outlet.lanes.is_idle() {
            wanted = 1;
        }
        for _ in 0..wanted {
            if !self.start_lane(outlet) {
                return;
            }
        }
    }

    /// Puts one more lane to work. Returns whether a lane was available.
    fn start_lane(self: &Arc<Self>, outlet: &Arc<SubscriptionDispatcher>) -> bool {
        match outlet.lanes.start_lane(self.config.in_flight_per_endpoint_max) {
            LaneStart::Woken => true,
            LaneStart::Refused => false,
            LaneStart::Spawn => {
                self.spawn_lane(outlet.clone(), None);
                true
            }
        }
    }

    fn spawn_lane(
        self: &Arc<Self>,
        outlet: Arc<SubscriptionDispatcher>,
        admitted: Option<(Arc<Endpoint>, SendPass)>,
    ) {
        let claiming = ClaimingLane::of(&outlet);
        let lane = self.clone().lane(outlet, claiming, admitted);
        self.tasks.spawn(TaskKind::DeliveryLane, lane);
    }

    /// A lane that has found work starts another one if there is more and the endpoint admits it.
    fn wake_sibling(
        self: &Arc<Self>,
        outlet: &Arc<SubscriptionDispatcher>,
        plan: &DeliveryPlan,
        claimed: usize,
    ) {
        let more = outlet.lanes.claimed(claimed);
        if more && plan.endpoint.room() > 0 && !self.stop.is_cancelled() {
            self.start_lane(outlet);
        }
    }

    /// Claims, attempts and settles until nothing can be claimed or sent. `admitted` is a pass that
    /// an endpoint has already granted.
    async fn lane(
        self: Arc<Self>,
        outlet: Arc<SubscriptionDispatcher>,
        claiming: ClaimingLane,
        mut admitted: Option<(Arc<Endpoint>, SendPass)>,
    ) {
        let mut claiming = Some(claiming);
        loop {
            let claiming = claiming.take().unwrap_or_else(|| ClaimingLane::of(&outlet));
            let epoch = outlet.lanes.epoch();
            // Boxed, because a parked lane has none, and very many lanes are parked after very many retries.
            let step = Box::pin(self.lane_step(&outlet, claiming, admitted.take()));
            match step.await {
                LaneStep::Settled => {}
                LaneStep::NothingInTime(endpoint, pass) => admitted = Some((endpoint, pass)),
                LaneStep::NothingToClaim => {
                    if self.park(&outlet, epoch).await == ParkOutcome::End {
                        return;
                    }
                }
                LaneStep::MayNotSend => {
                    if outlet.lanes.end_lane(epoch) {
                        self.start_lanes(&outlet, 0);
                    }
                    return;
                }
            }
        }
    }

    async fn lane_step(
        self: &Arc<Self>,
        outlet: &Arc<SubscriptionDispatcher>,
        claiming: ClaimingLane,
        admitted: Option<(Arc<Endpoint>, SendPass)>,
    ) -> LaneStep {
        let plan = outlet.plan();
        let kept =
            admitted.and_then(|(endpoint, pass)| self.keep_place(outlet, plan.as_deref(), endpoint, pass));
        let Some(plan) = plan else {
            return LaneStep::MayNotSend;
        };
        if plan.is_paused() {
            if let Some(pass) = kept {
                self.leave_unsent(&plan, outlet, pass);
            }
            return LaneStep::MayNotSend;
        }
        let Some(pass) = kept.or_else(|| self.admit(&plan, outlet)) else {
            return LaneStep::MayNotSend;
        };
        let (claims, charge) = match self.claim_within_budget(&plan, outlet, pass.standing).await {
            ClaimOutcome::Claimed(claims, charge) => (claims, charge),
            ClaimOutcome::Nothing => {
                outlet.lanes.found_nothing();
                self.leave_unsent(&plan, outlet, pass);
                return LaneStep::NothingToClaim;
            }
            ClaimOutcome::AnotherLaneWaits => {
                self.leave_unsent(&plan, outlet, pass);
                return LaneStep::MayNotSend;
            }
            // The next step uses the plan then in force, if there is one.
            ClaimOutcome::PlanChanged => {
                self.leave_unsent(&plan, outlet, pass);
                return LaneStep::Settled;
            }
        };
        // The subscription may have been paused or changed during the await above: nothing may be
        // sent to an old endpoint.
        let now = outlet.plan();
        if !now.as_ref().is_some_and(|now| Arc::ptr_eq(now, &plan)) {
            self.log.release(outlet.id, claims);
            self.leave_unsent(&plan, outlet, pass);
            return match now.is_some_and(|now| !now.is_paused()) {
                true => LaneStep::Settled,
                false => LaneStep::MayNotSend,
            };
        }
        // Before a sibling is woken: what is announced from now on starts a lane by itself.
        drop(claiming);
        self.wake_sibling(outlet, &plan, claims.len());
        // Boxed, because it is large and paid for by the charge: very many lanes may wait for their claims.
        match Box::pin(self.deliver(&plan, outlet, pass, claims, charge)).await {
            DeliveryRound::Settled => LaneStep::Settled,
            DeliveryRound::NothingInTime(pass) => LaneStep::NothingInTime(plan.endpoint.clone(), pass),
            DeliveryRound::TornDown => LaneStep::MayNotSend,
        }
    }

    fn leave_unsent(
        self: &Arc<Self>,
        plan: &DeliveryPlan,
        outlet: &Arc<SubscriptionDispatcher>,
        pass: SendPass,
    ) {
        let left = plan.endpoint.leave(outlet, pass, None, self.clock.now());
        self.after_leaving(&plan.endpoint, left);
    }

    async fn park(self: &Arc<Self>, outlet: &Arc<SubscriptionDispatcher>, epoch: u64) -> ParkOutcome {
        let (parked, schedule_reap) = outlet.lanes.park(epoch);
        if schedule_reap {
            self.alarm(
                self.clock.now() + LINGER,
                DispatchAlarm::Parked(Arc::downgrade(outlet)),
            );
        }
        parked.await
    }

    fn admit(
        self: &Arc<Self>,
        plan: &Arc<DeliveryPlan>,
        outlet: &Arc<SubscriptionDispatcher>,
    ) -> Option<SendPass> {
        match plan.endpoint.enter(outlet, plan.sender(), self.clock.now()) {
            EndpointAdmission::Go(pass) => Some(pass),
            EndpointAdmission::Full => None,
            EndpointAdmission::ProbeUnderWay => {
                // The probe in flight may fail, and prolong the delay.
                self.alarm_before_expiry(plan, outlet, None);
                None
            }
            EndpointAdmission::Delayed(until) => {
                self.alarm_before_expiry(plan, outlet, None);
                // A subscription limited only by its rate continues soon enough to keep its events
                // in memory.
                if until.since(self.clock.now()) > REST_FROM {
                    self.log.release_memory(outlet.id);
                }
                self.alarm(until, DispatchAlarm::Endpoint(Arc::downgrade(&plan.endpoint)));
                None
            }
        }
    }

    /// When the oldest waiting event of a subscription expires; without a waiting event, when a new
    /// one would.
    fn next_expiry(&self, plan: &DeliveryPlan, outlet: &SubscriptionDispatcher, now: Timestamp) -> Timestamp {
        let oldest = self.log.backlog(outlet.id).oldest;
        let received = oldest.map_or(now, |oldest| outlet.pauses(plan).effective(oldest, now));
        received + plan.policy.time_to_live
    }

    /// Schedules a check of a delayed subscription just before its next event expires, not earlier
    /// than `earliest`.
    fn alarm_before_expiry(
        &self,
        plan: &DeliveryPlan,
        outlet: &Arc<SubscriptionDispatcher>,
        earliest: Option<Timestamp>,
    ) {
        if !plan.sender().has_probation {
            return;
        }
        let now = self.clock.now();
        let expires = self.next_expiry(plan, outlet, now);
        let at = (expires - EXPIRY_PROBE_LEAD).max(earliest.unwrap_or(now));
        // A single alarm is enough: it reads later changes when it goes off.
        let is_sooner = |known: i64| (at.nanos() < known || known < now.nanos()).then_some(at.nanos());
        if outlet
            .expiry_alarm
            .fetch_update(AcqRel, Acquire, is_sooner)
            .is_ok()
        {
            self.alarm(at, DispatchAlarm::Expiry(Arc::downgrade(outlet)));
        }
    }

    /// Probes an endpoint on probation with an event that would expire before the delay is over.
    fn probe_before_expiry(self: &Arc<Self>, outlet: &Arc<SubscriptionDispatcher>) {
        outlet.expiry_alarm.store(i64::MAX, Release);
        if self.stop.is_cancelled() || !outlet.waiting.load(Relaxed) {
            return;
        }
        let Some(plan) = outlet.plan().filter(|plan| !plan.is_paused()) else {
            return;
        };
        let Some(rules) = plan.profile.probation.as_ref() else {
            return;
        };
        let now = self.clock.now();
        let expires = self.next_expiry(&plan, outlet, now);
        if now < expires - EXPIRY_PROBE_LEAD {
            self.alarm_before_expiry(&plan, outlet, None);
            return;
        }
        let endpoint = &plan.endpoint;
        match endpoint.enter_before_expiry(outlet, plan.sender(), rules, expires, now) {
            ExpiryProbe::Go(pass) => {
                outlet.lanes.add_lane();
                self.spawn_lane(outlet.clone(), Some((endpoint.clone(), pass)));
            }
            ExpiryProbe::Later(at) => self.alarm_before_expiry(&plan, outlet, Some(at)),
            ExpiryProbe::NotNeeded => {}
        }
    }

    async fn claim(
        self: &Arc<Self>,
        plan: &DeliveryPlan,
        outlet: &Arc<SubscriptionDispatcher>,
    ) -> Vec<Claim> {
        if self.stop.is_cancelled() {
            return Vec::new();
        }
        let now = self.clock.now();
        let mut want = plan.want;
        if let Some(max) = outlet.splits.claim_max() {
            want.events_max = want.events_max.min(max);
        }
        match self.log.claim(outlet.id, now, want).await {
            // The stop came during the await above. Other lanes have released claims since, which
            // may be among these: sending them would deliver twice.
            Ok(claims) if self.stop.is_cancelled() => {
                self.log.release(outlet.id, claims);
                Vec::new()
            }
            Ok(mut claims) => {
                let together = outlet.splits.together(claims.iter().map(Claim::position));
                let others = claims.split_off(together);
                if !others.is_empty() {
                    self.log.release(outlet.id, others);
                }
                claims
            }
            Err(e) => {
                // Every lane of every subscription runs into the same failure: log it rarely.
                let said = self.claim_trouble_said.load(Relaxed);
                let say = now.nanos().saturating_sub(said) >= TROUBLE_SAID_EVERY.as_nanos() as i64;
                if say && self.claim_trouble_said.swap(now.nanos(), Relaxed) == said {
                    tracing::error!(subscription = %plan.subscription.name, error = %e, "cannot claim deliveries");
                }
                self.alarm(now + TROUBLE_PAUSE, DispatchAlarm::Outlet(Arc::downgrade(outlet)));
                Vec::new()
            }
        }
    }

    /// Claims events that may be attempted together, as soon as the budget of bytes in flight
    /// admits them.
    async fn claim_within_budget(
        self: &Arc<Self>,
        plan: &DeliveryPlan,
        outlet: &Arc<SubscriptionDispatcher>,
        standing: EndpointStanding,
    ) -> ClaimOutcome {
        let mut permits = InFlightPermits::default();
        loop {
            let claims = self.claim(plan, outlet).await;
            if claims.is_empty() {
                return ClaimOutcome::Nothing;
            }
            let need = plan.in_flight_need(&claims);
            let usage = &plan.endpoint.in_flight;
            let shortage = match self.in_flight.try_charge(standing, usage, &need, permits) {
                Ok(charge) => return ClaimOutcome::Claimed(claims, Arc::new(charge)),
                Err(shortage) => shortage,
            };
            // A lane that waits for memory must not hold any.
            self.log.release(outlet.id, claims);
            self.log.release_memory(outlet.id);
            if outlet.waits_for_memory.swap(true, AcqRel) {
                return ClaimOutcome::AnotherLaneWaits;
            }
            let waiting = async {
                let replanned = outlet.plan_changed.notified();
                tokio::pin!(replanned);
                replanned.as_mut().enable();
                if !outlet.has_plan(plan) {
                    return BudgetWait::Replanned;
                }
                let _resting = WaitingLaneGuard::begin(&outlet.sending);
                tokio::select! {
                    biased;
                    () = self.stop.cancelled() => BudgetWait::Over,
                    () = outlet.closed.cancelled() => BudgetWait::Over,
                    () = replanned => BudgetWait::Replanned,
                    permits = self.in_flight.wait(shortage) => BudgetWait::Room(permits),
                }
            };
            let waited = waiting.await;
            outlet.waits_for_memory.store(false, Release);
            permits = match waited {
                BudgetWait::Room(permits) => permits,
                BudgetWait::Over => return ClaimOutcome::Nothing,
                BudgetWait::Replanned => return ClaimOutcome::PlanChanged,
            };
        }
    }

    /// Makes one attempt for the claims that have not expired, and settles all of them.
    async fn deliver(
        self: &Arc<Self>,
        plan: &Arc<DeliveryPlan>,
        outlet: &Arc<SubscriptionDispatcher>,
        pass: SendPass,
        claims: Vec<Claim>,
        charge: Arc<InFlightCharge>,
    ) -> DeliveryRound {
        let now = self.clock.now();
        let pauses = outlet.pauses(plan);
        let expired = |c: &Claim| {
            let received = pauses.effective(c.received(), now);
            c.entry.batch.hops > self.config.hops_max || plan.policy.expired(received, now).is_some()
        };
        let (mut settled, claims) = if outlet.late.is_empty() && !claims.iter().any(expired) {
            (Vec::with_capacity(claims.len()), claims)
        } else {
            set_aside(plan, outlet, &pauses, claims, self.config.hops_max, now)
        };
        if claims.is_empty() {
            if pass.before_expiry {
                // Events that have not expired come after these in the log.
                self.settle(outlet, settled, None).await;
                return DeliveryRound::NothingInTime(pass);
            }
            self.leave_unsent(plan, outlet, pass);
            self.settle(outlet, settled, None).await;
            return DeliveryRound::Settled;
        }
        let traced = plan.traced(&claims, self.config.spans);
        let transport = self.transport.clone();
        let guard = self.guard(plan, outlet);
        let mut sending: PendingReply = plan.send(transport, &claims, &charge, &traced, &guard, &*self.wall);
        let (attempted, heard) = match self.wait(plan, outlet, &mut sending, &guard, now).await {
            AnswerWait::Answered(attempted, heard) => (attempted, heard),
            AnswerWait::TimedOut => (AttemptResult::TIMED_OUT, RecordedReply::default()),
            AnswerWait::Withdrawn => {
                self.leave_unsent(plan, outlet, pass);
                self.log.release(outlet.id, claims);
                self.settle(outlet, settled, None).await;
                return DeliveryRound::Settled;
            }
            AnswerWait::TornDown => {
                plan.endpoint.return_pass(outlet.id, pass, self.clock.now());
                self.log.release(outlet.id, claims);
                self.settle(outlet, settled, None).await;
                return DeliveryRound::TornDown;
            }
        };
        let ended_at = self.clock.now();
        let failed: Vec<Position> = match attempted.outcome {
            Outcome::Success => Vec::new(),
            _ => claims.iter().map(Claim::position).collect(),
        };
        let ended = EndedRequest {
            outcome: attempted.outcome,
            status: attempted.status,
            took: ended_at.since(now),
            of: outlet.id,
            events: &failed,
            rules: plan.profile.probation.as_ref(),
        };
        let left = plan.endpoint.leave(outlet, pass, Some(ended), ended_at);
        self.after_leaving(&plan.endpoint, left);
        self.count_attempt(outlet, attempted.outcome);
        let pauses = outlet.pauses(plan);
        let sent = FinishedAttempt {
            plan,
            pauses: &pauses,
            begun: now,
            ended: ended_at,
            attempted,
            heard,
            span: traced.span,
            from: settled.len(),
        };
        let Some((claims, sent)) = self.send_in_halves(outlet, claims, sent).await else {
            self.settle(outlet, settled, None).await;
            return DeliveryRound::Settled;
        };
        for claim in claims {
            settled.push(self.follow_up(plan, outlet, &pauses, claim, attempted, ended_at));
        }
        let listening = if attempted == AttemptResult::TIMED_OUT {
            // A request that was not fully sent gets no answer, and other attempts wait for its
            // memory.
            let unsent = Arc::strong_count(&charge) > 1;
            match unsent && self.in_flight.is_short() {
                true => None,
                false => self.listen(plan, outlet, sending, now, &settled),
            }
        } else {
            None
        };
        self.settle(outlet, settled, Some(sent)).await;
        if let Some(listening) = listening {
            self.tasks
                .spawn(TaskKind::LateAnswer, self.clone().await_late_answer(listening));
        }
        DeliveryRound::Settled
    }

    /// Keeps an attempt from being sent if this node has lost its lease meanwhile, or the subscription is another. Where
    /// there is no other node, nothing can change without the lanes knowing.
    fn guard(&self, plan: &Arc<DeliveryPlan>, outlet: &Arc<SubscriptionDispatcher>) -> SendGuard {
        let Some(catalog) = self.shared_catalog.clone() else {
            return SendGuard::default();
        };
        let (plan, outlet) = (plan.clone(), outlet.clone());
        SendGuard::new(move || catalog.is_current() && outlet.has_plan(&plan))
    }

    /// Waits for the answer as long as the profile allows.
    async fn wait(
        &self,
        plan: &DeliveryPlan,
        outlet: &SubscriptionDispatcher,
        sending: &mut PendingReply,
        guard: &SendGuard,
        sent: Timestamp,
    ) -> AnswerWait {
        let answered = |reply: DeliveryReply| {
            let attempted = plan.outcome(&reply, self.clock.now());
            let heard = match self.recorder.on() {
                true => RecordedReply::of(reply),
                false => RecordedReply::unrecorded(reply),
            };
            AnswerWait::Answered(attempted, heard)
        };
        let mut deadline = self.clock.sleep_until(sent + plan.response_wait);
        let resting = WaitingLaneGuard::begin(&outlet.sending);
        let waited = tokio::select! {
            biased;
            reply = sending => match reply {
                DeliveryReply::Failed(failure) if failure.kind == TransportFailureKind::Withdrawn => AnswerWait::Withdrawn,
                reply => answered(reply),
            },
            () = self.abort.cancelled() => AnswerWait::TornDown,
            // Nothing has reached the endpoint: the silence is the proxy's.
            () = &mut deadline => match guard.give_up_tunnel() {
                true => answered(DeliveryReply::Failed(TransportFailure {
                    kind: TransportFailureKind::Proxy,
                    detail: "the proxy opened no tunnel in time".to_owned(),
                })),
                false => AnswerWait::TimedOut,
            },
        };
        drop(resting);
        // Dropped only now: whoever moves a test clock must see this lane either asleep or at work.
        drop(deadline);
        waited
    }

    fn follow_up(
        &self,
        plan: &DeliveryPlan,
        outlet: &SubscriptionDispatcher,
        pauses: &SubscriptionPauses,
        claim: Claim,
        attempted: AttemptResult,
        now: Timestamp,
    ) -> Settlement {
        let number = claim.attempts_made + 1;
        let position = claim.position();
        let chance = if attempted.outcome == Outcome::Success {
            0.0
        } else {
            chance(self.config.seed, outlet.id.0, position.0, number)
        };
        let attempt = attempted.number(number);
        let received = pauses.effective(claim.received(), now);
        let profile = match pauses.is_paused() {
            // How long the pause lasts is unknown: the time to live is checked when the retry is
            // due.
            true => &Profile {
                time_to_live_rule: TimeToLiveRule::WhenDue,
                ..*plan.profile
            },
            false => plan.profile,
        };
        let mut next = plan
            .policy
            .next(profile, plan.kind, attempt, received, now, chance);
        if !outlet.late.is_empty() {
            // An earlier attempt may have been answered with success while this one was in flight.
            if next != NextStep::Done && outlet.late.take_answered(position) {
                next = NextStep::Done;
                for counters in [&self.counters, &outlet.counters] {
                    add(&counters.delivered_late, 1);
                }
            } else {
                outlet.late.decided(position, next);
            }
        }
        Settlement {
            claim,
            at: now,
            attempts_made: number,
            last_attempt: Some(LastAttempt {
                at: now,
                outcome: attempted.outcome,
                status: attempted.status,
            }),
            next,
        }
    }

    /// Releases the events of a request that was too large as a whole, to be sent again in halves.
    /// The halves continue the same attempt: no event loses an attempt, nor time, because of its
    /// neighbours. Returns the arguments if the request was not refused for its size.
    async fn send_in_halves<'a>(
        self: &Arc<Self>,
        outlet: &Arc<SubscriptionDispatcher>,
        claims: Vec<Claim>,
        sent: FinishedAttempt<'a>,
    ) -> Option<(Vec<Claim>, FinishedAttempt<'a>)> {
        let attempted = &sent.attempted;
        let refused = attempted.outcome != Outcome::Success;
        if !refused || !sent.plan.profile.splits(attempted.status, claims.len()) {
            return Some((claims, sent));
        }
        // Held until they are released: a settlement after the removal would be lost without being
        // counted.
        let gone = outlet.gone.read().await;
        if gone.is_some() {
            drop(gone);
            return Some((claims, sent));
        }
        self.meter_split(outlet, &sent);
        self.report_split(outlet, claims.len(), &sent);
        let events: Vec<Position> = claims.iter().map(Claim::position).collect();
        if self.recorder.on() {
            self.note_split(&claims, &sent);
        }
        outlet.splits.split(&events);
        self.log.release(outlet.id, claims);
        outlet.lanes.announce(events.len());
        None
    }

    fn count_attempt(&self, outlet: &SubscriptionDispatcher, outcome: Outcome) {
        for counters in [&self.counters, &outlet.counters] {
            add(&counters.attempts, 1);
            if outcome != Outcome::Success {
                add(&counters.attempts_failed, 1);
            }
        }
    }

    /// Settles deliveries. `sent` is the attempt that some of them were part of.
    async fn settle(
        self: &Arc<Self>,
        outlet: &Arc<SubscriptionDispatcher>,
        mut settled: Vec<Settlement>,
        sent: Option<FinishedAttempt<'_>>,
    ) {
        if settled.is_empty() {
            return;
        }
        outlet
            .splits
            .forget(settled.iter().map(|one| one.claim.position()));
        let mut gone = None;
        if settled.iter().any(|one| one.next != NextStep::Done) {
            let reason = outlet.gone.read().await;
            if let Some(reason) = *reason {
                for one in settled.iter_mut().filter(|one| one.next != NextStep::Done) {
                    one.next = NextStep::Drop(reason);
                }
            }
            gone = Some(reason);
        }
        for counters in [&self.counters, &outlet.counters] {
            for one in &settled {
                let counter = match one.next {
                    NextStep::Done => &counters.delivered,
                    NextStep::RetryAt(_) => &counters.retried,
                    NextStep::DeadLetter(reason) => by_reason(&counters.given_up, reason),
                    NextStep::Drop(reason) => by_reason(&counters.dropped, reason),
                };
                add(counter, 1);
            }
        }
        self.meter_settled(outlet, &settled, sent.as_ref());
        self.replay_outcomes.settled(outlet.id, &settled);
        let failed = |sent: &FinishedAttempt<'_>| sent.attempted.outcome != Outcome::Success;
        if gone.is_some() || sent.as_ref().is_some_and(failed) {
            self.report(outlet, &settled, sent.as_ref());
        }
        if self.recorder.on() {
            // Before the log is told: what follows from the settlement must be recorded after it.
            self.note(outlet.id, &settled, sent);
        }
        let retry = |one: &Settlement| match one.next {
            NextStep::RetryAt(due) => Some(due),
            _ => None,
        };
        let soonest = settled.iter().filter_map(retry).min();
        let letters: Vec<DeadLetterKey> = match outlet.late.is_empty() {
            true => Vec::new(),
            false => settled.iter().filter_map(Settlement::dead_letter_key).collect(),
        };
        if let Err(e) = self.log.settle(outlet.id, settled).await {
            tracing::error!(error = %e, "cannot settle; the deliveries will be offered again");
        }
        drop(gone);
        if !letters.is_empty() {
            self.letters_settled(outlet, &letters);
        }
        // The log reports when the earliest retry of all changes, which these retries need not be:
        // an earlier one may be held back, or the clock may have been set back.
        if let Some(due) = soonest
            && due.nanos() < self.looks_at.load(Acquire)
        {
            self.alarm(due, DispatchAlarm::Outlet(Arc::downgrade(outlet)));
        }
    }

    /// Keeps the pass that an endpoint granted to a subscription, or passes it on to the next in
    /// the queue if the subscription has another endpoint by now.
    fn keep_place(
        self: &Arc<Self>,
        outlet: &Arc<SubscriptionDispatcher>,
        plan: Option<&DeliveryPlan>,
        endpoint: Arc<Endpoint>,
        pass: SendPass,
    ) -> Option<SendPass> {
        if plan.is_some_and(|plan| Arc::ptr_eq(&plan.endpoint, &endpoint)) {
            return Some(pass);
        }
        let left = endpoint.leave(outlet, pass, None, self.clock.now());
        self.after_leaving(&endpoint, left);
        None
    }

    fn after_leaving(self: &Arc<Self>, endpoint: &Arc<Endpoint>, left: DepartureEffects) {
        for change in left.changed {
            self.note_delay(endpoint, change);
            if let Some(delay) = change.delay {
                self.alarm(delay.until, DispatchAlarm::Endpoint(Arc::downgrade(endpoint)));
            }
        }
        if let Some(at) = left.again {
            self.alarm(at, DispatchAlarm::Endpoint(Arc::downgrade(endpoint)));
        }
        for (next, pass) in left.admitted {
            let plan = next.plan();
            let kept = match self.stop.is_cancelled() {
                true => {
                    endpoint.return_pass(next.id, pass, self.clock.now());
                    None
                }
                false => self.keep_place(&next, plan.as_deref(), endpoint.clone(), pass),
            };
            match kept {
                Some(pass) => {
                    next.lanes.add_lane();
                    self.spawn_lane(next, Some((endpoint.clone(), pass)));
                }
                // The subscription has another endpoint by now, and has to ask there.
                None => self.wake(&next, 1),
            }
        }
    }

    /// Makes everything durable that has happened so far.
    pub async fn flush(&self) -> Result<(), Error> {
        self.delays.save().await?;
        Ok(self.log.flush().await?)
    }

    /// Stops claiming, waits for attempts in flight until `patience` is over, and aborts the rest.
    /// Fails with the names of tasks that have not ended [`ABORT_PATIENCE`] after that.
    pub async fn stop(&self, patience: impl Future<Output = ()>) -> Result<(), Error> {
        self.stop.cancel();
        self.tasks.close();
        {
            let mut outlets = self.outlets.write().expect("no panic holds it");
            outlets.stopped = true;
            for outlet in outlets.by_id.values() {
                outlet.lanes.close();
            }
        }
        tokio::select! {
            biased;
            () = self.tasks.wait() => {}
            () = patience => {
                self.abort.cancel();
                tokio::select! {
                    biased;
                    () = self.tasks.wait() => {}
                    () = self.wall.sleep_until(self.wall.now() + ABORT_PATIENCE) => {
                        return Err(Error::TasksLeft(self.tasks.describe_running()));
                    }
                }
            }
        }
        let _too_late_to_try_again = self.save_delays().await;
        Ok(())
    }
}

/// Counts a lane as about to claim.
struct ClaimingLane(Arc<SubscriptionDispatcher>);

impl ClaimingLane {
    fn of(outlet: &Arc<SubscriptionDispatcher>) -> ClaimingLane {
        outlet.claiming.fetch_add(1, AcqRel);
        ClaimingLane(outlet.clone())
    }
}

impl Drop for ClaimingLane {
    fn drop(&mut self) {
        self.0.claiming.fetch_sub(1, AcqRel);
    }
}

/// Counts a lane as waiting, for the test clock.
struct WaitingLaneGuard<'a>(&'a AtomicUsize);

impl<'a> WaitingLaneGuard<'a> {
    fn begin(count: &'a AtomicUsize) -> WaitingLaneGuard<'a> {
        count.fetch_add(1, AcqRel);
        WaitingLaneGuard(count)
    }
}

impl Drop for WaitingLaneGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

enum ClaimOutcome {
    Claimed(Vec<Claim>, Arc<InFlightCharge>),
    /// No delivery can be claimed, or the dispatcher is stopping.
    Nothing,
    /// Another lane of the subscription already waits for the budget.
    AnotherLaneWaits,
    /// The subscription was changed in the meantime.
    PlanChanged,
}

/// How a wait for the budget of bytes in flight ended.
enum BudgetWait {
    Room(InFlightPermits),
    /// The subscription was changed: it may have another endpoint now, or none.
    Replanned,
    /// The subscription is gone, or the server is stopping.
    Over,
}

/// The result of one round of a lane.
enum LaneStep {
    /// Deliveries were claimed and settled; there may be more.
    Settled,
    NothingToClaim,
    /// All claimed events had expired. The pass is kept for events that have not.
    NothingInTime(Arc<Endpoint>, SendPass),
    /// The subscription is gone or paused, its endpoint admits no request, or the engine is
    /// stopping.
    MayNotSend,
}

/// The result of delivering claims.
enum DeliveryRound {
    Settled,
    /// All events had expired, and the pass is to be used for others: see [`SendPass::before_expiry`].
    NothingInTime(SendPass),
    /// The engine is being torn down.
    TornDown,
}

impl SubscriptionDispatchers {
    fn remove(&mut self, id: SubscriptionId) -> Option<Arc<SubscriptionDispatcher>> {
        let outlet = self.by_id.remove(&id)?;
        if self.removed.len() == self.removed.capacity() {
            self.removed.retain(|removed| removed.strong_count() > 0);
        }
        self.removed.push(Arc::downgrade(&outlet));
        Some(outlet)
    }
}

/// How the wait for an answer ended.
enum AnswerWait {
    Answered(AttemptResult, RecordedReply),
    TimedOut,
    /// Nothing was sent: the conditions under which the attempt began no longer hold.
    Withdrawn,
    TornDown,
}

/// Separates the claims that must not be attempted: expired, looping, or delivered by an attempt
/// whose answer came late. Returns their settlements, and the remaining claims.
fn set_aside(
    plan: &DeliveryPlan,
    outlet: &SubscriptionDispatcher,
    pauses: &SubscriptionPauses,
    claims: Vec<Claim>,
    hops_max: u32,
    now: Timestamp,
) -> (Vec<Settlement>, Vec<Claim>) {
    let mut settled = Vec::new();
    let mut timely = Vec::with_capacity(claims.len());
    for claim in claims {
        let position = claim.position();
        let next = if outlet.late.take_answered(position) {
            Some(NextStep::Done)
        } else if claim.entry.batch.hops > hops_max {
            // A dead letter of the event would only re-enter the loop.
            Some(NextStep::Drop(GiveUpReason::TooManyHops))
        } else {
            plan.policy.expired(pauses.effective(claim.received(), now), now)
        };
        let Some(next) = next else {
            timely.push(claim);
            continue;
        };
        outlet.late.decided(position, next);
        settled.push(Settlement {
            at: now,
            attempts_made: claim.attempts_made,
            last_attempt: claim.last_attempt,
            next,
            claim,
        });
    }
    (settled, timely)
}

/// The dispatcher's listener for events from the log.
struct DispatcherLogListener(Weak<Dispatcher>);

impl LogListener for DispatcherLogListener {
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

    fn dead_letters_added(&self) {
        if let Some(dispatcher) = self.0.upgrade() {
            dispatcher.letters_changed.notify_one();
        }
    }
}
