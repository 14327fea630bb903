//! Attempts that timed out and whose answers may still come.

use super::{Dispatcher, PendingReply, SubscriptionDispatcher, place};
use crate::attempt::DeliveryPlan;
use crate::counters::{add, by_reason};
use crate::recorder::{DeliveryDisposition, EndedDeliveries, EventPlace};
use crate::tasks::TaskKind;
use postrider_core::ids::Position;
use postrider_core::outcome::Outcome;
use postrider_core::retry::NextStep;
use postrider_core::time::Timestamp;
use postrider_store::{DeadLetterKey, PendingDeadLetter, Settlement};
use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;
use tokio::sync::OwnedSemaphorePermit;

/// A timed-out attempt whose answer may still come.
pub(super) struct LateAnswerWait {
    plan: Arc<DeliveryPlan>,
    outlet: Arc<SubscriptionDispatcher>,
    sending: PendingReply,
    until: Timestamp,
    /// The deliveries with the times of their retries; none for those that were given up.
    waiting: Vec<(Position, Option<Timestamp>)>,
    /// When each of them was received.
    received: Vec<(Position, Timestamp)>,
    /// The same deliveries by the recorder's places; empty without a recorder.
    places: Vec<EventPlace>,
    _place: OwnedSemaphorePermit,
}

/// Counts the wait for a late answer in its subscription for as long as it lasts.
struct LateAnswerWaitGuard<'a>(&'a SubscriptionDispatcher);

impl<'a> LateAnswerWaitGuard<'a> {
    fn of(outlet: &'a SubscriptionDispatcher) -> LateAnswerWaitGuard<'a> {
        outlet.late_listeners.fetch_add(1, AcqRel);
        LateAnswerWaitGuard(outlet)
    }
}

impl Drop for LateAnswerWaitGuard<'_> {
    fn drop(&mut self) {
        self.0.late_listeners.fetch_sub(1, AcqRel);
    }
}

impl Dispatcher {
    /// Keeps the connection of a timed-out attempt for a late answer, if the profile allows one and
    /// the answer could still change something.
    pub(super) fn listen(
        &self,
        plan: &Arc<DeliveryPlan>,
        outlet: &Arc<SubscriptionDispatcher>,
        sending: PendingReply,
        sent: Timestamp,
        settled: &[Settlement],
    ) -> Option<LateAnswerWait> {
        let until = sent + plan.profile.late_window?;
        let waiting: Vec<(Position, Option<Timestamp>)> = settled
            .iter()
            .filter_map(|one| match one.next {
                NextStep::RetryAt(due) => Some((one.claim.position(), Some(due))),
                NextStep::DeadLetter(_) => Some((one.claim.position(), None)),
                NextStep::Done | NextStep::Drop(_) => None,
            })
            .collect();
        if waiting.is_empty() {
            return None;
        }
        let room = self.late_room.clone().try_acquire_owned().ok()?;
        outlet.late.listen(&waiting);
        let retried = || {
            settled
                .iter()
                .filter(|one| matches!(one.next, NextStep::RetryAt(_)))
        };
        let received = retried().map(|one| (one.claim.position(), one.claim.received()));
        let received = received.collect();
        let places = match self.recorder.on() {
            true => retried().map(|one| place(&one.claim)).collect(),
            false => Vec::new(),
        };
        Some(LateAnswerWait {
            plan: plan.clone(),
            outlet: outlet.clone(),
            sending,
            until,
            waiting,
            received,
            places,
            _place: room,
        })
    }

