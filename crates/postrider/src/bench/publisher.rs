//! `bench-publish`: publishes marked events over kept-alive connections, waits until the sink has
//! them, and prints one JSON line about it. Without a rate every connection publishes again as soon
//! as it is answered, unless too many deliveries are outstanding: the highest rate that can be
//! sustained end to end. With a rate the connections keep to a schedule, and the latency of an
//! event that was sent late counts from when it was due, so that a server that stalls does not look
//! fast.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::event_mark::{EventMark, now_nanos};
use super::http::BenchConnection;
use super::sink::{LatencyPercentiles, SinkControl};
use super::{child, latency_histogram, pause, single_threaded};

const COUNT_EVERY: Duration = Duration::from_millis(5);
const ERROR_PAUSE: Duration = Duration::from_millis(20);
/// Draining ends after this long without a delivery, and after `DRAIN_MAX` in any case.
const DRAIN_IDLE_MAX: Duration = Duration::from_secs(5);
const DRAIN_MAX: Duration = Duration::from_secs(60);

#[derive(clap::Args, Clone, Debug)]
pub struct PublishArgs {
    /// Addresses of the servers; the connections are shared out among them.
    #[arg(long, required = true, num_args = 1.., value_delimiter = ',')]
    pub to: Vec<SocketAddr>,
    /// Path and query to publish to.
    #[arg(long)]
    pub path: String,
    /// Topic key.
    #[arg(long)]
    pub key: String,
    /// Address of the sink.
    #[arg(long)]
    pub sink: SocketAddr,
    /// Number of this run, carried by every event.
    #[arg(long)]
    pub run: u32,
    /// First segment of the subject of every event.
    #[arg(long, default_value = "bench")]
    pub subject: String,
    #[arg(long, default_value_t = 64)]
    pub conns: u32,
    /// Events per request.
    #[arg(long, default_value_t = 1)]
    pub events: u64,
    /// Bytes per event.
    #[arg(long, default_value_t = 1024)]
    pub size: usize,
    /// Deliveries expected of each event.
    #[arg(long, default_value_t = 1)]
    pub fan_out: u64,
    /// Seconds to publish for.
    #[arg(long)]
    pub secs: f64,
    /// Most events to publish.
    #[arg(long, default_value_t = u64::MAX)]
    pub count: u64,
    /// Events per second over all connections; without it, as fast as can be sustained.
    #[arg(long)]
    pub rate: Option<f64>,
    /// Without a rate: publish nothing while more deliveries than this are outstanding.
    #[arg(long, default_value_t = 10_000)]
    pub outstanding: u64,
}

impl PublishArgs {
    /// As given on the command line of `bench-publish`.
    pub(super) fn to_options(&self) -> Vec<String> {
        let PublishArgs {
            to,
            path,
            key,
            sink,
            run,
            subject,
            ..
        } = self;
        let PublishArgs {
            conns,
            events,
            size,
            fan_out,
            secs,
            count,
            outstanding,
            ..
        } = self;
        let to: Vec<String> = to.iter().map(SocketAddr::to_string).collect();
        let mut options = vec![
            format!("--to={}", to.join(",")),
            format!("--path={path}"),
            format!("--key={key}"),
            format!("--sink={sink}"),
            format!("--run={run}"),
            format!("--subject={subject}"),
            format!("--conns={conns}"),
            format!("--events={events}"),
            format!("--size={size}"),
            format!("--fan-out={fan_out}"),
            format!("--secs={secs}"),
            format!("--count={count}"),
            format!("--outstanding={outstanding}"),
        ];
        options.extend(self.rate.map(|rate| format!("--rate={rate}")));
        options
    }
}

/// Result of publishing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PublishingResult {
    /// Events answered with success.
    pub events: u64,
    pub failed: u64,
    pub error_first: Option<String>,
    /// Seconds spent publishing.
    pub secs: f64,
    /// Deliveries that had arrived when publishing ended: the sustained rate, without the drain.
    pub delivered_meanwhile: u64,
    /// Time from request to answer, in milliseconds.
    pub ack_ms: LatencyPercentiles,
}

pub fn run(args: PublishArgs) -> Result<()> {
    child::exit_with_parent();
    let published = single_threaded()?.block_on(LocalSet::new().run_until(publish(args)))?;
    println!("{}", serde_json::to_string(&published)?);
    Ok(())
}

