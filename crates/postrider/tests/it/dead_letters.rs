//! Events that are given up: when, where and how their dead letters are written, and the handling
//! of failed writes. The account here is the built-in one, in a directory.

use crate::cli::CliShell;
use crate::clock_lab::{ClockLab, timestamp};
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const SUBSCRIPTION: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1";

/// Subscription properties with a dead-letter destination, and others.
pub fn dead_letter_to(account: &str, container: &str, mut others: Value) -> Value {
    if others.is_null() {
        others = json!({});
    }
    let properties = json!({"resourceId": account, "blobContainerName": container});
    others["deadLetterDestination"] = json!({"endpointType": "StorageBlob", "properties": properties});
    others
}

/// Subscription properties with the container `dead` of the built-in account.
fn to_local(others: Value) -> Value {
    dead_letter_to("local", "dead", others)
}

/// Content of a directory account: the dead letters of each blob by its path, which begins with the
/// container.
fn blobs(root: &Path) -> BTreeMap<String, Vec<Value>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries.map(|entry| entry.expect("a directory can be read")) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if !entry.file_name().to_string_lossy().starts_with(".postrider-") {
                let text = std::fs::read(&path).expect("a blob can be read");
                let letters = serde_json::from_slice(&text).expect("a blob is a JSON array");
                let name = path.strip_prefix(root).expect("it is in there");
                found.insert(name.to_str().expect("text").to_owned(), letters);
            }
        }
    }
    found
}

fn local_blobs(server: &TestServer) -> BTreeMap<String, Vec<Value>> {
    blobs(&server.data_dir().join("deadletters"))
}

/// The only blob, and its path.
#[track_caller]
fn only_blob(server: &TestServer) -> (String, Vec<Value>) {
    let all: Vec<_> = local_blobs(server).into_iter().collect();
    let [blob] = <[_; 1]>::try_from(all).unwrap_or_else(|all| panic!("one blob, not {all:#?}"));
    blob
}

fn ids<'a>(letters: impl IntoIterator<Item = &'a Value>) -> Vec<String> {
    let id = |letter: &Value| letter["id"].as_str().expect("letters have ids").to_owned();
    letters.into_iter().map(id).collect()
}

/// From `/healthz`: dead letters that wait, dead letters written, and blobs.
pub fn letter_counts(server: &TestServer) -> [u64; 3] {
    let health = server.health();
    ["pending", "written", "blobs"].map(|name| {
        let number = health["deadLetters"][name].as_u64();
        number.unwrap_or_else(|| panic!("no {name} in {health}"))
    })
}

/// Result of an event's only delivery, from its history.
#[track_caller]
fn how_it_ended(server: &TestServer, id: &str) -> Value {
    let target = format!("/postrider/v1/events/{id}");
    wait::until("the end is recorded", || {
        let found = server.send("GET", &target, &[("authorization", "Bearer hush")], "");
        let ended = found.expect(200).json()["stories"][0]["subscriptions"][0]["ended"].take();
        (!ended.is_null()).then_some(ended)
    })
}

/// Statistics and health of the only subscription.
#[track_caller]
fn health_of(server: &TestServer) -> Value {
    let stats = server.send(
        "GET",
        "/postrider/v1/stats",
        &[("authorization", "Bearer hush")],
        "",
    );
    stats.expect(200).json()["subscriptions"][0].take()
}

pub fn trouble(server: &TestServer) -> Value {
    server.health()["deadLetters"]["trouble"].take()
}

/// Moves the clock to this time and counts from there.
pub fn begin_at(lab: &mut ClockLab, time: &str) {
    lab.start = timestamp(&json!(time));
    assert_eq!(lab.server.advance(&json!({"to": time})), (lab.start, 0));
}

#[track_caller]
pub fn assert_guid(text: &str) {
    let groups: Vec<usize> = text.split('-').map(str::len).collect();
    let digits = text.chars().all(|c| c == '-' || c.is_ascii_hexdigit());
    assert!(groups == [8, 4, 4, 4, 12] && digits, "{text}");
}

/// Asserts that the path is `<folder>/<guid>.json`.
#[track_caller]
pub fn assert_path(path: &str, folder: &str) {
    let name = path.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'));
    let guid = name.and_then(|name| name.strip_suffix(".json"));
    assert_guid(guid.unwrap_or_else(|| panic!("{path} in {folder}")));
}

#[test]
fn five_minutes_after_the_last_attempt_it_is_in_a_blob() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    let config = format!(
        "[[topic]]\nname = \"orders\"\n[[topic.subscription]]\nname = \"My-Billing\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{}\" }} }}\n\
         dead_letter_destination = {{ endpoint_type = \"StorageBlob\", properties = {{ \
         resource_id = \"{SUBSCRIPTION}/providers/Microsoft.Storage/storageAccounts/local\", \
         blob_container_name = \"dead\" }} }}\nretry_policy = {{ max_delivery_attempts = 3 }}\n{CLIENT}",
        receiver.url("/")
    );
    let mut lab = ClockLab::start(ServerSetup::test_clock(config), receiver);
    begin_at(&mut lab, "2030-03-04T05:56:00Z");
    lab.server.publish("orders", &[event("a")]);
    assert_eq!(lab.at_once().len(), 1);
    assert_eq!(lab.advance_to_second(339), 2, "at 10 and 40 seconds");
    assert_eq!(local_blobs(&lab.server), BTreeMap::new());
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    assert_eq!(lab.count("deadLettered"), 0, "it is in no blob yet");
    let ended = how_it_ended(&lab.server, "a");
    assert_eq!(
        (&ended["disposition"], &ended["pending"]),
        (
            &json!("deadLettered"),
            &json!({"due": "2030-03-04T06:01:40.0000000Z", "text": "waits to be written to a blob"})
        ),
        "{ended}"
    );
    // Health changes before the blob is written.
    let health = health_of(&lab.server);
    assert_eq!(health["health"], "failing", "{health}");
    let reason = health["reasons"][0]["text"].as_str().expect("a text");
    assert!(
        reason.starts_with("1 of 1 event given up; 1 of them not written"),
        "{reason}"
    );

    assert_eq!(lab.advance_to_second(340), 0);
    assert_eq!(lab.count("deadLettered"), 1);
    let ended = how_it_ended(&lab.server, "a");
    assert_eq!(
        (&ended["pending"], &ended["blob"]["account"]),
        (&Value::Null, &json!("local")),
        "{ended}"
    );
    let (path, letters) = only_blob(&lab.server);
    assert_path(&path, "dead/MY-BILLING/2030/3/4/6");
    assert_eq!(
        letters,
        [json!({
            "id": "a",
            "topic": format!("{SUBSCRIPTION}/providers/Microsoft.EventGrid/topics/orders"),
            "subject": "/orders/1",
            "eventType": "Orders.Created",
            "eventTime": "2026-01-02T03:04:05Z",
            "dataVersion": "1.0",
            "metadataVersion": "1",
            "data": {"color": "blue"},
            "deadLetterReason": "MaxDeliveryAttemptsExceeded",
            "deliveryAttempts": 3,
            "lastDeliveryOutcome": "GenericError",
            "publishTime": "2030-03-04T05:56:00.0000000Z",
            "lastDeliveryAttemptTime": "2030-03-04T05:56:40.0000000Z",
        })]
    );
    assert_eq!(letter_counts(&lab.server), [0, 1, 1]);
    assert_eq!(lab.dropped(), json!({}));
    // Nothing else follows.
    assert_eq!(lab.pass(48 * 3600), 0);
    assert_eq!(local_blobs(&lab.server).len(), 1);
}

