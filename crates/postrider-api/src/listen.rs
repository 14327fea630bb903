//! Listen sessions, `POST /postrider/v1/listen`: a subscription that exists as long as its client
//! stays connected.
//!
//! The subscription is like any other, to a webhook whose host is a reserved name. Requests to that
//! host never reach a network: [`ListenSessions`] writes them to the stream that the client reads, and
//! the answer that the client posts becomes the webhook's answer.

mod messages;
pub(crate) mod remote;
#[cfg(test)]
mod tests;

use crate::Server;
use crate::access::{Caller, StreamCredential};
use crate::http::{Answer, ApiCall, ResponseContent, empty};
use crate::limits::ClientLimit;
use crate::locks;
use crate::own_api::{Problem, read_bytes};
use crate::peers::Peers;
use crate::stream;
use crate::stream_slots::{self, StreamSlotHolder, StreamSlotLimits, StreamSlots};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::{BufMut, Bytes, BytesMut};
use hyper::StatusCode;
use hyper::header::HeaderMap;
use messages::ListenRequest;
use postrider_core::subscription::{Destination, Subscription};
use postrider_core::time::Timestamp;
use postrider_engine::deliver::{
    AttemptTimings, DeliveryReply, DeliveryRequest, DeliveryTransport, TransportFailure, TransportFailureKind,
};
use postrider_wire::resources::validate::UrlParts;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// No network resolves this name, and only subscriptions of listen sessions may use it.
pub const HOST: &str = "listen.postrider.invalid";
/// Limits of open listen sessions.
const LISTENERS_MAX: usize = 32;
const LISTENERS: StreamSlotLimits = StreamSlotLimits {
    total: LISTENERS_MAX,
    per_client: LISTENERS_MAX / 2,
    per_address: LISTENERS_MAX / 2,
    for_owners: LISTENERS_MAX / 4,
};
/// Deliveries that wait in serialized form for a slow reader. Further ones wait unserialized,
/// within their response timeout.
const PIECES: usize = 4;
/// How often a keep-alive is sent, after a check whether the subscription still exists.
const QUIET_MAX: Duration = Duration::from_secs(5);
/// A listen session ends after this time. Its client may open another.
const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// By the engine's clock. Removes a subscription that could not be deleted when its session ended.
const EXPIRES_AFTER: Duration = Duration::from_secs(7 * 86_400);
/// How often, and at which interval, the deletion of an ended session's subscription is attempted.
const DELETE_TRIES: u32 = 20;
const DELETE_PAUSE: Duration = Duration::from_secs(3);
/// How long a reader that is told why its stream ends may take to read it.
const FAREWELL: Duration = Duration::from_secs(1);

/// Transport that hands requests to listen sessions. All other requests go to the inner transport.
pub struct ListenSessions {
    inner: Arc<dyn DeliveryTransport>,
    /// By their tokens.
    lines: Mutex<HashMap<String, Arc<ListenSession>>>,
    places: Arc<StreamSlots>,
    /// The nodes that may hold other listen sessions.
    peers: OnceLock<Arc<dyn Peers>>,
}

impl ListenSessions {
    pub fn new(inner: Arc<dyn DeliveryTransport>) -> ListenSessions {
        ListenSessions {
            inner,
            lines: Mutex::default(),
            places: StreamSlots::new(LISTENERS),
            peers: OnceLock::new(),
        }
    }

