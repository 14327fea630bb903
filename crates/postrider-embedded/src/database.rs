//! A redb database that goes on after an input or output error, once the disk does.

use crate::disk::open_database;
use postrider_store::Error;
use redb::{Database, ReadTransaction, ReadableDatabase, WriteTransaction};
use std::path::{Path, PathBuf};
use std::sync::RwLock;

pub struct Reopening {
    /// For messages.
    name: &'static str,
    path: PathBuf,
    cache_bytes: usize,
    /// Behind a lock because it is opened anew after an error; none while that fails.
    database: RwLock<Option<Database>>,
}

fn opened(database: &Option<Database>) -> Result<&Database, redb::Error> {
    database.as_ref().ok_or(redb::Error::DatabaseClosed)
}

impl Reopening {
    pub fn open(name: &'static str, path: &Path, cache_bytes: usize) -> Result<Reopening, Error> {
        let database = open_database(path, cache_bytes).map_err(Error::Unavailable)?;
        Ok(Reopening {
            name,
            path: path.to_owned(),
            cache_bytes,
            database: RwLock::new(Some(database)),
        })
    }

    fn failed(&self, e: redb::Error) -> Error {
        Error::Unavailable(format!("{}: {e}", self.name))
    }

    pub fn read<T>(&self, work: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>) -> Result<T, Error> {
        let database = self.database.read().expect("no panic holds it");
        let read = || work(&opened(&database)?.begin_read()?);
        read().map_err(|e| self.failed(e))
    }

    /// Does the work and commits it, or does nothing.
    pub fn write<T>(
        &self,
        work: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, Error> {
        let database = self.database.read().expect("no panic holds it");
        let write = || {
            let txn = opened(&database)?.begin_write()?;
            let result = work(&txn)?;
            txn.commit()?;
            Ok(result)
        };
        write().map_err(|e| self.failed(e))
    }

    /// Opens the database anew: after an error redb answers nothing but errors.
    pub fn reopen(&self) -> Result<(), Error> {
        let mut database = self.database.write().expect("no panic holds it");
        // The old one must be closed first: it holds the file's lock.
        *database = None;
        *database = Some(open_database(&self.path, self.cache_bytes).map_err(Error::Unavailable)?);
        Ok(())
    }
}
