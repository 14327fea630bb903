//! The contract of a migration: what is kept when the content of a log is moved to another log.

use super::{LogUnderTest, SeededRandom, at, claim_all, events, settled, sub};
use crate::memory::MemoryLog;
use crate::moving::{DeliveryStage, ExportedRequest, MovableLog, OpenDelivery};
use crate::{EventLog, Settlement};
use postrider_core::event::PublishedBatch;
use postrider_core::ids::SubscriptionId;
use postrider_core::retry::{GiveUpReason, NextStep};
use std::sync::Arc;

pub async fn all(subject: &dyn LogUnderTest) {
    what_is_open_is_exported_as_it_stands(subject).await;
    what_is_imported_goes_on_where_it_was(subject).await;
    an_empty_log_exports_nothing(subject).await;
    for seed in 1..=3 {
        any_log_is_the_same_after_it_was_moved(subject, seed).await;
    }
}

fn moving(log: &dyn EventLog) -> &dyn MovableLog {
    log.as_movable().expect("it can be moved")
}

/// Everything that a log exports.
pub async fn export(log: &dyn EventLog) -> Vec<ExportedRequest> {
    let mut export = moving(log).export();
    let mut all = Vec::new();
    loop {
        let some = export.next().await.unwrap();
        if some.is_empty() {
            return all;
        }
        all.extend(some);
    }
}

/// An open delivery without its storage location: the event's text, the subscription, and its
/// stage.
type OpenDeliverySummary = (String, SubscriptionId, DeliveryStage);

fn summarize_open(moved: &[ExportedRequest]) -> Vec<OpenDeliverySummary> {
    let mut all = Vec::new();
    for ExportedRequest { entry, open } in moved {
        assert!(!open.is_empty(), "a request of which nothing is open");
        let ordered = open.is_sorted_by(|a, b| (a.index, a.of) < (b.index, b.of));
        assert!(ordered, "each once, in order");
        for OpenDelivery { index, of, stage } in open {
            all.push((entry.batch.object(*index as usize).to_owned(), *of, *stage));
        }
    }
    all.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    all
}

fn failed(settled: Settlement) -> DeliveryStage {
    match settled.next {
        NextStep::RetryAt(due) => DeliveryStage::Retry {
            due,
            attempts_made: settled.attempts_made,
            last_attempt: settled.last_attempt,
        },
        NextStep::DeadLetter(reason) => DeliveryStage::Letter {
            decided: settled.at,
            attempts_made: settled.attempts_made,
            last_attempt: settled.last_attempt,
            reason,
        },
        NextStep::Done | NextStep::Drop(_) => panic!("that is the end of it"),
    }
}

/// Appends three requests and leaves deliveries open in every stage. Returns the open deliveries.
async fn fill(log: &dyn EventLog) -> Vec<OpenDeliverySummary> {
    for of in 1..=4 {
        log.open_subscription(sub(of)).await.unwrap();
    }
    log.append(events(&[("a", &[1, 2, 3]), ("b", &[1, 3])]))
        .await
        .unwrap();
    log.append(events(&[("c", &[1]), ("d", &[4])])).await.unwrap();
    log.append(events(&[("e", &[2]), ("f", &[1, 2])])).await.unwrap();
    let mut expected = vec![
        ("e".to_owned(), sub(2), DeliveryStage::Waiting),
        ("f".to_owned(), sub(2), DeliveryStage::Waiting),
    ];
    let next = |text: &str, of: u64| match (text, of) {
        ("a", 1) => Some(NextStep::RetryAt(at(50))),
        ("b", 1) => Some(NextStep::DeadLetter(GiveUpReason::AttemptsExhausted)),
        ("c", 1) | ("a", 3) => Some(NextStep::Done),
        ("b", 3) => Some(NextStep::RetryAt(at(40))),
        ("d", 4) => Some(NextStep::DeadLetter(GiveUpReason::BadRequest)),
        ("a", 2) => Some(NextStep::RetryAt(at(60))),
        // Claimed and never settled.
        _ => None,
    };
    for of in [1, 3, 4, 2] {
        for claim in claim_all(log, sub(of), at(0)).await {
            match next(claim.object(), of) {
                Some(next) => {
                    let settled = settled(&claim, next);
                    if next != NextStep::Done {
                        expected.push((claim.object().to_owned(), sub(of), failed(settled.clone())));
                    }
                    log.settle(sub(of), vec![settled]).await.unwrap();
                }
                None if of == 1 => {
                    expected.push((claim.object().to_owned(), sub(of), DeliveryStage::Waiting))
                }
                None => {}
            }
        }
    }
    expected.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    expected
}

