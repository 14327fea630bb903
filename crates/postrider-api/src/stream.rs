//! `GET /postrider/v1/events/stream`: the live stream of events.

use crate::Server;
use crate::access::{RequiredPermission, StreamCredential};
use crate::dead_letters::read_query;
use crate::http::{Answer, ApiCall, ResponseContent, empty};
use crate::limits::{ClientBounds, ClientLimit};
use crate::lookup;
use crate::own_api::Problem;
use crate::peers::live::LiveLine;
use crate::stream_slots::{StreamSlot, StreamSlotHolder, StreamSlotLimits, StreamSlots};
use bytes::{BufMut, Bytes, BytesMut};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_engine::recorder::{LiveStreamHappening, LiveStreamLine};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Pieces that are buffered for a slow reader. Beyond it lines are lost, and the reader is told.
const PIECES: usize = 16;
/// Lines that are sent as one piece at most.
const LINES_PER_PIECE: usize = 256;
/// Interval of keep-alives.
const QUIET_MAX: Duration = Duration::from_secs(15);
/// A stream ends after this time. Its client may open another.
const LIFETIME: Duration = Duration::from_secs(3600);
/// Tells nginx and other proxies not to buffer the answer.
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Open streams.
pub(crate) struct OpenStreams {
    places: Arc<StreamSlots>,
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
}

impl OpenStreams {
    pub fn new(bounds: &ClientBounds) -> OpenStreams {
        let (total, per_client) = (bounds.streams_max, bounds.streams_per_client_max);
        OpenStreams {
            places: StreamSlots::new(StreamSlotLimits {
                total,
                per_client,
                per_address: 2 * per_client,
                for_owners: total / 4,
            }),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        }
    }

    /// Ends all streams, including those that are opened later.
    pub async fn end(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Answers an authenticated client with read permission.
pub(crate) async fn answer(server: &Arc<Server>, call: &ApiCall) -> Result<Answer, Problem> {
    let query = call.uri.query().unwrap_or("").replace('+', "%20");
    let wanted = StreamFilter::read(server, &query)?;
    if !server.recordings.status().on {
        return Err(Problem::new(404, "recording is off: there is nothing to follow"));
    }
    let caller = server.caller(call, RequiredPermission::Read)?;
    let place = server
        .streams
        .places
        .take(StreamSlotHolder::of(&caller, call.peer));
    let place = place.map_err(|full| {
        server.client_limits.report(ClientLimit::Streams, call.peer);
        Problem::new(full.status(), full.reason("live streams"))
    })?;
    let credential = server.lasting_credential(call)?;
    let (pieces, received) = mpsc::channel(PIECES);
    let lines = match server.peers {
        None => LineSource::Own(server.recordings.subscribe()),
        Some(_) => LineSource::OfAll(server.live.watch(server).await),
    };
    let stream = LiveStreamTask {
        lines,
        server: server.clone(),
        wanted,
        credential,
        pieces,
        _place: place,
    };
    server.streams.tasks.spawn(stream.run());
    let mut answer = empty(StatusCode::OK, &call.id);
    *answer.body_mut() = ResponseContent::Channel(received);
    put_headers(answer.headers_mut());
    Ok(answer)
}

/// Sets the headers of a streamed answer.
pub(crate) fn put_headers(headers: &mut HeaderMap) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(BUFFERING, HeaderValue::from_static("no"));
}

#[derive(Clone, Copy, Debug, Default)]
struct StreamFilter {
    topic: Option<TopicId>,
    subscription: Option<SubscriptionId>,
}

impl StreamFilter {
    fn read(server: &Server, query: &str) -> Result<StreamFilter, Problem> {
        let mut wanted = StreamFilter::default();
        for (name, value) in read_query(query, &["topic", "subscription"])? {
            match name {
                _ if value.is_empty() => {}
                "topic" => wanted.topic = Some(lookup::topic(server, &value)?.topic.id),
                _ => wanted.subscription = Some(lookup::subscription(server, name, &value)?.id),
            }
        }
        Ok(wanted)
    }

    fn takes(&self, topic: TopicId, subscription: Option<SubscriptionId>) -> bool {
        self.topic.is_none_or(|wanted| wanted == topic)
            && self
                .subscription
                .is_none_or(|wanted| subscription == Some(wanted))
    }
}

/// Source of lines: this server alone, or all nodes of a cluster.
enum LineSource {
    Own(broadcast::Receiver<Arc<LiveStreamLine>>),
    OfAll(broadcast::Receiver<Arc<LiveLine>>),
}

enum ReceivedLine {
    Own(Arc<LiveStreamLine>),
    OfAll(Arc<LiveLine>),
}

impl LineSource {
    async fn recv(&mut self) -> Result<ReceivedLine, RecvError> {
        match self {
            LineSource::Own(lines) => lines.recv().await.map(ReceivedLine::Own),
            LineSource::OfAll(lines) => lines.recv().await.map(ReceivedLine::OfAll),
        }
    }

