//! Stores in memory: for tests, for the simulation, and as a readable model of the contracts.

use crate::log::LastAttempt;
use crate::moving::{DeliveryStage, ExportedRequest, LogExport, MovableLog, OpenDelivery};
use crate::replica::{CatalogReplica, CatalogState};
use crate::{
    Archive, Backlog, BlobFilter, BlobId, BlobRecord, Catalog, CatalogChange, CatalogContent,
    CatalogFollower, Claim, ClaimLimits, DeadLetterKey, DeadLetterMark, Error, EventLog, LogEntry, LogHealth,
    LogListener, PendingDeadLetter, PendingDeadLetters, ReplayJob, Settlement,
};
use async_trait::async_trait;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use tokio::sync::Notify;

/// An event log in memory.
///
/// Like a real log, it distinguishes durable state from the rest: [`MemoryLog::crash`] keeps only
/// what is durable. Appends and removed dead letters are durable at once, settlements and
/// withdrawals with the next [`MemoryLog::checkpoint`].
#[derive(Default)]
pub struct MemoryLog {
    log: Mutex<MemoryLogState>,
    listener: OnceLock<Arc<dyn LogListener>>,
}

#[derive(Default)]
struct MemoryLogState {
    identity: u64,
    next: u64,
    subscriptions: BTreeMap<SubscriptionId, MemoryDeliveries>,
    letters: BTreeMap<SubscriptionId, BTreeMap<DeadLetterKey, PendingDeadLetter>>,
    /// State, before the change, of deliveries settled or withdrawn since the last checkpoint; a
    /// crash restores it.
    not_durable: BTreeMap<(SubscriptionId, Position), MemoryDelivery>,
    refusing: Option<String>,
    fail_next_append: bool,
    closed: bool,
    redelivered: u64,
}

/// Open deliveries of one subscription. A delivery is in exactly one of the three maps.
#[derive(Clone, Default)]
struct MemoryDeliveries {
    waiting: BTreeMap<Position, MemoryDelivery>,
    claimed: BTreeMap<Position, MemoryDelivery>,
    retrying: BTreeMap<(Timestamp, Position), MemoryDelivery>,
}

#[derive(Clone)]
struct MemoryDelivery {
    entry: Arc<LogEntry>,
    index: u32,
    attempts_made: u32,
    last_attempt: Option<LastAttempt>,
    due: Option<Timestamp>,
}

impl MemoryDelivery {
    fn position(&self) -> Position {
        Position(self.entry.first.0 + u64::from(self.index))
    }

    fn size(&self) -> usize {
        self.entry.batch.object(self.index as usize).len()
    }

    fn claim(&self) -> Claim {
        Claim {
            entry: self.entry.clone(),
            index: self.index,
            attempts_made: self.attempts_made,
            last_attempt: self.last_attempt,
            due: self.due,
        }
    }
}

impl MemoryDeliveries {
    /// Queues a delivery for its due time or for its first attempt.
    fn put(&mut self, delivery: MemoryDelivery) {
        match delivery.due {
            Some(due) => self.retrying.insert((due, delivery.position()), delivery),
            None => self.waiting.insert(delivery.position(), delivery),
        };
    }

    /// The delivery that is offered next.
    fn next(&self, now: Timestamp) -> Option<&MemoryDelivery> {
        let retry = self.retrying.values().next();
        let due = retry.filter(|retry| retry.due.is_some_and(|due| due <= now));
        due.or_else(|| self.waiting.values().next())
    }

    fn take(&mut self, delivery: &MemoryDelivery) {
        match delivery.due {
            Some(due) => self.retrying.remove(&(due, delivery.position())),
            None => self.waiting.remove(&delivery.position()),
        };
    }

    /// Ends a claim; returns `None` if the claim is not held.
    fn end_claim(&mut self, claim: &Claim) -> Option<MemoryDelivery> {
        let position = claim.position();
        let held = self.claimed.get(&position)?;
        if held.due != claim.due || held.attempts_made != claim.attempts_made {
            return None;
        }
        self.claimed.remove(&position)
    }
}

impl MemoryLog {
    pub fn new(identity: u64) -> MemoryLog {
        let log = MemoryLog::default();
        log.lock().identity = identity;
        log
    }

