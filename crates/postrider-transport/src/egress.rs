//! The egress policy: addresses that outgoing requests may be sent to.
//!
//! Pure: an address goes in, a verdict comes out. The dialler checks the very address that it is
//! about to dial, so a name that resolves differently the second time gains nothing.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The schemes a destination may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationScheme {
    Http,
    Https,
}

impl fmt::Display for DestinationScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DestinationScheme::Http => "http",
            DestinationScheme::Https => "https",
        })
    }
}

/// The destinations that deliveries may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EgressPolicy {
    /// Public addresses, over https only.
    Internet,
    /// Also private networks and loopback, and http. Never link-local addresses, cloud metadata
    /// services, multicast, broadcast or "this network".
    #[default]
    Private,
    /// Exactly the listed networks, over either scheme. `deny` wins; everything that is not allowed
    /// is refused. A metadata service must be allowed by its exact address, not by a network around
    /// it.
    Custom { allow: Vec<IpNet>, deny: Vec<IpNet> },
}

/// Why the egress policy refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EgressRefusal {
    #[error("egress.policy forbids {scheme}: only https is allowed")]
    Scheme { scheme: DestinationScheme },
    #[error("egress.policy forbids {address} ({why})")]
    Address { address: IpAddr, why: &'static str },
    #[error("egress.policy forbids {host} (name of a cloud metadata service)")]
    Name { host: String },
    #[error("egress.policy \"custom\" judges addresses, and {host} cannot be resolved here")]
    Unresolved { host: String },
}

impl EgressPolicy {
    /// Checks one address about to be dialled, and the scheme to be used with it.
    ///
    /// An IPv6 address that embeds an IPv4 one (mapped, NAT64, Teredo and the like) is checked by
    /// that one, too: packets end up there.
    pub fn check(&self, scheme: DestinationScheme, address: IpAddr) -> Result<(), EgressRefusal> {
        self.check_scheme(scheme)?;
        match self.objection(address) {
            Some(why) => Err(EgressRefusal::Address { address, why }),
            None => Ok(()),
        }
    }

    /// Checks a name that a proxy will resolve, out of reach of this policy.
    pub fn check_name(&self, host: &str) -> Result<(), EgressRefusal> {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        match self {
            EgressPolicy::Custom { .. } => Err(EgressRefusal::Unresolved { host }),
            _ if METADATA_NAMES.contains(&host.as_str()) => Err(EgressRefusal::Name { host }),
            _ => Ok(()),
        }
    }

    /// Checks the scheme alone, before there is an address.
    pub fn check_scheme(&self, scheme: DestinationScheme) -> Result<(), EgressRefusal> {
        match (self, scheme) {
            (EgressPolicy::Internet, DestinationScheme::Http) => Err(EgressRefusal::Scheme { scheme }),
            _ => Ok(()),
        }
    }

    fn objection(&self, address: IpAddr) -> Option<&'static str> {
        let destinations = destinations(address);
        let any = |object: &dyn Fn(IpAddr) -> Option<&'static str>| {
            destinations.iter().find_map(|destination| object(*destination))
        };
        match self {
            EgressPolicy::Internet => any(&|ip| built_in_objection(ip).or_else(|| not_public(ip))),
            EgressPolicy::Private => any(&built_in_objection),
            EgressPolicy::Custom { allow, deny } => {
                let listed = |nets: &[IpNet], ip: IpAddr| nets.iter().any(|net| net.contains(&ip));
                let exactly = |ip: IpAddr| allow.iter().any(|net| *net == IpNet::from(ip));
                let metadata = |ip| {
                    let named = exactly(ip) || exactly(address);
                    metadata_service(ip).filter(|_| !named)
                };
                if listed(deny, address) || destinations.iter().any(|ip| listed(deny, *ip)) {
                    Some("denied by egress.deny")
                } else if any(&metadata).is_some() {
                    Some("a cloud metadata service, which egress.allow must list by its very address")
                } else if listed(allow, destinations[0]) {
                    None
                } else {
                    Some("not allowed by egress.allow")
                }
            }
        }
    }
}

