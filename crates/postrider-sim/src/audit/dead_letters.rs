//! The auditor's state about dead letters: which deliveries were given up, the blobs that hold
//! them, the announcements.

use super::ViolationKind;
use super::audit_state::{AuditState, AuditedDeliveryKey, BoundedCount, EngineView};
use super::endpoint::TICK;
use super::rules::ReceiverOutcome;
use postrider_core::json::RawJson;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;
use std::time::Duration;

/// A failed write is retried after this long, at the latest.
const TRIED_AGAIN: Duration = Duration::from_secs(300);
/// Dead letters wait while a blob of their subscription is being written: the slowest store answers
/// sooner.
const WRITING: Duration = Duration::from_secs(90);
/// The store may have been reachable for this long without an attempt to write.
const UNTRIED: Duration = Duration::from_secs(300 + 90);

/// A delivery that was given up and whose dead letter is to be written.
pub struct GivenUpDelivery {
    reason: GiveUpReason,
    /// The last attempt ended no earlier than this.
    not_before: Timestamp,
    settled: Timestamp,
    /// The wait for a blob began no later than this.
    since: Timestamp,
    /// None if the clock had been set back: the decision may have used the earlier time.
    era: Option<u64>,
    /// All outcomes that the blob may name for the last attempt.
    outcomes: BTreeSet<&'static str>,
    attempts: BoundedCount,
    /// The last blob that contains it.
    put: Option<LetterBlobPut>,
    /// Whether the log has removed it.
    done: bool,
    /// Whether its store was out of reach for long enough to drop it.
    hopeless: bool,
    dropped: bool,
    /// Whether its event turned out to be delivered, so that the dead letter is withdrawn.
    withdrawn: bool,
}

#[derive(Clone)]
struct LetterBlobPut {
    place: BlobPathInContainer,
    life: u32,
    troubles: u64,
}

/// A container and a path in it.
pub type BlobPathInContainer = (String, String);

/// Counts of one life that the server's own numbers must equal.
#[derive(Default)]
struct ExpectedLetterCounts {
    written: BoundedCount,
    dropped: BoundedCount,
}

/// The server's counts of dead letters in one life.
#[derive(Clone, Copy, Debug)]
pub struct ServerLetterCounts {
    pub written: u64,
    /// Events, for all reasons together.
    pub dead_lettered: u64,
    pub dropped: u64,
}

#[derive(Default)]
pub struct AuditedLetters {
    given: BTreeMap<AuditedDeliveryKey, GivenUpDelivery>,
    /// The content of the store.
    blobs: BTreeMap<BlobPathInContainer, Vec<AuditedDeliveryKey>>,
    /// The lengths of all versions of each blob.
    lengths: BTreeMap<BlobPathInContainer, BTreeSet<usize>>,
    /// Blobs whose dead letters the log has removed because they are there.
    relied_on: BTreeSet<BlobPathInContainer>,
    told: BTreeSet<BlobPathInContainer>,
    /// Announcements that the log refused: no dead letter waits for them, and they may never come.
    unannounced: BTreeSet<BlobPathInContainer>,
    /// Whether a subscription gets announcements of blobs.
    pub listened_to: bool,
    /// The number of failed operations after which dead letters may be written again.
    troubles: u64,
    trouble_at: Option<Timestamp>,
    written_at: Option<Timestamp>,
    /// The time from which the store is, or was, out of reach, and the time until which it was.
    away: Option<(Timestamp, Option<Timestamp>)>,
    counted: ExpectedLetterCounts,
}

impl AuditedLetters {
    pub fn trouble(&mut self, now: Timestamp) {
        self.troubles += 1;
        self.trouble_at = self.trouble_at.max(Some(now));
    }

    /// A failed write counts towards giving up, whether the store was out of reach or the archive
    /// had no space.
    pub fn write_failed(&mut self, now: Timestamp) {
        self.trouble(now);
        let still_away = self.away.is_some_and(|(_, until)| until.is_none());
        if !still_away {
            self.reachable(false, now);
            self.reachable(true, now);
        }
    }

