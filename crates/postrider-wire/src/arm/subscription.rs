//! Event subscriptions as the management API shows them.
//!
//! The URL of a webhook is shown without its query and secrets are masked; separate actions return
//! both. The first answer to a PUT differs: it contains what was sent, no defaults except those of
//! the retry policy, and the secrets that were sent.

use super::{ApiVersion, Scope, lower_provider};
use crate::resources::{DestinationBody, EffectiveSettings, delivery_schema_name, show_attribute};
use postrider_core::decimal::Decimal;
use postrider_core::filter::{EventFilter, FilterCondition, FilterOperands};
use postrider_core::json::RawJson;
use postrider_core::subscription::{Destination, ResourceIdentity, Subscription};
use postrider_core::time::Timestamp;
use serde_json::{Map, Number, Value, json};

/// Progress of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProvisioningState {
    Creating,
    Updating,
    AwaitingManualAction,
    Succeeded,
}

impl ProvisioningState {
    pub fn name(self) -> &'static str {
        match self {
            ProvisioningState::Creating => "Creating",
            ProvisioningState::Updating => "Updating",
            ProvisioningState::AwaitingManualAction => "AwaitingManualAction",
            ProvisioningState::Succeeded => "Succeeded",
        }
    }
}

/// A subscription, and the form in which it was requested.
#[derive(Clone, Copy, Debug)]
pub struct SubscriptionView<'a> {
    pub subscription: &'a Subscription,
    pub state: ProvisioningState,
    pub scope: &'a Scope,
    /// The whole id of the resource that it belongs to, in the casing of its creation.
    pub scope_id: &'a str,
    /// Whether it was requested below its resource (`…/topics/t/eventSubscriptions/s`), not as an
    /// extension of it.
    pub nested: bool,
    pub api_version: &'a ApiVersion,
    pub shown: EffectiveSettings,
}

/// Members that a PUT contained explicitly, for values that the model does not distinguish from
/// defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentMembers {
    pub delivery_schema: bool,
    pub filter: bool,
}

impl SentMembers {
    /// Reads the members from the body of the PUT.
    pub fn of(body: RawJson<'_>) -> SentMembers {
        let properties = body.get_any_case("properties");
        let has = |name: &str| {
            let member = properties.and_then(|properties| properties.get_any_case(name));
            member.is_some_and(|member| !member.is_null())
        };
        SentMembers {
            delivery_schema: has("eventDeliverySchema"),
            filter: has("filter"),
        }
    }
}

/// The type segments between the provider and `eventSubscriptions`.
fn nesting(scope: &Scope) -> Option<&'static str> {
    match scope {
        Scope::Topic(_) => Some("topics"),
        Scope::Domain(_) => Some("domains"),
        Scope::DomainTopic { .. } => Some("domains/topics"),
        Scope::SystemTopic(_) => Some("systemTopics"),
        Scope::Account | Scope::Group(_) | Scope::Resource(_) => None,
    }
}

impl SubscriptionView<'_> {
    pub fn id(&self) -> String {
        let name = &self.subscription.name;
        match self.nested {
            true => format!("{}/eventSubscriptions/{name}", self.scope_id),
            false => format!(
                "{}/providers/Microsoft.EventGrid/eventSubscriptions/{name}",
                self.scope_id
            ),
        }
    }

    fn kind(&self) -> String {
        match nesting(self.scope).filter(|_| self.nested) {
            Some(nesting) => format!("Microsoft.EventGrid/{nesting}/eventSubscriptions"),
            None => "Microsoft.EventGrid/eventSubscriptions".into(),
        }
    }

    /// The body of a read: with defaults, without secrets.
    pub fn body(&self) -> Value {
        self.show(None)
    }

    /// The body of the first answer to a PUT.
    pub fn first_answer(&self, sent: SentMembers) -> Value {
        self.show(Some(sent))
    }

    fn show(&self, sent: Option<SentMembers>) -> Value {
        let subscription = self.subscription;
        let mut properties = Map::new();
        let mut put = |name: &str, value: Value| properties.insert(name.into(), value);
        put("topic", self.topic().into());
        put("provisioningState", self.state.name().into());
        let destination = self.destination(sent.is_some());
        match &subscription.identity {
            Some(identity) => {
                put("destination", Value::Null);
                let with = json!({"identity": identity_body(identity), "destination": destination});
                put("deliveryWithResourceIdentity", with);
            }
            None => drop(put("destination", destination)),
        }
        let filter = filter_body(&subscription.filter, sent.is_none());
        let filter_empty = filter.as_object().is_some_and(Map::is_empty);
        if sent.is_none_or(|sent| sent.filter) || !filter_empty {
            put("filter", filter);
        }
        let labels = &subscription.labels;
        put(
            "labels",
            if labels.is_empty() {
                Value::Null
            } else {
                json!(labels)
            },
        );
        if let Some(expires) = subscription.expires {
            put("expirationTimeUtc", time(expires).into());
        }
        if sent.is_none_or(|sent| sent.delivery_schema) {
            let name = delivery_schema_name(subscription.delivery_schema);
            put("eventDeliverySchema", name.into());
        }
        put("retryPolicy", self.retry_policy());
        if let Some(place) = &subscription.dead_letter {
            let members = json!({"resourceId": place.account, "blobContainerName": place.container});
            let place = json!({"endpointType": "StorageBlob", "properties": members});
            match &subscription.dead_letter_identity {
                Some(identity) => {
                    let with = json!({"identity": identity_body(identity), "deadLetterDestination": place});
                    put("deadLetterWithResourceIdentity", with);
                }
                None => drop(put("deadLetterDestination", place)),
            }
        }
        if let Some(profile) = &subscription.profile {
            put("postrider", json!({ "profile": profile }));
        }
        json!({
            "id": self.id(),
            "name": subscription.name,
            "type": self.kind(),
            "systemData": null,
            "properties": properties,
        })
    }

    /// The id of the resource that the subscription belongs to, with provider and types in lower
    /// case except for a system topic.
    fn topic(&self) -> String {
        match self.scope {
            Scope::SystemTopic(_) => self.scope_id.to_owned(),
            _ => lower_provider(self.scope_id),
        }
    }

    fn destination(&self, first: bool) -> Value {
        let destination = &self.subscription.destination;
        let mut body = DestinationBody::of(destination);
        if !first {
            body = body.with_batch_limits(destination, self.shown.batch);
        }
        let DestinationBody {
            endpoint_type,
            mut properties,
        } = body;
        if let Destination::WebHook(hook) = destination {
            let url = hook.url.expose();
            let base = url.split_once('?').map_or(url, |(base, _)| base);
            properties.insert("endpointUrl".into(), Value::Null);
            properties.insert("endpointBaseUrl".into(), base.into());
        }
        if first && !destination.attributes().is_empty() {
            properties.insert("deliveryAttributeMappings".into(), attributes(destination));
        }
        let extras = self.subscription.extras.as_deref();
        let version = "minimumTlsVersionAllowed";
        let kept = extras.and_then(|text| {
            RawJson::parse(text)
                .ok()?
                .get(version)?
                .as_str()
                .map(String::from)
        });
        if let Some(kept) = kept.filter(|_| self.api_version.has_minimum_tls()) {
            properties.insert(version.into(), kept.into());
        }
        json!({"endpointType": endpoint_type, "properties": properties})
    }

    /// The retry policy, with defaults in the first answer too.
    fn retry_policy(&self) -> Value {
        let mut policy = json!({"maxDeliveryAttempts": self.shown.attempts_max});
        if let Some(minutes) = self.shown.time_to_live_minutes {
            policy["eventTimeToLiveInMinutes"] = minutes.into();
        }
        policy
    }
}