/// Metadata services give credentials to every process that asks. A row is the address or network,
/// its cloud, and where that is documented.
///
/// Addresses inside `169.254.0.0/16` and `fe80::/10` are forbidden as link-local anyway; they are
/// listed because `custom` may allow those networks.
const METADATA_SERVICES: &[(IpNet, &str, &str)] = &[
    metadata_v4(
        [169, 254, 169, 254],
        "most clouds: EC2, Azure, GCP, OCI, OpenStack, DigitalOcean, Hetzner and more",
        "docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html",
    ),
    metadata_v4(
        [169, 254, 169, 253],
        "EC2: resolver",
        "docs.aws.amazon.com/vpc/latest/userguide/AmazonDNS-concepts.html",
    ),
    metadata_v4(
        [169, 254, 170, 2],
        "ECS: task credentials",
        "docs.aws.amazon.com/AmazonECS/latest/developerguide/task-iam-roles.html",
    ),
    metadata_v4(
        [169, 254, 170, 23],
        "EKS: Pod Identity",
        "docs.aws.amazon.com/eks/latest/userguide/pod-id-agent-setup.html",
    ),
    metadata_v4(
        [169, 254, 42, 42],
        "Scaleway",
        "github.com/canonical/cloud-init: sources/DataSourceScaleway.py",
    ),
    metadata_v4(
        [169, 254, 0, 23],
        "Tencent Cloud: metadata.tencentyun.com",
        "www.tencentcloud.com/document/product/213/4934",
    ),
    metadata_v4(
        [168, 63, 129, 16],
        "Azure: WireServer",
        "learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16",
    ),
    metadata_v4(
        [100, 100, 100, 200],
        "Alibaba Cloud",
        "www.alibabacloud.com/help/en/ecs/user-guide/view-instance-metadata",
    ),
    metadata_v4(
        [100, 96, 0, 96],
        "Volcano Engine",
        "github.com/volcengine/cello: pkg/provider/credential",
    ),
    metadata_v4(
        [192, 0, 0, 192],
        "Oracle Cloud Infrastructure Classic",
        "docs.oracle.com/en/cloud/iaas/compute-iaas-cloud/stcsg/retrieving-instance-metadata.html",
    ),
    // EC2's whole service network: 254 metadata, 23 Pod Identity, 253 resolver, 123 time.
    metadata_v6(
        [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0],
        32,
        "EC2 and EKS",
        "docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html",
    ),
    metadata_v6(
        [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254],
        128,
        "Google Cloud",
        "cloud.google.com/compute/docs/metadata/querying-metadata",
    ),
    metadata_v6(
        [0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe],
        128,
        "Oracle Cloud Infrastructure",
        "docs.oracle.com/en-us/iaas/Content/Compute/Tasks/gettingmetadata.htm",
    ),
    metadata_v6(
        [0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42],
        128,
        "Scaleway",
        "github.com/canonical/cloud-init: sources/DataSourceScaleway.py",
    ),
    metadata_v6(
        [0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 1],
        128,
        "Akamai (Linode)",
        "docs.cloud-init.io: datasources/akamai",
    ),
    metadata_v6(
        [0xfd00, 0x100, 0, 0, 0, 0, 0x100, 0x200],
        128,
        "Alibaba Cloud",
        "www.alibabacloud.com/help/en/ecs/user-guide/view-instance-metadata",
    ),
    metadata_v6(
        [0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe],
        128,
        "OpenStack",
        "docs.openstack.org/nova/latest/user/metadata.html",
    ),
];

/// Names of metadata services. Only names that a proxy resolves are checked against these:
/// otherwise the address is checked.
const METADATA_NAMES: &[&str] = &[
    "metadata",
    "metadata.google.internal",
    "metadata.goog",
    "metadata.azure.internal",
    "metadata.tencentyun.com",
    "metadata.platformequinix.com",
    "metadata.packet.net",
    "api.metadata.cloud.ibm.com",
    "instance-data",
    "instance-data.ec2.internal",
];

const fn metadata_v4(
    ip: [u8; 4],
    cloud: &'static str,
    source: &'static str,
) -> (IpNet, &'static str, &'static str) {
    let ip = Ipv4Addr::new(ip[0], ip[1], ip[2], ip[3]);
    (IpNet::V4(Ipv4Net::new_assert(ip, 32)), cloud, source)
}

