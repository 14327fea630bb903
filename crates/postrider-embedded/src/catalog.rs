//! The catalog in a redb file of its own: it changes rarely and is read as a whole. Its records are
//! sealed because they contain keys, webhook URLs and delivery secrets.

use crate::database::{ONLY_WHOLE, ReopeningDatabase, Salvage, SalvagedTable};
use crate::disk::{open_database, replace_file};
use crate::generations::{FileKind, GENERATIONS, Generations};
use crate::pages::u64_at;
use async_trait::async_trait;
use postrider_core::ids::TopicId;
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use postrider_store::record::StoredRecord;
use postrider_store::seal::{KeyId, Keyring, SealError, key_of};
use postrider_store::{Catalog, CatalogChange, CatalogContent, Error, Handshake};
use redb::{
    Database, Key, Range, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    StorageError, Table, TableDefinition, TableError, TableHandle, Value, WriteTransaction,
};
use std::collections::VecDeque;
use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::oneshot;

const TOPICS: TableDefinition<u64, &[u8]> = TableDefinition::new("topics");
const DOMAIN_TOPICS: TableDefinition<(u64, &str), &[u8]> = TableDefinition::new("domain_topics");
const SUBSCRIPTIONS: TableDefinition<u64, &[u8]> = TableDefinition::new("subscriptions");
const ENDPOINT_DELAYS: TableDefinition<&str, &[u8]> = TableDefinition::new("endpoint_delays");
const HANDSHAKES: TableDefinition<&str, &[u8]> = TableDefinition::new("handshakes");
const FACTS: TableDefinition<&str, u64> = TableDefinition::new("facts");

/// Id of the key that every record of the file is sealed under; absent in files of older programs,
/// which do not seal.
const SEALED_BY: &str = "sealed_by";

/// Ids are reserved in blocks, so that allocating one rarely needs a commit.
const ID_BLOCK: u64 = 1024;
const CACHE_BYTES: usize = 8 << 20;
/// Maximum number of requests in one commit, so that the first of them do not wait for too many
/// others.
const COMMIT_REQUESTS_MAX: usize = 1024;

/// Tables with at least this many rows are decoded on all processors.
const MANY_ROWS: usize = 10_000;

/// The catalog on local files. All requests that arrive during a commit share the next one, because
/// a flush costs the same for one change and for hundreds.
pub struct EmbeddedCatalog {
    shared: Arc<CatalogWriterState>,
    next_id: AtomicU64,
    reserved: tokio::sync::Mutex<u64>,
}

struct CatalogWriterState {
    database: Arc<ReopeningDatabase>,
    keys: Arc<Keyring>,
    waiting: Mutex<CatalogWriteQueue>,
}

#[derive(Default)]
struct CatalogWriteQueue {
    requests: VecDeque<CatalogWriteRequest>,
    /// Whether a writer is active, which will also take what is waiting.
    writing: bool,
}

struct CatalogWriteRequest {
    work: CatalogWrite,
    done: oneshot::Sender<Result<(), Error>>,
}

enum CatalogWrite {
    Changes(Vec<CatalogChange>),
    /// Reserves the ids below this one.
    ReserveIds(u64),
}

fn open_file(path: &Path, generations: Arc<Generations>) -> Result<ReopeningDatabase, Error> {
    ReopeningDatabase::open("catalogue", path, CACHE_BYTES, FileKind::Catalog, generations)
}

/// Id of the key that a catalog file is sealed under; `None` if there is no file or it is not
/// sealed. Commits nothing, but may repair the file or add checksums: pass a copy to inspect a file
/// unchanged.
pub fn catalog_key(path: &Path) -> Result<Option<KeyId>, Error> {
    if !std::fs::metadata(path).is_ok_and(|file| file.len() > 0) {
        return Ok(None);
    }
    open_file(path, Arc::default())?.read(|txn| Ok(sealed(txn)?.by))
}

/// Copies the catalog into a new file with all records sealed under the keyring's first key, and
/// replaces the old file, which is overwritten, so that no deleted or changed data remains. After a
/// crash either the old or the new file is in place. The new file has the next generation, so that
/// the old one counts as an older copy.
pub fn rewrite_catalog(path: &Path, keys: &Keyring) -> Result<(), Error> {
    let failed = |e: redb::Error| Error::Unavailable(format!("rewriting {}: {e}", path.display()));
    replace_file(path, |new| {
        let from = open_database(path, CACHE_BYTES).map_err(Error::Unavailable)?;
        let to = open_database(new, CACHE_BYTES).map_err(Error::Unavailable)?;
        copy(&from, &to, keys).map_err(failed)?
    })
}

/// The inner error is about a record.
fn copy(from: &Database, to: &Database, keys: &Keyring) -> Result<Result<(), Error>, redb::Error> {
    let (from, to) = (from.begin_read()?, to.begin_write()?);
    {
        let mut tables = CatalogTables::of(&to, keys)?;
        let copied = tables.copy_from(&from)?;
        if copied.is_err() {
            return Ok(copied);
        }
        tables.facts.insert(SEALED_BY, keys.current().0)?;
        let mut generations = to.open_table(GENERATIONS)?;
        let known = each(&from, GENERATIONS, |file, generation| {
            Ok(generations.insert(file, generation).map(drop))
        })?;
        if known.is_err() {
            return Ok(known);
        }
    }
    Generations::default().record(&to, FileKind::Catalog)?;
    to.commit()?;
    Ok(Ok(()))
}

