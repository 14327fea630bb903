//! The interfaces of the flight recorder: what the engine reports to it, and what can be queried.
//! The engine never waits for it.

use bytes::Bytes;
use http::HeaderValue;
use postrider_core::event::{EventSchema, PublishedBatch};
use postrider_core::filter::{AdvancedFilter, EventFilter, FilterMismatch, FilterOperands};
use postrider_core::ids::{Position, SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::profile::{EndpointKind, Profile, StatusRule};
use postrider_core::retry::{GiveUpReason, MadeAttempt, NextStep, RetryPolicy};
use postrider_core::subscription::{InputMapping, Subscription, Topic, TopicKind};
use postrider_core::time::Timestamp;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::broadcast;

use crate::attempt::trace::AttemptSpan;
use crate::deliver::AttemptTimings;
use crate::subscription_health::words_of;

/// Receives everything that happens to events. Called on the hot path from any thread: never
/// blocks, never fails; records that do not fit are lost and counted.
pub trait EventRecorder: Send + Sync {
    /// Whether anything is recorded. Data that is expensive to collect is collected only then.
    fn on(&self) -> bool;
    /// Once per publish request, when it is durable.
    fn accepted(&self, accepted: AcceptedRequest);
    /// Once per delivery request, when its consequences are decided.
    fn attempted(&self, attempted: AttemptedRequest);
    /// Deliveries that ended without an attempt of their own.
    fn ended(&self, ended: EndedDeliveries);
    /// A subscription is gone, and its backlog with it.
    fn retired(&self, retired: RetiredSubscription);
    /// An endpoint is on probation, or its probation was prolonged.
    fn held(&self, held: HeldEndpoint);
    /// Deliveries to an endpoint continue.
    fn released(&self, released: ReleasedEndpoint);
    /// Dead letters are in a blob.
    fn blob(&self, blob: BlobWritten);
    /// Dead letters were appended to the log again.
    fn replayed(&self, replayed: ReplayedDeadLetters);
}

/// A topic and its subscriptions as routing saw them: the names that an accepted request refers to.
#[derive(Debug)]
pub struct TopicAudience {
    pub topic: TopicId,
    pub name: String,
    /// The full resource id.
    pub full_id: String,
    pub domain: bool,
    pub mapping: Option<InputMapping>,
    /// In the order in which verdicts are given.
    pub subscriptions: Vec<Arc<Subscription>>,
}

impl TopicAudience {
    pub fn new(topic: &Topic, full_id: &str, subscriptions: Vec<Arc<Subscription>>) -> TopicAudience {
        TopicAudience {
            topic: topic.id,
            name: topic.name.clone(),
            full_id: full_id.to_owned(),
            domain: matches!(topic.kind, TopicKind::Domain { .. }),
            mapping: topic.mapping.clone(),
            subscriptions,
        }
    }
}

/// The routing verdict for one event and one subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingVerdict {
    Matched,
    /// The subscription had expired.
    Expired,
    /// The subscription is attached to another topic of the domain.
    DomainTopic,
    EventType,
    SubjectBeginsWith,
    SubjectEndsWith,
    /// Index into `EventFilter::advanced`.
    Advanced(u16),
}

impl From<FilterMismatch> for RoutingVerdict {
    fn from(mismatch: FilterMismatch) -> RoutingVerdict {
        match mismatch {
            FilterMismatch::EventType => RoutingVerdict::EventType,
            FilterMismatch::SubjectPrefix => RoutingVerdict::SubjectBeginsWith,
            FilterMismatch::SubjectSuffix => RoutingVerdict::SubjectEndsWith,
            FilterMismatch::Advanced(index) => {
                RoutingVerdict::Advanced(u16::try_from(index).unwrap_or(u16::MAX))
            }
        }
    }
}

/// The verdicts on the events of one request.
#[derive(Clone, Debug, Default)]
pub struct RoutingVerdicts {
    /// The distinct lists, each with a verdict for every subscription of the audience, or for the
    /// first of them where there are too many. Empty when no subscription filters events: all have
    /// matched.
    pub lists: Vec<Box<[RoutingVerdict]>>,
    /// The number of each event's list. Empty when `lists` is.
    pub of_event: Vec<u32>,
}

