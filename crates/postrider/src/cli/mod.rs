//! `postrider topic`, `subscription`, `domain`, … : manage a server as az does, without az.
//!
//! The commands use the same management API as az, with a client's secret as the token.

pub mod ids;
pub mod management_client;
mod args;
mod normalize;
mod text;
mod topics;
mod settings;
mod subscriptions;
mod status;
mod keys;
mod event_history;
mod events;
mod listen;
mod declarations;
mod plan;
mod apply;
mod import;
mod cluster;
mod audit;
mod sessions;

use crate::client::{ApiClient, ClientFlags};
use crate::output::{OutputFlags, OutputFormat};
use crate::terminal::{Table, can_ask, confirmed, print};
use anyhow::Result;
use management_client::ManagementClient;
use serde_json::Value;
use std::fmt;
use std::process::ExitCode;

/// Exit code of clap for usage errors.
const USAGE: u8 = 2;

#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// Create, list, show, update and delete topics
    Topic(topics::TopicArgs),
    /// Create, list, show, update and delete domains and their topics
    Domain(topics::DomainArgs),
    /// Create, list, show, update and delete system topics
    SystemTopic(topics::SystemTopicArgs),
    /// Create, list, show, update, pause, resume and delete event subscriptions
    #[command(visible_alias = "event-subscription")]
    Subscription(Box<subscriptions::SubscriptionArgs>),
    /// List and regenerate the keys of topics and domains
    Key(keys::KeyArgs),
    /// Send events, find them again, and show their history
    Event(events::EventArgs),
    /// Print events as they are delivered, or forward them to a local port
    Listen(Box<listen::ListenArgs>),
    /// Change the server to match declaration files, after printing the plan
    Apply(apply::ApplyArgs),
    /// Convert the configuration of another emulator to a declaration file
    Import(import::ImportArgs),
    /// Show the nodes of a cluster and their partitions; drain a node
    Cluster(cluster::ClusterCommandArgs),
    /// List the audit log, and verify that nobody tampered with it
    Audit(audit::AuditArgs),
    /// List and revoke portal sessions and tokens; replace the key behind both
    Session(sessions::SessionArgs),
}

/// Server and resource group.
#[derive(Clone, Debug, clap::Args)]
pub struct ServerFlags {
    #[command(flatten)]
    client: ClientFlags,
    /// The resource group [default: the context's; else the only one there is, or the one that
    /// holds the resource]
    #[arg(
        long,
        short = 'g',
        visible_alias = "resource-group",
        env = "POSTRIDER_GROUP",
        global = true,
        help_heading = "Server"
    )]
    group: Option<String>,
}

/// Flags that all these commands share.
#[derive(Clone, Debug, clap::Args)]
pub struct CliFlags {
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Whether to wait until a change is in force.
#[derive(Clone, Debug, clap::Args)]
struct WaitFlags {
    /// Wait until the change is in force (the default)
    #[arg(long, overrides_with = "no_wait")]
    wait: bool,
    /// Do not wait until the change is in force
    #[arg(long)]
    no_wait: bool,
}

impl WaitFlags {
    fn waits(&self) -> bool {
        self.wait || !self.no_wait
    }
}

/// A usage error that clap does not detect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageError(String);

impl UsageError {
    pub fn new(reason: impl Into<String>) -> UsageError {
        UsageError(reason.into())
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

pub fn run(command: Command) -> ExitCode {
    let outcome = crate::serve::runtime(Some(1)).and_then(|runtime| {
        runtime.block_on(async {
            match command {
                Command::Topic(args) => topics::topic(&args).await,
                Command::Domain(args) => topics::domain(&args).await,
                Command::SystemTopic(args) => topics::system_topic(&args).await,
                Command::Subscription(args) => subscriptions::subscription(&args).await,
                Command::Key(args) => keys::key(&args).await,
                Command::Event(args) => events::event(&args).await,
                Command::Listen(args) => listen::listen(&args).await,
                Command::Apply(args) => apply::apply(&args).await,
                Command::Import(args) => import::import(&args).await,
                Command::Cluster(args) => cluster::cluster(&args).await,
                Command::Audit(args) => audit::audit(&args).await,
                Command::Session(args) => sessions::session(&args).await,
            }
        })
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failed(&e),
    }
}

/// Says why a command failed.
pub fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    match error.downcast_ref::<UsageError>() {
        Some(_) => ExitCode::from(USAGE),
        None => ExitCode::FAILURE,
    }
}

impl ServerFlags {
    async fn connect(&self) -> Result<ManagementClient> {
        ManagementClient::connect(ApiClient::new(&self.client)?, self.group.clone()).await
    }
}

impl CliFlags {
    async fn connect(&self) -> Result<ManagementClient> {
        self.server.connect().await
    }

    /// Prints what a command brought, as a table unless JSON is wanted.
    fn show(&self, value: &Value, table: impl FnOnce(&Value) -> Table) -> Result<()> {
        match self.output.form() {
            OutputFormat::Json => print(serde_json::to_string_pretty(value)?),
            OutputFormat::Text => print(table(value)),
        }
    }

    fn show_list(&self, list: Vec<Value>, table: impl FnOnce(&[Value]) -> Table) -> Result<()> {
        match self.output.form() {
            OutputFormat::Json => print(serde_json::to_string_pretty(&Value::Array(list))?),
            OutputFormat::Text if list.is_empty() => {
                eprintln!("there are none");
                Ok(())
            }
            OutputFormat::Text => print(table(&list)),
        }
    }
}

/// Notes that a create command has replaced a resource: the user may have mistyped the name of a
/// new one.
fn tell_replaced(was_there: bool, what: &str) {
    if was_there {
        eprintln!("{what} was there already and was replaced");
    }
}

/// Whether deletion is confirmed, by a flag or by asking.
fn may_delete(yes: bool, what: &str) -> Result<bool> {
    if yes {
        return Ok(true);
    }
    if !can_ask() {
        return Err(UsageError::new(format!(
            "there is no terminal to ask at: give --yes to delete {what}"
        ))
        .into());
    }
    let agreed = confirmed(&format!("Delete {what}?"))?;
    if !agreed {
        eprintln!("nothing deleted");
    }
    Ok(agreed)
}

/// Deletes one resource, if that is confirmed.
async fn delete(arm: &ManagementClient, id: &str, what: &str, yes: bool, wait: &WaitFlags) -> Result<()> {
    if !may_delete(yes, what)? {
        return Ok(());
    }
    match arm.delete(id, wait.waits()).await? {
        true => eprintln!("deleted {what}"),
        false => eprintln!("there was no {what}"),
    }
    Ok(())
}
