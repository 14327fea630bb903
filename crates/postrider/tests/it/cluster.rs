//! Several nodes on one NATS cluster, all of them processes on this machine, with links between them that can be cut.

pub mod link;
pub mod nats;

use crate::server::{Server, Setup};
use crate::wait;
use link::{Link, Roads, Weather};
use nats::{NatsServers, USER};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// How a cluster is set up.
pub struct Plan {
    pub nats: usize,
    pub nodes: usize,
    pub partitions: u8,
    /// Of the settings of every node.
    pub lease: &'static str,
    /// More of every node's configuration, to stand before the rest.
    pub config: String,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            nats: 1,
            nodes: 2,
            partitions: 4,
            lease: "2s",
            config: String::new(),
        }
    }
}

/// The nodes and what they stand on.
pub struct Crew {
    pub nodes: Vec<Server>,
    /// From each node to each NATS server.
    links: Vec<Vec<Link>>,
    pub nats: NatsServers,
    _roads: Roads,
}

impl Crew {
    /// Starts everything; none, with a notice, if there is no NATS server on this machine.
    pub fn start(plan: &Plan) -> Option<Crew> {
        let program = nats::installed()?;
        let roads = Roads::new();
        let nats = NatsServers::start(&program, plan.nats, &roads);
        let mut crew = Crew {
            nodes: Vec::new(),
            links: Vec::new(),
            nats,
            _roads: roads,
        };
        for _ in 0..plan.nodes {
            crew.add(plan);
        }
        crew.shared_evenly();
        Some(crew)
    }

    /// One more node.
    pub fn add(&mut self, plan: &Plan) {
        let to_nats = |server: &nats::Nats| self._roads.link(server.client);
        let links: Vec<Link> = self.nats.servers.iter().map(to_nats).collect();
        let config = config(plan, self.nodes.len(), &links, &self.nats.monitor_urls());
        self.links.push(links);
        self.nodes.push(Setup::config(config).start());
    }

    /// Between one node and one NATS server.
    pub fn weather(&self, node: usize, nats: usize, weather: Weather) {
        self.links[node][nats].set(weather);
    }

    /// Waits until the nodes that run share all partitions, none with two more than another.
    #[track_caller]
    pub fn shared_evenly(&self) {
        let running: Vec<&Server> = self.nodes.iter().filter(|node| node.is_running()).collect();
        let even = wait::is_true_in_time(|| {
            let owned: Vec<(u64, u64)> = running.iter().filter_map(|node| partitions(node)).collect();
            let shares: BTreeSet<u64> = owned.iter().map(|(owned, _)| *owned).collect();
            owned.len() == running.len()
                && owned.iter().map(|(owned, _)| owned).sum::<u64>() == owned[0].1
                && shares.last().unwrap_or(&0) - shares.first().unwrap_or(&0) <= 1
        });
        let shown: Vec<Value> = running.iter().map(|node| node.health()["store"].take()).collect();
        assert!(even, "the partitions are not shared: {shown:#?}");
    }

    /// Keeps what everybody has logged, to be read after a failure.
    pub fn keep_logs(&self, directory: &Path) {
        std::fs::create_dir_all(directory).expect("a directory can be made");
        for (n, node) in self.nodes.iter().enumerate() {
            let _ = std::fs::write(directory.join(format!("node-{n}.log")), node.log().join("\n"));
        }
        for (n, server) in self.nats.servers.iter().enumerate() {
            let _ = std::fs::copy(server.log_file(), directory.join(format!("nats-{n}.log")));
        }
    }
}

/// How many partitions it serves, and of how many, as it says itself.
pub fn partitions(node: &Server) -> Option<(u64, u64)> {
    let partitions = &node.health()["store"]["partitions"];
    Some((partitions["owned"].as_u64()?, partitions["total"].as_u64()?))
}

fn config(plan: &Plan, number: usize, links: &[Link], monitors: &[String]) -> String {
    let urls: Vec<String> = links
        .iter()
        .map(|link| format!("nats://{}", link.address))
        .collect();
    let Plan {
        nats,
        partitions,
        lease,
        config,
        ..
    } = plan;
    let replicas = if *nats >= 3 { 3 } else { 1 };
    format!(
        "{config}\n[store]\nkind = \"jetstream\"\n[store.jetstream]\nurls = {urls:?}\nuser = \"{USER}\"\npassword = \"{USER}\"\n\
         replicas = {replicas}\npartitions = {partitions}\nlease = \"{lease}\"\nnode_name = \"node-{number}\"\n\
         monitor_urls = {monitors:?}\n"
    )
}
