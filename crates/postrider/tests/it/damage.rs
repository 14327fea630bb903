//! Damaged log files: intact events are delivered, damage is reported and never delivered.

use crate::receiver::{ReplyGate, ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

const EVENTS: usize = 60;

fn id(n: usize) -> String {
    format!("event-{n:03}")
}

fn ids(numbers: impl Iterator<Item = usize>) -> BTreeSet<String> {
    numbers.map(id).collect()
}

/// How the server was stopped.
#[derive(Clone, Copy, Debug)]
enum StopMode {
    Killed,
    Stopped,
    /// Stopped, started and stopped again: the events are in a segment that was closed long ago and
    /// is not read on start.
    Sealed,
}

/// A stopped server with events in its log, one record each, none of them delivered.
struct StoppedServer {
    gate: Arc<ReplyGate>,
    receiver: TestReceiver,
    server: TestServer,
}

impl StoppedServer {
    fn new(end: StopMode) -> StoppedServer {
        let gate = Arc::new(ReplyGate::default());
        let receiver = TestReceiver::answering({
            let gate = gate.clone();
            move |_| {
                gate.wait();
                ScriptedReply::Status(200)
            }
        });
        let mut server = ServerSetup::config("shutdown.grace = \"0s\"").start();
        server.put_topic("orders");
        server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
        for n in 0..EVENTS {
            server.publish("orders", &[event(id(n))]);
        }
        // Deliveries in flight have arrived but are not answered: they will be made again.
        match end {
            StopMode::Killed => server.kill(),
            StopMode::Stopped => server.stop(),
            StopMode::Sealed => {
                server.stop();
                server.start();
                server.stop();
            }
        }
        StoppedServer {
            gate,
            receiver,
            server,
        }
    }

    /// Path and offset of this text in the log's files.
    fn find(&self, text: &str) -> (PathBuf, u64) {
        let directory = self.server.data_dir().join("log");
        let files = fs::read_dir(directory)
            .expect("there is a log")
            .map(|entry| entry.unwrap().path());
        let found = files
            .filter(|path| path.extension().is_some_and(|e| e == "log"))
            .find_map(|path| {
                let bytes = fs::read(&path).unwrap();
                let at = bytes
                    .windows(text.len())
                    .position(|window| window == text.as_bytes())?;
                Some((path, at as u64))
            });
        found.unwrap_or_else(|| panic!("{text} is in no log file"))
    }

    fn overwrite(&self, at: &(PathBuf, u64), bytes: &[u8]) {
        OpenOptions::new()
            .write(true)
            .open(&at.0)
            .unwrap()
            .write_all_at(bytes, at.1)
            .unwrap();
    }

    /// Starts again, lets deliveries through, and expects these events among them and a new one.
    #[track_caller]
    fn delivers_after_start(mut self, expected: &BTreeSet<String>) -> (TestServer, BTreeSet<String>) {
        self.receiver.take_received();
        self.gate.open();
        self.server.start();
        let mut seen = self.receiver.all_of(expected);
        self.server.publish("orders", &[event("new")]);
        seen.extend(self.receiver.all_of(&["new".to_owned()].into()));
        self.server.publish("orders", &[event("newer")]);
        seen.extend(self.receiver.all_of(&["newer".to_owned()].into()));
        (self.server, seen)
    }
}

#[test]
fn a_damaged_record_is_reported_with_its_place_and_not_served() {
    for end in [StopMode::Killed, StopMode::Stopped, StopMode::Sealed] {
        let stopped = StoppedServer::new(end);
        let place = stopped.find(&id(30));
        stopped.overwrite(&place, b"\0\xff\0\xff");
        let (file, at) = (place.0.file_name().unwrap().to_str().unwrap().to_owned(), place.1);
        let expected = ids((0..EVENTS).filter(|n| *n != 30));
        let (server, seen) = stopped.delivers_after_start(&expected);
        assert!(
            seen.iter()
                .all(|id| expected.contains(id) || id.starts_with("new")),
            "{seen:?}"
        );

        server.logged(&["ERROR", "damaged record", &file]);
        let health = server.send("GET", "/healthz", &[], "").expect(200).json();
        assert_eq!(health["store"]["corruptRecords"], 1, "{health}");
        if let StopMode::Sealed = end {
            // The index still has the subscription of the damaged event.
            server.counted("/deliveries/dropped/StoredEventCorrupt", 1);
        }
        let told = health["store"]["corrupt"][0].as_str().unwrap();
        assert!(told.contains(&file), "{told}");
        // The reported range covers the damaged bytes, or begins with their record.
        let words = told
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|word| word.parse::<u64>().ok());
        assert!(
            words.into_iter().any(|n| n > 64 && n <= at && at - n < 4096),
            "{told} names no place near {at}"
        );
    }
}

#[test]
fn records_behind_a_damaged_header_are_still_found() {
    let stopped = StoppedServer::new(StopMode::Killed);
    let (file, at) = stopped.find(&id(20));
    // Overwrites the bytes before the event: the record's header and the end of the previous
    // record.
    stopped.overwrite(&(file, at - 120), &[0xa5; 100]);
    let expected = ids((0..EVENTS).filter(|n| ![19, 20].contains(n)));
    let (server, _) = stopped.delivers_after_start(&expected);
    let health = server.health();
    assert_ne!(health["store"]["corruptRecords"], 0, "{health}");
}

