//! One attempt: what is sent, what comes back.

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

/// An attempt under way.
pub type Sending = Pin<Box<dyn Future<Output = Reply> + Send>>;

/// One HTTP request to a destination, ready to go.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: Method,
    /// Absolute: scheme, authority, path and query.
    pub url: Arc<Uri>,
    /// Headers that are the same for every request of a kind. `host` and `content-length` are the
    /// transport's to add.
    pub headers: Arc<HeaderMap>,
    /// Headers of this request.
    pub more: Vec<(HeaderName, HeaderValue)>,
    /// To be dropped as soon as it is sent: it may hold large events in memory.
    pub body: ChargedBody,
    /// Asked once a connection is there, before anything is sent. None: the request is always sent.
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

/// A body and its share of the bytes that may be in flight, which it gives back when it is dropped.
#[derive(Clone, Debug, Default)]
pub struct ChargedBody {
    pub bytes: DeliveryBody,
    /// None for requests that are small and few, such as webhook validation.
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

impl Request {
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

/// What came back from one attempt. A delivery that fails is a value, not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Answered(Answer),
    Failed(Failure),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    /// All response headers the caller may look at.
    pub headers: HeaderMap,
    /// The start of the response body, up to the transport's cap.
    pub body: Bytes,
    pub timings: Timings,
}

/// Why no answer came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    /// For people: names the host and the reason, never a query string.
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The name could not be resolved.
    Resolution,
    /// The egress policy forbids every address that the name resolved to, or the scheme.
    Forbidden,
    /// Connecting, TLS, sending or reading failed.
    Socket,
    /// The proxy on the way was out of reach or opened no tunnel: nothing is known of the endpoint.
    Proxy,
    /// The request's [`SendGuard`] refused: nothing was sent.
    Withdrawn,
}

/// How the proxy on the way out has done, told by what connects through it.
#[derive(Debug)]
pub struct ProxyHealth {
    /// Host and port, without credentials.
    pub address: String,
    state: Mutex<ProxyState>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyState {
    /// Tunnels that it did not open, since the start.
    pub faults: u64,
    /// Since when it has opened none, if the last one was not opened.
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

    /// A tunnel was opened. Whether that ends a failure.
    pub fn works(&self) -> bool {
        self.lock().failing_since.take().is_some()
    }

    /// A tunnel was not opened. Whether a failure begins with that.
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
pub struct Timings {
    /// Zero when a pooled connection was used.
    pub connect: Duration,
    /// From the request's first byte out to the response head.
    pub first_byte: Duration,
    pub total: Duration,
}

/// Sends one request and waits for its answer.
///
/// Never follows redirects, never retries an attempt whose bytes may have reached the peer, has no
/// response timeout of its own: the caller drops the future when it has waited long enough, which
/// closes the connection. The future is the caller's to keep: it may be waited for elsewhere. Once the response head has arrived the body is read up to a cap in bytes
/// and in time, then the answer is returned whatever the body does.
#[async_trait]
pub trait Transport: Send + Sync {
    async fn send(self: Arc<Self>, request: Request) -> Reply;
}
