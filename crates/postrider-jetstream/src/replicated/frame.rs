//! Encoding of the messages of a replicated state.
//!
//! A version, a kind, the author, and then depending on the kind: commits, a part of a commit that
//! is too long for one message, a part of a snapshot, or the list of a snapshot's parts. Numbers
//! are encoded with variable length.

use postrider_store::record::batch::put;

const VERSION: u8 = 1;
const COMMITS: u8 = 0;
const PART: u8 = 1;
const CHUNK: u8 = 2;
const MANIFEST: u8 = 3;

/// Upper bound of the bytes of a message besides its commits, and of a commit besides its records.
pub(super) const HEAD_BYTES: usize = 32;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplicationMessage<'a> {
    Commits {
        by: u64,
        commits: Vec<EncodedCommit<'a>>,
    },
    /// A part of a commit. Parts come in order; the commit takes effect with the last.
    Part {
        by: u64,
        number: u64,
        index: u64,
        last: bool,
        bytes: &'a [u8],
    },
    /// A part of the snapshot that was taken after the message `at`.
    Chunk {
        by: u64,
        at: u64,
        index: u64,
        bytes: &'a [u8],
    },
    Manifest(ReplicaManifest),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct EncodedCommit<'a> {
    /// Increases with every commit of the same author.
    pub number: u64,
    pub records: Vec<&'a [u8]>,
}

/// The location of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplicaManifest {
    pub by: u64,
    pub at: u64,
    /// Sequences of the messages that contain its parts.
    pub chunks: Vec<u64>,
    pub bytes: u64,
}

fn begin(kind: u8, by: u64, room: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD_BYTES + room);
    out.extend_from_slice(&[VERSION, kind]);
    put(&mut out, by);
    out
}

/// Encodes the records of a commit as they appear in a message.
pub(super) fn encode_records(records: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::with_capacity(8 + records.iter().map(|one| one.len() + 5).sum::<usize>());
    put(&mut out, records.len() as u64);
    for record in records {
        put(&mut out, record.len() as u64);
        out.extend_from_slice(record);
    }
    out
}

/// `commits`: number and encoded records of each.
pub(super) fn encode_commits(by: u64, commits: &[(u64, &[u8])]) -> Vec<u8> {
    let room = commits.iter().map(|(_, records)| records.len() + 16).sum();
    let mut out = begin(COMMITS, by, room);
    put(&mut out, commits.len() as u64);
    for (number, records) in commits {
        put(&mut out, *number);
        out.extend_from_slice(records);
    }
    out
}

pub(super) fn encode_part(by: u64, number: u64, index: u64, last: bool, bytes: &[u8]) -> Vec<u8> {
    let mut out = begin(PART, by, bytes.len());
    put(&mut out, number);
    put(&mut out, index);
    out.push(u8::from(last));
    out.extend_from_slice(bytes);
    out
}

pub(super) fn encode_chunk(by: u64, at: u64, index: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = begin(CHUNK, by, bytes.len());
    put(&mut out, at);
    put(&mut out, index);
    out.extend_from_slice(bytes);
    out
}

pub(super) fn encode_manifest(manifest: &ReplicaManifest) -> Vec<u8> {
    let mut out = begin(MANIFEST, manifest.by, manifest.chunks.len() * 10);
    put(&mut out, manifest.at);
    put(&mut out, manifest.bytes);
    put(&mut out, manifest.chunks.len() as u64);
    for chunk in &manifest.chunks {
        put(&mut out, *chunk);
    }
    out
}

