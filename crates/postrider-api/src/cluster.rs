//! `/postrider/v1/cluster`: the nodes, the partitions that each owns, and the state of the store
//! behind them. A single server is shown as a cluster of one.

#[cfg(test)]
mod tests;

use crate::Server;
use crate::http::{Answer, ApiCall, json as json_answer};
use crate::own_api::{Problem, body, read_object};
use async_trait::async_trait;
use hyper::StatusCode;
use postrider_core::time::Timestamp;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// How long a page waits for fresh facts about JetStream before it shows the last known ones.
const LOOK_PATIENCE: Duration = Duration::from_secs(2);
/// Durability guarantee of the embedded store.
const EMBEDDED_GUARANTEE: &str = "an acknowledged event survives a crash of the server and a power cut, but not the \
                                  loss of the machine's disk";

/// The cluster that this server is a node of.
#[async_trait]
pub trait ClusterView: Send + Sync {
    /// The state known to this node, from memory, without waiting.
    fn now(&self) -> ClusterState;
    /// The state with fresh facts about JetStream, or with the last known ones if that takes longer
    /// than `patience`.
    async fn look(&self, patience: Duration) -> ClusterState;
    /// Makes the node with this id hand over its partitions, or take part again. `Err` is the
    /// reason for a refusal.
    async fn drain(&self, id: &str, draining: bool) -> Result<(), String>;
}

/// A cluster as one of its nodes knows it.
#[derive(Clone, Debug, Default)]
pub struct ClusterState {
    /// The id of the node that answers.
    pub node: String,
    pub nodes: Vec<ClusterNode>,
    /// In the order of their numbers.
    pub partitions: Vec<ClusterPartition>,
    /// None until JetStream was first examined.
    pub jetstream: Option<JetStreamState>,
    /// Of all nodes together.
    pub counts: ClusterCounters,
    pub own: LocalNodeState,
}

/// Facts that only the node itself knows.
#[derive(Clone, Debug, Default)]
pub struct LocalNodeState {
    pub connected: bool,
    /// How long the node may still act for its partitions without renewing its lease.
    pub lease_left: Duration,
    /// Why the node has stopped for good.
    pub failed: Option<String>,
    /// Why the node receives no changes of the catalog any more.
    pub catalogue: Option<String>,
    pub tallies: NodeCounters,
}

/// Counters since the start of the process, for `/metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounters {
    pub takeovers: u64,
    /// Partitions that another node took over while this node owned them.
    pub lost: u64,
    pub fenced: u64,
    pub redelivered: u64,
    pub forwarded: u64,
    /// How often the fate of messages had to be looked up after an uncertain answer.
    pub recoveries: u64,
    pub snapshots: u64,
    pub journal_messages: u64,
    pub journal_bytes: u64,
    /// Messages that were read back in order to be delivered.
    pub read_back: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeStanding {
    Live,
    /// Is handing over its partitions, or has done so.
    Draining,
    /// The node's heartbeats have stopped.
    Dead,
    Left,
}

impl NodeStanding {
    pub const ALL: [NodeStanding; 4] = [
        NodeStanding::Live,
        NodeStanding::Draining,
        NodeStanding::Dead,
        NodeStanding::Left,
    ];

    pub fn name(self) -> &'static str {
        match self {
            NodeStanding::Live => "live",
            NodeStanding::Draining => "draining",
            NodeStanding::Dead => "dead",
            NodeStanding::Left => "left",
        }
    }

    fn is_there(self) -> bool {
        matches!(self, NodeStanding::Live | NodeStanding::Draining)
    }
}

#[derive(Clone, Debug)]
pub struct ClusterNode {
    pub id: String,
    pub name: String,
    pub url: String,
    pub version: String,
    pub started: Timestamp,
    pub standing: NodeStanding,
    pub heard_ago: Duration,
    /// Numbers of the partitions that the node serves.
    pub partitions: Vec<u8>,
    pub counts: ClusterCounters,
    /// Rates per second, as the node reports them.
    pub rates: BTreeMap<String, f64>,
}

