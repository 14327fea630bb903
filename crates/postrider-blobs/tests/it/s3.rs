//! S3, tested with moto, which checks signatures with Amazon's own code.

use crate::server::{StorageServer, installed};
use crate::{ODD, account, assert_refused, no_container, writes_replaces_reads_and_deletes};
use bytes::Bytes;
use postrider_blobs::{AccountLocation, ObjectStores};
use postrider_core::ids::Secret;
use postrider_engine::blobs::{BlobError, BlobStore};

/// A server that accepts only the user whose key is returned.
fn start(clients: &std::path::Path) -> (StorageServer, MotoKey) {
    let server = StorageServer::moto(clients);
    let printed = server.python("s3_user.py", &[&server.url()]);
    let (id, secret) = printed.trim().split_once(' ').expect("an id and a secret");
    let key = MotoKey {
        id: id.to_owned(),
        secret: secret.to_owned(),
    };
    (server, key)
}

struct MotoKey {
    id: String,
    secret: String,
}

impl MotoKey {
    fn at(&self, server: &StorageServer, bucket: Option<&str>, create_containers: bool) -> ObjectStores {
        let place = AccountLocation::S3 {
            endpoint: Some(server.url()),
            region: "eu-central-1".to_owned(),
            bucket: bucket.map(str::to_owned),
            access_key_id: self.id.clone(),
            secret_access_key: Secret::new(&self.secret),
        };
        account(place, create_containers)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn moto_keeps_blobs_in_buckets_and_in_folders_and_amazons_sdk_reads_them() {
    let Some(clients) = installed() else { return };
    let (server, key) = start(&clients);
    let expects = key.at(&server, None, false);
    let makes = key.at(&server, None, true);

    let missing = Err(no_container("letters"));
    assert_eq!(expects.probe("dead", "letters").await, missing);
    let put = expects.put("dead", "letters", "a", Bytes::new()).await;
    assert_eq!(put.map(|_| ()), missing);
    assert_eq!(expects.get("dead", "letters", "a").await.map(|_| ()), missing);
    expects.delete("dead", "letters", "a").await.unwrap();
    makes.probe("dead", "letters").await.unwrap();
    makes.put("dead", "letters", "a", Bytes::new()).await.unwrap();
    expects.probe("dead", "letters").await.unwrap();
    writes_replaces_reads_and_deletes(&expects, "letters").await;

    let read = |bucket: &str, path: &str| {
        server.python("read_s3.py", &[&server.url(), &key.id, &key.secret, bucket, path])
    };
    let stored = makes
        .put("dead", "letters", ODD, Bytes::from("[1]"))
        .await
        .unwrap();
    let expected = format!("application/json\n\"{}\"\n[1]\n", stored.etag);
    assert_eq!(read("letters", ODD), expected);
    let url = format!("{}/letters/ORDERS/a%20b/", server.url());
    assert!(stored.url.starts_with(&url), "{}", stored.url);

    // With a bucket, any container is a folder in it.
    let folders = key.at(&server, Some("letters"), false);
    folders.probe("dead", "one-folder").await.unwrap();
    writes_replaces_reads_and_deletes(&folders, "one-folder").await;
    let stored = folders
        .put("dead", "one-folder", "a.json", Bytes::from("[2]"))
        .await
        .unwrap();
    assert_eq!(stored.url, format!("{}/letters/one-folder/a.json", server.url()));
    assert!(read("letters", "one-folder/a.json").ends_with("\n[2]\n"));
    assert!(matches!(
        folders.get("dead", "other", "a.json").await,
        Err(BlobError::NotFound(_))
    ));

    // A configured bucket is not created, and is named in the error.
    let stores = key.at(&server, Some("other-bucket"), true);
    assert_eq!(
        stores.probe("dead", "letters").await,
        Err(no_container("other-bucket"))
    );
    let put = stores.put("dead", "letters", "a", Bytes::new()).await;
    assert_eq!(put, Err(no_container("other-bucket")));
}

#[tokio::test(flavor = "multi_thread")]
async fn moto_refuses_a_wrong_key_which_is_not_told() {
    let Some(clients) = installed() else { return };
    let (server, key) = start(&clients);
    key.at(&server, None, true)
        .put("dead", "letters", "a", Bytes::new())
        .await
        .unwrap();
    let wrong = MotoKey {
        id: key.id,
        secret: "wrongwrongwrongwrongwrongwrong".to_owned(),
    };
    let stores = wrong.at(&server, None, true);
    for told in [
        assert_refused(stores.probe("dead", "letters").await),
        assert_refused(stores.put("dead", "letters", "a", Bytes::new()).await),
        assert_refused(stores.put("dead", "missing", "a", Bytes::new()).await),
        assert_refused(stores.get("dead", "letters", "a").await),
        assert_refused(stores.delete("dead", "letters", "a").await),
    ] {
        assert!(told.contains("403 SignatureDoesNotMatch"), "{told}");
        assert!(!told.contains(&wrong.secret), "{told}");
        // A signature is a word of 64 characters.
        assert!(told.split_whitespace().all(|word| word.len() < 60), "{told}");
    }
}
