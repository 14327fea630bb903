//! Trace contexts as in W3C Trace Context: the larger operation that an event is part of.
//!
//! A producer may send a context in the headers of its request, or in extension attributes of a
//! CloudEvent. A malformed context counts as absent. Postrider's own ids are derived from values
//! that never change, so that they can be derived again.

use crate::event::{EventSchema, PublishedBatch};
use crate::ids::{Position, SubscriptionId};
use crate::json::RawJson;
use memchr::memmem::Finder;
use std::borrow::Cow;
use std::fmt;
use std::sync::LazyLock;

pub const TRACEPARENT: &str = "traceparent";
pub const TRACESTATE: &str = "tracestate";

/// A longer `tracestate` loses members: every participant must be able to pass this much on.
pub const STATE_BYTES_MAX: usize = 512;
const STATE_MEMBERS_MAX: usize = 32;
/// Members longer than this are dropped first.
const STATE_MEMBER_LONG: usize = 128;
/// The most producers that a span links to.
pub const LINKS_MAX: usize = 32;

const SAMPLED: u8 = 1;
/// Sampled, and the assurance that the trace id is random.
const KNOWN_FLAGS: u8 = 3;

static OWN: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"traceparent\""));

/// A span of a trace: the content of `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TraceContext {
    pub trace: u128,
    pub span: u64,
    pub flags: u8,
}

impl TraceContext {
    /// None unless it is well-formed. Additions of later versions are ignored.
    pub fn parse(text: &str) -> Option<TraceContext> {
        let bytes = text.as_bytes();
        let version = hex(bytes.get(..2)?)?;
        let known_length = match version {
            0 => bytes.len() == 55,
            0xff => false,
            _ => bytes.len() == 55 || bytes.get(55) == Some(&b'-'),
        };
        if !known_length || [2, 35, 52].iter().any(|at| bytes[*at] != b'-') {
            return None;
        }
        let trace = hex(&bytes[3..35])?;
        let span = hex(&bytes[36..52])? as u64;
        let flags = hex(&bytes[53..55])? as u8 & KNOWN_FLAGS;
        (trace != 0 && span != 0).then_some(TraceContext { trace, span, flags })
    }

    /// Whether the originator of the trace wants it recorded.
    pub fn sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The trace's id in the form that people search for.
    pub fn trace_id(self) -> String {
        format!("{:032x}", self.trace)
    }
}

/// The form of the header `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, self.flags)
    }
}

/// Lower-case digits only, as the standard requires.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0u128, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

/// The members of `tracestate` from all its headers, cut to the length that is passed on. None if a
/// member is malformed.
pub fn state<'a>(headers: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let mut members: Vec<(&str, &str)> = Vec::new();
    for member in headers.into_iter().flat_map(|header| header.split(',')) {
        let member = member.trim_matches([' ', '\t']);
        if member.is_empty() {
            continue;
        }
        let (key, value) = member.split_once('=')?;
        let known = members.iter().any(|(other, _)| *other == key);
        if known || !is_key(key) || !is_value(value) || members.len() == STATE_MEMBERS_MAX {
            return None;
        }
        members.push((key, value));
    }
    let len = |(key, value): &(&str, &str)| key.len() + 1 + value.len();
    let mut total = members.iter().map(|member| len(member) + 1).sum::<usize>();
    while total > STATE_BYTES_MAX + 1 {
        let long = members.iter().rposition(|member| len(member) > STATE_MEMBER_LONG);
        let gone = members.remove(long.unwrap_or(members.len() - 1));
        total -= len(&gone) + 1;
    }
    let members: Vec<String> = members
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    Some(members.join(","))
}

fn is_key(key: &str) -> bool {
    let first = key
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let rest = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-*/@".contains(&b);
    first && key.len() <= 256 && key.bytes().all(rest) && key.bytes().filter(|b| *b == b'@').count() <= 1
}

fn is_value(value: &str) -> bool {
    let printable = |b: u8| (b' '..=b'~').contains(&b) && b != b'=';
    !value.is_empty() && value.len() <= 256 && value.bytes().all(printable) && !value.ends_with(' ')
}

/// The stored form of a request's trace headers: `traceparent`, then a blank and `tracestate` if
/// there is one.
pub fn stored_context<'a>(parent: &str, states: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let context = TraceContext::parse(parent)?;
    Some(match state(states).filter(|state| !state.is_empty()) {
        Some(state) => format!("{context} {state}"),
        None => context.to_string(),
    })
}

