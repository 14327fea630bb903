//! Reads the trees of a database file page by page, below redb and without a write: damage is known before redb may
//! change anything, and all pages that are whole can be salvaged whatever else is damaged.
//!
//! The layout is that of redb's file format 3. redb itself cannot be used for this: its first failed read makes it
//! refuse all others, and a repair reads pages into its cache before their blocks are verified.

use crate::block_file::{BLOCK, BlockFile};
use std::collections::{BTreeMap, BTreeSet};

/// In redb's header: flags, pages of a region's header, pages of a region's data, and the two commit slots.
const FLAGS_AT: usize = 9;
const REGION_HEADER_AT: usize = 16;
const REGION_DATA_AT: usize = 20;
const SLOTS_AT: [usize; 2] = [64, 192];
/// In a commit slot: the roots of the user's and redb's own tables, and the number of the commit.
const USER_ROOT_AT: usize = 8;
const SYSTEM_ROOT_AT: usize = 40;
const COMMIT_AT: usize = 104;
const FLAG_SECOND_IS_PRIMARY: u8 = 1;
const FLAG_NOT_CLOSED: u8 = 2;
const FLAG_TWO_PHASES: u8 = 4;
const LEAF: u8 = 1;
const BRANCH: u8 = 2;
/// Tables with the count of each subscription's rows, and what the rows are.
const COUNTED: [(&str, &str, &str); 2] = [
    ("retries", "retry_counts", "retries"),
    ("letters", "letter_counts", "dead letters"),
];

/// The pages of one database file.
pub struct Pages<'a> {
    blocks: &'a BlockFile,
    end: u64,
    header: Vec<u8>,
    /// Whether the checksum of the header's block holds.
    pub header_is_whole: bool,
}

/// The roots of one commit.
#[derive(Clone, Copy, Debug)]
pub struct Commit {
    number: u64,
    user: Option<u64>,
    system: Option<u64>,
}

/// A table as its definition describes it.
struct StoredTable {
    name: String,
    rows: u64,
    root: Option<u64>,
    widths: Widths,
    /// Whether the checksums of its definition hold.
    is_whole: bool,
}

impl StoredTable {
    fn root(&self) -> Option<Link> {
        let is_trusted = self.is_whole;
        self.root.map(|page| Link { page, is_trusted })
    }
}

/// The sizes of keys and values where they are fixed.
type Widths = (Option<usize>, Option<usize>);

const NO_WIDTHS: Widths = (None, None);

/// A reference to a page, and whether all checksums on the way to it hold.
#[derive(Clone, Copy)]
struct Link {
    page: u64,
    is_trusted: bool,
}

/// A row, or a page that cannot be read.
enum Met<'a> {
    Row {
        key: &'a [u8],
        value: &'a [u8],
        /// Whether the checksums of its page and of those above it hold.
        is_whole: bool,
    },
    Damage,
}

/// The rows of one table.
#[derive(Debug, Default)]
pub struct TableRows {
    pub whole: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Rows of damaged pages, or found by way of one: anything in them may be wrong.
    pub doubtful: Vec<(Vec<u8>, Vec<u8>)>,
    /// How many rows there are to be; none if not even that can be read.
    pub expected: Option<u64>,
    /// Whether all rows are in `whole`.
    pub is_complete: bool,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize)
}

pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl Pages<'_> {
    /// None if the file is too short to hold anything.
    pub fn of(blocks: &BlockFile) -> Option<Pages<'_>> {
        let end = blocks.blocks().ok()?;
        let (header, header_is_whole) = blocks.read_unverified(0, 1).ok()?;
        Some(Pages {
            blocks,
            end,
            header,
            header_is_whole,
        })
    }

    /// Whether the last commit may be incomplete: it was made in one phase, and the file was not closed in order.
    pub fn may_be_torn(&self) -> bool {
        let flags = self.header[FLAGS_AT];
        flags & FLAG_NOT_CLOSED != 0 && flags & FLAG_TWO_PHASES == 0
    }

    /// The last commit and the one before it. Pages of the older one that the last one has replaced are kept until
    /// the next commit.
    pub fn commits(&self) -> [Commit; 2] {
        let commit = |at: usize| {
            let root = |is_there: usize, root_at: usize| {
                let is_there = self.header[at + is_there] != 0;
                u64_at(&self.header, at + root_at).filter(|_| is_there)
            };
            Commit {
                number: u64_at(&self.header, at + COMMIT_AT).unwrap_or(0),
                user: root(1, USER_ROOT_AT),
                system: root(2, SYSTEM_ROOT_AT),
            }
        };
        let [first, second] = SLOTS_AT.map(commit);
        let second_is_last = match self.may_be_torn() || !self.header_is_whole {
            true => second.number > first.number,
            false => self.header[FLAGS_AT] & FLAG_SECOND_IS_PRIMARY != 0,
        };
        if second_is_last {
            [second, first]
        } else {
            [first, second]
        }
    }

    /// The content of a page and whether its checksums hold. A block that was never written is damaged where a page
    /// refers to it.
    fn page(&self, number: u64) -> Option<(Vec<u8>, bool)> {
        let order = number >> 59;
        let index = (number & (0xF_FFFF_u64 >> order)) << order;
        let region = (number >> 20) & 0xF_FFFF;
        let header = u32_at(&self.header, REGION_HEADER_AT)? as u64;
        let data = u32_at(&self.header, REGION_DATA_AT)? as u64;
        let first = 1 + region * (header + data) + header + index;
        let count = 1_u64 << order;
        if first + count > self.end {
            return None;
        }
        self.blocks.read_unverified(first, count).ok()
    }

    /// Hands all rows of a tree to `met`, and tells of each page that is damaged. A damaged branch is followed, but
    /// where it leads is not to be trusted.
    fn walk(&self, root: Link, widths: Widths, met: &mut dyn FnMut(Met<'_>)) {
        self.walk_from(root, widths, &mut BTreeSet::new(), met);
    }

    fn walk_from(&self, from: Link, widths: Widths, seen: &mut BTreeSet<u64>, met: &mut dyn FnMut(Met<'_>)) {
        let Some((page, is_whole)) = self.page(from.page).filter(|_| seen.insert(from.page)) else {
            return met(Met::Damage);
        };
        let is_trusted = from.is_trusted && is_whole;
        let entries = u16::from_le_bytes([page[2], page[3]]) as usize;
        let is_readable = match page[0] {
            LEAF => rows_of(&page, entries, widths, |key, value| {
                met(Met::Row {
                    key,
                    value,
                    is_whole: is_trusted,
                });
            })
            .is_some(),
            BRANCH => {
                let children = entries + 1;
                let child = |n: usize| u64_at(&page, 8 + 16 * children + 8 * n);
                for page in (0..children).map_while(child) {
                    self.walk_from(Link { page, is_trusted }, widths, seen, met);
                }
                child(entries).is_some()
            }
            _ => false,
        };
        if !is_trusted || !is_readable {
            met(Met::Damage);
        }
    }

    /// The tables below a root, and whether those are all. Definitions on damaged pages come last.
    fn tables(&self, root: Option<u64>) -> (Vec<StoredTable>, bool) {
        let (mut found, mut is_all) = (Vec::new(), true);
        if let Some(page) = root {
            let is_trusted = true;
            self.walk(Link { page, is_trusted }, NO_WIDTHS, &mut |met| match met {
                Met::Row { key, value, is_whole } => found.extend(table_of(key, value, is_whole)),
                Met::Damage => is_all = false,
            });
        }
        found.sort_by_key(|table| !table.is_whole);
        (found, is_all)
    }

    /// The rows of a table in one commit. None if it has no such table.
    pub fn rows(&self, commit: Commit, name: &str) -> Option<TableRows> {
        let (tables, is_all) = self.tables(commit.user);
        let mut rows = TableRows::default();
        let Some(table) = tables.iter().find(|table| table.name == name) else {
            return (!is_all).then_some(rows);
        };
        rows.is_complete = table.is_whole;
        rows.expected = table.is_whole.then_some(table.rows);
        if let Some(root) = table.root() {
            self.walk(root, table.widths, &mut |met| match met {
                Met::Row { key, value, is_whole } => {
                    let row = (key.to_vec(), value.to_vec());
                    match is_whole {
                        true => drop(rows.whole.insert(row.0, row.1)),
                        false => rows.doubtful.push(row),
                    }
                }
                Met::Damage => rows.is_complete = false,
            });
        }
        Some(rows)
    }

    /// Names what is damaged of a commit: tables, the ids at the damaged place, subscriptions that lack rows.
    pub fn damage_of(&self, commit: Commit) -> Vec<String> {
        let mut hit = Vec::new();
        let (tables, is_all) = self.tables(commit.user);
        if !is_all {
            hit.push("the list of its tables".to_owned());
        }
        for table in tables.iter().filter(|table| table.is_whole) {
            hit.extend(self.damage_in(table));
        }
        for (rows, counts, what) in COUNTED {
            if hit.iter().any(|hit| hit.contains(&format!("\"{rows}\""))) {
                hit.extend(self.short_of(commit, rows, counts, what));
            }
        }
        let (own, is_all) = self.tables(commit.system);
        if !is_all || own.iter().any(|table| self.damage_in(table).is_some()) {
            hit.push("its own administration cannot be read".to_owned());
        }
        hit
    }

    fn damage_in(&self, table: &StoredTable) -> Option<String> {
        let has_ids = table.widths.0.is_some_and(|width| width >= 8);
        let (mut readable, mut last, mut places) = (0_u64, None, Vec::new());
        let mut open = false;
        self.walk(table.root()?, table.widths, &mut |met| match met {
            Met::Row {
                key, is_whole: true, ..
            } => {
                readable += 1;
                let id = u64_at(key, 0).filter(|_| has_ids);
                if std::mem::take(&mut open) {
                    places.push((last, id));
                }
                last = id;
            }
            Met::Row { .. } => {}
            Met::Damage => open = true,
        });
        if open {
            places.push((last, None));
        }
        if places.is_empty() {
            return None;
        }
        let place = |(from, to): &(Option<u64>, Option<u64>)| match (from, to) {
            (Some(from), Some(to)) => format!("between ids {from} and {to}"),
            (Some(from), None) => format!("from id {from} on"),
            (None, Some(to)) => format!("up to id {to}"),
            (None, None) => "all of it".to_owned(),
        };
        let mut text = format!(
            "table \"{}\": {readable} of {} rows can be read",
            table.name, table.rows
        );
        if has_ids {
            let places: Vec<String> = places.iter().map(place).collect();
            text.push_str(&format!(", damaged {}", places.join(", ")));
        }
        Some(text)
    }

    /// Subscriptions of which fewer rows can be read than were counted.
    fn short_of(&self, commit: Commit, rows: &str, counts: &str, what: &str) -> Vec<String> {
        let (Some(rows), Some(counts)) = (self.rows(commit, rows), self.rows(commit, counts)) else {
            return Vec::new();
        };
        let readable = count_by_id(&rows);
        let counted = counts.whole.iter().filter_map(|(id, count)| {
            let (id, count) = (u64_at(id, 0)?, u64_at(count, 0)?);
            let readable = readable.get(&id).copied().unwrap_or(0);
            (readable < count).then(|| format!("subscription {id}: {readable} of {count} {what} can be read"))
        });
        counted.collect()
    }
}

/// How many rows there are of each first number of the key.
pub fn count_by_id(rows: &TableRows) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    for id in rows.whole.keys().filter_map(|key| u64_at(key, 0)) {
        *counts.entry(id).or_default() += 1;
    }
    counts
}

