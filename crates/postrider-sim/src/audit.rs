//! The auditor: sees what publishers were told, what receivers got and what was recorded; judges.

use postrider_core::ids::SubscriptionId;
use postrider_core::json::Raw;
use postrider_core::retry::Next;
use postrider_core::time::Timestamp;
use postrider_store::Settled;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

/// A request that reached a receiver.
#[derive(Clone, Debug)]
pub struct Seen {
    pub subscription: String,
    pub ids: Vec<u64>,
    pub at: Timestamp,
    /// What `aeg-delivery-count` said.
    pub attempts_before: u32,
}

/// The rules of one subscription that the auditor holds the engine to.
#[derive(Clone, Debug)]
pub struct Expected {
    pub id: SubscriptionId,
    pub name: String,
    pub attempts_max: u32,
    pub time_to_live: Duration,
    pub batch_max: usize,
    pub always_healthy: bool,
}

#[derive(Clone, Debug)]
struct Try {
    at: Timestamp,
    life: u32,
    /// The receiver's status, if it answered.
    status: Option<u16>,
    ended: Option<Timestamp>,
}

#[derive(Default)]
struct Books {
    expected: BTreeMap<String, Expected>,
    names: BTreeMap<SubscriptionId, String>,
    /// Acknowledged (or possibly stored) events: when, and for whom.
    published: BTreeMap<u64, (Timestamp, BTreeSet<String>)>,
    acknowledged: BTreeSet<u64>,
    requests: Vec<Seen>,
    tries: BTreeMap<(String, u64), Vec<Try>>,
    taken: BTreeSet<(String, u64)>,
    /// Final states as recorded; those not yet durable are undone by a crash.
    ended: BTreeMap<(String, u64), Vec<&'static str>>,
    ended_lately: Vec<(String, u64)>,
    life: u32,
    crashes: Vec<Timestamp>,
    wrong: Vec<String>,
}

/// One pair of eyes for a whole simulation.
#[derive(Default)]
pub struct Audit {
    books: Mutex<Books>,
}

impl Audit {
    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.books.lock().expect("no panic holds it")
    }

    pub fn expect(&self, expected: Expected) {
        let mut books = self.books();
        books.names.insert(expected.id, expected.name.clone());
        books.expected.insert(expected.name.clone(), expected);
    }

    /// An event is about to be published for these subscriptions.
    pub fn publishing(&self, id: u64, at: Timestamp, matched: BTreeSet<String>) {
        self.books().published.insert(id, (at, matched));
    }

    /// Its publisher was told that it is stored.
    pub fn acknowledged(&self, id: u64) {
        self.books().acknowledged.insert(id);
    }

    /// A request reached a receiver. Returns its number.
    pub fn arrived(&self, seen: Seen) -> usize {
        let mut books = self.books();
        let Some(expected) = books.expected.get(&seen.subscription).cloned() else {
            books.wrong.push(format!(
                "a delivery for {:?}, which does not exist",
                seen.subscription
            ));
            return usize::MAX;
        };
        if seen.ids.len() > expected.batch_max {
            books.wrong.push(format!(
                "{} events in one batch for {}",
                seen.ids.len(),
                expected.name
            ));
        }
        let life = books.life;
        for id in &seen.ids {
            books.check_arrival(&expected, *id, &seen, life);
            let key = (seen.subscription.clone(), *id);
            books.tries.entry(key).or_default().push(Try {
                at: seen.at,
                life,
                status: None,
                ended: None,
            });
        }
        books.requests.push(seen);
        books.requests.len() - 1
    }

    pub fn taken(&self, request: usize) {
        let mut books = self.books();
        let Some(seen) = books.requests.get(request).cloned() else {
            return;
        };
        for id in seen.ids {
            books.taken.insert((seen.subscription.clone(), id));
        }
    }

    pub fn answered(&self, request: usize, status: u16) {
        let mut books = self.books();
        let Some(seen) = books.requests.get(request).cloned() else {
            return;
        };
        for id in seen.ids {
            let tries = books.tries.get_mut(&(seen.subscription.clone(), id));
            let found = tries.and_then(|t| t.iter_mut().find(|t| t.at == seen.at));
            if let Some(found) = found {
                found.status = Some(status);
                found.ended = Some(seen.at);
            }
        }
    }

    /// The log was told what follows these claims.
    pub fn settled(&self, of: SubscriptionId, settled: &[Settled]) {
        let mut books = self.books();
        let name = books.names.get(&of).cloned().unwrap_or_default();
        for one in settled {
            let end = match one.next {
                Next::RetryAt(_) => continue,
                Next::Done => "delivered",
                Next::DeadLetter(_) => "dead-lettered",
                Next::Drop(_) => "dropped",
            };
            let object = Raw::trusted(one.claim.object());
            let id: u64 = object
                .get("id")
                .and_then(Raw::as_str)
                .and_then(|i| i.parse().ok())
                .expect("our own ids");
            let key = (name.clone(), id);
            if end == "delivered" && !books.taken.contains(&key) {
                books.wrong.push(format!(
                    "event {id} for {name} settled as delivered, but nobody took it"
                ));
            }
            books.ended.entry(key.clone()).or_default().push(end);
            books.ended_lately.push(key);
        }
    }

    /// Everything settled so far is durable.
    pub fn checkpoint(&self) {
        self.books().ended_lately.clear();
    }

    pub fn crashed(&self, at: Timestamp) {
        let mut books = self.books();
        books.life += 1;
        books.crashes.push(at);
        for key in std::mem::take(&mut books.ended_lately) {
            if let Some(ends) = books.ended.get_mut(&key) {
                ends.pop();
            }
        }
    }

    /// The server was stopped and started: attempts under way were cut short.
    pub fn restarted(&self, at: Timestamp) {
        self.checkpoint();
        self.crashed(at);
    }

    /// How many deliveries have not come to an end yet.
    pub fn unfinished(&self) -> usize {
        self.books().missing().len()
    }

    /// How many requests reached receivers.
    pub fn attempts(&self) -> usize {
        self.books().requests.len()
    }

    /// Everything that was found wrong, now that all has come to rest.
    pub fn verdict(&self) -> Vec<String> {
        let books = self.books();
        let mut wrong = books.wrong.clone();
        for (name, id) in books.missing() {
            wrong.push(format!("event {id} was acknowledged and never ended for {name}"));
        }
        for ((name, id), ends) in &books.ended {
            if ends.len() > 1 {
                wrong.push(format!(
                    "event {id} for {name} ended {} times: {ends:?}",
                    ends.len()
                ));
            }
        }
        for (key, tries) in &books.tries {
            let expected = &books.expected[&key.0];
            let lives = books.life as usize + 1;
            // Each crash may cost the record of one attempt.
            if tries.len() > expected.attempts_max as usize + lives - 1 {
                wrong.push(format!(
                    "{} attempts for {key:?}, allowed {}",
                    tries.len(),
                    expected.attempts_max
                ));
            }
        }
        wrong.extend(books.starved());
        wrong
    }
}

