//! `postrider listen`: a subscription that exists while the command runs.

use crate::clock_lab::UNANSWERED;
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{ServerSetup, TestServer, event};
use crate::{signals, wait};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

fn command(server: &TestServer, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    command
        .env_clear()
        .env("HOME", server.data_dir())
        .env("POSTRIDER_SERVER", format!("http://{}", server.http))
        .env("POSTRIDER_DATA_DIR", server.data_dir())
        .args(arguments)
        .stdin(Stdio::null());
    command
}

/// Standard output of a command that must succeed.
#[track_caller]
fn ok(server: &TestServer, arguments: &[&str]) -> String {
    let output = command(server, arguments).output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {told}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Names of all subscriptions.
#[track_caller]
fn subscriptions(server: &TestServer) -> Vec<String> {
    let list = ok(server, &["subscription", "list", "--output", "json"]);
    let list: Value = serde_json::from_str(&list).expect("JSON");
    let names = list.as_array().expect("a list").iter();
    names
        .map(|one| one["name"].as_str().expect("a name").to_owned())
        .collect()
}

type OutputLines = Arc<Mutex<Vec<String>>>;

/// A running `postrider listen`, killed on drop.
pub struct ListenProcess {
    child: Child,
    out: OutputLines,
    err: OutputLines,
    reading: Vec<JoinHandle<()>>,
}

impl ListenProcess {
    /// Starts the command and waits until it listens.
    #[track_caller]
    pub fn start(server: &TestServer, arguments: &[&str]) -> ListenProcess {
        let listener = ListenProcess::begin(server, arguments);
        listener.says("listening to");
        listener
    }

    fn begin(server: &TestServer, arguments: &[&str]) -> ListenProcess {
        ListenProcess::of(command(server, &["listen"]).args(arguments))
    }

    fn of(command: &mut Command) -> ListenProcess {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program can be started");
        let read = |from: Box<dyn Read + Send>| {
            let lines = OutputLines::default();
            let into = lines.clone();
            let reading = std::thread::spawn(move || {
                for line in BufReader::new(from).lines().map_while(Result::ok) {
                    into.lock().expect("no panic holds it").push(line);
                }
            });
            (lines, reading)
        };
        let (out, reading_out) = read(Box::new(child.stdout.take().expect("it is piped")));
        let (err, reading_err) = read(Box::new(child.stderr.take().expect("it is piped")));
        ListenProcess {
            child,
            out,
            err,
            reading: vec![reading_out, reading_err],
        }
    }

    fn out(&self) -> Vec<String> {
        self.out.lock().expect("no panic holds it").clone()
    }

    fn err(&self) -> String {
        self.err.lock().expect("no panic holds it").join("\n")
    }

    /// Waits for these words on the standard error.
    #[track_caller]
    fn says(&self, words: &str) {
        let said = wait::is_true_in_time(|| self.err().contains(words));
        assert!(said, "never said {words:?}: {}", self.err());
    }

    /// Waits for this many lines of output.
    #[track_caller]
    pub fn prints(&self, count: usize) -> Vec<String> {
        let printed = wait::is_true_in_time(|| self.out().len() >= count);
        assert!(printed, "not {count} lines: {:?} {}", self.out(), self.err());
        self.out()
    }

    /// Waits until the command has ended and its whole output was read.
    #[track_caller]
    fn ended(&mut self) -> ExitStatus {
        let status = wait::until("the listener ends", || {
            self.child.try_wait().expect("a child can be waited for")
        });
        for reading in self.reading.drain(..) {
            reading.join().expect("reading does not panic");
        }
        status
    }
}

impl Drop for ListenProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn events_are_printed_while_somebody_listens() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let mut listener = ListenProcess::start(&server, &["--topic", "orders"]);
    let [name] = subscriptions(&server).try_into().expect("the listener's");
    assert!(name.starts_with("listen-"), "{name}");
    listener.says(&name);
    let shown = ok(
        &server,
        &[
            "subscription",
            "show",
            &name,
            "--topic",
            "orders",
            "--output",
            "json",
        ],
    );
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let properties = &shown["properties"];
    let url = properties["destination"]["properties"]["endpointBaseUrl"].as_str();
    assert!(
        url.expect("a URL")
            .starts_with("https://listen.postrider.invalid/"),
        "{shown}"
    );
    assert_eq!(properties["labels"][0], "postrider-listen");
    assert!(properties["expirationTimeUtc"].is_string());

    server.publish("orders", &[event("e1")]);
    let line = listener.prints(1).remove(0);
    let expected = "  Orders.Created  /orders/1  e1  {\"color\":\"blue\"}";
    assert!(line.ends_with(expected) && !line.contains('\u{1b}'), "{line}");
    server.counted("/deliveries/delivered", 1);

    signals::send(&listener.child, Signal::INT);
    assert_eq!(listener.ended().code(), Some(0));
    assert!(listener.err().ends_with("1 event came"), "{}", listener.err());
    wait::until("the subscription has gone", || {
        subscriptions(&server).is_empty().then_some(())
    });
    // No events are lost with the session, and none are kept for it.
    let health = server.health();
    assert_eq!(health["deliveries"]["dropped"], json!({}), "{health}");
}

