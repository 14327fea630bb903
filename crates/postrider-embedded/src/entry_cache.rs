//! Registry of large entries in memory, so that no entry is read from the log twice.
//!
//! An event for many subscriptions is in memory only once. Without this registry every subscription
//! that lags or retries would read its own copy.

use postrider_core::ids::Position;
use postrider_store::Entry;
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex, Weak};

/// Smaller entries are not registered: a copy costs less than the bookkeeping.
const ENTRY_BYTES_MIN: usize = 32 << 10;
/// Entries that were dropped from memory are removed once there are this many, and again whenever
/// the number has doubled.
const FORGET_AT_MIN: usize = 256;

#[derive(Default)]
pub struct EntryCache {
    inner: Mutex<CachedEntries>,
}

#[derive(Default)]
struct CachedEntries {
    by_first: FxHashMap<Position, Weak<Entry>>,
    forget_at: usize,
}

impl EntryCache {
    /// The entry whose first event has this position, if it is large and in memory.
    pub fn find(&self, first: Position) -> Option<Arc<Entry>> {
        let inner = self.inner.lock().expect("no panic while it is locked");
        inner.by_first.get(&first)?.upgrade()
    }

    /// Registers an entry that was read or written. Returns the entry to use: the first one
    /// registered.
    pub fn share(&self, entry: Arc<Entry>) -> Arc<Entry> {
        if entry.batch.body.len() < ENTRY_BYTES_MIN {
            return entry;
        }
        let mut inner = self.inner.lock().expect("no panic while it is locked");
        if let Some(known) = inner.by_first.get(&entry.first).and_then(Weak::upgrade) {
            return known;
        }
        if inner.by_first.len() >= inner.forget_at.max(FORGET_AT_MIN) {
            inner.by_first.retain(|_, entry| entry.strong_count() > 0);
            inner.forget_at = inner.by_first.len() * 2;
        }
        inner.by_first.insert(entry.first, Arc::downgrade(&entry));
        entry
    }
}
