use crate::azure::subscriptions::tests::test_server::{ACCOUNT, ApiTestServer, GROUP, TestAnswer, web_hook};
use serde_json::{Value, json};

async fn get(lab: &ApiTestServer, path: &str) -> TestAnswer {
    let path = format!("/postrider/v1/{path}");
    lab.send("GET", &path, None, &[]).await
}

fn id(topic: &str, name: &str) -> String {
    format!(
        "{GROUP}/providers/Microsoft.EventGrid/{topic}/providers/Microsoft.EventGrid/eventSubscriptions/{name}"
    )
}

/// Topic `t1` with subscriptions `aaa` and `bbb`, and domain `dom` with subscription `aaa` on its
/// topic `inside`.
async fn lab() -> ApiTestServer {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    lab.domain("dom", true).await;
    for (topic, name) in [
        ("topics/t1", "aaa"),
        ("topics/t1", "bbb"),
        ("domains/dom/topics/inside", "aaa"),
    ] {
        let body = web_hook(&format!("/{name}?code=hidden"), json!({}));
        let made = lab.arm("PUT", &id(topic, name), Some(body)).await.expect(201);
        assert_eq!(lab.ends(&made).await.0, "Succeeded");
    }
    lab
}

fn names(list: &Value) -> Vec<&str> {
    let list = list.as_array().unwrap();
    list.iter().map(|one| one["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn the_server_says_what_it_is() {
    let got = get(&lab().await, "server").await.expect(200);
    assert_eq!(got.body["azure"]["subscription"], ACCOUNT);
    assert_eq!(got.body["azure"]["resourceGroup"], "rg1");
    assert_eq!(got.body["recorder"], json!({"enabled": false}));
    assert_eq!(got.body["testClock"], false);
    let profiles = got.body["profiles"].as_array().unwrap();
    assert!(profiles.contains(&json!("cloud-2021")));
    assert_eq!(got.header("cache-control"), "no-store");
}

#[tokio::test]
async fn what_is_counted_is_shown() {
    let lab = lab().await;
    let got = get(&lab, "stats").await.expect(200).body;
    let totals = [
        "published",
        "publishRefused",
        "matched",
        "unmatched",
        "delivered",
        "attempts",
        "attemptsFailed",
        "deadLettered",
        "dropped",
        "pending",
    ];
    for name in totals {
        assert_eq!(got["totals"][name], 0, "{name}");
    }
    assert_eq!(got["sick"], json!([]));
    let well = json!({"status": "well", "text": "All well", "count": 0, "subscriptions": []});
    assert_eq!(got["verdict"], well);
    let none = json!({"publishedPerSec": 0.0, "deliveredPerSec": 0.0, "failedPerSec": 0.0});
    assert_eq!(got["rates"], none);
    assert_eq!(got["latencyMs"], Value::Null);
    let mut topics = names(&got["topics"]);
    topics.sort_unstable();
    assert_eq!(topics, ["dom", "t1"]);
    assert_eq!(names(&got["subscriptions"]).len(), 3);

    let keys = lab
        .arm(
            "POST",
            &format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1/listKeys"),
            None,
        )
        .await
        .expect(200);
    let key = keys.body["key1"].as_str().unwrap();
    let event = json!([{"id": "1", "subject": "s", "eventType": "T", "eventTime": "2026-01-01T00:00:00Z",
        "dataVersion": "", "data": {}}]);
    let headers = [("aeg-sas-key", key), ("content-type", "application/json")];
    let path = "/topics/t1/api/events";
    lab.send("POST", path, Some(&event), &headers).await.expect(200);
    lab.send("POST", path, Some(&event), &[("aeg-sas-key", "wrong")])
        .await
        .expect(401);
    let got = get(&lab, "stats?topics=T1&top=1").await.expect(200).body;
    assert_eq!(got["totals"]["published"], 1);
    assert_eq!(got["totals"]["publishRefused"], 1);
    assert_eq!(got["totals"]["matched"], 2);
    assert_eq!(names(&got["topics"]), ["t1"]);
    let topic = &got["topics"][0];
    assert_eq!((&topic["published"], &topic["refused"]), (&json!(1), &json!(1)));
    assert_eq!(
        topic["resourceId"],
        format!("{GROUP}/providers/Microsoft.EventGrid/topics/t1")
    );
    assert_eq!(names(&got["subscriptions"]).len(), 1);
    assert_eq!(get(&lab, "stats?top=0").await.body["subscriptions"], json!([]));
    assert!(
        got["rates"]["publishedPerSec"].as_f64() > Some(0.0),
        "{}",
        got["rates"]
    );
    assert!(topic["publishedPerSec"].as_f64() > Some(0.0), "{topic}");
    let series = async |query: &str| {
        get(&lab, &format!("stats/series?minutes=2{query}"))
            .await
            .expect(200)
            .body
    };
    for (query, published) in [("", 1), ("&topic=T1", 1), ("&topic=dom", 0)] {
        let found = series(query).await;
        // The next minute may have begun since.
        let counts = found["published"].as_array().unwrap().iter();
        assert_eq!(
            counts.map(|n| n.as_u64().unwrap()).sum::<u64>(),
            published,
            "{query}"
        );
        assert_eq!(found["stepSeconds"], 60);
        assert_eq!(found["delivered"].as_array().map(Vec::len), Some(2));
    }
    assert_eq!(series("&subscription=bbb").await["published"], Value::Null);
}

#[tokio::test]
async fn subscriptions_are_found_and_shown_without_secrets() {
    let lab = lab().await;
    let list = async |query: &str| get(&lab, &format!("subscriptions{query}")).await.expect(200).body;
    let all = list("").await;
    assert_eq!(all["total"], 3);
    assert_eq!(
        names(&all["value"]),
        ["aaa", "bbb", "aaa"],
        "in order of creation"
    );
    let page = list("?top=1&skip=2").await;
    assert_eq!((&page["total"], names(&page["value"])), (&json!(3), vec!["aaa"]));
    assert_eq!(list("?skip=99").await["value"], json!([]));
    assert_eq!(names(&list("?topic=t1").await["value"]), ["aaa", "bbb"]);
    assert_eq!(names(&list("?topic=DOM").await["value"]), ["aaa"]);
    assert_eq!(names(&list("?q=HOOK/b").await["value"]), ["bbb"]);
    assert_eq!(list("?health=failing").await["total"], 0);
    assert_eq!(list("?health=IDLE&state=&top=1").await["total"], 3);
    assert_eq!(list("?state=delayed").await["total"], 0);
    assert_eq!(list("?state=admitting&topic=&q=").await["total"], 3);

    let encoded = id("domains/dom/topics/inside", "aaa").replace('/', "%2F");
    let one = get(&lab, &format!("subscription?id={encoded}")).await.expect(200);
    assert!(!String::from_utf8_lossy(&one.bytes).contains("hidden"));
    let one = one.body;
    assert_eq!(one["id"], id("domains/dom/topics/inside", "aaa"));
    assert_eq!(
        (&one["topic"], &one["domainTopic"]),
        (&json!("dom"), &json!("inside"))
    );
    assert_eq!(one["endpoint"], "https://hook/aaa");
    assert_eq!(one["state"], "admitting");
    assert_eq!((&one["health"], &one["reasons"]), (&json!("idle"), &json!([])));
    assert_eq!(one["resource"]["id"], one["id"]);
    assert_eq!(one["resource"]["properties"]["provisioningState"], "Succeeded");
    for count in [
        "waiting",
        "retrying",
        "deadLettersPending",
        "delivered",
        "attempts",
        "failed",
        "deadLettered",
        "dropped",
    ] {
        assert_eq!(one[count], 0, "{count}");
    }
}

#[test]
fn the_verdict_names_the_worst_first_and_counts_all() {
    let one = |name: &str, health: &str, count: u64| json!({"name": name, "id": name, "topic": "t", "health": health, "reasons": [{"count": count}], "delivered": 1});
    let told = |examined: Vec<Value>, missing: &[&str]| {
        let missing: Vec<String> = missing.iter().map(|node| (*node).to_owned()).collect();
        super::verdict(examined, &missing)
    };
    let some = vec![
        one("a", "attention", 50),
        one("b", "healthy", 0),
        one("c", "failing", 1),
        one("d", "failing", 9),
    ];
    let found = told(some, &[]);
    assert_eq!(names(&found["subscriptions"]), ["d", "c", "a"]);
    assert_eq!(
        (&found["status"], &found["text"], &found["count"]),
        (
            &json!("attention"),
            &json!("3 subscriptions need attention"),
            &json!(3)
        )
    );
    assert_eq!(found["subscriptions"][0].get("delivered"), None);
    let many = (0..60).map(|n| one(&n.to_string(), "attention", n)).collect();
    let found = told(many, &[]);
    assert_eq!(
        (&found["count"], names(&found["subscriptions"]).len()),
        (&json!(60), 50)
    );
    // Missing information counts as a problem.
    let found = told(Vec::new(), &["n2"]);
    assert_eq!(
        (&found["status"], &found["text"]),
        (&json!("attention"), &json!("1 node did not answer"))
    );
}

#[tokio::test]
async fn a_subscription_is_seen_while_its_webhook_is_asked() {
    let lab = ApiTestServer::new(true).await;
    lab.topic("t1").await;
    let path = id("topics/t1", "asked");
    let body = web_hook("/never", json!({}));
    lab.arm("PUT", &path, Some(body)).await.expect(201);
    let got = get(&lab, &format!("subscription?id={path}"))
        .await
        .expect(200)
        .body;
    assert_eq!(got["resource"]["properties"]["provisioningState"], "Creating");
    assert_eq!(
        (&got["endpoint"], &got["attempts"]),
        (&json!("https://hook/never"), &json!(0))
    );
    // A subscription with a pending handshake gets no events, so it is not listed.
    assert_eq!(get(&lab, "subscriptions").await.body["total"], 0);
}

#[tokio::test]
async fn nonsense_is_refused_by_name() {
    let lab = lab().await;
    let check = async |path: &str, status: u16, field: Value| {
        let got = get(&lab, path).await;
        assert_eq!(
            (got.status, &got.body["field"]),
            (status, &field),
            "{path}: {}",
            got.body
        );
        assert_eq!(got.header("content-type"), "application/problem+json");
    };
    check("subscriptions?state=sick", 400, json!("state")).await;
    check("subscriptions?health=sick", 400, json!("health")).await;
    check("subscriptions?top=1001", 400, json!("top")).await;
    check("subscriptions?skip=-1", 400, json!("skip")).await;
    check("subscriptions?topic=nobody", 404, json!("topic")).await;
    check("subscriptions?topic=%2F..%2F", 404, json!("topic")).await;
    check("stats/series?minutes=0", 400, json!("minutes")).await;
    check("stats/series?minutes=1441", 400, json!("minutes")).await;
    check("stats/series?minutes=181&topic=t1", 400, json!("minutes")).await;
    check("stats/series?topic=nobody", 404, json!("topic")).await;
    check("stats/series?subscription=nobody", 404, json!("subscription")).await;
    check("stats/series?subscription=bbb&topic=t1", 400, json!("topic")).await;
    check("stats/series?metric=x", 400, Value::Null).await;
    check("stats/series/x", 404, Value::Null).await;
    check("subscription", 400, json!("id")).await;
    check("subscription?id=aaa", 400, json!("id")).await;
    check("subscription?id=%00%ff%2F", 404, json!("id")).await;
    check("subscription?id=/subscriptions/other/x", 404, json!("id")).await;
    check("server?x=1", 400, Value::Null).await;
    check("stats/none", 404, Value::Null).await;
    check("server/x/y/z/a/b/c", 404, Value::Null).await;
    let post = lab
        .send("POST", "/postrider/v1/stats", None, &[])
        .await
        .expect(405);
    assert_eq!(post.header("allow"), "GET");
    let nobody = [("authorization", "Bearer x")];
    for path in [
        "server",
        "stats",
        "subscriptions",
        "subscription",
        "events",
        "events/x",
    ] {
        let path = format!("/postrider/v1/{path}");
        lab.send("GET", &path, None, &nobody).await.expect(401);
    }
}