    fn lock(&self) -> MutexGuard<'_, MemoryLogState> {
        self.log.lock().expect("no panic holds it")
    }

    /// Makes everything settled or withdrawn so far durable.
    pub fn checkpoint(&self) {
        self.lock().not_durable.clear();
    }

    /// Simulates a power loss: returns the log that a restart finds. From now on this log answers
    /// only `Closed`.
    pub fn crash(&self) -> MemoryLog {
        let mut old = self.lock();
        old.closed = true;
        let mut subscriptions = std::mem::take(&mut old.subscriptions);
        let not_durable = std::mem::take(&mut old.not_durable);
        let mut letters = std::mem::take(&mut old.letters);
        let mut redelivered = 0;
        for (of, letters) in &mut letters {
            letters.retain(|(_, position), _| !not_durable.contains_key(&(*of, *position)));
        }
        letters.retain(|_, letters| !letters.is_empty());
        for ((of, position), before) in not_durable {
            if let Some(deliveries) = subscriptions.get_mut(&of) {
                deliveries.waiting.remove(&position);
                deliveries.claimed.remove(&position);
                deliveries.retrying.retain(|(_, p), _| *p != position);
                deliveries.put(before);
                redelivered += 1;
            }
        }
        for deliveries in subscriptions.values_mut() {
            redelivered += deliveries.claimed.len() as u64;
            for delivery in std::mem::take(&mut deliveries.claimed).into_values() {
                deliveries.put(delivery);
            }
        }
        MemoryLog {
            log: Mutex::new(MemoryLogState {
                identity: old.identity,
                next: old.next,
                subscriptions,
                letters,
                redelivered,
                ..MemoryLogState::default()
            }),
            listener: OnceLock::new(),
        }
    }

    /// Makes every append fail with this reason; `None` ends that.
    pub fn refuse_appends(&self, reason: Option<&str>) {
        self.lock().refusing = reason.map(Into::into);
    }

    /// Makes the next append store its events and report a failure.
    pub fn fail_next_append(&self) {
        self.lock().fail_next_append = true;
    }

    fn tell(&self, tell: impl FnOnce(&dyn LogListener)) {
        if let Some(listener) = self.listener.get() {
            tell(&**listener);
        }
    }
}

