//! Output of the client commands, and their questions.

use crate::receiver::printable;
use anyhow::{Context, Result};
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;

/// Narrower widths reported by a terminal are ignored.
const COLUMNS_MIN: u16 = 20;

/// Terminal of the standard output. Unset for a pipe or a file, where nothing is wrapped or
/// shortened.
static SCREEN: OnceLock<Screen> = OnceLock::new();

#[derive(Debug)]
struct Screen {
    columns: Option<u16>,
    zone: TimeZone,
}

/// Adapts later output to the terminal, if the standard output is one.
pub fn adapt() {
    let out = std::io::stdout();
    if !out.is_terminal() {
        return;
    }
    let size = rustix::termios::tcgetwinsize(&out).ok();
    let columns = size.map(|size| size.ws_col).filter(|columns| *columns > 0);
    let _ = SCREEN.set(Screen {
        columns: columns.map(|columns| columns.max(COLUMNS_MIN)),
        zone: TimeZone::system(),
    });
}

/// A time in RFC 3339 for display: short and local on a terminal, to the second elsewhere.
pub fn time(text: &str) -> String {
    let shown = SCREEN.get().and_then(|screen| local(text, now(), &screen.zone));
    shown.unwrap_or_else(|| to_the_second(text))
}

/// Like [`time`], but returns text that is not a time unchanged.
pub fn time_or_text(text: &str) -> Cow<'_, str> {
    let shown = SCREEN.get().and_then(|screen| local(text, now(), &screen.zone));
    shown.map_or(Cow::Borrowed(text), Cow::Owned)
}

fn now() -> Timestamp {
    Timestamp::from_nanosecond(SystemClock.now().nanos().into()).unwrap_or_default()
}

/// `14:03:22` today, `Nov 18 14:03:22` this year. `None` if the text is not a time in RFC 3339.
fn local(text: &str, now: Timestamp, zone: &TimeZone) -> Option<String> {
    // The parser accepts more forms, which may be somebody's subject.
    if text.len() < 20 || text.as_bytes()[10] != b'T' || !text.ends_with('Z') {
        return None;
    }
    let at = text.parse::<Timestamp>().ok()?.to_zoned(zone.clone());
    let now = now.to_zoned(zone.clone());
    let form = if at.date() == now.date() {
        "%H:%M:%S"
    } else if at.year() == now.year() {
        "%b %e %H:%M:%S"
    } else {
        "%Y-%m-%d %H:%M:%S"
    };
    Some(at.strftime(form).to_string())
}

/// `2030-01-01T00:00:00Z`, without a fraction.
fn to_the_second(time: &str) -> String {
    match time.split_once('.') {
        Some((seconds, fraction)) if fraction.ends_with('Z') => harmless(&format!("{seconds}Z")),
        _ => harmless(time),
    }
}

/// Prints text with a newline. A closed pipe, as with `head`, is not an error.
pub fn print(text: impl std::fmt::Display) -> Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("printing"),
        _ => Ok(()),
    }
}

/// Text on one line, with control characters escaped.
pub fn harmless(text: &str) -> String {
    printable(text, false)
}

/// A table with some columns right-aligned, at most as wide as the terminal.
pub fn table(columns: &[&str], numbers: &[usize]) -> Table {
    table_within(SCREEN.get().and_then(|screen| screen.columns), columns, numbers)
}

fn table_within(width: Option<u16>, columns: &[&str], numbers: &[usize]) -> Table {
    let mut table = Table::new();
    if let Some(width) = width {
        table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(width);
    }
    table
        .load_preset(presets::UTF8_FULL_CONDENSED)
        .set_header(columns.iter().map(Cell::new));
    for (at, column) in table.column_iter_mut().enumerate() {
        if numbers.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Whether the standard input is a terminal.
pub fn can_ask() -> bool {
    std::io::stdin().is_terminal()
}

/// Asks a question; anything but a yes is a no.
pub fn confirmed(question: &str) -> Result<bool> {
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short_and_local() {
        let now: Timestamp = "2030-03-17T17:46:40Z".parse().unwrap();
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(local(text, now, &zone).as_deref(), expected, "{text}");
        };
        check("2030-03-17T17:46:40.1234567Z", Some("19:46:40"));
        // Midnight of the same day, in this time zone.
        check("2030-03-16T22:00:00Z", Some("00:00:00"));
        check("2030-01-02T08:00:00Z", Some("Jan  2 10:00:00"));
        check("2029-12-31T23:30:00Z", Some("Jan  1 01:30:00"));
        check("2031-01-01T00:00:00Z", Some("2031-01-01 02:00:00"));
        for other in [
            "",
            "2030-03-17",
            "yesterday at a quarter past nine Z",
            "2030-03-17 17:46:40Z",
            "2030-99-17T17:46:40Z",
        ] {
            check(other, None);
        }
    }

    #[test]
    fn times_in_pipes_are_those_of_the_server() {
        assert_eq!(time("2030-03-17T17:46:40.1234567Z"), "2030-03-17T17:46:40Z");
        assert_eq!(
            time_or_text("2030-03-17T17:46:40.1234567Z"),
            "2030-03-17T17:46:40.1234567Z"
        );
        assert_eq!(time("\u{1b}[2J"), "\\u001b[2J");
    }

    #[test]
    fn tables_fit_the_terminal_and_are_whole_in_pipes() {
        let widest = |width| {
            let mut table = table_within(width, &["name", "endpoint"], &[]);
            table.add_row(["orders", &"https://events.example/a/long/path/".repeat(5)]);
            let text = table.to_string();
            text.lines().map(|line| line.chars().count()).max().unwrap()
        };
        assert!(widest(Some(60)) <= 60, "{}", widest(Some(60)));
        assert!(widest(None) > 175);
    }
}
