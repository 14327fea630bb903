//! The recorder against a model in memory: after recording, truncation, deletion and restarts, both
//! give the same history.

mod support;

use postrider_core::ids::{Position, SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::GiveUpReason;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::recorder::{
    AcceptedRequest, AttemptDecision, AttemptFilter, BlobWritten, DeadLetterBlobLocation,
    DeliveryDisposition, DeliveryState, EndedDeliveries, EventHistory, EventPlace, EventQuery, EventRecorder,
    EventState, RecordingQueries, RetiredSubscription, RoutingVerdict, RoutingVerdicts, SubscriptionFate,
    TopicAudience,
};
use postrider_recorder::{Config, FlightRecorder};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::{SetClock, TestEvent, attempt, audience, batch, retry, run};

const TOPICS: u64 = 3;
const SUBSCRIPTIONS: u64 = 3;

#[derive(Clone, Debug)]
enum RecorderOp {
    /// For each event: id, type, subject, and the set of subscriptions that it matches.
    Publish {
        topic: u64,
        events: Vec<(u8, u8, u8, u8)>,
        /// Whether the first delivery is attempted before its acceptance is recorded.
        overtaken: bool,
    },
    Attempt {
        pick: u16,
        outcome: u8,
        decision: u8,
        /// Further deliveries of the same subscription in the request.
        more: u8,
    },
    End {
        pick: u16,
        disposition: u8,
    },
    Blob {
        pick: u16,
    },
    Retire {
        subscription: u64,
    },
    Tick {
        seconds: u16,
    },
    /// The latest file is truncated at a share of its length, and loses its index.
    Crash {
        cut: u16,
    },
    Restart,
}

fn op() -> impl Strategy<Value = RecorderOp> {
    let events = prop::collection::vec((0..6u8, 0..3u8, 0..3u8, 0..8u8), 1..5);
    let many = prop::collection::vec((0..6u8, 0..3u8, 0..3u8, 0..8u8), 30..33);
    let publish = |events| {
        (0..TOPICS, events, any::<bool>()).prop_map(|(topic, events, overtaken)| RecorderOp::Publish {
            topic,
            events,
            overtaken,
        })
    };
    prop_oneof![
        6 => publish(events.boxed()),
        1 => publish(many.boxed()),
        10 => (any::<u16>(), 0..4u8, 0..6u8, 0..6u8).prop_map(|(pick, outcome, decision, more)| RecorderOp::Attempt {
            pick, outcome, decision, more
        }),
        2 => (any::<u16>(), 0..4u8).prop_map(|(pick, disposition)| RecorderOp::End { pick, disposition }),
        1 => any::<u16>().prop_map(|pick| RecorderOp::Blob { pick }),
        1 => (0..TOPICS * SUBSCRIPTIONS).prop_map(|subscription| RecorderOp::Retire { subscription }),
        2 => (0..40u16).prop_map(|seconds| RecorderOp::Tick { seconds }),
        1 => any::<u16>().prop_map(|cut| RecorderOp::Crash { cut }),
        1 => Just(RecorderOp::Restart),
    ]
}

/// A record of an attempt, an end or a blob about one delivery.
#[derive(Clone, Debug)]
enum DeliveryRecord {
    Attempt(u32, Outcome, AttemptDecision),
    End(DeliveryDisposition),
    Blob,
    Retired(Timestamp, GiveUpReason),
}

#[derive(Clone, Debug)]
enum RecordedItem {
    Accepted(AcceptedRequest),
    Said(Vec<(u64, Option<EventPlace>, DeliveryRecord)>),
}

/// A record and the segment that it was written to.
struct ModelRecord {
    what: RecordedItem,
    segment: PathBuf,
    end: u64,
}

struct RecorderModelDelivery {
    subscription: u64,
    place: EventPlace,
    attempts: u32,
    ended: bool,
}

struct RecorderModel {
    directory: tempfile::TempDir,
    config: Config,
    clock: Arc<SetClock>,
    recorder: Option<Arc<FlightRecorder>>,
    audiences: Vec<Arc<TopicAudience>>,
    kept: Vec<ModelRecord>,
    deliveries: Vec<RecorderModelDelivery>,
    next: u64,
}

impl RecorderModel {
    fn new() -> RecorderModel {
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            keep: Duration::from_secs(400),
            bytes_max: 40 << 10,
            segment_bytes: 4 << 10,
            segment_span: Duration::from_secs(60),
            ..Config::new(directory.path().to_owned())
        };
        let mut world = RecorderModel {
            directory,
            config,
            clock: SetClock::new(),
            recorder: None,
            audiences: (0..TOPICS)
                .map(|t| audience(t, t * SUBSCRIPTIONS, SUBSCRIPTIONS))
                .collect(),
            kept: Vec::new(),
            deliveries: Vec::new(),
            next: 0,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let recorder = FlightRecorder::open(self.config.clone(), self.clock.clone()).unwrap();
        recorder.wait_indexed();
        self.recorder = Some(recorder);
    }

    fn recorder(&self) -> &FlightRecorder {
        self.recorder.as_ref().unwrap()
    }

    fn latest_segment(&self) -> Option<(PathBuf, u64)> {
        let files = std::fs::read_dir(self.directory.path()).unwrap();
        let segments = files
            .map(|f| f.unwrap().path())
            .filter(|p| p.extension().is_some_and(|e| e == "rec"));
        segments.max().map(|path| {
            let len = std::fs::metadata(&path).unwrap().len();
            (path, len)
        })
    }

    /// Notes the segment of the latest record.
    fn keep(&mut self, what: RecordedItem) {
        self.recorder().flush();
        let (segment, end) = self.latest_segment().expect("something was recorded");
        self.kept.push(ModelRecord { what, segment, end });
        self.forget();
        self.clock.advance(Duration::from_millis(1));
    }

    /// Forgets records that are no longer on disk.
    fn forget(&mut self) {
        let mut lens = BTreeMap::new();
        self.kept.retain(|kept| {
            let len = *lens
                .entry(kept.segment.clone())
                .or_insert_with(|| std::fs::metadata(&kept.segment).map_or(0, |m| m.len()));
            kept.end <= len
        });
    }

    fn pick(&self, pick: u16) -> Option<usize> {
        let open: Vec<usize> = (0..self.deliveries.len())
            .filter(|d| !self.deliveries[*d].ended)
            .collect();
        // Usually the latest ones.
        (!open.is_empty()).then(|| open[open.len() - 1 - pick as usize % open.len()])
    }

    fn apply(&mut self, op: &RecorderOp) {
        let now = self.clock.now();
        match op {
            RecorderOp::Publish {
                topic,
                events,
                overtaken,
            } => self.publish(*topic, events, *overtaken),
            RecorderOp::Attempt {
                pick,
                outcome,
                decision,
                more,
            } => {
                let Some(first) = self.pick(*pick) else { return };
                let subscription = self.deliveries[first].subscription;
                let mut with: Vec<usize> = (0..self.deliveries.len())
                    .filter(|d| {
                        let delivery = &self.deliveries[*d];
                        *d != first && !delivery.ended && delivery.subscription == subscription
                    })
                    .take(*more as usize)
                    .collect();
                with.push(first);
                self.attempt(&with, *outcome, *decision);
            }
            RecorderOp::End { pick, disposition } => {
                let Some(which) = self.pick(*pick) else { return };
                let disposition = [
                    DeliveryDisposition::DeliveredLate,
                    DeliveryDisposition::Delivered,
                    DeliveryDisposition::DeadLettered(GiveUpReason::TimeToLiveExceeded),
                    DeliveryDisposition::Dropped(GiveUpReason::TimeToLiveExceeded),
                ][*disposition as usize];
                let delivery = &mut self.deliveries[which];
                delivery.ended = true;
                let (subscription, place) = (delivery.subscription, delivery.place);
                self.recorder().ended(EndedDeliveries {
                    subscription: SubscriptionId(subscription),
                    events: vec![place],
                    at: now,
                    disposition,
                });
                self.keep(RecordedItem::Said(vec![(
                    subscription,
                    Some(place),
                    DeliveryRecord::End(disposition),
                )]));
            }
            RecorderOp::Blob { pick } => {
                let Some(which) = self.pick(*pick) else { return };
                let RecorderModelDelivery {
                    subscription, place, ..
                } = self.deliveries[which];
                self.recorder().blob(BlobWritten {
                    subscription: SubscriptionId(subscription),
                    at: now,
                    blob: Arc::new(DeadLetterBlobLocation {
                        account: "a".into(),
                        container: "c".into(),
                        path: "p".into(),
                    }),
                    letters: vec![place],
                });
                self.keep(RecordedItem::Said(vec![(
                    subscription,
                    Some(place),
                    DeliveryRecord::Blob,
                )]));
            }
            RecorderOp::Retire { subscription } => {
                self.recorder().retired(RetiredSubscription {
                    subscription: SubscriptionId(*subscription),
                    at: now,
                    reason: GiveUpReason::SubscriptionGone,
                });
                let said = DeliveryRecord::Retired(now, GiveUpReason::SubscriptionGone);
                self.keep(RecordedItem::Said(vec![(*subscription, None, said)]));
            }
            RecorderOp::Tick { seconds } => self.clock.advance(Duration::from_secs(u64::from(*seconds))),
            RecorderOp::Restart => {
                self.recorder = None;
                self.open();
            }
            RecorderOp::Crash { cut } => {
                self.recorder = None;
                if let Some((path, len)) = self.latest_segment() {
                    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
                    file.set_len(len * u64::from(*cut) / u64::from(u16::MAX)).unwrap();
                    let _ = std::fs::remove_file(path.with_extension("idx"));
                }
                self.open();
                self.forget();
            }
        }
    }

    fn publish(&mut self, topic: u64, events: &[(u8, u8, u8, u8)], overtaken: bool) {
        let audience = self.audiences[topic as usize].clone();
        let ids: Vec<SubscriptionId> = audience.subscriptions.iter().map(|s| s.id).collect();
        let of = |bits: u8| -> Box<[SubscriptionId]> {
            ids.iter()
                .enumerate()
                .filter(|(i, _)| bits & 1 << i != 0)
                .map(|(_, id)| *id)
                .collect()
        };
        let verdicts = |bits: u8| -> Box<[RoutingVerdict]> {
            (0..SUBSCRIPTIONS)
                .map(|i| {
                    if bits & 1 << i != 0 {
                        RoutingVerdict::Matched
                    } else {
                        RoutingVerdict::EventType
                    }
                })
                .collect()
        };
        let described: Vec<TestEvent> = events
            .iter()
            .map(|(id, event_type, subject, bits)| TestEvent {
                id: format!("e{id}"),
                event_type: format!("t{event_type}"),
                subject: format!("s{subject}/x"),
                matched: u32::from(*bits),
            })
            .collect();
        let stored = events.iter().any(|event| event.3 != 0);
        let first = stored.then_some(Position(self.next));
        let sets = (0..8).map(of).collect();
        let accepted = AcceptedRequest {
            first,
            batch: Arc::new(batch(topic, self.clock.now(), &described, sets)),
            audience,
            verdicts: RoutingVerdicts {
                lists: (0..8).map(verdicts).collect(),
                of_event: events.iter().map(|event| u32::from(event.3)).collect(),
            },
        };
        let from = self.deliveries.len();
        if let Some(first) = first {
            self.next += events.len() as u64;
            for (index, event) in events.iter().enumerate() {
                for id in of(event.3) {
                    self.deliveries.push(RecorderModelDelivery {
                        subscription: id.0,
                        place: EventPlace {
                            first,
                            index: index as u32,
                        },
                        attempts: 0,
                        ended: false,
                    });
                }
            }
        }
        if overtaken && from < self.deliveries.len() {
            self.attempt(&[from], 0, 0);
        }
        self.recorder().accepted(accepted.clone());
        self.keep(RecordedItem::Accepted(accepted));
    }

    fn attempt(&mut self, deliveries: &[usize], outcome: u8, decision: u8) {
        let now = self.clock.now();
        let outcome = [
            Outcome::Success,
            Outcome::Busy,
            Outcome::TimedOut,
            Outcome::NotFound,
        ][outcome as usize];
        let subscription = self.deliveries[deliveries[0]].subscription;
        let audience = &self.audiences[(subscription / SUBSCRIPTIONS) as usize];
        let named = audience.subscriptions[(subscription % SUBSCRIPTIONS) as usize].clone();
        let (mut runs, mut said) = (Vec::new(), Vec::new());
        for (i, which) in deliveries.iter().enumerate() {
            let delivery = &mut self.deliveries[*which];
            delivery.attempts += 1;
            // Events of one request may have different results.
            let decision = match (outcome, (decision + i as u8) % 6) {
                (Outcome::Success, _) => AttemptDecision::Done,
                (_, 0) => AttemptDecision::DeadLetter(GiveUpReason::AttemptsExhausted),
                (_, 1) => AttemptDecision::Drop(GiveUpReason::ClientError),
                _ => retry(now, delivery.attempts),
            };
            delivery.ended = !matches!(decision, AttemptDecision::Retry { .. });
            let EventPlace { first, index } = delivery.place;
            runs.push(run(first.0, index, 1, delivery.attempts, now, decision));
            let attempt = DeliveryRecord::Attempt(delivery.attempts, outcome, decision);
            said.push((subscription, Some(delivery.place), attempt));
        }
        let endpoint: Arc<str> = format!("https://receiver-{subscription}.example/hook").into();
        self.recorder()
            .attempted(attempt(&named, &endpoint, now, outcome, runs));
        self.keep(RecordedItem::Said(said));
    }

    /// The expected histories of all events, the latest first.
    fn expected(&self) -> Vec<ExpectedHistory> {
        let mut told = Vec::new();
        for kept in self.kept.iter().rev() {
            let RecordedItem::Accepted(accepted) = &kept.what else {
                continue;
            };
            for index in (0..accepted.batch.events.len()).rev() {
                told.push(self.expect(accepted, index));
            }
        }
        told
    }

    fn expect(&self, accepted: &AcceptedRequest, index: usize) -> ExpectedHistory {
        let place = accepted.first.map(|first| EventPlace {
            first,
            index: index as u32,
        });
        let object = accepted.batch.object(index);
        let member = |name: &str| {
            let from = object.find(&format!("\"{name}\":\"")).unwrap() + name.len() + 4;
            object[from..].split('"').next().unwrap().to_owned()
        };
        let mut deliveries = Vec::new();
        for id in accepted.batch.matched(index) {
            let mut delivery = ExpectedDelivery {
                subscription: id.0,
                name: format!("sub-{id}"),
                attempts: Vec::new(),
                end: None,
                state: DeliveryState::Pending,
                blob: false,
            };
            let mut retired = None;
            for kept in &self.kept {
                let RecordedItem::Said(said) = &kept.what else {
                    continue;
                };
                for (of, at, said) in said.iter().filter(|(of, _, _)| *of == id.0) {
                    match said {
                        DeliveryRecord::Retired(when, reason) if *when >= accepted.batch.received => {
                            retired = Some(DeliveryDisposition::Dropped(*reason));
                        }
                        _ if *at != place || *of != id.0 => {}
                        DeliveryRecord::Attempt(number, outcome, decision) => {
                            delivery.attempts.push((*number, *outcome, *decision));
                            delivery.end = match decision {
                                AttemptDecision::Done => Some(DeliveryDisposition::Delivered),
                                AttemptDecision::DeadLetter(reason) => {
                                    Some(DeliveryDisposition::DeadLettered(*reason))
                                }
                                AttemptDecision::Drop(reason) => Some(DeliveryDisposition::Dropped(*reason)),
                                AttemptDecision::Retry { .. } => delivery.end,
                            };
                        }
                        DeliveryRecord::End(disposition) => delivery.end = Some(*disposition),
                        DeliveryRecord::Blob => delivery.blob = true,
                        DeliveryRecord::Retired(..) => {}
                    }
                }
            }
            delivery.end = delivery.end.or(retired);
            // The location of the blob is reported with the end.
            delivery.blob &= delivery.end.is_some();
            delivery.state = match (delivery.end, delivery.attempts.is_empty()) {
                (Some(end), _) => end.state(),
                (None, true) => DeliveryState::Pending,
                (None, false) => DeliveryState::Retrying,
            };
            deliveries.push(delivery);
        }
        ExpectedHistory {
            id: member("id"),
            topic: accepted.audience.topic,
            event_type: member("eventType"),
            subject: member("subject"),
            accepted: accepted.batch.received,
            place,
            state: EventState::of(deliveries.iter().map(|d| d.state)),
            refused: (0..SUBSCRIPTIONS)
                .map(|i| accepted.audience.topic.0 * SUBSCRIPTIONS + i)
                .filter(|id| !accepted.batch.matched(index).contains(&SubscriptionId(*id)))
                .collect(),
            deliveries,
        }
    }

    fn check_traces(&self, expected: &[ExpectedHistory]) {
        for id in (0..6).map(|id| format!("e{id}")) {
            let told: Vec<ExpectedHistory> = self
                .recorder()
                .trace(&id)
                .iter()
                .map(ExpectedHistory::of)
                .collect();
            let of_id = expected.iter().filter(|told| told.id == id).take(32);
            similar(&told, &of_id.cloned().collect::<Vec<_>>());
        }
    }

    fn check_search(&self, expected: &[ExpectedHistory], query: &EventQuery, budget: u64) {
        let mut found = Vec::new();
        let mut query = query.clone();
        loop {
            let page = self.recorder().search_within(&query, budget);
            assert!(page.events.len() <= query.limit);
            found.extend(page.events);
            match page.cursor {
                None => break,
                // The cursor takes the same path as in the API: through its text.
                Some(cursor) => query.cursor = Some(cursor.to_string().parse().unwrap()),
            }
        }
        let wanted: Vec<&ExpectedHistory> = expected.iter().filter(|told| told.fits(&query)).collect();
        let line = |told: &&ExpectedHistory| {
            let deliveries: Vec<_> = told
                .deliveries
                .iter()
                .map(|d| {
                    let listed = query
                        .attempts
                        .filter(|_| query.subscription.is_none_or(|id| id.0 == d.subscription));
                    let listed: Vec<u32> = d
                        .attempts
                        .iter()
                        .filter(|a| listed.is_some_and(|wanted| wanted.takes(a.1)))
                        .map(|a| a.0)
                        .collect();
                    (d.subscription, d.state, d.attempts.last().map(|a| a.1), listed)
                })
                .collect();
            let attempts: usize = told.deliveries.iter().map(|d| d.attempts.len()).sum();
            format!(
                "{} {} {:?} {attempts} {deliveries:?}",
                told.id, told.accepted, told.state
            )
        };
        let wanted: Vec<String> = wanted.iter().map(line).collect();
        let found: Vec<String> = found
            .iter()
            .map(|event| {
                let deliveries: Vec<_> = event
                    .subscriptions
                    .iter()
                    .map(|d| {
                        let listed: Vec<u32> = d.attempts.iter().map(|a| a.number).collect();
                        (d.id.0, d.state, d.last_outcome, listed)
                    })
                    .collect();
                format!(
                    "{} {} {:?} {} {deliveries:?}",
                    event.id, event.accepted, event.state, event.attempts
                )
            })
            .collect();
        assert_eq!(found, wanted, "{query:?}");
    }
}

fn similar(told: &[ExpectedHistory], expected: &[ExpectedHistory]) {
    assert_eq!(told.len(), expected.len(), "{told:#?} {expected:#?}");
    for (told, expected) in told.iter().zip(expected) {
        assert_eq!(told, expected);
    }
}

/// The compared parts of a history.
#[derive(Clone, Debug, PartialEq)]
struct ExpectedHistory {
    id: String,
    topic: TopicId,
    event_type: String,
    subject: String,
    accepted: Timestamp,
    place: Option<EventPlace>,
    state: EventState,
    deliveries: Vec<ExpectedDelivery>,
    refused: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq)]
