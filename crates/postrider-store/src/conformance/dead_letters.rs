//! The contract of dead letters: what a log does with events that were given up.

use super::{LogUnderTest, RecordingListener, WANT, at, claim_all, events, open, settled, sub, texts};
use crate::log::LastAttempt;
use crate::{Backlog, ClaimLimits, DeadLetterKey, EventLog, PendingDeadLetter, PendingDeadLetters};
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::outcome::Outcome;
use postrider_core::retry::{GiveUpReason, NextStep};
use postrider_core::time::Timestamp;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub async fn all(subject: &dyn LogUnderTest) {
    what_is_given_up_becomes_a_letter(subject).await;
    if subject.is_ordered() {
        letters_come_in_the_order_in_which_they_were_given_up(subject).await;
    }
    letters_stay_within_what_is_wanted(subject).await;
    letters_that_are_done_are_gone_for_good(subject).await;
    a_letter_may_be_done_before_it_is_durable(subject).await;
    closing_a_subscription_drops_its_letters(subject).await;
    many_letters_are_read_and_done_page_by_page(subject).await;
    letters_are_read_while_others_are_done(subject).await;
}

fn waiting(all: &[(u64, i64, u64)]) -> Vec<PendingDeadLetters> {
    let waiting = all.iter().map(|&(id, secs, count)| PendingDeadLetters {
        of: sub(id),
        oldest: at(secs),
        count,
    });
    waiting.collect()
}

/// All dead letters of a subscription, read page by page.
pub async fn letters_all(
    log: &dyn EventLog,
    of: SubscriptionId,
    until: Timestamp,
    want: ClaimLimits,
) -> Vec<PendingDeadLetter> {
    let mut letters: Vec<PendingDeadLetter> = Vec::new();
    loop {
        let after = letters.last().map(PendingDeadLetter::key);
        let page = log.letters(of, after, until, want).await.unwrap();
        if page.is_empty() {
            return letters;
        }
        letters.extend(page);
    }
}

fn objects(letters: &[PendingDeadLetter]) -> Vec<&str> {
    letters.iter().map(PendingDeadLetter::object).collect()
}

fn keys(letters: &[PendingDeadLetter]) -> Vec<DeadLetterKey> {
    letters.iter().map(PendingDeadLetter::key).collect()
}

/// Publishes one event for each of these times, gives it up at that time, and flushes.
async fn give_up(log: &dyn EventLog, of: u64, all: &[(&str, i64)]) {
    let matched = [of];
    let batch: Vec<(&str, &[u64])> = all.iter().map(|(text, _)| (*text, &matched[..])).collect();
    log.append(events(&batch)).await.unwrap();
    let claims = claim_all(log, sub(of), at(0)).await;
    let mut given_up = Vec::new();
    for (claim, (_, secs)) in claims.iter().zip(all) {
        let mut one = settled(claim, NextStep::DeadLetter(GiveUpReason::BadRequest));
        one.at = at(*secs);
        given_up.push(one);
    }
    log.settle(sub(of), given_up).await.unwrap();
    log.flush().await.unwrap();
}

