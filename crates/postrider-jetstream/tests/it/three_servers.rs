//! The log on three servers: conformance, and the death or suspension of a stream's leader.

use crate::nats::{NatsProcesses, PATIENCE};
use crate::publish_answers::{PublishAnswers, check, check_anew, publish};
use crate::support::{PartitionedLog, empty_log, named, take};
use futures_util::future::join_all;
use postrider_core::retry::NextStep;
use postrider_jetstream::{NatsConnection, NodeBounds};
use postrider_store::conformance::{self, WANT, at, claim_all, eventually, settled, sub};
use postrider_store::{Claim, ClaimLimits, EventLog};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// Index of the server that leads a partition's stream.
async fn leader(connection: &NatsConnection, number: u8) -> usize {
    let name = connection.names.partition(number);
    let found = async {
        loop {
            if let Ok(stream) = connection.js.get_stream(&name).await
                && let Ok(info) = stream.get_info().await
                && let Some(leader) = info.cluster.and_then(|cluster| cluster.leader)
            {
                return leader.trim_start_matches('n').parse().expect("n0, n1 or n2");
            }
        }
    };
    tokio::time::timeout(PATIENCE, found)
        .await
        .expect("it has a leader")
}

#[tokio::test(flavor = "multi_thread")]
async fn three_servers_keep_the_logs_promise() {
    let Some(servers) = NatsProcesses::three() else {
        return;
    };
    let connection = servers.connect().await;
    conformance::all(&PartitionedLog::over(connection, 1, NodeBounds::default())).await;
}

// The leader is killed while clients publish and settle, and comes back; then it is suspended for
// longer than the others wait before an election, and comes back without having noticed; then the
// same happens while the partition changes hands.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_accepted_is_lost_when_the_leader_dies_or_hangs() {
    let Some(mut servers) = NatsProcesses::three() else {
        return;
    };
    let connection = servers.connect().await;
    let log = empty_log(&connection);
    take(&connection, &log, 3).await;
    let told = PublishAnswers::default();
    let enough = AtomicBool::new(false);
    let mut done = BTreeSet::new();
    let publishers = join_all((0..16).map(|n| publish(&log, &told, n, &enough)));
    let faults = async {
        for fault in ["killed", "hangs"] {
            let before = told.count();
            eventually("more are accepted", || told.count() > before + 300).await;
            let some = ClaimLimits {
                events_max: 50,
                ..WANT
            };
            let claims = log.claim(sub(1), at(0), some).await.unwrap();
            let leads = leader(&connection, 3).await;
            let began = Instant::now();
            match fault {
                "killed" => servers.all[leads].kill(),
                _ => servers.all[leads].pause(),
            }
            let silent = told.count();
            // Settled while the server is down.
            let all = claims
                .iter()
                .map(|claim| settled(claim, NextStep::Done))
                .collect();
            log.settle(sub(1), all).await.unwrap();
            eventually("it goes on", || told.count() > silent + 100).await;
            println!(
                "the leader {fault}: events are taken in again after {:?}",
                began.elapsed()
            );
            match fault {
                "killed" => servers.all[leads].run(),
                _ => servers.all[leads].resume(),
            }
            log.flush().await.unwrap();
            done.extend(claims.iter().map(Claim::position));
        }
        enough.store(true, Relaxed);
    };
    tokio::join!(publishers, faults);
    drop(log);
    check_anew(&connection, &told, &done).await;
}

// A node takes the partition while the leading server is suspended, with messages of the old owner
// that it has received and not acknowledged. The old owner does not know and continues.
#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_while_the_leader_hangs_loses_and_doubles_nothing() {
    let Some(servers) = NatsProcesses::three() else {
        return;
    };
    let old_connection = servers.connect().await;
    let new_connection = servers.connect().await;
    for round in 0..2 {
        let name = format!("r{round}");
        let (connection, other) = (
            named(old_connection.clone(), &name),
            named(new_connection.clone(), &name),
        );
        let old = empty_log(&connection);
        let partition = take(&connection, &old, 0).await;
        let told = PublishAnswers::default();
        let never = AtomicBool::new(false);
        let publishers = join_all((0..16).map(|n| publish(&old, &told, n, &never)));
        let takeover = async {
            eventually("some are accepted", || told.count() > 300).await;
            let leads = leader(&connection, 0).await;
            servers.all[leads].pause();
            let new = empty_log(&other);
            let began = Instant::now();
            take(&other, &new, 0).await;
            println!("taken over {:?} after the leader began to hang", began.elapsed());
            servers.all[leads].resume();
            // The old owner notices when it tries to write again.
            tokio::time::timeout(PATIENCE, partition.ended().cancelled())
                .await
                .unwrap();
            new
        };
        let (_, new) = tokio::join!(publishers, takeover);
        check(&told, &claim_all(&*new, sub(1), at(0)).await, &BTreeSet::new());
        drop(new);
        let third = empty_log(&connection);
        take(&connection, &third, 0).await;
        check(&told, &claim_all(&*third, sub(1), at(0)).await, &BTreeSet::new());
    }
}
