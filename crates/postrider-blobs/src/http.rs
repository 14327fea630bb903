//! The HTTP client that requests to stores go out with, object_store's and our own: HTTP/1.1 over TCP or TLS
//! with the machine's trust anchors. It follows no redirects and knows no proxies.

use crate::BLOB_BYTES_MAX;
use crate::answer::{Failure, scrub};
use ::http::header::{AUTHORIZATION, USER_AGENT};
use ::http::{HeaderMap, HeaderValue};
use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioTimer;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector as Connector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpService,
};
use rustls::{ClientConfig, RootCertStore};
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;

const CONNECT_MAX: Duration = Duration::from_secs(5);
/// From the first byte sent to the last received, connecting included.
const EXCHANGE_MAX: Duration = Duration::from_secs(30);
const IDLE_MAX: Duration = Duration::from_secs(30);
const IDLE_PER_HOST_MAX: usize = 8;

const AGENT: HeaderValue = HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION")));

/// A client whose connections are shared by its clones and end with the last of them.
#[derive(Clone, Default)]
pub(crate) struct Http(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// The machine's roots take time to read, so they wait until they are needed.
    client: OnceCell<Client<HttpsConnector<HttpConnector>, HttpRequestBody>>,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Http")
    }
}

impl Connector for Http {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

/// Answers other than success are errors here: object_store would tell a status and drop the store's code.
/// The error is always a [`Failure`] of a kind that object_store does not retry.
#[async_trait]
impl HttpService for Http {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let failed = |failure| HttpError::new(HttpErrorKind::Unknown, failure);
        self.exchange(request).await.map_err(failed)
    }
}

impl Http {
    /// Sends a request and reads the whole answer, which must be a success.
    pub async fn exchange(&self, mut request: HttpRequest) -> Result<HttpResponse, Failure> {
        let host = request
            .uri()
            .authority()
            .map(ToString::to_string)
            .unwrap_or_default();
        let lost = |reason: String| Failure::Lost {
            host: host.clone(),
            reason,
        };
        let signature = signature(request.headers()).unwrap_or_default();
        request.headers_mut().insert(USER_AGENT, AGENT);
        let whole = async {
            let response = self.client().await.request(request).await?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, BLOB_BYTES_MAX).collect().await?;
            Ok((head, body.to_bytes()))
        };
        let exchanged: Result<_, Box<dyn Error + Send + Sync>> =
            match tokio::time::timeout(EXCHANGE_MAX, whole).await {
                Ok(exchanged) => exchanged,
                Err(_) => return Err(lost(format!("no answer within {EXCHANGE_MAX:?}"))),
            };
        let (head, body) = exchanged.map_err(|e| lost(chain(&*e)))?;
        if head.status.is_success() {
            return Ok(HttpResponse::from_parts(head, body.into()));
        }
        let text = scrub(&String::from_utf8_lossy(&body), [signature.as_str()]);
        Err(Failure::read(host, head.status, &head.headers, &text))
    }

    async fn client(&self) -> &Client<HttpsConnector<HttpConnector>, HttpRequestBody> {
        self.0
            .client
            .get_or_init(|| async {
                let roots = tokio::task::spawn_blocking(native_roots).await;
                let mut tcp = HttpConnector::new();
                tcp.enforce_http(false);
                tcp.set_nodelay(true);
                tcp.set_connect_timeout(Some(CONNECT_MAX));
                let connector = HttpsConnectorBuilder::new()
                    .with_tls_config(tls(roots.unwrap_or_else(|_| RootCertStore::empty())))
                    .https_or_http()
                    .enable_http1()
                    .wrap_connector(tcp);
                Client::builder(Connections::default())
                    .pool_idle_timeout(IDLE_MAX)
                    .pool_max_idle_per_host(IDLE_PER_HOST_MAX)
                    .pool_timer(TokioTimer::new())
                    .build(connector)
            })
            .await
    }
}

/// Holds the tasks of open connections, so that they end when the client is dropped.
#[derive(Clone, Default)]
struct Connections(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Connections {
    fn execute(&self, connection: F) {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(connection);
    }
}

fn tls(roots: RootCertStore) -> ClientConfig {
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring speaks TLS 1.2 and 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

fn native_roots() -> RootCertStore {
    let native = rustls_native_certs::load_native_certs();
    for error in &native.errors {
        tracing::warn!(%error, "part of the machine's root certificates could not be read");
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(native.certs);
    roots
}

/// What proves a request to be ours: the last part of its authorization, whichever scheme it follows.
fn signature(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let last = value.rsplit([' ', ':']).next()?;
    Some(last.strip_prefix("Signature=").unwrap_or(last).to_owned())
}

/// An error with its causes, which say more than it does.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut told = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !told.ends_with(&text) {
            told.push_str(": ");
            told.push_str(&text);
        }
        cause = error.source();
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_of_every_scheme_is_found() {
        let check = |value: &'static str, expected: &str| {
            let headers = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static(value))]);
            assert_eq!(signature(&headers).as_deref(), Some(expected), "{value}");
        };
        check("SharedKey account:c2ln/bmF0+dXJl=", "c2ln/bmF0+dXJl=");
        check(
            "AWS4-HMAC-SHA256 Credential=id/20261116/r/s3/aws4_request, SignedHeaders=host;x-amz-date, Signature=0a1b",
            "0a1b",
        );
        check("Bearer ya29.token", "ya29.token");
        assert_eq!(signature(&HeaderMap::new()), None);
    }
}
