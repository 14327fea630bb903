//! The catalogue in memory, in the form that publishing needs: topics by name, each with its routes.

use crate::counters::Published;
use postrider_core::envelope::Envelope;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::subscription::{DomainTopic, Subscription, Topic, TopicKind};
use postrider_core::time::Timestamp;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

/// A topic with everything that accepting an event needs.
#[derive(Debug)]
pub struct TopicEntry {
    pub topic: Topic,
    /// The full resource id, as events carry it.
    pub full_id: String,
    pub routes: Vec<Route>,
    /// All routes at once, when none of them looks at the event.
    open: Option<Box<[SubscriptionId]>>,
    pub published: Arc<Published>,
}

/// One subscription as publishing sees it.
#[derive(Clone, Debug)]
pub struct Route {
    pub subscription: Arc<Subscription>,
}

impl Route {
    /// Whether an event goes to the subscription.
    fn takes(
        &self,
        event: &Envelope<'_>,
        topic_id: &str,
        domain_topic: Option<&str>,
        now: Timestamp,
    ) -> bool {
        let subscription = &*self.subscription;
        if subscription.expires.is_some_and(|at| at <= now) {
            return false;
        }
        if let Some(wanted) = &subscription.domain_topic {
            let here = domain_topic.is_some_and(|name| name.eq_ignore_ascii_case(wanted));
            if !here {
                return false;
            }
        }
        subscription.filter.is_open() || subscription.filter.matches(event, topic_id).is_ok()
    }

    fn looks_at_nothing(&self) -> bool {
        let subscription = &*self.subscription;
        subscription.filter.is_open() && subscription.domain_topic.is_none() && subscription.expires.is_none()
    }
}

impl TopicEntry {
    fn new(topic: Topic, prefix: &str, routes: Vec<Route>, published: Arc<Published>) -> TopicEntry {
        let full_id = full_id(&topic, prefix);
        let open = routes
            .iter()
            .all(Route::looks_at_nothing)
            .then(|| routes.iter().map(|r| r.subscription.id).collect());
        TopicEntry {
            topic,
            full_id,
            routes,
            open,
            published,
        }
    }
}

/// `/subscriptions/…/providers/Microsoft.EventGrid/topics/<name>`, or the source of a system topic.
fn full_id(topic: &Topic, prefix: &str) -> String {
    let kind = match &topic.kind {
        TopicKind::Custom => "topics",
        TopicKind::Domain { .. } => "domains",
        TopicKind::System { source, .. } => return source.clone(),
    };
    let group = &topic.resource_group;
    format!(
        "{prefix}/resourceGroups/{group}/providers/Microsoft.EventGrid/{kind}/{}",
        topic.name
    )
}

/// Whether a resource id names the storage account of this name. Resource ids compare without case.
fn is_storage_account(id: &str, account: &str) -> bool {
    let mut parts = id.rsplit('/');
    let mut is = |word: &str| parts.next().is_some_and(|part| part.eq_ignore_ascii_case(word));
    is(account) && is("storageAccounts") && is("Microsoft.Storage")
}

/// Decides for the events of one request who gets them, and keeps the distinct answers.
pub struct Router<'a> {
    topic: &'a TopicEntry,
    now: Timestamp,
    sets: Vec<Box<[SubscriptionId]>>,
    found: Vec<SubscriptionId>,
    pub unmatched: usize,
}

