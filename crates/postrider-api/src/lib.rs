//! The HTTP server, with one module per API. No API reaches past the engine's public interface.

pub mod http;
mod connections;
mod scheme_mismatch;
mod body_memory;
pub mod limits;
mod stream_slots;
pub mod audit;
mod attempts;
mod route;
mod catch_up;
pub mod publish;
mod publish_refusals;
pub mod edge;
pub mod locks;
pub mod declare;
pub mod health;
pub mod cluster;
pub mod peers;
mod metrics;
pub mod own_api;
pub mod azure;
mod subscription_control;
mod dead_letters;
mod docs;
mod events;
mod filters;
mod filter_limiter;
mod handshakes;
pub mod listen;
mod lookup;
pub mod own_address;
pub mod quotas;
mod openapi;
mod portal;
mod sessions;
mod stats;
mod stream;
pub mod access;
pub mod throttle;
pub mod access_state;
pub mod logins;
pub mod issuer;
pub mod login;

pub use metrics::MetricNameSets as MetricNames;
pub use portal::LocalSignInPage;

use async_trait::async_trait;
use postrider_audit::AuditLog;
use postrider_core::ids::Secret;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::Engine;
use postrider_engine::recorder::{NoRecorder, RecordingQueries, SpanCounts};
use postrider_engine::virtual_time::VirtualTime;
use postrider_wire::token::SigningKey;
use postrider_wire::{publish::PublishLimits, resources};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio_util::task::TaskTracker;

/// Configuration of the APIs.
#[derive(Clone, Debug)]
pub struct Config {
    pub limits: PublishLimits,
    /// Limits on each client's share of common resources.
    pub client_bounds: limits::ClientBounds,
    pub resource_limits: resources::ResourceLimits,
    pub edge: EdgeAccess,
    /// Host names by which this server is addressed. Other hosts are refused where no credential is
    /// required.
    pub host_names: Vec<String>,
    pub public_url: Option<String>,
    /// The id of the Azure subscription that all resources belong to.
    pub account: String,
    pub tenant: String,
    pub resource_group: String,
    pub location: String,
    pub clients: Vec<access::ConfiguredClient>,
    /// Signs tokens until it is replaced; the same after a restart.
    pub signing_key: SigningKey,
    /// The client whose tokens are given to any program on this machine; none disables such tokens.
    pub managed_identity: Option<String>,
    /// Key for operation names and generated GUIDs; the same after a restart.
    pub naming_key: Secret,
    /// The storage accounts that the management API shows.
    pub storage_accounts: Vec<StorageAccount>,
    /// `/iotHubs/…/modules/…`: prefix of resource ids in the edge API.
    pub module_path: String,
    pub profile: String,
    pub version: &'static str,
    /// Whether only this machine can reach the server.
    pub loopback_only: bool,
    /// Address of a plain-http listener that other machines can reach and that the configuration
    /// does not allow explicitly.
    pub plain_http_exposed: Option<std::net::SocketAddr>,
    pub quotas: quotas::Quotas,
    /// Limit of publish requests under way. Beyond it publishers are told to retry.
    pub publishing_max: usize,
    /// Bytes that the filters of a topic's subscriptions may examine for one event. An event that
    /// needs more is refused.
    pub filter_bytes_max: u64,
    pub throttle: throttle::ThrottleRules,
}

/// A storage account as the management API shows it.
#[derive(Clone, Debug)]
pub struct StorageAccount {
    pub name: String,
    pub blob_endpoint: Option<String>,
    pub queue_endpoint: Option<String>,
    /// Base64; only accounts in Azure and compatible services have a key.
    pub key: Option<Secret>,
}

/// Which clients may use the edge module's API.
#[derive(Clone, Debug)]
pub enum EdgeAccess {
    /// Any client that addresses the server by one of its own names.
    Open,
    /// Clients with one of these keys, and clients of the configuration by their roles.
    Keys([Secret; 2]),
}

/// Limits of the flight recorder; beyond them the oldest recordings are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingBounds {
    pub keep: std::time::Duration,
    pub bytes_max: u64,
}

/// Persists counters for the next start.
#[async_trait]
pub trait CounterPersistence: Send + Sync {
    async fn keep(&self);
}

