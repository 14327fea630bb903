//! The log on three NATS servers, every stream on all of them.

#![expect(
    clippy::disallowed_methods,
    reason = "tests measure their own patience and learn from the environment where the server is"
)]

#[expect(dead_code, reason = "other tests need more of it")]
#[path = "../it/server.rs"]
mod server;
#[expect(dead_code, reason = "other tests need more of it")]
#[path = "../cluster/servers.rs"]
mod servers;
#[expect(dead_code, reason = "other tests need more of it")]
#[path = "../it/support.rs"]
mod support;
#[path = "../it/told.rs"]
mod told;
mod log;
