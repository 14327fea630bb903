//! Azure Blob Storage, tested with Azurite, Microsoft's emulator.

use crate::server::{StorageServer, installed};
use crate::{
    ODD, account, assert_refused, assert_unreachable, no_container, writes_replaces_reads_and_deletes,
};
use bytes::Bytes;
use postrider_blobs::{AccountLocation, ObjectStores};
use postrider_core::ids::Secret;
use postrider_engine::blobs::BlobStore;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use std::process::Command;
use tempfile::TempDir;

const ACCOUNT: &str = "devstoreaccount1";
/// Azurite's documented key.
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

fn at(server: &StorageServer, key: &str, create_containers: bool) -> ObjectStores {
    at_url(&server.url(), key, create_containers)
}

fn at_url(url: &str, key: &str, create_containers: bool) -> ObjectStores {
    let place = AccountLocation::Azure {
        account: ACCOUNT.to_owned(),
        endpoint: format!("{url}/{ACCOUNT}"),
        key: Secret::new(key),
    };
    account(place, create_containers)
}

#[tokio::test(flavor = "multi_thread")]
async fn azurite_keeps_blobs_and_the_python_sdk_reads_them() {
    let Some(clients) = installed() else { return };
    let server = StorageServer::azurite(&clients);
    let stores = at(&server, KEY, true);
    stores
        .put("dead", "letters", "first", Bytes::new())
        .await
        .unwrap();
    writes_replaces_reads_and_deletes(&stores, "letters").await;

    let body = Bytes::from("[{\"id\":\"ü\"}]");
    let stored = stores.put("dead", "letters", ODD, body).await.unwrap();
    let endpoint = format!("{}/{ACCOUNT}", server.url());
    assert!(
        stored
            .url
            .starts_with(&format!("{endpoint}/letters/ORDERS/a%20b/")),
        "{}",
        stored.url
    );
    let read = server.python("read_blob.py", &[&endpoint, KEY, "letters", ODD]);
    let expected = format!(
        "application/json\nBlobType.BLOCKBLOB\n\"{}\"\n{}\n[{{\"id\":\"ü\"}}]\n",
        stored.etag, stored.url
    );
    assert_eq!(read, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn azurites_containers_are_made_only_if_the_account_says_so() {
    let Some(clients) = installed() else { return };
    let server = StorageServer::azurite(&clients);
    let makes = at(&server, KEY, true);
    let expects = at(&server, KEY, false);
    let missing = Err(no_container("letters"));
    makes.probe("dead", "letters").await.unwrap();
    assert_eq!(
        expects.probe("dead", "letters").await,
        missing,
        "a probe makes nothing"
    );
    let put = expects.put("dead", "letters", "a", Bytes::new()).await;
    assert_eq!(put.map(|_| ()), missing);
    assert_eq!(expects.get("dead", "letters", "a").await.map(|_| ()), missing);
    expects.delete("dead", "letters", "a").await.unwrap();

    // Two writers that find the container missing both create it, and both succeed.
    let (one, two) = tokio::join!(
        makes.put("dead", "letters", "a", Bytes::from("1")),
        makes.put("dead", "letters", "b", Bytes::from("2")),
    );
    one.unwrap();
    two.unwrap();
    expects.probe("dead", "letters").await.unwrap();
    expects
        .put("dead", "letters", "c", Bytes::from("3"))
        .await
        .unwrap();
    for (path, body) in [("a", "1"), ("b", "2"), ("c", "3")] {
        assert_eq!(expects.get("dead", "letters", path).await.unwrap(), body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn azurite_refuses_a_wrong_key_which_is_not_told() {
    let Some(clients) = installed() else { return };
    let server = StorageServer::azurite(&clients);
    at(&server, KEY, true)
        .put("dead", "letters", "a", Bytes::new())
        .await
        .unwrap();
    let wrong = "d3Jvbmctd3Jvbmctd3Jvbmctd3Jvbmctd3Jvbmctd3Jvbmc=";
    let stores = at(&server, wrong, true);
    for told in [
        assert_refused(stores.probe("dead", "letters").await),
        assert_refused(stores.probe("dead", "missing").await),
        assert_refused(stores.put("dead", "letters", "a", Bytes::new()).await),
        assert_refused(stores.put("dead", "missing", "a", Bytes::new()).await),
        assert_refused(stores.get("dead", "letters", "a").await),
        assert_refused(stores.delete("dead", "letters", "a").await),
    ] {
        assert!(told.contains("answered 403 "), "{told}");
        assert!(!told.contains(wrong), "{told}");
        // A signature is a word of 44 characters.
        assert!(told.split_whitespace().all(|word| word.len() < 40), "{told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn azurite_is_unreachable_while_it_is_down() {
    let Some(clients) = installed() else { return };
    let mut server = StorageServer::azurite(&clients);
    let stores = at(&server, KEY, true);
    stores
        .put("dead", "letters", "a", Bytes::from("1"))
        .await
        .unwrap();
    server.kill();
    let told = assert_unreachable(stores.put("dead", "letters", "a", Bytes::from("2")).await);
    assert!(told.contains("127.0.0.1"), "{told}");
    assert_unreachable(stores.get("dead", "letters", "a").await);
    assert_unreachable(stores.delete("dead", "letters", "a").await);
    assert_unreachable(stores.probe("dead", "letters").await);
    server.start();
    stores
        .put("dead", "letters", "a", Bytes::from("3"))
        .await
        .unwrap();
    assert_eq!(stores.get("dead", "letters", "a").await.unwrap(), "3");
}

/// Set when this test runs itself again: the address of a server whose certificate the machine
/// trusts.
const TRUSTED: &str = "POSTRIDER_TEST_TRUSTED";

/// The machine's trust anchors are read once per process, from the file that the environment names.
/// So the test runs itself again with others.
#[tokio::test(flavor = "multi_thread")]
async fn azurite_is_spoken_to_over_tls_if_the_machine_trusts_it() {
    if let Some(url) = std::env::var_os(TRUSTED) {
        let stores = at_url(url.to_str().unwrap(), KEY, true);
        stores
            .put("dead", "letters", "a", Bytes::from("1"))
            .await
            .unwrap();
        assert_eq!(stores.get("dead", "letters", "a").await.unwrap(), "1");
        println!("was trusted");
        return;
    }
    let Some(clients) = installed() else { return };
    let directory = TempDir::new().unwrap();
    let write = |name: &str, text: String| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let ca_key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::new([]).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.distinguished_name
        .push(DnType::CommonName, "a CA of this test");
    let anchor = write("ca.pem", ca.self_signed(&ca_key).unwrap().pem());
    let key = KeyPair::generate().unwrap();
    let signed = CertificateParams::new(["127.0.0.1".to_owned()])
        .unwrap()
        .signed_by(&key, &Issuer::new(ca, ca_key))
        .unwrap();
    let certificate = write("server.pem", signed.pem());
    let server =
        StorageServer::azurite_with_tls(&clients, certificate, write("server.key", key.serialize_pem()));

    let told = assert_unreachable(at(&server, KEY, true).probe("dead", "letters").await);
    assert!(told.contains("certificate"), "{told}");

    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "azure::azurite_is_spoken_to_over_tls_if_the_machine_trusts_it",
            "--exact",
            "--nocapture",
        ])
        .env(TRUSTED, server.url())
        .env("SSL_CERT_FILE", anchor)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && printed.contains("was trusted"),
        "{printed}"
    );
}
