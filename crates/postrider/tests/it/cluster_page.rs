//! A cluster as people and programs see it: `/postrider/v1/cluster`, health, metrics, the command
//! line, the doctor.

use crate::azure_clients::{installed, scripts};
use crate::cli::CliShell;
use crate::cluster::link::LinkState;
use crate::cluster::{ClusterPlan, TestCluster};
use crate::docs::{ApiDescription, SECRET};
use crate::receiver::TestReceiver;
use crate::server::{JSON, ServerSetup, TestServer, event};
use crate::wait;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Longest time for `/healthz`, whatever JetStream does. Far more than it needs, since this machine
/// is busy with other things.
const HEALTH_PATIENCE: Duration = Duration::from_secs(3);

fn plan() -> ClusterPlan {
    let secret = SECRET.1.strip_prefix("Bearer ").expect("a bearer");
    ClusterPlan {
        config: format!("[[client]]\nid = \"me\"\nsecret = \"{secret}\"\n"),
        ..ClusterPlan::default()
    }
}

#[track_caller]
fn shown(node: &TestServer) -> Value {
    node.send("GET", "/postrider/v1/cluster", &[SECRET], "")
        .expect(200)
        .json()
}

fn named<'c>(cluster: &'c Value, name: &str) -> &'c Value {
    let nodes = cluster["nodes"].as_array().expect("a list");
    nodes
        .iter()
        .find(|node| node["name"] == name)
        .unwrap_or(&Value::Null)
}

fn codes(notices: &Value) -> Vec<&str> {
    let notices = notices.as_array().expect("a list");
    notices.iter().filter_map(|one| one["code"].as_str()).collect()
}

#[test]
fn a_cluster_is_shown_and_its_nodes_are_drained() {
    let Some(crew) = TestCluster::start(&plan()) else {
        return;
    };
    let [one, two] = &crew.nodes[..] else {
        unreachable!("there are two")
    };
    let receiver = TestReceiver::start();
    one.put_topic("orders");
    one.subscribe("orders", "billing", &receiver.url("/"), json!(null));
    let mut api = ApiDescription::of(one);
    // Nodes that have just started report no trouble: streams that have not been created yet are
    // not missing.
    for node in &crew.nodes {
        let first = api.ask(node, "getCluster", &[], None).json();
        assert_eq!(first["jetstream"]["trouble"], json!([]), "{first:#}");
        assert_eq!(first["jetstream"]["streams"].as_array().expect("a list").len(), 3);
        let health = node.send("GET", "/healthz", &[], "").json();
        assert!(!codes(&health["warnings"]).contains(&"jetstream"), "{health:#}");
    }
    let cluster = wait::until("everything is served", || {
        let cluster = api.ask(one, "getCluster", &[], None).json();
        let served = cluster["partitions"]
            .as_array()?
            .iter()
            .all(|one| one["serving"] == true);
        served.then_some(cluster)
    });
    assert_eq!(cluster["kind"], "jetstream");
    assert_eq!(cluster["node"], named(&cluster, "node-0")["id"]);
    let owned: BTreeSet<&str> = ["node-0", "node-1"]
        .iter()
        .flat_map(|name| named(&cluster, name)["partitions"].as_array().expect("a list"))
        .map(|number| &cluster["partitions"][number.as_u64().expect("a number") as usize]["owner"])
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(owned.len(), 2, "{cluster:#}");
    let guarantee = cluster["jetstream"]["guarantee"].as_str().expect("a sentence");
    assert!(guarantee.contains("survives"), "{guarantee}");
    // The guarantee is logged at the start, too.
    one.logged(&["kept in JetStream", guarantee]);
    let health = api.ask(one, "getHealth", &[], None).json();
    assert_eq!(health["store"]["kind"], "jetstream");
    assert_eq!(health["store"]["guarantee"], guarantee);
    assert_eq!(
        health["store"]["partitions"],
        json!({"owned": 2, "served": 4, "total": 4})
    );

    // The first node drains the other by its name; that one hands over all its partitions.
    let shell = CliShell::of(one);
    let status = shell.ok(&["cluster", "status", "--secret", secret()]);
    assert!(
        status.contains("node-0 *") && status.contains("node-1") && status.contains(guarantee),
        "{status}"
    );
    let refused = shell.refused(2, &["cluster", "drain", "node-1", "--secret", secret()]);
    assert!(refused.contains("--yes"), "{refused}");
    shell.refused(1, &["cluster", "drain", "nobody", "--yes", "--secret", secret()]);
    let told = shell.ok(&[
        "cluster",
        "drain",
        "node-1",
        "--yes",
        "--wait",
        "--secret",
        secret(),
    ]);
    assert!(told.contains("node-1 has given its partitions away"), "{told}");
    let cluster = shell.json(&["cluster", "status", "--secret", secret()]);
    assert_eq!(named(&cluster, "node-1")["standing"], "drained");
    let others = wait::is_true_in_time(|| named(&shown(one), "node-0")["partitions"] == json!([0, 1, 2, 3]));
    assert!(others, "{:#}", shown(one));
    assert!(
        codes(&two.health()["warnings"]).contains(&"draining"),
        "{:#}",
        two.health()
    );
    assert_eq!(two.health()["ready"], true);
    // Events published to the drained node are stored and delivered by the other.
    two.publish("orders", &[event("handed-on")]);
    assert_eq!(receiver.next().ids(), ["handed-on"]);
    // The last node cannot be drained: no other is left to take over.
    let last = json!({"node": "node-0"});
    let answer = two.send(
        "POST",
        "/postrider/v1/cluster/drain",
        &[SECRET, JSON],
        last.to_string(),
    );
    api.answered("drainNode", &answer.expect(409));
    api.ask(one, "undrainNode", &[], Some(json!({"node": "node-1"})));
    crew.shared_evenly();
    api.ask(
        one,
        "drainNode",
        &[],
        Some(json!({"node": "node-1", "force": false})),
    );
    api.ask(one, "undrainNode", &[], Some(json!({"node": "node-1"})));
    crew.shared_evenly();
    metrics(one);
}

