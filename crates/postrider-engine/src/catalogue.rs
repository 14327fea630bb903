//! The catalogue, watched: whether what was last to be stored could be.

use async_trait::async_trait;
use postrider_core::time::{Clock, Timestamp};
use postrider_store::{Catalog, Change, Error, Follower, Loaded};
use std::sync::{Arc, Mutex};

/// Passes everything on, and remembers why the last commit failed, until one succeeds.
pub(crate) struct Watched {
    catalog: Arc<dyn Catalog>,
    clock: Arc<dyn Clock>,
    trouble: Mutex<Option<(Timestamp, String)>>,
}

impl Watched {
    pub fn new(catalog: Arc<dyn Catalog>, clock: Arc<dyn Clock>) -> Watched {
        Watched {
            catalog,
            clock,
            trouble: Mutex::default(),
        }
    }

    pub fn trouble(&self) -> Option<(Timestamp, String)> {
        self.trouble.lock().expect("no panic holds it").clone()
    }
}

#[async_trait]
impl Catalog for Watched {
    async fn load(&self) -> Result<Loaded, Error> {
        self.catalog.load().await
    }

    async fn commit(&self, changes: Vec<Change>) -> Result<(), Error> {
        let result = self.catalog.commit(changes).await;
        if let Err(Error::Conflict(_)) = result {
            // The catalogue is well: somebody else was faster.
            return result;
        }
        let trouble = result.as_ref().err().map(|e| (self.clock.now(), e.to_string()));
        *self.trouble.lock().expect("no panic holds it") = trouble;
        result
    }

    async fn next_id(&self) -> Result<u64, Error> {
        self.catalog.next_id().await
    }

    async fn catch_up(&self) -> Result<(), Error> {
        self.catalog.catch_up().await
    }

    async fn follow(&self, follower: Arc<dyn Follower>) {
        self.catalog.follow(follower).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use postrider_store::memory::MemoryCatalog;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    struct Fickle(MemoryCatalog, AtomicBool);

    #[async_trait]
    impl Catalog for Fickle {
        async fn load(&self) -> Result<Loaded, Error> {
            self.0.load().await
        }

        async fn commit(&self, changes: Vec<Change>) -> Result<(), Error> {
            match self.1.load(Relaxed) {
                true => Err(Error::Unavailable("the disk is full".into())),
                false => self.0.commit(changes).await,
            }
        }

        async fn next_id(&self) -> Result<u64, Error> {
            self.0.next_id().await
        }
    }

    #[tokio::test]
    async fn trouble_is_remembered_until_a_commit_succeeds() {
        let fickle = Arc::new(Fickle(MemoryCatalog::default(), AtomicBool::new(false)));
        let watched = Watched::new(fickle.clone(), Arc::new(SystemClock));
        watched.commit(Vec::new()).await.unwrap();
        assert_eq!(watched.trouble(), None);
        fickle.1.store(true, Relaxed);
        watched.commit(Vec::new()).await.unwrap_err();
        let (_, trouble) = watched.trouble().expect("it is remembered");
        assert!(trouble.contains("the disk is full"), "{trouble}");
        // Looking at it changes nothing.
        watched.load().await.unwrap();
        assert!(watched.trouble().is_some());
        fickle.1.store(false, Relaxed);
        watched.commit(Vec::new()).await.unwrap();
        assert_eq!(watched.trouble(), None);
    }
}
