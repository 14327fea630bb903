//! Ports for those that are told where to listen, or that end and come back. The tests take theirs here, too.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Below those that systems give to whoever asks for any. From among those, a server that begins, or is away for a moment,
/// loses its port now and then to a connection that somebody makes, even to one that is tried to itself.
const FIRST: u32 = 10_000;
const COUNT: u32 = 20_000;
/// Each process begins elsewhere: one that was just killed may hold ports for a moment.
const APART: u32 = 997;

/// An address of this machine that nobody else gets for as long as this process runs.
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
