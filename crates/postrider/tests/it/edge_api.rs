//! The edge module's REST API: resources, answers, errors.

use crate::client::HttpTestAnswer;
use crate::receiver::TestReceiver;
use crate::server::{EDGE_VERSION, JSON, ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::time::Duration;

const MODULE: &str = "/iotHubs/postrider/devices/local/modules/eventgridmodule";

/// Message of an error in the module's format.
#[track_caller]
fn refused(answer: HttpTestAnswer, status: u16, code: &str) -> String {
    let answer = answer.expect(status);
    assert_eq!(
        answer.header("content-type"),
        Some("application/json; charset=utf-8")
    );
    let body = answer.json();
    let message = body["error"]["details"]["message"]
        .as_str()
        .expect("details is an object with a message")
        .to_owned();
    let expected =
        json!({"error": {"code": status.to_string(), "details": {"code": code, "message": message}}});
    assert_eq!(body, expected);
    message
}

fn web_hook(url: &str) -> Value {
    json!({"endpointType": "WebHook", "properties": {"endpointUrl": url}})
}

#[test]
fn topics_are_made_shown_listed_and_deleted() {
    let server = TestServer::start_plain();
    let shown = |name: &str, schema: &str| {
        json!({
            "id": format!("{MODULE}/topics/{name}"),
            "name": name,
            "type": "Microsoft.EventGrid/topics",
            "properties": {
                "endpoint": format!("http://{}/topics/{name}/events?{EDGE_VERSION}", server.http),
                "inputSchema": schema,
            },
        })
    };
    assert_eq!(
        server.edge("GET", "/topics", &Value::Null).expect(200).json(),
        json!([])
    );
    let made = server
        .edge("PUT", "/topics/orders", &Value::Null)
        .expect(200)
        .json();
    assert_eq!(made, shown("orders", "EventGridSchema"));
    for (name, spelled, schema) in [
        ("clouds", "CloudEventSchemaV1_0", "CloudEventSchemaV1_0"),
        ("things", "CustomEventSchema", "CustomEventSchema"),
        ("alias1", "CustomSchema", "CustomEventSchema"),
        ("alias2", "customEventSchema", "CustomEventSchema"),
    ] {
        let body = json!({"Name": name, "Properties": {"InputSchema": spelled}});
        let made = server
            .edge("PUT", &format!("/topics/{name}"), &body)
            .expect(200)
            .json();
        assert_eq!(made, shown(name, schema));
    }
    assert_eq!(
        server.edge("GET", "/topics/clouds", &Value::Null).json(),
        shown("clouds", "CloudEventSchemaV1_0")
    );
    let list = server.edge("GET", "/topics", &Value::Null).expect(200).json();
    let names: Vec<_> = list
        .as_array()
        .expect("a bare array")
        .iter()
        .map(|t| t["name"].clone())
        .collect();
    assert_eq!(names, ["orders", "clouds", "things", "alias1", "alias2"]);

    let deleted = server.edge("DELETE", "/topics/clouds", &Value::Null).expect(200);
    assert_eq!(deleted.text(), "");
    refused(
        server.edge("GET", "/topics/clouds", &Value::Null),
        404,
        "TopicNotFound",
    );
    refused(
        server.edge("DELETE", "/topics/clouds", &Value::Null),
        404,
        "TopicNotFound",
    );
}

#[test]
fn subscriptions_echo_what_was_sent_and_what_was_resolved() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let path = "/topics/orders/eventSubscriptions/billing";
    let id = format!("{MODULE}{path}");
    let shown = |properties: Value| json!({"id": id, "name": "billing", "type": "Microsoft.EventGrid/eventSubscriptions", "properties": properties});

    let body = json!({"properties": {"destination": web_hook("http://127.0.0.1:9/a?code=1")}});
    let made = server.edge("PUT", path, &body).expect(200).json();
    let expected = json!({
        "topicName": "orders",
        "eventDeliverySchema": "EventGridSchema",
        "destination": web_hook("http://127.0.0.1:9/a?code=1"),
    });
    assert_eq!(made, shown(expected));

    // All members that the API knows, spelled as in samples.
    let properties = json!({
        "topicName": "orders",
        "eventDeliverySchema": "EventGridSchema",
        "retryPolicy": {"eventExpiryInMinutes": 120, "maxDeliveryAttempts": 50},
        "destination": {
            "endpointType": "WebHook",
            "properties": {"endpointUrl": "http://127.0.0.1:9/b", "maxEventsPerBatch": 10, "preferredBatchSizeInKilobytes": 1033},
        },
        "filter": {
            "subjectBeginsWith": "/a",
            "subjectEndsWith": ".jpg",
            "isSubjectCaseSensitive": true,
            "includedEventTypes": ["A", "B"],
            "advancedFilters": [{"operatorType": "NumberGreaterThan", "key": "data.size", "value": 3}],
        },
    });
    let mut sent = properties.clone();
    sent["persistencePolicy"] = json!({"isPersisted": "true"});
    let sent = json!({"name": "billing", "properties": sent});
    let message = refused(server.edge("PUT", path, &sent), 400, "InvalidRequest");
    assert!(
        message.contains("persistencePolicy cannot be changed"),
        "{message}"
    );
    server.edge("DELETE", path, &Value::Null).expect(200);
    let made = server.edge("PUT", path, &sent).expect(200).json();
    assert_eq!(
        made["properties"]["persistencePolicy"],
        json!({"isPersisted": "true"})
    );
    for (name, value) in properties.as_object().expect("an object") {
        if name != "filter" {
            assert_eq!(made["properties"][name], *value, "{name}");
        }
    }
    let filter = &made["properties"]["filter"];
    assert_eq!(filter["includedEventTypes"], json!(["A", "B"]));
    assert_eq!(filter["isSubjectCaseSensitive"], true);
    assert_eq!(filter["advancedFilters"][0]["key"], "data.size");
    assert_eq!(filter["advancedFilters"][0]["value"].as_f64(), Some(3.0));
    assert_eq!(server.edge("GET", path, &Value::Null).expect(200).json(), made);

    let path2 = "/topics/orders/eventSubscriptions/audit";
    server.edge("PUT", path2, &body).expect(200);
    // The SDK lists with a trailing slash.
    for list in [
        "/topics/orders/eventSubscriptions",
        "/topics/orders/eventSubscriptions/",
    ] {
        let list = server.edge("GET", list, &Value::Null).expect(200).json();
        let names: Vec<_> = list
            .as_array()
            .expect("a bare array")
            .iter()
            .map(|s| s["name"].clone())
            .collect();
        assert_eq!(names, ["billing", "audit"]);
    }
    assert_eq!(server.edge("DELETE", path2, &Value::Null).expect(200).text(), "");
    refused(
        server.edge("GET", path2, &Value::Null),
        404,
        "EventSubscriptionNotFound",
    );
    refused(
        server.edge("DELETE", path2, &Value::Null),
        404,
        "EventSubscriptionNotFound",
    );
}

