//! `postrider serve`: builds the server from its parts, runs it, and stops it.

use crate::config::{
    self, AccountKind, Config, DeclaredSubscription, LoadedConfig, LogFormat, MetricsReporter, ServeFlags,
    StorageAccountConfig,
};
use crate::counts_file::CountsFile;
use crate::credentials::{self, ServerCredentials};
use crate::fetch::Fetcher;
use crate::outgoing::{self, StoreConnector};
use crate::scrub::{self, ScrubPace};
use crate::stop_watchdog::{STOP_MARGIN, StopProgress, StopWatchdog, tell_and_exit};
use crate::{access_files, cluster, migrate, private_files, profiles, secrets, test_clock, traces};
use anyhow::{Context, Result, bail};
use postrider_api::access;
use postrider_api::health::ListenerCertificate;
use postrider_api::http::ListenerProtocol;
use postrider_api::issuer::{IssuerConfig, TokenIssuer};
use postrider_api::listen::ListenSessions;
use postrider_api::peers::Peers;
use postrider_api::{EdgeAccess, LocalSignInPage, Server, declare};
use postrider_audit::AuditLog;
use postrider_blobs::{AccountLocation, BlobAccountConfig, ObjectStores};
use postrider_core::ids::Secret;
use postrider_core::json::RawJson;
use postrider_core::subscription::DeadLetterDestination;
use postrider_core::time::{Clock, Timestamp};
use postrider_embedded::generations::Generations;
use postrider_embedded::{EmbeddedArchive, EmbeddedCatalog, EmbeddedLog, Scrub};
use postrider_engine::clock::SystemClock;
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::DeliveryTransport;
use postrider_engine::destinations::{ConfiguredDestinations, ConfiguredResource, QueueAccount};
use postrider_engine::node::NodeIdentity;
use postrider_engine::observed_catalog::with_observer;
use postrider_engine::virtual_time::{VirtualTime, WatchedTransport};
use postrider_engine::{Engine, EngineParts, dispatch, handshake};
use postrider_jetstream::JetStreamCluster;
use postrider_otlp::Exporter;
use postrider_recorder::FlightRecorder;
use postrider_store::seal::Keyring;
use postrider_store::{Archive, Catalog, EventLog};
use postrider_transport::{CertificateDer, HttpTransport};
use postrider_wire::resources::{self, FilterLimits, Road};
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use std::fs::{File, TryLockError};
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Directory of the audit log within the data directory.
pub const AUDIT_DIRECTORY: &str = "audit";
/// Tries to apply a declaration that another node changes at the same time, and the pause between
/// them.
const DECLARE_TRIES: u32 = 30;
const DECLARE_AGAIN: Duration = Duration::from_millis(200);
/// Longest wait at the end for blocking calls that are still running.
const BLOCKING_PATIENCE: Duration = Duration::from_secs(5);

pub fn run(flags: &ServeFlags) -> Result<()> {
    let loaded = config::load(flags, std::env::vars())?;
    if flags.print_config {
        print!("{}", config::print_config(&loaded));
        return Ok(());
    }
    private_files::restrict_new_files();
    log_to_terminal(&loaded.config);
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    raise_file_limit();
    let runtime = runtime(loaded.config.threads)?;
    let result = runtime.block_on(async {
        let mut stop = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
        let grace = loaded.config.shutdown.grace;
        let time = if flags.test_clock {
            TimeSource::Test
        } else {
            TimeSource::Of(Arc::new(SystemClock))
        };
        let running = tokio::select! {
            biased;
            _ = stop.recv() => None,
            _ = interrupt.recv() => None,
            running = RunningServer::start(&loaded, time) => Some(running?),
        };
        let Some(running) = running else {
            // An interrupted start leaves what a crash would have left.
            tracing::info!("stopped before it was ready");
            return Ok(());
        };
        running.greet(&loaded);
        let failed = tokio::select! {
            _ = stop.recv() => None,
            _ = interrupt.recv() => None,
            why = running.failed() => Some(why),
        };
        match failed {
            None => {
                tracing::info!("shutting down");
                running.stop_or_exit(grace).await
            }
            Some(why) => {
                tracing::error!(why, "this node can go on no more");
                running.stop_or_exit(grace).await?;
                bail!("{why}")
            }
        }
    });
    // Dropping the runtime would wait for blocking calls without a bound.
    runtime.shutdown_timeout(BLOCKING_PATIENCE);
    result
}

/// Raises the soft limit of open files: every connection is a file, and the usual limit of 1024 is
/// soon reached.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    if let Err(e) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(error = %e, "the limit of open files stays as it is");
    }
}

/// Open files reserved for the log, deliveries and everything else but clients' connections.
const FILES_KEPT_MAX: u64 = 4096;

/// Maximum of client connections, by the configuration and the system's limit of open files.
fn connections_max(configured: usize) -> usize {
    use rustix::process::{Resource, getrlimit};
    let Some(files) = getrlimit(Resource::Nofile).current else {
        return configured;
    };
    let allowed = connections_of(files);
    if allowed < configured {
        tracing::warn!(
            open_files = files,
            "limits.connections_max is lowered to {allowed}: the system allows too few open files; raise its limit (ulimit -n, LimitNOFILE)"
        );
    }
    configured.min(allowed)
}

fn connections_of(files: u64) -> usize {
    let kept = (files / 2).min(FILES_KEPT_MAX);
    usize::try_from(files - kept).unwrap_or(usize::MAX)
}

/// Reserved open files that are not for deliveries.
const OTHER_FILES_MAX: u64 = 1024;

