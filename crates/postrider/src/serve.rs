//! `postrider serve`: puts the parts together, runs them, takes them apart again.

use crate::config::{
    self, AccountKind, Config, DeclaredSubscription, EgressPolicy, Loaded, LogFormat, MetricsReporter,
    ServeFlags, StorageAccount,
};
use crate::fetch::Fetcher;
use crate::material::{self, Material};
use crate::stop_watchdog::{STOP_MARGIN, StopProgress, StopWatchdog};
use crate::{cluster, migrate, profiles, test_clock, traces};
use anyhow::{Context, Result, bail};
use postrider_api::access;
use postrider_api::health::Certificate;
use postrider_api::http::Wire;
use postrider_api::issuer::{Issuer, Trust};
use postrider_api::listen::Listeners;
use postrider_api::peers::Peers;
use postrider_api::{EdgeAccess, Server, declare};
use postrider_blobs::{Account, ObjectStores, Place};
use postrider_core::ids::Secret;
use postrider_core::json::Raw;
use postrider_core::subscription::DeadLetterDestination;
use postrider_core::time::{Clock, Timestamp};
use postrider_embedded::{EmbeddedArchive, EmbeddedCatalog, EmbeddedLog};
use postrider_engine::attempt::BatchDefaults;
use postrider_engine::clock::SystemClock;
use postrider_engine::dead_letters::DeadLetters;
use postrider_engine::deliver::Transport;
use postrider_engine::destinations::{Destinations, QueueAccount, Resource};
use postrider_engine::node::Node;
use postrider_engine::virtual_time::{VirtualTime, WatchedTransport};
use postrider_engine::{Engine, Parts, dispatch, handshake};
use postrider_jetstream::Cluster;
use postrider_otlp::Exporter;
use postrider_recorder::FlightRecorder;
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

/// How often something is declared that another node changes at the same time.
const DECLARE_TRIES: u32 = 30;
const DECLARE_AGAIN: Duration = Duration::from_millis(200);
/// Blocking calls that still run when everything else has stopped are waited for this long.
const BLOCKING_PATIENCE: Duration = Duration::from_secs(5);

pub fn run(flags: &ServeFlags) -> Result<()> {
    let loaded = config::load(flags, std::env::vars())?;
    if flags.print_config {
        print!("{}", config::print_config(&loaded));
        return Ok(());
    }
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
            Time::Test
        } else {
            Time::Of(Arc::new(SystemClock))
        };
        let running = Running::start(&loaded, time).await?;
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

/// Every connection is a file, and the usual soft limit of 1024 is soon reached.
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
    // It tells of every connection; what matters of that we tell ourselves.
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
    // A second call, as in a test with two servers, changes nothing.
    let _ = match json {
        // Fields beside the message, not inside another object: what collects logs asks for them by name.
        true => builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .try_init(),
        false => builder.with_ansi(terminal).try_init(),
    };
}

/// Where the server's time comes from.
pub enum Time {
    Of(Arc<dyn Clock>),
    /// A clock that moves only when told to, over the API.
    Test,
}

/// A server that is up.
pub struct Running {
    pub server: Arc<Server>,
    pub http: Option<SocketAddr>,
    pub https: Option<SocketAddr>,
    material: Material,
    recorder: Option<Arc<FlightRecorder>>,
    spans: Option<Arc<Exporter>>,
    listeners: TaskTracker,
    /// Set if this is one node of several.
    pub cluster: Option<Arc<Cluster>>,
    stop: CancellationToken,
    _lock: File,
}

