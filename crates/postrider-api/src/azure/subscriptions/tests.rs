mod conflict;
mod fuzz;
mod in_force;
pub(crate) mod test_server;
mod model;
mod replay;

use serde_json::{Value, json};
use test_server::{ApiTestServer, GROUP, TestAnswer, web_hook};

const T1: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1/providers/Microsoft.EventGrid/topics/t1";

fn extension(scope: &str, name: &str) -> String {
    format!("{scope}/providers/Microsoft.EventGrid/eventSubscriptions/{name}")
}

fn none() -> Value {
    json!({})
}

#[tokio::test]
async fn one_object_in_two_spellings() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    let scope = extension(T1, "Sub");
    let made = lab
        .arm(
            "PUT",
            &scope,
            Some(web_hook("/x?code=1", json!({"labels": ["l"]}))),
        )
        .await
        .expect(201);
    assert_eq!(made.properties()["provisioningState"], "Creating");
    assert_eq!(made.header("retry-after"), "0");
    assert!(
        made.header("azure-asyncoperation")
            .contains("/locations/westus2/operationsStatus/")
    );
    assert_eq!(lab.ends(&made).await.0, "Succeeded");

    let nested = T1.replace("topics/t1", "TOPICS/T1/eventsubscriptions/sUB");
    let got = lab.arm("GET", &nested, None).await.expect(200);
    assert_eq!(got.body["id"], format!("{T1}/eventSubscriptions/Sub"));
    assert_eq!(got.body["type"], "Microsoft.EventGrid/topics/eventSubscriptions");
    let got = lab.arm("GET", &scope, None).await.expect(200);
    assert_eq!(got.body["id"], scope);
    assert_eq!(got.body["type"], "Microsoft.EventGrid/eventSubscriptions");
    assert_eq!(got.properties()["provisioningState"], "Succeeded");
    assert_eq!(
        got.properties()["destination"]["properties"]["endpointUrl"],
        Value::Null
    );
    let url = lab
        .arm("POST", &format!("{nested}/GETFULLURL"), None)
        .await
        .expect(200);
    assert_eq!(url.body, json!({"endpointUrl": "https://hook/x?code=1"}));

    let changed = lab
        .arm("PATCH", &nested, Some(json!({"labels": ["m"]})))
        .await
        .expect(201);
    assert_eq!(changed.properties()["provisioningState"], "Updating");
    assert_eq!(changed.body["name"], "Sub");
    assert_eq!(
        lab.arm("GET", &scope, None).await.properties()["labels"],
        json!(["m"])
    );
    // The edge API shows the same subscription.
    let edge = lab
        .edge("GET", "/topics/t1/eventSubscriptions/Sub", None)
        .await
        .expect(200);
    assert_eq!(
        edge.properties()["destination"]["properties"]["endpointUrl"],
        "https://hook/x?code=1"
    );

    let deleted = lab.arm("DELETE", &nested, None).await.expect(202);
    assert!(deleted.header("location").contains("/operationResults/"));
    assert_eq!(lab.ends(&deleted).await.0, "Succeeded");
    lab.arm("DELETE", &scope, None).await.expect(204);
    let gone = lab.arm("GET", &scope, None).await.expect(404);
    let message = "The Resource 'Microsoft.EventGrid/topics/t1/eventSubscriptions/Sub' under resource group 'rg1' was not found.";
    assert_eq!(gone.error(), ("ResourceNotFound", message));
}

#[tokio::test]
async fn default_types_of_groups_and_accounts() {
    let lab = ApiTestServer::new(false).await;
    let account = "/subscriptions/00000000-0000-0000-0000-000000000001";
    let expected: Vec<String> = ["Write", "Delete", "Action"]
        .iter()
        .flat_map(|verb| {
            ["Success", "Failure", "Cancel"].map(|end| format!("Microsoft.Resources.Resource{verb}{end}"))
        })
        .collect();
    for scope in [GROUP, account] {
        let path = extension(scope, "sub");
        let put = async |more: Value| {
            lab.arm("PUT", &path, Some(web_hook("/x", more)))
                .await
                .expect(201)
        };
        let types = |got: &TestAnswer| got.properties()["filter"]["includedEventTypes"].clone();
        assert_eq!(types(&put(none()).await), json!(expected), "{scope}");
        let got = lab.arm("GET", &path, None).await.expect(200);
        assert_eq!(types(&got), json!(expected), "{scope}");
        let own = json!({"filter": {"includedEventTypes": ["Microsoft.Resources.ResourceWriteSuccess"]}});
        assert_eq!(
            types(&put(own.clone()).await),
            own["filter"]["includedEventTypes"]
        );
    }
    // A resource of another provider declares no event types.
    let other = extension(
        &format!("{GROUP}/providers/Microsoft.EventHub/namespaces/n"),
        "sub",
    );
    let got = lab
        .arm("PUT", &other, Some(web_hook("/x", none())))
        .await
        .expect(201);
    assert_eq!(got.properties().get("filter"), None);
}

