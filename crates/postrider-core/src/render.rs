//! Renders events for delivery: the publisher's bytes, with the service's stamps in between.
//!
//! Events are not parsed and written again. `data` is always copied as received; unknown members
//! are kept where the schema stays the same, and are dropped by a conversion.

use crate::body::RenderOutput;
use crate::envelope::{EnvelopeField, EventEnvelope, KeyStyle};
use crate::event::{EventRef, EventSchema, PublishedBatch};
use crate::json::{self, JsonKind, JsonScanner, RawJson};
use crate::subscription::InputMapping;
use crate::time::Timestamp;
use std::borrow::Cow;

/// How to write the events of one topic for one subscription.
#[derive(Clone, Copy, Debug)]
pub struct EventRendering<'a> {
    pub delivery: EventSchema,
    pub topic: TopicValue<'a>,
    /// The topic's mapping, if its events have a custom schema.
    pub mapping: Option<&'a InputMapping>,
}

/// The value of `topic` in delivered events, and of `source` in CloudEvents converted from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopicValue<'a> {
    /// The topic's full id, or its short name on the edge.
    Stamp(&'a str),
    /// Each event names its domain topic; the full id is this prefix (`…/topics/`) and that name.
    InDomain { prefix: &'a str },
    /// Replaces the event's value, for another Event Grid to receive; none writes a null.
    Overwrite(Option<&'a str>),
}

/// The schema that events are delivered in. Two combinations are refused when a subscription is
/// created: CloudEvents stay CloudEvents, and Event Grid events have no custom form.
pub fn delivered_schema(input: EventSchema, delivery: EventSchema) -> EventSchema {
    match (input, delivery) {
        (EventSchema::CloudEvent, _) => EventSchema::CloudEvent,
        (EventSchema::EventGrid, EventSchema::Custom) => EventSchema::EventGrid,
        (_, delivery) => delivery,
    }
}

/// Appends the delivered JSON of one event to `out`. `system_id` is called only if a custom event
/// has no id of its own.
pub fn write_event(
    out: &mut impl RenderOutput,
    batch: &PublishedBatch,
    index: usize,
    how: &EventRendering<'_>,
    system_id: impl FnOnce() -> String,
) {
    let delivered = delivered_schema(batch.schema, how.delivery);
    debug_assert_eq!(
        delivered, how.delivery,
        "no such conversion from {:?}",
        batch.schema
    );
    let event = &batch.events[index];
    match (batch.schema, delivered) {
        (EventSchema::EventGrid, EventSchema::EventGrid) => write_stamped(out, batch, event, how.topic),
        (EventSchema::EventGrid | EventSchema::Custom, EventSchema::CloudEvent) => {
            write_cloud_event(
                out,
                &read(batch, index, how),
                how.topic,
                batch.received,
                system_id,
            );
        }
        (EventSchema::Custom, EventSchema::EventGrid) => {
            write_event_grid(
                out,
                &read(batch, index, how),
                how.topic,
                batch.received,
                system_id,
            );
        }
        _ => out.write(&batch.body[event.object.range()]),
    }
}

/// The approximate number of bytes that [`write_event`] appends; seldom too low.
pub fn delivered_len_hint(batch: &PublishedBatch, index: usize, how: &EventRendering<'_>) -> usize {
    let topic = match how.topic {
        TopicValue::Stamp(id) => id.len(),
        TopicValue::InDomain { prefix } => prefix.len() + 64,
        TopicValue::Overwrite(name) => name.map_or(4, str::len),
    };
    let added = match (batch.schema, delivered_schema(batch.schema, how.delivery)) {
        (EventSchema::EventGrid, EventSchema::EventGrid) => {
            topic + r#","topic":"","dataVersion":"","metadataVersion":"1""#.len()
        }
        (input, delivered) if input == delivered => 0,
        // Members are renamed, and a custom event's envelope is written in addition.
        _ => topic + 384,
    };
    batch.events[index].object.len as usize + added
}

/// The diagnostics of a dead letter.
#[derive(Clone, Copy, Debug)]
pub struct DeadLetterDiagnostics<'a> {
    pub reason: &'a str,
    pub attempts: u32,
    pub last_outcome: &'a str,
    /// Formatted times: thousands of dead letters share them, and formatting takes time.
    pub publish_time: &'a str,
    pub last_attempt_time: Option<&'a str>,
}

/// The names of the members that a dead letter has besides the event's own.
fn diagnostic_names(delivery: EventSchema) -> &'static [&'static str; 5] {
    match delivery {
        // CloudEvents allow only lower case in attribute names.
        EventSchema::CloudEvent => &[
            "deadletterreason",
            "deliveryattempts",
            "lastdeliveryoutcome",
            "publishtime",
            "lastdeliveryattempttime",
        ],
        EventSchema::EventGrid | EventSchema::Custom => &[
            "deadLetterReason",
            "deliveryAttempts",
            "lastDeliveryOutcome",
            "publishTime",
            "lastDeliveryAttemptTime",
        ],
    }
}

