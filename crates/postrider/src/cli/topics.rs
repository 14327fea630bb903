//! `postrider topic`, `domain`, `domain topic` and `system-topic`.

use super::args::{NameValueArg, SchemaArg, object, pairs, read_json};
use super::ids::ResourceKind;
use super::management_client::ManagementClient;
use super::{CliFlags, UsageError, WaitFlags, delete, normalize, tell_replaced, text};
use anyhow::Result;
use clap::Args;
use serde_json::{Map, Value, json};

#[derive(Clone, Debug, Args)]
pub struct TopicArgs {
    #[command(subcommand)]
    command: TopicCommand,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum TopicCommand {
    /// Create a topic, or replace an existing one
    Create(CreateArgs<TopicSettings>),
    /// List the topics
    List,
    /// Print one topic
    Show { name: String },
    /// Change the given settings, keep the rest
    Update(UpdateArgs<TopicSettings>),
    /// Delete a topic with its subscriptions
    Delete(DeleteArgs),
}

#[derive(Clone, Debug, Args)]
pub struct DomainArgs {
    #[command(subcommand)]
    command: DomainCommand,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum DomainCommand {
    /// Create a domain, or replace an existing one
    Create(CreateArgs<DomainSettings>),
    /// List the domains
    List,
    /// Print one domain
    Show { name: String },
    /// Change the given settings, keep the rest
    Update(UpdateArgs<DomainSettings>),
    /// Delete a domain with its topics and subscriptions
    Delete(DeleteArgs),
    /// Create, list, show and delete the topics of a domain
    Topic {
        #[command(subcommand)]
        command: DomainTopicCommand,
        /// The domain
        #[arg(long, value_name = "NAME", global = true)]
        domain: Option<String>,
    },
}

#[derive(Clone, Debug, clap::Subcommand)]
enum DomainTopicCommand {
    /// Create a topic of a domain
    Create {
        name: String,
        #[command(flatten)]
        wait: WaitFlags,
    },
    /// List the topics of a domain
    List,
    /// Print one topic of a domain
    Show { name: String },
    /// Delete a topic of a domain with its subscriptions
    Delete(DeleteArgs),
}

#[derive(Clone, Debug, Args)]
pub struct SystemTopicArgs {
    #[command(subcommand)]
    command: SystemTopicCommand,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum SystemTopicCommand {
    /// Create a system topic, or replace an existing one
    Create(CreateArgs<SystemTopicSettings>),
    /// List the system topics
    List,
    /// Print one system topic
    Show { name: String },
    /// Change the given settings, keep the rest
    Update(UpdateArgs<SystemTopicSettings>),
    /// Delete a system topic with its subscriptions
    Delete(DeleteArgs),
}

#[derive(Clone, Debug, Args)]
struct CreateArgs<S: Args> {
    name: String,
    #[command(flatten)]
    settings: S,
    /// The whole body as JSON, instead of settings
    #[arg(long, value_name = "FILE|-")]
    body: Option<String>,
    #[command(flatten)]
    wait: WaitFlags,
}

#[derive(Clone, Debug, Args)]
struct UpdateArgs<S: Args> {
    name: String,
    #[command(flatten)]
    settings: S,
    /// Remove this setting; may be repeated
    #[arg(long, value_name = "WHAT", value_enum)]
    clear: Vec<ClearTopicSetting>,
    #[command(flatten)]
    wait: WaitFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ClearTopicSetting {
    Tags,
    InboundIps,
    Profile,
}

#[derive(Clone, Debug, Args)]
struct DeleteArgs {
    name: String,
    /// Do not ask for confirmation
    #[arg(long, short = 'y')]
    yes: bool,
    #[command(flatten)]
    wait: WaitFlags,
}

/// Settings of a resource as flags.
trait ResourceSettings: Args + PartialEq + Default {
    fn put_into(&self, body: &mut Value, arm: &ManagementClient, group: &str) -> Result<()>;
}

#[derive(Clone, Debug, Default, PartialEq, Args)]
struct TopicSettings {
    /// Location [default: that of its resource group]
    #[arg(long)]
    location: Option<String>,
    /// A tag; may be repeated
    #[arg(long = "tag", value_name = "NAME=VALUE")]
    tags: Vec<NameValueArg>,
    /// Schema of published events [default: eventgrid]
    #[arg(long, value_name = "SCHEMA", ignore_case = true)]
    input_schema: Option<SchemaArg>,
    /// Member of a custom event for id, topic, eventTime, eventType, subject or dataVersion; may be
    /// repeated
    #[arg(long = "input-mapping", value_name = "FIELD=SOURCE")]
    mappings: Vec<NameValueArg>,
    /// Default of eventType, subject or dataVersion for custom events without it; may be repeated
    #[arg(long = "input-default", value_name = "FIELD=VALUE")]
    defaults: Vec<NameValueArg>,
    /// Whether any address may publish: enabled or disabled
    #[arg(long, value_enum, value_name = "ACCESS")]
    public_network_access: Option<NetworkAccess>,
    /// An address or network that may publish, such as 10.0.0.0/8; may be repeated
    #[arg(long = "inbound-ip", value_name = "NETWORK")]
    inbound_ips: Vec<String>,
    /// Refuse keys, accept only tokens
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    disable_local_auth: Option<bool>,
    /// Event Grid to behave like: "postrider profiles" lists them
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
    /// Let the edge API reach this topic, which may be open to anyone on this machine; custom
    /// topics only
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    edge: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum NetworkAccess {
    Enabled,
    Disabled,
}

impl ResourceSettings for TopicSettings {
    fn put_into(&self, body: &mut Value, _: &ManagementClient, _: &str) -> Result<()> {
        self.put(body)
    }
}

impl TopicSettings {
    fn put(&self, body: &mut Value) -> Result<()> {
        if let Some(location) = &self.location {
            body["location"] = json!(location);
        }
        if !self.tags.is_empty() {
            body["tags"] = pairs(&self.tags);
        }
        let properties = object(body, "properties");
        let mut put = |name: &str, value: Option<Value>| {
            properties.extend(value.map(|value| (name.to_owned(), value)));
        };
        put(
            "inputSchema",
            self.input_schema.map(|schema| json!(schema.input_name())),
        );
        put("inputSchemaMapping", self.mapping()?);
        put(
            "publicNetworkAccess",
            self.public_network_access.map(|access| match access {
                NetworkAccess::Enabled => json!("Enabled"),
                NetworkAccess::Disabled => json!("Disabled"),
            }),
        );
        let rules = self
            .inbound_ips
            .iter()
            .map(|mask| json!({"ipMask": mask, "action": "Allow"}));
        let rules: Vec<_> = rules.collect();
        put("inboundIpRules", (!rules.is_empty()).then(|| json!(rules)));
        put(
            "disableLocalAuth",
            self.disable_local_auth.map(|disabled| json!(disabled)),
        );
        let ours = [
            ("profile", self.profile.as_ref().map(|profile| json!(profile))),
            ("edge", self.edge.map(|edge| json!(edge))),
        ];
        for (name, value) in ours {
            if let Some(value) = value {
                body["properties"]["postrider"][name] = value;
            }
        }
        Ok(())
    }