/// The trace context that an event came with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedContext<'a> {
    pub context: TraceContext,
    /// `tracestate`; empty if there was none.
    pub state: Cow<'a, str>,
}

impl<'a> CarriedContext<'a> {
    /// Reads the form that [`stored_context`] writes. None also for values that older versions stored without
    /// a check.
    pub fn of_request(kept: &'a str) -> Option<CarriedContext<'a>> {
        let (parent, state) = kept.split_once(' ').unwrap_or((kept, ""));
        Some(CarriedContext {
            context: TraceContext::parse(parent)?,
            state: Cow::Borrowed(state),
        })
    }

    /// The context of one event: its own extension attributes, or else its request's headers.
    pub fn of_event(batch: &'a PublishedBatch, index: usize) -> Option<CarriedContext<'a>> {
        let own = (batch.schema == EventSchema::CloudEvent)
            .then(|| CarriedContext::of_attributes(batch.object(index)))
            .flatten();
        own.or_else(|| CarriedContext::of_request(batch.trace.as_deref()?))
    }

    fn of_attributes(event: &'a str) -> Option<CarriedContext<'a>> {
        // Most events have none, and every attempt checks this.
        OWN.find(event.as_bytes())?;
        let (mut parent, mut states) = (None, None);
        for member in RawJson::trusted(event).members() {
            match member.name {
                TRACEPARENT => parent = member.value.as_str(),
                TRACESTATE => states = member.value.as_str(),
                _ => {}
            }
        }
        Some(CarriedContext {
            context: TraceContext::parse(&parent?)?,
            state: Cow::Owned(state(states.as_deref()).unwrap_or_default()),
        })
    }
}

/// The share of the traces begun here that is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceShare(u64);

impl TraceShare {
    pub const ALL: TraceShare = TraceShare(u64::MAX);

    /// From 0, none, to 1, all.
    pub fn new(ratio: f64) -> TraceShare {
        // A float cannot count to the last trace; 1 must mean all.
        if ratio >= 1.0 {
            return TraceShare::ALL;
        }
        TraceShare((ratio.max(0.0) * u64::MAX as f64) as u64)
    }

    pub fn takes(self, trace: u128) -> bool {
        self == TraceShare::ALL || (trace as u64) < self.0
    }
}

/// The contexts of the events of one request.
#[derive(Debug, Default)]
pub struct GatheredContexts<'a> {
    first: Option<CarriedContext<'a>>,
    /// Contexts that differ from `first` and from each other, up to the limit for links.
    others: Vec<TraceContext>,
    /// Whether some event has no context.
    without: bool,
    sampled: bool,
}

impl<'a> GatheredContexts<'a> {
    pub fn add(&mut self, carried: Option<CarriedContext<'a>>) {
        let Some(carried) = carried else {
            self.without = true;
            return;
        };
        self.sampled |= carried.context.sampled();
        match &self.first {
            None => self.first = Some(carried),
            Some(first) => {
                let context = carried.context;
                if context != first.context
                    && self.others.len() < LINKS_MAX - 1
                    && !self.others.contains(&context)
                {
                    self.others.push(context);
                }
            }
        }
    }

    /// The context of all events, if they have the same.
    pub fn shared(&self) -> Option<&CarriedContext<'a>> {
        self.first
            .as_ref()
            .filter(|_| self.others.is_empty() && !self.without)
    }

    /// Whether any of the traces is sampled.
    pub fn sampled(&self) -> bool {
        self.sampled
    }

    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub fn contexts(&self) -> impl Iterator<Item = TraceContext> {
        let first = self.first.iter().map(|carried| carried.context);
        first.chain(self.others.iter().copied())
    }
}

/// The position of one of our spans in its trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanStanding {
    pub context: TraceContext,
    /// A span of the same trace.
    pub parent: Option<TraceContext>,
    /// The spans in which the events were produced.
    pub links: Vec<TraceContext>,
}

/// Derives the ids of our own spans for a log: the same at every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceIds {
    /// The log's random identity.
    pub log: u64,
}

impl TraceIds {
    /// The span of a publish request, by the position of its first event.
    pub fn of_publish(self, first: Position) -> u64 {
        self.id(&[1, first.0])
    }

