//! Simulated webhook receivers: healthy, slow, flapping, hanging, broken, choosy.

use crate::audit::{Audit, Seen};
use crate::chance::Chance;
use async_trait::async_trait;
use postrider_core::json::Raw;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::deliver::{Answer, Failure, FailureKind, Reply, Request, Transport};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How one receiver behaves until the faults stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    Healthy,
    /// Answers 200 after this many seconds.
    Slow(u64),
    /// Fails this share of requests, in percent, with a status of its choice.
    Flaky(u64),
    /// Refuses connections for this many seconds from the start.
    DownFor(u64),
    /// Accepts and never answers for this many seconds from the start.
    HangsFor(u64),
    /// Always answers this.
    Answers(u16),
    /// Resets the connection after it has taken the event in.
    TakesAndResets(u64),
}

pub struct Receivers {
    pub manners: Vec<Manner>,
    pub clock: Arc<dyn Clock>,
    pub audit: Arc<Audit>,
    pub chance: Mutex<Chance>,
    /// From then on every receiver is healthy.
    pub faults_until: Timestamp,
    pub started: Timestamp,
}

/// What a receiver does with one request.
enum Doing {
    Answer(u16),
    Refuse,
    Hang,
    TakeAndReset,
}

impl Receivers {
    fn decide(&self, receiver: usize, now: Timestamp) -> (Doing, Duration) {
        let mut chance = self.chance.lock().expect("no panic holds it");
        let latency = Duration::from_millis(1 + chance.below(50));
        if now >= self.faults_until {
            return (Doing::Answer(200), latency);
        }
        let age = now.since(self.started).as_secs();
        let doing = match self.manners[receiver] {
            Manner::Healthy => Doing::Answer(200),
            Manner::Slow(seconds) => return (Doing::Answer(200), Duration::from_secs(seconds)),
            Manner::Flaky(percent) if chance.percent(percent) => {
                const STATUSES: [u16; 8] = [500, 503, 429, 408, 302, 409, 599, 205];
                Doing::Answer(STATUSES[chance.below(8) as usize])
            }
            Manner::DownFor(seconds) if age < seconds => Doing::Refuse,
            Manner::HangsFor(seconds) if age < seconds => Doing::Hang,
            Manner::Answers(status) => Doing::Answer(status),
            Manner::TakesAndResets(percent) if chance.percent(percent) => Doing::TakeAndReset,
            _ => Doing::Answer(200),
        };
        (doing, latency)
    }
}

#[async_trait]
impl Transport for Receivers {
    async fn send(&self, request: Request) -> Reply {
        let receiver: usize = request
            .url
            .path()
            .trim_start_matches('/')
            .parse()
            .expect("our own URLs");
        let now = self.clock.now();
        let body = std::str::from_utf8(&request.body).expect("bodies are JSON");
        let raw = Raw::parse(body).expect("bodies are JSON");
        let ids: Vec<u64> = raw.elements().map(|e| id_of(e)).collect();
        let header = |name| request.header(name).expect("sent with every delivery");
        let count = header("aeg-delivery-count").parse().expect("a number");
        let name = header("aeg-subscription-name").to_lowercase();
        let (doing, latency) = self.decide(receiver, now);
        let attempt = self.audit.arrived(Seen {
            subscription: name,
            ids,
            at: now,
            attempts_before: count,
        });
        match doing {
            Doing::Hang => std::future::pending().await,
            Doing::Refuse => failed("connection refused"),
            Doing::TakeAndReset => {
                self.clock.sleep_until(now + latency).await;
                self.audit.taken(attempt);
                failed("connection reset")
            }
            Doing::Answer(status) => {
                self.clock.sleep_until(now + latency).await;
                if (200..=204).contains(&status) {
                    self.audit.taken(attempt);
                }
                self.audit.answered(attempt, status);
                Reply::Answered(Answer {
                    status,
                    ..Answer::default()
                })
            }
        }
    }
}

fn failed(detail: &str) -> Reply {
    Reply::Failed(Failure {
        kind: FailureKind::Socket,
        detail: detail.to_owned(),
    })
}

/// The number in an event's id.
fn id_of(event: Raw<'_>) -> u64 {
    let id = event.get("id").and_then(Raw::as_str).expect("events have ids");
    id.parse().expect("ids are numbers")
}
