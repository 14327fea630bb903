//! Connections of clients: their limits, and which connection is closed to make room for another.
//!
//! A new connection never waits for other clients: when the limit is reached, a connection that
//! waits for its client is closed instead. Connections whose request the server is working on are
//! never closed for another; requests have limits of their own.

use crate::limits::{ClientLimit, ClientLimits};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

/// How long a client may send nothing of a body, or take nothing of a response, before its
/// connection may be closed for another.
const STALL_EVICTABLE: Duration = Duration::from_secs(1);
/// A client that takes fewer bytes of a response within `limits.response_stall_max` is
/// disconnected.
const RESPONSE_BYTES_MIN: usize = 1024;

/// The network that counts as one client: an IPv6 client has a whole /64 at its disposal.
pub fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        v4 => v4,
    }
}

/// The party that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    /// The client, for a TLS handshake or the head of a request.
    Head,
    /// The client, for the body of a request.
    Body,
    /// The server.
    Answer,
}

/// State of one connection.
#[derive(Clone, Copy, Debug)]
struct ConnectionState {
    phase: ConnectionPhase,
    /// When the phase began, or when the last byte of the body arrived.
    since: Instant,
    /// Since when a part of a response has been waiting for the client to take it.
    blocked_since: Option<Instant>,
}

/// An open connection, shared by its task and the table of all connections.
pub(crate) struct ServedConnection {
    state: Mutex<ConnectionState>,
    pub evicted: CancellationToken,
}

impl ServedConnection {
    pub fn new() -> ServedConnection {
        ServedConnection {
            state: Mutex::new(ConnectionState {
                phase: ConnectionPhase::Head,
                since: Instant::now(),
                blocked_since: None,
            }),
            evicted: CancellationToken::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().expect("no panic holds it")
    }

    fn enter(&self, phase: ConnectionPhase) {
        let mut state = self.state();
        state.phase = phase;
        state.since = Instant::now();
    }

    /// Marks the start of a request. The request is under way until the returned value is dropped.
    pub fn begin_request(self: &Arc<Self>) -> RequestGuard {
        self.enter(ConnectionPhase::Answer);
        RequestGuard(self.clone())
    }

    /// Marks that the rest of the request is being read, until the returned value is dropped.
    pub fn begin_body(self: &Arc<Self>) -> BodyReadGuard {
        self.enter(ConnectionPhase::Body);
        BodyReadGuard(self.clone())
    }

    /// Records that a part of the body has arrived.
    pub fn body_progress(&self) {
        self.state().since = Instant::now();
    }

    /// Since when the connection has been waiting for its client; none if it must not be closed for
    /// another.
    fn idle_since(&self, now: Instant) -> Option<Instant> {
        let state = *self.state();
        let stalled_since = match (state.blocked_since, state.phase) {
            (Some(blocked), _) => blocked,
            (None, ConnectionPhase::Head) => return Some(state.since),
            (None, ConnectionPhase::Body) => state.since,
            (None, ConnectionPhase::Answer) => return None,
        };
        (now.duration_since(stalled_since) >= STALL_EVICTABLE).then_some(stalled_since)
    }

    fn set_blocked(&self, is_blocked: bool) {
        self.state().blocked_since = is_blocked.then(Instant::now);
    }
}

/// Guard of a request under way.
pub(crate) struct RequestGuard(Arc<ServedConnection>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.enter(ConnectionPhase::Head);
    }
}

/// Guard of a body that is being read.
pub(crate) struct BodyReadGuard(Arc<ServedConnection>);

impl Drop for BodyReadGuard {
    fn drop(&mut self) {
        self.0.enter(ConnectionPhase::Answer);
    }
}

