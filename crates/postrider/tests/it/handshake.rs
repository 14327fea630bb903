//! Handshakes with webhooks of subscriptions made through the Azure management API, before they get
//! events.

use crate::client::HttpTestAnswer;
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const GROUP: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1";
const VERSION: &str = "api-version=2022-06-15";
const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n\
                      [[client]]\nid = \"eye\"\nsecret = \"glance\"\nrole = \"reader\"\n";
const HANDSHAKES: &str = "/postrider/v1/handshakes";

fn call(server: &TestServer, method: &str, path: &str, body: &Value) -> HttpTestAnswer {
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    server.send(method, path, &[JSON, ("authorization", "Bearer hush")], body)
}

fn topic_id() -> String {
    format!("{GROUP}/providers/Microsoft.EventGrid/topics/orders")
}

fn subscription_id(name: &str) -> String {
    format!(
        "{}/providers/Microsoft.EventGrid/eventSubscriptions/{name}",
        topic_id()
    )
}

fn subscription_path(name: &str) -> String {
    format!("{}?{VERSION}", subscription_id(name))
}

fn started(setup: ServerSetup) -> TestServer {
    let server = setup.start();
    let path = format!("{}?{VERSION}", topic_id());
    call(&server, "PUT", &path, &json!({"location": "westus2"})).expect(201);
    server
}

fn body(url: &str, schema: &str) -> Value {
    json!({"properties": {
        "destination": {"endpointType": "WebHook", "properties": {
            "endpointUrl": url,
            "deliveryAttributeMappings": [
                {"name": "x-open", "type": "Static", "properties": {"value": "seen", "isSecret": false}},
                {"name": "x-key", "type": "Static", "properties": {"value": "hunter2", "isSecret": true}},
            ],
        }},
        "eventDeliverySchema": schema,
    }})
}

/// Creates a subscription; returns the path of its operation.
#[track_caller]
fn subscribe(server: &TestServer, name: &str, url: &str, schema: &str) -> String {
    let answer = call(server, "PUT", &subscription_path(name), &body(url, schema)).expect(201);
    let url = answer.header("azure-asyncoperation").expect("it can be watched");
    let start = url.find("/subscriptions/").expect("it has a path");
    url[start..].to_owned()
}

/// Final state of an operation.
#[track_caller]
fn ended(server: &TestServer, operation: &str) -> Value {
    wait::until("the operation ends", || {
        let state = call(server, "GET", operation, &Value::Null).expect(200).json();
        (state["status"] != "InProgress").then_some(state)
    })
}

fn provisioning(server: &TestServer, name: &str) -> Value {
    let answer = call(server, "GET", &subscription_path(name), &Value::Null);
    match answer.status {
        404 => Value::Null,
        _ => answer.expect(200).json()["properties"]["provisioningState"].clone(),
    }
}

fn publish(server: &TestServer, id: &str) {
    let path = "/topics/orders/api/events?api-version=2018-01-01";
    let keys = call(
        server,
        "POST",
        &format!("{}/listKeys?{VERSION}", topic_id()),
        &Value::Null,
    );
    let key = keys.expect(200).json()["key1"].as_str().unwrap().to_owned();
    let events = json!([event(id)]).to_string();
    server
        .send("POST", path, &[JSON, ("aeg-sas-key", &key)], events)
        .expect(200);
}

fn ok(headers: &str, body: &str) -> ScriptedReply {
    let length = body.len();
    ScriptedReply::Bytes(
        format!("HTTP/1.1 200 OK\r\n{headers}content-length: {length}\r\n\r\n{body}").into_bytes(),
    )
}

/// Completes handshakes, and accepts events.
fn willing(delivery: &ReceivedDelivery) -> ScriptedReply {
    if delivery.method == "OPTIONS" {
        return ok("WebHook-Allowed-Origin: *\r\nWebHook-Allowed-Rate: *\r\n", "");
    }
    match delivery.header("aeg-event-type") {
        Some("SubscriptionValidation") => {
            let code = &delivery.json()[0]["data"]["validationCode"];
            ok("", &json!({"ValidationResponse": code}).to_string())
        }
        _ => ScriptedReply::Status(200),
    }
}

