//! The audit log: every request that changes something, reads a key, logs in or is refused for lack
//! of permission is recorded before it is answered.
//!
//! Requests are classified by method and path in one place ([`action::of`]). An unknown path counts
//! as a change, so that a new path cannot be forgotten. The engine reports what was changed,
//! wherever in the engine the change is made.

pub(crate) mod action;
pub(crate) mod change;
pub(crate) mod api;

use crate::access::{Caller, Role};
use crate::http::{Answer, ApiCall, ResponseContent, json as json_answer};
use crate::own_api::Problem;
use crate::route::Route;
use crate::{Server, catch_up};
use action::{ActionKind, AuditedAction};
use futures_util::FutureExt;
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::header::{HeaderValue, RETRY_AFTER};
use postrider_audit::{
    ActionResult, Actor, AuditEntry, AuditLog, AuditOutcome, AuditUnwritable, AuditedRequest,
};
use postrider_core::time::Timestamp;
use postrider_engine::observed_catalog::{ChangeObserver, CommittedChange, with_observer};
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

/// Value of [`Actor::via`] for a request without a valid credential.
pub(crate) const NO_CREDENTIAL: &str = "none";
/// Action of a GET whose answer shows the URL of a webhook with its query, as `getFullUrl` does.
const SECRET_READ: &str = "subscription.getFullUrl";
/// Lines per minute for requests that have no valid credential and change nothing. Further ones are
/// only counted, and the count is part of the next such line.
const REFUSALS_PER_MINUTE: u32 = 60;
/// Changed resources that one line lists individually.
const CHANGES_SHOWN_MAX: usize = 50;
/// Bytes that are recorded of a text chosen by a client.
const TEXT_MAX: usize = 512;
/// Bytes of JSON that are recorded of a request's members, and of the answer.
const DETAIL_BYTES_MAX: usize = 8 << 10;

/// Facts for the audit log that become known while a request is answered.
#[derive(Debug, Default)]
pub struct AuditNotes {
    actor: Mutex<Option<Actor>>,
    parameters: Mutex<Option<Value>>,
    secret_shown: AtomicBool,
}

impl AuditNotes {
    /// Marks that the answer to a read request holds a secret. The request is then recorded before
    /// the answer is sent.
    pub fn secret_was_shown(&self) {
        self.secret_shown.store(true, Relaxed);
    }

    /// Notes the client whose credential was valid.
    pub fn caller(&self, caller: &Caller, via: &str) {
        self.actor(&caller.id, &caller.roles, via);
    }

    pub fn actor(&self, id: &str, roles: &[Role], via: &str) {
        let actor = Actor {
            id: clipped(id),
            roles: roles.iter().map(|role| role.name().to_owned()).collect(),
            via: via.to_owned(),
        };
        *self.actor.lock().expect("no panic holds it") = Some(actor);
    }

    /// Notes the members of a request's body, which must hold no secret.
    pub fn parameters(&self, members: &Map<String, Value>) {
        let kept = bounded(Value::Object(members.clone()));
        *self.parameters.lock().expect("no panic holds it") = kept;
    }

    fn take_actor(&self) -> Actor {
        let known = self.actor.lock().expect("no panic holds it").take();
        known.unwrap_or_else(|| Actor {
            via: NO_CREDENTIAL.into(),
            ..Actor::default()
        })
    }
}