/// The event in a dead letter, without the diagnostics, and its schema.
pub fn read_dead_letter(letter: RawJson<'_>) -> (EventSchema, String) {
    let schema = match letter.get("specversion") {
        Some(_) => EventSchema::CloudEvent,
        None => EventSchema::EventGrid,
    };
    let mut event = Vec::with_capacity(letter.text().len());
    JsonObjectWriter::without(&mut event, letter, diagnostic_names(schema)).close();
    (schema, String::from_utf8(event).expect("parts of a text"))
}

/// Appends one dead-lettered event: its delivered form with the diagnostics among its members. An
/// event that would have been delivered in its custom schema gets an Event Grid envelope here.
pub fn write_dead_letter(
    out: &mut Vec<u8>,
    batch: &PublishedBatch,
    index: usize,
    how: &EventRendering<'_>,
    system_id: impl FnOnce() -> String,
    diagnostics: &DeadLetterDiagnostics<'_>,
) {
    let delivery = match delivered_schema(batch.schema, how.delivery) {
        EventSchema::CloudEvent => EventSchema::CloudEvent,
        EventSchema::EventGrid | EventSchema::Custom => EventSchema::EventGrid,
    };
    let how = EventRendering { delivery, ..*how };
    let mut event = Vec::with_capacity(delivered_len_hint(batch, index, &how));
    write_event(&mut event, batch, index, &how, system_id);
    let event = std::str::from_utf8(&event).expect("an event is made of strings");

    let names = diagnostic_names(delivery);
    // A dead letter may have been published again: its old diagnostics are replaced.
    let mut object = JsonObjectWriter::without(out, RawJson::trusted(event), names);
    json::write_string(diagnostics.reason, object.member(names[0]));
    let attempts = diagnostics.attempts.to_string();
    object.member(names[1]).extend_from_slice(attempts.as_bytes());
    json::write_string(diagnostics.last_outcome, object.member(names[2]));
    json::write_string(diagnostics.publish_time, object.member(names[3]));
    if let Some(at) = diagnostics.last_attempt_time {
        json::write_string(at, object.member(names[4]));
    }
    object.close();
}

/// The data version for a delivery's header; empty if there is none.
pub fn data_version<'a>(batch: &'a PublishedBatch, index: usize, how: &EventRendering<'a>) -> Cow<'a, str> {
    let version = match batch.schema {
        EventSchema::EventGrid => Some(json::unescape(batch.slice(batch.events[index].data_version))),
        EventSchema::CloudEvent => None,
        EventSchema::Custom => read(batch, index, how)
            .data_version_field()
            .and_then(EnvelopeField::scalar_text),
    };
    version.filter(|text| is_header_value(text)).unwrap_or_default()
}

/// The value of a delivery attribute that is looked up in the event. Only strings, numbers and
/// booleans that are valid in a header have one.
pub fn dynamic_attribute<'a>(
    envelope: &EventEnvelope<'a>,
    source_field: &str,
    keys: KeyStyle,
    topic: &'a str,
) -> Option<Cow<'a, str>> {
    let text = envelope.lookup(source_field, keys, topic)?.scalar_text()?;
    is_header_value(&text).then_some(text)
}

/// Whether a text is valid in a header: a publisher must not inject line breaks.
fn is_header_value(text: &str) -> bool {
    const BYTES_MAX: usize = 4096;
    text.len() <= BYTES_MAX && !text.chars().any(char::is_control)
}

fn read<'a>(batch: &'a PublishedBatch, index: usize, how: &EventRendering<'a>) -> EventEnvelope<'a> {
    EventEnvelope::read(batch.schema, RawJson::trusted(batch.object(index)), how.mapping)
}

/// An Event Grid event as received, with missing members appended.
fn write_stamped(
    out: &mut impl RenderOutput,
    batch: &PublishedBatch,
    event: &EventRef,
    topic: TopicValue<'_>,
) {
    let lacks = event.lacks;
    let object = &batch.body[event.object.range()];
    let mut object = if let TopicValue::Overwrite(_) = topic {
        let mut object =
            JsonObjectWriter::without(out, RawJson::trusted(batch.slice(event.object)), &["topic"]);
        write_topic(object.member("topic"), topic, None);
        object
    } else if !event.topic.is_empty() {
        let start = (event.topic.start - event.object.start) as usize;
        let (before, rest) = object.split_at(start);
        out.write(before);
        out.write(b"\"topic\":");
        write_topic(out.text(), topic, member_value(batch.slice(event.topic)));
        JsonObjectWriter::opened(out, &rest[event.topic.len as usize..])
    } else if lacks.topic || lacks.data_version || lacks.metadata_version {
        let mut object = JsonObjectWriter::opened(out, object);
        if lacks.topic {
            write_topic(object.member("topic"), topic, None);
        }
        object
    } else {
        return out.write(object);
    };
    if lacks.data_version {
        object.member("dataVersion").extend_from_slice(b"\"\"");
    }
    if lacks.metadata_version {
        object.member("metadataVersion").extend_from_slice(b"\"1\"");
    }
    object.close();
}

