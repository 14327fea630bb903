//! Attempts that timed out and whose answers may still come.

use super::{Dispatcher, Outlet, Sending, place};
use crate::attempt::Plan;
use crate::counters::add;
use crate::recorder::{Disposition, Ended, Place};
use postrider_core::ids::Position;
use postrider_core::outcome::Outcome;
use postrider_core::retry::Next;
use postrider_core::time::Timestamp;
use postrider_store::Settled;
use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;
use tokio::sync::OwnedSemaphorePermit;

/// A timed-out attempt whose answer may still come.
pub(super) struct Listening {
    plan: Arc<Plan>,
    outlet: Arc<Outlet>,
    sending: Sending,
    until: Timestamp,
    /// Its deliveries, with the times at which they were to be retried.
    waiting: Vec<(Timestamp, Position)>,
    /// When each of them was received.
    received: Vec<(Position, Timestamp)>,
    /// The same deliveries as the recorder knows them, if there is one.
    places: Vec<Place>,
    _place: OwnedSemaphorePermit,
}

/// Counts a wait for a late answer as one of its subscription's, for as long as it lasts.
struct ListenerCount<'a>(&'a Outlet);

impl<'a> ListenerCount<'a> {
    fn of(outlet: &'a Outlet) -> ListenerCount<'a> {
        outlet.late_listeners.fetch_add(1, AcqRel);
        ListenerCount(outlet)
    }
}

impl Drop for ListenerCount<'_> {
    fn drop(&mut self) {
        self.0.late_listeners.fetch_sub(1, AcqRel);
    }
}

impl Dispatcher {
    /// Keeps the connection of a timed-out attempt for a late answer, if the profile allows for one and
    /// something is left that it could change.
    pub(super) fn listen(
        &self,
        plan: &Arc<Plan>,
        outlet: &Arc<Outlet>,
        sending: Sending,
        sent: Timestamp,
        settled: &[Settled],
    ) -> Option<Listening> {
        let until = sent + plan.profile.late_window?;
        let waiting: Vec<(Timestamp, Position)> = settled
            .iter()
            .filter_map(|one| match one.next {
                Next::RetryAt(due) => Some((due, one.claim.position())),
                _ => None,
            })
            .collect();
        if waiting.is_empty() {
            return None;
        }
        let room = self.late_room.clone().try_acquire_owned().ok()?;
        outlet.late.listen(&waiting);
        let retried = || settled.iter().filter(|one| matches!(one.next, Next::RetryAt(_)));
        let received = retried().map(|one| (one.claim.position(), one.claim.received()));
        let received = received.collect();
        let places = match self.recorder.on() {
            true => retried().map(|one| place(&one.claim)).collect(),
            false => Vec::new(),
        };
        Some(Listening {
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

    /// A success that comes late takes the deliveries out of the retry queue; a failure changes nothing.
    pub(super) async fn hear_late(self: Arc<Self>, listening: Listening) {
        let Listening {
            plan,
            outlet,
            mut sending,
            until,
            waiting,
            received,
            mut places,
            _place,
        } = listening;
        let _counted = ListenerCount::of(&outlet);
        let mut window = self.clock.sleep_until(until);
        let reply = tokio::select! {
            biased;
            reply = &mut sending => Some(reply),
            () = self.stop.cancelled() => None,
            () = outlet.closed.cancelled() => None,
            () = &mut window => None,
        };
        let now = self.clock.now();
        // Nobody may have looked for a while: the disk was full, or the clock was set.
        let in_time = now <= until;
        let success = reply.is_some_and(|r| in_time && plan.outcome(&r, now).outcome == Outcome::Success);
        if !success {
            outlet.late.unheard(&waiting);
            return;
        }
        self.late_busy.fetch_add(1, AcqRel);
        self.recover(&plan.endpoint, Some(outlet.id));
        let heard = outlet.late.heard(&waiting);
        let mut elsewhere: Vec<Position> = heard.iter().map(|(_, position)| *position).collect();
        match self.log.withdraw(outlet.id, heard).await {
            Ok(ended) => {
                outlet.late.forget(&ended);
                // Another node attempts these now.
                elsewhere.retain(|position| !self.log.keeps(*position));
                outlet.late.forget(&elsewhere);
                places.retain(|place| ended.contains(&place.position()));
                if !places.is_empty() {
                    self.recorder.ended(Ended {
                        subscription: outlet.id,
                        events: places,
                        at: now,
                        disposition: Disposition::DeliveredLate,
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
        self.late_busy.fetch_sub(1, AcqRel);
    }
}
