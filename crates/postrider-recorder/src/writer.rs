//! Turns records into frames and index entries.

use crate::frame::{
    CHUNK, DigestConsequence, DigestKind, FRAME_HEAD, FrameWriter, RecordDigest, clip, kind, put_decision,
    put_disposition, schema_code, verdict_code,
};
use crate::index::{
    ChunkActivityEntry, EventIdEntry, FrameCard, IndexNotes, NO_POSITION, bit32, bit64, hash_text,
};
use crate::record::RecordFrame;
use crate::redact;
use postrider_core::envelope::EventEnvelope;
use postrider_core::event::EventSchema;
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::outcome::Outcome;
use postrider_core::subscription::{Destination, Subscription};
use postrider_core::trace::CarriedContext;
use postrider_engine::endpoint;
use postrider_engine::recorder::{
    AcceptedRequest, AttemptedRequest, BlobWritten, EndedDeliveries, EventPlace, EventRun, HeldEndpoint,
    ReleasedEndpoint, ReplayedDeadLetters, RetiredSubscription, RoutingVerdict, TopicAudience,
};
use rustc_hash::FxHashMap;
use std::borrow::Cow;
use std::sync::Arc;

/// The bytes kept of an event's id. A search for a longer id uses its beginning.
pub const ID_MAX: usize = 1024;
/// The bytes kept of an event's other texts.
pub const TEXT_MAX: usize = 512;
/// Dead letters or ends that share a frame.
const PLACES_PER_FRAME: usize = 256;
/// The most distinct routing results that are cached for one topic.
const REMEMBERED_MAX: usize = 4096;

/// A record for the flight recorder.
pub enum RecorderItem {
    Accepted(AcceptedRequest),
    Attempted(AttemptedRequest),
    Ended(EndedDeliveries),
    Retired(RetiredSubscription),
    Held(HeldEndpoint),
    Released(ReleasedEndpoint),
    Blob(BlobWritten),
    Replayed(ReplayedDeadLetters),
}

/// A topic as named in the segment that is being written.
struct NamedSegmentTopic {
    audience: Arc<TopicAudience>,
    name: u32,
    sets: FxHashMap<Box<[SubscriptionId]>, WrittenSet>,
    verdicts: FxHashMap<Box<[RoutingVerdict]>, u32>,
}

#[derive(Clone, Copy, Default)]
struct WrittenSet {
    offset: u32,
    bits: u64,
}

/// Frames of one segment that are not in its file yet, and the data that they refer to.
pub struct FrameBuffer {
    start: i64,
    /// The offset of the first byte of `bytes`.
    base: u64,
    pub bytes: Vec<u8>,
    pub notes: IndexNotes,
    topics: FxHashMap<TopicId, NamedSegmentTopic>,
    subscriptions: FxHashMap<SubscriptionId, (Arc<Subscription>, u32, String)>,
}

impl FrameBuffer {
    pub fn new(start: i64, base: u64) -> FrameBuffer {
        FrameBuffer {
            start,
            base,
            bytes: Vec::with_capacity(64 << 10),
            notes: IndexNotes::default(),
            topics: FxHashMap::default(),
            subscriptions: FxHashMap::default(),
        }
    }

