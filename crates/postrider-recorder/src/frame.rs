//! Frames: the form of records in segments. Numbers are varints; times count from the segment's
//! start.
//!
//! A frame consists of its length, a checksum, and its content, whose first byte is the kind.
//! Frames refer to others of the same segment by their offset, so that each segment can be read,
//! and dropped, by itself.

use postrider_core::event::EventSchema;
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::recorder::{AttemptDecision, DeliveryDisposition, RetryTimeRule, RoutingVerdict};
use std::time::Duration;

/// Length and checksum.
pub const FRAME_HEAD: usize = 8;
/// The length of a segment's header: the format, then the time at which the segment was begun.
pub const SEGMENT_HEAD: usize = 16;
pub const SEGMENT_MAGIC: [u8; 8] = *b"PRFLREC1";
/// The greatest length of a frame; a greater one is damage.
pub const FRAME_MAX: usize = 4 << 20;
/// The most events of one request that share a frame, and an entry in the index.
pub const CHUNK: u32 = 32;

pub mod kind {
    pub const TOPIC: u8 = 1;
    pub const SUBSCRIPTION: u8 = 2;
    pub const VERDICTS: u8 = 3;
    pub const ACCEPTED: u8 = 4;
    pub const ATTEMPTED: u8 = 5;
    pub const ENDED: u8 = 6;
    pub const BLOB: u8 = 7;
    pub const HELD: u8 = 8;
    pub const RELEASED: u8 = 9;
    pub const RETIRED: u8 = 10;
    pub const REPLAYED: u8 = 11;
    pub const SET: u8 = 12;
}

/// Appends values to a buffer.
pub trait FrameWriter {
    fn num(&mut self, value: u64);
    fn text(&mut self, text: &str);
    fn opt_text(&mut self, text: Option<&str>);
    /// A time, as its distance from the segment's start in either direction.
    fn time(&mut self, at: Timestamp, start: i64);
    fn span(&mut self, span: Duration);
}

impl FrameWriter for Vec<u8> {
    fn num(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.push(value as u8);
    }

    fn text(&mut self, text: &str) {
        self.num(text.len() as u64);
        self.extend_from_slice(text.as_bytes());
    }

    fn opt_text(&mut self, text: Option<&str>) {
        match text {
            None => self.num(0),
            Some(text) => {
                self.num(text.len() as u64 + 1);
                self.extend_from_slice(text.as_bytes());
            }
        }
    }

    fn time(&mut self, at: Timestamp, start: i64) {
        let distance = at.nanos().wrapping_sub(start);
        self.num(((distance << 1) ^ (distance >> 63)) as u64);
    }

