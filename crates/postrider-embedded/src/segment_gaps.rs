//! Which segments the log must consist of, and what is lost with those that are missing.
//!
//! The state database records each segment when it is started and when it is closed, and forgets it
//! before its file is deleted. The head of a segment is durable before the segment is recorded. A
//! recorded segment without a file or a head, or with fewer events than recorded, is therefore a
//! loss and can never result from a crash.

use crate::disk::Disk;
use crate::losses::Loss;
use crate::record::SubscriptionProgress;
use crate::segment::{FIRST_RECORD, POSITIONS_MAX, Segment, SegmentDamage, SegmentHead, log_name};
use crate::state::StateDatabase;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_store::Error;
use postrider_store::log::{LostDeliveries, LostEvents};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::Path;

/// Subscriptions named in a log message; the health report contains all of them.
const NAMED_MAX: usize = 8;

/// Segments according to the state database: base → end, or the base again for the active segment.
pub type RecordedSegments = BTreeMap<u64, u64>;

/// Lost events of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentGap {
    pub base: Position,
    pub from: u64,
    /// The position after the last lost event, as far as known.
    pub to: u64,
    /// False for the active segment: events after the last checkpoint were recorded nowhere else.
    pub end_known: bool,
}

impl SegmentGap {
    fn holds(&self, position: Position) -> bool {
        (self.from..self.beyond()).contains(&position.0)
    }

    /// Takes the end from the segment's index, which is written when the segment is closed.
    pub fn end_at(&mut self, index: Option<&Segment>) {
        if let Some(index) = index.filter(|index| !self.end_known && index.end().0 >= self.to) {
            (self.to, self.end_known) = (index.end().0, true);
        }
    }

    /// The first position that certainly is not of a lost event: the end, or an upper bound for it.
    pub fn beyond(&self) -> u64 {
        match self.end_known {
            true => self.to,
            false => self.to.max(self.base.0.saturating_add(POSITIONS_MAX)),
        }
    }
}

/// The gap for a segment that is lost completely. `next` is the position of the next event
/// according to the last checkpoint.
pub fn whole_segment(
    recorded: &RecordedSegments,
    present: &BTreeSet<u64>,
    base: u64,
    next: u64,
) -> SegmentGap {
    let closed_at = recorded.get(&base).copied().filter(|end| *end > base);
    let following = || {
        let following = [
            recorded.range(base + 1..).next().map(|(base, _)| *base),
            present.range(base + 1..).next().copied(),
        ];
        following.into_iter().flatten().min()
    };
    let end = closed_at.or_else(following);
    SegmentGap {
        base: Position(base),
        from: base,
        to: end.unwrap_or(next.max(base)),
        end_known: end.is_some(),
    }
}

/// The gaps left by recorded segments without a file.
pub fn missing(recorded: &RecordedSegments, present: &BTreeSet<u64>, next: u64) -> Vec<SegmentGap> {
    let absent = recorded.keys().filter(|base| !present.contains(base));
    let gaps = absent.map(|base| whole_segment(recorded, present, *base, next));
    gaps.filter(|gap| gap.to > gap.from || !gap.end_known).collect()
}

/// Where an existing segment has to end, as far as recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedEnd {
    pub end: u64,
    /// Whether the segment must end exactly there; otherwise it must not end earlier.
    pub exact: bool,
}

pub fn expected_end(
    recorded: &RecordedSegments,
    present: &BTreeSet<u64>,
    base: u64,
    next: u64,
) -> Option<ExpectedEnd> {
    if let Some(&end) = recorded.get(&base).filter(|end| **end > base) {
        return Some(ExpectedEnd { end, exact: true });
    }
    let is_last = present.range(base + 1..).next().is_none();
    let after = recorded.range(base + 1..).next().map(|(base, _)| *base);
    is_last.then(|| ExpectedEnd {
        end: next.min(after.unwrap_or(u64::MAX)),
        exact: after.is_some_and(|after| after <= next),
    })
}

