//! Handles a delivery of a listen session: forwards it if configured, and reports the result to the
//! server.

use super::super::management_client::{ManagementClient, ServerRefusal};
use super::stream::SessionDelivery;
use super::{PATH, forward_url};
use crate::client::{self, KeptConnection};
use anyhow::Result;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use http_body_util::{BodyExt, Limited};
use ipnet::IpNet;
use postrider_engine::clock::SystemClock;
use postrider_engine::deliver::{DeliveryReply, DeliveryRequest, DeliveryTransport};
use postrider_transport::{Config, EgressPolicy, HttpTransport};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Longer than any profile waits for a webhook.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(120);
/// Most bytes of a response that are passed on: the server keeps no more.
const BODY_PASSED_ON_MAX: usize = 4096;
/// Response headers that the server uses.
const PASSED_ON: [&str; 2] = ["retry-after", "content-type"];
/// Headers that concern a single connection, or that the transport writes itself.
const NOT_FORWARDED: [&str; 5] = [
    "host",
    "content-length",
    "connection",
    "transfer-encoding",
    "keep-alive",
];
const REFUSAL_BYTES_MAX: usize = 1 << 20;

/// URL that deliveries are forwarded to.
pub struct ForwardUrl {
    url: Arc<Uri>,
    /// The URL without its query, which may hold a secret.
    pub shown: String,
    transport: Arc<HttpTransport>,
}

/// Result of a forwarded delivery.
#[derive(Clone, Debug, PartialEq)]
pub enum ForwardResult {
    Answered { status: u16, took: Duration },
    Failed(String),
}

impl ForwardResult {
    pub fn is_success(&self) -> bool {
        matches!(self, ForwardResult::Answered { status: 200..300, .. })
    }
}

/// Result of handling a delivery.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HandledDelivery {
    pub forwarded: Option<ForwardResult>,
    /// Why the report to the server failed, if it did.
    pub trouble: Option<String>,
}

impl ForwardUrl {
    pub fn to(url: &str) -> Result<ForwardUrl> {
        let url = forward_url(url)?;
        let anywhere: [IpNet; 2] = [
            IpNet::new_assert([0, 0, 0, 0].into(), 0),
            IpNet::new_assert([0u16; 8].into(), 0),
        ];
        let config = Config {
            // No egress policy applies: the user chose the URL on the command line.
            egress: EgressPolicy::Custom {
                allow: anywhere.into(),
                deny: Vec::new(),
            },
            ..Config::default()
        };
        let transport = HttpTransport::new(config, Arc::new(SystemClock))?;
        Ok(ForwardUrl {
            shown: url.to_string().split('?').next().unwrap_or_default().to_owned(),
            url: Arc::new(url),
            transport: Arc::new(transport),
        })
    }

    /// Forwards a delivery. Returns the result to show, and the report for the server.
    async fn pass_on(&self, delivery: &SessionDelivery) -> (ForwardResult, Value) {
        let request = DeliveryRequest {
            method: Method::from_bytes(delivery.method.as_bytes()).unwrap_or(Method::POST),
            url: self.url.clone(),
            headers: Arc::new(forwarded_headers(delivery)),
            more: Vec::new(),
            body: delivery.body.clone().into(),
            guard: None,
        };
        let begun = Instant::now();
        let reply = timeout(FORWARD_TIMEOUT, self.transport.clone().send(request)).await;
        let failed = |reason: String| {
            (
                ForwardResult::Failed(reason.clone()),
                json!({ "failure": reason }),
            )
        };
        match reply {
            Err(_) => failed(format!("no answer within {FORWARD_TIMEOUT:?}")),
            Ok(DeliveryReply::Failed(failure)) => failed(failure.detail),
            Ok(DeliveryReply::Answered(answer)) if !(200..600).contains(&answer.status) => {
                failed(format!("answered with {}, which is no status", answer.status))
            }
            Ok(DeliveryReply::Answered(answer)) => {
                let took = begun.elapsed();
                let headers = PASSED_ON.into_iter().filter_map(|name| {
                    let value = answer.headers.get(name)?.to_str().ok()?;
                    Some((name.to_owned(), json!(value)))
                });
                let body = &answer.body[..answer.body.len().min(BODY_PASSED_ON_MAX)];
                let told = json!({
                    "status": answer.status,
                    "headers": Value::Object(headers.collect()),
                    "body": String::from_utf8_lossy(body),
                });
                let status = answer.status;
                (ForwardResult::Answered { status, took }, told)
            }
        }
    }
}

