//! Applies changes that other nodes have made: they are durable already, and become visible and
//! effective here.
//!
//! These changes take the same turns as changes of this node, so that the last visible state is the
//! last stored one. A local change that has its turn while another node's change waits for it is
//! refused by the catalog, and decided again.

use crate::Engine;
use crate::change_turns::TurnKey;
use crate::tasks::TaskKind;
use async_trait::async_trait;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::Subscription;
use postrider_store::{CatalogChange, CatalogFollower};
use rustc_hash::FxHashSet;
use std::sync::{Arc, Weak};

/// Applies the changes of other nodes until the engine stops.
pub(crate) async fn run(engine: Arc<Engine>) {
    let (catalog, stop) = (engine.catalog.clone(), engine.dispatcher.stop.clone());
    let following = Arc::new(RemoteChangeListener(Arc::downgrade(&engine)));
    drop(engine);
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = catalog.follow(following) => {}
    }
}

struct RemoteChangeListener(Weak<Engine>);

#[async_trait]
impl CatalogFollower for RemoteChangeListener {
    async fn changed(&self, changes: Vec<CatalogChange>, sequence: u64) {
        if let Some(engine) = self.0.upgrade() {
            tracing::debug!(
                sequence,
                changes = changes.len(),
                "another node has changed the catalogue"
            );
            engine.show(changes).await;
        }
    }
}

impl Engine {
    async fn show(self: &Arc<Self>, changes: Vec<CatalogChange>) {
        let topics_gone: FxHashSet<TopicId> = changes
            .iter()
            .filter_map(|change| match change {
                CatalogChange::DeleteTopic(id) => Some(*id),
                _ => None,
            })
            .collect();
        // A handshake has succeeded if its subscription is put in the same commit.
        let puts_any = changes
            .iter()
            .any(|change| matches!(change, CatalogChange::PutSubscription(_)));
        for change in changes {
            match change {
                CatalogChange::PutTopic(topic) => {
                    let _turn = self.turns.alone(TurnKey::Topic(topic.id)).await;
                    self.apply_topic(topic).await;
                }
                CatalogChange::DeleteTopic(id) => self.show_topic_gone(id).await,
                CatalogChange::PutDomainTopic(topic) => {
                    let _turn = self.turns.together(TurnKey::Topic(topic.domain)).await;
                    let _alone = self.exclusive_domain_topic_turn(topic.domain, &topic.name).await;
                    self.directory.put_domain_topic(topic);
                }
                CatalogChange::DeleteDomainTopic(domain, name) => {
                    let _turn = self.turns.together(TurnKey::Topic(domain)).await;
                    let _alone = self.exclusive_domain_topic_turn(domain, &name).await;
                    self.directory.delete_domain_topic(domain, &name);
                }
                CatalogChange::PutSubscription(subscription) => self.show_put(subscription).await,
                CatalogChange::DeleteSubscription(id) => {
                    let known = self.directory.subscription_by_id(id);
                    // The deletion of a topic removes its subscriptions, all at once.
                    if let Some(known) = known.filter(|known| !topics_gone.contains(&known.topic)) {
                        self.apply_subscription_deleted(&known).await;
                    }
                }
                CatalogChange::PutEndpointDelay(delay) => self.dispatcher.apply_remote_delay(delay),
                CatalogChange::DeleteEndpointDelay(endpoint) => {
                    self.dispatcher.apply_remote_recovery(&endpoint)
                }
                CatalogChange::PutHandshake(handshake) => {
                    let _turn = self.subscription_name_turn(&handshake.subscription).await;
                    self.apply_stored_handshake(handshake);
                }
                CatalogChange::DeleteHandshake(operation) => {
                    let Some((topic, trial)) = self.handshakes.topic_of(&operation) else {
                        // The handshake had failed.
                        self.handshakes.apply_remote_handshake_end(&operation, false);
                        continue;
                    };
                    // The turn keeps this node from granting the same handshake.
                    let _turn = self.turns.alone(TurnKey::Topic(topic)).await;
                    self.handshakes
                        .apply_remote_handshake_end(&operation, puts_any || trial);
                }
            }
        }
    }

    async fn show_topic_gone(self: &Arc<Self>, id: TopicId) {
        let subscriptions = {
            let _turn = self.turns.alone(TurnKey::Topic(id)).await;
            let subscriptions = self.directory.subscriptions(id);
            self.directory.delete_topic(id);
            subscriptions
        };
        // Retired in the background: there may be very many, and their backlog is of no use.
        let engine = self.clone();
        self.dispatcher
            .tasks
            .spawn(TaskKind::SubscriptionRemoval, async move {
                if let Err(e) = engine.retire_all(&subscriptions).await {
                    tracing::error!(error = %e, "cannot drop what waits for subscriptions that are gone");
                }
            });
    }

    async fn show_put(&self, subscription: Subscription) {
        let topic = subscription.topic;
        let _topic_turn = self.turns.together(TurnKey::Topic(topic)).await;
        let _turn = self.turns.alone(TurnKey::Subscription(subscription.id)).await;
        let _name_turn = self.subscription_name_turn(&subscription).await;
        let Some(entry) = self.directory.topic_by_id(topic) else {
            return;
        };
        // Without this the log keeps nothing for the subscription, and says so when events come.
        if let Err(e) = self.log.open_subscription(subscription.id).await {
            tracing::error!(error = %e, subscription = %subscription.name, "the log does not take a subscription");
        }
        self.apply_subscription(Arc::new(subscription), &entry);
    }

    async fn apply_subscription_deleted(self: &Arc<Self>, known: &Subscription) {
        let id: SubscriptionId = known.id;
        {
            let _topic_turn = self.turns.together(TurnKey::Topic(known.topic)).await;
            let _turn = self.turns.alone(TurnKey::Subscription(id)).await;
            self.directory.delete_subscription(id);
        }
        let over = known.expires.is_some_and(|at| at <= self.clock.now());
        let reason = match over {
            true => GiveUpReason::SubscriptionExpired,
            false => GiveUpReason::SubscriptionGone,
        };
        let engine = self.clone();
        self.dispatcher
            .tasks
            .spawn(TaskKind::SubscriptionRemoval, async move {
                if let Err(e) = engine.retire(id, reason).await {
                    tracing::error!(error = %e, "cannot drop what waits for a subscription that is gone");
                }
            });
    }
}
