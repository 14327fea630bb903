//! A node's state of a replicated log, and the commits it still has to send: no network, no clock.

use super::frame::{self, ByteReader, HEAD_BYTES, ReplicaManifest, ReplicationMessage, put_bytes};
use super::{AppliedCommit, StateMachine};
use postrider_store::Error;
use postrider_store::record::batch::put;
use std::collections::{BTreeMap, VecDeque};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Maximum size of a message of several waiting commits.
const GROUP_BYTES: usize = 128 << 10;
/// Number of remembered authors, those of the latest commits: any other author has ended long ago.
const AUTHORS_MAX: usize = 1024;
/// Number of messages after which an incomplete commit is forgotten.
const UNFINISHED_FOR: u64 = 10_000;
const SNAPSHOT_VERSION: u64 = 1;

pub(super) struct ReplicaBuffer<M: StateMachine> {
    me: u64,
    pub machine: M,
    /// Sequence of the last applied message.
    pub last: u64,
    authors: BTreeMap<u64, CommitAuthor>,
    /// Commits of this node that are not known to be stored, in the order of their numbers.
    waiting: VecDeque<PendingCommit<M>>,
    next_number: u64,
    /// Bytes of commits since the last snapshot.
    log_bytes: u64,
    pub snapshot_bytes: u64,
    /// Size of the log when the snapshot that is being written was begun.
    begun: Option<u64>,
    /// Whether this node made the last commit.
    mine_last: bool,
    /// Stored parts of the snapshot that this node is writing: index → sequence.
    pub own_chunks: BTreeMap<u64, u64>,
    /// Sequence of the last complete snapshot.
    pub snapshot_at: u64,
    /// Why no more messages can be decoded.
    pub broken: Option<Error>,
}

/// State per author that every node must keep, because the question whether a commit is stored may
/// arise after its part of the log was purged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct CommitAuthor {
    /// Number and sequence of the author's last commit.
    number: u64,
    sequence: u64,
    /// The beginning of a commit in parts: its number, the next part, and the bytes so far.
    unfinished: Option<(u64, u64, Vec<u8>)>,
}

struct PendingCommit<M: StateMachine> {
    number: u64,
    /// The encoded records.
    records: Vec<u8>,
    draft: M::Draft,
    /// Number of parts that are stored.
    parts: u64,
    /// Size of each part, once the first was made.
    part_bytes: usize,
    /// Whether the commit was sent, and so may be stored.
    sent: bool,
    until: Instant,
    done: oneshot::Sender<Result<M::Output, Error>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakeOutcome {
    /// The message was applied already.
    Old,
    Next,
    /// An earlier message is missing.
    Gap,
}

impl<M: StateMachine> ReplicaBuffer<M> {
    pub fn new(me: u64, machine: M) -> ReplicaBuffer<M> {
        ReplicaBuffer {
            me,
            machine,
            last: 0,
            authors: BTreeMap::new(),
            waiting: VecDeque::new(),
            next_number: 1,
            log_bytes: 0,
            snapshot_bytes: 0,
            begun: None,
            mine_last: false,
            own_chunks: BTreeMap::new(),
            snapshot_at: 0,
            broken: None,
        }
    }

    /// Queues a commit.
    pub fn commit(
        &mut self,
        records: &[Vec<u8>],
        draft: M::Draft,
        until: Instant,
    ) -> oneshot::Receiver<Result<M::Output, Error>> {
        let (done, stored) = oneshot::channel();
        if let Some(broken) = &self.broken {
            // The send cannot fail: the receiver is returned below.
            let _ = done.send(Err(broken.clone()));
            return stored;
        }
        self.waiting.push_back(PendingCommit {
            number: self.next_number,
            records: frame::encode_records(records),
            draft,
            parts: 0,
            part_bytes: 0,
            sent: false,
            until,
            done,
        });
        self.next_number += 1;
        stored
    }

