//! What a type alone cannot refuse.

use super::edge::EdgeConfig;
use super::model::{Config, EgressPolicy};
use super::{ConfigError, custom, destination, duration, jetstream, storage, traces};
use postrider_engine::in_flight::BUDGET_BYTES_MIN;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub type Checked = Result<(), ConfigError>;

pub fn refuse(key: impl Into<String>, reason: impl Into<String>) -> Checked {
    Err(ConfigError::new(key, reason))
}

/// Refuses a configuration that could not work or would not be safe: the first mistake of each kind.
pub fn check(config: &Config, edge: &EdgeConfig) -> Vec<ConfigError> {
    let checked = [
        check_listeners(config),
        check_edge_access(config, edge),
        check_azure(config),
        check_clients(config),
        check_managed_identity(config),
        check_oidc(config),
        storage::check(config),
        destination::check(config),
        check_egress(config),
        check_numbers(config),
        check_declared(config),
        check_retry(config),
        check_recorder(config),
        traces::check(config),
        jetstream::check(config),
        check_others(config),
    ];
    checked.into_iter().filter_map(Result::err).collect()
}

fn check_others(config: &Config) -> Checked {
    if config.dead_letter.delay == duration::NEVER {
        return refuse(
            "dead_letter.delay",
            "\"never\" would keep every dead letter from being written",
        );
    }
    if tracing_subscriber::EnvFilter::try_new(&config.log.level).is_err() {
        return refuse(
            "log.level",
            format!("\"{}\" is not a level such as \"info\"", config.log.level),
        );
    }
    let agent = config.transport.user_agent.as_deref().unwrap_or_default();
    if http::HeaderValue::from_str(agent).is_err() {
        return refuse("transport.user_agent", "cannot be sent in a header");
    }
    Ok(())
}

/// What may be started with, but was probably not meant.
pub fn warnings(config: &Config, edge: &EdgeConfig) -> Vec<String> {
    let mut warnings = Vec::new();
    if config.edge.require_auth == Some(false) && edge.sas_keys.enabled {
        warnings.push(
            "edge.require_auth is false, but inbound__clientAuth__sasKeys__enabled is true: keys are required"
                .into(),
        );
    }
    let far = |url: &str| url.starts_with("http://");
    if let Some(oidc) = &config.oidc
        && (far(&oidc.issuer) || oidc.jwks_url.as_deref().is_some_and(far))
    {
        warnings.push(
            "oidc: the issuer's keys come over plain http, so whoever is on the way can make tokens".into(),
        );
    }
    warnings
}

/// Whether the edge API asks nobody for a key.
pub fn edge_is_open(config: &Config, edge: &EdgeConfig) -> bool {
    !config.edge.require_auth.unwrap_or(false) && !edge.sas_keys.enabled
}

fn listeners(config: &Config) -> impl Iterator<Item = SocketAddr> {
    config.listen.https.into_iter().chain(config.listen.http)
}

fn check_listeners(config: &Config) -> Checked {
    let listen = &config.listen;
    if listeners(config).next().is_none() {
        return refuse("listen", "https and http are both off");
    }
    // Port 0 is a different port each time.
    if listen.https.is_some_and(|at| at.port() != 0) && listen.https == listen.http {
        return refuse("listen.http", "is the same address as listen.https");
    }
    match (&listen.cert_file, &listen.key_file) {
        (Some(_), None) => return refuse("listen.key_file", "is required with listen.cert_file"),
        (None, Some(_)) => return refuse("listen.cert_file", "is required with listen.key_file"),
        _ => {}
    }
    for (index, name) in listen.names.iter().enumerate() {
        let host = name.strip_prefix("*.").unwrap_or(name);
        let named = rustls::pki_types::DnsName::try_from(host).is_ok();
        if !named && name.parse::<IpAddr>().is_err() {
            return refuse(
                format!("listen.names[{index}]"),
                format!("\"{name}\" is not a DNS name or an address"),
            );
        }
    }
    Ok(())
}

/// An API that anyone may use must not be reachable by everyone unless that was said by name.
fn check_edge_access(config: &Config, edge: &EdgeConfig) -> Checked {
    if !edge_is_open(config, edge) || config.edge.allow_open {
        return Ok(());
    }
    match listeners(config).find(|at| !at.ip().to_canonical().is_loopback()) {
        None => Ok(()),
        Some(at) => refuse(
            "edge.require_auth",
            format!(
                "the edge API would be open to anyone who can reach {at}: \
                 set edge.require_auth = true, or edge.allow_open = true if that is what you want"
            ),
        ),
    }
}

