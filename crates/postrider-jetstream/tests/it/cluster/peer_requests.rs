//! Peer requests, and questions to JetStream about its health.

use super::test_nodes::{even, node, open, open_with, settings, until};
use crate::nats::NatsProcesses;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use postrider_core::ids::Secret;
use postrider_jetstream::health::SyncPolicy;
use postrider_jetstream::peer_requests::PeerRequestHandler;
use postrider_jetstream::{JetStreamSettings, NatsAuth, NodeId};
use std::sync::Arc;
use std::time::Duration;

/// Answers with its id and as many more bytes as requested.
struct IdAnswerer(u64);

#[async_trait]
impl PeerRequestHandler for IdAnswerer {
    async fn answer(&self, question: &str, body: Bytes) -> Result<Bytes, String> {
        let length: usize = std::str::from_utf8(&body).unwrap().parse().unwrap();
        match (question, self.0) {
            ("never", 3) => std::future::pending().await,
            ("wrong", 2) => Err("it\r\nis wrong".into()),
            _ => Ok(format!("{question} {} {}", self.0, "x".repeat(length)).into()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_nodes_are_asked_and_those_that_do_not_answer_are_named() {
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let mut nodes = Vec::new();
    for id in 1..=3 {
        let one = open(&servers, 3, id).await;
        one.asker.set_handler(Arc::new(IdAnswerer(id)));
        nodes.push(one);
    }
    for one in &nodes {
        until(one, "all are there", |known| even(known, &[1, 2, 3], 3)).await;
    }
    let long = Duration::from_secs(30);
    // More than fits into one message: the server's limit is a mebibyte.
    let asked = nodes[0]
        .asker
        .request_all("size", Bytes::from_static(b"3000000"), long)
        .await;
    assert!(asked.missing.is_empty(), "{:?}", asked.missing);
    let answers: Vec<(u64, usize)> = asked
        .answers
        .iter()
        .map(|(id, answer)| (id.0, answer.as_ref().unwrap().len()))
        .collect();
    assert_eq!(answers, [(1, 3_000_007), (2, 3_000_007), (3, 3_000_007)]);
    for (id, answer) in asked.answers {
        assert!(
            answer
                .unwrap()
                .starts_with(format!("size {id:?} ", id = id.0).as_bytes())
        );
    }

    let asked = nodes[1]
        .asker
        .request_all("never", Bytes::from_static(b"0"), Duration::from_millis(300))
        .await;
    assert_eq!(asked.missing.iter().map(|id| id.0).collect::<Vec<_>>(), [3]);
    assert_eq!(
        asked.answers.iter().map(|(id, _)| id.0).collect::<Vec<_>>(),
        [1, 2]
    );
    let known = nodes[1].members.membership();
    assert_eq!(known.name_of(asked.missing[0]), "node-3");

    let asked = nodes[2]
        .asker
        .request_all("wrong", Bytes::from_static(b"0"), long)
        .await;
    assert_eq!(asked.answers[1].1, Err("itis wrong".into()));
    assert!(asked.missing.is_empty() && asked.answers[0].1.is_ok());

    // A node that died silently is reported as missing until it is known to be dead.
    let last = nodes.pop().unwrap();
    last.abandon().await;
    let asked = nodes[0]
        .asker
        .request_all("here", Bytes::from_static(b"0"), Duration::from_millis(300))
        .await;
    assert_eq!(asked.missing.iter().map(|id| id.0).collect::<Vec<_>>(), [3]);
    until(&nodes[0], "it is known to be dead", |known| {
        even(known, &[1, 2], 3)
    })
    .await;
    let asked = nodes[0]
        .asker
        .request_all("here", Bytes::from_static(b"0"), long)
        .await;
    assert!(asked.missing.is_empty() && asked.answers.len() == 2);
    for one in nodes {
        one.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_is_asked_alone_however_large_the_question_is() {
    struct SlowAnswerer(u64);
    #[async_trait]
    impl PeerRequestHandler for SlowAnswerer {
        async fn answer(&self, question: &str, body: Bytes) -> Result<Bytes, String> {
            match question {
                "long" => Ok(format!("{} {}", self.0, body.len()).into()),
                "never" => std::future::pending().await,
                _ => Err("what?".into()),
            }
        }
    }
    let Some(servers) = NatsProcesses::one() else {
        return;
    };
    let mut nodes = Vec::new();
    for id in 1..=2 {
        let one = open(&servers, 2, id).await;
        one.asker.set_handler(Arc::new(SlowAnswerer(id)));
        nodes.push(one);
    }
    let [one, other] = &nodes[..] else { unreachable!() };
    let long = Duration::from_secs(30);
    let (me, there) = (one.members.node().id, other.members.node().id);
    for size in [0, 1, 3_000_000] {
        let body = Bytes::from(vec![7; size]);
        let answer = one.asker.request_one(there, "long", body.clone(), long).await;
        assert_eq!(answer, Ok(format!("2 {size}").into()));
        let answer = one.asker.request_one(me, "long", body, long).await;
        assert_eq!(answer, Ok(format!("1 {size}").into()));
    }
    let asked = one.asker.request_one(there, "else", Bytes::new(), long).await;
    assert_eq!(asked, Err("what?".into()));
    // Requests that take long do not keep others from being answered.
    let soon = Duration::from_millis(200);
    let never = (0..100).map(|_| one.asker.request_one(there, "never", Bytes::new(), soon));
    let never = futures_util::future::join_all(never);
    let (never, all) = tokio::join!(never, one.asker.request_all("long", Bytes::new(), long));
    assert!(
        never
            .iter()
            .all(|answer| answer.as_ref().is_err_and(|why| why.contains("in time")))
    );
    assert!(all.missing.is_empty() || all.answers.iter().any(|(id, _)| *id == me));
    // The absence of a node is noticed immediately.
    let away = one
        .asker
        .request_one(NodeId(99), "long", Bytes::new(), long)
        .await;
    assert_eq!(away, Err("the node is away".into()));

    let mut heard = std::pin::pin!(other.asker.subscribe_broadcast("news").await.unwrap());
    let mut own = std::pin::pin!(one.asker.subscribe_broadcast("news").await.unwrap());
    // The replies prove that the server knows the subscriptions before anything is broadcast.
    other
        .asker
        .request_one(me, "long", Bytes::new(), long)
        .await
        .unwrap();
    one.asker
        .request_one(there, "long", Bytes::new(), long)
        .await
        .unwrap();
    one.asker
        .broadcast("news", Bytes::from_static(b"1"))
        .await
        .unwrap();
    assert_eq!(heard.next().await.unwrap(), "1");
    other
        .asker
        .broadcast("news", Bytes::from_static(b"2"))
        .await
        .unwrap();
    assert_eq!(own.next().await.unwrap(), "2", "not what it told itself");
    for one in nodes {
        one.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_says_how_it_writes_to_disk_if_it_may() {
    for (setting, expected, promise) in [
        (
            "",
            "interval 2m",
            "a power cut can take what was published in the last 2m",
        ),
        (
            "sync_interval: always",
            "always",
            "a crash of the server and a power cut",
        ),
    ] {
        let Some(servers) = NatsProcesses::start(1, setting) else {
            return;
        };
        let plain = settings(&servers, 1);
        let silent = open_with(plain.clone(), node(1)).await;
        until(&silent, "it serves", |known| even(known, &[1], 1)).await;
        let report = silent.health.look().await;
        assert_eq!((report.sync, report.replicas), (SyncPolicy::Unknown, 1));
        assert!(report.guarantee.contains("is not known"), "{}", report.guarantee);
        assert_eq!(
            report.version.as_deref().map(|version| version.starts_with("2.")),
            Some(true)
        );
        assert!(report.trouble().is_empty(), "{:?}", report.trouble());
        silent.close().await;
        let by_monitor = JetStreamSettings {
            monitor_urls: servers.monitors(),
            ..plain.clone()
        };
        let by_system = JetStreamSettings {
            system: Some(NatsAuth::Password {
                user: "sys".into(),
                password: Secret::new("sys"),
            }),
            ..plain
        };
        for settings in [by_monitor, by_system] {
            let one = open_with(settings, node(1)).await;
            let report = one.health.look().await;
            assert_eq!(report.sync.to_string(), expected);
            assert!(report.guarantee.contains(promise), "{}", report.guarantee);
            assert_eq!(report.servers.len(), 1);
            assert!(report.servers[0].name == "n0" && report.servers[0].version.starts_with("2."));
            one.close().await;
        }
    }
}