/// Whether a recorded segment has lost its head, which was durable before the segment was recorded.
pub fn is_headless(disk: &dyn Disk, base: Position, identity: u64) -> io::Result<bool> {
    let head = SegmentHead::read(&*disk.open(&log_name(base))?)?;
    Ok(head.is_none_or(|head| head.base != base || head.identity != identity))
}

/// Names a damaged head.
pub fn headless(base: Position) -> String {
    let name = log_name(base);
    format!("{name} at bytes 0 to {FIRST_RECORD}: the segment's own facts")
}

/// Deliveries that each subscription loses with a gap: exact with the segment's index, an upper
/// bound without it.
pub fn losses(
    gap: SegmentGap,
    index: Option<&Segment>,
    progress: &FxHashMap<SubscriptionId, SubscriptionProgress>,
) -> io::Result<BTreeMap<SubscriptionId, LostDeliveries>> {
    let mut lost = BTreeMap::new();
    for (of, known) in progress {
        let begun = known.open.iter().filter(|position| gap.holds(**position)).count() as u64;
        let from = gap.from.max(known.frontier.0);
        let (fresh, exact) = match index {
            None => (gap.to.saturating_sub(from), false),
            Some(index) => {
                let mut count = 0;
                for entry in index.entries(*of, Position(from), usize::MAX)? {
                    if (from..gap.to).contains(&(index.base.0 + u64::from(entry.first))) {
                        count += u64::from(entry.matches);
                    }
                }
                (count, true)
            }
        };
        if begun + fresh > 0 || !gap.end_known {
            let one = LostDeliveries {
                first_attempts: begun + fresh,
                exact: gap.end_known && (exact || fresh == 0),
                ..LostDeliveries::default()
            };
            lost.insert(*of, one);
        }
    }
    Ok(lost)
}

/// Marks the lost events as settled, so that they are not offered again.
pub fn settle_lost(gap: SegmentGap, progress: &mut FxHashMap<SubscriptionId, SubscriptionProgress>) {
    for known in progress.values_mut() {
        known.open.retain(|position| !gap.holds(*position));
    }
}

/// Describes a loss for the operator.
pub fn describe(lost: &LostEvents) -> String {
    let last = lost.to.0.saturating_sub(1);
    let events = match (lost.end_known, last >= lost.from.0) {
        (true, _) if last > lost.from.0 => format!("{} are lost", events_text(&(lost.from.0..lost.to.0))),
        (true, _) => format!("event {} is lost", lost.from),
        (false, true) => format!("events {} to {last} and possibly later ones are lost", lost.from),
        (false, false) => format!(
            "events from {} on are lost, if there were any; how many is not known",
            lost.from
        ),
    };
    let mut text = format!("{}: {events}", lost.cause);
    for (of, one) in lost.deliveries.iter().take(NAMED_MAX) {
        match (one.exact, lost.end_known) {
            (true, _) => text.push_str(&format!(
                "; subscription {of}: {} first attempts",
                one.first_attempts
            )),
            (false, true) => text.push_str(&format!(
                "; subscription {of}: up to {} first attempts",
                one.first_attempts
            )),
            (false, false) => text.push_str(&format!(
                "; subscription {of}: an unknown number of first attempts"
            )),
        }
        for (count, what) in [
            (one.retries, "retries"),
            (one.letters, "dead letters not yet written"),
        ] {
            if count > 0 {
                text.push_str(&format!(", {count} {what}"));
            }
        }
    }
    match lost.deliveries.len() {
        0 => text.push_str("; no subscription was waiting for any of them"),
        count if count > NAMED_MAX => {
            text.push_str(&format!("; {} more subscriptions", count - NAMED_MAX));
        }
        _ => {}
    }
    text
}

/// Names positions as a message does: from the first to the last of them.
pub fn events_text(events: &Range<u64>) -> String {
    match events.end.saturating_sub(events.start) {
        0 => "no event".to_owned(),
        1 => format!("event {}", events.start),
        _ => format!("events {} to {}", events.start, events.end - 1),
    }
}

