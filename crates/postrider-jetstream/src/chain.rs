//! One stream with one writer at a time.
//!
//! Every message carries its owner's epoch and a running number. Only the expected last sequence is checked by the
//! server, and that alone does not keep a stale owner out: of its messages in flight only the first is refused when
//! another owner's marker takes its place, those behind it match again. So a message is committed only when it and
//! all before it were acknowledged, and whoever reads passes over what is not next in the chain of the latest owner.
//! A message that was sent once is sent with the same bytes until it is stored or the stream is lost to another.

use crate::connect::{self, Connection};
use async_nats::HeaderMap;
use async_nats::jetstream;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::stream::{RawMessageErrorKind, Stream};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};
use postrider_store::Error;
use std::collections::VecDeque;
use std::fmt;
use std::future::IntoFuture;
use std::time::Duration;
use tokio::time::Instant;

/// Messages on their way at once: more add only to the time that each takes.
pub const DEPTH: usize = 4;
const HEADER: &str = "Pr-Id";
/// Between two looks at a stream that does not answer.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A stream that has gone back is looked at so often: a server that is cut off believes for ten seconds that it leads, and
/// answers with what it had then.
const LOOKS_BACK_MAX: u32 = 400;
/// How often a takeover is tried while other writers go on or the stream does not answer.
const TAKES_MAX: u32 = 100;
/// No cluster takes longer to choose another leader for a stream.
const ELECTION: Duration = Duration::from_secs(15);

/// What a message is in the chain of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id {
    pub epoch: u64,
    pub n: u64,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.n)
    }
}

impl Id {
    /// None for a message that is not of a chain.
    pub fn of(headers: &HeaderMap) -> Option<Id> {
        let (epoch, n) = headers.get(HEADER)?.as_str().split_once('.')?;
        Some(Id {
            epoch: epoch.parse().ok()?,
            n: n.parse().ok()?,
        })
    }
}

/// Follows the chain through a stream of which every message that is there is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Follower {
    epoch: u64,
    next: u64,
    last: u64,
}

/// What a message is to whoever reads the stream in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Another owner begins.
    Marker,
    /// It is the next, but for so many that are not there any more.
    Next { missing: u64 },
    /// It was never committed, or is there a second time.
    PassOver,
}

impl Follower {
    /// Begins with this sequence, where a message with this id comes next.
    pub fn at(sequence: u64, next: Id) -> Follower {
        Follower {
            epoch: next.epoch,
            next: next.n,
            last: sequence.max(1) - 1,
        }
    }

    pub fn see(&mut self, sequence: u64, id: Id) -> Seen {
        // Messages that were damaged or removed leave a hole; without it, a number that is not the next is not ours.
        let hole = sequence.saturating_sub(self.last.saturating_add(1));
        self.last = sequence;
        if id.epoch > self.epoch && id.n <= hole {
            self.epoch = id.epoch;
            self.next = id.n.saturating_add(1);
            return match id.n {
                0 => Seen::Marker,
                missing => Seen::Next { missing },
            };
        }
        if id.epoch != self.epoch || id.n < self.next || id.n > self.next.saturating_add(hole) {
            return Seen::PassOver;
        }
        let missing = id.n - self.next;
        self.next = id.n.saturating_add(1);
        Seen::Next { missing }
    }

    /// A message that is of nobody's chain only takes a place.
    pub fn pass(&mut self, sequence: u64) {
        self.last = sequence;
    }
}

/// The stream belongs to another owner now, or is not the one it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost(pub String);

struct Sent {
    id: Id,
    subject: String,
    payload: Bytes,
}

impl Sent {
    fn message(&self, expected: u64) -> PublishMessage {
        PublishMessage::build()
            .payload(self.payload.clone())
            .header(HEADER, self.id.to_string().as_str())
            .expected_last_sequence(expected)
    }
}

type Acknowledged = Result<PublishAck, PublishError>;

