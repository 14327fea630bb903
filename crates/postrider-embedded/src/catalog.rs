//! The catalogue in redb, in a file of its own: it changes seldom and is read whole.

use crate::disk::open_database;
use async_trait::async_trait;
use postrider_core::ids::TopicId;
use postrider_core::probation::EndpointDelay;
use postrider_core::subscription::{DomainTopic, Subscription, Topic};
use postrider_store::record::Record;
use postrider_store::{Catalog, Change, Error, Loaded};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const TOPICS: TableDefinition<u64, &[u8]> = TableDefinition::new("topics");
const DOMAIN_TOPICS: TableDefinition<(u64, &str), &[u8]> = TableDefinition::new("domain_topics");
const SUBSCRIPTIONS: TableDefinition<u64, &[u8]> = TableDefinition::new("subscriptions");
const ENDPOINT_DELAYS: TableDefinition<&str, &[u8]> = TableDefinition::new("endpoint_delays");
const FACTS: TableDefinition<&str, u64> = TableDefinition::new("facts");

/// Ids are reserved in blocks, so that giving one out rarely costs a commit.
const ID_BLOCK: u64 = 1024;
const CACHE_BYTES: usize = 8 << 20;

pub struct EmbeddedCatalog {
    database: Arc<Database>,
    next_id: AtomicU64,
    reserved: tokio::sync::Mutex<u64>,
}

fn failed(e: impl std::fmt::Display) -> Error {
    Error::Unavailable(format!("catalogue: {e}"))
}

impl EmbeddedCatalog {
    pub fn open(path: &Path) -> Result<EmbeddedCatalog, Error> {
        let named =
            |e: &dyn std::fmt::Display| Error::Unavailable(format!("opening {}: {e}", path.display()));
        let database = open_database(path, CACHE_BYTES).map_err(Error::Unavailable)?;
        let prepare = || -> Result<u64, redb::Error> {
            let txn = database.begin_write()?;
            txn.open_table(TOPICS)?;
            txn.open_table(DOMAIN_TOPICS)?;
            txn.open_table(SUBSCRIPTIONS)?;
            // An older program did not make this one.
            txn.open_table(ENDPOINT_DELAYS)?;
            let reserved = txn
                .open_table(FACTS)?
                .get("reserved_ids")?
                .map_or(1, |v| v.value());
            txn.commit()?;
            Ok(reserved)
        };
        let reserved = prepare().map_err(|e| named(&e))?;
        Ok(EmbeddedCatalog {
            database: Arc::new(database),
            next_id: AtomicU64::new(reserved),
            reserved: tokio::sync::Mutex::new(reserved),
        })
    }

    async fn write(
        &self,
        work: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error> + Send + 'static,
    ) -> Result<(), Error> {
        let database = self.database.clone();
        let commit = move || -> Result<(), redb::Error> {
            let txn = database.begin_write()?;
            work(&txn)?;
            txn.commit()?;
            Ok(())
        };
        let done = tokio::task::spawn_blocking(commit).await;
        done.map_err(failed)?.map_err(failed)
    }
}

fn read<T: Record>(bytes: &[u8]) -> Result<T, Error> {
    T::decode(bytes).map_err(|e| Error::Corrupt(format!("catalogue: {e}")))
}

#[async_trait]
impl Catalog for EmbeddedCatalog {
    async fn load(&self) -> Result<Loaded, Error> {
        let database = self.database.clone();
        let load = move || -> Result<Loaded, Error> {
            let txn = database.begin_read().map_err(failed)?;
            let mut loaded = Loaded::default();
            for row in txn.open_table(TOPICS).map_err(failed)?.iter().map_err(failed)? {
                loaded.topics.push(read::<Topic>(row.map_err(failed)?.1.value())?);
            }
            for row in txn
                .open_table(DOMAIN_TOPICS)
                .map_err(failed)?
                .iter()
                .map_err(failed)?
            {
                loaded
                    .domain_topics
                    .push(read::<DomainTopic>(row.map_err(failed)?.1.value())?);
            }
            for row in txn
                .open_table(SUBSCRIPTIONS)
                .map_err(failed)?
                .iter()
                .map_err(failed)?
            {
                loaded
                    .subscriptions
                    .push(read::<Subscription>(row.map_err(failed)?.1.value())?);
            }
            for row in txn
                .open_table(ENDPOINT_DELAYS)
                .map_err(failed)?
                .iter()
                .map_err(failed)?
            {
                loaded
                    .endpoint_delays
                    .push(read::<EndpointDelay>(row.map_err(failed)?.1.value())?);
            }
            Ok(loaded)
        };
        tokio::task::spawn_blocking(load).await.map_err(failed)?
    }

    async fn commit(&self, changes: Vec<Change>) -> Result<(), Error> {
        self.write(move |txn| {
            let mut topics = txn.open_table(TOPICS)?;
            let mut domain_topics = txn.open_table(DOMAIN_TOPICS)?;
            let mut subscriptions = txn.open_table(SUBSCRIPTIONS)?;
            let mut endpoint_delays = txn.open_table(ENDPOINT_DELAYS)?;
            for change in &changes {
                match change {
                    Change::PutTopic(topic) => {
                        topics.insert(topic.id.0, topic.encode().as_slice())?;
                    }
                    Change::DeleteTopic(TopicId(id)) => {
                        topics.remove(id)?;
                    }
                    Change::PutDomainTopic(one) => {
                        let key = (one.domain.0, one.name.to_lowercase());
                        domain_topics.insert((key.0, key.1.as_str()), one.encode().as_slice())?;
                    }
                    Change::DeleteDomainTopic(domain, name) => {
                        domain_topics.remove((domain.0, name.to_lowercase().as_str()))?;
                    }
                    Change::PutSubscription(one) => {
                        subscriptions.insert(one.id.0, one.encode().as_slice())?;
                    }
                    Change::DeleteSubscription(id) => {
                        subscriptions.remove(id.0)?;
                    }
                    Change::PutEndpointDelay(one) => {
                        endpoint_delays.insert(one.endpoint.as_str(), one.encode().as_slice())?;
                    }
                    Change::DeleteEndpointDelay(endpoint) => {
                        endpoint_delays.remove(endpoint.as_str())?;
                    }
                }
            }
            Ok(())
        })
        .await
    }

    async fn next_id(&self) -> Result<u64, Error> {
        let mut reserved = self.reserved.lock().await;
        if self.next_id.load(Relaxed) >= *reserved {
            let upto = *reserved + ID_BLOCK;
            self.write(move |txn| {
                txn.open_table(FACTS)?.insert("reserved_ids", upto)?;
                Ok(())
            })
            .await?;
            *reserved = upto;
        }
        Ok(self.next_id.fetch_add(1, Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::outcome::Outcome;
    use postrider_core::probation::Probation;
    use postrider_store::conformance::at;

    // A file as the first version left it: without the table of endpoint delays.
    #[tokio::test]
    async fn a_file_from_before_endpoint_delays_opens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.redb");
        let domain_topic = DomainTopic {
            domain: TopicId(1),
            name: "a".into(),
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
        }];
        let put = Change::PutEndpointDelay(expected.endpoint_delays[0].clone());
        catalog.commit(vec![put]).await.unwrap();
        assert_eq!(catalog.load().await.unwrap(), expected);
    }
}
