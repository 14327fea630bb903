//! The membership loop: sends heartbeats, receives those of others, and carries out the decisions.

use super::bucket_values::{self, BucketKey, HeartbeatRecord, NodeCounts, OwnershipRecord};
use super::decide::{
    Heartbeat, HoldPhase, MembershipRules, MembershipStep, MembershipView, NodeId, NodeStatus,
};
use super::lease::ClockReading;
use super::{
    Command, KnownNode, Membership, MembershipShared, NodeInfo, PING_PATIENCE, PartitionOwnership,
    RELEASE_PATIENCE, served_backlogs,
};
use crate::bucket::{Bucket, BucketEntry, SwapOutcome};
use crate::catalog::JetStreamCatalog;
use crate::connection::NatsConnection;
use crate::fenced_stream::sleep;
use crate::forward;
use crate::log::JetStreamLog;
use crate::partition::Partition;
use async_nats::{Request, RequestErrorKind};
use futures_util::StreamExt;
use postrider_core::time::Timestamp;
use postrider_store::{Catalog, Error};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// Maximum number of partitions that are loaded at once: each may take much memory while it is
/// read.
const LOADS_MAX: usize = 4;
/// Maximum duration of loading a partition before it is left to another node.
const LOAD_PATIENCE: Duration = Duration::from_secs(300);
/// Maximum duration of a release after its attempts have ended.
const WRITE_PATIENCE: Duration = Duration::from_secs(20);
/// Delay before repeating an operation that failed immediately.
const TRY_AGAIN: Duration = Duration::from_millis(100);
/// Maximum number of received changes of the bucket that wait to be processed.
const FOUND_WAITING_MAX: usize = 256;
/// Minimum interval between heartbeats that are sent because the catalog changed.
const BEATS_APART: Duration = Duration::from_millis(10);
/// Maximum number of changes of the catalog that wait to be in force everywhere.
const CHANGES_WAITING_MAX: usize = 4096;
/// A node that has been dead for this long and owns nothing is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(3600);

/// Ensures that no other process runs as this node. Returns the number of this process, counted
/// from one.
pub async fn ensure_only_process(
    connection: &NatsConnection,
    bucket: &Bucket,
    rules: &MembershipRules,
    node: &NodeInfo,
) -> Result<u64, Error> {
    let key = BucketKey::Node(node.id).to_string();
    let Some(found) = bucket.read(&key).await? else {
        return Ok(1);
    };
    let Some(beat) = found
        .value
        .as_deref()
        .and_then(bucket_values::read::<HeartbeatRecord>)
    else {
        return Ok(1);
    };
    let next = beat.incarnation + 1;
    let refusal = || {
        let (name, url) = (&beat.name, &beat.url);
        Error::Unavailable(format!(
            "another process already runs as node {} ({name}, {url}): every node needs a data directory of its own",
            node.id
        ))
    };
    let ping = Request::new().timeout(Some(PING_PATIENCE));
    match connection
        .client
        .send_request(forward::subject(connection, node.id, "ping"), ping)
        .await
    {
        Ok(_) => return Err(refusal()),
        // Nobody is subscribed: the previous process has ended, and its partitions can be taken at
        // once.
        Err(e) if e.kind() == RequestErrorKind::NoResponders => return Ok(next),
        Err(_) => {}
    }
    // A subscriber exists and does not answer: the process hangs, or the server has not noticed
    // that its connection is gone.
    sleep(rules.dead_after()).await;
    match bucket.read(&key).await? {
        Some(again) if again.revision != found.revision && again.value.is_some() => Err(refusal()),
        _ => Ok(next),
    }
}

/// The outcome of a task of the loop.
enum LoopTaskOutcome {
    Beat {
        beat: u64,
        stored: Result<u64, Error>,
    },
    Took {
        partition: u8,
        swapped: Result<SwapOutcome, Error>,
    },
    Loaded {
        partition: u8,
        epoch: u64,
        loaded: Result<Box<Partition>, Error>,
    },
    Ended {
        partition: u8,
        epoch: u64,
    },
    Confirmed {
        partition: u8,
        stretch: u64,
        swapped: Result<SwapOutcome, Error>,
    },
    Released {
        partition: u8,
        epoch: u64,
    },
    Freed {
        partition: u8,
        epoch: u64,
        swapped: Result<SwapOutcome, Error>,
    },
    Forgotten,
    /// Outcome of a check whether the catalog here is current.
    CatalogueSeen {
        began: Duration,
        current: Result<(), Error>,
    },
    CatalogueConfirmed {
        stretch: u64,
        began: Duration,
        confirmed: Result<(), Error>,
    },
}

