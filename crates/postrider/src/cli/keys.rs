//! `postrider key`: the keys that publishers sign with.

use super::ids::ResourceKind;
use super::management_client::ManagementClient;
use super::{CliFlags, text};
use anyhow::Result;
use clap::Args;
use serde_json::json;

#[derive(Clone, Debug, Args)]
pub struct KeyArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Print both keys
    List(KeyOwner),
    /// Replace one of the keys; requests with the old one are refused from now on
    Regenerate {
        #[command(flatten)]
        of: KeyOwner,
        /// Key to replace
        #[arg(long, value_enum, default_value = "key1")]
        name: KeyName,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum KeyName {
    Key1,
    Key2,
}

/// The topic or domain that a key belongs to.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct KeyOwner {
    /// The topic
    #[arg(long, value_name = "NAME")]
    pub topic: Option<String>,
    /// The domain
    #[arg(long, value_name = "NAME")]
    pub domain: Option<String>,
}

impl KeyOwner {
    pub fn named(&self) -> (ResourceKind, &str) {
        match (&self.topic, &self.domain) {
            (Some(topic), _) => (ResourceKind::Topic, topic),
            (None, Some(domain)) => (ResourceKind::Domain, domain),
            (None, None) => unreachable!("clap wants one of them"),
        }
    }

    pub async fn id(&self, arm: &ManagementClient) -> Result<String> {
        let (kind, name) = self.named();
        arm.locate(kind, name).await
    }
}

pub async fn key(args: &KeyArgs) -> Result<()> {
    let arm = args.flags.connect().await?;
    let keys = match &args.command {
        Command::List(of) => arm.post(&of.id(&arm).await?, "listKeys", None).await?,
        Command::Regenerate { of, name } => {
            let name = match name {
                KeyName::Key1 => "key1",
                KeyName::Key2 => "key2",
            };
            let id = of.id(&arm).await?;
            arm.post(&id, "regenerateKey", Some(&json!({ "keyName": name })))
                .await?
        }
    };
    args.flags.show(&keys, text::keys)
}
