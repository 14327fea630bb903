//! Client of a running server's own API, for the commands that talk to one.

use crate::config::ConfigSecret;
use crate::contexts::{self, ContextsFile};
use crate::terminal::harmless;
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde::Deserialize;
use serde_json::Value;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Some answers cover millions of items.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
const ANSWER_BYTES_MAX: usize = 64 << 20;

const DEFAULT_SERVER: &str = "http://127.0.0.1:5888";

/// Server address and credentials.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ClientFlags {
    /// A server saved with "postrider context add" [default: the one in use, if any]
    #[arg(
        long,
        value_name = "NAME",
        env = "POSTRIDER_CONTEXT",
        global = true,
        help_heading = "Server"
    )]
    pub context: Option<String>,
    /// The server's address; http:// may be left out [default: http://127.0.0.1:5888]
    #[arg(
        long,
        value_name = "URL",
        env = "POSTRIDER_SERVER",
        global = true,
        help_heading = "Server"
    )]
    pub server: Option<String>,
    /// A client's secret [default: the one in credentials.toml of the data directory]
    #[arg(
        long,
        value_name = "SECRET",
        env = "POSTRIDER_SECRET",
        hide_env_values = true,
        value_parser = |text: &str| Ok::<_, Infallible>(ConfigSecret::new(text)),
        global = true, help_heading = "Server"
    )]
    pub secret: Option<ConfigSecret>,
    /// The server's data directory, if it is on this machine [default: ./postrider-data]
    #[arg(
        long,
        value_name = "DIR",
        env = "POSTRIDER_DATA_DIR",
        global = true,
        help_heading = "Server"
    )]
    pub data_dir: Option<PathBuf>,
    /// Certificates to trust besides the system's [default: tls/ca.pem of the data directory]
    #[arg(long, value_name = "FILE", global = true, help_heading = "Server")]
    pub ca: Option<PathBuf>,
    /// File in which contexts are kept
    #[arg(
        long,
        value_name = "FILE",
        env = "POSTRIDER_CONTEXTS",
        global = true,
        hide = true,
        help_heading = "Server"
    )]
    pub contexts: Option<PathBuf>,
}

/// Address and credentials that follow from flags, environment and contexts.
#[derive(Debug)]
struct ServerTarget {
    url: String,
    secret: Option<ConfigSecret>,
    ca: Option<PathBuf>,
    group: Option<String>,
    /// Name of the context that the values come from.
    context: Option<String>,
}

impl ClientFlags {
    /// The command line and the environment win over a context. A context is used only if it is
    /// named, or if neither says where the server is: its secret must not go to another server.
    fn target(&self, contexts: &ContextsFile) -> Result<ServerTarget> {
        let context = match &self.context {
            Some(name) => Some((name.as_str(), contexts.named(name)?)),
            None if self.server.is_some() || self.data_dir.is_some() => None,
            None => contexts.in_use()?,
        };
        let secret = self.secret.clone().filter(|secret| !secret.expose().is_empty());
        let Some((name, context)) = context else {
            return Ok(ServerTarget {
                url: self.server.clone().unwrap_or_else(|| DEFAULT_SERVER.into()),
                secret,
                ca: self.ca.clone(),
                group: None,
                context: None,
            });
        };
        let secret = match secret {
            Some(secret) => Some(secret),
            None => context.secret().with_context(|| format!("context {name:?}"))?,
        };
        Ok(ServerTarget {
            url: self.server.clone().unwrap_or_else(|| context.url.clone()),
            secret,
            ca: self.ca.clone().or_else(|| context.ca.clone()),
            group: context.group.clone(),
            context: Some(name.to_owned()),
        })
    }
}

/// A server's answer with any status.
#[derive(Clone, Debug)]
pub struct ApiAnswer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl ApiAnswer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// Client of one server that opens a connection for each request.
pub struct ApiClient {
    url: ServerUrl,
    tls: Option<TlsConnector>,
    secret: ConfigSecret,
    /// Resource group that the context names.
    pub group: Option<String>,
    /// Whether the user has been told that some nodes do not answer.
    incomplete: AtomicBool,
}

impl ApiClient {
    pub fn new(flags: &ClientFlags) -> Result<ApiClient> {
        let contexts = ContextsFile::read(&contexts::path(flags.contexts.as_deref())?)?;
        let target = flags.target(&contexts)?;
        let url = ServerUrl::read(&target.url)?;
        let data_dir = flags.data_dir.as_deref().unwrap_or(Path::new("postrider-data"));
        let secret = match (target.secret, &target.context) {
            (Some(secret), _) => secret,
            (None, Some(context)) if flags.data_dir.is_none() => {
                bail!("no secret: context {context:?} has none; give --secret or POSTRIDER_SECRET")
            }
            (None, _) => read_secret(&data_dir.join("credentials.toml"))?,
        };
        let tls = match url.secure {
            true => Some(connector(target.ca.as_deref(), &data_dir.join("tls/ca.pem"))?),
            false => None,
        };
        Ok(ApiClient {
            url,
            tls,
            secret,
            group: target.group,
            incomplete: AtomicBool::new(false),
        })
    }

