//! Storage servers as child processes.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use tempfile::TempDir;

/// Where servers and clients are installed; none, with a notice, if the environment does not say.
pub fn installed() -> Option<PathBuf> {
    let directory = std::env::var_os("POSTRIDER_CLIENTS").map(PathBuf::from);
    if directory.is_none() {
        println!("skipped: run tests/clients/setup.sh DIR and set POSTRIDER_CLIENTS=DIR to test real stores");
    }
    directory
}

/// A server on a free port of this machine with its data in a temporary directory. Killed when
/// dropped.
pub struct StorageServer {
    clients: PathBuf,
    kind: StorageServerKind,
    directory: TempDir,
    /// The files of its certificate and private key, for TLS.
    certificate: Option<(PathBuf, PathBuf)>,
    port: u16,
    running: Option<(Child, JoinHandle<()>)>,
}

#[derive(Clone, Copy)]
enum StorageServerKind {
    Azurite,
    Moto,
}

impl StorageServer {
    pub fn azurite(clients: &Path) -> StorageServer {
        StorageServer::start_new(clients, StorageServerKind::Azurite, None)
    }

    pub fn azurite_with_tls(clients: &Path, certificate: PathBuf, key: PathBuf) -> StorageServer {
        StorageServer::start_new(clients, StorageServerKind::Azurite, Some((certificate, key)))
    }

    /// moto: AWS in memory. It accepts all credentials until told otherwise.
    pub fn moto(clients: &Path) -> StorageServer {
        StorageServer::start_new(clients, StorageServerKind::Moto, None)
    }

    fn start_new(
        clients: &Path,
        kind: StorageServerKind,
        certificate: Option<(PathBuf, PathBuf)>,
    ) -> StorageServer {
        let mut server = StorageServer {
            clients: clients.to_owned(),
            kind,
            directory: TempDir::new().expect("a temporary directory"),
            certificate,
            port: 0,
            running: None,
        };
        server.start();
        server
    }

    pub fn url(&self) -> String {
        let scheme = if self.certificate.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    fn command(&self) -> Command {
        let port = self.port.to_string();
        match self.kind {
            StorageServerKind::Azurite => {
                let program = self.clients.join("js/node_modules/azurite/dist/src/blob/main.js");
                let mut command = Command::new("node");
                command
                    .arg(program)
                    .args(["--blobHost", "127.0.0.1", "--blobPort", &port])
                    .arg("--location")
                    .arg(self.directory.path())
                    .args(["--silent", "--disableTelemetry"]);
                if let Some((certificate, key)) = &self.certificate {
                    command.arg("--cert").arg(certificate).arg("--key").arg(key);
                }
                command
            }
            StorageServerKind::Moto => {
                let mut command = Command::new(self.clients.join("venv/bin/python"));
                command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port]);
                command
            }
        }
    }

    /// Starts the server, on its earlier port if it had one, and waits until it reports its
    /// address.
    pub fn start(&mut self) {
        assert!(self.running.is_none());
        // Both servers report it on one of the two streams.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mut command = self.command();
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone().expect("a pipe"))
            .stderr(writer);
        let child = command.spawn().expect("the server can be started");
        drop(command);
        let mut lines = BufReader::new(reader).lines();
        let mut told = String::new();
        self.port = loop {
            let Some(Ok(line)) = lines.next() else {
                panic!("the server does not start: {told}");
            };
            let port = line
                .rsplit_once("://127.0.0.1:")
                .and_then(|(_, port)| port.trim().parse().ok());
            if let Some(port) = port {
                break port;
            }
            told.push_str(&line);
            told.push('\n');
        };
        let rest = std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        self.running = Some((child, rest));
    }

    /// Kills the server, as a power cut would.
    pub fn kill(&mut self) {
        if let Some((mut child, rest)) = self.running.take() {
            child.kill().expect("it is our child");
            child.wait().expect("it is our child");
            rest.join().expect("reading does not panic");
        }
    }

    /// Runs one of the scripts with the installed Python and returns its output.
    pub fn python(&self, script: &str, arguments: &[&str]) -> String {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/python");
        let output = Command::new(self.clients.join("venv/bin/python"))
            .arg(scripts.join(script))
            .args(arguments)
            .output()
            .expect("the client can be run");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        String::from_utf8(output.stdout).expect("scripts print UTF-8")
    }
}

impl Drop for StorageServer {
    fn drop(&mut self) {
        self.kill();
    }
}