/// The sealing state of a catalog file.
struct SealingState {
    by: Option<KeyId>,
    /// Whether the file contains records.
    used: bool,
}

fn sealed(txn: &ReadTransaction) -> Result<SealingState, redb::Error> {
    let by = match txn.open_table(FACTS) {
        Ok(facts) => facts.get(SEALED_BY)?.map(|id| KeyId(id.value())),
        Err(TableError::TableDoesNotExist(_)) => None,
        Err(e) => return Err(e.into()),
    };
    let recordless = [FACTS.name(), GENERATIONS.name()];
    let used = txn
        .list_tables()?
        .any(|table| !recordless.contains(&table.name()));
    Ok(SealingState { by, used })
}

fn unreadable(e: impl Display) -> Error {
    Error::Corrupt(format!("catalogue: {e}"))
}

impl EmbeddedCatalog {
    /// Opens the catalog. A file that is not sealed under the first key is rewritten first.
    pub fn open(path: &Path, keys: Arc<Keyring>) -> Result<EmbeddedCatalog, Error> {
        EmbeddedCatalog::open_with(path, keys, Arc::default())
    }

    /// Like `open`, next to other files that record each other's generations.
    pub fn open_with(
        path: &Path,
        keys: Arc<Keyring>,
        generations: Arc<Generations>,
    ) -> Result<EmbeddedCatalog, Error> {
        let mut database = open_file(path, generations.clone())?;
        let SealingState { by, used } = database.read(sealed)?;
        if let Some(by) = by {
            keys.require(by)
                .map_err(|e| Error::Corrupt(format!("{} is {e}", path.display())))?;
        }
        if used && by != Some(keys.current()) {
            drop(database);
            rewrite_catalog(path, &keys)?;
            tracing::info!(path = %path.display(), key = %keys.current(), "sealed the catalogue's secrets");
            database = open_file(path, generations)?;
        }
        let reserved = database.write(|txn| {
            // Files of older programs lack some of the tables.
            let mut tables = CatalogTables::of(txn, &keys)?;
            tables.facts.insert(SEALED_BY, keys.current().0)?;
            let reserved = tables.facts.get("reserved_ids")?;
            Ok(reserved.map_or(1, |v| v.value()))
        })?;
        Ok(EmbeddedCatalog {
            shared: Arc::new(CatalogWriterState {
                database: Arc::new(database),
                keys,
                waiting: Mutex::default(),
            }),
            next_id: AtomicU64::new(reserved),
            reserved: tokio::sync::Mutex::new(reserved),
        })
    }

    pub(crate) fn database(&self) -> Arc<ReopeningDatabase> {
        self.shared.database.clone()
    }

    /// Returns once the work is durable. The work is done even if the caller goes away.
    async fn write(&self, work: CatalogWrite) -> Result<(), Error> {
        let (done, durable) = oneshot::channel();
        let begin = {
            let mut waiting = self.shared.waiting();
            waiting.requests.push_back(CatalogWriteRequest { work, done });
            !std::mem::replace(&mut waiting.writing, true)
        };
        if begin {
            let writer = CatalogWriter {
                shared: Some(self.shared.clone()),
            };
            tokio::task::spawn_blocking(move || writer.run());
        }
        durable.await.map_err(|_| Error::Closed)?
    }
}

impl CatalogWriterState {
    fn waiting(&self) -> MutexGuard<'_, CatalogWriteQueue> {
        self.waiting.lock().expect("no panic holds it")
    }
}

/// The active writer, which commits for as long as requests wait.
struct CatalogWriter {
    /// `None` once the writer has released its role.
    shared: Option<Arc<CatalogWriterState>>,
}

impl CatalogWriter {
    fn run(mut self) {
        let mut next = self.take();
        while let Some(requests) = next {
            let result = self.commit(&requests);
            // Release the role before replying: a client that gets its reply may close the catalog
            // and reopen it.
            next = self.take();
            for request in requests {
                // The caller may have gone away.
                let _ = request.done.send(result.clone());
            }
        }
    }

    /// The requests of the next commit. Returns `None` and releases the role of writer if nothing
    /// waits.
    fn take(&mut self) -> Option<Vec<CatalogWriteRequest>> {
        let shared = self.shared.take()?;
        let mut waiting = shared.waiting();
        let count = waiting.requests.len().min(COMMIT_REQUESTS_MAX);
        if count == 0 {
            waiting.writing = false;
            return None;
        }
        let requests = waiting.requests.drain(..count).collect();
        drop(waiting);
        self.shared = Some(shared);
        Some(requests)
    }

