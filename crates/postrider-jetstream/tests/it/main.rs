//! Tests of the store on real NATS servers.
//!
//! `tests/clients/setup.sh DIR` installs them; `POSTRIDER_CLIENTS=DIR` makes these tests use them.

#![expect(
    clippy::disallowed_methods,
    reason = "tests measure their own patience and learn from the environment where the server is"
)]

#[path = "../../../postrider/src/bench/ports.rs"]
mod ports;
#[path = "../../../postrider/tests/it/signals.rs"]
mod signals;
mod nats;
mod support;
mod publish_answers;
// The log of a single node, on one server and on three.
mod conformance;
mod faults;
mod three_servers;
// State that all nodes share.
mod shared;
// Clusters of several nodes.
mod cluster;
