//! Simulation of one to eight nodes, a bucket and faults, derived from one seed.
//!
//! Nodes crash and return, are suspended, lose the bucket, drain, and join; the bucket falls
//! silent; requests and answers are late or lost, and requests that were given up may still be
//! stored. Clocks start at any time and run at slightly different speeds. Invariant: no partition
//! is served by two nodes with valid leases. After the faults all partitions are served, evenly and
//! soon, and then nothing moves any more.
//!
//! Meanwhile the catalog changes, and network cuts may be one-way: a node's requests arrive and it
//! receives nothing, or the reverse; or its copy of the catalog does not advance. Invariant: no
//! node with a valid lease has a catalog older than an answered change. After the faults all
//! changes are answered.

use super::decide::{
    Heartbeat, HoldPhase, MembershipRules, MembershipStep, MembershipView, NodeId, PartitionHolder,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(5);
/// Timeout of a request in milliseconds.
const PATIENCE: u64 = 2_000;

/// SplitMix64.
struct SimulationRandom(u64);

impl SimulationRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from)
    }

    fn percent(&mut self, of: u64) -> bool {
        self.below(100) < of
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedKey {
    Node(u64),
    Part(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimulatedValue {
    Beat(Heartbeat),
    Owned(PartitionHolder, u64),
    Free(PartitionHolder, u64),
    Deleted,
}

/// A swap requested by a node.
#[derive(Clone, Copy, Debug)]
struct SwapRequest {
    id: u64,
    key: SimulatedKey,
    value: SimulatedValue,
    /// Required revision; `None` for an unconditional write.
    expected: Option<u64>,
    wish: SwapPurpose,
}

/// The purpose of a swap.
#[derive(Clone, Copy, Debug)]
enum SwapPurpose {
    Beat(u64),
    Take { partition: u8 },
    Confirm { partition: u8, stretch: u64 },
    Free(u8),
    Leave,
}

#[derive(Clone, Copy, Debug)]
enum SwapAnswer {
    Stored(u64),
    Refused,
    Unknown,
}

#[derive(Clone, Copy, Debug)]
enum SimulationEvent {
    Tick,
    Wake,
    Hear,
    Swap {
        asked: SwapRequest,
        reply: bool,
    },
    Answered {
        asked: SwapRequest,
        answer: SwapAnswer,
    },
    /// The stored value according to the leader, after the outcome of a swap was unknown.
    Looked(SwapRequest),
    Loaded {
        partition: u8,
        well: bool,
    },
    Written(u8),
    Crash,
    Start,
    Drain,
    /// An extra heartbeat, sent before the regular one.
    News,
    /// A client changes the catalog at this node.
    Change,
    /// A commit arrives at the catalog's stream: a change, or the confirmation of a stretch of
    /// lease.
    Commit(SimulatedCommit),
    /// A commit is acknowledged.
    Committed(SimulatedCommit, u64),
    /// The outcome of the commit that was to confirm this stretch is unknown.
    Unconfirmed(u64),
    /// Changes of other nodes arrive.
    Apply,
    /// A check of the catalog's stream that began at this time.
    Look(Duration),
    /// Planted bug: a change is answered a second after it was stored, regardless of the other
    /// nodes.
    Answer(u64),
}

#[derive(Clone, Copy, Debug)]
enum SimulatedCommit {
    Change,
    Confirm { stretch: u64, began: Duration },
}

/// A bug that the simulation has to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlantedBug {
    /// A change is answered after a second although a node may not have received it.
    AnswersAfterASecond,
    /// After a lease has expired, the next heartbeat makes it valid again.
    ResumesUnconfirmed,
}

struct SimulatedNode {
    known: MembershipView,
    process: u64,
    /// Offset and speed (per mille) of the node's clock.
    offset: u64,
    speed: u64,
    heard: u64,
    lease: Duration,
    nonce: u64,
    /// Swaps with an unknown outcome.
    open: BTreeSet<u64>,
    drained: bool,
    leaving: bool,
    wakes_at: u64,
    /// The catalog version that is applied at the node.
    in_force: u64,
    /// Unanswered changes of this node: version, since when stored by its clock, and the time of
    /// storing.
    changes: Vec<(u64, Duration, u64)>,
    has_news: bool,
    confirms: u64,
}

impl SimulatedNode {
    fn clock(&self, now: u64) -> Duration {
        Duration::from_millis(self.offset) + Duration::from_micros(now * self.speed)
    }
}

struct SimulatedCluster {
    chance: SimulationRandom,
    now: u64,
    count: u64,
    queue: BinaryHeap<Reverse<(u64, u64, usize, u64)>>,
    things: BTreeMap<u64, SimulationEvent>,
    nodes: BTreeMap<usize, SimulatedNode>,
    /// Until when a node is suspended, or cannot reach the bucket.
    stopped: BTreeMap<usize, u64>,
    cut: BTreeMap<usize, u64>,
    /// Nothing that the node sends arrives before this time.
    mute: BTreeMap<usize, u64>,
    /// Nothing arrives at the node before this time.
    deaf: BTreeMap<usize, u64>,
    /// Only the node's catalog does not advance until this time.
    stale: BTreeMap<usize, u64>,
    /// The stored catalog version, and the newest answered change.
    catalogue: u64,
    answered: u64,
    answers: u64,
    slowest_answer: u64,
    planted: Option<PlantedBug>,
    silent_until: u64,
    revision: u64,
    bucket: BTreeMap<SimulatedKey, (SimulatedValue, u64)>,
    partitions: u8,
    faults_until: u64,
    processes: u64,
    moves: u64,
    /// Set when messages are never late.
    calm: bool,
    /// Time until the cluster came to rest.
    took: u64,
}

const NOBODY: u64 = 0;

impl SimulatedCluster {
    fn new(seed: u64, partitions: u8) -> SimulatedCluster {
        SimulatedCluster {
            chance: SimulationRandom(seed),
            now: 0,
            count: 0,
            queue: BinaryHeap::new(),
            things: BTreeMap::new(),
            nodes: BTreeMap::new(),
            stopped: BTreeMap::new(),
            cut: BTreeMap::new(),
            mute: BTreeMap::new(),
            deaf: BTreeMap::new(),
            stale: BTreeMap::new(),
            catalogue: 0,
            answered: 0,
            answers: 0,
            slowest_answer: 0,
            planted: None,
            silent_until: 0,
            revision: 0,
            bucket: BTreeMap::new(),
            partitions,
            faults_until: 0,
            processes: 0,
            moves: 0,
            calm: false,
            took: 0,
        }
    }

    fn at(&mut self, when: u64, node: usize, process: u64, thing: SimulationEvent) {
        self.count += 1;
        self.things.insert(self.count, thing);
        self.queue.push(Reverse((when, self.count, node, process)));
    }

    fn later(&mut self, node: usize, wait: u64, thing: SimulationEvent) {
        let process = self.nodes[&node].process;
        self.at(self.now + wait, node, process, thing);
    }

    fn latency(&mut self) -> u64 {
        if self.chance.percent(3) && !self.calm {
            self.chance.between(100, 1_500)
        } else {
            self.chance.between(1, 20)
        }
    }

    fn faulty(&self) -> bool {
        self.now < self.faults_until
    }

    fn start(&mut self, node: usize) {
        self.processes += 1;
        let process = self.processes;
        let offset = self.chance.below(1_000_000);
        let speed = self.chance.between(980, 1_021);
        let mut made = SimulatedNode {
            known: MembershipView::new(
                PartitionHolder {
                    node: NodeId(node as u64),
                    process,
                },
                MembershipRules {
                    lease: LEASE,
                    partitions: self.partitions,
                },
                Duration::ZERO,
            ),
            process,
            offset,
            speed,
            heard: 0,
            lease: Duration::ZERO,
            nonce: 0,
            open: BTreeSet::new(),
            drained: false,
            leaving: false,
            wakes_at: 0,
            // A node opens the catalog before it joins.
            in_force: self.catalogue,
            changes: Vec::new(),
            has_news: false,
            confirms: 0,
        };
        let began = made.clock(self.now);
        made.known = MembershipView::new(
            PartitionHolder {
                node: NodeId(node as u64),
                process,
            },
            MembershipRules {
                lease: LEASE,
                partitions: self.partitions,
            },
            began,
        );
        self.nodes.insert(node, made);
        self.later(node, 0, SimulationEvent::Hear);
        self.later(node, 0, SimulationEvent::Tick);
    }

    /// Runs until `until`, or until `done` returns true. Returns whether it did.
    fn run(&mut self, until: u64, mut done: impl FnMut(&SimulatedCluster) -> bool) -> bool {
        while let Some(Reverse((when, number, node, process))) = self.queue.pop() {
            if when > until {
                self.queue.push(Reverse((when, number, node, process)));
                self.now = until;
                return false;
            }
            self.now = self.now.max(when);
            let thing = self.things.remove(&number).expect("each comes once");
            self.happen(node, process, thing);
            self.check();
            if done(self) {
                return true;
            }
        }
        false
    }

    fn happen(&mut self, node: usize, process: u64, thing: SimulationEvent) {
        // Events of the bucket, or of a node's environment, happen even if the node is suspended.
        match thing {
            SimulationEvent::Swap { asked, reply } => return self.swap(node, process, asked, reply),
            SimulationEvent::Commit(commit) => return self.commit(node, process, commit),
            SimulationEvent::Answer(version) => {
                self.answered = self.answered.max(version);
                return;
            }
            SimulationEvent::Crash => {
                self.nodes.remove(&node);
                let wait = self.chance.between(100, 20_000);
                return self.at(self.now + wait, node, NOBODY, SimulationEvent::Start);
            }
            SimulationEvent::Start => {
                if !self.nodes.contains_key(&node) {
                    self.start(node);
                }
                return;
            }
            _ => {}
        }
        if self.nodes.get(&node).is_none_or(|n| n.process != process) {
            return;
        }
        if let Some(until) = self.stopped.get(&node).copied().filter(|until| self.now < *until) {
            // A suspended node processes everything that arrived meanwhile when it wakes, in any
            // order.
            let wait = self.chance.below(50);
            return self.at(until + wait, node, process, thing);
        }
        let now = self.nodes[&node].clock(self.now);
        match thing {
            SimulationEvent::Tick => {
                let every = LEASE.as_millis() as u64 / 4;
                self.later(node, every, SimulationEvent::Tick);
                self.beat(node, now);
                let wait = self.latency() + self.latency();
                self.later(node, wait, SimulationEvent::Look(now));
            }
            SimulationEvent::News => {
                self.nodes.get_mut(&node).expect("it lives").has_news = false;
                self.beat(node, now);
            }
            SimulationEvent::Change => {
                if self.nodes[&node].known.held().next().is_some() {
                    let wait = self.latency();
                    let reaches = self.mute_until(node).map_or(0, |until| until - self.now);
                    self.later(
                        node,
                        reaches + wait,
                        SimulationEvent::Commit(SimulatedCommit::Change),
                    );
                }
            }
            SimulationEvent::Committed(commit, version) => {
                if let Some(until) = self.deaf_until(node) {
                    return self.later(node, until - self.now, thing);
                }
                let at = self.now;
                let n = self.nodes.get_mut(&node).expect("it lives");
                n.in_force = n.in_force.max(version);
                match commit {
                    SimulatedCommit::Change => n.changes.push((version, now, at)),
                    SimulatedCommit::Confirm { stretch, began } => {
                        n.known.catalogue_confirmed(stretch, began);
                        n.confirms += 1;
                    }
                }
                self.news(node);
            }
            SimulationEvent::Unconfirmed(confirms) => {
                let n = self.nodes.get_mut(&node).expect("it lives");
                if n.confirms == confirms {
                    n.confirms += 1;
                    n.known.catalogue_unconfirmed();
                }
            }
            SimulationEvent::Apply => {
                if let Some(until) = self.catalogue_stands_until(node) {
                    return self.later(node, until - self.now, SimulationEvent::Apply);
                }
                let stored = self.catalogue;
                let n = self.nodes.get_mut(&node).expect("it lives");
                if n.in_force < stored {
                    n.in_force = stored;
                    self.news(node);
                }
            }
            SimulationEvent::Look(began) => {
                let quiet = self.now < self.silent_until || self.mute_until(node).is_some();
                if !quiet && self.catalogue_stands_until(node).is_none() {
                    let stored = self.catalogue;
                    let n = self.nodes.get_mut(&node).expect("it lives");
                    let news = n.in_force < stored;
                    n.in_force = stored;
                    n.known.catalogue_seen(began);
                    if news {
                        self.news(node);
                    }
                }
            }
            SimulationEvent::Wake => {}
            SimulationEvent::Hear => self.hear(node, now),
            SimulationEvent::Answered { asked, answer } => self.answered(node, now, asked, answer),
            SimulationEvent::Looked(asked) => self.looked(node, now, asked),
            SimulationEvent::Loaded { partition, well } => {
                let n = self.nodes.get_mut(&node).expect("it lives");
                if n.known.doing(partition) != Some(HoldPhase::Loading) {
                    // The partition was resigned meanwhile.
                } else if !well {
                    let revision = n.known.revision_of(partition).expect("it was taken");
                    n.known.load_failed(partition, now);
                    self.free(node, partition, revision);
                } else if n.known.may_serve(partition) {
                    n.known.serving(partition);
                    self.moves += 1;
                } else {
                    // Try again later: the partition is not confirmed yet.
                    self.later(node, 50, SimulationEvent::Loaded { partition, well });
                }
            }
            SimulationEvent::Written(partition) => {
                if let Some(revision) = self.nodes[&node].known.revision_of(partition) {
                    self.free(node, partition, revision);
                }
            }
            SimulationEvent::Drain => {
                let n = self.nodes.get_mut(&node).expect("it lives");
                n.drained = true;
                n.known.drain(true);
            }
            SimulationEvent::Swap { .. }
            | SimulationEvent::Commit(_)
            | SimulationEvent::Answer(_)
            | SimulationEvent::Crash
            | SimulationEvent::Start => unreachable!("done above"),
        }
        self.act(node);
    }

    fn beat(&mut self, node: usize, now: Duration) {
        let n = self.nodes.get_mut(&node).expect("it lives");
        if !n.known.may_beat(now) {
            return;
        }
        let beat = n.known.beat_sent(now);
        let value = SimulatedValue::Beat(Heartbeat {
            process: n.process,
            beat,
            draining: n.drained,
            catalogue: Some(n.in_force),
        });
        self.ask(
            node,
            SimulatedKey::Node(node as u64),
            value,
            None,
            SwapPurpose::Beat(beat),
        );
    }

    fn news(&mut self, node: usize) {
        let n = self.nodes.get_mut(&node).expect("it lives");
        if !std::mem::replace(&mut n.has_news, true) {
            self.later(node, 10, SimulationEvent::News);
        }
    }

    /// Stores a commit, unless the stream has no leader: then the commit fails.
    fn commit(&mut self, node: usize, process: u64, commit: SimulatedCommit) {
        if self.now < self.silent_until {
            return;
        }
        self.catalogue += 1;
        let version = self.catalogue;
        let nodes: Vec<usize> = self.nodes.keys().copied().collect();
        for other in nodes {
            let wait = self.latency();
            self.later(other, wait, SimulationEvent::Apply);
        }
        if self.planted == Some(PlantedBug::AnswersAfterASecond) && matches!(commit, SimulatedCommit::Change)
        {
            self.at(self.now + 1_000, node, process, SimulationEvent::Answer(version));
        }
        let wait = self.latency();
        self.at(
            self.now + wait,
            node,
            process,
            SimulationEvent::Committed(commit, version),
        );
    }

    /// Until when nothing that the node sends arrives.
    fn mute_until(&self, node: usize) -> Option<u64> {
        let until = [&self.cut, &self.mute].map(|all| all.get(&node).copied().unwrap_or(0));
        until.into_iter().max().filter(|until| self.now < *until)
    }

    /// Until when nothing arrives at the node.
    fn deaf_until(&self, node: usize) -> Option<u64> {
        let until = [&self.cut, &self.deaf].map(|all| all.get(&node).copied().unwrap_or(0));
        until.into_iter().max().filter(|until| self.now < *until)
    }

    fn catalogue_stands_until(&self, node: usize) -> Option<u64> {
        let stale = self.stale.get(&node).copied().filter(|until| self.now < *until);
        self.deaf_until(node).max(stale)
    }

    fn answer_changes(&mut self, node: usize) {
        let now = self.now;
        let Some(n) = self.nodes.get_mut(&node) else {
            return;
        };
        let known = &n.known;
        let in_force = |(version, since, _): &(u64, Duration, u64)| known.in_force(*version, *since).is_ok();
        let (answered, waiting): (Vec<_>, Vec<_>) = n.changes.drain(..).partition(in_force);
        n.changes = waiting;
        for (version, _, stored) in answered {
            self.answered = self.answered.max(version);
            self.answers += 1;
            self.slowest_answer = self.slowest_answer.max(now - stored);
        }
    }

    fn free(&mut self, node: usize, partition: u8, revision: u64) {
        let value = self.mark(node, SimulatedValue::Free);
        self.ask(
            node,
            SimulatedKey::Part(partition),
            value,
            Some(revision),
            SwapPurpose::Free(partition),
        );
    }

    fn mark(
        &mut self,
        node: usize,
        value: impl FnOnce(PartitionHolder, u64) -> SimulatedValue,
    ) -> SimulatedValue {
        let n = self.nodes.get_mut(&node).expect("it lives");
        n.nonce += 1;
        value(
            PartitionHolder {
                node: NodeId(node as u64),
                process: n.process,
            },
            n.nonce,
        )
    }

    fn act(&mut self, node: usize) {
        let Some(n) = self.nodes.get_mut(&node) else {
            return;
        };
        let now = n.clock(self.now);
        if let Some(until) = n.known.valid_until() {
            n.lease = n.lease.max(until);
        }
        let plan = n.known.decide(now);
        for step in plan.steps {
            match step {
                MembershipStep::Take { partition, revision } => {
                    let n = self.nodes.get_mut(&node).expect("it lives");
                    n.known.taking(partition);
                    let value = self.mark(node, SimulatedValue::Owned);
                    self.ask(
                        node,
                        SimulatedKey::Part(partition),
                        value,
                        Some(revision),
                        SwapPurpose::Take { partition },
                    );
                }
                MembershipStep::Confirm { partition, revision } => {
                    let n = self.nodes.get_mut(&node).expect("it lives");
                    let stretch = n.known.confirming(partition);
                    let value = self.mark(node, SimulatedValue::Owned);
                    self.ask(
                        node,
                        SimulatedKey::Part(partition),
                        value,
                        Some(revision),
                        SwapPurpose::Confirm { partition, stretch },
                    );
                }
                MembershipStep::ConfirmCatalogue => {
                    let mute = self.mute_until(node).map_or(0, |until| until - self.now);
                    let n = self.nodes.get_mut(&node).expect("it lives");
                    let stretch = n.known.confirming_catalogue();
                    let commit = SimulatedCommit::Confirm { stretch, began: now };
                    if self.planted == Some(PlantedBug::ResumesUnconfirmed) {
                        n.known.catalogue_confirmed(stretch, now);
                        continue;
                    }
                    let confirms = n.confirms;
                    self.later(node, PATIENCE, SimulationEvent::Unconfirmed(confirms));
                    let wait = self.latency();
                    if !(self.faulty() && self.chance.percent(2)) {
                        self.later(node, mute + wait, SimulationEvent::Commit(commit));
                    }
                }
                MembershipStep::Release { partition } => {
                    self.nodes
                        .get_mut(&node)
                        .expect("it lives")
                        .known
                        .releasing(partition);
                    let wait = self.chance.between(1, 3_000);
                    self.later(node, wait, SimulationEvent::Written(partition));
                }
                MembershipStep::Resign { partition } => {
                    self.nodes
                        .get_mut(&node)
                        .expect("it lives")
                        .known
                        .resigned(partition, now);
                }
            }
        }
        if let Some(again) = plan.again {
            let wait = again.saturating_sub(now).as_millis() as u64 * 1000 / 980 + 1;
            let n = self.nodes.get_mut(&node).expect("it lives");
            if n.wakes_at <= self.now || self.now + wait < n.wakes_at {
                n.wakes_at = self.now + wait;
                self.later(node, wait, SimulationEvent::Wake);
            }
        }
        self.answer_changes(node);
        let n = self.nodes.get_mut(&node).expect("it lives");
        if n.drained && !n.leaving && n.known.held().next().is_none() && n.known.valid_until().is_some() {
            n.leaving = true;
            self.ask(
                node,
                SimulatedKey::Node(node as u64),
                SimulatedValue::Deleted,
                None,
                SwapPurpose::Leave,
            );
        }
    }

    fn ask(
        &mut self,
        node: usize,
        key: SimulatedKey,
        value: SimulatedValue,
        expected: Option<u64>,
        wish: SwapPurpose,
    ) {
        let process = self.nodes[&node].process;
        let asked = SwapRequest {
            id: self.count,
            key,
            value,
            expected,
            wish,
        };
        let reaches = self.mute_until(node).map_or(self.now, |until| until + 1) + self.latency();
        let lost = self.faulty() && self.chance.percent(2);
        let reply = !(self.faulty() && self.chance.percent(2));
        self.nodes.get_mut(&node).expect("it lives").open.insert(asked.id);
        // Timeout of the request: by then its outcome counts as unknown.
        self.at(
            self.now + PATIENCE,
            node,
            process,
            SimulationEvent::Answered {
                asked,
                answer: SwapAnswer::Unknown,
            },
        );
        if !lost {
            self.at(reaches, node, process, SimulationEvent::Swap { asked, reply });
        }
    }

    fn swap(&mut self, node: usize, process: u64, asked: SwapRequest, reply: bool) {
        if self.now < self.silent_until {
            // The request either waits in a queue until there is a leader again, or is lost.
            if self.chance.percent(50) {
                let wait = self.latency();
                self.at(
                    self.silent_until + wait,
                    node,
                    process,
                    SimulationEvent::Swap { asked, reply },
                );
            }
            return;
        }
        let stored = self.bucket.get(&asked.key).map_or(0, |(_, revision)| *revision);
        let answer = if asked.expected.is_none_or(|expected| stored == expected) {
            self.revision += 1;
            self.bucket.insert(asked.key, (asked.value, self.revision));
            let nodes: Vec<usize> = self.nodes.keys().copied().collect();
            for other in nodes {
                let wait = self.latency();
                self.later(other, wait, SimulationEvent::Hear);
            }
            SwapAnswer::Stored(self.revision)
        } else {
            SwapAnswer::Refused
        };
        if reply && self.deaf_until(node).is_none() {
            let wait = self.latency();
            self.at(
                self.now + wait,
                node,
                process,
                SimulationEvent::Answered { asked, answer },
            );
        }
    }

    fn hear(&mut self, node: usize, now: Duration) {
        if let Some(until) = self.deaf_until(node) {
            return self.later(node, until - self.now + 1, SimulationEvent::Hear);
        }
        let n = self.nodes.get_mut(&node).expect("it lives");
        let mut news: Vec<(u64, SimulatedKey, SimulatedValue)> = self
            .bucket
            .iter()
            .filter(|(_, (_, revision))| *revision > n.heard)
            .map(|(key, (value, revision))| (*revision, *key, *value))
            .collect();
        news.sort_unstable_by_key(|(revision, ..)| *revision);
        for (revision, key, value) in news {
            n.heard = revision;
            match (key, value) {
                (SimulatedKey::Node(id), SimulatedValue::Beat(said)) => {
                    n.known.node_heard(NodeId(id), said, revision, now);
                }
                (SimulatedKey::Node(id), _) => n.known.node_left(NodeId(id), revision, now),
                (SimulatedKey::Part(partition), SimulatedValue::Owned(holder, _)) => {
                    n.known.owner_heard(partition, Some(holder), revision, now);
                }
                (SimulatedKey::Part(partition), _) => n.known.owner_heard(partition, None, revision, now),
            }
        }
    }

    fn answered(&mut self, node: usize, now: Duration, asked: SwapRequest, answer: SwapAnswer) {
        let open = &mut self.nodes.get_mut(&node).expect("it lives").open;
        if !open.contains(&asked.id) {
            return;
        }
        if let SwapAnswer::Stored(revision) = answer {
            open.remove(&asked.id);
            return self.stored(node, now, asked.wish, revision);
        }
        // A node that does not know the outcome of a swap reads what is stored.
        let process = self.nodes[&node].process;
        let from = self
            .mute_until(node)
            .max(self.deaf_until(node))
            .unwrap_or(self.now)
            .max(self.silent_until.max(self.now));
        let wait = self.latency();
        self.at(from + wait, node, process, SimulationEvent::Looked(asked));
    }

    fn looked(&mut self, node: usize, now: Duration, asked: SwapRequest) {
        let SwapRequest {
            id, key, value, wish, ..
        } = asked;
        if !self.nodes.get_mut(&node).expect("it lives").open.remove(&id) {
            return;
        }
        let (found, revision) = self
            .bucket
            .get(&key)
            .copied()
            .unwrap_or((SimulatedValue::Deleted, 0));
        if found == value && !matches!(wish, SwapPurpose::Leave) {
            return self.stored(node, now, wish, revision);
        }
        let n = self.nodes.get_mut(&node).expect("it lives");
        let me = PartitionHolder {
            node: NodeId(node as u64),
            process: n.process,
        };
        match wish {
            SwapPurpose::Beat(_) => {
                if let SimulatedValue::Beat(said) = found
                    && said.process == n.process
                {
                    n.known.beat_stored(said.beat, now);
                }
            }
            SwapPurpose::Take { partition } => n.known.take_refused(partition, now),
            SwapPurpose::Confirm { partition, .. } => match found {
                SimulatedValue::Owned(holder, _) if holder == me => {
                    n.known.confirm_failed(partition);
                    n.known.moved(partition, revision);
                }
                SimulatedValue::Owned(holder, _) => {
                    n.known.owner_heard(partition, Some(holder), revision, now)
                }
                _ => n.known.owner_heard(partition, None, revision, now),
            },
            SwapPurpose::Free(partition) => match found {
                SimulatedValue::Owned(holder, _) if holder == me => self.free(node, partition, revision),
                _ => n.known.released(partition, revision, now),
            },
            SwapPurpose::Leave => {
                n.leaving = false;
                if found == SimulatedValue::Deleted {
                    self.nodes.remove(&node);
                }
            }
        }
    }

    fn stored(&mut self, node: usize, now: Duration, wish: SwapPurpose, revision: u64) {
        let n = self.nodes.get_mut(&node).expect("it lives");
        match wish {
            SwapPurpose::Beat(beat) => {
                n.known.beat_stored(beat, now);
            }
            SwapPurpose::Take { partition } => {
                n.known.taken(partition, revision, now);
                let wait = self.chance.between(5, 2_000);
                let well = !(self.faulty() && self.chance.percent(5));
                self.later(node, wait, SimulationEvent::Loaded { partition, well });
            }
            SwapPurpose::Confirm { partition, stretch } => {
                n.known.confirmed(partition, revision, stretch, now)
            }
            SwapPurpose::Free(partition) => n.known.released(partition, revision, now),
            SwapPurpose::Leave => {
                self.nodes.remove(&node);
            }
        }
    }

    /// Checks the two invariants.
    fn check(&self) {
        for (id, n) in &self.nodes {
            let acts = n.clock(self.now) < n.lease;
            assert!(
                !acts || n.in_force >= self.answered,
                "at {} ms node {id} acts by version {} of the catalogue though {} was answered",
                self.now,
                n.in_force,
                self.answered
            );
        }
        for partition in 0..self.partitions {
            let acting: Vec<usize> = self
                .nodes
                .iter()
                .filter(|(_, n)| n.known.doing(partition) == Some(HoldPhase::Serving))
                .filter(|(_, n)| n.clock(self.now) < n.lease)
                .map(|(id, _)| *id)
                .collect();
            assert!(
                acting.len() < 2,
                "at {} ms partition {partition} is served by {acting:?}",
                self.now
            );
        }
    }

    fn rested(&self) -> bool {
        let live: Vec<&SimulatedNode> = self.nodes.values().filter(|n| !n.drained).collect();
        let mut served = 0;
        let (least, most) = (
            usize::from(self.partitions) / live.len().max(1),
            usize::from(self.partitions).div_ceil(live.len().max(1)),
        );
        for n in &live {
            let mine = n
                .known
                .held()
                .filter(|(_, doing)| *doing == HoldPhase::Serving)
                .count();
            if mine < least || mine > most || n.clock(self.now) >= n.lease {
                return false;
            }
            served += mine;
        }
        served == usize::from(self.partitions) && self.nodes.values().all(|n| !n.drained)
    }
}

fn trouble(seed: u64) -> SimulatedCluster {
    trouble_with(seed, None)
}

fn trouble_with(seed: u64, planted: Option<PlantedBug>) -> SimulatedCluster {
    let mut world = SimulatedCluster::new(seed, 8);
    world.planted = planted;
    world.partitions = *[1u8, 3, 8, 8, 13, 64]
        .get(world.chance.below(6) as usize)
        .expect("one of six");
    let count = world.chance.between(1, 9) as usize;
    for node in 0..count {
        let wait = world.chance.below(3_000);
        world.at(wait, node, NOBODY, SimulationEvent::Start);
    }
    world.run(20_000, |_| false);
    let faults = world.chance.between(1, 15);
    world.faults_until = 20_000 + faults * 5_000;
    for _ in 0..faults {
        let until = world.now + world.chance.between(100, 8_000);
        let node = world.chance.below(count as u64) as usize;
        let length = world.chance.between(500, 20_000);
        for _ in 0..world.chance.below(12) {
            let (at, by) = (
                world.now + world.chance.below(10_000),
                world.chance.below(count as u64) as usize,
            );
            if let Some(process) = world.nodes.get(&by).map(|n| n.process) {
                world.at(at, by, process, SimulationEvent::Change);
            }
        }
        match world.chance.below(10) {
            0 => world.at(until, node, NOBODY, SimulationEvent::Crash),
            1 | 2 => {
                world.stopped.insert(node, world.now + length);
            }
            3 => {
                world.cut.insert(node, world.now + length);
            }
            4 => world.silent_until = world.now + length / 2,
            5 | 6 => {
                world.mute.insert(node, world.now + length);
            }
            7 | 8 => {
                world.deaf.insert(node, world.now + length);
            }
            9 => {
                world.stale.insert(node, world.now + length);
            }
            _ => {
                if let Some(process) = world.nodes.get(&node).map(|n| n.process) {
                    world.at(until, node, process, SimulationEvent::Drain);
                    // A node drains only if it is not alone, and comes back later as a new process.
                    let wait = world.chance.between(1_000, 30_000);
                    world.at(until + wait, node, NOBODY, SimulationEvent::Start);
                }
            }
        }
        world.run(until, |_| false);
    }
    // Let all faults end, and bring all nodes back.
    let over = world.faults_until.max(world.now) + 31_000;
    world.run(over, |_| false);
    for node in 0..count {
        if world.nodes.get(&node).is_none_or(|n| n.drained) {
            world.nodes.remove(&node);
            world.start(node);
        }
    }
    let began = world.now;
    let rested = world.run(began + 60_000, SimulatedCluster::rested);
    let held: Vec<_> = world
        .nodes
        .iter()
        .map(|(id, n)| (*id, n.known.held().collect::<Vec<_>>()))
        .collect();
    assert!(rested, "not at rest a minute after the last fault: {held:?}");
    let took = world.now - began;
    let moves = world.moves;
    world.run(world.now + 30_000, |_| false);
    assert!(world.rested(), "it did not stay so");
    assert_eq!(world.moves, moves, "something moved though nothing happened");
    assert!(
        world.nodes.values().all(|n| n.changes.is_empty()),
        "a change was never answered"
    );
    world.took = took;
    world
}

#[test]
fn never_two_and_soon_all() {
    let mut slowest = (0, 0);
    let mut answers = 0;
    for seed in 0..100 {
        let world = std::panic::catch_unwind(|| trouble(seed)).unwrap_or_else(|e| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(e)
        });
        slowest = slowest.max((world.took, seed));
        answers += world.answers;
    }
    assert!(answers > 1_000, "only {answers} changes were answered");
    println!(
        "slowest to come to rest: {} ms with seed {}",
        slowest.0, slowest.1
    );
    assert!(slowest.0 < 30_000, "{slowest:?}");
}

// A simulation that finds nothing would let any rule pass, so planted bugs must be found.
#[test]
fn planted_bugs_are_found() {
    for planted in [PlantedBug::AnswersAfterASecond, PlantedBug::ResumesUnconfirmed] {
        let finds = |seed: &u64| {
            let Err(e) = std::panic::catch_unwind(|| trouble_with(*seed, Some(planted))) else {
                return false;
            };
            let said = e
                .downcast_ref::<String>()
                .expect("an assertion says what is wrong");
            assert!(said.contains("acts by version"), "{planted:?}: {said}");
            true
        };
        let seed = (0..30).find(finds);
        assert!(seed.is_some(), "{planted:?} is not found");
    }
}

/// A change is answered in milliseconds normally, and as soon as a dead node is known to be dead.
#[test]
fn a_change_is_answered_in_time() {
    let mut at_once = 0;
    for seed in 0..50 {
        let mut world = SimulatedCluster::new(seed, 8);
        world.calm = true;
        for node in 0..3 {
            world.at(node as u64 * 10, node, NOBODY, SimulationEvent::Start);
        }
        assert!(world.run(60_000, SimulatedCluster::rested), "seed {seed}");
        let process = world.nodes[&0].process;
        world.at(world.now + 1, 0, process, SimulationEvent::Change);
        assert!(
            world.run(world.now + 2_000, |world| world.answers == 1),
            "seed {seed}"
        );
        // Heartbeats may overtake each other here; then the next regular one carries the news.
        assert!(
            world.slowest_answer < 1_400,
            "seed {seed}: {} ms",
            world.slowest_answer
        );
        at_once += u32::from(world.slowest_answer < 150);
        // The node dies just before the next change.
        world.nodes.remove(&1);
        world.at(world.now + 1, 0, process, SimulationEvent::Change);
        assert!(
            world.run(world.now + 30_000, |world| world.answers == 2),
            "seed {seed}"
        );
        let bound = 1_250 + 7_500 + 1_250;
        assert!(
            (6_000..bound).contains(&world.slowest_answer),
            "seed {seed}: {} ms",
            world.slowest_answer
        );
    }
    assert!(at_once >= 45, "{at_once} of 50");
}

/// A node that dies silently is replaced within one and a half leases plus delays and the time to
/// load.
#[test]
fn a_death_is_noticed_in_time() {
    for seed in 0..50 {
        let mut world = SimulatedCluster::new(seed, 8);
        for node in 0..3 {
            world.at(node as u64 * 10, node, NOBODY, SimulationEvent::Start);
        }
        assert!(world.run(60_000, SimulatedCluster::rested), "seed {seed}");
        world.nodes.remove(&1);
        let died = world.now;
        assert!(world.run(died + 30_000, SimulatedCluster::rested), "seed {seed}");
        let took = world.now - died;
        // 7.5 s of silence, up to one heartbeat until it is noticed, the next node in line,
        // loading.
        assert!((6_000..18_000).contains(&took), "seed {seed}: {took} ms");
    }
}

/// Only the new node's share moves.
#[test]
fn joining_moves_no_more_than_it_must() {
    for seed in 0..50 {
        let mut world = SimulatedCluster::new(seed, 12);
        world.calm = true;
        for node in 0..3 {
            world.at(node as u64 * 10, node, NOBODY, SimulationEvent::Start);
        }
        assert!(world.run(60_000, SimulatedCluster::rested), "seed {seed}");
        let moves = world.moves;
        world.start(3);
        assert!(
            world.run(world.now + 30_000, SimulatedCluster::rested),
            "seed {seed}"
        );
        assert_eq!(world.moves - moves, 3, "seed {seed}");
    }
}

/// A silence of the bucket longer than any lease: all nodes stop, nothing is taken, and all
/// continue with the partitions they had.
#[test]
fn a_silent_bucket_moves_nothing() {
    for seed in 0..50 {
        let mut world = SimulatedCluster::new(seed, 8);
        for node in 0..3 {
            world.at(node as u64 * 10, node, NOBODY, SimulationEvent::Start);
        }
        assert!(world.run(60_000, SimulatedCluster::rested), "seed {seed}");
        let moves = world.moves;
        world.silent_until = world.now + 20_000;
        world.run(world.silent_until, |_| false);
        assert!(
            world.nodes.values().all(|n| n.clock(world.now) >= n.lease),
            "no lease outlives the silence"
        );
        assert!(
            world.run(world.now + 30_000, SimulatedCluster::rested),
            "seed {seed}"
        );
        assert_eq!(world.moves, moves, "seed {seed}");
    }
}
