//! The state of a cluster that is migrated to another kind of store, or from one.

use crate::bucket::Bucket;
use crate::connection::{JetStreamSettings, NatsConnection, error_chain};
use crate::fenced_stream::sleep;
use crate::forward;
use crate::membership::bucket_values::{self, BucketKey, HeartbeatRecord};
use crate::membership::decide::MembershipRules;
use crate::partition::PARTITIONS_MAX;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{DeleteStreamError, DeleteStreamErrorKind};
use async_nats::{Request, RequestErrorKind};
use bytes::Bytes;
use postrider_core::time::Timestamp;
use postrider_store::Error;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Key of the bucket that contains the migration.
pub const KEY: &str = "migration";
/// Time for a node to answer a ping.
const PING_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MigrationState {
    /// Data is being copied into this cluster.
    Copying,
    /// All data is here and verified; only the migration key remains to be deleted.
    Verified,
    /// All data is being copied out of this cluster.
    Leaving,
    /// All data was moved out of this cluster.
    Moved,
}

/// A migration of a cluster. No node serves the cluster while there is one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migration {
    pub state: MigrationState,
    /// The other store's identity, in hexadecimal.
    pub peer: String,
    /// Location of the other store, as text for people.
    pub place: String,
    /// Nanoseconds.
    pub at: i64,
}

impl Migration {
    pub fn new(state: MigrationState, peer: u64, place: String, at: Timestamp) -> Migration {
        Migration {
            state,
            peer: format!("{peer:016x}"),
            place,
            at: at.nanos(),
        }
    }

    /// Whether the migration involves the store with this identity.
    pub fn is_with(&self, peer: u64) -> bool {
        self.peer == format!("{peer:016x}")
    }

    pub async fn read(bucket: &Bucket) -> Result<Option<Migration>, Error> {
        let found = bucket.read(KEY).await?.and_then(|found| found.value);
        let Some(bytes) = found else {
            return Ok(None);
        };
        let wrong = |_| {
            Error::Corrupt(format!(
                "key {KEY} of the bucket is not one that this program understands"
            ))
        };
        serde_json::from_slice(&bytes).map(Some).map_err(wrong)
    }

    pub async fn write(&self, bucket: &Bucket) -> Result<(), Error> {
        let bytes = serde_json::to_vec(self).expect("numbers and text");
        bucket.put(KEY, Bytes::from(bytes)).await.map(drop)
    }

    pub async fn forget(bucket: &Bucket) -> Result<(), Error> {
        bucket.delete(KEY).await.map(drop)
    }

    /// Why no node may serve this cluster.
    pub fn refusal(&self) -> Error {
        let (place, at) = (&self.place, Timestamp::from_nanos(self.at));
        Error::Unavailable(match self.state {
            MigrationState::Copying | MigrationState::Verified => format!(
                "a migration into this cluster, from {place}, was begun at {at} and has not ended: run \
                 \"postrider migrate --to jetstream\" again, or take it back with --undo"
            ),
            MigrationState::Leaving => format!(
                "a migration out of this cluster, to {place}, was begun at {at} and has not ended: run \
                 \"postrider migrate --to embedded\" again, or take it back with --undo"
            ),
            MigrationState::Moved => format!(
                "everything in this cluster was moved to {place} at {at}: start the server there with \
                 store.kind = \"embedded\". To use what was left here all the same, run \
                 \"postrider migrate --to embedded --undo\""
            ),
        })
    }
}

/// A running node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningNode {
    pub name: String,
    pub url: String,
}

/// The running nodes of a cluster. A node that does not answer is watched until it would count as
/// dead.
pub async fn live_nodes(
    connection: &NatsConnection,
    bucket: &Bucket,
    settings: &JetStreamSettings,
) -> Result<Vec<RunningNode>, Error> {
    let rules = MembershipRules {
        lease: settings.lease,
        partitions: settings.partitions,
    };
    let mut live = Vec::new();
    let mut silent = Vec::new();
    for found in bucket.all().await? {
        let Some(BucketKey::Node(id)) = BucketKey::parse(&found.key) else {
            continue;
        };
        let Some(beat) = found
            .value
            .as_deref()
            .and_then(bucket_values::read::<HeartbeatRecord>)
        else {
            continue;
        };
        let HeartbeatRecord { name, url, .. } = beat;
        let ping = Request::new().timeout(Some(PING_PATIENCE));
        let subject = forward::subject(connection, id, "ping");
        match connection.client.send_request(subject, ping).await {
            Ok(_) => live.push(RunningNode { name, url }),
            Err(e) if e.kind() == RequestErrorKind::NoResponders => {}
            Err(_) => silent.push((found.key, found.revision, RunningNode { name, url })),
        }
    }
    if !silent.is_empty() {
        sleep(rules.dead_after()).await;
    }
    for (key, revision, node) in silent {
        let again = bucket.read(&key).await?;
        if again.is_some_and(|again| again.revision != revision && again.value.is_some()) {
            live.push(node);
        }
    }
    Ok(live)
}

/// Deletes everything that a cluster stores, its bucket last.
pub async fn wipe(connection: &NatsConnection) -> Result<(), Error> {
    let names = &connection.names;
    let prefix = names.prefix();
    let partitions = (0..PARTITIONS_MAX).map(|number| names.partition(number));
    let others = [
        format!("{prefix}-catalog"),
        format!("{prefix}-archive"),
        format!("KV_{prefix}-nodes"),
    ];
    for name in partitions.chain(others) {
        match connection.js.delete_stream(&name).await {
            Ok(_) => {}
            Err(e) if is_missing(&e) => {}
            Err(e) => {
                let why = error_chain(&e);
                return Err(Error::Unavailable(format!(
                    "stream {name} cannot be removed: {why}"
                )));
            }
        }
    }
    Ok(())
}

/// Whether deleting a stream failed because it does not exist.
fn is_missing(e: &DeleteStreamError) -> bool {
    matches!(e.kind(), DeleteStreamErrorKind::JetStream(e) if e.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_where_everything_is_and_what_to_do() {
        let of = |state| {
            Migration::new(
                state,
                7,
                "/var/lib/here".into(),
                Timestamp::from_secs(1_700_000_000),
            )
        };
        let text = of(MigrationState::Moved).refusal().to_string();
        for part in ["/var/lib/here", "2023-11-14T22:13:20", "embedded", "--undo"] {
            assert!(text.contains(part), "{text}");
        }
        let text = of(MigrationState::Copying).refusal().to_string();
        for part in ["/var/lib/here", "has not ended", "--to jetstream", "--undo"] {
            assert!(text.contains(part), "{text}");
        }
        let text = of(MigrationState::Leaving).refusal().to_string();
        for part in ["/var/lib/here", "has not ended", "--to embedded", "--undo"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(of(MigrationState::Moved).is_with(7) && !of(MigrationState::Moved).is_with(8));
    }
}
