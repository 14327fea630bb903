//! A webhook is asked whether it wants the events of a subscription before it gets any.

use postrider_core::ids::Secret;
use postrider_core::subscription::Subscription;
use postrider_core::time::Timestamp;

/// One such question, kept until the subscription is in force; one that failed is kept for a while, to be
/// looked at and repeated.
#[derive(Clone, Debug, PartialEq)]
pub struct Handshake {
    /// A guid in lower case, by which the caller asks how it went.
    pub operation: String,
    /// As it is to become.
    pub subscription: Subscription,
    /// A subscription of this name was in force when the question was put.
    pub replaces: bool,
    /// Put only to see what the webhook says: a grant changes nothing.
    pub trial: bool,
    /// What the webhook is to say in its answer.
    pub code: String,
    /// What whoever visits the callback has to know.
    pub token: Secret,
    /// The URL by which the question may also be answered, its token in it. The oldest API versions had none.
    pub callback: Option<Secret>,
    pub begun: Timestamp,
    /// The node that asks, where there are several.
    pub by: Option<String>,
    pub state: HandshakeState,
    /// Everything that was said, oldest first.
    pub transcript: Vec<Exchange>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeState {
    /// The question is being put.
    Asking,
    /// It was heard; the answer may come by a visit to the callback.
    Awaiting {
        until: Timestamp,
    },
    Failed {
        at: Timestamp,
        message: String,
    },
}

/// One request and what came of it, without anything secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    pub at: Timestamp,
    pub method: String,
    /// Without its query.
    pub url: String,
    pub headers: Vec<(String, String)>,
    pub received: Received,
    /// What was made of it, for people.
    pub verdict: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    Answer {
        status: u16,
        headers: Vec<(String, String)>,
        /// The start of it, as text.
        body: String,
    },
    /// Why no answer came.
    Nothing(String),
}
