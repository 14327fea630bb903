//! Destinations of subscriptions and of dead letters: parsed and rendered.

use super::read::JsonNode;
use super::subscription::{SubscriptionContext, count_or_shown};
use super::validate::{
    UrlParts, check_account_name, check_attribute_name, check_attribute_value, check_header_not_reserved,
    check_storage_name, connection_part, resource_names,
};
use super::{FieldError, Road};
use postrider_core::ids::Secret;
use postrider_core::json::JsonKind;
use postrider_core::subscription::{
    AttributeValue, BatchLimits, BatchSettings, BrokerAddress, DeadLetterDestination, DeliveryAttribute,
    Destination, ResourceIdentity, WebHook,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Replaces a secret in answers. When sent back, it means the existing secret.
pub const HIDDEN: &str = "Hidden";

/// Limit of the delivery attributes of a subscription.
const ATTRIBUTES_MAX: usize = 10;
/// Limits of a batch in the cloud.
pub const CLOUD_BATCH_EVENTS_MAX: u32 = 5000;
pub const CLOUD_BATCH_KILOBYTES_MAX: u32 = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
enum DestinationType {
    WebHook,
    EventGrid,
    EdgeHub,
    AzureFunction,
    StorageQueue,
    EventHub,
    HybridConnection,
    ServiceBusQueue,
    ServiceBusTopic,
}

/// The types of destinations, and whether the edge and the cloud have them. The configuration has
/// all of them.
const TYPES: [(&str, DestinationType, bool, bool); 9] = [
    ("WebHook", DestinationType::WebHook, true, true),
    ("EventGrid", DestinationType::EventGrid, true, false),
    ("EdgeHub", DestinationType::EdgeHub, true, false),
    ("EventHub", DestinationType::EventHub, true, true),
    ("ServiceBusQueue", DestinationType::ServiceBusQueue, true, true),
    ("ServiceBusTopic", DestinationType::ServiceBusTopic, true, true),
    ("StorageQueue", DestinationType::StorageQueue, true, true),
    ("AzureFunction", DestinationType::AzureFunction, false, true),
    ("HybridConnection", DestinationType::HybridConnection, false, true),
];

impl DestinationType {
    fn name(self) -> &'static str {
        let line = TYPES.iter().find(|(_, kind, ..)| *kind == self);
        line.expect("every type has a line").0
    }

    fn of(destination: &Destination) -> DestinationType {
        match destination {
            Destination::WebHook(_) => DestinationType::WebHook,
            Destination::EventGrid { .. } => DestinationType::EventGrid,
            Destination::EdgeHub { .. } => DestinationType::EdgeHub,
            Destination::AzureFunction { .. } => DestinationType::AzureFunction,
            Destination::StorageQueue { .. } => DestinationType::StorageQueue,
            Destination::EventHub { .. } => DestinationType::EventHub,
            Destination::HybridConnection { .. } => DestinationType::HybridConnection,
            Destination::ServiceBusQueue { .. } => DestinationType::ServiceBusQueue,
            Destination::ServiceBusTopic { .. } => DestinationType::ServiceBusTopic,
        }
    }

    fn has_batches(self) -> bool {
        matches!(
            self,
            DestinationType::WebHook | DestinationType::AzureFunction | DestinationType::EventGrid
        )
    }

    fn has_attributes(self) -> bool {
        !matches!(
            self,
            DestinationType::StorageQueue | DestinationType::EventGrid | DestinationType::EdgeHub
        )
    }

    /// Whether attributes become HTTP headers rather than properties of a message.
    fn is_http(self) -> bool {
        matches!(
            self,
            DestinationType::WebHook | DestinationType::AzureFunction | DestinationType::HybridConnection
        )
    }
}

/// Parses `{"endpointType":…,"properties":{…}}`. `batching` holds the limits of the edge's old
/// `deliveryPolicy`.
pub(super) fn parse_destination(
    node: &JsonNode<'_>,
    batching: BatchSettings,
    context: &SubscriptionContext<'_>,
) -> Result<Destination, FieldError> {
    read_destination(node, batching, context, None)
}

/// Parses a change of a destination. Members that are not mentioned stay unchanged, unless the type
/// changes: then nothing of the previous destination is kept.
pub(super) fn patch_destination(
    node: &JsonNode<'_>,
    previous: &Destination,
    context: &SubscriptionContext<'_>,
) -> Result<Destination, FieldError> {
    let kind = DestinationType::of(previous);
    let given = node.string("endpointType")?;
    let same = given.is_none_or(|given| given.eq_ignore_ascii_case(kind.name()));
    let kept = same.then_some(previous);
    read_destination(node, BatchSettings::default(), context, kept)
}

fn read_destination(
    node: &JsonNode<'_>,
    batching: BatchSettings,
    context: &SubscriptionContext<'_>,
    kept: Option<&Destination>,
) -> Result<Destination, FieldError> {
    let road = context.road;
    // A type that the management API does not make may come back from a read.
    let previous = context
        .previous
        .map(|previous| DestinationType::of(&previous.destination));
    let known = TYPES.iter().filter(|(_, kind, edge, azure)| match road {
        Road::Edge => *edge,
        Road::Azure => *azure || previous == Some(*kind),
        Road::Config => true,
    });
    let words: Vec<_> = known.map(|(name, kind, ..)| (*name, *kind)).collect();
    let (kind, properties) = match kept {
        Some(kept) => {
            let kind = node
                .word("endpointType", &words)?
                .unwrap_or(DestinationType::of(kept));
            let properties = node.object("properties")?;
            (kind, properties.unwrap_or_else(|| node.at("properties")))
        }
        None => {
            node.need_string("endpointType")?;
            let kind = node
                .word("endpointType", &words)?
                .expect("it was found to be there");
            (kind, node.need_object("properties")?)
        }
    };
    refuse_foreign_members(&properties, kind, road)?;

    let reader = DestinationParser {
        properties,
        kind,
        context,
        kept,
    };
    let batching = kept.map_or(batching, Destination::batching);
    match kind {
        DestinationType::WebHook => reader.web_hook(batching).map(Destination::WebHook),
        DestinationType::EventGrid => reader.event_grid(batching),
        DestinationType::EdgeHub => Ok(Destination::EdgeHub {
            output: reader.properties.need_string("outputName")?,
        }),
        DestinationType::AzureFunction => Ok(Destination::AzureFunction {
            resource: reader.function()?,
            batching: reader.batching(batching)?,
            attributes: reader.attributes()?,
        }),
        DestinationType::StorageQueue => reader.storage_queue(),
        DestinationType::EventHub => Ok(Destination::EventHub {
            resource: reader.broker("Microsoft.EventHub", "eventhubs")?,
            attributes: reader.attributes()?,
        }),
        DestinationType::HybridConnection => Ok(Destination::HybridConnection {
            resource: reader.broker("Microsoft.Relay", "hybridConnections")?,
            attributes: reader.attributes()?,
        }),
        DestinationType::ServiceBusQueue => Ok(Destination::ServiceBusQueue {
            resource: reader.broker("Microsoft.ServiceBus", "queues")?,
            attributes: reader.attributes()?,
        }),
        DestinationType::ServiceBusTopic => Ok(Destination::ServiceBusTopic {
            resource: reader.broker("Microsoft.ServiceBus", "topics")?,
            attributes: reader.attributes()?,
        }),
    }
}

