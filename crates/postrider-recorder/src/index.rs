//! The index of a segment: in memory while the segment is written, in a file next to it afterwards.
//!
//! Three tables: *cards*, one for every frame of accepted events in the order of recording; *ids*,
//! hashes of event ids; *places*, the records about the events of a chunk, by the position of the
//! chunk's first event.

use crate::frame::{DigestKind, RecordDigest};
use postrider_engine::recorder::QueryWork;
use rustc_hash::{FxHashMap, FxHashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const MAGIC: [u8; 8] = *b"PRFLIDX1";
/// Magic, the length of the rest, and the checksum of everything that follows.
const HEAD: usize = 8 + 8 + 4;
const BLOCK: usize = 4096;
const NONE: u32 = u32::MAX;
/// The position of events that were not stored.
pub const NO_POSITION: u64 = u64::MAX;

/// A value with a fixed length in an index file.
pub trait FixedWidth: Copy {
    const WIDTH: usize;
    fn put(&self, out: &mut Vec<u8>);
    fn take(bytes: &[u8]) -> Self;
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// A summary of a frame of accepted events, so that the frame need not be read. Sets are stored as
/// bits of hashes: a value without its bit is not in the frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameCard {
    pub offset: u32,
    /// The number of deliveries of the events in the frame.
    pub deliveries: u32,
    /// When the request was accepted, in nanoseconds.
    pub accepted: i64,
    pub topic: u64,
    /// The chunk's position, or [`NO_POSITION`].
    pub position: u64,
    pub subscriptions: u64,
    pub types: u32,
    pub events: u32,
}

impl FixedWidth for FrameCard {
    const WIDTH: usize = 48;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.deliveries.to_le_bytes());
        out.extend_from_slice(&self.accepted.to_le_bytes());
        out.extend_from_slice(&self.topic.to_le_bytes());
        out.extend_from_slice(&self.position.to_le_bytes());
        out.extend_from_slice(&self.subscriptions.to_le_bytes());
        out.extend_from_slice(&self.types.to_le_bytes());
        out.extend_from_slice(&self.events.to_le_bytes());
    }

    fn take(bytes: &[u8]) -> FrameCard {
        FrameCard {
            offset: u32_at(bytes, 0),
            deliveries: u32_at(bytes, 4),
            accepted: u64_at(bytes, 8) as i64,
            topic: u64_at(bytes, 16),
            position: u64_at(bytes, 24),
            subscriptions: u64_at(bytes, 32),
            types: u32_at(bytes, 40),
            events: u32_at(bytes, 44),
        }
    }
}

/// The hash of an event's id, and the frame that contains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventIdEntry {
    pub hash: u64,
    pub offset: u32,
}

impl FixedWidth for EventIdEntry {
    const WIDTH: usize = 12;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.hash.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
    }

    fn take(bytes: &[u8]) -> EventIdEntry {
        EventIdEntry {
            hash: u64_at(bytes, 0),
            offset: u32_at(bytes, 8),
        }
    }
}

/// A record about events of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkActivityEntry {
    /// The position of the chunk's first event.
    pub position: u64,
    pub offset: u32,
    pub digest: RecordDigest,
    /// The affected events of the chunk.
    pub mask: u32,
}

impl FixedWidth for ChunkActivityEntry {
    const WIDTH: usize = 20;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.position.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.digest.0.to_le_bytes());
        out.extend_from_slice(&self.mask.to_le_bytes());
    }

    fn take(bytes: &[u8]) -> ChunkActivityEntry {
        ChunkActivityEntry {
            position: u64_at(bytes, 0),
            offset: u32_at(bytes, 8),
            digest: RecordDigest(u32_at(bytes, 12)),
            mask: u32_at(bytes, 16),
        }
    }
}

/// The bit that represents a value in a set of 64.
pub fn bit64(value: u64) -> u64 {
    1 << (value.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58)
}

pub fn bit32(hash: u64) -> u32 {
    1 << (hash >> 59)
}

