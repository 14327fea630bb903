//! `postrider bench`: publish → durable → delivered, measured on this machine.
//!
//! A publisher, the server under test and a sink run as processes of their own. Each load runs
//! first on the relay, which does the least any durable relay must do, and then on Postrider: rates
//! depend on the machine, the ratio of the two much less.

mod catalog;
mod child;
mod cluster;
mod http;
mod dead_letters;
mod event_mark;
mod nats;
mod ports;
mod procfs;
mod publisher;
mod raw_jetstream;
mod relay;
mod report;
mod sink;

pub use publisher::{PublishArgs, run as run_publish};
pub use raw_jetstream::{RawArgs, run as run_raw};
pub use relay::{RelayArgs, run as run_relay};
pub use sink::{SinkArgs, run as run_sink};

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use base64::prelude::{BASE64_STANDARD, Engine};
use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::net::TcpSocket;
use tokio::time::Instant;

use crate::output::OutputFlags;
use child::ChildProcess;
use procfs::MachineInfo;
use publisher::PublishingResult;
use report::{BenchReport, KernelUsage, LoadResult};
use sink::{LatencyPercentiles, SinkControl};

const READY_WITHIN: Duration = Duration::from_secs(60);
const READY_EVERY: Duration = Duration::from_millis(20);
/// Longest that publishing a backlog may take.
const BACKLOG_SECS_MAX: f64 = 600.0;
const FDATASYNC_SECS: f64 = 0.5;
/// Bounds the deliveries outstanding: few enough that the wait in the queue stays short, enough
/// that no connection idles.
const DELIVERIES_OUTSTANDING_MAX: u64 = 10_000;
/// Subject of backlog events. Only they wait for the dead endpoint; measured events do not add to
/// them.
const BACKLOG_SUBJECT: &str = "backlog";
const LOCAL: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

#[derive(clap::Args, Clone, Debug)]
pub struct BenchArgs {
    /// Seconds to publish for in each run.
    #[arg(long, default_value_t = 8.0, value_parser = parse_secs)]
    secs: f64,
    /// Bytes per event.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    size: u32,
    /// Publisher connections.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    conns: u32,
    /// Which loads to run, in this order; all when left out.
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',')]
    load: Vec<BenchLoad>,
    /// Leave out the relay, and with it the comparison.
    #[arg(long)]
    no_relay: bool,
    /// Directory for the logs, on the disk to measure; they are removed afterwards.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// With the flight recorder, without it, or once each to see what it costs.
    #[arg(long, value_enum, default_value_t = RecorderMode::On)]
    recorder: RecorderMode,
    /// Repeat each load with this many events waiting for a dead endpoint.
    #[arg(long, default_value_t = 0)]
    backlog: u64,
    /// Instead of the loads, write this many dead letters to a local directory.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    dead_letters: Option<u64>,
    /// Instead of the loads, create this many topics with so many subscriptions each, restart the
    /// server with them, and publish beside them.
    #[arg(long, value_name = "TOPICSxSUBSCRIPTIONS", value_parser = catalog::parse_size, conflicts_with = "dead_letters")]
    catalogue: Option<catalog::CatalogSize>,
    #[command(flatten)]
    cluster: cluster::ClusterBenchArgs,
    /// Text output ends with the line of JSON, too.
    #[command(flatten)]
    output: OutputFlags,
}

/// Load that a server is measured with.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BenchLoad {
    /// 1 event per request, 1 event per delivery.
    Single,
    /// 100 events per request, one event per delivery.
    BatchIn,
    /// 100 events per request, up to 100 events per delivery.
    BatchInOut,
    /// 1 event per request, delivered to 10 subscriptions.
    FanOut,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum RecorderMode {
    On,
    Off,
    Both,
}

/// Server under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum MeasuredServer {
    #[serde(rename = "relay")]
    Relay,
    #[serde(rename = "postrider")]
    Postrider,
    /// Postrider, with its flight recorder off.
    #[serde(rename = "postrider-unrecorded")]
    Unrecorded,
    /// Postrider, with a backlog for a dead endpoint.
    #[serde(rename = "postrider+backlog")]
    Backlogged,
}

