//! The publisher: a steady stream of events over one connection, as any client would send them.

use super::clock::FastClock;
use super::scenario::{DemoSubscription, TOPIC, event};
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use postrider_core::time::Clock;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// Above this many requests a second, each carries more than one event.
const REQUESTS_PER_SECOND_MAX: u32 = 40;

/// Counts of events that the server has accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptedCounts {
    pub events: u64,
    /// Events that each part's filter lets through.
    pub wanted: [u64; DemoSubscription::ALL.len()],
    /// Whether publishing has ended.
    pub over: bool,
}

pub struct DemoPublisher {
    pub server: SocketAddr,
    pub key: String,
    pub rate: u32,
    pub events_max: u64,
    pub clock: Arc<FastClock>,
    pub published: watch::Sender<AcceptedCounts>,
}

impl DemoPublisher {
    /// Publishes until all events are accepted or `stop` is cancelled. An event that is refused is
    /// an error.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        let stream = TcpStream::connect(self.server)
            .await
            .context("connecting to the server")?;
        stream.set_nodelay(true)?;
        let (requests, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::select! {
            biased;
            published = self.publish_all(requests, stop) => published?,
            closed = connection => bail!("the server closed the publisher's connection: {closed:?}"),
        }
        self.published.send_modify(|published| published.over = true);
        Ok(())
    }

    async fn publish_all(
        &self,
        mut requests: SendRequest<Full<Bytes>>,
        stop: CancellationToken,
    ) -> Result<()> {
        let requests_per_second = self.rate.min(REQUESTS_PER_SECOND_MAX);
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / requests_per_second);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let started = Instant::now();
        let mut last = 0;
        while last < self.events_max {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                _ = ticks.tick() => {}
            }
            let due = 1 + (started.elapsed().as_secs_f64() * f64::from(self.rate)) as u64;
            let numbers = last + 1..=due.min(self.events_max);
            if numbers.is_empty() {
                continue;
            }
            last = *numbers.end();
            let events: Vec<Value> = numbers
                .clone()
                .map(|number| event(number, self.clock.now()))
                .collect();
            self.publish(&mut requests, &events).await?;
            self.published.send_modify(|published| {
                published.events += events.len() as u64;
                for (part, wanted) in DemoSubscription::ALL.into_iter().zip(&mut published.wanted) {
                    *wanted += numbers.clone().filter(|number| part.wants(*number)).count() as u64;
                }
            });
        }
        Ok(())
    }

    async fn publish(&self, requests: &mut SendRequest<Full<Bytes>>, events: &[Value]) -> Result<()> {
        let body = serde_json::to_vec(events).expect("JSON can be written");
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("/topics/{TOPIC}/api/events?api-version=2018-01-01"))
            .header(header::HOST, self.server.to_string())
            .header(header::CONTENT_TYPE, "application/json")
            .header("aeg-sas-key", &self.key)
            .body(Full::from(body))?;
        requests.ready().await?;
        let (head, body) = requests
            .send_request(request)
            .await
            .context("publishing")?
            .into_parts();
        let body = body.collect().await?.to_bytes();
        if !head.status.is_success() {
            bail!(
                "the server answered {} to a publish: {}",
                head.status,
                String::from_utf8_lossy(&body)
            );
        }
        Ok(())
    }
}
