//! The catalogue in redb, in a file of its own: it changes seldom and is read whole.

use crate::database::Reopening;
use async_trait::async_trait;
use postrider_core::ids::TopicId;
use postrider_store::record::{Record, RecordError};
use postrider_store::{Catalog, Change, Error, Loaded};
use redb::{
    Key, Range, ReadTransaction, ReadableTable, ReadableTableMetadata, Table, TableDefinition,
    WriteTransaction,
};
use std::collections::VecDeque;
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

/// Ids are reserved in blocks, so that giving one out rarely costs a commit.
const ID_BLOCK: u64 = 1024;
const CACHE_BYTES: usize = 8 << 20;
/// One commit takes at most this many requests, so that the first of them do not wait for very many others.
const COMMIT_REQUESTS_MAX: usize = 1024;

/// From so many rows on a table is read by all processors at once.
const MANY_ROWS: usize = 10_000;

/// Whatever comes while a commit is under way goes into the next one together: a flush costs the same for one change
/// and for hundreds.
pub struct EmbeddedCatalog {
    shared: Arc<Shared>,
    next_id: AtomicU64,
    reserved: tokio::sync::Mutex<u64>,
}

struct Shared {
    database: Reopening,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    requests: VecDeque<Request>,
    /// Someone writes, and will take what is waiting.
    writing: bool,
}

struct Request {
    work: Work,
    done: oneshot::Sender<Result<(), Error>>,
}

enum Work {
    Changes(Vec<Change>),
    /// Ids below this one are given out.
    ReserveIds(u64),
}

impl EmbeddedCatalog {
    pub fn open(path: &Path) -> Result<EmbeddedCatalog, Error> {
        let database = Reopening::open("catalogue", path, CACHE_BYTES)?;
        let reserved = database.write(|txn| {
            // Older programs did not make all of them.
            let tables = Tables::of(txn)?;
            let reserved = tables.facts.get("reserved_ids")?;
            Ok(reserved.map_or(1, |v| v.value()))
        })?;
        Ok(EmbeddedCatalog {
            shared: Arc::new(Shared {
                database,
                waiting: Mutex::default(),
            }),
            next_id: AtomicU64::new(reserved),
            reserved: tokio::sync::Mutex::new(reserved),
        })
    }

    /// Returns once the work is durable. It is done even if nobody waits for it any more.
    async fn write(&self, work: Work) -> Result<(), Error> {
        let (done, durable) = oneshot::channel();
        let begin = {
            let mut waiting = self.shared.waiting();
            waiting.requests.push_back(Request { work, done });
            !std::mem::replace(&mut waiting.writing, true)
        };
        if begin {
            let writer = Writer {
                shared: Some(self.shared.clone()),
            };
            tokio::task::spawn_blocking(move || writer.run());
        }
        durable.await.map_err(|_| Error::Closed)?
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("no panic holds it")
    }
}

/// The one that writes, for as long as something waits.
struct Writer {
    /// None once it is somebody else's turn to write.
    shared: Option<Arc<Shared>>,
}

impl Writer {
    fn run(mut self) {
        let mut next = self.take();
        while let Some(requests) = next {
            let result = self.commit(&requests);
            // Before anyone is told: whoever hears that it is done may close the catalogue and open it again.
            next = self.take();
            for request in requests {
                // Whoever asked may have gone away.
                let _ = request.done.send(result.clone());
            }
        }
    }

    /// What is to be written next. None when nothing is: then the next one who comes writes.
    fn take(&mut self) -> Option<Vec<Request>> {
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

    fn commit(&self, requests: &[Request]) -> Result<(), Error> {
        let Some(shared) = &self.shared else {
            return Err(Error::Closed);
        };
        let work = |txn: &WriteTransaction| {
            let mut tables = Tables::of(txn)?;
            requests
                .iter()
                .try_for_each(|request| tables.apply(&request.work))
        };
        let result = shared.database.write(work);
        if result.is_err()
            && let Err(e) = shared.database.reopen()
        {
            tracing::debug!(error = %e, "cannot open the catalogue again yet");
        }
        result
    }
}

/// A writer that did not come to its end, in a runtime that is shut down, leaves nobody waiting.
impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            *shared.waiting() = Waiting::default();
        }
    }
}

struct Tables<'a> {
    topics: Table<'a, u64, &'static [u8]>,
    domain_topics: Table<'a, (u64, &'static str), &'static [u8]>,
    subscriptions: Table<'a, u64, &'static [u8]>,
    endpoint_delays: Table<'a, &'static str, &'static [u8]>,
    handshakes: Table<'a, &'static str, &'static [u8]>,
    facts: Table<'a, &'static str, u64>,
}

