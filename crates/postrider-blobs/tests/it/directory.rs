//! Accounts in a local directory.

use crate::{account, assert_unreachable, no_container, writes_replaces_reads_and_deletes};
use bytes::Bytes;
use postrider_blobs::{AccountLocation, BLOB_BYTES_MAX, ObjectStores};
use postrider_engine::blobs::{BlobError, BlobStore};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::task::JoinSet;

fn at(root: &Path, create_containers: bool) -> ObjectStores {
    let place = AccountLocation::Directory {
        root: root.to_owned(),
    };
    account(place, create_containers)
}

/// All files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => found.push(path),
        }
    }
    found.sort();
    found
}

#[tokio::test]
async fn blobs_are_files() {
    let directory = TempDir::new().unwrap();
    // The root and its parents are created too.
    let root = directory.path().join("not/yet there");
    let stores = at(&root, true);
    // A missing root says nothing about its blobs: its volume may not be mounted.
    assert_unreachable(stores.get("dead", "letters", "a").await);
    stores.put("dead", "letters", "x", Bytes::new()).await.unwrap();
    assert_eq!(
        stores.get("dead", "others", "a").await,
        Err(no_container("others"))
    );
    let large = std::fs::File::create(root.join("letters/large")).unwrap();
    large.set_len(BLOB_BYTES_MAX as u64 + 1).unwrap();
    let expected = BlobError::TooLarge {
        path: "large".into(),
        max: BLOB_BYTES_MAX,
    };
    assert_eq!(stores.get("dead", "letters", "large").await, Err(expected));
    std::fs::remove_file(root.join("letters/large")).unwrap();
    let mode = std::fs::metadata(root.join("letters/x"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600, "events are nobody else's to read");
    writes_replaces_reads_and_deletes(&stores, "letters").await;

    let stored = stores
        .put("dead", "letters", "a/b c.json", Bytes::from("[3]"))
        .await
        .unwrap();
    let path = root.join("letters/a/b c.json");
    assert_eq!(std::fs::read(&path).unwrap(), b"[3]");
    let url = format!("file://{}", path.display()).replace(' ', "%20");
    assert_eq!(stored.url, url);
    assert!(
        stored.etag.starts_with("0x8D") || stored.etag.starts_with("0x8E"),
        "{}",
        stored.etag
    );
    assert_eq!(
        files(&root),
        [
            "ORDERS/all/2026/11/16/3/one.json",
            "a/b c.json",
            "big",
            "empty",
            "x"
        ]
        .map(|p| root.join("letters").join(p)),
        "nothing temporary is left"
    );

    // Another process finds the blobs.
    assert_eq!(
        at(&root, false)
            .get("dead", "letters", "a/b c.json")
            .await
            .unwrap(),
        "[3]"
    );
}

#[tokio::test]
async fn a_directory_is_not_a_blob_and_a_blob_not_a_directory() {
    let directory = TempDir::new().unwrap();
    let stores = at(directory.path(), true);
    stores
        .put("dead", "letters", "a/b", Bytes::from("1"))
        .await
        .unwrap();
    for path in ["a", "a/b/c"] {
        let got = stores.get("dead", "letters", path).await;
        assert_eq!(got, Err(BlobError::NotFound(path.to_owned())));
        stores.delete("dead", "letters", path).await.unwrap();
        assert_unreachable(stores.put("dead", "letters", path, Bytes::from("2")).await);
    }
    assert_eq!(stores.get("dead", "letters", "a/b").await.unwrap(), "1");
    assert_eq!(files(directory.path()), [directory.path().join("letters/a/b")]);
}

#[tokio::test]
async fn containers_are_made_only_if_the_account_says_so() {
    let directory = TempDir::new().unwrap();
    let missing = Err(no_container("letters"));
    let stores = at(directory.path(), false);
    assert_eq!(stores.probe("dead", "letters").await, missing);
    let put = stores.put("dead", "letters", "a", Bytes::new()).await;
    assert_eq!(put.map(|_| ()), missing);
    stores.delete("dead", "letters", "a").await.unwrap();
    std::fs::create_dir(directory.path().join("letters")).unwrap();
    stores.probe("dead", "letters").await.unwrap();
    stores.put("dead", "letters", "b/c", Bytes::new()).await.unwrap();

    // A probe leaves nothing behind, not even the root.
    let root = directory.path().join("not/yet");
    let stores = at(&root, true);
    stores.probe("dead", "letters").await.unwrap();
    assert!(!directory.path().join("not").exists());
    assert_eq!(files(directory.path()).len(), 1);
}

#[tokio::test]
async fn nothing_leaves_the_root() {
    let directory = TempDir::new().unwrap();
    let root = directory.path().join("root");
    std::fs::write(directory.path().join("secret"), "s").unwrap();
    let stores = at(&root, true);
    stores
        .put("dead", "letters", "a", Bytes::from("1"))
        .await
        .unwrap();
    let absolute = directory.path().join("secret");
    for path in [
        "../../secret",
        "a/../../../secret",
        "./a",
        absolute.to_str().unwrap(),
        "a\0b",
        "..\\secret",
        "",
        "/",
        "b/",
        ".postrider-1-1",
        "x/.postrider-1-1/y",
    ] {
        assert_unreachable(stores.put("dead", "letters", path, Bytes::from("2")).await);
        assert_unreachable(stores.get("dead", "letters", path).await);
        assert_unreachable(stores.delete("dead", "letters", path).await);
    }
    for container in ["..", ".", "", "../root", "a/b", ".postrider-1-1"] {
        let missing = no_container(container);
        let put = stores.put("dead", container, "secret", Bytes::from("2")).await;
        assert_eq!(put, Err(missing.clone()));
        assert_eq!(
            stores.get("dead", container, "secret").await,
            Err(missing.clone())
        );
        assert_eq!(stores.probe("dead", container).await, Err(missing));
    }
    assert_eq!(std::fs::read(&absolute).unwrap(), b"s");
    assert_eq!(files(directory.path()), [root.join("letters/a"), absolute]);
}

/// Many tasks write one blob while others read it: every reader sees a complete one.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_writes_leave_a_whole_blob() {
    let directory = TempDir::new().unwrap();
    let stores = Arc::new(at(directory.path(), true));
    let whole = |body: &Bytes| body.len() == 100_000 && body.iter().all(|b| *b == body[0]);
    let mut tasks = JoinSet::new();
    for writer in 0..8_u8 {
        let stores = stores.clone();
        tasks.spawn(async move {
            for _ in 0..8 {
                let body = Bytes::from(vec![writer; 100_000]);
                stores.put("dead", "letters", "a/b", body).await.unwrap();
                let read = stores.get("dead", "letters", "a/b").await.unwrap();
                assert!(whole(&read), "{} bytes", read.len());
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert_eq!(files(directory.path()), [directory.path().join("letters/a/b")]);
}

#[tokio::test]
async fn a_directory_that_somebody_removed_is_made_again() {
    let directory = TempDir::new().unwrap();
    let root = directory.path().join("root");
    let stores = at(&root, true);
    for removed in ["root", "root/letters", "root/letters/a/b"] {
        stores
            .put("dead", "letters", "a/b/c", Bytes::from("1"))
            .await
            .unwrap();
        std::fs::remove_dir_all(directory.path().join(removed)).unwrap();
        stores
            .put("dead", "letters", "a/b/c", Bytes::from("2"))
            .await
            .unwrap();
        assert_eq!(stores.get("dead", "letters", "a/b/c").await.unwrap(), "2");
    }
}

#[tokio::test]
async fn a_root_that_is_no_directory_is_unreachable_until_it_is_one() {
    let directory = TempDir::new().unwrap();
    let root = directory.path().join("root");
    std::fs::write(&root, "").unwrap();
    let stores = at(&root, true);
    let told = assert_unreachable(stores.probe("dead", "letters").await);
    assert!(told.contains("root"), "{told}");
    assert_unreachable(stores.put("dead", "letters", "a", Bytes::new()).await);
    std::fs::remove_file(&root).unwrap();
    stores.probe("dead", "letters").await.unwrap();
    stores.put("dead", "letters", "a", Bytes::new()).await.unwrap();
}
