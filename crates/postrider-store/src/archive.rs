//! The archive: which dead-letter blobs exist, and what has been done with the dead letters in
//! them.
//!
//! Dead letters themselves are in the blobs. The archive grows with the number of blobs, not with
//! the number of dead letters.

use crate::Error;
use async_trait::async_trait;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;

/// Number of a blob in the archive. Later blobs have greater numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobId(pub u64);

/// A blob of dead letters of one subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobRecord {
    pub id: BlobId,
    pub subscription: SubscriptionId,
    /// Names are recorded because the subscription and the topic may be deleted before the blob.
    pub subscription_name: String,
    pub topic_name: String,
    pub account: String,
    pub container: String,
    pub path: String,
    pub written: Timestamp,
    /// Length of the blob.
    pub bytes: u64,
    /// SHA-256 of the blob; `None` in records of older programs, which did not store it.
    pub sha256: Option<[u8; 32]>,
    /// State of each dead letter, in the order of the blob.
    pub marks: Vec<DeadLetterMark>,
}

/// The state of one dead letter: why the event was given up, and what has been done with it since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadLetterMark {
    pub reason: GiveUpReason,
    /// Number of replays; saturates at `u8::MAX`.
    pub replays: u8,
    /// Purged dead letters are hidden from lists and counts; the blob still contains them.
    pub purged: bool,
}

/// Selects blobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlobFilter {
    pub subscription: Option<SubscriptionId>,
    /// Only blobs with a dead letter of this reason that is not purged.
    pub reason: Option<GiveUpReason>,
    /// Only blobs written at this time or later.
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

/// A replay in progress, stored so that it can be resumed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayJob {
    pub id: u64,
    /// The request as the API received it; opaque to the archive.
    pub request: String,
    pub created: Timestamp,
    /// Where to resume: a blob, and the index of the next dead letter in it.
    pub next: (BlobId, u32),
    /// The last blob of this replay; later blobs were written after it was requested.
    pub last: BlobId,
    pub replayed: u64,
    /// Dead letters that could not be replayed.
    pub failed: u64,
    /// The part of `failed` whose blob is missing, damaged or in an account that is not configured.
    pub unreadable: u64,
    /// The first blobs with unreadable dead letters, at most [`UNREADABLE_BLOBS_MAX`].
    pub unreadable_blobs: Vec<UnreadableBlob>,
    pub state: ReplayState,
}

/// Number of unreadable blobs that a replay names; dead letters in further blobs are only counted.
pub const UNREADABLE_BLOBS_MAX: usize = 100;

/// A blob whose dead letters a replay could not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableBlob {
    pub id: BlobId,
    pub account: String,
    pub container: String,
    pub path: String,
    pub letters: u64,
    pub fault: BlobFault,
    /// Text for the operator.
    pub reason: String,
}

/// Why dead letters that the archive lists cannot be read from their blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobFault {
    /// The blob storage answered that the blob or its container does not exist.
    Missing,
    /// The blob does not contain the dead letters that were written to it.
    Damaged,
    /// The blob's storage account is not configured, or not any more.
    NoAccount,
}

impl ReplayJob {
    /// Counts dead letters that cannot be replayed because of their blob, and names the blob.
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
    /// Adds a blob; durable on return. Ignores `blob.id` and returns the number that the blob was
    /// given. An older blob with the same account, container and path is forgotten because it was
    /// overwritten.
    async fn add(&self, blob: BlobRecord) -> Result<BlobId, Error>;

    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error>;

    /// Blobs that match the filter, with numbers greater than `after`, in ascending order, at most
    /// `max`. Does not read blobs of other subscriptions, nor blobs written before `filter.since`.
    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error>;

    /// The greatest number of any blob, or `None` if the archive is empty.
    async fn last(&self) -> Result<Option<BlobId>, Error>;

    /// Number of dead letters in blobs that are not purged, by subscription and reason.
    async fn counts(&self) -> Result<Vec<(SubscriptionId, GiveUpReason, u64)>, Error>;

    /// Replaces the marks of a blob. Does nothing if the blob does not exist.
    async fn mark(&self, id: BlobId, marks: Vec<DeadLetterMark>) -> Result<(), Error>;

    /// Forgets a blob. Does nothing if the blob does not exist.
    async fn remove(&self, id: BlobId) -> Result<(), Error>;

    /// Creates or replaces a replay and, atomically with it, the marks of the blob it has just
    /// processed.
    async fn put_job(
        &self,
        job: ReplayJob,
        marks: Option<(BlobId, Vec<DeadLetterMark>)>,
    ) -> Result<(), Error>;

    /// Like `mark`, but only if the marks are still `was`: another node may have changed them.
    /// Returns whether the marks were replaced.
    async fn mark_if(
        &self,
        id: BlobId,
        _was: &[DeadLetterMark],
        marks: Vec<DeadLetterMark>,
    ) -> Result<bool, Error> {
        self.mark(id, marks).await?;
        Ok(true)
    }

    /// Like `put_job`, but only if the marks of the blob are still `was`. Returns whether it was
    /// stored.
    async fn put_job_if(
        &self,
        job: ReplayJob,
        id: BlobId,
        _was: &[DeadLetterMark],
        marks: Vec<DeadLetterMark>,
    ) -> Result<bool, Error> {
        self.put_job(job, Some((id, marks))).await?;
        Ok(true)
    }

    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error>;

    async fn remove_job(&self, id: u64) -> Result<(), Error>;

    /// Allocates the number of a new replay.
    async fn next_job(&self) -> Result<u64, Error>;

    /// Returns once all changes that other nodes made before the call can be read here.
    async fn catch_up(&self) -> Result<(), Error> {
        Ok(())
    }

    /// The last numbers that were allocated: to a blob, and to a replay.
    async fn numbers(&self) -> Result<(BlobId, u64), Error>;

    /// Ensures that numbers up to these are never allocated: a migrated archive keeps its numbers.
    /// The archive must not be in use by anyone else.
    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error>;

    /// Asks the node that runs a replay to stop it. The request stands until the replay's state
    /// changes.
    async fn request_cancel(&self, _id: u64) -> Result<(), Error> {
        Ok(())
    }

    /// Replays that somebody has asked to stop.
    async fn cancel_requests(&self) -> Result<Vec<u64>, Error> {
        Ok(Vec::new())
    }

    /// Waits until another node stores a replay or asks to stop one. Never returns where there are
    /// no other nodes. At most one task may wait.
    async fn jobs_changed(&self) {
        std::future::pending().await
    }
}
