//! `postrider apply`: changes a server to match declaration files, after printing the plan.

use super::args::read_text;
use super::declarations::{
    DeclarationSet, FileFormat, SubscriptionParent, SubscriptionToApply, with_whole_ids,
};
use super::ids::{PROVIDER, ResourceKind, group_of, name_of};
use super::management_client::ManagementClient;
use super::normalize::ServerBatchDefaults;
use super::plan::{ApplyPlan, PlanStep, WantedResource};
use super::subscriptions::get_in_clear;
use super::{CliFlags, OutputFormat, ServerFlags, UsageError};
use crate::terminal::{can_ask, confirmed, print};
use anyhow::{Context, Result, bail};
use clap::Args;
use postrider_api::listen::HOST;
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[derive(Clone, Debug, Args)]
pub struct ApplyArgs {
    /// Declaration file: .yaml, .json or .toml, or - for the standard input; may be repeated
    #[arg(long = "file", short = 'f', value_name = "FILE|-", required = true)]
    files: Vec<String>,
    #[command(flatten)]
    how: ApplyFlags,
    #[command(flatten)]
    flags: CliFlags,
}

#[derive(Clone, Debug, Args)]
pub struct ApplyFlags {
    /// Print the plan and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long, short = 'y')]
    yes: bool,
    /// Delete what the files do not declare: in the groups they name, and on the topics they have
    #[arg(long)]
    prune: bool,
    /// Do not wait until each change is in force
    #[arg(long)]
    no_wait: bool,
}

pub async fn apply(args: &ApplyArgs) -> Result<()> {
    let mut grid = DeclarationSet::default();
    for path in &args.files {
        let name = if path == "-" { "the standard input" } else { path };
        grid.add(&read_text(path)?, FileFormat::of(path), name)?;
    }
    apply_declarations(grid, &args.how, &args.flags.server, args.flags.output.form()).await
}

pub async fn apply_declarations(
    grid: DeclarationSet,
    how: &ApplyFlags,
    server: &ServerFlags,
    output: OutputFormat,
) -> Result<()> {
    for warning in &grid.warnings {
        eprintln!("warning: {warning}");
    }
    let arm = server.connect().await?;
    let plan = plan(&arm, grid, how.prune).await?;
    let ask = plan.is_work() && !how.dry_run && !how.yes;
    if ask && !can_ask() {
        return Err(
            UsageError::new("there is no terminal to ask at: give --yes to do it, or --dry-run").into(),
        );
    }
    if output == OutputFormat::Text {
        print(plan.text())?;
    }
    let goes_on = plan.is_work() && !how.dry_run;
    if ask && !confirmed("Do this?")? {
        eprintln!("nothing done");
        return Ok(());
    }
    if goes_on {
        carry_out(&arm, &plan, !how.no_wait).await?;
    }
    if output == OutputFormat::Json {
        print(serde_json::to_string_pretty(
            &json!({"plan": plan.json(), "applied": goes_on}),
        )?)?;
    }
    Ok(())
}

/// Stops at the first failure and reports the steps that remain.
async fn carry_out(arm: &ManagementClient, plan: &ApplyPlan, wait: bool) -> Result<()> {
    let work: Vec<&PlanStep> = plan.0.iter().filter(|step| step.changes_anything()).collect();
    for (at, step) in work.iter().enumerate() {
        let done = match &step.action {
            super::plan::PlanAction::Delete => arm.delete(&step.id, wait).await.map(drop),
            _ => arm
                .put(&step.id, step.body.as_ref(), step.etag.as_deref(), wait)
                .await
                .map(drop),
        };
        if let Err(e) = done {
            let names = |steps: &[&PlanStep]| {
                let names: Vec<_> = steps.iter().map(|step| step.what.as_str()).collect();
                match names.is_empty() {
                    true => "nothing".to_owned(),
                    false => names.join(", "),
                }
            };
            eprintln!("done: {}", names(&work[..at]));
            eprintln!("not done: {}", names(&work[at..]));
            return Err(e.context(step.what.clone()));
        }
        eprintln!("{} {}", step.action.done(), step.what);
    }
    Ok(())
}

/// A resource that can have subscriptions, and its id.
#[derive(Clone)]
struct SubscriptionOwner {
    kind: ResourceKind,
    id: String,
    schema: String,
    /// Profile of its subscriptions that name none.
    profile: Option<String>,
}

impl SubscriptionOwner {
    /// System topics of different groups may have the same name.
    fn is(&self, kind: ResourceKind, name: &str, group: Option<&str>) -> bool {
        let same_group = match (group, group_of(&self.id)) {
            (Some(asked), Some(own)) => asked.eq_ignore_ascii_case(own),
            _ => true,
        };
        self.kind == kind && name_of(&self.id).eq_ignore_ascii_case(name) && same_group
    }
}

