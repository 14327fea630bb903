//! The delays of sick endpoints, kept so that a restart does not forget them.

use crate::Error;
use crate::node::{Node, Sharing};
use postrider_core::probation::{Delay, EndpointDelay};
use postrider_store::{Catalog, Change};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// When a delay is over that another node has set, that one asks the endpoint; others only if they hear nothing of what
/// came of it for so long after an answer must have come.
const GRACE: Duration = Duration::from_secs(10);

pub struct Delays {
    catalog: Arc<dyn Catalog>,
    /// This node, where there are several.
    me: Option<Arc<str>>,
    sharing: watch::Receiver<Sharing>,
    /// How long others wait for whoever has set a delay.
    grace: Duration,
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
    /// Endpoints mostly answer within `answered`, or not at all.
    pub fn new(catalog: Arc<dyn Catalog>, node: &Node, answered: Duration) -> Delays {
        Delays {
            catalog,
            grace: answered + GRACE,
            me: node.name.clone(),
            sharing: node.sharing.clone(),
            book: Mutex::default(),
            saving: tokio::sync::Mutex::default(),
            changed: Notify::new(),
            noted: AtomicU64::new(0),
        }
    }

    /// Which part of the rates that webhooks allow is this node's.
    pub fn sharing(&self) -> watch::Receiver<Sharing> {
        self.sharing.clone()
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no panic holds it")
    }

    pub fn restore(&self, delays: Vec<EndpointDelay>) {
        let mut book = self.book();
        for one in delays {
            book.kept.insert(one.endpoint.clone());
            let delay = self.here(&one);
            book.restored.insert(one.endpoint, delay);
        }
    }

    /// A delay as it holds on this node: whoever has set it asks the endpoint first when it is over.
    fn here(&self, one: &EndpointDelay) -> Delay {
        let mut delay = one.delay;
        if one.by.as_deref() != self.me.as_deref() {
            delay.until = delay.until + self.grace;
        }
        delay
    }

    /// Another node has set a delay. Returns how it holds here.
    pub fn set_elsewhere(&self, one: &EndpointDelay) -> Delay {
        let delay = self.here(one);
        let mut book = self.book();
        book.kept.insert(one.endpoint.clone());
        // What this node has not said yet is older than that.
        book.pending.remove(&one.endpoint);
        delay
    }

    /// The endpoint is not known here, or not yet.
    pub fn keep(&self, endpoint: String, delay: Delay) {
        self.book().restored.insert(endpoint, delay);
    }

    /// Another node has ended the delay of an endpoint.
    pub fn ended_elsewhere(&self, endpoint: &str) {
        let mut book = self.book();
        book.kept.remove(endpoint);
        book.restored.remove(endpoint);
        book.pending.remove(endpoint);
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
        // They stay there until they are stored: another node may say something newer meanwhile.
        let pending = self.book().pending.clone();
        if pending.is_empty() {
            return Ok(());
        }
        let change = |(endpoint, delay): (&String, &Option<Delay>)| match *delay {
            Some(delay) => Change::PutEndpointDelay(EndpointDelay {
                endpoint: endpoint.clone(),
                delay,
                by: self.me.as_deref().map(str::to_owned),
            }),
            None => Change::DeleteEndpointDelay(endpoint.clone()),
        };
        self.catalog.commit(pending.iter().map(change).collect()).await?;
        let mut book = self.book();
        book.pending
            .retain(|endpoint, delay| pending.get(endpoint) != Some(delay));
        Ok(())
    }
}
