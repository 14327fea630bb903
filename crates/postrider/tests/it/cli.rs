//! Management commands against a running server, as a user types them.

use crate::client::TestConnection;
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer};
use crate::wait;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// Handshakes are off: these tests are about the command line.
const TRUSTING: &str = "[validation]\nenabled = false\n";

/// A user's shell for one server.
pub struct CliShell<'a> {
    server: &'a TestServer,
    home: tempfile::TempDir,
}

impl CliShell<'_> {
    pub fn of(server: &TestServer) -> CliShell<'_> {
        CliShell {
            server,
            home: tempfile::tempdir().expect("a temporary directory"),
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.file(name);
        std::fs::write(&path, text).expect("a temporary directory can be written");
        path.to_str().expect("text").to_owned()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        command
            .env_clear()
            .env("HOME", self.home.path())
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    fn run_in(&self, mut command: Command) -> CommandOutput {
        command
            .env("POSTRIDER_SERVER", format!("http://{}", self.server.http))
            .env("POSTRIDER_DATA_DIR", self.server.data_dir());
        CommandOutput::of(&command.output().expect("the program can be run"))
    }

    pub fn run(&self, arguments: &[&str]) -> CommandOutput {
        self.run_in(self.command(arguments))
    }

    #[track_caller]
    fn well(&self, arguments: &[&str]) -> CommandOutput {
        let told = self.run(arguments);
        assert_eq!(told.code, 0, "{arguments:?}: {}{}", told.out, told.err);
        told
    }

    /// Standard output of a command that must succeed.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        self.well(arguments).out
    }

    /// Standard error of a command that must succeed.
    #[track_caller]
    pub fn aside(&self, arguments: &[&str]) -> String {
        self.well(arguments).err
    }

    /// Output of a command that must succeed, as JSON.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let mut all = arguments.to_vec();
        all.extend(["--output", "json"]);
        let out = self.ok(&all);
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e} in {out}"))
    }

    /// Error message of a command that must fail with this code.
    #[track_caller]
    pub fn refused(&self, code: i32, arguments: &[&str]) -> String {
        let told = self.run(arguments);
        assert_eq!(told.code, code, "{arguments:?}: {}{}", told.out, told.err);
        assert!(told.err.contains("error: "), "{}", told.err);
        told.err
    }
}

pub struct CommandOutput {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl CommandOutput {
    fn of(output: &Output) -> CommandOutput {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        CommandOutput {
            code: output.status.code().expect("it ends by itself"),
            out: text(&output.stdout),
            err: text(&output.stderr),
        }
    }
}

fn names(list: &Value) -> Vec<&str> {
    let all = list.as_array().expect("a list");
    all.iter()
        .map(|one| one["name"].as_str().expect("a name"))
        .collect()
}

#[test]
fn a_list_says_how_subscriptions_are() {
    let server = ServerSetup::config(TRUSTING).start();
    let shell = CliShell::of(&server);
    let receiver = TestReceiver::answering(|_| ScriptedReply::Status(500));
    shell.ok(&["topic", "create", "orders"]);
    let on = |name: &'static str, verb: &'static str| ["subscription", verb, name, "--topic", "orders"];
    let create = |name: &'static str| {
        let mut words = on(name, "create").to_vec();
        let url = receiver.url("/");
        words.extend(["--endpoint", &url]);
        shell.run(&words)
    };
    assert!(!create("sick").err.contains("was there already"));
    create("held");
    // Replacing an existing resource is noted: its name may be mistyped.
    let again = create("held");
    assert!(
        again
            .err
            .contains("the subscription held was there already and was replaced"),
        "{}",
        again.err
    );
    let again = shell.aside(&["topic", "create", "orders"]);
    assert!(
        again.contains("the topic orders was there already and was replaced"),
        "{again}"
    );
    shell.ok(&on("held", "pause"));

    let sent = shell.json(&["event", "send", "--topic", "orders", "--count", "2"]);
    assert_eq!(sent["sent"], 2);
    let ids = sent["ids"].as_array().expect("a list");
    let told = shell.ok(&["event", "trace", ids[1].as_str().expect("an id")]);
    assert!(told.contains("orders"), "{told}");
    let list = wait::until("the failure is counted", || {
        let list = shell.json(&["subscription", "list", "--topic", "orders"]);
        let sick = list.as_array()?.iter().find(|one| one["name"] == "sick")?;
        (sick["status"]["recent"]["failed"].as_u64()? >= 2).then_some(list)
    });
    let held = list
        .as_array()
        .expect("a list")
        .iter()
        .find(|one| one["name"] == "held");
    let held = held.expect("it is listed");
    assert_eq!(
        (&held["status"]["state"], &held["status"]["waiting"]),
        (&json!("paused"), &json!(2))
    );
    let shown = shell.ok(&["subscription", "list"]);
    let line = |name: &str| shown.lines().find(|line| line.contains(name)).expect("a row");
    assert!(
        !line("sick").contains("healthy") && line("sick").contains("100%"),
        "{shown}"
    );
    assert!(line("held").contains("paused"), "{shown}");
    let one = shell.ok(&on("held", "show"));
    assert!(
        one.contains("status.health") && one.contains("status.waiting"),
        "{one}"
    );
}

