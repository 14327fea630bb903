//! Outgoing requests of every kind: webhooks, storage accounts, the keys of a token issuer and
//! traces obey the same egress policy and use the same proxy. Connections to NATS do not: the store
//! is configured by the operator, and no request is made on a client's behalf over them.

use crate::config::Config;
use crate::serve::extra_roots;
use anyhow::Result;
use async_trait::async_trait;
use http::Uri;
use postrider_blobs::{StoreConnect, StoreStream};
use postrider_core::time::Clock;
use postrider_transport::{Config as Outgoing, Connector};
use std::sync::Arc;

/// Connection rules. Built once per server, because the clones share the health of its proxy.
pub fn rules(config: &Config) -> Result<Outgoing> {
    Ok(Outgoing {
        egress: config.egress.policy(),
        proxy: config.egress.proxy()?,
        extra_roots: extra_roots(config)?,
        ..Outgoing::default()
    })
}

/// Connector for storage accounts.
pub struct StoreConnector(Connector);

impl StoreConnector {
    pub fn new(rules: Outgoing, clock: Arc<dyn Clock>) -> Result<Arc<StoreConnector>> {
        Ok(Arc::new(StoreConnector(Connector::new(rules, clock)?)))
    }
}

#[async_trait]
impl StoreConnect for StoreConnector {
    async fn connect(&self, url: &Uri) -> Result<Box<dyn StoreStream>, String> {
        match self.0.connect(url).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(failure) => Err(failure.detail),
        }
    }
}
