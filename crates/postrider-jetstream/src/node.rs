//! State shared by the partitions of a node.

use crate::partition::event_message::EventMessage;
use postrider_store::{LogEntry, LogListener};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Maximum number of damaged records that are described; further ones are only counted.
const CORRUPT_NAMED_MAX: usize = 20;

/// Whether this node may act for its partitions.
pub trait Lease: Send + Sync {
    /// Checked before deliveries are claimed: only time separates two nodes that send.
    fn valid(&self) -> bool;

    /// Checked before events are accepted. A node with an expired lease may accept events: if the
    /// partition belongs to another node by now, the stream refuses them. So publishing continues
    /// while no heartbeat can be stored.
    fn takes_in(&self) -> bool {
        self.valid()
    }
}

impl<F: Fn() -> bool + Send + Sync> Lease for F {
    fn valid(&self) -> bool {
        self()
    }
}

/// Limits on memory, chunks and snapshots. Tests reduce them.
#[derive(Clone, Copy, Debug)]
pub struct NodeBounds {
    /// Maximum memory for the events of all partitions; other events are read from their streams.
    pub cache_bytes: usize,
    /// A chunk ends after this many bytes or messages.
    pub chunk_bytes: u64,
    pub chunk_messages: u64,
    /// A snapshot is written when the journal has grown by more than this since the last one, or by
    /// more than the snapshot's size.
    pub snapshot_journal_bytes: u64,
    /// … or when more than this many bytes of events were written, or could be purged, or more than
    /// eight times the snapshot's size.
    pub snapshot_event_bytes: u64,
}

impl Default for NodeBounds {
    fn default() -> NodeBounds {
        NodeBounds {
            cache_bytes: 48 << 20,
            chunk_bytes: 8 << 20,
            chunk_messages: 1024,
            snapshot_journal_bytes: 4 << 20,
            snapshot_event_bytes: 32 << 20,
        }
    }
}

/// State shared by the partitions of a node and its log.
pub struct NodeShared {
    pub node: String,
    pub lease: Arc<dyn Lease>,
    pub listener: OnceLock<Arc<dyn LogListener>>,
    pub counters: PartitionCounters,
    pub bounds: NodeBounds,
    cache: Mutex<MessageCache>,
    corrupt: Mutex<Vec<String>>,
}

#[derive(Debug, Default)]
pub struct PartitionCounters {
    /// Partitions that were taken over.
    pub takeovers: AtomicU64,
    /// Partitions that another node took while this one owned them.
    pub lost: AtomicU64,
    /// Events and settlements refused because the partition belongs to another node.
    pub fenced: AtomicU64,
    /// Deliveries that may be under way at an earlier owner and are offered again.
    pub redelivered: AtomicU64,
    /// Number of times that the outcome of messages had to be looked up.
    pub recoveries: AtomicU64,
    pub snapshots: AtomicU64,
    /// Journal messages, and their bytes.
    pub journal_messages: AtomicU64,
    pub journal_bytes: AtomicU64,
    pub corrupt_records: AtomicU64,
    pub corrupt_deliveries: AtomicU64,
    /// Messages that were read back for delivery.
    pub read_back: AtomicU64,
}

impl NodeShared {
    pub fn new(node: impl Into<String>, lease: Arc<dyn Lease>) -> Arc<NodeShared> {
        NodeShared::with_bounds(node, lease, NodeBounds::default())
    }

    pub fn with_bounds(
        node: impl Into<String>,
        lease: Arc<dyn Lease>,
        bounds: NodeBounds,
    ) -> Arc<NodeShared> {
        Arc::new(NodeShared {
            node: node.into(),
            lease,
            listener: OnceLock::new(),
            counters: PartitionCounters::default(),
            bounds,
            cache: Mutex::new(MessageCache::new(bounds.cache_bytes)),
            corrupt: Mutex::new(Vec::new()),
        })
    }

    pub(crate) fn tell(&self, tell: impl FnOnce(&dyn LogListener)) {
        if let Some(listener) = self.listener.get() {
            tell(&**listener);
        }
    }

    /// Caches a message if there is room. Returns the message to use: it shares entries that are
    /// still in use elsewhere, so that there is no second copy of them.
    pub(crate) fn keep(&self, partition: u8, sequence: u64, message: Arc<EventMessage>) -> Arc<EventMessage> {
        self.cache
            .lock()
            .expect("no panic holds it")
            .keep((partition, sequence), message)
    }

    pub(crate) fn find(&self, partition: u8, sequence: u64) -> Option<Arc<EventMessage>> {
        self.cache
            .lock()
            .expect("no panic holds it")
            .find((partition, sequence))
    }