#[derive(Clone, Debug)]
pub struct AcceptedRequest {
    /// The position of the request's first event; none when no event matched and nothing was
    /// stored.
    pub first: Option<Position>,
    pub batch: Arc<PublishedBatch>,
    pub audience: Arc<TopicAudience>,
    pub verdicts: RoutingVerdicts,
}

/// An event, identified by the position of its request's first event and its index in the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventPlace {
    pub first: Position,
    pub index: u32,
}

impl EventPlace {
    pub fn position(self) -> Position {
        Position(self.first.0 + u64::from(self.index))
    }
}

/// `12345:0`
impl fmt::Display for EventPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.first, self.index)
    }
}

impl FromStr for EventPlace {
    type Err = ();
    fn from_str(text: &str) -> Result<EventPlace, ()> {
        let (first, index) = text.split_once(':').ok_or(())?;
        Ok(EventPlace {
            first: Position(first.parse().map_err(|_| ())?),
            index: index.parse().map_err(|_| ())?,
        })
    }
}

/// Consecutive events of one publish request with the same result in one delivery request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRun {
    pub start: EventPlace,
    pub count: u32,
    /// The number of the attempt. The first is 1.
    pub number: u32,
    /// Since when the attempt could have been made: the acceptance, or the due time of the retry.
    pub since: Timestamp,
    pub decision: AttemptDecision,
}

#[derive(Clone, Debug)]
pub struct AttemptedRequest {
    pub subscription: Arc<Subscription>,
    /// Scheme, host, port and path.
    pub endpoint: Arc<str>,
    pub begun: Timestamp,
    pub ended: Timestamp,
    pub outcome: Outcome,
    pub status: Option<u16>,
    /// As far as the transport measured them; the total is always known.
    pub timings: Option<AttemptTimings>,
    pub answer: Option<AnswerBody>,
    /// Why no answer came, for people.
    pub failure: Option<Box<str>>,
    /// The span of the attempt, if it is exported.
    pub span: Option<Box<AttemptSpan>>,
    pub runs: Vec<EventRun>,
}

/// The beginning of a response body. Truncated and redacted before it is stored.
#[derive(Clone, Debug)]
pub struct AnswerBody {
    pub content_type: Option<HeaderValue>,
    pub body: Bytes,
}

/// The consequence of an attempt, with the rule behind a retry's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptDecision {
    Done,
    Retry { at: Timestamp, why: RetryTimeRule },
    DeadLetter(GiveUpReason),
    Drop(GiveUpReason),
}

impl AttemptDecision {
    /// `why` is called only for a retry.
    pub fn new(next: NextStep, why: impl FnOnce(Timestamp) -> RetryTimeRule) -> AttemptDecision {
        match next {
            NextStep::Done => AttemptDecision::Done,
            NextStep::RetryAt(at) => AttemptDecision::Retry { at, why: why(at) },
            NextStep::DeadLetter(reason) => AttemptDecision::DeadLetter(reason),
            NextStep::Drop(reason) => AttemptDecision::Drop(reason),
        }
    }
}

/// The rule that set the time of a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryTimeRule {
    /// The schedule's wait after this many attempts.
    Schedule { after: u32, wait: Duration },
    /// The status asks for at least this wait.
    Floor { wait: Duration },
    /// The receiver asked for this wait.
    RetryAfter { asked: Duration },
    /// The receiver asked to wait beyond the end of the event's time to live: the event is checked
    /// then.
    EndOfLife,
    /// The request was too large as a whole: its events are sent again in halves, as the same
    /// attempt.
    Halved,
}

