//! `postrider event`: sends events from the command line, and looks up their history.

use super::args::{NameValueArg, SchemaArg, read_text};
use super::ids::ResourceKind;
use super::keys::KeyOwner;
use super::management_client::{ManagementClient, ServerRefusal, is_refused, path_and_query};
use super::{CliFlags, OutputFormat, UsageError, event_history};
use crate::client::{ApiAnswer, encoded};
use crate::config::ConfigSecret;
use crate::terminal::{harmless, print};
use anyhow::{Context, Result};
use bytes::Bytes;
use clap::Args;
use http::Method;
use postrider_core::time::{Clock, Timestamp};
use postrider_engine::clock::SystemClock;
use serde_json::{Value, json};
use std::convert::Infallible;

const VERSION: &str = "2018-01-01";
/// Events in one publish request, which is accepted or refused as a whole.
const EVENTS_PER_REQUEST: u64 = 100;
/// Path of the recorded events.
const RECORDED: &str = "/postrider/v1/events";
/// Largest page of the server.
const FOUND_AT_ONCE_MAX: usize = 1000;
/// Ids of sent events that are printed; the JSON has all of them.
const IDS_SHOWN_MAX: usize = 20;
const NOT_UNDERSTOOD: &str = "the server's answer is not understood: is it of another version?";

#[derive(Clone, Debug, Args)]
pub struct EventArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Send an event made of these flags, or events from a file
    Send(SendArgs),
    /// Show the history of an event: its subscriptions, every attempt, what comes next
    Trace {
        /// Id of the event
        id: String,
    },
    /// Find recorded events, latest first
    Search(SearchArgs),
}

#[derive(Clone, Debug, Default, Args)]
struct SearchArgs {
    /// Events with this id
    #[arg(long)]
    id: Option<String>,
    /// Events of this topic or domain, by name or resource id
    #[arg(long, value_name = "NAME|ID")]
    topic: Option<String>,
    /// Events matched by this subscription: NAME, TOPIC/NAME or a resource id
    #[arg(long, value_name = "NAME|ID")]
    subscription: Option<String>,
    /// Events of this type
    #[arg(long = "type", visible_alias = "event-type", value_name = "TYPE")]
    kind: Option<String>,
    /// Events whose subject begins with this text
    #[arg(long, visible_alias = "subject-begins-with", value_name = "TEXT")]
    subject: Option<String>,
    /// Events in this state: delivered, pending, retrying, deadLettered, dropped, unmatched or
    /// mixed
    #[arg(long)]
    state: Option<String>,
    /// Events with an attempt of this outcome: Success, Busy, TimedOut, …
    #[arg(long)]
    outcome: Option<String>,
    /// Events accepted since this time (2030-01-01T00:00:00Z), or this long ago, such as 1h
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Events accepted before this time (2030-01-01T00:00:00Z), or this long ago, such as 1h
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// At most this many
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Continue where an earlier search ended
    #[arg(long)]
    cursor: Option<String>,
}

#[derive(Clone, Debug, Args)]
struct SendArgs {
    #[command(flatten)]
    to: KeyOwner,
    /// Schema of the event [default: that of the topic]
    #[arg(long, value_name = "SCHEMA", ignore_case = true)]
    schema: Option<SchemaArg>,
    /// An event or a list of events as JSON, sent unchanged
    #[arg(long, value_name = "FILE|-", conflicts_with_all = ["data", "kind", "subject", "id", "source", "count", "data_version", "domain_topic"])]
    body: Option<String>,
    #[command(flatten)]
    event: EventFlags,
    /// Send this many events, each with an id of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    count: u64,
    /// A header of the request; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE")]
    headers: Vec<NameValueArg>,
    /// Publish with this key [default: key1 from the server, or else the client's secret]
    #[arg(long, value_name = "KEY", value_parser = |text: &str| Ok::<_, Infallible>(ConfigSecret::new(text)))]
    key: Option<ConfigSecret>,
}

#[derive(Clone, Debug, Default, Args)]
struct EventFlags {
    /// The event's data: JSON, @FILE, or - for the standard input
    #[arg(long, value_name = "JSON|@FILE|-")]
    data: Option<String>,
    /// The event's type [default: Postrider.Test]
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// The event's subject [default: postrider]
    #[arg(long, value_name = "TEXT")]
    subject: Option<String>,
    /// The event's id [default: a new one]
    #[arg(long)]
    id: Option<String>,
    /// A CloudEvent's source [default: /postrider/cli]
    #[arg(long, value_name = "TEXT")]
    source: Option<String>,
    /// The version of the data [default: 1.0]
    #[arg(long, value_name = "TEXT")]
    data_version: Option<String>,
    /// Topic of the domain
    #[arg(long, value_name = "NAME")]
    domain_topic: Option<String>,
}

