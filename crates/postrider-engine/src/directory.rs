//! The catalog in memory, in the form that publishing needs: topics by name, each with its routes.

use crate::counters::PublishCounters;
use crate::recorder::{RoutingVerdict, RoutingVerdicts, TopicAudience};
use postrider_core::envelope::EventEnvelope;
use postrider_core::filter::{FilterBudget, FilterBudgetExceeded, FilterInput};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::subscription::{DomainTopic, Subscription, Topic, TopicKind};
use postrider_core::time::Timestamp;
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hash};
use std::ops::Bound;
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// A topic with everything that accepting an event needs.
#[derive(Clone, Debug)]
pub struct TopicEntry {
    pub topic: Arc<Topic>,
    /// The full resource id, as events carry it.
    pub full_id: Arc<str>,
    /// Routes of the topic or domain as a whole.
    routes: Arc<[SubscriptionRoute]>,
    /// Routes of the topics inside a domain.
    inside: DomainTopicRoutes,
    /// The subscriptions of all routes, if none of them has a filter or an expiry.
    open: Option<Arc<[SubscriptionId]>>,
    /// The number of subscriptions of the topic or domain as a whole that filter events.
    filtering: usize,
    /// Created on first use: only a recorder asks for it.
    audience: OnceLock<Arc<TopicAudience>>,
    pub published: Arc<PublishCounters>,
}

/// A subscription in the form that publishing needs.
#[derive(Clone, Debug)]
pub struct SubscriptionRoute {
    pub subscription: Arc<Subscription>,
}

impl SubscriptionRoute {
    fn looks_at_nothing(&self) -> bool {
        let subscription = &*self.subscription;
        subscription.filter.is_open() && subscription.expires.is_none()
    }
}

/// The routing verdict for one event of the subscription's topic or domain topic.
fn verdict<'a>(
    subscription: &'a Subscription,
    event: &mut FilterInput<'a>,
    now: Timestamp,
) -> Result<RoutingVerdict, FilterBudgetExceeded> {
    if subscription.expires.is_some_and(|at| at <= now) {
        return Ok(RoutingVerdict::Expired);
    }
    if subscription.filter.is_open() {
        return Ok(RoutingVerdict::Matched);
    }
    let mismatch = subscription.filter.first_mismatch(event)?;
    Ok(mismatch.map_or(RoutingVerdict::Matched, RoutingVerdict::from))
}

/// The routes of a domain's topics, by name in lower case. Sharded, so that a change copies only
/// one shard: a domain may have a hundred thousand topics.
#[derive(Clone, Debug, Default)]
struct DomainTopicRoutes {
    parts: Option<Box<[Arc<DomainTopicRouteShard>]>>,
    /// The number of all routes.
    count: usize,
}

type DomainTopicRouteShard = FxHashMap<Arc<str>, Arc<[SubscriptionRoute]>>;

const PARTS: usize = 256;

fn part_of(name: &str) -> usize {
    let hash = FxBuildHasher.hash_one(name);
    (hash >> 32) as usize % PARTS
}

impl DomainTopicRoutes {
    fn is_empty(&self) -> bool {
        self.parts.is_none()
    }

    fn get(&self, name: &str) -> &[SubscriptionRoute] {
        let part = self.parts.as_ref().map(|parts| &parts[part_of(name)]);
        part.and_then(|part| part.get(name)).map_or(&[], |routes| routes)
    }

    fn set(&mut self, name: &str, routes: Arc<[SubscriptionRoute]>) {
        self.count += routes.len();
        self.count -= self.get(name).len();
        if routes.is_empty() {
            let Some(parts) = &mut self.parts else {
                return;
            };
            Arc::make_mut(&mut parts[part_of(name)]).remove(name);
            if parts.iter().all(|part| part.is_empty()) {
                self.parts = None;
            }
            return;
        }
        let fresh = || std::iter::repeat_with(Arc::default).take(PARTS).collect();
        let parts = self.parts.get_or_insert_with(fresh);
        Arc::make_mut(&mut parts[part_of(name)]).insert(name.into(), routes);
    }

    fn all(&self) -> impl Iterator<Item = &SubscriptionRoute> {
        let parts = self.parts.iter().flatten();
        parts.flat_map(|part| part.values().flat_map(|routes| routes.iter()))
    }
}

/// The audience of a domain with more subscriptions of its topics than this leaves them out: every
/// event would get a verdict for each of them.
const AUDIENCE_INSIDE_MAX: usize = 128;

impl TopicEntry {
    fn new(topic: Topic, prefix: &str) -> TopicEntry {
        TopicEntry {
            full_id: full_id(&topic, prefix).into(),
            topic: Arc::new(topic),
            routes: Arc::default(),
            inside: DomainTopicRoutes::default(),
            open: Some(Arc::default()),
            filtering: 0,
            audience: OnceLock::new(),
            published: Arc::default(),
        }
    }

    /// The same topic with new routes, of the topic as a whole or of one domain topic.
    fn set_routes(&mut self, inside: Option<&str>, routes: Arc<[SubscriptionRoute]>) {
        match inside {
            Some(name) => self.inside.set(name, routes),
            None => self.routes = routes,
        }
        let looking = self.routes.iter().filter(|route| !route.looks_at_nothing());
        self.filtering = looking.count();
        let open = self.inside.is_empty() && self.filtering == 0;
        self.open = open.then(|| self.routes.iter().map(|r| r.subscription.id).collect());
        self.audience = OnceLock::new();
    }

    /// The subscriptions that may get the topic's events, by id, for the recorder. For a large
    /// domain, only the subscriptions of the domain as a whole.
    pub fn audience(&self) -> &Arc<TopicAudience> {
        self.audience.get_or_init(|| {
            let inside = (!self.is_large()).then(|| self.inside.all());
            let routes = self.routes.iter().chain(inside.into_iter().flatten());
            let mut all: Vec<_> = routes.map(|route| route.subscription.clone()).collect();
            all.sort_by_key(|subscription| subscription.id);
            Arc::new(TopicAudience::new(&self.topic, &self.full_id, all))
        })
    }

    /// The approximate number of bytes that filters look at when this many are published, as if
    /// each subscription had one filter.
    pub fn filter_bytes(&self, published: usize) -> usize {
        published.saturating_mul(self.filtering + self.inside.count.min(AUDIENCE_INSIDE_MAX))
    }

    fn is_large(&self) -> bool {
        self.inside.count > AUDIENCE_INSIDE_MAX
    }
}