    pub fn reachable(&mut self, reachable: bool, now: Timestamp) {
        match (reachable, &mut self.away) {
            (true, Some((_, until))) => *until = Some(now),
            (true, None) | (false, Some((_, None))) => {}
            // The short time within reach may have gone unnoticed.
            (false, Some((_, until))) if until.is_some_and(|until| now.since(until) < UNTRIED) => {
                *until = None
            }
            (false, away) => *away = Some((now, None)),
        }
    }

    /// The clock decides when a dead letter is given up. If the clock was set forward, a reachable
    /// store counts as reachable for the skipped time; if it was set back, writing is not tried
    /// before the clock shows the same time again.
    pub fn clock_set(&mut self, before: Timestamp, now: Timestamp) {
        if let Some((since, until)) = &mut self.away {
            *since = (*since).min(now);
            if let Some(until) = until.as_mut().filter(|_| now > before) {
                *until = now - before.since(*until);
            }
        }
    }

    /// Which dead letters the log has removed lately is unknown after this.
    pub fn crashed_somehow(&mut self) {
        self.given.values_mut().for_each(|given| given.done = false);
    }
}

impl AuditState {
    /// A delivery was given up. `before` is the number of attempts recorded until then.
    pub fn given_up(
        &mut self,
        key: AuditedDeliveryKey,
        reason: GiveUpReason,
        before: BoundedCount,
        now: Timestamp,
    ) {
        let delivery = &self.deliveries[&key];
        let rules = &self.subs[key.0].rules;
        let mut outcomes = BTreeSet::new();
        let (mut not_before, mut latest) = (None, None);
        let mut attempts = delivery.recorded;
        for one in delivery.tries.iter().rev().filter(|one| one.recorded) {
            let request = &self.requests[one.request];
            let timed_out = request.at + rules.response_timeout();
            let answer = request.ended.map(|ended| (ended.at, outcome(ended.came)));
            let (at, names) = match (request.told(rules), answer) {
                (EngineView::InTime, Some((at, name))) => (at, vec![name]),
                (EngineView::Unclear, Some((_, name))) => (request.at, vec![name, "TimedOut"]),
                (_, _) => (timed_out, vec!["TimedOut"]),
            };
            outcomes.extend(names);
            // An attempt that was never recorded does not count.
            let recorded = delivery.tried_at.filter(|_| !one.settled_late);
            latest = latest.max(Some(recorded.unwrap_or(now)));
            not_before = Some(not_before.map_or(at, |before: Timestamp| before.min(at)));
            // The attempt belongs to an earlier life and was cut short without a record; or it
            // ended while the server stopped.
            if one.settled_late {
                attempts.least = attempts.least.min(before.least);
                continue;
            }
            break;
        }
        if attempts.least == 0 {
            outcomes.insert("Probation");
        }
        let published = self.events.get(&key.1).map(|event| event.published);
        // The expiry was noticed only when the retry came due.
        let since = match reason {
            GiveUpReason::TimeToLiveExceeded => latest.unwrap_or(now).min(now),
            _ => now,
        };
        let given = GivenUpDelivery {
            reason,
            since,
            not_before: not_before.or(published).unwrap_or(now).min(now),
            settled: now,
            era: (now >= self.latest).then_some(self.era),
            outcomes,
            attempts,
            put: None,
            done: false,
            hopeless: false,
            dropped: false,
            withdrawn: false,
        };
        self.letters.given.insert(key, given);
    }

