//! Deliveries to a listen session and back, and refused requests. Whole streams are tested over
//! real sockets elsewhere.

use super::*;
use crate::azure::subscriptions::tests::test_server::{ApiTestServer, GROUP, TestAnswer, web_hook};
use async_trait::async_trait;
use http::{HeaderValue, Uri};
use hyper::Method;
use postrider_core::time::{Clock, Sleep};
use postrider_engine::deliver;

/// A transport that answers with the host of each request.
struct EchoHostTransport;

#[async_trait]
impl DeliveryTransport for EchoHostTransport {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        failed(request.url.host().unwrap_or_default())
    }
}

fn listeners() -> Arc<ListenSessions> {
    Arc::new(ListenSessions::new(Arc::new(EchoHostTransport)))
}

fn request(url: &str) -> DeliveryRequest {
    let mut headers = HeaderMap::new();
    headers.insert("aeg-event-type", HeaderValue::from_static("Notification"));
    let more = [("x-a", "1"), ("x-a", "2")];
    DeliveryRequest {
        method: Method::POST,
        url: Arc::new(url.parse::<Uri>().unwrap()),
        headers: Arc::new(headers),
        more: more
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
            .into(),
        body: Bytes::from_static(b"[{\"id\":\"1\"}]").into(),
        guard: None,
    }
}

fn to(token: &str) -> DeliveryRequest {
    request(&format!("https://{HOST}/{token}"))
}

fn connect(listeners: &ListenSessions, token: &str) -> (Arc<ListenSession>, mpsc::Receiver<Bytes>) {
    let (pieces, received) = mpsc::channel(PIECES);
    let line = Arc::new(ListenSession::new(pieces));
    listeners.lines().insert(token.to_owned(), line.clone());
    (line, received)
}

/// The data of an event with this name.
#[track_caller]
fn data(piece: &[u8], event: &str) -> Value {
    let text = std::str::from_utf8(piece).unwrap();
    let data = text
        .strip_prefix(&format!("event: {event}\ndata: "))
        .unwrap_or_else(|| panic!("no {event}: {text}"));
    serde_json::from_str(data.strip_suffix("\n\n").unwrap()).unwrap()
}

#[tokio::test]
async fn what_is_for_nobody_here_goes_on() {
    let listeners = listeners();
    let sent = listeners.clone().send(request("https://hook.example/x")).await;
    assert_eq!(sent, failed("hook.example"));
    // A host that only begins with the reserved name is an ordinary host.
    let other = format!("https://{HOST}.example/x");
    let sent = listeners.clone().send(request(&other)).await;
    assert_eq!(sent, failed(format!("{HOST}.example")));
    assert_eq!(
        listeners.send(to("unknown")).await,
        failed("nobody listens any more")
    );
}

#[tokio::test]
async fn a_listener_gets_the_request_and_its_answer_is_the_reply() {
    let listeners = listeners();
    let (line, mut received) = connect(&listeners, "t");
    let answering = async {
        let told = data(&received.recv().await.unwrap(), "delivery");
        assert_eq!(
            told,
            json!({"delivery": 1, "method": "POST", "body": "[{\"id\":\"1\"}]",
                   "headers": {"aeg-event-type": "Notification", "x-a": "1, 2"}})
        );
        let answer = deliver::DeliveryAnswer {
            status: 503,
            body: Bytes::from_static(b"later"),
            ..deliver::DeliveryAnswer::default()
        };
        assert!(
            !line.answer(2, DeliveryReply::Answered(answer.clone())),
            "nobody asked for it"
        );
        assert!(line.answer(1, DeliveryReply::Answered(answer.clone())));
        assert!(!line.answer(1, DeliveryReply::Answered(answer)), "once is enough");
    };
    let (reply, ()) = tokio::join!(listeners.clone().send(to("t")), answering);
    let DeliveryReply::Answered(answer) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!((answer.status, &answer.body[..]), (503, &b"later"[..]));
    assert!(line.waiting().by_number.is_empty());
}