/// `/subscriptions/…/providers/Microsoft.EventGrid/topics/<name>`, or the source of a system topic.
fn full_id(topic: &Topic, prefix: &str) -> String {
    let kind = match &topic.kind {
        TopicKind::Custom => "topics",
        TopicKind::Domain { .. } => "domains",
        TopicKind::System { source, .. } | TopicKind::Scope { source, .. } => return source.clone(),
    };
    let group = &topic.resource_group;
    format!(
        "{prefix}/resourceGroups/{group}/providers/Microsoft.EventGrid/{kind}/{}",
        topic.name
    )
}

/// The name of the storage account in a resource id, if there is one. Resource ids compare without
/// case.
pub fn storage_account(id: &str) -> Option<&str> {
    let mut parts = id.rsplit('/');
    let name = parts.next().filter(|name| !name.is_empty())?;
    let mut is = |word: &str| parts.next().is_some_and(|part| part.eq_ignore_ascii_case(word));
    (is("storageAccounts") && is("Microsoft.Storage")).then_some(name)
}

/// Routes the events of one publish request, and keeps the distinct match sets.
pub struct EventRouter<'a> {
    topic: &'a TopicEntry,
    now: Timestamp,
    /// The filter budget for each event.
    budget: FilterBudget,
    /// The filter budget left for all events together.
    left: FilterBudget,
    /// The first event whose filters exceeded a budget.
    over_budget: Option<EventOverBudget>,
    routed: usize,
    sets: MatchedSets,
    set_places: VerdictListIndex,
    found: Vec<SubscriptionId>,
    pub unmatched: usize,
    /// The verdicts for the recorder, if there is one.
    noting: Option<VerdictCollector>,
}

#[derive(Default)]
struct VerdictCollector {
    verdicts: RoutingVerdicts,
    list_places: VerdictListIndex,
    list: Vec<RoutingVerdict>,
    /// In a large domain: the subscriptions of the domain topics that were published to so far, and
    /// where those of each domain topic begin.
    visited: Vec<Arc<Subscription>>,
    begins: FxHashMap<String, usize>,
}

impl VerdictCollector {
    /// Makes the current list that of the next event.
    fn finish_event(&mut self) {
        let number = self.list_places.number_of(&self.list, &mut self.verdicts.lists);
        self.verdicts.of_event.push(number);
    }
}

/// A list is compared with this many of the latest ones first; mostly it is among them.
const LISTS_COMPARED_MAX: usize = 8;

/// Index of the earlier lists of a request by hash. Needed because every event may have a different
/// list.
#[derive(Default)]
struct VerdictListIndex {
    by_hash: FxHashMap<u64, u32>,
}

impl VerdictListIndex {
    /// The number of a list, which is added if it is new. A list is kept only once, except when
    /// hashes collide.
    fn number_of<T: Clone + Eq + Hash>(&mut self, list: &[T], lists: &mut Vec<Box<[T]>>) -> u32 {
        let older = lists.len().saturating_sub(LISTS_COMPARED_MAX);
        if let Some(at) = lists[older..].iter().rposition(|kept| **kept == *list) {
            return (older + at) as u32;
        }
        if older > 0 {
            let known = self.by_hash.get(&FxBuildHasher.hash_one(list));
            if let Some(&at) = known.filter(|at| *lists[**at as usize] == *list) {
                return at;
            }
        }
        lists.push(list.into());
        if let Some(oldest) = lists.len().checked_sub(LISTS_COMPARED_MAX + 1) {
            let hash = FxBuildHasher.hash_one(&*lists[oldest]);
            self.by_hash.entry(hash).or_insert(oldest as u32);
        }
        (lists.len() - 1) as u32
    }
}

/// The result of routing one publish request, besides the match sets.
#[derive(Default)]
pub struct RoutingResult {
    /// Events that no subscription matched.
    pub unmatched: usize,
    pub verdicts: RoutingVerdicts,
    /// The audience where it differs from the topic's own.
    pub(crate) audience: Option<Arc<TopicAudience>>,
}

/// The distinct match sets of one publish request.
pub type MatchedSets = Vec<Box<[SubscriptionId]>>;

/// Nothing was routed: the filters of this event exceeded a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventOverBudget {
    pub index: usize,
    pub scope: BudgetScope,
}

/// The scope of a filter budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetScope {
    Event,
    /// All events of a request together, up to and including the one that exceeded the budget.
    Request,
}

