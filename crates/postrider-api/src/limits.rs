//! Limits on what clients may use of common resources, and how often each limit was reached.

use crate::body_memory::BodyMemory;
use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

/// Bodies of all requests except publish requests, in bytes.
const MANAGEMENT_BODY_BYTES_MAX: usize = 64 << 20;
/// A limit that is reached again is logged again after this time.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Limits as the operator configured them.
#[derive(Clone, Debug)]
pub struct ClientBounds {
    /// Open connections of all listeners.
    pub connections_max: usize,
    /// Open connections of one client address.
    pub connections_per_client_max: usize,
    /// How long a client may take to read a part of a response.
    pub response_stall_max: Duration,
    /// How long a client may take to send a part of a body.
    pub body_stall_max: Duration,
    /// Bodies of publish requests under way, in bytes.
    pub publish_body_bytes_max: usize,
    /// Open live streams.
    pub streams_max: usize,
    /// Open live streams of one client.
    pub streams_per_client_max: usize,
}

impl Default for ClientBounds {
    fn default() -> ClientBounds {
        ClientBounds {
            connections_max: 8192,
            connections_per_client_max: 2048,
            response_stall_max: Duration::from_secs(30),
            body_stall_max: Duration::from_secs(10),
            publish_body_bytes_max: 128 << 20,
            streams_max: 64,
            streams_per_client_max: 16,
        }
    }
}

/// A limit that a client reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientLimit {
    /// A connection was refused.
    Connections,
    /// An idle connection was closed for another.
    IdleConnections,
    /// A response was not read.
    ResponseStall,
    /// A body did not arrive.
    BodyStall,
    /// The memory for bodies was in use.
    BodyRoom,
    /// A live stream was refused.
    Streams,
}

impl ClientLimit {
    pub const ALL: [ClientLimit; 6] = [
        ClientLimit::Connections,
        ClientLimit::IdleConnections,
        ClientLimit::ResponseStall,
        ClientLimit::BodyStall,
        ClientLimit::BodyRoom,
        ClientLimit::Streams,
    ];

    /// Label in `/metrics`.
    pub fn name(self) -> &'static str {
        match self {
            ClientLimit::Connections => "connections",
            ClientLimit::IdleConnections => "idle_connections",
            ClientLimit::ResponseStall => "response_stall",
            ClientLimit::BodyStall => "body_stall",
            ClientLimit::BodyRoom => "body_room",
            ClientLimit::Streams => "streams",
        }
    }

    /// Member in `/healthz`.
    pub fn member(self) -> &'static str {
        match self {
            ClientLimit::Connections => "connectionsRefused",
            ClientLimit::IdleConnections => "idleConnectionsClosed",
            ClientLimit::ResponseStall => "responsesCut",
            ClientLimit::BodyStall => "bodiesCut",
            ClientLimit::BodyRoom => "bodiesRefused",
            ClientLimit::Streams => "streamsRefused",
        }
    }

    fn message(self) -> &'static str {
        match self {
            ClientLimit::Connections => {
                "connection refused: too many are in use (limits.connections_max, limits.connections_per_address_max)"
            }
            ClientLimit::IdleConnections => {
                "idle connection closed to make room for another (limits.connections_max, limits.connections_per_address_max)"
            }
            ClientLimit::ResponseStall => {
                "connection closed: the client did not read its response (limits.response_stall_max)"
            }
            ClientLimit::BodyStall => {
                "request refused with 408: its body did not keep coming (limits.body_stall_max)"
            }
            ClientLimit::BodyRoom => {
                "request refused: no room for its body beside those of other clients (publishes share limits.publish_body_bytes_max, all other requests 64 MB)"
            }
            ClientLimit::Streams => {
                "live stream refused: too many are being read (limits.streams_max, limits.streams_per_client_max)"
            }
        }
    }
}

/// How often one limit was reached.
#[derive(Default)]
struct LimitCounter {
    count: AtomicU64,
    /// When the limit was last logged, and the count then.
    logged: Mutex<Option<(Instant, u64)>>,
}

pub struct ClientLimits {
    pub response_stall_max: Duration,
    pub body_stall_max: Duration,
    pub(crate) publish_bodies: Arc<BodyMemory>,
    pub(crate) management_bodies: Arc<BodyMemory>,
    reached: [LimitCounter; ClientLimit::ALL.len()],
    /// By the scheme of the listener: http, https.
    scheme_mismatches: [LimitCounter; 2],
}

impl ClientLimits {
    pub fn new(bounds: &ClientBounds) -> ClientLimits {
        ClientLimits {
            response_stall_max: bounds.response_stall_max,
            body_stall_max: bounds.body_stall_max,
            publish_bodies: Arc::new(BodyMemory::new(bounds.publish_body_bytes_max)),
            management_bodies: Arc::new(BodyMemory::new(MANAGEMENT_BODY_BYTES_MAX)),
            reached: Default::default(),
            scheme_mismatches: Default::default(),
        }
    }

    pub fn count(&self, limit: ClientLimit) -> u64 {
        self.reached[limit as usize].count.load(Relaxed)
    }

    /// Counts that a client has reached a limit, and logs it at most once in [`LOG_EVERY`].
    pub fn report(&self, limit: ClientLimit, address: IpAddr) {
        let reached = &self.reached[limit as usize];
        let count = reached.count.fetch_add(1, Relaxed) + 1;
        let mut logged = reached.logged.lock().expect("no panic holds it");
        if let Some(more) = times_to_log(&mut logged, count, Instant::now()) {
            tracing::warn!(client = %address, limit = limit.name(), times = more, "{}", limit.message());
        }
    }

    /// Counts that a client has spoken http to an https listener or the reverse, and logs it at
    /// most once in [`LOG_EVERY`].
    pub(crate) fn report_scheme_mismatch(&self, listener: &str, address: IpAddr) {
        let reached = &self.scheme_mismatches[usize::from(listener == "https")];
        let count = reached.count.fetch_add(1, Relaxed) + 1;
        let mut logged = reached.logged.lock().expect("no panic holds it");
        if let Some(more) = times_to_log(&mut logged, count, Instant::now()) {
            tracing::warn!(
                client = %address,
                listener,
                times = more,
                "request refused: the client speaks another scheme than the listener; its URL must begin with {listener}://"
            );
        }
    }
}

/// How often the limit was reached since the last line; none if it is too early for another line.
fn times_to_log(logged: &mut Option<(Instant, u64)>, count: u64, now: Instant) -> Option<u64> {
    let told = match *logged {
        Some((at, _)) if now.duration_since(at) < LOG_EVERY => return None,
        Some((_, told)) => told,
        None => 0,
    };
    *logged = Some((now, count));
    Some(count.saturating_sub(told))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_reached_again_and_again_is_one_line() {
        let mut logged = None;
        let now = Instant::now();
        assert_eq!(times_to_log(&mut logged, 1, now), Some(1));
        assert_eq!(times_to_log(&mut logged, 2, now), None);
        assert_eq!(times_to_log(&mut logged, 900, now + LOG_EVERY / 2), None);
        assert_eq!(times_to_log(&mut logged, 901, now + LOG_EVERY), Some(900));
    }

    #[test]
    fn names_are_in_the_order_of_counters() {
        for (at, limit) in ClientLimit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, at);
        }
    }
}
