//! The auditor's own tables, written from the reference and independent of the engine's.

use postrider_core::subscription::{Destination, Subscription};
use std::time::Duration;

/// The document that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleDocument {
    Cloud2018,
    Cloud2019,
    Cloud2020,
    Cloud2021,
    Current,
    Edge,
}

use RuleDocument::*;

/// The outcome of an attempt, as far as a receiver can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReceiverOutcome {
    Answered(u16),
    /// Refused or reset.
    Broken,
    Unresolved,
    TimedOut,
}

/// The rules that the documents and the subscription set for its deliveries.
#[derive(Clone, Copy, Debug)]
pub struct AuditRules {
    pub document: RuleDocument,
    /// Some rules treat Azure resources and webhooks differently.
    azure_resource: bool,
    /// Whether a request may hold several events.
    batched: bool,
    pub dead_letter: bool,
    pub attempts_max: u32,
    pub time_to_live: Duration,
    /// From the last attempt until a dead letter may be written.
    pub letter_delay: Duration,
    /// A dead letter is dropped when its store was out of reach for this long.
    pub letter_patience: Duration,
    /// Whether the operator wants batches halved after 400, too.
    pub halves_after_400: bool,
}

/// The same in every document but the first.
const LETTER_DELAY: Duration = Duration::from_secs(300);
/// The same in every document that names it.
pub const LETTER_PATIENCE: Duration = Duration::from_secs(4 * 3600);

fn seconds(table: &[u64], index: usize) -> Duration {
    Duration::from_secs(table[index.min(table.len() - 1)])
}

/// The most events in a request. Either limit turns batching on; without a number it is ten.
pub fn batch_max(subscription: &Subscription) -> usize {
    let batching = subscription.destination.batching();
    let otherwise = batching.preferred_kilobytes.map_or(1, |_| 10);
    batching.events_max.unwrap_or(otherwise) as usize
}

impl AuditRules {
    pub fn of(subscription: &Subscription, default_profile: &str) -> AuditRules {
        let document = match subscription.profile.as_deref().unwrap_or(default_profile) {
            "cloud-2018" => Cloud2018,
            "cloud-2019" => Cloud2019,
            "cloud-2020" => Cloud2020,
            "cloud-2021" => Cloud2021,
            "cloud-current" => Current,
            "edge" => Edge,
            other => panic!("no document is called {other}"),
        };
        let default_minutes = if document == Edge { 120 } else { 1440 };
        let minutes = subscription.retry.time_to_live_minutes.unwrap_or(default_minutes);
        AuditRules {
            document,
            azure_resource: matches!(subscription.destination, Destination::EventGrid { .. }),
            batched: batch_max(subscription) > 1,
            dead_letter: subscription.dead_letter.is_some(),
            attempts_max: subscription.retry.attempts_max.unwrap_or(30),
            time_to_live: Duration::from_secs(u64::from(minutes) * 60),
            letter_delay: match document {
                Cloud2018 => Duration::ZERO,
                Cloud2019 | Cloud2020 | Cloud2021 | Current | Edge => LETTER_DELAY,
            },
            letter_patience: LETTER_PATIENCE,
            halves_after_400: false,
        }
    }

    pub fn is_success(&self, status: u16) -> bool {
        match self.document {
            Cloud2018 | Cloud2019 => status == 200 || status == 202,
            Cloud2020 | Cloud2021 | Current | Edge => (200..=204).contains(&status),
        }
    }

    /// Whether the status means that a batch is too large, and says nothing about any one of its
    /// events.
    pub fn halves(&self, status: u16) -> bool {
        status == 413 || (status == 400 && self.halves_after_400)
    }

    /// Whether the status is never retried.
    pub fn is_final(&self, status: u16) -> bool {
        match (self.document, status) {
            (Cloud2018 | Cloud2019 | Cloud2020, 400 | 413) => self.dead_letter,
            (Cloud2021 | Current, 400 | 403 | 413) => true,
            (Cloud2021 | Current, 401) | (Cloud2021, 404) => !self.azure_resource,
            _ => false,
        }
    }

    /// The wait after the failure of attempt number `number`, the first being 1, before least
    /// waits.
    pub fn step(&self, number: u32) -> Duration {
        const HOURLY: [u64; 7] = [10, 30, 60, 300, 600, 1800, 3600];
        const GROWING: [u64; 10] = [10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200];
        const EDGE: [u64; 2] = [60, 600];
        let index = number.max(1) as usize - 1;
        match self.document {
            Cloud2018 | Cloud2019 | Cloud2020 => seconds(&HOURLY, index),
            Cloud2021 | Current => seconds(&GROWING, index),
            Edge => seconds(&EDGE, index),
        }
    }

    pub fn floor(&self, came: ReceiverOutcome) -> Duration {
        let ReceiverOutcome::Answered(status) = came else {
            return Duration::from_secs(match self.document {
                Cloud2018 | Cloud2019 | Edge => 0,
                Cloud2020 | Cloud2021 | Current => 10,
            });
        };
        Duration::from_secs(match (self.document, status) {
            (Cloud2018 | Cloud2019 | Edge, _) => 0,
            (Cloud2020, 400 | 401 | 403 | 404) => 300,
            (Cloud2021 | Current, 401 | 404) if self.azure_resource => 300,
            (_, 408) => 120,
            (_, 503) => 30,
            _ => 10,
        })
    }

    /// The longest that jitter may make a step.
    pub fn step_longest(&self, number: u32) -> Duration {
        let step = self.step(number);
        match self.document {
            Edge => step,
            _ => step + step / 100,
        }
    }

    pub fn response_timeout(&self) -> Duration {
        Duration::from_secs(match self.document {
            Cloud2018 | Edge => 60,
            Cloud2021 if self.batched => 60,
            Cloud2019 | Cloud2020 | Cloud2021 | Current => 30,
        })
    }

    /// How long after sending a success counts although the attempt has timed out.
    pub fn late_window(&self) -> Option<Duration> {
        match self.document {
            Cloud2018 | Edge => None,
            Cloud2019 | Cloud2020 | Cloud2021 | Current => Some(Duration::from_secs(180)),
        }
    }

    /// Whether the document has probation.
    pub fn knows_delays(&self) -> bool {
        matches!(self.document, Cloud2020 | Cloud2021 | Current)
    }
}

/// The number of different deliveries that must fail before probation begins.
pub const DELAY_AFTER: usize = 10;
pub const DELAY_MAX: Duration = Duration::from_secs(4 * 3600);
/// How long before its expiry an event is attempted that would expire while its endpoint is on
/// probation.
pub const EXPIRY_LEAD: Duration = Duration::from_secs(10);
/// The longest first delay, and so the least interval of early attempts for expiring events.
pub const FIRST_DELAY_MAX: Duration = Duration::from_secs(300);

/// The first delay by cause.
pub fn first_delay(came: ReceiverOutcome) -> Duration {
    Duration::from_secs(match came {
        ReceiverOutcome::Broken => 30,
        ReceiverOutcome::Unresolved | ReceiverOutcome::Answered(401 | 403 | 404) => 300,
        ReceiverOutcome::TimedOut | ReceiverOutcome::Answered(_) => 10,
    })
}
