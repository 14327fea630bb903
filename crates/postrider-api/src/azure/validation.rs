//! The URL that validates a webhook when it is visited. The token in the URL is the only
//! credential.

use super::insert;
use crate::Server;
use crate::http::{Answer, ApiCall, decoded, json, status};
use hyper::header::{ALLOW, CACHE_CONTROL};
use hyper::{Method, StatusCode};
use postrider_engine::handshake::ConfirmationRefusal;
use postrider_wire::arm::ArmError;
use serde_json::json;

/// `/eventsubscriptions/{name}/validate?id=…&t=…&apiVersion=…&token=…`
pub async fn answer(server: &Server, call: &ApiCall, name: &str) -> Answer {
    // Other methods, such as HEAD, only test whether the URL exists and must not validate the
    // webhook.
    let visits = matches!(call.method, Method::GET | Method::POST);
    let outcome = match visits {
        true => visit(server, call, name).await,
        false => Err(ArmError::new(
            405,
            "MethodNotAllowed",
            "Visit this URL with GET or POST.",
        )),
    };
    let mut answer = match outcome {
        Ok(answer) => answer,
        Err(error) => json(status(error.status), error.body(), &call.id),
    };
    insert(answer.headers_mut(), CACHE_CONTROL, "no-store");
    if !visits {
        insert(answer.headers_mut(), ALLOW, "GET, POST");
    }
    answer
}

async fn visit(server: &Server, call: &ApiCall, name: &str) -> super::Result {
    let need = |parameter: &'static str| {
        let given = call.query(parameter).filter(|given| !given.is_empty());
        given.map(decoded).ok_or_else(|| {
            let message = format!("The query parameter '{parameter}' is required.");
            ArmError::new(400, "InvalidRequest", message).at(parameter)
        })
    };
    let (operation, token) = (need("id")?, need("token")?);
    let confirmed = server.engine.confirm(name, &operation, &token).await;
    let handshake = confirmed.map_err(|why| refused(&why))?;
    let body = json!({
        "message": "Webhook successfully validated as a subscription endpoint.",
        "subscription": handshake.subscription.name,
    });
    Ok(json(StatusCode::OK, body.to_string(), &call.id))
}

fn refused(why: &ConfirmationRefusal) -> ArmError {
    let (status, code) = match why {
        ConfirmationRefusal::Unknown => (404, "ValidationNotFound"),
        ConfirmationRefusal::TooEarly => (409, "ValidationTooEarly"),
        ConfirmationRefusal::Already => (409, "AlreadyValidated"),
        ConfirmationRefusal::Cancelled => (410, "ValidationCanceled"),
        ConfirmationRefusal::Failed(_) => (410, "ValidationFailed"),
        ConfirmationRefusal::Unavailable => (503, "ServiceUnavailable"),
    };
    ArmError::new(status, code, why.to_string())
}