/// Limits of connections for deliveries, by the system's limit of open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OutgoingConnections {
    /// Connections of attempts in progress.
    attempts: usize,
    /// Connections of attempts that have timed out and may still be answered.
    late_answers: usize,
    /// Idle connections kept for further attempts.
    idle: usize,
}

impl OutgoingConnections {
    /// `clients`: configured maximum of client connections.
    fn of_this_process(clients: usize) -> OutgoingConnections {
        use rustix::process::{Resource, getrlimit};
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        OutgoingConnections::of_files(files, clients)
    }

    fn of_files(files: u64, clients: usize) -> OutgoingConnections {
        let clients = connections_of(files).min(clients) as u64;
        let kept = files - clients;
        let others = (kept / 2).min(OTHER_FILES_MAX);
        let outgoing = usize::try_from(kept - others).unwrap_or(usize::MAX);
        let quarter = (outgoing / 4).max(1);
        OutgoingConnections {
            attempts: (outgoing / 2).max(1),
            late_answers: quarter,
            idle: quarter,
        }
    }
}

pub fn runtime(threads: Option<usize>) -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().context("starting the runtime")
}

fn log_to_terminal(config: &Config) {
    let filter = tracing_subscriber::EnvFilter::try_new(&config.log.level)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // The NATS client logs every connection; we log the relevant ones ourselves.
    let filter = match config.log.level.contains("async_nats") {
        true => filter,
        false => filter.add_directive("async_nats=error".parse().expect("a directive")),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_writer(std::io::stderr);
    let terminal = std::io::stderr().is_terminal();
    let json = match config.log.format {
        LogFormat::Json => true,
        LogFormat::Text => false,
        LogFormat::Auto => !terminal,
    };
    // A second call, as in a test with two servers, has no effect.
    let _ = match json {
        // Fields are at the top level because log collectors query them by name.
        true => builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .try_init(),
        false => builder.with_ansi(terminal).try_init(),
    };
}

/// Source of the server's time.
pub enum TimeSource {
    Of(Arc<dyn Clock>),
    /// A clock that moves only by the API.
    Test,
}

/// A running server.
pub struct RunningServer {
    pub server: Arc<Server>,
    pub http: Option<SocketAddr>,
    pub https: Option<SocketAddr>,
    material: ServerCredentials,
    recorder: Option<Arc<FlightRecorder>>,
    spans: Option<Arc<Exporter>>,
    listeners: TaskTracker,
    /// `Some` on a node of a cluster.
    pub cluster: Option<Arc<JetStreamCluster>>,
    stop: CancellationToken,
    numbers: Arc<CountsFile>,
    _lock: File,
}

impl RunningServer {
    /// Opens the store, recovers deliveries, applies the declared configuration, and starts to
    /// listen.
    pub async fn start(loaded: &LoadedConfig, time: TimeSource) -> Result<RunningServer> {
        let config = &loaded.config;
        // The lock comes first: a second server in the same directory must not even renew a
        // certificate.
        let lock = lock(&config.data_dir)?;
        for warning in private_files::tighten(&config.data_dir)? {
            tracing::warn!("{warning}");
        }
        let keys = Arc::new(secrets::keyring(config)?);
        let mut material = credentials::prepare(config, &keys, SystemClock.now())?;
        // The listeners are bound before anything is started: a second server on the same address
        // must change nothing.
        let http = listen(config.listen.http).await?;
        let https = listen(config.listen.https).await?;
        let http_address = http.as_ref().map(TcpListener::local_addr).transpose()?;
        let https_address = https.as_ref().map(TcpListener::local_addr).transpose()?;
        let (clock, test_clock): (Arc<dyn Clock>, _) = match time {
            TimeSource::Of(clock) => {
                test_clock::check_unused(&config.data_dir, SystemClock.now())?;
                (clock, None)
            }
            TimeSource::Test => {
                let clock = Arc::new(test_clock::open(&config.data_dir, SystemClock.now())?);
                (clock.clone(), Some(clock))
            }
        };
        let store = match cluster::settings(config) {
            None => ServerStores::embedded(config, keys.clone()).await?,
            Some(settings) => {
                cluster::check_clock(test_clock.is_some())?;
                let url = cluster::url(config, http_address, https_address);
                ServerStores::clustered(cluster::join(config, settings, url).await?)
            }
        };
        if let Some(cluster) = &store.cluster
            && cluster::share_secrets(cluster, config, &keys).await?
        {
            let created = std::mem::take(&mut material.created);
            material = credentials::prepare(config, &keys, SystemClock.now())?;
            material.created.splice(0..0, created);
        }
        let wall = Arc::new(SystemClock);
        let rules = outgoing::rules(config)?;
        let dead_letters = dead_letters(config, store.archive, wall.clone(), rules.clone())?;
        let outgoing_connections = OutgoingConnections::of_this_process(config.limits.connections_max);
        let delivering = postrider_transport::Config {
            idle_max: outgoing_connections.idle,
            ..transport(loaded, rules.clone())
        };
        let network = HttpTransport::new(delivering, clock.clone())?;
        let event_listeners = Arc::new(ListenSessions::new(Arc::new(network)));
        let others = store.cluster.as_deref().map(cluster::peers::ClusterPeers::new);
        if let Some(others) = &others {
            event_listeners.set_peers(others.clone());
        }
        let mut transport: Arc<dyn DeliveryTransport> = event_listeners.clone();
        let mut watched = None;
        if test_clock.is_some() {
            let watching = Arc::new(WatchedTransport::new(transport, Arc::new(SystemClock)));
            watched = Some(watching.clone());
            transport = watching;
        }
        let recorder = recorder(config, clock.clone())?;
        let spans = traces::exporter(config, rules.clone(), clock.clone(), store.identity, random())?;
        let naming_key = material.token_key.naming.clone();
        let (node, share) = match store.cluster.as_deref().map(cluster::node) {
            Some((node, share)) => (node, Some(share)),
            None => (NodeIdentity::alone(), None),
        };
        let profiles = profiles::of(loaded);
        for line in profiles::overruled_waits(loaded, &profiles) {
            tracing::warn!("{line}");
        }
        let engine = Engine::start(EngineParts {
            log: store.log,
            catalog: store.catalog,
            transport,
            clock,
            wall: wall.clone(),
            profiles,
            id_prefix: format!("/subscriptions/{}", config.azure.subscription),
            dispatch: dispatch::Config {
                in_flight_per_endpoint_max: config.limits.in_flight_per_endpoint_max,
                in_flight_bytes_max: config.limits.in_flight_bytes_max,
                attempts_max: outgoing_connections.attempts,
                late_answers_max: outgoing_connections.late_answers,
                batch_defaults: config::batch_defaults(config, &loaded.edge),
                // Waits are reproducible with a test clock.
                seed: config.retry.jitter_seed.unwrap_or_else(|| match test_clock {
                    Some(_) => 0,
                    None => random(),
                }),
                safety_net: dead_letters.fallback.is_some(),
                hops_max: config.limits.hops_max,
                destinations: Arc::new(destinations(config)),
                spans: traces::share(config),
            },
            dead_letters,
            handshake: handshake::HandshakeRules {
                enabled: config.validation.enabled,
                // Operation ids are derived from a stored key, so that a finished operation is
                // recognized after a restart.
                operations: Arc::new(move || postrider_wire::arm::fresh_operation(naming_key.as_bytes())),
                ..handshake::HandshakeRules::default()
            },
            recorder: traces::told(recorder.as_ref(), spans.as_ref()),
            node,
        })
        .await
        .context("starting the engine")?;
        let numbers = CountsFile::restore(&config.data_dir, store.identity, engine.clone());
        let mut server = Server::new(
            engine.clone(),
            api_config(loaded, &material),
            wall.clone(),
            random(),
        );
        let mut cluster_view = None;
        if let Some(cluster) = &store.cluster {
            let view = cluster::view::JetStreamClusterView::new(cluster.clone());
            view.log_guarantee().await;
            server.cluster = Some(view.clone());
            cluster_view = Some(view);
        }
        let access = access_files::store(config, keys.clone(), store.cluster.as_ref());
        server
            .use_access_store(access)
            .await
            .map_err(|reason| anyhow::anyhow!("reading revoked sessions and the keys of tokens: {reason}"))?;
        let journal = Arc::new(access_files::LoginFile::new(&config.data_dir));
        server
            .use_login_journal(journal)
            .map_err(|reason| anyhow::anyhow!("reading the list of logins: {reason}"))?;
        server.peers = others.map(|others| others as Arc<dyn Peers>);
        server.proxy = rules.proxy.as_ref().map(|proxy| proxy.health());
        server.ports = [http_address, https_address]
            .into_iter()
            .flatten()
            .map(|at| at.port())
            .collect();
        server.issuer = issuer(config, rules)?;
        server.metric_names = metric_names(loaded);
        if config.listen.https.is_some() {
            server.certificate = material.expires.map(|expires| ListenerCertificate {
                expires,
                ours: material.ca_path.is_some(),
            });
        }
        server.listeners = Some(event_listeners);
        server.numbers = Some(numbers.clone());
        server.local_sign_in_page = material.credentials_path.as_deref().map(credentials_page);
        server.configuration = crate::config::default_config_text();
        server.spans = spans.as_ref().map(|spans| spans.counts.clone());
        if let Some(recorder) = &recorder {
            server.recordings = recorder.clone();
            server.recording_bounds = Some(postrider_api::RecordingBounds {
                keep: config.recorder.keep,
                bytes_max: config.recorder.bytes_max,
            });
        }
        server.audit = audit_log(config, &server, SystemClock)?;
        if let (Some(clock), Some(transport)) = (test_clock, watched) {
            server.virtual_time = Some(VirtualTime::new(clock, transport, wall, engine));
        }
        let server = Arc::new(server);
        server.begin_audit();
        if let Some(cluster) = &store.cluster {
            cluster::peers::serve_peer_requests(cluster, &server);
        }
        postrider_api::listen::delete_orphaned_subscriptions(&server).await;
        with_observer(
            server.unrequested_change_observer("configuration"),
            declare_all(&server, config),
        )
        .await?;
        let running = RunningServer {
            http: http_address,
            https: https_address,
            server,
            cluster: store.cluster,
            listeners: TaskTracker::new(),
            stop: CancellationToken::new(),
            material,
            recorder,
            spans,
            numbers,
            _lock: lock,
        };
        let keeping = running
            .numbers
            .clone()
            .keep_until(running.stop.clone(), SystemClock);
        running.listeners.spawn(keeping);
        if let (Some(scrub), Some(pace)) = (store.scrub, ScrubPace::configured(&config.store)) {
            let scrubbing = scrub::run(scrub, pace, Arc::new(SystemClock), running.stop.clone());
            running.listeners.spawn(scrubbing);
        }
        if let (Some(cluster), Some(share)) = (&running.cluster, share) {
            cluster::view::report(cluster, &running.server);
            let (cluster, engine) = (cluster.clone(), running.server.engine.clone());
            let listening = cluster::peers::delete_orphaned_listen_sessions(
                cluster.clone(),
                running.server.clone(),
                running.stop.clone(),
            );
            running.listeners.spawn(listening);
            let following = running.server.clone().run_access_refresh(running.stop.clone());
            running.listeners.spawn(following);
            let tending = cluster::run_membership_tasks(cluster, engine, share, running.stop.clone());
            running.listeners.spawn(tending);
        }
        if let Some(cluster) = &running.cluster {
            cluster::wait_until_accepting(cluster, &SystemClock).await;
        }
        if let Some(view) = cluster_view {
            view.forget().await;
        }
        if let Some(listener) = http {
            running.serve(listener, ListenerProtocol::Plain);
        }
        if let Some(listener) = https {
            let acceptor = TlsAcceptor::from(Arc::new(running.material.server_config.clone()));
            running.serve(listener, ListenerProtocol::Tls(acceptor));
        }
        Ok(running)
    }

    fn serve(&self, listener: TcpListener, wire: ListenerProtocol) {
        let serving = postrider_api::http::serve(self.server.clone(), listener, wire, self.stop.clone());
        self.listeners.spawn(serving);
    }

    fn greet(&self, loaded: &LoadedConfig) {
        // Paths are absolute because readers of the log may be in another directory.
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        for path in &self.material.created {
            tracing::info!(path = %absolute(path).display(), "created");
        }
        if let (Some(path), Some(_)) = (&self.material.ca_path, self.https) {
            tracing::info!(path = %absolute(path).display(), "https clients have to trust this certificate");
        }
        match &self.material.credentials_path {
            Some(path) => {
                tracing::info!(
                    path = %absolute(path).display(),
                    "client id and secret are in this file; \"postrider az-setup\" logs az in"
                );
            }
            None => {
                let clients = self.material.credentials.len();
                tracing::info!(
                    clients,
                    "clients and their secrets are those of the configuration"
                );
            }
        }
        let portal = portal_url(loaded.config.listen.public_url.as_deref(), self.http, self.https);
        if let Some(portal) = portal {
            tracing::info!("the portal is at {portal}");
        }
        if let Some(address) = self.https {
            tracing::info!("listening on https://{address}");
        }
        if let Some(address) = self.http {
            tracing::info!("listening on http://{address}");
        }
        if let Some(file) = &loaded.file {
            tracing::info!(file = %file.display(), "configured by");
        }
        if let Some(time) = &self.server.virtual_time {
            tracing::warn!(
                now = %time.now(),
                "TEST CLOCK: time stands still until POST /postrider/v1/clock/advance moves it"
            );
        }
        let version = env!("CARGO_PKG_VERSION");
        tracing::info!(version, profile = %loaded.config.profile, data = %loaded.config.data_dir.display(), "ready");
    }

    /// Returns the reason why this node cannot continue; never returns without a cluster.
    async fn failed(&self) -> String {
        if let Some(cluster) = &self.cluster {
            let mut failed = cluster.members.failed();
            if let Ok(why) = failed.wait_for(Option::is_some).await {
                return why.clone().unwrap_or_default();
            }
        }
        std::future::pending().await
    }

    /// Stops, or exits the process with a line that names the part that did not stop.
    async fn stop_or_exit(self, grace: Duration) -> Result<()> {
        let progress = StopProgress::begin("requests under way");
        let engine = self.server.engine.clone();
        let expire = move |part: String| {
            tell_and_exit(move || {
                let tasks = engine.running_tasks();
                tracing::error!(part, tasks, "the server did not stop in time: exiting");
            })
        };
        let _watchdog = StopWatchdog::arm(grace + STOP_MARGIN, progress.clone(), expire);
        self.stop_reporting(grace, &progress).await
    }

    /// Refuses publish requests, lets attempts end, and makes everything durable.
    pub async fn stop(self, grace: Duration) -> Result<()> {
        self.stop_reporting(grace, &StopProgress::begin("requests under way"))
            .await
    }

    async fn stop_reporting(self, grace: Duration, progress: &StopProgress) -> Result<()> {
        self.server.engine.refuse();
        self.stop.cancel();
        self.listeners.close();
        let end = SystemClock.now() + grace;
        // Live streams end before the engine, so that listen sessions can delete their
        // subscriptions.
        tokio::select! {
            () = self.server.end_streams() => {}
            () = SystemClock.sleep_until(end) => {}
        }
        progress.enter("changes under way");
        tokio::select! {
            () = self.server.end_changes() => {}
            () = SystemClock.sleep_until(end) => {}
        }
        // The node leaves while the engine is running: its attempts end here, and the other nodes
        // take over the rest.
        if let Some(cluster) = &self.cluster {
            progress.enter("hand-over of partitions");
            cluster.members.leave().await;
        }
        progress.enter("delivery engine");
        let patience = SystemClock.sleep_until(end);
        self.server
            .engine
            .stop(patience)
            .await
            .context("stopping the engine")?;
        // After the last attempts, so that they are counted.
        self.numbers.save().await;
        if let Some(cluster) = &self.cluster {
            progress.enter("connection to JetStream");
            cluster.close().await;
        }
        if let Some(audit) = self.server.audit.clone() {
            progress.enter("audit log");
            tokio::task::spawn_blocking(move || audit.close())
                .await
                .context("closing the audit log")?;
        }
        // After the engine, so that its last attempts are recorded, too.
        if let Some(recorder) = self.recorder {
            progress.enter("flight recorder");
            tokio::task::spawn_blocking(move || recorder.stop())
                .await
                .context("closing the flight recorder")?;
        }
        if let Some(spans) = self.spans {
            progress.enter("span exporter");
            spans.stop(end.since(SystemClock.now())).await;
        }
        // Connections end with the process; accepted requests have been answered.
        Ok(())
    }
}

/// URL of the portal for people: the public URL, or a listener. Plain http on this machine comes
/// first, because browsers warn about the https certificate.
fn portal_url(
    public_url: Option<&str>,
    http: Option<SocketAddr>,
    https: Option<SocketAddr>,
) -> Option<String> {
    if let Some(base) = public_url {
        return Some(format!("{}/portal", base.trim_end_matches('/')));
    }
    let local = |address: &SocketAddr| {
        let ip = address.ip().to_canonical();
        ip.is_loopback() || ip.is_unspecified()
    };
    let (scheme, address) = match (http.filter(local), https, http) {
        (Some(http), ..) => ("http", http),
        (None, Some(https), _) => ("https", https),
        (None, None, http) => ("http", http?),
    };
    let port = address.port();
    Some(match address.ip().is_unspecified() {
        true => format!("{scheme}://localhost:{port}/portal"),
        false => format!("{scheme}://{address}/portal"),
    })
}

/// Lock on the data directory, held while the server lives: two servers would overwrite each
/// other's files.
pub fn lock(data_dir: &Path) -> Result<File> {
    let path = data_dir.join("lock");
    let locking = || format!("locking {}", path.display());
    private_files::make_directory(data_dir)?;
    let file = private_files::open_or_create(&path).with_context(locking)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("{} is in use by another server", data_dir.display()),
        Err(TryLockError::Error(e)) => Err(e).with_context(locking),
    }
}

