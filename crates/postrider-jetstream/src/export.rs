//! Export of the open deliveries in this node's partitions, and import of another log's.
//!
//! The process that migrates a cluster owns all of its partitions.

use crate::log::JetStreamLog;
use crate::partition::deliveries::{DeadLetterState, PartitionDeliveries};
use crate::partition::journal::{AttemptState, JournalRecord};
use crate::partition::{Partition, ReadMessages, partition_of, sequence_of};
use async_trait::async_trait;
use futures_util::future::try_join_all;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_store::moving::{DeliveryStage, ExportedRequest, LogExport, MovableLog, OpenDelivery};
use postrider_store::{Error, EventLog};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Number of messages of a partition that are read ahead, about a megabyte.
const AHEAD_MESSAGES: usize = 8;
/// Approximate size of a portion of the export.
const EXPORT_BYTES: usize = 4 << 20;
const EXPORT_REQUESTS: usize = 4096;

#[async_trait]
impl MovableLog for JetStreamLog {
    fn export(&self) -> Box<dyn LogExport + '_> {
        let partitions = self.partitions();
        Box::new(JetStreamExport {
            log: self,
            flushed: false,
            lines: partitions
                .iter()
                .map(|one| PartitionExport::new(one.clone()))
                .collect(),
        })
    }

    async fn import(&self, moved: Vec<ExportedRequest>) -> Result<(), Error> {
        let firsts = try_join_all(moved.iter().map(|one| self.append(one.batch()))).await?;
        for (one, first) in moved.iter().zip(firsts) {
            let number = partition_of(first);
            let Some(partition) = self.partition(number) else {
                return Err(Error::Unavailable(format!("partition {number:02} was lost")));
            };
            let at = |index: u32| Position(first.0 + u64::from(index));
            let records = one.open.iter().filter_map(|open| record(open, at(open.index)));
            partition.note(records.collect()).await;
        }
        self.flush().await
    }
}

/// The journal record for a delivery that was attempted in the other log.
fn record(open: &OpenDelivery, position: Position) -> Option<JournalRecord> {
    let (of, was) = (open.of, None);
    let tried = |attempts, last| AttemptState { attempts, last };
    match open.stage {
        DeliveryStage::Waiting => None,
        DeliveryStage::Retry {
            due,
            attempts_made,
            last_attempt,
        } => Some(JournalRecord::Retry {
            of,
            was,
            position,
            due,
            tried: tried(attempts_made, last_attempt),
        }),
        DeliveryStage::Letter {
            decided,
            attempts_made,
            last_attempt,
            reason,
        } => Some(JournalRecord::Letter {
            of,
            was,
            position,
            decided,
            tried: tried(attempts_made, last_attempt),
            reason,
        }),
    }
}

/// Merges all partitions, oldest request first: in the order of publishing, as far as one machine's
/// clock can tell.
struct JetStreamExport<'l> {
    log: &'l JetStreamLog,
    flushed: bool,
    lines: Vec<PartitionExport>,
}

#[async_trait]
impl LogExport for JetStreamExport<'_> {
    async fn next(&mut self) -> Result<Vec<ExportedRequest>, Error> {
        if !self.flushed {
            self.log.flush().await?;
            self.flushed = true;
        }
        let mut moved = Vec::new();
        let mut bytes = 0;
        while bytes < EXPORT_BYTES && moved.len() < EXPORT_REQUESTS {
            for line in &mut self.lines {
                line.fill().await?;
            }
            let received = |line: &PartitionExport| line.ready.front().map(|one| one.entry.batch.received);
            let waiting = self.lines.iter_mut().filter(|line| !line.ready.is_empty());
            let Some(next) = waiting
                .min_by_key(|line| received(line))
                .and_then(|line| line.ready.pop_front())
            else {
                break;
            };
            bytes += next.entry.batch.body.len();
            moved.push(next);
        }
        Ok(moved)
    }
}

/// The open deliveries of a message.
type MessageDeliveries = Vec<(Position, SubscriptionId, DeliveryStage)>;

/// The export of a partition, chunk by chunk.
struct PartitionExport {
    partition: Arc<Partition>,
    /// The first and last sequence of the chunks that follow; `None` before the first read.
    chunks: Option<VecDeque<(u64, u64)>>,
    /// Retries and dead letters ordered by position, the last ones at the front.
    tried: Vec<(Position, SubscriptionId, DeliveryStage)>,
    messages: VecDeque<(u64, MessageDeliveries)>,
    ready: VecDeque<ExportedRequest>,
}