// `properties.topic` is in lower case except on system topics.
#[tokio::test]
async fn system_topics_keep_their_casing() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    lab.system_topic("sys").await;
    let system = format!("{GROUP}/providers/Microsoft.EventGrid/systemTopics/sys");
    let path = format!("{system}/eventSubscriptions/sub");
    let made = lab
        .arm("PUT", &path, Some(web_hook("/x", none())))
        .await
        .expect(201);
    assert_eq!(made.properties()["topic"], json!(system));
    assert_eq!(
        lab.arm("GET", &path, None).await.properties()["topic"],
        json!(system)
    );
    let path = extension(T1, "sub");
    let made = lab
        .arm("PUT", &path, Some(web_hook("/x", none())))
        .await
        .expect(201);
    let lower = T1.replace("Microsoft.EventGrid", "microsoft.eventgrid");
    assert_eq!(made.properties()["topic"], json!(lower));
    for nothing in [none(), json!({"properties": {}})] {
        let refused = lab.arm("PATCH", &path, Some(nothing)).await.expect(400);
        assert_eq!(refused.error().0, "InvalidRequest");
    }
}

// As recorded from the real service: `eventDeliverySchema` stays, everything else that is left out
// is removed.
#[tokio::test]
async fn a_put_keeps_the_delivery_schema_and_nothing_else() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    let path = extension(T1, "sub");
    let put = async |more: Value| {
        let made = lab.arm("PUT", &path, Some(web_hook("/x", more))).await;
        made.expect(201).properties().clone()
    };
    let get = async || lab.arm("GET", &path, None).await.expect(200).properties().clone();
    let sent = json!({"eventDeliverySchema": "CloudEventSchemaV1_0", "labels": ["l"],
        "filter": {"subjectBeginsWith": "/a", "includedEventTypes": ["A"]}, "retryPolicy": {"maxDeliveryAttempts": 3}});
    assert_eq!(put(sent).await["eventDeliverySchema"], "CloudEventSchemaV1_0");

    let defaults = json!({"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": 1440});
    let answer = put(none()).await;
    assert_eq!(answer.get("eventDeliverySchema"), None);
    assert_eq!(
        (&answer["labels"], &answer["retryPolicy"]),
        (&Value::Null, &defaults)
    );
    let shown = get().await;
    assert_eq!(shown["eventDeliverySchema"], "CloudEventSchemaV1_0");
    assert_eq!(
        (&shown["labels"], &shown["retryPolicy"]),
        (&Value::Null, &defaults)
    );
    assert_eq!(
        shown["filter"],
        json!({"subjectBeginsWith": "", "subjectEndsWith": ""})
    );
    put(json!({"eventDeliverySchema": null})).await;
    assert_eq!(get().await["eventDeliverySchema"], "CloudEventSchemaV1_0");
    put(json!({"eventDeliverySchema": "EventGridSchema"})).await;
    assert_eq!(get().await["eventDeliverySchema"], "EventGridSchema");
}