impl Running {
    /// Opens the store, takes up deliveries, applies what the configuration declares, listens.
    pub async fn start(loaded: &Loaded, time: Time) -> Result<Running> {
        let config = &loaded.config;
        // First of all: a second server in the same directory must not even renew a certificate.
        let lock = lock(&config.data_dir)?;
        let mut material = material::prepare(config, SystemClock.now())?;
        // Before anything is started: a second server on the same address must change nothing.
        let http = listen(config.listen.http).await?;
        let https = listen(config.listen.https).await?;
        let http_address = http.as_ref().map(TcpListener::local_addr).transpose()?;
        let https_address = https.as_ref().map(TcpListener::local_addr).transpose()?;
        let (clock, test_clock): (Arc<dyn Clock>, _) = match time {
            Time::Of(clock) => {
                test_clock::check_unused(&config.data_dir, SystemClock.now())?;
                (clock, None)
            }
            Time::Test => {
                let clock = Arc::new(test_clock::open(&config.data_dir, SystemClock.now())?);
                (clock.clone(), Some(clock))
            }
        };
        let store = match cluster::settings(config) {
            None => Store::embedded(config).await?,
            Some(settings) => {
                cluster::check_clock(test_clock.is_some())?;
                let url = cluster::url(config, http_address, https_address);
                Store::clustered(cluster::join(config, settings, url).await?)
            }
        };
        if let Some(cluster) = &store.cluster
            && cluster::share_secrets(cluster, config).await?
        {
            let created = std::mem::take(&mut material.created);
            material = material::prepare(config, SystemClock.now())?;
            material.created.splice(0..0, created);
        }
        let wall = Arc::new(SystemClock);
        let dead_letters = dead_letters(config, store.archive, wall.clone())?;
        let network = HttpTransport::new(transport(loaded)?, clock.clone())?;
        let event_listeners = Arc::new(Listeners::new(Arc::new(network)));
        let others = store.cluster.as_deref().map(cluster::peers::Others::new);
        if let Some(others) = &others {
            event_listeners.among(others.clone());
        }
        let mut transport: Arc<dyn Transport> = event_listeners.clone();
        let mut watched = None;
        if test_clock.is_some() {
            let watching = Arc::new(WatchedTransport::new(transport, Arc::new(SystemClock)));
            watched = Some(watching.clone());
            transport = watching;
        }
        let recorder = recorder(config, clock.clone())?;
        let roots = extra_roots(config)?;
        let spans = traces::exporter(config, roots, clock.clone(), store.identity, random())?;
        let naming_key = material.token_key.naming.clone();
        let (node, share) = match store.cluster.as_deref().map(cluster::node) {
            Some((node, share)) => (node, Some(share)),
            None => (Node::alone(), None),
        };
        let engine = Engine::start(Parts {
            log: store.log,
            catalog: store.catalog,
            transport,
            clock,
            wall: wall.clone(),
            profiles: profiles::of(loaded),
            id_prefix: format!("/subscriptions/{}", config.azure.subscription),
            dispatch: dispatch::Config {
                in_flight_per_endpoint_max: config.limits.in_flight_per_endpoint_max,
                in_flight_bytes_max: config.limits.in_flight_bytes_max,
                batch_defaults: BatchDefaults {
                    events_max: loaded.edge.broker.default_max_events_per_batch,
                    edge_bytes_max: loaded.edge.broker.default_max_batch_size_in_bytes as usize,
                },
                // A test wants the same waits every time.
                seed: config.retry.jitter_seed.unwrap_or_else(|| match test_clock {
                    Some(_) => 0,
                    None => random(),
                }),
                safety_net: dead_letters.fallback.is_some(),
                destinations: Arc::new(destinations(config)),
                spans: traces::share(config),
            },
            dead_letters,
            handshake: handshake::Rules {
                enabled: config.validation.enabled,
                // So that an operation is known to have ended well after a restart, too.
                operations: Arc::new(move || postrider_wire::arm::fresh_operation(naming_key.as_bytes())),
                ..handshake::Rules::default()
            },
            recorder: traces::told(recorder.as_ref(), spans.as_ref()),
            node,
        })
        .await
        .context("starting the engine")?;
        let mut server = Server::new(
            engine.clone(),
            api_config(loaded, &material),
            wall.clone(),
            random(),
        );
        if store.cluster.is_some() {
            server.share_sessions(&Secret::new(material.token_key.naming.clone()));
        }
        if let Some(cluster) = &store.cluster {
            let view = cluster::view::View::new(cluster.clone());
            view.greet().await;
            server.cluster = Some(view);
        }
        server.peers = others.map(|others| others as Arc<dyn Peers>);
        server.issuer = issuer(config)?;
        server.metric_names = metric_names(loaded);
        if config.listen.https.is_some() {
            server.certificate = material.expires.map(|expires| Certificate {
                expires,
                ours: material.ca_path.is_some(),
            });
        }
        server.listeners = Some(event_listeners);
        server.configuration = crate::config::default_config_text();
        server.spans = spans.as_ref().map(|spans| spans.counts.clone());
        if let Some(recorder) = &recorder {
            server.recordings = recorder.clone();
            server.recording_bounds = Some(postrider_api::RecordingBounds {
                keep: config.recorder.keep,
                bytes_max: config.recorder.bytes_max,
            });
        }
        if let (Some(clock), Some(transport)) = (test_clock, watched) {
            server.virtual_time = Some(VirtualTime::new(clock, transport, wall, engine));
        }
        let server = Arc::new(server);
        if let Some(cluster) = &store.cluster {
            cluster::peers::answer_with(cluster, &server);
        }
        postrider_api::listen::delete_left_over(&server).await;
        declare_all(&server, config).await?;
        let running = Running {
            http: http_address,
            https: https_address,
            server,
            cluster: store.cluster,
            listeners: TaskTracker::new(),
            stop: CancellationToken::new(),
            material,
            recorder,
            spans,
            _lock: lock,
        };
        if let (Some(cluster), Some(share)) = (&running.cluster, share) {
            cluster::view::report(cluster, &running.server);
            let (cluster, engine) = (cluster.clone(), running.server.engine.clone());
            let listening =
                cluster::peers::tend_listeners(cluster.clone(), running.server.clone(), running.stop.clone());
            running.listeners.spawn(listening);
            let tending = cluster::tend(cluster, engine, share, running.stop.clone());
            running.listeners.spawn(tending);
        }
        if let Some(cluster) = &running.cluster {
            cluster::settle_in(cluster, &SystemClock).await;
        }
        if let Some(listener) = http {
            running.serve(listener, Wire::Plain);
        }
        if let Some(listener) = https {
            let acceptor = TlsAcceptor::from(Arc::new(running.material.server_config.clone()));
            running.serve(listener, Wire::Tls(acceptor));
        }
        Ok(running)
    }

