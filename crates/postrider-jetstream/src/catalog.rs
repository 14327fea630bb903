//! The catalog in a stream, replicated to every node.

use crate::connection::NatsConnection;
use crate::membership::ChangeBarrier;
use crate::membership::lease::NodeLease;
use crate::replicated::{AppliedCommit, ByteReader, ReplicaLocation, Replicated, StateMachine, put_bytes};
use crate::sealer::ValueSealer;
use async_trait::async_trait;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use postrider_store::record::StoredRecord;
use postrider_store::record::batch::put;
use postrider_store::replica::{CatalogReplica, CatalogState};
use postrider_store::{Catalog, CatalogChange, CatalogContent, CatalogFollower, Error, Handshake};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::watch;

/// Ids are reserved in blocks, so that allocating one rarely needs a commit.
const ID_BLOCK: u64 = 1024;
/// Maximum time until the changes of other nodes are applied here.
const CATCH_UP_PATIENCE: Duration = Duration::from_secs(2);

/// The catalog of a cluster. Each node keeps all of it in memory.
pub struct JetStreamCatalog {
    replicated: Replicated<ReplicatedCatalog>,
    sealer: ValueSealer,
    /// The next id to allocate, and the end of the block reserved by this node.
    ids: Mutex<(u64, u64)>,
    reserving: tokio::sync::Mutex<()>,
    /// Number of catch-ups that have started.
    looks: AtomicU64,
    /// Number of the last catch-up that succeeded.
    caught_up: tokio::sync::Mutex<u64>,
    /// All changes of other nodes up to this sequence are applied here.
    applied: watch::Sender<u64>,
    /// Set when the engine has stopped: nobody acts on this catalog any more.
    retired: AtomicBool,
    /// The node's lease and change barrier, once it has joined the cluster.
    membership: OnceLock<(Arc<NodeLease>, ChangeBarrier)>,
}

impl JetStreamCatalog {
    /// `me` must differ from the number of every other node and of every earlier process of this
    /// node.
    pub async fn open(connection: &NatsConnection, me: u64) -> Result<JetStreamCatalog, Error> {
        JetStreamCatalog::open_at(ReplicaLocation::new(connection, "catalog"), me).await
    }

    /// Like `open`, with the log size at which a snapshot is written.
    pub async fn open_with(
        connection: &NatsConnection,
        me: u64,
        snapshot_bytes: u64,
    ) -> Result<JetStreamCatalog, Error> {
        let place = ReplicaLocation {
            snapshot_bytes,
            ..ReplicaLocation::new(connection, "catalog")
        };
        JetStreamCatalog::open_at(place, me).await
    }

    async fn open_at(place: ReplicaLocation, me: u64) -> Result<JetStreamCatalog, Error> {
        let sealer = place.connection.sealer.clone();
        let shared = ReplicatedCatalog {
            replica: CatalogReplica::default(),
            sealer: sealer.clone(),
        };
        Ok(JetStreamCatalog {
            replicated: Replicated::open(place, shared, me).await?,
            sealer,
            ids: Mutex::default(),
            reserving: tokio::sync::Mutex::default(),
            looks: AtomicU64::new(0),
            caught_up: tokio::sync::Mutex::default(),
            applied: watch::Sender::new(0),
            retired: AtomicBool::new(false),
            membership: OnceLock::new(),
        })
    }

    /// From now on the catalog is current while the lease is valid, and the barrier decides when
    /// changes are in force everywhere.
    pub(crate) fn join(&self, lease: Arc<NodeLease>, barrier: ChangeBarrier) {
        let _ = self.membership.set((lease, barrier));
    }

    /// Sequence of the last commit that is applied here together with all earlier ones. After the
    /// engine has stopped nothing waits to be applied.
    pub fn in_force(&self) -> u64 {
        let retired = self.retired.load(Relaxed);
        self.replicated.read_at(|shared, last| {
            let untold = shared.replica.oldest_unapplied().filter(|_| !retired);
            untold.map_or(last, |untold| untold - 1)
        })
    }