/// Refuses a property of another destination type: it was surely meant to have an effect. The edge
/// module ignores such properties.
fn refuse_foreign_members(
    properties: &JsonNode<'_>,
    kind: DestinationType,
    road: Road,
) -> Result<(), FieldError> {
    if road == Road::Edge {
        return Ok(());
    }
    let rules = [
        ("maxEventsPerBatch", kind.has_batches()),
        ("preferredBatchSizeInKilobytes", kind.has_batches()),
        ("deliveryAttributeMappings", kind.has_attributes()),
        ("azureActiveDirectoryTenantId", kind == DestinationType::WebHook),
        (
            "azureActiveDirectoryApplicationIdOrUri",
            kind == DestinationType::WebHook,
        ),
        (
            "queueMessageTimeToLiveInSeconds",
            kind == DestinationType::StorageQueue,
        ),
    ];
    // Where a person writes the destination, its address may not be of another type either.
    let has_resource = !matches!(
        kind,
        DestinationType::WebHook | DestinationType::EventGrid | DestinationType::EdgeHub
    );
    let addresses = [
        (
            "endpointUrl",
            matches!(kind, DestinationType::WebHook | DestinationType::EventGrid),
        ),
        ("resourceId", has_resource),
        (
            "connectionString",
            has_resource && kind != DestinationType::AzureFunction,
        ),
        ("queueName", kind == DestinationType::StorageQueue),
        ("sasKey", kind == DestinationType::EventGrid),
        ("topicName", kind == DestinationType::EventGrid),
        ("outputName", kind == DestinationType::EdgeHub),
        ("minimumTlsVersionAllowed", kind == DestinationType::WebHook),
    ];
    let addresses = addresses.into_iter().filter(|_| road == Road::Config);
    for (member, allowed) in rules.into_iter().chain(addresses) {
        if let Some(given) = properties.get(member).filter(|_| !allowed) {
            return Err(given.fail(format!("must be left out: {} has no such property", kind.name())));
        }
    }
    Ok(())
}

struct DestinationParser<'a> {
    properties: JsonNode<'a>,
    kind: DestinationType,
    context: &'a SubscriptionContext<'a>,
    /// The destination of this type that is changed; members that are not mentioned are taken from
    /// it.
    kept: Option<&'a Destination>,
}

