//! Events that were given up, on their way into blobs: many to one blob, some time after the last attempt.

use crate::attempt::Plan;
use crate::blobs::{BlobError, Blobs, Stored};
use crate::counters::{add, by_reason};
use crate::directory::{Router, TopicEntry};
use crate::{Engine, Error};
use bytes::Bytes;
use postrider_core::envelope::{Envelope, Field};
use postrider_core::event::{Batch, EventRef, Lacks, Schema, Span, system_id};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::json::{self, Raw};
use postrider_core::outcome::Outcome;
use postrider_core::render::{self, Diagnostics};
use postrider_core::retry::Reason;
use postrider_core::subscription::{DeadLetterDestination, TopicKind};
use postrider_core::time::Timestamp;
use postrider_store::{Archive, BlobId, BlobRecord, Letter, LettersWaiting, Mark, Want};
use rustc_hash::FxHashMap;
use std::borrow::Cow;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::task::JoinSet;

/// A blob holds no more letters than this …
pub const LETTERS_PER_BLOB_MAX: usize = 5000;
/// … and is not longer than this, unless a single event is.
pub const BLOB_BYTES_MAX: usize = 4 << 20;
/// Blobs of one subscription that are written at the same time.
pub const BLOBS_IN_FLIGHT_MAX: usize = 6;
/// Bytes that the diagnostics add to an event, about.
const DIAGNOSTICS_BYTES: usize = 320;
/// Waits before a blob that could not be written is tried again; the last one repeats.
const TRY_AGAIN: [Duration; 4] = [
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
    Duration::from_secs(300),
];
/// After a blob was written the next one of its subscription waits for this part of the delay: under a steady
/// stream a blob would hold but a few letters otherwise.
const GATHER_PART: u32 = 100;
/// Of letters that are dropped, this many are named in the log; the others are counted there.
const NAMED_MAX: usize = 100;

/// What is known about the writing of one subscription's letters.
#[derive(Default)]
struct Desk {
    writing: bool,
    failures: usize,
    /// Not to be tried before.
    pause_until: Option<Timestamp>,
    /// Why the last try failed.
    trouble: Option<String>,
}

type Desks = FxHashMap<SubscriptionId, Desk>;

/// Where dead letters go, and what is under way.
pub struct DeadLetters {
    pub blobs: Arc<dyn Blobs>,
    pub archive: Arc<dyn Archive>,
    /// For subscriptions that name no place.
    pub fallback: Option<DeadLetterDestination>,
    desks: Mutex<Desks>,
    busy: AtomicUsize,
    /// Held while marks are read and written back: replays and purges may want the same blob.
    pub(crate) marking: tokio::sync::Mutex<()>,
}

impl DeadLetters {
    pub fn new(
        blobs: Arc<dyn Blobs>,
        archive: Arc<dyn Archive>,
        fallback: Option<DeadLetterDestination>,
    ) -> DeadLetters {
        DeadLetters {
            blobs,
            archive,
            fallback,
            desks: Mutex::default(),
            busy: AtomicUsize::new(0),
            marking: tokio::sync::Mutex::default(),
        }
    }

    fn desks(&self) -> MutexGuard<'_, Desks> {
        self.desks.lock().expect("no panic holds it")
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Acquire) > 0
    }

    /// Why the letters of a subscription could not be written at the last try.
    pub fn trouble(&self, of: SubscriptionId) -> Option<String> {
        self.desks().get(&of)?.trouble.clone()
    }
}

/// Letters that go into one blob, and what it will be called.
struct Draft {
    plan: Arc<Plan>,
    place: DeadLetterDestination,
    letters: Vec<Letter>,
    record: BlobRecord,
}

impl Engine {
    /// Starts writing whatever letters are due by `now`.
    pub(crate) fn look_for_letters(self: &Arc<Self>, now: Timestamp) {
        if self.dispatcher.stop.is_cancelled() {
            return;
        }
        let all = self.log.letters_waiting();
        // Where nothing waits there is nothing to remember.
        let waits = |of: &SubscriptionId| all.binary_search_by_key(of, |one| one.of).is_ok();
        self.dead_letters
            .desks()
            .retain(|of, desk| desk.writing || desk.pause_until > Some(now) || waits(of));
        for waiting in all {
            if !self.take_desk(&waiting, now) {
                continue;
            }
            self.dead_letters.busy.fetch_add(1, AcqRel);
            self.dispatcher
                .tasks
                .spawn(self.clone().write_letters(waiting.of));
        }
    }

