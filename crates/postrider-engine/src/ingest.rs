//! Accepting events: the routed events are appended to the log; the call returns once they are
//! durable.

use crate::counters::add;
use crate::directory::{EventRouter, RoutingResult, TopicEntry};
use crate::dispatch::metering::MatchedSubscriptions;
use crate::recorder::AcceptedRequest;
use crate::{Engine, Error};
use postrider_core::event::PublishedBatch;
use postrider_core::filter::FilterBudget;
use postrider_core::time::Timestamp;
use std::sync::Arc;

impl Engine {
    /// A router for the events of one publish request.
    pub fn router<'a>(&self, topic: &'a TopicEntry, now: Timestamp, budget: FilterBudget) -> EventRouter<'a> {
        if self.recorder.on() {
            EventRouter::noting(topic, now, budget)
        } else {
            EventRouter::new(topic, now, budget)
        }
    }

    /// Makes the events of one publish request durable. After `Ok`, each reaches every subscription
    /// that it matched, or is given up with a reason.
    pub async fn accept(
        &self,
        topic: &TopicEntry,
        batch: PublishedBatch,
        routed: RoutingResult,
    ) -> Result<(), Error> {
        if self.stopping.is_cancelled() {
            return Err(Error::Stopping);
        }
        let RoutingResult {
            unmatched,
            verdicts,
            audience,
        } = routed;
        let (events, received) = (batch.events.len(), batch.received);
        // A cheap clone: the events' text is shared.
        let kept = self.recorder.on().then(|| Arc::new(batch.clone()));
        let mut first = None;
        // Events without a matching subscription are counted and need no space on disk.
        if unmatched < events {
            let wanted = MatchedSubscriptions::of(&batch);
            first = Some(self.log.append(batch).await?);
            self.dispatcher.count_matched(&wanted);
        }
        if let Some(batch) = kept {
            self.recorder.accepted(AcceptedRequest {
                first,
                batch,
                audience: audience.unwrap_or_else(|| topic.audience().clone()),
                verdicts,
            });
        }
        let now = self.clock.now();
        for meter in [&self.dispatcher.meter, &topic.published.meter] {
            meter.published(now, events);
        }
        let took = now.since(received).as_micros();
        add(&topic.published.micros, took as usize);
        add(&topic.published.requests, 1);
        add(&topic.published.events, events);
        if unmatched > 0 {
            add(&topic.published.unmatched, unmatched);
        }
        Ok(())
    }
}
