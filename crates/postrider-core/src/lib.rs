//! The rules: events, filters, rendering, retry, probation, profiles. No I/O, no runtime, no clock
//! reads.

pub mod ids;
pub mod time;
pub mod duration;
pub mod json;
pub mod decimal;
pub mod event;
pub mod envelope;
pub mod trace;
pub mod filter;
pub mod body;
pub mod render;
pub mod pause;
pub mod subscription;
pub mod connection;
pub mod handshake;
pub mod outcome;
pub mod probation;
pub mod profile;
pub mod retry;
