//! Ids inside Postrider. Numbers are assigned once and never reused.

use std::fmt;

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_id!(
    /// The id of anything that events are published to: a custom topic, a domain or a system topic.
    TopicId
);
number_id!(
    /// An event subscription. A subscription that is deleted and created again has another id.
    SubscriptionId
);
number_id!(
    /// An event's position in the log. Later events have greater positions.
    Position
);

/// A value that must never be shown: keys, secret headers.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}
