//! Memory for the bodies of requests, divided so that no client can take all of it.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};
use std::sync::{Arc, Mutex, MutexGuard};

/// A group of bodies and its share: together they may use up to `weight` times the memory that
/// stays free.
///
/// Alone, a group of weight 3 gets three quarters of the memory; beside a group that uses as much,
/// it gets three sevenths. However much one group uses, another finds memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    group: u64,
    weight: usize,
}

/// Groups that one body belongs to.
const SHARES: usize = 3;

pub(crate) struct BodyRoom {
    bytes_max: usize,
    hashes: RandomState,
    used: Mutex<Used>,
}

#[derive(Default)]
struct Used {
    bytes: usize,
    by_group: HashMap<u64, usize>,
}

impl Used {
    /// Whether `bytes` more fit into the memory and into every share.
    fn fits(&self, bytes_max: usize, shares: &[Share], bytes: usize) -> bool {
        let Some(free) = bytes_max.checked_sub(self.bytes + bytes) else {
            return false;
        };
        shares.iter().all(|share| {
            let used = self.by_group.get(&share.group).copied().unwrap_or(0);
            used + bytes <= share.weight.saturating_mul(free)
        })
    }
}

impl BodyRoom {
    pub fn new(bytes_max: usize) -> BodyRoom {
        BodyRoom {
            bytes_max,
            hashes: RandomState::new(),
            used: Mutex::default(),
        }
    }

    /// Nested groups, the widest first, each with its weight.
    pub fn shares<A: Hash, B: Hash, C: Hash>(
        &self,
        wide: (A, usize),
        middle: (B, usize),
        narrow: (C, usize),
    ) -> [Share; SHARES] {
        let share = |group: u64, weight: usize| Share { group, weight };
        [
            share(self.hashes.hash_one((0, &wide.0)), wide.1),
            share(self.hashes.hash_one((1, &wide.0, &middle.0)), middle.1),
            share(self.hashes.hash_one((2, &wide.0, &middle.0, &narrow.0)), narrow.1),
        ]
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().expect("no panic holds it")
    }

    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.used().bytes
    }
}

/// Memory that one body uses, given back on drop.
pub(crate) struct BodyCharge {
    room: Arc<BodyRoom>,
    shares: [Share; SHARES],
    bytes: usize,
}

impl BodyCharge {
    pub fn new(room: Arc<BodyRoom>, shares: [Share; SHARES]) -> BodyCharge {
        BodyCharge {
            room,
            shares,
            bytes: 0,
        }
    }

    /// Charges more bytes. Returns false if they do not fit; nothing has changed then.
    ///
    /// Only bytes that have arrived are charged: announcing a body uses no memory.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let mut used = self.room.used();
        if !used.fits(self.room.bytes_max, &self.shares, bytes) {
            return false;
        }
        used.bytes += bytes;
        for share in &self.shares {
            *used.by_group.entry(share.group).or_default() += bytes;
        }
        self.bytes += bytes;
        true
    }
}

impl Drop for BodyCharge {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut used = self.room.used();
        used.bytes -= self.bytes;
        for share in &self.shares {
            if let Some(bytes) = used.by_group.get_mut(&share.group) {
                *bytes -= self.bytes;
                if *bytes == 0 {
                    used.by_group.remove(&share.group);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(room: &Arc<BodyRoom>, topic: &str, key: &str, client: u32) -> BodyCharge {
        let shares = room.shares((topic, 3), (key, 2), (client, 1));
        BodyCharge::new(room.clone(), shares)
    }

    /// Grows by 100 bytes at a time until no more fits.
    fn fill(charge: &mut BodyCharge) -> usize {
        while charge.grow(100) {}
        charge.bytes
    }

    #[test]
    fn however_much_one_takes_others_find_room() {
        let room = Arc::new(BodyRoom::new(100_000));
        let mut hogs: Vec<BodyCharge> = (0..200)
            .map(|client| charge(&room, "t", "key1", client))
            .collect();
        // A single client gets half of the memory, a single key two thirds.
        assert_eq!(fill(&mut hogs[0]), 50_000);
        let of_key: usize = hogs.iter_mut().map(fill).sum();
        assert!((60_000..=66_700).contains(&of_key), "{of_key}");
        // The other key of the topic, another topic, and a client that was there before still find
        // memory.
        assert!(fill(&mut charge(&room, "t", "key2", 0)) >= 5_000);
        assert!(fill(&mut charge(&room, "u", "key1", 0)) >= 10_000);
        let mut more: Vec<BodyCharge> = (0..9)
            .map(|n| charge(&room, "t", &format!("client {n}"), 7))
            .collect();
        let of_topic: usize = of_key + more.iter_mut().map(fill).sum::<usize>();
        assert!(of_topic <= 75_000, "{of_topic}");
        assert!(fill(&mut charge(&room, "u", "key1", 0)) >= 10_000);
        drop((hogs, more));
        assert_eq!(room.bytes(), 0);
        assert!(room.used().by_group.is_empty());
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let room = Arc::new(BodyRoom::new(1000));
        let mut one = charge(&room, "t", "key1", 1);
        assert!(!one.grow(1001));
        assert!(!one.grow(usize::MAX / 2));
        assert!(!one.grow(501));
        assert!(one.grow(500));
        assert!(!one.grow(1));
        assert_eq!(room.bytes(), 500);
    }
}
