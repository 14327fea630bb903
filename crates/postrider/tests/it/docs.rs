//! The OpenAPI description of our own API, checked against the real program: every answer matches
//! it.

use crate::azure_clients::{installed, scripts};
use crate::client::HttpTestAnswer;
use crate::receiver::{ReceivedDelivery, ScriptedReply, TestReceiver};
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Command;

pub const SECRET: (&str, &str) = ("authorization", "Bearer hush");
pub const CONFIG: &str = "client = [{ id = \"me\", secret = \"hush\" }, { id = \"eye\", secret = \"glance\", role = \"reader\" }]\n\
                      dead_letter = { delay = \"0s\", default = \"local\" }\n";
/// Base URL of references; never fetched.
const PLACE: &str = "http://postrider.invalid/openapi.json";

/// Forbids undescribed members in all schemas. Clients must tolerate such members; this test does
/// not.
fn closed(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if members.contains_key("properties") && members.get("type") == Some(&json!("object")) {
                members.entry("additionalProperties").or_insert(json!(false));
            }
            members
                .iter_mut()
                .filter(|(name, _)| {
                    !["example", "examples", "default", "enum", "const"].contains(&name.as_str())
                })
                .for_each(|(_, one)| closed(one));
        }
        Value::Array(list) => list.iter_mut().for_each(closed),
        _ => {}
    }
}

/// The server's OpenAPI document, and the answers checked against it.
pub struct ApiDescription {
    document: Value,
    compiled: Schemas,
    compiler: Compiler,
    /// Operations and statuses that were answered.
    seen: BTreeSet<(String, u16)>,
}

impl ApiDescription {
    pub fn of(server: &TestServer) -> ApiDescription {
        // The document needs no credentials.
        let document = server
            .send("GET", "/postrider/v1/openapi.json", &[], "")
            .expect(200)
            .json();
        let mut closed_document = document.clone();
        closed(&mut closed_document);
        let mut compiler = Compiler::new();
        compiler.enable_format_assertions();
        compiler
            .add_resource(PLACE, closed_document)
            .expect("it is a document");
        ApiDescription {
            document,
            compiled: Schemas::new(),
            compiler,
            seen: BTreeSet::new(),
        }
    }

    /// Path, method and description of an operation by its id.
    #[track_caller]
    fn operation(&self, id: &str) -> (String, String, Value) {
        let paths = self.document["paths"].as_object().expect("there are paths");
        for (path, item) in paths {
            for (method, told) in item.as_object().expect("there are methods") {
                if told["operationId"] == id {
                    return (path.clone(), method.clone(), told.clone());
                }
            }
        }
        panic!("{id} is not described");
    }

    fn schema(&mut self, pointer: &[&str]) -> SchemaIndex {
        let pointer: String = pointer
            .iter()
            .map(|part| format!("/{}", part.replace('~', "~0").replace('/', "~1")))
            .collect();
        // The pointer is a fragment of a URL.
        let fragment = pointer.replace('{', "%7B").replace('}', "%7D");
        let place = format!("{PLACE}#{fragment}");
        let compiled = self.compiler.compile(&place, &mut self.compiled);
        compiled.unwrap_or_else(|e| panic!("{pointer}: {e:#}"))
    }

    #[track_caller]
    fn check(&mut self, pointer: &[&str], value: &Value) {
        let schema = self.schema(pointer);
        if let Err(e) = self.compiled.validate(value, schema) {
            panic!("{pointer:?}: {e:#}\n{value:#}");
        }
    }

    #[track_caller]
    fn refuses(&mut self, pointer: &[&str], value: &Value) {
        let schema = self.schema(pointer);
        assert!(
            self.compiled.validate(value, schema).is_err(),
            "{pointer:?}: {value}"
        );
    }

    /// Checks an answer against the description of its status.
    #[track_caller]
    pub fn answered(&mut self, id: &str, answer: &HttpTestAnswer) {
        let (path, method, told) = self.operation(id);
        let status = answer.status.to_string();
        let described = &told["responses"][&status];
        assert!(
            !described.is_null(),
            "{id}: {status} is not described: {}",
            answer.text()
        );
        self.seen.insert((id.to_owned(), answer.status));
        let mut place = vec!["paths", &path, &method, "responses", &status];
        let name = described["$ref"].as_str().and_then(|to| to.rsplit('/').next());
        if let Some(name) = name {
            place = vec!["components", "responses", name];
        }
        let pointer: String = place
            .iter()
            .map(|part| format!("/{}", part.replace('/', "~1")))
            .collect();
        let described = self
            .document
            .pointer(&pointer)
            .expect("references lead somewhere");
        let Some(content) = described["content"].as_object() else {
            assert!(answer.body.is_empty(), "{id}: {}", answer.text());
            return;
        };
        let content_type = answer.header("content-type").expect("it says what it is");
        let media = content_type.split(';').next().unwrap_or_default().to_owned();
        assert!(content.contains_key(&media), "{id}: {media} is not described");
        if media.ends_with("json") {
            place.extend(["content", &media, "schema"]);
            self.check(&place, &answer.json());
        }
    }