#[test]
fn a_torn_tail_is_cut_off() {
    let stopped = StoppedServer::new(StopMode::Killed);
    let (file, at) = stopped.find(&id(EVENTS - 1));
    OpenOptions::new()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(at + 10)
        .unwrap();
    let expected = ids(0..EVENTS - 1);
    let (_, seen) = stopped.delivers_after_start(&expected);
    assert!(!seen.contains(&id(EVENTS - 1)));
}

#[test]
fn garbage_at_the_end_is_no_event() {
    for end in [StopMode::Killed, StopMode::Stopped] {
        let stopped = StoppedServer::new(end);
        let (file, at) = stopped.find(&id(EVENTS - 1));
        let length = fs::metadata(&file).unwrap().len();
        let garbage: Vec<u8> = (0..5000_u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        stopped.overwrite(&(file.clone(), length), &garbage);
        // Garbage directly behind the last record, where the next one would go.
        if at + 4096 < length {
            stopped.overwrite(&(file, at + 400), &garbage);
        }
        let (_, seen) = stopped.delivers_after_start(&ids(0..EVENTS));
        assert_eq!(seen.len(), EVENTS + 2);
    }
}

#[test]
fn a_log_that_lost_its_beginning_still_delivers_the_rest() {
    let stopped = StoppedServer::new(StopMode::Killed);
    let (file, _) = stopped.find(&id(0));
    stopped.overwrite(&(file, 0), &[0; 64]);
    let (server, _) = stopped.delivers_after_start(&ids(1..EVENTS));
    assert_ne!(server.health()["store"]["corruptRecords"], 0);
}

#[test]
fn log_files_that_are_missing_do_not_stop_it() {
    let stopped = StoppedServer::new(StopMode::Stopped);
    fs::remove_dir_all(stopped.server.data_dir().join("log")).unwrap();
    let (server, seen) = stopped.delivers_after_start(&BTreeSet::new());
    assert_eq!(seen, ["new", "newer"].map(String::from).into());
    server.logged(&["ERROR", "are lost", "subscription"]);
    let health = server.health();
    let lost = &health["store"]["lost"][0];
    assert_eq!(lost["from"], 0, "{health}");
    assert!(
        lost["deliveries"][0]["firstAttempts"].as_u64() > Some(0),
        "{health}"
    );
    assert!(lost["deliveries"][0]["subscription"].is_string(), "{health}");
    assert_ne!(
        health["deliveries"]["dropped"]["StoredEventCorrupt"], 0,
        "{health}"
    );
}

// The last segment of a killed server: only the log itself tells how far it went.
#[test]
fn the_last_log_file_of_a_killed_server_cannot_vanish_silently() {
    let stopped = StoppedServer::new(StopMode::Killed);
    let (file, _) = stopped.find(&id(0));
    fs::remove_file(&file).unwrap();
    let (mut server, seen) = stopped.delivers_after_start(&BTreeSet::new());
    assert_eq!(seen, ["new", "newer"].map(String::from).into());
    // With a checkpoint before the kill some of the lost events are known.
    server.logged(&["ERROR", "are lost", "subscription"]);
    let health = server.health();
    let lost = &health["store"]["lost"][0];
    assert_eq!(
        (&lost["from"], &lost["endKnown"]),
        (&json!(0), &json!(false)),
        "{health}"
    );
    assert!(lost["deliveries"][0]["subscription"].is_string(), "{health}");
    assert_eq!(health["warnings"][0]["code"], "logDamaged", "{health}");

    // The loss is reported until the operator acknowledges it.
    let known = health["store"]["lost"].clone();
    server.stop();
    server.start();
    assert_eq!(server.health()["store"]["lost"], known);
    server.stop();
    let told = postrider(&server, &["doctor", "--deep", "--output", "json"]);
    assert!(told.contains("found by an earlier start"), "{told}");
    assert!(told.contains("indexes fit their segments"), "{told}");
    let told = postrider(&server, &["restore", "--forget-losses"]);
    assert!(told.contains("no longer reported"), "{told}");
    server.start();
    let health = server.health();
    assert!(health["store"]["lost"].is_null(), "{health}");
    assert_eq!(health["store"]["corruptRecords"], 0, "{health}");
}

/// Output of a command on the directory of a stopped server.
fn postrider(server: &TestServer, arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
        .env_clear()
        .args(arguments)
        .arg("--data-dir")
        .arg(server.data_dir())
        .output()
        .expect("the program can be run");
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_lost_catalogue_or_state_is_refused_because_events_wait_behind_it() {
    for (file, words) in [
        ("catalog.redb", "catalog.redb is missing"),
        ("state.redb", "state.redb is missing"),
    ] {
        let stopped = StoppedServer::new(StopMode::Killed);
        let path = stopped.server.data_dir().join(file);
        let kept = fs::read(&path).unwrap();
        // Twice, because the first refusal must not make the second start forget.
        for _ in 0..2 {
            fs::remove_file(&path).unwrap();
            let refused = stopped.server.start_second("127.0.0.1:0", "127.0.0.1:0");
            let told = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert_eq!(refused.status.code(), Some(1), "{told}");
            assert!(told.contains(words), "{told}");
            fs::write(&path, &kept).unwrap();
        }
        let (server, _) = stopped.delivers_after_start(&ids(0..EVENTS));
        drop(server);
    }
}