/// `None` if the message cannot be decoded.
pub(super) fn decode(bytes: &[u8]) -> Option<ReplicationMessage<'_>> {
    let mut rest = ByteReader(bytes);
    if rest.byte()? != VERSION {
        return None;
    }
    let kind = rest.byte()?;
    let by = rest.number()?;
    match kind {
        COMMITS => {
            let count = rest.count()?;
            let mut commits = Vec::with_capacity(count);
            for _ in 0..count {
                commits.push(EncodedCommit {
                    number: rest.number()?,
                    records: rest.records()?,
                });
            }
            rest.0
                .is_empty()
                .then_some(ReplicationMessage::Commits { by, commits })
        }
        PART => Some(ReplicationMessage::Part {
            by,
            number: rest.number()?,
            index: rest.number()?,
            last: rest.byte()? != 0,
            bytes: rest.0,
        }),
        CHUNK => Some(ReplicationMessage::Chunk {
            by,
            at: rest.number()?,
            index: rest.number()?,
            bytes: rest.0,
        }),
        MANIFEST => {
            let (at, bytes) = (rest.number()?, rest.number()?);
            let chunks = (0..rest.count()?).map(|_| rest.number()).collect::<Option<_>>()?;
            Some(ReplicationMessage::Manifest(ReplicaManifest {
                by,
                at,
                chunks,
                bytes,
            }))
        }
        _ => None,
    }
}

/// Decodes the records of a commit that was joined from its parts.
pub(super) fn decode_records(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut rest = ByteReader(bytes);
    let records = rest.records()?;
    rest.0.is_empty().then_some(records)
}

/// The bytes that are left to read.
pub(crate) struct ByteReader<'a>(pub &'a [u8]);

impl<'a> ByteReader<'a> {
    pub fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    pub fn number(&mut self) -> Option<u64> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            n |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(n);
            }
        }
        None
    }

    /// A count of items that take at least one byte each, so that damaged input cannot cause a huge
    /// allocation.
    pub fn count(&mut self) -> Option<usize> {
        let n = self.number()? as usize;
        (n <= self.0.len()).then_some(n)
    }

    /// Bytes preceded by their length.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.count()?;
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        Some(bytes)
    }

    fn records(&mut self) -> Option<Vec<&'a [u8]>> {
        let count = self.count()?;
        (0..count).map(|_| self.bytes()).collect()
    }
}

/// Appends bytes preceded by their length.
pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(kind: u8, by: u64, numbers: Vec<u64>, records: &[Vec<u8>]) -> Vec<u8> {
        let encoded = encode_records(records);
        match kind {
            0 => {
                let commits: Vec<_> = numbers.iter().map(|n| (*n, encoded.as_slice())).collect();
                encode_commits(by, &commits)
            }
            1 => encode_part(by, 7, 3, by.is_multiple_of(2), &encoded),
            2 => encode_chunk(by, 9, 4, &encoded),
            _ => encode_manifest(&ReplicaManifest {
                by,
                at: 5,
                chunks: numbers,
                bytes: 1 << 40,
            }),
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            kind in 0u8..4,
            by: u64,
            numbers in prop::collection::vec(any::<u64>(), 0..5),
            records in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..5),
        ) {
            let bytes = message(kind, by, numbers.clone(), &records);
            let encoded = encode_records(&records);
            let slices: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(decode_records(&encoded), Some(slices.clone()));
            let expected = match kind {
                0 => ReplicationMessage::Commits {
                    by,
                    commits: numbers.iter().map(|n| EncodedCommit { number: *n, records: slices.clone() }).collect(),
                },
                1 => ReplicationMessage::Part { by, number: 7, index: 3, last: by.is_multiple_of(2), bytes: &encoded },
                2 => ReplicationMessage::Chunk { by, at: 9, index: 4, bytes: &encoded },
                _ => ReplicationMessage::Manifest(ReplicaManifest { by, at: 5, chunks: numbers, bytes: 1 << 40 }),
            };
            prop_assert_eq!(decode(&bytes), Some(expected));
        }

        #[test]
        fn damaged_messages_do_no_harm(
            kind in 0u8..4,
            records in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..5),
            at: prop::sample::Index,
            to: u8,
            end: prop::sample::Index,
        ) {
            let mut bytes = message(kind, 1 << 60, vec![1, 2], &records);
            let place = at.index(bytes.len());
            bytes[place] = to;
            bytes.truncate(end.index(bytes.len()) + 1);
            let _ = decode(&bytes);
            let _ = decode_records(&bytes);
        }
    }
}