#[test]
fn words_of_the_path_have_no_case_and_slashes_at_the_end_do_not_matter() {
    let receiver = TestReceiver::start();
    let server = TestServer::start_plain();
    server.edge("PUT", "/TOPICS/orders/", &Value::Null).expect(200);
    let body = json!({"properties": {"destination": web_hook(&receiver.url("/"))}});
    server
        .edge("PUT", "/Topics/orders/EVENTSUBSCRIPTIONS/billing/", &body)
        .expect(200);
    server
        .edge("POST", "/toPics/orders/Events/", &json!([event("e1")]))
        .expect(200);
    assert_eq!(receiver.next().ids(), ["e1"]);
    server
        .edge("GET", "/topics/orders/eventsubscriptions/billing", &Value::Null)
        .expect(200);
}

#[test]
fn the_endpoint_is_told_as_the_request_was_addressed() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let host = format!("localhost:{}", server.http.port());
    let target = format!("/topics/orders?{EDGE_VERSION}");
    let topic = server
        .send("GET", &target, &[JSON, ("host", &host)], "")
        .expect(200)
        .json();
    assert_eq!(
        topic["properties"]["endpoint"],
        format!("http://{host}/topics/orders/events?{EDGE_VERSION}")
    );

    let mut tls = crate::client::TestConnection::open_tls(server.https, "localhost", &server.ca()).unwrap();
    let host = format!("localhost:{}", server.https.port());
    let topic = tls
        .send("GET", &target, &[JSON, ("host", &host)], b"")
        .unwrap()
        .expect(200)
        .json();
    assert_eq!(
        topic["properties"]["endpoint"],
        format!("https://{host}/topics/orders/events?{EDGE_VERSION}")
    );
}

