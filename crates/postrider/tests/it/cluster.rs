//! Several nodes on one NATS cluster, all of them processes on this machine, connected by links
//! that can be cut.

pub mod link;
pub mod nats;

use crate::server::{ServerSetup, TestServer};
use crate::wait;
use link::{CuttableLink, LinkRuntime, LinkState};
use nats::{NatsServers, USER};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Layout and settings of a cluster.
pub struct ClusterPlan {
    pub nats: usize,
    pub nodes: usize,
    pub partitions: u8,
    /// Lease setting of every node.
    pub lease: &'static str,
    /// Further configuration of every node, which is put before the rest.
    pub config: String,
}

impl Default for ClusterPlan {
    fn default() -> ClusterPlan {
        ClusterPlan {
            nats: 1,
            nodes: 2,
            partitions: 4,
            lease: "2s",
            config: String::new(),
        }
    }
}

/// The nodes with their links and NATS servers.
pub struct TestCluster {
    pub nodes: Vec<TestServer>,
    /// Links from each node to each NATS server.
    links: Vec<Vec<CuttableLink>>,
    pub nats: NatsServers,
    _roads: LinkRuntime,
}

impl TestCluster {
    /// Starts everything; `None`, with a notice, if there is no NATS server on this machine.
    pub fn start(plan: &ClusterPlan) -> Option<TestCluster> {
        let program = nats::installed()?;
        let roads = LinkRuntime::new();
        let nats = NatsServers::start(&program, plan.nats, &roads);
        let mut crew = TestCluster {
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

    /// Adds a node.
    pub fn add(&mut self, plan: &ClusterPlan) {
        let to_nats = |server: &nats::NatsServerProcess| self._roads.link(server.client);
        let links: Vec<CuttableLink> = self.nats.servers.iter().map(to_nats).collect();
        let config = config(plan, self.nodes.len(), &links, &self.nats.monitor_urls());
        self.links.push(links);
        self.nodes.push(ServerSetup::config(config).start());
    }

    /// Sets the state of the link between a node and a NATS server.
    pub fn weather(&self, node: usize, nats: usize, weather: LinkState) {
        self.links[node][nats].set(weather);
    }

    /// Waits until the running nodes own all partitions, with numbers that differ by at most one.
    #[track_caller]
    pub fn shared_evenly(&self) {
        let running: Vec<&TestServer> = self.nodes.iter().filter(|node| node.is_running()).collect();
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

    /// Writes the logs of all processes to files, to be read after a failure.
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

/// Number of partitions that the node serves, and their total, as it reports itself.
pub fn partitions(node: &TestServer) -> Option<(u64, u64)> {
    let partitions = &node.health()["store"]["partitions"];
    Some((partitions["owned"].as_u64()?, partitions["total"].as_u64()?))
}

fn config(plan: &ClusterPlan, number: usize, links: &[CuttableLink], monitors: &[String]) -> String {
    let urls: Vec<String> = links
        .iter()
        .map(|link| format!("nats://{}", link.address))
        .collect();
    let ClusterPlan {
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
