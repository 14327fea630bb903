//! Requests of real clients, and the examples of Azure's specification.

use super::test_server::{ACCOUNT, ApiTestServer};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const RECORDED: &str = include_str!("../../../../../../tests/data/arm/subscription-requests.json");
const EXAMPLES: &str = include_str!("../../../../../../tests/data/arm/subscription-examples-2022-06-15.json");

async fn lab() -> ApiTestServer {
    let lab = ApiTestServer::new(true).await;
    for topic in ["t1", "mt1", "jt1"] {
        lab.topic(topic).await;
    }
    for domain in ["d1", "md1"] {
        lab.domain(domain, true).await;
    }
    for topic in ["st1", "mst1"] {
        lab.system_topic(topic).await;
    }
    lab
}

/// Whether this server refuses a request that the stand-in accepted when clients were recorded:
/// names that are too short, and destinations that cannot be delivered to yet.
fn is_refused(request: &Value, name: &str) -> bool {
    let kind = &request["body"]["properties"]["destination"]["endpointType"];
    request["method"] == "PUT" && (name.len() < 3 || *kind == "StorageQueue")
}

// Requests of az, azure-mgmt-eventgrid and @azure/arm-eventgrid, in the order in which they were
// sent.
#[tokio::test]
async fn recorded_requests_of_clients() {
    let lab = lab().await;
    let recorded: Vec<Value> = serde_json::from_str(RECORDED).unwrap();
    let mut refused = BTreeSet::new();
    let mut statuses = [0; 6];
    for request in &recorded {
        let text = |name: &str| request[name].as_str().unwrap();
        let what = format!("{} {} ({})", text("method"), text("path"), text("call"));
        let path = format!("{}?{}", text("path"), text("query"));
        let body = request["body"].to_string();
        let body = body
            .replace("{HOOK}", "https://hook/x")
            .replace("http://127.0.0.1:1/x", "https://hook/no");
        let body: Option<Value> = serde_json::from_str(&body).unwrap();
        let got = lab.send(text("method"), &path, body.as_ref(), &[]).await;

        let words: Vec<&str> = text("path").split('/').collect();
        let at = words
            .iter()
            .rposition(|word| word.eq_ignore_ascii_case("eventSubscriptions"))
            .unwrap();
        let name = words.get(at + 1).copied().unwrap_or_default();
        if is_refused(request, name) {
            refused.insert(text("path").to_owned());
            got.expect(400);
            continue;
        }
        let is_gone = refused.contains(text("path"));
        let expected = match (text("method"), request["status"].as_u64().unwrap()) {
            ("GET", _) if is_gone => 404,
            ("DELETE", _) if is_gone => 204,
            // The stand-in deleted at once; this server answers 202, as the cloud does.
            ("DELETE", 200) => 202,
            // The stand-in reported a failed handshake at once; this server reports it in the
            // operation, as the cloud does.
            ("PUT", 400) => {
                assert_eq!(
                    lab.ends(&got).await,
                    ("Failed".into(), "Url validation".into()),
                    "{what}"
                );
                201
            }
            (_, status) => u16::try_from(status).unwrap(),
        };
        assert_eq!(got.status, expected, "{what}: {}", got.body);
        statuses[usize::from(expected / 100)] += 1;
        match (text("method"), expected) {
            ("PUT" | "PATCH", 201) => {
                assert_eq!(got.body["name"], name, "{what}");
                let ended = lab.ends(&got).await.0;
                if request["status"] != 400 {
                    assert_eq!(ended, "Succeeded", "{what}");
                }
            }
            ("GET", 200) if name.is_empty() => assert!(got.body["value"].is_array(), "{what}"),
            ("GET", 200) => check_shape(&got.body, name),
            ("POST", 200) if text("path").ends_with("getFullUrl") => {
                assert!(
                    got.body["endpointUrl"]
                        .as_str()
                        .unwrap()
                        .starts_with("https://hook/x?code="),
                    "{what}"
                );
            }
            ("POST", 200) => assert!(!got.body.to_string().contains("Hidden"), "{what}"),
            _ => {}
        }
    }
    assert!(statuses[2] > 50, "{statuses:?}");
    assert!(refused.len() >= 3, "{refused:?}");
}

/// Members that the clients' models expect of every subscription.
fn check_shape(body: &Value, name: &str) {
    assert_eq!(body["name"], name);
    assert!(body["type"].as_str().unwrap().ends_with("eventSubscriptions"));
    assert_eq!(body["systemData"], Value::Null);
    let properties = &body["properties"];
    assert_eq!(properties["provisioningState"], "Succeeded");
    let destination = &properties["destination"]["properties"];
    assert_eq!(destination["endpointUrl"], Value::Null, "{body}");
    assert!(
        destination["endpointBaseUrl"]
            .as_str()
            .unwrap()
            .starts_with("https://hook/x")
    );
    assert!(
        destination["maxEventsPerBatch"].is_u64() && destination["preferredBatchSizeInKilobytes"].is_u64()
    );
    assert!(properties["retryPolicy"]["maxDeliveryAttempts"].is_u64());
    assert!(properties["filter"]["subjectBeginsWith"].is_string());
    let topic = properties["topic"].as_str().unwrap();
    assert!(
        topic.contains("/providers/microsoft.")
            || topic.contains("/providers/Microsoft.EventGrid/systemTopics/"),
        "{topic}"
    );
    assert!(!body.to_string().contains("s3cr3t"));
}

