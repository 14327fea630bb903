use super::{adopt_earlier_topics, array_pieces, is_json};
use crate::EdgeAccess;
use crate::azure::subscriptions::tests::test_server::{
    ApiTestServer, GROUP, LabClock, TestAnswer, VERSION, web_hook,
};
use crate::quotas::Quotas;
use postrider_core::ids::Secret;
use postrider_core::subscription::Topic;
use serde_json::{Value, json};
use std::sync::Arc;

const JSON: (&str, &str) = ("content-type", "application/json");
const KEY: &str = "a2V5";

fn arm(topic: &str) -> String {
    format!("{GROUP}/providers/Microsoft.EventGrid/topics/{topic}")
}

async fn put_managed(lab: &ApiTestServer, topic: &str, properties: Value) -> TestAnswer {
    let body = json!({"location": "westus2", "properties": properties});
    lab.arm("PUT", &arm(topic), Some(body)).await
}

fn event() -> Value {
    json!([{"id": "1", "subject": "s", "eventType": "t", "eventTime": "2026-01-01T00:00:00Z", "dataVersion": "1"}])
}

/// Sends a request to the edge API as any program on this machine could.
async fn ask(
    lab: &ApiTestServer,
    method: &str,
    path: &str,
    body: Option<&Value>,
    headers: &[(&str, &str)],
) -> TestAnswer {
    let mut all = headers.to_vec();
    if !headers.iter().any(|(name, _)| *name == "host") {
        all.push(("host", "localhost"));
    }
    lab.exchange(method, path, body, &all).await
}

async fn status(
    lab: &ApiTestServer,
    method: &str,
    path: &str,
    body: Option<&Value>,
    headers: &[(&str, &str)],
) -> u16 {
    ask(lab, method, path, body, headers).await.status
}

#[tokio::test]
async fn topics_of_the_management_api_are_out_of_its_reach() {
    let keys = EdgeAccess::Keys([Secret::new(KEY), Secret::new("")]);
    for access in [EdgeAccess::Open, keys] {
        let lab = ApiTestServer::with(true, |server| server.config.edge = access).await;
        put_managed(&lab, "managed", json!({})).await.expect(201);
        let hook = web_hook("/yes?code=secret", json!({}));
        let path = format!("{}/eventSubscriptions/sub", arm("managed"));
        let made = lab.arm("PUT", &path, Some(hook.clone())).await;
        lab.ends(&made).await;

        let headers = [JSON, ("aeg-sas-key", KEY)];
        let body = event();
        for (method, path, body, expected) in [
            ("GET", "/topics/managed", None, 404),
            ("GET", "/topics/MANAGED", None, 404),
            ("DELETE", "/topics/managed", None, 404),
            ("PUT", "/topics/managed", Some(&json!({})), 409),
            ("POST", "/topics/managed/events", Some(&body), 404),
            ("GET", "/topics/managed/eventSubscriptions", None, 404),
            ("GET", "/topics/managed/eventSubscriptions/sub", None, 404),
            (
                "PUT",
                "/topics/managed/eventSubscriptions/other",
                Some(&hook),
                404,
            ),
            ("PUT", "/topics/managed/eventSubscriptions/sub", Some(&hook), 404),
            ("DELETE", "/topics/managed/eventSubscriptions/sub", None, 404),
        ] {
            let got = ask(&lab, method, path, body, &headers).await;
            assert_eq!(got.status, expected, "{method} {path}: {}", got.body);
            assert!(!String::from_utf8_lossy(&got.bytes).contains("secret"));
        }
        // An unknown topic gets the same answer.
        let of = async |name: &str| {
            let got = ask(&lab, "GET", &format!("/topics/{name}"), None, &headers).await;
            got.body.to_string().replace(name, "")
        };
        assert_eq!(of("managed").await, of("unknown").await);
        assert_eq!(ask(&lab, "GET", "/topics", None, &headers).await.body, json!([]));
        lab.arm("GET", &path, None).await.expect(200);

        // The operator may let the edge API reach the topic, and exclude it again.
        put_managed(&lab, "managed", json!({"postrider": {"edge": true}}))
            .await
            .expect(201);
        assert_eq!(status(&lab, "GET", "/topics/managed", None, &headers).await, 200);
        // A request without the member changes nothing.
        put_managed(&lab, "managed", json!({})).await.expect(201);
        assert_eq!(
            status(&lab, "POST", "/topics/managed/events", Some(&body), &headers).await,
            200
        );
        let list = ask(&lab, "GET", "/topics/managed/eventSubscriptions", None, &headers).await;
        assert_eq!(list.body.as_array().map(Vec::len), Some(1));
        put_managed(&lab, "managed", json!({"postrider": {"edge": false}}))
            .await
            .expect(201);
        assert_eq!(status(&lab, "GET", "/topics/managed", None, &headers).await, 404);
    }
}

