//! The transport against real sockets on loopback.
//!
//! Peers are scripted byte by byte. Time stands still unless a test moves it.

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};
use postrider_core::body::{BodyBuilder, RenderOutput, SHARED_PIECE_MIN};
use postrider_core::time::{Clock, Sleep, Timestamp};
use postrider_engine::deliver::{
    DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport, SendGuard, TransportFailure,
    TransportFailureKind,
};
use postrider_engine::in_flight::InFlightCharge;
use postrider_transport::{Config, EgressPolicy, ForwardProxy, HttpTransport, NameResolver, SNIPPET_MAX};
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::task::coop::consume_budget;

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

// ---- time ----

struct TransportTestClock {
    now: watch::Sender<Timestamp>,
    /// All deadlines that were ever slept for.
    deadlines: watch::Sender<Vec<Timestamp>>,
}

impl TransportTestClock {
    fn new() -> Arc<TransportTestClock> {
        Arc::new(TransportTestClock {
            now: watch::Sender::new(Timestamp::from_secs(1_000_000)),
            deadlines: watch::Sender::new(Vec::new()),
        })
    }

    fn advance(&self, by: Duration) {
        self.now.send_modify(|now| *now = *now + by);
    }

    /// Waits until a task sleeps for `time`, then lets it pass.
    async fn pass(&self, time: Duration) {
        let deadline = self.now() + time;
        let mut deadlines = self.deadlines.subscribe();
        deadlines.wait_for(|all| all.contains(&deadline)).await.unwrap();
        self.advance(time);
    }
}

impl Clock for TransportTestClock {
    fn now(&self) -> Timestamp {
        *self.now.borrow()
    }

    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        self.deadlines.send_modify(|all| all.push(deadline));
        let mut now = self.now.subscribe();
        Box::pin(async move {
            now.wait_for(|now| *now >= deadline).await.unwrap();
        })
    }
}

// ---- names ----

/// Returns the answers in turn; the last one repeats.
struct ScriptedResolver(Mutex<Vec<io::Result<Vec<IpAddr>>>>);

#[async_trait]
impl NameResolver for ScriptedResolver {
    async fn addresses(&self, _host: &str) -> io::Result<Vec<IpAddr>> {
        let mut answers = self.0.lock().unwrap();
        if answers.len() > 1 {
            return answers.remove(0);
        }
        match &answers[0] {
            Ok(addresses) => Ok(addresses.clone()),
            Err(error) => Err(error.kind().into()),
        }
    }
}

fn resolver(answers: &[&[&str]]) -> Arc<dyn NameResolver> {
    let parse = |ips: &&[&str]| Ok(ips.iter().map(|ip| ip.parse().unwrap()).collect());
    Arc::new(ScriptedResolver(Mutex::new(answers.iter().map(parse).collect())))
}

/// Never answers.
struct SilentResolver;

#[async_trait]
impl NameResolver for SilentResolver {
    async fn addresses(&self, _host: &str) -> io::Result<Vec<IpAddr>> {
        std::future::pending().await
    }
}

// ---- the peer ----

