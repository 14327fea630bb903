//! Management API around the resources: tenants, the Azure subscription, resource groups,
//! locations, providers, and the list of all resources.

use super::lists::{self, ListItem, ListPosition, ListRequest};
use super::{
    ArmContext, Result, empty_answer, json_answer, not_allowed, operations, parse_json, read_bytes, storage,
    unavailable,
};
use crate::Server;
use crate::declare::TopicResourceKind;
use crate::http::{ApiCall, decoded};
use hyper::{Method, StatusCode};
use postrider_core::event::EventSchema;
use postrider_core::ids::{Secret, TopicId};
use postrider_core::subscription::{Topic, TopicKind};
use postrider_core::time::Timestamp;
use postrider_engine::directory::{CreationKey, TopicEntry};
use postrider_wire::arm::{ArmError, generic_body};
use postrider_wire::resources::{FieldError, parse_resource_tags};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Topic type of the hidden topics that store the location and tags of a resource group.
/// Subscriptions cannot use such a topic as their scope.
const GROUP_TYPE: &str = "postrider.resourceGroup";
/// Azure regions that clients are shown when they list locations. The server's own location comes
/// first.
const LOCATIONS: [(&str, &str); 12] = [
    ("westus2", "West US 2"),
    ("eastus", "East US"),
    ("eastus2", "East US 2"),
    ("centralus", "Central US"),
    ("westus", "West US"),
    ("northeurope", "North Europe"),
    ("westeurope", "West Europe"),
    ("uksouth", "UK South"),
    ("germanywestcentral", "Germany West Central"),
    ("southeastasia", "Southeast Asia"),
    ("japaneast", "Japan East"),
    ("australiaeast", "Australia East"),
];

/// A resource group's stored properties.
#[derive(Clone, Debug, PartialEq)]
struct ResourceGroup {
    name: String,
    location: String,
    tags: BTreeMap<String, String>,
}

fn account_body(server: &Server) -> Value {
    let account = &server.config.account;
    json!({
        "id": format!("/subscriptions/{account}"),
        "subscriptionId": account,
        "tenantId": server.config.tenant,
        "displayName": "Postrider",
        "state": "Enabled",
        "authorizationSource": "RoleBased",
        "subscriptionPolicies": {
            "locationPlacementId": "Public_2014-09-01",
            "quotaId": "PayAsYouGo_2014-09-01",
            "spendingLimit": "Off",
        },
        "managedByTenants": [],
    })
}

fn get_only(call: &ApiCall) -> Result<()> {
    match call.method {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(not_allowed(call, "GET")),
    }
}

/// `/subscriptions`
pub fn accounts(server: &Server, call: &ApiCall) -> Result {
    get_only(call)?;
    let body = json!({"value": [account_body(server)], "count": {"type": "Total", "value": 1}});
    Ok(json_answer(call, StatusCode::OK, &body))
}

/// `/subscriptions/{id}`
pub fn account(server: &Server, call: &ApiCall) -> Result {
    get_only(call)?;
    Ok(json_answer(call, StatusCode::OK, &account_body(server)))
}

/// `/tenants`
pub fn tenants(server: &Server, call: &ApiCall) -> Result {
    get_only(call)?;
    let tenant = &server.config.tenant;
    let body = json!({"value": [{
        "id": format!("/tenants/{tenant}"),
        "tenantId": tenant,
        "displayName": "Postrider",
        "tenantCategory": "Home",
    }]});
    Ok(json_answer(call, StatusCode::OK, &body))
}

/// The names of all locations, the server's own first.
pub fn location_names(server: &Server) -> Vec<&str> {
    let own = server.config.location.as_str();
    let others = LOCATIONS
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| *name != own);
    std::iter::once(own).chain(others).collect()
}

fn location_display_name(name: &str) -> &str {
    let known = LOCATIONS.iter().find(|(known, _)| *known == name);
    known.map_or(name, |(_, display)| display)
}

/// The display names of all locations, in the same order.
pub fn location_display_names(server: &Server) -> Vec<&str> {
    let names = location_names(server).into_iter();
    names.map(location_display_name).collect()
}

