use super::*;
use crate::azure::subscriptions::tests::test_server::ApiTestServer;
use std::sync::Mutex;

fn node(id: &str, name: &str, standing: NodeStanding, partitions: &[u8]) -> ClusterNode {
    ClusterNode {
        id: id.into(),
        name: name.into(),
        url: format!("http://{name}"),
        version: "0.1.0".into(),
        started: Timestamp::from_secs(1_900_000_000),
        standing,
        heard_ago: Duration::from_millis(1_500),
        partitions: partitions.to_vec(),
        counts: ClusterCounters::default(),
        rates: BTreeMap::from([("deliveredPerSec".into(), 2.5)]),
    }
}

fn partition(number: u8, owner: &str, waiting: Option<u64>) -> ClusterPartition {
    ClusterPartition {
        number,
        owner: Some(owner.into()),
        epoch: 7,
        waiting: waiting.map(|waiting| ShownPartitionBacklog {
            waiting,
            retrying: 1,
            letters: 2,
        }),
    }
}

fn stream(name: &str, copies: &[(&str, bool, bool, u64)]) -> JetStreamStreamState {
    let replicas = copies
        .iter()
        .map(|(server, current, offline, lag)| JetStreamReplicaState {
            server: (*server).into(),
            current: *current,
            offline: *offline,
            lag: *lag,
        });
    JetStreamStreamState {
        name: name.into(),
        leader: Some("n1".into()),
        replicas: replicas.collect(),
        messages: 3,
        bytes: 4,
        trouble: None,
    }
}

/// Two nodes without problems.
fn well() -> ClusterState {
    let good = [("n2", true, false, 0), ("n3", true, false, 0)];
    ClusterState {
        node: "a".into(),
        nodes: vec![
            node("a", "one", NodeStanding::Live, &[0, 1]),
            node("b", "two", NodeStanding::Live, &[2]),
        ],
        partitions: vec![
            partition(0, "a", Some(5)),
            partition(1, "a", Some(6)),
            partition(2, "b", Some(0)),
        ],
        jetstream: Some(JetStreamState {
            version: Some("2.15.1".into()),
            replicas: 3,
            replicas_wanted: 3,
            sync: "always".into(),
            guarantee: "it holds".into(),
            partitions: ["p0", "p1", "p2"].map(|name| stream(name, &good)).into(),
            streams: vec![stream("catalog", &good)],
            ..JetStreamState::default()
        }),
        counts: ClusterCounters::default(),
        own: LocalNodeState {
            connected: true,
            lease_left: Duration::from_secs(3),
            ..LocalNodeState::default()
        },
    }
}

fn codes(said: &[CodedMessage]) -> Vec<&str> {
    said.iter().map(|(code, _)| *code).collect()
}

#[test]
fn what_keeps_a_node_from_taking_events_is_named() {
    let check = |change: &dyn Fn(&mut ClusterState), expected: &[&str]| {
        let mut cluster = well();
        change(&mut cluster);
        assert_eq!(codes(&publish_refusal_reasons(&cluster)), expected);
    };
    check(&|_| {}, &[]);
    check(&|c| c.own.lease_left = Duration::ZERO, &["leaseLost"]);
    // Without a connection the lease runs out too: one cause is reported as one reason.
    check(
        &|c| {
            c.own.connected = false;
            c.own.lease_left = Duration::ZERO;
        },
        &["jetstreamAway"],
    );
    check(
        &|c| c.own.failed = Some("another took its place".into()),
        &["nodeReplaced"],
    );
    check(
        &|c| c.own.catalogue = Some("message 7 cannot be read".into()),
        &["catalogueUnreadable"],
    );
    check(
        &|c| c.partitions.iter_mut().for_each(|one| one.waiting = None),
        &["noPartitionServed"],
    );
    // A node that owns no partition forwards what is published to it.
    check(&|c| c.nodes[0].partitions.clear(), &[]);
    check(&|c| c.jetstream = None, &[]);
}

