//! The management API: `/subscriptions/…` and `/providers/…`, as az and the management SDKs call
//! it.

mod topics;
mod domain_topics;
mod groups;
mod storage;
mod types;
pub mod operations;
pub mod validation;
pub mod lists;
pub mod subscriptions;

use crate::Server;
use crate::access::{AccessRefusal, Caller, RequiredPermission};
use crate::declare::TopicResourceKind;
use crate::http::{Answer, ApiCall, BodyReadError, decoded, empty, json as json_bytes, status};
use crate::own_address::{answer_base, validation_base};
use crate::route::ManagementPath;
use bytes::Bytes;
use hyper::header::{
    CACHE_CONTROL, ETAG, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, StatusCode};
use postrider_core::json::RawJson;
use postrider_store::record::StoredRecord;
use postrider_wire::arm::{ApiVersion, ArmError, ArmPath, IdError, Scope, parse_path, stable_guid};
use postrider_wire::resources::read_body;
use serde_json::{Value, json};
use std::sync::Arc;

/// Limit of the length of a resource body.
const BODY_MAX: usize = 1 << 20;
const CORRELATION_ID: HeaderName = HeaderName::from_static("x-ms-correlation-request-id");
const CLIENT_REQUEST_ID: HeaderName = HeaderName::from_static("x-ms-client-request-id");
const ERROR_CODE: HeaderName = HeaderName::from_static("x-ms-error-code");

pub type Result<T = Answer> = std::result::Result<T, ArmError>;

/// Facts about a management request that all handlers need.
#[derive(Clone, Debug)]
pub struct ArmContext {
    pub api_version: ApiVersion,
    /// Prefix of URLs in answers: `https://host:port`.
    pub base_url: String,
    /// Prefix of validation URLs.
    pub validation_base: String,
    pub caller: Caller,
}

pub(crate) async fn answer(server: &Arc<Server>, call: &mut ApiCall, path: ManagementPath<'_>) -> Answer {
    let base_url = answer_base(server, call);
    let outcome = dispatch(server, call, path, &base_url).await;
    let mut answer = outcome.unwrap_or_else(|error| error_answer(call, &error));
    if answer.status() == StatusCode::UNAUTHORIZED {
        let challenge = format!(
            "Bearer authorization_uri=\"{base_url}/{}\", error=\"invalid_token\"",
            server.config.tenant
        );
        insert(answer.headers_mut(), WWW_AUTHENTICATE, &challenge);
    }
    put_headers(call, answer.headers_mut());
    answer
}

fn put_headers(call: &ApiCall, headers: &mut HeaderMap) {
    // Keys and full URLs are requested with POST, so answers to POST must not be stored.
    let kept = if call.method == Method::POST {
        "no-store"
    } else {
        "no-cache"
    };
    headers.insert(CACHE_CONTROL, HeaderValue::from_static(kept));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let correlation = call.headers.get(&CORRELATION_ID).cloned();
    if let Some(id) = correlation.or_else(|| HeaderValue::from_str(&call.id).ok()) {
        headers.insert(CORRELATION_ID, id);
    }
    if let Some(id) = call.headers.get(&CLIENT_REQUEST_ID) {
        headers.insert(CLIENT_REQUEST_ID, id.clone());
    }
}

fn error_answer(call: &ApiCall, error: &ArmError) -> Answer {
    let mut answer = json_bytes(status(error.status), error.body(), &call.id);
    insert(answer.headers_mut(), ERROR_CODE, error.code);
    if matches!(error.status, 429 | 503) {
        insert(answer.headers_mut(), RETRY_AFTER, "1");
    }
    answer
}

