//! The stores on NATS JetStream, shared by any number of nodes.

pub mod connection;
pub mod sealer;
pub mod fenced_stream;
pub mod node;
pub mod partition;
pub mod log;
mod export;
mod replicated;
pub mod catalog;
pub mod archive;
pub mod bucket;
pub mod cluster_facts;
pub mod membership;
mod message_parts;
pub mod forward;
pub mod peer_requests;
pub mod health;
pub mod migration;
mod cluster;

pub use cluster::{JetStreamCluster, check};
pub use connection::{JetStreamSettings, NatsAuth, NatsConnection, NatsTls, StreamNames};
pub use log::{ForwardAppend, JetStreamLog, NoForwarding};
pub use membership::{Membership, MembershipService, NodeId, NodeInfo};
pub use node::{Lease, NodeBounds, NodeShared};
pub use partition::Partition;
