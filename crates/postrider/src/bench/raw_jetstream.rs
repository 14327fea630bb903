//! `bench-raw`: the limit of JetStream alone: messages published to one stream with a fixed number
//! in flight, as fast as they are acknowledged. Prints one JSON line.

use super::sink::LatencyPercentiles;
use super::{child, latency_histogram, single_threaded};
use anyhow::{Context, Result};
use async_nats::jetstream::{self, stream};
use bytes::Bytes;
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::future::IntoFuture;
use std::time::Duration;
use tokio::time::Instant;

/// Longest an election of the stream's leader may take.
const LEADER_PATIENCE: Duration = Duration::from_secs(60);
const STREAM: &str = "postrider-bench-raw";

#[derive(clap::Args, Clone, Debug)]
pub struct RawArgs {
    /// Servers of one NATS cluster.
    #[arg(long, required = true, num_args = 1.., value_delimiter = ',')]
    pub urls: Vec<String>,
    #[arg(long)]
    pub replicas: usize,
    /// Bytes per message.
    #[arg(long)]
    pub size: usize,
    /// Messages in flight.
    #[arg(long)]
    pub depth: usize,
    /// Seconds to publish for.
    #[arg(long)]
    pub secs: f64,
}

impl RawArgs {
    /// As given on the command line of `bench-raw`.
    pub(super) fn to_options(&self) -> Vec<String> {
        vec![
            format!("--urls={}", self.urls.join(",")),
            format!("--replicas={}", self.replicas),
            format!("--size={}", self.size),
            format!("--depth={}", self.depth),
            format!("--secs={}", self.secs),
        ]
    }
}

/// Result of a run: acknowledged messages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RawPublishResult {
    pub messages: u64,
    pub secs: f64,
    pub ack_ms: LatencyPercentiles,
}

pub fn run(args: RawArgs) -> Result<()> {
    child::exit_with_parent();
    let acknowledged = single_threaded()?.block_on(publish(args))?;
    println!("{}", serde_json::to_string(&acknowledged)?);
    Ok(())
}

async fn publish(args: RawArgs) -> Result<RawPublishResult> {
    let client = async_nats::connect(args.urls.clone())
        .await
        .context("connecting to NATS")?;
    let js = jetstream::new(client);
    let config = stream::Config {
        name: STREAM.to_owned(),
        subjects: vec![STREAM.to_owned()],
        num_replicas: args.replicas,
        storage: stream::StorageType::File,
        ..Default::default()
    };
    js.create_stream(config)
        .await
        .context("making a stream for raw publishes")?;
    let published = flood(&js, &args).await;
    // The stream is removed because it would disturb later measurements.
    js.delete_stream(STREAM).await.context("removing the stream")?;
    published
}

/// Removes the streams and buckets of a cluster that was only made to be measured.
pub async fn remove(urls: &[String], prefix: &str) -> Result<()> {
    let client = async_nats::connect(urls.to_vec())
        .await
        .context("connecting to NATS")?;
    let js = jetstream::new(client);
    let mut names = js.stream_names();
    let mut ours = Vec::new();
    while let Some(name) = names.try_next().await.context("listing streams")? {
        let own = name.strip_prefix("KV_").unwrap_or(&name);
        if own.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('-')) {
            ours.push(name);
        }
    }
    for name in ours {
        js.delete_stream(&name)
            .await
            .with_context(|| format!("removing stream {name}"))?;
    }
    Ok(())
}

async fn flood(js: &jetstream::Context, args: &RawArgs) -> Result<RawPublishResult> {
    let noise = super::publisher::padding(args.size);
    let mut micros = latency_histogram();
    let mut flying = VecDeque::with_capacity(args.depth);
    let (mut messages, mut from) = (0, 0);
    // A replicated stream has no leader until its election has ended.
    let leading = async {
        while js.publish(STREAM, Bytes::new()).await?.await.is_err() {
            tokio::task::yield_now().await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LEADER_PATIENCE, leading)
        .await
        .context("the stream gets no leader")??;
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(args.secs);
    loop {
        while flying.len() < args.depth && Instant::now() < end {
            let body = Bytes::copy_from_slice(&noise[from..from + args.size]);
            from = (from + 61) % (noise.len() - args.size + 1);
            let ack = js.publish(STREAM, body).await.context("publishing")?;
            flying.push_back((Instant::now(), ack.into_future()));
        }
        let Some((sent, ack)) = flying.pop_front() else {
            break;
        };
        ack.await.context("a message was not acknowledged")?;
        micros.saturating_record(sent.elapsed().as_micros() as u64);
        messages += 1;
    }
    Ok(RawPublishResult {
        messages,
        secs: began.elapsed().as_secs_f64(),
        ack_ms: LatencyPercentiles::of(&micros),
    })
}
