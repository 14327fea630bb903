//! Which addresses a delivery may be sent to.
//!
//! Pure: an address goes in, a verdict comes out. The dialler asks about the very address it is about
//! to dial, so a name that resolves to something else the second time gains nothing.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The schemes a destination may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    Http,
    Https,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        })
    }
}

/// Where deliveries may go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EgressPolicy {
    /// Public addresses, over https only.
    Internet,
    /// Also private networks and loopback, and http. Never link-local addresses, cloud metadata
    /// services, multicast, broadcast or "this network".
    #[default]
    Private,
    /// Exactly the listed networks, over either scheme. `deny` wins; what is not allowed is refused.
    Custom { allow: Vec<IpNet>, deny: Vec<IpNet> },
}

/// Why the egress policy refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the egress policy forbids {scheme}: only https is allowed")]
    Scheme { scheme: Scheme },
    #[error("the egress policy forbids {address} ({why})")]
    Address { address: IpAddr, why: &'static str },
}

impl EgressPolicy {
    /// Judges one address about to be dialled, and the scheme spoken to it.
    ///
    /// An IPv6 address that stands for an IPv4 one (mapped, NAT64, 6to4 and the like) is judged by
    /// that one: it is where the packets end up.
    pub fn check(&self, scheme: Scheme, address: IpAddr) -> Result<(), Refusal> {
        self.check_scheme(scheme)?;
        let judged = embedded_ipv4(address).map_or(address, IpAddr::V4);
        match self.objection(address, judged) {
            Some(why) => Err(Refusal::Address { address, why }),
            None => Ok(()),
        }
    }

    /// Judges the scheme alone, before there is an address.
    pub fn check_scheme(&self, scheme: Scheme) -> Result<(), Refusal> {
        match (self, scheme) {
            (EgressPolicy::Internet, Scheme::Http) => Err(Refusal::Scheme { scheme }),
            _ => Ok(()),
        }
    }

    fn objection(&self, address: IpAddr, judged: IpAddr) -> Option<&'static str> {
        match self {
            EgressPolicy::Internet => find(NEVER, judged).or_else(|| not_public(judged)),
            EgressPolicy::Private => find(NEVER, judged),
            EgressPolicy::Custom { allow, deny } => {
                let listed = |nets: &[IpNet], ip: IpAddr| nets.iter().any(|net| net.contains(&ip));
                if listed(deny, address) || listed(deny, judged) {
                    Some("denied by configuration")
                } else if listed(allow, judged) {
                    None
                } else {
                    Some("not allowed by configuration")
                }
            }
        }
    }
}

type Range = (IpNet, &'static str);

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8, why: &'static str) -> Range {
    (
        IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)),
        why,
    )
}

const fn v6(s: [u16; 8], prefix: u8, why: &'static str) -> Range {
    let ip = Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    (IpNet::V6(Ipv6Net::new_assert(ip, prefix)), why)
}

/// What no built-in policy dials. Metadata services hand out credentials to whoever asks.
const NEVER: &[Range] = &[
    v4(0, 0, 0, 0, 8, "this network"),
    v4(169, 254, 0, 0, 16, "link-local"),
    v4(100, 100, 100, 200, 32, "cloud metadata"),
    v4(168, 63, 129, 16, 32, "cloud metadata"),
    v4(192, 0, 0, 192, 32, "cloud metadata"),
    v4(224, 0, 0, 0, 4, "multicast"),
    v4(255, 255, 255, 255, 32, "broadcast"),
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128, "unspecified"),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, "link-local"),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8, "multicast"),
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128, "cloud metadata"),
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128, "cloud metadata"),
    // Where the IPv4 address sits in it is the network's own affair, so it cannot be judged.
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48, "local NAT64"),
];

/// What, besides `NEVER`, is not the public internet.
const NOT_PUBLIC: &[Range] = &[
    v4(10, 0, 0, 0, 8, "private"),
    v4(100, 64, 0, 0, 10, "shared by a carrier"),
    v4(127, 0, 0, 0, 8, "loopback"),
    v4(172, 16, 0, 0, 12, "private"),
    v4(192, 0, 0, 0, 24, "reserved"),
    v4(192, 0, 2, 0, 24, "documentation"),
    v4(192, 88, 99, 0, 24, "reserved"),
    v4(192, 168, 0, 0, 16, "private"),
    v4(198, 18, 0, 0, 15, "benchmarking"),
    v4(198, 51, 100, 0, 24, "documentation"),
    v4(203, 0, 113, 0, 24, "documentation"),
    v4(240, 0, 0, 0, 4, "reserved"),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128, "loopback"),
    v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7, "private"),
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23, "reserved"),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32, "documentation"),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20, "documentation"),
];

/// The part of IPv6 that is handed out to the public.
const PUBLIC_V6: Range = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3, "public");

fn find(ranges: &[Range], ip: IpAddr) -> Option<&'static str> {
    ranges
        .iter()
        .find(|(net, _)| net.contains(&ip))
        .map(|(_, why)| *why)
}

