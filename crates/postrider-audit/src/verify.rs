//! Verification of the chain: reports the first line that was changed after it was written.

use crate::checkpoint::{self, Checkpoint};
use crate::line::{GENESIS, parse};
use crate::segment::{self, AuditSegment};
use serde::Serialize;
use std::io;
use std::path::Path;

/// Result of verifying the chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Verification {
    pub intact: bool,
    /// Lines that were verified, up to the first broken one.
    pub lines: u64,
    /// The number of the first line that is kept; 0 if there is none.
    pub first_seq: u64,
    pub last_seq: u64,
    /// The hash before the first line that is kept.
    pub anchor: String,
    /// The hash of the last line. Noted elsewhere, it shows later whether the end was cut off or
    /// the whole log was rewritten.
    pub head: String,
    /// Bytes of an unfinished line at the end, left by a crash. The next start removes them.
    #[serde(skip_serializing_if = "is_zero")]
    pub unfinished_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken: Option<BrokenLine>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The first place where the chain is broken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BrokenLine {
    pub file: String,
    /// The line in the file, counted from 1.
    pub line: u64,
    /// The number that a line at this place must have.
    pub seq: u64,
    pub reason: String,
}

/// Verifies the directory of a server that is not running.
pub fn verify(directory: &Path) -> io::Result<Verification> {
    let checkpoint = checkpoint::read(directory)?;
    let segments = match segment::find(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound && checkpoint.is_some() => Vec::new(),
        found => found?,
    };
    verify_segments(&segments, checkpoint)
}

/// Verifies the newest lines, of at most about so many bytes; the reason if they are not as they were written.
pub(crate) fn verify_end(
    segments: &[AuditSegment],
    checkpoint: Option<Checkpoint>,
    bytes_max: u64,
) -> io::Result<Option<String>> {
    let mut bytes = 0;
    let newest = segments.iter().rev().take_while(|segment| {
        bytes += segment.bytes;
        bytes <= bytes_max
    });
    let begin = segments.len() - newest.count().max(1).min(segments.len());
    let found = match begin {
        0 => verify_segments(segments, checkpoint)?,
        _ => walk_segments(&segments[begin..], checkpoint)?.found,
    };
    let broken = found.broken;
    Ok(broken.map(|broken| format!("{} line {}: {}", broken.file, broken.line, broken.reason)))
}

/// Verifies segments up to where they are durable.
pub(crate) fn verify_segments(
    segments: &[AuditSegment],
    checkpoint: Option<Checkpoint>,
) -> io::Result<Verification> {
    let mut walk = walk_segments(segments, checkpoint)?;
    if walk.found.broken.is_none() {
        walk.end(segments);
    }
    Ok(walk.found)
}

fn walk_segments(segments: &[AuditSegment], checkpoint: Option<Checkpoint>) -> io::Result<ChainWalk> {
    let mut walk = ChainWalk::new(checkpoint);
    for (index, segment) in segments.iter().enumerate() {
        let mut content = std::fs::read(&segment.path)?;
        content.truncate(segment.bytes as usize);
        let is_last = index + 1 == segments.len();
        if let Err(broken) = walk.segment(segment, &content, is_last) {
            walk.found.broken = Some(broken);
            return Ok(walk);
        }
    }
    walk.found.broken = walk.cut_off(segments);
    Ok(walk)
}

struct ChainWalk {
    found: Verification,
    /// The number that the next line must have; none before the first.
    expected: Option<u64>,
    /// The last line that was dropped for its age or for size, as recorded by a later line.
    dropped_through: u64,
    checkpoint: Option<Checkpoint>,
}

impl ChainWalk {
    fn new(checkpoint: Option<Checkpoint>) -> ChainWalk {
        ChainWalk {
            found: Verification {
                anchor: GENESIS.to_owned(),
                head: GENESIS.to_owned(),
                ..Verification::default()
            },
            expected: None,
            dropped_through: 0,
            checkpoint,
        }
    }

    fn segment(&mut self, segment: &AuditSegment, content: &[u8], is_last: bool) -> Result<(), BrokenLine> {
        let file = segment.name();
        for (number, piece) in (1..).zip(content.split_inclusive(|byte| *byte == b'\n')) {
            let seq = self.expected.unwrap_or(segment.first);
            let broken = |reason: String| {
                Err(BrokenLine {
                    file: file.clone(),
                    line: number,
                    seq,
                    reason,
                })
            };
            let Some(text) = piece.strip_suffix(b"\n") else {
                if is_last {
                    self.found.unfinished_bytes = piece.len() as u64;
                    return Ok(());
                }
                return broken("the line is cut short".into());
            };
            let Some(line) = parse(text) else {
                return broken("this is not a line of the audit log".into());
            };
            if !line.intact {
                return broken("the line was edited: its hash is not that of its content".into());
            }
            let found = line.header.seq;
            if found > seq {
                let missing = match found - seq {
                    1 => format!("line {seq} is missing"),
                    _ => format!("lines {seq} to {} are missing", found - 1),
                };
                return broken(format!("{missing}: line {found} is here"));
            }
            if found < seq {
                return broken(format!("out of order: line {found} is here, where {seq} must be"));
            }
            match self.expected {
                None if seq == 1 && line.prev != GENESIS => {
                    return broken("the first line of all continues another".into());
                }
                None => {
                    self.found.first_seq = seq;
                    self.found.anchor = line.prev.to_owned();
                }
                Some(_) if line.prev != self.found.head => {
                    return broken(format!(
                        "the chain is broken: line {} is not the one that line {seq} continues",
                        seq - 1
                    ));
                }
                Some(_) => {}
            }
            let expected = self.checkpoint.as_ref().filter(|kept| kept.seq == seq);
            if expected.is_some_and(|kept| kept.hash != line.hash) {
                return broken(
                    "the line is not the one that was written: it and what follows were replaced".into(),
                );
            }
            if line.header.action == crate::writer::PRUNE {
                let through = line.header.details.get("throughSeq").and_then(|n| n.as_u64());
                self.dropped_through = self.dropped_through.max(through.unwrap_or(0));
            }
            self.found.lines += 1;
            self.found.last_seq = seq;
            self.found.head = line.hash.to_owned();
            self.expected = Some(seq + 1);
        }
        Ok(())
    }

    /// Lines at the end that were durable and are gone.
    fn cut_off(&self, segments: &[AuditSegment]) -> Option<BrokenLine> {
        let last = self.found.last_seq;
        let kept = self.checkpoint.as_ref().filter(|kept| kept.seq > last)?;
        Some(BrokenLine {
            file: segments.last().map_or("audit/".to_owned(), AuditSegment::name),
            line: segments
                .last()
                .map_or(1, |file| (last + 2).saturating_sub(file.first)),
            seq: last + 1,
            reason: format!(
                "lines {} to {} are missing: the end of the log was removed",
                last + 1,
                kept.seq
            ),
        })
    }

    /// Lines that the log itself dropped are recorded as dropped: others were taken away.
    fn end(&mut self, segments: &[AuditSegment]) {
        let before = self.found.first_seq.saturating_sub(1);
        if before > self.dropped_through {
            self.found.broken = Some(BrokenLine {
                file: segments.first().map(AuditSegment::name).unwrap_or_default(),
                line: 1,
                seq: self.dropped_through + 1,
                reason: format!(
                    "lines {} to {before} are missing, and no later line records that they were dropped",
                    self.dropped_through + 1
                ),
            });
        }
        self.found.intact = self.found.broken.is_none();
    }
}
