//! The edge module's own variables, so that a deployment manifest works unchanged.
//!
//! Sections are separated by `__` or `:`; case does not matter.

use super::model::{Config, EgressPolicyKind};
use super::secret::{ConfigSecret, MASK};
use super::{ConfigError, nearest};
use postrider_core::profile::EDGE;
use postrider_core::subscription::{BatchDefaults, BatchLimits};
use postrider_wire::resources::{EventGridHostPattern, EventGridHosts, PlainHttp};

/// The module's keys as its documentation spells them.
const KEYS: [&str; 24] = [
    "inbound__serverAuth__tlsPolicy",
    "inbound__serverAuth__serverCert__source",
    "inbound__clientAuth__sasKeys__enabled",
    "inbound__clientAuth__sasKeys__key1",
    "inbound__clientAuth__sasKeys__key2",
    "inbound__clientAuth__clientCert__enabled",
    "inbound__clientAuth__clientCert__source",
    "inbound__clientAuth__clientCert__allowUnknownCA",
    "outbound__clientAuth__clientCert__enabled",
    "outbound__clientAuth__clientCert__source",
    "outbound__webhook__httpsOnly",
    "outbound__webhook__skipServerCertValidation",
    "outbound__webhook__allowUnknownCA",
    "outbound__eventgrid__httpsOnly",
    "outbound__eventgrid__allowInvalidHostnames",
    "broker__defaultMaxDeliveryAttempts",
    "broker__defaultEventTimeToLiveInSeconds",
    "broker__defaultMaxBatchSizeInBytes",
    "broker__defaultMaxEventsPerBatch",
    "broker__logDeliverySuccess",
    "api__deliveryPolicyLimits__maxEventsPerBatch",
    "api__deliveryPolicyLimits__maxpreferredBatchSizeInKilobytes",
    "api__deliveryPolicyLimits__maxBatchSizeInBytes",
    "metrics__reporterType",
];

/// Keys that change the edge profile's defaults for subscriptions without a retry policy.
const RETRY_KEYS: [&str; 2] = [
    "broker__defaultMaxDeliveryAttempts",
    "broker__defaultEventTimeToLiveInSeconds",
];

/// Sections of the module, and the misspelling in its own documentation.
const SECTIONS: [&str; 6] = ["inbound", "outbound", "broker", "api", "metrics", "brokers"];

/// The module's settings, with the module's defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeConfig {
    /// `None`: our own listener settings hold. The module's default would be strict.
    pub tls_policy: Option<TlsPolicy>,
    pub sas_keys: SasKeys,
    pub inbound_client_cert: InboundClientCert,
    pub outbound_client_cert_enabled: bool,
    pub webhook: OutboundWebhook,
    pub event_grid: OutboundEventGrid,
    pub broker: BrokerDefaults,
    pub limits: DeliveryPolicyLimits,
    pub metrics_reporter: MetricsReporter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// HTTPS only.
    Strict,
    /// HTTPS and HTTP.
    Enabled,
    /// HTTP only.
    Disabled,
}