#[test]
fn every_reason_is_told() {
    let mut lab = ClockLab::start(
        ServerSetup::test_clock("probation.failures = 10000\n"),
        TestReceiver::by_path(),
    );
    begin_at(&mut lab, "2031-12-31T23:50:00Z");
    lab.server.put_topic("orders");
    let policy = |attempts: u32, minutes: u32| json!({"retryPolicy": {"maxDeliveryAttempts": attempts, "eventExpiryInMinutes": minutes}});
    lab.subscribe("attempts", "/503", to_local(policy(2, 1440)));
    lab.subscribe("time", "/500", to_local(policy(30, 1)));
    for status in [400, 401, 403, 404, 413] {
        lab.subscribe(
            &format!("s{status}"),
            &format!("/{status}"),
            to_local(json!(null)),
        );
    }
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.pass(3600);
    let mut told = BTreeMap::new();
    for (path, letters) in local_blobs(&lab.server) {
        let subscription = path.split('/').nth(1).expect("a folder").to_owned();
        let [letter] = &letters[..] else {
            panic!("{letters:?}")
        };
        let words = [
            "deadLetterReason",
            "lastDeliveryOutcome",
            "lastDeliveryAttemptTime",
        ];
        let [reason, outcome, last] = words.map(|name| letter[name].as_str().expect(name).to_owned());
        let folder = path.rsplit_once('/').expect("a folder").0.to_owned();
        let attempts = letter["deliveryAttempts"].as_u64().expect("a number");
        told.insert(
            subscription,
            (reason, attempts, outcome, last[11..19].to_owned(), folder),
        );
    }
    let expected = [
        (
            "ATTEMPTS",
            "MaxDeliveryAttemptsExceeded",
            2,
            "Busy",
            "23:50:30",
            "2031/12/31/23",
        ),
        // Attempts at 0, 10 and 40 seconds; given up when the next comes due, at 100.
        (
            "TIME",
            "TimeToLiveExceeded",
            3,
            "GenericError",
            "23:50:40",
            "2031/12/31/23",
        ),
        (
            "S400",
            "UndeliverableDueToHttpBadRequest",
            1,
            "BadRequest",
            "23:50:00",
            "2031/12/31/23",
        ),
        (
            "S401",
            "UndeliverableDueToClientError",
            1,
            "Unauthorized",
            "23:50:00",
            "2031/12/31/23",
        ),
        (
            "S403",
            "UndeliverableDueToClientError",
            1,
            "Forbidden",
            "23:50:00",
            "2031/12/31/23",
        ),
        (
            "S404",
            "UndeliverableDueToClientError",
            1,
            "NotFound",
            "23:50:00",
            "2031/12/31/23",
        ),
        (
            "S413",
            "UndeliverableDueToClientError",
            1,
            "PayloadTooLarge",
            "23:50:00",
            "2031/12/31/23",
        ),
    ];
    let expected = expected.map(|(name, reason, attempts, outcome, at, day)| {
        let folder = format!("dead/{name}/{day}");
        (
            name.to_owned(),
            (
                reason.to_owned(),
                attempts,
                outcome.to_owned(),
                at.to_owned(),
                folder,
            ),
        )
    });
    assert_eq!(told, BTreeMap::from(expected));
}

#[test]
fn each_schema_has_its_own_form() {
    let receiver = TestReceiver::by_path();
    let url = receiver.url("/400");
    let topic = |name: &str, schema: &str, more: &str| {
        format!("[[topic]]\nname = \"{name}\"\ninput_schema = \"{schema}\"\n{more}\n")
    };
    let subscription = |name: &str, schema: &str| {
        format!(
            "[[topic.subscription]]\nname = \"{name}\"\nevent_delivery_schema = \"{schema}\"\n\
             destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\" }} }}\n\
             dead_letter_destination = {{ endpoint_type = \"StorageBlob\", properties = {{ resource_id = \"/subscriptions/s/\
             resourceGroups/g/providers/Microsoft.Storage/storageAccounts/local/blobServices/default/containers/dead\" }} }}\n"
        )
    };
    let mapping = "input_schema_mapping = { inputSchemaMappingType = \"Json\", properties = { \
        id = { sourceField = \"key\" }, eventType = { sourceField = \"kind\", defaultValue = \"myEventType\" }, \
        subject = { defaultValue = \"subjectDefault\" }, dataVersion = { defaultValue = \"3\" } } }";
    let config = [
        topic("grids", "EventGridSchema", ""),
        subscription("grid-to-cloud", "CloudEventSchemaV1_0"),
        topic("clouds", "CloudEventSchemaV1_0", ""),
        subscription("cloud", "CloudEventSchemaV1_0"),
        topic("things", "CustomEventSchema", mapping),
        subscription("custom", "CustomInputSchema"),
        subscription("custom-to-grid", "EventGridSchema"),
    ];
    let mut lab = ClockLab::start(ServerSetup::test_clock(config.concat()), receiver);
    begin_at(&mut lab, "2030-01-02T03:04:05Z");
    let cloud = json!({"specversion": "1.0", "id": "c", "source": "/shop", "type": "T", "tenant": "acme", "data_base64": "AAEC"});
    let thing = json!({"key": "k", "deep": {"n": 1.5}});
    lab.server.publish("grids", &[event("g")]);
    let headers = [("content-type", "application/cloudevents+json")];
    let path = format!("/topics/clouds/events?{}", crate::server::EDGE_VERSION);
    lab.server
        .send("POST", &path, &headers, cloud.to_string())
        .expect(200);
    lab.server.publish("things", std::slice::from_ref(&thing));
    lab.at_once();
    lab.pass(300);

    let now = "2030-01-02T03:04:05.0000000Z";
    let told_in_lower_case = json!({
        "deadletterreason": "UndeliverableDueToHttpBadRequest",
        "deliveryattempts": 1,
        "lastdeliveryoutcome": "BadRequest",
        "publishtime": now,
        "lastdeliveryattempttime": now,
    });
    let told = json!({
        "deadLetterReason": "UndeliverableDueToHttpBadRequest",
        "deliveryAttempts": 1,
        "lastDeliveryOutcome": "BadRequest",
        "publishTime": now,
        "lastDeliveryAttemptTime": now,
    });
    let with = |event: Value, told: &Value| {
        let mut all = event;
        let members = all.as_object_mut().expect("an object");
        members.extend(told.as_object().expect("an object").clone());
        all
    };
    let topic_id = |name: &str| format!("{SUBSCRIPTION}/providers/Microsoft.EventGrid/topics/{name}");
    let in_envelope = json!({
        "id": "k",
        "topic": topic_id("things"),
        "subject": "subjectDefault",
        "eventType": "myEventType",
        "eventTime": now,
        "dataVersion": "3",
        "metadataVersion": "1",
        "data": thing,
    });
    let expected = [
        ("CLOUD", with(cloud, &told_in_lower_case)),
        (
            "GRID-TO-CLOUD",
            with(
                json!({
                    "specversion": "1.0",
                    "id": "g",
                    "source": topic_id("grids"),
                    "subject": "/orders/1",
                    "type": "Orders.Created",
                    "time": "2026-01-02T03:04:05Z",
                    "data": {"color": "blue"},
                }),
                &told_in_lower_case,
            ),
        ),
        ("CUSTOM", with(in_envelope.clone(), &told)),
        ("CUSTOM-TO-GRID", with(in_envelope, &told)),
    ];
    let all = local_blobs(&lab.server);
    assert_eq!(all.len(), expected.len());
    for (name, expected) in expected {
        let folder = format!("dead/{name}/2030/1/2/3");
        let (_, letters) = all
            .iter()
            .find(|(path, _)| path.starts_with(&folder))
            .expect(name);
        let [letter] = &letters[..] else {
            panic!("{letters:?}")
        };
        // Conversion to CloudEvents adds members of its own; the expected ones must be there
        // unchanged.
        for (member, value) in expected.as_object().expect("an object") {
            assert_eq!(letter.get(member), Some(value), "{member} of {name} in {letter}");
        }
        if name != "GRID-TO-CLOUD" {
            assert_eq!(letter, &expected, "{name}");
        }
    }
}

