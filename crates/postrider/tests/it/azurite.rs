//! Dead letters in Azure Blob Storage, emulated by Azurite and read by the Azure SDK.
//!
//! `tests/clients/setup.sh DIR` installs both; `POSTRIDER_CLIENTS=DIR` makes these tests use them.

use crate::azure_clients::{installed, scripts};
use crate::clock_lab::ClockLab;
use crate::dead_letters::{assert_path, begin_at, dead_letter_to, letter_counts, trouble};
use crate::receiver::{ScriptedReply, TestReceiver};
use crate::server::{EDGE_VERSION, ServerSetup, event};
use crate::{ports, signals, wait};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Azurite's well-known account and key.
pub const ACCOUNT: &str = "devstoreaccount1";
pub const KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// A service of Azurite in a directory of its own, killed on drop.
pub struct Azurite {
    /// `blob` or `queue`.
    service: &'static str,
    clients: PathBuf,
    directory: TempDir,
    port: u16,
    running: Option<Child>,
}

impl Azurite {
    fn start() -> Option<Azurite> {
        Azurite::start_service("blob")
    }

    /// Starts the service; `None`, with a notice, if Azurite is not installed.
    pub fn start_service(service: &'static str) -> Option<Azurite> {
        let mut azurite = Azurite {
            service,
            clients: installed()?,
            directory: TempDir::new().expect("a temporary directory"),
            port: ports::own().port(),
            running: None,
        };
        azurite.start_again();
        Some(azurite)
    }

