//! `inboundIpRules`: addresses that may publish events.

use std::net::IpAddr;

/// Whether one of the rules admits this address. Without rules every address is admitted.
pub fn ip_allowed<S: AsRef<str>>(rules: &[S], address: IpAddr) -> bool {
    rules.is_empty() || rules.iter().any(|rule| is_within(rule.as_ref(), address))
}

fn is_within(rule: &str, address: IpAddr) -> bool {
    let (network, bits) = match rule.split_once('/') {
        Some((network, bits)) => (network, bits.parse().ok()),
        None => (rule, Some(128)),
    };
    let (Ok(network), Some(bits)) = (network.parse::<IpAddr>(), bits) else {
        return false;
    };
    // On a listener for both families an IPv4 peer has an IPv4-mapped IPv6 address.
    let (same_family, differing) = match (network, address.to_canonical()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (true, (a.to_bits() ^ b.to_bits()).leading_zeros()),
        (IpAddr::V6(a), IpAddr::V6(b)) => (true, (a.to_bits() ^ b.to_bits()).leading_zeros()),
        _ => (false, 0),
    };
    let most = if network.is_ipv4() { 32 } else { 128 };
    same_family && differing >= u32::min(bits, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_within_networks() {
        let check = |rules: &[&str], address: &str, expected: bool| {
            let address = address.parse().unwrap();
            assert_eq!(ip_allowed(rules, address), expected, "{rules:?} {address}");
        };
        check(&[], "1.2.3.4", true);
        check(&["1.2.3.4"], "1.2.3.4", true);
        check(&["1.2.3.4"], "1.2.3.5", false);
        check(&["9.9.9.9", "1.2.3.0/24"], "1.2.3.5", true);
        check(&["1.2.3.0/24"], "1.2.4.5", false);
        check(&["1.2.3.128/25"], "1.2.3.127", false);
        check(&["0.0.0.0/0"], "8.8.8.8", true);
        check(&["0.0.0.0/0"], "::1", false);
        check(&["127.0.0.0/8"], "::ffff:127.0.0.1", true);
        check(&["::1"], "::1", true);
        check(&["fd00::/8"], "fd12::1", true);
        check(&["fd00::/8"], "fe80::1", false);
    }
}
