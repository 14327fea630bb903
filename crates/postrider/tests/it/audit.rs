//! Changes are recorded before they are answered, without secrets, and tampering with the record is
//! noticed.

use crate::cli::CliShell;
use crate::receiver::TestReceiver;
use crate::server::{JSON, ServerSetup, TestServer};
use serde_json::{Value, json};

const CONFIG: &str = r#"
[validation]
enabled = false
[[client]]
id = "ci"
secret = "owner-secret"
[[client]]
id = "eye"
secret = "reader-secret"
role = "reader"
[[topic]]
name = "declared"
"#;
const OWNER: (&str, &str) = ("authorization", "Bearer owner-secret");
const READER: (&str, &str) = ("authorization", "Bearer reader-secret");
const VERSION: &str = "api-version=2022-06-15";

fn lines(server: &TestServer, query: &str) -> Vec<Value> {
    let target = format!("/postrider/v1/audit?{query}");
    let page = server.send("GET", &target, &[OWNER], "").expect(200).json();
    page["value"].as_array().expect("a list").clone()
}

/// The server's resource group.
fn group(server: &TestServer) -> String {
    let topics = format!("/subscriptions?{VERSION}");
    let all = server.send("GET", &topics, &[OWNER], "").expect(200).json();
    let account = all["value"][0]["id"].as_str().expect("an id").to_owned();
    let groups = format!("{account}/resourceGroups?{VERSION}");
    let all = server.send("GET", &groups, &[OWNER], "").expect(200).json();
    all["value"][0]["id"].as_str().expect("an id").to_owned()
}

#[test]
fn what_was_answered_is_recorded_after_a_kill_and_tampering_is_named() {
    let receiver = TestReceiver::start();
    let mut server = ServerSetup::config(CONFIG).start();
    let topic = format!("{}/providers/Microsoft.EventGrid/topics/orders", group(&server));
    let arm = |server: &TestServer, method: &str, path: &str, who: (&str, &str), body: &Value| {
        let target = format!("{path}?{VERSION}");
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        server.send(method, &target, &[who, JSON], body)
    };
    let body = json!({"location": "local", "tags": {"team": "a"}});
    assert!(arm(&server, "PUT", &topic, OWNER, &body).status < 300);
    let body = json!({"location": "local", "tags": {"team": "b"}});
    assert!(arm(&server, "PUT", &topic, OWNER, &body).status < 300);
    arm(&server, "POST", &format!("{topic}/listKeys"), OWNER, &Value::Null).expect(200);
    arm(
        &server,
        "POST",
        &format!("{topic}/listKeys"),
        READER,
        &Value::Null,
    )
    .expect(403);
    let hook = format!("{topic}/providers/Microsoft.EventGrid/eventSubscriptions/shop");
    let url = receiver.url("/hook?code=wh-query-secret");
    let mapping = json!([{"name": "x-auth", "type": "Static",
        "properties": {"value": "header-secret-1", "isSecret": true}}]);
    let body = json!({"properties": {"destination": {"endpointType": "WebHook",
        "properties": {"endpointUrl": url, "deliveryAttributeMappings": mapping}}}});
    let made = arm(&server, "PUT", &hook, OWNER, &body);
    assert!(made.status < 300, "{}", made.text());
    let pause = json!({"id": hook}).to_string();
    server
        .send(
            "POST",
            "/postrider/v1/subscriptions/pause",
            &[OWNER, JSON],
            &pause,
        )
        .expect(200);
    let wrong = "grant_type=client_credentials&client_id=ci&client_secret=guessed-wrongly";
    let form = ("content-type", "application/x-www-form-urlencoded");
    server
        .send("POST", "/common/oauth2/v2.0/token", &[form], wrong)
        .expect(401);
    server.kill();
    server.start();

    let check = |query: &str, expected: usize| {
        let found = lines(&server, query);
        assert_eq!(found.len(), expected, "{query}: {found:#?}");
        found.first().cloned().unwrap_or_default()
    };
    let written = check("action=topic.write&actor=ci", 2);
    assert_eq!(
        written["actor"],
        json!({"id": "ci", "roles": ["owner"], "via": "secret"})
    );
    assert_eq!(written["address"], "127.0.0.1");
    let change = &written["changes"][0];
    assert_eq!(
        (
            &change["operation"],
            &change["before"]["tags"],
            &change["after"]["tags"]
        ),
        (&json!("update"), &json!({"team": "a"}), &json!({"team": "b"}))
    );
    check("action=topic.write&actor=configuration", 1);
    check("action=topic.listKeys&actor=ci", 1);
    let refused = check("action=topic.listKeys&actor=eye", 1);
    assert_eq!(refused["outcome"]["result"], "refused");
    assert_eq!(refused["outcome"]["status"], 403);
    check("action=subscription.write", 1);
    let paused = check("action=subscription.pause", 1);
    assert_eq!(
        paused["changes"][0]["after"]["properties"]["paused"], true,
        "{paused}"
    );
    let login = check("action=login", 1);
    assert_eq!(
        (&login["actor"]["id"], &login["outcome"]["status"]),
        (&json!("ci"), &json!(401))
    );
    // Readers may not read the audit log.
    server
        .send("GET", "/postrider/v1/audit", &[READER], "")
        .expect(403);

    let shell = CliShell::of(&server);
    let context = ["--secret", "owner-secret"];
    let ask = |arguments: &[&str]| shell.ok(&[arguments, &context].concat());
    let export = ask(&["audit", "list", "--output", "jsonl"]);
    for secret in [
        "wh-query-secret",
        "header-secret-1",
        "guessed-wrongly",
        "owner-secret",
    ] {
        assert!(!export.contains(secret), "{secret} is shown in {export}");
    }
    assert!(ask(&["audit", "verify"]).contains("intact"));
    server.stop();

    let directory = server.data_dir();
    let place = directory.join("audit");
    let segment = std::fs::read_dir(&place).unwrap().next().unwrap().unwrap().path();
    let stored = std::fs::read_to_string(&segment).unwrap();
    assert!(
        stored.starts_with(export.lines().next().unwrap()),
        "an export is what is on disk"
    );
    let program = env!("CARGO_BIN_EXE_postrider");
    let verify = || {
        let mut command = std::process::Command::new(program);
        command
            .env_clear()
            .args(["audit", "verify", "--data-dir"])
            .arg(&directory);
        let output = command.output().unwrap();
        let told = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&told).into_owned(),
        )
    };
    let (intact, told) = verify();
    assert!(intact, "{told}");
    std::fs::write(&segment, stored.replacen("\"eye\"", "\"you\"", 1)).unwrap();
    let (intact, told) = verify();
    assert!(!intact && told.contains("was edited"), "{told}");
}
