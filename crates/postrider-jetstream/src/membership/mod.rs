//! Membership: which nodes are present, and which node owns which partition.

pub mod lease;
pub mod decide;
pub mod bucket_values;
mod membership_loop;
#[cfg(test)]
mod simulation;

use crate::bucket::Bucket;
use crate::catalog::JetStreamCatalog;
use crate::connection::NatsConnection;
use crate::log::JetStreamLog;
use crate::partition::Partition;
pub use bucket_values::{NodeCounts, ReportedBacklog};
use decide::{MembershipRules, PartitionHolder};
pub use decide::{NodeId, NodeStatus};
use lease::NodeLease;
use postrider_core::time::Timestamp;
use postrider_store::Error;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Time for attempts under way when a partition is released.
pub const RELEASE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a leaving node waits until everything has been recorded.
const LEAVE_PATIENCE: Duration = Duration::from_secs(25);
/// Time for another process of the same node to answer.
const PING_PATIENCE: Duration = Duration::from_secs(1);

/// A node, as it presents itself to the others.
#[derive(Clone, Debug)]
pub struct NodeInfo {
    /// The node's id, stored in its data directory.
    pub id: NodeId,
    /// Number that is unique to this process.
    pub process: u64,
    pub name: String,
    /// URL of the node for people and programs.
    pub url: String,
    pub version: String,
    /// Start of the process, by its own clock.
    pub started: Timestamp,
}

impl NodeInfo {
    fn holder(&self) -> PartitionHolder {
        PartitionHolder {
            node: self.id,
            process: self.process,
        }
    }
}

/// A node of the cluster, as this node knows it.
#[derive(Clone, Debug)]
pub struct KnownNode {
    pub id: NodeId,
    pub name: String,
    pub url: String,
    pub version: String,
    pub started: Timestamp,
    /// Time since the last sign of life.
    pub heard_ago: Duration,
    heard_at: Duration,
    pub standing: NodeStatus,
    /// The partitions that the node serves.
    pub partitions: Vec<u8>,
    pub counts: NodeCounts,
    /// The catalog version that is applied at the node; `None` for an older program.
    pub catalogue: Option<u64>,
    /// Metrics that the node reports in its heartbeats.
    pub report: BTreeMap<String, f64>,
}

/// Ownership of a partition, as this node knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionOwnership {
    pub number: u8,
    pub owner: Option<NodeId>,
    pub epoch: u64,
    /// Backlog of the partition if its owner reports that it serves it, otherwise `None`.
    pub waiting: Option<ReportedBacklog>,
}

/// The cluster as this node knows it.
#[derive(Clone, Debug, Default)]
pub struct Membership {
    pub nodes: Vec<KnownNode>,
    pub partitions: Vec<PartitionOwnership>,
    pub counts: NodeCounts,
}

/// The partitions that this node serves, with the backlog of each.
pub fn served_backlogs(log: &JetStreamLog) -> BTreeMap<u8, ReportedBacklog> {
    let served = log.partitions();
    let waiting = |partition: &Arc<Partition>| {
        let book = partition.book();
        // Claimed deliveries have not ended either.
        let mut all = ReportedBacklog {
            waiting: book.claims_held(),
            ..ReportedBacklog::default()
        };
        for sub in book.subs.values() {
            all.waiting += sub.waiting.len() as u64;
            all.retrying += sub.retrying.len() as u64;
            all.letters += sub.letters.len() as u64;
        }
        (partition.number(), all)
    };
    served.iter().filter(|one| one.is_open()).map(waiting).collect()
}

impl Membership {
    /// The nodes that can be asked something.
    pub fn present(&self) -> impl Iterator<Item = &KnownNode> {
        let there = |member: &&KnownNode| matches!(member.standing, NodeStatus::Live | NodeStatus::Draining);
        self.nodes.iter().filter(there)
    }

    /// The nodes that serve a partition; publish requests are distributed over them.
    pub fn owners(&self) -> impl Iterator<Item = NodeId> {
        let owners = self.present().filter(|member| !member.partitions.is_empty());
        owners.map(|member| member.id)
    }

    pub fn name_of(&self, node: NodeId) -> String {
        let known = self.nodes.iter().find(|member| member.id == node);
        known.map_or_else(|| node.to_string(), |member| member.name.clone())
    }
}

