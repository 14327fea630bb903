//! Runs the conformance suite of all stores on the embedded stores.

use async_trait::async_trait;
use postrider_core::retry::NextStep;
use postrider_embedded::disk::LocalDirectory;
use postrider_embedded::{EmbeddedArchive, EmbeddedCatalog, EmbeddedLog};
use postrider_store::conformance::{
    self, ArchiveUnderTest, CatalogUnderTest, LogUnderTest, WANT, at, events, settled, sub,
};
use postrider_store::seal::Keyring;
use postrider_store::{Archive, Catalog, EventLog};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

fn keys() -> Arc<Keyring> {
    let text = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    Arc::new(Keyring::parse(text, "a test").unwrap())
}

/// Opens each store in a directory of its own.
struct EmbeddedUnderTest {
    segment_bytes_max: u64,
    directories: Mutex<Vec<TempDir>>,
}

impl EmbeddedUnderTest {
    fn new(segment_bytes_max: u64) -> EmbeddedUnderTest {
        EmbeddedUnderTest {
            segment_bytes_max,
            directories: Mutex::default(),
        }
    }

    fn fresh(&self) -> PathBuf {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        self.directories.lock().unwrap().push(directory);
        path
    }

    fn newest(&self) -> PathBuf {
        self.directories.lock().unwrap().last().unwrap().path().to_owned()
    }

    async fn log(&self, directory: &Path) -> Arc<dyn EventLog> {
        let disk = Arc::new(LocalDirectory::open(directory.join("log")).unwrap());
        let state = directory.join("state.redb");
        let log = EmbeddedLog::open_on(disk, &state, 7, self.segment_bytes_max)
            .await
            .unwrap();
        assert_eq!(log.health().corrupt, [""; 0]);
        Arc::new(log)
    }
}

/// Copies the log's files repeatedly until no write came in between.
fn copy_of_a_moment(from: &Path, to: &Path) {
    let state = || std::fs::read(from.join("state.redb")).unwrap();
    let segments = || -> BTreeMap<OsString, Option<Vec<u8>>> {
        let files = std::fs::read_dir(from.join("log")).unwrap().map(Result::unwrap);
        // A file that has just been deleted or renamed makes the next comparison fail.
        files
            .map(|file| (file.file_name(), std::fs::read(file.path()).ok()))
            .collect()
    };
    let mut moment = (state(), segments());
    loop {
        let next = (state(), segments());
        if next == moment {
            break;
        }
        moment = next;
    }
    std::fs::write(to.join("state.redb"), moment.0).unwrap();
    std::fs::create_dir(to.join("log")).unwrap();
    for (name, bytes) in moment.1 {
        std::fs::write(to.join("log").join(name), bytes.unwrap_or_default()).unwrap();
    }
}

#[async_trait]
impl LogUnderTest for EmbeddedUnderTest {
    async fn open(&self) -> Arc<dyn EventLog> {
        self.log(&self.fresh()).await
    }

    async fn reopen(&self, log: Arc<dyn EventLog>) -> Arc<dyn EventLog> {
        log.close().await.unwrap();
        drop(log);
        self.log(&self.newest()).await
    }

    // Copies the files of the running log: what a killed process leaves behind.
    async fn crash(&self, log: Arc<dyn EventLog>) -> Arc<dyn EventLog> {
        let (before, after) = (self.newest(), self.fresh());
        copy_of_a_moment(&before, &after);
        drop(log);
        self.log(&after).await
    }
}

#[async_trait]
impl CatalogUnderTest for EmbeddedUnderTest {
    async fn open(&self) -> Arc<dyn Catalog> {
        Arc::new(EmbeddedCatalog::open(&self.fresh().join("catalog.redb"), keys()).unwrap())
    }

    async fn reopen(&self, catalog: Arc<dyn Catalog>) -> Arc<dyn Catalog> {
        drop(catalog);
        Arc::new(EmbeddedCatalog::open(&self.newest().join("catalog.redb"), keys()).unwrap())
    }
}

#[async_trait]
impl ArchiveUnderTest for EmbeddedUnderTest {
    async fn open(&self) -> Arc<dyn Archive> {
        Arc::new(EmbeddedArchive::open(&self.fresh().join("archive.redb")).unwrap())
    }

    async fn reopen(&self, archive: Arc<dyn Archive>) -> Arc<dyn Archive> {
        drop(archive);
        Arc::new(EmbeddedArchive::open(&self.newest().join("archive.redb")).unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_the_logs_promise() {
    conformance::all(&EmbeddedUnderTest::new(64 << 20)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_the_logs_promise_across_many_small_segments() {
    conformance::all(&EmbeddedUnderTest::new(200 << 10)).await;
}

#[tokio::test]
async fn keeps_the_logs_promise_on_one_thread() {
    conformance::all(&EmbeddedUnderTest::new(4 << 20)).await;
}

#[tokio::test]
async fn keeps_the_catalogues_promise() {
    conformance::catalog(&EmbeddedUnderTest::new(0)).await;
}

#[tokio::test]
async fn keeps_the_archives_promise() {
    conformance::archive(&EmbeddedUnderTest::new(0)).await;
}

/// Retries and lagging first attempts of one large event, for many subscriptions.
#[tokio::test]
async fn a_large_event_is_in_memory_once_whoever_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
    let subscriptions = [sub(1), sub(2), sub(3)];
    for of in subscriptions {
        log.open_subscription(of).await.unwrap();
        // Nothing stays in memory for the subscription: the event is read from the log.
        log.release_memory(of);
    }
    let text = format!("{{\"data\":\"{}\"}}", "x".repeat(100_000));
    log.append(events(&[(&text, &[1, 2, 3])])).await.unwrap();
    let claim = async |of| log.claim(of, at(0), WANT).await.unwrap().remove(0);
    let (first, second) = (claim(subscriptions[0]).await, claim(subscriptions[1]).await);
    assert!(Arc::ptr_eq(&first.entry, &second.entry));
    let retry = settled(&first, NextStep::RetryAt(at(10)));
    log.settle(subscriptions[0], vec![retry]).await.unwrap();
    log.flush().await.unwrap();
    let again = log.claim(subscriptions[0], at(10), WANT).await.unwrap().remove(0);
    assert_eq!(again.attempts_made, 1);
    assert!(Arc::ptr_eq(&again.entry, &second.entry));
    log.close().await.unwrap();
}

/// A retry that is released and dropped from memory is still due and offered again.
#[tokio::test]
async fn a_retry_that_rests_is_offered_again() {
    let directory = tempfile::tempdir().unwrap();
    let log = EmbeddedLog::open(directory.path(), 7).await.unwrap();
    log.open_subscription(sub(1)).await.unwrap();
    log.append(events(&[("{\"n\":1}", &[1]), ("{\"n\":2}", &[1])]))
        .await
        .unwrap();
    let claims = log.claim(sub(1), at(0), WANT).await.unwrap();
    let retries = claims
        .iter()
        .map(|claim| settled(claim, NextStep::RetryAt(at(10))));
    log.settle(sub(1), retries.collect()).await.unwrap();
    log.flush().await.unwrap();
    let due = log.claim(sub(1), at(10), WANT).await.unwrap();
    assert_eq!(due.len(), 2);
    log.release(sub(1), due);
    log.release_memory(sub(1));
    assert_eq!(log.due(at(10)), [sub(1)]);
    assert_eq!(log.claim(sub(1), at(10), WANT).await.unwrap().len(), 2);
    assert_eq!(log.backlog(sub(1)).claimed, 2);
    log.close().await.unwrap();
}
