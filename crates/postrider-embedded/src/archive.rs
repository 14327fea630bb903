//! The archive in a redb file of its own: which dead-letter blobs exist, and what happened to their
//! dead letters.
//!
//! Every kind of query has an index, so that the cost of a page depends only on the entries in it.

use crate::database::{ONLY_WHOLE, ReopeningDatabase, Salvage};
use crate::generations::{FileKind, GENERATIONS, Generations};
use async_trait::async_trait;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_store::record::{StoredRecord, decode_marks, encode_marks};
use postrider_store::{Archive, BlobFilter, BlobId, BlobRecord, DeadLetterMark, Error, ReplayJob};
use redb::{ReadTransaction, ReadableTable, Table, TableDefinition, WriteTransaction};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// id → the blob without its marks.
const BLOBS: TableDefinition<u64, &[u8]> = TableDefinition::new("blobs");
/// id → the blob's marks.
const MARKS: TableDefinition<u64, &[u8]> = TableDefinition::new("marks");
/// (subscription or any, reason or any, id) → the other keys of the blob. An entry with a reason
/// exists while the blob has a dead letter of that reason that is not purged.
const INDEX: TableDefinition<(Option<u64>, Option<u8>, u64), BlobLocation> = TableDefinition::new("index");
/// (time, id). Times never decrease with the ids: where the clock was set back, the earlier maximum
/// is used.
const TIMES: TableDefinition<(u64, u64), ()> = TableDefinition::new("times");
/// (subscription, reason) → number of dead letters that are not purged.
const COUNTS: TableDefinition<(u64, u8), u64> = TableDefinition::new("counts");
/// Account, container and path → the blob's number.
const PATHS: TableDefinition<&str, u64> = TableDefinition::new("paths");
/// id → the replay.
const JOBS: TableDefinition<u64, &[u8]> = TableDefinition::new("jobs");
/// `blobs` and `jobs`: how many ids were allocated.
const FACTS: TableDefinition<&str, u64> = TableDefinition::new("facts");

/// The subscription, the time of writing, and the time in `TIMES`.
type BlobLocation = (u64, u64, u64);

const CACHE_BYTES: usize = 8 << 20;
const FILE: &str = FileKind::Archive.file();

pub struct EmbeddedArchive {
    database: Arc<ReopeningDatabase>,
    additions: Arc<PendingAdditions>,
}

/// Blobs that wait to be added. Several are written concurrently; one commit covers all that wait.
#[derive(Default)]
struct PendingAdditions {
    waiting: Mutex<Vec<PendingAddition>>,
    /// Held by the thread that commits; other additions gather in `waiting` meanwhile.
    committing: Mutex<()>,
}

struct PendingAddition {
    blob: BlobRecord,
    reply: oneshot::Sender<Result<BlobId, Error>>,
}

impl PendingAdditions {
    fn waiting(&self) -> MutexGuard<'_, Vec<PendingAddition>> {
        self.waiting.lock().expect("no panic holds it")
    }

    /// Adds all waiting blobs. Does nothing if another thread has added them already.
    fn commit(&self, database: &ReopeningDatabase) {
        let _turn = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut additions = std::mem::take(&mut *self.waiting());
        if additions.is_empty() {
            return;
        }
        let written = reopening(database, |database| {
            let another_waits = || !self.waiting().is_empty();
            database.write_before(another_waits, |txn| {
                let mut tables = ArchiveTables::of(txn)?;
                for PendingAddition { blob, .. } in &mut additions {
                    blob.id = BlobId(allocate_number(txn, "blobs")?);
                    tables.add(blob)?;
                }
                Ok(())
            })
        });
        for PendingAddition { blob, reply } in additions {
            // The caller may have gone away.
            let _ = reply.send(written.clone().map(|()| blob.id));
        }
    }
}

/// Runs `work`. After an error the database is reopened for the next caller.
fn reopening<T>(
    database: &ReopeningDatabase,
    work: impl FnOnce(&ReopeningDatabase) -> Result<T, Error>,
) -> Result<T, Error> {
    let result = work(database);
    if let Err(Error::Unavailable(_)) = &result
        && let Err(e) = database.reopen()
    {
        tracing::debug!(error = %e, "cannot open the archive again yet");
    }
    result
}

impl EmbeddedArchive {
    pub fn open(path: &Path) -> Result<EmbeddedArchive, Error> {
        EmbeddedArchive::open_with(path, Arc::default())
    }

