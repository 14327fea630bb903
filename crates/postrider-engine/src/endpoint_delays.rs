//! The probation delays of endpoints, stored so that they survive a restart.

use crate::Error;
use crate::node::{NodeIdentity, SendingTurn};
use postrider_core::probation::{EndpointDelay, EndpointProbationDelay};
use postrider_store::{Catalog, CatalogChange};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// The node that set a delay probes the endpoint when it ends. Other nodes probe only if they have
/// heard nothing of the result for this long after an answer must have arrived.
const GRACE: Duration = Duration::from_secs(10);

pub struct EndpointDelays {
    catalog: Arc<dyn Catalog>,
    /// The name of this node; none without a cluster.
    me: Option<Arc<str>>,
    sharing: watch::Receiver<SendingTurn>,
    /// How long other nodes wait for the node that set a delay.
    grace: Duration,
    book: Mutex<EndpointDelayState>,
    saving: tokio::sync::Mutex<()>,
    pub changed: Notify,
    /// How many changes were noted that have to be saved.
    noted: AtomicU64,
}

#[derive(Default)]
struct EndpointDelayState {
    /// Delays of an earlier process, for endpoints not in use yet.
    restored: BTreeMap<String, EndpointProbationDelay>,
    /// Endpoints whose delay is in the catalog, or soon will be.
    kept: BTreeSet<String>,
    /// Changes that are not in the catalog yet; none stands for a delay that is over.
    pending: BTreeMap<String, Option<EndpointProbationDelay>>,
}

impl EndpointDelays {
    /// `answered` is how long endpoints take to answer at most.
    pub fn new(catalog: Arc<dyn Catalog>, node: &NodeIdentity, answered: Duration) -> EndpointDelays {
        EndpointDelays {
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

    /// This node's part of the rates that webhooks allow.
    pub fn sharing(&self) -> watch::Receiver<SendingTurn> {
        self.sharing.clone()
    }

    fn book(&self) -> MutexGuard<'_, EndpointDelayState> {
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

    /// A delay as it applies to this node: the node that set it probes first.
    fn here(&self, one: &EndpointDelay) -> EndpointProbationDelay {
        let mut delay = one.delay;
        if one.by.as_deref() != self.me.as_deref() {
            delay.until = delay.until + self.grace;
        }
        delay
    }

    /// Records a delay that another node has set. Returns how it applies here.
    pub fn apply_remote_delay_set(&self, one: &EndpointDelay) -> EndpointProbationDelay {
        let delay = self.here(one);
        let mut book = self.book();
        book.kept.insert(one.endpoint.clone());
        // The pending change of this node is older than the other node's.
        book.pending.remove(&one.endpoint);
        delay
    }

    /// Keeps a delay for an endpoint that is not known here yet.
    pub fn keep(&self, endpoint: String, delay: EndpointProbationDelay) {
        self.book().restored.insert(endpoint, delay);
    }

    /// Another node has ended the delay of an endpoint.
    pub fn apply_remote_delay_end(&self, endpoint: &str) {
        let mut book = self.book();
        book.kept.remove(endpoint);
        book.restored.remove(endpoint);
        book.pending.remove(endpoint);
    }

    /// Takes the delay that an earlier process stored for an endpoint now in use.
    pub fn take_restored(&self, endpoint: &str) -> Option<EndpointProbationDelay> {
        self.book().restored.remove(endpoint)
    }

    /// Takes the restored delays of endpoints that no subscription uses. To be called once all
    /// subscriptions are restored.
    pub fn take_unused_restored(&self) -> impl Iterator<Item = String> + use<> {
        std::mem::take(&mut self.book().restored).into_keys()
    }

    /// Notes that the delay of an endpoint has changed. Returns whether this must be saved: the end
    /// of an unknown delay is no news.
    pub fn note(&self, endpoint: &str, delay: Option<EndpointProbationDelay>) -> bool {
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

    /// Makes the changes noted before the call durable.
    pub async fn save(&self) -> Result<(), Error> {
        let _one_at_a_time = self.saving.lock().await;
        // Entries stay pending until they are stored: another node may report something newer in
        // the meantime.
        let pending = self.book().pending.clone();
        if pending.is_empty() {
            return Ok(());
        }
        let change = |(endpoint, delay): (&String, &Option<EndpointProbationDelay>)| match *delay {
            Some(delay) => CatalogChange::PutEndpointDelay(EndpointDelay {
                endpoint: endpoint.clone(),
                delay,
                by: self.me.as_deref().map(str::to_owned),
            }),
            None => CatalogChange::DeleteEndpointDelay(endpoint.clone()),
        };
        self.catalog.commit(pending.iter().map(change).collect()).await?;
        let mut book = self.book();
        book.pending
            .retain(|endpoint, delay| pending.get(endpoint) != Some(delay));
        Ok(())
    }
}
