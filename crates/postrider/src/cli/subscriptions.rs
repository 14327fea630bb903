//! `postrider subscription`: manages event subscriptions.

use super::args::{object, read_json};
use super::declarations::with_whole_ids;
use super::ids::{PROVIDER, ResourceKind, group_of};
use super::management_client::ManagementClient;
use super::settings::{ClearSubscriptionSetting, FlagContext, SubscriptionSettings, clear};
use super::status::{self, StatusQuery};
use super::{CliFlags, OutputFormat, UsageError, WaitFlags, delete, normalize, tell_replaced, text};
use crate::terminal::print;
use anyhow::Result;
use clap::Args;
use http::Method;
use postrider_core::time::Clock;
use postrider_engine::clock::SystemClock;
use serde_json::{Value, json};

#[derive(Clone, Debug, Args)]
pub struct SubscriptionArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Create a subscription, or replace an existing one
    Create {
        name: String,
        #[command(flatten)]
        on: SubscriptionScope,
        #[command(flatten)]
        settings: SubscriptionSettings,
        /// The whole body as JSON, instead of settings
        #[arg(long, value_name = "FILE|-")]
        body: Option<String>,
        #[command(flatten)]
        wait: WaitFlags,
    },
    /// List the subscriptions of one topic, domain, system topic or resource, or all of them
    List {
        #[command(flatten)]
        on: SubscriptionScope,
    },
    /// Print one subscription
    Show {
        name: String,
        #[command(flatten)]
        on: SubscriptionScope,
        /// Include the whole URL of a webhook, and the values of secret headers
        #[arg(long, visible_alias = "include-full-endpoint-url")]
        secrets: bool,
    },
    /// Change the given settings, keep the rest
    Update {
        name: String,
        #[command(flatten)]
        on: SubscriptionScope,
        #[command(flatten)]
        settings: SubscriptionSettings,
        /// Remove this setting; may be repeated
        #[arg(long, value_name = "WHAT", value_enum)]
        clear: Vec<ClearSubscriptionSetting>,
        #[command(flatten)]
        wait: WaitFlags,
    },
    /// Stop sending: events are held and do not age
    Pause {
        name: String,
        #[command(flatten)]
        on: SubscriptionScope,
    },
    /// Send the events that were held, and new ones
    Resume {
        name: String,
        #[command(flatten)]
        on: SubscriptionScope,
    },
    /// Probe an endpoint on probation at once, with one delivery
    Probe {
        name: String,
        #[command(flatten)]
        on: SubscriptionScope,
    },
    /// Delete a subscription
    Delete {
        name: String,
        #[command(flatten)]
        on: SubscriptionScope,
        /// Do not ask for confirmation
        #[arg(long, short = 'y')]
        yes: bool,
        #[command(flatten)]
        wait: WaitFlags,
    },
}

/// The resource that a subscription belongs to.
#[derive(Clone, Debug, Default, Args)]
pub struct SubscriptionScope {
    /// On this topic
    #[arg(long, value_name = "NAME", group = "on")]
    topic: Option<String>,
    /// On this domain
    #[arg(long, value_name = "NAME", group = "on")]
    domain: Option<String>,
    /// On this topic of the domain
    #[arg(long, value_name = "NAME", requires = "domain")]
    domain_topic: Option<String>,
    /// On this system topic
    #[arg(long, value_name = "NAME", group = "on")]
    system_topic: Option<String>,
    /// On this resource, by its full id
    #[arg(long, value_name = "ID", visible_alias = "source-resource-id", group = "on")]
    scope: Option<String>,
}