    /// A blob was written to the store.
    pub fn blob_put(&mut self, account: &str, place: BlobPathInContainer, body: &[u8], now: Timestamp) {
        (now.nanos(), &place, body).hash(&mut self.trace);
        let (container, path) = &place;
        self.note(now, || format!("blob {container}/{path} of {} bytes", body.len()));
        let Some(number) = self.misfiled(account, container, path, now) else {
            return;
        };
        let text = std::str::from_utf8(body).unwrap_or_default();
        let letters: Vec<RawJson<'_>> =
            RawJson::parse(text).map_or_else(|_| Vec::new(), |raw| raw.elements().collect());
        if letters.is_empty() {
            let what = format!("blob {path} holds no letters");
            self.wrong(ViolationKind::Misreported, what);
        }
        let mut keys = Vec::new();
        for letter in letters {
            let id = letter.get("id").and_then(RawJson::as_str);
            let Some(id) = id.and_then(|id| id.parse().ok()) else {
                self.wrong(
                    ViolationKind::NotALetter,
                    format!("blob {path} holds what nobody published"),
                );
                continue;
            };
            self.check_letter((number, id), letter, keys.contains(&(number, id)), now);
            keys.push((number, id));
            let (life, troubles) = (self.life, self.letters.troubles);
            if let Some(given) = self.letters.given.get_mut(&(number, id)) {
                given.put = Some(LetterBlobPut {
                    place: place.clone(),
                    life,
                    troubles,
                });
            }
        }
        self.letters.written_at = self.letters.written_at.max(Some(now));
        self.letters
            .lengths
            .entry(place.clone())
            .or_default()
            .insert(body.len());
        self.letters.blobs.insert(place, keys);
    }

    /// The subscription of a blob, if there is one; reports a blob in the wrong place.
    fn misfiled(&mut self, account: &str, container: &str, path: &str, now: Timestamp) -> Option<usize> {
        let parts: Vec<&str> = path.split('/').collect();
        let named = |name: &str| self.subs.iter().position(|sub| sub.name.to_uppercase() == name);
        let number = parts.first().copied().and_then(named);
        let c = now.civil();
        let hour = [
            c.year.to_string(),
            c.month.to_string(),
            c.day.to_string(),
            c.hour.to_string(),
        ];
        let right_hour = parts.len() == 6 && parts[1..5].iter().zip(&hour).all(|(a, b)| a == b);
        let guid = parts.last().and_then(|name| name.strip_suffix(".json"));
        let right_place = number.is_some_and(|number| {
            let place = self.subs[number].dead_letters.as_ref();
            place.is_some_and(|place| place.account == account && place.container == container)
        });
        if !right_place || !right_hour || !guid.is_some_and(is_guid) {
            let what = format!("blob {path:?} in {account}/{container} at {now}");
            self.wrong(ViolationKind::Misfiled, what);
        }
        number
    }

    fn check_letter(&mut self, key: AuditedDeliveryKey, letter: RawJson<'_>, again: bool, now: Timestamp) {
        let sub = &self.subs[key.0];
        let (rules, name, id) = (sub.rules, &sub.name, key.1);
        let ends = self.deliveries.get(&key).map(|delivery| &delivery.ends);
        let maybe = self
            .deliveries
            .get(&key)
            .is_some_and(|delivery| delivery.maybe_ended);
        let is_letter = maybe || ends.is_some_and(|ends| ends.last() == Some(&"dead-lettered"));
        let Some(given) = self.letters.given.get(&key).filter(|_| is_letter) else {
            let what = format!("event {id} for {name} is in a blob at {now}, but it was {ends:?}");
            self.wrong(ViolationKind::NotALetter, what);
            return;
        };
        let mut found = Vec::new();
        let needless = |put: &LetterBlobPut| put.life == self.life && put.troubles == self.letters.troubles;
        if again || given.done || given.put.as_ref().is_some_and(needless) {
            let what = format!("event {id} for {name} is written again at {now}, for no reason");
            found.push((ViolationKind::NotALetter, what));
        }
        if now + TICK < given.not_before + rules.letter_delay {
            let what = format!(
                "event {id} for {name} is written at {now}, its last attempt was at {}",
                given.not_before
            );
            found.push((ViolationKind::Hasty, what));
        }
        let gathered = self.letters.written_at.map(|at| at + rules.letter_delay / 100);
        let tried_again = self.letters.trouble_at.map(|at| at + TRIED_AGAIN);
        let due = (given.since + rules.letter_delay).max(given.settled);
        let due = due.max(gathered.max(tried_again).unwrap_or(Timestamp::MIN));
        if now > due + WRITING && given.era == Some(self.era) && self.undisturbed() {
            let what = format!("event {id} for {name} is written at {now}, it was due {due}");
            found.push((ViolationKind::HeldBack, what));
        }
        if let Some(at) = self.heard_late(key).filter(|at| now > *at + WRITING)
            && self.undisturbed()
        {
            let what = format!("event {id} for {name} is in a blob at {now}, and it was taken late at {at}");
            found.push((ViolationKind::NotALetter, what));
        }
        let text = |name: &str| letter.get(name).and_then(RawJson::as_str).unwrap_or_default();
        let attempts = letter.get("deliveryAttempts").and_then(RawJson::as_number);
        let attempts: Option<u32> = attempts.and_then(|n| n.parse().ok());
        let between = |n: u32| given.attempts.least <= n && n <= given.attempts.most;
        let published = self.events.get(&id).map(|event| event.published.to_string());
        let last = letter.get("lastDeliveryAttemptTime").and_then(RawJson::as_str);
        let attempted = attempts != Some(0);
        let mut report = |what: &str, right: bool| {
            if !right {
                let what = format!(
                    "{what} of event {id} for {name}: {}; reason {}, attempts {:?}, outcome {:?}",
                    letter.text(),
                    given.reason,
                    given.attempts,
                    given.outcomes
                );
                found.push((ViolationKind::Misreported, what));
            }
        };
        report("the reason", text("deadLetterReason") == spelled(given.reason));
        report("the attempts", attempts.is_some_and(between));
        let outcome = text("lastDeliveryOutcome");
        report("the outcome", given.outcomes.contains(&*outcome));
        report(
            "the time of publishing",
            Some(text("publishTime").into_owned()) == published,
        );
        report("the time of the last attempt", attempted == last.is_some());
        for (kind, what) in found {
            self.wrong(kind, what);
        }
    }