/// Path and query of a validation URL for this server.
fn visit_path(url: &str) -> String {
    let start = url
        .find("/eventsubscriptions/")
        .unwrap_or_else(|| panic!("{url}"));
    url[start..].to_owned()
}

#[test]
fn a_willing_webhook_is_asked_and_then_gets_events() {
    let receiver = TestReceiver::answering(willing);
    let server = started(ServerSetup::config(CLIENT));
    for (schema, name) in [("EventGridSchema", "plain"), ("CloudEventSchemaV1_0", "cloud")] {
        let operation = subscribe(&server, name, &receiver.url("/in?code=s3cret"), schema);
        assert_eq!(ended(&server, &operation)["status"], "Succeeded");
        assert_eq!(provisioning(&server, name), "Succeeded");
        let asked = receiver.next();
        assert_eq!(asked.path, "/in?code=s3cret");
        assert_eq!(asked.header("x-open"), Some("seen"));
        assert_eq!(asked.header("x-key"), Some("hunter2"));
        if schema == "EventGridSchema" {
            assert_eq!(asked.method, "POST");
            assert_eq!(asked.header("aeg-subscription-name"), Some("PLAIN"));
            let event = &asked.json()[0];
            assert_eq!(event["topic"], json!(topic_id()));
            assert_eq!(
                event["eventType"],
                "Microsoft.EventGrid.SubscriptionValidationEvent"
            );
            let url = event["data"]["validationUrl"].as_str().unwrap();
            let start = format!("http://{}/eventsubscriptions/plain/validate?id=", server.http);
            assert!(url.starts_with(&start), "{url}");
        } else {
            assert_eq!(asked.method, "OPTIONS");
            assert_eq!(
                asked.header("webhook-request-origin"),
                Some("eventgrid.azure.net")
            );
            assert!(asked.header("webhook-request-callback").is_some());
        }
    }
    publish(&server, "e1");
    let types: BTreeSet<_> = [receiver.next(), receiver.next()]
        .iter()
        .map(|delivery| delivery.header("content-type").unwrap().to_owned())
        .collect();
    assert_eq!(types.len(), 2, "{types:?}");

    // A deletion is notified as well, once.
    call(&server, "DELETE", &subscription_path("plain"), &Value::Null);
    let notice = receiver.next();
    assert_eq!(notice.header("aeg-event-type"), Some("SubscriptionDeletion"));
    let event = &notice.json()[0];
    assert_eq!(
        event["data"]["eventSubscriptionId"],
        json!(subscription_id("plain"))
    );
    let topic = format!("{}?{VERSION}", topic_id());
    call(&server, "DELETE", &topic, &Value::Null);
    let notice = receiver.next();
    assert_eq!(notice.header("aeg-event-type"), Some("SubscriptionDeletion"));
    assert_eq!(
        notice.json()["type"],
        "Microsoft.EventGrid.SubscriptionDeletedEvent"
    );
}