    /// Makes listen sessions of other nodes reachable. Must be called before anything is sent.
    pub fn set_peers(&self, peers: Arc<dyn Peers>) {
        let _ = self.peers.set(peers);
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<String, Arc<ListenSession>>> {
        self.lines.lock().expect("no panic holds it")
    }

    fn line(&self, token: &str) -> Option<Arc<ListenSession>> {
        self.lines().get(token).cloned()
    }

    /// Hands a request to its listen session and waits for the answer.
    async fn hand_over(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let begun = Instant::now();
        let token = request.url.path().trim_start_matches('/');
        let answered = match self.line(token) {
            Some(line) => line.ask(&request).await,
            None => remote::deliver(self.peers.get(), token, &request).await,
        };
        match answered {
            Some(DeliveryReply::Answered(mut answer)) => {
                let waited = begun.elapsed();
                answer.timings = AttemptTimings {
                    connect: Duration::ZERO,
                    first_byte: waited,
                    total: waited,
                };
                DeliveryReply::Answered(answer)
            }
            Some(failed) => failed,
            None => failed("nobody listens any more"),
        }
    }
}

/// Implemented by hand, so that a request for another host costs no future of its own.
impl DeliveryTransport for ListenSessions {
    fn send<'a>(
        self: Arc<Self>,
        request: DeliveryRequest,
    ) -> Pin<Box<dyn Future<Output = DeliveryReply> + Send + 'a>>
    where
        Self: 'a,
    {
        match request.url.host() {
            Some(HOST) => Box::pin(self.hand_over(request)),
            _ => self.inner.clone().send(request),
        }
    }
}

fn failed(detail: impl Into<String>) -> DeliveryReply {
    DeliveryReply::Failed(TransportFailure {
        kind: TransportFailureKind::Socket,
        detail: detail.into(),
    })
}

/// The connection to one listen session.
struct ListenSession {
    pieces: mpsc::Sender<Bytes>,
    waiting: Mutex<UnansweredDeliveries>,
    ended: CancellationToken,
}

/// Deliveries without an answer: at most as many as the engine makes at once, each removed when
/// nobody waits for it any more, and some of other nodes.
#[derive(Default)]
struct UnansweredDeliveries {
    last: u64,
    by_number: HashMap<u64, oneshot::Sender<DeliveryReply>>,
}

impl ListenSession {
    fn new(pieces: mpsc::Sender<Bytes>) -> ListenSession {
        ListenSession {
            pieces,
            waiting: Mutex::default(),
            ended: CancellationToken::new(),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, UnansweredDeliveries> {
        self.waiting.lock().expect("no panic holds it")
    }

    /// Sends a delivery and waits for the session's answer; none if the session ends first.
    /// Dropping the future gives the delivery up.
    async fn ask(&self, request: &DeliveryRequest) -> Option<DeliveryReply> {
        let (answer, answered) = oneshot::channel();
        let number = {
            let mut waiting = self.waiting();
            waiting.last += 1;
            let number = waiting.last;
            waiting.by_number.insert(number, answer);
            number
        };
        let _place = UnansweredDeliveryGuard { line: self, number };
        let asking = async {
            // Serialized only when there is room: a delivery that waits for a slow reader is not
            // kept in memory twice.
            let room = self.pieces.reserve().await.ok()?;
            room.send(delivery(number, request));
            answered.await.ok()
        };
        tokio::select! {
            biased;
            // Polled first: an answer that was taken counts, even if the session ended right after
            // it.
            reply = asking => reply,
            () = self.ended.cancelled() => None,
        }
    }

    /// Completes a delivery. Returns whether it was waited for.
    fn answer(&self, number: u64, reply: DeliveryReply) -> bool {
        let waits = self.waiting().by_number.remove(&number);
        waits.is_some_and(|waits| waits.send(reply).is_ok())
    }
}

/// Removes a waiting delivery on drop.
struct UnansweredDeliveryGuard<'a> {
    line: &'a ListenSession,
    number: u64,
}

impl Drop for UnansweredDeliveryGuard<'_> {
    fn drop(&mut self) {
        self.line.waiting().by_number.remove(&self.number);
    }
}

fn put(event: &str, data: &Value) -> Bytes {
    let mut piece = BytesMut::new();
    for text in ["event: ", event, "\ndata: ", &data.to_string(), "\n\n"] {
        piece.put_slice(text.as_bytes());
    }
    piece.freeze()
}

/// A delivery as the session's client reads it: complete with all headers, since the client is the
/// subscriber.
fn delivery(number: u64, request: &DeliveryRequest) -> Bytes {
    let mut headers = Map::new();
    let all = request.headers.iter();
    for (name, value) in all.chain(request.more.iter().map(|(name, value)| (name, value))) {
        let value = String::from_utf8_lossy(value.as_bytes());
        match headers.get_mut(name.as_str()) {
            Some(Value::String(known)) => *known = format!("{known}, {value}"),
            _ => drop(headers.insert(name.to_string(), json!(value))),
        }
    }
    let mut data = json!({"delivery": number, "method": request.method.as_str(), "headers": headers});
    let body = request.body_bytes();
    match std::str::from_utf8(&body) {
        Ok(text) => data["body"] = json!(text),
        Err(_) => data["bodyBase64"] = json!(BASE64_STANDARD.encode(&body)),
    }
    put("delivery", &data)
}

