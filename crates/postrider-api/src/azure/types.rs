//! Topic types and operations: static lists of the provider.

use super::{Result, groups, json_answer, not_allowed};
use crate::Server;
use crate::http::ApiCall;
use hyper::{Method, StatusCode};
use postrider_wire::arm::{ArmError, TOPIC_TYPES, topic_type};
use serde_json::{Value, json};

/// `topicTypes[/{name}[/eventTypes]]`. `rest` are the segments after the first.
pub fn topic_types(server: &Server, call: &ApiCall, rest: &[&str]) -> Result {
    if call.method != Method::GET {
        return Err(not_allowed(call, "GET"));
    }
    let locations = groups::location_display_names(server);
    let body = match rest {
        [] => {
            let value: Vec<Value> = TOPIC_TYPES.iter().map(|known| known.body(&locations)).collect();
            json!({ "value": value })
        }
        [name] => known(name)?.body(&locations),
        [name, word] if word.eq_ignore_ascii_case("eventTypes") => {
            json!({"value": known(name)?.event_type_bodies()})
        }
        _ => return Err(super::nothing_here(call)),
    };
    Ok(json_answer(call, StatusCode::OK, &body))
}

fn known(name: &str) -> Result<&'static postrider_wire::arm::TopicType> {
    topic_type(name).ok_or_else(|| {
        let message = format!("The topic type '{name}' could not be found.");
        ArmError::new(404, "ResourceNotFound", message)
    })
}

/// `operations`: the permissions that can be granted to callers.
pub fn operations(call: &ApiCall) -> Result {
    if call.method != Method::GET {
        return Err(not_allowed(call, "GET"));
    }
    let kinds = [
        "topics",
        "domains",
        "domains/topics",
        "systemTopics",
        "eventSubscriptions",
    ];
    let verbs = ["read", "write", "delete"];
    let mut names: Vec<String> = kinds
        .iter()
        .flat_map(|kind| verbs.iter().map(move |verb| format!("{kind}/{verb}")))
        .collect();
    for kind in ["topics", "domains"] {
        names.extend(["listKeys", "regenerateKey"].map(|action| format!("{kind}/{action}/action")));
    }
    for action in ["getFullUrl", "getDeliveryAttributes"] {
        names.push(format!("eventSubscriptions/{action}/action"));
    }
    names.extend(["register/action", "topicTypes/read", "operations/read"].map(str::to_owned));
    let shown = |name: &str, data: bool| {
        let (resource, operation) = name.rsplit_once('/').unwrap_or((name, ""));
        json!({
            "name": format!("Microsoft.EventGrid/{name}"),
            "display": {
                "provider": "Microsoft Event Grid",
                "resource": resource,
                "operation": operation,
                "description": format!("{operation} of {resource}"),
            },
            "origin": "UserAndSystem",
            "isDataAction": data,
        })
    };
    let mut value: Vec<Value> = names.iter().map(|name| shown(name, false)).collect();
    value.push(shown("events/send/action", true));
    Ok(json_answer(call, StatusCode::OK, &json!({ "value": value })))
}