    /// Like `open`, next to other files that record each other's generations.
    pub fn open_with(path: &Path, generations: Arc<Generations>) -> Result<EmbeddedArchive, Error> {
        let kind = FileKind::Archive;
        let database = ReopeningDatabase::open("archive", path, CACHE_BYTES, kind, generations)?;
        database.write(|txn| {
            ArchiveTables::of(txn)?;
            txn.open_table(JOBS)?;
            txn.open_table(FACTS)?;
            Ok(())
        })?;
        Ok(EmbeddedArchive {
            database: Arc::new(database),
            additions: Arc::default(),
        })
    }

    pub(crate) fn database(&self) -> Arc<ReopeningDatabase> {
        self.database.clone()
    }

    /// Runs `work` on a blocking thread.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ReopeningDatabase) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let database = self.database.clone();
        let done = tokio::task::spawn_blocking(move || reopening(&database, work)).await;
        done.map_err(|_| Error::Closed)?
    }

    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.with(move |database| database.write(work)).await
    }
}

/// Makes an archive of what can be read of a damaged one. Returns what is lost, in words.
pub fn rebuild(old: Option<&Salvage>, new: &Path) -> Result<Vec<String>, Error> {
    let archive = EmbeddedArchive::open(new)?;
    let Some(old) = old else {
        return Ok(vec![
            "archive.redb: nothing of it could be read; dead letters stay in their blobs and are not listed"
                .into(),
        ]);
    };
    archive.database.write(|txn| {
        let mut told = Vec::new();
        let blobs = old.copy_also_older(txn, BLOBS, ONLY_WHOLE)?;
        told.extend(blobs.describe(FILE, "blobs"));
        let marks = old.copy_also_older(txn, MARKS, ONLY_WHOLE)?;
        told.extend(marks.describe(FILE, "blobs' marks"));
        told.extend(
            old.copy_also_older(txn, JOBS, ONLY_WHOLE)?
                .describe(FILE, "replays"),
        );
        old.copy_also_older(txn, FACTS, ONLY_WHOLE)?;
        old.copy_also_older(txn, GENERATIONS, ONLY_WHOLE)?;
        let mut tables = ArchiveTables::of(txn)?;
        let mut stored = Vec::new();
        for row in tables.blobs.iter()? {
            let (id, blob) = row?;
            let marks = tables.marks.get(id.value())?.map(|marks| marks.value().to_vec());
            stored.push((id.value(), blob.value().to_vec(), marks));
        }
        // All other tables are derived from these two.
        for (id, blob, marks) in stored {
            let whole = marks.and_then(|marks| decode(id, &(blob, marks)).ok());
            match whole {
                Some(blob) => tables.add(&blob)?,
                None => drop(tables.blobs.remove(id)?),
            }
        }
        Ok(told)
    })
}

/// The blob tables and the tables derived from them, kept consistent.
struct ArchiveTables<'a> {
    blobs: Table<'a, u64, &'static [u8]>,
    marks: Table<'a, u64, &'static [u8]>,
    index: Table<'a, (Option<u64>, Option<u8>, u64), BlobLocation>,
    times: Table<'a, (u64, u64), ()>,
    counts: Table<'a, (u64, u8), u64>,
    paths: Table<'a, &'static str, u64>,
}

