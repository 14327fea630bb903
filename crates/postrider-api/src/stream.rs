//! `GET /postrider/v1/events/stream`: the live stream of events.

use crate::Server;
use crate::access::{LastingCredential, Need};
use crate::dead_letters::read_query;
use crate::http::{Answer, Call, Content, empty};
use crate::limits::{ClientBounds, Limit};
use crate::named;
use crate::ours::Problem;
use crate::peers::live::Told;
use crate::places::{Bounds, Holder, Place, Places};
use bytes::{BufMut, Bytes, BytesMut};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_engine::recorder::{Happening, Line};
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
pub(crate) struct Streams {
    places: Arc<Places>,
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
}

impl Streams {
    pub fn new(bounds: &ClientBounds) -> Streams {
        let (total, per_client) = (bounds.streams_max, bounds.streams_per_client_max);
        Streams {
            places: Places::new(Bounds {
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
pub(crate) async fn answer(server: &Arc<Server>, call: &Call) -> Result<Answer, Problem> {
    let query = call.uri.query().unwrap_or("").replace('+', "%20");
    let wanted = Wanted::read(server, &query)?;
    if !server.recordings.status().on {
        return Err(Problem::new(404, "recording is off: there is nothing to follow"));
    }
    let caller = server.caller(call, Need::Read)?;
    let place = server.streams.places.take(Holder::of(&caller, call.peer));
    let place = place.map_err(|full| {
        server.client_limits.report(Limit::Streams, call.peer);
        Problem::new(full.status(), full.reason("live streams"))
    })?;
    let credential = server.lasting_credential(call)?;
    let (pieces, received) = mpsc::channel(PIECES);
    let lines = match server.peers {
        None => Lines::Own(server.recordings.subscribe()),
        Some(_) => Lines::OfAll(server.live.watch(server).await),
    };
    let stream = Stream {
        lines,
        server: server.clone(),
        wanted,
        credential,
        pieces,
        _place: place,
    };
    server.streams.tasks.spawn(stream.run());
    let mut answer = empty(StatusCode::OK, &call.id);
    *answer.body_mut() = Content::Going(received);
    put_headers(answer.headers_mut());
    Ok(answer)
}

/// Sets the headers of a streamed answer.
pub(crate) fn put_headers(headers: &mut HeaderMap) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(BUFFERING, HeaderValue::from_static("no"));
}

#[derive(Clone, Copy, Debug, Default)]
struct Wanted {
    topic: Option<TopicId>,
    subscription: Option<SubscriptionId>,
}

impl Wanted {
    fn read(server: &Server, query: &str) -> Result<Wanted, Problem> {
        let mut wanted = Wanted::default();
        for (name, value) in read_query(query, &["topic", "subscription"])? {
            match name {
                _ if value.is_empty() => {}
                "topic" => wanted.topic = Some(named::topic(server, &value)?.topic.id),
                _ => wanted.subscription = Some(named::subscription(server, name, &value)?.id),
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
enum Lines {
    Own(broadcast::Receiver<Arc<Line>>),
    OfAll(broadcast::Receiver<Arc<Told>>),
}

enum Received {
    Own(Arc<Line>),
    OfAll(Arc<Told>),
}

impl Lines {
    async fn recv(&mut self) -> Result<Received, RecvError> {
        match self {
            Lines::Own(lines) => lines.recv().await.map(Received::Own),
            Lines::OfAll(lines) => lines.recv().await.map(Received::OfAll),
        }
    }

    fn try_recv(&mut self) -> Result<Received, TryRecvError> {
        match self {
            Lines::Own(lines) => lines.try_recv().map(Received::Own),
            Lines::OfAll(lines) => lines.try_recv().map(Received::OfAll),
        }
    }
}

struct Stream {
    server: Arc<Server>,
    lines: Lines,
    wanted: Wanted,
    credential: LastingCredential,
    pieces: mpsc::Sender<Bytes>,
    _place: Place,
}

impl Stream {
    /// Runs until the reader disconnects, nothing more can be written, or the reader's credential
    /// is revoked.
    async fn run(mut self) {
        let clock = self.server.wall.clone();
        let stop = self.server.streams.stop.clone();
        let begun = clock.now();
        let mut revocations = self.server.access.changes();
        if !self.server.still_holds(&self.credential) {
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
                if !self.server.still_holds(&self.credential) || now.since(begun) >= LIFETIME {
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
fn piece(lines: &mut Lines, wanted: &Wanted, first: Result<Received, RecvError>) -> Option<Bytes> {
    let mut piece = BytesMut::new();
    let mut next = Some(first);
    let mut count = 0;
    while let Some(received) = next {
        match received {
            Ok(Received::Own(line)) => {
                let of = line.subscription.as_ref().map(|(id, _)| *id);
                if wanted.takes(line.topic, of) && line.elsewhere.is_none() {
                    write(&mut piece, &line);
                }
            }
            Ok(Received::OfAll(told)) => {
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

pub(crate) fn write(piece: &mut BytesMut, line: &Line) {
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
        Happening::Accepted { matched } => {
            data["matched"] = json!(matched);
            "accepted"
        }
        Happening::Attempted {
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
        Happening::Ended(disposition) => {
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
            let told = Told {
                topic: TopicId(1),
                subscription: None,
                text: Bytes::from(format!("{n}\n")),
            };
            assert!(sender.send(Arc::new(told)).is_ok());
        }
        drop(sender);
        let mut lines = Lines::OfAll(received);
        let mut text = String::new();
        let mut pieces = 0;
        loop {
            let first = match lines.try_recv() {
                Ok(line) => Ok(line),
                Err(_) => Err(RecvError::Closed),
            };
            let Some(piece) = piece(&mut lines, &Wanted::default(), first) else {
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
