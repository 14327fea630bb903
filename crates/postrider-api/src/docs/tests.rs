//! The pages as a browser receives them.

use super::*;
use crate::azure::subscriptions::tests::test_server::{ApiTestServer, TestAnswer};
use std::collections::BTreeSet;

const CONFIGURATION: &str =
    "# All of it.\n\n# Which <one>.\n#profile = \"a\"\n\n# Where.\n[listen]\n#https = \"<script>\"\n";

async fn lab() -> ApiTestServer {
    ApiTestServer::with(false, |server| server.configuration = CONFIGURATION).await
}

async fn get(lab: &ApiTestServer, path: &str) -> TestAnswer {
    lab.exchange("GET", path, None, &[("host", "localhost")]).await
}

async fn text(lab: &ApiTestServer, path: &str) -> String {
    let got = get(lab, path).await.expect(200);
    String::from_utf8(got.bytes.to_vec()).unwrap()
}

/// All values of an attribute in a page.
fn attribute<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    let mark = format!(" {name}=\"");
    let found = page.split(&*mark).skip(1);
    found.map(|rest| rest.split('"').next().unwrap()).collect()
}

#[tokio::test]
async fn pages_are_open_to_all_and_guarded() {
    let lab = lab().await;
    for (path, _) in PAGES {
        let got = get(&lab, path).await.expect(200);
        assert_eq!(got.header("content-type"), "text/html; charset=utf-8");
        let policy = got.header("content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"),
            "{policy}"
        );
        assert_eq!(got.header("x-content-type-options"), "nosniff");
        assert_eq!(got.header("cache-control"), "no-cache");
        let tag = got.header("etag").to_owned();
        let headers = [("host", "localhost"), ("if-none-match", &*tag)];
        lab.exchange("GET", path, None, &headers).await.expect(304);
        get(&lab, &format!("{path}/")).await.expect(200);
        let refused = lab
            .exchange("POST", path, None, &[("host", "localhost")])
            .await
            .expect(405);
        assert_eq!(refused.header("allow"), "GET, HEAD");
    }
    for path in ["/docs/nothing", "/docs/api/x", "/docs/../portal"] {
        let got = get(&lab, path).await.expect(404);
        assert!(
            got.header("content-security-policy")
                .starts_with("default-src 'none'")
        );
    }
    let got = get(&lab, "/postrider/v1/openapi.json").await.expect(200);
    assert_eq!(got.header("content-type"), "application/json; charset=utf-8");
    assert_eq!(got.body["openapi"], "3.1.0");
    assert_eq!(got.bytes, openapi::TEXT.as_bytes());
}

/// Pages contain only what their policy allows, their links have targets, and their tags are
/// closed.
#[tokio::test]
async fn pages_hold_together() {
    let lab = lab().await;
    let mut ids = std::collections::BTreeMap::new();
    for (path, _) in PAGES {
        let page = text(&lab, path).await;
        let mut found = BTreeSet::new();
        for id in attribute(&page, "id") {
            assert!(found.insert(id.to_owned()), "{path} has {id} twice");
        }
        ids.insert(path, found);
    }
    for (path, _) in PAGES {
        let page = text(&lab, path).await;
        for part in [
            "<style",
            " style=",
            "<script>",
            " onclick",
            "javascript:",
            "<iframe",
            "<img",
        ] {
            assert!(!page.contains(part), "{path} has {part}");
        }
        for source in attribute(&page, "src") {
            get(&lab, source).await.expect(200);
        }
        for link in attribute(&page, "href") {
            let (to, place) = link.split_once('#').unwrap_or((link, ""));
            assert!(
                to.is_empty() || to.starts_with('/'),
                "{path} leads to another host: {link}"
            );
            if !to.is_empty() {
                get(&lab, to).await.expect(200);
            }
            let page = if to.is_empty() { path } else { to };
            if !place.is_empty() && place != "oidc" {
                assert!(ids[page].contains(place), "{path}: {link} leads nowhere");
            }
        }
        balanced(path, &page);
        assert_eq!(page.matches("<h1>").count(), 1, "{path}");
        assert_eq!(page.matches("aria-current=\"page\"").count(), 1, "{path}");
    }
}

/// Every element that is opened is closed, in order.
fn balanced(path: &str, page: &str) {
    let mut open = Vec::new();
    for part in page.split('<').skip(1) {
        let (tag, _) = part.split_once('>').unwrap_or_else(|| panic!("{path}: {part}"));
        let name = tag.split([' ', '/']).find(|name| !name.is_empty()).unwrap();
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(closed), "{path} near {part}");
        } else if !tag.ends_with('/') && !["!doctype", "meta", "link", "br"].contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{path}: {open:?}");
}

#[tokio::test]
async fn the_reference_has_every_operation() {
    let page = text(&lab().await, "/docs/api").await;
    for one in openapi::operations() {
        let id = openapi::text(one.told, "operationId").unwrap();
        assert!(page.contains(&format!("<h3 id=\"{id}\">")), "{id}");
        assert!(page.contains(&format!("href=\"#{id}\"")), "{id} is in the menu");
    }
    assert!(page.contains("<h3 id=\"schema-Story\">"));
    assert!(page.contains("curl -H &quot;authorization: Bearer $SECRET&quot; &quot;http://127.0.0.1:5888/postrider/v1/events/$ID&quot;"));
}

#[tokio::test]
async fn what_is_configured_is_text() {
    let page = text(&lab().await, "/docs/configuration").await;
    assert!(page.contains("<code>&quot;&lt;script&gt;&quot;</code>"), "{page}");
    assert!(page.contains("Which &lt;one&gt;."));
    assert!(page.contains("<code>POSTRIDER_LISTEN__HTTPS</code>"));
}

#[tokio::test]
async fn metrics_are_listed_without_their_numbers() {
    let lab = lab().await;
    lab.topic("secret-topic").await;
    let page = text(&lab, "/docs/metrics").await;
    let metrics = get(&lab, "/metrics").await.expect(200);
    let metrics = String::from_utf8(metrics.bytes.to_vec()).unwrap();
    let families: Vec<_> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .collect();
    assert!(families.len() > 10);
    for family in families {
        let name = family.split(' ').next().unwrap();
        assert!(page.contains(&format!("<code>{name}</code>")), "{name}");
    }
    assert!(metrics.contains("secret-topic"));
    assert!(!page.contains("secret-topic"));
}