async fn plan(arm: &ManagementClient, grid: DeclarationSet, prune: bool) -> Result<ApplyPlan> {
    let mut steps = Vec::new();
    let mut owners = Vec::new();
    let mut wanted_ids = BTreeSet::new();
    let mut groups = BTreeSet::new();

    for resource in grid.resources {
        let group = match &resource.group {
            Some(group) => group.clone(),
            None => arm.group_for(resource.kind, &resource.name).await?,
        };
        groups.insert(group.clone());
        let id = arm.ids.resource(&group, resource.kind, &resource.name);
        wanted_ids.insert(id.to_lowercase());
        let present = arm.find(&id).await?;
        let mut body = resource.body;
        if let Some(Value::String(source)) = body.pointer_mut("/properties/source") {
            *source = arm.ids.storage_account(source, &group);
        }
        if body.get("location").is_none() {
            body["location"] = match &present {
                Some(present) => present.body["location"].clone(),
                None => json!(arm.location_of(&group).await?),
            };
        }
        if let Some(present) = &present
            && present.body["properties"]["postrider"]["edge"] == json!(true)
            && body["properties"]["postrider"]["edge"].is_null()
        {
            // A PUT without `edge` keeps the server's value; a file without it means a topic of the
            // management API.
            body["properties"]["postrider"]["edge"] = json!(false);
        }
        let schema = delivery_schema(&body, present.as_ref().map(|read| &read.body));
        owners.push(SubscriptionOwner {
            kind: resource.kind,
            id: id.clone(),
            schema,
            profile: profile(&body["properties"]),
        });
        let what = format!("{} {}", resource.kind.noun(), resource.name);
        let etag = present.as_ref().and_then(|read| read.etag.clone());
        let present = present.map(|read| read.body);
        steps.push(PlanStep::of(
            what,
            id.clone(),
            &WantedResource::Topic(body),
            present.as_ref(),
            etag,
        ));
        for topic in resource.topics {
            let id = format!("{id}/topics/{topic}");
            wanted_ids.insert(id.to_lowercase());
            let there = arm.find(&id).await?.map(|read| read.body);
            let what = format!("domain topic {}/{topic}", resource.name);
            steps.push(PlanStep::of(
                what,
                id.clone(),
                &WantedResource::DomainTopic,
                there.as_ref(),
                None,
            ));
        }
    }
    let server_profile = arm.profile().await?;
    let batch_defaults = arm.batch_defaults().await?;
    for one in grid.subscriptions {
        steps.push(
            subscription(
                arm,
                one,
                &owners,
                &mut wanted_ids,
                &server_profile,
                batch_defaults,
            )
            .await?,
        );
    }
    if prune {
        steps.extend(unwanted(arm, &groups, &owners, &wanted_ids).await?);
    }
    Ok(ApplyPlan(steps))
}

async fn subscription(
    arm: &ManagementClient,
    wanted: SubscriptionToApply,
    owners: &[SubscriptionOwner],
    wanted_ids: &mut BTreeSet<String>,
    server_profile: &str,
    batch_defaults: ServerBatchDefaults,
) -> Result<PlanStep> {
    let what = format!("subscription {}/{}", wanted.on.text(), wanted.name);
    let (all, owner) = match &wanted.on {
        SubscriptionParent::Scope(id) => (format!("{id}/{PROVIDER}/eventSubscriptions"), None),
        SubscriptionParent::Resource(kind, name) => {
            let owner = owner(arm, owners, *kind, name, &wanted.group)
                .await
                .context(what.clone())?;
            (format!("{}/eventSubscriptions", owner.id), Some(owner))
        }
        SubscriptionParent::DomainTopic(domain, topic) => {
            let owner = owner(arm, owners, ResourceKind::Domain, domain, &wanted.group)
                .await
                .context(what.clone())?;
            let topic = format!("{}/topics/{topic}", owner.id);
            wanted_ids.insert(topic.to_lowercase());
            (format!("{topic}/eventSubscriptions"), Some(owner))
        }
    };
    let id = format!("{all}/{}", wanted.name);
    wanted_ids.insert(id.to_lowercase());
    let mut properties = wanted.properties;
    let group = match group_of(&id) {
        Some(group) => group.to_owned(),
        None => arm.default_group().await?,
    };
    with_whole_ids(&mut properties, &arm.ids, &group).context(what.clone())?;
    let present = get_in_clear(arm, &id).await?;
    let etag = present.as_ref().and_then(|read| read.etag.clone());
    let present = present.map(|read| read.body);
    let properties = Value::Object(properties);
    let profile = profile(&properties)
        .or_else(|| owner.as_ref()?.profile.clone())
        .unwrap_or_else(|| server_profile.to_owned());
    let typed_source = owner
        .as_ref()
        .is_none_or(|owner| owner.kind == ResourceKind::SystemTopic);
    let wanted = WantedResource::Subscription {
        properties,
        batch_defaults,
        typed_source,
        schema: owner.map_or("EventGridSchema".into(), |owner| owner.schema),
        cloud_retries: !matches!(profile.to_lowercase().as_str(), "edge" | "custom"),
    };
    Ok(PlanStep::of(what, id, &wanted, present.as_ref(), etag))
}

