//! A node's replica of the catalog: its content, and the rules by which concurrent changes
//! conflict.

use crate::{Change, Error, Handshake, Loaded};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic, TopicKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Unit of conflict between two changes. Names are in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    Topic(TopicId),
    /// Number of the topic's kind, the group where the kind has one, and the name.
    TopicName(u8, String, String),
    DomainTopic(TopicId, String),
    Subscription(SubscriptionId),
    SubscriptionName(TopicId, Option<String>, String),
    Endpoint(String),
    Handshake(String),
}

impl Key {
    /// Kind of thing that the key names, for messages to people.
    fn what(&self) -> &'static str {
        match self {
            Key::Topic(_) | Key::TopicName(..) => "the topic",
            Key::DomainTopic(..) => "the domain topic",
            Key::Subscription(_) | Key::SubscriptionName(..) => "the subscription",
            Key::Endpoint(_) => "the delay of the endpoint",
            Key::Handshake(_) => "the validation of the webhook",
        }
    }
}

/// How a change touches a key: `Reads` only requires that it does not change meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Touch {
    Reads(Key),
    Writes(Key),
}

/// The author of a change: a number unique to one process of one node.
pub type Author = u64;

#[derive(Default)]
pub struct Resources {
    topics: BTreeMap<TopicId, Topic>,
    /// Names of domain topics are keys in lower case: they are compared case-insensitively.
    domain_topics: BTreeMap<(TopicId, String), DomainTopic>,
    subscriptions: BTreeMap<SubscriptionId, Subscription>,
    endpoint_delays: BTreeMap<String, EndpointDelay>,
    handshakes: BTreeMap<String, Handshake>,
    /// The resource that each name belongs to, and the author that assigned it last.
    names: BTreeMap<Key, (u64, Author)>,
    ids_given: u64,
}

impl Resources {
    pub fn loaded(&self) -> Loaded {
        Loaded {
            topics: self.topics.values().cloned().collect(),
            domain_topics: self.domain_topics.values().cloned().collect(),
            subscriptions: self.subscriptions.values().cloned().collect(),
            endpoint_delays: self.endpoint_delays.values().cloned().collect(),
            handshakes: self.handshakes.values().cloned().collect(),
        }
    }