    fn mapping(&self) -> Result<Option<Value>> {
        const FIELDS: [&str; 6] = ["id", "topic", "eventTime", "eventType", "subject", "dataVersion"];
        let mut fields = Map::new();
        let given = [
            (&self.mappings, "--input-mapping", "sourceField"),
            (&self.defaults, "--input-default", "defaultValue"),
        ];
        for (pairs, flag, member) in given {
            for pair in pairs {
                let known = FIELDS.iter().find(|field| field.eq_ignore_ascii_case(&pair.name));
                let Some(field) = known else {
                    let reason = format!("{flag}: {:?} is none of {}", pair.name, FIELDS.join(", "));
                    return Err(UsageError::new(reason).into());
                };
                fields.entry(*field).or_insert_with(|| json!({}))[member] = json!(pair.value);
            }
        }
        let mapping = json!({"inputSchemaMappingType": "Json", "properties": fields});
        Ok((!fields.is_empty()).then_some(mapping))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Args)]
struct DomainSettings {
    #[command(flatten)]
    topic: TopicSettings,
    /// Whether the first subscription on a topic of the domain creates the topic [default: true]
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    auto_create_topics: Option<bool>,
    /// Whether the last subscription's deletion deletes a topic that was created so [default: true]
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    auto_delete_topics: Option<bool>,
}

impl ResourceSettings for DomainSettings {
    fn put_into(&self, body: &mut Value, _: &ManagementClient, _: &str) -> Result<()> {
        self.put(body)
    }
}

impl DomainSettings {
    fn put(&self, body: &mut Value) -> Result<()> {
        self.topic.put(body)?;
        let flags = [
            ("autoCreateTopicWithFirstSubscription", self.auto_create_topics),
            ("autoDeleteTopicWithLastSubscription", self.auto_delete_topics),
        ];
        let properties = object(body, "properties");
        for (name, flag) in flags {
            properties.extend(flag.map(|flag| (name.to_owned(), json!(flag))));
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Args)]
struct SystemTopicSettings {
    /// Source of the events: a resource id, or the name of a storage account
    #[arg(long, value_name = "ID")]
    source: Option<String>,
    /// Type of the source [default: Microsoft.Storage.StorageAccounts]
    #[arg(long, value_name = "TYPE")]
    topic_type: Option<String>,
    /// Location [default: that of its resource group]
    #[arg(long)]
    location: Option<String>,
    /// A tag; may be repeated
    #[arg(long = "tag", value_name = "NAME=VALUE")]
    tags: Vec<NameValueArg>,
}

impl ResourceSettings for SystemTopicSettings {
    fn put_into(&self, body: &mut Value, arm: &ManagementClient, group: &str) -> Result<()> {
        self.put(body, |source| arm.ids.storage_account(source, group))
    }
}

impl SystemTopicSettings {
    fn put(&self, body: &mut Value, id: impl Fn(&str) -> String) -> Result<()> {
        if let Some(location) = &self.location {
            body["location"] = json!(location);
        }
        if !self.tags.is_empty() {
            body["tags"] = pairs(&self.tags);
        }
        let properties = object(body, "properties");
        if let Some(source) = &self.source {
            properties.insert("source".into(), json!(id(source)));
        }
        let Some(source) = properties.get("source") else {
            return Err(UsageError::new("what does it tell of? Give --source").into());
        };
        let storage = source
            .as_str()
            .is_some_and(|source| source.to_lowercase().contains("/microsoft.storage/"));
        let topic_type = match (&self.topic_type, properties.get("topicType")) {
            (Some(given), _) => json!(given),
            (None, Some(before)) => before.clone(),
            (None, None) if storage => json!("Microsoft.Storage.StorageAccounts"),
            (None, None) => return Err(UsageError::new("what is the source? Give --topic-type").into()),
        };
        properties.insert("topicType".into(), topic_type);
        Ok(())
    }
}

pub async fn topic(args: &TopicArgs) -> Result<()> {
    let arm = args.flags.connect().await?;
    let on = ResourceCommands {
        arm: &arm,
        flags: &args.flags,
        kind: ResourceKind::Topic,
    };
    match &args.command {
        TopicCommand::Create(args) => on.create(args).await,
        TopicCommand::List => on.list().await,
        TopicCommand::Show { name } => on.show(name).await,
        TopicCommand::Update(args) => on.update(args).await,
        TopicCommand::Delete(args) => on.delete(args).await,
    }
}

pub async fn domain(args: &DomainArgs) -> Result<()> {
    let arm = args.flags.connect().await?;
    let on = ResourceCommands {
        arm: &arm,
        flags: &args.flags,
        kind: ResourceKind::Domain,
    };
    match &args.command {
        DomainCommand::Create(args) => on.create(args).await,
        DomainCommand::List => on.list().await,
        DomainCommand::Show { name } => on.show(name).await,
        DomainCommand::Update(args) => on.update(args).await,
        DomainCommand::Delete(args) => on.delete(args).await,
        DomainCommand::Topic { command, domain } => {
            let Some(domain) = domain else {
                return Err(UsageError::new("whose topic? Give --domain").into());
            };
            on.domain_topic(command, domain).await
        }
    }
}

pub async fn system_topic(args: &SystemTopicArgs) -> Result<()> {
    let arm = args.flags.connect().await?;
    let on = ResourceCommands {
        arm: &arm,
        flags: &args.flags,
        kind: ResourceKind::SystemTopic,
    };
    match &args.command {
        SystemTopicCommand::Create(args) => on.create(args).await,
        SystemTopicCommand::List => on.list().await,
        SystemTopicCommand::Show { name } => on.show(name).await,
        SystemTopicCommand::Update(args) => on.update(args).await,
        SystemTopicCommand::Delete(args) => on.delete(args).await,
    }
}

/// Create, list, show, update and delete for resources of one kind.
struct ResourceCommands<'a> {
    arm: &'a ManagementClient,
    flags: &'a CliFlags,
    kind: ResourceKind,
}

impl ResourceCommands<'_> {
    async fn create<S: ResourceSettings>(&self, args: &CreateArgs<S>) -> Result<()> {
        let group = self.arm.group_for(self.kind, &args.name).await?;
        let mut body = match &args.body {
            Some(_) if args.settings != S::default() => {
                return Err(UsageError::new("give --body or settings, not both").into());
            }
            Some(path) => read_json(path)?,
            None => {
                let mut body = json!({"properties": {}});
                args.settings.put_into(&mut body, self.arm, &group)?;
                body
            }
        };
        if body.get("location").is_none_or(Value::is_null) {
            body["location"] = json!(self.arm.location_of(&group).await?);
        }
        let id = self.arm.ids.resource(&group, self.kind, &args.name);
        let was_there = self.arm.find(&id).await?.is_some();
        let made = self.arm.put(&id, Some(&body), None, args.wait.waits()).await?;
        tell_replaced(was_there, &format!("the {} {}", self.kind.noun(), args.name));
        self.flags.show(&made, text::show)
    }

