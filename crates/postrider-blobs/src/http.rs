//! The HTTP client for requests to stores, object_store's and our own: HTTP/1.1 over connections
//! that the server's connector opens. Redirects are not followed.

use crate::BLOB_BYTES_MAX;
use crate::store_errors::{StoreFailure, scrub};
use ::http::header::{AUTHORIZATION, USER_AGENT};
use ::http::{HeaderMap, HeaderValue, Uri};
use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioIo, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector as Connector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpService,
};
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinSet;

/// From the first byte sent to the last received, connecting included.
const EXCHANGE_MAX: Duration = Duration::from_secs(30);
const IDLE_MAX: Duration = Duration::from_secs(30);
const IDLE_PER_HOST_MAX: usize = 8;

const AGENT: HeaderValue = HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION")));

/// A byte stream to a store.
pub trait StoreStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> StoreStream for S {}

/// Opens connections to stores, according to the egress policy and through the proxy.
#[async_trait]
pub trait StoreConnect: Send + Sync {
    /// A connection to the URL's origin, over TLS if that is https. The error names the reason.
    async fn connect(&self, url: &Uri) -> Result<Box<dyn StoreStream>, String>;
}

/// A client whose connections are shared by its clones and end with the last of them.
#[derive(Clone)]
pub(crate) struct StoreHttpClient(Client<StoreDialler, HttpRequestBody>);

/// The connector in the form that hyper calls.
#[derive(Clone)]
struct StoreDialler(Arc<dyn StoreConnect>);

impl tower_service::Service<Uri> for StoreDialler {
    type Response = TokioIo<StoreConnection>;
    type Error = StoreConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, StoreConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), StoreConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let connect = self.0.clone();
        Box::pin(async move {
            let connected = connect.connect(&url).await;
            connected
                .map(|stream| TokioIo::new(StoreConnection(stream)))
                .map_err(StoreConnectError)
        })
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct StoreConnectError(String);

struct StoreConnection(Box<dyn StoreStream>);

impl Connection for StoreConnection {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for StoreConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for StoreConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

impl fmt::Debug for StoreHttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Http")
    }
}

impl Connector for StoreHttpClient {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

/// Every answer but a success is an error here: object_store would report a status and drop the
/// store's code. The error is always a [`StoreFailure`] of a kind that object_store does not retry.
#[async_trait]
impl HttpService for StoreHttpClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let failed = |failure| HttpError::new(HttpErrorKind::Unknown, failure);
        self.exchange(request).await.map_err(failed)
    }
}

impl StoreHttpClient {
    pub fn new(connect: Arc<dyn StoreConnect>) -> StoreHttpClient {
        let client = Client::builder(ConnectionTasks::default())
            .pool_idle_timeout(IDLE_MAX)
            .pool_max_idle_per_host(IDLE_PER_HOST_MAX)
            .pool_timer(TokioTimer::new())
            .build(StoreDialler(connect));
        StoreHttpClient(client)
    }

    /// Sends a request and reads the whole answer, which must be a success.
    pub async fn exchange(&self, mut request: HttpRequest) -> Result<HttpResponse, StoreFailure> {
        let host = request
            .uri()
            .authority()
            .map(ToString::to_string)
            .unwrap_or_default();
        let lost = |reason: String| StoreFailure::Lost {
            host: host.clone(),
            reason,
        };
        let signature = signature(request.headers()).unwrap_or_default();
        request.headers_mut().insert(USER_AGENT, AGENT);
        let whole = async {
            let response = self.0.request(request).await?;
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
        Err(StoreFailure::read(host, head.status, &head.headers, &text))
    }
}

/// The tasks of open connections, which end when the client is dropped.
#[derive(Clone, Default)]
struct ConnectionTasks(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for ConnectionTasks {
    fn execute(&self, connection: F) {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(connection);
    }
}

/// The signature of a request: the last part of its authorization, for every scheme.
fn signature(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let last = value.rsplit([' ', ':']).next()?;
    Some(last.strip_prefix("Signature=").unwrap_or(last).to_owned())
}

/// An error with its causes, which contain the details.
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
