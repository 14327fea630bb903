//! Addresses by which this server may be called, and by which it may name itself in answers.
//!
//! A `Host` header is arbitrary input. Only a host that is one of the server's own names becomes
//! part of a URL that the server hands out; anything else is replaced by the address of the
//! listener that received the request.

use crate::Server;
use crate::http::ApiCall;
use http::uri::Authority;
use std::net::{IpAddr, SocketAddr};

/// Both ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionEnds {
    /// The peer of the connection: the client, or a proxy in front of the server.
    pub peer: IpAddr,
    /// The server's address that the client connected to.
    pub local: SocketAddr,
}

/// A host with its port, and nothing else: no credentials, no path.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HostPort {
    /// In lower case, without brackets.
    host: String,
    port: Option<u16>,
}

impl HostPort {
    fn parse(text: &str) -> Option<HostPort> {
        if text.is_empty() || text.contains('@') {
            return None;
        }
        let authority: Authority = text.parse().ok()?;
        let host = authority.host();
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        let port = match authority.as_str().strip_prefix(host)? {
            "" => None,
            port => Some(port.strip_prefix(':')?.parse().ok()?),
        };
        Some(HostPort {
            host: bare.to_ascii_lowercase(),
            port,
        })
    }

    fn port_of(&self, scheme: &str) -> u16 {
        let by_scheme = if scheme == "https" { 443 } else { 80 };
        self.port.unwrap_or(by_scheme)
    }
}

/// Origin of a web page. Browsers keep pages of different origins apart.
#[derive(Debug, PartialEq, Eq)]
struct WebOrigin {
    scheme: String,
    host: String,
    port: u16,
}

impl WebOrigin {
    fn parse(text: &str) -> Option<WebOrigin> {
        let (scheme, rest) = text.split_once("://")?;
        let scheme = scheme.to_ascii_lowercase();
        let at = HostPort::parse(rest.split('/').next()?)?;
        Some(WebOrigin {
            port: at.port_of(&scheme),
            host: at.host,
            scheme,
        })
    }
}

/// Whether a name of `listen.names` covers a host: the same name, or `*.dc.example` for every host
/// one label below.
pub(crate) fn name_covers(name: &str, host: &str) -> bool {
    let Some(parent) = name.strip_prefix("*.") else {
        return name.eq_ignore_ascii_case(host);
    };
    let below = host.split_once('.');
    below.is_some_and(|(label, rest)| {
        !label.is_empty() && !label.contains('*') && rest.eq_ignore_ascii_case(parent)
    })
}

/// Whether a host, without brackets and port, is a name of this server or the address that the
/// client connected to.
pub(crate) fn is_own_name(server: &Server, local: SocketAddr, host: &str) -> bool {
    let mut names = server.config.host_names.iter();
    names.any(|name| name_covers(name, host))
        || host
            .parse::<IpAddr>()
            .is_ok_and(|ip| ip.to_canonical() == local.ip().to_canonical())
}

/// Headers of requests that came through a proxy.
const PROXY_HEADERS: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "via"];

/// Whether a request was made on this machine, by a loopback name and not through a local proxy. A
/// page whose own host name resolves to a loopback address is not accepted.
pub fn is_local_visit(call: &ApiCall) -> bool {
    let is_loopback = |host: &str| {
        let ip = host.parse::<IpAddr>();
        host == "localhost" || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
    };
    call.peer.to_canonical().is_loopback()
        && HostPort::parse(call.host()).is_some_and(|at| is_loopback(&at.host))
        && !PROXY_HEADERS.iter().any(|name| call.headers.contains_key(*name))
}

