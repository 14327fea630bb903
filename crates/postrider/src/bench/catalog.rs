//! `postrider bench --catalogue TOPICSxSUBSCRIPTIONS`: the rate at which resources are created, the
//! start time and memory of a server that holds them all, and their effect on the one topic that is
//! published to.

use super::http::BenchConnection;
use super::procfs;
use super::report::LoadResult;
use super::{BenchArgs, BenchLoad, BenchSession, MeasuredServer, ReadyServer, server_config};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

/// Connections over which resources are created, like a handful of clients.
const CONNECTIONS: u64 = 8;
/// Subscriptions that a single client creates, one after the other.
const ALONE: u64 = 200;
const API: &str = "api-version=2019-01-01-preview";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CatalogSize {
    topics: u64,
    subscriptions: u64,
}

/// `10000x20`
pub fn parse_size(text: &str) -> Result<CatalogSize, String> {
    let expected = || format!("{text:?} is not TOPICSxSUBSCRIPTIONS, such as 10000x20");
    let (topics, subscriptions) = text.split_once('x').ok_or_else(expected)?;
    let number = |text: &str| text.parse::<u64>().map_err(|_| expected());
    let (topics, subscriptions) = (number(topics)?, number(subscriptions)?);
    if topics == 0 || topics > 1_000_000 || subscriptions > 1_000 {
        return Err(format!("{text:?} is out of bounds: up to 1000000x1000"));
    }
    Ok(CatalogSize {
        topics,
        subscriptions,
    })
}

#[derive(Clone, Debug, Serialize)]
pub struct CatalogReport {
    pub topics: u64,
    /// Subscriptions of each topic.
    pub subscriptions: u64,
    pub connections: u64,
    pub creates_per_s: f64,
    /// Rate of the slowest consecutive tenth of all creates.
    pub creates_per_s_slowest_tenth: f64,
    /// Rate of a single client that waits for each answer.
    pub creates_per_s_alone: f64,
    /// From the start of the process until it reports ready, with no resources and with all of
    /// them.
    pub ready_empty_ms: f64,
    pub ready_ms: f64,
    pub resident_empty_mib: Option<f64>,
    pub resident_mib: Option<f64>,
    pub bytes_per_subscription: Option<f64>,
    pub catalogue_file_mib: f64,
    /// Load of one event per request on one topic with one subscription, without and with the other
    /// resources.
    pub alone: LoadResult,
    pub beside: LoadResult,
}

pub async fn measure(args: &BenchArgs, size: CatalogSize) -> Result<CatalogReport> {
    let dir = tempfile::Builder::new()
        .prefix(".postrider-bench-")
        .tempdir_in(&args.dir);
    let dir = dir.with_context(|| format!("creating a directory in {}", args.dir.display()))?;
    let mut bench = BenchSession::start(args, dir.path()).await?;
    let say = |what: &str| {
        if !args.output.is_json() {
            eprintln!("{what} …");
        }
    };
    let (config, data) = (dir.path().join("postrider.toml"), dir.path().join("data"));
    std::fs::write(
        &config,
        server_config(BenchLoad::Single, true, &bench.key, bench.sink_address, None),
    )?;
    std::fs::create_dir(&data)?;

    say("publishing with nothing beside it");
    let (ready, ready_empty) = start(&bench, dir.path(), "first").await?;
    let resident_empty_mib = procfs::rss_mib(ready.process.pid());
    let alone = bench
        .measure_ready(BenchLoad::Single, MeasuredServer::Postrider, None, &ready)
        .await?;

    say("making them");
    make_topics(ready.address, 0, 1).await?;
    let began = Instant::now();
    make_subscriptions(ready.address, 0, ALONE).await?;
    let creates_per_s_alone = ALONE as f64 / began.elapsed().as_secs_f64();
    let (creates_per_s, creates_per_s_slowest_tenth) = make_all(ready.address, size).await?;
    drop(ready);

    say("starting with all of them");
    let (ready, ready_full) = start(&bench, dir.path(), "second").await?;
    let resident_mib = procfs::rss_mib(ready.process.pid());
    say("publishing beside them");
    let beside = bench
        .measure_ready(BenchLoad::Single, MeasuredServer::Postrider, None, &ready)
        .await?;
    let count = size.topics * size.subscriptions + ALONE;
    let grown = resident_mib
        .zip(resident_empty_mib)
        .map(|(full, empty)| full - empty);
    let file = std::fs::metadata(data.join("catalog.redb")).map_or(0, |file| file.len());
    Ok(CatalogReport {
        topics: size.topics,
        subscriptions: size.subscriptions,
        connections: CONNECTIONS,
        creates_per_s,
        creates_per_s_slowest_tenth,
        creates_per_s_alone,
        ready_empty_ms: ready_empty,
        ready_ms: ready_full,
        resident_empty_mib,
        resident_mib,
        bytes_per_subscription: grown.map(|mib| mib * f64::from(1 << 20) / count as f64),
        catalogue_file_mib: file as f64 / f64::from(1 << 20),
        alone,
        beside,
    })
}

