//! Traces for OpenTelemetry: a span per publish request and one per attempt, sent to a collector
//! over OTLP/HTTP.
//!
//! The event path only pushes items into a bounded queue; one task turns them into spans and sends
//! them. A collector that is slow or unreachable costs spans, which are counted, and nothing else.

mod export;
mod message;
mod span;

use export::ExportTask;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use http::{Method, Uri};
use message::{KeyValue, Resource, Span};
use postrider_core::ids::{Position, Secret};
use postrider_core::time::{Clock, Timestamp};
use postrider_core::trace::{CarriedContext, GatheredContexts, SpanStanding, TraceIds, TraceShare};
use postrider_engine::attempt::trace::{IDS_MAX, event_id};
use postrider_engine::deliver::{DeliveryRequest, DeliveryTransport};
use postrider_engine::recorder::{
    AcceptedRequest, AttemptedRequest, BlobWritten, EndedDeliveries, EventRecorder, HeldEndpoint,
    ReleasedEndpoint, ReplayedDeadLetters, RetiredSubscription, SpanCounts,
};
use prost::Message;
use span::PublishSpan;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The most items that wait to be sent. Beyond it they are dropped and counted.
pub const WAITING_MAX: usize = 16_384;

/// The encoding of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpEncoding {
    HttpProtobuf,
    HttpJson,
}

pub struct Config {
    /// The full URL for requests.
    pub url: Uri,
    pub protocol: OtlpEncoding,
    /// Sent with every request.
    pub headers: Vec<(HeaderName, Secret)>,
    pub service_name: String,
    pub service_version: &'static str,
    /// The log's random identity, from which ids are derived.
    pub log: u64,
    /// A random number that makes this process's spans of unstored events differ from those of
    /// others.
    pub chance: u64,
    /// The share of the traces begun here that is exported.
    pub share: TraceShare,
}

/// A header that cannot be sent, so that no exporter can be created.
#[derive(Debug, PartialEq, Eq)]
pub struct InvalidExportHeader(pub HeaderName);

impl std::fmt::Display for InvalidExportHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the value of {} cannot be sent in a header", self.0)
    }
}

impl std::error::Error for InvalidExportHeader {}

/// An entry of the queue.
enum QueuedSpan {
    Published(Box<PublishSpan>),
    Attempted(Box<AttemptedRequest>),
}

impl QueuedSpan {
    fn span(&self) -> Option<Span> {
        match self {
            QueuedSpan::Published(published) => Some(span::of_publish(published)),
            QueuedSpan::Attempted(attempted) => Some(span::of_attempt(attempted, attempted.span.as_deref()?)),
        }
    }
}

/// Exports what happens to events as spans.
pub struct Exporter {
    queue: mpsc::Sender<QueuedSpan>,
    ids: TraceIds,
    /// Ids for publish requests without a position in the log.
    unstored: TraceIds,
    number: AtomicU64,
    share: TraceShare,
    clock: Arc<dyn Clock>,
    pub counts: Arc<SpanCounts>,
    wall: Arc<dyn Clock>,
    tasks: TaskTracker,
    stop: CancellationToken,
    end: Arc<OnceLock<Timestamp>>,
}

impl Exporter {
    /// Starts the task that sends. `clock` is the engine's; waits for the collector use the
    /// machine's.
    pub fn start(
        config: Config,
        transport: Arc<dyn DeliveryTransport>,
        clock: Arc<dyn Clock>,
        wall: Arc<dyn Clock>,
    ) -> Result<Arc<Exporter>, InvalidExportHeader> {
        let (queue, waiting) = mpsc::channel(WAITING_MAX);
        let counts = Arc::new(SpanCounts::default());
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let end = Arc::new(OnceLock::new());
        let export = ExportTask {
            transport,
            wall: wall.clone(),
            form: ExportRequestForm::new(&config)?,
            counts: counts.clone(),
            stop: stop.clone(),
            end: end.clone(),
            failing: false,
        };
        tasks.spawn(export.run(waiting));
        tasks.close();
        Ok(Arc::new(Exporter {
            queue,
            ids: TraceIds { log: config.log },
            unstored: TraceIds { log: config.chance },
            number: AtomicU64::new(0),
            share: config.share,
            clock,
            counts,
            wall,
            tasks,
            stop,
            end,
        }))
    }

    /// Sends what waits, for as long as this at most and never longer than [`export::FLUSH_MAX`], and ends.
    pub async fn stop(&self, patience: Duration) {
        let end = self.wall.now() + patience.min(export::FLUSH_MAX);
        // Stopped twice, the first end holds.
        let _ = self.end.set(end);
        self.stop.cancel();
        self.tasks.wait().await;
    }

    fn push(&self, item: QueuedSpan) {
        if self.queue.try_send(item).is_err() {
            self.counts.dropped.fetch_add(1, Relaxed);
        }
    }

