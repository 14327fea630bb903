//! Hosts that a destination of type EventGrid may have: Azure's, and other Event Grid servers that
//! the operator allows.

use super::validate::UrlParts;
use std::net::IpAddr;

const AZURE_DOMAINS: [&str; 3] = ["eventgrid.azure.net", "eventgrid.azure.us", "eventgrid.azure.cn"];

/// Domains that are reserved for private networks (RFC 6761, 6762, 8375, and ICANN's `internal`).
const PRIVATE_DOMAINS: [&str; 4] = ["localhost", "local", "internal", "home.arpa"];

/// Hosts that the operator allows besides Azure's hosts over https.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventGridHosts {
    /// `edge.event_grid_hosts`
    pub listed: Vec<EventGridHostPattern>,
    /// Hosts of private networks, as `egress.policy = "private"` permits.
    pub private: bool,
    /// `outbound__eventgrid__allowInvalidHostnames`: every host.
    pub any: bool,
    pub http: PlainHttp,
}

/// Which hosts may be addressed over plain http.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlainHttp {
    /// `outbound__eventgrid__httpsOnly` is true, or the egress policy forbids http.
    #[default]
    Never,
    /// Hosts that are listed or private.
    OwnHosts,
    /// `outbound__eventgrid__httpsOnly` is false.
    AnyHost,
}

impl EventGridHosts {
    pub(super) fn check_scheme(&self, url: &UrlParts<'_>) -> Result<(), &'static str> {
        let allowed = url.https
            || match self.http {
                PlainHttp::Never => false,
                PlainHttp::OwnHosts => self.is_own(url),
                PlainHttp::AnyHost => true,
            };
        allowed.then_some(()).ok_or("must be an https URL")
    }

    pub(super) fn check_host(&self, url: &UrlParts<'_>) -> Result<(), &'static str> {
        let host = plain_name(url.host);
        let azure = AZURE_DOMAINS.iter().any(|domain| is_below(&host, domain));
        (azure || self.any || self.is_own(url)).then_some(()).ok_or(
            "must have a host that ends in eventgrid.azure.net, eventgrid.azure.us or eventgrid.azure.cn, or one \
             that the server's configuration lists in edge.event_grid_hosts",
        )
    }

    fn is_own(&self, url: &UrlParts<'_>) -> bool {
        self.listed.iter().any(|pattern| pattern.matches(url)) || (self.private && is_private(url.host))
    }
}

/// An entry of `edge.event_grid_hosts`: a name or an address, or every name below a domain; with
/// one port or all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventGridHostPattern {
    host: String,
    below: bool,
    port: Option<u16>,
}

impl EventGridHostPattern {
    /// Parses `grid.example`, `*.dc.example:4438`, `10.0.0.7` or `[fd00::7]:4438`. The error is a
    /// reason.
    pub fn parse(text: &str) -> Result<EventGridHostPattern, &'static str> {
        const FORM: &str = "must be a host such as \"grid.example\", \"*.dc.example\" or \"10.0.0.7\", with a port \
                            (\"grid.example:4438\") or without one for all ports";
        let (below, rest) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if rest.contains(['/', '?', '@']) {
            return Err(FORM);
        }
        // Parsed as a URL; a port that is the scheme's default must still be distinguished from no
        // port.
        let given = format!("http://{rest}");
        let url = UrlParts::parse(&given).map_err(|_| FORM)?;
        let port = match rest.rsplit_once(':') {
            Some((_, last)) if !last.contains(']') => Some(url.port),
            _ => None,
        };
        if below && url.host.parse::<IpAddr>().is_ok() {
            return Err(FORM);
        }
        Ok(EventGridHostPattern {
            host: plain_name(url.host),
            below,
            port,
        })
    }

    fn matches(&self, url: &UrlParts<'_>) -> bool {
        let host = plain_name(url.host);
        let named = match self.below {
            true => is_below(&host, &self.host),
            false => host == self.host || is_same_address(&host, &self.host),
        };
        named && self.port.is_none_or(|port| port == url.port)
    }
}

fn plain_name(host: &str) -> String {
    host.trim_end_matches('.').to_ascii_lowercase()
}