    /// Drops the events of a partition that was handed over.
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

/// Evicted messages whose entries are gone are forgotten when there are this many, and again
/// whenever the number has doubled.
const LET_GO_MIN: usize = 256;

/// Cache of messages by partition and sequence; the oldest are evicted first.
struct MessageCache {
    messages: FxHashMap<(u8, u64), Arc<EventMessage>>,
    order: VecDeque<(u8, u64)>,
    bytes: usize,
    bytes_max: usize,
    /// Evicted messages with entries that may still be in use.
    let_go: FxHashMap<(u8, u64), Vec<Weak<LogEntry>>>,
    forget_at: usize,
}

impl MessageCache {
    fn new(bytes_max: usize) -> MessageCache {
        MessageCache {
            messages: FxHashMap::default(),
            order: VecDeque::new(),
            bytes: 0,
            bytes_max,
            let_go: FxHashMap::default(),
            forget_at: 0,
        }
    }

    fn find(&self, key: (u8, u64)) -> Option<Arc<EventMessage>> {
        if let Some(message) = self.messages.get(&key) {
            return Some(message.clone());
        }
        let entries: Option<Vec<_>> = self.let_go.get(&key)?.iter().map(Weak::upgrade).collect();
        Some(Arc::new(EventMessage::of_entries(entries?)))
    }

    fn keep(&mut self, key: (u8, u64), message: Arc<EventMessage>) -> Arc<EventMessage> {
        let message = match self.let_go.remove(&key) {
            Some(let_go) => with_those_in_memory(message, &let_go),
            None => message,
        };
        self.bytes += message.bytes;
        match self.messages.insert(key, message.clone()) {
            Some(known) => self.bytes -= known.bytes,
            None => self.order.push_back(key),
        }
        while self.bytes > self.bytes_max && self.order.len() > 1 {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            if let Some(message) = self.messages.remove(&oldest) {
                self.bytes -= message.bytes;
                self.let_go(oldest, &message);
            }
        }
        message
    }

    fn let_go(&mut self, key: (u8, u64), message: &Arc<EventMessage>) {
        let entries = &message.entries;
        let in_use =
            Arc::strong_count(message) > 1 || entries.iter().any(|entry| Arc::strong_count(entry) > 1);
        if !in_use {
            return;
        }
        if self.let_go.len() >= self.forget_at.max(LET_GO_MIN) {
            let in_use = |entries: &[Weak<LogEntry>]| entries.iter().any(|entry| entry.strong_count() > 0);
            self.let_go.retain(|_, entries| in_use(entries));
            self.forget_at = self.let_go.len() * 2;
        }
        self.let_go
            .insert(key, entries.iter().map(Arc::downgrade).collect());
    }

    fn forget(&mut self, partition: u8) {
        self.order.retain(|key| key.0 != partition);
        self.let_go.retain(|key, _| key.0 != partition);
        let bytes = &mut self.bytes;
        self.messages.retain(|key, message| {
            if key.0 == partition {
                *bytes -= message.bytes;
            }
            key.0 != partition
        });
    }
}

/// The message with those of its entries that are in memory already.
fn with_those_in_memory(message: Arc<EventMessage>, let_go: &[Weak<LogEntry>]) -> Arc<EventMessage> {
    let known: Vec<Arc<LogEntry>> = let_go.iter().filter_map(Weak::upgrade).collect();
    if known.is_empty() {
        return message;
    }
    let entries = message.entries.iter().map(|entry| {
        let same = known.iter().find(|known| known.first == entry.first);
        same.unwrap_or(entry).clone()
    });
    Arc::new(EventMessage {
        entries: entries.collect(),
        bytes: message.bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_store::conformance::events;

    // Evicted entries that are still in use are read again: the cache must reuse them and count
    // them once.
    #[test]
    fn entries_that_are_let_go_while_in_use_are_not_read_twice() {
        let read = |sequence: u64| {
            let requests = vec![events(&[("a", &[1])]), events(&[("b", &[1])])];
            Arc::new(EventMessage::new(0, sequence, requests))
        };
        let mut cache = MessageCache::new(1);
        let both = cache.keep((0, 1), read(1)).entries.clone();
        cache.keep((0, 2), read(2));
        assert!(!cache.messages.contains_key(&(0, 1)));
        let found = cache.find((0, 1)).expect("both are in memory");
        assert!(Arc::ptr_eq(&found.entries[0], &both[0]) && Arc::ptr_eq(&found.entries[1], &both[1]));
        assert_eq!(found.bytes, read(1).bytes);
        drop(found);
        let [first, second] = <[_; 2]>::try_from(both).unwrap();
        drop(second);
        assert!(cache.find((0, 1)).is_none(), "one of them must be read");
        let again = cache.keep((0, 1), read(1));
        assert!(Arc::ptr_eq(&again.entries[0], &first));
        drop((again, first));
        // Entries that are not in use are forgotten.
        for sequence in 3..1000 {
            cache.keep((0, sequence), read(sequence));
        }
        assert!(cache.let_go.len() <= LET_GO_MIN, "{}", cache.let_go.len());
        cache.forget(0);
        assert!(cache.let_go.is_empty());
    }

    fn message(bytes: usize) -> Arc<EventMessage> {
        Arc::new(EventMessage {
            entries: Vec::new(),
            bytes,
        })
    }

    #[test]
    fn the_cache_stays_within_its_bound() {
        let mut cache = MessageCache::new(100);
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
