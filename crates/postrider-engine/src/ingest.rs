//! Accepting events: what was routed is appended; the call returns when it is durable.

use crate::counters::add;
use crate::directory::TopicEntry;
use crate::{Engine, Error};
use postrider_core::event::Batch;

impl Engine {
    /// Makes the events of one publish request durable. After `Ok` they will reach every
    /// subscription that they matched, or be set aside with a reason.
    pub async fn accept(&self, topic: &TopicEntry, batch: Batch, unmatched: usize) -> Result<(), Error> {
        if self.stopping.is_cancelled() {
            return Err(Error::Stopping);
        }
        let events = batch.events.len();
        // Events that nobody wants are counted and need no place on disk.
        if unmatched < events {
            let matched = batch.deliveries();
            self.log.append(batch).await?;
            add(&self.dispatcher.counters.matched, matched);
        }
        add(&topic.published.requests, 1);
        add(&topic.published.events, events);
        if unmatched > 0 {
            add(&topic.published.unmatched, unmatched);
        }
        Ok(())
    }
}
