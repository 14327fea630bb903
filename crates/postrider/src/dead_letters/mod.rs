//! `postrider deadletters`: lists, shows, replays, writes and purges a server's dead letters.

mod follow;
mod text;
#[cfg(test)]
mod tests;

use crate::cli::UsageError;
use crate::client::{ApiClient, ClientFlags, encoded};
use crate::output::OutputFlags;
use crate::terminal::{can_ask, confirmed, harmless, print, time};
use anyhow::{Context, Result};
use clap::ArgGroup;
use follow::ReplayStatus;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::process::ExitCode;
use text::DeadLetterItem;

const ROOT: &str = "/postrider/v1/deadletters";
/// Longest page of a list.
const PAGE_MAX: usize = 1000;

/// List dead letters, look at them, replay or purge them
#[derive(Clone, Debug, clap::Args)]
pub struct DeadLettersArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    client: ClientFlags,
    #[command(flatten)]
    output: OutputFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// List dead letters, oldest first, then those that wait to be written
    List(ListDeadLettersArgs),
    /// Print one dead letter with its event
    Show {
        /// Id from the list
        id: String,
    },
    /// Count them by subscription and reason
    Summary,
    /// Deliver dead letters again; Ctrl-C cancels, --resume goes on
    Replay(ReplayArgs),
    /// Write dead letters to their blobs now instead of after the delay of their profile
    WriteNow(WriteArgs),
    /// List the replays
    Replays,
    /// Hide dead letters for good; blobs that hold no others are deleted
    Purge(PurgeArgs),
}

/// Selection of dead letters.
#[derive(Clone, Debug, Default, clap::Args)]
struct DeadLetterFilter {
    /// Of this subscription: NAME or TOPIC/NAME
    #[arg(long, value_name = "NAME")]
    subscription: Option<String>,
    /// Given up for this reason, such as MaxDeliveryAttemptsExceeded
    #[arg(long)]
    reason: Option<String>,
    /// Dead-lettered since a time (2030-01-01T00:00:00Z), or since that long ago (2h)
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
}

impl DeadLetterFilter {
    fn given(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let all = [
            ("subscription", &self.subscription),
            ("reason", &self.reason),
            ("since", &self.since),
        ];
        all.into_iter()
            .filter_map(|(name, value)| Some((name, value.as_ref()?)))
    }
}

/// A single dead letter, named by the argument or by a flag.
#[derive(Clone, Debug, Default, clap::Args)]
struct SingleDeadLetter {
    /// Just this dead letter: its id from the list
    id: Option<String>,
    #[arg(long = "id", value_name = "ID", hide = true, conflicts_with = "id")]
    flag: Option<String>,
}

impl SingleDeadLetter {
    fn id(&self) -> Option<&String> {
        self.id.as_ref().or(self.flag.as_ref())
    }
}

#[derive(Clone, Debug, clap::Args)]
struct ListDeadLettersArgs {
    #[command(flatten)]
    filter: DeadLetterFilter,
    /// List no more than this
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Continue where an earlier list ended
    #[arg(long, value_name = "TOKEN")]
    continuation: Option<String>,
}

#[derive(Clone, Debug, clap::Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true)
    .args(["id", "flag", "subscription", "reason", "since", "all", "resume", "cancel"]))]
struct ReplayArgs {
    #[command(flatten)]
    one: SingleDeadLetter,
    #[command(flatten)]
    filter: DeadLetterFilter,
    /// Replay all dead letters
    #[arg(long)]
    all: bool,
    /// Deliver to this subscription instead of the original ones
    #[arg(long, value_name = "NAME")]
    to: Option<String>,
    /// At most this many per second: N or N/s
    #[arg(long, value_name = "N/s", value_parser = read_rate)]
    rate: Option<u32>,
    /// Print the count and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Resume a replay that was cancelled
    #[arg(long, value_name = "REPLAY", conflicts_with_all = ["id", "flag", "subscription", "reason", "since", "all", "to", "rate", "dry_run"])]
    resume: Option<u64>,
    /// Cancel a replay
    #[arg(long, value_name = "REPLAY", conflicts_with_all = ["id", "flag", "subscription", "reason", "since", "all", "to", "rate", "dry_run", "resume", "detach"])]
    cancel: Option<u64>,
    /// Do not wait for the end
    #[arg(long)]
    detach: bool,
}

#[derive(Clone, Debug, clap::Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true)
    .args(["id", "flag", "subscription", "reason", "since", "all"]))]
struct PurgeArgs {
    #[command(flatten)]
    one: SingleDeadLetter,
    #[command(flatten)]
    filter: DeadLetterFilter,
    /// Purge all dead letters
    #[arg(long)]
    all: bool,
    /// Print the count and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
}