    /// Receivers that change whenever [`JetStreamCatalog::in_force`] may have increased.
    pub(crate) fn progress_receivers(&self) -> (watch::Receiver<u64>, watch::Receiver<u64>) {
        (self.replicated.last(), self.applied.subscribe())
    }

    /// Returns when everything stored before the call is applied here. [`Catalog::catch_up`] trusts
    /// the server that believes to lead the stream; this method makes an empty commit, which a
    /// replaced leader cannot.
    pub(crate) async fn confirm(&self) -> Result<(), Error> {
        let mut nothing = vec![RESERVE_IDS];
        put(&mut nothing, 0);
        self.replicated.commit(&[nothing], Vec::new()).await?;
        self.applied_in_time(self.sequence()).await
    }

    async fn applied_in_time(&self, sequence: u64) -> Result<(), Error> {
        let behind = "the catalogue: other nodes' changes are not in force here yet";
        tokio::time::timeout(CATCH_UP_PATIENCE, self.applied(sequence))
            .await
            .map_err(|_| Error::Unavailable(behind.into()))?
    }

    /// Sequence of the last commit known to this node. Decisions made now are based on this state
    /// or an older one.
    pub fn sequence(&self) -> u64 {
        self.replicated.read_at(|_, last| last)
    }

    /// Sequence of the last stored change of any node, according to the stream's leader.
    pub async fn head(&self) -> Result<u64, Error> {
        self.replicated.head().await
    }

    /// Waits until all changes of other nodes up to a sequence are applied here.
    pub async fn applied(&self, sequence: u64) -> Result<(), Error> {
        let mut last = self.replicated.last();
        let mut applied = self.applied.subscribe();
        loop {
            last.mark_unchanged();
            applied.mark_unchanged();
            if self.in_force() >= sequence {
                return Ok(());
            }
            if let Some(broken) = self.replicated.broken() {
                return Err(broken);
            }
            let moved = tokio::select! {
                moved = last.changed() => moved,
                moved = applied.changed() => moved,
            };
            moved.map_err(|_| Error::Closed)?;
        }
    }

    /// Why the catalog can neither be changed nor followed, if that is so.
    pub fn trouble(&self) -> Option<Error> {
        self.replicated.broken()
    }

    /// Whether there is such trouble; cheap enough to be called often.
    pub fn is_broken(&self) -> bool {
        self.replicated.is_broken()
    }

    /// Stops. Waiting commits are not made.
    pub async fn close(&self) {
        self.replicated.close().await;
    }

    fn reserved(&self) -> Option<u64> {
        let mut ids = self.ids.lock().expect("no panic holds it");
        let (next, end) = *ids;
        (next < end).then(|| {
            ids.0 += 1;
            next
        })
    }
}

