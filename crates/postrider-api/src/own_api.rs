//! Our own API under `/postrider/v1`: the test clock, endpoints, handshakes, dead letters, events,
//! the nodes of a cluster, and statistics. Errors are RFC 9457 problems.

use crate::Server;
use crate::access::{AccessRefusal, RequiredPermission};
use crate::http::{Answer, ApiCall, decoded, json, status};
use crate::own_address::name_covers;
use crate::peers::statistics::ProbationDelay;
use crate::peers::{PeerResponses, gather, note_missing};
use crate::route::OwnRoute;
use crate::route::own::{OwnAccess, OwnEndpoint};
use crate::{
    attempts, audit, cluster, dead_letters, docs, events, filters, handshakes, listen, logins, stats, stream,
    subscription_control,
};
use bytes::Bytes;
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, StatusCode};
use postrider_core::duration;
use postrider_core::time::Timestamp;
use postrider_engine::dispatch::EndpointStatus;
use postrider_engine::endpoint::EndpointReportState;
use postrider_engine::subscription_health::words_of;
use postrider_engine::virtual_time::{AdvanceTarget, VirtualTime};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const BODY_MAX: usize = 64 << 10;
/// Default limit, in real time, for attempts that were made at one instant of a test clock to be
/// answered.
const SETTLE: Duration = Duration::from_secs(2);
const SETTLE_MAX: Duration = Duration::from_secs(600);
/// Idle endpoints that a node reports to the others, with how their last request ended.
const IDLE_TOLD_MAX: usize = 500;
/// Limit of one step of a test clock.
const ADVANCE_MAX: Duration = Duration::from_secs(3650 * 86_400);

/// Why a request is refused, as an RFC 9457 problem.
#[derive(Debug)]
pub(crate) struct Problem {
    pub status: u16,
    pub detail: String,
    /// The wrong member of the body or query parameter, if it is a single one.
    pub field: Option<&'static str>,
    /// The whole path of a wrong member that is nested.
    pub path: Option<String>,
    pub allow: Option<&'static str>,
}

impl Problem {
    pub fn new(status: u16, detail: impl Into<String>) -> Problem {
        Problem {
            status,
            detail: detail.into(),
            field: None,
            path: None,
            allow: None,
        }
    }

    pub fn field(field: &'static str, reason: impl std::fmt::Display) -> Problem {
        Problem {
            field: Some(field),
            ..Problem::new(400, format!("{field}: {reason}"))
        }
    }

    pub fn method(allow: &'static str) -> Problem {
        Problem {
            allow: Some(allow),
            ..Problem::new(405, format!("only {allow} is possible here"))
        }
    }

