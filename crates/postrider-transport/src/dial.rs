//! From an origin to a connection: resolve, check every address, connect, TLS.

use crate::egress::{EgressPolicy, Refusal, Scheme};
use crate::resolve::Resolve;
use crate::target::Target;
use crate::tls::Tls;
use crate::wire::{Socket, Wire};
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::deliver::{Failure, FailureKind};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;

/// Of a name's permitted addresses, no more than this are dialled.
const ADDRESSES_MAX: usize = 8;
/// The least time one address gets while there are others to try.
const ADDRESS_TIME_MIN: Duration = Duration::from_secs(2);

pub(crate) struct Dialler {
    pub egress: EgressPolicy,
    pub resolver: Arc<dyn Resolve>,
    pub tls: Tls,
    /// For resolving, connecting and TLS together.
    pub timeout: Duration,
    pub clock: Arc<dyn Clock>,
}

impl Dialler {
    /// Opens a connection to the first permitted address that accepts one.
    pub async fn dial(&self, target: &Target<'_>) -> Result<Wire, Failure> {
        let deadline = self.clock.now() + self.timeout;
        let addresses = self.addresses(target, deadline).await?;
        let tcp = self.connect(target, &addresses, deadline).await?;
        let failed = |reason: &dyn fmt::Display| target.failed(FailureKind::Socket, reason);
        let socket = match target.scheme {
            Scheme::Http => Socket::Plain(tcp),
            Scheme::Https => {
                let stream = within(&*self.clock, deadline, self.tls.handshake(target.host, tcp))
                    .await
                    .unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
                    .map_err(|error| failed(&format_args!("tls: {error}")))?;
                Socket::Tls(Box::new(stream))
            }
        };
        Ok(Wire::new(socket))
    }

    /// The addresses the policy lets us dial; at least one.
    async fn addresses(&self, target: &Target<'_>, deadline: Timestamp) -> Result<Vec<IpAddr>, Failure> {
        let forbidden = |refusal: Refusal| target.failed(FailureKind::Forbidden, refusal);
        let unresolved = |reason: &dyn fmt::Display| {
            let reason = format_args!("the name could not be resolved: {reason}");
            target.failed(FailureKind::Resolution, reason)
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

    async fn connect(
        &self,
        target: &Target<'_>,
        addresses: &[IpAddr],
        deadline: Timestamp,
    ) -> Result<TcpStream, Failure> {
        let mut last = io::Error::from(io::ErrorKind::TimedOut);
        for (position, &ip) in addresses.iter().enumerate() {
            let until = share(self.clock.now(), deadline, addresses.len() - position);
            let connecting = TcpStream::connect(SocketAddr::new(ip, target.port));
            match within(&*self.clock, until, connecting).await {
                Some(Ok(stream)) => {
                    // Every message is written whole, so there is nothing to wait for and collect.
                    match stream.set_nodelay(true) {
                        Ok(()) => return Ok(stream),
                        Err(error) => last = error,
                    }
                }
                Some(Err(error)) => last = error,
                None => last = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(target.failed(FailureKind::Socket, format_args!("could not connect: {last}")))
    }
}

/// Keeps the addresses that may be dialled, in order. If there are none, says why the first one was
/// refused, if there was one.
fn permitted(
    egress: &EgressPolicy,
    scheme: Scheme,
    addresses: impl IntoIterator<Item = IpAddr>,
) -> Result<Vec<IpAddr>, Option<Refusal>> {
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

/// Until when to try the next of `count` addresses: an equal share of what time is left, so that one
/// that never answers does not use up the time of the others.
fn share(now: Timestamp, deadline: Timestamp, count: usize) -> Timestamp {
    let left = deadline.since(now);
    let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
    now + (left / count).max(ADDRESS_TIME_MIN).min(left)
}

/// What the future comes to, unless the deadline passes first.
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
        let check = |list: &[&str]| permitted(&EgressPolicy::Private, Scheme::Http, ips(list));
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
