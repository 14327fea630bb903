//! Export of a log's open deliveries, and import of another log's.

use crate::segment::{Segment, log_name};
use crate::state::OpenDeliveryRow;
use crate::{EmbeddedLog, LogShared};
use async_trait::async_trait;
use futures_util::future::try_join_all;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::NextStep;
use postrider_core::time::Timestamp;
use postrider_store::moving::{DeliveryStage, ExportedRequest, LogExport, MovableLog, OpenDelivery};
use postrider_store::{ClaimLimits, Error, EventLog, Settlement};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// About this much of the log is read at once.
const EXPORT_BYTES: usize = 4 << 20;
const EXPORT_RECORDS: usize = 4096;
/// Number of retries and dead letters kept in memory for the segments that are read next: about
/// fifty megabytes. The tables are ordered by time, so selecting rows by position scans all of
/// them.
const ROWS_MAX: u64 = 500_000;
/// Bytes of events that are claimed at once in order to be settled as they were in the other log.
const CLAIM_BYTES: usize = 4 << 20;

#[async_trait]
impl MovableLog for EmbeddedLog {
    fn export(&self) -> Box<dyn LogExport + '_> {
        Box::new(EmbeddedExport {
            log: self,
            at: None,
            over: false,
        })
    }

    async fn import(&self, moved: Vec<ExportedRequest>) -> Result<(), Error> {
        let firsts = try_join_all(moved.iter().map(|one| self.append(one.batch()))).await?;
        let mut later: BTreeMap<SubscriptionId, BTreeMap<Position, DeliveryStage>> = BTreeMap::new();
        for (one, first) in moved.iter().zip(firsts) {
            for OpenDelivery { index, of, stage } in &one.open {
                if *stage != DeliveryStage::Waiting {
                    let position = Position(first.0 + u64::from(*index));
                    later.entry(*of).or_default().insert(position, *stage);
                }
            }
        }
        drop(moved);
        for (of, stages) in later {
            self.settle_as(of, stages).await?;
        }
        self.flush().await
    }
}

impl EmbeddedLog {
    /// Claims first attempts up to the last of these and settles these. The others stay claimed: an
    /// abandoned claim is offered again when the log is reopened.
    async fn settle_as(
        &self,
        of: SubscriptionId,
        mut stages: BTreeMap<Position, DeliveryStage>,
    ) -> Result<(), Error> {
        while !stages.is_empty() {
            let want = ClaimLimits {
                // Must not claim beyond the last event of `stages`.
                events_max: stages.len(),
                bytes_max: CLAIM_BYTES,
                overhead: 0,
            };
            let claims = self.claim(of, Timestamp::MIN, want).await?;
            if claims.is_empty() {
                return Err(Error::Corrupt(format!(
                    "subscription {of} was not opened before its events were moved"
                )));
            }
            let settled = claims.into_iter().filter_map(|claim| {
                let stage = stages.remove(&claim.position())?;
                Some(match stage {
                    DeliveryStage::Waiting => return None,
                    DeliveryStage::Retry {
                        due,
                        attempts_made,
                        last_attempt,
                    } => Settlement {
                        claim,
                        at: due,
                        attempts_made,
                        last_attempt,
                        next: NextStep::RetryAt(due),
                    },
                    DeliveryStage::Letter {
                        decided,
                        attempts_made,
                        last_attempt,
                        reason,
                    } => Settlement {
                        claim,
                        at: decided,
                        attempts_made,
                        last_attempt,
                        next: NextStep::DeadLetter(reason),
                    },
                })
            });
            self.settle(of, settled.collect()).await?;
        }
        Ok(())
    }
}

struct EmbeddedExport<'l> {
    log: &'l EmbeddedLog,
    /// `None` before the first read, and while a read is running.
    at: Option<Box<ExportCursor>>,
    over: bool,
}

#[async_trait]
impl LogExport for EmbeddedExport<'_> {
    async fn next(&mut self) -> Result<Vec<ExportedRequest>, Error> {
        if self.over {
            return Ok(Vec::new());
        }
        let mut at = match self.at.take() {
            Some(at) => at,
            None => {
                self.log.flush().await?;
                Box::new(ExportCursor::new(self.log.shared.clone()))
            }
        };
        let work = tokio::task::spawn_blocking(move || at.next().map(|moved| (at, moved)));
        let (at, moved) = work.await.map_err(|_| Error::Closed)??;
        self.over = moved.is_empty();
        self.at = Some(at);
        Ok(moved)
    }
}

/// How far an export has come.
struct ExportCursor {
    shared: Arc<LogShared>,
    /// Segments that follow, in order.
    segments: VecDeque<Arc<Segment>>,
    /// The segment that is being read.
    reading: Option<Arc<Segment>>,
    /// For each record still to be read: its offset, and the number of deliveries lost if it is
    /// damaged.
    records: VecDeque<(u64, u64)>,
    /// Retries and dead letters at positions below `known`, by position and subscription.
    rows: VecDeque<OpenDeliveryRow>,
    known: Position,
}

impl ExportCursor {
    fn new(shared: Arc<LogShared>) -> ExportCursor {
        let segments = {
            let segments = shared.segments.read().expect("no panic holds it");
            segments.values().cloned().collect()
        };
        ExportCursor {
            shared,
            segments,
            reading: None,
            records: VecDeque::new(),
            rows: VecDeque::new(),
            known: Position(0),
        }
    }

