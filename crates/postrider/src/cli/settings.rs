//! Settings of a subscription as flags, and their form in a request body.

use super::UsageError;
use super::args::{NameValueArg, SchemaArg, object};
use super::ids::ResourceIds;
use crate::config::nearest;
use anyhow::{Context, Result, bail, ensure};
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches};
use postrider_core::time::Timestamp;
use serde_json::{Map, Number, Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "lower")]
pub enum EndpointType {
    WebHook,
    StorageQueue,
    EventHub,
    ServiceBusQueue,
    ServiceBusTopic,
    AzureFunction,
    HybridConnection,
}

impl EndpointType {
    fn name(self) -> &'static str {
        match self {
            EndpointType::WebHook => "WebHook",
            EndpointType::StorageQueue => "StorageQueue",
            EndpointType::EventHub => "EventHub",
            EndpointType::ServiceBusQueue => "ServiceBusQueue",
            EndpointType::ServiceBusTopic => "ServiceBusTopic",
            EndpointType::AzureFunction => "AzureFunction",
            EndpointType::HybridConnection => "HybridConnection",
        }
    }

    fn named(name: &str) -> Option<EndpointType> {
        use clap::ValueEnum;
        EndpointType::from_str(name, true).ok()
    }
}

/// Settings that can be removed from a subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ClearSubscriptionSetting {
    EventTypes,
    Subject,
    AdvancedFilters,
    Headers,
    DeadLetter,
    Labels,
    Expires,
    Profile,
}

#[derive(Clone, Debug, Default, PartialEq, Args)]
pub struct SubscriptionSettings {
    /// Destination: a URL, a resource id, ACCOUNT/QUEUE or NAMESPACE/NAME
    #[arg(long, value_name = "URL|ID", help_heading = "Destination")]
    endpoint: Option<String>,
    /// Type of the endpoint [default: webhook]
    #[arg(long, value_name = "TYPE", ignore_case = true, help_heading = "Destination")]
    endpoint_type: Option<EndpointType>,
    /// Deliver up to this many events in one request, 1 to 5000
    #[arg(long, value_name = "N", help_heading = "Destination")]
    max_events_per_batch: Option<u32>,
    /// Preferred size of a batch, in kilobytes, 1 to 1024
    #[arg(
        long,
        value_name = "KB",
        visible_alias = "preferred-batch-size-in-kilobytes",
        help_heading = "Destination"
    )]
    preferred_batch_size_kb: Option<u32>,
    /// A header of every delivery
    #[arg(long, value_name = "NAME=VALUE", help_heading = "Destination")]
    header: Vec<NameValueArg>,
    /// A header of every delivery whose value is never shown again
    #[arg(long, value_name = "NAME=VALUE", help_heading = "Destination")]
    secret_header: Vec<NameValueArg>,
    /// A header with a value taken from the event
    #[arg(long, value_name = "NAME=data.path", help_heading = "Destination")]
    dynamic_header: Vec<NameValueArg>,
    /// Time to live of messages in the storage queue: seconds, or a duration such as 2h
    #[arg(long, value_name = "SECONDS", help_heading = "Destination")]
    queue_message_ttl: Option<String>,
    /// The Entra tenant whose tokens protect the webhook
    #[arg(long, value_name = "TENANT", help_heading = "Destination")]
    aad_tenant: Option<String>,
    /// The Entra application, by id or URI
    #[arg(long, value_name = "APPLICATION", help_heading = "Destination")]
    aad_application: Option<String>,
    /// Schema in which events are delivered
    #[arg(long, value_name = "SCHEMA", ignore_case = true, help_heading = "Destination")]
    delivery_schema: Option<SchemaArg>,

    #[command(flatten)]
    filter: FilterSettings,
    #[command(flatten)]
    retry: RetrySettings,

    /// A label; may be repeated
    #[arg(long = "label", value_name = "TEXT")]
    labels: Vec<String>,
    /// When the subscription ends: 2030-01-01T00:00:00Z, or this long from now, such as 30d
    #[arg(long, value_name = "TIME")]
    expires: Option<String>,
}

