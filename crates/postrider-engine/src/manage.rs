//! Changes of the catalog: first durable, then visible, then effective.
//!
//! Changes of different resources run in parallel, so that the store can commit many at once.
//! Changes of the same resource take turns, so that the last visible state is the last stored one.
//! A change that has begun runs to completion, even if its caller goes away.

use crate::change_turns::{ChangeTurn, TurnKey};
use crate::directory::TopicEntry;
use crate::meters::{FailureCause, FailureEffect, MeterNote};
use crate::node;
use crate::observed_catalog::{current_observer, observed_as_here};
use crate::recorder::RetiredSubscription;
use crate::tasks::TaskKind;
use crate::{Engine, Error};
use postrider_core::event::EventSchema;
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::pause::SubscriptionPauses;
use postrider_core::profile::Profile;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::{Destination, DomainTopic, Subscription, Topic, TopicKind};
use postrider_core::time::Timestamp;
use postrider_store::{CatalogChange, Handshake};
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Wait before retiring a subscription is retried.
const RETIRE_PAUSE: Duration = Duration::from_secs(10);
/// The number of subscriptions that are retired at once.
const RETIRE_AT_ONCE: usize = 256;
/// How often, and after which wait in real time, releasing a scope is retried that conflicts with
/// other nodes' changes.
const RELEASE_TRIES: u32 = 40;
const RELEASE_PAUSE: Duration = Duration::from_millis(50);

impl Engine {
    /// An id for a new topic or subscription.
    pub async fn next_id(&self) -> Result<u64, Error> {
        Ok(self.catalog.next_id().await?)
    }

    /// Returns once every change that other nodes made before the call is applied here.
    pub async fn catch_up(&self) -> Result<(), Error> {
        Ok(self.catalog.catch_up().await?)
    }

    /// Whether events may be accepted by the catalog as it is known here: it includes every change
    /// that any node has confirmed.
    pub fn is_current(&self) -> bool {
        self.catalog.is_current()
    }

    /// Returns once every change applied here is applied at every node, or the node can no longer
    /// act. To be awaited before a change is confirmed.
    pub async fn in_force_everywhere(&self) -> Result<(), Error> {
        Ok(self.catalog.in_force_everywhere().await?)
    }

    /// Runs the change to completion even if the caller goes away: a durable change must become
    /// visible.
    async fn run_to_completion<T, F>(&self, change: impl FnOnce(Arc<Engine>) -> F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let engine = self.me.upgrade().ok_or(Error::Stopping)?;
        // The change runs on another task than the caller's.
        let change = observed_as_here(current_observer(), change(engine));
        let done = self.dispatcher.tasks.spawn(TaskKind::CatalogChange, change).await;
        done.map_err(|_| Error::Stopping)?
    }

    /// Creates a topic, or replaces the one with the same id. Takes effect for the next event.
    pub async fn put_topic(&self, topic: Topic) -> Result<Arc<TopicEntry>, Error> {
        self.run_to_completion(|engine| async move {
            let _turn = engine.turns.alone(TurnKey::Topic(topic.id)).await;
            engine.commit_topic(topic).await
        })
        .await
    }

    /// Like [`Engine::put_topic`], but fails if another node has changed or deleted the topic since
    /// `read`. None: the topic must not exist yet.
    pub async fn replace_topic_if_unchanged(
        &self,
        topic: Topic,
        read: Option<Arc<TopicEntry>>,
    ) -> Result<Arc<TopicEntry>, Error> {
        self.run_to_completion(|engine| async move {
            let _turn = engine.turns.alone(TurnKey::Topic(topic.id)).await;
            let now = engine.directory.topic_by_id(topic.id);
            if now.map(|now| now.topic.clone()) != read.map(|read| read.topic.clone()) {
                return Err(changed_meanwhile("the topic"));
            }
            engine.commit_topic(topic).await
        })
        .await
    }

