//! Sources of values, laid over each other, each remembered for error messages.

use super::{ConfigError, ServeFlags, nearest};
use figment::error::{Actual, Kind};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

const PREFIX: &str = "postrider_";

/// Variables that have our prefix but are not settings.
const NOT_KEYS: [&str; 8] = [
    "config",
    "context",
    "contexts",
    "group",
    "secret",
    "seed",
    "server",
    "slow_tests",
];

/// Most mistakes that are reported at once.
const REFUSED_MAX: usize = 20;

pub struct ConfigLayers {
    merged: Figment,
    pub file: Option<PathBuf>,
}

impl ConfigLayers {
    pub fn read(flags: &ServeFlags, env: &[(String, String)]) -> Result<ConfigLayers, ConfigError> {
        let mut merged = Figment::new();
        let file = named_file(flags, env);
        if let Some((path, source)) = &file {
            merged = merged.merge(read_file(path, source)?);
        }
        for (name, text) in env {
            if let Some(key) = key_of(name) {
                merged = merged.merge(read_variable(name, &key, text)?);
            }
        }
        for layer in read_flags(flags) {
            merged = merged.merge(layer);
        }
        Ok(ConfigLayers {
            merged,
            file: file.map(|(path, _)| path),
        })
    }

    /// Parses the merged values. Text is converted to a number or a boolean where one is expected,
    /// since variables have no types. All mistakes are reported, as far as one does not hide
    /// another.
    pub fn extract<T: DeserializeOwned>(&self) -> Result<T, Vec<ConfigError>> {
        let mut rest = self.merged.clone();
        let mut refused: Vec<ConfigError> = Vec::new();
        loop {
            let error = match rest.extract_lossy() {
                Ok(parsed) if refused.is_empty() => return Ok(parsed),
                Ok(_) => return Err(refused),
                Err(error) => error,
            };
            let without = without(&rest, &error.path);
            refused.push(self.with_source(explain(self.key_at(&error.path), error.kind)));
            match without {
                Some(values) if refused.len() < REFUSED_MAX => rest = values,
                _ => return Err(refused),
            }
        }
    }

    /// A path in display form: `topic[1].name`. A number is an index unless it is found in a table.
    fn key_at(&self, path: &[String]) -> String {
        let mut key = String::new();
        for (depth, part) in path.iter().enumerate() {
            let holder = self.merged.find_value(&path[..depth].join("."));
            let in_table = matches!(holder, Ok(Value::Dict(..)));
            if part.parse::<usize>().is_ok() && !in_table {
                key.push_str(&format!("[{part}]"));
            } else {
                if !key.is_empty() {
                    key.push('.');
                }
                key.push_str(part);
            }
        }
        key
    }

    /// Whether any layer sets this key.
    pub fn contains(&self, key: &str) -> bool {
        self.merged.contains(key)
    }

    /// Adds the source of the refused value: the layer of its key, or of the nearest table or list
    /// around it.
    pub fn with_source(&self, mut refused: ConfigError) -> ConfigError {
        let path = refused.key.split('[').next().unwrap_or_default();
        let ends = path.match_indices('.').map(|(dot, _)| dot).chain([path.len()]);
        refused.source = ends
            .rev()
            .find_map(|end| self.merged.find_metadata(&path[..end]))
            .map(|metadata| metadata.name.to_string());
        refused
    }
}

/// The same values without one of them, so that further mistakes show. `None` if the value is
/// absent: a missing value cannot be removed.
fn without(merged: &Figment, path: &[String]) -> Option<Figment> {
    let (last, around) = path.split_last()?;
    let mut values = merged.data().ok()?.remove(&Profile::Default)?;
    let Some((first, between)) = around.split_first() else {
        values.remove(last)?;
        return Some(Figment::new().merge(ConfigLayer {
            origin: String::new(),
            values,
        }));
    };
    let mut holder = values.get_mut(first)?;
    for part in between {
        holder = match holder {
            Value::Dict(_, dict) => dict.get_mut(part)?,
            Value::Array(_, items) => items.get_mut(part.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    match holder {
        Value::Dict(_, dict) => drop(dict.remove(last)?),
        Value::Array(_, items) => {
            let at: usize = last.parse().ok()?;
            if at >= items.len() {
                return None;
            }
            items.remove(at);
        }
        _ => return None,
    }
    Some(Figment::new().merge(ConfigLayer {
        origin: String::new(),
        values,
    }))
}

/// Values with one origin.
struct ConfigLayer {
    origin: String,
    values: Dict,
}

impl ConfigLayer {
    /// A layer with one value at a dotted key.
    fn at(origin: impl Into<String>, key: &str, value: Value) -> ConfigLayer {
        ConfigLayer {
            origin: origin.into(),
            values: figment::util::nest(key, value)
                .into_dict()
                .expect("a key has at least one part"),
        }
    }
}

impl Provider for ConfigLayer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }
    fn data(&self) -> figment::error::Result<Map<Profile, Dict>> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

/// The file to read and the flag or variable that names it.
fn named_file(flags: &ServeFlags, env: &[(String, String)]) -> Option<(PathBuf, String)> {
    if let Some(path) = &flags.config {
        return Some((path.clone(), "the flag --config".into()));
    }
    let (name, path) = env
        .iter()
        .find(|(name, path)| name.eq_ignore_ascii_case("POSTRIDER_CONFIG") && !path.is_empty())?;
    Some((path.into(), format!("the variable {name}")))
}

fn read_file(path: &Path, named_by: &str) -> Result<ConfigLayer, ConfigError> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError {
        source: Some(named_by.into()),
        ..ConfigError::new("config", format!("cannot read {origin}: {error}"))
    })?;
    let table: toml::Table = toml::from_str(&text).map_err(|error| {
        // The parser's error message quotes the line, which might hold a secret.
        let before = &text[..error.span().map_or(0, |span| span.start.min(text.len()))];
        let line = before.matches('\n').count() + 1;
        ConfigError::new(&origin, format!("line {line}: {}", error.message()))
    })?;
    Ok(ConfigLayer {
        origin,
        values: table.into_iter().map(|(k, v)| (k, value_of(v))).collect(),
    })
}

