//! Changing the catalogue: durable first, then visible, then acted upon.

use crate::directory::TopicEntry;
use crate::{Engine, Error};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::retry::Reason;
use postrider_core::subscription::{Subscription, Topic};
use postrider_core::time::Timestamp;
use postrider_store::Change;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A subscription that could not be retired is tried again this much later.
const RETIRE_PAUSE: Duration = Duration::from_secs(10);

impl Engine {
    /// A number for a new topic or subscription.
    pub async fn next_id(&self) -> Result<u64, Error> {
        Ok(self.catalog.next_id().await?)
    }

    /// Makes a topic or replaces one of the same id. Takes effect for the next event.
    pub async fn put_topic(&self, topic: Topic) -> Result<Arc<TopicEntry>, Error> {
        let _one_at_a_time = self.changing.lock().await;
        let id = topic.id;
        self.catalog.commit(vec![Change::PutTopic(topic.clone())]).await?;
        self.directory.put_topic(topic);
        let entry = self.directory.topic_by_id(id).expect("just put");
        for subscription in self.directory.subscriptions(id) {
            self.take_up(subscription, entry.clone());
        }
        Ok(entry)
    }

    /// Deletes a topic with its subscriptions. What waits for them is dropped and counted.
    pub async fn delete_topic(&self, id: TopicId) -> Result<(), Error> {
        let _one_at_a_time = self.changing.lock().await;
        let subscriptions = self.directory.subscriptions(id);
        let mut changes: Vec<Change> = subscriptions
            .iter()
            .map(|s| Change::DeleteSubscription(s.id))
            .collect();
        changes.push(Change::DeleteTopic(id));
        self.catalog.commit(changes).await?;
        self.directory.delete_topic(id);
        let mut result = Ok(());
        for subscription in subscriptions {
            // One that cannot be closed must not keep the others going.
            result = result.and(self.retire(subscription.id, Reason::SubscriptionGone).await);
        }
        result
    }

    /// Makes a subscription or replaces one of the same id. A new one gets the events that are
    /// published after this has returned.
    pub async fn put_subscription(&self, subscription: Subscription) -> Result<Arc<Subscription>, Error> {
        let _one_at_a_time = self.changing.lock().await;
        let Some(topic) = self.directory.topic_by_id(subscription.topic) else {
            return Err(Error::Gone);
        };
        // The log must know it before an event can match it, and keeps nothing for it until then.
        self.log.open_subscription(subscription.id).await?;
        self.catalog
            .commit(vec![Change::PutSubscription(subscription.clone())])
            .await?;
        let subscription = Arc::new(subscription);
        self.directory.put_subscription(subscription.clone());
        self.take_up(subscription.clone(), topic);
        if subscription.expires.is_some() {
            self.expiry_changed.notify_one();
        }
        Ok(subscription)
    }

    /// Deletes a subscription. What waits for it is dropped and counted.
    pub async fn delete_subscription(&self, id: SubscriptionId) -> Result<(), Error> {
        let _one_at_a_time = self.changing.lock().await;
        self.drop_subscription(id, Reason::SubscriptionGone).await
    }

    async fn drop_subscription(&self, id: SubscriptionId, reason: Reason) -> Result<(), Error> {
        self.catalog.commit(vec![Change::DeleteSubscription(id)]).await?;
        self.directory.delete_subscription(id);
        self.retire(id, reason).await
    }

    /// Deletes the subscriptions whose time is over.
    async fn drop_expired(&self) -> Result<(), Error> {
        let _one_at_a_time = self.changing.lock().await;
        let now = self.clock.now();
        for subscription in self.directory.all_subscriptions() {
            if subscription.expires.is_some_and(|at| at <= now) {
                tracing::info!(subscription = %subscription.name, "subscription has expired");
                self.drop_subscription(subscription.id, Reason::SubscriptionExpired)
                    .await?;
            }
        }
        Ok(())
    }

    fn next_expiry(&self) -> Option<Timestamp> {
        let subscriptions = self.directory.all_subscriptions();
        subscriptions.iter().filter_map(|s| s.expires).min()
    }

    pub(crate) fn take_up(&self, subscription: Arc<Subscription>, topic: Arc<TopicEntry>) {
        let named = subscription.profile.as_deref().or(topic.topic.profile.as_deref());
        let profile = named
            .and_then(|name| self.profiles.named(name))
            .unwrap_or(self.profiles.fallback());
        self.dispatcher.put(subscription, topic, profile);
    }

    /// Stops deliveries of a subscription that is gone from the catalogue.
    pub(crate) async fn retire(&self, id: SubscriptionId, reason: Reason) -> Result<(), Error> {
        self.dispatcher.remove(id, reason).await;
        let dropped = self.log.close_subscription(id).await?;
        if dropped > 0 {
            tracing::warn!(subscription = %id, dropped, %reason, "subscription gone with events waiting");
            let counters = &self.dispatcher.counters.dropped;
            crate::counters::add(crate::counters::by_reason(counters, reason), dropped as usize);
        }
        Ok(())
    }
}

/// Retires each subscription when its time is over.
pub(crate) async fn retire_expired(engine: Arc<Engine>, stop: CancellationToken) {
    let mut again = None;
    loop {
        let next = engine.next_expiry().max(again);
        let mut time = engine.clock.sleep_until(next.unwrap_or(Timestamp::MAX));
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = engine.expiry_changed.notified() => continue,
            () = &mut time, if next.is_some() => {}
        }
        again = match engine.drop_expired().await {
            Ok(()) => None,
            Err(e) => {
                tracing::error!(error = %e, "cannot retire an expired subscription");
                Some(engine.clock.now() + RETIRE_PAUSE)
            }
        };
    }
}
