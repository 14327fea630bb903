//! Delivery over HTTP(S): TLS, address checks, body limits.
//!
//! [`HttpTransport`] speaks HTTP/1.1 and keeps connections for the next request. It spawns no
//! tasks: all work on a connection is done by the future of the request that is using it.

mod dial;
pub mod egress;
mod pool;
mod proxy;
pub mod resolve;
mod target;
mod tls;
mod wire;

pub use dial::NOT_TLS;
pub use egress::EgressPolicy;
pub use pool::{IDLE_PER_ORIGIN_MAX, IDLE_TIME_MAX, ORIGINS_MAX};
pub use proxy::ForwardProxy;
pub use resolve::{NameResolver, SystemResolver};
pub use rustls::pki_types::CertificateDer;
pub use wire::{PeerSocket as Connection, SNIPPET_MAX};

use async_trait::async_trait;
use dial::Dialler;
use http::HeaderValue;
use pool::IdlePool;
use postrider_core::time::Clock;
use postrider_engine::deliver::{
    AttemptTimings, ChargedBody, DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport,
    TransportFailure, TransportFailureKind,
};
use std::sync::Arc;
use std::time::Duration;
use target::ConnectionTarget;
use tls::TlsClient;
use tokio::time::Instant;
use wire::{HttpConnection, NoResponse, OutgoingMessage};

#[derive(Clone, Debug)]
pub struct Config {
    pub egress: EgressPolicy,
    /// None: every target is dialled directly.
    pub proxy: Option<ForwardProxy>,
    /// Trusted besides the machine's own roots.
    pub extra_roots: Vec<CertificateDer<'static>>,
    /// Accepts any certificate for any name.
    pub accept_invalid_certs: bool,
    /// The time for resolving, connecting and TLS together.
    pub connect_timeout: Duration,
    /// A response body is read up to this many bytes...
    pub body_cap: usize,
    /// ...and for this long after its head, so that the connection can be used again.
    pub body_time: Duration,
    /// Sent with requests that do not bring their own.
    pub user_agent: Option<String>,
    /// The most idle connections that are kept, over all origins.
    pub idle_max: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            egress: EgressPolicy::default(),
            proxy: None,
            extra_roots: Vec::new(),
            accept_invalid_certs: false,
            connect_timeout: Duration::from_secs(10),
            body_cap: 64 * 1024,
            body_time: Duration::from_secs(5),
            user_agent: None,
            idle_max: usize::MAX,
        }
    }
}

/// Why a [`Config`] is not valid.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("user agent {0:?} cannot be sent as a header")]
    UserAgent(String),
    #[error("extra root certificate number {} is not usable: {reason}", .position + 1)]
    Root { position: usize, reason: rustls::Error },
}

/// Opens connections according to the egress policy and through the proxy, for other HTTP clients.
#[derive(Clone)]
pub struct Connector(Arc<Dialler>);

impl Connector {
    /// A connector that resolves names with the operating system. Uses only the connection settings
    /// of the configuration.
    pub fn new(config: Config, clock: Arc<dyn Clock>) -> Result<Connector, Error> {
        HttpTransport::new(config, clock).map(|transport| transport.connector)
    }

    /// A connection to the URL's origin, over TLS if that is https.
    pub async fn connect(&self, url: &http::Uri) -> Result<Connection, TransportFailure> {
        self.0.dial(&ConnectionTarget::of(url)?, None).await
    }

    /// Checks that a connection to the proxy can be made, if there is one. The error completes a
    /// sentence that begins with the proxy.
    pub async fn reach_proxy(&self) -> Result<(), String> {
        self.0.reach_proxy().await
    }
}

/// [`DeliveryTransport`] over HTTP/1.1.
///
/// Keeps up to [`IDLE_PER_ORIGIN_MAX`] idle connections for each of up to [`ORIGINS_MAX`] origins,
/// for up to [`IDLE_TIME_MAX`]. Dropping the future that `send` returned closes its connection.
pub struct HttpTransport {
    connector: Connector,
    pool: IdlePool<Box<HttpConnection>>,
    clock: Arc<dyn Clock>,
    user_agent: Option<HeaderValue>,
    body_cap: usize,
    body_time: Duration,
}

impl HttpTransport {
    /// A transport that resolves names with the operating system.
    pub fn new(config: Config, clock: Arc<dyn Clock>) -> Result<HttpTransport, Error> {
        HttpTransport::with_resolver(config, clock, Arc::new(SystemResolver::new()))
    }

