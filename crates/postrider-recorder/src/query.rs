//! Queries for an event by id, and for events by their properties. Each does a bounded amount of
//! work.

use crate::frame::{CHUNK, DigestConsequence, DigestKind, clip};
use crate::index::{ChunkActivityEntry, FrameCard, IndexCache, NO_POSITION, bit32, bit64, hash_text};
use crate::lifecycle_facts::LifecycleFacts;
use crate::record::{AcceptedFrame, EventFrame, RecordFrame};
use crate::segment::{RecordFrameReader, RecorderSegment};
use crate::writer::{ID_MAX, TEXT_MAX};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::time::Timestamp;
use postrider_engine::recorder::{
    AnswerSnippet, AttemptDecision, AttemptHistory, DeadLetterBlobLocation, DeliveryDisposition,
    DeliveryHistory, DeliveryLine, DeliveryState, EventHistory, EventLine, EventPage, EventPlace, EventQuery,
    EventState, NextAttempt, NextAttemptReason, QueryWork, RecordedDeliveryEnd, RoutingVerdict, SearchCursor,
    SubscriptionFate, SubscriptionHistory, UnmetPredicate,
};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::time::Duration;

/// The most that a page may cost, in units of about ten nanoseconds on a small machine: forty
/// milliseconds. Work is counted instead of timed, so that the same query over the same records
/// always gives the same pages.
pub const BUDGET: u64 = 4_000_000;
/// The most histories for one id, the latest ones.
const STORIES_MAX: usize = 32;
/// The most frames that are read for the events of one chunk. Beyond it the history is incomplete,
/// with the earliest records.
const FRAMES_MAX: usize = 20_000;
pub const LIMIT_MAX: usize = 1000;
/// The greatest difference between the clocks of nodes that is tolerated.
const CLOCKS_DIFFER: Duration = Duration::from_secs(600);

pub fn cost(work: &QueryWork) -> u64 {
    work.cards * 3 + work.lookups * 40 + work.blocks * 100 + work.frames * 300
}

/// A subscription as a segment names it.
#[derive(Default)]
struct NamedSubscription {
    name: String,
    domain_topic: Option<String>,
    endpoint: String,
    predicates: Vec<(RoutingVerdict, String)>,
}

/// The subscriptions of a set, each with the offset of its name.
type SetMembers = Arc<[(u64, u32)]>;

/// The state of one query.
pub struct QuerySession<'a> {
    /// The latest first.
    segments: Vec<Arc<RecorderSegment>>,
    caches: Vec<IndexCache>,
    facts: &'a LifecycleFacts,
    pub work: QueryWork,
    /// Separate readers for accepted events, names and activity: each reads in its own order.
    accepted: RecordFrameReader,
    named: RecordFrameReader,
    happened: RecordFrameReader,
    names: FxHashMap<(usize, u32), Arc<NamedSubscription>>,
    topics: FxHashMap<(usize, u32), (String, String)>,
    sets: FxHashMap<(usize, u32), SetMembers>,
}

/// A delivery whose history is being assembled.
#[derive(Default)]
struct DeliveryDraft {
    name: Option<Arc<NamedSubscription>>,
    attempts: Vec<AttemptHistory>,
    end: Option<(Timestamp, DeliveryDisposition)>,
    blob: Option<DeadLetterBlobLocation>,
}

