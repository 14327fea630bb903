//! Event subscriptions as Azure's management clients create and change them, their effect, and
//! their state after a crash. Handshakes have tests of their own.

use crate::client::HttpTestAnswer;
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};

const ACCOUNT: &str = "/subscriptions/00000000-0000-0000-0000-000000000001";
const GROUP: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1";
const VERSION: &str = "api-version=2022-06-15";
const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";

fn grid(rest: &str) -> String {
    format!("{GROUP}/providers/Microsoft.EventGrid/{rest}")
}

fn extension(scope: &str, name: &str) -> String {
    format!("{scope}/providers/Microsoft.EventGrid/eventSubscriptions/{name}")
}

fn arm(server: &TestServer, method: &str, path: &str, body: &Value) -> HttpTestAnswer {
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    let mark = if path.contains('?') { '&' } else { '?' };
    let path = format!("{path}{mark}{VERSION}");
    server.send(method, &path, &[JSON, ("authorization", "Bearer hush")], body)
}

#[track_caller]
fn get(server: &TestServer, path: &str) -> Value {
    arm(server, "GET", path, &Value::Null).expect(200).json()
}

#[track_caller]
fn make(server: &TestServer, resource: &str) {
    arm(server, "PUT", &grid(resource), &json!({"location": "westus2"})).expect(201);
}

/// Sends a request and waits until its operation has succeeded.
#[track_caller]
fn done(server: &TestServer, method: &str, path: &str, body: &Value) {
    let answer = arm(server, method, path, body).expect(201);
    let url = answer.header("azure-asyncoperation").expect("it can be watched");
    let operation = url[url.find("/subscriptions/").expect("it has a path")..].to_owned();
    let status = wait::until("the operation ends", || {
        let answer = server.send("GET", &operation, &[("authorization", "Bearer hush")], "");
        let status = answer.expect(200).json()["status"].take();
        (status != "InProgress").then_some(status)
    });
    assert_eq!(status, "Succeeded", "{method} {path}");
}

fn web_hook(url: &str, more: Value) -> Value {
    let mut properties =
        json!({"destination": {"endpointType": "WebHook", "properties": {"endpointUrl": url}}});
    for (name, value) in more.as_object().expect("properties") {
        properties[name] = value.clone();
    }
    json!({ "properties": properties })
}

/// A receiver that completes handshakes, refuses requests to `/bad`, and accepts everything else.
fn receiver() -> TestReceiver {
    TestReceiver::answering(|delivery| match delivery.header("aeg-event-type") {
        Some("SubscriptionValidation") => {
            let code = &delivery.json()[0]["data"]["validationCode"];
            let body = json!({ "validationResponse": code }).to_string();
            let length = body.len();
            ScriptedReply::Bytes(
                format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes(),
            )
        }
        _ if delivery.path.starts_with("/bad") => ScriptedReply::Status(400),
        _ => ScriptedReply::Status(200),
    })
}

/// The next delivery of events; skips handshakes and notices.
#[track_caller]
fn next_event(receiver: &TestReceiver) -> ReceivedDelivery {
    loop {
        let delivery = receiver.next();
        if delivery.header("aeg-event-type") == Some("Notification") {
            return delivery;
        }
    }
}

fn publish(server: &TestServer, path: &str, resource: &str, events: &[Value]) {
    let keys = arm(
        server,
        "POST",
        &format!("{}/listKeys", grid(resource)),
        &Value::Null,
    );
    let key = keys.expect(200).json()["key1"]
        .as_str()
        .expect("a key")
        .to_owned();
    let path = format!("{path}/api/events?api-version=2018-01-01");
    let events = json!(events).to_string();
    server
        .send("POST", &path, &[JSON, ("aeg-sas-key", &key)], events)
        .expect(200);
}

