//! Pauses of a subscription: time in which its events do not age.

use crate::time::Timestamp;
use std::time::Duration;

/// The most pauses that are kept; beyond it, the two with the least time between them are merged.
pub const PAUSES_MAX: usize = 32;

/// From one instant until just before another; without an end, until somebody resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubscriptionPause {
    pub from: Timestamp,
    pub until: Option<Timestamp>,
}

/// The pauses that may still matter, in order. They do not touch each other, and only the last may
/// be open-ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubscriptionPauses(Vec<SubscriptionPause>);

impl SubscriptionPauses {
    /// Stored pauses, in any order; pauses that touch each other are merged.
    pub fn of(mut all: Vec<SubscriptionPause>) -> SubscriptionPauses {
        all.retain(|pause| pause.until.is_none_or(|until| pause.from < until));
        all.sort_by_key(|pause| pause.from);
        let mut pauses = SubscriptionPauses::default();
        for pause in all {
            match pauses.0.last_mut() {
                Some(last) if last.until.is_none_or(|until| pause.from <= until) => {
                    last.until = last.until.zip(pause.until).map(|(a, b)| a.max(b));
                }
                _ => pauses.0.push(pause),
            }
        }
        pauses.merge();
        pauses
    }

    pub fn iter(&self) -> impl Iterator<Item = SubscriptionPause> {
        self.0.iter().copied()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn is_paused(&self) -> bool {
        self.since().is_some()
    }

    /// When the current pause began.
    pub fn since(&self) -> Option<Timestamp> {
        let last = self.0.last().filter(|last| last.until.is_none());
        last.map(|last| last.from)
    }

    /// Begins a pause. Returns whether there was none.
    pub fn begin(&mut self, now: Timestamp) -> bool {
        if self.is_paused() {
            return false;
        }
        match self.0.last_mut() {
            // The clock was set back, or no time has passed: the previous pause continues.
            Some(last) if last.until.is_some_and(|until| now <= until) => last.until = None,
            _ => self.0.push(SubscriptionPause {
                from: now,
                until: None,
            }),
        }
        self.merge();
        true
    }

    /// Ends the current pause. Returns whether there was one.
    pub fn end(&mut self, now: Timestamp) -> bool {
        if !self.is_paused() {
            return false;
        }
        if let Some(last) = self.0.last_mut() {
            last.until = Some(now);
        }
        // A pause without duration, or one that began after `now` because the clock was set back,
        // is removed.
        self.0
            .retain(|pause| pause.until.is_none_or(|until| pause.from < until));
        true
    }

    /// The age at `now` of an event received at `received`, expressed as the instant at which it
    /// would have been received if there had been no pauses.
    pub fn effective(&self, received: Timestamp, now: Timestamp) -> Timestamp {
        // Pauses that ended before the event was received do not matter to it.
        let touching = self.0.iter().rev();
        let touching = touching.take_while(|pause| pause.until.is_none_or(|until| received < until));
        let paused: Duration = touching
            .map(|pause| {
                let until = pause.until.map_or(now, |until| until.min(now));
                until.since(pause.from.max(received))
            })
            .sum();
        received + paused
    }

    /// Removes pauses that matter only to events which have aged by more than `time_to_live` since:
    /// those events are over in any case.
    pub fn prune(&mut self, time_to_live: Duration, now: Timestamp) {
        let over = |pause: &SubscriptionPause| {
            let until = pause.until?;
            Some(now.since(self.effective(until, now)) >= time_to_live)
        };
        let gone = self
            .0
            .iter()
            .take_while(|pause| over(pause) == Some(true))
            .count();
        self.0.drain(..gone);
    }

    /// The time between two merged pauses counts as paused: events live a little longer, never
    /// shorter.
    fn merge(&mut self) {
        while self.0.len() > PAUSES_MAX {
            let gap = |at: &usize| {
                let ended = self.0[*at].until.unwrap_or(Timestamp::MAX);
                self.0[at + 1].from.since(ended)
            };
            let at = (0..self.0.len() - 1).min_by_key(gap).unwrap_or_default();
            let next = self.0.remove(at + 1);
            self.0[at].until = next.until;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(1_000 + secs)
    }

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// Pauses that begin and end at these times alternately.
    fn turns(times: &[i64]) -> SubscriptionPauses {
        let mut pauses = SubscriptionPauses::default();
        for (turn, time) in times.iter().enumerate() {
            let changed = match turn % 2 {
                0 => pauses.begin(at(*time)),
                _ => pauses.end(at(*time)),
            };
            assert!(changed);
        }
        pauses
    }

    #[test]
    fn time_in_a_pause_does_not_count() {
        let pauses = turns(&[100, 200, 300, 310]);
        let check = |received, now, expected| {
            assert_eq!(
                pauses.effective(at(received), at(now)),
                at(expected),
                "{received} {now}"
            );
        };
        check(0, 50, 0);
        check(0, 150, 50);
        check(0, 250, 100);
        check(0, 400, 110);
        check(150, 160, 160);
        check(150, 250, 200);
        check(200, 250, 200);
        check(305, 400, 310);
        check(311, 400, 311);
    }

    #[test]
    fn one_that_goes_on_holds_everything_where_it_is() {
        let pauses = turns(&[100]);
        assert_eq!(pauses.since(), Some(at(100)));
        for now in [100, 1_000, 1_000_000] {
            assert_eq!(at(now).since(pauses.effective(at(40), at(now))), secs(60));
            assert_eq!(at(now).since(pauses.effective(at(100), at(now))), secs(0));
        }
    }

    #[test]
    fn saying_it_twice_changes_nothing() {
        let mut pauses = turns(&[100]);
        let before = pauses.clone();
        assert!(!pauses.begin(at(150)));
        assert_eq!(pauses, before);
        assert!(pauses.end(at(200)));
        let before = pauses.clone();
        assert!(!pauses.end(at(250)));
        assert_eq!(pauses, before);
        assert!(!SubscriptionPauses::default().end(at(1)));
    }

    #[test]
    fn a_clock_that_was_set_back_leaves_them_in_order() {
        let mut pauses = turns(&[100, 200]);
        assert!(pauses.begin(at(150)));
        assert_eq!(pauses.since(), Some(at(100)));
        assert!(pauses.end(at(90)));
        assert_eq!(pauses, SubscriptionPauses::default());
    }

    #[test]
    fn what_is_read_is_put_in_order() {
        let pause = |from, until: Option<i64>| SubscriptionPause {
            from: at(from),
            until: until.map(at),
        };
        let read = SubscriptionPauses::of(vec![
            pause(300, None),
            pause(10, Some(20)),
            pause(15, Some(18)),
            pause(20, Some(30)),
            pause(90, Some(80)),
            pause(400, Some(500)),
        ]);
        assert_eq!(read.0, [pause(10, Some(30)), pause(300, None)]);
    }

    #[test]
    fn pauses_are_forgotten_when_nobody_remembers_them() {
        let mut pauses = turns(&[100, 200, 300, 400]);
        pauses.prune(secs(150), at(349));
        assert_eq!(pauses, turns(&[100, 200, 300, 400]));
        // 100 s passed until the second pause, and 50 s since.
        pauses.prune(secs(150), at(450));
        assert_eq!(pauses, turns(&[300, 400]));
        pauses.prune(secs(150), at(549));
        assert_eq!(pauses, turns(&[300, 400]));
        pauses.prune(secs(150), at(550));
        assert!(pauses.is_empty());
        let mut going_on = turns(&[100]);
        going_on.prune(secs(1), at(1_000_000));
        assert!(going_on.is_paused());
    }

    /// Ascending times without duplicates.
    fn any_times(most: usize) -> impl Strategy<Value = Vec<i64>> {
        proptest::collection::vec(1i64..20, 0..most).prop_map(|steps| {
            let sums = steps.iter().scan(0, |sum, step| {
                *sum += step;
                Some(*sum)
            });
            sums.collect()
        })
    }

    /// The age computed second by second, directly from the times.
    fn aged(times: &[i64], received: i64, now: i64) -> Duration {
        let runs = |second: &i64| times.iter().filter(|time| *time <= second).count() % 2 == 0;
        secs((received..now).filter(runs).count() as u64)
    }

    proptest! {
        #[test]
        fn events_age_by_the_seconds_that_are_not_paused(times in any_times(20), received in 0i64..200, wait in 0i64..200) {
            let now = received.max(times.last().copied().unwrap_or(0)) + wait;
            let effective = turns(&times).effective(at(received), at(now));
            prop_assert_eq!(at(now).since(effective), aged(&times, received, now));
        }

        #[test]
        fn forgetting_takes_nothing_from_anyone(times in any_times(20), received in 0i64..200, ttl in 1i64..100, wait in 0i64..100, later in 0i64..100) {
            let last = times.last().copied().unwrap_or(0);
            let (pruned_at, received) = (last + wait, received.min(last + wait));
            let pauses = turns(&times);
            let mut pruned = pauses.clone();
            pruned.prune(secs(ttl as u64), at(pruned_at));
            let now = at(pruned_at + later);
            let (before, after) = (pauses.effective(at(received), now), pruned.effective(at(received), now));
            let alive = at(pruned_at).since(pauses.effective(at(received), at(pruned_at))) < secs(ttl as u64);
            if alive {
                prop_assert_eq!(before, after);
            } else {
                prop_assert!(now.since(after) >= secs(ttl as u64));
            }
        }

        #[test]
        fn however_many_there_are_nobody_gets_less_time(times in any_times(300), received in 0i64..3000, wait in 0i64..100) {
            let now = received.max(times.last().copied().unwrap_or(0)) + wait;
            let pauses = turns(&times);
            prop_assert!(pauses.0.len() <= PAUSES_MAX);
            prop_assert_eq!(pauses.is_paused(), times.len() % 2 == 1);
            let effective = pauses.effective(at(received), at(now));
            prop_assert!(at(received) <= effective && effective <= at(now));
            prop_assert!(at(now).since(effective) <= aged(&times, received, now));
            prop_assert_eq!(&SubscriptionPauses::of(pauses.0.clone()), &pauses);
        }
    }
}