/// A custom event in an Event Grid envelope, with the whole event as `data`.
fn write_event_grid(
    out: &mut impl RenderOutput,
    event: &EventEnvelope<'_>,
    topic: TopicValue<'_>,
    received: Timestamp,
    system_id: impl FnOnce() -> String,
) {
    let mut object = JsonObjectWriter::empty(out);
    write_or(object.member("id"), event.id_field(), system_id);
    write_or(object.member("eventTime"), event.time_field(), || {
        received.to_string()
    });
    write_or(object.member("eventType"), event.event_type_field(), String::new);
    write_or(
        object.member("dataVersion"),
        event.data_version_field(),
        String::new,
    );
    object.member("metadataVersion").extend_from_slice(b"\"1\"");
    write_topic(
        object.member("topic"),
        topic,
        event.topic.map(EnvelopeField::Value),
    );
    write_or(object.member("subject"), event.subject_field(), String::new);
    object.long_member("data").write(event.object.text().as_bytes());
    object.close();
}

/// An Event Grid or custom event as a CloudEvent. Optional attributes may be absent there, but not
/// empty.
fn write_cloud_event(
    out: &mut impl RenderOutput,
    event: &EventEnvelope<'_>,
    topic: TopicValue<'_>,
    received: Timestamp,
    system_id: impl FnOnce() -> String,
) {
    let given = |field: Option<EnvelopeField<'_>>| {
        field.is_some_and(|f| f.scalar_text().is_some_and(|t| !t.is_empty()))
    };
    let mut object = JsonObjectWriter::empty(out);
    object.member("specversion").extend_from_slice(b"\"1.0\"");
    write_or(object.member("id"), event.id_field(), system_id);
    write_topic(
        object.member("source"),
        topic,
        event.topic.map(EnvelopeField::Value),
    );
    write_or(object.member("type"), event.event_type_field(), String::new);
    if given(event.subject_field()) {
        write_or(object.member("subject"), event.subject_field(), String::new);
    }
    write_or(object.member("time"), event.time_field(), || received.to_string());
    if given(event.data_version_field()) {
        let version = event
            .data_version_field()
            .and_then(EnvelopeField::scalar_text)
            .unwrap_or_default();
        json::write_string(&format!("#{version}"), object.member("dataschema"));
    }
    if let Some(data) = event.data {
        object
            .member("datacontenttype")
            .extend_from_slice(b"\"application/json\"");
        object.long_member("data").write(data.text().as_bytes());
    }
    object.close();
}

/// Writes the topic's value; `own` is the event's own value.
fn write_topic(out: &mut Vec<u8>, topic: TopicValue<'_>, own: Option<EnvelopeField<'_>>) {
    match topic {
        TopicValue::Stamp(id) | TopicValue::Overwrite(Some(id)) => json::write_string(id, out),
        TopicValue::Overwrite(None) => out.extend_from_slice(b"null"),
        TopicValue::InDomain { prefix } => match own.and_then(EnvelopeField::scalar_text) {
            Some(id) if id.starts_with('/') => json::write_string(&id, out),
            name => json::write_string(&[prefix, &name.unwrap_or_default()].concat(), out),
        },
    }
}

/// Writes a field as a string; numbers and booleans by their text.
fn write_or(out: &mut Vec<u8>, field: Option<EnvelopeField<'_>>, otherwise: impl FnOnce() -> String) {
    match field {
        Some(EnvelopeField::Value(raw) | EnvelopeField::Attribute(raw)) if raw.kind() == JsonKind::String => {
            out.extend_from_slice(raw.text().as_bytes());
        }
        field => match field.and_then(EnvelopeField::scalar_text) {
            Some(text) => json::write_string(&text, out),
            None => json::write_string(&otherwise(), out),
        },
    }
}

/// The value in the text of a member.
fn member_value(member: &str) -> Option<EnvelopeField<'_>> {
    let mut scanner = JsonScanner::new(member);
    scanner.value().ok()?;
    scanner.peek().filter(|byte| *byte == b':')?;
    let value = member[scanner.at() + 1..].trim_start();
    Some(EnvelopeField::Value(RawJson::trusted(value)))
}

/// A JSON object that is being written: members are appended until it is closed.
struct JsonObjectWriter<'a, O> {
    out: &'a mut O,
    bare: bool,
}

