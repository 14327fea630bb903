//! Egress through a forward proxy: a tunnel (CONNECT) for http and https targets alike.

use crate::target::bare;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderValue, Uri};
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use postrider_engine::deliver::ProxyHealth;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest answer to CONNECT that is read.
const HEAD_MAX: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;
/// The most interim responses (1xx) that are accepted …
const INTERIM_MAX: usize = 32;
/// … and the most bytes of them and the answer together.
const ANSWERS_MAX: usize = 4 * HEAD_MAX;

/// A forward proxy, and the targets that are reached without it.
#[derive(Clone, Debug)]
pub struct ForwardProxy {
    /// A name or an IP literal without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Marked as sensitive: prints nothing under `Debug`.
    authorization: Option<HeaderValue>,
    no_proxy: Vec<ProxyException>,
    pub(crate) health: Arc<ProxyHealth>,
}

/// An entry of `no_proxy`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ProxyException {
    Everything,
    /// The name and all names below it; with a port, only that port.
    Name(String, Option<u16>),
    /// Matches IP literals only.
    Network(IpNet, Option<u16>),
}

impl ForwardProxy {
    /// Parses `http://[user:password@]host[:port]`. The error contains nothing of the URL.
    pub fn parse(url: &str, no_proxy: &[String]) -> Result<ForwardProxy, &'static str> {
        const FORM: &str = "must be a URL such as \"http://proxy.example:3128\"";
        let uri: Uri = url.parse().map_err(|_| FORM)?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err("must begin with http://: TLS to the proxy itself is not supported"),
            _ => return Err(FORM),
        }
        let authority = uri.authority().ok_or(FORM)?;
        let host = bare(authority.host());
        let port = match authority.port() {
            Some(port) => port.as_str().parse().ok().filter(|port| *port != 0).ok_or(FORM)?,
            None => 80,
        };
        let plain = matches!(uri.path(), "" | "/") && uri.query().is_none() && !url.contains('#');
        if host.is_empty() || !plain {
            return Err(FORM);
        }
        let userinfo = authority.as_str().rsplit_once('@').map(|(userinfo, _)| userinfo);
        let exceptions = no_proxy.iter().map(|entry| ProxyException::parse(entry));
        Ok(ForwardProxy {
            authorization: userinfo.map(basic).transpose()?,
            no_proxy: exceptions.collect::<Result<_, _>>()?,
            health: Arc::new(ProxyHealth::new(match host.contains(':') {
                true => format!("[{host}]:{port}"),
                false => format!("{host}:{port}"),
            })),
            host: host.to_owned(),
            port,
        })
    }

    /// Shared by all connectors that are made with this proxy.
    pub fn health(&self) -> Arc<ProxyHealth> {
        self.health.clone()
    }

    /// Whether a target is reached through the proxy.
    pub fn serves(&self, host: &str, port: u16) -> bool {
        !self
            .no_proxy
            .iter()
            .any(|exception| exception.matches(host, port))
    }

    /// The request for a tunnel to the target.
    pub(crate) fn connect_request(&self, host: &str, port: u16) -> Vec<u8> {
        let authority = match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        let mut request = format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n").into_bytes();
        if let Some(authorization) = &self.authorization {
            request.extend_from_slice(b"proxy-authorization: ");
            request.extend_from_slice(authorization.as_bytes());
            request.extend_from_slice(b"\r\n");
        }
        request.extend_from_slice(b"\r\n");
        request
    }
}

/// The authorization header for `user:password`, both percent-encoded.
fn basic(userinfo: &str) -> Result<HeaderValue, &'static str> {
    let (user, password) = userinfo.split_once(':').unwrap_or((userinfo, ""));
    let decoded = |text| percent_decode_str(text).collect::<Vec<u8>>();
    let mut pair = decoded(user);
    pair.push(b':');
    pair.extend(decoded(password));
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(pair)))
        .map_err(|_| "has a user name or password that cannot be sent")?;
    value.set_sensitive(true);
    Ok(value)
}

impl ProxyException {
    fn parse(entry: &str) -> Result<ProxyException, &'static str> {
        const FORM: &str = "no_proxy: each entry must be a host name, an address, a network or \"*\"";
        let entry = entry.trim();
        if entry == "*" {
            return Ok(ProxyException::Everything);
        }
        if let Some(net) = network(entry) {
            return Ok(ProxyException::Network(net, None));
        }
        let (host, port) = match entry.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().map_err(|_| FORM)?)),
            None => (entry, None),
        };
        if let Some(net) = network(bare(host)) {
            return Ok(ProxyException::Network(net, port));
        }
        let name = host.strip_prefix("*.").unwrap_or(host);
        let name = name.trim_matches('.').to_ascii_lowercase();
        let named = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
        match !name.is_empty() && name.chars().all(named) {
            true => Ok(ProxyException::Name(name, port)),
            false => Err(FORM),
        }
    }

    fn matches(&self, host: &str, port: u16) -> bool {
        match self {
            ProxyException::Everything => true,
            ProxyException::Name(name, only) => {
                let host = host.trim_end_matches('.').to_ascii_lowercase();
                let below = host.strip_suffix(name.as_str());
                only.is_none_or(|only| only == port)
                    && below.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }
            ProxyException::Network(net, only) => {
                let ip: Option<IpAddr> = host.parse().ok();
                only.is_none_or(|only| only == port) && ip.is_some_and(|ip| net.contains(&ip.to_canonical()))
            }
        }
    }
}

fn network(text: &str) -> Option<IpNet> {
    let address = || text.parse::<IpAddr>().ok().map(IpNet::from);
    text.parse().ok().or_else(address)
}

