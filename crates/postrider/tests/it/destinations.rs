//! Destinations other than webhooks: storage queues, functions, brokers, relays.

use crate::azurite::{ACCOUNT, Azurite, KEY};
use crate::clock_lab::ClockLab;
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use crate::wait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const GROUP: &str = "/subscriptions/s/resourceGroups/g/providers";

/// A topic `orders` with a subscription `sub` whose destination properties are TOML.
fn subscription(kind: &str, properties: &str) -> String {
    format!(
        "[[topic]]\nname = \"orders\"\n{}",
        another("sub", kind, properties)
    )
}

/// A further subscription of the topic.
fn another(name: &str, kind: &str, properties: &str) -> String {
    format!(
        "[[topic.subscription]]\nname = \"{name}\"\n\
         destination = {{ endpoint_type = \"{kind}\", properties = {{ {properties} }} }}\n"
    )
}

fn to_queue(more: &str) -> String {
    let account = format!("{GROUP}/Microsoft.Storage/storageAccounts/{ACCOUNT}");
    format!("resource_id = \"{account}\", queue_name = \"orders-queue\"{more}")
}

/// Events in a queue, by id; null if the queue does not exist.
fn queued(azurite: &Azurite, queue: &str) -> Value {
    let mut all: Value = serde_json::from_str(&azurite.ask("read", queue)).expect("it prints JSON");
    if let Some(all) = all.as_array_mut() {
        all.sort_by_key(|message| message["event"]["id"].to_string());
    }
    all
}

#[track_caller]
fn delivered(server: &TestServer, count: u64) {
    server.counted("/deliveries/delivered", count);
}

#[test]
fn the_azure_sdk_reads_events_from_a_queue() {
    let Some(azurite) = Azurite::start_service("queue") else {
        return;
    };
    let clouds = "queue_name = \"clouds-queue\", queue_message_time_to_live_in_seconds = -1";
    let config = format!(
        "{}{}[[topic]]\nname = \"clouds\"\ninput_schema = \"CloudEventSchemaV1_0\"\n{}",
        azurite.configured(KEY, true),
        subscription(
            "StorageQueue",
            &to_queue(", queue_message_time_to_live_in_seconds = 300")
        ),
        another(
            "sub",
            "StorageQueue",
            &format!("resource_id = \"{ACCOUNT}\", {clouds}")
        ),
    );
    let server = ServerSetup::config(config).start();
    server.publish("orders", &[event("a"), event("b")]);
    delivered(&server, 2);
    let messages = queued(&azurite, "orders-queue");
    assert_eq!(messages.as_array().map(Vec::len), Some(2), "{messages}");
    for (message, id) in messages.as_array().into_iter().flatten().zip(["a", "b"]) {
        let event = &message["event"];
        assert_eq!((&event["id"], &message["seconds"]), (&json!(id), &json!(300)));
        assert_eq!(event["data"], json!({"color": "blue"}));
        let topic = event["topic"].as_str().expect("a topic");
        assert!(
            topic.ends_with("/providers/Microsoft.EventGrid/topics/orders"),
            "{topic}"
        );
    }
    let cloud = json!({"specversion": "1.0", "id": "c", "source": "/shop", "type": "T", "data": "é"});
    let headers = [("content-type", "application/cloudevents+json")];
    let path = "/topics/clouds/events?api-version=2019-01-01-preview";
    server.send("POST", path, &headers, cloud.to_string()).expect(200);
    delivered(&server, 3);
    let messages = queued(&azurite, "clouds-queue");
    assert_eq!(messages[0]["event"], cloud);
    let seconds = messages[0]["seconds"].as_i64().expect("a number");
    assert!(seconds > 1_000_000_000, "for ever, not {seconds}");
}

#[test]
fn a_queue_that_is_away_or_missing_is_tried_again() {
    let Some(mut azurite) = Azurite::start_service("queue") else {
        return;
    };
    let config = azurite.configured(KEY, false) + &subscription("StorageQueue", &to_queue(""));
    let server = ServerSetup::test_clock(config).start();
    let pass = |time: &str| server.advance(&json!({"by": time})).1;
    let waits = || {
        let health = server.health();
        health["deliveries"]["delivered"].as_u64() == Some(0)
    };
    azurite.stop();
    server.publish("orders", &[event("a")]);
    // The first attempt may be in progress already.
    pass("0s");
    assert_eq!(pass("10s"), 1);
    azurite.start_again();
    // The service is back but the queue does not exist, so the retry comes after five minutes and
    // not sooner.
    assert_eq!(pass("30s"), 1);
    assert_eq!(queued(&azurite, "orders-queue"), json!(null));
    assert_eq!(pass("299s"), 0);
    assert!(waits());
    azurite.ask("make", "orders-queue");
    assert_eq!(pass("1s"), 1);
    let messages = queued(&azurite, "orders-queue");
    assert_eq!(
        (&messages[0]["event"]["id"], &messages[0]["seconds"]),
        (&json!("a"), &json!(604_800))
    );
    assert_eq!(messages.as_array().map(Vec::len), Some(1));
    delivered(&server, 1);
}

