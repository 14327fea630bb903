use super::*;
use postrider_store::conformance::SeededRandom;
use std::time::Duration;

/// A list of numbers; a commit that names its expected length is refused if another node has
/// extended it.
#[derive(Default)]
struct NumberList {
    numbers: Vec<u64>,
    /// Numbers that this node has learned from others.
    told: Vec<u64>,
}

impl StateMachine for NumberList {
    type Draft = Option<usize>;
    type Output = usize;
    const WHAT: &'static str = "list";

    fn check(&self, draft: &Option<usize>, _: u64) -> Result<(), Error> {
        match draft {
            Some(expected) if *expected != self.numbers.len() => Err(Error::Conflict("the list".into())),
            _ => Ok(()),
        }
    }

    fn apply(&mut self, commit: AppliedCommit<'_>) -> Result<usize, String> {
        for record in commit.records {
            let number = ByteReader(record).number().ok_or("no number")?;
            self.numbers.push(number);
            if !commit.known_here {
                self.told.push(number);
            }
        }
        Ok(self.numbers.len())
    }

    fn snapshot(&self, out: &mut Vec<u8>) {
        put(out, self.numbers.len() as u64);
        self.numbers.iter().for_each(|number| put(out, *number));
    }

    fn restore(&mut self, bytes: &[u8], _: u64) -> Result<(), String> {
        let mut rest = ByteReader(bytes);
        let count = rest.count().ok_or("no count")?;
        let numbers: Option<Vec<u64>> = (0..count).map(|_| rest.number()).collect();
        let numbers = numbers.ok_or("cut short")?;
        self.told.extend(numbers.iter().skip(self.numbers.len()));
        self.numbers = numbers;
        Ok(())
    }
}

type CommitReply = oneshot::Receiver<Result<usize, Error>>;

fn record(number: u64, filler: usize) -> Vec<u8> {
    let mut record = Vec::new();
    put(&mut record, number);
    record.resize(record.len() + filler, 0);
    record
}

/// A stream like JetStream's: a message is stored only at the place that it expects.
#[derive(Default)]
struct FakeStream {
    messages: Vec<Vec<u8>>,
}

impl FakeStream {
    fn publish(&mut self, expected: u64, message: &[u8]) -> bool {
        let stored = expected == self.messages.len() as u64;
        if stored {
            self.messages.push(message.to_vec());
        }
        stored
    }
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(1000)
}

fn catch_up(book: &mut ReplicaBuffer<NumberList>, stream: &FakeStream) {
    while let Some(message) = stream.messages.get(book.last as usize) {
        assert_eq!(book.take(book.last + 1, message), TakeOutcome::Next);
    }
}

