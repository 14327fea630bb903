//! Operator actions on a subscription: `POST /postrider/v1/subscriptions/pause`, `resume` and
//! `probe`.

#[cfg(test)]
mod tests;

use crate::http::{Answer, ApiCall};
use crate::own_api::{Problem, body, read_object};
use crate::peers::gather;
use crate::route::own::OwnEndpoint;
use crate::{Server, azure, lookup, stats};
use postrider_core::ids::SubscriptionId;
use postrider_core::subscription::Subscription;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Performs the action and answers with the subscription afterwards. An action that changes nothing
/// is no error.
pub(crate) async fn answer(
    server: &Server,
    call: &mut ApiCall,
    endpoint: OwnEndpoint,
) -> Result<Answer, Problem> {
    let members = read_object(call).await?;
    let known = find(server, &members)?;
    let engine = &server.engine;
    let done = match endpoint {
        OwnEndpoint::PauseSubscription => engine.pause_subscription(known.id).await,
        OwnEndpoint::ResumeSubscription => engine.resume_subscription(known.id).await,
        _ => {
            probe(server, known.id).await;
            Ok(Some(known.clone()))
        }
    };
    let done = done.map_err(|e| Problem::new(503, e.to_string()))?;
    // The subscription may have been deleted during the await above.
    let now = done.ok_or_else(|| lookup::missing("id", &known.name))?;
    Ok(body(call, stats::show(server, &now).await))
}

/// Probes the endpoint from every node that has deliveries for it.
async fn probe(server: &Server, id: SubscriptionId) {
    match &server.peers {
        None => drop(own_probe(server, id.0)),
        // Nodes that do not answer are listed as missing when the subscription is shown.
        Some(peers) => drop(gather::<bool>(&**peers, "probe", &id.0).await),
    }
}

/// Whether the endpoint was on probation.
pub(crate) fn own_probe(server: &Server, id: u64) -> bool {
    server.engine.dispatcher.probe(SubscriptionId(id))
}

fn find(server: &Server, members: &Map<String, Value>) -> Result<Arc<Subscription>, Problem> {
    if let Some(other) = members.keys().find(|key| *key != "id") {
        return Err(Problem::new(400, format!("{other}: is not known; known is id")));
    }
    let id = members.get("id").and_then(Value::as_str);
    let id = id.filter(|id| !id.is_empty());
    let id = id.ok_or_else(|| Problem::field("id", "must be the resource id of a subscription"))?;
    lookup::subscription(server, "id", id).map_err(|problem| {
        // Nothing is sent for a subscription that is not in force, so there is nothing to pause or
        // to probe.
        let asked = problem.status == 404 && azure::subscriptions::find_visible(server, id).is_some();
        match asked {
            true => Problem {
                field: Some("id"),
                ..Problem::new(
                    409,
                    format!("id: {id:?} is not in force yet: its webhook has not agreed"),
                )
            },
            false => problem,
        }
    })
}
