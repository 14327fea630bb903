//! Every setting, its type and its default. `default.toml` explains them to the operator.

use super::custom::ProfileCustom;
use super::declared::{self, DeclaredDomain, DeclaredSubscription, DeclaredSystemTopic, DeclaredTopic};
use super::destination::RegisteredDestination;
use super::duration;
use super::egress::ProxyUrl;
use super::jetstream::JetStreamConfig;
use super::nearest;
use super::secret::ConfigSecret;
use super::storage::StorageAccountConfig;
use super::traces::TracesConfig;
use ipnet::IpNet;
use postrider_core::subscription::BatchDefaults;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Names of the standard profiles: Event Grid's behaviours over the years.
pub const STANDARD_PROFILES: [&str; 6] = [
    "cloud-2018",
    "cloud-2019",
    "cloud-2020",
    "cloud-2021",
    "cloud-current",
    "edge",
];

/// Standard profiles and the operator's own.
pub const PROFILES: [&str; 7] = {
    let [a, b, c, d, e, f] = STANDARD_PROFILES;
    [a, b, c, d, e, f, "custom"]
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Default profile, one of [`PROFILES`], where neither the subscription nor its topic names
    /// one.
    #[serde(deserialize_with = "profile")]
    pub profile: String,
    pub data_dir: PathBuf,
    /// `None`: one per core.
    pub threads: Option<usize>,
    pub listen: ListenConfig,
    pub azure: AzureConfig,
    pub retry: RetryJitterConfig,
    pub batches: BatchConfig,
    pub probation: ProbationConfig,
    pub dead_letter: DeadLetterConfig,
    pub validation: ValidationConfig,
    pub egress: EgressConfig,
    pub edge: EdgeApiConfig,
    pub store: StorageConfig,
    pub secrets: SecretsConfig,
    pub recorder: RecorderConfig,
    pub audit: AuditConfig,
    pub metrics: MetricsConfig,
    pub traces: TracesConfig,
    pub limits: LimitsConfig,
    pub throttle: ThrottleConfig,
    pub quotas: QuotasConfig,
    pub shutdown: ShutdownConfig,
    pub log: LogConfig,
    pub transport: TransportConfig,
    /// Definition of the profile "custom". `None`: the profile does not exist.
    pub profile_custom: Option<ProfileCustom>,
    /// External issuer whose tokens are accepted besides our own.
    pub oidc: Option<OidcConfig>,
    #[serde(rename = "client", skip_serializing_if = "Vec::is_empty")]
    pub clients: Vec<ClientSection>,
    #[serde(rename = "storage_account", skip_serializing_if = "Vec::is_empty")]
    pub storage_accounts: Vec<StorageAccountConfig>,
    #[serde(rename = "destination", skip_serializing_if = "Vec::is_empty")]
    pub destinations: Vec<RegisteredDestination>,
    #[serde(rename = "topic", skip_serializing_if = "Vec::is_empty")]
    pub topics: Vec<DeclaredTopic>,
    #[serde(rename = "domain", skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<DeclaredDomain>,
    #[serde(rename = "system_topic", skip_serializing_if = "Vec::is_empty")]
    pub system_topics: Vec<DeclaredSystemTopic>,
    /// Subscriptions declared beside the topics, each with its topic's name.
    #[serde(
        rename = "subscription",
        with = "declared::flat",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub subscriptions: Vec<(String, DeclaredSubscription)>,
}

impl Config {
    /// Declared subscriptions, nested ones first, each with its topic's name.
    pub fn declared_subscriptions(&self) -> impl Iterator<Item = (&str, &DeclaredSubscription)> {
        let nested = self.topics.iter().flat_map(|topic| {
            topic
                .subscriptions
                .iter()
                .map(|subscription| (topic.name.as_str(), subscription))
        });
        nested.chain(
            self.subscriptions
                .iter()
                .map(|(topic, subscription)| (topic.as_str(), subscription)),
        )
    }

    /// Quotas in force.
    pub fn quotas_in_force(&self) -> postrider_api::quotas::Quotas {
        use postrider_api::quotas::Quotas as InForce;
        let default = match self.profile.starts_with("cloud-") {
            true => InForce::AZURE,
            false => InForce::GENEROUS,
        };
        let given = &self.quotas;
        InForce {
            topics: given.topics.unwrap_or(default.topics),
            domains: given.domains.unwrap_or(default.domains),
            system_topics: given.system_topics.unwrap_or(default.system_topics),
            subscriptions_per_topic: given
                .subscriptions_per_topic
                .unwrap_or(default.subscriptions_per_topic),
            subscriptions_per_domain: given
                .subscriptions_per_domain
                .unwrap_or(default.subscriptions_per_domain),
            domain_topics: given.domain_topics.unwrap_or(default.domain_topics),
            edge_topics: given.edge_topics.unwrap_or(default.edge_topics),
            edge_subscriptions_per_topic: given
                .edge_subscriptions_per_topic
                .unwrap_or(default.edge_subscriptions_per_topic),
        }
    }