    fn commit(&self, requests: &[CatalogWriteRequest]) -> Result<(), Error> {
        let Some(shared) = &self.shared else {
            return Err(Error::Closed);
        };
        let work = |txn: &WriteTransaction| {
            let mut tables = CatalogTables::of(txn, &shared.keys)?;
            requests
                .iter()
                .try_for_each(|request| tables.apply(&request.work))
        };
        let another_waits = || !shared.waiting().requests.is_empty();
        let result = shared.database.write_before(another_waits, work);
        if result.is_err()
            && let Err(e) = shared.database.reopen()
        {
            tracing::debug!(error = %e, "cannot open the catalogue again yet");
        }
        result
    }
}

/// Fails all waiting requests if the writer is dropped early because the runtime shuts down.
impl Drop for CatalogWriter {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            *shared.waiting() = CatalogWriteQueue::default();
        }
    }
}

/// Makes a catalogue of what can be read of a damaged one, records as they are sealed. With the keys, rows of damaged
/// pages are kept if they open and stand under their own key, and rows that do not open are left out wherever they are.
/// Returns what is lost, in words.
pub fn rebuild(old: Option<&Salvage>, new: &Path, keys: Option<&Keyring>) -> Result<Vec<String>, Error> {
    let Some(old) = old else {
        return Err(Error::Corrupt(
            "nothing of catalog.redb can be read, and nothing else knows topics and subscriptions: put back a backup"
                .into(),
        ));
    };
    let told = open_file(new, Arc::default())?.write(|txn| {
        let of_number = |key: &[u8], id: u64| key == id.to_le_bytes();
        let topic = |key: &[u8], one: Topic| of_number(key, one.id.0);
        let subscription = |key: &[u8], one: Subscription| of_number(key, one.id.0);
        let domain_topic = |key: &[u8], one: DomainTopic| {
            let place = (one.domain.0, one.name.to_lowercase());
            key == <(u64, &str)>::as_bytes(&(place.0, place.1.as_str()))
        };
        let handshake = |key: &[u8], one: Handshake| key == one.operation.as_bytes();
        let delay = |key: &[u8], one: EndpointDelay| {
            keys.is_some_and(|keys| key == keys.name_of(&one.endpoint).as_bytes())
        };
        let kept = [
            (copy_sealed(old, txn, keys, TOPICS, topic)?, "topics", true),
            (
                copy_sealed(old, txn, keys, DOMAIN_TOPICS, domain_topic)?,
                "domain topics",
                false,
            ),
            (
                copy_sealed(old, txn, keys, SUBSCRIPTIONS, subscription)?,
                "subscriptions",
                true,
            ),
            (
                copy_sealed(old, txn, keys, ENDPOINT_DELAYS, delay)?,
                "endpoint delays",
                false,
            ),
            (
                copy_sealed(old, txn, keys, HANDSHAKES, handshake)?,
                "handshakes",
                false,
            ),
        ];
        let mut told = Vec::new();
        for (salvaged, what, has_ids) in &kept {
            told.extend(salvaged.describe(FileKind::Catalog.file(), what).map(|mut text| {
                let ids = salvaged.left_out.iter().filter_map(|key| u64_at(key, 0));
                let ids: Vec<String> = ids.map(|id| id.to_string()).collect();
                if *has_ids && !ids.is_empty() {
                    text.push_str(&format!("; left out: ids {}", ids.join(", ")));
                }
                text
            }));
        }
        old.copy_also_older(txn, FACTS, ONLY_WHOLE)?;
        old.copy_also_older(txn, GENERATIONS, ONLY_WHOLE)?;
        // The number of the next id may be among what is lost.
        let mut facts = txn.open_table(FACTS)?;
        let highest = |table: TableDefinition<u64, &'static [u8]>| {
            let table = txn.open_table(table)?;
            Ok::<_, redb::Error>(table.last()?.map_or(0, |row| row.0.value()))
        };
        let least = highest(TOPICS)?.max(highest(SUBSCRIPTIONS)?) + 1;
        let reserved = facts.get("reserved_ids")?.map_or(0, |id| id.value());
        facts.insert("reserved_ids", reserved.max(least + ID_BLOCK))?;
        // The id of the key may also be lost, but every record contains it.
        if let Some(id) = sealed_under(txn, TOPICS)?.or(sealed_under(txn, SUBSCRIPTIONS)?) {
            facts.insert(SEALED_BY, id.0)?;
        }
        let is_empty = kept.iter().all(|(salvaged, ..)| salvaged.copied == 0);
        Ok((
            told,
            is_empty && kept.iter().any(|(salvaged, ..)| !salvaged.is_whole()),
        ))
    })?;
    match told {
        (_, true) => rebuild(None, new, keys),
        (told, false) => Ok(told),
    }
}

/// Copies the rows of a table, each judged by its seal as far as there are keys. `belongs` tells whether a record stands
/// under its own key.
fn copy_sealed<K: Key + 'static, T: StoredRecord>(
    old: &Salvage,
    txn: &WriteTransaction,
    keys: Option<&Keyring>,
    table: TableDefinition<K, &'static [u8]>,
    belongs: impl Fn(&[u8], T) -> bool,
) -> Result<SalvagedTable, redb::Error> {
    old.copy_also_older(txn, table, &|key, value, is_whole| {
        let Some(keys) = keys else { return is_whole };
        match keys.open(table.name(), value) {
            Ok(record) if is_whole => T::decode(&record).is_ok(),
            // A value that is not sealed proves nothing.
            Ok(record) => key_of(value).is_some() && T::decode(&record).is_ok_and(|one| belongs(key, one)),
            // Another key may open it.
            Err(SealError::UnknownKey { .. }) => is_whole,
            Err(SealError::Damaged(_)) => false,
        }
    })
}

