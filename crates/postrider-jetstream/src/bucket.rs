//! The key-value bucket in which the nodes of a cluster find each other, with compare-and-swap on
//! its keys.

use crate::connection::{NatsConnection, error_chain};
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{CreateKeyValueErrorKind, GetStreamErrorKind, PublishErrorKind};
use async_nats::jetstream::kv::{self, Operation};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use postrider_store::Error;
use std::time::Duration;

/// Interval of looking up a change whose outcome is unknown.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Number of attempts to open a new bucket, which has no leader at first.
const OPEN_TRIES: u32 = 50;

/// The state of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketEntry {
    pub key: String,
    /// `None` if the key was deleted.
    pub value: Option<Bytes>,
    pub revision: u64,
}

/// The outcome of a compare-and-swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwapOutcome {
    Stored(u64),
    /// The key has another revision; contains the current state.
    Refused(Option<BucketEntry>),
}

#[derive(Clone)]
pub struct Bucket {
    connection: NatsConnection,
    store: kv::Store,
}

impl Bucket {
    /// Opens the cluster's bucket, and creates it if necessary.
    pub async fn open(connection: &NatsConnection) -> Result<Bucket, Error> {
        let name = format!("{}-nodes", connection.names.prefix());
        let mut tries = 0;
        let store = loop {
            if let Ok(store) = connection.asking.get_key_value(&name).await {
                break store;
            }
            let config = kv::Config {
                bucket: name.clone(),
                description: "The nodes of a Postrider cluster and what they share".into(),
                history: 1,
                num_replicas: connection.replicas,
                ..kv::Config::default()
            };
            match connection.js.create_key_value(config).await {
                Ok(_) => {}
                // Nodes that start together create it concurrently, and a new bucket has no leader
                // for a moment.
                Err(e) if tries == OPEN_TRIES || e.kind() == CreateKeyValueErrorKind::InvalidStoreName => {
                    let reason = error_chain(&e);
                    return Err(Error::Unavailable(format!(
                        "bucket {name} cannot be made: {reason}"
                    )));
                }
                Err(_) => crate::fenced_stream::sleep(LOOK_AGAIN).await,
            }
            tries += 1;
        };
        let bucket = Bucket {
            connection: connection.clone(),
            store,
        };
        Ok(bucket)
    }