#[test]
fn json_has_one_flag_and_lists_are_arrays() {
    let server = ServerSetup::config(TRUSTING).start();
    let shell = CliShell::of(&server);
    for list in [
        &["topic", "list"][..],
        &["subscription", "list"],
        &["event", "search"],
        &["deadletters", "list"],
        &["deadletters", "summary"],
        &["deadletters", "replays"],
        &["audit", "list"],
        &["session", "list"],
        &["context", "list"],
    ] {
        assert!(shell.json(list).is_array(), "{list:?}");
    }
    let plain = |arguments: &[&str]| {
        let output = shell.command(arguments).output().expect("it runs");
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    };
    assert!(plain(&["profiles", "--output", "json"]).is_array());
    assert!(plain(&["profiles", "show", "edge", "-o", "json"]).is_object());
    // Earlier names of flags still work, but help does not list them.
    let earlier = shell.ok(&["deadletters", "list", "--json"]);
    assert_eq!(earlier.trim(), "[]");
    let help = shell.ok(&["deadletters", "list", "--help"]);
    assert!(!help.contains("--json") && help.contains("Examples:"), "{help}");
    shell.ok(&["topic", "list", "--output", "table"]);
    // Failures are reported the same way everywhere.
    for arguments in [
        &["deadletters", "list"][..],
        &["topic", "list"],
        &["profiles", "show", "x"],
    ] {
        let told = shell.command(arguments).output().expect("it runs");
        let told = String::from_utf8_lossy(&told.stderr).into_owned();
        assert!(told.starts_with("error: "), "{arguments:?}: {told}");
    }
}

#[test]
fn the_wrong_scheme_is_named_on_both_sides() {
    let server = TestServer::start_plain();
    let shell = CliShell::of(&server);
    let ask = |url: &str| shell.refused(1, &["topic", "list", "--server", url]);
    let told = ask(&format!("https://{}", server.http));
    let advice = format!("use http://{}", server.http);
    assert!(
        told.contains("does not speak https") && told.contains(&advice),
        "{told}"
    );
    let told = ask(&format!("http://{}", server.https));
    let reason = format!("port {} speaks https", server.https.port());
    assert!(told.contains(&reason) && told.contains("use https://"), "{told}");
    server.logged(&["client speaks another scheme", "listener=\"https\"", "https://"]);

    // Other clients get the message, too; one with a large body can still read it.
    let mut plain = TestConnection::open(server.https).expect("a connection");
    let body = vec![b'x'; 1 << 20];
    let answer = plain.send("POST", "/topics/orders/api/events", &[], &body);
    let answer = answer.expect("an answer").expect(400).json();
    assert_eq!(answer["error"]["code"], "BadRequest");
    let mut handshake = TestConnection::open(server.http).expect("a connection");
    handshake.write(&[0x16, 3, 1, 0, 200]).expect("it is taken");
    let answer = handshake.answer("GET").expect("an answer").expect(400).json();
    let message = answer["error"]["message"].as_str().expect("a message");
    assert!(message.contains("use http://"), "{message}");

    // An address without a scheme means http, as the server's own address is written in most
    // places.
    let port = server.http.port().to_string();
    shell.ok(&["topic", "list", "--server", &format!("localhost:{port}")]);
    shell.ok(&["topic", "list", "--server", &port]);
}