impl RetryTimeRule {
    /// The rule by which an attempt that ended at `now` is followed by another at `due`.
    pub fn of(
        policy: &RetryPolicy,
        profile: &Profile,
        kind: EndpointKind,
        attempt: MadeAttempt,
        published: Timestamp,
        now: Timestamp,
        due: Timestamp,
    ) -> RetryTimeRule {
        let wait = profile.step(attempt.number);
        let floor = match profile.rule(attempt.status, kind) {
            StatusRule::RetryAfter(floor) | StatusRule::FinalIfDeadLettered(floor) => floor,
            StatusRule::Final => Duration::ZERO,
        };
        // Jitter only lengthens a step, and by no more than this.
        let longest = wait.mul_f64(1.0 + f64::from(profile.jitter_percent) / 100.0);
        let by_rule = now + longest.max(floor);
        if let Some(asked) = attempt.retry_after
            && (now + asked).min(published + policy.time_to_live) == due
            && due >= now + wait.max(floor)
        {
            return if now + asked == due {
                RetryTimeRule::RetryAfter { asked }
            } else {
                RetryTimeRule::EndOfLife
            };
        }
        if floor > wait && due <= by_rule && now + floor == due {
            return RetryTimeRule::Floor { wait: floor };
        }
        RetryTimeRule::Schedule {
            after: attempt.number,
            wait,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            RetryTimeRule::Schedule { .. } => "schedule",
            RetryTimeRule::Floor { .. } => "floor",
            RetryTimeRule::RetryAfter { .. } => "retryAfter",
            RetryTimeRule::EndOfLife => "endOfLife",
            RetryTimeRule::Halved => "halved",
        }
    }
}

impl fmt::Display for RetryTimeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RetryTimeRule::Schedule { after, wait } => {
                write!(f, "the schedule's wait after attempt {after} is {wait:?}")
            }
            RetryTimeRule::Floor { wait } => write!(f, "after this status at least {wait:?} are waited"),
            RetryTimeRule::RetryAfter { asked } => {
                write!(f, "the receiver asked to wait for {asked:?} (Retry-After)")
            }
            RetryTimeRule::EndOfLife => {
                f.write_str("the receiver asked for more than the event's time to live allows")
            }
            RetryTimeRule::Halved => {
                f.write_str("the request was too large as a whole: the same attempt in two halves")
            }
        }
    }
}

#[derive(Clone, Debug)]
pub struct EndedDeliveries {
    pub subscription: SubscriptionId,
    pub events: Vec<EventPlace>,
    pub at: Timestamp,
    pub disposition: DeliveryDisposition,
}

/// How a delivery ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryDisposition {
    Delivered,
    /// The answer was late.
    DeliveredLate,
    DeadLettered(GiveUpReason),
    Dropped(GiveUpReason),
}

impl DeliveryDisposition {
    pub fn state(self) -> DeliveryState {
        match self {
            DeliveryDisposition::Delivered | DeliveryDisposition::DeliveredLate => DeliveryState::Delivered,
            DeliveryDisposition::DeadLettered(_) => DeliveryState::DeadLettered,
            DeliveryDisposition::Dropped(_) => DeliveryState::Dropped,
        }
    }