    /// The length of the segment with these frames.
    pub fn end(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    /// Reports that the frames have been written to the file.
    pub fn written(&mut self) {
        self.base = self.end();
        self.bytes.clear();
    }

    fn frame(&mut self, content: impl FnOnce(&mut Vec<u8>)) -> u32 {
        let offset = self.end() as u32;
        let head = self.bytes.len();
        self.bytes.extend_from_slice(&[0; FRAME_HEAD]);
        content(&mut self.bytes);
        let (len, crc) = {
            let content = &self.bytes[head + FRAME_HEAD..];
            (content.len() as u32, crc32fast::hash(content))
        };
        self.bytes[head..head + 4].copy_from_slice(&len.to_le_bytes());
        self.bytes[head + 4..head + 8].copy_from_slice(&crc.to_le_bytes());
        offset
    }

    pub fn add(&mut self, record: &RecorderItem) {
        match record {
            RecorderItem::Accepted(accepted) => self.accepted(accepted),
            RecorderItem::Attempted(attempted) => self.attempted(attempted),
            RecorderItem::Ended(ended) => self.ended(ended),
            RecorderItem::Blob(blob) => self.blob(blob),
            RecorderItem::Replayed(replayed) => self.replayed(replayed),
            RecorderItem::Held(held) => {
                let start = self.start;
                let offset = self.frame(|out| {
                    out.push(kind::HELD);
                    out.text(clip(&held.endpoint, TEXT_MAX));
                    out.push(held.cause.code());
                    out.time(held.at, start);
                    out.time(held.until, start);
                });
                self.notes.facts.push(offset);
            }
            RecorderItem::Released(released) => {
                let start = self.start;
                let offset = self.frame(|out| {
                    out.push(kind::RELEASED);
                    out.text(clip(&released.endpoint, TEXT_MAX));
                    out.time(released.at, start);
                });
                self.notes.facts.push(offset);
            }
            RecorderItem::Retired(retired) => {
                let start = self.start;
                let offset = self.frame(|out| {
                    out.push(kind::RETIRED);
                    out.num(retired.subscription.0);
                    out.time(retired.at, start);
                    out.push(retired.reason.code());
                });
                self.notes.facts.push(offset);
            }
        }
    }

    /// The offset of a subscription's name in this segment.
    fn subscription(&mut self, subscription: &Arc<Subscription>) -> u32 {
        if let Some((known, offset, _)) = self.subscriptions.get(&subscription.id)
            && Arc::ptr_eq(known, subscription)
        {
            return *offset;
        }
        let endpoint = endpoint_of(subscription);
        let predicates: Vec<(RoutingVerdict, String)> = predicates(subscription)
            .map(|verdict| (verdict, verdict.text(subscription)))
            .collect();
        let offset = self.frame(|out| {
            out.push(kind::SUBSCRIPTION);
            out.text(clip(&subscription.name, TEXT_MAX));
            out.opt_text(
                subscription
                    .domain_topic
                    .as_deref()
                    .map(|name| clip(name, TEXT_MAX)),
            );
            out.text(clip(&endpoint, TEXT_MAX));
            out.num(predicates.len() as u64);
            for (verdict, text) in &predicates {
                out.num(verdict_code(*verdict));
                out.text(clip(text, TEXT_MAX));
            }
        });
        self.subscriptions
            .insert(subscription.id, (subscription.clone(), offset, endpoint));
        offset
    }

    fn topic(&mut self, audience: &Arc<TopicAudience>) -> u32 {
        if let Some(known) = self.topics.get(&audience.topic)
            && Arc::ptr_eq(&known.audience, audience)
        {
            return known.name;
        }
        let name = self.frame(|out| {
            out.push(kind::TOPIC);
            out.text(clip(&audience.name, TEXT_MAX));
            out.text(clip(&audience.full_id, 2 * TEXT_MAX));
        });
        let topic = NamedSegmentTopic {
            audience: audience.clone(),
            name,
            sets: FxHashMap::default(),
            verdicts: FxHashMap::default(),
        };
        self.topics.insert(audience.topic, topic);
        name
    }

    fn set(&mut self, audience: &TopicAudience, matched: &[SubscriptionId]) -> WrittenSet {
        if matched.is_empty() {
            return WrittenSet::default();
        }
        if let Some(known) = self.topics.get(&audience.topic).and_then(|t| t.sets.get(matched)) {
            return *known;
        }
        let mut names = Vec::with_capacity(matched.len());
        for id in matched {
            let all = &audience.subscriptions;
            // Routing lists them in the order of their ids.
            let at = all.binary_search_by_key(id, |s| s.id);
            let subscription = at
                .ok()
                .map(|at| &all[at])
                .or_else(|| all.iter().find(|s| s.id == *id));
            names.push(subscription.map_or(0, |s| self.subscription(s)));
        }
        let offset = self.frame(|out| {
            out.push(kind::SET);
            out.num(matched.len() as u64);
            for (id, name) in matched.iter().zip(&names) {
                out.num(id.0);
                out.num(u64::from(*name));
            }
        });
        let set = WrittenSet {
            offset,
            bits: matched.iter().fold(0, |bits, id| bits | bit64(id.0)),
        };
        self.notes.subscriptions.extend(matched.iter().map(|id| id.0));
        if let Some(topic) = self.topics.get_mut(&audience.topic) {
            if topic.sets.len() >= REMEMBERED_MAX {
                topic.sets.clear();
            }
            topic.sets.insert(matched.into(), set);
        }
        set
    }

    fn verdicts(&mut self, audience: &TopicAudience, verdicts: &[RoutingVerdict]) -> u32 {
        if verdicts.iter().all(|verdict| *verdict == RoutingVerdict::Matched) {
            return 0;
        }
        if let Some(known) = self
            .topics
            .get(&audience.topic)
            .and_then(|t| t.verdicts.get(verdicts))
        {
            return *known;
        }
        let mut refused = Vec::new();
        for (subscription, verdict) in audience.subscriptions.iter().zip(verdicts) {
            if *verdict != RoutingVerdict::Matched {
                refused.push((subscription.id.0, self.subscription(subscription), *verdict));
            }
        }
        let offset = self.frame(|out| {
            out.push(kind::VERDICTS);
            out.num(refused.len() as u64);
            for (id, name, verdict) in refused {
                out.num(id);
                out.num(u64::from(name));
                out.num(verdict_code(verdict));
            }
        });
        if let Some(topic) = self.topics.get_mut(&audience.topic) {
            if topic.verdicts.len() >= REMEMBERED_MAX {
                topic.verdicts.clear();
            }
            topic.verdicts.insert(verdicts.into(), offset);
        }
        offset
    }

    fn accepted(&mut self, accepted: &AcceptedRequest) {
        let AcceptedRequest {
            first,
            batch,
            audience,
            verdicts,
        } = accepted;
        let start = self.start;
        let topic_name = self.topic(audience);
        let count = batch.events.len();
        for chunk in (0..count).step_by(CHUNK as usize) {
            let events = chunk..count.min(chunk + CHUNK as usize);
            let mut card = FrameCard {
                accepted: batch.received.nanos(),
                topic: audience.topic.0,
                position: first.map_or(NO_POSITION, |first| first.0 + chunk as u64),
                events: events.len() as u32,
                ..FrameCard::default()
            };
            // Frames that this one refers to are written first.
            let mut refers = [(WrittenSet::default(), 0u32); CHUNK as usize];
            for (slot, index) in refers.iter_mut().zip(events.clone()) {
                let set = self.set(audience, batch.matched(index));
                let list = verdicts.of_event.get(index);
                let list = list.and_then(|list| verdicts.lists.get(*list as usize));
                let verdicts = list.map_or(0, |list| self.verdicts(audience, list));
                card.subscriptions |= set.bits;
                card.deliveries += batch.matched(index).len() as u32;
                *slot = (set, verdicts);
            }
            let mut ids = std::mem::take(&mut self.notes.ids);
            let ids_from = ids.len();
            let offset = self.frame(|out| {
                out.push(kind::ACCEPTED);
                out.num(audience.topic.0);
                out.num(u64::from(topic_name));
                out.num(first.map_or(0, |first| first.0.saturating_add(1)));
                out.num(chunk as u64);
                out.time(batch.received, start);
                out.push(schema_code(batch.schema));
                out.num(u64::from(batch.replay));
                out.text(clip(&batch.publisher, TEXT_MAX));
                let shared = batch.trace.as_deref().and_then(CarriedContext::of_request);
                let shared = shared.map(|carried| carried.context);
                out.opt_text(shared.map(|context| context.to_string()).as_deref());
                out.num(events.len() as u64);
                for (index, (set, verdicts)) in events.zip(&refers) {
                    let text = EventText::read(accepted, index);
                    let id = clip(&text.id, ID_MAX);
                    let event_type = clip(&text.event_type, TEXT_MAX);
                    ids.push(EventIdEntry {
                        hash: hash_text(id),
                        offset: 0,
                    });
                    card.types |= bit32(hash_text(event_type));
                    out.text(id);
                    out.text(event_type);
                    out.text(clip(&text.subject, TEXT_MAX));
                    out.opt_text(text.source.as_deref().map(|source| clip(source, TEXT_MAX)));
                    out.opt_text(text.domain_topic.as_deref().map(|name| clip(name, TEXT_MAX)));
                    out.num(u64::from(batch.events[index].object.len));
                    out.num(u64::from(set.offset));
                    out.num(batch.matched(index).len() as u64);
                    out.num(u64::from(*verdicts));
                    let own = CarriedContext::of_event(batch, index).map(|carried| carried.context);
                    let own = own.filter(|context| Some(*context) != shared);
                    out.opt_text(own.map(|context| context.to_string()).as_deref());
                }
            });
            for id in &mut ids[ids_from..] {
                id.offset = offset;
            }
            self.notes.ids = ids;
            card.offset = offset;
            if first.is_some() {
                self.notes.places.push(ChunkActivityEntry {
                    position: card.position,
                    offset,
                    digest: RecordDigest::new(DigestKind::Accepted, None, DigestConsequence::Nothing, 0),
                    mask: mask(0, card.events),
                });
            }
            self.notes.cards.push(card);
        }
    }

    fn attempted(&mut self, attempted: &AttemptedRequest) {
        let start = self.start;
        let name = self.subscription(&attempted.subscription);
        let id = attempted.subscription.id.0;
        let same = self
            .subscriptions
            .get(&attempted.subscription.id)
            .is_some_and(|(_, _, endpoint)| **endpoint == *attempted.endpoint);
        let max = match attempted.outcome {
            Outcome::Success => redact::SNIPPET_OF_SUCCESS_MAX,
            _ => redact::SNIPPET_MAX,
        };
        let answer = attempted.answer.as_ref().filter(|answer| !answer.body.is_empty());
        let snippet = answer.map(|answer| redact::snippet(&answer.body, max));
        let content_type = attempted
            .answer
            .as_ref()
            .and_then(|answer| answer.content_type.as_ref());
        let content_type = content_type.map(|value| String::from_utf8_lossy(value.as_bytes()));
        let failure = attempted.failure.as_deref().map(redact::mask);
        let offset = self.frame(|out| {
            out.push(kind::ATTEMPTED);
            out.num(id);
            out.num(u64::from(name));
            out.text(if same {
                ""
            } else {
                clip(&attempted.endpoint, TEXT_MAX)
            });
            out.time(attempted.begun, start);
            out.span(attempted.ended.since(attempted.begun));
            out.push(attempted.outcome.code());
            out.num(u64::from(attempted.status.unwrap_or(0)));
            match attempted.timings {
                None => out.push(0),
                Some(timings) => {
                    out.push(1);
                    out.span(timings.connect);
                    out.span(timings.first_byte);
                    out.span(timings.total);
                }
            }
            out.opt_text(content_type.as_deref().map(|text| clip(text, 128)));
            out.opt_text(snippet.as_ref().map(|(text, _)| text.as_str()));
            out.push(u8::from(snippet.as_ref().is_some_and(|(_, more)| *more)));
            out.opt_text(failure.as_deref().map(|text| clip(text, TEXT_MAX)));
            out.num(attempted.runs.len() as u64);
            for run in &attempted.runs {
                out.num(run.start.first.0);
                out.num(u64::from(run.start.index));
                out.num(u64::from(run.count));
                out.num(u64::from(run.number));
                out.time(run.since, start);
                put_decision(out, run.decision, start);
            }
        });
        note_runs(
            &mut self.notes.places,
            &attempted.runs,
            offset,
            attempted.outcome,
            id,
        );
    }

    fn ended(&mut self, ended: &EndedDeliveries) {
        let start = self.start;
        for events in ended.events.chunks(PLACES_PER_FRAME) {
            let offset = self.frame(|out| {
                out.push(kind::ENDED);
                out.num(ended.subscription.0);
                out.time(ended.at, start);
                put_disposition(out, ended.disposition);
                put_places(out, events);
            });
            let digest = RecordDigest::new(
                DigestKind::Ended,
                None,
                ended.disposition.into(),
                ended.subscription.0,
            );
            note_places(&mut self.notes.places, events, offset, digest);
        }
    }

    fn blob(&mut self, written: &BlobWritten) {
        for letters in written.letters.chunks(PLACES_PER_FRAME) {
            let offset = self.frame(|out| {
                out.push(kind::BLOB);
                out.num(written.subscription.0);
                out.text(clip(&written.blob.account, TEXT_MAX));
                out.text(clip(&written.blob.container, TEXT_MAX));
                out.text(clip(&written.blob.path, 2 * TEXT_MAX));
                put_places(out, letters);
            });
            let digest = RecordDigest::new(
                DigestKind::Blob,
                None,
                DigestConsequence::Nothing,
                written.subscription.0,
            );
            note_places(&mut self.notes.places, letters, offset, digest);
        }
    }

    fn replayed(&mut self, replayed: &ReplayedDeadLetters) {
        let offset = self.frame(|out| {
            out.push(kind::REPLAYED);
            out.num(replayed.subscription.0);
            out.text(clip(&replayed.blob.account, TEXT_MAX));
            out.text(clip(&replayed.blob.container, TEXT_MAX));
            out.text(clip(&replayed.blob.path, 2 * TEXT_MAX));
            out.num(replayed.first.0);
            out.num(u64::from(replayed.count));
        });
        let digest = RecordDigest::new(
            DigestKind::Replayed,
            None,
            DigestConsequence::Nothing,
            replayed.subscription.0,
        );
        let start = EventPlace {
            first: replayed.first,
            index: 0,
        };
        note_run(&mut self.notes.places, start, replayed.count, offset, digest);
    }
}

fn put_places(out: &mut Vec<u8>, places: &[EventPlace]) {
    out.num(places.len() as u64);
    for place in places {
        out.num(place.first.0);
        out.num(u64::from(place.index));
    }
}

fn mask(from: u32, count: u32) -> u32 {
    let ones = if count >= 32 { u32::MAX } else { (1 << count) - 1 };
    ones << from
}

/// The position of the chunk that contains an event, and the event's index in it.
pub fn chunk_of(event: EventPlace) -> (u64, u32) {
    let within = event.index % CHUNK;
    (event.first.0 + u64::from(event.index - within), within)
}

/// Extends an entry that the same frame has just made, or makes one.
fn note(places: &mut Vec<ChunkActivityEntry>, entry: ChunkActivityEntry) {
    // The frame's own entries are the last ones; there are few per frame.
    let own = places
        .iter_mut()
        .rev()
        .take_while(|known| known.offset == entry.offset);
    for known in own.take(8) {
        if known.position == entry.position && known.digest == entry.digest {
            known.mask |= entry.mask;
            return;
        }
    }
    places.push(entry);
}

fn note_run(
    places: &mut Vec<ChunkActivityEntry>,
    start: EventPlace,
    count: u32,
    offset: u32,
    digest: RecordDigest,
) {
    let mut at = start;
    let mut left = count;
    while left > 0 {
        let (position, within) = chunk_of(at);
        let here = left.min(CHUNK - within);
        let entry = ChunkActivityEntry {
            position,
            offset,
            digest,
            mask: mask(within, here),
        };
        note(places, entry);
        at.index += here;
        left -= here;
    }
}

fn note_runs(
    places: &mut Vec<ChunkActivityEntry>,
    runs: &[EventRun],
    offset: u32,
    outcome: Outcome,
    subscription: u64,
) {
    for run in runs {
        let digest = RecordDigest::new(
            DigestKind::Attempted,
            Some(outcome),
            run.decision.into(),
            subscription,
        );
        note_run(places, run.start, run.count, offset, digest);
    }
}

fn note_places(
    places: &mut Vec<ChunkActivityEntry>,
    events: &[EventPlace],
    offset: u32,
    digest: RecordDigest,
) {
    for event in events {
        note_run(places, *event, 1, offset, digest);
    }
}

/// The index entries of a frame, derived from the frame alone: for segments whose index was lost.
/// `sets` are those of earlier frames.
pub fn notes_of(
    frame: &RecordFrame<'_>,
    offset: u32,
    sets: &mut FxHashMap<u32, u64>,
    notes: &mut IndexNotes,
) {
    match frame {
        RecordFrame::Topic(_) | RecordFrame::Subscription(_) | RecordFrame::Verdicts(_) => {}
        RecordFrame::Set(members) => {
            sets.insert(offset, members.iter().fold(0, |bits, (id, _)| bits | bit64(*id)));
            notes.subscriptions.extend(members.iter().map(|(id, _)| *id));
        }
        RecordFrame::Accepted(accepted) => {
            let mut card = FrameCard {
                offset,
                accepted: accepted.accepted.nanos(),
                topic: accepted.topic,
                position: accepted
                    .first
                    .map_or(NO_POSITION, |first| first.0 + u64::from(accepted.index)),
                events: accepted.events.len() as u32,
                ..FrameCard::default()
            };
            for event in &accepted.events {
                card.deliveries += event.matched;
                card.subscriptions |= sets.get(&event.set).copied().unwrap_or(0);
                card.types |= bit32(hash_text(event.event_type));
                notes.ids.push(EventIdEntry {
                    hash: hash_text(event.id),
                    offset,
                });
            }
            if accepted.first.is_some() {
                notes.places.push(ChunkActivityEntry {
                    position: card.position,
                    offset,
                    digest: RecordDigest::new(DigestKind::Accepted, None, DigestConsequence::Nothing, 0),
                    mask: mask(0, card.events),
                });
            }
            notes.cards.push(card);
        }
        RecordFrame::Attempted(attempted) => note_runs(
            &mut notes.places,
            &attempted.runs,
            offset,
            attempted.outcome,
            attempted.subscription,
        ),
        RecordFrame::Ended(ended) => {
            let digest = RecordDigest::new(
                DigestKind::Ended,
                None,
                ended.disposition.into(),
                ended.subscription,
            );
            note_places(&mut notes.places, &ended.events, offset, digest);
        }
        RecordFrame::Blob(blob) => {
            let digest = RecordDigest::new(
                DigestKind::Blob,
                None,
                DigestConsequence::Nothing,
                blob.subscription,
            );
            note_places(&mut notes.places, &blob.letters, offset, digest);
        }
        RecordFrame::Replayed(replayed) => {
            let digest = RecordDigest::new(
                DigestKind::Replayed,
                None,
                DigestConsequence::Nothing,
                replayed.subscription,
            );
            let start = EventPlace {
                first: replayed.first,
                index: 0,
            };
            note_run(&mut notes.places, start, replayed.count, offset, digest);
        }
        RecordFrame::Held { .. } | RecordFrame::Released { .. } | RecordFrame::Retired { .. } => {
            notes.facts.push(offset)
        }
    }
}

/// The texts that identify an event for people.
pub struct EventText<'a> {
    pub id: Cow<'a, str>,
    pub event_type: Cow<'a, str>,
    pub subject: Cow<'a, str>,
    pub source: Option<Cow<'a, str>>,
    pub domain_topic: Option<Cow<'a, str>>,
}