async fn publish(js: &jetstream::Context, subject: String, message: PublishMessage) -> Acknowledged {
    js.send_publish(subject, message).await?.await
}

/// The writing end.
pub struct Chain {
    connection: Connection,
    /// Answers for the leader, in a short time.
    stream: Stream,
    name: String,
    epoch: u64,
    next: u64,
    /// The last sequence that is known to be filled, all of it seen.
    last: u64,
    /// Sent and not committed, in order.
    pending: VecDeque<Sent>,
    flying: FuturesOrdered<BoxFuture<'static, Acknowledged>>,
    broken: bool,
    looks_back: u32,
}

impl Chain {
    /// Takes a stream over: from the marker on, whose sequence is returned too, nothing of an earlier owner counts.
    pub async fn take(
        connection: &Connection,
        name: &str,
        epoch: u64,
        subject: String,
        marker: Bytes,
    ) -> Result<(Chain, u64), Error> {
        let away = |e: &(dyn std::error::Error + 'static)| {
            Error::Unavailable(format!(
                "stream {name} cannot be taken over: {}",
                connect::chain(e)
            ))
        };
        let asking = &connection.asking;
        let stream = patiently(|| async { asking.get_stream(name).await.map_err(|e| away(&e)) }).await?;
        let id = Id { epoch, n: 0 };
        let marker = Sent {
            id,
            subject,
            payload: marker,
        };
        let mut chain = Chain {
            connection: connection.clone(),
            stream,
            name: name.into(),
            epoch,
            next: 1,
            last: 0,
            pending: VecDeque::new(),
            flying: FuturesOrdered::new(),
            broken: false,
            looks_back: 0,
        };
        // From here on the marker may be there, though nobody has said so.
        let mut unsure_from = None;
        let mut trouble = String::from("others keep writing to it");
        for _ in 0..TAKES_MAX {
            let end = match chain.stream.get_info().await {
                Ok(info) => info.state.last_sequence,
                Err(e) => {
                    trouble = connect::chain(&e);
                    nap(LOOK_EVERY).await;
                    continue;
                }
            };
            if let Some(from) = unsure_from {
                match chain.find(id, from, end).await {
                    Ok(Some(sequence)) => {
                        chain.last = sequence;
                        return Ok((chain, sequence));
                    }
                    Ok(None) => {}
                    Err(e) => {
                        trouble = e;
                        nap(LOOK_EVERY).await;
                        continue;
                    }
                }
            }
            chain.last = end;
            match publish(&connection.js, marker.subject.clone(), marker.message(end)).await {
                Ok(ack) => {
                    chain.last = ack.sequence;
                    return Ok((chain, ack.sequence));
                }
                Err(e) if e.kind() == PublishErrorKind::WrongLastSequence => {}
                Err(e) => {
                    trouble = connect::chain(&e);
                    unsure_from.get_or_insert(end + 1);
                    nap(LOOK_EVERY).await;
                }
            }
        }
        Err(Error::Unavailable(format!(
            "stream {name} cannot be taken over: {trouble}"
        )))
    }

    /// The sequence of a message between these two, if it is there.
    async fn find(&mut self, id: Id, from: u64, end: u64) -> Result<Option<u64>, String> {
        for sequence in from..=end {
            match self.stream.get_raw_message(sequence).await {
                Ok(message) if Id::of(&message.headers) == Some(id) => return Ok(Some(sequence)),
                Ok(_) => {}
                Err(e) if e.kind() == RawMessageErrorKind::NoMessageFound => {}
                Err(e) => return Err(connect::chain(&e)),
            }
        }
        Ok(None)
    }

    /// The number of the next message that is sent.
    pub fn next_id(&self) -> Id {
        Id {
            epoch: self.epoch,
            n: self.next,
        }
    }

    pub fn last(&self) -> u64 {
        self.last
    }

    pub fn has_room(&self) -> bool {
        self.pending.len() < DEPTH && !self.broken
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }

    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// It is not known any more what becomes of what is on its way: the connection was made anew.
    pub fn doubt(&mut self) {
        self.broken |= !self.pending.is_empty();
    }