    pub fn reason(self) -> Option<GiveUpReason> {
        match self {
            DeliveryDisposition::Delivered | DeliveryDisposition::DeliveredLate => None,
            DeliveryDisposition::DeadLettered(reason) | DeliveryDisposition::Dropped(reason) => Some(reason),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct RetiredSubscription {
    pub subscription: SubscriptionId,
    pub at: Timestamp,
    pub reason: GiveUpReason,
}

#[derive(Clone, Debug)]
pub struct HeldEndpoint {
    pub endpoint: Arc<str>,
    pub cause: Outcome,
    pub at: Timestamp,
    pub until: Timestamp,
}

#[derive(Clone, Debug)]
pub struct ReleasedEndpoint {
    pub endpoint: Arc<str>,
    pub at: Timestamp,
}

/// The location of a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterBlobLocation {
    pub account: String,
    pub container: String,
    pub path: String,
}

#[derive(Clone, Debug)]
pub struct BlobWritten {
    pub subscription: SubscriptionId,
    pub at: Timestamp,
    pub blob: Arc<DeadLetterBlobLocation>,
    pub letters: Vec<EventPlace>,
}

#[derive(Clone, Debug)]
pub struct ReplayedDeadLetters {
    pub subscription: SubscriptionId,
    pub at: Timestamp,
    /// The blob that the dead letters were read from.
    pub blob: Arc<DeadLetterBlobLocation>,
    /// The position of the first event of the new request, and the number of its events.
    pub first: Position,
    pub count: u32,
}

/// Forwards to two recorders; only the second gets spans.
pub struct RecorderPair(pub Arc<dyn EventRecorder>, pub Arc<dyn EventRecorder>);

impl EventRecorder for RecorderPair {
    fn on(&self) -> bool {
        self.0.on() || self.1.on()
    }
    fn accepted(&self, accepted: AcceptedRequest) {
        self.0.accepted(accepted.clone());
        self.1.accepted(accepted);
    }
    fn attempted(&self, mut attempted: AttemptedRequest) {
        let span = attempted.span.take();
        self.0.attempted(attempted.clone());
        self.1.attempted(AttemptedRequest { span, ..attempted });
    }
    fn ended(&self, ended: EndedDeliveries) {
        self.0.ended(ended.clone());
        self.1.ended(ended);
    }
    fn retired(&self, retired: RetiredSubscription) {
        self.0.retired(retired);
        self.1.retired(retired);
    }
    fn held(&self, held: HeldEndpoint) {
        self.0.held(held.clone());
        self.1.held(held);
    }
    fn released(&self, released: ReleasedEndpoint) {
        self.0.released(released.clone());
        self.1.released(released);
    }
    fn blob(&self, blob: BlobWritten) {
        self.0.blob(blob.clone());
        self.1.blob(blob);
    }
    fn replayed(&self, replayed: ReplayedDeadLetters) {
        self.0.replayed(replayed.clone());
        self.1.replayed(replayed);
    }
}

/// Spans that were made, exported and dropped.
#[derive(Debug, Default)]
pub struct SpanCounts {
    pub exported: AtomicU64,
    pub dropped: AtomicU64,
}

/// A recorder that stores nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoRecorder;

impl EventRecorder for NoRecorder {
    fn on(&self) -> bool {
        false
    }
    fn accepted(&self, _: AcceptedRequest) {}
    fn attempted(&self, _: AttemptedRequest) {}
    fn ended(&self, _: EndedDeliveries) {}
    fn retired(&self, _: RetiredSubscription) {}
    fn held(&self, _: HeldEndpoint) {}
    fn released(&self, _: ReleasedEndpoint) {}
    fn blob(&self, _: BlobWritten) {}
    fn replayed(&self, _: ReplayedDeadLetters) {}
}

impl RecordingQueries for NoRecorder {
    fn trace(&self, _: &str) -> Vec<EventHistory> {
        Vec::new()
    }
    fn search(&self, _: &EventQuery) -> EventPage {
        EventPage::default()
    }
    fn recent(&self, _: Option<TopicId>, _: usize) -> Vec<RecentEvent> {
        Vec::new()
    }
    fn subscribe(&self) -> broadcast::Receiver<Arc<LiveStreamLine>> {
        // The sender is dropped, so that the receiver sees the end of the stream at once.
        broadcast::channel(1).1
    }
    fn status(&self) -> RecorderStatus {
        RecorderStatus::default()
    }
}

/// Queries of the flight recorder. A query finds everything that was recorded before it. The calls
/// read files and may wait for the writer: they must not run where blocking is forbidden.
pub trait RecordingQueries: Send + Sync {
    /// Everything known about the events with this id, the latest first.
    fn trace(&self, id: &str) -> Vec<EventHistory>;
    /// A page, the latest recorded first. Does a bounded amount of work: a page may have fewer
    /// events than requested, or none, and still have a cursor.
    fn search(&self, query: &EventQuery) -> EventPage;
    /// Everything that this node recorded about events that were accepted, here or at another node,
    /// at these times; in the same order. Contains only deliveries with recorded activity.
    fn happened(&self, events: &[(EventPlace, Timestamp)]) -> Vec<Vec<SubscriptionHistory>> {
        events.iter().map(|_| Vec::new()).collect()
    }
    /// The events at these places, as far as their acceptance is recorded here, without their
    /// deliveries.
    fn events_at(&self, places: &[EventPlace]) -> Vec<Option<EventHistory>> {
        places.iter().map(|_| None).collect()
    }
    /// The latest events with their content, the latest first, as far as they are still in memory.
    fn recent(&self, topic: Option<TopicId>, max: usize) -> Vec<RecentEvent>;
    /// The live stream of what happens from now on. A slow reader loses lines and learns how many.
    fn subscribe(&self) -> broadcast::Receiver<Arc<LiveStreamLine>>;
    fn status(&self) -> RecorderStatus;
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecorderStatus {
    pub on: bool,
    /// Records that were dropped because they came faster than they could be written.
    pub lost: u64,
    pub segments: u64,
    pub bytes: u64,
    /// The beginning of what is kept.
    pub oldest: Option<Timestamp>,
    /// Segments that are being indexed after a crash; their content is not found yet.
    pub indexing: u64,
    /// Why nothing can be written, if so.
    pub trouble: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub struct EventQuery {
    pub id: Option<String>,
    pub topic: Option<TopicId>,
    pub subscription: Option<SubscriptionId>,
    pub event_type: Option<String>,
    /// The beginning of the subject.
    pub subject: Option<String>,
    pub state: Option<EventState>,
    /// The outcome of at least one attempt.
    pub outcome: Option<Outcome>,
    /// Only events with such an attempt; their deliveries list these attempts.
    pub attempts: Option<AttemptFilter>,
    pub since: Option<Timestamp>,
    /// Exclusive.
    pub until: Option<Timestamp>,
    pub cursor: Option<SearchCursor>,
    pub limit: usize,
}

/// The attempts that a search lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptFilter {
    All,
    Failed,
    Outcome(Outcome),
}

impl AttemptFilter {
    pub fn takes(self, outcome: Outcome) -> bool {
        match self {
            AttemptFilter::All => true,
            AttemptFilter::Failed => outcome != Outcome::Success,
            AttemptFilter::Outcome(wanted) => outcome == wanted,
        }
    }
}

/// Where the next page begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchCursor {
    pub segment: i64,
    pub record: u32,
    pub event: u32,
}

impl fmt::Display for SearchCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}-{:x}", self.segment, self.record, self.event)
    }
}