#[tokio::test]
async fn webhooks_are_asked_first() {
    let lab = ApiTestServer::new(true).await;
    lab.topic("t1").await;
    let path = extension(T1, "sub");
    let put = async |hook: &str, label: &str| lab_put(&lab, &path, hook, label).await;

    // Refused by the webhook: no subscription exists afterwards.
    let refused = put("/no", "a").await;
    assert_eq!(refused.properties()["provisioningState"], "Creating");
    assert_eq!(
        lab.ends(&refused).await,
        ("Failed".into(), "Url validation".into())
    );
    lab.arm("GET", &path, None).await.expect(404);

    // Not answered yet: shown as it will be, and invisible to the other APIs.
    put("/never", "b").await;
    let got = lab.arm("GET", &path, None).await.expect(200);
    assert_eq!(
        (
            &got.properties()["provisioningState"],
            &got.properties()["labels"]
        ),
        (&json!("Creating"), &json!(["b"]))
    );
    assert_eq!(
        lab.arm("GET", &format!("{T1}/eventSubscriptions"), None)
            .await
            .names(),
        ["sub"]
    );
    assert_eq!(lab.arm("GET", &extension(GROUP, ""), None).await.names(), ["sub"]);
    lab.edge("GET", "/topics/t1/eventSubscriptions/sub", None)
        .await
        .expect(404);

    // The last writer wins.
    let agreed = put("/yes", "c").await;
    assert_eq!(agreed.properties()["provisioningState"], "Creating");
    assert_eq!(lab.ends(&agreed).await.0, "Succeeded");
    let got = lab.arm("GET", &path, None).await.expect(200);
    assert_eq!(
        (
            &got.properties()["provisioningState"],
            &got.properties()["labels"]
        ),
        (&json!("Succeeded"), &json!(["c"]))
    );

    // A refused change leaves the subscription as it was.
    let refused = put("/no", "d").await;
    assert_eq!(refused.properties()["provisioningState"], "Updating");
    assert_eq!(lab.ends(&refused).await.0, "Failed");
    let got = lab.arm("GET", &path, None).await.expect(200);
    assert_eq!(
        (
            &got.properties()["provisioningState"],
            &got.properties()["labels"]
        ),
        (&json!("Succeeded"), &json!(["c"]))
    );

    // The webhook wants to be validated manually.
    let later = put("/later", "e").await;
    let mut state = Value::Null;
    for _ in 0..1000 {
        state = lab.arm("GET", &path, None).await.expect(200).body["properties"]["provisioningState"].take();
        if state == "AwaitingManualAction" {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert_eq!(state, "AwaitingManualAction");
    // A change through the edge API during the handshake is kept.
    let body = web_hook("/edge", json!({"labels": ["f"]}));
    lab.edge("PUT", "/topics/t1/eventSubscriptions/sub", Some(body))
        .await
        .expect(200);
    assert_eq!(lab.ends(&later).await.0, "Canceled");
    let got = lab.arm("GET", &path, None).await.expect(200);
    assert_eq!(
        (
            &got.properties()["provisioningState"],
            &got.properties()["labels"]
        ),
        (&json!("Succeeded"), &json!(["f"]))
    );

    // Deleting the subscription cancels the handshake too.
    let waiting = put("/never", "g").await;
    lab.arm("DELETE", &path, None).await.expect(202);
    assert_eq!(lab.ends(&waiting).await.0, "Canceled");
    lab.arm("GET", &path, None).await.expect(404);
}

async fn lab_put(lab: &ApiTestServer, path: &str, hook: &str, label: &str) -> TestAnswer {
    lab.arm("PUT", path, Some(web_hook(hook, json!({"labels": [label]}))))
        .await
        .expect(201)
}

#[tokio::test]
async fn what_it_hangs_on_must_be_there() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    lab.domain("open", true).await;
    lab.domain("shut", false).await;
    let check = async |scope: &str, named: &str| {
        let path = extension(scope, "sub");
        for (method, body) in [
            ("GET", None),
            ("PUT", Some(web_hook("/x", none()))),
            ("PATCH", Some(none())),
        ] {
            let refused = lab.arm(method, &path, body).await.expect(404);
            let (code, message) = refused.error();
            assert_eq!(code, "ResourceNotFound", "{method} {scope}");
            assert!(message.contains(named), "{method} {scope}: {message}");
        }
        lab.arm("DELETE", &path, None).await.expect(204);
    };
    let grid = |rest: &str| format!("{GROUP}/providers/Microsoft.EventGrid/{rest}");
    check(&grid("topics/nosuch"), "Microsoft.EventGrid/topics/nosuch").await;
    check(&grid("domains/nosuch"), "Microsoft.EventGrid/domains/nosuch").await;
    check(
        &grid("domains/nosuch/topics/x1y"),
        "Microsoft.EventGrid/domains/nosuch",
    )
    .await;
    check(
        &grid("systemTopics/nosuch"),
        "Microsoft.EventGrid/systemTopics/nosuch",
    )
    .await;
    check(&grid("domains/shut/topics/x1y"), "domains/shut/topics/x1y").await;
    check(
        &grid("topics/t1").replace("rg1", "rg2"),
        "Microsoft.EventGrid/topics/t1",
    )
    .await;
    check(&grid("namespaces/n"), "namespaces/n").await;
    let storage = |name: &str| format!("{GROUP}/providers/Microsoft.Storage/storageAccounts/{name}");
    check(&storage("nosuch"), "Microsoft.Storage/storageAccounts/nosuch").await;
    check(&storage("devstoreaccount1/blobServices/default"), "blobServices").await;
    check(&format!("{GROUP}/nonsense/x"), "nonsense").await;

    // The first subscription creates the domain topic, and deleting the last one deletes it.
    let scope = grid("domains/open/topics/x1y");
    let list = format!("{scope}/eventSubscriptions");
    lab.arm("GET", &list, None).await.expect(404);
    lab.arm("PUT", &extension(&scope, "sub"), Some(web_hook("/x", none())))
        .await
        .expect(201);
    assert_eq!(lab.arm("GET", &list, None).await.expect(200).names(), ["sub"]);
    let got = lab.arm("GET", &format!("{list}/sub"), None).await.expect(200);
    assert_eq!(
        got.body["type"],
        "Microsoft.EventGrid/domains/topics/eventSubscriptions"
    );
    lab.arm("DELETE", &format!("{list}/sub"), None).await.expect(202);
    lab.arm("GET", &list, None).await.expect(404);
}

#[tokio::test]
async fn resources_of_other_providers() {
    let lab = ApiTestServer::new(true).await;
    let storage = format!("{GROUP}/providers/Microsoft.Storage/storageAccounts/devstoreaccount1");
    let path = extension(&storage, "sub");
    let made = lab
        .arm("PUT", &path, Some(web_hook("/x", none())))
        .await
        .expect(201);
    let types = json!(["Microsoft.Storage.BlobCreated", "Microsoft.Storage.BlobDeleted"]);
    assert_eq!(made.properties()["filter"]["includedEventTypes"], types);
    assert_eq!(lab.ends(&made).await.0, "Succeeded");
    let got = lab
        .arm(
            "GET",
            &path.to_uppercase().replace("SUBSCRIPTIONS", "subscriptions"),
            None,
        )
        .await;
    assert_eq!(
        got.expect(200).properties()["filter"]["includedEventTypes"],
        types
    );
    let directory = &lab.server.engine.directory;
    assert!(directory.scope_by_source(&storage).is_some());
    assert!(directory.topics().is_empty() && directory.system_topics().is_empty());

    let hub = format!("{GROUP}/providers/Microsoft.EventHub/namespaces/n");
    for scope in [GROUP, "/subscriptions/00000000-0000-0000-0000-000000000001", &hub] {
        let made = lab
            .arm("PUT", &extension(scope, "sub"), Some(web_hook("/x", none())))
            .await
            .expect(201);
        assert_eq!(lab.ends(&made).await.0, "Succeeded");
        let got = lab.arm("GET", &extension(scope, "sub"), None).await.expect(200);
        assert_eq!(got.body["id"], extension(scope, "sub"));
        let types = got.properties()["filter"].get("includedEventTypes");
        assert_eq!(types.is_some(), scope != hub, "{scope}");
    }
    // Hidden topics are deleted with their last subscription, or when the handshake of the first
    // one fails.
    for scope in [
        GROUP,
        "/subscriptions/00000000-0000-0000-0000-000000000001",
        &hub,
        &storage,
    ] {
        lab.arm("DELETE", &extension(scope, "sub"), None)
            .await
            .expect(202);
        assert!(directory.scope_by_source(scope).is_none(), "{scope}");
    }
    let refused = lab
        .arm("PUT", &path, Some(web_hook("/no", none())))
        .await
        .expect(201);
    assert_eq!(lab.ends(&refused).await.0, "Failed");
    assert!(directory.scope_by_source(&storage).is_none());
    lab.arm("PUT", &path, Some(web_hook("/never", none())))
        .await
        .expect(201);
    lab.arm("DELETE", &path, None).await.expect(202);
    assert!(directory.scope_by_source(&storage).is_none());
}

#[tokio::test]
async fn lists() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    lab.topic("t2").await;
    lab.domain("dom", true).await;
    lab.system_topic("sys").await;
    let grid = |rest: &str| format!("{GROUP}/providers/Microsoft.EventGrid/{rest}");
    let storage = format!("{GROUP}/providers/Microsoft.Storage/storageAccounts/devstoreaccount1");
    let account = "/subscriptions/00000000-0000-0000-0000-000000000001";
    for (scope, name) in [
        (grid("topics/t1"), "one-b"),
        (grid("topics/t1"), "one-a"),
        (grid("topics/t2"), "two"),
        (grid("domains/dom"), "domain"),
        (grid("domains/dom/topics/inside"), "inside"),
        (grid("systemTopics/sys"), "system"),
        (storage.clone(), "storage"),
        (GROUP.to_owned(), "group"),
        (account.to_owned(), "account"),
        (
            format!("{account}/resourceGroups/rg2/providers/Microsoft.EventHub/namespaces/n"),
            "hub",
        ),
    ] {
        lab.arm("PUT", &extension(&scope, name), Some(web_hook("/x", none())))
            .await
            .expect(201);
    }
    let check = async |path: &str, expected: &[&str]| {
        let names = lab.arm("GET", path, None).await.expect(200).names();
        assert_eq!(names, expected, "in order of creation: {path}");
    };
    for spelling in [
        "/eventSubscriptions",
        "/providers/Microsoft.EventGrid/eventSubscriptions",
    ] {
        check(&format!("{}{spelling}", grid("topics/t1")), &["one-b", "one-a"]).await;
        check(&format!("{}{spelling}", grid("domains/dom")), &["domain"]).await;
        check(
            &format!("{}{spelling}", grid("domains/dom/topics/inside")),
            &["inside"],
        )
        .await;
        check(&format!("{}{spelling}", grid("systemTopics/sys")), &["system"]).await;
    }
    check(
        &format!("{storage}/providers/Microsoft.EventGrid/eventSubscriptions"),
        &["storage"],
    )
    .await;
    let in_group = [
        "one-b", "one-a", "two", "domain", "inside", "system", "storage", "group",
    ];
    let everything: Vec<&str> = in_group.into_iter().chain(["account", "hub"]).collect();
    let of =
        |scope: &str, rest: &str| format!("{scope}/providers/Microsoft.EventGrid/{rest}eventSubscriptions");
    check(&of(account, ""), &everything).await;
    check(&of(GROUP, ""), &in_group).await;
    check(&of(&GROUP.replace("rg1", "RG2"), ""), &["hub"]).await;
    check(
        &of(account, "topicTypes/microsoft.eventgrid.TOPICS/"),
        &["one-b", "one-a", "two"],
    )
    .await;
    check(
        &of(GROUP, "topicTypes/Microsoft.EventGrid.Domains/"),
        &["domain", "inside"],
    )
    .await;
    check(
        &of(account, "topicTypes/Microsoft.Storage.StorageAccounts/"),
        &["system", "storage"],
    )
    .await;
    check(
        &of(account, "topicTypes/Microsoft.EventHub.namespaces/"),
        &["hub"],
    )
    .await;
    check(
        &of(account, "topicTypes/Microsoft.Resources.Subscriptions/"),
        &["account"],
    )
    .await;
    check(
        &of(
            account,
            "locations/West%20US%202/topicTypes/Microsoft.EventGrid.Topics/",
        ),
        &["one-b", "one-a", "two"],
    )
    .await;
    check(&of(account, "locations/global/"), &["group", "account"]).await;
    check(&of(GROUP, "locations/westus2/"), &in_group[..7]).await;
    check(&of(account, "locations/mars/"), &[]).await;
    check(
        &format!(
            "{}?$filter=CONTAINS(name,'one')%20and%20name%20ne%20'ONE-A'",
            of(account, "")
        ),
        &["one-b"],
    )
    .await;

    // Pages neither repeat nor skip subscriptions while others write.
    let mut seen = Vec::new();
    let mut next = Some(format!("{}?$top=3", of(account, "")));
    while let Some(path) = next {
        let got = lab.arm("GET", &path, None).await.expect(200);
        assert!(got.names().len() <= 3);
        seen.extend(got.names());
        let link = got.body["nextLink"].as_str();
        next = link.map(|link| {
            let path = link.strip_prefix("https://localhost").unwrap();
            path.replacen("api-version=2022-06-15&", "", 1)
        });
        let other = format!("new-{}", seen.len());
        lab.arm(
            "PUT",
            &extension(&grid("topics/t2"), &other),
            Some(web_hook("/x", none())),
        )
        .await
        .expect(201);
        if seen.len() > 20 {
            break;
        }
    }
    let before: Vec<_> = seen.iter().filter(|name| !name.starts_with("new-")).collect();
    assert_eq!(before.len(), everything.len(), "{seen:?}");
    let mut unique = seen.clone();
    unique.sort();
    unique.dedup();
    assert_eq!(unique.len(), seen.len(), "{seen:?}");
    lab.arm("GET", &format!("{}?$top=0", of(account, "")), None)
        .await
        .expect(400);
    lab.arm("GET", &format!("{}?$skiptoken=YWJj", of(account, "")), None)
        .await
        .expect(400);
    lab.arm("POST", &of(account, ""), None).await.expect(405);
}

