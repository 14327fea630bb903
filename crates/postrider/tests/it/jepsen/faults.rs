//! Faults: drawn at random, injected, and healed.

use crate::cluster::TestCluster;
use crate::cluster::link::LinkState;
use crate::durability::ReproducibleRandom;
use std::time::Duration;

/// A fault that lasts for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    KillNode(usize),
    /// Two of three nodes at once.
    KillOtherNodes(usize),
    KillAllNodes,
    /// As in an update: the node is stopped and started again.
    RestartNode(usize),
    HoldNode(usize),
    /// Cuts a node off from all NATS servers.
    CutNodeOff(usize, LinkState),
    CutNodeFromOne(usize, usize, LinkState),
    KillNats(usize),
    HoldNats(usize),
    /// Cuts a NATS server off from the others; nodes still reach it.
    CutNatsOff(usize, LinkState),
    /// Cuts two NATS servers off from each other; both still reach the third.
    CutNatsApart(usize, LinkState),
    /// Leaves no quorum until the servers are back.
    KillOtherNats(usize),
    HoldOtherNats(usize),
    KillAllNats,
    /// Kills a node and the NATS server beside it.
    LoseMachine(usize),
    /// Cuts a node and its NATS server off from everything else.
    CutMachineOff(usize, LinkState),
}

const KINDS: [&str; 16] = [
    "KillNode",
    "KillOtherNodes",
    "KillAllNodes",
    "RestartNode",
    "HoldNode",
    "CutNodeOff",
    "CutNodeFromOne",
    "KillNats",
    "HoldNats",
    "CutNatsOff",
    "CutNatsApart",
    "KillOtherNats",
    "HoldOtherNats",
    "KillAllNats",
    "LoseMachine",
    "CutMachineOff",
];

fn others(one: usize) -> [usize; 2] {
    [(one + 1) % 3, (one + 2) % 3]
}

/// Draws kinds of faults so that each occurs before any is repeated.
pub struct FaultDraw {
    chance: ReproducibleRandom,
    all: Vec<&'static str>,
    left: Vec<&'static str>,
}

impl FaultDraw {
    /// A deck of the kinds named in a comma-separated list; all kinds if it is empty.
    pub fn new(seed: u64, names: &str) -> FaultDraw {
        let names: Vec<&str> = names.split(',').filter(|name| !name.is_empty()).collect();
        let unknown: Vec<_> = names.iter().filter(|name| !KINDS.contains(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?} are none of {KINDS:?}");
        let mut all = KINDS.to_vec();
        all.retain(|kind| names.is_empty() || names.contains(kind));
        FaultDraw {
            chance: ReproducibleRandom(seed),
            all,
            left: Vec::new(),
        }
    }

    pub fn draw(&mut self) -> Fault {
        if self.left.is_empty() {
            self.left = self.all.clone();
        }
        let kind = self
            .left
            .swap_remove(self.chance.below(self.left.len() as u64) as usize);
        let (one, other) = (self.chance.below(3) as usize, self.chance.below(3) as usize);
        let weathers = [
            LinkState::Lost,
            LinkState::Cut,
            LinkState::LostThere,
            LinkState::LostBack,
        ];
        let weather = weathers[self.chance.below(4) as usize];
        match kind {
            "KillNode" => Fault::KillNode(one),
            "KillOtherNodes" => Fault::KillOtherNodes(one),
            "KillAllNodes" => Fault::KillAllNodes,
            "RestartNode" => Fault::RestartNode(one),
            "HoldNode" => Fault::HoldNode(one),
            "CutNodeOff" => Fault::CutNodeOff(one, weather),
            "CutNodeFromOne" => Fault::CutNodeFromOne(one, other, weather),
            "KillNats" => Fault::KillNats(one),
            "HoldNats" => Fault::HoldNats(one),
            "CutNatsOff" => Fault::CutNatsOff(one, weather),
            "CutNatsApart" => Fault::CutNatsApart(one, weather),
            "KillOtherNats" => Fault::KillOtherNats(one),
            "HoldOtherNats" => Fault::HoldOtherNats(one),
            "KillAllNats" => Fault::KillAllNats,
            "LoseMachine" => Fault::LoseMachine(one),
            _ => Fault::CutMachineOff(one, weather),
        }
    }

    /// Duration of a fault: from less than a lease to more than two.
    pub fn lasts(&mut self) -> Duration {
        Duration::from_millis(1_000 + self.chance.below(11_000))
    }

    /// Time without faults until the next.
    pub fn pause(&mut self) -> Duration {
        Duration::from_millis(500 + self.chance.below(6_000))
    }
}

impl Fault {
    pub fn begin(self, crew: &mut TestCluster) {
        match self {
            Fault::KillNode(n) => kill_nodes(crew, &[n]),
            Fault::KillOtherNodes(n) => kill_nodes(crew, &others(n)),
            Fault::KillAllNodes => kill_nodes(crew, &[0, 1, 2]),
            Fault::RestartNode(n) => {
                if crew.nodes[n].is_running() {
                    crew.nodes[n].terminate();
                }
            }
            Fault::HoldNode(n) => {
                if crew.nodes[n].is_running() {
                    crew.nodes[n].hold();
                }
            }
            Fault::CutNodeOff(n, weather) => (0..3).for_each(|nats| crew.weather(n, nats, weather)),
            Fault::CutNodeFromOne(n, nats, weather) => crew.weather(n, nats, weather),
            Fault::KillNats(n) => kill_nats(crew, &[n]),
            Fault::KillOtherNats(n) => kill_nats(crew, &others(n)),
            Fault::KillAllNats => kill_nats(crew, &[0, 1, 2]),
            Fault::HoldNats(n) => crew.nats.servers[n].hold(),
            Fault::HoldOtherNats(n) => {
                for other in others(n) {
                    crew.nats.servers[other].hold();
                }
            }
            Fault::CutNatsOff(n, weather) => {
                for other in others(n) {
                    crew.nats.weather(n, other, weather);
                }
            }
            Fault::CutNatsApart(n, weather) => {
                let [one, other] = others(n);
                crew.nats.weather(one, other, weather);
            }
            Fault::LoseMachine(n) => {
                kill_nodes(crew, &[n]);
                kill_nats(crew, &[n]);
            }
            Fault::CutMachineOff(n, weather) => {
                for other in others(n) {
                    crew.nats.weather(n, other, weather);
                    crew.weather(n, other, weather);
                }
            }
        }
    }

