//! Frames: the form of records in segments. Numbers are varints; times count from the segment's
//! start.
//!
//! A frame consists of its length, a checksum, and its content, whose first byte is the kind.
//! Frames refer to others of the same segment by their offset, so that each segment can be read,
//! and dropped, by itself.

use postrider_core::event::Schema;
use postrider_core::outcome::Outcome;
use postrider_core::retry::Reason;
use postrider_core::time::Timestamp;
use postrider_engine::recorder::{Decision, Disposition, Verdict, Why};
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
pub trait Put {
    fn num(&mut self, value: u64);
    fn text(&mut self, text: &str);
    fn opt_text(&mut self, text: Option<&str>);
    /// A time, as its distance from the segment's start in either direction.
    fn time(&mut self, at: Timestamp, start: i64);
    fn span(&mut self, span: Duration);
}

impl Put for Vec<u8> {
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
pub struct Take<'a> {
    bytes: &'a [u8],
    start: i64,
}

impl<'a> Take<'a> {
    pub fn new(bytes: &'a [u8], start: i64) -> Take<'a> {
        Take { bytes, start }
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

pub fn schema_code(schema: Schema) -> u8 {
    match schema {
        Schema::EventGrid => 0,
        Schema::CloudEvent => 1,
        Schema::Custom => 2,
    }
}

pub fn schema_of(code: u8) -> Schema {
    match code {
        0 => Schema::EventGrid,
        1 => Schema::CloudEvent,
        _ => Schema::Custom,
    }
}

pub fn verdict_code(verdict: Verdict) -> u64 {
    match verdict {
        Verdict::Matched => 0,
        Verdict::Expired => 1,
        Verdict::DomainTopic => 2,
        Verdict::EventType => 3,
        Verdict::SubjectBeginsWith => 4,
        Verdict::SubjectEndsWith => 5,
        Verdict::Advanced(index) => 6 + u64::from(index),
    }
}

pub fn verdict_of(code: u64) -> Verdict {
    match code {
        0 => Verdict::Matched,
        1 => Verdict::Expired,
        2 => Verdict::DomainTopic,
        3 => Verdict::EventType,
        4 => Verdict::SubjectBeginsWith,
        5 => Verdict::SubjectEndsWith,
        more => Verdict::Advanced(u16::try_from(more - 6).unwrap_or(u16::MAX)),
    }
}

pub fn put_decision(out: &mut Vec<u8>, decision: Decision, start: i64) {
    match decision {
        Decision::Done => out.push(0),
        Decision::DeadLetter(reason) => out.extend_from_slice(&[1, reason.code()]),
        Decision::Drop(reason) => out.extend_from_slice(&[2, reason.code()]),
        Decision::Retry { at, why } => {
            match why {
                Why::Schedule { after, wait } => {
                    out.push(3);
                    out.num(u64::from(after));
                    out.span(wait);
                }
                Why::Floor { wait } => {
                    out.push(4);
                    out.span(wait);
                }
                Why::RetryAfter { asked } => {
                    out.push(5);
                    out.span(asked);
                }
                Why::EndOfLife => out.push(6),
                Why::Halved => out.push(7),
            }
            out.time(at, start);
        }
    }
}

pub fn take_decision(from: &mut Take<'_>) -> Option<Decision> {
    let why = match from.byte()? {
        0 => return Some(Decision::Done),
        1 => return Some(Decision::DeadLetter(Reason::from_code(from.byte()?))),
        2 => return Some(Decision::Drop(Reason::from_code(from.byte()?))),
        3 => Why::Schedule {
            after: from.num32()?,
            wait: from.span()?,
        },
        4 => Why::Floor { wait: from.span()? },
        5 => Why::RetryAfter { asked: from.span()? },
        6 => Why::EndOfLife,
        7 => Why::Halved,
        _ => return None,
    };
    Some(Decision::Retry {
        at: from.time()?,
        why,
    })
}

pub fn put_disposition(out: &mut Vec<u8>, disposition: Disposition) {
    match disposition {
        Disposition::Delivered => out.push(0),
        Disposition::DeliveredLate => out.push(1),
        Disposition::DeadLettered(reason) => out.extend_from_slice(&[2, reason.code()]),
        Disposition::Dropped(reason) => out.extend_from_slice(&[3, reason.code()]),
    }
}

pub fn take_disposition(from: &mut Take<'_>) -> Option<Disposition> {
    Some(match from.byte()? {
        0 => Disposition::Delivered,
        1 => Disposition::DeliveredLate,
        2 => Disposition::DeadLettered(Reason::from_code(from.byte()?)),
        3 => Disposition::Dropped(Reason::from_code(from.byte()?)),
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
pub struct Digest(pub u32);

/// The consequence of an attempt, as stored in a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Follows {
    Nothing = 0,
    Done = 1,
    Retry = 2,
    DeadLetter = 3,
    Drop = 4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Sort {
    Accepted = 0,
    Attempted = 1,
    Ended = 2,
    Blob = 3,
    Replayed = 4,
}

impl Digest {
    pub fn new(sort: Sort, outcome: Option<Outcome>, follows: Follows, subscription: u64) -> Digest {
        let outcome = outcome.map_or(31, |o| u32::from(o.code()));
        Digest(sort as u32 | outcome << 3 | (follows as u32) << 8 | (subscription as u32) << 11)
    }

    pub fn is(self, sort: Sort) -> bool {
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

    pub fn follows(self, follows: Follows) -> bool {
        self.0 >> 8 & 7 == follows as u32
    }

    /// Whether the record may be about this subscription.
    pub fn may_be_of(self, subscription: u64) -> bool {
        self.0 >> 11 == (subscription as u32) << 11 >> 11
    }

    /// Whether the delivery ended with this record.
    pub fn ends(self) -> bool {
        self.follows(Follows::Done) || self.follows(Follows::DeadLetter) || self.follows(Follows::Drop)
    }
}

impl From<Decision> for Follows {
    fn from(decision: Decision) -> Follows {
        match decision {
            Decision::Done => Follows::Done,
            Decision::Retry { .. } => Follows::Retry,
            Decision::DeadLetter(_) => Follows::DeadLetter,
            Decision::Drop(_) => Follows::Drop,
        }
    }
}

impl From<Disposition> for Follows {
    fn from(disposition: Disposition) -> Follows {
        match disposition {
            Disposition::Delivered | Disposition::DeliveredLate => Follows::Done,
            Disposition::DeadLettered(_) => Follows::DeadLetter,
            Disposition::Dropped(_) => Follows::Drop,
        }
    }
}