    fn published(&self, accepted: &AcceptedRequest) -> Option<PublishSpan> {
        let batch = &accepted.batch;
        let mut gathered = GatheredContexts::default();
        match batch.trace.as_deref().and_then(CarriedContext::of_request) {
            Some(carried) => gathered.add(Some(carried)),
            // Without a context of the request, the events' own contexts count.
            None => {
                (0..batch.events.len()).for_each(|index| gathered.add(CarriedContext::of_event(batch, index)))
            }
        }
        let (ids, first) = match accepted.first {
            Some(first) => (self.ids, first),
            None => (self.unstored, Position(self.number.fetch_add(1, Relaxed))),
        };
        let sampled = match gathered.is_empty() {
            true => ids.begin_trace(first, self.share).sampled(),
            false => gathered.sampled(),
        };
        if !sampled {
            return None;
        }
        let standing: SpanStanding = ids.publish(&gathered, first);
        let mapping = accepted.audience.mapping.as_ref();
        let named = 0..batch.events.len().min(IDS_MAX);
        Some(PublishSpan {
            standing,
            state: gathered.shared().map_or("", |shared| &shared.state).into(),
            audience: accepted.audience.clone(),
            begun: batch.received,
            ended: self.clock.now(),
            events: batch.events.len(),
            bytes: batch.body.len(),
            deliveries: batch.deliveries(),
            ids: named
                .filter_map(|index| event_id(batch, index, mapping))
                .collect(),
            publisher: batch.publisher.clone(),
        })
    }
}

impl EventRecorder for Exporter {
    fn on(&self) -> bool {
        true
    }

    fn accepted(&self, accepted: AcceptedRequest) {
        if let Some(published) = self.published(&accepted) {
            self.push(QueuedSpan::Published(Box::new(published)));
        }
    }

    fn attempted(&self, mut attempted: AttemptedRequest) {
        if attempted.span.is_some() {
            // The answer is not part of a span.
            attempted.answer = None;
            attempted.runs.truncate(1);
            self.push(QueuedSpan::Attempted(Box::new(attempted)));
        }
    }

    fn ended(&self, _: EndedDeliveries) {}
    fn retired(&self, _: RetiredSubscription) {}
    fn held(&self, _: HeldEndpoint) {}
    fn released(&self, _: ReleasedEndpoint) {}
    fn blob(&self, _: BlobWritten) {}
    fn replayed(&self, _: ReplayedDeadLetters) {}
}

/// The form of requests to the collector.
struct ExportRequestForm {
    url: Arc<Uri>,
    headers: Arc<HeaderMap>,
    protocol: OtlpEncoding,
    resource: Resource,
    version: &'static str,
}

impl ExportRequestForm {
    fn new(config: &Config) -> Result<ExportRequestForm, InvalidExportHeader> {
        let mut headers = HeaderMap::new();
        let content_type = match config.protocol {
            OtlpEncoding::HttpProtobuf => "application/x-protobuf",
            OtlpEncoding::HttpJson => "application/json",
        };
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Ok(agent) = HeaderValue::try_from(format!("postrider/{}", config.service_version)) {
            headers.insert(USER_AGENT, agent);
        }
        for (name, value) in &config.headers {
            let mut value =
                HeaderValue::from_str(value.expose()).map_err(|_| InvalidExportHeader(name.clone()))?;
            value.set_sensitive(true);
            headers.insert(name.clone(), value);
        }
        let resource = Resource {
            attributes: vec![
                KeyValue::new("service.name", config.service_name.as_str()),
                KeyValue::new("service.version", config.service_version),
                KeyValue::new("telemetry.sdk.name", "postrider"),
                KeyValue::new("telemetry.sdk.language", "rust"),
                KeyValue::new("telemetry.sdk.version", config.service_version),
            ],
        };
        Ok(ExportRequestForm {
            url: Arc::new(config.url.clone()),
            headers: Arc::new(headers),
            protocol: config.protocol,
            resource,
            version: config.service_version,
        })
    }

    fn request(&self, spans: Vec<Span>) -> DeliveryRequest {
        let message = message::ExportTraceServiceRequest {
            resource_spans: vec![message::ResourceSpans {
                resource: Some(self.resource.clone()),
                scope_spans: vec![message::ScopeSpans {
                    scope: Some(message::Scope {
                        name: "postrider".to_owned(),
                        version: self.version.to_owned(),
                    }),
                    spans,
                }],
            }],
        };
        let body = match self.protocol {
            OtlpEncoding::HttpProtobuf => message.encode_to_vec(),
            OtlpEncoding::HttpJson => {
                serde_json::to_vec(&message).expect("text and numbers have a JSON form")
            }
        };
        DeliveryRequest {
            method: Method::POST,
            url: self.url.clone(),
            headers: self.headers.clone(),
            more: Vec::new(),
            body: body.into(),
            guard: None,
        }
    }
}

#[cfg(test)]
mod tests;