    async fn commit_topic(&self, topic: Topic) -> Result<Arc<TopicEntry>, Error> {
        self.catalog
            .commit(vec![CatalogChange::PutTopic(topic.clone())])
            .await?;
        Ok(self.apply_topic(topic).await)
    }

    /// Applies a stored topic: it is in force from now on.
    pub(crate) async fn apply_topic(&self, topic: Topic) -> Arc<TopicEntry> {
        let before = self.directory.topic_by_id(topic.id);
        let entry = self.directory.put_topic(topic);
        if before.is_some_and(|before| !delivers_alike(&before, &entry)) {
            let subscriptions = self.directory.subscriptions(entry.topic.id);
            for some in subscriptions.chunks(RETIRE_AT_ONCE) {
                for subscription in some {
                    self.start_dispatch(subscription.clone(), &entry);
                }
                // A domain may have very many subscriptions.
                tokio::task::yield_now().await;
            }
        }
        entry
    }

    /// Deletes a topic with everything in it. The backlog of its subscriptions is dropped and
    /// counted.
    pub async fn delete_topic(&self, id: TopicId) -> Result<(), Error> {
        self.run_to_completion(move |engine| async move {
            // Before taking the turn: a handshake that is just being granted needs the turn too.
            engine.handshakes.cancel_of(id, None).await?;
            let turn = engine.turns.alone(TurnKey::Topic(id)).await;
            let entry = engine.directory.topic_by_id(id);
            let subscriptions = engine.directory.subscriptions(id);
            let mut changes: Vec<CatalogChange> = subscriptions
                .iter()
                .map(|s| CatalogChange::DeleteSubscription(s.id))
                .collect();
            let domain_topics = engine.directory.domain_topics(id).into_iter();
            changes.extend(domain_topics.map(|topic| CatalogChange::DeleteDomainTopic(id, topic.name)));
            changes.extend(engine.handshakes.forget(id));
            changes.push(CatalogChange::DeleteTopic(id));
            engine.catalog.commit(changes).await?;
            engine.directory.delete_topic(id);
            for subscription in &subscriptions {
                engine.notify_subscription_deleted(subscription, entry.as_deref());
            }
            drop(turn);
            // Handshakes begun in the meantime cannot succeed any more.
            engine.handshakes.cancel_of(id, None).await?;
            engine.retire_all(&subscriptions).await
        })
        .await
    }

    /// The hidden topic for subscriptions of another provider's resource: the existing one, or a
    /// new one. A scope without subscriptions may be deleted at any time; a caller that gets
    /// [`Error::Gone`] then has to ask again.
    pub async fn scope(
        &self,
        source: &str,
        topic_type: &str,
        location: &str,
    ) -> Result<Arc<TopicEntry>, Error> {
        let source = source.trim_end_matches('/').to_owned();
        let (topic_type, location) = (topic_type.to_owned(), location.to_owned());
        self.run_to_completion(|engine| async move {
            let _turn = engine.turns.alone(TurnKey::Scope(source.to_lowercase())).await;
            if let Some(known) = engine.directory.scope_by_source(&source) {
                return Ok(known);
            }
            let id = TopicId(engine.catalog.next_id().await?);
            let topic = Topic {
                id,
                name: source.rsplit('/').next().unwrap_or_default().to_owned(),
                kind: TopicKind::Scope { source, topic_type },
                resource_group: String::new(),
                location,
                tags: BTreeMap::new(),
                input_schema: EventSchema::EventGrid,
                mapping: None,
                // Publishing to a scope with a key is impossible.
                keys: [Secret::new(""), Secret::new("")],
                local_auth_disabled: true,
                public_network: false,
                inbound_ip_rules: Vec::new(),
                profile: None,
                created: engine.clock.now(),
                extras: None,
                edge: None,
            };
            let _turn = engine.turns.alone(TurnKey::Topic(id)).await;
            engine.commit_topic(topic).await
        })
        .await
    }