impl<'a> ArchiveTables<'a> {
    fn of(txn: &'a WriteTransaction) -> Result<ArchiveTables<'a>, redb::Error> {
        Ok(ArchiveTables {
            blobs: txn.open_table(BLOBS)?,
            marks: txn.open_table(MARKS)?,
            index: txn.open_table(INDEX)?,
            times: txn.open_table(TIMES)?,
            counts: txn.open_table(COUNTS)?,
            paths: txn.open_table(PATHS)?,
        })
    }

    fn add(&mut self, blob: &BlobRecord) -> Result<(), redb::Error> {
        let (id, of) = (blob.id.0, blob.subscription.0);
        // A blob written to the same path has replaced the earlier one.
        let before = self
            .paths
            .insert(path_key(blob).as_str(), id)?
            .map(|id| id.value());
        if let Some(before) = before {
            self.remove(before)?;
        }
        let written = blob.written.nanos() as u64;
        let last = self.times.last()?.map_or(0, |(key, _)| key.value().0);
        let place = (of, written, written.max(last));
        self.blobs.insert(id, blob.encode().as_slice())?;
        self.marks.insert(id, encode_marks(&blob.marks).as_slice())?;
        self.times.insert((place.2, id), ())?;
        self.index.insert((None, None, id), place)?;
        self.index.insert((Some(of), None, id), place)?;
        self.count(id, place, &[], &blob.marks)
    }

    fn place(&self, id: u64) -> Result<Option<BlobLocation>, redb::Error> {
        Ok(self.index.get((None, None, id))?.map(|place| place.value()))
    }

    fn mark(&mut self, id: u64, marks: &[DeadLetterMark]) -> Result<(), redb::Error> {
        let Some(place) = self.place(id)? else {
            return Ok(());
        };
        let before = self.marks.insert(id, encode_marks(marks).as_slice())?;
        let before = before.map_or_else(Vec::new, |bytes| decode_marks(bytes.value()));
        self.count(id, place, &before, marks)
    }

    fn remove(&mut self, id: u64) -> Result<(), redb::Error> {
        let Some(place) = self.place(id)? else {
            return Ok(());
        };
        let (of, _, time) = place;
        let before = self.marks.remove(id)?;
        let before = before.map_or_else(Vec::new, |bytes| decode_marks(bytes.value()));
        self.count(id, place, &before, &[])?;
        let blob = self
            .blobs
            .remove(id)?
            .and_then(|bytes| BlobRecord::decode(bytes.value()).ok());
        if let Some(key) = blob.as_ref().map(path_key) {
            let current = self.paths.get(key.as_str())?.map(|id| id.value());
            if current == Some(id) {
                self.paths.remove(key.as_str())?;
            }
        }
        self.times.remove((time, id))?;
        self.index.remove((None, None, id))?;
        self.index.remove((Some(of), None, id))?;
        Ok(())
    }

    /// Updates everything that is derived from a blob's marks.
    fn count(
        &mut self,
        id: u64,
        place: BlobLocation,
        before: &[DeadLetterMark],
        after: &[DeadLetterMark],
    ) -> Result<(), redb::Error> {
        let of = place.0;
        let mut tally: BTreeMap<u8, (u64, u64)> = BTreeMap::new();
        for mark in before.iter().filter(|mark| !mark.purged) {
            tally.entry(mark.reason.code()).or_default().0 += 1;
        }
        for mark in after.iter().filter(|mark| !mark.purged) {
            tally.entry(mark.reason.code()).or_default().1 += 1;
        }
        for (reason, (before, after)) in tally {
            let count = self.counts.get((of, reason))?.map_or(0, |count| count.value());
            match (count + after).saturating_sub(before) {
                0 => self.counts.remove((of, reason))?,
                count => self.counts.insert((of, reason), count)?,
            };
            for key in [(None, Some(reason), id), (Some(of), Some(reason), id)] {
                if after == 0 {
                    self.index.remove(key)?;
                } else if before == 0 {
                    self.index.insert(key, place)?;
                }
            }
        }
        Ok(())
    }
}

/// The blob's address as one text.
fn path_key(blob: &BlobRecord) -> String {
    format!("{}\n{}\n{}", blob.account, blob.container, blob.path)
}

/// Allocates a number of this kind.
fn allocate_number(txn: &WriteTransaction, kind: &str) -> Result<u64, redb::Error> {
    let mut facts = txn.open_table(FACTS)?;
    let id = facts.get(kind)?.map_or(0, |id| id.value()) + 1;
    facts.insert(kind, id)?;
    Ok(id)
}

/// A stored blob: the record without marks, and the marks.
type StoredBlob = (Vec<u8>, Vec<u8>);

fn decode(id: u64, (blob, marks): &StoredBlob) -> Result<BlobRecord, Error> {
    let blob = BlobRecord::decode(blob).map_err(|e| Error::Corrupt(format!("archive: {e}")))?;
    Ok(BlobRecord {
        id: BlobId(id),
        marks: decode_marks(marks),
        ..blob
    })
}

/// Stored form of the blobs that match the filter.
fn list(
    txn: &ReadTransaction,
    filter: &BlobFilter,
    after: Option<BlobId>,
    max: usize,
) -> Result<Vec<(u64, StoredBlob)>, redb::Error> {
    let since = filter.since.map_or(0, |since| since.nanos() as u64);
    let mut from = match after {
        None => 0,
        Some(BlobId(u64::MAX)) => return Ok(Vec::new()),
        Some(BlobId(after)) => after + 1,
    };
    if since > 0 {
        match txn.open_table(TIMES)?.range((since, 0)..)?.next() {
            Some(first) => from = from.max(first?.0.value().1),
            None => return Ok(Vec::new()),
        }
    }
    let key = |id| {
        (
            filter.subscription.map(|of| of.0),
            filter.reason.map(GiveUpReason::code),
            id,
        )
    };
    let (blobs, marks) = (txn.open_table(BLOBS)?, txn.open_table(MARKS)?);
    let mut found = Vec::new();
    for row in txn.open_table(INDEX)?.range(key(from)..=key(u64::MAX))? {
        if found.len() == max {
            break;
        }
        let (key, place) = row?;
        let (_, _, id) = key.value();
        let (_, written, _) = place.value();
        if written < since {
            // Possible after the clock was set back.
            continue;
        }
        if let (Some(blob), Some(marks)) = (blobs.get(id)?, marks.get(id)?) {
            found.push((id, (blob.value().to_vec(), marks.value().to_vec())));
        }
    }
    Ok(found)
}

#[async_trait]
impl Archive for EmbeddedArchive {
    async fn add(&self, blob: BlobRecord) -> Result<BlobId, Error> {
        let (reply, added) = oneshot::channel();
        self.additions.waiting().push(PendingAddition { blob, reply });
        let (database, additions) = (self.database.clone(), self.additions.clone());
        let committing = tokio::task::spawn_blocking(move || additions.commit(&database));
        committing.await.map_err(|_| Error::Closed)?;
        added.await.map_err(|_| Error::Closed)?
    }

    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error> {
        self.with(move |database| {
            let stored = database.read(|txn| {
                let (blobs, marks) = (txn.open_table(BLOBS)?, txn.open_table(MARKS)?);
                let (blob, marks) = (blobs.get(id.0)?, marks.get(id.0)?);
                Ok(blob
                    .zip(marks)
                    .map(|(b, m)| (b.value().to_vec(), m.value().to_vec())))
            })?;
            stored.map(|stored| decode(id.0, &stored)).transpose()
        })
        .await
    }

    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error> {
        let filter = filter.clone();
        self.with(move |database| {
            let found = database.read(|txn| list(txn, &filter, after, max))?;
            found.iter().map(|(id, stored)| decode(*id, stored)).collect()
        })
        .await
    }

