//! The real engine on simulated time, network and crashes: one seed decides everything.
//!
//! The engine is the one that ships. The clock follows tokio's paused time, receivers answer from
//! memory as their script says, and the log forgets what a crash would take from it. The auditor sees
//! what publishers were told, what receivers got and what the log recorded, and knows nothing else.

pub mod world;
pub mod receivers;
pub mod crash;
pub mod audit;
pub mod chance;
pub mod clock;
