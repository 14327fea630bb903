//! A node's replica of the catalog: its content, and the rules by which concurrent changes
//! conflict.

use crate::{CatalogChange, CatalogContent, Error, Handshake};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic, TopicKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Unit of conflict between two changes. Names are in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CatalogKey {
    Topic(TopicId),
    /// Number of the topic's kind, the group where the kind has one, and the name.
    TopicName(u8, String, String),
    DomainTopic(TopicId, String),
    Subscription(SubscriptionId),
    SubscriptionName(TopicId, Option<String>, String),
    Endpoint(String),
    Handshake(String),
}

impl CatalogKey {
    /// Kind of thing that the key names, for messages to people.
    fn what(&self) -> &'static str {
        match self {
            CatalogKey::Topic(_) | CatalogKey::TopicName(..) => "the topic",
            CatalogKey::DomainTopic(..) => "the domain topic",
            CatalogKey::Subscription(_) | CatalogKey::SubscriptionName(..) => "the subscription",
            CatalogKey::Endpoint(_) => "the delay of the endpoint",
            CatalogKey::Handshake(_) => "the validation of the webhook",
        }
    }
}

/// How a change touches a key: `Reads` only requires that it does not change meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyAccess {
    Reads(CatalogKey),
    Writes(CatalogKey),
}

/// The author of a change: a number unique to one process of one node.
pub type ChangeAuthor = u64;

#[derive(Default)]
pub struct CatalogState {
    topics: BTreeMap<TopicId, Topic>,
    /// Names of domain topics are keys in lower case: they are compared case-insensitively.
    domain_topics: BTreeMap<(TopicId, String), DomainTopic>,
    subscriptions: BTreeMap<SubscriptionId, Subscription>,
    endpoint_delays: BTreeMap<String, EndpointDelay>,
    handshakes: BTreeMap<String, Handshake>,
    /// The resource that each name belongs to, and the author that assigned it last.
    names: BTreeMap<CatalogKey, (u64, ChangeAuthor)>,
    ids_given: u64,
}

impl CatalogState {
    pub fn loaded(&self) -> CatalogContent {
        CatalogContent {
            topics: self.topics.values().cloned().collect(),
            domain_topics: self.domain_topics.values().cloned().collect(),
            subscriptions: self.subscriptions.values().cloned().collect(),
            endpoint_delays: self.endpoint_delays.values().cloned().collect(),
            handshakes: self.handshakes.values().cloned().collect(),
        }
    }