impl DestinationParser<'_> {
    fn web_hook(&self, batching: BatchSettings) -> Result<WebHook, FieldError> {
        let url = self.web_hook_url().map_err(|error| match self.context.road {
            Road::Azure => error.saying(
                "Invalid event subscription request: Supplied URL is invalid. It cannot be null or empty \
                 and should be a proper HTTPS URL like https://www.example.com.",
            ),
            _ => error,
        })?;
        let (aad_tenant, aad_application) = self.active_directory()?;
        Ok(WebHook {
            batching: self.batching(batching)?,
            attributes: self.attributes_beside(Some(&url), aad_tenant.is_some())?,
            rate_max: self.known_rate(&url),
            url,
            aad_tenant,
            aad_application,
        })
    }

    /// The rate that a webhook requested in an earlier handshake, valid until the next handshake.
    fn known_rate(&self, url: &Secret) -> Option<u32> {
        match self.previous_destination() {
            Some(Destination::WebHook(hook)) if hook.url == *url => hook.rate_max,
            _ => None,
        }
    }

    /// The webhook's URL. The cloud never shows the URL, so a change that repeats a read body lacks
    /// it; the previous one is kept then.
    fn web_hook_url(&self) -> Result<Secret, FieldError> {
        let field = self.properties.at("endpointUrl");
        if let (true, Some(Destination::WebHook(hook))) = (field.value.is_null(), self.kept) {
            return Ok(hook.url.clone());
        }
        let text = self.properties.need_string("endpointUrl")?;
        let url = UrlParts::parse(&text).map_err(|reason| field.fail(reason))?;
        if self.context.limits.web_hook_https_only && !url.https {
            return Err(field.fail("must be an https URL"));
        }
        Ok(Secret::new(text))
    }

    fn previous_destination(&self) -> Option<&Destination> {
        self.context
            .previous
            .map(|subscription| &subscription.destination)
    }

    fn active_directory(&self) -> Result<(Option<String>, Option<String>), FieldError> {
        let names = [
            "azureActiveDirectoryTenantId",
            "azureActiveDirectoryApplicationIdOrUri",
        ];
        let [tenant, application] = names.map(|name| self.properties.string(name));
        let given = |text: Result<Option<String>, _>| Ok(text?.filter(|text| !text.is_empty()));
        let (mut tenant, mut application) = (given(tenant)?, given(application)?);
        if let Some(Destination::WebHook(hook)) = self.kept {
            // An empty string removes the value.
            let silent = |name| self.properties.get(name).is_none();
            if silent(names[0]) && silent(names[1]) {
                (tenant, application) = (hook.aad_tenant.clone(), hook.aad_application.clone());
            }
        }
        let missing = match (&tenant, &application) {
            (Some(_), None) => 1,
            (None, Some(_)) => 0,
            _ => return Ok((tenant, application)),
        };
        let reason = format!("is required with {}", names[1 - missing]);
        Err(self.properties.at(names[missing]).fail(reason))
    }

    fn batching(&self, otherwise: BatchSettings) -> Result<BatchSettings, FieldError> {
        let limits = self.context.limits;
        let (events, kilobytes) = match self.context.road {
            Road::Edge => (limits.edge_batch_events_max, limits.edge_batch_kilobytes_max),
            Road::Config | Road::Azure => (CLOUD_BATCH_EVENTS_MAX, CLOUD_BATCH_KILOBYTES_MAX),
        };
        let shown = self.context.shown.map(|shown| shown.batch);
        let count = |member, limit, shown| count_or_shown(&self.properties, member, limit, shown);
        let (shown_events, shown_kilobytes) = shown.map(|batch| (batch.events_max, batch.kilobytes)).unzip();
        Ok(BatchSettings {
            events_max: count("maxEventsPerBatch", events, shown_events)?.or(otherwise.events_max),
            preferred_kilobytes: count("preferredBatchSizeInKilobytes", kilobytes, shown_kilobytes)?
                .or(otherwise.preferred_kilobytes),
        })
    }

    /// A destination of type EventGrid: forwards events from the edge to the cloud.
    fn event_grid(&self, batching: BatchSettings) -> Result<Destination, FieldError> {
        let field = self.properties.at("endpointUrl");
        let text = self.properties.need_string("endpointUrl")?;
        let url = UrlParts::parse(&text).map_err(|reason| field.fail(reason))?;
        let previous = match self.previous_destination() {
            Some(Destination::EventGrid { url, sas_key, .. }) => Some((url, sas_key)),
            _ => None,
        };
        let unchanged = previous.is_some_and(|(previous, _)| *previous == text);
        if self.context.road != Road::Azure || !unchanged {
            self.check_event_grid_url(&field, &url)?;
        }
        // A masked key stays with the server it was given for.
        let previous = previous
            .filter(|(previous, _)| {
                UrlParts::parse(previous).is_ok_and(|previous| previous.same_origin(&url))
            })
            .map(|(_, sas_key)| sas_key);
        let sas_key = self.secret("sasKey", previous)?;
        check_attribute_value(sas_key.expose())
            .map_err(|reason| self.properties.at("sasKey").fail(reason))?;
        Ok(Destination::EventGrid {
            sas_key,
            topic_name: self.properties.string("topicName")?,
            batching: self.batching(batching)?,
            url: text,
        })
    }

    fn check_event_grid_url(&self, field: &JsonNode<'_>, url: &UrlParts<'_>) -> Result<(), FieldError> {
        let hosts = &self.context.limits.event_grid_hosts;
        hosts.check_scheme(url).map_err(|reason| field.fail(reason))?;
        if !url.path.to_ascii_lowercase().contains("/api/events") {
            let rule = "must target the /api/events API of Azure Event Grid in the cloud";
            let error = field.fail(rule);
            return Err(match self.context.road {
                Road::Edge => error.saying(format!("EndpointUrl {rule}.")),
                _ => error,
            });
        }
        if !url.has_parameter("api-version", "2018-01-01") {
            return Err(field.fail("must have the query parameter api-version=2018-01-01"));
        }
        hosts.check_host(url).map_err(|reason| field.fail(reason))
    }

    /// A secret, or the mask that was shown for the previous one.
    fn secret(&self, name: &str, previous: Option<&Secret>) -> Result<Secret, FieldError> {
        let given = self.properties.need_string(name)?;
        match (given.as_str(), previous) {
            (HIDDEN, Some(secret)) => Ok(secret.clone()),
            (HIDDEN, None) => Err(self.properties.at(name).fail(MASKED)),
            _ => Ok(Secret::new(given)),
        }
    }

    /// The resource id of the previous destination, if the change does not mention it.
    fn kept_resource(&self) -> Option<&str> {
        let silent = self.properties.get("resourceId").is_none();
        self.kept.filter(|_| silent).and_then(resource_of)
    }

    fn function(&self) -> Result<String, FieldError> {
        if let Some(kept) = self.kept_resource() {
            return Ok(kept.to_owned());
        }
        let id = self.properties.need_string("resourceId")?;
        let types: [&[&str]; 2] = [&["sites", "functions"], &["sites", "slots", "functions"]];
        let fits =
            |types| resource_names(&id, "Microsoft.Web", types).is_some_and(|(_, rest)| rest.is_empty());
        if types.into_iter().any(fits) {
            return Ok(id);
        }
        let reason = "must be a resource id …/providers/Microsoft.Web/sites/<name>/functions/<name>";
        Err(self.properties.at("resourceId").fail(reason))
    }

    /// The cloud uses a resource id, the edge a connection string; the configuration accepts
    /// either.
    fn broker(&self, provider: &str, entity: &str) -> Result<BrokerAddress, FieldError> {
        if let Some(kept) = self.kept.and_then(broker_of)
            && self.properties.get("resourceId").is_none()
        {
            return Ok(kept.clone());
        }
        if self.names_connection() {
            let previous = match self.previous_destination() {
                Some(previous) if DestinationType::of(previous) == self.kind => connection_of(previous),
                _ => None,
            };
            let connection = self.secret("connectionString", previous)?;
            let part = |name| connection_part(connection.expose(), name);
            if part("Endpoint").is_none() || part("EntityPath").is_none() {
                let reason = "must be the connection string of the entity: with Endpoint and EntityPath";
                return Err(self.properties.at("connectionString").fail(reason));
            }
            return Ok(BrokerAddress::Connection(connection));
        }
        let id = self.properties.need_string("resourceId")?;
        match resource_names(&id, provider, &["namespaces", entity]) {
            Some((_, rest)) if rest.is_empty() => Ok(BrokerAddress::Resource(id)),
            _ => {
                let reason =
                    format!("must be a resource id …/providers/{provider}/namespaces/<name>/{entity}/<name>");
                Err(self.properties.at("resourceId").fail(reason))
            }
        }
    }

    fn names_connection(&self) -> bool {
        match self.context.road {
            Road::Edge => true,
            Road::Config => self.properties.get("connectionString").is_some(),
            // Only to change a destination whose reads show a connection string.
            Road::Azure => {
                let previous = self.previous_destination().map(DestinationBody::of);
                let member = "connectionString";
                self.properties.get(member).is_some()
                    && previous.is_some_and(|previous| {
                        previous.endpoint_type == self.kind.name() && previous.properties.contains_key(member)
                    })
            }
        }
    }

    fn storage_queue(&self) -> Result<Destination, FieldError> {
        // Clients usually split the id of the queue; some send it whole.
        let mut queue_in_id = None;
        let (kept_account, kept_queue, kept_ttl) = match self.kept {
            Some(Destination::StorageQueue {
                resource,
                queue,
                message_ttl_secs,
            }) => (Some(resource), Some(queue), *message_ttl_secs),
            _ => (None, None, None),
        };
        let silent = |name| self.properties.get(name).is_none();
        let resource = if let Some(kept) = kept_account.filter(|_| silent("resourceId")) {
            kept.clone()
        } else if self.names_connection() {
            self.storage_connection()?
        } else {
            let previous = match self.previous_destination() {
                Some(Destination::StorageQueue { resource, .. }) => Some(resource.as_str()),
                _ => None,
            };
            let (account, rest) = storage_account(&self.properties, self.context.road, previous)?;
            match rest.as_slice() {
                [] => {}
                [services, _, queues, queue]
                    if services.eq_ignore_ascii_case("queueServices")
                        && queues.eq_ignore_ascii_case("queues") =>
                {
                    queue_in_id = Some(queue.clone());
                }
                _ => return Err(self.properties.at("resourceId").fail(ACCOUNT_ID)),
            }
            account
        };
        let queue = match (self.properties.string("queueName")?, queue_in_id, kept_queue) {
            (None, Some(queue), _) => queue,
            (None, None, Some(kept)) => kept.clone(),
            _ => self.properties.need_string("queueName")?,
        };
        check_storage_name(&queue).map_err(|reason| self.properties.at("queueName").fail(reason))?;
        let ttl = "queueMessageTimeToLiveInSeconds";
        let message_ttl_secs = self.properties.integer(ttl, -1..=i64::MAX)?.or(kept_ttl);
        if message_ttl_secs == Some(0) {
            return Err(self
                .properties
                .at(ttl)
                .fail("must be positive, or -1 for never, was 0"));
        }
        Ok(Destination::StorageQueue {
            resource,
            queue,
            message_ttl_secs,
        })
    }

    fn storage_connection(&self) -> Result<String, FieldError> {
        let given = self.properties.need_string("connectionString")?;
        if given == HIDDEN {
            return match self.previous_destination() {
                Some(Destination::StorageQueue { resource, .. }) if is_connection(resource) => {
                    Ok(resource.clone())
                }
                _ => Err(self.properties.at("connectionString").fail(MASKED)),
            };
        }
        if !is_connection(&given) {
            let reason =
                "must be the connection string of a storage account: with AccountName or QueueEndpoint";
            return Err(self.properties.at("connectionString").fail(reason));
        }
        Ok(given)
    }

    fn attributes(&self) -> Result<Vec<DeliveryAttribute>, FieldError> {
        self.attributes_beside(None, false)
    }

    /// Parses the delivery attributes of a destination at `url`.
    fn attributes_beside(
        &self,
        url: Option<&Secret>,
        aad: bool,
    ) -> Result<Vec<DeliveryAttribute>, FieldError> {
        let given = self.properties.list("deliveryAttributeMappings")?;
        let list = match (given, self.kept) {
            (Some(list), _) => list,
            (None, Some(kept)) => return self.keep_attributes(kept, aad),
            (None, None) => Vec::new(),
        };
        if list.len() > ATTRIBUTES_MAX {
            let reason = format!(
                "must not have more than {ATTRIBUTES_MAX} attributes, had {}",
                list.len()
            );
            return Err(self.properties.at("deliveryAttributeMappings").fail(reason));
        }
        let mut attributes: Vec<DeliveryAttribute> = Vec::new();
        for node in list {
            let node = node.of_kind(JsonKind::Object)?;
            let attribute = self.attribute(&node, url)?;
            self.check_attribute(&node, &attribute, aad)?;
            if attributes
                .iter()
                .any(|other| other.name.eq_ignore_ascii_case(&attribute.name))
            {
                return Err(node
                    .at("name")
                    .fail(format!("is given twice: {:?}", attribute.name)));
            }
            attributes.push(attribute);
        }
        let has = |name: &str| {
            attributes
                .iter()
                .any(|attribute| attribute.name.eq_ignore_ascii_case(name))
        };
        if self.is_service_bus() && has("SessionId") && has("MessageId") {
            let reason = "must not set both SessionId and MessageId";
            return Err(self.properties.at("deliveryAttributeMappings").fail(reason));
        }
        Ok(attributes)
    }

    /// Keeps the previous attributes, unless another changed member forbids one of them.
    fn keep_attributes(&self, kept: &Destination, aad: bool) -> Result<Vec<DeliveryAttribute>, FieldError> {
        let attributes = kept.attributes().to_vec();
        let sets_authorization = attributes
            .iter()
            .any(|attribute| attribute.name.eq_ignore_ascii_case("Authorization"));
        if aad && sets_authorization {
            let reason = "must not set Authorization: Azure Active Directory sets it";
            return Err(self.properties.at("deliveryAttributeMappings").fail(reason));
        }
        Ok(attributes)
    }

    fn attribute(&self, node: &JsonNode<'_>, url: Option<&Secret>) -> Result<DeliveryAttribute, FieldError> {
        let name = node.need_string("name")?;
        node.need_string("type")?;
        let is_static = node.word("type", &[("Static", true), ("Dynamic", false)])? == Some(true);
        let properties = node.need_object("properties")?;
        if !is_static {
            let source_field = properties.need_string("sourceField")?;
            return Ok(DeliveryAttribute {
                name,
                value: AttributeValue::Dynamic { source_field },
            });
        }
        let secret = properties.bool("isSecret")?.unwrap_or(false);
        let value = properties.need("value")?.as_string()?;
        let value = if secret && value == HIDDEN {
            let kept = self.previous_secret(&name, url);
            kept.ok_or_else(|| properties.at("value").fail(MASKED))?
        } else {
            check_attribute_value(&value).map_err(|reason| properties.at("value").fail(reason))?;
            Secret::new(value)
        };
        Ok(DeliveryAttribute {
            name,
            value: AttributeValue::Static { value, secret },
        })
    }

    /// The previous secret value of an attribute. The value is kept only for the server that it was
    /// given for: a client that may change a subscription but not read its secrets must not be able
    /// to send them elsewhere. On the management API, clients that may change a subscription may
    /// also read its secrets.
    fn previous_secret(&self, name: &str, url: Option<&Secret>) -> Option<Secret> {
        let previous = self
            .previous_destination()
            .filter(|previous| DestinationType::of(previous) == self.kind)?;
        if self.context.road == Road::Azure {
            // The secret goes wherever the change says.
        } else if let (Destination::WebHook(hook), Some(url)) = (previous, url) {
            let (before, now) = (
                UrlParts::parse(hook.url.expose()).ok()?,
                UrlParts::parse(url.expose()).ok()?,
            );
            if !before.same_origin(&now) {
                return None;
            }
        } else if resource_of(previous)? != self.properties.string("resourceId").ok()??.as_str() {
            return None;
        }
        let attribute = previous
            .attributes()
            .iter()
            .find(|a| a.name.eq_ignore_ascii_case(name))?;
        match &attribute.value {
            AttributeValue::Static { value, secret: true } => Some(value.clone()),
            _ => None,
        }
    }

    fn check_attribute(
        &self,
        node: &JsonNode<'_>,
        attribute: &DeliveryAttribute,
        aad: bool,
    ) -> Result<(), FieldError> {
        let field = node.at("name");
        let name = attribute.name.as_str();
        check_attribute_name(name).map_err(|reason| field.fail(reason))?;
        if self.kind.is_http() {
            check_header_not_reserved(name).map_err(|reason| field.fail(reason))?;
        }
        if self.kind.is_http() && name.eq_ignore_ascii_case("Authorization") {
            if self.kind != DestinationType::WebHook {
                return Err(field.fail("must not be Authorization: only a WebHook may set it"));
            }
            if aad {
                return Err(field.fail("must not be Authorization: Azure Active Directory sets it"));
            }
        }
        let dynamic = matches!(attribute.value, AttributeValue::Dynamic { .. });
        if self.is_service_bus() && name.eq_ignore_ascii_case("MessageId") && !dynamic {
            return Err(node.at("type").fail("must be Dynamic for MessageId"));
        }
        Ok(())
    }

    fn is_service_bus(&self) -> bool {
        matches!(
            self.kind,
            DestinationType::ServiceBusQueue | DestinationType::ServiceBusTopic
        )
    }
}