    /// The whole content as changes that create it from nothing.
    pub fn all(&self) -> impl Iterator<Item = Change> + '_ {
        let topics = self.topics.values().cloned().map(Change::PutTopic);
        let domain_topics = self.domain_topics.values().cloned().map(Change::PutDomainTopic);
        let subscriptions = self.subscriptions.values().cloned().map(Change::PutSubscription);
        let delays = self
            .endpoint_delays
            .values()
            .cloned()
            .map(Change::PutEndpointDelay);
        let handshakes = self.handshakes.values().cloned().map(Change::PutHandshake);
        let all = topics.chain(domain_topics).chain(subscriptions);
        all.chain(delays).chain(handshakes)
    }

    /// Allocates `count` numbers that were never allocated before; returns the first.
    pub fn give_ids(&mut self, count: u64) -> u64 {
        let first = self.ids_given + 1;
        self.ids_given += count;
        first
    }

    pub fn ids_given(&self) -> u64 {
        self.ids_given
    }

    /// Ensures that no number up to this one is allocated any more.
    pub fn skip_ids(&mut self, upto: u64) {
        self.ids_given = self.ids_given.max(upto);
    }

    pub fn apply(&mut self, change: Change, by: Author) {
        match change {
            Change::PutTopic(topic) => {
                let (id, name) = (topic.id, topic_name(&topic));
                if let Some(before) = self.topics.insert(id, topic) {
                    self.unname(&topic_name(&before), id.0);
                }
                self.names.insert(name, (id.0, by));
            }
            Change::DeleteTopic(id) => {
                if let Some(before) = self.topics.remove(&id) {
                    self.unname(&topic_name(&before), id.0);
                }
            }
            Change::PutDomainTopic(topic) => {
                let key = (topic.domain, topic.name.to_lowercase());
                self.domain_topics.insert(key, topic);
            }
            Change::DeleteDomainTopic(domain, name) => {
                self.domain_topics.remove(&(domain, name.to_lowercase()));
            }
            Change::PutSubscription(subscription) => {
                let (id, name) = (subscription.id, subscription_name(&subscription));
                if let Some(before) = self.subscriptions.insert(id, subscription) {
                    self.unname(&subscription_name(&before), id.0);
                }
                self.names.insert(name, (id.0, by));
            }
            Change::DeleteSubscription(id) => {
                if let Some(before) = self.subscriptions.remove(&id) {
                    self.unname(&subscription_name(&before), id.0);
                }
            }
            Change::PutEndpointDelay(delay) => {
                self.endpoint_delays.insert(delay.endpoint.clone(), delay);
            }
            Change::DeleteEndpointDelay(endpoint) => {
                self.endpoint_delays.remove(&endpoint);
            }
            Change::PutHandshake(handshake) => {
                self.handshakes.insert(handshake.operation.clone(), handshake);
            }
            Change::DeleteHandshake(operation) => {
                self.handshakes.remove(&operation);
            }
        }
    }

    fn unname(&mut self, name: &Key, id: u64) {
        if self.names.get(name).is_some_and(|(of, _)| *of == id) {
            self.names.remove(name);
        }
    }

    /// The keys that a change touches, evaluated before the change is applied.
    pub fn touches(&self, change: &Change) -> BTreeSet<Touch> {
        use Touch::{Reads, Writes};
        let inside = |topic: TopicId, name: &str| Key::DomainTopic(topic, name.to_lowercase());
        let mut touches = BTreeSet::new();
        match change {
            Change::PutTopic(topic) => {
                touches.insert(Writes(Key::Topic(topic.id)));
                touches.insert(Writes(topic_name(topic)));
                let before = self.topics.get(&topic.id);
                touches.extend(before.map(|before| Writes(topic_name(before))));
            }
            Change::DeleteTopic(id) => {
                touches.insert(Writes(Key::Topic(*id)));
                let before = self.topics.get(id);
                touches.extend(before.map(|before| Writes(topic_name(before))));
            }
            Change::PutDomainTopic(topic) => {
                touches.insert(Reads(Key::Topic(topic.domain)));
                touches.insert(Writes(inside(topic.domain, &topic.name)));
            }
            Change::DeleteDomainTopic(domain, name) => {
                touches.insert(Reads(Key::Topic(*domain)));
                touches.insert(Writes(inside(*domain, name)));
            }
            Change::PutSubscription(one) => {
                touches.insert(Reads(Key::Topic(one.topic)));
                touches.extend(
                    one.domain_topic
                        .as_ref()
                        .map(|name| Reads(inside(one.topic, name))),
                );
                touches.insert(Writes(Key::Subscription(one.id)));
                touches.insert(Writes(subscription_name(one)));
                let before = self.subscriptions.get(&one.id);
                touches.extend(before.map(|before| Writes(subscription_name(before))));
            }
            Change::DeleteSubscription(id) => {
                touches.insert(Writes(Key::Subscription(*id)));
                if let Some(before) = self.subscriptions.get(id) {
                    touches.insert(Writes(subscription_name(before)));
                    // The domain topic may be deleted with its last subscription: of two concurrent
                    // deletions one must see the other, so both write this key.
                    if let Some(name) = &before.domain_topic {
                        touches.insert(Writes(inside(before.topic, name)));
                    }
                    let topic = self.topics.get(&before.topic).map(|topic| &topic.kind);
                    touches.insert(match topic {
                        Some(TopicKind::Scope { .. }) => Writes(Key::Topic(before.topic)),
                        _ => Reads(Key::Topic(before.topic)),
                    });
                }
            }
            Change::PutEndpointDelay(one) => {
                touches.insert(Writes(Key::Endpoint(one.endpoint.clone())));
            }
            Change::DeleteEndpointDelay(endpoint) => {
                touches.insert(Writes(Key::Endpoint(endpoint.clone())));
            }
            Change::PutHandshake(one) => {
                touches.insert(Writes(Key::Handshake(one.operation.clone())));
                touches.insert(Reads(Key::Topic(one.subscription.topic)));
                if !one.trial {
                    touches.insert(Writes(subscription_name(&one.subscription)));
                }
            }
            Change::DeleteHandshake(operation) => {
                touches.insert(Writes(Key::Handshake(operation.clone())));
            }
        }
        touches
    }

    /// The keys that all changes of a commit touch.
    pub fn touches_of(&self, changes: &[Change]) -> BTreeSet<Touch> {
        changes.iter().flat_map(|change| self.touches(change)).collect()
    }

    /// A name that these changes assign to a new resource although another node assigned it to a
    /// different one.
    pub fn taken(&self, changes: &[Change], me: Author) -> Option<Key> {
        let goes = |id: u64, change: &Change| match change {
            Change::DeleteTopic(TopicId(gone)) | Change::DeleteSubscription(SubscriptionId(gone)) => {
                *gone == id
            }
            _ => false,
        };
        let taken = |name: Key, id: u64| {
            let (of, by) = self.names.get(&name)?;
            let stays = !changes.iter().any(|change| goes(*of, change));
            (*of != id && *by != me && stays).then_some(name)
        };
        changes.iter().find_map(|change| match change {
            Change::PutTopic(topic) => taken(topic_name(topic), topic.id.0),
            Change::PutSubscription(one) => taken(subscription_name(one), one.id.0),
            _ => None,
        })
    }

    /// The changes that turn `before` into this state.
    pub fn since(&self, before: &Resources) -> Vec<Change> {
        let mut changes = Vec::new();
        let gone = |id: &SubscriptionId| !self.subscriptions.contains_key(id);
        let subscriptions = before.subscriptions.keys().filter(|id| gone(id));
        changes.extend(subscriptions.map(|id| Change::DeleteSubscription(*id)));
        let gone = |operation: &String| !self.handshakes.contains_key(operation);
        let handshakes = before.handshakes.keys().filter(|operation| gone(operation));
        changes.extend(handshakes.cloned().map(Change::DeleteHandshake));
        for (key, topic) in &before.domain_topics {
            if !self.domain_topics.contains_key(key) {
                changes.push(Change::DeleteDomainTopic(key.0, topic.name.clone()));
            }
        }
        let gone = |id: &TopicId| !self.topics.contains_key(id);
        let topics = before.topics.keys().filter(|id| gone(id));
        changes.extend(topics.map(|id| Change::DeleteTopic(*id)));
        let gone = |endpoint: &String| !self.endpoint_delays.contains_key(endpoint);
        let delays = before.endpoint_delays.keys().filter(|endpoint| gone(endpoint));
        changes.extend(delays.cloned().map(Change::DeleteEndpointDelay));
        changes.extend(fresh(&self.topics, &before.topics).map(Change::PutTopic));
        changes.extend(fresh(&self.domain_topics, &before.domain_topics).map(Change::PutDomainTopic));
        changes.extend(fresh(&self.subscriptions, &before.subscriptions).map(Change::PutSubscription));
        changes.extend(fresh(&self.endpoint_delays, &before.endpoint_delays).map(Change::PutEndpointDelay));
        changes.extend(fresh(&self.handshakes, &before.handshakes).map(Change::PutHandshake));
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

fn topic_name(topic: &Topic) -> Key {
    let name = topic.name.to_lowercase();
    match &topic.kind {
        TopicKind::Custom => Key::TopicName(0, String::new(), name),
        TopicKind::Domain { .. } => Key::TopicName(1, String::new(), name),
        TopicKind::System { .. } => Key::TopicName(2, topic.resource_group.to_lowercase(), name),
        TopicKind::Scope { source, .. } => {
            Key::TopicName(3, String::new(), source.trim_end_matches('/').to_lowercase())
        }
    }
}

fn subscription_name(one: &Subscription) -> Key {
    let inside = one.domain_topic.as_ref().map(|name| name.to_lowercase());
    Key::SubscriptionName(one.topic, inside, one.name.to_lowercase())
}

/// Keys touched by changes of other nodes that the follower has not applied yet. Decisions made
/// here are still based on the older state, so local changes to these keys are refused.
#[derive(Default)]
pub struct Unapplied {
    reads: BTreeMap<Key, usize>,
    writes: BTreeMap<Key, usize>,
}

impl Unapplied {
    pub fn add(&mut self, touches: &BTreeSet<Touch>) {
        for touch in touches {
            let (counts, key) = self.counts(touch);
            *counts.entry(key.clone()).or_default() += 1;
        }
    }

    pub fn remove(&mut self, touches: &BTreeSet<Touch>) {
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

    fn counts<'a, 'b>(&'a mut self, touch: &'b Touch) -> (&'a mut BTreeMap<Key, usize>, &'b Key) {
        match touch {
            Touch::Reads(key) => (&mut self.reads, key),
            Touch::Writes(key) => (&mut self.writes, key),
        }
    }

    pub fn clear(&mut self) {
        *self = Unapplied::default();
    }

    /// The first of these keys that conflicts with an unapplied change.
    fn in_the_way_of<'a>(&self, touches: &'a BTreeSet<Touch>) -> Option<&'a Key> {
        touches.iter().find_map(|touch| match touch {
            Touch::Reads(key) => self.writes.contains_key(key).then_some(key),
            Touch::Writes(key) => {
                (self.writes.contains_key(key) || self.reads.contains_key(key)).then_some(key)
            }
        })
    }
}