fn table_of(name: &[u8], definition: &[u8], is_whole: bool) -> Option<StoredTable> {
    let width = |at: usize| match definition.get(at)? {
        0 => Some(None),
        _ => u32_at(definition, at + 1).map(Some),
    };
    Some(StoredTable {
        name: str::from_utf8(name).ok()?.to_owned(),
        rows: u64_at(definition, 1)?,
        root: match definition.get(9)? {
            0 => None,
            _ => Some(u64_at(definition, 10)?),
        },
        widths: (width(42)?, width(47)?),
        is_whole,
    })
}

/// Hands the rows of a leaf to `row`. None if they lie outside of the page.
fn rows_of(
    page: &[u8],
    entries: usize,
    (key_width, value_width): Widths,
    mut row: impl FnMut(&[u8], &[u8]),
) -> Option<()> {
    let ends = |is_variable: bool| if is_variable { 4 * entries } else { 0 };
    let key_ends = 4;
    let value_ends = key_ends + ends(key_width.is_none());
    let keys = value_ends + ends(value_width.is_none());
    let key_end = |n: usize| match key_width {
        Some(width) => Some(keys + width * (n + 1)),
        None => u32_at(page, key_ends + 4 * n),
    };
    let values = match entries.checked_sub(1) {
        Some(last) => key_end(last)?,
        None => return Some(()),
    };
    let value_end = |n: usize| match value_width {
        Some(width) => Some(values + width * (n + 1)),
        None => u32_at(page, value_ends + 4 * n),
    };
    let (mut key_from, mut value_from) = (keys, values);
    for n in 0..entries {
        let (key_to, value_to) = (key_end(n)?, value_end(n)?);
        row(page.get(key_from..key_to)?, page.get(value_from..value_to)?);
        (key_from, value_from) = (key_to, value_to);
    }
    Some(())
}

const _: () = assert!(SLOTS_AT[1] + 128 <= BLOCK);
