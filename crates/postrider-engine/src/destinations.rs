//! Resolves destinations that subscriptions only name: storage queues, functions, brokers.

use crate::attempt::{DeliveryMethod, broker, queue, sign};
use crate::masking::ConfiguredSecret;
use broker::{BrokerAccess, BrokerEntity, BrokerKind};
use http::Uri;
use http::header::HeaderValue;
use postrider_core::connection::part;
use postrider_core::ids::Secret;
use postrider_core::profile::EndpointKind;
use postrider_core::subscription::{BrokerAddress as Entity, DeliveryAttribute, Destination};
use queue::StorageQueueTarget;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The configured destinations. Immutable while the server runs.
#[derive(Clone, Debug, Default)]
pub struct ConfiguredDestinations {
    /// By name.
    accounts: BTreeMap<String, QueueAccount>,
    /// By resource id in lower case.
    resources: BTreeMap<String, ConfiguredResource>,
}

/// A storage account with queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueAccount {
    pub name: String,
    /// The endpoint of the account's queues.
    pub endpoint: String,
    /// Base64.
    pub key: Secret,
    /// Whether a missing queue is created.
    pub create_queues: bool,
}

/// A function, an event hub, a Service Bus queue or topic, or a hybrid connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredResource {
    pub id: String,
    /// A function's URL includes its query, which may hold a key.
    pub url: Secret,
    pub key_name: Option<String>,
    pub key: Option<Secret>,
}

/// How to reach a destination.
pub struct DestinationAccess {
    pub url: Arc<Uri>,
    pub kind: EndpointKind,
    pub(crate) way: DeliveryMethod,
    /// Sent with every request to a function.
    pub function_key: Option<HeaderValue>,
    /// Secrets from the configuration that requests carry, to be masked in answers.
    pub(crate) secrets: Box<[ConfiguredSecret]>,
}

/// Why a destination cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreachableDestination {
    /// The field at fault, relative to the destination: `properties.resourceId`.
    pub field: &'static str,
    pub reason: String,
}

const RESOURCE_ID: &str = "properties.resourceId";
const CONNECTION_STRING: &str = "properties.connectionString";

/// Azurite's well-known account: name, key and queue endpoint.
const DEVELOPMENT: [&str; 3] = [
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "http://127.0.0.1:10001/devstoreaccount1",
];

impl ConfiguredDestinations {
    pub fn new(accounts: Vec<QueueAccount>, resources: Vec<ConfiguredResource>) -> ConfiguredDestinations {
        ConfiguredDestinations {
            accounts: accounts.into_iter().map(|one| (one.name.clone(), one)).collect(),
            resources: resources
                .into_iter()
                .map(|one| (one.id.to_lowercase(), one))
                .collect(),
        }
    }

