//! Pages of dead letters: those in blobs first, oldest first, then the pending ones.
//!
//! A dead letter that is written to a blob while its pages are being read may be missed by them,
//! but is never shown wrongly.

use super::selection::{DeadLetterName, SubscriptionNames, number, read_query, read_reason, read_since};
use super::{no_such_letter, store_unavailable};
use crate::Server;
use crate::own_api::Problem;
use crate::peers::{PeerResponses, Peers, gather};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::json::{JsonKind, RawJson};
use postrider_core::retry::GiveUpReason;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::Engine;
use postrider_engine::attempt::DeliveryPlan;
use postrider_engine::dead_letter_blob::{DeadLetterFault, check_letter, dead_letters_of, full_path};
use postrider_engine::dead_letters::{before, write_letter};
use postrider_engine::replay::{ArchivedDeadLetterFilter, DeadLetterId};
use postrider_store::{BlobFault, BlobId, BlobRecord, ClaimLimits, DeadLetterKey, PendingDeadLetter};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1000;
/// Records of blobs that are requested at once.
const RECORDS: usize = 16;
/// Blobs that are read at the same time.
const READING_MAX: usize = 8;
/// Pending dead letters that one page examines at most, however few of them match.
const LOOKED_AT_MAX: usize = 10_000;
const WAITING_BYTES_MAX: usize = 4 << 20;

#[derive(Serialize)]
pub struct DeadLetterPage {
    pub value: Vec<DeadLetterBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub continuation: Option<String>,
    /// Nodes that did not report their pending dead letters.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

/// A dead letter that this node found, or the JSON that another node reported.
#[derive(Serialize)]
#[serde(untagged)]
pub enum DeadLetterBody {
    Here(Box<ApiDeadLetter>),
    Elsewhere(Box<RawValue>),
}

/// A dead letter, as far as it is known.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiDeadLetter {
    pub id: String,
    pub state: &'static str,
    topic: String,
    subscription: String,
    subscription_id: u64,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    delivery_attempts: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_delivery_outcome: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    publish_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_delivery_attempt_time: Option<String>,
    dead_lettered_time: String,
    /// When the pending dead letter will be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    due: Option<String>,
    /// Why the dead letter could not be written, or cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subject: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blob: Option<DeadLetterBlobPath>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replays: Option<u8>,
    /// The blob is gone. `state` says so too; clients of earlier versions read this member.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub missing: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<Box<RawValue>>,
}

#[derive(Clone, Debug, Serialize)]
struct DeadLetterBlobPath {
    account: String,
    container: String,
    path: String,
    /// For a blob that cannot be read: how many dead letters were written to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    letters: Option<usize>,
}

/// Start of a page: this dead letter, or the first one after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeadLetterContinuation {
    Written(DeadLetterId),
    Pending(SubscriptionId, DeadLetterKey),
}

impl DeadLetterContinuation {
    fn parse(text: &str) -> Option<DeadLetterContinuation> {
        let mut parts = text.split('.');
        let mut next = || parts.next();
        let read = match next()? {
            "written" => DeadLetterContinuation::Written(DeadLetterId {
                blob: BlobId(number(next()?)?),
                place: number(next()?)?,
            }),
            "pending" => DeadLetterContinuation::Pending(
                SubscriptionId(number(next()?)?),
                (
                    Timestamp::from_nanos(number(next()?)?),
                    Position(number(next()?)?),
                ),
            ),
            _ => return None,
        };
        parts.next().is_none().then_some(read)
    }
}

impl fmt::Display for DeadLetterContinuation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeadLetterContinuation::Written(DeadLetterId { blob, place }) => {
                write!(f, "written.{}.{place}", blob.0)
            }
            DeadLetterContinuation::Pending(of, (decided, position)) => {
                write!(f, "pending.{of}.{}.{position}", decided.nanos())
            }
        }
    }
}

