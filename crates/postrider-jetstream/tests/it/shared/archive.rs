//! The archive on several nodes.

use crate::nats::NatsProcess;
use crate::support::named;
use async_trait::async_trait;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_jetstream::archive::JetStreamArchive;
use postrider_jetstream::connection::NatsConnection;
use postrider_store::conformance::{self, ArchiveUnderTest, at};
use postrider_store::{Archive, BlobId, BlobRecord, DeadLetterMark, ReplayJob, ReplayState};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

static NODES: AtomicU64 = AtomicU64::new(1);

fn me() -> u64 {
    NODES.fetch_add(1, Relaxed)
}

struct JetStreamArchiveUnderTest {
    nats: NatsProcess,
    opened: Mutex<Option<NatsConnection>>,
    snapshot_bytes: u64,
}

impl JetStreamArchiveUnderTest {
    async fn opened(&self, connection: &NatsConnection) -> Arc<dyn Archive> {
        let opened = JetStreamArchive::open_with(connection, me(), self.snapshot_bytes).await;
        Arc::new(opened.unwrap())
    }
}

#[async_trait]
impl ArchiveUnderTest for JetStreamArchiveUnderTest {
    async fn open(&self) -> Arc<dyn Archive> {
        let connection = named(self.nats.connect().await, &format!("a{}", me()));
        *self.opened.lock().unwrap() = Some(connection.clone());
        self.opened(&connection).await
    }

    async fn reopen(&self, archive: Arc<dyn Archive>) -> Arc<dyn Archive> {
        drop(archive);
        let connection = self.opened.lock().unwrap().clone().unwrap();
        self.opened(&connection).await
    }
}

// Also with snapshots so frequent that most of what is read comes from one.
#[tokio::test(flavor = "multi_thread")]
async fn keeps_the_archives_promise() {
    for snapshot_bytes in [1 << 30, 2_000] {
        let Some(nats) = NatsProcess::start() else { return };
        let subject = JetStreamArchiveUnderTest {
            nats,
            opened: Mutex::default(),
            snapshot_bytes,
        };
        conformance::archive::archive(&subject).await;
    }
}

fn blob(marks: Vec<DeadLetterMark>) -> BlobRecord {
    BlobRecord {
        id: BlobId(0),
        subscription: SubscriptionId(1),
        subscription_name: "s".into(),
        topic_name: "t".into(),
        account: "a".into(),
        container: "c".into(),
        path: "p".into(),
        written: at(1),
        bytes: 5,
        sha256: None,
        marks,
    }
}

const LETTER: DeadLetterMark = DeadLetterMark {
    reason: GiveUpReason::BadRequest,
    replays: 0,
    purged: false,
};

#[tokio::test(flavor = "multi_thread")]
async fn marks_that_another_node_has_changed_are_not_overwritten() {
    let Some(nats) = NatsProcess::start() else { return };
    let connection = nats.connect().await;
    let one = JetStreamArchive::open(&connection, me()).await.unwrap();
    let two = JetStreamArchive::open(&connection, me()).await.unwrap();
    let id = one.add(blob(vec![LETTER, LETTER])).await.unwrap();
    let was = [LETTER, LETTER];
    let replayed = DeadLetterMark { replays: 1, ..LETTER };
    let purged = DeadLetterMark {
        purged: true,
        ..LETTER
    };
    assert!(one.mark_if(id, &was, vec![replayed, LETTER]).await.unwrap());
    assert!(!two.mark_if(id, &was, vec![LETTER, purged]).await.unwrap());
    let fresh = two.get(id).await.unwrap().unwrap().marks;
    assert_eq!(fresh, [replayed, LETTER], "what was refused shows why");
    assert!(two.mark_if(id, &fresh, vec![replayed, purged]).await.unwrap());
    let job = job(two.next_job().await.unwrap());
    let put = one.put_job_if(job.clone(), id, &fresh, vec![replayed, replayed]);
    assert!(!put.await.unwrap());
    assert_eq!(one.jobs().await.unwrap(), [], "not one without the other");
    assert_eq!(one.get(id).await.unwrap().unwrap().marks, [replayed, purged]);
}

fn job(id: u64) -> ReplayJob {
    ReplayJob {
        id,
        request: "{}".into(),
        created: at(1),
        next: (BlobId(0), 0),
        last: BlobId(9),
        replayed: 0,
        failed: 0,
        unreadable: 0,
        unreadable_blobs: Vec::new(),
        state: ReplayState::Running,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_is_seen_and_stopped_by_other_nodes() {
    let Some(nats) = NatsProcess::start() else { return };
    let connection = nats.connect().await;
    let one = JetStreamArchive::open(&connection, me()).await.unwrap();
    let two = JetStreamArchive::open(&connection, me()).await.unwrap();
    let told = async |archive: &JetStreamArchive| {
        let told = tokio::time::timeout(Duration::from_secs(20), archive.jobs_changed()).await;
        told.expect("it is told");
    };
    let id = one.next_job().await.unwrap();
    one.put_job(job(id), None).await.unwrap();
    told(&two).await;
    assert_eq!(two.jobs().await.unwrap(), [job(id)]);
    two.request_cancel(id).await.unwrap();
    told(&one).await;
    assert_eq!(one.cancel_requests().await.unwrap(), [id]);
    // A progress update of the replay does not end the request to stop it.
    one.put_job(
        ReplayJob {
            replayed: 3,
            ..job(id)
        },
        None,
    )
    .await
    .unwrap();
    assert_eq!(one.cancel_requests().await.unwrap(), [id]);
    let cancelled = ReplayJob {
        state: ReplayState::Cancelled,
        ..job(id)
    };
    one.put_job(cancelled.clone(), None).await.unwrap();
    told(&two).await;
    conformance::eventually("it has ended there too", || {
        let jobs = futures_util::FutureExt::now_or_never(two.jobs());
        jobs.is_some_and(|jobs| jobs.unwrap() == [cancelled.clone()])
    })
    .await;
    assert_eq!(two.cancel_requests().await.unwrap(), [0u64; 0]);
    two.request_cancel(id).await.unwrap();
    assert_eq!(two.cancel_requests().await.unwrap(), [0u64; 0], "it does not run");
}
