//! `postrider bench --store jetstream`: the same loads on the embedded store and on JetStream in
//! turns, JetStream alone, several nodes, the cost of an idle node, and the time until other nodes
//! take over for one that was killed.

use super::http::{self, BenchConnection};
use super::nats::{self, BenchNatsServers};
use super::procfs::{self, MachineInfo};
use super::raw_jetstream::{RawArgs, RawPublishResult};
use super::report::{LoadResult, hundredths, millis, named, or_dash, quotient, table, tenths};
use super::sink::LatencyPercentiles;
use super::{
    BenchArgs, BenchLoad, BenchSession, MeasuredServer, ReadyServer, RecorderMode, catalog,
    child::ChildProcess, pause, server_config,
};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::Instant;

/// How long an idle node is observed, and how long it rests before.
const IDLE_SECS: f64 = 30.0;
const IDLE_AFTER: Duration = Duration::from_secs(10);
const SHARED_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Longest a take-over by the other nodes may take.
const TAKEOVER_MAX: Duration = Duration::from_secs(120);
const TAKEOVER_NODES: usize = 3;
/// Size and number in flight of the groups that Postrider writes under load.
const GROUP_BYTES: usize = 128 << 10;
const GROUPS_IN_FLIGHT: usize = 4;
/// Subscriptions of each topic of an idle node.
const IDLE_PER_TOPIC: u64 = 20;

#[derive(clap::Args, Clone, Debug)]
pub struct ClusterBenchArgs {
    /// Run the loads on this store and on the embedded one, in turns.
    #[arg(long, value_enum)]
    store: Option<BenchStoreKind>,
    /// The NATS server program to start; otherwise the one on the path.
    #[arg(long, value_name = "PATH", requires = "store", conflicts_with = "nats")]
    nats_server: Option<PathBuf>,
    /// Use NATS servers that run already. What is made there is removed afterwards.
    #[arg(long, value_name = "URL", requires = "store")]
    nats: Option<String>,
    /// How many NATS servers keep each stream; as many are started.
    #[arg(long, value_name = "N", requires = "store", num_args = 1.., value_delimiter = ',', default_value = "1",
          value_parser = parse_replicas)]
    replicas: Vec<usize>,
    /// Whether the NATS servers that are started flush every message to disk, as the embedded store
    /// does.
    #[arg(long, value_enum, requires = "store", num_args = 1.., value_delimiter = ',', default_value = "interval,always")]
    sync: Vec<NatsSync>,
    /// How often each load is run on each store; the run in the middle counts.
    #[arg(long, requires = "store", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Instead of the loads, run one on this many nodes that share the work, such as 1,2,4.
    #[arg(long, value_name = "N", requires = "store", num_args = 1.., value_delimiter = ',',
          value_parser = parse_nodes)]
    nodes: Vec<usize>,
    /// Instead of the loads, watch a node with this many subscriptions and nothing to do.
    #[arg(long, value_name = "SUBSCRIPTIONS", requires = "store", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    idle: Option<u64>,
    /// Instead of the loads, kill one of three nodes while this many events wait at each.
    #[arg(long, value_name = "EVENTS", requires = "store", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    takeover: Option<u64>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum BenchStoreKind {
    Jetstream,
}

/// When a NATS server flushes what it has acknowledged.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum NatsSync {
    /// Every two minutes, as the servers do if nobody says otherwise.
    Interval,
    /// Before it acknowledges.
    Always,
}

fn parse_replicas(text: &str) -> Result<usize, String> {
    match text {
        "1" => Ok(1),
        "3" => Ok(3),
        "5" => Ok(5),
        _ => Err("1, 3 or 5".to_owned()),
    }
}

fn parse_nodes(text: &str) -> Result<usize, String> {
    let count = text
        .parse::<usize>()
        .ok()
        .filter(|count| (1..=16).contains(count));
    count.ok_or_else(|| "from 1 to 16".to_owned())
}

impl ClusterBenchArgs {
    pub fn is_wanted(&self) -> bool {
        self.store.is_some()
    }
}

/// Where events are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MeasuredStore {
    Embedded,
    JetStream { replicas: usize, always: bool },
}

impl std::fmt::Display for MeasuredStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MeasuredStore::Embedded => f.write_str("embedded"),
            MeasuredStore::JetStream { replicas, always } => {
                write!(f, "jetstream R{replicas}{}", if *always { " always" } else { "" })
            }
        }
    }
}

impl Serialize for MeasuredStore {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Everything, as printed by `--output json`.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterReport {
    machine: MachineInfo,
    /// Kernel's load average of the last minute when the bench began: other work on the machine.
    load_average: Option<f64>,
    fdatasync_ms: LatencyPercentiles,
    secs: f64,
    size: usize,
    conns: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cells: Vec<StoreLoadResult>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ratios: Vec<StoreRatio>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    raw: Vec<RawJetStreamResult>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    curve: Vec<NodeCountResult>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    idle: Vec<IdleResult>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    takeovers: Vec<TakeoverResult>,
}

/// Result of one load on one store: the median run of its rounds.
#[derive(Clone, Debug, Serialize)]
struct StoreLoadResult {
    store: MeasuredStore,
    #[serde(flatten)]
    run: LoadResult,
    /// Rates of all rounds, in the order in which they were run.
    rounds_deliveries_per_s: Vec<f64>,
}

/// A cell as a multiple of the embedded store's of the same load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct StoreRatio {
    load: BenchLoad,
    store: MeasuredStore,
    deliveries_per_s: Option<f64>,
    end_to_end_p50: Option<f64>,
    end_to_end_p99: Option<f64>,
    cpu_us_per_delivery: Option<f64>,
    /// CPU time including that of the NATS servers.
    cpu_us_per_delivery_all: Option<f64>,
    /// Events per second as a share of the messages of one event each that JetStream alone takes.
    of_raw: Option<f64>,
}