pub async fn list(
    engine: &Arc<Engine>,
    peers: Option<&dyn Peers>,
    query: &str,
) -> Result<DeadLetterPage, Problem> {
    let (mut filter, mut limit, mut from) = (ArchivedDeadLetterFilter::default(), LIMIT_DEFAULT, None);
    let known = ["subscription", "reason", "since", "limit", "continuation"];
    for (name, value) in read_query(query, &known)? {
        match name {
            "subscription" => {
                filter.subscription = Some(SubscriptionNames::find(engine, name, &value).await?.id)
            }
            "reason" => filter.reason = Some(read_reason(&value)?),
            "since" => filter.since = Some(read_since(&value, engine.clock.now())?),
            "limit" => {
                let asked = number(&value).filter(|limit| (1..=LIMIT_MAX).contains(limit));
                limit =
                    asked.ok_or_else(|| Problem::field("limit", format!("must be from 1 to {LIMIT_MAX}")))?;
            }
            _ => {
                let refused = || Problem::field("continuation", "is not one that a page ended with");
                from = Some(DeadLetterContinuation::parse(&value).ok_or_else(refused)?);
            }
        }
    }
    page(engine, peers, &filter, limit, from).await
}

async fn page(
    engine: &Arc<Engine>,
    peers: Option<&dyn Peers>,
    filter: &ArchivedDeadLetterFilter,
    limit: usize,
    from: Option<DeadLetterContinuation>,
) -> Result<DeadLetterPage, Problem> {
    let mut value = Vec::new();
    let here = |entry: ApiDeadLetter| DeadLetterBody::Here(Box::new(entry));
    let waiting = match from {
        Some(DeadLetterContinuation::Pending(of, key)) => Some((of, key)),
        Some(DeadLetterContinuation::Written(_)) | None => {
            let first = match from {
                Some(DeadLetterContinuation::Written(first)) => Some(first),
                _ => None,
            };
            let (chosen, next) = choose(engine, filter, limit, first).await?;
            value.extend(read_written(engine, chosen).await.into_iter().map(here));
            if let Some(next) = next {
                return Ok(DeadLetterPage {
                    value,
                    continuation: Some(DeadLetterContinuation::Written(next).to_string()),
                    missing: Vec::new(),
                });
            }
            None
        }
    };
    let left = limit - value.len();
    let (next, missing) = match peers {
        None => {
            let (letters, next) = list_waiting(engine, filter, left, waiting).await?;
            value.extend(letters.into_iter().map(|(_, entry)| here(entry)));
            (next, Vec::new())
        }
        Some(peers) => {
            let asked = PendingPageRequest::new(filter, left, waiting);
            let heard: PeerResponses<PendingPageReply> = gather(peers, "letters", &asked).await;
            let answers = heard.answers.into_iter().map(|(_, letters)| letters);
            let (letters, next) = join(answers.collect(), left);
            value.extend(letters.into_iter().map(DeadLetterBody::Elsewhere));
            (next, heard.missing)
        }
    };
    Ok(DeadLetterPage {
        value,
        continuation: next.map(|(of, key)| DeadLetterContinuation::Pending(of, key).to_string()),
        missing,
    })
}

/// Peer request for the pending dead letters of a node.
#[derive(Serialize, Deserialize)]
pub struct PendingPageRequest {
    subscription: Option<u64>,
    reason: Option<u8>,
    since: Option<i64>,
    limit: usize,
    from: Option<PendingSortKey>,
}

/// Sort key of a pending dead letter: its subscription, when it was given up, its position in the
/// log.
type PendingSortKey = (u64, i64, u64);

fn write_where((of, (decided, position)): (SubscriptionId, DeadLetterKey)) -> PendingSortKey {
    (of.0, decided.nanos(), position.0)
}

fn read_where((of, decided, position): PendingSortKey) -> (SubscriptionId, DeadLetterKey) {
    (
        SubscriptionId(of),
        (Timestamp::from_nanos(decided), Position(position)),
    )
}