impl<'a, O: RenderOutput> JsonObjectWriter<'a, O> {
    fn empty(out: &'a mut O) -> JsonObjectWriter<'a, O> {
        out.text().push(b'{');
        JsonObjectWriter { out, bare: true }
    }

    /// Copies an object, or the rest of one that was begun in `out`, up to its last member.
    fn opened(out: &'a mut O, text: &[u8]) -> JsonObjectWriter<'a, O> {
        let open = text
            .strip_suffix(b"}")
            .expect("an object ends with a brace")
            .trim_ascii_end();
        out.write(open);
        let bare = open == b"{";
        JsonObjectWriter { out, bare }
    }

    /// Copies an object without the members of these names.
    fn without(out: &'a mut O, text: RawJson<'_>, names: &[&str]) -> JsonObjectWriter<'a, O> {
        let mut object = JsonObjectWriter::empty(out);
        for member in text.members() {
            if !names.iter().any(|name| member.is(name)) {
                let value = member.value.text().as_bytes();
                object.long_member(member.name).write(value);
            }
        }
        object
    }

    /// Begins a member with a short value, which the caller appends to the returned buffer. The
    /// name is written between the quotes unescaped.
    fn member(&mut self, name: &str) -> &mut Vec<u8> {
        self.long_member(name).text()
    }

    /// Begins a member whose value may be long.
    fn long_member(&mut self, name: &str) -> &mut O {
        let text = self.out.text();
        if !std::mem::take(&mut self.bare) {
            text.push(b',');
        }
        text.push(b'"');
        text.extend_from_slice(name.as_bytes());
        text.extend_from_slice(b"\":");
        self.out
    }

    fn close(self) {
        self.out.text().push(b'}');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::BodyBuilder;
    use crate::event::{ByteSpan, MissingMembers};
    use crate::ids::TopicId;
    use crate::subscription::MappedField;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    const TOPIC: &str = "/subscriptions/s/topics/t";
    const STAMP: TopicValue<'_> = TopicValue::Stamp(TOPIC);
    const DOMAIN: TopicValue<'_> = TopicValue::InDomain {
        prefix: "/subscriptions/s/domains/d/topics/",
    };

    /// An event as the publish path would record it. In a domain a short topic is to be replaced.
    fn accept(schema: EventSchema, event: &str) -> PublishedBatch {
        let body = format!("[ {event} ]");
        let (start, end) = (2, 2 + event.len());
        let at = |part: &str| 2 + (part.as_ptr() as usize - event.as_ptr() as usize);
        let mut found = EventRef {
            object: ByteSpan::new(start, end),
            lacks: MissingMembers {
                topic: true,
                data_version: true,
                metadata_version: true,
            },
            ..EventRef::default()
        };
        for member in RawJson::parse(event).unwrap().members() {
            let value = member.value.text();
            match member.name {
                "topic" => {
                    found.lacks.topic = member.value.is_null();
                    if !value.starts_with("\"/") {
                        found.topic = ByteSpan::new(at(member.name) - 1, at(value) + value.len());
                    }
                }
                "dataVersion" => {
                    found.lacks.data_version = false;
                    found.data_version = ByteSpan::new(at(value) + 1, at(value) + value.len() - 1);
                }
                "metadataVersion" => found.lacks.metadata_version = false,
                _ => {}
            }
        }
        PublishedBatch {
            topic: TopicId(1),
            schema,
            received: Timestamp::parse("2020-08-13T18:11:29.4121391Z").unwrap(),
            publisher: "Key".into(),
            trace: None,
            replay: 0,
            hops: 0,
            body: body.into(),
            events: vec![found],
            matched: vec![Box::new([])],
        }
    }

    fn mapping() -> InputMapping {
        let mapped = |source: &str, default: Option<&str>| MappedField {
            source_field: (!source.is_empty()).then(|| source.to_owned()),
            default_value: default.map(str::to_owned),
        };
        InputMapping {
            id: mapped("key", None),
            topic: mapped("shop", None),
            event_time: mapped("when", None),
            event_type: mapped("myEventType", Some("none")),
            subject: mapped("", Some("subjectDefault")),
            data_version: mapped("version", Some("1.0")),
        }
    }

    fn render(input: EventSchema, event: &str, delivery: EventSchema, topic: TopicValue<'_>) -> String {
        let batch = accept(input, event);
        let mapping = mapping();
        let how = EventRendering {
            delivery,
            topic,
            mapping: Some(&mapping),
        };
        let mut out = b"before".to_vec();
        write_event(&mut out, &batch, 0, &how, || "system-id".to_owned());
        let mut shared = BodyBuilder::with_capacity(0);
        shared.refer_to(&batch.body);
        shared.text().extend_from_slice(b"before");
        write_event(&mut shared, &batch, 0, &how, || "system-id".to_owned());
        assert_eq!(shared.finish().to_bytes(), out);
        let out = String::from_utf8(out).unwrap();
        out.strip_prefix("before").unwrap().to_owned()
    }

    #[test]
    fn event_grid_events_get_what_they_lack() {
        let check = |topic, event: &str, expected: &str| {
            let written = render(EventSchema::EventGrid, event, EventSchema::EventGrid, topic);
            assert_eq!(written, expected);
        };
        let whole = r#"{"topic":"/x","dataVersion":"","metadataVersion":"1" }"#;
        check(STAMP, whole, whole);
        check(
            STAMP,
            r#"{"id":"1","data":{"topic":"a}"}}"#,
            r#"{"id":"1","data":{"topic":"a}"},"topic":"/subscriptions/s/topics/t","dataVersion":"","metadataVersion":"1"}"#,
        );
        check(
            STAMP,
            "{ \"id\" : \"1\" ,\r\n\t\"topic\":\"/x\",\"z\":[1 ]\r\n \t}",
            "{ \"id\" : \"1\" ,\r\n\t\"topic\":\"/x\",\"z\":[1 ],\"dataVersion\":\"\",\"metadataVersion\":\"1\"}",
        );
        check(
            STAMP,
            r#"{"topic" : null, "dataVersion":"2","metadataVersion":"1"}"#,
            r#"{"topic":"/subscriptions/s/topics/t", "dataVersion":"2","metadataVersion":"1"}"#,
        );
        check(
            STAMP,
            "{ }",
            r#"{"topic":"/subscriptions/s/topics/t","dataVersion":"","metadataVersion":"1"}"#,
        );
        check(
            TopicValue::Stamp("short \"name\""),
            r#"{"dataVersion":"1","metadataVersion":"1"}"#,
            r#"{"dataVersion":"1","metadataVersion":"1","topic":"short \"name\""}"#,
        );
    }

    #[test]
    fn domain_topics_get_their_full_id() {
        let check = |event: &str, expected: &str| {
            let written = render(EventSchema::EventGrid, event, EventSchema::EventGrid, DOMAIN);
            assert_eq!(written, expected);
        };
        check(
            r#"{"id":"1","topic" :  "f\u006fo" ,"dataVersion":"","metadataVersion":"1"}"#,
            r#"{"id":"1","topic":"/subscriptions/s/domains/d/topics/foo" ,"dataVersion":"","metadataVersion":"1"}"#,
        );
        check(
            r#"{"data":{"topic":"bar"},"topic":"foo"}"#,
            r#"{"data":{"topic":"bar"},"topic":"/subscriptions/s/domains/d/topics/foo","dataVersion":"","metadataVersion":"1"}"#,
        );
        let full =
            r#"{"topic":"/subscriptions/s/domains/d/topics/foo","dataVersion":"","metadataVersion":"1"}"#;
        check(full, full);
    }

    #[test]
    fn the_topic_is_overwritten_for_another_event_grid() {
        let check = |name, event: &str, expected: &str| {
            let topic = TopicValue::Overwrite(name);
            let written = render(EventSchema::EventGrid, event, EventSchema::EventGrid, topic);
            assert_eq!(written, expected);
        };
        let event =
            r#"{"id":"1", "topic":"/here","data":{"topic": 1},"dataVersion":"1","metadataVersion":"1"}"#;
        check(
            Some("up"),
            event,
            r#"{"id":"1","data":{"topic": 1},"dataVersion":"1","metadataVersion":"1","topic":"up"}"#,
        );
        check(
            None,
            event,
            r#"{"id":"1","data":{"topic": 1},"dataVersion":"1","metadataVersion":"1","topic":null}"#,
        );
        check(
            Some("up"),
            r#"{"topic":"x","dataVersion":"1"}"#,
            r#"{"dataVersion":"1","topic":"up","metadataVersion":"1"}"#,
        );
        let custom = r#"{"topic": "kept"}"#;
        let topic = TopicValue::Overwrite(None);
        assert_eq!(
            render(EventSchema::Custom, custom, EventSchema::Custom, topic),
            custom
        );
    }

    #[test]
    fn event_grid_events_become_cloud_events() {
        let check = |topic, event: &str, expected: &str| {
            let written = render(EventSchema::EventGrid, event, EventSchema::CloudEvent, topic);
            assert_eq!(written, expected);
        };
        check(
            STAMP,
            r#"{"id":"e\u0031","subject":"/c/1","data":{ "color":"blue","n":1.0 },"eventType":"Sample.Type","eventTime":"2026-01-02T03:04:05.678901Z","dataVersion":"1.0","unknown":1}"#,
            r##"{"specversion":"1.0","id":"e\u0031","source":"/subscriptions/s/topics/t","type":"Sample.Type","subject":"/c/1","time":"2026-01-02T03:04:05.678901Z","dataschema":"#1.0","datacontenttype":"application/json","data":{ "color":"blue","n":1.0 }}"##,
        );
        check(
            STAMP,
            r#"{"id":"1","subject":"","eventType":"t","eventTime":"when","dataVersion":""}"#,
            r#"{"specversion":"1.0","id":"1","source":"/subscriptions/s/topics/t","type":"t","time":"when"}"#,
        );
        check(
            DOMAIN,
            r#"{"id":"1","topic":"foo","subject":null,"eventType":"t","eventTime":"when","data":null}"#,
            r#"{"specversion":"1.0","id":"1","source":"/subscriptions/s/domains/d/topics/foo","type":"t","time":"when","datacontenttype":"application/json","data":null}"#,
        );
    }

    #[test]
    fn what_is_not_converted_is_not_touched() {
        let event =
            r#"{ "id":"1","source":"mysource","dataversion":"1.0","x":[1 , 2], "data_base64":"AA=="  }"#;
        assert_eq!(
            render(EventSchema::CloudEvent, event, EventSchema::CloudEvent, STAMP),
            event
        );
        assert_eq!(
            render(EventSchema::CloudEvent, event, EventSchema::CloudEvent, DOMAIN),
            event
        );
        assert_eq!(
            render(EventSchema::Custom, event, EventSchema::Custom, STAMP),
            event
        );
    }

    #[test]
    fn custom_events_get_an_envelope() {
        let check = |topic, event: &str, delivery, expected: &str| {
            assert_eq!(render(EventSchema::Custom, event, delivery, topic), expected);
        };
        let plain = r#"{ "prop1": "my property", "prop2": 5, "myEventType": "fooEventType" }"#;
        check(
            STAMP,
            plain,
            EventSchema::EventGrid,
            r#"{"id":"system-id","eventTime":"2020-08-13T18:11:29.4121391Z","eventType":"fooEventType","dataVersion":"1.0","metadataVersion":"1","topic":"/subscriptions/s/topics/t","subject":"subjectDefault","data":{ "prop1": "my property", "prop2": 5, "myEventType": "fooEventType" }}"#,
        );
        let mapped =
            r#"{"key":17,"when":"2020-01-01T00:00:00Z","version":true,"myEventType":{},"shop":"foo"}"#;
        check(
            DOMAIN,
            mapped,
            EventSchema::EventGrid,
            r#"{"id":"17","eventTime":"2020-01-01T00:00:00Z","eventType":"none","dataVersion":"true","metadataVersion":"1","topic":"/subscriptions/s/domains/d/topics/foo","subject":"subjectDefault","data":{"key":17,"when":"2020-01-01T00:00:00Z","version":true,"myEventType":{},"shop":"foo"}}"#,
        );
        check(
            STAMP,
            r#"{"version":"","data":1}"#,
            EventSchema::CloudEvent,
            r#"{"specversion":"1.0","id":"system-id","source":"/subscriptions/s/topics/t","type":"none","subject":"subjectDefault","time":"2020-08-13T18:11:29.4121391Z","datacontenttype":"application/json","data":{"version":"","data":1}}"#,
        );
        // Without a mapping the envelope is still complete.
        let batch = accept(EventSchema::Custom, "{}");
        let how = EventRendering {
            delivery: EventSchema::EventGrid,
            topic: STAMP,
            mapping: None,
        };
        let mut out = Vec::new();
        write_event(&mut out, &batch, 0, &how, || "system-id".to_owned());
        assert_eq!(
            String::from_utf8(out).unwrap(),
            r#"{"id":"system-id","eventTime":"2020-08-13T18:11:29.4121391Z","eventType":"","dataVersion":"","metadataVersion":"1","topic":"/subscriptions/s/topics/t","subject":"","data":{}}"#
        );
    }

    #[test]
    fn refused_combinations_fall_back_to_the_input() {
        assert_eq!(
            delivered_schema(EventSchema::CloudEvent, EventSchema::EventGrid),
            EventSchema::CloudEvent
        );
        assert_eq!(
            delivered_schema(EventSchema::CloudEvent, EventSchema::Custom),
            EventSchema::CloudEvent
        );
        assert_eq!(
            delivered_schema(EventSchema::EventGrid, EventSchema::Custom),
            EventSchema::EventGrid
        );
        assert_eq!(
            delivered_schema(EventSchema::Custom, EventSchema::CloudEvent),
            EventSchema::CloudEvent
        );
    }

    fn dead_letter(
        input: EventSchema,
        event: &str,
        delivery: EventSchema,
        last_attempt: Option<&str>,
    ) -> String {
        let batch = accept(input, event);
        let mapping = mapping();
        let how = EventRendering {
            delivery,
            topic: STAMP,
            mapping: Some(&mapping),
        };
        let diagnostics = DeadLetterDiagnostics {
            reason: "MaxDeliveryAttemptsExceeded",
            attempts: 1,
            last_outcome: "NotFound",
            publish_time: "2020-08-13T17:18:14.0265758Z",
            last_attempt_time: last_attempt,
        };
        let mut out = Vec::new();
        write_dead_letter(&mut out, &batch, 0, &how, || "system-id".to_owned(), &diagnostics);
        String::from_utf8(out).unwrap()
    }

    // The events of Azure's article on delivery and retry, with its spacing.
    #[test]
    fn dead_letters_look_as_documented() {
        let grid = r#"{
    "id": "93902694-901e-008f-6f95-7153a806873c",
    "eventTime": "2020-08-13T17:18:13.1647262Z",
    "eventType": "Microsoft.Storage.BlobCreated",
    "dataVersion": "",
    "metadataVersion": "1",
    "topic": "/subscriptions/0/storageAccounts/myegteststgfoo",
    "subject": "/blobServices/default/containers/deadletter/blobs/myBlobFile.txt",    
    "data": {
        "api": "PutBlob",
        "storageDiagnostics": { "batchId": "cfb32f79-3006-0010-0095-711faa000000" }
    }
}"#;
        let at = "2020-08-13T17:18:14.0465788Z";
        let mut expected: Value = serde_json::from_str(grid).unwrap();
        expected["deadLetterReason"] = json!("MaxDeliveryAttemptsExceeded");
        expected["deliveryAttempts"] = json!(1);
        expected["lastDeliveryOutcome"] = json!("NotFound");
        expected["publishTime"] = json!("2020-08-13T17:18:14.0265758Z");
        expected["lastDeliveryAttemptTime"] = json!(at);
        let written = dead_letter(EventSchema::EventGrid, grid, EventSchema::EventGrid, Some(at));
        assert_eq!(serde_json::from_str::<Value>(&written).unwrap(), expected);
        // Published and given up again: the old diagnostics do not stay next to the new ones.
        let again = dead_letter(EventSchema::EventGrid, &written, EventSchema::EventGrid, None);
        expected
            .as_object_mut()
            .unwrap()
            .remove("lastDeliveryAttemptTime");
        assert_eq!(serde_json::from_str::<Value>(&again).unwrap(), expected);
        assert_eq!(again.matches("publishTime").count(), 1);

        let cloud = r#"{
    "id": "caee971c-3ca0-4254-8f99-1395b394588e",
    "source": "mysource",
    "dataversion": "1.0",
    "subject": "mySubject",
    "type": "fooEventType",
    "datacontenttype": "application/json",
    "data": {
        "prop1": "value1",
        "prop2": 5
    }
}"#;
        assert_eq!(
            dead_letter(EventSchema::CloudEvent, cloud, EventSchema::CloudEvent, Some(at)),
            concat!(
                r#"{"id":"caee971c-3ca0-4254-8f99-1395b394588e","source":"mysource","dataversion":"1.0","#,
                r#""subject":"mySubject","type":"fooEventType","datacontenttype":"application/json","#,
                "\"data\":{\n        \"prop1\": \"value1\",\n        \"prop2\": 5\n    },",
                r#""deadletterreason":"MaxDeliveryAttemptsExceeded","deliveryattempts":1,"#,
                r#""lastdeliveryoutcome":"NotFound","publishtime":"2020-08-13T17:18:14.0265758Z","#,
                r#""lastdeliveryattempttime":"2020-08-13T17:18:14.0465788Z"}"#,
            )
        );

