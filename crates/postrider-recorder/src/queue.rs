//! The way from the engine to the writer's thread: bounded, never waited for.

use crate::writer::Record;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Records that wait.
pub const WAITING_MAX: usize = 1 << 16;
/// Memory that they hold, bodies of requests included.
pub const WAITING_BYTES_MAX: usize = 48 << 20;
/// After work the writer lets more gather for this long, so that one call to the system serves many records
/// and whoever records need not wake anybody.
const GATHER: Duration = Duration::from_millis(10);
/// Without work it looks around this often, for what has become too old.
const IDLE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Waiting {
    records: Vec<Record>,
    bytes: usize,
    /// The writer waits for someone to wake it.
    asleep: bool,
    /// Someone wants everything written now.
    hurry: bool,
    closed: bool,
    /// How many records were ever taken in.
    pushed: u64,
    /// How many of those are in the file.
    done: u64,
}

#[derive(Default)]
pub struct Queue {
    waiting: Mutex<Waiting>,
    wake: Condvar,
    written: Condvar,
    pub lost: AtomicU64,
}

/// Size of a record besides what it points to.
const OWN: usize = 256;

impl Record {
    fn bytes(&self) -> usize {
        OWN + match self {
            Record::Accepted(accepted) => accepted.batch.body.len() + 64 * accepted.batch.events.len(),
            Record::Attempted(attempted) => {
                let body = attempted.answer.as_ref().map_or(0, |answer| answer.body.len());
                body + 64 * attempted.runs.len()
            }
            Record::Ended(ended) => 16 * ended.events.len(),
            Record::Blob(blob) => 16 * blob.letters.len(),
            _ => 0,
        }
    }
}

impl Queue {
    /// Takes a record, or counts it as lost.
    pub fn push(&self, record: Record) {
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

    /// Waits for records and puts them into `into`, which is empty. `worked`: the last round had some. False when there
    /// will be no more. May come back with none, to look around.
    pub fn take(&self, into: &mut Vec<Record>, worked: bool) -> bool {
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
        waiting: std::sync::MutexGuard<'a, Waiting>,
        at_most: Duration,
    ) -> std::sync::MutexGuard<'a, Waiting> {
        self.wake
            .wait_timeout(waiting, at_most)
            .expect("no panic holds it")
            .0
    }

    /// So many records have been seen to, well or badly.
    pub fn done(&self, count: u64) {
        self.waiting.lock().expect("no panic holds it").done += count;
        self.written.notify_all();
    }

    /// Returns once everything that was pushed before the call has been seen to, or this much time has passed.
    pub fn flush(&self, at_most: Duration) {
        let waiting = self.waiting.lock().expect("no panic holds it");
        let target = waiting.pushed;
        let behind = |waiting: &mut Waiting| {
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
