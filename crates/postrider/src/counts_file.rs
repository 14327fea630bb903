//! File of counts in the data directory: totals and charts continue across restarts.

use crate::credentials;
use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use postrider_api::CounterPersistence;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::Engine;
use postrider_engine::counters::{DeliveryTotals, PublishTotals};
use postrider_engine::meters::{FailureCause, FailureEffect, MeterMinute, MinuteLatencies};
use postrider_engine::numbers_snapshot::{CountedResource, NumbersSnapshot};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

const FILE: &str = "numbers.json";
const VERSION: u32 = 1;
/// Pauses between writes, by the machine's clock: a killed process loses the counts since the last
/// write. The pause grows with the file, so that at most a hundredth of the time is spent on
/// writing.
const PAUSE_MIN: Duration = Duration::from_secs(5);
const PAUSE_MAX: Duration = Duration::from_secs(60);
const PAUSE_PER_WRITE: u32 = 100;
/// Longer files are not read: the bounds of a snapshot allow less than half of this.
const BYTES_MAX: u64 = 64 << 20;

/// Counts file of one data directory.
pub struct CountsFile {
    path: PathBuf,
    /// Identity of the log: positions and ids have no meaning for another log.
    identity: u64,
    engine: Arc<Engine>,
    /// Hash of the last written content, so that unchanged counts are not written again. The lock
    /// is held during a write.
    written: Mutex<Option<u64>>,
}

impl CountsFile {
    /// Restores the counts of an earlier process. An unreadable file is warned of, and counts start
    /// at zero.
    pub fn restore(data_dir: &Path, identity: u64, engine: Arc<Engine>) -> Arc<CountsFile> {
        let path = data_dir.join(FILE);
        match read(&path, identity) {
            Ok(Some(snapshot)) => engine.restore_numbers(snapshot),
            Ok(None) => {}
            Err(e) => tracing::warn!(
                path = %path.display(),
                error = format!("{e:#}"),
                "totals and charts of earlier runs cannot be read: counting begins anew"
            ),
        }
        Arc::new(CountsFile {
            path,
            identity,
            engine,
            written: Mutex::new(None),
        })
    }

    /// Writes the file regularly until the server stops.
    pub async fn keep_until(self: Arc<Self>, stop: CancellationToken, clock: impl Clock) {
        let mut pause = PAUSE_MIN;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = clock.sleep_until(clock.now() + pause) => {}
            }
            let begun = clock.now();
            self.save().await;
            let took = clock.now().since(begun);
            pause = took.saturating_mul(PAUSE_PER_WRITE).clamp(PAUSE_MIN, PAUSE_MAX);
        }
    }

    /// Writes the present counts. A failure is only logged: the counts are for display.
    pub async fn save(&self) {
        let mut written = self.written.lock().await;
        let record = FileRecord::of(&self.engine.numbers_snapshot(), self.identity);
        let (path, before) = (self.path.clone(), *written);
        let saved = tokio::task::spawn_blocking(move || -> Result<u64> {
            let text = serde_json::to_string(&record)?;
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            let now = hasher.finish();
            if before != Some(now) {
                credentials::write_private(&path, &text)?;
            }
            Ok(now)
        });
        match saved.await {
            Ok(Ok(now)) => *written = Some(now),
            Ok(Err(e)) => tracing::warn!(
                error = format!("{e:#}"),
                "totals and charts cannot be written: a restart would begin with older ones"
            ),
            Err(e) => tracing::warn!(error = %e, "totals and charts were not written"),
        }
    }
}

#[async_trait]
impl CounterPersistence for CountsFile {
    async fn keep(&self) {
        self.save().await;
    }
}

