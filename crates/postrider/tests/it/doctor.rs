//! `postrider doctor`: its findings, its advice, and that it changes nothing.

use crate::dead_letters::{dead_letter_to, shelf as shelf_account};
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// Output of the doctor.
pub struct DoctorOutput {
    code: i32,
    out: String,
}

impl DoctorOutput {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e} in {}", self.out))
    }

    /// The check whose text contains this, as (level, advice).
    #[track_caller]
    pub fn about(&self, about: &str, words: &str) -> (String, String) {
        let told = self.json();
        let checks = told["checks"].as_array().expect("a list");
        let found = checks.iter().find(|one| {
            one["about"] == about && one["what"].as_str().is_some_and(|what| what.contains(words))
        });
        let found = found.unwrap_or_else(|| panic!("no {about} with {words:?} in {told:#}"));
        let text = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
        (text("level"), format!("{} {}", text("todo"), found["commands"]))
    }

    #[track_caller]
    fn level(&self, about: &str, words: &str) -> String {
        self.about(about, words).0
    }
}

fn doctor(directory: &Path, arguments: &[&str]) -> DoctorOutput {
    let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
        .env_clear()
        .current_dir(directory)
        .arg("doctor")
        .args(arguments)
        .output()
        .expect("the program can be run");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(err, "", "nothing but findings");
    DoctorOutput {
        code: output.status.code().expect("it ends by itself"),
        out: String::from_utf8(output.stdout).expect("text"),
    }
}

/// Runs the doctor with the flags and the configuration of a server.
pub fn doctor_of(server: &TestServer, output: &str) -> DoctorOutput {
    let data_dir = server.data_dir();
    let (http, https) = (server.http.to_string(), server.https.to_string());
    let elsewhere = tempfile::tempdir().expect("a temporary directory");
    let data_dir = data_dir.to_str().expect("text");
    fs::write(elsewhere.path().join("postrider.toml"), server.config()).expect("it can be written");
    doctor(
        elsewhere.path(),
        &[
            "--config",
            "postrider.toml",
            "--data-dir",
            data_dir,
            "--http",
            &http,
            "--https",
            &https,
            "--output",
            output,
        ],
    )
}

/// All files below a directory, with their content.
fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => drop(found.insert(path.clone(), fs::read(&path).expect("a file"))),
        }
    }
    found
}

#[test]
fn before_the_first_start_nothing_is_wrong_and_nothing_is_made() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let told = doctor(
        directory.path(),
        &[
            "--http",
            "127.0.0.1:0",
            "--https",
            "127.0.0.1:0",
            "--output",
            "json",
        ],
    );
    assert_eq!(told.code, 0, "{}", told.out);
    assert_eq!(told.json()["problems"], 0);
    assert_eq!(told.level("data directory", "will be made"), "ok");
    assert_eq!(told.level("tls", "will be made"), "ok");
    // Slow flushes depend on the machine: they may be a warning, but not a problem.
    assert_ne!(told.level("disk", "a flush takes"), "problem");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn every_mistake_in_the_configuration_is_named() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("postrider.toml");
    let config =
        "profil = \"edge\"\n[listen]\nhttps = \"nowhere\"\n[limits]\nevents_per_request_max = \"many\"\n";
    fs::write(&file, config).unwrap();
    let told = doctor(
        directory.path(),
        &["--config", "postrider.toml", "--output", "json"],
    );
    assert_eq!(told.code, 1, "{}", told.out);
    for (words, hint) in [
        ("profil: unknown key", "profile"),
        ("listen.https", "nowhere"),
        ("events_per_request_max", ""),
    ] {
        let (level, todo) = told.about("configuration", words);
        assert_eq!(level, "problem");
        assert!(todo.contains("postrider config"), "{todo}");
        assert!(told.out.contains(hint), "{}", told.out);
    }
    // Settings that parse may still contradict each other.
    let config = "[limits]\nevents_per_request_max = 0\n[listen]\nkey_file = \"x\"\n";
    fs::write(&file, config).unwrap();
    let told = doctor(
        directory.path(),
        &["--config", "postrider.toml", "--output", "json"],
    );
    assert_eq!(
        told.level("configuration", "limits.events_per_request_max"),
        "problem"
    );
    assert_eq!(told.level("configuration", "listen.cert_file"), "problem");
}