async fn dispatch(
    server: &Arc<Server>,
    call: &mut ApiCall,
    path: ManagementPath<'_>,
    base_url: &str,
) -> Result {
    let need = match call.method {
        Method::GET | Method::HEAD => RequiredPermission::Read,
        // Keys and full URLs are requested with POST and are not for readers.
        _ => RequiredPermission::Write,
    };
    let caller = server.caller(call, need).map_err(no_access)?;
    let context = ArmContext {
        api_version: api_version(call)?,
        base_url: base_url.to_owned(),
        validation_base: validation_base(server, call),
        caller,
    };
    let segments = path.segments();
    let lower = words(&segments);
    let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
    match &*lower {
        ["tenants"] => return groups::tenants(server, call),
        ["providers"] => return groups::providers(server, call, &[]),
        ["providers", _] => return groups::providers(server, call, &[&segments[1]]),
        _ => {}
    }
    match parse_path(&segments, &server.config.account) {
        Ok(ArmPath::Accounts) => groups::accounts(server, call),
        Ok(ArmPath::Provider(rest)) => provider(server, call, &rest, &context).await,
        Ok(ArmPath::Scope { scope, rest }) => resource(server, call, &scope, &rest, &context).await,
        Ok(ArmPath::EventSubscriptions {
            scope,
            nested,
            name,
            action,
        }) => {
            let (name, action) = (name.as_deref(), action.as_deref());
            subscriptions::answer(server, call, &scope, nested, name, action, &context).await
        }
        Err(IdError::OtherAccount(id)) => {
            let message = IdError::OtherAccount(id).to_string();
            Err(ArmError::new(404, "SubscriptionNotFound", message))
        }
        Err(IdError::Unknown) => Err(nothing_here(call)),
    }
}

/// Requests below `/providers/Microsoft.EventGrid`.
async fn provider(server: &Server, call: &ApiCall, sent: &[String], context: &ArmContext) -> Result {
    let rest = words(sent);
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    match &*rest {
        ["operations"] => types::operations(call),
        ["verifiedpartners"] => empty_list(call),
        _ => grid_wide(server, call, &rest, sent, context)
            .await
            .unwrap_or_else(|| Err(nothing_here(call))),
    }
}

/// Requests that mean the same with and without a subscription in front. `sent` ends with `rest` in
/// its original casing, for messages.
async fn grid_wide(
    server: &Server,
    call: &ApiCall,
    rest: &[&str],
    sent: &[String],
    context: &ArmContext,
) -> Option<Result> {
    Some(match rest {
        ["operationsstatus", guid] | ["locations", _, "operationsstatus", guid] => {
            operations::status(server, call, guid, context).await
        }
        ["operationresults", guid] | ["locations", _, "operationresults", guid] => {
            operations::result(server, call, guid, context).await
        }
        ["topictypes", rest @ ..] => {
            let names: Vec<&str> = as_sent(sent, rest).iter().map(String::as_str).collect();
            types::topic_types(server, call, &names)
        }
        _ => return None,
    })
}

async fn resource(
    server: &Arc<Server>,
    call: &mut ApiCall,
    scope: &Scope,
    sent: &[String],
    context: &ArmContext,
) -> Result {
    let lower = words(sent);
    let rest: Vec<&str> = lower.iter().map(String::as_str).collect();
    let (group, rest) = match (scope, &*rest) {
        (Scope::Topic(id), rest) => {
            return topics::answer(server, call, TopicResourceKind::Topic, id, rest, sent, context).await;
        }
        (Scope::Domain(id), ["topics"]) => return domain_topics::list(server, call, id, context),
        (Scope::Domain(id), rest) => {
            return topics::answer(server, call, TopicResourceKind::Domain, id, rest, sent, context).await;
        }
        (Scope::SystemTopic(id), rest) => {
            return topics::answer(
                server,
                call,
                TopicResourceKind::SystemTopic,
                id,
                rest,
                sent,
                context,
            )
            .await;
        }
        (Scope::DomainTopic { domain, name }, rest) => {
            return domain_topics::answer(server, call, domain, name, rest, context).await;
        }
        (Scope::Resource(_), _) => return Err(nothing_here(call)),
        (Scope::Account, []) => return groups::account(server, call),
        (Scope::Account, ["locations"]) => return groups::locations(server, call),
        (Scope::Account, ["resourcegroups"]) => return groups::list(server, call, context),
        (Scope::Account, ["providers"]) => return groups::providers(server, call, &[]),
        (Scope::Account, ["providers", _]) => return groups::providers(server, call, &[&sent[1]]),
        (Scope::Account, ["providers", _, verb @ ("register" | "unregister")]) => {
            return groups::providers(server, call, &[&sent[1], verb]);
        }
        (Scope::Group(name), []) => return groups::answer(server, call, name, context).await,
        (Scope::Account, rest) => (None, rest),
        (Scope::Group(name), rest) => (Some(name.as_str()), rest),
    };
    match rest {
        ["resources"] => groups::resources(server, call, group, context),
        // Requested for any resource. The answer depends only on the resource's type, so the
        // resource need not exist.
        [
            "providers",
            _,
            _,
            _,
            "providers",
            "microsoft.eventgrid",
            "eventtypes",
        ] => {
            let of = as_sent(sent, rest);
            let name = format!("{}.{}", of[1], of[2]);
            types::topic_types(server, call, &[&name, "eventTypes"])
        }
        ["providers", "microsoft.storage", rest @ ..] => {
            storage::answer(server, call, group, rest, as_sent(sent, rest)).await
        }
        [
            "providers",
            "microsoft.eventgrid",
            rest @ ..,
            "eventsubscriptions",
        ] => {
            let (location, topic_type) = match rest {
                ["locations", location] => (Some(*location), None),
                ["topictypes", topic_type] => (None, Some(*topic_type)),
                ["locations", location, "topictypes", topic_type] => (Some(*location), Some(*topic_type)),
                _ => return Err(nothing_here(call)),
            };
            subscriptions::list_everywhere(server, call, scope, location, topic_type, context)
        }
        ["providers", "microsoft.eventgrid", rest @ ..] => {
            of_grid(server, call, group, rest, as_sent(sent, rest), context).await
        }
        ["providers", namespace, ..] if !groups::is_namespace(namespace) => {
            Err(groups::no_namespace(&as_sent(sent, rest)[1]))
        }
        _ => Err(nothing_here(call)),
    }
}

