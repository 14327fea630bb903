//! Nodes of a cluster: a change is answered only when it is in force everywhere, and a node that
//! cannot know what others have answered accepts no events.

use super::test_server::{ApiTestServer, web_hook};
use super::{T1, extension};
use crate::cluster::{ClusterState, ClusterView};
use async_trait::async_trait;
use postrider_store::memory::MemoryCatalog;
use postrider_store::{Catalog, CatalogChange, CatalogContent, Error};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// A catalog whose node has lost its lease, or waits for another node in vain.
#[derive(Default)]
struct IsolatedNodeCatalog {
    inner: MemoryCatalog,
    lapsed: AtomicBool,
    waits: AtomicBool,
}

#[async_trait]
impl Catalog for IsolatedNodeCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        self.inner.load().await
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        self.inner.commit(changes).await
    }

    async fn next_id(&self) -> Result<u64, Error> {
        self.inner.next_id().await
    }

    fn is_current(&self) -> bool {
        !self.lapsed.load(Relaxed)
    }

    async fn in_force_everywhere(&self) -> Result<(), Error> {
        match self.waits.load(Relaxed) {
            true => Err(Error::Unavailable("node \"b\" is waited for".into())),
            false => Ok(()),
        }
    }
}

struct EmptyClusterView;

#[async_trait]
impl ClusterView for EmptyClusterView {
    fn now(&self) -> ClusterState {
        ClusterState::default()
    }

    async fn look(&self, _patience: Duration) -> ClusterState {
        ClusterState::default()
    }

    async fn drain(&self, _id: &str, _draining: bool) -> Result<(), String> {
        Ok(())
    }
}

async fn node() -> (Arc<IsolatedNodeCatalog>, ApiTestServer) {
    let catalog = Arc::new(IsolatedNodeCatalog::default());
    let lab = ApiTestServer::on(catalog.clone(), false, |server| {
        server.cluster = Some(Arc::new(EmptyClusterView))
    })
    .await;
    lab.topic("t1").await;
    (catalog, lab)
}

#[tokio::test]
async fn a_change_is_not_answered_with_success_before_it_is_in_force_everywhere() {
    let (catalog, lab) = node().await;
    let sub = extension(T1, "sub");
    let body = || Some(web_hook("/x", json!({})));
    catalog.waits.store(true, Relaxed);
    let id = json!({"id": sub});
    for got in [
        lab.arm("PUT", &sub, body()).await,
        lab.send("POST", "/postrider/v1/subscriptions/pause", Some(&id), &[])
            .await,
        lab.arm(
            "POST",
            &format!("{T1}/regenerateKey"),
            Some(json!({"keyName": "key1"})),
        )
        .await,
        lab.edge("DELETE", "/topics/t1/eventSubscriptions/sub", None)
            .await,
        // The deletion, too, must be known at all nodes.
        lab.edge("DELETE", "/topics/t1/eventSubscriptions/sub", None)
            .await,
    ] {
        let got = got.expect(503);
        assert_eq!(got.header("retry-after"), "1");
        let text = String::from_utf8(got.bytes.to_vec()).unwrap();
        assert!(text.contains("node \\\"b\\\" is waited for"), "{text}");
    }
    // Reads do not wait for other nodes.
    lab.arm("GET", T1, None).await.expect(200);
    catalog.waits.store(false, Relaxed);
    lab.arm("PUT", &sub, body()).await.expect(201);
}

// The webhook's consent is in force at the node that made the handshake, but not yet at another.
#[tokio::test]
async fn a_subscription_is_not_shown_as_done_before_it_is_in_force_everywhere() {
    let (catalog, lab) = node().await;
    let sub = extension(T1, "sub");
    lab.arm("PUT", &sub, Some(web_hook("/x", json!({}))))
        .await
        .expect(201);
    for (waits, state) in [(true, "Updating"), (false, "Succeeded")] {
        catalog.waits.store(waits, Relaxed);
        let got = lab.arm("GET", &sub, None).await.expect(200);
        assert_eq!(got.properties()["provisioningState"], state);
    }
}

#[tokio::test]
async fn a_node_that_cannot_know_what_others_have_answered_takes_no_events() {
    let (catalog, lab) = node().await;
    let events = || {
        Some(
            json!([{"id": "1", "subject": "s", "eventType": "t", "eventTime": "2026-01-01T00:00:00Z",
            "dataVersion": "1", "data": {}}]),
        )
    };
    lab.edge("POST", "/topics/t1/events", events()).await.expect(200);
    catalog.lapsed.store(true, Relaxed);
    for path in [
        "/topics/t1/events",
        "/topics/t1/api/events",
        "/topics/other/api/events",
    ] {
        let got = lab.edge("POST", path, events()).await.expect(503);
        assert_eq!(got.header("retry-after"), "1", "{path}");
    }
    catalog.lapsed.store(false, Relaxed);
    lab.edge("POST", "/topics/t1/events", events()).await.expect(200);
}