#[test]
fn a_running_server_is_asked() {
    let receiver = TestReceiver::start();
    let gone = TestReceiver::start().url("/gone?code=hidden");
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "well", &receiver.url("/in?code=hidden"), json!(null));
    server.subscribe("orders", "away", &gone, json!(null));
    server.subscribe(
        "orders",
        "forbidden",
        "http://169.254.169.254/latest",
        json!(null),
    );
    let before = files(&server.data_dir().join("log"));
    let told = doctor_of(&server, "json");
    assert_eq!(told.code, 1, "{}", told.out);
    assert_eq!(told.level("listeners", &format!("http://{}", server.http)), "ok");
    assert_eq!(
        told.level("listeners", &format!("https://{}", server.https)),
        "ok"
    );
    assert_eq!(told.level("server", "ready; version"), "ok");
    let unused = format!(
        "{} can be connected to; nothing was sent to it",
        receiver.url("/in")
    );
    assert_eq!(told.level("endpoints", &unused), "ok");
    let (level, todo) = told.about("endpoints", &gone.replace("?code=hidden", ""));
    assert_eq!(level, "warning");
    assert!(todo.contains("curl -v"), "{todo}");
    let (level, todo) = told.about("endpoints", "169.254.169.254");
    assert_eq!(level, "problem");
    assert!(todo.contains("egress.policy"), "{todo}");
    let (level, todo) = told.about("tls", "does not trust the server's CA");
    assert_eq!(level, "warning");
    assert!(todo.contains("tls/ca.pem"), "{todo}");
    assert_eq!(told.level("storage", "\"local\""), "ok");
    assert_eq!(files(&server.data_dir().join("log")), before);
    // The text has the same findings, and neither form has secrets.
    let text = doctor_of(&server, "text");
    assert_eq!(text.code, 1);
    assert!(
        text.out.contains("problem  endpoints") && text.out.contains("→ "),
        "{}",
        text.out
    );
    let credentials = fs::read_to_string(server.data_dir().join("credentials.toml")).unwrap();
    let secret = credentials
        .lines()
        .find_map(|line| line.strip_prefix("client_secret = "))
        .unwrap();
    for told in [&told, &text] {
        assert!(
            !told.out.contains("hidden") && !told.out.contains(secret.trim_matches('"')),
            "{}",
            told.out
        );
    }
    // Without the faulty subscription there are only warnings, and the exit code is 0.
    server.unsubscribe("orders", "forbidden");
    assert_eq!(doctor_of(&server, "json").code, 0);
    // A wrong address is reported.
    let wrong = doctor(
        server.data_dir().parent().unwrap(),
        &[
            "--data-dir",
            server.data_dir().to_str().unwrap(),
            "--http",
            "127.0.0.1:9",
            "--https",
            "off",
            "--output",
            "json",
        ],
    );
    assert_eq!(
        (wrong.code, wrong.level("server", "127.0.0.1:9")),
        (1, "problem".into())
    );
}

