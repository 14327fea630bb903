//! The HTTP server: one module per road. None of them reaches past the engine's front.

pub mod http;
mod connections;
mod scheme_mismatch;
mod bodies;
pub mod limits;
mod places;
pub mod audit;
mod attempts;
mod behind;
pub mod publish;
mod publish_refusals;
pub mod edge;
pub mod locks;
pub mod declare;
pub mod health;
pub mod cluster;
pub mod peers;
mod metrics;
pub mod ours;
pub mod azure;
mod control;
mod dead_letters;
mod docs;
mod events;
mod filters;
mod filter_turns;
mod handshakes;
pub mod listen;
mod named;
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

pub use metrics::Names as MetricNames;
pub use portal::LocalSignInPage;

use async_trait::async_trait;
use postrider_audit::AuditLog;
use postrider_core::ids::Secret;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::Engine;
use postrider_engine::recorder::{Nothing, Recordings, SpanCounts};
use postrider_engine::virtual_time::VirtualTime;
use postrider_wire::token::SigningKey;
use postrider_wire::{publish::Limits, resources};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio_util::task::TaskTracker;

/// What the roads need to know.
#[derive(Clone, Debug)]
pub struct Config {
    pub limits: Limits,
    /// Limits on the share of each client in what all use.
    pub client_bounds: limits::ClientBounds,
    pub resource_limits: resources::Limits,
    pub edge: EdgeAccess,
    /// Host names by which this server is addressed; others are refused where no credential is asked for.
    pub host_names: Vec<String>,
    pub public_url: Option<String>,
    /// The id of the Azure subscription that everything here belongs to.
    pub account: String,
    pub tenant: String,
    pub resource_group: String,
    pub location: String,
    pub clients: Vec<access::Client>,
    /// Signs the tokens that clients log in for until it is replaced; the same after a restart.
    pub signing_key: SigningKey,
    /// The client whose tokens are given to anyone on this machine; none: no such tokens.
    pub managed_identity: Option<String>,
    /// Names operations and makes up GUIDs; the same after a restart.
    pub naming_key: Secret,
    /// The storage accounts that the management plane shows.
    pub storage_accounts: Vec<StorageAccount>,
    /// `/iotHubs/…/modules/…`: what edge resource ids begin with.
    pub module_path: String,
    pub profile: String,
    pub version: &'static str,
    /// Only this machine can reach the server.
    pub loopback_only: bool,
    /// A listener for plain http that others can reach and that was not allowed by name.
    pub plain_http_exposed: Option<std::net::SocketAddr>,
    pub quotas: quotas::Quotas,
    /// Publish requests under way at once; beyond it publishers are told to come back.
    pub publishing_max: usize,
    /// Bytes that the filters of a topic's subscriptions may look at for one event; beyond it the event is
    /// refused.
    pub filter_bytes_max: u64,
    pub throttle: throttle::ThrottleRules,
}

/// A storage account as the management plane shows it.
#[derive(Clone, Debug)]
pub struct StorageAccount {
    pub name: String,
    pub blob_endpoint: Option<String>,
    pub queue_endpoint: Option<String>,
    /// Base64; only accounts in Azure, or what speaks like it, have one.
    pub key: Option<Secret>,
}

/// Who may use the edge module's API.
#[derive(Clone, Debug)]
pub enum EdgeAccess {
    /// Anyone who addresses the server by one of its own names.
    Open,
    /// Holders of one of these keys, and clients by their roles.
    Keys([Secret; 2]),
}

/// Beyond these the oldest of what is recorded goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingBounds {
    pub keep: std::time::Duration,
    pub bytes_max: u64,
}

/// Keeps what has been counted where the next start finds it.
#[async_trait]
pub trait NumbersKeeper: Send + Sync {
    async fn keep(&self);
}