#[test]
fn a_topic_a_subscription_an_event_and_nothing_else() {
    let server = ServerSetup::config(TRUSTING).start();
    let receiver = TestReceiver::start();
    let shell = CliShell::of(&server);

    let topic = shell.json(&["topic", "create", "orders", "--tag", "a=b"]);
    assert_eq!(topic["properties"]["provisioningState"], "Succeeded");
    assert_eq!(topic["tags"], json!({"a": "b"}));
    let shown = shell.ok(&["topic", "list"]);
    assert!(
        shown.contains("orders") && shown.contains("EventGridSchema"),
        "{shown}"
    );

    let url = receiver.url("/hook?code=hunter2");
    let made = shell.ok(&[
        "subscription",
        "create",
        "billing",
        "--topic",
        "orders",
        "--endpoint",
        &url,
        "--event-type",
        "A",
        "B",
        "--advanced-filter",
        "data.n",
        "NumberInRange",
        "1,10",
        "--max-delivery-attempts",
        "5",
        "--event-ttl",
        "2h",
        "--secret-header",
        "x-key=s3cret",
        "--header",
        "x-from=here",
        "--label",
        "l",
    ]);
    assert!(!made.contains("hunter2") && !made.contains("s3cret"), "{made}");
    let shown = shell.json(&[
        "subscription",
        "show",
        "billing",
        "--topic",
        "orders",
        "--secrets",
    ]);
    let properties = &shown["properties"];
    assert_eq!(properties["destination"]["properties"]["endpointUrl"], json!(url));
    assert_eq!(
        properties["retryPolicy"],
        json!({"maxDeliveryAttempts": 5, "eventTimeToLiveInMinutes": 120})
    );
    assert!(shown.to_string().contains("s3cret"), "{shown}");

    let sent = shell.ok(&[
        "event",
        "send",
        "--topic",
        "orders",
        "--type",
        "A",
        "--data",
        r#"{"n": 3}"#,
        "--subject",
        "s",
        "--id",
        "i1",
    ]);
    assert_eq!(sent.trim(), "sent event i1 to the topic orders");
    let delivery = receiver.next();
    assert_eq!(delivery.path, "/hook?code=hunter2");
    assert_eq!(delivery.ids(), ["i1"]);
    assert_eq!(delivery.header("x-key"), Some("s3cret"));
    // Neither the filtered event nor the numbered ones are delivered.
    shell.ok(&[
        "event",
        "send",
        "--topic",
        "orders",
        "--type",
        "C",
        "--data",
        r#"{"n": 3}"#,
    ]);
    shell.ok(&[
        "event",
        "send",
        "--topic",
        "orders",
        "--type",
        "B",
        "--data",
        r#"{"n": 11}"#,
    ]);
    shell.ok(&[
        "event",
        "send",
        "--topic",
        "orders",
        "--type",
        "B",
        "--data",
        r#"{"n": 10}"#,
        "--count",
        "3",
    ]);
    for _ in 0..3 {
        assert_eq!(receiver.next().json()[0]["eventType"], "B");
    }

    // Settings that are not given stay the same, secrets included.
    shell.ok(&[
        "subscription",
        "update",
        "billing",
        "--topic",
        "orders",
        "--max-events-per-batch",
        "7",
        "--clear",
        "advanced-filters",
        "--clear",
        "labels",
    ]);
    let shown = shell.json(&[
        "subscription",
        "show",
        "billing",
        "--topic",
        "orders",
        "--secrets",
    ]);
    let properties = &shown["properties"];
    assert_eq!(
        properties["destination"]["properties"]["maxEventsPerBatch"],
        json!(7)
    );
    assert_eq!(properties["destination"]["properties"]["endpointUrl"], json!(url));
    assert!(shown.to_string().contains("s3cret"), "{shown}");
    assert_eq!(properties["filter"]["includedEventTypes"], json!(["A", "B"]));
    assert_eq!(properties["retryPolicy"]["maxDeliveryAttempts"], json!(5));
    assert!(properties["labels"].is_null(), "{shown}");
    shell.ok(&[
        "event",
        "send",
        "--topic",
        "orders",
        "--type",
        "B",
        "--data",
        r#"{"n": 11}"#,
    ]);
    assert_eq!(receiver.next().json()[0]["data"], json!({"n": 11}));

    let all = shell.json(&["subscription", "list"]);
    assert_eq!(names(&all), ["billing"]);
    let refusal = shell.refused(2, &["topic", "delete", "orders"]);
    assert!(refusal.contains("--yes"), "{refusal}");
    shell.ok(&["subscription", "delete", "billing", "--topic", "orders", "--yes"]);
    assert_eq!(
        names(&shell.json(&["subscription", "list", "--topic", "orders"])),
        [""; 0]
    );
    shell.ok(&["topic", "delete", "orders", "--yes"]);
    let refusal = shell.refused(1, &["topic", "show", "orders"]);
    assert!(
        refusal.contains("error: (ResourceNotFound) topic \"orders\" does not exist"),
        "{refusal}"
    );
}