/// A hash of text that never changes: FNV-1a with a final mix.
pub fn hash_text(text: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for chunk in text.as_bytes().chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash = (hash ^ text.len() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    hash ^ (hash >> 32)
}

/// A summary of a segment, to decide whether a query has to read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentSummary {
    /// The earliest and the latest time of acceptance.
    pub accepted: Option<(i64, i64)>,
    /// The least and the greatest position of events that were accepted in another segment.
    pub foreign: Option<(u64, u64)>,
    pub topics: FxHashSet<u64>,
    /// Subscriptions that events matched.
    pub subscriptions: FxHashSet<u64>,
}

impl SegmentSummary {
    fn widen<T: Ord + Copy>(range: &mut Option<(T, T)>, value: T) {
        *range = Some(range.map_or((value, value), |(low, high)| (low.min(value), high.max(value))));
    }

    pub fn note_card(&mut self, card: &FrameCard) {
        SegmentSummary::widen(&mut self.accepted, card.accepted);
        self.topics.insert(card.topic);
    }
}

/// New index entries, in the order of writing.
#[derive(Default)]
pub struct IndexNotes {
    pub cards: Vec<FrameCard>,
    pub ids: Vec<EventIdEntry>,
    pub places: Vec<ChunkActivityEntry>,
    /// Frames about endpoints and subscriptions rather than events.
    pub facts: Vec<u32>,
    /// Subscriptions that are named in matched sets.
    pub subscriptions: Vec<u64>,
}

/// Values in the order of insertion, found by key.
struct KeyedChains<T> {
    last: FxHashMap<u64, u32>,
    /// Each value with the index of the previous one of the same key.
    all: Vec<(T, u32)>,
}

impl<T> Default for KeyedChains<T> {
    fn default() -> KeyedChains<T> {
        KeyedChains {
            last: FxHashMap::default(),
            all: Vec::new(),
        }
    }
}

impl<T: Copy> KeyedChains<T> {
    fn add(&mut self, key: u64, value: T) {
        let number = self.all.len() as u32;
        let before = self.last.insert(key, number).unwrap_or(NONE);
        self.all.push((value, before));
    }

    fn of(&self, key: u64, out: &mut Vec<T>) {
        let mut at = self.last.get(&key).copied().unwrap_or(NONE);
        while let Some((value, before)) = self.all.get(at as usize) {
            out.push(*value);
            at = *before;
        }
    }

    fn values(&self) -> impl Iterator<Item = T> {
        self.all.iter().map(|(value, _)| *value)
    }
}

/// The index of a segment that is being written.
#[derive(Default)]
pub struct MemoryIndex {
    pub cards: Vec<FrameCard>,
    ids: KeyedChains<EventIdEntry>,
    places: KeyedChains<ChunkActivityEntry>,
    pub facts: Vec<u32>,
    pub summary: SegmentSummary,
}

impl MemoryIndex {
    pub fn add(&mut self, notes: &mut IndexNotes) {
        for card in notes.cards.drain(..) {
            self.summary.note_card(&card);
            self.cards.push(card);
        }
        for id in notes.ids.drain(..) {
            self.ids.add(id.hash, id);
        }
        for place in notes.places.drain(..) {
            self.places.add(place.position, place);
        }
        self.facts.append(&mut notes.facts);
        self.summary.subscriptions.extend(notes.subscriptions.drain(..));
    }

    /// Computes the values that are known only when the segment is complete.
    pub fn finish(&mut self) {
        let home: FxHashSet<u64> = self.cards.iter().map(|card| card.position).collect();
        for place in self
            .places
            .values()
            .filter(|p| !p.digest.is(DigestKind::Accepted))
        {
            if !home.contains(&place.position) {
                SegmentSummary::widen(&mut self.summary.foreign, place.position);
            }
        }
    }