/// Answers every request with the same bytes and keeps connections open.
struct RepeatingPeer {
    address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    /// Each request's head and body, as it came over the wire.
    requests: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl RepeatingPeer {
    async fn answering(response: impl Into<String>) -> RepeatingPeer {
        RepeatingPeer::listening(TcpListener::bind("127.0.0.1:0").await.unwrap(), response)
    }

    fn listening(listener: TcpListener, response: impl Into<String>) -> RepeatingPeer {
        let response = response.into();
        RepeatingPeer::scripted(listener, move |_| response.clone())
    }

    fn scripted(
        listener: TcpListener,
        answer: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> RepeatingPeer {
        let address = listener.local_addr().unwrap();
        let accepted = Arc::new(AtomicUsize::new(0));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (counter, seen, answer) = (accepted.clone(), requests.clone(), Arc::new(answer));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::SeqCst);
                let (seen, answer) = (seen.clone(), answer.clone());
                connections.spawn(async move {
                    let mut stream = BufReader::new(stream);
                    while let Some(request) = read_request(&mut stream).await {
                        let response = answer(&request);
                        seen.lock().unwrap().push(request);
                        if stream.write_all(response.as_bytes()).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        RepeatingPeer {
            address,
            accepted,
            requests,
            _tasks: tasks,
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

/// A request with its body, or `None` once the client has gone.
async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        text.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(text).unwrap();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    stream.read_exact(&mut body).await.ok()?;
    Some(head + std::str::from_utf8(&body).unwrap())
}

async fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    (listener, url)
}

/// Accepts one connection, reads one request and answers with these bytes.
async fn answer_one(listener: &TcpListener, response: &str) -> TcpStream {
    let (mut stream, _) = listener.accept().await.unwrap();
    read_request(&mut stream).await.unwrap();
    stream.write_all(response.as_bytes()).await.unwrap();
    stream
}

/// Waits until the other side has closed the connection, cleanly or not.
async fn closed(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
}

/// Returns once the runtime has processed all socket events so far: events are reported in order,
/// and this one comes last.
async fn sockets_settle() {
    let (listener, _) = listener().await;
    let address = listener.local_addr().unwrap();
    let (accepted, connected) = tokio::join!(listener.accept(), TcpStream::connect(address));
    let (mut accepted, mut connected) = (accepted.unwrap().0, connected.unwrap());
    accepted.write_all(b"!").await.unwrap();
    connected.read_u8().await.unwrap();
}

// ---- the client ----

fn transport(config: Config) -> Arc<HttpTransport> {
    Arc::new(HttpTransport::new(config, TransportTestClock::new()).unwrap())
}

fn transport_resolving(config: Config, answers: &[&[&str]]) -> Arc<HttpTransport> {
    Arc::new(HttpTransport::with_resolver(config, TransportTestClock::new(), resolver(answers)).unwrap())
}

fn post(url: &str, body: impl Into<Bytes>) -> DeliveryRequest {
    DeliveryRequest {
        method: Method::POST,
        url: Arc::new(url.parse().unwrap()),
        headers: Arc::default(),
        more: Vec::new(),
        body: body.into().into(),
        guard: None,
    }
}

async fn answered(transport: &Arc<HttpTransport>, url: &str) -> DeliveryAnswer {
    match transport.clone().send(post(url, "[]")).await {
        DeliveryReply::Answered(answer) => answer,
        DeliveryReply::Failed(failure) => panic!("{failure:?}"),
    }
}

async fn failed(transport: &Arc<HttpTransport>, url: &str) -> TransportFailure {
    match transport.clone().send(post(url, "[]")).await {
        DeliveryReply::Answered(answer) => panic!("{answer:?}"),
        DeliveryReply::Failed(failure) => failure,
    }
}

// ---- what is sent ----

#[tokio::test]
async fn a_body_of_many_shared_pieces_arrives_whole_and_is_dropped_when_it_is_sent() {
    let (listener, url) = listener().await;
    let source = Bytes::from("0123456789".repeat(SHARED_PIECE_MIN));
    let mut body = BodyBuilder::with_capacity(0);
    body.refer_to(&source);
    for start in 0..50 {
        body.text().extend_from_slice(b"<>");
        body.write(&source[start..start + 2 * SHARED_PIECE_MIN]);
    }
    let body = body.finish();
    assert_eq!(body.pieces().count(), 100);
    let expected = body.to_bytes();
    let mut request = post(&url, "");
    request.body = body.into();
    let charge = Arc::new(InFlightCharge::default());
    request.body.charge = Some(charge.clone());
    let mut tasks = JoinSet::new();
    let transport = transport(Config::default());
    tasks.spawn(async move { transport.send(request).await });
    let (mut stream, _) = listener.accept().await.unwrap();
    let got = read_request(&mut stream).await.unwrap();
    assert!(got.as_bytes().ends_with(&expected), "{} bytes", got.len());
    // Not answered yet: the connection waits, while the body and its charge are dropped.
    while Arc::strong_count(&charge) > 1 {
        tokio::task::yield_now().await;
    }
    stream.write_all(OK.as_bytes()).await.unwrap();
    assert!(matches!(
        tasks.join_next().await,
        Some(Ok(DeliveryReply::Answered(_)))
    ));
}

#[tokio::test]
async fn a_request_that_is_withdrawn_while_it_connects_is_not_sent() {
    let (listener, url) = listener().await;
    let transport = transport(Config::default());
    let guarded = |url: &str, may_send: bool| DeliveryRequest {
        guard: Some(SendGuard::new(move || may_send)),
        ..post(url, "[]")
    };
    match transport.clone().send(guarded(&url, false)).await {
        DeliveryReply::Failed(failure) => assert_eq!(failure.kind, TransportFailureKind::Withdrawn),
        DeliveryReply::Answered(answer) => panic!("{answer:?}"),
    }
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut sent = Vec::new();
    stream.read_to_end(&mut sent).await.unwrap();
    assert!(sent.is_empty(), "{}", String::from_utf8_lossy(&sent));

    let mut tasks = JoinSet::new();
    tasks.spawn(async move { transport.send(guarded(&url, true)).await });
    let _stream = answer_one(&listener, OK).await;
    assert!(matches!(
        tasks.join_next().await,
        Some(Ok(DeliveryReply::Answered(_)))
    ));
}

#[tokio::test]
async fn a_request_is_the_callers_headers_a_host_and_a_length() {
    let peer = RepeatingPeer::answering(OK).await;
    let transport = transport(Config::default());
    let address = peer.address;
    let mut request = post(&format!("http://user:secret@{address}/a/b?c=d%20e"), "[1]");
    for (name, value) in [
        ("aeg-event-type", "Notification"),
        ("content-length", "99"),
        ("transfer-encoding", "chunked"),
    ] {
        Arc::make_mut(&mut request.headers)
            .insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    assert!(matches!(
        transport.clone().send(request).await,
        DeliveryReply::Answered(_)
    ));

    // A URL without a path still asks for one, and a POST without a body says so.
    assert!(matches!(
        transport
            .clone()
            .send(post(&format!("http://{address}?q=1"), ""))
            .await,
        DeliveryReply::Answered(_)
    ));

    let mut options = post(&format!("http://{address}"), "");
    options.method = Method::OPTIONS;
    assert!(matches!(
        transport.clone().send(options).await,
        DeliveryReply::Answered(_)
    ));

    assert_eq!(
        peer.requests(),
        [
            format!(
                "POST /a/b?c=d%20e HTTP/1.1\r\naeg-event-type: Notification\r\n\
                 host: {address}\r\ncontent-length: 3\r\n\r\n[1]"
            ),
            format!("POST /?q=1 HTTP/1.1\r\nhost: {address}\r\ncontent-length: 0\r\n\r\n"),
            format!("OPTIONS / HTTP/1.1\r\nhost: {address}\r\n\r\n"),
        ]
    );
}

#[tokio::test]
async fn a_user_agent_is_sent_if_configured_and_not_brought() {
    let peer = RepeatingPeer::answering(OK).await;
    let transport = transport(Config {
        user_agent: Some("postrider/1".into()),
        ..Config::default()
    });
    answered(&transport, &peer.url("/")).await;
    let mut request = post(&peer.url("/"), "");
    request
        .more
        .push((http::header::USER_AGENT, HeaderValue::from_static("mine")));
    transport.clone().send(request).await;
    let requests = peer.requests();
    assert!(
        requests[0].contains("\r\nuser-agent: postrider/1\r\n"),
        "{}",
        requests[0]
    );
    assert!(
        requests[1].contains("\r\nuser-agent: mine\r\n"),
        "{}",
        requests[1]
    );
}

#[test]
fn a_config_that_cannot_work_is_refused() {
    let refused = |config| {
        HttpTransport::new(config, TransportTestClock::new())
            .err()
            .unwrap()
            .to_string()
    };
    assert_eq!(
        refused(Config {
            user_agent: Some("a\nb".into()),
            ..Config::default()
        }),
        "user agent \"a\\nb\" cannot be sent as a header"
    );
    let root = refused(Config {
        extra_roots: vec![vec![1, 2, 3].into()],
        ..Config::default()
    });
    assert!(
        root.starts_with("extra root certificate number 1 is not usable"),
        "{root}"
    );
}

// ---- connections are kept ----

#[tokio::test]
async fn a_connection_is_used_again() {
    let peer = RepeatingPeer::answering(OK).await;
    let transport = transport(Config::default());
    let first = answered(&transport, &peer.url("/")).await;
    assert_eq!((first.status, &first.body[..]), (200, &b"ok"[..]));
    assert!(first.timings.connect > Duration::ZERO);
    for _ in 0..3 {
        let answer = answered(&transport, &peer.url("/")).await;
        assert_eq!((answer.status, &answer.body[..]), (200, &b"ok"[..]));
        assert_eq!(answer.timings.connect, Duration::ZERO);
        assert!(answer.timings.first_byte <= answer.timings.total);
    }
    assert_eq!((peer.accepted(), transport.idle()), (1, 1));
}

#[tokio::test]
async fn answers_of_every_framing_leave_the_connection_usable() {
    for (response, status, body) in [
        ("HTTP/1.1 204 No Content\r\n\r\n", 204, ""),
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, ""),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            200,
            "abcde",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: t\r\n\r\n1\r\na\r\n0\r\nt: v\r\n\r\n",
            200,
            "a",
        ),
        (
            "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 202 Accepted\r\ncontent-length: 1\r\n\r\nx",
            202,
            "x",
        ),
        (
            "HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 1\r\n\r\nx",
            503,
            "x",
        ),
    ] {
        let peer = RepeatingPeer::answering(response).await;
        let transport = transport(Config::default());
        for _ in 0..2 {
            let answer = answered(&transport, &peer.url("/")).await;
            assert_eq!(
                (answer.status, &answer.body[..]),
                (status, body.as_bytes()),
                "{response}"
            );
        }
        assert_eq!(peer.accepted(), 1, "{response}");
    }
}

// The peer closes the idle connection; the next request must not notice.
#[tokio::test]
async fn a_connection_closed_while_idle_is_replaced() {
    let (listener, url) = listener().await;
    let transport = transport(Config::default());
    let (_, stream) = tokio::join!(answered(&transport, &url), answer_one(&listener, OK));
    assert_eq!(transport.idle(), 1);
    drop(stream);
    sockets_settle().await;
    let (answer, _stream) = tokio::join!(answered(&transport, &url), answer_one(&listener, OK));
    assert_eq!(answer.status, 200);
    assert!(answer.timings.connect > Duration::ZERO);
}

// The peer reads the second request on a kept connection and hangs up: it may have acted on it.
#[tokio::test]
async fn a_request_the_peer_may_have_seen_is_not_sent_again() {
    let (listener, url) = listener().await;
    let transport = transport(Config::default());
    let (_, mut stream) = tokio::join!(answered(&transport, &url), answer_one(&listener, OK));
    let (failure, ()) = tokio::join!(failed(&transport, &url), async {
        read_request(&mut stream).await.unwrap();
        drop(stream);
    });
    assert_eq!(failure.kind, TransportFailureKind::Socket);
    sockets_settle().await;
    let again = poll_fn(|cx| Poll::Ready(listener.poll_accept(cx).is_ready())).await;
    assert!(!again, "a second connection was made");
}

#[tokio::test]
async fn a_connection_the_peer_will_close_is_not_kept() {
    for response in [
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        // Bytes after an answer belong to no request.
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ] {
        let peer = RepeatingPeer::answering(response).await;
        let transport = transport(Config::default());
        for _ in 0..2 {
            answered(&transport, &peer.url("/")).await;
            assert_eq!(transport.idle(), 0, "{response}");
        }
        assert_eq!(peer.accepted(), 2, "{response}");
    }
}

#[tokio::test]
async fn connections_idle_for_too_long_are_closed() {
    let (listener, url) = listener().await;
    let clock = TransportTestClock::new();
    let transport = Arc::new(HttpTransport::new(Config::default(), clock.clone()).unwrap());
    let (_, mut first) = tokio::join!(answered(&transport, &url), answer_one(&listener, OK));

    clock.advance(Duration::from_secs(21));
    let (_, mut second) = tokio::join!(answered(&transport, &url), answer_one(&listener, OK));
    closed(&mut first).await;

    clock.advance(Duration::from_secs(21));
    transport.sweep();
    assert_eq!(transport.idle(), 0);
    closed(&mut second).await;
}

#[tokio::test]
async fn dropping_the_future_closes_the_connection() {
    let (listener, url) = listener().await;
    let transport = transport(Config::default());
    let (arrived, arrival) = oneshot::channel();
    let mut sending = JoinSet::new();
    let sender = transport.clone();
    sending.spawn(async move { sender.send(post(&url, "[]")).await });
    let (_, ()) = tokio::join!(
        async {
            arrival.await.unwrap();
            sending.shutdown().await;
        },
        async {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_request(&mut stream).await.unwrap();
            arrived.send(()).unwrap();
            closed(&mut stream).await;
        }
    );
    assert_eq!(transport.idle(), 0);
}

// ---- answers as they come ----

#[tokio::test]
async fn a_redirect_is_an_answer() {
    let elsewhere = RepeatingPeer::answering(OK).await;
    let location = elsewhere.url("/");
    let peer = RepeatingPeer::answering(format!(
        "HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n"
    ))
    .await;
    let answer = answered(&transport(Config::default()), &peer.url("/")).await;
    assert_eq!(answer.status, 302);
    assert_eq!(answer.headers["location"], location);
    assert_eq!(elsewhere.accepted(), 0);
}

#[tokio::test]
async fn a_huge_body_is_cut_off_and_its_connection_closed() {
    let (listener, url) = listener().await;
    let transport = transport(Config::default());
    let (answer, ()) = tokio::join!(answered(&transport, &url), async {
        let head = "HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n";
        let mut stream = answer_one(&listener, head).await;
        // Ends only when the client closes the connection.
        while stream.write_all(&[b'x'; 64 * 1024]).await.is_ok() {}
    });
    assert_eq!(answer.status, 200);
    assert_eq!(answer.body, vec![b'x'; SNIPPET_MAX]);
    assert_eq!(transport.idle(), 0);
}

#[tokio::test]
async fn a_body_at_the_cap_is_read_to_its_end() {
    for (length, kept) in [(1000, 1), (1001, 0)] {
        let body = "x".repeat(length);
        let peer = RepeatingPeer::answering(format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
        .await;
        let transport = transport(Config {
            body_cap: 1000,
            ..Config::default()
        });
        answered(&transport, &peer.url("/")).await;
        assert_eq!(transport.idle(), kept, "{length}");
    }
}

#[tokio::test]
async fn a_trickling_body_is_left_when_its_time_is_up() {
    let (listener, url) = listener().await;
    let clock = TransportTestClock::new();
    let transport = Arc::new(HttpTransport::new(Config::default(), clock.clone()).unwrap());
    let (answer, ()) = tokio::join!(answered(&transport, &url), async {
        let head = "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n";
        let mut stream = answer_one(&listener, head).await;
        clock.pass(Duration::from_secs(5)).await;
        closed(&mut stream).await;
    });
    assert_eq!((answer.status, &answer.body[..]), (201, &b"a"[..]));
    assert_eq!(transport.idle(), 0);
}

#[tokio::test]
async fn a_body_that_breaks_off_does_not_undo_its_status() {
    let (listener, url) = listener().await;
    let transport = transport(Config::default());
    let (answer, ()) = tokio::join!(answered(&transport, &url), async {
        answer_one(&listener, "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc").await;
    });
    assert_eq!((answer.status, &answer.body[..]), (200, &b"abc"[..]));
    assert_eq!(transport.idle(), 0);
}

#[tokio::test]
async fn what_is_not_an_answer_is_a_socket_failure() {
    let head_too_long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(1 << 20));
    let heads_too_many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(1000));
    for response in [
        "hello\r\n\r\n",
        "HTTP/1.1 banana\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        "HTTP/1.1 200",
        "",
        &head_too_long,
        &heads_too_many,
    ] {
        let (listener, url) = listener().await;
        let url = url + "?secret=1";
        let transport = transport(Config::default());
        let (failure, ()) = tokio::join!(failed(&transport, &url), async {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_request(&mut stream).await.unwrap();
            // Fails when the client gives up in between.
            let _ = stream.write_all(response.as_bytes()).await;
            let _ = stream.shutdown().await;
        });
        let start = &response[..response.len().min(40)];
        assert_eq!(failure.kind, TransportFailureKind::Socket, "{start}");
        assert!(!failure.detail.contains("secret"), "{}", failure.detail);
        assert!(failure.detail.starts_with("127.0.0.1:"), "{}", failure.detail);
        assert_eq!(transport.idle(), 0, "{start}");
    }
}

/// Answers a request with `start`, then with `endless` until the client hangs up.
async fn answer_endlessly(listener: &TcpListener, start: &str, endless: &str) {
    let mut stream = answer_one(listener, start).await;
    let piece = endless.repeat(1 + 16 * 1024 / endless.len());
    while stream.write_all(piece.as_bytes()).await.is_ok() {}
}

// Time stands still: only a limit on the bytes read ends these.
#[tokio::test]
async fn interim_answers_are_bounded() {
    for endless in [
        "HTTP/1.1 100 Continue\r\n\r\n".to_owned(),
        format!("HTTP/1.1 103 Early Hints\r\nlink: {}\r\n\r\n", "x".repeat(8000)),
        "x: y\r\n".to_owned(),
    ] {
        let (listener, url) = listener().await;
        let transport = transport(Config::default());
        let start = match endless.starts_with("HTTP") {
            true => "",
            false => "HTTP/1.1 102 Processing\r\n",
        };
        let (failure, ()) = tokio::join!(
            failed(&transport, &url),
            answer_endlessly(&listener, start, &endless)
        );
        assert_eq!(failure.kind, TransportFailureKind::Socket);
        assert_eq!(transport.idle(), 0);
    }
    // A few are skipped.
    let (listener, url) = listener().await;
    let transport = transport(Config::default());
    let response = format!("{}{OK}", "HTTP/1.1 102 Processing\r\n\r\n".repeat(30));
    let (answer, _stream) = tokio::join!(answered(&transport, &url), answer_one(&listener, &response));
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn the_framing_of_a_body_is_bounded() {
    let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let extension = format!("1;x={}\r\na\r\n", "y".repeat(4000));
    for (start, endless) in [
        (head.to_owned(), extension.as_str()),
        (format!("{head}0\r\n"), "trailer: x\r\n"),
        (head.to_owned(), "0"),
    ] {
        let (listener, url) = listener().await;
        let transport = transport(Config {
            body_cap: usize::MAX,
            ..Config::default()
        });
        let (answer, ()) = tokio::join!(
            answered(&transport, &url),
            answer_endlessly(&listener, &start, endless)
        );
        assert_eq!(answer.status, 200);
        assert_eq!(transport.idle(), 0, "{endless}");
    }
}

// ---- where it may go ----

#[tokio::test]
async fn a_refused_connection_is_a_socket_failure() {
    let (listener, url) = listener().await;
    drop(listener);
    let url = url.replace("http://", "http://user:secret@") + "?secret=1";
    let failure = failed(&transport(Config::default()), &url).await;
    assert_eq!(failure.kind, TransportFailureKind::Socket);
    assert!(failure.detail.contains("refused"), "{}", failure.detail);
    assert!(!failure.detail.contains("secret"), "{}", failure.detail);
}

#[tokio::test]
async fn a_name_without_addresses_is_a_resolution_failure() {
    let nothing = transport_resolving(Config::default(), &[&[]]);
    let failure = failed(&nothing, "http://hooks.test/?secret=1").await;
    assert_eq!(failure.kind, TransportFailureKind::Resolution);
    assert_eq!(
        failure.detail,
        "hooks.test: the name could not be resolved: it has no addresses"
    );

    let broken = ScriptedResolver(Mutex::new(vec![Err(io::ErrorKind::NotFound.into())]));
    let broken = HttpTransport::with_resolver(Config::default(), TransportTestClock::new(), Arc::new(broken));
    let failure = failed(&Arc::new(broken.unwrap()), "http://hooks.test/").await;
    assert_eq!(failure.kind, TransportFailureKind::Resolution);
}

#[tokio::test]
async fn names_are_resolved_by_the_operating_system() {
    let peer = RepeatingPeer::answering(OK).await;
    let url = format!("http://localhost:{}/", peer.address.port());
    assert_eq!(answered(&transport(Config::default()), &url).await.status, 200);
}

#[tokio::test]
async fn a_forbidden_address_is_not_dialled() {
    let peer = RepeatingPeer::answering(OK).await;
    let port = peer.address.port();
    for (answers, host) in [
        (&["169.254.169.254", "fe80::1"][..], "hooks.test"),
        (&["::ffff:169.254.169.254"], "hooks.test"),
        (&["127.0.0.1"], "169.254.169.254"),
        (&["127.0.0.1"], "[::ffff:169.254.169.254]"),
        (&["127.0.0.1"], "[fd00:ec2::254]"),
    ] {
        let transport = transport_resolving(Config::default(), &[answers]);
        let failure = failed(&transport, &format!("http://{host}:{port}/")).await;
        assert_eq!(failure.kind, TransportFailureKind::Forbidden, "{host}");
        assert!(
            failure.detail.contains("egress.policy forbids"),
            "{}",
            failure.detail
        );
    }
    let internet = Config {
        egress: EgressPolicy::Internet,
        ..Config::default()
    };
    let failure = failed(&transport(internet), &peer.url("/")).await;
    assert_eq!(failure.kind, TransportFailureKind::Forbidden);
    assert!(failure.detail.contains("only https"), "{}", failure.detail);
    assert_eq!(peer.accepted(), 0);
}

/// Two peers that differ only in their address; the second one's is denied.
async fn allowed_and_denied(response: &str) -> (RepeatingPeer, RepeatingPeer, Config) {
    let allowed = RepeatingPeer::answering(response).await;
    let denied = TcpListener::bind(("127.0.0.2", allowed.address.port()))
        .await
        .unwrap();
    let egress = EgressPolicy::Custom {
        allow: vec!["127.0.0.0/8".parse().unwrap()],
        deny: vec!["127.0.0.2/32".parse().unwrap()],
    };
    (
        allowed,
        RepeatingPeer::listening(denied, response),
        Config {
            egress,
            ..Config::default()
        },
    )
}

// The name resolves to an allowed address during the check, and to a denied one afterwards.
#[tokio::test]
async fn a_name_that_changes_its_address_is_judged_again() {
    let close = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let (allowed, denied, config) = allowed_and_denied(close).await;
    let url = format!("http://hooks.test:{}/", allowed.address.port());
    let transport = transport_resolving(config, &[&["127.0.0.1"], &["127.0.0.2"]]);
    answered(&transport, &url).await;
    assert_eq!(
        failed(&transport, &url).await.kind,
        TransportFailureKind::Forbidden
    );
    sockets_settle().await;
    assert_eq!((allowed.accepted(), denied.accepted()), (1, 0));
}

#[tokio::test]
async fn of_mixed_addresses_only_the_permitted_are_dialled() {
    let (allowed, denied, config) = allowed_and_denied(OK).await;
    let url = format!("http://hooks.test:{}/", allowed.address.port());
    let answers: &[&[&str]] = &[&["127.0.0.2", "127.0.0.1"]];
    answered(&transport_resolving(config, answers), &url).await;
    sockets_settle().await;
    assert_eq!((allowed.accepted(), denied.accepted()), (1, 0));
    // The denied peer is up and would have been first.
    answered(&transport_resolving(Config::default(), answers), &url).await;
    assert_eq!((allowed.accepted(), denied.accepted()), (1, 1));
}

#[tokio::test]
async fn an_address_that_refuses_leaves_it_to_the_next() {
    let peer = RepeatingPeer::answering(OK).await;
    let url = format!("http://hooks.test:{}/", peer.address.port());
    let transport = transport_resolving(Config::default(), &[&["127.0.0.3", "127.0.0.1"]]);
    assert_eq!(answered(&transport, &url).await.status, 200);
}

#[tokio::test]
async fn an_ipv6_literal_needs_no_resolving() {
    let peer = RepeatingPeer::listening(TcpListener::bind("[::1]:0").await.unwrap(), OK);
    let transport = transport_resolving(Config::default(), &[&[]]);
    assert_eq!(answered(&transport, &peer.url("/")).await.status, 200);
    let host = format!("\r\nhost: [::1]:{}\r\n", peer.address.port());
    assert!(peer.requests()[0].contains(&host));
}

#[tokio::test]
async fn connecting_takes_no_longer_than_allowed() {
    let config = || Config {
        connect_timeout: Duration::from_secs(3),
        ..Config::default()
    };
    let clock = TransportTestClock::new();
    let silent =
        Arc::new(HttpTransport::with_resolver(config(), clock.clone(), Arc::new(SilentResolver)).unwrap());
    let (failure, ()) = tokio::join!(
        failed(&silent, "http://hooks.test/"),
        clock.pass(Duration::from_secs(3)),
    );
    assert_eq!(failure.kind, TransportFailureKind::Resolution);

    // A peer that accepts and then sends nothing while TLS is negotiated.
    let (listener, url) = listener().await;
    let clock = TransportTestClock::new();
    let accepting = Config {
        accept_invalid_certs: true,
        ..config()
    };
    let transport = Arc::new(HttpTransport::new(accepting, clock.clone()).unwrap());
    let url = url.replace("http:", "https:");
    let (failure, ()) = tokio::join!(failed(&transport, &url), async {
        let (mut stream, _) = listener.accept().await.unwrap();
        // The first byte of the client's hello: the connection is made, the handshake is in
        // progress.
        stream.read_u8().await.unwrap();
        clock.pass(Duration::from_secs(3)).await;
        closed(&mut stream).await;
    });
    assert_eq!(failure.kind, TransportFailureKind::Socket);
    assert!(failure.detail.contains("tls: timed out"), "{}", failure.detail);
}

#[tokio::test]
async fn a_port_for_https_that_speaks_plain_http_is_named_so() {
    let (listener, url) = listener().await;
    let accepting = Config {
        accept_invalid_certs: true,
        ..Config::default()
    };
    let transport = Arc::new(HttpTransport::new(accepting, TransportTestClock::new()).unwrap());
    let url = url.replace("http:", "https:");
    let (failure, ()) = tokio::join!(failed(&transport, &url), async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_u8().await.unwrap();
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .await
            .unwrap();
        closed(&mut stream).await;
    });
    assert!(
        failure.detail.contains(postrider_transport::NOT_TLS),
        "{}",
        failure.detail
    );
}

// ---- TLS ----

mod tls {
    use super::*;
    use postrider_transport::CertificateDer;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use rustls::ServerConfig;
    use rustls::crypto::ring;
    use rustls::pki_types::PrivateKeyDer;
    use tokio_rustls::TlsAcceptor;

    /// A certificate authority of our own and a server certificate it issued.
    fn authority() -> (CertificateDer<'static>, TlsAcceptor) {
        let ca_key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = ca.self_signed(&ca_key).unwrap().der().clone();
        let issuer = Issuer::new(ca, ca_key);
        let key = KeyPair::generate().unwrap();
        let names = vec!["hooks.test".into(), "127.0.0.1".into()];
        let leaf = CertificateParams::new(names)
            .unwrap()
            .signed_by(&key, &issuer)
            .unwrap();
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![leaf.der().clone()],
                PrivateKeyDer::Pkcs8(key.serialize_der().into()),
            )
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        (root, TlsAcceptor::from(Arc::new(config)))
    }

    /// Serves one connection; returns the name and the protocol that the client asked for.
    async fn serve(
        listener: &TcpListener,
        acceptor: &TlsAcceptor,
        requests: usize,
    ) -> io::Result<(Option<String>, Option<Vec<u8>>)> {
        let (stream, _) = listener.accept().await?;
        let mut stream = acceptor.accept(stream).await?;
        for _ in 0..requests {
            read_request(&mut stream).await.unwrap();
            stream.write_all(OK.as_bytes()).await?;
            stream.flush().await?;
        }
        let (_, session) = stream.get_ref();
        Ok((
            session.server_name().map(str::to_owned),
            session.alpn_protocol().map(<[u8]>::to_vec),
        ))
    }

    #[tokio::test]
    async fn a_private_authority_is_trusted_when_configured() {
        let (root, acceptor) = authority();
        let (listener, _) = listener().await;
        let port = listener.local_addr().unwrap().port();
        let config = Config {
            extra_roots: vec![root],
            ..Config::default()
        };
        let transport = transport_resolving(config, &[&["127.0.0.1"]]);
        for (host, name) in [("hooks.test", Some("hooks.test")), ("127.0.0.1", None)] {
            let url = format!("https://{host}:{port}/");
            let (served, ()) = tokio::join!(serve(&listener, &acceptor, 2), async {
                for _ in 0..2 {
                    assert_eq!(answered(&transport, &url).await.status, 200);
                }
            });
            assert_eq!(
                served.unwrap(),
                (name.map(str::to_owned), Some(b"http/1.1".to_vec()))
            );
        }
    }

    #[tokio::test]
    async fn a_certificate_that_proves_nothing_is_refused() {
        let (root, acceptor) = authority();
        let (listener, _) = listener().await;
        let port = listener.local_addr().unwrap().port();
        for (extra_roots, host) in [(vec![], "hooks.test"), (vec![root], "other.test")] {
            let config = Config {
                extra_roots,
                ..Config::default()
            };
            let transport = transport_resolving(config, &[&["127.0.0.1"]]);
            let url = format!("https://{host}:{port}/?secret=1");
            let (failure, served) = tokio::join!(failed(&transport, &url), serve(&listener, &acceptor, 0));
            assert_eq!(failure.kind, TransportFailureKind::Socket);
            assert!(failure.detail.contains("certificate"), "{}", failure.detail);
            assert!(!failure.detail.contains("secret"), "{}", failure.detail);
            assert!(served.is_err());
        }
    }

    #[tokio::test]
    async fn any_certificate_will_do_if_the_operator_says_so() {
        let (_, acceptor) = authority();
        let (listener, _) = listener().await;
        let url = format!("https://other.test:{}/", listener.local_addr().unwrap().port());
        let config = Config {
            accept_invalid_certs: true,
            ..Config::default()
        };
        let transport = transport_resolving(config, &[&["127.0.0.1"]]);
        let (answer, served) = tokio::join!(answered(&transport, &url), serve(&listener, &acceptor, 1));
        assert_eq!(answer.status, 200);
        served.unwrap();
    }
}

// ---- many at once ----

fn echo(request: &str) -> String {
    let body = request.split_once("\r\n\r\n").unwrap().1;
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

async fn echoed(transport: &Arc<HttpTransport>, url: &str, text: String) {
    match transport.clone().send(post(url, text.clone())).await {
        DeliveryReply::Answered(answer) => assert_eq!(answer.body, text),
        DeliveryReply::Failed(failure) => panic!("{failure:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_get_their_own_answers() {
    const TASKS: usize = 40;
    let peer = RepeatingPeer::scripted(TcpListener::bind("127.0.0.1:0").await.unwrap(), echo);
    let transport = Arc::new(transport(Config::default()));
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (transport, url) = (transport.clone(), peer.url("/"));
        tasks.spawn(async move {
            for n in 0..50 {
                echoed(&transport, &url, format!("{task} {n}")).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert!(peer.accepted() <= TASKS, "{}", peer.accepted());
    assert_eq!(transport.idle(), peer.accepted());
}

// The runtime gives a task a budget for each poll. Wherever it runs out within a send, the task
// must be woken again: a lost wake-up would hang this test.
#[tokio::test]
async fn a_send_survives_running_out_of_budget() {
    const BUDGET: usize = 128;
    let peer = RepeatingPeer::scripted(TcpListener::bind("127.0.0.1:0").await.unwrap(), echo);
    let transport = transport(Config::default());
    let url = peer.url("/");
    for left in 1..10 {
        // Every other poll has a small budget, or else nothing would ever be completed.
        for parity in [0, 1] {
            let mut send = pin!(echoed(&transport, &url, format!("{left} {parity}")));
            let mut polls = 0;
            poll_fn(|cx| {
                polls += 1;
                if polls % 2 == parity {
                    for _ in left..BUDGET {
                        assert!(pin!(consume_budget()).poll(cx).is_ready());
                    }
                }
                send.as_mut().poll(cx)
            })
            .await;
            // The next round starts with a new budget.
            tokio::task::yield_now().await;
        }
    }
}

// A single task polls all sends with one waker.
#[tokio::test]
async fn many_sends_in_one_task_get_their_own_answers() {
    const SENDS: usize = 100;
    let peer = RepeatingPeer::scripted(TcpListener::bind("127.0.0.1:0").await.unwrap(), echo);
    let transport = transport(Config::default());
    let url = peer.url("/");
    for round in 0..5 {
        let mut sends: Vec<_> = (0..SENDS)
            .map(|n| Some(Box::pin(echoed(&transport, &url, format!("{round} {n}")))))
            .collect();
        poll_fn(|cx| {
            for send in &mut sends {
                if send
                    .as_mut()
                    .is_some_and(|send| send.as_mut().poll(cx).is_ready())
                {
                    *send = None;
                }
            }
            if sends.iter().all(Option::is_none) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        assert_eq!(transport.idle(), postrider_transport::IDLE_PER_ORIGIN_MAX);
    }
}

// ---- a proxy on the way ----

/// A proxy that answers CONNECT as scripted and, if that is 200, joins the two ends.
async fn proxy(answer: &'static str) -> (SocketAddr, Arc<Mutex<Vec<String>>>, JoinSet<()>) {
    let (listener, _) = listener().await;
    let address = listener.local_addr().unwrap();
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = heads.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut tunnels = JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let seen = seen.clone();
            tunnels.spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                seen.lock().unwrap().push(head.clone());
                stream.write_all(answer.as_bytes()).await.unwrap();
                if !answer.contains(" 200 ") {
                    return;
                }
                let target = head.split(' ').nth(1).unwrap();
                let port = target.rsplit_once(':').unwrap().1;
                let mut peer = TcpStream::connect(format!("127.0.0.1:{port}")).await.unwrap();
                // Either end may close first.
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut peer).await;
            });
        }
    });
    (address, heads, tasks)
}

const TUNNEL: &str = "HTTP/1.1 200 Connection established\r\n\r\n";

fn through(address: SocketAddr, no_proxy: &[&str]) -> Config {
    let no_proxy: Vec<String> = no_proxy.iter().map(ToString::to_string).collect();
    let proxy = ForwardProxy::parse(&format!("http://me:secret@{address}"), &no_proxy).unwrap();
    Config {
        proxy: Some(proxy),
        ..Config::default()
    }
}

#[tokio::test]
async fn requests_go_through_the_proxy_but_for_exceptions() {
    let peer = RepeatingPeer::answering(OK).await;
    let (address, heads, _tasks) = proxy(TUNNEL).await;
    let port = peer.address.port();
    let config = through(address, &["direct.test"]);
    let health = config.proxy.as_ref().unwrap().health();
    let answers: &[&[&str]] = &[&["127.0.0.1"], &["127.0.0.1"], &[]];
    let transport = transport_resolving(config, answers);
    answered(&transport, &format!("http://hooks.test:{port}/")).await;
    let head = heads.lock().unwrap()[0].clone();
    assert!(
        head.starts_with(&format!("CONNECT hooks.test:{port} HTTP/1.1\r\n")),
        "{head}"
    );
    // "me:secret" in base64.
    assert!(
        head.contains("\r\nproxy-authorization: Basic bWU6c2VjcmV0\r\n"),
        "{head}"
    );
    answered(&transport, &format!("http://direct.test:{port}/")).await;
    assert_eq!(heads.lock().unwrap().len(), 1);
    // A name that does not resolve here is left to the proxy.
    answered(&transport, &format!("http://unknown.test:{port}/")).await;
    assert_eq!(heads.lock().unwrap().len(), 2);
    assert_eq!((peer.accepted(), health.state().faults), (3, 0));
    // The receiver sees nothing of the proxy's credentials.
    assert!(!peer.requests().concat().contains("proxy-authorization"));
}

#[tokio::test]
async fn a_proxy_is_not_asked_for_what_the_policy_forbids() {
    let (address, heads, _tasks) = proxy(TUNNEL).await;
    for (answers, host) in [
        (&["127.0.0.1", "169.254.169.254"][..], "hooks.test"),
        (&["127.0.0.1"], "169.254.169.254"),
        (&["127.0.0.1"], "[fd00:ec2::23]"),
        (&[], "metadata.google.internal"),
    ] {
        let transport = transport_resolving(through(address, &[]), &[answers]);
        let failure = failed(&transport, &format!("http://{host}/")).await;
        assert_eq!(
            failure.kind,
            TransportFailureKind::Forbidden,
            "{host}: {}",
            failure.detail
        );
    }
    assert!(heads.lock().unwrap().is_empty());
}

#[tokio::test]
async fn faults_of_the_proxy_are_told_from_those_of_the_endpoint() {
    let peer = RepeatingPeer::answering(OK).await;
    for (answer, told) in [
        ("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "407"),
        ("HTTP/1.1 403 Forbidden\r\n\r\n", "403"),
        ("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", "502"),
        ("nonsense\r\n\r\n", "as an HTTP proxy"),
        ("", "without an answer"),
    ] {
        let (address, _, _tasks) = proxy(answer).await;
        let config = through(address, &[]);
        let health = config.proxy.as_ref().unwrap().health();
        let failure = failed(&transport(config), &peer.url("/")).await;
        assert_eq!(failure.kind, TransportFailureKind::Proxy, "{}", failure.detail);
        assert!(failure.detail.contains(told), "{}", failure.detail);
        assert!(
            failure.detail.contains(&format!("the proxy {address}")),
            "{}",
            failure.detail
        );
        assert!(!failure.detail.contains("secret"), "{}", failure.detail);
        let state = health.state();
        assert!(state.faults == 1 && state.failing_since.is_some(), "{state:?}");
    }
    // A proxy that takes the connection and says nothing, while the sender waits for less than the transport does.
    let (silent, _) = listener().await;
    let config = through(silent.local_addr().unwrap(), &[]);
    let health = config.proxy.as_ref().unwrap().health();
    let guard = SendGuard::default();
    let request = DeliveryRequest {
        guard: Some(guard.clone()),
        ..post(&peer.url("/"), "[]")
    };
    let mut sending = transport(config).send(request);
    tokio::select! {
        biased;
        reply = &mut sending => panic!("{reply:?}"),
        _ = silent.accept() => {}
    }
    assert!(guard.give_up_tunnel());
    drop(sending);
    assert_eq!(health.state().faults, 1);
    assert!(!guard.give_up_tunnel(), "nobody waits any more");
    // The proxy itself is away.
    let (gone, _) = listener().await;
    let address = gone.local_addr().unwrap();
    drop(gone);
    let failure = failed(&transport(through(address, &[])), &peer.url("/")).await;
    assert_eq!(failure.kind, TransportFailureKind::Proxy);
    assert_eq!(peer.accepted(), 0);
    // A failure behind the tunnel is the endpoint's own.
    let silent = RepeatingPeer::answering("nonsense\r\n\r\n").await;
    let (address, _, _tasks) = proxy(TUNNEL).await;
    let failure = failed(&transport(through(address, &[])), &silent.url("/")).await;
    assert_eq!(failure.kind, TransportFailureKind::Socket, "{}", failure.detail);
}