/// The connection to close: of the client that has the most of them, the one that has been idle
/// longest.
///
/// No other property counts. A rule that spares some idle connections would let a client that keeps
/// such connections push out new ones, which have not had the time to send anything.
fn victim(
    idle: impl Iterator<Item = (u64, IpAddr, Instant)>,
    by_network: &HashMap<IpAddr, usize>,
) -> Option<u64> {
    let open = |network: &IpAddr| by_network.get(network).copied().unwrap_or(0);
    let chosen = idle.min_by_key(|(id, network, since)| (Reverse(open(network)), *since, *id));
    chosen.map(|(id, _, _)| id)
}

/// The connections of all listeners.
pub(crate) struct Connections {
    max: usize,
    per_client_max: usize,
    open: Mutex<OpenConnections>,
}

#[derive(Default)]
struct OpenConnections {
    last: u64,
    by_id: HashMap<u64, (IpAddr, Arc<ServedConnection>)>,
    by_network: HashMap<IpAddr, usize>,
}

impl OpenConnections {
    fn count(&self, network: IpAddr) -> usize {
        self.by_network.get(&network).copied().unwrap_or(0)
    }

    fn remove(&mut self, id: u64) -> Option<(IpAddr, Arc<ServedConnection>)> {
        let (network, connection) = self.by_id.remove(&id)?;
        if let Some(count) = self.by_network.get_mut(&network) {
            *count -= 1;
            if *count == 0 {
                self.by_network.remove(&network);
            }
        }
        Some((network, connection))
    }

    /// Closes one connection that waits for its client; only of the client `of` if one is given.
    fn evict(&mut self, of: Option<IpAddr>) -> Option<IpAddr> {
        let now = Instant::now();
        let all = self.by_id.iter();
        let of_client = all.filter(|(_, (network, _))| of.is_none_or(|of| of == *network));
        let idle = of_client
            .filter_map(|(id, (network, connection))| Some((*id, *network, connection.idle_since(now)?)));
        let id = victim(idle, &self.by_network)?;
        let (network, connection) = self.remove(id)?;
        connection.evicted.cancel();
        Some(network)
    }
}

/// A connection's entry in the table, removed on drop.
pub(crate) struct ConnectionSlot {
    connections: Arc<Connections>,
    id: u64,
    pub connection: Arc<ServedConnection>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.open().remove(self.id);
    }
}

impl Connections {
    pub fn new(max: usize, per_client_max: usize) -> Connections {
        Connections {
            max,
            per_client_max,
            open: Mutex::default(),
        }
    }

    fn open(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().expect("no panic holds it")
    }

    pub fn max(&self) -> usize {
        self.max
    }

    pub fn count(&self) -> usize {
        self.open().by_id.len()
    }

    /// Admits a connection from this address; none if every other connection is being served.
    pub fn admit(self: &Arc<Self>, peer: IpAddr, limits: &ClientLimits) -> Option<ConnectionSlot> {
        let network = client_network(peer);
        let mut open = self.open();
        let is_client_full = open.count(network) >= self.per_client_max;
        if is_client_full || open.by_id.len() >= self.max {
            let Some(evicted) = open.evict(is_client_full.then_some(network)) else {
                drop(open);
                limits.report(ClientLimit::Connections, peer);
                return None;
            };
            limits.report(ClientLimit::IdleConnections, evicted);
        }
        open.last += 1;
        let id = open.last;
        let connection = Arc::new(ServedConnection::new());
        open.by_id.insert(id, (network, connection.clone()));
        *open.by_network.entry(network).or_default() += 1;
        Some(ConnectionSlot {
            connections: self.clone(),
            id,
            connection,
        })
    }

    /// Closes a connection that waits for its client, because the system has run out of resources
    /// for another.
    pub fn make_room(&self, limits: &ClientLimits) {
        let evicted = self.open().evict(None);
        if let Some(evicted) = evicted {
            limits.report(ClientLimit::IdleConnections, evicted);
        }
    }
}

/// A socket that can be closed without waiting until the peer has taken what was written.
pub(crate) trait AbortSocket {
    fn abort(&self);
}

impl AbortSocket for TcpStream {
    fn abort(&self) {
        // Without zero linger the system would keep the rest of the response for minutes.
        let _ = self.set_zero_linger();
    }
}