#[test]
fn nothing_is_delivered_to_a_webhook_that_refuses() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(404));
    let server = started(ServerSetup::config(CLIENT));
    for (schema, page) in [
        (
            "EventGridSchema",
            "POST request failed with response code NotFound. For troublehooting, visit https://aka.ms/esvalidation.",
        ),
        (
            "CloudEventSchemaV1_0",
            "OPTIONS request failed with response code NotFound. For troublehooting, visit https://aka.ms/esvalidationcloudevent.",
        ),
    ] {
        let operation = subscribe(&server, "audit", &receiver.url("/in?code=s3cret"), schema);
        let state = ended(&server, &operation);
        assert_eq!(state["status"], "Failed");
        assert_eq!(state["error"]["code"], "Url validation");
        let message = state["error"]["message"].as_str().unwrap();
        let start = format!(
            "Webhook validation handshake failed for {}. Http ",
            receiver.url("/in")
        );
        assert!(message.starts_with(&start) && message.contains(page), "{message}");
        assert!(!message.contains("s3cret"), "{message}");
        assert_eq!(provisioning(&server, "audit"), Value::Null);
        receiver.next();
    }
    // A second webhook gets the event; by then the refusing one would have got it, too.
    let witness = TestReceiver::answering(willing);
    let operation = subscribe(&server, "witness", &witness.url("/"), "EventGridSchema");
    assert_eq!(ended(&server, &operation)["status"], "Succeeded");
    witness.next();
    publish(&server, "e1");
    assert_eq!(witness.next().ids(), ["e1"]);
    assert_eq!(server.health()["deliveries"]["matched"], 1);
    assert_eq!(receiver.take_received().len(), 0);
}

#[test]
fn a_visit_to_the_url_validates() {
    let receiver = TestReceiver::answering(|delivery| match delivery.header("aeg-event-type") {
        Some("Notification") => ScriptedReply::Status(200),
        _ => ok("", ""),
    });
    let server = started(ServerSetup::config(CLIENT));
    for (schema, name, method) in [
        ("EventGridSchema", "plain", "GET"),
        ("CloudEventSchemaV1_0", "cloud", "POST"),
    ] {
        let operation = subscribe(&server, name, &receiver.url("/in"), schema);
        let asked = receiver.next();
        let url = match asked.header("webhook-request-callback") {
            Some(url) => url.to_owned(),
            None => asked.json()[0]["data"]["validationUrl"]
                .as_str()
                .unwrap()
                .to_owned(),
        };
        wait::until("it waits for a visit", || {
            (provisioning(&server, name) == "AwaitingManualAction").then_some(())
        });
        let path = visit_path(&url);
        let (head, token) = path.rsplit_once("token=").unwrap();
        let stranger = |method: &str, path: &str| server.send(method, path, &[], "");
        stranger("GET", &format!("{head}token=guess")).expect(404);
        stranger("GET", head.trim_end_matches('&')).expect(400);
        stranger("GET", &path.replace(name, "other")).expect(404);
        assert_eq!(stranger("HEAD", &path).status, 405, "a look is not a visit");
        stranger("PUT", &path).expect(405);
        assert_eq!(provisioning(&server, name), "AwaitingManualAction");
        assert_eq!(server.health()["handshakes"]["underWay"], 1);
        let state = call(&server, "GET", &operation, &Value::Null).expect(200).json();
        assert_eq!(state["status"], "InProgress");

        let visited = stranger(method, &path).expect(200);
        assert_eq!(visited.json()["subscription"], name);
        assert_eq!(visited.header("cache-control"), Some("no-store"));
        assert_eq!(ended(&server, &operation)["status"], "Succeeded");
        assert_eq!(provisioning(&server, name), "Succeeded");
        let again = stranger(method, &path).expect(409).json();
        assert_eq!(again["error"]["code"], "AlreadyValidated");
        assert!(!again.to_string().contains(token));
    }
    publish(&server, "e1");
    assert_eq!(receiver.next().header("aeg-event-type"), Some("Notification"));
}

#[test]
fn time_ends_the_wait_and_restarts_do_not() {
    let receiver = TestReceiver::answering(|_| ok("", ""));
    let mut server = started(ServerSetup::test_clock(CLIENT));
    let operation = subscribe(&server, "audit", &receiver.url("/in"), "EventGridSchema");
    let path = visit_path(
        receiver.next().json()[0]["data"]["validationUrl"]
            .as_str()
            .unwrap(),
    );
    wait::until("it waits for a visit", || {
        (provisioning(&server, "audit") == "AwaitingManualAction").then_some(())
    });
    server.advance(&json!({"by": "4m59s"}));
    assert_eq!(provisioning(&server, "audit"), "AwaitingManualAction");
    server.kill();
    server.start();
    assert_eq!(provisioning(&server, "audit"), "AwaitingManualAction");
    let state = call(&server, "GET", &operation, &Value::Null).expect(200).json();
    assert_eq!(state["status"], "InProgress");
    server.advance(&json!({"by": "2s"}));
    let state = ended(&server, &operation);
    assert_eq!(state["status"], "Failed");
    let message = state["error"]["message"].as_str().unwrap();
    assert!(message.contains("(within 5 minutes)"), "{message}");
    assert_eq!(provisioning(&server, "audit"), Value::Null);
    let late = server.send("GET", &path, &[], "").expect(410).json();
    assert_eq!(late["error"]["code"], "ValidationFailed");
}

