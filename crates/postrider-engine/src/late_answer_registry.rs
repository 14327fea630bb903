//! Late answers: an attempt that timed out may still turn out to have succeeded.

use postrider_core::ids::Position;
use postrider_core::retry::NextStep;
use postrider_core::time::Timestamp;
use postrider_store::DeadLetterKey;
use rustc_hash::FxHashMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// The deliveries of one subscription with a timed-out attempt whose answer is still awaited. They
/// wait for a retry or were given up.
#[derive(Default)]
pub struct LateAnswerRegistry {
    /// The number of entries, readable without the lock.
    count: AtomicUsize,
    entries: Mutex<FxHashMap<Position, AwaitedDelivery>>,
}

struct AwaitedDelivery {
    /// Attempts that may still be answered.
    listeners: usize,
    /// The delivery's state in the log, if that is known.
    stands: AwaitedDeliveryState,
    /// Whether one of the attempts was answered with success: no further attempt is needed.
    answered: bool,
}

/// The state of a delivery in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AwaitedDeliveryState {
    /// The delivery is being attempted, or its settlement is not written yet.
    Undecided,
    /// The delivery waits for a retry that is due then.
    Retrying(Timestamp),
    /// The delivery was given up; its dead letter is pending since then.
    GivenUp(Timestamp),
}

/// Deliveries to be taken out of the log because of late successes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LateSuccesses {
    /// Deliveries that wait for a retry, with the times at which they are due.
    pub retries: Vec<(Timestamp, Position)>,
    pub letters: Vec<DeadLetterKey>,
}

impl LateAnswerRegistry {
    pub fn is_empty(&self) -> bool {
        self.count.load(Acquire) == 0
    }

    fn change<T>(&self, change: impl FnOnce(&mut FxHashMap<Position, AwaitedDelivery>) -> T) -> T {
        let mut entries = self.entries.lock().expect("no panic holds it");
        let result = change(&mut entries);
        self.count.store(entries.len(), Release);
        result
    }

    /// Begins to wait for the answer to an attempt of these deliveries. Each comes with the time of
    /// its retry; a delivery without one was given up, and [`LateAnswerRegistry::letters_settled`] reports
    /// when the log has its dead letter.
    pub fn listen(&self, deliveries: &[(Position, Option<Timestamp>)]) {
        self.change(|entries| {
            for (position, due) in deliveries {
                let entry = entries.entry(*position).or_insert(AwaitedDelivery {
                    listeners: 0,
                    stands: AwaitedDeliveryState::Undecided,
                    answered: false,
                });
                entry.listeners += 1;
                entry.stands = due.map_or(AwaitedDeliveryState::Undecided, AwaitedDeliveryState::Retrying);
            }
        });
    }

    /// Ends the wait for an answer that never came, or was no success.
    pub fn end_answer_wait(&self, deliveries: &[(Position, Option<Timestamp>)]) {
        self.change(|entries| {
            for (position, _) in deliveries {
                if let Some(entry) = entries.get_mut(position) {
                    entry.listeners = entry.listeners.saturating_sub(1);
                    if entry.listeners == 0 && !entry.answered {
                        entries.remove(position);
                    }
                }
            }
        });
    }

    /// Handles a late success. Returns the deliveries that still wait in the log: the others are
    /// being attempted again, or have ended.
    pub fn heard(&self, deliveries: &[(Position, Option<Timestamp>)]) -> LateSuccesses {
        self.change(|entries| {
            let mut found = LateSuccesses::default();
            for (position, _) in deliveries {
                let Some(entry) = entries.get_mut(position) else {
                    continue;
                };
                entry.listeners = entry.listeners.saturating_sub(1);
                entry.answered = true;
                match entry.stands {
                    AwaitedDeliveryState::Undecided => {}
                    AwaitedDeliveryState::Retrying(due) => found.retries.push((due, *position)),
                    AwaitedDeliveryState::GivenUp(since) => {
                        found.letters.push((since, *position));
                        // The delivery will not be claimed, so no one would ask for the entry
                        // again.
                        entries.remove(position);
                    }
                }
            }
            found
        })
    }

    /// Forgets deliveries that will not be attempted again here.
    pub fn forget(&self, positions: &[Position]) {
        self.change(|entries| {
            for position in positions {
                entries.remove(position);
            }
        });
    }

    /// Whether a delivery that is about to be attempted, or has just failed again, has been
    /// answered with success in the meantime. Forgets it in that case.
    pub fn take_answered(&self, position: Position) -> bool {
        self.change(|entries| {
            let answered = entries.get(&position).is_some_and(|entry| entry.answered);
            if answered {
                entries.remove(&position);
            }
            answered
        })
    }