#[async_trait]
impl Catalog for JetStreamCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        match self.replicated.broken() {
            Some(broken) => Err(broken),
            None => Ok(self.replicated.local(|shared| shared.replica.load())),
        }
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        let records: Vec<Vec<u8>> = changes
            .iter()
            .map(|change| encode(change, &self.sealer))
            .collect();
        self.replicated.commit(&records, changes).await?;
        Ok(())
    }

    async fn next_id(&self) -> Result<u64, Error> {
        loop {
            if let Some(id) = self.reserved() {
                return Ok(id);
            }
            let _one_at_a_time = self.reserving.lock().await;
            if let Some(id) = self.reserved() {
                return Ok(id);
            }
            let mut reserve = vec![RESERVE_IDS];
            put(&mut reserve, ID_BLOCK);
            let first = self.replicated.commit(&[reserve], Vec::new()).await?;
            *self.ids.lock().expect("no panic holds it") = (first, first + ID_BLOCK);
        }
    }

    async fn catch_up(&self) -> Result<(), Error> {
        let asked = self.looks.load(Relaxed);
        let mut caught_up = self.caught_up.lock().await;
        // A catch-up that another caller started after this call began is sufficient.
        if *caught_up > asked {
            return Ok(());
        }
        let look = self.looks.fetch_add(1, Relaxed) + 1;
        let head = self.replicated.catch_up().await?;
        self.applied_in_time(head).await?;
        *caught_up = look;
        Ok(())
    }

    fn is_current(&self) -> bool {
        let current = |(lease, _): &(Arc<NodeLease>, ChangeBarrier)| lease.valid_now();
        self.membership.get().is_none_or(current) && !self.is_broken() && !self.retired.load(Relaxed)
    }

    async fn in_force_everywhere(&self) -> Result<(), Error> {
        let Some((_, barrier)) = self.membership.get() else {
            return Ok(());
        };
        let version = self.sequence();
        self.applied_in_time(version).await?;
        barrier.wait(version).await
    }

    async fn follow(&self, follower: Arc<dyn CatalogFollower>) {
        let _ending = RetireOnDrop(self);
        self.replicated.local(|shared| shared.replica.follow());
        let mut last = self.replicated.last();
        loop {
            last.mark_unchanged();
            let next = self.replicated.read(|shared| shared.replica.next());
            if let Some((changes, sequence)) = next {
                follower.changed(changes, sequence).await;
                self.replicated.local(|shared| shared.replica.done());
                self.applied.send_replace(sequence);
            } else if last.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Marks the catalog as retired when the following engine stops: other nodes' changes need not wait
/// for a node that is shutting down.
struct RetireOnDrop<'c>(&'c JetStreamCatalog);

impl Drop for RetireOnDrop<'_> {
    fn drop(&mut self) {
        self.0.retired.store(true, Relaxed);
        self.0.applied.send_modify(|_| {});
    }
}

#[derive(Default)]
struct ReplicatedCatalog {
    replica: CatalogReplica,
    sealer: ValueSealer,
}

impl StateMachine for ReplicatedCatalog {
    type Draft = Vec<CatalogChange>;
    /// The first of the reserved ids.
    type Output = u64;
    const WHAT: &'static str = "catalogue";

    fn check(&self, draft: &Vec<CatalogChange>, me: u64) -> Result<(), Error> {
        self.replica.check(draft, me)
    }

    fn apply(&mut self, commit: AppliedCommit<'_>) -> Result<u64, String> {
        let mut changes = Vec::with_capacity(commit.records.len());
        let mut first = 0;
        for record in commit.records {
            match decode(record, &self.sealer)? {
                CatalogStreamRecord::Change(change) => changes.push(*change),
                CatalogStreamRecord::ReserveIds(count) => first = self.replica.resources.allocate_ids(count),
            }
        }
        self.replica
            .apply(changes, commit.by, commit.known_here, commit.sequence);
        Ok(first)
    }

    fn snapshot(&self, out: &mut Vec<u8>) {
        put(out, self.replica.resources.ids_allocated());
        for change in self.replica.resources.all() {
            put_bytes(out, &encode(&change, &self.sealer));
        }
    }

    fn restore(&mut self, bytes: &[u8], sequence: u64) -> Result<(), String> {
        let mut rest = ByteReader(bytes);
        let cut_short = || "it is cut short".to_owned();
        let mut resources = CatalogState::default();
        resources.skip_ids(rest.number().ok_or_else(cut_short)?);
        while !rest.0.is_empty() {
            let record = rest.bytes().ok_or_else(cut_short)?;
            if let CatalogStreamRecord::Change(change) = decode(record, &self.sealer)? {
                // A snapshot does not contain the authors.
                resources.apply(*change, 0);
            }
        }
        self.replica.replace(resources, sequence);
        Ok(())
    }
}