    /// The whole content as changes that create it from nothing.
    pub fn all(&self) -> impl Iterator<Item = CatalogChange> + '_ {
        let topics = self.topics.values().cloned().map(CatalogChange::PutTopic);
        let domain_topics = self
            .domain_topics
            .values()
            .cloned()
            .map(CatalogChange::PutDomainTopic);
        let subscriptions = self
            .subscriptions
            .values()
            .cloned()
            .map(CatalogChange::PutSubscription);
        let delays = self
            .endpoint_delays
            .values()
            .cloned()
            .map(CatalogChange::PutEndpointDelay);
        let handshakes = self.handshakes.values().cloned().map(CatalogChange::PutHandshake);
        let all = topics.chain(domain_topics).chain(subscriptions);
        all.chain(delays).chain(handshakes)
    }

    /// Allocates `count` numbers that were never allocated before; returns the first.
    pub fn allocate_ids(&mut self, count: u64) -> u64 {
        let first = self.ids_given + 1;
        self.ids_given += count;
        first
    }

    pub fn ids_allocated(&self) -> u64 {
        self.ids_given
    }

    /// Ensures that no number up to this one is allocated any more.
    pub fn skip_ids(&mut self, upto: u64) {
        self.ids_given = self.ids_given.max(upto);
    }

    pub fn apply(&mut self, change: CatalogChange, by: ChangeAuthor) {
        match change {
            CatalogChange::PutTopic(topic) => {
                let (id, name) = (topic.id, topic_name(&topic));
                if let Some(before) = self.topics.insert(id, topic) {
                    self.unname(&topic_name(&before), id.0);
                }
                self.names.insert(name, (id.0, by));
            }
            CatalogChange::DeleteTopic(id) => {
                if let Some(before) = self.topics.remove(&id) {
                    self.unname(&topic_name(&before), id.0);
                }
            }
            CatalogChange::PutDomainTopic(topic) => {
                let key = (topic.domain, topic.name.to_lowercase());
                self.domain_topics.insert(key, topic);
            }
            CatalogChange::DeleteDomainTopic(domain, name) => {
                self.domain_topics.remove(&(domain, name.to_lowercase()));
            }
            CatalogChange::PutSubscription(subscription) => {
                let (id, name) = (subscription.id, subscription_name(&subscription));
                if let Some(before) = self.subscriptions.insert(id, subscription) {
                    self.unname(&subscription_name(&before), id.0);
                }
                self.names.insert(name, (id.0, by));
            }
            CatalogChange::DeleteSubscription(id) => {
                if let Some(before) = self.subscriptions.remove(&id) {
                    self.unname(&subscription_name(&before), id.0);
                }
            }
            CatalogChange::PutEndpointDelay(delay) => {
                self.endpoint_delays.insert(delay.endpoint.clone(), delay);
            }
            CatalogChange::DeleteEndpointDelay(endpoint) => {
                self.endpoint_delays.remove(&endpoint);
            }
            CatalogChange::PutHandshake(handshake) => {
                self.handshakes.insert(handshake.operation.clone(), handshake);
            }
            CatalogChange::DeleteHandshake(operation) => {
                self.handshakes.remove(&operation);
            }
        }
    }

    fn unname(&mut self, name: &CatalogKey, id: u64) {
        if self.names.get(name).is_some_and(|(of, _)| *of == id) {
            self.names.remove(name);
        }
    }

    /// The keys that a change touches, evaluated before the change is applied.
    pub fn touches(&self, change: &CatalogChange) -> BTreeSet<KeyAccess> {
        use KeyAccess::{Reads, Writes};
        let inside = |topic: TopicId, name: &str| CatalogKey::DomainTopic(topic, name.to_lowercase());
        let mut touches = BTreeSet::new();
        match change {
            CatalogChange::PutTopic(topic) => {
                touches.insert(Writes(CatalogKey::Topic(topic.id)));
                touches.insert(Writes(topic_name(topic)));
                let before = self.topics.get(&topic.id);
                touches.extend(before.map(|before| Writes(topic_name(before))));
            }
            CatalogChange::DeleteTopic(id) => {
                touches.insert(Writes(CatalogKey::Topic(*id)));
                let before = self.topics.get(id);
                touches.extend(before.map(|before| Writes(topic_name(before))));
            }
            CatalogChange::PutDomainTopic(topic) => {
                touches.insert(Reads(CatalogKey::Topic(topic.domain)));
                touches.insert(Writes(inside(topic.domain, &topic.name)));
            }
            CatalogChange::DeleteDomainTopic(domain, name) => {
                touches.insert(Reads(CatalogKey::Topic(*domain)));
                touches.insert(Writes(inside(*domain, name)));
            }
            CatalogChange::PutSubscription(one) => {
                touches.insert(Reads(CatalogKey::Topic(one.topic)));
                touches.extend(
                    one.domain_topic
                        .as_ref()
                        .map(|name| Reads(inside(one.topic, name))),
                );
                touches.insert(Writes(CatalogKey::Subscription(one.id)));
                touches.insert(Writes(subscription_name(one)));
                let before = self.subscriptions.get(&one.id);
                touches.extend(before.map(|before| Writes(subscription_name(before))));
            }
            CatalogChange::DeleteSubscription(id) => {
                touches.insert(Writes(CatalogKey::Subscription(*id)));
                if let Some(before) = self.subscriptions.get(id) {
                    touches.insert(Writes(subscription_name(before)));
                    // The domain topic may be deleted with its last subscription: of two concurrent
                    // deletions one must see the other, so both write this key.
                    if let Some(name) = &before.domain_topic {
                        touches.insert(Writes(inside(before.topic, name)));
                    }
                    let topic = self.topics.get(&before.topic).map(|topic| &topic.kind);
                    touches.insert(match topic {
                        Some(TopicKind::Scope { .. }) => Writes(CatalogKey::Topic(before.topic)),
                        _ => Reads(CatalogKey::Topic(before.topic)),
                    });
                }
            }
            CatalogChange::PutEndpointDelay(one) => {
                touches.insert(Writes(CatalogKey::Endpoint(one.endpoint.clone())));
            }
            CatalogChange::DeleteEndpointDelay(endpoint) => {
                touches.insert(Writes(CatalogKey::Endpoint(endpoint.clone())));
            }
            CatalogChange::PutHandshake(one) => {
                touches.insert(Writes(CatalogKey::Handshake(one.operation.clone())));
                touches.insert(Reads(CatalogKey::Topic(one.subscription.topic)));
                if !one.trial {
                    touches.insert(Writes(subscription_name(&one.subscription)));
                }
            }
            CatalogChange::DeleteHandshake(operation) => {
                touches.insert(Writes(CatalogKey::Handshake(operation.clone())));
            }
        }
        touches
    }

    /// The keys that all changes of a commit touch.
    pub fn keys_touched(&self, changes: &[CatalogChange]) -> BTreeSet<KeyAccess> {
        changes.iter().flat_map(|change| self.touches(change)).collect()
    }

    /// A name that these changes assign to a new resource although another node assigned it to a
    /// different one.
    pub fn name_conflict(&self, changes: &[CatalogChange], me: ChangeAuthor) -> Option<CatalogKey> {
        let goes = |id: u64, change: &CatalogChange| match change {
            CatalogChange::DeleteTopic(TopicId(gone))
            | CatalogChange::DeleteSubscription(SubscriptionId(gone)) => *gone == id,
            _ => false,
        };
        let taken = |name: CatalogKey, id: u64| {
            let (of, by) = self.names.get(&name)?;
            let stays = !changes.iter().any(|change| goes(*of, change));
            (*of != id && *by != me && stays).then_some(name)
        };
        changes.iter().find_map(|change| match change {
            CatalogChange::PutTopic(topic) => taken(topic_name(topic), topic.id.0),
            CatalogChange::PutSubscription(one) => taken(subscription_name(one), one.id.0),
            _ => None,
        })
    }

    /// The changes that turn `before` into this state.
    pub fn changes_since(&self, before: &CatalogState) -> Vec<CatalogChange> {
        let mut changes = Vec::new();
        let gone = |id: &SubscriptionId| !self.subscriptions.contains_key(id);
        let subscriptions = before.subscriptions.keys().filter(|id| gone(id));
        changes.extend(subscriptions.map(|id| CatalogChange::DeleteSubscription(*id)));
        let gone = |operation: &String| !self.handshakes.contains_key(operation);
        let handshakes = before.handshakes.keys().filter(|operation| gone(operation));
        changes.extend(handshakes.cloned().map(CatalogChange::DeleteHandshake));
        for (key, topic) in &before.domain_topics {
            if !self.domain_topics.contains_key(key) {
                changes.push(CatalogChange::DeleteDomainTopic(key.0, topic.name.clone()));
            }
        }
        let gone = |id: &TopicId| !self.topics.contains_key(id);
        let topics = before.topics.keys().filter(|id| gone(id));
        changes.extend(topics.map(|id| CatalogChange::DeleteTopic(*id)));
        let gone = |endpoint: &String| !self.endpoint_delays.contains_key(endpoint);
        let delays = before.endpoint_delays.keys().filter(|endpoint| gone(endpoint));
        changes.extend(delays.cloned().map(CatalogChange::DeleteEndpointDelay));
        changes.extend(fresh(&self.topics, &before.topics).map(CatalogChange::PutTopic));
        changes.extend(fresh(&self.domain_topics, &before.domain_topics).map(CatalogChange::PutDomainTopic));
        changes.extend(fresh(&self.subscriptions, &before.subscriptions).map(CatalogChange::PutSubscription));
        changes.extend(
            fresh(&self.endpoint_delays, &before.endpoint_delays).map(CatalogChange::PutEndpointDelay),
        );
        changes.extend(fresh(&self.handshakes, &before.handshakes).map(CatalogChange::PutHandshake));
        changes
    }
}

