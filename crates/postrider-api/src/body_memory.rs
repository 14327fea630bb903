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
pub(crate) struct BodyShare {
    group: u64,
    weight: usize,
}

/// Weights of the groups that one body belongs to, the widest group first. Each weight is smaller than the one before:
/// a group that has all it may have leaves room to the other groups within the wider one.
const WEIGHTS: [usize; 3] = [3, 2, 1];

pub(crate) struct BodyMemory {
    bytes_max: usize,
    hashes: RandomState,
    used: Mutex<BodyMemoryUsage>,
}

#[derive(Default)]
struct BodyMemoryUsage {
    bytes: usize,
    by_group: HashMap<u64, usize>,
}

impl BodyMemoryUsage {
    /// Whether `bytes` more fit into the memory and into every share.
    fn fits(&self, bytes_max: usize, shares: &[BodyShare], bytes: usize) -> bool {
        let Some(free) = bytes_max.checked_sub(self.bytes + bytes) else {
            return false;
        };
        shares.iter().all(|share| {
            let used = self.by_group.get(&share.group).copied().unwrap_or(0);
            used + bytes <= share.weight.saturating_mul(free)
        })
    }
}

impl BodyMemory {
    pub fn new(bytes_max: usize) -> BodyMemory {
        BodyMemory {
            bytes_max,
            hashes: RandomState::new(),
            used: Mutex::default(),
        }
    }

    /// Groups that lie in each other, the widest first.
    pub fn shares(
        &self,
        wide: impl Hash,
        middle: impl Hash,
        narrow: impl Hash,
    ) -> [BodyShare; WEIGHTS.len()] {
        let groups = [
            self.hashes.hash_one((0, &wide)),
            self.hashes.hash_one((1, &wide, &middle)),
            self.hashes.hash_one((2, &wide, &middle, &narrow)),
        ];
        std::array::from_fn(|at| BodyShare {
            group: groups[at],
            weight: WEIGHTS[at],
        })
    }

    fn used(&self) -> MutexGuard<'_, BodyMemoryUsage> {
        self.used.lock().expect("no panic holds it")
    }

    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.used().bytes
    }
}

/// Memory that one body uses, given back on drop.
pub(crate) struct BodyCharge {
    room: Arc<BodyMemory>,
    shares: [BodyShare; WEIGHTS.len()],
    bytes: usize,
    /// Bytes that are not charged any more.
    free: usize,
}

impl BodyCharge {
    /// The first `free` bytes take no room: a body that is no longer is never refused.
    pub fn new(room: Arc<BodyMemory>, shares: [BodyShare; WEIGHTS.len()], free: usize) -> BodyCharge {
        BodyCharge {
            room,
            shares,
            bytes: 0,
            free,
        }
    }

    /// Charges more bytes. Returns false if they do not fit; nothing has changed then.
    ///
    /// Only bytes that have arrived are charged: announcing a body uses no memory.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let uncharged = bytes.min(self.free);
        let bytes = bytes - uncharged;
        if bytes == 0 {
            self.free -= uncharged;
            return true;
        }
        let mut used = self.room.used();
        if !used.fits(self.room.bytes_max, &self.shares, bytes) {
            return false;
        }
        self.free -= uncharged;
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

    fn charge(room: &Arc<BodyMemory>, topic: &str, key: &str, client: u32) -> BodyCharge {
        let shares = room.shares(topic, key, client);
        BodyCharge::new(room.clone(), shares, 0)
    }

    /// Grows by 100 bytes at a time until no more fits.
    fn fill(charge: &mut BodyCharge) -> usize {
        while charge.grow(100) {}
        charge.bytes
    }

    #[test]
    fn however_much_one_takes_others_find_room() {
        let room = Arc::new(BodyMemory::new(100_000));
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

    /// Clients without a credential are one key in a topic of its own: only their addresses tell them apart.
    #[test]
    fn one_address_leaves_room_to_the_others_of_its_only_key() {
        let room = Arc::new(BodyMemory::new(100_000));
        let mut hog = charge(&room, "strangers", "none", 1);
        for piece in [1000, 100, 10, 1] {
            while hog.grow(piece) {}
        }
        assert!(charge(&room, "strangers", "none", 2).grow(10_000));
    }

    #[test]
    fn a_small_body_finds_room_beside_any_number_of_hogs() {
        let room = Arc::new(BodyMemory::new(1000));
        let mut hogs: Vec<BodyCharge> = (0..20)
            .map(|client| charge(&room, "strangers", "none", client))
            .collect();
        for hog in &mut hogs {
            while hog.grow(1) {}
        }
        assert!(!charge(&room, "strangers", "none", 20).grow(1));
        let mut small = BodyCharge::new(room.clone(), room.shares("strangers", "none", 20), 100);
        assert!(small.grow(60) && small.grow(40));
        assert!(!small.grow(1));
        let used = room.bytes();
        drop(small);
        assert_eq!(room.bytes(), used);
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let room = Arc::new(BodyMemory::new(1000));
        let mut one = charge(&room, "t", "key1", 1);
        assert!(!one.grow(1001));
        assert!(!one.grow(usize::MAX / 2));
        assert!(!one.grow(501));
        assert!(one.grow(500));
        assert!(!one.grow(1));
        assert_eq!(room.bytes(), 500);
    }
}
