//! NATS servers as processes, each in a directory of its own.

use super::link::{CuttableLink, LinkRuntime, LinkState};
use crate::client::TestConnection;
use crate::{ports, signals, wait};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// User name and password of all servers.
pub const USER: &str = "app";
/// How long a monitoring endpoint may take to answer.
const MONITOR_PATIENCE: Duration = Duration::from_secs(2);
/// Three servers on a busy machine may take long to elect a leader.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// Path of the server program; `None`, with a notice, if the variable is not set.
pub fn installed() -> Option<PathBuf> {
    let Some(directory) = std::env::var_os("POSTRIDER_CLIENTS").map(PathBuf::from) else {
        println!("skipped: run tests/clients/setup.sh DIR and set POSTRIDER_CLIENTS=DIR to test clusters");
        return None;
    };
    let program = directory.join("venv/bin/nats-server");
    assert!(
        program.exists(),
        "{} is not there: run tests/clients/setup.sh {}",
        program.display(),
        directory.display()
    );
    Some(program)
}

fn addresses(count: usize) -> Vec<SocketAddr> {
    (0..count).map(|_| ports::own()).collect()
}

/// A NATS server process, killed on drop.
pub struct NatsServerProcess {
    program: PathBuf,
    directory: TempDir,
    pub client: SocketAddr,
    pub monitor: SocketAddr,
    running: Option<Child>,
}

/// A single NATS server, or a cluster of them.
pub struct NatsServers {
    pub servers: Vec<NatsServerProcess>,
    /// Links from one server to another, which both may use once connected.
    routes: BTreeMap<(usize, usize), CuttableLink>,
}

impl NatsServers {
    /// Starts `count` servers whose links to each other run on `roads`.
    pub fn start(program: &Path, count: usize, roads: &LinkRuntime) -> NatsServers {
        let (clients, monitors, cluster) = (addresses(count), addresses(count), addresses(count));
        let mut routes = BTreeMap::new();
        for from in 0..count {
            for to in (0..count).filter(|to| *to != from) {
                routes.insert((from, to), roads.link(cluster[to]));
            }
        }
        let mut servers = Vec::new();
        for n in 0..count {
            let directory = TempDir::new().expect("a temporary directory");
            let data = directory.path().join("data");
            let mut text = format!(
                "server_name: n{n}\nlisten: \"{}\"\nhttp: \"{}\"\n\
                 jetstream {{ store_dir: {data:?}, max_memory_store: 64MB, max_file_store: 10GB }}\n\
                 accounts {{\n SYS {{ users: [ {{ user: sys, password: sys }} ] }}\n \
                 APP {{ jetstream: enabled, users: [ {{ user: {USER}, password: {USER} }} ] }}\n}}\n\
                 system_account: SYS\n",
                clients[n], monitors[n]
            );
            if count > 1 {
                let ways: Vec<String> = (0..count)
                    .filter_map(|to| routes.get(&(n, to)))
                    .map(|link| format!("\"nats://{}\"", link.address))
                    .collect();
                // The servers advertise port 9, which is unused, so that they learn no address but
                // the links'.
                text += &format!(
                    "cluster {{ name: C, listen: \"{}\", advertise: \"127.0.0.1:9\", no_advertise: true, \
                     routes: [ {} ] }}\n",
                    cluster[n],
                    ways.join(", ")
                );
            }
            std::fs::write(directory.path().join("server.conf"), text).expect("it can be written");
            servers.push(NatsServerProcess {
                program: program.to_owned(),
                directory,
                client: clients[n],
                monitor: monitors[n],
                running: None,
            });
        }
        for server in &mut servers {
            server.start();
        }
        let started = NatsServers { servers, routes };
        assert!(
            wait::is_true_within(START_PATIENCE, || started
                .servers
                .iter()
                .all(NatsServerProcess::is_healthy)),
            "the NATS servers do not find each other"
        );
        started
    }

    /// Sets the state of the links between two servers, in both directions.
    pub fn weather(&self, one: usize, other: usize, weather: LinkState) {
        for ends in [(one, other), (other, one)] {
            self.routes[&ends].set(weather);
        }
    }

    /// Monitoring addresses for a configuration.
    pub fn monitor_urls(&self) -> Vec<String> {
        let url = |server: &NatsServerProcess| format!("http://{}", server.monitor);
        self.servers.iter().map(url).collect()
    }
}

impl NatsServerProcess {
    /// Starts the server on its existing data, without waiting for it.
    pub fn start(&mut self) {
        assert!(self.running.is_none(), "it is running already");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_file())
            .expect("a log file");
        let child = Command::new(&self.program)
            .arg("-c")
            .arg(self.directory.path().join("server.conf"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the NATS server starts");
        self.running = Some(child);
    }

    pub fn log_file(&self) -> PathBuf {
        self.directory.path().join("server.log")
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.running.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn hold(&self) {
        signals::hold(self.child());
    }

    pub fn go_on(&self) {
        signals::go_on(self.child());
    }

    fn child(&self) -> &Child {
        self.running.as_ref().expect("the server runs")
    }

    /// Answer of the server's monitoring endpoint.
    pub fn ask(&self, path: &str) -> Option<Value> {
        let mut connection = TestConnection::open_within(self.monitor, MONITOR_PATIENCE).ok()?;
        // Answers without a length end with the connection, which this client does not support.
        let answer = connection.send("GET", path, &[], b"").ok()?;
        (answer.status == 200).then(|| serde_json::from_slice(&answer.body).ok())?
    }

    /// Whether the server reports itself healthy: it has a leader and its streams are current.
    pub fn is_healthy(&self) -> bool {
        self.ask("/healthz")
            .is_some_and(|health| health["status"] == "ok")
    }
}

impl Drop for NatsServerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