#[async_trait]
impl EventLog for MemoryLog {
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        let mut ready: BTreeMap<SubscriptionId, usize> = BTreeMap::new();
        let (first, failed) = {
            let mut log = self.lock();
            if log.closed {
                return Err(Error::Closed);
            }
            if let Some(reason) = &log.refusing {
                return Err(Error::Unavailable(reason.clone()));
            }
            let first = Position(log.next);
            log.next += batch.events.len() as u64;
            let entry = Arc::new(LogEntry {
                batch,
                first,
                place: first.0,
            });
            for index in 0..entry.batch.events.len() {
                for of in entry.batch.matched(index) {
                    if let Some(deliveries) = log.subscriptions.get_mut(of) {
                        *ready.entry(*of).or_default() += 1;
                        deliveries.put(MemoryDelivery {
                            entry: entry.clone(),
                            index: index as u32,
                            attempts_made: 0,
                            last_attempt: None,
                            due: None,
                        });
                    }
                }
            }
            (first, std::mem::take(&mut log.fail_next_append))
        };
        for (of, count) in ready {
            self.tell(|listener| listener.ready(of, count));
        }
        if failed {
            return Err(Error::Unavailable("the flush failed".into()));
        }
        Ok(first)
    }

    async fn claim(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<Claim>, Error> {
        let mut log = self.lock();
        if log.closed {
            return Err(Error::Closed);
        }
        let Some(deliveries) = log.subscriptions.get_mut(&of) else {
            return Ok(Vec::new());
        };
        let mut claims = Vec::new();
        let mut bytes = 0;
        while claims.len() < want.events_max {
            let Some(delivery) = deliveries.next(now).cloned() else {
                break;
            };
            bytes += delivery.size() + want.overhead;
            if !claims.is_empty() && bytes > want.bytes_max {
                break;
            }
            deliveries.take(&delivery);
            claims.push(delivery.claim());
            deliveries.claimed.insert(delivery.position(), delivery);
        }
        Ok(claims)
    }

    async fn settle(&self, of: SubscriptionId, settled: Vec<Settlement>) -> Result<(), Error> {
        let earliest = self.next_due();
        let mut letters_added = false;
        {
            let mut log = self.lock();
            if log.closed {
                return Err(Error::Closed);
            }
            let MemoryLogState {
                subscriptions,
                letters,
                not_durable,
                ..
            } = &mut *log;
            let Some(deliveries) = subscriptions.get_mut(&of) else {
                return Ok(());
            };
            for one in settled {
                let Some(before) = deliveries.end_claim(&one.claim) else {
                    continue;
                };
                let key = (of, before.position());
                match one.next {
                    NextStep::RetryAt(due) => deliveries.put(MemoryDelivery {
                        attempts_made: one.attempts_made,
                        last_attempt: one.last_attempt,
                        due: Some(due),
                        ..before.clone()
                    }),
                    NextStep::DeadLetter(reason) => {
                        let letter = PendingDeadLetter {
                            entry: before.entry.clone(),
                            index: before.index,
                            attempts_made: one.attempts_made,
                            last_attempt: one.last_attempt,
                            reason,
                            decided: one.dead_letter_since(),
                        };
                        letters.entry(of).or_default().insert(letter.key(), letter);
                        letters_added = true;
                    }
                    NextStep::Done | NextStep::Drop(_) => {}
                }
                not_durable.entry(key).or_insert(before);
            }
        }
        if self.next_due() != earliest {
            self.tell(|listener| listener.due_changed());
        }
        if letters_added {
            self.tell(|listener| listener.dead_letters_added());
        }
        Ok(())
    }

    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error> {
        let earliest = self.next_due();
        let mut ended = Vec::new();
        {
            let mut log = self.lock();
            if log.closed {
                return Err(Error::Closed);
            }
            let MemoryLogState {
                subscriptions,
                not_durable,
                ..
            } = &mut *log;
            let Some(deliveries) = subscriptions.get_mut(&of) else {
                return Ok(ended);
            };
            for key in waiting {
                if let Some(before) = deliveries.retrying.remove(&key) {
                    not_durable.entry((of, key.1)).or_insert(before);
                    ended.push(key.1);
                }
            }
        }
        if self.next_due() != earliest {
            self.tell(|listener| listener.due_changed());
        }
        Ok(ended)
    }

    async fn flush(&self) -> Result<(), Error> {
        if self.lock().closed {
            return Err(Error::Closed);
        }
        self.checkpoint();
        Ok(())
    }

    fn release(&self, of: SubscriptionId, claims: Vec<Claim>) {
        if let Some(deliveries) = self.lock().subscriptions.get_mut(&of) {
            for claim in claims {
                if let Some(delivery) = deliveries.end_claim(&claim) {
                    deliveries.put(delivery);
                }
            }
        }
    }

    fn pending_dead_letters(&self) -> Vec<PendingDeadLetters> {
        let log = self.lock();
        let waiting = log.letters.iter().filter_map(|(of, letters)| {
            let ((oldest, _), _) = letters.first_key_value()?;
            Some(PendingDeadLetters {
                of: *of,
                oldest: *oldest,
                count: letters.len() as u64,
            })
        });
        waiting.collect()
    }

    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        let log = self.lock();
        if log.closed {
            return Err(Error::Closed);
        }
        let mut found = Vec::new();
        let Some(letters) = log.letters.get(&of) else {
            return Ok(found);
        };
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut bytes = 0;
        for (key, letter) in letters.range((from, Bound::Unbounded)) {
            bytes += letter.object().len() + want.overhead;
            let fits = found.is_empty() || bytes <= want.bytes_max;
            if key.0 > until || found.len() >= want.events_max || !fits {
                break;
            }
            found.push(letter.clone());
        }
        Ok(found)
    }

    async fn dead_letters_done(&self, of: SubscriptionId, letters: Vec<DeadLetterKey>) -> Result<(), Error> {
        let mut log = self.lock();
        if log.closed {
            return Err(Error::Closed);
        }
        let MemoryLogState {
            letters: waiting,
            not_durable,
            ..
        } = &mut *log;
        if let Some(ours) = waiting.get_mut(&of) {
            for key in letters {
                if ours.remove(&key).is_some() {
                    // The dead letter is removed durably, so a crash must not restore the
                    // delivery's earlier state either.
                    not_durable.remove(&(of, key.1));
                }
            }
            if ours.is_empty() {
                waiting.remove(&of);
            }
        }
        Ok(())
    }

    fn next_due(&self) -> Option<Timestamp> {
        let log = self.lock();
        let firsts = log
            .subscriptions
            .values()
            .filter_map(|d| d.retrying.keys().next());
        firsts.map(|(due, _)| *due).min()
    }

    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp> {
        let log = self.lock();
        let dues = log.subscriptions.values().flat_map(|d| d.retrying.keys());
        dues.map(|(due, _)| *due).filter(|due| *due > after).min()
    }

    fn due(&self, now: Timestamp) -> Vec<SubscriptionId> {
        let log = self.lock();
        let has_due = |d: &MemoryDeliveries| d.retrying.keys().next().is_some_and(|(due, _)| *due <= now);
        log.subscriptions
            .iter()
            .filter(|(_, d)| has_due(d))
            .map(|(of, _)| *of)
            .collect()
    }

    async fn open_subscription(&self, of: SubscriptionId) -> Result<(), Error> {
        let mut log = self.lock();
        if log.closed {
            return Err(Error::Closed);
        }
        log.subscriptions.entry(of).or_default();
        Ok(())
    }

    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        let mut log = self.lock();
        if log.closed {
            return Err(Error::Closed);
        }
        log.not_durable.retain(|(other, _), _| *other != of);
        let dropped = log.subscriptions.remove(&of).unwrap_or_default();
        let letters = log.letters.remove(&of).unwrap_or_default();
        Ok((dropped.waiting.len() + dropped.retrying.len() + letters.len()) as u64)
    }

    fn subscriptions(&self) -> Vec<SubscriptionId> {
        let log = self.lock();
        let busy = |d: &MemoryDeliveries| !d.waiting.is_empty() || !d.retrying.is_empty();
        log.subscriptions
            .iter()
            .filter(|(_, d)| busy(d))
            .map(|(of, _)| *of)
            .collect()
    }

    fn backlog(&self, of: SubscriptionId) -> Backlog {
        let log = self.lock();
        log.subscriptions.get(&of).map_or_else(Backlog::default, |d| {
            let all = d
                .waiting
                .values()
                .chain(d.claimed.values())
                .chain(d.retrying.values());
            Backlog {
                waiting: d.waiting.len() as u64,
                claimed: d.claimed.len() as u64,
                retrying: d.retrying.len() as u64,
                oldest: all.map(|one| one.entry.batch.received).min(),
            }
        })
    }

    fn health(&self) -> LogHealth {
        let log = self.lock();
        LogHealth {
            refusing: log.refusing.clone(),
            redelivered: log.redelivered,
            ..LogHealth::default()
        }
    }

    fn identity(&self) -> u64 {
        self.lock().identity
    }

    fn listen(&self, listener: Arc<dyn LogListener>) {
        // Only the first listener counts; later ones are ignored.
        let _ = self.listener.set(listener);
    }

    fn as_movable(&self) -> Option<&dyn MovableLog> {
        Some(self)
    }

    async fn close(&self) -> Result<(), Error> {
        self.checkpoint();
        Ok(())
    }
}

