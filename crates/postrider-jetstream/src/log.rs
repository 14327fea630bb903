//! The event log of a node: the partitions that it owns.

use crate::catalog::JetStreamCatalog;
use crate::connection::NatsConnection;
use crate::node::NodeShared;
use crate::partition::deliveries::ListenerNotice;
use crate::partition::{ClaimBudget, ClaimStop, Partition, QueuedAppends, ReadMessages, partition_of};
use async_trait::async_trait;
use futures_util::future::join_all;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::Timestamp;
use postrider_store::{
    Backlog, Claim, ClaimLimits, DeadLetterKey, Error, EventLog, LogHealth, LogListener, PendingDeadLetter,
    PendingDeadLetters, Settlement,
};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::Duration;

/// Number of retries or dead letters that are read together.
const PAGE: usize = 1024;
/// Publish requests join waiting ones until those have this many bytes.
const FILL_BYTES: usize = 64 << 10;
/// After this many bytes another partition becomes the preferred one.
const TURN_BYTES: usize = 1 << 20;
/// Number of closed subscriptions that are remembered, in order to close them in partitions taken
/// later.
const CLOSED_REMEMBERED_MAX: usize = 16_384;

/// Accepts events that are published to a node without a partition.
#[async_trait]
pub trait ForwardAppend: Send + Sync {
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error>;
}

/// A forwarder without other nodes, which refuses all events.
pub struct NoForwarding;

#[async_trait]
impl ForwardAppend for NoForwarding {
    async fn append(&self, _batch: PublishedBatch) -> Result<Position, Error> {
        Err(Error::Unavailable("this node owns no partition".into()))
    }
}

type Partitions = Arc<[Arc<Partition>]>;

/// The partitions of a node as one log. The order of publishing holds within each partition.
pub struct JetStreamLog {
    identity: u64,
    connection: NatsConnection,
    shared: Arc<NodeShared>,
    forward: Arc<dyn ForwardAppend>,
    /// The catalog that events are routed by.
    catalog: OnceLock<Arc<JetStreamCatalog>>,
    /// Ordered by number.
    partitions: RwLock<Partitions>,
    turn: AtomicUsize,
    /// Bytes of all accepted requests, which determine the preferred partition.
    appended: AtomicUsize,
    first: AtomicUsize,
    closed_subscriptions: RwLock<VecDeque<SubscriptionId>>,
    closed: AtomicBool,
}