/// Rate of JetStream alone with messages of one size.
#[derive(Clone, Copy, Debug, Serialize)]
struct RawJetStreamResult {
    store: MeasuredStore,
    bytes: usize,
    in_flight: usize,
    messages_per_s: f64,
    mib_per_s: f64,
    ack_ms: LatencyPercentiles,
    store_cpu_us_per_message: Option<f64>,
}

/// Result of one load on several nodes.
#[derive(Clone, Debug, Serialize)]
struct NodeCountResult {
    nodes: usize,
    store: MeasuredStore,
    #[serde(flatten)]
    run: LoadResult,
    per_node: Vec<NodeShare>,
    /// Deliveries of the busiest node divided by those of the least busy.
    most_to_least: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct NodeShare {
    deliveries: u64,
    share: f64,
    cpu_us_per_delivery: Option<f64>,
}

/// Cost of a node with nothing to do.
#[derive(Clone, Copy, Debug, Serialize)]
struct IdleResult {
    store: MeasuredStore,
    subscriptions: u64,
    secs: f64,
    /// Per cent of one core.
    cpu_percent: Option<f64>,
    /// CPU of the busiest NATS server, in per cent of one core.
    store_cpu_percent: Option<f64>,
    resident_mib: Option<f64>,
}

/// Result of killing one node.
#[derive(Clone, Copy, Debug, Serialize)]
struct TakeoverResult {
    store: MeasuredStore,
    nodes: usize,
    /// Events that waited at the node that was killed.
    waiting: u64,
    /// From the kill until the first of those events arrived.
    first_ms: Option<f64>,
    /// From the kill until the last of those events arrived.
    last_ms: Option<f64>,
    missing: u64,
    duplicates: u64,
}

pub async fn measure(args: &BenchArgs) -> Result<ClusterReport> {
    let dir = tempfile::Builder::new()
        .prefix(".postrider-bench-")
        .tempdir_in(&args.dir);
    let dir = dir.with_context(|| format!("creating a directory in {}", args.dir.display()))?;
    let wanted = &args.cluster;
    let program = match &wanted.nats {
        Some(_) => None,
        None => Some(nats::find(wanted.nats_server.as_deref())?),
    };
    let mut measured = ClusterReport {
        machine: MachineInfo::read(),
        load_average: procfs::load_average(),
        fdatasync_ms: super::measure_fdatasync(dir.path())?,
        secs: args.secs,
        size: args.size as usize,
        conns: args.conns,
        cells: Vec::new(),
        ratios: Vec::new(),
        raw: Vec::new(),
        curve: Vec::new(),
        idle: Vec::new(),
        takeovers: Vec::new(),
    };
    let bench = BenchSession::start(args, dir.path()).await?;
    let mut grounds = ClusterBench { bench, program };
    let instead = !wanted.nodes.is_empty() || wanted.idle.is_some() || wanted.takeover.is_some();
    if !instead || (!args.load.is_empty() && wanted.nodes.is_empty()) {
        grounds.run_loads(args, &mut measured).await?;
    }
    for store in stores(wanted) {
        for nodes in &wanted.nodes {
            let load = args.load.first().copied().unwrap_or(BenchLoad::Single);
            measured.curve.push(grounds.run_nodes(load, *nodes, store).await?);
        }
    }
    if let Some(subscriptions) = wanted.idle {
        for store in std::iter::once(MeasuredStore::Embedded).chain(stores(wanted)) {
            measured
                .idle
                .push(grounds.watch_idle(subscriptions, store).await?);
        }
    }
    if let Some(waiting) = wanted.takeover {
        for store in stores(wanted) {
            measured.takeovers.push(grounds.take_over(waiting, store).await?);
        }
    }
    Ok(measured)
}

/// All configurations of JetStream to measure.
fn stores(wanted: &ClusterBenchArgs) -> Vec<MeasuredStore> {
    let mut stores = Vec::new();
    for replicas in &wanted.replicas {
        for sync in &wanted.sync {
            let always = *sync == NatsSync::Always;
            // `always` does not apply to servers that somebody else runs: their sync setting is not
            // ours.
            let store = MeasuredStore::JetStream {
                replicas: *replicas,
                always: always && wanted.nats.is_none(),
            };
            if !stores.contains(&store) {
                stores.push(store);
            }
        }
    }
    stores
}

/// The bench with what a cluster measurement needs besides.
struct ClusterBench<'a> {
    bench: BenchSession<'a>,
    program: Option<PathBuf>,
}

