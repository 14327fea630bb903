//! Two servers: one forwards its events to the other, which may be away for hours.

use crate::receiver::TestReceiver;
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// A destination of type EventGrid: a topic of another server.
fn event_grid(url: &str) -> Value {
    json!({
        "endpointType": "EventGrid",
        "properties": {"endpointUrl": url, "sasKey": KEY, "maxEventsPerBatch": 10},
    })
}

/// Publish URL of a topic, for a destination of type EventGrid.
fn publish_url(server: &TestServer, topic: &str) -> String {
    format!(
        "http://{}/topics/{topic}/api/events?api-version=2018-01-01",
        server.http
    )
}

fn forward(from: &TestServer, topic: &str, url: &str) {
    let path = format!("/topics/{topic}/eventSubscriptions/up");
    let body = json!({"properties": {"destination": event_grid(url)}});
    from.edge("PUT", &path, &body).expect(200);
}

fn topic_with_key(name: &str) -> String {
    format!("[[topic]]\nname = \"{name}\"\nkey1 = \"{KEY}\"\n")
}

#[test]
fn everything_arrives_after_hours_without_the_upper_server_and_a_crash_of_both() {
    let receiver = TestReceiver::start();
    let mut upper = ServerSetup::config(topic_with_key("central")).start();
    upper.subscribe("central", "archive", &receiver.url("/"), json!(null));
    let mut lower = ServerSetup::test_clock("").start();
    lower.put_topic("orders");
    forward(&lower, "orders", &publish_url(&upper, "central"));

    lower.publish("orders", &[event("before")]);
    let first = receiver.next();
    assert_eq!(first.ids(), ["before"]);
    // The event has made two hops: one to the upper server, one from it.
    assert_eq!(first.header("postrider-hops"), Some("2"));
    // The topic is the upper server's, whatever it was called below.
    assert_eq!(first.json()[0]["topic"], "central");

    upper.kill();
    let mut published = BTreeSet::new();
    for hour in 0..6 {
        let ids: Vec<String> = (0..5).map(|n| format!("hour-{hour}-{n}")).collect();
        let events: Vec<Value> = ids.iter().map(event).collect();
        lower.publish("orders", &events);
        published.extend(ids);
        lower.advance(&json!({"by": "1h"}));
        if hour == 3 {
            lower.kill();
            lower.start();
        }
    }
    assert_eq!(receiver.take_received().len(), 0);
    lower.kill();
    upper.start();
    lower.start();
    // The probation delay is at most four hours; after that everything is due at once.
    lower.advance(&json!({"by": "8h"}));
    let mut arrived = BTreeSet::new();
    wait::until("everything has arrived", || {
        arrived.extend(receiver.take_received().iter().flat_map(|one| one.ids()));
        published.is_subset(&arrived).then_some(())
    });
    // A crash may repeat the last delivery.
    arrived.remove("before");
    assert_eq!(arrived, published);
    assert_eq!(lower.health()["deliveries"]["dropped"], json!({}));
}

#[test]
fn two_servers_that_forward_to_each_other_come_to_an_end() {
    let receiver = TestReceiver::start();
    let config = |name: &str| format!("[limits]\nhops_max = 3\n{}", topic_with_key(name));
    let east = ServerSetup::config(config("orders")).start();
    let west = ServerSetup::config(config("orders")).start();
    forward(&east, "orders", &publish_url(&west, "orders"));
    forward(&west, "orders", &publish_url(&east, "orders"));
    west.subscribe("orders", "archive", &receiver.url("/"), json!(null));
    east.publish("orders", &[event("e")]);
    // East, west (1), east (2), west (3), and east refuses to continue with 4.
    east.counted("/deliveries/dropped/TooManyHops", 1);
    let hops = [receiver.next(), receiver.next()].map(|one| one.header("postrider-hops").map(str::to_owned));
    assert_eq!(hops, [Some("2".into()), Some("4".into())]);
    assert!(receiver.take_received().is_empty());
}