fn clipped(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

/// None if the value is too large to be recorded.
fn bounded(value: Value) -> Option<Value> {
    (value.to_string().len() <= DETAIL_BYTES_MAX).then_some(value)
}

/// Counts the recent refusals of unauthenticated requests, to limit how many are recorded.
#[derive(Debug, Default)]
pub(crate) struct RefusalBudget {
    minute: i64,
    recorded: u32,
    suppressed: u64,
}

impl RefusalBudget {
    /// Whether this refusal is recorded, and how many before it were not.
    fn take(&mut self, now: Timestamp) -> Option<u64> {
        let minute = now.nanos() / 60_000_000_000;
        if minute != self.minute {
            self.minute = minute;
            self.recorded = 0;
        }
        if self.recorded >= REFUSALS_PER_MINUTE {
            self.suppressed += 1;
            return None;
        }
        self.recorded += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Collects the changes that one request makes. Changes made after its answer are recorded on their
/// own.
struct RequestChangeCollector {
    changes: Mutex<Option<Vec<CommittedChange>>>,
    later: Arc<dyn ChangeObserver>,
}

impl RequestChangeCollector {
    fn end(&self) -> Vec<CommittedChange> {
        let changes = self.changes.lock().expect("no panic holds it").take();
        changes.unwrap_or_default()
    }
}

impl ChangeObserver for RequestChangeCollector {
    fn committed(&self, changes: Vec<CommittedChange>) {
        match self.changes.lock().expect("no panic holds it").as_mut() {
            Some(known) => known.extend(changes),
            None => self.later.committed(changes),
        }
    }
}

/// Records changes that no request waits for: expired subscriptions, webhooks that agreed, the
/// configuration file.
pub struct UnrequestedChangeRecorder {
    server: Weak<Server>,
    actor: &'static str,
}

impl ChangeObserver for UnrequestedChangeRecorder {
    fn committed(&self, changes: Vec<CommittedChange>) {
        let Some(server) = self.server.upgrade() else {
            return;
        };
        let Some(audit) = &server.audit else { return };
        for change in changes {
            let Some(described) = change::describe(&server, &change) else {
                continue;
            };
            // The handshake of a webhook belongs to the request that made the subscription, which
            // was recorded.
            if described.pending {
                continue;
            }
            audit.note(AuditEntry {
                actor: server_actor(self.actor),
                action: described.action().to_owned(),
                resource: described.id.clone(),
                changes: vec![described.body],
                ..AuditEntry::default()
            });
        }
    }
}

fn server_actor(via: &str) -> Actor {
    Actor {
        id: via.to_owned(),
        roles: Vec::new(),
        via: via.to_owned(),
    }
}

/// Answers a request, and records it if its action is one that is recorded.
pub(crate) async fn answer(server: &Arc<Server>, call: &mut ApiCall, route: &Route<'_>) -> Answer {
    let Some((audit, action)) = to_record(server, call, route) else {
        return catch_up::answer(server, call, route).await;
    };
    if action.kind == ActionKind::Read {
        return answer_look(server, call, route, &audit, action).await;
    }
    // A login goes on although it cannot be recorded: an operator must be able to log in to repair
    // the log.
    if action.kind == ActionKind::Change
        && let Err(why) = audit.admit().await
    {
        return unavailable(call, route, &format!("{why}; nothing was changed"));
    }
    let changes = Arc::new(RequestChangeCollector {
        changes: Mutex::new(Some(Vec::new())),
        later: server.unrequested_change_observer("server"),
    });
    let answer = with_observer(changes.clone(), catch_up::answer(server, call, route)).await;
    let recorded = record(server, &audit, call, &action, whole(&answer), changes.end()).await;
    match recorded {
        Err(why) if action.kind == ActionKind::Change && answer.status().is_success() => {
            let detail =
                format!("{why}; the change was made, and is recorded once the log can be written again");
            unavailable(call, route, &detail)
        }
        _ => answer,
    }
}

/// Answers a request that changes nothing. Only refusals, and answers that show a secret, are
/// recorded.
async fn answer_look(
    server: &Arc<Server>,
    call: &mut ApiCall,
    route: &Route<'_>,
    audit: &AuditLog,
    mut action: AuditedAction,
) -> Answer {
    let answer = catch_up::answer(server, call, route).await;
    let shows_secret = call.notes.secret_shown.load(Relaxed) && answer.status().is_success();
    if shows_secret {
        SECRET_READ.clone_into(&mut action.name);
    } else if answer.status() != StatusCode::FORBIDDEN {
        return answer;
    }
    match record(server, audit, call, &action, whole(&answer), Vec::new()).await {
        Err(why) if shows_secret => {
            let detail = format!("{why}; secrets are shown once the log can be written again");
            unavailable(call, route, &detail)
        }
        _ => answer,
    }
}

/// Whether a request is recorded and runs to completion even if its client goes away: a change that
/// was made must be recorded.
///
/// Advancing the test clock changes nothing that must be recorded, so it stops when its client goes
/// away.
pub(crate) fn runs_to_completion(server: &Server, call: &ApiCall, route: &Route<'_>) -> bool {
    to_record(server, call, route)
        .is_some_and(|(_, action)| action.kind == ActionKind::Change && action.name != "clock.advance")
}

fn to_record(server: &Server, call: &ApiCall, route: &Route<'_>) -> Option<(Arc<AuditLog>, AuditedAction)> {
    let audit = server.audit.clone()?;
    let action = action::of(&call.method, call.uri.path(), route)?;
    Some((audit, action))
}

async fn record(
    server: &Server,
    audit: &AuditLog,
    call: &ApiCall,
    action: &AuditedAction,
    (status, body): (StatusCode, Option<Value>),
    changes: Vec<CommittedChange>,
) -> Result<(), AuditUnwritable> {
    let mut details = Map::new();
    let actor = call.notes.take_actor();
    if changes.is_empty() && can_be_repeated_by_anyone(status, &actor) {
        let mut refusals = server.refusals.lock().expect("no panic holds it");
        match refusals.take(server.wall.now()) {
            None => return Ok(()),
            Some(0) => {}
            Some(suppressed) => drop(details.insert("refusalsNotRecorded".into(), json!(suppressed))),
        }
    }
    let result = match status.as_u16() {
        0..400 => ActionResult::Done,
        400..500 => ActionResult::Refused,
        _ => ActionResult::Failed,
    };
    let error = (result != ActionResult::Done).then(|| reason(body.as_ref(), status));
    if let Some(parameters) = call.notes.parameters.lock().expect("no panic holds it").take() {
        details.insert("parameters".into(), parameters);
    }
    if action.shows_answer
        && result == ActionResult::Done
        && let Some(body) = body.and_then(bounded)
    {
        details.insert("answer".into(), body);
    }
    if let Some(forwarded) = call.header("x-forwarded-for") {
        // Unverified: written by the client or a proxy.
        details.insert("forwardedFor".into(), json!(clipped(forwarded)));
    }
    let resource = match &details.get("parameters") {
        Some(parameters) => action::resource_of(parameters).unwrap_or_else(|| action.resource.clone()),
        None => action.resource.clone(),
    };
    let shown = changes.iter().take(CHANGES_SHOWN_MAX);
    let mut described: Vec<Value> = shown
        .filter_map(|one| change::describe(server, one))
        .map(|one| one.body)
        .collect();
    if changes.len() > CHANGES_SHOWN_MAX {
        described.push(json!({"more": changes.len() - CHANGES_SHOWN_MAX}));
    }
    let entry = AuditEntry {
        actor,
        address: Some(call.peer.to_string()),
        action: action.name.clone(),
        resource: clipped(&resource),
        outcome: AuditOutcome {
            result,
            status: Some(status.as_u16()),
            error,
        },
        request: Some(AuditedRequest {
            id: call.id.clone(),
            method: call.method.to_string(),
            path: clipped(call.uri.path()),
        }),
        details,
        changes: described,
    };
    audit.append(entry).await.map(drop)
}

/// Whether a request that changed nothing came without a valid credential. Anyone can send any
/// number of these, and each line would push an older one out of the log.
fn can_be_repeated_by_anyone(status: StatusCode, actor: &Actor) -> bool {
    let limited = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::TOO_MANY_REQUESTS);
    limited || actor.via == NO_CREDENTIAL
}

/// The status of an answer, and its body if that is complete JSON.
fn whole(answer: &Answer) -> (StatusCode, Option<Value>) {
    let body = match answer.body() {
        ResponseContent::Whole(body) => body.clone().collect().now_or_never(),
        _ => None,
    };
    let json = body.and_then(|body| serde_json::from_slice(&body.ok()?.to_bytes()).ok());
    (answer.status(), json)
}

/// The reason for a refusal, in the error format of any of the APIs.
fn reason(body: Option<&Value>, status: StatusCode) -> String {
    let said = body.and_then(|body| {
        [
            "/detail",
            "/error/message",
            "/error_description",
            "/error/details/message",
        ]
        .iter()
        .find_map(|at| body.pointer(at)?.as_str())
    });
    let said = said.unwrap_or_else(|| status.canonical_reason().unwrap_or("error"));
    clipped(said)
}

fn unavailable(call: &ApiCall, route: &Route<'_>, detail: &str) -> Answer {
    if matches!(route, Route::Own(_)) {
        return Problem::new(503, detail).answer(&call.id);
    }
    let error = json!({"code": "ServiceUnavailable", "message": detail});
    let body = json!({ "error": error }).to_string();
    let mut answer = json_answer(StatusCode::SERVICE_UNAVAILABLE, body, &call.id);
    let headers = answer.headers_mut();
    headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    answer
}

impl Server {
    /// Observer that records changes which no API request asked for as made by `actor`: `server` or
    /// `configuration`.
    pub fn unrequested_change_observer(self: &Arc<Self>, actor: &'static str) -> Arc<dyn ChangeObserver> {
        Arc::new(UnrequestedChangeRecorder {
            server: Arc::downgrade(self),
            actor,
        })
    }

    /// Records that the server started, and from now on the changes that the engine makes by
    /// itself.
    pub fn begin_audit(self: &Arc<Self>) {
        let Some(audit) = &self.audit else { return };
        self.engine
            .observe_changes(self.unrequested_change_observer("server"));
        let mut details = Map::new();
        details.insert("version".into(), json!(self.config.version));
        audit.note(AuditEntry {
            actor: server_actor("server"),
            action: "server.start".into(),
            resource: "server".into(),
            details,
            ..AuditEntry::default()
        });
    }
}

#[cfg(test)]
mod tests;
