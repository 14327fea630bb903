//! Binary form of a record in the log, described in docs/data.md.
//!
//! A record is a header of fixed size and a payload. Each has its own checksum, so that a reader
//! can trust the length before it has read the payload, and can find the next record after a
//! damaged one.

use postrider_core::ids::{Position, SubscriptionId};
pub use postrider_store::record::batch::{VarintReader, decode_batch, encode_batch_head, put};

pub const HEADER_LEN: usize = 40;
pub const MAGIC: [u8; 4] = *b"PRr1";
/// Upper bound of a payload: a publish request has at most a few megabytes.
pub const PAYLOAD_MAX: usize = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// A publish request.
    Batch,
    /// Progress of subscriptions.
    Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    pub kind: RecordKind,
    pub payload_len: u32,
    pub payload_crc: u32,
    /// Position of the first event; for other records, the position of the next event.
    pub first: Position,
    /// Number of events in the record.
    pub count: u32,
    /// Number of the group commit that wrote the record. Nothing of a later commit is written
    /// before the earlier one is known to be on disk.
    pub commit: u64,
    /// Whether this is the last record of its commit.
    pub ends_commit: bool,
}

impl RecordHeader {
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = match self.kind {
            RecordKind::Batch => 1,
            RecordKind::Progress => 2,
        };
        out[5] = u8::from(self.ends_commit);
        out[8..12].copy_from_slice(&self.payload_len.to_le_bytes());
        out[12..16].copy_from_slice(&self.payload_crc.to_le_bytes());
        out[16..24].copy_from_slice(&self.first.0.to_le_bytes());
        out[24..28].copy_from_slice(&self.count.to_le_bytes());
        out[28..36].copy_from_slice(&self.commit.to_le_bytes());
        let crc = crc32fast::hash(&out[..36]);
        out[36..40].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// `None` unless the bytes are a header with a valid checksum.
    pub fn decode(bytes: &[u8]) -> Option<RecordHeader> {
        let bytes: &[u8; HEADER_LEN] = bytes.get(..HEADER_LEN)?.try_into().ok()?;
        if bytes[0..4] != MAGIC {
            return None;
        }
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if u32_at(36) != crc32fast::hash(&bytes[..36]) || u32_at(8) as usize > PAYLOAD_MAX {
            return None;
        }
        Some(RecordHeader {
            kind: match bytes[4] {
                1 => RecordKind::Batch,
                2 => RecordKind::Progress,
                _ => return None,
            },
            payload_len: u32_at(8),
            payload_crc: u32_at(12),
            first: Position(u64_at(16)),
            count: u32_at(24),
            commit: u64_at(28),
            ends_commit: bytes[5] & 1 != 0,
        })
    }

    pub fn record_len(&self) -> usize {
        HEADER_LEN + self.payload_len as usize
    }
}

/// Pseudo-subscription in progress records whose frontier is the durable generation of the state
/// database. No real subscription has this id.
pub const STATE_GENERATION: SubscriptionId = SubscriptionId(0);

/// Progress of a subscription: everything below `frontier` is settled except for `open`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubscriptionProgress {
    pub frontier: Position,
    pub open: Vec<Position>,
}

impl SubscriptionProgress {
    /// Appends the encoded progress of a subscription.
    pub fn encode(&self, of: SubscriptionId, out: &mut Vec<u8>) {
        put(out, of.0);
        put(out, self.frontier.0);
        put(out, self.open.len() as u64);
        let mut last = 0;
        for position in &self.open {
            put(out, position.0.wrapping_sub(last));
            last = position.0;
        }
    }

    /// Reads the progress of a subscription; `None` at the end or if the bytes are invalid.
    pub fn decode(reader: &mut VarintReader<'_>) -> Option<(SubscriptionId, SubscriptionProgress)> {
        let of = SubscriptionId(reader.number()?);
        let frontier = Position(reader.number()?);
        let count = reader.count()?;
        let mut last = 0u64;
        let mut open = Vec::with_capacity(count);
        for _ in 0..count {
            last = last.wrapping_add(reader.number()?);
            open.push(Position(last));
        }
        Some((of, SubscriptionProgress { frontier, open }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn progress_survives(of in any::<u64>(), frontier in any::<u64>(), open in prop::collection::btree_set(any::<u64>(), 0..20)) {
            let progress = SubscriptionProgress { frontier: Position(frontier), open: open.into_iter().map(Position).collect() };
            let mut out = Vec::new();
            progress.encode(SubscriptionId(of), &mut out);
            let mut reader = VarintReader::new(&out);
            prop_assert_eq!(SubscriptionProgress::decode(&mut reader), Some((SubscriptionId(of), progress)));
            prop_assert!(reader.is_empty());
        }
    }

    #[test]
    fn a_header_is_checked() {
        let header = RecordHeader {
            kind: RecordKind::Batch,
            payload_len: 5,
            payload_crc: 7,
            first: Position(9),
            count: 2,
            commit: 3,
            ends_commit: true,
        };
        let bytes = header.encode();
        assert_eq!(RecordHeader::decode(&bytes), Some(header));
        for at in 0..HEADER_LEN {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(RecordHeader::decode(&damaged), None, "byte {at}");
        }
    }
}