/// Resource types of Event Grid that this server does not have.
const FOREIGN: [&str; 8] = [
    "namespaces",
    "partnerTopics",
    "partnerNamespaces",
    "partnerRegistrations",
    "partnerConfigurations",
    "partnerDestinations",
    "verifiedPartners",
    "extensionTopics",
];

fn foreign(word: &str) -> Option<&'static str> {
    let mut known = FOREIGN.iter();
    known.find(|known| known.eq_ignore_ascii_case(word)).copied()
}

/// The end of a path in its original casing; `rest` are the same segments in lower case.
fn as_sent<'a>(sent: &'a [String], rest: &[&str]) -> &'a [String] {
    &sent[sent.len() - rest.len()..]
}

/// Lists of a group or of the whole subscription, and errors for resources that do not exist.
async fn of_grid(
    server: &Server,
    call: &ApiCall,
    group: Option<&str>,
    rest: &[&str],
    sent: &[String],
    context: &ArmContext,
) -> Result {
    if let Some(answer) = grid_wide(server, call, rest, sent, context).await {
        return answer;
    }
    match rest {
        ["topics"] => topics::list(server, call, TopicResourceKind::Topic, group, context),
        ["domains"] => topics::list(server, call, TopicResourceKind::Domain, group, context),
        ["systemtopics"] => topics::list(server, call, TopicResourceKind::SystemTopic, group, context),
        [word] if foreign(word).is_some() => empty_list(call),
        [word, _, ..] if foreign(word).is_some() => {
            let kind = format!("Microsoft.EventGrid/{}", foreign(word).unwrap_or_default());
            match call.method {
                Method::PUT | Method::PATCH => {
                    let message = format!("{kind} are not supported by this server.");
                    Err(ArmError::new(400, "NotSupported", message))
                }
                Method::DELETE => Ok(empty_answer(call, StatusCode::NO_CONTENT)),
                _ => Err(ArmError::not_found(&kind, &sent[1], group.unwrap_or_default())),
            }
        }
        _ => {
            let message = format!(
                "The resource type could not be found in the namespace 'Microsoft.EventGrid' for api version '{}'.",
                context.api_version
            );
            Err(ArmError::new(404, "InvalidResourceType", message))
        }
    }
}

fn empty_list(call: &ApiCall) -> Result {
    match call.method {
        Method::GET => Ok(json_answer(call, StatusCode::OK, &json!({"value": []}))),
        _ => Err(not_allowed(call, "GET")),
    }
}

/// Segments of a path in lower case, for comparison.
fn words(rest: &[String]) -> Vec<String> {
    rest.iter().map(|word| word.to_lowercase()).collect()
}

fn no_access(refused: AccessRefusal) -> ArmError {
    match refused {
        AccessRefusal::Unknown(reason) => {
            let message = format!("Authentication failed: {reason}.");
            ArmError::new(401, "AuthenticationFailed", message)
        }
        AccessRefusal::Forbidden(message) => ArmError::new(403, "AuthorizationFailed", message),
        AccessRefusal::LockedOut(message) => ArmError::new(429, "TooManyRequests", message),
    }
}

