//! Sockets to requests: connections, routes, bodies, answers.

use crate::Server;
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, EXPECT, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::borrow::Cow;
use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections open at once, of one listener.
const CONNECTIONS_MAX: usize = 8192;
/// After a connection could not be accepted it is tried again this much later.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A request's head must have arrived within this time, and a TLS handshake must have ended.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// A request's body must have arrived within this time.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Of a body that nobody wants this much is still taken, so that its sender gets to read the answer …
const UNWANTED_BYTES_MAX: usize = 16 << 20;
/// … and for this long.
const UNWANTED_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_ID: HeaderName = HeaderName::from_static("x-ms-request-id");

pub type Answer = Response<Content>;

/// What is answered.
pub enum Content {
    /// All of it at once.
    Whole(Full<Bytes>),
    /// Piece by piece, until the other side lets go of the channel.
    Going(mpsc::Receiver<Bytes>),
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Content::Whole(body) => Pin::new(body).poll_frame(context),
            Content::Going(pieces) => pieces
                .poll_recv(context)
                .map(|piece| piece.map(|piece| Ok(Frame::data(piece)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Content::Whole(body) => body.is_end_stream(),
            Content::Going(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Content::Whole(body) => body.size_hint(),
            Content::Going(_) => SizeHint::default(),
        }
    }
}

/// How a listener speaks.
#[derive(Clone)]
pub enum Wire {
    Plain,
    Tls(TlsAcceptor),
}

impl Wire {
    fn scheme(&self) -> &'static str {
        match self {
            Wire::Plain => "http",
            Wire::Tls(_) => "https",
        }
    }
}

/// Serves one listener until `stop`; then lets requests under way end. Returns when all have.
pub async fn serve(server: Arc<Server>, listener: TcpListener, wire: Wire, stop: CancellationToken) {
    let tasks = TaskTracker::new();
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut troubled = false;
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = accept(&listener, &room) => accepted,
        };
        let (stream, peer, permit) = match accepted {
            Ok(accepted) => accepted,
            // The peer has gone again.
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
                // Out of file descriptors, most likely: some must close first.
                let clock = &server.wall;
                clock.sleep_until(clock.now() + ACCEPT_PAUSE).await;
                continue;
            }
        };
        troubled = false;
        let (server, wire, stop) = (server.clone(), wire.clone(), stop.clone());
        tasks.spawn(async move {
            let _permit = permit;
            let scheme = wire.scheme();
            match wire {
                Wire::Plain => connection(server, stream, scheme, peer, stop).await,
                Wire::Tls(acceptor) => {
                    if let Ok(Ok(stream)) = timeout(HEAD_TIMEOUT, acceptor.accept(stream)).await {
                        connection(server, stream, scheme, peer, stop).await;
                    }
                }
            }
        });
    }
    // What goes on for as long as someone reads it would never end.
    server.streams.end().await;
    tasks.close();
    tasks.wait().await;
}

async fn accept(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
) -> io::Result<(TcpStream, IpAddr, tokio::sync::OwnedSemaphorePermit)> {
    let permit = room.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    // It only costs time if this fails.
    let _ = stream.set_nodelay(true);
    Ok((stream, peer.ip(), permit))
}

