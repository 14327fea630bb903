//! Messages for Event Hubs and Service Bus over HTTP: their properties travel in headers.

use super::sign::ServiceBusKey;
use http::Uri;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use postrider_core::subscription::{AttributeValue, DeliveryAttribute};
use postrider_core::time::Timestamp;
use std::borrow::Cow;
use std::fmt::Write;
use std::sync::Arc;

pub const BROKER_PROPERTIES: HeaderName = HeaderName::from_static("brokerproperties");
/// Used instead of `Authorization`, which belongs to the receiver behind the relay.
pub const SERVICE_BUS_AUTHORIZATION: HeaderName = HeaderName::from_static("servicebusauthorization");

/// The credentials for sending to a broker or through a relay.
#[derive(Clone, Debug)]
pub enum BrokerAccess {
    /// No credentials are needed.
    Open,
    Key(ServiceBusKey),
    /// A fixed token, valid until it expires.
    Token(HeaderValue),
}

impl BrokerAccess {
    /// The value of the header that authorizes access to `url`.
    pub fn token(&self, url: &str, now: Timestamp) -> Option<HeaderValue> {
        let mut token = match self {
            BrokerAccess::Open => return None,
            BrokerAccess::Token(token) => token.clone(),
            BrokerAccess::Key(key) => {
                HeaderValue::try_from(key.token(url, now)).expect("what is percent-encoded fits a header")
            }
        };
        token.set_sensitive(true);
        Some(token)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokerKind {
    EventHub,
    ServiceBus,
}

impl BrokerKind {
    /// The properties that the broker itself interprets.
    fn properties(self) -> &'static [&'static str] {
        match self {
            BrokerKind::EventHub => &["PartitionKey"],
            BrokerKind::ServiceBus => &[
                "MessageId",
                "PartitionKey",
                "SessionId",
                "CorrelationId",
                "Label",
                "ReplyTo",
                "ReplyToSessionId",
                "To",
                "ViaPartitionKey",
            ],
        }
    }

    fn property(self, name: &str) -> Option<&'static str> {
        let mut all = self.properties().iter().copied();
        all.find(|property| property.eq_ignore_ascii_case(name))
    }
}

/// An entity of a broker, and the broker properties that its messages get.
#[derive(Debug)]
pub struct BrokerEntity {
    kind: BrokerKind,
    access: BrokerAccess,
    /// The URL that tokens are issued for.
    entity: String,
    messages: Arc<Uri>,
    properties: Vec<(&'static str, AttributeValue)>,
}

impl BrokerEntity {
    /// `entity` is the entity's URL without a trailing slash. None if it is not a valid URL.
    pub fn new(
        kind: BrokerKind,
        entity: &str,
        access: BrokerAccess,
        attributes: &[DeliveryAttribute],
    ) -> Option<BrokerEntity> {
        let query = match kind {
            BrokerKind::EventHub => "?api-version=2014-01",
            BrokerKind::ServiceBus => "",
        };
        let of_broker = |attribute: &DeliveryAttribute| {
            let name = kind.property(&attribute.name)?;
            Some((name, attribute.value.clone()))
        };
        Some(BrokerEntity {
            kind,
            access,
            messages: Arc::new(format!("{entity}/messages{query}").parse().ok()?),
            entity: entity.to_owned(),
            properties: attributes.iter().filter_map(of_broker).collect(),
        })
    }

    pub fn url(&self) -> &Arc<Uri> {
        &self.messages
    }

    /// Whether messages are bare objects: Event Hubs takes even a single Event Grid event in an
    /// array, Service Bus does not.
    pub fn takes_single_objects(&self) -> bool {
        self.kind == BrokerKind::ServiceBus
    }

    pub fn authorization(&self, now: Timestamp) -> Option<HeaderValue> {
        self.access.token(&self.entity, now)
    }

    /// Turns delivery headers into message properties, except those that the broker itself
    /// interprets.
    pub fn adapt(&self, headers: &mut HeaderMap, dynamic: &mut Vec<(HeaderName, String)>) {
        headers.remove(ORIGIN);
        headers.remove("webhook-request-origin");
        for (name, _) in &self.properties {
            headers.remove(name.to_ascii_lowercase());
        }
        dynamic.retain(|(name, _)| self.kind.property(name.as_str()).is_none());
        for (name, value) in headers.iter_mut() {
            if name != CONTENT_TYPE {
                *value = quoted(value);
            }
        }
    }

    /// The header with the properties that the broker itself interprets. `id` must be the same for
    /// every attempt of an event.
    pub fn properties<'a>(
        &'a self,
        id: &'a str,
        look_up: impl Fn(&str) -> Option<Cow<'a, str>>,
    ) -> Option<HeaderValue> {
        let mut all: Vec<(&str, Cow<'_, str>)> = Vec::with_capacity(self.properties.len() + 1);
        if self.kind == BrokerKind::ServiceBus {
            all.push(("MessageId", Cow::Borrowed(id)));
        }
        for (name, value) in &self.properties {
            let value = match value {
                AttributeValue::Static { value, .. } => Some(Cow::Borrowed(value.expose())),
                AttributeValue::Dynamic { source_field } => look_up(source_field),
            };
            let Some(value) = value else { continue };
            all.retain(|(known, _)| known != name);
            all.push((name, value));
        }
        if all.is_empty() {
            return None;
        }
        let mut text = String::from("{");
        for (index, (name, value)) in all.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(text, "{comma}\"{name}\":").expect("text can be written to");
            write_ascii(&mut text, value);
        }
        text.push('}');
        HeaderValue::try_from(text).ok()
    }
}

