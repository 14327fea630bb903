//! Accepted events: the publisher's bytes, and the positions of the events in them.

use crate::ids::{Position, SubscriptionId, TopicId};
use crate::time::Timestamp;
use bytes::Bytes;

/// The schema of incoming or outgoing events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventSchema {
    EventGrid,
    CloudEvent,
    Custom,
}

/// A valid publish request, with the subscriptions that each event matched.
///
/// Accepted and stored as a whole: all of its events become durable together or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedBatch {
    pub topic: TopicId,
    pub schema: EventSchema,
    pub received: Timestamp,
    /// The kind of credential that the publisher used, for people to read. Never the credential
    /// itself.
    pub publisher: Box<str>,
    /// The trace context of the request, if it had one, in the form of [`crate::trace::kept`].
    pub trace: Option<Box<str>>,
    /// How many times it was replayed; 0 for a publisher's request.
    pub replay: u32,
    /// How many deliveries by servers like this one led here; 0 for a publisher's request.
    pub hops: u32,
    /// The JSON text of all events, as received (a CloudEvent in binary mode is assembled here).
    pub body: Bytes,
    pub events: Vec<EventRef>,
    /// The distinct sets of matching subscriptions; `EventRef::matched` points in here.
    pub matched: Vec<Box<[SubscriptionId]>>,
}

/// The position of an event inside a [`PublishedBatch`], and notes about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventRef {
    /// The event's JSON object within the body.
    pub object: ByteSpan,
    /// Index into `PublishedBatch::matched`.
    pub matched: u32,
    /// The text of the string `dataVersion`, without quotes, within the body. Empty if absent.
    pub data_version: ByteSpan,
    /// The member `topic` with its name and value, within the body. Empty if absent.
    pub topic: ByteSpan,
    pub lacks: MissingMembers,
}

/// A range of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteSpan {
    pub start: u32,
    pub len: u32,
}

impl ByteSpan {
    pub fn new(start: usize, end: usize) -> ByteSpan {
        ByteSpan {
            start: start as u32,
            len: (end - start) as u32,
        }
    }

    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    pub fn range(self) -> std::ops::Range<usize> {
        self.start as usize..self.start as usize + self.len as usize
    }
}

/// Members that the publisher left out of an Event Grid event and that are stamped on delivery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissingMembers {
    pub topic: bool,
    pub data_version: bool,
    pub metadata_version: bool,
}

impl PublishedBatch {
    /// Bytes that the batch takes in memory. An event for very many subscriptions takes most of it for their ids.
    pub fn memory_len(&self) -> usize {
        let matched = self.matched.iter().map(|set| size_of_val(&**set)).sum::<usize>();
        self.body.len() + size_of_val(&*self.events) + matched
    }

    /// The text of one event.
    pub fn object(&self, index: usize) -> &str {
        self.slice(self.events[index].object)
    }

    /// The text at a span that was recorded when the body was parsed.
    pub fn slice(&self, span: ByteSpan) -> &str {
        std::str::from_utf8(&self.body[span.range()]).expect("the body was checked when it was accepted")
    }

    /// The subscriptions that one event matched.
    pub fn matched(&self, index: usize) -> &[SubscriptionId] {
        &self.matched[self.events[index].matched as usize]
    }

    /// How many deliveries follow from this request.
    pub fn deliveries(&self) -> usize {
        (0..self.events.len()).map(|i| self.matched(i).len()).sum()
    }
}

/// Postrider's own id of an event: the same at every attempt, for every subscription and after a
/// restart. Formatted as a GUID: the log's random identity, then the position.
pub fn system_id(log: u64, position: Position) -> String {
    let (a, b) = (log, position.0);
    // The version (8: custom) and variant bits make it a well-formed UUID.
    let third = ((a & 0x0fff) | 0x8000) as u16;
    let fourth = (((b >> 48) as u16) & 0x3fff) | 0x8000;
    format!(
        "{:08x}-{:04x}-{third:04x}-{fourth:04x}-{:012x}",
        (a >> 32) as u32,
        (a >> 16) as u16,
        b & 0xffff_ffff_ffff
    )
}
