//! `bench-relay`: the least that any durable relay must do, as a limit to compare with.
//!
//! Accepts a POST, appends its body to a file, answers 200 after an `fdatasync` shared by all that
//! wait, and forwards every event over kept-alive connections. No routing, keys, filters, retry
//! schedule, dead letters or recovery, so it is a floor for CPU and memory and a ceiling for the
//! rate.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use memchr::memchr2;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::{JoinSet, LocalSet};

use super::http::{self, BenchConnection};
use super::{child, pause, single_threaded};

const RECORDS_PER_COMMIT_MAX: usize = 500;
const COMMITS_WAITING_MAX: usize = 64;
const DELIVERIES_OUTSTANDING_MAX: usize = 20_000;
const REFUSED_PAUSE: Duration = Duration::from_millis(50);

#[derive(clap::Args, Debug)]
pub struct RelayArgs {
    /// Address to listen on; port 0 picks one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// Address of the sink.
    #[arg(long)]
    sink: SocketAddr,
    /// How many of the sink's endpoints get every event.
    #[arg(long, default_value_t = 1)]
    fan_out: usize,
    /// Log file; replaced if it exists.
    #[arg(long)]
    log: PathBuf,
    /// Connections to each endpoint.
    #[arg(long, default_value_t = 32)]
    conns: usize,
    /// Most events in a delivery request.
    #[arg(long, default_value_t = 1)]
    batch: usize,
}

/// Relays until the process is killed or its standard input ends.
pub fn run(args: RelayArgs) -> Result<()> {
    child::exit_with_parent();
    single_threaded()?.block_on(LocalSet::new().run_until(async {
        let listener = TcpListener::bind(&args.listen).await?;
        child::announce(listener.local_addr()?);
        serve(listener, args).await
    }))
}

/// Serves until the log or the listener fails. Needs a `LocalSet`: one thread for the network, and
/// another for the log.
pub(super) async fn serve(listener: TcpListener, args: RelayArgs) -> Result<()> {
    let log = File::create(&args.log);
    let log = log.with_context(|| format!("creating {}", args.log.display()))?;
    let (records, to_write) = mpsc::channel(RECORDS_PER_COMMIT_MAX);
    let (commits, committed) = mpsc::channel(COMMITS_WAITING_MAX);
    let delivered = Arc::new(AtomicU64::new(0));
    let progress = delivered.clone();
    let mut parts = JoinSet::new();
    parts.spawn_blocking(move || write_log(log, to_write, commits, &progress));
    parts.spawn_local(acknowledge(committed));

    let relay = Rc::new(BaselineRelay {
        records,
        endpoints: (0..args.fan_out)
            .map(|index| RelayEndpoint::new(args.sink, index))
            .collect(),
        batch_max: args.batch,
        room: Semaphore::new(DELIVERIES_OUTSTANDING_MAX),
        delivered,
    });
    for index in 0..args.fan_out {
        for _ in 0..args.conns {
            parts.spawn_local(forward(relay.clone(), index));
        }
    }
    let mut publishers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let connection = BenchConnection::new(accepted?.0)?;
                publishers.spawn_local(accept(relay.clone(), connection));
            }
            // A publisher that disconnected counts its events as failed.
            Some(_) = publishers.join_next() => {}
            Some(ended) = parts.join_next() => return ended.expect("a part of the relay panicked"),
        }
    }
}

struct BaselineRelay {
    records: mpsc::Sender<RelayRecord>,
    endpoints: Vec<RelayEndpoint>,
    batch_max: usize,
    room: Semaphore,
    delivered: Arc<AtomicU64>,
}

/// Body of a publish request, and the channel to signal once it is durable.
struct RelayRecord {
    body: Bytes,
    durable: oneshot::Sender<()>,
}

/// Serves one publisher: body → log → queue of every endpoint → 200.
async fn accept(relay: Rc<BaselineRelay>, mut publisher: BenchConnection) -> Result<()> {
    while let Some(request) = publisher.request().await? {
        let events = split(&request.body);
        let deliveries = events.len() * relay.endpoints.len();
        ensure!(
            deliveries <= DELIVERIES_OUTSTANDING_MAX,
            "too many events at once"
        );
        relay.room.acquire_many(deliveries as u32).await?.forget();
        let (durable, on_disk) = oneshot::channel();
        let record = RelayRecord {
            body: request.body,
            durable,
        };
        relay
            .records
            .send(record)
            .await
            .ok()
            .context("the log has failed")?;
        on_disk.await?;
        for endpoint in &relay.endpoints {
            endpoint.push(&events, relay.batch_max);
        }
        publisher.send(http::OK).await?;
    }
    Ok(())
}

/// Writes all waiting records at once, makes them durable with one `fdatasync` and hands the commit
/// over as a whole: one wake-up of the other thread per commit, not one per request.
fn write_log(
    mut log: File,
    mut records: mpsc::Receiver<RelayRecord>,
    commits: mpsc::Sender<Vec<RelayRecord>>,
    delivered: &AtomicU64,
) -> Result<()> {
    loop {
        let mut commit = Vec::new();
        if records.blocking_recv_many(&mut commit, RECORDS_PER_COMMIT_MAX) == 0 {
            return Ok(());
        }
        // The delivery progress is written along with the next commit.
        let progress = delivered.load(Relaxed).to_le_bytes();
        let length = |record: &RelayRecord| (record.body.len() as u64).to_le_bytes();
        let lengths: Vec<[u8; 8]> = commit.iter().map(length).collect();
        let mut slices = vec![IoSlice::new(&progress)];
        for (record, length) in commit.iter().zip(&lengths) {
            slices.push(IoSlice::new(length));
            slices.push(IoSlice::new(&record.body));
        }
        let mut unwritten = slices.as_mut_slice();
        while !unwritten.is_empty() {
            let written = log.write_vectored(unwritten)?;
            ensure!(written > 0, "the log takes no more");
            IoSlice::advance_slices(&mut unwritten, written);
        }
        log.sync_data()?;
        if commits.blocking_send(commit).is_err() {
            return Ok(());
        }
    }
}