    pub fn reach(&self, destination: &Destination) -> Result<DestinationAccess, UnreachableDestination> {
        match destination {
            Destination::WebHook(hook) => {
                let url = parse(hook.url.expose()).ok_or_else(|| no_url("properties.endpointUrl"))?;
                Ok(DestinationAccess::plain(url, EndpointKind::WebHook))
            }
            Destination::EventGrid { url, .. } => {
                let url = parse(url).ok_or_else(|| no_url("properties.endpointUrl"))?;
                Ok(DestinationAccess::plain(url, EndpointKind::AzureResource))
            }
            Destination::EdgeHub { .. } => Err(UnreachableDestination {
                field: "endpointType",
                reason: "EdgeHub is not supported by this server: it is no module of an IoT Edge device"
                    .into(),
            }),
            Destination::AzureFunction { resource, .. } => {
                let known = self.resource(resource, "/microsoft.web/")?;
                let url = parse(known.url.expose()).ok_or_else(|| no_url(RESOURCE_ID))?;
                let key = known.key.as_ref().map(|key| HeaderValue::try_from(key.expose()));
                let mut function_key = key.transpose().map_err(|_| no_header(RESOURCE_ID))?;
                if let Some(key) = &mut function_key {
                    key.set_sensitive(true);
                }
                let mut secrets = vec![ConfiguredSecret::Url(known.url.clone())];
                secrets.extend(known.key.clone().map(ConfiguredSecret::Value));
                Ok(DestinationAccess {
                    function_key,
                    secrets: secrets.into(),
                    ..DestinationAccess::plain(url, EndpointKind::AzureResource)
                })
            }
            Destination::StorageQueue {
                resource,
                queue,
                message_ttl_secs,
            } => {
                let time_to_live = message_ttl_secs.unwrap_or(queue::TIME_TO_LIVE_SECS);
                let queue = if resource.contains('=') {
                    queue_by_connection(resource, queue, time_to_live)?
                } else {
                    self.queue(resource, queue, time_to_live)?
                };
                let url = queue.url().clone();
                let reach = DestinationAccess::resource(url, DeliveryMethod::Queue(Arc::new(queue)));
                Ok(reach.with_secret(self.account(resource).map(|account| &account.key)))
            }
            Destination::EventHub { resource, attributes } => {
                self.broker(BrokerKind::EventHub, resource, "/microsoft.eventhub/", attributes)
            }
            Destination::ServiceBusQueue { resource, attributes } => self.broker(
                BrokerKind::ServiceBus,
                resource,
                "/microsoft.servicebus/",
                attributes,
            ),
            Destination::ServiceBusTopic { resource, attributes } => self.broker(
                BrokerKind::ServiceBus,
                resource,
                "/microsoft.servicebus/",
                attributes,
            ),
            Destination::HybridConnection { resource, .. } => {
                let (field, url, access) = self.entity(resource, "/microsoft.relay/")?;
                let parsed = parse(&url).ok_or_else(|| no_url(field))?;
                let reach = DestinationAccess::resource(parsed, DeliveryMethod::Relay { url, access });
                Ok(reach.with_secret(self.key_of(resource)))
            }
        }
    }

    fn resource(&self, id: &str, provider: &str) -> Result<&ConfiguredResource, UnreachableDestination> {
        if let Some(known) = self.resources.get(&id.to_lowercase()) {
            return Ok(known);
        }
        let alike = self.resources.iter().filter(|(id, _)| id.contains(provider));
        let alike: Vec<&str> = alike.map(|(_, known)| known.id.as_str()).collect();
        let configured = match alike.as_slice() {
            [] => "none of its kind is".to_owned(),
            some => format!("configured are {}", some.join(", ")),
        };
        Err(UnreachableDestination {
            field: RESOURCE_ID,
            reason: format!(
                "names {id:?}, for which the server's configuration has no [[destination]]; {configured}"
            ),
        })
    }

    fn broker(
        &self,
        kind: BrokerKind,
        entity: &Entity,
        provider: &str,
        attributes: &[DeliveryAttribute],
    ) -> Result<DestinationAccess, UnreachableDestination> {
        let (field, url, access) = self.entity(entity, provider)?;
        let broker = BrokerEntity::new(kind, &url, access, attributes).ok_or_else(|| no_url(field))?;
        let reach = DestinationAccess::resource(broker.url().clone(), DeliveryMethod::Broker(broker));
        Ok(reach.with_secret(self.key_of(entity)))
    }

    /// The configured key of an entity.
    fn key_of(&self, entity: &Entity) -> Option<&Secret> {
        match entity {
            Entity::Resource(id) => self.resources.get(&id.to_lowercase())?.key.as_ref(),
            Entity::Connection(_) => None,
        }
    }

    /// The account with this name or resource id.
    fn account(&self, named: &str) -> Option<&QueueAccount> {
        self.accounts.get(&account_name(named))
    }