/// Whether every record opens, as far as these keys can tell. Nothing is written to the file.
pub fn opens(old: &Salvage, keys: &Keyring) -> bool {
    let tables = [
        TOPICS.name(),
        DOMAIN_TOPICS.name(),
        SUBSCRIPTIONS.name(),
        ENDPOINT_DELAYS.name(),
        HANDSHAKES.name(),
    ];
    tables.into_iter().all(|table| {
        let rows = old.rows(table);
        let mut values = rows.whole.values();
        values.all(|value| !matches!(keys.open(table, value), Err(SealError::Damaged(_))))
    })
}

/// Id of the key that the first record of a table is sealed under.
fn sealed_under<K: Key + 'static>(
    txn: &WriteTransaction,
    table: TableDefinition<K, &'static [u8]>,
) -> Result<Option<KeyId>, redb::Error> {
    let table = txn.open_table(table)?;
    Ok(table.first()?.and_then(|row| key_of(row.1.value())))
}

struct CatalogTables<'a> {
    keys: &'a Keyring,
    topics: Table<'a, u64, &'static [u8]>,
    domain_topics: Table<'a, (u64, &'static str), &'static [u8]>,
    subscriptions: Table<'a, u64, &'static [u8]>,
    endpoint_delays: Table<'a, &'static str, &'static [u8]>,
    handshakes: Table<'a, &'static str, &'static [u8]>,
    facts: Table<'a, &'static str, u64>,
}

impl<'a> CatalogTables<'a> {
    fn of(txn: &'a WriteTransaction, keys: &'a Keyring) -> Result<CatalogTables<'a>, redb::Error> {
        Ok(CatalogTables {
            keys,
            topics: txn.open_table(TOPICS)?,
            domain_topics: txn.open_table(DOMAIN_TOPICS)?,
            subscriptions: txn.open_table(SUBSCRIPTIONS)?,
            endpoint_delays: txn.open_table(ENDPOINT_DELAYS)?,
            handshakes: txn.open_table(HANDSHAKES)?,
            facts: txn.open_table(FACTS)?,
        })
    }

    fn apply(&mut self, work: &CatalogWrite) -> Result<(), redb::Error> {
        match work {
            CatalogWrite::Changes(changes) => changes.iter().try_for_each(|change| self.change(change)),
            CatalogWrite::ReserveIds(upto) => {
                self.facts.insert("reserved_ids", upto)?;
                Ok(())
            }
        }
    }

    /// Fills empty tables from another file and reseals every record. The inner error is about a
    /// record.
    fn copy_from(&mut self, from: &ReadTransaction) -> Result<Result<(), Error>, redb::Error> {
        let keys = self.keys;
        let copied = each(from, TOPICS, |id, value| {
            let sealed = reseal(keys, TOPICS.name(), value)?;
            Ok(self.topics.insert(id, sealed.as_slice()).map(drop))
        })?
        .and(each(from, DOMAIN_TOPICS, |key, value| {
            let sealed = reseal(keys, DOMAIN_TOPICS.name(), value)?;
            Ok(self.domain_topics.insert(key, sealed.as_slice()).map(drop))
        })?)
        .and(each(from, SUBSCRIPTIONS, |id, value| {
            let sealed = reseal(keys, SUBSCRIPTIONS.name(), value)?;
            Ok(self.subscriptions.insert(id, sealed.as_slice()).map(drop))
        })?)
        .and(each(from, ENDPOINT_DELAYS, |_, value| {
            let record = keys.open(ENDPOINT_DELAYS.name(), value).map_err(unreadable)?;
            // Row keys are derived from the sealing key.
            let name = keys.name_of(&EndpointDelay::decode(&record).map_err(unreadable)?.endpoint);
            let sealed = keys.seal(ENDPOINT_DELAYS.name(), &record);
            Ok(self
                .endpoint_delays
                .insert(name.as_str(), sealed.as_slice())
                .map(drop))
        })?)
        .and(each(from, HANDSHAKES, |operation, value| {
            let sealed = reseal(keys, HANDSHAKES.name(), value)?;
            Ok(self.handshakes.insert(operation, sealed.as_slice()).map(drop))
        })?);
        each(from, FACTS, |name, value| {
            Ok(self.facts.insert(name, value).map(drop))
        })?
        .ok();
        Ok(copied)
    }

    fn change(&mut self, change: &CatalogChange) -> Result<(), redb::Error> {
        match change {
            CatalogChange::PutTopic(topic) => {
                let sealed = self.keys.seal(TOPICS.name(), &topic.encode());
                self.topics.insert(topic.id.0, sealed.as_slice())?;
            }
            CatalogChange::DeleteTopic(TopicId(id)) => {
                self.topics.remove(id)?;
            }
            CatalogChange::PutDomainTopic(one) => {
                let key = (one.domain.0, one.name.to_lowercase());
                let sealed = self.keys.seal(DOMAIN_TOPICS.name(), &one.encode());
                self.domain_topics
                    .insert((key.0, key.1.as_str()), sealed.as_slice())?;
            }
            CatalogChange::DeleteDomainTopic(domain, name) => {
                self.domain_topics
                    .remove((domain.0, name.to_lowercase().as_str()))?;
            }
            CatalogChange::PutSubscription(one) => {
                let sealed = self.keys.seal(SUBSCRIPTIONS.name(), &one.encode());
                self.subscriptions.insert(one.id.0, sealed.as_slice())?;
            }
            CatalogChange::DeleteSubscription(id) => {
                self.subscriptions.remove(id.0)?;
            }
            CatalogChange::PutEndpointDelay(one) => {
                // The path of an endpoint may contain a secret, so the row key is a keyed hash.
                let name = self.keys.name_of(&one.endpoint);
                let sealed = self.keys.seal(ENDPOINT_DELAYS.name(), &one.encode());
                self.endpoint_delays.insert(name.as_str(), sealed.as_slice())?;
            }
            CatalogChange::DeleteEndpointDelay(endpoint) => {
                let name = self.keys.name_of(endpoint);
                self.endpoint_delays.remove(name.as_str())?;
            }
            CatalogChange::PutHandshake(one) => {
                let sealed = self.keys.seal(HANDSHAKES.name(), &one.encode());
                self.handshakes
                    .insert(one.operation.as_str(), sealed.as_slice())?;
            }
            CatalogChange::DeleteHandshake(operation) => {
                self.handshakes.remove(operation.as_str())?;
            }
        }
        Ok(())
    }
}