/// The stores, of whichever kind.
struct ServerStores {
    log: Arc<dyn EventLog>,
    catalog: Arc<dyn Catalog>,
    archive: Arc<dyn Archive>,
    identity: u64,
    cluster: Option<Arc<JetStreamCluster>>,
    /// Scrub of the files on this machine; `None` without an embedded store.
    scrub: Option<Scrub>,
}

impl ServerStores {
    async fn embedded(config: &Config, keys: Arc<Keyring>) -> Result<ServerStores> {
        migrate::markers::check(&config.data_dir)?;
        let generations = Generations::check(&config.data_dir)?;
        let log = EmbeddedLog::open_with(&config.data_dir, random(), generations.clone())
            .await
            .with_context(|| format!("opening the log in {}", config.data_dir.display()))?;
        let catalog = open_catalog(&config.data_dir, &log, keys, generations.clone())?;
        let path = config.data_dir.join("archive.redb");
        let archive = EmbeddedArchive::open_with(&path, generations)
            .with_context(|| format!("opening {}", path.display()))?;
        Ok(ServerStores {
            scrub: Some(log.scrub(&catalog, &archive)),
            identity: log.identity(),
            log: Arc::new(log),
            catalog: Arc::new(catalog),
            archive: Arc::new(archive),
            cluster: None,
        })
    }