#[test]
fn what_a_stopped_server_left_is_read_and_stays_as_it_is() {
    let receiver = TestReceiver::start();
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("a")]);
    receiver.next();
    // Killed, so that the databases are not closed.
    server.kill();
    let before = files(&server.data_dir());
    let told = doctor_of(&server, "json");
    assert_eq!(told.code, 0, "{}", told.out);
    assert_eq!(told.level("catalogue", "topics: 1, subscriptions: 1"), "ok");
    assert_eq!(told.level("log", "all of it readable"), "ok");
    assert_eq!(told.level("log", "state.redb is readable"), "ok");
    assert_eq!(told.level("endpoints", &receiver.url("/")), "ok");
    assert_eq!(told.level("listeners", &format!("{} is free", server.http)), "ok");
    assert!(
        files(&server.data_dir()) == before,
        "the doctor changed something"
    );

    // Another program has the port.
    let stranger = TcpListener::bind(server.http).unwrap();
    let told = doctor_of(&server, "json");
    let (level, todo) = told.about("listeners", "another program listens");
    assert_eq!((told.code, level.as_str()), (1, "problem"));
    assert!(
        todo.contains(&format!("sport = :{}", server.http.port())),
        "{todo}"
    );
    drop(stranger);
    server.start();
    receiver.take_received();
}

#[test]
fn a_damaged_log_is_found() {
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    // The receiver is gone, so the events stay in the log.
    server.subscribe("orders", "billing", &TestReceiver::start().url("/"), json!(null));
    for id in ["first-of-all", "second", "third"] {
        server.publish("orders", &[event(id)]);
    }
    server.kill();
    let damaged = files(&server.data_dir().join("log"))
        .into_iter()
        .find_map(|(path, bytes)| {
            let at = bytes.windows(12).position(|window| window == b"first-of-all")?;
            Some((path, at as u64))
        });
    let (path, at) = damaged.expect("it is in the log");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"\0\xff", at).unwrap();
    let told = doctor_of(&server, "json");
    assert_eq!(told.code, 1, "{}", told.out);
    let name = path.file_name().unwrap().to_str().unwrap();
    assert_eq!(told.level("log", name), "problem");
    fs::write(server.data_dir().join("catalog.redb"), "rubbish").unwrap();
    assert_eq!(
        doctor_of(&server, "json").level("catalogue", "catalog.redb is damaged"),
        "problem"
    );
}

#[test]
fn it_knows_a_directory_of_a_test_clock() {
    let mut server = ServerSetup::test_clock("").start();
    assert_eq!(
        doctor_of(&server, "json").level("server", "test clock"),
        "warning"
    );
    server.advance(&json!({"by": "30d"}));
    server.stop();
    let told = doctor_of(&server, "json");
    assert_eq!(
        (told.code, told.level("clock", "test clock that stood at")),
        (1, "problem".into())
    );
}

#[test]
fn it_says_what_an_endpoint_last_answered_and_what_that_means() {
    let receiver = TestReceiver::answering(|delivery| {
        let failing = delivery.ids().concat() == "bad";
        ScriptedReply::Status(if failing { 401 } else { 200 })
    });
    let server = ServerSetup::config("dead_letter = { default = \"local\" }\n").start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let url = receiver.url("/");
    server.publish("orders", &[event("good")]);
    server.counted("/deliveries/delivered", 1);
    let accepted = format!("{url} accepted its last delivery, at ");
    let told = doctor_of(&server, "json");
    assert_eq!(told.level("endpoints", &accepted), "ok", "{}", told.out);
    assert_eq!(told.level("endpoints", "(HTTP 200 OK)"), "ok");
    server.publish("orders", &[event("bad")]);
    server.logged(&["attempt failed"]);
    let told = doctor_of(&server, "json");
    let (level, todo) = told.about("endpoints", "was HTTP 401 Unauthorized");
    assert_eq!((told.code, level.as_str()), (0, "warning"), "{}", told.out);
    assert!(todo.contains("credentials"), "{todo}");
    assert!(
        told.out.contains("can be connected to, but its last answer"),
        "{}",
        told.out
    );
}

