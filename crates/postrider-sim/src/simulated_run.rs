//! A simulated run: publishers, receivers, faults and changes; then no more faults until everything
//! is at rest.

use crate::audit::{Auditor, ServerLetterCounts, Violation};
use crate::blobs::{CrashArchive, CrashBlobs, MemoryBlobs, StoreFaults};
use crate::clock::SimClock;
use crate::crash::{CrashCatalog, CrashLog, PowerSupply};
use crate::receivers::{HOST, ReceiverBehavior, SimulatedReceivers};
use crate::seeded_chance::SeededChance;
use crate::workload::{BLOB_LISTENER, SimulatedWorkload, any_pause, pointing_to, receiver_of};
use postrider_core::ids::SubscriptionId;
use postrider_core::profile::Profiles;
use postrider_core::retry::GiveUpReason;
use postrider_core::subscription::Subscription;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::blobs::BlobStore;
use postrider_engine::counters::{by_reason, total};
use postrider_engine::dead_letters::DeadLetterService;
use postrider_engine::deliver::DeliveryTransport;
use postrider_engine::{Engine, EngineParts, dispatch, handshake};
use postrider_store::memory::{MemoryArchive, MemoryCatalog, MemoryLog};
use postrider_store::{Archive, BlobFilter, Catalog, EventLog};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Faults stop after this long.
const FAULTS: Duration = Duration::from_secs(2 * 3600);
/// By then everything must be at rest: longer than the longest time to live plus the longest
/// probation.
const REST: Duration = Duration::from_secs(40 * 3600);
/// Longer than any time to live, and than any probation.
const LONG_PAUSE: Duration = Duration::from_secs(30 * 3600);
/// The time in which nothing more may happen after the end.
const SILENCE: Duration = Duration::from_secs(3600);
const CRASHES_MAX: u32 = 6;
const CLOCK_SETS_MAX: u32 = 4;

/// The result of one run.
#[derive(Debug)]
pub struct RunReport {
    pub wrong: Vec<Violation>,
    pub events: u64,
    pub crashes: u32,
    pub attempts: usize,
    /// A hash of everything that receivers saw.
    pub trace: u64,
    /// A description of the subscriptions, for people.
    pub about: String,
    /// Everything that happened, if requested.
    pub notes: Vec<String>,
}

/// Bugs that are put between the engine and its parts, to check that the auditor notices them.
#[derive(Default)]
pub struct PlantedBugs {
    pub log: Option<PartWrapper<dyn EventLog>>,
    pub catalog: Option<PartWrapper<dyn Catalog>>,
    pub transport: Option<PartWrapper<dyn DeliveryTransport>>,
    pub clock: Option<PartWrapper<dyn Clock>>,
    pub blobs: Option<PartWrapper<dyn BlobStore>>,
    pub archive: Option<PartWrapper<dyn Archive>>,
    pub profiles: Option<ProfileChange>,
}

pub type ProfileChange = Box<dyn Fn(&mut Profiles) + Send + Sync>;

pub type PartWrapper<T> = Box<dyn Fn(Arc<T>) -> Arc<T> + Send + Sync>;

fn wrapped<T: ?Sized>(wrap: &Option<PartWrapper<T>>, part: Arc<T>) -> Arc<T> {
    match wrap {
        Some(wrap) => wrap(part),
        None => part,
    }
}

/// Runs one seed to its end, in a runtime of its own with paused time.
pub fn run(seed: u64) -> RunReport {
    run_with(seed, &PlantedBugs::default(), false)
}

pub fn run_with(seed: u64, planted: &PlantedBugs, take_notes: bool) -> RunReport {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let world = SimulatedRun::new(seed, planted);
        if take_notes {
            world.audit.take_notes();
        }
        world.run().await
    })
}

struct SimulatedRun<'a> {
    chance: SeededChance,
    planted: &'a PlantedBugs,
    clock: Arc<SimClock>,
    audit: Arc<Auditor>,
    catalog: Arc<MemoryCatalog>,
    blobs: Arc<MemoryBlobs>,
    archive: Arc<MemoryArchive>,
    weather: Arc<StoreFaults>,
    /// How long the blob store is out of reach, by elapsed time.
    store_away_until: Option<Duration>,
    receivers: Arc<SimulatedReceivers>,
    scene: SimulatedWorkload,
    /// All subscriptions, including deleted ones.
    everyone: Vec<SubscriptionId>,
    dispatch: dispatch::Config,
    clock_sets: u32,
    /// A subscription whose change was interrupted: only the catalog knows the result.
    unclear: Option<SubscriptionId>,
    about: String,
}