    fn clustered(cluster: Arc<JetStreamCluster>) -> ServerStores {
        ServerStores {
            identity: cluster.log.identity(),
            log: cluster.log.clone(),
            catalog: cluster.catalog.clone(),
            archive: cluster.archive.clone(),
            cluster: Some(cluster),
            scrub: None,
        }
    }
}

/// Opens the catalog. A missing one is not created while deliveries wait in the log: an empty catalog
/// has no subscriptions, and their deliveries would be lost.
pub fn open_catalog(
    data_dir: &Path,
    log: &EmbeddedLog,
    keys: Arc<Keyring>,
    generations: Arc<Generations>,
) -> Result<EmbeddedCatalog> {
    let path = data_dir.join("catalog.redb");
    let known = std::fs::metadata(&path).is_ok_and(|file| file.len() > 0);
    if !known && !log.subscriptions().is_empty() {
        bail!(
            "{} is missing or empty, but events wait in the log for subscriptions that only it knows: \
             put it back, or start with another data directory",
            path.display()
        );
    }
    Ok(EmbeddedCatalog::open_with(&path, keys, generations)?)
}

/// The flight recorder, unless it is disabled.
fn recorder(config: &Config, clock: Arc<dyn Clock>) -> Result<Option<Arc<FlightRecorder>>> {
    if !config.recorder.enabled {
        return Ok(None);
    }
    let kept = postrider_recorder::Config {
        keep: config.recorder.keep,
        bytes_max: config.recorder.bytes_max,
        among_others: cluster::settings(config).is_some(),
        ..postrider_recorder::Config::new(config.data_dir.join("recorder"))
    };
    let recorder = FlightRecorder::open(kept, clock).context("opening the flight recorder")?;
    Ok(Some(recorder))
}