impl BenchLoad {
    const ALL: [BenchLoad; 4] = [
        BenchLoad::Single,
        BenchLoad::BatchIn,
        BenchLoad::BatchInOut,
        BenchLoad::FanOut,
    ];

    fn events_per_request(self) -> u64 {
        match self {
            BenchLoad::Single | BenchLoad::FanOut => 1,
            BenchLoad::BatchIn | BenchLoad::BatchInOut => 100,
        }
    }

    fn events_per_delivery_max(self) -> u64 {
        match self {
            BenchLoad::Single | BenchLoad::BatchIn | BenchLoad::FanOut => 1,
            BenchLoad::BatchInOut => 100,
        }
    }

    fn fan_out(self) -> u64 {
        match self {
            BenchLoad::Single | BenchLoad::BatchIn | BenchLoad::BatchInOut => 1,
            BenchLoad::FanOut => 10,
        }
    }
}

impl fmt::Display for BenchLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BenchLoad::Single => "single",
            BenchLoad::BatchIn => "batch-in",
            BenchLoad::BatchInOut => "batch-in-out",
            BenchLoad::FanOut => "fan-out",
        })
    }
}

impl fmt::Display for MeasuredServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MeasuredServer::Relay => "relay",
            MeasuredServer::Postrider => "postrider",
            MeasuredServer::Unrecorded => "postrider-unrecorded",
            MeasuredServer::Backlogged => "postrider+backlog",
        })
    }
}

/// Measures and prints. An interrupt ends the child processes and removes the files first.
pub fn run(args: BenchArgs) -> Result<()> {
    if let Some(count) = args.dead_letters {
        let measured = crate::serve::runtime(None)?.block_on(dead_letters::measure(&args, count))?;
        let mut out = std::io::stdout().lock();
        if !args.output.is_json() {
            writeln!(out, "{}\n", measured.text())?;
        }
        writeln!(out, "{}", serde_json::to_string(&measured)?)?;
        return Ok(());
    }
    if let Some(size) = args.catalogue {
        let measured = single_threaded()?.block_on(unless_interrupted(catalog::measure(&args, size)))?;
        let mut out = std::io::stdout().lock();
        if !args.output.is_json() {
            writeln!(out, "{}\n", measured.text())?;
        }
        writeln!(out, "{}", serde_json::to_string(&measured)?)?;
        return Ok(());
    }
    if args.cluster.is_wanted() {
        let measured = single_threaded()?.block_on(unless_interrupted(cluster::measure(&args)))?;
        let mut out = std::io::stdout().lock();
        if !args.output.is_json() {
            writeln!(out, "{}\n", measured.text())?;
        }
        writeln!(out, "{}", serde_json::to_string(&measured)?)?;
        return Ok(());
    }
    let report = single_threaded()?.block_on(unless_interrupted(measure(&args)))?;
    let mut out = std::io::stdout().lock();
    if !args.output.is_json() {
        writeln!(out, "{}\n", report.text())?;
    }
    writeln!(out, "{}", serde_json::to_string(&report)?)?;
    Ok(())
}

async fn unless_interrupted<T>(measuring: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        biased;
        interrupted = interrupted() => {
            interrupted?;
            bail!("interrupted")
        }
        measured = measuring => measured,
    }
}

async fn measure(args: &BenchArgs) -> Result<BenchReport> {
    let dir = tempfile::Builder::new()
        .prefix(".postrider-bench-")
        .tempdir_in(&args.dir);
    let dir = dir.with_context(|| format!("creating a directory in {}", args.dir.display()))?;
    let fdatasync_ms = measure_fdatasync(dir.path())?;
    let mut bench = BenchSession::start(args, dir.path()).await?;

    let loads = if args.load.is_empty() {
        BenchLoad::ALL.to_vec()
    } else {
        args.load.clone()
    };
    let servers = servers(args);
    let mut runs: Vec<LoadResult> = Vec::new();
    for load in &loads {
        for server in &servers {
            runs.push(bench.measure(*load, *server, None).await?);
        }
    }
    // At its highest rate a server's latency is that of its queue; half the rate shows the server's
    // own latency.
    let highest: Vec<LoadResult> = runs
        .iter()
        .filter(|run| run.load == BenchLoad::Single)
        .cloned()
        .collect();
    for run in highest.iter().filter(|run| run.deliveries_per_s >= 2.0) {
        let half = run.deliveries_per_s / 2.0;
        runs.push(bench.measure(run.load, run.server, Some(half)).await?);
    }
    let ratios = report::ratios(&runs);
    let recorder = report::recorder(&runs);
    Ok(BenchReport {
        machine: MachineInfo::read(),
        fdatasync_ms,
        secs: args.secs,
        size: args.size as usize,
        conns: args.conns,
        backlog: args.backlog,
        runs,
        ratios,
        recorder,
    })
}

