//! The auditor: observes what publishers were told, what receivers got and what was recorded, and
//! judges it.
//!
//! The auditor knows the documents and nothing of the engine's insides. Times are the clock's;
//! where the clock was set meanwhile, only attempts that are too early in any case count as errors.

mod audit_state;
mod endpoint;
mod dead_letters;
mod pauses;
mod rules;

use audit_state::{AuditState, AuditedAnswer, AuditedEvent, AuditedSubscription};
pub use dead_letters::{BlobPathInContainer, ServerLetterCounts};
pub use endpoint::AuditedDelay;
use endpoint::AuditedEndpoint;
use pauses::AuditedPauses;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::json::RawJson;
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::subscription::Subscription;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::endpoint::DelayScope;
use postrider_store::{BlobRecord, Claim, DeadLetterKey, Settlement};
use rules::AuditRules;
pub use rules::ReceiverOutcome;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The kinds of broken promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationKind {
    /// Accepted, and never ended.
    Lost,
    /// Attempted before it was due.
    Early,
    /// Attempted later than anything explains.
    HeldBack,
    /// Attempted more often than the policy allows.
    TooOften,
    /// Attempted after its time to live.
    TooLate,
    /// Attempted after its end.
    AfterItsEnd,
    /// Attempted while another attempt was in flight.
    Twice,
    /// The delivery-count header differs from the recorded attempts.
    Count,
    /// Ended more than once.
    TwoEnds,
    /// Ended for a reason that nothing explains.
    WrongEnd,
    /// Sent to an endpoint on probation.
    NotLeftAlone,
    /// Sent for a subscription that is paused.
    NotPaused,
    /// Sent for a deleted subscription, to an endpoint that is not its own, or where nothing may be
    /// sent.
    Astray,
    /// Sent again in a batch larger than half of one that was too large.
    NotHalved,
    /// Not published, not matched, or in a batch that is too large.
    Unasked,
    /// A backlog is left in the log at the end.
    Unrest,
    /// The server was told to stop, and some of its tasks never ended.
    NotStopped,
    /// Given up, and in no blob.
    Unwritten,
    /// Written to a blob before its time.
    Hasty,
    /// A blob in the wrong place.
    Misfiled,
    /// A blob with wrong diagnostics.
    Misreported,
    /// In a blob although not given up, or written again without a reason.
    NotALetter,
    /// A dead letter that was dropped although its store was not out of reach for long enough.
    GivenUpEarly,
    /// The server's own count of dead letters differs.
    Miscounted,
    /// A blob that the archive does not have, or has with other content.
    Unlisted,
    /// A blob without an announcement, or an announcement without a blob.
    Untold,
}

#[derive(Clone, Debug)]
pub struct Violation {
    pub kind: ViolationKind,
    pub what: String,
}

/// A request that reached a receiver.
#[derive(Clone, Debug)]
pub struct ObservedRequest {
    pub subscription: String,
    pub receiver: usize,
    pub ids: Vec<u64>,
    /// The value of `aeg-delivery-count`.
    pub attempts_before: u32,
    /// The receiver's answer and the time it takes, whether anyone waits for it or not.
    pub will: Option<(Duration, ReceiverOutcome)>,
}

/// The auditor of a whole simulation.
pub struct Auditor {
    clock: Arc<dyn Clock>,
    /// The time that has really passed.
    elapsed: Box<dyn Fn() -> Duration + Send + Sync>,
    books: Mutex<AuditState>,
}

impl Auditor {
    pub fn new(clock: Arc<dyn Clock>, elapsed: impl Fn() -> Duration + Send + Sync + 'static) -> Auditor {
        Auditor {
            clock,
            elapsed: Box::new(elapsed),
            books: Mutex::default(),
        }
    }