    /// Cancels the handshake that is to put this subscription in force, whichever node runs it. On
    /// return the handshake has ended. Releases the resource's hidden topic if nothing else belongs
    /// to it.
    pub async fn cancel_handshake(
        &self,
        topic: TopicId,
        domain_topic: Option<&str>,
        name: &str,
    ) -> Result<(), Error> {
        self.handshakes.cancel(topic, domain_topic, name).await?;
        self.release_scope(topic).await.map(drop)
    }

    /// Deletes the hidden topic of a resource if nothing belongs to it any more. Returns whether it
    /// did.
    pub async fn release_scope(&self, id: TopicId) -> Result<bool, Error> {
        self.run_to_completion(move |engine| async move {
            let mut tries = 1;
            loop {
                match engine.try_release_scope(id).await {
                    // The caller will not ask again, so a conflict is retried here: the other
                    // node's change is applied in a moment, and shows whether the scope is still
                    // used.
                    Err(Error::Store(postrider_store::Error::Conflict(_))) if tries < RELEASE_TRIES => {
                        tries += 1;
                        engine.wall.sleep_until(engine.wall.now() + RELEASE_PAUSE).await;
                    }
                    other => return other,
                }
            }
        })
        .await
    }

    async fn try_release_scope(&self, id: TopicId) -> Result<bool, Error> {
        let _turn = self.turns.alone(TurnKey::Topic(id)).await;
        let scope = self.directory.topic_by_id(id);
        let is_scope = scope.is_some_and(|entry| matches!(entry.topic.kind, TopicKind::Scope { .. }));
        if !is_scope || self.is_used(id, None) {
            return Ok(false);
        }
        self.catalog.commit(vec![CatalogChange::DeleteTopic(id)]).await?;
        self.directory.delete_topic(id);
        Ok(true)
    }

    /// Whether a topic has subscriptions or handshakes, apart from this subscription.
    fn is_used(&self, topic: TopicId, apart_from: Option<SubscriptionId>) -> bool {
        let apart = apart_from.and_then(|id| self.directory.subscription_by_id(id));
        let apart = apart.is_some_and(|subscription| subscription.topic == topic);
        self.directory.subscription_count(topic) > usize::from(apart)
            || !self.handshakes.pending_of(topic).is_empty()
    }

    /// Creates a topic inside a domain. An existing one stays, and is no longer deleted
    /// automatically.
    pub async fn put_domain_topic(
        &self,
        domain: TopicId,
        name: impl Into<String>,
    ) -> Result<DomainTopic, Error> {
        let name = name.into();
        self.run_to_completion(move |engine| async move {
            let _turn = engine.turns.together(TurnKey::Topic(domain)).await;
            let _alone = engine.exclusive_domain_topic_turn(domain, &name).await;
            if engine.directory.topic_by_id(domain).is_none() {
                return Err(Error::Gone);
            }
            let topic = match engine.directory.domain_topic(domain, &name) {
                Some(known) if !known.automatic => return Ok(known),
                Some(known) => DomainTopic {
                    automatic: false,
                    ..known
                },
                None => DomainTopic {
                    domain,
                    name,
                    automatic: false,
                    created: engine.directory.domain_topic_created(domain, engine.clock.now()),
                },
            };
            let change = CatalogChange::PutDomainTopic(topic.clone());
            engine.catalog.commit(vec![change]).await?;
            engine.directory.put_domain_topic(topic.clone());
            Ok(topic)
        })
        .await
    }