pub async fn event(args: &EventArgs) -> Result<()> {
    match &args.command {
        Command::Send(send_args) => send(send_args, &args.flags).await,
        Command::Trace { id } => trace(id, &args.flags).await,
        Command::Search(search_args) => search(search_args, &args.flags).await,
    }
}

async fn trace(id: &str, flags: &CliFlags) -> Result<()> {
    let arm = flags.connect().await?;
    let answer = arm
        .send(Method::GET, &format!("{RECORDED}/{}", encoded(id)), None)
        .await?;
    match flags.output.form() {
        OutputFormat::Json => print(std::str::from_utf8(&answer.body)?),
        OutputFormat::Text => {
            let found = serde_json::from_slice(&answer.body).context(NOT_UNDERSTOOD)?;
            print(event_history::timeline(&found).trim_end())
        }
    }
}

impl SearchArgs {
    fn path(&self, left: usize, cursor: Option<&str>) -> String {
        let mut path = format!("{RECORDED}?limit={}", left.min(FOUND_AT_ONCE_MAX));
        let given = [
            ("id", &self.id),
            ("topic", &self.topic),
            ("subscription", &self.subscription),
            ("type", &self.kind),
            ("subject", &self.subject),
            ("state", &self.state),
            ("outcome", &self.outcome),
            ("since", &self.since),
            ("until", &self.until),
        ];
        let given = given
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_deref()?)));
        for (name, value) in given.chain(cursor.map(|cursor| ("cursor", cursor))) {
            path.push_str(&format!("&{name}={}", encoded(value)));
        }
        path
    }
}

async fn search(args: &SearchArgs, flags: &CliFlags) -> Result<()> {
    let arm = flags.connect().await?;
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let mut found = Vec::new();
    let mut cursor = args.cursor.clone();
    // The server searches for a short time only, then returns a cursor to continue from.
    loop {
        let path = args.path(limit - found.len(), cursor.as_deref());
        let answer = arm.send(Method::GET, &path, None).await?;
        let mut page: Value = serde_json::from_slice(&answer.body).context(NOT_UNDERSTOOD)?;
        if let Value::Array(events) = page["value"].take() {
            found.extend(events);
        }
        cursor = page["cursor"].as_str().map(str::to_owned);
        if cursor.is_none() || found.len() >= limit {
            break;
        }
    }
    match flags.output.form() {
        OutputFormat::Json => print(serde_json::to_string_pretty(&found)?)?,
        OutputFormat::Text if found.is_empty() => eprintln!("nothing found"),
        OutputFormat::Text => print(event_history::events(&found))?,
    }
    if let Some(cursor) = cursor {
        eprintln!("there may be more: raise --limit, or go on with --cursor {cursor}");
    }
    Ok(())
}

async fn send(send: &SendArgs, flags: &CliFlags) -> Result<()> {
    if send.count > 1 && send.event.id.is_some() {
        return Err(UsageError::new("--id is for one event, not with --count").into());
    }
    if send.event.domain_topic.is_some() && send.to.domain.is_none() {
        return Err(UsageError::new("--domain-topic needs --domain").into());
    }
    let arm = flags.connect().await?;
    let publisher = EventPublisher::find(&arm, send).await?;
    let mut ids = Vec::new();
    let sent = match &send.body {
        Some(path) => {
            let body = read_text(path)?;
            let events: Value = serde_json::from_str(&body)
                .map_err(|e| UsageError::new(format!("{path} is not JSON: {e}")))?;
            let several = events.is_array();
            publisher.publish(&arm, several, body.into()).await?;
            match &events {
                Value::Array(all) => ids.extend(all.iter().filter_map(id_of)),
                one => ids.extend(id_of(one)),
            }
            events.as_array().map_or(1, |events| events.len() as u64)
        }
        None => {
            let data = send.event.data()?;
            let mut left = send.count;
            while left > 0 {
                let now = left.min(EVENTS_PER_REQUEST);
                let events: Vec<Value> = (0..now)
                    .map(|_| {
                        let id = uuid::Uuid::new_v4().to_string();
                        send.event.body(publisher.schema, &data, id, SystemClock.now())
                    })
                    .collect();
                publisher
                    .publish(&arm, true, json!(events).to_string().into())
                    .await?;
                ids.extend(events.iter().filter_map(id_of));
                left -= now;
            }
            send.count
        }
    };
    let (kind, name) = send.to.named();
    match flags.output.form() {
        OutputFormat::Json => print(json!({ "sent": sent, "ids": ids })),
        OutputFormat::Text => print(sent_text(sent, &ids, &format!("{} {name}", kind.noun()))),
    }
}

