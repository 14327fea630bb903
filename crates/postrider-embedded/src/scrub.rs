//! Scrub: verifies all stored data in small steps while the server runs, so that damage is known
//! before the damaged part is needed.
//!
//! Closed segments of the log are read record by record, their indexes completely, and the
//! databases block by block. The active segment is verified in a later round, once it is closed.

use crate::archive::EmbeddedArchive;
use crate::catalog::EmbeddedCatalog;
use crate::database::ReopeningDatabase;
use crate::segment::{FIRST_RECORD, ReadError, Segment, index_name};
use crate::{LogShared, segment_gaps};
use std::io;
use std::sync::Arc;

/// Bytes of the log that a step reads, or one record if that is larger.
const STEP_BYTES: u64 = 1 << 20;

/// Repeated verification of the log and the databases, round after round.
pub struct Scrub {
    log: Arc<LogShared>,
    databases: Vec<Arc<ReopeningDatabase>>,
    next: ScrubCursor,
}

/// Where the next step begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScrubCursor {
    /// In the segment with this base, or else in the first one after it.
    Log {
        base: u64,
        offset: u64,
    },
    Database {
        number: usize,
        block: u64,
    },
}

const ROUND_START: ScrubCursor = ScrubCursor::Log { base: 0, offset: 0 };

/// Outcome of a step.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ScrubStep {
    /// Bytes read.
    pub bytes: u64,
    /// Places found damaged in this step that were not known before.
    pub damaged: u64,
    /// Whether everything has been verified; the next step begins a new round.
    pub is_last: bool,
}

impl Scrub {
    pub(crate) fn new(log: Arc<LogShared>, catalog: &EmbeddedCatalog, archive: &EmbeddedArchive) -> Scrub {
        let databases = vec![log.state.database(), catalog.database(), archive.database()];
        Scrub {
            log,
            databases,
            next: ROUND_START,
        }
    }

    /// Verifies the next piece. Damage is logged and reported by the log's `health`, once per
    /// place. An error means that a file cannot be read now; the next step continues after that
    /// file.
    pub fn step(&mut self) -> io::Result<ScrubStep> {
        match self.next {
            ScrubCursor::Log { base, offset } => self.step_log(base, offset),
            ScrubCursor::Database { number, block } => self.step_database(number, block),
        }
    }

    fn step_log(&mut self, base: u64, offset: u64) -> io::Result<ScrubStep> {
        let Some(segment) = self.closed_segment(base) else {
            self.next = ScrubCursor::Database { number: 0, block: 0 };
            return Ok(ScrubStep::default());
        };
        // Advance first: after a failure below, the next step must not repeat this one.
        self.next = ScrubCursor::Log {
            base: segment.base.0 + 1,
            offset: 0,
        };
        let mut step = ScrubStep::default();
        let mut at = offset;
        if segment.base.0 != base || offset == 0 {
            at = FIRST_RECORD;
            step.damaged += u64::from(self.verify_index(&segment)?);
            step.damaged += u64::from(self.verify_head(&segment)?);
        }
        let read = self.read_records(&segment, at);
        // The segment may have been deleted meanwhile because nothing needed it any more.
        if !self.log.is_current(&segment) {
            return Ok(step);
        }
        let RecordsRead { next, bytes } = read?;
        step.bytes = bytes;
        match next {
            NextRecord::At(offset) => {
                self.next = ScrubCursor::Log {
                    base: segment.base.0,
                    offset,
                };
            }
            NextRecord::End => {}
            NextRecord::Damaged => step.damaged += self.report_segment(&segment)?,
        }
        Ok(step)
    }

    /// The first closed segment from `base` on.
    fn closed_segment(&self, base: u64) -> Option<Arc<Segment>> {
        let segments = self.log.segments.read().expect("no panic holds it");
        let active = *segments.keys().next_back()?;
        let (_, segment) = segments.range(base..active).next()?;
        Some(segment.clone())
    }

    /// Reports an index that cannot be read. A segment that is about to be sealed has no index yet.
    fn verify_index(&self, segment: &Arc<Segment>) -> io::Result<bool> {
        if !segment.is_sealed() || Segment::open_index(&*self.log.disk, segment.base)?.is_some() {
            return Ok(false);
        }
        let name = index_name(segment.base);
        Ok(self.log.is_current(segment) && self.report(format!("{name}: the index of a segment")))
    }

    fn verify_head(&self, segment: &Arc<Segment>) -> io::Result<bool> {
        if !segment_gaps::is_headless(&*self.log.disk, segment.base, self.log.identity)? {
            return Ok(false);
        }
        Ok(self.log.is_current(segment) && self.report(segment_gaps::headless(segment.base)))
    }

    fn read_records(&self, segment: &Segment, from: u64) -> io::Result<RecordsRead> {
        let (mut at, end) = (from, segment.bytes());
        while at < end && at - from < STEP_BYTES {
            match segment.read(at) {
                Ok((header, _)) => at += header.record_len() as u64,
                Err(ReadError::Damaged) => {
                    return Ok(RecordsRead {
                        next: NextRecord::Damaged,
                        bytes: at - from,
                    });
                }
                Err(ReadError::Io(e)) => return Err(e),
            }
        }
        Ok(RecordsRead {
            next: if at < end {
                NextRecord::At(at)
            } else {
                NextRecord::End
            },
            bytes: at - from,
        })
    }

    /// Reads a damaged segment completely and reports each damaged place with its events.
    fn report_segment(&self, segment: &Segment) -> io::Result<u64> {
        let limit = segment.end();
        let (_, scan) = Segment::open_scanned(&*self.log.disk, segment.base, limit, |_, _, _, _| {})?;
        let mut reported = 0;
        for damage in scan.damage.iter().filter(|damage| damage.from < segment.bytes()) {
            let mut damage = damage.clone();
            damage.events.end = damage.events.end.min(limit.0);
            reported += u64::from(self.report(segment_gaps::place_text(segment.base, &damage)));
        }
        Ok(reported)
    }

    fn step_database(&mut self, number: usize, block: u64) -> io::Result<ScrubStep> {
        let Some(database) = self.databases.get(number) else {
            self.next = ROUND_START;
            return Ok(ScrubStep {
                is_last: true,
                ..ScrubStep::default()
            });
        };
        self.next = ScrubCursor::Database {
            number: number + 1,
            block: 0,
        };
        let verified = database.verify_blocks(block)?;
        if let Some(block) = verified.next {
            self.next = ScrubCursor::Database { number, block };
        }
        let damaged = verified.damaged.into_iter();
        Ok(ScrubStep {
            bytes: verified.bytes,
            damaged: damaged.map(|place| u64::from(self.report(place))).sum(),
            is_last: false,
        })
    }

    /// Returns whether the place was not known to be damaged.
    fn report(&self, place: String) -> bool {
        let is_new = !self.log.knows_corrupt(&place);
        if is_new {
            self.log.note_corrupt(place);
        }
        is_new
    }
}

struct RecordsRead {
    next: NextRecord,
    bytes: u64,
}

enum NextRecord {
    At(u64),
    End,
    Damaged,
}

impl std::fmt::Debug for Scrub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scrub({:?})", self.next)
    }
}