async fn acknowledge(mut commits: mpsc::Receiver<Vec<RelayRecord>>) -> Result<()> {
    while let Some(commit) = commits.recv().await {
        for record in commit {
            // A publisher that has disconnected needs no answer.
            let _ = record.durable.send(());
        }
    }
    Ok(())
}

/// A webhook and the events that wait for it.
struct RelayEndpoint {
    address: SocketAddr,
    head: String,
    waiting: RefCell<VecDeque<Bytes>>,
    more: Notify,
    idle: Cell<usize>,
}

impl RelayEndpoint {
    fn new(address: SocketAddr, index: usize) -> RelayEndpoint {
        let head = format!(
            "POST /hook/{index} HTTP/1.1\r\nhost: {address}\r\n\
             content-type: application/json; charset=utf-8\r\n\
             aeg-event-type: Notification\r\ncontent-length: "
        );
        let waiting = RefCell::new(VecDeque::new());
        let (more, idle) = (Notify::new(), Cell::new(0));
        RelayEndpoint {
            address,
            head,
            waiting,
            more,
            idle,
        }
    }

    fn push(&self, events: &[Bytes], batch_max: usize) {
        self.waiting.borrow_mut().extend(events.iter().cloned());
        for _ in 0..events.len().div_ceil(batch_max).min(self.idle.get()) {
            self.more.notify_one();
        }
    }

    /// Waits for events and takes as many as a request may carry.
    async fn take(&self, batch_max: usize, into: &mut Vec<Bytes>) {
        while self.waiting.borrow().is_empty() {
            self.idle.set(self.idle.get() + 1);
            self.more.notified().await;
            self.idle.set(self.idle.get() - 1);
        }
        let mut waiting = self.waiting.borrow_mut();
        let count = waiting.len().min(batch_max);
        into.extend(waiting.drain(..count));
    }
}

/// Runs one connection to a webhook: take, send, read the answer. Retries until the events have
/// arrived.
async fn forward(relay: Rc<BaselineRelay>, index: usize) -> Result<()> {
    let endpoint = &relay.endpoints[index];
    let mut connection = None;
    let (mut events, mut out) = (Vec::new(), Vec::new());
    loop {
        endpoint.take(relay.batch_max, &mut events).await;
        write_delivery(&endpoint.head, &events, &mut out);
        while !deliver(&mut connection, endpoint.address, &out)
            .await
            .unwrap_or(false)
        {
            connection = None;
            pause(REFUSED_PAUSE).await;
        }
        relay.room.add_permits(events.len());
        relay.delivered.fetch_add(events.len() as u64, Relaxed);
        events.clear();
    }
}

fn write_delivery(head: &str, events: &[Bytes], out: &mut Vec<u8>) {
    out.clear();
    let brackets_and_commas = events.len() + 1;
    let length = events.iter().map(Bytes::len).sum::<usize>() + brackets_and_commas;
    write!(out, "{head}{length}\r\n\r\n").expect("writing to a Vec");
    for (index, event) in events.iter().enumerate() {
        out.push(if index == 0 { b'[' } else { b',' });
        out.extend_from_slice(event);
    }
    out.push(b']');
}

async fn deliver(open: &mut Option<BenchConnection>, to: SocketAddr, request: &[u8]) -> Result<bool> {
    let connection = match open {
        Some(connection) => connection,
        None => open.insert(BenchConnection::open(to).await?),
    };
    connection.send(request).await?;
    let response = connection.response().await?;
    Ok((200..300).contains(&response.status))
}

/// The objects of a JSON array, or the single object. Trusts the body to be JSON.
fn split(body: &Bytes) -> Vec<Bytes> {
    let mut events = Vec::new();
    let (mut depth, mut start, mut at) = (0, 0, 0);
    while at < body.len() {
        match body[at] {
            b'{' => {
                if depth == 0 {
                    start = at;
                }
                depth += 1;
            }
            b'}' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    events.push(body.slice(start..=at));
                }
            }
            b'"' => at = closing_quote(body, at + 1),
            _ => {}
        }
        at += 1;
    }
    events
}

/// Position of the quote that ends the string which begins at `at`.
fn closing_quote(body: &[u8], mut at: usize) -> usize {
    while let Some(found) = body.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        at += found;
        if body[at] == b'"' {
            return at;
        }
        at += 2;
    }
    body.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_split_at_their_own_braces() {
        let check = |body: &'static str, expected: &[&str]| {
            assert_eq!(split(&Bytes::from_static(body.as_bytes())), expected);
        };
        check(
            r#"[{"a":"}]\"{"},{"b":{"c":[1,{}]}} , {}]"#,
            &[r#"{"a":"}]\"{"}"#, r#"{"b":{"c":[1,{}]}}"#, "{}"],
        );
        check(r#"{"x":1}"#, &[r#"{"x":1}"#]);
        check("[]", &[]);
        check("", &[]);
        check(r#"}{"unclosed":"#, &[]);
        check(r#"[{"ends in a backslash \"#, &[]);
    }

    #[test]
    fn a_delivery_is_an_array_of_the_stated_length() {
        let mut out = Vec::new();
        let events = [Bytes::from_static(b"{}"), Bytes::from_static(b"{\"a\":1}")];
        write_delivery("length: ", &events, &mut out);
        assert_eq!(out, b"length: 12\r\n\r\n[{},{\"a\":1}]");
    }
}
