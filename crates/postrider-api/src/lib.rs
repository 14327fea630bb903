//! The HTTP server: one module per road. None of them reaches past the engine's front.

pub mod http;
mod behind;
pub mod publish;
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
mod handshakes;
pub mod listen;
mod named;
mod openapi;
mod portal;
mod sessions;
mod stats;
mod stream;
pub mod access;
pub mod issuer;
pub mod login;

pub use metrics::Names as MetricNames;

use postrider_core::ids::Secret;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::Engine;
use postrider_engine::recorder::{Nothing, Recordings, SpanCounts};
use postrider_engine::virtual_time::VirtualTime;
use postrider_wire::auth::fresh_key;
use postrider_wire::token::SigningKey;
use postrider_wire::{publish::Limits, resources};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use tokio::sync::Semaphore;

/// What the roads need to know.
#[derive(Clone, Debug)]
pub struct Config {
    pub limits: Limits,
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
    /// Signs the tokens that clients log in for; the same after a restart.
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
    /// Publish requests under way at once; beyond it publishers are told to come back.
    pub publishing_max: usize,
    /// Bytes that the filters of a topic's subscriptions may look at for one event; beyond it the event is
    /// refused.
    pub filter_bytes_max: u64,
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

/// Bodies of publish requests under way, in bytes; beyond it publishers are told to come back.
const PUBLISHING_BYTES_MAX: usize = 128 << 20;

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
    /// How much of it is kept, to be shown.
    pub recording_bounds: Option<RecordingBounds>,
    /// What became of spans, if any are exported.
    pub spans: Option<Arc<SpanCounts>>,
    /// Names on `/metrics` besides our own.
    pub metric_names: MetricNames,
    pub(crate) shown: metrics::Shown,
    /// What the listener for https shows, to warn before it ends.
    pub certificate: Option<health::Certificate>,
    /// Who listens to events; nobody can unless the engine's transport is this one.
    pub listeners: Option<Arc<listen::Listeners>>,
    /// The default configuration with its comments, to be read under `/docs`.
    pub configuration: &'static str,
    /// The cluster that this server is a node of; none: it keeps everything itself.
    pub cluster: Option<Arc<dyn cluster::ClusterView>>,
    /// The nodes that are asked together with this one; none: there are no others.
    pub peers: Option<Arc<dyn peers::Peers>>,
    pub(crate) live: peers::live::Live,
    /// When this server began, by the machine's clock.
    pub(crate) started: Timestamp,
    pub(crate) sessions: sessions::Sessions,
    pub(crate) streams: stream::Streams,
    logins_refused: login::LoginsRefused,
    request_base: u64,
    requests: AtomicU64,
    publishing: AtomicUsize,
    publishing_bytes: AtomicUsize,
    /// Turns for evaluating filters that look at many bytes: at most half of the processors do.
    long_filtering: Semaphore,
    /// A resource is made and changed by one at a time, so that no two read the same earlier state.
    pub(crate) declaring: locks::Locks,
}

impl Server {
    /// `request_base` makes this server's request ids differ from another's.
    pub fn new(engine: Arc<Engine>, config: Config, wall: Arc<dyn Clock>, request_base: u64) -> Server {
        engine.read_replays_with(Box::new(dead_letters::replay_request));
        let started = wall.now();
        Server {
            engine,
            config,
            wall,
            virtual_time: None,
            issuer: None,
            recordings: Arc::new(Nothing),
            spans: None,
            recording_bounds: None,
            metric_names: MetricNames::default(),
            shown: metrics::Shown::default(),
            certificate: None,
            listeners: None,
            configuration: "",
            cluster: None,
            peers: None,
            live: peers::live::Live::default(),
            started,
            sessions: sessions::Sessions::new(&fresh_key()),
            streams: stream::Streams::default(),
            logins_refused: login::LoginsRefused::default(),
            request_base,
            requests: AtomicU64::new(0),
            publishing: AtomicUsize::new(0),
            publishing_bytes: AtomicUsize::new(0),
            long_filtering: Semaphore::new(processors().div_ceil(2)),
            declaring: locks::Locks::default(),
        }
    }

    /// Takes the sessions of every node that knows the same secret.
    pub fn share_sessions(&mut self, secret: &Secret) {
        self.sessions = sessions::Sessions::new(secret);
    }

    /// Ends what goes on for as long as someone reads it. Returns when that has ended.
    pub async fn end_streams(&self) {
        self.streams.end().await;
    }

    fn request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Relaxed);
        postrider_core::event::system_id(self.request_base, postrider_core::ids::Position(number))
    }

    /// Takes a place for a publish request whose body may have this many bytes; none if there is none.
    fn admit_publish(&self, bytes: usize) -> Option<Publishing<'_>> {
        let place = Publishing { server: self, bytes };
        let count = self.publishing.fetch_add(1, Relaxed) + 1;
        let total = self.publishing_bytes.fetch_add(bytes, Relaxed) + bytes;
        // The place is given back when it is dropped, here too.
        (count <= self.config.publishing_max && total <= PUBLISHING_BYTES_MAX).then_some(place)
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A publish request's place among those under way.
struct Publishing<'a> {
    server: &'a Server,
    bytes: usize,
}

impl Drop for Publishing<'_> {
    fn drop(&mut self) {
        self.server.publishing.fetch_sub(1, Relaxed);
        self.server.publishing_bytes.fetch_sub(self.bytes, Relaxed);
    }
}
