//! The auditor's view of one subscription's pauses: when nothing may be sent, and what time does
//! not count.

use postrider_core::time::Timestamp;
use std::time::Duration;

#[derive(Debug, Default)]
pub struct AuditedPauses {
    /// In order; the last one may be open-ended.
    all: Vec<(Timestamp, Option<Timestamp>)>,
    /// Whether a pause or resumption is in progress, so that either state is possible.
    pub changing: bool,
    /// Whether the clock was set since the first pause: their lengths then depend on who read it
    /// when.
    unclear: bool,
}

impl AuditedPauses {
    /// Returns whether this changes anything.
    pub fn set(&mut self, paused: bool, now: Timestamp) -> bool {
        self.changing = false;
        match (self.all.last_mut(), paused) {
            (Some((_, until @ None)), false) => *until = Some(now),
            (Some((_, None)), true) | (Some((_, Some(_))) | None, false) => return false,
            (Some((_, Some(_))) | None, true) => self.all.push((now, None)),
        }
        true
    }

    pub fn clock_set(&mut self) {
        self.unclear |= !self.all.is_empty() || self.changing;
    }

    /// Whether nothing may be sent.
    pub fn are_on(&self) -> bool {
        !self.changing && self.all.last().is_some_and(|(_, until)| until.is_none())
    }

    /// Whether nothing could expire at that instant.
    pub fn were_on(&self, at: Timestamp) -> bool {
        let on =
            |(begin, end): &(Timestamp, Option<Timestamp>)| *begin < at && end.is_none_or(|end| at < end);
        !self.unclear && !self.changing && self.all.iter().any(on)
    }

    /// When the last pause ended.
    pub fn ended(&self) -> Timestamp {
        let last = self.all.last().and_then(|(_, until)| *until);
        last.unwrap_or(Timestamp::MIN)
    }

    /// How much of the time between two instants was paused; none if that is unknown.
    pub fn within(&self, from: Timestamp, to: Timestamp) -> Option<Duration> {
        if self.unclear || self.changing {
            return None;
        }
        let each = self.all.iter().map(|(begin, end)| {
            let end = end.unwrap_or(to).min(to);
            end.since((*begin).max(from))
        });
        Some(each.sum())
    }
}
