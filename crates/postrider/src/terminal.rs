//! What the client commands print, and what they ask.

use crate::receiver::printable;
use anyhow::{Context, Result};
use comfy_table::{Cell, CellAlignment, Table, presets};
use std::io::{ErrorKind, IsTerminal, Write};

/// Prints lines. A reader that has seen enough, such as `head`, is no reason to complain.
pub fn print(text: impl std::fmt::Display) -> Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("printing"),
        _ => Ok(()),
    }
}

/// On one line, and nothing that a terminal would obey.
pub fn harmless(text: &str) -> String {
    printable(text, false)
}

/// A table with the numbers of some columns on the right.
pub fn table(columns: &[&str], numbers: &[usize]) -> Table {
    let mut table = Table::new();
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

/// Whether there is someone to ask.
pub fn can_ask() -> bool {
    std::io::stdin().is_terminal()
}

/// Asks, and takes anything but a yes for a no.
pub fn confirmed(question: &str) -> Result<bool> {
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}