    /// When an attempt was answered late with a success that counts: within the window, and in this
    /// life.
    fn heard_late(&self, key: AuditedDeliveryKey) -> Option<Timestamp> {
        let rules = &self.subs[key.0].rules;
        let window = rules.late_window()?;
        let tries = self.deliveries.get(&key)?.tries.iter();
        let successes = tries.filter_map(|one| {
            let request = &self.requests[one.request];
            let ended = request.ended?;
            let late = request.told(rules) == EngineView::TimedOut && ended.at + TICK < request.at + window;
            let heard = request.life == self.life && ended.sets == self.sets;
            (late && heard && request.succeeded(rules)).then_some(ended.at)
        });
        successes.min()
    }

    /// Whether a receiver accepted the event, in time or late within the late window.
    fn was_taken(&self, key: AuditedDeliveryKey) -> bool {
        let rules = &self.subs[key.0].rules;
        let mut tries = self.deliveries.get(&key).into_iter().flat_map(|one| &one.tries);
        tries.any(|one| {
            let request = &self.requests[one.request];
            request.succeeded(rules) && request.may_count(rules)
        })
    }

    /// The log is about to remove these dead letters. Checks that those without a blob may be
    /// dropped or withdrawn.
    pub fn forgetting(&mut self, keys: &[AuditedDeliveryKey], now: Timestamp) {
        for key in keys {
            let was_taken = self.was_taken(*key);
            let sub = &self.subs[key.0];
            let Some(given) = self.letters.given.get_mut(key) else {
                continue;
            };
            given.withdrawn = was_taken && given.put.is_none();
            if given.put.is_some() {
                continue;
            }
            let patience = sub.rules.letter_patience;
            let due = given.settled.min(given.not_before) + sub.rules.letter_delay;
            let waited = now + TICK >= due + patience;
            let away = self.letters.away.is_some_and(|(since, until)| {
                let still = until.is_none_or(|until| now.since(until) < UNTRIED);
                still && now.since(since) + UNTRIED >= patience
            });
            given.hopeless = waited && away;
            if !given.hopeless && !given.withdrawn {
                let what = format!(
                    "event {} for {} is dropped at {now}, was due {due}, out of reach {:?}",
                    key.1, sub.name, self.letters.away
                );
                self.wrong(ViolationKind::GivenUpEarly, what);
            }
        }
    }