const MASKED: &str = "is masked: give the secret itself";
const ACCOUNT_ID: &str = "must be a resource id …/providers/Microsoft.Storage/storageAccounts/<name>";

/// The account named by `resourceId`, and what follows it in the id.
fn storage_account(
    properties: &JsonNode<'_>,
    road: Road,
    previous: Option<&str>,
) -> Result<(String, Vec<String>), FieldError> {
    let id = properties.need_string("resourceId")?;
    let field = properties.at("resourceId");
    // Reads show the bare name that the configuration gave.
    if !id.starts_with('/') && (road != Road::Azure || previous == Some(&id)) {
        check_account_name(&id).map_err(|reason| field.fail(reason))?;
        return Ok((id, Vec::new()));
    }
    let Some((_, rest)) = resource_names(&id, "Microsoft.Storage", &["storageAccounts"]) else {
        return Err(field.fail(ACCOUNT_ID));
    };
    let rest: Vec<String> = rest.into_iter().map(Into::into).collect();
    let after: usize = rest.iter().map(|segment| segment.len() + 1).sum();
    Ok((id[..id.len() - after].to_owned(), rest))
}

fn is_connection(text: &str) -> bool {
    let part = |name| connection_part(text, name);
    part("AccountName")
        .or(part("QueueEndpoint"))
        .or(part("UseDevelopmentStorage"))
        .is_some()
}

fn connection_of(destination: &Destination) -> Option<&Secret> {
    match broker_of(destination)? {
        BrokerAddress::Connection(connection) => Some(connection),
        BrokerAddress::Resource(_) => None,
    }
}

fn resource_of(destination: &Destination) -> Option<&str> {
    if let Destination::AzureFunction { resource, .. } = destination {
        return Some(resource);
    }
    match broker_of(destination)? {
        BrokerAddress::Resource(resource) => Some(resource),
        BrokerAddress::Connection(_) => None,
    }
}

fn broker_of(destination: &Destination) -> Option<&BrokerAddress> {
    match destination {
        Destination::EventHub { resource, .. }
        | Destination::HybridConnection { resource, .. }
        | Destination::ServiceBusQueue { resource, .. }
        | Destination::ServiceBusTopic { resource, .. } => Some(resource),
        _ => None,
    }
}

/// Parses `{"endpointType":"StorageBlob","properties":{…}}`. The account may be given as the id of
/// the container.
pub(super) fn parse_dead_letter(
    node: &JsonNode<'_>,
    context: &SubscriptionContext<'_>,
) -> Result<DeadLetterDestination, FieldError> {
    node.need_string("endpointType")?;
    node.word("endpointType", &[("StorageBlob", ())])?;
    let properties = node.need_object("properties")?;
    let previous = context
        .previous
        .and_then(|previous| previous.dead_letter.as_ref());
    let previous = previous.map(|place| place.account.as_str());
    let (account, rest) = storage_account(&properties, context.road, previous)?;
    let container_in_id = match rest.as_slice() {
        [] => None,
        [services, _, containers, container]
            if services.eq_ignore_ascii_case("blobServices")
                && containers.eq_ignore_ascii_case("containers") =>
        {
            Some(container.clone())
        }
        _ => return Err(properties.at("resourceId").fail(ACCOUNT_ID)),
    };
    let container = match (properties.string("blobContainerName")?, container_in_id) {
        (None, Some(container)) => container,
        (Some(given), Some(container)) if given != container => {
            let reason = format!("must be {container:?} like in resourceId, was {given:?}");
            return Err(properties.at("blobContainerName").fail(reason));
        }
        _ => properties.need_string("blobContainerName")?,
    };
    check_storage_name(&container).map_err(|reason| properties.at("blobContainerName").fail(reason))?;
    Ok(DeadLetterDestination { account, container })
}

