//! Checks every interleaving of the lane protocol with loom, by compiling the pool's own source
//! against loom's lock.
//!
//! Lanes run as threads that claim from a shared counter; the lane that claims the last delivery
//! closes the pool. A lost wake-up leaves a lane parked next to unclaimed work, which loom reports
//! as a deadlock.

#[expect(dead_code, reason = "the model uses what lanes use, not what reports use")]
#[path = "../src/dispatch/lanes.rs"]
mod lanes;

mod lane_sync {
    pub use loom::sync::Mutex;
}

use lanes::{LanePool, LaneStart, ParkOutcome};
use loom::future::{AtomicWaker, block_on};
use loom::sync::atomic::Ordering::SeqCst;
use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::thread;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

struct ModelSubscription {
    lanes: LanePool,
    /// Deliveries that can be claimed.
    waiting: AtomicUsize,
    /// Deliveries that will still be published or claimed.
    left: AtomicUsize,
    lanes_max: usize,
    memory: MemoryGate,
    /// Whether a lane waits for memory: others would only queue behind it.
    waits_for_memory: AtomicBool,
    running: std::sync::Mutex<Vec<thread::JoinHandle<()>>>,
}

/// The budget of bytes in flight: first used up, then not.
struct MemoryGate {
    open: AtomicBool,
    opened: AtomicWaker,
}

impl MemoryGate {
    fn set_open(&self) {
        self.open.store(true, SeqCst);
        self.opened.wake();
    }

    fn wait(&self) {
        block_on(poll_fn(|context| {
            self.opened.register_by_ref(context.waker());
            match self.open.load(SeqCst) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        }));
    }
}

impl ModelSubscription {
    fn new(lanes_max: usize, deliveries: usize) -> Arc<ModelSubscription> {
        Arc::new(ModelSubscription {
            lanes: LanePool::new(),
            waiting: AtomicUsize::new(0),
            left: AtomicUsize::new(deliveries),
            lanes_max,
            memory: MemoryGate {
                open: AtomicBool::new(true),
                opened: AtomicWaker::new(),
            },
            waits_for_memory: AtomicBool::new(false),
            running: Default::default(),
        })
    }

    /// Waits for all lanes. Returns how many deliveries have not been claimed.
    fn left_when_all_have_ended(&self) -> usize {
        let next = || self.running.lock().unwrap().pop();
        while let Some(lane) = next() {
            lane.join().unwrap();
        }
        self.left.load(SeqCst)
    }

    fn publish(self: &Arc<Self>) {
        self.waiting.fetch_add(1, SeqCst);
        self.lanes.announce(1);
        self.start_lanes();
    }

    fn start_lanes(self: &Arc<Self>) {
        if !self.waits_for_memory.load(SeqCst) {
            self.start_lane();
        }
    }

    fn start_lane(self: &Arc<Self>) {
        if self.lanes.start_lane(self.lanes_max) == LaneStart::Spawn {
            let subscription = self.clone();
            let lane = thread::spawn(move || subscription.lane());
            self.running.lock().unwrap().push(lane);
        }
    }

    fn lane(self: Arc<Self>) {
        loop {
            let epoch = self.lanes.epoch();
            if self.waiting.load(SeqCst) > 0 && !self.memory.open.load(SeqCst) {
                if self.waits_for_memory.swap(true, SeqCst) {
                    if self.lanes.end_lane(epoch) {
                        self.start_lanes();
                    }
                    return;
                }
                self.memory.wait();
                self.waits_for_memory.store(false, SeqCst);
                continue;
            }
            let take = |waiting: usize| waiting.checked_sub(1);
            if self.waiting.fetch_update(SeqCst, SeqCst, take).is_ok() {
                if self.left.fetch_sub(1, SeqCst) == 1 {
                    self.lanes.close();
                }
                continue;
            }
            let (parked, _) = self.lanes.park(epoch);
            if block_on(parked) == ParkOutcome::End {
                return;
            }
        }
    }

    /// A lane that finds its endpoint full: it ends, and checks for work announced in the meantime.
    fn refused_lane(self: &Arc<Self>, epoch: u64) {
        if self.lanes.end_lane(epoch) {
            self.start_lane();
        }
    }
}

fn check_all(model: impl Fn() + Sync + Send + 'static) {
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(2);
    bounded.check(model);
}

#[test]
fn no_wake_up_is_lost_between_two_lanes() {
    check_all(|| {
        let subscription = ModelSubscription::new(2, 2);
        let other = subscription.clone();
        let publisher = thread::spawn(move || other.publish());
        subscription.publish();
        publisher.join().unwrap();
        assert_eq!(subscription.left_when_all_have_ended(), 0);
    });
}

#[test]
fn work_announced_while_the_only_lane_is_reaped_is_claimed() {
    check_all(|| {
        let subscription = ModelSubscription::new(1, 2);
        subscription.publish();
        let other = subscription.clone();
        let reaper = thread::spawn(move || {
            other.lanes.reap();
            other.lanes.reap();
        });
        subscription.publish();
        reaper.join().unwrap();
        assert_eq!(subscription.left_when_all_have_ended(), 0);
    });
}

#[test]
fn work_announced_while_the_only_lane_is_refused_is_claimed() {
    check_all(|| {
        let subscription = ModelSubscription::new(1, 1);
        subscription.lanes.add_lane();
        let epoch = subscription.lanes.epoch();
        let other = subscription.clone();
        let refused = thread::spawn(move || other.refused_lane(epoch));
        subscription.publish();
        refused.join().unwrap();
        assert_eq!(subscription.left_when_all_have_ended(), 0);
    });
}

#[test]
fn work_announced_while_a_lane_waits_for_memory_is_claimed() {
    check_all(|| {
        let subscription = ModelSubscription::new(2, 2);
        subscription.memory.open.store(false, SeqCst);
        subscription.publish();
        let other = subscription.clone();
        let elsewhere = thread::spawn(move || other.memory.set_open());
        subscription.publish();
        elsewhere.join().unwrap();
        assert_eq!(subscription.left_when_all_have_ended(), 0);
    });
}

#[test]
fn lanes_end_whenever_the_subscription_is_removed() {
    check_all(|| {
        // More deliveries are expected than published: only the removal can close the pool.
        let subscription = ModelSubscription::new(2, 3);
        subscription.publish();
        let other = subscription.clone();
        let remover = thread::spawn(move || other.lanes.close());
        subscription.publish();
        remover.join().unwrap();
        subscription.left_when_all_have_ended();
    });
}
