//! `postrider migrate`: moves all data of a stopped server from one kind of store to the other.
//!
//! The source is not changed except for markers. An incomplete destination has a marker that keeps
//! servers from starting on it and makes the next run begin again; a cluster that is being moved
//! away, and a source that was moved, have one so that no server starts on them by mistake.

mod copy;
pub mod markers;
mod progress;
mod tally;

use crate::config::{self, Config, LoadedConfig, ServeFlags};
use crate::output::{OutputFlags, OutputFormat};
use crate::serve::{self, runtime};
use crate::{cluster, credentials, offline_audit, private_files, secrets, terminal, test_clock};
use anyhow::{Context, Result, bail, ensure};
use copy::{CopyResult, MigrationStores};
use markers::{MovedTo, MovingIn, hex};
use postrider_core::time::{Clock, Timestamp};
use postrider_embedded::generations::Generations;
use postrider_embedded::{EmbeddedArchive, EmbeddedCatalog, EmbeddedLog};
use postrider_engine::clock::SystemClock;
use postrider_jetstream::bucket::Bucket;
use postrider_jetstream::cluster_facts::ClusterFacts;
use postrider_jetstream::connection::without_secrets;
use postrider_jetstream::migration::{self, Migration, MigrationState};
use postrider_jetstream::{JetStreamCluster, JetStreamSettings, NatsConnection, NodeId, NodeInfo};
use postrider_store::seal::Keyring;
use postrider_store::{Archive, Catalog, EventLog};
use progress::say;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// How long taking over all partitions may take after their owners are gone.
const PARTITIONS_PATIENCE: Duration = Duration::from_secs(60);
const KIND: &str = "POSTRIDER_STORE__KIND";

