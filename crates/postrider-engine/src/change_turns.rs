//! Locks by name for catalog changes: changes of the same resource take turns, others do not wait
//! for each other.

use postrider_core::ids::{SubscriptionId, TopicId};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// The subject of a turn. A task that takes several turns takes them in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TurnKey {
    /// The source of a scope, in lower case.
    Scope(String),
    Topic(TopicId),
    /// The name is in lower case.
    DomainTopic(TopicId, String),
    Subscription(SubscriptionId),
    /// A subscription's name, whether it is in force or its handshake is in progress: topic, domain
    /// topic and name, in lower case.
    Name(TopicId, Option<String>, String),
}

/// Hands out turns. A key takes memory only while a task has a turn at it or waits for one.
#[derive(Clone, Default)]
pub(crate) struct ChangeTurns {
    entries: Arc<Mutex<FxHashMap<TurnKey, TurnLock>>>,
}

#[derive(Default)]
struct TurnLock {
    lock: Arc<RwLock<()>>,
    /// Tasks that have a turn or wait for one.
    users: usize,
}

impl ChangeTurns {
    /// Waits for an exclusive turn at a key.
    pub async fn alone(&self, key: TurnKey) -> ChangeTurn {
        let (lock, place) = self.place(key);
        ChangeTurn {
            _held: TurnGuard::Alone {
                _guard: lock.write_owned().await,
            },
            _place: place,
        }
    }

    /// Waits for a shared turn at a key: only exclusive turns keep it waiting.
    pub async fn together(&self, key: TurnKey) -> ChangeTurn {
        let (lock, place) = self.place(key);
        ChangeTurn {
            _held: TurnGuard::Together {
                _guard: lock.read_owned().await,
            },
            _place: place,
        }
    }

    fn place(&self, key: TurnKey) -> (Arc<RwLock<()>>, TurnLockUse) {
        let mut entries = self.entries.lock().expect("no panic holds it");
        let entry = entries.entry(key.clone()).or_default();
        entry.users += 1;
        let place = TurnLockUse {
            turns: self.clone(),
            key,
        };
        (entry.lock.clone(), place)
    }

    #[cfg(test)]
    fn keys(&self) -> usize {
        self.entries.lock().expect("no panic holds it").len()
    }
}

/// A turn, which lasts until it is dropped.
#[must_use]
pub(crate) struct ChangeTurn {
    // Dropped in this order: the turn passes on before the entry may go.
    _held: TurnGuard,
    _place: TurnLockUse,
}

enum TurnGuard {
    Alone { _guard: OwnedRwLockWriteGuard<()> },
    Together { _guard: OwnedRwLockReadGuard<()> },
}

struct TurnLockUse {
    turns: ChangeTurns,
    key: TurnKey,
}

impl Drop for TurnLockUse {
    fn drop(&mut self) {
        let mut entries = self.turns.entries.lock().expect("no panic holds it");
        if let Some(entry) = entries.get_mut(&self.key) {
            entry.users -= 1;
            if entry.users == 0 {
                entries.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn is_ready(future: std::pin::Pin<&mut impl Future<Output = ChangeTurn>>) -> Option<ChangeTurn> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn some_share_a_turn_and_one_has_it_alone() {
        let turns = ChangeTurns::default();
        let key = || TurnKey::Topic(TopicId(1));
        let one = turns.together(key()).await;
        let two = turns.together(key()).await;
        let mut alone = pin!(turns.alone(key()));
        assert!(is_ready(alone.as_mut()).is_none());
        let mut late = pin!(turns.together(key()));
        assert!(
            is_ready(late.as_mut()).is_none(),
            "the one who came before goes first"
        );
        let other = turns.alone(TurnKey::Topic(TopicId(2))).await;
        drop(one);
        assert!(is_ready(alone.as_mut()).is_none());
        drop(two);
        let alone = is_ready(alone.as_mut()).expect("its turn");
        assert!(is_ready(late.as_mut()).is_none());
        drop(alone);
        let late = is_ready(late.as_mut()).expect("its turn");
        assert_eq!(turns.keys(), 2);
        drop((late, other));
        assert_eq!(turns.keys(), 0, "nobody uses them any more");
    }
}