impl<'a> EventRouter<'a> {
    pub fn new(topic: &'a TopicEntry, now: Timestamp, budget: FilterBudget) -> EventRouter<'a> {
        EventRouter {
            topic,
            now,
            budget,
            left: FilterBudget::UNLIMITED,
            over_budget: None,
            routed: 0,
            sets: Vec::new(),
            set_places: VerdictListIndex::default(),
            found: Vec::new(),
            unmatched: 0,
            noting: None,
        }
    }

    /// A router that collects its verdicts for the recorder.
    pub fn noting(topic: &'a TopicEntry, now: Timestamp, budget: FilterBudget) -> EventRouter<'a> {
        EventRouter {
            noting: Some(VerdictCollector::default()),
            ..EventRouter::new(topic, now, budget)
        }
    }

    /// The same router with a budget for all events together.
    pub fn within(self, budget: FilterBudget) -> EventRouter<'a> {
        EventRouter { left: budget, ..self }
    }

    /// The number of the event's match set. Once an event has exceeded its budget the number is
    /// meaningless, and [`EventRouter::finish`] fails.
    pub fn route(&mut self, event: &EventEnvelope<'_>, domain_topic: Option<&str>) -> u32 {
        self.routed += 1;
        if let Some(all) = &self.topic.open {
            if self.sets.is_empty() {
                self.sets.push((**all).into());
            }
            self.unmatched += usize::from(all.is_empty());
            return 0;
        }
        if self.over_budget.is_some() {
            return 0;
        }
        let routed = match domain_topic {
            Some(name) => {
                let topic_id = format!("{}/topics/{name}", self.topic.full_id);
                self.find_subscriptions(event, &topic_id, name.to_lowercase())
            }
            None => self.find_subscriptions(event, &self.topic.full_id, String::new()),
        };
        if routed.is_err() {
            self.over_budget = Some(EventOverBudget {
                index: self.routed - 1,
                scope: match self.left < self.budget {
                    true => BudgetScope::Request,
                    false => BudgetScope::Event,
                },
            });
            return 0;
        }
        self.unmatched += usize::from(self.found.is_empty());
        self.set_places.number_of(&self.found, &mut self.sets)
    }

    /// Lists the subscriptions that the event matches in `found`. `domain_topic` is in lower case,
    /// and empty outside of domains.
    fn find_subscriptions(
        &mut self,
        event: &EventEnvelope<'_>,
        topic_id: &str,
        domain_topic: String,
    ) -> Result<(), FilterBudgetExceeded> {
        let topic = self.topic;
        let inside = match domain_topic.is_empty() {
            true => &[],
            false => topic.inside.get(&domain_topic),
        };
        let mut budget = self.budget.min(self.left);
        // Every subscription costs, whether or not it filters.
        budget.spend(topic.routes.len() + inside.len())?;
        let mut input = FilterInput::new(event, topic_id, budget);
        self.found.clear();
        match &mut self.noting {
            None => {
                for route in topic.routes.iter().chain(inside) {
                    if verdict(&route.subscription, &mut input, self.now)? == RoutingVerdict::Matched {
                        self.found.push(route.subscription.id);
                    }
                }
            }
            Some(noting) if !topic.is_large() => {
                noting.list.clear();
                for subscription in &topic.audience().subscriptions {
                    let other = |of: &String| {
                        !of.eq_ignore_ascii_case(&domain_topic)
                            && (of.is_ascii() || of.to_lowercase() != domain_topic)
                    };
                    let verdict = match subscription.domain_topic.as_ref().is_some_and(other) {
                        true => RoutingVerdict::DomainTopic,
                        false => verdict(subscription, &mut input, self.now)?,
                    };
                    noting.list.push(verdict);
                    if verdict == RoutingVerdict::Matched {
                        self.found.push(subscription.id);
                    }
                }
                noting.finish_event();
            }
            Some(noting) => {
                noting.list.clear();
                let whole = topic.routes.len();
                let begin = *noting.begins.entry(domain_topic).or_insert_with(|| {
                    let begin = noting.visited.len();
                    noting
                        .visited
                        .extend(inside.iter().map(|route| route.subscription.clone()));
                    begin
                });
                let told = begin + inside.len() <= AUDIENCE_INSIDE_MAX;
                for (at, route) in topic.routes.iter().chain(inside).enumerate() {
                    let verdict = verdict(&route.subscription, &mut input, self.now)?;
                    if verdict == RoutingVerdict::Matched {
                        self.found.push(route.subscription.id);
                    }
                    if at == whole && told {
                        noting.list.resize(whole + begin, RoutingVerdict::DomainTopic);
                    }
                    if at < whole || told {
                        noting.list.push(verdict);
                    }
                }
                noting.finish_event();
            }
        }
        if !inside.is_empty() {
            self.found.sort_unstable();
        }
        let before = self.budget.min(self.left);
        self.left.spend(input.budget_left().spent_since(before))
    }

    /// The match sets and the rest of the result, or the first event whose filters exceeded a
    /// budget.
    pub fn finish(self) -> Result<(MatchedSets, RoutingResult), EventOverBudget> {
        if let Some(over) = self.over_budget {
            return Err(over);
        }
        let mut routed = RoutingResult {
            unmatched: self.unmatched,
            ..RoutingResult::default()
        };
        if let Some(noting) = self.noting {
            if !noting.visited.is_empty() {
                let whole = self.topic.routes.iter().map(|route| route.subscription.clone());
                let all = whole.chain(noting.visited).collect();
                let audience = TopicAudience::new(&self.topic.topic, &self.topic.full_id, all);
                routed.audience = Some(Arc::new(audience));
            }
            routed.verdicts = noting.verdicts;
        }
        Ok((self.sets, routed))
    }
}

/// The sort key of topics and subscriptions in lists, which are in order of creation. The id
/// separates resources created at the same instant; it gives no order by itself, since the nodes of
/// a cluster assign ids in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CreationKey {
    pub created: Timestamp,
    pub id: u64,
}

impl CreationKey {
    pub fn of_topic(topic: &Topic) -> CreationKey {
        CreationKey {
            created: topic.created,
            id: topic.id.0,
        }
    }

    pub fn of_subscription(subscription: &Subscription) -> CreationKey {
        CreationKey {
            created: subscription.created,
            id: subscription.id.0,
        }
    }

    fn topic_id(self) -> TopicId {
        TopicId(self.id)
    }
}

/// Topics of one kind: found by key, listed in order of creation.
struct TopicIndex<K> {
    by_key: BTreeMap<K, CreationKey>,
    by_creation: BTreeSet<CreationKey>,
}

impl<K> Default for TopicIndex<K> {
    fn default() -> TopicIndex<K> {
        TopicIndex {
            by_key: BTreeMap::new(),
            by_creation: BTreeSet::new(),
        }
    }
}

impl<K: Ord> TopicIndex<K> {
    fn len(&self) -> usize {
        self.by_key.len()
    }

    fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<TopicId>
    where
        K: std::borrow::Borrow<Q>,
    {
        self.by_key.get(key).map(|creation| creation.topic_id())
    }

    /// Returns the topic that had the key until now.
    fn insert(&mut self, key: K, topic: &Topic) -> Option<TopicId> {
        let creation = CreationKey::of_topic(topic);
        let replaced = self.by_key.insert(key, creation);
        if let Some(replaced) = replaced {
            self.by_creation.remove(&replaced);
        }
        self.by_creation.insert(creation);
        replaced.map(CreationKey::topic_id)
    }

    /// Returns whether the key was this topic's: it may belong to another one by now.
    fn remove(&mut self, key: &K, topic: TopicId) -> bool {
        match self.by_key.get(key) {
            Some(creation) if creation.topic_id() == topic => {
                self.by_creation.remove(creation);
                self.by_key.remove(key);
                true
            }
            _ => false,
        }
    }

    fn after(&self, last: Option<CreationKey>) -> impl Iterator<Item = TopicId> {
        self.by_creation
            .range(beyond(last))
            .map(|creation| creation.topic_id())
    }
}

#[derive(Default)]
struct Inner {
    topics: FxHashMap<TopicId, Arc<TopicEntry>>,
    /// Custom topics by name, in lower case.
    names: TopicIndex<String>,
    domains: TopicIndex<String>,
    /// By name and resource group.
    system_topics: TopicIndex<(String, String)>,
    /// By the source resource id.
    scopes: TopicIndex<String>,
    domain_topics: BTreeMap<(TopicId, String), DomainTopic>,
    /// The keys of `domain_topics`, those of one domain in order of creation.
    domain_topics_by_creation: BTreeSet<(TopicId, Timestamp, String)>,
    /// How many topics each domain has.
    domain_topic_counts: FxHashMap<TopicId, usize>,
    /// The number of custom topics that the edge API serves.
    edge_topics: usize,
    subscriptions: FxHashMap<SubscriptionId, Arc<Subscription>>,
    subscriptions_by_creation: BTreeSet<CreationKey>,
    by_topic: FxHashMap<TopicId, BTreeMap<SubscriptionKey, Arc<Subscription>>>,
    /// The expiry times of subscriptions that have one.
    expiries: BTreeSet<(Timestamp, SubscriptionId)>,
}

/// Within a topic or domain, a subscription is identified by its domain topic and name, in lower
/// case.
type SubscriptionKey = (Option<String>, String);