/// Filter of a subscription.
#[derive(Clone, Debug, Default, PartialEq, Args)]
pub struct FilterSettings {
    /// Only events of this type; may be repeated
    #[arg(long = "event-type", value_name = "TYPE", visible_aliases = ["included-event-types", "type"], num_args = 1..,
          help_heading = "Filter")]
    event_types: Vec<String>,
    /// Only events whose subject begins with this text
    #[arg(long, value_name = "TEXT", help_heading = "Filter")]
    subject_begins_with: Option<String>,
    /// Only events whose subject ends with this text
    #[arg(long, value_name = "TEXT", help_heading = "Filter")]
    subject_ends_with: Option<String>,
    /// Whether subjects compare case-sensitively
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true", help_heading = "Filter")]
    subject_case_sensitive: Option<bool>,
    /// Whether advanced filters evaluate arrays
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true", help_heading = "Filter")]
    advanced_filtering_on_arrays: Option<bool>,
    #[command(flatten)]
    advanced: AdvancedFilters,
}

/// Retry policy and dead-letter destination.
#[derive(Clone, Debug, Default, PartialEq, Args)]
pub struct RetrySettings {
    /// Give up after this many attempts, 1 to 30
    #[arg(long, value_name = "N", help_heading = "Retry and dead letters")]
    max_delivery_attempts: Option<u32>,
    /// Give up after this time: minutes, or a duration such as 2h; at most a day
    #[arg(long, value_name = "MINUTES", help_heading = "Retry and dead letters")]
    event_ttl: Option<String>,
    /// Dead-letter destination: ACCOUNT/CONTAINER, or a resource id
    #[arg(long, value_name = "PLACE", help_heading = "Retry and dead letters")]
    dead_letter: Option<String>,
    /// Event Grid to behave like: "postrider profiles" lists them
    #[arg(long, value_name = "NAME", help_heading = "Retry and dead letters")]
    profile: Option<String>,
}

/// `--advanced-filter KEY OPERATOR VALUES…`, one item for each use.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdvancedFilters(Vec<Vec<String>>);

const ADVANCED: &str = "advanced_filter";

impl Args for AdvancedFilters {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.arg(
            Arg::new(ADVANCED)
                .long("advanced-filter")
                .value_names(["KEY", "OPERATOR", "VALUE"])
                .num_args(2..)
                .action(ArgAction::Append)
                .allow_negative_numbers(true)
                .help_heading("Filter")
                .help("Only events with such a value: data.color StringIn blue green; ranges are 1,10 or [-1,1]; may be repeated"),
        )
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for AdvancedFilters {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = matches.get_occurrences::<String>(ADVANCED).into_iter().flatten();
        Ok(AdvancedFilters(
            given.map(|values| values.cloned().collect()).collect(),
        ))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Context in which names and times in flags are resolved.
pub struct FlagContext<'a> {
    pub ids: &'a ResourceIds,
    /// Group of resources that are named without one.
    pub group: &'a str,
    pub now: Timestamp,
}

impl SubscriptionSettings {
    pub fn is_empty(&self) -> bool {
        *self == SubscriptionSettings::default()
    }

    /// Puts the given settings into a subscription's properties; other properties stay as they are.
    pub fn put_into(&self, properties: &mut Map<String, Value>, meaning: &FlagContext<'_>) -> Result<()> {
        self.put_destination(properties, meaning)?;
        self.filter.put_into(properties)?;
        self.retry.put_into(properties, meaning)?;
        let plain = [
            (
                "eventDeliverySchema",
                self.delivery_schema.map(|schema| json!(schema.delivery_name())),
            ),
            ("labels", (!self.labels.is_empty()).then(|| json!(self.labels))),
            (
                "expirationTimeUtc",
                self.expires
                    .as_deref()
                    .map(|text| time(text, meaning.now))
                    .transpose()?,
            ),
        ];
        for (name, value) in plain {
            properties.extend(value.map(|value| (name.to_owned(), value)));
        }
        Ok(())
    }

