//! Selection of dead letters: names, filters, and the subscriptions that they refer to.

use super::{no_such_letter, store_unavailable};
use crate::http::decoded;
use crate::own_api::Problem;
use postrider_core::duration;
use postrider_core::ids::{Position, SubscriptionId};
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::Engine;
use postrider_engine::dead_letters::PendingDeadLetterFilter;
use postrider_engine::replay::{ArchivedDeadLetterFilter, DeadLetterId, ReplayRequest};
use postrider_store::{BlobFilter, BlobId, DeadLetterKey};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt;

/// The id of a dead letter in the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadLetterName {
    /// `<blob>-<index in the blob>`
    Written(DeadLetterId),
    /// `pending-<subscription>-<when it was given up, in nanoseconds>-<position>`
    Pending { of: SubscriptionId, key: DeadLetterKey },
}

impl DeadLetterName {
    pub fn parse(text: &str) -> Option<DeadLetterName> {
        let mut parts = text.split('-');
        let first = parts.next()?;
        let name = if first == "pending" {
            DeadLetterName::Pending {
                of: SubscriptionId(number(parts.next()?)?),
                key: (
                    Timestamp::from_nanos(number(parts.next()?)?),
                    Position(number(parts.next()?)?),
                ),
            }
        } else {
            DeadLetterName::Written(DeadLetterId {
                blob: BlobId(number(first)?),
                place: number(parts.next()?)?,
            })
        };
        parts.next().is_none().then_some(name)
    }
}

impl fmt::Display for DeadLetterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeadLetterName::Written(DeadLetterId { blob, place }) => write!(f, "{}-{place}", blob.0),
            DeadLetterName::Pending { of, key } => write!(f, "pending-{of}-{}-{}", key.0.nanos(), key.1),
        }
    }
}

/// Parses digits and nothing else: no sign, no space.
pub fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

/// The parameters of a query. Each must be known and given once.
pub fn read_query(query: &str, known: &[&'static str]) -> Result<Vec<(&'static str, String)>, Problem> {
    let mut read: Vec<(&'static str, String)> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let Some(name) = known.iter().find(|known| **known == name) else {
            return Err(unknown(&decoded(name), known));
        };
        if read.iter().any(|(given, _)| given == name) {
            return Err(Problem::field(name, "is given twice"));
        }
        read.push((name, decoded(value).into_owned()));
    }
    Ok(read)
}

pub fn unknown(name: &str, known: &[&str]) -> Problem {
    let known = match known {
        [] => "nothing is".to_owned(),
        known => format!("known are {}", known.join(", ")),
    };
    Problem::new(400, format!("{name}: is not known; {known}"))
}

pub fn read_reason(text: &str) -> Result<GiveUpReason, Problem> {
    let named = |reason: &&GiveUpReason| reason.name().eq_ignore_ascii_case(text);
    GiveUpReason::ALL.iter().find(named).copied().ok_or_else(|| {
        let known: Vec<_> = GiveUpReason::ALL.iter().map(|reason| reason.name()).collect();
        Problem::field("reason", format!("{text:?} is not one of {}", known.join(", ")))
    })
}

/// Parses a point in time, or a duration before `now`.
pub fn read_since(text: &str, now: Timestamp) -> Result<Timestamp, Problem> {
    if let Some(at) = Timestamp::parse(text) {
        return Ok(at);
    }
    match duration::parse(text) {
        Ok(ago) if ago != duration::NEVER => Ok((now - ago).max(Timestamp::MIN)),
        _ => Err(Problem::field(
            "since",
            format!(
                "{text:?} is neither a time such as \"2030-01-01T00:00:00Z\" nor a duration such as \"2h\""
            ),
        )),
    }
}

/// Operation that dead letters are selected for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadLetterOperation {
    Replay,
    Purge,
    /// Pending dead letters are written at once.
    Write,
}