impl PendingPageRequest {
    fn new(
        filter: &ArchivedDeadLetterFilter,
        limit: usize,
        from: Option<(SubscriptionId, DeadLetterKey)>,
    ) -> PendingPageRequest {
        PendingPageRequest {
            subscription: filter.subscription.map(|id| id.0),
            reason: filter.reason.map(|reason| reason.code()),
            since: filter.since.map(Timestamp::nanos),
            limit,
            from: from.map(write_where),
        }
    }
}

/// Pending dead letters of one node, in order, and the key to continue from.
#[derive(Serialize, Deserialize)]
pub struct PendingPageReply {
    value: Vec<(PendingSortKey, Box<RawValue>)>,
    next: Option<PendingSortKey>,
}

pub async fn own_letters(server: &Server, asked: PendingPageRequest) -> Result<PendingPageReply, String> {
    let filter = ArchivedDeadLetterFilter {
        subscription: asked.subscription.map(SubscriptionId),
        reason: asked.reason.map(GiveUpReason::from_code),
        since: asked.since.map(Timestamp::from_nanos),
        ..ArchivedDeadLetterFilter::default()
    };
    let limit = asked.limit.min(LIMIT_MAX);
    let found = list_waiting(&server.engine, &filter, limit, asked.from.map(read_where)).await;
    let (letters, next) = found.map_err(|problem| problem.detail)?;
    let mut value = Vec::with_capacity(letters.len());
    for (at, entry) in letters {
        let text = serde_json::value::to_raw_value(&entry).map_err(|e| e.to_string())?;
        value.push((write_where(at), text));
    }
    Ok(PendingPageReply {
        value,
        next: next.map(write_where),
    })
}

/// Merges the dead letters of all nodes in order, up to the limit, and returns the key to continue
/// from. Dead letters beyond the point where a node had to stop are left for the next page.
fn join(
    answers: Vec<PendingPageReply>,
    limit: usize,
) -> (Vec<Box<RawValue>>, Option<(SubscriptionId, DeadLetterKey)>) {
    let horizon = answers.iter().filter_map(|letters| letters.next).min();
    let mut all: Vec<(PendingSortKey, Box<RawValue>)> =
        answers.into_iter().flat_map(|letters| letters.value).collect();
    all.sort_by_key(|(at, _)| *at);
    let before = all.partition_point(|(at, _)| horizon.is_none_or(|horizon| *at < horizon));
    let taken = before.min(limit);
    let next = all.get(taken).map(|(at, _)| *at).into_iter().chain(horizon).min();
    let value = all.into_iter().take(taken).map(|(_, text)| text).collect();
    (value, next.map(read_where))
}

/// A blob and the indexes of dead letters in it.
type SelectedBlobIndexes = (BlobRecord, Vec<usize>);

/// Selects the dead letters of one page by the archive's records alone, and the one that the next
/// page begins with.
async fn choose(
    engine: &Engine,
    filter: &ArchivedDeadLetterFilter,
    limit: usize,
    from: Option<DeadLetterId>,
) -> Result<(Vec<SelectedBlobIndexes>, Option<DeadLetterId>), Problem> {
    let (mut chosen, mut count) = (Vec::new(), 0);
    let mut after = from.and_then(|from| from.blob.0.checked_sub(1).map(BlobId));
    loop {
        let blobs = engine
            .letter_blobs(filter, after, RECORDS)
            .await
            .map_err(store_unavailable)?;
        let Some(last) = blobs.last() else {
            return Ok((chosen, None));
        };
        after = Some(last.id);
        for blob in blobs {
            let start = from
                .filter(|from| from.blob == blob.id)
                .map_or(0, |from| from.place as usize);
            let marks = blob.marks.iter().enumerate().skip(start);
            let mut wanted = marks
                .filter(|(place, mark)| filter.takes(*place, **mark))
                .map(|(place, _)| place);
            let places: Vec<usize> = wanted.by_ref().take(limit - count).collect();
            let next = wanted.next().map(|place| DeadLetterId {
                blob: blob.id,
                place: place as u32,
            });
            count += places.len();
            if !places.is_empty() {
                chosen.push((blob, places));
            }
            if next.is_some() {
                return Ok((chosen, next));
            }
        }
    }
}