    pub async fn get(&self, path: &str) -> Result<Bytes> {
        self.ask(Method::GET, path, Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Bytes> {
        self.ask(Method::POST, path, body.to_string().into()).await
    }

    /// Body of a successful answer; any other status is an error with the server's message.
    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes> {
        let json = [("content-type", "application/json")];
        let answer = self.send(method, path, true, &json, body).await?;
        ensure!(
            (200..300).contains(&answer.status),
            "{}",
            refusal(answer.status, &answer.body)
        );
        Ok(answer.body)
    }

    /// Sends a request and returns any answer. The client's secret is sent only with `with_secret`.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        with_secret: bool,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<ApiAnswer> {
        let request = self.request(method, path, with_secret, headers, body)?;
        let asking = || format!("asking {}", self.url.authority);
        let answer = self.answer(request).await.with_context(asking)?;
        if let Some(nodes) = missing(&answer.body)
            && !self.incomplete.swap(true, Relaxed)
        {
            let nodes = harmless(&nodes.join(", "));
            eprintln!("incomplete: these nodes do not answer, and what only they know is not shown: {nodes}");
        }
        Ok(answer)
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        with_secret: bool,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, &self.url.authority);
        if with_secret {
            let bearer = format!("Bearer {}", self.secret.expose());
            request = request.header(header::AUTHORIZATION, bearer);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Full::new(body)).context("a header is not valid")
    }

    async fn answer(&self, request: Request<Full<Bytes>>) -> Result<ApiAnswer> {
        let answered = exchange(self.connect().await?, request).await;
        answered.map_err(|e| self.explained(e))
    }

    /// Opens a connection for several requests, or for a streamed answer.
    pub async fn keep(&self) -> Result<KeptConnection> {
        let stream = self.connect().await?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        // Connection errors also surface at the request, which reports them.
        driver.spawn(async move { drop(connection.await) });
        Ok(KeptConnection {
            sender,
            _driver: driver,
        })
    }

    /// Posts JSON over a kept connection. Returns before the body of the answer has been read.
    pub async fn post_on_connection(
        &self,
        kept: &mut KeptConnection,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>> {
        let json = [("content-type", "application/json")];
        let request = self.request(Method::POST, path, true, &json, body)?;
        let answered = timeout(ANSWER_TIMEOUT, kept.sender.send_request(request)).await;
        let answered = answered.context("no answer in time")?;
        answered.map_err(|e| self.explained(e.into()))
    }

    /// Explains a garbled answer on a plain connection: most likely it is a TLS alert.
    fn explained(&self, error: anyhow::Error) -> anyhow::Error {
        let is_garbage = error
            .downcast_ref::<hyper::Error>()
            .is_some_and(hyper::Error::is_parse);
        if self.url.secure || !is_garbage {
            return error;
        }
        let authority = &self.url.authority;
        anyhow::anyhow!("{authority} does not speak plain http; if it speaks https, use https://{authority}")
    }

    async fn connect(&self) -> Result<Box<dyn ApiStream>> {
        let connecting = TcpStream::connect((&*self.url.host, self.url.port));
        let stream = timeout(CONNECT_TIMEOUT, connecting).await;
        let stream = stream.context("no connection in time")?;
        let stream = stream.map_err(|e| {
            anyhow::anyhow!(
                "{e}; is the server running? Start one with \"postrider serve\", or name another with --server or \
                 --context"
            )
        })?;
        let Some(tls) = &self.tls else {
            return Ok(Box::new(stream));
        };
        let name = ServerName::try_from(self.url.host.clone())?;
        let secured = timeout(CONNECT_TIMEOUT, tls.connect(name, stream)).await;
        match secured.context("no connection in time")? {
            Ok(secured) => Ok(Box::new(secured)),
            Err(e) if speaks_no_tls(&e) => {
                let authority = &self.url.authority;
                bail!("{authority} does not speak https; if it speaks plain http, use http://{authority}")
            }
            Err(e) => Err(e.into()),
        }
    }
}

/// A connection, with or without TLS.
trait ApiStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> ApiStream for S {}

/// A connection that outlives a request; dropping it closes it.
pub struct KeptConnection {
    sender: SendRequest<Full<Bytes>>,
    _driver: JoinSet<()>,
}

async fn exchange(stream: Box<dyn ApiStream>, request: Request<Full<Bytes>>) -> Result<ApiAnswer> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let asking = async move {
        let response = sender.send_request(request).await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|e| anyhow::anyhow!(e))?.to_bytes();
        // Dropping the sender ends the connection.
        drop(sender);
        Ok(ApiAnswer {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
        })
    };
    let both = async { tokio::join!(asking, connection).0 };
    timeout(ANSWER_TIMEOUT, both).await.context("no answer in time")?
}

