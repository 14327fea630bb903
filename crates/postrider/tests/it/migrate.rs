//! All data of a stopped server, moved to JetStream and back: nothing is lost or duplicated, and
//! everything continues where it was.

use crate::cluster::link::LinkRuntime;
use crate::cluster::nats::{self, NatsServers, USER};
use crate::dead_letters::letter_counts;
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::Duration;

const SUBSCRIPTION: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1";
/// Longer than any migration takes here.
const PATIENCE: Duration = Duration::from_secs(120);

/// A NATS server for one test.
struct MigrationSetup {
    nats: NatsServers,
    _roads: LinkRuntime,
}

impl MigrationSetup {
    fn start() -> Option<MigrationSetup> {
        let program = nats::installed()?;
        let roads = LinkRuntime::new();
        Some(MigrationSetup {
            nats: NatsServers::start(&program, 1, &roads),
            _roads: roads,
        })
    }

    /// A configuration with both stores, one of which is chosen.
    fn config(&self, kind: &str) -> String {
        let client = self.nats.servers[0].client;
        format!(
            "[store]\nkind = \"{kind}\"\n[store.jetstream]\nurls = [\"nats://{client}\"]\nuser = \"{USER}\"\n\
             password = \"{USER}\"\npartitions = 4\nlease = \"2s\"\nnode_name = \"the-node\"\n"
        )
    }

