//! Changing the catalogue: durable first, then visible, then acted upon.

use crate::directory::TopicEntry;
use crate::{Engine, Error};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::profile;
use postrider_core::retry::Reason;
use postrider_core::subscription::{Subscription, Topic};
use postrider_store::Change;
use std::sync::Arc;

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
            result = result.and(self.retire(subscription.id).await);
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
        Ok(subscription)
    }

    pub async fn delete_subscription(&self, id: SubscriptionId) -> Result<(), Error> {
        let _one_at_a_time = self.changing.lock().await;
        self.catalog.commit(vec![Change::DeleteSubscription(id)]).await?;
        self.directory.delete_subscription(id);
        self.retire(id).await
    }

    pub(crate) fn take_up(&self, subscription: Arc<Subscription>, topic: Arc<TopicEntry>) {
        let named = subscription.profile.as_deref().or(topic.topic.profile.as_deref());
        // A name that is the default's means the default, with what the operator changed about it.
        let profile = named
            .filter(|name| *name != self.profile.name)
            .and_then(profile::named)
            .unwrap_or(self.profile);
        self.dispatcher.put(subscription, topic, profile);
    }

    /// Stops deliveries of a subscription that is gone from the catalogue.
    async fn retire(&self, id: SubscriptionId) -> Result<(), Error> {
        self.dispatcher.remove(id);
        let dropped = self.log.close_subscription(id).await?;
        if dropped > 0 {
            tracing::warn!(subscription = %id, dropped, "subscription deleted with events waiting");
            let counters = &self.dispatcher.counters.dropped;
            crate::counters::add(
                crate::counters::by_reason(counters, Reason::SubscriptionGone),
                dropped as usize,
            );
        }
        Ok(())
    }
}
