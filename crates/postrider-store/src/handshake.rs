//! Handshakes: before a webhook gets events of a subscription, it is asked whether it wants them.

use postrider_core::ids::Secret;
use postrider_core::subscription::Subscription;
use postrider_core::time::Timestamp;

/// A handshake, kept until its subscription is in force. A failed handshake is kept for a while, so
/// that an operator can look at it and repeat it.
#[derive(Clone, Debug, PartialEq)]
pub struct Handshake {
    /// A lower-case GUID by which the client polls the state of the operation.
    pub operation: String,
    /// The subscription as it is to be stored once the webhook agrees.
    pub subscription: Subscription,
    /// Whether a subscription of this name was in force when the handshake began.
    pub replaces: bool,
    /// Trial run to see what the webhook answers: agreement changes nothing.
    pub trial: bool,
    /// Validation code that the webhook has to return in its response.
    pub code: String,
    /// Token that a visitor of the callback URL has to present.
    pub token: Secret,
    /// URL, token included, by which the webhook may agree later. The oldest API versions have
    /// none.
    pub callback: Option<Secret>,
    pub begun: Timestamp,
    /// Node that runs the handshake, in a cluster.
    pub by: Option<String>,
    pub state: HandshakeState,
    /// The requests and responses so far, oldest first.
    pub transcript: Vec<HandshakeExchange>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeState {
    /// The validation request is being sent.
    Asking,
    /// The webhook received the request; its owner may still agree by visiting the callback URL.
    Awaiting {
        until: Timestamp,
    },
    Failed {
        at: Timestamp,
        message: String,
    },
}

/// A request to the webhook and its result, without secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakeExchange {
    pub at: Timestamp,
    pub method: String,
    /// URL without the query.
    pub url: String,
    pub headers: Vec<(String, String)>,
    pub received: HandshakeResponse,
    /// Evaluation of the result, as text for the operator.
    pub verdict: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeResponse {
    Answer {
        status: u16,
        headers: Vec<(String, String)>,
        /// The beginning of the body, as text.
        body: String,
    },
    /// The reason why there was no response.
    Nothing(String),
}
