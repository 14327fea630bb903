//! Storage accounts, as the resources that destinations and dead-letter destinations refer to.

use super::{Result, json_answer, not_allowed, parse_json, read_bytes};
use crate::http::ApiCall;
use crate::{Server, StorageAccount};
use hyper::{Method, StatusCode};
use postrider_engine::blobs::BlobError;
use postrider_wire::arm::ArmError;
use postrider_wire::resources::FieldError;
use serde_json::{Value, json};
use std::collections::BTreeSet;

pub fn id(server: &Server, name: &str) -> String {
    format!(
        "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Storage/storageAccounts/{name}",
        server.config.account, server.config.resource_group
    )
}

pub fn body(server: &Server, account: &StorageAccount) -> Value {
    let location = &server.config.location;
    let with_slash = |url: &String| format!("{}/", url.trim_end_matches('/'));
    json!({
        "id": id(server, &account.name),
        "name": account.name,
        "type": "Microsoft.Storage/storageAccounts",
        "location": location,
        "kind": "StorageV2",
        "sku": {"name": "Standard_LRS", "tier": "Standard"},
        "tags": {},
        "properties": {
            "provisioningState": "Succeeded",
            "primaryLocation": location,
            "statusOfPrimary": "available",
            "accessTier": "Hot",
            "supportsHttpsTrafficOnly": true,
            "primaryEndpoints": {
                "blob": account.blob_endpoint.as_ref().map(with_slash),
                "queue": account.queue_endpoint.as_ref().map(with_slash),
            },
        },
    })
}

/// Requests below `providers/Microsoft.Storage`. `rest` is in lower case, `sent` as it was sent.
pub async fn answer(
    server: &Server,
    call: &mut ApiCall,
    group: Option<&str>,
    rest: &[&str],
    sent: &[String],
) -> Result {
    let in_group = group.is_none_or(|group| group.eq_ignore_ascii_case(&server.config.resource_group));
    match rest {
        ["storageaccounts"] => {
            get_only(call)?;
            let accounts = server.config.storage_accounts.iter().filter(|_| in_group);
            let value: Vec<Value> = accounts.map(|account| body(server, account)).collect();
            Ok(json_answer(call, StatusCode::OK, &json!({ "value": value })))
        }
        ["checknameavailability"] if group.is_none() => match call.method {
            Method::POST => check_name_availability(server, call).await,
            _ => Err(not_allowed(call, "POST")),
        },
        ["storageaccounts", name, behind @ ..] if group.is_some() => {
            let known = configured(server, name);
            if call.method == Method::PUT && behind.is_empty() {
                return put(server, call, known, in_group, &sent[1]);
            }
            let Some(account) = known.filter(|_| in_group) else {
                let kind = "Microsoft.Storage/storageAccounts";
                return Err(ArmError::not_found(kind, &sent[1], group.unwrap_or_default()));
            };
            of_account(server, call, account, behind).await
        }
        _ => Err(super::nothing_here(call)),
    }
}

fn configured<'a>(server: &'a Server, name: &str) -> Option<&'a StorageAccount> {
    let mut accounts = server.config.storage_accounts.iter();
    accounts.find(|account| account.name.eq_ignore_ascii_case(name))
}

/// Answers a PUT of an account. Configured accounts exist already; others cannot be created through
/// this API.
fn put(
    server: &Server,
    call: &ApiCall,
    known: Option<&StorageAccount>,
    in_group: bool,
    name: &str,
) -> Result {
    match known {
        Some(account) if in_group => Ok(json_answer(call, StatusCode::OK, &body(server, account))),
        Some(account) => {
            let group = &server.config.resource_group;
            let message = format!("{} It is in resource group '{group}'.", taken(&account.name));
            Err(ArmError::new(409, "StorageAccountAlreadyTaken", message))
        }
        None => {
            let message = format!(
                "This server makes no storage accounts. Add a [[storage_account]] with name = \"{name}\" to its \
                 configuration file, with where its blobs and queues are, and restart it."
            );
            Err(ArmError::new(400, "NotSupported", message).at("storage_account"))
        }
    }
}

fn taken(name: &str) -> String {
    format!("The storage account named {name} is already taken.")
}

