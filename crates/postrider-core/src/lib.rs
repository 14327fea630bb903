//! The rules: events, filters, routing, rendering, retry. No I/O, no runtime, no clock reads.

pub mod ids;
pub mod time;
pub mod json;
pub mod event;
pub mod envelope;
pub mod filter;
pub mod subscription;
