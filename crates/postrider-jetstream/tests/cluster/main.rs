//! Several nodes on real NATS servers.

mod servers;
mod crew;
mod sharing;
mod faults;
mod talking;