    fn serve(&self, listener: TcpListener, wire: Wire) {
        let serving = postrider_api::http::serve(self.server.clone(), listener, wire, self.stop.clone());
        self.listeners.spawn(serving);
    }

    fn greet(&self, loaded: &Loaded) {
        for path in &self.material.created {
            tracing::info!(path = %path.display(), "created");
        }
        if let (Some(path), Some(_)) = (&self.material.ca_path, self.https) {
            tracing::info!(path = %path.display(), "https clients have to trust this certificate");
        }
        if let Some(path) = &self.material.credentials_path {
            tracing::info!(path = %path.display(), "client id and secret are in this file; \"postrider az-setup\" logs az in");
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

    /// Says why, once this node can go on no more; never if there is no other.
    async fn failed(&self) -> String {
        if let Some(cluster) = &self.cluster {
            let mut failed = cluster.members.failed();
            if let Ok(why) = failed.wait_for(Option::is_some).await {
                return why.clone().unwrap_or_default();
            }
        }
        std::future::pending().await
    }

    /// Stops, or ends the process with a line that names what did not end.
    async fn stop_or_exit(self, grace: Duration) -> Result<()> {
        let progress = StopProgress::begin("requests under way");
        let engine = self.server.engine.clone();
        let expire = move |part: String| {
            let tasks = engine.running_tasks();
            tracing::error!(part, tasks, "the server did not stop in time: exiting");
            std::process::exit(1);
        };
        let _watchdog = StopWatchdog::arm(grace + STOP_MARGIN, progress.clone(), expire);
        self.stop_reporting(grace, &progress).await
    }

    /// Refuses publishes, lets attempts end, makes everything durable.
    pub async fn stop(self, grace: Duration) -> Result<()> {
        self.stop_reporting(grace, &StopProgress::begin("requests under way"))
            .await
    }

    async fn stop_reporting(self, grace: Duration, progress: &StopProgress) -> Result<()> {
        self.server.engine.refuse();
        self.stop.cancel();
        self.listeners.close();
        let end = SystemClock.now() + grace;
        // Before the engine: who listens leaves no subscription behind.
        tokio::select! {
            () = self.server.end_streams() => {}
            () = SystemClock.sleep_until(end) => {}
        }
        // While the engine still runs: what is under way ends here, the rest is for the other nodes.
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
        if let Some(cluster) = &self.cluster {
            progress.enter("connection to JetStream");
            cluster.close().await;
        }
        // After the engine: its last attempts are recorded too.
        if let Some(recorder) = self.recorder {
            progress.enter("flight recorder");
            tokio::task::spawn_blocking(move || recorder.stop())
                .await
                .context("closing the flight recorder")?;
        }
        if let Some(spans) = self.spans {
            progress.enter("span exporter");
            spans.stop().await;
        }
        // Connections end with the process; requests that were accepted have been answered.
        Ok(())
    }
}

/// Held while the server lives: two of them would write over each other.
pub fn lock(data_dir: &Path) -> Result<File> {
    let path = data_dir.join("lock");
    let locking = || format!("locking {}", path.display());
    std::fs::create_dir_all(data_dir)
        .with_context(|| format!("creating the directory {}", data_dir.display()))?;
    let file = File::create(&path).with_context(locking)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("{} is in use by another server", data_dir.display()),
        Err(TryLockError::Error(e)) => Err(e).with_context(locking),
    }
}

/// Where everything is kept, whichever kind of store it is.
struct Store {
    log: Arc<dyn EventLog>,
    catalog: Arc<dyn Catalog>,
    archive: Arc<dyn Archive>,
    identity: u64,
    cluster: Option<Arc<Cluster>>,
}

impl Store {
    async fn embedded(config: &Config) -> Result<Store> {
        migrate::marks::check(&config.data_dir)?;
        let log = EmbeddedLog::open(&config.data_dir, random())
            .await
            .with_context(|| format!("opening the log in {}", config.data_dir.display()))?;
        let catalog = open_catalog(&config.data_dir, &log)?;
        let path = config.data_dir.join("archive.redb");
        let archive = EmbeddedArchive::open(&path).with_context(|| format!("opening {}", path.display()))?;
        Ok(Store {
            identity: log.identity(),
            log: Arc::new(log),
            catalog: Arc::new(catalog),
            archive: Arc::new(archive),
            cluster: None,
        })
    }

