//! Copies one store into another, empty one through the traits that all stores implement, and
//! verifies the copy.

use super::progress::MigrationProgress;
use super::tally::{MigrationTally, OpenDeliveryCounts};
use anyhow::{Context, Result, bail, ensure};
use postrider_core::ids::SubscriptionId;
use postrider_store::moving::{ExportedRequest, MovableLog};
use postrider_store::{
    Archive, BlobFilter, BlobId, BlobRecord, Catalog, CatalogChange, CatalogContent, EventLog, ReplayJob,
    ReplayState,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Catalog changes per commit.
const CHANGES: usize = 256;
/// Blobs per page.
const BLOBS: usize = 500;

/// Stores of the source or the destination.
#[derive(Clone)]
pub struct MigrationStores {
    pub log: Arc<dyn EventLog>,
    pub catalog: Arc<dyn Catalog>,
    pub archive: Arc<dyn Archive>,
}

impl MigrationStores {
    fn moving(&self) -> Result<&dyn MovableLog> {
        self.log.as_movable().context("this kind of log cannot be moved")
    }
}

/// Content of the source.
pub struct CopyResult {
    pub catalog: CatalogContent,
    pub blobs: usize,
    pub replays: usize,
    pub tally: MigrationTally,
    /// Deliveries for subscriptions that no longer exist.
    pub strays: u64,
    /// Deliveries whose events are damaged.
    pub damaged: u64,
    pub took: Duration,
}

/// Copies everything to an empty destination.
pub async fn copy(from: &MigrationStores, to: &MigrationStores) -> Result<CopyResult> {
    let catalog = read_catalog(&*from.catalog)
        .await
        .context("reading the catalogue")?;
    copy_catalog(&catalog, &*from.catalog, &*to.catalog)
        .await
        .context("writing the catalogue")?;
    let (blobs, replays) = copy_archive(&*from.archive, &*to.archive)
        .await
        .context("copying the archive of dead letters")?;
    let known: BTreeSet<SubscriptionId> = catalog.subscriptions.iter().map(|one| one.id).collect();
    for of in &known {
        to.log.open_subscription(*of).await?;
    }
    let expected = counts(&*from.log, &known);
    let damaged_before = from.log.health().corrupt_deliveries;
    let mut progress = MigrationProgress::new("moving", expected.all());
    let mut tally = MigrationTally::default();
    let mut strays = 0;
    let mut export = from.moving()?.export();
    let importing = to.moving()?;
    let mut next = export.next().await.context("reading events")?;
    while !next.is_empty() {
        let now = with_known(next, &known, &mut strays);
        now.iter().for_each(|one| tally.add(one));
        let count = now.iter().map(|one| one.open.len() as u64).sum();
        // The next batch is read while this one is written.
        let (imported, read) = tokio::join!(importing.import(now), export.next());
        imported.context("writing events")?;
        next = read.context("reading events")?;
        progress.add(count);
    }
    let took = progress.end();
    let damaged = from.log.health().corrupt_deliveries - damaged_before;
    let found = tally.total();
    ensure!(
        found == expected || damaged > 0,
        "the source said that {expected:?} are open, but {found:?} were found: nothing was marked as moved"
    );
    Ok(CopyResult {
        catalog,
        blobs,
        replays,
        tally,
        strays,
        damaged,
        took,
    })
}

/// Open deliveries of these subscriptions in a log.
fn counts(log: &dyn EventLog, known: &BTreeSet<SubscriptionId>) -> OpenDeliveryCounts {
    let mut counts = OpenDeliveryCounts::default();
    for of in known {
        let backlog = log.backlog(*of);
        counts.waiting += backlog.waiting + backlog.claimed;
        counts.retrying += backlog.retrying;
    }
    let letters = log.pending_dead_letters();
    counts.letters = letters
        .iter()
        .filter(|one| known.contains(&one.of))
        .map(|one| one.count)
        .sum();
    counts
}

/// Removes deliveries of deleted subscriptions.
fn with_known(
    moved: Vec<ExportedRequest>,
    known: &BTreeSet<SubscriptionId>,
    strays: &mut u64,
) -> Vec<ExportedRequest> {
    let kept = moved.into_iter().filter_map(|mut one| {
        let before = one.open.len();
        one.open.retain(|open| known.contains(&open.of));
        *strays += (before - one.open.len()) as u64;
        (!one.open.is_empty()).then_some(one)
    });
    kept.collect()
}

/// The catalog in an order that does not depend on the store: sorted by ids and names. The nodes
/// recorded in it are removed, since none of them is running.
async fn read_catalog(catalog: &dyn Catalog) -> Result<CatalogContent> {
    let mut loaded = catalog.load().await?;
    loaded.topics.sort_by_key(|one| one.id);
    loaded
        .domain_topics
        .sort_by_key(|one| (one.domain, one.name.to_lowercase()));
    loaded.subscriptions.sort_by_key(|one| one.id);
    for delay in &mut loaded.endpoint_delays {
        delay.by = None;
    }
    for handshake in &mut loaded.handshakes {
        handshake.by = None;
    }
    Ok(loaded)
}

async fn copy_catalog(loaded: &CatalogContent, from: &dyn Catalog, to: &dyn Catalog) -> Result<()> {
    let CatalogContent {
        topics,
        domain_topics,
        subscriptions,
        endpoint_delays,
        handshakes,
    } = loaded.clone();
    let changes: Vec<CatalogChange> = topics
        .into_iter()
        .map(CatalogChange::PutTopic)
        .chain(domain_topics.into_iter().map(CatalogChange::PutDomainTopic))
        .chain(subscriptions.into_iter().map(CatalogChange::PutSubscription))
        .chain(endpoint_delays.into_iter().map(CatalogChange::PutEndpointDelay))
        .chain(handshakes.into_iter().map(CatalogChange::PutHandshake))
        .collect();
    for some in changes.chunks(CHANGES) {
        to.commit(some.to_vec()).await?;
    }
    // Ids continue where the source's end.
    let given = from.next_id().await?;
    while to.next_id().await? <= given {}
    Ok(())
}

async fn copy_archive(from: &dyn Archive, to: &dyn Archive) -> Result<(usize, usize)> {
    let mut blobs = 0;
    let mut after = None;
    loop {
        let some = from.list(&BlobFilter::default(), after, BLOBS).await?;
        let Some(last) = some.last() else { break };
        let last = last.id;
        for blob in some {
            // Forgotten blobs leave gaps in the numbers, which are kept.
            if after.map_or(1, |BlobId(before)| before + 1) < blob.id.0 {
                to.skip_numbers(BlobId(blob.id.0 - 1), 0).await?;
            }
            after = Some(blob.id);
            let given = to.add(blob.clone()).await?;
            ensure!(
                given == blob.id,
                "blob {} was given the number {}",
                blob.id.0,
                given.0
            );
            blobs += 1;
        }
        after = Some(last);
    }
    let jobs = from.jobs().await?;
    for job in &jobs {
        to.put_job(moved(job.clone()), None).await?;
    }
    let (last, given) = from.numbers().await?;
    to.skip_numbers(last, given).await?;
    Ok((blobs, jobs.len()))
}

/// A replay as stored at the destination: a running one becomes cancelled, and has to be resumed by
/// the operator.
fn moved(job: ReplayJob) -> ReplayJob {
    let state = match job.state {
        ReplayState::Running => ReplayState::Cancelled,
        other => other,
    };
    ReplayJob { state, ..job }
}

/// Reads the reopened destination and compares it with what was copied.
pub async fn verify(copied: &CopyResult, from: &MigrationStores, to: &MigrationStores) -> Result<()> {
    let stored = read_catalog(&*to.catalog)
        .await
        .context("reading the catalogue back")?;
    compare_catalogs(&copied.catalog, &stored)?;
    compare_archives(&*from.archive, &*to.archive).await?;
    let mut progress = MigrationProgress::new("verifying", copied.tally.deliveries());
    let mut tally = MigrationTally::default();
    let mut export = to.moving()?.export();
    loop {
        let some = export.next().await.context("reading events back")?;
        if some.is_empty() {
            break;
        }
        some.iter().for_each(|one| tally.add(one));
        progress.add(some.iter().map(|one| one.open.len() as u64).sum());
    }
    progress.end();
    match copied.tally.difference(&tally) {
        None => Ok(()),
        Some(difference) => bail!("what was written is not what was read: {difference}"),
    }
}

fn compare_catalogs(before: &CatalogContent, now: &CatalogContent) -> Result<()> {
    let same = |what: &str, counts: (usize, usize), same: bool| {
        ensure!(
            same,
            "what was written is not what was read: {} {what} before, {} now, and not the same",
            counts.0,
            counts.1
        );
        Ok(())
    };
    macro_rules! compare {
        ($($part:ident),*) => {
            $(same(
                &stringify!($part).replace('_', " "),
                (before.$part.len(), now.$part.len()),
                before.$part == now.$part,
            )?;)*
        };
    }
    compare!(topics, domain_topics, subscriptions, endpoint_delays, handshakes);
    Ok(())
}

async fn compare_archives(from: &dyn Archive, to: &dyn Archive) -> Result<()> {
    let mut after = None;
    loop {
        let here: Vec<BlobRecord> = from.list(&BlobFilter::default(), after, BLOBS).await?;
        let there = to.list(&BlobFilter::default(), after, BLOBS).await?;
        ensure!(
            here == there,
            "what was written is not what was read: the archives' blobs after number {} differ",
            after.unwrap_or_default().0
        );
        match here.last() {
            Some(last) => after = Some(last.id),
            None => break,
        }
    }
    let sorted = |mut jobs: Vec<ReplayJob>| {
        jobs.sort_by_key(|job| job.id);
        jobs
    };
    ensure!(
        sorted(from.jobs().await?.into_iter().map(moved).collect()) == sorted(to.jobs().await?),
        "what was written is not what was read: the replays differ"
    );
    Ok(())
}