fn key(subscription: &Subscription) -> SubscriptionKey {
    key_of(subscription.domain_topic.as_deref(), &subscription.name)
}

fn key_of(domain_topic: Option<&str>, name: &str) -> SubscriptionKey {
    (domain_topic.map(str::to_lowercase), name.to_lowercase())
}

fn source_key(source: &str) -> String {
    source.trim_end_matches('/').to_lowercase()
}

fn in_order_of_creation(mut subscriptions: Vec<Arc<Subscription>>) -> Vec<Arc<Subscription>> {
    subscriptions.sort_unstable_by_key(|subscription| CreationKey::of_subscription(subscription));
    subscriptions
}

/// The range after this key; without a key, the full range.
fn beyond<K>(after: Option<K>) -> (Bound<K>, Bound<K>) {
    (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)
}

/// The catalog in memory. Readers see each change as a whole. Names compare without case. Lists are
/// in order of creation, so that paging stays correct during changes: a reader who continues after
/// an item gets every item that stays exactly once.
pub struct CatalogDirectory {
    /// The prefix of full resource ids: `/subscriptions/<id>`.
    prefix: String,
    inner: RwLock<Inner>,
}

impl CatalogDirectory {
    pub fn new(prefix: String) -> CatalogDirectory {
        CatalogDirectory {
            prefix,
            inner: RwLock::default(),
        }
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().expect("no panic holds it")
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().expect("no panic holds it")
    }

    pub fn topic(&self, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.read();
        let id = inner
            .names
            .get(name)
            .or_else(|| inner.names.get(&name.to_lowercase()))?;
        inner.topics.get(&id).cloned()
    }

    pub fn domain(&self, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.read();
        let id = inner.domains.get(&name.to_lowercase())?;
        inner.topics.get(&id).cloned()
    }

    pub fn system_topic(&self, group: &str, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.read();
        let key = (name.to_lowercase(), group.to_lowercase());
        inner.topics.get(&inner.system_topics.get(&key)?).cloned()
    }

    /// The hidden topic that belongs to the subscriptions of another provider's resource.
    pub fn scope_by_source(&self, source: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.read();
        let id = inner.scopes.get(&source_key(source))?;
        inner.topics.get(&id).cloned()
    }

    pub fn topic_by_id(&self, id: TopicId) -> Option<Arc<TopicEntry>> {
        self.read().topics.get(&id).cloned()
    }