#[test]
fn many_letters_share_a_blob() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        to_local(json!(null)),
    );
    // Given up at 0, 100 and 200 seconds: dead letters that are due are written, the rest are not.
    let events = |from: usize| {
        (from..from + 20)
            .map(|n| event(format!("{n:02}")))
            .collect::<Vec<_>>()
    };
    for from in [0, 20, 40] {
        lab.server.publish("orders", &events(from));
        lab.at_once();
        lab.pass(100);
    }
    let all: Vec<String> = (0..60).map(|n| format!("{n:02}")).collect();
    let written = || {
        let blobs = local_blobs(&lab.server);
        let mut ids = ids(blobs.values().flatten());
        ids.sort();
        (blobs.len(), ids)
    };
    assert_eq!(written(), (1, all[..20].to_vec()), "at 300 seconds");
    lab.advance_to_second(399);
    assert_eq!(written().0, 1);
    lab.advance_to_second(500);
    assert_eq!(written(), (3, all));
}

#[test]
fn a_blob_is_not_endless() {
    let batches = json!({"destination": {"properties": {"maxEventsPerBatch": 50}}});
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        to_local(batches),
    );
    let events: Vec<Value> = (0..5003).map(|n| event(n.to_string())).collect();
    for some in events.chunks(2600) {
        lab.server.publish("orders", some);
    }
    lab.server.counted("/deadLetters/pending", 5003);
    lab.pass(300);
    let blobs = local_blobs(&lab.server);
    let mut sizes: Vec<usize> = blobs.values().map(Vec::len).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [3, 5000]);
    let written: BTreeSet<String> = ids(blobs.values().flatten()).into_iter().collect();
    assert_eq!(written.len(), 5003);
    assert_eq!(letter_counts(&lab.server), [0, 5003, 2]);

    // Blobs are limited by bytes, too: of twenty events of 300 kB, thirteen fit into 4 MiB.
    let large = |n: usize| {
        let mut event = event(format!("large{n}"));
        event["data"] = json!("x".repeat(300_000));
        event
    };
    for n in 0..20 {
        lab.server.publish("orders", &[large(n)]);
    }
    lab.server.counted("/deadLetters/pending", 20);
    lab.pass(300);
    let mut sizes: Vec<usize> = local_blobs(&lab.server).values().map(Vec::len).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [3, 7, 13, 5000]);
}

#[test]
fn without_a_delay_it_is_written_at_once() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock("dead_letter.delay = 0\n"),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        to_local(json!(null)),
    );
    for n in 1..=3 {
        lab.server.publish("orders", &[event(n.to_string())]);
        lab.at_once();
        assert_eq!(letter_counts(&lab.server), [0, n, n]);
        assert_eq!(local_blobs(&lab.server).len() as u64, n);
    }
    assert_eq!(lab.now(), 0);
}

#[test]
fn on_the_machines_clock_it_is_written_too() {
    let server = ServerSetup::config("dead_letter.delay = \"200ms\"\n").start();
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), to_local(json!(null)));
    server.publish("orders", &[event("a"), event("b")]);
    server.counted("/deadLetters/written", 2);
    let mut written = ids(local_blobs(&server).values().flatten());
    written.sort();
    assert_eq!(written, ["a", "b"]);
}

/// An account in a directory in which containers are not made, under the name `shelf`.
pub fn shelf(root: &Path) -> String {
    format!(
        "[[storage_account]]\nname = \"shelf\"\nkind = \"directory\"\ncreate_containers = false\npath = \"{}\"\n",
        root.display()
    )
}

#[test]
fn without_its_container_it_is_dropped_after_four_hours() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(format!("{}{CLIENT}", shelf(root.path()))),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        dead_letter_to("shelf", "dead", json!(null)),
    );
    let missing = "container \"dead\" does not exist in storage account \"shelf\"";
    let warned = lab.server.logged(&["WARN", "billing", "does not exist"]);
    assert!(warned.contains("shelf"), "{warned}");
    lab.server.publish("orders", &[event("first"), event("second")]);
    lab.at_once();
    lab.pass(60);
    lab.server.publish("orders", &[event("third")]);
    lab.at_once();

    assert_eq!(trouble(&lab.server), json!([]), "nobody has tried yet");
    lab.advance_to_second(300);
    let known = json!([{"topic": "orders", "subscription": "billing", "reason": missing}]);
    assert_eq!(trouble(&lab.server), known);
    assert_eq!(letter_counts(&lab.server), [3, 0, 0]);
    let pending = how_it_ended(&lab.server, "first")["pending"].take();
    assert_eq!(
        pending["text"],
        format!("waits to be written to a blob; the last try failed: {missing}")
    );
    assert_eq!(timestamp(&pending["due"]), lab.start + Duration::from_secs(310));
    // Five minutes and four hours after the last attempts.
    lab.advance_to_second(300 + 4 * 3600 - 1);
    assert_eq!(
        (letter_counts(&lab.server), lab.dropped()),
        ([3, 0, 0], json!({}))
    );
    lab.advance_to_second(300 + 4 * 3600);
    let dropped = |n: u64| json!({"DeadLetterDestinationUnavailable": n});
    assert_eq!(
        (letter_counts(&lab.server), lab.dropped()),
        ([1, 0, 0], dropped(2))
    );
    lab.advance_to_second(360 + 4 * 3600 - 1);
    assert_eq!(lab.dropped(), dropped(2));
    lab.advance_to_second(360 + 4 * 3600);
    assert_eq!(
        (letter_counts(&lab.server), lab.dropped()),
        ([0, 0, 0], dropped(3))
    );
    assert_eq!(trouble(&lab.server), json!([]), "nothing waits any more");
    // Events that could not be stored do not count as dead-lettered.
    assert_eq!(lab.count("deadLettered"), 0);
    let ended = how_it_ended(&lab.server, "first");
    assert_eq!(
        (&ended["disposition"], &ended["reason"], &ended["pending"]),
        (
            &json!("dropped"),
            &json!("DeadLetterDestinationUnavailable"),
            &Value::Null
        )
    );
    for ids in ["first, second", "third"] {
        let line = lab.server.logged(&["ERROR", "dead letters dropped", ids]);
        assert!(
            line.contains("DeadLetterDestinationUnavailable") && line.contains("does not exist"),
            "{line}"
        );
    }
    assert_eq!(blobs(root.path()), BTreeMap::new());
    // A dead letter of a later event has its own four hours, with one more try at their end.
    lab.server.publish("orders", &[event("fourth")]);
    lab.at_once();
    lab.pass(300 + 4 * 3600 - 1);
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    std::fs::create_dir(root.path().join("dead")).expect("it can be made");
    lab.pass(1);
    assert_eq!(
        (letter_counts(&lab.server), lab.dropped()),
        ([0, 1, 1], dropped(3))
    );
    assert_eq!(lab.count("deadLettered"), 1);
}

#[test]
fn an_expired_event_waits_from_its_last_attempt() {
    let minute = to_local(json!({"retryPolicy": {"eventExpiryInMinutes": 1}}));
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(CLIENT),
        TestReceiver::answering(|_| ScriptedReply::Status(500)),
        minute,
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    assert_eq!(
        lab.advance_to_second(100),
        2,
        "at 10 and 40 seconds, and not at 100"
    );
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    let pending = how_it_ended(&lab.server, "a")["pending"].take();
    assert_eq!(timestamp(&pending["due"]), lab.start + Duration::from_secs(340));
    lab.advance_to_second(339);
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    lab.advance_to_second(340);
    assert_eq!(letter_counts(&lab.server), [0, 1, 1]);
}

