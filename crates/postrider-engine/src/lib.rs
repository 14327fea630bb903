//! The path of an event: ingest, dispatch, deliver, settle. No sockets, no files.

pub mod ingest;
pub mod directory;
pub mod manage;
pub mod dispatch;
pub mod attempt;
pub mod deliver;
pub mod endpoint;
pub mod counters;
pub mod clock;

use deliver::Transport;
use directory::Directory;
use dispatch::Dispatcher;
use postrider_core::ids::SubscriptionId;
use postrider_core::profile::Profile;
use postrider_core::time::Clock;
use postrider_store::{Catalog, EventLog};
use rustc_hash::FxHashSet;
use std::sync::Arc;
use std::time::Duration;
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
    pub profile: &'static Profile,
    /// What full resource ids begin with: `/subscriptions/<id>`.
    pub id_prefix: String,
    pub dispatch: dispatch::Config,
}

/// The whole path. Cheap to share behind an `Arc`.
pub struct Engine {
    pub directory: Directory,
    pub dispatcher: Arc<Dispatcher>,
    pub clock: Arc<dyn Clock>,
    log: Arc<dyn EventLog>,
    catalog: Arc<dyn Catalog>,
    profile: &'static Profile,
    changing: tokio::sync::Mutex<()>,
    stopping: CancellationToken,
}

impl Engine {
    /// Reads the catalogue and takes up deliveries where they were left.
    pub async fn start(parts: Parts) -> Result<Engine, Error> {
        let loaded = parts.catalog.load().await?;
        let dispatcher = Dispatcher::new(
            parts.log.clone(),
            parts.transport,
            parts.clock.clone(),
            parts.dispatch,
        );
        let engine = Engine {
            directory: Directory::new(parts.id_prefix),
            dispatcher,
            clock: parts.clock,
            log: parts.log,
            catalog: parts.catalog,
            profile: parts.profile,
            changing: tokio::sync::Mutex::new(()),
            stopping: CancellationToken::new(),
        };
        for topic in loaded.topics {
            engine.directory.put_topic(topic);
        }
        for domain_topic in loaded.domain_topics {
            engine.directory.put_domain_topic(domain_topic);
        }
        // A crash between the catalogue and the log leaves one side behind.
        let known: FxHashSet<SubscriptionId> = loaded.subscriptions.iter().map(|s| s.id).collect();
        for id in engine.log.subscriptions() {
            if !known.contains(&id) {
                engine.log.close_subscription(id).await?;
            }
        }
        for subscription in loaded.subscriptions {
            engine.log.open_subscription(subscription.id).await?;
            let subscription = Arc::new(subscription);
            engine.directory.put_subscription(subscription.clone());
        }
        for subscription in engine.directory.all_subscriptions() {
            if let Some(topic) = engine.directory.topic_by_id(subscription.topic) {
                engine.take_up(subscription, topic);
            }
        }
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

    /// Refuses publishes, lets attempts end within `grace`, makes everything durable.
    pub async fn stop(&self, grace: Duration) -> Result<(), Error> {
        self.refuse();
        self.dispatcher.stop(grace).await;
        Ok(self.log.close().await?)
    }
}