impl SubscriptionScope {
    /// Id of the resource, and the topic inside it if it is a domain.
    pub async fn place(&self, arm: &ManagementClient) -> Result<(String, Option<&str>)> {
        let owner = match (&self.topic, &self.domain, &self.system_topic, &self.scope) {
            (Some(topic), ..) => arm.locate(ResourceKind::Topic, topic).await?,
            (_, Some(domain), ..) => arm.locate(ResourceKind::Domain, domain).await?,
            (_, _, Some(topic), _) => arm.locate(ResourceKind::SystemTopic, topic).await?,
            (_, _, _, Some(scope)) => {
                let scope = scope.trim_end_matches('/');
                if !scope.starts_with("/subscriptions/") {
                    return Err(UsageError::new("--scope: a resource id begins with /subscriptions/").into());
                }
                scope.to_owned()
            }
            _ => {
                let reason = "on what? Give --topic, --domain [--domain-topic], --system-topic or --scope";
                return Err(UsageError::new(reason).into());
            }
        };
        Ok((owner, self.domain_topic.as_deref()))
    }

    /// Id of the list of subscriptions on the resource.
    async fn subscriptions(&self, arm: &ManagementClient) -> Result<String> {
        let (owner, domain_topic) = self.place(arm).await?;
        Ok(match domain_topic {
            Some(topic) => format!("{owner}/topics/{topic}/eventSubscriptions"),
            None if self.scope.is_some() => format!("{owner}/{PROVIDER}/eventSubscriptions"),
            None => format!("{owner}/eventSubscriptions"),
        })
    }

    async fn one(&self, arm: &ManagementClient, name: &str) -> Result<String> {
        Ok(format!("{}/{name}", self.subscriptions(arm).await?))
    }

    /// Id of the topic, domain or system topic; `None` if another resource or none was named.
    async fn topic_id(&self, arm: &ManagementClient) -> Result<Option<String>> {
        match self.is_given() && self.scope.is_none() {
            true => Ok(Some(self.place(arm).await?.0)),
            false => Ok(None),
        }
    }

    fn is_given(&self) -> bool {
        self.topic.is_some() || self.domain.is_some() || self.system_topic.is_some() || self.scope.is_some()
    }
}

/// Reads a subscription with its full URL and the values of its secret headers.
pub async fn get_in_clear(
    arm: &ManagementClient,
    id: &str,
) -> Result<Option<super::management_client::ReadResource>> {
    let Some(mut read) = arm.find(id).await? else {
        return Ok(None);
    };
    let properties = object(&mut read.body, "properties");
    if let Some(destination) = normalize::destination_mut(properties) {
        if destination["endpointType"] == json!("WebHook") {
            let url = arm.post(id, "getFullUrl", None).await?;
            object(destination, "properties").insert("endpointUrl".into(), url["endpointUrl"].clone());
        }
        let mappings = &destination["properties"]["deliveryAttributeMappings"];
        let secret = |one: &Value| one["properties"]["isSecret"] == json!(true);
        if mappings.as_array().is_some_and(|all| all.iter().any(secret)) {
            let attributes = arm.post(id, "getDeliveryAttributes", None).await?;
            object(destination, "properties")
                .insert("deliveryAttributeMappings".into(), attributes["value"].clone());
        }
    }
    Ok(Some(read))
}

