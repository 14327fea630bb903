//! Generations of the database files, by which an older copy of one of them is detected.
//!
//! Every commit of a database increments its own generation and records the durable generations of
//! the other files; the log records the generation of the state database in segment heads and
//! progress records. A file whose generation is below what another file has recorded is therefore
//! an older copy. A higher generation proves nothing, since a crash may come between any two
//! commits.

use crate::database::{KnownGenerations, raise_generation, read_generations};
use postrider_store::Error;
use redb::{ReadTransaction, ReadableTable, TableDefinition, WriteTransaction};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// File → generation: the file's own, and those it has recorded of the others.
pub const GENERATIONS: TableDefinition<&str, u64> = TableDefinition::new("generations");

/// In the same table: the identity of the log that the file belongs to. Missing until a program that knows of it has
/// committed.
pub const LOG_IDENTITY: &str = "log";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    State,
    Catalog,
    Archive,
}

impl FileKind {
    pub const ALL: [FileKind; 3] = [FileKind::State, FileKind::Catalog, FileKind::Archive];

    pub const fn file(self) -> &'static str {
        match self {
            FileKind::State => "state.redb",
            FileKind::Catalog => "catalog.redb",
            FileKind::Archive => "archive.redb",
        }
    }
}

/// The durable generations of the open files of one data directory.
#[derive(Default)]
pub struct Generations {
    durable: [AtomicU64; 3],
    rolled_back: [AtomicBool; 3],
    /// The log's identity; 0 while it is not known.
    identity: AtomicU64,
    /// Called after a commit of a file other than the state database, which is to record it soon.
    commit_listener: OnceLock<CommitListener>,
}

type CommitListener = Box<dyn Fn() + Send + Sync>;

impl fmt::Debug for Generations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Generations({:?})", self.durable)
    }
}

impl Generations {
    /// Checks, before the files are opened, that those of a data directory belong together.
    pub fn check(data_dir: &Path) -> Result<Arc<Generations>, Error> {
        let read = read_all(data_dir)?;
        refuse_foreign(&read)?;
        let known = read.map(|read| read.map(|read| read.known));
        let generations = Generations::default();
        for kind in FileKind::ALL {
            if let Some(read) = read[kind as usize] {
                generations.set(kind, read.known[kind as usize]);
                if read.rolled_back {
                    generations.note_rolled_back(kind);
                }
            }
        }
        let older = older(&known);
        if older.is_empty() {
            return Ok(Arc::new(generations));
        }
        let named = older.iter().map(|one| match one.own {
            None => format!(
                "{} is missing, and {} has seen it",
                one.file.file(),
                one.witness.file()
            ),
            Some(own) => format!(
                "{} is an older copy: generation {own}, where {} has seen {}",
                one.file.file(),
                one.witness.file(),
                one.seen
            ),
        });
        let named: Vec<String> = named.collect();
        Err(Error::Corrupt(mixed(data_dir, &named.join("; "))))
    }

    pub fn get(&self, kind: FileKind) -> u64 {
        self.durable[kind as usize].load(Relaxed)
    }

    pub fn set(&self, kind: FileKind, generation: u64) {
        self.durable[kind as usize].fetch_max(generation, Relaxed);
    }

    /// Sets the identity of the log, which every commit from now on records.
    pub fn set_identity(&self, identity: u64) {
        self.identity.store(identity, Relaxed);
    }

    /// A commit is durable. The state database's next checkpoint records the other files' generations: an older copy of
    /// one of them is found out even if nothing is published or delivered after its last change.
    pub fn note_commit(&self, kind: FileKind, generation: u64) {
        self.set(kind, generation);
        if kind != FileKind::State
            && let Some(listener) = self.commit_listener.get()
        {
            listener();
        }
    }

    /// Sets the listener for commits; only the first call counts.
    pub fn listen(&self, listener: impl Fn() + Send + Sync + 'static) {
        let _ = self.commit_listener.set(Box::new(listener));
    }

    /// Records that redb rolled back the last commit of a file after a crash. The file is intact
    /// without it.
    pub fn note_rolled_back(&self, kind: FileKind) {
        self.rolled_back[kind as usize].store(true, Relaxed);
        match kind {
            // Deliveries affected by the lost commit are made again, and the log detects the loss
            // of a commit whose generation it has recorded.
            FileKind::State => tracing::warn!("{}", undone(kind)),
            FileKind::Catalog | FileKind::Archive => tracing::error!("{}", undone(kind)),
        }
    }

