//! Tests of several nodes on real NATS servers.

mod test_nodes;
mod partition_sharing;
mod faults;
mod peer_requests;
