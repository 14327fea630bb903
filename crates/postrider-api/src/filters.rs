//! `POST /postrider/v1/filters/test`: which of the latest events a filter would have matched.

use crate::Server;
use crate::declare;
use crate::events::{ask, predicate};
use crate::http::{Answer, ApiCall};
use crate::lookup;
use crate::own_api::{Problem, body, read_bytes};
use crate::peers::{self, PeerResponses, note_missing};
use crate::publish::FILTER_REQUEST_EVENTS;
use postrider_core::envelope::{EnvelopeField, EventEnvelope};
use postrider_core::filter::{EventFilter, FilterBudget, FilterBudgetExceeded, FilterInput};
use postrider_core::ids::{SubscriptionId, TopicId};
use postrider_core::json::RawJson;
use postrider_core::subscription::Subscription;
use postrider_core::time::Timestamp;
use postrider_engine::recorder::{RecentEvent, RoutingVerdict, UnmetPredicate};
use postrider_wire::resources::{FieldError, Road, SubscriptionContext, parse_subscription, read_body};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

const LIMIT: usize = 50;
const LIMIT_MAX: usize = 500;
/// Name of the subscription that the filter is parsed as part of. Nothing else of that subscription
/// matters.
const NAME: &str = "filter-test";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FilterTestRequest<'a> {
    topic: Option<String>,
    /// Kept as text, so that numbers keep all their digits.
    #[serde(borrow)]
    filter: Option<&'a RawValue>,
    limit: Option<usize>,
}

pub(crate) async fn test(server: &Server, call: &mut ApiCall) -> Result<Answer, Problem> {
    let bytes = read_bytes(call).await?;
    let asked = FilterTest::read(server, &bytes)?;
    let Some(peers) = &server.peers else {
        return Ok(body(call, json!({ "value": asked.run(server).await? })));
    };
    // Each node has only the events that it accepted.
    let gathered = peers.ask("filter-test", bytes).await;
    let heard: PeerResponses<Vec<Value>> = peers::read("filter-test", gathered);
    let limit = asked.limit;
    let mut value: Vec<Value> = heard.answers.into_iter().flat_map(|(_, some)| some).collect();
    value.sort_by_cached_key(|one| std::cmp::Reverse(one["at"].as_str().map(str::to_owned)));
    value.truncate(limit);
    let mut shown = json!({ "value": value });
    note_missing(&mut shown, heard.missing);
    Ok(body(call, shown))
}

/// Applies the filter to the events that this node has recorded.
pub(crate) async fn test_local_events(server: &Server, body: &[u8]) -> Result<Vec<Value>, String> {
    let detail = |problem: Problem| problem.detail;
    let asked = FilterTest::read(server, body).map_err(detail)?;
    asked.run(server).await.map_err(detail)
}

/// A filter to be tested.
struct FilterTest {
    topic: TopicId,
    subscription: Subscription,
    limit: usize,
}

impl FilterTest {
    fn read(server: &Server, bytes: &[u8]) -> Result<FilterTest, Problem> {
        let asked: FilterTestRequest<'_> = serde_json::from_slice(bytes)
            .map_err(|e| Problem::new(400, format!("the body is not as it must be: {e}")))?;
        let topic = asked.topic.as_deref();
        let topic = topic.ok_or_else(|| Problem::field("topic", "must be the name of a topic"))?;
        let entry = lookup::topic(server, topic)?;
        let limit = asked.limit.unwrap_or(LIMIT);
        if !(1..=LIMIT_MAX).contains(&limit) {
            let reason = format!("must be a number from 1 to {LIMIT_MAX}");
            return Err(Problem::field("limit", reason));
        }
        let filter = asked.filter.map_or("{}", RawValue::get);
        let context = SubscriptionContext {
            road: Road::Azure,
            name: NAME,
            topic: declare::topic_context(&entry.topic),
            limits: &server.config.resource_limits,
            now: server.engine.clock.now(),
            previous: None,
            api_version: "",
            shown: None,
        };
        Ok(FilterTest {
            topic: entry.topic.id,
            subscription: read_filter(filter, &context)?,
            limit,
        })
    }

