//! The envelope of one event: the members that routing and rendering look at, as slices of its text.

use crate::event::Schema;
use crate::json::Raw;
use crate::subscription::InputMapping;

/// One event seen through its schema. Absent members are none; JSON nulls are kept as they are.
#[derive(Clone, Copy, Debug)]
pub struct Envelope<'a> {
    pub schema: Schema,
    /// The whole event, as published.
    pub object: Raw<'a>,
    pub id: Option<Raw<'a>>,
    /// EventGrid: `topic` as published; CloudEvents: `source`.
    pub topic: Option<Raw<'a>>,
    pub subject: Option<Raw<'a>>,
    /// EventGrid: `eventType`; CloudEvents: `type`.
    pub event_type: Option<Raw<'a>>,
    /// EventGrid: `eventTime`; CloudEvents: `time`.
    pub time: Option<Raw<'a>>,
    /// EventGrid: `dataVersion`; CloudEvents: `dataschema`.
    pub data_version: Option<Raw<'a>>,
    /// `data`; for a custom event the whole object.
    pub data: Option<Raw<'a>>,
    /// How a custom event's envelope is found; its fields above are filled from the event only.
    pub mapping: Option<&'a InputMapping>,
}

impl<'a> Envelope<'a> {
    /// Reads the envelope of an event that was accepted before.
    pub fn read(schema: Schema, object: Raw<'a>, mapping: Option<&'a InputMapping>) -> Envelope<'a> {
        let mut envelope = Envelope {
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
            Schema::EventGrid => {
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
            Schema::CloudEvent => {
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
            Schema::Custom => {
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
}

/// Follows a dot path, each dot one object level; names compare exactly first, then without case.
pub fn path<'a>(object: Raw<'a>, path: &str) -> Option<Raw<'a>> {
    path.split('.').try_fold(object, |at, name| at.get_any_case(name))
}