    /// Sends the next message of the chain. It is committed when `acked` or `recover` says so.
    pub async fn send(&mut self, subject: String, payload: Bytes) {
        let id = self.next_id();
        self.next += 1;
        self.pending.push_back(Sent { id, subject, payload });
        if !self.broken {
            self.fly(self.pending.len() - 1).await;
        }
    }

    async fn fly(&mut self, index: usize) {
        let sent = &self.pending[index];
        let expected = self.last + self.flying.len() as u64;
        let (subject, message) = (sent.subject.clone(), sent.message(expected));
        match self.connection.js.send_publish(subject, message).await {
            // Boxed once, polled by whoever awaits `acked`: no task of its own.
            Ok(ack) => self.flying.push_back(ack.into_future()),
            Err(e) => {
                tracing::debug!(stream = self.name, error = %e, "a message cannot be sent");
                self.broken = true;
            }
        }
    }

    /// Waits for the next acknowledgement. Returns the sequence of the message that is committed with it; none if
    /// the chain is broken and has to be recovered. Nothing is lost if this is dropped.
    pub async fn acked(&mut self) -> Option<u64> {
        match self.flying.next().await {
            Some(Ok(ack)) if ack.sequence == self.last + 1 => {
                self.last = ack.sequence;
                self.pending.pop_front();
                Some(ack.sequence)
            }
            Some(Ok(ack)) => {
                tracing::warn!(
                    stream = self.name,
                    sequence = ack.sequence,
                    after = self.last,
                    "out of turn"
                );
                self.broken = true;
                None
            }
            Some(Err(e)) => {
                tracing::debug!(stream = self.name, error = %e, "a message was not acknowledged");
                self.broken = true;
                None
            }
            None => {
                self.broken |= !self.pending.is_empty();
                None
            }
        }
    }

    /// Finds out what is stored, and sends the rest again. Returns the sequences of messages that are committed now,
    /// in order; the chain may still be broken then.
    pub async fn recover(&mut self) -> Result<Vec<u64>, Lost> {
        // Acknowledgements that still come are of no use: what they say is seen in the stream.
        self.flying = FuturesOrdered::new();
        let mut committed = Vec::new();
        loop {
            if !self.look(&mut committed).await? {
                nap(LOOK_EVERY).await;
                continue;
            }
            if !committed.is_empty() {
                self.broken = !self.pending.is_empty();
                return Ok(committed);
            }
            let Some(first) = self.pending.front() else {
                self.broken = false;
                return Ok(committed);
            };
            // One alone, until it is known where the stream ends.
            let (subject, message) = (first.subject.clone(), first.message(self.last));
            match publish(&self.connection.js, subject, message).await {
                Ok(ack) => {
                    self.last = ack.sequence;
                    self.pending.pop_front();
                    committed.push(ack.sequence);
                    break;
                }
                Err(e) => {
                    tracing::debug!(stream = self.name, error = %e, "a message was not acknowledged again");
                    if e.kind() != PublishErrorKind::WrongLastSequence {
                        nap(LOOK_EVERY).await;
                    }
                }
            }
        }
        self.broken = false;
        for index in 0..self.pending.len() {
            if !self.broken {
                self.fly(index).await;
            }
        }
        Ok(committed)
    }

