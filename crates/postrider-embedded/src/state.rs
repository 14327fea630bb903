//! The state database in redb, for small and ordered data: retries by due time, pending dead
//! letters, and the progress of subscriptions.

use crate::database::{ONLY_WHOLE, ReopeningDatabase, Salvage};
use crate::disk::Disk;
use crate::generations::GENERATIONS;
use crate::generations::{FileKind, Generations};
use crate::losses::{LOSSES_MAX, Loss};
use crate::pages::{count_by_id, u64_at};
use crate::queue::RetryKey;
use crate::record::{RecordHeader, RecordKind, SubscriptionProgress, VarintReader, decode_batch};
use crate::segment::{Segment, SegmentHead, base_of, log_name};
use crate::segment_gaps::RecordedSegments;
use bytes::Bytes;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_store::log::LastAttempt;
use postrider_store::{DeadLetterKey, Error};
use redb::{Key, ReadTransaction, ReadableTable, Table, TableDefinition, TableHandle};
use rustc_hash::FxHashMap;
use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::io;
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

/// (subscription, due, position) → state of the delivery.
const RETRIES: TableDefinition<(u64, u64, u64), &[u8]> = TableDefinition::new("retries");
/// subscription → number of retries.
const RETRY_COUNTS: TableDefinition<u64, u64> = TableDefinition::new("retry_counts");
/// (subscription, second of the event's reception) → number of retries of events of that second.
const RETRY_AGES: TableDefinition<(u64, u64), u64> = TableDefinition::new("retry_ages");
/// (subscription, given up, position) → state of the delivery, and the reason.
const LETTERS: TableDefinition<(u64, u64, u64), &[u8]> = TableDefinition::new("letters");
/// subscription → number of dead letters.
const LETTER_COUNTS: TableDefinition<u64, u64> = TableDefinition::new("letter_counts");
/// (subscription, position) → dead letter, as written by programs that did not write them to blobs.
const DEAD_LETTERS: TableDefinition<(u64, u64), &[u8]> = TableDefinition::new("dead_letters");
/// subscription → progress.
const CURSORS: TableDefinition<u64, &[u8]> = TableDefinition::new("cursors");
/// segment → number of retries and dead letters that refer to it.
const REFERENCES: TableDefinition<u64, u64> = TableDefinition::new("references");
/// segment → its end, or its base again while it is active.
const SEGMENTS: TableDefinition<u64, u64> = TableDefinition::new("segments");
/// number → a loss or damage that the operator has not acknowledged.
const LOSSES: TableDefinition<u64, &[u8]> = TableDefinition::new("losses");
/// Identity, next position, and where replaying progress from the log begins.
const FACTS: TableDefinition<&str, u64> = TableDefinition::new("facts");

const FILE: &str = FileKind::State.file();
/// Rewound subscriptions that a restore names.
const REWOUND_NAMED_MAX: usize = 20;
/// Pages that redb may keep in memory.
const CACHE_BYTES: usize = 16 << 20;

/// A delivery that failed and is due again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryEntry {
    pub due: Timestamp,
    pub position: Position,
    pub attempts_made: u32,
    pub last: Option<LastAttempt>,
    /// The record with the event: its segment, its offset, and the event's index in it.
    pub segment: Position,
    pub offset: u32,
    pub index: u32,
    /// When the event was received; `Timestamp::MIN` in records of older programs.
    pub received: Timestamp,
}

/// Where the encoded retry contains the event's reception time.
const RECEIVED: std::ops::Range<usize> = 32..40;

/// Second in which the event of an encoded retry was received, if known.
fn second_of(recorded: &[u8]) -> Option<u64> {
    let nanos: [u8; 8] = recorded.get(RECEIVED)?.try_into().ok()?;
    let second = u64::from_le_bytes(nanos) / 1_000_000_000;
    (second > 0).then_some(second)
}

impl RetryEntry {
    fn encode(&self) -> [u8; 40] {
        let mut out = [0; 40];
        out[0..4].copy_from_slice(&self.attempts_made.to_le_bytes());
        out[4] = self.last.map_or(255, |l| l.outcome.code());
        let status = self.last.and_then(|l| l.status).unwrap_or(0);
        out[6..8].copy_from_slice(&status.to_le_bytes());
        let at = self.last.map_or(0, |l| l.at.nanos());
        out[8..16].copy_from_slice(&at.to_le_bytes());
        out[16..24].copy_from_slice(&self.segment.0.to_le_bytes());
        out[24..28].copy_from_slice(&self.offset.to_le_bytes());
        out[28..32].copy_from_slice(&self.index.to_le_bytes());
        out[RECEIVED].copy_from_slice(&self.received.nanos().to_le_bytes());
        out
    }