/// The answer to `getDeliveryAttributes`, with all secrets.
pub fn delivery_attributes(destination: &Destination) -> Value {
    json!({ "value": attributes(destination) })
}

fn attributes(destination: &Destination) -> Value {
    let shown = destination.attributes().iter();
    shown.map(|attribute| show_attribute(attribute, true)).collect()
}

/// The answer to `getFullUrl`; none if the destination has no URL of its own.
pub fn full_url(destination: &Destination) -> Option<Value> {
    match destination {
        Destination::WebHook(hook) => Some(json!({"endpointUrl": hook.url.expose()})),
        Destination::EventGrid { url, .. } => Some(json!({ "endpointUrl": url })),
        _ => None,
    }
}

/// A time without a fraction when that is zero, as times are usually written.
fn time(at: Timestamp) -> String {
    let text = at.to_string();
    text.replace(".0000000Z", "Z")
}

fn identity_body(identity: &ResourceIdentity) -> Value {
    let mut body = json!({"type": identity.kind});
    if let Some(user_assigned) = &identity.user_assigned {
        body["userAssignedIdentity"] = json!(user_assigned);
    }
    body
}

fn filter_body(filter: &EventFilter, whole: bool) -> Value {
    let mut body = Map::new();
    let mut put = |name: &str, value: Value| drop(body.insert(name.into(), value));
    let subjects = [
        ("subjectBeginsWith", &filter.subject_begins_with),
        ("subjectEndsWith", &filter.subject_ends_with),
    ];
    for (name, text) in subjects {
        match text {
            Some(text) => put(name, text.clone().into()),
            None if whole => put(name, "".into()),
            None => {}
        }
    }
    if let Some(types) = &filter.included_event_types {
        put("includedEventTypes", json!(types));
    }
    if filter.subject_case_sensitive {
        put("isSubjectCaseSensitive", true.into());
    }
    if filter.arrays {
        put("enableAdvancedFilteringOnArrays", true.into());
    }
    if !filter.advanced.is_empty() {
        let advanced = filter.advanced.iter().map(|filter| {
            let mut entry = json!({"operatorType": filter.test.operator(), "key": filter.key});
            match operand(&filter.test) {
                Some(values @ Value::Array(_)) => entry["values"] = values,
                Some(value) => entry["value"] = value,
                None => {}
            }
            entry
        });
        put("advancedFilters", advanced.collect());
    }
    Value::Object(body)
}

fn operand(test: &FilterCondition) -> Option<Value> {
    match test.operands() {
        FilterOperands::Numbers(values) => Some(values.iter().map(number).collect()),
        FilterOperands::Number(value) => Some(number(value)),
        FilterOperands::Ranges(ranges) => {
            let range = |(from, to): &(Decimal, Decimal)| json!([number(from), number(to)]);
            Some(ranges.iter().map(range).collect())
        }
        FilterOperands::Bool(value) => Some(json!(value)),
        FilterOperands::Strings(values) => Some(json!(values)),
        FilterOperands::Nothing => None,
    }
}

/// The cloud shows every number as a 64-bit float; a number outside its range is shown as the
/// greatest float.
fn number(value: &Decimal) -> Value {
    let float: f64 = value
        .to_string()
        .parse()
        .expect("decimals are written as numbers");
    let float = float.clamp(f64::MIN, f64::MAX);
    Number::from_f64(float).expect("it is finite").into()
}

#[cfg(test)]
mod tests;
