//! Membership decisions: which nodes are present, who owns which partition, and what this node
//! does.
//!
//! Nothing here reads a clock or the network: observations come in with the time at which they were
//! made, and steps to carry out go out. All times are this node's own monotonic clock; the clocks
//! of two nodes are never compared.
//!
//! # Why two nodes never act for a partition at once
//!
//! A node acts only while its lease is valid: until one lease after it *began* to send the last
//! heartbeat that was stored. Everything is received in the order in which it was stored, so a node
//! that receives its own heartbeat has received everything stored before it. Another node is dead
//! when nothing of it arrived for one and a half leases, measured between this node's own
//! heartbeats: by then the other's lease has expired, and whatever it stores later comes too late
//! to continue it. A lease that was not continued in time is *broken*: its holder must first
//! confirm each of its partitions by a compare-and-swap of the partition's key. That fails if
//! another node took the partition meanwhile, just as a take-over fails if the partition was
//! confirmed.
//!
//! # Why no node acts on a catalog older than an answered change
//!
//! Heartbeats carry the version of the catalog that is applied at their node. A change is answered
//! when each node has reported a version that includes it, or is dead or gone by the rule above, as
//! observed up to a heartbeat that the answering node began to send after the change was stored. A
//! lease that was broken, and a first lease, is not valid before the catalog has been confirmed by
//! a commit that began after the first heartbeat of the new stretch was stored. A node that
//! answered a change without having received that heartbeat had stored the change before it, so the
//! confirmed catalog includes the change. A node whose catalog cannot follow for two leases sends
//! no heartbeats, so that it delays changes no longer than that.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

/// Id of a node. Stored in its data directory, so that it survives a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl NodeId {
    /// Parses the form that is used in keys and subjects.
    pub fn parse(text: &str) -> Option<NodeId> {
        let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        digits
            .then(|| u64::from_str_radix(text, 16).ok())
            .flatten()
            .map(NodeId)
    }
}

/// How long the next node in line for an open partition waits for the one before it.
pub const STEP_ASIDE: Duration = Duration::from_secs(2);
/// How long a partition is avoided after a refused take-over: by then its owner is known.
pub const REFUSED_WAIT: Duration = Duration::from_millis(500);
/// How long a partition that could not be loaded is left to other nodes: initially, and at most.
const FAILED_WAIT: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// Maximum number of heartbeats with an unknown outcome; older ones are irrelevant.
const BEATS_OPEN_MAX: usize = 512;

#[derive(Clone, Copy, Debug)]
pub struct MembershipRules {
    pub lease: Duration,
    pub partitions: u8,
}

impl MembershipRules {
    /// Interval of heartbeats.
    pub fn beat_every(&self) -> Duration {
        self.lease / 4
    }

    /// Silence of a node after which its partitions may be taken.
    pub fn dead_after(&self) -> Duration {
        self.lease * 3 / 2
    }

    /// How long the catalog may fail to be current before heartbeats stop: with the usual lease
    /// longer than an election of the catalog stream's leader takes.
    pub fn catalogue_patience(&self) -> Duration {
        self.lease * 2
    }
}

/// The part of a heartbeat that decisions depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    pub process: u64,
    pub beat: u64,
    pub draining: bool,
    /// The catalog version that is applied at the node; `None` for an older program, which nobody
    /// waits for.
    pub catalogue: Option<u64>,
}

/// The last observation of a node.
#[derive(Clone, Debug)]
struct NodeObservation {
    revision: u64,
    process: u64,
    draining: bool,
    catalogue: Option<u64>,
    /// When the last sign of life arrived.
    at: Duration,
    /// Silence since then, measured between own heartbeats.
    silent: Duration,
    /// Since when the node counts as dead.
    dead: Option<Duration>,
    /// Since when the node has left: it announced that it had stopped everything, or its key was
    /// cleaned up.
    left: Option<Duration>,
}

/// The node and process that a partition's key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionHolder {
    pub node: NodeId,
    pub process: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct PartitionOwner {
    holder: Option<PartitionHolder>,
    revision: u64,
    /// Since when this owner is known to this node.
    since: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldPhase {
    /// The key is being swapped, or the partition is being read.
    Loading,
    Serving,
    /// Not served any more, but owned until everything has been recorded.
    Releasing,
}

#[derive(Clone, Debug)]
struct HeldPartition {
    doing: HoldPhase,
    /// Revision of the key after the last swap by this process; 0 while the first swap is under
    /// way.
    revision: u64,
    /// Stretch of unbroken lease in which the key was last swapped.
    stretch: u64,
    confirming: bool,
}

/// A step to carry out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MembershipStep {
    /// Swap the partition's key, which has this revision, and load the partition.
    Take { partition: u8, revision: u64 },
    /// The lease was broken: swap the key again to verify that nobody took the partition meanwhile.
    Confirm { partition: u8, revision: u64 },
    /// The lease was broken or is the first: verify by a commit that the catalog is current.
    ConfirmCatalogue,
    /// Stop claiming, let attempts end, record everything, and free the key.
    Release { partition: u8 },
    /// The partition belongs to another node: stop immediately and write nothing.
    Resign { partition: u8 },
}

