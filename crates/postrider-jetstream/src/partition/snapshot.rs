//! Snapshots of a partition's deliveries: written now and then, so that a take-over reads only what
//! came after.

use super::deliveries::{
    DeadLetterState, EventChunk, PartitionDeliveries, PartitionSubscription, ReceivedSecond,
    RetryingDelivery, WaitingDelivery,
};
use super::journal::{known_place, low, next, put_next, put_tried, time, tried};
use bytes::Bytes;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::GiveUpReason;
use postrider_store::record::batch::{VarintReader, put};

const VERSION: u8 = 1;
/// First bytes of the kinds of snapshot messages.
const PART: u8 = 1;
const MANIFEST: u8 = 2;

/// A message of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotMessage {
    Part(Bytes),
    Manifest(SnapshotManifest),
}

/// The last message of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotManifest {
    /// Number of parts that precede it in the chain without interruption.
    pub parts: u64,
    /// Bytes of all parts together.
    pub bytes: u64,
}

/// Splits a snapshot into messages of at most about `bytes_max`.
pub fn cut(snapshot: &[u8], bytes_max: usize) -> Vec<Bytes> {
    let mut messages = Vec::new();
    for part in snapshot.chunks(bytes_max) {
        let mut message = Vec::with_capacity(2 + part.len());
        message.extend_from_slice(&[VERSION, PART]);
        message.extend_from_slice(part);
        messages.push(message.into());
    }
    let mut manifest = vec![VERSION, MANIFEST];
    put(&mut manifest, messages.len() as u64);
    put(&mut manifest, snapshot.len() as u64);
    messages.push(manifest.into());
    messages
}

/// `None` if the bytes are not part of a snapshot that this program can read.
pub fn piece(message: &Bytes) -> Option<SnapshotMessage> {
    if *message.first()? != VERSION {
        return None;
    }
    match *message.get(1)? {
        PART => Some(SnapshotMessage::Part(message.slice(2..))),
        MANIFEST => {
            let mut reader = VarintReader::new(&message[2..]);
            Some(SnapshotMessage::Manifest(SnapshotManifest {
                parts: reader.number()?,
                bytes: reader.number()?,
            }))
        }
        _ => None,
    }
}

/// Encodes the deliveries as if nothing were claimed.
pub fn encode(book: &PartitionDeliveries) -> Vec<u8> {
    let mut out = vec![VERSION];
    put(&mut out, book.chunks.0.len() as u64);
    for (first, chunk) in &book.chunks.0 {
        for number in [*first, chunk.number, chunk.last, chunk.bytes] {
            put(&mut out, number);
        }
    }
    put(&mut out, book.closed_order.len() as u64);
    for of in &book.closed_order {
        put(&mut out, of.0);
    }
    let mut subs: Vec<(&SubscriptionId, &PartitionSubscription)> = book.subs.iter().collect();
    subs.sort_unstable_by_key(|(of, _)| **of);
    put(&mut out, subs.len() as u64);
    for (of, sub) in subs {
        put(&mut out, of.0);
        // 0 is free to mean none: sequences begin with 1.
        put(&mut out, sub.upto.map_or(0, low));
        let (waiting, retrying) = PartitionDeliveries::unclaimed(sub);
        put(&mut out, waiting.len() as u64);
        let (mut last, mut received) = (0, 0);
        for one in waiting {
            put_next(&mut out, &mut last, one.position);
            put_step(&mut out, &mut received, one.received);
        }
        put(&mut out, retrying.len() as u64);
        for ((due, position), retry) in retrying {
            put(&mut out, due.nanos() as u64);
            put(&mut out, low(position));
            put_tried(&mut out, &retry.tried);
            put(&mut out, u64::from(retry.received));
        }
        put(&mut out, sub.letters.len() as u64);
        for ((decided, position), letter) in &sub.letters {
            put(&mut out, decided.nanos() as u64);
            put(&mut out, low(*position));
            put_tried(&mut out, &letter.tried);
            out.push(letter.reason.code());
        }
    }
    out
}

/// Decodes the snapshot of a partition; `None` if it is invalid.
pub fn decode(partition: u8, snapshot: &[u8]) -> Option<PartitionDeliveries> {
    let (&version, rest) = snapshot.split_first()?;
    if version != VERSION {
        return None;
    }
    let mut reader = VarintReader::new(rest);
    let mut book = PartitionDeliveries::default();
    for _ in 0..reader.count()? {
        let first = reader.number()?;
        let chunk = EventChunk {
            number: reader.number()?,
            last: reader.number()?,
            bytes: reader.number()?,
            outstanding: 0,
        };
        book.chunks.0.insert(first, chunk);
    }
    for _ in 0..reader.count()? {
        book.remember_closed(SubscriptionId(reader.number()?));
    }
    for _ in 0..reader.count()? {
        let of = SubscriptionId(reader.number()?);
        let mut sub = PartitionSubscription::default();
        let upto = reader.number()?;
        if upto > 0 {
            sub.upto = Some(known_place(partition, upto)?);
        }
        let (mut last, mut received) = (0, 0);
        for _ in 0..reader.count()? {
            let position = next(partition, &mut reader, &mut last)?;
            let received = step(&mut reader, &mut received)?;
            sub.waiting.push_back(WaitingDelivery { position, received });
        }
        for _ in 0..reader.count()? {
            let due = time(reader.number()?);
            let position = known_place(partition, reader.number()?)?;
            let retry = RetryingDelivery {
                tried: tried(&mut reader)?,
                received: reader.small()?,
            };
            sub.retrying.insert((due, position), retry);
        }
        for _ in 0..reader.count()? {
            let decided = time(reader.number()?);
            let position = known_place(partition, reader.number()?)?;
            let letter = DeadLetterState {
                tried: tried(&mut reader)?,
                reason: GiveUpReason::from_code(u8::try_from(reader.number()?).ok()?),
            };
            sub.letters.insert((decided, position), letter);
        }
        book.restore(of, sub);
    }
    reader.is_empty().then_some(book)
}

fn put_step(out: &mut Vec<u8>, last: &mut ReceivedSecond, now: ReceivedSecond) {
    let step = i64::from(now) - i64::from(*last);
    put(out, (step << 1 ^ step >> 63) as u64);
    *last = now;
}

fn step(reader: &mut VarintReader<'_>, last: &mut ReceivedSecond) -> Option<ReceivedSecond> {
    let step = reader.number()?;
    let step = (step >> 1) as i64 ^ -((step & 1) as i64);
    *last = ReceivedSecond::try_from(i64::from(*last).checked_add(step)?).ok()?;
    Some(*last)
}