    /// Looks at what has been stored since. False if the stream does not answer.
    async fn look(&mut self, committed: &mut Vec<u64>) -> Result<bool, Lost> {
        let end = match self.stream.get_info().await {
            Ok(info) => info.state.last_sequence,
            Err(e) => {
                tracing::debug!(stream = self.name, error = %e, "the stream does not answer");
                return Ok(false);
            }
        };
        if end < self.last {
            self.looks_back += 1;
            if self.looks_back < LOOKS_BACK_MAX {
                return Ok(false);
            }
            return Err(Lost(format!(
                "stream {} has lost messages that it had acknowledged: it ends with {end}, not with {}",
                self.name, self.last
            )));
        }
        self.looks_back = 0;
        for sequence in self.last + 1..=end {
            // From the leader: a replica may not have it yet.
            match self.stream.get_raw_message(sequence).await {
                Ok(message) => {
                    let id = Id::of(&message.headers);
                    if id.is_some_and(|id| id.epoch > self.epoch) {
                        return Err(Lost(format!("another node has taken stream {} over", self.name)));
                    }
                    self.last = sequence;
                    if id.is_some() && id == self.pending.front().map(|sent| sent.id) {
                        self.pending.pop_front();
                        committed.push(sequence);
                    }
                }
                // Only an owner removes messages, and these are not ours to have removed.
                Err(e) if e.kind() == RawMessageErrorKind::NoMessageFound => {
                    return Err(Lost(format!(
                        "another node has removed messages of stream {}",
                        self.name
                    )));
                }
                Err(e) => {
                    tracing::debug!(stream = self.name, sequence, error = %e, "a message cannot be read");
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

/// Tries something again for as long as a cluster may take to choose another leader.
pub async fn patiently<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Error>>,
{
    let until = Instant::now() + ELECTION;
    loop {
        match attempt().await {
            Err(Error::Unavailable(why)) if Instant::now() < until => {
                tracing::debug!(why, "tried again");
                nap(LOOK_EVERY).await;
            }
            other => return other,
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "paces questions to a server that is away; no rule depends on it"
)]
pub async fn nap(duration: Duration) {
    tokio::time::sleep(duration).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_written() {
        let id = Id { epoch: 7, n: 12 };
        let mut headers = HeaderMap::new();
        assert_eq!(Id::of(&headers), None);
        headers.insert(HEADER, id.to_string().as_str());
        assert_eq!(Id::of(&headers), Some(id));
        for wrong in ["", "7", "7.", ".1", "7.x", "-1.2", "7.1.2"] {
            headers.insert(HEADER, wrong);
            assert_eq!(Id::of(&headers), None, "{wrong:?}");
        }
    }

    #[test]
    fn whoever_reads_passes_over_what_was_never_committed() {
        let mut follower = Follower::at(1, Id { epoch: 0, n: 0 });
        let mut sequence = 0;
        let mut check = |epoch, n, expected| {
            sequence += 1;
            let seen = follower.see(sequence, Id { epoch, n });
            assert_eq!(seen, expected, "{epoch}.{n}");
        };
        let next = Seen::Next { missing: 0 };
        check(3, 0, Seen::Marker);
        check(3, 1, next);
        check(3, 3, Seen::PassOver);
        check(3, 2, next);
        check(3, 3, next);
        check(3, 3, Seen::PassOver);
        check(5, 0, Seen::Marker);
        check(3, 4, Seen::PassOver);
        check(5, 2, Seen::PassOver);
        check(5, 1, next);
        check(4, 0, Seen::PassOver);
        check(7, 3, Seen::PassOver);
        check(5, 2, next);
    }

    // One message that is damaged must not hide all that come after it.
    #[test]
    fn the_chain_goes_on_behind_a_hole() {
        let mut follower = Follower::at(10, Id { epoch: 3, n: 7 });
        let mut check = |sequence, epoch, n, expected| {
            let seen = follower.see(sequence, Id { epoch, n });
            assert_eq!(seen, expected, "{epoch}.{n} at {sequence}");
        };
        let next = |missing| Seen::Next { missing };
        check(10, 3, 7, next(0));
        check(13, 3, 10, next(2));
        check(15, 3, 11, next(0));
        check(17, 3, 14, Seen::PassOver);
        check(18, 3, 12, next(0));
        check(21, 4, 2, next(2));
        check(22, 3, 13, Seen::PassOver);
        check(24, 5, 2, Seen::PassOver);
        check(25, 4, 3, next(0));
    }
}
