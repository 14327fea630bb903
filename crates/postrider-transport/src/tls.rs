//! TLS, set up when the first https destination is dialled.

use crate::Error;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::io;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub(crate) struct TlsClient {
    extra_roots: RootCertStore,
    accept_invalid_certs: bool,
    /// Loaded on first use: the machine's roots take time to read and memory to keep.
    connector: OnceCell<TlsConnector>,
}

impl TlsClient {
    pub fn new(
        extra_roots: Vec<CertificateDer<'static>>,
        accept_invalid_certs: bool,
    ) -> Result<TlsClient, Error> {
        let mut roots = RootCertStore::empty();
        for (position, root) in extra_roots.into_iter().enumerate() {
            roots
                .add(root)
                .map_err(|reason| Error::Root { position, reason })?;
        }
        Ok(TlsClient {
            extra_roots: roots,
            accept_invalid_certs,
            connector: OnceCell::new(),
        })
    }

    /// Negotiates TLS on a connection to `host`, a name or an IP literal without brackets.
    pub async fn handshake(&self, host: &str, tcp: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connector = self.connector.get_or_try_init(|| self.connector()).await?;
        connector.connect(name, tcp).await
    }

    async fn connector(&self) -> io::Result<TlsConnector> {
        let config = if self.accept_invalid_certs {
            config(CertificateTrust::Anyone)
        } else {
            let roots = self.extra_roots.clone();
            tokio::task::spawn_blocking(|| config(CertificateTrust::Roots(with_native_roots(roots)))).await?
        };
        Ok(TlsConnector::from(Arc::new(config)))
    }
}

enum CertificateTrust {
    Roots(RootCertStore),
    Anyone,
}

fn config(trust: CertificateTrust) -> ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("ring speaks TLS 1.2 and 1.3");
    let mut config = match trust {
        CertificateTrust::Roots(roots) => builder.with_root_certificates(roots).with_no_client_auth(),
        CertificateTrust::Anyone => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
            .with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config
}

fn with_native_roots(mut roots: RootCertStore) -> RootCertStore {
    let native = rustls_native_certs::load_native_certs();
    for error in &native.errors {
        tracing::warn!(%error, "part of the machine's root certificates could not be read");
    }
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        tracing::warn!("there are no root certificates: every https destination will be refused");
    }
    roots
}

/// Accepts any certificate for any name. Only for operators who asked for it.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