    /// The whole index in its file format.
    pub fn encode(&self) -> Vec<u8> {
        let mut ids: Vec<EventIdEntry> = self.ids.values().collect();
        ids.sort_unstable();
        let mut places: Vec<ChunkActivityEntry> = self.places.values().collect();
        places.sort_unstable_by_key(|p| (p.position, p.offset, p.digest.0));
        let size = self.cards.len() * FrameCard::WIDTH
            + ids.len() * EventIdEntry::WIDTH
            + places.len() * ChunkActivityEntry::WIDTH;
        let mut out = Vec::with_capacity(size + 4096);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[0; HEAD - 8]);
        let put = |out: &mut Vec<u8>, value: u64| out.extend_from_slice(&value.to_le_bytes());
        let summary = &self.summary;
        for count in [
            self.cards.len(),
            ids.len(),
            places.len(),
            self.facts.len(),
            summary.topics.len(),
            summary.subscriptions.len(),
        ] {
            put(&mut out, count as u64);
        }
        let (from, to) = summary.accepted.unwrap_or((1, 0));
        put(&mut out, from as u64);
        put(&mut out, to as u64);
        let (low, high) = summary.foreign.unwrap_or((1, 0));
        put(&mut out, low);
        put(&mut out, high);
        for fact in &self.facts {
            out.extend_from_slice(&fact.to_le_bytes());
        }
        for set in [&summary.topics, &summary.subscriptions] {
            for value in set {
                put(&mut out, *value);
            }
        }
        for card in &self.cards {
            card.put(&mut out);
        }
        for id in &ids {
            id.put(&mut out);
        }
        for place in &places {
            place.put(&mut out);
        }
        let rest = (out.len() - HEAD) as u64;
        out[8..16].copy_from_slice(&rest.to_le_bytes());
        let crc = crc32fast::hash(&out[HEAD..]);
        out[16..20].copy_from_slice(&crc.to_le_bytes());
        out
    }
}