pub(crate) async fn connection<S>(
    server: Arc<Server>,
    stream: S,
    scheme: &'static str,
    peer: IpAddr,
    stop: CancellationToken,
) where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request| {
        let server = server.clone();
        async move { Ok::<_, Infallible>(answer(&server, request, scheme, peer).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        biased;
        // A peer that closes or breaks its connection is not worth a report.
        _ = connection.as_mut() => return,
        () = stop.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

/// A request taken apart as far as all roads need it.
pub struct Call {
    pub method: Method,
    pub scheme: &'static str,
    /// Who has connected: the client, or a proxy in front of us.
    pub peer: IpAddr,
    pub uri: hyper::Uri,
    pub headers: hyper::HeaderMap,
    pub body: Incoming,
    pub id: String,
}

impl Call {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The host as the client addressed it.
    pub fn host(&self) -> &str {
        let authority = self.uri.authority().map(|a| a.as_str());
        authority.or_else(|| self.header("host")).unwrap_or("")
    }

    /// A query parameter as it was sent, still percent-encoded.
    pub fn query(&self, name: &str) -> Option<&str> {
        let pairs = self.uri.query()?.split('&');
        pairs
            .filter_map(|pair| pair.split_once('='))
            // Some clients write `%24top` for `$top`.
            .find(|(key, _)| decoded(key).eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    /// How long the body will be, if the client has said so.
    pub fn announced_bytes(&self) -> Option<usize> {
        self.body.size_hint().exact().map(|bytes| bytes as usize)
    }

    /// The whole body, or none if it is longer than `max`.
    pub async fn read_body(&mut self, max: usize) -> Result<Option<Bytes>, CutShort> {
        let read = timeout(BODY_TIMEOUT, read_body(&mut self.body, max)).await;
        read.map_err(|_| CutShort)?.map_err(|_| CutShort)
    }

    /// Takes what is left of a body that was refused: most clients look for an answer only after they
    /// have sent everything, and a connection that is closed under them would hide it.
    async fn discard_body(&mut self) {
        // Whoever asks first has not sent it.
        if self.body.is_end_stream() || self.headers.contains_key(EXPECT) {
            return;
        }
        let discard = async {
            let mut taken = 0;
            while let Some(Ok(frame)) = self.body.frame().await {
                taken += frame.data_ref().map_or(0, Bytes::len);
                if taken > UNWANTED_BYTES_MAX {
                    return;
                }
            }
        };
        // Beyond the time the connection is closed.
        let _ = timeout(UNWANTED_TIMEOUT, discard).await;
    }
}

/// Runs a long computation. The other tasks of the worker thread go on elsewhere meanwhile.
pub fn off_worker<T>(compute: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => tokio::task::block_in_place(compute),
        // Tests with a single thread: there is no other to move them to.
        _ => compute(),
    }
}

/// The connection broke, or the rest did not come in time.
#[derive(Debug)]
pub struct CutShort;

async fn read_body(body: &mut Incoming, max: usize) -> Result<Option<Bytes>, hyper::Error> {
    let hint = body.size_hint();
    if hint.lower() > max as u64 {
        return Ok(None);
    }
    let mut first = Bytes::new();
    let mut all: Option<BytesMut> = None;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        let length = all.as_ref().map_or(first.len(), BytesMut::len) + data.len();
        if length > max {
            return Ok(None);
        }
        if let Some(all) = &mut all {
            all.extend_from_slice(&data);
        } else if first.is_empty() {
            // Most requests arrive in one piece, which is then used as it is.
            first = data;
        } else {
            let mut buffer = BytesMut::with_capacity((hint.lower() as usize).max(length));
            buffer.extend_from_slice(&first);
            buffer.extend_from_slice(&data);
            all = Some(buffer);
        }
    }
    Ok(Some(all.map_or(first, BytesMut::freeze)))
}

/// Answers a request.
async fn answer(
    server: &Arc<Server>,
    request: Request<Incoming>,
    scheme: &'static str,
    peer: IpAddr,
) -> Answer {
    let (head, body) = request.into_parts();
    let mut call = Call {
        method: head.method,
        scheme,
        peer,
        uri: head.uri,
        headers: head.headers,
        body,
        id: server.request_id(),
    };
    server.prepare(&call).await;
    let path = call.uri.path().to_owned();
    let answer = crate::behind::answer(server, &mut call, &path, &Segments::of(&path)).await;
    if !answer.status().is_success() {
        call.discard_body().await;
    }
    answer
}

/// The road of a path.
pub(crate) async fn road(
    server: &Arc<Server>,
    call: &mut Call,
    path: &str,
    segments: &Segments<'_>,
) -> Answer {
    let is = |at: usize, word: &str| segments.get(at).eq_ignore_ascii_case(word);
    match segments.count() {
        4 if is(2, "api") && is(3, "events") && is(0, "topics") => {
            crate::publish::topic(server, call, &decoded(segments.get(1))).await
        }
        4 if is(2, "api") && is(3, "events") && is(0, "domains") => {
            crate::publish::domain(server, call, &decoded(segments.get(1))).await
        }
        2 if is(0, "api") && is(1, "events") => crate::publish::by_host(server, call).await,
        3 if is(0, "eventsubscriptions") && is(2, "validate") => {
            crate::azure::validation::answer(server, call, &decoded(segments.get(1))).await
        }
        1 if is(0, "healthz") => crate::health::answer(server, call).await,
        2 if is(0, "healthz") && is(1, "live") => crate::health::live(call),
        2 if is(0, "healthz") && is(1, "ready") => crate::health::ready(server, call),
        1 if is(0, "metrics") => crate::metrics::answer(server, call).await,
        _ if is(0, "portal") => crate::portal::answer(server, call).await,
        _ if is(0, "docs") => crate::docs::answer(server, call),
        _ if is(0, "postrider") => crate::ours::answer(server, call, segments).await,
        _ if is(0, "topics") => crate::edge::answer(server, call, segments).await,
        // Before their words are told apart: resource ids have many more segments than other paths.
        _ if crate::azure::is_path(path) => crate::azure::answer(server, call).await,
        _ if crate::login::is_path(segments) => crate::login::answer(server, call, segments).await,
        _ => crate::publish::unknown(server, call),
    }
}

/// The parts of a path between slashes; empty ones do not count.
pub struct Segments<'a> {
    parts: [&'a str; Segments::MAX],
    /// May be greater than `MAX`: no route is that long.
    len: usize,
}

impl<'a> Segments<'a> {
    const MAX: usize = 6;

    pub fn of(path: &'a str) -> Segments<'a> {
        let mut segments = Segments {
            parts: [""; Segments::MAX],
            len: 0,
        };
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if let Some(place) = segments.parts.get_mut(segments.len) {
                *place = part;
            }
            segments.len += 1;
        }
        segments
    }

    pub fn count(&self) -> usize {
        self.len
    }

    /// Empty if there is none.
    pub fn get(&self, at: usize) -> &'a str {
        self.parts.get(at).copied().unwrap_or("")
    }
}

/// A path segment without percent escapes.
pub fn decoded(segment: &str) -> Cow<'_, str> {
    percent_encoding::percent_decode_str(segment).decode_utf8_lossy()
}

pub fn json(status: StatusCode, body: impl Into<Bytes>, id: &str) -> Answer {
    let mut response = empty(status, id);
    *response.body_mut() = Content::Whole(Full::new(body.into()));
    let content_type = HeaderValue::from_static("application/json; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

pub fn empty(status: StatusCode, id: &str) -> Answer {
    let mut response = Response::new(Content::Whole(Full::default()));
    *response.status_mut() = status;
    if let Ok(id) = HeaderValue::from_str(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

pub fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}