fn api_version(call: &ApiCall) -> Result<ApiVersion> {
    let Some(given) = call.query("api-version").filter(|given| !given.is_empty()) else {
        let message = "The api-version query parameter (?api-version=) is required for all requests.";
        return Err(ArmError::new(400, "MissingApiVersionParameter", message).at("api-version"));
    };
    let given = decoded(given);
    ApiVersion::parse(&given).ok_or_else(|| {
        let message = format!(
            "The api-version '{given}' is invalid. It must be a date such as 2022-06-15, or one followed by -preview."
        );
        ArmError::new(400, "InvalidApiVersionParameter", message).at("api-version")
    })
}

pub fn nothing_here(call: &ApiCall) -> ArmError {
    let message = format!("No resource was found at '{}'.", call.uri.path());
    ArmError::new(404, "NotFound", message)
}

/// Error 405. `allowed` lists the methods of this path.
pub fn not_allowed(call: &ApiCall, allowed: &str) -> ArmError {
    let message = format!(
        "The requested resource does not support http method '{}'; it supports {allowed}.",
        call.method
    );
    ArmError::new(405, "MethodNotAllowed", message)
}

/// Error 503 for a failure of the store.
pub fn unavailable(error: &postrider_engine::Error) -> ArmError {
    ArmError::new(503, "ServiceUnavailable", error.to_string())
}

/// Reads the whole body, which may be empty.
pub async fn read_bytes(call: &mut ApiCall) -> Result<Bytes> {
    match call.read_body(BODY_MAX).await {
        Ok(Some(body)) => Ok(body),
        Ok(None) => {
            let message = format!("The body is longer than {BODY_MAX} bytes.");
            Err(ArmError::new(413, "RequestEntityTooLarge", message))
        }
        Err(cut) => {
            let code = match cut {
                BodyReadError::Broken => "InvalidRequestContent",
                BodyReadError::TooSlow(_) => "RequestTimeout",
                BodyReadError::NoRoom => "TooManyRequests",
            };
            let message = format!("The request content could not be read: {}.", cut.reason());
            Err(ArmError::new(cut.status(), code, message))
        }
    }
}

/// Checks that a body is present and is JSON.
pub fn parse_json(bytes: &[u8]) -> Result<RawJson<'_>> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        let message = "The request content was invalid: a body is required.";
        return Err(ArmError::new(400, "InvalidRequestContent", message));
    }
    read_body(bytes).map_err(|e| {
        let message = format!("The request content was invalid and could not be deserialized: {e}.");
        ArmError::new(400, "InvalidRequestContent", message)
    })
}

pub fn json_answer(call: &ApiCall, status: StatusCode, body: &Value) -> Answer {
    json_bytes(status, body.to_string(), &call.id)
}

pub fn empty_answer(call: &ApiCall, status: StatusCode) -> Answer {
    empty(status, &call.id)
}

/// Sets a header to a value that this server generated.
pub fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// The ETag of a record: changes whenever the record does. Records hold secrets, so the tag is
/// keyed: without the key nobody can test guesses against it.
pub fn etag(server: &Server, record: &impl StoredRecord) -> String {
    let bytes = record.encode();
    let tag = stable_guid(
        server.config.naming_key.expose().as_bytes(),
        &String::from_utf8_lossy(&bytes),
    );
    format!("\"{tag}\"")
}

pub fn put_etag(answer: &mut Answer, etag: &str) {
    insert(answer.headers_mut(), ETAG, etag);
}

/// Whether a change may proceed, by `If-Match` and `If-None-Match`. `current` is the ETag; none if
/// the resource does not exist.
pub fn check_preconditions(call: &ApiCall, current: Option<&str>) -> Result<()> {
    let lists = |header: &str, what: &dyn Fn(&str) -> bool| {
        call.header(header)
            .map(|tags| tags.split(',').map(str::trim).any(what))
    };
    let matches = |tag: &str| match current {
        Some(current) => tag == "*" || tag.trim_start_matches("W/") == current,
        None => false,
    };
    let failed = |header: &'static str, reason: &str| {
        let message = format!("The condition in {header} was not met: {reason}.");
        Err(ArmError::new(412, "PreconditionFailed", message).at(header))
    };
    if lists("if-match", &matches) == Some(false) {
        return match current {
            Some(_) => failed("If-Match", "the resource has changed"),
            None => failed("If-Match", "the resource does not exist"),
        };
    }
    if lists("if-none-match", &matches) == Some(true) {
        return failed("If-None-Match", "the resource exists");
    }
    Ok(())
}
