//! A stream with a single writer at a time, fenced by epochs.
//!
//! Every message carries its owner's epoch and a sequence number of its own. The server checks only
//! the expected last sequence, which alone does not fence a stale owner: when another owner's
//! marker takes the expected place, only the first of its messages in flight is refused, and those
//! after it match again. So a message is committed only when it and all before it were
//! acknowledged, and readers skip whatever is not next in the chain of the latest owner. A message
//! that was sent once is repeated with the same bytes until it is stored or the stream is lost to
//! another owner.

use crate::connection::{self, NatsConnection};
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

/// Maximum number of messages in flight: more only increase the latency of each.
pub const DEPTH: usize = 4;
const HEADER: &str = "Pr-Id";
/// Interval of looking at a stream that does not answer.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Number of looks at a stream whose last sequence has decreased: a server that is cut off believes
/// for ten seconds that it leads, and answers with its old state.
const LOOKS_BACK_MAX: u32 = 400;
/// Maximum number of take-over attempts while other writers continue or the stream does not answer.
const TAKES_MAX: u32 = 100;
/// Upper bound of the time in which a cluster elects another leader for a stream.
const ELECTION: Duration = Duration::from_secs(15);

/// A message's identity in the chain of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChainId {
    pub epoch: u64,
    pub n: u64,
}

impl fmt::Display for ChainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.n)
    }
}

impl ChainId {
    /// `None` for a message that does not belong to a chain.
    pub fn of(headers: &HeaderMap) -> Option<ChainId> {
        let (epoch, n) = headers.get(HEADER)?.as_str().split_once('.')?;
        Some(ChainId {
            epoch: epoch.parse().ok()?,
            n: n.parse().ok()?,
        })
    }
}

/// Follows the chain through a stream; must be shown every existing message in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainFollower {
    epoch: u64,
    next: u64,
    last: u64,
}

/// Role of a message for a reader of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainStep {
    /// The marker of another owner.
    Marker,
    /// The next message of the chain, after this many that no longer exist.
    Next { missing: u64 },
    /// Never committed, or a repetition.
    PassOver,
}

impl ChainFollower {
    /// Starts at this sequence, where the message with this id is expected.
    pub fn at(sequence: u64, next: ChainId) -> ChainFollower {
        ChainFollower {
            epoch: next.epoch,
            next: next.n,
            last: sequence.max(1) - 1,
        }
    }

    pub fn see(&mut self, sequence: u64, id: ChainId) -> ChainStep {
        // Damaged or removed messages leave a hole; without one, a number that is not the next is
        // not committed.
        let hole = sequence.saturating_sub(self.last.saturating_add(1));
        self.last = sequence;
        if id.epoch > self.epoch && id.n <= hole {
            self.epoch = id.epoch;
            self.next = id.n.saturating_add(1);
            return match id.n {
                0 => ChainStep::Marker,
                missing => ChainStep::Next { missing },
            };
        }
        if id.epoch != self.epoch || id.n < self.next || id.n > self.next.saturating_add(hole) {
            return ChainStep::PassOver;
        }
        let missing = id.n - self.next;
        self.next = id.n.saturating_add(1);
        ChainStep::Next { missing }
    }

    /// Skips a message without a chain, which only occupies a sequence.
    pub fn pass(&mut self, sequence: u64) {
        self.last = sequence;
    }
}

/// The stream belongs to another owner now, or was replaced by another stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamLost(pub String);

struct UncommittedMessage {
    id: ChainId,
    subject: String,
    payload: Bytes,
}

impl UncommittedMessage {
    fn message(&self, expected: u64) -> PublishMessage {
        PublishMessage::build()
            .payload(self.payload.clone())
            .header(HEADER, self.id.to_string().as_str())
            .expected_last_sequence(expected)
    }
}

type PublishResult = Result<PublishAck, PublishError>;

async fn publish(js: &jetstream::Context, subject: String, message: PublishMessage) -> PublishResult {
    js.send_publish(subject, message).await?.await
}

/// The writing end of a chain.
pub struct FencedWriter {
    connection: NatsConnection,
    /// Reads from the leader, with a short timeout.
    stream: Stream,
    name: String,
    epoch: u64,
    next: u64,
    /// The last sequence known to be occupied; everything up to it has been seen.
    last: u64,
    /// Messages sent and not committed, in order.
    pending: VecDeque<UncommittedMessage>,
    flying: FuturesOrdered<BoxFuture<'static, PublishResult>>,
    broken: bool,
    looks_back: u32,
}

