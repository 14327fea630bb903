//! The identity of this node within a cluster.

use postrider_core::time::Timestamp;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

#[derive(Clone, Debug)]
pub struct NodeIdentity {
    /// The name by which other nodes know this one; none without a cluster.
    pub name: Option<Arc<str>>,
    /// Whether this node is the coordinator, which does what only one node may do: it ends what has
    /// expired, runs replays, and takes over the work of dead nodes.
    pub coordinator: watch::Receiver<bool>,
    /// This node's part of the rates that webhooks allow.
    pub sharing: watch::Receiver<SendingTurn>,
}

/// The rank of this node among the nodes that send. They take turns where a webhook limits requests
/// per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendingTurn {
    rank: u32,
    of: u32,
}

impl SendingTurn {
    /// The only node that sends.
    pub const ALONE: SendingTurn = SendingTurn { rank: 0, of: 1 };

    /// A node among `of` sending nodes, `rank` of which come before it in an order known to all.
    pub fn new(rank: usize, of: usize) -> SendingTurn {
        let of = u32::try_from(of).unwrap_or(u32::MAX).max(1);
        let rank = u32::try_from(rank).unwrap_or(u32::MAX) % of;
        SendingTurn { rank, of }
    }

    /// The number of nodes that send.
    pub fn of(self) -> u32 {
        self.of
    }

    /// Time is divided into slots that rotate among the nodes: when this node's next slot begins,
    /// not before `from`.
    pub(crate) fn slot_from(self, from: Timestamp, slot: Duration) -> Timestamp {
        let slot = i64::try_from(slot.as_nanos()).unwrap_or(i64::MAX).max(1);
        let of = i64::from(self.of);
        let behind = from.nanos().rem_euclid(slot);
        let number = from.nanos().div_euclid(slot) + i64::from(behind > 0);
        let ours = number + (i64::from(self.rank) - number).rem_euclid(of);
        Timestamp::from_nanos(ours.saturating_mul(slot))
    }
}

impl NodeIdentity {
    /// A node without a cluster.
    pub fn alone() -> NodeIdentity {
        let (_, steward) = watch::channel(true);
        let (_, sharing) = watch::channel(SendingTurn::ALONE);
        NodeIdentity {
            name: None,
            coordinator: steward,
            sharing,
        }
    }

    pub(crate) fn is_coordinator(&self) -> bool {
        *self.coordinator.borrow()
    }

    /// Whether this node is the one named in a record.
    pub(crate) fn is_this_node(&self, by: Option<&str>) -> bool {
        self.name.as_deref() == by
    }
}

/// Waits until this node becomes or ceases to be the coordinator; forever if that cannot happen.
pub(crate) async fn changed(steward: &mut watch::Receiver<bool>) {
    if steward.changed().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_one_nodes() {
        let at = |millis: i64| Timestamp::from_nanos(millis * 1_000_000);
        let check = |rank, of, from, expected| {
            let begins = SendingTurn::new(rank, of).slot_from(at(from), Duration::from_secs(1));
            assert_eq!(begins, at(expected), "node {rank} of {of} from {from}");
        };
        check(0, 1, 0, 0);
        check(0, 1, 1, 1000);
        check(0, 3, 3000, 3000);
        check(0, 3, 3001, 6000);
        check(1, 3, 3001, 4000);
        check(2, 3, 3001, 5000);
        check(2, 3, 5001, 8000);
        check(1, 2, -500, 1000);
        check(0, 2, -500, 0);
        assert_eq!(SendingTurn::new(3, 0), SendingTurn::ALONE);
    }
}
