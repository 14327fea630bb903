//! Which of several nodes this one is.

use postrider_core::time::Timestamp;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

#[derive(Clone, Debug)]
pub struct Node {
    /// By which the others know it; none if there are no others.
    pub name: Option<Arc<str>>,
    /// Whether this is the node that does what only one may do: it ends what has expired, runs replays, and takes up
    /// what dead nodes have left.
    pub steward: watch::Receiver<bool>,
    /// Which part of the rates that webhooks allow is this node's.
    pub sharing: watch::Receiver<Sharing>,
}

/// Which of the nodes that send this one is. They take turns where a webhook allows only so many requests a minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    rank: u32,
    of: u32,
}

impl Sharing {
    /// Nobody else sends.
    pub const ALONE: Sharing = Sharing { rank: 0, of: 1 };

    /// One of `of` nodes that send; `rank` of them come before it in an order that all of them know.
    pub fn new(rank: usize, of: usize) -> Sharing {
        let of = u32::try_from(of).unwrap_or(u32::MAX).max(1);
        let rank = u32::try_from(rank).unwrap_or(u32::MAX) % of;
        Sharing { rank, of }
    }

    /// How many nodes send.
    pub fn of(self) -> u32 {
        self.of
    }

    /// Time is cut into slots that go round among the nodes: when the next one of this node begins, not before `from`.
    pub(crate) fn slot_from(self, from: Timestamp, slot: Duration) -> Timestamp {
        let slot = i64::try_from(slot.as_nanos()).unwrap_or(i64::MAX).max(1);
        let of = i64::from(self.of);
        let behind = from.nanos().rem_euclid(slot);
        let number = from.nanos().div_euclid(slot) + i64::from(behind > 0);
        let ours = number + (i64::from(self.rank) - number).rem_euclid(of);
        Timestamp::from_nanos(ours.saturating_mul(slot))
    }
}

impl Node {
    /// There is no other.
    pub fn alone() -> Node {
        let (_, steward) = watch::channel(true);
        let (_, sharing) = watch::channel(Sharing::ALONE);
        Node {
            name: None,
            steward,
            sharing,
        }
    }

    pub(crate) fn is_steward(&self) -> bool {
        *self.steward.borrow()
    }

    /// Whether something that is marked with who has done it was done by this node.
    pub(crate) fn is_me(&self, by: Option<&str>) -> bool {
        self.name.as_deref() == by
    }
}

/// Waits until this node has become the steward or is it no longer; for ever if that cannot happen.
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
            let begins = Sharing::new(rank, of).slot_from(at(from), Duration::from_secs(1));
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
        assert_eq!(Sharing::new(3, 0), Sharing::ALONE);
    }
}
