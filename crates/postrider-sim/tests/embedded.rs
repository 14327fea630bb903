//! The engine on the real embedded log, on a disk that tears writes, fills up and loses unflushed
//! data.
//!
//! The log has threads of its own, for which paused time would not wait: the clock is advanced when
//! everything is at rest. A seed decides the actions and the moment of the power cut, but not how
//! threads race, so that a failure may take a few runs to reproduce.

#[expect(dead_code, reason = "it serves the log's own tests too")]
#[path = "../../postrider-embedded/tests/fault_disk/mod.rs"]
mod fault_disk;

use async_trait::async_trait;
use bytes::Bytes;
use fault_disk::{DiskImage, FaultDisk};
use postrider_core::event::PublishedBatch;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::time::{Clock, Timestamp};
use postrider_embedded::EmbeddedLog;
use postrider_embedded::disk::{Disk, DiskFile};
use postrider_engine::blobs::{BlobError, BlobStore, WrittenBlobVersion};
use postrider_engine::clock::SystemClock;
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::virtual_time::{AdvanceTarget, SteppedClock, VirtualTime, WatchedTransport};
use postrider_engine::{Engine, EngineParts, dispatch, handshake};
use postrider_sim::audit::{Auditor, Violation, ViolationKind};
use postrider_sim::blobs::MemoryBlobs;
use postrider_sim::clock::EPOCH;
use postrider_sim::crash::{CrashCatalog, PowerSupply};
use postrider_sim::receivers::{ReceiverBehavior, SimulatedReceivers};
use postrider_sim::seeded_chance::SeededChance;
use postrider_sim::workload::{ACCOUNT_TOPIC, SimulatedWorkload};
use postrider_store::memory::{MemoryArchive, MemoryCatalog};
use postrider_store::{
    Backlog, Claim, ClaimLimits, DeadLetterKey, Error, EventLog, LogHealth, LogListener, PendingDeadLetter,
    PendingDeadLetters, Settlement,
};
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// An attempt without an answer stays in flight after this much real time.
const ANSWER_WITHIN: Duration = Duration::from_millis(10);
const LIVES: u32 = 4;
/// By then everything must be at rest.
const REST: Duration = Duration::from_secs(40 * 3600);

/// The stored state that a restart finds.
#[derive(Clone, Default)]
struct DiskState {
    image: DiskImage,
    state: Option<Vec<u8>>,
}

/// A log that reports its calls to the auditor until the power goes.
struct WatchedLog {
    log: EmbeddedLog,
    audit: Arc<Auditor>,
    cut: Arc<AtomicBool>,
}

#[async_trait]
impl EventLog for WatchedLog {
    async fn append(&self, batch: PublishedBatch) -> Result<Position, Error> {
        let announcement = (batch.topic == ACCOUNT_TOPIC).then(|| batch.body.clone());
        let appended = self.log.append(batch).await;
        let heard = appended.is_ok() && !self.cut.load(SeqCst);
        if let Some(body) = announcement.filter(|_| !heard) {
            self.audit.not_announced(&body);
        }
        appended
    }

