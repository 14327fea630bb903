//! Long-running operations. Most of them are finished before the request is answered.

use super::{ArmContext, Result, empty_answer, insert, json_answer, not_allowed, unavailable};
use crate::Server;
use crate::http::{Answer, ApiCall};
use hyper::header::{HeaderName, LOCATION, RETRY_AFTER};
use hyper::{Method, StatusCode};
use postrider_engine::handshake::OperationState;
use postrider_wire::arm::{ArmError, fresh_operation, is_operation};
use serde_json::json;

/// `Retry-After` in seconds for an unfinished operation. Without it clients wait thirty seconds.
const PATIENCE: &str = "1";
const AZURE_ASYNC_OPERATION: HeaderName = HeaderName::from_static("azure-asyncoperation");

/// The URL and the name of an operation that has already succeeded.
pub fn finished(server: &Server, context: &ArmContext, location: Option<&str>) -> (String, String) {
    let guid = fresh_operation(server.config.naming_key.expose().as_bytes());
    (url(server, context, &guid, location), guid)
}

/// URL at which clients poll an operation.
pub fn url(server: &Server, context: &ArmContext, guid: &str, location: Option<&str>) -> String {
    place(server, context, "operationsStatus", guid, location)
}

fn place(server: &Server, context: &ArmContext, what: &str, guid: &str, location: Option<&str>) -> String {
    let (base, account, version) = (&context.base_url, &server.config.account, &context.api_version);
    let location = match location {
        Some(location) if !location.eq_ignore_ascii_case("global") => format!("/locations/{location}"),
        _ => String::new(),
    };
    // As in the cloud: the GUID is in upper case in the URL and in lower case in the answer.
    let guid = guid.to_uppercase();
    format!(
        "{base}/subscriptions/{account}/providers/Microsoft.EventGrid{location}/{what}/{guid}?api-version={version}"
    )
}

/// Tells the client of a PUT or PATCH where to poll, and that it may do so at once.
pub fn announce(answer: &mut Answer, operation: &str) {
    insert(answer.headers_mut(), AZURE_ASYNC_OPERATION, operation);
    insert(answer.headers_mut(), RETRY_AFTER, "0");
}

/// 202 for a DELETE that has already been carried out.
pub fn accepted(server: &Server, call: &ApiCall, context: &ArmContext, location: Option<&str>) -> Answer {
    let (operation, guid) = finished(server, context, location);
    let mut answer = empty_answer(call, StatusCode::ACCEPTED);
    announce(&mut answer, &operation);
    let result = place(server, context, "operationResults", &guid, location);
    insert(answer.headers_mut(), LOCATION, &result);
    answer
}

/// State of an operation: of a handshake, or of one that finished before its request was answered.
async fn state(server: &Server, guid: &str) -> Result<OperationState> {
    let lower = guid.to_lowercase();
    let handshake = || server.engine.handshakes.operation(&lower);
    let mut known = handshake();
    if known.is_none() {
        if !is_operation(server.config.naming_key.expose().as_bytes(), &lower) {
            let message = format!("The operation '{guid}' could not be found.");
            return Err(ArmError::new(404, "OperationNotFound", message));
        }
        if server.cluster.is_some() {
            // Another node may have begun the operation a moment ago.
            server.engine.catch_up().await.map_err(|e| unavailable(&e))?;
            known = handshake();
        }
    }
    if known == Some(OperationState::Succeeded) {
        // Other changes were in force everywhere before they were answered. A webhook may have
        // agreed just now, so its subscription may not be in force at every node yet.
        if let Err(e) = server.engine.in_force_everywhere().await {
            tracing::debug!(error = %e, operation = lower, "not in force at every node yet");
            return Ok(OperationState::InProgress);
        }
    }
    Ok(known.unwrap_or(OperationState::Succeeded))
}

/// `GET …/operationsStatus/{guid}`
pub async fn status(server: &Server, call: &ApiCall, guid: &str, context: &ArmContext) -> Result {
    if call.method != Method::GET {
        return Err(not_allowed(call, "GET"));
    }
    let state = state(server, guid).await?;
    let id = match call.uri.path_and_query() {
        Some(path) => format!("{}{path}", context.base_url),
        None => context.base_url.clone(),
    };
    let mut body = json!({"id": id, "name": guid.to_lowercase()});
    body["status"] = json!(match &state {
        OperationState::InProgress => "InProgress",
        OperationState::Succeeded => "Succeeded",
        OperationState::Failed { .. } => "Failed",
        OperationState::Canceled => "Canceled",
    });
    match &state {
        OperationState::Failed { code, message } => body["error"] = json!({"code": code, "message": message}),
        OperationState::Canceled => {
            let message = "The operation was canceled because the resource was changed or deleted meanwhile.";
            body["error"] = json!({"code": "OperationCanceled", "message": message});
        }
        OperationState::InProgress | OperationState::Succeeded => {}
    }
    let mut answer = json_answer(call, StatusCode::OK, &body);
    if state == OperationState::InProgress {
        insert(answer.headers_mut(), RETRY_AFTER, PATIENCE);
    }
    Ok(answer)
}

/// `GET …/operationResults/{guid}`: a DELETE has no result, so the answer is empty.
pub async fn result(server: &Server, call: &ApiCall, guid: &str, context: &ArmContext) -> Result {
    if call.method != Method::GET {
        return Err(not_allowed(call, "GET"));
    }
    match state(server, guid).await? {
        OperationState::Succeeded => Ok(empty_answer(call, StatusCode::NO_CONTENT)),
        OperationState::InProgress => {
            let mut answer = empty_answer(call, StatusCode::ACCEPTED);
            let here = call.uri.path_and_query().map_or("", |path| path.as_str());
            insert(
                answer.headers_mut(),
                LOCATION,
                &format!("{}{here}", context.base_url),
            );
            insert(answer.headers_mut(), RETRY_AFTER, PATIENCE);
            Ok(answer)
        }
        OperationState::Failed { code, message } => Err(ArmError::new(409, code, message)),
        OperationState::Canceled => {
            let message = "The operation was canceled because the resource was changed or deleted meanwhile.";
            Err(ArmError::new(409, "OperationCanceled", message))
        }
    }
}