impl<'a> Tables<'a> {
    fn of(txn: &'a WriteTransaction) -> Result<Tables<'a>, redb::Error> {
        Ok(Tables {
            topics: txn.open_table(TOPICS)?,
            domain_topics: txn.open_table(DOMAIN_TOPICS)?,
            subscriptions: txn.open_table(SUBSCRIPTIONS)?,
            endpoint_delays: txn.open_table(ENDPOINT_DELAYS)?,
            handshakes: txn.open_table(HANDSHAKES)?,
            facts: txn.open_table(FACTS)?,
        })
    }

    fn apply(&mut self, work: &Work) -> Result<(), redb::Error> {
        match work {
            Work::Changes(changes) => changes.iter().try_for_each(|change| self.change(change)),
            Work::ReserveIds(upto) => {
                self.facts.insert("reserved_ids", upto)?;
                Ok(())
            }
        }
    }

    fn change(&mut self, change: &Change) -> Result<(), redb::Error> {
        match change {
            Change::PutTopic(topic) => {
                self.topics.insert(topic.id.0, topic.encode().as_slice())?;
            }
            Change::DeleteTopic(TopicId(id)) => {
                self.topics.remove(id)?;
            }
            Change::PutDomainTopic(one) => {
                let key = (one.domain.0, one.name.to_lowercase());
                self.domain_topics
                    .insert((key.0, key.1.as_str()), one.encode().as_slice())?;
            }
            Change::DeleteDomainTopic(domain, name) => {
                self.domain_topics
                    .remove((domain.0, name.to_lowercase().as_str()))?;
            }
            Change::PutSubscription(one) => {
                self.subscriptions.insert(one.id.0, one.encode().as_slice())?;
            }
            Change::DeleteSubscription(id) => {
                self.subscriptions.remove(id.0)?;
            }
            Change::PutEndpointDelay(one) => {
                self.endpoint_delays
                    .insert(one.endpoint.as_str(), one.encode().as_slice())?;
            }
            Change::DeleteEndpointDelay(endpoint) => {
                self.endpoint_delays.remove(endpoint.as_str())?;
            }
            Change::PutHandshake(one) => {
                self.handshakes
                    .insert(one.operation.as_str(), one.encode().as_slice())?;
            }
            Change::DeleteHandshake(operation) => {
                self.handshakes.remove(operation.as_str())?;
            }
        }
        Ok(())
    }
}

/// Every row of a table, in the order of the keys.
fn rows<K: Key + 'static, T: Record>(
    txn: &ReadTransaction,
    table: TableDefinition<K, &'static [u8]>,
) -> Result<Decoded<T>, redb::Error> {
    let table = txn.open_table(table)?;
    let count = table.len()? as usize;
    decode(table.iter()?, count)
}

/// What was read, or what is wrong with it: a file that cannot be read now may be read later, a record not.
type Decoded<T> = Result<Vec<T>, RecordError>;

fn decode<K: Key + 'static, T: Record>(
    range: Range<'_, K, &'static [u8]>,
    count: usize,
) -> Result<Decoded<T>, redb::Error> {
    let mut found = Vec::with_capacity(count);
    for row in range {
        match T::decode(row?.1.value()) {
            Ok(record) => found.push(record),
            Err(e) => return Ok(Err(e)),
        }
    }
    Ok(Ok(found))
}

