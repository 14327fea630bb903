//! Moving a log into another one: everything that has not come to its end, with what has become of it so far.

use crate::Error;
use crate::log::{Entry, LastAttempt};
use async_trait::async_trait;
use postrider_core::event::Batch;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::Reason;
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How far one delivery has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It waits for its first attempt.
    Waiting,
    Retry {
        due: Timestamp,
        attempts_made: u32,
        last_attempt: Option<LastAttempt>,
    },
    /// It was given up and is not written anywhere yet.
    Letter {
        decided: Timestamp,
        attempts_made: u32,
        last_attempt: Option<LastAttempt>,
        reason: Reason,
    },
}

/// A delivery that has not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Which event of the entry.
    pub index: u32,
    pub of: SubscriptionId,
    pub stage: Stage,
}

/// A publish request with all of its deliveries that have not come to their end.
#[derive(Clone, Debug)]
pub struct Moved {
    pub entry: Arc<Entry>,
    /// Ordered by event and subscription, never empty.
    pub open: Vec<Open>,
}

impl Moved {
    /// The request as if it had matched only those for whom something is open.
    pub fn batch(&self) -> Batch {
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

/// A log that can be moved. Nobody else may use it meanwhile, and nothing may be claimed.
#[async_trait]
pub trait Moving: Send + Sync {
    /// Everything that is open, each request once, in the order of publishing as far as the log knows it.
    fn export(&self) -> Box<dyn Export + '_>;

    /// Takes in what another log has exported. It is durable on return, and can be claimed once the log is opened anew.
    /// After an `Err` some of it may be there.
    async fn import(&self, moved: Vec<Moved>) -> Result<(), Error>;
}

#[async_trait]
pub trait Export: Send {
    /// The next requests, a few megabytes at most unless one is larger; none when that was all. What cannot be read
    /// any more is counted in the log's health and left out.
    async fn next(&mut self) -> Result<Vec<Moved>, Error>;
}
