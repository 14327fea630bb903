//! A replay watched until it ends, or until Ctrl-C cancels it.

use super::{ROOT, read};
use crate::client::Client;
use crate::terminal::print;
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval};

const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Without a terminal a line is written no more often than this.
const LINE_EVERY: Duration = Duration::from_secs(2);
/// What shells expect of a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// A replay as the server tells of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Job {
    pub id: u64,
    pub state: String,
    pub created: String,
    pub replayed: u64,
    pub failed: u64,
    pub total: u64,
    pub request: serde_json::Value,
}

impl Job {
    fn done(&self) -> u64 {
        self.replayed + self.failed
    }

    fn is_running(&self) -> bool {
        self.state == "running"
    }

    /// Where it stands, for people.
    pub fn status(&self) -> String {
        let Job {
            replayed,
            failed,
            total,
            ..
        } = self;
        format!("replayed {replayed} of {total} dead letters, {failed} failed")
    }

    fn how_to_resume(&self) -> String {
        format!("postrider deadletters replay --resume {}", self.id)
    }
}

pub async fn get(client: &Client, id: u64) -> Result<Job> {
    read(&client.get(&format!("{ROOT}/replays/{id}")).await?)
}

pub async fn cancel(client: &Client, id: u64) -> Result<Job> {
    read(
        &client
            .post(&format!("{ROOT}/replays/{id}/cancel"), &json!({}))
            .await?,
    )
}

/// Prints how a replay stands, on the standard output.
pub fn report(job: &Job, json: bool) -> Result<()> {
    if json {
        return print(serde_json::to_string(job)?);
    }
    match job.state.as_str() {
        "done" => print(job.status()),
        state => print(format!(
            "{state}: {}; go on with: {}",
            job.status(),
            job.how_to_resume()
        )),
    }
}

pub async fn follow(client: &Client, mut job: Job, json: bool) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    let mut progress = Progress::new(&job);
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let lost = |job: &Job| {
        let how = job.how_to_resume();
        format!("the replay has been lost sight of; if it has stopped, go on with: {how}")
    };
    while job.is_running() {
        let looked = async {
            looks.tick().await;
            get(client, job.id).await
        };
        tokio::select! {
            biased;
            _ = interrupt.recv() => {
                progress.end();
                eprintln!("cancelling (Ctrl-C again leaves it running)");
                let job = tokio::select! {
                    biased;
                    _ = interrupt.recv() => return Ok(ExitCode::from(INTERRUPTED)),
                    job = cancel(client, job.id) => job?,
                };
                report(&job, json)?;
                return Ok(ExitCode::from(INTERRUPTED));
            }
            looked = looked => job = looked.with_context(|| lost(&job))?,
        }
        progress.show(&job);
    }
    progress.end();
    report(&job, json)?;
    Ok(match job.state == "done" && job.failed == 0 {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// A bar on a terminal, lines elsewhere.
enum Progress {
    Bar(ProgressBar),
    Lines { shown: u64, since: Instant },
}

impl Progress {
    fn new(job: &Job) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress::Lines {
                shown: job.done(),
                since: Instant::now(),
            };
        }
        let style = "{bar:40} {pos}/{len} {rate} {eta} left{msg}";
        let style = ProgressStyle::with_template(style)
            .expect("a fixed template")
            .with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                // There is nobody to tell if a bar cannot be drawn.
                let _ = write!(out, "{:.0}/s", state.per_sec());
            });
        let bar = ProgressBar::with_draw_target(Some(job.total), ProgressDrawTarget::stderr());
        bar.set_style(style);
        bar.set_position(job.done());
        // What an earlier run has done says nothing about the speed of this one.
        bar.reset_eta();
        Progress::Bar(bar)
    }

    fn show(&mut self, job: &Job) {
        match self {
            Progress::Bar(bar) => {
                bar.set_position(job.done());
                if job.failed > 0 {
                    bar.set_message(format!(", {} failed", job.failed));
                }
            }
            Progress::Lines { shown, since } => {
                let now = Instant::now();
                if *shown != job.done() && now - *since >= LINE_EVERY {
                    eprintln!("{}", job.status());
                    (*shown, *since) = (job.done(), now);
                }
            }
        }
    }

    fn end(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