    pub fn with_resolver(
        config: Config,
        clock: Arc<dyn Clock>,
        resolver: Arc<dyn NameResolver>,
    ) -> Result<HttpTransport, Error> {
        let user_agent = config
            .user_agent
            .map(|text| HeaderValue::from_str(&text).map_err(|_| Error::UserAgent(text)))
            .transpose()?;
        let dialler = Dialler {
            egress: config.egress,
            proxy: config.proxy,
            resolver,
            tls: TlsClient::new(config.extra_roots, config.accept_invalid_certs)?,
            timeout: config.connect_timeout,
            clock: clock.clone(),
        };
        Ok(HttpTransport {
            connector: Connector(Arc::new(dialler)),
            pool: IdlePool::new(config.idle_max),
            clock,
            user_agent,
            body_cap: config.body_cap,
            body_time: config.body_time,
        })
    }

    /// Checks that a connection can be made by the rules of deliveries. Nothing is sent over it.
    pub async fn reach(&self, url: &http::Uri) -> Result<(), TransportFailure> {
        self.connector.connect(url).await.map(drop)
    }

    /// Closes connections that have been idle for too long. Traffic does so as a side effect; this
    /// is to be called now and then, for times without traffic.
    pub fn sweep(&self) {
        self.pool.sweep(self.clock.now());
    }

    /// The number of idle connections.
    pub fn idle(&self) -> usize {
        self.pool.len()
    }

    async fn attempt(&self, request: DeliveryRequest) -> Result<DeliveryAnswer, TransportFailure> {
        let started = Instant::now();
        let target = ConnectionTarget::of(&request.url)?;
        let message = OutgoingMessage {
            method: &request.method,
            path: request.url.path_and_query().map_or("/", |path| path.as_str()),
            authority: target.authority,
            headers: &request.headers,
            more: &request.more,
            user_agent: self.user_agent.as_ref(),
        };
        let mut body = request.body;
        if let Some(wire) = self.checkout(&target) {
            let exchange = self.exchange(wire, &target, &message, &mut body, started, started);
            match exchange.await {
                Err(NoResponse::NeverSent(_)) => {}
                Err(NoResponse::Broken(error)) => {
                    return Err(target.failed(TransportFailureKind::Socket, error));
                }
                Ok(answer) => return Ok(answer),
            }
        }
        // Boxed, because it is large and most requests never come here.
        let wire =
            HttpConnection::new(Box::pin(self.connector.0.dial(&target, request.guard.as_ref())).await?);
        let connected = Instant::now();
        if request.guard.is_some_and(|guard| !guard.may_send()) {
            let reason = "the request was withdrawn while the connection was made";
            return Err(target.failed(TransportFailureKind::Withdrawn, reason));
        }
        let exchange = self.exchange(Box::new(wire), &target, &message, &mut body, started, connected);
        match exchange.await {
            Err(NoResponse::NeverSent(error) | NoResponse::Broken(error)) => {
                Err(target.failed(TransportFailureKind::Socket, error))
            }
            Ok(answer) => Ok(answer),
        }
    }

    /// Uses the connection for one request, then keeps it if it can be used again.
    async fn exchange(
        &self,
        mut wire: Box<HttpConnection>,
        target: &ConnectionTarget<'_>,
        message: &OutgoingMessage<'_>,
        body: &mut ChargedBody,
        started: Instant,
        connected: Instant,
    ) -> Result<DeliveryAnswer, NoResponse> {
        let head = wire.request(message, body).await?;
        let first_byte = connected.elapsed();
        let body = wire
            .read(&head, self.body_cap, self.body_time, &*self.clock)
            .await;
        if body.reusable && wire.is_idle() {
            self.pool
                .put(target.scheme, target.authority, wire, self.clock.now());
        }
        Ok(DeliveryAnswer {
            status: head.status,
            headers: head.headers,
            body: body.snippet,
            timings: AttemptTimings {
                connect: connected - started,
                first_byte,
                total: started.elapsed(),
            },
        })
    }

    /// An idle connection that the peer has not closed, as far as is known.
    fn checkout(&self, target: &ConnectionTarget<'_>) -> Option<Box<HttpConnection>> {
        let now = self.clock.now();
        loop {
            let mut wire = self.pool.take(target.scheme, target.authority, now)?;
            if wire.is_idle() {
                return Some(wire);
            }
        }
    }
}

#[async_trait]
impl DeliveryTransport for HttpTransport {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        match self.attempt(request).await {
            Ok(answer) => DeliveryReply::Answered(answer),
            Err(failure) => DeliveryReply::Failed(failure),
        }
    }
}
