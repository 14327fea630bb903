//! Listen sessions at other nodes. A session is connected to one node, but the owner of a partition
//! makes its deliveries: the request goes to the node that holds the session, and the answer comes
//! back the same way.
//!
//! The token of a session ends with the number of its node, so that every node knows where the
//! session is.

use super::{ListenSessions, failed, messages};
use crate::Server;
use crate::own_api::Problem;
use crate::peers::Peers;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Uri};
use postrider_engine::deliver::{
    AttemptTimings, DeliveryAnswer, DeliveryReply, DeliveryRequest, TransportFailure, TransportFailureKind,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// How long the node with the session waits for an answer. The delivering node gives up much
/// earlier, and the node with the session is not told.
const DELIVERY_PATIENCE: Duration = Duration::from_secs(600);
/// A session that leaves this many requests unanswered gets no more from other nodes, since it
/// would use up all their memory.
const UNANSWERED_MAX: usize = 512;
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// A new token, which cannot be guessed.
pub fn token(peers: Option<&dyn Peers>) -> String {
    let token = uuid::Uuid::new_v4().simple().to_string();
    match peers {
        None => token,
        Some(peers) => format!("{token}-{}", peers.id()),
    }
}

/// The number of the node that holds a session.
pub fn node_of(token: &str) -> Option<&str> {
    token.split_once('-').map(|(_, node)| node)
}

#[derive(Serialize, Deserialize)]
struct RemoteDelivery {
    token: String,
    method: String,
    headers: Vec<(String, Vec<u8>)>,
}

#[derive(Serialize, Deserialize)]
struct RemoteReply {
    status: u16,
    headers: Vec<(String, Vec<u8>)>,
    /// Why there is no answer. The other members are meaningless then.
    failed: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct RemoteAcknowledgement {
    token: String,
    number: u64,
}

/// Frames a message: the length of its JSON header, the header, and the body as raw bytes.
fn framed(said: &impl Serialize, rest: &[u8]) -> Bytes {
    let said = serde_json::to_vec(said).expect("names are strings");
    let mut out = BytesMut::with_capacity(4 + said.len() + rest.len());
    out.put_u32(said.len() as u32);
    out.put_slice(&said);
    out.put_slice(rest);
    out.freeze()
}

fn unframed<T: DeserializeOwned>(mut bytes: Bytes) -> Option<(T, Bytes)> {
    let length = bytes.try_get_u32().ok()? as usize;
    if bytes.len() < length {
        return None;
    }
    let said = bytes.split_to(length);
    Some((serde_json::from_slice(&said).ok()?, bytes))
}

fn write_headers<'a>(
    headers: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
) -> Vec<(String, Vec<u8>)> {
    let each = |(name, value): (&HeaderName, &HeaderValue)| (name.to_string(), value.as_bytes().to_vec());
    headers.map(each).collect()
}

fn read_headers(headers: &[(String, Vec<u8>)]) -> Option<HeaderMap> {
    let mut read = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        read.append(
            HeaderName::try_from(name.as_str()).ok()?,
            HeaderValue::from_bytes(value).ok()?,
        );
    }
    Some(read)
}

fn write_request(token: &str, request: &DeliveryRequest) -> Bytes {
    let more = request.more.iter().map(|(name, value)| (name, value));
    let said = RemoteDelivery {
        token: token.to_owned(),
        method: request.method.to_string(),
        headers: write_headers(request.headers.iter().chain(more)),
    };
    framed(&said, &request.body_bytes())
}

fn read_request(bytes: Bytes) -> Option<(String, DeliveryRequest)> {
    let (said, body) = unframed::<RemoteDelivery>(bytes)?;
    let request = DeliveryRequest {
        method: Method::from_bytes(said.method.as_bytes()).ok()?,
        // The URL of a delivery is not part of what a listen session is told.
        url: Arc::new(Uri::from_static("/")),
        headers: Arc::new(read_headers(&said.headers)?),
        more: Vec::new(),
        body: body.into(),
        guard: None,
    };
    Some((said.token, request))
}

fn write_reply(reply: &DeliveryReply) -> Bytes {
    match reply {
        DeliveryReply::Answered(answer) => {
            let said = RemoteReply {
                status: answer.status,
                headers: write_headers(answer.headers.iter()),
                failed: None,
            };
            framed(&said, &answer.body)
        }
        DeliveryReply::Failed(failure) => {
            let said = RemoteReply {
                status: 0,
                headers: Vec::new(),
                failed: Some(failure.detail.clone()),
            };
            framed(&said, b"")
        }
    }
}

fn read_reply(bytes: Bytes) -> Option<DeliveryReply> {
    let (said, body) = unframed::<RemoteReply>(bytes)?;
    if let Some(detail) = said.failed {
        return Some(DeliveryReply::Failed(TransportFailure {
            kind: TransportFailureKind::Socket,
            detail,
        }));
    }
    Some(DeliveryReply::Answered(DeliveryAnswer {
        status: said.status,
        headers: read_headers(&said.headers)?,
        body,
        timings: AttemptTimings::default(),
    }))
}