pub async fn what_is_open_is_exported_as_it_stands(subject: &dyn LogUnderTest) {
    let log = subject.open().await;
    let expected = fill(&*log).await;
    // Claims end with the reopening.
    let log = subject.reopen(log).await;
    let moved = export(&*log).await;
    assert_eq!(summarize_open(&moved), expected);
    // An event for several subscriptions is exported once, with the attributes of its publish
    // request.
    assert_eq!(moved.len(), 3);
    let model = events(&[("a", &[1, 2, 3]), ("b", &[1, 3])]);
    let first = moved.iter().find(|one| one.entry.batch.body == model.body);
    let batch = &first.unwrap().entry.batch;
    let said = |batch: &PublishedBatch| (batch.received, batch.topic, batch.schema, batch.trace.clone());
    assert_eq!(said(batch), said(&model));
    // An export changes nothing.
    assert_eq!(summarize_open(&export(&*log).await), expected);
    let log = subject.reopen(log).await;
    assert_eq!(summarize_open(&export(&*log).await), expected);
}

pub async fn what_is_imported_goes_on_where_it_was(subject: &dyn LogUnderTest) {
    let source = MemoryLog::new(3);
    let expected = fill(&source).await;
    source.checkpoint();
    let source = source.crash();
    let log = subject.open().await;
    for of in 1..=4 {
        log.open_subscription(sub(of)).await.unwrap();
    }
    moving(&*log).import(export(&source).await).await.unwrap();
    // An import is durable on return, like an append.
    let log = subject.crash(log).await;
    assert_eq!(summarize_open(&export(&*log).await), expected);
    let backlog = |of: u64| {
        let found = log.backlog(sub(of));
        (found.waiting, found.claimed, found.retrying)
    };
    assert_eq!(
        (1..=4).map(backlog).collect::<Vec<_>>(),
        [(1, 0, 1), (2, 0, 1), (0, 0, 1), (0, 0, 0)]
    );
    let letters: Vec<(SubscriptionId, u64)> = log
        .pending_dead_letters()
        .iter()
        .map(|one| (one.of, one.count))
        .collect();
    assert_eq!(letters, [(sub(1), 1), (sub(4), 1)]);
    let texts = |claims: &[crate::Claim]| -> Vec<(String, u32)> {
        let all = claims.iter();
        all.map(|claim| (claim.object().to_owned(), claim.attempts_made))
            .collect()
    };
    assert_eq!(texts(&claim_all(&*log, sub(1), at(0)).await), [("f".into(), 0)]);
    let due = claim_all(&*log, sub(1), at(50)).await;
    assert_eq!(texts(&due), [("a".into(), 1)]);
    assert!(due[0].last_attempt.is_some() && due[0].due == Some(at(50)));
    log.settle(sub(1), vec![settled(&due[0], NextStep::Done)])
        .await
        .unwrap();
    // New events come after the imported ones and get positions of their own.
    log.append(events(&[("g", &[3])])).await.unwrap();
    assert_eq!(texts(&claim_all(&*log, sub(3), at(0)).await), [("g".into(), 0)]);
    let log = subject.reopen(log).await;
    let left = summarize_open(&export(&*log).await);
    assert!(!left.iter().any(|(text, of, _)| text == "a" && *of == sub(1)));
    assert_eq!(left.len(), expected.len());
}

pub async fn an_empty_log_exports_nothing(subject: &dyn LogUnderTest) {
    let log = subject.open().await;
    log.open_subscription(sub(1)).await.unwrap();
    assert!(export(&*log).await.is_empty());
    log.append(events(&[("a", &[1])])).await.unwrap();
    let claims = claim_all(&*log, sub(1), at(0)).await;
    log.settle(sub(1), vec![settled(&claims[0], NextStep::Done)])
        .await
        .unwrap();
    let log = subject.reopen(log).await;
    assert!(export(&*log).await.is_empty());
    moving(&*log).import(Vec::new()).await.unwrap();
    assert!(export(&*log).await.is_empty());
}

