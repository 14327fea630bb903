//! Reports deliveries to the recorder.

use super::Dispatcher;
use crate::attempt::trace::AttemptSpan;
use crate::attempt::{self, DeliveryPlan};
use crate::deliver::{AttemptTimings, DeliveryReply};
use crate::masking::SentSecrets;
use crate::recorder::{
    AnswerBody, AttemptDecision, AttemptedRequest, DeliveryDisposition, EndedDeliveries, EventPlace,
    EventRun, RetryTimeRule,
};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use postrider_core::ids::SubscriptionId;
use postrider_core::pause::SubscriptionPauses;
use postrider_core::retry::NextStep;
use postrider_core::time::Timestamp;
use postrider_store::{Claim, Settlement};

/// The part of an answer that waits in memory to be recorded. Longer than what is stored, so that
/// truncation is visible.
const ANSWER_BYTES_MAX: usize = 2048;

const MASK: &str = "***";

pub(super) fn place(claim: &Claim) -> EventPlace {
    EventPlace {
        first: claim.entry.first,
        index: claim.index,
    }
}

/// The reply to an attempt, as far as it is recorded.
#[derive(Clone, Default)]
pub(super) struct RecordedReply {
    timings: Option<AttemptTimings>,
    answer: Option<AnswerBody>,
    failure: Option<Box<str>>,
}

impl RecordedReply {
    pub(super) fn of(reply: DeliveryReply) -> RecordedReply {
        match reply {
            DeliveryReply::Answered(answer) => {
                let mut body = answer.body;
                if body.len() > ANSWER_BYTES_MAX {
                    body = Bytes::copy_from_slice(&body[..ANSWER_BYTES_MAX]);
                }
                let content_type = answer.headers.get(CONTENT_TYPE).cloned();
                let says_something = content_type.is_some() || !body.is_empty();
                RecordedReply {
                    timings: Some(answer.timings),
                    answer: says_something.then_some(AnswerBody { content_type, body }),
                    failure: None,
                }
            }
            failed => RecordedReply::unrecorded(failed),
        }
    }

    /// The reply without the parts that only the recorder needs.
    pub(super) fn unrecorded(reply: DeliveryReply) -> RecordedReply {
        match reply {
            DeliveryReply::Answered(_) => RecordedReply::default(),
            DeliveryReply::Failed(failure) => RecordedReply {
                failure: Some(failure.detail.into()),
                ..RecordedReply::default()
            },
        }
    }

    /// Why there was no answer.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

/// A finished attempt.
pub(super) struct FinishedAttempt<'a> {
    pub(super) plan: &'a DeliveryPlan,
    pub(super) pauses: &'a SubscriptionPauses,
    pub(super) begun: Timestamp,
    pub(super) ended: Timestamp,
    pub(super) attempted: attempt::AttemptResult,
    pub(super) heard: RecordedReply,
    /// The span to export, if there is one.
    pub(super) span: Option<Box<AttemptSpan>>,
    /// The index of the attempt's first delivery among the settled ones; those before it were not
    /// attempted.
    pub(super) from: usize,
}

impl Dispatcher {
    /// Reports to the recorder what follows for deliveries.
    pub(super) fn note(&self, of: SubscriptionId, settled: &[Settlement], sent: Option<FinishedAttempt<'_>>) {
        let from = sent.as_ref().map_or(settled.len(), |sent| sent.from);
        let (aside, attempted) = settled.split_at(from);
        for alike in aside.chunk_by(|a, b| a.next == b.next && a.at == b.at) {
            let disposition = match alike[0].next {
                // An earlier attempt was answered late, with success.
                NextStep::Done => DeliveryDisposition::DeliveredLate,
                NextStep::DeadLetter(reason) => DeliveryDisposition::DeadLettered(reason),
                NextStep::Drop(reason) => DeliveryDisposition::Dropped(reason),
                NextStep::RetryAt(_) => continue,
            };
            self.recorder.ended(EndedDeliveries {
                subscription: of,
                events: alike.iter().map(|one| place(&one.claim)).collect(),
                at: alike[0].at,
                disposition,
            });
        }
        if let Some(mut sent) = sent {
            let span = sent.span.take();
            let runs = attempted.iter().map(|one| sent.run(one));
            self.note_attempted(&sent, span, runs);
        }
    }

    /// Reports to the recorder a request whose events are sent again in halves.
    pub(super) fn note_split(&self, claims: &[Claim], sent: &FinishedAttempt<'_>) {
        let run = |claim: &Claim| EventRun {
            start: place(claim),
            count: 1,
            number: claim.attempts_made + 1,
            since: claim.due.unwrap_or(claim.received()),
            decision: AttemptDecision::Retry {
                at: sent.ended,
                why: RetryTimeRule::Halved,
            },
        };
        // No span: the id would be that of the attempt, which continues.
        self.note_attempted(sent, None, claims.iter().map(run));
    }

    fn note_attempted(
        &self,
        sent: &FinishedAttempt<'_>,
        span: Option<Box<AttemptSpan>>,
        each: impl Iterator<Item = EventRun>,
    ) {
        let heard = sent.heard_masked();
        let mut runs: Vec<EventRun> = Vec::new();
        for run in each {
            match runs.last_mut() {
                Some(last) if follows(last, &run) => last.count += 1,
                _ => runs.push(run),
            }
        }
        self.recorder.attempted(AttemptedRequest {
            subscription: sent.plan.subscription.clone(),
            endpoint: sent.plan.endpoint.name.clone(),
            begun: sent.begun,
            ended: sent.ended,
            outcome: sent.attempted.outcome,
            status: sent.attempted.status,
            timings: heard.timings,
            answer: heard.answer,
            failure: heard.failure,
            span,
            runs,
        });
    }
}

impl FinishedAttempt<'_> {
    /// The reply with the secrets of the request masked.
    fn heard_masked(&self) -> RecordedReply {
        let heard = &self.heard;
        let secrets = match heard.answer.is_some() || heard.failure.is_some() {
            true => self.plan.sent_secrets(),
            false => SentSecrets::default(),
        };
        if secrets.is_empty() {
            return heard.clone();
        }
        let answer = heard.answer.as_ref().map(|answer| {
            let content_type = answer.content_type.as_ref().and_then(|value| {
                let masked = secrets.mask(value.as_bytes(), false, MASK);
                HeaderValue::from_bytes(&masked).ok()
            });
            let cut = answer.body.len() >= ANSWER_BYTES_MAX;
            AnswerBody {
                content_type,
                body: secrets.mask(&answer.body, cut, MASK).into(),
            }
        });
        RecordedReply {
            timings: heard.timings,
            answer,
            failure: heard
                .failure
                .as_deref()
                .map(|text| secrets.mask_text(text, MASK).into()),
        }
    }

    fn run(&self, one: &Settlement) -> EventRun {
        let (plan, claim) = (self.plan, &one.claim);
        let attempt = self.attempted.number(one.attempts_made);
        let why = |due| {
            RetryTimeRule::of(
                &plan.policy,
                plan.profile,
                plan.kind,
                attempt,
                self.pauses.effective(claim.received(), one.at),
                one.at,
                due,
            )
        };
        EventRun {
            start: place(claim),
            count: 1,
            number: one.attempts_made,
            since: claim.due.unwrap_or(claim.received()),
            decision: AttemptDecision::new(one.next, why),
        }
    }
}

/// Whether a run of one event continues the previous run.
fn follows(last: &EventRun, next: &EventRun) -> bool {
    next.start.first == last.start.first
        && next.start.index == last.start.index + last.count
        && (next.number, next.since, next.decision) == (last.number, last.since, last.decision)
}
