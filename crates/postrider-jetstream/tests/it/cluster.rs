//! Tests of several nodes on real NATS servers.

mod crew;
mod sharing;
mod faults;
mod talking;
