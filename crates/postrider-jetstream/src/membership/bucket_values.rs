//! Values of the bucket's keys.

use super::decide::{NodeId, PartitionHolder};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Subject of a key of the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketKey {
    Node(NodeId),
    Partition(u8),
}

impl BucketKey {
    pub fn parse(key: &str) -> Option<BucketKey> {
        let (kind, name) = key.split_once('.')?;
        match kind {
            "node" => NodeId::parse(name).map(BucketKey::Node),
            "part" if name.len() == 2 => name.parse().ok().map(BucketKey::Partition),
            _ => None,
        }
    }
}

impl std::fmt::Display for BucketKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BucketKey::Node(node) => write!(f, "node.{node}"),
            BucketKey::Partition(number) => write!(f, "part.{number:02}"),
        }
    }
}

/// Backlog of a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedBacklog {
    pub waiting: u64,
    pub retrying: u64,
    pub letters: u64,
}

/// Counters of a node since its process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeCounts {
    pub takeovers: u64,
    pub fenced: u64,
    pub redelivered: u64,
    pub forwarded: u64,
}

/// A heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatRecord {
    #[serde(with = "hex")]
    pub process: u64,
    /// Number of processes that have run as this node.
    pub incarnation: u64,
    pub beat: u64,
    pub name: String,
    pub url: String,
    pub version: String,
    /// Nanoseconds of the node's own clock.
    pub started: i64,
    #[serde(default)]
    pub draining: bool,
    /// The catalog version that is applied at the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub catalogue: Option<u64>,
    /// The partitions that the node serves, with the backlog of each.
    #[serde(default)]
    pub serves: BTreeMap<u8, ReportedBacklog>,
    #[serde(default)]
    pub counts: NodeCounts,
    /// Further metrics of the node.
    #[serde(default)]
    pub report: BTreeMap<String, f64>,
}

/// Ownership of a partition, as stored in its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnershipRecord {
    /// `None` if the partition is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    #[serde(with = "hex")]
    process: u64,
    /// Makes each value different from all earlier ones.
    nonce: u64,
    /// Revision of the swap that took the partition, if it is not this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    epoch: Option<u64>,
}

impl OwnershipRecord {
    pub fn by(holder: PartitionHolder, nonce: u64, epoch: Option<u64>) -> OwnershipRecord {
        OwnershipRecord {
            node: Some(holder.node.to_string()),
            process: holder.process,
            nonce,
            epoch,
        }
    }

    /// A partition freed by `holder`.
    pub fn free(holder: PartitionHolder, nonce: u64) -> OwnershipRecord {
        OwnershipRecord {
            node: None,
            process: holder.process,
            nonce,
            epoch: None,
        }
    }

    pub fn holder(&self) -> Option<PartitionHolder> {
        let node = NodeId::parse(self.node.as_deref()?)?;
        Some(PartitionHolder {
            node,
            process: self.process,
        })
    }

    pub fn epoch(&self, revision: u64) -> u64 {
        self.epoch.unwrap_or(revision)
    }
}

pub fn write<T: Serialize>(value: &T) -> Bytes {
    serde_json::to_vec(value)
        .expect("numbers and text with text for keys")
        .into()
}

/// `None` for an invalid value: a key that somebody edited by hand must not stop a cluster.
pub fn read<'b, T: Deserialize<'b>>(bytes: &'b [u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

/// Hexadecimal text for 64-bit numbers, which JSON cannot represent safely.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{number:016x}"))
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_written() {
        for key in [
            BucketKey::Node(NodeId(0xab)),
            BucketKey::Node(NodeId(u64::MAX)),
            BucketKey::Partition(7),
            BucketKey::Partition(63),
        ] {
            assert_eq!(BucketKey::parse(&key.to_string()), Some(key));
        }
        assert_eq!(BucketKey::Partition(7).to_string(), "part.07");
        for other in [
            "cluster",
            "secret.x",
            "node.",
            "node.7",
            "part.7",
            "part.xx",
            "node.+00000000000000a",
        ] {
            assert_eq!(BucketKey::parse(other), None, "{other}");
        }
    }

    #[test]
    fn values_are_read_as_written() {
        let me = PartitionHolder {
            node: NodeId(7),
            process: u64::MAX,
        };
        let owned = OwnershipRecord::by(me, 3, None);
        let again: OwnershipRecord = read(&write(&owned)).unwrap();
        assert_eq!((again.holder(), again.epoch(12)), (Some(me), 12));
        let confirmed: OwnershipRecord = read(&write(&OwnershipRecord::by(me, 4, Some(12)))).unwrap();
        assert_eq!(confirmed.epoch(15), 12);
        let free: OwnershipRecord = read(&write(&OwnershipRecord::free(me, 5))).unwrap();
        assert_eq!(free.holder(), None);
        let beat = HeartbeatRecord {
            process: u64::MAX - 1,
            name: "a".into(),
            serves: BTreeMap::from([(7, ReportedBacklog::default())]),
            report: BTreeMap::from([("publishedPerSec".into(), 1.5)]),
            ..HeartbeatRecord::default()
        };
        assert_eq!(read::<HeartbeatRecord>(&write(&beat)).unwrap(), beat);
        assert_eq!(read::<HeartbeatRecord>(b"{}"), None);
    }
}
