//! Progress of a migration: a bar on a terminal, lines elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;
use tokio::time::Instant;

/// Least time between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

pub struct MigrationProgress {
    what: &'static str,
    total: u64,
    done: u64,
    began: Instant,
    shown: Instant,
    bar: Option<ProgressBar>,
}

/// Prints progress on the standard error: the standard output is for the report.
pub fn say(text: impl std::fmt::Display) {
    eprintln!("{text}");
}

impl MigrationProgress {
    /// Starts to count deliveries.
    pub fn new(what: &'static str, total: u64) -> MigrationProgress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} {rate} {eta} left")
                .expect("a fixed template")
                .with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                    // A failure to draw the bar is ignored: there is nowhere to report it.
                    let _ = write!(out, "{:.0}/s", state.per_sec());
                });
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            bar.set_style(style);
            bar.set_message(what);
            bar
        });
        let now = Instant::now();
        MigrationProgress {
            what,
            total,
            done: 0,
            began: now,
            shown: now,
            bar,
        }
    }

    pub fn add(&mut self, count: u64) {
        self.done += count;
        match &self.bar {
            Some(bar) => bar.set_position(self.done),
            None if self.shown.elapsed() >= LINE_EVERY => {
                self.shown = Instant::now();
                say(format!(
                    "{}: {} of {} deliveries",
                    self.what, self.done, self.total
                ));
            }
            None => {}
        }
    }

    /// Ends the display and returns the time taken.
    pub fn end(self) -> Duration {
        let took = self.began.elapsed();
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
        let seconds = took.as_secs_f64();
        say(format!(
            "{}: {} deliveries in {seconds:.1} s",
            self.what, self.done
        ));
        took
    }
}