/// Nodes that are ready, and the NATS servers that keep their log.
struct BenchCluster {
    nodes: Vec<ReadyServer>,
    nats: Option<BenchNatsServers>,
    prefix: String,
    /// Data directory, removed with the nodes.
    _dir: TempDir,
}

impl BenchCluster {
    fn stores(&self) -> Vec<u32> {
        self.nats.as_ref().map(BenchNatsServers::pids).unwrap_or_default()
    }

    /// Stops the nodes and removes their streams and buckets from servers that are not ours.
    async fn end(self) -> Result<()> {
        drop(self.nodes);
        match self.nats {
            Some(nats) if !nats.is_ours() => super::raw_jetstream::remove(&nats.urls, &self.prefix).await,
            _ => Ok(()),
        }
    }
}

impl ClusterBench<'_> {
    fn say(&self, what: &str) {
        if !self.bench.args.output.is_json() {
            eprintln!("{what} …");
        }
    }

    async fn nats(&self, store: MeasuredStore, dir: &Path) -> Result<Option<BenchNatsServers>> {
        let MeasuredStore::JetStream { replicas, always } = store else {
            return Ok(None);
        };
        let nats = match (&self.program, &self.bench.args.cluster.nats) {
            (Some(program), _) => BenchNatsServers::start(program, replicas, always, dir).await?,
            (None, Some(url)) => BenchNatsServers::at(url),
            (None, None) => bail!("nobody said where NATS is"),
        };
        Ok(Some(nats))
    }

    /// Starts `nodes` nodes on an empty store; `config` is put before the configuration of the
    /// load.
    async fn crew(
        &self,
        store: MeasuredStore,
        nodes: usize,
        load: BenchLoad,
        config: &str,
    ) -> Result<BenchCluster> {
        let dir = tempfile::tempdir_in(self.bench.dir)?;
        let nats = self.nats(store, dir.path()).await?;
        let prefix = format!("bench-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
        let recorded = self.bench.args.recorder != RecorderMode::Off;
        let of_load = server_config(load, recorded, &self.bench.key, self.bench.sink_address, None);
        let mut crew = BenchCluster {
            nodes: Vec::new(),
            nats,
            prefix,
            _dir: dir,
        };
        for n in 0..nodes {
            let own = crew._dir.path().join(format!("node-{n}"));
            let data = own.join("data");
            std::fs::create_dir_all(&data)?;
            let of_store = match (&crew.nats, store) {
                (Some(nats), MeasuredStore::JetStream { replicas, .. }) => {
                    store_config(nats, replicas, &crew.prefix, n)
                }
                _ => String::new(),
            };
            let file = own.join("postrider.toml");
            std::fs::write(&file, format!("{config}{of_store}{of_load}"))?;
            let node = self.bench.serve(&file, &data, own.join("output"), None).await?;
            crew.nodes.push(node);
        }
        if crew.nats.is_some() {
            shared_evenly(&crew.nodes).await?;
        }
        Ok(crew)
    }

    async fn run_loads(&mut self, args: &BenchArgs, measured: &mut ClusterReport) -> Result<()> {
        let all: Vec<MeasuredStore> = std::iter::once(MeasuredStore::Embedded)
            .chain(stores(&args.cluster))
            .collect();
        let loads = if args.load.is_empty() {
            &BenchLoad::ALL[..]
        } else {
            &args.load
        };
        for load in loads {
            let mut runs: Vec<Vec<LoadResult>> = vec![Vec::new(); all.len()];
            for _ in 0..args.cluster.rounds {
                for (store, runs) in all.iter().zip(&mut runs) {
                    self.say(&format!("{load}: {store}"));
                    let crew = self.crew(*store, 1, *load, "").await?;
                    let run = self
                        .bench
                        .measure_nodes(
                            *load,
                            MeasuredServer::Postrider,
                            None,
                            &crew.nodes,
                            &crew.stores(),
                        )
                        .await?;
                    crew.end().await?;
                    runs.push(run);
                }
            }
            for (store, runs) in all.iter().zip(runs) {
                measured.cells.push(middle(*store, runs));
            }
        }
        for store in stores(&args.cluster) {
            for (bytes, in_flight) in [
                (args.size as usize, args.conns as usize),
                (GROUP_BYTES, GROUPS_IN_FLIGHT),
            ] {
                self.say(&format!("{bytes} bytes, {in_flight} in flight: {store} alone"));
                measured.raw.push(self.run_raw(store, bytes, in_flight).await?);
            }
        }
        measured.ratios = ratios(&measured.cells, &measured.raw, args.size as usize);
        Ok(())
    }

    async fn run_raw(
        &self,
        store: MeasuredStore,
        bytes: usize,
        in_flight: usize,
    ) -> Result<RawJetStreamResult> {
        let dir = tempfile::tempdir_in(self.bench.dir)?;
        let nats = self
            .nats(store, dir.path())
            .await?
            .context("the embedded store has none")?;
        let MeasuredStore::JetStream { replicas, .. } = store else {
            bail!("the embedded store has no messages of its own");
        };
        let args = RawArgs {
            urls: nats.urls.clone(),
            replicas,
            size: bytes,
            depth: in_flight,
            secs: self.bench.args.secs,
        };
        let cpu = || {
            nats.pids()
                .into_iter()
                .map(procfs::cpu_seconds)
                .sum::<Option<f64>>()
        };
        let before = cpu();
        let output = ChildProcess::part("bench-raw", &args.to_options())?
            .output()
            .await?;
        let done: RawPublishResult =
            serde_json::from_str(&output).context("reading what was acknowledged")?;
        let used = cpu().zip(before).map(|(now, before)| now - before);
        let rate = quotient(done.messages as f64, done.secs).unwrap_or(0.0);
        let per_message = |used: f64| quotient(used * 1e6, done.messages as f64);
        Ok(RawJetStreamResult {
            store,
            bytes,
            in_flight,
            messages_per_s: tenths(rate),
            mib_per_s: tenths(rate * bytes as f64 / f64::from(1 << 20)),
            ack_ms: done.ack_ms,
            store_cpu_us_per_message: used.filter(|_| nats.is_ours()).and_then(per_message).map(tenths),
        })
    }

    async fn run_nodes(
        &mut self,
        load: BenchLoad,
        count: usize,
        store: MeasuredStore,
    ) -> Result<NodeCountResult> {
        self.say(&format!("{load}: {count} nodes on {store}"));
        let crew = self.crew(store, count, load, "").await?;
        let before = NodeTotals::read(&crew.nodes).await?;
        let run = self
            .bench
            .measure_nodes(load, MeasuredServer::Postrider, None, &crew.nodes, &crew.stores())
            .await?;
        let after = NodeTotals::read(&crew.nodes).await?;
        crew.end().await?;
        let per_node = shares(&before, &after);
        let counts = || per_node.iter().map(|node| node.deliveries as f64);
        let most_to_least = quotient(
            counts().fold(0.0, f64::max),
            counts().fold(f64::INFINITY, f64::min),
        );
        Ok(NodeCountResult {
            nodes: count,
            store,
            run,
            most_to_least: most_to_least.map(hundredths),
            per_node,
        })
    }

    async fn watch_idle(&mut self, subscriptions: u64, store: MeasuredStore) -> Result<IdleResult> {
        self.say(&format!(
            "{subscriptions} subscriptions with nothing to do: {store}"
        ));
        let crew = self.crew(store, 1, BenchLoad::Single, "").await?;
        let node = &crew.nodes[0];
        catalog::make(
            node.address,
            subscriptions.div_ceil(IDLE_PER_TOPIC),
            IDLE_PER_TOPIC,
        )
        .await?;
        // The node is warmed up first: a node that has delivered is the usual idle one.
        let mut warm_up = self.bench.publish_args(BenchLoad::Single, node, None);
        warm_up.secs = 1.0;
        self.bench.publish(warm_up, node).await?;
        pause(IDLE_AFTER).await;
        let pids: Vec<u32> = std::iter::once(node.process.pid()).chain(crew.stores()).collect();
        let read = || {
            pids.iter()
                .map(|pid| procfs::cpu_seconds(*pid))
                .collect::<Vec<_>>()
        };
        let (began, before) = (Instant::now(), read());
        pause(Duration::from_secs_f64(IDLE_SECS)).await;
        let (after, secs) = (read(), began.elapsed().as_secs_f64());
        let percent: Vec<Option<f64>> = after
            .iter()
            .zip(&before)
            .map(|(now, before)| Some(hundredths(((*now)? - (*before)?) / secs * 100.0)))
            .collect();
        let resident_mib = procfs::rss_mib(node.process.pid()).map(tenths);
        crew.end().await?;
        Ok(IdleResult {
            store,
            subscriptions,
            secs: tenths(secs),
            cpu_percent: percent[0],
            store_cpu_percent: percent[1..].iter().copied().flatten().reduce(f64::max),
            resident_mib,
        })
    }

    /// Events wait at every node because their subscription is paused. One node is killed, the
    /// pause ended at another, and the events that waited at the dead one are counted as they
    /// arrive.
    async fn take_over(&mut self, waiting: u64, store: MeasuredStore) -> Result<TakeoverResult> {
        self.say(&format!(
            "{waiting} events wait at a node that is killed: {store}"
        ));
        let secret = uuid::Uuid::new_v4().simple().to_string();
        let client = format!("[[client]]\nid = \"bench\"\nsecret = \"{secret}\"\n");
        let mut crew = self
            .crew(store, TAKEOVER_NODES, BenchLoad::Single, &client)
            .await?;
        control(crew.nodes[0].address, &secret, "pause").await?;
        for node in &crew.nodes {
            paused(node.address, &secret).await?;
        }
        for node in &crew.nodes {
            let mut args = self.bench.publish_args(BenchLoad::Single, node, None);
            // No delivery is expected: the subscription is paused.
            (args.count, args.secs, args.fan_out) = (waiting, super::BACKLOG_SECS_MAX, 0);
            let published = self.bench.publish(args, node).await?;
            ensure!(
                published.events == waiting,
                "{} of {waiting} events were taken",
                published.events
            );
        }
        // The sink counts only the events of the last node, which is the one to be killed.
        let control_of_sink = &mut self.bench.control;
        control_of_sink.start_run(self.bench.run_last).await?;
        let mut dead = crew.nodes.pop().context("there are nodes")?;
        let killed = Instant::now();
        dead.process.kill()?;
        control(crew.nodes[0].address, &secret, "resume").await?;
        let (mut first_ms, mut last_ms) = (None, None);
        while killed.elapsed() < TAKEOVER_MAX && last_ms.is_none() {
            let arrived = control_of_sink.count().await?;
            let now = tenths(killed.elapsed().as_secs_f64() * 1000.0);
            if arrived > 0 {
                first_ms.get_or_insert(now);
            }
            if arrived >= waiting {
                last_ms = Some(now);
            }
            pause(LOOK_EVERY).await;
        }
        let arrived = control_of_sink.stats().await?;
        crew.end().await?;
        Ok(TakeoverResult {
            store,
            nodes: TAKEOVER_NODES,
            waiting,
            first_ms,
            last_ms,
            missing: waiting.saturating_sub(arrived.delivered),
            duplicates: arrived.duplicates,
        })
    }
}