    fn span(&mut self, span: Duration) {
        self.num(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// Reads values from a frame's content. None means that the content is malformed.
pub struct FrameReader<'a> {
    bytes: &'a [u8],
    start: i64,
}

impl<'a> FrameReader<'a> {
    pub fn new(bytes: &'a [u8], start: i64) -> FrameReader<'a> {
        FrameReader { bytes, start }
    }

    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }

    pub fn num(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    pub fn num32(&mut self) -> Option<u32> {
        self.num()?.try_into().ok()
    }

    /// A count of items that take at least a byte each.
    pub fn count(&mut self) -> Option<usize> {
        let count = usize::try_from(self.num()?).ok()?;
        (count <= self.bytes.len()).then_some(count)
    }

    fn piece(&mut self, len: usize) -> Option<&'a str> {
        let (piece, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        std::str::from_utf8(piece).ok()
    }

    pub fn text(&mut self) -> Option<&'a str> {
        let len = self.count()?;
        self.piece(len)
    }

    pub fn opt_text(&mut self) -> Option<Option<&'a str>> {
        match self.num()? {
            0 => Some(None),
            len => Some(Some(self.piece(usize::try_from(len - 1).ok()?)?)),
        }
    }

    pub fn time(&mut self) -> Option<Timestamp> {
        let coded = self.num()?;
        let distance = (coded >> 1) as i64 ^ -((coded & 1) as i64);
        Some(Timestamp::from_nanos(self.start.wrapping_add(distance)))
    }

    pub fn span(&mut self) -> Option<Duration> {
        self.num().map(Duration::from_nanos)
    }
}

pub fn schema_code(schema: EventSchema) -> u8 {
    match schema {
        EventSchema::EventGrid => 0,
        EventSchema::CloudEvent => 1,
        EventSchema::Custom => 2,
    }
}

pub fn schema_of(code: u8) -> EventSchema {
    match code {
        0 => EventSchema::EventGrid,
        1 => EventSchema::CloudEvent,
        _ => EventSchema::Custom,
    }
}

pub fn verdict_code(verdict: RoutingVerdict) -> u64 {
    match verdict {
        RoutingVerdict::Matched => 0,
        RoutingVerdict::Expired => 1,
        RoutingVerdict::DomainTopic => 2,
        RoutingVerdict::EventType => 3,
        RoutingVerdict::SubjectBeginsWith => 4,
        RoutingVerdict::SubjectEndsWith => 5,
        RoutingVerdict::Advanced(index) => 6 + u64::from(index),
    }
}

pub fn verdict_of(code: u64) -> RoutingVerdict {
    match code {
        0 => RoutingVerdict::Matched,
        1 => RoutingVerdict::Expired,
        2 => RoutingVerdict::DomainTopic,
        3 => RoutingVerdict::EventType,
        4 => RoutingVerdict::SubjectBeginsWith,
        5 => RoutingVerdict::SubjectEndsWith,
        more => RoutingVerdict::Advanced(u16::try_from(more - 6).unwrap_or(u16::MAX)),
    }
}

pub fn put_decision(out: &mut Vec<u8>, decision: AttemptDecision, start: i64) {
    match decision {
        AttemptDecision::Done => out.push(0),
        AttemptDecision::DeadLetter(reason) => out.extend_from_slice(&[1, reason.code()]),
        AttemptDecision::Drop(reason) => out.extend_from_slice(&[2, reason.code()]),
        AttemptDecision::Retry { at, why } => {
            match why {
                RetryTimeRule::Schedule { after, wait } => {
                    out.push(3);
                    out.num(u64::from(after));
                    out.span(wait);
                }
                RetryTimeRule::Floor { wait } => {
                    out.push(4);
                    out.span(wait);
                }
                RetryTimeRule::RetryAfter { asked } => {
                    out.push(5);
                    out.span(asked);
                }
                RetryTimeRule::EndOfLife => out.push(6),
                RetryTimeRule::Halved => out.push(7),
            }
            out.time(at, start);
        }
    }
}

pub fn take_decision(from: &mut FrameReader<'_>) -> Option<AttemptDecision> {
    let why = match from.byte()? {
        0 => return Some(AttemptDecision::Done),
        1 => return Some(AttemptDecision::DeadLetter(GiveUpReason::from_code(from.byte()?))),
        2 => return Some(AttemptDecision::Drop(GiveUpReason::from_code(from.byte()?))),
        3 => RetryTimeRule::Schedule {
            after: from.num32()?,
            wait: from.span()?,
        },
        4 => RetryTimeRule::Floor { wait: from.span()? },
        5 => RetryTimeRule::RetryAfter { asked: from.span()? },
        6 => RetryTimeRule::EndOfLife,
        7 => RetryTimeRule::Halved,
        _ => return None,
    };
    Some(AttemptDecision::Retry {
        at: from.time()?,
        why,
    })
}

pub fn put_disposition(out: &mut Vec<u8>, disposition: DeliveryDisposition) {
    match disposition {
        DeliveryDisposition::Delivered => out.push(0),
        DeliveryDisposition::DeliveredLate => out.push(1),
        DeliveryDisposition::DeadLettered(reason) => out.extend_from_slice(&[2, reason.code()]),
        DeliveryDisposition::Dropped(reason) => out.extend_from_slice(&[3, reason.code()]),
    }
}

pub fn take_disposition(from: &mut FrameReader<'_>) -> Option<DeliveryDisposition> {
    Some(match from.byte()? {
        0 => DeliveryDisposition::Delivered,
        1 => DeliveryDisposition::DeliveredLate,
        2 => DeliveryDisposition::DeadLettered(GiveUpReason::from_code(from.byte()?)),
        3 => DeliveryDisposition::Dropped(GiveUpReason::from_code(from.byte()?)),
        _ => return None,
    })
}

/// The text cut to at most `max` bytes, between characters.
pub fn clip(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// A summary of an event's record in the index, so that the record need not be read.
///
/// 3 bits of kind, 5 of outcome, 3 of consequence, then the lowest bits of the subscription's
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordDigest(pub u32);

/// The consequence of an attempt, as stored in a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DigestConsequence {
    Nothing = 0,
    Done = 1,
    Retry = 2,
    DeadLetter = 3,
    Drop = 4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DigestKind {
    Accepted = 0,
    Attempted = 1,
    Ended = 2,
    Blob = 3,
    Replayed = 4,
}

impl RecordDigest {
    pub fn new(
        sort: DigestKind,
        outcome: Option<Outcome>,
        follows: DigestConsequence,
        subscription: u64,
    ) -> RecordDigest {
        let outcome = outcome.map_or(31, |o| u32::from(o.code()));
        RecordDigest(sort as u32 | outcome << 3 | (follows as u32) << 8 | (subscription as u32) << 11)
    }

    pub fn is(self, sort: DigestKind) -> bool {
        self.0 & 7 == sort as u32
    }

    pub fn has_outcome(self, outcome: Outcome) -> bool {
        self.0 >> 3 & 31 == u32::from(outcome.code())
    }

    /// None for anything but an attempt, and for an outcome that this version does not know.
    pub fn outcome(self) -> Option<Outcome> {
        Outcome::ALL
            .into_iter()
            .find(|outcome| self.has_outcome(*outcome))
    }

    pub fn follows(self, follows: DigestConsequence) -> bool {
        self.0 >> 8 & 7 == follows as u32
    }

    /// Whether the record may be about this subscription.
    pub fn may_be_about(self, subscription: u64) -> bool {
        self.0 >> 11 == (subscription as u32) << 11 >> 11
    }

    /// Whether the delivery ended with this record.
    pub fn ends(self) -> bool {
        self.follows(DigestConsequence::Done)
            || self.follows(DigestConsequence::DeadLetter)
            || self.follows(DigestConsequence::Drop)
    }
}

impl From<AttemptDecision> for DigestConsequence {
    fn from(decision: AttemptDecision) -> DigestConsequence {
        match decision {
            AttemptDecision::Done => DigestConsequence::Done,
            AttemptDecision::Retry { .. } => DigestConsequence::Retry,
            AttemptDecision::DeadLetter(_) => DigestConsequence::DeadLetter,
            AttemptDecision::Drop(_) => DigestConsequence::Drop,
        }
    }
}

impl From<DeliveryDisposition> for DigestConsequence {
    fn from(disposition: DeliveryDisposition) -> DigestConsequence {
        match disposition {
            DeliveryDisposition::Delivered | DeliveryDisposition::DeliveredLate => DigestConsequence::Done,
            DeliveryDisposition::DeadLettered(_) => DigestConsequence::DeadLetter,
            DeliveryDisposition::Dropped(_) => DigestConsequence::Drop,
        }
    }
}
