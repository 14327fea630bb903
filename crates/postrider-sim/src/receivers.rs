//! Simulated webhook receivers: healthy, slow, flapping, hanging, broken, selective, redirecting,
//! with huge answers.

use crate::audit::{Auditor, ObservedRequest, ReceiverOutcome};
use crate::seeded_chance::SeededChance;
use async_trait::async_trait;
use bytes::Bytes;
use http::header::{HeaderValue, LOCATION, RETRY_AFTER};
use postrider_core::json::RawJson;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::deliver::{
    DeliveryAnswer, DeliveryReply, DeliveryRequest, DeliveryTransport, TransportFailure, TransportFailureKind,
};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The URL of all receivers, followed by the number of one.
pub const HOST: &str = "http://receiver.example/";
/// The target of redirections, to which nothing may ever be sent.
const ELSEWHERE: &str = "elsewhere";
/// The receiver of blob announcements, which always succeeds.
pub const LISTENER: &str = "listener";
/// The part of an answer's body that the real transport reads.
static HUGE: [u8; 64 * 1024] = [b'x'; 64 * 1024];

/// How one receiver behaves until the faults stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiverBehavior {
    Healthy,
    /// Answers 200 after this many seconds.
    Slow(u64),
    /// Fails this percentage of requests, with a status of its choice.
    Flaky(u64),
    /// Refuses connections for this many seconds from the start.
    DownFor(u64),
    /// The host name does not resolve for this many seconds from the start.
    UnknownFor(u64),
    /// Accepts and never answers for this many seconds from the start.
    HangsFor(u64),
    /// Up for this many seconds, then down for as many, and so on.
    Flapping(u64),
    /// Always answers with this status.
    Answers(u16),
    /// Always redirects with this status.
    Redirects(u16),
    /// Answers with this status and a body of the greatest size, which takes this many seconds to
    /// arrive.
    HugeBody(u16, u64),
    /// Answers with success after this many seconds, when the attempt has timed out.
    Late(u64),
    /// Sends `Retry-After`: in seconds, as a date, malformed, or in a thousand years.
    AsksToWait(u64),
    /// Refuses every fifth event.
    Choosy,
    /// Resets the connection after it has received the event.
    TakesAndResets(u64),
}

impl ReceiverBehavior {
    pub fn any(chance: &mut SeededChance) -> ReceiverBehavior {
        const OFTEN: [u16; 9] = [400, 401, 403, 404, 408, 413, 500, 503, 429];
        match chance.below(16) {
            0 => ReceiverBehavior::Healthy,
            1 => ReceiverBehavior::Slow(1 + chance.below(45)),
            2 => ReceiverBehavior::Flaky(10 + chance.below(80)),
            3 => ReceiverBehavior::Flaky(95),
            4 => ReceiverBehavior::DownFor(60 + chance.below(7000)),
            5 => ReceiverBehavior::UnknownFor(60 + chance.below(7000)),
            6 => ReceiverBehavior::HangsFor(60 + chance.below(7000)),
            7 => ReceiverBehavior::Flapping(5 + chance.below(1200)),
            8 | 9 => ReceiverBehavior::Answers(OFTEN[chance.below(9) as usize]),
            10 => ReceiverBehavior::Redirects([301, 302, 307, 308][chance.below(4) as usize]),
            11 => ReceiverBehavior::HugeBody([200, 500][chance.below(2) as usize], chance.below(12)),
            12 => ReceiverBehavior::Late(31 + chance.below(170)),
            13 => ReceiverBehavior::AsksToWait(20 + chance.below(80)),
            14 => ReceiverBehavior::Choosy,
            _ => ReceiverBehavior::TakesAndResets(10 + chance.below(50)),
        }
    }

    /// Whether the receiver answers at once, whatever the answer.
    pub fn is_quick(self) -> bool {
        !matches!(
            self,
            ReceiverBehavior::Slow(_)
                | ReceiverBehavior::HangsFor(_)
                | ReceiverBehavior::HugeBody(..)
                | ReceiverBehavior::Late(_)
        )
    }
}