/// Metrics that a node adds to its heartbeats.
pub type ReportSource = dyn Fn() -> BTreeMap<String, f64> + Send + Sync;

/// State shared between the membership loop and the rest of the node.
struct MembershipShared {
    node: NodeInfo,
    lease: Arc<NodeLease>,
    membership: watch::Sender<Arc<Membership>>,
    steward: watch::Sender<bool>,
    /// Why this node cannot continue.
    failed: watch::Sender<Option<String>>,
    /// Whether everything has been released and nothing is taken.
    drained: watch::Sender<bool>,
    report: OnceLock<Arc<ReportSource>>,
    forwarded: AtomicU64,
}

enum Command {
    Drain,
    /// Participate again.
    Undrain,
    /// Drain, then leave the cluster.
    Leave,
    /// Reply once no node can act on a catalog older than this version.
    InForce {
        version: u64,
        done: oneshot::Sender<()>,
    },
}

/// Maximum number of queued commands.
const COMMANDS_WAITING_MAX: usize = 64;
/// Upper bound, whatever the lease, of the time a change waits for a node that is silent or lags
/// behind.
const IN_FORCE_PATIENCE_MAX: Duration = Duration::from_secs(60);

/// Waits until changes of the catalog are in force at every node.
#[derive(Clone)]
pub struct ChangeBarrier {
    commands: mpsc::Sender<Command>,
    shared: Arc<MembershipShared>,
    patience: Duration,
}

impl ChangeBarrier {
    /// Returns once no node can act on a catalog older than `version`, which must be stored and
    /// applied here: every other node has applied it, or its lease has expired. The error names the
    /// missing nodes.
    pub async fn wait(&self, version: u64) -> Result<(), Error> {
        let (done, settled) = oneshot::channel();
        let wait = async {
            let command = Command::InForce { version, done };
            self.commands.send(command).await.map_err(|_| Error::Closed)?;
            let full = || Error::Busy("too many changes wait to be in force at every node".into());
            settled.await.map_err(|_| full())
        };
        match tokio::time::timeout(self.patience, wait).await {
            Ok(settled) => settled,
            Err(_) => Err(Error::Unavailable(format!(
                "the change is stored but {} may still act by the old state; repeat the request until it is confirmed",
                self.waited_for(version)
            ))),
        }
    }

    /// Names of the missing nodes, for the error message.
    fn waited_for(&self, version: u64) -> String {
        let membership = self.shared.membership.borrow().clone();
        let lags = |member: &&KnownNode| member.catalogue.is_some_and(|known| known < version);
        let others = membership
            .present()
            .filter(|member| member.id != self.shared.node.id);
        let names: Vec<String> = others
            .filter(lags)
            .map(|member| format!("node {:?}", member.name))
            .collect();
        if names.is_empty() {
            "another node, whose heartbeats cannot be heard now,".into()
        } else {
            names.join(", ")
        }
    }
}

/// This node's membership in the cluster.
pub struct MembershipService {
    shared: Arc<MembershipShared>,
    commands: mpsc::Sender<Command>,
    stop: CancellationToken,
    running: Mutex<Option<JoinSet<()>>>,
}

/// Access to the membership before the node has joined, for the log and others that need it.
#[derive(Clone)]
pub struct MembershipHandle(Arc<MembershipShared>);

impl MembershipHandle {
    pub fn new(node: NodeInfo) -> MembershipHandle {
        MembershipHandle(Arc::new(MembershipShared {
            node,
            lease: Arc::new(NodeLease::new()),
            membership: watch::Sender::default(),
            steward: watch::Sender::new(false),
            failed: watch::Sender::new(None),
            drained: watch::Sender::new(false),
            report: OnceLock::new(),
            forwarded: AtomicU64::new(0),
        }))
    }

    pub fn node(&self) -> &NodeInfo {
        &self.0.node
    }

    pub fn lease(&self) -> Arc<NodeLease> {
        self.0.lease.clone()
    }

    pub fn membership(&self) -> Arc<Membership> {
        self.0.membership.borrow().clone()
    }

    pub fn count_forwarded(&self) {
        self.0.forwarded.fetch_add(1, Relaxed);
    }
}

