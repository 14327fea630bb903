//! Who is there, and who owns which partition.

pub mod lease;
pub mod decide;
pub mod value;
mod run;
#[cfg(test)]
mod simulation;

use crate::bucket::Bucket;
use crate::catalog::JetStreamCatalog;
use crate::connect::Connection;
use crate::log::JetStreamLog;
use crate::partition::Partition;
use decide::{Holder, Rules};
pub use decide::{NodeId, Standing};
use lease::LeaseUntil;
use postrider_core::time::Timestamp;
use postrider_store::Error;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
pub use value::{Counts, Waiting};

/// How long attempts under way have when a partition is released.
pub const RELEASE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a node that leaves waits until everything has been written down.
const LEAVE_PATIENCE: Duration = Duration::from_secs(25);
/// How long a process that runs as the same node has to say so.
const PING_PATIENCE: Duration = Duration::from_secs(1);

/// One node, as it presents itself to the others.
#[derive(Clone, Debug)]
pub struct Node {
    /// The node's own number, kept where its data is.
    pub id: NodeId,
    /// A number that no other process has, nor had.
    pub process: u64,
    pub name: String,
    /// Where it can be reached by people and programs.
    pub url: String,
    pub version: String,
    /// When the process began, by its own clock.
    pub started: Timestamp,
}

impl Node {
    fn holder(&self) -> Holder {
        Holder {
            node: self.id,
            process: self.process,
        }
    }
}

/// What is known of one node.
#[derive(Clone, Debug)]
pub struct Member {
    pub id: NodeId,
    pub name: String,
    pub url: String,
    pub version: String,
    pub started: Timestamp,
    /// How long ago it was last heard of.
    pub heard_ago: Duration,
    heard_at: Duration,
    pub standing: Standing,
    /// The partitions that it serves.
    pub partitions: Vec<u8>,
    pub counts: Counts,
    /// The version of the catalogue that is in force there; none from an older program.
    pub catalogue: Option<u64>,
    /// What the node says of itself: rates, counters.
    pub report: BTreeMap<String, f64>,
}

/// What is known of one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    pub number: u8,
    pub owner: Option<NodeId>,
    pub epoch: u64,
    /// Whether its owner says that it serves it, and what waits in it then.
    pub waiting: Option<Waiting>,
}

/// The cluster as this node knows it.
#[derive(Clone, Debug, Default)]
pub struct Membership {
    pub nodes: Vec<Member>,
    pub partitions: Vec<Ownership>,
    pub counts: Counts,
}

