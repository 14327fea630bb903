//! The event path: ingest, dispatch, deliver, settle. No sockets, no files.

pub mod ingest;
pub mod directory;
pub mod manage;
mod tasks;
mod change_turns;
pub mod observed_catalog;
pub mod masking;
pub mod node;
mod remote_changes;
pub mod dispatch;
pub mod attempt;
pub mod destinations;
pub mod deliver;
pub mod handshake;
pub mod late_answer_registry;
pub mod in_flight;
pub mod endpoint;
pub mod endpoint_delays;
pub mod counters;
pub mod meters;
pub mod numbers_snapshot;
pub mod subscription_health;
pub mod clock;
pub mod virtual_time;
pub mod blobs;
pub mod dead_letters;
pub mod dead_letter_blob;
pub mod replay;
pub mod replay_outcomes;
pub mod recorder;

use dead_letters::DeadLetterService;
use deliver::DeliveryTransport;
use directory::{CatalogDirectory, TopicEntry};
use dispatch::Dispatcher;
use handshake::HandshakeRegistry;
use manage::join_all;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::profile::Profiles;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use postrider_core::time::{Clock, Timestamp};
use postrider_store::{Catalog, CatalogChange, EventLog};
use recorder::EventRecorder;
use rustc_hash::FxHashSet;
use std::future::Future;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tasks::TaskKind;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// The subscriptions that are opened in the log at once during a start.
const OPEN_AT_ONCE: usize = 4096;
/// The subscriptions that one task restores during a start.
const TAKE_UP_AT_ONCE: usize = 8192;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] postrider_store::Error),
    /// The topic was deleted in the meantime.
    #[error("the topic does not exist any more")]
    Gone,
    /// A subscription names a domain topic that does not exist, in a domain that does not create
    /// them automatically.
    #[error("topic {name:?} does not exist in domain {domain:?}, which makes no topics for subscriptions")]
    DomainTopicMissing { domain: String, name: String },
    /// The handshake of a subscription was ended by another node in the meantime.
    #[error("the validation of the webhook has ended meanwhile")]
    HandshakeOver,
    #[error("the server is shutting down")]
    Stopping,
    /// The engine was told to stop, and these tasks did not end.
    #[error("tasks have not ended: {0}")]
    TasksLeft(String),
}

/// The parts that the engine is built from.
pub struct EngineParts {
    pub log: Arc<dyn EventLog>,
    pub catalog: Arc<dyn Catalog>,
    pub transport: Arc<dyn DeliveryTransport>,
    pub clock: Arc<dyn Clock>,
    /// The machine's clock, for real-time waits whatever the engine's clock shows.
    pub wall: Arc<dyn Clock>,
    pub profiles: Profiles,
    /// The prefix of full resource ids: `/subscriptions/<id>`.
    pub id_prefix: String,
    pub dispatch: dispatch::Config,
    pub dead_letters: DeadLetterService,
    pub handshake: handshake::HandshakeRules,
    /// Receives everything that happens to events; [`recorder::Nothing`] to record nothing.
    pub recorder: Arc<dyn EventRecorder>,
    /// This node; [`node::NodeIdentity::alone`] without a cluster.
    pub node: node::NodeIdentity,
}

/// The event path as a whole. Cheap to share behind an `Arc`.
pub struct Engine {
    pub directory: CatalogDirectory,
    pub dispatcher: Arc<Dispatcher>,
    pub clock: Arc<dyn Clock>,
    log: Arc<dyn EventLog>,
    catalog: Arc<dyn Catalog>,
    /// The same catalog, with observation.
    watched: Arc<observed_catalog::ObservedCatalog>,
    pub profiles: Profiles,
    pub dead_letters: DeadLetterService,
    pub handshakes: Arc<HandshakeRegistry>,
    pub recorder: Arc<dyn EventRecorder>,
    pub(crate) node: node::NodeIdentity,
    replays: replay::ReplayRegistry,
    wall: Arc<dyn Clock>,
    turns: change_turns::ChangeTurns,
    /// A reference to itself, for changes that continue after their caller has gone.
    me: Weak<Engine>,
    /// Notified when the earliest expiry of a subscription may have changed.
    expiry_changed: Notify,
    replays_ended: Notify,
    stopping: CancellationToken,
    /// When this process began, by the engine's clock.
    started: Timestamp,
    /// When counting began, once an earlier process's numbers are restored.
    counted_since: OnceLock<Timestamp>,
}