#[test]
fn domains_system_topics_and_scopes() {
    let server = ServerSetup::config(TRUSTING).start();
    let receiver = TestReceiver::start();
    let shell = CliShell::of(&server);
    shell.ok(&[
        "domain",
        "create",
        "tenants",
        "--auto-create-topics",
        "false",
        "--input-schema",
        "cloudevents",
    ]);
    shell.ok(&["domain", "topic", "create", "t1", "--domain", "tenants"]);
    assert_eq!(
        names(&shell.json(&["domain", "topic", "list", "--domain", "tenants"])),
        ["t1"]
    );
    let on = ["--domain", "tenants", "--domain-topic", "t1"];
    let url = receiver.url("/t1");
    let mut create = vec!["subscription", "create", "sub", "--endpoint", &url];
    create.extend(on);
    shell.ok(&create);
    shell.ok(&[
        "event",
        "send",
        "--domain",
        "tenants",
        "--domain-topic",
        "t1",
        "--id",
        "x",
        "--type",
        "T",
    ]);
    let delivery = receiver.next();
    assert_eq!(delivery.path, "/t1");
    assert!(delivery.text().contains("\"specversion\""), "{}", delivery.text());
    let mut delete = vec!["subscription", "delete", "sub", "--yes"];
    delete.extend(on);
    shell.ok(&delete);
    shell.ok(&[
        "domain",
        "update",
        "tenants",
        "--auto-create-topics",
        "--tag",
        "a=b",
    ]);
    let domain = shell.json(&["domain", "show", "tenants"]);
    assert_eq!(
        domain["properties"]["autoCreateTopicWithFirstSubscription"],
        json!(true)
    );
    assert_eq!(domain["properties"]["inputSchema"], "CloudEventSchemaV1_0");
    shell.ok(&["domain", "topic", "delete", "t1", "--domain", "tenants", "--yes"]);

    shell.ok(&["system-topic", "create", "dead", "--source", "local"]);
    let topic = shell.json(&["system-topic", "show", "dead"]);
    assert_eq!(
        topic["properties"]["topicType"]
            .as_str()
            .map(str::to_lowercase)
            .as_deref(),
        Some("microsoft.storage.storageaccounts")
    );
    shell.ok(&[
        "subscription",
        "create",
        "sub",
        "--system-topic",
        "dead",
        "--endpoint",
        &url,
    ]);
    let source = topic["properties"]["source"]
        .as_str()
        .expect("a source")
        .to_owned();
    shell.ok(&[
        "subscription",
        "create",
        "direct",
        "--scope",
        &source,
        "--endpoint",
        &url,
    ]);
    let direct = shell.json(&["subscription", "list", "--scope", &source]);
    assert!(names(&direct).contains(&"direct"), "{direct}");
    assert_eq!(names(&shell.json(&["system-topic", "list"])), ["dead"]);
    shell.ok(&["system-topic", "delete", "dead", "--yes"]);
}

#[test]
fn keys_are_listed_and_made_anew() {
    let server = TestServer::start_plain();
    let shell = CliShell::of(&server);
    shell.ok(&["topic", "create", "orders"]);
    let before = shell.json(&["key", "list", "--topic", "orders"]);
    let after = shell.json(&["key", "regenerate", "--topic", "orders", "--name", "key2"]);
    assert_eq!(before["key1"], after["key1"]);
    assert_ne!(before["key2"], after["key2"]);
    let send = |key: &Value| {
        let key = key.as_str().expect("a key");
        shell.run(&["event", "send", "--topic", "orders", "--key", key])
    };
    assert_eq!(send(&after["key2"]).code, 0);
    let refused = send(&before["key2"]);
    assert_eq!(refused.code, 1, "{}", refused.err);
    assert!(refused.err.starts_with("error: "), "{}", refused.err);
    // Events sent from a file.
    let one = json!({"id": "f", "subject": "s", "eventType": "t", "eventTime": "2030-01-01T00:00:00Z", "data": 1,
                     "dataVersion": "1"});
    let file = shell.write("events.json", &json!([one, one]).to_string());
    let sent = shell.ok(&["event", "send", "--topic", "orders", "--body", &file]);
    assert_eq!(sent.trim(), "sent 2 events to the topic orders\n  f\n  f");
}