/// Reads the selected dead letters, in order. No blob is read twice, and an account that cannot be
/// reached is not tried again.
async fn read_written(engine: &Arc<Engine>, chosen: Vec<SelectedBlobIndexes>) -> Vec<ApiDeadLetter> {
    let mut entries: Vec<Vec<ApiDeadLetter>> = Vec::new();
    entries.resize_with(chosen.len(), Vec::new);
    let mut reading = JoinSet::new();
    let mut unreachable: Option<(String, String)> = None;
    for (at, (blob, places)) in chosen.into_iter().enumerate() {
        while reading.len() >= READING_MAX {
            keep(reading.join_next().await, &mut entries, &mut unreachable);
        }
        if let Some((_, detail)) = unreachable
            .as_ref()
            .filter(|(account, _)| *account == blob.account)
        {
            entries[at] = places.iter().map(|place| unread(&blob, *place, detail)).collect();
            continue;
        }
        let engine = engine.clone();
        reading.spawn(async move { (at, read_blob(&engine, &blob, &places, false).await) });
    }
    while let Some(read) = reading.join_next().await {
        keep(Some(read), &mut entries, &mut unreachable);
    }
    entries.into_iter().flatten().collect()
}

type BlobReadResult = (usize, Result<Vec<ApiDeadLetter>, UnreachableAccount>);

/// An account that does not answer, and entries with what the archive knows about its dead letters.
struct UnreachableAccount {
    account: String,
    detail: String,
    entries: Vec<ApiDeadLetter>,
}

fn keep(
    read: Option<Result<BlobReadResult, tokio::task::JoinError>>,
    entries: &mut [Vec<ApiDeadLetter>],
    unreachable: &mut Option<(String, String)>,
) {
    match read {
        Some(Ok((at, Ok(read)))) => entries[at] = read,
        Some(Ok((at, Err(gone)))) => {
            entries[at] = gone.entries;
            *unreachable = Some((gone.account, gone.detail));
        }
        Some(Err(e)) => std::panic::resume_unwind(e.into_panic()),
        None => {}
    }
}

async fn read_blob(
    engine: &Engine,
    blob: &BlobRecord,
    places: &[usize],
    whole: bool,
) -> Result<Vec<ApiDeadLetter>, UnreachableAccount> {
    let all = |fault: &DeadLetterFault| Ok(places.iter().map(|place| faulty(blob, *place, fault)).collect());
    let body = match engine.read_blob(blob).await {
        Ok(body) => body,
        Err(e) => match DeadLetterFault::of_error(&e).filter(|fault| fault.fault != BlobFault::NoAccount) {
            Some(fault) => return all(&fault),
            None => {
                let detail = e.to_string();
                let unread = |place: &usize| unread(blob, *place, &detail);
                return Err(UnreachableAccount {
                    account: blob.account.clone(),
                    entries: places.iter().map(unread).collect(),
                    detail,
                });
            }
        },
    };
    let letters = match dead_letters_of(blob, &body) {
        Ok(letters) => letters,
        Err(fault) => return all(&fault),
    };
    let entry = |place: &usize| match check_letter(letters[*place], blob.marks[*place]) {
        Ok(()) => {
            let mut entry = known(blob, *place);
            entry.tell(letters[*place], whole);
            // The decision follows the last attempt; the archive knows only when the blob was written.
            if let Some(decided) = &entry.last_delivery_attempt_time {
                entry.dead_lettered_time.clone_from(decided);
            }
            entry
        }
        Err(fault) => faulty(blob, *place, &fault),
    };
    Ok(places.iter().map(entry).collect())
}

