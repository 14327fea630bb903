//! The contract of every store, as one test suite. Each function checks one promise on a new log.
//!
//! Settled claims become visible in the backlog and the due times shortly after `settle` returns,
//! or with the next `flush`; the suite waits for that. Everything else holds immediately.

pub mod dead_letters;
pub mod log_move;
pub mod archive;

pub use archive::{ArchiveUnderTest, archive};

use crate::log::LastAttempt;
use crate::{
    Backlog, Catalog, CatalogChange, CatalogContent, Claim, ClaimLimits, DeadLetterKey, Error, EventLog,
    Handshake, HandshakeExchange, HandshakeResponse, HandshakeState, LogListener, PendingDeadLetter,
    PendingDeadLetters, Settlement,
};
use async_trait::async_trait;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, PublishedBatch};
use postrider_core::ids::{Position, Secret, SubscriptionId, TopicId};
use postrider_core::outcome::Outcome;
use postrider_core::probation::{EndpointDelay, EndpointProbationDelay};
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::subscription::{
    Destination, DomainTopic, ResourceOrigin, Subscription, SubscriptionRetrySettings, Topic, TopicKind,
};
use postrider_core::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A kind of log under test.
#[async_trait]
pub trait LogUnderTest: Send + Sync {
    /// A new and empty log.
    async fn open(&self) -> Arc<dyn EventLog>;
    /// Closes the log and opens it again.
    async fn reopen(&self, log: Arc<dyn EventLog>) -> Arc<dyn EventLog>;
    /// Ends the log without closing it and opens what is durable.
    async fn crash(&self, log: Arc<dyn EventLog>) -> Arc<dyn EventLog>;
    /// Identifies the part of the log that a position belongs to. First attempts are offered in the
    /// order of publishing only within one part (a partition of a cluster, for example).
    fn lane(&self, _position: Position) -> u64 {
        0
    }
    /// Whether the whole log keeps the order of publishing, that is, has one part only.
    fn is_ordered(&self) -> bool {
        true
    }
    /// Whether the first event that matches a subscription opens it, without `open_subscription`.
    fn opens_on_first_match(&self) -> bool {
        false
    }
}

/// A kind of catalog under test.
#[async_trait]
pub trait CatalogUnderTest: Send + Sync {
    async fn open(&self) -> Arc<dyn Catalog>;
    async fn reopen(&self, catalog: Arc<dyn Catalog>) -> Arc<dyn Catalog>;
}

/// Runs every test of the log contract, one after the other.
pub async fn all(subject: &dyn LogUnderTest) {
    what_is_appended_is_claimed_in_order_by_whom_it_matched(subject).await;
    one_request_may_match_differently_event_by_event(subject).await;
    a_claim_is_not_handed_out_twice(subject).await;
    a_claim_stays_within_what_is_wanted(subject).await;
    done_dropped_and_dead_are_never_offered_again(subject).await;
    a_retry_is_offered_when_it_is_due_with_what_is_known_of_it(subject).await;
    retries_go_before_first_attempts(subject).await;
    due_times_are_known(subject).await;
    what_is_released_is_offered_again_in_order(subject).await;
    closing_a_subscription_drops_and_counts(subject).await;
    a_subscription_starts_with_the_next_append(subject).await;
    the_backlog_is_counted(subject).await;
    if subject.is_ordered() {
        the_oldest_is_known_wherever_it_waits(subject).await;
    }
    the_listener_is_told(subject).await;
    what_is_settled_stays_settled_after_a_restart(subject).await;
    retries_survive_a_restart(subject).await;
    positions_grow_and_the_identity_stays(subject).await;
    a_closed_subscription_stays_closed(subject).await;
    many_subscriptions_each_get_their_own(subject).await;
    a_big_backlog_drains_in_order(subject).await;
    a_backlog_drains_after_a_restart(subject).await;
    nothing_is_lost_while_appends_and_claims_interleave(subject).await;
    what_is_flushed_survives_a_crash(subject).await;
    a_withdrawn_retry_is_never_offered(subject).await;
    a_retry_that_is_due_can_be_withdrawn_until_it_is_claimed(subject).await;
    what_does_not_wait_is_not_withdrawn(subject).await;
    what_is_withdrawn_is_not_counted_when_a_subscription_is_closed(subject).await;
    a_retry_is_either_claimed_or_withdrawn(subject).await;
    dead_letters::all(subject).await;
    log_move::all(subject).await;
    for seed in 1..=6 {
        any_sequence_follows_the_model(subject, seed).await;
    }
}

/// More than any test publishes, so that one claim can return everything.
pub const WANT: ClaimLimits = ClaimLimits {
    events_max: usize::MAX,
    bytes_max: usize::MAX / 2,
    overhead: 0,
};

pub fn sub(n: u64) -> SubscriptionId {
    SubscriptionId(n)
}

pub fn at(secs: i64) -> Timestamp {
    Timestamp::from_secs(1_000_000 + secs)
}

/// A publish request, given as each event's text and the subscriptions that it matches.
pub fn events(events: &[(&str, &[u64])]) -> PublishedBatch {
    let mut body = String::from("[");
    let mut refs = Vec::new();
    let mut matched: Vec<Box<[SubscriptionId]>> = Vec::new();
    for (text, ids) in events {
        let start = body.len();
        body.push_str(text);
        let object = ByteSpan::new(start, body.len());
        body.push(',');
        let set: Box<[SubscriptionId]> = ids.iter().map(|id| SubscriptionId(*id)).collect();
        let index = matched.iter().position(|known| *known == set).unwrap_or_else(|| {
            matched.push(set);
            matched.len() - 1
        });
        refs.push(EventRef {
            object,
            matched: index as u32,
            ..EventRef::default()
        });
    }
    body.push(']');
    PublishedBatch {
        topic: TopicId(3),
        schema: EventSchema::CloudEvent,
        received: at(0),
        publisher: "key1".into(),
        trace: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        replay: 0,
        hops: 3,
        body: body.into(),
        events: refs,
        matched,
    }
}

/// The settlement of a claim, with one more attempt counted unless `next` is `Done`.
pub fn settled(claim: &Claim, next: NextStep) -> Settlement {
    Settlement {
        claim: claim.clone(),
        at: at(2),
        attempts_made: claim.attempts_made + 1,
        last_attempt: Some(LastAttempt {
            at: at(1),
            outcome: Outcome::Busy,
            status: Some(503),
        }),
        next,
    }
}

/// Claims until nothing more is offered.
pub async fn claim_all(log: &dyn EventLog, of: SubscriptionId, now: Timestamp) -> Vec<Claim> {
    let mut claims = Vec::new();
    loop {
        let more = log.claim(of, now, WANT).await.unwrap();
        if more.is_empty() {
            return claims;
        }
        claims.extend(more);
    }
}

/// Claims exactly `count` deliveries; a claim may return fewer than wanted, as long as it is not
/// empty.
async fn claim_count(log: &dyn EventLog, of: SubscriptionId, count: usize) -> Vec<Claim> {
    let mut claims = Vec::new();
    while claims.len() < count {
        let want = ClaimLimits {
            events_max: count - claims.len(),
            ..WANT
        };
        let more = log.claim(of, at(0), want).await.unwrap();
        assert!(!more.is_empty(), "{} of {count}", claims.len());
        claims.extend(more);
    }
    claims
}

/// Waits for a condition that a store fulfils asynchronously.
#[expect(
    clippy::disallowed_methods,
    reason = "a store's own threads follow no clock of ours"
)]
pub async fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..2_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never came true: {what}");
}

/// Pseudo-random numbers; the same seed gives the same sequence.
pub struct SeededRandom(pub u64);