/// A life of the server, from a start to a crash or a stop.
struct ServerLife {
    engine: Arc<Engine>,
    log: Arc<CrashLog>,
    power: Arc<PowerSupply>,
}

/// How a life ended.
#[derive(PartialEq, Eq)]
enum LifeEnd {
    Crashed,
    Stopped,
    OutOfFaults,
}

impl<'a> SimulatedRun<'a> {
    fn new(seed: u64, planted: &'a PlantedBugs) -> SimulatedRun<'a> {
        let mut chance = SeededChance::new(seed);
        let clock = Arc::new(SimClock::start());
        let steady = clock.clone();
        let audit = Arc::new(Auditor::new(clock.clone(), move || steady.elapsed()));
        let mut scene = SimulatedWorkload::any(&mut chance, clock.clone(), audit.clone());
        let now = clock.now();
        let mut manners = Vec::new();
        for number in 0..2 + chance.below(4) {
            // Two subscriptions may share one receiver.
            let receiver = if number > 1 && chance.percent(25) {
                chance.below(manners.len() as u64) as usize
            } else {
                manners.len()
            };
            if receiver == manners.len() {
                let manner = if number == 0 {
                    ReceiverBehavior::Healthy
                } else {
                    ReceiverBehavior::any(&mut chance)
                };
                audit.receiver(manner.is_quick());
                manners.push(manner);
            }
            let expires = chance
                .percent(10)
                .then(|| now + Duration::from_secs(60 + chance.below(9000)));
            scene.subscribe(&mut chance, receiver, expires);
        }
        let passing = clock.clone();
        let receivers = SimulatedReceivers {
            manners,
            clock: clock.clone(),
            pass: Box::new(move |time| {
                let clock = passing.clone();
                Box::pin(async move { clock.pass(time).await })
            }),
            audit: audit.clone(),
            chance: std::sync::Mutex::new(SeededChance::new(chance.any())),
            calm: AtomicBool::new(false),
            started: now,
            latency_max: Duration::from_millis(50),
        };
        let dispatch = dispatch::Config {
            in_flight_per_endpoint_max: [64, 64, 4][chance.below(3) as usize],
            seed,
            ..dispatch::Config::default()
        };
        let about = format!("{:?}\n{}", receivers.manners, scene.about());
        let weather = Arc::new(StoreFaults::any(&mut chance));
        let mut everyone: Vec<SubscriptionId> = scene.subscriptions.iter().map(|s| s.id).collect();
        everyone.push(BLOB_LISTENER);
        SimulatedRun {
            about,
            chance,
            planted,
            clock,
            catalog: Arc::new(MemoryCatalog::default()),
            blobs: Arc::new(MemoryBlobs::watched(audit.clone())),
            archive: Arc::default(),
            weather,
            store_away_until: None,
            receivers: Arc::new(receivers),
            everyone,
            scene,
            dispatch,
            audit,
            clock_sets: 0,
            unclear: None,
        }
    }

    async fn run(mut self) -> RunReport {
        self.scene.declare(&*self.catalog).await;
        let mut log = MemoryLog::new(7);
        let mut crashes = 0;
        loop {
            let crash_at = if crashes < CRASHES_MAX {
                1 + self.chance.below(300)
            } else {
                u64::MAX
            };
            let (started, crash_log) = self.start(log, crash_at).await;
            let ended = match started {
                Some(life) => {
                    let ended = self.live(&life).await;
                    self.end(&life, &ended).await;
                    ended
                }
                None => LifeEnd::Crashed,
            };
            crash_log.pass_time();
            log = crash_log.memory.crash();
            if ended == LifeEnd::Crashed {
                crashes += 1;
                self.audit.crashed();
            } else {
                self.audit.restarted();
            }
            self.resolve_interrupted_change().await;
            // Usually the server is restarted at once.
            if self.chance.percent(30) {
                let away = Duration::from_secs(self.chance.below(1800));
                self.clock.pass(away).await;
            }
            if ended == LifeEnd::OutOfFaults || self.clock.elapsed() >= FAULTS {
                break;
            }
        }
        self.receivers.calm.store(true, Relaxed);
        self.weather.calm();
        self.audit.store_reachable(true);
        self.clock.keep_steady();
        let (started, _) = self.start(log, u64::MAX).await;
        let life = started.expect("nothing fails any more");
        self.resume_all(&life.engine).await;
        self.rest(&life.engine).await;
        self.audit.stopped(life.engine.dispatcher.stop(async {}).await);
        self.count_letters(&life);
        let all = self.archive.list(&BlobFilter::default(), None, usize::MAX).await;
        self.audit.listed(all.expect("memory does not fail"));
        RunReport {
            wrong: self.audit.verdict(),
            events: self.scene.events(),
            crashes,
            attempts: self.audit.attempts(),
            trace: self.audit.trace(),
            about: self.about,
            notes: self.audit.notes(),
        }
    }

    /// None if the power went before the server was up.
    async fn start(&mut self, log: MemoryLog, crash_at: u64) -> (Option<ServerLife>, Arc<CrashLog>) {
        let power = Arc::new(PowerSupply::until(crash_at));
        let memory = Arc::new(log);
        let log = Arc::new(CrashLog::new(
            memory.clone(),
            wrapped(&self.planted.log, memory),
            power.clone(),
            self.audit.clone(),
            self.clock.clone(),
            1 + self.chance.below(5),
        ));
        let mut profiles = self.scene.profiles();
        if let Some(doctor) = &self.planted.profiles {
            doctor(&mut profiles);
        }
        let blobs = CrashBlobs {
            inner: wrapped(&self.planted.blobs, self.blobs.clone()),
            weather: self.weather.clone(),
            power: power.clone(),
            audit: self.audit.clone(),
            clock: self.clock.clone(),
        };
        let archive = CrashArchive {
            inner: wrapped(&self.planted.archive, self.archive.clone()),
            power: power.clone(),
            audit: self.audit.clone(),
        };
        let parts = EngineParts {
            log: log.clone(),
            catalog: Arc::new(CrashCatalog {
                inner: wrapped(&self.planted.catalog, self.catalog.clone()),
                power: power.clone(),
                audit: self.audit.clone(),
            }),
            transport: wrapped(&self.planted.transport, self.receivers.clone()),
            clock: wrapped(&self.planted.clock, self.clock.clone()),
            wall: self.clock.clone(),
            profiles,
            id_prefix: "/subscriptions/s".into(),
            dispatch: self.dispatch.clone(),
            dead_letters: DeadLetterService::new(Arc::new(blobs), Arc::new(archive), None),
            handshake: handshake::HandshakeRules::default(),
            recorder: Arc::new(postrider_engine::recorder::NoRecorder),
            node: postrider_engine::node::NodeIdentity::alone(),
        };
        let engine = Engine::start(parts).await.ok();
        let life = engine.map(|engine| ServerLife {
            engine,
            log: log.clone(),
            power,
        });
        (life, log)
    }

    /// Publishes, causes faults and makes changes until the life ends.
    async fn live(&mut self, life: &ServerLife) -> LifeEnd {
        loop {
            let pause = any_pause(&mut self.chance);
            tokio::select! {
                biased;
                () = life.power.down.notified() => return LifeEnd::Crashed,
                () = self.clock.pass(pause) => {}
            }
            if self.clock.elapsed() >= FAULTS {
                return LifeEnd::OutOfFaults;
            }
            if life.power.full() && self.chance.percent(40) {
                life.power.set_full(false);
                self.audit.disk_full(false);
            }
            self.restore_store();
            match self.chance.below(66) {
                0 => self.set_clock(),
                1 => self.delete(life).await,
                2 | 3 => self.point_elsewhere(life).await,
                4 => self.admit_again(life),
                5 => {
                    life.power.set_full(true);
                    self.audit.disk_full(true);
                }
                6 => life.log.memory.fail_next_append(),
                7 => return LifeEnd::Stopped,
                8 | 9 => self.lose_store(),
                10..=13 => self.pause_or_resume(life).await,
                14 | 15 => self.probe(life),
                _ => {
                    let accepted = self.scene.publish(&life.engine, &mut self.chance).await;
                    accepted.into_iter().for_each(|id| self.audit.acknowledged(id));
                }
            }
            if life.power.crashed() {
                return LifeEnd::Crashed;
            }
        }
    }

    async fn end(&mut self, life: &ServerLife, ended: &LifeEnd) {
        if *ended == LifeEnd::Crashed {
            self.audit.stopped(life.engine.dispatcher.stop(async {}).await);
            self.audit.letters_counted(None);
            return;
        }
        life.power.set_full(false);
        self.audit.restarted();
        let patience = Duration::from_secs(self.chance.below(2) * 35);
        // The power may still go before everything is written.
        let stopped = life.engine.stop(self.clock.pass(patience)).await;
        self.audit.stopped(stopped);
        life.log.checkpoint();
        self.count_letters(life);
    }

    /// Compares the server's own numbers with the auditor's, unless the power went before the
    /// server could count.
    fn count_letters(&self, life: &ServerLife) {
        let counters = &life.engine.dispatcher.counters;
        let written = counters.dead_letters_written.load(Relaxed);
        let dead_lettered = total(&counters.dead_lettered);
        let dropped = by_reason(&counters.dropped, GiveUpReason::DeadLetterUnavailable).load(Relaxed);
        let counted = (!life.power.crashed()).then_some(ServerLetterCounts {
            written,
            dead_lettered,
            dropped,
        });
        self.audit.letters_counted(counted);
    }

    /// Takes the blob store out of reach, for a short or a long time.
    fn lose_store(&mut self) {
        let most = [600, 7200][self.chance.below(2) as usize];
        let away = Duration::from_secs(self.chance.below(most));
        self.store_away_until = Some(self.clock.elapsed() + away);
        self.weather.set_out_of_reach(true);
        self.audit.store_reachable(false);
    }

    /// Brings the blob store back when its time has come.
    fn restore_store(&mut self) {
        if self
            .store_away_until
            .is_some_and(|until| until <= self.clock.elapsed())
        {
            self.store_away_until = None;
            self.weather.set_out_of_reach(false);
            self.audit.store_reachable(true);
        }
    }

    /// Finds out whether an interrupted change has happened.
    async fn resolve_interrupted_change(&mut self) {
        let Some(id) = self.unclear.take() else {
            return;
        };
        let loaded = self.catalog.load().await.expect("memory does not fail");
        match loaded.subscriptions.into_iter().find(|s| s.id == id) {
            Some(subscription) => self.put(subscription),
            None => self.forget(id),
        }
    }

    fn put(&mut self, subscription: Subscription) {
        self.audit.moved(subscription.id, receiver_of(&subscription));
        self.audit
            .paused(subscription.id, subscription.pauses.is_paused());
        let known = self.scene.subscriptions.iter_mut();
        for known in known.filter(|s| s.id == subscription.id) {
            *known = subscription.clone();
        }
    }

    fn forget(&mut self, id: SubscriptionId) {
        self.audit.gone(id);
        self.scene.subscriptions.retain(|s| s.id != id);
    }

    fn any_subscription(&mut self) -> Option<Subscription> {
        let count = self.scene.subscriptions.len() as u64;
        let number = self.chance.below(count) as usize;
        let latest = self.clock.latest();
        let exists = |s: &&Subscription| s.expires.is_none_or(|at| at > latest);
        self.scene.subscriptions.get(number).filter(exists).cloned()
    }

    async fn delete(&mut self, life: &ServerLife) {
        let Some(subscription) = self.any_subscription() else {
            return;
        };
        self.audit.going(subscription.id);
        match life.engine.delete_subscription(subscription.id).await {
            Ok(()) => self.forget(subscription.id),
            // The disk is full, so that nothing has changed; or the power went.
            Err(_) if !life.power.crashed() => self.put(subscription),
            Err(_) => self.unclear = Some(subscription.id),
        }
    }

    async fn point_elsewhere(&mut self, life: &ServerLife) {
        let receiver = self.chance.below(self.receivers.manners.len() as u64) as usize;
        let subscription = self.any_subscription().filter(|_| !life.power.full());
        let Some(subscription) = subscription else {
            return;
        };
        let moved = pointing_to(&subscription, receiver);
        self.audit.moving(moved.id, receiver);
        match life.engine.put_subscription(moved.clone()).await {
            Ok(_) => self.put(moved),
            Err(_) => self.unclear = Some(moved.id),
        }
    }

    async fn pause_or_resume(&mut self, life: &ServerLife) {
        let Some(subscription) = self.any_subscription() else {
            return;
        };
        let id = subscription.id;
        self.audit.pausing(id);
        let paused = subscription.pauses.is_paused();
        // Now and then the current state is requested again.
        let done = match paused ^ self.chance.percent(10) {
            true => life.engine.resume_subscription(id).await,
            false => life.engine.pause_subscription(id).await,
        };
        match done {
            Ok(now) => self.put(now.map_or(subscription, |now| Subscription::clone(&now))),
            // The disk is full, so that nothing has changed; or the power went.
            Err(_) if !life.power.crashed() => self.put(subscription),
            Err(_) => self.unclear = Some(id),
        }
    }

    /// Resumes all subscriptions at the end, some of them only after longer than any time to live.
    async fn resume_all(&mut self, engine: &Engine) {
        let paused = |s: &&Subscription| s.pauses.is_paused();
        let paused: Vec<SubscriptionId> = self
            .scene
            .subscriptions
            .iter()
            .filter(paused)
            .map(|s| s.id)
            .collect();
        if !paused.is_empty() && self.chance.percent(50) {
            self.clock.pass(LONG_PAUSE).await;
        }
        for id in paused {
            self.audit.pausing(id);
            let resumed = engine.resume_subscription(id).await;
            // A subscription that has expired in the meantime is gone.
            if let Some(now) = resumed.expect("nothing fails any more") {
                self.put(Subscription::clone(&now));
            }
        }
    }

    /// Requests a probe of an endpoint, whether or not it is on probation.
    fn probe(&mut self, life: &ServerLife) {
        let Some(subscription) = self.any_subscription() else {
            return;
        };
        life.engine.dispatcher.probe(subscription.id);
        self.audit.probed(receiver_of(&subscription), subscription.id);
    }

    fn admit_again(&mut self, life: &ServerLife) {
        let receiver = self.chance.below(self.receivers.manners.len() as u64);
        life.engine
            .dispatcher
            .end_delays_by_operator(&format!("{HOST}{receiver}"));
        self.audit.delay_ended_by_operator(receiver as usize);
    }

    fn set_clock(&mut self) {
        if self.clock_sets == CLOCK_SETS_MAX {
            return;
        }
        self.clock_sets += 1;
        let before = self.clock.now();
        if self.chance.percent(50) {
            self.clock
                .set_forward(Duration::from_secs(1 + self.chance.below(3 * 3600)));
        } else {
            self.clock
                .set_back(Duration::from_secs(1 + self.chance.below(3600)));
        }
        self.audit.clock_set(before);
    }

    /// Lets time pass until nothing is left to do, or far too much time has passed.
    async fn rest(&self, engine: &Engine) {
        let expiries = self.scene.subscriptions.iter().filter_map(|s| s.expires);
        let last_expiry = expiries.max().unwrap_or(Timestamp::MIN);
        let deadline = self.clock.elapsed() + REST;
        loop {
            let idle = self.audit.unfinished() == 0 && self.left_over(engine).is_none();
            if (idle && self.clock.now() > last_expiry) || self.clock.elapsed() > deadline {
                break;
            }
            self.clock.pass(Duration::from_secs(600)).await;
        }
        self.clock.pass(SILENCE).await;
        if let Some(what) = self.left_over(engine) {
            self.audit.left_over(what);
        }
    }

    /// The server's remaining work, in its own words.
    fn left_over(&self, engine: &Engine) -> Option<String> {
        let letters = engine.log().pending_dead_letters();
        if !letters.is_empty() {
            return Some(format!("letters are waiting: {letters:?}"));
        }
        self.everyone.iter().find_map(|id| {
            let backlog = engine.log().backlog(*id);
            let left = backlog.waiting + backlog.claimed + backlog.retrying;
            (left > 0).then(|| format!("subscription {id} has {backlog:?}"))
        })
    }
}