    /// Calls an operation with the owner's secret and checks the answer.
    #[track_caller]
    pub fn ask(
        &mut self,
        server: &TestServer,
        id: &str,
        values: &[(&str, &str)],
        body: Option<Value>,
    ) -> HttpTestAnswer {
        let (path, method, told) = self.operation(id);
        let value = |name: &str| {
            values
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| encoded(value))
        };
        let parts = path.split('/').map(|part| {
            let name = part.strip_prefix('{').and_then(|part| part.strip_suffix('}'));
            name.map_or(part.to_owned(), |name| {
                value(name).expect("each part of the path is given")
            })
        });
        let mut target = parts.collect::<Vec<_>>().join("/");
        let parameters = told["parameters"].as_array().cloned().unwrap_or_default();
        let query = parameters
            .iter()
            .filter(|one| one["in"] == "query")
            .filter_map(|one| {
                let name = one["name"].as_str().expect("parameters have names");
                Some(format!("{name}={}", value(name)?))
            });
        let query: Vec<_> = query.collect();
        if !query.is_empty() {
            target += &format!("?{}", query.join("&"));
        }
        let body = body.map_or(String::new(), |body| body.to_string());
        let answer = server.send(&method.to_uppercase(), &target, &[SECRET, JSON], body);
        self.answered(id, &answer);
        answer
    }

    /// Asserts that every described success was seen.
    fn assert_all_seen(&self) {
        let mut missing = Vec::new();
        for (path, item) in self.document["paths"].as_object().expect("there are paths") {
            for (method, told) in item.as_object().expect("there are methods") {
                let id = told["operationId"].as_str().expect("it has an id");
                for status in told["responses"].as_object().expect("it is answered").keys() {
                    let number: u16 = status.parse().expect("a status");
                    if number < 300 && !self.seen.contains(&(id.to_owned(), number)) {
                        missing.push(format!("{method} {path} ({id}): {status}"));
                    }
                }
            }
        }
        assert!(missing.is_empty(), "never answered so: {missing:#?}");
    }
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let part = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(part).collect()
}

/// A stream of server-sent events.
struct DocsEventStream(BufReader<TcpStream>);

impl DocsEventStream {
    #[track_caller]
    fn begin(server: &TestServer, method: &str, target: &str, body: &str) -> DocsEventStream {
        let stream = TcpStream::connect(server.http).expect("the server listens");
        stream
            .set_read_timeout(Some(wait::PATIENCE))
            .expect("it can have one");
        let mut reader = BufReader::new(stream);
        let head = format!(
            "{method} {target} HTTP/1.1\r\nhost: {}\r\n{}: {}\r\ncontent-length: {}\r\n\r\n{body}",
            server.http,
            SECRET.0,
            SECRET.1,
            body.len()
        );
        reader
            .get_mut()
            .write_all(head.as_bytes())
            .expect("it can be written");
        let first = line(&mut reader);
        assert!(first.starts_with("HTTP/1.1 200"), "{first}");
        let mut media = String::new();
        loop {
            let header = line(&mut reader);
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.to_lowercase().strip_prefix("content-type: ") {
                media = value.to_owned();
            }
        }
        assert_eq!(media, "text/event-stream");
        DocsEventStream(reader)
    }

    /// Name and data of the next event. Chunk sizes and comments are skipped.
    #[track_caller]
    fn next(&mut self) -> (String, Value) {
        let mut name = String::new();
        loop {
            let line = line(&mut self.0);
            if let Some(event) = line.strip_prefix("event: ") {
                name = event.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                return (name, serde_json::from_str(data).expect("data is JSON"));
            }
        }
    }
}

#[track_caller]
fn line(reader: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    let read = reader.read_line(&mut line).expect("a line comes");
    assert!(read > 0, "the stream ended");
    line.trim_end_matches(['\r', '\n']).to_owned()
}

