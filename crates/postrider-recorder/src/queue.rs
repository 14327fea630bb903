//! The queue from the engine to the writer's thread: bounded, and never waited for.

use crate::writer::RecorderItem;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// The most records that wait.
pub const WAITING_MAX: usize = 1 << 16;
/// The most memory that they may hold, bodies of requests included.
pub const WAITING_BYTES_MAX: usize = 48 << 20;
/// After some work the writer waits this long for more records, so that one system call serves many
/// of them and callers need not wake the writer.
const GATHER: Duration = Duration::from_millis(10);
/// Without work the writer wakes this often, to drop segments that are too old.
const IDLE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct RecordQueueState {
    records: Vec<RecorderItem>,
    bytes: usize,
    /// Whether the writer waits to be woken.
    asleep: bool,
    /// Whether a caller wants everything written now.
    hurry: bool,
    closed: bool,
    /// The number of records ever accepted.
    pushed: u64,
    /// The number of records that have been processed.
    done: u64,
}

#[derive(Default)]
pub struct RecordQueue {
    waiting: Mutex<RecordQueueState>,
    wake: Condvar,
    written: Condvar,
    pub lost: AtomicU64,
}

/// The size of a record besides the data that it points to.
const OWN: usize = 256;

impl RecorderItem {
    fn bytes(&self) -> usize {
        OWN + match self {
            RecorderItem::Accepted(accepted) => accepted.batch.body.len() + 64 * accepted.batch.events.len(),
            RecorderItem::Attempted(attempted) => {
                let body = attempted.answer.as_ref().map_or(0, |answer| answer.body.len());
                body + 64 * attempted.runs.len()
            }
            RecorderItem::Ended(ended) => 16 * ended.events.len(),
            RecorderItem::Blob(blob) => 16 * blob.letters.len(),
            _ => 0,
        }
    }
}

impl RecordQueue {
    /// Adds a record, or counts it as lost.
    pub fn push(&self, record: RecorderItem) {
        let bytes = record.bytes();
        let mut waiting = self.waiting.lock().expect("no panic holds it");
        let full = waiting.records.len() >= WAITING_MAX || waiting.bytes + bytes > WAITING_BYTES_MAX;
        if full || waiting.closed {
            drop(waiting);
            self.lost.fetch_add(1, Relaxed);
            return;
        }
        waiting.bytes += bytes;
        waiting.pushed += 1;
        waiting.records.push(record);
        let half = waiting.records.len() == WAITING_MAX / 2;
        if waiting.asleep || half {
            waiting.asleep = false;
            waiting.hurry |= half;
            drop(waiting);
            self.wake.notify_one();
        }
    }

    /// Waits for records and moves them into `into`, which is empty. `worked` if the last round had
    /// some. False when the queue is closed and empty. May return no records, for periodic work.
    pub fn take(&self, into: &mut Vec<RecorderItem>, worked: bool) -> bool {
        let mut waiting = self.waiting.lock().expect("no panic holds it");
        if worked && !waiting.hurry && !waiting.closed {
            waiting = self.wait(waiting, GATHER);
        }
        if waiting.records.is_empty() && !waiting.closed && !waiting.hurry {
            waiting.asleep = true;
            waiting = self.wait(waiting, IDLE);
            waiting.asleep = false;
        }
        waiting.hurry = false;
        waiting.bytes = 0;
        std::mem::swap(&mut waiting.records, into);
        !(waiting.closed && into.is_empty())
    }

    fn wait<'a>(
        &self,
        waiting: std::sync::MutexGuard<'a, RecordQueueState>,
        at_most: Duration,
    ) -> std::sync::MutexGuard<'a, RecordQueueState> {
        self.wake
            .wait_timeout(waiting, at_most)
            .expect("no panic holds it")
            .0
    }

    /// Reports that this many records have been processed, successfully or not.
    pub fn done(&self, count: u64) {
        self.waiting.lock().expect("no panic holds it").done += count;
        self.written.notify_all();
    }

    /// Returns once everything that was pushed before the call has been processed, or this much
    /// time has passed.
    pub fn flush(&self, at_most: Duration) {
        let waiting = self.waiting.lock().expect("no panic holds it");
        let target = waiting.pushed;
        let behind = |waiting: &mut RecordQueueState| {
            let behind = waiting.done < target && !waiting.closed;
            if behind {
                waiting.hurry = true;
                waiting.asleep = false;
                self.wake.notify_one();
            }
            behind
        };
        drop(
            self.written
                .wait_timeout_while(waiting, at_most, behind)
                .expect("no panic holds it"),
        );
    }

    pub fn close(&self) {
        self.waiting.lock().expect("no panic holds it").closed = true;
        self.wake.notify_one();
        self.written.notify_all();
    }
}
