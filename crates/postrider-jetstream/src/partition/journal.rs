//! The journal of a partition: records of what became of its deliveries.
//!
//! After a take-over the records are applied to the deliveries like the original changes. Applying a
//! record twice in the same order changes nothing, because a snapshot may include records that are
//! read again after it.

use super::{EVENT_BITS, SEQUENCE_MAX, event_of, place, sequence_of};
use bytes::Bytes;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_store::DeadLetterKey;
use postrider_store::log::LastAttempt;
use postrider_store::record::batch::{VarintReader, put};
use rustc_hash::FxHashMap;

/// The version of journal messages that is written and read.
const VERSION: u8 = 1;
/// Maximum number of deliveries in a record, about 20 KB, so that messages can be split between
/// records even for servers with a small message limit.
const POSITIONS_PER_RECORD_MAX: usize = 1_024;

/// State of a delivery that was attempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptState {
    pub attempts: u32,
    pub last: Option<LastAttempt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalRecord {
    /// Deliveries that have ended: first attempts, and retries with their due times.
    Ended {
        of: SubscriptionId,
        /// First attempts up to here have been claimed at some time; those that wait were claimed
        /// before.
        upto: Option<Position>,
        /// Ordered by position.
        fresh: Vec<Position>,
        retried: Vec<(Timestamp, Position)>,
    },
    /// A delivery is to be retried; `was` is the due time of its last retry, `None` after the first
    /// attempt.
    Retry {
        of: SubscriptionId,
        was: Option<Timestamp>,
        position: Position,
        due: Timestamp,
        tried: AttemptState,
    },
    /// A delivery was given up.
    Letter {
        of: SubscriptionId,
        was: Option<Timestamp>,
        position: Position,
        decided: Timestamp,
        tried: AttemptState,
        reason: GiveUpReason,
    },
    /// Dead letters were written, or finally dropped.
    LettersDone {
        of: SubscriptionId,
        letters: Vec<DeadLetterKey>,
    },
    /// A subscription was closed with all of its deliveries.
    Closed { of: SubscriptionId },
    /// Retries that were claimed. Changes nothing; the next owner counts attempts that are made
    /// twice.
    Again {
        of: SubscriptionId,
        retried: Vec<(Timestamp, Position)>,
    },
    /// The beginning of an owner's epoch.
    Marker { epoch: u64, node: String },
}

/// Changes that are not in the journal yet.
#[derive(Debug, Default)]
pub struct JournalBuffer {
    /// First attempts that ended. No other record of such a delivery precedes or follows, so they
    /// may be written first and together.
    fresh: FxHashMap<SubscriptionId, (Option<Position>, Vec<Position>)>,
    records: Vec<JournalRecord>,
    len: usize,
}

impl JournalBuffer {
    /// Approximate number of deliveries in the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First attempts of `of` have been claimed up to `upto`.
    pub fn touch(&mut self, of: SubscriptionId, upto: Option<Position>) {
        self.fresh.entry(of).or_default().0 = upto;
        self.len += 1;
    }

    pub fn ended(&mut self, of: SubscriptionId, upto: Option<Position>, position: Position) {
        let entry = self.fresh.entry(of).or_default();
        entry.0 = upto;
        entry.1.push(position);
        self.len += 1;
    }

    pub fn push(&mut self, record: JournalRecord) {
        self.len += match &record {
            JournalRecord::Ended { retried, .. } => retried.len(),
            JournalRecord::LettersDone { letters, .. } => letters.len(),
            JournalRecord::Again { retried, .. } => retried.len(),
            _ => 1,
        };
        if let JournalRecord::Closed { of } = record {
            self.fresh.remove(&of);
        }
        self.records.push(record);
    }

