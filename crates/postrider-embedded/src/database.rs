//! A redb database that is verified when it is opened and recovers from I/O errors by reopening the
//! file.

use crate::block_file::{self, BlockFile, BlockFileBackend, MAGIC, PLAIN_MAGIC};
use crate::disk::{erase, overwrite};
use crate::generations::{FileKind, GENERATIONS, Generations, LOG_IDENTITY};
use crate::pages::{Commit, Pages, TableRows, u64_at};
use postrider_store::Error;
use redb::{
    Database, Key, ReadTransaction, ReadableDatabase, TableDefinition, TableHandle, Value, WriteTransaction,
};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, RwLock};

/// The progress that redb reports for a repair only when it rolls back to the commit before the
/// last.
const REPAIR_ROLLED_BACK: std::ops::Range<f64> = 0.2..0.5;

pub struct ReopeningDatabase {
    /// Name for messages.
    name: &'static str,
    path: PathBuf,
    cache_bytes: usize,
    kind: FileKind,
    generations: Arc<Generations>,
    /// Locked because the database is reopened after an error; `None` while reopening fails.
    database: RwLock<Option<OpenDatabase>>,
}

/// An open database and its block file.
struct OpenDatabase {
    database: Database,
    blocks: Arc<BlockFile>,
    /// Whether the last commit was unreadable after a crash and redb has rolled back to the one
    /// before.
    rolled_back: bool,
}

fn opened(database: &Option<OpenDatabase>) -> Result<&Database, redb::Error> {
    let open = database.as_ref().ok_or(redb::Error::DatabaseClosed)?;
    Ok(&open.database)
}

impl ReopeningDatabase {
    pub fn open(
        name: &'static str,
        path: &Path,
        cache_bytes: usize,
        kind: FileKind,
        generations: Arc<Generations>,
    ) -> Result<ReopeningDatabase, Error> {
        let failed = |why: String| match why.contains("damaged") || why.contains("orrupt") {
            true => Error::Corrupt(damaged(path, &why)),
            false => Error::Unavailable(opening(path, why)),
        };
        let database = open_blocks(path, cache_bytes).map_err(failed)?;
        if database.rolled_back {
            generations.note_rolled_back(kind);
        }
        let opened = ReopeningDatabase {
            name,
            path: path.to_owned(),
            cache_bytes,
            kind,
            generations,
            database: RwLock::new(Some(database)),
        };
        opened.read_generation()?;
        Ok(opened)
    }

    fn read_generation(&self) -> Result<(), Error> {
        let known = self.read(Generations::read)?;
        self.generations.set(self.kind, known[self.kind as usize]);
        Ok(())
    }

    /// Number of commits that this file has seen.
    pub fn generation(&self) -> u64 {
        self.generations.get(self.kind)
    }

    fn failed(&self, e: redb::Error) -> Error {
        Error::Unavailable(format!("{}: {e}", self.name))
    }

    /// Runs `work`; a panic of redb about what it reads becomes an error.
    fn guarded<T>(&self, work: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, Error> {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => result.map_err(|e| self.failed(e)),
            Err(_) => Err(Error::Corrupt(damaged(&self.path, "its pages make no sense"))),
        }
    }

    pub fn read<T>(&self, work: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>) -> Result<T, Error> {
        let database = self.database.read().expect("no panic holds it");
        self.guarded(|| work(&opened(&database)?.begin_read()?))
    }