    /// System topics and scopes of a storage account, by the account's name.
    pub fn storage_topics(&self, account: &str) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        let of_account = |entry: &&Arc<TopicEntry>| {
            storage_account(&entry.full_id).is_some_and(|name| name.eq_ignore_ascii_case(account))
        };
        let ids = inner.system_topics.after(None).chain(inner.scopes.after(None));
        let found = ids.filter_map(|id| inner.topics.get(&id)).filter(of_account);
        let mut found: Vec<_> = found.cloned().collect();
        found.sort_by_key(|entry| entry.topic.id);
        found
    }

    /// The number of custom topics without those that the edge API serves.
    pub fn managed_topic_count(&self) -> usize {
        let inner = self.read();
        inner.names.len() - inner.edge_topics
    }

    /// The number of custom topics that the edge API serves.
    pub fn edge_topic_count(&self) -> usize {
        self.read().edge_topics
    }

    pub fn domain_count(&self) -> usize {
        self.read().domains.len()
    }

    pub fn system_topic_count(&self) -> usize {
        self.read().system_topics.len()
    }

    pub fn domain_topic_count(&self, domain: TopicId) -> usize {
        let inner = self.read();
        inner.domain_topic_counts.get(&domain).copied().unwrap_or(0)
    }

    /// The number of a topic's subscriptions; those of domain topics count for their domain.
    pub fn subscription_count(&self, topic: TopicId) -> usize {
        self.read().by_topic.get(&topic).map_or(0, BTreeMap::len)
    }

    /// All custom topics.
    pub fn topics(&self) -> Vec<Arc<TopicEntry>> {
        self.topics_after(None, usize::MAX)
    }

    /// Custom topics created after this one, at most `limit`.
    pub fn topics_after(&self, last: Option<CreationKey>, limit: usize) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        inner.entries(inner.names.after(last).take(limit))
    }

    pub fn domains(&self) -> Vec<Arc<TopicEntry>> {
        self.domains_after(None, usize::MAX)
    }

    pub fn domains_after(&self, last: Option<CreationKey>, limit: usize) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        inner.entries(inner.domains.after(last).take(limit))
    }

    pub fn system_topics(&self) -> Vec<Arc<TopicEntry>> {
        self.system_topics_after(None, usize::MAX)
    }

    pub fn system_topics_after(&self, last: Option<CreationKey>, limit: usize) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        inner.entries(inner.system_topics.after(last).take(limit))
    }

    /// All scopes: the hidden topics of other providers' resources.
    pub fn scopes(&self) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        inner.entries(inner.scopes.after(None))
    }

    pub fn domain_topic(&self, domain: TopicId, name: &str) -> Option<DomainTopic> {
        let key = (domain, name.to_lowercase());
        self.read().domain_topics.get(&key).cloned()
    }

    pub fn domain_topics(&self, domain: TopicId) -> Vec<DomainTopic> {
        self.domain_topics_after(domain, None, usize::MAX)
    }

    /// Domain topics created after this time and name; those of the same instant are ordered by
    /// name.
    pub fn domain_topics_after(
        &self,
        domain: TopicId,
        last: Option<(Timestamp, &str)>,
        limit: usize,
    ) -> Vec<DomainTopic> {
        let inner = self.read();
        let from = match last {
            Some((created, name)) => Bound::Excluded((domain, created, name.to_lowercase())),
            None => Bound::Included((domain, Timestamp::MIN, String::new())),
        };
        let from_here = inner.domain_topics_by_creation.range((from, Bound::Unbounded));
        let of_domain = from_here.take_while(|(of, _, _)| *of == domain).take(limit);
        let found =
            of_domain.filter_map(|(domain, _, name)| inner.domain_topics.get(&(*domain, name.clone())));
        found.cloned().collect()
    }

    /// The time of creation for a topic of a domain made now: after those that have this instant already, which lists
    /// would order by name. A clock may stand, and be coarse.
    pub(crate) fn domain_topic_created(&self, domain: TopicId, now: Timestamp) -> Timestamp {
        let inner = self.read();
        let instant = (domain, now, String::new())..(domain, now + Duration::from_millis(1), String::new());
        let mut same = inner.domain_topics_by_creation.range(instant);
        same.next_back()
            .map_or(now, |(_, last, _)| *last + Duration::from_nanos(1))
    }

    pub fn subscription(
        &self,
        topic: TopicId,
        domain_topic: Option<&str>,
        name: &str,
    ) -> Option<Arc<Subscription>> {
        let inner = self.read();
        let names = inner.by_topic.get(&topic)?;
        names.get(&key_of(domain_topic, name)).cloned()
    }

    pub fn subscription_by_id(&self, id: SubscriptionId) -> Option<Arc<Subscription>> {
        self.read().subscriptions.get(&id).cloned()
    }

    /// The subscriptions of a topic, including those of its domain topics.
    pub fn subscriptions(&self, topic: TopicId) -> Vec<Arc<Subscription>> {
        let inner = self.read();
        let names = inner.by_topic.get(&topic);
        in_order_of_creation(names.into_iter().flat_map(BTreeMap::values).cloned().collect())
    }

    /// The subscriptions of one domain topic, or (none) of the domain as a whole.
    pub fn subscriptions_of(&self, topic: TopicId, domain_topic: Option<&str>) -> Vec<Arc<Subscription>> {
        let domain_topic = domain_topic.map(str::to_lowercase);
        in_order_of_creation(self.read().of(topic, &domain_topic).cloned().collect())
    }

    /// All subscriptions of all topics.
    pub fn all_subscriptions(&self) -> Vec<Arc<Subscription>> {
        self.all_subscriptions_after(None, usize::MAX)
    }

    pub fn all_subscriptions_after(&self, last: Option<CreationKey>, limit: usize) -> Vec<Arc<Subscription>> {
        let inner = self.read();
        let found = inner.subscriptions_by_creation.range(beyond(last)).take(limit);
        let found = found.filter_map(|creation| inner.subscriptions.get(&SubscriptionId(creation.id)));
        found.cloned().collect()
    }

    /// Subscriptions that have expired, at most `limit`.
    pub(crate) fn expired(&self, now: Timestamp, limit: usize) -> Vec<SubscriptionId> {
        let inner = self.read();
        let over = inner.expiries.range(..=(now, SubscriptionId(u64::MAX)));
        over.take(limit).map(|(_, id)| *id).collect()
    }

    /// When the next subscription expires.
    pub(crate) fn next_expiry(&self) -> Option<Timestamp> {
        self.read().expiries.first().map(|(at, _)| *at)
    }

    /// Fills an empty directory at once.
    pub(crate) fn load(
        &self,
        topics: Vec<Topic>,
        domain_topics: Vec<DomainTopic>,
        subscriptions: Vec<Arc<Subscription>>,
    ) {
        let mut inner = self.write();
        let mut entries: FxHashMap<TopicId, TopicEntry> = FxHashMap::default();
        for topic in topics {
            inner.name(&topic);
            entries.insert(topic.id, TopicEntry::new(topic, &self.prefix));
        }
        for domain_topic in domain_topics {
            inner.add_domain_topic(domain_topic);
        }
        for subscription in subscriptions {
            inner.add(subscription);
        }
        let mut routes: Vec<SubscriptionRoute> = Vec::new();
        for (topic, names) in &inner.by_topic {
            let Some(entry) = entries.get_mut(topic) else {
                continue;
            };
            let mut names = names.iter().peekable();
            while let Some(((inside, _), subscription)) = names.next() {
                routes.push(SubscriptionRoute {
                    subscription: subscription.clone(),
                });
                if names.peek().is_none_or(|((next, _), _)| next != inside) {
                    routes.sort_by_key(|route| route.subscription.id);
                    entry.set_routes(inside.as_deref(), routes.drain(..).collect());
                }
            }
        }
        inner.topics = entries
            .into_iter()
            .map(|(id, entry)| (id, Arc::new(entry)))
            .collect();
    }

    pub(crate) fn put_topic(&self, topic: Topic) -> Arc<TopicEntry> {
        let mut inner = self.write();
        let id = topic.id;
        let mut entry = TopicEntry::new(topic, &self.prefix);
        if let Some(known) = inner.topics.get(&id).cloned() {
            inner.unname(&known.topic);
            let (topic, full_id) = (entry.topic, entry.full_id);
            entry = TopicEntry {
                topic,
                full_id,
                // The audience contains the topic's name.
                audience: OnceLock::new(),
                ..(*known).clone()
            };
        }
        inner.name(&entry.topic);
        let entry = Arc::new(entry);
        inner.topics.insert(id, entry.clone());
        entry
    }

    pub(crate) fn delete_topic(&self, id: TopicId) {
        let mut inner = self.write();
        if let Some(known) = inner.topics.remove(&id) {
            inner.unname(&known.topic);
        }
        // Only domains have domain topics.
        let beginning = (id, String::new());
        let of_domain = inner.domain_topics.range(beginning..);
        let keys: Vec<_> = of_domain
            .map(|(key, _)| key)
            .take_while(|(domain, _)| *domain == id)
            .cloned()
            .collect();
        for key in keys {
            inner.remove_domain_topic(key);
        }
        inner.domain_topic_counts.remove(&id);
        for of in inner.by_topic.remove(&id).into_iter().flatten() {
            inner.forget(&of.1);
        }
    }

    pub(crate) fn put_domain_topic(&self, domain_topic: DomainTopic) {
        self.write().add_domain_topic(domain_topic);
    }

    pub(crate) fn delete_domain_topic(&self, domain: TopicId, name: &str) {
        let mut inner = self.write();
        let was_there = inner.remove_domain_topic((domain, name.to_lowercase()));
        if let (true, Some(count)) = (was_there, inner.domain_topic_counts.get_mut(&domain)) {
            *count -= 1;
        }
    }

    pub(crate) fn put_subscription(&self, subscription: Arc<Subscription>) {
        let mut inner = self.write();
        let topic = subscription.topic;
        let inside = subscription.domain_topic.as_deref().map(str::to_lowercase);
        inner.add(subscription);
        inner.route(topic, &inside);
    }

    pub(crate) fn delete_subscription(&self, id: SubscriptionId) {
        let mut inner = self.write();
        let Some(known) = inner.subscriptions.get(&id).cloned() else {
            return;
        };
        inner.forget(&known);
        let (inside, name) = key(&known);
        if let Some(names) = inner.by_topic.get_mut(&known.topic) {
            names.remove(&(inside.clone(), name));
        }
        inner.route(known.topic, &inside);
    }
}

impl Inner {
    fn entries(&self, ids: impl Iterator<Item = TopicId>) -> Vec<Arc<TopicEntry>> {
        ids.filter_map(|id| self.topics.get(&id).cloned()).collect()
    }

    fn add_domain_topic(&mut self, domain_topic: DomainTopic) {
        let (domain, created) = (domain_topic.domain, domain_topic.created);
        let name = domain_topic.name.to_lowercase();
        let key = (domain, name.clone());
        match self.domain_topics.insert(key, domain_topic) {
            Some(known) => {
                let known = (domain, known.created, name.clone());
                self.domain_topics_by_creation.remove(&known);
            }
            None => *self.domain_topic_counts.entry(domain).or_default() += 1,
        }
        self.domain_topics_by_creation.insert((domain, created, name));
    }