    pub fn end(self, crew: &mut TestCluster) {
        match self {
            Fault::KillNode(_) | Fault::KillOtherNodes(_) | Fault::KillAllNodes | Fault::RestartNode(_) => {
                start_nodes(crew);
            }
            Fault::HoldNode(n) => {
                if crew.nodes[n].is_running() {
                    crew.nodes[n].go_on();
                }
            }
            Fault::CutNodeOff(n, _) => (0..3).for_each(|nats| crew.weather(n, nats, LinkState::Clear)),
            Fault::CutNodeFromOne(n, nats, _) => crew.weather(n, nats, LinkState::Clear),
            Fault::KillNats(_) | Fault::KillOtherNats(_) | Fault::KillAllNats => start_nats(crew),
            Fault::LoseMachine(_) => {
                start_nats(crew);
                start_nodes(crew);
            }
            Fault::HoldNats(n) => crew.nats.servers[n].go_on(),
            Fault::HoldOtherNats(n) => {
                for other in others(n) {
                    crew.nats.servers[other].go_on();
                }
            }
            Fault::CutNatsOff(..) | Fault::CutNatsApart(..) | Fault::CutMachineOff(..) => {
                for (one, other) in [(0, 1), (1, 2), (2, 0)] {
                    crew.nats.weather(one, other, LinkState::Clear);
                    crew.weather(one, other, LinkState::Clear);
                    crew.weather(other, one, LinkState::Clear);
                }
            }
        }
    }
}

fn kill_nodes(crew: &mut TestCluster, nodes: &[usize]) {
    for n in nodes {
        if crew.nodes[*n].is_running() {
            crew.nodes[*n].kill();
        }
    }
}

fn kill_nats(crew: &mut TestCluster, servers: &[usize]) {
    for n in servers {
        crew.nats.servers[*n].kill();
    }
}

fn start_nats(crew: &mut TestCluster) {
    for server in &mut crew.nats.servers {
        if !server.is_running() {
            server.start();
        }
    }
}

/// Starts the nodes that were killed.
fn start_nodes(crew: &mut TestCluster) {
    for node in &mut crew.nodes {
        if !node.is_running() {
            node.launch();
        }
    }
}

/// Restarts nodes that have exited by themselves, as a service manager would. Returns their exit
/// statuses.
pub fn revive(crew: &mut TestCluster) -> Vec<String> {
    let mut ended = Vec::new();
    for (n, node) in crew.nodes.iter_mut().enumerate() {
        if node.status().is_some() {
            let status = node.ended();
            let last = node.log().last().cloned().unwrap_or_default();
            ended.push(format!("node {n} ended with {status}: {last}"));
            node.launch();
        }
    }
    ended
}