#[async_trait]
impl MovableLog for MemoryLog {
    fn export(&self) -> Box<dyn LogExport + '_> {
        let log = self.lock();
        let mut open: BTreeMap<Position, (Arc<LogEntry>, Vec<OpenDelivery>)> = BTreeMap::new();
        let mut add = |entry: &Arc<LogEntry>, index, of, stage| {
            let found = open
                .entry(entry.first)
                .or_insert_with(|| (entry.clone(), Vec::new()));
            found.1.push(OpenDelivery { index, of, stage });
        };
        for (of, deliveries) in &log.subscriptions {
            for one in deliveries.waiting.values().chain(deliveries.retrying.values()) {
                let stage = one
                    .due
                    .map_or(DeliveryStage::Waiting, |due| DeliveryStage::Retry {
                        due,
                        attempts_made: one.attempts_made,
                        last_attempt: one.last_attempt,
                    });
                add(&one.entry, one.index, *of, stage);
            }
        }
        for (of, letters) in &log.letters {
            for one in letters.values() {
                let stage = DeliveryStage::Letter {
                    decided: one.decided,
                    attempts_made: one.attempts_made,
                    last_attempt: one.last_attempt,
                    reason: one.reason,
                };
                add(&one.entry, one.index, *of, stage);
            }
        }
        let all = open.into_values().map(|(entry, mut open)| {
            open.sort_by_key(|one| (one.index, one.of));
            ExportedRequest { entry, open }
        });
        Box::new(MemoryExport(Some(all.collect())))
    }

    async fn import(&self, moved: Vec<ExportedRequest>) -> Result<(), Error> {
        for one in moved {
            let first = self.append(one.batch()).await?;
            let mut log = self.lock();
            let MemoryLogState {
                subscriptions,
                letters,
                ..
            } = &mut *log;
            for OpenDelivery { index, of, stage } in one.open {
                let position = Position(first.0 + u64::from(index));
                let Some(deliveries) = subscriptions.get_mut(&of) else {
                    continue;
                };
                let Some(waiting) = deliveries.waiting.remove(&position) else {
                    continue;
                };
                match stage {
                    DeliveryStage::Waiting => deliveries.put(waiting),
                    DeliveryStage::Retry {
                        due,
                        attempts_made,
                        last_attempt,
                    } => deliveries.put(MemoryDelivery {
                        attempts_made,
                        last_attempt,
                        due: Some(due),
                        ..waiting
                    }),
                    DeliveryStage::Letter {
                        decided,
                        attempts_made,
                        last_attempt,
                        reason,
                    } => {
                        let letter = PendingDeadLetter {
                            entry: waiting.entry,
                            index,
                            attempts_made,
                            last_attempt,
                            reason,
                            decided,
                        };
                        letters.entry(of).or_default().insert(letter.key(), letter);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Export that returns everything at once, since it is in memory anyway.
struct MemoryExport(Option<Vec<ExportedRequest>>);

#[async_trait]
impl LogExport for MemoryExport {
    async fn next(&mut self) -> Result<Vec<ExportedRequest>, Error> {
        Ok(self.0.take().unwrap_or_default())
    }
}

/// A catalog in memory.
#[derive(Default)]
pub struct MemoryCatalog {
    catalog: Mutex<CatalogState>,
}

#[async_trait]
impl Catalog for MemoryCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        Ok(self.catalog.lock().expect("no panic holds it").loaded())
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        let mut catalog = self.catalog.lock().expect("no panic holds it");
        changes.into_iter().for_each(|change| catalog.apply(change, 0));
        Ok(())
    }

    async fn next_id(&self) -> Result<u64, Error> {
        Ok(self.catalog.lock().expect("no panic holds it").allocate_ids(1))
    }
}

/// A catalog in memory shared by several simulated nodes, each with its own handle.
pub struct SharedCatalog {
    shared: Arc<SharedCatalogBackend>,
    /// Index of this handle's replica.
    me: usize,
}

#[derive(Default)]
struct SharedCatalogBackend {
    nodes: Mutex<SharedCatalogReplicas>,
    changed: Notify,
}

#[derive(Default)]
struct SharedCatalogReplicas {
    replicas: Vec<CatalogReplica>,
    sequence: u64,
}

impl SharedCatalog {
    /// An empty catalog with `count` handles.
    pub fn handles(count: usize) -> Vec<SharedCatalog> {
        let shared = Arc::new(SharedCatalogBackend::default());
        shared.lock().replicas.resize_with(count, CatalogReplica::default);
        let handle = |me| SharedCatalog {
            shared: shared.clone(),
            me,
        };
        (0..count).map(handle).collect()
    }

    /// The handle of this node after a restart: it knows the catalog and has no follower yet.
    pub fn reopen(&self) -> SharedCatalog {
        let mut nodes = self.shared.lock();
        let known = &nodes.replicas[self.me].resources;
        let mut resources = CatalogState::default();
        resources.skip_ids(known.ids_allocated());
        known.all().for_each(|change| resources.apply(change, 0));
        let me = nodes.replicas.len();
        nodes.replicas.push(CatalogReplica::new(resources));
        SharedCatalog {
            shared: self.shared.clone(),
            me,
        }
    }
}

impl SharedCatalogBackend {
    fn lock(&self) -> MutexGuard<'_, SharedCatalogReplicas> {
        self.nodes.lock().expect("no panic holds it")
    }
}

#[async_trait]
impl Catalog for SharedCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        Ok(self.shared.lock().replicas[self.me].load())
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        let mut nodes = self.shared.lock();
        let author = self.me as u64 + 1;
        nodes.replicas[self.me].check(&changes, author)?;
        nodes.sequence += 1;
        let sequence = nodes.sequence;
        for (node, replica) in nodes.replicas.iter_mut().enumerate() {
            replica.apply(changes.clone(), author, node == self.me, sequence);
        }
        drop(nodes);
        self.shared.changed.notify_waiters();
        Ok(())
    }

    async fn next_id(&self) -> Result<u64, Error> {
        let mut nodes = self.shared.lock();
        let given = nodes.replicas.iter_mut().map(|one| one.resources.allocate_ids(1));
        Ok(given.max().expect("there is one"))
    }

    async fn catch_up(&self) -> Result<(), Error> {
        let until = self.shared.lock().sequence;
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            let untold = self.shared.lock().replicas[self.me].oldest_unapplied();
            if untold.is_none_or(|untold| untold > until) {
                return Ok(());
            }
            changed.await;
        }
    }

    async fn follow(&self, follower: Arc<dyn CatalogFollower>) {
        self.shared.lock().replicas[self.me].follow();
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            let next = self.shared.lock().replicas[self.me].next();
            let Some((changes, sequence)) = next else {
                changed.await;
                continue;
            };
            follower.changed(changes, sequence).await;
            self.shared.lock().replicas[self.me].done();
            self.shared.changed.notify_waiters();
        }
    }
}