#[cfg(test)]
impl AbortSocket for tokio::io::DuplexStream {
    fn abort(&self) {}
}

/// A client's socket. Writing fails when the client stops reading.
pub(crate) struct ClientStream<S> {
    inner: S,
    peer: IpAddr,
    connection: Arc<ServedConnection>,
    limits: Arc<ClientLimits>,
    blocked: Option<BlockedWrite>,
}

/// A response that waits for its client.
struct BlockedWrite {
    until: Pin<Box<Sleep>>,
    /// Bytes that the client took since the time limit was last restarted.
    bytes: usize,
}

impl<S: AbortSocket> ClientStream<S> {
    pub fn new(
        inner: S,
        peer: IpAddr,
        connection: Arc<ServedConnection>,
        limits: Arc<ClientLimits>,
    ) -> ClientStream<S> {
        ClientStream {
            inner,
            peer,
            connection,
            limits,
            blocked: None,
        }
    }

    /// Tracks a write of `wanted` bytes, and fails it if the client has stopped reading.
    fn written(
        &mut self,
        context: &mut Context<'_>,
        wanted: usize,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let stall_max = self.limits.response_stall_max;
        match written {
            Poll::Ready(Ok(bytes)) if bytes < wanted => {
                let blocked = self
                    .blocked
                    .get_or_insert_with(|| BlockedWrite::for_time(stall_max));
                blocked.bytes += bytes;
                if blocked.bytes >= RESPONSE_BYTES_MIN {
                    blocked.bytes = 0;
                    blocked.until.as_mut().reset(Instant::now() + stall_max);
                }
                self.connection.set_blocked(true);
                return Poll::Ready(Ok(bytes));
            }
            Poll::Ready(result) => {
                if self.blocked.take().is_some() {
                    self.connection.set_blocked(false);
                }
                return Poll::Ready(result);
            }
            Poll::Pending => {}
        }
        let blocked = self.blocked.get_or_insert_with(|| {
            self.connection.set_blocked(true);
            BlockedWrite::for_time(stall_max)
        });
        ready!(blocked.until.as_mut().poll(context));
        self.limits.report(ClientLimit::ResponseStall, self.peer);
        self.inner.abort();
        let reason = "the client does not read the response";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, reason)))
    }
}