    /// The log has removed these dead letters durably.
    pub fn forgotten(&mut self, keys: &[AuditedDeliveryKey], now: Timestamp) {
        self.lately.retain(|(key, _)| !keys.contains(key));
        for key in keys {
            let letters = &mut self.letters;
            let Some(given) = letters.given.get_mut(key).filter(|given| !given.done) else {
                continue;
            };
            given.done = true;
            if given.withdrawn {
                // Or dropped: a life that began after the event was taken does not know that.
                letters.counted.dropped.most += u32::from(given.hopeless);
                let delivery = self.deliveries.get_mut(key).expect("it was given up");
                delivery.ends = vec!["delivered"];
                let what = format!("letter {} of {} is taken back", key.1, self.subs[key.0].name);
                self.note(now, || what);
                continue;
            }
            let counted = &mut letters.counted;
            match &given.put {
                Some(put) if put.troubles == letters.troubles && put.life == self.life => {
                    letters.relied_on.insert(put.place.clone());
                    counted.written = counted.written.plus_one();
                }
                // The dead letter may have been removed because it is in the blob, or dropped
                // because the write was not confirmed.
                Some(_) => {
                    counted.written.most += 1;
                    counted.dropped.most += 1;
                }
                None => {
                    given.dropped = given.hopeless;
                    counted.dropped = counted.dropped.plus_one();
                }
            }
            let (sub, dropped) = (&self.subs[key.0].name, given.dropped);
            let what = format!("letter {} of {sub} is forgotten, dropped: {dropped}", key.1);
            self.note(now, || what);
        }
    }

    /// A life has ended with these counts; none if the power went.
    pub fn counted(&mut self, said: Option<ServerLetterCounts>) {
        let counted = std::mem::take(&mut self.letters.counted);
        let Some(ServerLetterCounts {
            written,
            dead_lettered,
            dropped,
        }) = said
        else {
            return;
        };
        // An event is dead-lettered when it is in its blob, not when it was given up.
        if dead_lettered != written {
            let what =
                format!("{dead_lettered} events counted as dead-lettered, {written} letters as written");
            self.wrong(ViolationKind::Miscounted, what);
        }
        let within = |said: u64, b: BoundedCount| u64::from(b.least) <= said && said <= u64::from(b.most);
        if !within(written, counted.written) || !within(dropped, counted.dropped) {
            let what = format!(
                "{written} letters counted as written, {dropped} as dropped; there were {:?} and {:?}",
                counted.written, counted.dropped
            );
            self.wrong(ViolationKind::Miscounted, what);
        }
    }

    /// A receiver got the announcement of a blob.
    pub fn told_of(&mut self, event: RawJson<'_>) {
        let place = announced(event);
        let length = event.get("data").and_then(|data| data.get("contentLength"));
        let length: Option<usize> = length.and_then(RawJson::as_number).and_then(|n| n.parse().ok());
        let lengths = place.as_ref().and_then(|place| self.letters.lengths.get(place));
        let right_length = length.is_some_and(|n| lengths.is_some_and(|all| all.contains(&n)));
        let kind = event
            .get("eventType")
            .and_then(RawJson::as_str)
            .unwrap_or_default();
        match place {
            Some(place) if right_length && kind == "Microsoft.Storage.BlobCreated" => {
                self.letters.told.insert(place);
            }
            _ => {
                let what = format!("told of a blob that was never written: {}", event.text());
                self.wrong(ViolationKind::Untold, what);
            }
        }
    }

    /// The log has refused the announcement of a blob.
    pub fn not_announced(&mut self, event: RawJson<'_>) {
        self.letters.unannounced.extend(announced(event));
    }

