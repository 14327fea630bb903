//! Logs on a server, as the cluster would set them up.

use crate::nats::{NatsProcess, PATIENCE};
use async_trait::async_trait;
use postrider_core::ids::Position;
use postrider_jetstream::partition::partition_of;
use postrider_jetstream::{
    JetStreamLog, NatsConnection, NoForwarding, NodeBounds, NodeShared, Partition, StreamNames,
};
use postrider_store::conformance::LogUnderTest;
use postrider_store::{Error, EventLog};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

static EPOCH: AtomicU64 = AtomicU64::new(1);

/// Greater than all before, like a revision of the bucket.
pub fn next_epoch() -> u64 {
    EPOCH.fetch_add(1, Relaxed)
}

/// A connection with another prefix for its streams.
pub fn named(mut connection: NatsConnection, name: &str) -> NatsConnection {
    connection.names = StreamNames::new(name);
    connection
}

pub fn empty_log(connection: &NatsConnection) -> Arc<JetStreamLog> {
    log_with(connection, NodeBounds::default())
}

pub fn log_with(connection: &NatsConnection, bounds: NodeBounds) -> Arc<JetStreamLog> {
    let shared = NodeShared::with_bounds("test", Arc::new(|| true), bounds);
    Arc::new(JetStreamLog::new(
        connection.clone(),
        7,
        shared,
        Arc::new(NoForwarding),
    ))
}

/// Takes a partition, and retries while the servers elect a leader, like a node does.
pub async fn take(connection: &NatsConnection, log: &JetStreamLog, number: u8) -> Arc<Partition> {
    let taking = async {
        loop {
            match Partition::take(connection, number, next_epoch(), log.shared().clone()).await {
                Ok(partition) => return log.add(partition),
                Err(Error::Unavailable(why)) => println!("not yet: {why}"),
                Err(e) => panic!("{e}"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, taking)
        .await
        .expect("it can be taken")
}

/// A node that owns this many partitions.
pub struct PartitionedLog {
    connection: NatsConnection,
    partitions: u8,
    bounds: NodeBounds,
    opened: Mutex<Option<(NatsConnection, Arc<JetStreamLog>)>>,
    count: AtomicU64,
}

impl PartitionedLog {
    pub async fn new(server: &NatsProcess, partitions: u8, bounds: NodeBounds) -> PartitionedLog {
        PartitionedLog::over(server.connect().await, partitions, bounds)
    }

    pub fn over(connection: NatsConnection, partitions: u8, bounds: NodeBounds) -> PartitionedLog {
        PartitionedLog {
            connection,
            partitions,
            bounds,
            opened: Mutex::new(None),
            count: AtomicU64::new(0),
        }
    }

    async fn opened(&self, connection: NatsConnection) -> Arc<dyn EventLog> {
        let log = log_with(&connection, self.bounds);
        // Start at another number than 0: nothing may depend on which partitions they are.
        for number in 0..self.partitions {
            take(&connection, &log, 5 + 3 * number).await;
        }
        *self.opened.lock().unwrap() = Some((connection, log.clone()));
        log
    }
}

#[async_trait]
impl LogUnderTest for PartitionedLog {
    async fn open(&self) -> Arc<dyn EventLog> {
        let mut connection = self.connection.clone();
        let count = self.count.fetch_add(1, Relaxed);
        connection.names = StreamNames::new(&format!("t{}-{count}", self.partitions));
        self.opened(connection).await
    }

    async fn reopen(&self, log: Arc<dyn EventLog>) -> Arc<dyn EventLog> {
        log.close().await.unwrap();
        self.crash(log).await
    }

    async fn crash(&self, log: Arc<dyn EventLog>) -> Arc<dyn EventLog> {
        let (connection, held) = self.opened.lock().unwrap().take().expect("it was opened");
        drop((held, log));
        self.opened(connection).await
    }

    fn lane(&self, position: Position) -> u64 {
        u64::from(partition_of(position))
    }

    fn is_ordered(&self) -> bool {
        self.partitions == 1
    }

    fn opens_on_first_match(&self) -> bool {
        true
    }
}
