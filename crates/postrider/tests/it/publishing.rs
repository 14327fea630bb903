//! The cloud's publish contract: who may publish what, and all refusals.

use crate::client::{HttpTestAnswer, TestConnection};
use crate::receiver::TestReceiver;
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::hmac;
use serde_json::{Value, json};

/// Base64 of the bytes 00..1f, as in the reference's test vectors.
const KEY1: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const KEY2: &str = "dGhpcyBpcyBhIDMyIGJ5dGUgdGVzdCBrZXkgISEhISE=";
const WITH_KEY: (&str, &str) = ("aeg-sas-key", KEY1);
const CLOUD_EVENTS: (&str, &str) = (
    "content-type",
    "application/cloudevents-batch+json; charset=utf-8",
);
const CLOUD_EVENT: (&str, &str) = ("content-type", "application/cloudevents+json; charset=utf-8");
const ORDERS: &str = "/topics/orders/api/events?api-version=2018-01-01";
const CLOUDS: &str = "/topics/clouds/api/events?api-version=2018-01-01";
const THINGS: &str = "/topics/things/api/events?api-version=2018-01-01";
const TENANTS: &str = "/domains/tenants/api/events?api-version=2018-01-01";

/// A topic of each schema, a domain, and one subscription of each to one receiver.
fn setup(receiver: &TestReceiver) -> ServerSetup {
    let mut config = String::from("client = [{ id = \"me\", secret = \"client-secret\" }]\n");
    for (topic, schema) in [
        ("orders", "EventGridSchema"),
        ("clouds", "CloudEventSchemaV1_0"),
        ("things", "CustomEventSchema"),
        ("locked", "EventGridSchema"),
    ] {
        let url = receiver.url(&format!("/{topic}"));
        config += &format!(
            "[[topic]]\nname = \"{topic}\"\nkey1 = \"{KEY1}\"\nkey2 = \"{KEY2}\"\ninput_schema = \"{schema}\"\n"
        );
        match topic {
            "things" => {
                config += "input_schema_mapping = { inputSchemaMappingType = \"Json\", properties = { \
                           id = { sourceField = \"key\" }, eventType = { sourceField = \"kind\", defaultValue = \"Thing\" }, \
                           subject = { sourceField = \"about\" } } }\n";
            }
            "locked" => config += "disable_local_auth = true\n",
            _ => {}
        }
        let delivery = if topic == "things" {
            "event_delivery_schema = \"CustomInputSchema\"\n"
        } else {
            ""
        };
        config += &format!(
            "[[topic.subscription]]\nname = \"all\"\n{delivery}\
             destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\" }} }}\n"
        );
    }
    config += &format!(
        "[[domain]]\nname = \"tenants\"\nkey1 = \"{KEY1}\"\n[[domain.subscription]]\nname = \"all\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{}\" }} }}\n",
        receiver.url("/tenants")
    );
    ServerSetup::config(config)
}

fn started() -> (TestReceiver, TestServer) {
    let receiver = TestReceiver::start();
    let server = setup(&receiver).start();
    (receiver, server)
}

fn cloud_event(id: &str) -> Value {
    json!({"specversion": "1.0", "id": id, "source": "/shop", "type": "Orders.Created", "data": {"n": 1}})
}

fn without(mut event: Value, name: &str) -> Value {
    event
        .as_object_mut()
        .expect("an object")
        .remove(name)
        .expect("it was there");
    event
}

fn with(mut event: Value, name: &str, value: Value) -> Value {
    event[name] = value;
    event
}

/// An error in the cloud's format: status, code, detail and the beginning of the message.
#[track_caller]
fn refused(answer: HttpTestAnswer, status: u16, code: &str, detail: &str, message: &str) {
    let answer = answer.expect(status);
    assert_eq!(
        answer.header("content-type"),
        Some("application/json; charset=utf-8")
    );
    assert!(
        answer.header("x-ms-request-id").is_some(),
        "every answer has an id"
    );
    let body = answer.json();
    let told = body["error"]["message"]
        .as_str()
        .expect("there is a message")
        .to_owned();
    let expected =
        json!({"error": {"code": code, "message": told, "details": [{"code": detail, "message": told}]}});
    assert_eq!(body, expected);
    assert!(
        told.starts_with(message),
        "{told:?} does not begin with {message:?}"
    );
    assert!(
        !told.contains("forum") && !told.contains("ticket"),
        "it sends nobody to Azure: {told:?}"
    );
}