/// Parsed body of a request to replay, purge or write dead letters.
#[derive(Debug, Default)]
pub struct SelectionRequest {
    subscription: Option<String>,
    reason: Option<GiveUpReason>,
    since: Option<Timestamp>,
    id: Option<DeadLetterName>,
    all: bool,
    to: Option<String>,
    rate: Option<u32>,
    pub dry_run: bool,
}

const FILTERS: [&str; 6] = ["subscription", "reason", "since", "id", "all", "dryRun"];
const REPLAYING: [&str; 2] = ["to", "rate"];

impl SelectionRequest {
    pub fn read(
        members: &Map<String, Value>,
        now: Timestamp,
        purpose: DeadLetterOperation,
    ) -> Result<SelectionRequest, Problem> {
        let mut known = FILTERS.to_vec();
        if purpose == DeadLetterOperation::Replay {
            known.extend(REPLAYING);
        }
        let mut asked = SelectionRequest::default();
        for (name, value) in members {
            let Some(name) = known.iter().find(|known| *known == name) else {
                return Err(unknown(name, &known));
            };
            match *name {
                "subscription" => asked.subscription = Some(text(name, value)?.to_owned()),
                "reason" => asked.reason = Some(read_reason(text(name, value)?)?),
                "since" => asked.since = Some(read_since(text(name, value)?, now)?),
                "id" => asked.id = Some(read_id(text(name, value)?)?),
                "to" => asked.to = Some(text(name, value)?.to_owned()),
                "rate" => {
                    let rate = value.as_u64().and_then(|rate| u32::try_from(rate).ok());
                    let rate = rate.filter(|rate| *rate > 0);
                    let refused =
                        || Problem::field("rate", "must be a whole number of events per second, at least 1");
                    asked.rate = Some(rate.ok_or_else(refused)?);
                }
                "all" => match value {
                    Value::Bool(true) => asked.all = true,
                    _ => return Err(Problem::field("all", "must be true")),
                },
                _ => {
                    let said = value.as_bool();
                    asked.dry_run = said.ok_or_else(|| Problem::field("dryRun", "must be true or false"))?;
                }
            }
        }
        asked.check(purpose)?;
        Ok(asked)
    }

    fn check(&self, purpose: DeadLetterOperation) -> Result<(), Problem> {
        let filtered = self.subscription.is_some() || self.reason.is_some() || self.since.is_some();
        if self.id.is_some() && (filtered || self.all) {
            return Err(Problem::field(
                "id",
                "names one dead letter: subscription, reason, since and all do not go with it",
            ));
        }
        // Writing is what happens to all pending dead letters anyway, so no filter is required.
        let needs_filter = purpose != DeadLetterOperation::Write;
        if needs_filter && !filtered && self.id.is_none() && !self.all {
            return Err(Problem::new(
                400,
                "one of subscription, reason, since and id is required, or \"all\": true",
            ));
        }
        let detail = match (self.id, purpose) {
            (
                Some(name @ DeadLetterName::Pending { .. }),
                DeadLetterOperation::Replay | DeadLetterOperation::Purge,
            ) => {
                format!(
                    "dead letter {name} is not written yet: wait until it is, or have it written now \
                     (POST /postrider/v1/deadletters/write)"
                )
            }
            (Some(name @ DeadLetterName::Written(_)), DeadLetterOperation::Write) => {
                format!("dead letter {name} is written already")
            }
            _ => return Ok(()),
        };
        Err(Problem {
            field: Some("id"),
            ..Problem::new(409, detail)
        })
    }

    pub fn id(&self) -> Option<DeadLetterName> {
        self.id
    }

