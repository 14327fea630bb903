//! Metrics of a cluster, as this node knows them.

use super::page::{MetricKind, MetricsPage, labels};
use crate::cluster::{ClusterState, NodeStanding};

pub fn cluster(page: &mut MetricsPage, cluster: &ClusterState) {
    let name = "postrider_cluster_nodes";
    page.family(name, MetricKind::Gauge, "Nodes, by how they are doing.");
    for standing in NodeStanding::ALL {
        let count = cluster
            .nodes
            .iter()
            .filter(|node| node.standing == standing)
            .count();
        page.line(name, &labels(&[("standing", standing.name())]), count as u64);
    }
    let owned = cluster.me().map_or(0, |me| me.partitions.len());
    let offline = cluster.jetstream.iter().flat_map(|jetstream| jetstream.all());
    let behind = offline
        .flat_map(|stream| &stream.replicas)
        .filter(|copy| copy.offline || !copy.current);
    let steward = cluster.me().is_some_and(|me| me.partitions.contains(&0));
    let gauges: [(&str, &str, f64); 8] = [
        (
            "postrider_cluster_partitions",
            "Partitions of the cluster.",
            cluster.partitions.len() as f64,
        ),
        (
            "postrider_cluster_partitions_owned",
            "Partitions that this node serves.",
            owned as f64,
        ),
        (
            "postrider_cluster_partitions_unserved",
            "Partitions that no node serves: what is in them waits.",
            (cluster.partitions.len() - cluster.served()) as f64,
        ),
        (
            "postrider_cluster_steward",
            "1 on the node that does what only one may do at a time.",
            f64::from(u8::from(steward)),
        ),
        (
            "postrider_cluster_lease_seconds",
            "For how long this node may act for its partitions unless it is heard again; 0: it may not.",
            cluster.own.lease_left.as_secs_f64(),
        ),
        (
            "postrider_cluster_connected",
            "1 while there is a connection to a NATS server.",
            f64::from(u8::from(cluster.own.connected)),
        ),
        (
            "postrider_cluster_stream_lag",
            "Operations that the copy of a stream is behind which is behind most.",
            cluster.lag() as f64,
        ),
        (
            "postrider_cluster_replicas_behind",
            "Copies of streams that are away or behind.",
            behind.count() as f64,
        ),
    ];
    for (name, help, value) in gauges {
        page.family(name, MetricKind::Gauge, help);
        page.line(name, "", value);
    }
    let tallies = &cluster.own.tallies;
    let counters: [(&str, &str, u64); 10] = [
        (
            "postrider_cluster_takeovers_total",
            "Partitions that this node took.",
            tallies.takeovers,
        ),
        (
            "postrider_cluster_partitions_lost_total",
            "Partitions that another node took while this one held them.",
            tallies.lost,
        ),
        (
            "postrider_cluster_fenced_total",
            "Events and settlements that were refused because the partition is another node's.",
            tallies.fenced,
        ),
        (
            "postrider_cluster_redelivered_total",
            "Deliveries that may have been under way at an earlier owner and were offered again: they may arrive twice.",
            tallies.redelivered,
        ),
        (
            "postrider_cluster_forwarded_total",
            "Publish requests that were handed to another node.",
            tallies.forwarded,
        ),
        (
            "postrider_cluster_recoveries_total",
            "How often it had to be looked up what became of messages.",
            tallies.recoveries,
        ),
        (
            "postrider_cluster_snapshots_total",
            "Snapshots of partitions that were written.",
            tallies.snapshots,
        ),
        (
            "postrider_cluster_journal_messages_total",
            "Messages that say what became of deliveries.",
            tallies.journal_messages,
        ),
        (
            "postrider_cluster_journal_bytes_total",
            "Their size.",
            tallies.journal_bytes,
        ),
        (
            "postrider_cluster_read_back_total",
            "Messages that were read back from JetStream to be delivered.",
            tallies.read_back,
        ),
    ];
    for (name, help, value) in counters {
        page.family(name, MetricKind::Counter, help);
        page.line(name, "", value);
    }
}