/// Answers with the status in the path, and never completes a handshake.
fn hook(delivery: &ReceivedDelivery) -> ScriptedReply {
    let status = delivery.path[1..]
        .split('/')
        .next()
        .and_then(|status| status.parse().ok());
    ScriptedReply::Status(status.unwrap_or(200))
}

const GROUP: &str = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg1";

fn id_of(topic: &str, name: &str) -> String {
    let provider = "providers/Microsoft.EventGrid";
    format!("{GROUP}/{provider}/topics/{topic}/{provider}/eventSubscriptions/{name}")
}

/// A server with events that were delivered, retried, dead-lettered, and not matched.
fn with_traffic(receiver: &TestReceiver) -> TestServer {
    let server = ServerSetup::config(CONFIG).start();
    server.put_topic("orders");
    server.put_topic("quiet");
    server.subscribe("orders", "fine", &receiver.url("/200?code=secret"), json!(null));
    server.subscribe(
        "orders",
        "busy",
        &receiver.url("/503"),
        json!({"filter": {"subjectBeginsWith": "/orders"}}),
    );
    server.subscribe("orders", "wrong", &receiver.url("/400"), json!(null));
    let advanced = json!({"filter": {"advancedFilters": [{"operatorType": "StringIn", "key": "data.color", "values": ["red"]}]}});
    server.subscribe("orders", "picky", &receiver.url("/200"), advanced);
    let events: Vec<Value> = (0..12).map(|n| event(format!("e{n}"))).collect();
    server.publish("orders", &events);
    server.publish("quiet", &[event("alone")]);
    server.counted("/deliveries/delivered", 12);
    server.counted("/deadLetters/written", 12);
    server
}

#[test]
fn answers_are_as_described() {
    let receiver = TestReceiver::answering(hook);
    let server = with_traffic(&receiver);
    let mut api = ApiDescription::of(&server);
    api.ask(&server, "getDescription", &[], None);
    for id in [
        "getServer",
        "getHealth",
        "getLiveness",
        "getReadiness",
        "getMetrics",
        "getStats",
        "getSeries",
        "getCluster",
    ] {
        api.ask(&server, id, &[], None);
    }
    // A single server cannot be drained; `cluster_page` has the successful calls.
    for id in ["drainNode", "undrainNode"] {
        api.ask(&server, id, &[], Some(json!({})));
        api.seen.insert((id.to_owned(), 202));
    }
    api.ask(
        &server,
        "getSeries",
        &[("subscription", "orders/fine"), ("minutes", "5")],
        None,
    );
    api.ask(&server, "getSeries", &[("topic", "orders")], None);

    events(&mut api, &server);
    subscriptions(&mut api, &server);
    handshakes(&mut api, &server, &receiver);
    dead_letters(&mut api, &server);
    listening(&mut api, &server);
    sessions(&mut api, &server);
    api.ask(&server, "listAudit", &[], None).expect(200);
    api.ask(&server, "verifyAudit", &[], None).expect(200);
    refusals(&mut api, &server);

    let timed = ServerSetup::test_clock(CONFIG).start();
    api.ask(&timed, "getClock", &[], None);
    api.ask(&timed, "advanceClock", &[], Some(json!({"by": "1m"})));
    api.ask(&timed, "getHealth", &[], None);
    api.assert_all_seen();
}

fn events(api: &mut ApiDescription, server: &TestServer) {
    let traced = api.ask(server, "traceEvent", &[("id", "e1")], None).json();
    let subscriptions = traced["stories"][0]["subscriptions"]
        .as_array()
        .expect("there are some")
        .len();
    assert_eq!(subscriptions, 4);
    api.ask(server, "traceEvent", &[("id", "alone")], None);
    let found = api
        .ask(
            server,
            "searchEvents",
            &[("topic", "orders"), ("limit", "1"), ("since", "1h")],
            None,
        )
        .json();
    let cursor = found["cursor"].as_str().expect("there are more").to_owned();
    api.ask(
        server,
        "searchEvents",
        &[
            ("topic", "orders"),
            ("cursor", &cursor),
            ("outcome", "BadRequest"),
        ],
        None,
    );
    let id = id_of("orders", "busy");
    let attempts = [("id", id.as_str()), ("outcome", "failed"), ("limit", "2")];
    let found = api.ask(server, "listAttempts", &attempts, None).json();
    assert_eq!(found["value"].as_array().map(Vec::len), Some(2));
    let mut stream = DocsEventStream::begin(server, "GET", "/postrider/v1/events/stream?topic=orders", "");
    api.seen.insert(("streamEvents".to_owned(), 200));
    server.publish("orders", &[event("live")]);
    let mut names = BTreeSet::new();
    while names.len() < 2 {
        let (name, data) = stream.next();
        api.check(&["components", "schemas", "StreamLine"], &data);
        names.insert(name);
    }
    let filter =
        json!({"advancedFilters": [{"operatorType": "StringIn", "key": "data.color", "values": ["red"]}]});
    let tested = api
        .ask(
            server,
            "testFilter",
            &[],
            Some(json!({"topic": "orders", "filter": filter})),
        )
        .json();
    assert!(!tested["value"].as_array().expect("a list").is_empty());
}

