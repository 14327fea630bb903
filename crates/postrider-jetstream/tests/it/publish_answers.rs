//! Answers that publishers got, and checks that the log is consistent with them.

use crate::support::{empty_log, take};
use postrider_core::ids::Position;
use postrider_jetstream::{JetStreamLog, NatsConnection};
use postrider_store::conformance::{at, claim_all, events, sub};
use postrider_store::{Claim, Error, EventLog};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The answers that publishers got.
#[derive(Default)]
pub struct PublishAnswers {
    pub accepted: Mutex<BTreeMap<Position, String>>,
    pub refused: Mutex<BTreeSet<String>>,
}

impl PublishAnswers {
    pub fn count(&self) -> usize {
        self.accepted.lock().unwrap().len()
    }
}

/// Publishes requests sequentially until one is refused or `enough` is set.
pub async fn publish(log: &JetStreamLog, told: &PublishAnswers, publisher: usize, enough: &AtomicBool) {
    for n in 0.. {
        let text = format!("{publisher}/{n:06} {}", "x".repeat(1 + n % 700));
        let result = log.append(events(&[(&text, &[1])])).await;
        match result {
            Ok(position) => {
                told.accepted.lock().unwrap().insert(position, text);
            }
            Err(Error::Unavailable(_)) => {
                told.refused.lock().unwrap().insert(text);
                return;
            }
            Err(e) => panic!("{e}"),
        }
        if enough.load(Relaxed) {
            return;
        }
    }
}

/// Checks that everything accepted is present once, at the acknowledged position, in each
/// publisher's order. Refused events may be present once.
pub fn check(told: &PublishAnswers, claims: &[Claim], but_for: &BTreeSet<Position>) {
    let accepted = told.accepted.lock().unwrap();
    let refused = told.refused.lock().unwrap();
    let mut found: BTreeMap<Position, &str> = BTreeMap::new();
    let mut texts = BTreeSet::new();
    let mut last: BTreeMap<&str, &str> = BTreeMap::new();
    for claim in claims {
        let text = claim.object();
        assert!(
            found.insert(claim.position(), text).is_none(),
            "{} twice",
            claim.position()
        );
        assert!(texts.insert(text), "{text} is there twice");
        let publisher = text.split('/').next().unwrap();
        let before = last.insert(publisher, text);
        assert!(
            before.is_none_or(|before| before < text),
            "{text} after {before:?}"
        );
        let known =
            accepted.get(&claim.position()).is_some_and(|known| known == text) || refused.contains(text);
        assert!(known, "{text} at {} was never published there", claim.position());
    }
    for (position, text) in accepted
        .iter()
        .filter(|(position, _)| !but_for.contains(position))
    {
        assert_eq!(found.get(position), Some(&text.as_str()), "{text} is lost");
    }
}

/// Checks with a new owner of partition 3, when nothing was refused. The claims in `done` were
/// settled and flushed, and must not be offered again.
pub async fn check_anew(connection: &NatsConnection, told: &PublishAnswers, done: &BTreeSet<Position>) {
    assert!(
        told.refused.lock().unwrap().is_empty(),
        "nobody waited for longer than the patience"
    );
    let log = empty_log(connection);
    take(connection, &log, 3).await;
    let claims = claim_all(&*log, sub(1), at(0)).await;
    check(told, &claims, done);
    assert!(
        claims.iter().all(|claim| !done.contains(&claim.position())),
        "what was flushed is settled"
    );
}