fn secret() -> &'static str {
    SECRET.1.strip_prefix("Bearer ").expect("a bearer")
}

/// All metrics that the dashboard and the alerts use exist.
fn metrics(node: &TestServer) {
    let page = node.send("GET", "/metrics", &[SECRET], "").expect(200);
    let kinds: BTreeSet<&str> = page
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .map(|(name, _)| name)
        .collect();
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    for file in ["grafana/postrider-cluster.json", "prometheus/alerts-cluster.yml"] {
        let text = std::fs::read_to_string(contrib.join(file)).expect("it is in the repository");
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let asked: BTreeSet<&str> = words.filter(|word| word.starts_with("postrider_")).collect();
        assert!(asked.len() > 5, "{file} asks for {asked:?}");
        let missing: Vec<_> = asked.difference(&kinds).collect();
        assert!(missing.is_empty(), "{file} asks for {missing:?}");
    }
    let line = |line: &str| {
        assert!(
            page.text().lines().any(|one| one == line),
            "{line}: {}",
            page.text()
        )
    };
    line("postrider_cluster_nodes{standing=\"live\"} 2");
    line("postrider_cluster_partitions 4");
    line("postrider_cluster_partitions_owned 2");
    line("postrider_cluster_connected 1");
    line("postrider_up 1");
}

#[test]
fn a_node_that_is_cut_off_says_so_at_once_and_comes_back() {
    let Some(crew) = TestCluster::start(&plan()) else {
        return;
    };
    let [one, two] = &crew.nodes[..] else {
        unreachable!("there are two")
    };
    crew.weather(0, 0, LinkState::Lost);
    let mut slowest = Duration::ZERO;
    let mut last = Value::Null;
    let noticed = wait::is_true_in_time(|| {
        let begun = wait::now();
        last = one.health();
        slowest = slowest.max(begun.elapsed());
        ["leaseLost", "jetstreamAway"]
            .iter()
            .any(|code| codes(&last["reasons"]).contains(code))
    });
    assert!(noticed, "{last:#}");
    assert_eq!(one.send("GET", "/healthz/ready", &[], "").status, 503);
    let cluster = shown(one);
    assert!(
        !cluster["partitions"].as_array().expect("a list").is_empty(),
        "what is known is still shown"
    );
    assert!(slowest < HEALTH_PATIENCE, "an answer took {slowest:?}");
    // The other node has taken over, and reports the first as missing.
    let missed = wait::is_true_in_time(|| {
        let health = two.health();
        codes(&health["warnings"]).contains(&"nodeMissing") && health["store"]["partitions"]["owned"] == 4
    });
    assert!(missed, "{:#}", two.health());
    assert_eq!(two.health()["ready"], true);
    assert_eq!(named(&shown(two), "node-0")["standing"], "dead");
    crew.weather(0, 0, LinkState::Clear);
    crew.shared_evenly();
    assert!(
        wait::is_true_in_time(|| one.health()["ready"] == true),
        "{:#}",
        one.health()
    );
    println!("the slowest /healthz while NATS was away took {slowest:?}");
}

