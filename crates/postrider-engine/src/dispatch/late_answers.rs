//! Attempts that timed out and whose answers may still come.

use super::{Dispatcher, Outlet, Sending};
use crate::attempt::Plan;
use crate::counters::add;
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
    _place: OwnedSemaphorePermit,
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
        let place = self.late_room.clone().try_acquire_owned().ok()?;
        outlet.late.listen(&waiting);
        Some(Listening {
            plan: plan.clone(),
            outlet: outlet.clone(),
            sending,
            until,
            waiting,
            _place: place,
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
            _place,
        } = listening;
        let mut window = self.clock.sleep_until(until);
        let reply = tokio::select! {
            biased;
            reply = &mut sending => Some(reply),
            () = self.stop.cancelled() => None,
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
        self.recover(&plan.endpoint);
        match self.log.withdraw(outlet.id, outlet.late.heard(&waiting)).await {
            Ok(ended) => {
                outlet.late.forget(&ended);
                for counters in [&self.counters, &outlet.counters] {
                    add(&counters.delivered, ended.len());
                    add(&counters.delivered_late, ended.len());
                }
            }
            Err(e) => {
                tracing::error!(error = %e, "cannot record a late answer; the events will be sent again")
            }
        }
        self.late_busy.fetch_sub(1, AcqRel);
    }
}