// Three nodes with lost acknowledgements, messages stored long after they were given up, late
// reception and snapshots: each acknowledged commit is present once, and all nodes agree.
#[test]
fn every_node_has_every_commit_once_whatever_gets_lost() {
    for seed in 0..300 {
        let mut random = SeededRandom(seed);
        let mut stream = FakeStream::default();
        let mut books: Vec<ReplicaBuffer<NumberList>> = (1..=3)
            .map(|me| ReplicaBuffer::new(me, NumberList::default()))
            .collect();
        let mut replies: Vec<(usize, u64, CommitReply)> = Vec::new();
        // Messages in flight for an indefinite time: expected sequence and content.
        let mut late: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut next = 0;
        for _ in 0..200 {
            let node = random.below(3) as usize;
            let book = &mut books[node];
            match random.below(8) {
                0..=2 => {
                    next += 1;
                    let filler = if random.one_in(6) { 300 } else { 3 };
                    let draft = random.one_in(3).then_some(book.machine.numbers.len());
                    let reply = book.commit(&[record(next, filler)], draft, later());
                    replies.push((node, next, reply));
                }
                3..=5 => {
                    let Some(message) = book.next_message(200, Instant::now()) else {
                        continue;
                    };
                    let expected = book.last;
                    match random.below(4) {
                        // The message is lost or late.
                        0 => late.push((expected, message)),
                        // The message is stored, and the acknowledgement is lost.
                        1 => drop(stream.publish(expected, &message)),
                        _ => {
                            if stream.publish(expected, &message) {
                                book.take(expected + 1, &message);
                            } else {
                                catch_up(book, &stream);
                            }
                        }
                    }
                }
                6 => catch_up(book, &stream),
                _ => {
                    if !late.is_empty() {
                        let (expected, message) = late.swap_remove(random.below(late.len() as u64) as usize);
                        stream.publish(expected, &message);
                    }
                }
            }
        }
        for _ in 0..100 {
            for book in &mut books {
                catch_up(book, &stream);
                if let Some(message) = book.next_message(200, Instant::now()) {
                    stream.publish(book.last, &message);
                }
            }
        }
        for book in &mut books {
            catch_up(book, &stream);
        }
        let all = books[0].machine.numbers.clone();
        let mut once = all.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), all.len(), "seed {seed}: one is there twice");
        for (node, number, mut reply) in replies {
            let stored = all.contains(&number);
            match reply.try_recv().expect("it was answered") {
                Ok(_) => {
                    assert!(stored, "seed {seed}: {number} is lost");
                    assert!(!books[node].machine.told.contains(&number));
                }
                Err(Error::Conflict(_)) => assert!(!stored, "seed {seed}: {number} was refused"),
                Err(other) => panic!("{other}"),
            }
        }
        for book in &books {
            assert_eq!(book.machine.numbers, all, "seed {seed}");
            // A node that opens a snapshot now continues in the same way.
            let manifest = ReplicaManifest {
                by: 1,
                at: book.last,
                chunks: Vec::new(),
                bytes: 0,
            };
            let mut fresh = ReplicaBuffer::new(9, NumberList::default());
            fresh.restore(&manifest, &book.snapshot()).unwrap();
            assert_eq!(fresh.machine.numbers, all);
            assert_eq!(fresh.authors, book.authors);
        }
    }
}

#[test]
fn a_commit_that_was_given_up_and_is_stored_after_all_counts_as_anothers() {
    let mut book = ReplicaBuffer::new(1, NumberList::default());
    let now = Instant::now();
    let mut reply = book.commit(&[record(7, 0)], None, now + Duration::from_secs(1));
    let message = book.next_message(1000, now).expect("it is sent");
    assert_eq!(book.next_message(1000, now + Duration::from_secs(1)), None);
    assert!(matches!(reply.try_recv(), Ok(Err(Error::Unavailable(_)))));
    assert_eq!(book.take(1, &message), TakeOutcome::Next);
    assert_eq!(book.machine.told, [7]);
    assert_eq!(book.take(1, &message), TakeOutcome::Old);
    assert_eq!(book.take(3, &message), TakeOutcome::Gap);
}

#[test]
fn the_snapshot_tells_which_commits_are_in_it() {
    let (mut one, mut two) = (
        ReplicaBuffer::new(1, NumberList::default()),
        ReplicaBuffer::new(2, NumberList::default()),
    );
    let mut stored = one.commit(&[record(7, 0)], None, later());
    let message = one.next_message(1000, Instant::now()).unwrap();
    two.take(1, &message);
    let mut waiting = one.commit(&[record(8, 0)], None, later());
    let manifest = ReplicaManifest {
        by: 2,
        at: two.last,
        chunks: Vec::new(),
        bytes: 0,
    };
    // The node has not received its own message and never will, because the log is purged.
    one.restore(&manifest, &two.snapshot()).unwrap();
    assert!(matches!(stored.try_recv(), Ok(Err(Error::Unavailable(_)))));
    assert_eq!(one.machine.told, [7], "so it is told of it as of another's");
    let message = one.next_message(1000, Instant::now()).unwrap();
    assert_eq!(one.take(2, &message), TakeOutcome::Next);
    assert!(matches!(waiting.try_recv(), Ok(Ok(2))));
}