    /// The next message to send, with commits of this node. Commits that are not permitted any more
    /// or have waited for too long are answered with an error. A commit that was sent and is given
    /// up may still be stored: then it counts as another node's.
    pub fn next_message(&mut self, payload_max: usize, now: Instant) -> Option<Vec<u8>> {
        let room = payload_max.saturating_sub(2 * HEAD_BYTES).max(1);
        let mut chosen: Vec<usize> = Vec::new();
        let mut size = 0;
        let mut place = 0;
        while let Some(one) = self.waiting.get(place) {
            let refused = if one.until <= now {
                let what = M::WHAT;
                Some(Error::Unavailable(format!("{what}: JetStream does not answer")))
            } else {
                self.machine.check(&one.draft, self.me).err()
            };
            if let Some(why) = refused {
                if let Some(one) = self.waiting.remove(place) {
                    // The caller may have gone away.
                    let _ = one.done.send(Err(why));
                }
                continue;
            }
            let bytes = one.records.len() + HEAD_BYTES;
            if !chosen.is_empty() && size + bytes > GROUP_BYTES.min(room) {
                break;
            }
            if bytes > room {
                // Too large for a message: the commit is sent alone, in parts.
                return self.next_part(place, room);
            }
            size += bytes;
            chosen.push(place);
            place += 1;
        }
        if chosen.is_empty() {
            return None;
        }
        let commits = self.waiting.iter().take(chosen.len());
        let commits: Vec<(u64, &[u8])> = commits.map(|one| (one.number, &*one.records)).collect();
        let message = frame::encode_commits(self.me, &commits);
        for one in self.waiting.iter_mut().take(chosen.len()) {
            one.sent = true;
        }
        Some(message)
    }

    fn next_part(&mut self, place: usize, room: usize) -> Option<Vec<u8>> {
        let me = self.me;
        let one = self.waiting.get_mut(place)?;
        one.sent = true;
        if one.parts == 0 {
            one.part_bytes = room;
        }
        let mut parts = one.records.chunks(one.part_bytes);
        let count = parts.len() as u64;
        let bytes = parts.nth(one.parts as usize)?;
        let last = one.parts + 1 == count;
        Some(frame::encode_part(me, one.number, one.parts, last, bytes))
    }

    /// Applies a message of the stream.
    pub fn take(&mut self, sequence: u64, payload: &[u8]) -> TakeOutcome {
        if sequence <= self.last || self.broken.is_some() {
            return TakeOutcome::Old;
        }
        if sequence != self.last + 1 {
            return TakeOutcome::Gap;
        }
        match self.apply(sequence, payload) {
            Ok(()) => self.last = sequence,
            Err(why) => self.fail(Error::Corrupt(format!(
                "{}: message {sequence} cannot be read: {why}",
                M::WHAT
            ))),
        }
        TakeOutcome::Next
    }

    /// Stops, because nothing more can be decoded: a newer program may have written it.
    pub fn fail(&mut self, why: Error) {
        for one in self.waiting.drain(..) {
            let _ = one.done.send(Err(why.clone()));
        }
        self.broken = Some(why);
    }

    /// Stops this node.
    pub fn close(&mut self) {
        self.fail(Error::Closed);
    }

    fn apply(&mut self, sequence: u64, payload: &[u8]) -> Result<(), String> {
        match frame::decode(payload).ok_or("it is damaged, or of a newer version")? {
            ReplicationMessage::Commits { by, commits } => {
                self.log_bytes += payload.len() as u64;
                self.mine_last = by == self.me;
                self.author(by, sequence).unfinished = None;
                for commit in commits {
                    self.apply_commit(by, commit.number, &commit.records, sequence)?;
                }
            }
            ReplicationMessage::Part {
                by,
                number,
                index,
                last,
                bytes,
            } => {
                self.log_bytes += payload.len() as u64;
                self.mine_last = by == self.me;
                self.apply_part(sequence, by, number, index, last, bytes)?;
            }
            ReplicationMessage::Chunk { by, index, .. } => {
                if index == 0 {
                    self.begun = Some(self.log_bytes);
                }
                if by == self.me {
                    self.own_chunks.insert(index, sequence);
                }
            }
            ReplicationMessage::Manifest(manifest) => {
                self.snapshot_at = manifest.at;
                self.snapshot_bytes = manifest.bytes;
                self.log_bytes = 0;
                self.begun = None;
            }
        }
        self.forget_unfinished(sequence);
        Ok(())
    }

    fn author(&mut self, by: u64, sequence: u64) -> &mut CommitAuthor {
        if !self.authors.contains_key(&by) && self.authors.len() >= AUTHORS_MAX {
            let oldest = self.authors.iter().min_by_key(|(_, author)| author.sequence);
            if let Some(oldest) = oldest.map(|(by, _)| *by) {
                self.authors.remove(&oldest);
            }
        }
        let author = self.authors.entry(by).or_default();
        author.sequence = sequence;
        author
    }

    fn forget_unfinished(&mut self, sequence: u64) {
        for author in self.authors.values_mut() {
            if author.unfinished.is_some() && author.sequence + UNFINISHED_FOR < sequence {
                author.unfinished = None;
            }
        }
    }