    /// Deletes a topic inside a domain with its subscriptions. Returns whether it existed.
    pub async fn delete_domain_topic(&self, domain: TopicId, name: &str) -> Result<bool, Error> {
        let name = name.to_owned();
        self.run_to_completion(move |engine| async move {
            engine.handshakes.cancel_of(domain, Some(&name)).await?;
            let turn = engine.turns.together(TurnKey::Topic(domain)).await;
            let alone = engine.exclusive_domain_topic_turn(domain, &name).await;
            if engine.directory.domain_topic(domain, &name).is_none() {
                return Ok(false);
            }
            let entry = engine.directory.topic_by_id(domain);
            let subscriptions = engine.directory.subscriptions_of(domain, Some(&name));
            let mut changes: Vec<CatalogChange> = subscriptions
                .iter()
                .map(|s| CatalogChange::DeleteSubscription(s.id))
                .collect();
            changes.push(CatalogChange::DeleteDomainTopic(domain, name.clone()));
            engine.catalog.commit(changes).await?;
            for subscription in &subscriptions {
                engine.directory.delete_subscription(subscription.id);
            }
            engine.directory.delete_domain_topic(domain, &name);
            for subscription in &subscriptions {
                engine.notify_subscription_deleted(subscription, entry.as_deref());
            }
            drop((alone, turn));
            engine.retire_all(&subscriptions).await?;
            Ok(true)
        })
        .await
    }

    pub(crate) async fn exclusive_domain_topic_turn(&self, domain: TopicId, name: &str) -> ChangeTurn {
        let key = TurnKey::DomainTopic(domain, name.to_lowercase());
        self.turns.alone(key).await
    }

    /// Creates a subscription, or replaces the one with the same id. A new one gets the events that
    /// are published after this has returned. Creates the domain topic that it names, if the domain
    /// allows that. Cancels a handshake for a subscription of this name.
    pub async fn put_subscription(&self, subscription: Subscription) -> Result<Arc<Subscription>, Error> {
        self.supersede_handshake(&subscription).await?;
        self.put_subscription_with_changes(subscription, Vec::new(), None)
            .await
    }

    /// Like [`Engine::put_subscription`], but fails if another node has changed the subscription
    /// since `read`.
    pub async fn replace_subscription_if_unchanged(
        &self,
        subscription: Subscription,
        read: SubscriptionRead,
    ) -> Result<Arc<Subscription>, Error> {
        self.read(&subscription).check_pending(&read)?;
        self.supersede_handshake(&subscription).await?;
        self.put_subscription_with_changes(subscription, Vec::new(), Some(read))
            .await
    }

    /// The state of a subscription, to be passed on with a change that was decided from it.
    pub fn snapshot_subscription(
        &self,
        topic: TopicId,
        domain_topic: Option<&str>,
        name: &str,
    ) -> SubscriptionRead {
        SubscriptionRead {
            in_force: self.directory.subscription(topic, domain_topic, name),
            pending: self.handshakes.pending(topic, domain_topic, name),
        }
    }

    /// The state of the subscription of this name.
    pub(crate) fn read(&self, one: &Subscription) -> SubscriptionRead {
        self.snapshot_subscription(one.topic, one.domain_topic.as_deref(), &one.name)
    }

    /// Takes the turn at a subscription's name.
    pub(crate) async fn subscription_name_turn(&self, one: &Subscription) -> ChangeTurn {
        let inside = one.domain_topic.as_ref().map(|name| name.to_lowercase());
        let key = TurnKey::Name(one.topic, inside, one.name.to_lowercase());
        self.turns.alone(key).await
    }