/// Whether a TLS handshake failed because the other side does not speak TLS.
fn speaks_no_tls(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(rustls::Error::InvalidMessage(_)))
}

/// Nodes of a cluster that did not contribute to an answer.
fn missing(body: &[u8]) -> Option<Vec<String>> {
    #[derive(Deserialize)]
    struct IncompleteAnswer {
        missing: Vec<String>,
    }
    // Most answers lack none: the search avoids parsing them twice.
    memchr::memmem::find(body, b"\"missing\"")?;
    let answer: IncompleteAnswer = serde_json::from_slice(body).ok()?;
    Some(answer.missing).filter(|nodes| !nodes.is_empty())
}

/// Message of a server's refusal.
fn refusal(status: u16, body: &[u8]) -> String {
    let problem: Option<Value> = serde_json::from_slice(body).ok();
    let problem = problem.as_ref();
    let detail = problem.and_then(|problem| {
        let message = problem["error"]["message"].as_str();
        problem["detail"].as_str().or(message)
    });
    match detail {
        Some(detail) => detail.to_owned(),
        None => format!("the server answers {status}"),
    }
}

/// The value encoded for a query string.
pub fn encoded(value: &str) -> String {
    utf8_percent_encode(value, NON_ALPHANUMERIC).to_string()
}

/// Refuses text that is no server's URL.
pub fn check_url(text: &str) -> Result<()> {
    ServerUrl::read(text).map(|_| ())
}

#[derive(Debug, PartialEq, Eq)]
struct ServerUrl {
    secure: bool,
    host: String,
    port: u16,
    authority: String,
}

impl ServerUrl {
    fn read(text: &str) -> Result<ServerUrl> {
        let refused = || format!("{text:?} is not a server's address such as http://127.0.0.1:5888");
        let whole = match text {
            text if text.contains("://") => text.to_owned(),
            port if port.parse::<u16>().is_ok() => format!("http://127.0.0.1:{port}"),
            text => format!("http://{text}"),
        };
        let uri: Uri = whole.parse().with_context(refused)?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            bail!(refused());
        };
        ensure!(
            matches!(uri.path(), "" | "/") && uri.query().is_none() && !authority.as_str().contains('@'),
            refused()
        );
        // The parser treats a port beyond 16 bits as absent.
        let has_port = authority.as_str().len() > authority.host().len();
        ensure!(!has_port || authority.port().is_some(), refused());
        let secure = match scheme {
            "http" => false,
            "https" => true,
            _ => bail!(refused()),
        };
        Ok(ServerUrl {
            secure,
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(if secure { 443 } else { 80 }),
            authority: authority.to_string(),
        })
    }
}

/// Reads the secret from a `credentials.toml` that the server wrote.
fn read_secret(path: &Path) -> Result<ConfigSecret> {
    let reading = || {
        format!(
            "no secret: give --secret or POSTRIDER_SECRET, or --data-dir; reading {}",
            path.display()
        )
    };
    let text = std::fs::read_to_string(path).with_context(reading)?;
    // The parser's error message quotes the line, which holds the secret.
    let table: Option<toml::Table> = toml::from_str(&text).ok();
    let secret = table
        .as_ref()
        .and_then(|table| table.get("client_secret")?.as_str());
    let missing = || format!("{} holds no client_secret", path.display());
    Ok(ConfigSecret::new(secret.with_context(missing)?))
}

