//! `postrider session`: lists and ends portal sessions and tokens.

use super::{CliFlags, OutputFormat};
use crate::client::ApiClient;
use crate::terminal::{Table, harmless, print, table, time_or_text};
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

const PATH: &str = "/postrider/v1/sessions";

#[derive(Clone, Debug, Args)]
pub struct SessionArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// List valid portal sessions and tokens
    List,
    /// End sessions and tokens at once, at every node
    Revoke(RevokeArgs),
    /// Replace the key that signs tokens and seals portal sessions
    ///
    /// Portal sessions end at once. Tokens of the old key stay valid until they expire, an hour at
    /// most.
    RotateKey {
        /// End the tokens of the old key at once
        #[arg(long)]
        now: bool,
    },
}

#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
struct RevokeArgs {
    /// Id from the list
    id: Option<String>,
    /// All sessions and tokens of this client
    #[arg(long, value_name = "NAME")]
    client: Option<String>,
    /// All sessions and tokens of every client
    #[arg(long)]
    all: bool,
}

pub async fn session(args: &SessionArgs) -> Result<()> {
    let flags = &args.flags;
    let client = ApiClient::new(&flags.server.client)?;
    match &args.command {
        Command::List => {
            let found: Value = serde_json::from_slice(&client.get(PATH).await?)?;
            let list = found["value"].as_array().cloned().unwrap_or_default();
            flags.show_list(list, shown)
        }
        Command::Revoke(what) => {
            let body = match (&what.id, &what.client) {
                (Some(id), _) => json!({ "id": id }),
                (None, Some(name)) => json!({ "client": name }),
                (None, None) => json!({"all": true}),
            };
            let told = post(&client, "revoke", &body).await?;
            said(flags, &told, &format!("revoked: {}", told["revoked"]))
        }
        Command::RotateKey { now } => {
            let told = post(&client, "rotate-key", &json!({ "now": now })).await?;
            let id = harmless(told["keyId"].as_str().unwrap_or_default());
            said(
                flags,
                &told,
                &format!("tokens are signed with the key {id} from now on; portal sessions have ended"),
            )
        }
    }
}

async fn post(client: &ApiClient, verb: &str, body: &Value) -> Result<Value> {
    let answer = client.post(&format!("{PATH}/{verb}"), body).await?;
    Ok(serde_json::from_slice(&answer)?)
}

fn said(flags: &CliFlags, told: &Value, line: &str) -> Result<()> {
    match flags.output.form() {
        OutputFormat::Json => print(serde_json::to_string_pretty(told)?),
        OutputFormat::Text => print(line),
    }
}

fn shown(list: &[Value]) -> Table {
    let columns = ["id", "kind", "client", "address", "issued", "expires"];
    let mut table = table(&columns, &[]);
    for one in list {
        table.add_row(columns.map(|column| harmless(&time_or_text(one[column].as_str().unwrap_or("-")))));
    }
    table
}
