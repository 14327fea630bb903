//! `postrider import`: converts the configuration of the two community emulators to a declaration
//! file.

mod relaxed;
mod pm7y;
mod workleap;

use super::apply::{ApplyFlags, apply_declarations};
use super::args::read_text;
use super::declarations::{DeclarationSet, FileFormat};
use super::{OutputFormat, ServerFlags, UsageError};
use crate::private_files;
use crate::terminal::print;
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;

#[derive(Clone, Debug, Args)]
pub struct ImportArgs {
    /// Emulator that the configuration belongs to
    #[arg(value_enum)]
    from: SourceEmulator,
    /// Its configuration file, usually appsettings.json, or - for the standard input
    #[arg(value_name = "FILE|-")]
    file: String,
    /// Declaration file to write: .yaml, .json or .toml [default: print YAML]
    #[arg(long, short = 'o', value_name = "FILE")]
    output: Option<String>,
    /// Apply it at once
    #[arg(long)]
    apply: bool,
    #[command(flatten)]
    how: ApplyFlags,
    #[command(flatten)]
    server: ServerFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SourceEmulator {
    /// AzureEventGridSimulator
    Pm7y,
    /// EventGridEmulator
    Workleap,
}

/// Result of converting a configuration.
#[derive(Debug, Default, Serialize)]
struct ImportResult {
    topics: Vec<ImportedTopic>,
    /// Differences in behaviour, and what to do about them.
    #[serde(skip)]
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ImportedTopic {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key1: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_schema: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    subscriptions: Vec<ImportedSubscription>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ImportedSubscription {
    name: String,
    destination: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    filter: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_delivery_schema: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_policy: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dead_letter_destination: Option<Value>,
}

pub async fn import(args: &ImportArgs) -> Result<()> {
    let text = read_text(&args.file)?;
    let name = if args.file == "-" {
        "the standard input"
    } else {
        &args.file
    };
    let value = relaxed::parse(&text).map_err(|e| UsageError::new(format!("{name} is not JSON: {e}")))?;
    let imported = match args.from {
        SourceEmulator::Pm7y => pm7y::read(&value),
        SourceEmulator::Workleap => workleap::read(&value),
    };
    let imported = imported.map_err(|reason| UsageError::new(format!("{name}: {reason}")))?;
    for warning in &imported.warnings {
        eprintln!("warning: {warning}");
    }
    if imported.topics.is_empty() {
        return Err(UsageError::new(format!("{name}: there is no topic to import")).into());
    }
    let format = args.output.as_deref().map_or(FileFormat::Yaml, FileFormat::of);
    let grid_file = imported.text(format)?;
    match &args.output {
        Some(path) => {
            private_files::write(Path::new(path), &grid_file).with_context(|| format!("writing {path}"))?;
            eprintln!("wrote {path}: {} topics", imported.topics.len());
        }
        None if args.apply => {}
        None => print(grid_file.trim_end())?,
    }
    if !args.apply {
        return Ok(());
    }
    let mut grid = DeclarationSet::default();
    grid.add(&grid_file, format, args.output.as_deref().unwrap_or(name))?;
    apply_declarations(grid, &args.how, &args.server, OutputFormat::Text).await
}

impl ImportResult {
    fn text(&self, format: FileFormat) -> Result<String> {
        Ok(match format {
            FileFormat::Yaml => serde_saphyr::to_string(self)?,
            FileFormat::Json => serde_json::to_string_pretty(self)? + "\n",
            // TOML uses the names of the server's configuration file, so that the server takes this
            // file, too, with its keys.
            FileFormat::Toml => {
                let text = serde_json::to_string(self)?;
                let mut value: Value = serde_json::from_str(&text)?;
                let mut topics = value["topics"].take();
                for topic in topics.as_array_mut().into_iter().flatten() {
                    if let Value::Object(topic) = topic
                        && let Some(its) = topic.remove("subscriptions")
                    {
                        topic.insert("subscription".into(), its);
                    }
                }
                toml::to_string(&json!({ "topic": topics }))?
            }
        })
    }

    fn warn(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.warnings.contains(&text) {
            self.warnings.push(text);
        }
    }

    /// Warns of names that the emulator accepts and Postrider does not.
    fn warn_of_names(&mut self) {
        let mut found = Vec::new();
        for topic in &self.topics {
            if !(3..=50).contains(&topic.name.chars().count()) {
                found.push(format!(
                    "topic {:?}: a name has 3 to 50 characters here; rename it before applying the file",
                    topic.name
                ));
            }
        }
        self.warnings.extend(found);
    }

    /// Warns of top-level members that have no meaning here.
    fn warn_of_rest(&mut self, root: &Map<String, Value>, known: &[&str]) {
        let rest: BTreeSet<&str> = root
            .keys()
            .map(String::as_str)
            .filter(|name| !known.iter().any(|known| known.eq_ignore_ascii_case(name)))
            .collect();
        if !rest.is_empty() {
            let rest: Vec<_> = rest.into_iter().collect();
            self.warn(format!("left out, of no use here: {}", rest.join(", ")));
        }
    }
}

const NO_VALIDATION: &str = "the emulator did not ask these webhooks whether they want events; Postrider does, by a \
     validation event. A webhook that cannot answer it needs \"[validation] enabled = false\" in the server's configuration";

fn web_hook(url: &str) -> Value {
    json!({"endpointType": "WebHook", "properties": {"endpointUrl": url}})
}

/// Looks up a member without regard to case, as .NET reads configuration.
fn member<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let map = value.as_object()?;
    let found = map.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
    found.map(|(_, value)| value).filter(|value| !value.is_null())
}

fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    member(value, name)?
        .as_str()
        .filter(|text| !text.trim().is_empty())
}

/// .NET takes the text `"true"` for true.
fn flag(value: &Value, name: &str) -> Option<bool> {
    match member(value, name)? {
        Value::Bool(flag) => Some(*flag),
        Value::String(text) => text.to_ascii_lowercase().parse().ok(),
        _ => None,
    }
}

fn number(value: &Value, name: &str) -> Option<u64> {
    match member(value, name)? {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

fn list<'a>(value: &'a Value, name: &str) -> Result<&'a [Value], String> {
    match member(value, name) {
        None => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(_) => Err(format!("{name} must be a list")),
    }
}