    /// Full resource id of a system topic's source.
    pub fn source_of(&self, topic: &DeclaredSystemTopic) -> String {
        if topic.source.starts_with('/') {
            return topic.source.clone();
        }
        let (subscription, group) = (&self.azure.subscription, &self.azure.resource_group);
        format!(
            "/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Storage/storageAccounts/{}",
            topic.source
        )
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            profile: "cloud-2021".into(),
            data_dir: "./postrider-data".into(),
            threads: None,
            listen: ListenConfig::default(),
            azure: AzureConfig::default(),
            retry: RetryJitterConfig::default(),
            batches: BatchConfig::default(),
            probation: ProbationConfig::default(),
            dead_letter: DeadLetterConfig::default(),
            validation: ValidationConfig::default(),
            egress: EgressConfig::default(),
            edge: EdgeApiConfig::default(),
            store: StorageConfig::default(),
            secrets: SecretsConfig::default(),
            recorder: RecorderConfig::default(),
            audit: AuditConfig::default(),
            metrics: MetricsConfig::default(),
            traces: TracesConfig::default(),
            limits: LimitsConfig::default(),
            throttle: ThrottleConfig::default(),
            quotas: QuotasConfig::default(),
            shutdown: ShutdownConfig::default(),
            log: LogConfig::default(),
            transport: TransportConfig::default(),
            profile_custom: None,
            oidc: None,
            clients: Vec::new(),
            storage_accounts: Vec::new(),
            destinations: Vec::new(),
            topics: Vec::new(),
            domains: Vec::new(),
            system_topics: Vec::new(),
            subscriptions: Vec::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenConfig {
    /// `None`: off.
    #[serde(with = "address")]
    pub https: Option<SocketAddr>,
    /// `None`: off.
    #[serde(with = "address")]
    pub http: Option<SocketAddr>,
    /// Base of the endpoint and validation URLs that the server hands out, without a trailing
    /// slash. `None`: the address that the request came to.
    #[serde(deserialize_with = "base_url")]
    pub public_url: Option<String>,
    /// Further DNS names and addresses for the server certificate.
    pub names: Vec<String>,
    /// Permits plain http on an address that others can reach, without a warning.
    pub allow_plain_http: bool,
    /// The operator's own certificate chain (PEM), instead of one from the local CA.
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
}

impl Default for ListenConfig {
    fn default() -> ListenConfig {
        ListenConfig {
            https: Some(SocketAddr::from(([127, 0, 0, 1], 4438))),
            http: Some(SocketAddr::from(([127, 0, 0, 1], 5888))),
            public_url: None,
            names: Vec::new(),
            allow_plain_http: false,
            cert_file: None,
            key_file: None,
        }
    }
}

/// Settings of the management API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AzureConfig {
    pub subscription: String,
    pub tenant: String,
    pub resource_group: String,
    pub location: String,
    /// Client whose tokens anyone on this machine may have. `None`: no such tokens.
    pub managed_identity: Option<String>,
}

impl Default for AzureConfig {
    fn default() -> AzureConfig {
        AzureConfig {
            subscription: "00000000-0000-0000-0000-000000000001".into(),
            tenant: "00000000-0000-0000-0000-000000000002".into(),
            resource_group: "rg1".into(),
            location: "westus2".into(),
            managed_identity: None,
        }
    }
}

/// Client that may get a token to manage and publish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientSection {
    pub id: String,
    pub secret: ConfigSecret,
    #[serde(default)]
    pub role: ClientRole,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClientRole {
    #[default]
    Owner,
    Contributor,
    Reader,
    DataSender,
}

/// An external issuer of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OidcConfig {
    /// Issuer exactly as in its tokens.
    pub issuer: String,
    pub audience: String,
    /// `None`: taken from the issuer's discovery document.
    #[serde(default)]
    pub jwks_url: Option<String>,
    #[serde(default = "role_claim")]
    pub role_claim: String,
    /// `None`: the first of azp, appid, client_id and sub.
    #[serde(default)]
    pub client_claim: Option<String>,
    /// Roles by the value of the role claim. Empty: the claim holds our own role names.
    #[serde(default)]
    pub roles: BTreeMap<String, ClientRole>,
}

