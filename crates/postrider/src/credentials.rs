//! Certificates and credentials: created at the first start, kept in the data directory, reused
//! afterwards.

use crate::config::{AzureConfig, ClientRole, ClientSection, Config, ConfigSecret};
use crate::private_files::make_directory;
use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use postrider_core::time::Timestamp;
use postrider_store::seal::{Keyring, key_of};
use postrider_wire::token::SigningKey;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, RootCertStore};
use std::fs;
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const CA_LIFETIME: Duration = Duration::from_secs(3653 * 24 * 60 * 60);
/// Some clients refuse a server certificate that is valid for more than 825 days.
const SERVER_LIFETIME: Duration = Duration::from_secs(820 * 24 * 60 * 60);
/// A server certificate with less time left than this is replaced.
const RENEW_BEFORE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Keys, certificates and clients that the server needs.
pub struct ServerCredentials {
    /// TLS configuration of the listener; offers HTTP/1.1.
    pub server_config: rustls::ServerConfig,
    /// Expiry of the server certificate; `None` if unknown.
    pub expires: Option<Timestamp>,
    /// CA certificate for clients to trust; `None` with the operator's own certificate.
    pub ca_path: Option<PathBuf>,
    /// Clients that may get a token: the configured ones, or the generated one.
    pub credentials: Vec<ClientSection>,
    /// File with the generated client's secret; `None` if clients are configured.
    pub credentials_path: Option<PathBuf>,
    /// Signs tokens, which stay valid as long as the key exists.
    pub token_key: TokenKey,
    /// Files that were created; empty if all existed.
    pub created: Vec<PathBuf>,
}

/// Reads the files from the data directory, and creates those that are missing or no longer fit.
/// `now` is the machine's time, never a test clock's: others check the certificates.
pub fn prepare(config: &Config, keys: &Keyring, now: Timestamp) -> Result<ServerCredentials> {
    let mut created = Vec::new();
    let (server_config, ca_path) = match (&config.listen.cert_file, &config.listen.key_file) {
        (Some(cert), Some(key)) => (own_server(cert, key)?, None),
        _ => {
            let directory = config.data_dir.join("tls");
            let names = server_names(config);
            let server = local_server(&directory, &names, now, &mut created)?;
            (server, Some(directory.join("ca.pem")))
        }
    };
    let chain = read_certificates(&certificate_path(config)).ok();
    let expires = chain.and_then(|chain| expires(chain.first()?));
    let credentials_path = credentials_path(config);
    let credentials = match &credentials_path {
        Some(path) => vec![generated_client(path, &config.azure, &mut created)?],
        None => config.clients.clone(),
    };
    if let Some(id) = &config.azure.managed_identity {
        let mut clients = credentials.iter();
        ensure!(
            clients.any(|client| client.id.eq_ignore_ascii_case(id)),
            "azure.managed_identity: no client has the id \"{id}\""
        );
    }
    let token_key = token_key(&config.data_dir, keys, &mut created)?;
    Ok(ServerCredentials {
        server_config,
        expires,
        ca_path,
        credentials,
        credentials_path,
        token_key,
        created,
    })
}

/// Key that signs tokens, and a secret derived from it.
pub struct TokenKey {
    pub signing: SigningKey,
    /// Secret from which names that nobody can guess are derived.
    pub naming: String,
}

/// The key is the same at every start because clients keep their tokens, az even in a file.
fn token_key(data_dir: &Path, keys: &Keyring, created: &mut Vec<PathBuf>) -> Result<TokenKey> {
    let path = token_key_path(data_dir);
    reseal_files(data_dir, keys)?;
    let text = match read_sealed(&path, keys)? {
        Some(text) => text,
        None => {
            make_directory(data_dir)?;
            let key = KeyPair::generate().context("generating the key for tokens")?;
            write_sealed(&path, &key.serialize_pem(), keys)?;
            created.push(path.clone());
            key.serialize_pem()
        }
    };
    let reading = || format!("reading the key for tokens in {}", path.display());
    let key = read_key_text(&text).with_context(reading)?;
    if access_path(data_dir).exists() {
        // Sealed by `reseal_files`, at the latest.
        mark_access_sealed(data_dir, keys)?;
    }
    let der = key.secret_der();
    let mut naming = ring::digest::Context::new(&ring::digest::SHA256);
    naming.update(b"names");
    naming.update(der);
    Ok(TokenKey {
        signing: SigningKey::from_pkcs8(der).with_context(reading)?,
        naming: base64::engine::general_purpose::STANDARD.encode(naming.finish()),
    })
}