#[derive(Clone, Debug, Default)]
pub struct ClusterPartition {
    pub number: u8,
    pub owner: Option<String>,
    pub epoch: u64,
    /// Backlog of the partition; none while no node serves it.
    pub waiting: Option<ShownPartitionBacklog>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShownPartitionBacklog {
    pub waiting: u64,
    pub retrying: u64,
    pub letters: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounters {
    pub takeovers: u64,
    pub fenced: u64,
    pub redelivered: u64,
    pub forwarded: u64,
}

/// State of JetStream.
#[derive(Clone, Debug, Default)]
pub struct JetStreamState {
    pub looked_ago: Duration,
    /// Of the NATS server that this node is connected to.
    pub version: Option<String>,
    pub servers: Vec<NatsServer>,
    /// The fewest replicas that any of the streams has.
    pub replicas: usize,
    /// The number of replicas that is configured.
    pub replicas_wanted: usize,
    pub sync: String,
    pub guarantee: String,
    /// Reasons why nothing can be stored now.
    pub trouble: Vec<String>,
    /// Problems that will prevent storing in the future.
    pub soon: Vec<String>,
    /// Streams of the partitions, in the order of their numbers.
    pub partitions: Vec<JetStreamStreamState>,
    /// The other streams: catalog, archive, nodes.
    pub streams: Vec<JetStreamStreamState>,
}

#[derive(Clone, Debug)]
pub struct NatsServer {
    pub name: String,
    pub version: String,
    pub sync: String,
}

#[derive(Clone, Debug, Default)]
pub struct JetStreamStreamState {
    pub name: String,
    pub leader: Option<String>,
    pub replicas: Vec<JetStreamReplicaState>,
    pub messages: u64,
    pub bytes: u64,
    pub trouble: Option<String>,
}

/// A replica of a stream other than its leader.
#[derive(Clone, Debug)]
pub struct JetStreamReplicaState {
    pub server: String,
    pub current: bool,
    pub offline: bool,
    pub lag: u64,
}

impl ClusterState {
    pub fn me(&self) -> Option<&ClusterNode> {
        self.nodes.iter().find(|node| node.id == self.node)
    }

    /// Whether a draining node has no partition left to hand over.
    fn is_drained(&self, node: &ClusterNode) -> bool {
        let owns = |one: &ClusterPartition| one.owner.as_deref() == Some(&node.id);
        node.standing == NodeStanding::Draining
            && node.partitions.is_empty()
            && !self.partitions.iter().any(owns)
    }

    fn standing(&self, node: &ClusterNode) -> &'static str {
        match self.is_drained(node) {
            true => "drained",
            false => node.standing.name(),
        }
    }

    /// Number of partitions that a node serves.
    pub fn served(&self) -> usize {
        self.partitions.iter().filter(|one| one.waiting.is_some()).count()
    }

    /// The largest lag of any replica.
    pub fn lag(&self) -> u64 {
        let streams = self.jetstream.iter().flat_map(JetStreamState::all);
        let lags = streams.flat_map(|stream| stream.replicas.iter().map(|copy| copy.lag));
        lags.max().unwrap_or(0)
    }

    fn shown_node(&self, node: &ClusterNode) -> Value {
        let serves = |one: &&ClusterPartition| node.partitions.contains(&one.number);
        let mut sum = ShownPartitionBacklog::default();
        for waiting in self
            .partitions
            .iter()
            .filter(serves)
            .filter_map(|one| one.waiting)
        {
            sum.waiting += waiting.waiting;
            sum.retrying += waiting.retrying;
            sum.letters += waiting.letters;
        }
        json!({
            "id": node.id,
            "name": node.name,
            "url": node.url,
            "version": node.version,
            "started": node.started.to_string(),
            "standing": self.standing(node),
            "heardAgoMs": millis(node.heard_ago),
            "partitions": node.partitions,
            "steward": node.partitions.contains(&0),
            "waiting": sum.waiting,
            "retrying": sum.retrying,
            "letters": sum.letters,
            "rates": node.rates,
            "counts": node.counts.shown(),
        })
    }

    fn shown_partition(&self, one: &ClusterPartition) -> Value {
        let waiting = one.waiting.unwrap_or_default();
        let mut shown = json!({
            "number": one.number,
            "owner": one.owner,
            "epoch": one.epoch,
            "serving": one.waiting.is_some(),
            "waiting": waiting.waiting,
            "retrying": waiting.retrying,
            "letters": waiting.letters,
        });
        let jetstream = self.jetstream.as_ref();
        if let Some(stream) = jetstream.and_then(|js| js.partitions.get(usize::from(one.number))) {
            shown["stream"] = stream.shown();
        }
        shown
    }

    pub(crate) fn shown(&self) -> Value {
        let nodes: Vec<Value> = self.nodes.iter().map(|node| self.shown_node(node)).collect();
        let partitions: Vec<Value> = self
            .partitions
            .iter()
            .map(|one| self.shown_partition(one))
            .collect();
        let mut shown = json!({
            "kind": "jetstream",
            "node": self.node,
            "nodes": nodes,
            "partitions": partitions,
            "counts": self.counts.shown(),
        });
        if let Some(jetstream) = &self.jetstream {
            shown["jetstream"] = jetstream.shown();
        }
        shown
    }
}

impl ClusterCounters {
    fn shown(&self) -> Value {
        json!({
            "takeovers": self.takeovers,
            "fenced": self.fenced,
            "redelivered": self.redelivered,
            "forwarded": self.forwarded,
        })
    }
}

impl JetStreamState {
    pub fn all(&self) -> impl Iterator<Item = &JetStreamStreamState> {
        self.partitions.iter().chain(&self.streams)
    }

