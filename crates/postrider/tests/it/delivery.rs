//! Deliveries to webhooks: bodies and headers per schema, batches, delivery properties, filters.

use crate::receiver::{ReceivedDelivery, ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const IDS: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1/providers/Microsoft.EventGrid/topics";

/// Declares a topic with a key, further lines about it, and subscriptions as inline tables.
fn topic(name: &str, lines: &str, subscriptions: &[String]) -> String {
    let subscriptions: String = subscriptions
        .iter()
        .map(|s| format!("[[topic.subscription]]\n{s}\n"))
        .collect();
    format!("[[topic]]\nname = \"{name}\"\nkey1 = \"{KEY}\"\n{lines}\n{subscriptions}")
}

/// A subscription named like the path of its endpoint, with further lines and destination
/// properties.
fn subscription(receiver: &TestReceiver, path: &str, lines: &str, properties: &str) -> String {
    let url = receiver.url(&format!("/{path}"));
    format!(
        "name = \"{path}\"\n{lines}\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\"{properties} }} }}\n"
    )
}

fn publish(server: &TestServer, topic: &str, content_type: &str, body: impl AsRef<[u8]>) {
    let target = format!("/topics/{topic}/api/events");
    server
        .send(
            "POST",
            &target,
            &[("content-type", content_type), ("aeg-sas-key", KEY)],
            body,
        )
        .expect(200);
}

/// Receives one delivery for each of these paths.
fn one_each<const N: usize>(receiver: &TestReceiver, paths: [&str; N]) -> [ReceivedDelivery; N] {
    let mut deliveries: Vec<_> = paths.iter().map(|_| receiver.next()).collect();
    paths.map(|path| {
        let at = deliveries.iter().position(|d| d.path == format!("/{path}"));
        deliveries.swap_remove(at.unwrap_or_else(|| panic!("nothing at /{path}")))
    })
}

fn headers(delivery: &ReceivedDelivery, expected: &[(&str, Option<&str>)]) {
    for (name, value) in expected {
        assert_eq!(delivery.header(name), *value, "{name} at {}", delivery.path);
    }
}

#[test]
fn event_grid_events_keep_their_bytes_and_become_cloud_events_when_asked_to() {
    let receiver = TestReceiver::start();
    let config = topic(
        "orders",
        "",
        &[
            subscription(&receiver, "same", "", ""),
            subscription(
                &receiver,
                "cloud",
                "event_delivery_schema = \"CloudEventSchemaV1_0\"",
                "",
            ),
            subscription(
                &receiver,
                "clouds",
                "event_delivery_schema = \"CloudEventSchemaV1_0\"",
                ", max_events_per_batch = 10",
            ),
        ],
    );
    let server = ServerSetup::config(config).start();
    let sent = r#"[{"id":"e1", "subject":"\u00fcber", "eventType":"T",
        "eventTime":"2026-01-02T03:04:05.1234567Z", "data":{ "n":1.00, "big":123456789012345678901234567890 }, "extra":[1 ,2]}]"#;
    publish(&server, "orders", "application/json", sent);
    let [same, cloud, clouds] = one_each(&receiver, ["same", "cloud", "clouds"]);

    for part in [
        r#""data":{ "n":1.00, "big":123456789012345678901234567890 }"#,
        r#""extra":[1 ,2]"#,
        r#""subject":"\u00fcber""#,
    ] {
        assert!(same.text().contains(part), "{part} in {}", same.text());
    }
    let event = &same.json()[0];
    assert_eq!(event["topic"], format!("{IDS}/orders"));
    assert_eq!(
        (&event["metadataVersion"], &event["dataVersion"]),
        (&json!("1"), &json!(""))
    );
    headers(
        &same,
        &[
            ("content-type", Some("application/json; charset=utf-8")),
            ("aeg-data-version", Some("")),
        ],
    );

    let event = cloud.json();
    assert!(
        cloud
            .text()
            .contains(r#"{ "n":1.00, "big":123456789012345678901234567890 }"#),
        "{}",
        cloud.text()
    );
    for (name, value) in [
        ("specversion", json!("1.0")),
        ("id", json!("e1")),
        ("source", json!(format!("{IDS}/orders"))),
        ("type", json!("T")),
        ("subject", json!("über")),
        ("time", json!("2026-01-02T03:04:05.1234567Z")),
    ] {
        assert_eq!(event[name], value, "{name}");
    }
    assert_eq!(event.get("dataschema"), None, "the version is empty");
    headers(
        &cloud,
        &[
            (
                "content-type",
                Some("application/cloudevents+json; charset=utf-8"),
            ),
            ("aeg-metadata-version", Some("1.0")),
            ("aeg-data-version", None),
            ("origin", Some("eventgrid.azure.net")),
            ("aeg-subscription-name", Some("CLOUD")),
            ("aeg-event-type", Some("Notification")),
            ("aeg-delivery-count", Some("0")),
        ],
    );
    assert_eq!(clouds.json(), json!([event]));
    headers(
        &clouds,
        &[(
            "content-type",
            Some("application/cloudevents-batch+json; charset=utf-8"),
        )],
    );
}