#[test]
fn what_goes_wrong_is_told_and_has_a_code() {
    let server = TestServer::start_plain();
    let shell = CliShell::of(&server);
    let refusal = shell.refused(1, &["topic", "create", "x"]);
    assert!(
        refusal.contains("error: (") && refusal.contains("between 3 and 50"),
        "{refusal}"
    );
    let refusal = shell.refused(2, &["subscription", "create", "s", "--endpoint", "http://x"]);
    assert!(refusal.contains("--topic"), "{refusal}");
    let refusal = shell.refused(2, &["topic", "update", "x"]);
    assert!(refusal.contains("nothing is to change"), "{refusal}");
    shell.refused(2, &["topic", "crate", "x"]);
    shell.refused(2, &["event", "send", "--topic", "a", "--count", "2", "--id", "x"]);
    let refusal = shell.refused(1, &["topic", "list", "--secret", "wrong"]);
    assert!(refusal.contains("error: (AuthenticationFailed)"), "{refusal}");
    // Nothing listens on a port that was just free.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", free.local_addr().expect("it is bound"));
    drop(free);
    let refusal = shell.refused(1, &["topic", "list", "--server", &url]);
    assert!(refusal.contains("is the server running?"), "{refusal}");
}

#[test]
fn a_webhook_that_does_not_answer_is_told_of() {
    let server = TestServer::start_plain();
    let receiver = TestReceiver::answering(|_| crate::receiver::ScriptedReply::Status(404));
    let shell = CliShell::of(&server);
    shell.ok(&["topic", "create", "orders"]);
    let url = receiver.url("/");
    let create = [
        "subscription",
        "create",
        "sub",
        "--topic",
        "orders",
        "--endpoint",
        &url,
    ];
    let refusal = shell.refused(1, &create);
    assert!(refusal.contains("error: (Url validation)"), "{refusal}");
    assert_eq!(
        names(&shell.json(&["subscription", "list", "--topic", "orders"])),
        [""; 0]
    );
    let mut without = create.to_vec();
    without.push("--no-wait");
    let begun = shell.json(&without);
    assert_eq!(begun["properties"]["provisioningState"], "Creating");
}

#[test]
fn a_validation_by_hand_is_waited_for() {
    let server = TestServer::start_plain();
    let receiver = TestReceiver::start();
    let shell = CliShell::of(&server);
    shell.ok(&["topic", "create", "orders"]);
    let url = receiver.url("/");
    let arguments = [
        "subscription",
        "create",
        "sub",
        "--topic",
        "orders",
        "--endpoint",
        &url,
    ];
    let mut command = shell.command(&arguments);
    command
        .env("POSTRIDER_SERVER", format!("http://{}", server.http))
        .env("POSTRIDER_DATA_DIR", server.data_dir())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("it runs");
    // The handshake was accepted without its code, so the validation URL must be visited.
    let asked = receiver.next().json();
    let mut told = String::new();
    let mut lines = BufReader::new(child.stderr.take().expect("it is piped"));
    lines.read_line(&mut told).expect("it says something");
    assert!(
        told.contains("open the validationUrl") && told.contains(" until 2"),
        "{told}"
    );
    let visit = asked[0]["data"]["validationUrl"].as_str().expect("a URL");
    let (_, path) = visit.split_once("://").expect("a URL");
    let path = &path[path.find('/').expect("a path")..];
    server.send("GET", path, &[], "").expect(200);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("Succeeded"));
}

const GRID: &str = r#"
topics:
  - name: orders
    tags: {team: blue}
    subscriptions:
      - name: billing
        destination:
          endpointType: WebHook
          properties:
            endpointUrl: "URL/billing?code=hunter2"
            deliveryAttributeMappings:
              - {name: x-key, type: Static, properties: {value: s3cret, isSecret: true}}
        filter: {includedEventTypes: [A], advancedFilters: [{operatorType: StringIn, key: data.c, values: [blue]}]}
        retryPolicy: {maxDeliveryAttempts: 5}
        deadLetterDestination: {endpointType: StorageBlob, properties: {resourceId: local, blobContainerName: dead}}
        expirationTimeUtc: "2099-01-01T00:00:00Z"
  - {name: plain, input_schema: CloudEventSchemaV1_0}
domains:
  - name: tenants
    topics:
      - name: t1
        subscriptions:
          - {name: sub1, destination: {endpointType: webhook, properties: {endpointUrl: "URL/t1"}}}
system_topics:
  - name: dead-letters
    source: local
    subscriptions:
      - {name: told, destination: {endpointType: WebHook, properties: {endpointUrl: "URL/told"}}}
subscriptions:
  - {topic: plain, name: all, destination: {endpointType: WebHook, properties: {endpointUrl: "URL/all"}}}
  - {domain: tenants, name: every, destination: {endpointType: WebHook, properties: {endpointUrl: "URL/every"}}}
"#;