/// For paths without credentials: the client must address the server by one of its own names, and
/// must not be a page of another origin. Another port is another origin.
pub fn addressed_by_name(server: &Server, call: &ApiCall) -> Result<(), String> {
    // A page must not reach the server by a name of its own that resolves to the server's address
    // (DNS rebinding) …
    let host = call.host();
    let at = HostPort::parse(host).filter(|at| is_own_name(server, call.local, &at.host));
    let Some(at) = at else {
        let host = HostPort::parse(host).map_or(host.to_owned(), |at| at.host);
        return Err(format!(
            "host {host:?} is not a name of this server; add it to listen.names"
        ));
    };
    // … nor from its own origin under the server's real name.
    let own = WebOrigin {
        scheme: call.scheme.to_owned(),
        port: at.port_of(call.scheme),
        host: at.host,
    };
    let public = server.config.public_url.as_deref().and_then(WebOrigin::parse);
    for origin in call.headers.get_all(hyper::header::ORIGIN) {
        let origin = origin.to_str().unwrap_or("null");
        // An origin without a scheme is not sent by browsers; deliveries have such an `WebOrigin`.
        if !origin.contains("://") && origin != "null" {
            continue;
        }
        let page = WebOrigin::parse(origin);
        if page.is_none() || (page.as_ref() != Some(&own) && page != public) {
            return Err(format!(
                "pages of {origin:?} may not use this server at {}; if they are its own, behind a proxy, set \
                 listen.public_url to their address",
                call.host()
            ));
        }
    }
    Ok(())
}

/// The listener's own address as a URL.
fn listener_url(call: &ApiCall) -> String {
    let local = SocketAddr::new(call.local.ip().to_canonical(), call.local.port());
    format!("{}://{local}", call.scheme)
}

/// Prefix of URLs in answers: `listen.public_url`, or the address that the client used if it is one
/// of the server's own names, or the listener's address.
pub fn answer_base(server: &Server, call: &ApiCall) -> String {
    if let Some(url) = &server.config.public_url {
        return url.trim_end_matches('/').to_owned();
    }
    request_base(server, call)
}

/// Like [`answer_base`] but without `listen.public_url`, as the edge module does.
pub fn request_base(server: &Server, call: &ApiCall) -> String {
    match HostPort::parse(call.host()) {
        Some(at) if is_own_name(server, call.local, &at.host) => format!("{}://{}", call.scheme, call.host()),
        _ => listener_url(call),
    }
}

/// Prefix of validation URLs. Webhooks and people visit these URLs: one of the server's names with
/// another port than the listener's could lead to another program on this machine.
pub fn validation_base(server: &Server, call: &ApiCall) -> String {
    let at = HostPort::parse(call.host());
    let own_port = at.is_some_and(|at| at.port_of(call.scheme) == call.local.port());
    match server.config.public_url.is_some() || own_port {
        true => answer_base(server, call),
        false => listener_url(call),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_and_a_port_and_nothing_else() {
        let check = |text: &str, expected: Option<(&str, Option<u16>)>| {
            let found = HostPort::parse(text);
            let found = found.as_ref().map(|at| (at.host.as_str(), at.port));
            assert_eq!(found, expected, "{text:?}");
        };
        check("localhost", Some(("localhost", None)));
        check("LocalHost:5888", Some(("localhost", Some(5888))));
        check("127.0.0.1:1", Some(("127.0.0.1", Some(1))));
        check("[::1]:5888", Some(("::1", Some(5888))));
        check("[::1]", Some(("::1", None)));
        for wrong in [
            "",
            "localhost:x@evil.example",
            "localhost@evil.example",
            "localhost/x",
            "localhost:99999",
            "localhost:",
            "a b",
            "localhost:80:80",
            "localhost#evil",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn a_wildcard_covers_one_label() {
        let check = |name: &str, host: &str, expected: bool| {
            assert_eq!(name_covers(name, host), expected, "{name} {host}")
        };
        check("dc.example", "DC.example", true);
        check("dc.example", "a.dc.example", false);
        check("*.dc.example", "grid.DC.example", true);
        for other in [
            "dc.example",
            ".dc.example",
            "a.b.dc.example",
            "xdc.example",
            "*.dc.example",
            "a.dc.example.",
        ] {
            check("*.dc.example", other, false);
        }
    }

    #[test]
    fn origins_differ_by_scheme_host_and_port() {
        let same = |one: &str, other: &str| WebOrigin::parse(one) == WebOrigin::parse(other);
        assert!(same("http://localhost", "http://LOCALHOST:80"));
        assert!(same("https://h:443", "https://h/portal"));
        assert!(!same("http://localhost:5888", "http://localhost:3000"));
        assert!(!same("http://localhost:5888", "https://localhost:5888"));
        assert!(!same("http://localhost:5888", "http://127.0.0.1:5888"));
        assert_eq!(WebOrigin::parse("null"), None);
        assert_eq!(WebOrigin::parse("http://localhost@evil.example"), None);
    }
}
