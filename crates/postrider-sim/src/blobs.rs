//! A storage account in memory that outlives the server's crashes; the network to it, with faults
//! and with the points at which the power may go; and the archive, with crash points of its own.

use crate::audit::Auditor;
use crate::clock::SimClock;
use crate::crash::PowerSupply;
use crate::seeded_chance::SeededChance;
use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_engine::blobs::{BlobError, BlobStore, WrittenBlobVersion};
use postrider_store::{Archive, BlobFilter, BlobId, BlobRecord, DeadLetterMark, Error, ReplayJob};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub const ACCOUNT: &str = "local";
/// The longest time that the store takes to answer, in seconds.
const SLOW_MAX: u64 = 20;

#[derive(Default)]
pub struct MemoryBlobs {
    blobs: Mutex<BTreeMap<(String, String), Bytes>>,
    audit: Option<Arc<Auditor>>,
}

impl MemoryBlobs {
    /// A store whose auditor observes all writes.
    pub fn watched(audit: Arc<Auditor>) -> MemoryBlobs {
        MemoryBlobs {
            blobs: Mutex::default(),
            audit: Some(audit),
        }
    }

    fn blobs(&self) -> MutexGuard<'_, BTreeMap<(String, String), Bytes>> {
        self.blobs.lock().expect("no panic holds it")
    }
}

fn check(account: &str) -> Result<(), BlobError> {
    match account {
        ACCOUNT => Ok(()),
        other => Err(BlobError::UnknownAccount(other.to_owned())),
    }
}

#[async_trait]
impl BlobStore for MemoryBlobs {
    fn accounts(&self) -> Vec<String> {
        vec![ACCOUNT.to_owned()]
    }

    fn check_name(&self, account: &str, _container: &str) -> Result<(), String> {
        check(account).map_err(|e| e.to_string())
    }

    async fn probe(&self, account: &str, _container: &str) -> Result<(), BlobError> {
        check(account)
    }

    async fn put(
        &self,
        account: &str,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        check(account)?;
        let place = (container.to_owned(), path.to_owned());
        if let Some(audit) = &self.audit {
            audit.blob_put(account, place.clone(), &body);
        }
        self.blobs().insert(place, body);
        Ok(WrittenBlobVersion {
            etag: "0x1".to_owned(),
            url: format!("memory:///{account}/{container}/{path}"),
        })
    }

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError> {
        check(account)?;
        let blobs = self.blobs();
        let found = blobs.get(&(container.to_owned(), path.to_owned()));
        found.cloned().ok_or_else(|| BlobError::NotFound(path.to_owned()))
    }

    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError> {
        check(account)?;
        self.blobs().remove(&(container.to_owned(), path.to_owned()));
        Ok(())
    }
}

/// The network between the server and its store.
pub struct StoreFaults {
    chance: Mutex<SeededChance>,
    out_of_reach: AtomicBool,
    calm: AtomicBool,
    /// The percentage of answers that are errors although the blob was written.
    lies_percent: u64,
    /// The percentage of slow answers.
    slow_percent: u64,
}

impl StoreFaults {
    pub fn any(chance: &mut SeededChance) -> StoreFaults {
        StoreFaults {
            lies_percent: [0, 0, 10, 50][chance.below(4) as usize],
            slow_percent: [0, 20, 60][chance.below(3) as usize],
            chance: Mutex::new(SeededChance::new(chance.any())),
            out_of_reach: AtomicBool::new(false),
            calm: AtomicBool::new(false),
        }
    }

    pub fn set_out_of_reach(&self, out_of_reach: bool) {
        self.out_of_reach.store(out_of_reach, SeqCst);
    }

    /// Ends all faults.
    pub fn calm(&self) {
        self.set_out_of_reach(false);
        self.calm.store(true, SeqCst);
    }

    /// The duration of an answer, and whether it is a false error.
    fn of_one_request(&self) -> (Duration, bool) {
        let mut chance = self.chance.lock().expect("no panic holds it");
        let millis = if chance.percent(self.slow_percent) {
            chance.below(SLOW_MAX * 1000)
        } else {
            chance.below(50)
        };
        let lies = chance.percent(self.lies_percent);
        if self.calm.load(SeqCst) {
            return (Duration::ZERO, false);
        }
        (Duration::from_millis(millis), lies)
    }
}

