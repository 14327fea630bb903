//! Traces for OpenTelemetry: a span per publish request and one per attempt, sent to a collector
//! over OTLP/HTTP.
//!
//! The event path only pushes items into a bounded queue; one task turns them into spans and sends
//! them. A collector that is slow or unreachable costs spans, which are counted, and nothing else.

mod export;
mod message;
mod span;

use export::Export;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use http::{Method, Uri};
use message::{KeyValue, Resource, Span};
use postrider_core::ids::{Position, Secret};
use postrider_core::time::{Clock, Timestamp};
use postrider_core::trace::{Carried, Gathered, Ids, Share, Standing};
use postrider_engine::attempt::trace::{IDS_MAX, event_id};
use postrider_engine::deliver::{Request, Transport};
use postrider_engine::recorder::{
    Accepted, Attempted, BlobWritten, Ended, Held, Recorder, Released, Replayed, Retired, SpanCounts,
};
use prost::Message;
use span::Published;
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
pub enum Protocol {
    HttpProtobuf,
    HttpJson,
}

pub struct Config {
    /// The full URL for requests.
    pub url: Uri,
    pub protocol: Protocol,
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
    pub share: Share,
}

/// A header that cannot be sent, so that no exporter can be created.
#[derive(Debug, PartialEq, Eq)]
pub struct UnfitHeader(pub HeaderName);

impl std::fmt::Display for UnfitHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the value of {} cannot be sent in a header", self.0)
    }
}

impl std::error::Error for UnfitHeader {}

/// An entry of the queue.
enum Item {
    Published(Box<Published>),
    Attempted(Box<Attempted>),
}

impl Item {
    fn span(&self) -> Option<Span> {
        match self {
            Item::Published(published) => Some(span::of_publish(published)),
            Item::Attempted(attempted) => Some(span::of_attempt(attempted, attempted.span.as_deref()?)),
        }
    }
}

/// Exports what happens to events as spans.
pub struct Exporter {
    queue: mpsc::Sender<Item>,
    ids: Ids,
    /// Ids for publish requests without a position in the log.
    unstored: Ids,
    number: AtomicU64,
    share: Share,
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
        transport: Arc<dyn Transport>,
        clock: Arc<dyn Clock>,
        wall: Arc<dyn Clock>,
    ) -> Result<Arc<Exporter>, UnfitHeader> {
        let (queue, waiting) = mpsc::channel(WAITING_MAX);
        let counts = Arc::new(SpanCounts::default());
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let end = Arc::new(OnceLock::new());
        let export = Export {
            transport,
            wall: wall.clone(),
            form: Form::new(&config)?,
            counts: counts.clone(),
            stop: stop.clone(),
            end: end.clone(),
            failing: false,
        };
        tasks.spawn(export.run(waiting));
        tasks.close();
        Ok(Arc::new(Exporter {
            queue,
            ids: Ids { log: config.log },
            unstored: Ids { log: config.chance },
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

    fn push(&self, item: Item) {
        if self.queue.try_send(item).is_err() {
            self.counts.dropped.fetch_add(1, Relaxed);
        }
    }

    fn published(&self, accepted: &Accepted) -> Option<Published> {
        let batch = &accepted.batch;
        let mut gathered = Gathered::default();
        match batch.trace.as_deref().and_then(Carried::of_request) {
            Some(carried) => gathered.add(Some(carried)),
            // Without a context of the request, the events' own contexts count.
            None => (0..batch.events.len()).for_each(|index| gathered.add(Carried::of_event(batch, index))),
        }
        let (ids, first) = match accepted.first {
            Some(first) => (self.ids, first),
            None => (self.unstored, Position(self.number.fetch_add(1, Relaxed))),
        };
        let sampled = match gathered.is_empty() {
            true => ids.begun(first, self.share).sampled(),
            false => gathered.sampled(),
        };
        if !sampled {
            return None;
        }
        let standing: Standing = ids.publish(&gathered, first);
        let mapping = accepted.audience.mapping.as_ref();
        let named = 0..batch.events.len().min(IDS_MAX);
        Some(Published {
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

impl Recorder for Exporter {
    fn on(&self) -> bool {
        true
    }

    fn accepted(&self, accepted: Accepted) {
        if let Some(published) = self.published(&accepted) {
            self.push(Item::Published(Box::new(published)));
        }
    }

    fn attempted(&self, mut attempted: Attempted) {
        if attempted.span.is_some() {
            // The answer is not part of a span.
            attempted.answer = None;
            attempted.runs.truncate(1);
            self.push(Item::Attempted(Box::new(attempted)));
        }
    }

    fn ended(&self, _: Ended) {}
    fn retired(&self, _: Retired) {}
    fn held(&self, _: Held) {}
    fn released(&self, _: Released) {}
    fn blob(&self, _: BlobWritten) {}
    fn replayed(&self, _: Replayed) {}
}

/// The form of requests to the collector.
struct Form {
    url: Arc<Uri>,
    headers: Arc<HeaderMap>,
    protocol: Protocol,
    resource: Resource,
    version: &'static str,
}

impl Form {
    fn new(config: &Config) -> Result<Form, UnfitHeader> {
        let mut headers = HeaderMap::new();
        let content_type = match config.protocol {
            Protocol::HttpProtobuf => "application/x-protobuf",
            Protocol::HttpJson => "application/json",
        };
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Ok(agent) = HeaderValue::try_from(format!("postrider/{}", config.service_version)) {
            headers.insert(USER_AGENT, agent);
        }
        for (name, value) in &config.headers {
            let mut value = HeaderValue::from_str(value.expose()).map_err(|_| UnfitHeader(name.clone()))?;
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
        Ok(Form {
            url: Arc::new(config.url.clone()),
            headers: Arc::new(headers),
            protocol: config.protocol,
            resource,
            version: config.service_version,
        })
    }

    fn request(&self, spans: Vec<Span>) -> Request {
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
            Protocol::HttpProtobuf => message.encode_to_vec(),
            Protocol::HttpJson => serde_json::to_vec(&message).expect("text and numbers have a JSON form"),
        };
        Request {
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
