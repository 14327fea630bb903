//! A log and a catalog that crash at chosen points, before and after each durable step rather than
//! at random instants; and a disk that is full for a while.

use crate::audit::{AuditedDelay, Auditor};
use crate::clock::SimClock;
use crate::receivers::{self, HOST};
use crate::workload::ACCOUNT_TOPIC;
use async_trait::async_trait;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::Timestamp;
use postrider_engine::endpoint::DelayScope;
use postrider_store::memory::MemoryLog;
use postrider_store::{
    Backlog, Catalog, CatalogChange, CatalogContent, Claim, ClaimLimits, DeadLetterKey, Error, EventLog,
    LogHealth, LogListener, PendingDeadLetter, PendingDeadLetters, Settlement,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// Settlements are durable after this long, in any case.
const DURABLE_WITHIN: Duration = Duration::from_millis(100);

/// The power supply and the disk space of one life of the server.
#[derive(Default)]
pub struct PowerSupply {
    /// The number of the point at which to crash.
    crash_at: u64,
    points: AtomicU64,
    crashed: AtomicBool,
    pub down: Notify,
    full: AtomicBool,
    has_room: Notify,
}

impl PowerSupply {
    pub fn until(crash_at: u64) -> PowerSupply {
        PowerSupply {
            crash_at,
            ..PowerSupply::default()
        }
    }

    /// A point at which the power may go. Once it has gone, every further point fails.
    pub fn point(&self) -> Result<(), Error> {
        if self.points.fetch_add(1, SeqCst) == self.crash_at {
            self.crashed.store(true, SeqCst);
            self.down.notify_one();
            self.has_room.notify_waiters();
        }
        if self.crashed() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    pub fn crashed(&self) -> bool {
        self.crashed.load(SeqCst)
    }

    pub fn full(&self) -> bool {
        self.full.load(SeqCst)
    }

    pub fn set_full(&self, full: bool) {
        self.full.store(full, SeqCst);
        self.has_room.notify_waiters();
    }

    /// Waits for disk space like the real store, which writes settlements when there is space,
    /// however long that takes.
    async fn room(&self) -> Result<(), Error> {
        while self.full() && !self.crashed() {
            self.has_room.notified().await;
        }
        self.point()
    }
}

/// The log during one life of the server, between two crashes.
pub struct CrashLog {
    pub memory: Arc<MemoryLog>,
    /// The same log, or a planted bug in front of it.
    inner: Arc<dyn EventLog>,
    power: Arc<PowerSupply>,
    audit: Arc<Auditor>,
    clock: Arc<SimClock>,
    /// The interval at which progress is written: the real log writes it in batches.
    checkpoint_every: u64,
    settles: AtomicU64,
    checkpoint_at: Mutex<Duration>,
}

impl CrashLog {
    pub fn new(
        memory: Arc<MemoryLog>,
        inner: Arc<dyn EventLog>,
        power: Arc<PowerSupply>,
        audit: Arc<Auditor>,
        clock: Arc<SimClock>,
        checkpoint_every: u64,
    ) -> CrashLog {
        CrashLog {
            memory,
            inner,
            power,
            audit,
            checkpoint_every,
            settles: AtomicU64::new(0),
            checkpoint_at: Mutex::new(clock.elapsed()),
            clock,
        }
    }

    pub fn checkpoint(&self) {
        *self.checkpoint_at.lock().expect("no panic holds it") = self.clock.elapsed();
        self.memory.checkpoint();
        self.audit.checkpoint();
    }

    /// Settlements that are old enough are durable by now.
    pub fn pass_time(&self) {
        let last = *self.checkpoint_at.lock().expect("no panic holds it");
        if self.clock.elapsed() >= last + DURABLE_WITHIN {
            self.checkpoint();
        }
    }

    fn recorded(&self) {
        let settles = self.settles.fetch_add(1, SeqCst);
        if settles.is_multiple_of(self.checkpoint_every) {
            self.checkpoint();
        }
    }
}

#[async_trait]
impl EventLog for CrashLog {
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        let announcement = (batch.topic == ACCOUNT_TOPIC).then(|| batch.body.clone());
        let powered = self.power.point();
        self.pass_time();
        let appended = if let Err(e) = powered {
            Err(e)
        } else if self.power.full() {
            Err(Error::Unavailable("the disk is full".into()))
        } else {
            self.inner.append(batch).await
        };
        if let Some(body) = announcement.filter(|_| appended.is_err()) {
            self.audit.not_announced(&body);
            self.audit.blob_trouble("a blob could not be announced");
        }
        let position = appended?;
        // Stored, but the publisher does not learn of it.
        self.power.point()?;
        Ok(position)
    }

    async fn claim(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<Claim>, Error> {
        self.power.point()?;
        let claims = self.inner.claim(of, now, want).await?;
        self.audit.claimed(&claims);
        Ok(claims)
    }

    async fn settle(&self, of: SubscriptionId, settled: Vec<Settlement>) -> Result<(), Error> {
        // The receiver has the event but the log does not know yet: a crash here delivers twice.
        self.power.room().await?;
        self.pass_time();
        self.audit.settled(of, &settled);
        self.inner.settle(of, settled).await?;
        self.recorded();
        self.power.point()
    }

    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error> {
        self.power.room().await?;
        self.pass_time();
        let ended = self.inner.withdraw(of, waiting).await?;
        self.audit.withdrawn(of, &ended);
        self.recorded();
        self.power.point()?;
        Ok(ended)
    }

    async fn flush(&self) -> Result<(), Error> {
        // After the power has gone, nothing more becomes durable.
        self.power.room().await?;
        self.inner.flush().await?;
        self.checkpoint();
        self.power.point()
    }

    fn release(&self, of: SubscriptionId, claims: Vec<Claim>) {
        if !self.power.crashed() {
            self.inner.release(of, claims);
        }
    }

    fn pending_dead_letters(&self) -> Vec<PendingDeadLetters> {
        self.inner.pending_dead_letters()
    }

    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        self.power.point()?;
        self.inner.letters(of, after, until, want).await
    }

    async fn dead_letters_done(&self, of: SubscriptionId, letters: Vec<DeadLetterKey>) -> Result<(), Error> {
        self.audit.forgetting(of, &letters);
        self.power.room().await?;
        self.inner.dead_letters_done(of, letters.clone()).await?;
        self.audit.forgotten(of, &letters);
        self.power.point()
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
        self.power.room().await?;
        self.inner.open_subscription(of).await?;
        self.power.point()
    }

    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        self.power.room().await?;
        let dropped = self.inner.close_subscription(of).await?;
        self.power.point()?;
        Ok(dropped)
    }

    fn subscriptions(&self) -> Vec<SubscriptionId> {
        self.inner.subscriptions()
    }

    fn backlog(&self, of: SubscriptionId) -> Backlog {
        self.inner.backlog(of)
    }

    fn health(&self) -> LogHealth {
        self.inner.health()
    }

    fn identity(&self) -> u64 {
        self.inner.identity()
    }

    fn listen(&self, listener: Arc<dyn LogListener>) {
        self.inner.listen(listener);
    }

    async fn close(&self) -> Result<(), Error> {
        self.checkpoint();
        Ok(())
    }
}