/// Writes an index file atomically with respect to a process that dies. Damage by a power failure
/// is recognized by the checksum.
pub fn write(path: &Path, encoded: &[u8]) -> io::Result<FileIndex> {
    let temporary = path.with_extension("idx-new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(encoded)?;
    std::fs::rename(&temporary, path)?;
    FileIndex::open(path)
}

/// The range of one table in an index file.
#[derive(Clone, Copy, Debug, Default)]
struct IndexSection {
    start: u64,
    count: u64,
}

/// The index of a closed segment.
#[derive(Debug)]
pub struct FileIndex {
    file: File,
    cards: IndexSection,
    ids: IndexSection,
    places: IndexSection,
    pub facts: Vec<u32>,
    pub summary: SegmentSummary,
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the index is damaged")
}

impl FileIndex {
    /// Reads the part that is kept in memory. The tables are not read.
    pub fn open(path: &Path) -> io::Result<FileIndex> {
        const COUNTS: usize = 10 * 8;
        let file = File::open(path)?;
        let mut head = [0; HEAD + COUNTS];
        file.read_exact_at(&mut head, 0)?;
        let len = file.metadata()?.len();
        let rest = u64_at(&head, 8);
        if head[..8] != MAGIC || rest.checked_add(HEAD as u64) != Some(len) {
            return Err(damaged());
        }
        let number = |i: usize| u64_at(&head, HEAD + 8 * i);
        let mut at = (HEAD + COUNTS) as u64;
        let mut section = |count: u64, width: usize| {
            let start = at;
            let bytes = count.checked_mul(width as u64).ok_or_else(damaged)?;
            at = at
                .checked_add(bytes)
                .filter(|end| *end <= len)
                .ok_or_else(damaged)?;
            Ok::<_, io::Error>(IndexSection { start, count })
        };
        let facts = section(number(3), 4)?;
        let topics = section(number(4), 8)?;
        let subscriptions = section(number(5), 8)?;
        let cards = section(number(0), FrameCard::WIDTH)?;
        let ids = section(number(1), EventIdEntry::WIDTH)?;
        let places = section(number(2), ChunkActivityEntry::WIDTH)?;
        let mut sets = vec![0; (cards.start - facts.start) as usize];
        file.read_exact_at(&mut sets, facts.start)?;
        let set = |section: IndexSection| {
            let from = (section.start - facts.start) as usize;
            (0..section.count as usize)
                .map(|i| u64_at(&sets, from + 8 * i))
                .collect()
        };
        let range = |low: u64, high: u64| (low <= high).then_some((low, high));
        let (from, to) = (number(6) as i64, number(7) as i64);
        Ok(FileIndex {
            facts: (0..facts.count as usize).map(|i| u32_at(&sets, 4 * i)).collect(),
            summary: SegmentSummary {
                accepted: (from <= to).then_some((from, to)),
                foreign: range(number(8), number(9)),
                topics: set(topics),
                subscriptions: set(subscriptions),
            },
            file,
            cards,
            ids,
            places,
        })
    }

    /// Whether the file is as it was written.
    pub fn is_whole(&self) -> bool {
        let mut hasher = crc32fast::Hasher::new();
        let mut head = [0; HEAD];
        if self.file.read_exact_at(&mut head, 0).is_err() {
            return false;
        }
        let (mut at, mut block) = (HEAD as u64, vec![0; 256 << 10]);
        loop {
            match self.file.read_at(&mut block, at) {
                Ok(0) => return hasher.finalize() == u32_at(&head, 16),
                Ok(n) => {
                    hasher.update(&block[..n]);
                    at += n as u64;
                }
                Err(_) => return false,
            }
        }
    }

    pub fn bytes(&self) -> u64 {
        self.places.start + self.places.count * ChunkActivityEntry::WIDTH as u64
    }
}

/// The block of a table that was read last. Queries read tables sequentially, so that the next
/// entry is mostly in it.
#[derive(Default)]
struct IndexWindow {
    first: u64,
    bytes: Vec<u8>,
}

/// A query's cache of one segment's index.
#[derive(Default)]
pub struct IndexCache {
    cards: IndexWindow,
    ids: IndexWindow,
    places: IndexWindow,
}

impl IndexWindow {
    /// Reads the entry with this number, and its neighbours with it.
    fn get<T: FixedWidth>(
        &mut self,
        file: &File,
        section: IndexSection,
        number: u64,
        work: &mut QueryWork,
    ) -> Option<T> {
        let held = (self.bytes.len() / T::WIDTH) as u64;
        if number < self.first || number >= self.first + held {
            let per_block = (BLOCK / T::WIDTH) as u64;
            let first = number / per_block * per_block;
            let count = per_block.min(section.count.checked_sub(first)?);
            self.bytes.resize(count as usize * T::WIDTH, 0);
            self.first = first;
            work.blocks += 1;
            if file
                .read_exact_at(&mut self.bytes, section.start + first * T::WIDTH as u64)
                .is_err()
            {
                self.bytes.clear();
                return None;
            }
        }
        let at = (number - self.first) as usize * T::WIDTH;
        Some(T::take(&self.bytes[at..at + T::WIDTH]))
    }

    /// The number of the first entry whose key is not less than `key`. Keys are distributed evenly
    /// enough for interpolation.
    fn lower_bound<T: FixedWidth>(
        &mut self,
        file: &File,
        section: IndexSection,
        key: u64,
        of: impl Fn(&T) -> u64,
        work: &mut QueryWork,
    ) -> Option<u64> {
        let (mut low, mut high) = (0, section.count);
        // The cached block may contain the answer, or narrow the range.
        let held = (self.bytes.len() / T::WIDTH) as u64;
        if held > 0 {
            let first: T = self.get(file, section, self.first, work)?;
            let last: T = self.get(file, section, self.first + held - 1, work)?;
            if of(&first) < key {
                low = self.first;
            } else {
                high = self.first;
            }
            if high > self.first && of(&last) >= key {
                high = self.first + held - 1;
            } else if of(&last) < key {
                low = self.first + held;
            }
        }
        let (mut low_key, mut high_key) = (0u64, u64::MAX);
        if high - low > (BLOCK / T::WIDTH) as u64 {
            let first: T = self.get(file, section, low, work)?;
            let last: T = self.get(file, section, high - 1, work)?;
            (low_key, high_key) = (of(&first), of(&last));
            if key <= low_key {
                return Some(low);
            }
            if key > high_key {
                return Some(high);
            }
        }
        let mut guesses = 0;
        while low < high {
            let span = high - low;
            let middle = if guesses < 4 && span > (BLOCK / T::WIDTH) as u64 && high_key > low_key {
                guesses += 1;
                let share = (key - low_key) as f64 / (high_key - low_key) as f64;
                (low + (share * span as f64) as u64).min(high - 1)
            } else {
                low + span / 2
            };
            let found = of(&self.get(file, section, middle, work)?);
            if found < key {
                (low, low_key) = (middle + 1, found.min(key));
            } else {
                (high, high_key) = (middle, found);
            }
        }
        Some(low)
    }
}

/// The index of a segment, in memory or in a file.
pub enum RecordIndex {
    /// Being written, or about to go into a file.
    Memory(MemoryIndex),
    File(FileIndex),
    /// To be rebuilt from the segment.
    Missing,
}

impl RecordIndex {
    pub fn summary(&self) -> Option<&SegmentSummary> {
        match self {
            RecordIndex::Memory(index) => Some(&index.summary),
            RecordIndex::File(index) => Some(&index.summary),
            RecordIndex::Missing => None,
        }
    }

    pub fn facts(&self) -> &[u32] {
        match self {
            RecordIndex::Memory(index) => &index.facts,
            RecordIndex::File(index) => &index.facts,
            RecordIndex::Missing => &[],
        }
    }

    pub fn cards(&self) -> u32 {
        match self {
            RecordIndex::Memory(index) => index.cards.len() as u32,
            RecordIndex::File(index) => index.cards.count as u32,
            RecordIndex::Missing => 0,
        }
    }

    pub fn card(&self, number: u32, cache: &mut IndexCache, work: &mut QueryWork) -> Option<FrameCard> {
        work.cards += 1;
        match self {
            RecordIndex::Memory(index) => index.cards.get(number as usize).copied(),
            RecordIndex::File(index) if u64::from(number) < index.cards.count => {
                cache.cards.get(&index.file, index.cards, u64::from(number), work)
            }
            RecordIndex::File(_) | RecordIndex::Missing => None,
        }
    }

    /// Whether this segment may contain records about a chunk that was accepted in another one.
    pub fn may_have_foreign(&self, position: u64) -> bool {
        match self {
            RecordIndex::Memory(index) => index.places.last.contains_key(&position),
            RecordIndex::File(index) => index
                .summary
                .foreign
                .is_some_and(|(low, high)| (low..=high).contains(&position)),
            RecordIndex::Missing => false,
        }
    }

    /// Appends the records about a chunk, the latest first.
    pub fn places(
        &self,
        position: u64,
        cache: &mut IndexCache,
        work: &mut QueryWork,
        out: &mut Vec<ChunkActivityEntry>,
    ) {
        work.lookups += 1;
        match self {
            RecordIndex::Memory(index) => index.places.of(position, out),
            RecordIndex::File(index) => {
                let window = &mut cache.places;
                let key = |entry: &ChunkActivityEntry| entry.position;
                let (file, section) = (&index.file, index.places);
                let Some(mut at) = window.lower_bound(file, section, position, key, work) else {
                    return;
                };
                let from = out.len();
                while at < section.count {
                    match window.get::<ChunkActivityEntry>(file, section, at, work) {
                        Some(entry) if entry.position == position => out.push(entry),
                        _ => break,
                    }
                    at += 1;
                }
                out[from..].reverse();
            }
            RecordIndex::Missing => {}
        }
    }

    /// Appends the frames that may contain events with this id, the latest first.
    pub fn ids(&self, hash: u64, cache: &mut IndexCache, work: &mut QueryWork, out: &mut Vec<u32>) {
        work.lookups += 1;
        match self {
            RecordIndex::Memory(index) => {
                let mut found = Vec::new();
                index.ids.of(hash, &mut found);
                out.extend(found.iter().map(|entry| entry.offset));
            }
            RecordIndex::File(index) => {
                let window = &mut cache.ids;
                let key = |entry: &EventIdEntry| entry.hash;
                let (file, section) = (&index.file, index.ids);
                let Some(mut at) = window.lower_bound(file, section, hash, key, work) else {
                    return;
                };
                let from = out.len();
                while at < section.count {
                    match window.get::<EventIdEntry>(file, section, at, work) {
                        Some(entry) if entry.hash == hash => out.push(entry.offset),
                        _ => break,
                    }
                    at += 1;
                }
                out[from..].reverse();
            }
            RecordIndex::Missing => {}
        }
    }
}
