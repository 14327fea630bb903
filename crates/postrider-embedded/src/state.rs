//! The small, ordered part of the store, in redb: retries by due time, pending dead letters, and how
//! far subscriptions have come.

use crate::disk::open_database;
use crate::queue::RetryKey;
use crate::record::{Progress, Reader};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::Reason;
use postrider_core::time::Timestamp;
use postrider_store::Error;
use postrider_store::log::LastAttempt;
use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition};
use rustc_hash::FxHashMap;
use std::path::{Path, PathBuf};
use std::sync::RwLock;

/// (subscription, due, position) → what is known of the delivery.
const RETRIES: TableDefinition<(u64, u64, u64), &[u8]> = TableDefinition::new("retries");
/// subscription → how many retries it has.
const RETRY_COUNTS: TableDefinition<u64, u64> = TableDefinition::new("retry_counts");
/// (subscription, position) → why and after what.
const DEAD_LETTERS: TableDefinition<(u64, u64), &[u8]> = TableDefinition::new("dead_letters");
/// subscription → progress.
const CURSORS: TableDefinition<u64, &[u8]> = TableDefinition::new("cursors");
/// segment → retries and dead letters that refer to it.
const REFERENCES: TableDefinition<u64, u64> = TableDefinition::new("references");
/// identity, next position, where reading progress from the log begins.
const FACTS: TableDefinition<&str, u64> = TableDefinition::new("facts");

/// Pages that redb may keep in memory.
const CACHE_BYTES: usize = 16 << 20;

/// A delivery that failed and is due again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryEntry {
    pub due: Timestamp,
    pub position: Position,
    pub attempts_made: u32,
    pub last: Option<LastAttempt>,
    /// The record that holds the event: its segment, its place there, the event's number in it.
    pub segment: Position,
    pub offset: u32,
    pub index: u32,
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
        })
    }
}

/// One thing to be recorded. All of a list become durable together.
#[derive(Clone, Debug)]
pub enum Write {
    PutRetry(SubscriptionId, RetryEntry),
    RemoveRetry(SubscriptionId, Timestamp, Position, Position),
    PutDeadLetter(SubscriptionId, RetryEntry, Reason),
    Cursor(SubscriptionId, Progress),
    /// Removes everything of a subscription.
    Forget(SubscriptionId),
    Facts {
        next: Position,
        replay_from: Position,
    },
}

/// What is known at a start.
#[derive(Debug, Default)]
pub struct Recovered {
    pub identity: u64,
    pub next: Position,
    pub replay_from: Position,
    pub cursors: Vec<(SubscriptionId, Progress)>,
    /// For subscriptions with retries: the earliest due time and how many.
    pub retries: Vec<(SubscriptionId, Timestamp, u64)>,
    pub references: FxHashMap<u64, u64>,
}

pub struct State {
    path: PathBuf,
    /// Behind a lock because it is opened anew after an input or output error; none while that fails.
    database: RwLock<Option<Database>>,
}

fn failed(e: impl std::fmt::Display) -> Error {
    Error::Unavailable(format!("state database: {e}"))
}

fn opened(database: &Option<Database>) -> Result<&Database, redb::Error> {
    database.as_ref().ok_or(redb::Error::DatabaseClosed)
}

impl State {
    pub fn open(path: &Path, fresh_identity: u64) -> Result<State, Error> {
        let database = open_database(path, CACHE_BYTES).map_err(Error::Unavailable)?;
        let state = State {
            path: path.to_owned(),
            database: RwLock::new(Some(database)),
        };
        state.write_with(|txn| {
            txn.open_table(RETRIES)?;
            txn.open_table(RETRY_COUNTS)?;
            txn.open_table(DEAD_LETTERS)?;
            txn.open_table(CURSORS)?;
            txn.open_table(REFERENCES)?;
            let mut facts = txn.open_table(FACTS)?;
            if facts.get("identity")?.is_none() {
                facts.insert("identity", fresh_identity)?;
            }
            Ok(())
        })?;
        Ok(state)
    }

    fn write_with(
        &self,
        work: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), Error> {
        let result = (|| {
            let database = self.database.read().expect("no panic holds it");
            let txn = opened(&database)?.begin_write()?;
            work(&txn)?;
            txn.commit()?;
            Ok::<(), redb::Error>(())
        })();
        result.map_err(failed)
    }

    /// Opens the database anew: after an error redb answers nothing but errors.
    pub fn reopen(&self) -> Result<(), Error> {
        let mut database = self.database.write().expect("no panic holds it");
        // The old one must be closed first: it holds the file's lock.
        *database = None;
        *database = Some(open_database(&self.path, CACHE_BYTES).map_err(Error::Unavailable)?);
        Ok(())
    }

    pub fn recover(&self) -> Result<Recovered, Error> {
        let database = self.database.read().expect("no panic holds it");
        let read = || -> Result<Recovered, redb::Error> {
            let txn = opened(&database)?.begin_read()?;
            let facts = txn.open_table(FACTS)?;
            let fact = |name| Ok::<_, redb::Error>(facts.get(name)?.map_or(0, |v| v.value()));
            let mut out = Recovered {
                identity: fact("identity")?,
                next: Position(fact("next")?),
                replay_from: Position(fact("replay_from")?),
                ..Recovered::default()
            };
            for row in txn.open_table(CURSORS)?.iter()? {
                let (of, bytes) = row?;
                let progress = Progress::decode(&mut Reader::new(bytes.value()));
                out.cursors.push((
                    SubscriptionId(of.value()),
                    progress.map(|(_, p)| p).unwrap_or_default(),
                ));
            }
            let retries = txn.open_table(RETRIES)?;
            for row in txn.open_table(RETRY_COUNTS)?.iter()? {
                let (of, count) = row?;
                let of = of.value();
                if let Some(first) = retries.range((of, 0, 0)..=(of, u64::MAX, u64::MAX))?.next() {
                    let due = first?.0.value().1;
                    out.retries.push((
                        SubscriptionId(of),
                        Timestamp::from_nanos(due as i64),
                        count.value(),
                    ));
                }
            }
            for row in txn.open_table(REFERENCES)?.iter()? {
                let (segment, count) = row?;
                out.references.insert(segment.value(), count.value());
            }
            Ok(out)
        };
        read().map_err(failed)
    }