/// `/subscriptions/{id}/locations`
pub fn locations(server: &Server, call: &ApiCall) -> Result {
    get_only(call)?;
    let account = &server.config.account;
    let shown = |name: &&str| {
        let display = location_display_name(name);
        json!({
            "id": format!("/subscriptions/{account}/locations/{name}"),
            "name": name,
            "type": "Region",
            "displayName": display,
            "regionalDisplayName": display,
            "metadata": {"regionType": "Physical", "regionCategory": "Recommended"},
        })
    };
    let value: Vec<Value> = location_names(server).iter().map(shown).collect();
    Ok(json_answer(call, StatusCode::OK, &json!({ "value": value })))
}

fn record_source(name: &str) -> String {
    format!("resourceGroups/{}", name.to_lowercase())
}

fn record(server: &Server, name: &str) -> Option<Arc<TopicEntry>> {
    server.engine.directory.scope_by_source(&record_source(name))
}

/// All groups: the server's own, those that were created, and those that contain a resource. By
/// name in lower case, each with the creation of the first resource that is known of it.
fn all(server: &Server) -> BTreeMap<String, (ResourceGroup, CreationKey)> {
    let (config, directory) = (&server.config, &server.engine.directory);
    let group = |name: &str| ResourceGroup {
        name: name.to_owned(),
        location: config.location.clone(),
        tags: BTreeMap::new(),
    };
    let first = CreationKey {
        created: Timestamp::MIN,
        id: 0,
    };
    let own = config.resource_group.to_lowercase();
    let mut found = BTreeMap::from([(own, (group(&config.resource_group), first))]);
    let resources = [directory.topics(), directory.domains(), directory.system_topics()];
    for entry in resources.iter().flatten() {
        let (name, made) = (&entry.topic.resource_group, CreationKey::of_topic(&entry.topic));
        let (_, known) = found
            .entry(name.to_lowercase())
            .or_insert_with(|| (group(name), made));
        *known = made.min(*known);
    }
    for entry in directory.scopes() {
        if is_record(&entry.topic) {
            let (key, made) = (
                entry.topic.name.to_lowercase(),
                CreationKey::of_topic(&entry.topic),
            );
            let earlier = found.get(&key).map_or(made, |(_, known)| made.min(*known));
            found.insert(key, (of_record(&entry.topic), earlier));
        }
    }
    found
}

fn is_record(topic: &Topic) -> bool {
    matches!(&topic.kind, TopicKind::Scope { topic_type, .. } if topic_type == GROUP_TYPE)
}

fn of_record(topic: &Topic) -> ResourceGroup {
    ResourceGroup {
        name: topic.name.clone(),
        location: topic.location.clone(),
        tags: topic.tags.clone(),
    }
}

fn find(server: &Server, name: &str) -> Option<ResourceGroup> {
    if let Some(record) = record(server, name) {
        return Some(of_record(&record.topic));
    }
    all(server).remove(&name.to_lowercase()).map(|(group, _)| group)
}

/// The default location of a group's resources.
pub fn location(server: &Server, group: &str) -> String {
    record(server, group).map_or_else(
        || server.config.location.clone(),
        |record| record.topic.location.clone(),
    )
}

fn body(server: &Server, group: &ResourceGroup) -> Value {
    json!({
        "id": format!("/subscriptions/{}/resourceGroups/{}", server.config.account, group.name),
        "name": group.name,
        "type": "Microsoft.Resources/resourceGroups",
        "location": group.location,
        "tags": group.tags,
        "properties": {"provisioningState": "Succeeded"},
    })
}

fn missing(name: &str) -> ArmError {
    let message = format!("Resource group '{name}' could not be found.");
    ArmError::new(404, "ResourceGroupNotFound", message)
}