    async fn list(&self) -> Result<()> {
        let list = match self.arm.explicit_group() {
            Some(group) => self.arm.ids.all_in(group, self.kind),
            None => self.arm.ids.all(self.kind),
        };
        let list = self.arm.list(&list).await?;
        match self.kind {
            ResourceKind::SystemTopic => self.flags.show_list(list, text::system_topics),
            ResourceKind::Topic | ResourceKind::Domain => self.flags.show_list(list, text::topics),
        }
    }

    async fn show(&self, name: &str) -> Result<()> {
        let id = self.arm.locate(self.kind, name).await?;
        self.flags.show(&self.arm.get(&id).await?.body, text::show)
    }

    async fn update<S: ResourceSettings>(&self, args: &UpdateArgs<S>) -> Result<()> {
        if args.settings == S::default() && args.clear.is_empty() {
            return Err(UsageError::new("nothing is to change: give settings, or --clear").into());
        }
        let id = self.arm.locate(self.kind, &args.name).await?;
        let read = self.arm.get(&id).await?;
        let mut body = normalize::writable(&read.body);
        let group = super::ids::group_of(&id).unwrap_or_default();
        clear(&mut body, &args.clear);
        args.settings.put_into(&mut body, self.arm, group)?;
        let made = self
            .arm
            .put(&id, Some(&body), read.etag.as_deref(), args.wait.waits())
            .await?;
        self.flags.show(&made, text::show)
    }

