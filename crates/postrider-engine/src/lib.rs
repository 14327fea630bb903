//! The path of an event: ingest, dispatch, deliver, settle. No sockets, no files.

pub mod ingest;
pub mod directory;
pub mod manage;
pub mod dispatch;
pub mod attempt;
pub mod deliver;
pub mod late;
pub mod endpoint;
pub mod delays;
pub mod counters;
pub mod clock;
pub mod virtual_time;
pub mod blobs;
pub mod dead_letters;
pub mod replay;

use dead_letters::DeadLetters;
use deliver::Transport;
use directory::Directory;
use dispatch::Dispatcher;
use postrider_core::ids::SubscriptionId;
use postrider_core::profile::Profiles;
use postrider_core::retry::Reason;
use postrider_core::time::Clock;
use postrider_store::{Catalog, EventLog};
use rustc_hash::FxHashSet;
use std::future::Future;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] postrider_store::Error),
    /// The topic was deleted meanwhile.
    #[error("the topic does not exist any more")]
    Gone,
    #[error("the server is shutting down")]
    Stopping,
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
}

/// The whole path. Cheap to share behind an `Arc`.
pub struct Engine {
    pub directory: Directory,
    pub dispatcher: Arc<Dispatcher>,
    pub clock: Arc<dyn Clock>,
    log: Arc<dyn EventLog>,
    catalog: Arc<dyn Catalog>,
    pub profiles: Profiles,
    pub dead_letters: DeadLetters,
    replays: replay::Replays,
    wall: Arc<dyn Clock>,
    changing: tokio::sync::Mutex<()>,
    /// The time at which some subscription expires may have changed.
    expiry_changed: Notify,
    stopping: CancellationToken,
}

impl Engine {
    /// Reads the catalogue and takes up deliveries where they were left.
    pub async fn start(parts: Parts) -> Result<Arc<Engine>, Error> {
        let loaded = parts.catalog.load().await?;
        let dispatcher = Dispatcher::new(
            parts.log.clone(),
            parts.catalog.clone(),
            parts.transport,
            parts.clock.clone(),
            parts.dispatch,
        );
        dispatcher.restore(loaded.endpoint_delays);
        let engine = Arc::new(Engine {
            directory: Directory::new(parts.id_prefix),
            dispatcher,
            clock: parts.clock,
            log: parts.log,
            catalog: parts.catalog,
            profiles: parts.profiles,
            dead_letters: parts.dead_letters,
            replays: replay::Replays::default(),
            wall: parts.wall,
            changing: tokio::sync::Mutex::new(()),
            expiry_changed: Notify::new(),
            stopping: CancellationToken::new(),
        });
        for topic in loaded.topics {
            engine.directory.put_topic(topic);
        }
        for domain_topic in loaded.domain_topics {
            engine.directory.put_domain_topic(domain_topic);
        }
        // A crash between the catalogue and the log leaves one side behind.
        let known: FxHashSet<SubscriptionId> = loaded.subscriptions.iter().map(|s| s.id).collect();
        let letters = engine.log.letters_waiting().into_iter().map(|one| one.of);
        let logged: FxHashSet<SubscriptionId> =
            engine.log.subscriptions().into_iter().chain(letters).collect();
        for id in logged {
            if !known.contains(&id) {
                engine.retire(id, Reason::SubscriptionGone).await?;
            }
        }
        for subscription in loaded.subscriptions {
            engine.log.open_subscription(subscription.id).await?;
            let subscription = Arc::new(subscription);
            engine.directory.put_subscription(subscription.clone());
        }
        let now = engine.clock.now();
        for subscription in engine.directory.all_subscriptions() {
            // One whose time was over before this life began is retired, with no attempt more.
            if subscription.expires.is_some_and(|at| at <= now) {
                continue;
            }
            if let Some(topic) = engine.directory.topic_by_id(subscription.topic) {
                engine.take_up(subscription, topic);
            }
        }
        engine.dispatcher.restored();
        let retiring = manage::retire_expired(engine.clone(), engine.dispatcher.stop.clone());
        engine.dispatcher.tasks.spawn(retiring);
        engine.dispatcher.tasks.spawn(engine.clone().keep_letters());
        Ok(engine)
    }

    pub fn log(&self) -> &dyn EventLog {
        &*self.log
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
        self.dispatcher.stop(patience).await;
        Ok(self.log.close().await?)
    }
}
