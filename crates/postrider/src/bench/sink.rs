//! `bench-sink`: the webhooks of a measurement. Counts deliveries once per event and endpoint, and
//! their latency.
//!
//! `/hook/<n>` is endpoint n. `POST /control/run/<hex>` starts counting a run afresh, `GET
//! /control/count` says how many deliveries have arrived and `GET /control/stats` says everything.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::task::{JoinSet, LocalSet};

use super::event_mark::{self, now_nanos};
use super::http::{self, BenchConnection};
use super::{child, latency_histogram, single_threaded};
use crate::receiver;

const ENDPOINTS_MAX: usize = 64;
/// Bounds the memory that a corrupted mark could claim: one bit per event.
const SEQ_MAX: u64 = 1 << 32;

#[derive(clap::Args, Debug)]
pub struct SinkArgs {
    /// Address to listen on; port 0 picks one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
}

/// Receives deliveries until the process is killed or its standard input ends.
pub fn run(args: SinkArgs) -> Result<()> {
    child::exit_with_parent();
    single_threaded()?.block_on(LocalSet::new().run_until(async {
        let listener = TcpListener::bind(&args.listen).await?;
        child::announce(listener.local_addr()?);
        serve(listener).await
    }))
}

/// Deliveries of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SinkStats {
    /// Deliveries: an event counts once at each endpoint.
    pub delivered: u64,
    pub duplicates: u64,
    pub requests: u64,
    /// Marks of another run, and requests without any.
    pub foreign: u64,
    /// Publish to arrival, in milliseconds.
    pub latency_ms: LatencyPercentiles,
    /// Deliveries in each second since the run began.
    pub per_second: Vec<u64>,
    pub per_endpoint: Vec<u64>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct LatencyPercentiles {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl LatencyPercentiles {
    /// Reads a histogram of microseconds as milliseconds.
    pub fn of(micros: &Histogram<u64>) -> LatencyPercentiles {
        let at = |quantile| micros.value_at_quantile(quantile) as f64 / 1000.0;
        LatencyPercentiles {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: micros.max() as f64 / 1000.0,
        }
    }
}

/// Serves until the listener fails. Needs a `LocalSet`: one thread, so no locks.
pub(super) async fn serve(listener: TcpListener) -> Result<()> {
    let sink = Rc::new(RefCell::new(SinkState::new(0)));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let connection = BenchConnection::new(accepted?.0)?;
                connections.spawn_local(answer(sink.clone(), connection));
            }
            // A connection that broke off shows as missing deliveries.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn answer(sink: Rc<RefCell<SinkState>>, mut connection: BenchConnection) -> Result<()> {
    while let Some(request) = connection.request().await? {
        if let Some(call) = request.path().strip_prefix("/control/") {
            let (status, body) = match sink.borrow_mut().control(call) {
                Ok(body) => ("200 OK", body),
                Err(error) => ("400 Bad Request", format!("{error:#}")),
            };
            connection.send(response(status, &body).as_bytes()).await?;
        } else if sink.borrow_mut().take(request.path(), &request.body) {
            connection.send(http::OK).await?;
        } else if let Some(body) = receiver::validation_response(&request.body) {
            connection.send(response("200 OK", &body).as_bytes()).await?;
        } else {
            connection.send(http::OK).await?;
        }
    }
    Ok(())
}

fn response(status: &str, body: &str) -> String {
    let len = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n{body}")
}

struct SinkState {
    run: u32,
    started: u64,
    requests: u64,
    duplicates: u64,
    foreign: u64,
    latency: Histogram<u64>,
    per_second: Vec<u64>,
    endpoints: Vec<SinkEndpoint>,
}

#[derive(Default)]
struct SinkEndpoint {
    delivered: u64,
    /// Bitmap with one bit per event of the run.
    seen: Vec<u64>,
}

impl SinkState {
    fn new(run: u32) -> SinkState {
        SinkState {
            run,
            started: now_nanos(),
            requests: 0,
            duplicates: 0,
            foreign: 0,
            latency: latency_histogram(),
            per_second: Vec::new(),
            endpoints: Vec::new(),
        }
    }

    /// Counts the events in a body; false when there are none.
    fn take(&mut self, path: &str, body: &[u8]) -> bool {
        let now = now_nanos();
        self.requests += 1;
        let index = path
            .strip_prefix("/hook/")
            .and_then(|index| index.parse::<usize>().ok());
        let Some(index) = index.filter(|index| *index < ENDPOINTS_MAX) else {
            self.foreign += 1;
            return false;
        };
        if index >= self.endpoints.len() {
            self.endpoints.resize_with(index + 1, SinkEndpoint::default);
        }
        let endpoint = &mut self.endpoints[index];
        let (mut marks, mut fresh) = (0, 0);
        for mark in event_mark::scan(body) {
            marks += 1;
            if mark.run != self.run || mark.seq >= SEQ_MAX {
                self.foreign += 1;
            } else if endpoint.see(mark.seq) {
                fresh += 1;
                let micros = now.saturating_sub(mark.published) / 1000;
                self.latency.saturating_record(micros);
            } else {
                self.duplicates += 1;
            }
        }
        endpoint.delivered += fresh;
        self.count_second(now, fresh);
        if marks == 0 {
            self.foreign += 1;
        }
        marks > 0
    }