#[test]
fn what_should_not_stay_as_it_is_is_warned_of() {
    let check = |change: &dyn Fn(&mut ClusterState), expected: &[(&str, &str)]| {
        let mut cluster = well();
        change(&mut cluster);
        let said = warnings(&cluster);
        let shown = format!("{said:?}");
        assert_eq!(said.len(), expected.len(), "{shown}");
        for (code, part) in expected {
            assert!(
                said.iter().any(|(has, text)| has == code && text.contains(part)),
                "{code} {part}: {shown}"
            );
        }
    };
    fn js(cluster: &mut ClusterState) -> &mut JetStreamState {
        cluster.jetstream.as_mut().unwrap()
    }
    check(&|_| {}, &[]);
    check(&|c| c.jetstream = None, &[]);
    check(
        &|c| c.partitions[1].waiting = None,
        &[("partitionsUnserved", "1 of 3")],
    );
    check(
        &|c| c.nodes[1].standing = NodeStanding::Dead,
        &[("nodeMissing", "node two was last heard of 1 seconds ago")],
    );
    check(&|c| c.nodes[1].standing = NodeStanding::Left, &[]);
    check(&|c| c.nodes[1].standing = NodeStanding::Draining, &[]);
    check(
        &|c| c.nodes[0].standing = NodeStanding::Draining,
        &[("draining", "one, is draining")],
    );
    check(
        &|c| js(c).trouble.push("stream p1 cannot be written".into()),
        &[("jetstream", "p1")],
    );
    check(
        &|c| js(c).soon.push("stream p1 is nearly spent".into()),
        &[("jetstreamSoon", "p1")],
    );
    check(
        &|c| js(c).replicas = 1,
        &[(
            "replicasFewer",
            "by 1 servers though store.jetstream.replicas is 3",
        )],
    );
    // An absent server is reported once, not for each of its four replicas.
    check(
        &|c| {
            let js = js(c);
            for stream in js.partitions.iter_mut().chain(&mut js.streams) {
                stream.replicas[0].offline = true;
            }
            js.partitions[0].replicas[1].current = false;
        },
        &[
            ("replicaBehind", "4 streams on NATS server n2"),
            ("replicaBehind", "1 streams on NATS server n3"),
        ],
    );
    let single = |sync: &'static str| {
        move |c: &mut ClusterState| {
            let js = js(c);
            (js.replicas, js.replicas_wanted, js.sync) = (1, 1, sync.into());
        }
    };
    check(&single("always"), &[]);
    check(&single("interval 2m"), &[("sync", "it holds")]);
    check(&single("unknown"), &[("sync", "it holds")]);
}

#[test]
fn nodes_are_shown_with_what_waits_in_their_partitions() {
    let mut cluster = well();
    let shown = cluster.shown();
    let one = &shown["nodes"][0];
    assert_eq!(
        (
            &one["waiting"],
            &one["retrying"],
            &one["letters"],
            &one["steward"],
            &one["standing"]
        ),
        (&json!(11), &json!(2), &json!(4), &json!(true), &json!("live"))
    );
    assert_eq!(shown["nodes"][1]["steward"], json!(false));
    assert_eq!(shown["partitions"][2]["stream"]["name"], "p2");
    // A node is draining while it still owns partitions, and a partition that no node serves has no
    // backlog.
    cluster.nodes[0].standing = NodeStanding::Draining;
    cluster.nodes[0].partitions.clear();
    assert_eq!(cluster.shown()["nodes"][0]["standing"], "draining");
    cluster.partitions[0].owner = Some("b".into());
    cluster.partitions[1] = ClusterPartition {
        number: 1,
        ..ClusterPartition::default()
    };
    let shown = cluster.shown();
    assert_eq!(shown["nodes"][0]["standing"], "drained");
    assert_eq!(
        (
            &shown["partitions"][1]["owner"],
            &shown["partitions"][1]["serving"]
        ),
        (&Value::Null, &json!(false))
    );
    cluster.jetstream = None;
    assert_eq!(cluster.shown().get("jetstream"), None);
}

#[test]
fn a_node_is_found_by_name_and_by_id() {
    let mut cluster = well();
    cluster.nodes.push(node("c", "two", NodeStanding::Dead, &[]));
    cluster.nodes.push(node("d", "gone", NodeStanding::Left, &[]));
    let find = |cluster: &ClusterState, asked: Option<&str>| match find(cluster, asked) {
        Ok(node) => Ok(node.id.clone()),
        Err(problem) => Err((problem.status, problem.detail)),
    };
    assert_eq!(find(&cluster, None), Ok("a".into()));
    assert_eq!(find(&cluster, Some("one")), Ok("a".into()));
    assert_eq!(
        find(&cluster, Some("two")),
        Ok("b".into()),
        "the one that is there is meant"
    );
    assert_eq!(find(&cluster, Some("b")), Ok("b".into()));
    let (status, detail) = find(&cluster, Some("nobody")).unwrap_err();
    assert!(status == 404 && detail.contains("known are one, two"), "{detail}");
    let (status, detail) = find(&cluster, Some("gone")).unwrap_err();
    assert!(status == 409 && detail.contains("is left"), "{detail}");
    assert_eq!(find(&cluster, Some("c")).unwrap_err().0, 409);
    cluster.nodes[2].standing = NodeStanding::Live;
    let (status, detail) = find(&cluster, Some("two")).unwrap_err();
    assert!(status == 409 && detail.contains("b or c"), "{detail}");
}

/// A cluster in the state that a test sets. Remembers drain requests.
struct FakeClusterView {
    cluster: Mutex<ClusterState>,
    drained: Mutex<Vec<(String, bool)>>,
}

#[async_trait]
impl ClusterView for FakeClusterView {
    fn now(&self) -> ClusterState {
        self.cluster.lock().unwrap().clone()
    }

    async fn look(&self, _: Duration) -> ClusterState {
        self.now()
    }

    async fn drain(&self, id: &str, draining: bool) -> Result<(), String> {
        if id == "b" && draining {
            return Err("it is away".into());
        }
        self.drained.lock().unwrap().push((id.into(), draining));
        Ok(())
    }
}

