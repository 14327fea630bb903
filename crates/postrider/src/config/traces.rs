//! Export of traces, configured by our own keys and by OpenTelemetry's variables.

use super::check::{CheckResult, refuse};
use super::secret::ConfigSecret;
use super::{Config, ConfigError};
use http::{HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// Default path on the collector.
const PATH: &str = "/v1/traces";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracesConfig {
    /// `None`: traces are not exported.
    #[serde(deserialize_with = "endpoint")]
    pub otlp_endpoint: Option<String>,
    pub protocol: OtlpProtocol,
    pub headers: BTreeMap<String, ConfigSecret>,
    /// Share of the traces that begin here; producers decide about theirs.
    pub sample_ratio: f64,
    pub service_name: String,
}

impl Default for TracesConfig {
    fn default() -> TracesConfig {
        TracesConfig {
            otlp_endpoint: None,
            protocol: OtlpProtocol::HttpProtobuf,
            headers: BTreeMap::new(),
            sample_ratio: 1.0,
            service_name: "postrider".into(),
        }
    }
}

impl TracesConfig {
    /// URL that traces are sent to.
    pub fn url(&self) -> Option<Uri> {
        let text = self.otlp_endpoint.as_deref()?;
        let url: Uri = text.parse().ok()?;
        match url.path() {
            "" | "/" => format!("{}{PATH}", text.trim_end_matches('/')).parse().ok(),
            _ => Some(url),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OtlpProtocol {
    #[serde(rename = "http/protobuf")]
    HttpProtobuf,
    #[serde(rename = "http/json")]
    HttpJson,
}

/// Why the text is no usable collector URL; `None` if it is one.
fn objection(text: &str) -> Option<&'static str> {
    let url: Option<Uri> = text.parse().ok();
    let fits = url.as_ref().is_some_and(|url| {
        matches!(url.scheme_str(), Some("http" | "https"))
            && url.host().is_some_and(|host| !host.is_empty())
            && url.query().is_none()
            && !text.contains('#')
    });
    if !fits {
        return Some("must be a URL such as \"http://127.0.0.1:4318\"");
    }
    let named = url.and_then(|url| Some(url.authority()?.as_str().contains('@')));
    (named == Some(true)).then_some("must not hold a user name or password; headers may")
}

fn endpoint<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = Option::<String>::deserialize(from)?;
    match text.as_deref().and_then(objection) {
        Some(why) => Err(serde::de::Error::custom(why)),
        None => Ok(text),
    }
}

pub fn check(config: &Config) -> CheckResult {
    let traces = &config.traces;
    if !(0.0..=1.0).contains(&traces.sample_ratio) {
        let reason = format!("must be between 0 and 1, was {}", traces.sample_ratio);
        return refuse("traces.sample_ratio", reason);
    }
    if traces.service_name.is_empty() {
        return refuse("traces.service_name", "must not be empty");
    }
    for (name, value) in &traces.headers {
        let key = format!("traces.headers.{name}");
        if HeaderName::from_bytes(name.as_bytes()).is_err() {
            return refuse(key, "is not the name of a header");
        }
        if HeaderValue::from_str(value.expose()).is_err() {
            return refuse(key, "cannot be sent in a header");
        }
    }
    Ok(())
}

/// Fills settings that our own keys leave open from OpenTelemetry's variables; `said` tells whether
/// a key is set. Returns warnings about variables that are understood but not supported.
pub fn fill(
    traces: &mut TracesConfig,
    said: impl Fn(&str) -> bool,
    env: &[(String, String)],
) -> Result<Vec<String>, ConfigError> {
    // By OpenTelemetry's rules an empty variable is not set.
    let variable = |name: &'static str| {
        let found = env
            .iter()
            .find(|(known, value)| known == name && !value.is_empty());
        found.map(|(_, value)| (name, value.as_str()))
    };
    let either = |first, second| variable(first).or_else(|| variable(second));
    let refused = |name: &str, reason: &str| ConfigError {
        source: Some(format!("the variable {name}")),
        ..ConfigError::new(name, reason)
    };
    let mut warnings = Vec::new();

    if let Some((_, name)) = variable("OTEL_SERVICE_NAME")
        && !said("traces.service_name")
    {
        name.clone_into(&mut traces.service_name);
    }
    if !said("traces.headers")
        && let Some((name, text)) = either("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
    {
        traces.headers =
            headers(text).ok_or_else(|| refused(name, "must look like name=value,name=value"))?;
    }
    let mut spoken = true;
    if !said("traces.protocol")
        && let Some((name, protocol)) = either(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        )
    {
        match protocol {
            "http/protobuf" => traces.protocol = OtlpProtocol::HttpProtobuf,
            "http/json" => traces.protocol = OtlpProtocol::HttpJson,
            _ => {
                spoken = false;
                warnings.push(format!(
                    "{name} is \"{protocol}\", which is not spoken here: use \"http/protobuf\" or \"http/json\", \
                     to a collector's port 4318 as a rule"
                ));
            }
        }
    }
    if said("traces.otlp_endpoint") {
        return Ok(warnings);
    }
    let off = |(name, off): (&'static str, &str)| {
        variable(name).is_some_and(|(_, value)| value.eq_ignore_ascii_case(off))
    };
    if !spoken || off(("OTEL_SDK_DISABLED", "true")) || off(("OTEL_TRACES_EXPORTER", "none")) {
        return Ok(warnings);
    }
    let exactly = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").map(|(name, url)| (name, url.to_owned()));
    let below = |(name, url): (&'static str, &str)| (name, format!("{}{PATH}", url.trim_end_matches('/')));
    if let Some((name, url)) = exactly.or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT").map(below)) {
        if let Some(why) = objection(&url) {
            return Err(refused(name, why));
        }
        traces.otlp_endpoint = Some(url);
    }
    Ok(warnings)
}

/// Parses the W3C Baggage format: pairs separated by commas, values percent-encoded.
fn headers(text: &str) -> Option<BTreeMap<String, ConfigSecret>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        let name = name.trim().to_ascii_lowercase();
        let fits = HeaderName::from_bytes(name.as_bytes()).is_ok() && HeaderValue::from_str(&value).is_ok();
        fits.then(|| (name, ConfigSecret::new(value)))
    };
    pairs.map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(said: &[&str], env: &[(&str, &str)]) -> Result<(TracesConfig, Vec<String>), String> {
        let env: Vec<_> = env.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
        let mut traces = TracesConfig::default();
        let warnings = fill(&mut traces, |key| said.contains(&key), &env).map_err(|e| e.to_string())?;
        Ok((traces, warnings))
    }

    #[test]
    fn variables_say_where_traces_go() {
        let check = |env: &[(&str, &str)], expected: Option<&str>| {
            let (traces, warnings) = filled(&[], env).unwrap();
            let url = traces.url().map(|url| url.to_string());
            assert_eq!((url.as_deref(), warnings.len()), (expected, 0), "{env:?}");
        };
        let (base, exact) = (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        );
        check(&[], None);
        check(&[(base, "")], None);
        check(&[(base, "http://c:4318")], Some("http://c:4318/v1/traces"));
        check(&[(base, "https://c/otlp/")], Some("https://c/otlp/v1/traces"));
        check(&[(exact, "http://c:4318/spans")], Some("http://c:4318/spans"));
        check(&[(base, "http://b"), (exact, "http://c/t")], Some("http://c/t"));
        check(&[(base, "http://c:4318"), ("OTEL_SDK_DISABLED", "TRUE")], None);
        check(&[(base, "http://c:4318"), ("OTEL_TRACES_EXPORTER", "none")], None);
    }

    #[test]
    fn our_own_keys_win() {
        let env = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s%20e, x=1"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
            ("OTEL_SERVICE_NAME", "grid"),
        ];
        let (traces, _) = filled(&[], &env).unwrap();
        let header = |name: &str| traces.headers[name].expose().to_owned();
        assert_eq!((header("api-key"), header("x")), ("s e".into(), "1".into()));
        assert_eq!(traces.protocol, OtlpProtocol::HttpJson);
        assert_eq!(traces.service_name, "grid");
        let said = [
            "traces.otlp_endpoint",
            "traces.headers",
            "traces.protocol",
            "traces.service_name",
        ];
        assert_eq!(filled(&said, &env).unwrap().0, TracesConfig::default());
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317");
        let (traces, warnings) = filled(&[], &[endpoint, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]).unwrap();
        assert_eq!(traces.url(), None);
        assert!(
            warnings[0].starts_with("OTEL_EXPORTER_OTLP_PROTOCOL is \"grpc\""),
            "{warnings:?}"
        );
        let check = |name: &str, value: &str, expected: &str| {
            let error = filled(&[], &[(name, value)]).unwrap_err();
            assert_eq!(error, format!("{name}: {expected} (in the variable {name})"));
        };
        let url = "must be a URL such as \"http://127.0.0.1:4318\"";
        check("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4318", url);
        check("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c/?key=secret", url);
        let named = "must not hold a user name or password; headers may";
        check("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@c", named);
        let pairs = "must look like name=value,name=value";
        check("OTEL_EXPORTER_OTLP_HEADERS", "secret", pairs);
    }

    #[test]
    fn a_url_without_a_path_gets_the_usual_one() {
        let check = |text: &str, expected: &str| {
            let traces = TracesConfig {
                otlp_endpoint: Some(text.into()),
                ..TracesConfig::default()
            };
            assert_eq!(traces.url().unwrap().to_string(), expected);
        };
        check("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces");
        check("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces");
        check(
            "https://c.example/otlp/v1/traces",
            "https://c.example/otlp/v1/traces",
        );
    }
}
