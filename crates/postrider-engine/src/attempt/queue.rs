//! Messages for storage account queues: one event each, base64 in XML.

use super::sign::{SignedStorageRequest, StorageAccountKey};
use crate::deliver::{DeliveryReply, DeliveryRequest, DeliveryTransport, PendingReply, SendGuard};
use crate::in_flight::InFlightCharge;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use postrider_core::time::Timestamp;
use std::sync::Arc;

/// The default lifetime of messages in a queue: seven days.
pub const TIME_TO_LIVE_SECS: i64 = 7 * 24 * 3600;

const VERSION: &str = "2021-12-02";
const XML: &str = "application/xml";
const MS_DATE: HeaderName = HeaderName::from_static("x-ms-date");
const MS_VERSION: HeaderName = HeaderName::from_static("x-ms-version");
const BEFORE: &str = r#"<?xml version="1.0" encoding="utf-8"?><QueueMessage><MessageText>"#;
const AFTER: &str = "</MessageText></QueueMessage>";

/// The credentials for sending to a storage account.
#[derive(Clone, Debug)]
pub enum QueueAccess {
    Key(StorageAccountKey),
    /// A shared access signature in the URL's query.
    Signature,
}

/// A queue that events are put into.
#[derive(Debug)]
pub struct StorageQueueTarget {
    access: QueueAccess,
    /// The URL of the queue.
    place: Arc<Uri>,
    /// The URL that messages are posted to.
    messages: Arc<Uri>,
    time_to_live: String,
    /// Whether a missing queue is created.
    create: bool,
    headers: Arc<HeaderMap>,
}

impl StorageQueueTarget {
    /// `endpoint` is the account's queue endpoint without a trailing slash; `signature` is the
    /// query that is added to every request. None if they do not form a valid URL.
    pub fn new(
        endpoint: &str,
        queue: &str,
        time_to_live_secs: i64,
        access: QueueAccess,
        signature: &str,
        create: bool,
    ) -> Option<StorageQueueTarget> {
        let url = |path: &str, query: &str| -> Option<Arc<Uri>> {
            let queries = [query, signature].into_iter().filter(|query| !query.is_empty());
            let query = queries.collect::<Vec<_>>().join("&");
            let mark = if query.is_empty() { "" } else { "?" };
            let text = format!("{endpoint}/{queue}{path}{mark}{query}");
            text.parse().ok().map(Arc::new)
        };
        let time_to_live = time_to_live_secs.to_string();
        let mut headers = HeaderMap::new();
        headers.insert(MS_VERSION, HeaderValue::from_static(VERSION));
        Some(StorageQueueTarget {
            access,
            place: url("", "")?,
            messages: url("/messages", &format!("messagettl={time_to_live}"))?,
            time_to_live,
            create,
            headers: Arc::new(headers),
        })
    }

    /// The URL that messages are posted to.
    pub fn url(&self) -> &Arc<Uri> {
        &self.messages
    }

    /// Puts an event into the queue. A missing queue may be created first, within the same attempt.
    pub fn send(
        self: &Arc<Self>,
        transport: Arc<dyn DeliveryTransport>,
        event: &[u8],
        charge: &Arc<InFlightCharge>,
        guard: &SendGuard,
        now: Timestamp,
    ) -> PendingReply {
        let mut put = self.put(event, now);
        put.guard = Some(guard.clone());
        put.body.charge = Some(charge.clone());
        if !self.create {
            return transport.send(put);
        }
        let queue = self.clone();
        Box::pin(async move {
            let reply = transport.clone().send(put.clone()).await;
            if !matches!(&reply, DeliveryReply::Answered(answer) if answer.status == 404) {
                return reply;
            }
            match transport.clone().send(queue.make(now)).await {
                // 204: another client has created the queue in the meantime.
                DeliveryReply::Answered(made) if matches!(made.status, 201 | 204) => {
                    transport.send(put).await
                }
                DeliveryReply::Answered(refused) => {
                    tracing::warn!(queue = %queue.place.path(), status = refused.status, "a missing queue could not be made");
                    reply
                }
                DeliveryReply::Failed(failure) => {
                    tracing::warn!(queue = %queue.place.path(), detail = %failure.detail, "a missing queue could not be made");
                    reply
                }
            }
        })
    }

    fn put(&self, event: &[u8], now: Timestamp) -> DeliveryRequest {
        let mut body = String::with_capacity(BEFORE.len() + event.len().div_ceil(3) * 4 + AFTER.len());
        body.push_str(BEFORE);
        BASE64.encode_string(event, &mut body);
        body.push_str(AFTER);
        let parameters = [("messagettl", self.time_to_live.as_str())];
        self.request(Method::POST, &self.messages, body, &parameters, now)
    }

    fn make(&self, now: Timestamp) -> DeliveryRequest {
        self.request(Method::PUT, &self.place, String::new(), &[], now)
    }

