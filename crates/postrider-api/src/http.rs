//! The HTTP server: connections, routing, bodies, answers.

#[cfg(test)]
mod tests;

use crate::Server;
use crate::access::Caller;
use crate::body_memory::{BodyCharge, BodyMemory};
use crate::connections::{ClientStream, RequestGuard, ServedConnection, client_network};
use crate::limits::{ClientLimit, ClientLimits};
use crate::own_address::ConnectionEnds;
use crate::route::{HealthRoute, PublishRoute, Route};
use crate::scheme_mismatch::{self, FirstByte};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_TYPE, EXPECT, HOST, HeaderName, HeaderValue, LOCATION, RETRY_AFTER,
    STRICT_TRANSPORT_SECURITY, X_CONTENT_TYPE_OPTIONS,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::borrow::Cow;
use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit for a request's head and for a TLS handshake.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Memory limit for a request's head, and for the part of a body that is read at once.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// The beginning of a body that takes no room: a login or a token request is no longer, and connections are bounded.
const SMALL_BODY_BYTES: usize = 4096;
/// A request's body must have arrived within this time.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// A body of which fewer bytes arrive within `limits.body_stall_max` is cut off.
const BODY_BYTES_MIN: usize = 1024;
/// A body's buffer is at most this many times the size of what has arrived, however long the body
/// will be.
const BODY_BUFFER_FACTOR: usize = 4;
/// Answer on a connection that exceeds the connection limit.
const NO_ROOM: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n";
/// Limits for reading a body that nobody needs, so that its sender gets to read the answer: this
/// many bytes …
pub(crate) const UNWANTED_BYTES_MAX: usize = 16 << 20;
/// … and this time.
pub(crate) const UNWANTED_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_ID: HeaderName = HeaderName::from_static("x-ms-request-id");

pub type Answer = Response<ResponseContent>;

/// Body of an answer.
pub enum ResponseContent {
    /// All of it at once.
    Whole(Full<Bytes>),
    /// Piece by piece, until the sender closes the channel.
    Channel(mpsc::Receiver<Bytes>),
    /// Piece by piece, each rendered when the connection can take it.
    Pieces(Box<dyn Iterator<Item = Bytes> + Send>),
}

impl Body for ResponseContent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            ResponseContent::Whole(body) => Pin::new(body).poll_frame(context),
            ResponseContent::Channel(pieces) => pieces
                .poll_recv(context)
                .map(|piece| piece.map(|piece| Ok(Frame::data(piece)))),
            ResponseContent::Pieces(pieces) => Poll::Ready(pieces.next().map(|piece| Ok(Frame::data(piece)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ResponseContent::Whole(body) => body.is_end_stream(),
            ResponseContent::Channel(_) | ResponseContent::Pieces(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseContent::Whole(body) => body.size_hint(),
            ResponseContent::Channel(_) | ResponseContent::Pieces(_) => SizeHint::default(),
        }
    }
}

/// The content of a response with the guard of its request, which is under way until the content
/// has been taken.
struct ServedBody {
    content: ResponseContent,
    _under_way: RequestGuard,
}

impl Body for ServedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.get_mut().content).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.content.size_hint()
    }
}

/// Protocol of a listener.
#[derive(Clone)]
pub enum ListenerProtocol {
    Plain,
    Tls(TlsAcceptor),
}

impl ListenerProtocol {
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            ListenerProtocol::Plain => "http",
            ListenerProtocol::Tls(_) => "https",
        }
    }
}