pub async fn what_is_given_up_becomes_a_letter(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    let heard = Arc::new(RecordingListener::default());
    log.listen(heard.clone());
    let mut batch = events(&[("a", &[1]), ("b", &[1, 2]), ("c", &[1]), ("d", &[1]), ("e", &[1])]);
    batch.replay = 3;
    log.append(batch.clone()).await.unwrap();
    assert_eq!(log.pending_dead_letters(), []);
    let claims = claim_all(&*log, sub(1), at(0)).await;
    assert_eq!(claims[0].entry.batch.replay, 3);

    // Three cases: never tried; failed; failed, retried, and failed again.
    let mut untried = settled(&claims[1], NextStep::DeadLetter(GiveUpReason::TimeToLiveExceeded));
    untried.at = at(20);
    untried.attempts_made = 0;
    untried.last_attempt = None;
    let mut failed = settled(&claims[2], NextStep::DeadLetter(GiveUpReason::BadRequest));
    failed.at = at(30);
    let others = vec![
        settled(&claims[0], NextStep::RetryAt(at(5))),
        settled(&claims[3], NextStep::Done),
        settled(&claims[4], NextStep::Drop(GiveUpReason::AttemptsExhausted)),
    ];
    log.settle(sub(1), vec![failed.clone(), untried.clone()])
        .await
        .unwrap();
    log.settle(sub(1), others).await.unwrap();
    log.flush().await.unwrap();
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 20, 2)]));
    let told = heard.letters_added.load(Relaxed);
    assert!(told > 0);
    let retry = claim_all(&*log, sub(1), at(5)).await;
    assert_eq!(texts(&retry), ["a"]);
    // The time to live was found to be over long after the last attempt; the wait counts from that
    // attempt.
    let mut retried = settled(&retry[0], NextStep::DeadLetter(GiveUpReason::TimeToLiveExceeded));
    retried.at = at(40);
    retried.last_attempt = Some(LastAttempt {
        at: at(10),
        outcome: Outcome::TimedOut,
        status: None,
    });
    log.settle(sub(1), vec![retried.clone()]).await.unwrap();
    log.flush().await.unwrap();
    assert!(heard.letters_added.load(Relaxed) > told);

    let check = async |log: &dyn EventLog, when: &str| {
        assert_eq!(log.pending_dead_letters(), waiting(&[(1, 10, 3)]), "{when}");
        assert_eq!(log.backlog(sub(1)), Backlog::default(), "{when}");
        assert!(!log.subscriptions().contains(&sub(1)), "{when}");
        let letters = log.letters(sub(1), None, at(100), WANT).await.unwrap();
        assert_eq!(objects(&letters), ["a", "b", "c"], "{when}");
        let reasons = [
            GiveUpReason::TimeToLiveExceeded,
            GiveUpReason::TimeToLiveExceeded,
            GiveUpReason::BadRequest,
        ];
        for ((letter, settled), reason) in letters.iter().zip([&retried, &untried, &failed]).zip(reasons) {
            assert_eq!(letter.entry.batch, batch, "{when}");
            assert_eq!(letter.position(), settled.claim.position(), "{when}");
            assert_eq!(letter.attempts_made, settled.attempts_made, "{when}");
            assert_eq!(letter.last_attempt, settled.last_attempt, "{when}");
            let since = settled.dead_letter_since();
            assert_eq!((letter.decided, letter.reason), (since, reason), "{when}");
        }
        assert!(log.letters(sub(2), None, at(100), WANT).await.unwrap().is_empty());
        assert!(log.letters(sub(9), None, at(100), WANT).await.unwrap().is_empty());
    };
    check(&*log, "at once").await;
    let log = subject.crash(log).await;
    check(&*log, "after a crash").await;
    let log = subject.reopen(log).await;
    check(&*log, "after a restart").await;
    assert_eq!(claim_all(&*log, sub(1), at(1_000)).await.len(), 0);
    assert_eq!(texts(&claim_all(&*log, sub(2), at(0)).await), ["b"]);
    log.close().await.unwrap();
}