/// An archive in memory.
#[derive(Default)]
pub struct MemoryArchive {
    archive: Mutex<MemoryArchiveState>,
}

#[derive(Default)]
struct MemoryArchiveState {
    blobs: BTreeMap<BlobId, BlobRecord>,
    blobs_given: u64,
    jobs: BTreeMap<u64, ReplayJob>,
    jobs_given: u64,
}

impl MemoryArchiveState {
    fn mark(&mut self, id: BlobId, marks: Vec<DeadLetterMark>) {
        if let Some(blob) = self.blobs.get_mut(&id) {
            blob.marks = marks;
        }
    }
}

impl MemoryArchive {
    fn lock(&self) -> MutexGuard<'_, MemoryArchiveState> {
        self.archive.lock().expect("no panic holds it")
    }
}

#[async_trait]
impl Archive for MemoryArchive {
    async fn add(&self, blob: BlobRecord) -> Result<BlobId, Error> {
        let mut archive = self.lock();
        archive.blobs_given += 1;
        let id = BlobId(archive.blobs_given);
        let place = |one: &BlobRecord| (one.account.clone(), one.container.clone(), one.path.clone());
        archive.blobs.retain(|_, known| place(known) != place(&blob));
        archive.blobs.insert(id, BlobRecord { id, ..blob });
        Ok(id)
    }

    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error> {
        Ok(self.lock().blobs.get(&id).cloned())
    }

    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error> {
        let archive = self.lock();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let later = archive.blobs.range((from, Bound::Unbounded));
        let taken = later.filter(|(_, blob)| filter.takes(blob));
        Ok(taken.take(max).map(|(_, blob)| blob.clone()).collect())
    }

