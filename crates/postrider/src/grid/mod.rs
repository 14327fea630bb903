//! `postrider topic`, `subscription`, `domain`, … : what az does with a server, without az.
//!
//! They speak the management API that az speaks, with a client's secret as their token.

pub mod ids;
pub mod arm;
mod words;
mod normal;
mod text;
mod topics;
mod settings;
mod subscriptions;
mod status;
mod keys;
mod story;
mod events;
mod listen;
mod file;
mod plan;
mod apply;
mod import;
mod cluster;
mod audit;
mod sessions;

use crate::client::{Client, ClientFlags};
use crate::output::{Output, OutputFlags};
use crate::terminal::{Table, can_ask, confirmed, print};
use anyhow::Result;
use arm::Arm;
use serde_json::Value;
use std::fmt;
use std::process::ExitCode;

/// What clap itself ends with.
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
    /// Send events, find them again, and see what became of them
    Event(events::EventArgs),
    /// Print events as they are delivered, or forward them to a local port
    Listen(Box<listen::ListenArgs>),
    /// Make the server be as grid files say, after telling what that takes
    Apply(apply::ApplyArgs),
    /// Turn the configuration of another emulator into a grid file
    Import(import::ImportArgs),
    /// Show the nodes of a cluster and what each owns; drain one
    Cluster(cluster::ClusterArgs),
    /// List who changed what, and verify that nobody tampered with the list
    Audit(audit::AuditArgs),
    /// List and revoke portal sessions and tokens; replace the key behind both
    Session(sessions::SessionArgs),
}

/// Which server, and where in it.
#[derive(Clone, Debug, clap::Args)]
pub struct ServerFlags {
    #[command(flatten)]
    client: ClientFlags,
    /// The resource group [default: the context's; else the only one there is, or the one that holds the resource]
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

/// What all these commands take.
#[derive(Clone, Debug, clap::Args)]
pub struct GridFlags {
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Whether to wait until a change is in force.
#[derive(Clone, Debug, clap::Args)]
struct WaitFlags {
    /// Wait until the change is in force, as is usual
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

/// A command that cannot be meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage(String);

impl Usage {
    pub fn new(reason: impl Into<String>) -> Usage {
        Usage(reason.into())
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

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
    match error.downcast_ref::<Usage>() {
        Some(_) => ExitCode::from(USAGE),
        None => ExitCode::FAILURE,
    }
}

impl ServerFlags {
    async fn connect(&self) -> Result<Arm> {
        Arm::connect(Client::new(&self.client)?, self.group.clone()).await
    }
}

impl GridFlags {
    async fn connect(&self) -> Result<Arm> {
        self.server.connect().await
    }

    /// Prints what a command brought, as a table unless JSON is wanted.
    fn show(&self, value: &Value, table: impl FnOnce(&Value) -> Table) -> Result<()> {
        match self.output.form() {
            Output::Json => print(serde_json::to_string_pretty(value)?),
            Output::Text => print(table(value)),
        }
    }

    fn show_list(&self, list: Vec<Value>, table: impl FnOnce(&[Value]) -> Table) -> Result<()> {
        match self.output.form() {
            Output::Json => print(serde_json::to_string_pretty(&Value::Array(list))?),
            Output::Text if list.is_empty() => {
                eprintln!("there are none");
                Ok(())
            }
            Output::Text => print(table(&list)),
        }
    }
}

/// Says that a create command has replaced something: whoever expected a new thing may have mistyped its name.
fn tell_replaced(was_there: bool, what: &str) {
    if was_there {
        eprintln!("{what} was there already and was replaced");
    }
}

/// Whether something may be deleted: someone says so, now or beforehand.
fn may_delete(yes: bool, what: &str) -> Result<bool> {
    if yes {
        return Ok(true);
    }
    if !can_ask() {
        return Err(Usage::new(format!(
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

/// Deletes one resource, if that is agreed to.
async fn delete(arm: &Arm, id: &str, what: &str, yes: bool, wait: &WaitFlags) -> Result<()> {
    if !may_delete(yes, what)? {
        return Ok(());
    }
    match arm.delete(id, wait.waits()).await? {
        true => eprintln!("deleted {what}"),
        false => eprintln!("there was no {what}"),
    }
    Ok(())
}