    async fn claim(
        &self,
        of: SubscriptionId,
        now: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<Claim>, Error> {
        SystemClock
            .sleep_until(SystemClock.now() + Duration::from_millis(2))
            .await;
        let claims = self.log.claim(of, now, want).await?;
        self.audit.claimed(&claims);
        Ok(claims)
    }

    async fn settle(&self, of: SubscriptionId, settled: Vec<Settlement>) -> Result<(), Error> {
        self.audit.settled(of, &settled);
        self.log.settle(of, settled).await
    }

    async fn withdraw(
        &self,
        of: SubscriptionId,
        waiting: Vec<(Timestamp, Position)>,
    ) -> Result<Vec<Position>, Error> {
        let ended = self.log.withdraw(of, waiting).await?;
        self.audit.withdrawn(of, &ended);
        Ok(ended)
    }

    async fn flush(&self) -> Result<(), Error> {
        self.log.flush().await?;
        if !self.cut.load(SeqCst) {
            self.audit.checkpoint();
        }
        Ok(())
    }

    fn pending_dead_letters(&self) -> Vec<PendingDeadLetters> {
        self.log.pending_dead_letters()
    }

    async fn letters(
        &self,
        of: SubscriptionId,
        after: Option<DeadLetterKey>,
        until: Timestamp,
        want: ClaimLimits,
    ) -> Result<Vec<PendingDeadLetter>, Error> {
        self.log.letters(of, after, until, want).await
    }

    async fn dead_letters_done(&self, of: SubscriptionId, letters: Vec<DeadLetterKey>) -> Result<(), Error> {
        if !self.cut.load(SeqCst) {
            self.audit.forgetting(of, &letters);
        }
        self.log.dead_letters_done(of, letters.clone()).await?;
        if !self.cut.load(SeqCst) {
            self.audit.forgotten(of, &letters);
        }
        Ok(())
    }

    fn release(&self, of: SubscriptionId, claims: Vec<Claim>) {
        self.log.release(of, claims);
    }

    fn release_memory(&self, of: SubscriptionId) {
        self.log.release_memory(of);
    }

    fn next_due(&self) -> Option<Timestamp> {
        self.log.next_due()
    }

    fn next_due_after(&self, after: Timestamp) -> Option<Timestamp> {
        self.log.next_due_after(after)
    }

    fn due(&self, now: Timestamp) -> Vec<SubscriptionId> {
        self.log.due(now)
    }

    async fn open_subscription(&self, of: SubscriptionId) -> Result<(), Error> {
        self.log.open_subscription(of).await
    }

    async fn close_subscription(&self, of: SubscriptionId) -> Result<u64, Error> {
        self.log.close_subscription(of).await
    }

    fn subscriptions(&self) -> Vec<SubscriptionId> {
        self.log.subscriptions()
    }

    fn backlog(&self, of: SubscriptionId) -> Backlog {
        self.log.backlog(of)
    }

    fn health(&self) -> LogHealth {
        self.log.health()
    }

    fn identity(&self) -> u64 {
        self.log.identity()
    }

    fn listen(&self, listener: Arc<dyn LogListener>) {
        self.log.listen(listener);
    }

    async fn close(&self) -> Result<(), Error> {
        self.log.close().await
    }
}

/// The blob store of one life: nothing is written after the power has gone.
struct WatchedBlobs {
    blobs: Arc<MemoryBlobs>,
    cut: Arc<AtomicBool>,
}

#[async_trait]
impl BlobStore for WatchedBlobs {
    fn accounts(&self) -> Vec<String> {
        self.blobs.accounts()
    }

    fn check_name(&self, account: &str, container: &str) -> Result<(), String> {
        self.blobs.check_name(account, container)
    }

    async fn probe(&self, account: &str, container: &str) -> Result<(), BlobError> {
        self.blobs.probe(account, container).await
    }

    async fn put(
        &self,
        account: &str,
        container: &str,
        path: &str,
        body: Bytes,
    ) -> Result<WrittenBlobVersion, BlobError> {
        if self.cut.load(SeqCst) {
            return Err(BlobError::Unreachable {
                account: account.to_owned(),
                detail: "the power has gone".to_owned(),
            });
        }
        self.blobs.put(account, container, path, body).await
    }

    async fn get(&self, account: &str, container: &str, path: &str) -> Result<Bytes, BlobError> {
        self.blobs.get(account, container, path).await
    }

    async fn delete(&self, account: &str, container: &str, path: &str) -> Result<(), BlobError> {
        self.blobs.delete(account, container, path).await
    }
}

/// The state database as a crash would leave it: read again until no write came in between.
fn state(path: &Path) -> Vec<u8> {
    let mut last = std::fs::read(path).expect("it is there");
    loop {
        let now = std::fs::read(path).expect("it is there");
        if now == last {
            return now;
        }
        last = now;
    }
}

/// A disk that reports a flush that it has not done.
struct LyingDisk(FaultDisk);

impl Disk for LyingDisk {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(LyingFile(self.0.open(name)?)))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(LyingFile(self.0.create(name)?)))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.0.names()
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn space(&self) -> io::Result<(u64, u64)> {
        self.0.space()
    }
}