#[test]
fn cloud_events_stay_cloud_events() {
    let receiver = TestReceiver::start();
    let subscriptions = [
        subscription(&receiver, "one", "", ""),
        subscription(&receiver, "many", "", ", max_events_per_batch = 3"),
    ];
    let server = ServerSetup::config(topic(
        "clouds",
        "input_schema = \"CloudEventSchemaV1_0\"",
        &subscriptions,
    ))
    .start();
    let sent = r#"{"specversion":"1.0","id":"e1","source":"/shop","type":"T","tenant":"acme","n":7,"data_base64":"AAEC"}"#;
    publish(&server, "clouds", "application/cloudevents+json", sent);
    let [one, many] = one_each(&receiver, ["one", "many"]);
    assert_eq!(one.text(), sent);
    assert_eq!(many.text(), format!("[{sent}]"));
    headers(
        &one,
        &[
            (
                "content-type",
                Some("application/cloudevents+json; charset=utf-8"),
            ),
            ("origin", Some("eventgrid.azure.net")),
        ],
    );
    headers(
        &many,
        &[
            (
                "content-type",
                Some("application/cloudevents-batch+json; charset=utf-8"),
            ),
            ("aeg-data-version", None),
        ],
    );
}

#[test]
fn custom_events_are_mapped_when_asked_to() {
    let receiver = TestReceiver::start();
    let mapping = "input_schema = \"CustomEventSchema\"\n\
        input_schema_mapping = { inputSchemaMappingType = \"Json\", properties = { id = { sourceField = \"key\" }, \
        eventType = { sourceField = \"kind\", defaultValue = \"Thing\" }, subject = { sourceField = \"deep.about\" }, \
        dataVersion = { defaultValue = \"3\" } } }";
    let subscriptions = [
        subscription(
            &receiver,
            "custom",
            "event_delivery_schema = \"CustomInputSchema\"",
            "",
        ),
        subscription(
            &receiver,
            "grid",
            "event_delivery_schema = \"EventGridSchema\"",
            "",
        ),
        subscription(
            &receiver,
            "cloud",
            "event_delivery_schema = \"CloudEventSchemaV1_0\"",
            "",
        ),
    ];
    let server = ServerSetup::config(topic("things", mapping, &subscriptions)).start();
    let sent = r#"{"key":"k1", "deep":{"about":"/x"}, "n":1.50}"#;
    publish(&server, "things", "application/json", format!("[{sent}]"));
    let [custom, grid, cloud] = one_each(&receiver, ["custom", "grid", "cloud"]);
    assert_eq!(custom.text(), format!("[{sent}]"));
    headers(
        &custom,
        &[("content-type", Some("application/json; charset=utf-8"))],
    );

    let event = &grid.json()[0];
    for (name, value) in [
        ("id", "k1"),
        ("eventType", "Thing"),
        ("subject", "/x"),
        ("dataVersion", "3"),
        ("metadataVersion", "1"),
    ] {
        assert_eq!(event[name], value, "{name}");
    }
    assert!(
        event["eventTime"]
            .as_str()
            .is_some_and(|time| time.starts_with("20")),
        "{event}"
    );
    assert!(
        grid.text().contains(&format!("\"data\":{sent}")),
        "{}",
        grid.text()
    );
    headers(
        &grid,
        &[
            ("aeg-data-version", Some("3")),
            ("aeg-metadata-version", Some("1")),
        ],
    );

    let event = cloud.json();
    for (name, value) in [
        ("id", "k1"),
        ("type", "Thing"),
        ("subject", "/x"),
        ("dataschema", "#3"),
        ("specversion", "1.0"),
    ] {
        assert_eq!(event[name], value, "{name}");
    }
    assert!(
        cloud.text().contains(&format!("\"data\":{sent}")),
        "{}",
        cloud.text()
    );
}