/// When enabled, at least one key is set, and either is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SasKeys {
    pub enabled: bool,
    pub key1: Option<ConfigSecret>,
    pub key2: Option<ConfigSecret>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboundClientCert {
    pub enabled: bool,
    pub allow_unknown_ca: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboundWebhook {
    pub https_only: bool,
    pub skip_server_cert_validation: bool,
    pub allow_unknown_ca: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboundEventGrid {
    /// `None`: the module's default, true, except for hosts in `edge.event_grid_hosts`.
    pub https_only: Option<bool>,
    pub allow_invalid_hostnames: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerDefaults {
    pub default_max_delivery_attempts: Option<u32>,
    pub default_event_time_to_live_in_seconds: Option<u32>,
    pub default_max_batch_size_in_bytes: Option<u32>,
    pub default_max_events_per_batch: Option<u32>,
    pub log_delivery_success: bool,
}

impl BrokerDefaults {
    pub fn attempts_max(&self) -> u32 {
        self.default_max_delivery_attempts.unwrap_or(EDGE.attempts_max)
    }

    pub fn time_to_live_seconds(&self) -> u64 {
        let given = self.default_event_time_to_live_in_seconds;
        given.map_or(EDGE.time_to_live.as_secs(), u64::from)
    }

    /// Whether a variable changes the retry policy of subscriptions made through the edge API.
    pub fn sets_retry_policy(&self) -> bool {
        self.default_max_delivery_attempts.is_some() || self.default_event_time_to_live_in_seconds.is_some()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryPolicyLimits {
    pub max_events_per_batch: u32,
    pub max_preferred_batch_size_in_kilobytes: u32,
    /// Older name of the previous key. Their documented defaults differ by 784 bytes.
    pub max_batch_size_in_bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsReporter {
    None,
    Prometheus,
    Console,
}

impl Default for EdgeConfig {
    fn default() -> EdgeConfig {
        EdgeConfig {
            tls_policy: None,
            sas_keys: SasKeys {
                enabled: false,
                key1: None,
                key2: None,
            },
            inbound_client_cert: InboundClientCert {
                enabled: true,
                allow_unknown_ca: true,
            },
            outbound_client_cert_enabled: true,
            webhook: OutboundWebhook {
                https_only: false,
                skip_server_cert_validation: false,
                allow_unknown_ca: true,
            },
            event_grid: OutboundEventGrid {
                https_only: None,
                allow_invalid_hostnames: false,
            },
            broker: BrokerDefaults {
                default_max_delivery_attempts: None,
                default_event_time_to_live_in_seconds: None,
                default_max_batch_size_in_bytes: None,
                default_max_events_per_batch: None,
                log_delivery_success: false,
            },
            limits: DeliveryPolicyLimits {
                max_events_per_batch: 50,
                max_preferred_batch_size_in_kilobytes: 1_033,
                max_batch_size_in_bytes: 1_058_576,
            },
            metrics_reporter: MetricsReporter::None,
        }
    }
}

/// Reads the module's variables. Returns those of the rest that look like misspelled ones, too.
pub fn read(env: &[(String, String)]) -> Result<(EdgeConfig, Vec<String>), ConfigError> {
    let mut edge = EdgeConfig::default();
    let mut warnings = Vec::new();
    for (name, text) in env {
        let spelled = name.replace(':', "__");
        if let Some(key) = KEYS.into_iter().find(|key| key.eq_ignore_ascii_case(&spelled)) {
            edge.set(key, text.trim())
                .map_err(|reason| ConfigError::new(name, reason))?;
        } else if is_sectioned(&spelled) {
            let hint = nearest(&spelled, KEYS).map(|key| format!("; did you mean {key}?"));
            let hint = hint.unwrap_or_default();
            warnings.push(format!("{name} is not a key of the module{hint}"));
        }
    }
    if edge.sas_keys.enabled && edge.sas_keys.key1.is_none() && edge.sas_keys.key2.is_none() {
        let reason = "is required, or key2, while inbound__clientAuth__sasKeys__enabled is true";
        return Err(ConfigError::new("inbound__clientAuth__sasKeys__key1", reason));
    }
    Ok((edge, warnings))
}

/// Hosts that destinations of type EventGrid may have, and their schemes.
pub fn event_grid_hosts(config: &Config, edge: &EdgeConfig) -> Result<EventGridHosts, ConfigError> {
    let listed = config.edge.event_grid_hosts.iter().enumerate();
    let listed = listed.map(|(index, host)| {
        EventGridHostPattern::parse(host).map_err(|reason| {
            let key = format!("edge.event_grid_hosts[{index}]");
            ConfigError::new(key, format!("{reason}, was \"{host}\""))
        })
    });
    Ok(EventGridHosts {
        listed: listed.collect::<Result<_, _>>()?,
        private: config.egress.policy == EgressPolicyKind::Private,
        any: edge.event_grid.allow_invalid_hostnames,
        http: match edge.event_grid.https_only {
            Some(true) => PlainHttp::Never,
            Some(false) => PlainHttp::AnyHost,
            None if config.egress.policy == EgressPolicyKind::Internet => PlainHttp::Never,
            None => PlainHttp::OwnHosts,
        },
    })
}

/// Batch limits of subscriptions that set only one of them. The module's variables apply to
/// subscriptions made through the edge API.
pub fn batch_defaults(config: &Config, edge: &EdgeConfig) -> BatchDefaults {
    let documented = BatchDefaults::default();
    let given = &config.batches;
    let of_module = edge.broker.default_max_batch_size_in_bytes;
    BatchDefaults {
        cloud: BatchLimits {
            events_max: given.default_events,
            kilobytes: given.default_kilobytes.unwrap_or(documented.cloud.kilobytes),
        },
        edge: BatchLimits {
            events_max: edge
                .broker
                .default_max_events_per_batch
                .unwrap_or(given.default_events),
            kilobytes: of_module
                .map(|bytes| (bytes / 1024).max(1))
                .or(given.default_kilobytes)
                .unwrap_or(documented.edge.kilobytes),
        },
    }
}

/// Names of the retry variables that have no effect because `profile`, the default profile, is not
/// the edge module's.
pub fn ineffective_retry_variables(env: &[(String, String)], profile: &str) -> Vec<String> {
    if profile == "edge" {
        return Vec::new();
    }
    let about_retrying = |name: &str| {
        let spelled = name.replace(':', "__");
        RETRY_KEYS.iter().any(|key| key.eq_ignore_ascii_case(&spelled))
    };
    env.iter()
        .filter(|(name, _)| about_retrying(name))
        .map(|(name, _)| {
            format!(
                "{name} holds for subscriptions that were made through the edge API or are on the edge profile, \
                 not for others: profile is \"{profile}\""
            )
        })
        .collect()
}

fn is_sectioned(name: &str) -> bool {
    name.split_once("__")
        .is_some_and(|(section, _)| SECTIONS.iter().any(|known| known.eq_ignore_ascii_case(section)))
}

impl EdgeConfig {
    fn set(&mut self, key: &'static str, text: &str) -> Result<(), String> {
        match key {
            "inbound__serverAuth__tlsPolicy" => {
                self.tls_policy = Some(one_of(
                    text,
                    [
                        ("strict", TlsPolicy::Strict),
                        ("enabled", TlsPolicy::Enabled),
                        ("disabled", TlsPolicy::Disabled),
                    ],
                )?);
            }
            // Only one source is accepted: there is no security daemon here, and Postrider makes
            // the certificates.
            "inbound__serverAuth__serverCert__source"
            | "inbound__clientAuth__clientCert__source"
            | "outbound__clientAuth__clientCert__source" => one_of(text, [("IoTEdge", ())])?,
            "inbound__clientAuth__sasKeys__enabled" => self.sas_keys.enabled = truth(text)?,
            "inbound__clientAuth__sasKeys__key1" => self.sas_keys.key1 = secret(text),
            "inbound__clientAuth__sasKeys__key2" => self.sas_keys.key2 = secret(text),
            "inbound__clientAuth__clientCert__enabled" => {
                self.inbound_client_cert.enabled = truth(text)?;
            }
            "inbound__clientAuth__clientCert__allowUnknownCA" => {
                self.inbound_client_cert.allow_unknown_ca = truth(text)?;
            }
            "outbound__clientAuth__clientCert__enabled" => {
                self.outbound_client_cert_enabled = truth(text)?;
            }
            "outbound__webhook__httpsOnly" => self.webhook.https_only = truth(text)?,
            "outbound__webhook__skipServerCertValidation" => {
                self.webhook.skip_server_cert_validation = truth(text)?;
            }
            "outbound__webhook__allowUnknownCA" => self.webhook.allow_unknown_ca = truth(text)?,
            "outbound__eventgrid__httpsOnly" => self.event_grid.https_only = Some(truth(text)?),
            "outbound__eventgrid__allowInvalidHostnames" => {
                self.event_grid.allow_invalid_hostnames = truth(text)?;
            }
            "broker__defaultMaxDeliveryAttempts" => {
                self.broker.default_max_delivery_attempts = Some(number(text)?);
            }
            "broker__defaultEventTimeToLiveInSeconds" => {
                self.broker.default_event_time_to_live_in_seconds = Some(number(text)?);
            }
            "broker__defaultMaxBatchSizeInBytes" => {
                self.broker.default_max_batch_size_in_bytes = Some(number(text)?);
            }
            "broker__defaultMaxEventsPerBatch" => {
                self.broker.default_max_events_per_batch = Some(number(text)?);
            }
            "broker__logDeliverySuccess" => self.broker.log_delivery_success = truth(text)?,
            "api__deliveryPolicyLimits__maxEventsPerBatch" => {
                self.limits.max_events_per_batch = number(text)?;
            }
            "api__deliveryPolicyLimits__maxpreferredBatchSizeInKilobytes" => {
                self.limits.max_preferred_batch_size_in_kilobytes = number(text)?;
            }
            "api__deliveryPolicyLimits__maxBatchSizeInBytes" => {
                self.limits.max_batch_size_in_bytes = number(text)?;
            }
            "metrics__reporterType" => {
                self.metrics_reporter = one_of(
                    text,
                    [
                        ("none", MetricsReporter::None),
                        ("prometheus", MetricsReporter::Prometheus),
                        ("console", MetricsReporter::Console),
                    ],
                )?;
            }
            unknown => unreachable!("{unknown} is in KEYS but nobody reads it"),
        }
        Ok(())
    }

    /// Every setting that has a value, with its key, secrets masked.
    pub fn printed(&self) -> Vec<(&'static str, String)> {
        let value = |key: &str| {
            Some(match key {
                "inbound__serverAuth__tlsPolicy" => match self.tls_policy? {
                    TlsPolicy::Strict => "strict".into(),
                    TlsPolicy::Enabled => "enabled".into(),
                    TlsPolicy::Disabled => "disabled".into(),
                },
                "inbound__clientAuth__sasKeys__enabled" => self.sas_keys.enabled.to_string(),
                "inbound__clientAuth__sasKeys__key1" => self.sas_keys.key1.as_ref().map(|_| MASK.into())?,
                "inbound__clientAuth__sasKeys__key2" => self.sas_keys.key2.as_ref().map(|_| MASK.into())?,
                "inbound__clientAuth__clientCert__enabled" => self.inbound_client_cert.enabled.to_string(),
                "inbound__clientAuth__clientCert__allowUnknownCA" => {
                    self.inbound_client_cert.allow_unknown_ca.to_string()
                }
                "outbound__clientAuth__clientCert__enabled" => self.outbound_client_cert_enabled.to_string(),
                "outbound__webhook__httpsOnly" => self.webhook.https_only.to_string(),
                "outbound__webhook__skipServerCertValidation" => {
                    self.webhook.skip_server_cert_validation.to_string()
                }
                "outbound__webhook__allowUnknownCA" => self.webhook.allow_unknown_ca.to_string(),
                "outbound__eventgrid__httpsOnly" => self.event_grid.https_only?.to_string(),
                "outbound__eventgrid__allowInvalidHostnames" => {
                    self.event_grid.allow_invalid_hostnames.to_string()
                }
                "broker__defaultMaxDeliveryAttempts" => {
                    self.broker.default_max_delivery_attempts?.to_string()
                }
                "broker__defaultEventTimeToLiveInSeconds" => {
                    self.broker.default_event_time_to_live_in_seconds?.to_string()
                }
                "broker__defaultMaxBatchSizeInBytes" => {
                    self.broker.default_max_batch_size_in_bytes?.to_string()
                }
                "broker__defaultMaxEventsPerBatch" => self.broker.default_max_events_per_batch?.to_string(),
                "broker__logDeliverySuccess" => self.broker.log_delivery_success.to_string(),
                "api__deliveryPolicyLimits__maxEventsPerBatch" => {
                    self.limits.max_events_per_batch.to_string()
                }
                "api__deliveryPolicyLimits__maxpreferredBatchSizeInKilobytes" => {
                    self.limits.max_preferred_batch_size_in_kilobytes.to_string()
                }
                "api__deliveryPolicyLimits__maxBatchSizeInBytes" => {
                    self.limits.max_batch_size_in_bytes.to_string()
                }
                "metrics__reporterType" => match self.metrics_reporter {
                    MetricsReporter::None => "none".into(),
                    MetricsReporter::Prometheus => "prometheus".into(),
                    MetricsReporter::Console => "console".into(),
                },
                _ => "IoTEdge".into(),
            })
        };
        KEYS.into_iter()
            .filter_map(|key| Some((key, value(key)?)))
            .collect()
    }
}

fn one_of<T: Copy, const N: usize>(text: &str, known: [(&str, T); N]) -> Result<T, String> {
    known
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(text))
        .map(|(_, value)| *value)
        .ok_or_else(|| {
            let names: Vec<_> = known.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            format!("\"{text}\" is not one of {}", names.join(", "))
        })
}

fn truth(text: &str) -> Result<bool, String> {
    one_of(text, [("true", true), ("false", false)])
}

/// Accepts underscores: the documentation writes `1_058_576`.
fn number(text: &str) -> Result<u32, String> {
    match text.replace('_', "").parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("\"{text}\" is not a whole number of at least 1")),
    }
}

fn secret(text: &str) -> Option<ConfigSecret> {
    (!text.is_empty()).then(|| ConfigSecret::new(text))
}
