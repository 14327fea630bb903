//! The path of an event: ingest, dispatch, deliver, settle. No sockets, no files.

pub mod ingest;
pub mod directory;
pub mod manage;
mod tasks;
mod turns;
pub mod catalogue;
pub mod masking;
pub mod node;
mod follow;
pub mod dispatch;
pub mod attempt;
pub mod destinations;
pub mod deliver;
pub mod handshake;
pub mod late;
pub mod in_flight;
pub mod endpoint;
pub mod delays;
pub mod counters;
pub mod meters;
pub mod numbers_snapshot;
pub mod subscription_health;
pub mod clock;
pub mod virtual_time;
pub mod blobs;
pub mod dead_letters;
pub mod letter_blob;
pub mod replay;
pub mod replay_outcomes;
pub mod recorder;

use dead_letters::DeadLetters;
use deliver::Transport;
use directory::{Directory, TopicEntry};
use dispatch::Dispatcher;
use handshake::Handshakes;
use manage::join_all;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::profile::Profiles;
use postrider_core::retry::Reason;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use postrider_core::time::{Clock, Timestamp};
use postrider_store::{Catalog, Change, EventLog};
use recorder::Recorder;
use rustc_hash::FxHashSet;
use std::future::Future;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tasks::TaskKind;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// So many subscriptions are made known to the log at once, at a start.
const OPEN_AT_ONCE: usize = 4096;
/// So many are taken up by one task.
const TAKE_UP_AT_ONCE: usize = 8192;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] postrider_store::Error),
    /// The topic was deleted meanwhile.
    #[error("the topic does not exist any more")]
    Gone,
    /// A subscription names a topic inside a domain that is not there, and the domain makes none by itself.
    #[error("topic {name:?} does not exist in domain {domain:?}, which makes no topics for subscriptions")]
    DomainTopicMissing { domain: String, name: String },
    /// A webhook was being asked for a subscription, and that has been ended meanwhile by another node.
    #[error("the validation of the webhook has ended meanwhile")]
    HandshakeOver,
    #[error("the server is shutting down")]
    Stopping,
    /// The engine was told to stop, and these tasks did not end.
    #[error("tasks have not ended: {0}")]
    TasksLeft(String),
}

/// Everything the engine stands on, handed in.
pub struct Parts {
    pub log: Arc<dyn EventLog>,
    pub catalog: Arc<dyn Catalog>,
    pub transport: Arc<dyn Transport>,
    pub clock: Arc<dyn Clock>,
    /// The machine's clock, for what is paced in real time whatever the engine's clock shows.
    pub wall: Arc<dyn Clock>,
    pub profiles: Profiles,
    /// What full resource ids begin with: `/subscriptions/<id>`.
    pub id_prefix: String,
    pub dispatch: dispatch::Config,
    pub dead_letters: DeadLetters,
    pub handshake: handshake::Rules,
    /// Told what happens to events; [`recorder::Nothing`] when nobody wants to know.
    pub recorder: Arc<dyn Recorder>,
    /// Which node this is; [`node::Node::alone`] when there is only one.
    pub node: node::Node,
}

/// The whole path. Cheap to share behind an `Arc`.
pub struct Engine {
    pub directory: Directory,
    pub dispatcher: Arc<Dispatcher>,
    pub clock: Arc<dyn Clock>,
    log: Arc<dyn EventLog>,
    catalog: Arc<dyn Catalog>,
    /// The same.
    watched: Arc<catalogue::Watched>,
    pub profiles: Profiles,
    pub dead_letters: DeadLetters,
    pub handshakes: Arc<Handshakes>,
    pub recorder: Arc<dyn Recorder>,
    pub(crate) node: node::Node,
    replays: replay::Replays,
    wall: Arc<dyn Clock>,
    turns: turns::Turns,
    /// Itself, for changes that go on without whoever asked for them.
    me: Weak<Engine>,
    /// The time at which some subscription expires may have changed.
    expiry_changed: Notify,
    replays_ended: Notify,
    stopping: CancellationToken,
    /// When this process began, by the engine's clock.
    started: Timestamp,
    /// When counting began, once an earlier process's numbers are restored.
    counted_since: OnceLock<Timestamp>,
}