    fn decode(due: u64, position: u64, bytes: &[u8]) -> Option<RetryEntry> {
        let bytes: &[u8; 40] = bytes.try_into().ok()?;
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let status = u16::from_le_bytes([bytes[6], bytes[7]]);
        Some(RetryEntry {
            due: Timestamp::from_nanos(due as i64),
            position: Position(position),
            attempts_made: u32_at(0),
            last: (bytes[4] != 255).then(|| LastAttempt {
                at: Timestamp::from_nanos(u64_at(8) as i64),
                outcome: Outcome::from_code(bytes[4]),
                status: (status != 0).then_some(status),
            }),
            segment: Position(u64_at(16)),
            offset: u32_at(24),
            index: u32_at(28),
            received: Timestamp::from_nanos(u64_at(32) as i64),
        })
    }
}

/// A delivery that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadLetterRow {
    /// The delivery; its `due` is the time at which it was given up.
    pub delivery: RetryEntry,
    pub reason: GiveUpReason,
}

impl DeadLetterRow {
    pub fn key(&self) -> DeadLetterKey {
        (self.delivery.due, self.delivery.position)
    }

    fn encode(&self) -> [u8; 41] {
        let mut out = [0; 41];
        out[..40].copy_from_slice(&self.delivery.encode());
        out[40] = self.reason.code();
        out
    }

    fn decode(decided: u64, position: u64, bytes: &[u8]) -> Option<DeadLetterRow> {
        let (reason, delivery) = bytes.split_last()?;
        Some(DeadLetterRow {
            delivery: RetryEntry::decode(decided, position, delivery)?,
            reason: GiveUpReason::from_code(*reason),
        })
    }
}

/// A retry, or a dead letter with its reason.
pub type OpenDeliveryRow = (SubscriptionId, RetryEntry, Option<GiveUpReason>);

/// A change to be recorded. All changes of a list become durable together.
#[derive(Clone, Debug)]
pub enum StateWrite {
    PutRetry(SubscriptionId, RetryEntry),
    RemoveRetry(SubscriptionId, Timestamp, Position, Position),
    PutLetter(SubscriptionId, DeadLetterRow),
    /// Removes dead letters. Their keys should be close together, because the whole range is
    /// scanned.
    RemoveLetters(SubscriptionId, Vec<DeadLetterKey>),
    Cursor(SubscriptionId, SubscriptionProgress),
    /// Segments that were started, or closed with this end.
    Segments(Vec<(u64, u64)>),
    /// Segments whose files may be deleted.
    SegmentsGone(Vec<u64>),
    /// Losses and damage that were found.
    Losses(Vec<Loss>),
    /// Removes all losses because the operator has acknowledged them.
    ForgetLosses,
    /// Removes everything of a subscription.
    Forget(SubscriptionId),
    Facts {
        next: Position,
        replay_from: Position,
    },
}

/// The content of the state database at a start.
#[derive(Debug, Default)]
pub struct RecoveredState {
    pub identity: u64,
    pub next: Position,
    pub replay_from: Position,
    pub cursors: Vec<(SubscriptionId, SubscriptionProgress)>,
    /// For subscriptions with retries: the earliest due time and the number of retries.
    pub retries: Vec<(SubscriptionId, Timestamp, u64)>,
    /// For subscriptions with retries: when the event of the oldest was received.
    pub oldest_retries: Vec<(SubscriptionId, Timestamp)>,
    /// For subscriptions with dead letters: when the first was given up, and their number.
    pub letters: Vec<(SubscriptionId, Timestamp, u64)>,
    pub references: FxHashMap<u64, u64>,
    pub segments: RecordedSegments,
    /// Losses found in this process or earlier ones, in that order.
    pub losses: Vec<Loss>,
}

/// Derived values that a list of writes has changed.
#[derive(Debug, Default)]
pub struct StateChanges {
    /// Segments with the number of rows that refer to them now.
    pub references: FxHashMap<u64, u64>,
    /// Subscriptions with the time their first dead letter was given up, and the number of dead
    /// letters.
    pub letters: FxHashMap<SubscriptionId, Option<(Timestamp, u64)>>,
    /// Subscriptions with the time at which the event of their oldest retry was received.
    pub oldest_retries: FxHashMap<SubscriptionId, Option<Timestamp>>,
}

pub struct StateDatabase {
    database: Arc<ReopeningDatabase>,
}

/// The range of all keys of a subscription.
fn all_of(of: u64) -> std::ops::RangeInclusive<(u64, u64, u64)> {
    (of, 0, 0)..=(of, u64::MAX, u64::MAX)
}

/// The time in the first key of a subscription, and the stored number of its keys.
fn first_of(
    table: &impl ReadableTable<(u64, u64, u64), &'static [u8]>,
    of: u64,
    count: u64,
) -> Result<Option<(Timestamp, u64)>, redb::Error> {
    let first = table.range(all_of(of))?.next().transpose()?;
    Ok(first.map(|(key, _)| (Timestamp::from_nanos(key.value().1 as i64), count)))
}

fn ages_of(of: u64) -> std::ops::RangeInclusive<(u64, u64)> {
    (of, 0)..=(of, u64::MAX)
}

/// When the event of a subscription's oldest retry was received, to the second.
fn oldest_of(ages: &impl ReadableTable<(u64, u64), u64>, of: u64) -> Result<Option<Timestamp>, redb::Error> {
    let first = ages.range(ages_of(of))?.next().transpose()?;
    Ok(first.map(|(key, _)| Timestamp::from_secs(key.value().1 as i64)))
}