#[test]
fn what_is_accepted_is_answered_with_nothing_but_ids() {
    let (receiver, server) = started();
    for (target, content_type, body) in [
        (ORDERS, JSON, json!([event("e1")])),
        (ORDERS, ("content-type", "text/odd"), json!([event("e1")])),
        (CLOUDS, CLOUD_EVENT, cloud_event("e1")),
        (CLOUDS, CLOUD_EVENTS, json!([cloud_event("e1")])),
        (CLOUDS, JSON, cloud_event("e1")),
        (THINGS, JSON, json!([{"key": "e1", "about": "/x", "id": "e1"}])),
        (TENANTS, JSON, json!([with(event("e1"), "topic", json!("acme"))])),
    ] {
        let answer = server
            .send("POST", target, &[content_type, WITH_KEY], body.to_string())
            .expect(200);
        assert_eq!(answer.text(), "");
        assert_eq!(answer.header("api-supported-versions"), Some("2018-01-01"));
        assert!(answer.header("x-ms-request-id").is_some());
        assert_eq!(receiver.next().ids(), ["e1"], "{target} {content_type:?}");
    }
}

#[test]
fn paths_versions_and_methods_are_as_lenient_as_the_service() {
    let (_receiver, server) = started();
    let post = |target: &str| {
        server.send(
            "POST",
            target,
            &[JSON, WITH_KEY],
            json!([event("e1")]).to_string(),
        )
    };
    post("/topics/orders/api/events").expect(200);
    post("/Topics/orders/API/Events/").expect(200);
    post("/topics/ORDERS/api/events").expect(200);
    let unknown = post("/topics/orders/api/events?api-version=2020-01-01");
    refused(
        unknown,
        400,
        "BadRequest",
        "UnsupportedApiVersion",
        "The api-version '2020-01-01' is not supported.",
    );
    let empty = post("/topics/orders/api/events?api-version=");
    refused(
        empty,
        400,
        "BadRequest",
        "UnsupportedApiVersion",
        "The api-version",
    );

    for path in [
        "/topics/missing/api/events",
        "/domains/missing/api/events",
        "/elsewhere",
        "/",
        "/api/events",
        // Truncated endpoint paths.
        "/topics/orders",
        "/topics/orders/api",
        "/topics/missing",
        "/domains/sales",
    ] {
        let message = format!(
            "No HTTP resource was found that matches the request URI 'http://{}{path}",
            server.http
        );
        refused(post(path), 404, "NotFound", "ResourceNotFound", &message);
    }

    for (target, schema) in [
        (ORDERS, "EventGridEvent"),
        (CLOUDS, "CloudEventV10"),
        (THINGS, "CustomEvent"),
    ] {
        // OPTIONS needs no credentials.
        let answer = server.send("OPTIONS", target, &[], "").expect(200);
        assert_eq!(answer.header("allow"), Some("POST, OPTIONS"));
        assert_eq!(answer.header("api-supported-versions"), Some("2018-01-01"));
        assert_eq!(answer.header("aeg-input-event-schema"), Some(schema));
        assert!(answer.header("x-ms-request-id").is_some());
    }
    server.send("HEAD", ORDERS, &[WITH_KEY], "").expect(404);
    for method in ["GET", "PUT", "DELETE", "PATCH"] {
        let answer = server.send(method, ORDERS, &[WITH_KEY], "");
        assert_eq!(answer.header("allow"), Some("OPTIONS, POST"));
        refused(answer, 405, "MethodNotAllowed", "MethodNotAllowed", "");
    }
}