/// Everything a request can reach.
pub struct Server {
    pub engine: Arc<Engine>,
    pub config: Config,
    /// The machine's clock, for what is agreed upon with others: tokens are judged by it.
    wall: Arc<dyn Clock>,
    /// Set while the engine runs on a clock that a test moves.
    pub virtual_time: Option<VirtualTime>,
    /// Whose tokens are taken besides our own.
    pub issuer: Option<Arc<issuer::Issuer>>,
    /// What became of events; nothing is known unless a recorder is set.
    pub recordings: Arc<dyn Recordings>,
    /// Records who changes what; none: nobody does.
    pub audit: Option<Arc<AuditLog>>,
    pub(crate) refusals: Mutex<audit::RefusalBudget>,
    /// Changes under way, which go on though their clients go away.
    pub(crate) changing: TaskTracker,
    /// How much of it is kept, to be shown.
    pub recording_bounds: Option<RecordingBounds>,
    /// What became of spans, if any are exported.
    pub spans: Option<Arc<SpanCounts>>,
    /// The ports that it listens on, as far as they are known.
    pub ports: Vec<u16>,
    /// How the proxy on the way out does, if there is one.
    pub proxy: Option<Arc<postrider_engine::deliver::ProxyHealth>>,
    /// Names on `/metrics` besides our own.
    pub metric_names: MetricNames,
    pub(crate) shown: metrics::Shown,
    /// What the listener for https shows, to warn before it ends.
    pub certificate: Option<health::Certificate>,
    /// The sign-in page for browsers on this machine; none: they get the one for everybody.
    pub local_sign_in_page: Option<LocalSignInPage>,
    /// Who listens to events; nobody can unless the engine's transport is this one.
    pub listeners: Option<Arc<listen::Listeners>>,
    /// The default configuration with its comments, to be read under `/docs`.
    pub configuration: &'static str,
    /// The cluster that this server is a node of; none: it keeps everything itself.
    pub cluster: Option<Arc<dyn cluster::ClusterView>>,
    /// The nodes that are asked together with this one; none: there are no others.
    pub peers: Option<Arc<dyn peers::Peers>>,
    pub(crate) live: peers::live::Live,
    /// Keeps what has been counted for the next start; none: it is forgotten.
    pub numbers: Option<Arc<dyn NumbersKeeper>>,
    /// When this server began, by the machine's clock.
    pub(crate) started: Timestamp,
    pub(crate) sessions: sessions::Sessions,
    pub(crate) streams: stream::Streams,
    /// Which tokens and sessions hold.
    pub(crate) access: access_state::AccessState,
    pub(crate) logins: logins::Logins,
    logins_refused: login::LoginsRefused,
    pub(crate) publish_refusals: publish_refusals::PublishRefusals,
    /// Wrong credentials by the address that they came from.
    pub(crate) throttle: throttle::Throttle,
    request_base: u64,
    requests: AtomicU64,
    publishing: AtomicUsize,
    pub(crate) client_limits: Arc<limits::ClientLimits>,
    pub(crate) connections: Arc<connections::Connections>,
    /// Pages of `/docs` that are the same for as long as the server runs.
    pub(crate) pages: docs::Pages,
    pub(crate) filter_turns: filter_turns::FilterTurns,
    /// A resource is made and changed by one at a time, so that no two read the same earlier state.
    pub(crate) declaring: locks::Locks,
    pub(crate) quota_reservations: quotas::QuotaReservations,
}

impl Server {
    /// `request_base` makes this server's request ids differ from another's.
    pub fn new(engine: Arc<Engine>, config: Config, wall: Arc<dyn Clock>, request_base: u64) -> Server {
        engine.read_replays_with(Box::new(dead_letters::replay_request));
        let started = wall.now();
        let bounds = &config.client_bounds;
        let client_limits = Arc::new(limits::ClientLimits::new(bounds));
        let connections =
            connections::Connections::new(bounds.connections_max, bounds.connections_per_client_max);
        let streams = stream::Streams::new(bounds);
        let throttle = throttle::Throttle::new(config.throttle);
        let access = access_state::AccessState::new(&config.signing_key);
        Server {
            engine,
            config,
            wall,
            virtual_time: None,
            issuer: None,
            recordings: Arc::new(Nothing),
            audit: None,
            refusals: Mutex::default(),
            changing: TaskTracker::new(),
            spans: None,
            proxy: None,
            ports: Vec::new(),
            recording_bounds: None,
            metric_names: MetricNames::default(),
            shown: metrics::Shown::default(),
            certificate: None,
            local_sign_in_page: None,
            listeners: None,
            configuration: "",
            cluster: None,
            peers: None,
            live: peers::live::Live::default(),
            numbers: None,
            started,
            sessions: sessions::Sessions::default(),
            streams,
            logins_refused: login::LoginsRefused::default(),
            publish_refusals: publish_refusals::PublishRefusals::default(),
            throttle,
            access,
            logins: logins::Logins::default(),
            request_base,
            requests: AtomicU64::new(0),
            publishing: AtomicUsize::new(0),
            client_limits,
            connections: Arc::new(connections),
            pages: docs::Pages::default(),
            filter_turns: filter_turns::FilterTurns::new(processors().div_ceil(2)),
            declaring: locks::Locks::default(),
            quota_reservations: quotas::QuotaReservations::default(),
        }
    }

    /// Ends what goes on for as long as someone reads it. Returns when that has ended.
    pub async fn end_streams(&self) {
        self.streams.end().await;
    }

    /// Returns when the changes that are under way have ended.
    pub async fn end_changes(&self) {
        self.changing.close();
        self.changing.wait().await;
    }

    fn request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Relaxed);
        postrider_core::event::system_id(self.request_base, postrider_core::ids::Position(number))
    }

    /// Takes a place for a publish request whose body has arrived; none if there is none.
    fn admit_publish(&self) -> Option<Publishing<'_>> {
        let place = Publishing { server: self };
        let count = self.publishing.fetch_add(1, Relaxed) + 1;
        // The place is given back when it is dropped, here too.
        (count <= self.config.publishing_max).then_some(place)
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A publish request's place among those under way.
struct Publishing<'a> {
    server: &'a Server,
}

impl Drop for Publishing<'_> {
    fn drop(&mut self) {
        self.server.publishing.fetch_sub(1, Relaxed);
    }
}