    /// Whether letters of a subscription are due by `now` and nobody is writing them: then it is up to the caller.
    fn take_desk(&self, waiting: &LettersWaiting, now: Timestamp) -> bool {
        let mut desks = self.dead_letters.desks();
        let take = self.letters_due(&desks, waiting).is_some_and(|due| due <= now);
        if take {
            desks.entry(waiting.of).or_default().writing = true;
        }
        take
    }

    /// When letters are to be written next, other than by `now`.
    pub(crate) fn next_letters(&self, now: Timestamp) -> Option<Timestamp> {
        let waiting = self.log.letters_waiting();
        let desks = self.dead_letters.desks();
        let due = waiting.iter().filter_map(|one| self.letters_due(&desks, one));
        due.filter(|due| *due > now).min()
    }

    /// When the oldest letter of a subscription is to be written; none while that is being done, or while
    /// nothing is known about the subscription: it is about to go, and its letters with it.
    fn letters_due(&self, desks: &Desks, waiting: &LettersWaiting) -> Option<Timestamp> {
        let desk = desks.get(&waiting.of);
        if desk.is_some_and(|desk| desk.writing) {
            return None;
        }
        let plan = self.dispatcher.outlet(waiting.of)?.plan()?;
        let due = waiting.oldest + plan.profile.dead_letter.delay;
        Some(
            desk.and_then(|desk| desk.pause_until)
                .map_or(due, |pause| pause.max(due)),
        )
    }

    /// Writes letters as they come due.
    pub(crate) async fn keep_letters(self: Arc<Self>) {
        loop {
            let now = self.clock.now();
            self.look_for_letters(now);
            let next = self.next_letters(now);
            tokio::select! {
                biased;
                () = self.dispatcher.stop.cancelled() => return,
                () = self.dispatcher.letters_changed.notified() => {}
                () = self.clock.sleep_until(next.unwrap_or(Timestamp::MAX)), if next.is_some() => {}
            }
        }
    }

    /// Writes everything of a subscription that is due, or as much as can be written.
    async fn write_letters(self: Arc<Self>, of: SubscriptionId) {
        let written = tokio::select! {
            biased;
            () = self.dispatcher.abort.cancelled() => Err("the server is shutting down".to_owned()),
            written = self.write_due(of) => written,
        };
        let now = self.clock.now();
        let retry = match written {
            Ok(()) => None,
            Err(trouble) => {
                let give_up_at = self.give_up_late(of, now, &trouble).await;
                Some((trouble, give_up_at))
            }
        };
        {
            let mut desks = self.dead_letters.desks();
            match retry {
                // Those that come due in the next moment go into one blob too.
                None => {
                    let plan = self.dispatcher.outlet(of).and_then(|outlet| outlet.plan());
                    let delay = plan.map_or(Duration::ZERO, |plan| plan.profile.dead_letter.delay);
                    let gather = delay / GATHER_PART;
                    let desk = Desk {
                        pause_until: Some(now + gather),
                        ..Desk::default()
                    };
                    desks.insert(of, desk);
                }
                Some((trouble, give_up_at)) => {
                    let desk = desks.entry(of).or_default();
                    let wait = TRY_AGAIN[desk.failures.min(TRY_AGAIN.len() - 1)];
                    desk.failures += 1;
                    desk.writing = false;
                    let again = now + wait;
                    desk.pause_until = Some(give_up_at.map_or(again, |at| at.min(again).max(now)));
                    tracing::warn!(subscription = %of, reason = %trouble, again = ?wait, "dead letters cannot be written");
                    desk.trouble = Some(trouble);
                }
            }
        }
        self.dispatcher.letters_changed.notify_one();
        self.dead_letters.busy.fetch_sub(1, AcqRel);
    }

