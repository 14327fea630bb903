//! The catalogue in memory, in the form that publishing needs: topics by name, each with its routes.

use crate::counters::Published;
use crate::recorder::{Audience, Verdict, Verdicts};
use postrider_core::envelope::Envelope;
use postrider_core::filter::{FilterBudget, FilterBudgetExceeded, FilterInput};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::subscription::{DomainTopic, Subscription, Topic, TopicKind};
use postrider_core::time::Timestamp;
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::ops::Bound;
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A topic with everything that accepting an event needs.
#[derive(Clone, Debug)]
pub struct TopicEntry {
    pub topic: Arc<Topic>,
    /// The full resource id, as events carry it.
    pub full_id: Arc<str>,
    /// Of the topic or domain as a whole.
    routes: Arc<[Route]>,
    /// Of the topics inside a domain.
    inside: Inside,
    /// All routes at once, when none of them looks at the event.
    open: Option<Arc<[SubscriptionId]>>,
    /// Subscriptions of the topic or domain as a whole that look at events.
    filtering: usize,
    /// Made when it is first asked for: without a recorder nobody does.
    audience: OnceLock<Arc<Audience>>,
    pub published: Arc<Published>,
}

/// One subscription as publishing sees it.
#[derive(Clone, Debug)]
pub struct Route {
    pub subscription: Arc<Subscription>,
}

impl Route {
    fn looks_at_nothing(&self) -> bool {
        let subscription = &*self.subscription;
        subscription.filter.is_open() && subscription.expires.is_none()
    }
}

/// Whether an event of its topic, or of its domain topic, goes to the subscription, and if not, why.
fn verdict<'a>(
    subscription: &'a Subscription,
    event: &mut FilterInput<'a>,
    now: Timestamp,
) -> Result<Verdict, FilterBudgetExceeded> {
    if subscription.expires.is_some_and(|at| at <= now) {
        return Ok(Verdict::Expired);
    }
    if subscription.filter.is_open() {
        return Ok(Verdict::Matched);
    }
    let mismatch = subscription.filter.first_mismatch(event)?;
    Ok(mismatch.map_or(Verdict::Matched, Verdict::from))
}

/// The routes of a domain's topics, by name in lower case. A change copies one part in so many: a domain may have
/// a hundred thousand of them.
#[derive(Clone, Debug, Default)]
struct Inside {
    parts: Option<Box<[Arc<Part>]>>,
    /// All routes together.
    count: usize,
}

type Part = FxHashMap<Arc<str>, Arc<[Route]>>;

const PARTS: usize = 256;

fn part_of(name: &str) -> usize {
    let hash = FxBuildHasher.hash_one(name);
    (hash >> 32) as usize % PARTS
}

impl Inside {
    fn is_empty(&self) -> bool {
        self.parts.is_none()
    }

    fn get(&self, name: &str) -> &[Route] {
        let part = self.parts.as_ref().map(|parts| &parts[part_of(name)]);
        part.and_then(|part| part.get(name)).map_or(&[], |routes| routes)
    }

    fn set(&mut self, name: &str, routes: Arc<[Route]>) {
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

    fn all(&self) -> impl Iterator<Item = &Route> {
        let parts = self.parts.iter().flatten();
        parts.flat_map(|part| part.values().flat_map(|routes| routes.iter()))
    }
}

/// A domain with more subscriptions of its topics than this has no audience with all of them in it: every event
/// would be given a verdict for each.
const AUDIENCE_INSIDE_MAX: usize = 128;

impl TopicEntry {
    fn new(topic: Topic, prefix: &str) -> TopicEntry {
        TopicEntry {
            full_id: full_id(&topic, prefix).into(),
            topic: Arc::new(topic),
            routes: Arc::default(),
            inside: Inside::default(),
            open: Some(Arc::default()),
            filtering: 0,
            audience: OnceLock::new(),
            published: Arc::default(),
        }
    }