#[test]
fn batches_take_what_is_there_and_never_more_than_allowed() {
    let receiver = TestReceiver::start();
    let server = ServerSetup::config(topic(
        "orders",
        "",
        &[subscription(
            &receiver,
            "hundred",
            "",
            ", max_events_per_batch = 100",
        )],
    ))
    .start();
    let events: Vec<_> = (0..250).map(|n| event(format!("e{n}"))).collect();
    publish(&server, "orders", "application/json", json!(events).to_string());
    let mut sizes = Vec::new();
    let mut seen = BTreeSet::new();
    while seen.len() < 250 {
        let ids = receiver.next().ids();
        sizes.push(ids.len());
        for id in ids {
            assert!(seen.insert(id), "each arrives once");
        }
    }
    sizes.sort_unstable();
    assert_eq!(sizes, [50, 100, 100]);

    // A single event does not wait for others.
    publish(
        &server,
        "orders",
        "application/json",
        json!([event("alone")]).to_string(),
    );
    assert_eq!(receiver.next().ids(), ["alone"]);
}

#[test]
fn a_batch_stays_within_its_size_but_for_a_single_larger_event() {
    let receiver = TestReceiver::start();
    let properties = ", max_events_per_batch = 100, preferred_batch_size_in_kilobytes = 4";
    let server = ServerSetup::config(topic(
        "orders",
        "",
        &[subscription(&receiver, "small", "", properties)],
    ))
    .start();
    let sized = |id: String, bytes: usize| {
        let mut event = event(id);
        event["data"] = json!("x".repeat(bytes));
        event
    };
    let mut events: Vec<_> = (0..40).map(|n| sized(format!("s{n}"), 500)).collect();
    events.insert(7, sized("large".into(), 10_000));
    publish(&server, "orders", "application/json", json!(events).to_string());
    let mut seen = BTreeSet::new();
    while seen.len() < 41 {
        let delivery = receiver.next();
        let ids = delivery.ids();
        if ids.contains(&"large".to_owned()) {
            assert_eq!(ids, ["large"]);
        } else {
            assert!(delivery.body.len() <= 4096, "{} bytes", delivery.body.len());
        }
        seen.extend(ids);
    }
}

#[test]
fn delivery_properties_become_headers() {
    let receiver = TestReceiver::start();
    let attributes = r#", delivery_attribute_mappings = [
        { name = "X-Static", type = "Static", properties = { value = "plain" } },
        { name = "Authorization", type = "Static", properties = { value = "Basic hidden", isSecret = true } },
        { name = "X-Color", type = "Dynamic", properties = { sourceField = "data.color" } },
        { name = "X-Count", type = "Dynamic", properties = { sourceField = "data.n" } },
        { name = "X-Flag", type = "Dynamic", properties = { sourceField = "data.flag" } },
        { name = "X-Subject", type = "Dynamic", properties = { sourceField = "subject" } },
        { name = "X-Missing", type = "Dynamic", properties = { sourceField = "data.none" } },
        { name = "X-Object", type = "Dynamic", properties = { sourceField = "data" } } ]"#;
    // TOML inline tables cannot have line breaks.
    let attributes = attributes.replace('\n', " ");
    let server = ServerSetup::config(topic(
        "orders",
        "",
        &[subscription(&receiver, "hook", "", &attributes)],
    ))
    .start();
    let mut sent = event("e1");
    sent["data"] = json!({"color": "blue", "n": 1.50, "flag": true});
    publish(&server, "orders", "application/json", json!([sent]).to_string());
    headers(
        &receiver.next(),
        &[
            ("x-static", Some("plain")),
            ("authorization", Some("Basic hidden")),
            ("x-color", Some("blue")),
            ("x-count", Some("1.5")),
            ("x-flag", Some("true")),
            ("x-subject", Some("/orders/1")),
            ("x-missing", None),
            ("x-object", None),
        ],
    );
    // The edge API shows all subscriptions, secrets masked.
    let shown = server
        .edge("GET", "/topics/orders/eventSubscriptions/hook", &Value::Null)
        .expect(200);
    assert!(!shown.text().contains("hidden"), "{}", shown.text());
    assert!(!server.log().join("\n").contains("hidden"));
}