/// The partitions that this node serves, and what waits in each.
pub fn serves(log: &JetStreamLog) -> BTreeMap<u8, Waiting> {
    let served = log.partitions();
    let waiting = |partition: &Arc<Partition>| {
        let book = partition.book();
        // What is claimed has not ended either.
        let mut all = Waiting {
            waiting: book.claims_held(),
            ..Waiting::default()
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
    pub fn present(&self) -> impl Iterator<Item = &Member> {
        let there = |member: &&Member| matches!(member.standing, Standing::Live | Standing::Draining);
        self.nodes.iter().filter(there)
    }

    /// The nodes that serve a partition, at least one as many as the others: they share what is published.
    pub fn owners(&self) -> impl Iterator<Item = NodeId> {
        let owners = self.present().filter(|member| !member.partitions.is_empty());
        owners.map(|member| member.id)
    }

    pub fn name_of(&self, node: NodeId) -> String {
        let known = self.nodes.iter().find(|member| member.id == node);
        known.map_or_else(|| node.to_string(), |member| member.name.clone())
    }
}

/// What a node says of itself beyond what the cluster knows.
pub type Report = dyn Fn() -> BTreeMap<String, f64> + Send + Sync;

/// What the loop shares with everybody else.
struct Shared {
    node: Node,
    lease: Arc<LeaseUntil>,
    membership: watch::Sender<Arc<Membership>>,
    steward: watch::Sender<bool>,
    /// Why this node can go on no more.
    failed: watch::Sender<Option<String>>,
    /// Everything has been released, and nothing is taken.
    drained: watch::Sender<bool>,
    report: OnceLock<Arc<Report>>,
    forwarded: AtomicU64,
}

enum Command {
    Drain,
    /// Take part again.
    Undrain,
    /// Drain, then say goodbye.
    Leave,
    /// Tell once no node can act by a catalogue older than this version.
    InForce {
        version: u64,
        done: oneshot::Sender<()>,
    },
}

/// Commands that wait for the loop.
const COMMANDS_WAITING_MAX: usize = 64;
/// How long a change waits at most for a node that has fallen silent or cannot follow, whatever the lease.
const IN_FORCE_PATIENCE_MAX: Duration = Duration::from_secs(60);

/// Tells when changes of the catalogue are in force at every node.
#[derive(Clone)]
pub struct ChangeBarrier {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
    patience: Duration,
}

impl ChangeBarrier {
    /// Returns once no node can act by a catalogue older than `version`, which is stored and in force here: every other
    /// node has it in force, or its lease has run out. The error names the nodes that are waited for.
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

    /// For people.
    fn waited_for(&self, version: u64) -> String {
        let membership = self.shared.membership.borrow().clone();
        let lags = |member: &&Member| member.catalogue.is_some_and(|known| known < version);
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

/// This node among the others.
pub struct Members {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
    stop: CancellationToken,
    running: Mutex<Option<JoinSet<()>>>,
}

/// How the members are known before they are joined: what the log and others need of them.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    pub fn new(node: Node) -> Handle {
        Handle(Arc::new(Shared {
            node,
            lease: Arc::new(LeaseUntil::new()),
            membership: watch::Sender::default(),
            steward: watch::Sender::new(false),
            failed: watch::Sender::new(None),
            drained: watch::Sender::new(false),
            report: OnceLock::new(),
            forwarded: AtomicU64::new(0),
        }))
    }

    pub fn node(&self) -> &Node {
        &self.0.node
    }

    pub fn lease(&self) -> Arc<LeaseUntil> {
        self.0.lease.clone()
    }

    pub fn membership(&self) -> Arc<Membership> {
        self.0.membership.borrow().clone()
    }

    pub fn count_forwarded(&self) {
        self.0.forwarded.fetch_add(1, Relaxed);
    }
}

impl Members {
    /// Joins the cluster. From then on this node takes partitions as they fall to it. Refused if another process runs as
    /// this node.
    pub async fn join(
        connection: &Connection,
        bucket: &Bucket,
        rules: Rules,
        handle: Handle,
        log: Arc<JetStreamLog>,
        catalog: Arc<JetStreamCatalog>,
    ) -> Result<Members, Error> {
        let shared = handle.0;
        let incarnation = run::alone(connection, bucket, &rules, &shared.node).await?;
        let (commands, taken) = mpsc::channel(COMMANDS_WAITING_MAX);
        let barrier = ChangeBarrier {
            commands: commands.clone(),
            shared: shared.clone(),
            patience: (rules.lease * 2 + rules.dead_after()).min(IN_FORCE_PATIENCE_MAX),
        };
        catalog.join(shared.lease.clone(), barrier);
        let stop = CancellationToken::new();
        let looping = run::Loop::new(
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
        Ok(Members {
            shared,
            commands,
            stop,
            running: Mutex::new(Some(running)),
        })
    }

    pub fn node(&self) -> &Node {
        &self.shared.node
    }

    /// Whether this node may act for its partitions now.
    pub fn lease(&self) -> &Arc<LeaseUntil> {
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

    /// The same, and every change of it. Times in it are as of the change.
    pub fn changes(&self) -> watch::Receiver<Arc<Membership>> {
        self.shared.membership.subscribe()
    }

    /// Whether this node does what only one may do at a time: it owns partition 0.
    pub fn steward(&self) -> watch::Receiver<bool> {
        self.shared.steward.subscribe()
    }

    /// Says why, once this node can go on no more: another process took its place.
    pub fn failed(&self) -> watch::Receiver<Option<String>> {
        self.shared.failed.subscribe()
    }

    /// What goes with each heartbeat, for the others to show.
    pub fn report_with(&self, report: Arc<Report>) {
        let _ = self.shared.report.set(report);
    }

    pub fn forwarded(&self) -> u64 {
        self.shared.forwarded.load(Relaxed)
    }

    /// Gives all partitions to the others and takes none any more. Returns at once; `drained` says when.
    pub async fn drain(&self) {
        let _ = self.commands.send(Command::Drain).await;
    }

    /// Takes partitions again, as they fall to this node. A node that leaves is not kept from it.
    pub async fn undrain(&self) {
        let _ = self.commands.send(Command::Undrain).await;
    }

    /// True once a node that drains has released everything.
    pub fn drained(&self) -> watch::Receiver<bool> {
        self.shared.drained.subscribe()
    }

    /// Releases everything and says goodbye. What cannot be written down in time is left as a crash leaves it.
    pub async fn leave(&self) {
        let running = self.running.lock().expect("no panic holds it").take();
        let Some(mut running) = running else { return };
        let _ = self.commands.send(Command::Leave).await;
        let _ = tokio::time::timeout(LEAVE_PATIENCE, running.join_next()).await;
        self.end(running).await;
    }

    /// Ends without a word, as a crash does.
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