/// Adds to a number in a table and removes it when it becomes zero. Returns the new value.
fn add<K>(table: &mut Table<'_, K, u64>, key: K, by: i64) -> Result<u64, redb::Error>
where
    K: Key + Copy + for<'a> Borrow<K::SelfType<'a>> + 'static,
{
    let now = table.get(key)?.map_or(0, |v| v.value());
    let then = now.saturating_add_signed(by);
    if then == 0 {
        table.remove(key)?;
    } else {
        table.insert(key, then)?;
    }
    Ok(then)
}

/// Whether a file of this version has all tables.
fn is_complete(txn: &ReadTransaction) -> Result<bool, redb::Error> {
    let names: Vec<String> = txn.list_tables()?.map(|table| table.name().to_owned()).collect();
    let there = |name: &str| names.iter().any(|known| known == name);
    let complete = there(SEGMENTS.name()) && there(RETRY_AGES.name()) && !there(DEAD_LETTERS.name());
    Ok(complete && there(FACTS.name()) && txn.open_table(FACTS)?.get("identity")?.is_some())
}

impl StateDatabase {
    /// Makes a state database of what can be read of a damaged one, and of the log. Subscriptions of which retries,
    /// letters or progress are lost begin at the oldest event that the log still holds: at least once. Returns what
    /// was lost and what follows, in words.
    pub fn rebuild(old: Option<&Salvage>, new: &Path, log: &dyn Disk) -> Result<Vec<String>, Error> {
        let held = LogContents::of(log)?;
        let known = old.and_then(|old| u64_at(old.rows(FACTS.name()).whole.get(b"identity".as_slice())?, 0));
        let Some(identity) = known.or(held.identity) else {
            return Err(Error::Corrupt(
                "neither the state database nor the log says which log this is: put back a backup".into(),
            ));
        };
        let state = StateDatabase::open(new, identity)?;
        state.database.write(|txn| {
            let mut told = Vec::new();
            let mut rewound: BTreeSet<u64> = BTreeSet::new();
            let Some(old) = old else {
                told.push("state.redb: nothing of it could be read".to_owned());
                rewind(txn, &held, &held.subscriptions, &mut told)?;
                return Ok(told);
            };
            old.copy_also_older(txn, FACTS, ONLY_WHOLE)?;
            old.copy_also_older(txn, LOSSES, ONLY_WHOLE)?;
            old.copy_also_older(txn, GENERATIONS, ONLY_WHOLE)?;
            old.copy(txn, SEGMENTS, ONLY_WHOLE)?;
            let cursors = old.copy_also_older(txn, CURSORS, ONLY_WHOLE)?;
            if !cursors.is_whole() {
                rewound.extend(&held.subscriptions);
                let table = txn.open_table(CURSORS)?;
                for row in table.iter()? {
                    rewound.remove(&row?.0.value());
                }
            }
            told.extend(cursors.describe(FILE, "positions"));
            for (rows, counts, what) in [
                (RETRIES, RETRY_COUNTS, "retries"),
                (LETTERS, LETTER_COUNTS, "dead letters"),
            ] {
                // Not of an older commit: what was settled since then would hide what is lost.
                let salvaged = old.copy(txn, rows, ONLY_WHOLE)?;
                if !salvaged.is_whole() {
                    let short = short_of(old, rows.name(), counts.name());
                    rewound.extend(short.unwrap_or_else(|| held.subscriptions.clone()));
                }
                told.extend(salvaged.describe(FILE, what));
            }
            recount(txn)?;
            rewind(txn, &held, &rewound, &mut told)?;
            Ok(told)
        })
    }

    pub fn database(&self) -> Arc<ReopeningDatabase> {
        self.database.clone()
    }

    pub fn open(path: &Path, fresh_identity: u64) -> Result<StateDatabase, Error> {
        StateDatabase::open_with(path, fresh_identity, Arc::default())
    }

    pub fn open_with(
        path: &Path,
        fresh_identity: u64,
        generations: Arc<Generations>,
    ) -> Result<StateDatabase, Error> {
        let kind = FileKind::State;
        let database = ReopeningDatabase::open("state database", path, CACHE_BYTES, kind, generations)?;
        // Not by every start: an older copy that is refused stays as old as it is.
        if database.read(is_complete)? {
            return Ok(StateDatabase {
                database: Arc::new(database),
            });
        }
        database.write(|txn| {
            txn.open_table(RETRIES)?;
            txn.open_table(RETRY_COUNTS)?;
            txn.open_table(RETRY_AGES)?;
            txn.open_table(LETTERS)?;
            txn.open_table(LETTER_COUNTS)?;
            txn.open_table(CURSORS)?;
            txn.open_table(REFERENCES)?;
            txn.open_table(SEGMENTS)?;
            let mut facts = txn.open_table(FACTS)?;
            if facts.get("identity")?.is_none() {
                facts.insert("identity", fresh_identity)?;
            }
            take_over_dead_letters(txn)
        })?;
        Ok(StateDatabase {
            database: Arc::new(database),
        })
    }

    /// Number of commits so far.
    pub fn generation(&self) -> u64 {
        self.database.generation()
    }

    /// Reopens the database: after an I/O error redb returns nothing but errors.
    pub fn reopen(&self) -> Result<(), Error> {
        self.database.reopen()
    }

    pub fn recover(&self) -> Result<RecoveredState, Error> {
        self.database.read(|txn| {
            let facts = txn.open_table(FACTS)?;
            let fact = |name| Ok::<_, redb::Error>(facts.get(name)?.map_or(0, |v| v.value()));
            let mut out = RecoveredState {
                identity: fact("identity")?,
                next: Position(fact("next")?),
                replay_from: Position(fact("replay_from")?),
                ..RecoveredState::default()
            };
            for row in txn.open_table(CURSORS)?.iter()? {
                let (of, bytes) = row?;
                let progress = SubscriptionProgress::decode(&mut VarintReader::new(bytes.value()));
                out.cursors.push((
                    SubscriptionId(of.value()),
                    progress.map(|(_, p)| p).unwrap_or_default(),
                ));
            }
            let retries = txn.open_table(RETRIES)?;
            let ages = txn.open_table(RETRY_AGES)?;
            for row in txn.open_table(RETRY_COUNTS)?.iter()? {
                let (of, count) = row?;
                let first = first_of(&retries, of.value(), count.value())?;
                out.retries
                    .extend(first.map(|(due, count)| (SubscriptionId(of.value()), due, count)));
                let oldest = oldest_of(&ages, of.value())?;
                out.oldest_retries
                    .extend(oldest.map(|oldest| (SubscriptionId(of.value()), oldest)));
            }
            let letters = txn.open_table(LETTERS)?;
            for row in txn.open_table(LETTER_COUNTS)?.iter()? {
                let (of, count) = row?;
                let first = first_of(&letters, of.value(), count.value())?;
                out.letters
                    .extend(first.map(|(decided, count)| (SubscriptionId(of.value()), decided, count)));
            }
            for row in txn.open_table(REFERENCES)?.iter()? {
                let (segment, count) = row?;
                out.references.insert(segment.value(), count.value());
            }
            for row in txn.open_table(SEGMENTS)?.iter()? {
                let (base, end) = row?;
                out.segments.insert(base.value(), end.value());
            }
            // The table exists only once there was a loss.
            match txn.open_table(LOSSES) {
                Err(redb::TableError::TableDoesNotExist(_)) => {}
                losses => {
                    for row in losses?.iter()? {
                        out.losses.extend(Loss::decode(row?.1.value()));
                    }
                }
            }
            Ok(out)
        })
    }

    /// Retries of a subscription that are due by `now`, earliest first, except those in `skip`; and
    /// the due time of the next one after them.
    pub fn due(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        max: usize,
        skip: impl Fn(Timestamp, Position) -> bool,
    ) -> Result<(Vec<RetryEntry>, Option<Timestamp>), Error> {
        self.database.read(|txn| {
            let table = txn.open_table(RETRIES)?;
            let mut found = Vec::new();
            for row in table.range(all_of(of.0))? {
                let (key, value) = row?;
                let (_, due, position) = key.value();
                let at = Timestamp::from_nanos(due as i64);
                if skip(at, Position(position)) {
                    continue;
                }
                if at > now || found.len() == max {
                    return Ok((found, Some(at)));
                }
                found.extend(RetryEntry::decode(due, position, value.value()));
            }
            Ok((found, None))
        })
    }

    /// Retries and dead letters of all subscriptions with events at these positions, by position
    /// and subscription.
    pub fn open_within(&self, positions: std::ops::Range<Position>) -> Result<Vec<OpenDeliveryRow>, Error> {
        self.database.read(|txn| {
            let within = |position: u64| positions.contains(&Position(position));
            let mut found = Vec::new();
            for row in txn.open_table(RETRIES)?.iter()? {
                let (key, value) = row?;
                let (of, due, position) = key.value();
                if within(position) {
                    let retry = RetryEntry::decode(due, position, value.value());
                    found.extend(retry.map(|retry| (SubscriptionId(of), retry, None)));
                }
            }
            for row in txn.open_table(LETTERS)?.iter()? {
                let (key, value) = row?;
                let (of, decided, position) = key.value();
                if within(position) {
                    let letter = DeadLetterRow::decode(decided, position, value.value());
                    found.extend(letter.map(|one| (SubscriptionId(of), one.delivery, Some(one.reason))));
                }
            }
            found.sort_by_key(|(of, delivery, _)| (delivery.position, *of));
            Ok(found)
        })
    }

    /// The existing ones of these retries of a subscription, in the order of `keys`.
    pub fn retries(&self, of: SubscriptionId, keys: &[RetryKey]) -> Result<Vec<RetryEntry>, Error> {
        self.database.read(|txn| {
            let table = txn.open_table(RETRIES)?;
            let mut found = Vec::new();
            for (due, position) in keys {
                let due = due.nanos() as u64;
                if let Some(value) = table.get((of.0, due, position.0))? {
                    found.extend(RetryEntry::decode(due, position.0, value.value()));
                }
            }
            Ok(found)
        })
    }

    /// Dead letters of a subscription after `after` that were given up by `until`, at most `max`,
    /// in order.
    pub fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        max: usize,
    ) -> Result<Vec<DeadLetterRow>, Error> {
        let key = |(decided, position): DeadLetterKey| (of.0, decided.nanos() as u64, position.0);
        let from = after.map_or(Bound::Included((of.0, 0, 0)), |after| Bound::Excluded(key(after)));
        let to = key((until, Position(u64::MAX)));
        if max == 0 || after.is_some_and(|after| key(after) >= to) {
            return Ok(Vec::new());
        }
        self.database.read(|txn| {
            let table = txn.open_table(LETTERS)?;
            let mut found = Vec::new();
            for row in table.range((from, Bound::Included(to)))?.take(max) {
                let (key, value) = row?;
                let (_, decided, position) = key.value();
                found.extend(DeadLetterRow::decode(decided, position, value.value()));
            }
            Ok(found)
        })
    }

    pub fn has_letter(&self, of: SubscriptionId, (decided, position): DeadLetterKey) -> Result<bool, Error> {
        self.database.read(|txn| {
            let table = txn.open_table(LETTERS)?;
            Ok(table.get((of.0, decided.nanos() as u64, position.0))?.is_some())
        })
    }

    /// Records a list of changes, all or none.
    pub fn write(&self, writes: &[StateWrite]) -> Result<StateChanges, Error> {
        self.database.write(|txn| {
            let mut retries = txn.open_table(RETRIES)?;
            let mut counts = txn.open_table(RETRY_COUNTS)?;
            let mut ages = txn.open_table(RETRY_AGES)?;
            let mut letters = txn.open_table(LETTERS)?;
            let mut letter_counts = txn.open_table(LETTER_COUNTS)?;
            let mut cursors = txn.open_table(CURSORS)?;
            let mut references = txn.open_table(REFERENCES)?;
            let mut segments = txn.open_table(SEGMENTS)?;
            let mut facts = txn.open_table(FACTS)?;
            let mut count_by: FxHashMap<u64, i64> = FxHashMap::default();
            // Changes per age. A retry that fails again keeps its age, so its row is unchanged.
            let mut age_by: FxHashMap<(u64, u64), i64> = FxHashMap::default();
            let mut letters_by: FxHashMap<u64, i64> = FxHashMap::default();
            let mut refer_by: FxHashMap<u64, i64> = FxHashMap::default();
            for write in writes {
                match write {
                    StateWrite::PutRetry(of, entry) => {
                        let key = (of.0, entry.due.nanos() as u64, entry.position.0);
                        let value = entry.encode();
                        let before = retries.insert(key, value.as_slice())?;
                        if let Some(second) = before.as_ref().and_then(|value| second_of(value.value())) {
                            *age_by.entry((of.0, second)).or_default() -= 1;
                        }
                        if before.is_none() {
                            *count_by.entry(of.0).or_default() += 1;
                            *refer_by.entry(entry.segment.0).or_default() += 1;
                        }
                        if let Some(second) = second_of(&value) {
                            *age_by.entry((of.0, second)).or_default() += 1;
                        }
                    }
                    StateWrite::RemoveRetry(of, due, position, segment) => {
                        if let Some(value) = retries.remove((of.0, due.nanos() as u64, position.0))? {
                            *count_by.entry(of.0).or_default() -= 1;
                            *refer_by.entry(segment.0).or_default() -= 1;
                            if let Some(second) = second_of(value.value()) {
                                *age_by.entry((of.0, second)).or_default() -= 1;
                            }
                        }
                    }
                    StateWrite::PutLetter(of, letter) => {
                        let (decided, position) = letter.key();
                        let key = (of.0, decided.nanos() as u64, position.0);
                        if letters.insert(key, letter.encode().as_slice())?.is_none() {
                            *letters_by.entry(of.0).or_default() += 1;
                            *refer_by.entry(letter.delivery.segment.0).or_default() += 1;
                        }
                    }
                    StateWrite::RemoveLetters(of, keys) => {
                        let (removed, of_segments) = remove_letters(&mut letters, of.0, keys)?;
                        *letters_by.entry(of.0).or_default() -= removed;
                        for (segment, by) in of_segments {
                            *refer_by.entry(segment).or_default() -= by;
                        }
                    }
                    StateWrite::Cursor(of, progress) => {
                        let mut bytes = Vec::new();
                        progress.encode(*of, &mut bytes);
                        cursors.insert(of.0, bytes.as_slice())?;
                    }
                    StateWrite::Forget(of) => {
                        cursors.remove(of.0)?;
                        counts.remove(of.0)?;
                        count_by.remove(&of.0);
                        age_by.retain(|(other, _), _| *other != of.0);
                        ages.retain_in(ages_of(of.0), |_, _| false)?;
                        for row in retries.extract_from_if(all_of(of.0), |_, _| true)? {
                            let (key, value) = row?;
                            let (_, due, position) = key.value();
                            if let Some(entry) = RetryEntry::decode(due, position, value.value()) {
                                *refer_by.entry(entry.segment.0).or_default() -= 1;
                            }
                        }
                        for row in letters.extract_from_if(all_of(of.0), |_, _| true)? {
                            let (key, value) = row?;
                            let (_, decided, position) = key.value();
                            *letters_by.entry(of.0).or_default() -= 1;
                            if let Some(letter) = DeadLetterRow::decode(decided, position, value.value()) {
                                *refer_by.entry(letter.delivery.segment.0).or_default() -= 1;
                            }
                        }
                    }
                    StateWrite::Losses(losses) => {
                        let mut table = txn.open_table(LOSSES)?;
                        for loss in losses {
                            let last = table.last()?.map_or(0, |row| row.0.value());
                            if last < LOSSES_MAX {
                                table.insert(last + 1, loss.encode().as_slice())?;
                            }
                        }
                    }
                    StateWrite::ForgetLosses => {
                        txn.open_table(LOSSES)?.retain(|_, _| false)?;
                    }
                    StateWrite::Segments(begun) => {
                        for (base, end) in begun {
                            segments.insert(base, end)?;
                        }
                    }
                    StateWrite::SegmentsGone(bases) => {
                        for base in bases {
                            segments.remove(base)?;
                        }
                    }
                    StateWrite::Facts { next, replay_from } => {
                        facts.insert("next", next.0)?;
                        facts.insert("replay_from", replay_from.0)?;
                    }
                }
            }
            let mut changed = StateChanges::default();
            for ((of, second), by) in age_by {
                if by != 0 {
                    add(&mut ages, (of, second), by)?;
                    count_by.entry(of).or_default();
                }
            }
            for (of, by) in count_by {
                if add(&mut counts, of, by)? == 0 {
                    // Remove rows left behind by an older program that ran in between and did not
                    // know this table.
                    ages.retain_in(ages_of(of), |_, _| false)?;
                }
                let oldest = oldest_of(&ages, of)?;
                changed.oldest_retries.insert(SubscriptionId(of), oldest);
            }
            for (of, by) in letters_by {
                let count = add(&mut letter_counts, of, by)?;
                let first = first_of(&letters, of, count)?;
                changed.letters.insert(SubscriptionId(of), first);
            }
            for (segment, by) in refer_by {
                let count = add(&mut references, segment, by)?;
                changed.references.insert(segment, count);
            }
            Ok(changed)
        })
    }
}