pub async fn subscription(args: &SubscriptionArgs) -> Result<()> {
    let flags = &args.flags;
    let arm = flags.connect().await?;
    match &args.command {
        Command::Create {
            name,
            on,
            settings,
            body,
            wait,
        } => {
            let id = on.one(&arm, name).await?;
            let body = match body {
                Some(_) if !settings.is_empty() => {
                    return Err(UsageError::new("give --body or settings, not both").into());
                }
                Some(path) => read_json(path)?,
                None => {
                    let mut body = json!({});
                    let group = default_group_of(&arm, &id).await?;
                    settings.put_into(object(&mut body, "properties"), &meaning(&arm, &group))?;
                    if body["properties"].get("destination").is_none() {
                        return Err(UsageError::new("where do events go? Give --endpoint, or --body").into());
                    }
                    body
                }
            };
            let was_there = arm.find(&id).await?.is_some();
            let made = arm.put(&id, Some(&body), None, wait.waits()).await?;
            tell_replaced(was_there, &format!("the subscription {name}"));
            flags.show(&made, text::show)
        }
        Command::List { on } => {
            let mut list = match on.is_given() {
                true => arm.list(&on.subscriptions(&arm).await?).await?,
                false => all(&arm).await?,
            };
            if !list.is_empty() {
                let place = on.topic_id(&arm).await?;
                let asked = StatusQuery {
                    topic: place.as_deref(),
                    name: None,
                };
                status::add(&arm, &mut list, asked).await?;
            }
            flags.show_list(list, text::subscriptions)
        }
        Command::Show { name, on, secrets } => {
            let id = on.one(&arm, name).await?;
            let body = match secrets {
                true => found(get_in_clear(&arm, &id).await?, name)?.body,
                false => arm.get(&id).await?.body,
            };
            let mut one = [body];
            let asked = StatusQuery {
                topic: None,
                name: Some(name),
            };
            status::add(&arm, &mut one, asked).await?;
            flags.show(&one[0], text::show)
        }
        Command::Update {
            name,
            on,
            settings,
            clear: cleared,
            wait,
        } => {
            if settings.is_empty() && cleared.is_empty() {
                return Err(UsageError::new("nothing is to change: give settings, or --clear").into());
            }
            let id = on.one(&arm, name).await?;
            let read = found(get_in_clear(&arm, &id).await?, name)?;
            let mut properties = normalize::writable_properties(&read.body["properties"]);
            clear(&mut properties, cleared);
            let group = default_group_of(&arm, &id).await?;
            // Declared subscriptions may have short names of resources, which the management API
            // does not accept.
            with_whole_ids(&mut properties, &arm.ids, &group)?;
            settings.put_into(&mut properties, &meaning(&arm, &group))?;
            let body = json!({ "properties": properties });
            let made = arm
                .put(&id, Some(&body), read.etag.as_deref(), wait.waits())
                .await?;
            flags.show(&made, text::show)
        }
        Command::Pause { name, on } => control(flags, &arm, "pause", name, on).await,
        Command::Resume { name, on } => control(flags, &arm, "resume", name, on).await,
        Command::Probe { name, on } => control(flags, &arm, "probe", name, on).await,
        Command::Delete { name, on, yes, wait } => {
            let id = on.one(&arm, name).await?;
            delete(&arm, &id, &format!("the subscription {name}"), *yes, wait).await
        }
    }
}

/// Calls an operation of our own API on a subscription, and prints the state afterwards.
async fn control(
    flags: &CliFlags,
    arm: &ManagementClient,
    verb: &str,
    name: &str,
    on: &SubscriptionScope,
) -> Result<()> {
    let id = on.one(arm, name).await?;
    let path = format!("/postrider/v1/subscriptions/{verb}");
    let answer = arm.send(Method::POST, &path, Some(&json!({ "id": id }))).await?;
    let now: Value = serde_json::from_slice(&answer.body)?;
    match flags.output.form() {
        OutputFormat::Json => print(serde_json::to_string_pretty(&now)?),
        OutputFormat::Text => print(text::status_sentence(&now)),
    }
}

fn found(
    read: Option<super::management_client::ReadResource>,
    name: &str,
) -> Result<super::management_client::ReadResource> {
    read.ok_or_else(|| {
        super::management_client::ServerRefusal {
            status: 404,
            code: "ResourceNotFound".into(),
            message: format!("subscription {name:?} does not exist"),
        }
        .into()
    })
}

/// Subscriptions of all topics and resources.
async fn all(arm: &ManagementClient) -> Result<Vec<Value>> {
    let scope = match arm.explicit_group() {
        Some(group) => arm.ids.group(group),
        None => arm.ids.account(),
    };
    arm.list(&format!("{scope}/{PROVIDER}/eventSubscriptions")).await
}

/// Default group of resources that are named without one: that of the subscription's topic.
pub async fn default_group_of(arm: &ManagementClient, id: &str) -> Result<String> {
    match group_of(id) {
        Some(group) => Ok(group.to_owned()),
        None => arm.default_group().await,
    }
}

pub fn meaning<'a>(arm: &'a ManagementClient, group: &'a str) -> FlagContext<'a> {
    FlagContext {
        ids: &arm.ids,
        group,
        now: SystemClock.now(),
    }
}