#[test]
fn only_what_is_wanted_comes_and_as_json_if_wanted() {
    let server = TestServer::start_plain();
    ok(&server, &["domain", "create", "shop"]);
    ok(&server, &["domain", "topic", "create", "eu", "--domain", "shop"]);
    let arguments = [
        "--domain",
        "shop",
        "--domain-topic",
        "eu",
        "--type",
        "Wanted",
        "--subject-begins-with",
        "/a",
        "--advanced-filter",
        "data.n",
        "NumberGreaterThan",
        "1",
        "--schema",
        "cloudevents",
        "--name",
        "mine",
        "--count",
        "2",
        "--output",
        "json",
    ];
    let mut listener = ListenProcess::start(&server, &arguments);
    listener.says("shop/eu as subscription mine");
    let send = |id: &str, topic: &str, kind: &str, subject: &str, n: u32| {
        let data = json!({ "n": n }).to_string();
        ok(
            &server,
            &[
                "event",
                "send",
                "--domain",
                "shop",
                "--domain-topic",
                topic,
                "--type",
                kind,
                "--subject",
                subject,
                "--data",
                &data,
                "--id",
                id,
            ],
        );
    };
    send("other-topic", "us", "Wanted", "/a", 2);
    send("other-type", "eu", "Other", "/a", 2);
    send("other-subject", "eu", "Wanted", "/b", 2);
    send("other-data", "eu", "Wanted", "/a", 1);
    send("one", "eu", "Wanted", "/a", 2);
    send("two", "eu", "Wanted", "/a/b", 3);
    // The command ends by itself.
    assert_eq!(listener.ended().code(), Some(0), "{}", listener.err());
    let lines: Vec<Value> = listener
        .out()
        .iter()
        .map(|line| serde_json::from_str(line).expect("JSON on each line"))
        .collect();
    let ids: BTreeSet<&str> = lines
        .iter()
        .filter_map(|line| line["event"]["id"].as_str())
        .collect();
    assert_eq!(ids, BTreeSet::from(["one", "two"]));
    assert_eq!(lines[0]["event"]["specversion"], "1.0");
    assert_eq!(lines[0]["attempt"], 1);
    let headers = &lines[0]["headers"];
    assert!(
        headers["content-type"]
            .as_str()
            .expect("text")
            .contains("cloudevents"),
        "{headers}"
    );
    server.counted("/deliveries/delivered", 2);
}