    async fn last(&self) -> Result<Option<BlobId>, Error> {
        self.with(|database| {
            database.read(|txn| {
                let blobs = txn.open_table(BLOBS)?;
                let last = blobs.last()?;
                Ok(last.map(|(id, _)| BlobId(id.value())))
            })
        })
        .await
    }

    async fn counts(&self) -> Result<Vec<(SubscriptionId, GiveUpReason, u64)>, Error> {
        self.with(|database| {
            database.read(|txn| {
                let mut counts = Vec::new();
                for row in txn.open_table(COUNTS)?.iter()? {
                    let (key, count) = row?;
                    let (of, reason) = key.value();
                    counts.push((SubscriptionId(of), GiveUpReason::from_code(reason), count.value()));
                }
                Ok(counts)
            })
        })
        .await
    }

    async fn mark(&self, id: BlobId, marks: Vec<DeadLetterMark>) -> Result<(), Error> {
        self.write(move |txn| ArchiveTables::of(txn)?.mark(id.0, &marks))
            .await
    }

    async fn remove(&self, id: BlobId) -> Result<(), Error> {
        self.write(move |txn| ArchiveTables::of(txn)?.remove(id.0)).await
    }

    async fn put_job(
        &self,
        job: ReplayJob,
        marks: Option<(BlobId, Vec<DeadLetterMark>)>,
    ) -> Result<(), Error> {
        self.write(move |txn| {
            txn.open_table(JOBS)?.insert(job.id, job.encode().as_slice())?;
            match marks {
                Some((id, marks)) => ArchiveTables::of(txn)?.mark(id.0, &marks),
                None => Ok(()),
            }
        })
        .await
    }

    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error> {
        self.with(|database| {
            let stored = database.read(|txn| {
                let mut stored = Vec::new();
                for row in txn.open_table(JOBS)?.iter()? {
                    stored.push(row?.1.value().to_vec());
                }
                Ok(stored)
            })?;
            let decode = |bytes: &Vec<u8>| ReplayJob::decode(bytes);
            let jobs: Result<_, _> = stored.iter().map(decode).collect();
            jobs.map_err(|e| Error::Corrupt(format!("archive: {e}")))
        })
        .await
    }

    async fn remove_job(&self, id: u64) -> Result<(), Error> {
        self.write(move |txn| {
            txn.open_table(JOBS)?.remove(id)?;
            Ok(())
        })
        .await
    }

    async fn next_job(&self) -> Result<u64, Error> {
        self.write(|txn| allocate_number(txn, "jobs")).await
    }

    async fn numbers(&self) -> Result<(BlobId, u64), Error> {
        self.with(|database| {
            database.read(|txn| {
                let facts = txn.open_table(FACTS)?;
                let given = |kind| Ok::<_, redb::Error>(facts.get(kind)?.map_or(0, |id| id.value()));
                Ok((BlobId(given("blobs")?), given("jobs")?))
            })
        })
        .await
    }

    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error> {
        self.write(move |txn| {
            let mut facts = txn.open_table(FACTS)?;
            for (kind, upto) in [("blobs", blobs.0), ("jobs", jobs)] {
                let given = facts.get(kind)?.map_or(0, |id| id.value());
                facts.insert(kind, given.max(upto))?;
            }
            Ok(())
        })
        .await
    }
}
