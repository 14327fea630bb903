//! Keeps the nodes of a cluster consistent as their clients see it. A node catches up with the
//! changes of other nodes before it changes a resource and before it answers that one does not
//! exist. A change is answered only when no node acts by the old state any more.

use crate::Server;
use crate::http::{self, Answer, ApiCall};
use crate::publish;
use crate::route::{CatalogAccess, Route};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{HeaderValue, RETRY_AFTER};
use std::sync::Arc;

/// Peer request with which nodes of earlier versions make this node catch up with their changes.
pub const CATCH_UP: &str = "catch-up";

/// Answers a request by what all nodes together know.
pub async fn answer(server: &Arc<Server>, call: &mut ApiCall, route: &Route<'_>) -> Answer {
    if server.cluster.is_none() {
        return http::route_to_api(server, call, route).await;
    }
    let access = route.catalog_access(&call.method);
    if let CatalogAccess::Publish(api) = access
        && let Err(error) = publish::check_current(server)
    {
        return publish::refuse(server, call, &error, api);
    }
    if access != CatalogAccess::Write {
        let answer = http::route_to_api(server, call, route).await;
        if access == CatalogAccess::None || answer.status() != StatusCode::NOT_FOUND {
            return confirmed(server, call, access, answer).await;
        }
    }
    let caught_up = async {
        server.engine.catch_up().await?;
        match route.uses_archive() {
            true => server.engine.dead_letters.catch_up().await,
            false => Ok(()),
        }
    };
    match caught_up.await {
        Ok(()) => {
            let answer = http::route_to_api(server, call, route).await;
            confirmed(server, call, access, answer).await
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
async fn confirmed(server: &Server, call: &ApiCall, access: CatalogAccess, answer: Answer) -> Answer {
    let changes = matches!(access, CatalogAccess::Write | CatalogAccess::Validate);
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
