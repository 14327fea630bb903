//! Certificate of the https listener: whether clients will accept it, and for how long.

use super::finding::{Finding, quoted};
use crate::config::Config;
use crate::credentials::{
    certificate_path, expires, provider, read_certificates, read_key, serve_with, server_names,
};
use postrider_core::time::Timestamp;
use rustls::RootCertStore;
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use std::path::{Path, PathBuf};
use std::time::Duration;

const ABOUT: &str = "tls";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const ENDS_SOON: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// `running`: a server uses this certificate now. Otherwise the next start may issue another.
pub fn examine(config: &Config, now: Timestamp, running: bool) -> Vec<Finding> {
    if config.listen.https.is_none() {
        return vec![Finding::ok(ABOUT, "the listener for https is off")];
    }
    let path = certificate_path(config);
    let own = config.listen.cert_file.is_some();
    let key_path = match &config.listen.key_file {
        Some(path) if own => path.clone(),
        _ => config.data_dir.join("tls/server-key.pem"),
    };
    if !own && !path.exists() {
        return vec![Finding::ok(
            ABOUT,
            "a certificate will be made by the first start",
        )];
    }
    let chain = match read_certificates(&path) {
        Ok(chain) => chain,
        Err(e) => return vec![unusable(own, format!("{e:#}"))],
    };
    let mut found = Vec::new();
    match read_key(&key_path).and_then(|key| serve_with(chain.clone(), key)) {
        Ok(_) => {}
        Err(e) => {
            let what = format!(
                "{} does not go with {}: {e:#}",
                key_path.display(),
                path.display()
            );
            found.push(unusable(own, what));
        }
    }
    found.extend(exposed(&key_path));
    let leaf = &chain[0];
    let end = expires(leaf);
    if let Some(end) = end {
        found.extend(ending(end, now, own, running));
    }
    found.extend(names(config, leaf, own));
    found.extend(trust(config, &chain, now, own));
    if found.is_empty() {
        let until = end.map_or(String::new(), |end| format!(", until {end}"));
        found.push(Finding::ok(ABOUT, format!("{}{until}", path.display())));
    }
    found
}

fn unusable(own: bool, what: String) -> Finding {
    match own {
        true => Finding::problem(ABOUT, what, "set listen.cert_file and listen.key_file to a pair"),
        false => Finding::warning(ABOUT, what, "restart the server: a start issues another"),
    }
}

/// Warns of a key that others on this machine can read.
fn exposed(key: &Path) -> Option<Finding> {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(key).ok()?.permissions().mode();
    if mode & 0o077 == 0 {
        return None;
    }
    let what = format!("{} can be read by others than its owner", key.display());
    let command = format!("chmod 600 {}", quoted(&key.to_string_lossy()));
    Some(Finding::warning(ABOUT, what, "let nobody else read it").command(command))
}

fn ending(end: Timestamp, now: Timestamp, own: bool, running: bool) -> Option<Finding> {
    let left = end.since(now);
    if left > ENDS_SOON {
        return None;
    }
    let todo = match (own, running) {
        (true, _) => "replace listen.cert_file and restart the server",
        (false, true) => "restart the server: a start issues another",
        (false, false) => "nothing: the next start issues another",
    };
    Some(match (left.is_zero(), own || running) {
        (_, false) => Finding::ok(
            ABOUT,
            format!("the certificate ends at {end}; the next start issues another"),
        ),
        (true, true) => Finding::problem(ABOUT, format!("the certificate has expired, at {end}"), todo),
        (false, true) => {
            let days = left.as_secs() / DAY.as_secs();
            Finding::warning(
                ABOUT,
                format!("the certificate expires in {days} days, at {end}"),
                todo,
            )
        }
    })
}

/// Whether the certificate covers the names by which clients address the server, as far as they are
/// configured.
fn names(config: &Config, leaf: &CertificateDer<'_>, own: bool) -> Option<Finding> {
    let parsed = match ParsedCertificate::try_from(leaf) {
        Ok(parsed) => parsed,
        Err(e) => return Some(unusable(own, format!("the certificate cannot be used: {e}"))),
    };
    // An operator's certificate need not cover localhost.
    let local = ["localhost", "127.0.0.1", "::1"];
    let wanted = server_names(config).into_iter();
    let wanted = wanted.filter(|name| !own || !local.contains(&name.as_str()));
    let missing: Vec<String> = wanted
        .filter(|name| {
            let name = ServerName::try_from(name.replacen('*', "any", 1));
            name.is_ok_and(|name| verify_server_name(&parsed, &name).is_err())
        })
        .collect();
    if missing.is_empty() {
        return None;
    }
    let what = format!("the certificate is not for {}", missing.join(", "));
    Some(match own {
        true => Finding::warning(
            ABOUT,
            what,
            "have it issued for these names too, or take them out of listen.names and listen.public_url",
        ),
        false => Finding::warning(ABOUT, what, "restart the server: a start issues another"),
    })
}