    fn books(&self) -> std::sync::MutexGuard<'_, AuditState> {
        self.books.lock().expect("no panic holds it")
    }

    /// Keeps a record of everything, for people.
    pub fn take_notes(&self) {
        self.books().notes = Some(Vec::new());
    }

    /// Adds a note for people.
    pub fn note(&self, what: impl FnOnce() -> String) {
        let now = self.clock.now();
        self.books().note(now, what);
    }

    pub fn notes(&self) -> Vec<String> {
        self.books().notes.take().unwrap_or_default()
    }

    /// Adds a receiver, with the next number. `quick` if it answers at once, whatever the answer.
    pub fn receiver(&self, quick: bool) {
        let mut endpoint = AuditedEndpoint::default();
        endpoint.quick = quick;
        self.books().endpoints.push(endpoint);
    }

    /// The operator has set the delay of dead letters, and the patience with their store.
    pub fn letter_timing(&self, delay: Duration, patience: Duration) {
        self.books().letter_timing = Some((delay, patience));
    }

    /// The operator wants batches halved after 400, too.
    pub fn halves_after_400(&self) {
        self.books().halves_after_400 = true;
    }

    /// Adds a subscription.
    pub fn subscribe(&self, subscription: &Subscription, default_profile: &str, receiver: usize) {
        let mut books = self.books();
        let number = books.subs.len();
        let mut rules = AuditRules::of(subscription, default_profile);
        (rules.letter_delay, rules.letter_patience) = books
            .letter_timing
            .unwrap_or((rules.letter_delay, rules.letter_patience));
        rules.halves_after_400 = books.halves_after_400;
        books.by_id.insert(subscription.id, number);
        books.subs.push(AuditedSubscription {
            name: subscription.name.clone(),
            rules,
            dead_letters: subscription.dead_letter.clone(),
            batch_max: rules::batch_max(subscription),
            receiver,
            moved: Timestamp::MIN,
            moving: None,
            expires: subscription.expires,
            going: false,
            gone: None,
            pauses: AuditedPauses::default(),
            expired_at: None,
        });
    }

    /// A pause or resumption begins. It takes effect at an unknown moment before the caller gets an
    /// answer.
    pub fn pausing(&self, of: SubscriptionId) {
        let mut books = self.books();
        let sub = books.by_id[&of];
        books.subs[sub].pauses.changing = true;
    }

    /// A pause or resumption has been confirmed.
    pub fn paused(&self, of: SubscriptionId, paused: bool) {
        let now = self.clock.now();
        let mut books = self.books();
        let sub = books.by_id[&of];
        if books.subs[sub].pauses.set(paused, now) {
            books.note(now, || format!("subscription {of} is paused: {paused}"));
            if !paused {
                books.flood(sub, now);
            }
        }
    }

    /// A probe of a receiver was requested before its delay is over.
    pub fn probed(&self, receiver: usize, of: SubscriptionId) {
        self.note(|| format!("{receiver} is to be asked for {of}"));
        let now = self.clock.now();
        let mut books = self.books();
        let sub = books.by_id[&of];
        books.endpoints[receiver].ask(now);
        books.own_endpoint(receiver, sub).ask(now);
    }

    /// A subscription is being pointed to another receiver. The change takes effect before the
    /// caller gets an answer.
    pub fn moving(&self, of: SubscriptionId, receiver: usize) {
        let now = self.clock.now();
        let mut books = self.books();
        books.forget_unused(now);
        let sub = books.by_id[&of];
        books.subs[sub].moving = Some(receiver);
    }

    /// The subscription has been pointed to another receiver.
    pub fn moved(&self, of: SubscriptionId, receiver: usize) {
        let now = self.clock.now();
        let mut books = self.books();
        let sub = books.by_id[&of];
        books.forget_unused(now);
        let sub = &mut books.subs[sub];
        sub.moving = None;
        sub.going = false;
        if sub.receiver != receiver {
            sub.receiver = receiver;
            sub.moved = now;
        }
        books.note(now, || format!("subscription {of} points to {receiver}"));
        books.forget_unused(now);
    }

    /// The deletion of a subscription begins.
    pub fn going(&self, of: SubscriptionId) {
        let mut books = self.books();
        let sub = books.by_id[&of];
        books.subs[sub].going = true;
    }

    /// The subscription is deleted.
    pub fn gone(&self, of: SubscriptionId) {
        let now = self.clock.now();
        let mut books = self.books();
        let sub = books.by_id[&of];
        books.subs[sub].gone.get_or_insert(now);
        books.note(now, || format!("subscription {of} is gone"));
        books.forget_unused(now);
    }

    /// An event is about to be published that matches these subscriptions.
    pub fn publishing(&self, id: u64, published: Timestamp, matched: impl Iterator<Item = SubscriptionId>) {
        let mut books = self.books();
        let matched: BTreeSet<usize> = matched.map(|of| books.by_id[&of]).collect();
        books.note(published, || format!("publishing {id} for {matched:?}"));
        let era = books.era;
        books.events.insert(
            id,
            AuditedEvent {
                published,
                era,
                matched,
                acknowledged: false,
            },
        );
    }

    /// The publisher was told that the event is stored.
    pub fn acknowledged(&self, id: u64) {
        self.books()
            .events
            .get_mut(&id)
            .expect("published before")
            .acknowledged = true;
    }

    /// A request has reached a receiver. Returns its number.
    pub fn arrived(&self, seen: ObservedRequest) -> usize {
        let now = self.clock.now();
        let mut books = self.books();
        books.elapsed = (self.elapsed)();
        books.latest = books.latest.max(now);
        books.arrived(seen, now)
    }

    /// A request went to the target of a redirection.
    pub fn strayed(&self) {
        self.books()
            .wrong(ViolationKind::Astray, "a redirection was followed".into());
    }

    /// A receiver has answered, or aborted. Called just before the engine learns of it.
    pub fn ended(&self, request: usize, came: ReceiverOutcome, retry_after: Option<Duration>) {
        let now = self.clock.now();
        let mut books = self.books();
        let Some(found) = books.requests.get(request) else {
            return;
        };
        let (receiver, sub) = (found.receiver, found.sub);
        let rules = books.subs[sub].rules;
        let sets = books.sets;
        books.note(now, || format!("request {request} {came:?} {retry_after:?}"));
        (now.nanos(), request, came).hash(&mut books.trace);
        books.requests[request].ended = Some(AuditedAnswer {
            at: now,
            sets,
            came,
            retry_after,
        });
        books.halve_batch(request);
        // The engine may not have waited for the answer: the disk was full. An answer beyond the
        // late window has no effect.
        let heard = books.requests[request].may_count(&rules);
        let well = match came {
            ReceiverOutcome::Answered(status) => {
                heard && (rules.is_success(status) || matches!(status, 400 | 413))
            }
            _ => false,
        };
        books.endpoints[receiver].answer(request, came, well, now);
        books.own_endpoint(receiver, sub).answer(request, came, well, now);
    }

    /// These claims are about to be attempted.
    pub fn claimed(&self, claims: &[Claim]) {
        let mut books = self.books();
        for claim in claims {
            // The announcement of a blob has another kind of id.
            if let Some(id) = event_id(claim) {
                books.ids.insert(claim.position(), id);
            }
        }
    }

    /// The log was told what follows for these claims.
    pub fn settled(&self, of: SubscriptionId, settled: &[Settlement]) {
        let now = self.clock.now();
        let mut books = self.books();
        let Some(sub) = books.by_id.get(&of).copied() else {
            return;
        };
        books.latest = books.latest.max(now);
        for one in settled {
            let id = event_id(&one.claim).expect("our own ids");
            books.settled(sub, id, one.next, one.at, now);
        }
    }

    /// The log was told that these turned out to be delivered.
    pub fn withdrawn(&self, of: SubscriptionId, ended: &[Position]) {
        let now = self.clock.now();
        let mut books = self.books();
        let sub = books.by_id[&of];
        for position in ended {
            let id = books.ids[position];
            books.settled(sub, id, NextStep::Done, now, now);
        }
    }

    /// A subscription gets announcements of blobs.
    pub fn subscribes_to_blobs(&self) {
        self.books().letters.listened_to = true;
    }

    /// The store has become reachable or unreachable.
    pub fn store_reachable(&self, reachable: bool) {
        let now = self.clock.now();
        let mut books = self.books();
        books.note(now, || format!("the blob store is within reach: {reachable}"));
        books.letters.reachable(reachable, now);
    }

    /// A blob is in the store. Called whether the engine learns of it or not.
    pub fn blob_put(&self, account: &str, place: BlobPathInContainer, body: &[u8]) {
        let now = self.clock.now();
        let mut books = self.books();
        books.elapsed = (self.elapsed)();
        books.blob_put(account, place, body, now);
    }

    /// The engine was told that an operation on a blob has failed: the blob will be written again.
    pub fn blob_trouble(&self, what: &str) {
        let now = self.clock.now();
        let mut books = self.books();
        books.note(now, || what.to_owned());
        books.letters.trouble(now);
    }

    /// Dead letters could not be written, or not be recorded in the archive.
    pub fn letters_not_written(&self, what: &str) {
        let now = self.clock.now();
        let mut books = self.books();
        books.note(now, || what.to_owned());
        books.letters.write_failed(now);
    }

    /// The log has refused this announcement of a blob.
    pub fn not_announced(&self, batch: &[u8]) {
        let text = std::str::from_utf8(batch).expect("our own text");
        self.books().not_announced(RawJson::trusted(text));
    }

    /// The log is about to remove these dead letters.
    pub fn forgetting(&self, of: SubscriptionId, letters: &[DeadLetterKey]) {
        let now = self.clock.now();
        let mut books = self.books();
        let keys = books.keys(of, letters);
        books.forgetting(&keys, now);
    }

    /// The log has removed these dead letters, durably.
    pub fn forgotten(&self, of: SubscriptionId, letters: &[DeadLetterKey]) {
        let now = self.clock.now();
        let mut books = self.books();
        let keys = books.keys(of, letters);
        books.forgotten(&keys, now);
    }

    /// The engine's counts of written and dropped dead letters in a life; none if the power went.
    pub fn letters_counted(&self, said: Option<ServerLetterCounts>) {
        self.books().counted(said);
    }

    /// A receiver got the announcement of a blob.
    pub fn blob_announced(&self, event: RawJson<'_>) {
        let now = self.clock.now();
        let mut books = self.books();
        books.note(now, || {
            format!("told of {:?}", event.get("subject").and_then(RawJson::as_str))
        });
        books.told_of(event);
    }

    /// The content of the archive at the end.
    pub fn listed(&self, records: Vec<BlobRecord>) {
        let line = |record: BlobRecord| {
            let reasons: Vec<GiveUpReason> = record.marks.iter().map(|mark| mark.reason).collect();
            ((record.container, record.path), record.bytes, reasons)
        };
        self.books().listed(records.into_iter().map(line).collect());
    }

    /// Everything settled so far is durable.
    pub fn checkpoint(&self) {
        self.books().lately.clear();
    }

    /// The catalog has this delay for a receiver's endpoint.
    pub fn kept(&self, receiver: usize, scope: DelayScope, delay: Option<AuditedDelay>) {
        self.note(|| format!("the catalogue keeps {delay:?} for {scope:?} of {receiver}"));
        let mut books = self.books();
        match scope {
            DelayScope::Endpoint => books.endpoints[receiver].kept = delay,
            DelayScope::Subscription(id) => {
                let sub = books.by_id[&id];
                books.own_endpoint(receiver, sub).kept = delay;
            }
        }
    }

    /// An operator said that a receiver is well.
    pub fn delay_ended_by_operator(&self, receiver: usize) {
        self.note(|| format!("{receiver} is admitted again"));
        let now = self.clock.now();
        let mut books = self.books();
        books.endpoints[receiver].admit_again(now);
        let there = books.own_endpoints.range_mut((receiver, 0)..(receiver + 1, 0));
        there.for_each(|(_, own)| own.admit_again(now));
    }

    /// The clock was set; `before` is its last value.
    pub fn clock_set(&self, before: Timestamp) {
        let elapsed = (self.elapsed)();
        let mut books = self.books();
        books.sets += 1;
        // The engine may have used that time for a decision, though nothing was observed then.
        books.latest = books.latest.max(before);
        let now = self.clock.now();
        books.letters.clock_set(before, now);
        books.note(now, || "the clock was set".into());
        books.era += 1;
        books.disturbed = Some(elapsed);
        for endpoint in books.all_endpoints() {
            endpoint.clock_set();
        }
        for sub in &mut books.subs {
            sub.pauses.clock_set();
        }
    }

    /// The disk has filled up, or has free space again.
    pub fn disk_full(&self, full: bool) {
        let elapsed = (self.elapsed)();
        self.note(|| format!("the disk is full: {full}"));
        let mut books = self.books();
        books.era += 1;
        books.disturbed = Some(elapsed);
        books.disk_full = full;
    }

    /// The power went: everything that was not durable is as it was before.
    pub fn crashed(&self) {
        let mut books = self.books();
        for (key, before) in std::mem::take(&mut books.lately).into_iter().rev() {
            let now = books.deliveries.entry(key).or_default();
            now.recorded = before.recorded;
            now.ends = before.ends;
            for (one, before) in now.tries.iter_mut().zip(&before.tries) {
                one.recorded = before.recorded;
            }
        }
        drop(books);
        self.restarted();
    }

    /// The power went, and it is unknown which of the latest settlements were durable.
    pub fn crashed_with_unknown_losses(&self) {
        let mut books = self.books();
        for (key, before) in std::mem::take(&mut books.lately).into_iter().rev() {
            let now = books.deliveries.entry(key).or_default();
            now.recorded.least = now.recorded.least.min(before.recorded.least);
            now.maybe_ended |= now.ends.len() > before.ends.len();
            now.ends = before.ends;
            for (one, before) in now.tries.iter_mut().zip(&before.tries) {
                one.recorded &= before.recorded;
            }
        }
        books.letters.crashed_somehow();
        drop(books);
        self.restarted();
    }

    /// The server stops, or has crashed: attempts in flight are cut short, and only stored state
    /// remains.
    pub fn restarted(&self) {
        let mut books = self.books();
        books.life += 1;
        books.disk_full = false;
        books.era += 1;
        books.note(self.clock.now(), || "a life has ended".into());
        for endpoint in books.all_endpoints() {
            endpoint.restart();
        }
    }

    /// The number of unfinished deliveries.
    pub fn unfinished(&self) -> usize {
        let now = self.clock.now();
        self.books().missing(now).count()
    }

    /// The number of requests that reached receivers.
    pub fn attempts(&self) -> usize {
        self.books().requests.len()
    }

    /// A hash of everything that receivers saw.
    pub fn trace(&self) -> u64 {
        self.books().trace.finish()
    }

    /// Judges how a stop of the server ended.
    pub fn stopped(&self, stopped: Result<(), postrider_engine::Error>) {
        if let Err(postrider_engine::Error::TasksLeft(tasks)) = stopped {
            self.books().wrong(ViolationKind::NotStopped, tasks);
        }
    }

    /// The log reports a backlog at the end.
    pub fn left_over(&self, what: String) {
        self.books().wrong(ViolationKind::Unrest, what);
    }

    /// All errors found, after everything has come to rest.
    pub fn verdict(&self) -> Vec<Violation> {
        let now = self.clock.now();
        let mut books = self.books();
        let lost: Vec<String> = books
            .missing(now)
            .map(|(sub, id)| {
                let tries = books.deliveries.get(&(sub, id)).map_or(0, |d| d.tries.len());
                let name = &books.subs[sub].name;
                format!("event {id} was accepted and never ended for {name}, after {tries} attempts")
            })
            .collect();
        for what in lost {
            books.wrong(ViolationKind::Lost, what);
        }
        books.judge_letters(now);
        books.wrong.clone()
    }
}

fn event_id(claim: &Claim) -> Option<u64> {
    let id = RawJson::trusted(claim.object())
        .get("id")
        .and_then(RawJson::as_str);
    id.and_then(|i| i.parse().ok())
}
