//! Rules for single values: names, URLs, headers, resource ids, connection strings.
//!
//! Each function returns the reason for a refusal, worded to follow the path of the field.

use super::FieldError;
pub use postrider_core::connection::part as connection_part;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Checks the name of a topic or subscription at the edge or in the configuration.
pub fn check_name(name: &str) -> Result<(), FieldError> {
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = (1..=128).contains(&name.len())
        && name.chars().all(letters)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric());
    let reason = "must have 1 to 128 letters, digits, '.', '_' or '-' and begin with a letter or digit";
    good.then_some(())
        .ok_or_else(|| FieldError::new("name", format!("{reason}, was {name:?}")))
}

/// Checks the name of a custom topic or domain in Azure.
pub fn check_azure_topic_name(name: &str) -> Result<(), FieldError> {
    check_azure_name(name, 50)?;
    for reserved in ["Microsoft", "EventGrid", "System"] {
        let start = name.get(..reserved.len()).unwrap_or_default();
        if start.eq_ignore_ascii_case(reserved) {
            let reason = format!("must not begin with {reserved}, was {name:?}");
            return Err(FieldError::new("name", reason));
        }
    }
    Ok(())
}

/// Checks the name of an event subscription in Azure.
pub fn check_azure_subscription_name(name: &str) -> Result<(), FieldError> {
    check_azure_name(name, 64)
}

fn check_azure_name(name: &str, most: usize) -> Result<(), FieldError> {
    let letters = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if (3..=most).contains(&name.len()) && name.chars().all(letters) {
        return Ok(());
    }
    let reason = format!("must have 3 to {most} letters, digits or '-', was {name:?}");
    Err(FieldError::new("name", reason))
}

/// The parts of an absolute http or https URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrlParts<'a> {
    pub https: bool,
    /// As written; an IPv6 address without brackets.
    pub host: &'a str,
    pub port: u16,
    /// With its leading slash; empty if the URL ends with the host.
    pub path: &'a str,
    pub query: Option<&'a str>,
}

/// Limit of the length of a URL.
const URL_BYTES_MAX: usize = 4096;

impl<'a> UrlParts<'a> {
    pub fn parse(text: &'a str) -> Result<UrlParts<'a>, &'static str> {
        if text.len() > URL_BYTES_MAX {
            return Err("must not be longer than 4096 bytes");
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err("must be an absolute http or https URL");
        };
        let https = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return Err("must be an absolute http or https URL"),
        };
        let refused = |b: u8| !b.is_ascii_graphic() || b"\"<>\\^`{|}".contains(&b);
        if rest.bytes().any(refused) {
            return Err("must be percent-encoded: it has characters that URLs do not have");
        }
        if rest.contains('#') {
            return Err("must not have a fragment");
        }
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err("must not have a user name or password");
        }
        let (host, port) = split_port(authority)?;
        check_host(host)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Ok(UrlParts {
            https,
            host,
            port: port.unwrap_or(if https { 443 } else { 80 }),
            path,
            query,
        })
    }

    /// Whether both URLs have the same scheme, host and port.
    pub fn same_origin(&self, other: &UrlParts<'_>) -> bool {
        let origin = |url: &UrlParts<'_>| (url.https, url.host.to_ascii_lowercase(), url.port);
        origin(self) == origin(other)
    }

    /// Whether the query has this parameter with this value.
    pub fn has_parameter(&self, name: &str, value: &str) -> bool {
        let mut pairs = self.query.unwrap_or_default().split('&');
        pairs.any(|pair| {
            pair.split_once('=')
                .is_some_and(|(n, v)| n.eq_ignore_ascii_case(name) && v == value)
        })
    }
}

fn split_port(authority: &str) -> Result<(&str, Option<u16>), &'static str> {
    // Colons inside the brackets of an IPv6 address do not separate a port.
    let colon = authority.rfind(':').filter(|at| !authority[*at..].contains(']'));
    let Some(colon) = colon else {
        return Ok((authority, None));
    };
    let (host, digits) = (&authority[..colon], &authority[colon + 1..]);
    let port = Some(digits)
        .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|digits| digits.parse().ok())
        .filter(|port| *port != 0);
    match port {
        Some(port) => Ok((host, Some(port))),
        None => Err("must have a port between 1 and 65535, or none"),
    }
}

