//! Output of the client commands, and their questions.

use crate::receiver::printable;
use anyhow::{Context, Result};
use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Width, presets};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use std::borrow::Cow;
use std::fmt;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;

/// Narrower widths reported by a terminal are ignored.
const COLUMNS_MIN: u16 = 20;
/// Longer words, such as URLs, may be cut in a table.
const WHOLE_WORD_MAX: usize = 24;

/// Terminal of the standard output. Unset for a pipe or a file, where nothing is wrapped or
/// shortened.
static SCREEN: OnceLock<TerminalScreen> = OnceLock::new();

#[derive(Debug)]
struct TerminalScreen {
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
    let _ = SCREEN.set(TerminalScreen {
        columns: columns.map(|columns| columns.max(COLUMNS_MIN)),
        zone: TimeZone::system(),
    });
}

/// A time in RFC 3339 for display: short and local on a terminal, to the second elsewhere.
pub fn time(text: &str) -> String {
    let shown = SCREEN.get().and_then(|screen| local(text, now(), &screen.zone));
    shown.unwrap_or_else(|| to_the_second(text))
}

/// Text in which times as the server writes them stand between other words: each as [`time`] shows it.
pub fn with_times(text: &str) -> String {
    let of_time = |c: char| c.is_ascii_digit() || "-:.TZ".contains(c);
    let part = |part: &str| {
        let word = part.trim_end_matches(|c| !of_time(c));
        match is_time(word) {
            true => time(word) + &part[word.len()..],
            false => part.to_owned(),
        }
    };
    text.split_inclusive(|c| !of_time(c)).map(part).collect()
}

/// The same for text that may be something else, which stays as it is.
pub fn time_or_text(text: &str) -> Cow<'_, str> {
    let shown = SCREEN.get().and_then(|screen| local(text, now(), &screen.zone));
    shown.map_or(Cow::Borrowed(text), Cow::Owned)
}

fn now() -> Timestamp {
    Timestamp::from_nanosecond(SystemClock.now().nanos().into()).unwrap_or_default()
}

