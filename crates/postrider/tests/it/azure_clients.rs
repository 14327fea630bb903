//! The unmodified Azure SDKs publish, and their events arrive.
//!
//! `tests/clients/setup.sh DIR` installs them; `POSTRIDER_CLIENTS=DIR` makes these tests use them.

use crate::receiver::TestReceiver;
use crate::server::{ServerSetup, TestServer};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// Directory of the installed clients; `None`, with a notice, if the variable is not set.
pub fn installed() -> Option<PathBuf> {
    let directory = std::env::var_os("POSTRIDER_CLIENTS").map(PathBuf::from);
    if directory.is_none() {
        println!(
            "skipped: run tests/clients/setup.sh DIR and set POSTRIDER_CLIENTS=DIR to test the Azure SDKs"
        );
    }
    directory
}

pub fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients")
}

/// Runs a script that publishes and prints the accepted events; all of them must arrive.
fn publishes(command: impl FnOnce(&TestServer) -> Command) {
    let receiver = TestReceiver::start();
    let mut config = String::from("client = [{ id = \"me\", secret = \"client-secret\" }]\n");
    for (topic, schema, delivery) in [
        ("orders", "EventGridSchema", "EventGridSchema"),
        ("clouds", "CloudEventSchemaV1_0", "CloudEventSchemaV1_0"),
        ("things", "CustomEventSchema", "CustomInputSchema"),
    ] {
        let url = receiver.url("/");
        config += &format!(
            "[[topic]]\nname = \"{topic}\"\nkey1 = \"{KEY}\"\ninput_schema = \"{schema}\"\n\
             [[topic.subscription]]\nname = \"all\"\nevent_delivery_schema = \"{delivery}\"\n\
             destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{url}\" }} }}\n"
        );
    }
    let server = ServerSetup::config(config).start();
    let mut command = command(&server);
    command.args([
        format!("http://{}", server.http),
        format!("https://{}", server.https),
    ]);
    let output = command
        .args([KEY, "client-secret"])
        .output()
        .expect("the client can be run");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let accepted: BTreeSet<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(str::to_owned)
        .collect();
    assert!(accepted.len() >= 10, "{accepted:?}");
    let seen = receiver.all_of(&accepted);
    assert!(!seen.contains("no"), "what was refused does not arrive");
}

#[test]
fn the_python_sdk_publishes_over_http_and_https() {
    let Some(directory) = installed() else { return };
    publishes(|server| {
        let mut command = Command::new(directory.join("venv/bin/python"));
        command.arg(scripts().join("python/publish.py"));
        command
            .env("REQUESTS_CA_BUNDLE", server.ca())
            .env_remove("CURL_CA_BUNDLE");
        command
    });
}

#[test]
fn the_javascript_sdk_publishes_over_http_and_https() {
    let Some(directory) = installed() else { return };
    publishes(|server| {
        let mut command = Command::new("node");
        command.arg(scripts().join("js/publish.cjs"));
        command
            .env("NODE_EXTRA_CA_CERTS", server.ca())
            .env("NODE_PATH", directory.join("js/node_modules"));
        command
    });
}

const TENANT: &str = "00000000-0000-0000-0000-000000000002";
const ACCOUNT: &str = "00000000-0000-0000-0000-000000000001";

/// Runs a script that manages the server and prints each check that held; it must complete.
fn manages(command: impl FnOnce(&TestServer) -> Command, least: usize) {
    let config = "client = [{ id = \"11111111-1111-1111-1111-111111111111\", secret = \"client-secret\" }]\n";
    let server = ServerSetup::config(config).start();
    let mut command = command(&server);
    command.arg(format!("https://{}", server.https));
    command.args([TENANT, "11111111-1111-1111-1111-111111111111", "client-secret"]);
    let output = command
        .args([ACCOUNT, "local"])
        .output()
        .expect("the client can be run");
    let told = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}\n{failed}\n{:#?}", server.log());
    let held = told.lines().count();
    assert!(held >= least, "only {held} things were looked at: {told}");
}

#[test]
fn the_python_sdk_manages() {
    let Some(directory) = installed() else { return };
    let script = |server: &TestServer| {
        let mut command = Command::new(directory.join("venv/bin/python"));
        command.arg(scripts().join("python/manage.py"));
        command
            .env("REQUESTS_CA_BUNDLE", server.ca())
            .env_remove("CURL_CA_BUNDLE");
        command
    };
    manages(script, 70);
}

#[test]
fn the_javascript_sdk_manages() {
    let Some(directory) = installed() else { return };
    let script = |server: &TestServer| {
        let mut command = Command::new("node");
        command.arg(scripts().join("js/manage.cjs"));
        command
            .env("NODE_EXTRA_CA_CERTS", server.ca())
            .env("NODE_PATH", directory.join("js/node_modules"));
        command
    };
    manages(script, 20);
}

/// az must log out first: it would use cached tokens of the previous server, which would be
/// refused.
#[test]
fn az_logs_in_again_after_the_data_directory_was_made_anew() {
    let Some(directory) = installed() else { return };
    let home = tempfile::tempdir().expect("a temporary directory");
    // The client is fixed: with a generated client, az would have no cached token for its new id.
    let config = "client = [{ id = \"11111111-1111-1111-1111-111111111111\", secret = \"client-secret\" }]\n";
    let mut server = ServerSetup::config(config).start();
    let run = |server: &TestServer, program: &Path, arguments: &[&str]| {
        let mut command = Command::new(program);
        let path = format!("{}:/usr/bin:/bin", directory.join("az/bin").display());
        command
            .env_clear()
            .args(arguments)
            .env("PATH", path)
            .env("HOME", home.path())
            .env("AZURE_CONFIG_DIR", home.path())
            .env("AZURE_CORE_COLLECT_TELEMETRY", "no")
            .env("REQUESTS_CA_BUNDLE", server.ca());
        let output = command.output().expect("it can be run");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {told}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let logs_in = |server: &TestServer, topic: &str| {
        server.put_topic(topic);
        let data_dir = server.data_dir();
        let config = data_dir.with_file_name("postrider.toml");
        let [data_dir, config] = [&data_dir, &config].map(|path| path.to_str().expect("text"));
        let https = server.https.to_string();
        let mut setup = vec!["az-setup", "--run", "--https", &https];
        setup.extend(["--data-dir", data_dir, "--config", config]);
        run(server, Path::new(env!("CARGO_BIN_EXE_postrider")), &setup);
        let list = [
            "eventgrid",
            "topic",
            "list",
            "--query",
            "[].name",
            "--output",
            "tsv",
        ];
        let found = run(server, &directory.join("az/bin/az"), &list);
        assert_eq!(found.trim(), topic);
    };
    logs_in(&server, "first");
    server.stop();
    std::fs::remove_dir_all(server.data_dir()).expect("it can be deleted");
    server.start();
    logs_in(&server, "second");
}

#[test]
fn az_manages() {
    let Some(directory) = installed() else { return };
    let home = tempfile::tempdir().expect("a temporary directory");
    let script = |server: &TestServer| {
        let mut command = Command::new(directory.join("az/bin/python"));
        command.arg(scripts().join("python/az.py"));
        command
            .env("REQUESTS_CA_BUNDLE", server.ca())
            .env("AZURE_CONFIG_DIR", home.path())
            .env("AZURE_CORE_COLLECT_TELEMETRY", "no")
            .env_remove("CURL_CA_BUNDLE");
        command
    };
    manages(script, 70);
}