    /// Starts the service again on the same port.
    pub fn start_again(&mut self) {
        let service = self.service;
        let program = format!("js/node_modules/.bin/azurite-{service}");
        let mut child = Command::new(self.clients.join(program))
            .arg("--location")
            .arg(self.directory.path())
            .args([format!("--{service}Host"), "127.0.0.1".into()])
            .args([format!("--{service}Port"), self.port.to_string()])
            .args(["--skipApiVersionCheck", "--disableTelemetry"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("azurite can be started");
        let mut lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
        let listens = "successfully listens on http://127.0.0.1:";
        let port = lines.find_map(|line| line.ok()?.split_once(listens)?.1.trim().parse().ok());
        self.port = port.expect("azurite says where it listens");
        // The output must be drained: Azurite prints a line for every request.
        std::thread::spawn(move || lines.for_each(drop));
        self.running = Some(child);
    }

    /// Stops the service so that it saves its data.
    pub fn stop(&mut self) {
        let mut child = self.running.take().expect("it is running");
        signals::send(&child, Signal::TERM);
        wait::until("azurite ends", || {
            child.try_wait().expect("a child can be waited for")
        });
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}/{ACCOUNT}", self.port)
    }

    /// The service as a storage account in the configuration.
    pub fn configured(&self, key: &str, create_containers: bool) -> String {
        let endpoint = self.endpoint();
        format!(
            "[[storage_account]]\nname = \"{ACCOUNT}\"\nkey = \"{key}\"\n\
             {}_endpoint = \"{endpoint}\"\ncreate_containers = {create_containers}\n",
            self.service
        )
    }

    /// Runs a query through the Azure SDK.
    pub fn ask(&self, what: &str, container: &str) -> String {
        let output = Command::new(self.clients.join("venv/bin/python"))
            .arg(scripts().join(format!("python/{}s.py", self.service)))
            .args([what, &self.endpoint(), ACCOUNT, KEY, container])
            .output()
            .expect("the client can be run");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        String::from_utf8(output.stdout).expect("it prints text")
    }

    /// Blobs of a container by name; null if the container does not exist.
    fn blobs(&self, container: &str) -> Value {
        serde_json::from_str(&self.ask("read", container)).expect("it prints JSON")
    }
}

impl Drop for Azurite {
    fn drop(&mut self) {
        if let Some(mut child) = self.running.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn refusing() -> TestReceiver {
    TestReceiver::answering(|delivery| match delivery.path.as_str() {
        "/told" => ScriptedReply::Status(200),
        _ => ScriptedReply::Status(400),
    })
}

#[test]
fn the_azure_sdk_reads_dead_letters() {
    let Some(azurite) = Azurite::start() else { return };
    let receiver = refusing();
    let told = receiver.url("/told");
    let config = format!(
        "{}[[system_topic]]\nname = \"storage\"\nsource = \"{ACCOUNT}\"\n\
         [[system_topic.subscription]]\nname = \"told\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{told}\" }} }}\n",
        azurite.configured(KEY, true)
    );
    let mut lab = ClockLab::start(ServerSetup::test_clock(config), receiver);
    begin_at(&mut lab, "2030-03-04T05:06:07Z");
    lab.server.put_topic("orders");
    let id =
        format!("/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/{ACCOUNT}");
    lab.subscribe("grid", "/grid", dead_letter_to(&id, "dead-letters", json!(null)));
    let clouds = json!({"properties": {"inputSchema": "CloudEventSchemaV1_0"}});
    lab.server.edge("PUT", "/topics/clouds", &clouds).expect(200);
    let place = dead_letter_to(&id, "dead-letters", json!(null));
    lab.server
        .subscribe("clouds", "cloud", &lab.receiver.url("/cloud"), place);
    lab.server.publish("orders", &[event("a"), event("b")]);
    let cloud = |id: &str| json!({"specversion": "1.0", "id": id, "source": "/shop", "type": "T"});
    let path = format!("/topics/clouds/events?{EDGE_VERSION}");
    let headers = [("content-type", "application/cloudevents-batch+json")];
    let body = json!([cloud("a"), cloud("b")]).to_string();
    lab.server.send("POST", &path, &headers, body).expect(200);
    assert_eq!(lab.at_once().len(), 4);
    assert_eq!(azurite.blobs("dead-letters"), json!(null));
    let (_, attempts) = lab.server.advance(&json!({"by": "5m"}));
    assert_eq!(attempts, 2, "one is told of each blob");

    let blobs = azurite.blobs("dead-letters");
    let blobs = blobs.as_object().expect("an object");
    assert_eq!(blobs.len(), 2);
    for (name, blob) in blobs {
        assert_eq!(blob["type"], "BlockBlob");
        assert_eq!(blob["contentType"], "application/json");
        let letters: Value = serde_json::from_str(blob["text"].as_str().expect("text")).expect("JSON");
        let letters = letters.as_array().expect("an array");
        let mut ids: Vec<_> = letters
            .iter()
            .filter_map(|letter| letter["id"].as_str())
            .collect();
        ids.sort_unstable();
        assert_eq!(ids, ["a", "b"]);
        let grid = name.starts_with("GRID/");
        let folder = if grid {
            "GRID/2030/3/4/5"
        } else {
            "CLOUD/2030/3/4/5"
        };
        assert_path(name, folder);
        let reason = if grid {
            "deadLetterReason"
        } else {
            "deadletterreason"
        };
        for letter in letters {
            assert_eq!(letter[reason], "UndeliverableDueToHttpBadRequest", "{letter}");
            assert_eq!(letter.get("specversion").is_some(), !grid, "{letter}");
        }
    }
    for _ in 0..2 {
        let told = lab.receiver.next().json()[0].take();
        let subject = told["subject"].as_str().expect("a subject");
        let name = subject.strip_prefix("/blobServices/default/containers/dead-letters/blobs/");
        let blob = &blobs[name.expect("it is in the container")];
        let data = &told["data"];
        assert_eq!(data["url"], blob["url"]);
        assert_eq!(data["eTag"], blob["etag"]);
        let length = blob["text"].as_str().expect("text").len();
        assert_eq!(data["contentLength"], length);
    }
}

#[test]
fn a_store_that_is_away_is_waited_for() {
    let Some(mut azurite) = Azurite::start() else {
        return;
    };
    let config = azurite.configured(KEY, true);
    let place = dead_letter_to(ACCOUNT, "dead-letters", json!(null));
    let lab = ClockLab::subscribed(ServerSetup::test_clock(config), refusing(), place);
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    azurite.stop();
    lab.pass(300);
    assert_eq!(letter_counts(&lab.server), [1, 0, 0]);
    let known = trouble(&lab.server);
    assert_eq!(
        (&known[0]["topic"], &known[0]["subscription"]),
        (&json!("orders"), &json!("billing"))
    );
    let reason = known[0]["reason"].as_str().expect("a reason");
    assert!(
        reason.contains(ACCOUNT) && reason.contains("cannot be reached"),
        "{reason}"
    );
    lab.pass(3 * 3600);
    assert_eq!(
        (letter_counts(&lab.server), lab.dropped()),
        ([1, 0, 0], json!({}))
    );
    azurite.start_again();
    lab.pass(300);
    assert_eq!(
        (letter_counts(&lab.server), trouble(&lab.server)),
        ([0, 1, 1], json!([]))
    );
    assert_eq!(
        azurite.blobs("dead-letters").as_object().map(|all| all.len()),
        Some(1)
    );

    // After more than four hours without the store, waiting dead letters are dropped and later ones
    // are written.
    azurite.stop();
    lab.server.publish("orders", &[event("b")]);
    lab.at_once();
    lab.pass(300 + 4 * 3600 - 1);
    assert_eq!((letter_counts(&lab.server)[0], lab.dropped()), (1, json!({})));
    lab.pass(1);
    assert_eq!(lab.dropped(), json!({"DeadLetterDestinationUnavailable": 1}));
    let line = lab.server.logged(&["ERROR", "dead letters dropped", "ids=\"b\""]);
    assert!(line.contains("cannot be reached"), "{line}");
    azurite.start_again();
    lab.server.publish("orders", &[event("c")]);
    lab.at_once();
    lab.pass(300);
    assert_eq!(letter_counts(&lab.server), [0, 2, 2]);
    let text = azurite.ask("read", "dead-letters");
    let holds = |id: &str| text.contains(&format!("\\\"id\\\":\\\"{id}\\\""));
    assert_eq!(["a", "b", "c"].map(holds), [true, false, true], "{text}");
}

#[test]
fn a_container_is_only_made_if_that_is_said() {
    let Some(azurite) = Azurite::start() else { return };
    let config = azurite.configured(KEY, false);
    let place = dead_letter_to(ACCOUNT, "dead-letters", json!(null));
    let lab = ClockLab::subscribed(ServerSetup::test_clock(config), refusing(), place);
    let missing = format!("container \"dead-letters\" does not exist in storage account \"{ACCOUNT}\"");
    lab.server.logged(&["WARN", "billing", "does not exist"]);
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.pass(3600);
    assert_eq!(trouble(&lab.server)[0]["reason"], missing);
    assert_eq!(azurite.blobs("dead-letters"), json!(null));
    azurite.ask("make", "dead-letters");
    lab.pass(300);
    assert_eq!(letter_counts(&lab.server), [0, 1, 1]);
    assert_eq!(
        azurite.blobs("dead-letters").as_object().map(|all| all.len()),
        Some(1)
    );
}

#[test]
fn a_wrong_key_is_refused_when_the_subscription_is_made() {
    let Some(mut azurite) = Azurite::start() else {
        return;
    };
    let receiver = refusing();
    let subscription = format!(
        "[[topic]]\nname = \"orders\"\n[[topic.subscription]]\nname = \"billing\"\n\
         destination = {{ endpoint_type = \"WebHook\", properties = {{ endpoint_url = \"{}\" }} }}\n\
         dead_letter_destination = {{ endpoint_type = \"StorageBlob\", properties = {{ resource_id = \"{ACCOUNT}\", \
         blob_container_name = \"dead-letters\" }} }}\n",
        receiver.url("/")
    );
    let wrong = "d3Jvbmcga2V5";
    let config = format!("{}{subscription}", azurite.configured(wrong, true));
    let told = ServerSetup::config(config.clone()).refusal();
    for word in [
        "subscription \"billing\" of topic \"orders\"",
        "properties.deadLetterDestination.properties.resourceId",
        ACCOUNT,
        "refuses the credentials",
    ] {
        assert!(told.contains(word), "{word} in {told}");
    }
    assert!(!told.contains(wrong), "{told}");

    // The wrong key cannot be detected while the store is away; it is reported when there is
    // something to write.
    azurite.stop();
    let lab = ClockLab::start(ServerSetup::test_clock(config), receiver);
    lab.server.logged(&["WARN", "billing", "cannot be reached"]);
    azurite.start_again();
    lab.server.publish("orders", &[event("a")]);
    lab.at_once();
    lab.pass(300);
    let reason = trouble(&lab.server)[0]["reason"].take();
    let reason = reason.as_str().expect("a reason");
    assert!(
        reason.contains("refuses our credentials") && !reason.contains(wrong),
        "{reason}"
    );
}
