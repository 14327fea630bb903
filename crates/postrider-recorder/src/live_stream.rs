//! The latest events with their content, for trying out filters, and the lines of the live stream.

use crate::lifecycle_facts::LifecycleFacts;
use crate::query::QuerySession;
use crate::segment::RecorderSegment;
use crate::writer::{EventText, RecorderItem};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::time::Timestamp;
use postrider_engine::recorder::{
    AcceptedRequest, AttemptDecision, DeliveryState, EventHistory, EventPlace, LiveStreamHappening,
    LiveStreamLine, RecentEvent, TopicAudience,
};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Memory for the contents of recent events, shared by all topics.
const RECENT_BYTES_MAX: usize = 32 << 20;
/// The greatest and the least part of it for one topic.
const TOPIC_BYTES: (usize, usize) = (1 << 20, 16 << 10);
const TOPIC_REQUESTS_MAX: usize = 256;
/// The most topics whose events are kept; the one that has been quiet for longest makes space.
const TOPICS_MAX: usize = 2048;
/// The most lines that wait for a slow subscriber.
pub const LINES_MAX: usize = 4096;
/// The most events whose texts are kept for lines about their later attempts.
const KNOWN_MAX: usize = 16 << 10;
/// The most lines that are held for events whose acceptance is not recorded yet. Beyond it, the
/// acceptance of most will never come.
const EARLY_MAX: usize = 16 << 10;

/// The latest requests of every topic.
#[derive(Default)]
pub struct RecentEvents {
    topics: BTreeMap<TopicId, TopicRecentEvents>,
    /// Counts requests: a greater value is later.
    clock: u64,
}

#[derive(Default)]
struct TopicRecentEvents {
    requests: VecDeque<(u64, AcceptedRequest)>,
    bytes: usize,
}

impl RecentEvents {
    pub fn add(&mut self, accepted: &AcceptedRequest) {
        let size = |accepted: &AcceptedRequest| accepted.batch.body.len() + 256;
        self.clock += 1;
        let share = (RECENT_BYTES_MAX / (self.topics.len() + 1)).clamp(TOPIC_BYTES.1, TOPIC_BYTES.0);
        let topic = self.topics.entry(accepted.audience.topic).or_default();
        topic.bytes += size(accepted);
        topic.requests.push_back((self.clock, accepted.clone()));
        // The latest request stays, however large.
        while topic.requests.len() > 1 && (topic.bytes > share || topic.requests.len() > TOPIC_REQUESTS_MAX) {
            if let Some((_, oldest)) = topic.requests.pop_front() {
                topic.bytes -= size(&oldest);
            }
        }
        if self.topics.len() > TOPICS_MAX {
            let last = |topic: &TopicRecentEvents| topic.requests.back().map_or(0, |(at, _)| *at);
            let quiet = self.topics.iter().min_by_key(|(_, topic)| last(topic));
            if let Some(id) = quiet.map(|(id, _)| *id) {
                self.topics.remove(&id);
            }
        }
    }

    pub fn latest(&self, topic: Option<TopicId>, max: usize) -> Vec<RecentEvent> {
        let mut requests: Vec<&(u64, AcceptedRequest)> = match topic {
            Some(topic) => self
                .topics
                .get(&topic)
                .into_iter()
                .flat_map(|t| &t.requests)
                .collect(),
            None => self.topics.values().flat_map(|t| &t.requests).collect(),
        };
        requests.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        let of_request = |(_, accepted): &&(u64, AcceptedRequest)| {
            let (audience, batch) = (accepted.audience.clone(), accepted.batch.clone());
            (0..batch.events.len()).rev().map(move |index| RecentEvent {
                audience: audience.clone(),
                batch: batch.clone(),
                index,
            })
        };
        requests.iter().flat_map(of_request).take(max).collect()
    }
}

/// The texts about an event that each of its lines contains.
struct LineTexts {
    id: String,
    topic: TopicId,
    topic_name: String,
    domain_topic: Option<String>,
    event_type: String,
    subject: String,
}

impl LineTexts {
    fn of(accepted: &AcceptedRequest, index: usize) -> LineTexts {
        let text = EventText::read(accepted, index);
        let audience: &TopicAudience = &accepted.audience;
        LineTexts {
            id: text.id.into_owned(),
            topic: audience.topic,
            topic_name: audience.name.clone(),
            domain_topic: text.domain_topic.map(|name| name.into_owned()),
            event_type: text.event_type.into_owned(),
            subject: text.subject.into_owned(),
        }
    }

    fn line(&self, said: LineContent) -> LiveStreamLine {
        LiveStreamLine {
            what: said.what,
            at: said.at,
            id: self.id.clone(),
            topic: self.topic,
            topic_name: self.topic_name.clone(),
            domain_topic: self.domain_topic.clone(),
            event_type: self.event_type.clone(),
            subject: self.subject.clone(),
            subscription: said.subscription,
            elsewhere: None,
        }
    }
}

/// The content of a line apart from the texts about its event.
struct LineContent {
    what: LiveStreamHappening,
    at: Timestamp,
    subscription: Option<(SubscriptionId, String)>,
}