/// A lab with an event that is given up hours after its last attempt.
fn expired_late(root: &Path) -> ClockLab {
    let receiver = TestReceiver::answering(|delivery| {
        ScriptedReply::Status(if delivery.ids() == ["old"] { 500 } else { 400 })
    });
    let policy = json!({"retryPolicy": {"eventExpiryInMinutes": 400}});
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(shelf(root)),
        receiver,
        dead_letter_to("shelf", "dead", policy),
    );
    lab.server.publish("orders", &[event("old")]);
    lab.at_once();
    lab
}

#[test]
fn an_expired_event_has_its_four_hours_though_its_last_attempt_is_older() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let lab = expired_late(root.path());
    // Attempts end at 17 200 seconds and the time to live at 24 000, which is noticed when the next
    // attempt comes due.
    lab.advance_to_second(38_800 + 4 * 3600 - 1);
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    assert_eq!(lab.dropped(), json!({}));
    lab.advance_to_second(38_800 + 4 * 3600);
    assert_eq!(letter_counts(&lab.server), [0, 0, 0]);
    assert_eq!(lab.dropped(), json!({"DeadLetterDestinationUnavailable": 1}));
}

#[test]
fn an_expired_event_is_tried_once_before_it_goes_with_a_store_long_away() {
    for there in [false, true] {
        let root = tempfile::tempdir().expect("a temporary directory");
        let lab = expired_late(root.path());
        lab.advance_to_second(17_000);
        lab.server.publish("orders", &[event("first")]);
        lab.at_once();
        lab.advance_to_second(30_000);
        lab.server.publish("orders", &[event("second")]);
        lab.at_once();
        // The store has been away since 17 300 seconds: the first dead letter is dropped.
        lab.advance_to_second(38_799);
        assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
        let dropped = |n: u64| json!({"DeadLetterDestinationUnavailable": n});
        assert_eq!(lab.dropped(), dropped(1));
        if there {
            std::fs::create_dir(root.path().join("dead")).expect("it can be made");
        }
        // The write is retried every five minutes.
        lab.advance_to_second(38_800 + 300);
        match there {
            true => {
                let mut written = ids(blobs(root.path()).values().flatten());
                written.sort();
                assert_eq!(written, ["old", "second"]);
                assert_eq!(lab.dropped(), dropped(1));
            }
            false => {
                assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
                assert_eq!(lab.dropped(), dropped(2));
                let line = lab.server.logged(&["ERROR", "dead letters dropped", "old"]);
                assert!(line.contains("DeadLetterDestinationUnavailable"), "{line}");
            }
        }
    }
}

#[test]
fn a_container_that_appears_in_time_is_used() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let mut lab = ClockLab::subscribed(
        ServerSetup::test_clock(shelf(root.path())),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        dead_letter_to("shelf", "dead", json!(null)),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.pass(2 * 3600);
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    // A restart keeps the time of the first try.
    lab.server.kill();
    lab.server.start();
    std::fs::create_dir(root.path().join("dead")).expect("it can be made");
    lab.pass(300);
    assert_eq!(letter_counts(&lab.server), [0, 1, 1]);
    assert_eq!(ids(blobs(root.path()).values().flatten()), ["a"]);
    assert_eq!(trouble(&lab.server), json!([]));
}

#[test]
fn a_restart_does_not_lengthen_the_four_hours() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let mut lab = ClockLab::subscribed(
        ServerSetup::test_clock(shelf(root.path())),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        dead_letter_to("shelf", "dead", json!(null)),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.advance_to_second(3 * 3600);
    lab.server.kill();
    lab.server.start();
    lab.advance_to_second(300 + 4 * 3600 - 1);
    assert_eq!(letter_counts(&lab.server)[0], 1);
    lab.advance_to_second(300 + 4 * 3600);
    assert_eq!(lab.dropped(), json!({"DeadLetterDestinationUnavailable": 1}));
}

#[test]
fn both_times_can_be_set() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let never = format!("dead_letter.give_up_after = \"never\"\n{}", shelf(root.path()));
    let failing = || TestReceiver::answering(|_| ScriptedReply::Status(400));
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(never),
        failing(),
        dead_letter_to("shelf", "dead", json!(null)),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.pass(3 * 24 * 3600);
    assert_eq!(
        (letter_counts(&lab.server), lab.dropped()),
        ([1, 0, 0], json!({}))
    );
    std::fs::create_dir(root.path().join("dead")).expect("it can be made");
    lab.pass(300);
    assert_eq!(ids(blobs(root.path()).values().flatten()), ["a"]);

    // A delay of zero: written at once, with a single try.
    let root = tempfile::tempdir().expect("a temporary directory");
    let at_once = format!(
        "dead_letter.delay = \"10s\"\ndead_letter.give_up_after = 0\n{}",
        shelf(root.path())
    );
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(at_once),
        failing(),
        dead_letter_to("shelf", "dead", json!(null)),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.advance_to_second(9);
    assert_eq!((letter_counts(&lab.server)[0], lab.dropped()), (1, json!({})));
    lab.advance_to_second(10);
    assert_eq!(lab.dropped(), json!({"DeadLetterDestinationUnavailable": 1}));
    lab.server
        .logged(&["ERROR", "dead letters dropped", "does not exist", "ids=\"a\""]);
}

#[test]
fn a_safety_net_catches_what_would_be_dropped() {
    let config = "dead_letter.default = \"local\"\n";
    let lab = ClockLab::start(
        ServerSetup::test_clock(config).profile("cloud-2020"),
        TestReceiver::by_path(),
    );
    lab.server.put_topic("orders");
    lab.subscribe(
        "without",
        "/400",
        json!({"retryPolicy": {"maxDeliveryAttempts": 2}}),
    );
    lab.subscribe("with", "/400", to_local(json!(null)));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    // In 2020 a 400 was final only with a dead-letter destination; the default one does not count.
    assert_eq!(lab.next_arrival().seconds(), 300);
    lab.pass(300);
    let mut paths: Vec<String> = local_blobs(&lab.server).into_keys().collect();
    paths.sort();
    let [dead, net] = &paths[..] else {
        panic!("{paths:?}")
    };
    assert!(dead.starts_with("dead/WITH/"), "{dead}");
    assert!(net.starts_with("deadletters/WITHOUT/"), "{net}");
    assert_eq!((lab.count("deadLettered"), lab.dropped()), (2, json!({})));
}

#[test]
fn without_a_net_what_has_no_place_is_dropped_as_ever() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        json!(null),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.pass(600);
    assert_eq!(lab.dropped(), json!({"UndeliverableDueToHttpBadRequest": 1}));
    assert_eq!(
        (local_blobs(&lab.server).len(), letter_counts(&lab.server)),
        (0, [0, 0, 0])
    );
}

#[test]
fn the_place_that_holds_is_that_of_the_time_of_writing() {
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        to_local(json!(null)),
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.subscribe("billing", "/", dead_letter_to("local", "other", json!(null)));
    lab.pass(300);
    let (path, _) = only_blob(&lab.server);
    assert!(path.starts_with("other/BILLING/"), "{path}");

    // Without a destination the dead letter is dropped with the reason; deleting a subscription
    // drops its dead letters.
    for id in ["b", "c"] {
        lab.server.publish("orders", &[event(id)]);
        lab.at_once();
    }
    lab.subscribe("billing", "/", json!(null));
    lab.pass(300);
    assert_eq!(lab.dropped(), json!({"DeadLetterDestinationRemoved": 2}));
    lab.server.logged(&["ERROR", "dead letters dropped", "b, c"]);
    lab.subscribe("billing", "/", to_local(json!(null)));
    lab.server.publish("orders", &[event("d")]);
    lab.at_once();
    lab.server.unsubscribe("orders", "billing");
    lab.pass(300);
    assert_eq!(
        lab.dropped(),
        json!({"DeadLetterDestinationRemoved": 2, "SubscriptionDeleted": 1})
    );
    assert_eq!(
        (local_blobs(&lab.server).len(), letter_counts(&lab.server)),
        (1, [0, 1, 1])
    );
}