fn check_azure(config: &Config) -> Checked {
    let azure = &config.azure;
    for (key, text) in [
        ("azure.subscription", &azure.subscription),
        ("azure.tenant", &azure.tenant),
        ("azure.resource_group", &azure.resource_group),
        ("azure.location", &azure.location),
    ] {
        let fits = |c: char| c.is_alphanumeric() || "-_.()".contains(c);
        if text.is_empty() || !text.chars().all(fits) {
            return refuse(key, format!("\"{text}\" cannot be part of a resource's path"));
        }
    }
    Ok(())
}

fn check_clients(config: &Config) -> Checked {
    let mut seen = BTreeSet::new();
    for (index, client) in config.clients.iter().enumerate() {
        if client.id.is_empty() {
            return refuse(format!("client[{index}].id"), "must not be empty");
        }
        if client.secret.expose().is_empty() {
            return refuse(format!("client[{index}].secret"), "must not be empty");
        }
        if !seen.insert(client.id.to_lowercase()) {
            return refuse(
                format!("client[{index}].id"),
                format!("\"{}\" is given twice", client.id),
            );
        }
    }
    Ok(())
}

/// Whoever can reach us gets a token without a secret: that must be this machine alone.
fn check_managed_identity(config: &Config) -> Checked {
    let key = "azure.managed_identity";
    let Some(id) = &config.azure.managed_identity else {
        return Ok(());
    };
    if let Some(at) = listeners(config).find(|at| !at.ip().to_canonical().is_loopback()) {
        let reason =
            format!("would give a token to anyone who can reach {at}: it needs listeners on loopback only");
        return refuse(key, reason);
    }
    let mut clients = config.clients.iter();
    if !config.clients.is_empty() && !clients.any(|client| client.id.eq_ignore_ascii_case(id)) {
        return refuse(key, format!("no [[client]] has the id \"{id}\""));
    }
    Ok(())
}

fn check_oidc(config: &Config) -> Checked {
    let Some(oidc) = &config.oidc else {
        return Ok(());
    };
    let is_url = |text: &str| {
        let url: Option<http::Uri> = text.parse().ok();
        url.is_some_and(|url| {
            matches!(url.scheme_str(), Some("http" | "https"))
                && url.authority().is_some_and(|at| !at.as_str().contains('@'))
                && url.query().is_none()
        })
    };
    for (key, url) in [
        ("oidc.issuer", Some(&oidc.issuer)),
        ("oidc.jwks_url", oidc.jwks_url.as_ref()),
    ] {
        if let Some(url) = url.filter(|url| !is_url(url)) {
            let reason = format!("\"{url}\" is not a URL such as \"https://login.example/tenant/v2.0\"");
            return refuse(key, reason);
        }
    }
    for (key, text) in [
        ("oidc.audience", Some(&oidc.audience)),
        ("oidc.role_claim", Some(&oidc.role_claim)),
        ("oidc.client_claim", oidc.client_claim.as_ref()),
    ] {
        if text.is_some_and(String::is_empty) {
            return refuse(key, "must not be empty");
        }
    }
    Ok(())
}

/// A list that the policy ignores would give a false sense of safety.
fn check_egress(config: &Config) -> Checked {
    let egress = &config.egress;
    let custom = egress.policy == EgressPolicy::Custom;
    if custom && egress.allow.is_empty() && egress.deny.is_empty() {
        return refuse("egress.policy", "\"custom\" needs egress.allow or egress.deny");
    }
    for (key, list) in [("egress.allow", &egress.allow), ("egress.deny", &egress.deny)] {
        if !custom && !list.is_empty() {
            return refuse(key, "has an effect only with egress.policy = \"custom\"");
        }
    }
    Ok(())
}

fn check_numbers(config: &Config) -> Checked {
    let limits = &config.limits;
    for (key, number) in [
        ("threads", config.threads.unwrap_or(1)),
        ("limits.request_bytes_max", limits.request_bytes_max),
        ("limits.event_bytes_max", limits.event_bytes_max),
        ("limits.events_per_request_max", limits.events_per_request_max),
        (
            "limits.in_flight_per_endpoint_max",
            limits.in_flight_per_endpoint_max,
        ),
        ("limits.publish_queue_max", limits.publish_queue_max),
        ("limits.declared_filters_max", limits.declared_filters_max),
        (
            "limits.declared_filter_values_max",
            limits.declared_filter_values_max,
        ),
        (
            "limits.declared_filter_value_chars_max",
            limits.declared_filter_value_chars_max,
        ),
    ] {
        if number == 0 {
            return refuse(key, "must be at least 1");
        }
    }
    if limits.in_flight_bytes_max < BUDGET_BYTES_MIN {
        let least = format!("must be at least {BUDGET_BYTES_MIN}");
        return refuse("limits.in_flight_bytes_max", least);
    }
    if limits.filter_bytes_per_event_max < limits.event_bytes_max as u64 {
        let reason =
            "must not be less than limits.event_bytes_max: no filter could look at the largest event";
        return refuse("limits.filter_bytes_per_event_max", reason);
    }
    Ok(())
}