/// The store during one life of the server.
pub struct CrashBlobs {
    /// The store, or a planted bug in front of it.
    pub inner: Arc<dyn BlobStore>,
    pub weather: Arc<StoreFaults>,
    pub power: Arc<PowerSupply>,
    pub audit: Arc<Auditor>,
    pub clock: Arc<SimClock>,
}

impl CrashBlobs {
    fn point(&self) -> Result<(), BlobError> {
        self.power.point().map_err(|e| unreachable(&e.to_string()))
    }

    fn trouble(&self, what: &str) -> BlobError {
        self.audit.letters_not_written(what);
        unreachable(what)
    }
}

fn unreachable(detail: &str) -> BlobError {
    BlobError::Unreachable {
        account: ACCOUNT.to_owned(),
        detail: detail.to_owned(),
    }
}

#[async_trait]
impl BlobStore for CrashBlobs {
    fn accounts(&self) -> Vec<String> {
        self.inner.accounts()
    }

    fn check_name(&self, account: &str, container: &str) -> Result<(), String> {
        self.inner.check_name(account, container)
    }

    async fn probe(&self, account: &str, container: &str) -> Result<(), BlobError> {
        self.inner.probe(account, container).await
    }

    async fn put(
        &self,
        account: &str,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        self.point()?;
        let (takes, lies) = self.weather.of_one_request();
        if self.weather.out_of_reach.load(SeqCst) {
            self.clock.pass(takes).await;
            return Err(self.trouble("the blob store is out of reach"));
        }
        let stored = self.inner.put(account, container, path, body).await?;
        // The blob is stored but the server does not know: a crash here writes its dead letters
        // again.
        self.point()?;
        self.clock.pass(takes).await;
        if lies {
            return Err(self.trouble("the blob store answers with an error, and has the blob"));
        }
        self.point()?;
        Ok(stored)
    }

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError> {
        self.inner.get(account, container, path).await
    }

    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError> {
        self.inner.delete(account, container, path).await
    }
}

/// The archive during one life of the server.
pub struct CrashArchive {
    pub inner: Arc<dyn Archive>,
    pub power: Arc<PowerSupply>,
    pub audit: Arc<Auditor>,
}

#[async_trait]
impl Archive for CrashArchive {
    async fn add(&self, blob: BlobRecord) -> Result<BlobId, Error> {
        self.power.point()?;
        if self.power.full() {
            self.audit.letters_not_written("no room to note where a blob is");
            return Err(Error::Unavailable("the disk is full".into()));
        }
        let id = self.inner.add(blob).await?;
        self.power.point()?;
        Ok(id)
    }

    async fn get(&self, id: BlobId) -> Result<Option<BlobRecord>, Error> {
        self.inner.get(id).await
    }

    async fn list(
        &self,
        filter: &BlobFilter,
        after: Option<BlobId>,
        max: usize,
    ) -> Result<Vec<BlobRecord>, Error> {
        self.inner.list(filter, after, max).await
    }

    async fn last(&self) -> Result<Option<BlobId>, Error> {
        self.inner.last().await
    }

    async fn counts(&self) -> Result<Vec<(SubscriptionId, GiveUpReason, u64)>, Error> {
        self.inner.counts().await
    }

    async fn mark(&self, id: BlobId, marks: Vec<DeadLetterMark>) -> Result<(), Error> {
        self.inner.mark(id, marks).await
    }

    async fn remove(&self, id: BlobId) -> Result<(), Error> {
        self.inner.remove(id).await
    }

    async fn put_job(
        &self,
        job: ReplayJob,
        marks: Option<(BlobId, Vec<DeadLetterMark>)>,
    ) -> Result<(), Error> {
        self.inner.put_job(job, marks).await
    }

    async fn jobs(&self) -> Result<Vec<ReplayJob>, Error> {
        self.inner.jobs().await
    }

    async fn remove_job(&self, id: u64) -> Result<(), Error> {
        self.inner.remove_job(id).await
    }

    async fn next_job(&self) -> Result<u64, Error> {
        self.inner.next_job().await
    }

    async fn numbers(&self) -> Result<(BlobId, u64), Error> {
        self.inner.numbers().await
    }

    async fn skip_numbers(&self, blobs: BlobId, jobs: u64) -> Result<(), Error> {
        self.inner.skip_numbers(blobs, jobs).await
    }
}