/// The content of the log's files, without the state database.
struct LogContents {
    identity: Option<u64>,
    next: u64,
    subscriptions: BTreeSet<u64>,
}

impl LogContents {
    fn of(log: &dyn Disk) -> Result<LogContents, Error> {
        let unreadable = |e: io::Error| Error::Unavailable(format!("reading the log: {e}"));
        let mut held = LogContents {
            identity: None,
            next: 0,
            subscriptions: BTreeSet::new(),
        };
        for base in log
            .names()
            .map_err(unreadable)?
            .iter()
            .filter_map(|name| base_of(name))
        {
            let file = log.open(&log_name(base)).map_err(unreadable)?;
            held.identity = held.identity.or(SegmentHead::read(&*file)
                .map_err(unreadable)?
                .map(|head| head.identity));
            let index = |segment: &Segment, offset, header: &RecordHeader, payload: &Bytes| {
                if header.kind == RecordKind::Batch
                    && let Some(batch) = decode_batch(payload)
                {
                    segment.index_batch(offset, header.first, &batch);
                }
            };
            let scanned = Segment::open_scanned(log, base, Position(u64::MAX), index);
            let (segment, scan) = scanned.map_err(unreadable)?;
            held.next = held.next.max(scan.next.0);
            held.subscriptions
                .extend(segment.subscriptions().iter().map(|(of, _, _)| of.0));
        }
        Ok(held)
    }
}

