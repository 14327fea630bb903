//! The catalog: topics, domain topics, subscriptions, handshakes, and endpoints on probation.

use crate::Error;
use crate::handshake::Handshake;
use async_trait::async_trait;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use std::sync::Arc;

/// A single alteration of the catalog; a commit is a list of them.
#[derive(Clone, Debug, PartialEq)]
pub enum CatalogChange {
    PutTopic(Topic),
    DeleteTopic(TopicId),
    PutDomainTopic(DomainTopic),
    DeleteDomainTopic(TopicId, String),
    PutSubscription(Subscription),
    DeleteSubscription(SubscriptionId),
    /// Replaces the endpoint's previous delay, if any.
    PutEndpointDelay(EndpointDelay),
    /// Deletes by endpoint; deleting a delay that does not exist is not an error.
    DeleteEndpointDelay(String),
    /// Replaces the handshake with the same operation, if any.
    PutHandshake(Handshake),
    /// Deletes by operation; deleting a handshake that does not exist is not an error.
    DeleteHandshake(String),
}

/// The whole content of the catalog.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CatalogContent {
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
    async fn load(&self) -> Result<CatalogContent, Error>;

    /// Makes the changes durable, all or none. Concurrent commits may share a flush; each is
    /// atomic. A commit that has been polled once runs to completion even if its future is dropped.
    /// Fails with [`Error::Conflict`] if another node has changed something that the changes are
    /// about and the follower has not applied that change yet.
    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error>;

    /// Allocates a number that is never allocated again, not even after a restart.
    async fn next_id(&self) -> Result<u64, Error>;

    /// Returns once everything that other nodes had stored before the call is applied here, so that
    /// nothing that exists is taken for missing. Returns at once where there are no other nodes.
    async fn catch_up(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Whether everything that any node has announced as applied everywhere is applied here. Always
    /// true where there are no other nodes; a node without contact to the others cannot know and
    /// says no.
    fn is_current(&self) -> bool {
        true
    }

    /// Returns once no node acts on an older catalog than the one known here: every node has
    /// applied it, or is not current. The changes are durable even if this fails.
    async fn in_force_everywhere(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Passes the follower everything that other nodes have changed since the last `load`, for as
    /// long as the future is polled. May be called once. Does nothing where there are no other
    /// nodes.
    async fn follow(&self, _follower: Arc<dyn CatalogFollower>) {}
}

/// Applies changes of other nodes to what this node acts on.
#[async_trait]
pub trait CatalogFollower: Send + Sync {
    /// Applies the changes of one commit, or of several that arrived together, in order. The next
    /// call is made only after this one has returned, which means that they are applied. `sequence`
    /// never decreases from call to call.
    async fn changed(&self, changes: Vec<CatalogChange>, sequence: u64);
}