/// Names a damaged place of a segment.
pub fn place_text(base: Position, damage: &SegmentDamage) -> String {
    let (name, events) = (log_name(base), events_text(&damage.events));
    format!("{name} at bytes {} to {}, {events}", damage.from, damage.to)
}

/// Why the events of a gap are lost.
pub fn cause(gap: SegmentGap) -> String {
    let name = log_name(gap.base);
    match gap.from == gap.base.0 {
        true => format!("segment {name} is missing, empty or older than its record"),
        false => format!("the end of segment {name} is missing, or the file is an older copy"),
    }
}

/// Descriptions of losses that earlier starts found and the operator has not acknowledged.
pub fn known_losses(state: &Path) -> Result<Vec<String>, Error> {
    let losses = StateDatabase::open(state, 0)?.recover()?.losses;
    let described = losses.iter().map(|loss| match loss {
        Loss::Events(lost) => describe(lost),
        Loss::Damage(place) => place.clone(),
    });
    Ok(described.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set<const N: usize>(bases: [u64; N]) -> BTreeSet<u64> {
        bases.into()
    }

    #[test]
    fn a_recorded_segment_without_a_file_is_a_gap() {
        let recorded = RecordedSegments::from([(0, 10), (10, 20), (25, 30), (30, 30)]);
        let gap = |base, to| SegmentGap {
            base: Position(base),
            from: base,
            to,
            end_known: true,
        };
        let open = |base, to| SegmentGap {
            end_known: false,
            ..gap(base, to)
        };
        let missing = |present: &BTreeSet<u64>| missing(&recorded, present, 34);
        assert_eq!(missing(&set([0, 10, 25, 30])), []);
        assert_eq!(missing(&set([10, 25, 30])), [gap(0, 10)]);
        assert_eq!(missing(&set([0, 30])), [gap(10, 20), gap(25, 30)]);
        assert_eq!(missing(&set([0, 10, 25])), [open(30, 34)]);
        assert_eq!(
            missing(&set([])),
            [gap(0, 10), gap(10, 20), gap(25, 30), open(30, 34)]
        );
        // The crash came before the newest segments were recorded.
        assert_eq!(missing(&set([0, 10, 25, 36])), [gap(30, 36)]);
    }

    #[test]
    fn a_segment_that_was_being_written_to_has_no_known_end() {
        let recorded = RecordedSegments::from([(0, 10), (10, 10)]);
        let [gap] = missing(&recorded, &set([0]), 10)[..] else {
            panic!("the row is written after a durable head: its file cannot just be absent");
        };
        assert_eq!((gap.from, gap.to, gap.end_known), (10, 10, false));
        assert!(gap.beyond() > 10 + (64 << 20), "more than a segment can hold");
        assert!(gap.holds(Position(500)) && !gap.holds(Position(9)));
        // The segment was empty if the next one begins one position later.
        let recorded = RecordedSegments::from([(0, 10), (11, 11)]);
        assert_eq!(missing(&recorded, &set([0, 11]), 11), []);
    }

    #[test]
    fn a_closed_segment_has_to_end_where_it_was_closed() {
        let recorded = RecordedSegments::from([(0, 10), (10, 10)]);
        let exactly = |end| Some(ExpectedEnd { end, exact: true });
        let at_least = |end| Some(ExpectedEnd { end, exact: false });
        assert_eq!(expected_end(&recorded, &set([0, 10]), 0, 15), exactly(10));
        assert_eq!(expected_end(&recorded, &set([0, 10]), 10, 15), at_least(15));
        // Segments started after the last checkpoint: only the file itself shows the end.
        assert_eq!(expected_end(&recorded, &set([0, 10, 20]), 10, 15), None);
        assert_eq!(expected_end(&recorded, &set([0, 10, 20]), 20, 15), at_least(15));
    }
}
