//! Google Cloud Storage, as far as it can be tested without Google.
//!
//! No server for its XML dialect is available to these tests. For writing, reading, deleting and
//! listing that dialect equals S3's, so our requests, with tokens of a generated key, are sent to
//! moto, which does not check credentials by default. Whether Google accepts the tokens, and how it
//! words its errors, is not tested.

use crate::server::{StorageServer, installed};
use crate::{account, no_container, writes_replaces_reads_and_deletes};
use bytes::Bytes;
use postrider_blobs::{AccountLocation, ObjectStores};
use postrider_core::ids::Secret;
use postrider_engine::blobs::BlobStore;

fn at(server: &StorageServer, service_account: &str, bucket: Option<&str>) -> ObjectStores {
    let place = AccountLocation::Gcs {
        endpoint: Some(server.url()),
        bucket: bucket.map(str::to_owned),
        service_account: Secret::new(service_account),
    };
    account(place, true)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_to_google_work_with_what_speaks_the_same_dialect() {
    let Some(clients) = installed() else { return };
    let server = StorageServer::moto(&clients);
    let service_account = server.python("service_account.py", &[]);
    let stores = at(&server, &service_account, None);
    // Buckets are never created at Google, whatever the account's setting.
    assert_eq!(
        stores.probe("dead", "letters").await,
        Err(no_container("letters"))
    );
    let put = stores.put("dead", "letters", "a", Bytes::new()).await;
    assert_eq!(put, Err(no_container("letters")));

    let place = AccountLocation::S3 {
        endpoint: Some(server.url()),
        region: "us-east-1".to_owned(),
        bucket: None,
        access_key_id: "any".to_owned(),
        secret_access_key: Secret::new("any"),
    };
    let made = account(place, true)
        .put("dead", "letters", "a", Bytes::new())
        .await;
    made.unwrap();
    writes_replaces_reads_and_deletes(&stores, "letters").await;
    let folders = at(&server, &service_account, Some("letters"));
    writes_replaces_reads_and_deletes(&folders, "one-folder").await;
    let stored = folders
        .put("dead", "one-folder", "b c", Bytes::new())
        .await
        .unwrap();
    assert_eq!(stored.url, format!("{}/letters/one-folder/b%20c", server.url()));
}