const PUT_TOPIC: u8 = 1;
const DELETE_TOPIC: u8 = 2;
const PUT_DOMAIN_TOPIC: u8 = 3;
const DELETE_DOMAIN_TOPIC: u8 = 4;
const PUT_SUBSCRIPTION: u8 = 5;
const DELETE_SUBSCRIPTION: u8 = 6;
const PUT_ENDPOINT_DELAY: u8 = 7;
const DELETE_ENDPOINT_DELAY: u8 = 8;
const PUT_HANDSHAKE: u8 = 9;
const DELETE_HANDSHAKE: u8 = 10;
const RESERVE_IDS: u8 = 11;

/// A decoded record.
enum CatalogStreamRecord {
    Change(Box<CatalogChange>),
    /// Reserves this many ids.
    ReserveIds(u64),
}

/// Location that a sealed record is authenticated with.
fn place(kind: u8) -> String {
    format!("catalogue.{kind}")
}

fn encode(change: &CatalogChange, sealer: &ValueSealer) -> Vec<u8> {
    let whole = |kind: u8, record: Vec<u8>| -> Vec<u8> {
        let mut out = vec![kind];
        out.extend(sealer.close(&place(kind), record));
        out
    };
    fn number(kind: u8, number: u64) -> Vec<u8> {
        let mut out = vec![kind];
        put(&mut out, number);
        out
    }
    fn text(mut out: Vec<u8>, text: &str) -> Vec<u8> {
        out.extend_from_slice(text.as_bytes());
        out
    }
    match change {
        CatalogChange::PutTopic(one) => whole(PUT_TOPIC, one.encode()),
        CatalogChange::DeleteTopic(id) => number(DELETE_TOPIC, id.0),
        CatalogChange::PutDomainTopic(one) => whole(PUT_DOMAIN_TOPIC, one.encode()),
        CatalogChange::DeleteDomainTopic(domain, name) => text(number(DELETE_DOMAIN_TOPIC, domain.0), name),
        CatalogChange::PutSubscription(one) => whole(PUT_SUBSCRIPTION, one.encode()),
        CatalogChange::DeleteSubscription(id) => number(DELETE_SUBSCRIPTION, id.0),
        CatalogChange::PutEndpointDelay(one) => whole(PUT_ENDPOINT_DELAY, one.encode()),
        CatalogChange::DeleteEndpointDelay(endpoint) => text(vec![DELETE_ENDPOINT_DELAY], endpoint),
        CatalogChange::PutHandshake(one) => whole(PUT_HANDSHAKE, one.encode()),
        CatalogChange::DeleteHandshake(operation) => text(vec![DELETE_HANDSHAKE], operation),
    }
}

