//! The HTTP server: one module per road. None of them reaches past the engine's front.

pub mod http;
pub mod publish;
pub mod edge;
pub mod declare;
pub mod health;

use postrider_core::ids::Secret;
use postrider_engine::Engine;
use postrider_wire::{publish::Limits, resources};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the roads need to know.
#[derive(Clone, Debug)]
pub struct Config {
    pub limits: Limits,
    pub resource_limits: resources::Limits,
    pub edge: EdgeAccess,
    /// Host names by which this server is addressed; others are refused where no credential is asked for.
    pub host_names: Vec<String>,
    pub public_url: Option<String>,
    pub resource_group: String,
    pub location: String,
    /// Secrets of clients that may publish.
    pub client_secrets: Vec<Secret>,
    /// `/iotHubs/…/modules/…`: what edge resource ids begin with.
    pub module_path: String,
    pub profile: String,
    pub version: &'static str,
}

/// Who may use the edge module's API.
#[derive(Clone, Debug)]
pub enum EdgeAccess {
    /// Anyone who addresses the server by one of its own names.
    Open,
    /// Holders of one of these keys, or of a client's secret.
    Keys([Secret; 2]),
}

/// Everything a request can reach.
pub struct Server {
    pub engine: Arc<Engine>,
    pub config: Config,
    request_base: u64,
    requests: AtomicU64,
    /// Resources are made and changed one at a time, so that no two read the same earlier state.
    declaring: tokio::sync::Mutex<()>,
}

impl Server {
    /// `request_base` makes this server's request ids differ from another's.
    pub fn new(engine: Arc<Engine>, config: Config, request_base: u64) -> Server {
        Server {
            engine,
            config,
            request_base,
            requests: AtomicU64::new(0),
            declaring: tokio::sync::Mutex::new(()),
        }
    }

    fn request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Relaxed);
        postrider_core::event::system_id(self.request_base, postrider_core::ids::Position(number))
    }

    /// Whether a bearer token is the secret of a client.
    fn is_client_secret(&self, token: &str) -> bool {
        self.config
            .client_secrets
            .iter()
            .any(|known| same(known.expose(), token))
    }
}

/// Compares secrets in a time that does not depend on where they differ.
fn same(a: &str, b: &str) -> bool {
    let differing = a.bytes().zip(b.bytes()).fold(0, |acc, (x, y)| acc | (x ^ y));
    a.len() == b.len() && std::hint::black_box(differing) == 0
}