    pub fn rolled_back(&self) -> Vec<FileKind> {
        let mut kinds = FileKind::ALL.to_vec();
        kinds.retain(|kind| self.rolled_back[*kind as usize].load(Relaxed));
        kinds
    }

    /// The identity of the log that a file belongs to, if it says so.
    pub fn read_identity(txn: &ReadTransaction) -> Result<Option<u64>, redb::Error> {
        match txn.open_table(GENERATIONS) {
            Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
            table => Ok(table?.get(LOG_IDENTITY)?.map(|identity| identity.value())),
        }
    }

    /// Generations of all files, as one file records them.
    pub fn read(txn: &ReadTransaction) -> Result<[u64; 3], redb::Error> {
        let table = match txn.open_table(GENERATIONS) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok([0; 3]),
            table => table?,
        };
        let mut known = [0; 3];
        for kind in FileKind::ALL {
            known[kind as usize] = table.get(kind.file())?.map_or(0, |generation| generation.value());
        }
        Ok(known)
    }

    /// Increments a file's own generation and records the others. Returns its own.
    pub fn record(&self, txn: &WriteTransaction, own: FileKind) -> Result<u64, redb::Error> {
        let mut table = txn.open_table(GENERATIONS)?;
        let generation = table.get(own.file())?.map_or(0, |generation| generation.value()) + 1;
        table.insert(own.file(), generation)?;
        let identity = self.identity.load(Relaxed);
        if identity > 0 {
            table.insert(LOG_IDENTITY, identity)?;
        }
        for other in FileKind::ALL.into_iter().filter(|kind| *kind != own) {
            let durable = self.get(other);
            if durable > 0 {
                table.insert(other.file(), durable)?;
            }
        }
        Ok(generation)
    }
}

/// Describes a commit that was rolled back.
pub fn undone(kind: FileKind) -> String {
    format!(
        "{}: the last commit is damaged and was undone. If the power failed during that commit, nobody was told that it \
         was done; otherwise the last changes are lost: look at the disk, and repeat them",
        kind.file()
    )
}

pub fn mixed(data_dir: &Path, what: &str) -> String {
    let shown = data_dir.display();
    format!(
        "the files in {shown} are not of the same time: {what}. Retries or subscriptions would be forgotten silently. \
         Put back all files of one backup (log/, state.redb, catalog.redb, archive.redb), or accept these with \
         \"postrider restore --data-dir {shown} --accept-mixed-files\""
    )
}

/// A file that is older than another file has recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OlderFile {
    file: FileKind,
    /// `None` if the file does not exist.
    own: Option<u64>,
    seen: u64,
    witness: FileKind,
}

fn read_all(data_dir: &Path) -> Result<[Option<KnownGenerations>; 3], Error> {
    let mut known = [None; 3];
    for kind in FileKind::ALL {
        known[kind as usize] = read_generations(&data_dir.join(kind.file()))?;
    }
    Ok(known)
}

/// The file that belongs to another log than the others; with no majority, than the state database.
fn foreign(identities: [Option<u64>; 3]) -> Option<FileKind> {
    let known = FileKind::ALL
        .into_iter()
        .filter_map(|kind| Some((kind, identities[kind as usize]?)));
    let known: Vec<(FileKind, u64)> = known.collect();
    let alike = |identity: u64| known.iter().filter(|(_, other)| *other == identity).count();
    // The last one of equals.
    let ours = known.iter().rev().max_by_key(|(_, identity)| alike(*identity))?.1;
    known
        .iter()
        .find(|(_, identity)| *identity != ours)
        .map(|(kind, _)| *kind)
}

fn refuse_foreign(read: &[Option<KnownGenerations>; 3]) -> Result<(), Error> {
    let Some(kind) = foreign(read.map(|read| read?.identity)) else {
        return Ok(());
    };
    let next = match kind {
        FileKind::Archive => {
            "put back this installation's own, or move it away and run \"postrider restore --accept-mixed-files\": the \
             dead letters stay in their blobs and are not listed"
        }
        FileKind::State | FileKind::Catalog => "put back this installation's own, or all files of one backup",
    };
    Err(Error::Corrupt(format!(
        "{} belongs to another installation than the other files beside it: {next}",
        kind.file()
    )))
}