/// Everything that a request can use.
pub struct Server {
    pub engine: Arc<Engine>,
    pub config: Config,
    /// The machine's clock, for times that are agreed upon with others, such as the expiry of
    /// tokens.
    wall: Arc<dyn Clock>,
    /// Set while the engine runs on a clock that a test moves.
    pub virtual_time: Option<VirtualTime>,
    /// The external issuer whose tokens are accepted besides this server's own.
    pub issuer: Option<Arc<issuer::TokenIssuer>>,
    /// The flight recorder. Nothing is recorded unless one is set.
    pub recordings: Arc<dyn RecordingQueries>,
    /// The audit log; none: nothing is audited.
    pub audit: Option<Arc<AuditLog>>,
    pub(crate) refusals: Mutex<audit::RefusalBudget>,
    /// Changes under way. They continue if their clients go away.
    pub(crate) changing: TaskTracker,
    /// Limits of the flight recorder, to be shown.
    pub recording_bounds: Option<RecordingBounds>,
    /// Counts of exported spans, if spans are exported.
    pub spans: Option<Arc<SpanCounts>>,
    /// The ports of the listeners, as far as they are known.
    pub ports: Vec<u16>,
    /// State of the outbound proxy, if there is one.
    pub proxy: Option<Arc<postrider_engine::deliver::ProxyHealth>>,
    /// Names on `/metrics` besides our own.
    pub metric_names: MetricNames,
    pub(crate) shown: metrics::MonotonicCounters,
    /// The certificate of the https listener, to warn before it expires.
    pub certificate: Option<health::ListenerCertificate>,
    /// The sign-in page for browsers on this machine; none: they get the general one.
    pub local_sign_in_page: Option<LocalSignInPage>,
    /// The listen sessions. None can be opened unless the engine's transport is this one.
    pub listeners: Option<Arc<listen::ListenSessions>>,
    /// The default configuration with its comments, shown under `/docs`.
    pub configuration: &'static str,
    /// The cluster that this server is a node of; none for a single server.
    pub cluster: Option<Arc<dyn cluster::ClusterView>>,
    /// The nodes that peer requests go to, this one included; none if there are no others.
    pub peers: Option<Arc<dyn peers::Peers>>,
    pub(crate) live: peers::live::ClusterLiveStream,
    /// Persists counters for the next start; none: they are lost.
    pub numbers: Option<Arc<dyn CounterPersistence>>,
    /// When this server started, by the machine's clock.
    pub(crate) started: Timestamp,
    pub(crate) sessions: sessions::PortalSessions,
    pub(crate) streams: stream::OpenStreams,
    /// Which tokens and sessions are valid.
    pub(crate) access: access_state::AccessState,
    pub(crate) logins: logins::Logins,
    logins_refused: login::RefusedLoginCounter,
    pub(crate) publish_refusals: publish_refusals::PublishRefusals,
    /// Wrong credentials by the address that they came from.
    pub(crate) throttle: throttle::Throttle,
    request_base: u64,
    requests: AtomicU64,
    publishing: AtomicUsize,
    pub(crate) client_limits: Arc<limits::ClientLimits>,
    pub(crate) connections: Arc<connections::Connections>,
    /// Pages of `/docs` that stay the same while the server runs.
    pub(crate) pages: docs::CachedDocPages,
    pub(crate) filter_turns: filter_limiter::FilterLimiter,
    /// Locks of resources: each is changed by one request at a time, so that no two base their
    /// change on the same earlier state.
    pub(crate) resource_locks: locks::KeyedLocks,
    pub(crate) quota_reservations: quotas::QuotaReservations,
}

impl Server {
    /// `request_base` makes this server's request ids differ from those of other servers.
    pub fn new(engine: Arc<Engine>, config: Config, wall: Arc<dyn Clock>, request_base: u64) -> Server {
        engine.set_replay_request_parser(Box::new(dead_letters::replay_request));
        let started = wall.now();
        let bounds = &config.client_bounds;
        let client_limits = Arc::new(limits::ClientLimits::new(bounds));
        let connections =
            connections::Connections::new(bounds.connections_max, bounds.connections_per_client_max);
        let streams = stream::OpenStreams::new(bounds);
        let throttle = throttle::Throttle::new(config.throttle);
        let access = access_state::AccessState::new(&config.signing_key);
        Server {
            engine,
            config,
            wall,
            virtual_time: None,
            issuer: None,
            recordings: Arc::new(NoRecorder),
            audit: None,
            refusals: Mutex::default(),
            changing: TaskTracker::new(),
            spans: None,
            proxy: None,
            ports: Vec::new(),
            recording_bounds: None,
            metric_names: MetricNames::default(),
            shown: metrics::MonotonicCounters::default(),
            certificate: None,
            local_sign_in_page: None,
            listeners: None,
            configuration: "",
            cluster: None,
            peers: None,
            live: peers::live::ClusterLiveStream::default(),
            numbers: None,
            started,
            sessions: sessions::PortalSessions::default(),
            streams,
            logins_refused: login::RefusedLoginCounter::default(),
            publish_refusals: publish_refusals::PublishRefusals::default(),
            throttle,
            access,
            logins: logins::Logins::default(),
            request_base,
            requests: AtomicU64::new(0),
            publishing: AtomicUsize::new(0),
            client_limits,
            connections: Arc::new(connections),
            pages: docs::CachedDocPages::default(),
            filter_turns: filter_limiter::FilterLimiter::new(processors().div_ceil(2)),
            resource_locks: locks::KeyedLocks::default(),
            quota_reservations: quotas::QuotaReservations::default(),
        }
    }

    /// Ends live streams and listen sessions. Returns when they have ended.
    pub async fn end_streams(&self) {
        self.streams.end().await;
    }

    /// Returns when the changes under way have ended.
    pub async fn end_changes(&self) {
        self.changing.close();
        self.changing.wait().await;
    }

    fn request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Relaxed);
        postrider_core::event::system_id(self.request_base, postrider_core::ids::Position(number))
    }

    /// Admits a publish request whose body has arrived; none if the limit is reached.
    fn admit_publish(&self) -> Option<PublishSlot<'_>> {
        let place = PublishSlot { server: self };
        let count = self.publishing.fetch_add(1, Relaxed) + 1;
        // Dropping the guard gives the slot back, here too.
        (count <= self.config.publishing_max).then_some(place)
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The slot of a publish request under way, given back on drop.
struct PublishSlot<'a> {
    server: &'a Server,
}

impl Drop for PublishSlot<'_> {
    fn drop(&mut self) {
        self.server.publishing.fetch_sub(1, Relaxed);
    }
}
