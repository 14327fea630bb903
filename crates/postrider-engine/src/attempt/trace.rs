//! The trace context of an attempt: what is sent to the receiver, and the span that is exported.

use super::{DeliveryMethod, DeliveryPlan};
use http::header::{HeaderName, HeaderValue};
use postrider_core::event::EventSchema;
use postrider_core::json::RawJson;
use postrider_core::subscription::{InputMapping, Topic};
use postrider_core::trace::{
    CarriedContext, GatheredContexts, SpanStanding, TraceContext, TraceIds, TraceShare,
};
use postrider_core::{envelope, event::PublishedBatch, trace};
use postrider_store::Claim;
use std::borrow::Cow;
use std::sync::Arc;

const TRACEPARENT: HeaderName = HeaderName::from_static(trace::TRACEPARENT);
const TRACESTATE: HeaderName = HeaderName::from_static(trace::TRACESTATE);

/// The most event ids that a span names.
pub const IDS_MAX: usize = 16;
/// A longer id is truncated.
const ID_BYTES_MAX: usize = 128;

/// The tracing of one attempt.
#[derive(Debug, Default)]
pub struct AttemptTracing {
    /// The trace context that the receiver gets, with its `tracestate`.
    pub told: Option<(TraceContext, Box<str>)>,
    /// The span to export; none if this trace is not exported.
    pub span: Option<Box<AttemptSpan>>,
}

/// The parts of an attempt's span that are known before it ends.
#[derive(Clone, Debug)]
pub struct AttemptSpan {
    pub standing: SpanStanding,
    pub state: Box<str>,
    pub topic: Arc<Topic>,
    pub events: usize,
    /// The ids of the first events.
    pub ids: Vec<Box<str>>,
}

impl DeliveryPlan {
    /// Derives the tracing of an attempt for these claims. `exported` is set if spans are exported;
    /// its value is the share of the traces begun here that are.
    pub fn traced(&self, claims: &[Claim], exported: Option<TraceShare>) -> AttemptTracing {
        let ids = TraceIds { log: self.log };
        let mut gathered = GatheredContexts::default();
        let mut begun = None;
        let mut last = None;
        for claim in claims {
            let (batch, first) = (&claim.entry.batch, claim.entry.first);
            // Only CloudEvents carry their own context; other events of one request share the
            // request's context.
            if batch.schema != EventSchema::CloudEvent && last == Some(first) {
                continue;
            }
            last = Some(first);
            let carried = CarriedContext::of_event(batch, claim.index as usize);
            let carried = carried.or_else(|| {
                let context = ids.begin_trace(first, exported?);
                begun = Some(context);
                Some(CarriedContext {
                    context,
                    state: Cow::Borrowed(""),
                })
            });
            gathered.add(carried);
        }
        let (Some(first), Some(_), true) = (claims.first(), exported, gathered.sampled()) else {
            // Our span is not exported, so the receiver's span becomes a direct child of the
            // producer's.
            let told = gathered.shared();
            return AttemptTracing {
                told: told.map(|shared| (shared.context, shared.state.as_ref().into())),
                span: None,
            };
        };
        let number = first.attempts_made + 1;
        let mut standing = ids.attempt(&gathered, self.subscription.id, first.position(), number);
        if begun.is_some() && standing.parent == begun {
            // The parent is our own span of the publish request: there is no producer to link to.
            standing.links.clear();
        }
        let state: Box<str> = gathered.shared().map_or("", |shared| &shared.state).into();
        let mapping = self.topic.topic.mapping.as_ref();
        let named = claims.iter().take(IDS_MAX);
        let named = named.filter_map(|claim| event_id(&claim.entry.batch, claim.index as usize, mapping));
        AttemptTracing {
            told: Some((standing.context, state.clone())),
            span: Some(Box::new(AttemptSpan {
                standing,
                state,
                topic: self.topic.topic.clone(),
                events: claims.len(),
                ids: named.collect(),
            })),
        }
    }

    /// Adds the trace context to the headers, unless the subscription sets those headers itself.
    pub(super) fn tell(&self, traced: &AttemptTracing, more: &mut Vec<(HeaderName, HeaderValue)>) {
        let Some((context, state)) = &traced.told else {
            return;
        };
        // For a broker, headers become message properties, which only the subscription chooses.
        if !matches!(self.way, DeliveryMethod::Plain | DeliveryMethod::Relay { .. })
            || self.sets(&TRACEPARENT)
        {
            return;
        }
        let header = HeaderValue::try_from(context.to_string());
        more.push((TRACEPARENT, header.expect("digits fit a header")));
        if !state.is_empty()
            && !self.sets(&TRACESTATE)
            && let Ok(state) = HeaderValue::from_str(state)
        {
            more.push((TRACESTATE, state));
        }
    }

    /// Whether the subscription sets this header itself.
    fn sets(&self, name: &HeaderName) -> bool {
        self.headers.contains_key(name) || self.dynamic.iter().any(|(known, _)| known == name)
    }
}

/// The event's id, truncated.
pub fn event_id(batch: &PublishedBatch, index: usize, mapping: Option<&InputMapping>) -> Option<Box<str>> {
    let object = RawJson::trusted(batch.object(index));
    let id = match batch.schema {
        EventSchema::EventGrid | EventSchema::CloudEvent => object.get("id")?,
        EventSchema::Custom => envelope::path(object, mapping?.id.source_field.as_deref()?)?,
    };
    let id = id.as_str()?;
    let end = (0..=ID_BYTES_MAX.min(id.len()))
        .rev()
        .find(|at| id.is_char_boundary(*at))?;
    Some(id[..end].into())
}