    async fn last(&self) -> Result<Option<BlobId>, Error> {
        Ok(self.lock().blobs.keys().next_back().copied())
    }

    async fn counts(&self) -> Result<Vec<(SubscriptionId, GiveUpReason, u64)>, Error> {
        let mut counts: BTreeMap<(SubscriptionId, GiveUpReason), u64> = BTreeMap::new();
        for blob in self.lock().blobs.values() {
            for mark in blob.marks.iter().filter(|mark| !mark.purged) {
                *counts.entry((blob.subscription, mark.reason)).or_default() += 1;
            }
        }
        let counts = counts.into_iter();
        Ok(counts.map(|((of, reason), count)| (of, reason, count)).collect())
    }

    async fn mark(&self, id: BlobId, marks: Vec<DeadLetterMark>) -> Result<(), Error> {
        self.lock().mark(id, marks);
        Ok(())
    }

    async fn remove(&self, id: BlobId) -> Result<(), Error> {
        self.lock().blobs.remove(&id);
        Ok(())
    }

    async fn put_job(
        &self,
        job: ReplayJob,
        marks: Option<(BlobId, Vec<DeadLetterMark>)>,
    ) -> Result<(), Error> {
        let mut archive = self.lock();
        archive.jobs.insert(job.id, job);
        if let Some((id, marks)) = marks {
            archive.mark(id, marks);
        }
        Ok(())
    }

    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error> {
        Ok(self.lock().jobs.values().cloned().collect())
    }