#[test]
fn a_grid_file_is_planned_applied_and_then_there_is_nothing_to_do() {
    let server = ServerSetup::config(TRUSTING).start();
    let receiver = TestReceiver::start();
    let shell = CliShell::of(&server);
    let text = GRID.replace("URL", &receiver.url(""));
    let file = shell.write("grid.yaml", &text);

    let plan = shell.ok(&["apply", "-f", &file, "--dry-run"]);
    assert!(
        plan.contains("+ topic orders") && plan.contains("10 to create"),
        "{plan}"
    );
    assert_eq!(
        names(&shell.json(&["topic", "list"])),
        [""; 0],
        "a dry run does nothing"
    );
    let refusal = shell.refused(2, &["apply", "-f", &file]);
    assert!(refusal.contains("--yes"), "{refusal}");

    shell.ok(&["apply", "-f", &file, "--yes"]);
    assert_eq!(names(&shell.json(&["topic", "list"])), ["orders", "plain"]);
    let again = shell.ok(&["apply", "-f", &file, "--yes"]);
    assert!(again.contains("nothing to do: 10 as wanted"), "{again}");
    let value: Value = serde_saphyr::from_str(&text).expect("YAML");
    let as_json = shell.write("grid.json", &value.to_string());
    let again = shell.ok(&["apply", "-f", &as_json, "--dry-run"]);
    assert!(again.contains("nothing to do"), "{again}");

    // A secret, a limit and a tag change; the plan does not show the secret.
    let changed = text
        .replace("hunter2", "hunter3")
        .replace("s3cret", "s4cret")
        .replace("maxDeliveryAttempts: 5", "maxDeliveryAttempts: 6")
        .replace("team: blue", "team: red");
    let file = shell.write("grid.yaml", &changed);
    let plan = shell.ok(&["apply", "-f", &file, "--yes"]);
    assert!(
        plan.contains("0 to create, 2 to change, 0 to delete, 8 as wanted"),
        "{plan}"
    );
    assert!(plan.contains("tags.team: \"blue\" → \"red\""), "{plan}");
    assert!(plan.contains("retryPolicy.maxDeliveryAttempts: 5 → 6"), "{plan}");
    assert!(!plan.contains("hunter") && !plan.contains("cret\""), "{plan}");
    let again = shell.ok(&["apply", "-f", &file, "--yes"]);
    assert!(again.contains("nothing to do"), "{again}");
    shell.ok(&[
        "event",
        "send",
        "--topic",
        "orders",
        "--type",
        "A",
        "--data",
        r#"{"c": "blue"}"#,
    ]);
    let delivery = receiver.next();
    assert_eq!(
        (delivery.path.as_str(), delivery.header("x-key")),
        ("/billing?code=hunter3", Some("s4cret"))
    );

    // Resources of others are deleted only with --prune.
    shell.ok(&["topic", "create", "stray"]);
    let url = receiver.url("/stray");
    shell.ok(&[
        "subscription",
        "create",
        "stray",
        "--topic",
        "plain",
        "--endpoint",
        &url,
    ]);
    let again = shell.ok(&["apply", "-f", &file, "--yes"]);
    assert!(again.contains("nothing to do"), "{again}");
    let plan = shell.ok(&["apply", "-f", &file, "--yes", "--prune"]);
    assert!(
        plan.contains("- topic stray") && plan.contains("- subscription plain/stray"),
        "{plan}"
    );
    assert!(plan.contains("2 to delete, 10 as wanted"), "{plan}");
    assert_eq!(names(&shell.json(&["topic", "list"])), ["orders", "plain"]);
    let plan = shell.json(&["apply", "-f", &file, "--yes", "--prune"]);
    assert_eq!(plan["applied"], json!(false));
}

#[test]
fn a_grid_file_stops_at_what_is_refused() {
    let server = ServerSetup::config(TRUSTING).start();
    let shell = CliShell::of(&server);
    let file = shell.write(
        "grid.yaml",
        "topics:\n  - name: first\n  - {name: second, publicNetworkAccess: Maybe}\n  - name: third\n",
    );
    let refusal = shell.refused(1, &["apply", "-f", &file, "--yes"]);
    assert!(
        refusal.contains("done: topic first\nnot done: topic second, topic third"),
        "{refusal}"
    );
    assert!(
        refusal.contains("error: topic second: (") && refusal.contains("publicNetworkAccess"),
        "{refusal}"
    );
    let file = shell.write("grid.yaml", "topics:\n  - name: first\n    inputShema: x\n");
    let refusal = shell.refused(2, &["apply", "-f", &file, "--yes"]);
    assert!(
        refusal.contains("line 2") && refusal.contains("did you mean inputSchema?"),
        "{refusal}"
    );
}