#[test]
fn changes_hold_for_the_next_event_and_survive_a_crash() {
    let receiver = receiver();
    let mut server = ServerSetup::config(CLIENT).start();
    make(&server, "topics/orders");
    let path = extension(&grid("topics/orders"), "billing");
    let attribute =
        json!({"name": "X-Key", "type": "Static", "properties": {"value": "hunter2", "isSecret": true}});
    let mut body = web_hook(&receiver.url("/first?code=1"), json!({"labels": ["l"]}));
    body["properties"]["destination"]["properties"]["deliveryAttributeMappings"] = json!([attribute]);
    done(&server, "PUT", &path, &body);
    publish(&server, "/topics/orders", "topics/orders", &[event("a")]);
    let delivery = next_event(&receiver);
    assert_eq!(
        (delivery.path.as_str(), delivery.header("x-key")),
        ("/first?code=1", Some("hunter2"))
    );

    // az sends back what it was shown, which lacks the URL.
    let shown = get(&server, &path);
    let destination = &shown["properties"]["destination"];
    assert_eq!(destination["properties"]["endpointUrl"], Value::Null);
    let patch = json!({"destination": destination, "filter": {"subjectBeginsWith": "/nothing"}});
    done(&server, "PATCH", &path, &patch);
    publish(&server, "/topics/orders", "topics/orders", &[event("filtered")]);
    done(
        &server,
        "PATCH",
        &path,
        &json!({"filter": {"subjectBeginsWith": ""}}),
    );
    publish(&server, "/topics/orders", "topics/orders", &[event("b")]);
    let delivery = next_event(&receiver);
    assert_eq!(delivery.ids(), ["b"]);
    assert_eq!(
        (delivery.path.as_str(), delivery.header("x-key")),
        ("/first?code=1", Some("hunter2"))
    );

    let answer = arm(&server, "GET", &path, &Value::Null).expect(200);
    let (before, tag) = (answer.json(), answer.header("etag").expect("a tag").to_owned());
    server.kill();
    server.start();
    let answer = arm(&server, "GET", &path, &Value::Null).expect(200);
    assert_eq!(
        (answer.json(), answer.header("etag")),
        (before, Some(tag.as_str()))
    );
    publish(&server, "/topics/orders", "topics/orders", &[event("c")]);
    assert_eq!(next_event(&receiver).header("x-key"), Some("hunter2"));

    arm(&server, "DELETE", &path, &Value::Null).expect(202);
    server.kill();
    server.start();
    arm(&server, "GET", &path, &Value::Null).expect(404);
}

#[test]
fn two_views_of_one_catalogue() {
    let receiver = receiver();
    let server = ServerSetup::config(CLIENT).start();
    server.put_topic("orders");
    server.subscribe(
        "orders",
        "by-edge",
        &receiver.url("/edge"),
        json!({"labels": ["edge"]}),
    );
    let list = get(
        &server,
        &format!("{ACCOUNT}/providers/Microsoft.EventGrid/eventSubscriptions"),
    );
    let id = list["value"][0]["id"].as_str().expect("an id").to_owned();
    assert_eq!(list["value"][0]["properties"]["labels"], json!(["edge"]));

    done(&server, "PATCH", &id, &json!({"labels": ["azure"]}));
    let path = "/topics/orders/eventSubscriptions/by-edge";
    let edge = server.edge("GET", path, &Value::Null).expect(200).json();
    assert_eq!(edge["properties"]["labels"], json!(["azure"]));
    assert_eq!(
        edge["properties"]["destination"]["properties"]["endpointUrl"],
        receiver.url("/edge")
    );

    let other = id.replace("by-edge", "by-azure");
    done(
        &server,
        "PUT",
        &other,
        &web_hook(&receiver.url("/azure"), json!({})),
    );
    let edge = server
        .edge("GET", "/topics/orders/eventSubscriptions", &Value::Null)
        .expect(200)
        .json();
    let names: Vec<_> = edge
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| one["name"].clone())
        .collect();
    assert_eq!(names, ["by-edge", "by-azure"]);
    // Without a credential the edge API leaves alone what the management API made.
    server
        .edge(
            "DELETE",
            "/topics/orders/eventSubscriptions/by-azure",
            &Value::Null,
        )
        .expect(403);
    arm(&server, "DELETE", &other, &Value::Null).expect(202);
    server.unsubscribe("orders", "by-edge");
    arm(&server, "GET", &id, &Value::Null).expect(404);
}

