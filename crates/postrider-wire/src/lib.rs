//! JSON in and out: event schemas and the resource bodies of each API.