#[test]
fn events_of_the_wrong_shape_are_told_what_is_wrong() {
    let (receiver, server) = started();
    let eg = "This resource is configured to receive event in 'EventGridEvent' schema. \
              The JSON received does not conform to the expected schema.";
    let ce = "This resource is configured to receive event in 'CloudEventV10' schema. \
              The JSON received does not conform to the expected schema.";
    let custom = "This resource is configured to receive event in 'CustomEvent' schema. \
                  The JSON received does not conform to the expected schema.";
    let invalid = |target: &str, content_type, body: &str, message: &str| {
        let answer = server.send("POST", target, &[content_type, WITH_KEY], body);
        refused(answer, 400, "BadRequest", "InputJsonInvalid", message);
    };
    for body in [
        "",
        "[",
        "nonsense",
        "[{}",
        "{\"id\":1}x",
        "[]",
        "[1]",
        "\"text\"",
        "[{\"id\":\"\\ud800\"}]x",
    ] {
        invalid(ORDERS, JSON, body, "This resource is configured ");
    }
    invalid(ORDERS, JSON, "[]", eg);
    invalid(CLOUDS, CLOUD_EVENTS, "[]", ce);
    invalid(THINGS, JSON, "[]", custom);
    invalid(THINGS, JSON, "[3]", custom);
    let token = " Token Expected: StartObject, Actual Token Received: StartArray.";
    invalid(
        CLOUDS,
        JSON,
        &json!([cloud_event("e")]).to_string(),
        &format!("{ce}{token}"),
    );
    invalid(
        CLOUDS,
        CLOUD_EVENT,
        &json!([cloud_event("e")]).to_string(),
        &format!("{ce}{token}"),
    );

    let missing = |schema: &str, property: &str| {
        format!(
            "This resource is configured for '{schema}' schema and requires '{property}' property to be set."
        )
    };
    // If several members are missing, the first in the service's order is reported.
    let mut bare = event("e");
    for property in ["subject", "id", "eventType", "eventTime"] {
        let good = json!([event("fine"), without(event("e"), property)]).to_string();
        invalid(ORDERS, JSON, &good, &missing("EventGridEvent", property));
        bare = without(bare, property);
    }
    invalid(
        ORDERS,
        JSON,
        &json!([bare]).to_string(),
        &missing("EventGridEvent", "subject"),
    );
    for (property, named) in [
        ("specversion", "specversion"),
        ("type", "eventType"),
        ("source", "source"),
        ("id", "id"),
    ] {
        let body = json!([cloud_event("fine"), without(cloud_event("e"), property)]).to_string();
        invalid(CLOUDS, CLOUD_EVENTS, &body, &missing("CloudEventV10", named));
    }
    invalid(
        THINGS,
        JSON,
        &json!([{"key": "e"}]).to_string(),
        &missing("CustomEvent", "about"),
    );
    let version = with(event("e"), "metadataVersion", json!("2"));
    invalid(
        ORDERS,
        JSON,
        &json!([version]).to_string(),
        "This resource is configured for 'EventGridEvent' schema",
    );

    let foreign = json!([with(event("e"), "topic", json!("/subscriptions/other"))]).to_string();
    let answer = server.send("POST", ORDERS, &[JSON, WITH_KEY], foreign);
    refused(answer, 401, "Unauthorized", "Unauthorized", "");
    let own = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1/providers/Microsoft.EventGrid/topics/orders";
    let body = json!([with(event("own"), "topic", json!(own))]).to_string();
    server.send("POST", ORDERS, &[JSON, WITH_KEY], body).expect(200);
    assert_eq!(
        receiver.next().ids(),
        ["own"],
        "nothing of all that was refused is delivered, not even its good part"
    );

    invalid(
        TENANTS,
        JSON,
        &json!([event("e")]).to_string(),
        &missing("EventGridEvent", "topic"),
    );
    let uri = json!([with(event("e"), "topic", json!("https://a/b"))]).to_string();
    let message = "Required property 'topic' needs to either be a full resource id or should be just \
                   the name of the domain topic. Found: https://a/b.";
    invalid(TENANTS, JSON, &uri, message);
}

