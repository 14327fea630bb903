//! `postrider audit`: lists the audit log, and verifies that it was not tampered with.

use super::ServerFlags;
use crate::client::ApiClient;
use crate::serve::AUDIT_DIRECTORY;
use crate::terminal::{Table, harmless, print, table, time};
use anyhow::{Context, Result, bail};
use clap::Args;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::path::Path;

const PATH: &str = "/postrider/v1/audit";
/// Lines per page of the server.
const PAGE: usize = 1000;
const LIMIT: usize = 100;

#[derive(Clone, Debug, Args)]
pub struct AuditArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    server: ServerFlags,
    /// Output format
    #[arg(
        long,
        short = 'o',
        value_enum,
        value_name = "FORM",
        default_value = "text",
        global = true
    )]
    output: AuditOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum AuditOutput {
    /// Tables and lines
    #[value(alias = "table")]
    Text,
    /// JSON list
    Json,
    /// Lines as they are on disk, oldest first
    Jsonl,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// List changes, key reads, logins, replays, purges, pauses, and what was refused
    List(ListAuditArgs),
    /// Check that no line was edited, removed or moved. With --data-dir and without --server, reads
    /// the files there, even while the server is stopped
    Verify,
}

#[derive(Clone, Debug, Args)]
struct ListAuditArgs {
    /// Only since this time, or this long ago
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only before this time
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Only changes by this client
    #[arg(long, value_name = "CLIENT")]
    actor: Option<String>,
    /// Only this action, or all that begin with this word: topic, topic.write
    #[arg(long)]
    action: Option<String>,
    /// Only resources that contain this text
    #[arg(long)]
    resource: Option<String>,
    /// At most this many [default: 100; with --output jsonl all]
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,
}

pub async fn audit(args: &AuditArgs) -> Result<()> {
    match &args.command {
        Command::List(list) => show(args, list).await,
        Command::Verify => verify(args).await,
    }
}

#[derive(Deserialize)]
struct AuditLogPage {
    value: Vec<Box<RawValue>>,
    cursor: Option<String>,
    #[serde(default)]
    missing: Vec<String>,
}

async fn show(args: &AuditArgs, list: &ListAuditArgs) -> Result<()> {
    let client = ApiClient::new(&args.server.client)?;
    let export = args.output == AuditOutput::Jsonl;
    let limit = list.limit.unwrap_or(if export { usize::MAX } else { LIMIT });
    let mut lines: Vec<Box<RawValue>> = Vec::new();
    let mut found = 0;
    let mut cursor: Option<String> = None;
    while found < limit {
        let path = path(list, export, (limit - found).min(PAGE), cursor.as_deref());
        let page: AuditLogPage = serde_json::from_slice(&client.get(&path).await?)
            .context("the server's answer is not what was expected")?;
        if !page.missing.is_empty() {
            eprintln!("these nodes did not answer: {}", page.missing.join(", "));
        }
        found += page.value.len();
        match export {
            // Printed page by page: there may be very many lines.
            true if page.value.is_empty() => {}
            true => {
                let text: Vec<&str> = page.value.iter().map(|line| line.get()).collect();
                print(text.join("\n"))?;
            }
            false => lines.extend(page.value),
        }
        cursor = page.cursor;
        if cursor.is_none() {
            break;
        }
    }
    match args.output {
        AuditOutput::Jsonl => Ok(()),
        AuditOutput::Json => {
            let lines: Vec<Value> = read(&lines)?;
            print(serde_json::to_string_pretty(&lines)?)
        }
        AuditOutput::Text if lines.is_empty() => {
            eprintln!("there are none");
            Ok(())
        }
        AuditOutput::Text => print(shown(&read(&lines)?)),
    }
}

fn read(lines: &[Box<RawValue>]) -> Result<Vec<Value>> {
    let read = lines.iter().map(|line| serde_json::from_str(line.get()));
    read.collect::<Result<_, _>>()
        .context("a line of the audit log is not JSON")
}