impl SeededRandom {
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

fn texts(claims: &[Claim]) -> Vec<&str> {
    claims.iter().map(Claim::object).collect()
}

/// Claims in the order of publishing, given the positions of the requests in that order. The claims
/// are sorted where the log does not promise the order across its parts.
fn in_order(subject: &dyn LogUnderTest, mut claims: Vec<Claim>, requests: &[Position]) -> Vec<Claim> {
    check_lanes(subject, &claims);
    if !subject.is_ordered() {
        let request = |claim: &Claim| requests.iter().position(|first| *first == claim.entry.first);
        claims.sort_by_key(|claim| (request(claim), claim.index));
    }
    claims
}

/// Checks that first attempts are in the order of publishing within each part of the log.
fn check_lanes(subject: &dyn LogUnderTest, claims: &[Claim]) {
    let mut last: BTreeMap<u64, Position> = BTreeMap::new();
    for position in claims
        .iter()
        .filter(|claim| claim.due.is_none())
        .map(Claim::position)
    {
        let before = last.insert(subject.lane(position), position);
        assert!(
            before.is_none_or(|before| before < position),
            "{position} comes after {before:?}"
        );
    }
}

/// Texts of several requests' events for a comparison: sorted unless the log promises their order.
fn comparable<T: Ord>(subject: &dyn LogUnderTest, mut texts: Vec<T>) -> Vec<T> {
    if !subject.is_ordered() {
        texts.sort();
    }
    texts
}

async fn open(subject: &dyn LogUnderTest, subscriptions: &[u64]) -> Arc<dyn EventLog> {
    let log = subject.open().await;
    for id in subscriptions {
        log.open_subscription(sub(*id)).await.unwrap();
    }
    log
}

async fn settle_all(log: &dyn EventLog, of: SubscriptionId, claims: &[Claim], next: NextStep) {
    let settled = claims.iter().map(|claim| settled(claim, next)).collect();
    log.settle(of, settled).await.unwrap();
}

pub async fn what_is_appended_is_claimed_in_order_by_whom_it_matched(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2, 3]).await;
    let batch = events(&[(r#"{"id":"ä"}"#, &[1, 2]), (r#"{"id": "b" }"#, &[1, 2])]);
    let first = log.append(batch.clone()).await.unwrap();
    let second = log.append(events(&[("{}", &[1])])).await.unwrap();
    assert!(
        subject.lane(second) != subject.lane(first) || second.0 >= first.0 + 2,
        "{second} follows two events at {first}"
    );

    let claims = claim_all(&*log, sub(1), at(0)).await;
    let claims = in_order(subject, claims, &[first, second]);
    assert_eq!(texts(&claims), [r#"{"id":"ä"}"#, r#"{"id": "b" }"#, "{}"]);
    assert_eq!(claims[0].entry.batch, batch);
    assert_eq!(claims[0].position(), first);
    assert_eq!(claims[1].position(), Position(first.0 + 1));
    assert_eq!(claims[2].position(), second);
    assert!(
        claims
            .iter()
            .all(|c| c.attempts_made == 0 && c.last_attempt.is_none() && c.due.is_none())
    );
    assert_eq!(
        texts(&claim_all(&*log, sub(2), at(0)).await),
        [r#"{"id":"ä"}"#, r#"{"id": "b" }"#]
    );
    assert!(
        claim_all(&*log, sub(3), at(0)).await.is_empty(),
        "nothing matched it"
    );
    assert!(
        claim_all(&*log, sub(4), at(0)).await.is_empty(),
        "it does not exist"
    );
    log.close().await.unwrap();
}

pub async fn one_request_may_match_differently_event_by_event(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    // The match sets appear in another order than the subscriptions' numbers.
    let batch = events(&[
        ("a", &[1, 2]),
        ("b", &[1]),
        ("c", &[]),
        ("d", &[1, 2]),
        ("e", &[2]),
        ("f", &[1]),
    ]);
    log.append(batch).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    assert_eq!(texts(&claims), ["a", "b", "d", "f"]);
    settle_all(&*log, sub(1), &claims[..1], NextStep::Done).await;

    let log = subject.reopen(log).await;
    assert_eq!(texts(&claim_all(&*log, sub(1), at(0)).await), ["b", "d", "f"]);
    assert_eq!(texts(&claim_all(&*log, sub(2), at(0)).await), ["a", "d", "e"]);
    log.close().await.unwrap();
}

pub async fn a_claim_is_not_handed_out_twice(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    for _ in 0..50 {
        log.append(events(&[("x", &[1]), ("y", &[1])])).await.unwrap();
    }
    let want = ClaimLimits {
        events_max: 7,
        ..WANT
    };
    let claim = || log.claim(sub(1), at(0), want);
    let mut seen = BTreeSet::new();
    loop {
        let (a, b, c) = tokio::join!(claim(), claim(), claim());
        let claims: Vec<Claim> = [a, b, c].into_iter().flat_map(|claims| claims.unwrap()).collect();
        if claims.is_empty() {
            break;
        }
        for claim in claims {
            assert!(seen.insert(claim.position()), "twice: {}", claim.position());
        }
    }
    assert_eq!(seen.len(), 100);
    log.close().await.unwrap();
}

pub async fn a_claim_stays_within_what_is_wanted(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    let big = "b".repeat(100);
    log.append(events(&[
        ("aaaaa", &[1]),
        ("aaaaa", &[1]),
        ("aaaaa", &[1]),
        (&big, &[1]),
        ("aa", &[1]),
    ]))
    .await
    .unwrap();
    let want = |events_max, bytes_max, overhead| ClaimLimits {
        events_max,
        bytes_max,
        overhead,
    };
    let count = async |want| log.claim(sub(1), at(0), want).await.unwrap().len();
    assert_eq!(count(want(0, 1_000, 0)).await, 0);
    assert_eq!(count(want(1, 1_000, 0)).await, 1);
    assert_eq!(
        count(want(9, 23, 7)).await,
        1,
        "two would be 24 bytes with their overhead"
    );
    assert_eq!(
        count(want(9, 104, 0)).await,
        1,
        "the next is too large to come with it"
    );
    assert_eq!(count(want(9, 50, 7)).await, 1, "a large one comes alone");
    assert_eq!(count(want(9, 1, 0)).await, 1);
    assert_eq!(count(want(9, 1_000, 0)).await, 0);
    log.close().await.unwrap();
}

pub async fn done_dropped_and_dead_are_never_offered_again(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    let ends = [
        NextStep::Done,
        NextStep::Drop(GiveUpReason::TimeToLiveExceeded),
        NextStep::DeadLetter(GiveUpReason::AttemptsExhausted),
    ];
    let first = log.append(events(&[("a", &[1]), ("b", &[1]), ("c", &[1])]));
    let first = first.await.unwrap();
    // The same three outcomes again, for deliveries that were retried before.
    let second = log.append(events(&[("d", &[1]), ("e", &[1]), ("f", &[1])]));
    let second = second.await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let claims = in_order(subject, claims, &[first, second]);
    for (claim, end) in claims.iter().zip(ends) {
        log.settle(sub(1), vec![settled(claim, end)]).await.unwrap();
    }
    settle_all(&*log, sub(1), &claims[3..], NextStep::RetryAt(at(5))).await;
    eventually("three retries", || log.backlog(sub(1)).retrying == 3).await;
    let retries = claim_all(&*log, sub(1), at(5)).await;
    assert_eq!(texts(&retries), ["d", "e", "f"]);
    for (claim, end) in retries.iter().zip(ends) {
        log.settle(sub(1), vec![settled(claim, end)]).await.unwrap();
    }
    eventually("nothing is left", || log.backlog(sub(1)) == Backlog::default()).await;
    assert!(claim_all(&*log, sub(1), at(1_000_000)).await.is_empty());
    assert_eq!(log.next_due(), None);

    let log = subject.reopen(log).await;
    assert!(claim_all(&*log, sub(1), at(1_000_000)).await.is_empty());
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    assert_eq!(log.subscriptions(), []);
    log.close().await.unwrap();
}

pub async fn a_retry_is_offered_when_it_is_due_with_what_is_known_of_it(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    log.append(events(&[("a", &[1]), ("b", &[1])])).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    // The later event is due sooner.
    let mut first = settled(&claims[0], NextStep::RetryAt(at(20)));
    first.last_attempt = Some(LastAttempt {
        at: at(2),
        outcome: Outcome::TimedOut,
        status: None,
    });
    let second = settled(&claims[1], NextStep::RetryAt(at(10)));
    log.settle(sub(1), vec![first.clone(), second]).await.unwrap();
    eventually("two retries", || log.backlog(sub(1)).retrying == 2).await;
    assert!(log.claim(sub(1), at(9), WANT).await.unwrap().is_empty());

    let due = claim_all(&*log, sub(1), at(10)).await;
    assert_eq!(texts(&due), ["b"]);
    assert_eq!((due[0].attempts_made, due[0].due), (1, Some(at(10))));
    settle_all(&*log, sub(1), &due, NextStep::RetryAt(at(40))).await;
    eventually("two retries again", || log.backlog(sub(1)).retrying == 2).await;

    let due = claim_all(&*log, sub(1), at(30)).await;
    assert_eq!(texts(&due), ["a"]);
    assert_eq!((due[0].attempts_made, due[0].due), (1, Some(at(20))));
    assert_eq!(due[0].last_attempt, first.last_attempt);
    settle_all(&*log, sub(1), &due, NextStep::Done).await;

    let due = claim_all(&*log, sub(1), at(40)).await;
    assert_eq!(texts(&due), ["b"]);
    assert_eq!((due[0].attempts_made, due[0].due), (2, Some(at(40))));
    log.close().await.unwrap();
}

pub async fn retries_go_before_first_attempts(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    log.append(events(&[("a", &[1]), ("bbbbbbbbbb", &[1])]))
        .await
        .unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    settle_all(&*log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    eventually("two retries", || log.backlog(sub(1)).retrying == 2).await;
    log.append(events(&[("c", &[1])])).await.unwrap();

    let want = ClaimLimits { bytes_max: 4, ..WANT };
    assert_eq!(
        texts(&log.claim(sub(1), at(5), want).await.unwrap()),
        ["a"],
        "nothing overtakes a retry"
    );
    assert_eq!(texts(&claim_all(&*log, sub(1), at(5)).await), ["bbbbbbbbbb", "c"]);
    log.close().await.unwrap();
}

pub async fn due_times_are_known(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    log.append(events(&[("a", &[1, 2]), ("b", &[1])])).await.unwrap();
    assert_eq!((log.next_due(), log.due(at(100))), (None, vec![]));
    let one = claim_all(&*log, sub(1), at(0)).await;
    let two = claim_all(&*log, sub(2), at(0)).await;
    settle_all(&*log, sub(1), &one[..1], NextStep::RetryAt(at(30))).await;
    settle_all(&*log, sub(2), &two, NextStep::RetryAt(at(20))).await;
    settle_all(&*log, sub(1), &one[1..], NextStep::RetryAt(at(10))).await;
    eventually("three retries", || {
        log.backlog(sub(1)).retrying == 2 && log.backlog(sub(2)).retrying == 1
    })
    .await;
    let due = |now| {
        let mut due = log.due(now);
        due.sort();
        due
    };
    assert_eq!(log.next_due(), Some(at(10)));
    assert_eq!(log.next_due_after(at(9)), Some(at(10)));
    assert_eq!(log.next_due_after(at(10)), Some(at(20)));
    assert_eq!(due(at(9)), []);
    assert_eq!(due(at(10)), [sub(1)]);
    assert_eq!(due(at(25)), [sub(1), sub(2)]);

    let claims = claim_all(&*log, sub(1), at(10)).await;
    assert_eq!(log.next_due(), Some(at(20)), "what is claimed is no longer due");
    assert_eq!(due(at(25)), [sub(2)]);
    settle_all(&*log, sub(1), &claims, NextStep::Done).await;
    let claims = claim_all(&*log, sub(2), at(25)).await;
    assert_eq!(log.next_due(), Some(at(30)));
    settle_all(&*log, sub(2), &claims, NextStep::RetryAt(at(28))).await;
    eventually("it is due at 28", || log.next_due() == Some(at(28))).await;
    log.close_subscription(sub(2)).await.unwrap();
    assert_eq!(log.next_due(), Some(at(30)));

    let log = subject.reopen(log).await;
    assert_eq!((log.next_due(), log.due(at(30))), (Some(at(30)), vec![sub(1)]));
    log.close().await.unwrap();
}

pub async fn what_is_released_is_offered_again_in_order(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    log.append(events(&[
        ("a", &[1]),
        ("b", &[1]),
        ("c", &[1]),
        ("d", &[1]),
        ("e", &[1]),
    ]))
    .await
    .unwrap();
    let claims = log
        .claim(
            sub(1),
            at(0),
            ClaimLimits {
                events_max: 4,
                ..WANT
            },
        )
        .await
        .unwrap();
    settle_all(&*log, sub(1), &claims[1..2], NextStep::Done).await;
    // Two claimants release, the one with the first events first.
    log.release(sub(1), claims[..1].to_vec());
    log.release(sub(1), claims[2..].to_vec());
    assert_eq!(log.backlog(sub(1)).waiting, 4);
    let claims = claim_all(&*log, sub(1), at(0)).await;
    assert_eq!(texts(&claims), ["a", "c", "d", "e"]);

    settle_all(&*log, sub(1), &claims[..2], NextStep::RetryAt(at(5))).await;
    eventually("two retries", || log.backlog(sub(1)).retrying == 2).await;
    log.release(sub(1), claims[2..].to_vec());
    let retries = claim_all(&*log, sub(1), at(5)).await;
    assert_eq!(texts(&retries), ["a", "c", "d", "e"]);
    log.release(sub(1), retries);
    let again = claim_all(&*log, sub(1), at(5)).await;
    assert_eq!(texts(&again), ["a", "c", "d", "e"]);
    assert_eq!((again[0].attempts_made, again[0].due), (1, Some(at(5))));
    settle_all(&*log, sub(1), &again, NextStep::Done).await;
    eventually("nothing is left", || log.backlog(sub(1)) == Backlog::default()).await;
    log.close().await.unwrap();
}

pub async fn closing_a_subscription_drops_and_counts(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    let five: Vec<(&str, &[u64])> = vec![("x", &[1, 2]); 5];
    log.append(events(&five)).await.unwrap();
    let claims = log
        .claim(
            sub(1),
            at(0),
            ClaimLimits {
                events_max: 3,
                ..WANT
            },
        )
        .await
        .unwrap();
    settle_all(&*log, sub(1), &claims[..2], NextStep::RetryAt(at(5))).await;
    eventually("two retries", || log.backlog(sub(1)).retrying == 2).await;
    let retry = log
        .claim(
            sub(1),
            at(5),
            ClaimLimits {
                events_max: 1,
                ..WANT
            },
        )
        .await
        .unwrap();
    // Two deliveries wait and one is to be retried; the two claimed ones are counted when they are
    // settled.
    assert_eq!(log.close_subscription(sub(1)).await.unwrap(), 3);
    assert_eq!(log.close_subscription(sub(1)).await.unwrap(), 0);
    settle_all(&*log, sub(1), &claims[2..], NextStep::RetryAt(at(6))).await;
    settle_all(&*log, sub(1), &retry, NextStep::Done).await;
    assert_eq!(log.next_due(), None);
    assert!(claim_all(&*log, sub(1), at(100)).await.is_empty());
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    assert_eq!(
        claim_all(&*log, sub(2), at(0)).await.len(),
        5,
        "the other one keeps its own"
    );
    log.close().await.unwrap();
}

pub async fn a_subscription_starts_with_the_next_append(subject: &dyn LogUnderTest) {
    let log = open(subject, &[]).await;
    log.append(events(&[("before", &[1])])).await.unwrap();
    log.open_subscription(sub(1)).await.unwrap();
    log.open_subscription(sub(1)).await.unwrap();
    log.append(events(&[("after", &[1])])).await.unwrap();
    let log = subject.reopen(log).await;
    log.open_subscription(sub(1)).await.unwrap();
    log.append(events(&[("later", &[1])])).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let mut expected = vec!["before", "after", "later"];
    if !subject.opens_on_first_match() {
        expected.remove(0);
    }
    assert_eq!(comparable(subject, texts(&claims)), comparable(subject, expected));
    log.close().await.unwrap();
}

pub async fn the_backlog_is_counted(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    let backlog = |waiting, claimed, retrying| Backlog {
        waiting,
        claimed,
        retrying,
        oldest: Some(at(0)),
    };
    let five: Vec<(&str, &[u64])> = vec![("x", &[1]); 5];
    log.append(events(&five)).await.unwrap();
    assert_eq!(log.backlog(sub(1)), backlog(5, 0, 0));
    let claims = log
        .claim(
            sub(1),
            at(0),
            ClaimLimits {
                events_max: 3,
                ..WANT
            },
        )
        .await
        .unwrap();
    assert_eq!(log.backlog(sub(1)), backlog(2, 3, 0));
    settle_all(&*log, sub(1), &claims[..1], NextStep::RetryAt(at(5))).await;
    settle_all(&*log, sub(1), &claims[1..2], NextStep::Done).await;
    eventually("one retries", || log.backlog(sub(1)) == backlog(2, 1, 1)).await;
    let retry = log
        .claim(
            sub(1),
            at(5),
            ClaimLimits {
                events_max: 1,
                ..WANT
            },
        )
        .await
        .unwrap();
    assert_eq!(log.backlog(sub(1)), backlog(2, 2, 0));
    assert_eq!(log.subscriptions(), [sub(1)]);
    log.release(sub(1), claims[2..].to_vec());
    log.release(sub(1), retry);
    assert_eq!(log.backlog(sub(1)), backlog(3, 0, 1));

    let log = subject.reopen(log).await;
    let found = log.backlog(sub(1));
    assert_eq!((found.waiting, found.claimed, found.retrying), (3, 0, 1));
    assert_eq!(log.subscriptions(), [sub(1)]);
    assert_eq!(claim_all(&*log, sub(1), at(5)).await.len(), 4);
    assert_eq!(log.backlog(sub(1)), backlog(0, 4, 0));
    log.close().await.unwrap();
}

pub async fn the_oldest_is_known_wherever_it_waits(subject: &dyn LogUnderTest) {
    let mut log = open(subject, &[1, 2]).await;
    for minute in 0..4 {
        let batch = PublishedBatch {
            received: at(60 * minute),
            ..events(&[("x", &[1, 2]), ("y", &[1])])
        };
        log.append(batch).await.unwrap();
    }
    let minute = |n: i64| Some(at(60 * n));
    let oldest = |log: &Arc<dyn EventLog>| log.backlog(sub(1)).oldest;
    let two = ClaimLimits {
        events_max: 2,
        ..WANT
    };
    assert_eq!(oldest(&log), minute(0), "it waits");
    let first = log.claim(sub(1), at(0), two).await.unwrap();
    assert_eq!(oldest(&log), minute(0), "it is claimed");
    settle_all(&*log, sub(1), &first, NextStep::RetryAt(at(500))).await;
    log.flush().await.unwrap();
    assert_eq!(oldest(&log), minute(0), "it is to be retried");
    let second = log.claim(sub(1), at(0), two).await.unwrap();
    settle_all(&*log, sub(1), &second, NextStep::Done).await;
    for restart in 0..2 {
        log = match restart {
            0 => subject.reopen(log).await,
            _ => subject.crash(log).await,
        };
        assert_eq!(oldest(&log), minute(0), "it is to be retried after a restart");
        assert_eq!(log.backlog(sub(2)).oldest, minute(0), "it still waits");
    }

    // Withdraw one of the two retries; let the other fail again and then succeed.
    let ended = log.withdraw(sub(1), vec![(at(500), first[0].position())]).await;
    assert_eq!(ended.unwrap().len(), 1);
    assert_eq!(oldest(&log), minute(0), "the other one is as old");
    let again = log
        .claim(
            sub(1),
            at(500),
            ClaimLimits {
                events_max: 1,
                ..WANT
            },
        )
        .await
        .unwrap();
    assert_eq!(oldest(&log), minute(0), "it is claimed again");
    settle_all(&*log, sub(1), &again, NextStep::RetryAt(at(600))).await;
    log.flush().await.unwrap();
    assert_eq!(oldest(&log), minute(0), "it has failed again");
    let again = log
        .claim(
            sub(1),
            at(600),
            ClaimLimits {
                events_max: 1,
                ..WANT
            },
        )
        .await
        .unwrap();
    settle_all(&*log, sub(1), &again, NextStep::Done).await;
    log.flush().await.unwrap();
    assert_eq!(oldest(&log), minute(2), "the next one waits");
    log.release_memory(sub(1));
    assert_eq!(oldest(&log), minute(2), "it does so without being in memory");
    let log = subject.reopen(log).await;
    assert_eq!(oldest(&log), minute(2), "it waits after a restart");
    let third = log.claim(sub(1), at(0), two).await.unwrap();
    let fourth = log.claim(sub(1), at(0), two).await.unwrap();
    settle_all(&*log, sub(1), &fourth, NextStep::RetryAt(at(900))).await;
    settle_all(&*log, sub(1), &third, NextStep::Done).await;
    log.flush().await.unwrap();
    assert_eq!(oldest(&log), minute(3));
    // Dead letters are no longer part of the backlog.
    let last = claim_all(&*log, sub(1), at(900)).await;
    assert_eq!(last.len(), 2);
    settle_all(
        &*log,
        sub(1),
        &last,
        NextStep::DeadLetter(GiveUpReason::BadRequest),
    )
    .await;
    log.flush().await.unwrap();
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    log.close().await.unwrap();
}

#[derive(Default)]
struct RecordingListener {
    ready: Mutex<BTreeMap<SubscriptionId, usize>>,
    due_changed: AtomicUsize,
    letters_added: AtomicUsize,
}

impl LogListener for RecordingListener {
    fn ready(&self, of: SubscriptionId, count: usize) {
        *self.ready.lock().unwrap().entry(of).or_default() += count;
    }

    fn due_changed(&self) {
        self.due_changed.fetch_add(1, Relaxed);
    }

    fn dead_letters_added(&self) {
        self.letters_added.fetch_add(1, Relaxed);
    }
}

pub async fn the_listener_is_told(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2, 3]).await;
    let heard = Arc::new(RecordingListener::default());
    log.listen(heard.clone());
    log.append(events(&[("a", &[1, 2]), ("b", &[1])])).await.unwrap();
    // The listener is told before the publisher gets its answer.
    let expected = BTreeMap::from([(sub(1), 2), (sub(2), 1)]);
    assert_eq!(*heard.ready.lock().unwrap(), expected);
    let claims = claim_all(&*log, sub(1), at(0)).await;
    settle_all(&*log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    eventually("the due times changed", || heard.due_changed.load(Relaxed) > 0).await;
    log.close().await.unwrap();
}

pub async fn what_is_settled_stays_settled_after_a_restart(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    let texts_all: Vec<String> = (0..100).map(|n| format!("e{n:03}")).collect();
    for pair in texts_all.chunks(2) {
        log.append(events(&[(&pair[0], &[1, 2]), (&pair[1], &[1])]))
            .await
            .unwrap();
    }
    let claims = claim_count(&*log, sub(1), 60).await;
    let odd: Vec<Claim> = claims
        .iter()
        .filter(|c| c.position().0 % 2 == 1)
        .cloned()
        .collect();
    settle_all(&*log, sub(1), &odd, NextStep::Done).await;

    let log = subject.reopen(log).await;
    let done = texts(&odd);
    let expected = texts_all
        .iter()
        .map(String::as_str)
        .filter(|text| !done.contains(text));
    let expected: Vec<&str> = expected.collect();
    assert_eq!(log.backlog(sub(1)).waiting, 70);
    assert_eq!(log.backlog(sub(2)).waiting, 50);
    let again = claim_all(&*log, sub(1), at(0)).await;
    assert_eq!(comparable(subject, texts(&again)), expected);
    settle_all(&*log, sub(1), &again, NextStep::Done).await;

    let log = subject.reopen(log).await;
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    assert!(claim_all(&*log, sub(1), at(0)).await.is_empty());
    assert_eq!(claim_all(&*log, sub(2), at(0)).await.len(), 50);
    log.close().await.unwrap();
}

pub async fn retries_survive_a_restart(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    log.append(events(&[("a", &[1]), ("b", &[1])])).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let one = settled(&claims[1], NextStep::RetryAt(at(50)));
    log.settle(sub(1), vec![one.clone()]).await.unwrap();
    settle_all(&*log, sub(1), &claims[..1], NextStep::Done).await;

    let log = subject.reopen(log).await;
    assert_eq!(log.next_due(), Some(at(50)));
    assert!(claim_all(&*log, sub(1), at(49)).await.is_empty());
    let again = claim_all(&*log, sub(1), at(50)).await;
    assert_eq!(texts(&again), ["b"]);
    assert_eq!((again[0].attempts_made, again[0].due), (1, Some(at(50))));
    assert_eq!(again[0].last_attempt, one.last_attempt);
    assert_eq!(again[0].position(), claims[1].position());

    // The retry was claimed and not settled: it is due as before.
    let log = subject.reopen(log).await;
    assert_eq!(claim_all(&*log, sub(1), at(50)).await.len(), 1);
    log.close().await.unwrap();
}

pub async fn positions_grow_and_the_identity_stays(subject: &dyn LogUnderTest) {
    let mut log = open(subject, &[1]).await;
    let identity = log.identity();
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    for round in 0..4 {
        for _ in 0..3 {
            let first = log.append(events(&[("a", &[1]), ("b", &[])])).await.unwrap();
            let before = last.insert(subject.lane(first), first.0 + 1);
            assert!(
                before.is_none_or(|before| first.0 > before),
                "{first} after {before:?}"
            );
        }
        if round % 2 == 0 {
            let claims = claim_all(&*log, sub(1), at(0)).await;
            settle_all(&*log, sub(1), &claims, NextStep::Done).await;
        }
        log = subject.reopen(log).await;
        assert_eq!(log.identity(), identity);
    }
    log.close().await.unwrap();
}

pub async fn a_closed_subscription_stays_closed(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    log.append(events(&[("a", &[1, 2]), ("b", &[1, 2])]))
        .await
        .unwrap();
    let claims = log
        .claim(
            sub(1),
            at(0),
            ClaimLimits {
                events_max: 1,
                ..WANT
            },
        )
        .await
        .unwrap();
    settle_all(&*log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    assert_eq!(log.close_subscription(sub(1)).await.unwrap(), 2);
    let log = subject.reopen(log).await;
    assert!(claim_all(&*log, sub(1), at(100)).await.is_empty());
    assert_eq!((log.next_due(), log.subscriptions()), (None, vec![sub(2)]));
    assert_eq!(claim_all(&*log, sub(2), at(0)).await.len(), 2);
    log.close().await.unwrap();
}

pub async fn many_subscriptions_each_get_their_own(subject: &dyn LogUnderTest) {
    let ids: Vec<u64> = (1..=300).collect();
    let log = open(subject, &ids).await;
    let mut expected: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for n in 0..200u64 {
        let text = format!("event {n}");
        let matched: Vec<u64> = ids
            .iter()
            .copied()
            .filter(|id| (n * 7 + id) % 40 == 0 || *id == 300)
            .collect();
        for id in &matched {
            expected.entry(*id).or_default().push(text.clone());
        }
        log.append(events(&[(&text, &matched)])).await.unwrap();
    }
    let log = subject.reopen(log).await;
    for id in &ids {
        let claims = claim_all(&*log, sub(*id), at(0)).await;
        check_lanes(subject, &claims);
        let expected = expected.remove(id).unwrap_or_default();
        let expected = expected.iter().map(String::as_str).collect();
        assert_eq!(
            comparable(subject, texts(&claims)),
            comparable(subject, expected),
            "subscription {id}"
        );
    }
    log.close().await.unwrap();
}

/// Appends `count` events of about a kilobyte for subscription 1, every third for subscription 2 as
/// well. Returns the first word of each event, in order.
async fn append_many(log: &dyn EventLog, count: usize) -> Vec<String> {
    let padding = "p".repeat(1000);
    let all: Vec<String> = (0..count).map(|n| format!("{n} {padding}")).collect();
    let mut next = 0;
    for chunk in all.chunks(100) {
        let mut batch: Vec<(&str, &[u64])> = Vec::new();
        for text in chunk {
            batch.push((text, if next % 3 == 0 { &[1, 2] } else { &[1] }));
            next += 1;
        }
        log.append(events(&batch)).await.unwrap();
    }
    (0..count).map(|n| n.to_string()).collect()
}

fn first_word(claim: &Claim) -> String {
    claim.object().split(' ').next().unwrap_or_default().to_owned()
}

/// Claims and settles until nothing is left; returns the first words in the order of claiming.
async fn drain(log: &dyn EventLog, of: SubscriptionId, want: ClaimLimits) -> Vec<String> {
    let mut words = Vec::new();
    loop {
        let claims = log.claim(of, at(0), want).await.unwrap();
        if claims.is_empty() {
            return words;
        }
        words.extend(claims.iter().map(first_word));
        settle_all(log, of, &claims, NextStep::Done).await;
    }
}

pub async fn a_big_backlog_drains_in_order(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    let all = append_many(&*log, 20_000).await;
    assert_eq!(log.backlog(sub(1)).waiting, 20_000);
    let want = ClaimLimits {
        events_max: 333,
        ..WANT
    };
    let third: Vec<String> = all.iter().step_by(3).cloned().collect();
    let drained = drain(&*log, sub(1), want).await;
    assert_eq!(drained.len(), all.len());
    assert!(
        comparable(subject, drained) == comparable(subject, all),
        "out of order"
    );
    let ten = ClaimLimits {
        events_max: 10,
        ..WANT
    };
    let drained = drain(&*log, sub(2), ten).await;
    assert!(comparable(subject, drained) == comparable(subject, third));
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    assert_eq!(log.backlog(sub(2)), Backlog::default());
    log.close().await.unwrap();
}

pub async fn a_backlog_drains_after_a_restart(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    let mut all = append_many(&*log, 7_000).await;
    let claims = claim_count(&*log, sub(1), 500).await;
    settle_all(&*log, sub(1), &claims[100..], NextStep::Done).await;
    let done: BTreeSet<String> = claims[100..].iter().map(first_word).collect();
    all.retain(|word| !done.contains(word));

    let log = subject.reopen(log).await;
    assert_eq!(log.backlog(sub(1)).waiting, 6_600);
    // New events must not overtake those that are still in the log.
    all.extend(append_many(&*log, 1_000).await);
    let drained = drain(&*log, sub(1), WANT).await;
    assert_eq!(drained.len(), all.len());
    assert!(
        comparable(subject, drained) == comparable(subject, all),
        "out of order"
    );
    assert_eq!(drain(&*log, sub(2), WANT).await.len(), 2_334 + 334);
    log.close().await.unwrap();
}

pub async fn nothing_is_lost_while_appends_and_claims_interleave(subject: &dyn LogUnderTest) {
    const REQUESTS: usize = 600;
    let log = open(subject, &[1, 2]).await;
    let padding = "p".repeat(30_000);
    let appended = AtomicUsize::new(0);
    let publish = async |from: usize| {
        for n in (from..REQUESTS).step_by(4) {
            log.append(events(&[
                (&format!("{n}.0 {padding}"), &[1, 2]),
                (&format!("{n}.1 x"), &[1]),
            ]))
            .await
            .unwrap();
            appended.fetch_add(1, Relaxed);
        }
    };
    // Claims continuously for one subscription, so that it keeps reaching the end of the log.
    let follow = async |of: SubscriptionId, expected: usize| {
        let mut positions = Vec::new();
        let mut words = BTreeSet::new();
        let mut idle = 0;
        while positions.len() < expected && idle < 20_000 {
            let done = appended.load(Relaxed) == REQUESTS;
            let claims = log
                .claim(
                    of,
                    at(0),
                    ClaimLimits {
                        events_max: 50,
                        ..WANT
                    },
                )
                .await
                .unwrap();
            idle = if claims.is_empty() && done { idle + 1 } else { 0 };
            positions.extend(claims.iter().map(Claim::position));
            words.extend(claims.iter().map(first_word));
            settle_all(&*log, of, &claims, NextStep::Done).await;
            tokio::task::yield_now().await;
        }
        assert_eq!(positions.len(), expected, "subscription {of}");
        assert_eq!(words.len(), expected, "subscription {of}");
        positions.sort_by_key(|position| subject.lane(*position));
        let lanes = positions.chunk_by(|a, b| subject.lane(*a) == subject.lane(*b));
        for lane in lanes {
            assert!(lane.is_sorted(), "subscription {of}");
        }
        assert!(
            log.claim(of, at(0), WANT).await.unwrap().is_empty(),
            "subscription {of}"
        );
    };
    tokio::join!(
        publish(0),
        publish(1),
        publish(2),
        publish(3),
        follow(sub(1), REQUESTS * 2),
        follow(sub(2), REQUESTS),
    );
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    assert_eq!(log.backlog(sub(2)), Backlog::default());
    log.close().await.unwrap();
}

pub async fn what_is_flushed_survives_a_crash(subject: &dyn LogUnderTest) {
    let mut log = open(subject, &[1, 2]).await;
    log.append(events(&[
        ("a", &[1]),
        ("b", &[1]),
        ("c", &[1]),
        ("d", &[1]),
        ("e", &[1]),
    ]))
    .await
    .unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let mut failed = settled(&claims[3], NextStep::RetryAt(at(50)));
    failed.attempts_made = 7;
    failed.last_attempt = Some(LastAttempt {
        at: at(3),
        outcome: Outcome::TimedOut,
        status: None,
    });
    let ended = vec![
        settled(&claims[0], NextStep::Done),
        settled(&claims[1], NextStep::Drop(GiveUpReason::TimeToLiveExceeded)),
        settled(&claims[2], NextStep::DeadLetter(GiveUpReason::BadRequest)),
        failed.clone(),
    ];
    log.settle(sub(1), ended).await.unwrap();
    log.flush().await.unwrap();
    let backlog = Backlog {
        claimed: 1,
        retrying: 1,
        oldest: Some(at(0)),
        ..Backlog::default()
    };
    assert_eq!(log.backlog(sub(1)), backlog);
    assert_eq!((log.next_due(), log.due(at(50))), (Some(at(50)), vec![sub(1)]));

    log = subject.crash(log).await;
    assert_eq!(log.health().redelivered, 1, "only the one that was not settled");
    let found = log.backlog(sub(1));
    assert_eq!((found.waiting, found.claimed, found.retrying), (1, 0, 1));
    assert_eq!(log.next_due(), Some(at(50)));
    let again = claim_all(&*log, sub(1), at(49)).await;
    assert_eq!(texts(&again), ["e"]);
    let due = claim_all(&*log, sub(1), at(50)).await;
    assert_eq!(texts(&due), ["d"]);
    assert_eq!((due[0].attempts_made, due[0].due), (7, Some(at(50))));
    assert_eq!(due[0].last_attempt, failed.last_attempt);
    settle_all(&*log, sub(1), &again, NextStep::Done).await;
    settle_all(&*log, sub(1), &due, NextStep::Done).await;
    log.flush().await.unwrap();
    assert_eq!(log.backlog(sub(1)), Backlog::default());

    log = subject.crash(log).await;
    assert_eq!(log.health().redelivered, 0);
    assert!(claim_all(&*log, sub(1), at(100)).await.is_empty());
    // A delivery that succeeds at once leaves the least state behind; settle one at a time and
    // check each.
    for n in 0..5 {
        log.append(events(&[("x", &[1, 2]), ("y", &[2])])).await.unwrap();
        for of in [sub(1), sub(2)] {
            let claims = claim_all(&*log, of, at(0)).await;
            settle_all(&*log, of, &claims, NextStep::Done).await;
        }
        log.flush().await.unwrap();
        log = subject.crash(log).await;
        assert_eq!(log.health().redelivered, 0, "round {n}");
        for of in [sub(1), sub(2)] {
            assert_eq!(log.backlog(of), Backlog::default(), "round {n}");
            assert!(claim_all(&*log, of, at(0)).await.is_empty(), "round {n}");
        }
    }
    log.close().await.unwrap();
}

pub async fn a_withdrawn_retry_is_never_offered(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    let heard = Arc::new(RecordingListener::default());
    log.listen(heard.clone());
    log.append(events(&[("a", &[1, 2]), ("b", &[1]), ("c", &[1]), ("d", &[1])]))
        .await
        .unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    for (claim, due) in claims.iter().zip([10, 10, 20, 30]) {
        settle_all(
            &*log,
            sub(1),
            std::slice::from_ref(claim),
            NextStep::RetryAt(at(due)),
        )
        .await;
    }
    // The retries may not be recorded yet: the test does not flush before it withdraws.
    let [a, b, c, d] = [0, 1, 2, 3].map(|n| claims[n].position());
    let withdrawn = log.withdraw(sub(1), vec![(at(20), c), (at(10), a)]).await;
    assert_eq!(withdrawn.unwrap(), [c, a]);
    log.flush().await.unwrap();
    assert_eq!(log.backlog(sub(1)).retrying, 2);
    assert_eq!((log.next_due(), log.due(at(10))), (Some(at(10)), vec![sub(1)]));
    let told = heard.due_changed.load(Relaxed);
    assert_eq!(log.withdraw(sub(1), vec![(at(10), b)]).await.unwrap(), [b]);
    assert_eq!((log.next_due(), log.due(at(29))), (Some(at(30)), vec![]));
    assert!(heard.due_changed.load(Relaxed) > told, "the earliest has changed");
    assert_eq!(claim_all(&*log, sub(1), at(29)).await.len(), 0);
    assert_eq!(log.subscriptions().len(), 2);
    log.flush().await.unwrap();

    let log = subject.crash(log).await;
    assert_eq!((log.next_due(), log.backlog(sub(1)).retrying), (Some(at(30)), 1));
    assert_eq!(texts(&claim_all(&*log, sub(1), at(29)).await), [""; 0]);
    assert_eq!(log.withdraw(sub(1), vec![(at(30), d)]).await.unwrap(), [d]);
    assert_eq!((log.next_due(), log.due(at(100))), (None, vec![]));
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    assert!(claim_all(&*log, sub(1), at(100)).await.is_empty());
    assert_eq!(log.subscriptions(), [sub(2)]);
    assert_eq!(texts(&claim_all(&*log, sub(2), at(100)).await), ["a"]);

    let log = subject.reopen(log).await;
    assert_eq!((log.next_due(), log.subscriptions()), (None, vec![sub(2)]));
    assert!(claim_all(&*log, sub(1), at(100)).await.is_empty());
    log.close().await.unwrap();
}

pub async fn a_retry_that_is_due_can_be_withdrawn_until_it_is_claimed(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    log.append(events(&[("a", &[1]), ("b", &[1]), ("c", &[1]), ("d", &[1])]))
        .await
        .unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    settle_all(&*log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    log.flush().await.unwrap();
    let [a, b, c, d] = [0, 1, 2, 3].map(|n| claims[n].position());
    let one = ClaimLimits {
        events_max: 1,
        ..WANT
    };
    // The other retries are due as well and may already be in memory.
    let first = log.claim(sub(1), at(5), one).await.unwrap();
    assert_eq!(texts(&first), ["a"]);
    let withdrawn = log.withdraw(sub(1), vec![(at(5), a), (at(5), b)]).await;
    assert_eq!(withdrawn.unwrap(), [b]);
    let backlog = |claimed, retrying| Backlog {
        claimed,
        retrying,
        oldest: Some(at(0)),
        ..Backlog::default()
    };
    assert_eq!(log.backlog(sub(1)), backlog(1, 2));
    // A released retry waits again and can be withdrawn.
    log.release(sub(1), first);
    assert_eq!(log.backlog(sub(1)), backlog(0, 3));
    assert_eq!(log.withdraw(sub(1), vec![(at(5), a)]).await.unwrap(), [a]);
    assert_eq!(log.backlog(sub(1)), backlog(0, 2));
    let rest = claim_all(&*log, sub(1), at(5)).await;
    assert_eq!(texts(&rest), ["c", "d"]);
    // A retry that failed again and is due at the same time counts as a new retry.
    settle_all(&*log, sub(1), &rest, NextStep::RetryAt(at(5))).await;
    assert_eq!(log.withdraw(sub(1), vec![(at(5), c)]).await.unwrap(), [c]);
    let last = claim_all(&*log, sub(1), at(5)).await;
    assert_eq!(texts(&last), ["d"]);
    assert_eq!((last[0].position(), last[0].attempts_made), (d, 2));
    settle_all(&*log, sub(1), &last, NextStep::Done).await;
    log.flush().await.unwrap();
    assert_eq!(log.backlog(sub(1)), Backlog::default());

    let log = subject.crash(log).await;
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    assert!(claim_all(&*log, sub(1), at(100)).await.is_empty());
    log.close().await.unwrap();
}

pub async fn what_does_not_wait_is_not_withdrawn(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    log.append(events(&[("a", &[1]), ("b", &[1]), ("c", &[1]), ("d", &[1])]))
        .await
        .unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let [a, b, c, d] = [0, 1, 2, 3].map(|n| claims[n].position());
    settle_all(&*log, sub(1), &claims[1..3], NextStep::RetryAt(at(5))).await;
    settle_all(&*log, sub(1), &claims[3..], NextStep::Done).await;
    log.flush().await.unwrap();
    let one = ClaimLimits {
        events_max: 1,
        ..WANT
    };
    let retry = log.claim(sub(1), at(5), one).await.unwrap();
    assert_eq!(texts(&retry), ["b"]);
    let before = (log.backlog(sub(1)), log.next_due(), log.subscriptions());
    let waits_not = vec![
        (at(5), a),              // a first attempt, claimed
        (at(5), b),              // a retry, claimed
        (at(4), c),              // due at another time
        (at(5), d),              // ended
        (at(5), Position(9999)), // never there
    ];
    assert_eq!(log.withdraw(sub(1), waits_not.clone()).await.unwrap(), []);
    assert_eq!(log.withdraw(sub(1), vec![]).await.unwrap(), []);
    assert_eq!(log.withdraw(sub(2), vec![(at(5), c)]).await.unwrap(), []);
    assert_eq!(log.withdraw(sub(3), vec![(at(5), c)]).await.unwrap(), []);
    log.flush().await.unwrap();
    assert_eq!((log.backlog(sub(1)), log.next_due(), log.subscriptions()), before);
    // The withdrawals above do not affect deliveries that were claimed at the time.
    settle_all(&*log, sub(1), &retry, NextStep::RetryAt(at(7))).await;
    settle_all(&*log, sub(1), &claims[..1], NextStep::RetryAt(at(8))).await;
    log.flush().await.unwrap();
    assert_eq!(log.withdraw(sub(1), vec![(at(5), b)]).await.unwrap(), []);
    let due = claim_all(&*log, sub(1), at(8)).await;
    assert_eq!(texts(&due), ["c", "b", "a"]);
    settle_all(&*log, sub(1), &due, NextStep::Done).await;
    // A delivery that is named twice is ended once.
    log.append(events(&[("e", &[1]), ("f", &[1])])).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(8)).await;
    settle_all(&*log, sub(1), &claims, NextStep::RetryAt(at(20))).await;
    let e = (at(20), claims[0].position());
    assert_eq!(log.withdraw(sub(1), vec![e, e]).await.unwrap(), [e.1]);
    assert_eq!(log.withdraw(sub(1), vec![e]).await.unwrap(), []);
    assert_eq!(log.backlog(sub(1)).retrying, 1);
    log.close_subscription(sub(1)).await.unwrap();
    let f = (at(20), claims[1].position());
    assert_eq!(log.withdraw(sub(1), vec![f]).await.unwrap(), []);
    log.close().await.unwrap();
}

pub async fn what_is_withdrawn_is_not_counted_when_a_subscription_is_closed(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    let five: Vec<(&str, &[u64])> = vec![("x", &[1]); 5];
    log.append(events(&five)).await.unwrap();
    let four = ClaimLimits {
        events_max: 4,
        ..WANT
    };
    let claims = log.claim(sub(1), at(0), four).await.unwrap();
    settle_all(&*log, sub(1), &claims, NextStep::RetryAt(at(5))).await;
    let one = ClaimLimits {
        events_max: 1,
        ..WANT
    };
    log.flush().await.unwrap();
    let claimed = log.claim(sub(1), at(5), one).await.unwrap();
    let withdrawn = claims[..2].iter().map(|claim| (at(5), claim.position()));
    let withdrawn = log.withdraw(sub(1), withdrawn.collect()).await.unwrap();
    assert_eq!((claimed.len(), withdrawn.len()), (1, 1));
    // A single delivery waits, two are to be retried, one is claimed.
    assert_eq!(log.close_subscription(sub(1)).await.unwrap(), 3);
    assert_eq!((log.next_due(), log.subscriptions()), (None, vec![]));
    log.close().await.unwrap();
}

// Claims and withdraws the same retries concurrently, in small steps and in the same order, so that
// the two meet often.
pub async fn a_retry_is_either_claimed_or_withdrawn(subject: &dyn LogUnderTest) {
    const RETRIES: usize = 1_500;
    let log = open(subject, &[1]).await;
    let all: Vec<(&str, &[u64])> = vec![("x", &[1]); RETRIES];
    log.append(events(&all)).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let first = claims[0].position();
    let due = |claim: &Claim| at(5 + ((claim.position().0 - first.0) / 50) as i64);
    let failed = claims
        .iter()
        .map(|claim| settled(claim, NextStep::RetryAt(due(claim))));
    log.settle(sub(1), failed.collect()).await.unwrap();
    log.flush().await.unwrap();
    let want = ClaimLimits {
        events_max: 3,
        ..WANT
    };
    let claim = async {
        let mut held = Vec::new();
        loop {
            let more = log.claim(sub(1), at(1_000), want).await.unwrap();
            if more.is_empty() {
                return held;
            }
            held.extend(more);
            tokio::task::yield_now().await;
        }
    };
    let withdraw = async {
        let mut ended = Vec::new();
        for chunk in claims.chunks(60) {
            let waiting = chunk.iter().map(|claim| (due(claim), claim.position()));
            ended.extend(log.withdraw(sub(1), waiting.collect()).await.unwrap());
        }
        ended
    };
    let (mut held, ended) = tokio::join!(claim, withdraw);
    held.extend(claim_all(&*log, sub(1), at(1_000)).await);
    let mut seen = BTreeSet::new();
    for position in held.iter().map(Claim::position).chain(ended.iter().copied()) {
        assert!(seen.insert(position), "twice: {position}");
    }
    assert_eq!(seen.len(), RETRIES);
    let backlog = Backlog {
        claimed: held.len() as u64,
        oldest: (!held.is_empty()).then_some(at(0)),
        ..Backlog::default()
    };
    assert_eq!((log.backlog(sub(1)), log.next_due()), (backlog, None));
    settle_all(&*log, sub(1), &held, NextStep::Done).await;
    log.flush().await.unwrap();
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    let log = subject.crash(log).await;
    assert_eq!(log.backlog(sub(1)), Backlog::default());
    log.close().await.unwrap();
}

/// The state of a delivery as the model expects it.
#[derive(Clone, Debug, PartialEq)]
enum ModelDelivery {
    Waiting,
    Claimed,
    Retrying(Timestamp),
    GivenUp(Timestamp, GiveUpReason),
    Ended,
}

/// Model of the log: the expected state of every delivery.
struct LogModel<'s> {
    subject: &'s dyn LogUnderTest,
    deliveries: BTreeMap<(SubscriptionId, Position), (ModelDelivery, u32, String)>,
    held: BTreeMap<SubscriptionId, Vec<Claim>>,
    now: i64,
}

impl LogModel<'_> {
    /// Checks claims against the model and records them as held.
    fn claimed(&mut self, of: SubscriptionId, claims: Vec<Claim>) {
        let mut fresh_before: BTreeMap<u64, Position> = BTreeMap::new();
        for claim in claims {
            let key = (of, claim.position());
            let Some((stands, attempts, text)) = self.deliveries.get_mut(&key) else {
                panic!("{key:?} never matched");
            };
            assert_eq!(claim.object(), text, "{key:?}");
            assert_eq!(claim.attempts_made, *attempts, "{key:?}");
            match claim.due {
                Some(due) => {
                    assert!(fresh_before.is_empty(), "{key:?}: a retry after a first attempt");
                    assert_eq!(*stands, ModelDelivery::Retrying(due), "{key:?}");
                    assert!(due <= at(self.now), "{key:?}: claimed before it was due");
                }
                None => {
                    assert_eq!(*stands, ModelDelivery::Waiting, "{key:?}");
                    let before = fresh_before.insert(self.subject.lane(key.1), key.1);
                    assert!(
                        before.is_none_or(|before| before < key.1),
                        "{key:?}: out of order"
                    );
                }
            }
            *stands = ModelDelivery::Claimed;
            self.held.entry(of).or_default().push(claim);
        }
        for (lane, upto) in fresh_before {
            let skipped = self
                .deliveries
                .range((of, Position(0))..(of, upto))
                .find(|(key, d)| d.0 == ModelDelivery::Waiting && self.subject.lane(key.1) == lane);
            assert!(skipped.is_none(), "{skipped:?} was overtaken by {upto}");
        }
    }

    /// The claimants are gone: their claims are offered again as before.
    fn claims_lapse(&mut self) {
        for (of, claims) in std::mem::take(&mut self.held) {
            self.released(of, &claims);
        }
    }

    fn released(&mut self, of: SubscriptionId, claims: &[Claim]) {
        for claim in claims {
            let stands = claim.due.map_or(ModelDelivery::Waiting, ModelDelivery::Retrying);
            self.deliveries.get_mut(&(of, claim.position())).unwrap().0 = stands;
        }
    }

    /// Some deliveries of a subscription, each with a due time that is mostly the right one if the
    /// delivery waits to be retried.
    fn some_waiting(&self, of: SubscriptionId, random: &mut SeededRandom) -> Vec<(Timestamp, Position)> {
        let mut some = Vec::new();
        for (key, (stands, _, _)) in self
            .deliveries
            .range((of, Position(0))..=(of, Position(u64::MAX)))
        {
            match stands {
                ModelDelivery::Retrying(due) if random.one_in(4) => some.push((*due, key.1)),
                ModelDelivery::Retrying(due) if random.one_in(12) => {
                    some.push((*due + Duration::from_nanos(1), key.1));
                }
                ModelDelivery::Waiting | ModelDelivery::Ended if random.one_in(60) => {
                    some.push((at(self.now), key.1))
                }
                _ => {}
            }
        }
        let held = self.held.get(&of).into_iter().flatten();
        let held = held.filter(|_| random.one_in(8));
        some.extend(held.map(|claim| (claim.due.unwrap_or(at(self.now)), claim.position())));
        some
    }

    /// Whether a delivery waits to be retried at exactly that time.
    fn waits(&self, of: SubscriptionId, (due, position): (Timestamp, Position)) -> bool {
        self.deliveries
            .get(&(of, position))
            .is_some_and(|d| d.0 == ModelDelivery::Retrying(due))
    }

    /// Dead letters of a subscription that were given up by `until`, in order.
    fn letters(
        &self,
        of: SubscriptionId,
        until: Timestamp,
    ) -> BTreeMap<DeadLetterKey, (GiveUpReason, u32, &str)> {
        let all = self
            .deliveries
            .range((of, Position(0))..=(of, Position(u64::MAX)));
        let letters = all.filter_map(|(key, (stands, attempts, text))| match stands {
            ModelDelivery::GivenUp(decided, reason) if *decided <= until => {
                Some(((*decided, key.1), (*reason, *attempts, text.as_str())))
            }
            _ => None,
        });
        letters.collect()
    }

    fn check_letters(&self, of: SubscriptionId, until: Timestamp, letters: &[PendingDeadLetter]) {
        let found = letters.iter().map(|letter| {
            assert_eq!(letter.last_attempt.map(|last| last.at), Some(at(1)));
            let known = (letter.reason, letter.attempts_made, letter.object());
            (letter.key(), known)
        });
        let found: Vec<_> = found.collect();
        let expected: Vec<_> = self.letters(of, until).into_iter().collect();
        assert!(found == expected, "letters of subscription {of} until {until}");
    }

    fn letters_done(&mut self, of: SubscriptionId, letters: &[PendingDeadLetter]) {
        for letter in letters {
            self.deliveries.get_mut(&(of, letter.position())).unwrap().0 = ModelDelivery::Ended;
        }
    }

    fn withdrawn(&mut self, of: SubscriptionId, positions: &[Position]) {
        for position in positions {
            self.deliveries.get_mut(&(of, *position)).unwrap().0 = ModelDelivery::Ended;
        }
    }

    /// Compares the model with a log that has recorded everything settled.
    fn check(&self, log: &dyn EventLog, when: &str) {
        let mut earliest: Option<Timestamp> = None;
        let mut earliest_later: Option<Timestamp> = None;
        let mut earliest_of_later: Option<Timestamp> = None;
        let now = at(self.now);
        let min = |one: &mut Option<Timestamp>, other: Option<Timestamp>| {
            *one = [*one, other].into_iter().flatten().min();
        };
        let due = log.due(now);
        let mut letters_waiting = Vec::new();
        for of in (1..=4).map(sub) {
            let all = self
                .deliveries
                .range((of, Position(0))..=(of, Position(u64::MAX)));
            let mut expected = Backlog::default();
            let mut times = BTreeSet::new();
            for (_, (stands, _, _)) in all {
                match stands {
                    ModelDelivery::Waiting => expected.waiting += 1,
                    ModelDelivery::Claimed => expected.claimed += 1,
                    ModelDelivery::Retrying(due) => {
                        expected.retrying += 1;
                        times.insert(*due);
                    }
                    ModelDelivery::GivenUp(..) | ModelDelivery::Ended => {}
                }
            }
            let letters = self.letters(of, Timestamp::MAX);
            let waiting = letters
                .first_key_value()
                .map(|((oldest, _), _)| PendingDeadLetters {
                    of,
                    oldest: *oldest,
                    count: letters.len() as u64,
                });
            letters_waiting.extend(waiting);
            // All events were received at the same time.
            let any = expected.waiting + expected.claimed + expected.retrying > 0;
            expected.oldest = any.then_some(at(0));
            assert_eq!(log.backlog(of), expected, "{when}: subscription {of}");
            let first = times.first().copied();
            assert!(
                !due.contains(&of) || first.is_some_and(|first| first <= now),
                "{when}: nothing of subscription {of} is due"
            );
            min(&mut earliest, first);
            min(&mut earliest_later, times.iter().copied().find(|due| *due > now));
            min(&mut earliest_of_later, first.filter(|due| *due > now));
        }
        assert_eq!(log.pending_dead_letters(), letters_waiting, "{when}");
        // A store may leave out retries that are due already and those behind them; it must know
        // the others.
        let next = log.next_due();
        assert!(
            next.is_none_or(|next| earliest.is_some_and(|earliest| next >= earliest)),
            "{when}: next due {next:?}, not {earliest:?}"
        );
        let next = log.next_due_after(now);
        assert!(
            next.is_none_or(|next| earliest_later.is_some_and(|later| next >= later)),
            "{when}: next due {next:?} after {now}, not {earliest_later:?}"
        );
        assert!(
            earliest_of_later.is_none_or(|latest| next.is_some_and(|next| next <= latest)),
            "{when}: next due {next:?} after {now}, not {earliest_of_later:?}"
        );
    }

    fn take_held(&mut self, of: SubscriptionId, random: &mut SeededRandom) -> Vec<Claim> {
        let held = self.held.entry(of).or_default();
        let mut taken = Vec::new();
        for _ in 0..random.below(30) {
            if !held.is_empty() {
                taken.push(held.swap_remove(random.below(held.len() as u64) as usize));
            }
        }
        taken
    }
}

/// Performs random operations, with a restart now and then, and compares the log with the model.
pub async fn any_sequence_follows_the_model(subject: &dyn LogUnderTest, seed: u64) {
    const SUBSCRIPTIONS: u64 = 4;
    let mut random = SeededRandom(seed);
    let mut log = open(subject, &[1, 2, 3, 4]).await;
    let mut model = LogModel {
        subject,
        deliveries: BTreeMap::new(),
        held: BTreeMap::new(),
        now: 0,
    };
    let steps = 600;
    for step in 0..steps {
        let of = sub(1 + random.below(SUBSCRIPTIONS));
        // Whether events are in memory or only in the log must make no difference.
        if random.below(10) == 0 {
            log.release_memory(sub(1 + random.below(3)));
        }
        match random.below(100) {
            0..32 => append_random(&*log, &mut model, &mut random, step).await,
            32..58 => {
                let want = want_random(&mut random);
                let claims = log.claim(of, at(model.now), want).await.unwrap();
                let bytes: usize = claims.iter().map(|c| c.object().len() + want.overhead).sum();
                assert!(claims.len() <= want.events_max && (claims.len() < 2 || bytes <= want.bytes_max));
                model.claimed(of, claims);
            }
            58..76 => settle_random(&*log, &mut model, of, &mut random).await,
            76..82 => withdraw_random(&*log, &mut model, of, &mut random).await,
            82..84 => letters_random(&*log, &mut model, of, &mut random).await,
            84..87 => {
                log.flush().await.unwrap();
                model.check(&*log, &format!("seed {seed}, step {step}"));
            }
            87..93 => {
                let claims = model.take_held(of, &mut random);
                model.released(of, &claims);
                log.release(of, claims);
            }
            93..98 => model.now += random.below(8) as i64,
            98 => {
                log = subject.reopen(log).await;
                model.claims_lapse();
            }
            _ => {
                log.flush().await.unwrap();
                log = subject.crash(log).await;
                model.claims_lapse();
                model.check(&*log, &format!("seed {seed}, after the crash of step {step}"));
            }
        }
    }

    // Let every retry come due and every operation end.
    model.now += 1_000;
    log.flush().await.unwrap();
    model.check(&*log, &format!("seed {seed}, at the end"));
    for of in (1..=SUBSCRIPTIONS).map(sub) {
        let letters = dead_letters::letters_all(&*log, of, Timestamp::MAX, WANT).await;
        model.check_letters(of, Timestamp::MAX, &letters);
        let keys = letters.iter().map(PendingDeadLetter::key).collect();
        log.dead_letters_done(of, keys).await.unwrap();
        model.letters_done(of, &letters);
    }
    assert_eq!(log.pending_dead_letters(), [], "seed {seed}");
    for of in (1..=SUBSCRIPTIONS).map(sub) {
        let held = model.held.remove(&of).unwrap_or_default();
        for claim in &held {
            model.deliveries.get_mut(&(of, claim.position())).unwrap().0 = ModelDelivery::Ended;
        }
        settle_all(&*log, of, &held, NextStep::Done).await;
        eventually("all is settled", || log.backlog(of).claimed == 0).await;
        let waiting = model
            .deliveries
            .iter()
            .filter(|(key, d)| key.0 == of && d.0 != ModelDelivery::Ended)
            .count();
        let backlog = log.backlog(of);
        assert_eq!(
            backlog.waiting + backlog.retrying,
            waiting as u64,
            "seed {seed}, subscription {of}"
        );
        loop {
            let claims = log
                .claim(
                    of,
                    at(model.now),
                    ClaimLimits {
                        events_max: 100,
                        ..WANT
                    },
                )
                .await
                .unwrap();
            if claims.is_empty() {
                break;
            }
            model.claimed(of, claims);
            let held = model.held.remove(&of).unwrap_or_default();
            for claim in &held {
                model.deliveries.get_mut(&(of, claim.position())).unwrap().0 = ModelDelivery::Ended;
            }
            settle_all(&*log, of, &held, NextStep::Done).await;
        }
        eventually("nothing is left", || log.backlog(of) == Backlog::default()).await;
    }
    let left = model.deliveries.iter().find(|(_, d)| d.0 != ModelDelivery::Ended);
    assert!(left.is_none(), "seed {seed}: {left:?} was never offered");
    assert_eq!(log.next_due(), None, "seed {seed}");
    log.close().await.unwrap();
}

async fn append_random(log: &dyn EventLog, model: &mut LogModel<'_>, random: &mut SeededRandom, step: usize) {
    let mut all: Vec<(String, Vec<u64>)> = Vec::new();
    for n in 0..1 + random.below(12) {
        let size = if random.one_in(4) {
            random.below(90_000)
        } else {
            random.below(300)
        };
        let text = format!("{step}.{n} {}", "p".repeat(size as usize));
        let mask = random.number();
        all.push((text, (1..=4).filter(|id| mask >> id & 1 == 1).collect()));
    }
    let batch: Vec<(&str, &[u64])> = all
        .iter()
        .map(|(text, ids)| (text.as_str(), ids.as_slice()))
        .collect();
    let first = log.append(events(&batch)).await.unwrap();
    for (n, (text, ids)) in all.into_iter().enumerate() {
        for id in ids {
            let key = (sub(id), Position(first.0 + n as u64));
            let known = model
                .deliveries
                .insert(key, (ModelDelivery::Waiting, 0, text.clone()));
            assert!(known.is_none(), "{key:?} was given out twice");
        }
    }
}

async fn settle_random(
    log: &dyn EventLog,
    model: &mut LogModel<'_>,
    of: SubscriptionId,
    random: &mut SeededRandom,
) {
    let mut all = Vec::new();
    for claim in model.take_held(of, random) {
        let next = match random.below(10) {
            0..5 => NextStep::Done,
            5..7 => NextStep::RetryAt(at(model.now + random.below(20) as i64)),
            7..9 => NextStep::DeadLetter(GiveUpReason::ALL[random.below(4) as usize]),
            _ => NextStep::Drop(GiveUpReason::TimeToLiveExceeded),
        };
        let mut one = settled(&claim, next);
        // Settlements of one call may have been decided at different times.
        one.at = at(model.now - random.below(4) as i64);
        let known = model.deliveries.get_mut(&(of, claim.position())).unwrap();
        known.0 = match next {
            NextStep::RetryAt(due) => ModelDelivery::Retrying(due),
            NextStep::DeadLetter(reason) => ModelDelivery::GivenUp(one.dead_letter_since(), reason),
            _ => ModelDelivery::Ended,
        };
        known.1 = one.attempts_made;
        all.push(one);
    }
    log.settle(of, all).await.unwrap();
}

fn want_random(random: &mut SeededRandom) -> ClaimLimits {
    ClaimLimits {
        events_max: 1 + random.below(60) as usize,
        bytes_max: 1 + random.below(400_000) as usize,
        overhead: random.below(100) as usize,
    }
}

/// Withdraws some retries, alone or while others claim.
async fn withdraw_random(
    log: &dyn EventLog,
    model: &mut LogModel<'_>,
    of: SubscriptionId,
    random: &mut SeededRandom,
) {
    let some = model.some_waiting(of, random);
    let wait: Vec<Position> = some
        .iter()
        .filter(|key| model.waits(of, **key))
        .map(|key| key.1)
        .collect();
    if random.one_in(2) {
        let ended = log.withdraw(of, some).await.unwrap();
        assert_eq!(ended, wait, "subscription {of}");
        model.withdrawn(of, &ended);
        return;
    }
    let claim = log.claim(of, at(model.now), want_random(random));
    let (claims, ended) = tokio::join!(claim, log.withdraw(of, some));
    let (claims, ended) = (claims.unwrap(), ended.unwrap());
    assert!(ended.iter().all(|position| wait.contains(position)));
    model.withdrawn(of, &ended);
    model.claimed(of, claims);
    for position in wait {
        let stands = &model.deliveries[&(of, position)].0;
        assert!(
            matches!(stands, ModelDelivery::Ended | ModelDelivery::Claimed),
            "{position} of subscription {of} was neither withdrawn nor claimed"
        );
    }
}

/// Reads dead letters and reports some of them as done.
async fn letters_random(
    log: &dyn EventLog,
    model: &mut LogModel<'_>,
    of: SubscriptionId,
    random: &mut SeededRandom,
) {
    log.flush().await.unwrap();
    let until = at(model.now - random.below(3) as i64);
    let mut letters = dead_letters::letters_all(log, of, until, want_random(random)).await;
    model.check_letters(of, until, &letters);
    letters.retain(|_| !random.one_in(3));
    let keys = letters.iter().map(PendingDeadLetter::key).collect();
    log.dead_letters_done(of, keys).await.unwrap();
    model.letters_done(of, &letters);
}

/// Runs every test of the catalog contract.
pub async fn catalog(subject: &dyn CatalogUnderTest) {
    what_is_put_is_loaded_until_it_is_deleted(subject).await;
    the_changes_of_a_commit_come_together(subject).await;
    commits_side_by_side_are_all_kept(subject).await;
    topics_of_every_kind_are_kept(subject).await;
    ids_are_never_given_out_twice(subject).await;
}

/// A topic with an id and a name; the rest is irrelevant.
pub fn topic(id: u64, name: &str) -> Topic {
    Topic {
        kind: TopicKind::Domain {
            auto_create: true,
            auto_delete: false,
        },
        resource_group: "rg1".into(),
        location: "westus2".into(),
        tags: BTreeMap::from([("team".into(), "ä".into())]),
        inbound_ip_rules: vec!["10.0.0.0/8".into()],
        created: at(3),
        extras: Some("{}".into()),
        ..Topic::custom(TopicId(id), name, [Secret::new("one"), Secret::new("two")])
    }
}

fn domain_topic(domain: u64, name: &str) -> DomainTopic {
    DomainTopic {
        domain: TopicId(domain),
        name: name.into(),
        automatic: name.len().is_multiple_of(2),
        created: at(4),
    }
}

fn subscription(id: u64, topic: u64) -> Subscription {
    Subscription {
        labels: vec!["a".into()],
        expires: Some(at(9)),
        delivery_schema: EventSchema::CloudEvent,
        retry: SubscriptionRetrySettings {
            attempts_max: Some(3),
            time_to_live_minutes: None,
        },
        created: at(5),
        origin: ResourceOrigin::Azure,
        ..Subscription::new(
            sub(id),
            TopicId(topic),
            format!("sub{id}"),
            Destination::EdgeHub { output: "out".into() },
        )
    }
}

fn handshake(operation: &str, id: u64) -> Handshake {
    Handshake {
        operation: operation.into(),
        subscription: subscription(id, 1),
        replaces: true,
        trial: false,
        code: "c".into(),
        token: Secret::new("t"),
        callback: Some(Secret::new("http://here/validate?token=t")),
        begun: at(2),
        by: Some("node".into()),
        state: HandshakeState::Asking,
        transcript: vec![HandshakeExchange {
            at: at(2),
            method: "POST".into(),
            url: "https://a/b".into(),
            headers: vec![("aeg-event-type".into(), "SubscriptionValidation".into())],
            received: HandshakeResponse::Nothing("no answer".into()),
            verdict: "is asked again".into(),
        }],
    }
}

fn endpoint_delay(endpoint: &str, secs: i64) -> EndpointDelay {
    EndpointDelay {
        endpoint: endpoint.into(),
        delay: EndpointProbationDelay {
            cause: Outcome::NotFound,
            status: Some(404),
            since: at(6),
            until: at(6 + secs),
            step: Duration::from_millis(2_500),
        },
        by: None,
    }
}

/// Loads the catalog and sorts everything whose order is not promised (all but endpoint delays).
async fn load(catalog: &dyn Catalog) -> CatalogContent {
    let mut loaded = catalog.load().await.unwrap();
    loaded.topics.sort_by_key(|topic| topic.id);
    loaded
        .domain_topics
        .sort_by_key(|topic| (topic.domain, topic.name.clone()));
    loaded.subscriptions.sort_by_key(|subscription| subscription.id);
    loaded
}

pub async fn what_is_put_is_loaded_until_it_is_deleted(subject: &dyn CatalogUnderTest) {
    let catalog = subject.open().await;
    assert_eq!(load(&*catalog).await, CatalogContent::default());
    let mut expected = CatalogContent {
        topics: vec![topic(1, "orders"), topic(2, "stock")],
        domain_topics: vec![domain_topic(1, "a"), domain_topic(1, "b"), domain_topic(2, "a")],
        subscriptions: vec![subscription(7, 1), subscription(8, 1)],
        endpoint_delays: vec![
            endpoint_delay("http://a/B", 10),
            endpoint_delay("http://a/b", 20),
            endpoint_delay("https://ä/", 30),
        ],
        handshakes: vec![handshake("a", 7), handshake("b", 8), handshake("c", 9)],
    };
    for one in &expected.topics {
        catalog
            .commit(vec![CatalogChange::PutTopic(one.clone())])
            .await
            .unwrap();
    }
    for one in &expected.domain_topics {
        catalog
            .commit(vec![CatalogChange::PutDomainTopic(one.clone())])
            .await
            .unwrap();
    }
    for one in &expected.subscriptions {
        catalog
            .commit(vec![CatalogChange::PutSubscription(one.clone())])
            .await
            .unwrap();
    }
    for one in expected.endpoint_delays.iter().rev() {
        catalog
            .commit(vec![CatalogChange::PutEndpointDelay(one.clone())])
            .await
            .unwrap();
    }
    for one in expected.handshakes.iter().rev() {
        catalog
            .commit(vec![CatalogChange::PutHandshake(one.clone())])
            .await
            .unwrap();
    }
    assert_eq!(load(&*catalog).await, expected);

    let catalog = subject.reopen(catalog).await;
    assert_eq!(load(&*catalog).await, expected);
    expected.topics[0].name = "orders2".into();
    expected.subscriptions[1].labels = vec![];
    expected.topics.remove(1);
    expected.domain_topics.remove(1);
    expected.subscriptions.remove(0);
    expected.endpoint_delays.remove(0);
    expected.endpoint_delays[1].delay = EndpointProbationDelay {
        cause: Outcome::Busy,
        status: None,
        since: at(7),
        until: at(8),
        step: Duration::from_secs(1),
    };
    expected.handshakes.remove(1);
    expected.handshakes[1].state = HandshakeState::Failed {
        at: at(9),
        message: "no".into(),
    };
    let changes = vec![
        CatalogChange::PutTopic(expected.topics[0].clone()),
        CatalogChange::PutSubscription(expected.subscriptions[0].clone()),
        CatalogChange::DeleteTopic(TopicId(2)),
        CatalogChange::DeleteDomainTopic(TopicId(1), "b".into()),
        CatalogChange::DeleteSubscription(sub(7)),
        CatalogChange::DeleteSubscription(sub(99)),
        CatalogChange::PutEndpointDelay(expected.endpoint_delays[1].clone()),
        CatalogChange::DeleteEndpointDelay("http://a/B".into()),
        CatalogChange::DeleteEndpointDelay("http://a".into()),
        CatalogChange::PutHandshake(expected.handshakes[1].clone()),
        CatalogChange::DeleteHandshake("b".into()),
        CatalogChange::DeleteHandshake("B".into()),
    ];
    catalog.commit(changes).await.unwrap();
    assert_eq!(load(&*catalog).await, expected);
    let catalog = subject.reopen(catalog).await;
    assert_eq!(load(&*catalog).await, expected);
}

pub async fn the_changes_of_a_commit_come_together(subject: &dyn CatalogUnderTest) {
    let catalog = subject.open().await;
    let mut last = 0;
    let write = async {
        for n in 1..=30 {
            let changes = vec![
                CatalogChange::PutTopic(topic(1, &n.to_string())),
                CatalogChange::PutTopic(topic(2, &n.to_string())),
                CatalogChange::PutEndpointDelay(endpoint_delay("http://a/", n)),
            ];
            catalog.commit(changes).await.unwrap();
        }
    };
    let read = async {
        while last < 30 {
            let loaded = load(&*catalog).await;
            let names: Vec<&str> = loaded.topics.iter().map(|topic| topic.name.as_str()).collect();
            match names[..] {
                [] => assert_eq!(loaded.endpoint_delays, [], "half of a commit"),
                [one, two] => {
                    assert_eq!(one, two, "half of a commit");
                    let delay = endpoint_delay("http://a/", one.parse().unwrap());
                    assert_eq!(loaded.endpoint_delays, [delay], "half of a commit");
                    let now = one.parse().unwrap();
                    assert!(now >= last, "{now} after {last}");
                    last = now;
                }
                _ => panic!("half of a commit: {names:?}"),
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(write, read);
}

pub async fn commits_side_by_side_are_all_kept(subject: &dyn CatalogUnderTest) {
    const COMMITS: u64 = 300;
    let catalog = subject.open().await;
    let mut expected = CatalogContent::default();
    let mut commits = Vec::new();
    for n in 1..=COMMITS {
        let (topic, subscription) = (topic(n, &n.to_string()), subscription(1000 + n, n));
        expected.topics.push(topic.clone());
        expected.subscriptions.push(subscription.clone());
        let changes = vec![
            CatalogChange::PutTopic(topic),
            CatalogChange::PutSubscription(subscription),
        ];
        commits.push(catalog.commit(changes));
    }
    // The last commit is polled once and then dropped: it must take effect although nobody waits
    // for it.
    let mut left_alone = commits.split_off(COMMITS as usize - 1);
    let begun = std::future::poll_fn(|context| {
        let begun = left_alone
            .iter_mut()
            .map(|one| one.as_mut().poll(context))
            .count();
        std::task::Poll::Ready(begun)
    });
    assert_eq!(begun.await, 1);
    drop(left_alone);
    let mut waiting: Vec<_> = commits.into_iter().map(Some).collect();
    std::future::poll_fn(|context| {
        for one in &mut waiting {
            if let Some(commit) = one
                && let std::task::Poll::Ready(done) = commit.as_mut().poll(context)
            {
                done.unwrap();
                *one = None;
            }
        }
        match waiting.iter().any(Option::is_some) {
            true => std::task::Poll::Pending,
            false => std::task::Poll::Ready(()),
        }
    })
    .await;
    drop(waiting);
    // Commits that began earlier are durable at the latest with this one.
    catalog.commit(Vec::new()).await.unwrap();
    assert_eq!(load(&*catalog).await, expected);
    let catalog = subject.reopen(catalog).await;
    assert_eq!(load(&*catalog).await, expected);
}

pub async fn topics_of_every_kind_are_kept(subject: &dyn CatalogUnderTest) {
    let catalog = subject.open().await;
    let (source, topic_type) = (String::from("/subscriptions/X"), String::from("t"));
    let kinds = [
        TopicKind::Custom,
        TopicKind::Domain {
            auto_create: false,
            auto_delete: true,
        },
        TopicKind::System {
            source: source.clone(),
            topic_type: topic_type.clone(),
        },
        TopicKind::Scope { source, topic_type },
    ];
    let topics: Vec<Topic> = (1..)
        .zip(kinds)
        .map(|(id, kind)| Topic {
            kind,
            ..topic(id, "same")
        })
        .collect();
    let changes = topics.iter().cloned().map(CatalogChange::PutTopic).collect();
    catalog.commit(changes).await.unwrap();
    let catalog = subject.reopen(catalog).await;
    assert_eq!(load(&*catalog).await.topics, topics);
}

pub async fn ids_are_never_given_out_twice(subject: &dyn CatalogUnderTest) {
    let mut catalog = subject.open().await;
    let mut given = BTreeSet::new();
    for _ in 0..4 {
        for _ in 0..700 {
            let (one, two) = tokio::join!(catalog.next_id(), catalog.next_id());
            assert!(given.insert(one.unwrap()) && given.insert(two.unwrap()));
        }
        catalog = subject.reopen(catalog).await;
    }
}

/// Whether an error means that nothing can be written now.
pub fn is_unavailable<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Unavailable(_)))
}