#[test]
fn a_silent_webhook_is_asked_three_times_on_the_tests_clock() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Silence);
    let server = started(ServerSetup::test_clock(CLIENT));
    let operation = subscribe(&server, "audit", &receiver.url("/in"), "EventGridSchema");
    let first = receiver.next();
    let start = server.now();
    for expected in [35, 70] {
        let (now, attempts) = server.advance(&json!({"toNextAttempt": true, "settle": "100ms"}));
        assert_eq!((now.since(start).as_secs(), attempts), (expected, 1));
        let again = receiver.next();
        let code = |asked: &ReceivedDelivery| asked.json()[0]["data"]["validationCode"].clone();
        assert_eq!(code(&again), code(&first));
    }
    server.advance(&json!({"by": "31s", "settle": "100ms"}));
    assert_eq!(ended(&server, &operation)["status"], "Failed");
    assert_eq!(receiver.take_received().len(), 0);
}

#[test]
fn handshakes_can_be_looked_at_and_repeated() {
    let status = Arc::new(Mutex::new(500_u16));
    let told = status.clone();
    let receiver = TestReceiver::answering(move |delivery| match *told.lock().unwrap() {
        200 => willing(delivery),
        other => ScriptedReply::Bytes(
            format!(
                "HTTP/1.1 {other} No\r\nset-cookie: crumbs\r\nx-why: broken\r\ncontent-length: 4\r\n\r\nwhy?"
            )
            .into_bytes(),
        ),
    });
    let mut server = started(ServerSetup::config(CLIENT));
    let operation = subscribe(
        &server,
        "Audit",
        &receiver.url("/in?code=s3cret"),
        "EventGridSchema",
    );
    ended(&server, &operation);
    // A failed handshake survives a restart.
    server.kill();
    server.start();
    server.send("GET", HANDSHAKES, &[], "").expect(401);
    let listed = call(
        &server,
        "GET",
        &format!("{HANDSHAKES}?state=failed&subscription=audit"),
        &Value::Null,
    );
    let listed = listed.expect(200).json();
    assert_eq!(listed["count"], 1);
    let one = &listed["value"][0];
    assert_eq!(one["subscription"], json!(subscription_id("Audit")));
    assert_eq!(one["endpoint"], json!(receiver.url("/in")));
    assert_eq!((&one["state"], &one["asked"]), (&json!("failed"), &json!(1)));
    let path = format!("{HANDSHAKES}/{}", one["operation"].as_str().unwrap());
    let shown = call(&server, "GET", &path, &Value::Null).expect(200);
    for secret in ["s3cret", "hunter2", "crumbs", "token="] {
        assert!(!shown.text().contains(secret), "{secret} in {}", shown.text());
    }
    let shown = shown.json();
    let exchange = &shown["transcript"][0];
    assert_eq!(
        (&exchange["method"], &exchange["url"]),
        (&json!("POST"), &json!(receiver.url("/in")))
    );
    assert_eq!(exchange["answer"]["status"], 500);
    assert_eq!(exchange["answer"]["body"], "why?");
    let headers = exchange["answer"]["headers"].as_array().unwrap();
    assert!(
        headers.contains(&json!({"name": "x-why", "value": "broken"})),
        "{headers:?}"
    );
    for (query, field) in [("state=odd", "state"), ("limit=0", "limit"), ("limit=x", "limit")] {
        let answer = call(&server, "GET", &format!("{HANDSHAKES}?{query}"), &Value::Null).expect(400);
        assert_eq!(answer.json()["field"], field);
    }
    call(&server, "GET", &format!("{HANDSHAKES}?colour=red"), &Value::Null).expect(400);
    call(&server, "GET", &format!("{HANDSHAKES}/nothing"), &Value::Null).expect(404);
    call(&server, "DELETE", &path, &Value::Null).expect(405);

    let repeat = format!("{path}/repeat");
    server
        .send("POST", &repeat, &[("authorization", "Bearer glance")], "")
        .expect(403);
    *status.lock().unwrap() = 200;
    let begun = call(&server, "POST", &repeat, &Value::Null).expect(202).json();
    let seen = |operation: &str| {
        call(&server, "GET", &format!("{HANDSHAKES}/{operation}"), &Value::Null)
            .expect(200)
            .json()
    };
    let again = begun["operation"].as_str().unwrap();
    let state = wait::until("it ends", || {
        let state = seen(again)["state"].as_str().unwrap().to_owned();
        (state != "asking").then_some(state)
    });
    assert_eq!(state, "succeeded");
    assert_eq!(provisioning(&server, "audit"), "Succeeded");
    call(
        &server,
        "POST",
        &format!("{HANDSHAKES}/{again}/repeat"),
        &Value::Null,
    )
    .expect(409);

    // Handshakes on request, with either result.
    let ask = |id: &str| call(&server, "POST", HANDSHAKES, &json!({"subscription": id}));
    for (answer, expected) in [(200, "succeeded"), (503, "failed")] {
        *status.lock().unwrap() = answer;
        let begun = ask(&subscription_id("audit")).expect(202).json();
        assert_eq!(begun["trial"], true);
        let operation = begun["operation"].as_str().unwrap();
        let state = wait::until("it ends", || {
            let state = seen(operation)["state"].as_str().unwrap().to_owned();
            (state != "asking").then_some(state)
        });
        assert_eq!(state, expected);
        assert_eq!(provisioning(&server, "audit"), "Succeeded");
    }
    assert_eq!(
        ask(&subscription_id("other")).expect(404).json()["field"],
        "subscription"
    );
    ask("nonsense").expect(404);
    call(&server, "POST", HANDSHAKES, &json!({"subscription": 7})).expect(400);
    call(&server, "POST", HANDSHAKES, &json!({"sub": "x"})).expect(400);
}