fn forwarded_headers(delivery: &SessionDelivery) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in &delivery.headers {
        if NOT_FORWARDED.contains(&name.as_str()) {
            continue;
        }
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    }
    headers
}

/// Handles the deliveries of one stream.
pub struct DeliveryHandler {
    arm: Arc<ManagementClient>,
    forward: Option<Arc<ForwardUrl>>,
    path: String,
    /// Idle connections for reports: never more than there were reports at once.
    idle: Mutex<Vec<KeptConnection>>,
}

impl DeliveryHandler {
    pub fn new(arm: Arc<ManagementClient>, forward: Option<Arc<ForwardUrl>>, token: &str) -> DeliveryHandler {
        DeliveryHandler {
            arm,
            forward,
            path: format!("{PATH}/{token}"),
            idle: Mutex::default(),
        }
    }

    /// Forwards a delivery if configured, and reports the result to the server if the delivery is
    /// whole.
    pub async fn handle_delivery(
        &self,
        delivery: SessionDelivery,
        is_whole: bool,
    ) -> (SessionDelivery, HandledDelivery) {
        let (forwarded, told) = match &self.forward {
            Some(forward) => {
                let (forwarded, told) = forward.pass_on(&delivery).await;
                (Some(forwarded), told)
            }
            None => (None, json!({"status": 200})),
        };
        let answered = match is_whole {
            true => self.answer(delivery.number, &told).await,
            false => Ok(()),
        };
        let trouble = answered.err().map(|e| match e.downcast_ref::<ServerRefusal>() {
            Some(ServerRefusal { status: 404, .. }) => "answered too late: the server tries again".to_owned(),
            _ => format!("the server could not be told: {e:#}"),
        });
        (delivery, HandledDelivery { forwarded, trouble })
    }

    async fn answer(&self, number: u64, told: &Value) -> Result<()> {
        let path = format!("{}/{number}", self.path);
        let waiting = self.idle.lock().expect("no panic holds it").pop();
        if let Some(kept) = waiting {
            // The server may have closed the idle connection meanwhile. A repeated report counts
            // once.
            match self.tell(kept, &path, told).await {
                Err(e) if e.downcast_ref::<ServerRefusal>().is_none() => {}
                told => return told,
            }
        }
        self.tell(self.arm.client().keep().await?, &path, told).await
    }

    async fn tell(&self, mut kept: KeptConnection, path: &str, told: &Value) -> Result<()> {
        let client = self.arm.client();
        let response = client
            .post_on_connection(&mut kept, path, told.to_string().into())
            .await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, REFUSAL_BYTES_MAX).collect().await;
        let body = body.map_err(|e| anyhow::anyhow!(e))?.to_bytes();
        self.idle.lock().expect("no panic holds it").push(kept);
        let answer = client::ApiAnswer {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
        };
        match answer.status {
            200..300 => Ok(()),
            _ => Err(ServerRefusal::of(&answer).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[test]
    fn urls_to_forward_to() {
        for good in [
            "http://127.0.0.1:3000",
            "https://localhost/hook?code=1",
            "http://[::1]:80/x",
        ] {
            assert!(ForwardUrl::to(good).is_ok(), "{good}");
        }
        assert_eq!(
            ForwardUrl::to("http://x/hook?code=1").unwrap().shown,
            "http://x/hook"
        );
        for bad in ["", "3000", "localhost:3000", "/hook", "ftp://x/", "http://u:p@x/"] {
            let refused = ForwardUrl::to(bad).err().expect(bad).to_string();
            assert!(refused.starts_with("--forward: "), "{bad}: {refused}");
        }
    }

    #[test]
    fn what_is_about_the_connection_stays_here() {
        let given = [
            ("host", "listen"),
            ("content-length", "2"),
            ("aeg-event-type", "Notification"),
        ];
        let delivery = SessionDelivery {
            number: 1,
            method: "POST".into(),
            headers: given
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            body: Bytes::new(),
        };
        let headers = forwarded_headers(&delivery);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers["aeg-event-type"], "Notification");
    }
}