impl<'a> Router<'a> {
    pub fn new(topic: &'a TopicEntry, now: Timestamp) -> Router<'a> {
        Router {
            topic,
            now,
            sets: Vec::new(),
            found: Vec::new(),
            unmatched: 0,
        }
    }

    /// The number of the set of subscriptions that this event goes to.
    pub fn route(&mut self, event: &Envelope<'_>, domain_topic: Option<&str>) -> u32 {
        if let Some(all) = &self.topic.open {
            if self.sets.is_empty() {
                self.sets.push(all.clone());
            }
            self.unmatched += usize::from(all.is_empty());
            return 0;
        }
        let in_domain;
        let topic_id = match domain_topic {
            Some(name) => {
                in_domain = format!("{}/topics/{name}", self.topic.full_id);
                &in_domain
            }
            None => &self.topic.full_id,
        };
        self.found.clear();
        for route in &self.topic.routes {
            if route.takes(event, topic_id, domain_topic, self.now) {
                self.found.push(route.subscription.id);
            }
        }
        self.unmatched += usize::from(self.found.is_empty());
        // Neighbouring events mostly go to the same places.
        let known = self.sets.iter().rposition(|set| **set == *self.found);
        known.unwrap_or_else(|| {
            self.sets.push(self.found.as_slice().into());
            self.sets.len() - 1
        }) as u32
    }

    pub fn into_sets(self) -> Vec<Box<[SubscriptionId]>> {
        self.sets
    }
}

#[derive(Default)]
struct Inner {
    topics: FxHashMap<TopicId, Arc<TopicEntry>>,
    /// Custom topics by name, in lower case.
    names: BTreeMap<String, TopicId>,
    domains: BTreeMap<String, TopicId>,
    system_topics: BTreeMap<String, TopicId>,
    domain_topics: BTreeMap<(TopicId, String), DomainTopic>,
    subscriptions: FxHashMap<SubscriptionId, Arc<Subscription>>,
    by_topic: FxHashMap<TopicId, BTreeMap<SubscriptionKey, SubscriptionId>>,
}

/// Within a topic or domain a subscription is known by its domain topic and name, in lower case.
type SubscriptionKey = (Option<String>, String);

fn key(subscription: &Subscription) -> SubscriptionKey {
    let domain_topic = subscription.domain_topic.as_deref().map(str::to_lowercase);
    (domain_topic, subscription.name.to_lowercase())
}

/// Readers see each change whole.
pub struct Directory {
    /// What full ids begin with: `/subscriptions/<id>`.
    prefix: String,
    inner: RwLock<Inner>,
}

impl Directory {
    pub fn new(prefix: String) -> Directory {
        Directory {
            prefix,
            inner: RwLock::default(),
        }
    }

    pub fn topic(&self, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.inner.read().expect("no panic holds it");
        let id = inner
            .names
            .get(name)
            .or_else(|| inner.names.get(&name.to_lowercase()))?;
        inner.topics.get(id).cloned()
    }

    pub fn domain(&self, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.inner.read().expect("no panic holds it");
        inner
            .topics
            .get(inner.domains.get(&name.to_lowercase())?)
            .cloned()
    }

    pub fn system_topic(&self, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.inner.read().expect("no panic holds it");
        let id = inner.system_topics.get(&name.to_lowercase())?;
        inner.topics.get(id).cloned()
    }

    pub fn topic_by_id(&self, id: TopicId) -> Option<Arc<TopicEntry>> {
        self.inner
            .read()
            .expect("no panic holds it")
            .topics
            .get(&id)
            .cloned()
    }

    /// System topics of a storage account, by the account's name.
    pub fn storage_topics(&self, account: &str) -> Vec<Arc<TopicEntry>> {
        let inner = self.inner.read().expect("no panic holds it");
        let of_account = |entry: &&Arc<TopicEntry>| match &entry.topic.kind {
            TopicKind::System { source, .. } => is_storage_account(source, account),
            _ => false,
        };
        let mut found: Vec<_> = inner.topics.values().filter(of_account).cloned().collect();
        found.sort_by_key(|entry| entry.topic.id);
        found
    }

    /// All custom topics, by name.
    pub fn topics(&self) -> Vec<Arc<TopicEntry>> {
        let inner = self.inner.read().expect("no panic holds it");
        inner
            .names
            .values()
            .filter_map(|id| inner.topics.get(id).cloned())
            .collect()
    }

    pub fn subscription(
        &self,
        topic: TopicId,
        domain_topic: Option<&str>,
        name: &str,
    ) -> Option<Arc<Subscription>> {
        let inner = self.inner.read().expect("no panic holds it");
        let key = (domain_topic.map(str::to_lowercase), name.to_lowercase());
        let id = inner.by_topic.get(&topic)?.get(&key)?;
        inner.subscriptions.get(id).cloned()
    }