    /// Empties the buffer into messages of at most about `bytes_max` each.
    pub fn take(&mut self, bytes_max: usize) -> Vec<Bytes> {
        self.len = 0;
        let mut records = Vec::with_capacity(self.fresh.len() + self.records.len());
        let mut fresh: Vec<_> = std::mem::take(&mut self.fresh).into_iter().collect();
        fresh.sort_unstable_by_key(|(of, _)| *of);
        for (of, (upto, mut positions)) in fresh {
            positions.sort_unstable();
            let mut rest = positions.as_slice();
            loop {
                let (fresh, later) = rest.split_at(rest.len().min(POSITIONS_PER_RECORD_MAX));
                records.push(JournalRecord::Ended {
                    of,
                    upto,
                    fresh: fresh.to_vec(),
                    retried: Vec::new(),
                });
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
        }
        for record in std::mem::take(&mut self.records) {
            match record {
                JournalRecord::LettersDone { of, letters } => {
                    records.extend(letters.chunks(POSITIONS_PER_RECORD_MAX).map(|letters| {
                        let letters = letters.to_vec();
                        JournalRecord::LettersDone { of, letters }
                    }));
                }
                JournalRecord::Ended { of, retried, .. } => {
                    records.extend(retried.chunks(POSITIONS_PER_RECORD_MAX).map(|retried| {
                        JournalRecord::Ended {
                            of,
                            upto: None,
                            fresh: Vec::new(),
                            retried: retried.to_vec(),
                        }
                    }));
                }
                JournalRecord::Again { of, retried } => {
                    records.extend(retried.chunks(POSITIONS_PER_RECORD_MAX).map(|retried| {
                        JournalRecord::Again {
                            of,
                            retried: retried.to_vec(),
                        }
                    }));
                }
                other => records.push(other),
            }
        }
        encode(&records, bytes_max)
    }
}

/// Encodes records into journal messages of at most about `bytes_max` each, in order.
pub fn encode(records: &[JournalRecord], bytes_max: usize) -> Vec<Bytes> {
    let mut messages = Vec::new();
    let mut out = vec![VERSION];
    let mut one = Vec::new();
    for record in records {
        one.clear();
        encode_record(record, &mut one);
        if out.len() > 1 && out.len() + one.len() > bytes_max {
            messages.push(Bytes::from(std::mem::replace(&mut out, vec![VERSION])));
        }
        out.extend_from_slice(&one);
    }
    if out.len() > 1 {
        messages.push(Bytes::from(out));
    }
    messages
}

/// Decodes the records of a partition's journal message; `None` if it is invalid.
pub fn decode(partition: u8, message: &[u8]) -> Option<Vec<JournalRecord>> {
    let (&version, rest) = message.split_first()?;
    if version != VERSION {
        return None;
    }
    let mut reader = VarintReader::new(rest);
    let mut records = Vec::new();
    while !reader.is_empty() {
        records.push(decode_record(partition, &mut reader)?);
    }
    Some(records)
}

fn encode_record(record: &JournalRecord, out: &mut Vec<u8>) {
    match record {
        JournalRecord::Ended {
            of,
            upto,
            fresh,
            retried,
        } => {
            out.push(1);
            put(out, of.0);
            put_maybe(out, upto.map(low));
            put(out, fresh.len() as u64);
            let mut last = 0;
            for position in fresh {
                put_next(out, &mut last, *position);
            }
            put(out, retried.len() as u64);
            for (due, position) in retried {
                put(out, due.nanos() as u64);
                put(out, low(*position));
            }
        }
        JournalRecord::Retry {
            of,
            was,
            position,
            due,
            tried,
        } => {
            out.push(2);
            put(out, of.0);
            put_maybe(out, was.map(|was| was.nanos() as u64));
            put(out, low(*position));
            put(out, due.nanos() as u64);
            put_tried(out, tried);
        }
        JournalRecord::Letter {
            of,
            was,
            position,
            decided,
            tried,
            reason,
        } => {
            out.push(3);
            put(out, of.0);
            put_maybe(out, was.map(|was| was.nanos() as u64));
            put(out, low(*position));
            put(out, decided.nanos() as u64);
            put_tried(out, tried);
            out.push(reason.code());
        }
        JournalRecord::LettersDone { of, letters } => {
            out.push(4);
            put(out, of.0);
            put(out, letters.len() as u64);
            for (decided, position) in letters {
                put(out, decided.nanos() as u64);
                put(out, low(*position));
            }
        }
        JournalRecord::Closed { of } => {
            out.push(5);
            put(out, of.0);
        }
        JournalRecord::Again { of, retried } => {
            out.push(7);
            put(out, of.0);
            put(out, retried.len() as u64);
            for (due, position) in retried {
                put(out, due.nanos() as u64);
                put(out, low(*position));
            }
        }
        JournalRecord::Marker { epoch, node } => {
            out.push(6);
            put(out, *epoch);
            put(out, node.len() as u64);
            out.extend_from_slice(node.as_bytes());
        }
    }
}

fn decode_record(partition: u8, reader: &mut VarintReader<'_>) -> Option<JournalRecord> {
    let kind = reader.number()?;
    if kind == 6 {
        return Some(JournalRecord::Marker {
            epoch: reader.number()?,
            node: reader.text()?.into(),
        });
    }
    let of = SubscriptionId(reader.number()?);
    let record = match kind {
        1 => {
            let upto = match maybe(reader)? {
                Some(upto) => Some(known_place(partition, upto)?),
                None => None,
            };
            let count = reader.count()?;
            let mut last = 0;
            let mut fresh = Vec::with_capacity(count);
            for _ in 0..count {
                fresh.push(next(partition, reader, &mut last)?);
            }
            JournalRecord::Ended {
                of,
                upto,
                fresh,
                retried: times(partition, reader)?,
            }
        }
        2 => JournalRecord::Retry {
            of,
            was: maybe(reader)?.map(time),
            position: known_place(partition, reader.number()?)?,
            due: time(reader.number()?),
            tried: tried(reader)?,
        },
        3 => JournalRecord::Letter {
            of,
            was: maybe(reader)?.map(time),
            position: known_place(partition, reader.number()?)?,
            decided: time(reader.number()?),
            tried: tried(reader)?,
            reason: GiveUpReason::from_code(u8::try_from(reader.number()?).ok()?),
        },
        4 => JournalRecord::LettersDone {
            of,
            letters: times(partition, reader)?,
        },
        5 => JournalRecord::Closed { of },
        7 => JournalRecord::Again {
            of,
            retried: times(partition, reader)?,
        },
        _ => return None,
    };
    Some(record)
}

/// A position without its partition, which is known from the stream.
pub fn low(position: Position) -> u64 {
    sequence_of(position) << EVENT_BITS | u64::from(event_of(position))
}

/// Restores a position of this partition from `low`.
pub fn known_place(partition: u8, low: u64) -> Option<Position> {
    let sequence = low >> EVENT_BITS;
    (sequence <= SEQUENCE_MAX).then(|| place(partition, sequence, (low & ((1 << EVENT_BITS) - 1)) as u32))
}

/// Appends a position that is not below the last one.
pub fn put_next(out: &mut Vec<u8>, last: &mut u64, position: Position) {
    let now = low(position);
    if now >> EVENT_BITS == *last >> EVENT_BITS {
        put(out, (now - *last) << 1);
    } else {
        put(out, ((now >> EVENT_BITS) - (*last >> EVENT_BITS)) << 1 | 1);
        put(out, now & ((1 << EVENT_BITS) - 1));
    }
    *last = now;
}

/// Reads what `put_next` has written.
pub fn next(partition: u8, reader: &mut VarintReader<'_>, last: &mut u64) -> Option<Position> {
    let step = reader.number()?;
    let now = if step & 1 == 0 {
        last.checked_add(step >> 1)?
    } else {
        let sequence = (*last >> EVENT_BITS).checked_add(step >> 1)?;
        let event = reader.number()?;
        if sequence > SEQUENCE_MAX || event >= 1 << EVENT_BITS {
            return None;
        }
        sequence << EVENT_BITS | event
    };
    *last = now;
    known_place(partition, now)
}

pub fn put_tried(out: &mut Vec<u8>, tried: &AttemptState) {
    put(out, u64::from(tried.attempts));
    let Some(last) = tried.last else {
        out.push(0);
        return;
    };
    out.push(if last.status.is_some() { 2 } else { 1 });
    put(out, last.at.nanos() as u64);
    out.push(last.outcome.code());
    if let Some(status) = last.status {
        put(out, u64::from(status));
    }
}

pub fn tried(reader: &mut VarintReader<'_>) -> Option<AttemptState> {
    let attempts = reader.small()?;
    let kind = reader.number()?;
    if kind == 0 {
        return Some(AttemptState { attempts, last: None });
    }
    let at = time(reader.number()?);
    let outcome = Outcome::from_code(u8::try_from(reader.number()?).ok()?);
    let status = match kind {
        1 => None,
        2 => Some(u16::try_from(reader.number()?).ok()?),
        _ => return None,
    };
    let last = Some(LastAttempt { at, outcome, status });
    Some(AttemptState { attempts, last })
}

pub fn time(nanos: u64) -> Timestamp {
    Timestamp::from_nanos(nanos as i64)
}

fn put_maybe(out: &mut Vec<u8>, number: Option<u64>) {
    match number {
        None => out.push(0),
        Some(number) => {
            out.push(1);
            put(out, number);
        }
    }
}

fn maybe(reader: &mut VarintReader<'_>) -> Option<Option<u64>> {
    match reader.number()? {
        0 => Some(None),
        1 => Some(Some(reader.number()?)),
        _ => None,
    }
}

fn times(partition: u8, reader: &mut VarintReader<'_>) -> Option<Vec<(Timestamp, Position)>> {
    let count = reader.count()?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let at = time(reader.number()?);
        times.push((at, known_place(partition, reader.number()?)?));
    }
    Some(times)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use proptest::prelude::*;