pub struct SimulatedReceivers {
    pub manners: Vec<ReceiverBehavior>,
    pub clock: Arc<dyn Clock>,
    /// Waits for this much time to pass, whatever the clock shows.
    pub pass: PassTime,
    pub audit: Arc<Auditor>,
    pub chance: Mutex<SeededChance>,
    /// Whether every receiver is healthy from now on.
    pub calm: AtomicBool,
    pub started: Timestamp,
    /// The longest that a quick answer takes.
    pub latency_max: Duration,
}

type PassTime = Box<dyn Fn(Duration) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// A receiver's reaction to one request.
#[derive(Default)]
struct ReceiverReaction {
    takes: Duration,
    /// None: no answer ever comes.
    came: Option<ReceiverOutcome>,
    answer: DeliveryAnswer,
    retry_after: Option<Duration>,
}

impl ReceiverReaction {
    fn answer(status: u16) -> ReceiverReaction {
        ReceiverReaction {
            came: Some(ReceiverOutcome::Answered(status)),
            answer: DeliveryAnswer {
                status,
                ..DeliveryAnswer::default()
            },
            ..ReceiverReaction::default()
        }
    }

    fn answer_after(status: u16, seconds: u64) -> ReceiverReaction {
        ReceiverReaction {
            takes: Duration::from_secs(seconds),
            ..ReceiverReaction::answer(status)
        }
    }

    fn broken() -> ReceiverReaction {
        ReceiverReaction {
            came: Some(ReceiverOutcome::Broken),
            ..ReceiverReaction::default()
        }
    }
}

impl SimulatedReceivers {
    fn decide(&self, receiver: usize, ids: &[u64], now: Timestamp) -> ReceiverReaction {
        let mut chance = self.chance.lock().expect("no panic holds it");
        let millis = 1 + chance.below(self.latency_max.as_millis().max(1) as u64);
        let mut doing = if self.calm.load(Relaxed) {
            ReceiverReaction::answer(200)
        } else {
            let age = now.since(self.started).as_secs();
            act(self.manners[receiver], &mut chance, age, ids, now)
        };
        if !self.latency_max.is_zero() {
            doing.takes += Duration::from_millis(millis);
        }
        doing
    }
}

fn act(
    manner: ReceiverBehavior,
    chance: &mut SeededChance,
    age: u64,
    ids: &[u64],
    now: Timestamp,
) -> ReceiverReaction {
    match manner {
        ReceiverBehavior::Slow(seconds) | ReceiverBehavior::Late(seconds) => {
            ReceiverReaction::answer_after(200, seconds)
        }
        ReceiverBehavior::Flaky(percent) if chance.percent(percent) => {
            const STATUSES: [u16; 12] = [500, 503, 429, 408, 302, 409, 599, 205, 201, 204, 404, 500];
            ReceiverReaction::answer(STATUSES[chance.below(12) as usize])
        }
        ReceiverBehavior::DownFor(seconds) if age < seconds => ReceiverReaction::broken(),
        ReceiverBehavior::UnknownFor(seconds) if age < seconds => ReceiverReaction {
            came: Some(ReceiverOutcome::Unresolved),
            ..ReceiverReaction::default()
        },
        ReceiverBehavior::HangsFor(seconds) if age < seconds => ReceiverReaction::default(),
        ReceiverBehavior::Flapping(period) if (age / period) % 2 == 1 => ReceiverReaction::broken(),
        ReceiverBehavior::Answers(status) => ReceiverReaction::answer(status),
        ReceiverBehavior::Redirects(status) => {
            let mut doing = ReceiverReaction::answer(status);
            let elsewhere = format!("{HOST}{ELSEWHERE}");
            let location = HeaderValue::try_from(elsewhere).expect("our own text");
            doing.answer.headers.insert(LOCATION, location);
            doing
        }
        ReceiverBehavior::HugeBody(status, seconds) => {
            let mut doing = ReceiverReaction::answer_after(status, seconds);
            doing.answer.body = Bytes::from_static(&HUGE);
            doing
        }
        ReceiverBehavior::AsksToWait(percent) if chance.percent(percent) => ask_to_wait(chance, now),
        ReceiverBehavior::Choosy if ids.iter().any(|id| id.is_multiple_of(5)) => {
            ReceiverReaction::answer(if ids[0].is_multiple_of(2) { 400 } else { 413 })
        }
        ReceiverBehavior::TakesAndResets(percent) if chance.percent(percent) => ReceiverReaction::broken(),
        _ => ReceiverReaction::answer(200),
    }
}