/// The same, by all processors at once if there are very many: nothing else happens while a server starts.
fn many_rows<T: Record + Send>(
    txn: &ReadTransaction,
    table: TableDefinition<u64, &'static [u8]>,
) -> Result<Decoded<T>, redb::Error> {
    let table = txn.open_table(table)?;
    let count = table.len()? as usize;
    let ends = (table.first()?, table.last()?);
    let (Some((first, _)), Some((last, _)), true) = (ends.0, ends.1, count >= MANY_ROWS) else {
        return decode(table.iter()?, count);
    };
    let (first, last) = (first.value(), last.value());
    let parts = std::thread::available_parallelism().map_or(1, usize::from).min(8) as u64;
    let step = (last - first) / parts + 1;
    let part = |n: u64| {
        let from = first + n * step;
        decode(
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
        ended.collect::<Result<Vec<Decoded<T>>, redb::Error>>()
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

fn load(database: &Reopening) -> Result<Loaded, Error> {
    let loaded = database.read(|txn| {
        let topics = many_rows(txn, TOPICS)?;
        let domain_topics = rows(txn, DOMAIN_TOPICS)?;
        let subscriptions = many_rows(txn, SUBSCRIPTIONS)?;
        let endpoint_delays = rows(txn, ENDPOINT_DELAYS)?;
        let handshakes = rows(txn, HANDSHAKES)?;
        let loaded = || {
            Ok(Loaded {
                topics: topics?,
                domain_topics: domain_topics?,
                subscriptions: subscriptions?,
                endpoint_delays: endpoint_delays?,
                handshakes: handshakes?,
            })
        };
        Ok(loaded())
    })?;
    loaded.map_err(|e: RecordError| Error::Corrupt(format!("catalogue: {e}")))
}

#[async_trait]
impl Catalog for EmbeddedCatalog {
    async fn load(&self) -> Result<Loaded, Error> {
        let shared = self.shared.clone();
        let loaded = tokio::task::spawn_blocking(move || load(&shared.database));
        loaded.await.map_err(|_| Error::Closed)?
    }

    async fn commit(&self, changes: Vec<Change>) -> Result<(), Error> {
        self.write(Work::Changes(changes)).await
    }

    async fn next_id(&self) -> Result<u64, Error> {
        let mut reserved = self.reserved.lock().await;
        if self.next_id.load(Relaxed) >= *reserved {
            let upto = *reserved + ID_BLOCK;
            self.write(Work::ReserveIds(upto)).await?;
            *reserved = upto;
        }
        Ok(self.next_id.fetch_add(1, Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::open_database;
    use postrider_core::outcome::Outcome;
    use postrider_core::probation::EndpointDelay;
    use postrider_core::probation::Probation;
    use postrider_core::subscription::DomainTopic;
    use postrider_store::conformance::{self, at};

    // A file as the first version left it: without the table of endpoint delays.
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
        let mut expected = Loaded {
            domain_topics: vec![domain_topic],
            ..Loaded::default()
        };
        let catalog = EmbeddedCatalog::open(&path).unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
        assert_eq!(catalog.next_id().await.unwrap(), 9);
        expected.endpoint_delays = vec![EndpointDelay {
            endpoint: "https://a/b".into(),
            delay: Probation::DOCUMENTED.begin(Outcome::Busy, at(1)),
            by: None,
        }];
        let put = Change::PutEndpointDelay(expected.endpoint_delays[0].clone());
        catalog.commit(vec![put]).await.unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
    }

    fn domain_topic(name: String) -> DomainTopic {
        DomainTopic {
            domain: TopicId(1),
            name,
            automatic: true,
            created: at(0),
        }
    }

    fn put(name: impl ToString) -> Vec<Change> {
        vec![Change::PutDomainTopic(domain_topic(name.to_string()))]
    }

    async fn names(catalog: &EmbeddedCatalog) -> Vec<String> {
        let loaded = catalog.load().await.unwrap();
        loaded.domain_topics.into_iter().map(|topic| topic.name).collect()
    }

    #[tokio::test]
    async fn whoever_waits_is_taken_along_by_the_next_commit() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = EmbeddedCatalog::open(&directory.path().join("catalog.redb")).unwrap();
        // As while a commit is under way: nobody begins another one.
        catalog.shared.waiting().writing = true;
        let count = COMMIT_REQUESTS_MAX + 1;
        let waiting: Vec<_> = (0..count)
            .map(|n| {
                let (done, durable) = oneshot::channel();
                let work = Work::Changes(put(n));
                let request = Request { work, done };
                catalog.shared.waiting().requests.push_back(request);
                durable
            })
            .collect();
        let mut writer = Writer {
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

    // The file is out of reach for a while, as after an error of the disk.
    #[tokio::test]
    async fn a_commit_that_fails_fails_for_those_in_it_and_for_nobody_after() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let aside = directory.path().join("aside");
        let catalog = EmbeddedCatalog::open(&path).unwrap();
        catalog.commit(put("before")).await.unwrap();
        std::fs::rename(&path, &aside).unwrap();
        std::fs::create_dir(&path).unwrap();
        catalog.shared.database.reopen().unwrap_err();
        let (one, two) = tokio::join!(catalog.commit(put("one")), catalog.commit(put("two")));
        assert!(matches!(one, Err(Error::Unavailable(_))), "{one:?}");
        assert!(matches!(two, Err(Error::Unavailable(_))), "{two:?}");
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        // This one finds it closed, and has it opened again.
        catalog.commit(put("three")).await.unwrap_err();
        catalog.commit(put("after")).await.unwrap();
        assert_eq!(names(&catalog).await, ["after", "before"]);
    }

    #[tokio::test]
    async fn a_writer_that_cannot_go_on_leaves_nobody_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let catalog = EmbeddedCatalog::open(&directory.path().join("catalog.redb")).unwrap();
        catalog.shared.waiting().writing = true;
        let writer = Writer {
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
        let catalog = EmbeddedCatalog::open(&directory.path().join("catalog.redb")).unwrap();
        // The ids have gaps, and one is as large as can be.
        let ids: Vec<u64> = (0..MANY_ROWS as u64 + 7)
            .map(|n| n * n / 3 + n)
            .chain([u64::MAX])
            .collect();
        let changes = ids
            .iter()
            .map(|id| Change::PutTopic(conformance::topic(*id, "t")));
        catalog.commit(changes.collect()).await.unwrap();
        let loaded = catalog.load().await.unwrap();
        let found: Vec<u64> = loaded.topics.iter().map(|topic| topic.id.0).collect();
        assert!(found == ids, "{} of {}", found.len(), ids.len());
    }
}