    pub const PARTITION: u8 = 7;

    fn position() -> impl Strategy<Value = Position> {
        let sequence = prop_oneof![0..200u64, 0..=SEQUENCE_MAX];
        (sequence, 0..1u32 << EVENT_BITS).prop_map(|(sequence, event)| place(PARTITION, sequence, event))
    }

    fn moment() -> impl Strategy<Value = Timestamp> {
        any::<i64>().prop_map(|nanos| Timestamp::from_nanos(nanos & i64::MAX))
    }

    fn any_tried() -> impl Strategy<Value = AttemptState> {
        let last = (moment(), 0..18u8, any::<Option<u16>>()).prop_map(|(at, outcome, status)| LastAttempt {
            at,
            outcome: Outcome::from_code(outcome),
            status,
        });
        (any::<u32>(), prop::option::of(last)).prop_map(|(attempts, last)| AttemptState { attempts, last })
    }

    fn any_record() -> impl Strategy<Value = JournalRecord> {
        let of = any::<u64>().prop_map(SubscriptionId);
        let timed = || prop::collection::vec((moment(), position()), 0..5);
        prop_oneof![
            (
                of.clone(),
                prop::option::of(position()),
                prop::collection::btree_set(position(), 0..9),
                timed()
            )
                .prop_map(|(of, upto, fresh, retried)| JournalRecord::Ended {
                    of,
                    upto,
                    fresh: fresh.into_iter().collect(),
                    retried
                }),
            (
                of.clone(),
                prop::option::of(moment()),
                position(),
                moment(),
                any_tried()
            )
                .prop_map(|(of, was, position, due, tried)| JournalRecord::Retry {
                    of,
                    was,
                    position,
                    due,
                    tried
                }),
            (
                of.clone(),
                prop::option::of(moment()),
                position(),
                moment(),
                any_tried(),
                0..9u8
            )
                .prop_map(
                    |(of, was, position, decided, tried, reason)| JournalRecord::Letter {
                        of,
                        was,
                        position,
                        decided,
                        tried,
                        reason: GiveUpReason::from_code(reason)
                    }
                ),
            (of.clone(), timed()).prop_map(|(of, letters)| JournalRecord::LettersDone { of, letters }),
            (of.clone(), timed()).prop_map(|(of, retried)| JournalRecord::Again { of, retried }),
            of.prop_map(|of| JournalRecord::Closed { of }),
            (any::<u64>(), "[ -~ä]{0,12}").prop_map(|(epoch, node)| JournalRecord::Marker { epoch, node }),
        ]
    }

