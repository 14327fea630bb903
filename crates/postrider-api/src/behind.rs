//! What other nodes changed a moment ago may not have been heard of here. It is looked for before something is changed,
//! and before something is said not to be there; and who changes something waits until the others have heard of it.

use crate::Server;
use crate::http::{self, Answer, Call, Segments};
use bytes::Bytes;
use hyper::header::{HeaderValue, RETRY_AFTER};
use hyper::{Method, StatusCode};
use std::sync::Arc;

/// The question that makes a node look for what others have changed.
pub const CATCH_UP: &str = "catch-up";

/// What a request wants of things that other nodes may have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asking {
    /// Nothing.
    Otherwise,
    /// That they are there. Nothing of the request has been read when it is found that they are not.
    ToUse,
    /// To make, change or delete one.
    ToChange,
}

/// What is posted to the Azure API and changes nothing.
const ASKS: [&str; 3] = ["listKeys", "getFullUrl", "getDeliveryAttributes"];

/// What of our own API is about things that any node may make.
const OURS: [&str; 5] = [
    "subscription",
    "subscriptions",
    "handshakes",
    "deadletters",
    "stats",
];

fn asking(method: &Method, path: &str, segments: &Segments<'_>) -> Asking {
    let is = |at: usize, word: &str| segments.get(at).eq_ignore_ascii_case(word);
    let count = segments.count();
    let cloud = match count {
        4 => (is(0, "topics") || is(0, "domains")) && is(2, "api") && is(3, "events"),
        2 => is(0, "api") && is(1, "events"),
        _ => false,
    };
    let edge = matches!(count, 3 | 4) && is(0, "topics") && is(2, "events");
    let validation = count == 3 && is(0, "eventsubscriptions") && is(2, "validate");
    if cloud || edge || validation {
        return Asking::ToUse;
    }
    // Whoever listens answers deliveries below the same word.
    let ours = is(0, "postrider") && (OURS.iter().any(|word| is(2, word)) || (count == 3 && is(2, "listen")));
    if !(ours || is(0, "topics") || crate::azure::is_path(path)) {
        return Asking::Otherwise;
    }
    let last = path.rsplit('/').find(|part| !part.is_empty()).unwrap_or("");
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => Asking::ToUse,
        Method::POST if ASKS.iter().any(|verb| last.eq_ignore_ascii_case(verb)) => Asking::ToUse,
        _ => Asking::ToChange,
    }
}

/// Answers a request by what all nodes together know.
pub async fn answer(server: &Arc<Server>, call: &mut Call, path: &str, segments: &Segments<'_>) -> Answer {
    if server.cluster.is_none() {
        return http::road(server, call, path, segments).await;
    }
    let asking = asking(&call.method, path, segments);
    if asking != Asking::ToChange {
        let answer = http::road(server, call, path, segments).await;
        if asking == Asking::Otherwise || answer.status() != StatusCode::NOT_FOUND {
            return answer;
        }
    }
    let letters = segments.get(2).eq_ignore_ascii_case("deadletters");
    let caught_up = async {
        server.engine.catch_up().await?;
        match letters {
            true => server.engine.dead_letters.catch_up().await,
            false => Ok(()),
        }
    };
    match caught_up.await {
        Ok(()) => {
            let answer = http::road(server, call, path, segments).await;
            if asking == Asking::ToChange && answer.status().is_success() {
                spread(server).await;
            }
            answer
        }
        Err(e) => {
            let error = serde_json::json!({"code": "ServiceUnavailable", "message": e.to_string()});
            let body = serde_json::json!({"error": error}).to_string();
            let mut answer = http::json(StatusCode::SERVICE_UNAVAILABLE, body, &call.id);
            answer
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from_static("1"));
            answer
        }
    }
}

/// By the time that whoever made a change is told so it is in force at all nodes that can be reached: events that are
/// published next are matched by it wherever they are taken in. Those out of reach hear of it when they can.
pub(crate) async fn spread(server: &Server) {
    if let Some(peers) = &server.peers {
        let told = peers.ask(CATCH_UP, Bytes::new()).await;
        if !told.missing.is_empty() {
            tracing::debug!(nodes = ?told.missing, "a change may not be in force at other nodes yet");
        }
    }
}

/// Another node has changed something, and waits until it is in force here.
pub async fn answer_catch_up(server: &Server) -> Result<Bytes, String> {
    let caught_up = server.engine.catch_up().await;
    caught_up.map(|()| Bytes::new()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_what() {
        let check = |method: Method, path: &str, expected: Asking| {
            assert_eq!(
                asking(&method, path, &Segments::of(path)),
                expected,
                "{method} {path}"
            );
        };
        let arm = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/topics/t";
        check(Method::GET, arm, Asking::ToUse);
        check(Method::PUT, arm, Asking::ToChange);
        check(Method::POST, &format!("{arm}/listKeys"), Asking::ToUse);
        check(Method::POST, &format!("{arm}/regenerateKey"), Asking::ToChange);
        let subscription = format!("{arm}/providers/Microsoft.EventGrid/eventSubscriptions/s");
        check(Method::POST, &format!("{subscription}/getfullurl"), Asking::ToUse);
        for published in [
            "/topics/t/api/events",
            "/domains/d/api/events",
            "/api/events",
            "/topics/t/events",
        ] {
            check(Method::POST, published, Asking::ToUse);
        }
        check(Method::GET, "/eventSubscriptions/s/validate", Asking::ToUse);
        check(Method::GET, "/topics/t/eventSubscriptions/s", Asking::ToUse);
        check(Method::DELETE, "/topics/t/eventSubscriptions/s", Asking::ToChange);
        check(
            Method::POST,
            "/postrider/v1/subscriptions/pause",
            Asking::ToChange,
        );
        check(Method::POST, "/postrider/v1/listen", Asking::ToChange);
        check(Method::GET, "/postrider/v1/deadletters/replays/7", Asking::ToUse);
        for other in [
            "/postrider/v1/listen/token/7",
            "/postrider/v1/cluster/drain",
            "/healthz",
            "/portal/x",
            "/common/oauth2/token",
        ] {
            check(Method::POST, other, Asking::Otherwise);
        }
    }
}