/// An entry with what the archive knows about a dead letter.
fn known(blob: &BlobRecord, place: usize) -> ApiDeadLetter {
    let mark = blob.marks[place];
    let id = DeadLetterId {
        blob: blob.id,
        place: place as u32,
    };
    ApiDeadLetter {
        id: DeadLetterName::Written(id).to_string(),
        state: "written",
        topic: blob.topic_name.clone(),
        subscription: blob.subscription_name.clone(),
        subscription_id: blob.subscription.0,
        reason: mark.reason.name(),
        dead_lettered_time: blob.written.to_string(),
        blob: Some(DeadLetterBlobPath {
            account: blob.account.clone(),
            container: blob.container.clone(),
            path: blob.path.clone(),
            letters: None,
        }),
        replays: Some(mark.replays),
        ..ApiDeadLetter::default()
    }
}

/// An entry for a dead letter whose account does not answer at the moment.
fn unread(blob: &BlobRecord, place: usize, detail: &str) -> ApiDeadLetter {
    ApiDeadLetter {
        trouble: Some(detail.to_owned()),
        ..known(blob, place)
    }
}

/// An entry for a dead letter that the archive lists but the blob does not hold.
fn faulty(blob: &BlobRecord, place: usize, fault: &DeadLetterFault) -> ApiDeadLetter {
    let mut entry = known(blob, place);
    entry.state = fault_name(fault.fault);
    entry.missing = fault.fault == BlobFault::Missing;
    entry.trouble = Some(fault.reason.clone());
    if let Some(place) = &mut entry.blob {
        place.letters = Some(blob.marks.len());
    }
    entry
}

pub fn fault_name(fault: BlobFault) -> &'static str {
    match fault {
        BlobFault::Missing => "missing",
        BlobFault::Damaged => "damaged",
        BlobFault::NoAccount => "noAccount",
    }
}

/// Time limit of a summary for reading blobs. Dead letters in blobs that are not read by then are
/// counted as unchecked.
const CHECK_PATIENCE: Duration = Duration::from_secs(5);
/// Blobs that a summary reads at most.
const CHECKED_MAX: usize = 1000;

/// Dead letters of one subscription that the archive lists but that cannot be read.
#[derive(Default)]
pub struct UnreadableTally {
    pub missing: u64,
    pub damaged: u64,
    /// Not read: the account does not answer, or there are too many blobs for one summary.
    pub unchecked: u64,
    pub trouble: Option<String>,
}

impl UnreadableTally {
    fn add(&mut self, entries: &[ApiDeadLetter]) {
        for entry in entries {
            match entry.state {
                "missing" => self.missing += 1,
                "damaged" => self.damaged += 1,
                _ if entry.trouble.is_some() => {
                    self.unchecked += 1;
                    self.trouble = self.trouble.take().or_else(|| entry.trouble.clone());
                }
                _ => {}
            }
        }
    }
}