    /// Puts a subscription together with other changes in the same commit.
    pub(crate) async fn put_subscription_with_changes(
        &self,
        subscription: Subscription,
        also: Vec<CatalogChange>,
        read: Option<SubscriptionRead>,
    ) -> Result<Arc<Subscription>, Error> {
        self.run_to_completion(|engine| async move {
            let (id, topic) = (subscription.id, subscription.topic);
            let _topic_turn = engine.turns.together(TurnKey::Topic(topic)).await;
            let _domain_topic_turn = match &subscription.domain_topic {
                Some(name) => Some(engine.domain_topic_turn(topic, name).await),
                None => None,
            };
            let _turn = engine.turns.alone(TurnKey::Subscription(id)).await;
            let _name_turn = engine.subscription_name_turn(&subscription).await;
            let Some(entry) = engine.directory.topic_by_id(topic) else {
                return Err(Error::Gone);
            };
            if let Some(read) = read {
                engine.read(&subscription).check(&read)?;
            }
            let over = |change: &CatalogChange| match change {
                CatalogChange::DeleteHandshake(operation) => !engine.handshakes.is_under_way(operation),
                _ => false,
            };
            if also.iter().any(over) {
                return Err(Error::HandshakeOver);
            }
            let mut subscription = subscription;
            if let Some(known) = engine.directory.subscription_by_id(id) {
                // Pauses are kept: the caller may not know them, or not the latest ones.
                subscription.pauses = known.pauses.clone();
            }
            let made = engine.missing_domain_topic(&entry.topic, &subscription)?;
            let mut changes = also;
            changes.extend(made.clone().map(CatalogChange::PutDomainTopic));
            changes.push(CatalogChange::PutSubscription(subscription.clone()));
            // The log must know the subscription before an event can match it, and keeps nothing
            // for it until then. Both may run in either order: nothing matches before both are
            // done, and a start repairs a half-done pair.
            let (opened, committed) =
                tokio::join!(engine.log.open_subscription(id), engine.catalog.commit(changes));
            committed?;
            opened?;
            if let Some(made) = made {
                engine.directory.put_domain_topic(made);
            }
            let subscription = Arc::new(subscription);
            engine.apply_subscription(subscription.clone(), &entry);
            Ok(subscription)
        })
        .await
    }

    /// Applies a stored subscription: it is in force from now on.
    pub(crate) fn apply_subscription(&self, subscription: Arc<Subscription>, entry: &TopicEntry) {
        let expires = subscription.expires.is_some();
        self.directory.put_subscription(subscription.clone());
        self.start_dispatch(subscription, entry);
        if expires {
            self.expiry_changed.notify_one();
        }
    }

    /// Stops sending for a subscription; events are still accepted for it and wait. Attempts in
    /// flight end normally. None if there is no such subscription.
    pub async fn pause_subscription(&self, id: SubscriptionId) -> Result<Option<Arc<Subscription>>, Error> {
        self.change_pauses(id, SubscriptionPauses::begin).await
    }

    /// Resumes sending. None if there is no such subscription.
    pub async fn resume_subscription(&self, id: SubscriptionId) -> Result<Option<Arc<Subscription>>, Error> {
        self.change_pauses(id, SubscriptionPauses::end).await
    }

    /// `change` returns whether it has changed anything.
    async fn change_pauses(
        &self,
        id: SubscriptionId,
        change: fn(&mut SubscriptionPauses, Timestamp) -> bool,
    ) -> Result<Option<Arc<Subscription>>, Error> {
        self.run_to_completion(move |engine| async move {
            let Some(topic) = engine.directory.subscription_by_id(id).map(|known| known.topic) else {
                return Ok(None);
            };
            let _topic_turn = engine.turns.together(TurnKey::Topic(topic)).await;
            let _turn = engine.turns.alone(TurnKey::Subscription(id)).await;
            let known = engine.directory.subscription_by_id(id);
            let (Some(known), Some(entry)) = (known, engine.directory.topic_by_id(topic)) else {
                return Ok(None);
            };
            let mut subscription = Subscription::clone(&known);
            let now = engine.clock.now();
            if !change(&mut subscription.pauses, now) {
                return Ok(Some(known));
            }
            let profile = engine.profile(&subscription, Some(&entry));
            let time_to_live = subscription.retry.time_to_live(profile);
            subscription.pauses.prune(time_to_live, now);
            let stored = CatalogChange::PutSubscription(subscription.clone());
            engine.catalog.commit(vec![stored]).await?;
            let subscription = Arc::new(subscription);
            engine.directory.put_subscription(subscription.clone());
            engine.start_dispatch(subscription.clone(), &entry);
            match subscription.pauses.is_paused() {
                true => tracing::info!(subscription = %subscription.name, "subscription is paused"),
                false => {
                    tracing::info!(subscription = %subscription.name, "subscription goes on after a pause")
                }
            }
            Ok(Some(subscription))
        })
        .await
    }