/// Opens the tunnel. The error completes a sentence that begins with the proxy.
pub(crate) async fn open_tunnel<S>(mut proxy: S, request: &[u8]) -> Result<S, String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let broke = |error: io::Error| format!("broke the connection: {error}");
    proxy.write_all(request).await.map_err(broke)?;
    let mut input = Vec::new();
    let mut piece = [0; 1024];
    let (mut bytes, mut interim) = (0, 0);
    loop {
        let read = proxy.read(&mut piece).await.map_err(broke)?;
        if read == 0 {
            return Err("closed the connection without an answer".to_owned());
        }
        input.extend_from_slice(&piece[..read]);
        bytes += read;
        while let Some((used, status)) = answer(&input)? {
            input.drain(..used);
            match status {
                100..200 if interim == INTERIM_MAX => {
                    return Err(format!("sends more than {INTERIM_MAX} interim responses"));
                }
                100..200 => interim += 1,
                200..300 if input.is_empty() => return Ok(proxy),
                200..300 => return Err("sent something through the tunnel before it was asked to".to_owned()),
                407 => return Err("asks for other credentials (407)".to_owned()),
                403 => return Err("forbids the target (403)".to_owned()),
                _ => return Err(format!("could not open a tunnel ({status})")),
            }
        }
        if bytes >= ANSWERS_MAX {
            return Err(format!(
                "sends more than {ANSWERS_MAX} bytes of interim responses"
            ));
        }
    }
}

/// The length and the status of an answer's head, once it has arrived completely.
fn answer(input: &[u8]) -> Result<Option<(usize, u16)>, String> {
    if input.is_empty() {
        return Ok(None);
    }
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    match response.parse(input) {
        Ok(httparse::Status::Complete(used)) => Ok(Some((used, response.code.unwrap_or(0)))),
        Ok(httparse::Status::Partial) if input.len() < HEAD_MAX => Ok(None),
        _ => Err("does not answer as an HTTP proxy".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str, no_proxy: &[&str]) -> Result<ForwardProxy, &'static str> {
        let no_proxy: Vec<String> = no_proxy.iter().map(ToString::to_string).collect();
        ForwardProxy::parse(url, &no_proxy)
    }

    #[test]
    fn the_url_of_a_proxy_is_read_and_its_credentials_are_not_shown() {
        let proxy = parse("http://me:s%40cret@[::1]:3128/", &[]).unwrap();
        assert_eq!((proxy.host.as_str(), proxy.port), ("::1", 3128));
        assert_eq!(proxy.health.address, "[::1]:3128");
        let request = String::from_utf8(proxy.connect_request("fd00::1", 443)).unwrap();
        // "me:s@cret" in base64.
        assert_eq!(
            request,
            "CONNECT [fd00::1]:443 HTTP/1.1\r\nhost: [fd00::1]:443\r\n\
             proxy-authorization: Basic bWU6c0BjcmV0\r\n\r\n"
        );
        let shown = format!("{proxy:?}");
        assert!(!shown.contains("cret") && !shown.contains("bWU6"), "{shown}");
        assert_eq!(parse("http://proxy", &[]).unwrap().port, 80);
        for bad in [
            "",
            "proxy:3128",
            "https://proxy:3128",
            "socks5://proxy",
            "http://proxy:0",
            "http://proxy/path",
            "http://proxy?x=1",
        ] {
            assert!(parse(bad, &[]).is_err(), "{bad}");
        }
    }

    // Regression: the loop was endless, and left no time to the timer that was to end it.
    #[tokio::test]
    async fn a_proxy_that_sends_interim_responses_without_end_is_refused() {
        let long = format!("HTTP/1.1 102 Processing\r\nx: {}\r\n\r\n", "y".repeat(10_000));
        for (interim, told) in [
            ("HTTP/1.1 100 Continue\r\n\r\n", "32 interim responses"),
            (&*long, "65536 bytes"),
        ] {
            let (near, mut far) = tokio::io::duplex(4096);
            let opening = open_tunnel(near, b"CONNECT x:1 HTTP/1.1\r\n\r\n");
            let sending = async { while far.write_all(interim.as_bytes()).await.is_ok() {} };
            let (opened, ()) = tokio::join!(opening, sending);
            let refused = opened.map(drop).unwrap_err();
            assert!(refused.contains(told), "{refused}");
        }
        let (near, mut far) = tokio::io::duplex(4096);
        let few = "HTTP/1.1 100 Continue\r\n\r\n".repeat(INTERIM_MAX) + "HTTP/1.1 200 OK\r\n\r\n";
        far.write_all(few.as_bytes()).await.unwrap();
        open_tunnel(near, b"CONNECT x:1 HTTP/1.1\r\n\r\n").await.unwrap();
    }

    #[test]
    fn exceptions_match_names_below_them_addresses_and_ports() {
        let list = [
            "example.com",
            ".internal",
            "*.lab",
            "10.0.0.0/8",
            "::1",
            "only.port:8080",
        ];
        let proxy = parse("http://proxy:3128", &list).unwrap();
        let check = |host: &str, port: u16, serves: bool| {
            assert_eq!(proxy.serves(host, port), serves, "{host}:{port}");
        };
        check("example.com", 443, false);
        check("A.Example.com.", 443, false);
        check("anexample.com", 443, true);
        check("x.internal", 80, false);
        check("x.lab", 80, false);
        check("10.1.2.3", 80, false);
        check("::ffff:10.1.2.3", 80, false);
        check("11.1.2.3", 80, true);
        check("::1", 80, false);
        check("only.port", 8080, false);
        check("only.port", 80, true);
        check("127.0.0.1", 80, true);
        assert!(!parse("http://p", &["*"]).unwrap().serves("x", 1));
        for bad in ["", "a b", "x:y", "10.0.0.0/33"] {
            assert!(parse("http://p", &[bad]).is_err(), "{bad:?}");
        }
    }
}