#[tokio::test]
async fn without_a_credential_what_was_made_elsewhere_stays() {
    let lab = ApiTestServer::new(true).await;
    lab.edge("PUT", "/topics/orders", None).await.expect(200);
    // The owner makes the same topic, which the edge API reaches, and a subscription with a secret.
    put_managed(&lab, "orders", json!({})).await.expect(201);
    let path = format!("{}/eventSubscriptions/hook", arm("orders"));
    let made = lab
        .arm("PUT", &path, Some(web_hook("/yes?code=TOPSECRET", json!({}))))
        .await;
    lab.ends(&made).await;
    let mine = web_hook("/mine?code=MINE", json!({}));
    let list = "/topics/orders/eventSubscriptions";
    let hook = format!("{list}/hook");
    let own = format!("{list}/own");
    ask(&lab, "PUT", &own, Some(&mine), &[JSON]).await.expect(200);

    let reader = ("authorization", "Bearer reader secret");
    for path in [list, &hook] {
        let seen = ask(&lab, "GET", path, None, &[JSON])
            .await
            .expect(200)
            .body
            .to_string();
        assert!(!seen.contains("TOPSECRET"), "{seen}");
        let seen = ask(&lab, "GET", path, None, &[reader])
            .await
            .expect(200)
            .body
            .to_string();
        assert!(!seen.contains("TOPSECRET") && !seen.contains("MINE"), "{seen}");
    }
    let seen = ask(&lab, "GET", list, None, &[]).await.body.to_string();
    assert!(seen.contains("MINE"), "{seen}");
    for (method, path, body) in [
        ("PUT", hook.as_str(), Some(&mine)),
        ("DELETE", &hook, None),
        ("DELETE", "/topics/orders", None),
    ] {
        let refused = ask(&lab, method, path, body, &[JSON]).await.expect(403);
        assert!(
            refused.body.to_string().contains("without a credential"),
            "{}",
            refused.body
        );
        ask(&lab, method, path, body, &[JSON, reader]).await.expect(403);
    }
    let wrong = [JSON, ("authorization", "Bearer nonsense")];
    ask(&lab, "GET", list, None, &wrong).await.expect(401);

    let owner = ("authorization", "Bearer owner secret");
    let seen = ask(&lab, "GET", &hook, None, &[owner]).await.body.to_string();
    assert!(seen.contains("TOPSECRET"), "{seen}");
    ask(&lab, "DELETE", &hook, None, &[owner]).await.expect(200);
    // Rules that were set elsewhere would go with the topic.
    put_managed(&lab, "orders", json!({"disableLocalAuth": true}))
        .await
        .expect(201);
    ask(&lab, "DELETE", "/topics/orders", None, &[]).await.expect(403);
    put_managed(&lab, "orders", json!({})).await.expect(201);
    ask(&lab, "DELETE", "/topics/orders", None, &[]).await.expect(200);
}

#[tokio::test]
async fn only_custom_topics_can_be_of_the_edge() {
    let lab = ApiTestServer::new(true).await;
    let path = format!("{GROUP}/providers/Microsoft.EventGrid/domains/dom");
    let body = json!({"location": "westus2", "properties": {"postrider": {"edge": true}}});
    let refused = lab.arm("PUT", &path, Some(body)).await.expect(400);
    assert!(refused.error().1.contains("edge"), "{}", refused.body);
    let refused = put_managed(&lab, "managed", json!({"postrider": {"edge": "yes"}})).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.error().1.contains("edge"), "{}", refused.body);
}