/// Publishes, then waits until everything has arrived or nothing more does. Needs a `LocalSet`.
pub(super) async fn publish(args: PublishArgs) -> Result<PublishingResult> {
    let (count, delivered) = watch::channel(0);
    let publisher = Rc::new(LoadPublisher::new(args, delivered));
    let mut counter = JoinSet::new();
    counter.spawn_local(follow(SinkControl::open(publisher.args.sink).await?, count));

    let mut connections = JoinSet::new();
    for index in 0..publisher.args.conns {
        connections.spawn_local(publisher.clone().publish(index));
    }
    while let Some(ended) = connections.join_next().await {
        ended.context("a publishing task panicked")?;
    }
    counter.abort_all();
    let secs = publisher.started.elapsed().as_secs_f64();
    let mut sink = SinkControl::open(publisher.args.sink).await?;
    let delivered_meanwhile = sink.count().await?;
    drain(&mut sink, publisher.acked.get() * publisher.args.fan_out).await?;

    let ack_ms = LatencyPercentiles::of(&publisher.ack.borrow());
    Ok(PublishingResult {
        events: publisher.acked.get(),
        failed: publisher.failed.get(),
        error_first: publisher.error_first.take(),
        secs,
        delivered_meanwhile,
        ack_ms,
    })
}

/// Keeps `count` at the number of deliveries that the sink has counted.
async fn follow(mut sink: SinkControl, count: watch::Sender<u64>) -> Result<()> {
    loop {
        count.send_replace(sink.count().await?);
        pause(COUNT_EVERY).await;
    }
}

async fn drain(sink: &mut SinkControl, expected: u64) -> Result<()> {
    let started = Instant::now();
    let (mut seen, mut moved) = (0, started);
    loop {
        let now = sink.count().await?;
        if now != seen {
            (seen, moved) = (now, Instant::now());
        }
        if seen >= expected || moved.elapsed() > DRAIN_IDLE_MAX || started.elapsed() > DRAIN_MAX {
            return Ok(());
        }
        pause(COUNT_EVERY).await;
    }
}

/// State that the connections share.
struct LoadPublisher {
    args: PublishArgs,
    /// Head of the publish request, by server.
    heads: Vec<String>,
    padding: Vec<u8>,
    started: Instant,
    started_nanos: u64,
    delivered: watch::Receiver<u64>,
    seq_next: Cell<u64>,
    acked: Cell<u64>,
    failed: Cell<u64>,
    error_first: RefCell<Option<String>>,
    ack: RefCell<Histogram<u64>>,
}

impl LoadPublisher {
    fn new(args: PublishArgs, delivered: watch::Receiver<u64>) -> LoadPublisher {
        let head = |to: &SocketAddr| {
            format!(
                "POST {} HTTP/1.1\r\nhost: {to}\r\naeg-sas-key: {}\r\n\
                 content-type: application/json; charset=utf-8\r\ncontent-length: ",
                args.path, args.key
            )
        };
        LoadPublisher {
            heads: args.to.iter().map(head).collect(),
            padding: padding(args.size),
            started: Instant::now(),
            started_nanos: now_nanos(),
            delivered,
            seq_next: Cell::new(0),
            acked: Cell::new(0),
            failed: Cell::new(0),
            error_first: RefCell::new(None),
            ack: RefCell::new(latency_histogram()),
            args,
        }
    }

    /// Runs one connection: wait for the turn, send, read the answer, until the time or the events
    /// are used up.
    async fn publish(self: Rc<Self>, index: u32) {
        let mut delivered = self.delivered.clone();
        let mut connection = None;
        let server = index as usize % self.args.to.len();
        let (to, head) = (self.args.to[server], &self.heads[server]);
        let (mut body, mut out) = (Vec::new(), Vec::new());
        for turn in 0.. {
            let Some(published) = self.turn(index, turn, &mut delivered).await else {
                return;
            };
            let first = self.seq_next.get();
            let end = first.saturating_add(self.args.events).min(self.args.count);
            if first >= end {
                return;
            }
            self.seq_next.set(end);
            let marks = (first..end).map(|seq| EventMark {
                run: self.args.run,
                seq,
                published,
            });
            self.write_body(marks, &mut body);
            out.clear();
            write!(out, "{head}{}\r\n\r\n", body.len()).expect("writing to a Vec");
            out.extend_from_slice(&body);

            let sent = Instant::now();
            match send(&mut connection, to, &out).await {
                Ok(()) => {
                    self.acked.set(self.acked.get() + (end - first));
                    let micros = sent.elapsed().as_micros() as u64;
                    self.ack.borrow_mut().saturating_record(micros);
                }
                Err(error) => {
                    connection = None;
                    self.failed.set(self.failed.get() + (end - first));
                    self.error_first
                        .borrow_mut()
                        .get_or_insert_with(|| format!("{error:#}"));
                    pause(ERROR_PAUSE).await;
                }
            }
        }
    }