impl Books {
    fn check_arrival(&mut self, expected: &Expected, id: u64, seen: &Seen, life: u32) {
        let name = &expected.name;
        let Some((published, matched)) = self.published.get(&id) else {
            self.wrong
                .push(format!("event {id} for {name} was never published"));
            return;
        };
        if !matched.contains(name) {
            self.wrong.push(format!("event {id} does not match {name}"));
        }
        if seen.at.since(*published) >= expected.time_to_live {
            self.wrong
                .push(format!("event {id} for {name} attempted after its time to live"));
        }
        let tries = self.tries.get(&(name.clone(), id)).map_or(&[][..], Vec::as_slice);
        let Some(last) = tries.last() else {
            if seen.ids.len() == 1 && seen.attempts_before != 0 {
                self.wrong.push(format!(
                    "first attempt of event {id} for {name} says {}",
                    seen.attempts_before
                ));
            }
            return;
        };
        // A crash may have taken the record of the last attempt with it.
        if last.life != life {
            return;
        }
        let floor = match last.status {
            Some(503) => 30,
            Some(408) => 120,
            Some(status) if (200..=204).contains(&status) => u64::MAX,
            _ => 10,
        };
        if seen.at.since(last.at) < Duration::from_secs(floor) {
            self.wrong.push(format!(
                "event {id} for {name} attempted again {:?} after {:?}",
                seen.at.since(last.at),
                last.status
            ));
        }
    }

    fn missing(&self) -> Vec<(String, u64)> {
        let mut missing = Vec::new();
        for id in &self.acknowledged {
            for name in &self.published[id].1 {
                let key = (name.clone(), *id);
                if self.ended.get(&key).is_none_or(Vec::is_empty) {
                    missing.push(key);
                }
            }
        }
        missing
    }

    /// Healthy receivers get their events promptly, whatever happens elsewhere.
    fn starved(&self) -> Vec<String> {
        const PROMPT: Duration = Duration::from_secs(2);
        let mut wrong = Vec::new();
        for ((name, id), tries) in &self.tries {
            if !self.expected[name].always_healthy || !self.acknowledged.contains(id) {
                continue;
            }
            let published = self.published[id].0;
            let disturbed = self
                .crashes
                .iter()
                .any(|c| *c >= published && c.since(published) <= PROMPT * 2);
            let first = tries[0].at;
            if first.since(published) > PROMPT && !disturbed {
                wrong.push(format!(
                    "event {id} waited {:?} for healthy {name}",
                    first.since(published)
                ));
            }
        }
        wrong
    }
}