impl MembershipService {
    /// Joins the cluster. From then on this node takes partitions as they are assigned to it.
    /// Refused if another process runs as this node.
    pub async fn join(
        connection: &NatsConnection,
        bucket: &Bucket,
        rules: MembershipRules,
        handle: MembershipHandle,
        log: Arc<JetStreamLog>,
        catalog: Arc<JetStreamCatalog>,
    ) -> Result<MembershipService, Error> {
        let shared = handle.0;
        let incarnation =
            membership_loop::ensure_only_process(connection, bucket, &rules, &shared.node).await?;
        let (commands, taken) = mpsc::channel(COMMANDS_WAITING_MAX);
        let barrier = ChangeBarrier {
            commands: commands.clone(),
            shared: shared.clone(),
            patience: (rules.lease * 2 + rules.dead_after()).min(IN_FORCE_PATIENCE_MAX),
        };
        catalog.join(shared.lease.clone(), barrier);
        let stop = CancellationToken::new();
        let looping = membership_loop::MembershipLoop::new(
            connection.clone(),
            bucket.clone(),
            rules,
            shared.clone(),
            (log, catalog),
            incarnation,
            stop.clone(),
        );
        let mut running = JoinSet::new();
        running.spawn(looping.run(taken));
        Ok(MembershipService {
            shared,
            commands,
            stop,
            running: Mutex::new(Some(running)),
        })
    }

    pub fn node(&self) -> &NodeInfo {
        &self.shared.node
    }

    /// This node's lease: whether it may act for its partitions now.
    pub fn lease(&self) -> &Arc<NodeLease> {
        &self.shared.lease
    }

    /// The cluster as it is known now.
    pub fn membership(&self) -> Membership {
        let mut membership = Membership::clone(&self.shared.membership.borrow());
        let now = self.shared.lease.elapsed();
        for member in &mut membership.nodes {
            member.heard_ago = now.saturating_sub(member.heard_at);
        }
        membership
    }

    /// The membership with every change of it. Durations are as of the change.
    pub fn changes(&self) -> watch::Receiver<Arc<Membership>> {
        self.shared.membership.subscribe()
    }

    /// Whether this node is the coordinator, that is, the owner of partition 0.
    pub fn coordinator(&self) -> watch::Receiver<bool> {
        self.shared.steward.subscribe()
    }

    /// Contains the reason once this node cannot continue: another process took its place.
    pub fn failed(&self) -> watch::Receiver<Option<String>> {
        self.shared.failed.subscribe()
    }

    /// Sets the source of the metrics that heartbeats carry.
    pub fn set_report_source(&self, report: Arc<ReportSource>) {
        let _ = self.shared.report.set(report);
    }

    pub fn forwarded(&self) -> u64 {
        self.shared.forwarded.load(Relaxed)
    }

    /// Hands all partitions to the others and takes none any more. Returns immediately; see
    /// `drained`.
    pub async fn drain(&self) {
        let _ = self.commands.send(Command::Drain).await;
    }

    /// Takes partitions again, as they are assigned to this node. Does not stop a node that is
    /// leaving.
    pub async fn undrain(&self) {
        let _ = self.commands.send(Command::Undrain).await;
    }

    /// True once a draining node has released everything.
    pub fn drained(&self) -> watch::Receiver<bool> {
        self.shared.drained.subscribe()
    }

    /// Releases everything and leaves the cluster. What cannot be recorded in time is left as after
    /// a crash.
    pub async fn leave(&self) {
        let running = self.running.lock().expect("no panic holds it").take();
        let Some(mut running) = running else { return };
        let _ = self.commands.send(Command::Leave).await;
        let _ = tokio::time::timeout(LEAVE_PATIENCE, running.join_next()).await;
        self.end(running).await;
    }

    /// Stops like a crash, without informing any node.
    pub async fn abandon(&self) {
        let running = self.running.lock().expect("no panic holds it").take();
        if let Some(running) = running {
            self.end(running).await;
        }
    }

    async fn end(&self, mut running: JoinSet<()>) {
        self.stop.cancel();
        running.shutdown().await;
        self.shared.lease.end();
        self.shared.steward.send_replace(false);
    }
}