    /// Returns whether the domain topic existed.
    fn remove_domain_topic(&mut self, key: (TopicId, String)) -> bool {
        let Some(known) = self.domain_topics.remove(&key) else {
            return false;
        };
        let (domain, name) = key;
        self.domain_topics_by_creation
            .remove(&(domain, known.created, name))
    }

    fn name(&mut self, topic: &Topic) {
        let name = topic.name.to_lowercase();
        match &topic.kind {
            TopicKind::Custom => {
                let replaced = self.names.insert(name, topic);
                let replaced = replaced.and_then(|id| self.topics.get(&id));
                if replaced.is_some_and(|replaced| replaced.topic.is_edge()) {
                    self.edge_topics -= 1;
                }
                self.edge_topics += usize::from(topic.is_edge());
                replaced.map(|replaced| replaced.topic.id)
            }
            TopicKind::Domain { .. } => self.domains.insert(name, topic),
            TopicKind::System { .. } => {
                let key = (name, topic.resource_group.to_lowercase());
                self.system_topics.insert(key, topic)
            }
            TopicKind::Scope { source, .. } => self.scopes.insert(source_key(source), topic),
        };
    }

    fn unname(&mut self, topic: &Topic) {
        let name = topic.name.to_lowercase();
        match &topic.kind {
            TopicKind::Custom => {
                if self.names.remove(&name, topic.id) && topic.is_edge() {
                    self.edge_topics -= 1;
                }
            }
            TopicKind::Domain { .. } => {
                self.domains.remove(&name, topic.id);
            }
            TopicKind::System { .. } => {
                let key = (name, topic.resource_group.to_lowercase());
                self.system_topics.remove(&key, topic.id);
            }
            TopicKind::Scope { source, .. } => {
                self.scopes.remove(&source_key(source), topic.id);
            }
        }
    }

    /// Adds a subscription to the indexes, or replaces it there.
    fn add(&mut self, subscription: Arc<Subscription>) {
        let id = subscription.id;
        if let Some(known) = self.subscriptions.get(&id) {
            self.subscriptions_by_creation
                .remove(&CreationKey::of_subscription(known));
            if let Some(at) = known.expires {
                self.expiries.remove(&(at, id));
            }
        }
        self.subscriptions_by_creation
            .insert(CreationKey::of_subscription(&subscription));
        self.expiries.extend(subscription.expires.map(|at| (at, id)));
        let names = self.by_topic.entry(subscription.topic).or_default();
        names.insert(key(&subscription), subscription.clone());
        self.subscriptions.insert(id, subscription);
    }

    fn forget(&mut self, subscription: &Subscription) {
        self.subscriptions.remove(&subscription.id);
        self.subscriptions_by_creation
            .remove(&CreationKey::of_subscription(subscription));
        if let Some(at) = subscription.expires {
            self.expiries.remove(&(at, subscription.id));
        }
    }