impl FencedWriter {
    /// Takes a stream over. From the marker on, whose sequence is also returned, writes of earlier
    /// owners do not count.
    pub async fn take(
        connection: &NatsConnection,
        name: &str,
        epoch: u64,
        subject: String,
        marker: Bytes,
    ) -> Result<(FencedWriter, u64), Error> {
        let away = |e: &(dyn std::error::Error + 'static)| {
            Error::Unavailable(format!(
                "stream {name} cannot be taken over: {}",
                connection::error_chain(e)
            ))
        };
        let asking = &connection.asking;
        let stream =
            retry_through_election(|| async { asking.get_stream(name).await.map_err(|e| away(&e)) }).await?;
        let id = ChainId { epoch, n: 0 };
        let marker = UncommittedMessage {
            id,
            subject,
            payload: marker,
        };
        let mut chain = FencedWriter {
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
        // From here on the marker may be stored even if the acknowledgement is lost.
        let mut unsure_from = None;
        let mut trouble = String::from("others keep writing to it");
        for _ in 0..TAKES_MAX {
            let end = match chain.stream.get_info().await {
                Ok(info) => info.state.last_sequence,
                Err(e) => {
                    trouble = connection::error_chain(&e);
                    sleep(LOOK_EVERY).await;
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
                        sleep(LOOK_EVERY).await;
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
                    trouble = connection::error_chain(&e);
                    unsure_from.get_or_insert(end + 1);
                    sleep(LOOK_EVERY).await;
                }
            }
        }
        Err(Error::Unavailable(format!(
            "stream {name} cannot be taken over: {trouble}"
        )))
    }

    /// The sequence of a message in this range, if it exists.
    async fn find(&mut self, id: ChainId, from: u64, end: u64) -> Result<Option<u64>, String> {
        for sequence in from..=end {
            match self.stream.get_raw_message(sequence).await {
                Ok(message) if ChainId::of(&message.headers) == Some(id) => return Ok(Some(sequence)),
                Ok(_) => {}
                Err(e) if e.kind() == RawMessageErrorKind::NoMessageFound => {}
                Err(e) => return Err(connection::error_chain(&e)),
            }
        }
        Ok(None)
    }

    /// The id of the next message to be sent.
    pub fn next_id(&self) -> ChainId {
        ChainId {
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

    /// Notes that the outcome of messages in flight is unknown because the connection was
    /// re-established.
    pub fn doubt(&mut self) {
        self.broken |= !self.pending.is_empty();
    }

    /// Sends the next message. It is committed once `acked` or `recover` returns its sequence.
    pub async fn send(&mut self, subject: String, payload: Bytes) {
        let id = self.next_id();
        self.next += 1;
        self.pending
            .push_back(UncommittedMessage { id, subject, payload });
        if !self.broken {
            self.fly(self.pending.len() - 1).await;
        }
    }

    async fn fly(&mut self, index: usize) {
        let sent = &self.pending[index];
        let expected = self.last + self.flying.len() as u64;
        let (subject, message) = (sent.subject.clone(), sent.message(expected));
        match self.connection.js.send_publish(subject, message).await {
            // A future that `acked` polls, instead of a task of its own.
            Ok(ack) => self.flying.push_back(ack.into_future()),
            Err(e) => {
                tracing::debug!(stream = self.name, error = %e, "a message cannot be sent");
                self.broken = true;
            }
        }
    }

    /// Waits for the next acknowledgement. Returns the sequence of the message that it commits;
    /// `None` if the chain is broken and must be recovered. Cancel-safe.
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

    /// Finds out what is stored, and sends the rest again. Returns the sequences of messages that
    /// are committed now, in order; the chain may still be broken afterwards.
    pub async fn recover(&mut self) -> Result<Vec<u64>, StreamLost> {
        // Pending acknowledgements are not needed: the stream shows what they would say.
        self.flying = FuturesOrdered::new();
        let mut committed = Vec::new();
        loop {
            if !self.look(&mut committed).await? {
                sleep(LOOK_EVERY).await;
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
            // Send a single message until the end of the stream is known.
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
                        sleep(LOOK_EVERY).await;
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

    /// Looks at what has been stored since. Returns false if the stream does not answer.
    async fn look(&mut self, committed: &mut Vec<u64>) -> Result<bool, StreamLost> {
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
            return Err(StreamLost(format!(
                "stream {} has lost messages that it had acknowledged: it ends with {end}, not with {}",
                self.name, self.last
            )));
        }
        self.looks_back = 0;
        for sequence in self.last + 1..=end {
            // Read from the leader, because a replica may lag behind.
            match self.stream.get_raw_message(sequence).await {
                Ok(message) => {
                    let id = ChainId::of(&message.headers);
                    if id.is_some_and(|id| id.epoch > self.epoch) {
                        return Err(StreamLost(format!(
                            "another node has taken stream {} over",
                            self.name
                        )));
                    }
                    self.last = sequence;
                    if id.is_some() && id == self.pending.front().map(|sent| sent.id) {
                        self.pending.pop_front();
                        committed.push(sequence);
                    }
                }
                // Only an owner removes messages, and this one did not remove these.
                Err(e) if e.kind() == RawMessageErrorKind::NoMessageFound => {
                    return Err(StreamLost(format!(
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

/// Repeats an attempt for as long as a cluster may take to elect another leader.
pub async fn retry_through_election<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Error>>,
{
    let until = Instant::now() + ELECTION;
    loop {
        match attempt().await {
            Err(Error::Unavailable(why)) if Instant::now() < until => {
                tracing::debug!(why, "tried again");
                sleep(LOOK_EVERY).await;
            }
            other => return other,
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "paces questions to a server that is away; no rule depends on it"
)]
pub async fn sleep(duration: Duration) {
    tokio::time::sleep(duration).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_written() {
        let id = ChainId { epoch: 7, n: 12 };
        let mut headers = HeaderMap::new();
        assert_eq!(ChainId::of(&headers), None);
        headers.insert(HEADER, id.to_string().as_str());
        assert_eq!(ChainId::of(&headers), Some(id));
        for wrong in ["", "7", "7.", ".1", "7.x", "-1.2", "7.1.2"] {
            headers.insert(HEADER, wrong);
            assert_eq!(ChainId::of(&headers), None, "{wrong:?}");
        }
    }

    #[test]
    fn whoever_reads_passes_over_what_was_never_committed() {
        let mut follower = ChainFollower::at(1, ChainId { epoch: 0, n: 0 });
        let mut sequence = 0;
        let mut check = |epoch, n, expected| {
            sequence += 1;
            let seen = follower.see(sequence, ChainId { epoch, n });
            assert_eq!(seen, expected, "{epoch}.{n}");
        };
        let next = ChainStep::Next { missing: 0 };
        check(3, 0, ChainStep::Marker);
        check(3, 1, next);
        check(3, 3, ChainStep::PassOver);
        check(3, 2, next);
        check(3, 3, next);
        check(3, 3, ChainStep::PassOver);
        check(5, 0, ChainStep::Marker);
        check(3, 4, ChainStep::PassOver);
        check(5, 2, ChainStep::PassOver);
        check(5, 1, next);
        check(4, 0, ChainStep::PassOver);
        check(7, 3, ChainStep::PassOver);
        check(5, 2, next);
    }

    // A damaged message must not hide all later ones.
    #[test]
    fn the_chain_goes_on_behind_a_hole() {
        let mut follower = ChainFollower::at(10, ChainId { epoch: 3, n: 7 });
        let mut check = |sequence, epoch, n, expected| {
            let seen = follower.see(sequence, ChainId { epoch, n });
            assert_eq!(seen, expected, "{epoch}.{n} at {sequence}");
        };
        let next = |missing| ChainStep::Next { missing };
        check(10, 3, 7, next(0));
        check(13, 3, 10, next(2));
        check(15, 3, 11, next(0));
        check(17, 3, 14, ChainStep::PassOver);
        check(18, 3, 12, next(0));
        check(21, 4, 2, next(2));
        check(22, 3, 13, ChainStep::PassOver);
        check(24, 5, 2, ChainStep::PassOver);
        check(25, 4, 3, next(0));
    }
}