/// Calls `work` for every row of a table, if the table exists. The outer error is the database's,
/// the inner one is about a record.
fn each<K: Key + 'static, V: Value + 'static>(
    txn: &ReadTransaction,
    table: TableDefinition<K, V>,
    mut work: impl FnMut(K::SelfType<'_>, V::SelfType<'_>) -> Result<Result<(), StorageError>, Error>,
) -> Result<Result<(), Error>, redb::Error> {
    let table = match txn.open_table(table) {
        Ok(table) => table,
        // Files of older programs lack some of the tables.
        Err(TableError::TableDoesNotExist(_)) => return Ok(Ok(())),
        Err(e) => return Err(e.into()),
    };
    for row in table.iter()? {
        let (key, value) = row?;
        match work(key.value(), value.value()) {
            Ok(written) => written?,
            Err(e) => return Ok(Err(e)),
        }
    }
    Ok(Ok(()))
}

fn reseal(keys: &Keyring, table: &str, stored: &[u8]) -> Result<Vec<u8>, Error> {
    let opened = keys.open(table, stored).map_err(unreadable)?;
    Ok(keys.seal(table, &opened))
}

/// Decodes every row of a table, in the order of the keys.
fn rows<K: Key + 'static, T: StoredRecord>(
    txn: &ReadTransaction,
    keys: &Keyring,
    of: TableDefinition<K, &'static [u8]>,
) -> Result<DecodedRows<T>, redb::Error> {
    let table = txn.open_table(of)?;
    let count = table.len()? as usize;
    decode(keys, of.name(), table.iter()?, count)
}

/// Decoded rows, or what is wrong with one of them. Unlike an I/O error, this error is permanent.
type DecodedRows<T> = Result<Vec<T>, Error>;

fn decode<K: Key + 'static, T: StoredRecord>(
    keys: &Keyring,
    table: &str,
    range: Range<'_, K, &'static [u8]>,
    count: usize,
) -> Result<DecodedRows<T>, redb::Error> {
    let mut found = Vec::with_capacity(count);
    for row in range {
        let row = row?.1;
        let opened = keys.open(table, row.value());
        let record = opened
            .map_err(unreadable)
            .and_then(|opened| T::decode(&opened).map_err(unreadable));
        match record {
            Ok(record) => found.push(record),
            Err(e) => return Ok(Err(e)),
        }
    }
    Ok(Ok(found))
}

/// Like `rows`, on all processors if there are very many: nothing else runs while a server starts.
fn many_rows<T: StoredRecord + Send>(
    txn: &ReadTransaction,
    keys: &Keyring,
    of: TableDefinition<u64, &'static [u8]>,
) -> Result<DecodedRows<T>, redb::Error> {
    let table = txn.open_table(of)?;
    let count = table.len()? as usize;
    let ends = (table.first()?, table.last()?);
    let (Some((first, _)), Some((last, _)), true) = (ends.0, ends.1, count >= MANY_ROWS) else {
        return decode(keys, of.name(), table.iter()?, count);
    };
    let (first, last) = (first.value(), last.value());
    let parts = std::thread::available_parallelism().map_or(1, usize::from).min(8) as u64;
    let step = (last - first) / parts + 1;
    let part = |n: u64| {
        let from = first + n * step;
        decode(
            keys,
            of.name(),
            table.range(from..=from.saturating_add(step - 1))?,
            count / parts as usize,
        )
    };
    let decoded = std::thread::scope(|scope| {
        let part = &part;
        let working: Vec<_> = (0..parts).map(|n| scope.spawn(move || part(n))).collect();
        let ended = working
            .into_iter()
            .map(|one| one.join().expect("decoding does not panic"));
        ended.collect::<Result<Vec<DecodedRows<T>>, redb::Error>>()
    })?;
    let mut found = Vec::with_capacity(count);
    for part in decoded {
        match part {
            Ok(part) => found.extend(part),
            Err(e) => return Ok(Err(e)),
        }
    }
    Ok(Ok(found))
}