#[test]
fn filters_decide_who_gets_what() {
    let receiver = TestReceiver::start();
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let events = [
        ("plain", json!({"data": {}})),
        ("typed", json!({"eventType": "special"})),
        ("path", json!({"subject": "/Blobs/a.JPG"})),
        ("small", json!({"data": {"size": 1.5, "tags": ["red", "green"]}})),
        (
            "large",
            json!({"data": {"size": 9007199254740993_u64, "name": "Kilo"}}),
        ),
        (
            "nulls",
            json!({"data": {"size": null, "name": null, "ok": false}}),
        ),
        ("nested", json!({"data": {"a": {"b": {"c": "deep"}}, "ok": true}})),
    ];
    let filter = |operator: &str, key: &str, operand: Value| {
        let name = if operand.is_array() { "values" } else { "value" };
        let mut filter = json!({"operatorType": operator, "key": key});
        if !operand.is_null() {
            filter[name] = operand;
        }
        json!({"advancedFilters": [filter]})
    };
    let checks = [
        (json!({"includedEventTypes": ["SPECIAL", "other"]}), vec!["typed"]),
        (
            json!({"subjectBeginsWith": "/blobs/", "subjectEndsWith": ".jpg"}),
            vec!["path"],
        ),
        (
            json!({"subjectBeginsWith": "/blobs/", "isSubjectCaseSensitive": true}),
            vec![],
        ),
        (
            filter("NumberIn", "data.size", json!([9007199254740993_u64, 2])),
            vec!["large"],
        ),
        (
            filter("NumberIn", "data.size", json!([9007199254740992_u64])),
            vec![],
        ),
        (filter("NumberLessThan", "Data.size", json!(2)), vec!["small"]),
        (
            filter("NumberNotIn", "data.size", json!([1.50])),
            vec!["large", "nested", "nulls", "path", "plain", "typed"],
        ),
        (
            filter("StringContains", "data.name", json!(["iL", "x"])),
            vec!["large"],
        ),
        (
            filter("StringNotIn", "eventType", json!(["SPECIAL"])),
            vec!["large", "nested", "nulls", "path", "plain", "small"],
        ),
        (filter("BoolEquals", "data.ok", json!(true)), vec!["nested"]),
        (
            filter("StringBeginsWith", "data.a.b.c", json!(["DE"])),
            vec!["nested"],
        ),
        (filter("StringIn", "data.tags", json!(["red"])), vec![]),
    ];
    for (n, (filter, _)) in checks.iter().enumerate() {
        server.subscribe(
            "orders",
            &format!("check{n}"),
            &receiver.url(&format!("/{n}")),
            json!({"filter": filter}),
        );
    }
    let bodies = events.iter().map(|(id, change)| {
        let mut event = event(*id);
        for (name, value) in change.as_object().expect("an object") {
            event[name] = value.clone();
        }
        event
    });
    server.publish("orders", &bodies.collect::<Vec<_>>());
    // Events are matched when they are published, so the count of matches is final.
    let matched: usize = checks.iter().map(|(_, ids)| ids.len()).sum();
    assert_eq!(server.health()["deliveries"]["matched"], matched);
    let mut got = vec![BTreeSet::new(); checks.len()];
    for _ in 0..matched {
        let delivery = receiver.next();
        let n: usize = delivery.path[1..].parse().unwrap();
        got[n].extend(delivery.ids());
    }
    for (n, (filter, ids)) in checks.iter().enumerate() {
        assert_eq!(
            got[n].iter().map(String::as_str).collect::<Vec<_>>(),
            *ids,
            "{filter}"
        );
    }
}

