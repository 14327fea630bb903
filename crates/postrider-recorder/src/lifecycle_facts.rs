//! Facts about endpoints and subscriptions rather than single events. Few enough to be kept in
//! memory.

use crate::record::RecordFrame;
use postrider_core::ids::SubscriptionId;
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::endpoint::DelayScope;
use postrider_engine::recorder::EndpointHold;
use rustc_hash::FxHashMap;

/// The most probations of one endpoint that are kept, the latest ones.
const HOLDS_MAX: usize = 256;

#[derive(Default)]
pub struct LifecycleFacts {
    retired: FxHashMap<u64, (Timestamp, GiveUpReason)>,
    /// In chronological order.
    holds: FxHashMap<String, Vec<EndpointHold>>,
}

impl LifecycleFacts {
    /// Adds a fact. Facts are added in the order in which they happened.
    pub fn add(&mut self, frame: &RecordFrame<'_>) {
        match *frame {
            RecordFrame::Retired {
                subscription,
                at,
                reason,
            } => self.retire(subscription, at, reason),
            RecordFrame::Held {
                endpoint,
                cause,
                at,
                until,
            } => self.hold(endpoint, cause, at, until),
            RecordFrame::Released { endpoint, at } => self.release(endpoint, at),
            _ => {}
        }
    }

    pub fn retire(&mut self, subscription: u64, at: Timestamp, reason: GiveUpReason) {
        self.retired.insert(subscription, (at, reason));
    }

    pub fn hold(&mut self, endpoint: &str, cause: Outcome, at: Timestamp, until: Timestamp) {
        if !self.holds.contains_key(endpoint) {
            self.holds.insert(endpoint.to_owned(), Vec::new());
        }
        let holds = self.holds.get_mut(endpoint).expect("it was put there");
        match holds.last_mut() {
            // The probe has failed: the same hold continues.
            Some(last) if last.released.is_none() => (last.cause, last.until) = (cause, until),
            _ => holds.push(EndpointHold {
                cause,
                since: at,
                until,
                released: None,
            }),
        }
        if holds.len() > HOLDS_MAX {
            holds.remove(0);
        }
    }

    pub fn release(&mut self, endpoint: &str, at: Timestamp) {
        if let Some(last) = self.holds.get_mut(endpoint).and_then(|holds| holds.last_mut())
            && last.released.is_none()
        {
            last.released = Some(at);
        }
    }

    pub fn has_no_retirements(&self) -> bool {
        self.retired.is_empty()
    }

    pub fn retired(&self, subscription: u64) -> Option<(Timestamp, GiveUpReason)> {
        self.retired.get(&subscription).copied()
    }

    /// The holds of an endpoint, for all subscriptions or for this one, that had not ended by
    /// `from` and began by `until`.
    pub fn holds(
        &self,
        endpoint: &str,
        of: SubscriptionId,
        from: Timestamp,
        until: Timestamp,
    ) -> Vec<EndpointHold> {
        if self.holds.is_empty() {
            return Vec::new();
        }
        let own = DelayScope::Subscription(of).name(endpoint);
        let named = [endpoint, &own]
            .into_iter()
            .filter_map(|name| self.holds.get(name));
        let meets = |hold: &&EndpointHold| hold.released.is_none_or(|at| at >= from) && hold.since <= until;
        let mut met: Vec<EndpointHold> = named.flatten().filter(meets).cloned().collect();
        met.sort_by_key(|hold| hold.since);
        met
    }

    /// Forgets facts from before the oldest kept record.
    pub fn forget_before(&mut self, oldest: Timestamp) {
        self.retired.retain(|_, (at, _)| *at >= oldest);
        self.holds.retain(|_, holds| {
            holds.retain(|hold| hold.released.is_none_or(|at| at >= oldest));
            !holds.is_empty()
        });
    }
}