fn load(database: &ReopeningDatabase, keys: &Keyring) -> Result<CatalogContent, Error> {
    database.read(|txn| {
        let topics = many_rows(txn, keys, TOPICS)?;
        let domain_topics = rows(txn, keys, DOMAIN_TOPICS)?;
        let subscriptions = many_rows(txn, keys, SUBSCRIPTIONS)?;
        let endpoint_delays: DecodedRows<EndpointDelay> = rows(txn, keys, ENDPOINT_DELAYS)?;
        // Their rows are ordered by a keyed hash.
        let endpoint_delays = endpoint_delays.map(|mut delays| {
            delays.sort_by(|a, b| a.endpoint.cmp(&b.endpoint));
            delays
        });
        let handshakes = rows(txn, keys, HANDSHAKES)?;
        let loaded = || {
            Ok(CatalogContent {
                topics: topics?,
                domain_topics: domain_topics?,
                subscriptions: subscriptions?,
                endpoint_delays: endpoint_delays?,
                handshakes: handshakes?,
            })
        };
        Ok(loaded())
    })?
}

#[async_trait]
impl Catalog for EmbeddedCatalog {
    async fn load(&self) -> Result<CatalogContent, Error> {
        let shared = self.shared.clone();
        let loaded = tokio::task::spawn_blocking(move || load(&shared.database, &shared.keys));
        loaded.await.map_err(|_| Error::Closed)?
    }

    async fn commit(&self, changes: Vec<CatalogChange>) -> Result<(), Error> {
        self.write(CatalogWrite::Changes(changes)).await
    }

    async fn next_id(&self) -> Result<u64, Error> {
        let mut reserved = self.reserved.lock().await;
        if self.next_id.load(Relaxed) >= *reserved {
            let upto = *reserved + ID_BLOCK;
            self.write(CatalogWrite::ReserveIds(upto)).await?;
            *reserved = upto;
        }
        Ok(self.next_id.fetch_add(1, Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::outcome::Outcome;
    use postrider_core::probation::ProbationRules;
    use postrider_store::conformance::{self, at};

    // A file as the first version wrote it, without the table of endpoint delays.
    #[tokio::test]
    async fn a_file_from_before_endpoint_delays_opens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let domain_topic = DomainTopic {
            domain: TopicId(1),
            name: "a".into(),
            automatic: false,
            created: at(0),
        };
        {
            let database = open_database(&path, CACHE_BYTES).unwrap();
            let txn = database.begin_write().unwrap();
            txn.open_table(TOPICS).unwrap();
            let key = (1, "a");
            let mut domain_topics = txn.open_table(DOMAIN_TOPICS).unwrap();
            domain_topics
                .insert(key, domain_topic.encode().as_slice())
                .unwrap();
            drop(domain_topics);
            txn.open_table(SUBSCRIPTIONS).unwrap();
            txn.open_table(FACTS).unwrap().insert("reserved_ids", 9).unwrap();
            txn.commit().unwrap();
        }
        let mut expected = CatalogContent {
            domain_topics: vec![domain_topic],
            ..CatalogContent::default()
        };
        let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
        assert_eq!(catalog.next_id().await.unwrap(), 9);
        expected.endpoint_delays = vec![EndpointDelay {
            endpoint: "https://a/b".into(),
            delay: ProbationRules::DOCUMENTED.begin(Outcome::Busy, at(1)),
            by: None,
        }];
        let put = CatalogChange::PutEndpointDelay(expected.endpoint_delays[0].clone());
        catalog.commit(vec![put]).await.unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
    }

    const KEY: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

    fn keys() -> Arc<Keyring> {
        Arc::new(Keyring::parse(KEY, "a test").unwrap())
    }

    fn domain_topic(name: String) -> DomainTopic {
        DomainTopic {
            domain: TopicId(1),
            name,
            automatic: true,
            created: at(0),
        }
    }

    fn put(name: impl ToString) -> Vec<CatalogChange> {
        vec![CatalogChange::PutDomainTopic(domain_topic(name.to_string()))]
    }

    async fn names(catalog: &EmbeddedCatalog) -> Vec<String> {
        let loaded = catalog.load().await.unwrap();
        loaded.domain_topics.into_iter().map(|topic| topic.name).collect()
    }

    #[tokio::test]
    async fn whoever_waits_is_taken_along_by_the_next_commit() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = EmbeddedCatalog::open(&directory.path().join("catalog.redb"), keys()).unwrap();
        // Pretend that a commit is under way, so that no other writer starts.
        catalog.shared.waiting().writing = true;
        let count = COMMIT_REQUESTS_MAX + 1;
        let waiting: Vec<_> = (0..count)
            .map(|n| {
                let (done, durable) = oneshot::channel();
                let work = CatalogWrite::Changes(put(n));
                let request = CatalogWriteRequest { work, done };
                catalog.shared.waiting().requests.push_back(request);
                durable
            })
            .collect();
        let mut writer = CatalogWriter {
            shared: Some(catalog.shared.clone()),
        };
        let first = writer.take().unwrap();
        assert_eq!(first.len(), COMMIT_REQUESTS_MAX);
        for request in first.into_iter().rev() {
            catalog.shared.waiting().requests.push_front(request);
        }
        writer.run();
        for durable in waiting {
            durable.await.unwrap().unwrap();
        }
        assert_eq!(names(&catalog).await.len(), count);
        assert!(!catalog.shared.waiting().writing, "the next one begins by itself");
        catalog.commit(put("next")).await.unwrap();
    }

    // The file is inaccessible for a while, as after a disk error.
    #[tokio::test]
    async fn a_commit_that_fails_fails_for_those_in_it_and_for_nobody_after() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let aside = directory.path().join("aside");
        let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
        catalog.commit(put("before")).await.unwrap();
        std::fs::rename(&path, &aside).unwrap();
        std::fs::create_dir(&path).unwrap();
        catalog.shared.database.reopen().unwrap_err();
        let (one, two) = tokio::join!(catalog.commit(put("one")), catalog.commit(put("two")));
        assert!(matches!(one, Err(Error::Unavailable(_))), "{one:?}");
        assert!(matches!(two, Err(Error::Unavailable(_))), "{two:?}");
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        // The commit below fails because the database is closed, and causes it to be reopened.
        catalog.commit(put("three")).await.unwrap_err();
        catalog.commit(put("after")).await.unwrap();
        assert_eq!(names(&catalog).await, ["after", "before"]);
    }

