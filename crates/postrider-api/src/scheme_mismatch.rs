//! Clients that speak http to an https port, or https to an http port, are told which scheme to
//! use.
//!
//! Otherwise the former would see an unexplained closed connection, and the latter "wrong version
//! number".

use crate::http::{ListenerProtocol, UNWANTED_BYTES_MAX, UNWANTED_TIMEOUT};
use crate::limits::ClientLimits;
use serde_json::json;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// First byte of every record of a TLS handshake. No http method begins with it.
const TLS_HANDSHAKE: u8 = 0x16;

/// Result of examining the first byte of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FirstByte {
    /// The scheme that the listener expects.
    Fits,
    /// The other scheme.
    Mismatch,
    /// No byte arrived, or the server stops.
    None,
}

/// Examines the first byte of a connection without consuming it.
pub(crate) async fn first_byte(
    stream: &TcpStream,
    wire: &ListenerProtocol,
    patience: Duration,
    stop: &CancellationToken,
) -> FirstByte {
    let mut first = [0];
    let peeked = tokio::select! {
        biased;
        peeked = timeout(patience, stream.peek(&mut first)) => peeked,
        () = stop.cancelled() => return FirstByte::None,
    };
    match peeked {
        Ok(Ok(1)) => match fits(wire, first[0]) {
            true => FirstByte::Fits,
            false => FirstByte::Mismatch,
        },
        _ => FirstByte::None,
    }
}

fn fits(wire: &ListenerProtocol, first: u8) -> bool {
    matches!(wire, ListenerProtocol::Tls(_)) == (first == TLS_HANDSHAKE)
}

/// Answers in plain http. A client that expects http shows the answer; a TLS client logs it at
/// best.
pub(crate) async fn answer(
    mut stream: TcpStream,
    wire: &ListenerProtocol,
    peer: IpAddr,
    local: SocketAddr,
    limits: &ClientLimits,
) {
    limits.report_scheme_mismatch(wire.scheme(), peer);
    let refuse = async {
        stream.write_all(&refusal(wire, local.port())).await?;
        stream.shutdown().await?;
        // Closing with unread bytes would reset the connection, and the client might not get to
        // read the answer.
        let mut unread = stream.take(UNWANTED_BYTES_MAX as u64);
        tokio::io::copy(&mut unread, &mut tokio::io::sink()).await
    };
    // A failure means that the client has disconnected.
    let _ = timeout(UNWANTED_TIMEOUT, refuse).await;
}

fn refusal(wire: &ListenerProtocol, port: u16) -> Vec<u8> {
    let message = match wire {
        ListenerProtocol::Tls(_) => {
            format!("port {port} speaks https and was sent plain http: use https:// in the URL")
        }
        ListenerProtocol::Plain => {
            format!("port {port} speaks plain http and was sent a TLS handshake: use http:// in the URL")
        }
    };
    let body = json!({"error": {"code": "BadRequest", "message": message}}).to_string();
    let length = body.len();
    format!(
        "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json; charset=utf-8\r\n\
         cache-control: no-store\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}