fn older(known: &[Option<[u64; 3]>; 3]) -> Vec<OlderFile> {
    let mut found = Vec::new();
    for file in FileKind::ALL {
        let own = known[file as usize].map(|known| known[file as usize]);
        let witnesses = FileKind::ALL.into_iter().filter(|kind| *kind != file);
        let seen = witnesses.filter_map(|kind| Some((known[kind as usize]?[file as usize], kind)));
        if let Some((seen, witness)) = seen.max_by_key(|(seen, _)| *seen)
            && seen > own.unwrap_or(0)
        {
            found.push(OlderFile {
                file,
                own,
                seen,
                witness,
            });
        }
    }
    found
}

/// Accepts the files of a stopped server as they are: each gets a generation that counts as
/// current. Returns descriptions of what was older.
pub fn accept_mixed(data_dir: &Path) -> Result<Vec<String>, Error> {
    let read = read_all(data_dir)?;
    refuse_foreign(&read)?;
    let known = read.map(|read| read.map(|read| read.known));
    let mut told = Vec::new();
    for one in older(&known) {
        match one.own {
            Some(own) => {
                raise_generation(&data_dir.join(one.file.file()), one.file, one.seen)?;
                told.push(format!(
                    "{}: generation {own} is taken for {}; {}",
                    one.file.file(),
                    one.seen,
                    forgotten(one.file)
                ));
            }
            None => {
                for witness in FileKind::ALL.into_iter().filter(|kind| *kind != one.file) {
                    if known[witness as usize].is_some_and(|known| known[one.file as usize] > 0) {
                        forget_file(&data_dir.join(witness.file()), one.file)?;
                    }
                }
                told.push(missing(one.file).to_owned());
            }
        }
    }
    Ok(told)
}

/// Losses that follow from continuing without the newer version of a file.
fn forgotten(kind: FileKind) -> &'static str {
    match kind {
        FileKind::State => {
            "retries and dead letters that were recorded after the copy was made are forgotten, \
             and deliveries made since then may be made again"
        }
        FileKind::Catalog => "topics and subscriptions are as they were when the copy was made",
        FileKind::Archive => {
            "dead letters written since the copy was made are in their blobs, and not listed"
        }
    }
}

/// Consequences of continuing without a file.
fn missing(kind: FileKind) -> &'static str {
    match kind {
        FileKind::State => "state.redb is missing and begins anew, with an empty log",
        FileKind::Catalog => {
            "catalog.redb is missing: nothing else knows topics and subscriptions. The next start makes an empty one only \
             if no event waits for a subscription, and refuses otherwise: put catalog.redb back from a backup, or use \
             another data directory"
        }
        FileKind::Archive => {
            "archive.redb is missing and begins anew; dead letters written before are in their blobs, and not listed"
        }
    }
}

fn forget_file(witness: &Path, kind: FileKind) -> Result<(), Error> {
    raise_generation(witness, kind, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_another_installation_is_named() {
        let foreign =
            |identities: [u64; 3]| foreign(identities.map(|identity| (identity > 0).then_some(identity)));
        assert_eq!(foreign([0, 0, 0]), None);
        assert_eq!(foreign([7, 7, 7]), None);
        assert_eq!(foreign([7, 0, 7]), None);
        assert_eq!(foreign([7, 7, 8]), Some(FileKind::Archive));
        assert_eq!(foreign([7, 8, 7]), Some(FileKind::Catalog));
        assert_eq!(foreign([8, 7, 7]), Some(FileKind::State));
        assert_eq!(foreign([7, 0, 8]), Some(FileKind::Archive));
        assert_eq!(foreign([7, 8, 0]), Some(FileKind::Catalog));
    }

    #[test]
    fn a_file_below_what_another_has_seen_is_older() {
        // Each row: the state, catalog and archive generations as that file knows them.
        let same = [Some([9, 4, 2]), Some([7, 4, 2]), Some([8, 3, 2])];
        assert_eq!(older(&same), []);
        let state = [Some([5, 4, 2]), Some([7, 4, 2]), Some([8, 3, 2])];
        let found = older(&state);
        assert_eq!(
            (found.len(), found[0].file, found[0].own, found[0].seen),
            (1, FileKind::State, Some(5), 8)
        );
        let catalogue = [Some([9, 4, 2]), Some([7, 3, 2]), Some([8, 3, 2])];
        assert_eq!(older(&catalogue)[0].file, FileKind::Catalog);
        let missing = [Some([9, 4, 2]), Some([7, 4, 2]), None];
        let found = older(&missing);
        assert_eq!((found[0].file, found[0].own), (FileKind::Archive, None));
        // Files of a program without generations.
        assert_eq!(older(&[Some([0; 3]), Some([0; 3]), None]), []);
    }
}
