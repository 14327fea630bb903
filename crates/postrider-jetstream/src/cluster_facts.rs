//! Facts that all nodes of a cluster share, decided once by the first node to start.

use crate::bucket::{Bucket, SwapOutcome};
use crate::sealer::ValueSealer;
use bytes::Bytes;
use postrider_core::ids::Secret;
use postrider_core::time::Timestamp;
use postrider_store::Error;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Format of streams and keys. A cluster with another format is refused.
pub const FORMAT: u32 = 1;
const KEY: &str = "cluster";
/// Number of attempts to agree before the bucket counts as unavailable.
const TRIES: u32 = 20;
const TRY_AGAIN: Duration = Duration::from_millis(250);
/// Maximum size of a secret.
const SECRET_BYTES_MAX: usize = 64 << 10;

/// The facts of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterFacts {
    pub format: u32,
    pub partitions: u8,
    /// The cluster's unique number.
    pub identity: u64,
    pub created: Timestamp,
}

#[derive(Serialize, Deserialize)]
struct ClusterFactsRecord {
    format: u32,
    #[serde(default)]
    partitions: u8,
    #[serde(default)]
    identity: String,
    #[serde(default)]
    created: i64,
}

impl ClusterFacts {
    fn write(&self) -> Bytes {
        let written = ClusterFactsRecord {
            format: self.format,
            partitions: self.partitions,
            identity: format!("{:016x}", self.identity),
            created: self.created.nanos(),
        };
        serde_json::to_vec(&written).expect("numbers and text").into()
    }

    fn read(bytes: &[u8]) -> Result<ClusterFacts, Error> {
        let wrong = || {
            Error::Corrupt(format!(
                "key {KEY} of the bucket does not say what cluster this is"
            ))
        };
        let written: ClusterFactsRecord = serde_json::from_slice(bytes).map_err(|_| wrong())?;
        if written.format != FORMAT {
            return Err(Error::Corrupt(format!(
                "this cluster is kept in format {}, but this program knows format {FORMAT}: run the program that \
                 made it, or a later one",
                written.format
            )));
        }
        let identity = u64::from_str_radix(&written.identity, 16).map_err(|_| wrong())?;
        if written.partitions == 0 {
            return Err(wrong());
        }
        Ok(ClusterFacts {
            format: written.format,
            partitions: written.partitions,
            identity,
            created: Timestamp::from_nanos(written.created),
        })
    }

    /// Whether a node configured with this number of partitions may join the cluster.
    fn check(self, partitions: u8) -> Result<ClusterFacts, Error> {
        if self.partitions == partitions {
            return Ok(self);
        }
        Err(Error::Corrupt(format!(
            "this cluster was made with {} partitions, but this node is set up with {partitions}: the number is \
             fixed when a cluster starts for the first time",
            self.partitions
        )))
    }

    /// The facts of the cluster, if it has been started before.
    pub async fn of(bucket: &Bucket) -> Result<Option<ClusterFacts>, Error> {
        let found = bucket.read(KEY).await?.and_then(|found| found.value);
        found.map(|bytes| ClusterFacts::read(&bytes)).transpose()
    }

    /// The facts of the cluster; `new` if there are none yet.
    pub async fn agree(bucket: &Bucket, new: ClusterFacts) -> Result<ClusterFacts, Error> {
        let partitions = new.partitions;
        let agreed = get_or_put(bucket, KEY, new.write()).await?;
        ClusterFacts::read(&agreed)?.check(partitions)
    }
}

/// A secret shared by all nodes; if there is none yet, `new` creates it. A value that is stored
/// unsealed or under an earlier key is sealed again.
pub async fn secret(
    bucket: &Bucket,
    sealer: &ValueSealer,
    name: &str,
    new: impl FnOnce() -> Secret,
) -> Result<Secret, Error> {
    let key = format!("secret.{name}");
    let valid = !name.is_empty()
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if !valid {
        return Err(Error::Corrupt(format!("{name:?} cannot name a secret")));
    }
    let found = attempt(|| bucket.read(&key)).await?;
    let found = found.and_then(|found| Some((found.value?, found.revision)));
    let stored = match found {
        Some((value, revision)) if sealer.wants_to_seal(&value) => {
            let plain = sealer.open_key(&key, &value)?.into_owned();
            let sealed = sealer.close(&key, plain);
            // If another node was faster, it has stored an equivalent value.
            attempt(|| bucket.swap(&key, sealed.clone().into(), revision)).await?;
            value
        }
        Some((value, _)) => value,
        None => {
            let new = new();
            if new.expose().is_empty() || new.expose().len() > SECRET_BYTES_MAX {
                return Err(Error::Corrupt(format!(
                    "secret {name} must have 1 to {SECRET_BYTES_MAX} bytes"
                )));
            }
            let sealed = sealer.close(&key, new.expose().into());
            get_or_put(bucket, &key, Bytes::from(sealed)).await?
        }
    };
    let known = sealer.open_key(&key, &stored)?;
    String::from_utf8(known.into_owned())
        .map(Secret::new)
        .map_err(|_| Error::Corrupt(format!("secret {name} of the bucket is not text")))
}

/// The value of a key; stores and returns `new` if there is none.
async fn get_or_put(bucket: &Bucket, key: &str, new: Bytes) -> Result<Bytes, Error> {
    attempt(|| async {
        let mut expected = 0;
        loop {
            match bucket.swap(key, new.clone(), expected).await? {
                SwapOutcome::Stored(_) => return Ok(new.clone()),
                SwapOutcome::Refused(Some(found)) => match found.value {
                    Some(value) => return Ok(value),
                    None => expected = found.revision,
                },
                SwapOutcome::Refused(None) => {
                    return Err(Error::Unavailable(format!("key {key} could not be made")));
                }
            }
        }
    })
    .await
}

/// Retries because a cluster that is just being created has no leader for a moment.
async fn attempt<T, F: Future<Output = Result<T, Error>>>(mut one: impl FnMut() -> F) -> Result<T, Error> {
    let mut tries = 1;
    loop {
        match one().await {
            Err(Error::Unavailable(_)) if tries < TRIES => tries += 1,
            done => return done,
        }
        crate::fenced_stream::sleep(TRY_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> ClusterFacts {
        ClusterFacts {
            format: FORMAT,
            partitions: 8,
            identity: 0xfeed_0000_0000_0001,
            created: Timestamp::from_secs(1_700_000_000),
        }
    }

    #[test]
    fn facts_are_read_as_written() {
        assert_eq!(ClusterFacts::read(&facts().write()).unwrap(), facts());
        for wrong in [
            "",
            "{}",
            "{\"format\":1}",
            "{\"format\":1,\"partitions\":0,\"identity\":\"1\"}",
            "[]",
        ] {
            assert!(ClusterFacts::read(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn another_cluster_is_refused_with_the_reason() {
        let text = facts().check(16).unwrap_err().to_string();
        assert!(text.contains("8 partitions") && text.contains("16"), "{text}");
        let later = br#"{"format":2,"something":"else"}"#;
        let text = ClusterFacts::read(later).unwrap_err().to_string();
        assert!(text.contains("format 2") && text.contains("format 1"), "{text}");
        assert_eq!(facts().check(8).unwrap(), facts());
    }
}