/// Reads the blobs of all subscriptions, the newest last, and counts the dead letters that are
/// missing, damaged or unchecked.
pub async fn check_blobs(
    engine: &Arc<Engine>,
    wall: &dyn Clock,
) -> Result<BTreeMap<SubscriptionId, UnreadableTally>, Problem> {
    let mut found: BTreeMap<SubscriptionId, UnreadableTally> = BTreeMap::new();
    let deadline = wall.now() + CHECK_PATIENCE;
    let all = ArchivedDeadLetterFilter::default();
    let (mut after, mut checked) = (None, 0);
    loop {
        let blobs = engine
            .letter_blobs(&all, after, RECORDS)
            .await
            .map_err(store_unavailable)?;
        let Some(last) = blobs.last() else {
            return Ok(found);
        };
        after = Some(last.id);
        let chosen: Vec<SelectedBlobIndexes> = blobs
            .into_iter()
            .map(|blob| {
                let marks = blob.marks.iter().enumerate();
                let places = marks.filter(|(_, mark)| !mark.purged).map(|(place, _)| place);
                let places = places.collect();
                (blob, places)
            })
            .collect();
        let sizes: Vec<(SubscriptionId, usize)> = chosen
            .iter()
            .map(|(blob, places)| (blob.subscription, places.len()))
            .collect();
        checked += chosen.len();
        let read = match checked <= CHECKED_MAX && wall.now() < deadline {
            false => None,
            true => tokio::select! {
                biased;
                entries = read_written(engine, chosen) => Some(entries),
                () = wall.sleep_until(deadline) => None,
            },
        };
        let mut entries = read.as_deref();
        for (of, letters) in sizes {
            let tally = found.entry(of).or_default();
            match entries {
                Some(left) => {
                    let (of_blob, rest) = left.split_at(letters.min(left.len()));
                    tally.add(of_blob);
                    entries = Some(rest);
                }
                None => tally.unchecked += letters as u64,
            }
        }
    }
}

impl ApiDeadLetter {
    /// Adds the members of the stored dead letter; the whole dead letter as `event` if `whole`.
    fn tell(&mut self, letter: RawJson<'_>, whole: bool) {
        let text = |name: &str| match letter.get(name) {
            Some(value) if value.kind() == JsonKind::String => value.as_str().map(|text| text.into_owned()),
            Some(value) if value.kind() == JsonKind::Number => Some(value.text().to_owned()),
            _ => None,
        };
        let cloud = letter.get("specversion").is_some();
        let diagnostic = |name: &str| match cloud {
            true => text(&name.to_lowercase()),
            false => text(name),
        };
        self.delivery_attempts = diagnostic("deliveryAttempts").and_then(|text| number(&text));
        self.last_delivery_outcome = diagnostic("lastDeliveryOutcome");
        self.publish_time = diagnostic("publishTime");
        self.last_delivery_attempt_time = diagnostic("lastDeliveryAttemptTime");
        self.event_id = text("id");
        self.event_type = text(if cloud { "type" } else { "eventType" });
        self.subject = text("subject");
        if whole {
            self.event = RawValue::from_string(letter.text().to_owned()).ok();
        }
    }
}

/// Pending dead letters of this node with their keys, and the key to continue from.
type LocalPendingPage = (
    Vec<((SubscriptionId, DeadLetterKey), ApiDeadLetter)>,
    Option<(SubscriptionId, DeadLetterKey)>,
);

/// Lists pending dead letters of this node, up to the limit, and the key to continue from if there
/// are more.
async fn list_waiting(
    engine: &Engine,
    filter: &ArchivedDeadLetterFilter,
    limit: usize,
    from: Option<(SubscriptionId, DeadLetterKey)>,
) -> Result<LocalPendingPage, Problem> {
    let mut value = Vec::new();
    let mut looked_at = 0;
    let asked = |of: SubscriptionId| {
        filter.subscription.is_none_or(|asked| asked == of) && from.is_none_or(|(first, _)| of >= first)
    };
    for waiting in engine
        .log()
        .pending_dead_letters()
        .into_iter()
        .filter(|waiting| asked(waiting.of))
    {
        let of = waiting.of;
        let Some(plan) = engine.dispatcher.outlet(of).and_then(|outlet| outlet.plan()) else {
            continue;
        };
        let begun = from.filter(|(first, _)| *first == of).map(|(_, key)| key);
        let since = filter.since.map(|since| (since, Position(0)));
        let mut after = begun.max(since).and_then(before);
        loop {
            let want = ClaimLimits {
                // Reading one more than the page can hold shows whether there are more.
                events_max: LIMIT_MAX.min(limit - value.len() + 1),
                bytes_max: WAITING_BYTES_MAX,
                overhead: 0,
            };
            let letters = engine
                .log()
                .letters(of, after, Timestamp::MAX, want)
                .await
                .map_err(store_unavailable)?;
            let Some(last) = letters.last() else {
                break;
            };
            after = Some(last.key());
            for letter in &letters {
                if filter.reason.is_some_and(|reason| reason != letter.reason) {
                    looked_at += 1;
                    continue;
                }
                if value.len() >= limit || looked_at >= LOOKED_AT_MAX {
                    return Ok((value, Some((of, letter.key()))));
                }
                let entry = pending(engine, &plan, letter, false);
                value.push(((of, letter.key()), entry));
            }
            if looked_at >= LOOKED_AT_MAX {
                let (decided, position) = last.key();
                return Ok((value, Some((of, (decided, Position(position.0 + 1))))));
            }
        }
    }
    Ok((value, None))
}