#[test]
fn cloud_events_need_a_content_type_that_says_so() {
    let (receiver, server) = started();
    let message = "The Content-Type header is either missing or it doesn't have a valid value. The content type \
                   header must either be application/cloudevents+json; charset=utf-8 or \
                   application/cloudevents-batch+json; charset=UTF-8.";
    let body = cloud_event("e").to_string();
    for headers in [&[WITH_KEY][..], &[WITH_KEY, ("content-type", "text/plain")]] {
        let answer = server.send("POST", CLOUDS, headers, &body);
        refused(answer, 415, "UnsupportedMediaType", "InvalidContentType", message);
    }

    let ce = [
        ("ce-specversion", "1.0"),
        ("ce-id", "b%201"),
        ("ce-source", "/shop"),
        ("ce-type", "T"),
        ("ce-tenant", "acme"),
    ];
    let binary = |content_type, leave: &str, extra: &[(&'static str, &'static str)], body: &str| {
        let mut headers: Vec<_> = ce.into_iter().filter(|(name, _)| *name != leave).collect();
        headers.extend_from_slice(extra);
        headers.extend([content_type, WITH_KEY]);
        server.send("POST", CLOUDS, &headers, body)
    };
    binary(JSON, "", &[("ce-time", "2026-01-02T03:04:05Z")], "{\"n\": 1.0}").expect(200);
    let delivery = receiver.next();
    assert_eq!(
        delivery.header("content-type"),
        Some("application/cloudevents+json; charset=utf-8")
    );
    let event = delivery.json();
    assert_eq!(
        (&event["id"], &event["tenant"], &event["time"]),
        (&json!("b 1"), &json!("acme"), &json!("2026-01-02T03:04:05Z"))
    );
    assert!(
        delivery.text().contains("\"data\":{\"n\": 1.0}"),
        "{}",
        delivery.text()
    );

    let header = |leave: &str, extra: &[(&'static str, &'static str)], message: &str| {
        refused(
            binary(JSON, leave, extra, "{}"),
            400,
            "BadRequest",
            "InvalidCloudEventHeader",
            message,
        );
    };
    header(
        "ce-id",
        &[],
        "ce-id header is missing for the cloud event. Please check required attributes at ",
    );
    header(
        "ce-source",
        &[("ce-source", "")],
        "ce-source header is empty for the cloud event.",
    );
    let xml = binary(("content-type", "application/xml"), "", &[], "<a/>");
    refused(xml, 415, "UnsupportedMediaType", "InvalidContentType", message);
    refused(
        binary(CLOUD_EVENT, "", &[], "{}"),
        400,
        "BadRequest",
        "InvalidCloudEventHeader",
        "",
    );
    refused(
        binary(JSON, "", &[], ""),
        400,
        "BadRequest",
        "InputJsonInvalid",
        "",
    );
    // The data cannot smuggle in a second attribute.
    refused(
        binary(JSON, "", &[], "1,\"id\":\"x\""),
        400,
        "BadRequest",
        "InputJsonInvalid",
        "",
    );
}

#[test]
fn a_request_is_bounded_in_bytes_and_in_events() {
    let (receiver, server) = started();
    let said = "The maximum size (1536000) has been exceeded.";
    let too_large = |body: String, message: &str| {
        let answer = server.send("POST", ORDERS, &[JSON, WITH_KEY], body);
        refused(answer, 413, "RequestEntityTooLarge", "PayloadTooLarge", message);
    };
    let sized = |id: &str, bytes: usize| with(event(id), "data", json!("x".repeat(bytes)));
    too_large(
        json!([sized("a", 1_049_600)]).to_string(),
        "The event at index 0 exceeds",
    );
    too_large(
        json!([sized("a", 800_000), sized("b", 800_000)]).to_string(),
        said,
    );
    too_large(
        Value::Array((0..5001).map(|n| event(n.to_string())).collect()).to_string(),
        "The request exceeds the limit of 5000 events.",
    );

    // A chunked body without a declared length.
    let mut connection = server.connect();
    let head = format!(
        "POST {ORDERS} HTTP/1.1\r\nhost: {}\r\naeg-sas-key: {KEY1}\r\ntransfer-encoding: chunked\r\n\r\n",
        server.http
    );
    let chunk = format!("{:x}\r\n{}\r\n", 400_000, " ".repeat(400_000));
    connection
        .write(format!("{head}{}0\r\n\r\n", chunk.repeat(4)).as_bytes())
        .unwrap();
    let answer = connection.answer("POST").unwrap();
    refused(answer, 413, "RequestEntityTooLarge", "PayloadTooLarge", said);

    // The largest permitted event, with `Expect: 100-continue` as curl sends it.
    let body = json!([sized("large", 1_048_576)]).to_string();
    let mut connection = server.connect();
    let head = format!(
        "POST {ORDERS} HTTP/1.1\r\nhost: {}\r\naeg-sas-key: {KEY1}\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        server.http,
        body.len()
    );
    connection.write(head.as_bytes()).unwrap();
    connection.answer("POST").unwrap().expect(100);
    connection.write(body.as_bytes()).unwrap();
    connection.answer("POST").unwrap().expect(200);
    assert_eq!(receiver.next().ids(), ["large"]);
    let many: Vec<_> = (0..5000)
        .map(|n| json!({"key": n.to_string(), "id": n.to_string(), "about": "x"}))
        .collect();
    server
        .send("POST", THINGS, &[JSON, WITH_KEY], json!(many).to_string())
        .expect(200);
}

