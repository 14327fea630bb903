//! The endpoints that subscriptions share, and the stored delays of those on probation.

use super::Dispatcher;
use super::time::DispatchAlarm;
use crate::Error;
use crate::attempt::DeliveryPlan;
use crate::endpoint::{self, DelayChange, DelayScope, Endpoint};
use crate::recorder::{HeldEndpoint, ReleasedEndpoint};
use http::Uri;
use postrider_core::ids::SubscriptionId;
use postrider_core::probation::EndpointDelay;
use postrider_store::Backlog;
use postrider_store::log::LastAttempt;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Unused endpoints are looked for at this number of endpoints, and whenever their number has
/// doubled.
const LOOK_AT_LEAST: usize = 64;

/// Wait before a save is retried that conflicted with another node's change, in real time.
const CONFLICT_PAUSE: Duration = Duration::from_millis(100);
/// Wait before a save is retried that failed otherwise.
const TROUBLE_PAUSE: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct EndpointRegistry {
    known: FxHashMap<String, Weak<Endpoint>>,
    /// The number of endpoints at which unused ones are next looked for.
    look_at: usize,
}

/// An endpoint and the subscriptions that send there.
#[derive(Clone, Debug)]
pub struct EndpointStatus {
    /// Scheme, host, port and path.
    pub name: String,
    /// Also delayed if every subscription is delayed by itself: nothing is sent to the endpoint
    /// then.
    pub state: endpoint::EndpointReportState,
    /// The latest request that has ended since the start.
    pub last: Option<LastAttempt>,
    /// Events that wait for their first attempt or for a retry.
    pub waiting: u64,
    pub subscriptions: Vec<SubscriptionId>,
    /// Subscriptions whose own deliveries are delayed, because the endpoint answers them with
    /// failures.
    pub held_subscriptions: BTreeMap<SubscriptionId, endpoint::EndpointReportState>,
}

impl EndpointStatus {
    fn add(
        &mut self,
        subscription: SubscriptionId,
        backlog: Backlog,
        own: Option<endpoint::EndpointReportState>,
    ) {
        self.waiting += backlog.waiting + backlog.retrying;
        self.subscriptions.push(subscription);
        self.held_subscriptions.extend(own.map(|own| (subscription, own)));
    }

    fn finish(mut self) -> EndpointStatus {
        self.subscriptions.sort();
        let all_held = self.held_subscriptions.len() == self.subscriptions.len();
        if all_held && self.state.delay.is_none() {
            let states = self.held_subscriptions.values();
            let first = states.min_by_key(|own| own.delay.map(|delay| delay.until));
            self.state = *first.expect("an endpoint is listed for a subscription");
        }
        self
    }
}

impl Dispatcher {
    /// Restores the delays that an earlier process stored. To be called before subscriptions are
    /// put.
    pub fn restore(&self, delays: Vec<EndpointDelay>) {
        self.delays.restore(delays);
    }

    /// To be called once all restored subscriptions have been put.
    pub fn restored(&self) {
        for endpoint in self.delays.take_unused_restored() {
            self.forget_delay(&endpoint);
        }
    }

    pub(super) fn endpoint(&self, url: &Uri) -> Arc<Endpoint> {
        let name = endpoint::name(url);
        let mut endpoints = self.endpoints.lock().expect("no panic holds it");
        if let Some(known) = endpoints.known.get(&name).and_then(Weak::upgrade) {
            return known;
        }
        if endpoints.known.remove(&name).is_some() {
            // The stored delay belongs to an earlier endpoint of this name.
            self.forget_delay(&name);
        }
        if endpoints.known.len() >= endpoints.look_at {
            self.forget_unused(&mut endpoints.known);
            endpoints.look_at = (endpoints.known.len() * 2).max(LOOK_AT_LEAST);
        }
        let endpoint = Arc::new(Endpoint::new(
            name.clone(),
            self.config.in_flight_per_endpoint_max,
            self.delays.take_restored(&name),
            self.delays.sharing(),
        ));
        endpoints.known.insert(name, Arc::downgrade(&endpoint));
        endpoint
    }

    /// Forgets endpoints that no subscription uses, with their delays.
    fn forget_unused(&self, known: &mut FxHashMap<String, Weak<Endpoint>>) {
        known.retain(|name, weak| {
            let used = weak.strong_count() > 0;
            if !used {
                self.forget_delay(name);
            }
            used
        });
    }

