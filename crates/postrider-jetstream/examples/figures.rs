//! Measures the log on a NATS server, next to plain publishes in the same run: `figures
//! nats://127.0.0.1:4222 [seconds [replicas]]`.
//!
//! Sixty-four publishers, each waiting for its answer before it publishes again; publish requests
//! of one event of a kilobyte. Leaves streams named `figures-…` behind.

#![expect(clippy::disallowed_methods, reason = "measures; its tasks end with it")]

use postrider_core::event::PublishedBatch;
use postrider_core::retry::NextStep;
use postrider_jetstream::{
    JetStreamLog, JetStreamSettings, NatsConnection, NoForwarding, NodeShared, Partition, StreamNames,
};
use postrider_store::conformance::{at, events, sub};
use postrider_store::{ClaimLimits, EventLog, Settlement};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const PRODUCERS: usize = 64;
const SIZE: usize = 1024;

/// Runs publishers for a while; each calls `once` repeatedly. Returns the rate per second, and the
/// median and 99th percentile of the durations.
async fn measure<F, Fut>(secs: u64, once: F) -> (f64, Duration, Duration)
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send,
{
    let once = Arc::new(once);
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..PRODUCERS {
        let once = once.clone();
        tasks.spawn(async move {
            let mut took = Vec::new();
            while started.elapsed() < Duration::from_secs(secs) {
                let began = Instant::now();
                once().await;
                took.push(began.elapsed());
            }
            took
        });
    }
    let mut took: Vec<Duration> = tasks.join_all().await.concat();
    let elapsed = started.elapsed();
    took.sort();
    let at = |percent: usize| took[took.len() * percent / 100];
    (took.len() as f64 / elapsed.as_secs_f64(), at(50), at(99))
}

fn show(what: &str, (rate, middle, slow): (f64, Duration, Duration)) {
    println!("{what:<58} {rate:>9.0}/s   p50 {middle:>9.2?}   p99 {slow:>9.2?}");
}

fn batch() -> PublishedBatch {
    events(&[(&"x".repeat(SIZE), &[1])])
}

async fn log(connection: &NatsConnection, name: &str, partitions: u8) -> Arc<JetStreamLog> {
    let mut connection = connection.clone();
    connection.names = StreamNames::new(name);
    let shared = NodeShared::new("figures", Arc::new(|| true));
    let log = Arc::new(JetStreamLog::new(
        connection.clone(),
        7,
        shared.clone(),
        Arc::new(NoForwarding),
    ));
    for number in 0..partitions {
        let epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let epoch = epoch.expect("after 1970").as_millis() as u64;
        let partition = Partition::take(&connection, number, epoch, shared.clone()).await;
        log.add(partition.expect("the partition can be taken"));
    }
    log
}

/// Claims and settles deliveries, and counts them.
async fn deliver(log: Arc<JetStreamLog>, delivered: Arc<AtomicU64>) {
    let want = ClaimLimits {
        events_max: 100,
        bytes_max: 1 << 20,
        overhead: 0,
    };
    loop {
        let claims = log.claim(sub(1), at(0), want).await.expect("claims");
        if claims.is_empty() {
            tokio::time::sleep(Duration::from_micros(200)).await;
            continue;
        }
        delivered.fetch_add(claims.len() as u64, Relaxed);
        let settled = claims.into_iter().map(|claim| Settlement {
            claim,
            at: at(1),
            attempts_made: 1,
            last_attempt: None,
            next: NextStep::Done,
        });
        log.settle(sub(1), settled.collect()).await.expect("settles");
    }
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().unwrap_or_else(|| "nats://127.0.0.1:4222".into());
    let secs = arguments.next().and_then(|secs| secs.parse().ok()).unwrap_or(5);
    let replicas = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(1);
    let settings = JetStreamSettings {
        urls: vec![url],
        replicas,
        ..JetStreamSettings::default()
    };
    let connection = NatsConnection::open(&settings, "figures")
        .await
        .expect("a server");
    let name = format!("figures-{}", std::process::id());

    connection
        .stream(&format!("{name}-raw"), vec![format!("{name}.raw")])
        .await
        .expect("a stream");
    let (js, subject) = (connection.js.clone(), format!("{name}.raw"));
    let payload = bytes::Bytes::from("x".repeat(SIZE));
    let raw = measure(secs, move || {
        let (js, subject, payload) = (js.clone(), subject.clone(), payload.clone());
        async move {
            let ack = js.publish(subject, payload).await.expect("it is sent");
            ack.await.expect("it is acknowledged");
        }
    });
    show("plain publishes, one stream", raw.await);

    for partitions in [1, 4] {
        let log = log(&connection, &format!("{name}-a{partitions}"), partitions).await;
        let appending = log.clone();
        let appends = measure(secs, move || {
            let log = appending.clone();
            async move {
                log.append(batch()).await.expect("it is appended");
            }
        });
        show(&format!("appends, {partitions} partitions"), appends.await);
        log.close().await.expect("it closes");
    }
    for partitions in [1, 4] {
        let log = log(&connection, &format!("{name}-d{partitions}"), partitions).await;
        let delivered = Arc::new(AtomicU64::new(0));
        let mut delivering = tokio::task::JoinSet::new();
        delivering.spawn(deliver(log.clone(), delivered.clone()));
        delivering.spawn(deliver(log.clone(), delivered.clone()));
        let appending = log.clone();
        let began = Instant::now();
        let appends = measure(secs, move || {
            let log = appending.clone();
            async move {
                log.append(batch()).await.expect("it is appended");
            }
        });
        show(
            &format!("appends while all is delivered, {partitions} partitions"),
            appends.await,
        );
        while log.backlog(sub(1)).waiting > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        log.flush().await.expect("it is flushed");
        let rate = delivered.load(Relaxed) as f64 / began.elapsed().as_secs_f64();
        println!(
            "{:<58} {rate:>9.0}/s   {} snapshots",
            "  append, claim, settle, all of it durable",
            log.shared().counters.snapshots.load(Relaxed)
        );
        delivering.shutdown().await;
        log.close().await.expect("it closes");
    }

    // A backlog that does not fit into memory.
    let log = log(&connection, &format!("{name}-b"), 1).await;
    let filling = log.clone();
    measure(secs, move || {
        let log = filling.clone();
        async move {
            log.append(batch()).await.expect("it is appended");
        }
    })
    .await;
    let count = log.backlog(sub(1)).waiting;
    log.close().await.expect("it closes");
    drop(log);
    let began = Instant::now();
    let log = self::log(&connection, &format!("{name}-b"), 1).await;
    println!(
        "takeover with {count} events waiting, after a release: {:.2?}",
        began.elapsed()
    );
    let delivered = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let mut delivering = tokio::task::JoinSet::new();
    delivering.spawn(deliver(log.clone(), delivered.clone()));
    while delivered.load(Relaxed) < count {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let rate = count as f64 / began.elapsed().as_secs_f64();
    println!("{:<58} {rate:>9.0}/s", "  read back, claimed and settled");
    delivering.shutdown().await;
}