    pub fn answer(&self, id: &str) -> Answer {
        let code = status(self.status);
        let mut body = json!({
            "type": "about:blank",
            "title": code.canonical_reason().unwrap_or("Error"),
            "status": self.status,
            "detail": self.detail,
        });
        if let Some(field) = self.path.as_deref().or(self.field) {
            body["field"] = json!(field);
        }
        let mut answer = json(code, body.to_string(), id);
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if matches!(self.status, 429 | 503) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == 401 {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        answer
    }
}

pub(crate) async fn answer(server: &Arc<Server>, call: &mut ApiCall, route: &OwnRoute<'_>) -> Answer {
    let outcome = dispatch(server, call, route).await;
    let mut answer = outcome.unwrap_or_else(|problem| problem.answer(&call.id));
    // Browsers send requests here too: an answer for one client must not be cached for the next.
    let headers = answer.headers_mut();
    headers
        .entry(CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

async fn dispatch(server: &Arc<Server>, call: &mut ApiCall, route: &OwnRoute<'_>) -> Result<Answer, Problem> {
    let caller = match route.access() {
        OwnAccess::Open => None,
        OwnAccess::Loopback => {
            open_on_loopback(server, call)?;
            None
        }
        OwnAccess::ByMethod => Some(server.caller(call, need_of(&call.method))?),
        OwnAccess::Permission(need) => Some(server.caller(call, need)?),
    };
    let Some(endpoint) = route.endpoint() else {
        return Err(nothing_here(call));
    };
    let clock = match endpoint {
        OwnEndpoint::Clock | OwnEndpoint::AdvanceClock => Some(test_clock(server)?),
        _ => None,
    };
    if !route.allows(&call.method) {
        return Err(Problem::method(route.allow()));
    }
    match (endpoint, &caller, clock) {
        (OwnEndpoint::Clock, _, Some(clock)) => Ok(body(call, json!({"now": clock.now().to_string()}))),
        (OwnEndpoint::AdvanceClock, _, Some(clock)) => advance(server, clock, call).await,
        (OwnEndpoint::Sessions, Some(caller), _) => Ok(logins::list(server, call, caller).await),
        (OwnEndpoint::Listen, Some(caller), _) => listen::begin(server, call, caller).await,
        (
            OwnEndpoint::Handshakes | OwnEndpoint::Handshake | OwnEndpoint::RepeatHandshake,
            Some(caller),
            _,
        ) => handshakes::answer(server, call, &caller.id, endpoint, route.names[0]).await,
        _ => answer_endpoint(server, call, endpoint, route.names).await,
    }
}

/// Endpoints that need no more than the request.
async fn answer_endpoint(
    server: &Arc<Server>,
    call: &mut ApiCall,
    endpoint: OwnEndpoint,
    names: [&str; 2],
) -> Result<Answer, Problem> {
    // Browsers' forms send spaces as plus signs.
    let query = call.uri.query().unwrap_or("").replace('+', "%20");
    let found = match endpoint {
        OwnEndpoint::OpenApi => return Ok(docs::description(call)),
        OwnEndpoint::Endpoints => return Ok(endpoints(server, call).await),
        OwnEndpoint::AdmitEndpoint => return admit(server, call).await,
        OwnEndpoint::Audit => return audit::api::list(server, call, &query).await,
        OwnEndpoint::VerifyAudit => return audit::api::verify(server, call, &query).await,
        OwnEndpoint::RevokeSessions => return logins::revoke(server, call).await,
        OwnEndpoint::RotateSessionKey => return logins::rotate_key(server, call).await,
        OwnEndpoint::Cluster => return cluster::show(server, call).await,
        OwnEndpoint::DrainNode => return cluster::drain(server, call, true).await,
        OwnEndpoint::UndrainNode => return cluster::drain(server, call, false).await,
        OwnEndpoint::ListenReply => return listen::acknowledge(server, call, names[0], names[1]).await,
        OwnEndpoint::TestFilter => return filters::test(server, call).await,
        OwnEndpoint::PauseSubscription | OwnEndpoint::ResumeSubscription | OwnEndpoint::ProbeSubscription => {
            return subscription_control::answer(server, call, endpoint).await;
        }
        OwnEndpoint::EventStream => return stream::answer(server, call).await,
        OwnEndpoint::Server => stats::server(server, &query)?,
        OwnEndpoint::Stats => stats::stats(server, &query).await?,
        OwnEndpoint::StatsSeries => stats::series(server, &query).await?,
        OwnEndpoint::Subscriptions => stats::subscriptions(server, &query).await?,
        OwnEndpoint::Subscription => stats::subscription(server, &query).await?,
        OwnEndpoint::SubscriptionAttempts => attempts::attempts(server, &query).await?,
        OwnEndpoint::Event => events::trace(server, &decoded(names[0]), &query).await?,
        OwnEndpoint::Events => events::search(server, &query).await?,
        OwnEndpoint::DeadLetters
        | OwnEndpoint::DeadLetterSummary
        | OwnEndpoint::DeadLetter
        | OwnEndpoint::ReplayDeadLetters
        | OwnEndpoint::PurgeDeadLetters
        | OwnEndpoint::WriteDeadLetters
        | OwnEndpoint::Replays
        | OwnEndpoint::Replay
        | OwnEndpoint::CancelReplay
        | OwnEndpoint::ResumeReplay => return dead_letters::answer(server, call, endpoint, names[0]).await,
        OwnEndpoint::Clock
        | OwnEndpoint::AdvanceClock
        | OwnEndpoint::Sessions
        | OwnEndpoint::Listen
        | OwnEndpoint::Handshakes
        | OwnEndpoint::Handshake
        | OwnEndpoint::RepeatHandshake => return Err(nothing_here(call)),
    };
    Ok(body(call, found))
}

pub(crate) fn nothing_here(call: &ApiCall) -> Problem {
    Problem::new(404, format!("{} does not exist", call.uri.path()))
}

pub(crate) fn body(call: &ApiCall, value: Value) -> Answer {
    json(StatusCode::OK, value.to_string(), &call.id)
}

/// Requires the permission to read or, for methods that change something, to write.
fn authenticate(server: &Server, call: &ApiCall) -> Result<(), Problem> {
    admit_caller(server, call, need_of(&call.method))
}

fn need_of(method: &Method) -> RequiredPermission {
    match *method {
        Method::GET | Method::HEAD => RequiredPermission::Read,
        _ => RequiredPermission::Write,
    }
}

fn admit_caller(server: &Server, call: &ApiCall, need: RequiredPermission) -> Result<(), Problem> {
    server.caller(call, need).map(|_| ()).map_err(Problem::from)
}

impl From<AccessRefusal> for Problem {
    fn from(refused: AccessRefusal) -> Problem {
        match refused {
            AccessRefusal::Unknown(reason) => Problem::new(401, reason),
            AccessRefusal::Forbidden(reason) => Problem::new(403, reason),
            AccessRefusal::LockedOut(reason) => Problem::new(429, reason),
        }
    }
}

/// The clock, if the server runs on one that can be moved.
fn test_clock(server: &Server) -> Result<&VirtualTime, Problem> {
    server.virtual_time.as_ref().ok_or_else(|| {
        Problem::new(
            404,
            "this server runs on the machine's clock; start it with --test-clock to move the time",
        )
    })
}

/// While only this machine can reach the server, admits any client that addresses it by one of its
/// own names. Otherwise, and whenever a credential is sent, the credential decides.
pub(crate) fn open_on_loopback(server: &Server, call: &ApiCall) -> Result<(), Problem> {
    if call.header("authorization").is_some() || !server.config.loopback_only {
        return authenticate(server, call);
    }
    crate::own_address::addressed_by_name(server, call).map_err(|message| Problem::new(403, message))
}

async fn advance(server: &Server, clock: &VirtualTime, call: &mut ApiCall) -> Result<Answer, Problem> {
    let members = read_object(call).await?;
    let (target, settle) = read_advance(&members, clock.now())?;
    let advanced = clock
        .advance(target, settle)
        .await
        .map_err(|e| Problem::new(503, e.to_string()))?;
    // Minutes of statistics end only when the clock is moved, so counters are persisted now.
    if let Some(numbers) = &server.numbers {
        numbers.keep().await;
    }
    let answer = json!({"now": advanced.now.to_string(), "attempts": advanced.attempts});
    Ok(body(call, answer))
}

/// Body: `{"by": "10m"}`, `{"to": "2030-01-01T00:00:00Z"}` or `{"toNextAttempt": true}`, and
/// optionally `"settle": "200ms"`.
fn read_advance(members: &Map<String, Value>, now: Timestamp) -> Result<(AdvanceTarget, Duration), Problem> {
    let mut target = None;
    let mut settle = SETTLE;
    for (name, value) in members {
        let asked = match name.as_str() {
            "by" => AdvanceTarget::By(bounded("by", value, ADVANCE_MAX)?),
            "to" => {
                let at = value.as_str().and_then(Timestamp::parse);
                let at = at
                    .ok_or_else(|| Problem::field("to", "must be a time such as \"2030-01-01T00:00:00Z\""))?;
                if at < now {
                    return Err(Problem::field(
                        "to",
                        format!("{at} is before {now}: time does not go back"),
                    ));
                }
                if at.since(now) > ADVANCE_MAX {
                    return Err(Problem::field("to", "must be within ten years"));
                }
                AdvanceTarget::To(at)
            }
            "toNextAttempt" => match value {
                Value::Bool(true) => AdvanceTarget::NextAttempt,
                _ => return Err(Problem::field("toNextAttempt", "must be true")),
            },
            "settle" => {
                settle = bounded("settle", value, SETTLE_MAX)?;
                continue;
            }
            other => {
                let known = "known are by, to, toNextAttempt and settle";
                return Err(Problem::new(400, format!("{other}: is not known; {known}")));
            }
        };
        if target.replace(asked).is_some() {
            return Err(Problem::new(
                400,
                "only one of by, to and toNextAttempt may be given",
            ));
        }
    }
    let target = target.ok_or_else(|| Problem::new(400, "one of by, to and toNextAttempt is required"))?;
    Ok((target, settle))
}

fn bounded(field: &'static str, value: &Value, max: Duration) -> Result<Duration, Problem> {
    let Some(text) = value.as_str() else {
        return Err(Problem::field(
            field,
            "must be a duration in a string, such as \"10m\"",
        ));
    };
    let read = duration::parse(text).map_err(|reason| Problem::field(field, reason))?;
    if read > max {
        let max = duration::print(max);
        return Err(Problem::field(field, format!("{text:?} is more than {max}")));
    }
    Ok(read)
}

pub(crate) async fn read_bytes(call: &mut ApiCall) -> Result<Bytes, Problem> {
    match call.read_body(BODY_MAX).await {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => Err(Problem::new(
            413,
            format!("the body is longer than {BODY_MAX} bytes"),
        )),
        Err(cut) => Err(Problem::new(cut.status(), cut.reason())),
    }
}

pub(crate) async fn read_object(call: &mut ApiCall) -> Result<Map<String, Value>, Problem> {
    let bytes = read_bytes(call).await?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(members)) => {
            // Bodies of the portal's own paths hold secrets and are not recorded.
            if call.uri.path().starts_with("/postrider") {
                call.notes.parameters(&members);
            }
            Ok(members)
        }
        Ok(_) => Err(Problem::new(400, "the body must be a JSON object")),
        Err(e) => Err(Problem::new(400, format!("the body is not JSON: {e}"))),
    }
}

async fn endpoints(server: &Server, call: &ApiCall) -> Answer {
    let all = server.engine.dispatcher.endpoints();
    let mut shown: Vec<Value> = all.iter().map(|status| endpoint(server, status)).collect();
    let mut missing = Vec::new();
    if let Some(peers) = &server.peers {
        let heard: PeerResponses<Vec<Value>> = gather(&**peers, "endpoints", &json!({})).await;
        join_endpoints(&mut shown, heard.answers);
        missing = heard.missing;
    }
    let mut answer = json!({"value": shown});
    note_missing(&mut answer, missing);
    body(call, answer)
}

/// The endpoints that this node sends to.
pub(crate) fn own_endpoints(server: &Server) -> Vec<Value> {
    let all = server.engine.dispatcher.endpoints();
    let is_busy = |status: &EndpointStatus| {
        status.state.delay.is_some() || status.state.in_flight > 0 || status.waiting > 0
    };
    let (mut told, mut idle): (Vec<_>, Vec<_>) = all.iter().partition(|status| is_busy(status));
    // For idle endpoints the last answer is reported, for those used most recently.
    idle.retain(|status| status.last.is_some());
    idle.sort_by_key(|status| std::cmp::Reverse(status.last.map(|last| last.at)));
    idle.truncate(IDLE_TOLD_MAX);
    told.extend(idle);
    let shown = told.into_iter().map(|status| {
        let mut shown = endpoint(server, status);
        if let Some(members) = shown.as_object_mut() {
            members.remove("subscriptions");
        }
        shown
    });
    shown.collect()
}

/// Merges the endpoints of all nodes: backlogs are added up, and an endpoint that is on probation
/// at any node is on probation.
fn join_endpoints(shown: &mut Vec<Value>, told: Vec<(String, Vec<Value>)>) {
    let mut by_name: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for (node, endpoints) in told {
        for mut one in endpoints {
            let name = one["endpoint"].as_str().unwrap_or_default().to_owned();
            one["node"] = json!(node);
            by_name.entry(name).or_default().push(one);
        }
    }
    for one in shown.iter_mut() {
        let name = one["endpoint"].as_str().unwrap_or_default();
        let told = by_name.remove(name).unwrap_or_default();
        join_endpoint(one, told);
    }
    // Endpoints of subscriptions that another node has heard of earlier than this one.
    for (name, told) in by_name {
        let mut one = json!({"endpoint": name, "subscriptions": []});
        join_endpoint(&mut one, told);
        shown.push(one);
    }
}

/// The members that describe an endpoint's delay, without its state.
const DELAY_MEMBERS: [&str; 5] = ["cause", "causeText", "since", "until", "probeDue"];

fn join_endpoint(one: &mut Value, mut told: Vec<Value>) {
    let sum = |name: &str| -> u64 { told.iter().filter_map(|told| told[name].as_u64()).sum() };
    let (in_flight, waiting) = (sum("inFlight"), sum("waiting"));
    let is = |state: &str| told.iter().any(|told| told["state"] == state);
    let state = match (is("probing"), is("delayed")) {
        (true, _) => "probing",
        (false, true) => "delayed",
        (false, false) => "admitting",
    };
    let delayed = told.iter().filter(|told| told.get("until").is_some());
    let longest = delayed.max_by_key(|told| told["until"].as_str().unwrap_or_default().to_owned());
    let longest = longest.cloned();
    let newest = told.iter().filter_map(|told| told.get("last"));
    let newest = newest.max_by_key(|last| last["at"].as_str().unwrap_or_default());
    let newest = newest.cloned();
    for name in DELAY_MEMBERS {
        set_or_remove(one, name, longest.as_ref().and_then(|longest| longest.get(name)));
    }
    set_or_remove(one, "last", newest.as_ref());
    one["state"] = json!(state);
    one["inFlight"] = json!(in_flight);
    one["waiting"] = json!(waiting);
    for told in &mut told {
        if let Some(members) = told.as_object_mut() {
            members.remove("endpoint");
        }
    }
    one["nodes"] = json!(told);
}

fn set_or_remove(one: &mut Value, name: &str, value: Option<&Value>) {
    match value {
        Some(value) => one[name] = value.clone(),
        None => drop(one.as_object_mut().and_then(|members| members.remove(name))),
    }
}

pub(crate) fn endpoint(server: &Server, status: &EndpointStatus) -> Value {
    let now = server.engine.clock.now();
    let subscriptions = status.subscriptions.iter().filter_map(|id| {
        let subscription = server.engine.directory.subscription_by_id(*id)?;
        let topic = server.engine.directory.topic_by_id(subscription.topic)?;
        let mut shown = json!({"topic": topic.topic.name, "name": subscription.name});
        if let Some(own) = status.held_subscriptions.get(id) {
            show_state(&mut shown, own, now);
        }
        Some(shown)
    });
    let mut body = json!({
        "endpoint": status.name,
        "inFlight": status.state.in_flight,
        "waiting": status.waiting,
        "subscriptions": subscriptions.collect::<Vec<_>>(),
    });
    if is_this_server(server, &status.name) {
        body["thisServer"] = json!(true);
    }
    show_state(&mut body, &status.state, now);
    if let Some(last) = &status.last {
        body["last"] = json!({
            "at": last.at.to_string(),
            "outcome": last.outcome.name(),
            "text": words_of(Some(last.outcome), last.status),
        });
        if let Some(status) = last.status {
            body["last"]["status"] = json!(status);
        }
    }
    body
}

/// Whether deliveries to an endpoint come back to this server, by the names of the server that are
/// known.
fn is_this_server(server: &Server, endpoint: &str) -> bool {
    let Ok(url) = endpoint.parse::<hyper::Uri>() else {
        return false;
    };
    let place = |url: &hyper::Uri| {
        let host = url.host()?.trim_matches(['[', ']']).to_ascii_lowercase();
        let usual = if url.scheme_str() == Some("https") {
            443
        } else {
            80
        };
        Some((host, url.port_u16().unwrap_or(usual)))
    };
    let Some((host, port)) = place(&url) else {
        return false;
    };
    let public = server
        .config
        .public_url
        .as_ref()
        .and_then(|url| place(&url.parse().ok()?));
    let loopback = host
        .parse()
        .is_ok_and(|ip: std::net::IpAddr| ip.to_canonical().is_loopback());
    let named = loopback
        || server
            .config
            .host_names
            .iter()
            .any(|name| name_covers(name, &host));
    (named && server.ports.contains(&port)) || public == Some((host, port))
}

fn show_state(body: &mut Value, state: &EndpointReportState, now: Timestamp) {
    let Some(delay) = ProbationDelay::of(state) else {
        body["state"] = json!("admitting");
        return;
    };
    body["state"] = json!(if state.probing { "probing" } else { "delayed" });
    body["cause"] = json!(delay.cause);
    body["causeText"] = json!(delay.cause_text());
    body["since"] = json!(delay.since().to_string());
    body["until"] = json!(delay.until().to_string());
    // Nothing is sent until there is an event to probe with.
    if delay.until() <= now && !state.probing {
        body["probeDue"] = json!(true);
    }
}

/// Ends an endpoint's probation manually.
async fn admit(server: &Server, call: &mut ApiCall) -> Result<Answer, Problem> {
    let members = read_object(call).await?;
    let Some(name) = members.get("endpoint").and_then(Value::as_str) else {
        let reason = "must be the name of an endpoint as GET /postrider/v1/endpoints lists it";
        return Err(Problem::field("endpoint", reason));
    };
    if let Some(other) = members.keys().find(|key| *key != "endpoint") {
        return Err(Problem::new(
            400,
            format!("{other}: is not known; known is endpoint"),
        ));
    }
    let dispatcher = &server.engine.dispatcher;
    if !dispatcher.endpoints().iter().any(|known| known.name == name) {
        let detail = format!("endpoint: no subscription points to {name:?}");
        return Err(Problem {
            field: Some("endpoint"),
            ..Problem::new(404, detail)
        });
    }
    let mut missing = Vec::new();
    let ended = match &server.peers {
        None => dispatcher.end_delays_by_operator(name),
        Some(peers) => {
            let heard: PeerResponses<bool> = gather(&**peers, "admit", &name).await;
            missing = heard.missing;
            heard.answers.iter().any(|(_, ended)| *ended)
        }
    };
    let mut answer = json!({"endpoint": name, "ended": ended});
    note_missing(&mut answer, missing);
    Ok(body(call, answer))
}

pub(crate) fn own_admit(server: &Server, name: String) -> bool {
    server.engine.dispatcher.end_delays_by_operator(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_as_any_node_says() {
        let told = |state: &str, in_flight: u64, waiting: u64| json!({"endpoint": "e", "state": state, "inFlight": in_flight, "waiting": waiting});
        let mut delayed = told("delayed", 0, 7);
        delayed["until"] = json!("2");
        delayed["cause"] = json!("Busy");
        delayed["since"] = json!("1");
        let mut shown = vec![
            json!({"endpoint": "e", "state": "admitting", "inFlight": 0, "waiting": 0, "subscriptions": [1]}),
            json!({"endpoint": "quiet", "state": "delayed", "until": "1", "inFlight": 0, "waiting": 0}),
        ];
        let mut answered = told("admitting", 2, 3);
        answered["last"] = json!({"at": "5", "outcome": "Success"});
        delayed["last"] = json!({"at": "2", "outcome": "Busy"});
        let answers = vec![
            ("a".to_owned(), vec![answered]),
            (
                "b".to_owned(),
                vec![
                    delayed.clone(),
                    json!({"endpoint": "new", "state": "admitting", "inFlight": 1, "waiting": 0}),
                ],
            ),
        ];
        join_endpoints(&mut shown, answers);
        assert_eq!(
            shown[0],
            json!({"endpoint": "e", "state": "delayed", "inFlight": 2, "waiting": 10, "subscriptions": [1],
            "cause": "Busy", "since": "1", "until": "2", "last": {"at": "5", "outcome": "Success"},
            "nodes": [
                {"node": "a", "state": "admitting", "inFlight": 2, "waiting": 3,
                    "last": {"at": "5", "outcome": "Success"}},
                {"node": "b", "state": "delayed", "inFlight": 0, "waiting": 7, "cause": "Busy", "since": "1", "until": "2",
                    "last": {"at": "2", "outcome": "Busy"}},
            ]})
        );
        assert_eq!(
            (&shown[1]["state"], shown[1].get("until")),
            (&json!("admitting"), None)
        );
        assert_eq!(
            (&shown[2]["endpoint"], &shown[2]["inFlight"]),
            (&json!("new"), &json!(1))
        );
    }

    const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);

    fn read(text: &str) -> Result<(AdvanceTarget, Duration), String> {
        let Value::Object(members) = serde_json::from_str(text).unwrap() else {
            panic!("{text}");
        };
        read_advance(&members, NOW).map_err(|problem| problem.detail)
    }

    #[test]
    fn an_advance_is_asked_for_in_three_ways() {
        let minutes = |n: u64| Duration::from_secs(n * 60);
        assert_eq!(
            read(r#"{"by":"10m"}"#),
            Ok((AdvanceTarget::By(minutes(10)), SETTLE))
        );
        assert_eq!(
            read(r#"{"by":"0s"}"#),
            Ok((AdvanceTarget::By(Duration::ZERO), SETTLE))
        );
        assert_eq!(
            read(r#"{"by":"1h30m","settle":"200ms"}"#),
            Ok((AdvanceTarget::By(minutes(90)), Duration::from_millis(200)))
        );
        assert_eq!(
            read(r#"{"to":"2023-11-14T22:13:30Z"}"#),
            Ok((AdvanceTarget::To(NOW + Duration::from_secs(10)), SETTLE))
        );
        assert_eq!(
            read(r#"{"toNextAttempt":true}"#),
            Ok((AdvanceTarget::NextAttempt, SETTLE))
        );
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let check = |text: &str, expected: &str| {
            let detail = read(text).unwrap_err();
            assert!(detail.starts_with(expected), "{text}: {detail}");
        };
        check("{}", "one of by, to and toNextAttempt is required");
        check(
            r#"{"settle":"1s"}"#,
            "one of by, to and toNextAttempt is required",
        );
        check(r#"{"by":"1m","toNextAttempt":true}"#, "only one of");
        check(r#"{"by":600}"#, "by: must be a duration in a string");
        check(r#"{"by":"soon"}"#, "by: \"soon\" is not a duration");
        check(r#"{"by":"-5m"}"#, "by: \"-5m\" is not a duration");
        check(r#"{"by":"never"}"#, "by: \"never\" is more than");
        check(r#"{"by":"1s","settle":"1h"}"#, "settle: \"1h\" is more than 10m");
        check(r#"{"to":"tomorrow"}"#, "to: must be a time");
        check(
            r#"{"to":"2023-11-14T22:13:19Z"}"#,
            "to: 2023-11-14T22:13:19.0000000Z is before",
        );
        check(r#"{"to":"2123-11-14T22:13:19Z"}"#, "to: must be within ten years");
        check(r#"{"toNextAttempt":false}"#, "toNextAttempt: must be true");
        check(r#"{"until":"1m"}"#, "until: is not known");
    }
}