#[test]
fn what_it_says_to_do_about_a_sick_endpoint_can_be_typed_as_it_is() {
    let status = Arc::new(AtomicU16::new(503));
    let receiver = TestReceiver::answering({
        let status = status.clone();
        move |_| ScriptedReply::Status(status.load(Relaxed))
    });
    let server = ServerSetup::test_clock("probation.failures = 1\n").start();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    server.publish("orders", &[event("a")]);
    receiver.next();
    server.logged(&["its deliveries are delayed"]);
    server.publish("orders", &[event("b")]);
    status.store(200, Relaxed);
    let told = doctor_of(&server, "json");
    let (level, _) = told.about("endpoints", "can be connected to, but is left alone until");
    assert_eq!((told.code, level.as_str()), (0, "warning"));
    // The probe's result is described by the status, not by the name of its category.
    assert_eq!(
        told.level("endpoints", "(HTTP 503 Service Unavailable, since"),
        "warning"
    );
    let told = told.json();
    let checks = told["checks"].as_array().unwrap().iter();
    let command = checks
        .filter_map(|one| one["commands"][0].as_str())
        .find(|command| command.contains("probe"));
    let command = command.unwrap_or_else(|| panic!("no command in {told:#}"));
    let program = Path::new(env!("CARGO_BIN_EXE_postrider"));
    let typed = Command::new("/bin/sh")
        .env_clear()
        .env("PATH", program.parent().unwrap())
        .args(["-c", command])
        .output()
        .unwrap();
    assert!(
        typed.status.success(),
        "{command}: {}",
        String::from_utf8_lossy(&typed.stderr)
    );
    assert_eq!(receiver.next().ids(), ["b"]);
    server.logged(&["endpoint is well again"]);
}

#[test]
fn dead_letter_destinations_are_tried_while_the_server_runs_and_after_it_was_stopped() {
    let shelf = tempfile::tempdir().unwrap();
    let config = format!(
        "dead_letter = {{ delay = \"0s\" }}\n{}",
        shelf_account(shelf.path())
    );
    let mut server = ServerSetup::config(config).start();
    server.put_topic("orders");
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let group = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1";
    let local = format!("{group}/providers/Microsoft.Storage/storageAccounts/local");
    let url = receiver.url("/");
    server.subscribe("orders", "kept", &url, dead_letter_to(&local, "dlx", json!(null)));
    let well = r#"account "local", container "dlx": dead letters can be written"#;
    let running = doctor_of(&server, "json");
    assert_eq!(
        (running.code, running.level("storage", well)),
        (0, "ok".into()),
        "{}",
        running.out
    );
    server.stop();
    let stopped = doctor_of(&server, "json");
    assert_eq!(
        (stopped.code, stopped.level("storage", well)),
        (0, "ok".into()),
        "{}",
        stopped.out
    );

    server.start();
    server.subscribe(
        "orders",
        "lost",
        &url,
        dead_letter_to("shelf", "dlx", json!(null)),
    );
    let missing = r#"account "shelf", container "dlx""#;
    let running = doctor_of(&server, "json");
    assert_eq!(
        (running.code, running.level("storage", missing)),
        (1, "problem".into())
    );
    server.publish("orders", &[event("a")]);
    server.logged(&["WARN", "dead letters cannot be written"]);
    server.stop();
    let stopped = doctor_of(&server, "json");
    assert_eq!(stopped.level("storage", missing), "problem");
    let trouble = r#"dead letters of subscription "lost" could not be written since"#;
    assert_eq!(stopped.level("storage", trouble), "warning", "{}", stopped.out);
    assert!(!stopped.out.contains("is not a URL"), "{}", stopped.out);
}

#[test]
fn failures_before_a_restart_are_told_beside_the_endpoint() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(400));
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    for id in ["a", "b", "c"] {
        server.publish("orders", &[event(id)]);
    }
    server.logged(&["dropped"]);
    server.stop();
    server.start();
    let told = doctor_of(&server, "json");
    let before = format!(
        "{} can be connected to; nothing was sent to it since",
        receiver.url("/")
    );
    assert_eq!(told.level("endpoints", &before), "warning", "{}", told.out);
    assert!(
        told.out.contains("but before that: HTTP 400 Bad Request"),
        "{}",
        told.out
    );
}