/// Serves one listener until `stop`, then lets requests under way finish. Returns when all have.
pub async fn serve(
    server: Arc<Server>,
    listener: TcpListener,
    wire: ListenerProtocol,
    stop: CancellationToken,
) {
    let tasks = TaskTracker::new();
    let mut troubled = false;
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok((stream, peer)) => (stream, peer.ip()),
            // The client has already disconnected.
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset
                ) =>
            {
                continue;
            }
            Err(e) => {
                if !std::mem::replace(&mut troubled, true) {
                    tracing::warn!(error = %e, "cannot accept connections");
                }
                // Probably out of file descriptors: some connections must close first.
                server.connections.make_room(&server.client_limits);
                let clock = &server.wall;
                clock.sleep_until(clock.now() + ACCEPT_PAUSE).await;
                continue;
            }
        };
        troubled = false;
        let Some(place) = server.connections.admit(peer, &server.client_limits) else {
            if matches!(wire, ListenerProtocol::Plain) {
                // If this cannot be sent at once, the client sees a reset.
                let _ = stream.try_write(NO_ROOM);
            }
            continue;
        };
        // Failing to disable Nagle's algorithm only costs time.
        let _ = stream.set_nodelay(true);
        let Ok(local) = stream.local_addr() else { continue };
        let ends = ConnectionEnds { peer, local };
        let (server, wire, stop) = (server.clone(), wire.clone(), stop.clone());
        tasks.spawn(async move {
            let origin = ConnectionOrigin {
                scheme: wire.scheme(),
                ends,
                connection: place.connection.clone(),
            };
            let evicted = place.connection.evicted.clone();
            let limits = server.client_limits.clone();
            let serving = async {
                match scheme_mismatch::first_byte(&stream, &wire, HEAD_TIMEOUT, &stop).await {
                    FirstByte::Fits => {}
                    FirstByte::None => return,
                    FirstByte::Mismatch => {
                        return scheme_mismatch::answer(stream, &wire, peer, local, &limits).await;
                    }
                }
                let stream = ClientStream::new(stream, peer, place.connection.clone(), limits);
                match wire {
                    ListenerProtocol::Plain => connection(server, stream, origin, stop).await,
                    ListenerProtocol::Tls(acceptor) => {
                        if let Ok(Ok(stream)) = timeout(HEAD_TIMEOUT, acceptor.accept(stream)).await {
                            connection(server, stream, origin, stop).await;
                        }
                    }
                }
            };
            tokio::select! {
                biased;
                () = evicted.cancelled() => {}
                () = serving => {}
            }
        });
    }
    // Streams would never end by themselves.
    server.streams.end().await;
    tasks.close();
    tasks.wait().await;
}

/// Facts about a connection that its requests need.
#[derive(Clone)]
pub(crate) struct ConnectionOrigin {
    pub scheme: &'static str,
    pub ends: ConnectionEnds,
    pub connection: Arc<ServedConnection>,
}

#[cfg(test)]
impl ConnectionOrigin {
    pub fn test(ends: ConnectionEnds) -> ConnectionOrigin {
        ConnectionOrigin {
            scheme: "https",
            ends,
            connection: Arc::new(ServedConnection::new()),
        }
    }
}

