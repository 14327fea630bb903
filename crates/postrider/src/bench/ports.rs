//! Ports for servers that must be told where to listen, or that restart on the same port. Tests use
//! them too.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Below the range from which systems assign ephemeral ports. A server that starts or restarts in
/// that range can lose its port to somebody's outgoing connection, even to one that tries to reach
/// the server itself.
const FIRST: u32 = 10_000;
const COUNT: u32 = 20_000;
/// Processes start at different offsets: one that was just killed may hold its ports for a moment.
const APART: u32 = 997;

/// An address of this machine that no other call returns while this process runs.
pub fn own() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(APART);
    let free = || {
        let n = begin.wrapping_add(NEXT.fetch_add(1, Relaxed));
        let port = u16::try_from(FIRST + n % COUNT).expect("they end before 65536");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        TcpListener::bind(address).ok().map(|_| address)
    };
    (0..COUNT).find_map(|_| free()).expect("a free port")
}
