//! Fetches a document over HTTP(S): the keys of a token issuer, or whether a server is there.

use anyhow::{Context, Result, bail, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use postrider_api::issuer::Fetch;
use rustls::pki_types::{CertificateDer, ServerName};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// For everything from resolving the name to the last byte.
const PATIENCE: Duration = Duration::from_secs(10);
const BYTES_MAX: usize = 1 << 20;

/// Trusts what the system trusts, and more if it is told to. Follows no redirects.
pub struct Fetcher {
    tls: TlsConnector,
}

impl Fetcher {
    pub fn new(extra_roots: Vec<CertificateDer<'static>>) -> Result<Fetcher> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for root in extra_roots {
            roots.add(root)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Fetcher {
            tls: TlsConnector::from(Arc::new(config)),
        })
    }

    /// The body of a 200.
    pub async fn fetch(&self, url: &str) -> Result<Bytes> {
        let uri: Uri = url.parse()?;
        let authority = uri.authority().context("not an absolute URL")?.clone();
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => bail!("neither http nor https"),
        };
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = authority.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let request = Request::get(path)
            .header(header::HOST, authority.as_str())
            .header(header::ACCEPT, "application/json")
            .body(Empty::<Bytes>::new())?;
        let whole = async {
            let stream = TcpStream::connect((&*host, port)).await?;
            if !secure {
                return exchange(stream, request).await;
            }
            let name = ServerName::try_from(host.clone())?;
            exchange(self.tls.connect(name, stream).await?, request).await
        };
        timeout(PATIENCE, whole).await.context("no answer in time")?
    }
}

async fn exchange<S>(stream: S, request: Request<Empty<Bytes>>) -> Result<Bytes>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let asking = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        ensure!(status == http::StatusCode::OK, "answered with {status}");
        let body = Limited::new(response.into_body(), BYTES_MAX).collect().await;
        // The connection ends with its sender.
        drop(sender);
        Ok(body.map_err(|e| anyhow::anyhow!(e))?.to_bytes())
    };
    tokio::join!(asking, connection).0
}

#[async_trait]
impl Fetch for Fetcher {
    async fn get(&self, url: &str) -> Result<Bytes, String> {
        let fetched = self.fetch(url).await;
        fetched.map_err(|e| format!("{url}: {e:#}"))
    }
}