/// Subscriptions of which fewer rows can be read than were counted; none if not all counts can be read.
fn short_of(old: &Salvage, rows: &str, counts: &str) -> Option<BTreeSet<u64>> {
    let readable = count_by_id(&old.rows(rows));
    let counts = old.rows(counts);
    let short = counts.whole.iter().filter_map(|(of, count)| {
        let (of, count) = (u64_at(of, 0)?, u64_at(count, 0)?);
        (readable.get(&of).copied().unwrap_or(0) < count).then_some(of)
    });
    counts.is_complete.then(|| short.collect())
}

/// Lets these subscriptions begin at the oldest event in the log.
fn rewind(
    txn: &redb::WriteTransaction,
    held: &LogContents,
    rewound: &BTreeSet<u64>,
    told: &mut Vec<String>,
) -> Result<(), redb::Error> {
    let mut cursors = txn.open_table(CURSORS)?;
    for of in rewound {
        let mut bytes = Vec::new();
        SubscriptionProgress::default().encode(SubscriptionId(*of), &mut bytes);
        cursors.insert(of, bytes.as_slice())?;
    }
    let mut facts = txn.open_table(FACTS)?;
    // The log's own progress records must not undo this.
    facts.insert("replay_from", u64::MAX)?;
    let next = facts.get("next")?.map_or(0, |next| next.value());
    facts.insert("next", next.max(held.next))?;
    if !rewound.is_empty() {
        let named: Vec<String> = rewound
            .iter()
            .take(REWOUND_NAMED_MAX)
            .map(u64::to_string)
            .collect();
        told.push(format!(
            "{} subscriptions begin again at the oldest event in the log, so that deliveries are made twice rather \
             than never: ids {}",
            rewound.len(),
            named.join(", ")
        ));
    }
    Ok(())
}