/// Trusts the system's CAs and the server's own.
fn connector(given: Option<&Path>, found: &Path) -> Result<TlsConnector> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let ca = given.or_else(|| found.exists().then_some(found));
    if let Some(path) = ca {
        let reading = || format!("reading the certificates in {}", path.display());
        for certificate in CertificateDer::pem_file_iter(path).with_context(reading)? {
            roots
                .add(certificate.with_context(reading)?)
                .with_context(reading)?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_missing_is_read() {
        let nodes = |body: &str| missing(body.as_bytes());
        assert_eq!(
            nodes(r#"{"value":[],"missing":["a","b"]}"#),
            Some(vec!["a".to_owned(), "b".to_owned()])
        );
        for whole in [
            r#"{"value":[{"missing":["a"]}]}"#,
            r#"{"missing":[]}"#,
            r#"{"missing":true}"#,
            r#"["missing"]"#,
            "\"missing\"",
            "",
        ] {
            assert_eq!(nodes(whole), None, "{whole}");
        }
    }

    #[test]
    fn addresses_are_read() {
        let check = |text: &str, secure: bool, host: &str, port: u16, authority: &str| {
            let expected = ServerUrl {
                secure,
                host: host.into(),
                port,
                authority: authority.into(),
            };
            assert_eq!(ServerUrl::read(text).unwrap(), expected, "{text}");
        };
        check(
            "http://127.0.0.1:5888",
            false,
            "127.0.0.1",
            5888,
            "127.0.0.1:5888",
        );
        check(
            "https://localhost:4438/",
            true,
            "localhost",
            4438,
            "localhost:4438",
        );
        check(
            "https://events.example",
            true,
            "events.example",
            443,
            "events.example",
        );
        check("http://[::1]:5888", false, "::1", 5888, "[::1]:5888");
        check("localhost:5888", false, "localhost", 5888, "localhost:5888");
        check("[::1]:5888/", false, "::1", 5888, "[::1]:5888");
        check("5888", false, "127.0.0.1", 5888, "127.0.0.1:5888");
        for bad in [
            "",
            "localhost:99999",
            "localhost:x",
            "://x",
            "ftp://x",
            "http://x/y",
            "http://x/?a=b",
            "http://u:p@x",
        ] {
            let refused = ServerUrl::read(bad).unwrap_err().to_string();
            assert!(refused.contains("is not a server's address"), "{bad}: {refused}");
        }
    }

    #[test]
    fn flags_come_before_contexts_and_contexts_before_what_is_local() {
        let contexts: ContextsFile = toml::from_str(
            "current = 'prod'\n\
             [context.prod]\nurl = 'https://prod:1'\nsecret = 'p'\ngroup = 'live'\nca = '/prod.pem'\n\
             [context.lab]\nurl = 'http://lab:1'\nsecret = 'l'\n",
        )
        .unwrap();
        let check = |flags: ClientFlags, expected: [Option<&str>; 4]| {
            let target = flags.target(&contexts).unwrap();
            let secret = target.secret.as_ref().map(ConfigSecret::expose);
            let ca = target.ca.as_ref().map(|path| path.to_str().unwrap());
            let got = [Some(target.url.as_str()), secret, ca, target.group.as_deref()];
            assert_eq!(got, expected, "{flags:?}");
        };
        let flags = ClientFlags::default;
        let some = |text: &str| Some(text.to_owned());
        check(
            flags(),
            [Some("https://prod:1"), Some("p"), Some("/prod.pem"), Some("live")],
        );
        let lab = ClientFlags {
            context: some("lab"),
            ..flags()
        };
        check(lab.clone(), [Some("http://lab:1"), Some("l"), None, None]);
        check(
            ClientFlags {
                server: some("http://tunnel"),
                secret: Some(ConfigSecret::new("mine")),
                ..lab
            },
            [Some("http://tunnel"), Some("mine"), None, None],
        );
        // The secret of the context in use is not sent to another server.
        check(
            ClientFlags {
                server: some("http://x"),
                ..flags()
            },
            [Some("http://x"), None, None, None],
        );
        check(
            ClientFlags {
                data_dir: Some("d".into()),
                ..flags()
            },
            [Some(DEFAULT_SERVER), None, None, None],
        );
        let unknown = ClientFlags {
            context: some("prd"),
            ..flags()
        };
        let refused = unknown.target(&contexts).unwrap_err().to_string();
        assert_eq!(
            refused,
            "context \"prd\" does not exist, only lab, prod; did you mean \"prod\"?"
        );
        let none = ClientFlags::default().target(&ContextsFile::default()).unwrap();
        assert_eq!((none.url.as_str(), none.secret.is_none()), (DEFAULT_SERVER, true));
    }

    #[test]
    fn the_secret_is_found_where_the_server_put_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials.toml");
        let refused = format!("{:#}", read_secret(&path).unwrap_err());
        assert!(refused.starts_with("no secret: give --secret"), "{refused}");
        std::fs::write(&path, "client_id = \"x\"\nclient_secret = \"s3cret\"\n").unwrap();
        assert_eq!(read_secret(&path).unwrap().expose(), "s3cret");
        std::fs::write(&path, "client_secret = \"s3cret\nx").unwrap();
        let refused = format!("{:#}", read_secret(&path).unwrap_err());
        assert!(!refused.contains("s3cret"), "{refused}");
    }

    #[test]
    fn a_refusal_is_told_in_the_servers_words() {
        assert_eq!(refusal(400, br#"{"status":400,"detail":"rate: no"}"#), "rate: no");
        let azure = br#"{"error":{"code":"BadRequest","message":"use https"}}"#;
        assert_eq!(refusal(400, azure), "use https");
        assert_eq!(refusal(502, b"<html>"), "the server answers 502");
    }
}