    #[test]
    fn a_record_of_very_many_deliveries_is_cut() {
        let retried: Vec<_> = (0..3 * POSITIONS_PER_RECORD_MAX as u64)
            .map(|n| (Timestamp::from_nanos(n as i64), place(PARTITION, n, 0)))
            .collect();
        let of = SubscriptionId(1);
        let fresh = Vec::new();
        let upto = None;
        for record in [
            JournalRecord::Again {
                of,
                retried: retried.clone(),
            },
            JournalRecord::LettersDone {
                of,
                letters: retried.clone(),
            },
            JournalRecord::Ended {
                of,
                upto,
                fresh,
                retried,
            },
        ] {
            let mut buffer = JournalBuffer::default();
            buffer.push(record);
            assert_eq!(buffer.take(1).len(), 3);
            assert!(buffer.is_empty());
        }
    }

    proptest! {
        #[test]
        fn records_survive(records in prop::collection::vec(any_record(), 0..12), bytes_max in 1..400usize) {
            let mut read = Vec::new();
            for message in encode(&records, bytes_max) {
                read.extend(decode(PARTITION, &message).unwrap());
            }
            prop_assert_eq!(read, records);
        }

        #[test]
        fn damaged_messages_never_panic(
            records in prop::collection::vec(any_record(), 1..6),
            changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..4),
            cut in any::<usize>(),
        ) {
            let mut bytes = encode(&records, usize::MAX)[0].to_vec();
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            bytes.truncate(bytes.len() - cut % bytes.len());
            let _ = decode(PARTITION, &bytes);
        }
    }

    #[test]
    fn a_buffer_is_cut_into_messages() {
        let mut buffer = JournalBuffer::default();
        let of = SubscriptionId(4);
        let positions: Vec<Position> = (0..30_000)
            .map(|n| place(PARTITION, 1_000 + n / 3, (n % 3) as u32))
            .collect();
        for position in positions.iter().rev() {
            buffer.ended(of, Some(positions[29_999]), *position);
        }
        buffer.push(JournalRecord::Closed {
            of: SubscriptionId(9),
        });
        assert_eq!(buffer.len(), 30_001);
        let messages = buffer.take(20_000);
        assert!(buffer.is_empty() && messages.len() > 1);
        assert!(messages.iter().all(|message| message.len() <= 20_000));
        let records: Vec<JournalRecord> = messages
            .iter()
            .flat_map(|m| decode(PARTITION, m).unwrap())
            .collect();
        let ended = records.iter().filter_map(|record| match record {
            JournalRecord::Ended { fresh, .. } => Some(fresh.as_slice()),
            _ => None,
        });
        assert_eq!(ended.collect::<Vec<_>>().concat(), positions);
        assert_eq!(
            records.last(),
            Some(&JournalRecord::Closed {
                of: SubscriptionId(9)
            })
        );
        assert!(buffer.take(20_000).is_empty());
    }
}
