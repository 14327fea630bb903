//! The HTTP server: one module per road.