impl FromStr for SearchCursor {
    type Err = ();
    fn from_str(text: &str) -> Result<SearchCursor, ()> {
        let mut parts = text.split('-').map(|part| u64::from_str_radix(part, 16));
        let mut next = || parts.next().and_then(Result::ok).ok_or(());
        let cursor = SearchCursor {
            segment: i64::try_from(next()?).map_err(|_| ())?,
            record: u32::try_from(next()?).map_err(|_| ())?,
            event: u32::try_from(next()?).map_err(|_| ())?,
        };
        if parts.next().is_some() {
            return Err(());
        }
        Ok(cursor)
    }
}

#[derive(Clone, Debug, Default)]
pub struct EventPage {
    pub events: Vec<EventLine>,
    pub cursor: Option<SearchCursor>,
    /// The range of acceptance times that the search has covered, the earlier first.
    pub searched: Option<(Timestamp, Timestamp)>,
    pub work: QueryWork,
}

/// The work that a query took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueryWork {
    /// Index entries that were read sequentially.
    pub cards: u64,
    /// Index searches for one position or id.
    pub lookups: u64,
    /// Blocks of index files that were read.
    pub blocks: u64,
    pub frames: u64,
}

/// An event in a list of search results.
#[derive(Clone, Debug, PartialEq)]
pub struct EventLine {
    /// The cursor of a page that begins after this event.
    pub behind: SearchCursor,
    /// None for an event that matched no subscription.
    pub place: Option<EventPlace>,
    pub id: String,
    pub topic: TopicId,
    pub topic_name: String,
    pub domain_topic: Option<String>,
    pub event_type: String,
    pub subject: String,
    pub accepted: Timestamp,
    pub state: EventState,
    /// The attempts of all subscriptions together.
    pub attempts: u32,
    pub subscriptions: Vec<DeliveryLine>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DeliveryLine {
    pub id: SubscriptionId,
    pub name: String,
    pub state: DeliveryState,
    pub last_outcome: Option<Outcome>,
    /// The attempts that [`EventQuery::attempts`] selects, in chronological order; empty without it.
    pub attempts: Vec<AttemptHistory>,
}

/// A published event with its history.
#[derive(Clone, Debug, PartialEq)]
pub struct EventHistory {
    pub id: String,
    pub topic: TopicId,
    pub topic_name: String,
    pub topic_resource: String,
    pub domain_topic: Option<String>,
    pub event_type: String,
    pub subject: String,
    /// Set for a CloudEvent.
    pub source: Option<String>,
    pub schema: EventSchema,
    pub accepted: Timestamp,
    pub publisher: String,
    pub bytes: u64,
    /// The trace context that the event came with, in the form of `traceparent`.
    pub trace: Option<String>,
    pub replay: u32,
    /// The blob that the event was read from, if it is a replayed dead letter.
    pub replayed_from: Option<DeadLetterBlobLocation>,
    /// None for an event that matched no subscription.
    pub place: Option<EventPlace>,
    pub state: EventState,
    /// Matching subscriptions come first.
    pub subscriptions: Vec<SubscriptionHistory>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SubscriptionHistory {
    pub id: SubscriptionId,
    /// The subscription's name at that time. Empty if unknown.
    pub name: String,
    pub domain_topic: Option<String>,
    pub fate: SubscriptionFate,
}

#[derive(Clone, Debug, PartialEq)]
pub enum SubscriptionFate {
    Matched(DeliveryHistory),
    Refused(UnmetPredicate),
}

/// The part of a subscription that an event did not satisfy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnmetPredicate {
    pub verdict: RoutingVerdict,
    pub text: String,
}

impl RoutingVerdict {
    pub fn name(self) -> &'static str {
        match self {
            RoutingVerdict::Matched => "matched",
            RoutingVerdict::Expired => "expired",
            RoutingVerdict::DomainTopic => "domainTopic",
            RoutingVerdict::EventType => "eventType",
            RoutingVerdict::SubjectBeginsWith => "subjectBeginsWith",
            RoutingVerdict::SubjectEndsWith => "subjectEndsWith",
            RoutingVerdict::Advanced(_) => "advanced",
        }
    }

