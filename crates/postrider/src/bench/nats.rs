//! NATS servers for a measurement: processes of their own, on the disk to measure.

use super::child::ChildProcess;
use super::{http, pause, ports};
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::time::Instant;

const READY_WITHIN: Duration = Duration::from_secs(60);
const READY_EVERY: Duration = Duration::from_millis(50);
const PROGRAM: &str = "nats-server";

/// NATS servers that keep the log.
pub struct BenchNatsServers {
    pub urls: Vec<String>,
    pub monitors: Vec<String>,
    /// Empty if the servers were running before.
    processes: Vec<ChildProcess>,
}

impl BenchNatsServers {
    /// Servers at `url` that somebody else runs.
    pub fn at(url: &str) -> BenchNatsServers {
        BenchNatsServers {
            urls: vec![url.to_owned()],
            monitors: Vec::new(),
            processes: Vec::new(),
        }
    }

    /// Starts `count` servers as one cluster.
    pub async fn start(program: &Path, count: usize, always: bool, dir: &Path) -> Result<BenchNatsServers> {
        let addresses = || -> Vec<SocketAddr> { (0..count).map(|_| ports::own()).collect() };
        let (clients, monitors, routes) = (addresses(), addresses(), addresses());
        let mut processes = Vec::new();
        for n in 0..count {
            let own = dir.join(format!("nats-{n}"));
            std::fs::create_dir(&own)?;
            let config = config(n, always, &own.join("data"), clients[n], monitors[n], &routes);
            let (file, log) = (own.join("server.conf"), own.join("server.log"));
            std::fs::write(&file, config)?;
            let mut command = Command::new(program);
            command.arg("-c").arg(&file).stdin(Stdio::null());
            let log = File::create(log)?;
            command.stdout(log.try_clone()?).stderr(log);
            let running = ChildProcess::other(command);
            processes.push(running.with_context(|| format!("starting {}", program.display()))?);
        }
        let mut nats = BenchNatsServers {
            urls: clients.iter().map(|at| format!("nats://{at}")).collect(),
            monitors: monitors.iter().map(|at| format!("http://{at}")).collect(),
            processes,
        };
        let began = Instant::now();
        for (n, monitor) in monitors.iter().enumerate() {
            loop {
                let answer = http::call(*monitor, "GET", "/healthz").await;
                if answer.is_ok_and(|answer| answer.status == 200) {
                    break;
                }
                let log = dir.join(format!("nats-{n}/server.log"));
                ensure!(
                    !nats.processes[n].has_ended(),
                    "{PROGRAM} ended at once{}",
                    said(&log)
                );
                if began.elapsed() > READY_WITHIN {
                    bail!("{PROGRAM} was not ready within {READY_WITHIN:?}{}", said(&log));
                }
                pause(READY_EVERY).await;
            }
        }
        Ok(nats)
    }

    /// Processes whose CPU time is counted as the log's.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(ChildProcess::pid).collect()
    }

    pub fn is_ours(&self) -> bool {
        !self.processes.is_empty()
    }
}

/// Path of the server program: the given one, the one that the tests installed, or the one on the
/// path.
pub fn find(said: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = said {
        ensure!(
            path.is_file(),
            "--nats-server: there is no file {}",
            path.display()
        );
        return Ok(path.to_owned());
    }
    let clients = std::env::var_os("POSTRIDER_CLIENTS").map(|dir| PathBuf::from(dir).join("venv/bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = clients
        .into_iter()
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join(PROGRAM))
        .find(|file| file.is_file());
    found.with_context(|| {
        format!("{PROGRAM} is not on the path: say --nats-server PATH, or --nats URL of one that runs")
    })
}

fn config(
    n: usize,
    always: bool,
    data: &Path,
    client: SocketAddr,
    monitor: SocketAddr,
    routes: &[SocketAddr],
) -> String {
    let sync = if always { ", sync_interval: always" } else { "" };
    let mut config = format!(
        "server_name: n{n}\nlisten: \"{client}\"\nhttp: \"{monitor}\"\n\
         jetstream {{ store_dir: {data:?}, max_memory_store: 64MB, max_file_store: 100GB{sync} }}\n"
    );
    if routes.len() > 1 {
        let all: Vec<String> = routes.iter().map(|at| format!("\"nats://{at}\"")).collect();
        config += &format!(
            "cluster {{ name: bench, listen: \"{}\", routes: [ {} ] }}\n",
            routes[n],
            all.join(", ")
        );
    }
    config
}

/// The last lines of a server's log, for an error message.
fn said(log: &Path) -> String {
    const LINES_MAX: usize = 10;
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LINES_MAX)..];
    last.iter().map(|line| format!("\n  {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_know_each_other_only_if_there_are_several() {
        let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let alone = config(0, false, Path::new("/d"), at(1), at(2), &[at(3)]);
        assert!(
            !alone.contains("cluster") && !alone.contains("sync_interval"),
            "{alone}"
        );
        let one = config(1, true, Path::new("/d"), at(1), at(2), &[at(3), at(4), at(5)]);
        assert!(one.contains("sync_interval: always"), "{one}");
        assert!(one.contains("listen: \"127.0.0.1:4\""), "{one}");
        assert!(
            one.contains("\"nats://127.0.0.1:3\", \"nats://127.0.0.1:4\""),
            "{one}"
        );
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let refused = find(Some(Path::new("/nowhere/nats-server"))).unwrap_err();
        assert!(refused.to_string().contains("/nowhere/nats-server"), "{refused}");
    }
}