#[tokio::test]
async fn refusals_change_nothing() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    let path = extension(T1, "sub");
    lab.arm(
        "PUT",
        &path,
        Some(web_hook("/x?code=1", json!({"labels": ["l"]}))),
    )
    .await
    .expect(201);
    let before = lab.arm("GET", &path, None).await.expect(200);
    let check = async |method: &str, body: Value, expected: (u16, &str, &str, &str)| {
        let refused = lab.arm(method, &path, Some(body)).await.expect(expected.0);
        assert_eq!(refused.error(), (expected.1, expected.2));
        assert_eq!(
            refused.body["error"]["target"].as_str().unwrap_or_default(),
            expected.3
        );
        assert_eq!(lab.arm("GET", &path, None).await.body, before.body);
    };
    let url = "Invalid event subscription request: Supplied URL is invalid. It cannot be null or empty and should be a \
               proper HTTPS URL like https://www.example.com.";
    let mut masked = web_hook("/x", none());
    masked["properties"]["destination"]["properties"]["endpointUrl"] = Value::Null;
    let field = "properties.destination.properties.endpointUrl";
    check("PUT", masked, (400, "InvalidRequest", url, field)).await;
    check(
        "PATCH",
        json!({"retryPolicy": {"maxDeliveryAttempts": 31}}),
        (
            400,
            "InvalidRequest",
            "Invalid event subscription request: retryPolicy.maxDeliveryAttempts must be between 1 and 30, was 31.",
            "retryPolicy.maxDeliveryAttempts",
        ),
    )
    .await;
    let expired = web_hook("/x", json!({"expirationTimeUtc": "2020-01-01T00:00:00Z"}));
    check(
        "PUT",
        expired,
        (
            400,
            "InvalidRequest",
            "Invalid expiration time.",
            "properties.expirationTimeUtc",
        ),
    )
    .await;
    let nowhere = json!({"endpointType": "StorageBlob", "properties": {
        "resourceId": format!("{GROUP}/providers/Microsoft.Storage/storageAccounts/nosuch"), "blobContainerName": "dead"}});
    check(
        "PUT",
        web_hook("/x", json!({ "deadLetterDestination": nowhere })),
        (
            400,
            "InvalidRequest",
            "Invalid event subscription request: properties.deadLetterDestination.properties.resourceId names storage \
             account \"nosuch\", which is not configured; configured are devstoreaccount1.",
            "properties.deadLetterDestination.properties.resourceId",
        ),
    )
    .await;
    let refused = lab
        .arm("PUT", &extension(T1, "a.b"), Some(web_hook("/x", none())))
        .await
        .expect(400);
    assert_eq!(
        refused.error().1,
        "Invalid event subscription request: name must have 3 to 64 letters, digits or '-', was \"a.b\"."
    );
    for (method, body) in [("PUT", ""), ("PUT", "{"), ("PATCH", "[]")] {
        let path = format!("{path}?api-version=2022-06-15");
        let raw: Value = serde_json::from_str(body).unwrap_or(Value::String(body.into()));
        let got = lab
            .send(method, &path, Some(&raw).filter(|_| !body.is_empty()), &[])
            .await;
        assert_eq!(got.status, 400, "{method} {body}");
    }
    lab.arm("POST", &path, None).await.expect(405);
    lab.arm("GET", &format!("{path}/getFullUrl"), None)
        .await
        .expect(405);
    lab.arm("POST", &format!("{path}/nosuch"), None).await.expect(404);

    // Readers do not see secrets.
    let reader = [("authorization", "Bearer reader secret")];
    lab.arm_with("GET", &path, None, &reader).await.expect(200);
    for action in ["getFullUrl", "getDeliveryAttributes"] {
        lab.arm_with("POST", &format!("{path}/{action}"), None, &reader)
            .await
            .expect(403);
    }
    lab.arm_with("DELETE", &path, None, &reader).await.expect(403);
    lab.arm_with("GET", &path, None, &[("authorization", "Bearer nobody")])
        .await
        .expect(401);
}