#[test]
fn the_operators_of_the_cloud_work_in_declared_subscriptions() {
    let receiver = TestReceiver::start();
    let filter = |line: &str, arrays: bool| {
        format!(
            "filter = {{ enable_advanced_filtering_on_arrays = {arrays}, advanced_filters = [{{ {line} }}] }}"
        )
    };
    let sub = |name: &str, line: &str, arrays: bool| subscription(&receiver, name, &filter(line, arrays), "");
    let subscriptions = [
        sub(
            "range",
            "operatorType = \"NumberInRange\", key = \"data.n\", values = [[1, 2], [5, 6.5]]",
            false,
        ),
        sub(
            "notrange",
            "operatorType = \"NumberNotInRange\", key = \"data.n\", values = [[1, 2]]",
            false,
        ),
        sub(
            "nothing",
            "operatorType = \"IsNullOrUndefined\", key = \"data.n\"",
            false,
        ),
        sub(
            "something",
            "operatorType = \"IsNotNull\", key = \"data.n\"",
            false,
        ),
        sub(
            "arrays",
            "operatorType = \"StringIn\", key = \"data.tags\", values = [\"RED\"]",
            true,
        ),
        sub(
            "notends",
            "operatorType = \"StringNotEndsWith\", key = \"data.name\", values = [\".jpg\", \".png\"]",
            false,
        ),
    ];
    let server = ServerSetup::config(topic("orders", "", &subscriptions)).start();
    let events = [
        ("two", json!({"n": 2, "name": "a.JPG"})),
        ("six", json!({"n": 6.5, "tags": ["green", "red"]})),
        ("none", json!({"n": null, "name": "a.txt", "tags": "red"})),
    ];
    let bodies = events.iter().map(|(id, data)| {
        let mut event = event(*id);
        event["data"] = data.clone();
        event
    });
    publish(
        &server,
        "orders",
        "application/json",
        json!(bodies.collect::<Vec<_>>()).to_string(),
    );
    let expected: BTreeSet<(&str, &str)> = [
        ("range", "two"),
        ("range", "six"),
        ("notrange", "six"),
        ("notrange", "none"),
        ("nothing", "none"),
        ("something", "two"),
        ("something", "six"),
        ("arrays", "six"),
        ("arrays", "none"),
        ("notends", "none"),
    ]
    .into();
    assert_eq!(server.health()["deliveries"]["matched"], expected.len());
    let got: Vec<_> = expected.iter().map(|_| receiver.next()).collect();
    let got: BTreeSet<_> = got
        .iter()
        .map(|d| (d.path[1..].to_owned(), d.ids()[0].clone()))
        .collect();
    assert_eq!(
        got,
        expected
            .into_iter()
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .collect()
    );
}

#[test]
fn what_matched_is_delivered_even_if_the_filter_changes_afterwards() {
    let gate = Arc::new(ReplyGate::default());
    let receiver = TestReceiver::answering({
        let gate = gate.clone();
        move |_| {
            gate.wait();
            ScriptedReply::Status(200)
        }
    });
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    // More events than are in flight at once: most still wait in the log when the filter changes.
    let events: Vec<_> = (0..100).map(|n| event(format!("e{n}"))).collect();
    server.publish("orders", &events);
    server.subscribe(
        "orders",
        "billing",
        &receiver.url("/"),
        json!({"filter": {"includedEventTypes": ["None"]}}),
    );
    server.publish("orders", &[event("late")]);
    gate.open();
    let all: BTreeSet<_> = (0..100).map(|n| format!("e{n}")).collect();
    assert_eq!(receiver.all_of(&all), all);
    server.counted("/deliveries/delivered", 100);
    assert_eq!(server.health()["deliveries"]["matched"], 100);
}