fn servers(args: &BenchArgs) -> Vec<MeasuredServer> {
    let mut servers = vec![
        MeasuredServer::Relay,
        MeasuredServer::Unrecorded,
        MeasuredServer::Postrider,
        MeasuredServer::Backlogged,
    ];
    servers.retain(|server| match server {
        MeasuredServer::Relay => !args.no_relay,
        MeasuredServer::Unrecorded => args.recorder != RecorderMode::On,
        MeasuredServer::Postrider => args.recorder != RecorderMode::Off,
        MeasuredServer::Backlogged => args.backlog > 0,
    });
    servers
}

/// State that all runs share.
struct BenchSession<'a> {
    args: &'a BenchArgs,
    dir: &'a Path,
    sink: ChildProcess,
    sink_address: SocketAddr,
    control: SinkControl,
    key: String,
    run_last: u32,
}

/// A server that has reported ready.
struct ReadyServer {
    process: ChildProcess,
    address: SocketAddr,
    log: Option<PathBuf>,
    /// Holds the dead endpoint's port: bound and not listening, so that every connection is
    /// refused.
    _dead: Option<TcpSocket>,
}

impl<'a> BenchSession<'a> {
    async fn start(args: &'a BenchArgs, dir: &'a Path) -> Result<BenchSession<'a>> {
        let mut sink = ChildProcess::part("bench-sink", &[])?;
        let sink_address = sink.address().await?;
        let control = SinkControl::open(sink_address).await?;
        let key: [[u8; 16]; 2] = std::array::from_fn(|_| uuid::Uuid::new_v4().into_bytes());
        let key = BASE64_STANDARD.encode(key.as_flattened());
        Ok(BenchSession {
            args,
            dir,
            sink,
            sink_address,
            control,
            key,
            run_last: 0,
        })
    }

    /// Measures one run: starts a fresh server, warms it up briefly, then counts.
    async fn measure(
        &mut self,
        load: BenchLoad,
        server: MeasuredServer,
        rate: Option<f64>,
    ) -> Result<LoadResult> {
        if !self.args.output.is_json() {
            let rate = rate.map(|rate| format!(" at {rate:.0}/s")).unwrap_or_default();
            eprintln!("{load}{rate}: {server} …");
        }
        let dir = tempfile::tempdir_in(self.dir)?;
        let ready = match server {
            MeasuredServer::Relay => self.start_relay(load, dir.path()).await?,
            MeasuredServer::Postrider | MeasuredServer::Unrecorded | MeasuredServer::Backlogged => {
                self.start_postrider(load, server, dir.path()).await?
            }
        };
        if server == MeasuredServer::Backlogged {
            let mut backlog = self.publish_args(load, &ready, None);
            (backlog.subject, backlog.count) = (BACKLOG_SUBJECT.to_owned(), self.args.backlog);
            (backlog.events, backlog.secs) = (100, BACKLOG_SECS_MAX);
            self.publish(backlog, &ready).await?;
        }
        self.measure_ready(load, server, rate, &ready).await
    }

    /// Measures one run on a server that is ready.
    async fn measure_ready(
        &mut self,
        load: BenchLoad,
        server: MeasuredServer,
        rate: Option<f64>,
        ready: &ReadyServer,
    ) -> Result<LoadResult> {
        self.measure_nodes(load, server, rate, std::slice::from_ref(ready), &[])
            .await
    }

    /// Measures one run on ready servers that share the load; `stores` are the processes that keep
    /// their log.
    async fn measure_nodes(
        &mut self,
        load: BenchLoad,
        server: MeasuredServer,
        rate: Option<f64>,
        nodes: &[ReadyServer],
        stores: &[u32],
    ) -> Result<LoadResult> {
        let mut measured = self.publish_args(load, &nodes[0], rate);
        measured.to = nodes.iter().map(|node| node.address).collect();
        let mut warm_up = measured.clone();
        warm_up.secs = (self.args.secs / 4.0).min(1.0);
        self.publish(warm_up, &nodes[0]).await?;

        let before = CpuCounters::read(nodes, stores, &self.sink);
        let published = self.publish(measured, &nodes[0]).await?;
        let usage = CpuCounters::read(nodes, stores, &self.sink).since(&before);
        let arrived = self.control.stats().await?;
        Ok(LoadResult::new(load, server, rate, published, arrived, usage))
    }

    async fn start_relay(&self, load: BenchLoad, dir: &Path) -> Result<ReadyServer> {
        let log = dir.join("log");
        let option = |name: &str, value: &dyn fmt::Display| format!("--{name}={value}");
        let mut process = ChildProcess::part(
            "bench-relay",
            &[
                option("sink", &self.sink_address),
                option("fan-out", &load.fan_out()),
                option("batch", &load.events_per_delivery_max()),
                option("log", &log.display()),
            ],
        )?;
        let address = process.address().await?;
        Ok(ReadyServer {
            process,
            address,
            log: None,
            _dead: None,
        })
    }

    async fn start_postrider(
        &self,
        load: BenchLoad,
        server: MeasuredServer,
        dir: &Path,
    ) -> Result<ReadyServer> {
        let dead = (server == MeasuredServer::Backlogged)
            .then(closed_port)
            .transpose()?;
        let dead_address = dead.as_ref().map(TcpSocket::local_addr).transpose()?;
        let (config, data) = (dir.join("postrider.toml"), dir.join("data"));
        std::fs::write(
            &config,
            server_config(
                load,
                self.recorded(server),
                &self.key,
                self.sink_address,
                dead_address,
            ),
        )?;
        std::fs::create_dir(&data)?;
        let log = dir.join("output");
        self.serve(&config, &data, log, dead).await
    }

    fn recorded(&self, server: MeasuredServer) -> bool {
        match server {
            MeasuredServer::Unrecorded => false,
            _ => self.args.recorder != RecorderMode::Off,
        }
    }

    /// Starts the server on the existing files in its directory and waits until it is ready.
    async fn serve(
        &self,
        config: &Path,
        data: &Path,
        log: PathBuf,
        dead: Option<TcpSocket>,
    ) -> Result<ReadyServer> {
        let address = ports::own();
        let http = address.to_string();
        let args: [&OsStr; 9] = [
            "serve".as_ref(),
            "--config".as_ref(),
            config.as_ref(),
            "--data-dir".as_ref(),
            data.as_ref(),
            "--http".as_ref(),
            http.as_ref(),
            "--https".as_ref(),
            "off".as_ref(),
        ];
        let process = ChildProcess::server(&args, &log)?;
        let mut ready = ReadyServer {
            process,
            address,
            log: Some(log),
            _dead: dead,
        };
        ready.wait().await?;
        Ok(ready)
    }

    fn publish_args(&self, load: BenchLoad, ready: &ReadyServer, rate: Option<f64>) -> PublishArgs {
        PublishArgs {
            to: vec![ready.address],
            path: "/topics/bench/api/events?api-version=2018-01-01".to_owned(),
            key: self.key.clone(),
            sink: self.sink_address,
            run: 0,
            subject: "bench".to_owned(),
            conns: self.args.conns,
            events: load.events_per_request(),
            size: self.args.size as usize,
            fan_out: load.fan_out(),
            secs: self.args.secs,
            count: u64::MAX,
            rate,
            outstanding: DELIVERIES_OUTSTANDING_MAX,
        }
    }

    /// Publishes in a process of its own, under a new run number.
    async fn publish(&mut self, mut args: PublishArgs, ready: &ReadyServer) -> Result<PublishingResult> {
        self.run_last += 1;
        args.run = self.run_last;
        self.control.start_run(args.run).await?;
        let output = ChildProcess::part("bench-publish", &args.to_options())?
            .output()
            .await?;
        let published: PublishingResult =
            serde_json::from_str(&output).context("reading what was published")?;
        if published.events == 0 {
            let error = published.error_first.as_deref().unwrap_or("no answer in time");
            bail!("nothing could be published: {error}{}", ready.output_tail());
        }
        Ok(published)
    }
}