    /// The verdict in words, naming the filter that gave it.
    pub fn text(self, subscription: &Subscription) -> String {
        let filter: &EventFilter = &subscription.filter;
        match self {
            RoutingVerdict::Matched => String::new(),
            RoutingVerdict::Expired => match subscription.expires {
                Some(at) => format!("the subscription expired at {at}"),
                None => "the subscription expired".to_owned(),
            },
            RoutingVerdict::DomainTopic => match &subscription.domain_topic {
                Some(name) => format!("domain topic {name:?}"),
                None => String::new(),
            },
            RoutingVerdict::EventType => {
                let types = filter.included_event_types.as_deref().unwrap_or_default();
                format!("eventType in {types:?}")
            }
            RoutingVerdict::SubjectBeginsWith => format!(
                "subjectBeginsWith {:?}",
                filter.subject_begins_with.as_deref().unwrap_or_default()
            ),
            RoutingVerdict::SubjectEndsWith => format!(
                "subjectEndsWith {:?}",
                filter.subject_ends_with.as_deref().unwrap_or_default()
            ),
            RoutingVerdict::Advanced(index) => match filter.advanced.get(usize::from(index)) {
                Some(advanced) => in_words(advanced),
                None => format!("advancedFilters[{index}]"),
            },
        }
    }
}

/// `data.n NumberGreaterThan 5`
fn in_words(AdvancedFilter { key, test }: &AdvancedFilter) -> String {
    fn list<T: fmt::Display>(values: &[T]) -> String {
        let texts: Vec<String> = values.iter().map(T::to_string).collect();
        format!(" [{}]", texts.join(", "))
    }
    let operands = match test.operands() {
        FilterOperands::Numbers(values) => list(values),
        FilterOperands::Number(value) => format!(" {value}"),
        FilterOperands::Ranges(ranges) => {
            let texts: Vec<String> = ranges
                .iter()
                .map(|(low, high)| format!("{low}..{high}"))
                .collect();
            list(&texts)
        }
        FilterOperands::Bool(value) => format!(" {value}"),
        FilterOperands::Strings(values) => format!(" {values:?}"),
        FilterOperands::Nothing => String::new(),
    };
    format!("{key} {}{operands}", test.operator())
}