fn role_claim() -> String {
    "roles".into()
}

/// Randomness of the waits between attempts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryJitterConfig {
    /// Replaces the jitter of every profile that has one; 0 gives exact instants. `None`: each
    /// profile's own.
    pub jitter_percent: Option<u32>,
    /// Equal seeds give equal waits. `None`: a new seed at every start.
    #[serde(serialize_with = "seed")]
    pub jitter_seed: Option<u64>,
    /// Statuses after which a batch is sent again in halves, in every profile. `None`: each
    /// profile's own.
    pub split_batches_on: Option<Vec<u16>>,
}

/// Default batch limits for subscriptions that set only one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    pub default_events: u32,
    /// `None`: 64, and the edge module's 1033 for subscriptions made through the edge API.
    pub default_kilobytes: Option<u32>,
}

/// Probation, in every profile that has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProbationConfig {
    /// Number of different deliveries that must fail, with no success between, before probation
    /// begins.
    pub failures: u32,
    /// Upper bound of the probation delay, which each failed probe doubles.
    #[serde(with = "duration")]
    pub max: Duration,
}

impl Default for BatchConfig {
    fn default() -> BatchConfig {
        let documented = BatchDefaults::default();
        BatchConfig {
            default_events: documented.cloud.events_max,
            default_kilobytes: None,
        }
    }
}

