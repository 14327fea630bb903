//! Logs on a server, as the cluster would set them up.

use crate::nats::{PATIENCE, Server};
use async_trait::async_trait;
use postrider_core::ids::Position;
use postrider_jetstream::partition::partition_of;
use postrider_jetstream::{Bounds, Connection, JetStreamLog, Names, NodeShared, Nowhere, Partition};
use postrider_store::conformance::Subject;
use postrider_store::{Error, EventLog};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

static EPOCH: AtomicU64 = AtomicU64::new(1);

/// Greater than all before, like a revision of the bucket.
pub fn next_epoch() -> u64 {
    EPOCH.fetch_add(1, Relaxed)
}

/// A connection with another prefix for its streams.
pub fn named(mut connection: Connection, name: &str) -> Connection {
    connection.names = Names::new(name);
    connection
}

pub fn empty_log(connection: &Connection) -> Arc<JetStreamLog> {
    log_with(connection, Bounds::default())
}

pub fn log_with(connection: &Connection, bounds: Bounds) -> Arc<JetStreamLog> {
    let shared = NodeShared::with_bounds("test", Arc::new(|| true), bounds);
    Arc::new(JetStreamLog::new(
        connection.clone(),
        7,
        shared,
        Arc::new(Nowhere),
    ))
}

/// Takes a partition, and retries while the servers elect a leader, like a node does.
pub async fn take(connection: &Connection, log: &JetStreamLog, number: u8) -> Arc<Partition> {
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
pub struct Node {
    connection: Connection,
    partitions: u8,
    bounds: Bounds,
    opened: Mutex<Option<(Connection, Arc<JetStreamLog>)>>,
    count: AtomicU64,
}

impl Node {
    pub async fn new(server: &Server, partitions: u8, bounds: Bounds) -> Node {
        Node::over(server.connect().await, partitions, bounds)
    }

    pub fn over(connection: Connection, partitions: u8, bounds: Bounds) -> Node {
        Node {
            connection,
            partitions,
            bounds,
            opened: Mutex::new(None),
            count: AtomicU64::new(0),
        }
    }

    async fn opened(&self, connection: Connection) -> Arc<dyn EventLog> {
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
impl Subject for Node {
    async fn open(&self) -> Arc<dyn EventLog> {
        let mut connection = self.connection.clone();
        let count = self.count.fetch_add(1, Relaxed);
        connection.names = Names::new(&format!("t{}-{count}", self.partitions));
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

    fn begins_by_match(&self) -> bool {
        true
    }
}