impl<'a> EventText<'a> {
    pub fn read(accepted: &'a AcceptedRequest, index: usize) -> EventText<'a> {
        let AcceptedRequest { batch, audience, .. } = accepted;
        let object = RawJson::trusted(batch.object(index));
        let envelope = EventEnvelope::read(batch.schema, object, audience.mapping.as_ref());
        let text = |field: Option<postrider_core::envelope::EnvelopeField<'a>>| {
            field.and_then(|field| field.scalar_text()).unwrap_or_default()
        };
        let topic = || envelope.topic.and_then(RawJson::as_str);
        let domain_topic = || {
            let mapped = audience
                .mapping
                .as_ref()
                .and_then(|m| m.topic.default_value.as_deref());
            let found = topic().or(mapped.map(Cow::Borrowed))?;
            // Either `<domain id>/topics/<name>` or the name alone; a name has no slash.
            Some(match found {
                Cow::Borrowed(found) => Cow::Borrowed(found.rsplit('/').next().unwrap_or(found)),
                Cow::Owned(found) => Cow::Owned(found.rsplit('/').next().unwrap_or(&found).to_owned()),
            })
        };
        EventText {
            id: text(envelope.id_field()),
            event_type: text(envelope.event_type_field()),
            subject: text(envelope.subject_field()),
            source: if batch.schema == EventSchema::CloudEvent {
                topic()
            } else {
                None
            },
            domain_topic: if audience.domain { domain_topic() } else { None },
        }
    }
}