fn store_config(nats: &BenchNatsServers, replicas: usize, prefix: &str, node: usize) -> String {
    let (urls, monitors) = (&nats.urls, &nats.monitors);
    format!(
        "[store]\nkind = \"jetstream\"\n[store.jetstream]\nurls = {urls:?}\nreplicas = {replicas}\n\
         prefix = \"{prefix}\"\nnode_name = \"node-{node}\"\nmonitor_urls = {monitors:?}\n"
    )
}

/// Waits until the nodes own all partitions, with numbers that differ by at most one.
async fn shared_evenly(nodes: &[ReadyServer]) -> Result<()> {
    let began = Instant::now();
    loop {
        let mut shares = Vec::new();
        for node in nodes {
            let health = http::call(node.address, "GET", "/healthz").await;
            let health: Value = match health {
                Ok(answer) => serde_json::from_slice(&answer.body).unwrap_or_default(),
                Err(_) => Value::Null,
            };
            let partitions = &health["store"]["partitions"];
            shares.push((partitions["owned"].as_u64(), partitions["total"].as_u64()));
        }
        if are_even(&shares) {
            return Ok(());
        }
        if began.elapsed() > SHARED_WITHIN {
            bail!(
                "the nodes did not share the partitions within {SHARED_WITHIN:?}: {shares:?}{}",
                nodes[0].output_tail()
            );
        }
        pause(super::READY_EVERY).await;
    }
}