/// The token of the listen session that a destination belongs to.
fn token_of(destination: &Destination) -> Option<String> {
    match destination {
        Destination::WebHook(hook) => {
            let url = hook.url.expose();
            let (_, path) = url.split_once(&format!("//{HOST}/"))?;
            Some(path.to_owned())
        }
        _ => None,
    }
}

/// Whether a destination belongs to a listen session.
pub(crate) fn is_listen_session(destination: &Destination) -> bool {
    let url = match destination {
        Destination::WebHook(hook) => hook.url.expose(),
        Destination::EventGrid { url, .. } => url,
        _ => return false,
    };
    UrlParts::parse(url).is_ok_and(|url| url.host.trim_end_matches('.').eq_ignore_ascii_case(HOST))
}

/// Whether a subscription has lost its listen session: the session belonged to an earlier process,
/// or to a node that is gone.
fn is_left_over(server: &Server, subscription: &Subscription) -> bool {
    let Some(token) = token_of(&subscription.destination) else {
        return true;
    };
    let here = server
        .listeners
        .as_ref()
        .is_some_and(|all| all.line(&token).is_some());
    let there = match (&server.peers, remote::node_of(&token)) {
        (Some(peers), Some(node)) => node != peers.id() && peers.is_present(node),
        _ => false,
    };
    !here && !there
}

/// Deletes subscriptions that have lost their listen session. Returns whether all of them are
/// deleted.
pub async fn delete_orphaned_subscriptions(server: &Server) -> bool {
    let directory = &server.engine.directory;
    let mut all = true;
    for subscription in directory.all_subscriptions() {
        if !is_listen_session(&subscription.destination) || !is_left_over(server, &subscription) {
            continue;
        }
        match server.engine.delete_subscription(subscription.id).await {
            Ok(()) => tracing::info!(subscription = %subscription.name, "deleted: its listener has gone"),
            Err(e) => {
                tracing::warn!(subscription = %subscription.name, error = %e, "cannot delete a subscription that nobody listens to");
                all = false;
            }
        }
    }
    all
}

fn sessions(server: &Server) -> Result<&Arc<ListenSessions>, Problem> {
    let missing = || Problem::new(404, "this server cannot be listened to");
    server.listeners.as_ref().ok_or_else(missing)
}

/// Begins a listen session of a client that may write.
pub(crate) async fn begin(
    server: &Arc<Server>,
    call: &mut ApiCall,
    caller: &Caller,
) -> Result<Answer, Problem> {
    listen(server, sessions(server)?, call, caller).await
}

/// Takes the answer of a listen session to a delivery.
pub(crate) async fn acknowledge(
    server: &Server,
    call: &mut ApiCall,
    token: &str,
    number: &str,
) -> Result<Answer, Problem> {
    take_reply(sessions(server)?, call, token, number).await
}

async fn listen(
    server: &Arc<Server>,
    listeners: &Arc<ListenSessions>,
    call: &mut ApiCall,
    caller: &Caller,
) -> Result<Answer, Problem> {
    let body = read_bytes(call).await?;
    let asked = ListenRequest::read(&body)?;
    let token = remote::token(listeners.peers.get().map(|peers| &**peers));
    let subscription = asked.subscription(server, &token, &caller.id).await?;
    let place = listeners.places.take(StreamSlotHolder::of(caller, call.peer));
    let place = place.map_err(|full| {
        server.client_limits.report(ClientLimit::Streams, call.peer);
        Problem::new(full.status(), full.reason("listeners"))
    })?;
    let credential = server.lasting_credential(call)?;
    let (pieces, received) = mpsc::channel(PIECES);
    let listening = ListenSessionTask {
        server: server.clone(),
        listeners: listeners.clone(),
        line: Arc::new(ListenSession::new(pieces)),
        token,
        credential,
        _place: place,
    };
    // The task that creates the subscription also deletes it: a client that goes away meanwhile
    // leaves nothing behind.
    let (begun, begins) = oneshot::channel();
    server.streams.tasks.spawn(listening.run(subscription, begun));
    let stopping = |_| Problem::new(503, "the server is shutting down");
    begins.await.map_err(stopping)??;
    let mut answer = empty(StatusCode::OK, &call.id);
    *answer.body_mut() = ResponseContent::Channel(received);
    stream::put_headers(answer.headers_mut());
    Ok(answer)
}