// az read the subscription, changed one member and sent the rest back as it was shown.
#[tokio::test]
async fn updates_of_az_keep_the_rest() {
    let lab = lab().await;
    let recorded: Vec<Value> = serde_json::from_str(RECORDED).unwrap();
    let of = |method: &str, nth: usize| {
        let full = |request: &&Value| {
            request["method"] == method
                && request["path"]
                    .as_str()
                    .unwrap()
                    .ends_with("topics/t1/providers/Microsoft.EventGrid/eventSubscriptions/full")
        };
        let request = recorded.iter().filter(full).nth(nth).unwrap();
        let body = request["body"].to_string().replace("{HOOK}", "https://hook/x");
        (
            request["path"].as_str().unwrap().to_owned(),
            serde_json::from_str::<Value>(&body).unwrap(),
        )
    };
    let (path, body) = of("PUT", 0);
    let send = async |method: &str, body: Option<Value>| {
        let got = lab.arm(method, &path, body).await;
        if got.status == 201 {
            assert_eq!(lab.ends(&got).await.0, "Succeeded");
        }
        got
    };
    send("PUT", Some(body)).await.expect(201);
    let dead = send("GET", None).await.properties()["deadLetterDestination"].clone();
    assert_eq!(dead["properties"]["blobContainerName"], "dlq");

    send("PATCH", Some(of("PATCH", 0).1)).await.expect(201);
    send("PATCH", Some(of("PATCH", 1).1)).await.expect(201);
    let got = send("GET", None).await.expect(200);
    let properties = got.properties();
    assert_eq!(properties["deadLetterDestination"], dead);
    assert_eq!(properties["labels"], json!(["l3"]));
    assert_eq!(properties["filter"]["includedEventTypes"], json!(["Type.C"]));
    assert_eq!(properties["filter"]["subjectEndsWith"], ".png");
    assert_eq!(
        properties["expirationTimeUtc"].as_str().map(|text| &text[..10]),
        Some("2030-01-01")
    );
    let url = lab
        .arm("POST", &format!("{path}/getFullUrl"), None)
        .await
        .expect(200);
    assert_eq!(url.body["endpointUrl"], "https://hook/x/new");
    let attributes = lab
        .arm("POST", &format!("{path}/getDeliveryAttributes"), None)
        .await
        .expect(200);
    assert_eq!(attributes.body["value"][1]["properties"]["value"], "s3cr3t");
}

// Every example of the specification; none makes the server fail.
#[tokio::test]
async fn examples_of_the_specification() {
    let lab = ApiTestServer::new(false).await;
    for topic in ["exampletopic1", "exampletopic2"] {
        lab.topic(topic).await;
    }
    lab.domain("exampleDomain1", true).await;
    lab.system_topic("exampleSystemTopic1").await;
    let mut examples: Vec<Value> = serde_json::from_str(EXAMPLES).unwrap();
    // Created, changed, read, deleted: in this order most examples find a resource to work on.
    let order = ["PUT", "PATCH", "GET", "POST", "DELETE"];
    examples.sort_by_key(|example| order.iter().position(|method| example["method"] == *method));
    let mut taken = 0;
    for example in &examples {
        let text = |name: &str| example[name].as_str().unwrap();
        let path = text("path")
            .replace("{account}", ACCOUNT)
            .replace("examplerg", "rg1");
        let body = Some(example["body"].clone()).filter(|body| !body.is_null());
        let got = lab.arm(text("method"), &path, body).await;
        let what = format!("{} {}", text("example"), text("method"));
        assert!(got.status < 500, "{what}: {} {}", got.status, got.body);
        if got.status >= 400 {
            assert!(
                !got.error().0.is_empty() && !got.error().1.is_empty(),
                "{what}: {}",
                got.body
            );
        }
        let known: Vec<String> = serde_json::from_value(example["statuses"].clone()).unwrap();
        taken += usize::from(known.contains(&got.status.to_string()));
        let to_web_hook = example["body"]["properties"]["destination"]["endpointType"] == "WebHook";
        if text("method") == "PUT" && to_web_hook {
            assert_eq!(got.status, 201, "{what}: {}", got.body);
        }
    }
    assert!(taken > 35, "{taken} of {}", examples.len());
}