pub fn token_key_path(data_dir: &Path) -> PathBuf {
    data_dir.join("token-key.pem")
}

/// File of revocations, and of the keys that replaced the first one.
pub fn access_path(data_dir: &Path) -> PathBuf {
    data_dir.join("access.json")
}

/// Begins the text of the key for tokens once `access.json` was sealed in this directory. Readers of PEM skip it.
const ACCESS_MARK: &str = "access.json is sealed\n";
const ACCESS_WAY_OUT: &str = "put access.json back from a backup; without one, remove access.json and token-key.pem: a \
     new key is then made, and every token and session given until now ends";

fn access_was_sealed(data_dir: &Path, keys: &Keyring) -> Result<bool> {
    let text = read_sealed(&token_key_path(data_dir), keys)?;
    Ok(text.is_some_and(|text| text.starts_with(ACCESS_MARK)))
}

/// From now on a missing or unsealed `access.json` is refused. To be called when it is there and sealed.
fn mark_access_sealed(data_dir: &Path, keys: &Keyring) -> Result<()> {
    let path = token_key_path(data_dir);
    match read_sealed(&path, keys)? {
        Some(text) if !text.starts_with(ACCESS_MARK) => {
            write_sealed(&path, &format!("{ACCESS_MARK}{text}"), keys)
        }
        _ => Ok(()),
    }
}

/// Revocations and keys as they were stored; none if none ever were. Fails where they were and are gone or changed:
/// what was revoked would be valid again.
pub fn read_access(data_dir: &Path, keys: &Keyring) -> Result<Option<String>> {
    let path = access_path(data_dir);
    let stored = read_if_there(&path)?;
    let is_sealed = stored
        .as_deref()
        .is_some_and(|text| key_of(text.trim_end().as_bytes()).is_some());
    if !is_sealed && access_was_sealed(data_dir, keys)? {
        let what = if stored.is_some() {
            "not sealed any more: it was changed or damaged"
        } else {
            "missing"
        };
        bail!("{} is {what}; {ACCESS_WAY_OUT}", path.display());
    }
    read_sealed(&path, keys).context(ACCESS_WAY_OUT)
}

pub fn write_access(data_dir: &Path, text: &str, keys: &Keyring) -> Result<()> {
    write_sealed(&access_path(data_dir), text, keys)?;
    mark_access_sealed(data_dir, keys)
}

/// Seals the files that hold keys of tokens under the first key, those that are there and are not.
pub fn reseal_files(data_dir: &Path, keys: &Keyring) -> Result<()> {
    for path in [token_key_path(data_dir), access_path(data_dir)] {
        let Some(stored) = read_if_there(&path)? else {
            continue;
        };
        if key_of(stored.trim_end().as_bytes()) == Some(keys.current()) {
            continue;
        }
        let text = match path == access_path(data_dir) {
            true => read_access(data_dir, keys)?,
            false => read_sealed(&path, keys)?,
        };
        let text = text.unwrap_or_default();
        if path == token_key_path(data_dir) {
            read_key_text(&text)
                .with_context(|| format!("reading the key for tokens in {}", path.display()))?;
        }
        write_sealed(&path, &text, keys)?;
    }
    Ok(())
}

/// Text of a file, unsealed if it is sealed.
pub fn read_sealed(path: &Path, keys: &Keyring) -> Result<Option<String>> {
    let Some(text) = read_if_there(path)? else {
        return Ok(None);
    };
    let opening = || format!("opening {}", path.display());
    let opened = keys.open(&place(path), text.trim_end().as_bytes());
    let opened = opened.with_context(opening)?.into_owned();
    Ok(Some(String::from_utf8(opened).with_context(opening)?))
}

pub fn write_sealed(path: &Path, text: &str, keys: &Keyring) -> Result<()> {
    let sealed = keys.seal(&place(path), text.trim_end().as_bytes());
    let sealed = String::from_utf8(sealed).context("sealed text is text")?;
    // The previous text may be a secret that is not sealed, so the old file is erased.
    if path.exists() {
        let new = path.with_extension("new");
        write_private(&new, &format!("{sealed}\n"))?;
        let replaced = postrider_embedded::replace_with(path, &new);
        return replaced.with_context(|| format!("writing {}", path.display()));
    }
    write_private(path, &format!("{sealed}\n"))
}