    fn clustered(cluster: Arc<Cluster>) -> Store {
        Store {
            identity: cluster.log.identity(),
            log: cluster.log.clone(),
            catalog: cluster.catalog.clone(),
            archive: cluster.archive.clone(),
            cluster: Some(cluster),
        }
    }
}

/// A catalogue that is new forgets every subscription, and with it whatever waits in the log.
pub fn open_catalog(data_dir: &Path, log: &EmbeddedLog) -> Result<EmbeddedCatalog> {
    let path = data_dir.join("catalog.redb");
    let known = std::fs::metadata(&path).is_ok_and(|file| file.len() > 0);
    if !known && !log.subscriptions().is_empty() {
        bail!(
            "{} is missing or empty, but events wait in the log for subscriptions that only it knows: \
             put it back, or start with another data directory",
            path.display()
        );
    }
    Ok(EmbeddedCatalog::open(&path)?)
}

/// What keeps the stories of events, unless that is off.
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

/// Where dead letters go, and what is known about those that are there.
fn dead_letters(config: &Config, archive: Arc<dyn Archive>, wall: Arc<dyn Clock>) -> Result<DeadLetters> {
    let accounts = config.all_storage_accounts();
    let accounts = accounts.into_iter().map(account).collect::<Result<_>>()?;
    let blobs = ObjectStores::new(accounts, wall)?;
    let fallback = config
        .safety_net()
        .map(|(account, container)| DeadLetterDestination {
            account: account.to_owned(),
            container: container.to_owned(),
        });
    Ok(DeadLetters::new(Arc::new(blobs), archive, fallback))
}

pub fn account(configured: StorageAccount) -> Result<Account> {
    let create_containers = configured.creates_containers();
    let needed = "loading refuses an account without it";
    let secret = |secret: Option<config::Secret>| Secret::new(secret.expect(needed).expose());
    let name = configured.name;
    let place = match configured.kind {
        AccountKind::Directory => Place::Directory {
            root: configured.path.expect(needed),
        },
        AccountKind::Azure => Place::Azure {
            account: name.clone(),
            endpoint: configured
                .blob_endpoint
                .unwrap_or_else(|| format!("https://{name}.blob.core.windows.net")),
            key: secret(configured.key),
        },
        AccountKind::S3 => Place::S3 {
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
            Place::Gcs {
                endpoint: configured.endpoint,
                bucket: configured.bucket,
                service_account: Secret::new(text),
            }
        }
    };
    Ok(Account {
        name,
        place,
        create_containers,
    })
}

/// Where destinations are that subscriptions only name.
pub fn destinations(config: &Config) -> Destinations {
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
    let resources = config.destinations.iter().map(|configured| Resource {
        id: configured.resource.clone(),
        url: Secret::new(configured.url.expose()),
        key_name: configured.key_name.clone(),
        key: configured.key.as_ref().map(|key| Secret::new(key.expose())),
    });
    Destinations::new(accounts.collect(), resources.collect())
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

pub fn transport(loaded: &Loaded) -> Result<postrider_transport::Config> {
    let config = &loaded.config;
    Ok(postrider_transport::Config {
        egress: match config.egress.policy {
            EgressPolicy::Internet => postrider_transport::EgressPolicy::Internet,
            EgressPolicy::Private => postrider_transport::EgressPolicy::Private,
            EgressPolicy::Custom => postrider_transport::EgressPolicy::Custom {
                allow: config.egress.allow.clone(),
                deny: config.egress.deny.clone(),
            },
        },
        extra_roots: extra_roots(config)?,
        accept_invalid_certs: loaded.edge.webhook.skip_server_cert_validation,
        user_agent: config.transport.user_agent.clone(),
        ..postrider_transport::Config::default()
    })
}

/// What is trusted besides what the system trusts.
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

fn metric_names(loaded: &Loaded) -> postrider_api::MetricNames {
    let metrics = &loaded.config.metrics;
    let asked = loaded.edge.metrics_reporter == MetricsReporter::Prometheus;
    postrider_api::MetricNames {
        azure: metrics.azure_names,
        edge: metrics.edge_names.unwrap_or(asked),
    }
}

fn api_config(loaded: &Loaded, material: &Material) -> postrider_api::Config {
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
    let key = |key: &Option<config::Secret>| Secret::new(key.as_ref().map_or("", |k| k.expose()));
    postrider_api::Config {
        limits: postrider_wire::publish::Limits {
            request_bytes: config.limits.request_bytes_max,
            event_bytes: config.limits.event_bytes_max,
            events_max: config.limits.events_per_request_max,
        },
        resource_limits: resources::Limits {
            edge_batch_events_max: edge.limits.max_events_per_batch,
            edge_batch_kilobytes_max: edge.limits.max_preferred_batch_size_in_kilobytes,
            web_hook_https_only: edge.webhook.https_only,
            event_grid_https_only: edge.event_grid.https_only,
            event_grid_any_host: edge.event_grid.allow_invalid_hostnames,
            declared_filters: FilterLimits {
                filters_max: config.limits.declared_filters_max,
                values_max: config.limits.declared_filter_values_max,
                value_chars_max: config.limits.declared_filter_value_chars_max,
            },
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
        publishing_max: config.limits.publish_queue_max,
        filter_bytes_max: config.limits.filter_bytes_per_event_max,
    }
}

fn client(configured: &config::Client) -> access::Client {
    access::Client {
        id: configured.id.clone(),
        secret: Secret::new(configured.secret.expose()),
        role: role(configured.role),
    }
}

fn role(configured: config::Role) -> access::Role {
    match configured {
        config::Role::Owner => access::Role::Owner,
        config::Role::Contributor => access::Role::Contributor,
        config::Role::Reader => access::Role::Reader,
        config::Role::DataSender => access::Role::DataSender,
    }
}

/// The external issuer, which is asked for its keys when its first token comes.
fn issuer(config: &Config) -> Result<Option<Arc<Issuer>>> {
    let Some(oidc) = config.oidc.clone() else {
        return Ok(None);
    };
    let trust = Trust {
        issuer: oidc.issuer,
        audience: oidc.audience,
        jwks_url: oidc.jwks_url,
        role_claim: oidc.role_claim,
        client_claim: oidc.client_claim,
        roles: oidc.roles.into_iter().map(|(word, r)| (word, role(r))).collect(),
    };
    let fetcher = Fetcher::new(extra_roots(config)?)?;
    Ok(Some(Issuer::new(trust, Arc::new(fetcher))))
}

/// An account as the management plane shows it.
fn shown_account(configured: StorageAccount) -> postrider_api::StorageAccount {
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

/// Makes what the configuration declares; what is there already and the same stays untouched. Nodes that start together
/// declare the same things at the same time: who comes second finds them there.
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
    for topic in &config.topics {
        let keys = [&topic.key1, &topic.key2].map(|k| k.as_ref().map(|k| k.expose().to_owned()));
        let text = body(&topic.name, &topic.properties);
        let made = declare::topic(server, Raw::trusted(&text), Road::Config, &topic.name, Some(keys)).await;
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
            Raw::trusted(&text),
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
            Raw::trusted(&text),
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
            let raw = Raw::trusted(&text);
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
        let made = declare::system_topic(server, Raw::trusted(&text), Road::Config, name).await;
        made.with_context(|| format!("system topic {name:?} in the configuration"))?;
        for subscription in &topic.subscriptions {
            if has_expired(subscription, now) {
                continue;
            }
            let text = body(&subscription.name, &subscription.properties);
            let raw = Raw::trusted(&text);
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

/// A subscription whose time is over has been retired; its declaration must not keep the server from starting.
fn has_expired(subscription: &DeclaredSubscription, now: Timestamp) -> bool {
    let expires = subscription.properties["expirationTimeUtc"].as_str();
    let expired = expires.and_then(Timestamp::parse).is_some_and(|at| at <= now);
    if expired {
        tracing::warn!(subscription = %subscription.name, "expirationTimeUtc is over: the declaration is left out");
    }
    expired
}

/// A declared resource as the API would be sent it.
fn body(name: &str, properties: &Value) -> String {
    json!({"name": name, "properties": properties}).to_string()
}
