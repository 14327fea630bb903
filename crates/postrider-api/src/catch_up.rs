//! Keeps the nodes of a cluster consistent as their clients see it. A node catches up with the
//! changes of other nodes before it changes a resource and before it answers that one does not
//! exist. A change is answered only when no node acts by the old state any more.

use crate::Server;
use crate::http::{self, Answer, ApiCall, PathSegments};
use crate::publish;
use bytes::Bytes;
use hyper::header::{HeaderValue, RETRY_AFTER};
use hyper::{Method, StatusCode};
use postrider_wire::publish::PublishApi;
use std::sync::Arc;

/// Peer request with which nodes of earlier versions make this node catch up with their changes.
pub const CATCH_UP: &str = "catch-up";

/// How a request uses the catalog, which other nodes may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CatalogAccess {
    /// Does not use the catalog.
    None,
    /// Reads resources. After a 404 the request is answered again once the node has caught up; no
    /// part of the body has been read by then.
    Read,
    /// Publishes events. They are routed by every change that was answered before.
    Publish(PublishApi),
    /// Visits a validation URL, which can put a subscription in force.
    Validate,
    /// Creates, changes or deletes a resource.
    Write,
}

/// POST actions of the management API that change nothing.
const ASKS: [&str; 3] = ["listKeys", "getFullUrl", "getDeliveryAttributes"];

/// Parts of our own API that use resources which any node may have made.
const OURS: [&str; 5] = [
    "subscription",
    "subscriptions",
    "handshakes",
    "deadletters",
    "stats",
];

fn catalog_access(method: &Method, path: &str, segments: &PathSegments<'_>) -> CatalogAccess {
    let is = |at: usize, word: &str| segments.get(at).eq_ignore_ascii_case(word);
    let count = segments.count();
    let cloud = match count {
        4 => (is(0, "topics") || is(0, "domains")) && is(2, "api") && is(3, "events"),
        2 => is(0, "api") && is(1, "events"),
        _ => false,
    };
    let edge = matches!(count, 3 | 4) && is(0, "topics") && is(2, "events");
    let validation = count == 3 && is(0, "eventsubscriptions") && is(2, "validate");
    match () {
        () if cloud => return CatalogAccess::Publish(PublishApi::Cloud),
        () if edge => return CatalogAccess::Publish(PublishApi::Edge),
        () if validation => return CatalogAccess::Validate,
        () => {}
    }
    // Clients of `/listen` post delivery results under the same path prefix. Only `POST /listen`
    // itself creates a subscription.
    let ours = is(0, "postrider") && (OURS.iter().any(|word| is(2, word)) || (count == 3 && is(2, "listen")));
    if !(ours || is(0, "topics") || crate::azure::is_path(path)) {
        return CatalogAccess::None;
    }
    let last = path.rsplit('/').find(|part| !part.is_empty()).unwrap_or("");
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => CatalogAccess::Read,
        Method::POST if ASKS.iter().any(|verb| last.eq_ignore_ascii_case(verb)) => CatalogAccess::Read,
        _ => CatalogAccess::Write,
    }
}

/// Answers a request by what all nodes together know.
pub async fn answer(
    server: &Arc<Server>,
    call: &mut ApiCall,
    path: &str,
    segments: &PathSegments<'_>,
) -> Answer {
    if server.cluster.is_none() {
        return http::route_to_api(server, call, path, segments).await;
    }
    let asking = catalog_access(&call.method, path, segments);
    if let CatalogAccess::Publish(road) = asking
        && let Err(error) = publish::check_current(server)
    {
        return publish::refuse(server, call, &error, road);
    }
    if asking != CatalogAccess::Write {
        let answer = http::route_to_api(server, call, path, segments).await;
        if asking == CatalogAccess::None || answer.status() != StatusCode::NOT_FOUND {
            return confirmed(server, call, asking, answer).await;
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
            let answer = http::route_to_api(server, call, path, segments).await;
            confirmed(server, call, asking, answer).await
        }
        Err(e) => unavailable(call, &e),
    }
}

fn unavailable(call: &ApiCall, why: &postrider_engine::Error) -> Answer {
    let error = serde_json::json!({"code": "ServiceUnavailable", "message": why.to_string()});
    let body = serde_json::json!({"error": error}).to_string();
    let mut answer = http::json(StatusCode::SERVICE_UNAVAILABLE, body, &call.id);
    answer
        .headers_mut()
        .insert(RETRY_AFTER, HeaderValue::from_static("1"));
    answer
}

/// Returns the answer to a change once the change is in force at every node, so that every node
/// routes the next events by it. A 404 is delayed in the same way: the deletion must be known
/// everywhere. The answer becomes 503 if a node that may still act by the old state does not follow
/// in time; the change is stored then, and the request can be repeated.
async fn confirmed(server: &Server, call: &ApiCall, asking: CatalogAccess, answer: Answer) -> Answer {
    let changes = matches!(asking, CatalogAccess::Write | CatalogAccess::Validate);
    let tells = answer.status().is_success() || answer.status() == StatusCode::NOT_FOUND;
    if !(changes && tells) {
        return answer;
    }
    match server.engine.in_force_everywhere().await {
        Ok(()) => answer,
        Err(e) => unavailable(call, &e),
    }
}

/// Catches up with the change of a node of an earlier version, which waits until the change is in
/// force here.
pub async fn answer_catch_up(server: &Server) -> Result<Bytes, String> {
    let caught_up = server.engine.catch_up().await;
    caught_up.map(|()| Bytes::new()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_what() {
        let check = |method: Method, path: &str, expected: CatalogAccess| {
            assert_eq!(
                catalog_access(&method, path, &PathSegments::of(path)),
                expected,
                "{method} {path}"
            );
        };
        let arm = "/subscriptions/s/resourceGroups/g/providers/Microsoft.EventGrid/topics/t";
        check(Method::GET, arm, CatalogAccess::Read);
        check(Method::PUT, arm, CatalogAccess::Write);
        check(Method::POST, &format!("{arm}/listKeys"), CatalogAccess::Read);
        check(
            Method::POST,
            &format!("{arm}/regenerateKey"),
            CatalogAccess::Write,
        );
        let subscription = format!("{arm}/providers/Microsoft.EventGrid/eventSubscriptions/s");
        check(
            Method::POST,
            &format!("{subscription}/getfullurl"),
            CatalogAccess::Read,
        );
        for published in ["/topics/t/api/events", "/domains/d/api/events", "/api/events"] {
            check(Method::POST, published, CatalogAccess::Publish(PublishApi::Cloud));
        }
        check(
            Method::POST,
            "/topics/t/events",
            CatalogAccess::Publish(PublishApi::Edge),
        );
        check(
            Method::GET,
            "/eventSubscriptions/s/validate",
            CatalogAccess::Validate,
        );
        check(Method::GET, "/topics/t/eventSubscriptions/s", CatalogAccess::Read);
        check(
            Method::DELETE,
            "/topics/t/eventSubscriptions/s",
            CatalogAccess::Write,
        );
        check(
            Method::POST,
            "/postrider/v1/subscriptions/pause",
            CatalogAccess::Write,
        );
        check(Method::POST, "/postrider/v1/listen", CatalogAccess::Write);
        check(
            Method::GET,
            "/postrider/v1/deadletters/replays/7",
            CatalogAccess::Read,
        );
        for other in [
            "/postrider/v1/listen/token/7",
            "/postrider/v1/cluster/drain",
            "/healthz",
            "/portal/x",
            "/common/oauth2/token",
        ] {
            check(Method::POST, other, CatalogAccess::None);
        }
    }
}