/// Whether the nodes own all partitions evenly; `shares` has each node's owned and total number.
fn are_even(shares: &[(Option<u64>, Option<u64>)]) -> bool {
    let owned: Option<Vec<u64>> = shares.iter().map(|(owned, _)| *owned).collect();
    let (Some(owned), Some((_, Some(total)))) = (owned, shares.first().copied()) else {
        return false;
    };
    let (least, most) = (owned.iter().min(), owned.iter().max());
    owned.iter().sum::<u64>() == total && most.zip(least).is_some_and(|(most, least)| most - least <= 1)
}

/// Work of one node so far.
#[derive(Clone, Copy, Debug)]
struct NodeTotals {
    deliveries: u64,
    cpu_s: Option<f64>,
}

impl NodeTotals {
    async fn read(nodes: &[ReadyServer]) -> Result<Vec<NodeTotals>> {
        let mut all = Vec::new();
        for node in nodes {
            let page = http::call(node.address, "GET", "/metrics").await?;
            let page = String::from_utf8_lossy(&page.body).into_owned();
            all.push(NodeTotals {
                deliveries: metric(&page, "postrider_delivered_events_total"),
                cpu_s: procfs::cpu_seconds(node.process.pid()),
            });
        }
        Ok(all)
    }
}

/// Sum of a metric family over all its labels.
fn metric(page: &str, name: &str) -> u64 {
    let values = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        (rest.starts_with('{') || rest.starts_with(' ')).then_some(rest)?;
        rest.rsplit(' ').next()?.parse::<f64>().ok()
    });
    values.sum::<f64>() as u64
}

fn shares(before: &[NodeTotals], after: &[NodeTotals]) -> Vec<NodeShare> {
    let done =
        |(before, after): (&NodeTotals, &NodeTotals)| after.deliveries.saturating_sub(before.deliveries);
    let all: u64 = before.iter().zip(after).map(done).sum();
    let share = |(before, after): (&NodeTotals, &NodeTotals)| {
        let deliveries = done((before, after));
        let cpu = after.cpu_s.zip(before.cpu_s).map(|(now, before)| now - before);
        NodeShare {
            deliveries,
            share: hundredths(quotient(deliveries as f64, all as f64).unwrap_or(0.0)),
            cpu_us_per_delivery: cpu
                .and_then(|cpu| quotient(cpu * 1e6, deliveries as f64))
                .map(tenths),
        }
    };
    before.iter().zip(after).map(share).collect()
}

