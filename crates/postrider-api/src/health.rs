//! `/healthz`: whether publishes would be accepted, and why not.

use crate::Server;
use crate::http::{Answer, Call, json};
use hyper::StatusCode;
use postrider_core::retry::Reason;
use postrider_engine::counters::{reasons, total};
use serde_json::{Map, Value, json};
use std::sync::atomic::Ordering::Relaxed;

pub fn answer(server: &Server, call: &Call) -> Answer {
    let store = server.engine.log().health();
    let reason = if server.engine.is_stopping() {
        Some("the server is shutting down".to_owned())
    } else {
        store.refusing.clone()
    };
    let counters = &server.engine.dispatcher.counters;
    let by_reason = |counts: &[std::sync::atomic::AtomicU64]| {
        let pairs = reasons(counts)
            .into_iter()
            .map(|(r, n)| (r.name().to_owned(), json!(n)));
        Value::Object(pairs.collect::<Map<_, _>>())
    };
    let mut body = json!({
        "status": if reason.is_none() { "ready" } else { "unavailable" },
        "version": server.config.version,
        "profile": server.config.profile,
        "store": {
            "kind": "embedded",
            "segments": store.segments,
            "bytes": store.bytes,
            "corruptRecords": store.corrupt_records,
            "corrupt": store.corrupt,
            "redelivered": store.redelivered,
        },
        "deliveries": {
            "matched": counters.matched.load(Relaxed),
            "delivered": counters.delivered.load(Relaxed),
            "deliveredLate": counters.delivered_late.load(Relaxed),
            "attempts": counters.attempts.load(Relaxed),
            "attemptsFailed": counters.attempts_failed.load(Relaxed),
            "deadLettered": total(&counters.dead_lettered),
            "dropped": by_reason(&counters.dropped),
        },
    });
    body["deadLetters"] = dead_letters(server);
    let handshakes = &server.engine.handshakes;
    body["handshakes"] = json!({
        "underWay": handshakes.under_way(),
        "noticesFailed": handshakes.notices_failed(),
    });
    if store.corrupt_deliveries > 0 {
        body["deliveries"]["dropped"][Reason::Corrupt.name()] = json!(store.corrupt_deliveries);
    }
    if let Some(time) = &server.virtual_time {
        body["testClock"] = json!({
            "now": time.now().to_string(),
            "warning": "time stands still until POST /postrider/v1/clock/advance moves it; for tests only",
        });
    }
    let code = match reason {
        None => StatusCode::OK,
        Some(reason) => {
            body["reason"] = json!(reason);
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    json(code, body.to_string(), &call.id)
}

/// Dead letters on their way, and why some cannot be written.
fn dead_letters(server: &Server) -> Value {
    let engine = &server.engine;
    let counters = &engine.dispatcher.counters;
    let waiting = engine.log().letters_waiting();
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