    /// The same topic with other routes, of the whole of it or of one of the topics inside.
    fn set_routes(&mut self, inside: Option<&str>, routes: Arc<[Route]>) {
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

    /// Who hears of its events, by id, for the recorder. Of a large domain only the subscriptions of the whole.
    pub fn audience(&self) -> &Arc<Audience> {
        self.audience.get_or_init(|| {
            let inside = (!self.is_large()).then(|| self.inside.all());
            let routes = self.routes.iter().chain(inside.into_iter().flatten());
            let mut all: Vec<_> = routes.map(|route| route.subscription.clone()).collect();
            all.sort_by_key(|subscription| subscription.id);
            Arc::new(Audience::new(&self.topic, &self.full_id, all))
        })
    }

    /// How many bytes filters may look at when this many are published: an upper estimate for events whose
    /// subscriptions have one filter each.
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

/// The name of the storage account that a resource id names, if it names one. Resource ids compare without case.
pub fn storage_account(id: &str) -> Option<&str> {
    let mut parts = id.rsplit('/');
    let name = parts.next().filter(|name| !name.is_empty())?;
    let mut is = |word: &str| parts.next().is_some_and(|part| part.eq_ignore_ascii_case(word));
    (is("storageAccounts") && is("Microsoft.Storage")).then_some(name)
}

/// Decides for the events of one request who gets them, and keeps the distinct answers.
pub struct Router<'a> {
    topic: &'a TopicEntry,
    now: Timestamp,
    /// For each event.
    budget: FilterBudget,
    /// The first event whose filters would have taken more than the budget.
    over_budget: Option<usize>,
    routed: usize,
    sets: MatchedSets,
    found: Vec<SubscriptionId>,
    pub unmatched: usize,
    /// What the recorder wants to know, if there is one.
    noting: Option<Noting>,
}

#[derive(Default)]
struct Noting {
    verdicts: Verdicts,
    list: Vec<Verdict>,
    /// In a large domain: the subscriptions of the domain topics that events were published to so far, and where
    /// those of each begin.
    visited: Vec<Arc<Subscription>>,
    begins: FxHashMap<String, usize>,
}

impl Noting {
    /// Notes the list as that of the next event.
    fn finish_event(&mut self) {
        let lists = &mut self.verdicts.lists;
        let known = lists.iter().rposition(|list| **list == *self.list);
        let number = known.unwrap_or_else(|| {
            lists.push(self.list.as_slice().into());
            lists.len() - 1
        });
        self.verdicts.of_event.push(number as u32);
    }
}

/// What routing the events of one request has come to, besides the sets.
#[derive(Default)]
pub struct Routed {
    /// Events that nobody wants.
    pub unmatched: usize,
    pub verdicts: Verdicts,
    /// Where it is not the topic's own.
    pub(crate) audience: Option<Arc<Audience>>,
}

/// The distinct sets of subscriptions that the events of one request go to.
pub type MatchedSets = Vec<Box<[SubscriptionId]>>;

/// Nothing was routed: the filters of this event would have taken more than their budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventOverBudget {
    pub index: usize,
}

impl<'a> Router<'a> {
    pub fn new(topic: &'a TopicEntry, now: Timestamp, budget: FilterBudget) -> Router<'a> {
        Router {
            topic,
            now,
            budget,
            over_budget: None,
            routed: 0,
            sets: Vec::new(),
            found: Vec::new(),
            unmatched: 0,
            noting: None,
        }
    }

    /// One that notes its verdicts for a recorder.
    pub fn noting(topic: &'a TopicEntry, now: Timestamp, budget: FilterBudget) -> Router<'a> {
        Router {
            noting: Some(Noting::default()),
            ..Router::new(topic, now, budget)
        }
    }

    /// The number of the set of subscriptions that this event goes to. Once an event has been over its
    /// budget the number means nothing, and [`Router::finish`] fails.
    pub fn route(&mut self, event: &Envelope<'_>, domain_topic: Option<&str>) -> u32 {
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
            self.over_budget = Some(self.routed - 1);
            return 0;
        }
        self.unmatched += usize::from(self.found.is_empty());
        // Neighbouring events mostly go to the same places.
        let known = self.sets.iter().rposition(|set| **set == *self.found);
        known.unwrap_or_else(|| {
            self.sets.push(self.found.as_slice().into());
            self.sets.len() - 1
        }) as u32
    }

    /// Lists the subscriptions that the event goes to in `found`. `domain_topic` in lower case; empty outside
    /// of domains.
    fn find_subscriptions(
        &mut self,
        event: &Envelope<'_>,
        topic_id: &str,
        domain_topic: String,
    ) -> Result<(), FilterBudgetExceeded> {
        let topic = self.topic;
        let inside = match domain_topic.is_empty() {
            true => &[],
            false => topic.inside.get(&domain_topic),
        };
        let mut input = FilterInput::new(event, topic_id, self.budget);
        self.found.clear();
        match &mut self.noting {
            None => {
                for route in topic.routes.iter().chain(inside) {
                    if verdict(&route.subscription, &mut input, self.now)? == Verdict::Matched {
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
                        true => Verdict::DomainTopic,
                        false => verdict(subscription, &mut input, self.now)?,
                    };
                    noting.list.push(verdict);
                    if verdict == Verdict::Matched {
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
                    if verdict == Verdict::Matched {
                        self.found.push(route.subscription.id);
                    }
                    if at == whole && told {
                        noting.list.resize(whole + begin, Verdict::DomainTopic);
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
        Ok(())
    }

    /// The sets, and what accepting the events needs besides; or the index of the first event whose filters
    /// would have taken more than the budget.
    pub fn finish(self) -> Result<(MatchedSets, Routed), EventOverBudget> {
        if let Some(index) = self.over_budget {
            return Err(EventOverBudget { index });
        }
        let mut routed = Routed {
            unmatched: self.unmatched,
            ..Routed::default()
        };
        if let Some(noting) = self.noting {
            if !noting.visited.is_empty() {
                let whole = self.topic.routes.iter().map(|route| route.subscription.clone());
                let all = whole.chain(noting.visited).collect();
                let audience = Audience::new(&self.topic.topic, &self.topic.full_id, all);
                routed.audience = Some(Arc::new(audience));
            }
            routed.verdicts = noting.verdicts;
        }
        Ok((self.sets, routed))
    }
}

#[derive(Default)]
struct Inner {
    topics: FxHashMap<TopicId, Arc<TopicEntry>>,
    /// Custom topics by name, in lower case.
    names: BTreeMap<String, TopicId>,
    domains: BTreeMap<String, TopicId>,
    /// By name and resource group.
    system_topics: BTreeMap<(String, String), TopicId>,
    /// By their source.
    scopes: BTreeMap<String, TopicId>,
    domain_topics: BTreeMap<(TopicId, String), DomainTopic>,
    subscriptions: BTreeMap<SubscriptionId, Arc<Subscription>>,
    by_topic: FxHashMap<TopicId, BTreeMap<SubscriptionKey, Arc<Subscription>>>,
    /// When subscriptions expire that do.
    expiries: BTreeSet<(Timestamp, SubscriptionId)>,
}

/// Within a topic or domain a subscription is known by its domain topic and name, in lower case.
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

/// Everything after this key, or everything.
fn beyond<K>(after: Option<K>) -> (Bound<K>, Bound<K>) {
    (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)
}

/// Readers see each change whole. Names compare without case; lists are ordered by name, so that one can be read
/// in pages while others write: whoever asks for what comes after a name gets each that stays once.
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

    /// What full ids begin with.
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
        inner.topics.get(id).cloned()
    }

    pub fn domain(&self, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.read();
        let id = inner.domains.get(&name.to_lowercase())?;
        inner.topics.get(id).cloned()
    }

    pub fn system_topic(&self, group: &str, name: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.read();
        let key = (name.to_lowercase(), group.to_lowercase());
        inner.topics.get(inner.system_topics.get(&key)?).cloned()
    }

    /// The unseen topic behind the subscriptions of a resource.
    pub fn scope_by_source(&self, source: &str) -> Option<Arc<TopicEntry>> {
        let inner = self.read();
        inner.topics.get(inner.scopes.get(&source_key(source))?).cloned()
    }

    pub fn topic_by_id(&self, id: TopicId) -> Option<Arc<TopicEntry>> {
        self.read().topics.get(&id).cloned()
    }

    /// System topics of a storage account and scopes that are one, by the account's name.
    pub fn storage_topics(&self, account: &str) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        let of_account = |entry: &&Arc<TopicEntry>| {
            storage_account(&entry.full_id).is_some_and(|name| name.eq_ignore_ascii_case(account))
        };
        let ids = inner.system_topics.values().chain(inner.scopes.values());
        let found = ids.filter_map(|id| inner.topics.get(id)).filter(of_account);
        let mut found: Vec<_> = found.cloned().collect();
        found.sort_by_key(|entry| entry.topic.id);
        found
    }

    /// All custom topics, by name.
    pub fn topics(&self) -> Vec<Arc<TopicEntry>> {
        self.topics_after(None, usize::MAX)
    }

    /// Custom topics whose names come after this one, at most so many.
    pub fn topics_after(&self, name: Option<&str>, limit: usize) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        let ids = inner.names.range(beyond(name.map(str::to_lowercase)));
        inner.entries(ids.map(|(_, id)| id).take(limit))
    }

    /// All domains, by name.
    pub fn domains(&self) -> Vec<Arc<TopicEntry>> {
        self.domains_after(None, usize::MAX)
    }

    pub fn domains_after(&self, name: Option<&str>, limit: usize) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        let ids = inner.domains.range(beyond(name.map(str::to_lowercase)));
        inner.entries(ids.map(|(_, id)| id).take(limit))
    }

    /// All system topics, by name, those of the same name by resource group.
    pub fn system_topics(&self) -> Vec<Arc<TopicEntry>> {
        self.system_topics_after(None, usize::MAX)
    }

    /// Those that come after the one of this resource group and name.
    pub fn system_topics_after(
        &self,
        group_and_name: Option<(&str, &str)>,
        limit: usize,
    ) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        let after = group_and_name.map(|(group, name)| (name.to_lowercase(), group.to_lowercase()));
        let ids = inner.system_topics.range(beyond(after));
        inner.entries(ids.map(|(_, id)| id).take(limit))
    }