    /// Records the decision about a delivery that was attempted again or given up.
    pub fn decided(&self, position: Position, next: NextStep) {
        self.change(|entries| match next {
            NextStep::RetryAt(due) => {
                if let Some(entry) = entries.get_mut(&position) {
                    entry.stands = AwaitedDeliveryState::Retrying(due);
                }
            }
            // A late answer may still withdraw the dead letter.
            NextStep::DeadLetter(_) => {
                if let Some(entry) = entries.get_mut(&position) {
                    entry.stands = AwaitedDeliveryState::Undecided;
                }
            }
            NextStep::Done | NextStep::Drop(_) => {
                entries.remove(&position);
            }
        });
    }

    /// Records dead letters that the log now has. Returns those whose deliveries have been answered
    /// with success in the meantime.
    pub fn letters_settled(&self, letters: &[DeadLetterKey]) -> Vec<DeadLetterKey> {
        self.change(|entries| {
            let mut delivered = Vec::new();
            for (since, position) in letters {
                let Some(entry) = entries.get_mut(position) else {
                    continue;
                };
                if entry.answered {
                    delivered.push((*since, *position));
                    entries.remove(position);
                } else {
                    entry.stands = AwaitedDeliveryState::GivenUp(*since);
                }
            }
            delivered
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::retry::GiveUpReason;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(secs)
    }

    const ONE: Position = Position(1);

    const RETRY: [(Position, Option<Timestamp>); 1] = [(ONE, Some(Timestamp::from_secs(40)))];

    fn retries(all: &[(Timestamp, Position)]) -> LateSuccesses {
        LateSuccesses {
            retries: all.to_vec(),
            letters: Vec::new(),
        }
    }

    #[test]
    fn a_late_success_names_the_time_at_which_the_delivery_waits_now() {
        let book = LateAnswerRegistry::default();
        book.listen(&RETRY);
        book.decided(ONE, NextStep::RetryAt(at(70)));
        assert_eq!(book.heard(&RETRY), retries(&[(at(70), ONE)]));
        book.forget(&[ONE]);
        assert!(book.is_empty());
    }

    #[test]
    fn one_that_is_being_attempted_learns_of_it_when_that_ends() {
        let book = LateAnswerRegistry::default();
        book.listen(&RETRY);
        book.heard(&RETRY);
        assert!(book.take_answered(ONE));
        assert!(!book.take_answered(ONE));
        assert!(book.is_empty());
    }

    #[test]
    fn what_has_ended_is_not_heard_of_again() {
        for end in [NextStep::Done, NextStep::Drop(GiveUpReason::BadRequest)] {
            let book = LateAnswerRegistry::default();
            book.listen(&RETRY);
            book.decided(ONE, end);
            assert!(book.is_empty());
            assert_eq!(book.heard(&RETRY), LateSuccesses::default());
            book.end_answer_wait(&RETRY);
            assert!(book.is_empty());
        }
    }

    #[test]
    fn it_is_listened_for_until_the_last_listener_gives_up() {
        let book = LateAnswerRegistry::default();
        book.listen(&RETRY);
        book.listen(&[(ONE, Some(at(100)))]);
        book.end_answer_wait(&RETRY);
        assert!(!book.is_empty());
        assert_eq!(book.heard(&RETRY), retries(&[(at(100), ONE)]));
    }

    #[test]
    fn a_late_success_names_the_letter_of_what_was_given_up() {
        let given_up = NextStep::DeadLetter(GiveUpReason::AttemptsExhausted);
        let letters = |all: &[DeadLetterKey]| LateSuccesses {
            retries: Vec::new(),
            letters: all.to_vec(),
        };
        // The late answer is to the last attempt, or to an earlier one while the last has failed.
        for earlier in [false, true] {
            let book = LateAnswerRegistry::default();
            if earlier {
                book.listen(&RETRY);
                book.decided(ONE, given_up);
            } else {
                book.listen(&[(ONE, None)]);
            }
            assert_eq!(book.letters_settled(&[(at(70), ONE)]), []);
            assert_eq!(book.heard(&RETRY), letters(&[(at(70), ONE)]));
            assert!(book.is_empty());
        }
        // A success that comes before the log has the dead letter withdraws it afterwards.
        let book = LateAnswerRegistry::default();
        book.listen(&RETRY);
        book.decided(ONE, given_up);
        assert_eq!(book.heard(&RETRY), LateSuccesses::default());
        assert_eq!(book.letters_settled(&[(at(70), ONE)]), [(at(70), ONE)]);
        assert!(book.is_empty());
        // No answer comes: nothing is kept.
        book.listen(&[(ONE, None)]);
        book.letters_settled(&[(at(70), ONE)]);
        book.end_answer_wait(&RETRY);
        assert!(book.is_empty());
        assert_eq!(book.letters_settled(&[(at(70), ONE)]), []);
    }
}
