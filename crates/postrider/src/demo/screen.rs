//! Display of the demo: a table that is redrawn on a terminal, plain lines anywhere else.

use super::counts::{DemoCounts, SubscriptionCounts};
use super::messages::{DemoMessage, MessageTone, span};
use super::scenario::{DemoScenario, DemoSubscription};
use postrider_core::outcome::Outcome;
use postrider_core::time::Timestamp;
use std::collections::BTreeMap;
use std::io::{Result, Write};
use std::time::Duration;

/// Messages that stand below the table.
const HAPPENINGS: usize = 7;
const HIDE_CURSOR_AND_CUT_LINES: &str = "\x1b[?25l\x1b[?7l";
const SHOW_CURSOR_AND_WRAP_LINES: &str = "\x1b[?25h\x1b[?7h";

/// Output of the demo. Dropping it restores the terminal.
pub struct DemoScreen<W: Write> {
    out: W,
    /// Redraw in place; otherwise only add lines.
    live: bool,
    ink: TextColors,
    /// Lines of the drawing that is on the terminal now.
    drawn: usize,
    happenings_shown: usize,
}

/// The numbers and messages at one moment.
pub struct DemoFrame<'a> {
    pub tally: &'a DemoCounts,
    pub told: &'a [DemoMessage],
    pub now: Timestamp,
    /// Time since the start, on the demo's own clock.
    pub after: Duration,
    pub real: Duration,
    pub speed: u32,
    pub events_max: u64,
}

/// Final numbers of the demo.
pub struct DemoSummary<'a> {
    pub tally: &'a DemoCounts,
    pub after: Duration,
    pub real: Duration,
    pub segments: u64,
    pub bytes: u64,
}

impl<W: Write> DemoScreen<W> {
    pub fn new(out: W, live: bool, color: bool) -> DemoScreen<W> {
        DemoScreen {
            out,
            live,
            ink: TextColors { color },
            drawn: 0,
            happenings_shown: 0,
        }
    }

    pub fn is_live(&self) -> bool {
        self.live
    }

    pub fn introduce(&mut self, scene: &DemoScenario) -> Result<()> {
        let mut text = String::from(
            "Events go to one topic; seven subscriptions deliver them to a receiver that answers\n\n",
        );
        for part in DemoSubscription::ALL {
            text += &format!(
                "  {}  {}\n",
                self.ink.bold(&format!("{:<11}", part.name())),
                scene.about(part)
            );
        }
        self.write(&(text + "\n"))
    }

    /// Redraws the table.
    pub fn draw(&mut self, frame: &DemoFrame<'_>) -> Result<()> {
        let mut lines = vec![title(frame), String::new()];
        lines.extend(self.ink.table(frame.tally, frame.now));
        lines.push(String::new());
        let first = frame.told.len().saturating_sub(HAPPENINGS);
        lines.extend(frame.told[first..].iter().map(|h| self.ink.happening(h)));
        // The number of lines is constant, so that each drawing covers the one before.
        lines.resize(
            HAPPENINGS + 3 + HEADER.len() + frame.tally.rows.len() + 1,
            String::new(),
        );
        let mut text = match self.drawn {
            0 => HIDE_CURSOR_AND_CUT_LINES.to_owned(),
            drawn => format!("\x1b[{drawn}A"),
        };
        for line in &lines {
            text += &format!("{line}\x1b[K\n");
        }
        self.drawn = lines.len();
        self.write(&text)
    }

    /// Adds the messages since the last call.
    pub fn add_happenings(&mut self, told: &[DemoMessage]) -> Result<()> {
        let text: String = told[self.happenings_shown..]
            .iter()
            .map(|h| self.ink.happening(h) + "\n")
            .collect();
        self.happenings_shown = told.len();
        self.write(&text)
    }

    /// Adds one line of numbers.
    pub fn add_progress(&mut self, frame: &DemoFrame<'_>) -> Result<()> {
        let tally = frame.tally;
        let text = format!(
            "{:>8}  {} events: {} waiting, {} retrying, {} delivered, {} dead-lettered, {} dropped\n",
            stamp(frame.after),
            tally.published.events,
            tally.sum(|r| r.waiting),
            tally.sum(|r| r.retrying),
            tally.sum(|r| r.delivered),
            tally.sum(SubscriptionCounts::dead_lettered_total),
            tally.sum(SubscriptionCounts::dropped_total),
        );
        self.write(&text)
    }