    /// Takes a shared turn at an existing domain topic, or an exclusive one at a domain topic that
    /// is to be created.
    async fn domain_topic_turn(&self, domain: TopicId, name: &str) -> ChangeTurn {
        let key = TurnKey::DomainTopic(domain, name.to_lowercase());
        let together = self.turns.together(key).await;
        if self.directory.domain_topic(domain, name).is_some() {
            return together;
        }
        drop(together);
        self.exclusive_domain_topic_turn(domain, name).await
    }

    /// The domain topic that has to be created for a subscription.
    fn missing_domain_topic(
        &self,
        domain: &Topic,
        subscription: &Subscription,
    ) -> Result<Option<DomainTopic>, Error> {
        let Some(name) = &subscription.domain_topic else {
            return Ok(None);
        };
        if self.directory.domain_topic(domain.id, name).is_some() {
            return Ok(None);
        }
        match domain.kind {
            TopicKind::Domain {
                auto_create: true, ..
            } => Ok(Some(DomainTopic {
                domain: domain.id,
                name: name.clone(),
                automatic: true,
                created: self.directory.domain_topic_created(domain.id, self.clock.now()),
            })),
            _ => Err(Error::DomainTopicMissing {
                domain: domain.name.clone(),
                name: name.clone(),
            }),
        }
    }

    /// Deletes a subscription. Its backlog is dropped and counted. The last subscription takes
    /// along an automatic domain topic, if the domain says so, and the hidden topic of a resource.
    pub async fn delete_subscription(&self, id: SubscriptionId) -> Result<(), Error> {
        self.run_to_completion(move |engine| async move {
            if let Some(known) = engine.directory.subscription_by_id(id) {
                engine
                    .handshakes
                    .cancel(known.topic, known.domain_topic.as_deref(), &known.name)
                    .await?;
            }
            engine
                .drop_subscription(id, GiveUpReason::SubscriptionGone, |_| true)
                .await
        })
        .await
    }

    /// Deletes a subscription if it exists and is still `meant` once its turn has come.
    async fn drop_subscription(
        &self,
        id: SubscriptionId,
        reason: GiveUpReason,
        meant: impl Fn(&Subscription) -> bool,
    ) -> Result<(), Error> {
        let Some(known) = self.directory.subscription_by_id(id) else {
            return Ok(());
        };
        let topic = known.topic;
        let entry = self.directory.topic_by_id(topic);
        let kind = entry.as_ref().map(|entry| &entry.topic.kind);
        let scope = matches!(kind, Some(TopicKind::Scope { .. }));
        let key = TurnKey::Topic(topic);
        let topic_turn = if scope {
            self.turns.alone(key).await
        } else {
            self.turns.together(key).await
        };
        let domain_topic_turn = match &known.domain_topic {
            Some(name) => Some(self.exclusive_domain_topic_turn(topic, name).await),
            None => None,
        };
        let turn = self.turns.alone(TurnKey::Subscription(id)).await;
        let Some(known) = self.directory.subscription_by_id(id).filter(|s| meant(s)) else {
            return Ok(());
        };
        let mut changes = vec![CatalogChange::DeleteSubscription(id)];
        let domain_topic = known
            .domain_topic
            .as_deref()
            .filter(|name| self.goes_with(topic, name, id));
        changes.extend(domain_topic.map(|name| CatalogChange::DeleteDomainTopic(topic, name.to_owned())));
        let scope_goes = scope && !self.is_used(topic, Some(id));
        if scope_goes {
            changes.push(CatalogChange::DeleteTopic(topic));
        }
        self.catalog.commit(changes).await?;
        self.directory.delete_subscription(id);
        if let Some(name) = domain_topic {
            self.directory.delete_domain_topic(topic, name);
        }
        if scope_goes {
            self.directory.delete_topic(topic);
        }
        if reason == GiveUpReason::SubscriptionGone {
            self.notify_subscription_deleted(&known, entry.as_deref());
        }
        // The subscription is gone. Only a change of the same id has to wait until the log knows.
        drop((domain_topic_turn, topic_turn));
        let retired = self.retire(id, reason).await;
        drop(turn);
        retired
    }