/// The catalog during one life of the server.
pub struct CrashCatalog {
    pub inner: Arc<dyn Catalog>,
    pub power: Arc<PowerSupply>,
    pub audit: Arc<Auditor>,
}

#[async_trait]
impl Catalog for CrashCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        self.inner.load().await
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        self.power.point()?;
        if self.power.full() {
            return Err(Error::Unavailable("the disk is full".into()));
        }
        for change in &changes {
            match change {
                // The delays of dead-letter stores are stored next to those of receivers.
                CatalogChange::PutEndpointDelay(one) if one.endpoint.starts_with(HOST) => {
                    let delay = AuditedDelay {
                        until: one.delay.until,
                        step: one.delay.step,
                    };
                    let (endpoint, scope) = DelayScope::parse(&one.endpoint);
                    self.audit.kept(receivers::number(endpoint), scope, Some(delay));
                }
                CatalogChange::DeleteEndpointDelay(endpoint) if endpoint.starts_with(HOST) => {
                    let (endpoint, scope) = DelayScope::parse(endpoint);
                    self.audit.kept(receivers::number(endpoint), scope, None);
                }
                _ => {}
            }
        }
        self.inner.commit(changes).await?;
        self.power.point()
    }

    async fn next_id(&self) -> Result<u64, Error> {
        self.power.point()?;
        self.inner.next_id().await
    }
}