/// Why a listen session ends while its client is still connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListenEnd {
    Stopping,
    SignedOut,
    TooLong,
    Expired,
    Deleted,
}

impl ListenEnd {
    fn name(self) -> &'static str {
        match self {
            ListenEnd::Stopping => "stopping",
            ListenEnd::SignedOut => "signedOut",
            ListenEnd::TooLong => "tooLong",
            ListenEnd::Expired => "expired",
            ListenEnd::Deleted => "deleted",
        }
    }
}

struct ListenSessionTask {
    server: Arc<Server>,
    listeners: Arc<ListenSessions>,
    line: Arc<ListenSession>,
    token: String,
    credential: StreamCredential,
    _place: stream_slots::StreamSlot,
}

impl ListenSessionTask {
    /// Runs the session: creates the subscription, and deletes it when the client stops reading.
    async fn run(self, subscription: Subscription, begun: oneshot::Sender<Result<(), Problem>>) {
        self.listeners
            .lines()
            .insert(self.token.clone(), self.line.clone());
        let made = self.make(subscription).await;
        let made = match made {
            Ok(made) => made,
            Err(problem) => {
                self.listeners.lines().remove(&self.token);
                // The request may have been cancelled; nothing was created.
                let _ = begun.send(Err(problem));
                return;
            }
        };
        let first = put("subscription", &self.introduction(&made));
        // A new channel has room, and a reader that has already gone is noticed below.
        let _ = self.line.pieces.try_send(first);
        let _ = begun.send(Ok(()));
        tracing::info!(subscription = %made.name, "someone listens");
        let end = self.until_it_ends(&made).await;
        // Pending deliveries fail now: a subscription can be deleted only after its attempts have
        // ended.
        self.line.ended.cancel();
        self.listeners.lines().remove(&self.token);
        if let Some(end) = end {
            self.say_why(end).await;
        }
        self.delete(&made).await;
        tracing::info!(subscription = %made.name, "nobody listens any more");
    }

    /// Deletes the subscription. The deletion is retried, since another node may be changing the
    /// topic or the store may be briefly unreachable.
    async fn delete(&self, made: &Subscription) {
        let engine = &self.server.engine;
        for tries in 1.. {
            match engine.delete_subscription(made.id).await {
                Ok(()) => return,
                Err(e) if tries == DELETE_TRIES || engine.is_stopping() => {
                    tracing::warn!(subscription = %made.name, error = %e, "nobody listens any more, but the subscription stays");
                    return;
                }
                Err(_) => {
                    engine.nap(DELETE_PAUSE).await;
                }
            }
        }
    }

    /// Creates the subscription. A name that is already in use is refused.
    async fn make(&self, subscription: Subscription) -> Result<Arc<Subscription>, Problem> {
        let engine = &self.server.engine;
        let (topic, name) = (subscription.topic, subscription.name.clone());
        let domain_topic = subscription.domain_topic.clone();
        let inside = domain_topic.as_deref();
        let lock = locks::subscription(topic, inside, &name);
        let _one_at_a_time = self.server.resource_locks.hold(lock).await;
        let read = engine.snapshot_subscription(topic, inside, &name);
        if read.in_force.is_some() || read.pending.is_some() {
            let taken = Problem::field("name", format!("a subscription {name:?} is there already"));
            return Err(Problem { status: 409, ..taken });
        }
        engine
            .replace_subscription_if_unchanged(subscription, read)
            .await
            .map_err(|e| match e {
                postrider_engine::Error::Gone => Problem {
                    status: 404,
                    ..Problem::field("topic", "does not exist any more")
                },
                postrider_engine::Error::DomainTopicMissing { domain, name } => Problem {
                    status: 404,
                    ..Problem::field("domainTopic", format!("domain {domain:?} has no topic {name:?}"))
                },
                other => Problem::new(503, other.to_string()),
            })
    }

