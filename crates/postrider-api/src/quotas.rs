//! Limits of the number of resources. Existing resources and those of the configuration are never
//! refused: a quota refuses the next one.

use std::collections::BTreeMap;
use std::sync::Mutex;

/// The most resources of each kind. Each is `quotas.<field>` in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotas {
    /// Custom topics that the edge API does not reach.
    pub topics: usize,
    pub domains: usize,
    pub system_topics: usize,
    /// Of a topic, a domain topic, a system topic or another resource.
    pub subscriptions_per_topic: usize,
    /// Subscriptions of a domain as a whole.
    pub subscriptions_per_domain: usize,
    pub domain_topics: usize,
    /// Custom topics that the edge API reaches.
    pub edge_topics: usize,
    pub edge_subscriptions_per_topic: usize,
}

impl Quotas {
    /// Azure's documented limits. The edge API has none in Azure; its limits here are generous.
    pub const AZURE: Quotas = Quotas {
        topics: 100,
        domains: 100,
        system_topics: 1_000,
        subscriptions_per_topic: 500,
        subscriptions_per_domain: 50,
        domain_topics: 100_000,
        edge_topics: 100_000,
        edge_subscriptions_per_topic: 10_000,
    };

    /// For profiles other than the cloud's.
    pub const GENEROUS: Quotas = Quotas {
        topics: 100_000,
        domains: 10_000,
        system_topics: 10_000,
        subscriptions_per_topic: 10_000,
        subscriptions_per_domain: 10_000,
        ..Quotas::AZURE
    };
}

/// A quota that is used up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Quota limit reached. {owner} has {most} {what} already; the operator can raise {key} in the server's configuration."
)]
pub struct QuotaReached {
    pub owner: String,
    pub what: &'static str,
    pub most: usize,
    pub key: &'static str,
}

/// Resources that are being created, by the quota that they count against: concurrent requests must
/// not exceed a quota together.
#[derive(Default)]
pub struct QuotaReservations {
    making: Mutex<BTreeMap<String, usize>>,
}

/// A reservation below a quota. It is dropped when the resource has been created and is counted, or
/// when creating it has failed.
pub struct QuotaReservation<'a> {
    of: &'a QuotaReservations,
    key: String,
}

impl QuotaReservations {
    /// Reserves a slot. `counted` gives how many resources exist; `key` names the quota that they
    /// count against.
    pub fn reserve(
        &self,
        key: String,
        counted: impl FnOnce() -> usize,
        most: usize,
    ) -> Option<QuotaReservation<'_>> {
        let mut making = self.making.lock().expect("no panic holds it");
        let pending = making.get(&key).copied().unwrap_or(0);
        if counted() + pending >= most {
            return None;
        }
        making.insert(key.clone(), pending + 1);
        Some(QuotaReservation { of: self, key })
    }
}

impl Drop for QuotaReservation<'_> {
    fn drop(&mut self) {
        let mut making = self.of.making.lock().expect("no panic holds it");
        match making.get_mut(&self.key) {
            Some(pending) if *pending > 1 => *pending -= 1,
            _ => drop(making.remove(&self.key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_at_the_same_time_share_a_quota() {
        let reservations = QuotaReservations::default();
        let reserve = |key: &str, known: usize| reservations.reserve(key.to_owned(), || known, 3);
        let first = reserve("topics", 1).unwrap();
        let second = reserve("topics", 1).unwrap();
        assert!(reserve("topics", 1).is_none());
        assert!(reserve("domains", 2).is_some());
        drop(first);
        assert!(reserve("topics", 2).is_none());
        assert!(reserve("topics", 1).is_some());
        drop(second);
        assert!(reserve("topics", 3).is_none());
        assert!(reservations.making.lock().unwrap().is_empty());
    }
}