pub(crate) async fn connection<S>(
    server: Arc<Server>,
    stream: S,
    origin: ConnectionOrigin,
    stop: CancellationToken,
) where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request| {
        let (server, origin) = (server.clone(), origin.clone());
        async move {
            let under_way = origin.connection.begin_request();
            let answer = answer(&server, request, origin).await;
            Ok::<_, Infallible>(answer.map(|content| ServedBody {
                content,
                _under_way: under_way,
            }))
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        biased;
        // A client that closes or breaks its connection is not worth a log line.
        _ = connection.as_mut() => return,
        () = stop.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

/// A request, with its head parsed as far as all APIs need it.
pub struct ApiCall {
    pub method: Method,
    pub scheme: &'static str,
    /// The peer of the connection: the client, or a proxy in front of the server.
    pub peer: IpAddr,
    /// The server's address that the client connected to.
    pub local: SocketAddr,
    pub uri: hyper::Uri,
    pub headers: hyper::HeaderMap,
    pub body: Incoming,
    pub id: String,
    pub(crate) connection: Arc<ServedConnection>,
    pub(crate) limits: Arc<ClientLimits>,
    /// The client whose credential was valid.
    pub(crate) principal: OnceLock<String>,
    /// Memory charged for the body, once reading it has begun.
    pub(crate) charge: Option<BodyCharge>,
    /// Whether the body did not arrive in time or did not fit: the rest is not read.
    is_cut: bool,
    /// Seconds for `Retry-After` if the answer is 429. Zero leaves the answer's own value.
    pub retry_after_secs: AtomicU64,
    /// Facts for the audit log.
    pub notes: crate::audit::AuditNotes,
}

impl ApiCall {
    /// Notes the authenticated client, so that its bodies are charged to its own share of memory.
    pub(crate) fn identified(&self, caller: Caller) -> Caller {
        let _ = self.principal.set(caller.id.clone());
        caller
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The host as the client addressed it.
    pub fn host(&self) -> &str {
        let authority = self.uri.authority().map(|a| a.as_str());
        authority.or_else(|| self.header("host")).unwrap_or("")
    }

    /// A query parameter, still percent-encoded.
    pub fn query(&self, name: &str) -> Option<&str> {
        let pairs = self.uri.query()?.split('&');
        pairs
            .filter_map(|pair| pair.split_once('='))
            // Some clients write `%24top` for `$top`.
            .find(|(key, _)| decoded(key).eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    /// The length of the body, if the client has announced it.
    pub fn announced_bytes(&self) -> Option<usize> {
        self.body.size_hint().exact().map(|bytes| bytes as usize)
    }

    pub fn body_is_empty(&self) -> bool {
        self.body.is_end_stream()
    }

    /// Reads the whole body; none if it is longer than `max`.
    pub async fn read_body(&mut self, max: usize) -> Result<Option<Bytes>, BodyReadError> {
        let _waiting = self.connection.begin_body();
        let mut charge = match self.charge.take() {
            Some(charge) => charge,
            None => self.management_charge(),
        };
        let reading = read_body(&mut self.body, max, &self.connection, &self.limits, &mut charge);
        let read = timeout(BODY_TIMEOUT, reading).await;
        let read = read.unwrap_or(Err(BodyReadError::TooSlow(BODY_TIMEOUT)));
        self.charge = Some(charge);
        if let Err(cut) = &read {
            self.is_cut = true;
            match cut {
                BodyReadError::Broken => {}
                BodyReadError::TooSlow(_) => self.limits.report(ClientLimit::BodyStall, self.peer),
                BodyReadError::NoRoom => self.limits.report(ClientLimit::BodyRoom, self.peer),
            }
        }
        read
    }

    /// Strangers together get no more than two thirds of the room; clients with a credential have shares of
    /// their own. A login always fits.
    fn management_charge(&self) -> BodyCharge {
        let room: &Arc<BodyMemory> = &self.limits.management_bodies;
        let principal = self.principal.get();
        let shares = room.shares(principal.is_some(), principal, client_network(self.peer));
        BodyCharge::new(room.clone(), shares, SMALL_BODY_BYTES)
    }

    /// Reads the rest of a body that was refused: most clients read the answer only after they have
    /// sent everything, and closing the connection early would hide the answer.
    async fn discard_body(&mut self) {
        // A client that sent `Expect` waits for the answer before it sends the body.
        if self.is_cut || self.body.is_end_stream() || self.headers.contains_key(EXPECT) {
            return;
        }
        let _waiting = self.connection.begin_body();
        let discard = async {
            let mut taken = 0;
            while let Some(Ok(frame)) = self.body.frame().await {
                taken += frame.data_ref().map_or(0, Bytes::len);
                if taken > UNWANTED_BYTES_MAX {
                    return;
                }
            }
        };
        // After this time the connection is closed.
        let _ = timeout(UNWANTED_TIMEOUT, discard).await;
    }
}

/// Runs a long computation while the other tasks of the worker thread continue elsewhere.
pub fn compute_off_worker<T>(compute: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => tokio::task::block_in_place(compute),
        // Single-threaded tests have no other thread to move tasks to.
        _ => compute(),
    }
}

/// Why a body was not read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyReadError {
    /// The connection broke.
    Broken,
    /// Too few bytes arrived within this time.
    TooSlow(Duration),
    /// The memory for bodies is in use.
    NoRoom,
}

impl BodyReadError {
    pub fn status(self) -> u16 {
        match self {
            BodyReadError::Broken => 400,
            BodyReadError::TooSlow(_) => 408,
            BodyReadError::NoRoom => 429,
        }
    }

    /// Message for the client, without a full stop.
    pub fn reason(self) -> String {
        match self {
            BodyReadError::Broken => "the body was cut short".to_owned(),
            BodyReadError::TooSlow(time) => {
                format!("the body did not keep coming: too little of it arrived within {time:?}")
            }
            BodyReadError::NoRoom => {
                "too many bodies of this client are under way; try again later".to_owned()
            }
        }
    }
}

async fn read_body(
    body: &mut Incoming,
    max: usize,
    connection: &ServedConnection,
    limits: &ClientLimits,
    charge: &mut BodyCharge,
) -> Result<Option<Bytes>, BodyReadError> {
    let stall_max = limits.body_stall_max;
    let hint = body.size_hint();
    if hint.lower() > max as u64 {
        return Ok(None);
    }
    let mut first = Bytes::new();
    let mut all: Option<BytesMut> = None;
    let (mut until, mut came) = (Instant::now() + stall_max, 0);
    loop {
        let frame = match timeout_at(until, body.frame()).await {
            Ok(Some(frame)) => frame.map_err(|_| BodyReadError::Broken)?,
            Ok(None) => break,
            Err(_) => return Err(BodyReadError::TooSlow(stall_max)),
        };
        let Ok(data) = frame.into_data() else {
            continue;
        };
        connection.body_progress();
        came += data.len();
        if came >= BODY_BYTES_MIN {
            (until, came) = (Instant::now() + stall_max, 0);
        }
        let length = all.as_ref().map_or(first.len(), BytesMut::len) + data.len();
        if length > max {
            return Ok(None);
        }
        if !charge.grow(data.len()) {
            return Err(BodyReadError::NoRoom);
        }
        if let Some(all) = &mut all {
            all.extend_from_slice(&data);
        } else if first.is_empty() {
            // Most requests arrive in one piece, which is used without copying.
            first = data;
        } else {
            let expected = (hint.lower() as usize).min(BODY_BUFFER_FACTOR * length);
            let mut buffer = BytesMut::with_capacity(expected.max(length));
            buffer.extend_from_slice(&first);
            buffer.extend_from_slice(&data);
            all = Some(buffer);
        }
    }
    Ok(Some(all.map_or(first, BytesMut::freeze)))
}

/// Answers a request.
async fn answer(server: &Arc<Server>, request: Request<Incoming>, origin: ConnectionOrigin) -> Answer {
    let (head, body) = request.into_parts();
    let call = ApiCall {
        method: head.method,
        scheme: origin.scheme,
        peer: origin.ends.peer,
        local: origin.ends.local,
        uri: head.uri,
        headers: head.headers,
        body,
        id: server.request_id(),
        connection: origin.connection,
        limits: server.client_limits.clone(),
        principal: OnceLock::new(),
        charge: None,
        is_cut: false,
        retry_after_secs: AtomicU64::new(0),
        notes: crate::audit::AuditNotes::default(),
    };
    if call.headers.get_all(HOST).iter().count() > 1 {
        return finished(server, &call, bad_host(&call));
    }
    server.prepare(&call).await;
    // The path is borrowed from a clone that shares its bytes, because the call is changed while it is answered.
    let uri = call.uri.clone();
    let route = Route::parse(&call.method, uri.path());
    if !crate::audit::runs_to_completion(server, &call, &route) {
        return recorded(server, call, &route).await;
    }
    let task = {
        let server = server.clone();
        async move {
            let uri = call.uri.clone();
            let route = Route::parse(&call.method, uri.path());
            recorded(&server, call, &route).await
        }
    };
    match server.changing.spawn(task).await {
        Ok(answer) => answer,
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}

async fn recorded(server: &Arc<Server>, mut call: ApiCall, route: &Route<'_>) -> Answer {
    let mut answer = crate::audit::answer(server, &mut call, route).await;
    if !answer.status().is_success() {
        call.discard_body().await;
    }
    if call.is_cut {
        let close = HeaderValue::from_static("close");
        answer.headers_mut().insert(CONNECTION, close);
    }
    finished(server, &call, answer)
}

/// Adds the headers that the answers of every API have.
fn finished(server: &Server, call: &ApiCall, mut answer: Answer) -> Answer {
    let https = crate::sessions::is_https(server, call);
    let too_many = answer.status() == StatusCode::TOO_MANY_REQUESTS;
    let headers = answer.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // Answers may hold keys and describe one moment. Answers that may be cached say so themselves.
    headers
        .entry(CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    if https {
        let policy = HeaderValue::from_static(transport_security(call.host()));
        headers.entry(STRICT_TRANSPORT_SECURITY).or_insert(policy);
    }
    let wait = call.retry_after_secs.load(Relaxed);
    if too_many && wait > 0 {
        headers.insert(RETRY_AFTER, HeaderValue::from(wait));
    }
    answer
}

/// Browsers apply the policy to all ports of a host. On a developer's machine it would make other
/// servers at `localhost` unreachable without TLS for a year, so there it lasts five minutes.
fn transport_security(host: &str) -> &'static str {
    let name = host.split(':').next().unwrap_or_default();
    match name.eq_ignore_ascii_case("localhost") {
        true => "max-age=300",
        false => "max-age=31536000",
    }
}

/// Refuses several `Host` headers: two parties on the way could each act on a different one.
fn bad_host(call: &ApiCall) -> Answer {
    let error =
        serde_json::json!({"code": "BadRequest", "message": "The request has more than one Host header."});
    let body = serde_json::json!({"error": error}).to_string();
    json(StatusCode::BAD_REQUEST, body, &call.id)
}

/// Dispatches a request to the API of its path.
pub(crate) async fn route_to_api(server: &Arc<Server>, call: &mut ApiCall, route: &Route<'_>) -> Answer {
    match route {
        Route::Publish(PublishRoute::Topic(name)) => {
            crate::publish::topic(server, call, &decoded(name)).await
        }
        Route::Publish(PublishRoute::Domain(name)) => {
            crate::publish::domain(server, call, &decoded(name)).await
        }
        Route::Publish(PublishRoute::ByHost) => crate::publish::by_host(server, call).await,
        Route::Publish(PublishRoute::Incomplete) => crate::publish::unknown(server, call),
        Route::Edge(route) => crate::edge::answer(server, call, *route).await,
        Route::Management(path) => crate::azure::answer(server, call, *path).await,
        Route::Own(route) => crate::own_api::answer(server, call, route).await,
        Route::Login(route) => crate::login::answer(server, call, *route).await,
        Route::Validation(name) => crate::azure::validation::answer(server, call, &decoded(name)).await,
        Route::Health(HealthRoute::All) => crate::health::answer(server, call).await,
        Route::Health(HealthRoute::Live) => crate::health::live(call),
        Route::Health(HealthRoute::Ready) => crate::health::ready(server, call),
        Route::Metrics => crate::metrics::answer(server, call).await,
        Route::PortalSession | Route::Portal => crate::portal::answer(server, call).await,
        Route::Docs => crate::docs::answer(server, call),
        Route::Root if matches!(call.method, Method::GET | Method::HEAD) => to_portal(call),
        Route::Root | Route::Unknown => crate::publish::no_such_path(call),
    }
}

/// Redirects a browser that was given only host and port to the portal. The location is relative,
/// since a proxy may have another name.
fn to_portal(call: &ApiCall) -> Answer {
    let mut answer = empty(StatusCode::SEE_OTHER, &call.id);
    let portal = HeaderValue::from_static("/portal");
    answer.headers_mut().insert(LOCATION, portal);
    answer
}

/// A path segment without percent escapes.
pub fn decoded(segment: &str) -> Cow<'_, str> {
    percent_encoding::percent_decode_str(segment).decode_utf8_lossy()
}

pub fn json(status: StatusCode, body: impl Into<Bytes>, id: &str) -> Answer {
    let mut response = empty(status, id);
    *response.body_mut() = ResponseContent::Whole(Full::new(body.into()));
    let content_type = HeaderValue::from_static("application/json; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

pub fn empty(status: StatusCode, id: &str) -> Answer {
    let mut response = Response::new(ResponseContent::Whole(Full::default()));
    *response.status_mut() = status;
    if let Ok(id) = HeaderValue::from_str(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

pub fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}