    /// Filter for the pending dead letters that the request selects, with the subscription
    /// resolved.
    pub async fn pending(&self, engine: &Engine) -> Result<PendingDeadLetterFilter, Problem> {
        let mut filter = PendingDeadLetterFilter {
            reason: self.reason,
            since: self.since,
            ..PendingDeadLetterFilter::default()
        };
        if let Some(said) = &self.subscription {
            filter.subscription = Some(SubscriptionNames::find(engine, "subscription", said).await?.id);
        }
        if let Some(DeadLetterName::Pending { of, key }) = self.id {
            filter.subscription = Some(of);
            filter.letter = Some(key);
        }
        Ok(filter)
    }

    /// Resolves subscriptions, and checks that the named dead letter exists.
    pub async fn meant(&self, engine: &Engine) -> Result<DeadLetterSelection, Problem> {
        let mut meant = DeadLetterSelection {
            reason: self.reason.map(|reason| reason.name().to_owned()),
            since: self.since.map(|since| since.to_string()),
            id: self.id.map(|id| id.to_string()),
            all: self.all,
            rate: self.rate,
            ..DeadLetterSelection::default()
        };
        let mut deleted = None;
        if let Some(said) = &self.subscription {
            let names = SubscriptionNames::find(engine, "subscription", said).await?;
            meant.subscription_id = Some(names.id.0);
            meant.subscription = Some(names.path());
            deleted = names.deleted.then(|| names.path());
        }
        if let Some(name @ DeadLetterName::Written(id)) = self.id {
            let blob = engine
                .dead_letters
                .archive
                .get(id.blob)
                .await
                .map_err(store_unavailable)?;
            let mark = blob.and_then(|blob| blob.marks.get(id.place as usize).copied());
            if mark.is_none_or(|mark| mark.purged) {
                return Err(no_such_letter(&name));
            }
        }
        if let Some(said) = &self.to {
            let names = SubscriptionNames::find(engine, "to", said).await?;
            if names.deleted {
                return Err(Problem::field(
                    "to",
                    format!("subscription {:?} is deleted", names.path()),
                ));
            }
            meant.to_id = Some(names.id.0);
            meant.to = Some(names.path());
        }
        meant.homeless = deleted.filter(|_| meant.to.is_none());
        Ok(meant)
    }
}

fn text<'a>(field: &'static str, value: &'a Value) -> Result<&'a str, Problem> {
    value
        .as_str()
        .ok_or_else(|| Problem::field(field, "must be a string"))
}

fn read_id(text: &str) -> Result<DeadLetterName, Problem> {
    DeadLetterName::parse(text).ok_or_else(|| {
        Problem::field(
            "id",
            format!("{text:?} is not the id of a dead letter, such as \"12-0\""),
        )
    })
}

/// A resolved selection, as it is stored with a replay: its meaning does not depend on when it is
/// read again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterSelection {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subscription: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subscription_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<u32>,
    /// The deleted subscription that the dead letters belong to, so that they cannot be replayed to
    /// it.
    #[serde(skip)]
    pub homeless: Option<String>,
}

impl DeadLetterSelection {
    pub fn filter(&self) -> ArchivedDeadLetterFilter {
        ArchivedDeadLetterFilter {
            subscription: self.subscription_id.map(SubscriptionId),
            reason: self.reason.as_deref().and_then(|name| read_reason(name).ok()),
            since: self.since.as_deref().and_then(Timestamp::parse),
            letter: match self.id.as_deref().and_then(DeadLetterName::parse) {
                Some(DeadLetterName::Written(id)) => Some(id),
                _ => None,
            },
        }
    }

    pub fn request(&self) -> ReplayRequest {
        ReplayRequest {
            filter: self.filter(),
            to: self.to_id.map(SubscriptionId),
            rate: self.rate,
        }
    }
}

/// Names of a subscription. A deleted subscription can still have dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubscriptionNames {
    pub id: SubscriptionId,
    /// Name of the topic or domain.
    pub topic: String,
    pub domain_topic: Option<String>,
    pub subscription: String,
    pub deleted: bool,
}

