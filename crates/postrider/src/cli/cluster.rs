//! `postrider cluster`: the nodes of a cluster, their partitions, and the health of the store.

use super::{CliFlags, OutputFormat, UsageError};
use crate::client::ApiClient;
use crate::terminal::{Table, can_ask, confirmed, harmless, print, table, wrapped};
use anyhow::{Context, Result, bail};
use clap::Args;
use postrider_core::duration;
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use serde_json::{Value, json};
use std::time::Duration;

const PATH: &str = "/postrider/v1/cluster";
/// Interval of checking whether a node has handed over all its partitions.
const LOOK_EVERY: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Args)]
pub struct ClusterCommandArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Show the nodes, their partitions, and the health of the store
    Status,
    /// Hand over a node's partitions to the others, such as before its machine is taken down
    Drain {
        /// Name or id of the node [default: the node that is asked]
        node: Option<String>,
        /// Wait until all partitions are handed over
        #[arg(long)]
        wait: bool,
        /// How long to wait
        #[arg(long, value_name = "TIME", default_value = "2m", value_parser = duration::parse, requires = "wait")]
        timeout: Duration,
        /// Drain even if no other node is live: nothing is delivered then
        #[arg(long)]
        force: bool,
        /// Do not ask for confirmation
        #[arg(long, short = 'y')]
        yes: bool,
    },
    /// Let a drained node take part again
    Undrain {
        /// Name or id of the node [default: the node that is asked]
        node: Option<String>,
    },
}

pub async fn cluster(args: &ClusterCommandArgs) -> Result<()> {
    let flags = &args.flags;
    let client = ApiClient::new(&flags.server.client)?;
    match &args.command {
        Command::Status => {
            let cluster = status(&client).await?;
            match flags.output.form() {
                OutputFormat::Json => print(serde_json::to_string_pretty(&cluster)?),
                OutputFormat::Text => print(shown(&cluster)),
            }
        }
        Command::Drain {
            node,
            wait,
            timeout,
            force,
            yes,
        } => {
            let what = node.as_deref().unwrap_or("the node that is asked");
            if !may_drain(*yes, what)? {
                return Ok(());
            }
            let told = tell(&client, "drain", node.as_deref(), *force).await?;
            if *wait {
                until_drained(&client, id_of(&told), *timeout).await?;
            }
            said(
                flags,
                &told,
                if *wait {
                    "has given its partitions away"
                } else {
                    "gives its partitions away"
                },
            )
        }
        Command::Undrain { node } => {
            let told = tell(&client, "undrain", node.as_deref(), false).await?;
            said(flags, &told, "takes part again")
        }
    }
}

async fn status(client: &ApiClient) -> Result<Value> {
    Ok(serde_json::from_slice(&client.get(PATH).await?)?)
}

fn may_drain(yes: bool, what: &str) -> Result<bool> {
    if yes {
        return Ok(true);
    }
    if !can_ask() {
        return Err(UsageError::new(format!(
            "there is no terminal to ask at: give --yes to drain {what}"
        ))
        .into());
    }
    let agreed = confirmed(&format!("Drain {what}?"))?;
    if !agreed {
        eprintln!("nothing done");
    }
    Ok(agreed)
}

async fn tell(client: &ApiClient, verb: &str, node: Option<&str>, force: bool) -> Result<Value> {
    let mut body = json!({});
    if let Some(node) = node {
        body["node"] = json!(node);
    }
    if force {
        body["force"] = json!(true);
    }
    let told = client.post(&format!("{PATH}/{verb}"), &body).await?;
    serde_json::from_slice(&told).context("the server's answer is not JSON")
}

fn id_of(told: &Value) -> &str {
    told["node"]["id"].as_str().unwrap_or_default()
}

