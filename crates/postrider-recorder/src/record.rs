//! The contents of frames: the reader and the writer of each kind side by side.

use crate::frame::{FrameReader, kind, schema_of, take_decision, take_disposition, verdict_of};
use postrider_core::event::EventSchema;
use postrider_core::ids::Position;
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::deliver::AttemptTimings;
use postrider_engine::recorder::{
    AttemptDecision, DeliveryDisposition, EventPlace, EventRun, RoutingVerdict,
};

/// A parsed frame that borrows from its bytes.
pub enum RecordFrame<'a> {
    Topic(TopicNameFrame<'a>),
    Subscription(SubscriptionNameFrame<'a>),
    /// The subscriptions that an event matched: their numbers and the offsets of their names.
    Set(Vec<(u64, u32)>),
    /// The subscriptions that an event did not match, with the verdicts.
    Verdicts(Vec<(u64, u32, RoutingVerdict)>),
    Accepted(AcceptedFrame<'a>),
    Attempted(AttemptedFrame<'a>),
    Ended(EndedFrame),
    Blob(BlobFrame<'a>),
    Held {
        endpoint: &'a str,
        cause: Outcome,
        at: Timestamp,
        until: Timestamp,
    },
    Released {
        endpoint: &'a str,
        at: Timestamp,
    },
    Retired {
        subscription: u64,
        at: Timestamp,
        reason: GiveUpReason,
    },
    Replayed(ReplayedFrame<'a>),
}

pub struct TopicNameFrame<'a> {
    pub name: &'a str,
    pub full_id: &'a str,
}

pub struct SubscriptionNameFrame<'a> {
    pub name: &'a str,
    pub domain_topic: Option<&'a str>,
    pub endpoint: &'a str,
    /// Its predicates in words.
    pub predicates: Vec<(RoutingVerdict, &'a str)>,
}

pub struct AcceptedFrame<'a> {
    pub topic: u64,
    pub topic_name: u32,
    pub first: Option<Position>,
    /// The index in the request of the frame's first event.
    pub index: u32,
    pub accepted: Timestamp,
    pub schema: EventSchema,
    pub replay: u32,
    pub publisher: &'a str,
    pub trace: Option<&'a str>,
    pub events: Vec<EventFrame<'a>>,
}

pub struct EventFrame<'a> {
    pub id: &'a str,
    pub event_type: &'a str,
    pub subject: &'a str,
    pub source: Option<&'a str>,
    pub domain_topic: Option<&'a str>,
    pub bytes: u64,
    /// The offset of the set of matching subscriptions; zero for none.
    pub set: u32,
    pub matched: u32,
    /// The offset of the verdicts; zero for none.
    pub verdicts: u32,
    /// The event's own trace context, if it differs from its request's.
    pub trace: Option<&'a str>,
}

pub struct AttemptedFrame<'a> {
    pub subscription: u64,
    pub subscription_name: u32,
    /// Empty when it is the endpoint stored with the subscription's name.
    pub endpoint: &'a str,
    pub begun: Timestamp,
    pub ended: Timestamp,
    pub outcome: Outcome,
    pub status: Option<u16>,
    pub timings: Option<AttemptTimings>,
    pub content_type: Option<&'a str>,
    pub snippet: Option<&'a str>,
    pub truncated: bool,
    pub failure: Option<&'a str>,
    pub runs: Vec<EventRun>,
}

pub struct EndedFrame {
    pub subscription: u64,
    pub at: Timestamp,
    pub disposition: DeliveryDisposition,
    pub events: Vec<EventPlace>,
}

pub struct BlobFrame<'a> {
    pub subscription: u64,
    pub account: &'a str,
    pub container: &'a str,
    pub path: &'a str,
    pub letters: Vec<EventPlace>,
}

pub struct ReplayedFrame<'a> {
    pub subscription: u64,
    pub account: &'a str,
    pub container: &'a str,
    pub path: &'a str,
    pub first: Position,
    pub count: u32,
}

