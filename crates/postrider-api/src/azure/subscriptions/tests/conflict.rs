//! Conflicts: another node changed the same resource at the same time.

use super::test_server::{ApiTestServer, web_hook};
use super::{T1, extension};
use async_trait::async_trait;
use postrider_store::memory::MemoryCatalog;
use postrider_store::{Catalog, CatalogChange, CatalogContent, Error};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A catalog that refuses commits while `refuses` is set.
#[derive(Default)]
struct ContendedCatalog {
    inner: MemoryCatalog,
    refuses: AtomicBool,
}

#[async_trait]
impl Catalog for ContendedCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        self.inner.load().await
    }
    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        match self.refuses.load(Relaxed) {
            true => Err(Error::Conflict("the subscription".into())),
            false => self.inner.commit(changes).await,
        }
    }
    async fn next_id(&self) -> Result<u64, Error> {
        self.inner.next_id().await
    }
}

#[tokio::test]
async fn whoever_is_refused_is_told_to_try_again_shortly() {
    let catalog = Arc::new(ContendedCatalog::default());
    let lab = ApiTestServer::on(catalog.clone(), false, |_| {}).await;
    lab.topic("t1").await;
    let sub = extension(T1, "sub");
    let body = || Some(web_hook("/x", json!({})));
    lab.arm("PUT", &sub, body()).await.expect(201);
    catalog.refuses.store(true, Relaxed);
    let sentence = "the subscription was changed by another node at the same time; try again";
    let hook = json!({"properties": {"destination": {"endpointType": "WebHook",
        "properties": {"endpointUrl": "https://hooks.example/y"}}}});
    for (road, got) in [
        ("ARM", lab.arm("PUT", &sub, Some(web_hook("/z", json!({})))).await),
        ("ARM", lab.arm("DELETE", &sub, None).await),
        (
            "ARM",
            lab.arm(
                "PUT",
                &T1.replace("t1", "topic9"),
                Some(json!({"location": "westus2"})),
            )
            .await,
        ),
        (
            "edge",
            lab.edge("PUT", "/topics/t1/eventSubscriptions/sub", Some(hook))
                .await,
        ),
        ("edge", lab.edge("DELETE", "/topics/t1", None).await),
        (
            "ours",
            lab.send(
                "POST",
                "/postrider/v1/subscriptions/pause",
                Some(&json!({"id": sub})),
                &[],
            )
            .await,
        ),
    ] {
        let got = got.expect(503);
        assert_eq!(got.header("retry-after"), "1", "{road}");
        let text = String::from_utf8(got.bytes.to_vec()).unwrap();
        assert!(text.contains(sentence), "{road}: {text}");
    }
    assert!(
        lab.server.engine.catalog_trouble().is_none(),
        "nothing is wrong with the catalogue"
    );
    catalog.refuses.store(false, Relaxed);
    lab.arm("DELETE", &sub, None).await;
    assert!(lab.server.engine.directory.all_subscriptions().is_empty());
}