fn subscriptions(api: &mut ApiDescription, server: &TestServer) {
    let listed = api
        .ask(
            server,
            "listSubscriptions",
            &[("topic", "orders"), ("top", "3")],
            None,
        )
        .json();
    assert_eq!(listed["value"].as_array().map(Vec::len), Some(3));
    let id = id_of("orders", "busy");
    api.ask(server, "getSubscription", &[("id", &id)], None);
    // Events held for a paused subscription are shown, too.
    let paused = json!({"id": id_of("orders", "fine")});
    api.ask(server, "pauseSubscription", &[], Some(paused.clone()));
    server.publish("orders", &[event("held")]);
    let held = server
        .send("GET", "/postrider/v1/events/held", &[SECRET], "")
        .expect(200);
    api.answered("traceEvent", &held);
    assert!(held.text().contains("\"paused\""), "{}", held.text());
    api.ask(server, "listSubscriptions", &[("state", "paused")], None);
    api.ask(server, "resumeSubscription", &[], Some(paused));
    for verb in ["pauseSubscription", "resumeSubscription", "probeSubscription"] {
        let answer = api.ask(server, verb, &[], Some(json!({"id": id}))).json();
        assert_eq!(
            answer["state"] == "paused",
            verb == "pauseSubscription",
            "{answer}"
        );
    }
    let endpoints = api.ask(server, "listEndpoints", &[], None).json();
    let name = endpoints["value"][0]["endpoint"].clone();
    api.ask(server, "admitEndpoint", &[], Some(json!({"endpoint": name})));
}

fn handshakes(api: &mut ApiDescription, server: &TestServer, receiver: &TestReceiver) {
    let body = json!({"properties": {"destination": {"endpointType": "WebHook", "properties": {"endpointUrl": receiver.url("/403/new")}}}});
    let path = format!("{}?api-version=2022-06-15", id_of("orders", "asked"));
    server
        .send("PUT", &path, &[SECRET, JSON], body.to_string())
        .expect(201);
    let failed = wait::until("the handshake fails", || {
        let listed = api
            .ask(server, "listHandshakes", &[("state", "failed")], None)
            .json();
        listed["value"][0]["operation"].as_str().map(str::to_owned)
    });
    api.ask(server, "getHandshake", &[("operation", &failed)], None);
    api.ask(server, "repeatHandshake", &[("operation", &failed)], None)
        .expect(202);
    let again = json!({"subscription": id_of("orders", "fine")});
    api.ask(server, "askWebhook", &[], Some(again)).expect(202);
    api.ask(server, "listHandshakes", &[], None);
}

fn dead_letters(api: &mut ApiDescription, server: &TestServer) {
    api.ask(server, "countDeadLetters", &[], None);
    let listed = api
        .ask(
            server,
            "listDeadLetters",
            &[("limit", "2"), ("subscription", "wrong")],
            None,
        )
        .json();
    let (id, next) = (&listed["value"][0]["id"], &listed["continuation"]);
    let next = next.as_str().expect("there are more");
    api.ask(server, "listDeadLetters", &[("continuation", next)], None);
    let shown = api
        .ask(
            server,
            "getDeadLetter",
            &[("id", id.as_str().expect("it has an id"))],
            None,
        )
        .json();
    assert!(shown["event"].is_object());
    let counted = json!({"subscription": "wrong", "dryRun": true});
    api.ask(server, "replayDeadLetters", &[], Some(counted.clone()))
        .expect(200);
    let slowly = json!({"subscription": "orders/wrong", "to": "fine", "rate": 1, "since": "1h"});
    let begun = api
        .ask(server, "replayDeadLetters", &[], Some(slowly))
        .expect(202)
        .json();
    let job = begun["id"].to_string();
    let job = [("id", &*job)];
    let cancelled = api.ask(server, "cancelReplay", &job, None).json();
    assert_eq!(cancelled["state"], "cancelled");
    api.ask(server, "resumeReplay", &job, None).expect(202);
    api.ask(server, "cancelReplay", &job, None);
    api.ask(server, "getReplay", &job, None);
    api.ask(server, "listReplays", &[], None);
    api.ask(server, "writeDeadLetters", &[], Some(json!({"all": true})));
    api.ask(server, "purgeDeadLetters", &[], Some(counted));
    api.ask(server, "purgeDeadLetters", &[], Some(json!({"all": true})));
}

