//! The archive's promise: which blobs hold which dead letters, and what has been done with them.
//!
//! The letters themselves are in the blobs. What is kept here grows with the number of blobs, not of letters.

use crate::Error;
use async_trait::async_trait;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::Reason;
use postrider_core::time::Timestamp;

/// A blob's number in the archive. Later blobs have greater numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobId(pub u64);

/// A blob of dead letters of one subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobRecord {
    pub id: BlobId,
    pub subscription: SubscriptionId,
    /// By name: the subscription may be gone.
    pub subscription_name: String,
    pub topic_name: String,
    pub account: String,
    pub container: String,
    pub path: String,
    pub written: Timestamp,
    /// Length of the blob.
    pub bytes: u64,
    /// SHA-256 of the blob; none in what an older program recorded.
    pub sha256: Option<[u8; 32]>,
    /// One for each letter, in the blob's order.
    pub marks: Vec<Mark>,
}

/// Why one letter is there, and what has been done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub reason: Reason,
    /// How often it was replayed; stays at its greatest value.
    pub replays: u8,
    /// It is not shown any more.
    pub purged: bool,
}

/// Which blobs to look at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlobFilter {
    pub subscription: Option<SubscriptionId>,
    /// Only blobs that hold a letter of this reason that is not purged.
    pub reason: Option<Reason>,
    /// Only blobs written then or later.
    pub since: Option<Timestamp>,
}

impl BlobFilter {
    pub fn takes(&self, blob: &BlobRecord) -> bool {
        let holds = |reason| {
            blob.marks
                .iter()
                .any(|mark| mark.reason == reason && !mark.purged)
        };
        self.subscription.is_none_or(|of| blob.subscription == of)
            && self.since.is_none_or(|since| blob.written >= since)
            && self.reason.is_none_or(holds)
    }
}

/// A replay under way, so that it can be gone on with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayJob {
    pub id: u64,
    /// What was asked for, in the API's own words; means nothing to the archive.
    pub request: String,
    pub created: Timestamp,
    /// The next letter to look at: a blob, and a place in it.
    pub next: (BlobId, u32),
    /// No blob after this one belongs to it.
    pub last: BlobId,
    pub replayed: u64,
    /// Letters that could not be replayed.
    pub failed: u64,
    /// Letters among those whose blob is missing, damaged or in an account that is not configured.
    pub unreadable: u64,
    /// The first blobs that these letters are in, at most [`UNREADABLE_BLOBS_MAX`].
    pub unreadable_blobs: Vec<UnreadableBlob>,
    pub state: ReplayState,
}

/// Blobs that a replay names as unreadable; letters of further ones are only counted.
pub const UNREADABLE_BLOBS_MAX: usize = 100;

/// A blob of which a replay could not read letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableBlob {
    pub id: BlobId,
    pub account: String,
    pub container: String,
    pub path: String,
    pub letters: u64,
    pub fault: BlobFault,
    /// For people.
    pub reason: String,
}

/// Why letters that the archive lists cannot be read from their blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobFault {
    /// The store answers that the blob, or its container, does not exist.
    Missing,
    /// The blob does not hold the letters that were written.
    Damaged,
    /// The blob's storage account is not configured (any more).
    NoAccount,
}

impl ReplayJob {
    /// Counts letters that cannot be replayed because of their blob, and names the blob.
    pub fn add_unreadable(&mut self, blob: UnreadableBlob) {
        self.failed += blob.letters;
        self.unreadable += blob.letters;
        if let Some(known) = self.unreadable_blobs.iter_mut().find(|known| known.id == blob.id) {
            known.letters += blob.letters;
        } else if self.unreadable_blobs.len() < UNREADABLE_BLOBS_MAX {
            self.unreadable_blobs.push(blob);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayState {
    Running,
    Cancelled,
    Done,
}

#[async_trait]
pub trait Archive: Send + Sync {
    /// Adds a blob, durable on return. `id` of the record is not looked at; returns the one it was given. A blob
    /// of the same account, container and path is forgotten: this one took its place.
    async fn add(&self, blob: BlobRecord) -> Result<BlobId, Error>;

    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error>;

    /// Blobs that the filter takes, with numbers greater than `after`, in order, at most `max`. Does not read
    /// blobs of other subscriptions, nor older ones than asked for.
    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error>;

    /// The number of the last blob, if there is one.
    async fn last(&self) -> Result<Option<BlobId>, Error>;

    /// Letters that are in blobs and not purged, by subscription and reason.
    async fn counts(&self) -> Result<Vec<(SubscriptionId, Reason, u64)>, Error>;

    /// Replaces the marks of a blob. Does nothing if it is not there.
    async fn mark(&self, id: BlobId, marks: Vec<Mark>) -> Result<(), Error>;

    /// Forgets a blob. Does nothing if it is not there.
    async fn remove(&self, id: BlobId) -> Result<(), Error>;

    /// Makes a replay or replaces it, together with the marks of a blob that it has just gone through.
    async fn put_job(&self, job: ReplayJob, marks: Option<(BlobId, Vec<Mark>)>) -> Result<(), Error>;

    /// As `mark`, but only if they are still `was`: another node may have changed them. Whether they were.
    async fn mark_if(&self, id: BlobId, _was: &[Mark], marks: Vec<Mark>) -> Result<bool, Error> {
        self.mark(id, marks).await?;
        Ok(true)
    }

    /// As `put_job`, but only if the marks of the blob are still `was`. Whether they were.
    async fn put_job_if(
        &self,
        job: ReplayJob,
        id: BlobId,
        _was: &[Mark],
        marks: Vec<Mark>,
    ) -> Result<bool, Error> {
        self.put_job(job, Some((id, marks))).await?;
        Ok(true)
    }

    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error>;

    async fn remove_job(&self, id: u64) -> Result<(), Error>;

    /// A number for a new replay.
    async fn next_job(&self) -> Result<u64, Error>;

    /// Returns when everything that other nodes have changed before now can be read here.
    async fn catch_up(&self) -> Result<(), Error> {
        Ok(())
    }

    /// The last numbers that were given out: to a blob, and to a replay.
    async fn numbers(&self) -> Result<(BlobId, u64), Error>;

    /// Gives out no number up to these any more: an archive that is moved keeps its numbers. Only of use while nobody
    /// else uses the archive.
    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error>;

    /// Asks the node that runs a replay to stop it. It is asked until the replay is put in another state.
    async fn ask_to_cancel(&self, _id: u64) -> Result<(), Error> {
        Ok(())
    }

    /// The replays that somebody asks to be stopped.
    async fn to_cancel(&self) -> Result<Vec<u64>, Error> {
        Ok(Vec::new())
    }

    /// Waits until another node has put a replay or asks that one be stopped. Where there are no others, for ever.
    /// Only one may wait.
    async fn jobs_changed(&self) {
        std::future::pending().await
    }
}