/// The answer may come from a node other than the draining one, which learns of it one heartbeat
/// later.
async fn until_drained(client: &ApiClient, id: &str, timeout: Duration) -> Result<()> {
    let end = SystemClock.now() + timeout;
    loop {
        let cluster = status(client).await?;
        match left_of(&cluster, id) {
            Some(0) => return Ok(()),
            left if SystemClock.now() >= end => {
                let left = left.map_or("it has not begun".into(), |left| {
                    format!("{left} partitions are left")
                });
                bail!(
                    "it has not given everything away after {}: {left}",
                    duration::print(timeout)
                );
            }
            _ => SystemClock.sleep_until(SystemClock.now() + LOOK_EVERY).await,
        }
    }
}

/// Partitions that a draining node still owns; `None` if the node is not draining.
fn left_of(cluster: &Value, id: &str) -> Option<usize> {
    let node = list(cluster, "nodes").iter().find(|node| node["id"] == id)?;
    match node["standing"].as_str()? {
        "drained" | "left" | "dead" => Some(0),
        "draining" => {
            let owned = list(cluster, "partitions")
                .iter()
                .filter(|one| one["owner"] == id);
            Some(owned.count().max(1))
        }
        _ => None,
    }
}

fn said(flags: &CliFlags, told: &Value, how: &str) -> Result<()> {
    match flags.output.form() {
        OutputFormat::Json => print(serde_json::to_string_pretty(told)?),
        OutputFormat::Text => {
            let name = told["node"]["name"].as_str().unwrap_or_default();
            print(format!("{} {how}", harmless(name)))
        }
    }
}

fn list<'a>(of: &'a Value, name: &str) -> &'a [Value] {
    of[name].as_array().map_or(&[], Vec::as_slice)
}

fn text(of: &Value, name: &str) -> String {
    of[name].as_str().map_or_else(|| "-".into(), harmless)
}

fn number(of: &Value, name: &str) -> String {
    of[name].as_u64().unwrap_or(0).to_string()
}

fn shown(cluster: &Value) -> String {
    let mut parts = vec![nodes(cluster).to_string()];
    let kind = cluster["kind"].as_str().unwrap_or_default();
    let store = &cluster[kind];
    if kind == "jetstream" {
        parts.push(partitions(cluster).to_string());
    }
    let mut lines = vec![format!("store      {}", text(cluster, "kind"))];
    if kind == "jetstream" && store.is_object() {
        let (version, replicas, sync) = (
            text(store, "version"),
            number(store, "replicas"),
            text(store, "sync"),
        );
        lines.push(format!(
            "jetstream  version {version}, {replicas} replicas, sync {sync}"
        ));
    }
    lines.push(format!("promise    {}", text(store, "guarantee")));
    let counts = &cluster["counts"];
    let (takeovers, redelivered) = (number(counts, "takeovers"), number(counts, "redelivered"));
    let (fenced, forwarded) = (number(counts, "fenced"), number(counts, "forwarded"));
    lines.push(format!(
        "counts     {takeovers} takeovers, {redelivered} offered again, {fenced} refused as another's, {forwarded} handed on"
    ));
    let trouble = list(store, "trouble").iter().filter_map(Value::as_str);
    lines.extend(trouble.map(|why| format!("trouble    {}", harmless(why))));
    // Beside the names, which are all as wide.
    let lines = lines.iter().map(|line| wrapped(line, "counts     ".len()));
    parts.push(lines.collect::<Vec<_>>().join("\n"));
    parts.join("\n")
}

fn nodes(cluster: &Value) -> Table {
    let columns = [
        "node",
        "standing",
        "partitions",
        "waiting",
        "retrying",
        "delivered/s",
        "heard",
        "url",
        "version",
    ];
    let mut table = table(&columns, &[3, 4, 5]);
    for node in list(cluster, "nodes") {
        let mut name = text(node, "name");
        if node["id"] == cluster["node"] {
            name.push_str(" *");
        }
        let owns = list(node, "partitions").iter().map(Value::to_string);
        let heard = Duration::from_millis(node["heardAgoMs"].as_u64().unwrap_or(0));
        table.add_row([
            name,
            text(node, "standing"),
            owns.collect::<Vec<_>>().join(","),
            number(node, "waiting"),
            number(node, "retrying"),
            format!("{:.1}", node["rates"]["deliveredPerSec"].as_f64().unwrap_or(0.0)),
            format!("{:.1} s ago", heard.as_secs_f64()),
            text(node, "url"),
            text(node, "version"),
        ]);
    }
    table
}