/// A change of the catalog that is answered once it is in force everywhere.
struct PendingCatalogBarrier {
    version: u64,
    /// A time after which the change was certainly stored.
    since: Duration,
    /// Dropped when the caller gives up.
    done: oneshot::Sender<()>,
}

/// The state of a held partition.
struct LoadingPartition {
    epoch: u64,
    /// Aborts the task that loads the partition.
    loading: Option<AbortHandle>,
    /// The loaded partition, while it is not confirmed in this stretch of the lease.
    loaded: Option<Box<Partition>>,
}

pub struct MembershipLoop {
    connection: NatsConnection,
    bucket: Bucket,
    rules: MembershipRules,
    shared: Arc<MembershipShared>,
    log: Arc<JetStreamLog>,
    catalog: Arc<JetStreamCatalog>,
    changes: Vec<PendingCatalogBarrier>,
    /// The catalog version in the last heartbeat, and when that was sent.
    said: (u64, Duration),
    beats_under_way: usize,
    looking_at_catalogue: bool,
    said_behind: bool,
    incarnation: u64,
    stop: CancellationToken,
    known: MembershipView,
    beats: BTreeMap<NodeId, HeartbeatRecord>,
    epochs: Vec<u64>,
    held: BTreeMap<u8, LoadingPartition>,
    jobs: JoinSet<LoopTaskOutcome>,
    loads: Arc<Semaphore>,
    nonce: u64,
    draining: bool,
    leaving: bool,
    /// When the watch was last known to work because it delivered an own heartbeat.
    echoed: Duration,
    said_away: bool,
}

impl MembershipLoop {
    pub fn new(
        connection: NatsConnection,
        bucket: Bucket,
        rules: MembershipRules,
        shared: Arc<MembershipShared>,
        (log, catalog): (Arc<JetStreamLog>, Arc<JetStreamCatalog>),
        incarnation: u64,
        stop: CancellationToken,
    ) -> MembershipLoop {
        let now = shared.lease.elapsed();
        MembershipLoop {
            known: MembershipView::new(shared.node.holder(), rules, now),
            connection,
            bucket,
            rules,
            shared,
            log,
            catalog,
            changes: Vec::new(),
            said: (0, now),
            beats_under_way: 0,
            looking_at_catalogue: false,
            said_behind: false,
            incarnation,
            stop,
            beats: BTreeMap::new(),
            epochs: vec![0; usize::from(rules.partitions)],
            held: BTreeMap::new(),
            jobs: JoinSet::new(),
            loads: Arc::new(Semaphore::new(LOADS_MAX)),
            nonce: 0,
            draining: false,
            leaving: false,
            echoed: now,
            said_away: false,
        }
    }