/// The audit log, unless it is disabled.
fn audit_log(config: &Config, server: &Server, clock: SystemClock) -> Result<Option<Arc<AuditLog>>> {
    if !config.audit.enabled {
        return Ok(None);
    }
    let kept = postrider_audit::Config {
        directory: config.data_dir.join(AUDIT_DIRECTORY),
        keep: config.audit.keep,
        bytes_max: config.audit.bytes_max,
        node: server.peers.as_ref().map_or("", |peers| peers.name()).to_owned(),
    };
    let audit = AuditLog::open(kept, Arc::new(clock)).context("opening the audit log")?;
    Ok(Some(audit))
}

/// Storage accounts for dead letters, and the archive of existing blobs.
fn dead_letters(
    config: &Config,
    archive: Arc<dyn Archive>,
    wall: Arc<dyn Clock>,
    rules: postrider_transport::Config,
) -> Result<DeadLetterService> {
    let accounts = config.all_storage_accounts();
    let accounts = accounts.into_iter().map(account).collect::<Result<_>>()?;
    let connector = StoreConnector::new(rules, wall.clone())?;
    let blobs = ObjectStores::new(accounts, wall, connector)?;
    let fallback = config
        .default_dead_letter_container()
        .map(|(account, container)| DeadLetterDestination {
            account: account.to_owned(),
            container: container.to_owned(),
        });
    Ok(DeadLetterService::new(Arc::new(blobs), archive, fallback))
}

