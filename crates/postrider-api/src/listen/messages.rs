//! JSON bodies of `listen`: the request that opens a session, and the answers that sessions post.

use super::{EXPIRES_AFTER, HOST, failed, header_map};
use crate::own_api::Problem;
use crate::{Server, declare, lookup};
use postrider_core::ids::SubscriptionId;
use postrider_core::json::RawJson;
use postrider_core::subscription::{Subscription, TopicKind};
use postrider_engine::deliver::{DeliveryAnswer, DeliveryReply};
use postrider_wire::resources::{FieldError, Road, SubscriptionContext, parse_subscription, read_body};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::HashMap;

/// Label that distinguishes listen sessions from other subscriptions in lists.
const LABEL: &str = "postrider-listen";

/// Body of a listen request. Members are kept as text where the parser of subscriptions judges
/// them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ListenRequest<'a> {
    #[serde(borrow)]
    topic: Option<&'a RawValue>,
    #[serde(borrow)]
    domain_topic: Option<&'a RawValue>,
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    filter: Option<&'a RawValue>,
    #[serde(borrow)]
    schema: Option<&'a RawValue>,
    #[serde(borrow)]
    max_events_per_batch: Option<&'a RawValue>,
    #[serde(borrow)]
    preferred_batch_size_in_kilobytes: Option<&'a RawValue>,
    #[serde(borrow)]
    retry_policy: Option<&'a RawValue>,
    #[serde(borrow)]
    dead_letter_destination: Option<&'a RawValue>,
    #[serde(borrow)]
    profile: Option<&'a RawValue>,
}