// The snapshot is taken between two parts of a commit: a node that opens it has to know the first.
#[test]
fn a_snapshot_holds_the_beginning_of_a_commit_that_comes_in_parts() {
    let mut one = ReplicaBuffer::new(1, NumberList::default());
    let mut reply = one.commit(&[record(7, 400)], None, later());
    let mut sequence = 0;
    let mut fresh: Option<ReplicaBuffer<NumberList>> = None;
    while let Some(message) = one.next_message(200, Instant::now()) {
        sequence += 1;
        one.take(sequence, &message);
        match &mut fresh {
            Some(fresh) => assert_eq!(fresh.take(sequence, &message), TakeOutcome::Next),
            None => {
                let manifest = ReplicaManifest {
                    by: 1,
                    at: sequence,
                    chunks: Vec::new(),
                    bytes: 0,
                };
                let mut opened = ReplicaBuffer::new(2, NumberList::default());
                opened.restore(&manifest, &one.snapshot()).unwrap();
                fresh = Some(opened);
            }
        }
    }
    assert!(sequence > 2, "it came in parts");
    assert!(matches!(reply.try_recv(), Ok(Ok(1))));
    assert_eq!(fresh.unwrap().machine.numbers, [7]);
}

#[test]
fn what_cannot_be_understood_ends_everything() {
    let mut book = ReplicaBuffer::new(1, NumberList::default());
    let mut reply = book.commit(&[record(7, 0)], None, later());
    book.take(1, b"\x09what?");
    assert!(matches!(reply.try_recv(), Ok(Err(Error::Corrupt(_)))));
    let mut after = book.commit(&[record(8, 0)], None, later());
    assert!(matches!(after.try_recv(), Ok(Err(Error::Corrupt(_)))));
}

#[test]
fn whoever_makes_the_log_long_writes_the_snapshot() {
    let (mut one, mut two) = (
        ReplicaBuffer::new(1, NumberList::default()),
        ReplicaBuffer::new(2, NumberList::default()),
    );
    let mut sequence = 0;
    let mut say = |from: &mut ReplicaBuffer<NumberList>, to: &mut ReplicaBuffer<NumberList>| {
        let _reply = from.commit(&[record(1, 100)], None, later());
        let message = from.next_message(1000, Instant::now()).unwrap();
        sequence += 1;
        from.take(sequence, &message);
        to.take(sequence, &message);
    };
    say(&mut one, &mut two);
    assert!(!one.wants_snapshot(200) && !two.wants_snapshot(200));
    say(&mut one, &mut two);
    assert!(one.wants_snapshot(200) && !two.wants_snapshot(200));
    let chunk = frame::encode_chunk(1, 2, 0, b"");
    assert_eq!(
        (one.take(3, &chunk), two.take(3, &chunk)),
        (TakeOutcome::Next, TakeOutcome::Next)
    );
    assert!(!one.wants_snapshot(200), "it has begun");
    sequence = 3;
    let mut say = |from: &mut ReplicaBuffer<NumberList>, to: &mut ReplicaBuffer<NumberList>| {
        let _reply = from.commit(&[record(1, 100)], None, later());
        let message = from.next_message(1000, Instant::now()).unwrap();
        sequence += 1;
        from.take(sequence, &message);
        to.take(sequence, &message);
    };
    // Node 1 does not finish its snapshot, so the next author writes one.
    say(&mut two, &mut one);
    assert!(two.wants_snapshot(200) && !one.wants_snapshot(200));
    let manifest = frame::encode_manifest(&ReplicaManifest {
        by: 1,
        at: 2,
        chunks: vec![3],
        bytes: 9,
    });
    two.take(5, &manifest);
    assert!(!two.wants_snapshot(200));
    assert_eq!((two.snapshot_at, two.snapshot_bytes), (2, 9));
}