pub fn account(configured: StorageAccountConfig) -> Result<BlobAccountConfig> {
    let create_containers = configured.creates_containers();
    let needed = "loading refuses an account without it";
    let secret = |secret: Option<config::ConfigSecret>| Secret::new(secret.expect(needed).expose());
    let name = configured.name;
    let place = match configured.kind {
        AccountKind::Directory => AccountLocation::Directory {
            root: configured.path.expect(needed),
        },
        AccountKind::Azure => AccountLocation::Azure {
            account: name.clone(),
            endpoint: configured
                .blob_endpoint
                .unwrap_or_else(|| format!("https://{name}.blob.core.windows.net")),
            key: secret(configured.key),
        },
        AccountKind::S3 => AccountLocation::S3 {
            endpoint: configured.endpoint,
            region: configured.region.unwrap_or_else(|| "us-east-1".to_owned()),
            bucket: configured.bucket,
            access_key_id: configured.access_key_id.expect(needed),
            secret_access_key: secret(configured.secret_access_key),
        },
        AccountKind::Gcs => {
            let file = configured.service_account_file.expect(needed);
            let text = std::fs::read_to_string(&file).with_context(|| {
                let file = file.display();
                format!("service_account_file of storage account \"{name}\": reading {file}")
            })?;
            AccountLocation::Gcs {
                endpoint: configured.endpoint,
                bucket: configured.bucket,
                service_account: Secret::new(text),
            }
        }
    };
    Ok(BlobAccountConfig {
        name,
        place,
        create_containers,
    })
}

/// Addresses of destinations that subscriptions name only by resource id.
pub fn destinations(config: &Config) -> ConfiguredDestinations {
    let accounts = config
        .all_storage_accounts()
        .into_iter()
        .filter_map(|configured| {
            let create_queues = configured.creates_containers();
            let account = shown_account(configured);
            Some(QueueAccount {
                endpoint: account.queue_endpoint?,
                key: account.key?,
                name: account.name,
                create_queues,
            })
        });
    let resources = config.destinations.iter().map(|configured| ConfiguredResource {
        id: configured.resource.clone(),
        url: Secret::new(configured.url.expose()),
        key_name: configured.key_name.clone(),
        key: configured.key.as_ref().map(|key| Secret::new(key.expose())),
    });
    ConfiguredDestinations::new(accounts.collect(), resources.collect())
}

async fn listen(address: Option<SocketAddr>) -> Result<Option<TcpListener>> {
    let Some(address) = address else {
        return Ok(None);
    };
    let listener = TcpListener::bind(address).await;
    Ok(Some(listener.with_context(|| format!("listening on {address}"))?))
}

pub fn random() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().0 ^ uuid::Uuid::new_v4().as_u64_pair().1
}

/// Configuration of the delivery transport, based on the rules for all outgoing requests.
pub fn transport(loaded: &LoadedConfig, rules: postrider_transport::Config) -> postrider_transport::Config {
    postrider_transport::Config {
        accept_invalid_certs: loaded.edge.webhook.skip_server_cert_validation,
        user_agent: loaded.config.transport.user_agent.clone(),
        ..rules
    }
}

/// Certificates trusted besides the system's.
pub fn extra_roots(config: &Config) -> Result<Vec<CertificateDer<'static>>> {
    let mut roots = Vec::new();
    for path in &config.transport.extra_ca_files {
        let unreadable = || format!("transport.extra_ca_files: reading {}", path.display());
        for root in CertificateDer::pem_file_iter(path).with_context(unreadable)? {
            roots.push(root.with_context(unreadable)?);
        }
    }
    Ok(roots)
}

fn metric_names(loaded: &LoadedConfig) -> postrider_api::MetricNames {
    let metrics = &loaded.config.metrics;
    let asked = loaded.edge.metrics_reporter == MetricsReporter::Prometheus;
    postrider_api::MetricNames {
        azure: metrics.azure_names,
        edge: metrics.edge_names.unwrap_or(asked),
    }
}