impl SubscriptionNames {
    /// `topic/subscription`, or `domain/topic/subscription`.
    pub fn path(&self) -> String {
        let inside = self.domain_topic.iter().map(String::as_str);
        let parts = std::iter::once(&*self.topic)
            .chain(inside)
            .chain([&*self.subscription]);
        parts.collect::<Vec<_>>().join("/")
    }

    pub async fn of(engine: &Engine, id: SubscriptionId) -> Result<Option<SubscriptionNames>, Problem> {
        if let Some(names) = SubscriptionNames::live(engine, id) {
            return Ok(Some(names));
        }
        let any = BlobFilter {
            subscription: Some(id),
            ..BlobFilter::default()
        };
        let blobs = engine
            .dead_letters
            .archive
            .list(&any, None, 1)
            .await
            .map_err(store_unavailable)?;
        Ok(blobs.into_iter().next().map(|blob| SubscriptionNames {
            id,
            topic: blob.topic_name,
            domain_topic: None,
            subscription: blob.subscription_name,
            deleted: true,
        }))
    }

    fn live(engine: &Engine, id: SubscriptionId) -> Option<SubscriptionNames> {
        let subscription = engine.directory.subscription_by_id(id)?;
        let topic = engine.directory.topic_by_id(subscription.topic)?;
        Some(SubscriptionNames {
            id,
            topic: topic.topic.name.clone(),
            domain_topic: subscription.domain_topic.clone(),
            subscription: subscription.name.clone(),
            deleted: false,
        })
    }

    /// Finds the one subscription with this name, end of path, or number. Deleted subscriptions are
    /// considered only if no existing one matches.
    pub async fn find(
        engine: &Engine,
        field: &'static str,
        said: &str,
    ) -> Result<SubscriptionNames, Problem> {
        let mut live: Vec<SubscriptionNames> = engine
            .directory
            .all_subscriptions()
            .iter()
            .filter_map(|subscription| SubscriptionNames::live(engine, subscription.id))
            .collect();
        live.sort_by_key(|names| names.id);
        if let Some(found) = choose(field, said, live)? {
            return Ok(found);
        }
        let counts = engine
            .dead_letters
            .archive
            .counts()
            .await
            .map_err(store_unavailable)?;
        let others: BTreeSet<SubscriptionId> = counts.into_iter().map(|(of, ..)| of).collect();
        let mut deleted = Vec::new();
        for id in others {
            deleted.extend(
                SubscriptionNames::of(engine, id)
                    .await?
                    .filter(|names| names.deleted),
            );
        }
        if let Some(found) = choose(field, said, deleted)? {
            return Ok(found);
        }
        if let Some(id) = number(said)
            && let Some(found) = SubscriptionNames::of(engine, SubscriptionId(id)).await?
        {
            return Ok(found);
        }
        Err(Problem::field(
            field,
            format!(
                "subscription {said:?} does not exist, and there are no dead letters of one of that name"
            ),
        ))
    }
}

/// Whole paths take precedence over ends of paths.
fn choose(
    field: &'static str,
    said: &str,
    candidates: Vec<SubscriptionNames>,
) -> Result<Option<SubscriptionNames>, Problem> {
    let said = said.to_lowercase();
    let end = format!("/{said}");
    let path = |names: &SubscriptionNames| names.path().to_lowercase();
    let (whole, other): (Vec<_>, Vec<_>) = candidates.into_iter().partition(|names| path(names) == said);
    let mut found = match whole.is_empty() {
        true => other
            .into_iter()
            .filter(|names| path(names).ends_with(&end))
            .collect(),
        false => whole,
    };
    if found.len() > 1 {
        let all: Vec<_> = found
            .iter()
            .map(|names| format!("{} ({})", names.path(), names.id))
            .collect();
        let detail = format!(
            "{said:?} may mean any of {}: name one, or give its number",
            all.join(", ")
        );
        return Err(Problem::field(field, detail));
    }
    Ok(found.pop())
}