#[tokio::test]
async fn no_page_of_another_origin_can_use_it() {
    let lab = ApiTestServer::new(true).await;
    let body = event();
    lab.edge("PUT", "/topics/mine", None).await.expect(200);
    let events = "/topics/mine/events";
    let post = async |headers: &[(&str, &str)]| {
        let mut all = vec![("host", "localhost:443")];
        all.extend(headers);
        status(&lab, "POST", events, Some(&body), &all).await
    };
    for (headers, expected) in [
        (&[JSON][..], 200),
        (&[JSON, ("origin", "https://localhost")], 200),
        (&[JSON, ("origin", "https://localhost:443")], 200),
        // Pages on another port, of another scheme, and without an origin.
        (&[JSON, ("origin", "https://localhost:3000")], 403),
        (&[JSON, ("origin", "http://localhost:443")], 403),
        (&[JSON, ("origin", "https://127.0.0.1")], 403),
        (&[JSON, ("origin", "null")], 403),
        (&[JSON, ("origin", "https://localhost@evil.example")], 403),
        (&[JSON, ("sec-fetch-site", "same-site")], 403),
        (&[JSON, ("sec-fetch-site", "cross-site")], 403),
        (&[JSON, ("sec-fetch-site", "same-origin")], 200),
        (&[JSON, ("host", "evil.example")], 400),
        // Content types that a form can send.
        (&[("content-type", "text/plain")], 415),
        (&[("content-type", "text/plain; application/json")], 415),
        (&[("content-type", "application/x-www-form-urlencoded")], 415),
        (&[("content-type", "multipart/form-data; boundary=x")], 415),
        (&[], 415),
        (&[("content-type", "application/json; charset=utf-8")], 200),
    ] {
        assert_eq!(post(headers).await, expected, "{headers:?}");
    }
    let path = "/topics/mine";
    let headers = [("host", "evil.example:443"), JSON];
    assert_eq!(status(&lab, "GET", path, None, &headers).await, 403);
    let body = json!({});
    let plain = [("content-type", "text/plain")];
    assert_eq!(status(&lab, "PUT", path, Some(&body), &plain).await, 415);
    assert_eq!(status(&lab, "PUT", path, None, &[]).await, 200);

    let lab = ApiTestServer::with(true, |server| {
        server.config.public_url = Some("https://events.example:8443".into());
        server.config.host_names.push("events.example".into());
    })
    .await;
    let origin = ("origin", "https://events.example:8443");
    assert_eq!(status(&lab, "PUT", path, None, &[origin]).await, 200);
}

#[test]
fn json_is_known_by_its_type() {
    for good in [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/cloudevents+json",
        "application/cloudevents-batch+json;charset=utf-8",
    ] {
        assert!(is_json(good), "{good}");
    }
    for wrong in [
        "",
        "text/json",
        "text/plain",
        "application/",
        "application/json, text/plain",
        "application/x-www-form-urlencoded",
        "text/plain;application/json",
        "application/xml",
    ] {
        assert!(!is_json(wrong), "{wrong}");
    }
}

#[tokio::test]
async fn rules_of_a_topic_hold_here_too() {
    let lab = ApiTestServer::new(true).await;
    lab.edge("PUT", "/topics/mine", None).await.expect(200);
    let body = event();
    let publish = async |headers: &[(&str, &str)]| {
        let mut all = vec![JSON];
        all.extend(headers);
        status(&lab, "POST", "/topics/mine/events", Some(&body), &all).await
    };
    let owner = ("authorization", "Bearer owner secret");
    let reader = ("authorization", "Bearer reader secret");
    let set = async |properties: Value| put_managed(&lab, "mine", properties).await.expect(201);
    assert_eq!(publish(&[]).await, 200);
    set(json!({"publicNetworkAccess": "Disabled"})).await;
    assert_eq!(publish(&[]).await, 403);
    set(json!({"inboundIpRules": [{"ipMask": "10.0.0.0/8", "action": "Allow"}]})).await;
    assert_eq!(publish(&[owner]).await, 403);
    set(json!({"inboundIpRules": [{"ipMask": "127.0.0.1", "action": "Allow"}]})).await;
    assert_eq!(publish(&[]).await, 200);

    set(json!({"disableLocalAuth": true})).await;
    assert_eq!(publish(&[]).await, 401);
    assert_eq!(publish(&[("aeg-sas-key", KEY)]).await, 401);
    assert_eq!(publish(&[reader]).await, 403);
    assert_eq!(publish(&[owner]).await, 200);
    // The module knows none of these settings, so the edge API must not reset them.
    lab.edge(
        "PUT",
        "/topics/mine",
        Some(json!({"properties": {"disableLocalAuth": false}})),
    )
    .await
    .expect(200);
    assert_eq!(publish(&[]).await, 401);
}