/// Rebuilds the counts that are derived from retries and dead letters.
fn recount(txn: &redb::WriteTransaction) -> Result<(), redb::Error> {
    let mut references = txn.open_table(REFERENCES)?;
    let mut ages = txn.open_table(RETRY_AGES)?;
    for (rows, counts) in [(RETRIES, RETRY_COUNTS), (LETTERS, LETTER_COUNTS)] {
        let rows = txn.open_table(rows)?;
        let mut counts = txn.open_table(counts)?;
        for row in rows.iter()? {
            let (key, value) = row?;
            let (of, due, position) = key.value();
            let value = value.value();
            add(&mut counts, of, 1)?;
            // An encoded dead letter is an encoded retry plus one byte.
            let delivery = RetryEntry::decode(due, position, &value[..value.len().min(40)]);
            if let Some(delivery) = delivery {
                add(&mut references, delivery.segment.0, 1)?;
            }
            if value.len() == 40
                && let Some(second) = second_of(value)
            {
                add(&mut ages, (of, second), 1)?;
            }
        }
    }
    Ok(())
}

/// Removes those of these dead letters that exist. Returns their number, in total and per segment.
///
/// Scans the range once: separate lookups take several times as long, and a blob has thousands of
/// dead letters.
fn remove_letters(
    letters: &mut Table<'_, (u64, u64, u64), &'static [u8]>,
    of: u64,
    keys: &[DeadLetterKey],
) -> Result<(i64, FxHashMap<u64, i64>), redb::Error> {
    let mut keys: Vec<(u64, u64, u64)> = keys
        .iter()
        .map(|(decided, position)| (of, decided.nanos() as u64, position.0))
        .collect();
    keys.sort_unstable();
    let mut removed = 0;
    let mut segments: FxHashMap<u64, i64> = FxHashMap::default();
    if let (Some(first), Some(last)) = (keys.first(), keys.last()) {
        let mut rest = keys.iter().peekable();
        letters.retain_in(*first..=*last, |key, value| {
            while rest.next_if(|next| **next < key).is_some() {}
            let keep = rest.peek() != Some(&&key);
            if !keep {
                removed += 1;
                if let Some(letter) = DeadLetterRow::decode(key.1, key.2, value) {
                    *segments.entry(letter.delivery.segment.0).or_default() += 1;
                }
            }
            keep
        })?;
    }
    Ok((removed, segments))
}