    /// The content of the archive: place, length, and the reason of each dead letter.
    pub fn listed(&mut self, listed: Vec<(BlobPathInContainer, u64, Vec<GiveUpReason>)>) {
        let mut known = BTreeSet::new();
        let mut found = Vec::new();
        for (place, length, reasons) in listed {
            let lengths = self.letters.lengths.get(&place);
            let right_length = lengths.is_some_and(|all| all.contains(&(length as usize)));
            let held = self.letters.blobs.get(&place).map_or(&[][..], Vec::as_slice);
            let given = held
                .iter()
                .map(|key| self.letters.given.get(key).map(|given| given.reason));
            // A blob that was overwritten and not recorded since is not relied on; its dead letters
            // are in other blobs.
            let relied_on = self.letters.relied_on.contains(&place);
            if relied_on && (!right_length || !given.eq(reasons.iter().copied().map(Some))) {
                found.push(format!(
                    "the archive has {place:?} with {reasons:?}, not {held:?}"
                ));
            }
            known.insert(place);
        }
        for place in self.letters.relied_on.difference(&known) {
            found.push(format!("the archive does not know {place:?}"));
        }
        for what in found {
            self.wrong(ViolationKind::Unlisted, what);
        }
    }

    /// Complaints at the end: dead letters in no blob, and blobs without an announcement.
    pub fn judge_letters(&mut self, now: Timestamp) {
        let held: BTreeSet<&AuditedDeliveryKey> = self.letters.blobs.values().flatten().collect();
        let mut found = Vec::new();
        for (key, delivery) in &self.deliveries {
            let sub = &self.subs[key.0];
            let exists = sub.gone.is_none() && sub.expires.is_none_or(|at| now < at);
            let is_letter = delivery.ends.last() == Some(&"dead-lettered");
            let dropped = self.letters.given.get(key).is_some_and(|given| given.dropped);
            if exists && is_letter && !dropped && !held.contains(key) {
                let what = format!("event {} for {} was given up and is in no blob", key.1, sub.name);
                found.push((ViolationKind::Unwritten, what));
            }
        }
        if self.letters.listened_to {
            let untold = self.letters.relied_on.difference(&self.letters.told);
            for place in untold.filter(|place| !self.letters.unannounced.contains(*place)) {
                found.push((ViolationKind::Untold, format!("nobody was told of {place:?}")));
            }
        }
        for (kind, what) in found {
            self.wrong(kind, what);
        }
    }
}

/// The blob that an announcement names.
fn announced(event: RawJson<'_>) -> Option<BlobPathInContainer> {
    const SUBJECT: &str = "/blobServices/default/containers/";
    let subject = event.get("subject").and_then(RawJson::as_str)?;
    let (container, path) = subject.strip_prefix(SUBJECT)?.split_once("/blobs/")?;
    Some((container.to_owned(), path.to_owned()))
}

fn is_guid(text: &str) -> bool {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    let hex = |c: char| c == '-' || c.is_ascii_digit() || ('a'..='f').contains(&c);
    lengths == [8, 4, 4, 4, 12] && text.chars().all(hex)
}

/// The reason as spelled in dead letters.
fn spelled(reason: GiveUpReason) -> &'static str {
    match reason {
        GiveUpReason::AttemptsExhausted => "MaxDeliveryAttemptsExceeded",
        GiveUpReason::TimeToLiveExceeded => "TimeToLiveExceeded",
        GiveUpReason::BadRequest => "UndeliverableDueToHttpBadRequest",
        GiveUpReason::ClientError => "UndeliverableDueToClientError",
        // Reasons for which no dead letter is written.
        _ => "",
    }
}

/// An outcome as spelled in dead letters.
fn outcome(came: ReceiverOutcome) -> &'static str {
    match came {
        ReceiverOutcome::Broken => "SocketError",
        ReceiverOutcome::Unresolved => "ResolutionError",
        ReceiverOutcome::TimedOut | ReceiverOutcome::Answered(408) => "TimedOut",
        ReceiverOutcome::Answered(400) => "BadRequest",
        ReceiverOutcome::Answered(401) => "Unauthorized",
        ReceiverOutcome::Answered(403) => "Forbidden",
        ReceiverOutcome::Answered(404) => "NotFound",
        ReceiverOutcome::Answered(413) => "PayloadTooLarge",
        ReceiverOutcome::Answered(429 | 503) => "Busy",
        ReceiverOutcome::Answered(_) => "GenericError",
    }
}