pub async fn letters_come_in_the_order_in_which_they_were_given_up(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    give_up(&*log, 1, &[("a", 30), ("b", 10), ("c", 20)]).await;
    give_up(&*log, 2, &[("x", 5), ("y", 6)]).await;
    give_up(&*log, 1, &[("d", 20), ("e", 10), ("f", 40)]).await;
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 10, 6), (2, 5, 2)]));
    let log = subject.reopen(log).await;
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 10, 6), (2, 5, 2)]));

    // Dead letters with the same time are in the order of their events.
    let all = log.letters(sub(1), None, Timestamp::MAX, WANT).await.unwrap();
    assert_eq!(objects(&all), ["b", "e", "c", "d", "a", "f"]);
    let check = async |after: Option<DeadLetterKey>, until: i64, expected: &[&str]| {
        let found = log.letters(sub(1), after, at(until), WANT).await.unwrap();
        assert_eq!(objects(&found), expected, "after {after:?}, until {until}");
    };
    check(None, 9, &[]).await;
    check(None, 10, &["b", "e"]).await;
    check(None, 29, &["b", "e", "c", "d"]).await;
    check(Some(all[1].key()), 39, &["c", "d", "a"]).await;
    check(Some(all[2].key()), 19, &[]).await;
    check(Some(all[2].key()), 20, &["d"]).await;
    check(Some(all[5].key()), 100, &[]).await;
    // The key to continue after need not belong to an existing dead letter.
    check(Some((at(15), all[0].position())), 25, &["c", "d"]).await;
    check(Some((at(90), all[0].position())), 25, &[]).await;
    check(Some((Timestamp::MAX, all[5].position())), 100, &[]).await;

    let one = ClaimLimits {
        events_max: 1,
        ..WANT
    };
    let paged = letters_all(&*log, sub(1), at(30), one).await;
    assert_eq!(objects(&paged), ["b", "e", "c", "d", "a"]);
    log.close().await.unwrap();
}

pub async fn letters_stay_within_what_is_wanted(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    let big = "b".repeat(100);
    let all = [("aaaaa", 1), ("aaaaa", 2), ("aaaaa", 3), (&big, 4), ("aa", 5)];
    give_up(&*log, 1, &all).await;
    let count = async |from: usize, events_max, bytes_max, overhead| {
        let want = ClaimLimits {
            events_max,
            bytes_max,
            overhead,
        };
        let all = log.letters(sub(1), None, at(9), WANT).await.unwrap();
        let after = from.checked_sub(1).map(|last| all[last].key());
        log.letters(sub(1), after, at(9), want).await.unwrap().len()
    };
    assert_eq!(count(0, 0, 1_000, 0).await, 0);
    assert_eq!(count(0, 1, 1_000, 0).await, 1);
    assert_eq!(count(0, 2, 1_000, 0).await, 2);
    assert_eq!(count(0, 9, 23, 7).await, 1, "two would be 24 bytes");
    assert_eq!(count(0, 9, 24, 7).await, 2);
    assert_eq!(count(1, 9, 109, 0).await, 2, "the third is too large");
    assert_eq!(count(1, 9, 110, 0).await, 3);
    assert_eq!(count(3, 9, 50, 7).await, 1, "a large one comes alone");
    assert_eq!(count(4, 9, 1, 0).await, 1);
    assert_eq!(count(0, 9, 1_000, 0).await, 5);
    log.close().await.unwrap();
}

pub async fn letters_that_are_done_are_gone_for_good(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    give_up(&*log, 1, &[("a", 10), ("b", 20), ("c", 30), ("d", 40)]).await;
    give_up(&*log, 2, &[("x", 5)]).await;
    let keys = keys(&log.letters(sub(1), None, at(100), WANT).await.unwrap());
    log.dead_letters_done(sub(1), vec![]).await.unwrap();
    // None of these keys exists: another subscription, another time, an unknown subscription.
    let (decided, position) = keys[1];
    log.dead_letters_done(sub(2), keys.clone()).await.unwrap();
    log.dead_letters_done(sub(1), vec![(at(21), position)])
        .await
        .unwrap();
    log.dead_letters_done(sub(9), keys.clone()).await.unwrap();
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 10, 4), (2, 5, 1)]));
    log.dead_letters_done(sub(1), vec![(decided, position)])
        .await
        .unwrap();
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 10, 3), (2, 5, 1)]));

    let log = subject.crash(log).await;
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 10, 3), (2, 5, 1)]));
    let left = log.letters(sub(1), None, at(100), WANT).await.unwrap();
    assert_eq!(objects(&left), ["a", "c", "d"]);
    // Keys that are done already, and one key named twice, are fine.
    log.dead_letters_done(sub(1), vec![keys[0], keys[1], keys[0], keys[2]])
        .await
        .unwrap();
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 40, 1), (2, 5, 1)]));
    log.dead_letters_done(sub(1), keys.clone()).await.unwrap();
    assert_eq!(log.pending_dead_letters(), waiting(&[(2, 5, 1)]));
    assert!(log.letters(sub(1), None, at(100), WANT).await.unwrap().is_empty());

    let log = subject.crash(log).await;
    assert_eq!(log.pending_dead_letters(), waiting(&[(2, 5, 1)]));
    assert!(log.letters(sub(1), None, at(100), WANT).await.unwrap().is_empty());
    assert!(claim_all(&*log, sub(1), at(100)).await.is_empty());
    assert_eq!(log.letters(sub(2), None, at(100), WANT).await.unwrap().len(), 1);
    log.close().await.unwrap();
}

