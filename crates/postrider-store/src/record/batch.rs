//! Stored form of a publish request: a head with the events' places in the body and their match
//! sets, followed by the body as received. Numbers are encoded with variable length.

use bytes::Bytes;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers, PublishedBatch};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::time::Timestamp;

/// Appends a number in LEB128, seven bits per byte.
pub fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Reads values that `put` has written.
pub struct VarintReader<'a> {
    bytes: &'a [u8],
}

impl<'a> VarintReader<'a> {
    pub fn new(bytes: &'a [u8]) -> VarintReader<'a> {
        VarintReader { bytes }
    }

    pub fn number(&mut self) -> Option<u64> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.bytes.split_first()?;
            self.bytes = rest;
            n |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(n);
            }
        }
        None
    }

    pub fn small(&mut self) -> Option<u32> {
        u32::try_from(self.number()?).ok()
    }

    pub fn text(&mut self) -> Option<&'a str> {
        let len = self.number()? as usize;
        if len > self.bytes.len() {
            return None;
        }
        let (text, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        std::str::from_utf8(text).ok()
    }

    /// A count of items that take at least one byte each, so that damaged input cannot cause a huge
    /// allocation.
    pub fn count(&mut self) -> Option<usize> {
        let n = self.number()? as usize;
        (n <= self.bytes.len()).then_some(n)
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Number of bytes that have not been read.
    pub fn left(&self) -> usize {
        self.bytes.len()
    }
}

/// Everything of a batch except the body, which follows unchanged in the payload.
pub fn encode_batch_head(batch: &PublishedBatch) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + batch.events.len() * 12);
    match (batch.replay, batch.hops) {
        (0, 0) => put(&mut out, 1),
        (replay, 0) => {
            put(&mut out, 2);
            put(&mut out, u64::from(replay));
        }
        (replay, hops) => {
            put(&mut out, 3);
            put(&mut out, u64::from(replay));
            put(&mut out, u64::from(hops));
        }
    }
    put(&mut out, batch.topic.0);
    put(
        &mut out,
        match batch.schema {
            EventSchema::EventGrid => 0,
            EventSchema::CloudEvent => 1,
            EventSchema::Custom => 2,
        },
    );
    put(&mut out, batch.received.nanos() as u64);
    put(&mut out, batch.publisher.len() as u64);
    out.extend_from_slice(batch.publisher.as_bytes());
    let trace = batch.trace.as_deref().unwrap_or("");
    put(&mut out, trace.len() as u64);
    out.extend_from_slice(trace.as_bytes());
    put(&mut out, batch.matched.len() as u64);
    for set in &batch.matched {
        put(&mut out, set.len() as u64);
        let mut last = 0;
        for id in set {
            put(&mut out, id.0.wrapping_sub(last));
            last = id.0;
        }
    }
    put(&mut out, batch.events.len() as u64);
    let mut end = 0;
    for event in &batch.events {
        put(&mut out, u64::from(event.object.start - end));
        put(&mut out, u64::from(event.object.len));
        end = event.object.start + event.object.len;
        put(&mut out, u64::from(event.matched));
        let flags = u64::from(event.lacks.topic)
            | u64::from(event.lacks.data_version) << 1
            | u64::from(event.lacks.metadata_version) << 2
            | u64::from(!event.data_version.is_empty()) << 3
            | u64::from(!event.topic.is_empty()) << 4;
        put(&mut out, flags);
        for span in [event.data_version, event.topic] {
            if !span.is_empty() {
                put(&mut out, u64::from(span.start - event.object.start));
                put(&mut out, u64::from(span.len));
            }
        }
    }
    put(&mut out, batch.body.len() as u64);
    out
}

