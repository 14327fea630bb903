//! Answers that come after the time for them: an attempt that timed out may still turn out to have succeeded.

use postrider_core::ids::Position;
use postrider_core::retry::Next;
use postrider_core::time::Timestamp;
use rustc_hash::FxHashMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// The deliveries of one subscription that someone still listens for, although they are to be retried.
#[derive(Default)]
pub struct LateBook {
    /// How many there are, so that nobody need take the lock while there are none.
    count: AtomicUsize,
    entries: Mutex<FxHashMap<Position, Entry>>,
}

struct Entry {
    /// Attempts that may still be answered.
    listeners: usize,
    /// When the next attempt is due, if that is decided.
    due: Option<Timestamp>,
    /// One of the attempts was answered with success: there is nothing left to attempt.
    answered: bool,
}

impl LateBook {
    pub fn is_empty(&self) -> bool {
        self.count.load(Acquire) == 0
    }

    fn change<T>(&self, change: impl FnOnce(&mut FxHashMap<Position, Entry>) -> T) -> T {
        let mut entries = self.entries.lock().expect("no panic holds it");
        let result = change(&mut entries);
        self.count.store(entries.len(), Release);
        result
    }

    /// Someone listens for an answer to an attempt of these deliveries, which are to be retried when due.
    pub fn listen(&self, deliveries: &[(Timestamp, Position)]) {
        self.change(|entries| {
            for (due, position) in deliveries {
                let entry = entries.entry(*position).or_insert(Entry {
                    listeners: 0,
                    due: None,
                    answered: false,
                });
                entry.listeners += 1;
                entry.due = Some(*due);
            }
        });
    }

    /// That answer never came, or was no success.
    pub fn unheard(&self, deliveries: &[(Timestamp, Position)]) {
        self.change(|entries| {
            for (_, position) in deliveries {
                if let Some(entry) = entries.get_mut(position) {
                    entry.listeners = entry.listeners.saturating_sub(1);
                    if entry.listeners == 0 && !entry.answered {
                        entries.remove(position);
                    }
                }
            }
        });
    }

    /// That answer was a success. Returns the deliveries that wait to be retried, with the times at which
    /// they are due; the others are being attempted again, or have ended.
    pub fn heard(&self, deliveries: &[(Timestamp, Position)]) -> Vec<(Timestamp, Position)> {
        self.change(|entries| {
            let mut waiting = Vec::new();
            for (_, position) in deliveries {
                if let Some(entry) = entries.get_mut(position) {
                    entry.listeners = entry.listeners.saturating_sub(1);
                    entry.answered = true;
                    waiting.extend(entry.due.map(|due| (due, *position)));
                }
            }
            waiting
        })
    }

    /// These will not be attempted again.
    pub fn forget(&self, positions: &[Position]) {
        self.change(|entries| {
            for position in positions {
                entries.remove(position);
            }
        });
    }

    /// Whether a delivery that is about to be attempted, or has just failed again, was delivered meanwhile.
    /// It is forgotten then.
    pub fn take_answered(&self, position: Position) -> bool {
        self.change(|entries| {
            let answered = entries.get(&position).is_some_and(|entry| entry.answered);
            if answered {
                entries.remove(&position);
            }
            answered
        })
    }

    /// What was decided about a delivery that was attempted again.
    pub fn decided(&self, position: Position, next: Next) {
        self.change(|entries| match next {
            Next::RetryAt(due) => {
                if let Some(entry) = entries.get_mut(&position) {
                    entry.due = Some(due);
                }
            }
            Next::Done | Next::DeadLetter(_) | Next::Drop(_) => {
                entries.remove(&position);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(secs)
    }

    const ONE: Position = Position(1);

    #[test]
    fn a_late_success_names_the_time_at_which_the_delivery_waits_now() {
        let book = LateBook::default();
        book.listen(&[(at(40), ONE)]);
        book.decided(ONE, Next::RetryAt(at(70)));
        assert_eq!(book.heard(&[(at(40), ONE)]), [(at(70), ONE)]);
        book.forget(&[ONE]);
        assert!(book.is_empty());
    }

    #[test]
    fn one_that_is_being_attempted_learns_of_it_when_that_ends() {
        let book = LateBook::default();
        book.listen(&[(at(40), ONE)]);
        book.heard(&[(at(40), ONE)]);
        assert!(book.take_answered(ONE));
        assert!(!book.take_answered(ONE));
        assert!(book.is_empty());
    }

    #[test]
    fn what_has_ended_is_not_heard_of_again() {
        let book = LateBook::default();
        book.listen(&[(at(40), ONE)]);
        book.decided(ONE, Next::Done);
        assert!(book.is_empty());
        assert!(book.heard(&[(at(40), ONE)]).is_empty());
        book.unheard(&[(at(40), ONE)]);
        assert!(book.is_empty());
    }

    #[test]
    fn it_is_listened_for_until_the_last_listener_gives_up() {
        let book = LateBook::default();
        book.listen(&[(at(40), ONE)]);
        book.listen(&[(at(100), ONE)]);
        book.unheard(&[(at(40), ONE)]);
        assert!(!book.is_empty());
        assert_eq!(book.heard(&[(at(100), ONE)]), [(at(100), ONE)]);
    }
}