/// A log after some work, with larger events and many subscriptions.
async fn work(log: &dyn EventLog, seeded: &mut SeededRandom) {
    const SUBSCRIPTIONS: u64 = 12;
    for of in 1..=SUBSCRIPTIONS {
        log.open_subscription(sub(of)).await.unwrap();
    }
    for request in 0..150 {
        let mut all = Vec::new();
        for n in 0..1 + seeded.below(5) {
            let text = format!("\"{request}-{n}-{}\"", "x".repeat(seeded.below(3_000) as usize));
            let matched: Vec<u64> = (1..=SUBSCRIPTIONS).filter(|_| seeded.one_in(3)).collect();
            all.push((text, matched));
        }
        let all: Vec<(&str, &[u64])> = all.iter().map(|(text, of)| (text.as_str(), &of[..])).collect();
        log.append(events(&all)).await.unwrap();
        let of = sub(1 + seeded.below(SUBSCRIPTIONS));
        let want = crate::ClaimLimits {
            events_max: 1 + seeded.below(40) as usize,
            ..super::WANT
        };
        // Leave deliveries of the last subscription open.
        if of == sub(SUBSCRIPTIONS) && request > 20 {
            continue;
        }
        let claims = log.claim(of, at(request), want).await.unwrap();
        let mut done = Vec::new();
        for claim in claims {
            let next = match seeded.below(8) {
                0 | 1 => NextStep::RetryAt(at(request + seeded.below(500) as i64)),
                2 => NextStep::DeadLetter(GiveUpReason::TimeToLiveExceeded),
                3 => continue,
                _ => NextStep::Done,
            };
            done.push(settled(&claim, next));
        }
        log.settle(of, done).await.unwrap();
    }
    log.flush().await.unwrap();
}

pub async fn any_log_is_the_same_after_it_was_moved(subject: &dyn LogUnderTest, seed: u64) {
    let log = subject.open().await;
    work(&*log, &mut SeededRandom(seed)).await;
    let log = subject.reopen(log).await;
    let moved = export(&*log).await;
    let told = summarize_open(&moved);
    assert!(told.len() > 100, "{} are not enough to mean anything", told.len());
    let mut counts = std::collections::BTreeMap::new();
    for (_, of, stage) in &told {
        let counted: &mut (u64, u64, u64) = counts.entry(*of).or_default();
        match stage {
            DeliveryStage::Waiting => counted.0 += 1,
            DeliveryStage::Retry { .. } => counted.1 += 1,
            DeliveryStage::Letter { .. } => counted.2 += 1,
        }
    }
    let letters = log.pending_dead_letters();
    for (of, counted) in counts {
        let backlog = log.backlog(of);
        let letters = letters.iter().find(|one| one.of == of).map_or(0, |one| one.count);
        assert_eq!((backlog.waiting, backlog.retrying, letters), counted, "{of:?}");
    }
    // Move the content to a memory log and back into another log, in two portions.
    let memory = Arc::new(MemoryLog::new(9));
    let other = subject.open().await;
    for of in 1..=12 {
        memory.open_subscription(sub(of)).await.unwrap();
        other.open_subscription(sub(of)).await.unwrap();
    }
    memory.import(moved).await.unwrap();
    let mut moved = export(&*memory).await;
    assert_eq!(summarize_open(&moved), told);
    let rest = moved.split_off(moved.len() / 2);
    moving(&*other).import(moved).await.unwrap();
    moving(&*other).import(rest).await.unwrap();
    let other = subject.reopen(other).await;
    assert_eq!(summarize_open(&export(&*other).await), told);
    if !subject.is_ordered() {
        return;
    }
    // First attempts are offered in the order of publishing.
    for of in 1..=12 {
        let claims = claim_all(&*other, sub(of), at(-1)).await;
        let order: Vec<(u64, u64)> = claims.iter().map(|claim| published(claim.object())).collect();
        assert!(order.is_sorted(), "{order:?}");
    }
}

/// Number of the request, and index of the event in it, taken from the event's text.
fn published(text: &str) -> (u64, u64) {
    let mut parts = text
        .trim_matches('"')
        .split('-')
        .map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap(), parts.next().unwrap())
}
