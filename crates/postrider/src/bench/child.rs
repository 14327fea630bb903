//! Processes of a measurement: the bench's parts run apart from the server so that its CPU time is
//! counted alone.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

const ANNOUNCED: &str = "listening on ";

/// A child process, killed and reaped when dropped.
pub struct ChildProcess {
    child: Child,
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Both calls fail only for a child that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ChildProcess {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Starts this program again as one of the bench's own parts.
    pub fn part(subcommand: &str, args: &[String]) -> Result<ChildProcess> {
        let mut command = this_program()?;
        command.arg(subcommand).args(args);
        // The part holds the other end of this pipe and exits when it closes, even if the bench is
        // killed.
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn();
        let child = child.with_context(|| format!("starting {subcommand}"))?;
        Ok(ChildProcess { child })
    }

    /// Starts this program as the server under test, with its output in `log`.
    pub fn server(args: &[&std::ffi::OsStr], log: &Path) -> Result<ChildProcess> {
        let log = File::create(log).context("creating the server's log")?;
        let mut command = this_program()?;
        command.args(args).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        // The server is measured as configured here, not as configured for this shell.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("POSTRIDER_") {
                command.env_remove(name);
            }
        }
        let child = command.spawn().context("starting the server")?;
        Ok(ChildProcess { child })
    }

    /// Starts another program as configured by the caller.
    pub fn other(mut command: Command) -> Result<ChildProcess> {
        let child = command.spawn()?;
        Ok(ChildProcess { child })
    }

    /// Kills the process (`kill -9`) and waits for it.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The address that the part announces once it listens.
    pub async fn address(&mut self) -> Result<SocketAddr> {
        let stdout = self.child.stdout.take().expect("parts have a piped stdout");
        let first_line = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line).map(|_| line)
        });
        let line = first_line.await??;
        let Some(address) = line.trim().strip_prefix(ANNOUNCED) else {
            bail!("a part of the bench did not start");
        };
        Ok(address.parse()?)
    }

    /// Everything the part prints until it ends.
    pub async fn output(mut self) -> Result<String> {
        let mut stdout = self.child.stdout.take().expect("parts have a piped stdout");
        let all = tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).map(|_| text)
        });
        let text = all.await??;
        let status = self.child.wait()?;
        if !status.success() {
            bail!("a part of the bench ended with {status}");
        }
        Ok(text)
    }
}

fn this_program() -> Result<Command> {
    let path = std::env::current_exe().context("finding this program")?;
    Ok(Command::new(path))
}

/// Tells the bench where this part listens.
pub fn announce(address: SocketAddr) {
    println!("{ANNOUNCED}{address}");
}

/// Ends this process when its standard input does, which the bench holds open for as long as it
/// lives.
pub fn exit_with_parent() {
    std::thread::spawn(|| {
        let mut input = std::io::stdin().lock();
        // Nothing is ever sent: this returns at the end of input, or on an error that means the
        // same.
        let _ = std::io::copy(&mut input, &mut std::io::sink());
        std::process::exit(0);
    });
}
