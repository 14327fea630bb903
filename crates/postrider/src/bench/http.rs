//! Just enough HTTP/1.1 for the ends of a loopback measurement.
//!
//! Hand-written on the sockets because it shares the cores with the server under test: what the
//! harness saves, the measurement gains. Bodies need a `content-length`; anything else is refused.

use std::net::SocketAddr;
use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use bytes::{Buf, Bytes, BytesMut};
use httparse::Status;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const HEADERS_MAX: usize = 64;
const HEAD_BYTES_MAX: usize = 64 * 1024;
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
const READ_BYTES: usize = 16 * 1024;

pub const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

/// A kept-alive connection, as client or as server.
pub struct BenchConnection {
    stream: TcpStream,
    input: BytesMut,
}

pub struct BenchRequest {
    head: Bytes,
    path: Range<usize>,
    pub body: Bytes,
}

pub struct BenchResponse {
    pub status: u16,
    pub body: Bytes,
}

impl BenchRequest {
    pub fn path(&self) -> &str {
        std::str::from_utf8(&self.head[self.path.clone()]).unwrap_or("")
    }
}

impl BenchConnection {
    pub fn new(stream: TcpStream) -> Result<BenchConnection> {
        stream.set_nodelay(true)?;
        let input = BytesMut::with_capacity(READ_BYTES);
        Ok(BenchConnection { stream, input })
    }

    pub async fn open(to: SocketAddr) -> Result<BenchConnection> {
        let stream = TcpStream::connect(to).await;
        BenchConnection::new(stream.with_context(|| format!("connecting to {to}"))?)
    }

    pub async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(bytes).await?)
    }

    /// The next request; `None` once the peer has closed between two requests.
    pub async fn request(&mut self) -> Result<Option<BenchRequest>> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut request = httparse::Request::new(&mut headers);
            if let Status::Complete(head_len) = request.parse(&self.input)? {
                let path = request.path.expect("a complete head has a path");
                let start = path.as_ptr() as usize - self.input.as_ptr() as usize;
                let path = start..start + path.len();
                let body_len = body_len(request.headers)?;
                let head = self.input.split_to(head_len).freeze();
                let body = self.body(body_len).await?;
                return Ok(Some(BenchRequest { head, path, body }));
            }
            if !self.read_head().await? {
                ensure!(self.input.is_empty(), "closed in the middle of a request");
                return Ok(None);
            }
        }
    }

    pub async fn response(&mut self) -> Result<BenchResponse> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut response = httparse::Response::new(&mut headers);
            if let Status::Complete(head_len) = response.parse(&self.input)? {
                let status = response.code.expect("a complete head has a status");
                let body_len = body_len(response.headers)?;
                self.input.advance(head_len);
                let body = self.body(body_len).await?;
                return Ok(BenchResponse { status, body });
            }
            ensure!(self.read_head().await?, "closed instead of answering");
        }
    }

    async fn body(&mut self, len: usize) -> Result<Bytes> {
        if len == 0 {
            return Ok(Bytes::new());
        }
        self.input.reserve(len.saturating_sub(self.input.len()));
        while self.input.len() < len {
            let read = self.stream.read_buf(&mut self.input).await?;
            ensure!(read > 0, "closed in the middle of a body");
        }
        Ok(self.input.split_to(len).freeze())
    }

    /// Reads more of a head; false at the end of the stream.
    async fn read_head(&mut self) -> Result<bool> {
        ensure!(self.input.len() < HEAD_BYTES_MAX, "head too large");
        if self.input.capacity() - self.input.len() < READ_BYTES / 4 {
            self.input.reserve(READ_BYTES);
        }
        Ok(self.stream.read_buf(&mut self.input).await? > 0)
    }
}

/// A `GET` or `POST` without a body, on a connection of its own.
pub async fn call(to: SocketAddr, method: &str, path: &str) -> Result<BenchResponse> {
    let mut connection = BenchConnection::open(to).await?;
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {to}\r\ncontent-length: 0\r\n\r\n");
    connection.send(head.as_bytes()).await?;
    connection.response().await
}

fn body_len(headers: &[httparse::Header<'_>]) -> Result<usize> {
    let mut len = 0;
    for header in headers {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            bail!("a body without content-length");
        }
        if header.name.eq_ignore_ascii_case("content-length") {
            len = std::str::from_utf8(header.value)?.trim().parse()?;
        }
    }
    ensure!(len <= BODY_BYTES_MAX, "body too large");
    Ok(len)
}