#[test]
fn an_edge_device_names_a_queue_by_its_connection_string() {
    let Some(azurite) = Azurite::start_service("queue") else {
        return;
    };
    azurite.ask("make", "edge-queue");
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let endpoint = azurite.endpoint();
    let connection = format!("AccountName={ACCOUNT};AccountKey={KEY};QueueEndpoint={endpoint}");
    let path = "/topics/orders/eventSubscriptions/sub";
    let body = |connection: &str| {
        let properties = json!({"connectionString": connection, "queueName": "edge-queue"});
        json!({"properties": {"destination": {"endpointType": "StorageQueue", "properties": properties}}})
    };
    let refused = server.edge("PUT", path, &body("AccountName=a")).expect(400);
    assert!(refused.text().contains("AccountKey"), "{}", refused.text());
    server.edge("PUT", path, &body(&connection)).expect(200);
    server.publish("orders", &[event("a")]);
    delivered(&server, 1);
    assert_eq!(queued(&azurite, "edge-queue")[0]["event"]["id"], "a");
}

/// A resource played by the receiver, in the configuration.
fn registered(receiver: &TestReceiver, id: &str, path: &str, keys: &str) -> String {
    let url = receiver.url(path);
    format!("[[destination]]\nresource = \"{GROUP}/{id}\"\nurl = \"{url}\"\n{keys}\n")
}

const KEYS: &str = "key_name = \"send\"\nkey = \"local-key\"";

/// Checks a token for this URL, signed with the key above.
#[track_caller]
fn assert_token(token: Option<&str>, url: &str) {
    let token = token.expect("a token");
    let rest = token.strip_prefix("SharedAccessSignature sr=").expect("a token");
    let (resource, rest) = rest.split_once("&sig=").expect("a signature");
    let (signature, rest) = rest.split_once("&se=").expect("a time");
    let (expires, name) = rest.split_once("&skn=").expect("a name");
    assert_eq!(resource.replace("%3A", ":").replace("%2F", "/"), url);
    assert_eq!(name, "send");
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, b"local-key");
    let made = ring::hmac::sign(&key, format!("{resource}\n{expires}").as_bytes());
    let made = BASE64
        .encode(made)
        .replace('+', "%2B")
        .replace('/', "%2F")
        .replace('=', "%3D");
    assert_eq!(signature, made);
}

/// Checks headers; `None` for those that must be absent.
#[track_caller]
fn assert_headers(delivery: &ReceivedDelivery, expected: &[(&str, Option<&str>)]) {
    for (name, value) in expected {
        assert_eq!(delivery.header(name), *value, "{name}");
    }
}

#[test]
fn a_function_is_posted_to_with_its_key() {
    let receiver = TestReceiver::start();
    let id = "Microsoft.Web/sites/app/functions/fn";
    let config = registered(
        &receiver,
        id,
        "/runtime/webhooks/eventgrid?functionName=fn",
        "key = \"fn-key\"",
    );
    let lower = id.to_lowercase();
    let properties = format!(
        "resource_id = \"{GROUP}/{lower}\", max_events_per_batch = 10, delivery_attribute_mappings = [\
         {{ name = \"X-Color\", type = \"Dynamic\", properties = {{ source_field = \"data.color\" }} }}]"
    );
    let lab = ClockLab::start(
        ServerSetup::test_clock(config + &subscription("AzureFunction", &properties)),
        receiver,
    );
    lab.server.publish("orders", &[event("a"), event("b")]);
    let arrivals = lab.at_once();
    let mut ids: Vec<_> = arrivals
        .iter()
        .flat_map(|arrival| arrival.delivery.ids())
        .collect();
    ids.sort_unstable();
    assert_eq!(ids, ["a", "b"]);
    let delivery = &arrivals[0].delivery;
    assert_eq!(delivery.method, "POST");
    assert_eq!(delivery.path, "/runtime/webhooks/eventgrid?functionName=fn");
    assert!(delivery.json().is_array());
    let expected = [
        ("x-functions-key", Some("fn-key")),
        ("aeg-event-type", Some("Notification")),
        ("aeg-subscription-name", Some("SUB")),
        ("content-type", Some("application/json; charset=utf-8")),
        ("x-color", Some("blue")),
        ("authorization", None),
    ];
    assert_headers(delivery, &expected);
}