/// An entry for a pending dead letter, as it will be written.
fn pending(engine: &Engine, plan: &DeliveryPlan, letter: &PendingDeadLetter, whole: bool) -> ApiDeadLetter {
    let of = plan.subscription.id;
    let name = DeadLetterName::Pending {
        of,
        key: letter.key(),
    };
    let due = engine.letter_due(of, letter.decided);
    let mut entry = ApiDeadLetter {
        id: name.to_string(),
        state: "pending",
        topic: plan.topic.topic.name.clone(),
        subscription: plan.subscription.name.clone(),
        subscription_id: of.0,
        reason: letter.reason.name(),
        dead_lettered_time: letter.decided.to_string(),
        due: due.map(|due| due.to_string()),
        trouble: engine.dead_letters.trouble(of),
        ..ApiDeadLetter::default()
    };
    let mut text = Vec::new();
    write_letter(&mut text, plan, letter, engine.log().identity());
    let text = String::from_utf8(text).expect("an event is made of strings");
    entry.tell(RawJson::trusted(&text), whole);
    entry
}

/// A single dead letter with its event.
pub async fn show(engine: &Engine, peers: Option<&dyn Peers>, name: &str) -> Result<DeadLetterBody, Problem> {
    let Some(name) = DeadLetterName::parse(name) else {
        return Err(Problem::new(
            404,
            format!("{name:?} is not the id of a dead letter, such as \"12-0\""),
        ));
    };
    let shown = match (name, peers) {
        (DeadLetterName::Written(id), _) => show_written(engine, id).await?,
        (DeadLetterName::Pending { of, key }, None) => show_pending(engine, of, key).await?,
        (DeadLetterName::Pending { of, key }, Some(peers)) => {
            let asked = write_where((of, key));
            let heard: PeerResponses<Option<Box<RawValue>>> = gather(peers, "letter", &asked).await;
            let found = heard.answers.into_iter().find_map(|(_, found)| found);
            if let Some(found) = found {
                return Ok(DeadLetterBody::Elsewhere(found));
            }
            if !heard.missing.is_empty() {
                let nodes = heard.missing.join(", ");
                return Err(Problem::new(503, format!("these nodes do not answer: {nodes}")));
            }
            None
        }
    };
    let shown = shown.ok_or_else(|| no_such_letter(&name))?;
    Ok(DeadLetterBody::Here(Box::new(shown)))
}

/// The dead letter with this key, if it is pending at this node.
pub async fn local_pending_letter(
    server: &Server,
    asked: PendingSortKey,
) -> Result<Option<Box<RawValue>>, String> {
    let (of, key) = read_where(asked);
    let found = show_pending(&server.engine, of, key).await;
    let found = found.map_err(|problem| problem.detail)?;
    let text = found.map(|entry| serde_json::value::to_raw_value(&entry));
    text.transpose().map_err(|e| e.to_string())
}

