//! Secrets in the data directory are sealed: its files are useless without the key.

use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use std::fs;
use std::path::Path;
use std::process::Command;

const KEY_A: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
const KEY_B: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
/// A topic's key in base64, and decoded.
const TOPIC_KEY: &str = "aHVudGVyMi1ob21lLW9mLXRoZS1zZWNyZXQta2V5ISE=";
const TOPIC_KEY_BYTES: &str = "hunter2-home-of-the-secret-key!!";

/// Texts that must not be in any file.
const SECRETS: [&str; 5] = [
    TOPIC_KEY,
    TOPIC_KEY_BYTES,
    "query-of-the-webhook",
    "value-of-the-header",
    "BEGIN PRIVATE KEY",
];

fn config(receiver: &TestReceiver) -> String {
    format!(
        "[[topic]]\nname = \"t\"\nkey1 = \"{TOPIC_KEY}\"\n[[topic.subscription]]\nname = \"s\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ \
         endpoint_url = \"{}?code=query-of-the-webhook\", delivery_attribute_mappings = [ {{ name = \"X-Secret\", \
         type = \"Static\", properties = {{ value = \"value-of-the-header\", isSecret = true }} }} ] }} }}\n",
        receiver.url("/in")
    )
}

/// Files that contain a secret. The local CA's keys are excluded: they are protected by file modes,
/// by design.
fn leaks(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory can be read") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "tls") {
                found.extend(leaks(&path));
            }
            continue;
        }
        let content = match fs::read(&path) {
            Ok(content) => content,
            // The server replaces files while it runs: a listed file may be gone.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => panic!("reading {}: {e}", path.display()),
        };
        let text = String::from_utf8_lossy(&content).into_owned();
        let here = SECRETS.iter().filter(|secret| text.contains(**secret));
        found.extend(here.map(|secret| format!("{secret} in {}", path.display())));
    }
    found
}

fn run(server: &TestServer, command: &[&str], key: Option<&str>) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
        .env_clear()
        .envs(key.map(|key| ("POSTRIDER_SECRETS__KEY", key)))
        .args(command)
        .arg("--data-dir")
        .arg(server.data_dir())
        .output()
        .expect("the program can be started");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    String::from_utf8(output.stdout).expect("text")
}

/// Asserts that an event is delivered with the header that the catalog keeps.
fn delivers(server: &TestServer, receiver: &TestReceiver, id: &str) {
    server.publish("t", &[event(id)]);
    let delivery = receiver.next();
    assert_eq!(delivery.header("X-Secret"), Some("value-of-the-header"));
    assert_eq!(delivery.ids(), [id]);
}

#[test]
fn no_secret_is_in_any_file_and_the_key_is_changed_by_a_command() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(200));
    let mut server = ServerSetup::config(config(&receiver)).start();
    delivers(&server, &receiver, "1");
    assert_eq!(leaks(&server.data_dir()), [""; 0]);
    server.kill();
    assert_eq!(leaks(&server.data_dir()), [""; 0]);

    let key_file = server.data_dir().join("secret-key");
    let before = fs::read_to_string(&key_file).expect("a key");
    run(&server, &["secrets", "rotate"], None);
    let after = fs::read_to_string(&key_file).expect("a key");
    assert_ne!(before, after);
    run(&server, &["compact"], None);
    assert_eq!(leaks(&server.data_dir()), [""; 0]);
    server.start();
    delivers(&server, &receiver, "2");
    server.stop();

    // The key from before the rotation opens nothing.
    fs::write(&key_file, &before).expect("the key can be replaced");
    let output = server.start_second("127.0.0.1:0", "127.0.0.1:0");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    for words in ["sealed under key", "secret-key", "put the key back"] {
        assert!(told.contains(words), "{told}");
    }
    fs::remove_file(&key_file).expect("the key can be removed");
    let output = server.start_second("127.0.0.1:0", "127.0.0.1:0");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("is missing") && !key_file.exists(), "{told}");
    fs::write(&key_file, &after).expect("the key can be put back");
    server.start();
    delivers(&server, &receiver, "3");
}

#[test]
fn a_key_of_the_environment_is_used_refused_and_replaced() {
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(200));
    let mut server = ServerSetup::config(config(&receiver))
        .with("POSTRIDER_SECRETS__KEY", KEY_A)
        .start();
    delivers(&server, &receiver, "1");
    server.stop();
    assert!(!server.data_dir().join("secret-key").exists());
    assert_eq!(leaks(&server.data_dir()), [""; 0]);

    let refusal = ServerSetup {
        data_dir: Some(server.data_dir()),
        ..ServerSetup::config(config(&receiver)).with("POSTRIDER_SECRETS__KEY", KEY_B)
    }
    .refusal();
    assert!(
        refusal.contains("secrets.key") && refusal.contains("sealed under key"),
        "{refusal}"
    );
    assert!(!refusal.contains(KEY_A) && !refusal.contains(KEY_B), "{refusal}");
    let told = run(&server, &["secrets", "rotate"], Some(&format!("{KEY_B},{KEY_A}")));
    assert!(told.contains("no longer needed"), "{told}");

    let second = ServerSetup {
        data_dir: Some(server.data_dir()),
        ..ServerSetup::config(config(&receiver)).with("POSTRIDER_SECRETS__KEY", KEY_B)
    }
    .start();
    delivers(&second, &receiver, "2");
    assert_eq!(leaks(&server.data_dir()), [""; 0]);
}

#[test]
fn what_is_no_key_is_refused_without_being_shown() {
    let refusal = ServerSetup::default()
        .with("POSTRIDER_SECRETS__KEY", "hunter2")
        .refusal();
    assert!(
        refusal.contains("secrets.key") && refusal.contains("base64 of 32 bytes"),
        "{refusal}"
    );
    assert!(!refusal.contains("hunter2"), "{refusal}");
    let refusal = ServerSetup::config("[secrets]\nkey_file = \"/nowhere/key\"\n").refusal();
    assert!(
        refusal.contains("/nowhere/key") && refusal.contains("openssl rand"),
        "{refusal}"
    );
}