impl JetStreamLog {
    /// A log without a partition. `identity` is the cluster's number.
    pub fn new(
        connection: NatsConnection,
        identity: u64,
        shared: Arc<NodeShared>,
        forward: Arc<dyn ForwardAppend>,
    ) -> JetStreamLog {
        JetStreamLog {
            identity,
            connection,
            shared,
            forward,
            catalog: OnceLock::new(),
            partitions: RwLock::new(Arc::new([])),
            turn: AtomicUsize::new(0),
            appended: AtomicUsize::new(0),
            first: AtomicUsize::new(0),
            closed_subscriptions: RwLock::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Refuses events once this catalog cannot be followed any more, because they would be routed
    /// by an outdated state.
    pub fn set_routing_catalog(&self, catalog: Arc<JetStreamCatalog>) {
        let _ = self.catalog.set(catalog);
    }

    pub fn shared(&self) -> &Arc<NodeShared> {
        &self.shared
    }

    pub fn partitions(&self) -> Arc<[Arc<Partition>]> {
        self.partitions.read().expect("no panic holds it").clone()
    }

    pub fn partition(&self, number: u8) -> Option<Arc<Partition>> {
        let partitions = self.partitions();
        partitions.iter().find(|one| one.number() == number).cloned()
    }

    fn edit(&self, edit: impl FnOnce(&mut Vec<Arc<Partition>>)) {
        let mut partitions = self.partitions.write().expect("no panic holds it");
        let mut all = partitions.to_vec();
        edit(&mut all);
        all.sort_by_key(|one| one.number());
        *partitions = all.into();
    }

    /// Begins to serve a partition. The listener is told what waits in it.
    pub fn add(&self, partition: Partition) -> Arc<Partition> {
        let partition = Arc::new(partition);
        let closed = self
            .closed_subscriptions
            .read()
            .expect("no panic holds it")
            .clone();
        partition.forget(closed);
        let (waiting, due, letters) = {
            let book = partition.book();
            let waiting: Vec<(SubscriptionId, usize)> = book.busy().collect();
            let letters = book.letters_waiting().next().is_some();
            (waiting, book.next_due().is_some(), letters)
        };
        self.edit(|all| {
            all.retain(|other| other.number() != partition.number());
            all.push(partition.clone());
        });
        self.shared.tell(|listener| {
            for (of, count) in waiting {
                listener.ready(of, count);
            }
            if due {
                listener.due_changed();
            }
            if letters {
                listener.dead_letters_added();
            }
        });
        partition
    }

    /// Stops serving a partition without changing it. The owner may still release it.
    pub fn remove(&self, number: u8) -> Option<Arc<Partition>> {
        let partition = self.partition(number)?;
        partition.retire();
        self.edit(|all| all.retain(|other| other.number() != number));
        Some(partition)
    }

    /// Hands a partition over in an orderly way: nothing more is claimed, attempts under way get
    /// `patience`, and then everything is recorded for the next owner.
    pub async fn hand_over(&self, number: u8, patience: Duration) -> Result<(), Error> {
        let Some(partition) = self.partition(number) else {
            return Ok(());
        };
        partition.retire();
        // Claims that are not settled by then are offered again by the next owner.
        let _ = tokio::time::timeout(patience, partition.settled()).await;
        self.remove(number);
        partition.release().await
    }

    /// Subscriptions with deliveries here that do not exist any more.
    pub fn unknown_subscriptions(&self, exists: impl Fn(SubscriptionId) -> bool) -> Vec<SubscriptionId> {
        let mut strays = BTreeSet::new();
        for partition in self.partitions().iter() {
            let book = partition.book();
            strays.extend(book.subs.keys().filter(|of| !exists(**of)));
        }
        strays.into_iter().collect()
    }

    /// Appends to a partition of this node, never to another node's.
    pub async fn append_here(&self, batch: PublishedBatch) -> Result<Position, Error> {
        self.check_taking_in()?;
        let Some(partition) = self.choose(batch.body.len()) else {
            // A full partition returns the specific reason.
            return match self.partitions().iter().find(|one| one.is_full()) {
                Some(full) => full.append(batch).await,
                None => NoForwarding.append(batch).await,
            };
        };
        partition.append(batch).await
    }

    /// The partition that a request of this size is appended to.
    fn choose(&self, bytes: usize) -> Option<Arc<Partition>> {
        let partitions = self.partitions();
        let open: Vec<&Arc<Partition>> = partitions.iter().filter(|one| one.takes_in()).collect();
        let waiting: Vec<QueuedAppends> = open.iter().map(|one| one.waiting()).collect();
        let before = self.appended.fetch_add(bytes, Relaxed);
        let is_much = before / TURN_BYTES != before.wrapping_add(bytes) / TURN_BYTES;
        // If no requests wait that this one could join, the partitions take turns.
        let first = match is_much || waiting.iter().all(|one| one.bytes == 0) {
            true => self.first.fetch_add(1, Relaxed).wrapping_add(1),
            false => self.first.load(Relaxed),
        };
        Some(open[choose(&waiting, first)?].clone())
    }

    fn check_taking_in(&self) -> Result<(), Error> {
        self.check_open()?;
        if let Some(catalog) = self.catalog.get().filter(|catalog| catalog.is_broken()) {
            let why = catalog.trouble().map_or_else(String::new, |why| why.to_string());
            return Err(Error::Unavailable(why));
        }
        let lease = &self.shared.lease;
        // Do not let publishers wait for servers that have been away for a while.
        if lease.valid() || (lease.takes_in() && self.connection.is_connected()) {
            return Ok(());
        }
        Err(Error::Unavailable("this node's lease has run out".into()))
    }

    /// Whether events can be accepted here.
    pub fn accepts_events(&self) -> bool {
        self.check_taking_in().is_ok() && self.partitions().iter().any(|one| one.takes_in())
    }

    fn check(&self) -> Result<(), Error> {
        if self.closed.load(Relaxed) {
            return Err(Error::Closed);
        }
        if !self.shared.lease.valid() {
            return Err(Error::Unavailable("this node's lease has run out".into()));
        }
        Ok(())
    }

    fn check_open(&self) -> Result<(), Error> {
        match self.closed.load(Relaxed) {
            true => Err(Error::Closed),
            false => Ok(()),
        }
    }

    fn tell(&self, changed: ListenerNotice) {
        self.shared.tell(|listener| {
            if changed.due {
                listener.due_changed();
            }
            if changed.letters {
                listener.dead_letters_added();
            }
        });
    }

    /// Claims due retries of all partitions in the order of their due times. Returns false if there
    /// are more that must not be overtaken.
    async fn claim_due(
        &self,
        partitions: &[Arc<Partition>],
        of: SubscriptionId,
        now: Timestamp,
        left: &mut ClaimBudget,
        claims: &mut Vec<Claim>,
    ) -> Result<bool, Error> {
        let mut read: FxHashMap<u8, ReadMessages> = FxHashMap::default();
        loop {
            let max = left.events().min(PAGE);
            let mut due: Vec<(Timestamp, Position)> = Vec::new();
            // A partition may be given up while another one is read: nothing more is claimed from
            // it.
            for partition in partitions.iter().filter(|one| one.is_open()) {
                // Ask for one even without room, because it must not be overtaken.
                due.extend(partition.book().due_of(of, now, max.max(1)));
            }
            if due.is_empty() {
                return Ok(true);
            }
            if max == 0 {
                return Ok(false);
            }
            due.sort_unstable();
            due.truncate(max);
            let mut unread = None;
            for key in &due {
                let Some(partition) = owner(partitions, key.1) else {
                    continue;
                };
                let read = read.entry(partition.number()).or_default();
                match partition.claim_retry(of, *key, left, read, claims) {
                    ClaimStop::Empty => {}
                    ClaimStop::Full => return Ok(false),
                    ClaimStop::Unread => {
                        unread = Some(partition);
                        break;
                    }
                }
            }
            if let Some(partition) = unread {
                if !claims.is_empty() {
                    return Ok(false);
                }
                let positions: Vec<Position> = due
                    .iter()
                    .map(|(_, position)| *position)
                    .filter(|position| partition_of(*position) == partition.number())
                    .collect();
                partition
                    .read(&positions, read.entry(partition.number()).or_default())
                    .await?;
            }
        }
    }

    async fn claim_waiting(
        &self,
        partitions: &[Arc<Partition>],
        of: SubscriptionId,
        left: &mut ClaimBudget,
        claims: &mut Vec<Claim>,
    ) -> Result<(), Error> {
        let turn = self.turn.fetch_add(1, Relaxed);
        let mut trouble = None;
        for n in 0..partitions.len() {
            let partition = &partitions[(turn + n) % partitions.len()];
            let mut read = ReadMessages::default();
            loop {
                match partition.claim_waiting(of, left, &read, claims) {
                    ClaimStop::Empty => break,
                    ClaimStop::Full => return Ok(()),
                    ClaimStop::Unread if !claims.is_empty() => return Ok(()),
                    ClaimStop::Unread => {
                        if let Err(e) = partition.read(&partition.waiting_of(of), &mut read).await {
                            trouble = Some(e);
                            break;
                        }
                    }
                }
            }
        }
        match trouble {
            Some(e) if claims.is_empty() => Err(e),
            _ => Ok(()),
        }
    }
}

/// The first partition from `turn` on with room in its waiting group, so that requests share
/// messages: separate messages would cost JetStream and its disk far more. Otherwise the one with
/// the least bytes.
fn choose(waiting: &[QueuedAppends], turn: usize) -> Option<usize> {
    let count = waiting.len();
    let in_turn = || (0..count).map(|n| (turn % count + n) % count);
    let has_room = |at: &usize| !waiting[*at].stuck && waiting[*at].bytes < FILL_BYTES;
    let least = || in_turn().min_by_key(|at| (waiting[*at].stuck, waiting[*at].bytes));
    in_turn().find(has_room).or_else(least)
}

fn owner(partitions: &[Arc<Partition>], position: Position) -> Option<&Arc<Partition>> {
    let number = partition_of(position);
    partitions.iter().find(|one| one.number() == number)
}

/// Groups items by partition, ordered by partition.
fn by_partition<T>(all: Vec<T>, position: impl Fn(&T) -> Position) -> BTreeMap<u8, Vec<T>> {
    let mut by: BTreeMap<u8, Vec<T>> = BTreeMap::new();
    for one in all {
        by.entry(partition_of(position(&one))).or_default().push(one);
    }
    by
}

#[async_trait]
impl EventLog for JetStreamLog {
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        self.check_taking_in()?;
        match self.choose(batch.body.len()) {
            Some(partition) => partition.append(batch).await,
            None => self.forward.append(batch).await,
        }
    }

    async fn claim(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<Claim>, Error> {
        self.check()?;
        let mut claims = Vec::new();
        if want.events_max == 0 {
            return Ok(claims);
        }
        let partitions = self.partitions();
        let open: Vec<Arc<Partition>> = partitions.iter().filter(|one| one.is_open()).cloned().collect();
        let mut left = ClaimBudget::new(want);
        if self.claim_due(&open, of, now, &mut left, &mut claims).await? {
            self.claim_waiting(&open, of, &mut left, &mut claims).await?;
        }
        // The lease may have expired during the reads above.
        if !claims.is_empty() && !self.shared.lease.valid() {
            self.release(of, claims);
            return Err(Error::Unavailable("this node's lease has run out".into()));
        }
        Ok(claims)
    }

    async fn settle(&self, of: SubscriptionId, settled: Vec<Settlement>) -> Result<(), Error> {
        self.check_open()?;
        let partitions = self.partitions();
        let mut all = ListenerNotice::default();
        for (number, settled) in by_partition(settled, |one| one.claim.position()) {
            let Some(partition) = partitions.iter().find(|one| one.number() == number) else {
                self.shared
                    .counters
                    .fenced
                    .fetch_add(settled.len() as u64, Relaxed);
                continue;
            };
            let changed = partition.settle(of, &settled).await;
            all.due |= changed.due;
            all.letters |= changed.letters;
        }
        self.tell(all);
        Ok(())
    }

    fn owns_position(&self, position: Position) -> bool {
        owner(&self.partitions(), position).is_some()
    }

    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error> {
        self.check_open()?;
        let partitions = self.partitions();
        let order: Vec<Position> = waiting.iter().map(|(_, position)| *position).collect();
        let mut ended = BTreeSet::new();
        let mut all = ListenerNotice::default();
        for (number, waiting) in by_partition(waiting, |(_, position)| *position) {
            if let Some(partition) = partitions.iter().find(|one| one.number() == number) {
                let (some, changed) = partition.withdraw(of, &waiting);
                ended.extend(some);
                all.due |= changed.due;
            }
        }
        self.tell(all);
        // In the order of the request, each position once.
        Ok(order
            .into_iter()
            .filter(|position| ended.remove(position))
            .collect())
    }

    async fn flush(&self) -> Result<(), Error> {
        self.check_open()?;
        let partitions = self.partitions();
        let flushed = join_all(partitions.iter().map(|one| one.flush())).await;
        flushed.into_iter().collect()
    }

    fn release(&self, of: SubscriptionId, claims: Vec<Claim>) {
        let partitions = self.partitions();
        for (number, claims) in by_partition(claims, Claim::position) {
            if let Some(partition) = partitions.iter().find(|one| one.number() == number) {
                partition.put_back(of, &claims);
            }
        }
    }

    fn pending_dead_letters(&self) -> Vec<PendingDeadLetters> {
        let mut all: BTreeMap<SubscriptionId, PendingDeadLetters> = BTreeMap::new();
        for partition in self.partitions().iter() {
            for waiting in partition.book().letters_waiting() {
                let known = all
                    .entry(waiting.of)
                    .or_insert(PendingDeadLetters { count: 0, ..waiting });
                known.count += waiting.count;
                known.oldest = known.oldest.min(waiting.oldest);
            }
        }
        all.into_values().collect()
    }

    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        self.check()?;
        let partitions = self.partitions();
        let mut left = ClaimBudget::new(want);
        let mut found: Vec<PendingDeadLetter> = Vec::new();
        let mut read: FxHashMap<u8, ReadMessages> = FxHashMap::default();
        let mut has_read = false;
        loop {
            let max = left.events().min(PAGE);
            let after = found.last().map(PendingDeadLetter::key).or(after);
            let mut page = Vec::new();
            for partition in partitions.iter().filter(|one| one.is_open()) {
                page.extend(partition.book().letters_of(of, after, until, max));
            }
            page.sort_unstable_by_key(|(key, _)| *key);
            page.truncate(max);
            if page.is_empty() {
                return Ok(found);
            }
            let mut unread = None;
            for (key, letter) in &page {
                let Some(partition) = owner(&partitions, key.1) else {
                    continue;
                };
                let read = read.entry(partition.number()).or_default();
                let Some(letter) = partition.letter(*key, letter, read) else {
                    unread = Some(partition);
                    break;
                };
                if !left.fits(letter.object().len()) {
                    return Ok(found);
                }
                found.push(letter);
            }
            let Some(partition) = unread else { continue };
            // Use what was read before more is read.
            if has_read && !found.is_empty() {
                return Ok(found);
            }
            has_read = true;
            let after = found.last().map(PendingDeadLetter::key);
            let positions: Vec<Position> = page
                .iter()
                .filter(|(key, _)| Some(*key) > after && partition_of(key.1) == partition.number())
                .map(|(key, _)| key.1)
                .collect();
            partition
                .read(&positions, read.entry(partition.number()).or_default())
                .await?;
        }
    }

    async fn dead_letters_done(&self, of: SubscriptionId, letters: Vec<DeadLetterKey>) -> Result<(), Error> {
        self.check_open()?;
        let partitions = self.partitions();
        let mut done = Vec::new();
        for (number, keys) in by_partition(letters, |key| key.1) {
            if let Some(partition) = partitions.iter().find(|one| one.number() == number) {
                done.push(async move { partition.letters_done(of, &keys).await });
            }
        }
        join_all(done).await.into_iter().collect()
    }

    fn next_due(&self) -> Option<Timestamp> {
        let partitions = self.partitions();
        let open = partitions.iter().filter(|one| one.is_open());
        open.filter_map(|one| one.book().next_due()).min()
    }

    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp> {
        let partitions = self.partitions();
        let open = partitions.iter().filter(|one| one.is_open());
        open.filter_map(|one| one.book().next_due_after(after)).min()
    }

    fn due(&self, now: Timestamp) -> Vec<SubscriptionId> {
        let mut due = BTreeSet::new();
        for partition in self.partitions().iter().filter(|one| one.is_open()) {
            due.extend(partition.book().due(now));
        }
        due.into_iter().collect()
    }

    /// The first event that matches a subscription opens it.
    async fn open_subscription(&self, _of: SubscriptionId) -> Result<(), Error> {
        self.check_open()
    }

    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        self.check_open()?;
        {
            let mut closed = self.closed_subscriptions.write().expect("no panic holds it");
            closed.push_back(of);
            if closed.len() > CLOSED_REMEMBERED_MAX {
                closed.pop_front();
            }
        }
        let partitions = self.partitions();
        let closed = join_all(partitions.iter().map(|one| one.close_subscription(of))).await;
        let mut dropped = 0;
        for one in closed {
            dropped += one?;
        }
        Ok(dropped)
    }

