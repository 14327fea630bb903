//! Tests of state that all nodes share, on real NATS servers.

mod proxy;
mod archive;
mod catalog;
mod three;
