//! `postrider bench --dead-letters N`: that many dead letters written to a local directory, beside
//! the same bytes in the same blobs written there directly.

use super::BenchArgs;
use crate::outgoing::StoreConnector;
use anyhow::{Context, Result, bail, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use postrider_blobs::{AccountLocation, BlobAccountConfig, ObjectStores};
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers, PublishedBatch};
use postrider_core::ids::{Secret, SubscriptionId, TopicId};
use postrider_core::profile::Profiles;
use postrider_core::subscription::{
    BatchSettings, DeadLetterDestination, Destination, Subscription, Topic, WebHook,
};
use postrider_core::time::{Clock, Sleep, Timestamp};
use postrider_embedded::{EmbeddedArchive, EmbeddedCatalog, EmbeddedLog};
use postrider_engine::blobs::BlobStore;
use postrider_engine::clock::SystemClock;
use postrider_engine::dead_letters::{BLOBS_IN_FLIGHT_MAX, DeadLetterService};
use postrider_engine::deliver::{DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport};
use postrider_engine::{Engine, EngineParts, dispatch, handshake};
use postrider_store::seal::Keyring;
use postrider_store::{Catalog, CatalogChange};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

const EVENTS_PER_REQUEST: u64 = 100;
/// Publish requests under way.
const PUBLISHING_MAX: usize = 64;
const CONTAINER: &str = "letters";
/// How often completion is checked.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Longest either half of the measurement may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// Longer than dead letters wait before they are written.
const AHEAD: Duration = Duration::from_secs(301);

#[derive(Clone, Debug, Serialize)]
pub struct DeadLetterReport {
    pub letters: u64,
    pub blobs: usize,
    pub blob_bytes: u64,
    /// From the instant at which the dead letters are due until the last is in its blob and removed
    /// from the log.
    pub letters_per_s: f64,
    /// Rate of writing and flushing the same blobs directly.
    pub direct_letters_per_s: f64,
    pub ratio: f64,
}

/// Transport that refuses every event.
struct AlwaysRefusingTransport;

#[async_trait]
impl DeliveryTransport for AlwaysRefusingTransport {
    async fn send(self: Arc<Self>, _: DeliveryRequest) -> DeliveryReply {
        DeliveryReply::Answered(DeliveryAnswer {
            status: 400,
            ..DeliveryAnswer::default()
        })
    }
}

/// The machine's clock, which can be put ahead to skip the five minutes that dead letters wait. The
/// test clock is not used because its constant checks whether it may move would distort the
/// measurement.
struct AheadClock {
    by: watch::Sender<Duration>,
}

impl Clock for AheadClock {
    fn now(&self) -> Timestamp {
        SystemClock.now() + *self.by.borrow()
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        let mut by = self.by.subscribe();
        Box::pin(async move {
            while self.now() < deadline {
                let real = deadline - *by.borrow_and_update();
                tokio::select! {
                    () = SystemClock.sleep_until(real) => {}
                    _ = by.changed() => {}
                }
            }
        })
    }
}

/// Polls until `it_is_so` returns true.
async fn wait_until(it_is_so: impl Fn() -> bool) {
    while !it_is_so() {
        SystemClock.sleep_until(SystemClock.now() + LOOK_EVERY).await;
    }
}

pub async fn measure(args: &BenchArgs, count: u64) -> Result<DeadLetterReport> {
    let dir = tempfile::Builder::new()
        .prefix(".postrider-bench-")
        .tempdir_in(&args.dir);
    let dir = dir.with_context(|| format!("creating a directory in {}", args.dir.display()))?;
    let root = dir.path().join("blobs");
    let (engine, clock) = start(dir.path(), &root).await?;
    publish(&engine, count, args.size as usize).await?;
    // Every delivery fails at once, and its dead letter waits for five minutes.
    let waiting = || {
        engine
            .log()
            .pending_dead_letters()
            .iter()
            .map(|one| one.count)
            .sum::<u64>()
    };
    let failed = tokio::time::timeout(PATIENCE, wait_until(|| waiting() == count)).await;
    ensure!(
        failed.is_ok(),
        "{} of {count} events became dead letters",
        waiting()
    );
    // A dead letter counts as written once the log has removed it.
    let written = || engine.dispatcher.counters.dead_letters_written.load(Relaxed);
    let began = Instant::now();
    clock.by.send_replace(AHEAD);
    let done = tokio::time::timeout(PATIENCE, wait_until(|| written() == count)).await;
    let took = began.elapsed().as_secs_f64();
    ensure!(done.is_ok(), "{} of {count} dead letters were written", written());
    engine.stop(std::future::pending()).await?;

    let blobs = read_blobs(&root.join(CONTAINER))?;
    let bytes: u64 = blobs.iter().map(|(_, body)| body.len() as u64).sum();
    let stores = Arc::new(stores(&dir.path().join("direct"))?);
    let began = Instant::now();
    let mut writing: JoinSet<Result<()>> = JoinSet::new();
    let total = blobs.len();
    for (path, body) in blobs {
        while writing.len() >= BLOBS_IN_FLIGHT_MAX {
            writing.join_next().await.transpose()?.transpose()?;
        }
        let stores = stores.clone();
        writing.spawn(async move {
            stores.put("bench", CONTAINER, &path, body).await?;
            Ok(())
        });
    }
    while let Some(ended) = writing.join_next().await {
        ended??;
    }
    let direct = began.elapsed().as_secs_f64();
    Ok(DeadLetterReport {
        letters: count,
        blobs: total,
        blob_bytes: bytes,
        letters_per_s: count as f64 / took,
        direct_letters_per_s: count as f64 / direct,
        ratio: direct / took,
    })
}

