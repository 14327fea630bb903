//! Checks that types cannot express.

use super::declared::DeclaredSubscription;
use super::edge::{EdgeConfig, event_grid_hosts};
use super::model::Config;
use super::secret::ConfigSecret;
use super::{ConfigError, custom, destination, duration, egress, jetstream, nearest, storage, traces};
use postrider_api::throttle::SECRET_CHARS_MIN;
use postrider_engine::in_flight::BUDGET_BYTES_MIN;
use postrider_wire::resources::{
    BodyShape, CLOUD_BATCH_EVENTS_MAX, CLOUD_BATCH_KILOBYTES_MAX, DECLARED_TOPIC, SUBSCRIPTION_PROPERTIES,
    unknown_members,
};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub type CheckResult = Result<(), ConfigError>;

pub fn refuse(key: impl Into<String>, reason: impl Into<String>) -> CheckResult {
    Err(ConfigError::new(key, reason))
}

/// Refuses a configuration that could not work or would not be safe. Reports the first mistake of
/// each kind.
pub fn check(config: &Config, edge: &EdgeConfig) -> Vec<ConfigError> {
    let checked = [
        check_listeners(config),
        check_edge_access(config, edge),
        event_grid_hosts(config, edge).map(drop),
        check_azure(config),
        check_clients(config),
        check_managed_identity(config),
        check_oidc(config),
        storage::check(config),
        destination::check(config),
        egress::check(config),
        check_numbers(config),
        check_declared(config),
        check_quotas(config),
        check_retry(config),
        check_secrets(config),
        check_scrub(config),
        check_recorder(config),
        check_audit(config),
        traces::check(config),
        jetstream::check(config),
        check_others(config),
    ];
    let mut errors: Vec<ConfigError> = checked.into_iter().filter_map(Result::err).collect();
    errors.extend(unknown_members_of_declared(config));
    errors
}

/// Looks at the properties under a key, with the names of what stands beside them.
type Look<'a> = dyn FnMut(&str, &Value, &BodyShape, &[&str]) + 'a;

/// Keys of a declared topic besides its properties.
const OF_TOPICS: [&str; 4] = ["name", "key1", "key2", "subscription"];

/// Members of declared topics and subscriptions that no API knows: each was surely meant to do something.
fn unknown_members_of_declared(config: &Config) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    // `own`: what stands beside the properties.
    let mut look = |key: &str, properties: &Value, shape: &BodyShape, own: &[&str]| {
        for unknown in unknown_members(properties, shape) {
            let key = format!("{key}.{}", snake_case(&unknown.path));
            let own = own.iter().filter(|_| unknown.path == unknown.name);
            errors.push(ConfigError {
                hint: nearest(&unknown.name, unknown.known.iter().chain(own).copied()).map(snake_case),
                ..ConfigError::new(key, "unknown key")
            });
        }
    };
    let subscriptions = |look: &mut Look<'_>, owner: &str, all: &[DeclaredSubscription]| {
        for (index, one) in all.iter().enumerate() {
            let key = format!("{owner}.subscription[{index}]");
            look(&key, &one.properties, &SUBSCRIPTION_PROPERTIES, &["name"]);
        }
    };
    for (index, topic) in config.topics.iter().enumerate() {
        let key = format!("topic[{index}]");
        look(&key, &topic.properties, &DECLARED_TOPIC, &OF_TOPICS);
        subscriptions(&mut look, &key, &topic.subscriptions);
    }
    for (index, domain) in config.domains.iter().enumerate() {
        let key = format!("domain[{index}]");
        let own = ["name", "key1", "key2", "subscription", "topic"];
        look(&key, &domain.properties, &DECLARED_TOPIC, &own);
        subscriptions(&mut look, &key, &domain.subscriptions);
        for (index, topic) in domain.topics.iter().enumerate() {
            let key = format!("{key}.topic[{index}]");
            look(&key, &topic.properties, &DECLARED_TOPIC, &OF_TOPICS);
            subscriptions(&mut look, &key, &topic.subscriptions);
        }
    }
    for (index, topic) in config.system_topics.iter().enumerate() {
        let key = format!("system_topic[{index}]");
        let own = ["name", "source", "topicType", "subscription"];
        look(&key, &topic.properties, &DECLARED_TOPIC, &own);
        subscriptions(&mut look, &key, &topic.subscriptions);
    }
    for (index, (_, one)) in config.subscriptions.iter().enumerate() {
        look(
            &format!("subscription[{index}]"),
            &one.properties,
            &SUBSCRIPTION_PROPERTIES,
            &["name", "topic"],
        );
    }
    errors
}