#[test]
fn a_publish_without_room_for_its_body_is_told_to_come_back() {
    let receiver = TestReceiver::start();
    let mut setup = setup(&receiver);
    setup.config.insert_str(
        0,
        "limits.request_bytes_max = 65536\nlimits.publish_body_bytes_max = 262144\n",
    );
    let server = setup.start();
    let event_of = |id: &str, bytes: usize| {
        let mut event = event(id);
        event["data"] = json!("x".repeat(bytes));
        json!([event]).to_string()
    };
    // Two unfinished bodies take nearly all of the memory that one client gets. Another is begun
    // before each check, since a check itself may be refused in its place.
    let body = event_of("slow", 60_000);
    let mut slow = Vec::new();
    let quick = event_of("quick", 40_000);
    let turned_away = wait::until("there is no room", || {
        let mut connection = server.connect();
        let head = format!(
            "POST {ORDERS} HTTP/1.1\r\nhost: {}\r\naeg-sas-key: {KEY1}\r\ncontent-length: {}\r\n\r\n",
            server.http,
            body.len()
        );
        connection.write(head.as_bytes()).unwrap();
        let _ = connection.write(&body.as_bytes()[..body.len() - 1]);
        slow.push(connection);
        let answer = server.send("POST", ORDERS, &[JSON, WITH_KEY], &quick);
        (answer.status == 429).then_some(answer)
    });
    assert_eq!(turned_away.header("retry-after"), Some("1"));
    let message = "The rate of events exceeds the limit of this resource.";
    refused(turned_away, 429, "TooManyRequests", "TooManyRequests", message);
    // A client that disconnects frees its memory.
    drop(slow);
    wait::until("there is room again", || {
        let answer = server.send("POST", ORDERS, &[JSON, WITH_KEY], &quick);
        (answer.status == 200).then_some(())
    });
}

/// Most clients read the answer only after they have sent everything, the Azure SDKs among them.
#[test]
fn a_refusal_reaches_a_client_that_first_sends_all_of_a_large_body() {
    let (_receiver, server) = started();
    let large = " ".repeat(8 << 20);
    for _ in 0..5 {
        server.send("POST", ORDERS, &[JSON, WITH_KEY], &large).expect(413);
        server
            .send("POST", ORDERS, &[JSON, ("aeg-sas-key", "wrong")], &large)
            .expect(401);
        server.send("POST", "/elsewhere", &[JSON], &large).expect(404);
    }
}

fn percent_encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

fn sas_token(resource: &str, expiry: &str, key: &str) -> String {
    let unsigned = format!("r={}&e={}", percent_encoded(resource), percent_encoded(expiry));
    let key = hmac::Key::new(hmac::HMAC_SHA256, &BASE64_STANDARD.decode(key).unwrap());
    let signature = BASE64_STANDARD.encode(hmac::sign(&key, unsigned.as_bytes()));
    format!("{unsigned}&s={}", percent_encoded(&signature))
}