#[test]
fn contexts_name_servers() {
    let server = TestServer::start_plain();
    let shell = CliShell::of(&server);
    let run = |arguments: &[&str]| CommandOutput::of(&shell.command(arguments).output().expect("it runs"));
    let credentials = server.data_dir().join("credentials.toml");
    let (url, secret) = (
        format!("https://{}", server.https),
        credentials.to_str().expect("text"),
    );
    let ca = server.ca();
    let ca = ca.to_str().expect("text");
    // The certificate is valid for names and addresses of this machine, whatever the port.
    let added = run(&[
        "context",
        "add",
        "here",
        "--server",
        &url,
        "--ca",
        ca,
        "--secret-file",
        secret,
        "-g",
        "mine",
    ]);
    assert_eq!(added.code, 0, "{}", added.err);
    let made = run(&["topic", "create", "orders", "--output", "json"]);
    assert_eq!(made.code, 0, "{}", made.err);
    assert!(made.out.contains("/resourceGroups/mine/"), "{}", made.out);
    run(&[
        "context",
        "add",
        "gone",
        "--server",
        "http://127.0.0.1:1",
        "--secret",
        "x",
        "--use",
    ]);
    assert_eq!(run(&["topic", "list"]).code, 1);
    assert_eq!(run(&["topic", "list", "--context", "here"]).code, 0);
    assert_eq!(run(&["deadletters", "list", "--context", "here"]).code, 0);
    run(&["context", "use", "here"]);
    assert_eq!(run(&["topic", "list"]).code, 0);
    let listed = run(&["context", "list"]).out;
    assert!(listed.contains("gone") && listed.contains(&url), "{listed}");
    assert_eq!(run(&["context", "remove", "gone"]).code, 0);
    assert_eq!(run(&["context", "show", "gone"]).code, 1);
    assert!(shell.file(".config/postrider/contexts.toml").exists());
}

#[test]
fn the_configuration_of_another_emulator_is_taken_over() {
    let server = ServerSetup::config(TRUSTING).start();
    let receiver = TestReceiver::start();
    let shell = CliShell::of(&server);
    let file = shell.write(
        "appsettings.json",
        &format!(
            r#"{{"topics": [{{"name": "parcels", "port": 61001, "key": "abc=", "subscribers": [
                {{"name": "tracking", "endpoint": "{}", "disableValidation": true}}, // the only one
            ]}}]}}"#,
            receiver.url("/pm7y")
        ),
    );
    let told = shell.run(&["import", "pm7y", &file]);
    assert_eq!(told.code, 0, "{}", told.err);
    assert!(told.err.contains("[validation] enabled = false"), "{}", told.err);
    let mut apply = shell.command(&["apply", "-f", "-", "--dry-run"]);
    apply
        .env("POSTRIDER_SERVER", format!("http://{}", server.http))
        .env("POSTRIDER_DATA_DIR", server.data_dir())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = apply.spawn().expect("it runs");
    let mut stdin = child.stdin.take().expect("it is piped");
    stdin.write_all(told.out.as_bytes()).expect("it reads");
    drop(stdin);
    let planned = CommandOutput::of(&child.wait_with_output().expect("it ends"));
    assert!(
        planned.out.contains("+ subscription parcels/tracking"),
        "{}{}",
        planned.out,
        planned.err
    );

    shell.ok(&["import", "pm7y", &file, "--apply", "--yes"]);
    shell.ok(&["event", "send", "--topic", "parcels"]);
    assert_eq!(receiver.next().path, "/pm7y");

    let file = shell.write(
        "workleap.json",
        &format!(
            r#"{{"Topics": {{"letters": ["{}", "pull://x"]}}}}"#,
            receiver.url("/workleap")
        ),
    );
    let grid = shell.file("grid.toml");
    let grid = grid.to_str().expect("text");
    shell.ok(&["import", "workleap", &file, "--output", grid]);
    shell.ok(&["apply", "-f", grid, "--yes"]);
    shell.ok(&["event", "send", "--topic", "letters"]);
    assert_eq!(receiver.next().path, "/workleap");
}

