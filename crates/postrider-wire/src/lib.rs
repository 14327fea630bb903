//! Wire formats: event schemas, resource bodies of each API, errors and credentials.

pub mod auth;
pub mod token;
pub mod seal;
pub mod error;
pub mod publish;
pub mod resources;
pub mod arm;