/// The resource that a subscription belongs to: declared in the files, or on the server already.
async fn owner(
    arm: &ManagementClient,
    owners: &[SubscriptionOwner],
    kind: ResourceKind,
    name: &str,
    group: &Option<String>,
) -> Result<SubscriptionOwner> {
    if let Some(owner) = owners.iter().find(|owner| owner.is(kind, name, group.as_deref())) {
        return Ok(owner.clone());
    }
    let id = match group {
        Some(group) if kind == ResourceKind::SystemTopic => arm.ids.resource(group, kind, name),
        _ => arm.locate(kind, name).await?,
    };
    let Some(read) = arm.find(&id).await? else {
        bail!("{} {name:?} does not exist", kind.noun());
    };
    Ok(SubscriptionOwner {
        kind,
        id,
        schema: delivery_schema(&read.body, None),
        profile: profile(&read.body["properties"]),
    })
}

fn profile(properties: &Value) -> Option<String> {
    properties["postrider"]["profile"].as_str().map(str::to_owned)
}

/// Schema in which events of a topic are delivered where a subscription does not choose one.
fn delivery_schema(body: &Value, present: Option<&Value>) -> String {
    let member = |name: &str| {
        let given = &body["properties"][name];
        match (given, present) {
            (Value::Null, Some(present)) => &present["properties"][name],
            _ => given,
        }
    };
    let schema = member("inputSchema").as_str().unwrap_or_default().to_lowercase();
    let mapped = !member("inputSchemaMapping").is_null();
    match schema.as_str() {
        "cloudeventschemav1_0" => "CloudEventSchemaV1_0",
        "customeventschema" | "custominputschema" | "customschema" if !mapped => "CustomInputSchema",
        _ => "EventGridSchema",
    }
    .to_owned()
}

/// Steps that delete resources which no file declares. Dependent resources go first.
async fn unwanted(
    arm: &ManagementClient,
    groups: &BTreeSet<String>,
    owners: &[SubscriptionOwner],
    wanted: &BTreeSet<String>,
) -> Result<Vec<PlanStep>> {
    let is_wanted = |id: &str| wanted.contains(&id.to_lowercase());
    let mut steps = Vec::new();
    for owner in owners {
        let mut lists = vec![(
            format!("{}/eventSubscriptions", owner.id),
            name_of(&owner.id).to_owned(),
        )];
        let mut gone = Vec::new();
        if owner.kind == ResourceKind::Domain {
            for topic in found(arm, &format!("{}/topics", owner.id)).await? {
                let id = format!("{}/topics/{topic}", owner.id);
                let what = format!("{}/{topic}", name_of(&owner.id));
                match is_wanted(&id) {
                    true => lists.push((format!("{id}/eventSubscriptions"), what)),
                    false => gone.push(PlanStep::delete(format!("domain topic {what}"), id)),
                }
            }
        }
        for (list, on) in lists {
            for name in found(arm, &list).await? {
                let id = format!("{list}/{name}");
                if !is_wanted(&id) {
                    steps.push(PlanStep::delete(format!("subscription {on}/{name}"), id));
                }
            }
        }
        steps.extend(gone);
    }
    for group in groups {
        for kind in [
            ResourceKind::Topic,
            ResourceKind::Domain,
            ResourceKind::SystemTopic,
        ] {
            for name in found(arm, &arm.ids.all_in(group, kind)).await? {
                let id = arm.ids.resource(group, kind, &name);
                if !is_wanted(&id) {
                    steps.push(PlanStep::delete(format!("{} {name}", kind.noun()), id));
                }
            }
        }
    }
    Ok(steps)
}

/// Names in a list; empty if the parent does not exist.
async fn found(arm: &ManagementClient, list: &str) -> Result<Vec<String>> {
    let items = match arm.list(list).await {
        Ok(items) => items,
        Err(e) if super::management_client::is_refused(&e, 404) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    // Subscriptions of listen sessions are excluded: they end by themselves.
    let is_listener = |one: &Value| {
        let url = one["properties"]["destination"]["properties"]["endpointBaseUrl"].as_str();
        url.is_some_and(|url| url.starts_with(&format!("https://{HOST}/")))
    };
    let name = |one: &Value| one["name"].as_str().map(str::to_owned);
    let kept = items.iter().filter(|one| !is_listener(one));
    Ok(kept.filter_map(name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topic_says_how_events_are_delivered() {
        let check = |properties: Value, expected: &str| {
            let body = json!({ "properties": properties });
            assert_eq!(delivery_schema(&body, None), expected);
            assert_eq!(delivery_schema(&json!({}), Some(&body)), expected);
        };
        check(json!({}), "EventGridSchema");
        check(
            json!({"inputSchema": "cloudeventschemav1_0"}),
            "CloudEventSchemaV1_0",
        );
        check(json!({"inputSchema": "CustomEventSchema"}), "CustomInputSchema");
        check(
            json!({"inputSchema": "CustomEventSchema", "inputSchemaMapping": {"properties": {}}}),
            "EventGridSchema",
        );
    }
}
