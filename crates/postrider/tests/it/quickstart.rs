//! The README's way from nothing to a delivered event.

use crate::receiver::Receiver;
use crate::server::{Server, event};
use serde_json::json;

#[test]
fn an_event_published_by_the_edge_api_arrives_at_the_webhook() {
    let receiver = Receiver::start();
    let server = Server::start_plain();
    server.put_topic("orders");
    server.subscribe(
        "orders",
        "billing",
        &receiver.url("/hook?code=secret"),
        json!(null),
    );
    server.publish("orders", &[event("e1")]);

    let delivery = receiver.next();
    assert_eq!(delivery.path, "/hook?code=secret");
    let mut expected = event("e1");
    expected["topic"] = json!("orders");
    expected["metadataVersion"] = json!("1");
    assert_eq!(delivery.json(), json!([expected]));

    for (name, value) in [
        ("content-type", "application/json; charset=utf-8"),
        ("aeg-event-type", "Notification"),
        ("aeg-subscription-name", "BILLING"),
        ("aeg-delivery-count", "0"),
        ("aeg-metadata-version", "1"),
        ("aeg-data-version", "1.0"),
        ("host", &receiver.address.to_string()),
    ] {
        assert_eq!(delivery.header(name), Some(value), "{name}");
    }
    for name in [
        "accept",
        "user-agent",
        "authorization",
        "origin",
        "transfer-encoding",
    ] {
        assert_eq!(delivery.header(name), None, "{name}");
    }

    server.counted("/deliveries/delivered", 1);
    let health = server.send("GET", "/healthz", &[], "").expect(200).json();
    assert_eq!(health["status"], "ready");
    assert_eq!(health["deliveries"]["attempts"], 1);
}