#[test]
fn letters_that_wait_survive_every_kind_of_end() {
    let mut lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        TestReceiver::answering(|_| ScriptedReply::Status(400)),
        to_local(json!(null)),
    );
    for (round, gently) in [false, true, false].into_iter().enumerate() {
        lab.server.publish("orders", &[event(format!("r{round}"))]);
        lab.at_once();
        match gently {
            true => lab.server.stop(),
            false => lab.server.kill(),
        }
        lab.server.start();
        assert_eq!(letter_counts(&lab.server), [round as u64 + 1, 0, 0]);
        lab.pass(90);
    }
    lab.pass(300);
    let mut written = ids(local_blobs(&lab.server).values().flatten());
    written.sort();
    assert_eq!(written, ["r0", "r1", "r2"]);
    assert_eq!(lab.count("attempts"), 0, "since the last start");
}

/// Blobs in a storage service of the test's own, by path. The server takes it for Azure's.
#[derive(Default)]
struct TestBlobService {
    blobs: Mutex<Vec<(String, Vec<u8>)>>,
    /// The server is killed at the request that finds this at 0.
    fuse: AtomicI64,
}

/// When the server is killed during a write: before the store has the blob, before the answer
/// arrives, or soon afterwards.
#[derive(Clone, Copy, PartialEq)]
enum KillPoint {
    BeforeWriting,
    BeforeHearing,
    AfterHearing,
}

#[test]
fn a_crash_loses_no_letter_wherever_it_comes() {
    // The test's own store allows killing the server at each of its writes, again and again, with
    // new events each time. Duplicates are allowed, losses are not.
    const SUBSCRIPTIONS: usize = 4;
    const EVENTS: usize = 20;
    let rounds = if crate::server::slow_tests() { 120 } else { 15 };
    let shelves = Arc::new(TestBlobService::default());
    let (lit, burnt) = mpsc::channel();
    let death = Arc::new(Mutex::new(KillPoint::BeforeWriting));
    let store = TestReceiver::answering({
        let (shelves, death) = (shelves.clone(), death.clone());
        move |write| {
            if write.header("x-ms-blob-type").is_none() {
                return ScriptedReply::Status(404);
            }
            let dies = shelves.fuse.fetch_sub(1, Relaxed) == 0;
            let how = *death.lock().expect("no panic holds it");
            let keep = || {
                let blob = (write.path.clone(), write.body.clone());
                shelves.blobs.lock().expect("no panic holds it").push(blob);
            };
            match (dies, how) {
                (true, KillPoint::BeforeWriting) => {
                    lit.send(()).expect("the test is there");
                    return ScriptedReply::Silence;
                }
                (true, KillPoint::BeforeHearing) => {
                    keep();
                    lit.send(()).expect("the test is there");
                    return ScriptedReply::Silence;
                }
                (true, KillPoint::AfterHearing) => {
                    keep();
                    lit.send(()).expect("the test is there");
                }
                (false, _) => keep(),
            }
            ScriptedReply::Bytes(
                b"HTTP/1.1 201 Created\r\netag: \"0x1\"\r\ncontent-length: 0\r\n\r\n".to_vec(),
            )
        }
    });
    let config = format!(
        "[[storage_account]]\nname = \"shelves\"\nkey = \"aHVzaA==\"\nblob_endpoint = \"{}\"\n",
        store.url("/shelves")
    );
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let mut lab = ClockLab::start(ServerSetup::test_clock(config), receiver);
    lab.server.put_topic("orders");
    let batches = json!({"destination": {"properties": {"maxEventsPerBatch": 50}}});
    for n in 0..SUBSCRIPTIONS {
        let place = dead_letter_to("shelves", "dead", batches.clone());
        lab.subscribe(&format!("s{n}"), "/", place);
    }
    let mut published = BTreeSet::new();
    for round in 0..rounds {
        let events: Vec<Value> = (0..EVENTS).map(|n| event(format!("{round}-{n}"))).collect();
        published.extend(ids(&events));
        lab.server.publish("orders", &events);
        lab.server.advance(&json!({"by": "0s"}));
        *death.lock().expect("no panic holds it") = [
            KillPoint::BeforeWriting,
            KillPoint::BeforeHearing,
            KillPoint::AfterHearing,
        ][round % 3];
        shelves
            .fuse
            .store((round / 3 % (SUBSCRIPTIONS + 1)) as i64, Relaxed);
        let mut connection = lab.server.connect();
        let moving = std::thread::spawn(move || {
            let how = br#"{"by":"10m","settle":"100ms"}"#;
            let _ = connection.send("POST", "/postrider/v1/clock/advance", &[JSON], how);
        });
        // If there are fewer writes than that, the server is killed when all are done.
        wait::until("the server is to die", || {
            (burnt.try_recv().is_ok() || moving.is_finished()).then_some(())
        });
        for _ in 0..(round * 37) % 400 {
            std::thread::yield_now();
        }
        lab.server.kill();
        moving.join().expect("no panic");
        shelves.fuse.store(i64::MAX, Relaxed);
        burnt.try_iter().for_each(drop);
        lab.server.start();
    }
    lab.server.advance(&json!({"by": "20m"}));
    assert_eq!(letter_counts(&lab.server)[0], 0);
    assert_eq!(lab.dropped(), json!({}));

    let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, body) in shelves.blobs.lock().expect("no panic holds it").iter() {
        let subscription = path.split('/').nth(3).expect("a folder").to_owned();
        let letters: Vec<Value> = serde_json::from_slice(body).expect("a blob is a JSON array");
        seen.entry(subscription).or_default().extend(ids(&letters));
    }
    assert_eq!(seen.len(), SUBSCRIPTIONS);
    let mut again = 0;
    for (subscription, written) in seen {
        let seen: BTreeSet<String> = written.iter().cloned().collect();
        let lost: Vec<_> = published.difference(&seen).take(5).collect();
        assert!(lost.is_empty(), "{subscription} lost {lost:?} and perhaps others");
        again += written.len() - seen.len();
    }
    // Blobs whose answer the server missed were written again.
    assert!(again >= EVENTS, "{again}");
}

/// A system topic of the account `local` with one subscription, to the receiver's `/told`.
fn told_of_local(receiver: &TestReceiver, more: &str) -> String {
    let url = receiver.url("/told");
    format!(
        "[[system_topic]]\nname = \"storage\"\nsource = \"local\"\n\
         [[system_topic.subscription]]\nname = \"on-call\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\" }} }}\n{more}"
    )
}