struct LyingFile(Arc<dyn DiskFile>);

impl DiskFile for LyingFile {
    fn write_at(&self, slices: &mut [IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.0.write_at(slices, offset)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.0.allocate(len)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.0.truncate(len)
    }

    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }
}

struct EmbeddedRun {
    lying: bool,
    cuts: u64,
    chance: SeededChance,
    clock: Arc<SteppedClock>,
    audit: Arc<Auditor>,
    catalog: Arc<MemoryCatalog>,
    blobs: Arc<MemoryBlobs>,
    archive: Arc<MemoryArchive>,
    receivers: Arc<SimulatedReceivers>,
    scene: SimulatedWorkload,
    segment_bytes_max: u64,
}

/// A life of the server, from a start to a crash or a stop.
struct EmbeddedLife {
    engine: Arc<Engine>,
    time: VirtualTime,
    disk: FaultDisk,
    directory: TempDir,
    /// Whether the power has gone, and the state that this left.
    cut: Arc<AtomicBool>,
    left: Arc<Mutex<DiskState>>,
}

impl EmbeddedLife {
    fn is_cut(&self) -> bool {
        self.cut.load(SeqCst)
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("state.redb")
    }

    /// The state on disk now.
    fn found(&self) -> DiskState {
        DiskState {
            image: self.disk.image(),
            state: Some(state(&self.path())),
        }
    }

    /// Cuts the power just before or after the `at`th flush of the log.
    fn cut_at(&self, at: u64) {
        let (cut, left, path) = (self.cut.clone(), self.left.clone(), self.path());
        let mut flushes = 0;
        self.disk.at_sync(move |image| {
            flushes += 1;
            if flushes == at {
                *left.lock().expect("no panic holds it") = DiskState {
                    image,
                    state: Some(state(&path)),
                };
                cut.store(true, SeqCst);
            }
        });
    }
}

impl EmbeddedRun {
    fn new(seed: u64, lying: bool) -> EmbeddedRun {
        let mut chance = SeededChance::new(seed ^ 0xE3BE_DDED);
        let clock = Arc::new(SteppedClock::new(EPOCH, Box::new(|_| {})));
        let shown = clock.clone();
        let audit = Arc::new(Auditor::new(clock.clone(), move || shown.now().since(EPOCH)));
        let blobs = Arc::new(MemoryBlobs::watched(audit.clone()));
        let mut scene = SimulatedWorkload::any(&mut chance, clock.clone(), audit.clone());
        let mut manners = Vec::new();
        for number in 0..2 + chance.below(3) {
            let manner = if number == 0 {
                ReceiverBehavior::Healthy
            } else {
                ReceiverBehavior::any(&mut chance)
            };
            audit.receiver(manner.is_quick());
            manners.push(manner);
            scene.subscribe(&mut chance, number as usize, None);
        }
        let passing = clock.clone();
        let receivers = SimulatedReceivers {
            manners,
            clock: clock.clone(),
            pass: Box::new(move |time| {
                let clock = passing.clone();
                Box::pin(async move { clock.sleep_until(clock.now() + time).await })
            }),
            audit: audit.clone(),
            chance: Mutex::new(SeededChance::new(chance.any())),
            calm: AtomicBool::new(false),
            started: EPOCH,
            latency_max: Duration::ZERO,
        };
        EmbeddedRun {
            lying,
            cuts: 0,
            segment_bytes_max: [4 << 10, 16 << 10, 64 << 20][chance.below(3) as usize],
            chance,
            clock,
            audit,
            catalog: Arc::new(MemoryCatalog::default()),
            blobs,
            archive: Arc::default(),
            receivers: Arc::new(receivers),
            scene,
        }
    }