impl Engine {
    /// Reads the catalog and continues deliveries where an earlier process left them.
    pub async fn start(parts: EngineParts) -> Result<Arc<Engine>, Error> {
        let watched = Arc::new(observed_catalog::ObservedCatalog::new(
            parts.catalog,
            parts.wall.clone(),
        ));
        let loaded = watched.load().await?;
        let handshakes = Arc::new(HandshakeRegistry::new(
            parts.handshake,
            parts.transport.clone(),
            watched.clone(),
            parts.clock.clone(),
        ));
        let dispatcher = Dispatcher::new(
            parts.log.clone(),
            endpoint_delays::EndpointDelays::new(
                watched.clone(),
                &parts.node,
                parts.profiles.fallback().batch_response_timeout,
            ),
            parts.transport,
            parts.clock.clone(),
            parts.wall.clone(),
            parts.dispatch,
            parts.recorder.clone(),
            parts
                .node
                .name
                .as_ref()
                .map(|_| watched.clone() as Arc<dyn Catalog>),
        );
        dispatcher.restore(loaded.endpoint_delays);
        let engine = Arc::new_cyclic(|me| Engine {
            started: parts.clock.now(),
            counted_since: OnceLock::new(),
            directory: CatalogDirectory::new(parts.id_prefix),
            dispatcher,
            clock: parts.clock,
            log: parts.log,
            catalog: watched.clone(),
            watched,
            profiles: parts.profiles,
            dead_letters: parts.dead_letters,
            handshakes,
            recorder: parts.recorder,
            node: parts.node,
            replays: replay::ReplayRegistry::default(),
            wall: parts.wall,
            turns: change_turns::ChangeTurns::default(),
            me: me.clone(),
            expiry_changed: Notify::new(),
            replays_ended: Notify::new(),
            stopping: CancellationToken::new(),
        });
        engine.dispatcher.set_engine(Arc::downgrade(&engine));
        engine
            .restore(loaded.topics, loaded.domain_topics, loaded.subscriptions)
            .await?;
        engine.restore_letter_writers();
        engine.dispatcher.restored();
        engine.restore_handshakes(loaded.handshakes).await?;
        let retiring = manage::retire_expired(engine.clone(), engine.dispatcher.stop.clone());
        let tasks = &engine.dispatcher.tasks;
        tasks.spawn(TaskKind::ExpiryTimer, retiring);
        tasks.spawn(TaskKind::DeadLetterTimer, engine.clone().run_letter_writers());
        tasks.spawn(TaskKind::CatalogFollower, remote_changes::run(engine.clone()));
        if engine.node.name.is_some() {
            tasks.spawn(TaskKind::ReplaySupervisor, engine.clone().run_replays());
        }
        Ok(engine)
    }

    /// Restores topics and subscriptions from an earlier process.
    async fn restore(
        &self,
        topics: Vec<Topic>,
        mut domain_topics: Vec<DomainTopic>,
        subscriptions: Vec<Subscription>,
    ) -> Result<(), Error> {
        // A crash between a commit to the catalog and the log leaves one of the two behind.
        let known: FxHashSet<SubscriptionId> = subscriptions.iter().map(|s| s.id).collect();
        let busy = self.log.subscriptions();
        let letters = self.log.pending_dead_letters().into_iter().map(|one| one.of);
        let logged: FxHashSet<SubscriptionId> = busy.iter().copied().chain(letters).collect();
        let strays = logged.difference(&known);
        // In a cluster this is done later, when the changes of other nodes are known.
        let strays = strays.filter(|_| self.node.name.is_none());
        let closed = join_all(strays.map(|id| self.retire(*id, GiveUpReason::SubscriptionGone))).await;
        closed.into_iter().collect::<Result<(), _>>()?;
        for some in subscriptions.chunks(OPEN_AT_ONCE) {
            let opened = join_all(some.iter().map(|s| self.log.open_subscription(s.id))).await;
            opened.into_iter().collect::<Result<(), _>>()?;
        }
        let missing = unrecorded(&topics, &domain_topics, &subscriptions);
        if !missing.is_empty() {
            let changes = missing
                .iter()
                .cloned()
                .map(CatalogChange::PutDomainTopic)
                .collect();
            unless_done(self.catalog.commit(changes).await)?;
            domain_topics.extend(missing);
        }
        // Not collected in place: that would keep the larger allocation.
        let mut shared = Vec::with_capacity(subscriptions.len());
        shared.extend(subscriptions.into_iter().map(Arc::new));
        self.directory.load(topics, domain_topics, shared.clone());
        // A subscription that expired before this process began is retired without another attempt.
        let now = self.clock.now();
        shared.retain(|subscription| subscription.expires.is_none_or(|at| now < at));
        self.take_up_all(shared).await?;
        for id in busy {
            self.dispatcher.begin(id);
        }
        Ok(())
    }