    fn apply_part(
        &mut self,
        sequence: u64,
        by: u64,
        number: u64,
        index: u64,
        last: bool,
        bytes: &[u8],
    ) -> Result<(), String> {
        let author = self.author(by, sequence);
        let mut whole = match author.unfinished.take() {
            _ if index == 0 => Vec::new(),
            Some((of, next, begun)) if of == number && next == index => begun,
            // The beginning of the commit was given up.
            _ => return Ok(()),
        };
        whole.extend_from_slice(bytes);
        if !last {
            author.unfinished = Some((number, index + 1, whole));
            if by == self.me
                && let Some(one) = self.waiting.iter_mut().find(|one| one.number == number)
            {
                one.parts = index + 1;
            }
            return Ok(());
        }
        let records = frame::decode_records(&whole).ok_or("its parts make no commit")?;
        self.apply_commit(by, number, &records, sequence)
    }

    fn apply_commit(&mut self, by: u64, number: u64, records: &[&[u8]], sequence: u64) -> Result<(), String> {
        let author = self.author(by, sequence);
        if number <= author.number {
            return Ok(());
        }
        author.number = number;
        let waiting = match by == self.me {
            true => self.waiting.iter().position(|one| one.number == number),
            false => None,
        };
        let waiting = waiting.and_then(|place| self.waiting.remove(place));
        let output = self.machine.apply(AppliedCommit {
            records,
            by,
            known_here: waiting.is_some(),
            sequence,
        })?;
        if let Some(one) = waiting {
            let _ = one.done.send(Ok(output));
        }
        Ok(())
    }

    /// Whether this node should write a snapshot now. The node whose commit made the log long
    /// enough does; if it fails to, the author of a somewhat later commit does.
    pub fn wants_snapshot(&self, least: u64) -> bool {
        let enough = least.max(self.snapshot_bytes);
        let waited = self.begun.is_none_or(|then| self.log_bytes >= then + enough / 2);
        self.mine_last && self.log_bytes >= enough && waited && self.broken.is_none()
    }

    /// Encodes everything that is needed to continue after the last applied message.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put(&mut out, SNAPSHOT_VERSION);
        put(&mut out, self.authors.len() as u64);
        for (by, author) in &self.authors {
            put(&mut out, *by);
            put(&mut out, author.number);
            put(&mut out, author.sequence);
            match &author.unfinished {
                None => put(&mut out, 0),
                Some((number, next, bytes)) => {
                    put(&mut out, *next);
                    put(&mut out, *number);
                    put_bytes(&mut out, bytes);
                }
            }
        }
        self.machine.snapshot(&mut out);
        out
    }

    /// Continues from a snapshot, regardless of the known state. The outcome of commits that may be
    /// stored can no longer be determined; if they are stored, they count as another node's.
    pub fn restore(&mut self, manifest: &ReplicaManifest, bytes: &[u8]) -> Result<(), Error> {
        let damaged = |why: &str| Error::Corrupt(format!("{}: the snapshot cannot be read: {why}", M::WHAT));
        let mut rest = ByteReader(bytes);
        if rest.number() != Some(SNAPSHOT_VERSION) {
            return Err(damaged("it is damaged, or of a newer version"));
        }
        let authors = read_authors(&mut rest).ok_or_else(|| damaged("it is cut short"))?;
        let machine = self.machine.restore(rest.0, manifest.at);
        machine.map_err(|why| damaged(&why))?;
        self.authors = authors;
        self.last = manifest.at;
        self.snapshot_at = manifest.at;
        self.snapshot_bytes = manifest.bytes;
        self.log_bytes = 0;
        self.begun = None;
        self.own_chunks.clear();
        let stored = self.authors.get(&self.me).map_or(0, |author| author.number);
        let (gone, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|one| one.sent && one.number <= stored);
        self.waiting = waiting;
        let gone: VecDeque<PendingCommit<M>> = gone;
        for one in gone {
            let why = format!("{}: the connection was lost for too long", M::WHAT);
            let _ = one.done.send(Err(Error::Unavailable(why)));
        }
        for one in &mut self.waiting {
            // Commits in parts start again unless the snapshot contains how far they had come.
            let unfinished = self
                .authors
                .get(&self.me)
                .and_then(|author| author.unfinished.as_ref());
            one.parts = match unfinished {
                Some((number, next, _)) if *number == one.number => *next,
                _ => 0,
            };
        }
        Ok(())
    }
}

fn read_authors(rest: &mut ByteReader<'_>) -> Option<BTreeMap<u64, CommitAuthor>> {
    let mut authors = BTreeMap::new();
    for _ in 0..rest.count()? {
        let by = rest.number()?;
        let (number, sequence) = (rest.number()?, rest.number()?);
        let unfinished = match rest.number()? {
            0 => None,
            next => Some((rest.number()?, next, rest.bytes()?.to_vec())),
        };
        authors.insert(
            by,
            CommitAuthor {
                number,
                sequence,
                unfinished,
            },
        );
    }
    Some(authors)
}

#[cfg(test)]
mod tests;