    fn request(
        &self,
        method: Method,
        url: &Arc<Uri>,
        body: String,
        parameters: &[(&str, &str)],
        now: Timestamp,
    ) -> DeliveryRequest {
        let date = now.http_date();
        let content_type = if body.is_empty() { "" } else { XML };
        let mut more = Vec::with_capacity(3);
        if let QueueAccess::Key(key) = &self.access {
            let authorization = key.authorization(&SignedStorageRequest {
                method: method.as_str(),
                length: body.len(),
                content_type,
                headers: &[(MS_DATE.as_str(), &date), (MS_VERSION.as_str(), VERSION)],
                path: url.path(),
                parameters,
            });
            let mut value =
                HeaderValue::try_from(authorization).expect("names of accounts and base64 fit a header");
            value.set_sensitive(true);
            more.push((AUTHORIZATION, value));
        }
        more.push((
            MS_DATE,
            HeaderValue::try_from(date).expect("a date fits a header"),
        ));
        if !body.is_empty() {
            more.push((CONTENT_TYPE, HeaderValue::from_static(XML)));
        }
        DeliveryRequest {
            method,
            url: url.clone(),
            headers: self.headers.clone(),
            more,
            body: body.into(),
            guard: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deliver::{DeliveryAnswer, TransportFailure, TransportFailureKind};
    use async_trait::async_trait;
    use std::sync::Mutex;

    const ENDPOINT: &str = "http://127.0.0.1:10001/devstoreaccount1";

    fn queue(create: bool) -> Arc<StorageQueueTarget> {
        let key = StorageAccountKey::new("devstoreaccount1", "a2V5").unwrap();
        Arc::new(StorageQueueTarget::new(ENDPOINT, "orders", 300, QueueAccess::Key(key), "", create).unwrap())
    }

    const NOW: Timestamp = Timestamp::from_secs(784_111_777);

    #[test]
    fn a_message_is_an_event_in_base64() {
        let put = queue(false).put(br#"{"id":"1"}"#, NOW);
        assert_eq!(put.method, Method::POST);
        assert_eq!(
            put.url.to_string(),
            format!("{ENDPOINT}/orders/messages?messagettl=300")
        );
        assert_eq!(
            put.body.bytes.to_bytes(),
            r#"<?xml version="1.0" encoding="utf-8"?><QueueMessage><MessageText>eyJpZCI6IjEifQ==</MessageText></QueueMessage>"#
        );
        assert_eq!(put.header("x-ms-date"), Some("Sun, 06 Nov 1994 08:49:37 GMT"));
        assert_eq!(put.header("x-ms-version"), Some("2021-12-02"));
        assert_eq!(put.header("content-type"), Some("application/xml"));
        let authorization = put.header("authorization").unwrap();
        assert!(
            authorization.starts_with("SharedKey devstoreaccount1:"),
            "{authorization}"
        );
    }

    #[test]
    fn a_signature_in_the_url_needs_no_key() {
        let queue =
            StorageQueueTarget::new(ENDPOINT, "orders", -1, QueueAccess::Signature, "sv=1&sig=x", true)
                .unwrap();
        let (put, make) = (queue.put(b"{}", NOW), queue.make(NOW));
        let messages = format!("{ENDPOINT}/orders/messages?messagettl=-1&sv=1&sig=x");
        assert_eq!(put.url.to_string(), messages);
        assert_eq!(make.url.to_string(), format!("{ENDPOINT}/orders?sv=1&sig=x"));
        assert_eq!(
            (put.header("authorization"), make.header("authorization")),
            (None, None)
        );
    }

    /// Answers with one status after another; 0 stands for no answer.
    struct ScriptedStatusTransport {
        statuses: Mutex<Vec<u16>>,
        asked: Mutex<Vec<(Method, String)>>,
    }

    #[async_trait]
    impl DeliveryTransport for ScriptedStatusTransport {
        async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
            let target = request.url.path().to_owned();
            self.asked.lock().unwrap().push((request.method, target));
            match self.statuses.lock().unwrap().remove(0) {
                0 => DeliveryReply::Failed(TransportFailure {
                    kind: TransportFailureKind::Socket,
                    detail: "gone".into(),
                }),
                status => DeliveryReply::Answered(DeliveryAnswer {
                    status,
                    ..DeliveryAnswer::default()
                }),
            }
        }
    }

    async fn check(create: bool, statuses: &[u16], asked: &str, expected: u16) {
        let transport = Arc::new(ScriptedStatusTransport {
            statuses: Mutex::new(statuses.to_vec()),
            asked: Mutex::default(),
        });
        let reply = queue(create)
            .send(
                transport.clone(),
                b"{}",
                &Arc::default(),
                &SendGuard::default(),
                NOW,
            )
            .await;
        let DeliveryReply::Answered(answer) = reply else {
            panic!("{reply:?}");
        };
        assert_eq!(answer.status, expected, "{statuses:?}");
        let requests = transport.asked.lock().unwrap();
        let requests: Vec<String> = requests
            .iter()
            .map(|(method, path)| format!("{method} {path}"))
            .collect();
        assert_eq!(
            requests.join(", ").replace("/devstoreaccount1", ""),
            asked,
            "{statuses:?}"
        );
    }

    #[tokio::test]
    async fn a_missing_queue_is_made_if_that_is_said() {
        let put = "POST /orders/messages";
        let twice = format!("{put}, PUT /orders, {put}");
        let once = format!("{put}, PUT /orders");
        check(false, &[404], put, 404).await;
        check(true, &[201], put, 201).await;
        check(true, &[404, 201, 201], &twice, 201).await;
        check(true, &[404, 204, 201], &twice, 201).await;
        check(true, &[404, 201, 503], &twice, 503).await;
        check(true, &[404, 403], &once, 404).await;
        check(true, &[404, 0], &once, 404).await;
        check(true, &[503], put, 503).await;
    }
}