    /// Restores subscriptions on all processors in parallel: nothing else happens yet.
    async fn take_up_all(&self, mut subscriptions: Vec<Arc<Subscription>>) -> Result<(), Error> {
        let engine = self.me.upgrade().ok_or(Error::Stopping)?;
        let mut taking_up = Vec::new();
        while subscriptions.len() > TAKE_UP_AT_ONCE {
            let some = subscriptions.split_off(subscriptions.len() - TAKE_UP_AT_ONCE);
            let engine = engine.clone();
            let task = async move { engine.take_up_some(some) };
            taking_up.push(self.dispatcher.tasks.spawn(TaskKind::SubscriptionRestore, task));
        }
        self.take_up_some(subscriptions);
        for some in taking_up {
            some.await.map_err(|_| Error::Stopping)?;
        }
        Ok(())
    }

    fn take_up_some(&self, subscriptions: Vec<Arc<Subscription>>) {
        for subscription in subscriptions {
            if let Some(topic) = self.directory.topic_by_id(subscription.topic) {
                self.start_dispatch(subscription, &topic);
            }
        }
    }

    /// Reports every catalog change of this node to the observer from now on; to be called once.
    pub fn observe_changes(&self, observer: Arc<dyn observed_catalog::ChangeObserver>) {
        self.watched.observe(self.me.clone(), observer);
    }

    /// Everything that can be published to: topics, domains, system topics and scopes.
    pub fn published_to(&self) -> Vec<Arc<TopicEntry>> {
        let directory = &self.directory;
        let mut all = directory.topics();
        all.extend(directory.domains());
        all.extend(directory.system_topics());
        all.extend(directory.scopes());
        all
    }

    pub fn log(&self) -> &dyn EventLog {
        &*self.log
    }

    /// When and why the last catalog change could not be stored, if so.
    pub fn catalog_trouble(&self) -> Option<(Timestamp, String)> {
        self.watched.trouble()
    }

    /// Waits in real time, or until the server stops. Returns whether the server stops.
    pub async fn nap(&self, real: Duration) -> bool {
        self.pause(real, &self.stopping).await
    }

    /// The running tasks by kind, for people: `3 × delivery lane, 1 × replay`.
    pub fn running_tasks(&self) -> String {
        self.dispatcher.tasks.describe_running()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// Refuses publish requests from now on.
    pub fn refuse(&self) {
        self.stopping.cancel();
    }

    /// Refuses publish requests, lets attempts end until `patience` is over, and makes everything
    /// durable.
    pub async fn stop(&self, patience: impl Future<Output = ()>) -> Result<(), Error> {
        self.refuse();
        let stopped = self.dispatcher.stop(patience).await;
        self.log.close().await?;
        stopped
    }
}

/// Nodes that start together repair the same things: a conflict means that another node has done
/// it.
fn unless_done(stored: Result<(), postrider_store::Error>) -> Result<(), Error> {
    match stored {
        Err(postrider_store::Error::Conflict(_)) => Ok(()),
        other => Ok(other?),
    }
}

/// Domain topics that subscriptions name but the catalog lacks: older versions did not record them.
fn unrecorded(
    topics: &[Topic],
    domain_topics: &[DomainTopic],
    subscriptions: &[Subscription],
) -> Vec<DomainTopic> {
    let domains: FxHashSet<TopicId> = topics.iter().map(|topic| topic.id).collect();
    let recorded = domain_topics
        .iter()
        .map(|topic| (topic.domain, topic.name.to_lowercase()));
    let mut known: FxHashSet<(TopicId, String)> = recorded.collect();
    let mut missing = Vec::new();
    for subscription in subscriptions {
        let Some(name) = &subscription.domain_topic else {
            continue;
        };
        let domain = subscription.topic;
        if domains.contains(&domain) && known.insert((domain, name.to_lowercase())) {
            missing.push(DomainTopic {
                domain,
                name: name.clone(),
                automatic: true,
                created: subscription.created,
            });
        }
    }
    missing
}