impl Engine {
    /// Reads the catalogue and takes up deliveries where they were left.
    pub async fn start(parts: Parts) -> Result<Arc<Engine>, Error> {
        let watched = Arc::new(catalogue::Watched::new(parts.catalog, parts.wall.clone()));
        let loaded = watched.load().await?;
        let handshakes = Arc::new(Handshakes::new(
            parts.handshake,
            parts.transport.clone(),
            watched.clone(),
            parts.clock.clone(),
        ));
        let dispatcher = Dispatcher::new(
            parts.log.clone(),
            delays::Delays::new(
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
            directory: Directory::new(parts.id_prefix),
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
            replays: replay::Replays::default(),
            wall: parts.wall,
            turns: turns::Turns::default(),
            me: me.clone(),
            expiry_changed: Notify::new(),
            replays_ended: Notify::new(),
            stopping: CancellationToken::new(),
        });
        engine.dispatcher.belongs_to(Arc::downgrade(&engine));
        engine
            .restore(loaded.topics, loaded.domain_topics, loaded.subscriptions)
            .await?;
        engine.restore_desks();
        engine.dispatcher.restored();
        engine.restore_handshakes(loaded.handshakes).await?;
        let retiring = manage::retire_expired(engine.clone(), engine.dispatcher.stop.clone());
        let tasks = &engine.dispatcher.tasks;
        tasks.spawn(TaskKind::ExpiryTimer, retiring);
        tasks.spawn(TaskKind::DeadLetterTimer, engine.clone().keep_letters());
        tasks.spawn(TaskKind::CatalogFollower, follow::run(engine.clone()));
        if engine.node.name.is_some() {
            tasks.spawn(TaskKind::ReplaySupervisor, engine.clone().keep_replays());
        }
        Ok(engine)
    }

    /// Takes up topics and subscriptions where an earlier life left them.
    async fn restore(
        &self,
        topics: Vec<Topic>,
        mut domain_topics: Vec<DomainTopic>,
        subscriptions: Vec<Subscription>,
    ) -> Result<(), Error> {
        // A crash between the catalogue and the log leaves one side behind.
        let known: FxHashSet<SubscriptionId> = subscriptions.iter().map(|s| s.id).collect();
        let busy = self.log.subscriptions();
        let letters = self.log.letters_waiting().into_iter().map(|one| one.of);
        let logged: FxHashSet<SubscriptionId> = busy.iter().copied().chain(letters).collect();
        let strays = logged.difference(&known);
        // Where there are other nodes it is looked for later, when their changes are known.
        let strays = strays.filter(|_| self.node.name.is_none());
        let closed = join_all(strays.map(|id| self.retire(*id, Reason::SubscriptionGone))).await;
        closed.into_iter().collect::<Result<(), _>>()?;
        for some in subscriptions.chunks(OPEN_AT_ONCE) {
            let opened = join_all(some.iter().map(|s| self.log.open_subscription(s.id))).await;
            opened.into_iter().collect::<Result<(), _>>()?;
        }
        let missing = unrecorded(&topics, &domain_topics, &subscriptions);
        if !missing.is_empty() {
            let changes = missing.iter().cloned().map(Change::PutDomainTopic).collect();
            unless_done(self.catalog.commit(changes).await)?;
            domain_topics.extend(missing);
        }
        // Not collected in place: that would keep the room for all of them, whole.
        let mut shared = Vec::with_capacity(subscriptions.len());
        shared.extend(subscriptions.into_iter().map(Arc::new));
        self.directory.load(topics, domain_topics, shared.clone());
        // One whose time was over before this life began is retired, with no attempt more.
        let now = self.clock.now();
        shared.retain(|subscription| subscription.expires.is_none_or(|at| now < at));
        self.take_up_all(shared).await?;
        for id in busy {
            self.dispatcher.begin(id);
        }
        Ok(())
    }

    /// Takes up subscriptions, very many of them by all processors at once: nothing else happens yet.
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
                self.take_up(subscription, &topic);
            }
        }
    }

    /// Tells this observer of every change of the catalogue that this node makes from now on; to be called once.
    pub fn observe_changes(&self, observer: Arc<dyn catalogue::ChangeObserver>) {
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

    /// When and why the last change of topics and subscriptions could not be stored, if it could not.
    pub fn catalogue_trouble(&self) -> Option<(Timestamp, String)> {
        self.watched.trouble()
    }

    /// Waits for a while of real time, or until the server stops. Whether it does.
    pub async fn nap(&self, real: Duration) -> bool {
        self.pause(real, &self.stopping).await
    }

    /// The tasks that run, by kind, for people: `3 × delivery lane, 1 × replay`.
    pub fn running_tasks(&self) -> String {
        self.dispatcher.tasks.describe_running()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// From now on publishes are refused.
    pub fn refuse(&self) {
        self.stopping.cancel();
    }

    /// Refuses publishes, lets attempts end until `patience` is over, makes everything durable.
    pub async fn stop(&self, patience: impl Future<Output = ()>) -> Result<(), Error> {
        self.refuse();
        let stopped = self.dispatcher.stop(patience).await;
        self.log.close().await?;
        stopped
    }
}

/// Nodes that start together tidy up the same things: what another has done meanwhile is heard of in a moment.
fn unless_done(stored: Result<(), postrider_store::Error>) -> Result<(), Error> {
    match stored {
        Err(postrider_store::Error::Conflict(_)) => Ok(()),
        other => Ok(other?),
    }
}

/// Domain topics that subscriptions name and nobody recorded: an older program made none.
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