/// `checkNameAvailability`, which az requests before it creates an account.
async fn check_name_availability(server: &Server, call: &mut ApiCall) -> Result {
    let bytes = read_bytes(call).await?;
    let sent: Value = serde_json::from_str(parse_json(&bytes)?.text()).unwrap_or_default();
    let Some(name) = sent["name"].as_str() else {
        return Err(FieldError::new("name", "is required, a string").into());
    };
    let well_formed =
        (3..=24).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let unavailable =
        |reason: &str, message: String| json!({"nameAvailable": false, "reason": reason, "message": message});
    let body = match configured(server, name) {
        Some(account) => unavailable("AlreadyExists", taken(&account.name)),
        None if !well_formed => unavailable(
            "AccountNameInvalid",
            format!(
                "{name:?} is not a valid storage account name. Storage account name must be between 3 and 24 \
                 characters in length and use numbers and lower-case letters only."
            ),
        ),
        None => json!({"nameAvailable": true}),
    };
    Ok(json_answer(call, StatusCode::OK, &body))
}

fn get_only(call: &ApiCall) -> Result<()> {
    match call.method {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(not_allowed(call, "GET")),
    }
}

async fn of_account(server: &Server, call: &ApiCall, account: &StorageAccount, rest: &[&str]) -> Result {
    match rest {
        [] => match call.method {
            Method::GET | Method::HEAD => Ok(json_answer(call, StatusCode::OK, &body(server, account))),
            _ => {
                let message = "Storage accounts are made in the server's configuration file.";
                Err(ArmError::new(405, "MethodNotAllowed", message))
            }
        },
        ["listkeys"] => match call.method {
            Method::POST => keys(call, account),
            _ => Err(not_allowed(call, "POST")),
        },
        ["blobservices"] | ["blobservices", "default"] => {
            get_only(call)?;
            let service = json!({
                "id": format!("{}/blobServices/default", id(server, &account.name)),
                "name": "default",
                "type": "Microsoft.Storage/storageAccounts/blobServices",
                "properties": {},
            });
            let body = if rest.len() == 1 {
                json!({"value": [service]})
            } else {
                service
            };
            Ok(json_answer(call, StatusCode::OK, &body))
        }
        ["blobservices", "default", "containers"] => {
            get_only(call)?;
            let names = containers_used(server, account);
            let value: Vec<Value> = names
                .iter()
                .map(|name| container(server, account, name))
                .collect();
            Ok(json_answer(call, StatusCode::OK, &json!({ "value": value })))
        }
        ["blobservices", "default", "containers", name] => {
            get_only(call)?;
            container_if_there(server, account, name).await?;
            Ok(json_answer(
                call,
                StatusCode::OK,
                &container(server, account, name),
            ))
        }
        _ => Err(super::nothing_here(call)),
    }
}

/// The key of an account; accounts in Azure and compatible services have one. The caller has write
/// permission, so it may see the key.
fn keys(call: &ApiCall, account: &StorageAccount) -> Result {
    let Some(key) = &account.key else {
        let message = format!("The storage account '{}' has no keys.", account.name);
        return Err(ArmError::new(409, "KeyBasedAuthenticationNotPermitted", message));
    };
    let shown =
        ["key1", "key2"].map(|name| json!({"keyName": name, "value": key.expose(), "permissions": "FULL"}));
    Ok(json_answer(call, StatusCode::OK, &json!({ "keys": shown })))
}

fn container(server: &Server, account: &StorageAccount, name: &str) -> Value {
    json!({
        "id": format!("{}/blobServices/default/containers/{name}", id(server, &account.name)),
        "name": name,
        "type": "Microsoft.Storage/storageAccounts/blobServices/containers",
        "properties": {"publicAccess": "None", "leaseStatus": "Unlocked", "leaseState": "Available"},
    })
}

/// Containers that dead letters are written to. The account is not queried for others.
fn containers_used(server: &Server, account: &StorageAccount) -> BTreeSet<String> {
    let engine = &server.engine;
    let subscriptions = engine.directory.all_subscriptions();
    let places = subscriptions.iter().filter_map(|s| s.dead_letter.as_ref());
    places
        .chain(&engine.dead_letters.fallback)
        .filter(|place| place.account_name().eq_ignore_ascii_case(&account.name))
        .map(|place| place.container.clone())
        .collect()
}

async fn container_if_there(server: &Server, account: &StorageAccount, name: &str) -> Result<()> {
    let blobs = &server.engine.dead_letters.blobs;
    let missing = || {
        let message = "The specified container does not exist.";
        Err(ArmError::new(404, "ContainerNotFound", message))
    };
    if blobs.check_name(&account.name, name).is_err() {
        return missing();
    }
    match blobs.probe(&account.name, name).await {
        Ok(()) => Ok(()),
        Err(BlobError::NoContainer { .. }) => missing(),
        Err(other) => Err(ArmError::new(503, "ServiceUnavailable", other.to_string())),
    }
}