    fn put_destination(&self, properties: &mut Map<String, Value>, meaning: &FlagContext<'_>) -> Result<()> {
        if let Some(endpoint) = &self.endpoint {
            let destination = self.destination(endpoint, meaning)?;
            // A destination with a managed identity keeps the identity when the endpoint changes.
            match properties.get_mut("deliveryWithResourceIdentity") {
                Some(Value::Object(with_identity)) => {
                    with_identity.insert("destination".into(), destination);
                }
                _ => {
                    properties.insert("destination".into(), destination);
                }
            }
        }
        let within = self.within_destination()?;
        if within.is_empty() {
            return match (self.endpoint_type, &self.endpoint) {
                (Some(_), None) => Err(UsageError::new("--endpoint-type needs --endpoint").into()),
                _ => Ok(()),
            };
        }
        let Some(destination) = super::normalize::destination_mut(properties) else {
            return Err(UsageError::new("where do events go? Give --endpoint").into());
        };
        let kind = destination["endpointType"].as_str().and_then(EndpointType::named);
        for (name, value) in within {
            check_property(kind, name)?;
            object(destination, "properties").insert(name.to_owned(), value);
        }
        Ok(())
    }

    fn destination(&self, endpoint: &str, meaning: &FlagContext<'_>) -> Result<Value> {
        let kind = self.endpoint_type.unwrap_or(EndpointType::WebHook);
        let (ids, group) = (meaning.ids, meaning.group);
        let broker = |provider: &str, kind: &str| {
            let id = ids
                .in_namespace(endpoint, group, provider, kind)
                .context("--endpoint")?;
            Ok::<_, anyhow::Error>(json!({ "resourceId": id }))
        };
        let properties = match kind {
            EndpointType::WebHook => json!({ "endpointUrl": endpoint }),
            EndpointType::AzureFunction => json!({ "resourceId": endpoint }),
            EndpointType::StorageQueue => {
                let (account, queue) = ids.queue(endpoint, group).context("--endpoint")?;
                json!({"resourceId": account, "queueName": queue})
            }
            EndpointType::EventHub => broker("Microsoft.EventHub", "eventhubs")?,
            EndpointType::ServiceBusQueue => broker("Microsoft.ServiceBus", "queues")?,
            EndpointType::ServiceBusTopic => broker("Microsoft.ServiceBus", "topics")?,
            EndpointType::HybridConnection => broker("Microsoft.Relay", "hybridConnections")?,
        };
        Ok(json!({"endpointType": kind.name(), "properties": properties}))
    }