fn told(cluster: ClusterState) -> Arc<FakeClusterView> {
    Arc::new(FakeClusterView {
        cluster: Mutex::new(cluster),
        drained: Mutex::default(),
    })
}

#[tokio::test]
async fn nodes_are_drained_by_whoever_may() {
    let view = told(well());
    let lab = ApiTestServer::with(false, |server| server.cluster = Some(view.clone())).await;
    let drain = async |body: Value| {
        lab.send("POST", "/postrider/v1/cluster/drain", Some(&body), &[])
            .await
    };
    let undrain = async |body: Value| {
        lab.send("POST", "/postrider/v1/cluster/undrain", Some(&body), &[])
            .await
    };
    let got = drain(json!({})).await.expect(202);
    assert_eq!(
        got.body,
        json!({"node": {"id": "a", "name": "one"}, "state": "draining"})
    );
    let got = undrain(json!({"node": "two"})).await.expect(202);
    assert_eq!(
        got.body,
        json!({"node": {"id": "b", "name": "two"}, "state": "live"})
    );
    let got = drain(json!({"node": "two"})).await.expect(503);
    assert!(
        got.body["detail"].as_str().unwrap().contains("it is away"),
        "{}",
        got.body
    );
    // The last live node is drained only if the request forces it.
    view.cluster.lock().unwrap().nodes[1].standing = NodeStanding::Draining;
    let got = drain(json!({"node": "one"})).await.expect(409);
    assert_eq!(got.body["field"], "node");
    drain(json!({"node": "one", "force": true})).await.expect(202);
    for (body, part) in [
        (json!({"node": 1}), "node"),
        (json!({"node": null}), "node"),
        (json!({"force": "yes"}), "force"),
        (json!({"nod": "a"}), "nod"),
    ] {
        let got = drain(body).await.expect(400);
        assert!(
            got.body["detail"].as_str().unwrap().starts_with(part),
            "{}",
            got.body
        );
    }
    undrain(json!({"force": true})).await.expect(400);
    let expected = [("a", true), ("b", false), ("a", true)].map(|(id, draining)| (id.to_owned(), draining));
    assert_eq!(*view.drained.lock().unwrap(), expected);
}

#[tokio::test]
async fn health_and_metrics_say_how_the_cluster_is() {
    let view = told(well());
    let lab = ApiTestServer::with(false, |server| server.cluster = Some(view.clone())).await;
    let get = async |path: &str| lab.send("GET", path, None, &[]).await;
    let got = get("/healthz").await.expect(200);
    let store = &got.body["store"];
    assert_eq!(
        (
            &store["kind"],
            &store["replicas"],
            &store["sync"],
            &store["guarantee"]
        ),
        (
            &json!("jetstream"),
            &json!(3),
            &json!("always"),
            &json!("it holds")
        )
    );
    assert_eq!(store["partitions"], json!({"owned": 2, "served": 3, "total": 3}));
    assert_eq!(got.body["warnings"], json!([]));
    {
        let mut cluster = view.cluster.lock().unwrap();
        cluster.own.lease_left = Duration::ZERO;
        cluster.nodes[1].standing = NodeStanding::Dead;
    }
    let got = get("/healthz").await.expect(503);
    assert_eq!(got.body["reasons"][0]["code"], "leaseLost");
    assert_eq!(got.body["warnings"][0]["code"], "nodeMissing");
    let got = get("/healthz/ready").await.expect(503);
    assert_eq!(got.body["reasons"][0]["code"], "leaseLost");
    let got = get("/metrics").await.expect(200);
    let page = String::from_utf8(got.bytes.to_vec()).unwrap();
    for line in [
        "postrider_cluster_nodes{standing=\"live\"} 1",
        "postrider_cluster_nodes{standing=\"dead\"} 1",
        "postrider_cluster_partitions_owned 2",
        "postrider_cluster_lease_seconds 0",
        "postrider_up 0",
        "# TYPE postrider_cluster_redelivered_total counter",
    ] {
        assert!(page.lines().any(|one| one == line), "{line} is missing");
    }
}

#[tokio::test]
async fn a_server_by_itself_is_a_cluster_of_one() {
    let lab = ApiTestServer::new(false).await;
    let got = lab
        .send("GET", "/postrider/v1/cluster", None, &[])
        .await
        .expect(200);
    assert_eq!(got.body["kind"], "embedded");
    assert_eq!(got.body["nodes"][0]["id"], got.body["node"]);
    assert_eq!(got.body["partitions"][0]["owner"], got.body["node"]);
    let got = lab.send("GET", "/metrics", None, &[]).await.expect(200);
    assert!(
        !String::from_utf8(got.bytes.to_vec())
            .unwrap()
            .contains("postrider_cluster")
    );
    let body = json!({});
    let got = lab
        .send("POST", "/postrider/v1/cluster/drain", Some(&body), &[])
        .await;
    assert!(
        got.expect(409).body["detail"]
            .as_str()
            .unwrap()
            .contains("no other node")
    );
}