pub(super) fn parse_identity(node: &JsonNode<'_>, road: Road) -> Result<ResourceIdentity, FieldError> {
    node.need_string("type")?;
    let words = [
        ("SystemAssigned", "SystemAssigned"),
        ("UserAssigned", "UserAssigned"),
    ];
    let kind = node.word("type", &words)?.expect("it was found to be there");
    let user_assigned = match kind {
        "UserAssigned" => Some(node.need_string("userAssignedIdentity")?),
        _ => node.string("userAssignedIdentity")?.filter(|id| !id.is_empty()),
    };
    let provider = "Microsoft.ManagedIdentity";
    let is_identity = |id: &str| {
        let names = resource_names(id, provider, &["userAssignedIdentities"]);
        names.is_some_and(|(_, rest)| rest.is_empty())
    };
    if road == Road::Azure && user_assigned.as_deref().is_some_and(|id| !is_identity(id)) {
        let reason = format!("must be a resource id …/providers/{provider}/userAssignedIdentities/<name>");
        return Err(node.at("userAssignedIdentity").fail(reason));
    }
    Ok(ResourceIdentity {
        kind: kind.into(),
        user_assigned,
    })
}

/// A destination as the APIs render it: as it was given, with secrets masked, but with the full URL
/// of a webhook.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DestinationBody {
    pub endpoint_type: &'static str,
    pub properties: Map<String, Value>,
}

impl DestinationBody {
    pub fn of(destination: &Destination) -> DestinationBody {
        let mut properties = Map::new();
        let mut put = |name: &str, value: Value| {
            if !value.is_null() {
                properties.insert(name.into(), value);
            }
        };
        match destination {
            Destination::WebHook(hook) => {
                put("endpointUrl", hook.url.expose().into());
                put("azureActiveDirectoryTenantId", hook.aad_tenant.clone().into());
                put(
                    "azureActiveDirectoryApplicationIdOrUri",
                    hook.aad_application.clone().into(),
                );
            }
            Destination::EventGrid { url, topic_name, .. } => {
                put("endpointUrl", url.clone().into());
                put("sasKey", HIDDEN.into());
                put("topicName", topic_name.clone().into());
            }
            Destination::EdgeHub { output } => put("outputName", output.clone().into()),
            Destination::AzureFunction { resource, .. } => put("resourceId", resource.clone().into()),
            Destination::StorageQueue {
                resource,
                queue,
                message_ttl_secs,
            } => {
                if is_connection(resource) {
                    put("connectionString", HIDDEN.into());
                } else {
                    put("resourceId", resource.clone().into());
                }
                put("queueName", queue.clone().into());
                put("queueMessageTimeToLiveInSeconds", (*message_ttl_secs).into());
            }
            Destination::EventHub { resource, .. }
            | Destination::HybridConnection { resource, .. }
            | Destination::ServiceBusQueue { resource, .. }
            | Destination::ServiceBusTopic { resource, .. } => match resource {
                BrokerAddress::Resource(id) => put("resourceId", id.clone().into()),
                BrokerAddress::Connection(_) => put("connectionString", HIDDEN.into()),
            },
        }
        let batching = destination.batching();
        put("maxEventsPerBatch", batching.events_max.into());
        put(
            "preferredBatchSizeInKilobytes",
            batching.preferred_kilobytes.into(),
        );
        let attributes: Vec<_> = destination.attributes().iter().map(attribute_body).collect();
        if !attributes.is_empty() {
            put("deliveryAttributeMappings", attributes.into());
        }
        DestinationBody {
            endpoint_type: DestinationType::of(destination).name(),
            properties,
        }
    }
}

impl DestinationBody {
    /// Adds the batch limits that are in force, if the destination supports batches.
    pub fn with_batch_limits(mut self, destination: &Destination, limits: BatchLimits) -> DestinationBody {
        if DestinationType::of(destination).has_batches() {
            let pairs = [
                ("maxEventsPerBatch", limits.events_max),
                ("preferredBatchSizeInKilobytes", limits.kilobytes),
            ];
            let members = pairs.map(|(member, limit)| (member.to_owned(), Value::from(limit)));
            self.properties.extend(members);
        }
        self
    }
}

fn attribute_body(attribute: &DeliveryAttribute) -> Value {
    show_attribute(attribute, false)
}

