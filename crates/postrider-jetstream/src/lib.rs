//! The stores on NATS JetStream, shared by any number of nodes.

pub mod connect;
pub mod sealer;
pub mod chain;
pub mod node;
pub mod partition;
pub mod log;
mod moving;
mod replicated;
pub mod catalog;
pub mod archive;
pub mod bucket;
pub mod facts;
pub mod members;
mod parts;
pub mod forward;
pub mod ask;
pub mod health;
pub mod migration;
mod cluster;

pub use cluster::{Cluster, check};
pub use connect::{Auth, Connection, Names, Settings, Tls};
pub use log::{Forward, JetStreamLog, Nowhere};
pub use members::{Members, Membership, Node, NodeId};
pub use node::{Bounds, Lease, NodeShared};
pub use partition::Partition;