    /// The field that names an entity, the entity's URL without a trailing slash, and the
    /// credentials.
    fn entity(
        &self,
        entity: &Entity,
        provider: &str,
    ) -> Result<(&'static str, String, BrokerAccess), UnreachableDestination> {
        match entity {
            Entity::Connection(connection) => {
                let (url, access) = entity_by_connection(connection.expose())?;
                Ok((CONNECTION_STRING, url, access))
            }
            Entity::Resource(id) => {
                let known = self.resource(id, provider)?;
                let access = match (&known.key_name, &known.key) {
                    (Some(name), Some(key)) => {
                        BrokerAccess::Key(sign::ServiceBusKey::new(name, key.expose()))
                    }
                    _ => BrokerAccess::Open,
                };
                let url = known.url.expose().trim_end_matches('/').to_owned();
                Ok((RESOURCE_ID, url, access))
            }
        }
    }

    fn queue(
        &self,
        account: &str,
        queue: &str,
        time_to_live: i64,
    ) -> Result<StorageQueueTarget, UnreachableDestination> {
        let name = account_name(account);
        let Some(known) = self.account(account) else {
            let configured = match self.accounts.keys().map(String::as_str).collect::<Vec<_>>() {
                some if some.is_empty() => "none is".to_owned(),
                some => format!("configured are {}", some.join(", ")),
            };
            return Err(UnreachableDestination {
                field: RESOURCE_ID,
                reason: format!(
                    "names storage account {name:?}, which is not configured as one with queues \
                     ([[storage_account]] of kind \"azure\"); {configured}"
                ),
            });
        };
        let key = sign::StorageAccountKey::new(&known.name, known.key.expose());
        let key = key.ok_or_else(|| UnreachableDestination {
            field: RESOURCE_ID,
            reason: format!("names storage account {name:?}, whose key is not base64"),
        })?;
        let endpoint = known.endpoint.trim_end_matches('/');
        let access = queue::QueueAccess::Key(key);
        StorageQueueTarget::new(endpoint, queue, time_to_live, access, "", known.create_queues)
            .ok_or_else(|| no_url(RESOURCE_ID))
    }
}

impl DestinationAccess {
    fn plain(url: Arc<Uri>, kind: EndpointKind) -> DestinationAccess {
        DestinationAccess {
            url,
            kind,
            way: DeliveryMethod::Plain,
            function_key: None,
            secrets: Box::default(),
        }
    }

    fn with_secret(self, secret: Option<&Secret>) -> DestinationAccess {
        let secrets = secret.cloned().map(ConfiguredSecret::Value);
        DestinationAccess {
            secrets: secrets.into_iter().collect(),
            ..self
        }
    }

    fn resource(url: Arc<Uri>, way: DeliveryMethod) -> DestinationAccess {
        DestinationAccess {
            way,
            ..DestinationAccess::plain(url, EndpointKind::AzureResource)
        }
    }

    /// A destination that is no longer configured. Attempts fail and are treated like any other
    /// failure, so that its events do not pile up.
    pub(crate) fn nowhere(why: &UnreachableDestination) -> DestinationAccess {
        let url = Arc::new(Uri::from_static("http://not-configured.invalid/"));
        DestinationAccess::resource(
            url,
            DeliveryMethod::Unreachable(format!("{} {}", why.field, why.reason)),
        )
    }
}

/// The name of a storage account from its name or its resource id.
fn account_name(account: &str) -> String {
    account.rsplit('/').next().unwrap_or(account).to_lowercase()
}

fn no_url(field: &'static str) -> UnreachableDestination {
    UnreachableDestination {
        field,
        reason: "leads to no URL that requests can be sent to".into(),
    }
}

fn no_header(field: &'static str) -> UnreachableDestination {
    UnreachableDestination {
        field,
        reason: "has a key that cannot be sent in a header".into(),
    }
}

fn parse(text: &str) -> Option<Arc<Uri>> {
    let url: Uri = text.parse().ok()?;
    let known = matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some();
    known.then(|| Arc::new(url))
}