fn check_host(host: &str) -> Result<(), &'static str> {
    const BAD: &str = "must have a valid host";
    if let Some(inner) = host.strip_prefix('[') {
        let address = inner
            .strip_suffix(']')
            .and_then(|inner| inner.parse::<Ipv6Addr>().ok());
        return address.map(drop).ok_or(BAD);
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    let last = name.rsplit('.').next().unwrap_or_default();
    // Some resolvers accept 2130706433 or 0x7f.1 as addresses. Only the usual form is accepted
    // here.
    if last.starts_with(|c: char| c.is_ascii_digit()) {
        let number =
            last.bytes().all(|b| b.is_ascii_digit()) || last.starts_with("0x") || last.starts_with("0X");
        if number {
            return host.parse::<Ipv4Addr>().map(drop).map_err(|_| BAD);
        }
    }
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    (name.len() <= 253 && name.split('.').all(label))
        .then_some(())
        .ok_or(BAD)
}

/// Checks the name of a delivery attribute: an HTTP header name for every type of destination.
pub fn check_attribute_name(name: &str) -> Result<(), String> {
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || name.len() > 256 || !name.bytes().all(token) {
        return Err(format!(
            "must be an HTTP header name of at most 256 letters, was {name:?}"
        ));
    }
    if name
        .get(..4)
        .is_some_and(|start| start.eq_ignore_ascii_case("aeg-"))
    {
        return Err(format!(
            "must not begin with aeg-, which is reserved, was {name:?}"
        ));
    }
    Ok(())
}

/// Headers of the connection, of the body, and of the delivery's own: not the subscriber's to set.
const HEADERS_RESERVED: [&str; 15] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "postrider-hops",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

pub fn check_header_not_reserved(name: &str) -> Result<(), String> {
    if HEADERS_RESERVED
        .iter()
        .any(|reserved| reserved.eq_ignore_ascii_case(name))
    {
        return Err(format!(
            "must not be a header that the delivery itself sets, was {name:?}"
        ));
    }
    Ok(())
}

/// Limit of the length of a delivery attribute's value.
pub const ATTRIBUTE_BYTES_MAX: usize = 4096;

pub fn check_attribute_value(value: &str) -> Result<(), String> {
    if value.len() > ATTRIBUTE_BYTES_MAX {
        return Err(format!(
            "must not be longer than {ATTRIBUTE_BYTES_MAX} bytes, was {}",
            value.len()
        ));
    }
    if !value
        .bytes()
        .all(|b| b.is_ascii_graphic() || b == b' ' || b == b'\t')
    {
        return Err("must be a header value: visible ASCII, spaces and tabs".into());
    }
    Ok(())
}

/// Parses the id of an Azure resource: the names that follow the `types` of `provider`, and the
/// rest of the id after them.
pub fn resource_names<'a>(
    id: &'a str,
    provider: &str,
    types: &[&str],
) -> Option<(Vec<&'a str>, Vec<&'a str>)> {
    let mut segments = id.strip_prefix('/')?.split('/');
    let mut expect = |word: &str| {
        segments
            .next()
            .filter(|s| s.eq_ignore_ascii_case(word))
            .and_then(|_| segments.next())
    };
    for word in ["subscriptions", "resourceGroups"] {
        expect(word).filter(|name| !name.is_empty())?;
    }
    expect("providers").filter(|name| name.eq_ignore_ascii_case(provider))?;
    let mut names = Vec::new();
    for word in types {
        names.push(expect(word).filter(|name| !name.is_empty())?);
    }
    Some((names, segments.collect()))
}

/// Checks the name of a storage container or queue.
pub fn check_storage_name(name: &str) -> Result<(), String> {
    let letters = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let good = (3..=63).contains(&name.len())
        && name.bytes().all(letters)
        && !name.contains("--")
        && !name.starts_with('-')
        && !name.ends_with('-');
    let reason = "must have 3 to 63 lowercase letters, digits or single hyphens between them";
    good.then_some(())
        .ok_or_else(|| format!("{reason}, was {name:?}"))
}

/// Checks the name of a storage account.
pub fn check_account_name(name: &str) -> Result<(), String> {
    let good =
        (3..=24).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let reason = "must be a storage account: its resource id, or 3 to 24 lowercase letters and digits";
    good.then_some(())
        .ok_or_else(|| format!("{reason}, was {name:?}"))
}