/// The median round by its rate.
fn middle(store: MeasuredStore, mut runs: Vec<LoadResult>) -> StoreLoadResult {
    let rounds_deliveries_per_s = runs.iter().map(|run| run.deliveries_per_s).collect();
    runs.sort_by(|one, other| one.deliveries_per_s.total_cmp(&other.deliveries_per_s));
    let run = runs.swap_remove(runs.len() / 2);
    StoreLoadResult {
        store,
        run,
        rounds_deliveries_per_s,
    }
}

fn ratios(cells: &[StoreLoadResult], raw: &[RawJetStreamResult], size: usize) -> Vec<StoreRatio> {
    let of_cell = |cell: &StoreLoadResult| {
        if cell.store == MeasuredStore::Embedded {
            return None;
        }
        let same_load = |other: &&StoreLoadResult| {
            other.store == MeasuredStore::Embedded && other.run.load == cell.run.load
        };
        let embedded = &cells.iter().find(same_load)?.run;
        let run = &cell.run;
        let of = |ours: f64, theirs: f64| quotient(ours, theirs).map(hundredths);
        let all = run.cpu_us_per_delivery.zip(run.store_cpu_us_per_delivery);
        let alone = raw
            .iter()
            .find(|raw| raw.store == cell.store && raw.bytes == size);
        let events_per_s = run.deliveries_per_s / run.load.fan_out() as f64;
        Some(StoreRatio {
            load: run.load,
            store: cell.store,
            deliveries_per_s: of(run.deliveries_per_s, embedded.deliveries_per_s),
            end_to_end_p50: of(run.end_to_end_ms.p50, embedded.end_to_end_ms.p50),
            end_to_end_p99: of(run.end_to_end_ms.p99, embedded.end_to_end_ms.p99),
            cpu_us_per_delivery: run
                .cpu_us_per_delivery
                .zip(embedded.cpu_us_per_delivery)
                .and_then(|(ours, theirs)| of(ours, theirs)),
            cpu_us_per_delivery_all: all
                .zip(embedded.cpu_us_per_delivery)
                .and_then(|((own, store), theirs)| of(own + store, theirs)),
            of_raw: alone.and_then(|raw| of(events_per_s, raw.messages_per_s)),
        })
    };
    cells.iter().filter_map(of_cell).collect()
}

