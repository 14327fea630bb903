//! Limits how many filters that examine many bytes are evaluated at a time.

use postrider_core::ids::TopicId;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Turns for costly filters. They may use a part of the processors, and the filters of any one
/// topic only one: publishers to other topics do not queue behind them.
pub struct FilterLimiter {
    all: Arc<Semaphore>,
    /// Topics for which a turn is taken or waited for.
    topics: Mutex<HashMap<TopicId, Weak<Semaphore>>>,
}

/// A turn to evaluate filters; passes to the next request on drop.
#[must_use]
pub struct FilterPermit {
    _all: OwnedSemaphorePermit,
    _topic: OwnedSemaphorePermit,
}

impl FilterLimiter {
    pub fn new(at_once: usize) -> FilterLimiter {
        FilterLimiter {
            all: Arc::new(Semaphore::new(at_once)),
            topics: Mutex::default(),
        }
    }

    /// Waits for the topic's turn and then for a processor. Cancelling gives up the position in the
    /// queue.
    pub async fn take(&self, topic: TopicId) -> FilterPermit {
        let of_topic = self.of_topic(topic).acquire_owned().await;
        let of_all = self.all.clone().acquire_owned().await;
        FilterPermit {
            _all: of_all.expect("never closed"),
            _topic: of_topic.expect("never closed"),
        }
    }

    fn of_topic(&self, topic: TopicId) -> Arc<Semaphore> {
        let mut topics = self.topics.lock().expect("no panic while it is locked");
        if let Some(known) = topics.get(&topic).and_then(Weak::upgrade) {
            return known;
        }
        topics.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(1));
        topics.insert(topic, Arc::downgrade(&turns));
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    /// Whether a turn is available at once.
    async fn is_free(turns: &FilterLimiter, topic: u64) -> bool {
        let mut turn = pin!(turns.take(TopicId(topic)));
        poll_fn(|cx| Poll::Ready(turn.as_mut().poll(cx).is_ready())).await
    }

    // Regression: all turns were one queue, so that costly requests to one topic delayed those to
    // all others.
    #[tokio::test]
    async fn a_topic_has_one_turn_at_a_time_and_leaves_the_others_theirs() {
        let turns = FilterLimiter::new(2);
        let first = turns.take(TopicId(1)).await;
        let mut next = pin!(turns.take(TopicId(1)));
        assert!(poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx).is_pending())).await);
        let other = turns.take(TopicId(2)).await;
        assert!(!is_free(&turns, 3).await, "both processors are busy");
        drop(first);
        let _next = next.await;
        drop(other);
        assert!(is_free(&turns, 3).await);
        assert_eq!(turns.topics.lock().unwrap().len(), 2, "others are forgotten");
    }
}
