//! Stored form of losses and damage, kept until the operator acknowledges them.

use postrider_core::ids::{Position, SubscriptionId};
use postrider_store::log::{LostDeliveries, LostEvents};
use serde::{Deserialize, Serialize};

/// Number of losses that are stored; later ones are only in the server's log.
pub const LOSSES_MAX: u64 = 256;
/// Number of subscriptions that are stored with one loss.
const SUBSCRIPTIONS_MAX: usize = 1000;
const VERSION: u32 = 1;

/// A loss or a damage that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    Events(LostEvents),
    /// A damaged part of a file, with its location.
    Damage(String),
}

#[derive(Serialize, Deserialize)]
struct LossRecord {
    v: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    damage: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    events: Option<LostEventsRecord>,
}

#[derive(Serialize, Deserialize)]
struct LostEventsRecord {
    from: u64,
    to: u64,
    end_known: bool,
    cause: String,
    deliveries: Vec<LostDeliveriesRecord>,
}

#[derive(Serialize, Deserialize)]
struct LostDeliveriesRecord {
    of: u64,
    first_attempts: u64,
    exact: bool,
    retries: u64,
    letters: u64,
}

impl Loss {
    pub fn encode(&self) -> Vec<u8> {
        let mut record = LossRecord {
            v: VERSION,
            damage: None,
            events: None,
        };
        match self {
            Loss::Damage(place) => record.damage = Some(place.clone()),
            Loss::Events(lost) => {
                let deliveries = lost.deliveries.iter().take(SUBSCRIPTIONS_MAX);
                let deliveries = deliveries.map(|(of, one)| LostDeliveriesRecord {
                    of: of.0,
                    first_attempts: one.first_attempts,
                    exact: one.exact,
                    retries: one.retries,
                    letters: one.letters,
                });
                record.events = Some(LostEventsRecord {
                    from: lost.from.0,
                    to: lost.to.0,
                    end_known: lost.end_known,
                    cause: lost.cause.clone(),
                    deliveries: deliveries.collect(),
                });
            }
        }
        serde_json::to_vec(&record).expect("numbers and texts")
    }

    /// `None` for a record of a newer program.
    pub fn decode(bytes: &[u8]) -> Option<Loss> {
        let record: LossRecord = serde_json::from_slice(bytes).ok()?;
        if let Some(place) = record.damage {
            return Some(Loss::Damage(place));
        }
        let lost = record.events?;
        let deliveries = lost.deliveries.into_iter().map(|one| {
            let counts = LostDeliveries {
                first_attempts: one.first_attempts,
                exact: one.exact,
                retries: one.retries,
                letters: one.letters,
            };
            (SubscriptionId(one.of), counts)
        });
        Some(Loss::Events(LostEvents {
            from: Position(lost.from),
            to: Position(lost.to),
            end_known: lost.end_known,
            cause: lost.cause,
            deliveries: deliveries.collect(),
        }))
    }
}
