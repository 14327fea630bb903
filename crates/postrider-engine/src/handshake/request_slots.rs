//! Slots for handshake requests in flight: bounded in all, and shared so that no caller takes all
//! of them.
//!
//! A caller may hold as many slots as are free. A caller whose webhooks never answer therefore gets
//! half of them, and another caller always finds a slot at once.

use postrider_core::ids::TopicId;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Handshake requests in flight at the same time; others wait.
pub(super) const ASKING_MAX: usize = 1024;
/// The part of them for one caller and one topic.
pub(super) const ASKING_PER_TOPIC_MAX: usize = 128;

/// The caller and topic that a handshake request is charged to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HandshakeOwner {
    /// Empty if the caller is not known, as after a restart: then each topic counts as a caller.
    pub caller: Arc<str>,
    pub topic: TopicId,
}

impl HandshakeOwner {
    pub fn new(caller: &str, topic: TopicId) -> HandshakeOwner {
        HandshakeOwner {
            caller: match caller {
                "" => format!("topic {}", topic.0).into(),
                caller => caller.into(),
            },
            topic,
        }
    }
}

#[derive(Default)]
pub(super) struct HandshakeSlots {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    held: usize,
    by_caller: BTreeMap<Arc<str>, usize>,
    by_owner: BTreeMap<HandshakeOwner, usize>,
    /// At most as many as there are handshakes in progress. None of them could be given a slot now.
    waiting: VecDeque<(HandshakeOwner, oneshot::Sender<HandshakeSlot>)>,
}

/// A slot, returned when it is dropped.
pub(super) struct HandshakeSlot {
    places: Arc<HandshakeSlots>,
    owner: HandshakeOwner,
}

impl HandshakeSlots {
    pub async fn enter(self: &Arc<Self>, owner: &HandshakeOwner) -> HandshakeSlot {
        let granted = {
            let mut inner = self.lock();
            if inner.admits(owner) {
                inner.take(owner);
                return self.place(owner.clone());
            }
            let (grant, granted) = oneshot::channel();
            inner.waiting.push_back((owner.clone(), grant));
            granted
        };
        granted.await.expect("the places outlive whoever waits for one")
    }

    fn place(self: &Arc<Self>, owner: HandshakeOwner) -> HandshakeSlot {
        HandshakeSlot {
            places: self.clone(),
            owner,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn admits(&self, owner: &HandshakeOwner) -> bool {
        let free = ASKING_MAX - self.held;
        let of_caller = self.by_caller.get(&owner.caller).copied().unwrap_or(0);
        let of_owner = self.by_owner.get(owner).copied().unwrap_or(0);
        of_caller < free && of_owner < ASKING_PER_TOPIC_MAX
    }

    fn take(&mut self, owner: &HandshakeOwner) {
        self.held += 1;
        *self.by_caller.entry(owner.caller.clone()).or_default() += 1;
        *self.by_owner.entry(owner.clone()).or_default() += 1;
    }

    fn give_back(&mut self, owner: &HandshakeOwner) {
        self.held -= 1;
        less(&mut self.by_caller, &owner.caller);
        less(&mut self.by_owner, owner);
    }
}

/// Decrements a count and removes it at zero.
fn less<K: Ord>(counts: &mut BTreeMap<K, usize>, of: &K) {
    if let Some(count) = counts.get_mut(of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(of);
        }
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        let mut granted = Vec::new();
        let mut inner = self.places.lock();
        inner.give_back(&self.owner);
        for (owner, grant) in std::mem::take(&mut inner.waiting) {
            match () {
                () if grant.is_closed() => {}
                () if inner.admits(&owner) => {
                    inner.take(&owner);
                    granted.push((owner, grant));
                }
                () => inner.waiting.push_back((owner, grant)),
            }
        }
        drop(inner);
        for (owner, grant) in granted {
            // If the waiter is gone, the slot is returned at once.
            drop(grant.send(self.places.place(owner)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    type Entering<'a> = Pin<Box<dyn Future<Output = HandshakeSlot> + 'a>>;

    fn now(entering: &mut Entering<'_>) -> Option<HandshakeSlot> {
        match entering.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(place) => Some(place),
            Poll::Pending => None,
        }
    }

    fn enter<'a>(places: &'a Arc<HandshakeSlots>, owner: &'a HandshakeOwner) -> Entering<'a> {
        Box::pin(places.enter(owner))
    }

    #[test]
    fn a_caller_with_many_topics_leaves_room_for_others() {
        let places = Arc::new(HandshakeSlots::default());
        let mut held = Vec::new();
        for topic in 0..100 {
            let greedy = HandshakeOwner::new("greedy", TopicId(topic));
            for _ in 0..20 {
                held.extend(now(&mut enter(&places, &greedy)));
            }
        }
        assert_eq!(held.len(), ASKING_MAX / 2);
        assert!(now(&mut enter(&places, &HandshakeOwner::new("other", TopicId(1)))).is_some());
    }

    #[test]
    fn a_topic_has_a_bound_of_its_own_and_those_who_wait_come_in_order() {
        let places = Arc::new(HandshakeSlots::default());
        let owner = HandshakeOwner::new("me", TopicId(1));
        let mut held: Vec<HandshakeSlot> = (0..ASKING_PER_TOPIC_MAX)
            .filter_map(|_| now(&mut enter(&places, &owner)))
            .collect();
        assert_eq!(held.len(), ASKING_PER_TOPIC_MAX);
        let (mut first, mut gone, mut second) = (
            enter(&places, &owner),
            enter(&places, &owner),
            enter(&places, &owner),
        );
        assert!(now(&mut first).is_none() && now(&mut gone).is_none() && now(&mut second).is_none());
        assert!(now(&mut enter(&places, &HandshakeOwner::new("me", TopicId(2)))).is_some());
        drop(gone);
        held.pop();
        let place = now(&mut first);
        assert!(place.is_some() && now(&mut second).is_none());
        drop(place);
        assert!(now(&mut second).is_some());
    }
}
