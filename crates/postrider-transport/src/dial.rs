//! Opens connections to an origin: resolves the name, checks every address, connects directly or
//! through a proxy, and negotiates TLS.

use crate::egress::{self, DestinationScheme, EgressPolicy, EgressRefusal};
use crate::proxy::{ForwardProxy, open_tunnel};
use crate::resolve::NameResolver;
use crate::target::ConnectionTarget;
use crate::tls::TlsClient;
use crate::wire::PeerSocket;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::deliver::{SendGuard, TransportFailure, TransportFailureKind};
use rustls::InvalidMessage;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;

/// The most permitted addresses of a name that are dialled.
const ADDRESSES_MAX: usize = 8;
/// The least time for one address while there are others to try.
const ADDRESS_TIME_MIN: Duration = Duration::from_secs(2);

/// The target's name is resolved for this part of the connect timeout before the proxy is asked.
const PROXY_RESOLVE_SHARE: u32 = 4;

/// The detail of a failure where a port for https answers in another protocol.
pub const NOT_TLS: &str = "tls: the port answers without TLS, so probably speaks plain http";

fn speaks_no_tls(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    matches!(
        cause,
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType))
    )
}

const NO_TUNNEL_IN_TIME: &str = "did not answer in time";

pub(crate) struct Dialler {
    pub egress: EgressPolicy,
    pub proxy: Option<ForwardProxy>,
    pub resolver: Arc<dyn NameResolver>,
    pub tls: TlsClient,
    /// For resolving, connecting and TLS together.
    pub timeout: Duration,
    pub clock: Arc<dyn Clock>,
}

impl Dialler {
    /// Opens a connection to the first permitted address that accepts one, or through the proxy. The guard is told
    /// while the proxy is waited for.
    pub async fn dial(
        &self,
        target: &ConnectionTarget<'_>,
        guard: Option<&SendGuard>,
    ) -> Result<PeerSocket, TransportFailure> {
        let deadline = self.clock.now() + self.timeout;
        let failed = |reason: &dyn fmt::Display| target.failed(TransportFailureKind::Socket, reason);
        let proxy = self.proxy.as_ref();
        let tcp = match proxy.filter(|proxy| proxy.serves(target.host, target.port)) {
            Some(proxy) => self.tunnel(proxy, target, guard, deadline).await?,
            None => {
                let addresses = self.addresses(target, deadline).await?;
                self.connect(&addresses, target.port, deadline)
                    .await
                    .map_err(|error| failed(&format_args!("could not connect: {error}")))?
            }
        };
        match target.scheme {
            DestinationScheme::Http => Ok(PeerSocket::Plain(tcp)),
            DestinationScheme::Https => {
                let stream = within(&*self.clock, deadline, self.tls.handshake(target.host, tcp))
                    .await
                    .unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
                    .map_err(|error| match speaks_no_tls(&error) {
                        true => failed(&NOT_TLS),
                        false => failed(&format_args!("tls: {error}")),
                    })?;
                Ok(PeerSocket::Tls(Box::new(stream)))
            }
        }
    }

    /// Opens a tunnel to the target through the proxy.
    async fn tunnel(
        &self,
        proxy: &ForwardProxy,
        target: &ConnectionTarget<'_>,
        guard: Option<&SendGuard>,
        deadline: Timestamp,
    ) -> Result<TcpStream, TransportFailure> {
        self.check_behind_proxy(target)
            .await
            .map_err(|refusal| target.failed(TransportFailureKind::Forbidden, refusal))?;
        let opening = async {
            let tcp = self.connect_to(proxy, deadline).await?;
            open_tunnel(tcp, &proxy.connect_request(target.host, target.port)).await
        };
        let waiting = TunnelWait::begin(self, proxy, guard);
        let opened = within(&*self.clock, deadline, opening).await;
        drop(waiting);
        match opened.unwrap_or_else(|| Err(NO_TUNNEL_IN_TIME.to_owned())) {
            Ok(tcp) => {
                if proxy.health.works() {
                    tracing::info!(proxy = %proxy.health.address, "the proxy works again");
                }
                Ok(tcp)
            }
            Err(reason) => {
                self.note_fault(proxy, &reason);
                let reason = format_args!("the proxy {} {reason}", proxy.health.address);
                Err(target.failed(TransportFailureKind::Proxy, reason))
            }
        }
    }

