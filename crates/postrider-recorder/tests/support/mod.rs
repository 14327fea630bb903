//! Test data to record.

#![allow(dead_code, reason = "each of the programs that share this uses a part of it")]

use postrider_core::event::{ByteSpan, EventRef, EventSchema, PublishedBatch};
use postrider_core::filter::EventFilter;
use postrider_core::ids::{Position, SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::subscription::{Destination, Subscription, WebHook};
use postrider_core::time::{Clock, Sleep, Timestamp};
use postrider_engine::recorder::{
    AcceptedRequest, AttemptDecision, AttemptedRequest, EventPlace, EventRun, RetryTimeRule, RoutingVerdicts,
    TopicAudience,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

pub const EPOCH: i64 = 1_700_000_000_000_000_000;

/// A clock that shows the time it is set to.
pub struct SetClock(AtomicI64);

impl SetClock {
    pub fn new() -> Arc<SetClock> {
        Arc::new(SetClock(AtomicI64::new(EPOCH)))
    }

    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as i64, Relaxed);
    }
}

impl Clock for SetClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_nanos(self.0.load(Relaxed))
    }

    fn sleep_until(&self, _: Timestamp) -> Sleep<'_> {
        Box::pin(std::future::pending())
    }
}

pub fn subscription(id: u64, topic: u64) -> Arc<Subscription> {
    Arc::new(Subscription {
        filter: EventFilter {
            included_event_types: Some(vec!["t0".to_owned()]),
            ..EventFilter::default()
        },
        created: Timestamp::from_nanos(EPOCH),
        ..Subscription::new(
            SubscriptionId(id),
            TopicId(topic),
            format!("sub-{id}"),
            Destination::WebHook(WebHook::new(format!(
                "https://receiver-{id}.example/hook?code=secret"
            ))),
        )
    })
}

/// A topic with this many subscriptions, whose ids are consecutive.
pub fn audience(topic: u64, first: u64, count: u64) -> Arc<TopicAudience> {
    Arc::new(TopicAudience {
        topic: TopicId(topic),
        name: format!("topic-{topic}"),
        full_id: format!(
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/topics/topic-{topic}"
        ),
        domain: false,
        mapping: None,
        subscriptions: (first..first + count).map(|id| subscription(id, topic)).collect(),
    })
}

pub struct TestEvent {
    pub id: String,
    pub event_type: String,
    pub subject: String,
    /// The index of its matched set.
    pub matched: u32,
}

pub fn batch(
    topic: u64,
    at: Timestamp,
    events: &[TestEvent],
    matched: Vec<Box<[SubscriptionId]>>,
) -> PublishedBatch {
    let mut body = String::from("[");
    let mut refs = Vec::with_capacity(events.len());
    for event in events {
        if body.len() > 1 {
            body.push(',');
        }
        let start = body.len();
        body += &format!(
            r#"{{"id":"{}","subject":"{}","eventType":"{}","eventTime":"2030-01-01T00:00:00Z","data":{{"n":1}},"dataVersion":"1"}}"#,
            event.id, event.subject, event.event_type
        );
        refs.push(EventRef {
            object: ByteSpan::new(start, body.len()),
            matched: event.matched,
            ..EventRef::default()
        });
    }
    body.push(']');
    PublishedBatch {
        topic: TopicId(topic),
        schema: EventSchema::EventGrid,
        received: at,
        publisher: "key".into(),
        trace: None,
        replay: 0,
        hops: 0,
        body: body.into(),
        events: refs,
        matched,
    }
}

/// A single event for all subscriptions of the audience.
pub fn one(audience: &Arc<TopicAudience>, number: u64, at: Timestamp) -> AcceptedRequest {
    let event = TestEvent {
        id: format!("event-{number:012}"),
        event_type: format!("Type.{}", number % 7),
        subject: format!("orders/{}/{number}", number % 13),
        matched: 0,
    };
    let all = audience.subscriptions.iter().map(|s| s.id).collect();
    AcceptedRequest {
        first: Some(Position(number)),
        batch: Arc::new(batch(audience.topic.0, at, &[event], vec![all])),
        audience: audience.clone(),
        verdicts: RoutingVerdicts::default(),
    }
}

pub fn attempt(
    subscription: &Arc<Subscription>,
    endpoint: &Arc<str>,
    at: Timestamp,
    outcome: Outcome,
    runs: Vec<EventRun>,
) -> AttemptedRequest {
    AttemptedRequest {
        subscription: subscription.clone(),
        endpoint: endpoint.clone(),
        begun: at,
        ended: at + Duration::from_millis(3),
        outcome,
        status: match outcome {
            Outcome::Success => Some(200),
            Outcome::Busy => Some(503),
            _ => None,
        },
        timings: None,
        answer: None,
        failure: None,
        span: None,
        runs,
    }
}

pub fn run(
    first: u64,
    index: u32,
    count: u32,
    number: u32,
    at: Timestamp,
    decision: AttemptDecision,
) -> EventRun {
    EventRun {
        start: EventPlace {
            first: Position(first),
            index,
        },
        count,
        number,
        since: at,
        decision,
    }
}

pub fn retry(at: Timestamp, number: u32) -> AttemptDecision {
    AttemptDecision::Retry {
        at: at + Duration::from_secs(10),
        why: RetryTimeRule::Schedule {
            after: number,
            wait: Duration::from_secs(10),
        },
    }
}