#[test]
fn an_imported_file_is_a_configuration_too_and_its_keys_count() {
    let server = TestServer::start_plain();
    let shell = CliShell::of(&server);
    let file = shell.write(
        "appsettings.json",
        r#"{"topics": [{"name": "parcels", "port": 61001, "key": "TheOldKey=", "subscribers": {"http": [
            {"name": "tracking", "endpoint": "http://127.0.0.1:9/", "deadLetter": {"enabled": true}}]}}]}"#,
    );
    let grid = shell.file("grid.toml");
    let grid = grid.to_str().expect("text");
    shell.ok(&["import", "pm7y", &file, "--output", grid]);
    let config = std::fs::read_to_string(grid).expect("it was written");
    let configured = ServerSetup {
        managed_topics: true,
        ..ServerSetup::config(format!("{config}\n{TRUSTING}"))
    };
    let configured = configured.start();
    let shell = CliShell::of(&configured);
    assert_eq!(
        shell.json(&["key", "list", "--topic", "parcels"])["key1"],
        "TheOldKey="
    );
    let plan = shell.ok(&["apply", "-f", grid, "--dry-run"]);
    assert!(plan.contains("nothing to do: 2 as wanted"), "{plan}");
    // Short names in the configuration do not prevent changes by command.
    let on = ["subscription", "update", "tracking", "--topic", "parcels"];
    let updated = shell.json(&[&on[..], &["--max-events-per-batch", "3"]].concat());
    let place = &updated["properties"]["deadLetterDestination"]["properties"];
    assert_eq!(place["blobContainerName"], "deadletters");
}

#[test]
fn what_became_of_an_event_is_told() {
    let server = ServerSetup::config(TRUSTING).start();
    let receiver = TestReceiver::by_path();
    let shell = CliShell::of(&server);
    shell.ok(&["topic", "create", "orders"]);
    let subscribe = |name: &str, path: &str, more: &[&str]| {
        let url = receiver.url(path);
        let on = [
            "subscription",
            "create",
            name,
            "--topic",
            "orders",
            "--endpoint",
            &url,
        ];
        shell.ok(&[&on[..], more].concat());
    };
    subscribe("good", "/200", &[]);
    subscribe("bad", "/400", &[]);
    let filter = ["--advanced-filter", "data.n", "NumberGreaterThan", "5"];
    subscribe("picky", "/200", &filter);
    let send = |id: &str, kind: &str| {
        let event = [
            "event",
            "send",
            "--topic",
            "orders",
            "--id",
            id,
            "--type",
            kind,
            "--subject",
            "/o/1",
        ];
        shell.ok(&[&event[..], &["--data", "{\"n\": 1}"]].concat());
    };
    send("a/1 \u{fc}", "Made");
    send("b", "Sent");
    let trace = wait::until("both attempts are recorded", || {
        let trace = shell.ok(&["event", "trace", "a/1 \u{fc}"]);
        let told = ["attempt 1: HTTP 200 OK", "attempt 1: HTTP 400 Bad Request"];
        told.iter().all(|part| trace.contains(part)).then_some(trace)
    });
    assert!(trace.starts_with("event a/1 \u{fc}  Made  /o/1\n"), "{trace}");
    assert!(
        trace.contains("picky: not matched by advanced: data.n NumberGreaterThan 5"),
        "{trace}"
    );
    assert!(trace.contains("  accepted by orders, "), "{trace}");
    assert!(trace.contains("      then: "), "{trace}");
    let whole = shell.json(&["event", "trace", "a/1 \u{fc}"]);
    assert_eq!(
        whole["stories"][0]["subscriptions"]
            .as_array()
            .expect("a list")
            .len(),
        3
    );

    let refused = shell.refused(1, &["event", "trace", "unheard-of"]);
    assert!(
        refused.contains("nothing is recorded of event \"unheard-of\""),
        "{refused}"
    );

    let found = shell.json(&["event", "search", "--topic", "orders", "--type", "Sent"]);
    let ids: Vec<&str> = found
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| one["id"].as_str())
        .collect();
    assert_eq!(ids, ["b"]);
    let shown = shell.ok(&["event", "search", "--subject", "/o", "--since", "1h"]);
    assert!(shown.contains("Made") && shown.contains("Sent"), "{shown}");
    let one = shell.well(&["event", "search", "--limit", "1", "--output", "json"]);
    let cursor = one.err.trim().split(' ').next_back().expect("there is more");
    let one: Value = serde_json::from_str(&one.out).expect("JSON");
    assert_eq!(one.as_array().expect("a list").len(), 1);
    let other = shell.json(&["event", "search", "--limit", "1", "--cursor", cursor]);
    assert_ne!(other[0]["id"], one[0]["id"]);
    let none = shell.run(&["event", "search", "--type", "Lost"]);
    assert_eq!(
        (none.code, none.out.as_str(), none.err.as_str()),
        (0, "", "nothing found\n")
    );
    let refused = shell.refused(1, &["event", "search", "--state", "lost"]);
    assert!(refused.contains("state: \"lost\" is not one of"), "{refused}");
}

#[test]
fn shells_complete_the_commands() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
            .args(["completions", shell])
            .output()
            .expect("it runs");
        let script = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && script.contains("subscription"),
            "{shell}"
        );
        assert!(script.contains("deadletters"), "{shell}");
    }
}