/// The key that a variable sets: `listen.https` for `POSTRIDER_LISTEN__HTTPS`.
fn key_of(name: &str) -> Option<String> {
    let key = name.to_ascii_lowercase();
    let key = key.strip_prefix(PREFIX)?;
    if NOT_KEYS.contains(&key) || is_service_link(key) {
        return None;
    }
    Some(key.replace("__", "."))
}

/// Kubernetes sets variables with our prefix for every service named "postrider".
fn is_service_link(key: &str) -> bool {
    key == "port" || key == "service_host" || key.starts_with("service_port") || key.starts_with("port_")
}

/// A variable is text unless it is written as a TOML list or table.
fn read_variable(name: &str, key: &str, text: &str) -> Result<ConfigLayer, ConfigError> {
    let origin = format!("the variable {name}");
    let refused = |reason: String| ConfigError {
        source: Some(origin.clone()),
        ..ConfigError::new(key, reason)
    };
    if key.split('.').any(str::is_empty) {
        return Err(refused("unknown key".into()));
    }
    let value = if text.starts_with(['[', '{']) {
        let mut table: toml::Table = toml::from_str(&format!("value = {text}"))
            .map_err(|error| refused(format!("not a TOML list or table: {}", error.message())))?;
        table
            .remove("value")
            .map(value_of)
            .expect("the text begins with this key")
    } else {
        Value::from(text)
    };
    Ok(ConfigLayer::at(origin, key, value))
}

fn read_flags(flags: &ServeFlags) -> Vec<ConfigLayer> {
    let data_dir = flags
        .data_dir
        .as_ref()
        .map(|dir| dir.to_string_lossy().into_owned());
    [
        ("--data-dir", "data_dir", &data_dir),
        ("--https", "listen.https", &flags.https),
        ("--http", "listen.http", &flags.http),
        ("--profile", "profile", &flags.profile),
        ("--log-format", "log.format", &flags.log_format),
    ]
    .into_iter()
    .filter_map(|(flag, key, text)| {
        let text = text.as_deref()?;
        Some(ConfigLayer::at(
            format!("the flag {flag}"),
            key,
            Value::from(text),
        ))
    })
    .collect()
}

/// TOML dates become the text that they were written as.
fn value_of(value: toml::Value) -> Value {
    match value {
        toml::Value::String(text) => Value::from(text),
        toml::Value::Integer(number) => Value::from(number),
        toml::Value::Float(number) => Value::from(number),
        toml::Value::Boolean(truth) => Value::from(truth),
        toml::Value::Datetime(at) => Value::from(at.to_string()),
        toml::Value::Array(items) => Value::from(items.into_iter().map(value_of).collect::<Vec<_>>()),
        toml::Value::Table(table) => {
            Value::from(table.into_iter().map(|(k, v)| (k, value_of(v))).collect::<Dict>())
        }
    }
}

/// Rephrases a parser error. The value is shown only where it cannot be a secret.
fn explain(key: String, kind: Kind) -> ConfigError {
    let listed = |names: &[&str]| {
        names
            .iter()
            .map(|name| format!("\"{name}\""))
            .collect::<Vec<_>>()
            .join(", ")
    };
    match kind {
        Kind::UnknownField(field, known) => ConfigError {
            hint: nearest(&field, known.iter().copied()).map(Into::into),
            ..ConfigError::new(key, "unknown key")
        },
        Kind::UnknownVariant(word, known) => ConfigError {
            hint: nearest(&word, known.iter().copied()).map(Into::into),
            ..ConfigError::new(key, format!("\"{word}\" is not one of {}", listed(known)))
        },
        Kind::MissingField(field) => ConfigError::new(
            if key.is_empty() {
                field.into()
            } else {
                format!("{key}.{field}")
            },
            "is required",
        ),
        Kind::InvalidType(found, wanted) => ConfigError::new(
            key,
            format!("must be {}, not {}", type_name(&wanted), kind_name(&found)),
        ),
        Kind::InvalidValue(found, wanted) => ConfigError::new(
            key,
            format!("{} does not fit {}", kind_name(&found), type_name(&wanted)),
        ),
        Kind::DuplicateField(field) => ConfigError::new(key, format!("{field} is given twice")),
        Kind::Message(reason) => ConfigError::new(key, reason),
        other => ConfigError::new(key, other.to_string()),
    }
}

/// Plain name of a type in serde's messages.
fn type_name(wanted: &str) -> String {
    match wanted {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number".into(),
        "a string" | "path string" => "text".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list".into(),
        "a map" => "a table".into(),
        other if other.starts_with("struct ") => "a table".into(),
        other => other.into(),
    }
}

fn kind_name(found: &Actual) -> String {
    match found {
        Actual::Bool(truth) => truth.to_string(),
        Actual::Unsigned(number) => number.to_string(),
        Actual::Signed(number) => number.to_string(),
        Actual::Float(number) => number.to_string(),
        Actual::Str(_) | Actual::Char(_) => "text".into(),
        Actual::Seq => "a list".into(),
        Actual::Map => "a table".into(),
        other => other.to_string(),
    }
}