    async fn remove_job(&self, id: u64) -> Result<(), Error> {
        self.lock().jobs.remove(&id);
        Ok(())
    }

    async fn next_job(&self) -> Result<u64, Error> {
        let mut archive = self.lock();
        archive.jobs_given += 1;
        Ok(archive.jobs_given)
    }

    async fn numbers(&self) -> Result<(BlobId, u64), Error> {
        let archive = self.lock();
        Ok((BlobId(archive.blobs_given), archive.jobs_given))
    }

    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error> {
        let mut archive = self.lock();
        archive.blobs_given = archive.blobs_given.max(blobs.0);
        archive.jobs_given = archive.jobs_given.max(jobs);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{
        self, ArchiveUnderTest, CatalogUnderTest, LogUnderTest, WANT, at, claim_all, events, settled, sub,
    };

    #[derive(Default)]
    struct MemoryLogUnderTest {
        opened: Mutex<Option<Arc<MemoryLog>>>,
    }

    impl MemoryLogUnderTest {
        fn opened(&self, log: MemoryLog) -> Arc<dyn EventLog> {
            let log = Arc::new(log);
            *self.opened.lock().unwrap() = Some(log.clone());
            log
        }
    }

    #[async_trait]
    impl LogUnderTest for MemoryLogUnderTest {
        async fn open(&self) -> Arc<dyn EventLog> {
            self.opened(MemoryLog::new(7))
        }

        async fn reopen(&self, log: Arc<dyn EventLog>) -> Arc<dyn EventLog> {
            log.close().await.unwrap();
            self.crash(log).await
        }

        async fn crash(&self, _log: Arc<dyn EventLog>) -> Arc<dyn EventLog> {
            let log = self.opened.lock().unwrap().take().expect("it was opened");
            self.opened(log.crash())
        }
    }

    #[async_trait]
    impl CatalogUnderTest for MemoryCatalog {
        async fn open(&self) -> Arc<dyn Catalog> {
            Arc::new(MemoryCatalog::default())
        }

        async fn reopen(&self, catalog: Arc<dyn Catalog>) -> Arc<dyn Catalog> {
            catalog
        }
    }

    #[async_trait]
    impl ArchiveUnderTest for MemoryArchive {
        async fn open(&self) -> Arc<dyn Archive> {
            Arc::new(MemoryArchive::default())
        }

        async fn reopen(&self, archive: Arc<dyn Archive>) -> Arc<dyn Archive> {
            archive
        }
    }

    #[tokio::test]
    async fn keeps_the_archives_promise() {
        conformance::archive(&MemoryArchive::default()).await;
    }

    #[tokio::test]
    async fn keeps_the_logs_promise() {
        conformance::all(&MemoryLogUnderTest::default()).await;
    }

    #[tokio::test]
    async fn keeps_the_catalogues_promise() {
        conformance::catalog(&MemoryCatalog::default()).await;
    }

    struct SharedCatalogUnderTest(Mutex<Option<SharedCatalog>>);

    #[async_trait]
    impl CatalogUnderTest for SharedCatalogUnderTest {
        async fn open(&self) -> Arc<dyn Catalog> {
            let mut handles = SharedCatalog::handles(2);
            let opened = handles.swap_remove(0);
            *self.0.lock().unwrap() = Some(opened.reopen());
            Arc::new(opened)
        }

        async fn reopen(&self, _: Arc<dyn Catalog>) -> Arc<dyn Catalog> {
            let mut known = self.0.lock().unwrap();
            let next = known.as_ref().unwrap().reopen();
            let opened = known.replace(next).unwrap();
            Arc::new(opened)
        }
    }

    #[tokio::test]
    async fn keeps_the_catalogues_promise_shared() {
        conformance::catalog(&SharedCatalogUnderTest(Mutex::default())).await;
    }

    #[tokio::test]
    async fn a_crash_keeps_what_was_durable_and_nothing_else() {
        let log = MemoryLog::new(7);
        log.open_subscription(sub(1)).await.unwrap();
        log.append(events(&[("a", &[1]), ("b", &[1]), ("c", &[1])]))
            .await
            .unwrap();
        let claims = claim_all(&log, sub(1), at(0)).await;
        log.settle(sub(1), vec![settled(&claims[0], NextStep::Done)])
            .await
            .unwrap();
        log.checkpoint();
        log.settle(sub(1), vec![settled(&claims[1], NextStep::RetryAt(at(9)))])
            .await
            .unwrap();

        let restarted = log.crash();
        assert!(matches!(
            log.append(events(&[("x", &[1])])).await,
            Err(Error::Closed)
        ));
        assert_eq!(restarted.next_due(), None);
        let claims = claim_all(&restarted, sub(1), at(0)).await;
        let texts: Vec<&str> = claims.iter().map(Claim::object).collect();
        assert_eq!(texts, ["b", "c"]);
        assert_eq!(restarted.health().redelivered, 2);
    }

    #[tokio::test]
    async fn a_crash_takes_back_letters_that_were_not_durable() {
        let log = MemoryLog::new(7);
        log.open_subscription(sub(1)).await.unwrap();
        log.append(events(&[("a", &[1]), ("b", &[1]), ("c", &[1])]))
            .await
            .unwrap();
        let claims = claim_all(&log, sub(1), at(0)).await;
        let give_up = |claim| vec![settled(claim, NextStep::DeadLetter(GiveUpReason::BadRequest))];
        log.settle(sub(1), give_up(&claims[0])).await.unwrap();
        log.checkpoint();
        log.settle(sub(1), give_up(&claims[1])).await.unwrap();
        log.settle(sub(1), give_up(&claims[2])).await.unwrap();
        let letters = log.letters(sub(1), None, at(9), WANT).await.unwrap();
        assert_eq!(letters.len(), 3);
        log.dead_letters_done(sub(1), vec![letters[2].key()])
            .await
            .unwrap();

        let restarted = log.crash();
        assert!(matches!(
            log.letters(sub(1), None, at(9), WANT).await,
            Err(Error::Closed)
        ));
        let letters = restarted.letters(sub(1), None, at(9), WANT).await.unwrap();
        let texts: Vec<&str> = letters.iter().map(PendingDeadLetter::object).collect();
        assert_eq!(texts, ["a"]);
        let claims = claim_all(&restarted, sub(1), at(0)).await;
        let texts: Vec<&str> = claims.iter().map(Claim::object).collect();
        assert_eq!(texts, ["b"]);
    }

    #[tokio::test]
    async fn appends_fail_on_demand() {
        let log = MemoryLog::new(7);
        log.open_subscription(sub(1)).await.unwrap();
        log.refuse_appends(Some("the disk is full"));
        assert!(matches!(
            log.append(events(&[("a", &[1])])).await,
            Err(Error::Unavailable(_))
        ));
        assert!(log.claim(sub(1), at(0), WANT).await.unwrap().is_empty());
        log.refuse_appends(None);
        log.fail_next_append();
        assert!(matches!(
            log.append(events(&[("b", &[1])])).await,
            Err(Error::Unavailable(_))
        ));
        log.append(events(&[("c", &[1])])).await.unwrap();
        assert_eq!(claim_all(&log, sub(1), at(0)).await.len(), 2);
    }
}