    async fn run(mut self) -> EmbeddedRunReport {
        self.scene.declare(&*self.catalog).await;
        let mut found = DiskState::default();
        for _ in 0..LIVES {
            let life = self.start(found).await;
            if self.chance.percent(60) {
                life.cut_at(1 + self.chance.below(30));
            }
            self.live(&life).await;
            found = self.end(life).await;
        }
        self.receivers.calm.store(true, SeqCst);
        let life = self.start(found).await;
        self.rest(&life).await;
        life.engine.stop(async {}).await.expect("nothing fails any more");
        EmbeddedRunReport {
            wrong: self.audit.verdict(),
            events: self.scene.events(),
            attempts: self.audit.attempts() as u64,
            cuts: self.cuts,
            about: format!("{:?}\n{}", self.receivers.manners, self.scene.about()),
        }
    }

    async fn start(&self, found: DiskState) -> EmbeddedLife {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state.redb");
        if let Some(state) = &found.state {
            std::fs::write(&path, state).expect("there is room");
        }
        let disk = FaultDisk::new(found.image);
        let handed_in: Arc<dyn Disk> = if self.lying {
            Arc::new(LyingDisk(disk.clone()))
        } else {
            Arc::new(disk.clone())
        };
        let opened = EmbeddedLog::open_on(handed_in, &path, 7, self.segment_bytes_max);
        let log = opened.await.expect("what a crash leaves can be opened");
        let health = log.health();
        if health.corrupt_records > 0 {
            self.audit
                .left_over(format!("damaged records: {:?}", health.corrupt));
        }
        let cut = Arc::new(AtomicBool::new(false));
        let wall = Arc::new(SystemClock);
        let transport = Arc::new(WatchedTransport::new(self.receivers.clone(), wall.clone()));
        let blobs = WatchedBlobs {
            blobs: self.blobs.clone(),
            cut: cut.clone(),
        };
        let parts = EngineParts {
            log: Arc::new(WatchedLog {
                log,
                audit: self.audit.clone(),
                cut: cut.clone(),
            }),
            catalog: Arc::new(CrashCatalog {
                inner: self.catalog.clone(),
                power: Arc::new(PowerSupply::until(u64::MAX)),
                audit: self.audit.clone(),
            }),
            transport: transport.clone(),
            clock: self.clock.clone(),
            wall: wall.clone(),
            profiles: self.scene.profiles(),
            id_prefix: "/subscriptions/s".into(),
            dispatch: dispatch::Config::default(),
            dead_letters: DeadLetterService::new(Arc::new(blobs), self.archive.clone(), None),
            handshake: handshake::HandshakeRules::default(),
            recorder: Arc::new(postrider_engine::recorder::NoRecorder),
            node: postrider_engine::node::NodeIdentity::alone(),
        };
        let engine = Engine::start(parts).await.expect("the log is open");
        EmbeddedLife {
            time: VirtualTime::new(self.clock.clone(), transport, wall, engine.clone()),
            engine,
            disk,
            directory,
            cut,
            left: Arc::default(),
        }
    }

    async fn live(&mut self, life: &EmbeddedLife) {
        for _ in 0..4 + self.chance.below(20) {
            match self.chance.below(20) {
                0..=9 => {
                    let accepted = self.scene.publish(&life.engine, &mut self.chance).await;
                    // An acknowledgement after the power cut never reached the publisher.
                    if !life.is_cut() {
                        accepted.into_iter().for_each(|id| self.audit.acknowledged(id));
                    }
                }
                10 => {
                    life.disk.limit(Some(1));
                    self.scene.publish(&life.engine, &mut self.chance).await;
                    life.disk.limit(None);
                }
                11 => life.disk.fail_syncs(1),
                12 => life.disk.fail_writes(1),
                _ => {
                    let pause = Duration::from_secs(self.chance.below(900));
                    self.advance(life, pause).await;
                }
            }
            if life.is_cut() {
                return;
            }
        }
    }