#[derive(Debug, Default)]
pub struct MembershipPlan {
    pub steps: Vec<MembershipStep>,
    /// When to decide again if nothing is observed until then.
    pub again: Option<Duration>,
}

/// The state of a node as far as this one knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeStatus {
    Live,
    Draining,
    /// The node's heartbeats have stopped.
    Dead,
    Left,
}

/// Everything that a node knows of the cluster.
#[derive(Debug)]
pub struct MembershipView {
    me: PartitionHolder,
    rules: MembershipRules,
    began: Duration,
    draining: bool,
    nodes: BTreeMap<NodeId, NodeObservation>,
    owners: Vec<PartitionOwner>,
    held: BTreeMap<u8, HeldPartition>,
    /// Own heartbeats in flight: number, and when sending began.
    beats: VecDeque<(u64, Duration)>,
    beats_sent: u64,
    /// When sending of the last heartbeat that was received back began.
    echo: Option<Duration>,
    /// When sending of the last stored heartbeat began.
    stored: Option<Duration>,
    /// Number of the current stretch of unbroken lease.
    stretch: u64,
    /// Partitions that must not be tried before a time, with the length of the last wait.
    waits: BTreeMap<u8, (Duration, Duration)>,
    /// The stretch of lease in which the catalog was last confirmed.
    catalogue_stretch: Option<u64>,
    confirming_catalogue: bool,
    /// When the last check that found the catalog current began.
    catalogue_current: Duration,
}

impl MembershipView {
    pub fn new(me: PartitionHolder, rules: MembershipRules, now: Duration) -> MembershipView {
        let unknown = PartitionOwner {
            since: now,
            ..PartitionOwner::default()
        };
        MembershipView {
            me,
            rules,
            began: now,
            draining: false,
            nodes: BTreeMap::new(),
            owners: vec![unknown; usize::from(rules.partitions)],
            held: BTreeMap::new(),
            beats: VecDeque::new(),
            beats_sent: 0,
            echo: None,
            stored: None,
            stretch: 0,
            waits: BTreeMap::new(),
            catalogue_stretch: None,
            confirming_catalogue: false,
            catalogue_current: now,
        }
    }

    /// Whether heartbeats may be sent, that is, whether the catalog here still follows.
    pub fn may_beat(&self, now: Duration) -> bool {
        now < self.catalogue_current + self.rules.catalogue_patience()
    }

    /// Everything stored in the catalog when a check `began` is applied here.
    pub fn catalogue_seen(&mut self, began: Duration) {
        self.catalogue_current = self.catalogue_current.max(began);
    }

    /// The commit for a `ConfirmCatalogue` is about to be sent. Returns the stretch of lease it
    /// belongs to.
    pub fn confirming_catalogue(&mut self) -> u64 {
        self.confirming_catalogue = true;
        self.stretch
    }

    /// The commit that was `began` in `stretch` is stored, and everything before it is applied
    /// here.
    pub fn catalogue_confirmed(&mut self, stretch: u64, began: Duration) {
        self.confirming_catalogue = false;
        self.catalogue_stretch = Some(stretch);
        self.catalogue_seen(began);
    }

    /// The check of the catalog failed, so it is unknown whether the catalog is current; try again.
    pub fn catalogue_unconfirmed(&mut self) {
        self.confirming_catalogue = false;
    }

    /// Whether no node acts on a catalog older than `version`, which was stored before `since`. The
    /// error names nodes that may, including this one if it has not observed enough.
    pub fn in_force(&self, version: u64, since: Duration) -> Result<(), Vec<NodeId>> {
        if self.echo.is_none_or(|echo| echo <= since) {
            return Err(vec![self.me.node]);
        }
        let lags = |heard: &NodeObservation| heard.catalogue.is_some_and(|known| known < version);
        let acts = |heard: &NodeObservation| heard.left.is_none() && heard.dead.is_none();
        let others = self.nodes.iter().filter(|(node, _)| **node != self.me.node);
        let behind: Vec<NodeId> = others
            .filter(|(_, heard)| acts(heard) && lags(heard))
            .map(|(node, _)| *node)
            .collect();
        if behind.is_empty() { Ok(()) } else { Err(behind) }
    }

    /// A heartbeat is about to be sent. Returns its number, which must be part of it.
    pub fn beat_sent(&mut self, now: Duration) -> u64 {
        self.beats_sent += 1;
        self.beats.push_back((self.beats_sent, now));
        if self.beats.len() > BEATS_OPEN_MAX {
            self.beats.pop_front();
        }
        self.beats_sent
    }

    /// The machine was suspended, or its wall clock was set forward, so it is unknown how long
    /// others have been silent. Heartbeats sent before do not count, and a node is dead only after
    /// a new silence.
    pub fn slept(&mut self) {
        self.echo = None;
        self.beats.clear();
        for heard in self.nodes.values_mut() {
            heard.silent = Duration::ZERO;
        }
    }

