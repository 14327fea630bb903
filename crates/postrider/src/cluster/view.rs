//! The cluster as the API shows it.

use async_trait::async_trait;
use postrider_api::Server;
use postrider_api::cluster::{
    Cluster as Shown, ClusterView, Counts, JetStream, NatsServer, Node, Own, Partition, Replica, Standing,
    Stream, Tallies, Waiting, rates,
};
use postrider_jetstream::health::{self, Report};
use postrider_jetstream::members::{self, Member, Ownership};
use postrider_jetstream::{Cluster, NodeId};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// What was seen of JetStream is good for this long.
const FRESH: Duration = Duration::from_secs(2);
/// How long after the start a partition may have an owner that has not made its stream yet.
const STARTING_MAX: Duration = Duration::from_secs(10);

type Look = Option<(Instant, Arc<Report>)>;

/// Looks at JetStream only when somebody wants to know, and lets nobody wait for a look that takes long.
pub struct View {
    cluster: Arc<Cluster>,
    started: Instant,
    last: watch::Sender<Look>,
    /// The look that is under way, if one is.
    looking: Mutex<JoinSet<()>>,
}

impl View {
    pub fn new(cluster: Arc<Cluster>) -> Arc<View> {
        Arc::new(View {
            cluster,
            started: Instant::now(),
            last: watch::Sender::new(None),
            looking: Mutex::new(JoinSet::new()),
        })
    }

    /// What the servers promise, once they have been asked; said at the start.
    pub async fn greet(&self) {
        let report = self.cluster.health.look().await;
        let (replicas, sync, version) = (report.replicas, report.sync, report.version.as_deref());
        let guarantee = &report.guarantee;
        let partitions = self.cluster.facts.partitions;
        tracing::info!(replicas, %sync, version, partitions, "kept in JetStream: {guarantee}");
        if replicas == 1 && sync != health::Sync::Always {
            tracing::warn!(
                %sync,
                "a power cut can lose acknowledged events: set sync_interval: always in the NATS server's jetstream \
                 settings, and store.jetstream.monitor_urls so that it is seen"
            );
        }
    }

    /// Makes the next look a new one: what was seen while the node started is not how it is.
    pub async fn forget(&self) {
        self.looking.lock().expect("no panic holds it").abort_all();
        self.cluster.health.forget().await;
        self.last.send_replace(None);
    }

    /// Partitions whose stream need not be there: nobody has owned them yet, or their first owner is just making it.
    fn starting(&self) -> BTreeSet<u8> {
        let is_new = self.started.elapsed() < STARTING_MAX;
        let own = members::serves(&self.cluster.log);
        let is_starting = |of: &&Ownership| {
            let is_served = of.waiting.is_some() || own.contains_key(&of.number);
            of.epoch == 0 || (is_new && !is_served)
        };
        let membership = self.cluster.members.membership();
        let starting = membership.partitions.iter().filter(is_starting);
        starting.map(|of| of.number).collect()
    }

    fn is_fresh(look: &Look) -> bool {
        look.as_ref().is_some_and(|(when, _)| when.elapsed() < FRESH)
    }

    /// Begins to look, unless that is under way.
    fn begin(&self) {
        let mut looking = self.looking.lock().expect("no panic holds it");
        while looking.try_join_next().is_some() {}
        if looking.is_empty() {
            let (health, last) = (self.cluster.health.clone(), self.last.clone());
            // Before the look: a stream that is made meanwhile may have been missed.
            let starting = self.starting();
            looking.spawn(async move {
                let report = health.look().await.without_missing(&starting);
                last.send_replace(Some((Instant::now(), Arc::new(report))));
            });
        }
    }

    fn tallies(&self) -> Tallies {
        let counters = &self.cluster.log.shared().counters;
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        Tallies {
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

    fn own(&self) -> Own {
        let members = &self.cluster.members;
        Own {
            connected: self.cluster.connection.is_connected(),
            lease_left: members.lease().left(),
            failed: members.failed().borrow().clone(),
            catalogue: self.cluster.catalog.trouble().map(|why| why.to_string()),
            tallies: self.tallies(),
        }
    }
}

#[async_trait]
impl ClusterView for View {
    fn now(&self) -> Shown {
        let membership = self.cluster.members.membership();
        let last = self.last.borrow().clone();
        let me = self.cluster.members.node().id;
        // Of itself a node knows more than its last heartbeat says.
        let own = members::serves(&self.cluster.log);
        let as_it_is = |of: &Ownership| match own.get(&of.number) {
            Some(_) => partition(&Ownership {
                owner: Some(me),
                waiting: own.get(&of.number).copied(),
                ..*of
            }),
            None if of.owner == Some(me) => partition(&Ownership { waiting: None, ..*of }),
            None => partition(of),
        };
        let mut nodes: Vec<Node> = membership.nodes.iter().map(node).collect();
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
        if !View::is_fresh(&last.borrow_and_update()) {
            self.begin();
            let _ = tokio::time::timeout(patience, last.wait_for(View::is_fresh)).await;
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

/// Lets the other nodes know what this one has to do.
pub fn report(cluster: &Cluster, server: &Arc<Server>) {
    // The server knows the cluster already: each would keep the other alive.
    let server = Arc::downgrade(server);
    let report = move || server.upgrade().map(|server| rates(&server)).unwrap_or_default();
    cluster.members.report_with(Arc::new(report));
}

fn node(member: &Member) -> Node {
    Node {
        id: member.id.to_string(),
        name: member.name.clone(),
        url: member.url.clone(),
        version: member.version.clone(),
        started: member.started,
        standing: match member.standing {
            members::Standing::Live => Standing::Live,
            members::Standing::Draining => Standing::Draining,
            members::Standing::Dead => Standing::Dead,
            members::Standing::Left => Standing::Left,
        },
        heard_ago: member.heard_ago,
        partitions: member.partitions.clone(),
        counts: counts(member.counts),
        rates: member.report.clone(),
    }
}

fn counts(of: members::Counts) -> Counts {
    Counts {
        takeovers: of.takeovers,
        fenced: of.fenced,
        redelivered: of.redelivered,
        forwarded: of.forwarded,
    }
}

fn partition(of: &Ownership) -> Partition {
    Partition {
        number: of.number,
        owner: of.owner.map(|owner| owner.to_string()),
        epoch: of.epoch,
        waiting: of.waiting.map(|one| Waiting {
            waiting: one.waiting,
            retrying: one.retrying,
            letters: one.letters,
        }),
    }
}

fn jetstream(report: &Report, wanted: usize, looked_ago: Duration) -> JetStream {
    let streams: Vec<Stream> = report.streams.iter().map(stream).collect();
    let (of_partitions, others) = streams.split_at(usize::from(report.partitions).min(streams.len()));
    JetStream {
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

fn stream(of: &health::Stream) -> Stream {
    Stream {
        name: of.name.clone(),
        leader: of.leader.clone(),
        replicas: of
            .others
            .iter()
            .map(|copy| Replica {
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
