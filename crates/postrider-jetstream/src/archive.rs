//! The archive of dead-letter blobs in a stream, replicated to every node.
//!
//! Every node keeps all of it in memory: about half a kilobyte per blob, and two bytes for each of
//! its dead letters, of which a blob has at most five thousand.

use crate::connection::NatsConnection;
use crate::replicated::{AppliedCommit, ByteReader, ReplicaLocation, Replicated, StateMachine, put_bytes};
use async_trait::async_trait;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_store::record::batch::put;
use postrider_store::record::{StoredRecord, decode_marks, encode_marks};
use postrider_store::{
    Archive, BlobFilter, BlobId, BlobRecord, DeadLetterMark, Error, ReplayJob, ReplayState,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::Notify;

/// The archive of a cluster.
pub struct JetStreamArchive {
    replicated: Replicated<ReplicatedArchive>,
    jobs_changed: Arc<Notify>,
}

impl JetStreamArchive {
    /// `me` must differ from the number of every other node and of every earlier process of this
    /// node.
    pub async fn open(connection: &NatsConnection, me: u64) -> Result<JetStreamArchive, Error> {
        JetStreamArchive::open_at(ReplicaLocation::new(connection, "archive"), me).await
    }

    /// Like `open`, with the log size at which a snapshot is written.
    pub async fn open_with(
        connection: &NatsConnection,
        me: u64,
        snapshot_bytes: u64,
    ) -> Result<JetStreamArchive, Error> {
        let place = ReplicaLocation {
            snapshot_bytes,
            ..ReplicaLocation::new(connection, "archive")
        };
        JetStreamArchive::open_at(place, me).await
    }

    async fn open_at(place: ReplicaLocation, me: u64) -> Result<JetStreamArchive, Error> {
        let jobs_changed = Arc::new(Notify::new());
        let shared = ReplicatedArchive {
            index: ArchiveIndex::default(),
            jobs_changed: jobs_changed.clone(),
        };
        Ok(JetStreamArchive {
            replicated: Replicated::open(place, shared, me).await?,
            jobs_changed,
        })
    }

    /// Stops. Waiting commits are not made.
    pub async fn close(&self) {
        self.replicated.close().await;
    }

    fn read<T>(&self, look: impl FnOnce(&ArchiveIndex) -> T) -> Result<T, Error> {
        match self.replicated.broken() {
            Some(broken) => Err(broken),
            None => Ok(self.replicated.read(|shared| look(&shared.index))),
        }
    }

    /// Commits entries. Returns the allocated number, or `None` if the marks were not the expected
    /// ones.
    async fn commit(&self, entries: &[ArchiveEntry]) -> Result<Option<u64>, Error> {
        let records: Vec<Vec<u8>> = entries.iter().map(ArchiveEntry::encode).collect();
        self.replicated.commit(&records, ()).await
    }
}

#[async_trait]
impl Archive for JetStreamArchive {
    async fn add(&self, blob: BlobRecord) -> Result<BlobId, Error> {
        let id = self.commit(&[ArchiveEntry::Add(blob)]).await?;
        Ok(BlobId(id.unwrap_or_default()))
    }

    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error> {
        self.read(|index| index.get(id))
    }

    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error> {
        self.read(|index| index.list(filter, after, max))
    }

    async fn last(&self) -> Result<Option<BlobId>, Error> {
        self.read(|index| index.blobs.keys().next_back().map(|id| BlobId(*id)))
    }

    async fn counts(&self) -> Result<Vec<(SubscriptionId, GiveUpReason, u64)>, Error> {
        self.read(|index| {
            let counts = index.counts.iter();
            counts
                .map(|((of, reason), count)| (SubscriptionId(*of), GiveUpReason::from_code(*reason), *count))
                .collect()
        })
    }

    async fn mark(&self, id: BlobId, marks: Vec<DeadLetterMark>) -> Result<(), Error> {
        self.commit(&[ArchiveEntry::mark(id, None, &marks)]).await?;
        Ok(())
    }

    async fn remove(&self, id: BlobId) -> Result<(), Error> {
        self.commit(&[ArchiveEntry::Remove(id.0)]).await?;
        Ok(())
    }

    async fn put_job(
        &self,
        job: ReplayJob,
        marks: Option<(BlobId, Vec<DeadLetterMark>)>,
    ) -> Result<(), Error> {
        let marks = marks.map(|(id, marks)| ArchiveEntry::mark(id, None, &marks));
        let entries: Vec<ArchiveEntry> = [ArchiveEntry::PutJob(job)].into_iter().chain(marks).collect();
        self.commit(&entries).await?;
        Ok(())
    }

    async fn mark_if(
        &self,
        id: BlobId,
        was: &[DeadLetterMark],
        marks: Vec<DeadLetterMark>,
    ) -> Result<bool, Error> {
        let done = self.commit(&[ArchiveEntry::mark(id, Some(was), &marks)]).await?;
        Ok(done.is_some())
    }

    async fn put_job_if(
        &self,
        job: ReplayJob,
        id: BlobId,
        was: &[DeadLetterMark],
        marks: Vec<DeadLetterMark>,
    ) -> Result<bool, Error> {
        let entries = [
            ArchiveEntry::PutJob(job),
            ArchiveEntry::mark(id, Some(was), &marks),
        ];
        Ok(self.commit(&entries).await?.is_some())
    }

    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error> {
        self.read(|index| index.jobs.values().cloned().collect())
    }

    async fn remove_job(&self, id: u64) -> Result<(), Error> {
        self.commit(&[ArchiveEntry::RemoveJob(id)]).await?;
        Ok(())
    }

    async fn next_job(&self) -> Result<u64, Error> {
        Ok(self.commit(&[ArchiveEntry::NextJob]).await?.unwrap_or_default())
    }

    async fn catch_up(&self) -> Result<(), Error> {
        self.replicated.catch_up().await.map(drop)
    }

    async fn numbers(&self) -> Result<(BlobId, u64), Error> {
        self.read(|index| (BlobId(index.blobs_given), index.jobs_given))
    }

    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error> {
        let blobs = blobs.0;
        self.commit(&[ArchiveEntry::SkipNumbers { blobs, jobs }]).await?;
        Ok(())
    }

    async fn request_cancel(&self, id: u64) -> Result<(), Error> {
        self.commit(&[ArchiveEntry::AskToCancel(id)]).await?;
        Ok(())
    }

    async fn cancel_requests(&self) -> Result<Vec<u64>, Error> {
        self.read(|index| index.to_cancel.iter().copied().collect())
    }

    async fn jobs_changed(&self) {
        self.jobs_changed.notified().await;
    }
}

struct ReplicatedArchive {
    index: ArchiveIndex,
    jobs_changed: Arc<Notify>,
}

impl StateMachine for ReplicatedArchive {
    type Draft = ();
    /// The allocated number, if any; `None` if nothing was done because the marks had changed.
    type Output = Option<u64>;
    const WHAT: &'static str = "archive";

    fn check(&self, _: &(), _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn apply(&mut self, commit: AppliedCommit<'_>) -> Result<Option<u64>, String> {
        let entries: Result<Vec<ArchiveEntry>, String> = commit
            .records
            .iter()
            .map(|one| ArchiveEntry::decode(one))
            .collect();
        let entries = entries?;
        if !entries.iter().all(|entry| self.index.may(entry)) {
            return Ok(None);
        }
        let mut given = 0;
        for entry in entries {
            if !commit.known_here && matches!(entry, ArchiveEntry::PutJob(_) | ArchiveEntry::AskToCancel(_)) {
                self.jobs_changed.notify_one();
            }
            given = self.index.apply(entry).unwrap_or(given);
        }
        Ok(Some(given))
    }

    fn snapshot(&self, out: &mut Vec<u8>) {
        let index = &self.index;
        put(out, index.blobs_given);
        put(out, index.jobs_given);
        put(out, index.blobs.len() as u64);
        for id in index.blobs.keys() {
            if let Some(blob) = index.get(BlobId(*id)) {
                put_bytes(out, &ArchiveEntry::Add(blob).encode());
            }
        }
        for job in index.jobs.values() {
            put_bytes(out, &ArchiveEntry::PutJob(job.clone()).encode());
        }
        for id in &index.to_cancel {
            put_bytes(out, &ArchiveEntry::AskToCancel(*id).encode());
        }
    }

    fn restore(&mut self, bytes: &[u8], _: u64) -> Result<(), String> {
        let mut rest = ByteReader(bytes);
        let mut index = ArchiveIndex::default();
        let mut number = || rest.number().ok_or_else(|| "it is cut short".to_owned());
        let (blobs_given, jobs_given, _) = (number()?, number()?, number()?);
        while !rest.0.is_empty() {
            let entry = ArchiveEntry::decode(rest.bytes().ok_or("it is cut short")?)?;
            match entry {
                // The blob keeps the number that it has already.
                ArchiveEntry::Add(blob) => index.insert(&blob),
                other => drop(index.apply(other)),
            }
        }
        (index.blobs_given, index.jobs_given) = (blobs_given, jobs_given);
        self.index = index;
        self.jobs_changed.notify_one();
        Ok(())
    }
}

const ADD: u8 = 1;
const MARK: u8 = 2;
const REMOVE: u8 = 3;
const PUT_JOB: u8 = 4;
const REMOVE_JOB: u8 = 5;
const NEXT_JOB: u8 = 6;
const ASK_TO_CANCEL: u8 = 7;
const SKIP_NUMBERS: u8 = 8;

/// A decoded record.
#[derive(Clone, Debug, PartialEq)]
enum ArchiveEntry {
    Add(BlobRecord),
    Mark {
        id: u64,
        /// Required hash of the current marks, if the change is conditional.
        was: Option<u64>,
        marks: Vec<u8>,
    },
    Remove(u64),
    PutJob(ReplayJob),
    RemoveJob(u64),
    NextJob,
    AskToCancel(u64),
    /// Numbers up to these are never allocated.
    SkipNumbers {
        blobs: u64,
        jobs: u64,
    },
}

impl ArchiveEntry {
    fn mark(id: BlobId, was: Option<&[DeadLetterMark]>, marks: &[DeadLetterMark]) -> ArchiveEntry {
        ArchiveEntry::Mark {
            id: id.0,
            was: was.map(|was| sum(&encode_marks(was))),
            marks: encode_marks(marks),
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut number = |kind: u8, number: u64| {
            out.push(kind);
            put(&mut out, number);
        };
        match self {
            ArchiveEntry::Add(blob) => {
                out.push(ADD);
                put_bytes(&mut out, &blob.encode());
                out.extend_from_slice(&encode_marks(&blob.marks));
            }
            ArchiveEntry::Mark { id, was, marks } => {
                number(MARK, *id);
                out.push(u8::from(was.is_some()));
                out.extend_from_slice(&was.unwrap_or_default().to_le_bytes());
                out.extend_from_slice(marks);
            }
            ArchiveEntry::Remove(id) => number(REMOVE, *id),
            ArchiveEntry::PutJob(job) => {
                out.push(PUT_JOB);
                out.extend_from_slice(&job.encode());
            }
            ArchiveEntry::RemoveJob(id) => number(REMOVE_JOB, *id),
            ArchiveEntry::NextJob => out.push(NEXT_JOB),
            ArchiveEntry::AskToCancel(id) => number(ASK_TO_CANCEL, *id),
            ArchiveEntry::SkipNumbers { blobs, jobs } => {
                number(SKIP_NUMBERS, *blobs);
                put(&mut out, *jobs);
            }
        }
        out
    }

    fn decode(record: &[u8]) -> Result<ArchiveEntry, String> {
        let cut_short = || "a record is cut short".to_owned();
        let mut rest = ByteReader(record);
        let kind = rest.byte().ok_or_else(cut_short)?;
        Ok(match kind {
            ADD => {
                let head = rest.bytes().ok_or_else(cut_short)?;
                let blob = BlobRecord::decode(head).map_err(|e| e.to_string())?;
                ArchiveEntry::Add(BlobRecord {
                    marks: decode_marks(rest.0),
                    ..blob
                })
            }
            MARK => {
                let id = rest.number().ok_or_else(cut_short)?;
                let expects = rest.byte().ok_or_else(cut_short)? != 0;
                let (was, marks) = rest.0.split_first_chunk().ok_or_else(cut_short)?;
                ArchiveEntry::Mark {
                    id,
                    was: expects.then(|| u64::from_le_bytes(*was)),
                    marks: marks.to_vec(),
                }
            }
            REMOVE => ArchiveEntry::Remove(rest.number().ok_or_else(cut_short)?),
            PUT_JOB => ArchiveEntry::PutJob(ReplayJob::decode(rest.0).map_err(|e| e.to_string())?),
            REMOVE_JOB => ArchiveEntry::RemoveJob(rest.number().ok_or_else(cut_short)?),
            NEXT_JOB => ArchiveEntry::NextJob,
            ASK_TO_CANCEL => ArchiveEntry::AskToCancel(rest.number().ok_or_else(cut_short)?),
            SKIP_NUMBERS => ArchiveEntry::SkipNumbers {
                blobs: rest.number().ok_or_else(cut_short)?,
                jobs: rest.number().ok_or_else(cut_short)?,
            },
            other => return Err(format!("a record is of the unknown kind {other}")),
        })
    }
}

/// FNV-1a hash: every version of the program must compute the same.
fn sum(bytes: &[u8]) -> u64 {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// The blobs with an index for every kind of query.
#[derive(Default)]
struct ArchiveIndex {
    blobs: BTreeMap<u64, ArchivedBlob>,
    /// (subscription or any, reason or any, blob). An entry with a reason exists while the blob has
    /// a dead letter of that reason that is not purged.
    by: BTreeSet<(Option<u64>, Option<u8>, u64)>,
    /// (time, blob). Times never decrease with the numbers: where the clock was set back, the
    /// earlier maximum is used.
    times: BTreeSet<(i64, u64)>,
    /// (subscription, reason) → number of dead letters that are not purged.
    counts: BTreeMap<(u64, u8), u64>,
    /// Account, container and path → the blob.
    paths: BTreeMap<String, u64>,
    jobs: BTreeMap<u64, ReplayJob>,
    /// Replays that somebody has asked to stop.
    to_cancel: BTreeSet<u64>,
    blobs_given: u64,
    jobs_given: u64,
}

struct ArchivedBlob {
    /// The record without its marks.
    head: BlobRecord,
    marks: Box<[u8]>,
    /// The blob's time in `times`.
    time: i64,
}

impl ArchiveIndex {
    fn get(&self, id: BlobId) -> Option<BlobRecord> {
        let blob = self.blobs.get(&id.0)?;
        Some(BlobRecord {
            marks: decode_marks(&blob.marks),
            ..blob.head.clone()
        })
    }

    fn list(&self, filter: &BlobFilter, after: Option<BlobId>, max: usize) -> Vec<BlobRecord> {
        let mut from = match after {
            None => 0,
            Some(BlobId(u64::MAX)) => return Vec::new(),
            Some(BlobId(after)) => after + 1,
        };
        if let Some(since) = filter.since {
            match self.times.range((since.nanos(), 0)..).next() {
                Some((_, first)) => from = from.max(*first),
                None => return Vec::new(),
            }
        }
        let (of, reason) = (
            filter.subscription.map(|of| of.0),
            filter.reason.map(GiveUpReason::code),
        );
        let ids = self.by.range((of, reason, from)..=(of, reason, u64::MAX));
        let blobs = ids.filter_map(|(_, _, id)| self.get(BlobId(*id)));
        // A later blob may be older if the clock was set back.
        let in_time = |blob: &BlobRecord| filter.since.is_none_or(|since| blob.written >= since);
        blobs.filter(in_time).take(max).collect()
    }

    /// Whether the current marks are the expected ones.
    fn may(&self, entry: &ArchiveEntry) -> bool {
        match entry {
            ArchiveEntry::Mark {
                id, was: Some(was), ..
            } => {
                let blob = self.blobs.get(id);
                blob.is_none_or(|blob| sum(&blob.marks) == *was)
            }
            _ => true,
        }
    }

    /// Applies an entry. Returns the allocated number, if any.
    fn apply(&mut self, entry: ArchiveEntry) -> Option<u64> {
        match entry {
            ArchiveEntry::Add(mut blob) => {
                self.blobs_given += 1;
                blob.id = BlobId(self.blobs_given);
                self.insert(&blob);
                return Some(blob.id.0);
            }
            ArchiveEntry::Mark { id, marks, .. } => {
                if let Some(blob) = self.blobs.get_mut(&id) {
                    let of = blob.head.subscription.0;
                    let before = std::mem::replace(&mut blob.marks, marks.clone().into());
                    self.count(id, of, &before, &marks);
                }
            }
            ArchiveEntry::Remove(id) => self.remove(id),
            ArchiveEntry::PutJob(job) => {
                if job.state != ReplayState::Running {
                    self.to_cancel.remove(&job.id);
                }
                self.jobs.insert(job.id, job);
            }
            ArchiveEntry::RemoveJob(id) => {
                self.jobs.remove(&id);
                self.to_cancel.remove(&id);
            }
            ArchiveEntry::NextJob => {
                self.jobs_given += 1;
                return Some(self.jobs_given);
            }
            ArchiveEntry::SkipNumbers { blobs, jobs } => {
                self.blobs_given = self.blobs_given.max(blobs);
                self.jobs_given = self.jobs_given.max(jobs);
            }
            ArchiveEntry::AskToCancel(id) => {
                let running = |job: &ReplayJob| job.state == ReplayState::Running;
                if self.jobs.get(&id).is_some_and(running) {
                    self.to_cancel.insert(id);
                }
            }
        }
        None
    }

    fn insert(&mut self, blob: &BlobRecord) {
        let (id, of) = (blob.id.0, blob.subscription.0);
        // A blob written to the same path has replaced the earlier one.
        if let Some(before) = self.paths.insert(path_key(blob), id) {
            self.remove(before);
        }
        let last = self.times.last().map_or(i64::MIN, |(time, _)| *time);
        let time = blob.written.nanos().max(last);
        let marks = encode_marks(&blob.marks);
        self.count(id, of, &[], &marks);
        self.times.insert((time, id));
        self.by.insert((None, None, id));
        self.by.insert((Some(of), None, id));
        let head = BlobRecord {
            marks: Vec::new(),
            ..blob.clone()
        };
        let marks = marks.into();
        self.blobs.insert(id, ArchivedBlob { head, marks, time });
    }

    fn remove(&mut self, id: u64) {
        let Some(blob) = self.blobs.remove(&id) else {
            return;
        };
        let of = blob.head.subscription.0;
        self.count(id, of, &blob.marks, &[]);
        let path = path_key(&blob.head);
        if self.paths.get(&path) == Some(&id) {
            self.paths.remove(&path);
        }
        self.times.remove(&(blob.time, id));
        self.by.remove(&(None, None, id));
        self.by.remove(&(Some(of), None, id));
    }

    /// Updates everything that is derived from a blob's marks.
    fn count(&mut self, id: u64, of: u64, before: &[u8], after: &[u8]) {
        let mut tally: BTreeMap<u8, (u64, u64)> = BTreeMap::new();
        for mark in decode_marks(before).iter().filter(|mark| !mark.purged) {
            tally.entry(mark.reason.code()).or_default().0 += 1;
        }
        for mark in decode_marks(after).iter().filter(|mark| !mark.purged) {
            tally.entry(mark.reason.code()).or_default().1 += 1;
        }
        for (reason, (before, after)) in tally {
            let count = self.counts.entry((of, reason)).or_default();
            *count = (*count + after).saturating_sub(before);
            if *count == 0 {
                self.counts.remove(&(of, reason));
            }
            for key in [(None, Some(reason), id), (Some(of), Some(reason), id)] {
                if after == 0 {
                    self.by.remove(&key);
                } else {
                    self.by.insert(key);
                }
            }
        }
    }
}

/// The blob's address as one text.
fn path_key(blob: &BlobRecord) -> String {
    format!("{}\n{}\n{}", blob.account, blob.container, blob.path)
}

#[cfg(test)]
mod tests;