impl<'a> ListenRequest<'a> {
    pub fn read(body: &'a [u8]) -> Result<ListenRequest<'a>, Problem> {
        // serde would read a JSON array as an object whose members have no names.
        let is_object = body.trim_ascii_start().first() == Some(&b'{');
        if !is_object {
            return Err(Problem::new(400, "the body must be a JSON object"));
        }
        serde_json::from_slice(body)
            .map_err(|e| Problem::new(400, format!("the body is not as it must be: {e}")))
    }

    /// The subscription of the session, validated by the rules for all subscriptions.
    pub async fn subscription(
        &self,
        server: &Server,
        token: &str,
        caller: &str,
    ) -> Result<Subscription, Problem> {
        let topic = text("topic", self.topic)?;
        let topic = topic.ok_or_else(|| Problem::field("topic", "must be the name of a topic"))?;
        let entry = lookup::topic(server, &topic)?;
        let domain_topic = text("domainTopic", self.domain_topic)?;
        let is_domain = matches!(entry.topic.kind, TopicKind::Domain { .. });
        if domain_topic.is_some() && !is_domain {
            let reason = format!("{} is no domain: it has no topics inside it", entry.topic.name);
            return Err(Problem::field("domainTopic", reason));
        }
        let name = text("name", self.name)?;
        let name = name.unwrap_or_else(|| format!("listen-{}", &token[..8]));
        let now = server.engine.clock.now();
        let context = SubscriptionContext {
            road: Road::Azure,
            name: &name,
            topic: declare::topic_context(&entry.topic),
            limits: &server.config.resource_limits,
            now,
            previous: None,
            api_version: "",
            shown: None,
        };
        let whole = self.resource(token);
        let spec = read_body(whole.as_bytes()).and_then(|raw: RawJson<'_>| parse_subscription(raw, &context));
        let mut spec = spec.map_err(refused)?;
        spec.expires = Some(now + EXPIRES_AFTER);
        spec.labels = vec![LABEL.to_owned(), caller.to_owned()];
        declare::check_listener(server, &spec).await.map_err(refused)?;
        let id = server.engine.next_id().await;
        let id = id.map_err(|e| Problem::new(503, e.to_string()))?;
        Ok(spec.into_subscription(SubscriptionId(id), entry.topic.id, domain_topic, now))
    }

    /// The body with which the management API would create the subscription.
    fn resource(&self, token: &str) -> String {
        let members = |members: &[(&str, Option<&RawValue>)]| {
            let mut text = String::new();
            for (name, value) in members {
                if let Some(value) = value {
                    text += &format!(r#","{name}":{value}"#);
                }
            }
            text
        };
        let batches = members(&[
            ("maxEventsPerBatch", self.max_events_per_batch),
            (
                "preferredBatchSizeInKilobytes",
                self.preferred_batch_size_in_kilobytes,
            ),
        ]);
        let others = members(&[
            ("filter", self.filter),
            ("eventDeliverySchema", self.schema),
            ("retryPolicy", self.retry_policy),
            ("deadLetterDestination", self.dead_letter_destination),
        ]);
        let ours = self
            .profile
            .map(|profile| format!(r#","postrider":{{"profile":{profile}}}"#));
        let ours = ours.unwrap_or_default();
        let hook = format!(r#""endpointUrl":"https://{HOST}/{token}"{batches}"#);
        let hook = format!(r#"{{"endpointType":"WebHook","properties":{{{hook}}}}}"#);
        format!(r#"{{"properties":{{"destination":{hook}{others}{ours}}}}}"#)
    }
}

/// A member that is a string, if present.
fn text(field: &'static str, value: Option<&RawValue>) -> Result<Option<String>, Problem> {
    let read = value.map(|value| serde_json::from_str::<Option<String>>(value.get()));
    let read = read
        .transpose()
        .map_err(|_| Problem::field(field, "must be a string"))?;
    Ok(read.flatten())
}

/// Rewrites the path of an error to the members of the listen request, which are in other places
/// than those of a subscription.
fn refused(error: FieldError) -> Problem {
    let path = error.path.strip_prefix("properties.").unwrap_or(&error.path);
    let path = path.strip_prefix("destination.properties.").unwrap_or(path);
    let path = match path {
        "eventDeliverySchema" => "schema",
        "postrider.profile" => "profile",
        other => other,
    };
    Problem {
        path: Some(path.to_owned()),
        ..Problem::new(400, format!("{path}: {}", error.reason))
    }
}

/// `{"status": 200, "headers": {…}, "body": "…"}`, or `{"failure": "…"}` if the client got no
/// answer either.
pub fn read_reply(body: &[u8]) -> Result<DeliveryReply, Problem> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct ListenReplyBody {
        status: Option<Value>,
        headers: Option<Value>,
        body: Option<Value>,
        failure: Option<Value>,
    }
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(Problem::new(400, "the body must be a JSON object"));
    }
    let given: ListenReplyBody = serde_json::from_slice(body)
        .map_err(|e| Problem::new(400, format!("the body is not as it must be: {e}")))?;
    let status = match (given.status, given.failure) {
        (Some(status), None) => status,
        (None, Some(Value::String(failure))) if given.headers.is_none() && given.body.is_none() => {
            return Ok(failed(format!("the listener says: {failure}")));
        }
        (None, Some(Value::String(_))) => {
            return Err(Problem::field("failure", "leaves no headers and no body"));
        }
        (None, Some(_)) => return Err(Problem::field("failure", "must be a string")),
        _ => {
            return Err(Problem::field(
                "status",
                "or else failure is required, and not both",
            ));
        }
    };
    let number = status.as_u64().filter(|status| (200..600).contains(status));
    let number = number.ok_or_else(|| Problem::field("status", "must be a number from 200 to 599"))?;
    let headers: HashMap<String, String> = match given.headers {
        None => HashMap::new(),
        Some(headers) => serde_json::from_value(headers)
            .map_err(|_| Problem::field("headers", "must be an object whose values are strings"))?,
    };
    let headers = header_map(&headers).map_err(|reason| Problem::field("headers", reason))?;
    let body = match given.body {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(_) => return Err(Problem::field("body", "must be a string")),
    };
    Ok(DeliveryReply::Answered(DeliveryAnswer {
        status: u16::try_from(number).unwrap_or_default(),
        headers,
        body: body.into(),
        ..DeliveryAnswer::default()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<DeliveryReply, String> {
        read_reply(body.to_string().as_bytes()).map_err(|problem| problem.detail)
    }

    #[test]
    fn a_listener_answers_for_the_webhook() {
        let Ok(DeliveryReply::Answered(answer)) = read(json!({
            "status": 503, "headers": {"retry-after": "7"}, "body": "later"
        })) else {
            panic!("it is an answer");
        };
        assert_eq!(answer.status, 503);
        assert_eq!(answer.headers["retry-after"], "7");
        assert_eq!(answer.body, "later");
        assert_eq!(
            read(json!({"failure": "connection refused"})),
            Ok(failed("the listener says: connection refused"))
        );
    }

    #[test]
    fn other_answers_are_refused_by_name() {
        let check = |body: Value, expected: &str| {
            let detail = read(body.clone()).unwrap_err();
            assert!(detail.starts_with(expected), "{body}: {detail}");
        };
        check(json!({}), "status: or else failure is required");
        check(json!({"status": 200, "failure": "x"}), "status: or else");
        check(json!({"status": "200"}), "status: must be a number");
        check(json!({"status": 100}), "status: must be a number from 200 to 599");
        check(json!({"status": 600}), "status: must be a number from 200 to 599");
        check(json!({"failure": 1}), "failure: must be a string");
        check(json!({"failure": "x", "body": "y"}), "failure: leaves no");
        check(json!({"status": 200, "body": {}}), "body: must be a string");
        check(
            json!({"status": 200, "headers": ["a"]}),
            "headers: must be an object",
        );
        check(
            json!({"status": 200, "headers": {"a b": "c"}}),
            "headers: \"a b\" is not",
        );
        check(
            json!({"status": 200, "headers": {"a": "b\nc"}}),
            "headers: the value of \"a\"",
        );
        check(
            json!({"state": 200}),
            "the body is not as it must be: unknown field `state`",
        );
        check(json!([200]), "the body must be a JSON object");
    }
}
