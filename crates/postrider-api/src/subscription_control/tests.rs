use crate::azure::subscriptions::tests::test_server::{ApiTestServer, GROUP, TestAnswer, web_hook};
use serde_json::{Value, json};

fn id(name: &str) -> String {
    format!(
        "{GROUP}/providers/Microsoft.EventGrid/topics/t1/providers/Microsoft.EventGrid/eventSubscriptions/{name}"
    )
}

async fn post(lab: &ApiTestServer, verb: &str, body: &Value) -> TestAnswer {
    let path = format!("/postrider/v1/subscriptions/{verb}");
    lab.send("POST", &path, Some(body), &[]).await
}

async fn put(lab: &ApiTestServer, name: &str, more: Value) {
    let body = web_hook(&format!("/{name}"), more);
    let made = lab.arm("PUT", &id(name), Some(body)).await;
    assert_eq!(lab.ends(&made).await.0, "Succeeded");
}

async fn state(lab: &ApiTestServer, name: &str) -> Value {
    let path = format!("/postrider/v1/subscription?id={}", id(name));
    lab.send("GET", &path, None, &[]).await.expect(200).body["state"].take()
}

/// Topic `t1` with subscriptions `aaa` and `bbb`, whose webhooks have agreed.
async fn lab() -> ApiTestServer {
    let lab = ApiTestServer::new(true).await;
    lab.topic("t1").await;
    put(&lab, "aaa", json!({})).await;
    put(&lab, "bbb", json!({})).await;
    lab
}

#[tokio::test]
async fn a_pause_is_seen_and_ends() {
    let lab = lab().await;
    let body = json!({"id": id("aaa")});
    let paused = post(&lab, "pause", &body).await.expect(200).body;
    assert_eq!(
        (&paused["state"], &paused["name"]),
        (&json!("paused"), &json!("aaa"))
    );
    assert_eq!(paused["id"], id("aaa"));
    assert!(paused["since"].is_string(), "{paused}");
    // Pausing twice changes nothing.
    assert_eq!(post(&lab, "pause", &body).await.expect(200).body, paused);

    let list = async |state: &str| {
        let path = format!("/postrider/v1/subscriptions?state={state}");
        let list = lab.send("GET", &path, None, &[]).await.expect(200).body;
        let all = list["value"].as_array().unwrap().clone();
        all.iter().map(|one| one["name"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(list("paused").await, ["aaa"]);
    assert_eq!(list("admitting").await, ["bbb"]);

    for _ in 0..2 {
        let resumed = post(&lab, "resume", &body).await.expect(200).body;
        assert_eq!(
            (&resumed["state"], &resumed["since"]),
            (&json!("admitting"), &Value::Null)
        );
    }
    assert!(list("paused").await.is_empty());
}

#[tokio::test]
async fn it_is_named_shortly_too() {
    let lab = lab().await;
    post(&lab, "pause", &json!({"id": "t1/aaa"})).await.expect(200);
    assert_eq!(state(&lab, "aaa").await, "paused");
    let nested = format!("{GROUP}/providers/Microsoft.EventGrid/topics/T1/eventSubscriptions/AAA");
    post(&lab, "resume", &json!({"id": nested})).await.expect(200);
    assert_eq!(state(&lab, "aaa").await, "admitting");
}

#[tokio::test]
async fn whoever_changes_the_rest_leaves_it_paused() {
    let lab = lab().await;
    let got = async || lab.arm("GET", &id("aaa"), None).await.expect(200);
    let before = got().await;
    post(&lab, "pause", &json!({"id": id("aaa")})).await.expect(200);
    // The management API does not show pauses, so ETags stay valid.
    let after = got().await;
    assert_eq!(after.body, before.body);
    assert_eq!(after.header("etag"), before.header("etag"));

    put(&lab, "aaa", json!({"labels": ["changed"]})).await;
    assert_eq!(got().await.body["properties"]["labels"], json!(["changed"]));
    assert_eq!(state(&lab, "aaa").await, "paused");
    let patch = json!({"labels": ["again"]});
    let patched = lab.arm("PATCH", &id("aaa"), Some(patch)).await;
    assert_eq!(lab.ends(&patched).await.0, "Succeeded");
    assert_eq!(got().await.body["properties"]["labels"], json!(["again"]));
    assert_eq!(state(&lab, "aaa").await, "paused");

    // A subscription that is created again is not paused.
    lab.arm("DELETE", &id("aaa"), None).await.expect(202);
    post(&lab, "resume", &json!({"id": id("aaa")})).await.expect(404);
    put(&lab, "aaa", json!({})).await;
    assert_eq!(state(&lab, "aaa").await, "admitting");
}

#[tokio::test]
async fn asking_an_endpoint_that_is_well_changes_nothing() {
    let lab = lab().await;
    let shown = post(&lab, "probe", &json!({"id": id("aaa")}))
        .await
        .expect(200)
        .body;
    assert_eq!(
        (&shown["state"], &shown["attempts"]),
        (&json!("admitting"), &json!(0))
    );
}

#[tokio::test]
async fn one_whose_webhook_has_not_agreed_is_not_there_yet() {
    let lab = lab().await;
    let body = web_hook("/never", json!({}));
    lab.arm("PUT", &id("asked"), Some(body)).await.expect(201);
    let refused = post(&lab, "pause", &json!({"id": id("asked")}))
        .await
        .expect(409)
        .body;
    assert_eq!(refused["field"], "id");
    assert!(
        refused["detail"].as_str().unwrap().contains("webhook"),
        "{refused}"
    );
    // A pending handshake does not hide the subscription in force.
    let body = web_hook("/never", json!({"labels": ["new"]}));
    lab.arm("PUT", &id("aaa"), Some(body)).await.expect(201);
    post(&lab, "pause", &json!({"id": id("aaa")})).await.expect(200);
    assert_eq!(state(&lab, "aaa").await, "paused");
}

#[tokio::test]
async fn nonsense_is_refused_by_name() {
    let lab = lab().await;
    for verb in ["pause", "resume", "probe"] {
        let check = async |body: Value, status: u16, field: Value| {
            let got = post(&lab, verb, &body).await;
            assert_eq!(
                (got.status, &got.body["field"]),
                (status, &field),
                "{verb} {body}: {}",
                got.body
            );
            assert_eq!(got.header("content-type"), "application/problem+json");
        };
        check(json!({}), 400, json!("id")).await;
        check(json!({"id": 7}), 400, json!("id")).await;
        check(json!({"id": ""}), 400, json!("id")).await;
        check(json!({"id": id("nobody")}), 404, json!("id")).await;
        check(json!({"id": "/../.."}), 404, json!("id")).await;
        check(json!({"id": id("aaa"), "until": "tomorrow"}), 400, Value::Null).await;
        check(json!([]), 400, Value::Null).await;
        let path = format!("/postrider/v1/subscriptions/{verb}");
        let got = lab.send("GET", &path, None, &[]).await.expect(405);
        assert_eq!(got.header("allow"), "POST");
        let nobody = [("authorization", "Bearer x")];
        let body = json!({"id": id("aaa")});
        lab.send("POST", &path, Some(&body), &nobody).await.expect(401);
    }
    let path = "/postrider/v1/subscriptions/stop";
    lab.send("POST", path, Some(&json!({})), &[]).await.expect(404);
    assert_eq!(state(&lab, "aaa").await, "admitting");
}