fn ask_to_wait(chance: &mut SeededChance, now: Timestamp) -> ReceiverReaction {
    let status = [429, 503, 500][chance.below(3) as usize];
    let mut doing = ReceiverReaction::answer(status);
    let seconds = 1 + chance.below(4000);
    let (text, asked) = match chance.below(6) {
        0 | 1 => (seconds.to_string(), Some(Duration::from_secs(seconds))),
        2 | 3 => {
            let at = now + Duration::from_secs(seconds);
            let at = Timestamp::from_secs(at.nanos() / 1_000_000_000);
            // The requested wait counts from the arrival of the answer, a little later.
            (http_date(at), Some(at.since(now + Duration::from_millis(60))))
        }
        4 => (
            ["soon", "-5", "99999999999999999999999", ""][chance.below(4) as usize].to_owned(),
            None,
        ),
        _ => (u64::MAX.to_string(), Some(Duration::from_secs(u64::MAX))),
    };
    let header = HeaderValue::try_from(text).expect("our own text");
    doing.answer.headers.insert(RETRY_AFTER, header);
    doing.retry_after = asked.filter(|_| status != 500);
    doing
}

fn http_date(at: Timestamp) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let c = at.civil();
    let day = DAYS[(at.nanos() / 86_400_000_000_000 % 7) as usize];
    let month = MONTHS[usize::from(c.month) - 1];
    format!(
        "{day}, {:02} {month} {:04} {:02}:{:02}:{:02} GMT",
        c.day, c.year, c.hour, c.minute, c.second
    )
}

/// The number of the receiver at this URL.
pub fn number(url: &str) -> usize {
    let path = url.trim_start_matches(HOST);
    path.parse().expect("our own URLs")
}

#[async_trait]
impl DeliveryTransport for SimulatedReceivers {
    async fn send(self: Arc<Self>, request: DeliveryRequest) -> DeliveryReply {
        let path = request.url.path().trim_start_matches('/');
        if path == ELSEWHERE {
            self.audit.strayed();
            return DeliveryReply::Answered(ReceiverReaction::answer(200).answer);
        }
        let body = request.body_bytes();
        let body = std::str::from_utf8(&body).expect("bodies are JSON");
        let raw = RawJson::parse(body).expect("bodies are JSON");
        if path == LISTENER {
            raw.elements().for_each(|event| self.audit.blob_announced(event));
            return DeliveryReply::Answered(ReceiverReaction::answer(200).answer);
        }
        let receiver: usize = path.parse().expect("our own URLs");
        let ids: Vec<u64> = raw.elements().map(|e| id_of(e)).collect();
        let header = |name| request.header(name).expect("sent with every delivery");
        let count = header("aeg-delivery-count").parse().expect("a number");
        let name = header("aeg-subscription-name").to_lowercase();
        let doing = self.decide(receiver, &ids, self.clock.now());
        let attempt = self.audit.arrived(ObservedRequest {
            subscription: name,
            receiver,
            ids,
            attempts_before: count,
            will: doing.came.map(|came| (doing.takes, came)),
        });
        let Some(came) = doing.came else {
            return std::future::pending().await;
        };
        if !doing.takes.is_zero() {
            (self.pass)(doing.takes).await;
        }
        self.audit.ended(attempt, came, doing.retry_after);
        let failed = |kind, detail: &str| {
            DeliveryReply::Failed(TransportFailure {
                kind,
                detail: detail.to_owned(),
            })
        };
        match came {
            ReceiverOutcome::Answered(_) => DeliveryReply::Answered(doing.answer),
            ReceiverOutcome::Unresolved => failed(TransportFailureKind::Resolution, "no such host"),
            ReceiverOutcome::Broken | ReceiverOutcome::TimedOut => {
                failed(TransportFailureKind::Socket, "connection reset")
            }
        }
    }
}

/// The number in an event's id.
fn id_of(event: RawJson<'_>) -> u64 {
    let id = event
        .get("id")
        .and_then(RawJson::as_str)
        .expect("events have ids");
    id.parse().expect("ids are numbers")
}