// A key proves that the delivery was given up, so the giving up must be durable with the removal.
pub async fn a_letter_may_be_done_before_it_is_durable(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    log.append(events(&[("a", &[1]), ("b", &[1])])).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    let given_up = claims
        .iter()
        .map(|claim| settled(claim, NextStep::DeadLetter(GiveUpReason::BadRequest)));
    let given_up: Vec<_> = given_up.collect();
    let first = (given_up[0].at, claims[0].position());
    log.settle(sub(1), given_up).await.unwrap();
    log.dead_letters_done(sub(1), vec![first]).await.unwrap();
    let log = subject.crash(log).await;
    assert!(!texts(&claim_all(&*log, sub(1), at(0)).await).contains(&"a"));
    let letters = log.letters(sub(1), None, at(100), WANT).await.unwrap();
    assert!(!objects(&letters).contains(&"a"));
    log.close().await.unwrap();
}

pub async fn closing_a_subscription_drops_its_letters(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1, 2]).await;
    give_up(&*log, 1, &[("a", 10), ("b", 20), ("c", 30)]).await;
    give_up(&*log, 2, &[("x", 5), ("y", 6)]).await;
    let keys = keys(&log.letters(sub(1), None, at(10), WANT).await.unwrap());
    log.dead_letters_done(sub(1), keys.clone()).await.unwrap();
    log.append(events(&[("d", &[1]), ("e", &[1])])).await.unwrap();
    let one = ClaimLimits {
        events_max: 1,
        ..WANT
    };
    let claims = log.claim(sub(1), at(0), one).await.unwrap();
    // The dead letter is not recorded yet; closing drops and counts it like the others.
    let given_up = settled(&claims[0], NextStep::DeadLetter(GiveUpReason::BadRequest));
    log.settle(sub(1), vec![given_up]).await.unwrap();
    assert_eq!(log.close_subscription(sub(1)).await.unwrap(), 4);
    assert_eq!(log.close_subscription(sub(1)).await.unwrap(), 0);
    assert_eq!(log.pending_dead_letters(), waiting(&[(2, 5, 2)]));
    assert!(log.letters(sub(1), None, at(100), WANT).await.unwrap().is_empty());
    log.dead_letters_done(sub(1), keys).await.unwrap();

    let log = subject.crash(log).await;
    assert_eq!(log.pending_dead_letters(), waiting(&[(2, 5, 2)]));
    assert!(log.letters(sub(1), None, at(100), WANT).await.unwrap().is_empty());
    assert_eq!(log.close_subscription(sub(2)).await.unwrap(), 2);
    assert_eq!(log.pending_dead_letters(), []);
    log.close().await.unwrap();
}

