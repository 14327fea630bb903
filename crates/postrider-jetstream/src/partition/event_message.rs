//! Messages that store events: one or more publish requests each, or a part of one that is too
//! large.

use super::{EVENTS_PER_MESSAGE_MAX, place};
use bytes::Bytes;
use postrider_core::event::PublishedBatch;
use postrider_store::LogEntry;
use postrider_store::record::batch::{VarintReader, decode_batch, put};
use std::sync::Arc;

const VERSION: u8 = 1;
const WHOLE: u8 = 1;
const PART: u8 = 2;
const LAST: u8 = 3;

/// Content of an event message.
#[derive(Clone, Debug, PartialEq)]
pub enum EventMessageContent {
    Requests(Vec<PublishedBatch>),
    /// A part of a request; more parts follow.
    Part(Bytes),
    /// The last part, and the number of parts.
    Last(u64, Bytes),
}

/// Encodes whole requests, given as head and body, into a message. The bodies become slices of the
/// message, so that the possibly much larger buffers they were received in can be freed.
pub fn whole<'r>(requests: impl Iterator<Item = (&'r [u8], &'r mut Bytes)>, len: usize) -> Bytes {
    let mut out = Vec::with_capacity(len + 64);
    out.extend_from_slice(&[VERSION, WHOLE]);
    let mut bodies = Vec::new();
    for (head, body) in requests {
        put(&mut out, (head.len() + body.len()) as u64);
        out.extend_from_slice(head);
        let start = out.len();
        out.extend_from_slice(body);
        bodies.push((body, start));
    }
    let out = Bytes::from(out);
    for (body, start) in bodies {
        *body = out.slice(start..start + body.len());
    }
    out
}

/// Splits a request into messages of at most about `bytes_max` each.
pub fn cut(head: &[u8], body: &[u8], bytes_max: usize) -> Vec<Bytes> {
    let request = [head, body].concat();
    let parts: Vec<&[u8]> = request.chunks(bytes_max).collect();
    let mut messages = Vec::with_capacity(parts.len());
    for (n, part) in parts.iter().enumerate() {
        let mut out = Vec::with_capacity(part.len() + 16);
        if n + 1 < parts.len() {
            out.extend_from_slice(&[VERSION, PART]);
        } else {
            out.extend_from_slice(&[VERSION, LAST]);
            put(&mut out, parts.len() as u64);
        }
        out.extend_from_slice(part);
        messages.push(out.into());
    }
    messages
}

/// `None` if the bytes are not an event message that this program can read.
pub fn decode(message: &Bytes) -> Option<EventMessageContent> {
    if *message.first()? != VERSION {
        return None;
    }
    let rest = message.slice(2.min(message.len())..);
    match *message.get(1)? {
        WHOLE => {
            let mut requests = Vec::new();
            let mut at = 0;
            while at < rest.len() {
                let mut reader = VarintReader::new(&rest[at..]);
                let len = reader.count()?;
                let start = rest.len() - reader.left();
                requests.push(decode_batch(&rest.slice(start..start + len))?);
                at = start + len;
            }
            Some(EventMessageContent::Requests(requests))
        }
        PART => Some(EventMessageContent::Part(rest)),
        LAST => {
            let mut reader = VarintReader::new(&rest);
            let parts = reader.number()?;
            Some(EventMessageContent::Last(
                parts,
                rest.slice(rest.len() - reader.left()..),
            ))
        }
        _ => None,
    }
}

/// Joins the parts of a request.
pub fn join(parts: &[Bytes]) -> Option<PublishedBatch> {
    decode_batch(&parts.concat().into())
}

/// An event message in memory: its requests with their positions.
#[derive(Debug)]
pub struct EventMessage {
    pub entries: Vec<Arc<LogEntry>>,
    /// Approximate memory of the message.
    pub bytes: usize,
}

impl EventMessage {
    pub fn new(partition: u8, sequence: u64, requests: Vec<PublishedBatch>) -> EventMessage {
        let mut entries = Vec::with_capacity(requests.len());
        let mut event = 0;
        for batch in requests {
            let count = batch.events.len() as u32;
            entries.push(Arc::new(LogEntry {
                batch,
                first: place(partition, sequence, event),
                place: 0,
            }));
            event += count;
        }
        EventMessage::of_entries(entries)
    }

