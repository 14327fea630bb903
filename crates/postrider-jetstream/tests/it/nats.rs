//! NATS servers as processes, each in a directory of its own.

use crate::signals;
use postrider_core::ids::Secret;
use postrider_jetstream::{JetStreamSettings, NatsAuth, NatsConnection};
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The server program; `None`, with a notice, if its location is not configured.
fn installed() -> Option<PathBuf> {
    let Some(directory) = std::env::var_os("POSTRIDER_CLIENTS").map(PathBuf::from) else {
        println!("skipped: run tests/clients/setup.sh DIR and set POSTRIDER_CLIENTS=DIR to test JetStream");
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

fn ports(count: usize) -> Vec<u16> {
    (0..count).map(|_| crate::ports::own().port()).collect()
}

/// A server on a free port of this machine. It is killed when dropped.
pub struct NatsProcess {
    program: PathBuf,
    directory: TempDir,
    pub port: u16,
    running: Option<Child>,
}

impl NatsProcess {
    /// A server without authentication; `None` if NATS is not installed.
    pub fn start() -> Option<NatsProcess> {
        NatsProcess::start_with("")
    }

    /// Like `start`, with additional configuration.
    pub fn start_with(more: &str) -> Option<NatsProcess> {
        let mut server = NatsProcess::prepare(installed()?, ports(1)[0], "", more);
        server.run();
        Some(server)
    }

    /// A server that is not started yet. `sync` is added to the settings of JetStream.
    fn prepare(program: PathBuf, port: u16, sync: &str, more: &str) -> NatsProcess {
        let directory = TempDir::new().expect("a temporary directory");
        let data = directory.path().join("data");
        let text = format!(
            "listen: 127.0.0.1:{port}\n\
             jetstream {{ store_dir: {data:?}, max_memory_store: 64MB, max_file_store: 10GB\n{sync}\n}}\n{more}\n"
        );
        std::fs::write(directory.path().join("server.conf"), text).expect("it can be written");
        NatsProcess {
            program,
            directory,
            port,
            running: None,
        }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Starts the server on its existing data, and waits until it answers.
    pub fn run(&mut self) {
        self.spawn();
        self.wait();
    }

    fn spawn(&mut self) {
        let child = Command::new(&self.program)
            .arg("-c")
            .arg(self.directory.path().join("server.conf"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        self.running = Some(child);
    }

    fn wait(&self) {
        let began = Instant::now();
        while !self.answers() {
            assert!(began.elapsed() < PATIENCE, "the server does not answer");
            std::thread::yield_now();
        }
    }

    fn answers(&self) -> bool {
        let Ok(stream) = TcpStream::connect(("127.0.0.1", self.port)) else {
            return false;
        };
        let mut line = String::new();
        let _ = stream.set_read_timeout(Some(PATIENCE));
        BufReader::new(stream)
            .read_line(&mut line)
            .is_ok_and(|_| line.starts_with("INFO"))
    }

    pub async fn connect(&self) -> NatsConnection {
        let settings = JetStreamSettings {
            urls: vec![self.url()],
            ..JetStreamSettings::default()
        };
        connect(&settings).await
    }

    fn child(&self) -> &Child {
        self.running.as_ref().expect("the server runs")
    }

    pub fn pause(&self) {
        signals::hold(self.child());
    }

    pub fn resume(&self) {
        signals::go_on(self.child());
    }

    /// Kills the server; only what the operating system has accepted survives.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.running.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for NatsProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Connects as soon as the server answers.
pub async fn connect(settings: &JetStreamSettings) -> NatsConnection {
    let connecting = async {
        loop {
            match NatsConnection::open(settings, "test").await {
                Ok(connection) => return connection,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, connecting)
        .await
        .expect("the server answers")
}

/// Servers with an account for applications, a system account, and monitoring.
pub struct NatsProcesses {
    pub all: Vec<NatsProcess>,
    monitors: Vec<u16>,
}

impl NatsProcesses {
    pub fn one() -> Option<NatsProcesses> {
        NatsProcesses::start(1, "")
    }

    /// A cluster of three servers.
    pub fn three() -> Option<NatsProcesses> {
        NatsProcesses::start(3, "")
    }

    /// `sync` is added to the settings of JetStream.
    pub fn start(count: usize, sync: &str) -> Option<NatsProcesses> {
        let program = installed()?;
        let (clients, monitors, routes) = (ports(count), ports(count), ports(count));
        let ways: Vec<String> = routes
            .iter()
            .map(|port| format!("\"nats://127.0.0.1:{port}\""))
            .collect();
        let mut all = Vec::new();
        for n in 0..count {
            let mut more = format!(
                "server_name: n{n}\nhttp: 127.0.0.1:{}\n\
                 accounts {{\n SYS {{ users: [ {{ user: sys, password: sys }} ] }}\n \
                 APP {{ jetstream: enabled, users: [ {{ user: app, password: app }} ] }}\n}}\n\
                 system_account: SYS\n",
                monitors[n]
            );
            if count > 1 {
                let (listen, ways) = (routes[n], ways.join(", "));
                more += &format!("cluster {{ name: C, listen: 127.0.0.1:{listen}, routes: [ {ways} ] }}\n");
            }
            all.push(NatsProcess::prepare(program.clone(), clients[n], sync, &more));
        }
        all.iter_mut().for_each(NatsProcess::spawn);
        all.iter().for_each(NatsProcess::wait);
        Some(NatsProcesses { all, monitors })
    }

    pub fn urls(&self) -> Vec<String> {
        self.all.iter().map(NatsProcess::url).collect()
    }

    /// Settings for an application.
    pub fn settings(&self) -> JetStreamSettings {
        JetStreamSettings {
            urls: self.urls(),
            auth: NatsAuth::Password {
                user: "app".into(),
                password: Secret::new("app"),
            },
            replicas: self.all.len(),
            ..JetStreamSettings::default()
        }
    }

    /// Connects as soon as the servers have formed a cluster: before, it has no leader and cannot
    /// create streams.
    pub async fn connect(&self) -> NatsConnection {
        let connection = connect(&self.settings()).await;
        let leading = async {
            while connection.stream("begin", vec!["begin".into()]).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, leading)
            .await
            .expect("there is a leader");
        connection
    }

    pub fn monitors(&self) -> Vec<String> {
        let url = |port: &u16| format!("http://127.0.0.1:{port}");
        self.monitors.iter().map(url).collect()
    }
}