    /// Properties of the destination other than the endpoint itself.
    fn within_destination(&self) -> Result<Vec<(&'static str, Value)>> {
        let mut found = Vec::new();
        let mut put = |name, value: Option<Value>| found.extend(value.map(|value| (name, value)));
        put(
            "maxEventsPerBatch",
            self.max_events_per_batch.map(|number| json!(number)),
        );
        put(
            "preferredBatchSizeInKilobytes",
            self.preferred_batch_size_kb.map(|number| json!(number)),
        );
        put(
            "azureActiveDirectoryTenantId",
            self.aad_tenant.as_ref().map(|id| json!(id)),
        );
        put(
            "azureActiveDirectoryApplicationIdOrUri",
            self.aad_application.as_ref().map(|id| json!(id)),
        );
        put(
            "queueMessageTimeToLiveInSeconds",
            self.queue_message_ttl.as_deref().map(seconds).transpose()?,
        );
        let fixed = |secret: bool| {
            move |pair: &NameValueArg| {
                json!({"name": pair.name, "type": "Static",
                       "properties": {"value": pair.value, "isSecret": secret}})
            }
        };
        let dynamic = |pair: &NameValueArg| json!({"name": pair.name, "type": "Dynamic", "properties": {"sourceField": pair.value}});
        let mappings: Vec<Value> = self
            .header
            .iter()
            .map(fixed(false))
            .chain(self.secret_header.iter().map(fixed(true)))
            .chain(self.dynamic_header.iter().map(dynamic))
            .collect();
        put(
            "deliveryAttributeMappings",
            (!mappings.is_empty()).then_some(Value::Array(mappings)),
        );
        Ok(found)
    }
}

impl RetrySettings {
    pub fn put_into(&self, properties: &mut Map<String, Value>, meaning: &FlagContext<'_>) -> Result<()> {
        let retry = [
            (
                "maxDeliveryAttempts",
                self.max_delivery_attempts.map(|number| json!(number)),
            ),
            (
                "eventTimeToLiveInMinutes",
                self.event_ttl.as_deref().map(minutes).transpose()?,
            ),
        ];
        put_some(properties, "retryPolicy", retry);
        if let Some(place) = &self.dead_letter {
            let (account, container) = meaning
                .ids
                .container(place, meaning.group)
                .context("--dead-letter")?;
            let place = json!({"resourceId": account, "blobContainerName": container});
            properties.remove("deadLetterWithResourceIdentity");
            properties.insert(
                "deadLetterDestination".into(),
                json!({"endpointType": "StorageBlob", "properties": place}),
            );
        }
        put_some(
            properties,
            "postrider",
            [("profile", self.profile.as_ref().map(|name| json!(name)))],
        );
        Ok(())
    }
}

impl FilterSettings {
    pub fn put_into(&self, properties: &mut Map<String, Value>) -> Result<()> {
        let advanced: Vec<Value> = self
            .advanced
            .0
            .iter()
            .map(|words| advanced(words))
            .collect::<Result<_>>()?;
        let text = |text: &Option<String>| text.as_ref().map(|text| json!(text));
        let flag = |flag: Option<bool>| flag.map(|flag| json!(flag));
        let members = [
            (
                "includedEventTypes",
                (!self.event_types.is_empty()).then(|| json!(self.event_types)),
            ),
            ("subjectBeginsWith", text(&self.subject_begins_with)),
            ("subjectEndsWith", text(&self.subject_ends_with)),
            ("isSubjectCaseSensitive", flag(self.subject_case_sensitive)),
            (
                "enableAdvancedFilteringOnArrays",
                flag(self.advanced_filtering_on_arrays),
            ),
            (
                "advancedFilters",
                (!advanced.is_empty()).then_some(Value::Array(advanced)),
            ),
        ];
        put_some(properties, "filter", members);
        Ok(())
    }
}

/// Puts members into a nested object, which is created only if there are any.
fn put_some<const N: usize>(
    properties: &mut Map<String, Value>,
    name: &str,
    members: [(&str, Option<Value>); N],
) {
    for (member, value) in members {
        if let Some(value) = value {
            let holder = properties.entry(name).or_insert_with(|| json!({}));
            if !holder.is_object() {
                *holder = json!({});
            }
            holder[member] = value;
        }
    }
}

/// Refuses a flag that does not apply to the destination.
fn check_property(kind: Option<EndpointType>, name: &str) -> Result<()> {
    use EndpointType::{AzureFunction, StorageQueue, WebHook};
    let Some(kind) = kind else { return Ok(()) };
    let fits = match name {
        "maxEventsPerBatch" | "preferredBatchSizeInKilobytes" => matches!(kind, WebHook | AzureFunction),
        "deliveryAttributeMappings" => kind != StorageQueue,
        "queueMessageTimeToLiveInSeconds" => kind == StorageQueue,
        _ => kind == WebHook,
    };
    match fits {
        true => Ok(()),
        false => Err(UsageError::new(format!("a {} has no {name}", kind.name())).into()),
    }
}

/// Removes settings.
pub fn clear(properties: &mut Map<String, Value>, what: &[ClearSubscriptionSetting]) {
    for one in what {
        let mut drop_in = |holder: &str, member: &str| {
            if let Some(Value::Object(holder)) = properties.get_mut(holder) {
                holder.remove(member);
            }
        };
        match one {
            ClearSubscriptionSetting::EventTypes => drop_in("filter", "includedEventTypes"),
            ClearSubscriptionSetting::Subject => {
                drop_in("filter", "subjectBeginsWith");
                drop_in("filter", "subjectEndsWith");
            }
            ClearSubscriptionSetting::AdvancedFilters => drop_in("filter", "advancedFilters"),
            ClearSubscriptionSetting::Profile => drop_in("postrider", "profile"),
            ClearSubscriptionSetting::Headers => {
                if let Some(destination) = super::normalize::destination_mut(properties) {
                    object(destination, "properties").remove("deliveryAttributeMappings");
                }
            }
            ClearSubscriptionSetting::DeadLetter => {
                properties.remove("deadLetterDestination");
                properties.remove("deadLetterWithResourceIdentity");
            }
            ClearSubscriptionSetting::Labels => drop(properties.remove("labels")),
            ClearSubscriptionSetting::Expires => drop(properties.remove("expirationTimeUtc")),
        }
    }
}

#[derive(Clone, Copy)]
enum FilterOperand {
    None,
    Number,
    Numbers,
    Ranges,
    Bool,
    Strings,
}

const OPERATORS: [(&str, FilterOperand); 19] = [
    ("NumberIn", FilterOperand::Numbers),
    ("NumberNotIn", FilterOperand::Numbers),
    ("NumberLessThan", FilterOperand::Number),
    ("NumberLessThanOrEquals", FilterOperand::Number),
    ("NumberGreaterThan", FilterOperand::Number),
    ("NumberGreaterThanOrEquals", FilterOperand::Number),
    ("NumberInRange", FilterOperand::Ranges),
    ("NumberNotInRange", FilterOperand::Ranges),
    ("BoolEquals", FilterOperand::Bool),
    ("StringIn", FilterOperand::Strings),
    ("StringNotIn", FilterOperand::Strings),
    ("StringBeginsWith", FilterOperand::Strings),
    ("StringNotBeginsWith", FilterOperand::Strings),
    ("StringEndsWith", FilterOperand::Strings),
    ("StringNotEndsWith", FilterOperand::Strings),
    ("StringContains", FilterOperand::Strings),
    ("StringNotContains", FilterOperand::Strings),
    ("IsNullOrUndefined", FilterOperand::None),
    ("IsNotNull", FilterOperand::None),
];

/// Builds one advanced filter from its words.
fn advanced(words: &[String]) -> Result<Value> {
    let [key, operator, values @ ..] = words else {
        bail!("--advanced-filter needs KEY OPERATOR VALUES…");
    };
    let known = OPERATORS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(operator));
    let Some((name, operand)) = known else {
        let near = nearest(operator, OPERATORS.iter().map(|(name, _)| *name));
        let hint = near
            .map(|near| format!("; did you mean {near}?"))
            .unwrap_or_default();
        return Err(UsageError::new(format!(
            "--advanced-filter: there is no operator {operator:?}{hint}"
        ))
        .into());
    };
    let mut filter = json!({"key": key, "operatorType": name});
    let refused = |what: &str| UsageError::new(format!("--advanced-filter {key} {name}: {what}"));
    let number = |text: &str| {
        let number: Option<Number> = serde_json::from_str(text.trim()).ok();
        number.ok_or_else(|| refused(&format!("{text:?} is not a number")))
    };
    let one = || match values {
        [one] => Ok(one.as_str()),
        _ => Err(refused("takes one value")),
    };
    if matches!(
        operand,
        FilterOperand::Numbers | FilterOperand::Ranges | FilterOperand::Strings
    ) && values.is_empty()
    {
        return Err(refused("needs a value").into());
    }
    match operand {
        FilterOperand::None if values.is_empty() => {}
        FilterOperand::None => return Err(refused("takes no value").into()),
        FilterOperand::Number => filter["value"] = json!(number(one()?)?),
        FilterOperand::Bool => {
            let parsed = one()?.to_ascii_lowercase().parse::<bool>();
            filter["value"] = json!(parsed.map_err(|_| refused("must be true or false"))?);
        }
        FilterOperand::Numbers => {
            let numbers: Result<Vec<_>, _> = values.iter().map(|value| number(value)).collect();
            filter["values"] = json!(numbers?);
        }
        FilterOperand::Strings => filter["values"] = json!(values),
        FilterOperand::Ranges => {
            let range = |text: &String| {
                // Ranges are in brackets so that a negative number does not look like a flag.
                let bare = text.trim_start_matches('[').trim_end_matches(']');
                let (from, to) = bare
                    .split_once(',')
                    .ok_or_else(|| refused(&format!("{text:?} is not a range such as 1,10")))?;
                Ok::<_, UsageError>([number(from)?, number(to)?])
            };
            let ranges: Result<Vec<_>, _> = values.iter().map(range).collect();
            filter["values"] = json!(ranges?);
        }
    }
    Ok(filter)
}