/// The endpoint without its query; empty for destinations that are not reached over HTTP.
fn endpoint_of(subscription: &Subscription) -> String {
    let url = match &subscription.destination {
        Destination::WebHook(hook) => hook.url.expose(),
        Destination::EventGrid { url, .. } => url.as_str(),
        _ => return String::new(),
    };
    url.parse::<http::Uri>()
        .map(|url| endpoint::name(&url))
        .unwrap_or_default()
}

/// All verdicts that this subscription may give on an event that it does not match.
fn predicates(subscription: &Subscription) -> impl Iterator<Item = RoutingVerdict> {
    let filter = &subscription.filter;
    let fixed = [
        (RoutingVerdict::Expired, subscription.expires.is_some()),
        (RoutingVerdict::DomainTopic, subscription.domain_topic.is_some()),
        (RoutingVerdict::EventType, filter.included_event_types.is_some()),
        (
            RoutingVerdict::SubjectBeginsWith,
            filter.subject_begins_with.is_some(),
        ),
        (
            RoutingVerdict::SubjectEndsWith,
            filter.subject_ends_with.is_some(),
        ),
    ];
    let advanced = (0..filter.advanced.len()).map(|index| RoutingVerdict::Advanced(index as u16));
    fixed
        .into_iter()
        .filter_map(|(verdict, set)| set.then_some(verdict))
        .chain(advanced)
}