#[test]
fn deliveries_reach_https_receivers_whose_ca_is_configured() {
    // The receiver is another Postrider server, whose CA is trusted only by configuration.
    let receiver = TestReceiver::start();
    let far = ServerSetup::config(topic("far", "", &[subscription(&receiver, "far", "", "")])).start();
    let url = format!(
        "https://localhost:{}/topics/far/api/events?aeg-sas-key={}",
        far.https.port(),
        KEY.replace('=', "%3D")
    );
    let subscribed = |config: String| {
        let near = ServerSetup::config(config).start();
        // A custom event is forwarded unchanged; a `topic` stamped by us would be refused there.
        let custom = json!({"properties": {"inputSchema": "CustomEventSchema"}});
        near.edge("PUT", "/topics/near", &custom).expect(200);
        near
    };
    let trusting = subscribed(format!("transport.extra_ca_files = [{:?}]", far.ca()));
    trusting.subscribe("near", "far", &url, json!(null));
    trusting
        .send(
            "POST",
            "/topics/near/events",
            &[JSON],
            json!([event("e1")]).to_string(),
        )
        .expect(200);
    assert_eq!(receiver.next().ids(), ["e1"]);

    let wary = subscribed(String::new());
    wary.subscribe("near", "far", &url, json!(null));
    wary.send(
        "POST",
        "/topics/near/events",
        &[JSON],
        json!([event("e2")]).to_string(),
    )
    .expect(200);
    wary.counted("/deliveries/attemptsFailed", 1);
    assert!(receiver.take_received().is_empty());
}

#[test]
fn subscriptions_of_a_domain_get_all_of_it_or_one_topic() {
    let receiver = TestReceiver::start();
    let sub = |name: &str| subscription(&receiver, name, "", "");
    let config = format!(
        "[[domain]]\nname = \"tenants\"\nkey1 = \"{KEY}\"\n[[domain.subscription]]\n{}\n\
         [[domain.topic]]\nname = \"acme\"\n[[domain.topic.subscription]]\n{}\n",
        sub("all"),
        sub("acme")
    );
    let server = ServerSetup::config(config).start();
    let to = |id: &str, topic: &str| {
        let mut event = event(id);
        event["topic"] = json!(topic);
        event
    };
    let domain = IDS.replace("/topics", "/domains/tenants/topics");
    let events = json!([
        to("e1", "acme"),
        to("e2", "other"),
        to("e3", &format!("{domain}/ACME"))
    ]);
    server
        .send(
            "POST",
            "/domains/tenants/api/events",
            &[JSON, ("aeg-sas-key", KEY)],
            events.to_string(),
        )
        .expect(200);
    assert_eq!(server.health()["deliveries"]["matched"], 5);
    let mut got: Vec<(String, Value, Value)> = (0..5)
        .map(|_| {
            let delivery = receiver.next();
            let event = delivery.json()[0].take();
            (delivery.path, event["id"].clone(), event["topic"].clone())
        })
        .collect();
    got.sort_by_key(|(path, id, _)| (path.clone(), id.to_string()));
    let row =
        |path: &str, id: &str, topic: &str| (path.to_owned(), json!(id), json!(format!("{domain}/{topic}")));
    let expected = [
        row("/acme", "e1", "acme"),
        row("/acme", "e3", "ACME"),
        row("/all", "e1", "acme"),
        row("/all", "e2", "other"),
        row("/all", "e3", "ACME"),
    ];
    assert_eq!(got, expected);
}

#[test]
fn an_edge_topic_forwards_to_a_topic_in_the_cloud() {
    let receiver = TestReceiver::start();
    let cloud = ServerSetup::config(topic("far", "", &[subscription(&receiver, "far", "", "")])).start();
    let edge = ServerSetup {
        env: vec![
            ("outbound__eventgrid__httpsOnly", "false".into()),
            ("outbound__eventgrid__allowInvalidHostnames", "true".into()),
        ],
        ..ServerSetup::default()
    };
    let edge = edge.start();
    edge.put_topic("near");
    let properties = json!({
        "endpointUrl": format!("http://{}/topics/far/api/events?api-version=2018-01-01", cloud.http),
        "sasKey": KEY,
    });
    let forward = |properties: &Value| {
        let body =
            json!({"properties": {"destination": {"endpointType": "eventGrid", "properties": properties}}});
        edge.edge("PUT", "/topics/near/eventSubscriptions/up", &body)
            .expect(200)
    };
    assert!(!forward(&properties).text().contains(KEY), "the key is not shown");
    edge.publish("near", &[event("e1")]);
    let event1 = receiver.next().json()[0].take();
    assert_eq!(
        (&event1["id"], &event1["topic"]),
        (&json!("e1"), &json!(format!("{IDS}/far")))
    );

    let mut named = properties;
    named["topicName"] = json!(format!("{IDS}/far"));
    forward(&named);
    edge.publish("near", &[event("e2")]);
    assert_eq!(receiver.next().json()[0]["topic"], format!("{IDS}/far"));
}