    pub(crate) fn shown_servers(&self) -> Value {
        let servers = self.servers.iter();
        servers
            .map(|one| json!({"name": one.name, "version": one.version, "sync": one.sync}))
            .collect()
    }

    fn shown(&self) -> Value {
        json!({
            "lookedAgoMs": millis(self.looked_ago),
            "version": self.version,
            "servers": self.shown_servers(),
            "replicas": self.replicas,
            "replicasWanted": self.replicas_wanted,
            "sync": self.sync,
            "guarantee": self.guarantee,
            "trouble": self.trouble,
            "streams": self.streams.iter().map(JetStreamStreamState::shown).collect::<Vec<_>>(),
        })
    }
}

impl JetStreamStreamState {
    fn shown(&self) -> Value {
        let replicas = self.replicas.iter().map(|copy| {
            json!({
                "server": copy.server,
                "current": copy.current,
                "offline": copy.offline,
                "lag": copy.lag,
            })
        });
        let mut shown = json!({
            "name": self.name,
            "leader": self.leader,
            "replicas": replicas.collect::<Vec<_>>(),
            "messages": self.messages,
            "bytes": self.bytes,
        });
        if let Some(trouble) = &self.trouble {
            shown["trouble"] = json!(trouble);
        }
        shown
    }

    /// Replicas that would lack data if the leader were lost now.
    fn behind(&self) -> impl Iterator<Item = &JetStreamReplicaState> {
        self.replicas.iter().filter(|copy| copy.offline || !copy.current)
    }
}

fn millis(of: Duration) -> u64 {
    u64::try_from(of.as_millis()).unwrap_or(u64::MAX)
}

/// A reason or warning of the cluster in `/healthz`: a code for programs and a sentence for people.
pub(crate) type CodedMessage = (&'static str, String);

/// Reasons why this node would refuse events that are published to it.
pub(crate) fn publish_refusal_reasons(cluster: &ClusterState) -> Vec<CodedMessage> {
    let mut reasons = Vec::new();
    let own = &cluster.own;
    if let Some(why) = &own.failed {
        reasons.push(("nodeReplaced", why.clone()));
    } else if !own.connected {
        let why = "there is no connection to a NATS server".to_owned();
        reasons.push(("jetstreamAway", why));
    } else if own.lease_left.is_zero() {
        let why = "this node's lease has run out: its heartbeats are not stored".to_owned();
        reasons.push(("leaseLost", why));
    } else if let Some(why) = &own.catalogue {
        reasons.push(("catalogueUnreadable", why.clone()));
    }
    if reasons.is_empty() && cluster.served() == 0 {
        let why = "no node serves a partition now".to_owned();
        reasons.push(("noPartitionServed", why));
    }
    reasons
}

/// Problems that do not prevent publishing at this node but need attention.
pub(crate) fn warnings(cluster: &ClusterState) -> Vec<CodedMessage> {
    let mut warnings = Vec::new();
    let unserved = cluster.partitions.len() - cluster.served();
    if unserved > 0 {
        let count = cluster.partitions.len();
        let detail = format!("{unserved} of {count} partitions are served by no node: what is in them waits");
        warnings.push(("partitionsUnserved", detail));
    }
    for node in &cluster.nodes {
        let name = &node.name;
        match node.standing {
            NodeStanding::Dead => {
                let ago = node.heard_ago.as_secs();
                let detail = format!("node {name} was last heard of {ago} seconds ago");
                warnings.push(("nodeMissing", detail));
            }
            NodeStanding::Draining if node.id == cluster.node => {
                let detail = format!("this node, {name}, is {}", cluster.standing(node));
                warnings.push(("draining", detail));
            }
            NodeStanding::Live | NodeStanding::Draining | NodeStanding::Left => {}
        }
    }
    warnings.extend(cluster.jetstream.iter().flat_map(of_jetstream));
    warnings
}

fn of_jetstream(jetstream: &JetStreamState) -> Vec<CodedMessage> {
    let mut warnings: Vec<CodedMessage> = jetstream
        .trouble
        .iter()
        .map(|why| ("jetstream", why.clone()))
        .collect();
    warnings.extend(jetstream.soon.iter().map(|why| ("jetstreamSoon", why.clone())));
    if jetstream.replicas < jetstream.replicas_wanted {
        let (has, wanted) = (jetstream.replicas, jetstream.replicas_wanted);
        let detail = format!(
            "streams are kept by {has} servers though store.jetstream.replicas is {wanted}; \"nats stream edit\" changes that"
        );
        warnings.push(("replicasFewer", detail));
    }
    // Grouped by server: an absent server is one problem, not one for each of its replicas.
    let mut behind: BTreeMap<&str, usize> = BTreeMap::new();
    for copy in jetstream.all().flat_map(JetStreamStreamState::behind) {
        *behind.entry(&copy.server).or_default() += 1;
    }
    for (server, streams) in behind {
        let detail = format!("the copies of {streams} streams on NATS server {server} are away or behind");
        warnings.push(("replicaBehind", detail));
    }
    if jetstream.replicas == 1 && jetstream.sync != "always" && jetstream.version.is_some() {
        warnings.push(("sync", jetstream.guarantee.clone()));
    }
    warnings
}

/// The cluster with fresh facts about JetStream; none if this server is no node of a cluster.
pub(crate) async fn look(server: &Server, patience: Duration) -> Option<ClusterState> {
    match &server.cluster {
        Some(view) => Some(view.look(patience).await),
        None => None,
    }
}

/// A single server, shown as a cluster of one.
fn alone(server: &Server) -> Value {
    let engine = &server.engine;
    let log = engine.log();
    let id = format!("{:016x}", log.identity());
    let mut waiting = ShownPartitionBacklog::default();
    for subscription in engine.directory.all_subscriptions() {
        let backlog = log.backlog(subscription.id);
        waiting.waiting += backlog.waiting + backlog.claimed;
        waiting.retrying += backlog.retrying;
    }
    waiting.letters = log
        .pending_dead_letters()
        .iter()
        .map(|letters| letters.count)
        .sum();
    let health = log.health();
    let rates = rates(server);
    json!({
        "kind": "embedded",
        "node": id,
        "nodes": [{
            "id": id,
            "name": "this server",
            "url": server.config.public_url.as_deref().unwrap_or(""),
            "version": server.config.version,
            "started": server.started.to_string(),
            "standing": NodeStanding::Live.name(),
            "heardAgoMs": 0,
            "partitions": [0],
            "steward": true,
            "waiting": waiting.waiting,
            "retrying": waiting.retrying,
            "letters": waiting.letters,
            "rates": rates,
            "counts": ClusterCounters::default().shown(),
        }],
        "partitions": [{
            "number": 0,
            "owner": id,
            "epoch": 0,
            "serving": true,
            "waiting": waiting.waiting,
            "retrying": waiting.retrying,
            "letters": waiting.letters,
        }],
        "embedded": {
            "sync": "always",
            "guarantee": EMBEDDED_GUARANTEE,
            "bytes": health.bytes,
            "segments": health.segments,
        },
        "counts": ClusterCounters { redelivered: health.redelivered, ..ClusterCounters::default() }.shown(),
    })
}

/// This node's rates per second over the last minute, for other nodes to show.
pub fn rates(server: &Server) -> BTreeMap<String, f64> {
    let engine = &server.engine;
    let rates = engine.dispatcher.meter.rates(engine.clock.now());
    let rounded = |number: f64| (number * 1000.0).round() / 1000.0;
    [
        ("publishedPerSec", rates.published),
        ("deliveredPerSec", rates.delivered),
        ("failedPerSec", rates.failed),
    ]
    .map(|(name, value)| (name.to_owned(), rounded(value)))
    .into()
}

/// `GET cluster`: all nodes as this one knows them.
pub(crate) async fn show(server: &Arc<Server>, call: &ApiCall) -> Result<Answer, Problem> {
    let shown = match look(server, LOOK_PATIENCE).await {
        Some(cluster) => cluster.shown(),
        None => alone(server),
    };
    Ok(body(call, shown))
}

pub(crate) async fn drain(server: &Server, call: &mut ApiCall, draining: bool) -> Result<Answer, Problem> {
    let asked = DrainRequest::read(&read_object(call).await?, draining)?;
    let Some(view) = &server.cluster else {
        let detail = "this server keeps its events itself: there is no other node that could take them";
        return Err(Problem::new(409, detail));
    };
    let cluster = view.now();
    let node = find(&cluster, asked.node.as_deref())?;
    if draining && !asked.force {
        let stays = |other: &&ClusterNode| other.id != node.id && other.standing == NodeStanding::Live;
        if !cluster.nodes.iter().any(|other| stays(&other)) {
            let name = &node.name;
            let detail = format!(
                "node: no other node is live to take the partitions of {name}: nothing would be delivered, and \
                 publishes would be refused; \"force\": true drains it all the same"
            );
            return Err(refused(409, detail));
        }
    }
    if let Err(why) = view.drain(&node.id, draining).await {
        let name = &node.name;
        return Err(Problem::new(503, format!("node {name} was not told: {why}")));
    }
    let told = json!({
        "node": {"id": node.id, "name": node.name},
        "state": if draining { "draining" } else { "live" },
    });
    Ok(json_answer(StatusCode::ACCEPTED, told.to_string(), &call.id))
}

fn refused(status: u16, detail: String) -> Problem {
    Problem {
        field: Some("node"),
        ..Problem::new(status, detail)
    }
}

/// Body of a drain request: the node, and whether draining is forced.
#[derive(Debug, PartialEq, Eq)]
struct DrainRequest {
    node: Option<String>,
    force: bool,
}

impl DrainRequest {
    fn read(members: &Map<String, Value>, draining: bool) -> Result<DrainRequest, Problem> {
        let mut asked = DrainRequest {
            node: None,
            force: false,
        };
        for (name, value) in members {
            match (name.as_str(), value) {
                ("node", Value::String(node)) => asked.node = Some(node.clone()),
                ("node", _) => return Err(Problem::field("node", "must be the name or the id of a node")),
                ("force", Value::Bool(force)) if draining => asked.force = *force,
                ("force", _) if draining => return Err(Problem::field("force", "must be true or false")),
                (other, _) => {
                    let known = if draining {
                        "known are node and force"
                    } else {
                        "known is node"
                    };
                    return Err(Problem::new(400, format!("{other}: is not known; {known}")));
                }
            }
        }
        Ok(asked)
    }
}

/// The node with this name or id; without one, the node that answers.
fn find<'c>(cluster: &'c ClusterState, asked: Option<&str>) -> Result<&'c ClusterNode, Problem> {
    let asked = asked.unwrap_or(&cluster.node);
    let mut found: Vec<&ClusterNode> = cluster.nodes.iter().filter(|node| node.id == asked).collect();
    if found.is_empty() {
        let there = |node: &&ClusterNode| node.name == asked && node.standing.is_there();
        found = cluster.nodes.iter().filter(there).collect();
    }
    if found.is_empty() {
        found = cluster.nodes.iter().filter(|node| node.name == asked).collect();
    }
    match found[..] {
        [] => {
            let names: Vec<&str> = cluster.nodes.iter().map(|node| node.name.as_str()).collect();
            let detail = format!("node: {asked:?} is not known; known are {}", names.join(", "));
            Err(refused(404, detail))
        }
        [node] if node.standing.is_there() => Ok(node),
        [node] => {
            let standing = node.standing.name();
            let detail = format!("node: {asked:?} is {standing}: it has nothing to give and cannot be told");
            Err(refused(409, detail))
        }
        [..] => {
            let ids: Vec<&str> = found.iter().map(|node| node.id.as_str()).collect();
            let detail = format!(
                "node: {asked:?} is the name of several: say which, by {}",
                ids.join(" or ")
            );
            Err(refused(409, detail))
        }
    }
}