async fn show_written(engine: &Engine, id: DeadLetterId) -> Result<Option<ApiDeadLetter>, Problem> {
    let place = id.place as usize;
    let blob = engine
        .dead_letters
        .archive
        .get(id.blob)
        .await
        .map_err(store_unavailable)?;
    let is_there = |blob: &BlobRecord| blob.marks.get(place).is_some_and(|mark| !mark.purged);
    let Some(blob) = blob.filter(is_there) else {
        return Ok(None);
    };
    let read = read_blob(engine, &blob, &[place], true).await;
    let mut entries = read.map_err(|gone| Problem::new(503, gone.detail))?;
    let entry = entries.pop();
    match entry
        .as_ref()
        .and_then(|entry| Some((entry, entry.trouble.as_ref()?)))
    {
        Some((entry, reason)) => Err(Problem::new(
            410,
            format!(
                "dead letter {} is {}: {reason} (blob {}); restore the blob, or purge the dead letter",
                entry.id,
                entry.state,
                full_path(&blob)
            ),
        )),
        None => Ok(entry),
    }
}

async fn show_pending(
    engine: &Engine,
    of: SubscriptionId,
    key: DeadLetterKey,
) -> Result<Option<ApiDeadLetter>, Problem> {
    let want = ClaimLimits {
        events_max: 1,
        bytes_max: WAITING_BYTES_MAX,
        overhead: 0,
    };
    let letters = engine
        .log()
        .letters(of, before(key), key.0, want)
        .await
        .map_err(store_unavailable)?;
    let plan = engine.dispatcher.outlet(of).and_then(|outlet| outlet.plan());
    let found = letters.first().filter(|letter| letter.key() == key);
    Ok(found
        .zip(plan)
        .map(|(letter, plan)| pending(engine, &plan, letter, true)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_continuation_is_read_as_it_was_written() {
        let check = |text: &str, expected: Option<DeadLetterContinuation>| {
            assert_eq!(DeadLetterContinuation::parse(text), expected, "{text}");
            if let Some(continuation) = expected {
                assert_eq!(continuation.to_string(), text);
            }
        };
        let first = DeadLetterId {
            blob: BlobId(12),
            place: 4999,
        };
        check("written.12.4999", Some(DeadLetterContinuation::Written(first)));
        let key = (Timestamp::from_nanos(1_700_000_000_123_456_789), Position(42));
        check(
            "pending.7.1700000000123456789.42",
            Some(DeadLetterContinuation::Pending(SubscriptionId(7), key)),
        );
        for bad in [
            "",
            "written",
            "written.1",
            "written.1.2.3",
            "written.-1.2",
            "pending.1.2",
            "12.3",
            "written.1.+2",
        ] {
            check(bad, None);
        }
    }

    #[test]
    fn letters_of_all_nodes_are_in_one_order() {
        let letters = |at: &[PendingSortKey], next: Option<PendingSortKey>| PendingPageReply {
            value: at
                .iter()
                .map(|at| (*at, serde_json::value::to_raw_value(at).unwrap()))
                .collect(),
            next,
        };
        let texts = |found: &[Box<RawValue>]| -> Vec<String> {
            found.iter().map(|text| text.get().to_owned()).collect()
        };
        let answers = || {
            vec![
                letters(&[(1, 10, 5), (2, 1, 1)], None),
                letters(&[(1, 9, 7), (1, 10, 6)], Some((1, 11, 0))),
            ]
        };
        let (found, next) = join(answers(), 10);
        // The second node's page ended before subscription 2.
        assert_eq!(texts(&found), ["[1,9,7]", "[1,10,5]", "[1,10,6]"]);
        assert_eq!(next.map(write_where), Some((1, 11, 0)));
        let (found, next) = join(answers(), 1);
        assert_eq!(texts(&found), ["[1,9,7]"]);
        assert_eq!(next.map(write_where), Some((1, 10, 5)));
        let (found, next) = join(vec![letters(&[(2, 1, 1)], None), letters(&[], None)], 5);
        assert_eq!((texts(&found).len(), next), (1, None));
        assert_eq!(join(answers(), 0).1.map(write_where), Some((1, 9, 7)));
    }
}