    async fn advance(&self, life: &EmbeddedLife, time: Duration) {
        let advanced = life.time.advance(AdvanceTarget::By(time), ANSWER_WITHIN).await;
        advanced.expect("the state database does not fail");
    }

    /// Ends a life by the power cut that has happened, or else kills or stops the server.
    async fn end(&mut self, life: EmbeddedLife) -> DiskState {
        let killed = match self.chance.below(3) {
            0 => None,
            1 => Some(life.found()),
            // The power goes while nothing is being written.
            _ => Some(DiskState {
                image: life.disk.cut(self.chance.any()),
                ..life.found()
            }),
        };
        let stopped = life.engine.stop(async {}).await;
        if life.is_cut() {
            self.cuts += 1;
            self.audit.crashed_with_unknown_losses();
            return std::mem::take(&mut life.left.lock().expect("no panic holds it"));
        }
        match killed {
            None if stopped.is_ok() => {
                self.audit.checkpoint();
                self.audit.restarted();
                life.found()
            }
            killed => {
                self.audit.crashed_with_unknown_losses();
                killed.unwrap_or_else(|| life.found())
            }
        }
    }

    /// Lets time pass until nothing is left to do, or far too much time has passed.
    async fn rest(&self, life: &EmbeddedLife) {
        let deadline = self.clock.now() + REST;
        let left = |life: &EmbeddedLife| {
            let subscriptions = self.scene.subscriptions.iter();
            let backlogs = subscriptions.map(|s| life.engine.log().backlog(s.id));
            let letters = life.engine.log().pending_dead_letters();
            let letters: u64 = letters.iter().map(|waiting| waiting.count).sum();
            letters + backlogs.map(|b| b.waiting + b.claimed + b.retrying).sum::<u64>()
        };
        self.advance(life, Duration::from_secs(1)).await;
        while (self.audit.unfinished() > 0 || left(life) > 0) && self.clock.now() < deadline {
            self.advance(life, Duration::from_secs(4 * 3600)).await;
        }
        if left(life) > 0 {
            self.audit
                .left_over(format!("{} deliveries are left", left(life)));
        }
    }
}

struct EmbeddedRunReport {
    wrong: Vec<Violation>,
    events: u64,
    attempts: u64,
    cuts: u64,
    about: String,
}

fn run(seed: u64, lying: bool) -> EmbeddedRunReport {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    runtime.block_on(async { EmbeddedRun::new(seed, lying).run().await })
}

#[expect(
    clippy::disallowed_methods,
    reason = "which seeds to run is asked for from outside"
)]
fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn what_was_accepted_survives_a_disk_that_tears_and_forgets() {
    let seeds = match asked("POSTRIDER_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..asked("POSTRIDER_SEEDS").map_or(32, |seeds| seeds / 50),
    };
    let next = AtomicU64::new(seeds.start);
    let [events, attempts, cuts] = [const { AtomicU64::new(0) }; 3];
    let work = || {
        loop {
            let seed = next.fetch_add(1, SeqCst);
            if seed >= seeds.end {
                return;
            }
            let report = run(seed, false);
            if !report.wrong.is_empty() {
                next.store(seeds.end, SeqCst);
                panic!(
                    "POSTRIDER_SEED={seed} --test embedded: {:#?}\n{}",
                    report.wrong, report.about
                );
            }
            events.fetch_add(report.events, SeqCst);
            attempts.fetch_add(report.attempts, SeqCst);
            cuts.fetch_add(report.cuts, SeqCst);
        }
    };
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
    println!("{events:?} events, {attempts:?} attempts, {cuts:?} torn commits");
    assert!(events.into_inner() > 0 && attempts.into_inner() > 0);
}

/// The auditor's own test: a disk that does not flush is noticed.
#[test]
fn a_disk_that_does_not_flush_is_noticed() {
    for seed in 0..20 {
        let lost = |wrong: &Violation| wrong.kind == ViolationKind::Lost;
        if run(seed, true).wrong.iter().any(lost) {
            println!("noticed with seed {seed}");
            return;
        }
    }
    panic!("nobody noticed");
}
