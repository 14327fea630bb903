//! Values of the bucket's keys.

use super::decide::{Holder, NodeId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Subject of a key of the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Node(NodeId),
    Partition(u8),
}

impl Key {
    pub fn parse(key: &str) -> Option<Key> {
        let (kind, name) = key.split_once('.')?;
        match kind {
            "node" => NodeId::parse(name).map(Key::Node),
            "part" if name.len() == 2 => name.parse().ok().map(Key::Partition),
            _ => None,
        }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Key::Node(node) => write!(f, "node.{node}"),
            Key::Partition(number) => write!(f, "part.{number:02}"),
        }
    }
}

/// Backlog of a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    pub waiting: u64,
    pub retrying: u64,
    pub letters: u64,
}

/// Counters of a node since its process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Counts {
    pub takeovers: u64,
    pub fenced: u64,
    pub redelivered: u64,
    pub forwarded: u64,
}

/// A heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Beat {
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
    pub serves: BTreeMap<u8, Waiting>,
    #[serde(default)]
    pub counts: Counts,
    /// Further metrics of the node.
    #[serde(default)]
    pub report: BTreeMap<String, f64>,
}

/// Ownership of a partition, as stored in its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
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

impl Owned {
    pub fn by(holder: Holder, nonce: u64, epoch: Option<u64>) -> Owned {
        Owned {
            node: Some(holder.node.to_string()),
            process: holder.process,
            nonce,
            epoch,
        }
    }

    /// A partition freed by `holder`.
    pub fn free(holder: Holder, nonce: u64) -> Owned {
        Owned {
            node: None,
            process: holder.process,
            nonce,
            epoch: None,
        }
    }

    pub fn holder(&self) -> Option<Holder> {
        let node = NodeId::parse(self.node.as_deref()?)?;
        Some(Holder {
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
            Key::Node(NodeId(0xab)),
            Key::Node(NodeId(u64::MAX)),
            Key::Partition(7),
            Key::Partition(63),
        ] {
            assert_eq!(Key::parse(&key.to_string()), Some(key));
        }
        assert_eq!(Key::Partition(7).to_string(), "part.07");
        for other in [
            "cluster",
            "secret.x",
            "node.",
            "node.7",
            "part.7",
            "part.xx",
            "node.+00000000000000a",
        ] {
            assert_eq!(Key::parse(other), None, "{other}");
        }
    }

    #[test]
    fn values_are_read_as_written() {
        let me = Holder {
            node: NodeId(7),
            process: u64::MAX,
        };
        let owned = Owned::by(me, 3, None);
        let again: Owned = read(&write(&owned)).unwrap();
        assert_eq!((again.holder(), again.epoch(12)), (Some(me), 12));
        let confirmed: Owned = read(&write(&Owned::by(me, 4, Some(12)))).unwrap();
        assert_eq!(confirmed.epoch(15), 12);
        let free: Owned = read(&write(&Owned::free(me, 5))).unwrap();
        assert_eq!(free.holder(), None);
        let beat = Beat {
            process: u64::MAX - 1,
            name: "a".into(),
            serves: BTreeMap::from([(7, Waiting::default())]),
            report: BTreeMap::from([("publishedPerSec".into(), 1.5)]),
            ..Beat::default()
        };
        assert_eq!(read::<Beat>(&write(&beat)).unwrap(), beat);
        assert_eq!(read::<Beat>(b"{}"), None);
    }
}
