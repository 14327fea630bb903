//! What the partitions of one node have in common.

use crate::partition::group::Message;
use postrider_store::Listener;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

/// So many damaged records are told apart; the others are only counted.
const CORRUPT_NAMED_MAX: usize = 20;

/// Whether this node may act for its partitions.
pub trait Lease: Send + Sync {
    /// Asked before deliveries are claimed: nothing but time tells two nodes apart that send.
    fn valid(&self) -> bool;

    /// Asked before events are taken in. One whose lease has run out may: if the partition is another's by now, its stream
    /// refuses them. So publishing goes on while nobody can store a heartbeat.
    fn takes_in(&self) -> bool {
        self.valid()
    }
}

impl<F: Fn() -> bool + Send + Sync> Lease for F {
    fn valid(&self) -> bool {
        self()
    }
}

/// When things are written and for how long they are kept in memory. Tests make them small.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Events of all partitions together take at most this much memory; the others are read from their streams.
    pub cache_bytes: usize,
    /// A chunk ends after so many bytes or messages.
    pub chunk_bytes: u64,
    pub chunk_messages: u64,
    /// A snapshot is written when more than this was journalled since the last one, or its own size.
    pub snapshot_journal_bytes: u64,
    /// … or more than this much of events was written, or could be purged, or eight times its size.
    pub snapshot_event_bytes: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            cache_bytes: 48 << 20,
            chunk_bytes: 8 << 20,
            chunk_messages: 1024,
            snapshot_journal_bytes: 4 << 20,
            snapshot_event_bytes: 32 << 20,
        }
    }
}

/// Shared by the partitions of a node and its log.
pub struct NodeShared {
    pub node: String,
    pub lease: Arc<dyn Lease>,
    pub listener: OnceLock<Arc<dyn Listener>>,
    pub counters: Counters,
    pub bounds: Bounds,
    cache: Mutex<Cache>,
    corrupt: Mutex<Vec<String>>,
}

#[derive(Debug, Default)]
pub struct Counters {
    /// Partitions that were taken.
    pub takeovers: AtomicU64,
    /// Partitions that another node took while this one held them.
    pub lost: AtomicU64,
    /// Events and settlements that were refused because the partition is another node's.
    pub fenced: AtomicU64,
    /// Deliveries that may be under way at an earlier owner and are offered again.
    pub redelivered: AtomicU64,
    /// How often it had to be looked up what became of messages.
    pub recoveries: AtomicU64,
    pub snapshots: AtomicU64,
    /// Messages that say what became of deliveries, and their bytes.
    pub journal_messages: AtomicU64,
    pub journal_bytes: AtomicU64,
    pub corrupt_records: AtomicU64,
    pub corrupt_deliveries: AtomicU64,
    /// Messages that were read back to be delivered.
    pub read_back: AtomicU64,
}

impl NodeShared {
    pub fn new(node: impl Into<String>, lease: Arc<dyn Lease>) -> Arc<NodeShared> {
        NodeShared::with_bounds(node, lease, Bounds::default())
    }

    pub fn with_bounds(node: impl Into<String>, lease: Arc<dyn Lease>, bounds: Bounds) -> Arc<NodeShared> {
        Arc::new(NodeShared {
            node: node.into(),
            lease,
            listener: OnceLock::new(),
            counters: Counters::default(),
            bounds,
            cache: Mutex::new(Cache::new(bounds.cache_bytes)),
            corrupt: Mutex::new(Vec::new()),
        })
    }

    pub(crate) fn tell(&self, tell: impl FnOnce(&dyn Listener)) {
        if let Some(listener) = self.listener.get() {
            tell(&**listener);
        }
    }

    pub(crate) fn keep(&self, partition: u8, sequence: u64, message: Arc<Message>) {
        self.cache
            .lock()
            .expect("no panic holds it")
            .keep((partition, sequence), message);
    }

    pub(crate) fn find(&self, partition: u8, sequence: u64) -> Option<Arc<Message>> {
        self.cache
            .lock()
            .expect("no panic holds it")
            .messages
            .get(&(partition, sequence))
            .cloned()
    }

    /// Events of a partition that is given away are of no use here.
    pub(crate) fn forget(&self, partition: u8) {
        self.cache.lock().expect("no panic holds it").forget(partition);
    }

    pub(crate) fn damaged(&self, what: String, deliveries: u64) {
        tracing::error!(what, deliveries, "a stored record cannot be read");
        self.counters.corrupt_records.fetch_add(1, Relaxed);
        self.counters.corrupt_deliveries.fetch_add(deliveries, Relaxed);
        let mut corrupt = self.corrupt.lock().expect("no panic holds it");
        if corrupt.len() < CORRUPT_NAMED_MAX {
            corrupt.push(what);
        }
    }

    pub(crate) fn corrupt(&self) -> Vec<String> {
        self.corrupt.lock().expect("no panic holds it").clone()
    }
}

/// Messages by partition and sequence, the oldest out first.
struct Cache {
    messages: FxHashMap<(u8, u64), Arc<Message>>,
    order: VecDeque<(u8, u64)>,
    bytes: usize,
    bytes_max: usize,
}

impl Cache {
    fn new(bytes_max: usize) -> Cache {
        Cache {
            messages: FxHashMap::default(),
            order: VecDeque::new(),
            bytes: 0,
            bytes_max,
        }
    }

    fn keep(&mut self, key: (u8, u64), message: Arc<Message>) {
        self.bytes += message.bytes;
        match self.messages.insert(key, message) {
            Some(known) => self.bytes -= known.bytes,
            None => self.order.push_back(key),
        }
        while self.bytes > self.bytes_max && self.order.len() > 1 {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            if let Some(message) = self.messages.remove(&oldest) {
                self.bytes -= message.bytes;
            }
        }
    }

    fn forget(&mut self, partition: u8) {
        self.order.retain(|key| key.0 != partition);
        let bytes = &mut self.bytes;
        self.messages.retain(|key, message| {
            if key.0 == partition {
                *bytes -= message.bytes;
            }
            key.0 != partition
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: usize) -> Arc<Message> {
        Arc::new(Message {
            entries: Vec::new(),
            bytes,
        })
    }

    #[test]
    fn the_cache_stays_within_its_bound() {
        let mut cache = Cache::new(100);
        for sequence in 0..10 {
            cache.keep((0, sequence), message(30));
            cache.keep((0, sequence), message(30));
        }
        let mut left: Vec<u64> = cache.messages.keys().map(|key| key.1).collect();
        left.sort();
        assert_eq!((left, cache.bytes, cache.order.len()), (vec![7, 8, 9], 90, 3));
        cache.keep((1, 0), message(500));
        assert_eq!(
            (cache.messages.len(), cache.bytes),
            (1, 500),
            "a large one is there alone"
        );
        cache.keep((0, 1), message(5));
        cache.keep((2, 1), message(5));
        cache.forget(0);
        assert_eq!((cache.messages.len(), cache.bytes, cache.order.len()), (1, 5, 1));
    }
}