    async fn write_due(self: &Arc<Self>, of: SubscriptionId) -> Result<(), String> {
        let mut writing: JoinSet<Result<(), String>> = JoinSet::new();
        let mut after = None;
        let mut outcome = Ok(());
        loop {
            while writing.len() >= BLOBS_IN_FLIGHT_MAX || (outcome.is_err() && !writing.is_empty()) {
                outcome = outcome.and(joined(writing.join_next().await));
            }
            if outcome.is_err() || self.dispatcher.stop.is_cancelled() {
                break;
            }
            match self.draft(of, after).await {
                Ok(Some(draft)) => {
                    after = draft.letters.last().map(Letter::key);
                    writing.spawn(self.clone().write_blob(draft));
                }
                Ok(None) => break,
                Err(trouble) => outcome = Err(trouble),
            }
        }
        while let Some(ended) = writing.join_next().await {
            outcome = outcome.and(joined(Some(ended)));
        }
        outcome
    }

    /// The next blob to be written; none when nothing more is due.
    async fn draft(
        &self,
        of: SubscriptionId,
        after: Option<(Timestamp, Position)>,
    ) -> Result<Option<Draft>, String> {
        let Some(plan) = self.dispatcher.outlet(of).and_then(|outlet| outlet.plan()) else {
            return Ok(None);
        };
        let now = self.clock.now();
        let until = now - plan.profile.dead_letter.delay;
        let want = Want {
            events_max: LETTERS_PER_BLOB_MAX,
            bytes_max: BLOB_BYTES_MAX,
            overhead: plan.want.overhead + DIAGNOSTICS_BYTES,
        };
        let read = self.log.letters(of, after, until, want).await;
        let letters = read.map_err(|e| e.to_string())?;
        if letters.is_empty() {
            return Ok(None);
        }
        let named = plan.subscription.dead_letter.as_ref();
        let Some(place) = named.or(self.dead_letters.fallback.as_ref()) else {
            let reason = Reason::DeadLetterHomeless;
            self.drop_letters(
                &plan,
                &letters,
                reason,
                "the subscription names no place for them",
            )
            .await?;
            return Ok(None);
        };
        let path = blob_path(&plan, &letters[0], self.log.identity(), now);
        let record = BlobRecord {
            id: BlobId(0),
            subscription: of,
            subscription_name: plan.subscription.name.clone(),
            topic_name: plan.topic.topic.name.clone(),
            account: place.account_name().to_owned(),
            container: place.container.clone(),
            path,
            written: now,
            bytes: 0,
            marks: letters.iter().map(mark).collect(),
        };
        Ok(Some(Draft {
            place: place.clone(),
            letters,
            record,
            plan,
        }))
    }

    /// First the blob, then where it is, then who is told, then the letters are forgotten: a crash in between
    /// writes them again, never not at all.
    async fn write_blob(self: Arc<Self>, draft: Draft) -> Result<(), String> {
        let Draft {
            plan,
            place,
            letters,
            mut record,
        } = draft;
        // Here rather than where the letters are read: blobs are put together side by side.
        let body = Bytes::from(write_body(&plan, &letters, self.log.identity()));
        let (length, path) = (body.len(), record.path.clone());
        record.bytes = length as u64;
        let put = self
            .dead_letters
            .blobs
            .put(place.account_name(), &place.container, &path, body);
        let stored = put.await.map_err(|e: BlobError| e.to_string())?;
        let internal = |e: postrider_store::Error| e.to_string();
        self.dead_letters.archive.add(record).await.map_err(internal)?;
        let announce = !letters.iter().all(|letter| self.is_announcement(letter));
        if announce {
            self.announce(&place, &path, length, &stored)
                .await
                .map_err(|e| e.to_string())?;
        }
        let keys = letters.iter().map(Letter::key).collect();
        self.log
            .letters_done(plan.subscription.id, keys)
            .await
            .map_err(internal)?;
        add(&self.dispatcher.counters.dead_letters_written, letters.len());
        add(&self.dispatcher.counters.blobs_written, 1);
        Ok(())
    }