impl ReadyServer {
    /// Waits until the server says that it is ready.
    async fn wait(&mut self) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < READY_WITHIN {
            ensure!(
                !self.process.has_ended(),
                "the server ended at once{}",
                self.output_tail()
            );
            let answer = http::call(self.address, "GET", "/healthz").await;
            if answer.is_ok_and(|answer| answer.status == 200) {
                return Ok(());
            }
            pause(READY_EVERY).await;
        }
        bail!(
            "the server was not ready within {READY_WITHIN:?}{}",
            self.output_tail()
        )
    }

    /// The last lines of the server's output, for an error message.
    fn output_tail(&self) -> String {
        const LINES_MAX: usize = 15;
        let text = self
            .log
            .as_ref()
            .and_then(|log| std::fs::read(log).ok())
            .unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(LINES_MAX)..];
        last.iter().map(|line| format!("\n  {line}")).collect()
    }
}

/// CPU counters of the kernel at one instant.
struct CpuCounters {
    at: Instant,
    server_cpu_s: Option<f64>,
    store_cpu_s: Option<f64>,
    server_rss_peak_mib: Option<f64>,
    sink_cpu_s: Option<f64>,
    own_cpu_s: Option<f64>,
    machine_busy_s: Option<f64>,
}

impl CpuCounters {
    fn read(servers: &[ReadyServer], stores: &[u32], sink: &ChildProcess) -> CpuCounters {
        let pids = || servers.iter().map(|server| server.process.pid());
        let stores = stores.iter().map(|pid| procfs::cpu_seconds(*pid));
        CpuCounters {
            at: Instant::now(),
            server_cpu_s: pids().map(procfs::cpu_seconds).sum(),
            store_cpu_s: stores.sum(),
            server_rss_peak_mib: pids().map(procfs::rss_peak_mib).sum(),
            sink_cpu_s: procfs::cpu_seconds(sink.pid()),
            own_cpu_s: procfs::cpu_seconds(std::process::id()),
            machine_busy_s: procfs::machine_busy_seconds(),
        }
    }