fn connection_lacks(what: &str) -> UnreachableDestination {
    UnreachableDestination {
        field: CONNECTION_STRING,
        reason: format!("must be a connection string with {what}"),
    }
}

/// `Endpoint=sb://…;SharedAccessKeyName=…;SharedAccessKey=…;EntityPath=…`
fn entity_by_connection(connection: &str) -> Result<(String, BrokerAccess), UnreachableDestination> {
    let need = |name| part(connection, name).ok_or_else(|| connection_lacks(name));
    let endpoint = need("Endpoint")?.trim_end_matches('/');
    // Connection strings use the AMQP scheme `sb`.
    let endpoint = match endpoint.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("sb") => format!("https://{rest}"),
        Some(_) => endpoint.to_owned(),
        None => format!("https://{endpoint}"),
    };
    let url = format!("{endpoint}/{}", need("EntityPath")?.trim_matches('/'));
    let plain = parse(&url).is_some_and(|parsed| parsed.query().is_none());
    if !plain || url.contains('#') {
        return Err(no_url(CONNECTION_STRING));
    }
    if let Some(token) = part(connection, "SharedAccessSignature") {
        let token = HeaderValue::try_from(token).map_err(|_| no_header(CONNECTION_STRING))?;
        return Ok((url, BrokerAccess::Token(token)));
    }
    let key = sign::ServiceBusKey::new(need("SharedAccessKeyName")?, need("SharedAccessKey")?);
    Ok((url, BrokerAccess::Key(key)))
}