fn read(path: &Path, identity: u64) -> Result<Option<NumbersSnapshot>> {
    match std::fs::metadata(path) {
        Ok(file) if file.len() > BYTES_MAX => {
            bail!("the file has {} bytes, more than {BYTES_MAX}", file.len())
        }
        _ => {}
    }
    let Some(text) = credentials::read_if_there(path)? else {
        return Ok(None);
    };
    let version: VersionRecord = serde_json::from_str(&text).context("it is not JSON of ours")?;
    if version.v != VERSION {
        bail!("it has version {}, and this program knows {VERSION}", version.v);
    }
    let record: FileRecord = serde_json::from_str(&text).context("a value is not what it should be")?;
    if record.identity != identity {
        bail!("it belongs to another log");
    }
    Ok(Some(record.into()))
}

#[derive(Deserialize)]
struct VersionRecord {
    v: u32,
}

/// The file's content, as docs/data.md describes it.
#[derive(Serialize, Deserialize)]
struct FileRecord {
    v: u32,
    identity: u64,
    /// Nanoseconds since the Unix epoch.
    since: i64,
    counts: CountsRecord,
    minutes: Vec<MinuteRecord>,
    subscriptions: BTreeMap<u64, SubscriptionRecord>,
    topics: BTreeMap<u64, TopicRecord>,
}

#[derive(Serialize, Deserialize)]
struct SubscriptionRecord {
    counts: CountsRecord,
    minutes: Vec<MinuteRecord>,
}

