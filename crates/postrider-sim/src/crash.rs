//! A log that crashes at chosen points: before and after each durable step, not at random instants.

use crate::audit::Audit;
use async_trait::async_trait;
use postrider_core::event::Batch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::Timestamp;
use postrider_store::memory::MemoryLog;
use postrider_store::{Backlog, Claim, Error, EventLog, Health, Listener, Settled, Want};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use tokio::sync::Notify;

/// The log of one life of the server, between two crashes.
pub struct CrashLog {
    pub inner: MemoryLog,
    audit: Arc<Audit>,
    /// Crash at the point with this number.
    crash_at: u64,
    points: AtomicU64,
    crashed: AtomicBool,
    pub down: Notify,
    /// Settled claims since the last checkpoint; the real log writes progress in batches.
    settles: AtomicU64,
    checkpoint_every: u64,
}

impl CrashLog {
    pub fn new(inner: MemoryLog, audit: Arc<Audit>, crash_at: u64, checkpoint_every: u64) -> CrashLog {
        CrashLog {
            inner,
            audit,
            crash_at,
            points: AtomicU64::new(0),
            crashed: AtomicBool::new(false),
            down: Notify::new(),
            settles: AtomicU64::new(0),
            checkpoint_every,
        }
    }

    /// A point where the power may go. After it has gone, nothing gets through any more.
    fn point(&self) -> Result<(), Error> {
        if self.points.fetch_add(1, SeqCst) == self.crash_at {
            self.crashed.store(true, SeqCst);
            self.down.notify_one();
        }
        if self.crashed.load(SeqCst) {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    pub fn crashed(&self) -> bool {
        self.crashed.load(SeqCst)
    }
}

#[async_trait]
impl EventLog for CrashLog {
    async fn append(&self, batch: Batch) -> Result<Position, Error> {
        self.point()?;
        let position = self.inner.append(batch).await?;
        // Stored, but the publisher does not learn of it.
        self.point()?;
        Ok(position)
    }

    async fn claim(&self, of: SubscriptionId, now: Timestamp, want: Want) -> Result<Vec<Claim>, Error> {
        self.point()?;
        self.inner.claim(of, now, want).await
    }

    async fn settle(&self, of: SubscriptionId, settled: Vec<Settled>) -> Result<(), Error> {
        // The receiver has the event but the log does not know yet: a crash here delivers twice.
        self.point()?;
        self.audit.settled(of, &settled);
        self.inner.settle(of, settled).await?;
        if self
            .settles
            .fetch_add(1, SeqCst)
            .is_multiple_of(self.checkpoint_every)
        {
            self.inner.checkpoint();
            self.audit.checkpoint();
        }
        self.point()
    }

    fn release(&self, of: SubscriptionId, claims: Vec<Claim>) {
        if !self.crashed() {
            self.inner.release(of, claims);
        }
    }

    fn next_due(&self) -> Option<Timestamp> {
        self.inner.next_due()
    }

    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp> {
        self.inner.next_due_after(after)
    }

    fn due(&self, now: Timestamp) -> Vec<SubscriptionId> {
        self.inner.due(now)
    }

    async fn open_subscription(&self, of: SubscriptionId) -> Result<(), Error> {
        self.inner.open_subscription(of).await
    }

    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        self.inner.close_subscription(of).await
    }

    fn subscriptions(&self) -> Vec<SubscriptionId> {
        self.inner.subscriptions()
    }

    fn backlog(&self, of: SubscriptionId) -> Backlog {
        self.inner.backlog(of)
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn identity(&self) -> u64 {
        self.inner.identity()
    }

    fn listen(&self, listener: Arc<dyn Listener>) {
        self.inner.listen(listener);
    }

    async fn close(&self) -> Result<(), Error> {
        Ok(())
    }
}