/// `14:03:22` today, `Nov 18 14:03:22` this year. `None` if the text is not a time in RFC 3339.
fn local(text: &str, now: Timestamp, zone: &TimeZone) -> Option<String> {
    if !is_time(text) {
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

/// The parser takes more forms than that, which may be somebody's subject.
fn is_time(text: &str) -> bool {
    text.len() >= 20 && text.as_bytes()[10] == b'T' && text.ends_with('Z')
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

/// A table with the numbers of some columns on the right. On a terminal it is no wider than that: where even single
/// words do not fit beside each other, every row is a block of lines.
pub fn table(columns: &[&str], numbers: &[usize]) -> Table {
    Table {
        width: width(),
        columns: columns.iter().map(|&column| column.to_owned()).collect(),
        numbers: numbers.to_vec(),
        rows: Vec::new(),
    }
}

pub struct Table {
    /// Of the terminal.
    width: Option<usize>,
    columns: Vec<String>,
    numbers: Vec<usize>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn add_row(&mut self, row: impl IntoIterator<Item = impl ToString>) {
        self.rows
            .push(row.into_iter().map(|cell| cell.to_string()).collect());
    }

    fn blocks(&self, width: usize) -> String {
        let names = self.columns.iter().map(|name| name.chars().count());
        let indent = names.max().unwrap_or(0) + 2;
        let cell = |(name, cell): (&String, &String)| {
            let lines = cell.lines().map(|line| wrap(Some(width), line, indent));
            let lines: Vec<String> = lines.collect();
            let text = lines.join(&format!("\n{:indent$}", ""));
            format!("{name:<indent$}{text}").trim_end().to_owned()
        };
        let block = |row: &Vec<String>| {
            let cells: Vec<String> = self.columns.iter().zip(row).map(cell).collect();
            cells.join("\n")
        };
        let blocks: Vec<String> = self.rows.iter().map(block).collect();
        blocks.join("\n\n")
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = comfy_table::Table::new();
        table
            .load_preset(presets::UTF8_FULL_CONDENSED)
            .set_header(self.columns.iter().map(Cell::new))
            .add_rows(&self.rows);
        for (at, column) in table.column_iter_mut().enumerate() {
            if self.numbers.contains(&at) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        // A border before every column and after the last.
        match self.width {
            Some(width) if !fit(&mut table, width, self.columns.len() + 1) => {
                f.write_str(&self.blocks(width))
            }
            _ => write!(f, "{table}"),
        }
    }
}

/// Shares a width among the columns of a table so that no word is cut, but for very long ones. False if there is no
/// room for that.
fn fit(table: &mut comfy_table::Table, width: usize, borders: usize) -> bool {
    let mut least = borders;
    for at in 0..table.column_count() {
        let cells = table
            .row_iter()
            .chain(table.header())
            .filter_map(|row| row.cell_iter().nth(at));
        let longest = |text: String| text.split_whitespace().map(|word| word.chars().count()).max();
        let word = cells
            .filter_map(|cell| longest(cell.content()))
            .max()
            .unwrap_or(0);
        let Some(column) = table.column_mut(at) else {
            continue;
        };
        let with_padding = word.min(WHOLE_WORD_MAX) + 2;
        least += with_padding;
        column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(with_padding as u16)));
    }
    table
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(u16::try_from(width).unwrap_or(u16::MAX));
    least <= width
}

/// Rows as columns without borders, two spaces between, no wider than the terminal; nothing trails.
pub fn columns<const N: usize>(indent: &str, rows: &[[String; N]]) -> String {
    columns_within(width(), indent, rows)
}

fn columns_within<const N: usize>(width: Option<usize>, indent: &str, rows: &[[String; N]]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_preset(presets::NOTHING).add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    if let Some(width) = width {
        // Nothing follows the last column's padding.
        fit(&mut table, width - indent.len() + 2, 0);
    }
    let line = |line: String| format!("{indent}{}\n", line.trim_end());
    table.lines().map(line).collect()
}

fn width() -> Option<usize> {
    SCREEN.get()?.columns.map(usize::from)
}

/// Text that begins after `indent` columns, broken between words at the terminal's width.
pub fn wrapped(text: &str, indent: usize) -> String {
    wrap(width(), text, indent)
}

/// Lines of text, each broken between words at the terminal's width, further in than it begins.
pub fn wrapped_lines(text: &str) -> String {
    let line = |line: &str| {
        let begin = line.len() - line.trim_start_matches(' ').len();
        let hang = begin + 2;
        // The first line has two columns less than it could: not worth a case of its own.
        format!("{}{}", &line[..begin], wrap(width(), &line[begin..], hang))
    };
    let lines: Vec<String> = text.split('\n').map(line).collect();
    lines.join("\n")
}

fn wrap(width: Option<usize>, text: &str, indent: usize) -> String {
    let Some(width) = width else {
        return text.to_owned();
    };
    let room = width.saturating_sub(indent).max(COLUMNS_MIN.into());
    let (mut wrapped, mut used) = (String::new(), 0);
    let next_line = format!("\n{:indent$}", "");
    for (at, word) in text.split(' ').enumerate() {
        if at > 0 && used > 0 && used + 1 + word.chars().count() > room {
            wrapped.push_str(&next_line);
            used = 0;
        } else if at > 0 {
            wrapped.push(' ');
            used += 1;
        }
        for letter in word.chars() {
            // Only a word that is longer than a line is cut.
            if used == room {
                wrapped.push_str(&next_line);
                used = 0;
            }
            wrapped.push(letter);
            used += 1;
        }
    }
    wrapped
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

    fn shown(width: usize, columns: &[&str], row: &[&str]) -> String {
        let mut table = table(columns, &[]);
        table.width = Some(width);
        table.add_row(row);
        table.to_string()
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
    }

    #[test]
    fn tables_fit_the_terminal_and_are_whole_in_pipes() {
        let url = "https://events.example/a/long/path/".repeat(5);
        let text = shown(60, &["name", "endpoint"], &["orders", &url]);
        assert!(widest(&text) <= 60, "{text}");
        let mut whole = table(&["name", "endpoint"], &[]);
        whole.add_row(["orders", &url]);
        assert!(widest(&whole.to_string()) > 175);
    }

    #[test]
    fn no_word_of_a_table_is_cut_however_narrow_the_terminal_is() {
        let columns = [
            "name",
            "on",
            "health",
            "waiting",
            "oldest",
            "failed",
            "destination",
            "state",
        ];
        let row = [
            "billing",
            "orders",
            "failing, paused",
            "5",
            "1h 2m",
            "29%",
            "WebHook",
            "Succeeded",
        ];
        for width in [40, 60, 80, 100, 120] {
            let text = shown(width, &columns, &row);
            assert!(widest(&text) <= width, "{width}: {text}");
            for word in columns.iter().chain(&row).flat_map(|cell| cell.split(' ')) {
                assert!(text.contains(word), "{width}: {word:?} is cut in {text}");
            }
        }
    }

    #[test]
    fn columns_without_borders_and_lines_fit_the_terminal() {
        let rows = [[
            "500",
            "retry, at least 10s, unless it was the last attempt",
            "retry, at least 1m",
        ]];
        let rows = rows.map(|row| row.map(str::to_owned));
        let text = columns_within(Some(40), "  ", &rows);
        assert!(widest(&text) <= 40 && text.lines().count() > 1, "{text}");
        let whole = columns_within(None, "  ", &rows);
        assert_eq!(whole, format!("  {}\n", rows[0].join("  ")));
        assert_eq!(
            wrap(Some(24), "one two three four five six", 4),
            "one two three four\n    five six"
        );
        assert_eq!(wrap(None, "a  b", 4), "a  b");
    }

    #[test]
    fn times_between_words_are_shown_as_times() {
        let text = "until 2030-03-17T17:46:40.1234567Z (since 2030-03-17T17:46:40Z), 3.5 GB";
        assert_eq!(
            with_times(text),
            "until 2030-03-17T17:46:40Z (since 2030-03-17T17:46:40Z), 3.5 GB"
        );
    }
}