/// `/subscriptions/{id}/resourcegroups`
pub fn list(server: &Server, call: &ApiCall, context: &ArmContext) -> Result {
    get_only(call)?;
    let filter = query(call, "$filter");
    let wanted = filter.as_deref().map(conditions).transpose()?;
    let wanted = wanted.unwrap_or_default();
    let takes = |group: &ResourceGroup| {
        wanted.iter().all(|(field, value)| match field.as_str() {
            "name" => group.name.eq_ignore_ascii_case(value),
            "location" => group.location.eq_ignore_ascii_case(value),
            "tagname" => group.tags.contains_key(value),
            _ => group.tags.values().any(|tag| tag == value),
        })
    };
    if let Some((field, _)) = wanted
        .iter()
        .find(|(field, _)| !["name", "location", "tagname", "tagvalue"].contains(&field.as_str()))
    {
        return Err(bad_filter(&format!("cannot be about {field}")));
    }
    let asked = ListRequest {
        top: usize::MAX - 1,
        filter: None,
        after: None,
    };
    let groups = all(server).into_values().filter(|(group, _)| takes(group));
    let items = groups.map(|(group, made)| ListItem {
        position: made.into(),
        name: group.name.clone(),
        of: group,
    });
    Ok(lists::page(call, context, &asked, items, |group| {
        body(server, group)
    }))
}

/// `/subscriptions/{id}/resourcegroups/{name}`
pub async fn answer(server: &Arc<Server>, call: &mut ApiCall, name: &str, context: &ArmContext) -> Result {
    match call.method {
        Method::HEAD => match find(server, name) {
            Some(_) => Ok(empty_answer(call, StatusCode::NO_CONTENT)),
            None => Err(missing(name)),
        },
        Method::GET => {
            let group = find(server, name).ok_or_else(|| missing(name))?;
            Ok(json_answer(call, StatusCode::OK, &body(server, &group)))
        }
        Method::PUT | Method::PATCH => put(server, call, name).await,
        Method::DELETE => delete(server, call, name, context).await,
        _ => Err(not_allowed(call, "GET, HEAD, PUT, PATCH, DELETE")),
    }
}

/// Checks a group name by the rules of Azure Resource Manager.
fn check_name(name: &str) -> Result<()> {
    let letters = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '(' | ')');
    if (1..=90).contains(&name.chars().count()) && name.chars().all(letters) && !name.ends_with('.') {
        return Ok(());
    }
    let reason = format!(
        "must have 1 to 90 letters, digits, '.', '_', '-', '(' or ')' and not end with '.', was {name:?}"
    );
    Err(FieldError::new("name", reason).into())
}

