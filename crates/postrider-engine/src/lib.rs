//! The path of an event: ingest, dispatch, deliver, settle. No sockets, no files.

pub mod deliver;