#[tokio::test]
async fn no_url_has_a_forged_host() {
    let lab = ApiTestServer::new(true).await;
    for (host, expected) in [
        ("localhost", "https://localhost"),
        ("localhost:8443", "https://localhost:8443"),
        ("127.0.0.1:443", "https://127.0.0.1:443"),
        ("evil.example", "https://127.0.0.1:443"),
        ("localhost.evil.example", "https://127.0.0.1:443"),
        ("localhost:x@evil.example", "https://127.0.0.1:443"),
    ] {
        let body = json!({"location": "westus2", "properties": {}});
        let path = format!("{}?api-version={VERSION}", arm("topic-one"));
        let headers = [("host", host), ("x-forwarded-host", "evil.example")];
        let got = lab.send("PUT", &path, Some(&body), &headers).await.expect(201);
        let url = got.header("azure-asyncoperation");
        assert!(url.starts_with(&format!("{expected}/")), "{host}: {url}");
        let endpoint = got.properties()["endpoint"].as_str().unwrap_or_default();
        assert!(!endpoint.contains("evil"), "{host}: {endpoint}");
    }
    let hosts = [("host", "localhost"), ("host", "localhost")];
    assert_eq!(
        lab.exchange("GET", "/healthz/live", None, &hosts).await.status,
        400
    );
}

#[tokio::test]
async fn one_more_than_a_quota_is_refused_by_name() {
    let lab = ApiTestServer::with(false, |server| {
        server.config.quotas = Quotas {
            topics: 1,
            domains: 1,
            domain_topics: 1,
            subscriptions_per_topic: 1,
            edge_topics: 1,
            edge_subscriptions_per_topic: 1,
            ..Quotas::AZURE
        };
    })
    .await;
    let check = |got: TestAnswer, key: &str| {
        assert_eq!(got.status, 409, "{}", got.body);
        let text = got.body.to_string();
        assert!(
            text.contains("Quota limit reached") && text.contains(key),
            "{text}"
        );
    };
    let hook = || Some(web_hook("/x", json!({})));
    put_managed(&lab, "one", json!({})).await.expect(201);
    check(put_managed(&lab, "two", json!({})).await, "quotas.topics");
    // Changing a topic does not count against the quota.
    put_managed(&lab, "one", json!({"publicNetworkAccess": "Disabled"}))
        .await
        .expect(201);
    let sub = |name: &str| format!("{}/eventSubscriptions/{name}", arm("one"));
    lab.arm("PUT", &sub("first"), hook()).await.expect(201);
    lab.arm("PUT", &sub("first"), hook()).await.expect(201);
    check(
        lab.arm("PUT", &sub("second"), hook()).await,
        "quotas.subscriptions_per_topic",
    );

    lab.edge("PUT", "/topics/three", None).await.expect(200);
    lab.edge("PUT", "/topics/three", None).await.expect(200);
    check(lab.edge("PUT", "/topics/four", None).await, "quotas.edge_topics");
    check(
        put_managed(&lab, "one", json!({"postrider": {"edge": true}})).await,
        "quotas.edge_topics",
    );
    let sub = |name: &str| format!("/topics/three/eventSubscriptions/{name}");
    lab.edge("PUT", &sub("first"), hook()).await.expect(200);
    check(
        lab.edge("PUT", &sub("second"), hook()).await,
        "quotas.edge_subscriptions_per_topic",
    );
    lab.edge("DELETE", "/topics/three", None).await.expect(200);
    lab.edge("PUT", "/topics/four", None).await.expect(200);

    let domain = |name: &str| format!("{GROUP}/providers/Microsoft.EventGrid/domains/{name}");
    let body = || Some(json!({"location": "westus2", "properties": {}}));
    lab.arm("PUT", &domain("dom"), body()).await.expect(201);
    check(lab.arm("PUT", &domain("other"), body()).await, "quotas.domains");
    let inside = |name: &str| format!("{}/topics/{name}", domain("dom"));
    lab.arm("PUT", &inside("a"), None).await.expect(201);
    check(lab.arm("PUT", &inside("b"), None).await, "quotas.domain_topics");
    // The quota also covers a domain topic that a subscription would create.
    let path = format!("{}/eventSubscriptions/sub", inside("b"));
    check(lab.arm("PUT", &path, hook()).await, "quotas.domain_topics");
    let path = format!("{}/eventSubscriptions/sub", inside("a"));
    lab.arm("PUT", &path, hook()).await.expect(201);
}