    fn count_second(&mut self, now: u64, fresh: u64) {
        let second = (now.saturating_sub(self.started) / 1_000_000_000) as usize;
        if second >= self.per_second.len() {
            self.per_second.resize(second + 1, 0);
        }
        self.per_second[second] += fresh;
    }

    fn control(&mut self, call: &str) -> Result<String> {
        if call == "count" {
            return Ok(self.delivered().to_string());
        }
        if call == "stats" {
            return Ok(serde_json::to_string(&self.stats())?);
        }
        let run = call.strip_prefix("run/").context("no such control call")?;
        *self = SinkState::new(u32::from_str_radix(run, 16).context("a run is hex digits")?);
        Ok(String::new())
    }

    fn delivered(&self) -> u64 {
        self.endpoints.iter().map(|endpoint| endpoint.delivered).sum()
    }

    fn stats(&self) -> SinkStats {
        SinkStats {
            delivered: self.delivered(),
            duplicates: self.duplicates,
            requests: self.requests,
            foreign: self.foreign,
            latency_ms: LatencyPercentiles::of(&self.latency),
            per_second: self.per_second.clone(),
            per_endpoint: self.endpoints.iter().map(|endpoint| endpoint.delivered).collect(),
        }
    }
}

impl SinkEndpoint {
    /// True the first time an event arrives.
    fn see(&mut self, seq: u64) -> bool {
        let word = (seq / 64) as usize;
        if word >= self.seen.len() {
            self.seen.resize((word + 1).next_power_of_two(), 0);
        }
        let bit = 1 << (seq % 64);
        let fresh = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        fresh
    }
}

/// The bench's side of the control calls.
pub(super) struct SinkControl {
    connection: BenchConnection,
}

impl SinkControl {
    pub async fn open(sink: std::net::SocketAddr) -> Result<SinkControl> {
        let connection = BenchConnection::open(sink).await?;
        Ok(SinkControl { connection })
    }

    /// Resets the counts and counts the marks of `run` from now on.
    pub async fn start_run(&mut self, run: u32) -> Result<()> {
        self.call("POST", &format!("run/{run:08x}")).await?;
        Ok(())
    }

    pub async fn count(&mut self) -> Result<u64> {
        Ok(serde_json::from_slice(&self.call("GET", "count").await?)?)
    }

    pub async fn stats(&mut self) -> Result<SinkStats> {
        Ok(serde_json::from_slice(&self.call("GET", "stats").await?)?)
    }

    async fn call(&mut self, method: &str, call: &str) -> Result<bytes::Bytes> {
        let head = format!("{method} /control/{call} HTTP/1.1\r\nhost: sink\r\n\r\n");
        self.connection.send(head.as_bytes()).await?;
        let response = self.connection.response().await.context("asking the sink")?;
        ensure!(response.status == 200, "the sink refused {call}");
        Ok(response.body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::event_mark::EventMark;

    fn body(run: u32, seqs: &[u64]) -> Vec<u8> {
        let mut out = Vec::new();
        for seq in seqs {
            let published = now_nanos();
            EventMark {
                run,
                seq: *seq,
                published,
            }
            .write(&mut out);
        }
        out
    }

    #[test]
    fn an_event_counts_once_at_each_endpoint() {
        let mut sink = SinkState::new(7);
        assert!(sink.take("/hook/0", &body(7, &[0, 1, 2, 100])));
        assert!(sink.take("/hook/1", &body(7, &[0, 1])));
        assert!(sink.take("/hook/1", &body(7, &[1, 2])));
        let stats = sink.stats();
        assert_eq!(stats.delivered, 7);
        assert_eq!(stats.duplicates, 1);
        assert_eq!(stats.requests, 3);
        assert_eq!(stats.per_endpoint, [4, 3]);
        assert_eq!(stats.per_second.iter().sum::<u64>(), 7);
    }

    #[test]
    fn what_belongs_to_no_run_is_foreign() {
        let mut sink = SinkState::new(7);
        assert!(sink.take("/hook/0", &body(8, &[0, 1])));
        assert!(sink.take("/hook/0", &body(7, &[SEQ_MAX])));
        assert!(!sink.take("/hook/0", b"[]"));
        assert!(!sink.take("/hook/64", &body(7, &[0])));
        assert!(!sink.take("/elsewhere", b""));
        assert_eq!(sink.stats().foreign, 6);
        assert_eq!(sink.stats().delivered, 0);
    }

    #[test]
    fn a_new_run_starts_from_nothing() {
        let mut sink = SinkState::new(7);
        sink.take("/hook/0", &body(7, &[0]));
        assert_eq!(sink.control("count").unwrap(), "1");
        sink.control("run/00000008").unwrap();
        assert_eq!(sink.control("count").unwrap(), "0");
        sink.take("/hook/0", &body(8, &[0]));
        assert_eq!(sink.control("count").unwrap(), "1");
        assert!(sink.control("run/xyz").is_err());
        assert!(sink.control("nonsense").is_err());
    }
}
