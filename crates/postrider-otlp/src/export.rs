//! Sending: in batches, again for a while when the collector is away, then no more.

use crate::message::{ExportTraceServiceResponse, Span};
use crate::{Form, Item, Protocol};
use http::header::RETRY_AFTER;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::deliver::{Reply, Transport};
use postrider_engine::recorder::SpanCounts;
use prost::Message;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Spans in one request.
pub const BATCH_MAX: usize = 512;
/// So long a request waits to be filled.
const GATHER: Duration = Duration::from_millis(500);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The waits between tries; the last repeats.
const WAITS: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
];
/// Spans that could not be sent for so long are dropped: newer ones say more.
pub const TRY_FOR: Duration = Duration::from_secs(30);
/// So long what waits may hold up the end.
pub const FLUSH_MAX: Duration = Duration::from_secs(3);

/// What a collector's answer means.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has them, but for so many.
    Taken { rejected: u64, why: String },
    /// It may take them later, not before this wait if one is named.
    Later(Option<Duration>, String),
    /// It will never take them.
    Never(String),
}

/// By the rules of OTLP/HTTP.
pub fn judge(reply: &Reply, protocol: Protocol) -> Verdict {
    let answer = match reply {
        Reply::Failed(failure) => return Verdict::Later(None, failure.detail.clone()),
        Reply::Answered(answer) => answer,
    };
    let why = format!("the collector answered {}", answer.status);
    match answer.status {
        200..=299 => {
            // What cannot be read says nothing against the spans.
            let read = match protocol {
                Protocol::HttpProtobuf => ExportTraceServiceResponse::decode(answer.body.clone()).ok(),
                Protocol::HttpJson => serde_json::from_slice(&answer.body).ok(),
            };
            let partial = read.and_then(|read| read.partial_success).unwrap_or_default();
            Verdict::Taken {
                rejected: u64::try_from(partial.rejected_spans).unwrap_or(0),
                why: partial.error_message.chars().take(256).collect(),
            }
        }
        429 | 502 | 503 | 504 => {
            let wait = answer
                .headers
                .get(RETRY_AFTER)
                .and_then(|wait| wait.to_str().ok());
            let wait = wait.and_then(|wait| wait.trim().parse().ok());
            Verdict::Later(wait.map(Duration::from_secs), why)
        }
        _ => Verdict::Never(why),
    }
}

pub struct Export {
    pub transport: Arc<dyn Transport>,
    pub wall: Arc<dyn Clock>,
    pub form: Form,
    pub counts: Arc<SpanCounts>,
    pub stop: CancellationToken,
    /// When to give up; set before `stop`.
    pub end: Arc<OnceLock<Timestamp>>,
    /// The last spans were not taken. What is said in the log is said when that changes.
    pub failing: bool,
}

impl Export {
    /// Until it is stopped, and then for a bounded time.
    pub async fn run(mut self, mut waiting: mpsc::Receiver<Item>) {
        let mut items = Vec::with_capacity(BATCH_MAX);
        while !self.stop.is_cancelled() {
            self.gather(&mut waiting, &mut items).await;
            let spans = items.drain(..).filter_map(|item| item.span()).collect();
            self.export(spans).await;
        }
        waiting.close();
        loop {
            while items.len() < BATCH_MAX
                && let Ok(item) = waiting.try_recv()
            {
                items.push(item);
            }
            if items.is_empty() {
                return;
            }
            let spans = items.drain(..).filter_map(|item| item.span()).collect();
            self.export(spans).await;
        }
    }

    /// Waits for something to send, then a little more for company.
    async fn gather(&self, waiting: &mut mpsc::Receiver<Item>, items: &mut Vec<Item>) {
        let mut until = None;
        while items.len() < BATCH_MAX {
            let room = BATCH_MAX - items.len();
            let company = async {
                match until {
                    None => std::future::pending().await,
                    Some(at) => self.wall.sleep_until(at).await,
                }
            };
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = company => return,
                _ = waiting.recv_many(items, room) => {}
            }
            until.get_or_insert(self.wall.now() + GATHER);
        }
    }

    /// Sends one batch, or counts it as dropped.
    async fn export(&mut self, spans: Vec<Span>) {
        if spans.is_empty() {
            return;
        }
        let count = spans.len() as u64;
        let request = self.form.request(spans);
        let began = self.wall.now();
        let mut waits = WAITS.into_iter().chain(std::iter::repeat(WAITS[WAITS.len() - 1]));
        let why = loop {
            let now = self.wall.now();
            let stopping = self.stopping();
            if stopping.is_some_and(|deadline| deadline <= now) {
                break "the server is being stopped".to_owned();
            }
            let timeout = (now + ANSWER_TIMEOUT).min(stopping.unwrap_or(Timestamp::MAX));
            let verdict = tokio::select! {
                biased;
                reply = self.transport.clone().send(request.clone()) => judge(&reply, self.form.protocol),
                () = self.patience(timeout) => Verdict::Later(None, "no answer in time".to_owned()),
            };
            let (asked, why) = match verdict {
                Verdict::Taken { rejected, why } => {
                    self.taken(count, rejected.min(count), &why);
                    return;
                }
                Verdict::Never(why) => break why,
                Verdict::Later(asked, why) => (asked, why),
            };
            let wait = waits.next().expect("it repeats").max(asked.unwrap_or_default());
            let again = self.wall.now() + wait;
            if stopping.is_some() || again.since(began) > TRY_FOR {
                break why;
            }
            self.fails(&why, "trying again");
            tokio::select! {
                biased;
                // It is tried once more at once.
                () = self.stop.cancelled() => {}
                () = self.wall.sleep_until(again) => {}
            }
        };
        self.dropped(count, &why);
    }

    /// When to give up, if it is being stopped.
    fn stopping(&self) -> Option<Timestamp> {
        let stopped = self.stop.is_cancelled();
        stopped.then(|| *self.end.get().expect("set before it is stopped"))
    }

    /// Until then, or for as long as an end can be put off.
    async fn patience(&self, timeout: Timestamp) {
        let end = async {
            self.stop.cancelled().await;
            if let Some(end) = self.stopping() {
                self.wall.sleep_until(end).await;
            }
        };
        tokio::select! {
            () = self.wall.sleep_until(timeout) => {}
            () = end => {}
        }
    }

    fn taken(&mut self, count: u64, rejected: u64, why: &str) {
        self.counts.exported.fetch_add(count - rejected, Relaxed);
        if rejected > 0 {
            self.dropped(rejected, why);
        } else if self.failing {
            self.failing = false;
            tracing::info!(url = %bare(&self.form.url), "traces are exported again");
        }
    }

    fn dropped(&mut self, count: u64, why: &str) {
        self.counts.dropped.fetch_add(count, Relaxed);
        self.fails(why, "spans are dropped");
    }

    fn fails(&mut self, why: &str, what: &str) {
        if !self.failing {
            self.failing = true;
            tracing::warn!(url = %bare(&self.form.url), reason = %why, "traces cannot be exported: {what}");
        }
    }
}

/// Without a query, which may hold a key.
fn bare(url: &http::Uri) -> String {
    let scheme = url.scheme_str().unwrap_or_default();
    let authority = url.authority().map_or("", |authority| authority.as_str());
    format!("{scheme}://{authority}{}", url.path())
}