    fn note_fault(&self, proxy: &ForwardProxy, reason: &str) {
        if proxy.health.failed(reason, self.clock.now()) {
            let proxy = &proxy.health.address;
            tracing::warn!(%proxy, %reason, "the proxy fails: look at it and at egress.proxy");
        }
    }

    async fn connect_to(&self, proxy: &ForwardProxy, deadline: Timestamp) -> Result<TcpStream, String> {
        let addresses = self.proxy_addresses(proxy, deadline).await?;
        let tcp = self.connect(&addresses, proxy.port, deadline).await;
        tcp.map_err(|error| format!("could not be reached: {error}"))
    }

    pub async fn reach_proxy(&self) -> Result<(), String> {
        match &self.proxy {
            Some(proxy) => self
                .connect_to(proxy, self.clock.now() + self.timeout)
                .await
                .map(drop),
            None => Ok(()),
        }
    }

    /// Checks a target that the proxy will connect to. The proxy chooses among all addresses of a
    /// name, so each must be permitted; a name that does not resolve here is checked by its name.
    async fn check_behind_proxy(&self, target: &ConnectionTarget<'_>) -> Result<(), EgressRefusal> {
        self.egress.check_scheme(target.scheme)?;
        if let Ok(literal) = target.host.parse() {
            return self.egress.check(target.scheme, literal);
        }
        // Behind a proxy, names often do not resolve here, and that answer may be slow.
        let deadline = self.clock.now() + self.timeout / PROXY_RESOLVE_SHARE;
        let resolved = within(&*self.clock, deadline, self.resolver.addresses(target.host)).await;
        match resolved {
            Some(Ok(addresses)) if !addresses.is_empty() => addresses
                .into_iter()
                .try_for_each(|address| self.egress.check(target.scheme, address)),
            _ => self.egress.check_name(target.host),
        }
    }

    /// The operator has named the proxy, so any address is permitted except those that are never
    /// dialled.
    async fn proxy_addresses(
        &self,
        proxy: &ForwardProxy,
        deadline: Timestamp,
    ) -> Result<Vec<IpAddr>, String> {
        let found = match proxy.host.parse() {
            Ok(literal) => vec![literal],
            Err(_) => within(&*self.clock, deadline, self.resolver.addresses(&proxy.host))
                .await
                .ok_or("could not be resolved: timed out")?
                .map_err(|error| format!("could not be resolved: {error}"))?,
        };
        let usable = found
            .into_iter()
            .filter(|ip| egress::built_in_objection(*ip).is_none());
        let usable: Vec<IpAddr> = usable.take(ADDRESSES_MAX).collect();
        match usable.is_empty() {
            true => Err("has no address that may be dialled".to_owned()),
            false => Ok(usable),
        }
    }

    /// The addresses that the policy permits; at least one.
    async fn addresses(
        &self,
        target: &ConnectionTarget<'_>,
        deadline: Timestamp,
    ) -> Result<Vec<IpAddr>, TransportFailure> {
        let forbidden = |refusal: EgressRefusal| target.failed(TransportFailureKind::Forbidden, refusal);
        let unresolved = |reason: &dyn fmt::Display| {
            let reason = format_args!("the name could not be resolved: {reason}");
            target.failed(TransportFailureKind::Resolution, reason)
        };
        self.egress.check_scheme(target.scheme).map_err(forbidden)?;
        if let Ok(literal) = target.host.parse() {
            return permitted(&self.egress, target.scheme, [literal])
                .map_err(|refusal| forbidden(refusal.expect("one address was judged")));
        }
        let resolved = within(&*self.clock, deadline, self.resolver.addresses(target.host))
            .await
            .ok_or_else(|| unresolved(&"timed out"))?
            .map_err(|error| unresolved(&error))?;
        permitted(&self.egress, target.scheme, resolved).map_err(|refusal| match refusal {
            Some(refusal) => forbidden(refusal),
            None => unresolved(&"it has no addresses"),
        })
    }