    async fn run(self, server: &Server) -> Result<Vec<Value>, Problem> {
        let bytes_max = server
            .config
            .filter_bytes_max
            .saturating_mul(FILTER_REQUEST_EVENTS);
        let turn = server.filter_turns.take(self.topic).await;
        let limit = self.limit;
        let judged = ask(server, move |recordings| {
            // Held until the evaluation has ended, even if the client goes away.
            let _turn = turn;
            let recent = recordings.recent(Some(self.topic), self.limit);
            self.judge_all(&recent, bytes_max)
        })
        .await?;
        judged.map_err(|FilterBudgetExceeded| {
            let reason = format!(
                "filter: evaluating it for the latest {limit} events would look at more than {bytes_max} bytes \
                 (four times limits.filter_bytes_per_event_max); ask for fewer with `limit`, or simplify the filter"
            );
            Problem {
                field: Some("filter"),
                ..Problem::new(413, reason)
            }
        })
    }

    /// Evaluates the filter within the byte budget of one publish request, for all events together.
    fn judge_all(&self, recent: &[RecentEvent], bytes_max: u64) -> Result<Vec<Value>, FilterBudgetExceeded> {
        let mut budget = FilterBudget::bytes(bytes_max);
        let judged = recent
            .iter()
            .map(|one| judge(&self.subscription, one, &mut budget));
        judged.filter_map(Result::transpose).collect()
    }
}

/// Parses the filter as part of an otherwise empty subscription, by the rules for new
/// subscriptions.
fn read_filter(text: &str, context: &SubscriptionContext<'_>) -> Result<Subscription, Problem> {
    let destination = r#"{"endpointType":"WebHook","properties":{"endpointUrl":"https://localhost/"}}"#;
    let whole = format!(r#"{{"properties":{{"destination":{destination},"filter":{text}}}}}"#);
    let spec = read_body(whole.as_bytes()).and_then(|raw: RawJson<'_>| parse_subscription(raw, context));
    let spec = spec.map_err(|e: FieldError| {
        let path = e.path.strip_prefix("properties.").unwrap_or(&e.path);
        Problem {
            field: Some("filter"),
            path: Some(path.to_owned()),
            ..Problem::new(400, format!("{path}: {}", e.reason))
        }
    })?;
    Ok(spec.into_subscription(SubscriptionId(0), TopicId(0), None, Timestamp::MIN))
}

/// None for an event that cannot be parsed. No recorder keeps such an event.
fn judge(
    subscription: &Subscription,
    recent: &RecentEvent,
    budget: &mut FilterBudget,
) -> Result<Option<Value>, FilterBudgetExceeded> {
    let RecentEvent {
        audience,
        batch,
        index,
    } = recent;
    let Ok(object) = RawJson::parse(batch.object(*index)) else {
        return Ok(None);
    };
    let event = EventEnvelope::read(batch.schema, object, audience.mapping.as_ref());
    let text = |field: Option<EnvelopeField<'_>>| {
        field
            .and_then(EnvelopeField::scalar_text)
            .unwrap_or_default()
            .into_owned()
    };
    // Delivered events of a domain name the topic inside the domain.
    let inside = audience
        .domain
        .then(|| event.topic.and_then(|raw| raw.as_str()))
        .flatten();
    let topic = match inside {
        Some(name) => format!("{}/topics/{name}", audience.full_id),
        None => audience.full_id.clone(),
    };
    let filter: &EventFilter = &subscription.filter;
    let mut input = FilterInput::new(&event, &topic, *budget);
    let mismatch = filter.first_mismatch(&mut input)?.map(RoutingVerdict::from);
    *budget = input.budget_left();
    let mut shown = json!({
        "id": text(event.id_field()),
        "type": text(event.event_type_field()),
        "subject": text(event.subject_field()),
        "at": batch.received.to_string(),
        "matched": mismatch.is_none(),
    });
    if let Some(verdict) = mismatch {
        let text = verdict.text(subscription);
        shown["predicate"] = predicate(&UnmetPredicate { verdict, text });
    }
    Ok(Some(shown))
}