impl BlockedWrite {
    fn for_time(time: Duration) -> BlockedWrite {
        BlockedWrite {
            until: Box::pin(tokio::time::sleep_until(Instant::now() + time)),
            bytes: 0,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + AbortSocket + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.inner).poll_write(context, bytes);
        this.written(context, bytes.len(), written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wanted = pieces.iter().map(|piece| piece.len()).sum();
        let written = Pin::new(&mut this.inner).poll_write_vectored(context, pieces);
        this.written(context, wanted, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn limits() -> Arc<ClientLimits> {
        Arc::new(ClientLimits::new(&crate::limits::ClientBounds::default()))
    }

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    #[test]
    fn a_client_is_an_ipv4_address_or_an_ipv6_network() {
        let check = |address: &str, expected: &str| {
            let expected: IpAddr = expected.parse().unwrap();
            assert_eq!(client_network(address.parse().unwrap()), expected, "{address}");
        };
        check("192.0.2.7", "192.0.2.7");
        check("::ffff:192.0.2.7", "192.0.2.7");
        check("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::");
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_connection_of_the_largest_client_makes_room() {
        let connections = Arc::new(Connections::new(5, 4));
        let mut places = Vec::new();
        for peer in [B, A, A, A] {
            places.push(connections.admit(peer, &limits()).unwrap());
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let evicted = |places: &[ConnectionSlot]| -> Vec<bool> {
            let all = places.iter();
            all.map(|one| one.connection.evicted.is_cancelled()).collect()
        };
        // The first connection of A has just been used, and connections with a request under way
        // are not closed.
        drop(places[1].connection.begin_request());
        let _request = places[2].connection.begin_request();
        places.push(connections.admit(B, &limits()).unwrap());
        assert_eq!(connections.count(), 5);
        assert_eq!(evicted(&places), [false; 5]);
        places.push(connections.admit(B, &limits()).unwrap());
        assert_eq!(evicted(&places), [false, false, false, true, false, false]);
        assert_eq!(connections.count(), 5);
        // Now B has the most connections.
        places.push(connections.admit(A, &limits()).unwrap());
        assert!(evicted(&places)[0], "{:?}", evicted(&places));
        drop(places);
        assert_eq!(connections.count(), 0);
        assert!(connections.open().by_network.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_at_its_bound_makes_room_itself() {
        let connections = Arc::new(Connections::new(100, 2));
        let other = connections.admit(B, &limits()).unwrap();
        let first = connections.admit(A, &limits()).unwrap();
        let second = connections.admit(A, &limits()).unwrap();
        let third = connections.admit(A, &limits()).unwrap();
        let gone = [&other, &first, &second, &third].map(|one| one.connection.evicted.is_cancelled());
        assert_eq!(gone.iter().filter(|gone| **gone).count(), 1);
        assert!(!gone[0] && !gone[3], "{gone:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_refused_when_all_are_being_served() {
        let limits = limits();
        let connections = Arc::new(Connections::new(2, 2));
        let one = connections.admit(A, &limits).unwrap();
        let two = connections.admit(A, &limits).unwrap();
        let _request = one.connection.begin_request();
        let request = two.connection.begin_request();
        assert!(connections.admit(B, &limits).is_none());
        assert_eq!(limits.count(ClientLimit::Connections), 1);
        // A body that does not arrive counts as idle after a moment; a body that arrives does not.
        let body = two.connection.begin_body();
        tokio::time::advance(STALL_EVICTABLE - Duration::from_millis(1)).await;
        assert!(connections.admit(B, &limits).is_none());
        tokio::time::advance(Duration::from_millis(1)).await;
        let three = connections.admit(B, &limits).unwrap();
        assert!(two.connection.evicted.is_cancelled());
        drop((body, request));
        // A client that has stopped reading its response counts as idle as well.
        one.connection.set_blocked(true);
        tokio::time::advance(STALL_EVICTABLE).await;
        let _second = three.connection.begin_request();
        let _four = connections.admit(B, &limits).unwrap();
        assert!(one.connection.evicted.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_cut() {
        let limits = limits();
        let connection = Arc::new(ServedConnection::new());
        let (ours, theirs) = tokio::io::duplex(64);
        let mut stream = ClientStream::new(ours, A, connection.clone(), limits.clone());
        let begun = Instant::now();
        let error = stream.write_all(&[0; 1000]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(begun.elapsed(), limits.response_stall_max);
        assert_eq!(limits.count(ClientLimit::ResponseStall), 1);
        drop(theirs);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_a_byte_now_and_then_is_cut_and_a_slow_one_is_not() {
        for (piece, is_cut) in [(1, true), (60, false)] {
            let limits = limits();
            let connection = Arc::new(ServedConnection::new());
            let (ours, mut theirs) = tokio::io::duplex(64);
            let mut stream = ClientStream::new(ours, A, connection.clone(), limits.clone());
            let begun = Instant::now();
            let reading = async {
                let mut buffer = vec![0; piece];
                // Twenty reads within the limit: 20 bytes are too few, 1 200 are enough.
                loop {
                    tokio::time::sleep_until(Instant::now() + limits.response_stall_max / 20).await;
                    theirs.read_exact(&mut buffer).await.unwrap();
                }
            };
            let written = tokio::select! {
                written = stream.write_all(&[0; 10_000]) => written,
                () = reading => unreachable!("reading does not end"),
            };
            assert_eq!(written.is_err(), is_cut, "{piece}");
            assert_eq!(
                begun.elapsed() > 2 * limits.response_stall_max,
                !is_cut,
                "{piece}"
            );
        }
    }
}