    fn since(&self, before: &CpuCounters) -> KernelUsage {
        let used = |now: Option<f64>, before: Option<f64>| Some(now? - before?);
        let server_cpu_s = used(self.server_cpu_s, before.server_cpu_s);
        let sink_cpu_s = used(self.sink_cpu_s, before.sink_cpu_s);
        // Our own CPU time includes that of the publisher, which has ended and been reaped.
        let own_cpu_s = used(self.own_cpu_s, before.own_cpu_s);
        let machine_busy_s = used(self.machine_busy_s, before.machine_busy_s);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let available_s = (self.at - before.at).as_secs_f64() * cores as f64;
        let store_cpu_s = used(self.store_cpu_s, before.store_cpu_s);
        let others = || Some(machine_busy_s? - server_cpu_s? - store_cpu_s? - sink_cpu_s? - own_cpu_s?);
        KernelUsage {
            server_cpu_s,
            store_cpu_s: store_cpu_s.filter(|used| *used > 0.0),
            server_rss_peak_mib: self.server_rss_peak_mib,
            cpu_share_others: others().map(|others| others.max(0.0) / available_s),
        }
    }
}

fn server_config(
    load: BenchLoad,
    recorded: bool,
    key: &str,
    sink: SocketAddr,
    dead: Option<SocketAddr>,
) -> String {
    let mut config = format!(
        "[recorder]\nenabled = {recorded}\n\
         [[topic]]\nname = \"bench\"\ninputSchema = \"EventGridSchema\"\nkey1 = \"{key}\"\n"
    );
    let batch = load.events_per_delivery_max();
    for index in 0..load.fan_out() {
        let url = format!("http://{sink}/hook/{index}");
        config += &subscription_config(&format!("s{index}"), &url, batch);
    }
    if let Some(dead) = dead {
        config += &subscription_config("dead", &format!("http://{dead}/"), batch);
        config += &format!("[topic.subscription.filter]\nsubjectBeginsWith = \"{BACKLOG_SUBJECT}/\"\n");
    }
    config
}