fn many<T>(
    from: &mut FrameReader<'_>,
    mut one: impl FnMut(&mut FrameReader<'_>) -> Option<T>,
) -> Option<Vec<T>> {
    let count = from.count()?;
    let mut all = Vec::with_capacity(count.min(4096));
    for _ in 0..count {
        all.push(one(from)?);
    }
    Some(all)
}

fn place(from: &mut FrameReader<'_>) -> Option<EventPlace> {
    let first = Position(from.num()?);
    Some(EventPlace {
        first,
        index: from.num32()?,
    })
}

impl<'a> RecordFrame<'a> {
    /// None if the bytes are not a valid frame.
    pub fn read(bytes: &'a [u8], start: i64) -> Option<RecordFrame<'a>> {
        let mut from = FrameReader::new(bytes, start);
        let from = &mut from;
        Some(match from.byte()? {
            kind::TOPIC => RecordFrame::Topic(TopicNameFrame {
                name: from.text()?,
                full_id: from.text()?,
            }),
            kind::SUBSCRIPTION => {
                let name = from.text()?;
                let (domain_topic, endpoint) = (from.opt_text()?, from.text()?);
                let count = from.count()?;
                let mut predicates = Vec::with_capacity(count);
                for _ in 0..count {
                    predicates.push((verdict_of(from.num()?), from.text()?));
                }
                RecordFrame::Subscription(SubscriptionNameFrame {
                    name,
                    domain_topic,
                    endpoint,
                    predicates,
                })
            }
            kind::SET => RecordFrame::Set(many(from, |from| Some((from.num()?, from.num32()?)))?),
            kind::VERDICTS => RecordFrame::Verdicts(many(from, |from| {
                Some((from.num()?, from.num32()?, verdict_of(from.num()?)))
            })?),
            kind::ACCEPTED => RecordFrame::Accepted(AcceptedFrame::read(from)?),
            kind::ATTEMPTED => RecordFrame::Attempted(AttemptedFrame::read(from)?),
            kind::ENDED => RecordFrame::Ended(EndedFrame {
                subscription: from.num()?,
                at: from.time()?,
                disposition: take_disposition(from)?,
                events: many(from, place)?,
            }),
            kind::BLOB => RecordFrame::Blob(BlobFrame {
                subscription: from.num()?,
                account: from.text()?,
                container: from.text()?,
                path: from.text()?,
                letters: many(from, place)?,
            }),
            kind::HELD => RecordFrame::Held {
                endpoint: from.text()?,
                cause: Outcome::from_code(from.byte()?),
                at: from.time()?,
                until: from.time()?,
            },
            kind::RELEASED => RecordFrame::Released {
                endpoint: from.text()?,
                at: from.time()?,
            },
            kind::RETIRED => RecordFrame::Retired {
                subscription: from.num()?,
                at: from.time()?,
                reason: GiveUpReason::from_code(from.byte()?),
            },
            kind::REPLAYED => RecordFrame::Replayed(ReplayedFrame {
                subscription: from.num()?,
                account: from.text()?,
                container: from.text()?,
                path: from.text()?,
                first: Position(from.num()?),
                count: from.num32()?,
            }),
            _ => return None,
        })
    }
}

impl<'a> AcceptedFrame<'a> {
    fn read(from: &mut FrameReader<'a>) -> Option<AcceptedFrame<'a>> {
        let mut frame = AcceptedFrame {
            topic: from.num()?,
            topic_name: from.num32()?,
            first: from.num()?.checked_sub(1).map(Position),
            index: from.num32()?,
            accepted: from.time()?,
            schema: schema_of(from.byte()?),
            replay: from.num32()?,
            publisher: from.text()?,
            trace: from.opt_text()?,
            events: Vec::new(),
        };
        let count = from.count()?;
        frame.events.reserve(count.min(64));
        for _ in 0..count {
            frame.events.push(EventFrame {
                id: from.text()?,
                event_type: from.text()?,
                subject: from.text()?,
                source: from.opt_text()?,
                domain_topic: from.opt_text()?,
                bytes: from.num()?,
                set: from.num32()?,
                matched: from.num32()?,
                verdicts: from.num32()?,
                trace: from.opt_text()?,
            });
        }
        Some(frame)
    }
}

impl<'a> AttemptedFrame<'a> {
    fn read(from: &mut FrameReader<'a>) -> Option<AttemptedFrame<'a>> {
        let subscription = from.num()?;
        let subscription_name = from.num32()?;
        let endpoint = from.text()?;
        let begun = from.time()?;
        let ended = begun + from.span()?;
        let outcome = Outcome::from_code(from.byte()?);
        let status = from.num()?;
        let timings = match from.byte()? {
            0 => None,
            _ => Some(AttemptTimings {
                connect: from.span()?,
                first_byte: from.span()?,
                total: from.span()?,
            }),
        };
        let content_type = from.opt_text()?;
        let snippet = from.opt_text()?;
        let truncated = from.byte()? != 0;
        let failure = from.opt_text()?;
        let runs = many(from, |from| {
            let start = place(from)?;
            Some(EventRun {
                start,
                count: from.num32()?,
                number: from.num32()?,
                since: from.time()?,
                decision: take_decision(from)?,
            })
        })?;
        Some(AttemptedFrame {
            subscription,
            subscription_name,
            endpoint,
            begun,
            ended,
            outcome,
            status: u16::try_from(status).ok().filter(|status| *status > 0),
            timings,
            content_type,
            snippet,
            truncated,
            failure,
            runs,
        })
    }

    /// The number of the attempt for this event, since when it could have been made, and the
    /// decision.
    pub fn of(&self, event: EventPlace) -> Option<(u32, Timestamp, AttemptDecision)> {
        let run = self.runs.iter().find(|run| {
            run.start.first == event.first
                && (run.start.index..run.start.index + run.count).contains(&event.index)
        })?;
        Some((run.number, run.since, run.decision))
    }
}