/// A number of minutes, or a duration that is a whole number of minutes.
fn minutes(text: &str) -> Result<Value> {
    units(text, 60, "--event-ttl", "minutes")
}

fn seconds(text: &str) -> Result<Value> {
    // `-1`: the message never expires.
    match text {
        "-1" => Ok(json!(-1)),
        _ => units(text, 1, "--queue-message-ttl", "seconds"),
    }
}

fn units(text: &str, unit: u64, flag: &str, name: &str) -> Result<Value> {
    if let Ok(number) = text.parse::<u64>() {
        return Ok(json!(number));
    }
    let duration =
        postrider_core::duration::parse(text).map_err(|e| UsageError::new(format!("{flag}: {e}")))?;
    let whole = duration.subsec_nanos() == 0 && duration.as_secs().is_multiple_of(unit);
    if !whole {
        return Err(UsageError::new(format!("{flag}: {text:?} must be a whole number of {name}")).into());
    }
    Ok(json!(duration.as_secs() / unit))
}

/// A point in time, or a duration from now.
fn time(text: &str, now: Timestamp) -> Result<Value> {
    let time = match Timestamp::parse(text) {
        Some(time) => time,
        None => match postrider_core::duration::parse(text) {
            Ok(duration) => now + duration,
            Err(_) => {
                let reason = format!(
                    "--expires: {text:?} is neither a time such as 2030-01-01T00:00:00Z nor a duration such as 30d"
                );
                return Err(UsageError::new(reason).into());
            }
        },
    };
    ensure!(
        time > now,
        UsageError::new(format!("--expires: {text:?} is not in the future"))
    );
    Ok(json!(time.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct SettingsTestFlags {
        #[command(flatten)]
        settings: SubscriptionSettings,
    }

    const NOW: Timestamp = Timestamp::from_secs(1_900_000_000); // 2030-03-17

    fn put(mut properties: Value, line: &str) -> Result<Value> {
        let words = std::iter::once("x").chain(line.split_whitespace());
        let flags = SettingsTestFlags::try_parse_from(words)?;
        let ids = ResourceIds::new("0");
        let meaning = FlagContext {
            ids: &ids,
            group: "g",
            now: NOW,
        };
        let map = properties.as_object_mut().unwrap();
        flags.settings.put_into(map, &meaning)?;
        Ok(properties)
    }

    #[track_caller]
    fn check(line: &str, expected: Value) {
        assert_eq!(put(json!({}), line).unwrap(), expected, "{line}");
    }

    #[track_caller]
    fn refused(line: &str, expected: &str) {
        let error = format!("{:#}", put(json!({}), line).unwrap_err());
        assert!(error.contains(expected), "{line}: {error}");
    }

    #[test]
    fn destinations() {
        check(
            "--endpoint https://x/y --max-events-per-batch 10 --preferred-batch-size-kb 512 \
             --header a=b --secret-header k=v=w --dynamic-header c=data.id",
            json!({"destination": {"endpointType": "WebHook", "properties": {
            "endpointUrl": "https://x/y", "maxEventsPerBatch": 10, "preferredBatchSizeInKilobytes": 512,
            "deliveryAttributeMappings": [
                {"name": "a", "type": "Static", "properties": {"value": "b", "isSecret": false}},
                {"name": "k", "type": "Static", "properties": {"value": "v=w", "isSecret": true}},
                {"name": "c", "type": "Dynamic", "properties": {"sourceField": "data.id"}},
            ]}}}),
        );
        check(
            "--endpoint acc/q --endpoint-type storagequeue --queue-message-ttl 2m",
            json!({"destination": {"endpointType": "StorageQueue", "properties": {
                "resourceId": "/subscriptions/0/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/acc",
                "queueName": "q", "queueMessageTimeToLiveInSeconds": 120}}}),
        );
        check(
            "--endpoint ns/q --endpoint-type ServiceBusQueue",
            json!({"destination": {"endpointType": "ServiceBusQueue", "properties": {"resourceId":
                "/subscriptions/0/resourceGroups/g/providers/Microsoft.ServiceBus/namespaces/ns/queues/q"}}}),
        );
        refused(
            "--endpoint ns/q --endpoint-type servicebusqueue --max-events-per-batch 2",
            "a ServiceBusQueue has no maxEventsPerBatch",
        );
        refused(
            "--endpoint acc/q --endpoint-type storagequeue --header a=b",
            "a StorageQueue has no deliveryAttributeMappings",
        );
        refused("--max-events-per-batch 2", "Give --endpoint");
        refused("--endpoint-type webhook", "needs --endpoint");
        refused(
            "--endpoint q --endpoint-type storagequeue",
            "must be ACCOUNT/queue",
        );
    }

    #[test]
    fn a_change_leaves_the_rest() {
        let before = json!({
            "destination": {"endpointType": "WebHook", "properties": {"endpointUrl": "https://x", "maxEventsPerBatch": 1}},
            "filter": {"subjectBeginsWith": "/a", "includedEventTypes": ["t"]},
            "retryPolicy": {"maxDeliveryAttempts": 30, "eventTimeToLiveInMinutes": 1440},
            "labels": ["old"],
        });
        let line =
            "--max-events-per-batch 5 --subject-ends-with .jpg --subject-case-sensitive --event-ttl 2h";
        let mut expected = before.clone();
        expected["destination"]["properties"]["maxEventsPerBatch"] = json!(5);
        expected["filter"]["subjectEndsWith"] = json!(".jpg");
        expected["filter"]["isSubjectCaseSensitive"] = json!(true);
        expected["retryPolicy"]["eventTimeToLiveInMinutes"] = json!(120);
        assert_eq!(put(before.clone(), line).unwrap(), expected);

        let mut cleared = before;
        let map = cleared.as_object_mut().unwrap();
        clear(
            map,
            &[
                ClearSubscriptionSetting::Labels,
                ClearSubscriptionSetting::EventTypes,
                ClearSubscriptionSetting::Subject,
                ClearSubscriptionSetting::DeadLetter,
            ],
        );
        assert_eq!(cleared.get("labels"), None);
        assert_eq!(cleared["filter"], json!({}));
    }

    #[test]
    fn filters() {
        check(
            "--event-type A --event-type B C --subject-begins-with /x --advanced-filter data.n NumberInRange [-1,2] 5,6 \
             --advanced-filter data.s stringin a b --advanced-filter data.b BoolEquals TRUE --advanced-filter data.n \
             NumberGreaterThan -1.5 --advanced-filter data.z IsNotNull --advanced-filtering-on-arrays false",
            json!({"filter": {
            "includedEventTypes": ["A", "B", "C"], "subjectBeginsWith": "/x",
            "enableAdvancedFilteringOnArrays": false,
            "advancedFilters": [
                {"key": "data.n", "operatorType": "NumberInRange", "values": [[-1, 2], [5, 6]]},
                {"key": "data.s", "operatorType": "StringIn", "values": ["a", "b"]},
                {"key": "data.b", "operatorType": "BoolEquals", "value": true},
                {"key": "data.n", "operatorType": "NumberGreaterThan", "value": -1.5},
                {"key": "data.z", "operatorType": "IsNotNull"},
            ]}}),
        );
        refused("--advanced-filter a StringInn x", "did you mean StringIn?");
        refused("--advanced-filter a NumberIn x", "\"x\" is not a number");
        refused("--advanced-filter a NumberLessThan 1 2", "takes one value");
        refused("--advanced-filter a IsNotNull x", "takes no value");
        refused("--advanced-filter a StringIn", "needs a value");
        refused("--advanced-filter a NumberInRange 1", "not a range");
    }

    #[test]
    fn retries_dead_letters_and_the_rest() {
        check(
            "--max-delivery-attempts 5 --event-ttl 90 --dead-letter acc/dead --delivery-schema cloudevents \
             --label a --label b --expires 2d --profile edge",
            json!({
                "retryPolicy": {"maxDeliveryAttempts": 5, "eventTimeToLiveInMinutes": 90},
                "deadLetterDestination": {"endpointType": "StorageBlob", "properties": {
                    "resourceId": "/subscriptions/0/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/acc",
                    "blobContainerName": "dead"}},
                "eventDeliverySchema": "CloudEventSchemaV1_0",
                "labels": ["a", "b"],
                "expirationTimeUtc": "2030-03-19T17:46:40.0000000Z",
                "postrider": {"profile": "edge"},
            }),
        );
        refused("--event-ttl 90s", "whole number of minutes");
        refused("--event-ttl soon", "--event-ttl");
        refused("--expires 2020-01-01T00:00:00Z", "not in the future");
        refused("--expires soon", "neither a time");
        refused("--dead-letter acc", "must be ACCOUNT/container");
    }
}