    /// The context that a publish request without one begins.
    pub fn begin_trace(self, first: Position, share: TraceShare) -> TraceContext {
        let trace = wide(self.id(&[2, first.0]), self.id(&[3, first.0]));
        TraceContext {
            trace,
            span: self.of_publish(first),
            flags: if share.takes(trace) { SAMPLED } else { 0 },
        }
    }

    /// The span of an attempt whose events came with these contexts. `position` is that of its
    /// first event; `number` is the attempt's number.
    pub fn attempt(
        self,
        gathered: &GatheredContexts<'_>,
        of: SubscriptionId,
        position: Position,
        number: u32,
    ) -> SpanStanding {
        let words = |what: u64| [what, of.0, position.0, u64::from(number)];
        let span = self.id(&words(4));
        let trace = || wide(self.id(&words(5)), self.id(&words(6)));
        span_standing(gathered, span, trace)
    }

    /// The span of a publish request whose events or headers named these contexts.
    pub fn publish(self, gathered: &GatheredContexts<'_>, first: Position) -> SpanStanding {
        let begun = self.begin_trace(first, TraceShare::ALL);
        span_standing(gathered, begun.span, || begun.trace)
    }

    fn id(self, words: &[u64]) -> u64 {
        let mut z = self.log;
        for word in words {
            // SplitMix64, as for retry jitter: ids have to differ, not to be unpredictable.
            z = (z ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^= z >> 31;
        }
        // Zero means no span.
        z.max(1)
    }
}

fn wide(high: u64, low: u64) -> u128 {
    u128::from(high) << 64 | u128::from(low)
}

/// A span in the trace that all events share, or else in a new trace.
fn span_standing(gathered: &GatheredContexts<'_>, span: u64, trace: impl FnOnce() -> u128) -> SpanStanding {
    let links = gathered.contexts().collect();
    match gathered.shared() {
        Some(shared) => SpanStanding {
            context: TraceContext {
                span,
                ..shared.context
            },
            parent: Some(shared.context),
            links,
        },
        None => SpanStanding {
            context: TraceContext {
                trace: trace(),
                span,
                flags: SAMPLED,
            },
            parent: None,
            links,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{ByteSpan, EventRef};
    use crate::ids::TopicId;
    use crate::time::Timestamp;
    use proptest::prelude::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    const OTHER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

    #[test]
    fn traceparent_is_taken_as_the_standard_says() {
        let check = |text: &str, expected: Option<&str>| {
            let found = TraceContext::parse(text).map(|context| context.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        };
        check(PARENT, Some(PARENT));
        check(OTHER, Some(OTHER));
        // A later version may contain more; the known part is passed on.
        check(&format!("cc{}", &PARENT[2..]), Some(PARENT));
        check(&format!("cc{}-what-the-future", &PARENT[2..]), Some(PARENT));
        check(&format!("cc{}.what", &PARENT[2..]), None);
        check(&format!("{PARENT}-what"), None);
        check(&format!("ff{}", &PARENT[2..]), None);
        check(&PARENT.to_uppercase(), None);
        check(&PARENT[..54], None);
        check("00-00000000000000000000000000000000-00f067aa0ba902b7-01", None);
        check("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", None);
        check("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0x", None);
        check("00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None);
        check("00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01", None);
        // Flags without a meaning yet are not passed on.
        let flags = PARENT.replace("-01", "-ff");
        check(&flags, Some(&PARENT.replace("-01", "-03")));
        check("", None);
    }

    #[test]
    fn tracestate_is_taken_as_the_standard_says() {
        let check = |headers: &[&str], expected: Option<&str>| {
            assert_eq!(state(headers.iter().copied()).as_deref(), expected, "{headers:?}");
        };
        check(&[], Some(""));
        check(&["a=1"], Some("a=1"));
        check(&["a=1, b=2", "c@d=3 4"], Some("a=1,b=2,c@d=3 4"));
        check(&["a=1,,\t,b=2"], Some("a=1,b=2"));
        check(&["0fw529a3039@dt=FfAQAo"], Some("0fw529a3039@dt=FfAQAo"));
        for refused in [
            "a", "=1", "a=", "A=1", "a=1=2", "a=1,a=2", "a@b@c=1", "a=\u{1}", "a=é", "_a=1",
        ] {
            check(&[refused], None);
        }
        let many: Vec<String> = (0..33).map(|n| format!("k{n}=1")).collect();
        check(&[&many[..32].join(",")], Some(&many[..32].join(",")));
        check(&[&many.join(",")], None);
    }

    #[test]
    fn a_long_tracestate_loses_its_long_members_first_and_then_its_last() {
        let long = format!("long={}", "x".repeat(200));
        let short: Vec<String> = (0..25).map(|n| format!("key{n:02}={}", "y".repeat(13))).collect();
        let text = format!("{long},{}", short.join(","));
        let kept = state([text.as_str()]).unwrap();
        assert_eq!(kept, short.join(","));
        let text = format!("big={},{text}", "z".repeat(250));
        assert_eq!(state([text.as_str()]).unwrap(), short.join(","));
        let even: Vec<String> = (0..32).map(|n| format!("key{n:02}={}", "y".repeat(20))).collect();
        let kept = state([even.join(",").as_str()]).unwrap();
        assert_eq!(kept, even[..19].join(","));
        assert!(kept.len() <= STATE_BYTES_MAX);
    }

    fn batch(schema: EventSchema, trace: Option<&str>, events: &[&str]) -> PublishedBatch {
        let mut body = String::from("[");
        let mut refs = Vec::new();
        for event in events {
            let start = body.len();
            body.push_str(event);
            refs.push(EventRef {
                object: ByteSpan::new(start, body.len()),
                ..EventRef::default()
            });
            body.push(',');
        }
        PublishedBatch {
            topic: TopicId(1),
            schema,
            received: Timestamp::from_secs(1),
            publisher: "key1".into(),
            trace: trace.map(Into::into),
            replay: 0,
            hops: 0,
            body: body.into(),
            events: refs,
            matched: vec![Box::default()],
        }
    }

    #[test]
    fn an_event_says_it_better_than_its_request() {
        let check = |schema, request: Option<&str>, event: &str, expected: Option<(&str, &str)>| {
            let batch = batch(schema, request, &[event]);
            let found = CarriedContext::of_event(&batch, 0);
            let found = found.map(|carried| (carried.context.to_string(), carried.state.into_owned()));
            let expected = expected.map(|(parent, state)| (parent.to_owned(), state.to_owned()));
            assert_eq!(found, expected, "{schema:?} {request:?} {event}");
        };
        let own = format!(r#"{{"id":"1","traceparent":"{OTHER}","tracestate":"a=\"1\""}}"#);
        let inside = format!(r#"{{"id":"1","data":{{"traceparent":"{OTHER}"}}}}"#);
        let request = format!("{PARENT} r=1");
        use EventSchema::{CloudEvent, Custom, EventGrid};
        check(CloudEvent, None, r#"{"id":"1"}"#, None);
        check(CloudEvent, None, &own, Some((OTHER, "a=\"1\"")));
        check(CloudEvent, Some(&request), &own, Some((OTHER, "a=\"1\"")));
        check(CloudEvent, Some(&request), r#"{"id":"1"}"#, Some((PARENT, "r=1")));
        check(CloudEvent, Some(PARENT), &inside, Some((PARENT, "")));
        check(CloudEvent, None, &inside, None);
        // A malformed context is ignored, not refused.
        let wrong = r#"{"id":"1","traceparent":"00-1-2-00"}"#;
        check(CloudEvent, Some(&request), wrong, Some((PARENT, "r=1")));
        check(CloudEvent, None, r#"{"traceparent":5}"#, None);
        let state = format!(r#"{{"traceparent":"{OTHER}","tracestate":"nonsense"}}"#);
        check(CloudEvent, None, &state, Some((OTHER, "")));
        // Only CloudEvents have attributes.
        check(EventGrid, Some(PARENT), &own, Some((PARENT, "")));
        check(Custom, None, &own, None);
        // A value that an older version stored.
        check(EventGrid, Some("anything at all"), &own, None);
    }

    #[test]
    fn what_is_kept_of_headers_can_be_read_again() {
        assert_eq!(
            stored_context(PARENT, ["a=1", "b=2"]).unwrap(),
            format!("{PARENT} a=1,b=2")
        );
        assert_eq!(stored_context(PARENT, ["="]).as_deref(), Some(PARENT));
        assert_eq!(stored_context(PARENT, []).as_deref(), Some(PARENT));
        assert_eq!(stored_context("nonsense", ["a=1"]), None);
    }

    const IDS: TraceIds = TraceIds { log: 7 };

    fn attempt(carried: &[Option<&'static str>]) -> (SpanStanding, bool) {
        let mut gathered = GatheredContexts::default();
        for one in carried {
            gathered.add(one.and_then(CarriedContext::of_request));
        }
        let standing = IDS.attempt(&gathered, SubscriptionId(3), Position(9), 1);
        (standing, gathered.sampled())
    }

    #[test]
    fn an_attempt_joins_the_trace_that_its_events_share() {
        let parent = TraceContext::parse(PARENT).unwrap();
        for carried in [&[Some(PARENT)][..], &[Some(PARENT), Some(PARENT)]] {
            let (standing, sampled) = attempt(carried);
            assert!(sampled);
            assert_eq!(standing.parent, Some(parent));
            assert_eq!(standing.links, [parent]);
            let context = standing.context;
            assert_eq!((context.trace, context.flags), (parent.trace, 1));
            assert_ne!(context.span, parent.span);
        }
        assert!(!attempt(&[Some(OTHER)]).1);
    }

    #[test]
    fn an_attempt_for_several_traces_begins_its_own_and_names_them() {
        let (parent, other) = (
            TraceContext::parse(PARENT).unwrap(),
            TraceContext::parse(OTHER).unwrap(),
        );
        let (standing, sampled) = attempt(&[Some(PARENT), Some(OTHER), Some(PARENT)]);
        assert!(sampled);
        assert_eq!((standing.parent, standing.links), (None, vec![parent, other]));
        assert!(![parent.trace, other.trace].contains(&standing.context.trace));
        let (standing, _) = attempt(&[Some(PARENT), None]);
        assert_eq!((standing.parent, standing.links), (None, vec![parent]));
    }

    #[test]
    fn links_are_bounded() {
        let mut gathered = GatheredContexts::default();
        for span in 1..1000 {
            let context = TraceContext {
                trace: 1,
                span,
                flags: 0,
            };
            gathered.add(Some(CarriedContext {
                context,
                state: "".into(),
            }));
        }
        assert_eq!(gathered.contexts().count(), LINKS_MAX);
        assert_eq!(gathered.shared(), None);
    }

    #[test]
    fn a_share_of_the_traces_is_taken() {
        let taken = |ratio: f64| {
            let share = TraceShare::new(ratio);
            let all = (0..4000).map(Position);
            all.filter(|first| IDS.begin_trace(*first, share).sampled())
                .count()
        };
        assert_eq!(
            (taken(0.0), taken(1.0), taken(-1.0), taken(7.0)),
            (0, 4000, 0, 4000)
        );
        assert!((800..1200).contains(&taken(0.25)), "{}", taken(0.25));
        assert!(TraceShare::ALL.takes(u128::MAX));
    }

    // The attempts of events without a context are children of their publish request's span.
    #[test]
    fn a_trace_of_our_own_holds_the_publish_request_and_its_attempts() {
        let begun = IDS.begin_trace(Position(9), TraceShare::ALL);
        let published = IDS.publish(&GatheredContexts::default(), Position(9));
        assert_eq!(published.context, begun);
        assert_eq!((published.parent, published.links), (None, vec![]));
    }

    proptest! {
        #[test]
        fn ids_are_the_same_again_and_differ_from_all_others(log in any::<u64>(), of in any::<u64>(), position in any::<u64>(), number in 1u32..40) {
            let ids = TraceIds { log };
            let none = GatheredContexts::default();
            let at = |of, position, number| ids.attempt(&none, SubscriptionId(of), Position(position), number).context;
            let one = at(of, position, number);
            prop_assert_eq!(one, at(of, position, number));
            let others = [
                at(of, position, number + 1),
                at(of ^ 1, position, number),
                at(of, position ^ 1, number),
                ids.begin_trace(Position(position), TraceShare::ALL),
                TraceIds { log: log ^ 1 }.attempt(&none, SubscriptionId(of), Position(position), number).context,
            ];
            for other in others {
                prop_assert_ne!(one.span, other.span);
                prop_assert_ne!(one.trace, other.trace);
            }
            prop_assert_eq!(TraceContext::parse(&one.to_string()), Some(one));
        }

        #[test]
        fn any_text_is_taken_or_left_but_never_panics(text in ".{0,80}", states in prop::collection::vec("[ -~]{0,300}", 0..4)) {
            let _ = TraceContext::parse(&text);
            if let Some(state) = state(states.iter().map(String::as_str)) {
                prop_assert!(state.len() <= STATE_BYTES_MAX);
                prop_assert_eq!(super::state([state.as_str()]), Some(state.clone()));
            }
        }
    }
}
