//! Searching for lines.

use crate::line::{LineHeader, parse};
use crate::segment::AuditSegment;
use postrider_core::time::Timestamp;
use std::cmp::Ordering;
use std::io;

/// Bytes of the log that one page may scan; the next page continues from there.
const SCAN_BYTES_MAX: u64 = 64 << 20;
pub const LIMIT_MAX: usize = 1000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LineOrder {
    #[default]
    NewestFirst,
    OldestFirst,
}

/// Position of a line among the lines of all nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinePosition {
    pub time: Timestamp,
    pub node: String,
    pub seq: u64,
}

/// Filter of a search. Texts compare without case.
#[derive(Clone, Debug, Default)]
pub struct AuditQuery {
    pub since: Option<Timestamp>,
    pub until: Option<Timestamp>,
    /// The whole id of the client.
    pub actor: Option<String>,
    /// The whole action, or the part before a dot: `topic` matches `topic.write`.
    pub action: Option<String>,
    /// A part of the resource.
    pub resource: Option<String>,
    pub order: LineOrder,
    /// Only lines after this one, in the requested order.
    pub after: Option<LinePosition>,
    pub limit: usize,
}

impl AuditQuery {
    fn takes(&self, header: &LineHeader, time: Timestamp) -> bool {
        let contains = |text: &str, part: &str| text.to_lowercase().contains(&part.to_lowercase());
        let action = |wanted: &str| {
            let found = header.action.to_lowercase();
            let wanted = wanted.to_lowercase();
            found
                .strip_prefix(&wanted)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.since.is_none_or(|since| time >= since)
            && self.until.is_none_or(|until| time < until)
            && self
                .actor
                .as_ref()
                .is_none_or(|actor| header.actor.id.eq_ignore_ascii_case(actor))
            && self.action.as_deref().is_none_or(action)
            && self
                .resource
                .as_ref()
                .is_none_or(|part| contains(&header.resource, part))
    }

    fn is_behind(&self, node: &str, time: Timestamp, seq: u64) -> bool {
        let Some(after) = &self.after else { return true };
        let here = (time, node, seq).cmp(&(after.time, after.node.as_str(), after.seq));
        match self.order {
            LineOrder::NewestFirst => here == Ordering::Less,
            LineOrder::OldestFirst => here == Ordering::Greater,
        }
    }
}

/// A line that matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRow {
    pub seq: u64,
    pub time: Timestamp,
    /// The line as it is in the file, without its newline.
    pub text: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditLinePage {
    pub rows: Vec<AuditRow>,
    /// Position to continue from; none if there are no more lines.
    pub next: Option<LinePosition>,
}

/// A page of lines. Unreadable lines are skipped; verification reports them.
pub(crate) fn read(segments: &[AuditSegment], node: &str, query: &AuditQuery) -> io::Result<AuditLinePage> {
    let mut page = AuditLinePage::default();
    let limit = query.limit.clamp(1, LIMIT_MAX);
    let mut scanned = 0;
    let ends = |index: usize| segments.get(index + 1).and_then(|next| next.begins);
    let mut indices: Vec<usize> = (0..segments.len()).collect();
    if query.order == LineOrder::NewestFirst {
        indices.reverse();
    }
    for index in indices {
        let segment = &segments[index];
        let (begins, ends) = (segment.begins, ends(index));
        let from = match query.order {
            LineOrder::OldestFirst => latest(query.since, query.after.as_ref().map(|after| after.time)),
            LineOrder::NewestFirst => query.since,
        };
        let to = match query.order {
            LineOrder::NewestFirst => earliest(query.until, query.after.as_ref().map(|after| after.time)),
            LineOrder::OldestFirst => query.until,
        };
        let too_old = from.zip(ends).is_some_and(|(from, ends)| ends < from);
        let too_new = to.zip(begins).is_some_and(|(to, begins)| begins > to);
        if too_old || too_new {
            continue;
        }
        let mut content = match std::fs::read(&segment.path) {
            Ok(content) => content,
            // Dropped since the segments were listed.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        content.truncate(segment.bytes as usize);
        scanned += segment.bytes;
        let mut lines: Vec<&[u8]> = content.split(|byte| *byte == b'\n').collect();
        if query.order == LineOrder::NewestFirst {
            lines.reverse();
        }
        let mut last = None;
        for line in lines {
            let Some(parsed) = parse(line) else { continue };
            let (seq, time) = (parsed.header.seq, parsed.time);
            if !query.is_behind(node, time, seq) {
                continue;
            }
            let here = || LinePosition {
                time,
                node: node.to_owned(),
                seq,
            };
            last = Some(here());
            if !query.takes(&parsed.header, time) {
                continue;
            }
            page.rows.push(AuditRow {
                seq,
                time,
                text: String::from_utf8_lossy(line).into_owned(),
            });
            if page.rows.len() == limit {
                page.next = last;
                return Ok(page);
            }
        }
        if scanned >= SCAN_BYTES_MAX && last.is_some() {
            page.next = last;
            return Ok(page);
        }
    }
    Ok(page)
}

fn latest(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    one.max(other)
}

fn earliest(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
