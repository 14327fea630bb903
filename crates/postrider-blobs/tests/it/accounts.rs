//! Checks of accounts before any store is contacted.

use crate::{DirectConnect, account};
use bytes::Bytes;
use postrider_blobs::{AccountLocation, BLOB_BYTES_MAX, BlobAccountConfig, ObjectStores};
use postrider_core::ids::Secret;
use postrider_engine::blobs::{BlobError, BlobStore};
use postrider_engine::clock::SystemClock;
use std::sync::Arc;

fn refused(place: AccountLocation) -> String {
    let account = BlobAccountConfig {
        name: "dead".to_owned(),
        place,
        create_containers: false,
    };
    match ObjectStores::new(vec![account], Arc::new(SystemClock), Arc::new(DirectConnect)) {
        Ok(_) => panic!("was accepted"),
        Err(e) => {
            assert_eq!(e.account, "dead");
            e.to_string()
        }
    }
}

fn azure(account: &str, endpoint: &str, key: &str) -> AccountLocation {
    AccountLocation::Azure {
        account: account.to_owned(),
        endpoint: endpoint.to_owned(),
        key: Secret::new(key),
    }
}

fn s3(endpoint: &str, region: &str, id: &str, secret: &str) -> AccountLocation {
    AccountLocation::S3 {
        endpoint: Some(endpoint.to_owned()),
        region: region.to_owned(),
        bucket: None,
        access_key_id: id.to_owned(),
        secret_access_key: Secret::new(secret),
    }
}

fn gcs(service_account: &str) -> AccountLocation {
    AccountLocation::Gcs {
        endpoint: None,
        bucket: Some("bucket".to_owned()),
        service_account: Secret::new(service_account),
    }
}

#[test]
fn what_is_wrong_is_named_without_secrets() {
    let secret = "c2VjcmV0LXNlY3JldC1zZWNyZXQ=";
    let private =
        |key: &str| format!("{{\"client_email\":\"e\",\"private_key_id\":\"i\",\"private_key\":\"{key}\"}}");
    for (place, why) in [
        (azure("me", "https://me", "not-base64!"), "the key is not base64"),
        (azure("me", "https://me", ""), "key is empty"),
        (azure("", "https://me", secret), "account is empty"),
        (
            azure("m e", "https://me", secret),
            "account \"m e\" may hold only",
        ),
        (
            azure("me", &format!("https://me?sig={secret}"), secret),
            "endpoint must be",
        ),
        (
            azure("me", "me.blob.core.windows.net", secret),
            "endpoint must be",
        ),
        (s3("http://s3", "", "id", secret), "region is empty"),
        (
            s3("http://s3", "eu\n", "id", secret),
            "region \"eu\\n\" may hold only",
        ),
        (s3("http://s3", "eu", "", secret), "access_key_id is empty"),
        (s3("http://s3", "eu", "id", ""), "secret_access_key is empty"),
        (gcs(secret), "service_account is not JSON (line 1, column 1)"),
        (gcs("{}"), "service_account has no \"client_email\""),
        (gcs(&private(secret)), "private_key of service_account: "),
        (
            gcs(&private(&format!(
                "-----BEGIN PRIVATE KEY-----\\n{secret}\\n-----END PRIVATE KEY-----\\n"
            ))),
            "private_key of service_account: ",
        ),
    ] {
        let told = refused(place);
        assert!(told.starts_with("storage account \"dead\": "), "{told}");
        assert!(told.contains(why), "{told}");
        assert!(!told.contains(secret) && !told.contains("not-base64!"), "{told}");
    }
}

#[test]
fn accounts_are_told_apart_by_name() {
    let directory = |name: &str| BlobAccountConfig {
        name: name.to_owned(),
        place: AccountLocation::Directory { root: name.into() },
        create_containers: true,
    };
    let stores = ObjectStores::new(
        vec![directory("b"), directory("a")],
        Arc::new(SystemClock),
        Arc::new(DirectConnect),
    )
    .unwrap();
    assert_eq!(stores.accounts(), ["a", "b"]);
    assert_eq!(stores.check_name("a", "dead-letters"), Ok(()));
    assert!(stores.check_name("a", "Dead").unwrap_err().contains("lowercase"));
    assert!(
        stores
            .check_name("c", "abc")
            .unwrap_err()
            .contains("\"c\" is not configured")
    );

    let twice = ObjectStores::new(
        vec![directory("a"), directory("a")],
        Arc::new(SystemClock),
        Arc::new(DirectConnect),
    );
    let told = twice.err().unwrap().to_string();
    assert_eq!(told, "storage account \"a\": is configured twice");
    assert!(
        ObjectStores::new(
            vec![directory("")],
            Arc::new(SystemClock),
            Arc::new(DirectConnect)
        )
        .is_err()
    );
}

#[test]
fn secrets_are_not_printed() {
    let place = azure("me", "https://me", "c2VjcmV0");
    assert!(!format!("{place:?}").contains("c2VjcmV0"));
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_any_store_is_asked() {
    // The port is closed, so any other error than "unreachable" comes from a check before the
    // request.
    let stores = account(azure("me", "http://127.0.0.1:9", "a2V5"), true);
    let body = Bytes::from("[]");
    let unknown = Err(BlobError::UnknownAccount("other".to_owned()));
    assert_eq!(stores.probe("other", "abc").await, unknown);
    assert_eq!(stores.probe("dead", "..").await, Err(crate::no_container("..")));
    let put = stores.put("dead", "$root", "a", body.clone()).await;
    assert_eq!(put, Err(crate::no_container("$root")));
    let told = crate::assert_unreachable(stores.put("dead", "abc", "../a", body).await);
    assert!(told.contains("blob path \"../a\" must not"), "{told}");
    let large = Bytes::from(vec![0; BLOB_BYTES_MAX + 1]);
    let told = crate::assert_unreachable(stores.put("dead", "abc", "a", large).await);
    assert!(told.contains("larger than"), "{told}");
}