    /// Drops the letters for which the store has been out of reach for too long. When the next ones would be.
    async fn give_up_late(&self, of: SubscriptionId, now: Timestamp, trouble: &str) -> Option<Timestamp> {
        let plan = self.dispatcher.outlet(of)?.plan()?;
        let timing = plan.profile.dead_letter;
        let patience = timing.delay.saturating_add(timing.give_up_after);
        let want = Want {
            events_max: LETTERS_PER_BLOB_MAX,
            bytes_max: BLOB_BYTES_MAX,
            overhead: 0,
        };
        loop {
            let late = self.log.letters(of, None, now - patience, want).await.ok()?;
            if late.is_empty() {
                break;
            }
            if let Err(e) = self
                .drop_letters(&plan, &late, Reason::DeadLetterUnavailable, trouble)
                .await
            {
                tracing::error!(subscription = %plan.subscription.name, error = %e, "cannot drop dead letters");
                return None;
            }
        }
        let waiting = self.log.letters_waiting();
        let oldest = waiting.iter().find(|one| one.of == of)?.oldest;
        Some(oldest + patience)
    }

    async fn drop_letters(
        &self,
        plan: &Plan,
        letters: &[Letter],
        reason: Reason,
        trouble: &str,
    ) -> Result<(), String> {
        let ids: Vec<String> = letters
            .iter()
            .take(NAMED_MAX)
            .map(|letter| event_id(plan, letter))
            .collect();
        tracing::error!(
            subscription = %plan.subscription.name,
            count = letters.len(),
            %reason,
            trouble,
            ids = ids.join(", "),
            "dead letters dropped"
        );
        let keys = letters.iter().map(Letter::key).collect();
        let done = self.log.letters_done(plan.subscription.id, keys).await;
        done.map_err(|e| e.to_string())?;
        let outlet = self.dispatcher.outlet(plan.subscription.id);
        let counted = outlet.iter().map(|outlet| &outlet.counters);
        for counters in counted.chain([&self.dispatcher.counters]) {
            add(by_reason(&counters.dropped, reason), letters.len());
        }
        Ok(())
    }

    /// Whether a letter is itself about a blob of dead letters: telling of its blob would never end.
    fn is_announcement(&self, letter: &Letter) -> bool {
        let topic = self.directory.topic_by_id(letter.entry.batch.topic);
        topic.is_some_and(|topic| matches!(topic.topic.kind, TopicKind::System { .. }))
    }

    /// Publishes `Microsoft.Storage.BlobCreated` to whoever subscribes to the storage account.
    async fn announce(
        &self,
        place: &DeadLetterDestination,
        path: &str,
        length: usize,
        stored: &Stored,
    ) -> Result<(), Error> {
        let now = self.clock.now();
        for topic in self.directory.storage_topics(place.account_name()) {
            let batch = announcement(&topic, &place.container, path, length, stored, now);
            let text = std::str::from_utf8(&batch.body)
                .expect("made of strings")
                .to_owned();
            let object = Raw::trusted(&text);
            let mut router = Router::new(&topic, now);
            router.route(&Envelope::read(Schema::EventGrid, object, None), None);
            let unmatched = router.unmatched;
            let batch = Batch {
                matched: router.into_sets(),
                ..batch
            };
            self.accept(&topic, batch, unmatched).await?;
        }
        Ok(())
    }
}

fn joined(ended: Option<Result<Result<(), String>, tokio::task::JoinError>>) -> Result<(), String> {
    match ended {
        Some(Ok(outcome)) => outcome,
        Some(Err(e)) => Err(format!("writing ended badly: {e}")),
        None => Ok(()),
    }
}

fn mark(letter: &Letter) -> Mark {
    Mark {
        reason: letter.reason,
        replays: u8::try_from(letter.entry.batch.replay).unwrap_or(u8::MAX),
        purged: false,
    }
}

fn write_body(plan: &Plan, letters: &[Letter], identity: u64) -> Vec<u8> {
    let how = plan.rendering();
    let size: usize = letters
        .iter()
        .map(|l| render::delivered_len_hint(&l.entry.batch, l.index as usize, &how) + DIAGNOSTICS_BYTES)
        .sum();
    let mut body = Vec::with_capacity(size + 2);
    for (i, letter) in letters.iter().enumerate() {
        body.push(if i == 0 { b'[' } else { b',' });
        write_letter(&mut body, plan, letter, identity);
    }
    body.push(b']');
    body
}