    /// `postrider migrate` with its own configuration, not started yet.
    fn command(&self, data_dir: &Path, args: &[&str]) -> Command {
        let file = data_dir
            .parent()
            .expect("it is in the test's directory")
            .join("migrate.toml");
        // The choice of the store makes no difference for the command.
        std::fs::write(&file, self.config("embedded")).expect("it can be written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        command.env_clear().arg("migrate").args(args);
        command.arg("--config").arg(&file).arg("--data-dir").arg(data_dir);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, data_dir: &Path, args: &[&str]) -> Output {
        let mut child = self
            .command(data_dir, args)
            .spawn()
            .expect("the program can be started");
        let ended = wait::is_true_within(PATIENCE, || {
            child.try_wait().expect("a child can be waited for").is_some()
        });
        if !ended {
            child.kill().expect("a child can be killed");
        }
        let output = child.wait_with_output().expect("a child has output");
        assert!(
            ended,
            "still running: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        output
    }

    /// Report of a completed migration.
    #[track_caller]
    fn moved(&self, data_dir: &Path, to: &str) -> Value {
        let output = self.run(data_dir, &["--to", to, "--output", "json"]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{told}");
        serde_json::from_slice(&output.stdout).expect("a report")
    }

    /// Error message of a refused migration.
    #[track_caller]
    fn refused(&self, data_dir: &Path, args: &[&str]) -> String {
        let output = self.run(data_dir, args);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        told
    }
}

/// A receiver with one path whose status can be changed, one that always fails, and the rest
/// succeeding.
fn receiver() -> (TestReceiver, Arc<AtomicU16>) {
    let mood = Arc::new(AtomicU16::new(500));
    let said = mood.clone();
    let receiver = TestReceiver::answering(move |delivery| {
        ScriptedReply::Status(match delivery.path.as_str() {
            "/billing" => said.load(Relaxed),
            "/refusing" => 400,
            _ => 200,
        })
    });
    (receiver, mood)
}

fn control(server: &TestServer, verb: &str, id: &str) {
    let path = format!("/postrider/v1/subscriptions/{verb}");
    let body = json!({ "id": id }).to_string();
    server
        .send("POST", &path, &[JSON, authorization(server)], body)
        .expect(200);
}

/// Authorization header of the generated client.
fn authorization(server: &TestServer) -> (&'static str, &'static str) {
    let text = std::fs::read_to_string(server.data_dir().join("credentials.toml")).expect("credentials");
    let secret = text
        .lines()
        .find_map(|line| line.strip_prefix("client_secret = "))
        .expect("a secret")
        .trim_matches('"');
    (
        "authorization",
        Box::leak(format!("Bearer {secret}").into_boxed_str()),
    )
}

fn shown(server: &TestServer, id: &str) -> Value {
    let path = format!("/postrider/v1/subscription?id={id}");
    server
        .send("GET", &path, &[authorization(server)], "")
        .expect(200)
        .json()
}

fn publish(server: &TestServer, ids: &[&str]) {
    for id in ids {
        server.publish("orders", &[event(*id)]);
    }
}

/// Deliveries to one path: event and number of earlier attempts.
fn arrived(receiver: &TestReceiver, path: &str, count: usize) -> Vec<(String, String)> {
    let mut all = Vec::new();
    while all.len() < count {
        let delivery = receiver.next();
        assert_eq!(delivery.path, path, "{:?}", delivery.ids());
        let attempts = delivery.header("aeg-delivery-count").expect("a count").to_owned();
        all.extend(delivery.ids().into_iter().map(|id| (id, attempts.clone())));
    }
    all.sort();
    all
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter()
        .map(|(id, count)| (id.to_string(), count.to_string()))
        .collect()
}

fn waits(server: &TestServer, id: &str, waiting: u64, retrying: u64) {
    let mut last = Value::Null;
    let so = wait::is_true_in_time(|| {
        last = shown(server, id);
        last["waiting"] == waiting && last["retrying"] == retrying
    });
    assert!(
        so,
        "{id} never had {waiting} waiting and {retrying} retrying: {last}"
    );
}

/// Secrets that clients rely on: their credentials, the CA, and the public half of the key that
/// signs tokens. The key's file is sealed under a key of each node's own.
fn shared_secrets(server: &TestServer) -> [String; 3] {
    let file = |name: &str| std::fs::read_to_string(server.data_dir().join(name)).expect(name);
    let keys = server.send("GET", "/common/discovery/v2.0/keys", &[], "");
    let keys = keys.expect(200).json().to_string();
    [file("credentials.toml"), file("tls/ca.pem"), keys]
}

#[test]
fn a_server_moves_to_jetstream_and_back() {
    let Some(ground) = MigrationSetup::start() else {
        return;
    };
    let (receiver, mood) = receiver();
    let mut server = ServerSetup::config(ground.config("embedded")).start();
    let data_dir = server.data_dir();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/billing"), json!(null));
    server.subscribe("orders", "paused", &receiver.url("/paused"), json!(null));
    let dead = json!({"deadLetterDestination": {"endpointType": "StorageBlob", "properties": {
        "resourceId": format!("{SUBSCRIPTION}/providers/Microsoft.Storage/storageAccounts/local"),
        "blobContainerName": "dead",
    }}});
    server.subscribe("orders", "refusing", &receiver.url("/refusing"), dead);
    control(&server, "pause", "orders/paused");
    publish(&server, &["a", "b", "c"]);
    waits(&server, "orders/billing", 0, 3);
    waits(&server, "orders/paused", 3, 0);
    wait::until("the dead letters wait", || {
        (letter_counts(&server)[0] == 3).then_some(())
    });
    let ids: Vec<Value> = ["billing", "paused"]
        .map(|name| shown(&server, &format!("orders/{name}"))["id"].take())
        .into();
    let before = shared_secrets(&server);
    server.kill();
    receiver.take_received();

    let report = ground.moved(&data_dir, "jetstream");
    let counts = [
        "topics",
        "subscriptions",
        "events",
        "waiting",
        "retrying",
        "deadLetters",
        "strays",
        "damaged",
    ];
    assert_eq!(
        counts.map(|name| report[name].as_u64().unwrap()),
        [1, 3, 3, 3, 3, 3, 0, 0],
        "{report}"
    );
    assert_eq!(report["bySubscription"].as_array().unwrap().len(), 3);
    // No server starts on the moved source by mistake, and a second migration reports that it is
    // done.
    let refusal = server.start_second("127.0.0.1:0", "127.0.0.1:0");
    let told = String::from_utf8_lossy(&refusal.stderr).into_owned();
    assert!(
        told.contains("moved to JetStream") && told.contains("--undo"),
        "{told}"
    );
    let again = ground.moved(&data_dir, "jetstream");
    assert_eq!(again, json!({"to": "jetstream", "finished": true}));

    // The server continues on JetStream.
    mood.store(200, Relaxed);
    server.configure(ground.config("jetstream"));
    server.start();
    assert_eq!(
        arrived(&receiver, "/billing", 3),
        pairs(&[("a", "1"), ("b", "1"), ("c", "1")])
    );
    waits(&server, "orders/paused", 3, 0);
    assert_eq!(letter_counts(&server)[0], 3);
    let same: Vec<Value> = ["billing", "paused"]
        .map(|name| shown(&server, &format!("orders/{name}"))["id"].take())
        .into();
    assert_eq!(same, ids);
    assert_eq!(shared_secrets(&server), before);
    // A node added later accepts the same tokens.
    let second = ServerSetup::config(ground.config("jetstream").replace("the-node", "another")).start();
    assert_eq!(shared_secrets(&second), before);
    drop(second);
    mood.store(500, Relaxed);
    publish(&server, &["d", "e"]);
    waits(&server, "orders/billing", 0, 2);
    wait::until("more dead letters wait", || {
        (letter_counts(&server)[0] == 5).then_some(())
    });

    // The cluster cannot be moved while a node is running.
    let told = ground.refused(&data_dir, &["--to", "embedded"]);
    assert!(told.contains("in use"), "{told}");
    let elsewhere = data_dir.parent().unwrap().join("elsewhere");
    let told = ground.refused(&elsewhere, &["--to", "embedded"]);
    assert!(told.contains("the-node") && told.contains("Stop them"), "{told}");
    server.kill();
    receiver.take_received();

    let report = ground.moved(&data_dir, "embedded");
    assert_eq!(
        counts.map(|name| report[name].as_u64().unwrap()),
        [1, 3, 5, 5, 2, 5, 0, 0],
        "{report}"
    );
    let refusal = {
        server.launch();
        server.ended()
    };
    assert_eq!(refusal.code(), Some(1));
    server.logged(&["moved to", "embedded", "--undo"]);
    let again = ground.moved(&data_dir, "embedded");
    assert_eq!(again, json!({"to": "embedded", "finished": true}));
    let told = ground.refused(&elsewhere, &["--to", "embedded"]);
    assert!(told.contains("was moved to"), "{told}");
    mood.store(200, Relaxed);
    server.configure(ground.config("embedded"));
    server.start();
    assert_eq!(
        arrived(&receiver, "/billing", 2),
        pairs(&[("d", "1"), ("e", "1")])
    );
    assert_eq!(letter_counts(&server)[0], 5);
    control(&server, "resume", "orders/paused");
    let all = ["a", "b", "c", "d", "e"].map(|id| (id, "0"));
    assert_eq!(arrived(&receiver, "/paused", 5), pairs(&all));
    waits(&server, "orders/paused", 0, 0);
    assert!(receiver.take_received().is_empty());
    assert_eq!(shared_secrets(&server), before);

    // A store that was moved from the cluster can be moved back to it.
    server.stop();
    let report = ground.moved(&data_dir, "jetstream");
    assert_eq!(
        (report["deadLetters"].as_u64(), report["waiting"].as_u64()),
        (Some(5), Some(0))
    );
}

/// A server with many open deliveries.
struct BusyServer {
    server: TestServer,
    receiver: TestReceiver,
    expected: BTreeSet<String>,
}

/// Many events wait for two paused subscriptions.
fn loaded(ground: &MigrationSetup) -> BusyServer {
    const REQUESTS: usize = 60;
    const EVENTS: usize = 50;
    let (receiver, _) = receiver();
    let server = ServerSetup::config(ground.config("embedded")).start();
    server.put_topic("orders");
    for name in ["one", "two"] {
        server.subscribe("orders", name, &receiver.url(&format!("/{name}")), json!(null));
        control(&server, "pause", &format!("orders/{name}"));
    }
    let mut expected = BTreeSet::new();
    for request in 0..REQUESTS {
        let ids: Vec<String> = (0..EVENTS).map(|n| format!("{request}-{n}")).collect();
        let events: Vec<Value> = ids.iter().map(event).collect();
        server.publish("orders", &events);
        expected.extend(ids);
    }
    BusyServer {
        server,
        receiver,
        expected,
    }
}

/// Runs a migration that is killed again and again, a little later each time, until one completes.
/// Returns its report and the number of kills.
fn run_with_kills(ground: &MigrationSetup, data_dir: &Path, to: &str) -> (Value, usize) {
    let mut killed = 0;
    let mut after = Duration::from_millis(20);
    loop {
        let mut child = ground
            .command(data_dir, &["--to", to, "--output", "json"])
            .spawn()
            .expect("the program can be started");
        let ended = wait::is_true_within(after, || {
            child.try_wait().expect("a child can be waited for").is_some()
        });
        if !ended {
            child.kill().expect("a child can be killed");
            killed += 1;
        }
        let output = child.wait_with_output().expect("a child has output");
        if ended {
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{told}");
            return (serde_json::from_slice(&output.stdout).expect("a report"), killed);
        }
        after = after * 8 / 7 + Duration::from_millis(10);
        assert!(after < PATIENCE, "it never ends");
    }
}

// After kills at many points in each direction, all data is there exactly once.
#[test]
fn an_interrupted_migration_is_run_again() {
    let Some(ground) = MigrationSetup::start() else {
        return;
    };
    let BusyServer {
        mut server,
        receiver,
        expected,
    } = loaded(&ground);
    let data_dir = server.data_dir();
    server.kill();
    let (report, killed) = run_with_kills(&ground, &data_dir, "jetstream");
    assert!(killed >= 5, "{killed} are not enough to mean anything");
    // The last run may have found everything done.
    if report["events"].is_u64() {
        assert_eq!(report["waiting"], 2 * expected.len());
    }
    let elsewhere = data_dir.parent().unwrap().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let (report, killed) = run_with_kills(&ground, &elsewhere, "embedded");
    assert!(killed >= 5, "{killed} are not enough to mean anything");
    if report["events"].is_u64() {
        assert_eq!(report["waiting"], 2 * expected.len());
    }
    let mut moved = ServerSetup {
        config: ground.config("embedded"),
        data_dir: Some(elsewhere),
        ..ServerSetup::default()
    }
    .start();
    for name in ["one", "two"] {
        waits(&moved, &format!("orders/{name}"), expected.len() as u64, 0);
        control(&moved, "resume", &format!("orders/{name}"));
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        while counts.len() < expected.len() {
            for id in receiver.next().ids() {
                *counts.entry(id).or_default() += 1;
            }
        }
        waits(&moved, &format!("orders/{name}"), 0, 0);
        let late: Vec<String> = receiver
            .take_received()
            .iter()
            .flat_map(|one| one.ids())
            .collect();
        assert!(late.is_empty(), "{late:?}");
        assert!(counts.values().all(|count| *count == 1), "something came twice");
        assert_eq!(counts.into_keys().collect::<BTreeSet<_>>(), expected);
    }
    moved.stop();
}

#[test]
fn a_migration_can_be_taken_back() {
    let Some(ground) = MigrationSetup::start() else {
        return;
    };
    let mut server = ServerSetup::config(ground.config("embedded")).start();
    let data_dir = server.data_dir();
    server.put_topic("orders");
    server.kill();
    ground.moved(&data_dir, "jetstream");
    let output = ground.run(&data_dir, &["--to", "jetstream", "--undo"]);
    assert!(output.status.success());
    server.start();
    server.kill();
    // The cluster belongs to another server, as far as can be known.
    let told = ground.refused(&data_dir, &["--to", "jetstream"]);
    assert!(
        told.contains("holds a server's data already") && told.contains("prefix"),
        "{told}"
    );
    let other = data_dir.parent().unwrap().join("other");
    ground.moved(&other, "embedded");
    server.configure(ground.config("jetstream"));
    server.launch();
    assert_eq!(server.ended().code(), Some(1));
    let output = ground.run(&other, &["--to", "embedded", "--undo"]);
    assert!(output.status.success());
    server.start();
}

#[test]
fn what_cannot_be_moved_is_refused_and_stays_as_it_is() {
    let Some(ground) = MigrationSetup::start() else {
        return;
    };
    let mut server = ServerSetup::config(ground.config("embedded")).start();
    let data_dir = server.data_dir();
    server.put_topic("orders");
    let told = ground.refused(&data_dir, &["--to", "jetstream"]);
    assert!(told.contains("in use"), "{told}");
    let empty = data_dir.parent().unwrap().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let told = ground.refused(&empty, &["--to", "jetstream"]);
    assert!(told.contains("holds no embedded store"), "{told}");
    let told = ground.refused(&empty, &["--to", "embedded"]);
    assert!(told.contains("holds nothing to be moved"), "{told}");
    // A cluster with another server's data.
    let theirs = ServerSetup::config(ground.config("jetstream")).start();
    theirs.put_topic("theirs");
    server.kill();
    let told = ground.refused(&data_dir, &["--to", "jetstream"]);
    assert!(told.contains("the-node"), "{told}");
    drop(theirs);
    let told = ground.refused(&data_dir, &["--to", "jetstream"]);
    assert!(told.contains("holds a server's data already"), "{told}");
    let told = ground.refused(&data_dir, &["--to", "embedded"]);
    assert!(told.contains("holds a store already"), "{told}");
    // The refused migrations have changed nothing.
    server.start();
    server.edge("GET", "/topics/orders", &Value::Null).expect(200);
}