/// The error describes the problem without revealing any content.
fn decode(record: &[u8], sealer: &ValueSealer) -> Result<CatalogStreamRecord, String> {
    fn whole<T: StoredRecord>(sealer: &ValueSealer, kind: u8, bytes: &[u8]) -> Result<T, String> {
        let opened = sealer.open(&place(kind), bytes)?;
        T::decode(&opened).map_err(|e| e.to_string())
    }
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err("a name is no text".to_owned()),
    };
    let mut rest = ByteReader(record);
    let kind = rest.byte().ok_or("a record is empty")?;
    let bytes = rest.0;
    let mut number = || rest.number().ok_or_else(|| "a number is missing".to_owned());
    let change = match kind {
        PUT_TOPIC => CatalogChange::PutTopic(whole::<Topic>(sealer, kind, bytes)?),
        DELETE_TOPIC => CatalogChange::DeleteTopic(TopicId(number()?)),
        PUT_DOMAIN_TOPIC => CatalogChange::PutDomainTopic(whole::<DomainTopic>(sealer, kind, bytes)?),
        DELETE_DOMAIN_TOPIC => {
            let domain = TopicId(number()?);
            CatalogChange::DeleteDomainTopic(domain, text(rest.0)?)
        }
        PUT_SUBSCRIPTION => CatalogChange::PutSubscription(whole::<Subscription>(sealer, kind, bytes)?),
        DELETE_SUBSCRIPTION => CatalogChange::DeleteSubscription(SubscriptionId(number()?)),
        PUT_ENDPOINT_DELAY => CatalogChange::PutEndpointDelay(whole::<EndpointDelay>(sealer, kind, bytes)?),
        DELETE_ENDPOINT_DELAY => CatalogChange::DeleteEndpointDelay(text(bytes)?),
        PUT_HANDSHAKE => CatalogChange::PutHandshake(whole::<Handshake>(sealer, kind, bytes)?),
        DELETE_HANDSHAKE => CatalogChange::DeleteHandshake(text(bytes)?),
        RESERVE_IDS => return Ok(CatalogStreamRecord::ReserveIds(number()?)),
        other => return Err(format!("a record is of the unknown kind {other}")),
    };
    Ok(CatalogStreamRecord::Change(Box::new(change)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ids::Secret;
    use postrider_store::seal::Keyring;

    const A: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    const B: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";

    fn sealer(keys: &str) -> ValueSealer {
        ValueSealer::new(Some(Arc::new(Keyring::parse(keys, "secrets.key").unwrap())))
    }

    fn topic(key: &str) -> Topic {
        Topic::custom(TopicId(1), "orders", [Secret::new(key), Secret::new("other")])
    }

    fn opened(record: &[u8], sealer: &ValueSealer) -> Result<Topic, String> {
        match decode(record, sealer)? {
            CatalogStreamRecord::Change(change) => match *change {
                CatalogChange::PutTopic(topic) => Ok(topic),
                _ => panic!("another change"),
            },
            CatalogStreamRecord::ReserveIds(_) => panic!("no change"),
        }
    }

    #[test]
    fn records_are_sealed_where_keys_are_configured() {
        let change = CatalogChange::PutTopic(topic("topic-key-1"));
        let holds_key = |record: &[u8]| record.windows(11).any(|part| part == b"topic-key-1");
        let (plain, sealed) = (
            encode(&change, &ValueSealer::default()),
            encode(&change, &sealer(A)),
        );
        assert!(holds_key(&plain) && !holds_key(&sealed));
        assert_eq!(opened(&sealed, &sealer(A)), Ok(topic("topic-key-1")));
        assert_eq!(opened(&plain, &sealer(A)), Ok(topic("topic-key-1")), "of before");
        // A key that precedes another one in the list can coexist with it: the other one still
        // opens its records.
        assert_eq!(
            opened(&sealed, &sealer(&format!("{B},{A}"))),
            Ok(topic("topic-key-1"))
        );
        let refused = opened(&sealed, &sealer(B)).unwrap_err();
        assert!(
            refused.contains("secrets.key") && refused.contains("put the key back"),
            "{refused}"
        );
        let refused = opened(&sealed, &ValueSealer::default()).unwrap_err();
        assert!(
            refused.contains("secrets.key_file is set: give every node"),
            "{refused}"
        );
        // A record cannot be opened as one of another kind.
        let mut moved = sealed.clone();
        moved[0] = PUT_SUBSCRIPTION;
        assert!(decode(&moved, &sealer(A)).is_err());
    }

    #[test]
    fn a_snapshot_is_sealed_and_seals_what_was_not() {
        let plain = encode(
            &CatalogChange::PutTopic(topic("topic-key-1")),
            &ValueSealer::default(),
        );
        let mut shared = ReplicatedCatalog {
            sealer: sealer(A),
            ..ReplicatedCatalog::default()
        };
        let commit = AppliedCommit {
            records: &[&plain],
            by: 1,
            known_here: false,
            sequence: 1,
        };
        shared.apply(commit).unwrap();
        let mut written = Vec::new();
        shared.snapshot(&mut written);
        assert!(!written.windows(11).any(|part| part == b"topic-key-1"));
        shared.restore(&written, 1).unwrap();
        assert_eq!(shared.replica.load().topics, [topic("topic-key-1")]);
        let mut stranger = ReplicatedCatalog {
            sealer: sealer(B),
            ..ReplicatedCatalog::default()
        };
        assert!(stranger.restore(&written, 1).unwrap_err().contains("secrets.key"));
    }
}