fn subscription_config(name: &str, url: &str, batch: u64) -> String {
    format!(
        "\n[[topic.subscription]]\nname = \"{name}\"\n\
         [topic.subscription.destination]\nendpointType = \"WebHook\"\n\
         [topic.subscription.destination.properties]\nendpointUrl = \"{url}\"\n\
         maxEventsPerBatch = {batch}\npreferredBatchSizeInKilobytes = 1024\n"
    )
}

fn closed_port() -> Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(LOCAL)?;
    Ok(socket)
}

/// How long this disk takes to make 4 KiB durable. Everything acknowledged waits for it.
fn measure_fdatasync(dir: &Path) -> Result<LatencyPercentiles> {
    let mut file = File::create(dir.join("fdatasync"))?;
    let mut micros = latency_histogram();
    let started = Instant::now();
    while started.elapsed().as_secs_f64() < FDATASYNC_SECS {
        let one = Instant::now();
        file.write_all(&[b'x'; 4096])?;
        file.sync_data()?;
        micros.saturating_record(one.elapsed().as_micros() as u64);
    }
    Ok(LatencyPercentiles::of(&micros))
}

/// Completes when the bench is told to stop.
async fn interrupted() -> Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted?,
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await?;
    Ok(())
}

fn parse_secs(text: &str) -> Result<f64, String> {
    let secs: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (0.1..=3600.0).contains(&secs) {
        Ok(secs)
    } else {
        Err("from 0.1 to 3600".to_owned())
    }
}

/// The bench and its parts use one thread each: they share the cores with the server.
fn single_threaded() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}

/// Microseconds up to an hour, to three digits.
fn latency_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("the bounds are valid")
}

