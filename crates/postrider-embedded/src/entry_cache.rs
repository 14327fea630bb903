//! Registry of large entries in memory, so that no entry is read from the log twice.
//!
//! An event that goes to many subscriptions is in memory once however many of them have it before them:
//! without this, every subscription that lags or retries would read its own copy. Each copy of an entry names all
//! subscriptions that it matched, so that even a tiny event for 10 000 of them took 10 000 times 100 KB.

use postrider_core::ids::Position;
use postrider_store::LogEntry;
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex, Weak};

/// Smaller entries are not looked up: a copy costs less than the bookkeeping.
const ENTRY_BYTES_MIN: usize = 4 << 10;
/// Entries that are no longer in memory are forgotten when there are this many, and again whenever their
/// number has doubled.
const FORGET_AT_MIN: usize = 256;

#[derive(Default)]
pub struct EntryCache {
    inner: Mutex<CachedEntries>,
}

#[derive(Default)]
struct CachedEntries {
    by_first: FxHashMap<Position, Weak<LogEntry>>,
    forget_at: usize,
}

impl EntryCache {
    /// The entry whose first event has this position, if it is large and in memory.
    pub fn find(&self, first: Position) -> Option<Arc<LogEntry>> {
        let inner = self.inner.lock().expect("no panic while it is locked");
        inner.by_first.get(&first)?.upgrade()
    }

    /// Registers an entry that was read or written. Returns the entry to use: the first one
    /// registered.
    pub fn share(&self, entry: Arc<LogEntry>) -> Arc<LogEntry> {
        if entry.batch.memory_len() < ENTRY_BYTES_MIN {
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
