//! Names to addresses.

use async_trait::async_trait;
use std::io;
use std::net::IpAddr;

/// Looks up the addresses of a host name, in the order they should be tried.
///
/// Is never asked about IP literals. An empty answer means the name has no addresses.
#[async_trait]
pub trait Resolve: Send + Sync {
    async fn addresses(&self, host: &str) -> io::Result<Vec<IpAddr>>;
}

/// Asks the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolve for SystemResolver {
    async fn addresses(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        Ok(tokio::net::lookup_host((host, 0))
            .await?
            .map(|address| address.ip())
            .collect())
    }
}
