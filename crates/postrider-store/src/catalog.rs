//! The catalogue's promise: topics, domain topics, subscriptions, handshakes, and the endpoints that are
//! left alone.

use crate::Error;
use crate::handshake::Handshake;
use async_trait::async_trait;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use std::sync::Arc;

/// One change to the catalogue.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    PutTopic(Topic),
    DeleteTopic(TopicId),
    PutDomainTopic(DomainTopic),
    DeleteDomainTopic(TopicId, String),
    PutSubscription(Subscription),
    DeleteSubscription(SubscriptionId),
    /// Replaces the delay that the endpoint had, if it had one.
    PutEndpointDelay(EndpointDelay),
    /// By the endpoint's name. One that is not there may be deleted all the same.
    DeleteEndpointDelay(String),
    /// Replaces the one of the same operation.
    PutHandshake(Handshake),
    /// By its operation. One that is not there may be deleted all the same.
    DeleteHandshake(String),
}

/// Everything in the catalogue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    pub topics: Vec<Topic>,
    pub domain_topics: Vec<DomainTopic>,
    pub subscriptions: Vec<Subscription>,
    /// Ordered by endpoint.
    pub endpoint_delays: Vec<EndpointDelay>,
    /// Ordered by operation.
    pub handshakes: Vec<Handshake>,
}

#[async_trait]
pub trait Catalog: Send + Sync {
    async fn load(&self) -> Result<Loaded, Error>;

    /// Makes the changes durable, all of them or none. Commits that are under way at the same time may become
    /// durable together; each takes effect whole, and one that has begun is seen through even if nobody waits for
    /// it any more. [`Error::Conflict`] if another node has changed something that they are about and the follower
    /// has not put it in force yet.
    async fn commit(&self, changes: Vec<Change>) -> Result<(), Error>;

    /// A number that was never given out before, and never will be again, restarts included.
    async fn next_id(&self) -> Result<u64, Error>;

    /// Returns when everything that other nodes had stored before this was asked is in force here: by then nothing is
    /// taken for missing that exists. Where there are no other nodes that is always so.
    async fn catch_up(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Whether everything that any node has said to be in force everywhere is in force here. Where there are no other
    /// nodes that is always so; a node that lost touch with the others cannot know.
    fn is_current(&self) -> bool {
        true
    }

    /// Returns when no node acts any more by a catalogue older than the one known here: each has all of it in force, or
    /// is not current. The changes are durable even after an error.
    async fn in_force_everywhere(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Tells the follower of everything that other nodes have changed since the last `load` before this, for as
    /// long as it is awaited; to be called once. Where there are no other nodes nothing ever comes.
    async fn follow(&self, _follower: Arc<dyn Follower>) {}
}

/// Puts in force what other nodes have changed.
#[async_trait]
pub trait Follower: Send + Sync {
    /// The changes of one commit, or of several that came at once, in their order. Returns when they are in force
    /// here; only then come the next. `sequence` never falls from one to the next.
    async fn changed(&self, changes: Vec<Change>, sequence: u64);
}
