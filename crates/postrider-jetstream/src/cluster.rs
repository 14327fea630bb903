//! A node of a cluster with all of its parts.

use crate::archive::JetStreamArchive;
use crate::bucket::{Bucket, SwapOutcome};
use crate::catalog::JetStreamCatalog;
use crate::cluster_facts::{self, ClusterFacts, FORMAT};
use crate::connection::{JetStreamSettings, NatsConnection};
use crate::forward::{self, Forwarder};
use crate::health::JetStreamHealth;
use crate::log::JetStreamLog;
use crate::membership::decide::MembershipRules;
use crate::membership::{MembershipHandle, MembershipService, NodeId, NodeInfo};
use crate::migration::Migration;
use crate::node::NodeShared;
use crate::partition::PARTITIONS_MAX;
use crate::peer_requests::PeerMessenger;
use async_nats::{Request, RequestErrorKind};
use bytes::Bytes;
use postrider_core::ids::Secret;
use postrider_store::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Lower bound of the lease: heartbeats must get through within it.
const LEASE_MIN: Duration = Duration::from_secs(1);
const LEASE_MAX: Duration = Duration::from_secs(300);
const PREFIX_MAX: usize = 32;
/// Time that another node has to confirm a request.
const DRAIN_PATIENCE: Duration = Duration::from_secs(2);

/// Everything that a node keeps in JetStream, and its membership in the cluster.
pub struct JetStreamCluster {
    pub log: Arc<JetStreamLog>,
    pub catalog: Arc<JetStreamCatalog>,
    pub archive: Arc<JetStreamArchive>,
    pub members: Arc<MembershipService>,
    pub asker: Arc<PeerMessenger>,
    pub health: Arc<JetStreamHealth>,
    pub facts: ClusterFacts,
    pub connection: NatsConnection,
    bucket: Bucket,
    stop: CancellationToken,
    tasks: Mutex<Option<JoinSet<()>>>,
}

/// Whether a node may serve the cluster; the process that migrates the cluster always may.
async fn check_moving(bucket: &Bucket, moving: bool) -> Result<(), Error> {
    match Migration::read(bucket).await? {
        Some(migration) if !moving => Err(migration.refusal()),
        _ => Ok(()),
    }
}

impl JetStreamCluster {
    /// Joins the cluster of the settings, and creates it if there is none. From then on the node
    /// takes partitions as they are assigned to it.
    pub async fn open(settings: JetStreamSettings, node: NodeInfo) -> Result<JetStreamCluster, Error> {
        JetStreamCluster::open_for(settings, node, false).await
    }

    /// Like `open`, for the process that migrates the cluster: no other node serves it meanwhile.
    pub async fn open_moving(settings: JetStreamSettings, node: NodeInfo) -> Result<JetStreamCluster, Error> {
        JetStreamCluster::open_for(settings, node, true).await
    }

    async fn open_for(
        settings: JetStreamSettings,
        node: NodeInfo,
        moving: bool,
    ) -> Result<JetStreamCluster, Error> {
        check(&settings).map_err(|why| Error::Corrupt(format!("store.jetstream.{why}")))?;
        let connection = NatsConnection::open(&settings, &node.name).await?;
        let bucket = Bucket::open(&connection).await?;
        check_moving(&bucket, moving).await?;
        let new = ClusterFacts {
            format: FORMAT,
            partitions: settings.partitions,
            identity: identity(node.process),
            created: node.started,
        };
        let facts = ClusterFacts::agree(&bucket, new).await?;
        let catalog = Arc::new(JetStreamCatalog::open(&connection, node.process).await?);
        let archive = Arc::new(JetStreamArchive::open(&connection, node.process).await?);
        let handle = MembershipHandle::new(node);
        let shared = NodeShared::new(handle.node().name.clone(), handle.lease());
        let forwarder = Forwarder::new(connection.clone(), handle.clone(), catalog.clone());
        let log = JetStreamLog::new(connection.clone(), facts.identity, shared, Arc::new(forwarder));
        log.set_routing_catalog(catalog.clone());
        let log = Arc::new(log);
        let asker = PeerMessenger::new(connection.clone(), handle.clone());
        let rules = MembershipRules {
            lease: settings.lease,
            partitions: facts.partitions,
        };
        let id = handle.node().id;
        let members =
            MembershipService::join(&connection, &bucket, rules, handle, log.clone(), catalog.clone())
                .await?;
        let members = Arc::new(members);
        let prefix = connection.names.prefix();
        let others = vec![
            format!("{prefix}-catalog"),
            format!("{prefix}-archive"),
            bucket.stream_name().to_owned(),
        ];
        let health = JetStreamHealth::new(connection.clone(), settings, facts.partitions, others);
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        // Subscribe only after `MembershipService::join` has checked that no other process runs as this node:
        // otherwise this process would answer the check itself.
        let requests = forward::listen(&connection, id).await?;
        tasks.spawn(forward::serve(
            requests,
            connection.clone(),
            log.clone(),
            catalog.clone(),
            members.clone(),
            moving,
            stop.clone(),
        ));
        let questions = asker.listen().await?;
        tasks.spawn(asker.clone().run(questions, stop.clone()));
        // The answer on the same connection proves that the server has processed the subscriptions
        // above.
        catalog.head().await?;
        let cluster = JetStreamCluster {
            log,
            catalog,
            archive,
            members,
            asker,
            health: Arc::new(health),
            facts,
            connection,
            bucket,
            stop,
            tasks: Mutex::new(Some(tasks)),
        };
        // A migration that began before this node could be seen by it has been announced by now.
        if let Err(moving) = check_moving(&cluster.bucket, moving).await {
            cluster.close().await;
            return Err(moving);
        }
        Ok(cluster)
    }

