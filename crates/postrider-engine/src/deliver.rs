//! The transport's interface: the request of one attempt, and its reply.

use crate::in_flight::InFlightCharge;
use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use postrider_core::body::DeliveryBody;
use postrider_core::time::Timestamp;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// An attempt in flight.
pub type PendingReply = Pin<Box<dyn Future<Output = DeliveryReply> + Send>>;

/// A complete HTTP request to a destination.
#[derive(Clone, Debug)]
pub struct DeliveryRequest {
    pub method: Method,
    /// Absolute: scheme, authority, path and query.
    pub url: Arc<Uri>,
    /// Headers shared by all requests of a kind. The transport adds `host` and `content-length`.
    pub headers: Arc<HeaderMap>,
    /// Headers of this request only.
    pub more: Vec<(HeaderName, HeaderValue)>,
    /// To be dropped as soon as it is sent: it may keep large events in memory.
    pub body: ChargedBody,
    /// Checked once a connection exists, before anything is sent. None: the request is always sent.
    pub guard: Option<SendGuard>,
}

/// Shared by the sender of a request and the transport until the request is sent.
///
/// The transport asks it whether the request may still be sent: connecting takes time, in which a node of a cluster may
/// lose its lease or hear that the subscription was changed. The sender asks it, when the time is over, whether the
/// transport still waits for a proxy.
#[derive(Clone, Default)]
pub struct SendGuard {
    /// None: the request is always sent.
    may_send: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
    tunnel: Arc<AtomicU8>,
}

const TUNNEL_NOT_AWAITED: u8 = 0;
const TUNNEL_AWAITED: u8 = 1;
const TUNNEL_GIVEN_UP: u8 = 2;

impl SendGuard {
    pub fn new(may_send: impl Fn() -> bool + Send + Sync + 'static) -> SendGuard {
        SendGuard {
            may_send: Some(Arc::new(may_send)),
            ..SendGuard::default()
        }
    }

    pub fn may_send(&self) -> bool {
        self.may_send.as_ref().is_none_or(|may_send| may_send())
    }

    /// The transport begins to wait for a tunnel through the proxy.
    pub fn await_tunnel(&self) {
        self.tunnel.store(TUNNEL_AWAITED, Release);
    }

    /// The transport waits no longer. Whether that is because the sender has given the tunnel up.
    pub fn end_tunnel_wait(&self) -> bool {
        self.tunnel.swap(TUNNEL_NOT_AWAITED, AcqRel) == TUNNEL_GIVEN_UP
    }

    /// The sender waits no longer. Whether the transport was waiting for the proxy: the request has not been sent then.
    pub fn give_up_tunnel(&self) -> bool {
        self.tunnel
            .compare_exchange(TUNNEL_AWAITED, TUNNEL_GIVEN_UP, AcqRel, Acquire)
            .is_ok()
    }
}

impl fmt::Debug for SendGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendGuard")
    }
}

/// A body and its charge against the budget of bytes in flight, released when the body is dropped.
#[derive(Clone, Debug, Default)]
pub struct ChargedBody {
    pub bytes: DeliveryBody,
    /// None for small and rare requests, such as webhook validation.
    pub charge: Option<Arc<InFlightCharge>>,
}

impl<B: Into<DeliveryBody>> From<B> for ChargedBody {
    fn from(bytes: B) -> ChargedBody {
        ChargedBody {
            bytes: bytes.into(),
            charge: None,
        }
    }
}

impl DeliveryRequest {
    /// The whole body in one piece.
    pub fn body_bytes(&self) -> Bytes {
        self.body.bytes.to_bytes()
    }

    /// The header's value, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        let more = self
            .more
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value);
        more.or_else(|| self.headers.get(name))?.to_str().ok()
    }
}

/// The result of one attempt. A failed delivery is a value, not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeliveryReply {
    Answered(DeliveryAnswer),
    Failed(TransportFailure),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryAnswer {
    pub status: u16,
    /// All response headers that the caller may read.
    pub headers: HeaderMap,
    /// The start of the response body, up to the transport's limit.
    pub body: Bytes,
    pub timings: AttemptTimings,
}

/// Why no response came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportFailure {
    pub kind: TransportFailureKind,
    /// For people: names the host and the reason, never a query string.
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportFailureKind {
    /// The name could not be resolved.
    Resolution,
    /// The egress policy forbids every address that the name resolved to, or the scheme.
    Forbidden,
    /// Connecting, TLS, sending or reading failed.
    Socket,
    /// The proxy was out of reach or opened no tunnel: this says nothing about the endpoint.
    Proxy,
    /// The request's [`SendGuard`] refused: nothing was sent.
    Withdrawn,
}

/// The health of the outgoing proxy, reported by everything that connects through it.
#[derive(Debug)]
pub struct ProxyHealth {
    /// Host and port, without credentials.
    pub address: String,
    state: Mutex<ProxyState>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyState {
    /// Tunnels that the proxy did not open, since the start.
    pub faults: u64,
    /// Since when no tunnel was opened, if the last attempt failed.
    pub failing_since: Option<Timestamp>,
    /// The last fault.
    pub reason: Option<String>,
}

impl ProxyHealth {
    pub fn new(address: String) -> ProxyHealth {
        ProxyHealth {
            address,
            state: Mutex::default(),
        }
    }

    pub fn state(&self) -> ProxyState {
        self.lock().clone()
    }

    /// Reports an opened tunnel. Returns whether this ended a failure.
    pub fn works(&self) -> bool {
        self.lock().failing_since.take().is_some()
    }

    /// Reports a failed tunnel. Returns whether a failure begins with it.
    pub fn failed(&self, reason: &str, now: Timestamp) -> bool {
        let mut state = self.lock();
        state.faults += 1;
        state.reason = Some(reason.to_owned());
        let begins = state.failing_since.is_none();
        state.failing_since.get_or_insert(now);
        begins
    }

    fn lock(&self) -> MutexGuard<'_, ProxyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttemptTimings {
    /// Zero when a pooled connection was used.
    pub connect: Duration,
    /// From the request's first byte out to the response head.
    pub first_byte: Duration,
    pub total: Duration,
}

/// Sends one request and waits for its answer.
///
/// The transport never follows redirects and never retries an attempt whose bytes may have reached
/// the peer. It has no response timeout: the caller drops the future to give up, which closes the
/// connection. The future may be moved to and awaited on another task. Once the response head has
/// arrived, the body is read up to a limit in bytes and in time; then the answer is returned,
/// however incomplete the body is.
#[async_trait]
pub trait DeliveryTransport: Send + Sync {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply;
}