/// Context that binds a sealed text to its file.
fn place(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// File of the generated client; `None` if clients are configured.
pub fn credentials_path(config: &Config) -> Option<PathBuf> {
    let generated = config.clients.is_empty();
    generated.then(|| config.data_dir.join("credentials.toml"))
}

/// Certificate chain of the https listener.
pub fn certificate_path(config: &Config) -> PathBuf {
    let local = || config.data_dir.join("tls/server.pem");
    config.listen.cert_file.clone().unwrap_or_else(local)
}

/// Text that all nodes of a cluster share: one file, or two that belong together.
pub struct SharedSecretFiles {
    pub name: &'static str,
    files: Vec<PathBuf>,
    /// Whether the files are sealed; the keyrings of other nodes may differ.
    sealed: bool,
}

/// Files that nodes share. The operator distributes files of their own.
pub fn shared(config: &Config) -> Vec<SharedSecretFiles> {
    let here = &config.data_dir;
    let mut all = vec![SharedSecretFiles {
        name: "token-key",
        files: vec![token_key_path(here)],
        sealed: true,
    }];
    all.extend(credentials_path(config).map(|path| SharedSecretFiles {
        name: "credentials",
        files: vec![path],
        sealed: false,
    }));
    if config.listen.cert_file.is_none() {
        all.push(SharedSecretFiles {
            name: "local-ca",
            files: vec![here.join("tls/ca-key.pem"), here.join("tls/ca.pem")],
            sealed: false,
        });
    }
    all
}

impl SharedSecretFiles {
    /// Texts of the files, as a JSON list.
    pub fn read(&self, keys: &Keyring) -> Result<String> {
        let mut texts = Vec::new();
        for path in &self.files {
            let text = match self.sealed {
                true => read_sealed(path, keys)?.map(|text| format!("{}\n", text.trim_end())),
                false => read_if_there(path)?,
            };
            let text = text.with_context(|| format!("{} is missing", path.display()))?;
            texts.push(text);
        }
        Ok(serde_json::to_string(&texts)?)
    }

    /// Writes the files from the texts that another node has read.
    pub fn write(&self, texts: &str, keys: &Keyring) -> Result<()> {
        let texts: Vec<String> = serde_json::from_str(texts).unwrap_or_default();
        ensure!(
            texts.len() == self.files.len(),
            "the cluster's secret {:?} is not one that this program understands",
            self.name
        );
        for (path, text) in self.files.iter().zip(texts) {
            make_directory(path.parent().context("a file has a directory")?)?;
            match self.sealed {
                true => write_sealed(path, &text, keys)?,
                false => write_private(path, &text)?,
            }
        }
        Ok(())
    }
}

/// Expiry of a certificate. The verifier's error names it when asked about a much later time.
pub fn expires(certificate: &CertificateDer<'_>) -> Option<Timestamp> {
    let mut roots = RootCertStore::empty();
    // The verifier checks the expiry before the issuer, so any root will do.
    roots.add(certificate.clone().into_owned()).ok()?;
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
        .build()
        .ok()?;
    let name = ServerName::try_from("localhost").ok()?;
    let end_of_time = UnixTime::since_unix_epoch(Duration::from_secs(253_402_300_800));
    let verdict = verifier.verify_server_cert(certificate, &[], &name, &[], end_of_time);
    match verdict {
        Err(rustls::Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) => {
            i64::try_from(not_after.as_secs()).ok().map(Timestamp::from_secs)
        }
        _ => None,
    }
}

fn own_server(cert: &Path, key: &Path) -> Result<rustls::ServerConfig> {
    let chain = read_certificates(cert).context("listen.cert_file")?;
    let signer = read_key(key).context("listen.key_file")?;
    serve_with(chain, signer).with_context(|| format!("using {} with {}", cert.display(), key.display()))
}

/// Names in the server certificate, without duplicates, in a fixed order.
pub fn server_names(config: &Config) -> Vec<String> {
    let listen = &config.listen;
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    let addresses = listen
        .https
        .into_iter()
        .chain(listen.http)
        .map(|at| at.ip().to_canonical());
    names.extend(
        addresses
            .filter(|ip| !ip.is_unspecified())
            .map(|ip| ip.to_string()),
    );
    let url: Option<http::Uri> = listen.public_url.as_ref().and_then(|url| url.parse().ok());
    let host = url.as_ref().and_then(|url| url.host());
    names.extend(host.map(|host| host.trim_matches(['[', ']']).to_owned()));
    names.extend(listen.names.iter().cloned());

    let mut once = Vec::new();
    for name in names {
        // Addresses are normalized: certificates have a single spelling.
        let name = match name.parse::<IpAddr>() {
            Ok(address) => address.to_string(),
            Err(_) => name.to_lowercase(),
        };
        if !once.contains(&name) {
            once.push(name);
        }
    }
    once
}

/// A server certificate of the local CA, which is created if it is missing.
fn local_server(
    directory: &Path,
    names: &[String],
    now: Timestamp,
    created: &mut Vec<PathBuf>,
) -> Result<rustls::ServerConfig> {
    make_directory(directory)?;
    let ca = local_ca(directory, now, created)?;

    let cert_path = directory.join("server.pem");
    let key_path = directory.join("server-key.pem");
    if let Some(server) = reusable_server(&cert_path, &key_path, &ca, names, now)? {
        return Ok(server);
    }

    let key = KeyPair::generate().context("generating the server's key")?;
    let cert = server_params(names, now)?
        .signed_by(&key, &Issuer::new(ca_params(&ca.key, now), &ca.key))
        .context("signing the server's certificate")?;
    trusted(&ca.cert, cert.der(), names, now)
        .with_context(|| format!("{0}/ca-key.pem is not the key of {0}/ca.pem", directory.display()))?;
    let server = serve_with(vec![cert.der().clone()], read_key_text(&key.serialize_pem())?)?;
    // The key is written first: a certificate without its key would be noticed and replaced at the
    // next start.
    write_private(&key_path, &key.serialize_pem())?;
    write_private(&cert_path, &format!("{}\n{}", names_line(names), cert.pem()))?;
    created.extend([key_path, cert_path]);
    Ok(server)
}

/// The certificate on disk, if it is for these names, matches its key, and would still be accepted
/// in a month by a client that trusts the CA.
fn reusable_server(
    cert_path: &Path,
    key_path: &Path,
    ca: &LocalCa,
    names: &[String],
    now: Timestamp,
) -> Result<Option<rustls::ServerConfig>> {
    let (Some(cert), Some(key)) = (read_if_there(cert_path)?, read_if_there(key_path)?) else {
        return Ok(None);
    };
    if cert.lines().next() != Some(names_line(names).as_str()) {
        return Ok(None);
    }
    let Ok(chain) = CertificateDer::pem_slice_iter(cert.as_bytes()).collect::<Result<Vec<_>, _>>() else {
        return Ok(None);
    };
    let Some(leaf) = chain.first() else {
        return Ok(None);
    };
    if trusted(&ca.cert, leaf, names, now + RENEW_BEFORE).is_err() {
        return Ok(None);
    }
    let Ok(key) = read_key_text(&key) else {
        return Ok(None);
    };
    Ok(serve_with(chain, key).ok())
}

/// Line above the certificate that lists the names it was issued for, so that a name removed from
/// the configuration is noticed, as well as one that was added.
fn names_line(names: &[String]) -> String {
    format!("Issued by Postrider for: {}", names.join(", "))
}

struct LocalCa {
    cert: CertificateDer<'static>,
    key: KeyPair,
}

fn local_ca(directory: &Path, now: Timestamp, created: &mut Vec<PathBuf>) -> Result<LocalCa> {
    let cert_path = directory.join("ca.pem");
    let key_path = directory.join("ca-key.pem");
    let key = match read_if_there(&key_path)? {
        Some(text) => KeyPair::from_pem(&text)
            .with_context(|| format!("reading the CA's key from {}", key_path.display()))?,
        None => {
            ensure!(
                !cert_path.exists(),
                "{} is there without its key {}: restore the key, or remove the certificate to \
                 have a new CA made, which clients must then trust",
                cert_path.display(),
                key_path.display()
            );
            let key = KeyPair::generate().context("generating the CA's key")?;
            write_private(&key_path, &key.serialize_pem())?;
            created.push(key_path);
            key
        }
    };
    // A key without a certificate is left by an interrupted first start.
    if !cert_path.exists() {
        let cert = ca_params(&key, now)
            .self_signed(&key)
            .context("signing the CA's certificate")?;
        write_private(&cert_path, &cert.pem())?;
        created.push(cert_path.clone());
    }
    let cert = read_certificates(&cert_path)?.remove(0);
    Ok(LocalCa { cert, key })
}

/// The CA's name is derived from its key: it distinguishes the CAs of several machines in a trust
/// store, and a later start can sign with it without parsing the certificate.
fn ca_params(key: &KeyPair, now: Timestamp) -> CertificateParams {
    let digest = ring::digest::digest(&ring::digest::SHA256, key.der_bytes());
    let short: String = digest
        .as_ref()
        .iter()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let mut params = params_named(&format!("Postrider local CA {short}"), now, CA_LIFETIME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn server_params(names: &[String], now: Timestamp) -> Result<CertificateParams> {
    let mut params = params_named("Postrider", now, SERVER_LIFETIME);
    for name in names {
        let san = match name.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => SanType::DnsName(
                name.as_str()
                    .try_into()
                    .with_context(|| format!("\"{name}\" cannot stand in a certificate"))?,
            ),
        };
        params.subject_alt_names.push(san);
    }
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn params_named(name: &str, now: Timestamp, lifetime: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    // The validity begins a day early for clients whose clock is slow.
    let (from, until) = ((now - DAY).civil(), (now + lifetime).civil());
    params.not_before = rcgen::date_time_ymd(from.year.into(), from.month, from.day);
    params.not_after = rcgen::date_time_ymd(until.year.into(), until.month, until.day);
    params
}

/// Whether a client that trusts `ca` would accept `cert` for all of `names` at that time.
fn trusted(
    ca: &CertificateDer<'_>,
    cert: &CertificateDer<'_>,
    names: &[String],
    at: Timestamp,
) -> Result<()> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.clone().into_owned())?;
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build()?;
    let at = UnixTime::since_unix_epoch(at.since(Timestamp::MIN));
    for name in names {
        let name = name.replacen('*', "any", 1);
        let name = ServerName::try_from(name.as_str())?;
        verifier.verify_server_cert(cert, &[], &name, &[], at)?;
    }
    Ok(())
}

pub fn serve_with(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<rustls::ServerConfig> {
    let mut server = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(server)
}

pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// `credentials.toml`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct CredentialsFile {
    client_id: String,
    client_secret: ConfigSecret,
    /// Further values that clients need to log in. They are copied from the configuration, which
    /// decides.
    #[serde(default)]
    tenant: String,
    #[serde(default)]
    subscription: String,
}

impl CredentialsFile {
    fn read(text: &str, path: &Path) -> Result<CredentialsFile> {
        let credentials: CredentialsFile = toml::from_str(text)
            // The parser's error message quotes the line, which holds the secret.
            .map_err(|error| anyhow::anyhow!("reading {}: {}", path.display(), error.message()))?;
        ensure!(
            !credentials.client_id.is_empty() && !credentials.client_secret.expose().is_empty(),
            "reading {}: client_id and client_secret must not be empty",
            path.display()
        );
        Ok(credentials)
    }

    fn text(&self) -> String {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        format!(
            "# Made on the first start, because the configuration names no [[client]].\n\
             client_id = {}\nclient_secret = {}\ntenant = {}\nsubscription = {}\n",
            quoted(&self.client_id),
            quoted(self.client_secret.expose()),
            quoted(&self.tenant),
            quoted(&self.subscription),
        )
    }

    fn client(self) -> ClientSection {
        ClientSection {
            id: self.client_id,
            secret: self.client_secret,
            role: ClientRole::Owner,
        }
    }
}

/// The generated client of an installation that was started before.
pub fn read_generated_client(path: &Path) -> Result<ClientSection> {
    let text = read_if_there(path)?;
    let text = text.with_context(|| {
        let path = path.display();
        format!("{path} is not there: start the server once, or name its data directory or configuration")
    })?;
    Ok(CredentialsFile::read(&text, path)?.client())
}

/// The client that is generated if the configuration has none.
fn generated_client(path: &Path, azure: &AzureConfig, created: &mut Vec<PathBuf>) -> Result<ClientSection> {
    let mut credentials = match read_if_there(path)? {
        Some(text) => CredentialsFile::read(&text, path)?,
        None => {
            make_directory(path.parent().context("a file has a directory")?)?;
            let mut bytes = [0; 32];
            if SystemRandom::new().fill(&mut bytes).is_err() {
                bail!("the system has no random bytes to make a secret of");
            }
            created.push(path.to_owned());
            CredentialsFile {
                client_id: uuid::Uuid::new_v4().to_string(),
                client_secret: ConfigSecret::new(
                    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes),
                ),
                tenant: String::new(),
                subscription: String::new(),
            }
        }
    };
    if (&credentials.tenant, &credentials.subscription) != (&azure.tenant, &azure.subscription) {
        credentials.tenant = azure.tenant.clone();
        credentials.subscription = azure.subscription.clone();
        write_private(path, &credentials.text())?;
    }
    Ok(credentials.client())
}

pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let chain = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .with_context(|| format!("reading the certificates in {}", path.display()))?;
    ensure!(!chain.is_empty(), "{} holds no certificate", path.display());
    Ok(chain)
}

pub fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    read_key_text(&text).with_context(|| format!("reading the private key in {}", path.display()))
}

fn read_key_text(text: &str) -> Result<PrivateKeyDer<'static>> {
    Ok(PrivateKeyDer::from_pem_slice(text.as_bytes())?)
}

pub fn read_if_there(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

/// Writes a file that only its owner can read, from its creation on.
pub fn write_private(path: &Path, text: &str) -> Result<()> {
    write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// Replaces the file atomically and durably.
fn write(path: &Path, text: &str) -> Result<()> {
    let directory = path.parent().context("a file has a directory")?;
    // The name is always the same: what a kill leaves there may be a secret, and is removed by `remove_unfinished`.
    remove_unfinished(path)?;
    let unfinished = unfinished_path(path);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    fs::File::open(directory)?.sync_all()?;
    Ok(())
}

fn unfinished_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.unfinished"))
}

/// Overwrites and removes what a kill has left of [`write_private`].
pub fn remove_unfinished(path: &Path) -> Result<()> {
    let unfinished = unfinished_path(path);
    if !unfinished.exists() {
        return Ok(());
    }
    postrider_embedded::erase(&unfinished).with_context(|| format!("removing {}", unfinished.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const NOW: Timestamp = Timestamp::from_secs(1_900_000_000);

    fn config_in(directory: &Path) -> Config {
        Config {
            data_dir: directory.join("data"),
            ..Config::default()
        }
    }

    fn keys() -> Keyring {
        Keyring::parse("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "a test").unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn created_names(material: &ServerCredentials) -> Vec<String> {
        let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        material.created.iter().map(name).collect()
    }

    #[test]
    fn the_first_start_makes_everything_and_the_second_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let config = config_in(directory.path());
        let first = prepare(&config, &keys(), NOW).unwrap();
        assert_eq!(
            created_names(&first),
            [
                "ca-key.pem",
                "ca.pem",
                "server-key.pem",
                "server.pem",
                "credentials.toml",
                "token-key.pem"
            ]
        );
        assert_eq!(first.ca_path, Some(config.data_dir.join("tls/ca.pem")));
        assert_eq!(first.server_config.alpn_protocols, [b"http/1.1"]);
        let left = first.expires.expect("certificates have an end").since(NOW);
        assert!(
            left <= SERVER_LIFETIME && left + DAY >= SERVER_LIFETIME,
            "{left:?}"
        );
        for private in [
            "tls/ca-key.pem",
            "tls/ca.pem",
            "tls/server-key.pem",
            "tls/server.pem",
            "credentials.toml",
            "token-key.pem",
        ] {
            assert_eq!(mode(&config.data_dir.join(private)), 0o600, "{private}");
        }

        let second = prepare(&config, &keys(), NOW + DAY).unwrap();
        assert_eq!(second.created, Vec::<PathBuf>::new());
        assert_eq!(second.credentials, first.credentials);
        assert_eq!(second.token_key.naming, first.token_key.naming);
        let key_set = |material: &ServerCredentials| material.token_key.signing.key_set();
        assert_eq!(key_set(&second), key_set(&first));
        let [client] = second.credentials.as_slice() else {
            panic!("one client")
        };
        assert!(uuid::Uuid::parse_str(&client.id).is_ok());
        assert_eq!(client.secret.expose().len(), 43);
        assert_eq!(client.role, ClientRole::Owner);
        let path = config.data_dir.join("credentials.toml");
        assert_eq!(&read_generated_client(&path).unwrap(), client);
        // No temporary files remain.
        assert_eq!(fs::read_dir(config.data_dir.join("tls")).unwrap().count(), 4);
    }

    #[test]
    fn the_server_certificate_is_issued_anew_when_it_must_be_and_the_ca_stays() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = config_in(directory.path());
        prepare(&config, &keys(), NOW).unwrap();
        let ca = fs::read(config.data_dir.join("tls/ca.pem")).unwrap();
        let check = |config: &Config, now: Timestamp, reissued: bool, why: &str| {
            let material = prepare(config, &keys(), now).unwrap();
            let expected: &[&str] = if reissued {
                &["server-key.pem", "server.pem"]
            } else {
                &[]
            };
            assert_eq!(created_names(&material), expected, "{why}");
            assert_eq!(fs::read(config.data_dir.join("tls/ca.pem")).unwrap(), ca, "{why}");
            assert!(
                prepare(config, &keys(), now).unwrap().created.is_empty(),
                "{why}: settled"
            );
        };
        config.listen.names = vec!["events.example".into(), "*.apps.example".into()];
        check(&config, NOW, true, "names were added");
        config.listen.names.pop();
        check(&config, NOW, true, "a name was taken away");
        config.listen.names.push("EVENTS.example".into());
        check(&config, NOW, false, "the same name again");
        config.listen.public_url = Some("https://[2001:db8::0:1]:4438".into());
        check(&config, NOW, true, "the public URL has a new host");
        config.listen.https = Some("10.1.2.3:4438".parse().unwrap());
        check(&config, NOW, true, "the listener has an address of its own");
        config.listen.https = Some("10.1.2.3:9999".parse().unwrap());
        check(&config, NOW, false, "only the port changed");
        check(
            &config,
            NOW + SERVER_LIFETIME - RENEW_BEFORE - 2 * DAY,
            false,
            "a month is left",
        );
        check(
            &config,
            NOW + SERVER_LIFETIME - RENEW_BEFORE + DAY,
            true,
            "less than a month is left",
        );
        let later = NOW + SERVER_LIFETIME;
        fs::remove_file(config.data_dir.join("tls/server.pem")).unwrap();
        check(&config, later, true, "the certificate is gone");
        let other = KeyPair::generate().unwrap().serialize_pem();
        fs::write(config.data_dir.join("tls/server-key.pem"), other).unwrap();
        check(
            &config,
            later,
            true,
            "the key is another's, as after a crash between the two writes",
        );
    }

    #[test]
    fn a_client_that_trusts_the_ca_accepts_every_name() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = config_in(directory.path());
        config.listen.names = vec!["events.example".into()];
        prepare(&config, &keys(), NOW).unwrap();
        let ca = read_certificates(&config.data_dir.join("tls/ca.pem"))
            .unwrap()
            .remove(0);
        let cert = read_certificates(&config.data_dir.join("tls/server.pem"))
            .unwrap()
            .remove(0);
        let check = |name: &str, at: Timestamp, accepted: bool| {
            assert_eq!(
                trusted(&ca, &cert, &[name.to_owned()], at).is_ok(),
                accepted,
                "{name} {at}"
            );
        };
        for name in ["localhost", "127.0.0.1", "::1", "events.example"] {
            check(name, NOW, true);
        }
        check("other.example", NOW, false);
        check("localhost", NOW - 3 * DAY, false);
        check("localhost", NOW + SERVER_LIFETIME + DAY, false);
    }

    #[test]
    fn a_first_start_that_was_cut_short_is_finished_with_the_same_key() {
        let directory = tempfile::tempdir().unwrap();
        let config = config_in(directory.path());
        prepare(&config, &keys(), NOW).unwrap();
        let key = fs::read(config.data_dir.join("tls/ca-key.pem")).unwrap();
        fs::remove_file(config.data_dir.join("tls/ca.pem")).unwrap();
        let again = prepare(&config, &keys(), NOW).unwrap();
        assert_eq!(created_names(&again), ["ca.pem"]);
        assert_eq!(fs::read(config.data_dir.join("tls/ca-key.pem")).unwrap(), key);
    }

    #[test]
    fn access_that_was_sealed_is_never_read_as_plain_text_nor_missed() {
        let directory = tempfile::tempdir().unwrap();
        let config = config_in(directory.path());
        let (data_dir, keys) = (&config.data_dir, keys());
        let path = access_path(data_dir);
        prepare(&config, &keys, NOW).unwrap();
        // Nothing was revoked yet; an earlier version may have written plain text.
        assert_eq!(read_access(data_dir, &keys).unwrap(), None);
        let plain = "{\"epoch\":1}";
        fs::write(&path, plain).unwrap();
        prepare(&config, &keys, NOW).unwrap();
        assert!(!fs::read_to_string(&path).unwrap().contains("epoch"), "sealed");
        assert_eq!(read_access(data_dir, &keys).unwrap().as_deref(), Some(plain));

        let last = "{\"epoch\":2}";
        write_access(data_dir, last, &keys).unwrap();
        let sealed = fs::read_to_string(&path).unwrap();
        let other = sealed.replacen("\"v\":2", "\"v\":3", 1);
        let refused = |stored: Option<&str>| {
            match stored {
                Some(text) => fs::write(&path, text).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            let _ = prepare(&config, &keys, NOW);
            let error = format!("{:#}", read_access(data_dir, &keys).unwrap_err());
            assert!(
                error.contains("access.json") && error.contains("token-key.pem"),
                "{error}"
            );
        };
        for text in [
            other.as_str(),
            "{}",
            "{\"v\":2}",
            "[]",
            "",
            &sealed[..sealed.len() - 9],
        ] {
            refused(Some(text));
        }
        refused(None);
        fs::write(&path, &sealed).unwrap();
        prepare(&config, &keys, NOW).unwrap();
        assert_eq!(read_access(data_dir, &keys).unwrap().as_deref(), Some(last));
        // The way out: a new key, and nothing that was given before holds.
        fs::remove_file(&path).unwrap();
        fs::remove_file(token_key_path(data_dir)).unwrap();
        prepare(&config, &keys, NOW).unwrap();
        assert_eq!(read_access(data_dir, &keys).unwrap(), None);
    }

    #[test]
    fn what_a_kill_leaves_of_a_secret_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret-key");
        fs::write(unfinished_path(&path), "hunter2 hunter2").unwrap();
        write_private(&path, "new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(mode(&path), 0o600);
        fs::write(unfinished_path(&path), "hunter2").unwrap();
        remove_unfinished(&path).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let refused = |config: &Config, words: &[&str]| {
            let error = format!("{:#}", prepare(config, &keys(), NOW).err().expect("refused"));
            for word in words {
                assert!(error.contains(word), "{error}");
            }
            error
        };
        let mut config = config_in(directory.path());
        prepare(&config, &keys(), NOW).unwrap();
        let tls = config.data_dir.join("tls");

        let key = fs::read(tls.join("ca-key.pem")).unwrap();
        fs::write(
            tls.join("ca-key.pem"),
            KeyPair::generate().unwrap().serialize_pem(),
        )
        .unwrap();
        fs::remove_file(tls.join("server.pem")).unwrap();
        refused(&config, &["ca-key.pem is not the key of", "ca.pem"]);
        fs::remove_file(tls.join("ca-key.pem")).unwrap();
        refused(&config, &["without its key", "ca-key.pem"]);
        fs::write(tls.join("ca-key.pem"), key).unwrap();

        fs::write(config.data_dir.join("credentials.toml"), "client_id = \"hunter2").unwrap();
        let error = refused(&config, &["credentials.toml"]);
        assert!(!error.contains("hunter2"), "{error}");

        fs::remove_file(config.data_dir.join("credentials.toml")).unwrap();
        config.azure.managed_identity = Some("nobody".into());
        refused(&config, &["azure.managed_identity", "nobody"]);
        config.azure.managed_identity = None;
        fs::write(config.data_dir.join("token-key.pem"), "hunter2").unwrap();
        let error = refused(&config, &["token-key.pem"]);
        assert!(!error.contains("hunter2"), "{error}");
        fs::remove_file(config.data_dir.join("token-key.pem")).unwrap();

        config.listen.cert_file = Some(directory.path().join("missing.pem"));
        config.listen.key_file = Some(tls.join("server-key.pem"));
        refused(&config, &["listen.cert_file", "missing.pem"]);
        config.listen.cert_file = Some(tls.join("ca.pem"));
        refused(&config, &["ca.pem", "server-key.pem"]);
    }

    #[test]
    fn the_operators_own_certificate_and_client_are_used_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let other = config_in(&directory.path().join("other"));
        prepare(&other, &keys(), NOW).unwrap();
        let mut config = config_in(directory.path());
        config.listen.cert_file = Some(other.data_dir.join("tls/server.pem"));
        config.listen.key_file = Some(other.data_dir.join("tls/server-key.pem"));
        config.clients = vec![ClientSection {
            id: "me".into(),
            secret: ConfigSecret::new("s"),
            role: ClientRole::Reader,
        }];
        let material = prepare(&config, &keys(), NOW).unwrap();
        assert_eq!(created_names(&material), ["token-key.pem"]);
        assert_eq!(material.ca_path, None);
        assert_eq!(material.credentials, config.clients);
        assert_eq!(material.credentials_path, None);
        assert_eq!(fs::read_dir(&config.data_dir).unwrap().count(), 1);
    }

    #[test]
    fn the_credentials_say_where_to_log_in_and_follow_the_configuration() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = config_in(directory.path());
        let path = config.data_dir.join("credentials.toml");
        fs::create_dir_all(&config.data_dir).unwrap();
        // A file of an earlier version, and one that somebody edited.
        fs::write(&path, "client_id = \"me\"\nclient_secret = \"a\\\"b\"\n").unwrap();
        for tenant in ["t1", "t2"] {
            config.azure.tenant = tenant.into();
            let material = prepare(&config, &keys(), NOW).unwrap();
            assert_eq!(material.credentials[0].secret.expose(), "a\"b");
            assert_eq!(material.credentials_path.as_ref(), Some(&path));
            let table: toml::Table = toml::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
            assert_eq!(table["client_id"].as_str(), Some("me"));
            assert_eq!(table["tenant"].as_str(), Some(tenant));
            assert_eq!(
                table["subscription"].as_str(),
                Some(config.azure.subscription.as_str())
            );
            assert_eq!(mode(&path), 0o600);
        }
    }
}