    pub fn subscription_by_id(&self, id: SubscriptionId) -> Option<Arc<Subscription>> {
        self.inner
            .read()
            .expect("no panic holds it")
            .subscriptions
            .get(&id)
            .cloned()
    }

    /// The subscriptions of a topic, by name.
    pub fn subscriptions(&self, topic: TopicId) -> Vec<Arc<Subscription>> {
        let inner = self.inner.read().expect("no panic holds it");
        let Some(names) = inner.by_topic.get(&topic) else {
            return Vec::new();
        };
        names
            .values()
            .filter_map(|id| inner.subscriptions.get(id).cloned())
            .collect()
    }

    pub fn all_subscriptions(&self) -> Vec<Arc<Subscription>> {
        self.inner
            .read()
            .expect("no panic holds it")
            .subscriptions
            .values()
            .cloned()
            .collect()
    }

    pub(crate) fn put_topic(&self, topic: Topic) {
        let mut inner = self.inner.write().expect("no panic holds it");
        let name = topic.name.to_lowercase();
        match topic.kind {
            TopicKind::Custom => inner.names.insert(name, topic.id),
            TopicKind::Domain { .. } => inner.domains.insert(name, topic.id),
            TopicKind::System { .. } => inner.system_topics.insert(name, topic.id),
        };
        let (routes, published) = inner
            .topics
            .get(&topic.id)
            .map_or_else(Default::default, |known| {
                (known.routes.clone(), known.published.clone())
            });
        let entry = TopicEntry::new(topic, &self.prefix, routes, published);
        inner.topics.insert(entry.topic.id, Arc::new(entry));
    }

    pub(crate) fn delete_topic(&self, id: TopicId) {
        let mut inner = self.inner.write().expect("no panic holds it");
        if inner.topics.remove(&id).is_some() {
            inner.names.retain(|_, known| *known != id);
            inner.domains.retain(|_, known| *known != id);
            inner.system_topics.retain(|_, known| *known != id);
            inner.domain_topics.retain(|(domain, _), _| *domain != id);
        }
        for of in inner.by_topic.remove(&id).into_iter().flatten() {
            inner.subscriptions.remove(&of.1);
        }
    }

    pub(crate) fn put_domain_topic(&self, domain_topic: DomainTopic) {
        let mut inner = self.inner.write().expect("no panic holds it");
        let key = (domain_topic.domain, domain_topic.name.to_lowercase());
        inner.domain_topics.insert(key, domain_topic);
    }

    pub(crate) fn put_subscription(&self, subscription: Arc<Subscription>) {
        let mut inner = self.inner.write().expect("no panic holds it");
        let (id, topic) = (subscription.id, subscription.topic);
        inner
            .by_topic
            .entry(topic)
            .or_default()
            .insert(key(&subscription), id);
        inner.subscriptions.insert(id, subscription);
        inner.rebuild(topic, &self.prefix);
    }

    pub(crate) fn delete_subscription(&self, id: SubscriptionId) {
        let mut inner = self.inner.write().expect("no panic holds it");
        let Some(known) = inner.subscriptions.remove(&id) else {
            return;
        };
        if let Some(names) = inner.by_topic.get_mut(&known.topic) {
            names.retain(|_, of| *of != id);
        }
        inner.rebuild(known.topic, &self.prefix);
    }
}

impl Inner {
    /// Makes a topic's routes anew after one of its subscriptions changed.
    fn rebuild(&mut self, topic: TopicId, prefix: &str) {
        let Some(known) = self.topics.get(&topic) else {
            return;
        };
        let ids = self.by_topic.get(&topic).into_iter().flat_map(BTreeMap::values);
        let mut routes: Vec<Route> = ids
            .filter_map(|id| self.subscriptions.get(id))
            .map(|subscription| Route {
                subscription: subscription.clone(),
            })
            .collect();
        routes.sort_by_key(|route| route.subscription.id);
        let entry = TopicEntry::new(known.topic.clone(), prefix, routes, known.published.clone());
        self.topics.insert(topic, Arc::new(entry));
    }
}