/// It is dropped in pieces of half as much.
const RECORDER_BYTES_LEAST: u64 = 64 << 20;
/// A piece spans this much time.
const RECORDER_KEEP_LEAST: Duration = Duration::from_secs(10 * 60);

fn check_recorder(config: &Config) -> Checked {
    let recorder = &config.recorder;
    if recorder.keep < RECORDER_KEEP_LEAST {
        return refuse(
            "recorder.keep",
            "must be at least \"10m\"; recorder.enabled = false keeps nothing",
        );
    }
    if recorder.bytes_max < RECORDER_BYTES_LEAST {
        return refuse(
            "recorder.bytes_max",
            format!(
                "must be at least {RECORDER_BYTES_LEAST}, was {}",
                recorder.bytes_max
            ),
        );
    }
    Ok(())
}

/// The longest wait that a schedule or probation may ask for.
pub const WAIT_MOST: Duration = Duration::from_secs(7 * 24 * 3600);
pub const JITTER_PERCENT_MOST: u32 = 50;
pub const PROBATION_FAILURES_MOST: u32 = 10_000;

fn check_retry(config: &Config) -> Checked {
    if let Some(percent) = config.retry.jitter_percent {
        within("retry.jitter_percent", percent, 0, JITTER_PERCENT_MOST)?;
    }
    within(
        "probation.failures",
        config.probation.failures,
        1,
        PROBATION_FAILURES_MOST,
    )?;
    wait_within("probation.max", config.probation.max, WAIT_MOST)?;
    if let Some(window) = config.validation.window {
        wait_within("validation.window", window, WAIT_MOST)?;
    }
    match &config.profile_custom {
        Some(custom) => custom::check(custom, config.edge.strict_success),
        None if config.profile == "custom" => {
            refuse("profile", "\"custom\" needs a [profile_custom] section")
        }
        None => Ok(()),
    }
}

pub fn within(key: impl Into<String>, number: u32, least: u32, most: u32) -> Checked {
    if (least..=most).contains(&number) {
        return Ok(());
    }
    refuse(key, format!("must be between {least} and {most}, was {number}"))
}

pub fn wait_within(key: impl Into<String>, wait: Duration, most: Duration) -> Checked {
    if wait > Duration::ZERO && wait <= most {
        return Ok(());
    }
    let (most, was) = (duration::print(most), duration::print(wait));
    refuse(key, format!("must be more than 0 and at most {most}, was {was}"))
}

/// Names are compared as the management API does: without regard to case.
fn check_declared(config: &Config) -> Checked {
    let mut seen = BTreeSet::new();
    for (index, topic) in config.topics.iter().enumerate() {
        if !seen.insert(topic.name.to_lowercase()) {
            return refuse(
                format!("topic[{index}].name"),
                format!("\"{}\" is declared twice", topic.name),
            );
        }
    }
    let mut seen = BTreeSet::new();
    for (index, domain) in config.domains.iter().enumerate() {
        if !seen.insert(domain.name.to_lowercase()) {
            return refuse(
                format!("domain[{index}].name"),
                format!("\"{}\" is declared twice", domain.name),
            );
        }
    }
    let mut seen = BTreeSet::new();
    for (index, topic) in config.system_topics.iter().enumerate() {
        let key = format!("system_topic[{index}]");
        if !seen.insert(topic.name.to_lowercase()) {
            let reason = format!("\"{}\" is declared twice", topic.name);
            return refuse(format!("{key}.name"), reason);
        }
        let mut seen = BTreeSet::new();
        for (index, subscription) in topic.subscriptions.iter().enumerate() {
            if !seen.insert(subscription.name.to_lowercase()) {
                let reason = format!("\"{}\" is declared twice", subscription.name);
                return refuse(format!("{key}.subscription[{index}].name"), reason);
            }
        }
    }
    let mut seen = BTreeSet::new();
    for (topic, subscription) in config.declared_subscriptions() {
        let name = &subscription.name;
        if !seen.insert((topic.to_lowercase(), name.to_lowercase())) {
            return refuse(
                "subscription",
                format!("\"{name}\" of topic \"{topic}\" is declared twice"),
            );
        }
    }
    Ok(())
}