#[expect(clippy::disallowed_methods, reason = "a measurement runs in real time")]
async fn pause(duration: Duration) {
    tokio::time::sleep(duration).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args, FromArgMatches};
    use tokio::net::TcpListener;
    use tokio::task::{JoinSet, LocalSet};

    fn parsed<A: Args + FromArgMatches>(options: &[&str]) -> A {
        let command = A::augment_args(clap::Command::new("postrider").no_binary_name(true));
        A::from_arg_matches(&command.get_matches_from(options)).unwrap()
    }

    // The whole path in one process, bounded by a number of events instead of time.
    async fn relay_everything(
        load: BenchLoad,
        count: u64,
        rate: Option<f64>,
    ) -> (PublishingResult, sink::SinkStats) {
        let dir = tempfile::tempdir().unwrap();
        let mut parts = JoinSet::new();
        let listener = TcpListener::bind(LOCAL).await.unwrap();
        let sink = listener.local_addr().unwrap();
        parts.spawn_local(sink::serve(listener));
        let listener = TcpListener::bind(LOCAL).await.unwrap();
        let to = listener.local_addr().unwrap();
        let relay: RelayArgs = parsed(&[
            &format!("--sink={sink}"),
            &format!("--fan-out={}", load.fan_out()),
            &format!("--batch={}", load.events_per_delivery_max()),
            &format!("--log={}", dir.path().join("log").display()),
            "--conns=4",
        ]);
        parts.spawn_local(relay::serve(listener, relay));

        let mut publish: PublishArgs = parsed(&[
            &format!("--to={to}"),
            &format!("--sink={sink}"),
            &format!("--events={}", load.events_per_request()),
            &format!("--fan-out={}", load.fan_out()),
            &format!("--count={count}"),
            "--path=/",
            "--key=k",
            "--run=9",
            "--secs=60",
            "--conns=8",
            "--outstanding=200",
        ]);
        publish.rate = rate;
        let mut control = SinkControl::open(sink).await.unwrap();
        control.start_run(9).await.unwrap();
        let published = publisher::publish(publish).await.unwrap();
        let log_len = std::fs::metadata(dir.path().join("log")).unwrap().len();
        assert!(log_len > count * 1024, "the log holds every event");
        (published, control.stats().await.unwrap())
    }

    #[tokio::test]
    async fn everything_published_through_the_relay_arrives_once() {
        for load in BenchLoad::ALL {
            let local = LocalSet::new();
            let (published, arrived) = local.run_until(relay_everything(load, 1050, None)).await;
            assert_eq!(published.events, 1050, "{load}: {published:?}");
            assert_eq!(published.failed, 0, "{load}: {published:?}");
            assert_eq!(arrived.delivered, 1050 * load.fan_out(), "{load}: {arrived:?}");
            assert_eq!(arrived.duplicates + arrived.foreign, 0, "{load}: {arrived:?}");
            assert_eq!(arrived.per_endpoint, vec![1050; load.fan_out() as usize]);
            assert!(arrived.latency_ms.p50 > 0.0);
        }
    }

    #[tokio::test]
    async fn a_rate_is_kept_to() {
        let local = LocalSet::new();
        let (published, arrived) = local
            .run_until(relay_everything(BenchLoad::Single, 200, Some(1000.0)))
            .await;
        assert_eq!(arrived.delivered, 200);
        assert!(
            published.secs >= 0.19,
            "200 events at 1000/s took {} s",
            published.secs
        );
    }

    #[test]
    fn the_publisher_understands_its_own_options() {
        let text = [
            "--to=127.0.0.1:1",
            "--path=/p?q=1",
            "--key=a+b/c==",
            "--sink=127.0.0.1:2",
            "--run=3",
            "--secs=0.5",
        ];
        for rate in [None, Some(12.5)] {
            let mut args: PublishArgs = parsed(&text);
            (args.rate, args.subject) = (rate, "elsewhere".to_owned());
            let options = args.to_options();
            let again: PublishArgs = parsed(&options.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(format!("{again:?}"), format!("{args:?}"));
        }
    }

    #[test]
    fn the_server_is_given_a_subscription_for_every_endpoint() {
        let sink = "127.0.0.1:9".parse().unwrap();
        let config = server_config(
            BenchLoad::FanOut,
            false,
            "a2V5",
            sink,
            Some("127.0.0.1:8".parse().unwrap()),
        );
        let config: toml::Value = toml::from_str(&config).unwrap();
        assert_eq!(config["recorder"]["enabled"].as_bool(), Some(false));
        let topic = &config["topic"][0];
        assert_eq!(topic["key1"].as_str(), Some("a2V5"));
        let subscriptions = topic["subscription"].as_array().unwrap();
        assert_eq!(subscriptions.len(), 11);
        let properties = &subscriptions[9]["destination"]["properties"];
        assert_eq!(
            properties["endpointUrl"].as_str(),
            Some("http://127.0.0.1:9/hook/9")
        );
        assert_eq!(properties["maxEventsPerBatch"].as_integer(), Some(1));
        let dead = &subscriptions[10];
        assert_eq!(dead["filter"]["subjectBeginsWith"].as_str(), Some("backlog/"));
    }

    #[tokio::test]
    async fn a_closed_port_refuses_for_as_long_as_it_is_held() {
        let dead = closed_port().unwrap();
        let address = dead.local_addr().unwrap();
        assert!(http::call(address, "GET", "/").await.is_err());
        assert!(std::net::TcpListener::bind(address).is_err());
    }

    #[test]
    fn options_choose_what_is_run() {
        let args: BenchArgs = parsed(&["--load", "single", "fan-out", "--no-relay", "--backlog", "5"]);
        assert_eq!(args.load, [BenchLoad::Single, BenchLoad::FanOut]);
        assert_eq!(
            servers(&args),
            [MeasuredServer::Postrider, MeasuredServer::Backlogged]
        );
        let args: BenchArgs = parsed(&[]);
        assert_eq!(servers(&args), [MeasuredServer::Relay, MeasuredServer::Postrider]);
        let args: BenchArgs = parsed(&["--recorder", "both", "--no-relay"]);
        assert_eq!(
            servers(&args),
            [MeasuredServer::Unrecorded, MeasuredServer::Postrider]
        );
        let args: BenchArgs = parsed(&["--recorder", "off"]);
        assert_eq!(
            servers(&args),
            [MeasuredServer::Relay, MeasuredServer::Unrecorded]
        );
    }
}
