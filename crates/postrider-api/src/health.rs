//! `/healthz`: whether publish requests would be accepted, why not, and which other problems need
//! attention. `/healthz/live` and `/healthz/ready` are for probes that only need a status.

use crate::Server;
use crate::cluster::{self, ClusterState};
use crate::http::{Answer, ApiCall, json};
use crate::limits::ClientLimit;
use hyper::StatusCode;
use hyper::header::{CACHE_CONTROL, HeaderValue};
use postrider_core::retry::GiveUpReason;
use postrider_core::time::Timestamp;
use postrider_engine::counters::{reasons, total};
use postrider_engine::deliver::ProxyState;
use postrider_store::log;
use serde_json::{Map, Value, json};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How long before its expiry a certificate is warned of: the period within which a start renews a
/// self-issued one.
const CERTIFICATE_ENDS_SOON: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Subscriptions with stuck dead letters that are listed individually.
const STUCK_NAMED_MAX: usize = 20;

/// How long fresh facts about JetStream are waited for. The endpoint must answer even while
/// JetStream is unreachable.
const LOOK_PATIENCE: Duration = Duration::from_millis(300);

/// The certificate of the https listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerCertificate {
    pub expires: Timestamp,
    /// Whether the server issued the certificate itself. Such a certificate is renewed at a start
    /// when it is about to expire.
    pub ours: bool,
}

/// A problem for operators, with a code for programs.
#[derive(Debug, PartialEq, Eq)]
struct HealthNotice {
    code: &'static str,
    detail: String,
}

impl HealthNotice {
    fn new(code: &'static str, detail: impl Into<String>) -> HealthNotice {
        HealthNotice {
            code,
            detail: detail.into(),
        }
    }

    fn shown(notices: &[HealthNotice]) -> Value {
        let shown = notices
            .iter()
            .map(|one| json!({"code": one.code, "detail": one.detail}));
        shown.collect()
    }
}

/// `/healthz/live`: any answer shows that the process need not be restarted.
pub fn live(call: &ApiCall) -> Answer {
    told(StatusCode::OK, &json!({"status": "live", "live": true}), call)
}

/// Subscriptions with lost events that are listed individually; all of them are counted.
const LOST_NAMED_MAX: usize = 1000;

/// `/healthz/ready`: whether to send events to this server.
pub fn ready(server: &Server, call: &ApiCall) -> Answer {
    let cluster = server.cluster.as_ref().map(|view| view.now());
    let stopping = server.engine.is_stopping();
    let reasons = reasons_against(stopping, &server.engine.log().health(), cluster.as_ref());
    let body = json!({
        "status": status(&reasons),
        "ready": reasons.is_empty(),
        "reasons": HealthNotice::shown(&reasons),
    });
    told(code(&reasons), &body, call)
}

fn told(code: StatusCode, body: &Value, call: &ApiCall) -> Answer {
    let mut answer = json(code, body.to_string(), &call.id);
    let headers = answer.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

/// Reasons why publish requests are refused.
fn reasons_against(
    stopping: bool,
    store: &log::LogHealth,
    cluster: Option<&ClusterState>,
) -> Vec<HealthNotice> {
    let mut reasons = Vec::new();
    if stopping {
        reasons.push(HealthNotice::new("stopping", "the server is shutting down"));
    }
    let of_cluster = cluster.map(cluster::publish_refusal_reasons).unwrap_or_default();
    // A node of a cluster knows more exactly what keeps its log from being written.
    if let Some(refusing) = store.refusing.as_ref().filter(|_| of_cluster.is_empty()) {
        reasons.push(HealthNotice::new("logUnwritable", refusing));
    }
    let of_cluster = of_cluster.into_iter();
    reasons.extend(of_cluster.map(|(code, detail)| HealthNotice::new(code, detail)));
    reasons
}

fn status(reasons: &[HealthNotice]) -> &'static str {
    match reasons {
        [] => "ready",
        _ => "unavailable",
    }
}