impl Default for ProbationConfig {
    fn default() -> ProbationConfig {
        let documented = postrider_core::probation::ProbationRules::DOCUMENTED;
        ProbationConfig {
            failures: documented.failures,
            max: documented.max,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeadLetterConfig {
    /// Delay from the last attempt to the write. `None`: the value of the subscription's profile.
    #[serde(with = "duration::optional")]
    pub delay: Option<Duration>,
    /// `Duration::MAX`: never.
    #[serde(with = "duration")]
    pub give_up_after: Duration,
    /// Dead-letter destination of subscriptions that name none: an account, or `account/container`.
    pub default: Option<String>,
}

impl Default for DeadLetterConfig {
    fn default() -> DeadLetterConfig {
        DeadLetterConfig {
            delay: None,
            give_up_after: Duration::from_secs(4 * 60 * 60),
            default: None,
        }
    }
}

/// Handshakes with webhooks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ValidationConfig {
    pub enabled: bool,
    /// Time in which the validation URL may be visited. `None`: the value of the subscription's
    /// profile.
    #[serde(with = "duration::optional")]
    pub window: Option<Duration>,
}

impl Default for ValidationConfig {
    fn default() -> ValidationConfig {
        ValidationConfig {
            enabled: true,
            window: None,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EgressConfig {
    pub policy: EgressPolicyKind,
    #[serde(with = "networks")]
    pub allow: Vec<IpNet>,
    #[serde(with = "networks")]
    pub deny: Vec<IpNet>,
    /// `None`: no proxy; every connection is direct.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<ProxyUrl>,
    /// Hosts that are reached without the proxy.
    pub no_proxy: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EgressPolicyKind {
    /// Public addresses and https only.
    Internet,
    /// Also private networks, loopback and http; never link-local or metadata addresses.
    #[default]
    Private,
    /// Exactly what `allow` and `deny` permit.
    Custom,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EdgeApiConfig {
    /// `None`: as the edge module's `sasKeys` say.
    pub require_auth: Option<bool>,
    /// Permits an edge API without keys on an address that others can reach.
    pub allow_open: bool,
    /// On the edge profile only 200 is success; 201 to 204 are then failures.
    pub strict_success: bool,
    /// Hosts, besides Azure's, that destinations of type EventGrid may have.
    pub event_grid_hosts: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StorageConfig {
    pub kind: StoreKind,
    /// Interval at which all data of the embedded store is read and verified. `Duration::MAX`:
    /// never.
    #[serde(with = "duration")]
    pub scrub_every: Duration,
    /// Read rate of the scrub.
    pub scrub_bytes_per_second: u64,
    pub jetstream: JetStreamConfig,
}

impl Default for StorageConfig {
    fn default() -> StorageConfig {
        StorageConfig {
            kind: StoreKind::default(),
            scrub_every: Duration::MAX,
            scrub_bytes_per_second: 16 << 20,
            jetstream: JetStreamConfig::default(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreKind {
    #[default]
    Embedded,
    Jetstream,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    pub request_bytes_max: usize,
    pub event_bytes_max: usize,
    pub events_per_request_max: usize,
    pub in_flight_per_endpoint_max: usize,
    /// Memory for all deliveries in flight together.
    pub in_flight_bytes_max: usize,
    /// Publish requests that may wait for the log; further ones are refused.
    pub publish_queue_max: usize,
    /// Memory for the bodies of all publish requests in progress together.
    pub publish_body_bytes_max: usize,
    /// Maximum over all listeners.
    pub connections_max: usize,
    pub connections_per_address_max: usize,
    /// A client that sends almost nothing of a body for this long is answered 408.
    #[serde(with = "duration")]
    pub body_stall_max: Duration,
    /// A client that reads almost nothing of a response for this long is disconnected.
    #[serde(with = "duration")]
    pub response_stall_max: Duration,
    /// Live streams open at once.
    pub streams_max: usize,
    pub streams_per_client_max: usize,
    /// Bytes of one event that the filters of a topic's subscriptions may read in all.
    pub filter_bytes_per_event_max: u64,
    /// An event with more hops than this is in a loop.
    pub hops_max: u32,
    // Limits of a subscription that this file declares.
    pub declared_filters_max: usize,
    pub declared_filter_values_max: usize,
    pub declared_filter_value_chars_max: usize,
}

impl Default for LimitsConfig {
    fn default() -> LimitsConfig {
        LimitsConfig {
            request_bytes_max: 1_536_000,
            event_bytes_max: 1_049_600,
            events_per_request_max: 5_000,
            in_flight_per_endpoint_max: 64,
            in_flight_bytes_max: 256 << 20,
            publish_queue_max: 4_096,
            publish_body_bytes_max: 128 << 20,
            connections_max: 8_192,
            connections_per_address_max: 2_048,
            body_stall_max: Duration::from_secs(10),
            response_stall_max: Duration::from_secs(30),
            streams_max: 64,
            streams_per_client_max: 16,
            filter_bytes_per_event_max: 512 << 20,
            hops_max: postrider_engine::dispatch::HOPS_MAX,
            declared_filters_max: 25,
            declared_filter_values_max: 25,
            declared_filter_value_chars_max: 512,
        }
    }
}

/// Throttling of wrong secrets, keys and tokens, by client address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ThrottleConfig {
    /// Wrong credentials before the first wait; zero: never a wait.
    pub free_attempts: u32,
    #[serde(with = "duration")]
    pub wait_max: Duration,
}

impl Default for ThrottleConfig {
    fn default() -> ThrottleConfig {
        let rules = postrider_api::throttle::ThrottleRules::default();
        ThrottleConfig {
            free_attempts: rules.free_attempts,
            wait_max: rules.wait_max,
        }
    }
}

/// Key that seals stored secrets. Neither set: the server uses its own, in the data directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SecretsConfig {
    pub key: Option<ConfigSecret>,
    pub key_file: Option<PathBuf>,
}

/// Limits on the number of resources. `None`: Azure's documented limit if the profile is one of the
/// cloud's, a generous one otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QuotasConfig {
    pub topics: Option<usize>,
    pub domains: Option<usize>,
    pub system_topics: Option<usize>,
    pub subscriptions_per_topic: Option<usize>,
    pub subscriptions_per_domain: Option<usize>,
    pub domain_topics: Option<usize>,
    pub edge_topics: Option<usize>,
    pub edge_subscriptions_per_topic: Option<usize>,
}

/// Flight recorder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecorderConfig {
    pub enabled: bool,
    /// `Duration::MAX`: until `bytes_max` is reached.
    #[serde(with = "duration")]
    pub keep: Duration,
    /// The oldest recordings are dropped beyond this size.
    pub bytes_max: u64,
}

impl Default for RecorderConfig {
    fn default() -> RecorderConfig {
        RecorderConfig {
            enabled: true,
            keep: Duration::from_secs(3 * 24 * 3600),
            bytes_max: 1 << 30,
        }
    }
}

/// The audit log: who changed what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuditConfig {
    pub enabled: bool,
    /// `Duration::MAX`: until `bytes_max` is reached.
    #[serde(with = "duration")]
    pub keep: Duration,
    /// The oldest lines are dropped beyond this size.
    pub bytes_max: u64,
}

impl Default for AuditConfig {
    fn default() -> AuditConfig {
        AuditConfig {
            enabled: true,
            keep: Duration::from_secs(90 * 24 * 3600),
            bytes_max: 256 << 20,
        }
    }
}

/// Metric names on `/metrics` besides our own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    pub azure_names: bool,
    /// `None`: only if the edge module's own variable asks for them.
    pub edge_names: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownConfig {
    /// Time for attempts in progress to finish.
    #[serde(with = "duration")]
    pub grace: Duration,
}

impl Default for ShutdownConfig {
    fn default() -> ShutdownConfig {
        ShutdownConfig {
            grace: Duration::from_secs(10),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    pub format: LogFormat,
    /// A level, or directives such as `info,postrider_engine=debug`.
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> LogConfig {
        LogConfig {
            format: LogFormat::Auto,
            level: "info".into(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    Auto,
    Text,
    Json,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransportConfig {
    /// CAs (PEM) to trust besides the system's.
    pub extra_ca_files: Vec<PathBuf>,
    /// `None`: the profile's.
    pub user_agent: Option<String>,
}

/// `"127.0.0.1:4438"`, a port on this machine (`4438`, `"localhost:4438"`) or `"off"`.
pub mod address {
    use super::*;
    use serde::Serializer;
    use serde::de::{Unexpected, Visitor};
    use std::fmt;
    use std::net::Ipv4Addr;

    pub fn serialize<S: Serializer>(address: &Option<SocketAddr>, to: S) -> Result<S::Ok, S::Error> {
        match address {
            Some(address) => to.collect_str(address),
            None => to.serialize_str("off"),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
        from.deserialize_any(AddressVisitor)
    }

    struct AddressVisitor;

    impl Visitor<'_> for AddressVisitor {
        type Value = Option<SocketAddr>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an address or a port")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
            if text.eq_ignore_ascii_case("off") {
                return Ok(None);
            }
            read(text).map(Some).ok_or_else(|| {
                E::custom(format!(
                    "\"{text}\" is not an address such as \"127.0.0.1:4438\", a port such as \"4438\", nor \"off\""
                ))
            })
        }

        fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Self::Value, E> {
            self.visit_str(&number.to_string())
        }

        fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Self::Value, E> {
            self.visit_str(&number.to_string())
        }

        fn visit_bool<E: serde::de::Error>(self, truth: bool) -> Result<Self::Value, E> {
            Err(E::invalid_type(Unexpected::Bool(truth), &self))
        }
    }

    pub fn read(text: &str) -> Option<SocketAddr> {
        let here = |port: &str| Some((Ipv4Addr::LOCALHOST, port.parse().ok()?).into());
        match text.rsplit_once(':') {
            None if text.bytes().all(|byte| byte.is_ascii_digit()) => here(text),
            Some((host, port)) if host.eq_ignore_ascii_case("localhost") => here(port),
            _ => text.parse().ok(),
        }
    }
}

fn profile<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    name_among(&PROFILES, from)
}

pub fn standard_profile<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    name_among(&STANDARD_PROFILES, from)
}

fn name_among<'de, D: Deserializer<'de>>(known: &[&str], from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    if known.contains(&name.as_str()) {
        return Ok(name);
    }
    let hint = nearest(&name, known.iter().copied()).map(|near| format!("; did you mean \"{near}\"?"));
    let hint = hint.unwrap_or_default();
    Err(D::Error::custom(format!(
        "\"{name}\" is not one of {}{hint}",
        known.join(", ")
    )))
}

/// TOML has no integers above 2^63; such a seed is written as text.
fn seed<S: serde::Serializer>(seed: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
    match seed {
        Some(seed) => match i64::try_from(*seed) {
            Ok(number) => to.serialize_some(&number),
            Err(_) => to.serialize_some(&seed.to_string()),
        },
        None => to.serialize_none(),
    }
}

/// An absolute http or https URL without query; a trailing slash is dropped.
pub fn base_url<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else {
        return Ok(None);
    };
    let url: Option<http::Uri> = text.parse().ok();
    let fits = url.is_some_and(|url| {
        matches!(url.scheme_str(), Some("http" | "https"))
            && url.host().is_some_and(|host| !host.is_empty())
            && url.query().is_none()
    });
    if !fits || text.contains('#') {
        return Err(D::Error::custom(
            "must be a URL such as \"https://events.example:4438\"",
        ));
    }
    Ok(Some(text.trim_end_matches('/').to_owned()))
}

/// Networks in CIDR notation; a bare address is a network of one.
mod networks {
    use super::*;
    use serde::Serializer;

    pub fn serialize<S: Serializer>(networks: &[IpNet], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(networks.iter().map(IpNet::to_string))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<IpNet>, D::Error> {
        let parse = |text: String| {
            let network = text
                .parse()
                .ok()
                .or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
            network.ok_or_else(|| {
                D::Error::custom(format!("\"{text}\" is not a network such as \"10.0.0.0/8\""))
            })
        };
        Vec::<String>::deserialize(from)?.into_iter().map(parse).collect()
    }
}
