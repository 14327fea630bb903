//! Text that is never shown.

use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

/// Replacement for a secret wherever configuration is shown.
pub const MASK: &str = "********";

/// A key or password. It prints nothing under `Debug` and serializes as a mask.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ConfigSecret(String);

impl ConfigSecret {
    pub fn new(text: impl Into<String>) -> ConfigSecret {
        ConfigSecret(text.into())
    }

    /// The plain text. Every caller is a place where it could leak.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ConfigSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Serialize for ConfigSecret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(MASK)
    }
}