fn partitions(cluster: &Value) -> Table {
    let columns = [
        "partition",
        "owner",
        "served",
        "waiting",
        "retrying",
        "letters",
        "leader",
        "lag",
        "messages",
        "bytes",
    ];
    let mut table = table(&columns, &[0, 3, 4, 5, 7, 8, 9]);
    let name = |id: &Value| {
        let node = list(cluster, "nodes").iter().find(|node| node["id"] == *id);
        node.map_or_else(
            || id.as_str().map_or_else(|| "-".into(), harmless),
            |node| text(node, "name"),
        )
    };
    for one in list(cluster, "partitions") {
        let stream = &one["stream"];
        let lag = list(stream, "replicas")
            .iter()
            .map(|copy| copy["lag"].as_u64().unwrap_or(0));
        let served = if one["serving"] == true { "yes" } else { "no" };
        table.add_row([
            number(one, "number"),
            name(&one["owner"]),
            served.into(),
            number(one, "waiting"),
            number(one, "retrying"),
            number(one, "letters"),
            text(stream, "leader"),
            lag.max().unwrap_or(0).to_string(),
            number(stream, "messages"),
            number(stream, "bytes"),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(standing: &str, owner: &str) -> Value {
        json!({
            "kind": "jetstream",
            "node": "a",
            "nodes": [
                {"id": "a", "name": "one", "standing": standing, "partitions": [0], "heardAgoMs": 1250,
                 "rates": {"deliveredPerSec": 2.0}, "url": "http://one\u{1b}[2J", "version": "1"},
                {"id": "b", "name": "two", "standing": "live", "partitions": []},
            ],
            "partitions": [{"number": 0, "owner": owner, "serving": true, "waiting": 7,
                "stream": {"leader": "n1", "replicas": [{"lag": 3}], "messages": 4, "bytes": 5}}],
            "jetstream": {"version": "2.15.1", "replicas": 3, "sync": "always", "guarantee": "it holds", "trouble": ["n2 is away"]},
            "counts": {"takeovers": 2},
        })
    }

    #[test]
    fn what_is_left_of_a_node_that_drains_is_known() {
        assert_eq!(left_of(&cluster("live", "a"), "a"), None);
        assert_eq!(left_of(&cluster("draining", "a"), "a"), Some(1));
        // The partition's key is free, but the node has not reported yet that it serves nothing.
        assert_eq!(left_of(&cluster("draining", "b"), "a"), Some(1));
        assert_eq!(left_of(&cluster("drained", "b"), "a"), Some(0));
        assert_eq!(left_of(&cluster("left", "b"), "a"), Some(0));
        assert_eq!(left_of(&cluster("live", "a"), "c"), None);
    }

    #[test]
    fn everything_is_in_the_tables_and_harmless() {
        let text = shown(&cluster("live", "a"));
        for part in [
            "one *",
            "two",
            "1.2 s ago",
            "n1",
            "it holds",
            "2.15.1",
            "2 takeovers",
            "trouble    n2 is away",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
        assert!(!text.contains('\u{1b}'), "{text:?}");
        let alone = json!({"kind": "embedded", "node": "a", "nodes": [{"id": "a", "name": "this server"}],
            "embedded": {"guarantee": "it survives"}, "counts": {}});
        let text = shown(&alone);
        assert!(
            text.contains("it survives") && !text.contains("partition "),
            "{text}"
        );
    }
}
