//! The exporting task: sends spans in batches, retries for a while when the collector is
//! unreachable, and drops what is left.

use crate::message::{ExportTraceServiceResponse, Span};
use crate::{ExportRequestForm, OtlpEncoding, QueuedSpan};
use http::header::RETRY_AFTER;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::deliver::{DeliveryReply, DeliveryTransport};
use postrider_engine::recorder::SpanCounts;
use prost::Message;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// The most spans in one request.
pub const BATCH_MAX: usize = 512;
/// How long a request waits for more spans.
const GATHER: Duration = Duration::from_millis(500);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Waits between retries; the last one repeats.
const WAITS: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
];
/// Spans that could not be sent for this long are dropped: newer ones are more useful.
pub const TRY_FOR: Duration = Duration::from_secs(30);
/// How long waiting spans may delay the end.
pub const FLUSH_MAX: Duration = Duration::from_secs(3);

/// The meaning of a collector's answer.
#[derive(Debug, PartialEq, Eq)]
pub enum ExportVerdict {
    /// The collector has accepted the spans, except for the rejected ones.
    Taken { rejected: u64, why: String },
    /// The collector may accept the spans later, not before this wait if one is given.
    Later(Option<Duration>, String),
    /// The collector will never accept the spans.
    Never(String),
}

/// Judges an answer by the rules of OTLP/HTTP.
pub fn judge(reply: &DeliveryReply, protocol: OtlpEncoding) -> ExportVerdict {
    let answer = match reply {
        DeliveryReply::Failed(failure) => return ExportVerdict::Later(None, failure.detail.clone()),
        DeliveryReply::Answered(answer) => answer,
    };
    let why = format!("the collector answered {}", answer.status);
    match answer.status {
        200..=299 => {
            // An unreadable body after a success says nothing against the spans.
            let read = match protocol {
                OtlpEncoding::HttpProtobuf => ExportTraceServiceResponse::decode(answer.body.clone()).ok(),
                OtlpEncoding::HttpJson => serde_json::from_slice(&answer.body).ok(),
            };
            let partial = read.and_then(|read| read.partial_success).unwrap_or_default();
            ExportVerdict::Taken {
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
            ExportVerdict::Later(wait.map(Duration::from_secs), why)
        }
        _ => ExportVerdict::Never(why),
    }
}

pub struct ExportTask {
    pub transport: Arc<dyn DeliveryTransport>,
    pub wall: Arc<dyn Clock>,
    pub form: ExportRequestForm,
    pub counts: Arc<SpanCounts>,
    pub stop: CancellationToken,
    /// When to give up; set before `stop`.
    pub end: Arc<OnceLock<Timestamp>>,
    /// The last spans were not taken. What is said in the log is said when that changes.
    pub failing: bool,
}

impl ExportTask {
    /// Runs until the exporter is stopped, and then for a bounded time.
    pub async fn run(mut self, mut waiting: mpsc::Receiver<QueuedSpan>) {
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

    /// Waits for a first span, then a little longer for more.
    async fn gather(&self, waiting: &mut mpsc::Receiver<QueuedSpan>, items: &mut Vec<QueuedSpan>) {
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
                () = self.patience(timeout) => ExportVerdict::Later(None, "no answer in time".to_owned()),
            };
            let (asked, why) = match verdict {
                ExportVerdict::Taken { rejected, why } => {
                    self.taken(count, rejected.min(count), &why);
                    return;
                }
                ExportVerdict::Never(why) => break why,
                ExportVerdict::Later(asked, why) => (asked, why),
            };
            let wait = waits.next().expect("it repeats").max(asked.unwrap_or_default());
            let again = self.wall.now() + wait;
            if stopping.is_some() || again.since(began) > TRY_FOR {
                break why;
            }
            self.fails(&why, "trying again");
            tokio::select! {
                biased;
                // A stop allows one more immediate retry.
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

    /// Waits until this time, or for as long as the end may be delayed.
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

/// The URL without its query, which may hold a key.
fn bare(url: &http::Uri) -> String {
    let scheme = url.scheme_str().unwrap_or_default();
    let authority = url.authority().map_or("", |authority| authority.as_str());
    format!("{scheme}://{authority}{}", url.path())
}
