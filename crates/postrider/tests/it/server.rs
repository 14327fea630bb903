//! The program under test, as a child process in a directory of its own.

use crate::client::{HeaderPairs, HttpTestAnswer, TestConnection};
use crate::{ports, signals, wait};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tempfile::TempDir;

pub const EDGE_VERSION: &str = "api-version=2019-01-01-preview";
pub const JSON: (&str, &str) = ("content-type", "application/json");

/// Settings with which a server is started.
#[derive(Default)]
pub struct ServerSetup {
    pub config: String,
    pub env: Vec<(&'static str, String)>,
    /// Flags that replace the default ones, which make it listen on its own ports.
    pub flags: Option<Vec<String>>,
    /// Further flags.
    pub more: Vec<&'static str>,
    /// Limit of open files, and so of connections.
    pub open_files_max: Option<u32>,
    /// The umask to start with, as the `umask` command takes it.
    pub umask: Option<&'static str>,
    /// Data directory, instead of a temporary one.
    pub data_dir: Option<PathBuf>,
    /// Leaves declared topics as written: the edge API does not reach them.
    pub managed_topics: bool,
}

/// The configuration with `edge = true` in every declared topic.
fn with_edge_topics(config: &str) -> String {
    let mut written = String::new();
    for line in config.split_inclusive('\n') {
        written.push_str(line);
        if line.trim() == "[[topic]]" {
            written.push_str("edge = true\n");
        }
    }
    written
}

impl ServerSetup {
    pub fn config(text: impl Into<String>) -> ServerSetup {
        ServerSetup {
            config: text.into(),
            ..ServerSetup::default()
        }
    }

    /// A setup with a clock that moves only on request, and no jitter.
    pub fn test_clock(config: impl Into<String>) -> ServerSetup {
        let config = config.into();
        ServerSetup {
            config: format!("retry.jitter_percent = 0\n{config}"),
            more: vec!["--test-clock"],
            ..ServerSetup::default()
        }
    }

    /// Sets the profile.
    pub fn profile(mut self, name: &'static str) -> ServerSetup {
        self.more.extend(["--profile", name]);
        self
    }

    /// Sets an environment variable.
    pub fn with(mut self, name: &'static str, value: &str) -> ServerSetup {
        self.env.push((name, value.to_owned()));
        self
    }

    /// `postrider serve` with this setup, in `directory`.
    fn command(&self, directory: &Path, http: &str, https: &str) -> Command {
        let file = directory.join("postrider.toml");
        // Most tests publish through the edge API, which reaches only topics with `edge`.
        let config = match self.managed_topics {
            true => self.config.clone(),
            false => with_edge_topics(&self.config),
        };
        std::fs::write(&file, config).expect("a temporary directory can be written");
        let data_dir = self.data_dir.clone().unwrap_or_else(|| directory.join("data"));
        let program = env!("CARGO_BIN_EXE_postrider");
        let files = self.open_files_max.map(|max| format!("ulimit -n {max}; "));
        let mask = self.umask.map(|mask| format!("umask {mask}; "));
        let mut command = match [files, mask] {
            [None, None] => Command::new(program),
            settings => {
                let settings: String = settings.into_iter().flatten().collect();
                let mut shell = Command::new("/bin/sh");
                shell.args(["-c", &format!("{settings}exec \"$0\" \"$@\""), program]);
                shell
            }
        };
        // The environment of the tests must not affect the program. The tests read its log as text.
        command
            .env_clear()
            .env("POSTRIDER_LOG__FORMAT", "text")
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        command
            .arg("serve")
            .arg("--config")
            .arg(&file)
            .arg("--data-dir")
            .arg(data_dir);
        match &self.flags {
            Some(flags) => command.args(flags),
            None => command.args(["--http", http, "--https", https]),
        };
        command.args(&self.more);
        command.current_dir(directory);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn start(self) -> TestServer {
        let directory = TempDir::new().expect("a temporary directory");
        let mut server = TestServer {
            setup: self,
            directory,
            http: ports::own(),
            https: ports::own(),
            running: None,
            log: Arc::default(),
            log_from: 0,
        };
        server.start();
        server
    }

    /// Runs a command that must end by itself.
    pub fn run(self) -> Output {
        let directory = TempDir::new().expect("a temporary directory");
        let mut command = self.command(directory.path(), "127.0.0.1:0", "127.0.0.1:0");
        let child = command.spawn().expect("the program can be started");
        finish(child)
    }

    /// Message with which the server refuses to start.
    #[track_caller]
    pub fn refusal(self) -> String {
        let output = self.run();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}");
        text
    }
}

/// Output of the child, which must end in time.
#[track_caller]
fn finish(mut child: Child) -> Output {
    let ended = || child.try_wait().expect("a child can be waited for").is_some();
    if !wait::is_true_in_time(ended) {
        child.kill().expect("a child can be killed");
        let output = child.wait_with_output().expect("a child has output");
        panic!("still running: {}", String::from_utf8_lossy(&output.stderr));
    }
    child.wait_with_output().expect("a child has output")
}

/// A server in its own directory, killed on drop.
pub struct TestServer {
    setup: ServerSetup,
    directory: TempDir,
    pub http: SocketAddr,
    pub https: SocketAddr,
    running: Option<(Child, JoinHandle<()>)>,
    log: Arc<Mutex<Vec<String>>>,
    /// Index of the first log line of the running process.
    log_from: usize,
}

impl TestServer {
    /// A server with the default configuration.
    pub fn start_plain() -> TestServer {
        ServerSetup::default().start()
    }