impl<'a> QuerySession<'a> {
    pub fn new(mut segments: Vec<Arc<RecorderSegment>>, facts: &'a LifecycleFacts) -> QuerySession<'a> {
        segments.reverse();
        QuerySession {
            caches: segments.iter().map(|_| IndexCache::default()).collect(),
            segments,
            facts,
            work: QueryWork::default(),
            accepted: RecordFrameReader::default(),
            named: RecordFrameReader::default(),
            happened: RecordFrameReader::default(),
            names: FxHashMap::default(),
            topics: FxHashMap::default(),
            sets: FxHashMap::default(),
        }
    }

    pub fn trace(&mut self, id: &str) -> Vec<EventHistory> {
        let id = clip(id, ID_MAX);
        let mut stories = Vec::new();
        for at in 0..self.segments.len() {
            for offset in self.frames_with(at, id) {
                self.with_accepted(at, offset, |session, frame| {
                    let entries = session.entries(at, position(frame), None);
                    for (within, event) in frame.events.iter().enumerate().rev() {
                        if event.id == id && stories.len() < STORIES_MAX {
                            stories.push(session.story(at, frame, within, &entries, true));
                        }
                    }
                });
            }
            if stories.len() >= STORIES_MAX {
                break;
            }
        }
        stories
    }

    /// The event at a place, if its acceptance is recorded.
    pub fn event_at(&mut self, place: EventPlace) -> Option<EventHistory> {
        let (chunk, within) = crate::writer::chunk_of(place);
        for at in 0..self.segments.len() {
            let mut found = Vec::new();
            self.segments[at].index.read().expect("no panic holds it").places(
                chunk,
                &mut self.caches[at],
                &mut self.work,
                &mut found,
            );
            let Some(accepted) = found.iter().find(|entry| entry.digest.is(DigestKind::Accepted)) else {
                continue;
            };
            let mut story = None;
            self.with_accepted(at, accepted.offset, |session, frame| {
                if (within as usize) < frame.events.len() {
                    story = Some(session.story(at, frame, within as usize, &[], false));
                }
            });
            return story;
        }
        None
    }

    pub fn search(&mut self, query: &EventQuery, budget: u64) -> EventPage {
        let mut search = SearchState {
            query,
            attempts: 0,
            limit: query.limit.clamp(1, LIMIT_MAX),
            budget,
            page: EventPage::default(),
        };
        let mut from = query.cursor;
        for at in 0..self.segments.len() {
            let start = self.segments[at].start;
            if from.is_some_and(|cursor| start > cursor.segment) {
                continue;
            }
            let cursor = from.take().filter(|cursor| cursor.segment == start);
            if !self.may_match(at, query) {
                continue;
            }
            let done = match &query.id {
                Some(id) => self.search_id(at, clip(id, ID_MAX), cursor, &mut search),
                None => self.search_cards(at, cursor, &mut search),
            };
            if !done {
                break;
            }
        }
        search.page.work = self.work;
        search.page
    }

    /// Whether the segment may contain matching events.
    fn may_match(&mut self, at: usize, query: &EventQuery) -> bool {
        self.work.cards += 1;
        let index = self.segments[at].index.read().expect("no panic holds it");
        let Some(summary) = index.summary() else {
            return false;
        };
        let Some((first, last)) = summary.accepted else {
            return false;
        };
        query.since.is_none_or(|since| last >= since.nanos())
            && query.until.is_none_or(|until| first < until.nanos())
            && query.topic.is_none_or(|topic| summary.topics.contains(&topic.0))
            && query
                .subscription
                .is_none_or(|id| summary.subscriptions.contains(&id.0))
    }

    /// The frames of a segment that may contain this id, the latest first.
    fn frames_with(&mut self, at: usize, id: &str) -> Vec<u32> {
        let mut offsets = Vec::new();
        let index = self.segments[at].index.read().expect("no panic holds it");
        index.ids(hash_text(id), &mut self.caches[at], &mut self.work, &mut offsets);
        drop(index);
        // An id may occur several times in one frame.
        offsets.dedup();
        offsets
    }

    fn search_id(
        &mut self,
        at: usize,
        id: &str,
        cursor: Option<SearchCursor>,
        search: &mut SearchState<'_>,
    ) -> bool {
        for offset in self.frames_with(at, id) {
            let before = match cursor {
                Some(cursor) if offset > cursor.record => continue,
                Some(cursor) if offset == cursor.record => cursor.event,
                _ => u32::MAX,
            };
            if !search.has_room(&self.work) {
                search.stop(self.segments[at].start, offset, before);
                return false;
            }
            if !self.search_frame(at, offset, before, u32::MAX, None, search) {
                return false;
            }
        }
        true
    }

    /// Searches a segment from its end. False when the page is full or the budget is used up.
    fn search_cards(
        &mut self,
        at: usize,
        cursor: Option<SearchCursor>,
        search: &mut SearchState<'_>,
    ) -> bool {
        let segment = self.segments[at].clone();
        let mut number = segment.index.read().expect("no panic holds it").cards();
        if let Some(cursor) = cursor {
            number = self.cards_up_to(at, number, cursor.record);
        }
        let query = search.query;
        let looks_on = query.state.is_some() || query.outcome.is_some() || query.attempts.is_some();
        while number > 0 {
            number -= 1;
            let card = {
                let index = segment.index.read().expect("no panic holds it");
                index.card(number, &mut self.caches[at], &mut self.work)
            };
            let Some(card) = card else {
                return true;
            };
            let before = match cursor {
                Some(cursor) if cursor.record == card.offset => cursor.event,
                _ => u32::MAX,
            };
            if !search.has_room(&self.work) {
                search.stop(segment.start, card.offset, before);
                return false;
            }
            search.page.note(card.accepted);
            if !search.may_hold(&card) {
                continue;
            }
            let mut entries = None;
            let mut candidates = u32::MAX;
            if looks_on {
                let found = match card.position {
                    NO_POSITION => Vec::new(),
                    position => self.entries(at, position, Some(card.deliveries)),
                };
                candidates = search.candidates(&card, &found, self.facts);
                if candidates == 0 {
                    continue;
                }
                entries = Some(found);
            }
            if !self.search_frame(at, card.offset, before, candidates, entries, search) {
                return false;
            }
        }
        true
    }

    /// The number of a segment's cards up to and including the frame at `offset`.
    fn cards_up_to(&mut self, at: usize, count: u32, offset: u32) -> u32 {
        let index = self.segments[at].index.read().expect("no panic holds it");
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            let card = index.card(middle, &mut self.caches[at], &mut self.work);
            if card.is_some_and(|card| card.offset <= offset) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Searches the events of one frame, the last first, before the one with the number `before`.
    fn search_frame(
        &mut self,
        at: usize,
        offset: u32,
        before: u32,
        candidates: u32,
        entries: Option<Vec<(usize, ChunkActivityEntry)>>,
        search: &mut SearchState<'_>,
    ) -> bool {
        let start = self.segments[at].start;
        let mut go_on = true;
        self.with_accepted(at, offset, |session, frame| {
            search.page.note(frame.accepted.nanos());
            let mut entries = entries;
            for (within, event) in frame.events.iter().enumerate().rev() {
                if within as u32 >= before || candidates & (1 << (within as u32 % 32)) == 0 {
                    continue;
                }
                if !search.wants(frame, event) {
                    continue;
                }
                let deliveries = frame.events.iter().map(|event| event.matched).sum();
                let entries =
                    &*entries.get_or_insert_with(|| session.entries(at, position(frame), Some(deliveries)));
                let story = session.story(at, frame, within, entries, false);
                if !search.takes(&story) {
                    continue;
                }
                let behind = SearchCursor {
                    segment: start,
                    record: offset,
                    event: within as u32,
                };
                search.take(line(story, behind, search.query));
                if search.is_full() || !search.has_room(&session.work) {
                    search.stop(start, offset, within as u32);
                    go_on = false;
                    return;
                }
            }
        });
        go_on
    }

    /// Reads a frame of accepted events. Damaged frames are skipped.
    fn with_accepted(&mut self, at: usize, offset: u32, then: impl FnOnce(&mut Self, &AcceptedFrame<'_>)) {
        let segment = self.segments[at].clone();
        let mut reader = std::mem::take(&mut self.accepted);
        let content = reader.read(&segment, offset, &mut self.work);
        if let Some(RecordFrame::Accepted(frame)) =
            content.and_then(|bytes| RecordFrame::read(bytes, segment.start))
        {
            then(self, &frame);
        }
        self.accepted = reader;
    }

    /// The records about the events of a chunk that was accepted in the segment `home`, in the
    /// order of recording. If the number of deliveries is known, the search stops at the end of the
    /// last one.
    fn entries(
        &mut self,
        home: usize,
        position: u64,
        deliveries: Option<u32>,
    ) -> Vec<(usize, ChunkActivityEntry)> {
        let mut all = Vec::new();
        if position == NO_POSITION {
            return all;
        }
        let mut found = Vec::new();
        let mut ended = 0;
        // An attempt may be recorded a moment before the acceptance, in the previous segment.
        let older = (home + 1 < self.segments.len()).then_some(home + 1);
        let newer = (0..home).rev();
        for at in std::iter::once(home).chain(older).chain(newer) {
            if deliveries.is_some_and(|deliveries| ended >= deliveries) && at < home {
                break;
            }
            let index = self.segments[at].index.read().expect("no panic holds it");
            self.work.cards += 1;
            if at != home && !index.may_have_foreign(position) {
                continue;
            }
            found.clear();
            index.places(position, &mut self.caches[at], &mut self.work, &mut found);
            for entry in &found {
                if entry.digest.is(DigestKind::Accepted) {
                    continue;
                }
                if entry.digest.ends() {
                    ended += entry.mask.count_ones();
                }
                all.push((at, *entry));
            }
        }
        all.sort_by_key(|(at, entry)| (std::cmp::Reverse(*at), entry.offset));
        all
    }

    fn name(&mut self, at: usize, offset: u32) -> Arc<NamedSubscription> {
        if offset == 0 {
            return Arc::default();
        }
        if let Some(known) = self.names.get(&(at, offset)) {
            return known.clone();
        }
        let segment = &self.segments[at];
        let content = self.named.read(segment, offset, &mut self.work);
        let name = match content.and_then(|bytes| RecordFrame::read(bytes, segment.start)) {
            Some(RecordFrame::Subscription(found)) => Arc::new(NamedSubscription {
                name: found.name.to_owned(),
                domain_topic: found.domain_topic.map(str::to_owned),
                endpoint: found.endpoint.to_owned(),
                predicates: found
                    .predicates
                    .iter()
                    .map(|(verdict, text)| (*verdict, (*text).to_owned()))
                    .collect(),
            }),
            _ => Arc::default(),
        };
        self.names.insert((at, offset), name.clone());
        name
    }

    fn topic(&mut self, at: usize, offset: u32) -> (String, String) {
        if let Some(known) = self.topics.get(&(at, offset)) {
            return known.clone();
        }
        let segment = &self.segments[at];
        let content = self.named.read(segment, offset, &mut self.work);
        let topic = match content.and_then(|bytes| RecordFrame::read(bytes, segment.start)) {
            Some(RecordFrame::Topic(found)) => (found.name.to_owned(), found.full_id.to_owned()),
            _ => Default::default(),
        };
        self.topics.insert((at, offset), topic.clone());
        topic
    }

    fn set(&mut self, at: usize, offset: u32) -> SetMembers {
        if offset == 0 {
            return Arc::default();
        }
        if let Some(known) = self.sets.get(&(at, offset)) {
            return known.clone();
        }
        let segment = &self.segments[at];
        let content = self.named.read(segment, offset, &mut self.work);
        let set: SetMembers = match content.and_then(|bytes| RecordFrame::read(bytes, segment.start)) {
            Some(RecordFrame::Set(found)) => found.into(),
            _ => Arc::default(),
        };
        self.sets.insert((at, offset), set.clone());
        set
    }

    fn refused(&mut self, at: usize, offset: u32) -> Vec<(u64, u32, RoutingVerdict)> {
        if offset == 0 {
            return Vec::new();
        }
        let segment = &self.segments[at];
        let content = self.named.read(segment, offset, &mut self.work);
        match content.and_then(|bytes| RecordFrame::read(bytes, segment.start)) {
            Some(RecordFrame::Verdicts(found)) => found,
            _ => Vec::new(),
        }
    }

    /// Assembles the history of one event.
    fn story(
        &mut self,
        home: usize,
        frame: &AcceptedFrame<'_>,
        within: usize,
        entries: &[(usize, ChunkActivityEntry)],
        whole: bool,
    ) -> EventHistory {
        let event = &frame.events[within];
        let place = frame.first.map(|first| EventPlace {
            first,
            index: frame.index + within as u32,
        });
        let mut drafts: Vec<(u64, DeliveryDraft)> = Vec::new();
        for (id, name) in self.set(home, event.set).iter() {
            let name = Some(self.name(home, *name));
            drafts.push((
                *id,
                DeliveryDraft {
                    name,
                    ..DeliveryDraft::default()
                },
            ));
        }
        let replayed_from = place.and_then(|place| self.happen(place, entries, &mut drafts));
        let mut subscriptions: Vec<SubscriptionHistory> = drafts
            .into_iter()
            .map(|(id, draft)| self.delivery(id, draft, frame.accepted))
            .collect();
        let state = EventState::of(subscriptions.iter().filter_map(|one| match &one.fate {
            SubscriptionFate::Matched(delivery) => Some(delivery.state),
            SubscriptionFate::Refused(_) => None,
        }));
        if whole {
            for (id, name, verdict) in self.refused(home, event.verdicts) {
                let name = self.name(home, name);
                let text = name.predicates.iter().find(|(known, _)| *known == verdict);
                subscriptions.push(SubscriptionHistory {
                    id: SubscriptionId(id),
                    name: name.name.clone(),
                    domain_topic: name.domain_topic.clone(),
                    fate: SubscriptionFate::Refused(UnmetPredicate {
                        verdict,
                        text: text.map(|(_, text)| text.clone()).unwrap_or_default(),
                    }),
                });
            }
        }
        let (topic_name, topic_resource) = self.topic(home, frame.topic_name);
        EventHistory {
            id: event.id.to_owned(),
            topic: TopicId(frame.topic),
            topic_name,
            topic_resource,
            domain_topic: event.domain_topic.map(str::to_owned),
            event_type: event.event_type.to_owned(),
            subject: event.subject.to_owned(),
            source: event.source.map(str::to_owned),
            schema: frame.schema,
            accepted: frame.accepted,
            publisher: frame.publisher.to_owned(),
            bytes: event.bytes,
            trace: event.trace.or(frame.trace).map(str::to_owned),
            replay: frame.replay,
            replayed_from,
            place,
            state,
            subscriptions,
        }
    }

    /// Adds the records about an event. Returns the blob it was read from, if it is a replayed dead
    /// letter.
    fn happen(
        &mut self,
        place: EventPlace,
        entries: &[(usize, ChunkActivityEntry)],
        drafts: &mut Vec<(u64, DeliveryDraft)>,
    ) -> Option<DeadLetterBlobLocation> {
        let mut numbers: FxHashMap<u64, usize> = drafts.iter().map(|(id, _)| *id).zip(0..).collect();
        let mut replayed_from = None;
        let bit = 1 << (place.index % CHUNK);
        let own = entries.iter().filter(|(_, entry)| entry.mask & bit != 0);
        for (at, entry) in own.take(FRAMES_MAX) {
            let segment = self.segments[*at].clone();
            let mut reader = std::mem::take(&mut self.happened);
            let content = reader.read(&segment, entry.offset, &mut self.work);
            let mut named = None;
            let mut draft = |id: u64| {
                *numbers.entry(id).or_insert_with(|| {
                    drafts.push((id, DeliveryDraft::default()));
                    drafts.len() - 1
                })
            };
            match content.and_then(|bytes| RecordFrame::read(bytes, segment.start)) {
                Some(RecordFrame::Attempted(attempted)) => {
                    if let Some((number, since, decision)) = attempted.of(place) {
                        let slot = draft(attempted.subscription);
                        named = Some((slot, attempted.subscription_name, attempted.endpoint.is_empty()));
                        let draft = &mut drafts[slot].1;
                        draft.attempts.push(AttemptHistory {
                            number,
                            begun: attempted.begun,
                            ended: attempted.ended,
                            queued: attempted.begun.since(since),
                            endpoint: attempted.endpoint.to_owned(),
                            outcome: attempted.outcome,
                            status: attempted.status,
                            batch: attempted.runs.iter().map(|run| run.count).sum(),
                            timings: attempted.timings,
                            response: attempted.snippet.map(|text| AnswerSnippet {
                                content_type: attempted.content_type.map(str::to_owned),
                                text: text.to_owned(),
                                truncated: attempted.truncated,
                            }),
                            failure: attempted.failure.map(str::to_owned),
                            decision,
                        });
                        let end = match decision {
                            AttemptDecision::Done => Some(DeliveryDisposition::Delivered),
                            AttemptDecision::DeadLetter(reason) => {
                                Some(DeliveryDisposition::DeadLettered(reason))
                            }
                            AttemptDecision::Drop(reason) => Some(DeliveryDisposition::Dropped(reason)),
                            AttemptDecision::Retry { .. } => None,
                        };
                        if let Some(end) = end {
                            draft.end = Some((attempted.ended, end));
                        }
                    }
                }
                Some(RecordFrame::Ended(ended)) if ended.events.contains(&place) => {
                    let slot = draft(ended.subscription);
                    drafts[slot].1.end = Some((ended.at, ended.disposition));
                }
                Some(RecordFrame::Blob(blob)) if blob.letters.contains(&place) => {
                    let slot = draft(blob.subscription);
                    drafts[slot].1.blob = Some(DeadLetterBlobLocation {
                        account: blob.account.to_owned(),
                        container: blob.container.to_owned(),
                        path: blob.path.to_owned(),
                    });
                }
                Some(RecordFrame::Replayed(replayed)) => {
                    replayed_from = Some(DeadLetterBlobLocation {
                        account: replayed.account.to_owned(),
                        container: replayed.container.to_owned(),
                        path: replayed.path.to_owned(),
                    });
                }
                _ => {}
            }
            self.happened = reader;
            if let Some((slot, name, same_endpoint)) = named {
                let name = self.name(*at, name);
                let draft = &mut drafts[slot].1;
                if same_endpoint && let Some(attempt) = draft.attempts.last_mut() {
                    attempt.endpoint.clone_from(&name.endpoint);
                }
                draft.name.get_or_insert(name);
            }
        }
        replayed_from
    }

    /// The records of this node about an event that was accepted at this time, on any node.
    pub fn happened(&mut self, place: EventPlace, accepted: Timestamp) -> Vec<SubscriptionHistory> {
        let (position, _) = crate::writer::chunk_of(place);
        // The clocks of nodes differ.
        let since = (accepted - CLOCKS_DIFFER).nanos();
        let (mut all, mut found) = (Vec::new(), Vec::new());
        for at in 0..self.segments.len() {
            // No record of a segment is newer than the start of the next one.
            if at > 0 && self.segments[at - 1].start < since {
                break;
            }
            self.work.cards += 1;
            let index = self.segments[at].index.read().expect("no panic holds it");
            found.clear();
            index.places(position, &mut self.caches[at], &mut self.work, &mut found);
            let happened = found
                .iter()
                .filter(|entry| !entry.digest.is(DigestKind::Accepted));
            all.extend(happened.map(|entry| (at, *entry)));
        }
        all.sort_by_key(|(at, entry)| (std::cmp::Reverse(*at), entry.offset));
        let mut drafts = Vec::new();
        self.happen(place, &all, &mut drafts);
        drafts
            .into_iter()
            .map(|(id, draft)| self.delivery(id, draft, accepted))
            .collect()
    }

    fn delivery(&self, id: u64, draft: DeliveryDraft, accepted: Timestamp) -> SubscriptionHistory {
        let name = draft.name.unwrap_or_default();
        let retired = self.facts.retired(id).filter(|(at, _)| *at >= accepted);
        let gone = retired.map(|(at, reason)| (at, DeliveryDisposition::Dropped(reason)));
        let end = draft.end.or(gone).map(|(at, disposition)| RecordedDeliveryEnd {
            at,
            disposition,
            blob: draft.blob,
        });
        let last = draft.attempts.last();
        let endpoint = last.map_or(name.endpoint.as_str(), |attempt| attempt.endpoint.as_str());
        let until = end.as_ref().map_or(Timestamp::MAX, |end| end.at);
        let holds = self.facts.holds(endpoint, SubscriptionId(id), accepted, until);
        let held = holds
            .last()
            .filter(|hold| hold.released.is_none() && end.is_none());
        let retry = last.and_then(|attempt| match attempt.decision {
            AttemptDecision::Retry { at, why } => Some((at, why)),
            _ => None,
        });
        let next = match (&end, held, retry) {
            (Some(_), _, _) => None,
            (None, Some(hold), retry) if retry.is_none_or(|(at, _)| at <= hold.until) => Some(NextAttempt {
                at: hold.until,
                why: NextAttemptReason::Probation { cause: hold.cause },
            }),
            (None, _, Some((at, why))) => Some(NextAttempt {
                at,
                why: NextAttemptReason::Rule(why),
            }),
            (None, _, None) => None,
        };
        let state = match (&end, held) {
            (Some(end), _) => end.disposition.state(),
            (None, Some(_)) => DeliveryState::Held,
            (None, None) if last.is_some() => DeliveryState::Retrying,
            (None, None) => DeliveryState::Pending,
        };
        SubscriptionHistory {
            id: SubscriptionId(id),
            name: name.name.clone(),
            domain_topic: name.domain_topic.clone(),
            fate: SubscriptionFate::Matched(DeliveryHistory {
                state,
                attempts: draft.attempts,
                next,
                end,
                holds,
            }),
        }
    }
}

fn position(frame: &AcceptedFrame<'_>) -> u64 {
    frame
        .first
        .map_or(NO_POSITION, |first| first.0 + u64::from(frame.index))
}

/// The state of a search.
struct SearchState<'q> {
    query: &'q EventQuery,
    limit: usize,
    budget: u64,
    page: EventPage,
    /// The attempts on the page, where attempts are listed.
    attempts: usize,
}

/// Extends the range of times that were searched.
trait NoteSearched {
    fn note(&mut self, accepted: i64);
}

impl NoteSearched for EventPage {
    fn note(&mut self, accepted: i64) {
        let at = Timestamp::from_nanos(accepted);
        self.searched = Some(
            self.searched
                .map_or((at, at), |(from, to)| (from.min(at), to.max(at))),
        );
    }
}

impl SearchState<'_> {
    fn has_room(&self, work: &QueryWork) -> bool {
        // At least one event is looked at: otherwise a search might never end.
        cost(work) < self.budget || self.page.searched.is_none()
    }

    fn take(&mut self, line: EventLine) {
        self.attempts += line
            .subscriptions
            .iter()
            .map(|one| one.attempts.len())
            .sum::<usize>();
        self.page.events.push(line);
    }

    /// A page of attempts may exceed the limit by the attempts of its last event.
    fn is_full(&self) -> bool {
        self.page.events.len() >= self.limit || self.attempts >= self.limit
    }

    fn stop(&mut self, segment: i64, record: u32, event: u32) {
        self.page.cursor = Some(SearchCursor {
            segment,
            record,
            event,
        });
    }

    /// Whether a frame may contain matching events, by its card.
    fn may_hold(&self, card: &FrameCard) -> bool {
        let query = self.query;
        query.topic.is_none_or(|topic| card.topic == topic.0)
            && query.since.is_none_or(|since| card.accepted >= since.nanos())
            && query.until.is_none_or(|until| card.accepted < until.nanos())
            && query
                .subscription
                .is_none_or(|id| card.subscriptions & bit64(id.0) != 0)
            && query
                .event_type
                .as_ref()
                .is_none_or(|wanted| card.types & bit32(hash_text(clip(wanted, TEXT_MAX))) != 0)
    }

    /// The events of a chunk that may have the requested state or outcome.
    fn candidates(
        &self,
        card: &FrameCard,
        entries: &[(usize, ChunkActivityEntry)],
        facts: &LifecycleFacts,
    ) -> u32 {
        let query = self.query;
        let with = |wanted: &dyn Fn(&ChunkActivityEntry) -> bool| {
            let of = |entry: &ChunkActivityEntry| {
                query
                    .subscription
                    .is_none_or(|id| entry.digest.may_be_about(id.0))
            };
            entries
                .iter()
                .filter(|(_, entry)| of(entry) && wanted(entry))
                .fold(0, |mask, (_, entry)| mask | entry.mask)
        };
        let mut candidates = u32::MAX;
        if let Some(outcome) = query.outcome {
            candidates &= with(&|entry| entry.digest.has_outcome(outcome));
        }
        if let Some(wanted) = query.attempts {
            let takes = |outcome: Option<Outcome>| outcome.is_none_or(|outcome| wanted.takes(outcome));
            candidates &=
                with(&|entry| entry.digest.is(DigestKind::Attempted) && takes(entry.digest.outcome()));
        }
        let follows = |follows| with(&|entry| entry.digest.follows(follows));
        let ended: u32 = entries
            .iter()
            .filter(|(_, entry)| entry.digest.ends())
            .map(|(_, entry)| entry.mask.count_ones())
            .sum();
        candidates
            & match query.state {
                None | Some(EventState::Mixed) => u32::MAX,
                Some(EventState::Unmatched) if card.deliveries >= card.events && card.events == 1 => 0,
                Some(EventState::Unmatched) => u32::MAX,
                Some(EventState::All(state)) => match state {
                    DeliveryState::Delivered => follows(DigestConsequence::Done),
                    DeliveryState::Retrying => follows(DigestConsequence::Retry),
                    DeliveryState::DeadLettered => follows(DigestConsequence::DeadLetter),
                    DeliveryState::Dropped if facts.has_no_retirements() => follows(DigestConsequence::Drop),
                    DeliveryState::Dropped => u32::MAX,
                    DeliveryState::Pending | DeliveryState::Held if ended >= card.deliveries => 0,
                    DeliveryState::Pending | DeliveryState::Held => u32::MAX,
                },
            }
    }

    /// Whether an event itself matches the query.
    fn wants(&self, frame: &AcceptedFrame<'_>, event: &EventFrame<'_>) -> bool {
        let query = self.query;
        query.id.as_ref().is_none_or(|id| clip(id, ID_MAX) == event.id)
            && query.topic.is_none_or(|topic| topic.0 == frame.topic)
            && query.since.is_none_or(|since| frame.accepted >= since)
            && query.until.is_none_or(|until| frame.accepted < until)
            && query
                .event_type
                .as_ref()
                .is_none_or(|wanted| clip(wanted, TEXT_MAX) == event.event_type)
            && query
                .subject
                .as_ref()
                .is_none_or(|prefix| event.subject.starts_with(clip(prefix, TEXT_MAX)))
            && (query.subscription.is_none() || event.matched > 0)
    }

    /// Whether an event's history matches the query.
    fn takes(&self, story: &EventHistory) -> bool {
        let query = self.query;
        let deliveries = || {
            story.subscriptions.iter().filter_map(|one| match &one.fate {
                SubscriptionFate::Matched(delivery) if query.subscription.is_none_or(|id| id == one.id) => {
                    Some(delivery)
                }
                _ => None,
            })
        };
        let state = query.state.is_none_or(|wanted| {
            let some = deliveries().any(|delivery| EventState::All(delivery.state) == wanted);
            some || (query.subscription.is_none() && story.state == wanted)
        });
        let outcome = query.outcome.is_none_or(|wanted| {
            deliveries().any(|delivery| delivery.attempts.iter().any(|attempt| attempt.outcome == wanted))
        });
        let attempts = query.attempts.is_none_or(|wanted| {
            deliveries().any(|delivery| delivery.attempts.iter().any(|one| wanted.takes(one.outcome)))
        });
        state && outcome && attempts && (query.subscription.is_none() || deliveries().next().is_some())
    }
}

fn line(story: EventHistory, behind: SearchCursor, query: &EventQuery) -> EventLine {
    let listed = |of: SubscriptionId, attempts: Vec<AttemptHistory>| match query.attempts {
        Some(wanted) if query.subscription.is_none_or(|id| id == of) => {
            let wanted = attempts.into_iter().filter(|one| wanted.takes(one.outcome));
            wanted.collect()
        }
        _ => Vec::new(),
    };
    let mut attempts = 0;
    let subscriptions = story
        .subscriptions
        .into_iter()
        .filter_map(|one| match one.fate {
            SubscriptionFate::Matched(delivery) => {
                attempts += delivery.attempts.len() as u32;
                Some(DeliveryLine {
                    id: one.id,
                    name: one.name,
                    state: delivery.state,
                    last_outcome: delivery.attempts.last().map(|attempt| attempt.outcome),
                    attempts: listed(one.id, delivery.attempts),
                })
            }
            SubscriptionFate::Refused(_) => None,
        })
        .collect();
    EventLine {
        behind,
        place: story.place,
        id: story.id,
        topic: story.topic,
        topic_name: story.topic_name,
        domain_topic: story.domain_topic,
        event_type: story.event_type,
        subject: story.subject,
        accepted: story.accepted,
        state: story.state,
        attempts,
        subscriptions,
    }
}