fn path(list: &ListAuditArgs, export: bool, limit: usize, cursor: Option<&str>) -> String {
    let mut path = format!(
        "{PATH}?limit={limit}&order={}",
        if export { "asc" } else { "desc" }
    );
    let given = [
        ("since", list.since.as_deref()),
        ("until", list.until.as_deref()),
        ("actor", list.actor.as_deref()),
        ("action", list.action.as_deref()),
        ("resource", list.resource.as_deref()),
        ("cursor", cursor),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            path.push_str(&format!(
                "&{name}={}",
                utf8_percent_encode(value, NON_ALPHANUMERIC)
            ));
        }
    }
    path
}

fn shown(lines: &[Value]) -> Table {
    let columns = ["seq", "time", "client", "address", "action", "result", "resource"];
    let mut table = table(&columns, &[0]);
    for line in lines {
        let text = |at: &str| {
            let found = line
                .pointer(at)
                .and_then(Value::as_str)
                .filter(|text| !text.is_empty());
            found.map_or_else(|| "-".to_owned(), harmless)
        };
        let status = line.pointer("/outcome/status").and_then(Value::as_u64);
        let result = match status {
            Some(status) => format!("{} {status}", text("/outcome/result")),
            None => text("/outcome/result"),
        };
        table.add_row([
            line["seq"].to_string(),
            time(&text("/time")),
            text("/actor/id"),
            text("/address"),
            text("/action"),
            result,
            text("/resource"),
        ]);
    }
    table
}

async fn verify(args: &AuditArgs) -> Result<()> {
    let flags = &args.server.client;
    let found = match &flags.data_dir {
        Some(directory) if flags.server.is_none() && flags.context.is_none() => on_disk(directory)?,
        _ => {
            let client = ApiClient::new(flags)?;
            serde_json::from_slice(&client.get(&format!("{PATH}/verify")).await?)?
        }
    };
    if args.output != AuditOutput::Text {
        print(serde_json::to_string_pretty(&found)?)?;
    }
    let mut broken = Vec::new();
    match found["nodes"].as_array() {
        Some(nodes) => {
            for node in nodes {
                let name = harmless(node["node"].as_str().unwrap_or_default());
                broken.extend(judged(args, &format!("node {name}: "), node)?);
            }
        }
        None => broken.extend(judged(args, "", &found)?),
    }
    if let Some(missing) = found["missing"].as_array() {
        let names: Vec<&str> = missing.iter().filter_map(Value::as_str).collect();
        broken.push(format!("these nodes did not answer: {}", names.join(", ")));
    }
    if !broken.is_empty() {
        bail!("{}", broken.join("\n"));
    }
    Ok(())
}

fn on_disk(directory: &Path) -> Result<Value> {
    let place = directory.join(AUDIT_DIRECTORY);
    let found = postrider_audit::verify(&place).with_context(|| format!("reading {}", place.display()))?;
    Ok(serde_json::to_value(found)?)
}

/// Prints the findings that hold and returns those that do not.
fn judged(args: &AuditArgs, of: &str, found: &Value) -> Result<Option<String>> {
    let number = |name: &str| found[name].as_u64().unwrap_or(0);
    if let Some(broken) = found.get("broken") {
        let text = |name: &str| harmless(broken[name].as_str().unwrap_or_default());
        return Ok(Some(format!(
            "{of}the audit log is broken at line {} of {} (number {}): {}",
            broken["line"],
            text("file"),
            broken["seq"],
            text("reason")
        )));
    }
    if args.output == AuditOutput::Text {
        let (first, last) = (number("firstSeq"), number("lastSeq"));
        print(format!(
            "{of}intact: {} lines, numbers {first} to {last}\nhead {}",
            number("lines"),
            harmless(found["head"].as_str().unwrap_or_default())
        ))?;
        if number("unfinishedBytes") > 0 {
            let bytes = number("unfinishedBytes");
            print(format!(
                "{of}{bytes} bytes of an unfinished line are at the end, as a crash leaves them; the next start cuts them off"
            ))?;
        }
    }
    Ok(None)
}
