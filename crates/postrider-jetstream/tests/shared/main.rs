//! What all nodes share, on a real nats-server.

mod archive;
mod catalog;
mod nats;
#[expect(dead_code, reason = "other tests need more of it")]
#[path = "../cluster/servers.rs"]
mod servers;
mod three;
