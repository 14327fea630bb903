//! A NATS server as a child process.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The server program; none, with a notice, if nobody says where it is.
pub fn installed() -> Option<PathBuf> {
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

/// A server on a free port of this machine, its data in a temporary directory. It is killed when dropped.
pub struct Server {
    program: PathBuf,
    directory: TempDir,
    port: u16,
    /// More of its configuration.
    more: String,
    running: Option<Child>,
}

impl Server {
    pub fn start(program: PathBuf) -> Server {
        Server::start_with(program, "")
    }

    pub fn start_with(program: PathBuf, more: &str) -> Server {
        let free = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = free.local_addr().expect("it is bound").port();
        drop(free);
        let mut server = Server {
            program,
            directory: TempDir::new().expect("a temporary directory"),
            port,
            more: more.into(),
            running: None,
        };
        server.run();
        server
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Starts it on the data that it has, and waits until it answers.
    pub fn run(&mut self) {
        let config = self.directory.path().join("server.conf");
        let data = self.directory.path().join("data");
        let text = format!(
            "listen: 127.0.0.1:{}\njetstream {{ store_dir: {:?}, max_memory_store: 64MB, max_file_store: 10GB }}\n{}\n",
            self.port, data, self.more
        );
        std::fs::write(&config, text).expect("the configuration can be written");
        let child = Command::new(&self.program)
            .arg("-c")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        self.running = Some(child);
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
        let id = self.running.as_ref().expect("it runs").id().to_string();
        let sent = Command::new("kill").arg(signal).arg(id).status();
        assert!(sent.expect("kill runs").success());
    }

    /// As if the machine had gone, but for what the operating system has taken over.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.running.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn pause(&self) {
        self.signal("-STOP");
    }

    pub fn resume(&self) {
        self.signal("-CONT");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
