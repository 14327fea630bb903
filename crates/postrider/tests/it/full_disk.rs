//! A full disk: publish requests are refused, nothing is lost, and service resumes once there is
//! space.

use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, JSON, ServerSetup, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// A small file system of its own, unmounted on drop.
struct SmallDisk(TempDir);

impl SmallDisk {
    /// `None` where mounting is not permitted.
    fn mount(megabytes: u32) -> Option<SmallDisk> {
        let place = TempDir::new().expect("a temporary directory");
        let options = format!("size={megabytes}m");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(place.path())
            .output();
        mounted
            .is_ok_and(|output| output.status.success())
            .then(|| SmallDisk(place))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn a_full_disk_refuses_publishes_until_there_is_room_and_loses_nothing() {
    let Some(disk) = SmallDisk::mount(24) else {
        println!("skipped: mounting a tmpfs is not permitted here");
        return;
    };
    let gate = Arc::new(ReplyGate::default());
    let receiver = TestReceiver::answering({
        let gate = gate.clone();
        move |_| {
            gate.wait();
            ScriptedReply::Status(200)
        }
    });
    let setup = ServerSetup {
        data_dir: Some(disk.path().join("data")),
        ..ServerSetup::default()
    };
    let mut server = setup.start();
    server.put_topic("orders");
    let batch = json!({"destination": {"properties": {"maxEventsPerBatch": 50}}});
    server.subscribe("orders", "billing", &receiver.url("/"), batch);

    let target = format!("/topics/orders/events?{EDGE_VERSION}");
    let mut acknowledged = BTreeSet::new();
    let mut number = 0;
    let mut publish = |connection: &mut crate::client::TestConnection,
                       acknowledged: &mut BTreeSet<String>| {
        let events: Vec<Value> = (0..10)
            .map(|_| {
                number += 1;
                let mut event = event(format!("e{number}"));
                event["data"] = json!("x".repeat(10_000));
                event
            })
            .collect();
        let answer = connection
            .send("POST", &target, &[JSON], json!(events).to_string().as_bytes())
            .unwrap();
        if answer.status == 200 {
            acknowledged.extend(
                events
                    .iter()
                    .map(|e| e["id"].as_str().expect("it has one").to_owned()),
            );
        }
        answer
    };
    let refusal = wait::until("the disk is full", || {
        let answer = publish(&mut server.connect(), &mut acknowledged);
        (answer.status != 200).then_some(answer)
    });
    assert!(acknowledged.len() > 500, "only {} events fit", acknowledged.len());
    let told = refusal.expect(503);
    assert_eq!(told.header("retry-after"), Some("1"));
    let told = told.json();
    assert_eq!(told["error"]["details"]["code"], "ServiceUnavailable");
    let message = told["error"]["details"]["message"].as_str().unwrap();
    assert!(message.contains("the disk is full"), "{message}");
    let health = server.send("GET", "/healthz", &[], "").expect(503).json();
    // Refused events are not counted as accepted.
    assert_eq!(health["deliveries"]["matched"], acknowledged.len());
    assert_eq!(health["status"], "unavailable");
    assert!(
        health["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains("the disk is full")),
        "{health}"
    );
    assert_eq!(health["reasons"][0]["code"], "logUnwritable", "{health}");
    let ready = server.send("GET", "/healthz/ready", &[], "").expect(503).json();
    assert_eq!(
        (&ready["ready"], &ready["reasons"]),
        (&json!(false), &health["reasons"])
    );
    // A restart would not free space, so the server stays live.
    server.send("GET", "/healthz/live", &[], "").expect(200);
    server.logged(&["ERROR", "publishes are refused", "the disk is full"]);

    // The server starts on a full disk and loses nothing.
    server.kill();
    server.start();
    publish(&mut server.connect(), &mut acknowledged);

    gate.open();
    receiver.all_of(&acknowledged);
    wait::until("there is room again", || {
        (server.send("GET", "/healthz", &[], "").status == 200).then_some(())
    });
    let mut later = BTreeSet::new();
    for _ in 0..20 {
        let answer = wait::until("publishes are accepted", || {
            let answer = publish(&mut server.connect(), &mut later);
            (answer.status == 200).then_some(answer)
        });
        assert_eq!(answer.text(), "");
    }
    receiver.all_of(&later);
    server.stop();
}
