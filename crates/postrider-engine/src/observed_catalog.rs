//! The catalog with observation: remembers whether the last commit failed, and reports commits to
//! the observer.

use crate::Engine;
use crate::directory::TopicEntry;
use async_trait::async_trait;
use postrider_core::subscription::{DomainTopic, Subscription};
use postrider_core::time::{Clock, Timestamp};
use postrider_store::{Catalog, CatalogChange, CatalogContent, CatalogFollower, Error};
use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Receives every catalog change that this node has made durable.
pub trait ChangeObserver: Send + Sync {
    /// The changes of one commit. Must not wait.
    fn committed(&self, changes: Vec<CommittedChange>);
}

/// A change with the resource that it replaced.
#[derive(Clone, Debug)]
pub struct CommittedChange {
    pub change: CatalogChange,
    pub before: ResourceBeforeChange,
    /// The topic, domain or system topic of the changed resource, as it was when the change was
    /// made.
    pub topic: Option<Arc<TopicEntry>>,
}

/// A resource before its change.
#[derive(Clone, Debug)]
pub enum ResourceBeforeChange {
    Nothing,
    Topic(Arc<TopicEntry>),
    DomainTopic(DomainTopic),
    Subscription(Arc<Subscription>),
}

tokio::task_local! {
    /// The observer of changes made by the current task.
    static OBSERVER: Arc<dyn ChangeObserver>;
}

/// Runs a future whose changes are reported to this observer instead of the engine's own. Changes
/// that continue after their caller has gone away are reported too.
pub async fn with_observer<F: Future>(observer: Arc<dyn ChangeObserver>, run: F) -> F::Output {
    OBSERVER.scope(observer, run).await
}

/// The same future with the current task's observer, wherever the future runs.
pub(crate) async fn observed_as_here<F: Future>(
    observer: Option<Arc<dyn ChangeObserver>>,
    run: F,
) -> F::Output {
    match observer {
        Some(observer) => with_observer(observer, run).await,
        None => run.await,
    }
}

pub(crate) fn current_observer() -> Option<Arc<dyn ChangeObserver>> {
    OBSERVER.try_with(Arc::clone).ok()
}

/// Forwards every call, and remembers why the last commit failed until one succeeds.
pub(crate) struct ObservedCatalog {
    catalog: Arc<dyn Catalog>,
    clock: Arc<dyn Clock>,
    trouble: Mutex<Option<(Timestamp, String)>>,
    /// The observer of changes outside of [`with_observer`]; without it, changes are not observed at
    /// all.
    observer: OnceLock<Arc<dyn ChangeObserver>>,
    engine: OnceLock<Weak<Engine>>,
}

impl ObservedCatalog {
    pub fn new(catalog: Arc<dyn Catalog>, clock: Arc<dyn Clock>) -> ObservedCatalog {
        ObservedCatalog {
            catalog,
            clock,
            trouble: Mutex::default(),
            observer: OnceLock::new(),
            engine: OnceLock::new(),
        }
    }

    /// Sets the observer of an engine's changes, once.
    pub fn observe(&self, engine: Weak<Engine>, observer: Arc<dyn ChangeObserver>) {
        let _ = self.engine.set(engine);
        let _ = self.observer.set(observer);
    }

    /// The changes paired with the resources they replace, for the observer. To be called before
    /// the changes are applied.
    fn observe_commit(
        &self,
        changes: &[CatalogChange],
    ) -> Option<(Arc<dyn ChangeObserver>, Vec<CommittedChange>)> {
        let default = self.observer.get()?;
        let engine = self.engine.get()?.upgrade()?;
        let told: Vec<CommittedChange> = changes
            .iter()
            .filter_map(|change| committed_change(&engine, change))
            .collect();
        let observer = current_observer().unwrap_or_else(|| default.clone());
        (!told.is_empty()).then_some((observer, told))
    }

    pub fn trouble(&self) -> Option<(Timestamp, String)> {
        self.trouble.lock().expect("no panic holds it").clone()
    }
}

