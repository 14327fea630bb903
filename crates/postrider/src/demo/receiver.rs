//! The built-in receiver: every endpoint of the scene on one port, and a record of its requests.

use super::clock::FastClock;
use super::scenario::{DemoScenario, DemoSubscription, answer_time};
use crate::receiver::handshake;
use anyhow::Result;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use postrider_core::time::{Clock, Timestamp};
use serde::Deserialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Twice Event Grid's largest delivery.
const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;

/// A request as the receiver saw it.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub part: DemoSubscription,
    pub events: Vec<ReceivedEvent>,
    /// Number of the attempt; the first is 1.
    pub attempt: u32,
    pub status: u16,
    /// Time of the answer, from the start.
    pub after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedEvent {
    pub number: u64,
    /// Time since the event was published.
    pub age: Duration,
}

pub struct DemoReceiver {
    pub scene: DemoScenario,
    pub clock: Arc<FastClock>,
    /// Gets every request before it is answered.
    pub seen: mpsc::Sender<ReceivedRequest>,
}

impl DemoReceiver {
    /// Serves until the future is dropped.
    pub async fn serve(self: Arc<DemoReceiver>, listener: TcpListener) -> Result<()> {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let stream = accepted?.0;
                    stream.set_nodelay(true)?;
                    let receiver = self.clone();
                    connections.spawn(async move {
                        let service = service_fn(|request| receiver.receive(request));
                        http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
                    });
                }
                // Broken connections are ignored: the sender opens another.
                Some(_) = connections.join_next() => {}
            }
        }
    }

    async fn receive(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let (head, body) = request.into_parts();
        let Ok(body) = Limited::new(body, BODY_BYTES_MAX).collect().await else {
            return Ok(answer(StatusCode::PAYLOAD_TOO_LARGE));
        };
        let body = body.to_bytes();
        if let Some(answer) = handshake(&head, &body) {
            return Ok(answer);
        }
        let Some(part) = DemoSubscription::named(head.uri.path().trim_start_matches('/')) else {
            return Ok(answer(StatusCode::NOT_FOUND));
        };
        let now = self.clock.now();
        let events = events(&body, now);
        let Some(first) = events.first() else {
            return Ok(answer(StatusCode::UNPROCESSABLE_ENTITY));
        };
        let attempt = attempt(&head.headers);
        let status = part.answer(&self.scene, first.number, attempt, self.clock.elapsed());
        self.clock
            .sleep_until(now + answer_time(first.number, attempt))
            .await;
        let seen = ReceivedRequest {
            part,
            events,
            attempt,
            status,
            after: self.clock.elapsed(),
        };
        // Nobody reads the channel once the demo has ended.
        let _ = self.seen.send(seen).await;
        Ok(answer(
            StatusCode::from_u16(status).expect("the scene answers with statuses"),
        ))
    }
}

/// Number of the attempt, derived from the header that counts earlier ones.
fn attempt(headers: &HeaderMap) -> u32 {
    let made = headers
        .get("aeg-delivery-count")
        .and_then(|count| count.to_str().ok()?.parse().ok());
    1 + made.unwrap_or(0)
}

/// Events of a body in either schema, single or in an array.
fn events(body: &[u8], now: Timestamp) -> Vec<ReceivedEvent> {
    #[derive(Deserialize)]
    struct DemoEventMembers {
        id: String,
        #[serde(alias = "eventTime")]
        time: String,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum EventBody {
        Many(Vec<DemoEventMembers>),
        One(DemoEventMembers),
    }
    let events = match serde_json::from_slice(body) {
        Ok(EventBody::Many(events)) => events,
        Ok(EventBody::One(event)) => vec![event],
        Err(_) => Vec::new(),
    };
    let arrived = |event: &DemoEventMembers| {
        Some(ReceivedEvent {
            number: event.id.parse().ok()?,
            age: now.since(Timestamp::parse(&event.time)?),
        })
    };
    events.iter().filter_map(arrived).collect()
}

fn answer(status: StatusCode) -> Response<Full<Bytes>> {
    let mut answer = Response::default();
    *answer.status_mut() = status;
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_in_every_form_of_body() {
        let now = Timestamp::parse("2030-01-01T00:01:00Z").unwrap();
        let check = |body: &str, expected: &[(u64, u64)]| {
            let found: Vec<_> = events(body.as_bytes(), now)
                .iter()
                .map(|e| (e.number, e.age.as_secs()))
                .collect();
            assert_eq!(found, expected, "{body}");
        };
        let grid = r#"{"id":"7","eventTime":"2030-01-01T00:00:50Z","data":{}}"#;
        let cloud = r#"{"specversion":"1.0","id":"8","time":"2030-01-01T00:00:00Z"}"#;
        check(&format!("[{grid}]"), &[(7, 10)]);
        check(&format!("[{grid},{grid}]"), &[(7, 10), (7, 10)]);
        check(cloud, &[(8, 60)]);
        check(&format!("[{cloud}]"), &[(8, 60)]);
        check("[]", &[]);
        check("{", &[]);
    }
}
