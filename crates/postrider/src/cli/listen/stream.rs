//! Server-sent events of a listen session.

use super::super::management_client::ServerRefusal;
use super::PATH;
use crate::client::{ApiAnswer, ApiClient, KeptConnection};
use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::timeout;

/// The server sends a sign of life every five seconds.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// Bound of one delivery as text: several times Event Grid's largest.
const EVENT_BYTES_MAX: usize = 32 << 20;
const REFUSAL_BYTES_MAX: usize = 1 << 20;

/// The session's subscription; the first event of the stream.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionIntroduction {
    pub token: String,
    pub name: String,
    pub topic: String,
    pub domain_topic: Option<String>,
}

/// A delivery request as a webhook would get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionDelivery {
    pub number: u64,
    pub method: String,
    pub headers: BTreeMap<String, String>,
    pub body: Bytes,
}

impl SessionDelivery {
    fn read(data: &str) -> Result<SessionDelivery> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct DeliveryMessage {
            delivery: u64,
            method: String,
            headers: BTreeMap<String, String>,
            body: Option<String>,
            body_base64: Option<String>,
        }
        let told: DeliveryMessage = serde_json::from_str(data).context("a delivery is not understood")?;
        let body = match (told.body, told.body_base64) {
            (Some(text), _) => text.into(),
            (None, Some(text)) => BASE64_STANDARD
                .decode(text)
                .context("a body is not base64")?
                .into(),
            (None, None) => Bytes::new(),
        };
        Ok(SessionDelivery {
            number: told.delivery,
            method: told.method,
            headers: told.headers,
            body,
        })
    }

    /// Number of earlier attempts.
    pub fn attempts_made(&self) -> u64 {
        let count = self.headers.get("aeg-delivery-count");
        count.and_then(|count| count.parse().ok()).unwrap_or(0)
    }
}

/// Next item of the stream.
pub enum StreamItem {
    Delivery(SessionDelivery),
    /// The server ended the session, for this reason.
    Ended(String),
    /// The connection was lost, for this reason.
    Nothing(String),
}

/// Stream of a listen session over a connection of its own. Dropping it makes the server delete the
/// subscription.
pub struct DeliveryStream {
    pub introduction: SessionIntroduction,
    body: Incoming,
    pieces: UnparsedBytes,
    _kept: KeptConnection,
}

impl DeliveryStream {
    pub async fn open(client: &ApiClient, asked: &Value) -> Result<DeliveryStream> {
        let mut kept = client.keep().await?;
        let response = client
            .post_on_connection(&mut kept, PATH, asked.to_string().into())
            .await?;
        let (head, body) = response.into_parts();
        if head.status != http::StatusCode::OK {
            let body = Limited::new(body, REFUSAL_BYTES_MAX).collect().await;
            let body = body.map_err(|e| anyhow::anyhow!(e))?.to_bytes();
            let answer = ApiAnswer {
                status: head.status.as_u16(),
                headers: head.headers,
                body,
            };
            return Err(ServerRefusal::of(&answer).into());
        }
        let mut opened = OpenedStream {
            body,
            pieces: UnparsedBytes::default(),
        };
        let introduction = loop {
            let Some((event, data)) = opened.next().await? else {
                bail!("the server ended the stream at once");
            };
            if event == "subscription" {
                break serde_json::from_str(&data).context("the server's greeting is not understood")?;
            }
        };
        Ok(DeliveryStream {
            introduction,
            body: opened.body,
            pieces: opened.pieces,
            _kept: kept,
        })
    }

