//! Delivery over HTTP(S): TLS, address checks, body caps.