fn not_public(ip: IpAddr) -> Option<&'static str> {
    find(NOT_PUBLIC, ip)
        .or_else(|| (ip.is_ipv6() && !PUBLIC_V6.0.contains(&ip)).then_some("not a public address"))
}

/// The IPv4 address that an IPv6 address stands for, if it stands for one.
fn embedded_ipv4(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(ip) = address else { return None };
    let quad = |high: u16, low: u16| Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)));
    match ip.segments() {
        // The unspecified and the loopback address look IPv4-compatible but are themselves.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        // IPv4-mapped.
        [0, 0, 0, 0, 0, 0xffff, high, low] => quad(high, low),
        // IPv4-translated.
        [0, 0, 0, 0, 0xffff, 0, high, low] => quad(high, low),
        // IPv4-compatible.
        [0, 0, 0, 0, 0, 0, high, low] => quad(high, low),
        // NAT64.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => quad(high, low),
        // 6to4.
        [0x2002, high, low, ..] => quad(high, low),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(policy: &EgressPolicy, scheme: Scheme, ip: &str) -> Result<(), String> {
        policy
            .check(scheme, ip.parse().unwrap())
            .map_err(|refusal| refusal.to_string())
    }

    /// Whether `Internet` and `Private` allow the address over https.
    fn check(ip: &str, internet: bool, private: bool) {
        let allows = |policy| verdict(&policy, Scheme::Https, ip).is_ok();
        assert_eq!(allows(EgressPolicy::Internet), internet, "internet {ip}");
        assert_eq!(allows(EgressPolicy::Private), private, "private {ip}");
    }

    #[test]
    fn built_in_policies_judge_addresses() {
        for public in [
            "8.8.8.8",
            "1.1.1.1",
            "100.128.0.1",
            "172.32.0.1",
            "168.63.129.15",
            "223.255.255.255",
            "2606:4700:4700::1111",
            "2a00:1450:4001:80b::200e",
        ] {
            check(public, true, true);
        }
        for private in [
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "198.18.0.1",
            "240.0.0.1",
            "::1",
            "fc00::1",
            "fd12:3456::1",
            "fec0::1",
            "2001:db8::1",
        ] {
            check(private, false, true);
        }
        for never in [
            "0.0.0.0",
            "0.1.2.3",
            "169.254.0.1",
            "169.254.169.254",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "224.0.0.1",
            "239.255.255.255",
            "255.255.255.255",
            "::",
            "fe80::1",
            "febf::1",
            "ff02::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "64:ff9b:1::1",
        ] {
            check(never, false, false);
        }
    }

    #[test]
    fn an_address_that_stands_for_an_ipv4_one_is_judged_by_it() {
        for (metadata, private, public) in [
            ("::ffff:169.254.169.254", "::ffff:10.0.0.1", "::ffff:8.8.8.8"),
            (
                "::ffff:0:169.254.169.254",
                "::ffff:0:10.0.0.1",
                "::ffff:0:8.8.8.8",
            ),
            ("::169.254.169.254", "::10.0.0.1", "::8.8.8.8"),
            (
                "64:ff9b::169.254.169.254",
                "64:ff9b::10.0.0.1",
                "64:ff9b::8.8.8.8",
            ),
            ("2002:a9fe:a9fe::1", "2002:0a00:0001::1", "2002:0808:0808::1"),
        ] {
            check(metadata, false, false);
            check(private, false, true);
            check(public, true, true);
        }
    }

    #[test]
    fn only_the_internet_policy_insists_on_https() {
        assert_eq!(
            verdict(&EgressPolicy::Internet, Scheme::Http, "8.8.8.8"),
            Err("the egress policy forbids http: only https is allowed".into())
        );
        assert_eq!(verdict(&EgressPolicy::Private, Scheme::Http, "8.8.8.8"), Ok(()));
    }

    #[test]
    fn custom_allows_what_is_listed_and_deny_wins() {
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect();
        let policy = EgressPolicy::Custom {
            allow: nets(&["10.0.0.0/8", "fd00::/8"]),
            deny: nets(&["10.1.0.0/16", "64:ff9b::/96"]),
        };
        let check = |ip: &str, expected: Result<(), &str>| {
            let expected = expected.map_err(|why| format!("the egress policy forbids {ip} ({why})"));
            assert_eq!(verdict(&policy, Scheme::Http, ip), expected);
        };
        check("10.0.0.1", Ok(()));
        check("fd00::1", Ok(()));
        check("::ffff:10.0.0.1", Ok(()));
        check("10.1.0.1", Err("denied by configuration"));
        check("::ffff:10.1.0.1", Err("denied by configuration"));
        check("64:ff9b::a00:1", Err("denied by configuration"));
        check("8.8.8.8", Err("not allowed by configuration"));
        check("::1", Err("not allowed by configuration"));
    }

    #[test]
    fn refusals_say_what_and_why() {
        assert_eq!(
            verdict(&EgressPolicy::Private, Scheme::Http, "169.254.169.254"),
            Err("the egress policy forbids 169.254.169.254 (link-local)".into())
        );
    }
}
