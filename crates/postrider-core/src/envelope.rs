//! The envelope of one event: the members that routing and rendering look at, as slices of its
//! text.

use crate::event::EventSchema;
use crate::json::{JsonKind, RawJson};
use crate::subscription::{InputMapping, MappedField};
use std::borrow::Cow;

/// How the keys of filters and delivery attributes address a custom event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyStyle {
    /// `data.<path>`, and the mapped envelope by its Event Grid names.
    #[default]
    Cloud,
    /// Any path from the root of the event.
    Edge,
}

/// An event read by its schema. Absent members are none; JSON nulls are kept.
#[derive(Clone, Copy, Debug)]
pub struct EventEnvelope<'a> {
    pub schema: EventSchema,
    /// The whole event, as published.
    pub object: RawJson<'a>,
    pub id: Option<RawJson<'a>>,
    /// EventGrid: `topic` as published; CloudEvents: `source`.
    pub topic: Option<RawJson<'a>>,
    pub subject: Option<RawJson<'a>>,
    /// EventGrid: `eventType`; CloudEvents: `type`.
    pub event_type: Option<RawJson<'a>>,
    /// EventGrid: `eventTime`; CloudEvents: `time`.
    pub time: Option<RawJson<'a>>,
    /// EventGrid: `dataVersion`; CloudEvents: `dataschema`.
    pub data_version: Option<RawJson<'a>>,
    /// `data`; for a custom event the whole object.
    pub data: Option<RawJson<'a>>,
    /// The mapping of a custom event's envelope; the fields above are filled from the event only.
    pub mapping: Option<&'a InputMapping>,
}

impl<'a> EventEnvelope<'a> {
    /// Reads the envelope of an event that was accepted before.
    pub fn read(
        schema: EventSchema,
        object: RawJson<'a>,
        mapping: Option<&'a InputMapping>,
    ) -> EventEnvelope<'a> {
        let mut envelope = EventEnvelope {
            schema,
            object,
            id: None,
            topic: None,
            subject: None,
            event_type: None,
            time: None,
            data_version: None,
            data: None,
            mapping,
        };
        match schema {
            EventSchema::EventGrid => {
                for member in object.members() {
                    match member.name {
                        "id" => envelope.id = Some(member.value),
                        "topic" => envelope.topic = Some(member.value),
                        "subject" => envelope.subject = Some(member.value),
                        "eventType" => envelope.event_type = Some(member.value),
                        "eventTime" => envelope.time = Some(member.value),
                        "dataVersion" => envelope.data_version = Some(member.value),
                        "data" => envelope.data = Some(member.value),
                        _ => {}
                    }
                }
            }
            EventSchema::CloudEvent => {
                for member in object.members() {
                    match member.name {
                        "id" => envelope.id = Some(member.value),
                        "source" => envelope.topic = Some(member.value),
                        "subject" => envelope.subject = Some(member.value),
                        "type" => envelope.event_type = Some(member.value),
                        "time" => envelope.time = Some(member.value),
                        "dataschema" => envelope.data_version = Some(member.value),
                        "data" => envelope.data = Some(member.value),
                        _ => {}
                    }
                }
            }
            EventSchema::Custom => {
                envelope.data = Some(object);
                if let Some(mapping) = mapping {
                    let find = |field: &Option<String>| path(object, field.as_deref()?);
                    envelope.id = find(&mapping.id.source_field);
                    envelope.topic = find(&mapping.topic.source_field);
                    envelope.subject = find(&mapping.subject.source_field);
                    envelope.event_type = find(&mapping.event_type.source_field);
                    envelope.time = find(&mapping.event_time.source_field);
                    envelope.data_version = find(&mapping.data_version.source_field);
                }
            }
        }
        envelope
    }

    /// Finds the value that a filter's key or a delivery attribute's source field addresses.
    /// `topic` is the topic's name as delivered events carry it. A JSON null counts as absent.
    pub fn lookup(&self, key: &str, keys: KeyStyle, topic: &'a str) -> Option<EnvelopeField<'a>> {
        if self.schema == EventSchema::Custom && keys == KeyStyle::Edge {
            return EnvelopeField::value(path(self.object, key));
        }
        let (head, rest) = match key.split_once('.') {
            Some((head, rest)) => (head, Some(rest)),
            None => (key, None),
        };
        let is = |name: &str| head.eq_ignore_ascii_case(name);
        if is("data") {
            let data = self.data?;
            return EnvelopeField::value(match rest {
                Some(rest) => path(data, rest),
                None => Some(data),
            });
        }
        if self.schema == EventSchema::CloudEvent {
            return match rest {
                None if is("id") || is("eventid") => self.id_field(),
                None if is("source") => EnvelopeField::attribute(self.topic),
                None if is("subject") => self.subject_field(),
                None if is("type") || is("eventtype") => self.event_type_field(),
                None if is("time") => self.time_field(),
                None if is("dataschema") || is("eventtypeversion") => self.data_version_field(),
                _ => EnvelopeField::attribute(path(self.object, key)),
            };
        }
        match rest {
            Some(_) => None,
            None if is("id") => self.id_field(),
            None if is("topic") => Some(EnvelopeField::Text(topic)),
            None if is("subject") => self.subject_field(),
            None if is("eventType") => self.event_type_field(),
            None if is("eventTime") => self.time_field(),
            None if is("dataVersion") => self.data_version_field(),
            None if is("metadataVersion") => Some(EnvelopeField::Text("1")),
            None => None,
        }
    }

    pub fn id_field(&self) -> Option<EnvelopeField<'a>> {
        self.field(self.id, |m| &m.id)
    }

    pub fn subject_field(&self) -> Option<EnvelopeField<'a>> {
        self.field(self.subject, |m| &m.subject)
    }

    pub fn event_type_field(&self) -> Option<EnvelopeField<'a>> {
        self.field(self.event_type, |m| &m.event_type)
    }

    pub fn time_field(&self) -> Option<EnvelopeField<'a>> {
        self.field(self.time, |m| &m.event_time)
    }

    /// The data version of an Event Grid event, which is empty if the publisher set none.
    pub fn data_version_field(&self) -> Option<EnvelopeField<'a>> {
        let found = self.field(self.data_version, |m| &m.data_version);
        match self.schema {
            EventSchema::CloudEvent => found,
            EventSchema::EventGrid | EventSchema::Custom => found.or(Some(EnvelopeField::Text(""))),
        }
    }

    /// A member of the envelope; for a custom event the mapping's default if the event has no
    /// scalar there.
    fn field(
        &self,
        found: Option<RawJson<'a>>,
        of: fn(&InputMapping) -> &MappedField,
    ) -> Option<EnvelopeField<'a>> {
        match self.schema {
            EventSchema::EventGrid => EnvelopeField::value(found),
            EventSchema::CloudEvent => EnvelopeField::attribute(found),
            EventSchema::Custom => found
                .filter(|raw| !matches!(raw.kind(), JsonKind::Null | JsonKind::Array | JsonKind::Object))
                .map(EnvelopeField::Attribute)
                .or_else(|| {
                    of(self.mapping?)
                        .default_value
                        .as_deref()
                        .map(EnvelopeField::Text)
                }),
        }
    }
}