    /// Restores the stored delay of one subscription's deliveries to an endpoint.
    pub(super) fn restore_own_delay(&self, endpoint: &Endpoint, of: SubscriptionId) {
        let scope = DelayScope::Subscription(of);
        if let Some(delay) = self.delays.take_restored(&scope.name(&endpoint.name)) {
            endpoint.hold(scope, delay);
        }
    }

    /// Forgets the delay of one subscription's deliveries to an endpoint that it no longer uses.
    pub(super) fn forget_own_delay(&self, endpoint: &Endpoint, of: SubscriptionId) {
        if endpoint.forget(of) {
            self.forget_delay(&DelayScope::Subscription(of).name(&endpoint.name));
        }
    }

    fn forget_delay(&self, endpoint: &str) {
        if self.delays.note(endpoint, None) {
            self.recorder.released(ReleasedEndpoint {
                endpoint: endpoint.into(),
                at: self.clock.now(),
            });
        }
    }

    /// Drops a subscription's reference to an endpoint, and forgets the endpoint if it was the
    /// last. An attempt in flight keeps the endpoint alive; it is then forgotten later with the
    /// other unused ones.
    pub(super) fn forget_unless_used(&self, plan: Arc<DeliveryPlan>) {
        let name = plan.endpoint.name.clone();
        // The lock is held so that the endpoint cannot be taken into use between dropping the
        // reference and counting users.
        let mut endpoints = self.endpoints.lock().expect("no panic holds it");
        drop(plan);
        if endpoints
            .known
            .get(&*name)
            .is_some_and(|weak| weak.strong_count() == 0)
        {
            endpoints.known.remove(&*name);
            self.forget_delay(&name);
        }
    }

    /// Every endpoint of a subscription, by name.
    pub fn endpoints(&self) -> Vec<EndpointStatus> {
        let mut found: BTreeMap<String, EndpointStatus> = BTreeMap::new();
        for outlet in self.outlets.read().expect("no panic holds it").by_id.values() {
            let Some(plan) = outlet.plan() else {
                continue;
            };
            let backlog = self.log.backlog(outlet.id);
            let name = &plan.endpoint.name;
            let status = found.entry(name.to_string()).or_insert_with(|| EndpointStatus {
                name: name.to_string(),
                state: plan.endpoint.state(),
                last: plan.endpoint.last(),
                waiting: 0,
                subscriptions: Vec::new(),
                held_subscriptions: BTreeMap::new(),
            });
            status.add(outlet.id, backlog, plan.endpoint.own_delay_state(outlet.id));
        }
        found.into_values().map(EndpointStatus::finish).collect()
    }

    /// Ends the delays of an endpoint and of its subscriptions on an operator's request. Returns
    /// whether there was one.
    pub fn end_delays_by_operator(self: &Arc<Self>, name: &str) -> bool {
        let known = self.known_endpoint(name);
        known.is_some_and(|endpoint| self.recover(&endpoint, None))
    }

    /// Probes the endpoint of a subscription with its next delivery although the delay is not over.
    /// Returns whether there was a delay.
    pub fn probe(self: &Arc<Self>, of: SubscriptionId) -> bool {
        let Some(plan) = self.outlet(of).and_then(|outlet| outlet.plan()) else {
            return false;
        };
        let wanted = plan.endpoint.want_probe(of, self.clock.now());
        if wanted {
            tracing::info!(endpoint = %plan.endpoint.name, "endpoint is probed by hand");
            for outlet in plan.endpoint.take_waiting() {
                self.wake(&outlet, 1);
            }
        }
        wanted
    }

    fn known_endpoint(&self, name: &str) -> Option<Arc<Endpoint>> {
        let endpoints = self.endpoints.lock().expect("no panic holds it");
        endpoints.known.get(name).and_then(Weak::upgrade)
    }

    /// Ends delays because the endpoint accepted a delivery of this subscription, or (none) because
    /// an operator says so. Returns whether there was one.
    pub(super) fn recover(self: &Arc<Self>, endpoint: &Endpoint, of: Option<SubscriptionId>) -> bool {
        let ended = endpoint.recover(of);
        for change in &ended {
            self.note_delay(endpoint, *change);
        }
        if !ended.is_empty() {
            self.wake_waiting(endpoint);
        }
        !ended.is_empty()
    }