fn listening(api: &mut ApiDescription, server: &TestServer) {
    let mut stream = DocsEventStream::begin(server, "POST", "/postrider/v1/listen", r#"{"topic":"quiet"}"#);
    api.seen.insert(("listen".to_owned(), 200));
    let (name, made) = stream.next();
    assert_eq!(name, "subscription");
    api.check(&["components", "schemas", "ListenSubscription"], &made);
    server.publish("quiet", &[event("heard")]);
    let (name, delivery) = stream.next();
    assert_eq!(name, "delivery");
    api.check(&["components", "schemas", "ListenDelivery"], &delivery);
    let token = made["token"].as_str().expect("it has one").to_owned();
    let number = delivery["delivery"].to_string();
    let values = [("token", &*token), ("delivery", &*number)];
    api.ask(server, "answerDelivery", &values, Some(json!({"status": 200})))
        .expect(204);
    api.ask(server, "answerDelivery", &values, Some(json!({"status": 200})))
        .expect(404);
}

fn sessions(api: &mut ApiDescription, server: &TestServer) {
    let body = json!({"secret": "hush"}).to_string();
    let answer = server.send("POST", "/portal/session", &[JSON], body);
    api.answered("signIn", &answer);
    let cookie = answer
        .header("set-cookie")
        .and_then(|cookie| cookie.split(';').next());
    let cookie = ("cookie", cookie.expect("a session has a cookie"));
    let session = answer.json();
    let token = (
        "x-csrf-token",
        session["csrf"].as_str().expect("a session has a token"),
    );
    api.answered(
        "getSession",
        &server
            .send("GET", "/portal/session", &[cookie, token], "")
            .expect(200),
    );
    api.answered(
        "getSession",
        &server.send("GET", "/portal/session", &[cookie], "").expect(403),
    );
    api.answered(
        "signOut",
        &server
            .send("DELETE", "/portal/session", &[cookie], "")
            .expect(403),
    );
    api.answered(
        "signOut",
        &server.send("DELETE", "/portal/session", &[cookie, token], ""),
    );
    api.answered(
        "getSession",
        &server.send("GET", "/portal/session", &[cookie], "").expect(401),
    );
    api.ask(server, "listSessions", &[], None);
    api.ask(server, "revokeSessions", &[], Some(json!({"all": true})));
    api.ask(server, "rotateKey", &[], Some(json!({"now": true})));
}

/// Refusals match the description, too.
fn refusals(api: &mut ApiDescription, server: &TestServer) {
    let operations: Vec<(String, String, Value)> = {
        let paths = api.document["paths"].as_object().expect("there are paths");
        let all = paths.iter().flat_map(|(path, item)| {
            let methods = item.as_object().expect("there are methods");
            methods
                .iter()
                .map(move |(method, told)| (path.clone(), method.to_uppercase(), told.clone()))
        });
        all.collect()
    };
    for (path, method, told) in operations {
        let id = told["operationId"].as_str().expect("it has an id");
        let needs = told["x-needs"].as_str().expect("it needs something");
        let target = path.replace('{', "no-").replace('}', "");
        if ["read", "write"].contains(&needs) {
            api.answered(id, &server.send(&method, &target, &[], "").expect(401));
        }
        if needs == "write" {
            let reader = ("authorization", "Bearer glance");
            api.answered(id, &server.send(&method, &target, &[reader], "").expect(403));
        }
        if told["requestBody"].is_object() {
            api.answered(id, &server.send(&method, &target, &[SECRET, JSON], "[1]"));
            let long = format!("{{\"x\":\"{}\"}}", "y".repeat(70_000));
            api.answered(id, &server.send(&method, &target, &[SECRET, JSON], long));
        }
        if told["parameters"].is_array() && needs != "nothing" {
            let answer = server.send(&method, &format!("{target}?nonsense=1"), &[SECRET], "");
            api.answered(id, &answer);
            assert!(answer.status >= 400, "{method} {path}: {}", answer.text());
        }
    }
    for (id, values) in [
        ("traceEvent", [("id", "never")]),
        ("getReplay", [("id", "99")]),
        ("getDeadLetter", [("id", "99-0")]),
    ] {
        api.ask(server, id, &values, None).expect(404);
    }
    api.ask(server, "listSubscriptions", &[("topic", "nowhere")], None)
        .expect(404);
}

/// Examples in the description are valid.
#[test]
fn examples_are_as_described() {
    let server = TestServer::start_plain();
    let mut api = ApiDescription::of(&server);
    let mut found: Vec<(Vec<String>, Value)> = Vec::new();
    fn look(at: &mut Vec<String>, value: &Value, found: &mut Vec<(Vec<String>, Value)>) {
        let Some(members) = value.as_object() else {
            return;
        };
        if let (Some(_), Some(example)) = (members.get("schema"), members.get("example")) {
            found.push((at.clone(), example.clone()));
        }
        for (name, one) in members
            .iter()
            .filter(|(name, _)| !["example", "schema", "schemas"].contains(&name.as_str()))
        {
            at.push(name.clone());
            look(at, one, found);
            at.pop();
        }
    }
    look(&mut Vec::new(), &api.document.clone(), &mut found);
    assert!(found.len() > 25, "{}", found.len());
    for (place, example) in found {
        let mut place: Vec<&str> = place.iter().map(String::as_str).collect();
        place.push("schema");
        api.check(&place, &example);
    }
    // The schemas must reject something, or the checks above would pass for any answer.
    api.refuses(&["components", "schemas", "Clock"], &json!({"now": "today"}));
    let more = json!({"now": "2026-11-15T12:00:00.0000000Z", "attempts": 1, "more": 2});
    api.refuses(&["components", "schemas", "Advanced"], &more);
    let place = [
        "paths",
        "/postrider/v1/endpoints/admit",
        "post",
        "responses",
        "200",
        "content",
    ];
    let place = [&place[..], &["application/json", "schema"]].concat();
    api.refuses(&place, &json!({"endpoint": "x"}));
    let place: Vec<_> = place
        .into_iter()
        .map(|part| match part {
            "/postrider/v1/endpoints/admit" => "/postrider/v1/deadletters/replays/{id}/cancel",
            other => other,
        })
        .collect();
    let mut replay = json!({"id": 1, "state": "done", "created": "2026-11-15T12:00:00Z", "replayed": 0, "failed": 0, "total": 0, "request": {}});
    api.check(&place, &replay);
    replay["request"]["reason"] = json!("none");
    api.refuses(&place, &replay);
}

/// Every key of the default configuration is on the page about it.
#[test]
fn the_configuration_is_explained() {
    let server = TestServer::start_plain();
    let page = server.send("GET", "/docs/configuration", &[], "").expect(200);
    let page = page.text();
    let mut keys = 0;
    for line in include_str!("../../src/config/default.toml").lines() {
        let bare = line.trim_start_matches(['#', ' ']);
        let Some((name, _)) = bare.split_once(" = ") else {
            continue;
        };
        if name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_') {
            assert!(page.contains(&format!("<code>{name}</code>")), "{name}");
            keys += 1;
        }
    }
    assert!(keys > 50, "{keys}");
    for path in ["/docs", "/docs/api", "/docs/profiles", "/docs/metrics"] {
        server.send("GET", path, &[], "").expect(200);
    }
}

/// Common tools can read the description, and find no differences to the server.
#[test]
fn others_can_read_the_description() {
    let Some(directory) = installed() else { return };
    let receiver = TestReceiver::answering(hook);
    let server = with_traffic(&receiver);
    let output = Command::new(directory.join("openapi/bin/python"))
        .arg(scripts().join("python/openapi.py"))
        .args([&format!("http://{}", server.http), "hush"])
        .output()
        .expect("the client can be run");
    let told = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{told}");
}

// docs/configuration.md ends with the default file; edit that file, then copy it into the page.
#[test]
fn the_configuration_page_has_the_default_file() {
    const PAGE: &str = include_str!("../../../../docs/configuration.md");
    const DEFAULTS: &str = include_str!("../../src/config/default.toml");
    let (_, generated) = PAGE
        .split_once("<!-- generated: crates/postrider/src/config/default.toml -->")
        .expect("the page has the mark");
    let block = generated
        .trim_start()
        .strip_prefix("```toml\n")
        .expect("a block of TOML");
    let (block, _) = block.split_once("\n```").expect("the block ends");
    assert_eq!(block.trim_end(), DEFAULTS.trim_end());
}