#[test]
fn whoever_wants_to_is_told_of_each_blob() {
    let receiver = TestReceiver::answering(|delivery| match delivery.path.as_str() {
        "/told" => ScriptedReply::Status(200),
        _ => ScriptedReply::Status(400),
    });
    let config = told_of_local(
        &receiver,
        "filter = { subject_begins_with = \"/blobServices/default/containers/dead/\" }\n",
    );
    let mut lab = ClockLab::start(ServerSetup::test_clock(config), receiver);
    begin_at(&mut lab, "2030-03-04T05:06:07Z");
    lab.server.put_topic("orders");
    lab.subscribe("billing", "/", to_local(json!(null)));
    lab.subscribe("elsewhere", "/", dead_letter_to("local", "other", json!(null)));
    lab.server.publish("orders", &[event("a"), event("b")]);
    assert_eq!(lab.at_once().len(), 4);
    assert_eq!(lab.server.advance(&json!({"by": "299s"})).1, 0);
    assert_eq!(
        lab.server.advance(&json!({"by": "1s"})).1,
        1,
        "the filter leaves one"
    );
    let told = lab.receiver.next();
    assert_eq!(told.path, "/told");
    assert_eq!(told.header("aeg-event-type"), Some("Notification"));

    let all = local_blobs(&lab.server);
    assert_eq!(all.len(), 2);
    let path = all.keys().find(|path| path.starts_with("dead/")).expect("a blob");
    let blob = path.strip_prefix("dead/").expect("it is in dead");
    let file = lab.server.data_dir().join("deadletters").join(path);
    let mut body = told.json();
    let data = body[0]["data"].take();
    let id = body[0]["id"].as_str().expect("an id").to_owned();
    assert_guid(&id);
    assert_eq!(
        body,
        json!([{
            "topic": format!("{SUBSCRIPTION}/providers/Microsoft.Storage/storageAccounts/local"),
            "subject": format!("/blobServices/default/containers/dead/blobs/{blob}"),
            "eventType": "Microsoft.Storage.BlobCreated",
            "eventTime": "2030-03-04T05:11:07.0000000Z",
            "id": id,
            "data": null,
            "dataVersion": "",
            "metadataVersion": "1",
        }])
    );
    let of = |name: &str| {
        data[name]
            .as_str()
            .unwrap_or_else(|| panic!("{name} in {data}"))
            .to_owned()
    };
    for name in ["clientRequestId", "requestId"] {
        assert_guid(&of(name));
    }
    assert_guid(data["storageDiagnostics"]["batchId"].as_str().expect("a batch"));
    assert!(of("eTag").starts_with("0x"), "{data}");
    assert!(!of("sequencer").is_empty());
    let length = std::fs::metadata(&file).expect("it is there").len();
    assert_eq!(
        data,
        json!({
            "api": "PutBlob",
            "clientRequestId": of("clientRequestId"),
            "requestId": of("requestId"),
            "eTag": of("eTag"),
            "contentType": "application/json",
            "contentLength": length,
            "blobType": "BlockBlob",
            "url": format!("file://{}", file.display()),
            "sequencer": of("sequencer"),
            "storageDiagnostics": {"batchId": data["storageDiagnostics"]["batchId"]},
        })
    );
    // Later blobs have greater sequencers.
    lab.server.publish("orders", &[event("c")]);
    lab.at_once();
    assert_eq!(lab.server.advance(&json!({"by": "300s"})).1, 1);
    let later = lab.receiver.next().json()[0]["data"]["sequencer"].take();
    assert!(
        later.as_str().expect("text") > of("sequencer").as_str(),
        "{later}"
    );
}

#[test]
fn nobody_is_told_of_the_blobs_of_what_was_told() {
    // The subscriber to blob notices refuses them, and its own dead letters go to the account that
    // the notices are about.
    let place = "dead_letter_destination = { endpoint_type = \"StorageBlob\", properties = { resource_id = \"local\", \
                 blob_container_name = \"dead\" } }\n";
    for (config, container) in [("", "dead"), ("dead_letter.default = \"local\"\n", "deadletters")] {
        let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
        let place = if config.is_empty() { place } else { "" };
        let config = format!("{config}{}", told_of_local(&receiver, place));
        let lab = ClockLab::subscribed(ServerSetup::test_clock(config), receiver, to_local(json!(null)));
        lab.server.publish("orders", &[event("a")]);
        assert_eq!(lab.at_once().len(), 1);
        assert_eq!(lab.pass(300), 1, "it is told");
        assert_eq!(lab.pass(7 * 24 * 3600), 0, "and not again");
        let paths: Vec<String> = local_blobs(&lab.server).into_keys().collect();
        let [first, second] = &paths[..] else {
            panic!("{paths:?}")
        };
        assert!(first.starts_with("dead/BILLING/"), "{first}");
        assert!(second.starts_with(&format!("{container}/ON-CALL/")), "{second}");
        assert_eq!(letter_counts(&lab.server), [0, 2, 2]);
    }
}

#[test]
fn being_told_is_as_durable_as_the_blob() {
    // The subscriber is away when the blob is written; the notice is delivered although the server
    // is killed.
    let status = Arc::new(AtomicU16::new(503));
    let receiver = TestReceiver::answering({
        let status = status.clone();
        move |delivery| match delivery.path.as_str() {
            "/told" => ScriptedReply::Status(status.load(Relaxed)),
            _ => ScriptedReply::Status(400),
        }
    });
    let config = told_of_local(&receiver, "");
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(config), receiver, to_local(json!(null)));
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    assert_eq!(lab.pass(300), 1);
    lab.server.kill();
    status.store(200, Relaxed);
    lab.server.start();
    let again = lab.next_arrival();
    assert_eq!((again.delivery.path.as_str(), again.count()), ("/told", 1));
    assert_eq!(lab.pass(24 * 3600), 0);
}

#[test]
fn a_place_that_cannot_be_is_refused_by_name() {
    let receiver = TestReceiver::start();
    let url = receiver.url("/");
    let with = |more: &str, account: &str, container: &str| {
        format!(
            "{more}[[topic]]\nname = \"orders\"\n[[topic.subscription]]\nname = \"billing\"\n\
             destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\" }} }}\n\
             dead_letter_destination = {{ endpoint_type = \"StorageBlob\", properties = {{ resource_id = \"{account}\", \
             blob_container_name = \"{container}\" }} }}\n"
        )
    };
    let id = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/nowhere";
    let field = "properties.deadLetterDestination.properties";
    for (account, container, words) in [
        (
            "nowhere",
            "dead",
            vec![
                format!("{field}.resourceId"),
                "\"nowhere\"".into(),
                "local, shelf".into(),
            ],
        ),
        (
            id,
            "dead",
            vec![format!("{field}.resourceId"), "\"nowhere\"".into()],
        ),
        (
            "local",
            "Dead",
            vec![format!("{field}.blobContainerName"), "\"Dead\"".into()],
        ),
        ("local", "d", vec![format!("{field}.blobContainerName")]),
    ] {
        let told = ServerSetup::config(with(&shelf(Path::new("/nowhere")), account, container)).refusal();
        assert!(
            told.contains("subscription \"billing\" of topic \"orders\""),
            "{told}"
        );
        for word in words {
            assert!(told.contains(&word), "{word} in {told}");
        }
    }
    for (config, word) in [
        ("dead_letter.default = \"nowhere\"\n", "dead_letter.default"),
        (
            "[[system_topic]]\nname = \"a\"\nsource = \"nowhere\"\n",
            "system_topic[0].source",
        ),
        (
            "[[storage_account]]\nname = \"abc\"\nkind = \"directory\"\n",
            "storage_account[0].path",
        ),
        (
            "[[storage_account]]\nname = \"abc\"\nkind = \"gcs\"\nservice_account_file = \"/nowhere\"\n",
            "service_account_file of storage account \"abc\"",
        ),
    ] {
        let told = ServerSetup::config(config).refusal();
        assert!(told.contains(word), "{word} in {told}");
    }
    // The module has no dead letters and does not reject the setting; the log warns of it.
    let lab = ClockLab::subscribed(
        ServerSetup::test_clock(""),
        receiver,
        dead_letter_to("nowhere", "dead", json!(null)),
    );
    lab.server
        .logged(&["WARN", "billing", "nowhere", "not configured"]);
}