/// Id of a sent event; custom events have theirs in members that are not known here.
fn id_of(event: &Value) -> Option<String> {
    event["id"].as_str().map(str::to_owned)
}

/// How many events were sent where, and the ids to look them up by.
fn sent_text(sent: u64, ids: &[String], to: &str) -> String {
    let mut text = match (sent, ids) {
        (1, [id]) => return format!("sent event {} to the {to}", harmless(id)),
        (1, _) => return format!("sent 1 event to the {to}"),
        _ => format!("sent {sent} events to the {to}"),
    };
    for id in ids.iter().take(IDS_SHOWN_MAX) {
        text.push_str(&format!("\n  {}", harmless(id)));
    }
    if ids.len() > IDS_SHOWN_MAX {
        text.push_str(&format!("\n  … and {} more", ids.len() - IDS_SHOWN_MAX));
    }
    text
}

impl EventFlags {
    fn data(&self) -> Result<Value> {
        let Some(given) = &self.data else {
            return Ok(json!({}));
        };
        let text = match given.strip_prefix('@') {
            Some(path) => read_text(path)?,
            None if given == "-" => read_text("-")?,
            None => given.clone(),
        };
        serde_json::from_str(&text).map_err(|e| UsageError::new(format!("--data is not JSON: {e}")).into())
    }

    fn body(&self, schema: SchemaArg, data: &Value, id: String, now: Timestamp) -> Value {
        let or = |given: &Option<String>, otherwise: &str| json!(given.as_deref().unwrap_or(otherwise));
        let id = self.id.clone().unwrap_or(id);
        let kind = or(&self.kind, "Postrider.Test");
        let mut event = match schema {
            SchemaArg::CloudEvents => json!({
                "specversion": "1.0", "id": id, "type": kind, "source": or(&self.source, "/postrider/cli"),
                "time": now.to_string(), "datacontenttype": "application/json", "data": data,
            }),
            SchemaArg::EventGrid => json!({
                "id": id, "eventType": kind, "subject": or(&self.subject, "postrider"),
                "eventTime": now.to_string(), "dataVersion": or(&self.data_version, "1.0"), "data": data,
            }),
            // The members of custom events are unknown: the data is the event.
            SchemaArg::Custom => return data.clone(),
        };
        if let (SchemaArg::CloudEvents, Some(subject)) = (schema, &self.subject) {
            event["subject"] = json!(subject);
        }
        if let Some(topic) = &self.domain_topic {
            let member = match schema {
                SchemaArg::CloudEvents => "source",
                _ => "topic",
            };
            event[member] = json!(topic);
        }
        event
    }
}

/// Publish endpoint and credentials.
struct EventPublisher {
    path: String,
    schema: SchemaArg,
    key: Option<ConfigSecret>,
    headers: Vec<NameValueArg>,
}

impl EventPublisher {
    /// Reads the topic's endpoint and schema. A client that may only publish cannot, so the
    /// defaults are used for it.
    async fn find(arm: &ManagementClient, args: &SendArgs) -> Result<EventPublisher> {
        let (kind, name) = args.to.named();
        let segment = match kind {
            ResourceKind::Domain => "domains",
            _ => "topics",
        };
        let mut publisher = EventPublisher {
            path: format!("/{segment}/{}/api/events", encoded(name)),
            schema: args.schema.unwrap_or(SchemaArg::EventGrid),
            key: args.key.clone(),
            headers: args.headers.clone(),
        };
        let id = match args.to.id(arm).await {
            Ok(id) => id,
            Err(e) if is_refused(&e, 403) => return Ok(publisher),
            Err(e) => return Err(e),
        };
        let properties = arm.get(&id).await?.body["properties"].take();
        if let Some(endpoint) = properties["endpoint"].as_str() {
            publisher.path = path_and_query(endpoint)?;
        }
        if args.schema.is_none() {
            let named = properties["inputSchema"].as_str().and_then(SchemaArg::named);
            publisher.schema = named.unwrap_or(publisher.schema);
        }
        let keys_count = properties["disableLocalAuth"] != json!(true);
        if publisher.key.is_none() && keys_count {
            publisher.key = match arm.post(&id, "listKeys", None).await {
                Ok(keys) => keys["key1"].as_str().map(ConfigSecret::new),
                Err(e) if is_refused(&e, 403) => None,
                Err(e) => return Err(e),
            };
        }
        Ok(publisher)
    }