/// Move topics, subscriptions, keys, undelivered events and dead letters of a stopped server to
/// another store
#[derive(Clone, Debug, clap::Args)]
pub struct MigrateArgs {
    /// Kind of store to move to; the other one is the source
    #[arg(long, value_enum)]
    to: MigrationDestination,
    /// Configuration file (TOML) with data_dir and [store.jetstream]; also POSTRIDER_CONFIG
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of the embedded store [default: ./postrider-data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Undo a migration: empty an incomplete destination, and let the source be used again
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    output: OutputFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum MigrationDestination {
    Jetstream,
    Embedded,
}

pub fn run(args: &MigrateArgs) -> Result<ExitCode> {
    let _ = tracing_subscriber::fmt()
        // Take-overs and hand-overs of partitions are expected here and not logged.
        .with_env_filter("warn,async_nats=error,postrider_jetstream::members=error")
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .try_init();
    let loaded = load(args)?;
    private_files::restrict_new_files();
    runtime(None)?.block_on(async {
        let ends = MigrationEnds::new(&loaded.config)?;
        let told = match (args.to, args.undo) {
            (MigrationDestination::Jetstream, false) => ends.to_jetstream().await,
            (MigrationDestination::Embedded, false) => ends.to_embedded().await,
            (MigrationDestination::Jetstream, true) => ends.undo_to_jetstream().await,
            (MigrationDestination::Embedded, true) => ends.undo_to_embedded().await,
        };
        // A running server writes its audit log itself, and refuses the migration, so there is
        // nothing to record.
        let data_dir = ends.data_dir();
        if data_dir.is_dir()
            && let Ok(_lock) = serve::lock(data_dir)
        {
            let to = match args.to {
                MigrationDestination::Jetstream => "jetstream",
                MigrationDestination::Embedded => "embedded",
            };
            let details = json!({"to": to, "undo": args.undo});
            offline_audit::record(data_dir, "store.migrate", details, &told);
        }
        let told = told?;
        match args.output.form() {
            OutputFormat::Json => terminal::print(format!("{:#}", told.json)),
            OutputFormat::Text => terminal::print(told.text),
        }?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Loads the configuration as if it chose JetStream, whichever store it chooses: that choice checks
/// the settings of both.
fn load(args: &MigrateArgs) -> Result<LoadedConfig> {
    let flags = ServeFlags {
        config: args.config.clone(),
        data_dir: args.data_dir.clone(),
        ..ServeFlags::default()
    };
    let env = std::env::vars().filter(|(name, _)| !name.eq_ignore_ascii_case(KIND));
    Ok(config::load(
        &flags,
        env.chain([(KIND.into(), "jetstream".into())]),
    )?)
}

/// Result of the command as text and as JSON.
struct MigrationReport {
    text: String,
    json: Value,
}

/// Source and destination of a migration, from the configuration.
struct MigrationEnds<'c> {
    config: &'c Config,
    settings: JetStreamSettings,
    /// Address of the cluster, for messages.
    place: String,
}

/// Stores of an embedded server's directory.
struct EmbeddedStores {
    stores: MigrationStores,
    identity: u64,
}

impl EmbeddedStores {
    async fn open(data_dir: &Path, keys: Arc<Keyring>) -> Result<EmbeddedStores> {
        let opening = |what: &str| format!("opening {}", data_dir.join(what).display());
        let generations = Generations::check(data_dir)?;
        let log = EmbeddedLog::open_with(data_dir, serve::random(), generations.clone()).await;
        let log = log.with_context(|| opening("log"))?;
        let catalog = serve::open_catalog(data_dir, &log, keys, generations.clone())?;
        let archive = EmbeddedArchive::open_with(&data_dir.join("archive.redb"), generations);
        let archive = archive.with_context(|| opening("archive.redb"))?;
        Ok(EmbeddedStores::of(log, catalog, archive))
    }

    fn of(log: EmbeddedLog, catalog: EmbeddedCatalog, archive: EmbeddedArchive) -> EmbeddedStores {
        EmbeddedStores {
            identity: log.identity(),
            stores: MigrationStores {
                log: Arc::new(log),
                catalog: Arc::new(catalog),
                archive: Arc::new(archive),
            },
        }
    }

    async fn close(self) -> Result<()> {
        Ok(self.stores.log.close().await?)
    }
}

/// A cluster of which this process owns all partitions.
struct OwnedCluster {
    cluster: JetStreamCluster,
    stores: MigrationStores,
    /// Epoch at which each partition was taken over.
    epochs: BTreeMap<u8, u64>,
}

impl OwnedCluster {
    async fn open(settings: &JetStreamSettings) -> Result<OwnedCluster> {
        let process = serve::random();
        let node = NodeInfo {
            id: NodeId(serve::random()),
            process,
            name: "postrider-migrate".into(),
            url: String::new(),
            version: env!("CARGO_PKG_VERSION").into(),
            started: SystemClock.now(),
        };
        let cluster = JetStreamCluster::open_moving(settings.clone(), node).await?;
        let mut owned = OwnedCluster {
            stores: MigrationStores {
                log: cluster.log.clone(),
                catalog: cluster.catalog.clone(),
                archive: cluster.archive.clone(),
            },
            cluster,
            epochs: BTreeMap::new(),
        };
        owned.have_all(settings).await?;
        owned.epochs = owned.epochs();
        owned.alone()?;
        Ok(owned)
    }

    /// Waits until this process owns all partitions.
    async fn have_all(&self, settings: &JetStreamSettings) -> Result<()> {
        let all = usize::from(self.cluster.facts.partitions);
        let here = || self.cluster.log.partitions().len();
        let mut changes = self.cluster.members.changes();
        let waiting = async { while here() < all && changes.changed().await.is_ok() {} };
        let patience = PARTITIONS_PATIENCE + settings.lease * 2;
        let _ = tokio::time::timeout(patience, waiting).await;
        ensure!(
            here() == all,
            "only {} of {all} partitions could be taken over within {} s: look whether another node runs, and at the \
             streams' health",
            here(),
            patience.as_secs()
        );
        Ok(())
    }

    fn epochs(&self) -> BTreeMap<u8, u64> {
        let partitions = self.cluster.log.partitions();
        let open = partitions.iter().filter(|one| one.is_open());
        open.map(|one| (one.number(), one.epoch())).collect()
    }

    /// Fails if another node has joined or a partition was lost meanwhile.
    fn alone(&self) -> Result<()> {
        let membership = self.cluster.members.membership();
        let me = self.cluster.members.node().id;
        let others: Vec<&str> = membership
            .present()
            .filter(|member| member.id != me)
            .map(|member| member.name.as_str())
            .collect();
        ensure!(
            others.is_empty(),
            "a node of the cluster was started meanwhile: {}. Stop it and run this again",
            others.join(", ")
        );
        // A partition that was lost and taken again has another epoch: another node may have
        // delivered from it.
        let before = self.epochs.iter();
        let now = self.epochs();
        let (kept, all) = (
            before
                .filter(|(number, epoch)| now.get(number) == Some(epoch))
                .count(),
            usize::from(self.cluster.facts.partitions),
        );
        ensure!(
            kept == all,
            "partitions were lost meanwhile: {kept} of {all} are left; run this again"
        );
        Ok(())
    }

    async fn close(self) {
        self.cluster.close().await;
    }
}

fn now() -> Timestamp {
    SystemClock.now()
}

impl<'c> MigrationEnds<'c> {
    fn new(config: &'c Config) -> Result<MigrationEnds<'c>> {
        let settings = JetStreamSettings {
            keys: secrets::configured(config)?.map(Arc::new),
            ..config.store.jetstream.settings()
        };
        let shown: Vec<String> = settings.urls.iter().map(|url| without_secrets(url)).collect();
        Ok(MigrationEnds {
            config,
            place: format!(
                "JetStream at {} (prefix \"{}\")",
                shown.join(", "),
                settings.prefix
            ),
            settings,
        })
    }

    fn data_dir(&self) -> &Path {
        &self.config.data_dir
    }

    /// Path of the embedded store, for messages read elsewhere.
    fn directory(&self) -> String {
        let path = std::path::absolute(self.data_dir()).unwrap_or_else(|_| self.data_dir().into());
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        format!("{} on {machine}", path.display())
    }

    async fn connect(&self) -> Result<NatsConnection> {
        Ok(NatsConnection::open(&self.settings, "migrate").await?)
    }

    /// Fails while nodes are running.
    fn keys(&self) -> Result<Arc<Keyring>> {
        Ok(Arc::new(secrets::keyring(self.config)?))
    }

    async fn nobody_runs(&self, connection: &NatsConnection, bucket: &Bucket) -> Result<()> {
        let live = migration::live_nodes(connection, bucket, &self.settings).await?;
        if live.is_empty() {
            return Ok(());
        }
        let named = live.iter().map(|node| match node.url.is_empty() {
            true => node.name.clone(),
            false => format!("{} ({})", node.name, node.url),
        });
        let named: Vec<String> = named.collect();
        bail!("nodes of the cluster run: {}. Stop them first", named.join(", "))
    }

    async fn to_jetstream(&self) -> Result<MigrationReport> {
        let data_dir = self.data_dir();
        ensure!(
            data_dir.join("state.redb").exists(),
            "{} holds no embedded store to be moved",
            data_dir.display()
        );
        let _lock = serve::lock(data_dir)?;
        if let Some(MovingIn { .. }) = MovingIn::read(data_dir)? {
            markers::check(data_dir)?;
        }
        test_clock::check_unused(data_dir, now())?;
        let keys = self.keys()?;
        let source = EmbeddedStores::open(data_dir, keys.clone()).await?;
        let connection = self.connect().await?;
        let mut bucket = Bucket::open(&connection).await?;
        let moved_to = MovedTo::read(data_dir)?;
        match Migration::read(&bucket).await? {
            Some(found)
                if found.is_with(source.identity)
                    && found.state == MigrationState::Verified
                    && moved_to.is_some() =>
            {
                // Only the last step is missing: an earlier run was interrupted before it.
                Migration::forget(&bucket).await?;
                return Ok(self.finished("jetstream"));
            }
            // An earlier run began this migration, or the cluster was moved into this very store.
            Some(found) if found.is_with(source.identity) => {}
            Some(found) => bail!(found.refusal()),
            None => {
                if let Some(mark) = &moved_to {
                    let there = ClusterFacts::of(&bucket).await?;
                    if there.is_some_and(|there| hex(there.identity) == mark.cluster) {
                        return Ok(self.finished("jetstream"));
                    }
                    markers::check(data_dir)?;
                }
                self.nobody_runs(&connection, &bucket).await?;
                self.nothing_there(&connection).await?;
            }
        }
        let here = source.identity;
        let mark = |state| Migration::new(state, here, self.directory(), now());
        self.nobody_runs(&connection, &bucket).await?;
        mark(MigrationState::Copying).write(&bucket).await?;
        migration::wipe(&connection).await?;
        bucket = Bucket::open(&connection).await?;
        mark(MigrationState::Copying).write(&bucket).await?;

        say(format!("moving {} to {}", data_dir.display(), self.place));
        let destination = OwnedCluster::open(&self.settings).await?;
        let copied = copy::copy(&source.stores, &destination.stores).await?;
        credentials::prepare(self.config, &keys, now())?;
        cluster::share_secrets(&destination.cluster, self.config, &keys).await?;
        destination.alone()?;
        destination.close().await;
        let destination = OwnedCluster::open(&self.settings).await?;
        copy::verify(&copied, &source.stores, &destination.stores).await?;
        let identity = destination.cluster.facts.identity;
        destination.alone()?;
        destination.close().await;
        source.close().await?;

        mark_verified(&bucket, mark(MigrationState::Verified)).await?;
        let moved_to = MovedTo {
            cluster: hex(identity),
            place: self.place.clone(),
            at: now().to_string(),
        };
        moved_to.write(data_dir)?;
        Migration::forget(&bucket).await?;
        Ok(self.told("jetstream", &copied))
    }

    /// Refuses a cluster that holds data.
    async fn nothing_there(&self, connection: &NatsConnection) -> Result<()> {
        let me = serve::random();
        let catalog = postrider_jetstream::catalog::JetStreamCatalog::open(connection, me).await?;
        let archive = postrider_jetstream::archive::JetStreamArchive::open(connection, me).await?;
        let loaded = catalog.load().await?;
        let blobs = archive.last().await?;
        catalog.close().await;
        archive.close().await;
        let (topics, subscriptions) = (loaded.topics.len(), loaded.subscriptions.len());
        ensure!(
            topics == 0 && subscriptions == 0 && loaded.handshakes.is_empty() && blobs.is_none(),
            "{} holds a server's data already ({topics} topics, {subscriptions} subscriptions): set another \
             store.jetstream.prefix, or remove its streams and its bucket",
            self.place
        );
        Ok(())
    }

    async fn to_embedded(&self) -> Result<MigrationReport> {
        let data_dir = self.data_dir();
        let _lock = serve::lock(data_dir)?;
        let connection = self.connect().await?;
        ensure!(
            Bucket::exists(&connection).await?,
            "{} holds nothing to be moved: there is no bucket {}-nodes",
            self.place,
            self.settings.prefix
        );
        let bucket = Bucket::open(&connection).await?;
        let moving_in = MovingIn::read(data_dir)?;
        match Migration::read(&bucket).await? {
            Some(found) if found.state == MigrationState::Moved => {
                let ended = match moving_in {
                    Some(mark) => mark.verified,
                    None => self.is_here(&found).await?,
                };
                ensure!(ended, found.refusal());
                MovingIn::remove(data_dir)?;
                return Ok(self.finished("embedded"));
            }
            // An earlier run began this migration.
            Some(found) if found.state == MigrationState::Leaving => {}
            Some(found) => bail!(found.refusal()),
            None => {}
        }
        self.nobody_runs(&connection, &bucket).await?;
        let source = OwnedCluster::open(&self.settings).await?;
        let identity = hex(source.cluster.facts.identity);
        self.clear_destination(&identity, moving_in)?;
        let mark = |verified| MovingIn {
            cluster: identity.clone(),
            place: self.place.clone(),
            at: now().to_string(),
            verified,
        };
        mark(false).write(data_dir)?;
        // From here on no node can start; one that has just started is detected before the end.
        let leaving = Migration::new(MigrationState::Leaving, 0, self.directory(), now());
        leaving.write(&bucket).await?;
        if let Err(e) = source.alone() {
            Migration::forget(&bucket).await?;
            return Err(e);
        }

        say(format!("moving {} to {}", self.place, data_dir.display()));
        // The keys are read once: they cannot be looked up in the databases while those are open.
        let keys = self.keys()?;
        let destination = EmbeddedStores::open(data_dir, keys.clone()).await?;
        let copied = copy::copy(&source.stores, &destination.stores).await?;
        credentials::prepare(self.config, &keys, now())?;
        cluster::share_secrets(&source.cluster, self.config, &keys).await?;
        destination.close().await?;
        let destination = EmbeddedStores::open(data_dir, keys).await?;
        copy::verify(&copied, &source.stores, &destination.stores).await?;
        let here = destination.identity;
        destination.close().await?;
        source.alone()?;

        mark(true).write(data_dir)?;
        let moved = Migration::new(MigrationState::Moved, here, self.directory(), now());
        mark_verified(&bucket, moved).await?;
        source.close().await;
        MovingIn::remove(data_dir)?;
        Ok(self.told("embedded", &copied))
    }

    /// Whether the migration's destination was this directory's store.
    async fn is_here(&self, moved: &Migration) -> Result<bool> {
        if !self.data_dir().join("state.redb").exists() {
            return Ok(false);
        }
        let here = EmbeddedStores::open(self.data_dir(), self.keys()?).await?;
        let identity = here.identity;
        here.close().await?;
        Ok(moved.is_with(identity))
    }

    /// Makes the directory empty: removes the remains of an interrupted run, and sets aside a store
    /// that was moved into this very cluster.
    fn clear_destination(&self, cluster: &str, moving_in: Option<MovingIn>) -> Result<()> {
        let data_dir = self.data_dir();
        if let Some(mark) = moving_in {
            ensure!(
                mark.cluster == cluster,
                "{} holds what an interrupted migration from {} has left: take it back with --undo, or choose \
                 another data_dir",
                data_dir.display(),
                mark.place
            );
            return markers::wipe(data_dir);
        }
        match MovedTo::read(data_dir)? {
            Some(mark) if mark.cluster == cluster => {
                let aside = markers::set_aside(data_dir, now())?;
                say(format!(
                    "what was moved to the cluster before is in {}",
                    aside.display()
                ));
                Ok(())
            }
            _ => {
                let there = markers::store_files(data_dir);
                let there: Vec<String> = there.iter().map(|path| path.display().to_string()).collect();
                ensure!(
                    there.is_empty(),
                    "{} holds a store already ({}): choose another data_dir, or move these away",
                    data_dir.display(),
                    there.join(", ")
                );
                Ok(())
            }
        }
    }

    async fn undo_to_jetstream(&self) -> Result<MigrationReport> {
        let data_dir = self.data_dir();
        let _lock = serve::lock(data_dir)?;
        let mut done = Vec::new();
        if data_dir.join("state.redb").exists() {
            let source = EmbeddedStores::open(data_dir, self.keys()?).await?;
            let identity = source.identity;
            source.close().await?;
            // The cluster may be gone for good; the directory becomes usable all the same.
            match self.remove_interrupted(identity).await {
                Ok(true) => done.push(format!("what was written to {} is removed", self.place)),
                Ok(false) => {}
                Err(e) => say(format!("{} is not looked at: {e:#}", self.place)),
            }
        }
        if MovedTo::read(data_dir)?.is_some() {
            MovedTo::remove(data_dir)?;
            done.push(format!(
                "{} can be used with store.kind = \"embedded\" again",
                data_dir.display()
            ));
        }
        Ok(undone(done))
    }

    /// Removes what an interrupted migration of this store has left in the cluster. Returns whether
    /// there was any.
    async fn remove_interrupted(&self, identity: u64) -> Result<bool> {
        let connection = self.connect().await?;
        if !Bucket::exists(&connection).await? {
            return Ok(false);
        }
        let bucket = Bucket::open(&connection).await?;
        let ours = |found: &Migration| found.is_with(identity) && found.state != MigrationState::Moved;
        if !Migration::read(&bucket).await?.is_some_and(|found| ours(&found)) {
            return Ok(false);
        }
        self.nobody_runs(&connection, &bucket).await?;
        migration::wipe(&connection).await?;
        Ok(true)
    }

    async fn undo_to_embedded(&self) -> Result<MigrationReport> {
        let data_dir = self.data_dir();
        let _lock = serve::lock(data_dir)?;
        let mut done = Vec::new();
        if MovingIn::read(data_dir)?.is_some() {
            markers::wipe(data_dir)?;
            MovingIn::remove(data_dir)?;
            done.push(format!("what was written to {} is removed", data_dir.display()));
        }
        let connection = self.connect().await?;
        if Bucket::exists(&connection).await? {
            let bucket = Bucket::open(&connection).await?;
            let moved = Migration::read(&bucket).await?;
            if moved
                .is_some_and(|found| matches!(found.state, MigrationState::Moved | MigrationState::Leaving))
            {
                Migration::forget(&bucket).await?;
                done.push(format!("{} can be used again", self.place));
            }
        }
        Ok(undone(done))
    }

    fn finished(&self, to: &str) -> MigrationReport {
        MigrationReport {
            text: format!(
                "everything had been moved and verified before. {}",
                self.what_next(to)
            ),
            json: json!({ "to": to, "finished": true }),
        }
    }

    fn what_next(&self, to: &str) -> String {
        let node = match to {
            "jetstream" => " on every node",
            _ => "",
        };
        format!("Set store.kind = \"{to}\" in the configuration{node} and start the server.")
    }

    fn told(&self, to: &str, copied: &CopyResult) -> MigrationReport {
        let CopyResult {
            catalog,
            blobs,
            replays,
            tally,
            strays,
            damaged,
            took,
        } = copied;
        let total = tally.total();
        let seconds = took.as_secs_f64();
        let rate = tally.events as f64 / seconds.max(0.001);
        let mut text = format!(
            "moved and verified: {} topics, {} domain topics, {} subscriptions, {} handshakes, {} delayed endpoints, \
             {} blobs of dead letters, {} replays\n\
             {} events ({} bytes) in {seconds:.1} s, {rate:.0} events/s: {} first attempts, {} retries, {} dead letters to \
             be written\n\
             checksum {} on both sides\n",
            catalog.topics.len(),
            catalog.domain_topics.len(),
            catalog.subscriptions.len(),
            catalog.handshakes.len(),
            catalog.endpoint_delays.len(),
            blobs,
            replays,
            tally.events,
            tally.bytes,
            total.waiting,
            total.retrying,
            total.letters,
            tally.checksum(),
        );
        if *strays > 0 {
            text.push_str(&format!(
                "left out: {strays} deliveries for subscriptions that were deleted\n"
            ));
        }
        if *damaged > 0 {
            text.push_str(&format!(
                "left out: {damaged} deliveries whose events are damaged in the source\n"
            ));
        }
        text.push_str(&self.what_next(to));
        let named = |of| {
            let found = catalog.subscriptions.iter().find(|one| one.id == of);
            found.map_or_else(String::new, |one| one.name.clone())
        };
        let by_subscription: Vec<Value> = tally
            .by_subscription
            .iter()
            .map(|(of, counts)| {
                json!({
                    "id": of.0,
                    "name": named(*of),
                    "waiting": counts.waiting,
                    "retrying": counts.retrying,
                    "deadLetters": counts.letters,
                })
            })
            .collect();
        let json = json!({
            "to": to,
            "finished": true,
            "topics": catalog.topics.len(),
            "domainTopics": catalog.domain_topics.len(),
            "subscriptions": catalog.subscriptions.len(),
            "handshakes": catalog.handshakes.len(),
            "delayedEndpoints": catalog.endpoint_delays.len(),
            "blobs": blobs,
            "replays": replays,
            "events": tally.events,
            "bytes": tally.bytes,
            "waiting": total.waiting,
            "retrying": total.retrying,
            "deadLetters": total.letters,
            "bySubscription": by_subscription,
            "checksum": tally.checksum(),
            "strays": strays,
            "damaged": damaged,
            "seconds": seconds,
            "eventsPerSecond": rate,
        });
        MigrationReport { text, json }
    }
}

fn undone(done: Vec<String>) -> MigrationReport {
    let text = match done.is_empty() {
        true => "there is nothing to take back".to_owned(),
        false => done.join("\n"),
    };
    MigrationReport {
        json: json!({ "undone": done }),
        text,
    }
}

/// The write's answer may be lost, so the marker is read back and decides.
async fn mark_verified(bucket: &Bucket, mark: Migration) -> Result<()> {
    let written = mark.write(bucket).await;
    match Migration::read(bucket).await? {
        Some(found) if found == mark => Ok(()),
        _ => Ok(written?),
    }
}
