use super::*;
use postrider_store::conformance::{self, ArchiveUnderTest};
use std::sync::Mutex;

/// The index without a stream; reopening restores it from a snapshot.
#[derive(Default)]
struct IndexArchive(Mutex<ArchiveIndex>);

impl IndexArchive {
    fn apply(&self, entry: ArchiveEntry) -> u64 {
        // Encode and decode each entry, so that what is applied is what would be stored.
        let entry = ArchiveEntry::decode(&entry.encode()).unwrap();
        self.0.lock().unwrap().apply(entry).unwrap_or_default()
    }
}

#[async_trait]
impl Archive for IndexArchive {
    async fn add(&self, blob: BlobRecord) -> Result<BlobId, Error> {
        Ok(BlobId(self.apply(ArchiveEntry::Add(blob))))
    }
    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error> {
        Ok(self.0.lock().unwrap().get(id))
    }
    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error> {
        Ok(self.0.lock().unwrap().list(filter, after, max))
    }
    async fn last(&self) -> Result<Option<BlobId>, Error> {
        Ok(self
            .0
            .lock()
            .unwrap()
            .blobs
            .keys()
            .next_back()
            .map(|id| BlobId(*id)))
    }
    async fn counts(&self) -> Result<Vec<(SubscriptionId, GiveUpReason, u64)>, Error> {
        let index = self.0.lock().unwrap();
        let counts = index.counts.iter();
        Ok(counts
            .map(|((of, reason), n)| (SubscriptionId(*of), GiveUpReason::from_code(*reason), *n))
            .collect())
    }
    async fn mark(&self, id: BlobId, marks: Vec<DeadLetterMark>) -> Result<(), Error> {
        self.apply(ArchiveEntry::mark(id, None, &marks));
        Ok(())
    }
    async fn remove(&self, id: BlobId) -> Result<(), Error> {
        self.apply(ArchiveEntry::Remove(id.0));
        Ok(())
    }
    async fn put_job(
        &self,
        job: ReplayJob,
        marks: Option<(BlobId, Vec<DeadLetterMark>)>,
    ) -> Result<(), Error> {
        self.apply(ArchiveEntry::PutJob(job));
        if let Some((id, marks)) = marks {
            self.apply(ArchiveEntry::mark(id, None, &marks));
        }
        Ok(())
    }
    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error> {
        Ok(self.0.lock().unwrap().jobs.values().cloned().collect())
    }
    async fn remove_job(&self, id: u64) -> Result<(), Error> {
        self.apply(ArchiveEntry::RemoveJob(id));
        Ok(())
    }
    async fn next_job(&self) -> Result<u64, Error> {
        Ok(self.apply(ArchiveEntry::NextJob))
    }
    async fn numbers(&self) -> Result<(BlobId, u64), Error> {
        let index = self.0.lock().unwrap();
        Ok((BlobId(index.blobs_given), index.jobs_given))
    }
    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error> {
        let blobs = blobs.0;
        self.apply(ArchiveEntry::SkipNumbers { blobs, jobs });
        Ok(())
    }
}

#[derive(Default)]
struct IndexArchiveUnderTest(Mutex<Option<Arc<IndexArchive>>>);

#[async_trait]
impl ArchiveUnderTest for IndexArchiveUnderTest {
    async fn open(&self) -> Arc<dyn Archive> {
        let alone = Arc::new(IndexArchive::default());
        *self.0.lock().unwrap() = Some(alone.clone());
        alone
    }

    async fn reopen(&self, _: Arc<dyn Archive>) -> Arc<dyn Archive> {
        let before = self.0.lock().unwrap().take().unwrap();
        let shared = ReplicatedArchive {
            index: std::mem::take(&mut before.0.lock().unwrap()),
            jobs_changed: Arc::default(),
        };
        let mut snapshot = Vec::new();
        shared.snapshot(&mut snapshot);
        let mut fresh = ReplicatedArchive {
            index: ArchiveIndex::default(),
            jobs_changed: Arc::default(),
        };
        fresh.restore(&snapshot, 1).unwrap();
        let alone = Arc::new(IndexArchive(Mutex::new(fresh.index)));
        *self.0.lock().unwrap() = Some(alone.clone());
        alone
    }
}

#[tokio::test]
async fn the_index_keeps_the_archives_promise_across_snapshots() {
    conformance::archive::archive(&IndexArchiveUnderTest::default()).await;
}