impl PartitionExport {
    fn new(partition: Arc<Partition>) -> PartitionExport {
        PartitionExport {
            partition,
            chunks: None,
            tried: Vec::new(),
            messages: VecDeque::new(),
            ready: VecDeque::new(),
        }
    }

    /// Ensures that a request is ready, unless the partition is exhausted.
    async fn fill(&mut self) -> Result<(), Error> {
        while self.ready.is_empty() {
            if self.messages.is_empty() && !self.next_chunk() {
                return Ok(());
            }
            let count = self.messages.len().min(AHEAD_MESSAGES);
            let messages: Vec<(u64, MessageDeliveries)> = self.messages.drain(..count).collect();
            let mut read = ReadMessages::default();
            for (n, (sequence, open)) in messages.iter().enumerate() {
                if !read.contains_key(sequence) {
                    let positions: Vec<Position> = messages[n..]
                        .iter()
                        .filter_map(|(_, open)| open.first().map(|one| one.0))
                        .collect();
                    // The first position is always read; if that fails for good, its message is
                    // dropped and counted.
                    self.partition.read(&positions, &mut read).await?;
                }
                self.ready.extend(requests(&self.partition, open, &read));
            }
        }
        Ok(())
    }

    /// Collects the open deliveries of the next chunk. Returns false after the last.
    fn next_chunk(&mut self) -> bool {
        let book = self.partition.book();
        let chunks = self.chunks.get_or_insert_with(|| {
            self.tried = tried_of(&book);
            let chunks = book.chunks.0.iter().filter(|(_, chunk)| chunk.outstanding > 0);
            chunks.map(|(first, chunk)| (*first, chunk.last)).collect()
        });
        let Some((first, last)) = chunks.pop_front() else {
            return false;
        };
        let mut open: BTreeMap<u64, MessageDeliveries> = BTreeMap::new();
        for (of, sub) in &book.subs {
            let start = sub
                .waiting
                .partition_point(|one| sequence_of(one.position) < first);
            for one in sub.waiting.range(start..) {
                let sequence = sequence_of(one.position);
                if sequence > last {
                    break;
                }
                open.entry(sequence)
                    .or_default()
                    .push((one.position, *of, DeliveryStage::Waiting));
            }
        }
        while let Some(one) = self.tried.pop_if(|one| sequence_of(one.0) <= last) {
            open.entry(sequence_of(one.0)).or_default().push(one);
        }
        for all in open.values_mut() {
            all.sort_by_key(|(position, of, _)| (*position, *of));
        }
        self.messages = open.into_iter().collect();
        true
    }
}

fn tried_of(book: &PartitionDeliveries) -> Vec<(Position, SubscriptionId, DeliveryStage)> {
    let mut all = Vec::new();
    for (of, sub) in &book.subs {
        for ((due, position), retry) in &sub.retrying {
            let stage = DeliveryStage::Retry {
                due: *due,
                attempts_made: retry.tried.attempts,
                last_attempt: retry.tried.last,
            };
            all.push((*position, *of, stage));
        }
        for ((decided, position), DeadLetterState { tried, reason }) in &sub.letters {
            let stage = DeliveryStage::Letter {
                decided: *decided,
                attempts_made: tried.attempts,
                last_attempt: tried.last,
                reason: *reason,
            };
            all.push((*position, *of, stage));
        }
    }
    all.sort_unstable_by_key(|(position, of, _)| std::cmp::Reverse((*position, *of)));
    all
}

/// The requests of a message that have open deliveries.
fn requests(partition: &Partition, open: &MessageDeliveries, read: &ReadMessages) -> Vec<ExportedRequest> {
    let mut moved: Vec<ExportedRequest> = Vec::new();
    for (position, of, stage) in open {
        let Some((entry, index)) = partition.find(*position, read) else {
            continue;
        };
        let one = OpenDelivery {
            index,
            of: *of,
            stage: *stage,
        };
        match moved.last_mut() {
            Some(last) if last.entry.first == entry.first => last.open.push(one),
            _ => moved.push(ExportedRequest {
                entry,
                open: vec![one],
            }),
        }
    }
    moved
}