impl DeadLetterReport {
    pub fn text(&self) -> String {
        format!(
            "{} dead letters in {} blobs ({} MB)\n  postrider {:>10.0} letters/s\n  directly  {:>10.0} letters/s\n  ratio {:.2}",
            self.letters,
            self.blobs,
            self.blob_bytes >> 20,
            self.letters_per_s,
            self.direct_letters_per_s,
            self.ratio
        )
    }
}

fn stores(root: &Path) -> Result<ObjectStores> {
    let account = BlobAccountConfig {
        name: "bench".into(),
        place: AccountLocation::Directory {
            root: root.to_owned(),
        },
        create_containers: true,
    };
    let clock = Arc::new(SystemClock);
    let connector = StoreConnector::new(postrider_transport::Config::default(), clock.clone())?;
    Ok(ObjectStores::new(vec![account], clock, connector)?)
}

async fn start(data: &Path, root: &Path) -> Result<(Arc<Engine>, Arc<AheadClock>)> {
    let (by, _) = watch::channel(Duration::ZERO);
    let clock = Arc::new(AheadClock { by });
    let catalog = EmbeddedCatalog::open(&data.join("catalog.redb"), Arc::new(Keyring::ephemeral()))?;
    let changes = vec![
        CatalogChange::PutTopic(topic()),
        CatalogChange::PutSubscription(subscription()),
    ];
    catalog.commit(changes).await?;
    let archive = EmbeddedArchive::open(&data.join("archive.redb"))?;
    let engine = Engine::start(EngineParts {
        log: Arc::new(EmbeddedLog::open(data, 7).await?),
        catalog: Arc::new(catalog),
        transport: Arc::new(AlwaysRefusingTransport),
        clock: clock.clone(),
        wall: Arc::new(SystemClock),
        profiles: Profiles::default(),
        id_prefix: "/subscriptions/bench".into(),
        dispatch: dispatch::Config::default(),
        dead_letters: DeadLetterService::new(Arc::new(stores(root)?), Arc::new(archive), None),
        handshake: handshake::HandshakeRules::default(),
        recorder: Arc::new(postrider_engine::recorder::NoRecorder),
        node: postrider_engine::node::NodeIdentity::alone(),
    })
    .await?;
    Ok((engine, clock))
}

async fn publish(engine: &Arc<Engine>, count: u64, size: usize) -> Result<()> {
    let topic = engine.directory.topic("bench").context("the topic is there")?;
    let mut publishing: JoinSet<Result<(), postrider_engine::Error>> = JoinSet::new();
    let mut next = 0;
    while next < count {
        while publishing.len() >= PUBLISHING_MAX {
            if let Some(ended) = publishing.join_next().await {
                ended??;
            }
        }
        let events = EVENTS_PER_REQUEST.min(count - next);
        let batch = request(next, events, size, engine.clock.now());
        let (engine, topic) = (engine.clone(), topic.clone());
        publishing.spawn(async move { engine.accept(&topic, batch, Default::default()).await });
        next += events;
    }
    while let Some(ended) = publishing.join_next().await {
        ended??;
    }
    Ok(())
}

fn request(first: u64, count: u64, size: usize, now: Timestamp) -> PublishedBatch {
    let mut body = String::from("[");
    let mut events = Vec::new();
    for number in first..first + count {
        if number > first {
            body.push(',');
        }
        let start = body.len();
        let head = format!(
            r#"{{"id":"{number}","subject":"bench","eventType":"bench","eventTime":"2026-01-01T00:00:00Z","dataVersion":"1","data":""#
        );
        let filling = "x".repeat(size.saturating_sub(head.len() + 2));
        body.push_str(&head);
        body.push_str(&filling);
        body.push_str("\"}");
        events.push(EventRef {
            object: ByteSpan::new(start, body.len()),
            lacks: MissingMembers {
                topic: true,
                data_version: false,
                metadata_version: true,
            },
            ..EventRef::default()
        });
    }
    body.push(']');
    PublishedBatch {
        topic: TopicId(1),
        schema: EventSchema::EventGrid,
        received: now,
        publisher: "bench".into(),
        trace: None,
        replay: 0,
        hops: 0,
        body: Bytes::from(body),
        events,
        matched: vec![Box::new([SubscriptionId(2)])],
    }
}

fn topic() -> Topic {
    Topic {
        resource_group: "bench".into(),
        location: "here".into(),
        ..Topic::custom(TopicId(1), "bench", [Secret::new("a"), Secret::new("b")])
    }
}

fn subscription() -> Subscription {
    Subscription {
        dead_letter: Some(DeadLetterDestination {
            account: "bench".into(),
            container: CONTAINER.into(),
        }),
        ..Subscription::new(
            SubscriptionId(2),
            TopicId(1),
            "bench",
            Destination::WebHook(WebHook {
                batching: BatchSettings {
                    events_max: Some(100),
                    preferred_kilobytes: Some(1024),
                },
                ..WebHook::new("http://bench.invalid/")
            }),
        )
    }
}

/// Every blob below a directory, by its path there.
fn read_blobs(root: &Path) -> Result<Vec<(String, Bytes)>> {
    let mut blobs = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path
                .strip_prefix(root)?
                .to_str()
                .context("blobs have names that are text")?;
            blobs.push((name.to_owned(), Bytes::from(std::fs::read(&path)?)));
        }
    }
    if blobs.is_empty() {
        bail!("no blob was written");
    }
    Ok(blobs)
}