    /// Starts the server, or starts it again in the same place and on the same ports. Returns when
    /// it is ready.
    #[track_caller]
    pub fn start(&mut self) {
        self.launch();
        wait::until("the server is ready", || {
            if let Some(status) = self.status() {
                panic!("ended with {status}: {:#?}", &self.log()[self.log_from..]);
            }
            self.is_ready().then_some(())
        });
    }

    /// Starts the process without waiting for anything.
    pub fn launch(&mut self) {
        assert!(self.running.is_none(), "it is running already");
        let (http, https) = (self.http.to_string(), self.https.to_string());
        let mut child = self
            .setup
            .command(self.directory.path(), &http, &https)
            .spawn()
            .expect("the program can be started");
        let lines = BufReader::new(child.stderr.take().expect("stderr is piped")).lines();
        self.log_from = self.log().len();
        let log = self.log.clone();
        let reading = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                log.lock().expect("no panic holds it").push(line);
            }
        });
        self.running = Some((child, reading));
    }

    /// Whether the server has logged that it is ready. Then its addresses are known.
    pub fn is_ready(&mut self) -> bool {
        let log = self.log.lock().expect("no panic holds it");
        let log = &log[self.log_from..];
        let is_ready = |line: &String| line.contains(" ready ") || line.contains("\"ready\"");
        if !log.iter().any(is_ready) {
            return false;
        }
        let listening = |scheme: &str| {
            let mark = format!("listening on {scheme}://");
            let found = log.iter().find_map(|line| line.split_once(&mark))?;
            found.1.split('"').next()?.trim().parse().ok()
        };
        self.http = listening("http").unwrap_or(self.http);
        self.https = listening("https").unwrap_or(self.https);
        true
    }

    /// Exit status if the process has ended by itself and was not reaped yet.
    pub fn status(&mut self) -> Option<ExitStatus> {
        let (child, _) = self.running.as_mut()?;
        child.try_wait().expect("a child can be waited for")
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Runs a second server on the same data directory, which must end by itself.
    pub fn start_second(&self, http: &str, https: &str) -> Output {
        let elsewhere = TempDir::new().expect("a temporary directory");
        let setup = ServerSetup {
            config: self.setup.config.clone(),
            data_dir: Some(self.data_dir()),
            ..ServerSetup::default()
        };
        finish(
            setup
                .command(elsewhere.path(), http, https)
                .spawn()
                .expect("the program can be started"),
        )
    }

    /// Replaces the configuration file for the next start.
    pub fn configure(&mut self, config: String) {
        self.setup.config = config;
    }

    pub fn config(&self) -> &str {
        &self.setup.config
    }

    pub fn data_dir(&self) -> PathBuf {
        self.setup
            .data_dir
            .clone()
            .unwrap_or_else(|| self.directory.path().join("data"))
    }

    pub fn ca(&self) -> PathBuf {
        self.data_dir().join("tls/ca.pem")
    }

    /// All log lines since the first start.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("no panic holds it").clone()
    }

    /// Waits for a log line that contains all of these words.
    #[track_caller]
    pub fn logged(&self, words: &[&str]) -> String {
        wait::until(&format!("{words:?} in the log"), || {
            self.log()
                .into_iter()
                .find(|line| words.iter().all(|word| line.contains(word)))
        })
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let (mut child, reading) = self.running.take().expect("it is running");
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
        reading.join().expect("reading a log does not panic");
    }

    /// Sends SIGTERM without waiting.
    pub fn terminate(&self) {
        signals::send(self.child(), Signal::TERM);
    }

    /// Sends SIGINT, as Ctrl-C does.
    pub fn interrupt(&self) {
        signals::send(self.child(), Signal::INT);
    }

    /// Suspends the process, as if the machine had no time for it.
    pub fn hold(&self) {
        signals::hold(self.child());
    }

    pub fn go_on(&self) {
        signals::go_on(self.child());
    }

    fn child(&self) -> &Child {
        let (child, _) = self.running.as_ref().expect("the server runs");
        child
    }

    /// Waits until the process has ended by itself.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        let (mut child, reading) = self.running.take().expect("it is running");
        let status = wait::until("the server ends", || {
            child.try_wait().expect("a child can be waited for")
        });
        reading.join().expect("reading a log does not panic");
        status
    }

    /// Sends SIGTERM and waits for the end.
    #[track_caller]
    pub fn stop(&mut self) {
        self.terminate();
        assert_eq!(self.ended().code(), Some(0), "{:#?}", self.log());
    }

    /// Resident memory in bytes.
    pub fn resident(&self) -> u64 {
        let (child, _) = self.running.as_ref().expect("it is running");
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).expect("Linux says");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .expect("it has memory");
        let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
        kilobytes * 1024
    }

    pub fn connect(&self) -> TestConnection {
        TestConnection::open(self.http).expect("the server listens")
    }

    pub fn send(
        &self,
        method: &str,
        target: &str,
        headers: HeaderPairs<'_>,
        body: impl AsRef<[u8]>,
    ) -> HttpTestAnswer {
        let answer = self.connect().send(method, target, headers, body.as_ref());
        answer.unwrap_or_else(|e| panic!("{method} {target}: {e}"))
    }

    /// Sends a request to the edge API.
    pub fn edge(&self, method: &str, path: &str, body: &Value) -> HttpTestAnswer {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        self.send(method, &format!("{path}?{EDGE_VERSION}"), &[JSON], body)
    }

    #[track_caller]
    pub fn put_topic(&self, topic: &str) {
        self.edge("PUT", &format!("/topics/{topic}"), &Value::Null)
            .expect(200);
    }

    /// Creates a subscription with further properties, which may be null.
    #[track_caller]
    pub fn subscribe(&self, topic: &str, name: &str, url: &str, properties: Value) {
        let mut all = json!({"destination": {"endpointType": "WebHook", "properties": {"endpointUrl": url}}});
        merge(&mut all, properties);
        let path = format!("/topics/{topic}/eventSubscriptions/{name}");
        self.edge("PUT", &path, &json!({"properties": all})).expect(200);
    }

    /// Publishes events through the edge API.
    #[track_caller]
    pub fn publish(&self, topic: &str, events: &[Value]) {
        self.edge("POST", &format!("/topics/{topic}/events"), &json!(events))
            .expect(200);
    }

    /// Deletes a subscription.
    #[track_caller]
    pub fn unsubscribe(&self, topic: &str, name: &str) {
        let path = format!("/topics/{topic}/eventSubscriptions/{name}");
        self.edge("DELETE", &path, &Value::Null).expect(200);
    }

    pub fn health(&self) -> Value {
        self.send("GET", "/healthz", &[], "").json()
    }

    /// Waits until `/healthz` shows this number.
    #[track_caller]
    pub fn counted(&self, pointer: &str, number: u64) {
        let mut last = Value::Null;
        let counted = wait::is_true_in_time(|| {
            last = self.health();
            last.pointer(pointer).and_then(Value::as_u64) == Some(number)
        });
        assert!(counted, "{pointer} never was {number}: {last}");
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some((mut child, reading)) = self.running.take() {
            let _ = child.kill();
            let _ = child.wait();
            let _ = reading.join();
        }
        if std::thread::panicking() {
            let log = self.log();
            let shown = log.len().saturating_sub(40);
            eprintln!("the server's log:\n{}", log[shown..].join("\n"));
        }
    }
}

/// Merges the members of one object into another, recursively.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {}
        (into, from) => *into = from,
    }
}

/// An event in the Event Grid schema, as the edge API accepts it.
pub fn event(id: impl Into<String>) -> Value {
    json!({
        "id": id.into(),
        "subject": "/orders/1",
        "eventType": "Orders.Created",
        "eventTime": "2026-01-02T03:04:05Z",
        "dataVersion": "1.0",
        "data": {"color": "blue"},
    })
}

/// Whether slow tests are enabled.
pub fn slow_tests() -> bool {
    std::env::var_os("POSTRIDER_SLOW_TESTS").is_some()
}
