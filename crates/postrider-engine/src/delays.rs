//! The delays of sick endpoints, kept so that a restart does not forget them.

use crate::Error;
use postrider_core::probation::{Delay, EndpointDelay};
use postrider_store::{Catalog, Change};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;

pub struct Delays {
    catalog: Arc<dyn Catalog>,
    book: Mutex<Book>,
    saving: tokio::sync::Mutex<()>,
    pub changed: Notify,
    /// How often something was noted that is to be saved.
    noted: AtomicU64,
}

#[derive(Default)]
struct Book {
    /// From an earlier life, for endpoints that nobody has asked for yet.
    restored: BTreeMap<String, Delay>,
    /// Endpoints whose delay is in the catalogue, or soon will be.
    kept: BTreeSet<String>,
    /// What the catalogue does not know yet; none: the delay is over.
    pending: BTreeMap<String, Option<Delay>>,
}

impl Delays {
    pub fn new(catalog: Arc<dyn Catalog>) -> Delays {
        Delays {
            catalog,
            book: Mutex::default(),
            saving: tokio::sync::Mutex::default(),
            changed: Notify::new(),
            noted: AtomicU64::new(0),
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no panic holds it")
    }

    pub fn restore(&self, delays: Vec<EndpointDelay>) {
        let mut book = self.book();
        for one in delays {
            book.kept.insert(one.endpoint.clone());
            book.restored.insert(one.endpoint, one.delay);
        }
    }

    /// What an earlier life knew about an endpoint that is now taken up.
    pub fn take_restored(&self, endpoint: &str) -> Option<Delay> {
        self.book().restored.remove(endpoint)
    }

    /// Every endpoint that anyone sends to has been taken up: those of an earlier life that are left.
    pub fn left_restored(&self) -> impl Iterator<Item = String> + use<> {
        std::mem::take(&mut self.book().restored).into_keys()
    }

    /// The delay of an endpoint has changed. Whether that is news: one that is over may not have been known.
    pub fn note(&self, endpoint: &str, delay: Option<Delay>) -> bool {
        let mut book = self.book();
        let worth_saying = if delay.is_some() {
            book.kept.insert(endpoint.to_owned());
            true
        } else {
            book.kept.remove(endpoint)
        };
        if worth_saying {
            book.pending.insert(endpoint.to_owned(), delay);
            drop(book);
            self.noted.fetch_add(1, Relaxed);
            self.changed.notify_one();
        }
        worth_saying
    }

    /// A number that changes whenever there is more to save.
    pub fn noted(&self) -> u64 {
        self.noted.load(Relaxed)
    }

    /// Makes what was noted before durable.
    pub async fn save(&self) -> Result<(), Error> {
        let _one_at_a_time = self.saving.lock().await;
        let pending = std::mem::take(&mut self.book().pending);
        if pending.is_empty() {
            return Ok(());
        }
        let change = |(endpoint, delay): (&String, &Option<Delay>)| match *delay {
            Some(delay) => Change::PutEndpointDelay(EndpointDelay {
                endpoint: endpoint.clone(),
                delay,
            }),
            None => Change::DeleteEndpointDelay(endpoint.clone()),
        };
        let saved = self.catalog.commit(pending.iter().map(change).collect()).await;
        if saved.is_err() {
            // To be tried again with the next change, unless that is newer.
            let mut book = self.book();
            for (endpoint, delay) in pending {
                book.pending.entry(endpoint).or_insert(delay);
            }
        }
        Ok(saved?)
    }
}
