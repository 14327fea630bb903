//! The log on a real NATS server.
//!
//! `tests/clients/setup.sh DIR` installs it; `POSTRIDER_CLIENTS=DIR` makes these tests use it.

#![expect(
    clippy::disallowed_methods,
    reason = "tests measure their own patience and learn from the environment where the server is"
)]

mod server;
mod support;
mod told;
mod conformance;
mod faults;