    async fn publish(&self, arm: &ManagementClient, several: bool, body: Bytes) -> Result<()> {
        let content = match (self.schema, several) {
            (SchemaArg::CloudEvents, true) => "application/cloudevents-batch+json; charset=utf-8",
            (SchemaArg::CloudEvents, false) => "application/cloudevents+json; charset=utf-8",
            _ => "application/json; charset=utf-8",
        };
        let mut headers = vec![("content-type", content)];
        headers.extend(self.key.as_ref().map(|key| ("aeg-sas-key", key.expose())));
        headers.extend(
            self.headers
                .iter()
                .map(|pair| (pair.name.as_str(), pair.value.as_str())),
        );
        let joint = if self.path.contains('?') { '&' } else { '?' };
        let path = format!("{}{joint}api-version={VERSION}", self.path);
        let answer: ApiAnswer = arm.raw(&path, self.key.is_none(), &headers, body).await?;
        match answer.status {
            200..300 => Ok(()),
            _ => Err(ServerRefusal::of(&answer).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_900_000_000);

    #[test]
    fn events_of_each_form() {
        let plain = EventFlags::default();
        let body = |event: &EventFlags, schema| event.body(schema, &json!({"a": 1}), "i".into(), NOW);
        assert_eq!(
            body(&plain, SchemaArg::EventGrid),
            json!({"id": "i", "eventType": "Postrider.Test", "subject": "postrider", "dataVersion": "1.0",
                   "eventTime": "2030-03-17T17:46:40.0000000Z", "data": {"a": 1}})
        );
        assert_eq!(
            body(&plain, SchemaArg::CloudEvents),
            json!({"specversion": "1.0", "id": "i", "type": "Postrider.Test", "source": "/postrider/cli",
                   "time": "2030-03-17T17:46:40.0000000Z", "datacontenttype": "application/json", "data": {"a": 1}})
        );
        assert_eq!(body(&plain, SchemaArg::Custom), json!({"a": 1}));
        let given = EventFlags {
            kind: Some("T".into()),
            subject: Some("s".into()),
            id: Some("x".into()),
            domain_topic: Some("tenant".into()),
            ..EventFlags::default()
        };
        let event = body(&given, SchemaArg::EventGrid);
        assert_eq!(
            [
                &event["id"],
                &event["eventType"],
                &event["subject"],
                &event["topic"]
            ],
            ["x", "T", "s", "tenant"]
        );
        let event = body(&given, SchemaArg::CloudEvents);
        assert_eq!([&event["source"], &event["subject"]], ["tenant", "s"]);
    }

    #[test]
    fn the_ids_of_sent_events_are_told() {
        let ids: Vec<String> = (0..30).map(|n| format!("i{n}")).collect();
        let told = |sent, ids| sent_text(sent, ids, "topic t");
        assert_eq!(told(1, &ids[..1]), "sent event i0 to the topic t");
        assert_eq!(told(1, &[]), "sent 1 event to the topic t");
        assert_eq!(told(2, &ids[..2]), "sent 2 events to the topic t\n  i0\n  i1");
        assert!(told(30, &ids).ends_with("\n  i19\n  … and 10 more"));
    }

    #[test]
    fn data_is_json() {
        let of = |data: &str| EventFlags {
            data: Some(data.into()),
            ..EventFlags::default()
        };
        assert_eq!(of("[1]").data().unwrap(), json!([1]));
        assert!(
            of("blue")
                .data()
                .unwrap_err()
                .to_string()
                .contains("--data is not JSON")
        );
        assert!(
            of("@/does/not/exist")
                .data()
                .unwrap_err()
                .to_string()
                .contains("/does/not/exist")
        );
    }
}