    /// Waits until this connection may publish. Returns the time its latency counts from; `None`
    /// when the time is up.
    async fn turn(&self, index: u32, turn: u64, delivered: &mut watch::Receiver<u64>) -> Option<u64> {
        let end = self.started + Duration::from_secs_f64(self.args.secs);
        if let Some(rate) = self.args.rate {
            let due = due(rate / self.args.events as f64, self.args.conns, index, turn);
            let at = self.started + due;
            if at >= end {
                return None;
            }
            if at <= Instant::now() {
                return Some(self.started_nanos + due.as_nanos() as u64);
            }
            // Timers fire up to a millisecond late. That is the bench's delay, not the server's.
            sleep_until(at).await;
        } else {
            let has_room = |delivered: &u64| {
                let expected = self.acked.get() * self.args.fan_out;
                expected.saturating_sub(*delivered) <= self.args.outstanding
            };
            // The count stops only when the sink has ended, which shows as missing deliveries.
            timeout_at(end, delivered.wait_for(has_room)).await.ok()?.ok()?;
        }
        (Instant::now() < end).then(now_nanos)
    }

    fn write_body(&self, marks: impl Iterator<Item = EventMark>, out: &mut Vec<u8>) {
        out.clear();
        for mark in marks {
            out.push(if out.is_empty() { b'[' } else { b',' });
            write_event(mark, &self.args.subject, self.args.size, &self.padding, out);
        }
        out.push(b']');
    }
}

/// When turn `turn` of connection `index` is due, so that all connections together send
/// `requests_per_s` evenly.
fn due(requests_per_s: f64, conns: u32, index: u32, turn: u64) -> Duration {
    let before = turn as f64 * f64::from(conns) + f64::from(index);
    Duration::from_secs_f64(before / requests_per_s)
}

async fn send(open: &mut Option<BenchConnection>, to: SocketAddr, request: &[u8]) -> Result<()> {
    let connection = match open {
        Some(connection) => connection,
        None => open.insert(BenchConnection::open(to).await?),
    };
    connection.send(request).await?;
    let response = connection.response().await?;
    if !(200..300).contains(&response.status) {
        let body = String::from_utf8_lossy(&response.body);
        let body: String = body.chars().take(500).collect();
        bail!("{} {body}", response.status);
    }
    Ok(())
}

/// An event in the Event Grid schema, padded to `size` bytes if it is shorter.
fn write_event(mark: EventMark, subject: &str, size: usize, padding: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    let EventMark { run, seq, .. } = mark;
    write!(
        out,
        "{{\"id\":\"{run:08x}-{seq}\",\"eventType\":\"bench.event\",\"subject\":\"{subject}/{seq}\",\
         \"eventTime\":\"2026-01-01T00:00:00Z\",\"dataVersion\":\"1.0\",\"data\":{{\"mark\":\""
    )
    .expect("writing to a Vec");
    mark.write(out);
    out.extend_from_slice(b"\",\"padding\":\"");
    let end = b"\"}}";
    let missing = size.saturating_sub(out.len() - start + end.len());
    // Each event gets another part of the padding, so that no two compress to one.
    let from = seq as usize % (padding.len() - missing + 1);
    out.extend_from_slice(&padding[from..from + missing]);
    out.extend_from_slice(end);
}

/// Text without pattern, long enough for events of `size` bytes.
pub(super) fn padding(size: usize) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut letter = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ALPHABET[(state >> 58) as usize]
    };
    (0..size + 64 * 1024).map(|_| letter()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::event_mark;

    #[test]
    fn events_are_json_of_the_asked_size() {
        let padding = padding(4096);
        for (seq, size) in [(0, 1024), (7, 1024), (123_456, 4096), (1 << 40, 400)] {
            let mark = EventMark {
                run: 1,
                seq,
                published: 42,
            };
            let mut out = Vec::new();
            write_event(mark, "bench", size, &padding, &mut out);
            assert_eq!(out.len(), size);
            let event: serde_json::Value = serde_json::from_slice(&out).unwrap();
            assert_eq!(event["subject"], format!("bench/{seq}"));
            assert_eq!(event_mark::scan(&out).collect::<Vec<_>>(), [mark]);
        }
    }

    #[test]
    fn an_event_too_small_for_its_mark_is_as_small_as_can_be() {
        let mut out = Vec::new();
        let mark = EventMark {
            run: 1,
            seq: 2,
            published: 3,
        };
        write_event(mark, "bench", 10, &padding(10), &mut out);
        let event: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(event["data"]["padding"], "");
    }

    #[test]
    fn turns_are_spread_evenly_over_the_connections() {
        let millis = |index, turn| due(1000.0, 4, index, turn).as_millis();
        assert_eq!([0, 1, 2, 3].map(|index| millis(index, 0)), [0, 1, 2, 3]);
        assert_eq!([0, 1, 2, 3].map(|index| millis(index, 5)), [20, 21, 22, 23]);
    }
}