/// Entries that are new or different from before.
fn fresh<'a, K: Ord, V: Clone + PartialEq>(
    now: &'a BTreeMap<K, V>,
    before: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = V> + 'a {
    let other = |(key, value): &(&K, &V)| before.get(key) != Some(value);
    now.iter().filter(other).map(|(_, value)| value.clone())
}

fn topic_name(topic: &Topic) -> CatalogKey {
    let name = topic.name.to_lowercase();
    match &topic.kind {
        TopicKind::Custom => CatalogKey::TopicName(0, String::new(), name),
        TopicKind::Domain { .. } => CatalogKey::TopicName(1, String::new(), name),
        TopicKind::System { .. } => CatalogKey::TopicName(2, topic.resource_group.to_lowercase(), name),
        TopicKind::Scope { source, .. } => {
            CatalogKey::TopicName(3, String::new(), source.trim_end_matches('/').to_lowercase())
        }
    }
}

fn subscription_name(one: &Subscription) -> CatalogKey {
    let inside = one.domain_topic.as_ref().map(|name| name.to_lowercase());
    CatalogKey::SubscriptionName(one.topic, inside, one.name.to_lowercase())
}

/// Keys touched by changes of other nodes that the follower has not applied yet. Decisions made
/// here are still based on the older state, so local changes to these keys are refused.
#[derive(Default)]
pub struct UnappliedChanges {
    reads: BTreeMap<CatalogKey, usize>,
    writes: BTreeMap<CatalogKey, usize>,
}

impl UnappliedChanges {
    pub fn add(&mut self, touches: &BTreeSet<KeyAccess>) {
        for touch in touches {
            let (counts, key) = self.counts(touch);
            *counts.entry(key.clone()).or_default() += 1;
        }
    }