/// Appends a letter as it stands in its blob.
pub fn write_letter(out: &mut Vec<u8>, plan: &Plan, letter: &Letter, identity: u64) {
    // One that was never attempted waited for an endpoint that was left alone.
    let outcome = letter
        .last_attempt
        .map_or(Outcome::Probation, |last| last.outcome);
    let diagnostics = Diagnostics {
        reason: letter.reason.name(),
        attempts: letter.attempts_made,
        last_outcome: outcome.name(),
        publish_time: letter.entry.batch.received,
        last_attempt_time: letter.last_attempt.map(|last| last.at),
    };
    let id = || system_id(identity, letter.position());
    let (batch, index) = (&letter.entry.batch, letter.index as usize);
    render::write_dead_letter(out, batch, index, &plan.rendering(), id, &diagnostics);
}

/// `<SUBSCRIPTION>/<year>/<month>/<day>/<hour>/<guid>.json`, in UTC, nothing padded. The same first letter gives
/// the same guid: what is written again after a crash mostly takes the place of what was there.
fn blob_path(plan: &Plan, first: &Letter, identity: u64, now: Timestamp) -> String {
    let c = now.civil();
    let of = plan.subscription.id.0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let guid = system_id(identity ^ of, first.position());
    let name = plan.subscription.name.to_uppercase();
    format!("{name}/{}/{}/{}/{}/{guid}.json", c.year, c.month, c.day, c.hour)
}

/// The publisher's own name for an event, as far as it has one.
fn event_id(plan: &Plan, letter: &Letter) -> String {
    let batch = &letter.entry.batch;
    let object = Raw::trusted(batch.object(letter.index as usize));
    let envelope = Envelope::read(batch.schema, object, plan.topic.topic.mapping.as_ref());
    let id = envelope.id_field().and_then(Field::scalar_text);
    id.map_or_else(|| format!("at position {}", letter.position()), Cow::into_owned)
}

/// The event that tells of a blob, exactly as the storage service writes it.
fn announcement(
    topic: &TopicEntry,
    container: &str,
    path: &str,
    length: usize,
    stored: &Stored,
    now: Timestamp,
) -> Batch {
    let quoted = |text: &str| {
        let mut out = Vec::new();
        json::write_string(text, &mut out);
        String::from_utf8(out).expect("a string is text")
    };
    let guid = path
        .rsplit('/')
        .next()
        .and_then(|name| name.strip_suffix(".json"))
        .unwrap_or(path);
    let subject = format!("/blobServices/default/containers/{container}/blobs/{path}");
    let body = format!(
        concat!(
            r#"{{"topic":{topic},"subject":{subject},"eventType":"Microsoft.Storage.BlobCreated","id":{id},"#,
            r#""data":{{"api":"PutBlob","clientRequestId":{id},"requestId":{id},"eTag":{etag},"#,
            r#""contentType":"application/json","contentLength":{length},"blobType":"BlockBlob","url":{url},"#,
            r#""sequencer":"{sequencer:048x}","storageDiagnostics":{{"batchId":{id}}}}},"#,
            r#""dataVersion":"","metadataVersion":"1","eventTime":"{now}"}}"#
        ),
        topic = quoted(&topic.full_id),
        subject = quoted(&subject),
        id = quoted(guid),
        etag = quoted(&stored.etag),
        length = length,
        url = quoted(&stored.url),
        sequencer = now.nanos(),
        now = now,
    );
    let object = Span::new(0, body.len());
    Batch {
        topic: topic.topic.id,
        schema: Schema::EventGrid,
        received: now,
        publisher: "dead letters".into(),
        trace: None,
        replay: 0,
        body: Bytes::from(body),
        events: vec![EventRef {
            object,
            lacks: Lacks::default(),
            ..EventRef::default()
        }],
        matched: Vec::new(),
    }
}