    /// A secret shared by all nodes; if there is none yet, `new` creates it. The name consists of
    /// letters, digits, `-` and `_`.
    pub async fn secret(&self, name: &str, new: impl FnOnce() -> Secret) -> Result<Secret, Error> {
        cluster_facts::secret(&self.bucket, &self.connection.sealer, name, new).await
    }

    /// A text shared by all nodes, with its revision, if there is one. Names are like those of
    /// secrets.
    pub async fn shared_text(&self, name: &str) -> Result<Option<(Bytes, u64)>, Error> {
        let key = format!("shared.{name}");
        let Some(found) = self.bucket.read(&key).await? else {
            return Ok(None);
        };
        let Some(value) = found.value else { return Ok(None) };
        let opened = self.connection.sealer.open_key(&key, &value)?.into_owned();
        Ok(Some((opened.into(), found.revision)))
    }

    /// Stores a shared text if it still has this revision (0: if there is none). Returns false if
    /// it has another. Every text ever offered must be different from the others.
    pub async fn swap_shared_text(&self, name: &str, text: Bytes, expected: u64) -> Result<bool, Error> {
        let key = format!("shared.{name}");
        let text = self.connection.sealer.close(&key, text.into());
        match self.bucket.swap(&key, text.into(), expected).await? {
            SwapOutcome::Stored(_) => Ok(true),
            SwapOutcome::Refused(_) => Ok(false),
        }
    }

    /// Makes a node, this one or another, hand its partitions to the others, or participate again.
    /// Returns when the node has started to do so.
    pub async fn drain(&self, node: NodeId, draining: bool) -> Result<(), Error> {
        if node == self.members.node().id {
            match draining {
                true => self.members.drain().await,
                false => self.members.undrain().await,
            }
            return Ok(());
        }
        let what = if draining { "drain" } else { "undrain" };
        let request = Request::new().timeout(Some(DRAIN_PATIENCE));
        let subject = forward::subject(&self.connection, node, what);
        match self.connection.client.send_request(subject, request).await {
            Ok(_) => Ok(()),
            Err(e) if e.kind() == RequestErrorKind::NoResponders => {
                Err(Error::Unavailable("the node is away".into()))
            }
            Err(e) => Err(Error::Unavailable(format!("the node does not answer: {e}"))),
        }
    }

    /// Hands over all partitions, leaves the cluster and stops. Must be called once nothing claims
    /// or publishes any more; attempts under way get ten seconds.
    pub async fn close(&self) {
        self.members.leave().await;
        self.end().await;
    }

    /// Stops like a crash: nothing is released and no node is informed.
    pub async fn abandon(&self) {
        self.members.abandon().await;
        for partition in self.log.partitions().iter() {
            self.log.remove(partition.number());
            partition.abandon();
        }
        self.end().await;
    }

    async fn end(&self) {
        self.stop.cancel();
        let tasks = self.tasks.lock().expect("no panic holds it").take();
        if let Some(mut tasks) = tasks {
            while let Some(ended) = tasks.join_next().await {
                if let Err(e) = ended
                    && e.is_panic()
                {
                    std::panic::resume_unwind(e.into_panic());
                }
            }
        }
        self.catalog.close().await;
        self.archive.close().await;
    }
}

/// Derives the cluster's number from that of a process, so that the same bits do not identify two
/// things.
fn identity(process: u64) -> u64 {
    let mixed = (process ^ (process >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 29)
}

/// Returns what is wrong with the settings, beginning with the name of the setting.
pub fn check(settings: &JetStreamSettings) -> Result<(), String> {
    let wrong = |what: &str| Err(what.to_owned());
    let prefix = &settings.prefix;
    let word = prefix
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if settings.urls.is_empty() {
        return wrong("urls must name a NATS server");
    }
    if prefix.is_empty() || prefix.len() > PREFIX_MAX || !word {
        return wrong("prefix must have 1 to 32 letters, digits, '-' or '_'");
    }
    if !(1..=PARTITIONS_MAX).contains(&settings.partitions) {
        return wrong("partitions must be 1 to 64");
    }
    if ![1, 3, 5].contains(&settings.replicas) {
        return wrong("replicas must be 1, 3 or 5");
    }
    if !(LEASE_MIN..=LEASE_MAX).contains(&settings.lease) {
        return wrong("lease must be 1 second to 5 minutes");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_be_are_named() {
        assert!(check(&JetStreamSettings::default()).is_ok());
        let refused = |change: &dyn Fn(&mut JetStreamSettings), named: &str| {
            let mut settings = JetStreamSettings::default();
            change(&mut settings);
            let text = check(&settings).unwrap_err();
            assert!(text.starts_with(named), "{text}");
        };
        refused(&|s| s.urls.clear(), "urls must");
        refused(&|s| s.prefix = "a.b".into(), "prefix must");
        refused(&|s| s.prefix = String::new(), "prefix must");
        refused(&|s| s.prefix = "x".repeat(33), "prefix must");
        refused(&|s| s.partitions = 0, "partitions must");
        refused(&|s| s.partitions = 65, "partitions must");
        refused(&|s| s.replicas = 2, "replicas must");
        refused(&|s| s.lease = Duration::from_millis(999), "lease must");
    }
}