    async fn connect(&self, addresses: &[IpAddr], port: u16, deadline: Timestamp) -> io::Result<TcpStream> {
        let mut last = io::Error::from(io::ErrorKind::TimedOut);
        for (position, &ip) in addresses.iter().enumerate() {
            let until = share(self.clock.now(), deadline, addresses.len() - position);
            let connecting = TcpStream::connect(SocketAddr::new(ip, port));
            match within(&*self.clock, until, connecting).await {
                Some(Ok(stream)) => {
                    // Every message is written as a whole, so delaying small writes gains nothing.
                    match stream.set_nodelay(true) {
                        Ok(()) => return Ok(stream),
                        Err(error) => last = error,
                    }
                }
                Some(Err(error)) => last = error,
                None => last = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(last)
    }
}

/// Tells the request's guard that a tunnel is waited for. A wait that the sender gives up is a fault of the proxy.
struct TunnelWait<'a> {
    dialler: &'a Dialler,
    proxy: &'a ForwardProxy,
    guard: Option<&'a SendGuard>,
}

impl<'a> TunnelWait<'a> {
    fn begin(dialler: &'a Dialler, proxy: &'a ForwardProxy, guard: Option<&'a SendGuard>) -> TunnelWait<'a> {
        if let Some(guard) = guard {
            guard.await_tunnel();
        }
        TunnelWait {
            dialler,
            proxy,
            guard,
        }
    }
}

impl Drop for TunnelWait<'_> {
    fn drop(&mut self) {
        if self.guard.is_some_and(SendGuard::end_tunnel_wait) {
            self.dialler.note_fault(self.proxy, NO_TUNNEL_IN_TIME);
        }
    }
}

/// Keeps the addresses that may be dialled, in order. If there are none, says why the first one was
/// refused, if there was one.
fn permitted(
    egress: &EgressPolicy,
    scheme: DestinationScheme,
    addresses: impl IntoIterator<Item = IpAddr>,
) -> Result<Vec<IpAddr>, Option<EgressRefusal>> {
    let mut refused = None;
    let mut kept = Vec::new();
    for address in addresses {
        match egress.check(scheme, address) {
            Ok(()) if kept.len() < ADDRESSES_MAX => kept.push(address),
            Ok(()) => break,
            Err(refusal) => refused = refused.or(Some(refusal)),
        }
    }
    if kept.is_empty() { Err(refused) } else { Ok(kept) }
}

/// The deadline for the next of `count` addresses: an equal share of the remaining time, so that an
/// address that never answers leaves time for the others.
fn share(now: Timestamp, deadline: Timestamp, count: usize) -> Timestamp {
    let left = deadline.since(now);
    let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
    now + (left / count).max(ADDRESS_TIME_MIN).min(left)
}

/// The output of the future, unless the deadline passes first.
async fn within<F: Future>(clock: &dyn Clock, deadline: Timestamp, future: F) -> Option<F::Output> {
    tokio::select! {
        biased;
        output = future => Some(output),
        () = clock.sleep_until(deadline) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_share_the_time_that_is_left() {
        let at = Timestamp::from_secs;
        let check = |left: i64, count: usize, expected: i64| {
            assert_eq!(
                share(at(100), at(100 + left), count),
                at(100 + expected),
                "{left} {count}"
            );
        };
        check(10, 1, 10);
        check(10, 2, 5);
        check(10, 8, 2);
        check(1, 8, 1);
        check(0, 1, 0);
        check(-5, 3, 0);
    }

    #[test]
    fn only_permitted_addresses_are_kept_in_order_and_not_too_many() {
        let ips = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
        let check = |list: &[&str]| permitted(&EgressPolicy::Private, DestinationScheme::Http, ips(list));
        assert_eq!(
            check(&["169.254.169.254", "10.0.0.2", "fe80::1", "10.0.0.1"]),
            Ok(ips(&["10.0.0.2", "10.0.0.1"]))
        );
        assert_eq!(check(&[]), Err(None));
        let refusal = check(&["169.254.169.254", "fe80::1"]).unwrap_err().unwrap();
        assert!(refusal.to_string().contains("169.254.169.254"), "{refusal}");
        assert_eq!(check(&["10.0.0.1"; 20]).unwrap().len(), ADDRESSES_MAX);
    }
}
