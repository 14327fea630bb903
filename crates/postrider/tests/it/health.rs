//! `/healthz` and its two short forms: live, ready, the reason if not, and warnings.

use crate::clock_lab::ClockLab;
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use serde_json::{Value, json};
use std::time::Duration;

fn codes(health: &Value, list: &str) -> Vec<String> {
    let all = health[list].as_array().expect("a list");
    all.iter()
        .map(|one| one["code"].as_str().expect("a word").to_owned())
        .collect()
}

#[test]
fn a_server_that_is_well_says_so_in_each_way() {
    let server = TestServer::start_plain();
    let health = server.send("GET", "/healthz", &[], "").expect(200).json();
    assert_eq!(
        json!([
            health["status"],
            health["live"],
            health["ready"],
            health["reasons"],
            health["warnings"]
        ]),
        json!(["ready", true, true, [], []])
    );
    let live = server.send("GET", "/healthz/live", &[], "").expect(200).json();
    assert_eq!(live, json!({"status": "live", "live": true}));
    let ready = server.send("GET", "/healthz/ready", &[], "").expect(200).json();
    assert_eq!(ready, json!({"status": "ready", "ready": true, "reasons": []}));
    server.send("GET", "/healthz/other", &[], "").expect(404);
}

#[test]
fn dead_letters_that_are_stuck_are_a_warning_and_it_stays_ready() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let shelf = format!(
        "[[storage_account]]\nname = \"shelf\"\nkind = \"directory\"\ncreate_containers = false\npath = \"{}\"\n",
        root.path().display()
    );
    let properties = json!({
        "deadLetterDestination": {
            "endpointType": "StorageBlob",
            "properties": {"resourceId": "shelf", "blobContainerName": "dead"},
        },
    });
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let lab = ClockLab::subscribed(ServerSetup::test_clock(shelf), receiver, properties);
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    assert_eq!(codes(&lab.server.health(), "warnings"), [""; 0]);
    lab.advance_to_second(300);
    let health = lab.server.send("GET", "/healthz", &[], "").expect(200).json();
    assert_eq!(codes(&health, "warnings"), ["deadLetters"], "{health}");
    let detail = health["warnings"][0]["detail"].as_str().unwrap();
    assert!(
        detail.contains("\"billing\"") && detail.contains("\"shelf\""),
        "{detail}"
    );
    assert_eq!(health["ready"], true);
    lab.server.send("GET", "/healthz/ready", &[], "").expect(200);
}

#[test]
fn a_certificate_that_soon_ends_is_a_warning() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (cert, key) = (
        directory.path().join("cert.pem"),
        directory.path().join("key.pem"),
    );
    let pair = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let end = (SystemClock.now() + Duration::from_secs(10 * 24 * 60 * 60)).civil();
    params.not_after = rcgen::date_time_ymd(end.year.into(), end.month, end.day);
    std::fs::write(&cert, params.self_signed(&pair).unwrap().pem()).unwrap();
    std::fs::write(&key, pair.serialize_pem()).unwrap();
    let listen = format!(
        "[listen]\ncert_file = \"{}\"\nkey_file = \"{}\"\n",
        cert.display(),
        key.display()
    );
    let server = ServerSetup::config(listen).start();
    let health = server.send("GET", "/healthz", &[], "").expect(200).json();
    assert_eq!(codes(&health, "warnings"), ["certificate"], "{health}");
    let detail = health["warnings"][0]["detail"].as_str().unwrap();
    let day = format!("{:04}-{:02}-{:02}", end.year, end.month, end.day);
    assert!(
        detail.contains(&day) && detail.contains("listen.cert_file"),
        "{detail}"
    );
}