/// `subjectBeginsWith` as files spell it.
fn snake_case(name: &str) -> String {
    let mut spelled = String::with_capacity(name.len() + 4);
    for letter in name.chars() {
        if letter.is_ascii_uppercase() {
            spelled.push('_');
        }
        spelled.push(letter.to_ascii_lowercase());
    }
    spelled
}

fn check_others(config: &Config) -> CheckResult {
    if config.dead_letter.delay == Some(duration::NEVER) {
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

/// Warnings about settings that are valid but probably unintended.
pub fn warnings(config: &Config, edge: &EdgeConfig) -> Vec<String> {
    let mut warnings = Vec::new();
    if config.edge.require_auth == Some(false) && edge.sas_keys.enabled {
        warnings.push(
            "edge.require_auth is false, but inbound__clientAuth__sasKeys__enabled is true: keys are required"
                .into(),
        );
    }
    if let Some(at) = plain_http_exposed(config) {
        warnings.push(format!(
            "listen.http is {at}: others can reach it and nothing is encrypted there, so whoever is on the way reads \
             keys, tokens and events; use https only (listen.http = \"off\"), or allow it by name with \
             listen.allow_plain_http = true"
        ));
    }
    let far = |url: &str| url.starts_with("http://");
    if let Some(oidc) = &config.oidc
        && (far(&oidc.issuer) || oidc.jwks_url.as_deref().is_some_and(far))
    {
        warnings.push(
            "oidc: the issuer's keys come over plain http, so whoever is on the way can make tokens".into(),
        );
    }
    warnings.extend(short_secrets(config, edge));
    warnings
}

/// Guessable secrets, by the configuration keys that hold them.
fn short_secrets(config: &Config, edge: &EdgeConfig) -> Vec<String> {
    let mut all: Vec<(String, &ConfigSecret)> = Vec::new();
    for client in &config.clients {
        all.push((format!("client \"{}\": secret", client.id), &client.secret));
    }
    let topics = config.topics.iter();
    let topics = topics.map(|topic| ("topic", &topic.name, [&topic.key1, &topic.key2]));
    let domains = config.domains.iter();
    let domains = domains.map(|domain| ("domain", &domain.name, [&domain.key1, &domain.key2]));
    for (kind, name, keys) in topics.chain(domains) {
        for (number, key) in (1..).zip(keys) {
            all.extend(
                key.as_ref()
                    .map(|key| (format!("{kind} \"{name}\": key{number}"), key)),
            );
        }
    }
    if !edge_is_open(config, edge) {
        let names = [
            "inbound__clientAuth__sasKeys__key1",
            "inbound__clientAuth__sasKeys__key2",
        ];
        let keys = [&edge.sas_keys.key1, &edge.sas_keys.key2];
        for (name, key) in names.into_iter().zip(keys) {
            all.extend(key.as_ref().map(|key| (name.to_owned(), key)));
        }
    }
    let short = |secret: &ConfigSecret| {
        let length = secret.expose().chars().count();
        (1..SECRET_CHARS_MIN).contains(&length)
    };
    all.retain(|(_, secret)| short(secret));
    all.into_iter()
        .map(|(name, _)| {
            format!(
                "{name} is shorter than {SECRET_CHARS_MIN} characters, so that it can be guessed: use a random one, \
                 such as openssl rand -base64 32 prints"
            )
        })
        .collect()
}

/// Whether the edge API requires no key.
pub fn edge_is_open(config: &Config, edge: &EdgeConfig) -> bool {
    !config.edge.require_auth.unwrap_or(false) && !edge.sas_keys.enabled
}

/// The plain http listener, if other machines can reach it and `listen.allow_plain_http` is not
/// set.
pub fn plain_http_exposed(config: &Config) -> Option<SocketAddr> {
    let listen = &config.listen;
    let at = listen.http.filter(|at| !at.ip().to_canonical().is_loopback());
    at.filter(|_| !listen.allow_plain_http)
}

fn listeners(config: &Config) -> impl Iterator<Item = SocketAddr> {
    config.listen.https.into_iter().chain(config.listen.http)
}

fn check_listeners(config: &Config) -> CheckResult {
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

/// An edge API without keys must not be reachable from other machines unless `edge.allow_open` is
/// set.
fn check_edge_access(config: &Config, edge: &EdgeConfig) -> CheckResult {
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

fn check_azure(config: &Config) -> CheckResult {
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

fn check_clients(config: &Config) -> CheckResult {
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

/// Any client that reaches a listener gets a token without a secret: only this machine may reach
/// them.
fn check_managed_identity(config: &Config) -> CheckResult {
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

fn check_oidc(config: &Config) -> CheckResult {
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

/// How long a client may stall a request or a response.
const STALL_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(600);
const THROTTLE_WAIT_MIN: Duration = Duration::from_secs(1);
const THROTTLE_WAIT_MAX: Duration = Duration::from_secs(86_400);

fn check_numbers(config: &Config) -> CheckResult {
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
        ("limits.connections_max", limits.connections_max),
        (
            "limits.connections_per_address_max",
            limits.connections_per_address_max,
        ),
        ("limits.streams_max", limits.streams_max),
        ("limits.streams_per_client_max", limits.streams_per_client_max),
        ("limits.hops_max", limits.hops_max as usize),
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
    let wait = config.throttle.wait_max;
    if !(THROTTLE_WAIT_MIN..=THROTTLE_WAIT_MAX).contains(&wait) {
        return refuse("throttle.wait_max", "must be \"1s\" to \"1d\"");
    }
    if limits.in_flight_bytes_max < BUDGET_BYTES_MIN {
        let least = format!("must be at least {BUDGET_BYTES_MIN}");
        return refuse("limits.in_flight_bytes_max", least);
    }
    // A single client can take half of the memory, and a second one half of the rest: the largest
    // request must fit in that quarter.
    if limits.publish_body_bytes_max / 4 < limits.request_bytes_max {
        let reason =
            "must be at least 4 times limits.request_bytes_max: the largest request would find no room";
        return refuse("limits.publish_body_bytes_max", reason);
    }
    for (key, time) in [
        ("limits.body_stall_max", limits.body_stall_max),
        ("limits.response_stall_max", limits.response_stall_max),
    ] {
        if !STALL_RANGE.contains(&time) {
            return refuse(key, "must be from 1s to 10m");
        }
    }
    if limits.filter_bytes_per_event_max < limits.event_bytes_max as u64 {
        let reason =
            "must not be less than limits.event_bytes_max: no filter could look at the largest event";
        return refuse("limits.filter_bytes_per_event_max", reason);
    }
    Ok(())
}

/// Recordings are dropped in pieces of half this size.
const RECORDER_BYTES_LEAST: u64 = 64 << 20;
/// Shortest interval between two scrubs.
const SCRUB_EVERY_LEAST: Duration = Duration::from_secs(60);
const SCRUB_RATE_LEAST: u64 = 64 << 10;
/// Recordings are dropped in pieces that span this much time.
const RECORDER_KEEP_LEAST: Duration = Duration::from_secs(10 * 60);

fn check_secrets(config: &Config) -> CheckResult {
    let secrets = &config.secrets;
    if secrets.key.is_some() && secrets.key_file.is_some() {
        return refuse("secrets.key_file", "cannot be set together with secrets.key");
    }
    if let Some(key) = &secrets.key
        && let Err(e) = postrider_store::seal::Keyring::parse(key.expose(), "")
    {
        return refuse("secrets.key", e.reason());
    }
    Ok(())
}

fn check_scrub(config: &Config) -> CheckResult {
    let store = &config.store;
    if store.scrub_every < SCRUB_EVERY_LEAST {
        return refuse(
            "store.scrub_every",
            "must be at least \"1m\"; \"never\" verifies nothing in the background",
        );
    }
    if store.scrub_bytes_per_second < SCRUB_RATE_LEAST {
        return refuse(
            "store.scrub_bytes_per_second",
            format!(
                "must be at least {SCRUB_RATE_LEAST}, was {}",
                store.scrub_bytes_per_second
            ),
        );
    }
    Ok(())
}

fn check_recorder(config: &Config) -> CheckResult {
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

/// The audit log is dropped in pieces of an eighth of its bounds.
const AUDIT_BYTES_LEAST: u64 = 1 << 20;
const AUDIT_KEEP_LEAST: Duration = Duration::from_secs(3600);

fn check_audit(config: &Config) -> CheckResult {
    let audit = &config.audit;
    if audit.keep < AUDIT_KEEP_LEAST {
        return refuse(
            "audit.keep",
            "must be at least \"1h\"; audit.enabled = false keeps nothing",
        );
    }
    if audit.bytes_max < AUDIT_BYTES_LEAST {
        return refuse(
            "audit.bytes_max",
            format!("must be at least {AUDIT_BYTES_LEAST}, was {}", audit.bytes_max),
        );
    }
    Ok(())
}

/// The longest wait that a schedule or probation may ask for.
pub const WAIT_MOST: Duration = Duration::from_secs(7 * 24 * 3600);
pub const JITTER_PERCENT_MOST: u32 = 50;
/// Statuses that may be about the request as a whole rather than about one of its events.
const SPLIT_STATUSES: [u16; 2] = [400, 413];

/// Refuses statuses other than those about a request's size or content: halves of a batch would
/// fare no better.
pub fn check_split_batches_on(key: &str, statuses: Option<&[u16]>) -> CheckResult {
    let statuses = statuses.unwrap_or_default();
    for (index, status) in statuses.iter().enumerate() {
        if !SPLIT_STATUSES.contains(status) {
            return refuse(
                format!("{key}[{index}]"),
                format!("must be 400 or 413, was {status}"),
            );
        }
        if statuses[..index].contains(status) {
            return refuse(format!("{key}[{index}]"), format!("{status} is given twice"));
        }
    }
    Ok(())
}

pub const PROBATION_FAILURES_MOST: u32 = 10_000;

fn check_retry(config: &Config) -> CheckResult {
    if let Some(percent) = config.retry.jitter_percent {
        within("retry.jitter_percent", percent, 0, JITTER_PERCENT_MOST)?;
    }
    check_split_batches_on("retry.split_batches_on", config.retry.split_batches_on.as_deref())?;
    within(
        "batches.default_events",
        config.batches.default_events,
        1,
        CLOUD_BATCH_EVENTS_MAX,
    )?;
    if let Some(kilobytes) = config.batches.default_kilobytes {
        within(
            "batches.default_kilobytes",
            kilobytes,
            1,
            CLOUD_BATCH_KILOBYTES_MAX,
        )?;
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

pub fn within(key: impl Into<String>, number: u32, least: u32, most: u32) -> CheckResult {
    if (least..=most).contains(&number) {
        return Ok(());
    }
    refuse(key, format!("must be between {least} and {most}, was {number}"))
}

pub fn wait_within(key: impl Into<String>, wait: Duration, most: Duration) -> CheckResult {
    if wait > Duration::ZERO && wait <= most {
        return Ok(());
    }
    let (most, was) = (duration::print(most), duration::print(wait));
    refuse(key, format!("must be more than 0 and at most {most}, was {was}"))
}

/// Declared resources must fit the quotas: with both in the file, neither could be said to win.
fn check_quotas(config: &Config) -> CheckResult {
    let quotas = config.quotas_in_force();
    let within = |count: usize, most: usize, key: &str, what: &str| match count > most {
        true => refuse(
            key,
            format!("is {most}, but {count} {what} are declared: raise it, or declare fewer"),
        ),
        false => Ok(()),
    };
    let edge = config.topics.iter().filter(|topic| topic.is_edge()).count();
    let managed = config.topics.len() - edge;
    within(managed, quotas.topics, "quotas.topics", "topics")?;
    within(
        edge,
        quotas.edge_topics,
        "quotas.edge_topics",
        "topics with edge = true",
    )?;
    within(config.domains.len(), quotas.domains, "quotas.domains", "domains")?;
    let system_topics = config.system_topics.len();
    within(
        system_topics,
        quotas.system_topics,
        "quotas.system_topics",
        "system topics",
    )?;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (topic, _) in config.declared_subscriptions() {
        *counts.entry(topic.to_lowercase()).or_default() += 1;
    }
    let per_topic = quotas.subscriptions_per_topic;
    let key = "quotas.subscriptions_per_topic";
    for topic in &config.topics {
        let count = counts.get(&topic.name.to_lowercase()).copied().unwrap_or(0);
        let what = format!("subscriptions of topic \"{}\"", topic.name);
        match topic.is_edge() {
            true => within(
                count,
                quotas.edge_subscriptions_per_topic,
                "quotas.edge_subscriptions_per_topic",
                &what,
            )?,
            false => within(count, per_topic, key, &what)?,
        }
    }
    for topic in &config.system_topics {
        let what = format!("subscriptions of system topic \"{}\"", topic.name);
        within(topic.subscriptions.len(), per_topic, key, &what)?;
    }
    for domain in &config.domains {
        let name = &domain.name;
        let what = format!("topics of domain \"{name}\"");
        within(
            domain.topics.len(),
            quotas.domain_topics,
            "quotas.domain_topics",
            &what,
        )?;
        let what = format!("subscriptions of domain \"{name}\"");
        let count = domain.subscriptions.len();
        let per_domain = quotas.subscriptions_per_domain;
        within(count, per_domain, "quotas.subscriptions_per_domain", &what)?;
        for topic in &domain.topics {
            let what = format!("subscriptions of topic \"{}\" of domain \"{name}\"", topic.name);
            within(topic.subscriptions.len(), per_topic, key, &what)?;
        }
    }
    Ok(())
}

/// Names are compared as the management API does: without regard to case.
fn check_declared(config: &Config) -> CheckResult {
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