#[test]
fn an_event_hub_gets_messages_with_properties() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(201));
    let id = "Microsoft.EventHub/namespaces/ns/eventhubs/hub";
    let config = registered(&receiver, id, "/hub/", KEYS);
    let properties = format!(
        "resource_id = \"{GROUP}/{id}\", delivery_attribute_mappings = [\
         {{ name = \"PartitionKey\", type = \"Dynamic\", properties = {{ source_field = \"data.color\" }} }},\
         {{ name = \"X-Shop\", type = \"Static\", properties = {{ value = \"the \\\"1st\\\"\" }} }},\
         {{ name = \"X-Type\", type = \"Dynamic\", properties = {{ source_field = \"eventType\" }} }}]"
    );
    // In 2018 only 200 and 202 were successes, for webhooks.
    let setup = ServerSetup::config(config + &subscription("EventHub", &properties)).profile("cloud-2018");
    let server = setup.start();
    server.publish("orders", &[event("a"), event("b")]);
    let mut got = [receiver.next(), receiver.next()];
    got.sort_by_key(ReceivedDelivery::ids);
    delivered(&server, 2);
    for (delivery, id) in got.iter().zip(["a", "b"]) {
        assert_eq!(delivery.method, "POST");
        assert_eq!(delivery.path, "/hub/messages?api-version=2014-01");
        assert_eq!(delivery.ids(), [id]);
        assert!(delivery.json().is_array());
        let expected = [
            ("content-type", Some("application/json; charset=utf-8")),
            ("brokerproperties", Some(r#"{"PartitionKey":"blue"}"#)),
            ("partitionkey", None),
            ("x-shop", Some(r#""the \"1st\"""#)),
            ("x-type", Some(r#""Orders.Created""#)),
            ("aeg-event-type", Some(r#""Notification""#)),
            ("aeg-subscription-name", Some(r#""SUB""#)),
            ("aeg-delivery-count", Some(r#""0""#)),
            ("aeg-data-version", Some(r#""1.0""#)),
            ("aeg-metadata-version", Some(r#""1""#)),
        ];
        assert_headers(delivery, &expected);
        assert_token(delivery.header("authorization"), &receiver.url("/hub"));
    }
}

#[test]
fn service_bus_gets_one_object_and_the_same_id_again() {
    let asked = AtomicUsize::new(0);
    let receiver = TestReceiver::answering(move |delivery| match delivery.path.as_str() {
        // The Service Bus topic does not exist at first.
        "/shop/messages" if asked.fetch_add(1, Relaxed) == 0 => ScriptedReply::Status(410),
        _ => ScriptedReply::Status(201),
    });
    let [queue, topic] = ["queues/orders", "topics/shop"].map(|entity| {
        let id = format!("Microsoft.ServiceBus/namespaces/ns/{entity}");
        (format!("resource_id = \"{GROUP}/{id}\""), id)
    });
    let keyless = registered(&receiver, &topic.1, "/shop", "");
    let session = "delivery_attribute_mappings = [\
         { name = \"sessionid\", type = \"Dynamic\", properties = { source_field = \"subject\" } }]";
    let config = format!(
        "{}{keyless}{}{}",
        registered(&receiver, &queue.1, "/orders", KEYS),
        subscription("ServiceBusQueue", &format!("{}, {session}", queue.0)),
        another("shop", "ServiceBusTopic", &topic.0),
    );
    let lab = ClockLab::start(ServerSetup::test_clock(config), receiver);
    lab.server.publish("orders", &[event("a")]);
    let mut first = lab.at_once();
    first.sort_by_key(|arrival| arrival.delivery.path.clone());
    let [to_queue, to_topic] = first.as_slice() else {
        panic!("{first:?}");
    };
    let to_queue = &to_queue.delivery;
    assert_eq!(
        (to_queue.method.as_str(), to_queue.path.as_str()),
        ("POST", "/orders/messages")
    );
    assert_eq!(to_queue.json()["id"], "a", "an object, not an array");
    let id = to_queue
        .header("aeg-output-event-id")
        .expect("an id")
        .trim_matches('"');
    let properties = to_queue.header("brokerproperties").expect("properties");
    let properties: Value = serde_json::from_str(properties).expect("JSON");
    assert_eq!(properties, json!({"MessageId": id, "SessionId": "/orders/1"}));
    assert_headers(to_queue, &[("sessionid", None)]);
    assert_token(to_queue.header("authorization"), &lab.receiver.url("/orders"));

    let again = lab.next_arrival();
    assert_eq!(again.seconds(), 10);
    let same = |delivery: &ReceivedDelivery| delivery.header("brokerproperties").map(str::to_owned);
    assert_eq!(again.delivery.path, "/shop/messages");
    assert_eq!(same(&again.delivery), same(&to_topic.delivery));
    assert_headers(
        &again.delivery,
        &[("authorization", None), ("aeg-delivery-count", Some("\"1\""))],
    );
    assert!(lab.next_arrivals().is_empty());
    assert_eq!(lab.count("delivered"), 2);
}

#[test]
fn a_relay_is_told_who_sends() {
    let receiver = TestReceiver::start();
    let id = "Microsoft.Relay/namespaces/ns/hybridConnections/hc";
    let config = registered(&receiver, id, "/hc", KEYS);
    let properties = format!("resource_id = \"{GROUP}/{id}\"");
    let server = ServerSetup::config(config + &subscription("HybridConnection", &properties)).start();
    server.publish("orders", &[event("a")]);
    let delivery = receiver.next();
    assert_eq!(
        (delivery.method.as_str(), delivery.path.as_str()),
        ("POST", "/hc")
    );
    assert_eq!(delivery.json()[0]["id"], "a");
    assert_headers(
        &delivery,
        &[("aeg-event-type", Some("Notification")), ("authorization", None)],
    );
    assert_token(delivery.header("servicebusauthorization"), &receiver.url("/hc"));
}

#[test]
fn an_edge_device_names_a_broker_by_its_connection_string() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(201));
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let subscribe = |kind: &str, properties: Value| {
        let body = json!({"properties": {"destination": {"endpointType": kind, "properties": properties}}});
        server.edge("PUT", "/topics/orders/eventSubscriptions/sub", &body)
    };
    let connection = format!(
        "Endpoint={};EntityPath=hub;SharedAccessKeyName=send",
        receiver.url("/")
    );
    let refused = subscribe("EventHub", json!({"connectionString": connection})).expect(400);
    assert!(refused.text().contains("SharedAccessKey"), "{}", refused.text());
    let refused = subscribe("EdgeHub", json!({"outputName": "out"})).expect(400);
    assert!(
        refused.text().contains("EdgeHub is not supported"),
        "{}",
        refused.text()
    );

    let connection = format!("{connection};SharedAccessKey=local-key");
    subscribe("EventHub", json!({"connectionString": connection})).expect(200);
    server.publish("orders", &[event("a")]);
    let delivery = receiver.next();
    assert_eq!(delivery.path, "/hub/messages?api-version=2014-01");
    assert_token(delivery.header("authorization"), &receiver.url("/hub"));
    delivered(&server, 1);
}

#[test]
fn a_destination_that_nobody_knows_is_refused() {
    let check = |config: String, words: &[&str]| {
        let told = ServerSetup::config(config).refusal();
        for word in words {
            assert!(told.contains(word), "{word} in {told}");
        }
    };
    let field = "properties.destination.properties.resourceId";
    let receiver = TestReceiver::start();
    let known = "Microsoft.EventHub/namespaces/ns/eventhubs/hub";
    let config = registered(&receiver, known, "/hub", KEYS);
    let other = format!("resource_id = \"{GROUP}/Microsoft.EventHub/namespaces/ns/eventhubs/other\"");
    check(
        config.clone() + &subscription("EventHub", &other),
        &[
            field,
            "eventhubs/other",
            "[[destination]]",
            "configured are",
            known,
        ],
    );
    check(
        subscription("StorageQueue", &to_queue("")),
        &[field, ACCOUNT, "[[storage_account]]", "none is"],
    );
    check(
        subscription("EdgeHub", "output_name = \"out\""),
        &["endpointType", "EdgeHub is not supported"],
    );
    let attribute = format!(
        "resource_id = \"{GROUP}/{known}\", delivery_attribute_mappings = [\
         {{ name = \"BrokerProperties\", type = \"Static\", properties = {{ value = \"v\" }} }}]"
    );
    check(
        config + &subscription("EventHub", &attribute),
        &[
            "deliveryAttributeMappings[0].name",
            "must not be a header that the delivery itself sets",
        ],
    );
}

#[test]
fn a_destination_that_is_no_longer_configured_fails_until_it_is_again() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(201));
    let id = "Microsoft.ServiceBus/namespaces/ns/queues/q";
    let known = registered(&receiver, id, "/q", KEYS);
    let properties = format!("resource_id = \"{GROUP}/{id}\"");
    let config = known.clone() + &subscription("ServiceBusQueue", &properties);
    let mut server = ServerSetup::test_clock(config).start();
    server.stop();
    server.configure(String::new());
    server.start();
    server.logged(&["WARN", "events cannot be delivered", "sub", id]);
    server.publish("orders", &[event("a")]);
    let failed = || server.health()["deliveries"]["attempts"].as_u64() == Some(1);
    assert!(wait::is_true_in_time(failed), "{}", server.health());
    server.stop();
    server.configure(known);
    server.start();
    server.advance(&json!({"toNextAttempt": true}));
    let delivery = receiver.next();
    assert_eq!(delivery.json()["id"], "a");
    assert_headers(&delivery, &[("aeg-delivery-count", Some("\"1\""))]);
    delivered(&server, 1);
}