    fn wake_waiting(self: &Arc<Self>, endpoint: &Endpoint) {
        for outlet in endpoint.take_waiting() {
            self.wake(&outlet, self.config.in_flight_per_endpoint_max);
        }
    }

    pub(super) fn note_delay(&self, endpoint: &Endpoint, change: DelayChange) {
        let DelayChange { scope, delay } = change;
        match (scope, delay) {
            (DelayScope::Endpoint, Some(delay)) => tracing::warn!(
                endpoint = %endpoint.name,
                cause = %delay.cause,
                until = %delay.until,
                "endpoint keeps failing: its deliveries are delayed"
            ),
            (DelayScope::Subscription(id), Some(delay)) => {
                let plan = self.outlet(id).and_then(|outlet| outlet.plan());
                tracing::warn!(
                    endpoint = %endpoint.name,
                    subscription = plan.as_ref().map(|plan| plan.subscription.name.as_str()),
                    cause = %delay.cause,
                    until = %delay.until,
                    "endpoint keeps answering the subscription with failures: its deliveries are delayed"
                );
            }
            (_, None) => {
                tracing::info!(endpoint = %endpoint.name, "endpoint is well again: deliveries go on")
            }
        }
        let name = scope.name(&endpoint.name);
        self.delays.note(&name, delay);
        let (endpoint, at) = (name.into(), self.clock.now());
        match delay {
            Some(delay) => self.recorder.held(HeldEndpoint {
                endpoint,
                cause: delay.cause,
                at,
                until: delay.until,
            }),
            None => self.recorder.released(ReleasedEndpoint { endpoint, at }),
        }
    }

    /// Applies a delay that another node has set.
    pub(crate) fn apply_remote_delay(self: &Arc<Self>, one: EndpointDelay) {
        let delay = self.delays.apply_remote_delay_set(&one);
        let (name, scope) = DelayScope::parse(&one.endpoint);
        let endpoints = self.endpoints.lock().expect("no panic holds it");
        let known = endpoints.known.get(name).and_then(Weak::upgrade);
        let Some(endpoint) = known else {
            // The lock is held so that whoever takes the endpoint into use next finds the delay.
            self.delays.keep(one.endpoint, delay);
            return;
        };
        drop(endpoints);
        endpoint.hold(scope, delay);
        tracing::info!(
            endpoint = %endpoint.name,
            cause = %delay.cause,
            until = %one.delay.until,
            by = one.by.as_deref().unwrap_or_default(),
            "endpoint keeps failing elsewhere: its deliveries are delayed"
        );
        self.recorder.held(HeldEndpoint {
            endpoint: one.endpoint.as_str().into(),
            cause: delay.cause,
            at: self.clock.now(),
            until: one.delay.until,
        });
        self.alarm(delay.until, DispatchAlarm::Endpoint(Arc::downgrade(&endpoint)));
    }

    /// Another node has found an endpoint to be well, or an operator said so there.
    pub(crate) fn apply_remote_recovery(self: &Arc<Self>, name: &str) {
        self.delays.apply_remote_delay_end(name);
        let (endpoint, scope) = DelayScope::parse(name);
        if let Some(endpoint) = self.known_endpoint(endpoint)
            && endpoint.release(scope)
        {
            self.wake_waiting(&endpoint);
            tracing::info!(endpoint = %endpoint.name, "endpoint is well again elsewhere: deliveries go on");
            self.recorder.released(ReleasedEndpoint {
                endpoint: name.into(),
                at: self.clock.now(),
            });
        }
    }

    /// Runs the loop that saves delays as they change.
    pub(super) async fn run_delay_saver(self: Arc<Self>) {
        let mut again = None;
        loop {
            let pause = again.unwrap_or_default();
            let later = self.wall.sleep_until(self.wall.now() + pause);
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.delays.changed.notified() => {}
                () = later, if again.is_some() => {}
            }
            again = self.save_delays().await;
        }
    }

    /// Saves delays. Returns how long to wait before a retry if that failed.
    pub(super) async fn save_delays(&self) -> Option<Duration> {
        match self.delays.save().await {
            Ok(()) => None,
            // Another node has changed the same endpoints; its change is applied here in a moment.
            Err(Error::Store(postrider_store::Error::Conflict(_))) => Some(CONFLICT_PAUSE),
            Err(e) => {
                tracing::error!(error = %e, "cannot keep the delays of endpoints yet");
                Some(TROUBLE_PAUSE)
            }
        }
    }
}