    /// Builds a message from requests that already have positions.
    pub fn of_entries(entries: Vec<Arc<LogEntry>>) -> EventMessage {
        let size = |batch: &PublishedBatch| batch.body.len() + 256 + batch.events.len() * 40;
        let bytes = entries.iter().map(|entry| size(&entry.batch)).sum();
        EventMessage { entries, bytes }
    }

    /// The request that contains the event with this number, and the event's index in it.
    pub fn find(&self, event: u32) -> Option<(&Arc<LogEntry>, u32)> {
        let number = |entry: &LogEntry| super::event_of(entry.first);
        let at = self
            .entries
            .partition_point(|entry| number(entry) <= event)
            .checked_sub(1)?;
        let entry = &self.entries[at];
        let index = event - number(entry);
        ((index as usize) < entry.batch.events.len()).then_some((entry, index))
    }
}

/// Whether another request with this many events fits into a message.
pub fn has_room(events: usize, more: usize) -> bool {
    events + more <= EVENTS_PER_MESSAGE_MAX
}

#[cfg(test)]
mod tests {
    use super::super::event_of;
    use super::*;
    use postrider_store::conformance::events;
    use postrider_store::record::batch::encode_batch_head;
    use proptest::prelude::*;

    fn requests() -> Vec<PublishedBatch> {
        vec![
            events(&[("a", &[1]), ("bb", &[2, 3])]),
            events(&[("c", &[])]),
            events(&[("d", &[1]), ("e", &[1]), ("f", &[7])]),
        ]
    }

    fn message(requests: &[PublishedBatch]) -> Bytes {
        let mut encoded: Vec<(Vec<u8>, Bytes)> = requests
            .iter()
            .map(|b| (encode_batch_head(b), b.body.clone()))
            .collect();
        let message = whole(encoded.iter_mut().map(|(head, body)| (head.as_slice(), body)), 0);
        for ((_, body), request) in encoded.iter().zip(requests) {
            assert_eq!(body, &request.body);
            assert!(
                message.as_ptr_range().contains(&body.as_ptr()),
                "it is a part of the message"
            );
        }
        message
    }

    #[test]
    fn requests_survive_together() {
        assert_eq!(
            decode(&message(&requests())),
            Some(EventMessageContent::Requests(requests()))
        );
        let message = EventMessage::new(5, 9, requests());
        let found: Vec<_> = (0..7)
            .map(|event| {
                message
                    .find(event)
                    .map(|(e, i)| e.batch.object(i as usize).to_owned())
            })
            .collect();
        let expected = [
            Some("a"),
            Some("bb"),
            Some("c"),
            Some("d"),
            Some("e"),
            Some("f"),
            None,
        ];
        assert_eq!(found, expected.map(|text| text.map(str::to_owned)));
        assert_eq!(event_of(message.entries[2].first), 3);
    }

    proptest! {
        #[test]
        fn a_request_survives_being_cut(len in 0..5_000usize, bytes_max in 100..2_000usize) {
            let batch = events(&[(&"x".repeat(len), &[1])]);
            let head = encode_batch_head(&batch);
            let messages = cut(&head, &batch.body, bytes_max);
            prop_assert!(messages.iter().all(|message| message.len() <= bytes_max + 16));
            let mut parts = Vec::new();
            for (n, message) in messages.iter().enumerate() {
                match decode(message).unwrap() {
                    EventMessageContent::Part(part) => parts.push(part),
                    EventMessageContent::Last(count, part) => {
                        parts.push(part);
                        prop_assert_eq!((count as usize, n + 1), (messages.len(), messages.len()));
                    }
                    other => panic!("{other:?}"),
                }
            }
            prop_assert_eq!(join(&parts), Some(batch));
        }

        #[test]
        fn damaged_messages_never_panic(at in any::<usize>(), byte in any::<u8>(), cut in any::<usize>()) {
            let mut bytes = message(&requests()).to_vec();
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(bytes.len() - cut % bytes.len());
            let _ = decode(&bytes.into());
        }
    }
}