#[tokio::test]
async fn there_is_room_for_so_many() {
    let lab = ApiTestServer::new(false).await;
    lab.domain("dom", true).await;
    let domain = format!("{GROUP}/providers/Microsoft.EventGrid/domains/dom");
    for i in 0..50 {
        let path = format!("{domain}/eventSubscriptions/sub-{i}");
        lab.arm("PUT", &path, Some(web_hook("/x", none())))
            .await
            .expect(201);
    }
    let refused = lab
        .arm("PUT", &extension(&domain, "sub-50"), Some(web_hook("/x", none())))
        .await
        .expect(409);
    assert!(
        refused.error().1.starts_with("Quota limit reached."),
        "{:?}",
        refused.error()
    );
    // Changing a subscription does not count against the quota, and domain topics have quotas of
    // their own.
    lab.arm("PUT", &extension(&domain, "sub-0"), Some(web_hook("/y", none())))
        .await
        .expect(201);
    let inside = format!("{domain}/topics/inside/eventSubscriptions/sub");
    lab.arm("PUT", &inside, Some(web_hook("/x", none())))
        .await
        .expect(201);
}

#[tokio::test]
async fn etags() {
    let lab = ApiTestServer::new(true).await;
    lab.topic("t1").await;
    let path = extension(T1, "sub");
    let body = |label: &str| Some(web_hook("/x", json!({"labels": [label]})));
    let star = [("if-match", "*")];
    lab.arm_with("PUT", &path, body("a"), &star).await.expect(412);
    lab.arm("GET", &path, None).await.expect(404);
    let fresh = [("if-none-match", "*")];
    let made = lab.arm_with("PUT", &path, body("a"), &fresh).await.expect(201);
    lab.ends(&made).await;
    lab.arm_with("PUT", &path, body("b"), &fresh).await.expect(412);
    let first = lab.arm("GET", &path, None).await.expect(200);
    let first = first.header("etag").to_owned();
    assert_eq!(first, made.header("etag"));
    let changed = lab
        .arm_with(
            "PATCH",
            &path,
            Some(json!({"labels": ["b"]})),
            &[("if-match", &first)],
        )
        .await
        .expect(201);
    lab.ends(&changed).await;
    for (method, body) in [
        ("PUT", body("c")),
        ("PATCH", Some(json!({"labels": ["c"]}))),
        ("DELETE", None),
    ] {
        lab.arm_with(method, &path, body, &[("if-match", &first)])
            .await
            .expect(412);
    }
    let got = lab.arm("GET", &path, None).await.expect(200);
    assert_eq!(got.properties()["labels"], json!(["b"]));
    lab.arm_with("DELETE", &path, None, &[("if-match", got.header("etag"))])
        .await
        .expect(202);
}