#[test]
fn a_key_or_a_signature_made_with_it_opens_a_topic_and_nothing_else_does() {
    let (receiver, server) = started();
    let body = json!([event("e1")]).to_string();
    let post = |target: &str, headers: &[(&str, &str)]| {
        let headers = [&[JSON], headers].concat();
        server.send("POST", target, &headers, &body)
    };
    let accepted = |target: &str, headers: &[(&str, &str)]| {
        post(target, headers).expect(200);
        receiver.next();
    };
    let unauthorized = |headers: &[(&str, &str)], message: &str| {
        refused(
            post(ORDERS, headers),
            401,
            "Unauthorized",
            "Unauthorized",
            message,
        );
    };
    accepted(ORDERS, &[("aeg-sas-key", KEY1)]);
    accepted(ORDERS, &[("aeg-sas-key", KEY2)]);
    accepted(&format!("{ORDERS}&aeg-sas-key={}", percent_encoded(KEY2)), &[]);
    accepted(ORDERS, &[("authorization", "Bearer client-secret")]);

    let url = format!("http://{}/topics/orders/api/events", server.http);
    let fresh = "2099-01-02T03:04:05.678901";
    for (resource, expiry) in [
        (url.clone(), fresh),
        (url.clone(), "6/15/2099 6:20:15 PM"),
        (url.clone(), "2099-01-02 03:04:05+00:00"),
        (url.clone(), "9999-12-31T23:59:59Z"),
        (format!("{url}?api-version=2018-01-01"), fresh),
        (format!("{url}?apiVersion=2018-01-01"), fresh),
        (url.to_uppercase().replace("HTTP://", "http://"), fresh),
    ] {
        for key in [KEY1, KEY2] {
            let token = sas_token(&resource, expiry, key);
            accepted(ORDERS, &[("aeg-sas-token", &token)]);
            accepted(
                ORDERS,
                &[("authorization", &format!("SharedAccessSignature {token}"))],
            );
        }
    }

    let none =
        "Request must contain one of the following authorization signature: aeg-sas-token, aeg-sas-key.";
    unauthorized(&[], none);
    let scheme = "Request has an unsupported Authorization scheme (must be SharedAccessSignature or Bearer).";
    unauthorized(&[("authorization", "Basic YTpi")], scheme);
    let wrong = format!(
        "The request authorization key is not authorized for {}.",
        server.http.to_string().to_uppercase()
    );
    unauthorized(&[("aeg-sas-key", "wrong")], &wrong);
    unauthorized(&[("aeg-sas-key", &KEY1[..KEY1.len() - 1])], &wrong);
    unauthorized(&[("authorization", "Bearer other-secret")], &wrong);
    let because = |reason: &str| format!("{wrong} This is due to the reason: {reason}");
    let expired = sas_token(&url, "2020-01-02T03:04:05", KEY1);
    unauthorized(&[("aeg-sas-token", &expired)], &because("The token has expired"));
    let other = sas_token(&url.replace("orders", "clouds"), fresh, KEY1);
    unauthorized(
        &[("aeg-sas-token", &other)],
        &because("The token was made for another resource"),
    );
    let longer = sas_token(&url.replace("orders", "orders2"), fresh, KEY1);
    unauthorized(
        &[("aeg-sas-token", &longer)],
        &because("The token was made for another resource"),
    );
    let forged = sas_token(&url, fresh, "d3Jvbmc=");
    unauthorized(
        &[("aeg-sas-token", &forged)],
        &because("The signature of the token does not match"),
    );
    let good = sas_token(&url, fresh, KEY1);
    unauthorized(
        &[("aeg-sas-token", &good.replace("2099", "2098"))],
        &because("The signature"),
    );
    unauthorized(&[("aeg-sas-token", "nonsense")], &wrong);

    let empty = post(ORDERS, &[("aeg-sas-key", "")]);
    refused(
        empty,
        401,
        "Unauthorized",
        "Unauthorized",
        "Request must have a value for aeg-sas-key.",
    );
    let locked = post("/topics/locked/api/events", &[WITH_KEY]);
    refused(
        locked,
        401,
        "Unauthorized",
        "Unauthorized",
        &because("Local authentication is disabled"),
    );
    accepted(
        "/topics/locked/api/events",
        &[("authorization", "Bearer client-secret")],
    );
}

