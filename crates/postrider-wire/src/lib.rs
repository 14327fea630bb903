//! JSON in and out: event schemas and the resource bodies of each API.

pub mod auth;
pub mod token;
pub mod seal;
pub mod error;
pub mod publish;
pub mod resources;
pub mod arm;