/// `DefaultEndpointsProtocol=https;AccountName=…;AccountKey=…;EndpointSuffix=core.windows.net`
fn queue_by_connection(
    connection: &str,
    queue: &str,
    time_to_live: i64,
) -> Result<StorageQueueTarget, UnreachableDestination> {
    let given = |name| part(connection, name);
    let development = given("UseDevelopmentStorage").is_some_and(|said| said.eq_ignore_ascii_case("true"));
    let otherwise = |index: usize| development.then_some(DEVELOPMENT[index]);
    let account = given("AccountName").or(otherwise(0));
    if account.is_some_and(|name| !name.bytes().all(|b| b.is_ascii_alphanumeric())) {
        return Err(connection_lacks("an AccountName of letters and digits"));
    }
    let endpoint = given("QueueEndpoint").or(otherwise(2)).map(str::to_owned);
    let endpoint = match (endpoint, account) {
        (Some(endpoint), _) => endpoint,
        (None, Some(account)) => {
            let scheme = given("DefaultEndpointsProtocol").unwrap_or("https");
            let suffix = given("EndpointSuffix").unwrap_or("core.windows.net");
            format!("{scheme}://{account}.queue.{suffix}")
        }
        (None, None) => return Err(connection_lacks("AccountName or QueueEndpoint")),
    };
    let endpoint = endpoint.trim_end_matches('/');
    let plain = parse(endpoint).is_some_and(|parsed| parsed.query().is_none());
    if !plain || endpoint.contains('#') {
        return Err(no_url(CONNECTION_STRING));
    }
    let (access, signature) = match (
        given("AccountKey").or(otherwise(1)),
        given("SharedAccessSignature"),
    ) {
        (Some(key), _) => {
            let account = account.ok_or_else(|| connection_lacks("AccountName"))?;
            let key = sign::StorageAccountKey::new(account, key)
                .ok_or_else(|| connection_lacks("an AccountKey in base64"))?;
            (queue::QueueAccess::Key(key), "")
        }
        (None, Some(signature)) => (queue::QueueAccess::Signature, signature.trim_start_matches('?')),
        (None, None) => return Err(connection_lacks("AccountKey or SharedAccessSignature")),
    };
    StorageQueueTarget::new(endpoint, queue, time_to_live, access, signature, false)
        .ok_or_else(|| no_url(CONNECTION_STRING))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: &str = "/subscriptions/s/resourceGroups/g/providers";

    fn known() -> ConfiguredDestinations {
        let resource = |id: &str, url: &str| ConfiguredResource {
            id: format!("{GROUP}/{id}"),
            url: Secret::new(url),
            key_name: Some("send".into()),
            key: Some(Secret::new("k")),
        };
        let account = QueueAccount {
            name: "devstoreaccount1".into(),
            endpoint: "http://127.0.0.1:10001/devstoreaccount1/".into(),
            key: Secret::new("a2V5"),
            create_queues: true,
        };
        let function = ConfiguredResource {
            key_name: None,
            ..resource(
                "Microsoft.Web/sites/app/functions/fn",
                "http://127.0.0.1:7071/api/fn?code=c",
            )
        };
        let hub = "Microsoft.EventHub/namespaces/ns/eventhubs/hub";
        let relay = "Microsoft.Relay/namespaces/ns/hybridConnections/hc";
        ConfiguredDestinations::new(
            vec![account],
            vec![
                function,
                resource(hub, "https://ns.example/hub/"),
                resource(relay, "https://ns.example/hc"),
            ],
        )
    }

    /// Checks the URL that requests go to, or the field at fault and the reason.
    fn check(destination: &Destination, expected: &str) {
        let told = match known().reach(destination) {
            Ok(reach) => {
                assert_eq!(reach.kind, EndpointKind::AzureResource);
                reach.url.to_string()
            }
            Err(why) => format!("{}: {}", why.field, why.reason),
        };
        assert_eq!(told.replace(GROUP, "…"), expected);
    }

    fn hub(resource: Entity) -> Destination {
        Destination::EventHub {
            resource,
            attributes: Vec::new(),
        }
    }

    fn queue(resource: &str, message_ttl_secs: Option<i64>) -> Destination {
        Destination::StorageQueue {
            resource: resource.into(),
            queue: "orders".into(),
            message_ttl_secs,
        }
    }

    #[test]
    fn resources_are_found_whatever_their_case() {
        let id = format!("{GROUP}/microsoft.eventhub/Namespaces/NS/eventhubs/Hub");
        check(
            &hub(Entity::Resource(id)),
            "https://ns.example/hub/messages?api-version=2014-01",
        );
        check(
            &Destination::AzureFunction {
                resource: format!("{GROUP}/Microsoft.Web/sites/APP/functions/fn"),
                batching: Default::default(),
                attributes: Vec::new(),
            },
            "http://127.0.0.1:7071/api/fn?code=c",
        );
        check(
            &Destination::HybridConnection {
                resource: Entity::Resource(format!(
                    "{GROUP}/Microsoft.Relay/namespaces/ns/hybridConnections/hc"
                )),
                attributes: Vec::new(),
            },
            "https://ns.example/hc",
        );
        check(
            &hub(Entity::Resource("/other".into())),
            "properties.resourceId: names \"/other\", for which the server's configuration has no [[destination]]; \
             configured are …/Microsoft.EventHub/namespaces/ns/eventhubs/hub",
        );
        check(
            &Destination::ServiceBusQueue {
                resource: Entity::Resource("/other".into()),
                attributes: Vec::new(),
            },
            "properties.resourceId: names \"/other\", for which the server's configuration has no [[destination]]; \
             none of its kind is",
        );
        check(
            &Destination::EdgeHub { output: "o".into() },
            "endpointType: EdgeHub is not supported by this server: it is no module of an IoT Edge device",
        );
    }

    #[test]
    fn the_secrets_that_requests_carry_are_told() {
        let secrets = |destination: &Destination| known().reach(destination).unwrap().secrets.into_vec();
        let value = |text: &str| ConfiguredSecret::Value(Secret::new(text));
        let function = Destination::AzureFunction {
            resource: format!("{GROUP}/Microsoft.Web/sites/app/functions/fn"),
            batching: Default::default(),
            attributes: Vec::new(),
        };
        let url = ConfiguredSecret::Url(Secret::new("http://127.0.0.1:7071/api/fn?code=c"));
        assert_eq!(secrets(&function), [url, value("k")]);
        let entity = Entity::Resource(format!("{GROUP}/Microsoft.EventHub/namespaces/ns/eventhubs/hub"));
        assert_eq!(secrets(&hub(entity)), [value("k")]);
        assert_eq!(secrets(&queue("devstoreaccount1", None)), [value("a2V5")]);
    }

    #[test]
    fn queues_are_those_of_accounts_that_are_configured() {
        let url = "http://127.0.0.1:10001/devstoreaccount1/orders/messages?messagettl";
        check(&queue("devstoreaccount1", None), &format!("{url}=604800"));
        let id = format!("{GROUP}/Microsoft.Storage/storageAccounts/DevStoreAccount1");
        check(&queue(&id, Some(-1)), &format!("{url}=-1"));
        check(
            &queue("other", Some(60)),
            "properties.resourceId: names storage account \"other\", which is not configured as one with queues \
             ([[storage_account]] of kind \"azure\"); configured are devstoreaccount1",
        );
    }

    #[test]
    fn connection_strings_say_everything_themselves() {
        let hub = |connection: &str, expected: &str| {
            check(&hub(Entity::Connection(Secret::new(connection))), expected);
        };
        let good = "Endpoint=sb://ns.servicebus.windows.net/;EntityPath=hub;";
        let url = "https://ns.servicebus.windows.net/hub/messages?api-version=2014-01";
        hub(&format!("{good}SharedAccessKeyName=n;SharedAccessKey=k="), url);
        hub(
            &format!("{good}SharedAccessSignature=SharedAccessSignature sr=a&sig=b"),
            url,
        );
        hub(
            "Endpoint=http://127.0.0.1:9;EntityPath=/a/b/;SharedAccessKeyName=n;SharedAccessKey=k",
            "http://127.0.0.1:9/a/b/messages?api-version=2014-01",
        );
        let lacks =
            |what: &str| format!("properties.connectionString: must be a connection string with {what}");
        hub(&format!("{good}SharedAccessKeyName=n"), &lacks("SharedAccessKey"));
        hub(good, &lacks("SharedAccessKeyName"));
        let nothing = "properties.connectionString: leads to no URL that requests can be sent to";
        hub("Endpoint=sb://a b/;EntityPath=h", nothing);
        hub("Endpoint=ftp://a/;EntityPath=h", nothing);
        hub("Endpoint=sb://a/;EntityPath=h?x", nothing);

        let queue = |connection: &str, expected: &str| check(&queue(connection, Some(5)), expected);
        queue(
            "AccountName=acc;AccountKey=a2V5",
            "https://acc.queue.core.windows.net/orders/messages?messagettl=5",
        );
        queue(
            "UseDevelopmentStorage=true",
            "http://127.0.0.1:10001/devstoreaccount1/orders/messages?messagettl=5",
        );
        queue(
            "DefaultEndpointsProtocol=http;AccountName=acc;AccountKey=a2V5;EndpointSuffix=example",
            "http://acc.queue.example/orders/messages?messagettl=5",
        );
        queue(
            "QueueEndpoint=https://q.example/;SharedAccessSignature=sv=1&sig=s",
            "https://q.example/orders/messages?messagettl=5&sv=1&sig=s",
        );
        queue("AccountName=acc", &lacks("AccountKey or SharedAccessSignature"));
        queue("AccountName=acc;AccountKey=?", &lacks("an AccountKey in base64"));
        queue(
            "AccountName=a/b;AccountKey=a2V5",
            &lacks("an AccountName of letters and digits"),
        );
        queue(
            "QueueEndpoint=https://q.example/;AccountKey=a2V5",
            &lacks("AccountName"),
        );
    }

    #[test]
    fn a_key_shows_nothing() {
        let shown = format!("{:?}", known());
        assert!(!shown.contains("code=c") && !shown.contains("a2V5"), "{shown}");
    }
}