#[test]
fn the_host_may_name_the_topic() {
    let (receiver, server) = started();
    let body = json!([event("e1")]).to_string();
    let host = ("host", "orders.westus2-1.eventgrid.azure.net");
    server
        .send(
            "POST",
            "/api/events?api-version=2018-01-01",
            &[host, JSON, WITH_KEY],
            &body,
        )
        .expect(200);
    assert_eq!(receiver.next().path, "/orders");
    let token = sas_token(
        "http://orders.westus2-1.eventgrid.azure.net/api/events",
        "2099-01-02T03:04:05",
        KEY1,
    );
    server
        .send(
            "POST",
            "/API/events/",
            &[host, JSON, ("aeg-sas-token", &token)],
            &body,
        )
        .expect(200);
    assert_eq!(receiver.next().path, "/orders");
    let domain = ("host", "tenants.westus2-1.eventgrid.azure.net");
    let body = json!([with(event("e2"), "topic", json!("acme"))]).to_string();
    server
        .send("POST", "/api/events", &[domain, JSON, WITH_KEY], body)
        .expect(200);
    let delivered = receiver.next();
    assert_eq!(delivered.path, "/tenants");
    let id = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1/providers/Microsoft.EventGrid/domains/tenants/topics/acme";
    assert_eq!(delivered.json()[0]["topic"], id);
    let unknown = server.send(
        "POST",
        "/api/events",
        &[("host", "nobody.example"), JSON, WITH_KEY],
        "[]",
    );
    refused(
        unknown,
        404,
        "NotFound",
        "ResourceNotFound",
        "No HTTP resource was found",
    );
}

#[test]
fn the_public_url_is_good_for_signatures_too() {
    let receiver = TestReceiver::start();
    let mut setup = setup(&receiver);
    setup.config = format!("listen.public_url = \"https://events.example\"\n{}", setup.config);
    let server = setup.start();
    let token = sas_token(
        "https://events.example/topics/orders/api/events",
        "2099-01-02T03:04:05",
        KEY1,
    );
    server
        .send(
            "POST",
            ORDERS,
            &[JSON, ("aeg-sas-token", &token)],
            json!([event("e1")]).to_string(),
        )
        .expect(200);
    assert_eq!(receiver.next().ids(), ["e1"]);
}

#[test]
fn what_is_not_http_is_answered_with_400_or_nothing_and_hurts_nobody() {
    let (receiver, server) = started();
    let long = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "a".repeat(1 << 20));
    let many = format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", "x: y\r\n".repeat(10_000));
    for bytes in [
        "\0\0\0\0\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n",
        "GET\r\n\r\n",
        "POST / HTTP/9.9\r\n\r\n",
        "POST /topics/orders/api/events HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        "POST /topics/orders/api/events HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        "POST /topics/orders/api/events HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        &long,
        &many,
    ] {
        let mut connection = server.connect();
        let answer = connection
            .write(bytes.as_bytes())
            .and_then(|()| connection.answer("POST"));
        if let Ok(answer) = answer {
            assert!(
                (400..500).contains(&answer.status),
                "{} for {:?}",
                answer.status,
                &bytes[..40.min(bytes.len())]
            );
        }
    }
    // A truncated request leaves nothing behind.
    let mut connection = server.connect();
    let event1 = json!([event("e1")]).to_string();
    let head = format!(
        "POST {ORDERS} HTTP/1.1\r\nhost: a\r\naeg-sas-key: {KEY1}\r\ncontent-length: 5000\r\n\r\n{event1}"
    );
    connection.write(head.as_bytes()).unwrap();
    drop(connection);
    server
        .send(
            "POST",
            ORDERS,
            &[JSON, WITH_KEY],
            json!([event("e2")]).to_string(),
        )
        .expect(200);
    assert_eq!(receiver.next().ids(), ["e2"]);
    // Pipelined requests are answered in order.
    let mut connection: TestConnection = server.connect();
    let one = |id: &str| {
        let body = json!([event(id)]).to_string();
        format!(
            "POST {ORDERS} HTTP/1.1\r\nhost: a\r\naeg-sas-key: {KEY1}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    connection
        .write(format!("{}{}", one("e3"), one("e4")).as_bytes())
        .unwrap();
    connection.answer("POST").unwrap().expect(200);
    connection.answer("POST").unwrap().expect(200);
    receiver.all_of(&["e3", "e4"].map(String::from).into());
}
