//! Follows a replay until it ends, or until Ctrl-C cancels it.

use super::{PendingDeadLetterCount, ROOT, read};
use crate::client::ApiClient;
use crate::terminal::{harmless, print};
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
/// How long the outcome of its events is awaited after a replay has ended.
const OUTCOME_PATIENCE: Duration = Duration::from_secs(2);
/// Least time between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(2);
/// Exit code that shells expect of a program ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

/// A replay as the server reports it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ReplayStatus {
    pub id: u64,
    pub state: String,
    pub created: String,
    pub replayed: u64,
    pub failed: u64,
    pub total: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unreadable: u64,
    #[serde(default, rename = "unreadableBlobs", skip_serializing_if = "Vec::is_empty")]
    pub unreadable_blobs: Vec<UnreadableBlobReport>,
    pub request: serde_json::Value,
    #[serde(flatten)]
    pub pending: PendingDeadLetterCount,
    /// Outcome of the replayed events, as far as the server knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<ReplayOutcomeCounts>,
}

/// Replayed events by outcome.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct ReplayOutcomeCounts {
    pub delivered: u64,
    /// Dead-lettered or dropped again.
    pub failed: u64,
    pub waiting: u64,
    /// Replayed before the server's start, or delivered by a node other than the one that was
    /// asked.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unknown: u64,
}

/// A blob whose dead letters could not all be replayed.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct UnreadableBlobReport {
    pub account: String,
    pub container: String,
    pub path: String,
    pub letters: u64,
    pub state: String,
    pub reason: String,
}

pub fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl ReplayStatus {
    fn done(&self) -> u64 {
        self.replayed + self.failed
    }

    fn is_running(&self) -> bool {
        self.state == "running"
    }

    /// Progress of the replay in words.
    pub fn status(&self) -> String {
        let ReplayStatus {
            replayed,
            failed,
            total,
            ..
        } = self;
        let replayed = format!("replayed {replayed} of {total} dead letters, {failed} failed");
        match self.outcome {
            None if self.replayed == 0 => replayed,
            None => format!("{replayed}; what became of these events is not known"),
            Some(ReplayOutcomeCounts {
                delivered,
                failed,
                waiting,
                unknown,
            }) => {
                let rest = match unknown {
                    0 => String::new(),
                    _ => format!(", of {unknown} it is not known"),
                };
                format!(
                    "{replayed}; of these events {delivered} were delivered, {failed} failed again, {waiting} still wait{rest}"
                )
            }
        }
    }

    /// Whether the outcome of some replayed events is still open.
    fn is_waiting(&self) -> bool {
        self.outcome.is_some_and(|outcome| outcome.waiting > 0)
    }

    /// Whether every selected dead letter was replayed, none is known to have failed again, and at
    /// least one has been delivered if outcomes are known.
    pub(super) fn has_succeeded(&self) -> bool {
        let nothing_arrived =
            |outcome: ReplayOutcomeCounts| outcome.delivered + outcome.unknown == 0 && outcome.waiting > 0;
        let badly = |outcome: ReplayOutcomeCounts| outcome.failed > 0 || nothing_arrived(outcome);
        self.state == "done" && self.failed == 0 && !self.outcome.is_some_and(badly)
    }

    fn how_to_resume(&self) -> String {
        format!("postrider deadletters replay --resume {}", self.id)
    }
}

impl UnreadableBlobReport {
    fn line(&self) -> String {
        let UnreadableBlobReport {
            account,
            container,
            path,
            letters,
            state,
            reason,
        } = self;
        format!(
            "not replayed: {letters} dead letters of blob {account}/{container}/{path} ({state}): {reason}"
        )
    }
}

pub async fn get(client: &ApiClient, id: u64) -> Result<ReplayStatus> {
    read(&client.get(&format!("{ROOT}/replays/{id}")).await?)
}

pub async fn cancel(client: &ApiClient, id: u64) -> Result<ReplayStatus> {
    read(
        &client
            .post(&format!("{ROOT}/replays/{id}/cancel"), &json!({}))
            .await?,
    )
}

/// Prints the state of a replay on the standard output.
pub fn report(job: &ReplayStatus, json: bool) -> Result<()> {
    if json {
        return print(serde_json::to_string(job)?);
    }
    for blob in &job.unreadable_blobs {
        eprintln!("{}", harmless(&blob.line()));
    }
    match job.state.as_str() {
        "done" if job.total == 0 => print("nothing to replay: no dead letter in a blob matches"),
        "done" => print(job.status()),
        "incomplete" => print(format!(
            "incomplete: {}, {} of them unreadable; restore their blobs and replay them again, or purge them",
            job.status(),
            job.unreadable
        )),
        state => print(format!(
            "{state}: {}; go on with: {}",
            job.status(),
            job.how_to_resume()
        )),
    }
}

pub async fn follow(client: &ApiClient, mut job: ReplayStatus, json: bool) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    let mut progress = ReplayProgress::new(&job);
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let lost = |job: &ReplayStatus| {
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
    // Receivers mostly answer at once, so a moment's wait usually gives the outcome.
    let until = Instant::now() + OUTCOME_PATIENCE;
    while job.is_waiting() && Instant::now() < until {
        looks.tick().await;
        job = get(client, job.id).await?;
    }
    report(&job, json)?;
    Ok(match job.has_succeeded() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// A progress bar on a terminal, lines elsewhere.
enum ReplayProgress {
    Bar(ProgressBar),
    Lines { shown: u64, since: Instant },
}

impl ReplayProgress {
    fn new(job: &ReplayStatus) -> ReplayProgress {
        if !std::io::stderr().is_terminal() {
            return ReplayProgress::Lines {
                shown: job.done(),
                since: Instant::now(),
            };
        }
        let style = "{bar:40} {pos}/{len} {rate} {eta} left{msg}";
        let style = ProgressStyle::with_template(style)
            .expect("a fixed template")
            .with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                // A failure to draw the bar is ignored: there is nowhere to report it.
                let _ = write!(out, "{:.0}/s", state.per_sec());
            });
        let bar = ProgressBar::with_draw_target(Some(job.total), ProgressDrawTarget::stderr());
        bar.set_style(style);
        bar.set_position(job.done());
        // Dead letters replayed by an earlier run must not count for the speed of this one.
        bar.reset_eta();
        ReplayProgress::Bar(bar)
    }

    fn show(&mut self, job: &ReplayStatus) {
        match self {
            ReplayProgress::Bar(bar) => {
                bar.set_position(job.done());
                if job.failed > 0 {
                    bar.set_message(format!(", {} failed", job.failed));
                }
            }
            ReplayProgress::Lines { shown, since } => {
                let now = Instant::now();
                if *shown != job.done() && now - *since >= LINE_EVERY {
                    eprintln!("{}", job.status());
                    (*shown, *since) = (job.done(), now);
                }
            }
        }
    }

    fn end(&self) {
        if let ReplayProgress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
