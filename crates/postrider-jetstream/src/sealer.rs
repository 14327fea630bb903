//! Sealing of values with secrets before they are sent to JetStream. All nodes of a cluster have
//! the same keys.

use postrider_store::Error;
use postrider_store::seal::{Keyring, key_of};
use std::borrow::Cow;
use std::sync::Arc;

/// Seals values if keys are configured, and opens sealed ones. Values from before keys were
/// configured stay readable.
#[derive(Clone, Debug, Default)]
pub struct ValueSealer(Option<Arc<Keyring>>);

impl ValueSealer {
    pub fn new(keys: Option<Arc<Keyring>>) -> ValueSealer {
        ValueSealer(keys)
    }

    /// Whether a stored value should be replaced by a sealed one.
    pub fn wants_to_seal(&self, stored: &[u8]) -> bool {
        self.0
            .as_ref()
            .is_some_and(|keys| key_of(stored) != Some(keys.current()))
    }

    /// The form in which a value is stored at a location.
    pub fn close(&self, place: &str, value: Vec<u8>) -> Vec<u8> {
        match &self.0 {
            Some(keys) => keys.seal(place, &value),
            None => value,
        }
    }

    /// Opens the value stored at a location. The error names the missing key.
    pub fn open<'a>(&self, place: &str, stored: &'a [u8]) -> Result<Cow<'a, [u8]>, String> {
        match (&self.0, key_of(stored)) {
            (Some(keys), _) => keys.open(place, stored).map_err(|e| e.to_string()),
            (None, None) => Ok(Cow::Borrowed(stored)),
            (None, Some(id)) => Err(format!(
                "sealed under key {id}, but neither secrets.key nor secrets.key_file is set: give every node of the \
                 cluster the same key"
            )),
        }
    }

    /// Like `open`, for a key of the bucket.
    pub(crate) fn open_key<'a>(&self, key: &str, stored: &'a [u8]) -> Result<Cow<'a, [u8]>, Error> {
        self.open(key, stored)
            .map_err(|why| Error::Corrupt(format!("{key} in the cluster's bucket is {why}")))
    }
}