/// Pauses or resumes the one subscription.
async fn control(to: SocketAddr, secret: &str, verb: &str) -> Result<()> {
    let path = format!("/postrider/v1/subscriptions/{verb}");
    let answer = ask(to, secret, "POST", &path, r#"{"id":"bench/s0"}"#).await?;
    ensure!(
        answer.status == 200,
        "POST {path} was answered with {}: {}",
        answer.status,
        String::from_utf8_lossy(&answer.body)
    );
    Ok(())
}

/// Waits until a node sees the subscription as paused.
async fn paused(at: SocketAddr, secret: &str) -> Result<()> {
    let began = Instant::now();
    loop {
        let answer = ask(at, secret, "GET", "/postrider/v1/subscription?id=bench/s0", "").await?;
        let shown: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        if shown["state"] == "paused" {
            return Ok(());
        }
        ensure!(
            began.elapsed() < SHARED_WITHIN,
            "a node did not hear that the subscription is paused: {shown}"
        );
        pause(super::READY_EVERY).await;
    }
}

async fn ask(
    to: SocketAddr,
    secret: &str,
    method: &str,
    path: &str,
    body: &str,
) -> Result<http::BenchResponse> {
    let mut connection = BenchConnection::open(to).await?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {to}\r\nauthorization: Bearer {secret}\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    connection.send(request.as_bytes()).await?;
    connection.response().await
}

impl ClusterReport {
    /// The tables and remarks, ready to print.
    pub fn text(&self) -> String {
        let MachineInfo {
            cpu,
            cores,
            memory_mib,
            kernel,
        } = &self.machine;
        let mut text = format!(
            "{cpu}, {cores} cores, {memory_mib} MiB, Linux {kernel}; fdatasync p50 {} ms, p99 {} ms; load {}\n\
             {} bytes per event, {} connections, {} s per run\n",
            millis(self.fdatasync_ms.p50),
            millis(self.fdatasync_ms.p99),
            or_dash(self.load_average, |load| format!("{load:.1}")),
            self.size,
            self.conns,
            self.secs,
        );
        let mut add = |title: &str, table: comfy_table::Table| {
            if !table.is_empty() {
                text += &format!("\n{title}\n{table}\n");
            }
        };
        add("One node", self.cells_table());
        add("As a multiple of the embedded store", self.ratios_table());
        add("JetStream alone", self.raw_table());
        add("Several nodes on this machine", self.curve_table());
        add("Nothing to do", self.idle_table());
        add("One of several nodes killed", self.takeovers_table());
        for remark in self.remarks() {
            text += &format!("\n{remark}");
        }
        text
    }

    fn cells_table(&self) -> comfy_table::Table {
        let mut table = table(&[
            "load",
            "store",
            "deliveries/s",
            "ack\np50 ms",
            "ack\np99 ms",
            "end-to-end\np50 ms",
            "end-to-end\np99 ms",
            "CPU µs\n/delivery",
            "NATS CPU µs\n/delivery",
            "peak RSS\nMiB",
            "missing",
            "duplicates",
        ]);
        for cell in &self.cells {
            let run = &cell.run;
            table.add_row([
                named(run.load, run.offered_per_s.is_some()),
                cell.store.to_string(),
                format!("{:.0}", run.deliveries_per_s),
                millis(run.ack_ms.p50),
                millis(run.ack_ms.p99),
                millis(run.end_to_end_ms.p50),
                millis(run.end_to_end_ms.p99),
                or_dash(run.cpu_us_per_delivery, |us| format!("{us:.1}")),
                or_dash(run.store_cpu_us_per_delivery, |us| format!("{us:.1}")),
                or_dash(run.rss_peak_mib, |mib| format!("{mib:.0}")),
                run.missing.to_string(),
                run.duplicates.to_string(),
            ]);
        }
        table
    }

    fn ratios_table(&self) -> comfy_table::Table {
        let mut table = table(&[
            "load",
            "store",
            "deliveries/s",
            "end-to-end p50",
            "end-to-end p99",
            "CPU/delivery",
            "with NATS",
            "events/s of raw\nmessages/s",
        ]);
        for ratio in &self.ratios {
            let times = |value| or_dash(value, |value| format!("{value:.2}×"));
            table.add_row([
                ratio.load.to_string(),
                ratio.store.to_string(),
                times(ratio.deliveries_per_s),
                times(ratio.end_to_end_p50),
                times(ratio.end_to_end_p99),
                times(ratio.cpu_us_per_delivery),
                times(ratio.cpu_us_per_delivery_all),
                times(ratio.of_raw),
            ]);
        }
        table
    }

    fn raw_table(&self) -> comfy_table::Table {
        let mut table = table(&[
            "bytes",
            "store",
            "in flight",
            "messages/s",
            "MiB/s",
            "ack\np50 ms",
            "ack\np99 ms",
            "NATS CPU µs\n/message",
        ]);
        for raw in &self.raw {
            table.add_row([
                raw.bytes.to_string(),
                raw.store.to_string(),
                raw.in_flight.to_string(),
                format!("{:.0}", raw.messages_per_s),
                format!("{:.1}", raw.mib_per_s),
                millis(raw.ack_ms.p50),
                millis(raw.ack_ms.p99),
                or_dash(raw.store_cpu_us_per_message, |us| format!("{us:.1}")),
            ]);
        }
        table
    }

    fn curve_table(&self) -> comfy_table::Table {
        let mut table = table(&[
            "nodes",
            "store",
            "deliveries/s",
            "end-to-end\np50 ms",
            "end-to-end\np99 ms",
            "CPU µs\n/delivery",
            "NATS CPU µs\n/delivery",
            "CPU µs/delivery\nof each node",
            "share\nof each node",
            "most\n/least",
            "missing",
            "duplicates",
        ]);
        for point in &self.curve {
            let run = &point.run;
            let each = |show: &dyn Fn(&NodeShare) -> String| {
                let all: Vec<String> = point.per_node.iter().map(show).collect();
                all.join(" ")
            };
            table.add_row([
                point.nodes.to_string(),
                point.store.to_string(),
                format!("{:.0}", run.deliveries_per_s),
                millis(run.end_to_end_ms.p50),
                millis(run.end_to_end_ms.p99),
                or_dash(run.cpu_us_per_delivery, |us| format!("{us:.1}")),
                or_dash(run.store_cpu_us_per_delivery, |us| format!("{us:.1}")),
                each(&|node| or_dash(node.cpu_us_per_delivery, |us| format!("{us:.0}"))),
                each(&|node| format!("{:.0}%", node.share * 100.0)),
                or_dash(point.most_to_least, |times| format!("{times:.2}×")),
                run.missing.to_string(),
                run.duplicates.to_string(),
            ]);
        }
        table
    }

    fn idle_table(&self) -> comfy_table::Table {
        let mut table = table(&[
            "subscriptions",
            "store",
            "% of a core",
            "% of a core,\nbusiest NATS server",
            "resident\nMiB",
        ]);
        for idle in &self.idle {
            table.add_row([
                idle.subscriptions.to_string(),
                idle.store.to_string(),
                or_dash(idle.cpu_percent, |percent| format!("{percent:.2}")),
                or_dash(idle.store_cpu_percent, |percent| format!("{percent:.2}")),
                or_dash(idle.resident_mib, |mib| format!("{mib:.0}")),
            ]);
        }
        table
    }

    fn takeovers_table(&self) -> comfy_table::Table {
        let mut table = table(&[
            "nodes",
            "store",
            "waiting at\nthe dead one",
            "first arrives\nafter ms",
            "last arrives\nafter ms",
            "missing",
            "duplicates",
        ]);
        for takeover in &self.takeovers {
            table.add_row([
                takeover.nodes.to_string(),
                takeover.store.to_string(),
                takeover.waiting.to_string(),
                or_dash(takeover.first_ms, |ms| format!("{ms:.0}")),
                or_dash(takeover.last_ms, |ms| format!("{ms:.0}")),
                takeover.missing.to_string(),
                takeover.duplicates.to_string(),
            ]);
        }
        table
    }

    fn remarks(&self) -> Vec<String> {
        let cells = self.cells.iter().map(|cell| (cell.store, &cell.run));
        let points = self.curve.iter().map(|point| (point.store, &point.run));
        let runs: Vec<(String, &LoadResult)> = cells
            .chain(points)
            .map(|(store, run)| (format!("{}, {store}", run.load), run))
            .collect();
        super::report::remarks(runs.iter().map(|(name, run)| (name.as_str(), *run)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_shared_when_all_are_served_and_nobody_has_two_more() {
        let shares =
            |owned: &[u64]| -> Vec<_> { owned.iter().map(|owned| (Some(*owned), Some(8))).collect() };
        assert!(are_even(&shares(&[8])));
        assert!(are_even(&shares(&[3, 3, 2])));
        assert!(!are_even(&shares(&[4, 2, 2])));
        assert!(!are_even(&shares(&[2, 2, 2])));
        assert!(!are_even(&[(Some(8), Some(8)), (None, None)]));
        assert!(!are_even(&[]));
    }

    #[test]
    fn a_family_is_summed_over_its_labels() {
        let page = "# HELP a_total x\n# TYPE a_total counter\na_total{of=\"x y\"} 3\na_total{of=\"z\"} 4\na_total_more 9\n";
        assert_eq!(metric(page, "a_total"), 7);
        assert_eq!(metric("b 5\n", "b"), 5);
        assert_eq!(metric("", "b"), 0);
    }

    #[test]
    fn shares_are_of_what_was_done_meanwhile() {
        let at = |deliveries, cpu_s| NodeTotals {
            deliveries,
            cpu_s: Some(cpu_s),
        };
        let found = shares(&[at(100, 1.0), at(0, 0.0)], &[at(400, 1.03), at(100, 0.02)]);
        let expected = [(300, 0.75, Some(100.0)), (100, 0.25, Some(200.0))];
        let expected = expected.map(|(deliveries, share, cpu_us_per_delivery)| NodeShare {
            deliveries,
            share,
            cpu_us_per_delivery,
        });
        assert_eq!(found, expected);
    }

    fn cell(store: MeasuredStore, load: BenchLoad, rates: &[f64]) -> StoreLoadResult {
        let run =
            |rate: &f64| LoadResult::example(load, *rate, (store != MeasuredStore::Embedded).then_some(4.0));
        middle(store, rates.iter().map(run).collect())
    }

    const R1: MeasuredStore = MeasuredStore::JetStream {
        replicas: 1,
        always: false,
    };

    #[test]
    fn the_run_in_the_middle_counts_beside_the_embedded_one() {
        let cells = [
            cell(
                MeasuredStore::Embedded,
                BenchLoad::FanOut,
                &[900.0, 1000.0, 5000.0],
            ),
            cell(R1, BenchLoad::FanOut, &[600.0, 100.0, 700.0]),
            cell(R1, BenchLoad::Single, &[700.0]),
        ];
        let raw = RawJetStreamResult {
            store: R1,
            bytes: 1024,
            in_flight: 64,
            messages_per_s: 120.0,
            mib_per_s: 0.1,
            ack_ms: LatencyPercentiles::default(),
            store_cpu_us_per_message: None,
        };
        let found = ratios(&cells, &[raw], 1024);
        let [ratio] = &found[..] else {
            panic!("expected one ratio, got {found:?}");
        };
        assert_eq!(ratio.deliveries_per_s, Some(0.6));
        assert_eq!(ratio.cpu_us_per_delivery, Some(1.0));
        assert_eq!(ratio.cpu_us_per_delivery_all, Some(1.4));
        assert_eq!(ratio.of_raw, Some(0.5));
        assert_eq!(cells[1].rounds_deliveries_per_s, [600.0, 100.0, 700.0]);
    }

    #[test]
    fn each_store_is_run_once() {
        let args = |nats: Option<&str>| ClusterBenchArgs {
            store: Some(BenchStoreKind::Jetstream),
            nats_server: None,
            nats: nats.map(str::to_owned),
            replicas: vec![1, 3],
            sync: vec![NatsSync::Interval, NatsSync::Always],
            rounds: 1,
            nodes: Vec::new(),
            idle: None,
            takeover: None,
        };
        let names = |args| {
            stores(&args)
                .iter()
                .map(MeasuredStore::to_string)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(args(None)),
            [
                "jetstream R1",
                "jetstream R1 always",
                "jetstream R3",
                "jetstream R3 always"
            ]
        );
        assert_eq!(names(args(Some("nats://x:1"))), ["jetstream R1", "jetstream R3"]);
    }

    #[test]
    fn a_node_is_told_where_its_log_is() {
        let config = store_config(&BenchNatsServers::at("nats://127.0.0.1:4222"), 3, "bench-1", 2);
        let config: toml::Value = toml::from_str(&config).unwrap();
        let store = &config["store"];
        assert_eq!(store["kind"].as_str(), Some("jetstream"));
        assert_eq!(store["jetstream"]["replicas"].as_integer(), Some(3));
        assert_eq!(
            store["jetstream"]["urls"][0].as_str(),
            Some("nats://127.0.0.1:4222")
        );
        assert_eq!(store["jetstream"]["node_name"].as_str(), Some("node-2"));
    }
}