    /// Handles a late answer. A success takes the deliveries out of the retry queue, or withdraws
    /// their pending dead letters; a failure changes nothing.
    pub(super) async fn await_late_answer(self: Arc<Self>, listening: LateAnswerWait) {
        let LateAnswerWait {
            plan,
            outlet,
            mut sending,
            until,
            waiting,
            received,
            mut places,
            _place,
        } = listening;
        let _counted = LateAnswerWaitGuard::of(&outlet);
        let mut window = self.clock.sleep_until(until);
        let reply = tokio::select! {
            biased;
            reply = &mut sending => Some(reply),
            () = self.stop.cancelled() => None,
            () = outlet.closed.cancelled() => None,
            () = &mut window => None,
        };
        let now = self.clock.now();
        // The answer may have waited to be processed: the disk was full, or the clock was set.
        let in_time = now <= until;
        let success = reply.is_some_and(|r| in_time && plan.outcome(&r, now).outcome == Outcome::Success);
        if !success {
            outlet.late.end_answer_wait(&waiting);
            return;
        }
        self.late_busy.fetch_add(1, AcqRel);
        self.recover(&plan.endpoint, Some(outlet.id));
        let heard = outlet.late.heard(&waiting);
        let mut elsewhere: Vec<Position> = heard.retries.iter().map(|(_, position)| *position).collect();
        match self.log.withdraw(outlet.id, heard.retries).await {
            Ok(ended) => {
                outlet.late.forget(&ended);
                outlet.splits.forget(ended.iter().copied());
                self.replay_outcomes.delivered_late(outlet.id, &ended);
                // Another node attempts these now.
                elsewhere.retain(|position| !self.log.owns_position(*position));
                outlet.late.forget(&elsewhere);
                places.retain(|place| ended.contains(&place.position()));
                if !places.is_empty() {
                    self.recorder.ended(EndedDeliveries {
                        subscription: outlet.id,
                        events: places,
                        at: now,
                        disposition: DeliveryDisposition::DeliveredLate,
                    });
                }
                for counters in [&self.counters, &outlet.counters] {
                    add(&counters.delivered, ended.len());
                    add(&counters.delivered_late, ended.len());
                }
                let arrived = received.iter().filter(|(position, _)| ended.contains(position));
                self.meter_late(&outlet, now, arrived.map(|(_, at)| *at));
            }
            Err(e) => {
                tracing::error!(error = %e, "cannot record a late answer; the events will be sent again")
            }
        }
        self.withdraw_letters(&outlet, heard.letters).await;
        self.late_busy.fetch_sub(1, AcqRel);
    }

    /// Notes dead letters that are in the log: from now on a late answer can withdraw them.
    /// Withdraws those whose late answer has already come.
    pub(super) fn letters_settled(
        self: &Arc<Self>,
        outlet: &Arc<SubscriptionDispatcher>,
        letters: &[DeadLetterKey],
    ) {
        let delivered = outlet.late.letters_settled(letters);
        if delivered.is_empty() {
            return;
        }
        self.late_busy.fetch_add(1, AcqRel);
        let (dispatcher, outlet) = (self.clone(), outlet.clone());
        self.tasks.spawn(TaskKind::LateAnswer, async move {
            dispatcher.withdraw_letters(&outlet, delivered).await;
            dispatcher.late_busy.fetch_sub(1, AcqRel);
        });
    }

    /// Withdraws the dead letters of events that turned out to be delivered. A dead letter that is
    /// already in its blob stays there.
    async fn withdraw_letters(&self, outlet: &SubscriptionDispatcher, letters: Vec<DeadLetterKey>) {
        if letters.is_empty() {
            return;
        }
        let Some(engine) = self.engine.get().and_then(std::sync::Weak::upgrade) else {
            return;
        };
        let withdrawn: Vec<PendingDeadLetter> = match engine.withdraw_letters(outlet.id, letters).await {
            Ok(withdrawn) => withdrawn,
            Err(e) => {
                tracing::error!(error = %e, "cannot record a late answer; the events stay dead letters");
                return;
            }
        };
        let now = self.clock.now();
        let positions: Vec<Position> = withdrawn.iter().map(PendingDeadLetter::position).collect();
        if positions.is_empty() {
            return;
        }
        self.replay_outcomes.recovered(outlet.id, &positions);
        if self.recorder.on() {
            let place = |letter: &PendingDeadLetter| EventPlace {
                first: letter.entry.first,
                index: letter.index,
            };
            self.recorder.ended(EndedDeliveries {
                subscription: outlet.id,
                events: withdrawn.iter().map(place).collect(),
                at: now,
                disposition: DeliveryDisposition::DeliveredLate,
            });
        }
        for counters in [&self.counters, &outlet.counters] {
            add(&counters.delivered, withdrawn.len());
            add(&counters.delivered_late, withdrawn.len());
            for letter in &withdrawn {
                add(by_reason(&counters.letters_withdrawn, letter.reason), 1);
            }
        }
        self.meter_late(
            outlet,
            now,
            withdrawn.iter().map(|letter| letter.entry.batch.received),
        );
    }
}