fn is_below(host: &str, domain: &str) -> bool {
    host.strip_suffix(domain)
        .is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

/// An IPv6 address can be written in several ways.
fn is_same_address(one: &str, other: &str) -> bool {
    matches!((one.parse::<IpAddr>(), other.parse::<IpAddr>()), (Ok(one), Ok(other)) if one == other)
}

/// Whether a host is on this machine or a private network, judged by its name. The egress policy
/// judges the address it resolves to when it is dialled.
fn is_private(host: &str) -> bool {
    if let Ok(address) = host.parse::<IpAddr>() {
        return match address.to_canonical() {
            IpAddr::V4(v4) => {
                let shared = v4.octets()[0] == 100 && v4.octets()[1] & 0xc0 == 64;
                v4.is_loopback() || v4.is_private() || shared
            }
            IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local(),
        };
    }
    let host = plain_name(host);
    // A name without a dot is resolved in the server's own network: another container, a NAS.
    !host.contains('.') || PRIVATE_DOMAINS.iter().any(|domain| is_below(&host, domain))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(listed: &[&str], private: bool, http: PlainHttp) -> EventGridHosts {
        let parse = |text: &&str| EventGridHostPattern::parse(text).expect("a pattern");
        EventGridHosts {
            listed: listed.iter().map(parse).collect(),
            private,
            any: false,
            http,
        }
    }

    fn is_allowed(hosts: &EventGridHosts, url: &str) -> bool {
        let url = UrlParts::parse(url).expect("a URL");
        hosts
            .check_scheme(&url)
            .and_then(|()| hosts.check_host(&url))
            .is_ok()
    }

    #[test]
    fn azure_is_always_allowed_and_only_over_https() {
        for hosts in [
            EventGridHosts::default(),
            hosts(&["grid.example"], true, PlainHttp::OwnHosts),
        ] {
            assert!(is_allowed(&hosts, "https://t.westus2-1.eventgrid.azure.net./"));
            assert!(is_allowed(&hosts, "https://T.EventGrid.Azure.CN/"));
            for url in [
                "http://t.westus2-1.eventgrid.azure.net/",
                "https://eventgrid.azure.net.example.com/",
                "https://noteventgrid.azure.net/",
                "https://eventgrid.azure.net/",
                "https://example.com/",
            ] {
                assert!(!is_allowed(&hosts, url), "{url}");
            }
        }
    }

    #[test]
    fn a_listed_host_is_a_name_a_domain_or_an_address_with_or_without_a_port() {
        let check = |pattern: &str, url: &str, expected: bool| {
            let hosts = hosts(&[pattern], false, PlainHttp::OwnHosts);
            assert_eq!(is_allowed(&hosts, url), expected, "{pattern} {url}");
        };
        check("grid.example", "https://grid.example/", true);
        check("grid.example", "https://GRID.example.:4438/", true);
        check("Grid.Example.", "http://grid.example:5888/", true);
        check("grid.example", "https://a.grid.example/", false);
        check("grid.example:443", "https://grid.example/", true);
        check("grid.example:80", "https://grid.example/", false);
        check("grid.example:80", "http://grid.example/", true);
        check("*.dc.example:4438", "https://a.dc.example:4438/", true);
        check("*.dc.example:4438", "https://a.b.dc.example:4438/", true);
        check("*.dc.example:4438", "https://a.dc.example/", false);
        check("*.dc.example", "https://dc.example/", false);
        check("*.dc.example", "https://xdc.example/", false);
        check("192.0.2.7", "https://192.0.2.7:4438/", true);
        check("[2001:db8::7]:4438", "https://[2001:db8:0::7]:4438/", true);
        check("[2001:db8::7]:4438", "https://[2001:db8::7]/", false);
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for text in [
            "",
            "*",
            "*.",
            "*.10.0.0.7",
            "a b",
            "https://grid.example",
            "grid.example/",
            "grid.example:0",
            "grid.example:http",
            "u@grid.example",
            "a.*.example",
            "10.0.0.0/8",
            "2001:db8::7",
        ] {
            assert!(EventGridHostPattern::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn hosts_of_private_networks_need_no_list_where_the_egress_policy_permits_them() {
        let private = hosts(&[], true, PlainHttp::OwnHosts);
        for host in [
            "127.0.0.1:5888",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.7.7",
            "100.64.0.1",
            "[::1]:5888",
            "[fd00::7]",
            "[::ffff:10.0.0.1]",
            "localhost",
            "a.localhost",
            "postrider",
            "dc.local",
            "grid.svc.internal",
            "nas.home.arpa",
        ] {
            for scheme in ["http", "https"] {
                let url = format!("{scheme}://{host}/");
                assert!(is_allowed(&private, &url), "{url}");
                assert!(!is_allowed(&EventGridHosts::default(), &url), "{url}");
            }
        }
        for host in [
            "8.8.8.8",
            "172.32.0.1",
            "100.128.0.1",
            "[2001:db8::7]",
            "grid.example",
            "local.example",
        ] {
            assert!(!is_allowed(&private, &format!("https://{host}/")), "{host}");
        }
    }

    #[test]
    fn plain_http_is_a_setting_of_its_own() {
        let check = |http: PlainHttp, url: &str, expected: bool| {
            assert_eq!(
                is_allowed(&hosts(&["grid.example"], true, http), url),
                expected,
                "{http:?} {url}"
            );
        };
        check(PlainHttp::Never, "http://grid.example/", false);
        check(PlainHttp::Never, "http://10.0.0.1/", false);
        check(PlainHttp::Never, "https://10.0.0.1/", true);
        check(PlainHttp::AnyHost, "http://t.eventgrid.azure.net/", true);
        check(PlainHttp::AnyHost, "http://example.com/", false);
    }
}