    #[tokio::test]
    async fn a_writer_that_cannot_go_on_leaves_nobody_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = EmbeddedCatalog::open(&directory.path().join("catalog.redb"), keys()).unwrap();
        catalog.shared.waiting().writing = true;
        let writer = CatalogWriter {
            shared: Some(catalog.shared.clone()),
        };
        let mut waiting = std::pin::pin!(catalog.commit(put("lost")));
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("nobody writes"),
            () = std::future::ready(()) => {}
        }
        drop(writer);
        assert!(matches!(waiting.await, Err(Error::Closed)));
        catalog.commit(put("next")).await.unwrap();
        assert_eq!(names(&catalog).await, ["next"]);
    }

    #[tokio::test]
    async fn very_many_are_loaded_in_their_order() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = EmbeddedCatalog::open(&directory.path().join("catalog.redb"), keys()).unwrap();
        // The ids have gaps, and the last one is the greatest possible.
        let ids: Vec<u64> = (0..MANY_ROWS as u64 + 7)
            .map(|n| n * n / 3 + n)
            .chain([u64::MAX])
            .collect();
        let changes = ids
            .iter()
            .map(|id| CatalogChange::PutTopic(conformance::topic(*id, "t")));
        catalog.commit(changes.collect()).await.unwrap();
        let loaded = catalog.load().await.unwrap();
        let found: Vec<u64> = loaded.topics.iter().map(|topic| topic.id.0).collect();
        assert!(found == ids, "{} of {}", found.len(), ids.len());
    }

    /// A change of every kind, with a secret in each where there can be one.
    fn all() -> Vec<CatalogChange> {
        let mut topic = conformance::topic(1, "t");
        topic.keys = ["hunter2-key", "hunter2-other"].map(postrider_core::ids::Secret::new);
        let delay = EndpointDelay {
            endpoint: "https://a/hunter2-path".into(),
            delay: ProbationRules::DOCUMENTED.begin(Outcome::Busy, at(1)),
            by: None,
        };
        let mut changes = put("domain-topic");
        changes.extend([
            CatalogChange::PutTopic(topic),
            CatalogChange::PutEndpointDelay(delay),
        ]);
        changes
    }

    fn holds_secrets(directory: &Path) -> bool {
        let files = std::fs::read_dir(directory)
            .unwrap()
            .map(|file| file.unwrap().path());
        let bytes: Vec<u8> = files.flat_map(|path| std::fs::read(path).unwrap()).collect();
        memchr::memmem::find(&bytes, b"hunter2").is_some()
    }

    /// Writes rows as an older program did, and deletes a row that contained a secret.
    fn write_as_before(path: &Path) {
        write_rows(&open_database(path, CACHE_BYTES).unwrap());
    }

    fn write_rows(database: &Database) {
        for deleted in [false, true] {
            let txn = database.begin_write().unwrap();
            for change in all() {
                match change {
                    CatalogChange::PutTopic(one) => {
                        let mut table = txn.open_table(TOPICS).unwrap();
                        table.insert(1, one.encode().as_slice()).unwrap();
                        table.insert(2, one.encode().as_slice()).unwrap();
                        if deleted {
                            table.remove(2).unwrap();
                        }
                    }
                    CatalogChange::PutDomainTopic(one) => {
                        let mut table = txn.open_table(DOMAIN_TOPICS).unwrap();
                        table
                            .insert((1, one.name.as_str()), one.encode().as_slice())
                            .unwrap();
                    }
                    CatalogChange::PutEndpointDelay(one) => {
                        let mut table = txn.open_table(ENDPOINT_DELAYS).unwrap();
                        table
                            .insert(one.endpoint.as_str(), one.encode().as_slice())
                            .unwrap();
                    }
                    other => panic!("{other:?}"),
                }
            }
            txn.open_table(FACTS).unwrap().insert("reserved_ids", 77).unwrap();
            txn.commit().unwrap();
        }
    }

    #[tokio::test]
    async fn a_file_of_an_older_program_is_sealed_when_it_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        write_as_before(&path);
        assert!(holds_secrets(directory.path()));
        // A leftover of an interrupted rewrite.
        std::fs::write(path.with_extension("new"), "hunter2").unwrap();
        assert_eq!(catalog_key(&path).unwrap(), None);

        let fresh = EmbeddedCatalog::open(&directory.path().join("fresh.redb"), keys()).unwrap();
        fresh.commit(all()).await.unwrap();
        let expected = fresh.load().await.unwrap();
        let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
        assert_eq!(catalog.next_id().await.unwrap(), 77);
        drop(catalog);
        assert_eq!(catalog_key(&path).unwrap(), Some(keys().current()));
        assert!(!path.with_extension("new").exists());
        assert!(!holds_secrets(directory.path()));
        let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
        catalog
            .commit(vec![CatalogChange::DeleteEndpointDelay(
                "https://a/hunter2-path".into(),
            )])
            .await
            .unwrap();
        assert_eq!(catalog.load().await.unwrap().endpoint_delays, []);
    }

    // A file as the first release wrote it, without checksums and not sealed.
    #[tokio::test]
    async fn of_a_plain_file_nothing_stays_and_the_new_one_is_not_taken_for_older() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        write_rows(&redb::Database::create(&path).unwrap());
        let link = directory.path().join("same-file");
        std::fs::hard_link(&path, &link).unwrap();
        let generations = Arc::new(Generations::default());
        let catalog = EmbeddedCatalog::open_with(&path, keys(), generations.clone()).unwrap();
        assert_eq!(catalog.load().await.unwrap().topics.len(), 1);
        drop(catalog);
        assert!(std::fs::metadata(&link).unwrap().len() > 0);
        assert!(std::fs::read(&link).unwrap().iter().all(|byte| *byte == 0));
        assert!(!holds_secrets(directory.path()));
        let kept = generations.get(FileKind::Catalog);
        assert!(kept > 0);
        rewrite_catalog(&path, &keys()).unwrap();
        assert!(open_file(&path, Arc::default()).unwrap().generation() > kept);
        assert!(std::fs::read(&path).unwrap().starts_with(b"PRblocks1"));
    }

    #[tokio::test]
    async fn what_is_salvaged_stays_sealed_under_its_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let new = directory.path().join("new.redb");
        let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
        catalog.commit(all()).await.unwrap();
        let expected = catalog.load().await.unwrap();
        drop(catalog);
        let damaged = open_database(&path, CACHE_BYTES).unwrap();
        let txn = damaged.begin_write().unwrap();
        txn.open_table(FACTS).unwrap().remove(SEALED_BY).unwrap();
        txn.commit().unwrap();
        drop(damaged);
        let damaged = Salvage::open(&path, FileKind::Catalog);
        assert_eq!(rebuild(damaged.as_ref(), &new, None).unwrap(), [""; 0]);
        assert_eq!(catalog_key(&new).unwrap(), Some(keys().current()));
        assert!(!holds_secrets(directory.path()));
        let catalog = EmbeddedCatalog::open(&new, keys()).unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
    }

    #[tokio::test]
    async fn another_key_is_refused_and_a_new_one_takes_the_place_of_the_old() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
        catalog.commit(all()).await.unwrap();
        let expected = catalog.load().await.unwrap();
        drop(catalog);
        let error = EmbeddedCatalog::open(&path, Arc::new(Keyring::ephemeral()))
            .err()
            .expect("it is refused");
        assert!(
            error.to_string().contains(&keys().current().to_string()),
            "{error}"
        );
        assert_eq!(catalog_key(&path).unwrap(), Some(keys().current()));
        let catalog = EmbeddedCatalog::open(&path, keys()).unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
        drop(catalog);

        let new = Keyring::ephemeral().with_opening_keys(Keyring::parse(KEY, "the old one").unwrap());
        let new = Arc::new(new);
        for _ in 0..2 {
            let catalog = EmbeddedCatalog::open(&path, new.clone()).unwrap();
            assert_eq!(catalog.load().await.unwrap(), expected);
            let again = CatalogChange::PutEndpointDelay(expected.endpoint_delays[0].clone());
            catalog.commit(vec![again]).await.unwrap();
            assert_eq!(catalog.load().await.unwrap(), expected);
        }
        assert_eq!(catalog_key(&path).unwrap(), Some(new.current()));
        EmbeddedCatalog::open(&path, keys())
            .err()
            .expect("the old key opens nothing");
    }
}