/// The value quoted as a message property: brokers parse an unquoted word as a number and refuse
/// it.
pub fn quoted(value: &HeaderValue) -> HeaderValue {
    let mut text = String::with_capacity(value.len() + 2);
    write_ascii(&mut text, &String::from_utf8_lossy(value.as_bytes()));
    let mut property = HeaderValue::try_from(text).expect("escaped text fits a header");
    property.set_sensitive(value.is_sensitive());
    property
}

/// Writes a JSON string that consists of visible ASCII only.
fn write_ascii(out: &mut String, text: &str) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            ' '..='~' => out.push(letter),
            _ => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").expect("text can be written to");
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ids::Secret;

    fn fixed(name: &str, value: &str) -> DeliveryAttribute {
        DeliveryAttribute {
            name: name.into(),
            value: AttributeValue::Static {
                value: Secret::new(value),
                secret: false,
            },
        }
    }

    fn dynamic(name: &str, field: &str) -> DeliveryAttribute {
        DeliveryAttribute {
            name: name.into(),
            value: AttributeValue::Dynamic {
                source_field: field.into(),
            },
        }
    }

    fn broker(kind: BrokerKind, attributes: &[DeliveryAttribute]) -> BrokerEntity {
        BrokerEntity::new(kind, "https://ns.example/orders", BrokerAccess::Open, attributes).unwrap()
    }

    #[test]
    fn messages_go_where_the_brokers_take_them() {
        let url = |kind| broker(kind, &[]).url().to_string();
        assert_eq!(
            url(BrokerKind::EventHub),
            "https://ns.example/orders/messages?api-version=2014-01"
        );
        assert_eq!(url(BrokerKind::ServiceBus), "https://ns.example/orders/messages");
    }

    #[test]
    fn what_the_broker_looks_at_is_told_apart() {
        let check = |kind, attributes: &[DeliveryAttribute], expected: Option<&str>| {
            let look_up = |field: &str| match field {
                "data.key" => Some(Cow::Borrowed("Zoë \"1\"\\")),
                _ => None,
            };
            let broker = broker(kind, attributes);
            let properties = broker.properties("system-id", look_up);
            let text = properties.as_ref().map(|value| value.to_str().unwrap());
            assert_eq!(text, expected, "{attributes:?}");
        };
        check(BrokerKind::EventHub, &[], None);
        check(BrokerKind::EventHub, &[fixed("SessionId", "a")], None);
        check(
            BrokerKind::EventHub,
            &[dynamic("partitionkey", "data.key")],
            Some(r#"{"PartitionKey":"Zo\u00eb \"1\"\\"}"#),
        );
        check(
            BrokerKind::EventHub,
            &[dynamic("PartitionKey", "data.none")],
            None,
        );
        check(BrokerKind::ServiceBus, &[], Some(r#"{"MessageId":"system-id"}"#));
        check(
            BrokerKind::ServiceBus,
            &[
                fixed("Label", "l"),
                dynamic("MessageId", "data.none"),
                fixed("X-Other", "o"),
            ],
            Some(r#"{"MessageId":"system-id","Label":"l"}"#),
        );
        check(
            BrokerKind::ServiceBus,
            &[dynamic("MessageId", "data.key"), fixed("PartitionKey", "p")],
            Some(r#"{"MessageId":"Zo\u00eb \"1\"\\","PartitionKey":"p"}"#),
        );
    }

    #[test]
    fn everything_else_is_a_property_in_quotes() {
        let attributes = [fixed("SessionId", "s"), dynamic("Label", "data.l")];
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("content-type", "application/json"),
            ("origin", "eventgrid.azure.net"),
            ("aeg-event-type", "Notification"),
            ("x-mine", "a \"b\""),
            ("sessionid", "s"),
        ] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let mut looked_up = vec![
            (HeaderName::from_static("label"), "data.l".to_owned()),
            (HeaderName::from_static("x-other"), "data.o".to_owned()),
        ];
        broker(BrokerKind::ServiceBus, &attributes).adapt(&mut headers, &mut looked_up);
        let all: Vec<(&str, &str)> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
            .collect();
        let mut sorted = all.clone();
        sorted.sort_unstable();
        assert_eq!(
            sorted,
            [
                ("aeg-event-type", r#""Notification""#),
                ("content-type", "application/json"),
                ("x-mine", r#""a \"b\"""#),
            ]
        );
        assert_eq!(
            looked_up,
            [(HeaderName::from_static("x-other"), "data.o".to_owned())]
        );
    }
}