#[test]
fn members_that_are_ignored_are_told() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let path = "/topics/orders/eventSubscriptions/s1";
    let mut body = json!({"properties": {
        "destination": web_hook("http://127.0.0.1:9/"),
        "filter": {"subjectStartsWith": "/a", "subjectEndsWith": "b"},
        "retryPolicy": {"maxAttempts": 3},
    }});
    let answer = server.edge("PUT", path, &body).expect(200);
    let expected =
        "ignored because unknown: properties.filter.subjectStartsWith, properties.retryPolicy.maxAttempts";
    assert_eq!(answer.header("postrider-warning"), Some(expected));
    server.logged(&["WARN", "s1", "properties.filter.subjectStartsWith"]);
    let answer = server
        .edge("PUT", "/topics/orders", &json!({"propertys": {}}))
        .expect(200);
    assert_eq!(
        answer.header("postrider-warning"),
        Some("ignored because unknown: propertys")
    );

    // Valid members, and those that were read and are sent back, cause no warning.
    body["properties"]["filter"] = json!({"subjectBeginsWith": "/a"});
    body["properties"]["retryPolicy"] = json!({"maxDeliveryAttempts": 3});
    let answer = server.edge("PUT", path, &body).expect(200);
    assert_eq!(answer.header("postrider-warning"), None);
    for path in [path, "/topics/orders"] {
        let read = server.edge("GET", path, &Value::Null).expect(200).json();
        let answer = server.edge("PUT", path, &read).expect(200);
        assert_eq!(answer.header("postrider-warning"), None, "{read}");
    }
}

#[test]
fn limits_of_batches_are_read_as_they_are_in_force() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let path = "/topics/orders/eventSubscriptions/s1";
    let mut hook = web_hook("http://127.0.0.1:9/");
    hook["properties"]["preferredBatchSizeInKilobytes"] = json!(100);
    server
        .edge("PUT", path, &json!({"properties": {"destination": hook}}))
        .expect(200);
    let read = || server.edge("GET", path, &Value::Null).expect(200).json();
    let before = read();
    assert_eq!(
        before["properties"]["destination"]["properties"]["maxEventsPerBatch"],
        10
    );
    server.edge("PUT", path, &before).expect(200);
    assert_eq!(read(), before);
}