#[test]
fn an_account_that_is_no_longer_configured_is_trouble_not_the_end() {
    let root = tempfile::tempdir().expect("a temporary directory");
    std::fs::create_dir(root.path().join("dead")).expect("it can be made");
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let url = receiver.url("/");
    let declared = format!(
        "[[topic]]\nname = \"orders\"\n[[topic.subscription]]\nname = \"billing\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\" }} }}\n\
         dead_letter_destination = {{ endpoint_type = \"StorageBlob\", properties = {{ resource_id = \"shelf\", \
         blob_container_name = \"dead\" }} }}\n"
    );
    let with = format!("retry.jitter_percent = 0\n{}{declared}", shelf(root.path()));
    let mut lab = ClockLab::start(
        ServerSetup::test_clock(format!("{}{declared}", shelf(root.path()))),
        receiver,
    );
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.server.kill();
    lab.server.configure(declared);
    lab.server.start();
    lab.pass(300);
    let reason = trouble(&lab.server)[0]["reason"].take();
    assert_eq!(reason, "storage account \"shelf\" is not configured");
    lab.server.stop();
    lab.server.configure(with);
    lab.server.start();
    lab.pass(300);
    assert_eq!(ids(blobs(root.path()).values().flatten()), ["a"]);
}

const CLIENT: &str = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n";

/// Calls our own API as a client.
#[track_caller]
fn ours(server: &TestServer, method: &str, path: &str, body: &Value) -> Value {
    let target = format!("/postrider/v1/deadletters{path}");
    let headers = [("authorization", "Bearer hush"), JSON];
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let answer = server.send(method, &target, &headers, body);
    assert!(matches!(answer.status, 200 | 202), "{}", answer.text());
    answer.json()
}

/// Replays and waits for the end.
#[track_caller]
fn replayed(server: &TestServer, what: &Value) -> Value {
    let begun = ours(server, "POST", "/replay", what);
    let path = format!("/replays/{}", begun["id"]);
    wait::until("the replay is done", || {
        let job = ours(server, "GET", &path, &Value::Null);
        (job["state"] == "done").then_some(job)
    })
}

#[test]
fn a_replay_sends_letters_again_as_if_for_the_first_time() {
    let status = Arc::new(AtomicU16::new(400));
    let receiver = TestReceiver::answering({
        let status = status.clone();
        move |_| ScriptedReply::Status(status.load(Relaxed))
    });
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(CLIENT), receiver, to_local(json!(null)));
    let events: Vec<Value> = (0..5).map(|n| event(n.to_string())).collect();
    for some in events.chunks(2) {
        lab.server.publish("orders", some);
        lab.at_once();
        lab.pass(300);
    }
    assert_eq!(letter_counts(&lab.server), [0, 5, 3]);
    let first_bodies: BTreeMap<String, Value> = events
        .iter()
        .map(|event| {
            (
                event["id"].as_str().expect("an id").to_owned(),
                event["data"].clone(),
            )
        })
        .collect();

    // A single dead letter is replayed while still refused: it becomes a dead letter with two
    // replays.
    let listed = ours(&lab.server, "GET", "", &Value::Null);
    let one = listed["value"][0]["id"].clone();
    let job = replayed(&lab.server, &json!({"id": one}));
    assert_eq!(
        (&job["replayed"], &job["failed"]),
        (&json!(1), &json!(0)),
        "{job}"
    );
    let arrived = lab.receiver.next();
    assert_eq!(arrived.header("postrider-replay"), Some("1"));
    assert_eq!(arrived.header("aeg-delivery-count"), Some("0"));
    let once_replayed = arrived.ids()[0].clone();
    lab.at_once();
    lab.pass(300);
    assert_eq!(letter_counts(&lab.server), [0, 6, 4]);

    // Killed in between: replayed events are read from the blobs.
    lab.server.kill();
    status.store(200, Relaxed);
    lab.server.start();
    let job = replayed(&lab.server, &json!({"all": true}));
    assert_eq!(
        (&job["replayed"], &job["failed"]),
        (&json!(6), &json!(0)),
        "{job}"
    );
    let mut arrivals: Vec<(String, String)> = Vec::new();
    while arrivals.len() < 6 {
        let delivery = lab.receiver.next();
        assert_eq!(delivery.header("aeg-delivery-count"), Some("0"));
        let replay = delivery.header("postrider-replay").expect("a header").to_owned();
        let body = delivery.json()[0].take();
        let id = body["id"].as_str().expect("an id").to_owned();
        assert_eq!(body["data"], first_bodies[&id]);
        assert_eq!(body["eventTime"], "2026-01-02T03:04:05Z");
        assert!(
            body.get("deadLetterReason").is_none() && body.get("publishTime").is_none(),
            "{body}"
        );
        arrivals.push((id, replay));
    }
    arrivals.sort();
    let mut expected: Vec<(String, String)> = (0..5).map(|n| (n.to_string(), "1".to_owned())).collect();
    // This event was replayed before: now once for its first blob, and once for the dead letter of
    // that replay.
    expected[once_replayed.parse::<usize>().expect("a number")].1 = "2".to_owned();
    expected.push((once_replayed, "2".to_owned()));
    expected.sort();
    assert_eq!(arrivals, expected);
    lab.server.counted("/deliveries/delivered", 6);
    assert_eq!(lab.pass(24 * 3600), 0);
    // The blobs are unchanged.
    assert_eq!(local_blobs(&lab.server).len(), 4);
}

#[test]
fn a_replay_to_a_receiver_that_still_fails_does_not_read_as_delivered() {
    let status = Arc::new(AtomicU16::new(400));
    let receiver = TestReceiver::answering({
        let status = status.clone();
        move |_| ScriptedReply::Status(status.load(Relaxed))
    });
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(CLIENT), receiver, to_local(json!(null)));
    let events: Vec<Value> = (0..4).map(|n| event(n.to_string())).collect();
    lab.server.publish("orders", &events);
    lab.at_once();
    lab.pass(300);
    let outcome = |server: &TestServer, id: &Value, expected: Value| {
        let path = format!("/replays/{id}");
        wait::until("the events have ended or wait", || {
            let job = ours(server, "GET", &path, &Value::Null);
            (job["outcome"] == expected).then_some(())
        });
    };
    let count = |delivered: u64, failed: u64, waiting: u64| json!({"delivered": delivered, "failed": failed, "waiting": waiting});
    let replay = ["deadletters", "replay", "--all", "--secret", "hush"];

    // Refused again, at once.
    let told = CliShell::of(&lab.server).run(&replay);
    assert_ne!(told.code, 0, "{}{}", told.out, told.err);
    assert!(
        told.out
            .contains("0 were delivered, 4 failed again, 0 still wait"),
        "{}{}",
        told.out,
        told.err
    );
    outcome(&lab.server, &json!(1), count(0, 4, 0));
    lab.pass(300);

    // The events would be retried, and none has arrived.
    status.store(500, Relaxed);
    let told = CliShell::of(&lab.server).run(&replay);
    assert_ne!(told.code, 0, "{}{}", told.out, told.err);
    assert!(
        told.out
            .contains("0 were delivered, 0 failed again, 8 still wait"),
        "{}{}",
        told.out,
        told.err
    );
    status.store(200, Relaxed);
    lab.pass(24 * 3600);
    outcome(&lab.server, &json!(2), count(8, 0, 0));

    let told = CliShell::of(&lab.server).run(&replay);
    assert_eq!(told.code, 0, "{}{}", told.out, told.err);
    assert!(
        told.out.contains("8 were delivered, 0 failed again"),
        "{}",
        told.out
    );

    // The outcome is not kept across a restart: none is reported rather than a wrong one.
    lab.server.kill();
    lab.server.start();
    let job = ours(&lab.server, "GET", "/replays/3", &Value::Null);
    assert_eq!((&job["state"], &job["outcome"]), (&json!("done"), &Value::Null));
}