#[test]
fn a_local_port_answers_for_the_webhook() {
    let server = ServerSetup::test_clock("").start();
    server.put_topic("orders");
    // The receiver is busy at first, then accepts the event.
    let receiver = TestReceiver::answering(|delivery| match delivery.header("aeg-delivery-count") {
        Some("0") => ScriptedReply::Status(503),
        _ => ScriptedReply::Status(200),
    });
    let url = receiver.url("/hook?code=secret");
    let listener = ListenProcess::start(&server, &["--topic", "orders", "--forward", &url]);
    listener.says("/hook; Ctrl-C");
    assert!(!listener.err().contains("secret"), "{}", listener.err());
    server.publish("orders", &[event("e1")]);
    let first = receiver.next();
    assert_eq!(first.path, "/hook?code=secret");
    assert_eq!(first.header("aeg-event-type"), Some("Notification"));
    assert_eq!(first.header("host"), Some(url.split('/').nth(2).expect("a host")));
    assert_eq!(first.ids(), ["e1"]);
    let line = listener.prints(1).remove(0);
    assert!(
        line.contains("  503 in ") && line.ends_with("Orders.Created  /orders/1  e1"),
        "{line}"
    );
    let trace = || ok(&server, &["event", "trace", "e1"]);
    wait::until("the attempt is recorded", || {
        trace()
            .contains("attempt 1: HTTP 503 Service Unavailable")
            .then_some(())
    });
    // A webhook's retry schedule applies.
    let (_, attempts) = server.advance(&json!({"toNextAttempt": true}));
    assert_eq!(attempts, 1);
    assert_eq!(receiver.next().header("aeg-delivery-count"), Some("1"));
    let line = listener.prints(2).remove(1);
    assert!(
        line.contains("  200 in ") && line.ends_with("e1  (attempt 2)"),
        "{line}"
    );
    server.counted("/deliveries/delivered", 1);
    wait::until("the end is recorded", || {
        trace().contains("attempt 2: HTTP 200 OK").then_some(())
    });
}

#[test]
fn a_port_that_nobody_is_at_is_a_webhook_that_nobody_is_at() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/", closed.local_addr().expect("an address"));
    drop(closed);
    let listener = ListenProcess::start(
        &server,
        &["--topic", "orders", "--forward", &url, "--output", "json"],
    );
    server.publish("orders", &[event("e1")]);
    let line: Value = serde_json::from_str(&listener.prints(1)[0]).expect("JSON");
    let failure = line["forwarded"]["failure"].as_str().expect("a failure");
    assert!(failure.contains("refused"), "{failure}");
    let trace = wait::until("the attempt is recorded", || {
        let trace = ok(&server, &["event", "trace", "e1"]);
        trace.contains("attempt 1: no connection").then_some(trace)
    });
    assert!(trace.contains("failed: the listener says: "), "{trace}");
    assert!(trace.contains("next attempt: "), "{trace}");
}

/// Publishes that many events at once, without and with batches; no more than requested may be
/// printed.
#[test]
fn no_more_events_come_than_were_asked_for() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let all: Vec<Value> = (0..40).map(|n| event(format!("e{n}"))).collect();
    let receiver = TestReceiver::start();
    let url = receiver.url("/");
    for (count, more) in [
        ("3", &[][..]),
        ("3", &["--forward", &url]),
        ("3", &["--max-events-per-batch", "10"]),
        // Batches of four do not divide the count: the last is cut.
        ("5", &["--max-events-per-batch", "4"]),
        ("5", &["--max-events-per-batch", "4", "--forward", &url]),
    ] {
        let arguments = [&["--topic", "orders", "--output", "json", "--count", count], more].concat();
        let mut listener = ListenProcess::start(&server, &arguments);
        server.publish("orders", &all);
        assert_eq!(
            listener.ended().code(),
            Some(0),
            "{arguments:?}: {}",
            listener.err()
        );
        assert_eq!(listener.out().len().to_string(), count, "{arguments:?}");
        assert!(
            listener.err().ends_with(&format!("{count} events came")),
            "{}",
            listener.err()
        );
    }
    let forwarded: usize = receiver
        .take_received()
        .iter()
        .map(|delivery| delivery.ids().len())
        .sum();
    assert_eq!(forwarded, 8);
}

#[test]
fn a_failed_forward_is_a_failure() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let receiver = TestReceiver::answering(|delivery| match delivery.ids()[0].as_str() {
        "bad" => ScriptedReply::Status(400),
        _ => ScriptedReply::Status(200),
    });
    let url = receiver.url("/");
    let arguments = ["--topic", "orders", "--forward", &url, "--count", "2"];
    let mut listener = ListenProcess::start(&server, &arguments);
    server.publish("orders", &[event("good"), event("bad")]);
    assert_eq!(listener.ended().code(), Some(1), "{}", listener.err());
    let told = "error: 1 of 2 deliveries could not be forwarded";
    assert!(listener.err().contains(told), "{}", listener.err());
}