    fn introduction(&self, made: &Subscription) -> Value {
        let entry = self.server.engine.directory.topic_by_id(made.topic);
        let mut shown = json!({
            "token": self.token,
            "name": made.name,
            "id": crate::handshakes::resource_id(&self.server, made),
            "topic": entry.map(|entry| entry.topic.name.clone()),
            "expires": made.expires.map(|at| at.to_string()),
        });
        if let Some(name) = &made.domain_topic {
            shown["domainTopic"] = json!(name);
        }
        shown
    }

    /// Waits for the end of the session. Returns none if the client has stopped reading.
    async fn until_it_ends(&self, made: &Subscription) -> Option<ListenEnd> {
        let clock = &self.server.wall;
        let stop = &self.server.streams.stop;
        let begun = clock.now();
        loop {
            let quiet = clock.sleep_until(clock.now() + QUIET_MAX);
            tokio::select! {
                biased;
                () = stop.cancelled() => return Some(ListenEnd::Stopping),
                () = self.line.pieces.closed() => return None,
                () = quiet => {}
            }
            if let Some(end) = self.is_over(made, begun) {
                return Some(end);
            }
            // A full channel already gives the reader something to read.
            let _ = self.line.pieces.try_send(Bytes::from_static(b": \n\n"));
        }
    }

    fn is_over(&self, made: &Subscription, begun: Timestamp) -> Option<ListenEnd> {
        let (server, now) = (&self.server, self.server.wall.now());
        if !server.is_credential_valid(&self.credential) {
            return Some(ListenEnd::SignedOut);
        }
        if server.engine.directory.subscription_by_id(made.id).is_none() {
            let expired = made.expires.is_some_and(|at| at <= server.engine.clock.now());
            return Some(if expired {
                ListenEnd::Expired
            } else {
                ListenEnd::Deleted
            });
        }
        (now.since(begun) >= LIFETIME).then_some(ListenEnd::TooLong)
    }

    async fn say_why(&self, end: ListenEnd) {
        let clock = &self.server.wall;
        let said = self
            .line
            .pieces
            .send(put("ended", &json!({"reason": end.name()})));
        tokio::select! {
            _ = said => {}
            () = clock.sleep_until(clock.now() + FAREWELL) => {}
        }
    }
}

/// Receives the client's answer to a delivery.
async fn take_reply(
    listeners: &ListenSessions,
    call: &mut ApiCall,
    token: &str,
    number: &str,
) -> Result<Answer, Problem> {
    let body = read_bytes(call).await?;
    let reply = messages::read_reply(&body)?;
    let missing = |what: String| Problem::new(404, what);
    let parsed = number.parse().ok();
    let taken = match (listeners.line(token), parsed) {
        (Some(line), Some(number)) => line.answer(number, reply),
        (Some(_), None) => false,
        (None, _) => {
            let there = remote::acknowledge(listeners, token, parsed.unwrap_or(0), &body).await;
            there.ok_or_else(|| missing("token: nobody listens with this one".to_owned()))??
        }
    };
    if !taken {
        let reason = "is not waited for: it was answered before, or not in time";
        return Err(missing(format!("delivery: {number:?} {reason}")));
    }
    Ok(empty(StatusCode::NO_CONTENT, &call.id))
}

/// Converts the headers of an answer; `Err` names the one that is invalid.
fn header_map(headers: &HashMap<String, String>) -> Result<HeaderMap, String> {
    let mut map = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        let read = hyper::header::HeaderName::try_from(name.as_str());
        let read = read.map_err(|_| format!("{name:?} is not the name of a header"))?;
        let value = hyper::header::HeaderValue::try_from(value.as_str());
        let value = value.map_err(|_| format!("the value of {name:?} cannot be sent in a header"))?;
        map.append(read, value);
    }
    Ok(map)
}