    fn try_recv(&mut self) -> Result<ReceivedLine, TryRecvError> {
        match self {
            LineSource::Own(lines) => lines.try_recv().map(ReceivedLine::Own),
            LineSource::OfAll(lines) => lines.try_recv().map(ReceivedLine::OfAll),
        }
    }
}

struct LiveStreamTask {
    server: Arc<Server>,
    lines: LineSource,
    wanted: StreamFilter,
    credential: StreamCredential,
    pieces: mpsc::Sender<Bytes>,
    _place: StreamSlot,
}

impl LiveStreamTask {
    /// Runs until the reader disconnects, nothing more can be written, or the reader's credential
    /// is revoked.
    async fn run(mut self) {
        let clock = self.server.wall.clone();
        let stop = self.server.streams.stop.clone();
        let begun = clock.now();
        let mut revocations = self.server.access.changes();
        if !self.server.is_credential_valid(&self.credential) {
            return;
        }
        let mut next = Bytes::from_static(b": begin\n\n");
        loop {
            let sent = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                sent = self.pieces.send(next) => sent,
            };
            if sent.is_err() {
                return;
            }
            next = loop {
                let quiet = clock.sleep_until(clock.now() + QUIET_MAX);
                let received = tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = self.pieces.closed() => return,
                    _ = revocations.changed() => None,
                    received = self.lines.recv() => Some(received),
                    () = quiet => None,
                };
                let now = clock.now();
                if !self.server.is_credential_valid(&self.credential) || now.since(begun) >= LIFETIME {
                    return;
                }
                let Some(received) = received else {
                    break Bytes::from_static(b": \n\n");
                };
                let Some(piece) = piece(&mut self.lines, &self.wanted, received) else {
                    return;
                };
                if !piece.is_empty() {
                    break piece;
                }
            };
        }
    }
}

/// Renders the lines that have arrived and are wanted; none if the source has ended.
fn piece(
    lines: &mut LineSource,
    wanted: &StreamFilter,
    first: Result<ReceivedLine, RecvError>,
) -> Option<Bytes> {
    let mut piece = BytesMut::new();
    let mut next = Some(first);
    let mut count = 0;
    while let Some(received) = next {
        match received {
            Ok(ReceivedLine::Own(line)) => {
                let of = line.subscription.as_ref().map(|(id, _)| *id);
                if wanted.takes(line.topic, of) && line.elsewhere.is_none() {
                    write(&mut piece, &line);
                }
            }
            Ok(ReceivedLine::OfAll(told)) => {
                if wanted.takes(told.topic, told.subscription) {
                    piece.put_slice(&told.text);
                }
            }
            // A comment for people: programs that parse the stream ignore it.
            Err(RecvError::Lagged(count)) => {
                piece.put_slice(format!(": {count} lines were lost\n\n").as_bytes());
            }
            Err(RecvError::Closed) if piece.is_empty() => return None,
            Err(RecvError::Closed) => break,
        }
        count += 1;
        // A line that is taken from the channel must be sent, so there must be room for it.
        next = match (count < LINES_PER_PIECE).then(|| lines.try_recv()) {
            Some(Ok(line)) => Some(Ok(line)),
            Some(Err(TryRecvError::Lagged(count))) => Some(Err(RecvError::Lagged(count))),
            // The next call distinguishes the two.
            Some(Err(TryRecvError::Empty | TryRecvError::Closed)) | None => None,
        };
    }
    Some(piece.freeze())
}

/// JSON contains no line breaks, so one data line is enough.
fn put(piece: &mut BytesMut, event: &str, data: &str) {
    for text in ["event: ", event, "\ndata: ", data, "\n\n"] {
        piece.put_slice(text.as_bytes());
    }
}

pub(crate) fn write(piece: &mut BytesMut, line: &LiveStreamLine) {
    let mut data = json!({
        "id": line.id,
        "topic": line.topic_name,
        "type": line.event_type,
        "subject": line.subject,
        "at": line.at.to_string(),
    });
    if let Some(name) = &line.domain_topic {
        data["domainTopic"] = json!(name);
    }
    if let Some((_, name)) = &line.subscription {
        data["subscription"] = json!(name);
    }
    let event = match line.what {
        LiveStreamHappening::Accepted { matched } => {
            data["matched"] = json!(matched);
            "accepted"
        }
        LiveStreamHappening::Attempted {
            outcome,
            status,
            state,
        } => {
            data["outcome"] = json!(outcome.name());
            data["state"] = json!(state.name());
            if let Some(status) = status {
                data["status"] = json!(status);
            }
            "attempted"
        }
        LiveStreamHappening::Ended(disposition) => {
            data["state"] = json!(disposition.state().name());
            if let Some(reason) = disposition.reason() {
                data["reason"] = json!(reason.name());
            }
            "ended"
        }
    };
    put(piece, event, &data.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_is_lost_between_two_pieces() {
        let many = 3 * LINES_PER_PIECE + 7;
        let (sender, received) = broadcast::channel(2 * many);
        for n in 0..many {
            let told = LiveLine {
                topic: TopicId(1),
                subscription: None,
                text: Bytes::from(format!("{n}\n")),
            };
            assert!(sender.send(Arc::new(told)).is_ok());
        }
        drop(sender);
        let mut lines = LineSource::OfAll(received);
        let mut text = String::new();
        let mut pieces = 0;
        loop {
            let first = match lines.try_recv() {
                Ok(line) => Ok(line),
                Err(_) => Err(RecvError::Closed),
            };
            let Some(piece) = piece(&mut lines, &StreamFilter::default(), first) else {
                break;
            };
            pieces += 1;
            text.push_str(std::str::from_utf8(&piece).unwrap());
        }
        let expected: Vec<String> = (0..many).map(|n| n.to_string()).collect();
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        assert_eq!(pieces, 4);
    }
}