// Many writers each read, add a label of their own and write, until their precondition holds. No
// label is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_with_etags_lose_nothing() {
    let lab = ApiTestServer::new(false).await;
    lab.topic("t1").await;
    let path = extension(T1, "sub");
    lab.arm("PUT", &path, Some(web_hook("/x", none())))
        .await
        .expect(201);
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..6 {
        let (lab, path) = (lab.clone(), path.clone());
        writers.spawn(async move {
            let mut refused = 0;
            for turn in 0..5 {
                loop {
                    let got = lab.arm("GET", &path, None).await.expect(200);
                    let mut labels = got.properties()["labels"].as_array().cloned().unwrap_or_default();
                    labels.push(json!(format!("{writer}-{turn}")));
                    let patch = Some(json!({ "labels": labels }));
                    let tag = [("if-match", got.header("etag"))];
                    match lab.arm_with("PATCH", &path, patch, &tag).await.status {
                        201 => break,
                        412 => refused += 1,
                        other => panic!("{other}"),
                    }
                }
            }
            refused
        });
    }
    let refused: usize = writers.join_all().await.into_iter().sum();
    let got = lab.arm("GET", &path, None).await.expect(200);
    let labels = got.properties()["labels"].as_array().unwrap();
    let mut unique: Vec<_> = labels.iter().map(Value::to_string).collect();
    unique.sort();
    unique.dedup();
    assert_eq!(
        (labels.len(), unique.len()),
        (30, 30),
        "{refused} were refused: {labels:?}"
    );
}