#[async_trait]
impl Catalog for ObservedCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        self.catalog.load().await
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        let observed = self.observe_commit(&changes);
        let result = self.catalog.commit(changes).await;
        if let (Ok(()), Some((observer, changes))) = (&result, observed) {
            observer.committed(changes);
        }
        if let Err(Error::Conflict(_)) = result {
            // A conflict is no failure of the catalog: another writer was faster.
            return result;
        }
        let trouble = result.as_ref().err().map(|e| (self.clock.now(), e.to_string()));
        *self.trouble.lock().expect("no panic holds it") = trouble;
        result
    }

    async fn next_id(&self) -> Result<u64, Error> {
        self.catalog.next_id().await
    }

    async fn catch_up(&self) -> Result<(), Error> {
        self.catalog.catch_up().await
    }

    fn is_current(&self) -> bool {
        self.catalog.is_current()
    }

    async fn in_force_everywhere(&self) -> Result<(), Error> {
        self.catalog.in_force_everywhere().await
    }

    async fn follow(&self, follower: Arc<dyn CatalogFollower>) {
        self.catalog.follow(follower).await
    }
}

/// None for changes that are no resource: endpoint delays and ended handshakes.
fn committed_change(engine: &Engine, change: &CatalogChange) -> Option<CommittedChange> {
    let directory = &engine.directory;
    let of_topic = |id| directory.topic_by_id(id);
    let (before, topic) = match change {
        CatalogChange::PutTopic(topic) => {
            let before = of_topic(topic.id);
            (
                before.map_or(ResourceBeforeChange::Nothing, ResourceBeforeChange::Topic),
                None,
            )
        }
        CatalogChange::DeleteTopic(id) => (ResourceBeforeChange::Topic(of_topic(*id)?), None),
        CatalogChange::PutDomainTopic(topic) => {
            let before = directory.domain_topic(topic.domain, &topic.name);
            let before = before.map_or(ResourceBeforeChange::Nothing, ResourceBeforeChange::DomainTopic);
            (before, of_topic(topic.domain))
        }
        CatalogChange::DeleteDomainTopic(domain, name) => {
            let before = directory.domain_topic(*domain, name)?;
            (ResourceBeforeChange::DomainTopic(before), of_topic(*domain))
        }
        CatalogChange::PutSubscription(subscription) => {
            let before = directory.subscription_by_id(subscription.id);
            let before = before.map_or(ResourceBeforeChange::Nothing, ResourceBeforeChange::Subscription);
            (before, of_topic(subscription.topic))
        }
        CatalogChange::DeleteSubscription(id) => {
            let before = directory.subscription_by_id(*id)?;
            let topic = of_topic(before.topic);
            (ResourceBeforeChange::Subscription(before), topic)
        }
        CatalogChange::PutHandshake(handshake) => {
            let before = directory.subscription_by_id(handshake.subscription.id);
            let before = before.map_or(ResourceBeforeChange::Nothing, ResourceBeforeChange::Subscription);
            (before, of_topic(handshake.subscription.topic))
        }
        CatalogChange::DeleteHandshake(_)
        | CatalogChange::PutEndpointDelay(_)
        | CatalogChange::DeleteEndpointDelay(_) => {
            return None;
        }
    };
    Some(CommittedChange {
        change: change.clone(),
        before,
        topic,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use postrider_store::memory::MemoryCatalog;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    struct FlakyCatalog(MemoryCatalog, AtomicBool);

    #[async_trait]
    impl Catalog for FlakyCatalog {
        async fn load(&self) -> Result<CatalogContent, Error> {
            self.0.load().await
        }

        async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
            match self.1.load(Relaxed) {
                true => Err(Error::Unavailable("the disk is full".into())),
                false => self.0.commit(changes).await,
            }
        }

        async fn next_id(&self) -> Result<u64, Error> {
            self.0.next_id().await
        }
    }

    #[tokio::test]
    async fn trouble_is_remembered_until_a_commit_succeeds() {
        let fickle = Arc::new(FlakyCatalog(MemoryCatalog::default(), AtomicBool::new(false)));
        let watched = ObservedCatalog::new(fickle.clone(), Arc::new(SystemClock));
        watched.commit(Vec::new()).await.unwrap();
        assert_eq!(watched.trouble(), None);
        fickle.1.store(true, Relaxed);
        watched.commit(Vec::new()).await.unwrap_err();
        let (_, trouble) = watched.trouble().expect("it is remembered");
        assert!(trouble.contains("the disk is full"), "{trouble}");
        // Reading does not clear the trouble.
        watched.load().await.unwrap();
        assert!(watched.trouble().is_some());
        fickle.1.store(false, Relaxed);
        watched.commit(Vec::new()).await.unwrap();
        assert_eq!(watched.trouble(), None);
    }
}