        let custom = r#"{"prop1":"my property","prop2":5,"myEventType":"fooEventType"}"#;
        let written = dead_letter(EventSchema::Custom, custom, EventSchema::Custom, None);
        assert_eq!(
            serde_json::from_str::<Value>(&written).unwrap(),
            json!({
                "id": "system-id", "eventTime": "2020-08-13T18:11:29.4121391Z", "eventType": "fooEventType",
                "dataVersion": "1.0", "metadataVersion": "1", "topic": TOPIC, "subject": "subjectDefault",
                "deadLetterReason": "MaxDeliveryAttemptsExceeded", "deliveryAttempts": 1,
                "lastDeliveryOutcome": "NotFound", "publishTime": "2020-08-13T17:18:14.0265758Z",
                "data": {"prop1": "my property", "prop2": 5, "myEventType": "fooEventType"},
            })
        );
    }

    #[test]
    fn headers_are_told_only_what_fits_into_them() {
        let event = r#"{"dataVersion":"1\u002e0","data":{"s":"v","n":1.50,"b":true,"nl":"a\r\nx: y","tab":"a\tb",
            "z":null,"o":{},"a":[1],"empty":"","bell":"\u0007"}}"#;
        let envelope = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(event).unwrap(), None);
        let check = |field: &str, expected: Option<&str>| {
            let found = dynamic_attribute(&envelope, field, KeyStyle::Cloud, TOPIC);
            assert_eq!(found.as_deref(), expected, "{field}");
        };
        check("data.s", Some("v"));
        check("data.n", Some("1.50"));
        check("data.b", Some("true"));
        check("data.empty", Some(""));
        check("topic", Some(TOPIC));
        for none in ["nl", "tab", "z", "o", "a", "bell", "missing"] {
            check(&format!("data.{none}"), None);
        }
        for (length, fits) in [(4096, true), (4097, false)] {
            let event = format!(r#"{{"data":"{}"}}"#, "x".repeat(length));
            let envelope = EventEnvelope::read(EventSchema::EventGrid, RawJson::parse(&event).unwrap(), None);
            let found = dynamic_attribute(&envelope, "data", KeyStyle::Cloud, TOPIC);
            assert_eq!(found.is_some(), fits, "{length}");
        }

        let mapping = mapping();
        let how = EventRendering {
            delivery: EventSchema::EventGrid,
            topic: STAMP,
            mapping: Some(&mapping),
        };
        let version = |schema, event: &str| data_version(&accept(schema, event), 0, &how).into_owned();
        assert_eq!(version(EventSchema::EventGrid, event), "1.0");
        assert_eq!(version(EventSchema::EventGrid, "{}"), "");
        assert_eq!(
            version(EventSchema::EventGrid, r#"{"dataVersion":"1\r\nx: y"}"#),
            ""
        );
        assert_eq!(version(EventSchema::Custom, "{}"), "1.0");
        assert_eq!(version(EventSchema::Custom, r#"{"version":3}"#), "3");
        assert_eq!(version(EventSchema::CloudEvent, r#"{"dataschema":"x"}"#), "");
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::vec((any_name(), inner), 0..4)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    fn any_name() -> impl Strategy<Value = String> {
        prop_oneof![
            Just("topic".to_owned()),
            Just("publishTime".to_owned()),
            Just("key".to_owned()),
            any::<String>(),
        ]
    }

    /// An event with odd members, in varying order and spacing.
    fn any_event() -> impl Strategy<Value = String> {
        let member = |name: &'static str| {
            prop::option::of("[a-z\"\\\\\u{e9}]{0,5}")
                .prop_map(move |text| Some((name.to_owned(), json!(text?))))
        };
        let known = (
            member("id"),
            member("subject"),
            member("eventType"),
            member("dataVersion"),
            member("topic"),
        );
        let unknown = prop::collection::vec(
            (any_name().prop_filter("taken", |n| n != "topic"), any_value()),
            0..4,
        );
        (known, unknown, any_value(), any::<bool>()).prop_map(|(known, unknown, data, pretty)| {
            let (a, b, c, d, e) = known;
            let members = [a, b, c, d, e].into_iter().flatten().chain(unknown);
            let mut event: serde_json::Map<String, Value> = members.collect();
            event.insert("data".to_owned(), data);
            match pretty {
                true => serde_json::to_string_pretty(&event).unwrap(),
                false => serde_json::to_string(&event).unwrap(),
            }
        })
    }

    proptest! {
        #[test]
        fn stamping_changes_nothing_else(event in any_event(), topic in prop_oneof![
            Just(STAMP), Just(DOMAIN), Just(TopicValue::Overwrite(None)), Just(TopicValue::Overwrite(Some("up"))),
        ]) {
            let written = render(EventSchema::EventGrid, &event, EventSchema::EventGrid, topic);
            let after: serde_json::Map<String, Value> = serde_json::from_str(&written).unwrap();
            let before = RawJson::parse(&event).unwrap();
            let after_raw = RawJson::parse(&written).unwrap();
            for member in before.members().filter(|member| !member.is("topic")) {
                let name = json::unescape(member.name);
                prop_assert_eq!(after_raw.get(&name).map(RawJson::text), Some(member.value.text()));
            }
            for name in after.keys().filter(|name| before.get(name).is_none()) {
                prop_assert!(["topic", "dataVersion", "metadataVersion"].contains(&name.as_str()), "{}", name);
            }
            prop_assert_eq!(after_raw.members().count(), after.len(), "no name twice");
            prop_assert!(after.contains_key("topic") && after.contains_key("dataVersion"));
        }

        #[test]
        fn conversions_copy_the_data(event in any_event()) {
            let before = RawJson::parse(&event).unwrap();
            for (input, delivery, data) in [
                (EventSchema::EventGrid, EventSchema::CloudEvent, before.get("data").unwrap().text()),
                (EventSchema::Custom, EventSchema::CloudEvent, &event),
                (EventSchema::Custom, EventSchema::EventGrid, &event),
            ] {
                let written = render(input, &event, delivery, STAMP);
                serde_json::from_str::<Value>(&written).unwrap();
                prop_assert_eq!(RawJson::parse(&written).unwrap().get("data").unwrap().text(), data);
                let hint = delivered_len_hint(&accept(input, &event), 0, &EventRendering {
                    delivery, topic: STAMP, mapping: None,
                });
                prop_assert!(hint >= written.len(), "{} < {}", hint, written.len());
            }
        }

        #[test]
        fn dead_letters_are_json_and_keep_the_data(event in any_event()) {
            for (input, delivery) in [
                (EventSchema::EventGrid, EventSchema::EventGrid),
                (EventSchema::EventGrid, EventSchema::CloudEvent),
                (EventSchema::CloudEvent, EventSchema::CloudEvent),
                (EventSchema::Custom, EventSchema::Custom),
            ] {
                let written = dead_letter(input, &event, delivery, None);
                let parsed: serde_json::Map<String, Value> = serde_json::from_str(&written).unwrap();
                prop_assert_eq!(RawJson::parse(&written).unwrap().members().count(), parsed.len(), "no name twice");
                let data = match input {
                    EventSchema::Custom => &event,
                    _ => RawJson::parse(&event).unwrap().get("data").unwrap().text(),
                };
                prop_assert_eq!(RawJson::parse(&written).unwrap().get("data").unwrap().text(), data);
            }
        }
    }
}