// Without a topic name an Event Grid event is forwarded without a topic, which the upper server
// sets. A CloudEvent needs a source all the same, or the upper server refuses it and it is lost.
#[test]
fn every_schema_is_taken_by_the_upper_server() {
    let receiver = TestReceiver::start();
    let upper = ServerSetup::config(format!(
        "[[topic]]\nname = \"cloud\"\ninput_schema = \"CloudEventSchemaV1_0\"\nkey1 = \"{KEY}\"\n\
         [[domain]]\nname = \"plants\"\nkey1 = \"{KEY}\"\n\
         [[domain.subscription]]\nname = \"archive\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{}\" }} }}\n",
        receiver.url("/domain")
    ));
    let upper = upper.start();
    upper.subscribe("cloud", "archive", &receiver.url("/cloud"), json!(null));
    let subscription = |name: &str, url: &str, topic_name: &str, schema: &str| {
        format!(
            "[[topic.subscription]]\nname = \"{name}\"\nevent_delivery_schema = \"{schema}\"\n\
             destination = {{ endpoint_type = \"EventGrid\", properties = {{ endpoint_url = \"{url}\", \
             sas_key = \"{KEY}\"{topic_name} }} }}\n"
        )
    };
    let cloud = publish_url(&upper, "cloud");
    let domain = publish_url(&upper, "plants").replace("/topics/", "/domains/");
    let named = ", topic_name = \"plant-7\"";
    let lower = ServerSetup::config(format!(
        "[[topic]]\nname = \"orders\"\n{}{}{}",
        subscription("cloud", &cloud, "", "CloudEventSchemaV1_0"),
        subscription("named", &cloud, named, "CloudEventSchemaV1_0"),
        subscription("domain", &domain, named, "EventGridSchema"),
    ));
    let lower = lower.start();
    lower.publish("orders", &[event("e")]);

    let mut sources = BTreeSet::new();
    for _ in 0..3 {
        let delivery = receiver.next();
        let events = delivery.json();
        let event = events.as_array().map_or(&events, |all| &all[0]);
        assert_eq!(event["id"], "e");
        let member = if delivery.path == "/domain" {
            "topic"
        } else {
            "source"
        };
        let source = event[member].as_str().expect("text");
        sources.insert(format!(
            "{} {}",
            delivery.path,
            source.rsplit('/').next().unwrap_or_default()
        ));
    }
    let expected = ["/cloud orders", "/cloud plant-7", "/domain plant-7"];
    assert_eq!(sources, expected.map(str::to_owned).into());
}

/// The configuration files of docs/store-and-forward.md, upper and lower.
fn documented() -> [String; 2] {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/store-and-forward.md");
    let text = std::fs::read_to_string(path).expect("it is in the repository");
    let blocks: Vec<&str> = text.split("```toml\n").skip(1).collect();
    let [upper, lower] = blocks[..] else {
        panic!("two configuration files, not {}", blocks.len())
    };
    [upper, lower].map(|block| block.split("```").next().unwrap_or_default().to_owned())
}

// Over https, with the upper server's own CA; only names and ports differ from the document.
#[test]
fn the_documented_example_works_as_it_stands() {
    let receiver = TestReceiver::start();
    let [upper, lower] = documented();
    let managed = |config: String| ServerSetup {
        managed_topics: true,
        ..ServerSetup::config(config)
    };
    let upper = managed(upper.replace("http://127.0.0.1:9000", &receiver.url(""))).start();
    let at = format!("localhost:{}", upper.https.port());
    let ca = upper.ca();
    let lower = lower
        .replace("grid.dc.example:4438", &at)
        .replace("upper-ca.pem", ca.to_str().expect("text"));
    let key = lower
        .split("key1 = \"")
        .nth(1)
        .and_then(|rest| rest.split('"').next());
    let key = key.expect("the lower topic has a key").to_owned();
    let lower = managed(lower).start();
    let body = json!([event("1")]).to_string();
    let headers = [JSON, ("aeg-sas-key", key.as_str())];
    lower
        .send("POST", "/topics/readings/api/events", &headers, body)
        .expect(200);
    let delivery = receiver.next();
    assert_eq!(
        (delivery.path.as_str(), delivery.ids()),
        ("/archive", vec!["1".to_owned()])
    );
}

#[test]
fn hosts_that_nobody_allowed_are_refused_by_name() {
    let server = ServerSetup::config("[edge]\nevent_grid_hosts = [\"grid.example\"]\n").start();
    server.put_topic("orders");
    let put = |url: &str| {
        let body = json!({"properties": {"destination": event_grid(url)}});
        server.edge("PUT", "/topics/orders/eventSubscriptions/up", &body)
    };
    let query = "api/events?api-version=2018-01-01";
    put(&format!("http://grid.example:5888/topics/a/{query}")).expect(200);
    let refused = put(&format!("https://other.example/topics/b/{query}")).expect(400);
    assert!(
        refused.text().contains("edge.event_grid_hosts"),
        "{}",
        refused.text()
    );
    let shown = server.edge("GET", "/topics/orders/eventSubscriptions/up", &Value::Null);
    assert!(
        shown.text().contains("grid.example:5888"),
        "what was refused changed nothing"
    );
}