#[test]
fn errors_are_in_the_modules_dialect() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let sub = |body: Value| server.edge("PUT", "/topics/orders/eventSubscriptions/s1", &body);
    let destination = |destination: Value| sub(json!({"properties": {"destination": destination}}));

    let message = refused(
        server.edge("GET", "/topics/missing", &Value::Null),
        404,
        "TopicNotFound",
    );
    assert!(message.contains("missing"), "{message}");
    let body = json!({"properties": {"destination": web_hook("http://127.0.0.1:9/")}});
    refused(
        server.edge("PUT", "/topics/missing/eventSubscriptions/s1", &body),
        404,
        "TopicNotFound",
    );
    refused(
        server.edge("GET", "/topics/missing/eventSubscriptions", &Value::Null),
        404,
        "TopicNotFound",
    );
    refused(
        server.edge("POST", "/topics/missing/events", &json!([event("e")])),
        404,
        "TopicNotFound",
    );
    refused(
        server.edge("GET", "/topics/orders/eventSubscriptions/s1", &Value::Null),
        404,
        "EventSubscriptionNotFound",
    );
    refused(
        server.edge("GET", "/topics/orders/elsewhere", &Value::Null),
        404,
        "ResourceNotFound",
    );

    for (method, path, allowed) in [
        ("POST", "/topics", "GET"),
        ("PATCH", "/topics/orders", "GET, PUT, DELETE"),
        (
            "PATCH",
            "/topics/orders/eventSubscriptions/s1",
            "GET, PUT, DELETE",
        ),
        ("PUT", "/topics/orders/eventSubscriptions", "GET"),
        ("GET", "/topics/orders/events", "POST"),
    ] {
        let answer = server.edge(method, path, &Value::Null);
        assert_eq!(answer.header("allow"), Some(allowed), "{method} {path}");
        refused(answer, 405, "MethodNotAllowed");
    }

    refused(
        server.send(
            "PUT",
            &format!("/topics/bad?{EDGE_VERSION}"),
            &[JSON],
            "{\"name\":",
        ),
        400,
        "InvalidRequest",
    );
    refused(
        server.edge("PUT", "/topics/bad", &json!({"name": "other"})),
        400,
        "InvalidRequest",
    );
    let schema = json!({"properties": {"inputSchema": "NoSuchSchema"}});
    let message = refused(server.edge("PUT", "/topics/bad", &schema), 400, "InvalidRequest");
    assert!(message.contains("inputSchema"), "{message}");
    refused(
        server.edge("PUT", "/topics/bad%20name", &Value::Null),
        400,
        "InvalidRequest",
    );
    refused(
        server.edge("GET", "/topics/bad", &Value::Null),
        404,
        "TopicNotFound",
    );

    let message = refused(sub(json!({"properties": {}})), 400, "InvalidRequest");
    assert_eq!(message, "properties.destination is required");
    refused(
        destination(json!({"endpointType": "Pigeon", "properties": {}})),
        400,
        "InvalidDestination",
    );
    refused(destination(web_hook("not a url")), 400, "InvalidDestination");
    refused(
        destination(web_hook("ftp://127.0.0.1/")),
        400,
        "InvalidDestination",
    );
    let event_grid = json!({
        "endpointType": "eventGrid",
        "properties": {"endpointUrl": "https://t.westus2-1.eventgrid.azure.net/elsewhere?api-version=2018-01-01", "sasKey": "a2V5"},
    });
    let message = refused(destination(event_grid), 400, "InvalidDestination");
    let expected = "EventSubscription.Properties.Destination failed validation. Reason: \
                    EndpointUrl must target the /api/events API of Azure Event Grid in the cloud..";
    assert_eq!(message, expected);
    let mut batch = web_hook("http://127.0.0.1:9/");
    batch["properties"]["maxEventsPerBatch"] = json!(51);
    refused(destination(batch), 400, "InvalidDestination");

    let with = |name: &str, value: Value| {
        let mut body = json!({"properties": {"destination": web_hook("http://127.0.0.1:9/")}});
        body["properties"][name] = value;
        sub(body)
    };
    let message = refused(
        with("eventDeliverySchema", json!("CloudEventSchemaV1_0")),
        400,
        "InvalidRequest",
    );
    assert!(message.contains("eventDeliverySchema"), "{message}");
    refused(with("topicName", json!("other")), 400, "InvalidRequest");
    let unknown =
        json!({"advancedFilters": [{"operatorType": "NumberSquared", "key": "data.x", "value": 1}]});
    refused(with("filter", unknown), 400, "InvalidRequest");
    // None of the refused resources exists.
    assert_eq!(
        server
            .edge("GET", "/topics/orders/eventSubscriptions", &Value::Null)
            .json(),
        json!([])
    );

    let answer = server.send("GET", "/topics?api-version=2018-05-01", &[JSON], "");
    refused(answer, 400, "UnsupportedApiVersion");
}