    /// Whether a domain topic is deleted with this subscription of it.
    fn goes_with(&self, domain: TopicId, name: &str, last: SubscriptionId) -> bool {
        let auto_delete = self.directory.topic_by_id(domain).is_some_and(|entry| {
            matches!(
                entry.topic.kind,
                TopicKind::Domain {
                    auto_delete: true,
                    ..
                }
            )
        });
        let automatic = |topic: DomainTopic| topic.automatic;
        auto_delete
            && self.directory.domain_topic(domain, name).is_some_and(automatic)
            && self
                .directory
                .subscriptions_of(domain, Some(name))
                .iter()
                .all(|s| s.id == last)
    }

    /// Deletes subscriptions that have expired, some of them if there are very many.
    async fn drop_expired(&self) -> Result<(), Error> {
        let now = self.clock.now();
        let expired = self.directory.expired(now, RETIRE_AT_ONCE);
        let is_over = |subscription: &Subscription| subscription.expires.is_some_and(|at| at <= now);
        let all = expired.iter().map(|id| async move {
            if let Some(subscription) = self.directory.subscription_by_id(*id) {
                tracing::info!(subscription = %subscription.name, "subscription has expired");
            }
            self.drop_subscription(*id, GiveUpReason::SubscriptionExpired, is_over)
                .await
        });
        join_all(all).await.into_iter().collect()
    }

    /// The profile in force for a subscription.
    pub fn profile(&self, subscription: &Subscription, topic: Option<&TopicEntry>) -> &'static Profile {
        let of_topic = topic.and_then(|entry| entry.topic.profile.as_deref());
        let named = subscription.profile.as_deref().or(of_topic);
        self.profiles.in_force(named, subscription.origin)
    }

    pub(crate) fn start_dispatch(&self, subscription: Arc<Subscription>, topic: &TopicEntry) {
        let profile = self.profile(&subscription, Some(topic));
        self.dispatcher.put(subscription, topic, profile);
    }

    /// Stops deliveries of subscriptions that are no longer in the catalog.
    pub(crate) async fn retire_all(&self, subscriptions: &[Arc<Subscription>]) -> Result<(), Error> {
        let mut result = Ok(());
        for some in subscriptions.chunks(RETIRE_AT_ONCE) {
            let all = some
                .iter()
                .map(|s| self.retire(s.id, GiveUpReason::SubscriptionGone));
            // A subscription that cannot be closed must not keep the others running.
            result = join_all(all).await.into_iter().fold(result, Result::and);
        }
        result
    }

    /// Ends what the log still holds for subscriptions whose deletion it never learned of.
    pub async fn retire_unknown_subscriptions(&self, strays: Vec<SubscriptionId>) -> Result<(), Error> {
        for id in strays {
            self.retire(id, GiveUpReason::SubscriptionGone).await?;
        }
        Ok(())
    }

    /// Stops deliveries of a subscription that is no longer in the catalog.
    pub(crate) async fn retire(&self, id: SubscriptionId, reason: GiveUpReason) -> Result<(), Error> {
        self.dispatcher.remove(id, reason).await;
        let dropped = self.log.close_subscription(id).await?;
        self.recorder.retired(RetiredSubscription {
            subscription: id,
            at: self.clock.now(),
            reason,
        });
        if dropped > 0 {
            tracing::warn!(subscription = %id, dropped, %reason, "subscription gone with events waiting");
            let counters = &self.dispatcher.counters.dropped;
            crate::counters::add(crate::counters::by_reason(counters, reason), dropped as usize);
            let cause = FailureCause {
                effect: FailureEffect::Dropped(reason),
                outcome: None,
                status: None,
            };
            let noted = MeterNote {
                given_up: &[(cause, dropped as usize)],
                ..MeterNote::default()
            };
            self.dispatcher.meter.note(self.clock.now(), &noted);
        }
        Ok(())
    }
}