    async fn delete(&self, args: &DeleteArgs) -> Result<()> {
        let id = self.arm.locate(self.kind, &args.name).await?;
        let what = format!("the {} {}", self.kind.noun(), args.name);
        delete(self.arm, &id, &what, args.yes, &args.wait).await
    }

    async fn domain_topic(&self, command: &DomainTopicCommand, domain: &str) -> Result<()> {
        let all = format!("{}/topics", self.arm.locate(ResourceKind::Domain, domain).await?);
        match command {
            DomainTopicCommand::Create { name, wait } => {
                let id = format!("{all}/{name}");
                let was_there = self.arm.find(&id).await?.is_some();
                let made = self.arm.put(&id, None, None, wait.waits()).await?;
                if was_there {
                    eprintln!("the topic {name} of the domain {domain} was there already");
                }
                self.flags.show(&made, text::show)
            }
            DomainTopicCommand::List => self
                .flags
                .show_list(self.arm.list(&all).await?, text::domain_topics),
            DomainTopicCommand::Show { name } => {
                let read = self.arm.get(&format!("{all}/{name}")).await?;
                self.flags.show(&read.body, text::show)
            }
            DomainTopicCommand::Delete(args) => {
                let what = format!("the topic {} of the domain {domain}", args.name);
                let id = format!("{all}/{}", args.name);
                delete(self.arm, &id, &what, args.yes, &args.wait).await
            }
        }
    }
}

fn clear(body: &mut Value, what: &[ClearTopicSetting]) {
    for one in what {
        match one {
            ClearTopicSetting::Tags => body["tags"] = json!({}),
            ClearTopicSetting::InboundIps => drop(object(body, "properties").remove("inboundIpRules")),
            ClearTopicSetting::Profile => {
                if let Some(Value::Object(ours)) = object(body, "properties").get_mut("postrider") {
                    ours.remove("profile");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct ResourceTestFlags<S: Args> {
        #[command(flatten)]
        settings: S,
    }

    fn flags<S: Args>(line: &str) -> S {
        let words = std::iter::once("x").chain(line.split_whitespace());
        ResourceTestFlags::try_parse_from(words).unwrap().settings
    }

    #[test]
    fn topics() {
        let put = |line: &str, mut body: Value| {
            flags::<TopicSettings>(line).put(&mut body).unwrap();
            body
        };
        assert_eq!(put("", json!({"properties": {}})), json!({"properties": {}}));
        assert_eq!(
            put(
                "--location eastus --tag a=b --tag c=d --input-schema Custom --input-mapping eventtype=kind \
                 --input-default eventType=x --input-default subject=y --public-network-access disabled \
                 --inbound-ip 10.0.0.0/8 --disable-local-auth --profile edge",
                json!({}),
            ),
            json!({
                "location": "eastus", "tags": {"a": "b", "c": "d"},
                "properties": {
                    "inputSchema": "CustomEventSchema",
                    "inputSchemaMapping": {"inputSchemaMappingType": "Json", "properties": {
                        "eventType": {"sourceField": "kind", "defaultValue": "x"}, "subject": {"defaultValue": "y"}}},
                    "publicNetworkAccess": "Disabled",
                    "inboundIpRules": [{"ipMask": "10.0.0.0/8", "action": "Allow"}],
                    "disableLocalAuth": true,
                    "postrider": {"profile": "edge"},
                }
            })
        );
        let before =
            json!({"location": "x", "tags": {"a": "b"}, "properties": {"inputSchema": "EventGridSchema"}});
        let after = put("--disable-local-auth false", before.clone());
        assert_eq!(after["properties"]["disableLocalAuth"], json!(false));
        assert_eq!(after["tags"], before["tags"]);
        let mut body = json!({});
        let refused = flags::<TopicSettings>("--input-mapping color=x")
            .put(&mut body)
            .unwrap_err();
        assert!(refused.to_string().contains("\"color\" is none of id, topic"));
    }

    #[test]
    fn domains_and_system_topics() {
        let mut body = json!({});
        flags::<DomainSettings>("--auto-create-topics false --auto-delete-topics --tag a=b")
            .put(&mut body)
            .unwrap();
        assert_eq!(
            body,
            json!({"tags": {"a": "b"}, "properties": {
                "autoCreateTopicWithFirstSubscription": false, "autoDeleteTopicWithLastSubscription": true}})
        );

        let id = |name: &str| match name.starts_with('/') {
            true => name.to_owned(),
            false => format!("/x/providers/Microsoft.Storage/storageAccounts/{name}"),
        };
        let put = |line: &str| {
            let mut body = json!({});
            flags::<SystemTopicSettings>(line)
                .put(&mut body, id)
                .map(|()| body["properties"].take())
        };
        assert_eq!(
            put("--source local").unwrap(),
            json!({"source": "/x/providers/Microsoft.Storage/storageAccounts/local",
                   "topicType": "Microsoft.Storage.StorageAccounts"})
        );
        let refused = put("--source /subscriptions/x").unwrap_err().to_string();
        assert!(refused.contains("--topic-type"), "{refused}");
        assert!(put("").unwrap_err().to_string().contains("--source"));
    }
}