/// A node's replica of the catalog, with the changes that its follower has not applied yet.
#[derive(Default)]
pub struct Replica {
    pub resources: Resources,
    unapplied: Unapplied,
    /// Changes for the follower, oldest first; an element stays until the follower has applied it.
    untold: VecDeque<Untold>,
    /// Whether the content has been read: from then on changes of other nodes must reach the
    /// follower.
    loaded: bool,
    followed: bool,
}

struct Untold {
    changes: Vec<Change>,
    touches: BTreeSet<Touch>,
    sequence: u64,
}

impl Replica {
    pub fn new(resources: Resources) -> Replica {
        Replica {
            resources,
            ..Replica::default()
        }
    }

    /// Returns the whole content. Unless a follower is registered already, the follower starts
    /// after it.
    pub fn load(&mut self) -> Loaded {
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
    pub fn check(&self, changes: &[Change], me: Author) -> Result<(), Error> {
        let touches = self.resources.touches_of(changes);
        let conflict = |key: &Key| Error::Conflict(key.what().into());
        match self.unapplied.in_the_way_of(&touches) {
            Some(key) => Err(conflict(key)),
            None => match self.resources.taken(changes, me) {
                Some(name) => Err(conflict(&name)),
                None => Ok(()),
            },
        }
    }

    /// Applies a commit. The follower is not told of commits whose outcome this node knows already.
    pub fn apply(&mut self, changes: Vec<Change>, by: Author, known_here: bool, sequence: u64) {
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

    fn tell(&mut self, changes: Vec<Change>, touches: BTreeSet<Touch>, sequence: u64) {
        self.unapplied.add(&touches);
        self.untold.push_back(Untold {
            changes,
            touches,
            sequence,
        });
    }

    /// Replaces the content after a gap in communication and tells the follower the difference.
    pub fn replace(&mut self, resources: Resources, sequence: u64) {
        let before = std::mem::replace(&mut self.resources, resources);
        if !self.loaded {
            return;
        }
        let changes = self.resources.since(&before);
        let mut touches = before.touches_of(&changes);
        touches.extend(self.resources.touches_of(&changes));
        if !changes.is_empty() {
            self.tell(changes, touches, sequence);
        }
    }

    /// Sequence of the oldest commit that the follower has not applied.
    pub fn oldest_untold(&self) -> Option<u64> {
        self.untold.front().map(|untold| untold.sequence)
    }

    /// The changes that the follower has to apply next.
    pub fn next(&self) -> Option<(Vec<Change>, u64)> {
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