const fn metadata_v6(
    s: [u16; 8],
    prefix: u8,
    cloud: &'static str,
    source: &'static str,
) -> (IpNet, &'static str, &'static str) {
    let ip = Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    (IpNet::V6(Ipv6Net::new_assert(ip, prefix)), cloud, source)
}

fn metadata_service(ip: IpAddr) -> Option<&'static str> {
    let found = METADATA_SERVICES.iter().any(|(net, ..)| net.contains(&ip));
    found.then_some("cloud metadata")
}

/// The objection of both built-in policies to an address.
pub(crate) fn built_in_objection(ip: IpAddr) -> Option<&'static str> {
    metadata_service(ip).or_else(|| find(NEVER, ip))
}

type NamedNetwork = (IpNet, &'static str);

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8, why: &'static str) -> NamedNetwork {
    (
        IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)),
        why,
    )
}

const fn v6(s: [u16; 8], prefix: u8, why: &'static str) -> NamedNetwork {
    let ip = Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    (IpNet::V6(Ipv6Net::new_assert(ip, prefix)), why)
}

/// Networks, besides `METADATA_SERVICES`, that no built-in policy dials.
const NEVER: &[NamedNetwork] = &[
    v4(0, 0, 0, 0, 8, "this network"),
    v4(169, 254, 0, 0, 16, "link-local"),
    v4(224, 0, 0, 0, 4, "multicast"),
    v4(255, 255, 255, 255, 32, "broadcast"),
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128, "unspecified"),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, "link-local"),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8, "multicast"),
    // The position of the IPv4 address inside is the network's own choice, so it cannot be checked.
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48, "local NAT64"),
];

/// Networks, besides `NEVER`, that are not the public internet.
const NOT_PUBLIC: &[NamedNetwork] = &[
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

/// The part of IPv6 that is assigned to the public.
const PUBLIC_V6: NamedNetwork = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3, "public");

fn find(ranges: &[NamedNetwork], ip: IpAddr) -> Option<&'static str> {
    ranges
        .iter()
        .find(|(net, _)| net.contains(&ip))
        .map(|(_, why)| *why)
}

fn not_public(ip: IpAddr) -> Option<&'static str> {
    find(NOT_PUBLIC, ip)
        .or_else(|| (ip.is_ipv6() && !PUBLIC_V6.0.contains(&ip)).then_some("not a public address"))
}