fn code(reasons: &[HealthNotice]) -> StatusCode {
    match reasons {
        [] => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Problems that do not prevent publishing but need attention.
fn warnings(
    server: &Server,
    store: &log::LogHealth,
    cluster: Option<&ClusterState>,
    stuck: &[Value],
) -> Vec<HealthNotice> {
    let mut warnings = Vec::new();
    if store.corrupt_records > 0 {
        let count = store.corrupt_records;
        let detail =
            format!("{count} damaged or missing parts were found in the log; store.corrupt says where");
        warnings.push(HealthNotice::new("logDamaged", detail));
    }
    if let Some(trouble) = &store.unrecorded {
        let detail = format!(
            "results of deliveries cannot be recorded, so retries and dead letters wait: {trouble}; look at the disk, and \
             at \"postrider restore\" if a file is damaged"
        );
        warnings.push(HealthNotice::new("stateUnwritable", detail));
    }
    let of_cluster = cluster.map(cluster::warnings).unwrap_or_default();
    let of_cluster = of_cluster.into_iter();
    warnings.extend(of_cluster.map(|(code, detail)| HealthNotice::new(code, detail)));
    if let Some((at, trouble)) = server.engine.catalog_trouble() {
        let detail = format!("topics and subscriptions could not be stored at {at}: {trouble}");
        warnings.push(HealthNotice::new("catalogue", detail));
    }
    if let Some((at, trouble)) = server.audit.as_ref().and_then(|audit| audit.status().trouble) {
        let detail = format!(
            "the audit log could not be written at {at}, so changes are refused until it can; events are still accepted: {trouble}"
        );
        warnings.push(HealthNotice::new("audit", detail));
    }
    if let Some(damage) = server.audit.as_ref().and_then(|audit| audit.status().damage) {
        let detail = format!(
            "lines of the audit log are missing or changed: {damage}; \"postrider audit verify\" names the place, and a backup \
             of audit/ has what is missing"
        );
        warnings.push(HealthNotice::new("auditDamaged", detail));
    }
    if let Some(trouble) = server.recordings.status().trouble {
        warnings.push(HealthNotice::new("recorder", trouble));
    }
    if let Some(proxy) = &server.proxy
        && let ProxyState {
            failing_since: Some(since),
            reason: Some(reason),
            ..
        } = proxy.state()
    {
        let detail = format!("since {since}: the proxy {} {reason}", proxy.address);
        warnings.push(HealthNotice::new("proxy", detail));
    }
    for one in stuck.iter().take(STUCK_NAMED_MAX) {
        let text = |name: &str| one[name].as_str().unwrap_or_default();
        let (topic, subscription, reason) = (text("topic"), text("subscription"), text("reason"));
        let detail = format!(
            "subscription {subscription:?} of topic {topic:?}: dead letters cannot be written: {reason}"
        );
        warnings.push(HealthNotice::new("deadLetters", detail));
    }
    if stuck.len() > STUCK_NAMED_MAX {
        let detail = format!("{} more subscriptions", stuck.len() - STUCK_NAMED_MAX);
        warnings.push(HealthNotice::new("deadLetters", detail));
    }
    if let Some(at) = server.config.plain_http_exposed {
        let detail = format!(
            "http://{at} is not encrypted and others can reach it: whoever is on the way reads keys, tokens and events; \
             use https only (listen.http = \"off\"), or allow it by name with listen.allow_plain_http = true"
        );
        warnings.push(HealthNotice::new("plainHttp", detail));
    }
    if let Some(certificate) = server.certificate {
        warnings.extend(ends_soon(certificate, server.wall.now()));
    }
    warnings
}

fn ends_soon(certificate: ListenerCertificate, now: Timestamp) -> Option<HealthNotice> {
    let ListenerCertificate { expires, ours } = certificate;
    if now + CERTIFICATE_ENDS_SOON < expires {
        return None;
    }
    let verb = if now < expires { "expires" } else { "has expired" };
    let todo = match ours {
        true => "restart the server: it issues another",
        false => "replace listen.cert_file and restart the server",
    };
    let detail = format!("the certificate of the https listener {verb} at {expires}; {todo}");
    Some(HealthNotice::new("certificate", detail))
}

/// The kind of the store, its size, and the durability that it guarantees.
fn store(log: &log::LogHealth, cluster: Option<&ClusterState>) -> Value {
    let mut shown = json!({
        "kind": "embedded",
        "segments": log.segments,
        "bytes": log.bytes,
        "corruptRecords": log.corrupt_records,
        "corrupt": log.corrupt,
        "redelivered": log.redelivered,
    });
    let Some(cluster) = cluster else { return shown };
    shown["kind"] = json!("jetstream");
    shown["node"] = json!(cluster.me().map(|me| &me.name));
    shown["partitions"] = json!({
        "owned": cluster.me().map_or(0, |me| me.partitions.len()),
        "served": cluster.served(),
        "total": cluster.partitions.len(),
    });
    shown["leaseLeftMs"] = json!(cluster.own.lease_left.as_millis() as u64);
    if let Some(jetstream) = &cluster.jetstream {
        shown["replicas"] = json!(jetstream.replicas);
        shown["sync"] = json!(jetstream.sync);
        shown["guarantee"] = json!(jetstream.guarantee);
        shown["version"] = json!(jetstream.version);
        shown["servers"] = jetstream.shown_servers();
        shown["lookedAgoMs"] = json!(jetstream.looked_ago.as_millis() as u64);
    }
    shown
}

pub async fn answer(server: &Server, call: &ApiCall) -> Answer {
    let cluster = cluster::look(server, LOOK_PATIENCE).await;
    let cluster = cluster.as_ref();
    let log = server.engine.log().health();
    let against = reasons_against(server.engine.is_stopping(), &log, cluster);
    let letters = dead_letters(server);
    let stuck = letters["trouble"].as_array().map_or(&[][..], Vec::as_slice);
    let warnings = warnings(server, &log, cluster, stuck);
    let counters = &server.engine.dispatcher.counters;
    let by_reason = |counts: &[std::sync::atomic::AtomicU64]| {
        let pairs = reasons(counts)
            .into_iter()
            .map(|(r, n)| (r.name().to_owned(), json!(n)));
        Value::Object(pairs.collect::<Map<_, _>>())
    };
    let in_flight = server.engine.dispatcher.in_flight.usage();
    let mut body = json!({
        "status": status(&against),
        "live": true,
        "ready": against.is_empty(),
        "reasons": HealthNotice::shown(&against),
        "warnings": HealthNotice::shown(&warnings),
        "version": server.config.version,
        "profile": server.config.profile,
        "store": store(&log, cluster),
        "deliveries": {
            "matched": counters.matched.load(Relaxed),
            "delivered": counters.delivered.load(Relaxed),
            "deliveredLate": counters.delivered_late.load(Relaxed),
            "attempts": counters.attempts.load(Relaxed),
            "inFlightBytes": in_flight.bytes,
            "inFlightBytesMax": in_flight.bytes_max,
            "inFlightWaiting": in_flight.waiting,
            "attemptsFailed": counters.attempts_failed.load(Relaxed),
            "deadLettered": total(&counters.dead_lettered),
            "dropped": by_reason(&counters.dropped),
        },
    });
    if !log.lost.is_empty() {
        body["store"]["lost"] = lost(server, &log.lost);
    }
    body["deadLetters"] = letters;
    body["tasks"] = json!({
        "deliveryLanes": server.engine.dispatcher.lanes(),
        "ofRemovedSubscriptions": server.engine.dispatcher.orphaned_tasks(),
    });
    let mut clients = json!({
        "connections": server.connections.count(),
        "connectionsMax": server.connections.max(),
    });
    for limit in ClientLimit::ALL {
        clients[limit.member()] = json!(server.client_limits.count(limit));
    }
    body["clients"] = clients;
    let handshakes = &server.engine.handshakes;
    body["handshakes"] = json!({
        "underWay": handshakes.under_way(),
        "noticesFailed": handshakes.notices_failed(),
    });
    if log.corrupt_deliveries > 0 {
        body["deliveries"]["dropped"][GiveUpReason::Corrupt.name()] = json!(log.corrupt_deliveries);
    }
    if let Some(proxy) = &server.proxy {
        let state = proxy.state();
        body["proxy"] = json!({"address": proxy.address, "faults": state.faults});
        if let Some(since) = state.failing_since {
            body["proxy"]["failingSince"] = json!(since.to_string());
        }
        if let Some(reason) = state.reason {
            body["proxy"]["lastFault"] = json!(reason);
        }
    }
    if let Some(time) = &server.virtual_time {
        body["testClock"] = json!({
            "now": time.now().to_string(),
            "warning": "time stands still until POST /postrider/v1/clock/advance moves it; for tests only",
        });
    }
    if let Some(first) = against.first() {
        body["reason"] = json!(first.detail);
    }
    told(code(&against), &body, call)
}

/// Acknowledged events that the log no longer holds, and how many of each subscription's deliveries
/// are lost with them.
fn lost(server: &Server, lost: &[log::LostEvents]) -> Value {
    let directory = &server.engine.directory;
    let events = lost.iter().map(|one| {
        let deliveries = one.deliveries.iter().take(LOST_NAMED_MAX).map(|(of, lost)| {
            let subscription = directory.subscription_by_id(*of);
            let topic = subscription
                .as_ref()
                .and_then(|one| directory.topic_by_id(one.topic));
            json!({
                "subscription": subscription.map(|one| one.name.clone()),
                "subscriptionId": of.0,
                "topic": topic.map(|topic| topic.topic.name.clone()),
                "firstAttempts": lost.first_attempts,
                "exact": lost.exact,
                "retries": lost.retries,
                "deadLetters": lost.letters,
            })
        });
        let mut shown = json!({
            "from": one.from.0,
            "endKnown": one.end_known,
            "cause": one.cause,
            "subscriptions": one.deliveries.len(),
            "deliveries": deliveries.collect::<Vec<_>>(),
        });
        // Left out if not even one lost event is known, as for a segment that was still being
        // written.
        if one.to > one.from {
            shown["to"] = json!(one.to.0 - 1);
        }
        shown
    });
    events.collect()
}

/// Dead letters: their counts, and why some cannot be written.
fn dead_letters(server: &Server) -> Value {
    let engine = &server.engine;
    let counters = &engine.dispatcher.counters;
    let waiting = engine.log().pending_dead_letters();
    let trouble = waiting.iter().filter_map(|letters| {
        let reason = engine.dead_letters.trouble(letters.of)?;
        let subscription = engine.directory.subscription_by_id(letters.of)?;
        let topic = engine.directory.topic_by_id(subscription.topic)?;
        Some(json!({"topic": topic.topic.name, "subscription": subscription.name, "reason": reason}))
    });
    json!({
        "pending": waiting.iter().map(|letters| letters.count).sum::<u64>(),
        "written": counters.dead_letters_written.load(Relaxed),
        "blobs": counters.blobs_written.load(Relaxed),
        "blobsNotTold": engine.dead_letters.announcements_given_up.load(Relaxed),
        "trouble": trouble.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_named() {
        let full = log::LogHealth {
            refusing: Some("the disk is full".into()),
            ..log::LogHealth::default()
        };
        let codes = |stopping: bool, store: &log::LogHealth| -> Vec<&str> {
            let reasons = reasons_against(stopping, store, None);
            reasons.iter().map(|one| one.code).collect()
        };
        assert_eq!(codes(false, &log::LogHealth::default()), [""; 0]);
        assert_eq!(codes(false, &full), ["logUnwritable"]);
        assert_eq!(codes(true, &full), ["stopping", "logUnwritable"]);
        let reasons = reasons_against(true, &full, None);
        assert_eq!(
            (status(&reasons), code(&reasons)),
            ("unavailable", StatusCode::SERVICE_UNAVAILABLE)
        );
        assert_eq!((status(&[]), code(&[])), ("ready", StatusCode::OK));
    }

    #[test]
    fn a_certificate_is_warned_of_a_month_before_its_end() {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        let expires = Timestamp::from_secs(1_900_000_000);
        let detail = |ours: bool, now: Timestamp| {
            ends_soon(ListenerCertificate { expires, ours }, now).map(|notice| notice.detail)
        };
        assert_eq!(detail(true, expires - 31 * DAY), None);
        let soon = detail(true, expires - 29 * DAY).unwrap();
        assert!(
            soon.contains("expires at") && soon.contains("issues another"),
            "{soon}"
        );
        let over = detail(false, expires + DAY).unwrap();
        assert!(
            over.contains("has expired") && over.contains("listen.cert_file"),
            "{over}"
        );
    }
}
