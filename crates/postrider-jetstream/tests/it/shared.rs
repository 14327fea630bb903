//! Tests of state that all nodes share, on real NATS servers.

mod line;
mod archive;
mod catalog;
mod three;