/// The addresses where packets to an address may end up: never empty. The first decides whether
/// `custom` allows it; an objection to any of them counts.
fn destinations(address: IpAddr) -> Vec<IpAddr> {
    let IpAddr::V6(ip) = address else {
        return vec![address];
    };
    let quad = |high: u16, low: u16| IpAddr::V4(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)));
    match ip.segments() {
        // The unspecified and the loopback address look IPv4-compatible but are not.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => vec![address],
        // IPv4-mapped.
        [0, 0, 0, 0, 0, 0xffff, high, low] => vec![quad(high, low)],
        // IPv4-translated.
        [0, 0, 0, 0, 0xffff, 0, high, low] => vec![quad(high, low)],
        // IPv4-compatible.
        [0, 0, 0, 0, 0, 0, high, low] => vec![quad(high, low)],
        // NAT64.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => vec![quad(high, low)],
        // Local NAT64: the position of the IPv4 address is the network's own choice, usually at the
        // end.
        [0x64, 0xff9b, 1, .., high, low] => vec![address, quad(high, low)],
        // 6to4.
        [0x2002, high, low, ..] => vec![quad(high, low)],
        // Teredo: the server, and the client with all bits inverted.
        [0x2001, 0, high, low, _, _, client_high, client_low] => {
            vec![address, quad(high, low), quad(!client_high, !client_low)]
        }
        // ISATAP, below any prefix.
        [.., 0 | 0x200, 0x5efe, high, low] => vec![address, quad(high, low)],
        _ => vec![address],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(policy: &EgressPolicy, scheme: DestinationScheme, ip: &str) -> Result<(), String> {
        policy
            .check(scheme, ip.parse().unwrap())
            .map_err(|refusal| refusal.to_string())
    }

    /// Whether `Internet` and `Private` allow the address over https.
    fn check(ip: &str, internet: bool, private: bool) {
        let allows = |policy| verdict(&policy, DestinationScheme::Https, ip).is_ok();
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
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fd00:a9fe:a9fe::1",
            "fd00:100::100:200",
            "100.96.0.96",
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
            (
                "2a00::5efe:169.254.169.254",
                "2a00::5efe:10.0.0.1",
                "2a00::200:5efe:8.8.8.8",
            ),
        ] {
            check(metadata, false, false);
            check(private, false, true);
            check(public, true, true);
        }
    }

    #[test]
    fn both_ends_of_a_teredo_tunnel_and_the_prefix_of_isatap_count() {
        // The client's bits are inverted: 169.254.169.254 is 5601:5601.
        check("2001:0:808:808:0:0:5601:5601", false, false);
        check("2001:0:a9fe:a9fe:0:0:f7f7:f7f7", false, false);
        check("2001:0:808:808:0:0:f5ff:fffe", false, true);
        check("fc00::5efe:8.8.8.8", false, true);
        check("64:ff9b:1::a9fe:a9fe", false, false);
    }

    #[test]
    fn custom_dials_a_metadata_service_only_by_its_very_address() {
        let everywhere = ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap());
        let allows = |named: &[&str], ip: &str| {
            let named = named.iter().map(|ip| IpNet::from(ip.parse::<IpAddr>().unwrap()));
            let policy = EgressPolicy::Custom {
                allow: everywhere.into_iter().chain(named).collect(),
                deny: Vec::new(),
            };
            verdict(&policy, DestinationScheme::Http, ip).is_ok()
        };
        for (net, ..) in METADATA_SERVICES {
            let ip = net.addr().to_string();
            assert!(!allows(&[], &ip), "{ip}");
            assert!(allows(&[&ip], &ip), "{ip}");
        }
        assert!(!allows(&[], "::ffff:169.254.169.254"));
        assert!(allows(&["169.254.169.254"], "::ffff:169.254.169.254"));
        assert!(!allows(&["169.254.169.254"], "fd00:ec2::254"));
        assert!(!allows(&[], "64:ff9b:1::a9fe:a9fe"));
        assert!(allows(&[], "169.254.1.1"));
    }

    #[test]
    fn a_proxy_is_not_asked_for_a_metadata_service_by_name() {
        let policy = EgressPolicy::Private;
        assert!(policy.check_name("Metadata.Google.Internal.").is_err());
        assert!(policy.check_name("example.com").is_ok());
    }

    #[test]
    fn only_the_internet_policy_insists_on_https() {
        assert_eq!(
            verdict(&EgressPolicy::Internet, DestinationScheme::Http, "8.8.8.8"),
            Err("egress.policy forbids http: only https is allowed".into())
        );
        assert_eq!(
            verdict(&EgressPolicy::Private, DestinationScheme::Http, "8.8.8.8"),
            Ok(())
        );
    }

    #[test]
    fn custom_allows_what_is_listed_and_deny_wins() {
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect();
        let policy = EgressPolicy::Custom {
            allow: nets(&["10.0.0.0/8", "fd00::/8"]),
            deny: nets(&["10.1.0.0/16", "64:ff9b::/96"]),
        };
        let check = |ip: &str, expected: Result<(), &str>| {
            let expected = expected.map_err(|why| format!("egress.policy forbids {ip} ({why})"));
            assert_eq!(verdict(&policy, DestinationScheme::Http, ip), expected);
        };
        check("10.0.0.1", Ok(()));
        check("fd00::1", Ok(()));
        check("::ffff:10.0.0.1", Ok(()));
        check("10.1.0.1", Err("denied by egress.deny"));
        check("::ffff:10.1.0.1", Err("denied by egress.deny"));
        check("64:ff9b::a00:1", Err("denied by egress.deny"));
        check("8.8.8.8", Err("not allowed by egress.allow"));
        check("::1", Err("not allowed by egress.allow"));
    }

    #[test]
    fn refusals_say_what_and_why() {
        assert_eq!(
            verdict(&EgressPolicy::Private, DestinationScheme::Http, "169.254.169.254"),
            Err("egress.policy forbids 169.254.169.254 (cloud metadata)".into())
        );
    }
}
