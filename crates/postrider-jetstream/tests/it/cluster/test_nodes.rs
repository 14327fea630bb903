//! Helpers for clusters of several nodes.

use crate::nats::{NatsProcesses, PATIENCE};
use postrider_core::time::Timestamp;
use postrider_jetstream::membership::NodeStatus;
use postrider_jetstream::{JetStreamCluster, JetStreamSettings, Membership, NodeId, NodeInfo};
use postrider_store::Error;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

static PROCESSES: AtomicU64 = AtomicU64::new(1);

/// Short, so that tests are fast, but long enough for a busy machine.
pub const LEASE: Duration = Duration::from_secs(2);

pub fn settings(servers: &NatsProcesses, partitions: u8) -> JetStreamSettings {
    JetStreamSettings {
        prefix: "t".into(),
        partitions,
        lease: LEASE,
        ..servers.settings()
    }
}

pub fn node(id: u64) -> NodeInfo {
    NodeInfo {
        id: NodeId(id),
        process: PROCESSES.fetch_add(1, Relaxed) << 32 | id,
        name: format!("node-{id}"),
        url: format!("https://node-{id}.example"),
        version: "1.2.3".into(),
        started: Timestamp::from_secs(1_700_000_000),
    }
}

/// Opens a node as soon as the servers have formed a cluster.
pub async fn open(servers: &NatsProcesses, partitions: u8, id: u64) -> JetStreamCluster {
    open_with(settings(servers, partitions), node(id)).await
}

pub async fn open_with(settings: JetStreamSettings, node: NodeInfo) -> JetStreamCluster {
    let opening = async {
        loop {
            match JetStreamCluster::open(settings.clone(), node.clone()).await {
                Ok(cluster) => return cluster,
                Err(Error::Unavailable(why)) => println!("not yet: {why}"),
                Err(e) => panic!("{e}"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, opening)
        .await
        .expect("the servers answer")
}

/// Waits until the node's view of the cluster satisfies a condition.
#[track_caller]
pub fn until<'c>(
    cluster: &'c JetStreamCluster,
    what: &'static str,
    mut is_so: impl FnMut(&Membership) -> bool + Send + 'c,
) -> impl Future<Output = ()> + 'c {
    let at = std::panic::Location::caller();
    let mut changes = cluster.members.changes();
    async move {
        let so = tokio::time::timeout(PATIENCE, changes.wait_for(|known| is_so(known)))
            .await
            .is_ok_and(|so| so.is_ok());
        assert!(
            so,
            "{at}: not within {PATIENCE:?}: {what}: {:#?}",
            cluster.members.membership()
        );
    }
}

pub fn served(cluster: &JetStreamCluster) -> BTreeSet<u8> {
    let partitions = cluster.log.partitions();
    partitions
        .iter()
        .filter(|one| one.is_open())
        .map(|one| one.number())
        .collect()
}

/// Number of partitions that each node serves according to its heartbeats.
pub fn shares(known: &Membership) -> Vec<(u64, usize)> {
    known
        .present()
        .map(|member| (member.id.0, member.partitions.len()))
        .collect()
}

/// Whether these nodes and no others share all partitions evenly.
pub fn even(known: &Membership, nodes: &[u64], partitions: usize) -> bool {
    let shares = shares(known);
    let (least, most) = (partitions / nodes.len(), partitions.div_ceil(nodes.len()));
    shares.iter().map(|(id, _)| *id).eq(nodes.iter().copied())
        && shares.iter().all(|(_, count)| (least..=most).contains(count))
        && shares.iter().map(|(_, count)| count).sum::<usize>() == partitions
}

pub fn standing(known: &Membership, id: u64) -> Option<NodeStatus> {
    known
        .nodes
        .iter()
        .find(|member| member.id.0 == id)
        .map(|member| member.standing)
}

pub fn epochs(cluster: &JetStreamCluster) -> Vec<u64> {
    cluster
        .members
        .membership()
        .partitions
        .iter()
        .map(|one| one.epoch)
        .collect()
}
