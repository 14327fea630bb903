//! Storage accounts as the engine uses them: directories, and real servers with the protocols of
//! Azure, Amazon and, as far as there is one, Google.
//!
//! `tests/clients/setup.sh DIR` installs the servers; `POSTRIDER_CLIENTS=DIR` makes these tests use them.

mod accounts;
mod directory;
mod azure;
mod answers;
mod s3;
mod gcs;
mod server;

use async_trait::async_trait;
use bytes::Bytes;
use http::Uri;
use postrider_blobs::{AccountLocation, BlobAccountConfig, ObjectStores, StoreConnect, StoreStream};
use postrider_engine::blobs::{BlobError, BlobStore};
use postrider_engine::clock::SystemClock;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// A path with characters that need care in URLs and signatures.
const ODD: &str = "ORDERS/a b/ü%2F?#&+=(1)~'/one.json";

/// Connects to any address, and trusts what the machine trusts.
struct DirectConnect;

#[async_trait]
impl StoreConnect for DirectConnect {
    async fn connect(&self, url: &Uri) -> Result<Box<dyn StoreStream>, String> {
        let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = url.port_u16().unwrap_or(80);
        let stream = TcpStream::connect((host, port)).await;
        let stream = stream.map_err(|error| format!("could not connect: {error}"))?;
        if url.scheme_str() != Some("https") {
            return Ok(Box::new(stream));
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(host.to_owned()).unwrap();
        match TlsConnector::from(Arc::new(config)).connect(name, stream).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => Err(format!("tls: {error}")),
        }
    }
}

/// A single account named `dead`.
fn account(place: AccountLocation, create_containers: bool) -> ObjectStores {
    let account = BlobAccountConfig {
        name: "dead".to_owned(),
        place,
        create_containers,
    };
    ObjectStores::new(vec![account], Arc::new(SystemClock), Arc::new(DirectConnect)).unwrap()
}

fn no_container(container: &str) -> BlobError {
    BlobError::NoContainer {
        account: "dead".to_owned(),
        container: container.to_owned(),
    }
}

#[track_caller]
fn assert_unreachable<T: std::fmt::Debug>(result: Result<T, BlobError>) -> String {
    match result {
        Err(BlobError::Unreachable { detail, .. }) => detail,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T, BlobError>) -> String {
    match result {
        Err(BlobError::Refused { detail, .. }) => detail,
        other => panic!("{other:?}"),
    }
}

/// The behaviour of every account once its container exists.
async fn writes_replaces_reads_and_deletes(stores: &ObjectStores, container: &str) {
    for path in ["ORDERS/all/2026/11/16/3/one.json", "top.json", ODD] {
        let get = async || stores.get("dead", container, path).await;
        assert_eq!(get().await, Err(BlobError::NotFound(path.to_owned())), "{path}");
        let first = stores
            .put("dead", container, path, Bytes::from("[1]"))
            .await
            .unwrap();
        assert_eq!(get().await.unwrap(), "[1]", "{path}");
        let second = stores
            .put("dead", container, path, Bytes::from("[1,2]"))
            .await
            .unwrap();
        assert_eq!(get().await.unwrap(), "[1,2]", "{path}");
        assert_ne!(first.etag, second.etag, "{path}");
        assert!(
            !second.etag.is_empty() && !second.etag.contains('"'),
            "{}",
            second.etag
        );
        assert_eq!(first.url, second.url);
        assert!(!second.url.contains([' ', '?', '#', 'ü']), "{}", second.url);
    }
    stores.probe("dead", container).await.unwrap();

    let big = Bytes::from(vec![b'x'; 3 << 20]);
    stores.put("dead", container, "big", big.clone()).await.unwrap();
    assert_eq!(stores.get("dead", container, "big").await.unwrap(), big);
    stores
        .put("dead", container, "empty", Bytes::new())
        .await
        .unwrap();
    assert_eq!(stores.get("dead", container, "empty").await.unwrap(), "");

    for path in ["top.json", ODD] {
        stores.delete("dead", container, path).await.unwrap();
        let gone = stores.get("dead", container, path).await;
        assert_eq!(gone, Err(BlobError::NotFound(path.to_owned())));
        stores.delete("dead", container, path).await.unwrap();
    }
    let kept = stores
        .get("dead", container, "ORDERS/all/2026/11/16/3/one.json")
        .await;
    assert_eq!(kept.unwrap(), "[1,2]");
}
