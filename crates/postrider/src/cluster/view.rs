//! Cluster state for the API.

use async_trait::async_trait;
use postrider_api::Server;
use postrider_api::cluster::{
    ClusterCounters, ClusterNode, ClusterPartition, ClusterState as Shown, ClusterView,
    JetStreamReplicaState, JetStreamState, JetStreamStreamState, LocalNodeState, NatsServer, NodeCounters,
    NodeStanding, ShownPartitionBacklog, rates,
};
use postrider_jetstream::health::{self, JetStreamReport};
use postrider_jetstream::membership::{self, KnownNode, PartitionOwnership};
use postrider_jetstream::{JetStreamCluster, NodeId};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Time for which a report about JetStream is reused.
const FRESH: Duration = Duration::from_secs(2);
/// How long after the start a partition's owner may not have created its stream yet.
const STARTING_MAX: Duration = Duration::from_secs(10);

type LastReport = Option<(Instant, Arc<JetStreamReport>)>;

/// Examines JetStream only on request, and makes no caller wait for a slow examination.
pub struct JetStreamClusterView {
    cluster: Arc<JetStreamCluster>,
    started: Instant,
    last: watch::Sender<LastReport>,
    /// The examination that is running, if any.
    looking: Mutex<JoinSet<()>>,
}

impl JetStreamClusterView {
    pub fn new(cluster: Arc<JetStreamCluster>) -> Arc<JetStreamClusterView> {
        Arc::new(JetStreamClusterView {
            cluster,
            started: Instant::now(),
            last: watch::Sender::new(None),
            looking: Mutex::new(JoinSet::new()),
        })
    }

    /// Logs what JetStream guarantees; called at the start.
    pub async fn log_guarantee(&self) {
        let report = self.cluster.health.look().await;
        let (replicas, sync, version) = (report.replicas, report.sync, report.version.as_deref());
        let guarantee = &report.guarantee;
        let partitions = self.cluster.facts.partitions;
        tracing::info!(replicas, %sync, version, partitions, "kept in JetStream: {guarantee}");
        if replicas == 1 && sync != health::SyncPolicy::Always {
            tracing::warn!(
                %sync,
                "a power cut can lose acknowledged events: set sync_interval: always in the NATS server's jetstream \
                 settings, and store.jetstream.monitor_urls so that it is seen"
            );
        }
    }

    /// Discards the report that was made while the node started: it is out of date.
    pub async fn forget(&self) {
        self.looking.lock().expect("no panic holds it").abort_all();
        self.cluster.health.forget().await;
        self.last.send_replace(None);
    }

    /// Partitions whose stream may be missing: never owned, or just being created by their first
    /// owner.
    fn starting(&self) -> BTreeSet<u8> {
        let is_new = self.started.elapsed() < STARTING_MAX;
        let own = membership::served_backlogs(&self.cluster.log);
        let is_starting = |of: &&PartitionOwnership| {
            let is_served = of.waiting.is_some() || own.contains_key(&of.number);
            of.epoch == 0 || (is_new && !is_served)
        };
        let membership = self.cluster.members.membership();
        let starting = membership.partitions.iter().filter(is_starting);
        starting.map(|of| of.number).collect()
    }

    fn is_fresh(look: &LastReport) -> bool {
        look.as_ref().is_some_and(|(when, _)| when.elapsed() < FRESH)
    }

    /// Starts an examination unless one is running.
    fn begin(&self) {
        let mut looking = self.looking.lock().expect("no panic holds it");
        while looking.try_join_next().is_some() {}
        if looking.is_empty() {
            let (health, last) = (self.cluster.health.clone(), self.last.clone());
            // Read before the examination, which may miss a stream that is created meanwhile.
            let starting = self.starting();
            looking.spawn(async move {
                let report = health.look().await.without_missing(&starting);
                last.send_replace(Some((Instant::now(), Arc::new(report))));
            });
        }
    }

    fn tallies(&self) -> NodeCounters {
        let counters = &self.cluster.log.shared().counters;
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        NodeCounters {
            takeovers: of(&counters.takeovers),
            lost: of(&counters.lost),
            fenced: of(&counters.fenced),
            redelivered: of(&counters.redelivered),
            forwarded: self.cluster.members.forwarded(),
            recoveries: of(&counters.recoveries),
            snapshots: of(&counters.snapshots),
            journal_messages: of(&counters.journal_messages),
            journal_bytes: of(&counters.journal_bytes),
            read_back: of(&counters.read_back),
        }
    }

    fn own(&self) -> LocalNodeState {
        let members = &self.cluster.members;
        LocalNodeState {
            connected: self.cluster.connection.is_connected(),
            lease_left: members.lease().left(),
            failed: members.failed().borrow().clone(),
            catalogue: self.cluster.catalog.trouble().map(|why| why.to_string()),
            tallies: self.tallies(),
        }
    }
}

