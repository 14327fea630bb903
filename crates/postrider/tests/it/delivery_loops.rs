//! Deliveries that lead back to their own topic.

use crate::receiver::TestReceiver;
use crate::server::{EDGE_VERSION, JSON, ServerSetup, event};
use crate::wait;
use serde_json::json;

// Each event creates two more, which would never end without the hop limit.
#[test]
fn a_loop_ends_and_what_it_costs_is_told() {
    let receiver = TestReceiver::start();
    let mut server = ServerSetup::config("[limits]\nhops_max = 2\n").start();
    server.put_topic("orders");
    let back = format!(
        "http://localhost:{}/topics/orders/events?{EDGE_VERSION}",
        server.http.port()
    );
    server.subscribe("orders", "one", &back, json!(null));
    server.subscribe("orders", "two", &back, json!(null));
    server.subscribe("orders", "plain", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("e")]);
    // Hops 0, 1 and 2 have 1, 2 and 4 events; 8 more are beyond the limit, for 3 subscriptions
    // each.
    server.counted("/deliveries/dropped/TooManyHops", 24);
    let mut hops: Vec<String> = (0..7)
        .map(|_| {
            receiver
                .next()
                .header("postrider-hops")
                .unwrap_or("none")
                .to_owned()
        })
        .collect();
    hops.sort();
    assert_eq!(hops, ["1", "2", "2", "3", "3", "3", "3"]);
    server.logged(&["TooManyHops"]);
    assert_eq!(server.health()["deliveries"]["deadLettered"], 0);

    // The hop count is stored with the event.
    server.kill();
    server.start();
    let publish = |hops: &str| {
        let target = format!("/topics/orders/events?{EDGE_VERSION}");
        let body = json!([event("f")]).to_string();
        server.send("POST", &target, &[JSON, ("postrider-hops", hops)], body)
    };
    publish("2").expect(200);
    wait::until("it comes with the next number", || {
        let arrived = receiver.take_received();
        let mut own = arrived.iter().filter(|one| one.ids() == ["f"]);
        own.any(|one| one.header("postrider-hops") == Some("3"))
            .then_some(())
    });
    for bad in ["", "x", "-1", "1.5", "99999999999"] {
        let refused = publish(bad).expect(400);
        assert!(refused.text().contains("postrider-hops"), "{}", refused.text());
    }
}