#[test]
fn domains_route_to_the_topics_inside() {
    let receiver = receiver();
    let server = ServerSetup::config(CLIENT).start();
    make(&server, "domains/shop");
    let inside = grid("domains/shop/topics/tenant-a");
    done(
        &server,
        "PUT",
        &extension(&inside, "alone"),
        &web_hook(&receiver.url("/inside"), json!({})),
    );
    let whole = format!("{}/eventSubscriptions/whole", grid("domains/shop"));
    done(
        &server,
        "PUT",
        &whole,
        &web_hook(&receiver.url("/whole"), json!({})),
    );
    assert_eq!(get(&server, &inside)["name"], "tenant-a");

    let of = |id: &str, topic: &str| {
        let mut event = event(id);
        event["topic"] = json!(topic);
        event
    };
    publish(
        &server,
        "/domains/shop",
        "domains/shop",
        &[of("a", "tenant-a"), of("b", "tenant-b")],
    );
    let mut got: Vec<(String, String)> = (0..3)
        .map(|_| next_event(&receiver))
        .map(|delivery| (delivery.path.clone(), delivery.ids().remove(0)))
        .collect();
    got.sort();
    let expected = [("/inside", "a"), ("/whole", "a"), ("/whole", "b")];
    assert_eq!(got, expected.map(|(path, id)| (path.to_owned(), id.to_owned())));

    // The domain topic was created with its first subscription and is deleted with the last.
    arm(&server, "DELETE", &extension(&inside, "alone"), &Value::Null).expect(202);
    arm(&server, "GET", &inside, &Value::Null).expect(404);
}

// The documents' own example: a subscription on a storage account is notified when dead letters are
// written there.
#[test]
fn storage_accounts_tell_of_dead_letters() {
    let receiver = receiver();
    let server = ServerSetup::test_clock(CLIENT).start();
    make(&server, "topics/orders");
    let account = format!("{GROUP}/providers/Microsoft.Storage/storageAccounts/local");
    let told = extension(&account, "told");
    let mut body = web_hook(&receiver.url("/told"), json!({}));
    let properties = &mut body["properties"]["destination"]["properties"];
    properties["maxEventsPerBatch"] = json!(1000);
    properties["preferredBatchSizeInKilobytes"] = json!(512);
    done(&server, "PUT", &told, &body);
    let shown = get(&server, &told);
    let types = json!(["Microsoft.Storage.BlobCreated", "Microsoft.Storage.BlobDeleted"]);
    assert_eq!(shown["properties"]["filter"]["includedEventTypes"], types);

    let dead = json!({"endpointType": "StorageBlob", "properties": {"resourceId": account, "blobContainerName": "dead"}});
    let more = json!({"deadLetterDestination": dead, "postrider": {"profile": "cloud-2021"}});
    let failing = extension(&grid("topics/orders"), "failing");
    done(&server, "PUT", &failing, &web_hook(&receiver.url("/bad"), more));
    assert_eq!(
        get(&server, &failing)["properties"]["postrider"],
        json!({"profile": "cloud-2021"})
    );
    publish(&server, "/topics/orders", "topics/orders", &[event("a")]);
    assert_eq!(next_event(&receiver).path, "/bad");
    // Dead letters wait five minutes to be written together.
    server.advance(&json!({"by": "300s"}));
    let delivery = next_event(&receiver);
    assert_eq!(delivery.path, "/told");
    let event = &delivery.json()[0];
    assert_eq!(event["eventType"], "Microsoft.Storage.BlobCreated");
    assert_eq!(event["topic"], account);
    assert_eq!(get(&server, &grid("systemTopics"))["value"], json!([]));
}