/// Sign-in page that shows the absolute path of the credentials file.
fn credentials_page(path: &Path) -> LocalSignInPage {
    LocalSignInPage::new(&std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
}

fn api_config(loaded: &LoadedConfig, material: &ServerCredentials) -> postrider_api::Config {
    let (config, edge) = (&loaded.config, &loaded.edge);
    let mut host_names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into();
    host_names.extend(config.listen.names.iter().cloned());
    let addresses = [config.listen.http, config.listen.https];
    host_names.extend(addresses.into_iter().flatten().map(|a| a.ip().to_string()));
    let public_host = config
        .listen
        .public_url
        .as_deref()
        .and_then(|url| url.parse::<http::Uri>().ok());
    host_names.extend(public_host.and_then(|uri| uri.host().map(str::to_owned)));
    let key = |key: &Option<config::ConfigSecret>| Secret::new(key.as_ref().map_or("", |k| k.expose()));
    postrider_api::Config {
        limits: postrider_wire::publish::PublishLimits {
            request_bytes: config.limits.request_bytes_max,
            event_bytes: config.limits.event_bytes_max,
            events_max: config.limits.events_per_request_max,
        },
        client_bounds: postrider_api::limits::ClientBounds {
            connections_max: connections_max(config.limits.connections_max),
            connections_per_client_max: config.limits.connections_per_address_max,
            response_stall_max: config.limits.response_stall_max,
            body_stall_max: config.limits.body_stall_max,
            publish_body_bytes_max: config.limits.publish_body_bytes_max,
            streams_max: config.limits.streams_max,
            streams_per_client_max: config.limits.streams_per_client_max,
        },
        resource_limits: resources::ResourceLimits {
            edge_batch_events_max: edge.limits.max_events_per_batch,
            edge_batch_kilobytes_max: edge.limits.max_preferred_batch_size_in_kilobytes,
            web_hook_https_only: edge.webhook.https_only,
            event_grid_hosts: config::event_grid_hosts(config, edge)
                .expect("the configuration was checked when it was loaded"),
            declared_filters: FilterLimits {
                filters_max: config.limits.declared_filters_max,
                values_max: config.limits.declared_filter_values_max,
                value_chars_max: config.limits.declared_filter_value_chars_max,
            },
            batch_defaults: config::batch_defaults(config, edge),
        },
        edge: if loaded.edge_is_open() {
            EdgeAccess::Open
        } else {
            EdgeAccess::Keys([key(&edge.sas_keys.key1), key(&edge.sas_keys.key2)])
        },
        host_names,
        public_url: config.listen.public_url.clone(),
        account: config.azure.subscription.clone(),
        tenant: config.azure.tenant.clone(),
        resource_group: config.azure.resource_group.clone(),
        location: config.azure.location.clone(),
        naming_key: Secret::new(&material.token_key.naming),
        storage_accounts: config
            .all_storage_accounts()
            .into_iter()
            .map(shown_account)
            .collect(),
        clients: material.credentials.iter().map(client).collect(),
        signing_key: material.token_key.signing.clone(),
        managed_identity: config.azure.managed_identity.clone(),
        module_path: "/iotHubs/postrider/devices/local/modules/eventgridmodule".to_owned(),
        profile: config.profile.clone(),
        version: env!("CARGO_PKG_VERSION"),
        loopback_only: [config.listen.http, config.listen.https]
            .into_iter()
            .flatten()
            .all(|address| address.ip().to_canonical().is_loopback()),
        plain_http_exposed: config::plain_http_exposed(config),
        quotas: config.quotas_in_force(),
        publishing_max: config.limits.publish_queue_max,
        filter_bytes_max: config.limits.filter_bytes_per_event_max,
        throttle: postrider_api::throttle::ThrottleRules {
            free_attempts: config.throttle.free_attempts,
            wait_max: config.throttle.wait_max,
        },
    }
}

fn client(configured: &config::ClientSection) -> access::ConfiguredClient {
    access::ConfiguredClient {
        id: configured.id.clone(),
        secret: Secret::new(configured.secret.expose()),
        role: role(configured.role),
    }
}

fn role(configured: config::ClientRole) -> access::Role {
    match configured {
        config::ClientRole::Owner => access::Role::Owner,
        config::ClientRole::Contributor => access::Role::Contributor,
        config::ClientRole::Reader => access::Role::Reader,
        config::ClientRole::DataSender => access::Role::DataSender,
    }
}

/// The external token issuer. Its keys are fetched when its first token arrives.
fn issuer(config: &Config, rules: postrider_transport::Config) -> Result<Option<Arc<TokenIssuer>>> {
    let Some(oidc) = config.oidc.clone() else {
        return Ok(None);
    };
    let trust = IssuerConfig {
        issuer: oidc.issuer,
        audience: oidc.audience,
        jwks_url: oidc.jwks_url,
        role_claim: oidc.role_claim,
        client_claim: oidc.client_claim,
        roles: oidc.roles.into_iter().map(|(word, r)| (word, role(r))).collect(),
    };
    let fetcher = Fetcher::new(rules)?;
    Ok(Some(TokenIssuer::new(trust, Arc::new(fetcher))))
}

/// A storage account as the management API shows it.
fn shown_account(configured: StorageAccountConfig) -> postrider_api::StorageAccount {
    let name = configured.name;
    let azure = |service: &str| {
        (configured.kind == AccountKind::Azure).then(|| format!("https://{name}.{service}.core.windows.net"))
    };
    postrider_api::StorageAccount {
        blob_endpoint: configured.blob_endpoint.or_else(|| azure("blob")),
        queue_endpoint: configured.queue_endpoint.or_else(|| azure("queue")),
        key: configured.key.map(|key| Secret::new(key.expose())),
        name,
    }
}

/// Creates the declared resources; existing ones that are equal are not touched. Nodes that start
/// together declare the same resources at once: the later one finds them there.
async fn declare_all(server: &Server, config: &Config) -> Result<()> {
    for _ in 0..DECLARE_TRIES {
        match declare_once(server, config).await {
            Err(e) if is_conflict(&e) => SystemClock.sleep_until(SystemClock.now() + DECLARE_AGAIN).await,
            other => return other,
        }
    }
    declare_once(server, config).await
}

fn is_conflict(error: &anyhow::Error) -> bool {
    let by_api = match error.downcast_ref::<declare::Error>() {
        Some(declare::Error::Engine(by_engine)) => Some(by_engine),
        _ => None,
    };
    let by_engine = by_api.or_else(|| error.downcast_ref::<postrider_engine::Error>());
    matches!(
        by_engine,
        Some(postrider_engine::Error::Store(postrider_store::Error::Conflict(
            _
        )))
    )
}

async fn declare_once(server: &Server, config: &Config) -> Result<()> {
    postrider_api::edge::adopt_earlier_topics(server).await?;
    for topic in &config.topics {
        let keys = [&topic.key1, &topic.key2].map(|k| k.as_ref().map(|k| k.expose().to_owned()));
        let text = body(&topic.name, &topic.properties);
        let made = declare::topic(
            server,
            RawJson::trusted(&text),
            Road::Config,
            &topic.name,
            Some(keys),
        )
        .await;
        made.with_context(|| format!("topic {:?} in the configuration", topic.name))?;
    }
    let now = server.engine.clock.now();
    for (topic, subscription) in config.declared_subscriptions() {
        if has_expired(subscription, now) {
            continue;
        }
        let text = body(&subscription.name, &subscription.properties);
        let made = declare::subscription(
            server,
            RawJson::trusted(&text),
            Road::Config,
            topic,
            &subscription.name,
        )
        .await;
        made.with_context(|| {
            format!(
                "subscription {:?} of topic {topic:?} in the configuration",
                subscription.name
            )
        })?;
    }
    for domain in &config.domains {
        let keys = [&domain.key1, &domain.key2].map(|k| k.as_ref().map(|k| k.expose().to_owned()));
        let text = body(&domain.name, &domain.properties);
        let made = declare::domain(
            server,
            RawJson::trusted(&text),
            Road::Config,
            &domain.name,
            Some(keys),
        )
        .await;
        let made = made.with_context(|| format!("domain {:?} in the configuration", domain.name))?;
        for topic in &domain.topics {
            let made = server.engine.put_domain_topic(made.topic.id, &topic.name).await;
            made.with_context(|| format!("topic {:?} of domain {:?}", topic.name, domain.name))?;
        }
        let whole = domain.subscriptions.iter().map(|s| (None, s));
        let inside = domain
            .topics
            .iter()
            .flat_map(|t| t.subscriptions.iter().map(move |s| (Some(t.name.as_str()), s)));
        for (topic, subscription) in whole.chain(inside) {
            if has_expired(subscription, now) {
                continue;
            }
            let text = body(&subscription.name, &subscription.properties);
            let raw = RawJson::trusted(&text);
            let made = declare::domain_subscription(
                server,
                raw,
                Road::Config,
                &domain.name,
                topic,
                &subscription.name,
            );
            let named = || {
                format!(
                    "subscription {:?} of domain {:?} in the configuration",
                    subscription.name, domain.name
                )
            };
            made.await.with_context(named)?;
        }
    }
    declare_system_topics(server, config, now).await
}

async fn declare_system_topics(server: &Server, config: &Config, now: Timestamp) -> Result<()> {
    for topic in &config.system_topics {
        let name = &topic.name;
        let mut properties = topic.properties.clone();
        properties["source"] = json!(config.source_of(topic));
        properties["topicType"] = json!(topic.topic_type);
        let text = body(name, &properties);
        let made = declare::system_topic(server, RawJson::trusted(&text), Road::Config, name).await;
        made.with_context(|| format!("system topic {name:?} in the configuration"))?;
        for subscription in &topic.subscriptions {
            if has_expired(subscription, now) {
                continue;
            }
            let text = body(&subscription.name, &subscription.properties);
            let raw = RawJson::trusted(&text);
            let made =
                declare::system_subscription(server, raw, Road::Config, name, &subscription.name).await;
            made.with_context(|| {
                let subscription = &subscription.name;
                format!("subscription {subscription:?} of system topic {name:?} in the configuration")
            })?;
        }
    }
    Ok(())
}

/// Whether the subscription has expired: it is retired, and its declaration must not keep the
/// server from starting.
fn has_expired(subscription: &DeclaredSubscription, now: Timestamp) -> bool {
    let expires = subscription.properties["expirationTimeUtc"].as_str();
    let expired = expires.and_then(Timestamp::parse).is_some_and(|at| at <= now);
    if expired {
        tracing::warn!(subscription = %subscription.name, "expirationTimeUtc is over: the declaration is left out");
    }
    expired
}

/// A declared resource as an API request body.
fn body(name: &str, properties: &Value) -> String {
    json!({"name": name, "properties": properties}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_open_files_is_shared_out() {
        let check = |files: u64, attempts: usize, others: usize| {
            let expected = OutgoingConnections {
                attempts,
                late_answers: others,
                idle: others,
            };
            assert_eq!(OutgoingConnections::of_files(files, 8192), expected, "{files}");
        };
        check(1, 1, 1);
        check(64, 8, 4);
        check(1024, 128, 64);
        check(4096, 512, 256);
        check(1 << 20, 519_680, 259_840);
        assert!(OutgoingConnections::of_files(u64::MAX, 8192).attempts > 1 << 40);
    }

    #[test]
    fn the_portal_is_where_a_browser_reaches_it() {
        let check = |public: Option<&str>, http: &str, https: &str, expected: Option<&str>| {
            let [http, https] = [http, https].map(|address| address.parse().ok());
            assert_eq!(portal_url(public, http, https).as_deref(), expected);
        };
        check(
            Some("https://grid.example/x/"),
            "127.0.0.1:1",
            "",
            Some("https://grid.example/x/portal"),
        );
        check(
            None,
            "127.0.0.1:1",
            "127.0.0.1:2",
            Some("http://127.0.0.1:1/portal"),
        );
        check(None, "[::]:1", "0.0.0.0:2", Some("http://localhost:1/portal"));
        check(None, "", "0.0.0.0:2", Some("https://localhost:2/portal"));
        check(
            None,
            "192.0.2.1:1",
            "192.0.2.1:2",
            Some("https://192.0.2.1:2/portal"),
        );
        check(None, "192.0.2.1:1", "", Some("http://192.0.2.1:1/portal"));
        check(None, "", "", None);
    }
}