    /// The heartbeat is known to be stored.
    pub fn beat_stored(&mut self, beat: u64, now: Duration) {
        let Some(began) = self.began_of(beat) else { return };
        if self.stored.is_some_and(|stored| began <= stored) {
            return;
        }
        if self.stored.is_none_or(|stored| now >= stored + self.rules.lease) {
            self.stretch += 1;
        }
        self.stored = Some(began);
    }

    /// A heartbeat of a node was received.
    pub fn node_heard(&mut self, node: NodeId, said: Heartbeat, revision: u64, now: Duration) {
        let Heartbeat { process, beat, .. } = said;
        let before = self.nodes.get(&node);
        if before.is_some_and(|heard| revision <= heard.revision) {
            return;
        }
        // Heartbeats may be stored in another order than sent; a process never falls back to an
        // older version.
        let same = before.filter(|heard| heard.process == process);
        let heard = NodeObservation {
            revision,
            process,
            draining: said.draining,
            catalogue: said.catalogue.max(same.and_then(|heard| heard.catalogue)),
            at: now,
            silent: Duration::ZERO,
            dead: None,
            left: None,
        };
        self.nodes.insert(node, heard);
        if (PartitionHolder { node, process }) == self.me {
            // If its acknowledgement was lost, this proves that it is stored.
            self.beat_stored(beat, now);
            self.echoed(beat, now);
        }
    }

    /// A node's key was deleted.
    pub fn node_left(&mut self, node: NodeId, revision: u64, now: Duration) {
        if let Some(heard) = self.nodes.get_mut(&node)
            && heard.revision < revision
        {
            heard.revision = revision;
            heard.left.get_or_insert(now);
        }
    }

    /// An own heartbeat was received: everything stored before it has been received, up to when it
    /// was sent.
    fn echoed(&mut self, beat: u64, now: Duration) {
        let Some(began) = self.began_of(beat) else { return };
        while self.beats.front().is_some_and(|(number, _)| *number < beat) {
            self.beats.pop_front();
        }
        let before = self.echo;
        // A heartbeat that was stored late is received after a later one and contains no news.
        if before.is_some_and(|before| began <= before) {
            return;
        }
        self.echo = Some(began);
        let Some(before) = before else { return };
        // After a silence of its own, a node cannot know whether others could be received: their
        // time restarts.
        if began.saturating_sub(before) >= self.rules.lease {
            return;
        }
        let dead_after = self.rules.dead_after();
        for heard in self.nodes.values_mut() {
            heard.silent += began.saturating_sub(before.max(heard.at));
            if heard.silent >= dead_after {
                heard.dead.get_or_insert(now);
            }
        }
    }

    fn began_of(&self, beat: u64) -> Option<Duration> {
        self.beats
            .iter()
            .find(|(number, _)| *number == beat)
            .map(|(_, began)| *began)
    }

    /// The owner of a partition according to its key, as received or known from an own swap.
    pub fn owner_heard(
        &mut self,
        partition: u8,
        holder: Option<PartitionHolder>,
        revision: u64,
        now: Duration,
    ) {
        let owner = &mut self.owners[usize::from(partition)];
        if revision > owner.revision {
            *owner = PartitionOwner {
                holder,
                revision,
                since: now,
            };
        }
    }

