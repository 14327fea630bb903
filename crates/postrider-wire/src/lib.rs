//! JSON in and out: event schemas and the resource bodies of each API.

pub mod auth;
pub mod error;
pub mod publish;
pub mod resources;