impl CatalogReport {
    pub fn text(&self) -> String {
        let mib = |memory: Option<f64>| memory.map_or("?".to_owned(), |mib| format!("{mib:.0}"));
        format!(
            "{} topics with {} subscriptions each\n\
             \x20 made       {:>8.0}/s by {} clients ({:.0}/s in the slowest tenth), {:.0}/s by one alone\n\
             \x20 ready in   {:>8.0} ms, {:.0} ms with none\n\
             \x20 resident   {:>8} MiB, {} MiB with none, {:.0} bytes per subscription; {:.0} MiB on disk\n\
             \x20 delivered  {:>8.0}/s beside them, {:.0}/s with none",
            self.topics,
            self.subscriptions,
            self.creates_per_s,
            self.connections,
            self.creates_per_s_slowest_tenth,
            self.creates_per_s_alone,
            self.ready_ms,
            self.ready_empty_ms,
            mib(self.resident_mib),
            mib(self.resident_empty_mib),
            self.bytes_per_subscription.unwrap_or(f64::NAN),
            self.catalogue_file_mib,
            self.beside.deliveries_per_s,
            self.alone.deliveries_per_s,
        )
    }
}

/// Starts the server and returns how many milliseconds that took.
async fn start(bench: &BenchSession<'_>, dir: &Path, log: &str) -> Result<(ReadyServer, f64)> {
    let (config, data) = (dir.join("postrider.toml"), dir.join("data"));
    let began = Instant::now();
    let ready = bench.serve(&config, &data, dir.join(log), None).await?;
    Ok((ready, began.elapsed().as_secs_f64() * 1000.0))
}

/// Creates `topics` topics with `subscriptions` subscriptions each.
pub async fn make(to: SocketAddr, topics: u64, subscriptions: u64) -> Result<()> {
    let size = CatalogSize {
        topics,
        subscriptions,
    };
    make_all(to, size).await.map(|_| ())
}

/// Creates everything over several connections. Returns resources per second, in all and in the
/// slowest tenth.
async fn make_all(to: SocketAddr, size: CatalogSize) -> Result<(f64, f64)> {
    let began = Instant::now();
    let next = Rc::new(std::cell::Cell::new(1));
    let ends = Rc::new(std::cell::RefCell::new(Vec::new()));
    let local = LocalSet::new();
    let mut making: JoinSet<Result<()>> = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let (next, ends) = (next.clone(), ends.clone());
        making.spawn_local_on(
            async move {
                let mut connection = BenchConnection::open(to).await?;
                loop {
                    let topic = next.get();
                    if topic > size.topics {
                        return Ok(());
                    }
                    next.set(topic + 1);
                    put_topic(&mut connection, to, topic).await?;
                    ends.borrow_mut().push(began.elapsed().as_secs_f64());
                    for subscription in 0..size.subscriptions {
                        put_subscription(&mut connection, to, topic, subscription).await?;
                        ends.borrow_mut().push(began.elapsed().as_secs_f64());
                    }
                }
            },
            &local,
        );
    }
    let all = async {
        while let Some(ended) = making.join_next().await {
            ended??;
        }
        anyhow::Ok(())
    };
    local.run_until(all).await?;
    let ends = ends.take();
    let total = ends.last().copied().unwrap_or(f64::NAN);
    let tenth = (ends.len() / 10).max(1);
    let tenths = ends.chunks_exact(tenth);
    let mut before = 0.0;
    let mut slowest = f64::INFINITY;
    for part in tenths {
        let end = part[part.len() - 1];
        slowest = slowest.min(part.len() as f64 / (end - before));
        before = end;
    }
    Ok((ends.len() as f64 / total, slowest))
}

async fn make_topics(to: SocketAddr, from: u64, count: u64) -> Result<()> {
    let mut connection = BenchConnection::open(to).await?;
    for topic in from..from + count {
        put_topic(&mut connection, to, topic).await?;
    }
    Ok(())
}

async fn make_subscriptions(to: SocketAddr, topic: u64, count: u64) -> Result<()> {
    let mut connection = BenchConnection::open(to).await?;
    for subscription in 0..count {
        put_subscription(&mut connection, to, topic, subscription).await?;
    }
    Ok(())
}

async fn put_topic(connection: &mut BenchConnection, to: SocketAddr, topic: u64) -> Result<()> {
    let path = format!("/topics/t{topic}?{API}");
    put(
        connection,
        to,
        &path,
        r#"{"properties":{"inputSchema":"EventGridSchema"}}"#,
    )
    .await
}

async fn put_subscription(
    connection: &mut BenchConnection,
    to: SocketAddr,
    topic: u64,
    subscription: u64,
) -> Result<()> {
    let path = format!("/topics/t{topic}/eventSubscriptions/s{subscription}?{API}");
    // Nothing is ever sent to these URLs. Each is an endpoint of its own, on one of a hundred
    // hosts.
    let body = format!(
        r#"{{"properties":{{"destination":{{"endpointType":"WebHook","properties":{{"endpointUrl":"https://receiver{}.invalid/hooks/t{topic}/s{subscription}"}}}}}}}}"#,
        topic % 100
    );
    put(connection, to, &path, &body).await
}

async fn put(connection: &mut BenchConnection, to: SocketAddr, path: &str, body: &str) -> Result<()> {
    let length = body.len();
    let request = format!(
        "PUT {path} HTTP/1.1\r\nhost: {to}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    connection.send(request.as_bytes()).await?;
    let response = connection.response().await?;
    if !(200..300).contains(&response.status) {
        let said = String::from_utf8_lossy(&response.body);
        bail!("PUT {path} was answered with {}: {said}", response.status);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_two_numbers() {
        let size = |topics, subscriptions| CatalogSize {
            topics,
            subscriptions,
        };
        assert_eq!(parse_size("10000x20"), Ok(size(10_000, 20)));
        assert_eq!(parse_size("1x0"), Ok(size(1, 0)));
        for wrong in ["", "10", "x", "0x5", "5x", "axb", "2000000x1", "1x2000", "1x2x3"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
