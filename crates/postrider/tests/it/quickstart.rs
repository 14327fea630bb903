//! The README's quick start, from nothing to a delivered event.

use crate::receiver::TestReceiver;
use crate::server::{ServerSetup, TestServer, event};
use crate::{ports, wait};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

#[test]
fn an_event_published_by_the_edge_api_arrives_at_the_webhook() {
    let receiver = TestReceiver::start();
    let server = TestServer::start_plain();
    server.put_topic("orders");
    server.subscribe(
        "orders",
        "billing",
        &receiver.url("/hook?code=secret"),
        json!(null),
    );
    server.publish("orders", &[event("e1")]);

    let delivery = receiver.next();
    assert_eq!(delivery.path, "/hook?code=secret");
    let mut expected = event("e1");
    expected["topic"] = json!("orders");
    expected["metadataVersion"] = json!("1");
    assert_eq!(delivery.json(), json!([expected]));

    for (name, value) in [
        ("content-type", "application/json; charset=utf-8"),
        ("aeg-event-type", "Notification"),
        ("aeg-subscription-name", "BILLING"),
        ("aeg-delivery-count", "0"),
        ("aeg-metadata-version", "1"),
        ("aeg-data-version", "1.0"),
        ("host", &receiver.address.to_string()),
    ] {
        assert_eq!(delivery.header(name), Some(value), "{name}");
    }
    for name in [
        "accept",
        "user-agent",
        "authorization",
        "origin",
        "transfer-encoding",
    ] {
        assert_eq!(delivery.header(name), None, "{name}");
    }

    server.counted("/deliveries/delivered", 1);
    let health = server.send("GET", "/healthz", &[], "").expect(200).json();
    assert_eq!(health["status"], "ready");
    assert_eq!(health["deliveries"]["attempts"], 1);
}

/// Shell blocks of the README, in their order.
fn shell_blocks() -> Vec<&'static str> {
    const README: &str = include_str!("../../../../README.md");
    let blocks = README.split("```sh\n").skip(1);
    blocks
        .map(|block| block.split("```").next().unwrap_or_default())
        .collect()
}

/// `postrider receiver`, and the lines that it has printed.
struct ReceiverCommand {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl ReceiverCommand {
    fn start(address: SocketAddr) -> ReceiverCommand {
        let mut child = Command::new(env!("CARGO_BIN_EXE_postrider"))
            .args(["receiver", "--listen", &address.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program can be started");
        let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = lines.clone();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                kept.lock().expect("no panic holds it").push(line);
            }
        });
        let receiver = ReceiverCommand { child, lines };
        wait::until("the receiver listens", || TcpStream::connect(address).ok());
        receiver
    }

    #[track_caller]
    fn prints(&self, words: &str) {
        wait::until(words, || {
            let lines = self.lines.lock().expect("no panic holds it");
            lines.iter().any(|line| line.contains(words)).then_some(())
        });
    }
}

impl Drop for ReceiverCommand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// The README's commands, as they stand there but for ports and clock.
#[test]
fn the_readmes_commands_do_what_it_says() {
    let blocks = shell_blocks();
    let [serve, receiver, first, second, demo, test] = blocks[..] else {
        panic!("the README has other blocks: {blocks:#?}");
    };
    assert_eq!(serve, "cargo run --release -- serve\n");
    assert_eq!(receiver, "cargo run --release -- receiver\n");
    assert_eq!(demo, "cargo run --release -- demo\n");
    assert_eq!(test, "cargo xtask test\n");

    let mut server = ServerSetup::test_clock("").start();
    let hook = ports::own();
    let run = |block: &str, server: &TestServer| {
        let script = block
            .replace("127.0.0.1:5888", &server.http.to_string())
            .replace("127.0.0.1:9000", &hook.to_string())
            .replace("curl ", "curl --silent --show-error --fail-with-body ");
        let ended = Command::new("sh").args(["-e", "-c", &script]).output();
        let ended = ended.expect("sh can be started");
        assert!(ended.status.success(), "{script}: {ended:?}");
    };
    let receiver = ReceiverCommand::start(hook);
    run(first, &server);
    receiver.prints("/orders/1");

    drop(receiver);
    run(second, &server);
    server.counted("/deliveries/attempts", 2);
    server.kill();
    server.start();
    let receiver = ReceiverCommand::start(hook);
    server.advance(&json!({"by": "10s"}));
    receiver.prints("/orders/2");
}
