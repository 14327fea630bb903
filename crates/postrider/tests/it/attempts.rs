//! Attempts of a subscription, as its page shows them.

use crate::clock_lab::ClockLab;
use crate::docs::{CONFIG, SECRET};
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A page of attempts, by `topic/name` of the subscription and the rest of the query.
#[track_caller]
fn attempts(server: &TestServer, of: &str, rest: &str) -> Value {
    let path = format!("/postrider/v1/subscription/attempts?id={of}{rest}");
    server.send("GET", &path, &[SECRET], "").expect(200).json()
}

fn each<'a>(page: &'a Value, name: &str) -> Vec<&'a Value> {
    let all = page["value"].as_array().expect("a list");
    all.iter().map(|one| &one[name]).collect()
}

#[test]
fn a_subscription_shows_its_own_attempts_with_failures_first() {
    let receiver = TestReceiver::answering(|delivery| {
        let failing = delivery.ids().concat() == "bad" || delivery.path.starts_with("/other");
        match failing {
            true => ScriptedReply::Status(500),
            false => ScriptedReply::Status(200),
        }
    });
    let lab = ClockLab::subscribed(ServerSetup::test_clock(CONFIG), receiver, json!(null));
    lab.subscribe("other", "/other", json!(null));
    lab.server.publish("orders", &[event("bad"), event("good")]);
    lab.at_once();
    lab.next_arrivals();
    lab.next_arrivals();
    lab.server.publish("orders", &[event("late")]);
    lab.at_once();

    let all = attempts(&lab.server, "orders/billing", "");
    let of: Vec<(&Value, &Value)> = all["value"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| (&one["event"]["id"], &one["attempt"]))
        .collect();
    let expected = [("bad", 3), ("bad", 2), ("bad", 1), ("late", 1), ("good", 1)];
    let expected = expected.map(|(id, number)| (json!(id), json!(number)));
    assert_eq!(
        of,
        expected.iter().map(|(id, n)| (id, n)).collect::<Vec<_>>(),
        "{all:#}"
    );
    let failed = &all["value"][0];
    assert_eq!(failed["outcome"], "GenericError");
    assert_eq!(failed["text"], "HTTP 500 Internal Server Error");
    assert_eq!(failed["status"], 500);
    assert!(failed["latencyMs"].is_number(), "{failed}");
    assert_eq!(all["value"][3]["text"], "HTTP 200 OK");

    let failures = attempts(&lab.server, "orders/billing", "&outcome=failed");
    assert_eq!(each(&failures, "status"), [500, 500, 500]);
    let named = attempts(&lab.server, "orders/billing", "&outcome=success");
    assert_eq!(each(&named, "status"), [200, 200]);

    // For any page size every attempt is shown once, also for events with several.
    for limit in 1..=6 {
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = attempts(&lab.server, "orders/billing", &format!("&limit={limit}{cursor}"));
            let some = page["value"].as_array().expect("a list");
            assert!(some.len() <= limit, "{page:#}");
            seen.extend(
                some.iter()
                    .map(|one| format!("{} {}", one["event"]["id"], one["attempt"])),
            );
            match page["cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        let distinct: BTreeSet<&String> = seen.iter().collect();
        assert_eq!((seen.len(), distinct.len()), (5, 5), "{limit}: {seen:?}");
    }
    let path = "/postrider/v1/subscription/attempts?id=orders/nobody";
    lab.server.send("GET", path, &[SECRET], "").expect(404);
}