    /// Cancel safe: no delivery is lost.
    pub async fn next(&mut self) -> StreamItem {
        loop {
            let heard = match next(&mut self.body, &mut self.pieces).await {
                Ok(Some(heard)) => heard,
                Ok(None) => return StreamItem::Nothing("the server has closed it".to_owned()),
                Err(e) => return StreamItem::Nothing(format!("{e:#}")),
            };
            match heard.0.as_str() {
                "delivery" => match SessionDelivery::read(&heard.1) {
                    Ok(delivery) => return StreamItem::Delivery(delivery),
                    Err(e) => return StreamItem::Nothing(format!("{e:#}")),
                },
                "ended" => {
                    let said: Value = serde_json::from_str(&heard.1).unwrap_or_default();
                    let reason = said["reason"].as_str().unwrap_or("no reason is given");
                    return StreamItem::Ended(reason.to_owned());
                }
                // Unknown events are ignored: a newer server may send more.
                _ => {}
            }
        }
    }
}

struct OpenedStream {
    body: Incoming,
    pieces: UnparsedBytes,
}

impl OpenedStream {
    async fn next(&mut self) -> Result<Option<(String, String)>> {
        next(&mut self.body, &mut self.pieces).await
    }
}

async fn next(body: &mut Incoming, pieces: &mut UnparsedBytes) -> Result<Option<(String, String)>> {
    loop {
        if let Some(event) = pieces.next() {
            return Ok(Some(event));
        }
        ensure!(pieces.0.len() <= EVENT_BYTES_MAX, "a delivery is too long");
        let frame = timeout(SILENCE_MAX, body.frame()).await;
        let frame = frame.with_context(|| format!("nothing heard for {SILENCE_MAX:?}"))?;
        let Some(frame) = frame else {
            return Ok(None);
        };
        if let Ok(data) = frame?.into_data() {
            pieces.0.extend_from_slice(&data);
        }
    }
}

/// Received bytes that are not parsed yet.
#[derive(Default)]
struct UnparsedBytes(BytesMut);

impl UnparsedBytes {
    /// Name and data of the next complete event.
    fn next(&mut self) -> Option<(String, String)> {
        loop {
            let end = memchr::memmem::find(&self.0, b"\n\n")?;
            let text = self.0.split_to(end);
            self.0.advance(2);
            let text = String::from_utf8_lossy(&text);
            let (mut event, mut data) = (String::new(), String::new());
            for line in text.lines() {
                if let Some(name) = line.strip_prefix("event: ") {
                    event = name.to_owned();
                } else if let Some(value) = line.strip_prefix("data: ") {
                    data += value;
                }
            }
            // Events without a name or data are comments, which are signs of life.
            if !event.is_empty() {
                return Some((event, data));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_whole_however_they_are_cut() {
        let text = ": \n\nevent: a\ndata: {\"x\":1}\n\n: \n\n\n\nevent: b\ndata: 2\n\nevent: c\n";
        for size in [1, 2, 3, 7, text.len()] {
            let mut pieces = UnparsedBytes::default();
            let mut found = Vec::new();
            for chunk in text.as_bytes().chunks(size) {
                pieces.0.extend_from_slice(chunk);
                found.extend(std::iter::from_fn(|| pieces.next()));
            }
            let expected = [("a", "{\"x\":1}"), ("b", "2")].map(|(a, b)| (a.to_owned(), b.to_owned()));
            assert_eq!(found, expected, "in pieces of {size}");
        }
    }

    #[test]
    fn deliveries_are_read() {
        let data = r#"{"delivery":7,"method":"POST","headers":{"aeg-delivery-count":"2"},"body":"[1]"}"#;
        let delivery = SessionDelivery::read(data).unwrap();
        assert_eq!((delivery.number, &delivery.body[..]), (7, &b"[1]"[..]));
        assert_eq!(delivery.attempts_made(), 2);
        let data = r#"{"delivery":8,"method":"POST","headers":{},"bodyBase64":"/w=="}"#;
        let delivery = SessionDelivery::read(data).unwrap();
        assert_eq!(&delivery.body[..], b"\xff");
        assert_eq!(delivery.attempts_made(), 0);
        assert!(SessionDelivery::read("{}").is_err());
    }
}
