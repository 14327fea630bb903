//! Fetches a document over HTTP(S): the keys of a token issuer, or an answer of a server that may
//! be down.

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use postrider_api::issuer::HttpFetch;
use postrider_engine::clock::SystemClock;
use postrider_transport::{Connection, Connector};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Time for the whole exchange, from resolving the name to the last byte.
const PATIENCE: Duration = Duration::from_secs(10);
const BYTES_MAX: usize = 1 << 20;

/// Obeys the egress policy and uses the proxy. Does not follow redirects.
pub struct Fetcher {
    connector: Connector,
}

impl Fetcher {
    pub fn new(rules: postrider_transport::Config) -> Result<Fetcher> {
        Ok(Fetcher {
            connector: Connector::new(rules, Arc::new(SystemClock))?,
        })
    }

    /// Returns the body of a 200.
    pub async fn fetch(&self, url: &str) -> Result<Bytes> {
        let uri: Uri = url.parse()?;
        let authority = uri.authority().context("not an absolute URL")?.clone();
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let request = Request::get(path)
            .header(header::HOST, authority.as_str())
            .header(header::ACCEPT, "application/json")
            .body(Empty::<Bytes>::new())?;
        let whole = async {
            let connected = self.connector.connect(&uri).await;
            let stream = connected.map_err(|failure| anyhow::anyhow!(failure.detail))?;
            exchange(stream, request).await
        };
        timeout(PATIENCE, whole).await.context("no answer in time")?
    }
}

async fn exchange(stream: Connection, request: Request<Empty<Bytes>>) -> Result<Bytes> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let asking = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        ensure!(status == http::StatusCode::OK, "answered with {status}");
        let body = Limited::new(response.into_body(), BYTES_MAX).collect().await;
        // Dropping the sender ends the connection.
        drop(sender);
        Ok(body.map_err(|e| anyhow::anyhow!(e))?.to_bytes())
    };
    tokio::join!(asking, connection).0
}

#[async_trait]
impl HttpFetch for Fetcher {
    async fn get(&self, url: &str) -> Result<Bytes, String> {
        let fetched = self.fetch(url).await;
        fetched.map_err(|e| format!("{url}: {e:#}"))
    }
}
