//! Wire format of the management API (Azure Resource Manager): ids, resource bodies, lists, errors.

mod filter;
mod ids;
mod network;
mod operation;
mod topic;
mod topic_types;
mod subscription;
mod version;

pub use filter::NameFilter;
pub use ids::{ArmPath, EventGridId, IdError, Scope, lower_provider, parse_path, parse_scope};
pub use network::ip_allowed;
pub use operation::{fresh_operation, is_operation, stable_guid};
pub use subscription::{ProvisioningState, SentMembers, SubscriptionView, delivery_attributes, full_url};
pub use topic::{TopicView, domain_topic_body, domain_topic_id, generic_body, topic_body, topic_id, type_of};
pub use topic_types::{EventType, RESOURCE_EVENT_TYPES, TOPIC_TYPES, TopicType, event_type_body, topic_type};
pub use version::ApiVersion;

use crate::resources::FieldError;
use serde_json::json;

/// Why a management request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status} {code}: {message}")]
pub struct ArmError {
    pub status: u16,
    pub code: &'static str,
    pub message: String,
    /// The wrong member of the body, or the wrong parameter.
    pub target: Option<String>,
}

impl ArmError {
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> ArmError {
        ArmError {
            status,
            code,
            message: message.into(),
            target: None,
        }
    }

    pub fn at(mut self, target: impl Into<String>) -> ArmError {
        self.target = Some(target.into());
        self
    }

    /// `ResourceNotFound` with ARM's message.
    pub fn not_found(kind: &str, name: &str, group: &str) -> ArmError {
        let message = format!("The Resource '{kind}/{name}' under resource group '{group}' was not found.");
        ArmError::new(404, "ResourceNotFound", message)
    }

    /// The error body that clients parse: az prints `(code) message`.
    pub fn body(&self) -> Vec<u8> {
        let mut error = json!({"code": self.code, "message": self.message});
        if let Some(target) = &self.target {
            error["target"] = json!(target);
        }
        json!({ "error": error }).to_string().into_bytes()
    }
}

impl From<FieldError> for ArmError {
    fn from(error: FieldError) -> ArmError {
        ArmError::new(400, error.code, error.to_string()).at(error.path)
    }
}