/// Runs the doctor with the configuration of a node.
fn doctor(config: &str) -> (i32, Value) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("postrider.toml");
    std::fs::write(&file, config).expect("a temporary directory can be written");
    let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
        .env_clear()
        .current_dir(directory.path())
        .args(["doctor", "--config"])
        .arg(&file)
        .args([
            "--data-dir",
            "data",
            "--http",
            "127.0.0.1:0",
            "--https",
            "127.0.0.1:0",
            "--output",
            "json",
        ])
        .output()
        .expect("the program can be run");
    let out = String::from_utf8_lossy(&output.stdout);
    let told = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e} in {out}"));
    (output.status.code().expect("it ends by itself"), told)
}

#[track_caller]
fn level(told: &Value, words: &str) -> String {
    let checks = told["checks"].as_array().expect("a list");
    let found = checks.iter().find(|one| {
        one["about"] == "jetstream" && one["what"].as_str().is_some_and(|what| what.contains(words))
    });
    let found = found.unwrap_or_else(|| panic!("no {words:?} in {told:#}"));
    found["level"].as_str().expect("a word").to_owned()
}

#[test]
fn the_doctor_looks_at_jetstream_and_changes_nothing() {
    let Some(mut crew) = TestCluster::start(&ClusterPlan { nodes: 1, ..plan() }) else {
        return;
    };
    let config = crew.nodes[0].config().to_owned();
    let before = shown(&crew.nodes[0]);
    let (code, told) = doctor(&config);
    assert_eq!(code, 0, "{told:#}");
    assert_eq!(level(&told, "connected to"), "ok");
    assert_eq!(level(&told, "7 streams"), "ok");
    // The default sync interval of NATS servers.
    assert_eq!(level(&told, "sync interval 2m"), "warning");
    let (code, told) = doctor(&config.replace("replicas = 1", "replicas = 3"));
    assert_eq!(
        (code, level(&told, "replicas is 3, but 1 servers").as_str()),
        (1, "problem")
    );
    let (_, told) = doctor(&config.replace("node_name", "prefix = \"another\"\nnode_name"));
    assert_eq!(level(&told, "no streams of \"another\" yet"), "ok");
    let after = shown(&crew.nodes[0]);
    assert_eq!(
        after["nodes"].as_array().map(Vec::len),
        before["nodes"].as_array().map(Vec::len)
    );
    let (code, told) = doctor(&config.replace("password = \"app\"", "password = \"wrong\""));
    assert_eq!(
        (code, level(&told, "refuses these credentials").as_str()),
        (1, "problem")
    );
    assert!(
        !told.to_string().contains("wrong"),
        "a password is shown: {told:#}"
    );
    crew.nodes[0].kill();
    crew.nats.servers[0].kill();
    let (code, told) = doctor(&config);
    assert_eq!((code, level(&told, "cannot connect").as_str()), (1, "problem"));
}

/// Number of checks in the page's walk-through.
const HELD: usize = 4;

#[test]
fn the_portal_shows_a_cluster_in_a_real_browser() {
    let Some(directory) = installed() else { return };
    let Some(crew) = TestCluster::start(&plan()) else {
        return;
    };
    let output = Command::new("node")
        .arg(scripts().join("js/portal-cluster.mjs"))
        .args([&format!("http://{}", crew.nodes[0].http), secret()])
        .env("NODE_PATH", directory.join("js/node_modules"))
        .output()
        .expect("node can be run");
    let told = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}\n{failed}");
    let held = told.lines().filter(|line| line.starts_with("ok ")).count();
    assert_eq!(held, HELD, "{told}");
}

#[test]
fn a_server_by_itself_has_a_cluster_page_too() {
    let server = ServerSetup::config(plan().config).start();
    let shell = CliShell::of(&server);
    let status = shell.ok(&["cluster", "status", "--secret", secret()]);
    assert!(
        status.contains("this server *") && status.contains("embedded"),
        "{status}"
    );
    let refused = shell.refused(1, &["cluster", "drain", "--yes", "--secret", secret()]);
    assert!(refused.contains("no other node"), "{refused}");
}
