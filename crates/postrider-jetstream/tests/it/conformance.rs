use crate::nats::NatsProcess;
use crate::support::PartitionedLog;
use postrider_jetstream::NodeBounds;
use postrider_store::conformance;

#[tokio::test(flavor = "multi_thread")]
async fn one_partition_keeps_the_logs_promise() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    conformance::all(&PartitionedLog::new(&server, 1, NodeBounds::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_partitions_keep_the_logs_promise() {
    let Some(server) = NatsProcess::start() else {
        return;
    };
    conformance::all(&PartitionedLog::new(&server, 4, NodeBounds::default()).await).await;
}

// Hardly anything stays in memory, snapshots are written all the time, finished chunks are purged,
// and larger requests are split over many messages.
#[tokio::test(flavor = "multi_thread")]
async fn the_logs_promise_does_not_depend_on_what_is_in_memory() {
    let Some(server) = NatsProcess::start_with("max_payload: 65536") else {
        return;
    };
    let bounds = NodeBounds {
        cache_bytes: 100 << 10,
        chunk_bytes: 200 << 10,
        chunk_messages: 20,
        snapshot_journal_bytes: 2 << 10,
        snapshot_event_bytes: 500 << 10,
    };
    for partitions in [1, 3] {
        conformance::all(&PartitionedLog::new(&server, partitions, bounds).await).await;
    }
}