struct ExpectedDelivery {
    subscription: u64,
    name: String,
    attempts: Vec<(u32, Outcome, AttemptDecision)>,
    end: Option<DeliveryDisposition>,
    state: DeliveryState,
    blob: bool,
}

impl ExpectedHistory {
    fn of(story: &EventHistory) -> ExpectedHistory {
        let (mut deliveries, mut refused) = (Vec::new(), Vec::new());
        assert_eq!(story.topic_name, format!("topic-{}", story.topic));
        for one in &story.subscriptions {
            match &one.fate {
                SubscriptionFate::Refused(predicate) => {
                    assert_eq!(predicate.verdict, RoutingVerdict::EventType);
                    assert_eq!(predicate.text, r#"eventType in ["t0"]"#);
                    refused.push(one.id.0);
                }
                SubscriptionFate::Matched(delivery) => {
                    for attempt in &delivery.attempts {
                        assert_eq!(
                            attempt.endpoint,
                            format!("https://receiver-{}.example/hook", one.id)
                        );
                    }
                    deliveries.push(ExpectedDelivery {
                        subscription: one.id.0,
                        name: one.name.clone(),
                        attempts: delivery
                            .attempts
                            .iter()
                            .map(|a| (a.number, a.outcome, a.decision))
                            .collect(),
                        end: delivery.end.as_ref().map(|end| end.disposition),
                        state: delivery.state,
                        blob: delivery.end.as_ref().is_some_and(|end| end.blob.is_some()),
                    });
                }
            }
        }
        ExpectedHistory {
            id: story.id.clone(),
            topic: story.topic,
            event_type: story.event_type.clone(),
            subject: story.subject.clone(),
            accepted: story.accepted,
            place: story.place,
            state: story.state,
            deliveries,
            refused,
        }
    }

    fn fits(&self, query: &EventQuery) -> bool {
        let of: Vec<&ExpectedDelivery> = self
            .deliveries
            .iter()
            .filter(|d| query.subscription.is_none_or(|id| id.0 == d.subscription))
            .collect();
        query.id.as_ref().is_none_or(|id| *id == self.id)
            && query.topic.is_none_or(|topic| topic == self.topic)
            && query
                .event_type
                .as_ref()
                .is_none_or(|wanted| *wanted == self.event_type)
            && query
                .subject
                .as_ref()
                .is_none_or(|prefix| self.subject.starts_with(prefix))
            && query.since.is_none_or(|since| self.accepted >= since)
            && query.until.is_none_or(|until| self.accepted < until)
            && (query.subscription.is_none() || !of.is_empty())
            && query.state.is_none_or(|state| {
                of.iter().any(|d| EventState::All(d.state) == state)
                    || (query.subscription.is_none() && self.state == state)
            })
            && query
                .outcome
                .is_none_or(|outcome| of.iter().any(|d| d.attempts.iter().any(|a| a.1 == outcome)))
            && query
                .attempts
                .is_none_or(|wanted| of.iter().any(|d| d.attempts.iter().any(|a| wanted.takes(a.1))))
    }
}

fn query() -> impl Strategy<Value = (EventQuery, u64)> {
    let rarely = |n: std::ops::Range<u64>| prop::option::weighted(0.25, n);
    (
        (
            rarely(0..6),
            rarely(0..TOPICS),
            rarely(0..TOPICS * SUBSCRIPTIONS),
            rarely(0..3),
            rarely(0..4),
        ),
        (
            rarely(0..8),
            rarely(0..4),
            rarely(0..3),
            rarely(0..600),
            rarely(0..600),
        ),
        1..20usize,
        prop_oneof![Just(1u64), 1_000..100_000u64, Just(postrider_recorder::BUDGET)],
    )
        .prop_map(
            |((id, topic, subscription, event_type, subject), rest, limit, budget)| {
                let (state, outcome, attempts, since, until) = rest;
                let filters = [
                    AttemptFilter::All,
                    AttemptFilter::Failed,
                    AttemptFilter::Outcome(Outcome::Busy),
                ];
                let outcomes = [
                    Outcome::Success,
                    Outcome::Busy,
                    Outcome::TimedOut,
                    Outcome::NotFound,
                ];
                let at = |seconds: u64| Timestamp::from_nanos(support::EPOCH) + Duration::from_secs(seconds);
                let query = EventQuery {
                    id: id.map(|id| format!("e{id}")),
                    topic: topic.map(TopicId),
                    subscription: subscription.map(SubscriptionId),
                    event_type: event_type.map(|t| format!("t{t}")),
                    subject: subject.map(|s| if s == 3 { "s".to_owned() } else { format!("s{s}/") }),
                    state: state.map(|s| EventState::ALL[s as usize]),
                    outcome: outcome.map(|o| outcomes[o as usize]),
                    attempts: attempts.map(|a| filters[a as usize]),
                    since: since.map(at),
                    until: until.map(at),
                    cursor: None,
                    limit,
                };
                (query, budget)
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_recorder_tells_what_is_left_of_what_it_was_told(
        ops in prop::collection::vec(op(), 1..150),
        queries in prop::collection::vec(query(), 12),
    ) {
        let mut world = RecorderModel::new();
        for (number, op) in ops.iter().enumerate() {
            world.apply(op);
            if number % 40 == 39 || matches!(op, RecorderOp::Crash { .. }) {
                let expected = world.expected();
                world.check_traces(&expected);
            }
        }
        for _ in 0..2 {
            let expected = world.expected();
            world.check_traces(&expected);
            for (query, budget) in &queries {
                world.check_search(&expected, query, *budget);
            }
            // The same from files alone.
            world.apply(&RecorderOp::Restart);
        }
    }
}

/// A receiver may have answered before the publisher's own task has recorded the acceptance; a
/// segment may end in between. Publishes until that has happened.
#[test]
fn an_attempt_at_the_end_of_the_segment_before_is_found() {
    let mut world = RecorderModel::new();
    let straddles = |world: &RecorderModel| {
        let pairs = world.kept.windows(2);
        let straddles = |pair: &&[ModelRecord]| {
            matches!(
                (&pair[0].what, &pair[1].what),
                (RecordedItem::Said(_), RecordedItem::Accepted(_))
            ) && pair[0].segment != pair[1].segment
        };
        pairs.filter(straddles).count()
    };
    for number in 0..400usize {
        // Lengths vary, so that segments end at different places.
        let events = vec![(0, 0, 0, 1); 1 + number % 3];
        world.publish(0, &events, true);
        if straddles(&world) == 2 {
            break;
        }
    }
    assert_eq!(straddles(&world), 2);
    let expected = world.expected();
    world.check_traces(&expected);
    let query = EventQuery {
        limit: 7,
        ..EventQuery::default()
    };
    world.check_search(&expected, &query, postrider_recorder::BUDGET);
}
