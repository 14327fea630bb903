//! A redb database that is verified when it is opened and recovers from I/O errors by reopening the
//! file.

use crate::block_file::{self, Backend, BlockFile, MAGIC, PLAIN_MAGIC};
use crate::disk::{erase, overwrite};
use crate::generations::{FileKind, GENERATIONS, Generations};
use postrider_store::Error;
use redb::{
    Database, Key, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
    TableHandle, Value, WriteTransaction,
};
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

/// Lists the unreadable parts of a database, table by table.
pub type Walk = fn(&ReadTransaction) -> Vec<String>;

pub struct Reopening {
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

impl Reopening {
    pub fn open(
        name: &'static str,
        path: &Path,
        cache_bytes: usize,
        kind: FileKind,
        generations: Arc<Generations>,
        walk: Walk,
    ) -> Result<Reopening, Error> {
        let database = open_verified(path, cache_bytes, walk)?;
        if database.rolled_back {
            generations.note_rolled_back(kind);
        }
        let opened = Reopening {
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
        self.generations.committed(self.kind, generation);
        Ok(result)
    }

    /// Reopens the database: after an I/O error redb returns nothing but errors.
    pub fn reopen(&self) -> Result<(), Error> {
        let mut database = self.database.write().expect("no panic holds it");
        // The old instance must be closed first because it holds the lock on the file.
        *database = None;
        let named = |why| Error::Unavailable(opening(&self.path, why));
        let opened = open_blocks(&self.path, self.cache_bytes).map_err(named)?;
        if opened.rolled_back {
            self.generations.note_rolled_back(self.kind);
        }
        *database = Some(opened);
        Ok(())
    }

    /// Verifies some blocks from `first` on while the database is in use. Returns the damaged
    /// places and the next block to verify. A database that waits to be reopened is skipped, since
    /// opening verifies it.
    pub fn verify_blocks(&self, first: u64) -> io::Result<VerifiedBlocks> {
        let database = self.database.read().expect("no panic holds it");
        let Some(open) = database.as_ref() else {
            return Ok(VerifiedBlocks::default());
        };
        let (damaged, next) = open.blocks.verify(first)?;
        let file = self.path.file_name().unwrap_or_default().to_string_lossy();
        let place = |number| format!("{file}: the block at byte {}", block_file::place(number));
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

/// Outcome of [`Reopening::verify_blocks`].
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
    open_blocks_with(path, cache_bytes, Opening::Whole)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Opening {
    /// A damaged beginning of the file is an error.
    Whole,
    /// Reads everything readable, whatever the beginning of the file looks like.
    Salvage,
}

fn open_blocks_with(path: &Path, cache_bytes: usize, opening: Opening) -> Result<OpenDatabase, String> {
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
                    let is_damaged = || opening == Opening::Salvage && block_file::looks_like_blocks(&file);
                    Some(&magic[..got] != MAGIC && !is_damaged())
                }
            },
        };
        match plain {
            None => {
                replace(path, |new| {
                    let opened = build(new, cache_bytes, Opening::Whole)?;
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

fn build(file: File, cache_bytes: usize, opening: Opening) -> Result<OpenDatabase, String> {
    file.try_lock().map_err(|e| e.to_string())?;
    let blocks = Arc::new(BlockFile::new(file).map_err(|e| e.to_string())?);
    if opening == Opening::Salvage {
        blocks.mend_header().map_err(|e| e.to_string())?;
    }
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
    let database = builder.create_with_backend(Backend(blocks.clone()));
    let database = database.map_err(|e| e.to_string())?;
    blocks.be_strict();
    Ok(OpenDatabase {
        database,
        blocks,
        rolled_back: rolled_back.load(Relaxed),
    })
}

/// Opens a database and verifies all of it. Damage in a part that is in use is an error that names
/// the part.
fn open_verified(path: &Path, cache_bytes: usize, walk: Walk) -> Result<OpenDatabase, Error> {
    let failed = |why: String| match why.contains("damaged") || why.contains("orrupt") {
        true => Error::Corrupt(damaged(path, &why)),
        false => Error::Unavailable(opening(path, why)),
    };
    let mut opened = open_blocks(path, cache_bytes).map_err(failed)?;
    let unreadable = |e: io::Error| Error::Unavailable(format!("reading {}: {e}", path.display()));
    let damaged_blocks = opened.blocks.verify_all().map_err(unreadable)?;
    if damaged_blocks.is_empty() {
        return Ok(opened);
    }
    let mut hit = walk_all(&opened.database, walk);
    // The integrity check reads every page in use, including redb's own administration.
    let whole = catch_unwind(AssertUnwindSafe(|| opened.database.check_integrity()));
    if hit.is_empty() && !matches!(whole, Ok(Ok(_))) {
        hit.push("its own administration cannot be read".into());
    }
    if hit.is_empty() {
        tracing::warn!(
            path = %path.display(),
            blocks = damaged_blocks.len(),
            "damaged blocks in the database's free space: nothing that is in use is lost. Look at the disk"
        );
        for number in damaged_blocks {
            opened.blocks.clear(number).map_err(unreadable)?;
        }
        return Ok(opened);
    }
    let count = damaged_blocks.len();
    let why = format!(
        "{count} damaged blocks of {} bytes; {}",
        crate::block_file::BLOCK,
        hit.join("; ")
    );
    Err(Error::Corrupt(damaged(path, &why)))
}

fn walk_all(database: &Database, walk: Walk) -> Vec<String> {
    let look = || match database.begin_read() {
        Ok(txn) => walk(&txn),
        Err(e) => vec![e.to_string()],
    };
    let hit = catch_unwind(AssertUnwindSafe(look));
    hit.unwrap_or_else(|_| vec!["its pages make no sense".into()])
}

/// Describes how much of a table can be read, unless all of it can.
pub fn walk_table<K: Key + 'static, V: Value + 'static>(
    txn: &ReadTransaction,
    definition: TableDefinition<K, V>,
    hit: &mut Vec<String>,
) {
    let table = match txn.open_table(definition) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return,
        Err(e) => return hit.push(format!("table \"{}\" cannot be opened: {e}", definition.name())),
    };
    let all = table.len().unwrap_or(0);
    let mut read = 0;
    let iterated = table.iter().map(|rows| {
        for row in rows {
            if row.is_err() {
                return false;
            }
            read += 1;
        }
        true
    });
    if !matches!(iterated, Ok(true)) || read != all {
        hit.push(format!(
            "table \"{}\": damaged after {read} of {all} rows",
            definition.name()
        ));
    }
}

/// Result of [`salvage`] for one table.
pub struct Salvaged {
    pub copied: u64,
    pub all: u64,
}

impl Salvaged {
    pub fn is_whole(&self) -> bool {
        self.copied == self.all
    }
}

/// Copies what can be read of a table, from both ends.
pub fn salvage<K: Key + 'static, V: Value + 'static>(
    from: &ReadTransaction,
    to: &WriteTransaction,
    definition: TableDefinition<K, V>,
) -> Result<Salvaged, redb::Error> {
    let mut new = to.open_table(definition)?;
    let mut result = Salvaged { copied: 0, all: 0 };
    let table = match from.open_table(definition) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(result),
        Err(_) => {
            result.all = 1;
            return Ok(result);
        }
    };
    result.all = table.len().unwrap_or(1);
    let mut copy = |row: (redb::AccessGuard<'_, K>, redb::AccessGuard<'_, V>)| {
        if new.insert(row.0.value(), row.1.value())?.is_none() {
            result.copied += 1;
        }
        Ok::<_, redb::Error>(())
    };
    for backwards in [false, true] {
        let Ok(mut rows) = table.iter() else { continue };
        loop {
            let row = if backwards { rows.next_back() } else { rows.next() };
            match row {
                Some(Ok(row)) => copy(row)?,
                Some(Err(_)) | None => break,
            }
        }
    }
    Ok(result)
}

/// Opens a damaged database for a salvage; `None` if not even its roots can be found.
pub fn open_damaged(path: &Path) -> Option<Database> {
    let opened = open_blocks_with(path, 1 << 20, Opening::Salvage).ok();
    opened.map(|opened| opened.database)
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
    let read = || Generations::read(&opened.database.begin_read()?);
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(known)) => Ok(Some(KnownGenerations {
            known,
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
        txn.open_table(GENERATIONS)?.insert(kind.file(), to)?;
        txn.commit()?;
        Ok::<_, redb::Error>(())
    };
    write().map_err(|e| failed(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: TableDefinition<u64, u64> = TableDefinition::new("numbers");
    const COUNT: u64 = 30;

    fn open(path: &Path, generations: &Arc<Generations>) -> Result<Reopening, Error> {
        let walk: Walk = |txn| {
            let mut hit = Vec::new();
            walk_table(txn, NUMBERS, &mut hit);
            hit
        };
        let kind = FileKind::Catalog;
        Reopening::open("test", path, 1 << 20, kind, generations.clone(), walk)
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
