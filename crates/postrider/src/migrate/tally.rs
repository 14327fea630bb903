//! Counts and checksums of migrated deliveries, which are equal for both stores in whatever order
//! they are read.

use postrider_core::event::{EventSchema, PublishedBatch};
use postrider_core::ids::SubscriptionId;
use postrider_store::log::LastAttempt;
use postrider_store::moving::{DeliveryStage, ExportedRequest, OpenDelivery};
use ring::digest::{Context, SHA256};
use std::collections::BTreeMap;

/// Open deliveries of one subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenDeliveryCounts {
    pub waiting: u64,
    pub retrying: u64,
    pub letters: u64,
}

impl OpenDeliveryCounts {
    pub fn all(&self) -> u64 {
        self.waiting + self.retrying + self.letters
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationTally {
    pub by_subscription: BTreeMap<SubscriptionId, OpenDeliveryCounts>,
    /// Events with an open delivery, each counted once.
    pub events: u64,
    /// Total size of the events' texts.
    pub bytes: u64,
    /// Sum of hashes over all that is known of each delivery.
    sum: u128,
}

impl MigrationTally {
    pub fn add(&mut self, moved: &ExportedRequest) {
        let batch = &moved.entry.batch;
        let mut last = None;
        for open in &moved.open {
            let counts = self.by_subscription.entry(open.of).or_default();
            match open.stage {
                DeliveryStage::Waiting => counts.waiting += 1,
                DeliveryStage::Retry { .. } => counts.retrying += 1,
                DeliveryStage::Letter { .. } => counts.letters += 1,
            }
            if last.replace(open.index) != Some(open.index) {
                self.events += 1;
                self.bytes += u64::from(batch.events[open.index as usize].object.len);
            }
            self.sum = self.sum.wrapping_add(hash(batch, open));
        }
    }

    pub fn deliveries(&self) -> u64 {
        self.by_subscription.values().map(OpenDeliveryCounts::all).sum()
    }

    pub fn total(&self) -> OpenDeliveryCounts {
        let mut total = OpenDeliveryCounts::default();
        for counts in self.by_subscription.values() {
            total.waiting += counts.waiting;
            total.retrying += counts.retrying;
            total.letters += counts.letters;
        }
        total
    }

    pub fn checksum(&self) -> String {
        format!("{:032x}", self.sum)
    }

    /// How the destination differs; `None` if it does not.
    pub fn difference(&self, found: &MigrationTally) -> Option<String> {
        let all = self.by_subscription.keys().chain(found.by_subscription.keys());
        for of in all {
            let of_one = |tally: &MigrationTally| tally.by_subscription.get(of).copied().unwrap_or_default();
            let (here, there) = (of_one(self), of_one(found));
            if here != there {
                let tell = |counts: OpenDeliveryCounts| {
                    format!(
                        "{} waiting, {} to be retried, {} dead letters",
                        counts.waiting, counts.retrying, counts.letters
                    )
                };
                return Some(format!(
                    "subscription {of} had {}, but has {} now",
                    tell(here),
                    tell(there)
                ));
            }
        }
        let (here, there) = (self.checksum(), found.checksum());
        (self != found).then(|| {
            format!("the numbers agree, but what is stored does not: checksum {here} before, {there} now")
        })
    }
}

/// Hash of all properties of a delivery that any store keeps.
fn hash(batch: &PublishedBatch, open: &OpenDelivery) -> u128 {
    let mut hash = Context::new(&SHA256);
    let number = |hash: &mut Context, n: u64| hash.update(&n.to_le_bytes());
    let text = |hash: &mut Context, text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    let index = open.index as usize;
    let event = &batch.events[index];
    number(&mut hash, open.of.0);
    text(&mut hash, batch.object(index));
    for span in [event.data_version, event.topic] {
        text(&mut hash, batch.slice(span));
    }
    let lacks = event.lacks;
    let flags = [lacks.topic, lacks.data_version, lacks.metadata_version];
    hash.update(&flags.map(u8::from));
    number(&mut hash, batch.topic.0);
    let schema = match batch.schema {
        EventSchema::EventGrid => 0,
        EventSchema::CloudEvent => 1,
        EventSchema::Custom => 2,
    };
    number(&mut hash, schema);
    number(&mut hash, batch.received.nanos() as u64);
    number(&mut hash, u64::from(batch.replay));
    text(&mut hash, &batch.publisher);
    text(&mut hash, batch.trace.as_deref().unwrap_or(""));
    let mut tried = |attempts: u32, last: Option<LastAttempt>| {
        number(&mut hash, u64::from(attempts));
        number(&mut hash, u64::from(last.is_some()));
        if let Some(last) = last {
            number(&mut hash, last.at.nanos() as u64);
            number(&mut hash, u64::from(last.outcome.code()));
            number(&mut hash, u64::from(last.status.unwrap_or(0)));
        }
    };
    match open.stage {
        DeliveryStage::Waiting => number(&mut hash, 0),
        DeliveryStage::Retry {
            due,
            attempts_made,
            last_attempt,
        } => {
            tried(attempts_made, last_attempt);
            number(&mut hash, 1);
            number(&mut hash, due.nanos() as u64);
        }
        DeliveryStage::Letter {
            decided,
            attempts_made,
            last_attempt,
            reason,
        } => {
            tried(attempts_made, last_attempt);
            number(&mut hash, 2);
            number(&mut hash, decided.nanos() as u64);
            number(&mut hash, u64::from(reason.code()));
        }
    }
    let digest = hash.finish();
    let (half, _) = digest.as_ref().split_first_chunk().expect("it has 32 bytes");
    u128::from_le_bytes(*half)
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ids::Position;
    use postrider_core::outcome::Outcome;
    use postrider_core::retry::GiveUpReason;
    use postrider_store::LogEntry;
    use postrider_store::conformance::{at, events, sub};
    use std::sync::Arc;

    fn moved(text: &str, first: u64, open: Vec<OpenDelivery>) -> ExportedRequest {
        let entry = LogEntry {
            batch: events(&[(text, &[1, 2])]),
            first: Position(first),
            place: first,
        };
        ExportedRequest {
            entry: Arc::new(entry),
            open,
        }
    }

    fn open(of: u64, stage: DeliveryStage) -> OpenDelivery {
        OpenDelivery {
            index: 0,
            of: sub(of),
            stage,
        }
    }

    fn retry(due: i64, attempts_made: u32) -> DeliveryStage {
        DeliveryStage::Retry {
            due: at(due),
            attempts_made,
            last_attempt: Some(LastAttempt {
                at: at(1),
                outcome: Outcome::Busy,
                status: Some(503),
            }),
        }
    }

    fn tally(all: &[ExportedRequest]) -> MigrationTally {
        let mut tally = MigrationTally::default();
        all.iter().for_each(|one| tally.add(one));
        tally
    }

    #[test]
    fn neither_order_nor_place_matters() {
        let some = [
            moved(
                "a",
                5,
                vec![open(1, DeliveryStage::Waiting), open(2, retry(9, 1))],
            ),
            moved("b", 7, vec![open(2, DeliveryStage::Waiting)]),
        ];
        let elsewhere = [
            moved("b", 0, vec![open(2, DeliveryStage::Waiting)]),
            moved(
                "a",
                1 << 40,
                vec![open(1, DeliveryStage::Waiting), open(2, retry(9, 1))],
            ),
        ];
        let (here, there) = (tally(&some), tally(&elsewhere));
        assert_eq!(here.difference(&there), None);
        assert_eq!((here.events, here.deliveries(), here.bytes), (2, 3, 2));
        let total = here.total();
        assert_eq!((total.waiting, total.retrying, total.letters), (2, 1, 0));
    }

    #[test]
    fn whatever_differs_is_found() {
        let letter = |reason| DeliveryStage::Letter {
            decided: at(9),
            attempts_made: 1,
            last_attempt: None,
            reason,
        };
        let of = |text: &str, stage| tally(&[moved(text, 0, vec![open(1, stage)])]);
        let before = of("a", retry(9, 1));
        let others = [
            of("b", retry(9, 1)),
            of("a", retry(8, 1)),
            of("a", retry(9, 2)),
            of("a", DeliveryStage::Waiting),
            of("a", letter(GiveUpReason::BadRequest)),
            tally(&[moved("a", 0, vec![open(2, retry(9, 1))])]),
            tally(&[
                moved("a", 0, vec![open(1, retry(9, 1))]),
                moved("a", 1, vec![open(1, retry(9, 1))]),
            ]),
            MigrationTally::default(),
        ];
        for other in others {
            assert!(before.difference(&other).is_some(), "{other:?}");
        }
        let letters = (
            of("a", letter(GiveUpReason::BadRequest)),
            of("a", letter(GiveUpReason::ClientError)),
        );
        let told = letters.0.difference(&letters.1).unwrap();
        assert!(told.contains("checksum"), "{told}");
        let told = before.difference(&MigrationTally::default()).unwrap();
        assert!(
            told.contains("subscription 1") && told.contains("1 to be retried"),
            "{told}"
        );
    }
}