    /// Runs until told to leave, displaced by another process, or stopped.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let stop = self.stop.clone();
        let mut beat_at = self.now();
        let mut watching = BucketWatch::start(&self.bucket);
        let (mut stored, mut applied) = self.catalog.progress_receivers();
        loop {
            let now = self.now();
            if now >= beat_at {
                self.look_at_catalogue(now);
                self.beat(now);
                beat_at = now + self.rules.beat_every();
            }
            if self.news_at(now).is_some_and(|at| now >= at) {
                self.beat(now);
            }
            // Check first: a node that was displaced must not extend its lease again.
            if self.shared.failed.borrow().is_some() {
                break;
            }
            let again = self.act();
            if self.leaving && self.is_empty() {
                break;
            }
            // A watch that is silent although heartbeats are stored is restarted.
            if now > self.echoed + self.rules.lease * 2 {
                tracing::debug!("the bucket's watch has fallen silent");
                watching = BucketWatch::start(&self.bucket);
                self.echoed = now;
            }
            let lease_end = self.known.valid_until().filter(|until| *until > now);
            let wake = [again, lease_end, self.news_at(now)]
                .into_iter()
                .flatten()
                .fold(beat_at, Duration::min);
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(command) = commands.recv() => match command {
                    Command::InForce { version, done } => self.await_in_force(version, done),
                    Command::Drain | Command::Undrain | Command::Leave => {
                        self.leaving |= matches!(command, Command::Leave);
                        self.draining = self.leaving || matches!(command, Command::Drain);
                        self.known.drain(self.draining);
                        beat_at = self.now();
                    }
                },
                Ok(()) = stored.changed() => {}
                Ok(()) = applied.changed() => {}
                Some(done) = self.jobs.join_next(), if !self.jobs.is_empty() => match done {
                    Ok(done) => self.done(done),
                    Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
                    Err(_) => {}
                },
                Some(found) = watching.found.recv() => self.heard(found),
                () = sleep(wake.saturating_sub(now)) => {}
            }
        }
        self.end().await;
    }

    fn moment(&mut self) -> ClockReading {
        let now = self.shared.lease.now();
        if now.slept {
            tracing::warn!(
                "this machine slept, or its clock was set forward: what it owns is confirmed first"
            );
            self.known.slept();
        }
        now
    }

    fn now(&mut self) -> Duration {
        self.moment().at
    }

    fn is_empty(&self) -> bool {
        self.known.held().next().is_none()
    }

    async fn end(&mut self) {
        self.shared.lease.end();
        self.shared.steward.send_replace(false);
        self.jobs.shutdown().await;
        let held: Vec<u8> = self.held.keys().copied().collect();
        for partition in held {
            self.drop_partition(partition);
        }
        if self.leaving && self.shared.failed.borrow().is_none() {
            // Best effort: otherwise the other nodes notice the absence by themselves.
            let key = BucketKey::Node(self.shared.node.id).to_string();
            let _ = self.bucket.delete(&key).await;
        }
    }

    /// When to send a heartbeat that cannot wait for the regular one: others wait for this node's
    /// catalog version, a change waits until this node has received everything stored before it, or
    /// another node has been silent for long enough.
    fn news_at(&self, now: Duration) -> Option<Duration> {
        let (version, sent) = self.said;
        let waits = self.changes.iter().any(|change| change.since >= sent);
        let news = waits || self.catalog.in_force() > version;
        if self.beats_under_way > 0 || !self.known.may_beat(now) {
            return None;
        }
        let news_at = news.then_some(sent + BEATS_APART);
        let death_at = self.known.next_death_at().filter(|at| *at > sent);
        [news_at, death_at].into_iter().flatten().min()
    }

    fn await_in_force(&mut self, version: u64, done: oneshot::Sender<()>) {
        self.changes.retain(|change| !change.done.is_closed());
        if self.changes.len() < CHANGES_WAITING_MAX {
            let since = self.now();
            self.changes.push(PendingCatalogBarrier { version, since, done });
        }
    }

    /// Answers the changes that are in force everywhere.
    fn settle_changes(&mut self) {
        let (known, changes) = (&self.known, std::mem::take(&mut self.changes));
        let in_force = |change: &PendingCatalogBarrier| known.in_force(change.version, change.since).is_ok();
        let (settled, waiting): (Vec<PendingCatalogBarrier>, Vec<PendingCatalogBarrier>) =
            changes.into_iter().partition(in_force);
        self.changes = waiting;
        for change in settled {
            // The caller may have given up.
            let _ = change.done.send(());
        }
    }

    fn look_at_catalogue(&mut self, began: Duration) {
        if std::mem::replace(&mut self.looking_at_catalogue, true) {
            return;
        }
        let (catalog, patience) = (self.catalog.clone(), self.rules.lease);
        self.jobs.spawn(async move {
            let looked = tokio::time::timeout(patience, catalog.catch_up()).await;
            LoopTaskOutcome::CatalogueSeen {
                began,
                current: looked.unwrap_or_else(|_| Err(Error::Unavailable("it does not answer".into()))),
            }
        });
    }

    fn confirm_catalogue(&mut self, began: Duration) {
        let stretch = self.known.confirming_catalogue();
        let catalog = self.catalog.clone();
        self.jobs.spawn(async move {
            let confirmed = catalog.confirm().await;
            if confirmed.is_err() {
                sleep(TRY_AGAIN).await;
            }
            LoopTaskOutcome::CatalogueConfirmed {
                stretch,
                began,
                confirmed,
            }
        });
    }

    /// Sends a heartbeat, unless the catalog here lags too far behind: others would wait for this
    /// node in vain.
    fn beat(&mut self, now: Duration) {
        if !self.known.may_beat(now) {
            if !std::mem::replace(&mut self.said_behind, true) {
                tracing::warn!(
                    "the catalogue is behind for too long: no heartbeats are sent until it is current"
                );
            }
            return;
        }
        if std::mem::take(&mut self.said_behind) {
            tracing::info!("the catalogue is current again");
        }
        self.beats_under_way += 1;
        self.said = (self.catalog.in_force(), now);
        let number = self.known.beat_sent(now);
        let beat = self.describe(number);
        let bytes = bucket_values::write(&beat);
        let bucket = self.bucket.clone();
        let key = BucketKey::Node(self.shared.node.id).to_string();
        self.jobs.spawn(async move {
            LoopTaskOutcome::Beat {
                beat: number,
                stored: bucket.put(&key, bytes).await,
            }
        });
    }

    fn counts(&self) -> NodeCounts {
        let counters = &self.log.shared().counters;
        NodeCounts {
            takeovers: counters.takeovers.load(Relaxed),
            fenced: counters.fenced.load(Relaxed),
            redelivered: counters.redelivered.load(Relaxed),
            forwarded: self.shared.forwarded.load(Relaxed),
        }
    }

    fn describe(&self, beat: u64) -> HeartbeatRecord {
        let node = &self.shared.node;
        HeartbeatRecord {
            process: node.process,
            incarnation: self.incarnation,
            beat,
            name: node.name.clone(),
            url: node.url.clone(),
            version: node.version.clone(),
            started: node.started.nanos(),
            draining: self.draining,
            catalogue: Some(self.said.0),
            serves: served_backlogs(&self.log),
            counts: self.counts(),
            report: self
                .shared
                .report
                .get()
                .map(|report| report())
                .unwrap_or_default(),
        }
    }

    /// Processes a change of the bucket.
    fn heard(&mut self, found: BucketEntry) {
        let now = self.now();
        match BucketKey::parse(&found.key) {
            Some(BucketKey::Node(node)) => {
                let Some(beat) = found
                    .value
                    .as_deref()
                    .and_then(bucket_values::read::<HeartbeatRecord>)
                else {
                    self.known.node_left(node, found.revision, now);
                    self.beats.remove(&node);
                    return;
                };
                let me = &self.shared.node;
                if node == me.id && beat.process != me.process {
                    let theirs = (beat.incarnation, beat.process);
                    if theirs > (self.incarnation, me.process) {
                        self.displaced(&beat);
                    }
                    // Heartbeats of an earlier process of this node are irrelevant.
                    return;
                }
                if node == me.id {
                    self.echoed = now;
                }
                let said = Heartbeat {
                    process: beat.process,
                    beat: beat.beat,
                    draining: beat.draining,
                    catalogue: beat.catalogue,
                };
                self.known.node_heard(node, said, found.revision, now);
                self.beats.insert(node, beat);
            }
            Some(BucketKey::Partition(partition)) if partition < self.rules.partitions => {
                self.owner_found(partition, &found);
            }
            _ => {}
        }
    }

    fn owner_found(&mut self, partition: u8, found: &BucketEntry) {
        let now = self.now();
        let owned = found
            .value
            .as_deref()
            .and_then(bucket_values::read::<OwnershipRecord>);
        let holder = owned.as_ref().and_then(OwnershipRecord::holder);
        self.known.owner_heard(partition, holder, found.revision, now);
        if let Some(owned) = owned.filter(|owned| owned.holder().is_some()) {
            let epoch = &mut self.epochs[usize::from(partition)];
            *epoch = owned.epoch(found.revision).max(*epoch);
        }
    }

    fn displaced(&self, by: &HeartbeatRecord) {
        self.shared.lease.end();
        let node = self.shared.node.id;
        let why = format!(
            "another process has taken the place of this node {node}: {} at {}",
            by.name, by.url
        );
        tracing::error!(%node, by = by.name, url = by.url, "another process has taken this node's place");
        self.shared.failed.send_replace(Some(why));
    }

    /// Carries out what is to be done now. Returns when to look again at the latest.
    fn act(&mut self) -> Option<Duration> {
        let moment = self.moment();
        let now = moment.at;
        self.extend(moment);
        self.serve_loaded();
        let plan = self.known.decide(now);
        for step in plan.steps {
            match step {
                MembershipStep::Take { partition, revision } => self.take(partition, revision),
                MembershipStep::Confirm { partition, revision } => self.confirm(partition, revision),
                MembershipStep::ConfirmCatalogue => self.confirm_catalogue(now),
                MembershipStep::Release { partition } => self.release(partition),
                MembershipStep::Resign { partition } => {
                    // A released partition is not served any more; the news that its key is free
                    // may arrive before its acknowledgement.
                    if self.log.partition(partition).is_some() {
                        tracing::warn!(partition, "another node has taken a partition");
                    }
                    self.drop_partition(partition);
                    self.known.resigned(partition, now);
                }
            }
        }
        self.extend(moment);
        self.settle_changes();
        self.show(now);
        plan.again
    }

    fn extend(&mut self, now: ClockReading) {
        let lease = &self.shared.lease;
        match self.known.valid_until() {
            Some(until) if until > now.at => {
                let resumed = !lease.valid_now();
                lease.extend(until, now);
                if resumed {
                    self.resumed();
                }
            }
            _ => {}
        }
        let stewards = self.known.doing(0) == Some(HoldPhase::Serving) && lease.valid_now();
        self.shared
            .steward
            .send_if_modified(|steward| std::mem::replace(steward, stewards) != stewards);
    }

    /// Tells the listener again what can be claimed, because claims were refused while the lease
    /// was expired.
    fn resumed(&self) {
        if self.said_away {
            tracing::info!("the lease is valid again");
        }
        for partition in self.log.partitions().iter() {
            let (busy, letters) = {
                let book = partition.book();
                (
                    book.busy().collect::<Vec<_>>(),
                    book.letters_waiting().next().is_some(),
                )
            };
            self.log.shared().tell(|listener| {
                for (of, count) in busy {
                    listener.ready(of, count);
                }
                listener.due_changed();
                if letters {
                    listener.dead_letters_added();
                }
            });
        }
    }

    fn swap_to(
        &mut self,
        partition: u8,
        owned: OwnershipRecord,
        revision: u64,
    ) -> impl Future<Output = Result<SwapOutcome, Error>> + Send + use<> {
        let bucket = self.bucket.clone();
        async move {
            let key = BucketKey::Partition(partition).to_string();
            let swapped = bucket.swap(&key, bucket_values::write(&owned), revision).await;
            if swapped.is_err() {
                sleep(TRY_AGAIN).await;
            }
            swapped
        }
    }

    fn next_nonce(&mut self) -> u64 {
        self.nonce += 1;
        self.nonce
    }

    fn take(&mut self, partition: u8, revision: u64) {
        self.known.taking(partition);
        let owned = OwnershipRecord::by(self.shared.node.holder(), self.next_nonce(), None);
        let swap = self.swap_to(partition, owned, revision);
        self.jobs.spawn(async move {
            LoopTaskOutcome::Took {
                partition,
                swapped: swap.await,
            }
        });
    }

    fn load(&mut self, partition: u8, epoch: u64) {
        let (connection, loads) = (self.connection.clone(), self.loads.clone());
        let node = self.log.shared().clone();
        let loading = self.jobs.spawn(async move {
            let _turn = loads.acquire_owned().await;
            let load = Partition::take(&connection, partition, epoch, node);
            let loaded = match tokio::time::timeout(LOAD_PATIENCE, load).await {
                Ok(loaded) => loaded.map(Box::new),
                Err(_) => Err(Error::Unavailable("it took too long".into())),
            };
            LoopTaskOutcome::Loaded {
                partition,
                epoch,
                loaded,
            }
        });
        let held = LoadingPartition {
            epoch,
            loading: Some(loading),
            loaded: None,
        };
        self.held.insert(partition, held);
    }

    /// Serves partitions that are loaded and confirmed.
    fn serve_loaded(&mut self) {
        let ready: Vec<u8> = self
            .held
            .iter()
            .filter(|(partition, held)| held.loaded.is_some() && self.known.may_serve(**partition))
            .map(|(partition, _)| *partition)
            .collect();
        for partition in ready {
            let Some(held) = self.held.get_mut(&partition) else {
                continue;
            };
            let Some(loaded) = held.loaded.take() else {
                continue;
            };
            let epoch = held.epoch;
            let ended = loaded.ended();
            self.known.serving(partition);
            self.log.add(*loaded);
            tracing::info!(partition, epoch, "serving a partition");
            self.jobs.spawn(async move {
                ended.cancelled().await;
                LoopTaskOutcome::Ended { partition, epoch }
            });
        }
    }

    fn confirm(&mut self, partition: u8, revision: u64) {
        let stretch = self.known.confirming(partition);
        let epoch = self.held.get(&partition).map(|held| held.epoch);
        let owned = OwnershipRecord::by(self.shared.node.holder(), self.next_nonce(), epoch);
        let swap = self.swap_to(partition, owned, revision);
        self.jobs.spawn(async move {
            LoopTaskOutcome::Confirmed {
                partition,
                stretch,
                swapped: swap.await,
            }
        });
    }

    fn release(&mut self, partition: u8) {
        let Some(epoch) = self.held.get(&partition).map(|held| held.epoch) else {
            return;
        };
        self.known.releasing(partition);
        let log = self.log.clone();
        self.jobs.spawn(async move {
            let written = log.hand_over(partition, RELEASE_PATIENCE);
            match tokio::time::timeout(RELEASE_PATIENCE + WRITE_PATIENCE, written).await {
                Ok(Ok(())) => tracing::info!(partition, "released a partition"),
                Ok(Err(e)) => tracing::warn!(partition, error = %e, "released a partition as it is"),
                Err(_) => tracing::warn!(partition, "released a partition as it is: writing took too long"),
            }
            LoopTaskOutcome::Released { partition, epoch }
        });
    }

    fn free(&mut self, partition: u8, revision: u64, epoch: u64) {
        let owned = OwnershipRecord::free(self.shared.node.holder(), self.next_nonce());
        let swap = self.swap_to(partition, owned, revision);
        self.jobs.spawn(async move {
            LoopTaskOutcome::Freed {
                partition,
                epoch,
                swapped: swap.await,
            }
        });
    }

    /// Stops working on a partition immediately, without writing anything.
    fn drop_partition(&mut self, partition: u8) {
        if let Some(held) = self.held.remove(&partition) {
            if let Some(loading) = held.loading {
                loading.abort();
            }
            if let Some(loaded) = held.loaded {
                loaded.abandon();
            }
        }
        if let Some(served) = self.log.remove(partition) {
            served.abandon();
        }
    }

    fn holds(&self, partition: u8, epoch: u64) -> bool {
        self.held.get(&partition).is_some_and(|held| held.epoch == epoch)
    }

    fn done(&mut self, done: LoopTaskOutcome) {
        let now = self.now();
        if matches!(done, LoopTaskOutcome::Beat { .. }) {
            self.beats_under_way -= 1;
        }
        match done {
            LoopTaskOutcome::Beat { beat, stored: Ok(_) } => {
                self.known.beat_stored(beat, now);
                if std::mem::take(&mut self.said_away) {
                    tracing::info!("heartbeats are stored again");
                }
            }
            LoopTaskOutcome::Beat { stored: Err(e), .. } => {
                if !std::mem::replace(&mut self.said_away, true) {
                    tracing::warn!(error = %e, "a heartbeat was not stored");
                }
            }
            LoopTaskOutcome::Took { partition, swapped } => match swapped {
                Ok(SwapOutcome::Stored(revision)) => {
                    self.known.taken(partition, revision, now);
                    self.epochs[usize::from(partition)] = revision;
                    self.load(partition, revision);
                }
                Ok(SwapOutcome::Refused(found)) => {
                    self.known.take_refused(partition, now);
                    if let Some(found) = found {
                        self.owner_found(partition, &found);
                    }
                }
                Err(e) => {
                    tracing::debug!(partition, error = %e, "a partition could not be taken");
                    self.known.take_refused(partition, now);
                }
            },
            LoopTaskOutcome::Loaded {
                partition,
                epoch,
                loaded,
            } => self.loaded(partition, epoch, loaded, now),
            LoopTaskOutcome::Ended { partition, epoch } => {
                let serving = self.known.doing(partition) == Some(HoldPhase::Serving);
                if self.holds(partition, epoch) && serving {
                    tracing::warn!(partition, "a partition has ended");
                    self.drop_partition(partition);
                    self.known.resigned(partition, now);
                }
            }
            LoopTaskOutcome::Confirmed {
                partition,
                stretch,
                swapped,
            } => match swapped {
                Ok(SwapOutcome::Stored(revision)) => self.known.confirmed(partition, revision, stretch, now),
                Ok(SwapOutcome::Refused(Some(found))) => {
                    self.known.confirm_failed(partition);
                    self.confirm_refused(partition, &found);
                }
                Ok(SwapOutcome::Refused(None)) | Err(_) => self.known.confirm_failed(partition),
            },
            LoopTaskOutcome::Released { partition, epoch } => {
                if self.holds(partition, epoch)
                    && let Some(revision) = self.known.revision_of(partition)
                {
                    self.free(partition, revision, epoch);
                }
            }
            LoopTaskOutcome::Freed {
                partition,
                epoch,
                swapped,
            } => self.freed(partition, epoch, swapped, now),
            LoopTaskOutcome::Forgotten => {}
            LoopTaskOutcome::CatalogueSeen { began, current } => {
                self.looking_at_catalogue = false;
                match current {
                    Ok(()) => self.known.catalogue_seen(began),
                    Err(e) => tracing::debug!(error = %e, "the catalogue is not known to be current"),
                }
            }
            LoopTaskOutcome::CatalogueConfirmed {
                stretch,
                began,
                confirmed,
            } => match confirmed {
                Ok(()) => self.known.catalogue_confirmed(stretch, began),
                Err(e) => {
                    tracing::debug!(error = %e, "the catalogue could not be confirmed yet");
                    self.known.catalogue_unconfirmed();
                }
            },
        }
    }

    fn loaded(&mut self, partition: u8, epoch: u64, loaded: Result<Box<Partition>, Error>, now: Duration) {
        if !self.holds(partition, epoch) {
            if let Ok(loaded) = loaded {
                loaded.abandon();
            }
            return;
        }
        match loaded {
            Ok(loaded) => {
                if let Some(held) = self.held.get_mut(&partition) {
                    held.loading = None;
                    held.loaded = Some(loaded);
                }
            }
            Err(e) => {
                tracing::warn!(partition, error = %e, "a partition could not be loaded");
                let revision = self.known.revision_of(partition);
                self.held.remove(&partition);
                self.known.load_failed(partition, now);
                if let Some(revision) = revision {
                    self.free(partition, revision, epoch);
                }
            }
        }
    }

    /// Either another node has the partition, or an earlier own swap was stored without
    /// acknowledgement.
    fn confirm_refused(&mut self, partition: u8, found: &BucketEntry) {
        let owned = found
            .value
            .as_deref()
            .and_then(bucket_values::read::<OwnershipRecord>);
        let ours = owned.and_then(|owned| owned.holder()) == Some(self.shared.node.holder());
        match ours {
            true => self.known.moved(partition, found.revision),
            false => self.owner_found(partition, found),
        }
    }

    fn freed(&mut self, partition: u8, epoch: u64, swapped: Result<SwapOutcome, Error>, now: Duration) {
        let found = match swapped {
            Ok(SwapOutcome::Stored(revision)) => {
                self.held.remove(&partition);
                return self.known.released(partition, revision, now);
            }
            Ok(SwapOutcome::Refused(found)) => found,
            Err(e) => {
                tracing::debug!(partition, error = %e, "a partition could not be freed yet");
                if let Some(revision) = self
                    .known
                    .revision_of(partition)
                    .filter(|_| self.holds(partition, epoch))
                {
                    self.free(partition, revision, epoch);
                }
                return;
            }
        };
        let Some(found) = found else { return };
        let owned = found
            .value
            .as_deref()
            .and_then(bucket_values::read::<OwnershipRecord>);
        let ours = owned.and_then(|owned| owned.holder()) == Some(self.shared.node.holder());
        if ours && self.holds(partition, epoch) {
            return self.free(partition, found.revision, epoch);
        }
        self.owner_found(partition, &found);
        if self.holds(partition, epoch) {
            self.held.remove(&partition);
            self.known.released(partition, found.revision, now);
        }
    }

    /// Publishes the membership, and forgets nodes that have been away for long.
    fn show(&mut self, now: Duration) {
        let mut nodes = Vec::new();
        for (id, beat) in &self.beats {
            let standing = self.known.standing(*id).unwrap_or(NodeStatus::Left);
            let heard_at = self.known.heard_at(*id).unwrap_or_default();
            nodes.push(KnownNode {
                id: *id,
                name: beat.name.clone(),
                url: beat.url.clone(),
                version: beat.version.clone(),
                started: Timestamp::from_nanos(beat.started),
                heard_ago: now.saturating_sub(heard_at),
                heard_at,
                standing,
                partitions: match standing {
                    NodeStatus::Live | NodeStatus::Draining => beat.serves.keys().copied().collect(),
                    NodeStatus::Dead | NodeStatus::Left => Vec::new(),
                },
                counts: beat.counts,
                catalogue: beat.catalogue,
                report: beat.report.clone(),
            });
        }
        let ownership = |number: u8| {
            let owner = self.known.owner(number).map(|holder| holder.node);
            let beat = owner.and_then(|owner| self.beats.get(&owner));
            PartitionOwnership {
                number,
                owner,
                epoch: self.epochs[usize::from(number)],
                waiting: beat.and_then(|beat| beat.serves.get(&number).copied()),
            }
        };
        let partitions: Vec<PartitionOwnership> = (0..self.rules.partitions).map(ownership).collect();
        let mut counts = NodeCounts::default();
        for beat in self.beats.values() {
            counts.takeovers += beat.counts.takeovers;
            counts.fenced += beat.counts.fenced;
            counts.redelivered += beat.counts.redelivered;
            counts.forwarded += beat.counts.forwarded;
        }
        self.forget(&partitions);
        self.shared.membership.send_replace(Arc::new(Membership {
            nodes,
            partitions,
            counts,
        }));
        let drained = self.draining && self.is_empty();
        self.shared
            .drained
            .send_if_modified(|known| std::mem::replace(known, drained) != drained);
    }

    fn forget(&mut self, partitions: &[PartitionOwnership]) {
        if self.known.doing(0) != Some(HoldPhase::Serving) {
            return;
        }
        let owns = |id: NodeId| partitions.iter().any(|one| one.owner == Some(id));
        let long_gone = |id: &NodeId| {
            self.known
                .silent(*id)
                .is_some_and(|silent| silent >= FORGET_AFTER)
                && !owns(*id)
        };
        let gone: Vec<NodeId> = self.beats.keys().copied().filter(long_gone).collect();
        for id in gone {
            self.beats.remove(&id);
            let Some(revision) = self.known.node_revision(id) else {
                continue;
            };
            let bucket = self.bucket.clone();
            self.jobs.spawn(async move {
                // If the node has come back meanwhile, its key has another revision and stays.
                let _ = bucket.delete_if(&BucketKey::Node(id).to_string(), revision).await;
                LoopTaskOutcome::Forgotten
            });
        }
    }
}

/// Watches the bucket in a task of its own: starting a watch may take a while, and must not be
/// restarted whenever something else happens in the loop.
struct BucketWatch {
    found: mpsc::Receiver<BucketEntry>,
    _task: JoinSet<()>,
}

impl BucketWatch {
    fn start(bucket: &Bucket) -> BucketWatch {
        let (tell, found) = mpsc::channel(FOUND_WAITING_MAX);
        let bucket = bucket.clone();
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                match bucket.watch().await {
                    Ok(mut watch) => {
                        while let Some(found) = watch.next().await {
                            if tell.send(found).await.is_err() {
                                return;
                            }
                        }
                    }
                    Err(e) => tracing::debug!(error = %e, "the bucket cannot be watched yet"),
                }
                sleep(TRY_AGAIN).await;
            }
        });
        BucketWatch { found, _task: task }
    }
}