/// Without a filter, all pending dead letters are written.
#[derive(Clone, Debug, clap::Args)]
struct WriteArgs {
    #[command(flatten)]
    one: SingleDeadLetter,
    #[command(flatten)]
    filter: DeadLetterFilter,
    /// Write all, as without a filter
    #[arg(long)]
    all: bool,
    /// Print the count and do nothing
    #[arg(long)]
    dry_run: bool,
}

fn read_rate(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    let rate = number.parse().ok().filter(|rate| *rate > 0);
    rate.ok_or_else(|| "must be a whole number of events per second, such as 50/s".to_owned())
}

pub fn run(args: &DeadLettersArgs) -> Result<ExitCode> {
    let client = ApiClient::new(&args.client)?;
    let runtime = crate::serve::runtime(Some(1))?;
    runtime.block_on(answer(&client, args))
}

async fn answer(client: &ApiClient, args: &DeadLettersArgs) -> Result<ExitCode> {
    let json = args.output.is_json();
    match &args.command {
        Command::List(list_args) => list(client, list_args, json).await?,
        Command::Show { id } => {
            let body = client.get(&format!("{ROOT}/{}", encoded(id))).await?;
            match json {
                true => print_raw(&body)?,
                false => print(text::show(&read(&body)?))?,
            }
        }
        Command::Summary => {
            let body = client.get(&format!("{ROOT}/summary")).await?;
            match json {
                true => print_items(&body)?,
                false => print(text::summary(&read::<ListAnswer<_>>(&body)?.value))?,
            }
        }
        Command::Replays => {
            let body = client.get(&format!("{ROOT}/replays")).await?;
            match json {
                true => print_items(&body)?,
                false => print(text::replays(&read::<ListAnswer<_>>(&body)?.value))?,
            }
        }
        Command::Replay(replay_args) => return replay(client, replay_args, json).await,
        Command::WriteNow(write_args) => write_now(client, write_args, json).await?,
        Command::Purge(purge_args) => purge(client, purge_args, json).await?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Deserialize)]
struct ListAnswer<T> {
    value: Vec<T>,
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    serde_json::from_slice(body).context("the server's answer is not understood: is it of another version?")
}

fn print_raw(body: &[u8]) -> Result<()> {
    print(std::str::from_utf8(body)?)
}

/// The items of a list, as the server wrote them.
fn print_items(body: &[u8]) -> Result<()> {
    let list: ListAnswer<Box<RawValue>> = read(body)?;
    print(serde_json::to_string(&list.value)?)
}

/// Entries as the server wrote them.
#[derive(Deserialize)]
struct ListedDeadLetters {
    value: Vec<Box<RawValue>>,
    continuation: Option<String>,
}

async fn list(client: &ApiClient, args: &ListDeadLettersArgs, json: bool) -> Result<()> {
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let mut all = ListedDeadLetters {
        value: Vec::new(),
        continuation: args.continuation.clone(),
    };
    loop {
        let path = page_path(args, limit - all.value.len(), all.continuation.as_deref());
        let page: ListedDeadLetters = read(&client.get(&path).await?)?;
        all.value.extend(page.value);
        all.continuation = page.continuation;
        if all.continuation.is_none() || all.value.len() >= limit {
            break;
        }
    }
    let entries = all.value.iter().map(|raw| read(raw.get().as_bytes()));
    match json {
        true => print(serde_json::to_string(&all.value)?)?,
        false if all.value.is_empty() => eprintln!("no dead letters"),
        false => print(text::list(&entries.collect::<Result<Vec<DeadLetterItem>>>()?))?,
    }
    if let Some(continuation) = all.continuation {
        eprintln!("there are more: raise --limit, or go on with --continuation {continuation}");
    }
    Ok(())
}

fn page_path(args: &ListDeadLettersArgs, left: usize, continuation: Option<&str>) -> String {
    let mut path = format!("{ROOT}?limit={}", left.min(PAGE_MAX));
    for (name, value) in args.filter.given() {
        path.push_str(&format!("&{name}={}", encoded(value)));
    }
    if let Some(continuation) = continuation {
        path.push_str(&format!("&continuation={}", encoded(continuation)));
    }
    path
}

/// Request body with the selection.
fn body(id: Option<&String>, filter: &DeadLetterFilter, all: bool) -> Map<String, Value> {
    let mut body = Map::new();
    for (name, value) in filter.given().chain(id.map(|id| ("id", id))) {
        body.insert(name.to_owned(), json!(value));
    }
    if all {
        body.insert("all".to_owned(), json!(true));
    }
    body
}

impl ReplayArgs {
    fn body(&self) -> Map<String, Value> {
        let mut body = body(self.one.id(), &self.filter, self.all);
        if let Some(to) = &self.to {
            body.insert("to".to_owned(), json!(to));
        }
        if let Some(rate) = self.rate {
            body.insert("rate".to_owned(), json!(rate));
        }
        body
    }
}

#[derive(Deserialize)]
struct DeadLetterCount {
    count: u64,
    #[serde(flatten)]
    pending: PendingDeadLetterCount,
}