/// An event for one subscription, with its attempts and its end.
#[derive(Clone, Debug, PartialEq)]
pub struct DeliveryHistory {
    pub state: DeliveryState,
    /// In chronological order.
    pub attempts: Vec<AttemptHistory>,
    pub next: Option<NextAttempt>,
    pub end: Option<RecordedDeliveryEnd>,
    /// The times at which its endpoint was on probation meanwhile.
    pub holds: Vec<EndpointHold>,
}

impl DeliveryHistory {
    /// Since when the event's dead letter is pending, if no blob is recorded for it.
    pub fn pending_letter_since(&self) -> Option<Timestamp> {
        let end = self.end.as_ref().filter(|end| end.blob.is_none())?;
        match (end.disposition, self.attempts.last()) {
            (DeliveryDisposition::DeadLettered(GiveUpReason::TimeToLiveExceeded), Some(last)) => {
                Some(last.ended.min(end.at))
            }
            (DeliveryDisposition::DeadLettered(_), _) => Some(end.at),
            (
                DeliveryDisposition::Delivered
                | DeliveryDisposition::DeliveredLate
                | DeliveryDisposition::Dropped(_),
                _,
            ) => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextAttempt {
    pub at: Timestamp,
    pub why: NextAttemptReason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAttemptReason {
    Rule(RetryTimeRule),
    /// The endpoint is on probation until then.
    Probation {
        cause: Outcome,
    },
}

impl NextAttemptReason {
    pub fn name(self) -> &'static str {
        match self {
            NextAttemptReason::Rule(why) => why.name(),
            NextAttemptReason::Probation { .. } => "probation",
        }
    }
}

impl fmt::Display for NextAttemptReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NextAttemptReason::Rule(why) => why.fmt(f),
            NextAttemptReason::Probation { cause } => {
                let cause = words_of(Some(*cause), None);
                write!(
                    f,
                    "the endpoint keeps failing ({cause}) and is left alone until then"
                )
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedDeliveryEnd {
    pub at: Timestamp,
    pub disposition: DeliveryDisposition,
    /// The blob of the dead letter, once it is written.
    pub blob: Option<DeadLetterBlobLocation>,
}

/// A time during which an endpoint was on probation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointHold {
    pub cause: Outcome,
    pub since: Timestamp,
    /// When the endpoint is, or was, to be tried again.
    pub until: Timestamp,
    pub released: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct AttemptHistory {
    pub number: u32,
    pub begun: Timestamp,
    pub ended: Timestamp,
    /// How long the attempt could have been made before it was.
    pub queued: Duration,
    pub endpoint: String,
    pub outcome: Outcome,
    pub status: Option<u16>,
    /// The number of events in the request.
    pub batch: u32,
    pub timings: Option<AttemptTimings>,
    pub response: Option<AnswerSnippet>,
    pub failure: Option<String>,
    pub decision: AttemptDecision,
}

/// The beginning of a response as text, redacted. Still hostile input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerSnippet {
    pub content_type: Option<String>,
    pub text: String,
    pub truncated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeliveryState {
    Delivered,
    /// Not attempted yet.
    Pending,
    Retrying,
    /// The endpoint is on probation.
    Held,
    DeadLettered,
    Dropped,
}

impl DeliveryState {
    pub fn name(self) -> &'static str {
        match self {
            DeliveryState::Delivered => "delivered",
            DeliveryState::Pending => "pending",
            DeliveryState::Retrying => "retrying",
            DeliveryState::Held => "held",
            DeliveryState::DeadLettered => "deadLettered",
            DeliveryState::Dropped => "dropped",
        }
    }
}

/// The state of an event over all its subscriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventState {
    /// All deliveries are in this state.
    All(DeliveryState),
    Unmatched,
    Mixed,
}

impl EventState {
    pub const ALL: [EventState; 8] = [
        EventState::All(DeliveryState::Delivered),
        EventState::All(DeliveryState::Pending),
        EventState::All(DeliveryState::Retrying),
        EventState::All(DeliveryState::Held),
        EventState::All(DeliveryState::DeadLettered),
        EventState::All(DeliveryState::Dropped),
        EventState::Unmatched,
        EventState::Mixed,
    ];

    pub fn of(deliveries: impl IntoIterator<Item = DeliveryState>) -> EventState {
        let mut deliveries = deliveries.into_iter();
        let Some(first) = deliveries.next() else {
            return EventState::Unmatched;
        };
        if deliveries.all(|other| other == first) {
            EventState::All(first)
        } else {
            EventState::Mixed
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            EventState::All(state) => state.name(),
            EventState::Unmatched => "unmatched",
            EventState::Mixed => "mixed",
        }
    }

    pub fn from_name(name: &str) -> Option<EventState> {
        EventState::ALL
            .into_iter()
            .find(|state| state.name().eq_ignore_ascii_case(name))
    }
}

/// An event with its content, for trying out filters.
#[derive(Clone, Debug)]
pub struct RecentEvent {
    pub audience: Arc<TopicAudience>,
    pub batch: Arc<PublishedBatch>,
    /// The event's index in the request.
    pub index: usize,
}

/// A line of the live stream.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveStreamLine {
    pub what: LiveStreamHappening,
    pub at: Timestamp,
    pub id: String,
    pub topic: TopicId,
    pub topic_name: String,
    pub domain_topic: Option<String>,
    pub event_type: String,
    pub subject: String,
    pub subscription: Option<(SubscriptionId, String)>,
    /// Where to look up an event that another node accepted: its fields are empty here.
    pub elsewhere: Option<EventPlace>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LiveStreamHappening {
    /// The number of matching subscriptions.
    Accepted {
        matched: u32,
    },
    Attempted {
        outcome: Outcome,
        status: Option<u16>,
        state: DeliveryState,
    },
    Ended(DeliveryDisposition),
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::profile::CLOUD_2021;

    const NOW: Timestamp = Timestamp::from_secs(1_000_000);

    fn why(number: u32, status: u16, retry_after: Option<u64>, chance: f64) -> RetryTimeRule {
        let policy = RetryPolicy {
            attempts_max: 30,
            time_to_live: Duration::from_secs(3600),
            dead_letter: false,
            safety_net: false,
        };
        let attempt = MadeAttempt {
            number,
            outcome: Outcome::of_failure_status(status),
            status: Some(status),
            retry_after: retry_after.map(Duration::from_secs),
        };
        let kind = EndpointKind::WebHook;
        match policy.next(&CLOUD_2021, kind, attempt, NOW, NOW, chance) {
            NextStep::RetryAt(due) => RetryTimeRule::of(&policy, &CLOUD_2021, kind, attempt, NOW, NOW, due),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_rule_behind_a_retry_is_told() {
        let seconds = Duration::from_secs;
        for chance in [0.0, 0.5, 1.0] {
            let schedule = |after, wait| RetryTimeRule::Schedule {
                after,
                wait: seconds(wait),
            };
            assert_eq!(why(1, 500, None, chance), schedule(1, 10));
            assert_eq!(why(4, 500, None, chance), schedule(4, 300));
            assert_eq!(why(4, 503, Some(5), chance), schedule(4, 300));
            assert_eq!(
                why(1, 503, None, chance),
                RetryTimeRule::Floor { wait: seconds(30) }
            );
            assert_eq!(
                why(1, 503, Some(90), chance),
                RetryTimeRule::RetryAfter { asked: seconds(90) }
            );
            assert_eq!(why(1, 503, Some(90_000), chance), RetryTimeRule::EndOfLife);
        }
    }

    #[test]
    fn cursors_are_read_as_they_are_written() {
        let cursor = SearchCursor {
            segment: 1_700_000_000_000_000_000,
            record: 77,
            event: 31,
        };
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for bad in [
            "",
            "1-2",
            "1-2-3-4",
            "x-1-2",
            "1-2-1ffffffff",
            "ffffffffffffffff-0-0",
        ] {
            assert!(bad.parse::<SearchCursor>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_event_is_what_its_deliveries_are() {
        use DeliveryState::{Delivered, Retrying};
        assert_eq!(EventState::of([]), EventState::Unmatched);
        assert_eq!(EventState::of([Delivered, Delivered]), EventState::All(Delivered));
        assert_eq!(EventState::of([Delivered, Retrying]), EventState::Mixed);
        for state in EventState::ALL {
            assert_eq!(EventState::from_name(state.name()), Some(state));
        }
    }
}