#[test]
fn a_listener_that_is_killed_leaves_nothing_behind() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let listener = ListenProcess::start(&server, &["--topic", "orders"]);
    assert_eq!(subscriptions(&server).len(), 1);
    signals::send(&listener.child, Signal::KILL);
    wait::until("the subscription has gone", || {
        subscriptions(&server).is_empty().then_some(())
    });
}

#[test]
fn a_lost_server_is_found_again() {
    let mut server = TestServer::start_plain();
    server.put_topic("orders");
    let listener = ListenProcess::start(&server, &["--topic", "orders"]);
    let [first] = subscriptions(&server).try_into().expect("the listener's");
    server.kill();
    listener.says("the connection was lost");
    server.start();
    server.logged(&["its listener has gone", &first]);
    listener.says("what was published meanwhile is not shown; listening again to orders");
    let [second] = subscriptions(&server).try_into().expect("the listener's");
    assert_ne!(first, second);
    server.publish("orders", &[event("e1")]);
    assert!(listener.prints(1)[0].contains("e1"));
    // A server that stops gracefully deletes the subscription first.
    server.stop();
    listener.says("the connection was lost (stopping)");
    server.logged(&["nobody listens any more", &second]);
}

#[test]
fn a_subscription_that_somebody_deletes_is_not_made_again() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let mut listener = ListenProcess::start(&server, &["--topic", "orders", "--name", "mine"]);
    // A second session cannot take the name.
    let second = command(&server, &["listen", "--topic", "orders", "--name", "MINE"])
        .output()
        .expect("it runs");
    assert_eq!(second.status.code(), Some(1));
    let told = String::from_utf8_lossy(&second.stderr);
    assert!(
        told.contains("name: a subscription \"MINE\" is there already"),
        "{told}"
    );
    ok(
        &server,
        &["subscription", "delete", "mine", "--topic", "orders", "--yes"],
    );
    assert_eq!(listener.ended().code(), Some(1));
    assert!(
        listener.err().contains("was deleted while it was listened to"),
        "{}",
        listener.err()
    );
    assert!(subscriptions(&server).is_empty());
}

#[test]
fn a_slow_reader_slows_only_itself() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let receiver = TestReceiver::start();
    server.subscribe("orders", "quick", &receiver.url("/"), Value::Null);
    let listener = ListenProcess::start(&server, &["--topic", "orders", "--output", "json"]);
    signals::hold(&listener.child);
    // More events than sockets and queues can buffer.
    let ids: BTreeSet<String> = (0..200).map(|n| format!("e{n}")).collect();
    for id in &ids {
        let mut large = event(id.clone());
        large["data"] = json!("x".repeat(60_000));
        server.publish("orders", &[large]);
    }
    assert_eq!(receiver.all_of(&ids), ids);
    assert!(listener.out().len() < ids.len());
    signals::go_on(&listener.child);
    let lines = listener.prints(ids.len());
    let came: BTreeSet<String> = lines
        .iter()
        .map(|line| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            line["event"]["id"].as_str().expect("an id").to_owned()
        })
        .collect();
    assert_eq!(came, ids);
}

#[test]
fn an_answer_that_does_not_come_in_time_is_that_of_a_slow_webhook() {
    let server = ServerSetup::test_clock("").profile("cloud-2021").start();
    server.put_topic("orders");
    let listener = ListenProcess::start(&server, &["--topic", "orders"]);
    signals::hold(&listener.child);
    server.publish("orders", &[event("e1")]);
    wait::until("the attempt is under way", || {
        let health = server.health();
        (health["deliveries"]["matched"] == json!(1)).then_some(())
    });
    // The response timeout is 30 s, and the first retry comes ten seconds later.
    server.advance(&json!({"by": "31s", "settle": UNANSWERED}));
    wait::until("the attempt is recorded", || {
        let trace = ok(&server, &["event", "trace", "e1"]);
        trace.contains("attempt 1: no answer in time").then_some(())
    });
    // Late, but within the late window.
    signals::go_on(&listener.child);
    assert!(listener.prints(1)[0].contains("e1"));
    server.counted("/deliveries/deliveredLate", 1);
    let (_, attempts) = server.advance(&json!({"by": "1h"}));
    assert_eq!(attempts, 0);
}