    /// All unseen topics, by source.
    pub fn scopes(&self) -> Vec<Arc<TopicEntry>> {
        let inner = self.read();
        inner.entries(inner.scopes.values())
    }

    pub fn domain_topic(&self, domain: TopicId, name: &str) -> Option<DomainTopic> {
        let key = (domain, name.to_lowercase());
        self.read().domain_topics.get(&key).cloned()
    }

    /// The topics of a domain, by name.
    pub fn domain_topics(&self, domain: TopicId) -> Vec<DomainTopic> {
        self.domain_topics_after(domain, None, usize::MAX)
    }

    pub fn domain_topics_after(&self, domain: TopicId, name: Option<&str>, limit: usize) -> Vec<DomainTopic> {
        let inner = self.read();
        let from = match name {
            Some(name) => Bound::Excluded((domain, name.to_lowercase())),
            None => Bound::Included((domain, String::new())),
        };
        let from_here = inner.domain_topics.range((from, Bound::Unbounded));
        let of_domain = from_here.take_while(|((of, _), _)| *of == domain);
        of_domain.take(limit).map(|(_, topic)| topic.clone()).collect()
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

    /// The subscriptions of a topic, by name; after those of a domain come those of its topics.
    pub fn subscriptions(&self, topic: TopicId) -> Vec<Arc<Subscription>> {
        self.subscriptions_after(topic, None, usize::MAX)
    }

    /// Those that come after the one of this domain topic and name.
    pub fn subscriptions_after(
        &self,
        topic: TopicId,
        domain_topic_and_name: Option<(Option<&str>, &str)>,
        limit: usize,
    ) -> Vec<Arc<Subscription>> {
        let inner = self.read();
        let Some(names) = inner.by_topic.get(&topic) else {
            return Vec::new();
        };
        let after = domain_topic_and_name.map(|(domain_topic, name)| key_of(domain_topic, name));
        let found = names.range(beyond(after)).take(limit);
        found.map(|(_, subscription)| subscription.clone()).collect()
    }

    /// The subscriptions of one topic inside a domain, or (none) of the domain itself, by name.
    pub fn subscriptions_of(&self, topic: TopicId, domain_topic: Option<&str>) -> Vec<Arc<Subscription>> {
        let domain_topic = domain_topic.map(str::to_lowercase);
        self.read().of(topic, &domain_topic).cloned().collect()
    }

    /// All subscriptions of all topics, in the order of their ids.
    pub fn all_subscriptions(&self) -> Vec<Arc<Subscription>> {
        self.all_subscriptions_after(None, usize::MAX)
    }

    pub fn all_subscriptions_after(
        &self,
        id: Option<SubscriptionId>,
        limit: usize,
    ) -> Vec<Arc<Subscription>> {
        let inner = self.read();
        let found = inner.subscriptions.range(beyond(id)).take(limit);
        found.map(|(_, subscription)| subscription.clone()).collect()
    }

    /// Subscriptions whose time is over, at most so many.
    pub(crate) fn expired(&self, now: Timestamp, limit: usize) -> Vec<SubscriptionId> {
        let inner = self.read();
        let over = inner.expiries.range(..=(now, SubscriptionId(u64::MAX)));
        over.take(limit).map(|(_, id)| *id).collect()
    }

    /// When the next subscription expires.
    pub(crate) fn next_expiry(&self) -> Option<Timestamp> {
        self.read().expiries.first().map(|(at, _)| *at)
    }

    /// Everything at once, when there is nothing yet.
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
            let key = (domain_topic.domain, domain_topic.name.to_lowercase());
            inner.domain_topics.insert(key, domain_topic);
        }
        for subscription in subscriptions {
            inner.add(subscription);
        }
        let mut routes: Vec<Route> = Vec::new();
        for (topic, names) in &inner.by_topic {
            let Some(entry) = entries.get_mut(topic) else {
                continue;
            };
            let mut names = names.iter().peekable();
            while let Some(((inside, _), subscription)) = names.next() {
                routes.push(Route {
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
                // It has the topic's name in it.
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
        // None but domains have any.
        let beginning = (id, String::new());
        let of_domain = inner.domain_topics.range(beginning..);
        let keys: Vec<_> = of_domain
            .map(|(key, _)| key)
            .take_while(|(domain, _)| *domain == id)
            .cloned()
            .collect();
        for key in keys {
            inner.domain_topics.remove(&key);
        }
        for of in inner.by_topic.remove(&id).into_iter().flatten() {
            inner.forget(&of.1);
        }
    }

    pub(crate) fn put_domain_topic(&self, domain_topic: DomainTopic) {
        let key = (domain_topic.domain, domain_topic.name.to_lowercase());
        self.write().domain_topics.insert(key, domain_topic);
    }

    pub(crate) fn delete_domain_topic(&self, domain: TopicId, name: &str) {
        self.write().domain_topics.remove(&(domain, name.to_lowercase()));
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
    fn entries<'a>(&self, ids: impl Iterator<Item = &'a TopicId>) -> Vec<Arc<TopicEntry>> {
        ids.filter_map(|id| self.topics.get(id).cloned()).collect()
    }

    fn name(&mut self, topic: &Topic) {
        let name = topic.name.to_lowercase();
        match &topic.kind {
            TopicKind::Custom => self.names.insert(name, topic.id),
            TopicKind::Domain { .. } => self.domains.insert(name, topic.id),
            TopicKind::System { .. } => {
                let key = (name, topic.resource_group.to_lowercase());
                self.system_topics.insert(key, topic.id)
            }
            TopicKind::Scope { source, .. } => self.scopes.insert(source_key(source), topic.id),
        };
    }

    fn unname(&mut self, topic: &Topic) {
        // A name may have passed on to another topic.
        fn remove<K: Ord>(names: &mut BTreeMap<K, TopicId>, key: &K, id: TopicId) {
            if names.get(key) == Some(&id) {
                names.remove(key);
            }
        }
        let name = topic.name.to_lowercase();
        match &topic.kind {
            TopicKind::Custom => remove(&mut self.names, &name, topic.id),
            TopicKind::Domain { .. } => remove(&mut self.domains, &name, topic.id),
            TopicKind::System { .. } => {
                let key = (name, topic.resource_group.to_lowercase());
                remove(&mut self.system_topics, &key, topic.id);
            }
            TopicKind::Scope { source, .. } => remove(&mut self.scopes, &source_key(source), topic.id),
        }
    }

    /// Puts a subscription on the lists, or replaces it there.
    fn add(&mut self, subscription: Arc<Subscription>) {
        let id = subscription.id;
        if let Some(known) = self.subscriptions.get(&id)
            && let Some(at) = known.expires
        {
            self.expiries.remove(&(at, id));
        }
        self.expiries.extend(subscription.expires.map(|at| (at, id)));
        let names = self.by_topic.entry(subscription.topic).or_default();
        names.insert(key(&subscription), subscription.clone());
        self.subscriptions.insert(id, subscription);
    }

    fn forget(&mut self, subscription: &Subscription) {
        self.subscriptions.remove(&subscription.id);
        if let Some(at) = subscription.expires {
            self.expiries.remove(&(at, subscription.id));
        }
    }

    /// The subscriptions of a topic as a whole, or of one inside a domain, by name.
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

    /// Makes a topic's routes anew after one of its subscriptions changed.
    fn route(&mut self, topic: TopicId, inside: &Option<String>) {
        let Some(known) = self.topics.get(&topic) else {
            return;
        };
        let mut routes: Vec<Route> = self
            .of(topic, inside)
            .map(|subscription| Route {
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
    use postrider_core::event::Schema;

    use postrider_core::ids::Secret;
    use postrider_core::json::Raw;
    use postrider_core::subscription::{Destination, Origin};

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
            origin: Origin::Azure,
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

    fn directory() -> Directory {
        Directory::new("/subscriptions/x".into())
    }

    fn ids(entries: &[Arc<TopicEntry>]) -> Vec<u64> {
        entries.iter().map(|entry| entry.topic.id.0).collect()
    }

    fn numbers(subscriptions: &[Arc<Subscription>]) -> Vec<u64> {
        subscriptions.iter().map(|s| s.id.0).collect()
    }

    /// Who gets an event of a topic, or of one inside it.
    fn routed(directory: &Directory, topic: u64, inside: Option<&str>) -> Vec<u64> {
        let entry = directory.topic_by_id(TopicId(topic)).unwrap();
        let mut router = Router::new(&entry, Timestamp::from_secs(50), FilterBudget::UNLIMITED);
        let object = Raw::parse(r#"{"subject":"s"}"#).unwrap();
        let set = router.route(&Envelope::read(Schema::EventGrid, object, None), inside);
        let (sets, routed) = router.finish().unwrap();
        let found: Vec<u64> = sets[set as usize].iter().map(|id| id.0).collect();
        assert_eq!(routed.unmatched, usize::from(found.is_empty()));
        found
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
        assert_eq!(
            ids(&directory.system_topics()),
            [3, 4],
            "by group where names are the same"
        );
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
    fn lists_are_read_in_pages() {
        let directory = directory();
        for (id, name) in [(1, "b"), (2, "C"), (3, "a"), (4, "d")] {
            directory.put_topic(topic(id, name, TopicKind::Custom));
            directory.put_topic(topic(10 + id, name, DOMAIN));
            directory.put_topic(topic(20 + id, name, source("/x", false)));
        }
        assert_eq!(ids(&directory.topics()), [3, 1, 2, 4]);
        assert_eq!(ids(&directory.topics_after(Some("B"), 1)), [2]);
        // What was there goes while someone pages; nothing is left out and nothing comes twice.
        directory.delete_topic(TopicId(1));
        assert_eq!(ids(&directory.topics_after(Some("b"), 9)), [2, 4]);
        assert_eq!(ids(&directory.domains_after(Some("a"), 2)), [11, 12]);
        assert_eq!(ids(&directory.system_topics_after(Some(("rg1", "c")), 9)), [24]);
        assert!(directory.topics_after(Some("d"), 9).is_empty());

        for (id, inside, name) in [
            (1, None, "z"),
            (2, Some("T"), "a"),
            (3, Some("s"), "b"),
            (4, None, "y"),
        ] {
            directory.put_subscription(subscription(id, 11, inside, name));
        }
        let domain = TopicId(11);
        assert_eq!(numbers(&directory.subscriptions(domain)), [4, 1, 3, 2]);
        assert_eq!(
            numbers(&directory.subscriptions_after(domain, Some((None, "Z")), 1)),
            [3]
        );
        assert_eq!(
            numbers(&directory.subscriptions_after(domain, Some((Some("S"), "b")), 9)),
            [2]
        );
        assert_eq!(numbers(&directory.subscriptions_of(domain, None)), [4, 1]);
        assert_eq!(numbers(&directory.subscriptions_of(domain, Some("t"))), [2]);
        assert_eq!(
            numbers(&directory.all_subscriptions_after(Some(SubscriptionId(2)), 1)),
            [3]
        );

        for (domain, name) in [(11, "b"), (11, "A"), (12, "a"), (11, "c")] {
            directory.put_domain_topic(DomainTopic {
                domain: TopicId(domain),
                name: name.into(),
                automatic: false,
                created: Timestamp::MIN,
            });
        }
        let names =
            |topics: Vec<DomainTopic>| -> Vec<String> { topics.into_iter().map(|t| t.name).collect() };
        assert_eq!(names(directory.domain_topics(domain)), ["A", "b", "c"]);
        assert_eq!(names(directory.domain_topics_after(domain, Some("a"), 1)), ["b"]);
        directory.delete_topic(domain);
        assert!(directory.domain_topics(domain).is_empty());
        assert_eq!(names(directory.domain_topics(TopicId(12))), ["a"]);
        assert!(directory.subscription_by_id(SubscriptionId(1)).is_none());
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