    /// Retries of one subscription that are due by `now`, earliest first, without those that `skip`
    /// names; and when the next one after them comes due.
    pub fn due(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        max: usize,
        skip: impl Fn(Timestamp, Position) -> bool,
    ) -> Result<(Vec<RetryEntry>, Option<Timestamp>), Error> {
        let database = self.database.read().expect("no panic holds it");
        let read = || -> Result<_, redb::Error> {
            let txn = opened(&database)?.begin_read()?;
            let table = txn.open_table(RETRIES)?;
            let mut found = Vec::new();
            for row in table.range((of.0, 0, 0)..=(of.0, u64::MAX, u64::MAX))? {
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
        };
        read().map_err(failed)
    }

    /// Those of these retries of one subscription that are there, in the order in which they are named.
    pub fn retries(&self, of: SubscriptionId, keys: &[RetryKey]) -> Result<Vec<RetryEntry>, Error> {
        let database = self.database.read().expect("no panic holds it");
        let read = || -> Result<_, redb::Error> {
            let table = opened(&database)?.begin_read()?.open_table(RETRIES)?;
            let mut found = Vec::new();
            for (due, position) in keys {
                let due = due.nanos() as u64;
                if let Some(value) = table.get((of.0, due, position.0))? {
                    found.extend(RetryEntry::decode(due, position.0, value.value()));
                }
            }
            Ok(found)
        };
        read().map_err(failed)
    }

    /// Records a list of things, all or none. Returns the references to segments that changed.
    pub fn write(&self, writes: &[Write]) -> Result<FxHashMap<u64, u64>, Error> {
        let mut changed: FxHashMap<u64, u64> = FxHashMap::default();
        self.write_with(|txn| {
            let mut retries = txn.open_table(RETRIES)?;
            let mut counts = txn.open_table(RETRY_COUNTS)?;
            let mut dead = txn.open_table(DEAD_LETTERS)?;
            let mut cursors = txn.open_table(CURSORS)?;
            let mut references = txn.open_table(REFERENCES)?;
            let mut facts = txn.open_table(FACTS)?;
            let mut count_by: FxHashMap<u64, i64> = FxHashMap::default();
            let mut refer_by: FxHashMap<u64, i64> = FxHashMap::default();
            for write in writes {
                match write {
                    Write::PutRetry(of, entry) => {
                        let key = (of.0, entry.due.nanos() as u64, entry.position.0);
                        if retries.insert(key, entry.encode().as_slice())?.is_none() {
                            *count_by.entry(of.0).or_default() += 1;
                            *refer_by.entry(entry.segment.0).or_default() += 1;
                        }
                    }
                    Write::RemoveRetry(of, due, position, segment) => {
                        if retries.remove((of.0, due.nanos() as u64, position.0))?.is_some() {
                            *count_by.entry(of.0).or_default() -= 1;
                            *refer_by.entry(segment.0).or_default() -= 1;
                        }
                    }
                    Write::PutDeadLetter(of, entry, reason) => {
                        let mut value = entry.encode().to_vec();
                        value.push(reason.code());
                        if dead.insert((of.0, entry.position.0), value.as_slice())?.is_none() {
                            *refer_by.entry(entry.segment.0).or_default() += 1;
                        }
                    }
                    Write::Cursor(of, progress) => {
                        let mut bytes = Vec::new();
                        progress.encode(*of, &mut bytes);
                        cursors.insert(of.0, bytes.as_slice())?;
                    }
                    Write::Forget(of) => {
                        cursors.remove(of.0)?;
                        counts.remove(of.0)?;
                        count_by.remove(&of.0);
                        let all = (of.0, 0, 0)..=(of.0, u64::MAX, u64::MAX);
                        for row in retries.extract_from_if(all, |_, _| true)? {
                            let (key, value) = row?;
                            let (_, due, position) = key.value();
                            if let Some(entry) = RetryEntry::decode(due, position, value.value()) {
                                *refer_by.entry(entry.segment.0).or_default() -= 1;
                            }
                        }
                    }
                    Write::Facts { next, replay_from } => {
                        facts.insert("next", next.0)?;
                        facts.insert("replay_from", replay_from.0)?;
                    }
                }
            }
            let add =
                |table: &mut redb::Table<'_, u64, u64>, key: u64, by: i64| -> Result<u64, redb::Error> {
                    let now = table.get(key)?.map_or(0, |v| v.value());
                    let then = now.saturating_add_signed(by);
                    if then == 0 {
                        table.remove(key)?;
                    } else {
                        table.insert(key, then)?;
                    }
                    Ok(then)
                };
            for (of, by) in count_by {
                add(&mut counts, of, by)?;
            }
            for (segment, by) in refer_by {
                changed.insert(segment, add(&mut references, segment, by)?);
            }
            Ok(())
        })?;
        Ok(changed)
    }

    pub fn dead_letters(&self) -> Result<u64, Error> {
        let database = self.database.read().expect("no panic holds it");
        let read = || -> Result<u64, redb::Error> {
            Ok(opened(&database)?.begin_read()?.open_table(DEAD_LETTERS)?.len()?)
        };
        read().map_err(failed)
    }
}
