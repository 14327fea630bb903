//! Argument types and helpers that many commands share.

use super::UsageError;
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::io::Read;
use std::str::FromStr;

/// Event schemas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SchemaArg {
    #[value(name = "eventgrid", alias = "eventgridschema")]
    EventGrid,
    #[value(name = "cloudevents", aliases = ["cloudeventschemav1_0", "cloudevent"])]
    CloudEvents,
    #[value(name = "custom", aliases = ["customeventschema", "custominputschema"])]
    Custom,
}

impl SchemaArg {
    pub fn input_name(self) -> &'static str {
        match self {
            SchemaArg::EventGrid => "EventGridSchema",
            SchemaArg::CloudEvents => "CloudEventSchemaV1_0",
            SchemaArg::Custom => "CustomEventSchema",
        }
    }

    pub fn delivery_name(self) -> &'static str {
        match self {
            SchemaArg::Custom => "CustomInputSchema",
            other => other.input_name(),
        }
    }

    /// Schema by its name in the API.
    pub fn named(name: &str) -> Option<SchemaArg> {
        use clap::ValueEnum;
        SchemaArg::from_str(name, true).ok()
    }
}

/// `NAME=VALUE`; the value may have further equals signs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameValueArg {
    pub name: String,
    pub value: String,
}

impl FromStr for NameValueArg {
    type Err = String;
    fn from_str(text: &str) -> Result<NameValueArg, String> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(NameValueArg {
                name: name.to_owned(),
                value: value.to_owned(),
            }),
            _ => Err("must be NAME=VALUE".to_owned()),
        }
    }
}

pub fn pairs(pairs: &[NameValueArg]) -> Value {
    let members = pairs.iter().map(|pair| (pair.name.clone(), json!(pair.value)));
    Value::Object(members.collect())
}

/// A nested object, created if it is missing.
pub fn object<'a>(holder: &'a mut Value, name: &str) -> &'a mut Map<String, Value> {
    if !holder.is_object() {
        *holder = json!({});
    }
    let inner = &mut holder[name];
    if !inner.is_object() {
        *inner = json!({});
    }
    inner.as_object_mut().expect("it was just made one")
}

/// Reads a file, or the standard input for `-`.
pub fn read_text(path: &str) -> Result<String> {
    if path == "-" {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("reading the standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(path).with_context(|| format!("reading {path}"))
}

/// Reads a body that is sent unchanged.
pub fn read_json(path: &str) -> Result<Value> {
    let text = read_text(path)?;
    serde_json::from_str(&text).map_err(|e| {
        let name = if path == "-" { "the standard input" } else { path };
        UsageError::new(format!("{name} is not JSON: {e}")).into()
    })
}