/// Builds the lines of the live stream while it has subscribers.
pub struct LiveLineBuilder {
    among_others: bool,
    /// The empty texts for an event that another node has accepted.
    unknown: LineTexts,
    known: FxHashMap<EventPlace, Arc<LineTexts>>,
    order: VecDeque<EventPlace>,
    /// Lines of attempts that ended before the acceptance of their event was recorded: the
    /// publisher's task waits for the log just as deliveries do. The lines wait for the event's
    /// texts.
    early: FxHashMap<EventPlace, Vec<LineContent>>,
    early_count: usize,
}

impl LiveLineBuilder {
    pub fn new(among_others: bool) -> LiveLineBuilder {
        LiveLineBuilder {
            among_others,
            unknown: LineTexts {
                id: String::new(),
                topic: TopicId(0),
                topic_name: String::new(),
                domain_topic: None,
                event_type: String::new(),
                subject: String::new(),
            },
            known: FxHashMap::default(),
            order: VecDeque::new(),
            early: FxHashMap::default(),
            early_count: 0,
        }
    }

    /// Forgets everything: the live stream has no subscribers any more.
    pub fn forget(&mut self) {
        if !self.order.is_empty() || !self.early.is_empty() {
            (self.known, self.order, self.early, self.early_count) = Default::default();
        }
    }

    /// The lines of one record. Events accepted before the stream had a subscriber are looked up in
    /// the segments.
    pub fn tell(
        &mut self,
        record: &RecorderItem,
        segments: &[Arc<RecorderSegment>],
        facts: &LifecycleFacts,
        mut say: impl FnMut(LiveStreamLine),
    ) {
        let look_up = |place| QuerySession::new(segments.to_vec(), facts).event_at(place);
        match record {
            RecorderItem::Accepted(accepted) => {
                for index in 0..accepted.batch.events.len() {
                    let brief = Arc::new(LineTexts::of(accepted, index));
                    let matched = accepted.batch.matched(index).len() as u32;
                    say(brief.line(LineContent {
                        what: LiveStreamHappening::Accepted { matched },
                        at: accepted.batch.received,
                        subscription: None,
                    }));
                    if let Some(first) = accepted.first {
                        let index = index as u32;
                        self.learn(EventPlace { first, index }, brief, &mut say);
                    }
                }
            }
            RecorderItem::Attempted(attempted) => {
                let subscription = &attempted.subscription;
                for run in &attempted.runs {
                    let state = match run.decision {
                        AttemptDecision::Done => DeliveryState::Delivered,
                        AttemptDecision::Retry { .. } => DeliveryState::Retrying,
                        AttemptDecision::DeadLetter(_) => DeliveryState::DeadLettered,
                        AttemptDecision::Drop(_) => DeliveryState::Dropped,
                    };
                    for index in run.start.index..run.start.index + run.count {
                        let place = EventPlace {
                            first: run.start.first,
                            index,
                        };
                        let said = LineContent {
                            what: LiveStreamHappening::Attempted {
                                outcome: attempted.outcome,
                                status: attempted.status,
                                state,
                            },
                            at: attempted.ended,
                            subscription: Some((subscription.id, subscription.name.clone())),
                        };
                        self.tell_of(place, said, look_up, &mut say);
                    }
                }
            }
            RecorderItem::Ended(ended) => {
                for place in &ended.events {
                    let said = LineContent {
                        what: LiveStreamHappening::Ended(ended.disposition),
                        at: ended.at,
                        subscription: Some((ended.subscription, String::new())),
                    };
                    self.tell_of(*place, said, look_up, &mut say);
                }
            }
            RecorderItem::Retired(_)
            | RecorderItem::Held(_)
            | RecorderItem::Released(_)
            | RecorderItem::Blob(_)
            | RecorderItem::Replayed(_) => {}
        }
    }

    /// Builds the line with the event's texts, or holds it until they are known.
    fn tell_of(
        &mut self,
        place: EventPlace,
        said: LineContent,
        look_up: impl Fn(EventPlace) -> Option<EventHistory>,
        say: &mut impl FnMut(LiveStreamLine),
    ) {
        if let Some(brief) = self.known.get(&place) {
            say(brief.line(said));
        } else if self.among_others {
            // Not looked up here, where nothing may take long: usually the lookup would fail.
            say(LiveStreamLine {
                elsewhere: Some(place),
                ..self.unknown.line(said)
            });
        } else if let Some(story) = look_up(place) {
            let brief = Arc::new(LineTexts {
                id: story.id,
                topic: story.topic,
                topic_name: story.topic_name,
                domain_topic: story.domain_topic,
                event_type: story.event_type,
                subject: story.subject,
            });
            say(brief.line(said));
            self.learn(place, brief, say);
        } else {
            if self.early_count >= EARLY_MAX {
                self.early.clear();
                self.early_count = 0;
            }
            self.early_count += 1;
            self.early.entry(place).or_default().push(said);
        }
    }

    fn learn(&mut self, place: EventPlace, brief: Arc<LineTexts>, say: &mut impl FnMut(LiveStreamLine)) {
        for said in self.early.remove(&place).into_iter().flatten() {
            self.early_count -= 1;
            say(brief.line(said));
        }
        if self.known.insert(place, brief).is_none() {
            self.order.push_back(place);
        }
        if self.order.len() > KNOWN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}
