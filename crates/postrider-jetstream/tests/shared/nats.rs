//! A real nats-server for each test, in a directory of its own.
//!
//! `tests/clients/setup.sh DIR` installs it; `POSTRIDER_CLIENTS=DIR` says where it is.

use postrider_jetstream::connect::{Connection, Settings};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

pub struct Nats {
    program: PathBuf,
    directory: tempfile::TempDir,
    port: u16,
    child: Mutex<Option<Child>>,
}

impl Nats {
    pub fn start() -> Nats {
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
        // Free until somebody else takes it; a restart needs the same again.
        let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = probe.local_addr().unwrap().port();
        drop(probe);
        let nats = Nats {
            program,
            directory: tempfile::tempdir().unwrap(),
            port,
            child: Mutex::default(),
        };
        nats.run();
        nats
    }

    /// Starts it, again if it was killed.
    pub fn run(&self) {
        let child = Command::new(&self.program)
            .args(["-a", "127.0.0.1", "-p", &self.port.to_string(), "-js", "-sd"])
            .arg(self.directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        *self.child.lock().unwrap() = Some(child);
    }

    /// As kill -9 does.
    pub fn kill(&self) {
        if let Some(mut child) = self.child.lock().unwrap().take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// A connection as soon as the server answers.
    pub async fn connect(&self, prefix: &str) -> Connection {
        connect(self.port, prefix).await
    }
}

async fn connect(port: u16, prefix: &str) -> Connection {
    let settings = Settings {
        urls: vec![format!("nats://127.0.0.1:{port}")],
        prefix: prefix.into(),
        ..Settings::default()
    };
    let connecting = async {
        loop {
            match Connection::open(&settings, "test").await {
                Ok(connection) => return connection,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    let connected = tokio::time::timeout(Duration::from_secs(30), connecting).await;
    connected.expect("the server answers")
}

/// A way to a server that can be cut.
pub struct Line {
    port: u16,
    whole: watch::Sender<bool>,
    _relaying: JoinSet<()>,
}

impl Line {
    pub async fn to(nats: &Nats) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let whole = watch::Sender::new(true);
        let (server, state) = (nats.port, whole.subscribe());
        let mut relaying = JoinSet::new();
        relaying.spawn(async move {
            let mut lines = JoinSet::new();
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let mut state = state.clone();
                lines.spawn(async move {
                    let relay = async {
                        if let Ok(mut far) = TcpStream::connect(("127.0.0.1", server)).await {
                            let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                        }
                    };
                    tokio::select! {
                        biased;
                        _ = state.wait_for(|whole| !whole) => {}
                        () = relay => {}
                    }
                });
            }
        });
        Line {
            port,
            whole,
            _relaying: relaying,
        }
    }

    pub async fn connect(&self, prefix: &str) -> Connection {
        connect(self.port, prefix).await
    }

    /// Nothing goes through until it is mended.
    pub fn cut(&self) {
        self.whole.send_replace(false);
    }

    pub fn mend(&self) {
        self.whole.send_replace(true);
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.kill();
    }
}