/// Lets the node that holds the session deliver a request; none if no other node does.
pub async fn deliver(
    peers: Option<&Arc<dyn Peers>>,
    token: &str,
    request: &DeliveryRequest,
) -> Option<DeliveryReply> {
    let (peers, node) = (peers?, node_of(token)?);
    if node == peers.id() {
        return None;
    }
    let asked = peers
        .ask_one(
            node,
            "listen-deliver",
            write_request(token, request),
            DELIVERY_PATIENCE,
        )
        .await;
    Some(match asked {
        Ok(bytes) => read_reply(bytes).unwrap_or_else(|| failed("the listener's node cannot be understood")),
        Err(why) => failed(format!("the listener's node cannot be reached: {why}")),
    })
}

/// Hands a request of another node to a listen session of this node.
pub async fn answer_delivery(server: &Arc<Server>, body: Bytes) -> Result<Bytes, String> {
    let (token, request) = read_request(body).ok_or("the delivery cannot be understood")?;
    let listeners = server.listeners.as_ref().ok_or("nobody can listen here")?;
    let gone = || failed("nobody listens any more");
    let reply = match listeners.line(&token) {
        None => gone(),
        Some(line) if line.waiting().by_number.len() >= UNANSWERED_MAX => {
            failed(format!("the listener has not answered {UNANSWERED_MAX} requests"))
        }
        Some(line) => match tokio::time::timeout(DELIVERY_PATIENCE, line.ask(&request)).await {
            Ok(reply) => reply.unwrap_or_else(gone),
            Err(_) => failed("the listener does not answer"),
        },
    };
    Ok(write_reply(&reply))
}

/// Passes the answer of a session to the node that holds the session; none if no other node does.
/// Returns whether the answer was waited for.
pub async fn acknowledge(
    listeners: &ListenSessions,
    token: &str,
    number: u64,
    body: &[u8],
) -> Option<Result<bool, Problem>> {
    let (peers, node) = (listeners.peers.get()?, node_of(token)?);
    if node == peers.id() {
        return None;
    }
    let said = RemoteAcknowledgement {
        token: token.to_owned(),
        number,
    };
    let asked = peers
        .ask_one(node, "listen-answer", framed(&said, body), ANSWER_PATIENCE)
        .await;
    Some(match asked {
        Ok(taken) => Ok(&*taken == b"true"),
        Err(why) => Err(Problem::new(
            503,
            format!("the listener's node cannot be reached: {why}"),
        )),
    })
}

pub async fn answer_answer(server: &Arc<Server>, body: Bytes) -> Result<Bytes, String> {
    let (said, body) = unframed::<RemoteAcknowledgement>(body).ok_or("the answer cannot be understood")?;
    let listeners = server.listeners.as_ref().ok_or("nobody can listen here")?;
    // The answer was validated by the node that it was posted to.
    let reply = messages::read_reply(&body).map_err(|problem| problem.detail)?;
    let line = listeners.line(&said.token);
    let taken = line.is_some_and(|line| line.answer(said.number, reply));
    Ok(Bytes::from_static(if taken { b"true" } else { b"false" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_arrives_as_it_was_sent() {
        let mut headers = HeaderMap::new();
        headers.append("a", HeaderValue::from_static("1"));
        headers.append("a", HeaderValue::from_bytes(b"\xff").unwrap());
        let request = DeliveryRequest {
            method: Method::POST,
            url: Arc::new(Uri::from_static("https://listen.postrider.invalid/t-n")),
            headers: Arc::new(headers),
            more: vec![(HeaderName::from_static("b"), HeaderValue::from_static("2"))],
            body: Bytes::from_static(b"\x00\xffbody").into(),
            guard: None,
        };
        let (token, read) = read_request(write_request("t-n", &request)).unwrap();
        assert_eq!(
            (token.as_str(), &read.method, read.body_bytes()),
            ("t-n", &request.method, request.body_bytes())
        );
        let values: Vec<&[u8]> = read
            .headers
            .get_all("a")
            .iter()
            .map(|value| value.as_bytes())
            .collect();
        assert_eq!(values, [&b"1"[..], b"\xff"]);
        assert_eq!(read.header("b"), Some("2"));
    }

    #[test]
    fn an_answer_arrives_as_it_was_given() {
        let mut headers = HeaderMap::new();
        headers.append("retry-after", HeaderValue::from_static("5"));
        let answered = DeliveryReply::Answered(DeliveryAnswer {
            status: 503,
            headers,
            body: Bytes::from_static(b"later"),
            timings: AttemptTimings::default(),
        });
        assert_eq!(read_reply(write_reply(&answered)), Some(answered));
        let gone = failed("nobody listens any more");
        assert_eq!(read_reply(write_reply(&gone)), Some(gone));
        for bad in [
            &b""[..],
            b"\x00\x00\x00\x09{}",
            b"\xff\xff\xff\xff",
            b"\x00\x00\x00\x02{}",
        ] {
            assert_eq!(read_reply(Bytes::copy_from_slice(bad)), None, "{bad:?}");
        }
    }

    #[test]
    fn a_token_says_where_its_listener_is() {
        assert_eq!(node_of(&token(None)), None);
        assert_eq!(node_of("0123-00000000000000ff"), Some("00000000000000ff"));
    }
}