    /// Runs `work` and commits its changes, all or none.
    pub fn write<T>(
        &self,
        work: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, Error> {
        self.write_before(|| false, work)
    }

    /// Like `write`, but a commit that another one follows immediately takes one flush instead of
    /// two.
    ///
    /// After a crash redb accepts a two-phase commit with the allocator's state as it is: a damaged
    /// page of it is found and named, and all others can be read. After a one-phase commit redb has
    /// to determine itself whether the commit is complete, and rolls back to the one before if a
    /// page is damaged; the rollback is reported. A lost commit of the state database is noticed by
    /// means of the log, which has recorded its generation.
    pub fn write_before<T>(
        &self,
        another_waits: impl FnOnce() -> bool,
        work: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, Error> {
        let database = self.database.read().expect("no panic holds it");
        let (result, generation) = self.guarded(|| {
            let mut txn = opened(&database)?.begin_write()?;
            let result = work(&txn)?;
            let generation = self.generations.record(&txn, self.kind)?;
            txn.set_quick_repair(self.kind != FileKind::State && !another_waits());
            txn.commit()?;
            Ok((result, generation))
        })?;
        // Announced only now: other files may record a generation only once it is durable.
        self.generations.note_commit(self.kind, generation);
        Ok(result)
    }

    /// Reopens the database: after an I/O error redb returns nothing but errors.
    pub fn reopen(&self) -> Result<(), Error> {
        let mut database = self.database.write().expect("no panic holds it");
        // The old instance must be closed first because it holds the lock on the file.
        *database = None;
        let named = |why| Error::Unavailable(opening(&self.path, why));
        // Damage is reported already, and the intact rest of the file is still of use.
        let opened = open_blocks_with(&self.path, self.cache_bytes, OpeningMode::Again).map_err(named)?;
        if opened.rolled_back {
            self.generations.note_rolled_back(self.kind);
        }
        *database = Some(opened);
        Ok(())
    }

    /// Closes the database in order: the next start need not look for what a crash may have torn.
    pub fn close(&self) {
        // redb has nothing to close in a file that it has found damaged, and would panic over it.
        let database = self.database.write().expect("no panic holds it").take();
        let _ = catch_unwind(AssertUnwindSafe(move || drop(database)));
    }

    /// Verifies some blocks from `first` on, while the database is in use: the places of damaged ones, and the next
    /// block to verify. A database that waits to be opened anew is left out: opening it verifies it.
    pub fn verify_blocks(&self, first: u64) -> io::Result<VerifiedBlocks> {
        let database = self.database.read().expect("no panic holds it");
        let Some(open) = database.as_ref() else {
            return Ok(VerifiedBlocks::default());
        };
        let (damaged, next) = open.blocks.verify(first)?;
        let file = self.path.file_name().unwrap_or_default().to_string_lossy();
        let place = |number| format!("{file}: the block at byte {}", block_file::block_offset(number));
        let end = match next {
            Some(next) => next,
            None => open.blocks.blocks()?,
        };
        Ok(VerifiedBlocks {
            damaged: damaged.into_iter().map(place).collect(),
            bytes: end.saturating_sub(first) * block_file::BLOCK as u64,
            next,
        })
    }
}

/// Outcome of [`ReopeningDatabase::verify_blocks`].
#[derive(Debug, Default)]
pub struct VerifiedBlocks {
    pub damaged: Vec<String>,
    pub bytes: u64,
    /// `None` after the last block.
    pub next: Option<u64>,
}

fn opening(path: &Path, why: String) -> String {
    format!("opening {}: {why}", path.display())
}

fn damaged(path: &Path, why: &str) -> String {
    let directory = path.parent().unwrap_or(path).display();
    format!(
        "{} is damaged: {why}. Put back all files of one backup, or run \"postrider restore --data-dir {directory} \
         --accept-damage\" with the server stopped: it keeps what can be read and delivers again what may be open",
        path.display()
    )
}

/// Opens a redb database with a checksum for every block, readable by its owner only. A plain redb
/// file of an older program is converted; a new file is created completely or not at all. A panic
/// of redb over a damaged file becomes an error with the file's name.
pub fn open_database(path: &Path, cache_bytes: usize) -> Result<Database, String> {
    open_blocks(path, cache_bytes)
        .map(|opened| opened.database)
        .map_err(|why| opening(path, why))
}

fn open_file(path: &Path, create: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(create)
        .mode(0o600)
        .open(path)
}

fn open_blocks(path: &Path, cache_bytes: usize) -> Result<OpenDatabase, String> {
    open_blocks_with(path, cache_bytes, OpeningMode::First)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpeningMode {
    /// Damage of what is in use is an error.
    First,
    /// After an error of a database that was whole when it was opened first.
    Again,
}

fn open_blocks_with(path: &Path, cache_bytes: usize, opening: OpeningMode) -> Result<OpenDatabase, String> {
    let open = || -> Result<OpenDatabase, String> {
        let told = |e: io::Error| e.to_string();
        let mut magic = [0; MAGIC.len()];
        let plain = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(told(e)),
            Ok(mut file) => match file.metadata().map_err(told)?.len() {
                0 => None,
                _ => {
                    let got = file.read(&mut magic).map_err(told)?;
                    Some(&magic[..got] != MAGIC)
                }
            },
        };
        match plain {
            None => {
                replace(path, |new| {
                    let opened = build(new, cache_bytes, OpeningMode::First)?;
                    let txn = opened.database.begin_write().map_err(|e| e.to_string())?;
                    txn.commit().map_err(|e| e.to_string())
                })?;
            }
            Some(true) if magic.starts_with(PLAIN_MAGIC) => {
                let old = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(path)
                    .map_err(told)?;
                old.try_lock().map_err(|e| e.to_string())?;
                replace(path, |new| {
                    BlockFile::new(new)
                        .and_then(|new| new.take_over(&old))
                        .map_err(told)
                })?;
                // The old file may contain secrets that are not sealed.
                overwrite(&old).map_err(told)?;
            }
            Some(true) => {
                return Err("this is not a database of postrider, or its beginning is damaged".into());
            }
            Some(false) => {}
        }
        build(open_file(path, false).map_err(told)?, cache_bytes, opening)
    };
    match catch_unwind(open) {
        Ok(opened) => opened,
        Err(_) => Err("the file is damaged".into()),
    }
}

/// Fills a new file and, once it is durable, replaces the file of this name with it.
fn replace(path: &Path, fill: impl FnOnce(File) -> Result<(), String>) -> Result<(), String> {
    let told = |e: io::Error| e.to_string();
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    match erase(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(told(e)),
        _ => {}
    }
    fill(open_file(&new, true).map_err(told)?)?;
    File::open(&new).and_then(|file| file.sync_all()).map_err(told)?;
    std::fs::rename(&new, path).map_err(told)?;
    // The directory itself may be new, so its parent is synced as well.
    let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
    for directory in directory.into_iter().flat_map(|path| path.ancestors().take(2)) {
        let directory = if directory.as_os_str().is_empty() {
            Path::new(".")
        } else {
            directory
        };
        // The parent of the data directory may be inaccessible to this process.
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        if Some(directory) == path.parent() {
            synced.map_err(told)?;
        }
    }
    Ok(())
}

fn build(file: File, cache_bytes: usize, opening: OpeningMode) -> Result<OpenDatabase, String> {
    file.try_lock().map_err(|e| e.to_string())?;
    let blocks = Arc::new(BlockFile::new(file).map_err(|e| e.to_string())?);
    let examined = match opening {
        OpeningMode::First => Some(examine(&blocks)?),
        OpeningMode::Again => None,
    };
    // After a crash redb looks for torn pages by its own checksums, and is shown what is there.
    blocks.set_lenient(Pages::of(&blocks).is_some_and(|pages| pages.may_be_torn()));
    let rolled_back = Arc::new(AtomicBool::new(false));
    let mut builder = Database::builder();
    builder.set_cache_size(cache_bytes);
    builder.set_repair_callback({
        let rolled_back = rolled_back.clone();
        move |repair| {
            if REPAIR_ROLLED_BACK.contains(&repair.progress()) {
                rolled_back.store(true, Relaxed);
            }
        }
    });
    let database = builder.create_with_backend(BlockFileBackend(blocks.clone()));
    let database = database.map_err(|e| e.to_string())?;
    blocks.set_lenient(false);
    let rolled_back = rolled_back.load(Relaxed);
    if let Some(examined) = examined.filter(|examined| examined.damaged > 0) {
        tracing::warn!(
            blocks = examined.damaged,
            "damaged blocks in the free space of a database: nothing that is in use is lost. Look at the disk"
        );
        for number in blocks.verify_all().map_err(|e| e.to_string())? {
            // redb has found the content of a torn commit to be right by its own checksums: ours were damaged.
            let mended = match examined.is_torn && !rolled_back {
                true => blocks.reseal(number),
                false => blocks.clear(number),
            };
            mended.map_err(|e| e.to_string())?;
        }
    }
    Ok(OpenDatabase {
        database,
        blocks,
        rolled_back,
    })
}

/// Findings of [`examine`] besides damage that is an error.
struct Examined {
    /// Damaged blocks, in free space unless the last commit is torn.
    damaged: usize,
    /// The last commit cannot be read, and the one before it can: redb goes back to that.
    is_torn: bool,
}

/// Verifies all blocks and walks the last commit, without a write: a file that is damaged where it is in use stays as
/// it is, for a salvage. The error says what the damage hit.
fn examine(blocks: &BlockFile) -> Result<Examined, String> {
    let damaged = blocks.verify_all().map_err(|e| e.to_string())?.len();
    let Some(pages) = Pages::of(blocks) else {
        let is_torn = false;
        return Ok(Examined { damaged, is_torn });
    };
    let [last, before] = pages.commits();
    let mut hit = pages.damage_of(last);
    if pages.header_is_whole {
        let is_torn = !hit.is_empty();
        if !is_torn || pages.may_be_torn() && pages.damage_of(before).is_empty() {
            return Ok(Examined { damaged, is_torn });
        }
    } else {
        hit.insert(0, "the file's header".into());
    }
    let size = block_file::BLOCK;
    Err(format!(
        "{damaged} damaged blocks of {size} bytes; {}",
        hit.join("; ")
    ))
}

/// Result of [`Salvage::copy`] for one table.
#[derive(Debug)]
pub struct SalvagedTable {
    pub copied: u64,
    /// How many rows there were, if that is known.
    all: Option<u64>,
    /// Whether all rows of the last commit were copied.
    is_whole: bool,
    /// Keys of rows that were left out, as far as they can be read.
    pub left_out: Vec<Vec<u8>>,
}

impl SalvagedTable {
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Describes what was kept, unless that is all.
    pub fn describe(&self, file: &str, what: &str) -> Option<String> {
        let copied = self.copied;
        (!self.is_whole).then(|| match self.all {
            Some(all) => format!("{file}: {copied} of {all} {what} were kept"),
            None => format!("{file}: {copied} {what} were kept; how many there were is not known"),
        })
    }
}

/// Judges a row by key and value, and by whether the checksum of its page holds.
pub type Judge<'a> = &'a dyn Fn(&[u8], &[u8], bool) -> bool;

/// Takes rows whose checksums hold.
pub const ONLY_WHOLE: Judge<'static> = &|_, _, is_whole| is_whole;

/// A database file from which is taken what is whole. Nothing is written to it.
pub struct Salvage {
    blocks: BlockFile,
    kind: FileKind,
}

impl Salvage {
    /// None if this is no database file, or one of an older program, which has no checksums.
    pub fn open(path: &Path, kind: FileKind) -> Option<Salvage> {
        let mut file = File::open(path).ok()?;
        let mut magic = [0; MAGIC.len()];
        file.read_exact(&mut magic).ok()?;
        if &magic != MAGIC && !block_file::looks_like_blocks(&file) {
            return None;
        }
        let blocks = BlockFile::new(file).ok()?;
        Some(Salvage { blocks, kind })
    }

    /// The last commit and the one before it, and whether the last one is known for sure. A damaged header does not
    /// tell; the file's own generation in both of them does.
    fn commits(&self, pages: &Pages<'_>) -> ([Commit; 2], bool) {
        let mut commits = pages.commits();
        if pages.header_is_whole {
            return (commits, true);
        }
        let generation = |commit: &Commit| {
            let rows = pages.rows(*commit, GENERATIONS.name())?;
            u64_at(rows.whole.get(self.kind.file().as_bytes())?, 0)
        };
        let known = commits.iter().all(|commit| generation(commit).is_some());
        commits.sort_by_key(|commit| std::cmp::Reverse(generation(commit)));
        (commits, known)
    }

    /// The rows of a table in the last commit. Incomplete if there may have been a later one.
    pub fn rows(&self, name: &str) -> TableRows {
        let Some(pages) = Pages::of(&self.blocks) else {
            return TableRows::default();
        };
        let ([last, _], is_last) = self.commits(&pages);
        let none = || TableRows {
            is_complete: true,
            ..TableRows::default()
        };
        let mut rows = pages.rows(last, name).unwrap_or_else(none);
        rows.is_complete &= is_last;
        rows
    }

    /// Copies the rows of a table that `judge` takes.
    pub fn copy<K: Key + 'static, V: Value + 'static>(
        &self,
        to: &WriteTransaction,
        definition: TableDefinition<K, V>,
        judge: Judge<'_>,
    ) -> Result<SalvagedTable, redb::Error> {
        self.copy_rows(to, definition, judge, false)
    }

    /// The same; what is lost of the last commit is taken from the one before it.
    pub fn copy_also_older<K: Key + 'static, V: Value + 'static>(
        &self,
        to: &WriteTransaction,
        definition: TableDefinition<K, V>,
        judge: Judge<'_>,
    ) -> Result<SalvagedTable, redb::Error> {
        self.copy_rows(to, definition, judge, true)
    }

    fn copy_rows<K: Key + 'static, V: Value + 'static>(
        &self,
        to: &WriteTransaction,
        definition: TableDefinition<K, V>,
        judge: Judge<'_>,
        also_older: bool,
    ) -> Result<SalvagedTable, redb::Error> {
        let last = self.rows(definition.name());
        let mut is_whole = last.is_complete;
        let mut kept = BTreeMap::new();
        let mut left_out = Vec::new();
        let rows = last.whole.into_iter().map(|row| (row, true));
        for ((key, value), checked) in rows.chain(last.doubtful.into_iter().map(|row| (row, false))) {
            if judge(&key, &value, checked) {
                kept.entry(key).or_insert(value);
            } else {
                is_whole = false;
                left_out.push(key);
            }
        }
        // Every row of a damaged page may have proved to be right.
        is_whole |= left_out.is_empty() && last.expected == Some(kept.len() as u64);
        if !is_whole
            && also_older
            && let Some(pages) = Pages::of(&self.blocks)
        {
            let ([_, before], _) = self.commits(&pages);
            let older = pages.rows(before, definition.name()).unwrap_or_default();
            for (key, value) in older.whole {
                if !kept.contains_key(&key) && judge(&key, &value, true) {
                    kept.insert(key, value);
                }
            }
            left_out.retain(|key| !kept.contains_key(key));
        }
        let mut new = to.open_table(definition)?;
        for (key, value) in &kept {
            new.insert(K::from_bytes(key), V::from_bytes(value))?;
        }
        Ok(SalvagedTable {
            copied: kept.len() as u64,
            all: last.expected,
            is_whole,
            left_out,
        })
    }
}

/// Whether a start would refuse this file, found out without a change to it. `beside` is where a copy may be made.
pub fn is_refused(path: &Path, beside: &Path) -> io::Result<bool> {
    std::fs::copy(path, beside)?;
    let refused = open_blocks(beside, 1 << 20).is_err();
    std::fs::remove_file(beside)?;
    Ok(refused)
}

/// Number of damaged blocks in a database file according to its checksums. Also works while it is
/// in use.
pub fn damaged_blocks(path: &Path) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let mut magic = [0; MAGIC.len()];
    if file.read(&mut magic)? < MAGIC.len() {
        // A file this short has no blocks; opening it reports what is wrong.
        return Ok(0);
    }
    let mut beginning = 0;
    if &magic != MAGIC {
        if magic.starts_with(PLAIN_MAGIC) || !block_file::looks_like_blocks(&file) {
            // A plain redb file, or not a database.
            return Ok(0);
        }
        beginning = 1;
    }
    Ok(BlockFile::new(file)?.verify_all()?.len() as u64 + beginning)
}

/// The generations recorded in a database file.
#[derive(Clone, Copy, Debug)]
pub struct KnownGenerations {
    pub known: [u64; 3],
    /// Of the log that the file belongs to, if it says so.
    pub identity: Option<u64>,
    /// See [`Generations::note_rolled_back`].
    pub rolled_back: bool,
}

/// Reads the generations recorded in a database file; `None` if the file does not exist.
pub fn read_generations(path: &Path) -> Result<Option<KnownGenerations>, Error> {
    if !std::fs::metadata(path).is_ok_and(|file| file.len() > 0) {
        return Ok(None);
    }
    let failed = |e: String| Error::Corrupt(damaged(path, &e));
    let opened = open_blocks(path, 1 << 20).map_err(failed)?;
    let read = || {
        let txn = opened.database.begin_read()?;
        Ok::<_, redb::Error>((Generations::read(&txn)?, Generations::read_identity(&txn)?))
    };
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok((known, identity))) => Ok(Some(KnownGenerations {
            known,
            identity,
            rolled_back: opened.rolled_back,
        })),
        Ok(Err(e)) => Err(failed(e.to_string())),
        Err(_) => Err(failed("its pages make no sense".into())),
    }
}