/// A delivery attribute as all APIs render it, with a secret in clear or masked.
pub(crate) fn show_attribute(attribute: &DeliveryAttribute, clear: bool) -> Value {
    let (kind, properties) = match &attribute.value {
        AttributeValue::Static { value, secret } => {
            let value = if *secret && !clear { HIDDEN } else { value.expose() };
            ("Static", json!({"value": value, "isSecret": secret}))
        }
        AttributeValue::Dynamic { source_field } => ("Dynamic", json!({"sourceField": source_field})),
    };
    json!({"name": attribute.name, "type": kind, "properties": properties})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::{EventGridHosts, PlainHttp, ResourceLimits, TopicContext, parse_subscription};
    use postrider_core::event::EventSchema;
    use postrider_core::ids::{SubscriptionId, TopicId};
    use postrider_core::json::RawJson;
    use postrider_core::subscription::Subscription;
    use postrider_core::time::Timestamp;

    fn subscription(
        road: Road,
        limits: &ResourceLimits,
        destination: &str,
        previous: Option<&Subscription>,
    ) -> Result<Subscription, FieldError> {
        let body = format!(r#"{{"properties":{{"destination":{destination}}}}}"#);
        let topic = TopicContext {
            name: "orders",
            input_schema: EventSchema::EventGrid,
            mapping: None,
            default_types: &[],
        };
        let now = Timestamp::from_secs(1_000_000_000);
        let context = SubscriptionContext {
            road,
            name: "sub",
            topic,
            limits,
            now,
            previous,
            api_version: "",
            shown: None,
        };
        let spec = parse_subscription(RawJson::parse(&body).unwrap(), &context)?;
        Ok(spec.into_subscription(SubscriptionId(1), TopicId(1), None, now))
    }

    /// Parses a destination and renders it as an answer; errors lack the path to the destination.
    fn written(
        road: Road,
        limits: &ResourceLimits,
        destination: &str,
        previous: Option<&Subscription>,
    ) -> String {
        match subscription(road, limits, destination, previous) {
            Ok(subscription) => {
                serde_json::to_string(&DestinationBody::of(&subscription.destination).properties).unwrap()
            }
            Err(error) => format!("{} {}", error.path, error.reason)
                .replace("properties.destination.properties", "@")
                .replace("properties.destination", "~"),
        }
    }

    fn check(road: Road, kind: &str, properties: &str, expected: &str) {
        let destination = format!(r#"{{"endpointType":"{kind}","properties":{properties}}}"#);
        let got = written(road, &ResourceLimits::default(), &destination, None);
        // Members of answers are compared as sets.
        let json = |text: &str| serde_json::from_str::<Value>(text).ok();
        match (json(&got), json(expected)) {
            (Some(got), Some(expected)) => assert_eq!(got, expected, "{kind} {properties}"),
            _ => assert_eq!(got, expected, "{kind} {properties}"),
        }
    }

    #[test]
    fn destinations_are_of_a_type_that_the_road_knows() {
        let check = |road, destination: &str, expected: &str| {
            assert_eq!(
                written(road, &ResourceLimits::default(), destination, None),
                expected,
                "{destination}"
            );
        };
        check(Road::Config, "{}", "~.endpointType is required");
        check(Road::Config, "[]", "~ must be an object, was a list");
        check(Road::Config, r#"{"endpointType":"WebHook"}"#, "@ is required");
        check(
            Road::Edge,
            r#"{"endpointType":"AzureFunction"}"#,
            "~.endpointType must be one of WebHook, EventGrid, EdgeHub, EventHub, ServiceBusQueue, \
             ServiceBusTopic, StorageQueue, was \"AzureFunction\"",
        );
        check(
            Road::Azure,
            r#"{"endpointType":"EdgeHub"}"#,
            "~.endpointType must be one of WebHook, EventHub, ServiceBusQueue, ServiceBusTopic, StorageQueue, \
             AzureFunction, HybridConnection, was \"EdgeHub\"",
        );
        check(
            Road::Config,
            r#"{"endpointType":"MonitorAlert"}"#,
            "~.endpointType must be one of WebHook, EventGrid, EdgeHub, EventHub, ServiceBusQueue, \
             ServiceBusTopic, StorageQueue, AzureFunction, HybridConnection, was \"MonitorAlert\"",
        );
    }

    #[test]
    fn a_file_may_not_give_the_address_of_another_type() {
        for (member, value) in [
            ("queueName", "q"),
            ("resourceId", "/x"),
            ("sasKey", "k"),
            ("outputName", "o"),
        ] {
            let properties = format!(r#"{{"endpointUrl":"https://a/x","{member}":"{value}"}}"#);
            let refused = format!("@.{member} must be left out: WebHook has no such property");
            check(Road::Config, "WebHook", &properties, &refused);
            let destination = format!(r#"{{"endpointType":"WebHook","properties":{properties}}}"#);
            for road in [Road::Azure, Road::Edge] {
                let read = subscription(road, &ResourceLimits::default(), &destination, None);
                assert!(read.is_ok(), "{road:?} {member}");
            }
        }
    }

    #[test]
    fn web_hooks() {
        let good = |road, properties: &str| check(road, "webhook", properties, properties);
        let bad = |road, properties: &str, reason: &str| check(road, "WebHook", properties, reason);
        for road in [Road::Edge, Road::Config, Road::Azure] {
            good(road, r#"{"endpointUrl":"https://a.example/x?code=1"}"#);
            good(
                road,
                r#"{"endpointUrl":"http://localhost:7000/x","maxEventsPerBatch":50}"#,
            );
            good(
                road,
                r#"{"endpointUrl":"https://a.example","preferredBatchSizeInKilobytes":1}"#,
            );
            bad(road, "{}", "@.endpointUrl is required");
            bad(road, r#"{"endpointUrl":""}"#, "@.endpointUrl must not be empty");
            bad(
                road,
                r#"{"endpointUrl":1}"#,
                "@.endpointUrl must be a string, was a number",
            );
            bad(
                road,
                r#"{"endpointUrl":"hook"}"#,
                "@.endpointUrl must be an absolute http or https URL",
            );
            bad(
                road,
                r#"{"endpointUrl":"https://u@a"}"#,
                "@.endpointUrl must not have a user name or password",
            );
            bad(
                road,
                r#"{"endpointUrl":"https://a","maxEventsPerBatch":"9"}"#,
                "@.maxEventsPerBatch must be a whole number, was a string",
            );
        }
        let bad = |road, member: &str, number: u32, reason: &str| {
            bad(
                road,
                &format!(r#"{{"endpointUrl":"https://a","{member}":{number}}}"#),
                reason,
            );
        };
        bad(
            Road::Azure,
            "maxEventsPerBatch",
            0,
            "@.maxEventsPerBatch must be between 1 and 5000, was 0",
        );
        bad(
            Road::Azure,
            "maxEventsPerBatch",
            9000,
            "@.maxEventsPerBatch must be between 1 and 5000, was 9000",
        );
        bad(
            Road::Config,
            "maxEventsPerBatch",
            5001,
            "@.maxEventsPerBatch must be between 1 and 5000, was 5001",
        );
        bad(
            Road::Edge,
            "maxEventsPerBatch",
            51,
            "@.maxEventsPerBatch must be between 1 and 50, was 51",
        );
        let size = "preferredBatchSizeInKilobytes";
        bad(
            Road::Azure,
            size,
            1025,
            "@.preferredBatchSizeInKilobytes must be between 1 and 1024, was 1025",
        );
        bad(
            Road::Edge,
            size,
            1034,
            "@.preferredBatchSizeInKilobytes must be between 1 and 1033, was 1034",
        );
        check(
            Road::Azure,
            "WebHook",
            r#"{"endpointUrl":"https://a","queueMessageTimeToLiveInSeconds":1}"#,
            "@.queueMessageTimeToLiveInSeconds must be left out: WebHook has no such property",
        );
    }

    #[test]
    fn web_hooks_may_have_to_be_https() {
        let limits = ResourceLimits {
            web_hook_https_only: true,
            ..ResourceLimits::default()
        };
        let message = |road, url: &str| {
            let destination = format!(r#"{{"endpointType":"WebHook","properties":{{"endpointUrl":{url}}}}}"#);
            subscription(road, &limits, &destination, None)
                .map(drop)
                .map_err(|e| (e.code, e.to_string()))
        };
        let http = r#""http://a""#;
        assert_eq!(message(Road::Edge, r#""https://a""#), Ok(()));
        assert_eq!(
            message(Road::Config, http),
            Err((
                "InvalidRequest",
                "properties.destination.properties.endpointUrl must be an https URL".into()
            ))
        );
        assert_eq!(
            message(Road::Edge, http),
            Err((
                "InvalidDestination",
                "EventSubscription.Properties.Destination failed validation. Reason: \
                 properties.destination.properties.endpointUrl must be an https URL."
                    .into()
            ))
        );
        for url in [http, "null", r#""""#] {
            let supplied = "Invalid event subscription request: Supplied URL is invalid. It cannot be null or \
                            empty and should be a proper HTTPS URL like https://www.example.com.";
            assert_eq!(
                message(Road::Azure, url),
                Err(("InvalidRequest", supplied.into()))
            );
        }
    }

    #[test]
    fn active_directory_needs_both() {
        let (tenant, application) = (
            "azureActiveDirectoryTenantId",
            "azureActiveDirectoryApplicationIdOrUri",
        );
        let hook = |more: &str| format!(r#"{{"endpointUrl":"https://a"{more}}}"#);
        let both = hook(&format!(r#","{tenant}":"t","{application}":"a""#));
        check(Road::Azure, "WebHook", &both, &both);
        let one = hook(&format!(r#","{tenant}":"t""#));
        check(
            Road::Azure,
            "WebHook",
            &one,
            &format!("@.{application} is required with {tenant}"),
        );
        let one = hook(&format!(r#","{application}":"t""#));
        check(
            Road::Azure,
            "WebHook",
            &one,
            &format!("@.{tenant} is required with {application}"),
        );
        let neither = hook(&format!(r#","{tenant}":"","{application}":null"#));
        check(Road::Azure, "WebHook", &neither, &hook(""));
    }

    #[test]
    fn the_way_from_the_edge_to_the_cloud() {
        let url = "https://t.westus2-1.eventgrid.azure.net/api/events?api-version=2018-01-01";
        let with = |url: &str, more: &str| format!(r#"{{"endpointUrl":"{url}"{more}}}"#);
        let key = r#","sasKey":"abc=""#;
        let shown = r#","sasKey":"Hidden""#;
        let topic = r#","topicName":"t","maxEventsPerBatch":10"#;
        check(Road::Edge, "eventGrid", &with(url, key), &with(url, shown));
        check(
            Road::Edge,
            "EventGrid",
            &with(url, &format!("{key}{topic}")),
            &with(url, &format!("{shown}{topic}")),
        );
        check(
            Road::Edge,
            "EventGrid",
            &with(&url.replace(".net", ".cn"), key),
            &with(&url.replace(".net", ".cn"), shown),
        );

        let bad = |properties: &str, reason: &str| check(Road::Config, "EventGrid", properties, reason);
        bad("{}", "@.endpointUrl is required");
        bad(&with(url, ""), "@.sasKey is required");
        bad(&with(url, r#","sasKey":"""#), "@.sasKey must not be empty");
        bad(
            &with(url, r#","sasKey":"a\nb""#),
            "@.sasKey must be a header value: visible ASCII, spaces and tabs",
        );
        bad(&with(url, shown), "@.sasKey is masked: give the secret itself");
        bad(
            &with(&url.replace("https", "http"), key),
            "@.endpointUrl must be an https URL",
        );
        bad(
            &with(&url.replace("api/events", "api"), key),
            "@.endpointUrl must target the /api/events API of Azure Event Grid in the cloud",
        );
        bad(
            &with(&url.replace("2018-01-01", "2018-01-02"), key),
            "@.endpointUrl must have the query parameter api-version=2018-01-01",
        );
        for host in [
            "example.com",
            "eventgrid.azure.net.example.com",
            "noteventgrid.azure.net",
        ] {
            bad(
                &with(&url.replace("t.westus2-1.eventgrid.azure.net", host), key),
                "@.endpointUrl must have a host that ends in eventgrid.azure.net, eventgrid.azure.us or eventgrid.azure.cn, \
                 or one that the server's configuration lists in edge.event_grid_hosts",
            );
        }
        let limits = ResourceLimits {
            event_grid_hosts: EventGridHosts {
                private: true,
                http: PlainHttp::OwnHosts,
                ..EventGridHosts::default()
            },
            ..ResourceLimits::default()
        };
        let local = with("http://localhost:7000/api/events?api-version=2018-01-01", key);
        let destination = format!(r#"{{"endpointType":"EventGrid","properties":{local}}}"#);
        assert!(subscription(Road::Edge, &limits, &destination, None).is_ok());

        // The only message of the module that is known.
        let destination = format!(
            r#"{{"endpointType":"EventGrid","properties":{}}}"#,
            with("https://a/", key)
        );
        let error = subscription(Road::Edge, &ResourceLimits::default(), &destination, None).unwrap_err();
        assert_eq!(error.code, "InvalidDestination");
        assert_eq!(
            error.to_string(),
            "EventSubscription.Properties.Destination failed validation. Reason: EndpointUrl must target the \
             /api/events API of Azure Event Grid in the cloud.."
        );
    }

    #[test]
    fn brokers_of_the_cloud_are_resource_ids() {
        let id =
            |rest: &str| format!(r#"{{"resourceId":"/subscriptions/s/resourceGroups/g/providers/{rest}"}}"#);
        let lines = [
            (
                "EventHub",
                "Microsoft.EventHub/namespaces/n/eventhubs/e",
                "Microsoft.EventHub/namespaces/<name>/eventhubs/<name>",
            ),
            (
                "ServiceBusQueue",
                "Microsoft.ServiceBus/namespaces/n/queues/q",
                "Microsoft.ServiceBus/namespaces/<name>/queues/<name>",
            ),
            (
                "ServiceBusTopic",
                "Microsoft.ServiceBus/namespaces/n/topics/t",
                "Microsoft.ServiceBus/namespaces/<name>/topics/<name>",
            ),
            (
                "HybridConnection",
                "Microsoft.Relay/namespaces/n/hybridConnections/h",
                "Microsoft.Relay/namespaces/<name>/hybridConnections/<name>",
            ),
            (
                "AzureFunction",
                "Microsoft.Web/sites/s/functions/f",
                "Microsoft.Web/sites/<name>/functions/<name>",
            ),
            (
                "AzureFunction",
                "Microsoft.Web/sites/s/slots/t/functions/f",
                "Microsoft.Web/sites/<name>/functions/<name>",
            ),
        ];
        for (kind, path, form) in lines {
            for road in [Road::Azure, Road::Config] {
                check(road, kind, &id(path), &id(path));
                check(road, kind, "{}", "@.resourceId is required");
                let reason = format!("@.resourceId must be a resource id …/providers/{form}");
                check(road, kind, r#"{"resourceId":"x"}"#, &reason);
                check(road, kind, &id(&format!("{path}/more/x")), &reason);
            }
        }
        let function = id("Microsoft.Web/sites/s/functions/f").replace('}', r#","maxEventsPerBatch":2}"#);
        check(Road::Azure, "AzureFunction", &function, &function);
        let hub =
            id("Microsoft.EventHub/namespaces/n/eventhubs/e").replace('}', r#","maxEventsPerBatch":2}"#);
        let reason = "@.maxEventsPerBatch must be left out: EventHub has no such property";
        check(Road::Azure, "EventHub", &hub, reason);
    }

    #[test]
    fn brokers_of_the_edge_are_connection_strings() {
        let entity = r#"{"connectionString":"Endpoint=sb://n/;SharedAccessKey=k=;EntityPath=e"}"#;
        let shown = r#"{"connectionString":"Hidden"}"#;
        for kind in ["EventHub", "ServiceBusQueue", "ServiceBusTopic"] {
            check(Road::Edge, kind, entity, shown);
            check(Road::Config, kind, entity, shown);
            check(Road::Azure, kind, entity, "@.resourceId is required");
            check(Road::Edge, kind, "{}", "@.connectionString is required");
            check(
                Road::Edge,
                kind,
                shown,
                "@.connectionString is masked: give the secret itself",
            );
            check(
                Road::Edge,
                kind,
                r#"{"connectionString":"Endpoint=sb://n/;SharedAccessKey=k="}"#,
                "@.connectionString must be the connection string of the entity: with Endpoint and EntityPath",
            );
        }
        check(
            Road::Edge,
            "edgeHub",
            r#"{"outputName":"o"}"#,
            r#"{"outputName":"o"}"#,
        );
        check(Road::Edge, "EdgeHub", "{}", "@.outputName is required");
    }

    #[test]
    fn storage_queues() {
        let kind = "StorageQueue";
        let account = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Storage/storageAccounts/a";
        let good =
            format!(r#"{{"resourceId":"{account}","queueName":"q-1","queueMessageTimeToLiveInSeconds":-1}}"#);
        check(Road::Azure, kind, &good, &good);
        check(
            Road::Azure,
            kind,
            &format!(r#"{{"resourceId":"{account}/queueServices/default/queues/q-1"}}"#),
            &format!(r#"{{"resourceId":"{account}","queueName":"q-1"}}"#),
        );
        let named = r#"{"resourceId":"devstoreaccount1","queueName":"q-1"}"#;
        check(Road::Config, kind, named, named);
        let form = "@.resourceId must be a resource id …/providers/Microsoft.Storage/storageAccounts/<name>";
        check(Road::Azure, kind, named, form);
        check(
            Road::Azure,
            kind,
            &format!(r#"{{"resourceId":"{account}/x/y","queueName":"q-1"}}"#),
            form,
        );
        check(
            Road::Azure,
            kind,
            &format!(r#"{{"resourceId":"{account}"}}"#),
            "@.queueName is required",
        );
        check(
            Road::Azure,
            kind,
            &format!(r#"{{"resourceId":"{account}","queueName":"Q"}}"#),
            "@.queueName must have 3 to 63 lowercase letters, digits or single hyphens between them, was \"Q\"",
        );
        check(
            Road::Azure,
            kind,
            &good.replace("-1}", "0}"),
            "@.queueMessageTimeToLiveInSeconds must be positive, or -1 for never, was 0",
        );
        check(
            Road::Azure,
            kind,
            &good.replace("-1}", "-2}"),
            "@.queueMessageTimeToLiveInSeconds must be between -1 and 9223372036854775807, was -2",
        );
        check(
            Road::Azure,
            kind,
            &good.replace('}', r#","deliveryAttributeMappings":[]}"#),
            "@.deliveryAttributeMappings must be left out: StorageQueue has no such property",
        );
        check(
            Road::Edge,
            kind,
            r#"{"connectionString":"AccountName=a;AccountKey=k","queueName":"q-1"}"#,
            r#"{"connectionString":"Hidden","queueName":"q-1"}"#,
        );
        check(
            Road::Edge,
            kind,
            r#"{"connectionString":"x","queueName":"q-1"}"#,
            "@.connectionString must be the connection string of a storage account: with AccountName or QueueEndpoint",
        );
    }

    fn hook(more: &str, attributes: &[String]) -> String {
        let attributes = attributes.join(",");
        format!(r#"{{"endpointUrl":"https://a/x"{more},"deliveryAttributeMappings":[{attributes}]}}"#)
    }

    fn fixed(name: &str, value: &str, secret: bool) -> String {
        format!(
            r#"{{"name":"{name}","type":"Static","properties":{{"value":"{value}","isSecret":{secret}}}}}"#
        )
    }

    fn looked_up(name: &str, field: &str) -> String {
        format!(r#"{{"name":"{name}","type":"Dynamic","properties":{{"sourceField":"{field}"}}}}"#)
    }

    #[test]
    fn delivery_attributes() {
        let list = [
            fixed("X-Open", "v w", false),
            fixed("X-Secret", "v", true),
            looked_up("X-Dyn", "data.k"),
        ];
        let shown = [
            list[0].clone(),
            fixed("X-Secret", "Hidden", true),
            list[2].clone(),
        ];
        for road in [Road::Azure, Road::Config, Road::Edge] {
            check(road, "WebHook", &hook("", &list), &hook("", &shown));
        }
        let literal = [
            fixed("X", "Hidden", false),
            fixed("Authorization", "Bearer x", false),
        ];
        check(Road::Azure, "WebHook", &hook("", &literal), &hook("", &literal));

        let bad = |attribute: String, reason: &str| {
            check(
                Road::Azure,
                "WebHook",
                &hook("", &[attribute]),
                &format!("@.deliveryAttributeMappings{reason}"),
            );
        };
        bad("1".into(), "[0] must be an object, was a number");
        bad("{}".into(), "[0].name is required");
        bad(r#"{"name":"X"}"#.into(), "[0].type is required");
        bad(
            r#"{"name":"X","type":"Odd"}"#.into(),
            "[0].type must be one of Static, Dynamic, was \"Odd\"",
        );
        bad(
            r#"{"name":"X","type":"Static"}"#.into(),
            "[0].properties is required",
        );
        bad(
            r#"{"name":"X","type":"Static","properties":{}}"#.into(),
            "[0].properties.value is required",
        );
        bad(
            r#"{"name":"X","type":"Dynamic","properties":{}}"#.into(),
            "[0].properties.sourceField is required",
        );
        bad(looked_up("X", ""), "[0].properties.sourceField must not be empty");
        bad(
            fixed("X Y", "v", false),
            "[0].name must be an HTTP header name of at most 256 letters, was \"X Y\"",
        );
        bad(
            fixed("Aeg-X", "v", false),
            "[0].name must not begin with aeg-, which is reserved, was \"Aeg-X\"",
        );
        bad(
            fixed("HOST", "v", false),
            "[0].name must not be a header that the delivery itself sets, was \"HOST\"",
        );
        bad(
            fixed("X", "a\\r\\nb", false),
            "[0].properties.value must be a header value: visible ASCII, spaces and tabs",
        );
        bad(
            fixed("X", &"x".repeat(4097), false),
            "[0].properties.value must not be longer than 4096 bytes, was 4097",
        );
        bad(
            fixed("X", "Hidden", true),
            "[0].properties.value is masked: give the secret itself",
        );
        bad(
            [fixed("X-a", "v", false), looked_up("x-A", "f")].join(","),
            "[1].name is given twice: \"x-A\"",
        );
        let many: Vec<_> = (0..11).map(|i| fixed(&format!("X{i}"), "v", false)).collect();
        check(
            Road::Azure,
            "WebHook",
            &hook("", &many[..10]),
            &hook("", &many[..10]),
        );
        bad(many.join(","), " must not have more than 10 attributes, had 11");
    }

    #[test]
    fn some_attributes_belong_to_some_destinations() {
        let aad = r#","azureActiveDirectoryTenantId":"t","azureActiveDirectoryApplicationIdOrUri":"a""#;
        check(
            Road::Azure,
            "WebHook",
            &hook(aad, &[fixed("authorization", "x", true)]),
            "@.deliveryAttributeMappings[0].name must not be Authorization: Azure Active Directory sets it",
        );
        let at = |rest: &str, attributes: &[String]| {
            let id = format!("/subscriptions/s/resourceGroups/g/providers/{rest}");
            format!(
                r#"{{"resourceId":"{id}","deliveryAttributeMappings":[{}]}}"#,
                attributes.join(",")
            )
        };
        let function = "Microsoft.Web/sites/s/functions/f";
        check(
            Road::Azure,
            "AzureFunction",
            &at(function, &[fixed("Authorization", "x", true)]),
            "@.deliveryAttributeMappings[0].name must not be Authorization: only a WebHook may set it",
        );
        let queue = "Microsoft.ServiceBus/namespaces/n/queues/q";
        let message = at(queue, &[looked_up("MessageId", "id"), fixed("Host", "x", false)]);
        check(Road::Azure, "ServiceBusQueue", &message, &message);
        check(
            Road::Azure,
            "ServiceBusQueue",
            &at(queue, &[fixed("messageid", "x", false)]),
            "@.deliveryAttributeMappings[0].type must be Dynamic for MessageId",
        );
        check(
            Road::Azure,
            "ServiceBusQueue",
            &at(
                queue,
                &[looked_up("MessageId", "id"), looked_up("SessionId", "id")],
            ),
            "@.deliveryAttributeMappings must not set both SessionId and MessageId",
        );
    }

    // Create a subscription, then send its own answer back.
    #[test]
    fn masks_stand_for_the_secrets_that_are_there() {
        let limits = ResourceLimits::default();
        let of = |kind: &str, properties: &str| {
            format!(r#"{{"endpointType":"{kind}","properties":{properties}}}"#)
        };
        let first = of("WebHook", &hook("", &[fixed("X", "hunter2", true)]));
        let before = subscription(Road::Azure, &limits, &first, None).unwrap();
        let again = |properties: &str| {
            let destination = of("WebHook", properties);
            let after = subscription(Road::Azure, &limits, &destination, Some(&before));
            after
                .map(|after| after.destination == before.destination)
                .map_err(|error| error.reason)
        };
        let masked = hook("", &[fixed("x", "Hidden", true)]).replace("\"x\"", "\"X\"");
        assert_eq!(again(&masked), Ok(true));
        assert_eq!(again(&masked.replace("https://a/x", "https://a/y")), Ok(false));
        // Only a change may omit the URL.
        assert_eq!(
            again(&masked.replace("\"https://a/x\"", "null")),
            Err("is required".into())
        );
        // Where clients cannot read secrets, the secrets do not follow a subscription to another
        // server.
        let elsewhere = of("WebHook", &masked.replace("https://a/x", "https://evil/x"));
        for (road, follows) in [(Road::Azure, true), (Road::Edge, false), (Road::Config, false)] {
            let after = subscription(road, &limits, &elsewhere, Some(&before));
            assert_eq!(after.is_ok(), follows, "{road:?}");
        }

        let url = "https://t.eventgrid.azure.net/api/events?api-version=2018-01-01";
        let grid = |url: &str, key: &str| {
            of(
                "EventGrid",
                &format!(r#"{{"endpointUrl":"{url}","sasKey":"{key}"}}"#),
            )
        };
        let before = subscription(Road::Edge, &limits, &grid(url, "hunter2"), None).unwrap();
        let after = subscription(Road::Edge, &limits, &grid(url, "Hidden"), Some(&before)).unwrap();
        assert_eq!(after.destination, before.destination);
        let elsewhere = grid(&url.replace("//t.", "//u."), "Hidden");
        assert!(subscription(Road::Edge, &limits, &elsewhere, Some(&before)).is_err());

        let hub = |text: &str| of("EventHub", &format!(r#"{{"connectionString":"{text}"}}"#));
        let before = subscription(Road::Edge, &limits, &hub("Endpoint=sb://n/;EntityPath=e"), None).unwrap();
        let after = subscription(Road::Edge, &limits, &hub("Hidden"), Some(&before)).unwrap();
        assert_eq!(after.destination, before.destination);
        let queue = hub("Hidden").replace("EventHub", "ServiceBusQueue");
        assert!(subscription(Road::Edge, &limits, &queue, Some(&before)).is_err());
    }
}