/// Decodes the batch in a payload; `None` if the payload is damaged.
pub fn decode_batch(payload: &Bytes) -> Option<PublishedBatch> {
    let mut reader = VarintReader::new(payload);
    let (replay, hops) = match reader.number()? {
        1 => (0, 0),
        2 => (reader.small()?, 0),
        3 => (reader.small()?, reader.small()?),
        _ => return None,
    };
    let topic = TopicId(reader.number()?);
    let schema = match reader.number()? {
        0 => EventSchema::EventGrid,
        1 => EventSchema::CloudEvent,
        2 => EventSchema::Custom,
        _ => return None,
    };
    let received = Timestamp::from_nanos(reader.number()? as i64);
    let publisher = reader.text()?.into();
    let trace = Some(reader.text()?).filter(|t| !t.is_empty()).map(Into::into);
    let sets = reader.count()?;
    let mut matched = Vec::with_capacity(sets);
    for _ in 0..sets {
        let count = reader.count()?;
        let mut last = 0u64;
        let mut set = Vec::with_capacity(count);
        for _ in 0..count {
            last = last.wrapping_add(reader.number()?);
            set.push(SubscriptionId(last));
        }
        matched.push(set.into_boxed_slice());
    }
    let count = reader.count()?;
    let mut events = Vec::with_capacity(count);
    let mut end = 0u32;
    for _ in 0..count {
        let start = end.checked_add(reader.small()?)?;
        let len = reader.small()?;
        end = start.checked_add(len)?;
        let set = reader.small()?;
        if set as usize >= matched.len() {
            return None;
        }
        let flags = reader.number()?;
        let mut span = |present: bool| {
            if !present {
                return Some(ByteSpan::default());
            }
            let at = start.checked_add(reader.small()?)?;
            let len = reader.small()?;
            // An empty span is written as an absent one.
            (len > 0 && at.checked_add(len)? <= end).then_some(ByteSpan { start: at, len })
        };
        events.push(EventRef {
            object: ByteSpan { start, len },
            matched: set,
            data_version: span(flags & 8 != 0)?,
            topic: span(flags & 16 != 0)?,
            lacks: MissingMembers {
                topic: flags & 1 != 0,
                data_version: flags & 2 != 0,
                metadata_version: flags & 4 != 0,
            },
        });
    }
    let len = reader.number()? as usize;
    if len != reader.bytes.len() || end as usize > len || std::str::from_utf8(reader.bytes).is_err() {
        return None;
    }
    let body = payload.slice(payload.len() - len..);
    Some(PublishedBatch {
        topic,
        schema,
        received,
        publisher,
        trace,
        replay,
        hops,
        body,
        events,
        matched,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_batch() -> impl Strategy<Value = PublishedBatch> {
        let set = prop::collection::btree_set(any::<u64>(), 0..5)
            .prop_map(|s| s.into_iter().map(SubscriptionId).collect::<Box<[_]>>());
        let event = ("[a-z]{0,20}", 0u32..3, any::<[bool; 4]>());
        (
            any::<u64>(),
            any::<u32>(),
            prop_oneof![Just(0), Just(1), any::<u32>()],
            prop_oneof![Just(0), Just(1), any::<u32>()],
            "[ -~]{0,20}",
            prop::collection::vec(set, 3),
            prop::collection::vec(event, 1..6),
        )
            .prop_map(|(topic, received, replay, hops, publisher, matched, events)| {
                let mut body = Vec::new();
                let mut refs = Vec::new();
                for (text, set, flags) in events {
                    body.push(b',');
                    let start = body.len();
                    body.extend_from_slice(text.as_bytes());
                    let object = ByteSpan::new(start, body.len());
                    refs.push(EventRef {
                        object,
                        matched: set,
                        data_version: if flags[3] && object.len > 2 {
                            ByteSpan::new(start + 1, start + 2)
                        } else {
                            ByteSpan::default()
                        },
                        topic: ByteSpan::default(),
                        lacks: MissingMembers {
                            topic: flags[0],
                            data_version: flags[1],
                            metadata_version: flags[2],
                        },
                    });
                }
                PublishedBatch {
                    topic: TopicId(topic),
                    schema: EventSchema::Custom,
                    received: Timestamp::from_nanos(i64::from(received)),
                    publisher: publisher.into(),
                    trace: None,
                    replay,
                    hops,
                    body: body.into(),
                    events: refs,
                    matched,
                }
            })
    }

    fn payload(batch: &PublishedBatch) -> Bytes {
        let mut out = encode_batch_head(batch);
        out.extend_from_slice(&batch.body);
        out.into()
    }

    #[test]
    fn a_span_that_is_present_and_empty_is_damage() {
        // Version, topic, schema, received, publisher, trace, one set of one subscription, one event.
        let head = [1, 1, 0, 5, 0, 0, 1, 1, 3, 1, 1, 8, 0];
        let body = b"[{\"a\":1}]";
        let with = |flags: &[u8]| {
            let payload = [&head[..], flags, &[9], body].concat();
            decode_batch(&Bytes::from(payload))
        };
        assert!(with(&[7]).is_some());
        // Flag 8 announces a data version: at offset 8, with a length of 0.
        assert_eq!(with(&[7 | 8, 8, 0]), None);
    }

    proptest! {
        #[test]
        fn batches_survive(batch in any_batch()) {
            prop_assert_eq!(decode_batch(&payload(&batch)), Some(batch));
        }

        // Version 1 is version 2 without the number of replays and readable by older programs;
        // version 3 adds hops.
        #[test]
        fn only_a_replay_takes_version_2(batch in any_batch()) {
            let relayed = payload(&PublishedBatch { replay: 1, hops: 2, ..batch.clone() });
            let replayed = payload(&PublishedBatch { replay: 1, hops: 0, ..batch.clone() });
            let published = payload(&PublishedBatch { replay: 0, hops: 0, ..batch.clone() });
            prop_assert_eq!((published[0], &replayed[..2]), (1, &[2, 1][..]));
            prop_assert_eq!(&published[1..], &replayed[2..]);
            prop_assert_eq!((&relayed[..3], &relayed[3..]), (&[3, 1, 2][..], &replayed[2..]));
        }

        #[test]
        fn damaged_payloads_never_panic(batch in any_batch(), at in any::<usize>(), byte in any::<u8>(), cut in any::<usize>()) {
            let mut bytes = payload(&batch).to_vec();
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(bytes.len() - cut % bytes.len());
            if let Some(batch) = decode_batch(&bytes.into()) {
                for i in 0..batch.events.len() {
                    let _ = (batch.events[i].object.range(), batch.matched(i));
                }
            }
        }
    }
}
