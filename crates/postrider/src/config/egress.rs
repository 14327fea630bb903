//! `[egress]`: allowed destinations of requests, and the proxy.

use super::ConfigError;
use super::check::{CheckResult, refuse};
use super::model::{Config, EgressConfig, EgressPolicyKind};
use super::secret::MASK;
use http::Uri;
use postrider_transport::egress::DestinationScheme;
use postrider_transport::{EgressPolicy as Policy, ForwardProxy};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

/// URL of a proxy, whose user name and password are masked.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ProxyUrl(String);

impl ProxyUrl {
    fn shown(&self) -> String {
        match self.0.rsplit_once('@') {
            Some((_, host)) => format!("http://{MASK}@{host}"),
            None => self.0.clone(),
        }
    }
}

impl fmt::Debug for ProxyUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}

impl Serialize for ProxyUrl {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.shown())
    }
}

impl EgressConfig {
    pub fn policy(&self) -> Policy {
        match self.policy {
            EgressPolicyKind::Internet => Policy::Internet,
            EgressPolicyKind::Private => Policy::Private,
            EgressPolicyKind::Custom => Policy::Custom {
                allow: self.allow.clone(),
                deny: self.deny.clone(),
            },
        }
    }

    pub fn proxy(&self) -> Result<Option<ForwardProxy>, ConfigError> {
        let proxy = self.proxy.as_ref();
        let parsed = proxy.map(|proxy| ForwardProxy::parse(&proxy.0, &self.no_proxy));
        parsed
            .transpose()
            .map_err(|reason| match reason.strip_prefix("no_proxy: ") {
                Some(reason) => ConfigError::new("egress.no_proxy", reason),
                None => ConfigError::new("egress.proxy", reason),
            })
    }
}

pub fn check(config: &Config) -> CheckResult {
    let egress = &config.egress;
    let custom = egress.policy == EgressPolicyKind::Custom;
    if custom && egress.allow.is_empty() && egress.deny.is_empty() {
        return refuse("egress.policy", "\"custom\" needs egress.allow or egress.deny");
    }
    // A list without effect would give a false sense of safety.
    for (key, list) in [("egress.allow", &egress.allow), ("egress.deny", &egress.deny)] {
        if !custom && !list.is_empty() {
            return refuse(key, "has an effect only with egress.policy = \"custom\"");
        }
    }
    if egress.proxy.is_none() && !egress.no_proxy.is_empty() {
        return refuse("egress.no_proxy", "has an effect only with egress.proxy");
    }
    egress.proxy()?;
    check_destinations(config)
}

/// Applies the policy to destinations in the configuration itself. Literal addresses are refused at
/// the start; names are judged by their resolved addresses when they are dialled.
fn check_destinations(config: &Config) -> CheckResult {
    let policy = config.egress.policy();
    for (index, account) in config.storage_accounts.iter().enumerate() {
        let endpoints = [
            ("endpoint", &account.endpoint),
            ("blob_endpoint", &account.blob_endpoint),
            ("queue_endpoint", &account.queue_endpoint),
        ];
        for (name, url) in endpoints {
            check_url(
                &policy,
                &format!("storage_account[{index}].{name}"),
                url.as_deref(),
            )?;
        }
    }
    for (index, destination) in config.destinations.iter().enumerate() {
        let url = Some(destination.url.expose());
        check_url(&policy, &format!("destination[{index}].url"), url)?;
    }
    if let Some(oidc) = &config.oidc {
        match &oidc.jwks_url {
            Some(url) => check_url(&policy, "oidc.jwks_url", Some(url))?,
            None => check_url(&policy, "oidc.issuer", Some(&oidc.issuer))?,
        }
    }
    check_url(
        &policy,
        "traces.otlp_endpoint",
        config.traces.otlp_endpoint.as_deref(),
    )
}

fn check_url(policy: &Policy, key: &str, url: Option<&str>) -> CheckResult {
    let Some(url) = url.and_then(|url| url.parse::<Uri>().ok()) else {
        return Ok(());
    };
    let scheme = match url.scheme_str() {
        Some("http") => DestinationScheme::Http,
        Some("https") => DestinationScheme::Https,
        _ => return Ok(()),
    };
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    let judged = match host.parse() {
        Ok(address) => policy.check(scheme, address),
        Err(_) => policy.check_scheme(scheme),
    };
    match judged {
        Ok(()) => Ok(()),
        Err(refusal) => refuse(key, format!("{refusal}; it holds for every outgoing request")),
    }
}
