//! Timers of the dispatcher: the log knows when retries are due, alarms cover everything else.

use super::{Dispatcher, LINGER, SubscriptionDispatcher};
use crate::endpoint::Endpoint;
use postrider_core::time::Timestamp;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(super) enum DispatchAlarm {
    Endpoint(Weak<Endpoint>),
    Outlet(Weak<SubscriptionDispatcher>),
    /// An event of this subscription is about to expire while its endpoint is on probation.
    Expiry(Weak<SubscriptionDispatcher>),
    /// Lanes of this subscription have been parked for a while.
    Parked(Weak<SubscriptionDispatcher>),
}

impl DispatchAlarm {
    fn same(&self, other: &DispatchAlarm) -> bool {
        match (self, other) {
            (DispatchAlarm::Endpoint(a), DispatchAlarm::Endpoint(b)) => a.ptr_eq(b),
            (DispatchAlarm::Outlet(a), DispatchAlarm::Outlet(b))
            | (DispatchAlarm::Expiry(a), DispatchAlarm::Expiry(b))
            | (DispatchAlarm::Parked(a), DispatchAlarm::Parked(b)) => a.ptr_eq(b),
            _ => false,
        }
    }

    /// Whether the alarm may lead to an attempt.
    fn may_attempt(&self) -> bool {
        match self {
            DispatchAlarm::Endpoint(_) | DispatchAlarm::Outlet(_) => true,
            DispatchAlarm::Expiry(outlet) => outlet
                .upgrade()
                .is_some_and(|outlet| outlet.waiting.load(Relaxed)),
            DispatchAlarm::Parked(_) => false,
        }
    }
}

impl Dispatcher {
    pub(super) fn alarm(&self, at: Timestamp, alarm: DispatchAlarm) {
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

    /// Runs the loop that wakes subscriptions when retries come due and when delays end.
    pub(super) async fn run_timers(self: Arc<Self>) {
        loop {
            // Work that is due and still waits is held back by its endpoint, which wakes it. Due
            // times count from the clock's current value, which may have been set back since the
            // last round.
            let now = self.clock.now();
            // Until the next time is known, any announced time counts as earlier.
            self.looks_at.store(i64::MAX, Release);
            self.look(now);
            let alarm = self
                .alarms
                .lock()
                .expect("no panic holds it")
                .first_key_value()
                .map(|(key, _)| key.0);
            let next = [self.log.next_due_after(now), alarm].into_iter().flatten().min();
            let looks_at = next.unwrap_or(Timestamp::MAX);
            self.looks_at.store(looks_at.nanos(), Release);
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.changed.notified() => {}
                () = self.clock.sleep_until(looks_at), if next.is_some() => {}
            }
        }
    }

    /// Starts everything that is due by `now`.
    pub(crate) fn look(self: &Arc<Self>, now: Timestamp) {
        for id in self.log.due(now) {
            if let Some(outlet) = self.outlet(id) {
                // Only one lane begins, and a lane that finds work starts the next: otherwise very
                // many subscriptions with a single retry would each start lanes for nothing.
                outlet.lanes.announce(self.config.in_flight_per_endpoint_max);
                // Retries of very many subscriptions come due one after the other and wait for the disk together: a
                // lane that has not claimed yet starts the others when it has.
                if outlet.claiming.load(Acquire) == 0 {
                    self.start_lanes(&outlet, 1);
                }
            }
        }
        for alarm in self.take_due_alarms(now) {
            self.ring(&alarm);
        }
    }

    /// The next time after `now` at which something is due, as far as the log and the alarms know.
    pub(crate) fn next_instant(&self, now: Timestamp) -> Option<Timestamp> {
        let alarms = self.alarms.lock().expect("no panic holds it");
        let alarm = alarms
            .iter()
            .find(|(key, alarm)| key.0 > now && alarm.may_attempt());
        let alarm = alarm.map(|(key, _)| key.0);
        [self.log.next_due_after(now), alarm].into_iter().flatten().min()
    }

    /// Whether any lane does something other than wait for work or for an answer.
    pub(crate) fn is_busy(&self) -> bool {
        let busy = |outlet: &Arc<SubscriptionDispatcher>| {
            let counts = outlet.lanes.counts();
            counts.lanes > counts.parked + outlet.sending.load(Acquire)
        };
        let outlets = self.outlets.read().expect("no panic holds it");
        self.late_busy.load(Acquire) > 0 || outlets.by_id.values().any(busy)
    }

    /// A number that changes whenever something is started or ends.
    pub(crate) fn pulse(&self) -> u64 {
        let outlets = self.outlets.read().expect("no panic holds it");
        let epochs = outlets.by_id.values().map(|outlet| outlet.lanes.epoch());
        // The failure of a dead-letter store is noted like an endpoint's, and changes no other
        // counter.
        let counted = self.counters.pulse().wrapping_add(self.delays.noted());
        epochs.fold(counted, u64::wrapping_add)
    }

    pub(super) fn take_due_alarms(&self, now: Timestamp) -> Vec<DispatchAlarm> {
        let mut alarms = self.alarms.lock().expect("no panic holds it");
        let later = alarms.split_off(&(now + Duration::from_nanos(1), 0));
        std::mem::replace(&mut *alarms, later).into_values().collect()
    }

    pub(super) fn ring(self: &Arc<Self>, alarm: &DispatchAlarm) {
        match alarm {
            DispatchAlarm::Endpoint(endpoint) => {
                let waiting = endpoint.upgrade().map(|e| e.take_waiting()).unwrap_or_default();
                for outlet in waiting {
                    self.wake(&outlet, 1);
                }
            }
            DispatchAlarm::Outlet(outlet) => {
                if let Some(outlet) = outlet.upgrade() {
                    self.wake(&outlet, 1);
                }
            }
            DispatchAlarm::Expiry(outlet) => {
                if let Some(outlet) = outlet.upgrade() {
                    self.probe_before_expiry(&outlet);
                }
            }
            DispatchAlarm::Parked(outlet) => {
                let Some(outlet) = outlet.upgrade() else {
                    return;
                };
                if outlet.lanes.reap() {
                    self.alarm(
                        self.clock.now() + LINGER,
                        DispatchAlarm::Parked(Arc::downgrade(&outlet)),
                    );
                }
            }
        }
    }
}