#[test]
fn events_that_do_not_conform_are_refused_in_the_modules_dialect() {
    let receiver = TestReceiver::start();
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let without = |name: &str| {
        let mut event = event("e1");
        event.as_object_mut().expect("an object").remove(name);
        server.edge("POST", "/topics/orders/events", &json!([event]))
    };
    // Unlike in the cloud, the data version is mandatory.
    for name in ["id", "subject", "eventType", "eventTime", "dataVersion"] {
        let message = refused(without(name), 400, "InputJsonInvalid");
        assert!(
            message.contains(&format!("requires '{name}' property to be set")),
            "{message}"
        );
    }
    let with = |name: &str, value: &str| {
        let mut event = event("e2");
        event[name] = json!(value);
        server.edge("POST", "/topics/orders/events", &json!([event]))
    };
    refused(with("topic", "elsewhere"), 400, "InputJsonInvalid");
    refused(with("metadataVersion", "2"), 400, "InputJsonInvalid");
    with("eventTime", "whenever").expect(200);
    assert_eq!(receiver.next().ids(), ["e2"], "only the last was accepted");
}

#[test]
fn a_subscription_is_changed_at_once_and_gone_with_its_topic() {
    let (old, new) = (TestReceiver::start(), TestReceiver::start());
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &old.url("/"), json!(null));
    server.publish("orders", &[event("e1")]);
    assert_eq!(old.next().ids(), ["e1"]);
    server.subscribe(
        "orders",
        "billing",
        &new.url("/"),
        json!({"filter": {"includedEventTypes": ["Wanted"]}}),
    );
    let mut wanted = event("e3");
    wanted["eventType"] = json!("Wanted");
    server.publish("orders", &[event("e2"), wanted]);
    assert_eq!(new.next().ids(), ["e3"]);

    server.edge("DELETE", "/topics/orders", &Value::Null).expect(200);
    server.put_topic("orders");
    assert_eq!(
        server
            .edge("GET", "/topics/orders/eventSubscriptions", &Value::Null)
            .json(),
        json!([])
    );
    server.publish("orders", &[event("e4")]);
    for receiver in [&old, &new] {
        receiver.nothing_within(Duration::from_millis(100));
    }
}

#[test]
fn resources_survive_a_restart() {
    let receiver = TestReceiver::start();
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    let filter =
        json!({"filter": {"subjectBeginsWith": "/orders"}, "retryPolicy": {"maxDeliveryAttempts": 3}});
    server.subscribe("orders", "billing", &receiver.url("/"), filter);
    let path = "/topics/orders/eventSubscriptions/billing";
    let (topic, subscription) = (
        server.edge("GET", "/topics/orders", &Value::Null),
        server.edge("GET", path, &Value::Null),
    );
    server.kill();
    server.start();
    assert_eq!(
        server.edge("GET", "/topics/orders", &Value::Null).json(),
        topic.json()
    );
    assert_eq!(server.edge("GET", path, &Value::Null).json(), subscription.json());
    server.publish("orders", &[event("e1")]);
    assert_eq!(receiver.next().ids(), ["e1"]);
}

#[test]
fn keys_close_the_api_to_everyone_else() {
    let setup = ServerSetup {
        env: vec![
            ("inbound__clientAuth__sasKeys__enabled", "true".into()),
            ("inbound__clientAuth__sasKeys__key1", "first".into()),
            ("inbound__clientAuth__sasKeys__key2", "second".into()),
        ],
        config: "client = [{ id = \"me\", secret = \"client-secret\" }]".into(),
        ..ServerSetup::default()
    };
    let server = setup.start();
    let target = format!("/topics/orders?{EDGE_VERSION}");
    let put = |header: (&str, &str)| server.send("PUT", &target, &[JSON, header], "");
    refused(server.send("PUT", &target, &[JSON], ""), 401, "UnAuthorized");
    refused(put(("aeg-sas-key", "wrong")), 401, "UnAuthorized");
    refused(put(("aeg-sas-key", "")), 401, "UnAuthorized");
    put(("aeg-sas-key", "first")).expect(200);
    put(("aeg-sas-key", "second")).expect(200);
    put(("authorization", "Bearer client-secret")).expect(200);
    refused(put(("authorization", "Bearer other")), 401, "UnAuthorized");
    let events = format!("/topics/orders/events?{EDGE_VERSION}");
    let body = json!([event("e1")]).to_string();
    refused(server.send("POST", &events, &[JSON], &body), 401, "UnAuthorized");
    server
        .send("POST", &events, &[JSON, ("aeg-sas-key", "second")], &body)
        .expect(200);
}