/// Raises a file's own generation, so that it does not count as an older copy.
pub fn raise_generation(path: &Path, kind: FileKind, to: u64) -> Result<(), Error> {
    let failed = |e: String| Error::Unavailable(format!("{}: {e}", path.display()));
    let opened = open_blocks(path, 1 << 20).map_err(failed)?;
    let write = || {
        let txn = opened.database.begin_write()?;
        let mut table = txn.open_table(GENERATIONS)?;
        table.insert(kind.file(), to)?;
        if kind == FileKind::State && to == 0 {
            // The log begins anew, with another identity.
            table.remove(LOG_IDENTITY)?;
        }
        drop(table);
        txn.commit()?;
        Ok::<_, redb::Error>(())
    };
    write().map_err(|e| failed(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use redb::ReadableTableMetadata;

    const NUMBERS: TableDefinition<u64, u64> = TableDefinition::new("numbers");
    const COUNT: u64 = 30;

    fn open(path: &Path, generations: &Arc<Generations>) -> Result<ReopeningDatabase, Error> {
        let kind = FileKind::Catalog;
        ReopeningDatabase::open("test", path, 1 << 20, kind, generations.clone())
    }

    // A one-phase commit, as if another one were to follow: the rollback by redb is reported.
    #[test]
    fn a_commit_that_is_undone_after_a_crash_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let database = open(&path, &Arc::default()).unwrap();
        for n in 0..COUNT {
            let insert = |txn: &WriteTransaction| {
                txn.open_table(NUMBERS)?.insert(n, n)?;
                Ok(())
            };
            database.write_before(|| true, insert).unwrap();
        }
        let killed = std::fs::read(&path).unwrap();
        let (mut undone, mut unharmed) = (0, 0);
        for block in 1..(killed.len() / 4104).min(200) {
            let mut flipped = killed.clone();
            flipped[16 + block * 4104 + 60] ^= 1;
            let copy = directory.path().join("copy.redb");
            std::fs::write(&copy, &flipped).unwrap();
            let generations = Arc::<Generations>::default();
            let Ok(opened) = open(&copy, &generations) else {
                continue;
            };
            let found = opened.read(|txn| Ok(txn.open_table(NUMBERS)?.len()?)).unwrap();
            let is_told = generations.rolled_back().contains(&FileKind::Catalog);
            assert_eq!(is_told, found < COUNT, "block {block}: {found} of {COUNT}");
            match is_told {
                true => undone += 1,
                false => unharmed += 1,
            }
        }
        assert!(undone > 0, "{undone} undone, {unharmed} unharmed");
    }
}