/// The state of a subscription when a change to it was decided. On one node a turn excludes other
/// changes; other nodes can still make some.
#[derive(Clone, Debug, Default)]
pub struct SubscriptionRead {
    pub in_force: Option<Arc<Subscription>>,
    /// The handshake that was in progress.
    pub pending: Option<Arc<Handshake>>,
}

impl SubscriptionRead {
    /// Fails if the subscription has changed since. A handshake that was in progress then may have
    /// succeeded or failed.
    pub(crate) fn check(&self, read: &SubscriptionRead) -> Result<(), Error> {
        self.check_pending(read)?;
        let now = self.in_force.as_deref();
        let granted = read.pending.as_ref().map(|asked| &asked.subscription);
        match same(now, read.in_force.as_deref()) || (now.is_some() && same(now, granted)) {
            true => Ok(()),
            false => Err(changed_meanwhile("the subscription")),
        }
    }

    /// Fails if a handshake is in progress that was not then.
    pub fn check_pending(&self, read: &SubscriptionRead) -> Result<(), Error> {
        let operation = |asked: &Arc<Handshake>| asked.operation.clone();
        let known = read.pending.as_ref().map(operation);
        match self.pending.as_ref().map(operation) {
            Some(now) if Some(&now) != known.as_ref() => Err(changed_meanwhile("the subscription")),
            _ => Ok(()),
        }
    }
}

/// Whether two are the same apart from what changes independently: pauses, and the rate that a
/// webhook allows.
fn same(one: Option<&Subscription>, other: Option<&Subscription>) -> bool {
    let decided = |one: &Subscription| {
        let mut one = one.clone();
        one.pauses = SubscriptionPauses::default();
        if let Destination::WebHook(hook) = &mut one.destination {
            hook.rate_max = None;
        }
        one
    };
    one.map(decided) == other.map(decided)
}

fn changed_meanwhile(what: &str) -> Error {
    Error::Store(postrider_store::Error::Conflict(what.into()))
}

/// Whether deliveries are made the same way for both: then the subscriptions need no update.
fn delivers_alike(a: &TopicEntry, b: &TopicEntry) -> bool {
    let (x, y) = (&a.topic, &b.topic);
    a.full_id == b.full_id
        && (&x.name, x.input_schema, &x.mapping, &x.profile)
            == (&y.name, y.input_schema, &y.mapping, &y.profile)
}

/// Awaits all futures concurrently; the results are in the same order.
pub(crate) async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut pending: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut all = std::task::Poll::Ready(());
        for (future, done) in &mut pending {
            if done.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(output) => *done = Some(output),
                    std::task::Poll::Pending => all = std::task::Poll::Pending,
                }
            }
        }
        all
    })
    .await;
    pending.into_iter().filter_map(|(_, done)| done).collect()
}

/// Retires each subscription when it expires.
pub(crate) async fn retire_expired(engine: Arc<Engine>, stop: CancellationToken) {
    let mut again = None;
    let mut steward = engine.node.coordinator.clone();
    loop {
        // Only the coordinator does this.
        let mine = *steward.borrow_and_update();
        let next = engine.directory.next_expiry().max(again).filter(|_| mine);
        let mut time = engine.clock.sleep_until(next.unwrap_or(Timestamp::MAX));
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = engine.expiry_changed.notified() => continue,
            () = node::changed(&mut steward) => continue,
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