    /// Whether the bucket exists.
    pub async fn exists(connection: &NatsConnection) -> Result<bool, Error> {
        let name = format!("KV_{}-nodes", connection.names.prefix());
        match connection.asking.get_stream(&name).await {
            Ok(_) => Ok(true),
            Err(e) => match e.kind() {
                GetStreamErrorKind::JetStream(e) if e.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                    Ok(false)
                }
                _ => Err(Error::Unavailable(format!(
                    "the bucket cannot be looked for: {}",
                    error_chain(&e)
                ))),
            },
        }
    }

    fn subject(&self, key: &str) -> String {
        format!("{}{key}", self.store.prefix)
    }

    /// The current state of a key according to the leader.
    pub async fn read(&self, key: &str) -> Result<Option<BucketEntry>, Error> {
        match self
            .store
            .stream
            .get_last_raw_message_by_subject(&self.subject(key))
            .await
        {
            Ok(message) => {
                let deleted = message.headers.get("KV-Operation").is_some();
                Ok(Some(BucketEntry {
                    key: key.into(),
                    value: (!deleted).then_some(message.payload),
                    revision: message.sequence,
                }))
            }
            Err(e) if e.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
            Err(e) => Err(Error::Unavailable(format!(
                "key {key} cannot be read: {}",
                error_chain(&e)
            ))),
        }
    }

    /// Sets a key unconditionally. `Err` means that it is unknown whether the value is or will be
    /// stored.
    pub async fn put(&self, key: &str, value: Bytes) -> Result<u64, Error> {
        let message = PublishMessage::build().payload(value);
        self.publish(key, message)
            .await
            .map_err(|(_, reason)| Error::Unavailable(reason))
    }

    /// Marks a key as deleted, unconditionally.
    pub async fn delete(&self, key: &str) -> Result<u64, Error> {
        let message = PublishMessage::build().header("KV-Operation", "DEL");
        self.publish(key, message)
            .await
            .map_err(|(_, reason)| Error::Unavailable(reason))
    }

    /// Marks a key as deleted if it still has this revision.
    pub async fn delete_if(&self, key: &str, revision: u64) -> Result<u64, Error> {
        let message = PublishMessage::build()
            .header("KV-Operation", "DEL")
            .expected_last_subject_sequence(revision);
        self.publish(key, message)
            .await
            .map_err(|(_, reason)| Error::Unavailable(reason))
    }

    /// Sets a key if it has the revision `expected`, where 0 means that the key has never existed.
    /// The value must differ from every other value ever offered for this key, because it
    /// identifies the change when an acknowledgement is lost. `Err` means that the outcome is
    /// unknown: the value may be stored later.
    pub async fn swap(&self, key: &str, value: Bytes, expected: u64) -> Result<SwapOutcome, Error> {
        let message = PublishMessage::build()
            .payload(value.clone())
            .expected_last_subject_sequence(expected);
        match self.publish(key, message).await {
            Ok(revision) => return Ok(SwapOutcome::Stored(revision)),
            Err((kind, reason)) => tracing::debug!(key, %kind, reason, "a change was not acknowledged"),
        }
        // Errors are ambiguous and an acknowledgement may be lost, so only the stored value
        // decides.
        Ok(match self.read(key).await? {
            Some(found) if found.value.as_ref() == Some(&value) => SwapOutcome::Stored(found.revision),
            found => SwapOutcome::Refused(found),
        })
    }

    async fn publish(&self, key: &str, message: PublishMessage) -> Result<u64, (PublishErrorKind, String)> {
        let js = &self.connection.js;
        let tell = |e: async_nats::jetstream::context::PublishError| {
            (
                e.kind(),
                format!("key {key} was not acknowledged: {}", error_chain(&e)),
            )
        };
        let acknowledged = js.send_publish(self.subject(key), message).await.map_err(tell)?;
        Ok(acknowledged.await.map_err(tell)?.sequence)
    }

    /// The state of all keys that are not deleted.
    pub async fn all(&self) -> Result<Vec<BucketEntry>, Error> {
        let unread = |e: &(dyn std::error::Error + 'static)| {
            Error::Unavailable(format!("the bucket cannot be read: {}", error_chain(e)))
        };
        let mut keys = self.store.keys().await.map_err(|e| unread(&e))?;
        let mut all = Vec::new();
        while let Some(key) = keys.next().await {
            let key = key.map_err(|e| unread(&e))?;
            all.extend(self.read(&key).await?.filter(|found| found.value.is_some()));
        }
        Ok(all)
    }

    /// The state of all keys, followed by every change in the order of storage. After a reconnect
    /// entries may be repeated, and of several changes of a key only the last may appear; compare
    /// revisions.
    pub async fn watch(&self) -> Result<impl Stream<Item = BucketEntry> + Unpin + Send + use<>, Error> {
        let watch = self.store.watch_with_history(">").await;
        let watch = watch
            .map_err(|e| Error::Unavailable(format!("the bucket cannot be watched: {}", error_chain(&e))))?;
        Ok(Box::pin(watch.filter_map(|entry| async {
            match entry {
                Ok(entry) => Some(BucketEntry {
                    value: (entry.operation == Operation::Put).then_some(entry.value),
                    key: entry.key,
                    revision: entry.revision,
                }),
                // The watch reconnects by itself.
                Err(e) => {
                    tracing::debug!(reason = error_chain(&e), "watching the bucket");
                    None
                }
            }
        })))
    }

    /// Name of the stream that holds the bucket.
    pub fn stream_name(&self) -> &str {
        &self.store.stream_name
    }
}