    pub fn remove(&mut self, touches: &BTreeSet<KeyAccess>) {
        for touch in touches {
            let (counts, key) = self.counts(touch);
            if let Some(count) = counts.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(key);
                }
            }
        }
    }

    fn counts<'a, 'b>(
        &'a mut self,
        touch: &'b KeyAccess,
    ) -> (&'a mut BTreeMap<CatalogKey, usize>, &'b CatalogKey) {
        match touch {
            KeyAccess::Reads(key) => (&mut self.reads, key),
            KeyAccess::Writes(key) => (&mut self.writes, key),
        }
    }

    pub fn clear(&mut self) {
        *self = UnappliedChanges::default();
    }

    /// The first of these keys that conflicts with an unapplied change.
    fn in_the_way_of<'a>(&self, touches: &'a BTreeSet<KeyAccess>) -> Option<&'a CatalogKey> {
        touches.iter().find_map(|touch| match touch {
            KeyAccess::Reads(key) => self.writes.contains_key(key).then_some(key),
            KeyAccess::Writes(key) => {
                (self.writes.contains_key(key) || self.reads.contains_key(key)).then_some(key)
            }
        })
    }
}

/// A node's replica of the catalog, with the changes that its follower has not applied yet.
#[derive(Default)]
pub struct CatalogReplica {
    pub resources: CatalogState,
    unapplied: UnappliedChanges,
    /// Changes for the follower, oldest first; an element stays until the follower has applied it.
    untold: VecDeque<PendingFollowerCommit>,
    /// Whether the content has been read: from then on changes of other nodes must reach the
    /// follower.
    loaded: bool,
    followed: bool,
}

struct PendingFollowerCommit {
    changes: Vec<CatalogChange>,
    touches: BTreeSet<KeyAccess>,
    sequence: u64,
}

impl CatalogReplica {
    pub fn new(resources: CatalogState) -> CatalogReplica {
        CatalogReplica {
            resources,
            ..CatalogReplica::default()
        }
    }

    /// Returns the whole content. Unless a follower is registered already, the follower starts
    /// after it.
    pub fn load(&mut self) -> CatalogContent {
        self.loaded = true;
        if !self.followed {
            self.untold.clear();
            self.unapplied.clear();
        }
        self.resources.loaded()
    }

    /// Registers that a follower exists.
    pub fn follow(&mut self) {
        self.followed = true;
    }

    /// Refuses changes that conflict with unapplied changes or assign a name that another node has
    /// taken.
    pub fn check(&self, changes: &[CatalogChange], me: ChangeAuthor) -> Result<(), Error> {
        let touches = self.resources.keys_touched(changes);
        let conflict = |key: &CatalogKey| Error::Conflict(key.what().into());
        match self.unapplied.in_the_way_of(&touches) {
            Some(key) => Err(conflict(key)),
            None => match self.resources.name_conflict(changes, me) {
                Some(name) => Err(conflict(&name)),
                None => Ok(()),
            },
        }
    }

    /// Applies a commit. The follower is not told of commits whose outcome this node knows already.
    pub fn apply(&mut self, changes: Vec<CatalogChange>, by: ChangeAuthor, known_here: bool, sequence: u64) {
        let news = self.loaded && !known_here && !changes.is_empty();
        if news {
            let mut touches = BTreeSet::new();
            for change in &changes {
                touches.extend(self.resources.touches(change));
                self.resources.apply(change.clone(), by);
            }
            self.tell(changes, touches, sequence);
        } else {
            changes
                .into_iter()
                .for_each(|change| self.resources.apply(change, by));
        }
    }

    fn tell(&mut self, changes: Vec<CatalogChange>, touches: BTreeSet<KeyAccess>, sequence: u64) {
        self.unapplied.add(&touches);
        self.untold.push_back(PendingFollowerCommit {
            changes,
            touches,
            sequence,
        });
    }

    /// Replaces the content after a gap in communication and tells the follower the difference.
    pub fn replace(&mut self, resources: CatalogState, sequence: u64) {
        let before = std::mem::replace(&mut self.resources, resources);
        if !self.loaded {
            return;
        }
        let changes = self.resources.changes_since(&before);
        let mut touches = before.keys_touched(&changes);
        touches.extend(self.resources.keys_touched(&changes));
        if !changes.is_empty() {
            self.tell(changes, touches, sequence);
        }
    }

    /// Sequence of the oldest commit that the follower has not applied.
    pub fn oldest_unapplied(&self) -> Option<u64> {
        self.untold.front().map(|untold| untold.sequence)
    }

    /// The changes that the follower has to apply next.
    pub fn next(&self) -> Option<(Vec<CatalogChange>, u64)> {
        let untold = self.untold.front()?;
        Some((untold.changes.clone(), untold.sequence))
    }

    /// Confirms that the follower has applied the changes that `next` returned.
    pub fn done(&mut self) {
        if let Some(done) = self.untold.pop_front() {
            self.unapplied.remove(&done.touches);
        }
    }
}

#[cfg(test)]
mod tests;