#[test]
fn letters_of_blobs_that_are_gone_or_cut_off_stay_known() {
    let status = Arc::new(AtomicU16::new(400));
    let receiver = TestReceiver::answering({
        let status = status.clone();
        move |_| ScriptedReply::Status(status.load(Relaxed))
    });
    let mut lab = ClockLab::subscribed(ServerSetup::test_clock(CLIENT), receiver, to_local(json!(null)));
    let events: Vec<Value> = (0..6).map(|n| event(n.to_string())).collect();
    for some in events.chunks(2) {
        lab.server.publish("orders", some);
        lab.at_once();
        lab.pass(300);
    }
    assert_eq!(letter_counts(&lab.server), [0, 6, 3]);
    let listed = ours(&lab.server, "GET", "", &Value::Null);
    let letters = listed["value"].as_array().expect("letters").clone();
    let root = lab.server.data_dir().join("deadletters");
    let file = |letter: &Value| {
        let [container, path] = ["container", "path"].map(|name| letter["blob"][name].as_str().expect(name));
        root.join(container).join(path)
    };
    std::fs::remove_file(file(&letters[0])).expect("it was there");
    let body = std::fs::read(file(&letters[2])).expect("a blob can be read");
    std::fs::write(file(&letters[2]), &body[..body.len() / 2]).expect("a blob can be written");
    status.store(200, Relaxed);

    let tally = ours(&lab.server, "GET", "/summary", &Value::Null)["value"][0].take();
    let numbers = ["written", "missing", "damaged"].map(|name| tally[name].as_u64());
    assert_eq!(numbers, [Some(6), Some(2), Some(2)], "{tally}");
    let listed = ours(&lab.server, "GET", "?limit=1000", &Value::Null);
    let letters: Vec<&Value> = listed["value"].as_array().expect("letters").iter().collect();
    let states: Vec<&Value> = letters.iter().map(|letter| &letter["state"]).collect();
    assert_eq!(
        states,
        ["missing", "missing", "damaged", "damaged", "written", "written"]
    );
    for (at, reason) in [(0, "does not exist"), (3, "not JSON")] {
        let id = letters[at]["id"].as_str().expect("an id");
        let target = format!("/postrider/v1/deadletters/{id}");
        let shown = lab
            .server
            .send("GET", &target, &[("authorization", "Bearer hush")], String::new());
        assert_eq!(shown.status, 410, "{}", shown.text());
        let detail = shown.json()["detail"].take();
        let path = letters[at]["blob"]["path"].as_str().expect("a path");
        let detail = detail.as_str().expect("a text");
        assert!(detail.contains(path) && detail.contains(reason), "{detail}");
    }

    let begun = ours(&lab.server, "POST", "/replay", &json!({"all": true}));
    let job = wait::until("the replay has ended", || {
        let job = ours(
            &lab.server,
            "GET",
            &format!("/replays/{}", begun["id"]),
            &Value::Null,
        );
        (job["state"] != "running").then_some(job)
    });
    assert_eq!(job["state"], "incomplete", "{job}");
    let numbers = ["replayed", "failed", "unreadable"].map(|name| job[name].as_u64());
    assert_eq!(numbers, [Some(2), Some(4), Some(4)], "{job}");
    let blobs = job["unreadableBlobs"].as_array().expect("blobs");
    let each = |at: usize, letter: &Value| {
        assert_eq!(blobs[at]["path"], letter["blob"]["path"]);
        assert_eq!(
            (&blobs[at]["state"], &blobs[at]["letters"]),
            (&letter["state"], &json!(2))
        );
    };
    each(0, letters[0]);
    each(1, letters[2]);
    // A restart keeps the dead letters that could not be replayed; the outcome of the others is
    // forgotten.
    let mut job = job;
    let outcome = job.as_object_mut().and_then(|job| job.remove("outcome"));
    assert!(outcome.is_some());
    lab.server.kill();
    lab.server.start();
    let again = ours(
        &lab.server,
        "GET",
        &format!("/replays/{}", begun["id"]),
        &Value::Null,
    );
    assert_eq!(again, job);

    // The whole directory is unreachable, so no blob is known to be gone.
    let away = lab.server.data_dir().join("away");
    std::fs::rename(&root, &away).expect("it can be renamed");
    let listed = ours(&lab.server, "GET", "", &Value::Null);
    for letter in listed["value"].as_array().expect("letters") {
        assert_eq!(letter["state"], "written", "{letter}");
        assert!(
            letter["trouble"]
                .as_str()
                .expect("a reason")
                .contains("cannot be reached")
        );
    }
    std::fs::rename(&away, &root).expect("it can be renamed back");

    assert_eq!(
        ours(&lab.server, "POST", "/purge", &json!({"all": true}))["purged"],
        6
    );
    assert_eq!(ours(&lab.server, "GET", "", &Value::Null)["value"], json!([]));
}

#[test]
fn every_schema_is_replayed_as_it_was_first_sent() {
    let status = Arc::new(AtomicU16::new(400));
    let receiver = TestReceiver::answering({
        let status = status.clone();
        move |_| ScriptedReply::Status(status.load(Relaxed))
    });
    let url = receiver.url("");
    let declared = |topic: &str, schema: &str, more: &str, delivery: &[&str]| {
        let subscriptions: String = delivery
            .iter()
            .map(|delivery| {
                let path = format!("/{topic}-{delivery}");
                let name = path[1..].replace('_', "-");
                format!(
                    "[[topic.subscription]]\nname = \"{name}\"\nevent_delivery_schema = \"{delivery}\"\n\
                     destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}{path}\" }} }}\n\
                     dead_letter_destination = {{ endpoint_type = \"StorageBlob\", properties = {{ resource_id = \"local\", \
                     blob_container_name = \"dead\" }} }}\n"
                )
            })
            .collect();
        format!("[[topic]]\nname = \"{topic}\"\ninput_schema = \"{schema}\"\n{more}\n{subscriptions}")
    };
    let mapping = "input_schema_mapping = { inputSchemaMappingType = \"Json\", properties = { \
        id = { sourceField = \"id\" }, eventType = { defaultValue = \"T\" }, subject = { defaultValue = \"S\" } } }";
    let config = [
        CLIENT.to_owned(),
        declared(
            "grids",
            "EventGridSchema",
            "",
            &["EventGridSchema", "CloudEventSchemaV1_0"],
        ),
        declared("clouds", "CloudEventSchemaV1_0", "", &["CloudEventSchemaV1_0"]),
        declared(
            "things",
            "CustomEventSchema",
            mapping,
            &["CustomInputSchema", "EventGridSchema", "CloudEventSchemaV1_0"],
        ),
    ];
    let lab = ClockLab::start(ServerSetup::test_clock(config.concat()), receiver);
    lab.server.publish("grids", &[event("g")]);
    let cloud = json!({"specversion": "1.0", "id": "c", "source": "/shop", "type": "T", "tenant": "acme", "data": [1.5]});
    let headers = [("content-type", "application/cloudevents+json")];
    let path = format!("/topics/clouds/events?{}", crate::server::EDGE_VERSION);
    lab.server
        .send("POST", &path, &headers, cloud.to_string())
        .expect(200);
    lab.server.publish("things", &[json!({"id": "t", "n": 1.50})]);
    let by_path = |arrived: Vec<(String, Value)>| arrived.into_iter().collect::<BTreeMap<_, _>>();
    let first = lab.at_once();
    let first = by_path(
        first
            .iter()
            .map(|one| (one.delivery.path.clone(), one.delivery.json()))
            .collect(),
    );
    assert_eq!(first.len(), 6);
    lab.pass(300);
    status.store(200, Relaxed);
    let job = replayed(&lab.server, &json!({"all": true}));
    assert_eq!(
        (&job["replayed"], &job["failed"]),
        (&json!(6), &json!(0)),
        "{job}"
    );
    let again = (0..6).map(|_| {
        let delivery = lab.receiver.next();
        (delivery.path.clone(), delivery.json())
    });
    assert_eq!(by_path(again.collect()), first);
}