    /// Replaces the drawing, if there is one, by the summary.
    pub fn print_summary(&mut self, summary: &DemoSummary<'_>) -> Result<()> {
        let mut text = match self.drawn {
            0 => "\n".to_owned(),
            drawn => format!("\x1b[{drawn}A\x1b[J{SHOW_CURSOR_AND_WRAP_LINES}"),
        };
        self.drawn = 0;
        text += &self.ink.summary(summary);
        self.write(&text)
    }

    pub fn add_line(&mut self, line: &str) -> Result<()> {
        self.write(&format!("{line}\n"))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}

impl<W: Write> Drop for DemoScreen<W> {
    fn drop(&mut self) {
        if self.drawn > 0 {
            let _ = self.write(SHOW_CURSOR_AND_WRAP_LINES);
        }
    }
}

fn title(frame: &DemoFrame<'_>) -> String {
    let published = frame.tally.published;
    let doing = match published.over {
        false => format!("published {} of {} events", published.events, frame.events_max),
        true => format!("{} events published", published.events),
    };
    let (long, real) = (stamp(frame.after), frame.real.as_secs());
    format!("postrider demo   {long} in {real} s ({}×)   {doing}", frame.speed)
}

/// Hours, minutes and seconds since the start.
fn stamp(after: Duration) -> String {
    let secs = after.as_secs();
    format!("{}:{:02}:{:02}", secs / 3600, secs / 60 % 60, secs % 60)
}

const HEADER: [&str; 2] = [
    "                        in                                        dead-",
    "destination waiting flight retrying attempts failed delivered lettered dropped  endpoint",
];

/// Reads a number of a row.
type RowNumber = fn(&SubscriptionCounts) -> u64;
/// A number, its width, and its color unless it is zero.
type TableColumn = (RowNumber, usize, &'static str);

/// Colors, or none.
#[derive(Clone, Copy)]
struct TextColors {
    color: bool,
}

const GREEN: &str = "32";
const YELLOW: &str = "33";
const RED: &str = "31";
const DIM: &str = "2";
const BOLD: &str = "1";

impl TextColors {
    fn paint(self, code: &str, text: &str) -> String {
        match self.color {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }

    fn bold(self, text: &str) -> String {
        self.paint(BOLD, text)
    }

    /// A number in a column; dimmed if it is zero.
    fn cell(self, number: u64, width: usize, code: &str) -> String {
        let code = if number == 0 { DIM } else { code };
        self.paint(code, &format!("{number:>width$}"))
    }

    fn table(self, tally: &DemoCounts, now: Timestamp) -> Vec<String> {
        let mut lines: Vec<String> = HEADER.iter().map(|line| self.paint(DIM, line)).collect();
        for row in &tally.rows {
            let state = match row.delay {
                None => self.paint(DIM, "admitting"),
                Some(delay) if delay.until <= now => self.paint(YELLOW, "probing"),
                Some(delay) => {
                    let left = short(delay.until.since(now));
                    self.paint(YELLOW, &format!("delayed {left}: {}", cause(delay.cause)))
                }
            };
            let cells = self.cells(|of| of(row));
            lines.push(format!(
                "{} {cells}  {state}",
                self.bold(&format!("{:<11}", row.part.name()))
            ));
        }
        lines.push(format!("{:<11} {}", "all", self.cells(|of| tally.sum(of))));
        lines
    }

    fn cells(self, number: impl Fn(RowNumber) -> u64) -> String {
        let columns: [TableColumn; 8] = [
            (|r| r.waiting, 7, YELLOW),
            (|r| r.in_flight, 6, BOLD),
            (|r| r.retrying, 8, YELLOW),
            (|r| r.attempts, 8, "0"),
            (|r| r.failed, 6, "0"),
            (|r| r.delivered, 9, GREEN),
            (SubscriptionCounts::dead_lettered_total, 8, RED),
            (SubscriptionCounts::dropped_total, 7, RED),
        ];
        columns
            .map(|(of, width, code)| self.cell(number(of), width, code))
            .join(" ")
    }

    fn happening(self, happening: &DemoMessage) -> String {
        let code = match happening.mood {
            MessageTone::Good => GREEN,
            MessageTone::Patient => YELLOW,
            MessageTone::Bad => RED,
        };
        let at = self.paint(DIM, &format!("{:>8}", stamp(happening.after)));
        format!("{at}  {}", self.paint(code, &happening.text))
    }

    fn summary(self, summary: &DemoSummary<'_>) -> String {
        let tally = summary.tally;
        let header = "destination matched delivered dead-lettered dropped unfinished attempts failed";
        let mut text = self.paint(DIM, header) + "\n";
        for row in &tally.rows {
            let mark = if row.adds_up() {
                self.paint(GREEN, "✓")
            } else {
                self.paint(RED, "does not add up")
            };
            let cells = self.ends(|of| of(row));
            text += &format!(
                "{} {cells} {mark}\n",
                self.bold(&format!("{:<11}", row.part.name()))
            );
        }
        text += &format!("{:<11} {}\n\n", "all", self.ends(|of| tally.sum(of)));
        text += &self.equation(tally);
        text += &sentences(summary);
        text
    }

    fn ends(self, number: impl Fn(RowNumber) -> u64) -> String {
        let columns: [TableColumn; 7] = [
            (|r| r.expected, 7, "0"),
            (|r| r.delivered, 9, GREEN),
            (SubscriptionCounts::dead_lettered_total, 13, RED),
            (SubscriptionCounts::dropped_total, 7, RED),
            (SubscriptionCounts::open, 10, YELLOW),
            (|r| r.attempts, 8, "0"),
            (|r| r.failed, 6, "0"),
        ];
        columns
            .map(|(of, width, code)| self.cell(number(of), width, code))
            .join(" ")
    }

    /// The equation that is checked: published and routed events against the ends of deliveries.
    fn equation(self, tally: &DemoCounts) -> String {
        let open = tally.sum(SubscriptionCounts::open);
        let unfinished = if open > 0 {
            format!(" + {open} unfinished")
        } else {
            String::new()
        };
        let verdict = match tally.adds_up() {
            true => self.paint(GREEN, "✓ adds up"),
            false => self.paint(
                RED,
                &format!("✗ does not add up (the server says it matched {})", tally.matched),
            ),
        };
        let (delivered, accepted) = (tally.sum(|r| r.delivered), tally.sum(|r| r.accepted));
        format!(
            "{} matched = {delivered} delivered + {} dead-lettered + {} dropped{unfinished}   {verdict}\n\
             The receiver itself counted {accepted} arrivals, each event once.\n\
             Dead letters: {}.\n\n",
            tally.sum(|r| r.expected),
            tally.sum(SubscriptionCounts::dead_lettered_total),
            tally.sum(SubscriptionCounts::dropped_total),
            reasons(tally),
        )
    }
}

/// Reasons of dead letters, with counts.
fn reasons(tally: &DemoCounts) -> String {
    let mut counts = BTreeMap::new();
    for (reason, count) in tally.rows.iter().flat_map(|row| &row.dead_lettered) {
        *counts.entry(*reason).or_insert(0) += count;
    }
    if counts.is_empty() {
        return "none".into();
    }
    let counts: Vec<String> = counts
        .iter()
        .map(|(reason, count)| format!("{count} {reason}"))
        .collect();
    counts.join(",\n              ")
}

/// Closing text: what was shown, how durable it was, what to do next.
fn sentences(summary: &DemoSummary<'_>) -> String {
    let tally = summary.tally;
    let events = tally.published.events;
    format!(
        "In {} s you saw {} of deliveries: {events} events, {} subscriptions and {}\n\
         failed attempts, each followed by a retry on Event Grid's schedule, a dead\n\
         letter or, where the subscription asked for none, a drop. Every event was\n\
         synced to the log before its publisher saw 200 ({}, {}).\n\
         Next: run `postrider serve`, and publish to it as README.md shows.\n",
        summary.real.as_secs(),
        span(summary.after),
        tally.rows.len(),
        tally.sum(|r| r.failed),
        if summary.segments == 1 {
            "1 segment".into()
        } else {
            format!("{} segments", summary.segments)
        },
        size(summary.bytes),
    )
}

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        10_000..10_000_000 => format!("{} kB", bytes / 1000),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

fn short(long: Duration) -> String {
    match long.as_secs() {
        secs @ 0..100 => format!("{secs}s"),
        secs @ 100..6000 => format!("{}m", secs / 60),
        secs => format!("{}h", secs / 3600),
    }
}

/// Abbreviation for the table; the messages spell it out.
fn cause(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Busy => "busy",
        Outcome::TimedOut => "late",
        Outcome::SocketError => "no link",
        Outcome::ProxyError => "no proxy",
        _ => "errors",
    }
}

#[cfg(test)]
mod tests {
    use super::super::counts::tests::row;
    use super::*;
    use postrider_core::probation::EndpointProbationDelay;

    fn frame<'a>(tally: &'a DemoCounts, told: &'a [DemoMessage]) -> DemoFrame<'a> {
        DemoFrame {
            tally,
            told,
            now: Timestamp::from_secs(1000),
            after: Duration::from_secs(4342),
            real: Duration::from_secs(14),
            speed: 300,
            events_max: 600,
        }
    }

    fn tally() -> DemoCounts {
        let rows = DemoSubscription::ALL.into_iter().map(|part| SubscriptionCounts {
            delivered: 12_345,
            waiting: 99_999,
            delay: Some(EndpointProbationDelay {
                cause: Outcome::TimedOut,
                status: None,
                since: Timestamp::MIN,
                until: Timestamp::from_secs(1000 + 5999),
                step: Duration::ZERO,
            }),
            ..row(part, 112_344)
        });
        DemoCounts {
            rows: rows.collect(),
            matched: 112_344 * 7,
            ..DemoCounts::default()
        }
    }

    #[test]
    fn every_drawing_has_as_many_narrow_lines_and_covers_the_one_before() {
        let tally = tally();
        let told: Vec<DemoMessage> = (0..30)
            .map(|n| DemoMessage {
                after: Duration::from_secs(n),
                mood: MessageTone::Good,
                text: "it happened".into(),
            })
            .collect();
        let mut out = Vec::new();
        let mut screen = DemoScreen::new(&mut out, true, false);
        screen.draw(&frame(&tally, &told[..2])).unwrap();
        let lines = screen.drawn;
        screen.draw(&frame(&tally, &told)).unwrap();
        assert_eq!(screen.drawn, lines);
        drop(screen);
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.matches('\n').count(), 2 * lines);
        assert_eq!(text.matches(&format!("\x1b[{lines}A")).count(), 1);
        assert!(text.ends_with(SHOW_CURSOR_AND_WRAP_LINES));
        assert!(lines <= 23, "{lines} lines fit no terminal of 24");
        for line in text.replace(HIDE_CURSOR_AND_CUT_LINES, "").lines() {
            let line = line.replace("\x1b[K", "");
            assert!(line.chars().count() <= 100, "{line}");
        }
    }

    #[test]
    fn without_a_terminal_there_are_no_escapes() {
        let tally = tally();
        let mut out = Vec::new();
        let mut screen = DemoScreen::new(&mut out, false, false);
        let scene = DemoScenario {
            slow_for: Duration::ZERO,
            buggy_event_last: 5000,
            buggy_attempts_max: 10,
            broken_minutes_to_live: 1000,
        };
        screen.introduce(&scene).unwrap();
        screen.add_progress(&frame(&tally, &[])).unwrap();
        let summary = DemoSummary {
            tally: &tally,
            after: Duration::from_secs(7500),
            real: Duration::from_secs(25),
            segments: 1,
            bytes: 437_000,
        };
        screen.print_summary(&summary).unwrap();
        drop(screen);
        let text = String::from_utf8(out).unwrap();
        assert!(!text.contains('\x1b'), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
        assert!(
            text.contains("✓ adds up") && text.contains("1 segment, 437 kB"),
            "{text}"
        );
    }

    #[test]
    fn sums_that_do_not_add_up_are_said_to() {
        let mut tally = tally();
        tally.rows[3].delivered -= 1;
        let text = TextColors { color: false }.equation(&tally);
        assert!(text.contains("✗ does not add up"), "{text}");
    }
}
