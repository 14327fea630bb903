//! The real engine on simulated time, network, disk and crashes: one seed decides everything.
//!
//! The engine is the one that ships. The clock follows tokio's paused time and is set now and then;
//! receivers answer from memory according to a script; the log and the catalog lose what a crash
//! would take from them. The auditor observes what publishers were told, what receivers got and
//! what was recorded, has the documents' tables, and knows nothing else.

pub mod simulated_run;
pub mod workload;
pub mod receivers;
pub mod crash;
pub mod blobs;
pub mod audit;
pub mod seeded_chance;
pub mod clock;