/// Checks an address or a network such as `10.0.0.0/8`.
pub fn check_ip_mask(mask: &str) -> Result<(), String> {
    let (address, bits) = match mask.split_once('/') {
        Some((address, bits)) => (address, Some(bits)),
        None => (mask, None),
    };
    let most = match (address.parse::<Ipv4Addr>(), address.parse::<Ipv6Addr>()) {
        (Ok(_), _) => Some(32u8),
        (_, Ok(_)) => Some(128),
        _ => None,
    };
    let bits_good = |most| bits.is_none_or(|bits| bits.parse::<u8>().is_ok_and(|bits| bits <= most));
    if most.is_some_and(bits_good) {
        return Ok(());
    }
    Err(format!(
        "must be an IP address or network such as 10.0.0.0/8, was {mask:?}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let check = |name: &str, ours: bool, topic: bool, subscription: bool| {
            assert_eq!(check_name(name).is_ok(), ours, "ours {name}");
            assert_eq!(check_azure_topic_name(name).is_ok(), topic, "topic {name}");
            assert_eq!(
                check_azure_subscription_name(name).is_ok(),
                subscription,
                "subscription {name}"
            );
        };
        check("orders", true, true, true);
        check("a-b", true, true, true);
        check("-ab", false, true, true);
        check("ab", true, false, false);
        check("a.b_c-d", true, false, false);
        check(".ab", false, false, false);
        check("", false, false, false);
        check("a/b", false, false, false);
        check("ä", false, false, false);
        check("Microsoft-x", true, false, true);
        check("eventgridtopic", true, false, true);
        check("SYSTEM1", true, false, true);
        check("sys", true, true, true);
        check(&"a".repeat(50), true, true, true);
        check(&"a".repeat(51), true, false, true);
        check(&"a".repeat(65), true, false, false);
        check(&"a".repeat(129), false, false, false);
        assert_eq!(
            check_name("a b").unwrap_err().to_string(),
            "name must have 1 to 128 letters, digits, '.', '_' or '-' and begin with a letter or digit, was \"a b\""
        );
        assert_eq!(
            check_azure_topic_name("SystemX").unwrap_err().to_string(),
            "name must not begin with System, was \"SystemX\""
        );
    }

    #[test]
    fn urls() {
        let check = |text: &str, expected: Result<(bool, &str, u16, &str, Option<&str>), &str>| {
            let got = UrlParts::parse(text).map(|u| (u.https, u.host, u.port, u.path, u.query));
            assert_eq!(got, expected, "{text}");
        };
        check("https://example.com", Ok((true, "example.com", 443, "", None)));
        check(
            "HTTP://example.com:8080/a/b?c=d?e",
            Ok((false, "example.com", 8080, "/a/b", Some("c=d?e"))),
        );
        check("http://[::1]:5000/x", Ok((false, "::1", 5000, "/x", None)));
        check("http://[::1]", Ok((false, "::1", 80, "", None)));
        check("http://127.0.0.1", Ok((false, "127.0.0.1", 80, "", None)));
        check(
            "http://my_service.internal.:1/?q",
            Ok((false, "my_service.internal.", 1, "/", Some("q"))),
        );
        check("http://3com.com", Ok((false, "3com.com", 80, "", None)));
        check("https://a.b/%20", Ok((true, "a.b", 443, "/%20", None)));

        let absolute = Err("must be an absolute http or https URL");
        check("", absolute);
        check("/relative", absolute);
        check("example.com/a", absolute);
        check("ftp://example.com", absolute);
        let encoded = Err("must be percent-encoded: it has characters that URLs do not have");
        check("https://a b", encoded);
        check("https://a/ü", encoded);
        check("https://a/\r\nx: y", encoded);
        check("https://a/{x}", encoded);
        check("https://a\\@b", encoded);
        check("https://a/#f", Err("must not have a fragment"));
        check("https://u:p@a", Err("must not have a user name or password"));
        let port = Err("must have a port between 1 and 65535, or none");
        check("https://a:0", port);
        check("https://a:65536", port);
        check("https://a:", port);
        check("https://a:+1", port);
        let host = Err("must have a valid host");
        check("https://", host);
        check("https:///x", host);
        check("https://:80", host);
        check("https://a..b", host);
        check("https://-a", host);
        check("https://[::1", host);
        check("https://[fe80::1%25eth0]", host);
        check("https://2130706433", host);
        check("https://0x7f.1", host);
        check("https://127.0x1", host);
        check("https://1.2.3", host);
        check("https://1.2.3.256", host);
        check(&format!("https://{}.com", "a".repeat(64)), host);
        check(
            &format!("https://a/{}", "a".repeat(4096)),
            Err("must not be longer than 4096 bytes"),
        );
    }

    #[test]
    fn origins() {
        let check = |a: &str, b: &str, same: bool| {
            assert_eq!(
                UrlParts::parse(a)
                    .unwrap()
                    .same_origin(&UrlParts::parse(b).unwrap()),
                same,
                "{a} {b}"
            );
        };
        check("https://a.b/x", "HTTPS://A.B:443/y?z", true);
        check("https://a.b", "http://a.b", false);
        check("https://a.b", "https://a.b:444", false);
        check("https://a.b", "https://a.c", false);
    }

    #[test]
    fn header_names_and_values() {
        let check = |name: &str, good: bool| {
            let got = check_attribute_name(name).and_then(|()| check_header_not_reserved(name));
            assert_eq!(got.is_ok(), good, "{name}");
        };
        check("X-Custom", true);
        check("authorization", true);
        check("x", true);
        check("", false);
        check("x y", false);
        check("x:y", false);
        check("ü", false);
        check("aeg-x", false);
        check("AEG-SUBSCRIPTION-NAME", false);
        check("Host", false);
        check("Postrider-Hops", false);
        check("Content-Type", false);
        check("transfer-encoding", false);
        check(&"x".repeat(257), false);

        let check =
            |value: &str, good: bool| assert_eq!(check_attribute_value(value).is_ok(), good, "{value:?}");
        check("", true);
        check("a b\tc", true);
        check("a\r\nb", false);
        check("ü", false);
        check("\u{7f}", false);
        check(&"x".repeat(4096), true);
        check(&"x".repeat(4097), false);
    }

    #[test]
    fn resource_ids() {
        let check = |id: &str, expected: Option<(Vec<&str>, Vec<&str>)>| {
            let got = resource_names(id, "Microsoft.EventHub", &["namespaces", "eventhubs"]);
            assert_eq!(got, expected, "{id}");
        };
        let at = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventHub/namespaces/n";
        check(&format!("{at}/eventhubs/e"), Some((vec!["n", "e"], vec![])));
        check(
            &format!("{at}/eventhubs/e/x/y").to_uppercase(),
            Some((vec!["N", "E"], vec!["X", "Y"])),
        );
        check(at, None);
        check(&format!("{at}/eventhubs/"), None);
        check(&format!("{at}/queues/e"), None);
        check("", None);
        check("e", None);
        check(
            "/subscriptions//resourceGroups/g/providers/Microsoft.EventHub/namespaces/n/eventhubs/e",
            None,
        );
    }

    #[test]
    fn parts_of_connection_strings() {
        let text = "Endpoint=sb://n/;SharedAccessKey=ab==;entitypath= e ;Empty=";
        let check = |name: &str, value: Option<&str>| assert_eq!(connection_part(text, name), value);
        check("Endpoint", Some("sb://n/"));
        check("SharedAccessKey", Some("ab=="));
        check("EntityPath", Some("e"));
        check("Empty", None);
        check("None", None);
    }

    #[test]
    fn storage_names_and_networks() {
        let check = |name: &str, container: bool, account: bool| {
            assert_eq!(check_storage_name(name).is_ok(), container, "{name}");
            assert_eq!(check_account_name(name).is_ok(), account, "{name}");
        };
        check("dead-letters", true, false);
        check("devstoreaccount1", true, true);
        check("ab", false, false);
        check("a--b", false, false);
        check("-ab", false, false);
        check("ab-", false, false);
        check("Abc", false, false);
        check(&"a".repeat(25), true, false);
        check(&"a".repeat(64), false, false);

        let check = |mask: &str, good: bool| assert_eq!(check_ip_mask(mask).is_ok(), good, "{mask}");
        check("10.0.0.0/8", true);
        check("1.2.3.4", true);
        check("::1/128", true);
        check("1.2.3.4/33", false);
        check("1.2.3/8", false);
        check("", false);
        check("1.2.3.4/", false);
    }
}
