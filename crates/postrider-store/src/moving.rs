//! Moving the content of a log into another log: all deliveries that have not ended, with their
//! state.

use crate::Error;
use crate::log::{LastAttempt, LogEntry};
use async_trait::async_trait;
use postrider_core::event::PublishedBatch;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How far a delivery has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryStage {
    /// Waits for its first attempt.
    Waiting,
    Retry {
        due: Timestamp,
        attempts_made: u32,
        last_attempt: Option<LastAttempt>,
    },
    /// Given up, and the dead letter is not in a blob yet.
    Letter {
        decided: Timestamp,
        attempts_made: u32,
        last_attempt: Option<LastAttempt>,
        reason: GiveUpReason,
    },
}

/// A delivery that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenDelivery {
    /// Index of the event in the entry.
    pub index: u32,
    pub of: SubscriptionId,
    pub stage: DeliveryStage,
}

/// A publish request with all of its deliveries that have not ended.
#[derive(Clone, Debug)]
pub struct ExportedRequest {
    pub entry: Arc<LogEntry>,
    /// Ordered by event and subscription, never empty.
    pub open: Vec<OpenDelivery>,
}

impl ExportedRequest {
    /// The publish request with match sets reduced to the subscriptions whose deliveries are open.
    pub fn batch(&self) -> PublishedBatch {
        let mut batch = self.entry.batch.clone();
        let mut sets: BTreeMap<Box<[SubscriptionId]>, u32> = BTreeMap::new();
        let mut matched = Vec::new();
        let mut open = self.open.iter().peekable();
        for (index, event) in batch.events.iter_mut().enumerate() {
            let mut set = Vec::new();
            while let Some(one) = open.next_if(|one| one.index as usize == index) {
                set.push(one.of);
            }
            set.dedup();
            let set = set.into_boxed_slice();
            event.matched = *sets.entry(set).or_insert_with_key(|set| {
                matched.push(set.clone());
                matched.len() as u32 - 1
            });
        }
        batch.matched = matched;
        batch
    }
}

/// A log whose content can be moved. Nobody else may use the log meanwhile, and there may be no
/// claims.
#[async_trait]
pub trait MovableLog: Send + Sync {
    /// Exports all open deliveries, each publish request once, in the order of publishing as far as
    /// known.
    fn export(&self) -> Box<dyn LogExport + '_>;

    /// Imports what another log has exported. Durable on return; can be claimed once the log is
    /// reopened. After an `Err` a part of it may have been imported.
    async fn import(&self, moved: Vec<ExportedRequest>) -> Result<(), Error>;
}

#[async_trait]
pub trait LogExport: Send {
    /// The next requests, at most a few megabytes unless a single request is larger; empty at the
    /// end. Unreadable requests are left out and counted in the log's health.
    async fn next(&mut self) -> Result<Vec<ExportedRequest>, Error>;
}