    /// The subscriptions of a topic as a whole, or of one domain topic.
    fn of<'a>(
        &'a self,
        topic: TopicId,
        inside: &'a Option<String>,
    ) -> impl Iterator<Item = &'a Arc<Subscription>> {
        let names = self.by_topic.get(&topic);
        let from_here = names.map(|names| names.range((inside.clone(), String::new())..));
        let here = from_here.into_iter().flatten();
        here.take_while(move |((of, _), _)| of == inside)
            .map(|(_, subscription)| subscription)
    }

    /// Rebuilds a topic's routes after one of its subscriptions changed.
    fn route(&mut self, topic: TopicId, inside: &Option<String>) {
        let Some(known) = self.topics.get(&topic) else {
            return;
        };
        let mut routes: Vec<SubscriptionRoute> = self
            .of(topic, inside)
            .map(|subscription| SubscriptionRoute {
                subscription: subscription.clone(),
            })
            .collect();
        routes.sort_by_key(|route| route.subscription.id);
        let mut entry = (**known).clone();
        entry.set_routes(inside.as_deref(), routes.into());
        self.topics.insert(topic, Arc::new(entry));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::event::EventSchema;

    use postrider_core::ids::Secret;
    use postrider_core::json::RawJson;
    use postrider_core::subscription::{Destination, ResourceOrigin};

    const DOMAIN: TopicKind = TopicKind::Domain {
        auto_create: true,
        auto_delete: true,
    };

    fn source(source: &str, scope: bool) -> TopicKind {
        let (source, topic_type) = (source.to_owned(), "t".to_owned());
        match scope {
            true => TopicKind::Scope { source, topic_type },
            false => TopicKind::System { source, topic_type },
        }
    }

    fn topic(id: u64, name: &str, kind: TopicKind) -> Topic {
        Topic {
            kind,
            resource_group: "RG1".into(),
            ..Topic::custom(TopicId(id), name, [Secret::new("a"), Secret::new("b")])
        }
    }

    fn subscription(id: u64, topic: u64, inside: Option<&str>, name: &str) -> Arc<Subscription> {
        Arc::new(Subscription {
            domain_topic: inside.map(str::to_owned),
            origin: ResourceOrigin::Azure,
            ..Subscription::new(
                SubscriptionId(id),
                TopicId(topic),
                name,
                Destination::EdgeHub { output: "o".into() },
            )
        })
    }

    fn expiring(id: u64, topic: u64, at: i64) -> Arc<Subscription> {
        let mut one = (*subscription(id, topic, None, &format!("e{id}"))).clone();
        one.expires = Some(Timestamp::from_secs(at));
        Arc::new(one)
    }

    fn directory() -> CatalogDirectory {
        CatalogDirectory::new("/subscriptions/x".into())
    }

    fn ids(entries: &[Arc<TopicEntry>]) -> Vec<u64> {
        entries.iter().map(|entry| entry.topic.id.0).collect()
    }

    fn numbers(subscriptions: &[Arc<Subscription>]) -> Vec<u64> {
        subscriptions.iter().map(|s| s.id.0).collect()
    }

    /// The subscriptions that get an event of a topic or domain topic.
    fn routed(directory: &CatalogDirectory, topic: u64, inside: Option<&str>) -> Vec<u64> {
        let entry = directory.topic_by_id(TopicId(topic)).unwrap();
        let mut router = EventRouter::new(&entry, Timestamp::from_secs(50), FilterBudget::UNLIMITED);
        let object = RawJson::parse(r#"{"subject":"s"}"#).unwrap();
        let set = router.route(&EventEnvelope::read(EventSchema::EventGrid, object, None), inside);
        let (sets, routed) = router.finish().unwrap();
        let found: Vec<u64> = sets[set as usize].iter().map(|id| id.0).collect();
        assert_eq!(routed.unmatched, usize::from(found.is_empty()));
        found
    }

    // Regression: each list was compared with all earlier ones; 5 000 events with as many lists
    // took 12.5 million comparisons.
    #[test]
    fn a_list_is_found_among_many_and_kept_once() {
        let (mut places, mut lists) = (VerdictListIndex::default(), Vec::new());
        let list = |n: u32| [n % 2, n, n + 1];
        for n in 0..100 {
            assert_eq!(places.number_of(&list(n), &mut lists), n);
            assert_eq!(places.number_of(&list(n / 2), &mut lists), n / 2);
            assert_eq!(places.number_of(&list(0), &mut lists), 0);
        }
        assert_eq!(lists.len(), 100);
        assert_eq!(
            places.by_hash.len(),
            100 - LISTS_COMPARED_MAX,
            "the others are compared"
        );
    }

    #[test]
    fn the_events_of_a_request_share_a_budget_beside_their_own() {
        let directory = directory();
        directory.put_topic(topic(1, "t", TopicKind::Custom));
        let mut filtering = Arc::unwrap_or_clone(subscription(2, 1, None, "s"));
        filtering.filter.included_event_types = Some(vec!["x".repeat(500)]);
        directory.put_subscription(Arc::new(filtering));
        let entry = directory.topic_by_id(TopicId(1)).unwrap();
        let event = format!(r#"{{"eventType":"{}"}}"#, "y".repeat(500));
        let event = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(&event).unwrap(), None);
        let over = |of_event: u64, of_request: u64| {
            let router = EventRouter::new(&entry, Timestamp::MIN, FilterBudget::bytes(of_event));
            let mut router = router.within(FilterBudget::bytes(of_request));
            for _ in 0..4 {
                router.route(&event, None);
            }
            router.finish().err()
        };
        let expected = |index, scope| Some(EventOverBudget { index, scope });
        assert_eq!(over(600, 4 * 600), None);
        assert_eq!(over(400, 4 * 600), expected(0, BudgetScope::Event));
        assert_eq!(over(600, 3 * 600), expected(3, BudgetScope::Request));
    }

    #[test]
    fn each_kind_has_names_of_its_own_and_they_compare_without_case() {
        let directory = directory();
        directory.put_topic(topic(1, "Same", TopicKind::Custom));
        directory.put_topic(topic(2, "same", DOMAIN));
        directory.put_topic(topic(3, "sAme", source("/a", false)));
        let mut elsewhere = topic(4, "same", source("/b", false));
        elsewhere.resource_group = "rg2".into();
        directory.put_topic(elsewhere);
        directory.put_topic(topic(5, "same", source("/C/d", true)));
        let id = |found: Option<Arc<TopicEntry>>| found.map(|entry| entry.topic.id.0);
        assert_eq!(id(directory.topic("SAME")), Some(1));
        assert_eq!(id(directory.domain("SAME")), Some(2));
        assert_eq!(id(directory.system_topic("rg1", "SAME")), Some(3));
        assert_eq!(id(directory.system_topic("RG2", "same")), Some(4));
        assert_eq!(id(directory.system_topic("rg3", "same")), None);
        assert_eq!(id(directory.scope_by_source("/c/D/")), Some(5));
        assert_eq!(ids(&directory.topics()), [1]);
        assert_eq!(ids(&directory.system_topics()), [3, 4]);
        for one in 1..=5 {
            directory.delete_topic(TopicId(one));
        }
        assert_eq!(id(directory.topic("same")), None);
        assert_eq!(id(directory.scope_by_source("/c/d")), None);
        assert!(directory.system_topics().is_empty() && directory.domains().is_empty());
    }

    #[test]
    fn a_name_that_has_passed_on_stays_with_the_other() {
        let directory = directory();
        directory.put_topic(topic(1, "a", TopicKind::Custom));
        directory.put_topic(topic(2, "A", TopicKind::Custom));
        directory.delete_topic(TopicId(1));
        assert_eq!(ids(&directory.topics()), [2]);
        directory.put_topic(topic(2, "b", TopicKind::Custom));
        assert!(directory.topic("a").is_none());
        assert_eq!(ids(&directory.topics()), [2]);
    }

    #[test]
    fn lists_are_in_order_of_creation_and_read_in_pages() {
        let directory = directory();
        let at = Timestamp::from_secs;
        let key = |seconds: i64, id: u64| {
            let created = at(seconds);
            Some(CreationKey { created, id })
        };
        // Neither names nor ids follow the order of creation; two topics were created at the same
        // instant.
        for (id, name, made) in [(1, "b", 30), (2, "C", 10), (3, "a", 20), (4, "d", 20)] {
            let of_kind = |id: u64, kind: TopicKind| {
                let mut topic = topic(id, name, kind);
                topic.created = at(made);
                directory.put_topic(topic);
            };
            of_kind(id, TopicKind::Custom);
            of_kind(10 + id, DOMAIN);
            of_kind(20 + id, source("/x", false));
        }
        assert_eq!(ids(&directory.topics()), [2, 3, 4, 1]);
        assert_eq!(ids(&directory.topics_after(key(20, 3), 1)), [4]);
        // Deleting a topic between two pages makes no other topic disappear or appear twice.
        directory.delete_topic(TopicId(3));
        assert_eq!(ids(&directory.topics_after(key(20, 3), 9)), [4, 1]);
        assert_eq!(ids(&directory.domains_after(key(10, 12), 2)), [13, 14]);
        assert_eq!(ids(&directory.system_topics_after(key(20, 24), 9)), [21]);
        assert!(directory.topics_after(key(30, 1), 9).is_empty());
        // A change keeps a topic's position in the list; a name that passes to another topic leaves
        // with the old one.
        let mut changed = topic(2, "c", TopicKind::Custom);
        changed.created = at(10);
        directory.put_topic(changed);
        let mut taken = topic(5, "D", TopicKind::Custom);
        taken.created = at(40);
        directory.put_topic(taken);
        assert_eq!(ids(&directory.topics()), [2, 1, 5]);

        for (id, inside, name, made) in [
            (1, None, "z", 5),
            (2, Some("T"), "a", 4),
            (3, Some("s"), "b", 3),
            (4, None, "y", 4),
        ] {
            let made = Subscription {
                created: at(made),
                ..(*subscription(id, 11, inside, name)).clone()
            };
            directory.put_subscription(Arc::new(made));
        }
        let domain = TopicId(11);
        assert_eq!(numbers(&directory.subscriptions(domain)), [3, 2, 4, 1]);
        assert_eq!(numbers(&directory.subscriptions_of(domain, None)), [4, 1]);
        assert_eq!(numbers(&directory.subscriptions_of(domain, Some("t"))), [2]);
        assert_eq!(numbers(&directory.all_subscriptions()), [3, 2, 4, 1]);
        let rest = directory.all_subscriptions_after(key(4, 2), 1);
        assert_eq!(numbers(&rest), [4]);
        directory.delete_subscription(SubscriptionId(4));
        assert_eq!(numbers(&directory.all_subscriptions()), [3, 2, 1]);

        for (domain, name, made) in [
            (11, "b", 2),
            (11, "A", 3),
            (12, "a", 1),
            (11, "c", 2),
            (11, "d", 1),
        ] {
            directory.put_domain_topic(DomainTopic {
                domain: TopicId(domain),
                name: name.into(),
                automatic: false,
                created: at(made),
            });
        }
        let names =
            |topics: Vec<DomainTopic>| -> Vec<String> { topics.into_iter().map(|t| t.name).collect() };
        assert_eq!(names(directory.domain_topics(domain)), ["d", "b", "c", "A"]);
        assert_eq!(directory.domain_topic_created(domain, at(4)), at(4));
        assert_eq!(
            directory.domain_topic_created(domain, at(3)),
            at(3) + Duration::from_nanos(1)
        );
        let rest = directory.domain_topics_after(domain, Some((at(2), "B")), 1);
        assert_eq!(names(rest), ["c"]);
        directory.delete_domain_topic(domain, "B");
        assert_eq!(names(directory.domain_topics(domain)), ["d", "c", "A"]);
        directory.delete_topic(domain);
        assert!(directory.domain_topics(domain).is_empty());
        assert_eq!(names(directory.domain_topics(TopicId(12))), ["a"]);
        assert!(directory.subscription_by_id(SubscriptionId(1)).is_none());
        assert!(directory.all_subscriptions().is_empty());
    }

    #[test]
    fn events_of_a_domain_go_to_its_subscriptions_and_those_of_their_topic() {
        let directory = directory();
        directory.put_topic(topic(1, "d", DOMAIN));
        assert_eq!(routed(&directory, 1, Some("a")), [0u64; 0]);
        for (id, inside, name) in [
            (9, Some("A"), "s"),
            (3, None, "s"),
            (5, Some("a"), "t"),
            (7, Some("b"), "s"),
        ] {
            directory.put_subscription(subscription(id, 1, inside, name));
        }
        assert_eq!(
            routed(&directory, 1, Some("a")),
            [3, 5, 9],
            "in the order of their ids"
        );
        assert_eq!(routed(&directory, 1, Some("B")), [3, 7]);
        assert_eq!(routed(&directory, 1, Some("c")), [3]);
        assert_eq!(routed(&directory, 1, None), [3]);
        directory.delete_subscription(SubscriptionId(5));
        assert_eq!(routed(&directory, 1, Some("a")), [3, 9]);
        directory.delete_subscription(SubscriptionId(9));
        directory.delete_subscription(SubscriptionId(7));
        assert_eq!(routed(&directory, 1, Some("a")), [3]);
        // The topic changes and keeps its routes.
        let mut changed = topic(1, "d", DOMAIN);
        changed.location = "elsewhere".into();
        directory.put_topic(changed);
        assert_eq!(routed(&directory, 1, Some("a")), [3]);
    }

    #[test]
    fn everything_at_once_is_the_same_as_one_by_one() {
        let topics = [
            topic(1, "d", DOMAIN),
            topic(2, "t", TopicKind::Custom),
            topic(3, "s", source("/s", true)),
        ];
        let mut subscriptions = vec![
            expiring(4, 2, 60),
            expiring(5, 2, 40),
            subscription(6, 3, None, "x"),
        ];
        for id in 10..500 {
            let inside = (id % 3 > 0).then(|| format!("T{}", id % 97));
            subscriptions.push(subscription(id, 1, inside.as_deref(), &format!("n{id}")));
        }
        let one_by_one = directory();
        topics
            .iter()
            .for_each(|topic| drop(one_by_one.put_topic(topic.clone())));
        subscriptions
            .iter()
            .for_each(|s| one_by_one.put_subscription(s.clone()));
        let at_once = directory();
        at_once.load(topics.to_vec(), Vec::new(), subscriptions);
        for directory in [&at_once, &one_by_one] {
            assert_eq!(routed(directory, 2, None), [4], "the other one has expired");
            assert_eq!(directory.next_expiry(), Some(Timestamp::from_secs(40)));
        }
        for n in 0..98 {
            let inside = format!("t{n}");
            let found = routed(&at_once, 1, Some(&inside));
            assert_eq!(found, routed(&one_by_one, 1, Some(&inside)));
            assert!(found.len() > 160, "{n}: those of the whole domain are among them");
        }
        assert_eq!(
            numbers(&at_once.subscriptions(TopicId(1))),
            numbers(&one_by_one.subscriptions(TopicId(1)))
        );
        assert_eq!(ids(&at_once.scopes()), [3]);
    }

    #[test]
    fn who_expires_next_is_known() {
        let directory = directory();
        let at = Timestamp::from_secs;
        directory.put_topic(topic(1, "t", TopicKind::Custom));
        for (id, expires) in [(1, 30), (2, 10), (3, 20), (4, 10)] {
            directory.put_subscription(expiring(id, 1, expires));
        }
        assert_eq!(directory.next_expiry(), Some(at(10)));
        assert_eq!(directory.expired(at(10), 9), [2, 4].map(SubscriptionId));
        assert_eq!(directory.expired(at(99), 3).len(), 3);
        directory.put_subscription(expiring(2, 1, 40));
        directory.delete_subscription(SubscriptionId(4));
        assert_eq!(directory.next_expiry(), Some(at(20)));
        directory.put_subscription(subscription(3, 1, None, "e3"));
        assert_eq!(directory.next_expiry(), Some(at(30)));
        directory.delete_topic(TopicId(1));
        assert_eq!(directory.next_expiry(), None);
    }

    #[test]
    fn storage_accounts_are_found_by_their_name() {
        let directory = directory();
        let account = |name: &str| {
            format!("/subscriptions/x/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/{name}")
        };
        directory.put_topic(topic(1, "a", source(&account("One"), false)));
        directory.put_topic(topic(2, "b", source(&account("two"), false)));
        directory.put_topic(topic(3, "c", source(&account("ONE"), true)));
        directory.put_topic(topic(4, "one", TopicKind::Custom));
        assert_eq!(ids(&directory.storage_topics("one")), [1, 3]);
        assert_eq!(storage_account(&account("One")), Some("One"));
        for other in ["", "/", "one", "/subscriptions/x", &account("")] {
            assert_eq!(storage_account(other), None, "{other}");
        }
    }
}