/// Whether programs on this machine trust the certificate.
fn trust(config: &Config, chain: &[CertificateDer<'_>], now: Timestamp, own: bool) -> Option<Finding> {
    let parsed = ParsedCertificate::try_from(&chain[0]).ok()?;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let at = UnixTime::since_unix_epoch(now.since(Timestamp::MIN));
    let algorithms = provider().signature_verification_algorithms.all;
    let verdict = verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &chain[1..], at, algorithms);
    let refused = verdict.err()?;
    if own {
        let what = format!("this machine does not trust the certificate: {refused}");
        let todo = "if it is from a public CA, put the intermediate certificates behind it in listen.cert_file; \
                    otherwise have clients trust the CA";
        return Some(Finding::warning(ABOUT, what, todo));
    }
    let ca = std::path::absolute(config.data_dir.join("tls/ca.pem")).ok()?;
    let what =
        "this machine does not trust the server's CA, so programs refuse https unless they are told of it";
    let todo = format!(
        "trust {}, or let \"postrider az-setup\" tell az and the SDKs",
        ca.display()
    );
    let finding = Finding::warning(ABOUT, what, todo);
    Some(trusting(&ca).into_iter().fold(finding, Finding::command))
}

/// Commands that make this machine trust a CA.
fn trusting(ca: &Path) -> Vec<String> {
    let ca = quoted(&ca.to_string_lossy());
    if cfg!(target_os = "macos") {
        return vec![format!(
            "sudo security add-trusted-cert -d -r trustRoot -k /Library/Keychains/System.keychain {ca}"
        )];
    }
    let known = [
        ("/usr/local/share/ca-certificates", "update-ca-certificates"),
        ("/etc/pki/ca-trust/source/anchors", "update-ca-trust"),
        ("/etc/ca-certificates/trust-source/anchors", "update-ca-trust"),
    ];
    let found = known
        .iter()
        .find(|(directory, _)| PathBuf::from(directory).is_dir());
    let (directory, update) = found.unwrap_or(&known[0]);
    vec![format!("sudo cp {ca} {directory}/postrider.crt && sudo {update}")]
}

#[cfg(test)]
mod tests {
    use super::super::finding::FindingLevel;
    use super::*;
    use crate::credentials::prepare;
    use postrider_store::seal::Keyring;
    use std::fs;

    const NOW: Timestamp = Timestamp::from_secs(1_900_000_000);

    fn lab() -> (tempfile::TempDir, Config) {
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            data_dir: directory.path().join("data"),
            ..Config::default()
        };
        prepare(&config, &Keyring::ephemeral(), NOW).unwrap();
        (directory, config)
    }

    fn told(found: &[Finding], level: FindingLevel, words: &str) -> bool {
        found
            .iter()
            .any(|one| one.level == level && one.what.contains(words))
    }

    #[test]
    fn a_fresh_one_of_our_own_lacks_nothing_but_trust() {
        let (_directory, config) = lab();
        let found = examine(&config, NOW, true);
        let [only] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!(only.level, FindingLevel::Warning);
        assert!(only.what.contains("does not trust the server's CA"), "{only:?}");
        assert!(only.commands[0].contains("tls/ca.pem"), "{only:?}");
    }

    #[test]
    fn what_a_restart_mends_is_told_only_while_it_shows() {
        let (_directory, mut config) = lab();
        let later = NOW + Duration::from_secs(800 * 24 * 60 * 60);
        assert!(told(
            &examine(&config, later, true),
            FindingLevel::Warning,
            "expires in 1"
        ));
        assert!(told(
            &examine(&config, later, false),
            FindingLevel::Ok,
            "next start issues another"
        ));
        assert!(told(
            &examine(&config, later + 60 * DAY, true),
            FindingLevel::Problem,
            "has expired"
        ));
        config.listen.names = vec!["events.example".into()];
        assert!(told(
            &examine(&config, NOW, true),
            FindingLevel::Warning,
            "is not for events.example"
        ));
    }

    #[test]
    fn an_operators_pair_is_judged() {
        let (directory, mut config) = lab();
        let tls = config.data_dir.join("tls");
        config.listen.cert_file = Some(tls.join("server.pem"));
        config.listen.key_file = Some(tls.join("server-key.pem"));
        assert!(told(
            &examine(&config, NOW, true),
            FindingLevel::Warning,
            "does not trust the certificate"
        ));
        config.listen.public_url = Some("https://events.example".into());
        assert!(told(
            &examine(&config, NOW, true),
            FindingLevel::Warning,
            "is not for events.example"
        ));
        config.listen.key_file = Some(tls.join("ca-key.pem"));
        assert!(told(
            &examine(&config, NOW, true),
            FindingLevel::Problem,
            "does not go with"
        ));
        let open = directory.path().join("open.pem");
        fs::copy(tls.join("server-key.pem"), &open).unwrap();
        fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        config.listen.key_file = Some(open);
        assert!(told(
            &examine(&config, NOW, true),
            FindingLevel::Warning,
            "can be read by others"
        ));
        config.listen.cert_file = Some(directory.path().join("missing.pem"));
        assert!(told(
            &examine(&config, NOW, true),
            FindingLevel::Problem,
            "missing.pem"
        ));
    }

    #[test]
    fn nothing_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config {
            data_dir: directory.path().join("data"),
            ..Config::default()
        };
        assert!(told(
            &examine(&config, NOW, false),
            FindingLevel::Ok,
            "will be made"
        ));
        config.listen.https = None;
        assert!(told(&examine(&config, NOW, false), FindingLevel::Ok, "is off"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
