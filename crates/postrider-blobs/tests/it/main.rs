//! Storage accounts as the engine uses them: directories, and real servers that speak Azure's, Amazon's and,
//! as far as there is one, Google's language.
//!
//! `tests/clients/setup.sh DIR` installs the servers; `POSTRIDER_CLIENTS=DIR` makes these tests use them.

mod accounts;
mod directory;
mod azure;
mod answers;
mod s3;
mod gcs;
mod server;

use bytes::Bytes;
use postrider_blobs::{Account, ObjectStores, Place};
use postrider_engine::blobs::{BlobError, Blobs};
use postrider_engine::clock::SystemClock;
use std::sync::Arc;

/// A path with what needs care in URLs and signatures.
const ODD: &str = "ORDERS/a b/ü%2F?#&+=(1)~'/one.json";

/// One account of the name `dead`.
fn account(place: Place, create_containers: bool) -> ObjectStores {
    let account = Account {
        name: "dead".to_owned(),
        place,
        create_containers,
    };
    ObjectStores::new(vec![account], Arc::new(SystemClock)).unwrap()
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

/// What every account must do once its container is there.
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
