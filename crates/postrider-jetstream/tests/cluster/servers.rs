//! One or three NATS servers as processes, each in a directory of its own.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::Instant;

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(90);

pub struct Server {
    program: PathBuf,
    directory: TempDir,
    pub port: u16,
    pub monitor: u16,
    child: Option<Child>,
}

pub struct Servers(pub Vec<Server>);

fn program() -> PathBuf {
    #[expect(clippy::disallowed_methods, reason = "a test has no configuration")]
    let clients = std::env::var("POSTRIDER_CLIENTS").expect(
        "run tests/clients/setup.sh DIR and set POSTRIDER_CLIENTS=DIR: these tests need its nats-server",
    );
    let program = PathBuf::from(clients).join("venv/bin/nats-server");
    assert!(
        program.exists(),
        "{} is not there: run tests/clients/setup.sh",
        program.display()
    );
    program
}

/// Ports that are free until somebody else takes them; a restart needs the same again.
fn ports(count: usize) -> Vec<u16> {
    let free: Vec<TcpListener> = (0..count)
        .map(|_| TcpListener::bind(("127.0.0.1", 0)).expect("a free port"))
        .collect();
    free.iter()
        .map(|one| one.local_addr().expect("it is bound").port())
        .collect()
}

impl Servers {
    pub fn one() -> Servers {
        Servers::start(1, "")
    }

    pub fn three() -> Servers {
        Servers::start(3, "")
    }

    /// `sync` goes into the settings of JetStream.
    pub fn start(count: usize, sync: &str) -> Servers {
        let (clients, monitors, routes) = (ports(count), ports(count), ports(count));
        let all: Vec<String> = routes
            .iter()
            .map(|port| format!("\"nats://127.0.0.1:{port}\""))
            .collect();
        let mut servers = Vec::new();
        for n in 0..count {
            let directory = tempfile::tempdir().expect("a temporary directory");
            let data = directory.path().join("data");
            let mut text = format!(
                "server_name: n{n}\nlisten: 127.0.0.1:{}\nhttp: 127.0.0.1:{}\n\
                 jetstream {{ store_dir: {data:?}, max_memory_store: 64MB, max_file_store: 10GB\n{sync}\n}}\n\
                 accounts {{\n SYS {{ users: [ {{ user: sys, password: sys }} ] }}\n \
                 APP {{ jetstream: enabled, users: [ {{ user: app, password: app }} ] }}\n}}\n\
                 system_account: SYS\n",
                clients[n], monitors[n]
            );
            if count > 1 {
                let listen = routes[n];
                let all = all.join(", ");
                text += &format!("cluster {{ name: C, listen: 127.0.0.1:{listen}, routes: [ {all} ] }}\n");
            }
            std::fs::write(directory.path().join("server.conf"), text).expect("it can be written");
            servers.push(Server {
                program: program(),
                directory,
                port: clients[n],
                monitor: monitors[n],
                child: None,
            });
        }
        for server in &mut servers {
            server.run();
        }
        for server in &servers {
            server.wait();
        }
        Servers(servers)
    }

    pub fn urls(&self) -> Vec<String> {
        self.0
            .iter()
            .map(|server| format!("nats://127.0.0.1:{}", server.port))
            .collect()
    }

    pub fn monitors(&self) -> Vec<String> {
        self.0
            .iter()
            .map(|server| format!("http://127.0.0.1:{}", server.monitor))
            .collect()
    }
}

impl Server {
    pub fn run(&mut self) {
        let child = Command::new(&self.program)
            .arg("-c")
            .arg(self.directory.path().join("server.conf"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        self.child = Some(child);
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

    fn signal(&self, signal: &str) {
        let id = self.child.as_ref().expect("it runs").id().to_string();
        let sent = Command::new("kill").arg(signal).arg(id).status();
        assert!(sent.expect("kill runs").success());
    }

    pub fn pause(&self) {
        self.signal("-STOP");
    }

    pub fn resume(&self) {
        self.signal("-CONT");
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