#[async_trait]
impl ClusterView for JetStreamClusterView {
    fn now(&self) -> Shown {
        let membership = self.cluster.members.membership();
        let last = self.last.borrow().clone();
        let me = self.cluster.members.node().id;
        // The node knows its own partitions better than its last heartbeat says.
        let own = membership::served_backlogs(&self.cluster.log);
        let as_it_is = |of: &PartitionOwnership| match own.get(&of.number) {
            Some(_) => partition(&PartitionOwnership {
                owner: Some(me),
                waiting: own.get(&of.number).copied(),
                ..*of
            }),
            None if of.owner == Some(me) => partition(&PartitionOwnership { waiting: None, ..*of }),
            None => partition(of),
        };
        let mut nodes: Vec<ClusterNode> = membership.nodes.iter().map(node).collect();
        for one in nodes.iter_mut().filter(|one| one.id == me.to_string()) {
            one.partitions = own.keys().copied().collect();
        }
        Shown {
            node: me.to_string(),
            nodes,
            partitions: membership.partitions.iter().map(as_it_is).collect(),
            jetstream: last
                .map(|(when, report)| jetstream(&report, self.cluster.connection.replicas, when.elapsed())),
            counts: counts(membership.counts),
            own: self.own(),
        }
    }

    async fn look(&self, patience: Duration) -> Shown {
        let mut last = self.last.subscribe();
        if !JetStreamClusterView::is_fresh(&last.borrow_and_update()) {
            self.begin();
            let _ = tokio::time::timeout(patience, last.wait_for(JetStreamClusterView::is_fresh)).await;
        }
        self.now()
    }

    async fn drain(&self, id: &str, draining: bool) -> Result<(), String> {
        let Some(id) = NodeId::parse(id) else {
            return Err("that is not the id of a node".into());
        };
        let told = self.cluster.drain(id, draining).await;
        told.map_err(|e| e.to_string())
    }
}

/// Reports this node's workload to the other nodes.
pub fn report(cluster: &JetStreamCluster, server: &Arc<Server>) {
    // A weak reference: the server holds the cluster already, and a cycle would leak both.
    let server = Arc::downgrade(server);
    let report = move || server.upgrade().map(|server| rates(&server)).unwrap_or_default();
    cluster.members.set_report_source(Arc::new(report));
}

fn node(member: &KnownNode) -> ClusterNode {
    ClusterNode {
        id: member.id.to_string(),
        name: member.name.clone(),
        url: member.url.clone(),
        version: member.version.clone(),
        started: member.started,
        standing: match member.standing {
            membership::NodeStatus::Live => NodeStanding::Live,
            membership::NodeStatus::Draining => NodeStanding::Draining,
            membership::NodeStatus::Dead => NodeStanding::Dead,
            membership::NodeStatus::Left => NodeStanding::Left,
        },
        heard_ago: member.heard_ago,
        partitions: member.partitions.clone(),
        counts: counts(member.counts),
        rates: member.report.clone(),
    }
}

fn counts(of: membership::NodeCounts) -> ClusterCounters {
    ClusterCounters {
        takeovers: of.takeovers,
        fenced: of.fenced,
        redelivered: of.redelivered,
        forwarded: of.forwarded,
    }
}

fn partition(of: &PartitionOwnership) -> ClusterPartition {
    ClusterPartition {
        number: of.number,
        owner: of.owner.map(|owner| owner.to_string()),
        epoch: of.epoch,
        waiting: of.waiting.map(|one| ShownPartitionBacklog {
            waiting: one.waiting,
            retrying: one.retrying,
            letters: one.letters,
        }),
    }
}

fn jetstream(report: &JetStreamReport, wanted: usize, looked_ago: Duration) -> JetStreamState {
    let streams: Vec<JetStreamStreamState> = report.streams.iter().map(stream).collect();
    let (of_partitions, others) = streams.split_at(usize::from(report.partitions).min(streams.len()));
    JetStreamState {
        looked_ago,
        version: report.version.clone(),
        servers: report
            .servers
            .iter()
            .map(|one| NatsServer {
                name: one.name.clone(),
                version: one.version.clone(),
                sync: one.sync.to_string(),
            })
            .collect(),
        replicas: report.replicas,
        replicas_wanted: wanted,
        sync: report.sync.to_string(),
        guarantee: report.guarantee.clone(),
        trouble: report.trouble(),
        soon: report.nearly_spent(),
        partitions: of_partitions.to_vec(),
        streams: others.to_vec(),
    }
}

fn stream(of: &health::StreamStatus) -> JetStreamStreamState {
    JetStreamStreamState {
        name: of.name.clone(),
        leader: of.leader.clone(),
        replicas: of
            .others
            .iter()
            .map(|copy| JetStreamReplicaState {
                server: copy.server.clone(),
                current: copy.current,
                offline: copy.offline,
                lag: copy.lag,
            })
            .collect(),
        messages: of.messages,
        bytes: of.bytes,
        trouble: of.trouble.clone(),
    }
}