    fn subscriptions(&self) -> Vec<SubscriptionId> {
        let mut busy = BTreeSet::new();
        for partition in self.partitions().iter() {
            busy.extend(partition.book().busy().map(|(of, _)| of));
        }
        busy.into_iter().collect()
    }

    fn backlog(&self, of: SubscriptionId) -> Backlog {
        let mut all = Backlog::default();
        for partition in self.partitions().iter() {
            let one = partition.book().backlog(of);
            all.waiting += one.waiting;
            all.claimed += one.claimed;
            all.retrying += one.retrying;
            all.oldest = [all.oldest, one.oldest].into_iter().flatten().min();
        }
        all
    }

    fn health(&self) -> LogHealth {
        let partitions = self.partitions();
        let counters = &self.shared.counters;
        let refusing = if !self.connection.is_connected() {
            Some("there is no connection to JetStream".into())
        } else if !self.shared.lease.valid() {
            Some("this node's lease has run out".into())
        } else {
            None
        };
        LogHealth {
            refusing,
            corrupt: self.shared.corrupt(),
            corrupt_records: counters.corrupt_records.load(Relaxed),
            corrupt_deliveries: counters.corrupt_deliveries.load(Relaxed),
            lost: Vec::new(),
            unrecorded: None,
            redelivered: counters.redelivered.load(Relaxed),
            segments: partitions
                .iter()
                .map(|one| one.book().chunks.0.len() as u64)
                .sum(),
            bytes: partitions.iter().map(|one| one.book().event_bytes()).sum(),
        }
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn listen(&self, listener: Arc<dyn LogListener>) {
        // Only the first listener counts; later ones are ignored.
        let _ = self.shared.listener.set(listener);
    }

    fn as_movable(&self) -> Option<&dyn postrider_store::moving::MovableLog> {
        Some(self)
    }

    async fn close(&self) -> Result<(), Error> {
        self.closed.store(true, Relaxed);
        let partitions = self.partitions();
        let released = join_all(partitions.iter().map(|one| one.release())).await;
        self.edit(Vec::clear);
        released.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_go_together_where_there_is_room() {
        let waiting = |all: &[(usize, bool)]| -> Vec<QueuedAppends> {
            all.iter()
                .map(|(bytes, stuck)| QueuedAppends {
                    bytes: *bytes,
                    stuck: *stuck,
                })
                .collect()
        };
        let check = |all: &[(usize, bool)], turn, expected| {
            assert_eq!(choose(&waiting(all), turn), expected, "{all:?}")
        };
        let full = FILL_BYTES;
        check(&[], 0, None);
        check(&[(0, false), (0, false), (0, false)], 0, Some(0));
        check(&[(0, false), (0, false), (0, false)], 5, Some(2));
        check(&[(full - 1, false), (0, false)], 0, Some(0));
        check(&[(full, false), (9, false), (0, false)], 0, Some(1));
        // A stuck partition gets no more than those that make progress.
        check(&[(1, true), (9, false), (0, false)], 0, Some(1));
        check(&[(full + 2, false), (full + 1, false), (1, true)], 0, Some(1));
        check(&[(3, true), (1, true), (2, true)], 0, Some(1));
    }
}
