//! Locks by key: a request that reads a resource, decides and writes the resource holds the lock of
//! its key meanwhile.
//!
//! Keys are `topic/<name>`, `domain/<name>`, `systemtopic/<group>/<name>` and
//! `subscription/<topic id>/<domain topic>/<name>`, all in lower case.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::OwnedMutexGuard;

/// Locks of different keys are independent; requests for the same key take turns in the order of
/// their arrival. A key uses memory only while somebody holds it or waits for it.
#[derive(Clone, Default)]
pub struct KeyedLocks {
    entries: Arc<Mutex<HashMap<String, LockEntry>>>,
}

#[derive(Default)]
struct LockEntry {
    lock: Arc<tokio::sync::Mutex<()>>,
    /// Number of holders and waiters.
    users: usize,
}

impl KeyedLocks {
    /// Waits until nobody else holds the key. Cancelling gives up the position in the queue.
    pub async fn hold(&self, key: String) -> KeyedLockGuard {
        let lock = {
            let mut entries = self.entries.lock().expect("no panic holds it");
            let entry = entries.entry(key.clone()).or_default();
            entry.users += 1;
            entry.lock.clone()
        };
        let place = LockReference {
            locks: self.clone(),
            key,
        };
        KeyedLockGuard {
            _turn: lock.lock_owned().await,
            _place: place,
        }
    }

    #[cfg(test)]
    fn keys(&self) -> usize {
        self.entries.lock().expect("no panic holds it").len()
    }
}

/// Holds the key until dropped.
#[must_use]
pub struct KeyedLockGuard {
    // Fields are dropped in this order: the lock is released before the entry may be removed.
    _turn: OwnedMutexGuard<()>,
    _place: LockReference,
}

/// Reference of a holder or waiter to the entry.
struct LockReference {
    locks: KeyedLocks,
    key: String,
}

impl Drop for LockReference {
    fn drop(&mut self) {
        let mut entries = self.locks.entries.lock().expect("no panic holds it");
        let Some(entry) = entries.get_mut(&self.key) else {
            return;
        };
        entry.users -= 1;
        if entry.users == 0 {
            entries.remove(&self.key);
        }
    }
}

/// Names compare without case, so their keys are in lower case.
pub fn topic(name: &str) -> String {
    format!("topic/{}", name.to_lowercase())
}

pub fn domain(name: &str) -> String {
    format!("domain/{}", name.to_lowercase())
}

pub fn system_topic(group: &str, name: &str) -> String {
    format!("systemtopic/{}/{}", group.to_lowercase(), name.to_lowercase())
}

pub fn subscription(topic: postrider_core::ids::TopicId, domain_topic: Option<&str>, name: &str) -> String {
    let domain_topic = domain_topic.unwrap_or_default().to_lowercase();
    format!("subscription/{}/{domain_topic}/{}", topic.0, name.to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    fn is_ready<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn holders_of_one_key_take_turns_and_others_do_not_wait() {
        let locks = KeyedLocks::default();
        let first = locks.hold("a".into()).await;
        let mut second = pin!(locks.hold("a".into()));
        assert!(is_ready(second.as_mut()).is_none());
        let other = locks.hold("b".into()).await;
        let mut third = pin!(locks.hold("a".into()));
        assert!(is_ready(third.as_mut()).is_none());
        drop(first);
        assert!(is_ready(third.as_mut()).is_none(), "the second came before");
        let second = is_ready(second.as_mut()).expect("its turn");
        assert!(is_ready(third.as_mut()).is_none());
        drop(second);
        let third = is_ready(third.as_mut()).expect("its turn");
        assert_eq!(locks.keys(), 2);
        drop(other);
        drop(third);
        assert_eq!(locks.keys(), 0, "nobody uses them any more");
    }

    #[tokio::test]
    async fn one_who_gives_up_leaves_nothing_behind() {
        let locks = KeyedLocks::default();
        let first = locks.hold("a".into()).await;
        {
            let mut second = pin!(locks.hold("a".into()));
            assert!(is_ready(second.as_mut()).is_none());
        }
        let mut third = Box::pin(locks.hold("a".into()));
        assert!(is_ready(third.as_mut()).is_none());
        drop(first);
        drop(is_ready(third.as_mut()).expect("the second does not stand in its way"));
        assert_eq!(locks.keys(), 0);
        // Cancelled after the lock was released to it, but before it was polled.
        let first = locks.hold("a".into()).await;
        let mut second = Box::pin(locks.hold("a".into()));
        assert!(is_ready(second.as_mut()).is_none());
        drop(first);
        drop(second);
        assert_eq!(locks.keys(), 0);
        drop(locks.hold("a".into()).await);
    }

    #[test]
    fn keys_compare_without_case_and_tell_kinds_apart() {
        let id = postrider_core::ids::TopicId(7);
        assert_eq!(topic("Orders"), topic("orders"));
        assert_ne!(topic("orders"), domain("orders"));
        assert_eq!(system_topic("Rg", "T"), system_topic("rG", "t"));
        assert_eq!(subscription(id, None, "A"), "subscription/7//a");
        assert_eq!(subscription(id, Some("East"), "A"), "subscription/7/east/a");
    }
}
