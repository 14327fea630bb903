//! A day of retries in a second: a server with a test clock, and deliveries with their time on that
//! clock.

use crate::receiver::{ReceivedDelivery, TestReceiver};
use crate::server::{ServerSetup, TestServer};
use postrider_core::time::Timestamp;
use serde_json::{Value, json};
use std::time::Duration;

/// Real time that an attempt gets to reach a receiver which will not answer.
pub const UNANSWERED: &str = "500ms";

impl TestServer {
    /// Time of the server's test clock.
    #[track_caller]
    pub fn now(&self) -> Timestamp {
        let clock = self
            .send("GET", "/postrider/v1/clock", &[], "")
            .expect(200)
            .json();
        timestamp(&clock["now"])
    }

    /// Moves the test clock. Returns its new time, and the number of attempts made on the way.
    #[track_caller]
    pub fn advance(&self, how: &Value) -> (Timestamp, u64) {
        let path = "/postrider/v1/clock/advance";
        let answer = self.send("POST", path, &[], how.to_string()).expect(200).json();
        let attempts = answer["attempts"].as_u64().expect("a number of attempts");
        (timestamp(&answer["now"]), attempts)
    }
}

#[track_caller]
pub fn timestamp(text: &Value) -> Timestamp {
    let parsed = text.as_str().and_then(Timestamp::parse);
    parsed.unwrap_or_else(|| panic!("not a time: {text}"))
}

/// A server on a test clock and its receiver.
pub struct ClockLab {
    pub server: TestServer,
    pub receiver: TestReceiver,
    /// Time of the test clock from which seconds are counted.
    pub start: Timestamp,
}

/// A delivery and its time since the lab's start.
#[derive(Debug)]
pub struct TimedDelivery {
    pub at: Duration,
    pub delivery: ReceivedDelivery,
}

impl TimedDelivery {
    /// Number of earlier attempts, from the delivery's header.
    pub fn count(&self) -> u64 {
        let count = self.delivery.header("aeg-delivery-count").expect("a count");
        count.parse().expect("a number")
    }

    /// Id of the only event.
    pub fn id(&self) -> String {
        let [id] = self.delivery.ids().try_into().expect("one event");
        id
    }

    pub fn seconds(&self) -> u64 {
        whole_seconds(self.at)
    }
}

#[track_caller]
pub fn whole_seconds(time: Duration) -> u64 {
    assert_eq!(time.subsec_nanos(), 0, "{time:?} is a whole number of seconds");
    time.as_secs()
}

/// Times of deliveries, in seconds.
pub fn seconds(arrivals: &[TimedDelivery]) -> Vec<u64> {
    arrivals.iter().map(TimedDelivery::seconds).collect()
}

/// Times of deliveries in seconds, with the counts of earlier attempts.
pub fn seconds_and_counts(arrivals: &[TimedDelivery]) -> Vec<(u64, u64)> {
    arrivals.iter().map(|one| (one.seconds(), one.count())).collect()
}

impl ClockLab {
    pub fn start(setup: ServerSetup, receiver: TestReceiver) -> ClockLab {
        let server = setup.start();
        let start = server.now();
        ClockLab {
            server,
            receiver,
            start,
        }
    }

    /// A lab with a topic `orders` and a subscription `billing` to the receiver's `/`.
    pub fn subscribed(setup: ServerSetup, receiver: TestReceiver, properties: Value) -> ClockLab {
        let lab = ClockLab::start(setup, receiver);
        lab.server.put_topic("orders");
        lab.subscribe("billing", "/", properties);
        lab
    }

    /// Subscribes a path of the receiver to the topic `orders`.
    #[track_caller]
    pub fn subscribe(&self, name: &str, path: &str, properties: Value) {
        let url = self.receiver.url(path);
        self.server.subscribe("orders", name, &url, properties);
    }

    /// Seconds since the start.
    #[track_caller]
    pub fn now(&self) -> u64 {
        whole_seconds(self.server.now().since(self.start))
    }

    /// Moves the clock and returns the deliveries on the way, with the time that was reached.
    #[track_caller]
    fn advance(&self, how: &Value) -> Vec<TimedDelivery> {
        let (now, attempts) = self.server.advance(how);
        let at = now.since(self.start);
        let arrival = |_| TimedDelivery {
            at,
            delivery: self.receiver.next(),
        };
        (0..attempts).map(arrival).collect()
    }

    /// Moves the clock by seconds and returns the number of attempts.
    #[track_caller]
    pub fn pass(&self, seconds: u64) -> usize {
        self.advance(&json!({"by": format!("{seconds}s")})).len()
    }

    /// Moves the clock to seconds after the start and returns the number of attempts.
    #[track_caller]
    pub fn advance_to_second(&self, seconds: u64) -> usize {
        let to = self.start + Duration::from_secs(seconds);
        self.advance(&json!({"to": to.to_string()})).len()
    }

    /// Like `advance_to_second`, with attempts that are not answered.
    #[track_caller]
    pub fn advance_to_second_unanswered(&self, seconds: u64) -> usize {
        let to = self.start + Duration::from_secs(seconds);
        let how = json!({"to": to.to_string(), "settle": UNANSWERED});
        self.advance(&how).len()
    }

    /// Deliveries that arrive without moving the clock.
    #[track_caller]
    pub fn at_once(&self) -> Vec<TimedDelivery> {
        let at = self.server.advance(&json!({"by": "0s"})).0.since(self.start);
        let arrived = self.receiver.take_received().into_iter();
        arrived.map(|delivery| TimedDelivery { at, delivery }).collect()
    }

    /// Deliveries at the next instant with any; empty if none are left.
    #[track_caller]
    pub fn next_arrivals(&self) -> Vec<TimedDelivery> {
        self.advance(&json!({"toNextAttempt": true}))
    }

    /// The only delivery at the next instant with any.
    #[track_caller]
    pub fn next_arrival(&self) -> TimedDelivery {
        let [arrival] = self.next_arrivals().try_into().expect("one arrives");
        arrival
    }

    /// All deliveries from now on until none are left.
    #[track_caller]
    pub fn all_arrivals(&self) -> Vec<TimedDelivery> {
        let mut all = self.at_once();
        loop {
            let next = self.next_arrivals();
            if next.is_empty() {
                return all;
            }
            all.extend(next);
        }
    }

    /// A number of deliveries in `/healthz`.
    #[track_caller]
    pub fn count(&self, name: &str) -> u64 {
        let health = self.server.health();
        let number = health["deliveries"][name].as_u64();
        number.unwrap_or_else(|| panic!("no {name} in {health}"))
    }

    /// Dropped events by reason, from `/healthz`.
    pub fn dropped(&self) -> Value {
        self.server.health()["deliveries"]["dropped"].take()
    }
}