#[test]
fn events_are_listened_to_over_tls_from_elsewhere() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let url = format!("https://localhost:{}", server.https.port());
    // A client elsewhere that has only the server's certificate and a secret.
    let credentials =
        std::fs::read_to_string(server.data_dir().join("credentials.toml")).expect("it is there");
    let secret = credentials
        .lines()
        .find_map(|line| line.strip_prefix("client_secret = "));
    let secret = secret.expect("a secret").trim_matches('"');
    let home = tempfile::tempdir().expect("a temporary directory");
    let contexts = home.path().join("contexts.toml");
    let context = format!(
        "[context.far]\nurl = '{url}'\nsecret = '{secret}'\nca = '{}'\n",
        server.ca().display()
    );
    std::fs::write(&contexts, context).expect("a temporary directory can be written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    command
        .env_clear()
        .env("HOME", home.path())
        .env("POSTRIDER_CONTEXTS", &contexts);
    let arguments = ["listen", "--context", "far", "--topic", "orders", "--count", "50"];
    let mut listener = ListenProcess::of(command.args(arguments));
    listener.says("listening to orders");
    for n in 0..50 {
        server.publish("orders", &[event(format!("e{n}"))]);
    }
    assert_eq!(listener.ended().code(), Some(0), "{}", listener.err());
    assert_eq!(listener.out().len(), 50);
    server.counted("/deliveries/delivered", 50);
}

#[test]
fn a_grid_file_does_not_prune_who_listens() {
    let server = TestServer::start_plain();
    let file = server.data_dir().join("grid.toml");
    std::fs::write(&file, "[[topic]]\nname = \"orders\"\n").expect("it can be written");
    let file = file.to_str().expect("text");
    ok(&server, &["apply", "-f", file, "--yes"]);
    let _listener = ListenProcess::start(&server, &["--topic", "orders", "--name", "mine"]);
    let plan = ok(&server, &["apply", "-f", file, "--yes", "--prune"]);
    assert!(plan.contains("nothing to do"), "{plan}");
    assert_eq!(subscriptions(&server), ["mine"]);
}

#[track_caller]
fn refused(server: &TestServer, arguments: &[&str], code: i32, expected: &str) {
    let output = command(server, &[&["listen"], arguments].concat())
        .output()
        .expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {told}");
    assert!(told.contains(expected), "{arguments:?}: {told}");
}

#[test]
fn what_cannot_be_listened_to_is_said() {
    let server = TestServer::start_plain();
    server.put_topic("orders");
    let check = |arguments: &[&str], code: i32, expected: &str| refused(&server, arguments, code, expected);
    check(&[], 2, "on what?");
    check(&["--topic", "orders", "--forward", "3000"], 2, "--forward");
    check(&["--topic", "none"], 1, "topic \"none\" does not exist");
    let batches = ["--topic", "orders", "--max-events-per-batch", "0"];
    check(&batches, 1, "maxEventsPerBatch");
    check(&["--topic", "orders", "--profile", "cloud-1999"], 1, "profile");
    assert!(subscriptions(&server).is_empty());
}

#[test]
fn who_may_only_look_does_not_listen() {
    let clients = "[[client]]\nid = \"me\"\nsecret = \"hush\"\n\
                   [[client]]\nid = \"eye\"\nsecret = \"glance\"\nrole = \"reader\"\n";
    let server = ServerSetup::config(clients).start();
    server.put_topic("orders");
    refused(&server, &["--topic", "orders", "--secret", "glance"], 1, "eye");
    let listener = ListenProcess::start(&server, &["--topic", "orders", "--secret", "hush"]);
    listener.says("listening to orders");
}