#[tokio::test]
async fn topics_of_earlier_versions_are_told_apart_by_their_subscriptions() {
    let lab = ApiTestServer::new(false).await;
    let hook = || Some(web_hook("/x", json!({})));
    for name in ["module", "mixed", "managed", "bare"] {
        lab.topic(name).await;
    }
    for name in ["module", "mixed"] {
        let path = format!("/topics/{name}/eventSubscriptions/edge");
        lab.edge("PUT", &path, hook()).await.expect(200);
    }
    for name in ["mixed", "managed"] {
        let path = format!("{}/eventSubscriptions/azure", arm(name));
        lab.arm("PUT", &path, hook()).await.expect(201);
    }
    let engine = &lab.server.engine;
    for entry in engine.directory.topics() {
        let topic = (*entry.topic).clone();
        engine.put_topic(Topic { edge: None, ..topic }).await.unwrap();
    }
    let reached = async || {
        let list = lab.edge("GET", "/topics", None).await.expect(200).body;
        let names = list.as_array().unwrap().iter().map(|one| one["name"].clone());
        names.collect::<Vec<_>>()
    };
    assert_eq!(reached().await, Vec::<Value>::new());
    adopt_earlier_topics(&lab.server).await.unwrap();
    assert_eq!(reached().await, ["module"]);
    let kept = |name: &str| engine.directory.topic(name).unwrap().topic.edge;
    assert_eq!(
        ["module", "mixed", "managed", "bare"].map(kept),
        [Some(true), Some(false), None, None]
    );
    // Decided once: later changes of the subscriptions have no effect.
    let path = format!("{}/eventSubscriptions/azure", arm("mixed"));
    lab.arm("DELETE", &path, None).await.expect(202);
    adopt_earlier_topics(&lab.server).await.unwrap();
    assert_eq!(reached().await, ["module"]);
}

#[tokio::test]
async fn an_address_that_guesses_the_edge_key_has_to_wait() {
    let unguessable = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    for (key, after_guesses) in [(KEY, 429), (unguessable, 200)] {
        let keys = EdgeAccess::Keys([Secret::new(key), Secret::new("")]);
        let lab = ApiTestServer::with(false, |server| {
            server.config.edge = keys;
            server.wall = Arc::new(LabClock);
        })
        .await;
        let with = async |key: &str| ask(&lab, "GET", "/topics", None, &[("aeg-sas-key", key)]).await;
        for _ in 0..10 {
            with("wrong").await.expect(401);
        }
        let refused = with("wrong").await.expect(429);
        assert!(refused.headers.contains_key("retry-after"));
        with(key).await.expect(after_guesses);
        // Other kinds of credentials are counted separately.
        let bearer = [("authorization", "Bearer reader secret")];
        assert_eq!(status(&lab, "GET", "/topics", None, &bearer).await, 200);
    }
}

#[test]
fn a_list_is_made_in_pieces() {
    let check = |count: usize, bytes: usize| {
        let body = |n: usize| format!("\"{n:0bytes$}\"").into_bytes();
        let pieces: Vec<_> = array_pieces((0..count).map(body)).collect();
        let text = pieces.concat();
        let list: Vec<Value> = serde_json::from_slice(&text).unwrap();
        assert_eq!(list.len(), count);
        pieces
    };
    assert_eq!(check(0, 1), ["[]"]);
    assert_eq!(check(2, 1), [r#"["0","1"]"#]);
    let pieces = check(100, 10 << 10);
    assert!(pieces.len() > 20 && pieces.iter().all(|piece| piece.len() < 64 << 10));
}
