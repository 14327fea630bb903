//! Clients that stall, over connections in memory. Time is virtual and advances whenever all tasks
//! wait.

use super::*;
use crate::azure::subscriptions::tests::test_server::{ApiTestServer, GROUP};
use crate::limits::ClientBounds;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// A server with the topics `t1` and `t2`.
async fn lab(bounds: ClientBounds) -> ApiTestServer {
    let limits = ClientLimits::new(&bounds);
    let lab = ApiTestServer::with(false, |server| server.client_limits = Arc::new(limits)).await;
    for topic in ["t1", "t2"] {
        lab.topic(topic).await;
    }
    lab
}

/// A connection to the server, which serves it while the future is polled.
fn connect(lab: &ApiTestServer) -> (DuplexStream, impl Future<Output = ()>) {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let serving = connection(
        lab.server.clone(),
        theirs,
        ConnectionOrigin::test(lab.ends),
        CancellationToken::new(),
    );
    (ours, serving)
}

fn head(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer owner secret\r\n\
         content-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Sends a head and this many bytes of a body every second, then nothing. Returns the answer and
/// when it arrived.
async fn trickle(
    lab: &ApiTestServer,
    path: &str,
    bytes_per_second: usize,
    seconds: u32,
) -> (String, Duration) {
    let (stream, serving) = connect(lab);
    let begun = Instant::now();
    let (mut reading, mut writing) = tokio::io::split(stream);
    let sending = async {
        let length = bytes_per_second * seconds as usize + 1000;
        writing.write_all(head(path, length).as_bytes()).await.unwrap();
        for second in 1..=seconds {
            tokio::time::sleep_until(begun + Duration::from_secs(1) * second).await;
            // Fails once the server has answered.
            let _ = writing.write_all(&vec![b' '; bytes_per_second]).await;
        }
        std::future::pending::<()>().await;
    };
    let reading = async {
        let mut answer = String::new();
        reading.read_to_string(&mut answer).await.unwrap();
        (answer, begun.elapsed())
    };
    tokio::select! {
        biased;
        answered = async { tokio::join!(reading, serving).0 } => answered,
        () = sending => unreachable!("sending does not end"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_keep_coming_is_answered_408() {
    let lab = lab(ClientBounds::default()).await;
    let arm = format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1/regenerateKey?api-version=2022-06-15");
    let paths = [
        "/topics/t1/api/events",
        "/postrider/v1/filters/test",
        "/common/oauth2/v2.0/token",
        &arm,
    ];
    for path in paths {
        let (answer, after) = trickle(&lab, path, 0, 0).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{path}: {answer}");
        assert!(answer.contains("did not keep coming"), "{path}: {answer}");
        assert_eq!(after, Duration::from_secs(10), "{path}");
    }
    assert_eq!(lab.server.client_limits.count(ClientLimit::BodyStall), 4);
    // An occasional byte is not enough; a slow client has until the time limit for bodies.
    let (answer, after) = trickle(&lab, paths[0], 20, 1000).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_eq!(after, Duration::from_secs(10));
    let (answer, after) = trickle(&lab, paths[0], 200, 40).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    // The last whole KiB had arrived after 36 seconds.
    assert_eq!(after, Duration::from_secs(46));
    let (answer, after) = trickle(&lab, paths[0], 200, 1000).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_eq!(after, BODY_TIMEOUT);
    assert_eq!(lab.server.client_limits.publish_bodies.bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn stalled_bodies_of_one_topic_leave_room_for_others() {
    const ROOM: usize = 400_000;
    let lab = lab(ClientBounds {
        publish_body_bytes_max: ROOM,
        ..ClientBounds::default()
    })
    .await;
    let publish = async |topic: &str| {
        let event = json!([{
            "id": "1", "eventType": "t", "subject": "s", "eventTime": "2026-09-21T00:00:00Z",
            "dataVersion": "1", "data": "x".repeat(20_000),
        }]);
        let path = format!("/topics/{topic}/api/events");
        lab.send("POST", &path, Some(&event), &[]).await.status
    };
    // Many clients announce bodies and send nothing: more than the topic has slots, and more than
    // the memory for bodies holds.
    let mut silent = Vec::new();
    for _ in 0..20 {
        let (mut stream, serving) = connect(&lab);
        let announced = head("/topics/t1/api/events", 1_500_000);
        stream.write_all(announced.as_bytes()).await.unwrap();
        silent.push((stream, Box::pin(serving)));
    }
    for (_, serving) in &mut silent {
        assert!(poll_for_a_moment(serving).await);
    }
    assert_eq!(publish("t1").await, 200);
    assert_eq!(publish("t2").await, 200);
    // Others send nearly all of a body, as much as fits.
    let mut full = Vec::new();
    for _ in 0..20 {
        let (mut stream, serving) = connect(&lab);
        let text = head("/topics/t1/api/events", 40_001) + &" ".repeat(40_000);
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut serving = Box::pin(serving);
        poll_for_a_moment(&mut serving).await;
        full.push((stream, serving));
    }
    let used = lab.server.client_limits.publish_bodies.bytes();
    assert!((ROOM / 3..=ROOM / 2).contains(&used), "{used}");
    assert!(lab.server.client_limits.count(ClientLimit::BodyRoom) > 0);
    assert_eq!(publish("t2").await, 200);
    drop((silent, full));
    assert_eq!(lab.server.client_limits.publish_bodies.bytes(), 0);
}

/// Polls a connection until it waits for its client. Returns whether the connection is still open.
async fn poll_for_a_moment(serving: &mut (impl Future<Output = ()> + Unpin)) -> bool {
    timeout(Duration::from_millis(1), serving).await.is_err()
}

#[tokio::test]
async fn a_request_with_two_hosts_is_refused_with_the_headers_of_every_answer() {
    let lab = lab(ClientBounds::default()).await;
    let headers = [("host", "localhost"), ("host", "elsewhere.example")];
    let got = lab
        .exchange("GET", "/postrider/v1/server", None, &headers)
        .await
        .expect(400);
    assert_eq!(got.header("x-content-type-options"), "nosniff");
    assert_eq!(got.header("cache-control"), "no-store");
    assert_eq!(got.header("strict-transport-security"), "max-age=300");
}

#[tokio::test(start_paused = true)]
async fn a_request_under_way_is_not_idle_and_what_follows_it_is() {
    let lab = lab(ClientBounds::default()).await;
    let connections = Arc::new(crate::connections::Connections::new(1, 1));
    let peer = [127, 0, 0, 1].into();
    let place = connections.admit(peer, &lab.server.client_limits).unwrap();
    let origin = ConnectionOrigin {
        connection: place.connection.clone(),
        ..ConnectionOrigin::test(lab.ends)
    };
    let (mut ours, theirs) = tokio::io::duplex(64 << 10);
    let serving = connection(lab.server.clone(), theirs, origin, CancellationToken::new());
    let mut serving = Box::pin(serving);
    ours.write_all(head("/topics/t1/api/events", 4).as_bytes())
        .await
        .unwrap();
    poll_for_a_moment(&mut serving).await;
    let refused = connections.admit(peer, &lab.server.client_limits);
    assert!(refused.is_none(), "the body is being waited for");
    ours.write_all(b"[]  ").await.unwrap();
    poll_for_a_moment(&mut serving).await;
    let _other = connections.admit(peer, &lab.server.client_limits).unwrap();
    assert!(place.connection.evicted.is_cancelled());
}