async fn put(server: &Arc<Server>, call: &mut ApiCall, name: &str) -> Result {
    check_name(name)?;
    let bytes = read_bytes(call).await?;
    let sent: Value = serde_json::from_str(parse_json(&bytes)?.text()).unwrap_or_default();
    if !sent.is_object() {
        return Err(FieldError::new("", "must be an object").into());
    }
    let _one_at_a_time = server
        .resource_locks
        .hold(format!("group/{}", name.to_lowercase()))
        .await;
    let previous = find(server, name);
    let patch = call.method == Method::PATCH;
    if patch && previous.is_none() {
        return Err(missing(name));
    }
    let created = previous.is_none();
    let mut group = previous.unwrap_or_else(|| ResourceGroup {
        name: name.to_owned(),
        location: server.config.location.clone(),
        tags: BTreeMap::new(),
    });
    match &sent["location"] {
        Value::Null => {}
        Value::String(given) => {
            let given = given.replace(' ', "").to_lowercase();
            if given != group.location && !created && record(server, name).is_some() {
                let message = format!(
                    "Invalid resource group location '{given}'. The Resource group already exists in location '{}'.",
                    group.location
                );
                return Err(ArmError::new(409, "InvalidResourceGroupLocation", message).at("location"));
            }
            group.location = given;
        }
        _ => return Err(FieldError::new("location", "must be a string").into()),
    }
    match &sent["tags"] {
        // A PUT replaces everything: tags that are absent are removed.
        Value::Null if !patch => group.tags = BTreeMap::new(),
        Value::Null => {}
        _ => group.tags = parse_resource_tags(parse_json(&bytes)?)?,
    }
    keep(server, &group).await?;
    let status = if created {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok(json_answer(call, status, &body(server, &group)))
}

/// Stores the location and tags of a group, in a hidden topic that no resource uses.
async fn keep(server: &Server, group: &ResourceGroup) -> Result<()> {
    let known = record(server, &group.name);
    let (id, created) = match &known {
        Some(known) => (known.topic.id, known.topic.created),
        None => {
            let id = server.engine.next_id().await.map_err(|e| unavailable(&e))?;
            (TopicId(id), server.engine.clock.now())
        }
    };
    let topic = Topic {
        id,
        name: group.name.clone(),
        kind: TopicKind::Scope {
            source: record_source(&group.name),
            topic_type: GROUP_TYPE.to_owned(),
        },
        resource_group: String::new(),
        location: group.location.clone(),
        tags: group.tags.clone(),
        input_schema: EventSchema::EventGrid,
        mapping: None,
        keys: [Secret::new(""), Secret::new("")],
        local_auth_disabled: true,
        public_network: false,
        inbound_ip_rules: Vec::new(),
        profile: None,
        created,
        extras: None,
        edge: None,
    };
    if known.as_ref().is_some_and(|known| *known.topic == topic) {
        return Ok(());
    }
    let put = server.engine.replace_topic_if_unchanged(topic, known).await;
    put.map(|_| ()).map_err(|e| unavailable(&e))
}

/// Deletes the resources in a group and the group's stored properties. The server's own group
/// stays, empty.
async fn delete(server: &Arc<Server>, call: &ApiCall, name: &str, context: &ArmContext) -> Result {
    let _one_at_a_time = server
        .resource_locks
        .hold(format!("group/{}", name.to_lowercase()))
        .await;
    let group = find(server, name).ok_or_else(|| missing(name))?;
    let directory = &server.engine.directory;
    let kinds = [
        (TopicResourceKind::Topic, directory.topics()),
        (TopicResourceKind::Domain, directory.domains()),
        (TopicResourceKind::SystemTopic, directory.system_topics()),
    ];
    for (kind, entries) in kinds {
        for entry in entries {
            let topic = &entry.topic;
            if topic.resource_group.eq_ignore_ascii_case(name) {
                let lock = kind.lock(&topic.resource_group, &topic.name);
                let _one_at_a_time = server.resource_locks.hold(lock).await;
                let deleted = server.engine.delete_topic(topic.id).await;
                deleted.map_err(|e| unavailable(&e))?;
            }
        }
    }
    let id = format!("/subscriptions/{}/resourcegroups/{name}", server.config.account).to_lowercase();
    let within = |source: &str| {
        let source = source.to_lowercase();
        source
            .strip_prefix(&id)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    for entry in directory.scopes() {
        if let TopicKind::Scope { source, .. } = &entry.topic.kind
            && (within(source) || *source == record_source(name))
        {
            let deleted = server.engine.delete_topic(entry.topic.id).await;
            deleted.map_err(|e| unavailable(&e))?;
        }
    }
    Ok(operations::accepted(server, call, context, Some(&group.location)))
}

fn query(call: &ApiCall, name: &str) -> Option<String> {
    let given = call.query(name).filter(|given| !given.is_empty())?;
    Some(decoded(&given.replace('+', " ")).into_owned())
}

fn bad_filter(reason: &str) -> ArmError {
    let message = format!("$filter {reason}; it may say field eq 'text', joined by and");
    ArmError::new(400, "InvalidFilterInQueryString", message).at("$filter")
}

/// Parses `resourceType eq 'a' and name eq 'b'`. Returned field names are in lower case.
fn conditions(filter: &str) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut rest = filter.trim();
    loop {
        let mut words = rest.splitn(3, ' ');
        let (field, operator, value) = (words.next(), words.next(), words.next());
        let (Some(field), Some(operator), Some(value)) = (field, operator, value) else {
            return Err(bad_filter(&format!("ends too early, at {rest:?}")));
        };
        if !operator.eq_ignore_ascii_case("eq") {
            return Err(bad_filter(&format!("has {operator:?} where eq was expected")));
        }
        let quoted = value
            .trim_start()
            .strip_prefix('\'')
            .and_then(|value| value.split_once('\''));
        let Some((value, behind)) = quoted else {
            return Err(bad_filter(&format!(
                "has {value:?} where a text in quotes was expected"
            )));
        };
        found.push((field.trim_matches(['(', ')']).to_lowercase(), value.to_owned()));
        rest = behind.trim().trim_matches(')').trim();
        if rest.is_empty() {
            return Ok(found);
        }
        let next = rest
            .split_once(' ')
            .filter(|(word, _)| word.eq_ignore_ascii_case("and"));
        let Some((_, next)) = next else {
            return Err(bad_filter(&format!("has {rest:?} where and was expected")));
        };
        rest = next.trim_start();
    }
}

/// `…/resources`: all resources that belong to a group.
pub fn resources(server: &Server, call: &ApiCall, group: Option<&str>, context: &ArmContext) -> Result {
    get_only(call)?;
    let wanted = query(call, "$filter").as_deref().map(conditions).transpose()?;
    let wanted = wanted.unwrap_or_default();
    let fields = [
        "resourcegroup",
        "resourcetype",
        "name",
        "location",
        "tagname",
        "tagvalue",
    ];
    if let Some((field, _)) = wanted.iter().find(|(field, _)| !fields.contains(&field.as_str())) {
        return Err(bad_filter(&format!("cannot be about {field}")));
    }
    let top = match query(call, "$top").as_deref().map(str::parse) {
        None => 1000,
        Some(Ok(top)) if (1..=1000).contains(&top) => top,
        Some(_) => {
            return Err(ArmError::new(400, "InvalidRequest", "$top must be between 1 and 1000").at("$top"));
        }
    };
    let token = ListRequest::read_token(call)?;
    let asked = ListRequest {
        top,
        filter: None,
        after: token,
    };
    let (config, directory) = (&server.config, &server.engine.directory);
    let ours = [directory.topics(), directory.domains(), directory.system_topics()];
    let ours = ours.iter().flatten().map(|entry| {
        (
            CreationKey::of_topic(&entry.topic).into(),
            entry.topic.resource_group.clone(),
            generic_body(&entry.topic, &config.account),
        )
    });
    // Resources of the configuration come before all others, in the file's order.
    let stores = (0..).zip(&config.storage_accounts).map(|(number, account)| {
        let mut body = storage::body(server, account);
        if let Some(members) = body.as_object_mut() {
            members.remove("properties");
        }
        let position = ListPosition::new(Timestamp::MIN, number);
        (position, config.resource_group.clone(), body)
    });
    let is = |value: &Value, wanted: &str| {
        value
            .as_str()
            .is_some_and(|text| text.eq_ignore_ascii_case(wanted))
    };
    let takes = |(_, of, body): &(ListPosition, String, Value)| {
        group.is_none_or(|group| of.eq_ignore_ascii_case(group))
            && wanted.iter().all(|(field, value)| match field.as_str() {
                "resourcegroup" => of.eq_ignore_ascii_case(value),
                "resourcetype" => is(&body["type"], value),
                "name" => is(&body["name"], value),
                "location" => is(&body["location"], value),
                "tagname" => body["tags"].get(value).is_some(),
                _ => body["tags"]
                    .as_object()
                    .is_some_and(|tags| tags.values().any(|tag| is(tag, value))),
            })
    };
    let items = stores
        .chain(ours)
        .filter(takes)
        .map(|(position, _, body)| ListItem {
            position,
            name: body["name"].as_str().unwrap_or_default().to_owned(),
            of: body,
        });
    Ok(lists::page(call, context, &asked, items, Value::clone))
}

/// The resource types of a provider, and the versions of its API.
fn provider_types(
    namespace: &str,
) -> Option<(&'static str, &'static [&'static str], &'static [&'static str])> {
    const GRID: &[&str] = &[
        "2025-02-15",
        "2022-06-15",
        "2021-12-01",
        "2021-10-15-preview",
        "2020-06-01",
    ];
    const STORAGE: &[&str] = &["2025-08-01", "2024-01-01", "2023-05-01", "2022-09-01"];
    const RESOURCES: &[&str] = &["2024-11-01", "2022-12-01", "2021-04-01"];
    match namespace.to_lowercase().as_str() {
        "microsoft.eventgrid" => Some((
            "Microsoft.EventGrid",
            &[
                "topics",
                "domains",
                "domains/topics",
                "systemTopics",
                "systemTopics/eventSubscriptions",
                "eventSubscriptions",
                "extensionTopics",
                "topicTypes",
                "operations",
                "locations",
                "locations/operationResults",
                "locations/operationsStatus",
                "locations/eventSubscriptions",
                "locations/topicTypes",
            ],
            GRID,
        )),
        "microsoft.storage" => Some((
            "Microsoft.Storage",
            &["storageAccounts", "storageAccounts/blobServices"],
            STORAGE,
        )),
        "microsoft.resources" => Some((
            "Microsoft.Resources",
            &["subscriptions", "resourceGroups", "subscriptions/resourceGroups"],
            RESOURCES,
        )),
        _ => None,
    }
}

fn provider_body(server: &Server, namespace: &str) -> Value {
    let known = provider_types(namespace);
    let locations: Vec<&str> = location_names(server);
    let types = |names: &[&str], versions: &[&str]| -> Vec<Value> {
        let of = |name: &&str| {
            json!({
                "resourceType": name,
                "locations": locations,
                "apiVersions": versions,
                "defaultApiVersion": versions[0],
                "capabilities": "SupportsTags, SupportsLocation",
            })
        };
        names.iter().map(of).collect()
    };
    let (name, types) = known.map_or((namespace, Vec::new()), |(name, names, versions)| {
        (name, types(names, versions))
    });
    json!({
        "id": format!("/subscriptions/{}/providers/{name}", server.config.account),
        "namespace": name,
        "registrationPolicy": "RegistrationRequired",
        "registrationState": "Registered",
        "resourceTypes": types,
    })
}

/// `…/providers[/{namespace}[/register]]`. Providers need no registration: every one that is asked
/// for is registered.
pub fn providers(server: &Server, call: &ApiCall, rest: &[&str]) -> Result {
    match rest {
        [] => {
            get_only(call)?;
            let names = ["Microsoft.EventGrid", "Microsoft.Storage", "Microsoft.Resources"];
            let value = names.map(|name| provider_body(server, name));
            Ok(json_answer(call, StatusCode::OK, &json!({ "value": value })))
        }
        [namespace] => {
            get_only(call)?;
            if provider_types(namespace).is_none() {
                return Err(no_namespace(namespace));
            }
            Ok(json_answer(
                call,
                StatusCode::OK,
                &provider_body(server, namespace),
            ))
        }
        [namespace, _] => match call.method {
            Method::POST => Ok(json_answer(
                call,
                StatusCode::OK,
                &provider_body(server, namespace),
            )),
            _ => Err(not_allowed(call, "POST")),
        },
        _ => Err(super::nothing_here(call)),
    }
}

pub fn no_namespace(namespace: &str) -> ArmError {
    let message = format!("The resource namespace '{namespace}' is invalid.");
    ArmError::new(404, "InvalidResourceNamespace", message)
}

pub fn is_namespace(namespace: &str) -> bool {
    provider_types(namespace).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_of_resource_lists() {
        let check = |filter: &str, expected: &[(&str, &str)]| {
            let expected: Vec<_> = expected.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect();
            assert_eq!(conditions(filter), Ok(expected), "{filter}");
        };
        check("resourceGroup eq 'rg1'", &[("resourcegroup", "rg1")]);
        check(
            "resourceType eq 'a/b' AND name eq 'it is'",
            &[("resourcetype", "a/b"), ("name", "it is")],
        );
        for wrong in [
            "",
            "x",
            "name eq",
            "name ne 'x'",
            "name eq x",
            "name eq 'x' or name eq 'y'",
            "name eq 'x",
        ] {
            let error = conditions(wrong).unwrap_err();
            assert_eq!(
                (error.status, error.target.as_deref()),
                (400, Some("$filter")),
                "{wrong}"
            );
        }
    }

    #[test]
    fn names_of_groups() {
        for good in ["a", "My.group_(1)-x", "größe"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "a.", "a/b", "a b", &"x".repeat(91)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
