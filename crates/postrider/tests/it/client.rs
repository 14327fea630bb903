//! A small HTTP client that sends exactly the given bytes, however wrong.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::wait::PATIENCE;

pub type HeaderPairs<'a> = &'a [(&'a str, &'a str)];

/// An HTTP response.
#[derive(Debug)]
pub struct HttpTestAnswer {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpTestAnswer {
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("answers are text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e} in {:?}", self.text()))
    }

    /// The answer itself; panics if its status differs.
    #[track_caller]
    pub fn expect(self, status: u16) -> HttpTestAnswer {
        assert_eq!(self.status, status, "{}", self.text());
        self
    }
}

pub fn find<'h>(headers: &'h [(String, String)], name: &str) -> Option<&'h str> {
    headers
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.as_str())
}

trait TestStream: Read + Write + Send {}
impl<S: Read + Write + Send> TestStream for S {}

/// A connection for sequential requests.
pub struct TestConnection {
    stream: BufReader<Box<dyn TestStream>>,
    host: String,
}

impl TestConnection {
    pub fn open(address: SocketAddr) -> io::Result<TestConnection> {
        TestConnection::open_within(address, PATIENCE)
    }

    /// Opens a connection whose answers must come within `patience`.
    pub fn open_within(address: SocketAddr, patience: Duration) -> io::Result<TestConnection> {
        Ok(TestConnection::over(Box::new(dial(address, patience)?), address))
    }

    /// Opens a TLS connection that trusts only the CA in `ca`.
    pub fn open_tls(address: SocketAddr, name: &str, ca: &Path) -> io::Result<TestConnection> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_file_iter(ca).map_err(io::Error::other)? {
            roots
                .add(root.map_err(io::Error::other)?)
                .map_err(io::Error::other)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let tls = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
        Ok(TestConnection::over(
            Box::new(StreamOwned::new(tls, dial(address, PATIENCE)?)),
            address,
        ))
    }

    fn over(stream: Box<dyn TestStream>, address: SocketAddr) -> TestConnection {
        TestConnection {
            stream: BufReader::new(stream),
            host: address.to_string(),
        }
    }

    /// Sends one request and reads its answer. `host` and `content-length` are added unless given.
    pub fn send(
        &mut self,
        method: &str,
        target: &str,
        headers: HeaderPairs<'_>,
        body: &[u8],
    ) -> io::Result<HttpTestAnswer> {
        let mut head = format!("{method} {target} HTTP/1.1\r\n");
        let given = |name: &str| headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
        if !given("host") {
            head += &format!("host: {}\r\n", self.host);
        }
        if !given("content-length") && !given("transfer-encoding") && (!body.is_empty() || method != "GET") {
            head += &format!("content-length: {}\r\n", body.len());
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        self.write(&[head.as_bytes(), body].concat())?;
        self.answer(method)
    }

    /// Sends raw bytes.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)?;
        self.stream.get_mut().flush()
    }

    pub fn answer(&mut self, method: &str) -> io::Result<HttpTestAnswer> {
        let (first, headers) = read_head(&mut self.stream)?;
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("not an answer: {first:?}")))?;
        let length = find(&headers, "content-length")
            .and_then(|length| length.parse().ok())
            .unwrap_or(0);
        let mut body = vec![0; if method == "HEAD" { 0 } else { length }];
        self.stream.read_exact(&mut body)?;
        Ok(HttpTestAnswer {
            status,
            headers,
            body,
        })
    }
}

fn dial(address: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    Ok(stream)
}

/// Reads a message's first line and headers.
pub fn read_head(stream: &mut impl BufRead) -> io::Result<(String, Vec<(String, String)>)> {
    let mut line = || -> io::Result<String> {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end_matches(['\r', '\n']).to_owned())
    };
    let first = line()?;
    let mut headers = Vec::new();
    loop {
        let line = line()?;
        if line.is_empty() {
            return Ok((first, headers));
        }
        let (name, value) = line
            .split_once(':')
            .ok_or_else(|| io::Error::other(format!("not a header: {line:?}")))?;
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
}