/// The value that a key addresses in an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnvelopeField<'a> {
    /// A value with the type it has in the event. Never null.
    Value(RawJson<'a>),
    /// An attribute of the envelope: a number or a boolean here also counts as the string of its
    /// text. Never null.
    Attribute(RawJson<'a>),
    /// A string that the event does not contain: a stamped topic, or a default.
    Text(&'a str),
}

impl<'a> EnvelopeField<'a> {
    fn value(raw: Option<RawJson<'a>>) -> Option<EnvelopeField<'a>> {
        raw.filter(|raw| !raw.is_null()).map(EnvelopeField::Value)
    }

    fn attribute(raw: Option<RawJson<'a>>) -> Option<EnvelopeField<'a>> {
        raw.filter(|raw| !raw.is_null()).map(EnvelopeField::Attribute)
    }

    /// The value as written in the event; none for text that is not in the event.
    pub fn raw(self) -> Option<RawJson<'a>> {
        match self {
            EnvelopeField::Value(raw) | EnvelopeField::Attribute(raw) => Some(raw),
            EnvelopeField::Text(_) => None,
        }
    }

    /// The string, if it is one or counts as one.
    pub fn as_text(self) -> Option<Cow<'a, str>> {
        match self {
            EnvelopeField::Value(raw) => raw.as_str(),
            EnvelopeField::Attribute(_) | EnvelopeField::Text(_) => self.scalar_text(),
        }
    }

    /// The string, or the text of a number or a boolean; none for arrays and objects.
    pub fn scalar_text(self) -> Option<Cow<'a, str>> {
        match self {
            EnvelopeField::Text(text) => Some(Cow::Borrowed(text)),
            EnvelopeField::Value(raw) | EnvelopeField::Attribute(raw) => match raw.kind() {
                JsonKind::String => raw.as_str(),
                JsonKind::Number | JsonKind::Bool => Some(Cow::Borrowed(raw.text())),
                JsonKind::Null | JsonKind::Array | JsonKind::Object => None,
            },
        }
    }
}

/// Follows a dot path, each dot one object level; names compare exactly first, then without case.
pub fn path<'a>(object: RawJson<'a>, path: &str) -> Option<RawJson<'a>> {
    object.follow(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping() -> InputMapping {
        let field = |name: &str| Some(name.to_owned());
        InputMapping {
            id: MappedField {
                source_field: field("key"),
                default_value: None,
            },
            event_type: MappedField {
                source_field: field("kind"),
                default_value: field("Default.Type"),
            },
            subject: MappedField {
                source_field: field("a.b"),
                default_value: field("none"),
            },
            ..InputMapping::default()
        }
    }

    #[test]
    fn keys_address_what_the_reference_says() {
        let mapping = mapping();
        let check = |schema, keys, event: &str, key: &str, expected: Option<&str>| {
            let envelope = EventEnvelope::read(schema, RawJson::parse(event).unwrap(), Some(&mapping));
            let found = envelope.lookup(key, keys, "the/topic").map(|field| match field {
                EnvelopeField::Value(raw) => format!("value {}", raw.text()),
                EnvelopeField::Attribute(raw) => format!("attribute {}", raw.text()),
                EnvelopeField::Text(text) => format!("text {text}"),
            });
            assert_eq!(found.as_deref(), expected, "{schema:?} {key} in {event}");
        };
        use KeyStyle::{Cloud, Edge};

        let event = r#"{"id":"1","topic":"x","subject":"s","eventType":"t","eventTime":"when",
            "data":{"A":{"b":[1]},"a":2,"n":null,"d.e":1},"unknown":1}"#;
        let grid = |key, expected| {
            check(EventSchema::EventGrid, Cloud, event, key, expected);
            check(EventSchema::EventGrid, Edge, event, key, expected);
        };
        grid("id", Some("value \"1\""));
        grid("Id", Some("value \"1\""));
        grid("topic", Some("text the/topic"));
        grid("SUBJECT", Some("value \"s\""));
        grid("eventtype", Some("value \"t\""));
        grid("eventTime", Some("value \"when\""));
        grid("dataVersion", Some("text "));
        grid("metadataVersion", Some("text 1"));
        grid("Data.A.b", Some("value [1]"));
        grid("data.a", Some("value 2"));
        grid("data.N", None);
        grid("data.A.b.c", None);
        grid("data.d.e", None);
        grid("data.", None);
        grid("unknown", None);
        grid("a", None);
        grid("", None);
        check(
            EventSchema::EventGrid,
            Cloud,
            r#"{"data":5,"dataVersion":"2"}"#,
            "data",
            Some("value 5"),
        );
        check(
            EventSchema::EventGrid,
            Cloud,
            r#"{"data":5,"dataVersion":"2"}"#,
            "dataVersion",
            Some("value \"2\""),
        );

        let event =
            r##"{"id":"1","source":"/s","type":"t","dataschema":"#1","ext":51,"flag":true,"data":{"a":2}}"##;
        let cloud = |key, expected| check(EventSchema::CloudEvent, Cloud, event, key, expected);
        cloud("eventid", Some("attribute \"1\""));
        cloud("id", Some("attribute \"1\""));
        cloud("Source", Some("attribute \"/s\""));
        cloud("eventtype", Some("attribute \"t\""));
        cloud("type", Some("attribute \"t\""));
        cloud("eventtypeversion", Some("attribute \"#1\""));
        cloud("ext", Some("attribute 51"));
        cloud("FLAG", Some("attribute true"));
        cloud("data.a", Some("value 2"));
        cloud("subject", None);
        cloud("topic", None);

        let event = r#"{"key":7,"kind":null,"a":{"b":true},"data":{"x":1}}"#;
        let custom = |keys, key, expected| check(EventSchema::Custom, keys, event, key, expected);
        custom(Cloud, "id", Some("attribute 7"));
        custom(Cloud, "eventType", Some("text Default.Type"));
        custom(Cloud, "subject", Some("attribute true"));
        custom(Cloud, "topic", Some("text the/topic"));
        custom(Cloud, "dataVersion", Some("text "));
        custom(Cloud, "data.key", Some("value 7"));
        custom(Cloud, "data.data.x", Some("value 1"));
        custom(Cloud, "key", None);
        custom(Cloud, "data.x", None);
        custom(Edge, "key", Some("value 7"));
        custom(Edge, "data.x", Some("value 1"));
        custom(Edge, "A.B", Some("value true"));
        custom(Edge, "subject", None);
    }
}
