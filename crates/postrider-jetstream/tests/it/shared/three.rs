//! The catalog on three servers, one of which dies.

use super::catalog::{FollowedCatalog, LARGE, created, put};
use crate::nats::{NatsProcesses, PATIENCE};
use postrider_jetstream::NatsConnection;
use postrider_store::conformance;
use postrider_store::{Catalog, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tokio::task::JoinSet;

async fn open(connection: &NatsConnection) -> FollowedCatalog {
    let opening = async {
        loop {
            if let Some(node) = FollowedCatalog::try_open(connection, LARGE).await {
                return node;
            }
        }
    };
    tokio::time::timeout(PATIENCE, opening).await.expect("it opens")
}

// Two nodes write, sometimes the same name; the stream's leader is killed meanwhile and comes back.
#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_commit_is_there_once_after_the_leader_is_gone() {
    const COMMITS: i64 = 150;
    let Some(mut servers) = NatsProcesses::three() else {
        return;
    };
    let connection = servers.connect().await;
    let nodes = [open(&connection).await, open(&servers.connect().await).await].map(Arc::new);
    let done = Arc::new(AtomicU64::new(0));
    let mut writing = JoinSet::new();
    for (n, node) in nodes.iter().enumerate() {
        let (node, done) = (node.clone(), done.clone());
        writing.spawn(async move {
            let mut stored = Vec::new();
            for commit in 0..COMMITS {
                let name = format!("n{n}-{commit}");
                let changes = match commit % 5 {
                    0 => vec![put(&name, commit), put("same", commit)],
                    _ => vec![put(&name, commit)],
                };
                loop {
                    match node.catalog.commit(changes.clone()).await {
                        Ok(()) => break stored.push(name),
                        Err(Error::Conflict(_)) => tokio::task::yield_now().await,
                        // The commit may be stored all the same.
                        Err(Error::Unavailable(_)) => break,
                        Err(other) => panic!("{other}"),
                    }
                }
                done.fetch_add(1, Relaxed);
            }
            stored
        });
    }
    conformance::eventually("some are stored", || done.load(Relaxed) >= 100).await;
    let stream = connection.js.get_stream("postrider-catalog").await.unwrap();
    let info = stream.get_info().await.unwrap();
    let leader = info
        .cluster
        .and_then(|cluster| cluster.leader)
        .expect("it has a leader");
    let number: usize = leader.trim_start_matches('n').parse().unwrap();
    servers.all[number].kill();
    servers.all[number].run();
    let stored: Vec<String> = writing.join_all().await.into_iter().flatten().collect();
    let fresh = open(&servers.connect().await).await;
    let found = created(&fresh.catalog.load().await.unwrap());
    let lost: Vec<&String> = stored.iter().filter(|name| !found.contains_key(*name)).collect();
    assert!(lost.is_empty(), "{lost:?}");
    assert!(stored.len() > COMMITS as usize, "{}", stored.len());
    let last = fresh.catalog.sequence();
    for node in &nodes {
        node.catalog.applied(last).await.unwrap();
        assert_eq!(created(&node.catalog.load().await.unwrap()), found);
    }
}