#[test]
fn a_failed_update_leaves_what_is_in_force() {
    let receiver = TestReceiver::answering(|delivery| match delivery.path.as_str() {
        "/good" => willing(delivery),
        _ => ScriptedReply::Status(500),
    });
    let server = started(ServerSetup::config(CLIENT));
    let operation = subscribe(&server, "audit", &receiver.url("/good"), "EventGridSchema");
    assert_eq!(ended(&server, &operation)["status"], "Succeeded");
    let operation = subscribe(&server, "audit", &receiver.url("/bad"), "EventGridSchema");
    assert_eq!(ended(&server, &operation)["status"], "Failed");
    assert_eq!(provisioning(&server, "audit"), "Succeeded");
    receiver.take_received();
    publish(&server, "e1");
    assert_eq!(receiver.next().path, "/good");
}

#[test]
fn without_validation_nobody_is_asked_or_told() {
    let receiver = TestReceiver::start();
    let server = started(ServerSetup::config(format!(
        "validation.enabled = false\n{CLIENT}"
    )));
    let operation = subscribe(&server, "audit", &receiver.url("/in"), "EventGridSchema");
    assert_eq!(ended(&server, &operation)["status"], "Succeeded");
    publish(&server, "e1");
    assert_eq!(receiver.next().header("aeg-event-type"), Some("Notification"));
    call(&server, "DELETE", &subscription_path("audit"), &Value::Null);
    receiver.nothing_within(Duration::from_millis(300));
}