    fn next(&mut self) -> Result<Vec<ExportedRequest>, Error> {
        let unreadable = |e| Error::Unavailable(format!("reading the log: {e}"));
        loop {
            let Some(segment) = self.reading.clone().filter(|_| !self.records.is_empty()) else {
                let Some(segment) = self.segments.pop_front() else {
                    return Ok(Vec::new());
                };
                self.begin(&segment)?;
                self.reading = Some(segment);
                continue;
            };
            let offsets: Vec<u64> = self
                .records
                .iter()
                .take(EXPORT_RECORDS)
                .map(|one| one.0)
                .collect();
            let records = segment.read_many(&offsets, EXPORT_BYTES).map_err(unreadable)?;
            let mut moved = Vec::new();
            for ((offset, record), (_, lost)) in records.iter().zip(self.records.drain(..records.len())) {
                let entry = record
                    .as_ref()
                    .and_then(|(header, payload)| self.shared.entry(*offset, header, payload));
                let Some(entry) = entry else {
                    self.shared
                        .note_corrupt(format!("{} at byte {offset}", log_name(segment.base)));
                    self.shared.corrupt_deliveries.fetch_add(lost, Relaxed);
                    continue;
                };
                let open = open_of(&self.shared, &entry, &mut self.rows);
                if !open.is_empty() {
                    moved.push(ExportedRequest { entry, open });
                }
            }
            if !moved.is_empty() {
                return Ok(moved);
            }
        }
    }

    /// Finds the records of a segment with open deliveries.
    fn begin(&mut self, segment: &Arc<Segment>) -> Result<(), Error> {
        self.learn(segment)?;
        let unreadable = |e| Error::Unavailable(format!("reading the log: {e}"));
        let mut records: BTreeMap<u64, u64> = BTreeMap::new();
        for (of, last, _) in segment.subscriptions() {
            let Some(sub) = self.shared.sub(of) else {
                continue;
            };
            let (needs, lowest) = {
                let queue = sub.queue.lock().expect("no panic holds it");
                (queue.needs(last), queue.lowest())
            };
            if !needs {
                continue;
            }
            for entry in segment.entries(of, lowest, usize::MAX).map_err(unreadable)? {
                *records.entry(u64::from(entry.offset)).or_default() += u64::from(entry.matches);
            }
        }
        for (_, delivery, _) in &self.rows {
            if delivery.segment == segment.base {
                *records.entry(u64::from(delivery.offset)).or_default() += 1;
            }
        }
        self.records = records.into_iter().collect();
        Ok(())
    }

    /// Loads the retries and dead letters of a segment, and of as many following segments as memory
    /// allows.
    fn learn(&mut self, segment: &Arc<Segment>) -> Result<(), Error> {
        if segment.end() <= self.known {
            return Ok(());
        }
        let (mut end, mut rows) = (segment.end(), 0);
        {
            let references: FxHashMap<u64, u64> =
                self.shared.references.lock().expect("no panic holds it").clone();
            rows += references.get(&segment.base.0).copied().unwrap_or(0);
            for next in &self.segments {
                let more = references.get(&next.base.0).copied().unwrap_or(0);
                if rows + more > ROWS_MAX {
                    break;
                }
                rows += more;
                end = next.end();
            }
        }
        self.rows.clear();
        if rows > 0 {
            self.rows = self.shared.state.open_within(segment.base..end)?.into();
        }
        self.known = end;
        Ok(())
    }
}

/// The open deliveries of a record, with retries and dead letters taken from the loaded rows.
fn open_of(
    shared: &LogShared,
    entry: &postrider_store::LogEntry,
    rows: &mut VecDeque<OpenDeliveryRow>,
) -> Vec<OpenDelivery> {
    let batch = &entry.batch;
    let mut open = Vec::new();
    for index in 0..batch.events.len() {
        let position = Position(entry.first.0 + index as u64);
        for of in batch.matched(index) {
            let waits = shared
                .sub(*of)
                .is_some_and(|sub| sub.queue.lock().expect("no panic holds it").is_open(position));
            if waits {
                open.push(OpenDelivery {
                    index: index as u32,
                    of: *of,
                    stage: DeliveryStage::Waiting,
                });
            }
        }
    }
    let end = entry.first.0 + batch.events.len() as u64;
    while let Some((of, delivery, reason)) = rows.front().filter(|row| row.1.position.0 < end).copied() {
        rows.pop_front();
        if delivery.position < entry.first || shared.sub(of).is_none() {
            // The row's record is damaged, or its subscription is closed.
            continue;
        }
        let stage = match reason {
            None => DeliveryStage::Retry {
                due: delivery.due,
                attempts_made: delivery.attempts_made,
                last_attempt: delivery.last,
            },
            Some(reason) => DeliveryStage::Letter {
                decided: delivery.due,
                attempts_made: delivery.attempts_made,
                last_attempt: delivery.last,
                reason,
            },
        };
        let index = (delivery.position.0 - entry.first.0) as u32;
        open.push(OpenDelivery { index, of, stage });
    }
    open.sort_by_key(|one| (one.index, one.of));
    open
}