/// Converts dead letters that an older program recorded, with the time of their last attempt as the
/// time they were given up. Those of closed subscriptions are dropped, which older programs did not
/// do.
fn take_over_dead_letters(txn: &redb::WriteTransaction) -> Result<(), redb::Error> {
    if !txn
        .list_tables()?
        .any(|table| table.name() == DEAD_LETTERS.name())
    {
        return Ok(());
    }
    {
        let old = txn.open_table(DEAD_LETTERS)?;
        let cursors = txn.open_table(CURSORS)?;
        let mut letters = txn.open_table(LETTERS)?;
        let mut counts = txn.open_table(LETTER_COUNTS)?;
        let mut references = txn.open_table(REFERENCES)?;
        for row in old.iter()? {
            let (key, value) = row?;
            let (of, position) = key.value();
            let Some(mut letter) = DeadLetterRow::decode(0, position, value.value()) else {
                continue;
            };
            if cursors.get(of)?.is_none() {
                add(&mut references, letter.delivery.segment.0, -1)?;
                continue;
            }
            letter.delivery.due = letter.delivery.last.map_or(Timestamp::MIN, |last| last.at);
            let decided = letter.delivery.due.nanos() as u64;
            letters.insert((of, decided, position), letter.encode().as_slice())?;
            add(&mut counts, of, 1)?;
        }
    }
    txn.delete_table(DEAD_LETTERS)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::open_database;
    use postrider_store::conformance::{at, sub};

    fn delivery(position: u64, last: Option<i64>, segment: u64) -> RetryEntry {
        RetryEntry {
            due: Timestamp::MIN,
            position: Position(position),
            attempts_made: 4,
            last: last.map(|secs| LastAttempt {
                at: at(secs),
                outcome: Outcome::Busy,
                status: Some(503),
            }),
            segment: Position(segment),
            offset: 64,
            index: 3,
            received: Timestamp::MIN,
        }
    }

    #[test]
    fn the_age_of_the_oldest_retry_is_known() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.redb");
        let state = StateDatabase::open(&path, 7).unwrap();
        let retry = |position, due, received| RetryEntry {
            due: at(due),
            received,
            ..delivery(position, None, 0)
        };
        let put = |of, retry| StateWrite::PutRetry(sub(of), retry);
        let remove = |of, retry: RetryEntry| {
            StateWrite::RemoveRetry(sub(of), retry.due, retry.position, retry.segment)
        };
        let write = |writes: &[StateWrite]| state.write(writes).unwrap().oldest_retries;
        let half = std::time::Duration::from_millis(500);
        let (a, b, c) = (
            retry(1, 5, at(10) + half),
            retry(2, 3, at(10)),
            retry(3, 1, at(20)),
        );
        let changed = write(&[put(1, a), put(1, b), put(1, c), put(2, c)]);
        assert_eq!(changed.get(&sub(1)), Some(&Some(at(10))), "to the second");
        assert_eq!(changed.get(&sub(2)), Some(&Some(at(20))));
        // A retry that fails again keeps its age.
        let again = RetryEntry { due: at(50), ..a };
        assert_eq!(
            write(&[remove(1, a), put(1, again)]).get(&sub(1)),
            Some(&Some(at(10)))
        );
        assert_eq!(write(&[remove(1, b)]).get(&sub(1)), Some(&Some(at(10))));
        assert_eq!(write(&[remove(1, b)]).get(&sub(1)), None, "it is gone already");
        assert_eq!(write(&[remove(1, again)]).get(&sub(1)), Some(&Some(at(20))));
        let known = StateDatabase::recover(&state).unwrap().oldest_retries;
        assert_eq!(known, [(sub(1), at(20)), (sub(2), at(20))]);
        write(&[StateWrite::Forget(sub(2))]);
        assert_eq!(write(&[remove(1, c)]).get(&sub(1)), Some(&None));

        // An older program records no reception time. Rows it does not know stay until there is no
        // retry at all.
        let old = retry(4, 9, Timestamp::MIN);
        assert_eq!(write(&[put(1, old)]).get(&sub(1)), Some(&None));
        assert_eq!(write(&[put(1, a)]).get(&sub(1)), Some(&Some(at(10))));
        state
            .database
            .write(|txn| {
                txn.open_table(RETRIES)?.remove((1, a.due.nanos() as u64, 1))?;
                txn.open_table(RETRY_COUNTS)?.insert(1, 1)?;
                Ok(())
            })
            .unwrap();
        assert_eq!(write(&[remove(1, old)]).get(&sub(1)), Some(&None));
        assert_eq!(write(&[put(1, c)]).get(&sub(1)), Some(&Some(at(20))));
    }

    // A file of an older program: dead letters without a time, kept even after their subscription
    // is closed.
    #[test]
    fn dead_letters_of_an_older_program_become_letters() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.redb");
        let old = [
            (1, delivery(10, Some(9), 0), GiveUpReason::BadRequest),
            (1, delivery(11, Some(5), 0), GiveUpReason::AttemptsExhausted),
            (1, delivery(12, None, 8), GiveUpReason::TimeToLiveExceeded),
            (2, delivery(10, Some(7), 0), GiveUpReason::BadRequest),
            (3, delivery(13, Some(1), 8), GiveUpReason::BadRequest),
            (3, delivery(14, Some(1), 16), GiveUpReason::BadRequest),
        ];
        {
            let database = open_database(&path, CACHE_BYTES).unwrap();
            let txn = database.begin_write().unwrap();
            let mut table = txn.open_table(DEAD_LETTERS).unwrap();
            for (of, delivery, reason) in old {
                let value = DeadLetterRow { delivery, reason }.encode();
                table.insert((of, delivery.position.0), value.as_slice()).unwrap();
            }
            drop(table);
            let mut cursors = txn.open_table(CURSORS).unwrap();
            for of in [1, 2] {
                let mut bytes = Vec::new();
                SubscriptionProgress::default().encode(sub(of), &mut bytes);
                cursors.insert(of, bytes.as_slice()).unwrap();
            }
            drop(cursors);
            let mut references = txn.open_table(REFERENCES).unwrap();
            for (segment, count) in [(0, 3), (8, 2), (16, 1)] {
                references.insert(segment, count).unwrap();
            }
            drop(references);
            txn.commit().unwrap();
        }
        for _ in 0..2 {
            let state = StateDatabase::open(&path, 7).unwrap();
            let known = state.recover().unwrap();
            assert_eq!(
                known.letters,
                [(sub(1), Timestamp::MIN, 3), (sub(2), at(7), 1)],
                "those of the third are gone with it"
            );
            assert_eq!(known.references, FxHashMap::from_iter([(0, 3), (8, 1)]));
            let letters = state.letters(sub(1), None, at(100), 10).unwrap();
            let expected = [(2, Timestamp::MIN), (1, at(5)), (0, at(9))];
            assert_eq!(letters.len(), expected.len());
            for (letter, (n, decided)) in letters.iter().zip(expected) {
                let (_, delivery, reason) = old[n];
                let delivery = RetryEntry {
                    due: decided,
                    ..delivery
                };
                assert_eq!(*letter, DeadLetterRow { delivery, reason });
            }
        }
    }
}