#[derive(Serialize, Deserialize)]
struct TopicRecord {
    events: u64,
    unmatched: u64,
    refused: u64,
    minutes: Vec<MinuteRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CountsRecord {
    matched: u64,
    attempts: u64,
    failed: u64,
    delivered: u64,
    /// Counts by reason number.
    dead_lettered: BTreeMap<u8, u64>,
    dropped: BTreeMap<u8, u64>,
}

/// Minute, published, delivered, attempts, failed, dead-lettered, dropped, causes, latencies.
#[derive(Serialize, Deserialize)]
struct MinuteRecord(
    i64,
    u64,
    u64,
    u32,
    u32,
    u32,
    u32,
    Vec<CauseRecord>,
    Vec<(u16, u32)>,
);

/// Effect (0 attempt failed, 1 dead-lettered, 2 dropped), reason, outcome, status, count.
#[derive(Serialize, Deserialize)]
struct CauseRecord(u8, u8, Option<u8>, Option<u16>, u32);

impl FileRecord {
    fn of(snapshot: &NumbersSnapshot, identity: u64) -> FileRecord {
        let subscriptions = snapshot.subscriptions.iter().map(|(id, one)| {
            let record = SubscriptionRecord {
                counts: (&one.totals).into(),
                minutes: minutes(&one.minutes),
            };
            (id.0, record)
        });
        let topics = snapshot.topics.iter().map(|(id, one)| {
            let record = TopicRecord {
                events: one.totals.events,
                unmatched: one.totals.unmatched,
                refused: one.totals.refused,
                minutes: minutes(&one.minutes),
            };
            (id.0, record)
        });
        FileRecord {
            v: VERSION,
            identity,
            since: snapshot.since.nanos(),
            counts: (&snapshot.counts).into(),
            minutes: minutes(&snapshot.minutes),
            subscriptions: subscriptions.collect(),
            topics: topics.collect(),
        }
    }
}

impl From<FileRecord> for NumbersSnapshot {
    fn from(record: FileRecord) -> NumbersSnapshot {
        let subscriptions = record.subscriptions.into_iter().map(|(id, one)| {
            let counted = CountedResource {
                totals: one.counts.into(),
                minutes: one.minutes.into_iter().map(MeterMinute::from).collect(),
            };
            (SubscriptionId(id), counted)
        });
        let topics = record.topics.into_iter().map(|(id, one)| {
            let totals = PublishTotals {
                events: one.events,
                unmatched: one.unmatched,
                refused: one.refused,
            };
            let minutes = one.minutes.into_iter().map(MeterMinute::from).collect();
            (TopicId(id), CountedResource { totals, minutes })
        });
        NumbersSnapshot {
            since: Timestamp::from_nanos(record.since),
            counts: record.counts.into(),
            minutes: record.minutes.into_iter().map(MeterMinute::from).collect(),
            subscriptions: subscriptions.collect(),
            topics: topics.collect(),
        }
    }
}

impl From<&DeliveryTotals> for CountsRecord {
    fn from(totals: &DeliveryTotals) -> CountsRecord {
        let by_reason = |counts: &[u64; GiveUpReason::ALL.len()]| {
            let all = GiveUpReason::ALL
                .iter()
                .zip(counts)
                .filter(|(_, count)| **count > 0);
            all.map(|(reason, count)| (reason.code(), *count)).collect()
        };
        CountsRecord {
            matched: totals.matched,
            attempts: totals.attempts,
            failed: totals.attempts_failed,
            delivered: totals.delivered,
            dead_lettered: by_reason(&totals.dead_lettered),
            dropped: by_reason(&totals.dropped),
        }
    }
}

impl From<CountsRecord> for DeliveryTotals {
    fn from(record: CountsRecord) -> DeliveryTotals {
        let each = |counts: BTreeMap<u8, u64>| {
            std::array::from_fn(|at| counts.get(&GiveUpReason::ALL[at].code()).copied().unwrap_or(0))
        };
        DeliveryTotals {
            matched: record.matched,
            attempts: record.attempts,
            attempts_failed: record.failed,
            delivered: record.delivered,
            dead_lettered: each(record.dead_lettered),
            dropped: each(record.dropped),
        }
    }
}

fn minutes(all: &[MeterMinute]) -> Vec<MinuteRecord> {
    let record = |minute: &MeterMinute| {
        let causes = minute.causes.iter().map(|(cause, count)| {
            let (effect, reason) = match cause.effect {
                FailureEffect::AttemptFailed => (0, 0),
                FailureEffect::DeadLettered(reason) => (1, reason.code()),
                FailureEffect::Dropped(reason) => (2, reason.code()),
            };
            CauseRecord(
                effect,
                reason,
                cause.outcome.map(Outcome::code),
                cause.status,
                *count,
            )
        });
        MinuteRecord(
            minute.number,
            minute.published,
            minute.delivered,
            minute.attempts,
            minute.failed,
            minute.dead_lettered,
            minute.dropped,
            causes.collect(),
            minute.latency.0.clone(),
        )
    };
    all.iter().map(record).collect()
}

impl From<MinuteRecord> for MeterMinute {
    fn from(record: MinuteRecord) -> MeterMinute {
        let MinuteRecord(
            number,
            published,
            delivered,
            attempts,
            failed,
            dead_lettered,
            dropped,
            causes,
            latency,
        ) = record;
        let causes = causes
            .into_iter()
            .map(|CauseRecord(effect, reason, outcome, status, count)| {
                let reason = GiveUpReason::from_code(reason);
                let effect = match effect {
                    0 => FailureEffect::AttemptFailed,
                    1 => FailureEffect::DeadLettered(reason),
                    _ => FailureEffect::Dropped(reason),
                };
                let cause = FailureCause {
                    effect,
                    outcome: outcome.map(Outcome::from_code),
                    status,
                };
                (cause, count)
            });
        MeterMinute {
            number,
            published,
            delivered,
            attempts,
            failed,
            dead_lettered,
            dropped,
            causes: causes.collect(),
            latency: MinuteLatencies(latency),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot() -> NumbersSnapshot {
        let minute = MeterMinute {
            number: 28_000_000,
            published: 7,
            delivered: 5,
            attempts: 6,
            failed: 1,
            dead_lettered: 1,
            dropped: 2,
            causes: [
                (FailureEffect::AttemptFailed, Some(Outcome::Busy), Some(503)),
                (
                    FailureEffect::DeadLettered(GiveUpReason::AttemptsExhausted),
                    None,
                    None,
                ),
                (
                    FailureEffect::Dropped(GiveUpReason::BadRequest),
                    Some(Outcome::BadRequest),
                    Some(400),
                ),
            ]
            .map(|(effect, outcome, status)| {
                let cause = FailureCause {
                    effect,
                    outcome,
                    status,
                };
                (cause, 1)
            })
            .to_vec(),
            latency: MinuteLatencies(vec![(3, 4), (17, 1)]),
        };
        let mut totals = DeliveryTotals {
            matched: 9,
            attempts: 6,
            attempts_failed: 1,
            delivered: 5,
            ..DeliveryTotals::default()
        };
        totals.dropped[usize::from(GiveUpReason::BadRequest.code())] = 2;
        totals.dead_lettered[usize::from(GiveUpReason::AttemptsExhausted.code())] = 1;
        let published = PublishTotals {
            events: 7,
            unmatched: 1,
            refused: 3,
        };
        NumbersSnapshot {
            since: Timestamp::from_secs(1_680_000_000),
            counts: totals.clone(),
            minutes: vec![minute.clone()],
            subscriptions: BTreeMap::from([(
                SubscriptionId(4),
                CountedResource {
                    totals,
                    minutes: vec![minute.clone()],
                },
            )]),
            topics: BTreeMap::from([(
                TopicId(2),
                CountedResource {
                    totals: published,
                    minutes: vec![minute],
                },
            )]),
        }
    }

    #[test]
    fn a_snapshot_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        assert_eq!(read(&path, 77).unwrap(), None, "there is none at the first start");
        let text = serde_json::to_string(&FileRecord::of(&snapshot(), 77)).unwrap();
        credentials::write_private(&path, &text).unwrap();
        assert_eq!(read(&path, 77).unwrap(), Some(snapshot()));
        // Version 1 of the format, which later versions must read.
        assert_eq!(
            text,
            concat!(
                r#"{"v":1,"identity":77,"since":1680000000000000000,"#,
                r#""counts":{"matched":9,"attempts":6,"failed":1,"delivered":5,"deadLettered":{"0":1},"dropped":{"2":2}},"#,
                r#""minutes":[[28000000,7,5,6,1,1,2,[[0,0,7,503,1],[1,0,null,null,1],[2,2,5,400,1]],[[3,4],[17,1]]]],"#,
                r#""subscriptions":{"4":{"counts":{"matched":9,"attempts":6,"failed":1,"delivered":5,"#,
                r#""deadLettered":{"0":1},"dropped":{"2":2}},"#,
                r#""minutes":[[28000000,7,5,6,1,1,2,[[0,0,7,503,1],[1,0,null,null,1],[2,2,5,400,1]],[[3,4],[17,1]]]]}},"#,
                r#""topics":{"2":{"events":7,"unmatched":1,"refused":3,"#,
                r#""minutes":[[28000000,7,5,6,1,1,2,[[0,0,7,503,1],[1,0,null,null,1],[2,2,5,400,1]],[[3,4],[17,1]]]]}}}"#,
            )
        );
    }

    #[test]
    fn what_is_not_ours_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let good = serde_json::to_string(&FileRecord::of(&snapshot(), 77)).unwrap();
        let check = |text: &str, words: &str| {
            credentials::write_private(&path, text).unwrap();
            let refused = format!("{:#}", read(&path, 77).unwrap_err());
            assert!(refused.contains(words), "{refused}");
        };
        check("", "not JSON of ours");
        check(&good[..good.len() / 2], "not JSON of ours");
        check(&good.replace("\"v\":1", "\"v\":2"), "version 2");
        check(&good.replace("\"identity\":77", "\"identity\":78"), "another log");
        check(
            &good.replace("\"matched\":9", "\"matched\":-9"),
            "not what it should be",
        );
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(BYTES_MAX + 1)
            .unwrap();
        let refused = format!("{:#}", read(&path, 77).unwrap_err());
        assert!(refused.contains("more than"), "{refused}");
    }
}
