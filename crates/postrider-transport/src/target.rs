//! The connection target in a URL.

use crate::egress::DestinationScheme;
use http::Uri;
use postrider_engine::deliver::{TransportFailure, TransportFailureKind};
use std::fmt;

/// The origin of a URL, borrowed from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionTarget<'a> {
    pub scheme: DestinationScheme,
    /// Host and port as written, without userinfo: the value of the `host` header.
    pub authority: &'a str,
    /// The host without brackets.
    pub host: &'a str,
    pub port: u16,
}

impl<'a> ConnectionTarget<'a> {
    pub fn of(url: &'a Uri) -> Result<ConnectionTarget<'a>, TransportFailure> {
        let Some(written) = url.authority() else {
            return Err(refused(
                TransportFailureKind::Resolution,
                "",
                "the url names no host",
            ));
        };
        let authority = written.as_str();
        let authority = authority.rsplit_once('@').map_or(authority, |(_, rest)| rest);
        let (scheme, port_default) = match url.scheme_str() {
            Some("http") => (DestinationScheme::Http, 80),
            Some("https") => (DestinationScheme::Https, 443),
            _ => {
                let reason = "the url's scheme is neither http nor https";
                return Err(refused(TransportFailureKind::Forbidden, authority, reason));
            }
        };
        let bracketed = written.host();
        let port = match authority.get(bracketed.len()..).unwrap_or_default() {
            "" | ":" => Some(port_default),
            port => port.strip_prefix(':').and_then(|port| port.parse().ok()),
        };
        let Some(port) = port.filter(|port| *port != 0) else {
            return Err(refused(
                TransportFailureKind::Socket,
                authority,
                "the url's port is not a port",
            ));
        };
        let host = bare(bracketed);
        if host.is_empty() {
            return Err(refused(
                TransportFailureKind::Resolution,
                authority,
                "the url names no host",
            ));
        }
        Ok(ConnectionTarget {
            scheme,
            authority,
            host,
            port,
        })
    }

    /// A failed attempt at this target.
    pub fn failed(&self, kind: TransportFailureKind, reason: impl fmt::Display) -> TransportFailure {
        refused(kind, self.authority, reason)
    }
}

/// A host without the brackets of an IPv6 literal.
pub(crate) fn bare(host: &str) -> &str {
    let inside = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    inside.unwrap_or(host)
}

fn refused(kind: TransportFailureKind, authority: &str, reason: impl fmt::Display) -> TransportFailure {
    let detail = match authority {
        "" => reason.to_string(),
        _ => format!("{authority}: {reason}"),
    };
    TransportFailure { kind, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(url: &str, expected: Result<(DestinationScheme, &str, &str, u16), TransportFailureKind>) {
        let uri: Uri = url.parse().unwrap();
        let target = ConnectionTarget::of(&uri);
        if let Err(failure) = &target {
            assert!(!failure.detail.contains("secret"), "{url}: {}", failure.detail);
        }
        let got = target
            .map(|t| (t.scheme, t.authority, t.host, t.port))
            .map_err(|f| f.kind);
        assert_eq!(got, expected, "{url}");
    }

    #[test]
    fn reads_the_origin_of_a_url() {
        use DestinationScheme::{Http, Https};
        check(
            "http://example.com/a?secret=1",
            Ok((Http, "example.com", "example.com", 80)),
        );
        check(
            "https://example.com",
            Ok((Https, "example.com", "example.com", 443)),
        );
        check(
            "https://example.com:8443/",
            Ok((Https, "example.com:8443", "example.com", 8443)),
        );
        check(
            "http://u:secret@example.com:81/",
            Ok((Http, "example.com:81", "example.com", 81)),
        );
        check("http://[::1]:81/", Ok((Http, "[::1]:81", "::1", 81)));
        check("http://[::1]/", Ok((Http, "[::1]", "::1", 80)));
        check("http://127.0.0.1:1/", Ok((Http, "127.0.0.1:1", "127.0.0.1", 1)));
        check("/path?secret=1", Err(TransportFailureKind::Resolution));
        check(
            "ftp://example.com/?secret=1",
            Err(TransportFailureKind::Forbidden),
        );
        check(
            "http://u:secret@example.com:0/",
            Err(TransportFailureKind::Socket),
        );
    }
}