    /// From now on this node releases its partitions and takes none, or participates again.
    pub fn drain(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// The swap for a `Take` is about to be sent.
    pub fn taking(&mut self, partition: u8) {
        let hold = HeldPartition {
            doing: HoldPhase::Loading,
            revision: 0,
            stretch: self.stretch,
            confirming: false,
        };
        self.held.insert(partition, hold);
    }

    /// The swap was stored: the partition belongs to this node and must be loaded.
    pub fn taken(&mut self, partition: u8, revision: u64, now: Duration) {
        if let Some(hold) = self.held.get_mut(&partition) {
            hold.revision = revision;
        }
        self.owner_heard(partition, Some(self.me), revision, now);
    }

    /// The swap was refused: another node was faster.
    pub fn take_refused(&mut self, partition: u8, now: Duration) {
        self.held.remove(&partition);
        self.waits.insert(partition, (now + REFUSED_WAIT, Duration::ZERO));
    }

    /// The partition could not be loaded; other nodes should try first.
    pub fn load_failed(&mut self, partition: u8, now: Duration) {
        self.held.remove(&partition);
        let last = self
            .waits
            .get(&partition)
            .map_or(Duration::ZERO, |(_, last)| *last);
        let wait = (last * 2).clamp(FAILED_WAIT.0, FAILED_WAIT.1);
        self.waits.insert(partition, (now + wait, wait));
    }

    /// Whether a loaded partition may be served: it is still this node's, and was confirmed in this
    /// stretch.
    pub fn may_serve(&self, partition: u8) -> bool {
        self.held
            .get(&partition)
            .is_some_and(|hold| hold.revision > 0 && hold.stretch == self.stretch)
    }

    pub fn serving(&mut self, partition: u8) {
        if let Some(hold) = self.held.get_mut(&partition) {
            hold.doing = HoldPhase::Serving;
            self.waits.remove(&partition);
        }
    }

    /// The swap for a `Confirm` is about to be sent. Returns the stretch of lease it belongs to.
    pub fn confirming(&mut self, partition: u8) -> u64 {
        if let Some(hold) = self.held.get_mut(&partition) {
            hold.confirming = true;
        }
        self.stretch
    }

    /// The swap that was begun in `stretch` is stored.
    pub fn confirmed(&mut self, partition: u8, revision: u64, stretch: u64, now: Duration) {
        if let Some(hold) = self.held.get_mut(&partition) {
            hold.confirming = false;
            hold.revision = revision;
            hold.stretch = stretch;
        }
        self.owner_heard(partition, Some(self.me), revision, now);
    }

    /// An earlier own swap was stored although its acknowledgement was lost: the key has this
    /// revision.
    pub fn moved(&mut self, partition: u8, revision: u64) {
        if let Some(hold) = self.held.get_mut(&partition) {
            hold.revision = hold.revision.max(revision);
        }
    }

    /// The outcome of the swap is unknown; try again.
    pub fn confirm_failed(&mut self, partition: u8) {
        if let Some(hold) = self.held.get_mut(&partition) {
            hold.confirming = false;
        }
    }

    pub fn releasing(&mut self, partition: u8) {
        if let Some(hold) = self.held.get_mut(&partition) {
            hold.doing = HoldPhase::Releasing;
        }
    }

    /// The key was freed by the swap with this revision.
    pub fn released(&mut self, partition: u8, revision: u64, now: Duration) {
        self.held.remove(&partition);
        self.owner_heard(partition, None, revision, now);
    }

    /// The partition is not held any more, whoever owns it.
    pub fn resigned(&mut self, partition: u8, now: Duration) {
        self.held.remove(&partition);
        self.waits.insert(partition, (now + REFUSED_WAIT, Duration::ZERO));
    }

    /// Until when this node may act, if all held partitions and the catalog are confirmed in this
    /// stretch.
    pub fn valid_until(&self) -> Option<Duration> {
        let unsure = |hold: &HeldPartition| hold.doing != HoldPhase::Loading && hold.stretch != self.stretch;
        if self.held.values().any(unsure) || self.catalogue_stretch != Some(self.stretch) {
            return None;
        }
        Some(self.stored? + self.rules.lease)
    }

    /// Whether the last stored heartbeat is recent enough to matter.
    fn beating(&self, now: Duration) -> bool {
        self.stored.is_some_and(|stored| now < stored + self.rules.lease)
    }

    pub fn held(&self) -> impl Iterator<Item = (u8, HoldPhase)> {
        self.held.iter().map(|(partition, hold)| (*partition, hold.doing))
    }

    pub fn doing(&self, partition: u8) -> Option<HoldPhase> {
        self.held.get(&partition).map(|hold| hold.doing)
    }

    /// The revision of the partition's key after the last swap by this process.
    pub fn revision_of(&self, partition: u8) -> Option<u64> {
        self.held
            .get(&partition)
            .map(|hold| hold.revision)
            .filter(|revision| *revision > 0)
    }

    pub fn owner(&self, partition: u8) -> Option<PartitionHolder> {
        self.owners
            .get(usize::from(partition))
            .and_then(|owner| owner.holder)
    }

    pub fn standing(&self, node: NodeId) -> Option<NodeStatus> {
        let heard = self.nodes.get(&node)?;
        let draining = if node == self.me.node {
            self.draining
        } else {
            heard.draining
        };
        Some(match (heard.left.or(heard.dead), draining) {
            _ if heard.left.is_some() => NodeStatus::Left,
            (Some(_), _) => NodeStatus::Dead,
            (None, true) => NodeStatus::Draining,
            (None, false) => NodeStatus::Live,
        })
    }

    /// When the last sign of life of the node arrived.
    pub fn heard_at(&self, node: NodeId) -> Option<Duration> {
        self.nodes.get(&node).map(|heard| heard.at)
    }

    pub fn node_revision(&self, node: NodeId) -> Option<u64> {
        self.nodes.get(&node).map(|heard| heard.revision)
    }

    /// Silence of a node, measured between own heartbeats.
    pub fn silent(&self, node: NodeId) -> Option<Duration> {
        self.nodes.get(&node).map(|heard| heard.silent)
    }

    /// The nodes that share the partitions, including this one unless it drains.
    pub fn live(&self) -> Vec<NodeId> {
        let mut live: Vec<NodeId> = self
            .nodes
            .keys()
            .copied()
            .filter(|node| *node != self.me.node && self.standing(*node) == Some(NodeStatus::Live))
            .collect();
        if !self.draining {
            live.push(self.me.node);
        }
        live.sort_unstable();
        live
    }

    /// When to send a heartbeat so that the next silent node is found dead as early as possible.
    /// The next regular heartbeat may come a quarter of a lease later.
    pub fn next_death_at(&self) -> Option<Duration> {
        let echo = self.echo?;
        let others = self.nodes.iter().filter(|(node, _)| **node != self.me.node);
        let silent = others.filter(|(_, heard)| heard.left.is_none() && heard.dead.is_none());
        let dead_at = |heard: &NodeObservation| {
            echo.max(heard.at) + self.rules.dead_after().saturating_sub(heard.silent)
        };
        silent.map(|(_, heard)| dead_at(heard)).min()
    }

    /// Since when nobody acts for the partition, if it is open.
    fn open_since(&self, partition: u8) -> Option<Duration> {
        let owner = self.owners[usize::from(partition)];
        let Some(holder) = owner.holder else {
            return Some(owner.since);
        };
        if holder.node == self.me.node {
            // This node's by its key, but not held: an earlier process of this node owned it, or a
            // swap was stored without being acknowledged.
            return Some(Duration::ZERO);
        }
        match self.nodes.get(&holder.node) {
            None => Some(owner.since.max(self.began)),
            Some(heard) => Some(heard.left.or(heard.dead)?.max(owner.since)),
        }
    }

    /// Decides what to do now.
    pub fn decide(&self, now: Duration) -> MembershipPlan {
        let mut plan = MembershipPlan::default();
        let mut gone = Vec::new();
        for (partition, hold) in &self.held {
            let owner = &self.owners[usize::from(*partition)];
            if owner.revision > hold.revision && hold.revision > 0 && owner.holder != Some(self.me) {
                gone.push(*partition);
                plan.steps.push(MembershipStep::Resign {
                    partition: *partition,
                });
            }
        }
        if !self.beating(now) {
            return plan;
        }
        if self.catalogue_stretch != Some(self.stretch) && !self.confirming_catalogue {
            plan.steps.push(MembershipStep::ConfirmCatalogue);
        }
        for (partition, hold) in &self.held {
            let unsure = hold.stretch != self.stretch && hold.revision > 0;
            if unsure && !hold.confirming && !gone.contains(partition) {
                plan.steps.push(MembershipStep::Confirm {
                    partition: *partition,
                    revision: hold.revision,
                });
            }
        }
        // A node that has not received its own heartbeat has not received everything stored before
        // it.
        if self.echo.is_none() || self.valid_until().is_none_or(|until| now >= until) {
            return plan;
        }
        let counts = self.counts(&gone);
        self.release(&counts, &gone, &mut plan);
        self.take(counts, now, &mut plan);
        plan
    }

    /// Number of partitions of each live node; of this node's own, those that it intends to keep.
    fn counts(&self, gone: &[u8]) -> BTreeMap<NodeId, usize> {
        let mut counts: BTreeMap<NodeId, usize> = self.live().into_iter().map(|node| (node, 0)).collect();
        for owner in &self.owners {
            if let Some(holder) = owner.holder.filter(|holder| holder.node != self.me.node)
                && let Some(count) = counts.get_mut(&holder.node)
            {
                *count += 1;
            }
        }
        if let Some(count) = counts.get_mut(&self.me.node) {
            let keeps = |(partition, hold): &(&u8, &HeldPartition)| {
                hold.doing != HoldPhase::Releasing && !gone.contains(partition)
            };
            *count = self.held.iter().filter(keeps).count();
        }
        counts
    }

    fn release(&self, counts: &BTreeMap<NodeId, usize>, gone: &[u8], plan: &mut MembershipPlan) {
        let serving = self
            .held
            .iter()
            .filter(|(partition, hold)| hold.doing == HoldPhase::Serving && !gone.contains(partition))
            .map(|(partition, _)| *partition);
        let surplus = match counts.get(&self.me.node) {
            None => usize::MAX,
            Some(has) => has - share(counts, usize::from(self.rules.partitions), self.me.node).min(*has),
        };
        // Release from the end: the owner of partition 0 is the coordinator and should keep it.
        let releases = serving
            .rev()
            .take(surplus)
            .map(|partition| MembershipStep::Release { partition });
        plan.steps.extend(releases);
    }

    fn take(&self, mut counts: BTreeMap<NodeId, usize>, now: Duration, plan: &mut MembershipPlan) {
        if self.draining {
            return;
        }
        let mut later = |at: Duration| plan.again = Some(plan.again.map_or(at, |again| again.min(at)));
        let mut takes = Vec::new();
        for partition in 0..self.rules.partitions {
            if self.held.contains_key(&partition) {
                continue;
            }
            let Some(since) = self.open_since(partition) else {
                continue;
            };
            let ours = self
                .owner(partition)
                .is_some_and(|holder| holder.node == self.me.node);
            let mut line: Vec<(usize, NodeId)> = counts.iter().map(|(node, count)| (*count, *node)).collect();
            line.sort_unstable();
            let rank = match ours {
                true => 0,
                false => line
                    .iter()
                    .position(|(_, node)| *node == self.me.node)
                    .unwrap_or(line.len()),
            };
            let from = since + STEP_ASIDE * rank.min(2) as u32;
            let from = self
                .waits
                .get(&partition)
                .map_or(from, |(until, _)| from.max(*until));
            let taker = if now >= from {
                let revision = self.owners[usize::from(partition)].revision;
                takes.push(MembershipStep::Take { partition, revision });
                self.me.node
            } else {
                later(from);
                line.first().map_or(self.me.node, |(_, node)| *node)
            };
            *counts.entry(taker).or_default() += 1;
        }
        plan.steps.extend(takes);
    }
}

/// Number of partitions that `node` should have: all nodes the same number, or one more. Nodes that
/// have the most now get the extra ones, so that few partitions move.
fn share(counts: &BTreeMap<NodeId, usize>, partitions: usize, node: NodeId) -> usize {
    let mut order: Vec<(usize, NodeId)> = counts.iter().map(|(node, count)| (*count, *node)).collect();
    order.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    let nodes = order.len().max(1);
    let rank = order
        .iter()
        .position(|(_, other)| *other == node)
        .unwrap_or(nodes);
    partitions / nodes + usize::from(rank < partitions % nodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn holder(node: u64) -> PartitionHolder {
        PartitionHolder {
            node: NodeId(node),
            process: node * 100,
        }
    }

    fn secs(secs: f64) -> Duration {
        Duration::from_secs_f64(secs)
    }

    /// Node 1, which has received its own heartbeat and those of these others at second 0.
    fn known(partitions: u8, others: &[u64]) -> MembershipView {
        let rules = MembershipRules {
            lease: LEASE,
            partitions,
        };
        let mut known = MembershipView::new(holder(1), rules, Duration::ZERO);
        for other in others {
            known.node_heard(NodeId(*other), said(*other, 1), *other, Duration::ZERO);
        }
        beat(&mut known, 100, Duration::ZERO);
        confirm_catalogue(&mut known, Duration::ZERO);
        known
    }

    fn said(node: u64, beat: u64) -> Heartbeat {
        Heartbeat {
            process: node * 100,
            beat,
            draining: false,
            catalogue: Some(1),
        }
    }

    fn confirm_catalogue(known: &mut MembershipView, now: Duration) {
        let stretch = known.confirming_catalogue();
        known.catalogue_confirmed(stretch, now);
    }

    fn beat(known: &mut MembershipView, revision: u64, now: Duration) {
        let number = known.beat_sent(now);
        known.beat_stored(number, now);
        known.node_heard(NodeId(1), said(1, number), revision, now);
    }

    fn hold(known: &mut MembershipView, partition: u8, revision: u64) {
        known.taking(partition);
        known.taken(partition, revision, Duration::ZERO);
        known.serving(partition);
    }

    #[test]
    fn a_node_alone_takes_everything() {
        let plan = known(3, &[]).decide(secs(0.0));
        let takes = (0..3).map(|partition| MembershipStep::Take {
            partition,
            revision: 0,
        });
        assert!(plan.steps.into_iter().eq(takes));
        assert_eq!(plan.again, None);
    }

    #[test]
    fn what_is_free_is_shared_out_and_the_next_in_line_waits() {
        let known = known(3, &[2]);
        let plan = known.decide(secs(0.0));
        let mine = [0, 2].map(|partition| MembershipStep::Take {
            partition,
            revision: 0,
        });
        assert_eq!(plan.steps, mine);
        assert_eq!(plan.again, Some(STEP_ASIDE));
        assert_eq!(
            known.decide(STEP_ASIDE).steps.len(),
            3,
            "the other one did not come"
        );
    }

    #[test]
    fn a_dead_nodes_partitions_are_open_only_after_a_lease_and_a_half_of_own_heartbeats() {
        let mut known = known(1, &[2]);
        known.owner_heard(0, Some(holder(2)), 50, Duration::ZERO);
        for n in 1..6 {
            beat(&mut known, 100 + n, secs(n as f64 * 1.25));
            assert!(known.decide(secs(n as f64 * 1.25)).steps.is_empty(), "{n}");
        }
        // A silence of this node itself does not count, however long.
        beat(&mut known, 110, secs(100.0));
        confirm_catalogue(&mut known, secs(100.0));
        assert_eq!(known.standing(NodeId(2)), Some(NodeStatus::Live));
        beat(&mut known, 111, secs(101.25));
        assert_eq!(known.standing(NodeId(2)), Some(NodeStatus::Dead));
        let take = MembershipStep::Take {
            partition: 0,
            revision: 50,
        };
        assert_eq!(known.decide(secs(101.25)).steps, [take]);
        known.node_heard(NodeId(2), said(2, 9), 112, secs(102.0));
        assert!(known.decide(secs(102.0)).steps.is_empty(), "it lives");
    }

    #[test]
    fn a_heartbeat_at_the_right_time_finds_a_death_at_once() {
        let mut known = known(1, &[2]);
        beat(&mut known, 101, secs(1.0));
        known.node_heard(NodeId(2), said(2, 2), 102, secs(1.1));
        for n in 1..6 {
            beat(&mut known, 102 + n, secs(1.0 + n as f64 * 1.25));
            assert_eq!(known.next_death_at(), Some(secs(8.6)), "{n}");
        }
        assert_eq!(known.standing(NodeId(2)), Some(NodeStatus::Live));
        beat(&mut known, 120, secs(8.6));
        assert_eq!(known.standing(NodeId(2)), Some(NodeStatus::Dead));
        assert_eq!(known.next_death_at(), None);
    }

    #[test]
    fn a_clock_that_leapt_makes_nobody_dead() {
        let mut known = known(1, &[2]);
        known.owner_heard(0, Some(holder(2)), 50, Duration::ZERO);
        for n in 1..4 {
            beat(&mut known, 100 + n, secs(n as f64 * 1.25));
        }
        // A heartbeat is in flight when the clock jumps, and is received after that.
        let under_way = known.beat_sent(secs(5.0));
        known.slept();
        known.beat_stored(under_way, secs(8.5));
        known.node_heard(NodeId(1), said(1, under_way), 104, secs(8.5));
        for n in 0..6 {
            let now = secs(8.5 + n as f64 * 1.25);
            beat(&mut known, 105 + n, now);
            assert_eq!(known.standing(NodeId(2)), Some(NodeStatus::Live), "{n}");
            assert!(known.decide(now).steps.is_empty(), "{n}");
        }
        beat(&mut known, 120, secs(16.0));
        assert_eq!(known.standing(NodeId(2)), Some(NodeStatus::Dead));
    }

    #[test]
    fn a_broken_lease_is_not_valid_before_everything_is_confirmed() {
        let mut known = known(2, &[2]);
        hold(&mut known, 0, 51);
        known.owner_heard(1, Some(holder(2)), 52, Duration::ZERO);
        assert_eq!(known.valid_until(), Some(LEASE));
        assert!(
            known.decide(LEASE).steps.is_empty(),
            "without a lease nothing is done"
        );
        beat(&mut known, 101, secs(6.0));
        assert_eq!(known.valid_until(), None);
        let confirm = MembershipStep::Confirm {
            partition: 0,
            revision: 51,
        };
        assert_eq!(
            known.decide(secs(6.0)).steps,
            [MembershipStep::ConfirmCatalogue, confirm]
        );
        confirm_catalogue(&mut known, secs(6.0));
        assert_eq!(known.valid_until(), None, "the partition is not confirmed");
        let stretch = known.confirming(0);
        assert!(known.decide(secs(6.0)).steps.is_empty(), "it is under way");
        known.confirmed(0, 60, stretch, secs(6.1));
        assert_eq!(known.valid_until(), Some(secs(11.0)));
        // Another node has the partition: nothing is confirmed, and the partition is given up.
        known.owner_heard(0, Some(holder(2)), 61, secs(6.2));
        assert_eq!(
            known.decide(secs(6.2)).steps[0],
            MembershipStep::Resign { partition: 0 }
        );
    }

    #[test]
    fn a_broken_lease_is_not_valid_before_the_catalogue_is_confirmed() {
        let mut known = known(1, &[2]);
        assert_eq!(known.valid_until(), Some(LEASE));
        beat(&mut known, 101, secs(4.0));
        assert_eq!(known.valid_until(), Some(secs(9.0)), "it was not broken");
        // A confirmation that is in flight when the lease breaks proves nothing about the time
        // after.
        let late = known.confirming_catalogue();
        beat(&mut known, 102, secs(9.5));
        known.catalogue_confirmed(late, secs(4.5));
        assert_eq!(known.valid_until(), None);
        assert_eq!(known.decide(secs(9.5)).steps, [MembershipStep::ConfirmCatalogue]);
        let stretch = known.confirming_catalogue();
        assert!(known.decide(secs(9.5)).steps.is_empty(), "it is under way");
        known.catalogue_unconfirmed();
        assert_eq!(known.decide(secs(9.6)).steps, [MembershipStep::ConfirmCatalogue]);
        known.catalogue_confirmed(stretch, secs(9.6));
        assert_eq!(known.valid_until(), Some(secs(14.5)));
    }

    #[test]
    fn a_node_whose_catalogue_cannot_follow_falls_silent() {
        let mut known = known(1, &[]);
        assert!(known.may_beat(secs(9.9)));
        assert!(!known.may_beat(secs(10.0)));
        known.catalogue_seen(secs(3.0));
        assert!(known.may_beat(secs(12.9)) && !known.may_beat(secs(13.0)));
    }

    #[test]
    fn a_change_is_in_force_when_every_node_has_said_so_or_is_dead_or_gone() {
        let mut known = known(1, &[2, 3]);
        let in_force = |known: &MembershipView, since| known.in_force(5, secs(since));
        let lags = |nodes: &[u64]| Err(nodes.iter().map(|node| NodeId(*node)).collect::<Vec<_>>());
        assert_eq!(in_force(&known, 0.5), lags(&[1]), "nothing was heard since");
        beat(&mut known, 101, secs(1.0));
        assert_eq!(in_force(&known, 0.5), lags(&[2, 3]));
        let applied = |node, version| Heartbeat {
            catalogue: version,
            ..said(node, 2)
        };
        known.node_heard(NodeId(2), applied(2, Some(5)), 102, secs(1.1));
        known.node_heard(NodeId(3), applied(3, Some(4)), 103, secs(1.1));
        assert_eq!(in_force(&known, 0.5), lags(&[3]));
        // An earlier heartbeat that is stored later takes nothing back.
        known.node_heard(NodeId(2), said(2, 1), 104, secs(1.1));
        assert_eq!(in_force(&known, 0.5), lags(&[3]));
        assert_eq!(
            in_force(&known, 1.05),
            lags(&[1]),
            "a later change wants a later heartbeat"
        );
        // A node of an older program reports no version.
        known.node_heard(NodeId(4), applied(4, None), 105, secs(1.2));
        // The third node falls silent.
        for n in 2..8 {
            let now = secs(1.1 + f64::from(n - 1) * 1.25);
            beat(&mut known, 103 + 2 * n as u64, now);
            known.node_heard(NodeId(2), applied(2, Some(5)), 104 + 2 * n as u64, now);
            let dead = now - secs(1.1) >= LEASE * 3 / 2;
            assert_eq!(in_force(&known, 0.5).is_ok(), dead, "{now:?}");
        }
        known.node_heard(NodeId(3), applied(3, Some(4)), 200, secs(9.0));
        assert_eq!(in_force(&known, 0.5), lags(&[3]), "it is back");
        known.node_left(NodeId(3), 201, secs(9.1));
        assert_eq!(in_force(&known, 0.5), Ok(()));
    }

    #[test]
    fn too_many_are_released_from_the_end_and_all_when_draining() {
        let mut known = known(4, &[2]);
        for partition in 0..4 {
            hold(&mut known, partition, 50 + u64::from(partition));
        }
        let release = |partition| MembershipStep::Release { partition };
        assert_eq!(known.decide(secs(1.0)).steps, [release(3), release(2)]);
        known.releasing(3);
        known.releasing(2);
        assert!(known.decide(secs(1.0)).steps.is_empty());
        known.drain(true);
        assert_eq!(known.decide(secs(1.0)).steps, [release(1), release(0)]);
        known.released(3, 70, secs(1.0));
        let all = known.decide(secs(3.0)).steps;
        assert!(
            all.iter()
                .all(|step| matches!(step, MembershipStep::Release { .. })),
            "it takes nothing: {all:?}"
        );
        known.drain(false);
        let all = known.decide(secs(9.0)).steps;
        assert!(
            !all.contains(&release(1)) && !all.contains(&release(0)),
            "it keeps its share again: {all:?}"
        );
    }

    proptest! {
        #[test]
        fn shares_are_even_and_complete(
            counts in prop::collection::btree_map(any::<u64>(), 0usize..64, 1..9),
            partitions in 1usize..65,
        ) {
            let counts: BTreeMap<NodeId, usize> =
                counts.into_iter().map(|(node, count)| (NodeId(node), count)).collect();
            let shares: Vec<(usize, usize)> =
                counts.iter().map(|(node, has)| (share(&counts, partitions, *node), *has)).collect();
            prop_assert_eq!(shares.iter().map(|(share, _)| share).sum::<usize>(), partitions);
            let (least, most) = (partitions / counts.len(), partitions.div_ceil(counts.len()));
            prop_assert!(shares.iter().all(|(share, _)| (least..=most).contains(share)));
            // No node with more partitions now gets a smaller share than one with fewer.
            for a in &shares {
                prop_assert!(shares.iter().all(|b| a.1 <= b.1 || a.0 >= b.0));
            }
        }

        // In whatever order observations arrive, the newest revision counts and nothing panics.
        #[test]
        fn what_was_heard_late_changes_nothing(
            heard in prop::collection::vec((0u8..4, 1u64..5, 1u64..50), 0..40),
        ) {
            let mut one = known(4, &[]);
            let mut two = known(4, &[]);
            // A revision belongs to one change only.
            let heard: BTreeMap<u64, (u8, u64)> = heard.into_iter().map(|(p, node, r)| (r, (p, node))).collect();
            for (revision, (partition, node)) in &heard {
                one.owner_heard(*partition, Some(holder(*node)), *revision, Duration::ZERO);
            }
            for (revision, (partition, node)) in heard.iter().rev() {
                two.owner_heard(*partition, Some(holder(*node)), *revision, Duration::ZERO);
            }
            prop_assert_eq!(one.decide(secs(1.0)).steps, two.decide(secs(1.0)).steps);
        }
    }
}