/// Matching dead letters that are not in a blob yet.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct PendingDeadLetterCount {
    #[serde(default, rename = "pending", skip_serializing_if = "follow::is_zero")]
    count: u64,
    /// When the first of them is due to be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    due: Option<String>,
}

impl PendingDeadLetterCount {
    /// How many they are, and how they are written sooner; none where there are none.
    fn note(&self, what: &str, filter: &str) -> Option<String> {
        let PendingDeadLetterCount { count, due } = self;
        let due = due.as_deref().map(time);
        let due = due.map_or(String::new(), |due| format!(", from {due} on"));
        (*count > 0).then(|| {
            format!(
                "{count} more wait to be written to a blob{due}, and are not {what} before that; \
                 write them now with: postrider deadletters write-now{filter}"
            )
        })
    }
}

impl DeadLetterFilter {
    /// The filter as command-line flags.
    fn flags(&self) -> String {
        let flag = |(name, value): (&str, &String)| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:+".contains(c);
            match value.chars().all(plain) {
                true => format!(" --{name} {value}"),
                false => format!(" --{name} '{}'", value.replace('\'', r"'\''")),
            }
        };
        self.given().map(flag).collect()
    }
}

async fn count(client: &ApiClient, path: &str, mut body: Map<String, Value>) -> Result<DeadLetterCount> {
    body.insert("dryRun".to_owned(), json!(true));
    let answer = client
        .post(&format!("{ROOT}/{path}"), &Value::Object(body))
        .await?;
    read(&answer)
}

fn print_count(counted: &DeadLetterCount, json: bool) -> Result<()> {
    let DeadLetterCount { count, pending } = counted;
    match json {
        false => print(count),
        true => {
            let mut shown = json!(pending);
            shown["count"] = json!(count);
            print(shown)
        }
    }
}

async fn replay(client: &ApiClient, args: &ReplayArgs, json: bool) -> Result<ExitCode> {
    if args.dry_run {
        let counted = count(client, "replay", args.body()).await?;
        print_count(&counted, json)?;
        note_pending(&counted.pending, "replayed", &args.filter);
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(id) = args.cancel {
        let job = follow::cancel(client, id).await?;
        follow::report(&job, json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let started = match args.resume {
        Some(id) => {
            client
                .post(&format!("{ROOT}/replays/{id}/resume"), &json!({}))
                .await?
        }
        None => {
            client
                .post(&format!("{ROOT}/replay"), &Value::Object(args.body()))
                .await?
        }
    };
    let job: ReplayStatus = read(&started)?;
    note_pending(&job.pending, "replayed", &args.filter);
    if args.detach {
        match json {
            true => print_raw(&started)?,
            false => print(format!(
                "replay {} of {} dead letters is under way",
                job.id, job.total
            ))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    follow::follow(client, job, json).await
}

fn note_pending(pending: &PendingDeadLetterCount, what: &str, filter: &DeadLetterFilter) {
    if let Some(note) = pending.note(what, &filter.flags()) {
        eprintln!("{}", harmless(&note));
    }
}

#[derive(Deserialize)]
struct BlobsWritten {
    written: u64,
}

async fn write_now(client: &ApiClient, args: &WriteArgs, json: bool) -> Result<()> {
    let body = body(args.one.id(), &args.filter, args.all);
    if args.dry_run {
        return print_count(&count(client, "write", body).await?, json);
    }
    let answer = client
        .post(&format!("{ROOT}/write"), &Value::Object(body))
        .await?;
    match json {
        true => print_raw(&answer),
        false => print(match read::<BlobsWritten>(&answer)?.written {
            0 => "no dead letters wait to be written".to_owned(),
            1 => "wrote 1 dead letter".to_owned(),
            written => format!("wrote {written} dead letters"),
        }),
    }
}

#[derive(Deserialize)]
struct PurgeResult {
    purged: u64,
}

async fn purge(client: &ApiClient, args: &PurgeArgs, json: bool) -> Result<()> {
    let body = body(args.one.id(), &args.filter, args.all);
    if args.dry_run {
        let counted = count(client, "purge", body).await?;
        note_pending(&counted.pending, "purged", &args.filter);
        return print_count(&counted, json);
    }
    if !args.yes {
        if !can_ask() {
            let reason = "there is no terminal to ask at: give --yes to purge, or --dry-run to count";
            return Err(UsageError::new(reason).into());
        }
        let DeadLetterCount {
            count: found,
            pending,
        } = count(client, "purge", body.clone()).await?;
        note_pending(&pending, "purged", &args.filter);
        if found == 0 || !confirmed(&format!("Purge {found} dead letters for good?"))? {
            eprintln!("nothing purged");
            return Ok(());
        }
    }
    let answer = client
        .post(&format!("{ROOT}/purge"), &Value::Object(body))
        .await?;
    match json {
        true => print_raw(&answer),
        false => print(format!("purged {}", read::<PurgeResult>(&answer)?.purged)),
    }
}