/// Gives up `count` events of about a kilobyte in requests of fifty. The times of neighbours
/// alternate, so that consecutive dead letters come from different requests. Returns the events'
/// positions.
async fn give_up_many(log: &dyn EventLog, count: usize) -> Vec<Position> {
    let padding = "p".repeat(1000);
    let all: Vec<String> = (0..count).map(|n| format!("{n} {padding}")).collect();
    let mut positions = Vec::new();
    for chunk in all.chunks(50) {
        let batch: Vec<(&str, &[u64])> = chunk.iter().map(|text| (text.as_str(), &[1u64][..])).collect();
        let first = log.append(events(&batch)).await.unwrap();
        positions.extend((0..chunk.len() as u64).map(|n| Position(first.0 + n)));
    }
    loop {
        let claims = log.claim(sub(1), at(0), WANT).await.unwrap();
        if claims.is_empty() {
            break;
        }
        let given_up = claims.iter().map(|claim| {
            let mut one = settled(claim, NextStep::DeadLetter(GiveUpReason::AttemptsExhausted));
            one.at = at((claim.position().0 % 7) as i64);
            one
        });
        log.settle(sub(1), given_up.collect()).await.unwrap();
    }
    log.flush().await.unwrap();
    positions
}

pub async fn many_letters_are_read_and_done_page_by_page(subject: &dyn LogUnderTest) {
    const COUNT: usize = 4_000;
    let log = open(subject, &[1]).await;
    let positions = give_up_many(&*log, COUNT).await;
    let log = subject.reopen(log).await;
    assert_eq!(log.pending_dead_letters(), waiting(&[(1, 0, COUNT as u64)]));
    let all = letters_all(&*log, sub(1), at(100), WANT).await;
    assert_eq!(all.len(), COUNT);
    assert!(all.is_sorted_by(|a, b| a.key() < b.key()));
    for letter in &all {
        let n: usize = letter.object().split(' ').next().unwrap().parse().unwrap();
        assert_eq!(letter.position(), positions[n]);
    }
    let want = ClaimLimits {
        bytes_max: 100_000,
        ..WANT
    };
    let paged = letters_all(&*log, sub(1), at(100), want).await;
    assert!(keys(&paged) == keys(&all), "pages differ from the whole");

    let want = ClaimLimits {
        events_max: 333,
        ..WANT
    };
    let mut done = Vec::new();
    let mut left = COUNT as u64;
    loop {
        let page = log.letters(sub(1), None, at(100), want).await.unwrap();
        if page.is_empty() {
            break;
        }
        left -= page.len() as u64;
        done.extend(keys(&page));
        log.dead_letters_done(sub(1), keys(&page)).await.unwrap();
        let waiting = log.pending_dead_letters();
        assert_eq!(waiting.first().map_or(0, |waiting| waiting.count), left);
    }
    assert!(done == keys(&all), "out of order");
    assert_eq!((left, log.pending_dead_letters()), (0, vec![]));
    log.close().await.unwrap();
}

// Readers that meet dead letters which are being removed may see them or not, and never report
// damage.
pub async fn letters_are_read_while_others_are_done(subject: &dyn LogUnderTest) {
    let log = open(subject, &[1]).await;
    give_up_many(&*log, 1_000).await;
    let all = keys(&letters_all(&*log, sub(1), at(100), WANT).await);
    let finish = async {
        for chunk in all.chunks(40) {
            log.dead_letters_done(sub(1), chunk.to_vec()).await.unwrap();
        }
    };
    let read = async {
        loop {
            let want = ClaimLimits {
                events_max: 100,
                ..WANT
            };
            let found = letters_all(&*log, sub(1), at(100), want).await;
            if found.is_empty() {
                break;
            }
            assert!(found.is_sorted_by(|a, b| a.key() < b.key()));
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(finish, read);
    assert_eq!(log.pending_dead_letters(), []);
    let health = log.health();
    assert_eq!((health.corrupt_records, health.corrupt_deliveries), (0, 0));
    log.close().await.unwrap();
}