#[tokio::test]
async fn a_body_that_is_no_text_comes_as_base64() {
    let request = DeliveryRequest {
        body: Bytes::from_static(b"\xff").into(),
        ..to("t")
    };
    let told = data(&delivery(1, &request), "delivery");
    assert_eq!(told["bodyBase64"], "/w==");
    assert!(told.get("body").is_none());
}

#[tokio::test]
async fn a_delivery_that_is_given_up_is_not_waited_for() {
    let listeners = listeners();
    let (line, mut received) = connect(&listeners, "t");
    let mut sending = listeners.clone().send(to("t"));
    tokio::select! {
        biased;
        _ = &mut sending => panic!("nobody answers"),
        piece = received.recv() => drop(data(&piece.unwrap(), "delivery")),
    }
    assert_eq!(line.waiting().by_number.len(), 1);
    drop(sending);
    assert!(line.waiting().by_number.is_empty());
    assert!(!line.answer(1, failed("late")));
}

#[tokio::test]
async fn a_slow_reader_keeps_no_more_than_it_may() {
    let listeners = listeners();
    let (line, mut received) = connect(&listeners, "t");
    let mut sending: Vec<_> = (0..3 * PIECES).map(|_| listeners.clone().send(to("t"))).collect();
    let waker = std::task::Waker::noop();
    let mut context = std::task::Context::from_waker(waker);
    for one in &mut sending {
        assert!(one.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(received.len(), PIECES);
    assert_eq!(line.waiting().by_number.len(), 3 * PIECES);
    // A piece that was read makes room for a waiting one.
    received.recv().await.unwrap();
    for one in &mut sending {
        assert!(one.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(received.len(), PIECES);
    // All deliveries end with the session, whether they were read or not.
    line.ended.cancel();
    for one in sending {
        assert_eq!(one.await, failed("nobody listens any more"));
    }
    assert!(line.waiting().by_number.is_empty());
}

#[tokio::test]
async fn an_answer_counts_even_if_its_listener_leaves_at_once() {
    let listeners = listeners();
    let (line, mut received) = connect(&listeners, "t");
    let mut sending = listeners.clone().send(to("t"));
    tokio::select! {
        biased;
        _ = &mut sending => panic!("nobody has answered"),
        _ = received.recv() => {}
    }
    assert!(line.answer(1, failed("as it was said")));
    line.ended.cancel();
    assert_eq!(sending.await, failed("as it was said"));
}

#[tokio::test]
async fn a_reader_that_goes_ends_what_it_has_not_read() {
    let listeners = listeners();
    let (_line, received) = connect(&listeners, "t");
    drop(received);
    assert_eq!(listeners.send(to("t")).await, failed("nobody listens any more"));
}

async fn lab() -> ApiTestServer {
    let lab = ApiTestServer::with(false, |server| server.listeners = Some(listeners())).await;
    lab.topic("t1").await;
    lab.domain("d1", false).await;
    lab
}

async fn post(lab: &ApiTestServer, path: &str, body: Value) -> TestAnswer {
    lab.send("POST", &format!("/postrider/v1/{path}"), Some(&body), &[])
        .await
}

#[tokio::test]
async fn nonsense_is_refused_by_name_and_makes_nothing() {
    let lab = lab().await;
    let check = async |body: Value, status: u16, field: Option<&str>, expected: &str| {
        let got = post(&lab, "listen", body.clone()).await.expect(status);
        let detail = got.body["detail"].as_str().unwrap();
        assert!(detail.contains(expected), "{body}: {detail}");
        assert_eq!(got.body["field"].as_str(), field, "{body}");
    };
    check(json!([]), 400, None, "must be a JSON object").await;
    check(json!({}), 400, Some("topic"), "must be the name of a topic").await;
    check(json!({"topic": 5}), 400, Some("topic"), "must be a string").await;
    check(json!({"topic": "none"}), 404, Some("topic"), "does not exist").await;
    check(
        json!({"topic": "t1", "filters": {}}),
        400,
        None,
        "unknown field `filters`",
    )
    .await;
    check(
        json!({"topic": "t1", "domainTopic": "x"}),
        400,
        Some("domainTopic"),
        "is no domain",
    )
    .await;
    check(
        json!({"topic": "d1", "domainTopic": "x"}),
        404,
        Some("domainTopic"),
        "has no topic \"x\"",
    )
    .await;
    check(
        json!({"topic": "t1", "name": "a/b"}),
        400,
        Some("name"),
        "letters, digits",
    )
    .await;
    check(json!({"topic": "t1", "schema": "xml"}), 400, Some("schema"), "").await;
    check(
        json!({"topic": "t1", "profile": "cloud-1999"}),
        400,
        Some("profile"),
        "",
    )
    .await;
    check(
        json!({"topic": "t1", "maxEventsPerBatch": 0}),
        400,
        Some("maxEventsPerBatch"),
        "",
    )
    .await;
    check(
        json!({"topic": "t1", "filter": {"advancedFilters": [{"key": "data.n", "operatorType": "x"}]}}),
        400,
        Some("filter.advancedFilters[0].operatorType"),
        "",
    )
    .await;
    check(
        json!({"topic": "t1", "deadLetterDestination": {"endpointType": "StorageBlob", "properties": {
            "resourceId": "/subscriptions/x/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/none",
            "blobContainerName": "dead"}}}),
        400,
        Some("deadLetterDestination.properties.resourceId"),
        "not configured",
    )
    .await;
    assert!(lab.server.engine.directory.all_subscriptions().is_empty());
    assert!(lab.server.listeners.as_ref().unwrap().lines().is_empty());
}

#[tokio::test]
async fn only_who_may_write_listens() {
    let lab = lab().await;
    let ask = async |method: &str, path: &str, secret: &str| {
        let bearer = format!("Bearer {secret}");
        let headers = [("authorization", bearer.as_str())];
        let body = json!({"topic": "t1"});
        lab.send(method, path, Some(&body), &headers).await.status
    };
    for path in ["/postrider/v1/listen", "/postrider/v1/listen/t/1"] {
        assert_eq!(ask("POST", path, "wrong").await, 401);
        assert_eq!(ask("POST", path, "reader secret").await, 403);
        assert_eq!(ask("GET", path, "owner secret").await, 405);
    }
    assert_eq!(ask("POST", "/postrider/v1/listen/t", "owner secret").await, 404);
    assert_eq!(
        ask("POST", "/postrider/v1/listen/t/1/2", "owner secret").await,
        404
    );
    assert!(lab.server.engine.directory.all_subscriptions().is_empty());
}

/// A clock that stands still until it is released, and then is a day ahead.
#[derive(Default)]
struct ReleasedClock(CancellationToken);

impl Clock for ReleasedClock {
    fn now(&self) -> Timestamp {
        let days = u64::from(self.0.is_cancelled());
        Timestamp::from_secs(1_790_000_000) + Duration::from_secs(days * 86_400)
    }
    fn sleep_until(&self, deadline: Timestamp) -> Sleep<'_> {
        Box::pin(async move {
            if self.now() < deadline {
                self.0.cancelled().await;
            }
            tokio::task::yield_now().await;
        })
    }
}

#[tokio::test]
async fn a_listener_whose_token_is_revoked_is_sent_away() {
    let clock = Arc::new(ReleasedClock::default());
    let wall = clock.clone();
    let lab = ApiTestServer::with(false, |server| {
        server.listeners = Some(listeners());
        server.wall = wall;
    })
    .await;
    lab.topic("t1").await;
    let token = lab.token_of("owner");
    let body = json!({"topic": "t1"});
    let listening = async {
        let headers = [("host", "localhost"), ("authorization", token.as_str())];
        let path = "/postrider/v1/listen";
        lab.exchange("POST", path, Some(&body), &headers)
            .await
            .expect(200)
    };
    let revoking = async {
        while lab.server.engine.directory.all_subscriptions().is_empty() {
            tokio::task::yield_now().await;
        }
        post(&lab, "sessions/revoke", json!({"client": "owner"}))
            .await
            .expect(200);
        clock.0.cancel();
    };
    let (got, ()) = tokio::join!(listening, revoking);
    let text = String::from_utf8(got.bytes.to_vec()).unwrap();
    assert!(text.contains("signedOut"), "{text}");
}

#[tokio::test]
async fn answers_that_nobody_waits_for_are_refused() {
    let lab = lab().await;
    let listeners = lab.server.listeners.clone().unwrap();
    let got = post(&lab, "listen/t/1", json!({"status": 200})).await.expect(404);
    assert_eq!(got.body["detail"], "token: nobody listens with this one");
    let (_line, _received) = connect(&listeners, "t");
    for number in ["1", "x", "-1"] {
        let got = post(&lab, &format!("listen/t/{number}"), json!({"status": 200}))
            .await
            .expect(404);
        let detail = got.body["detail"].as_str().unwrap();
        assert!(detail.contains("is not waited for"), "{detail}");
    }
    let got = post(&lab, "listen/t/1", json!({"status": 5})).await.expect(400);
    assert_eq!(got.body["field"], "status");
}

#[tokio::test]
async fn there_are_only_so_many_listeners() {
    let lab = lab().await;
    let listeners = lab.server.listeners.clone().unwrap();
    let take = |n: usize| {
        let holder = StreamSlotHolder {
            client: format!("client {}", n % 4),
            address: [127, 0, 0, 1].into(),
            is_owner: true,
        };
        listeners.places.take(holder).ok()
    };
    let places: Option<Vec<_>> = (0..LISTENERS_MAX).map(take).collect();
    assert!(places.is_some());
    post(&lab, "listen", json!({"topic": "t1"})).await.expect(503);
    assert!(lab.server.engine.directory.all_subscriptions().is_empty());
}

#[tokio::test]
async fn nobody_else_may_use_the_reserved_name() {
    let lab = lab().await;
    for host in [HOST, "LISTEN.postrider.INVALID", "listen.postrider.invalid.:443"] {
        let mut body = web_hook("/x", json!({}));
        body["properties"]["destination"]["properties"]["endpointUrl"] = json!(format!("https://{host}/t"));
        let path = format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1/eventSubscriptions/sub1");
        let got = lab.arm("PUT", &path, Some(body.clone())).await.expect(400);
        let (_, message) = got.error();
        assert!(message.contains(HOST), "{message}");
        let path = "/topics/t1/eventSubscriptions/sub1";
        let got = lab.edge("PUT", path, Some(body)).await;
        assert_eq!(got.status, 400, "{}", got.body);
    }
    assert!(lab.server.engine.directory.all_subscriptions().is_empty());
}

#[tokio::test]
async fn what_listeners_of_an_earlier_life_left_is_deleted() {
    let lab = lab().await;
    let path = format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1/eventSubscriptions/sub1");
    let made = lab.arm("PUT", &path, Some(web_hook("/x", json!({})))).await;
    made.expect(201);
    let left = ListenRequest::read(br#"{"topic":"t1"}"#).unwrap();
    let left = left
        .subscription(&lab.server, "0123456789abcdef", "me")
        .await
        .unwrap();
    assert_eq!(left.labels, ["postrider-listen", "me"]);
    assert!(left.expires.is_some());
    assert_eq!(left.name, "listen-01234567");
    lab.server.engine.put_subscription(left).await.unwrap();
    assert_eq!(lab.server.engine.directory.all_subscriptions().len(), 2);
    delete_orphaned_subscriptions(&lab.server).await;
    let names: Vec<String> = lab
        .server
        .engine
        .directory
        .all_subscriptions()
        .iter()
        .map(|one| one.name.clone())
        .collect();
    assert_eq!(names, ["sub1"]);
}
