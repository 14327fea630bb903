//! Parsing of publish requests into events.
//!
//! One pass over the text: each event is found, checked against its topic's schema and handed to
//! the caller, who routes it while it is still at hand. Nothing is copied except for a CloudEvent
//! in binary mode, whose headers and body are assembled into one JSON object.

pub use crate::error::PublishError;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use percent_encoding::percent_decode_str;
use postrider_core::envelope::EventEnvelope;
use postrider_core::event::{ByteSpan, EventRef, EventSchema, MissingMembers};
use postrider_core::json::{self, JsonKind, JsonScanner, RawJson};
use postrider_core::subscription::{InputMapping, MappedField};
use postrider_core::time::Timestamp;
use std::borrow::Cow;

/// The API that a publish request came through; each has its own rules for events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishApi {
    Cloud,
    /// Member names compare without case.
    Edge,
}

/// Requirements of a topic for its events.
#[derive(Clone, Copy, Debug)]
pub struct EventRules<'a> {
    pub road: PublishApi,
    pub schema: EventSchema,
    /// How the envelope of a custom event is found. Without a mapping a custom event is any object.
    pub mapping: Option<&'a InputMapping>,
    /// The full resource id of the topic or domain; at the edge the topic's name.
    pub topic_id: &'a str,
    /// Whether the topic is a domain, so that each event names a topic inside it.
    pub domain: bool,
    pub limits: PublishLimits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishLimits {
    pub request_bytes: usize,
    pub event_bytes: usize,
    pub events_max: usize,
}

/// Limits observed on the cloud service.
impl Default for PublishLimits {
    fn default() -> PublishLimits {
        PublishLimits {
            request_bytes: 1_536_000,
            event_bytes: 1_049_600,
            events_max: 5_000,
        }
    }
}

/// Headers of a request that describe its body.
#[derive(Clone, Copy, Debug, Default)]
pub struct PublishHeaders<'a> {
    pub content_type: Option<&'a str>,
    /// The headers whose names begin with `ce-`, in any case, including the prefix.
    pub ce_headers: &'a [(&'a str, &'a str)],
}

/// A valid event, handed out while its request is still being parsed.
#[derive(Clone, Debug)]
pub struct ParsedEvent<'e> {
    pub index: usize,
    pub envelope: EventEnvelope<'e>,
    /// For a domain: the name of the topic inside it.
    pub domain_topic: Option<Cow<'e, str>>,
}

/// A request in which all events are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedPublishRequest {
    /// The text that the spans of the events refer to.
    pub body: Bytes,
    pub events: Vec<EventRef>,
    pub mode: PublishMode,
}

/// How the events were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishMode {
    /// An array.
    Batch,
    /// A single object.
    Single,
    /// A single CloudEvent with its attributes in headers.
    Binary,
}

/// Parses a request: returns all of its events, or why it is refused.
///
/// `route` gets each event as soon as the event is found to be valid, and returns the value for
/// [`EventRef::matched`]. If a later event is refused, so is the request, and the caller must
/// discard everything that `route` has done.
pub fn parse(
    rules: &EventRules<'_>,
    head: &PublishHeaders<'_>,
    body: Bytes,
    mut route: impl FnMut(&ParsedEvent<'_>) -> u32,
) -> Result<ParsedPublishRequest, PublishError> {
    // Spans are 32 bits wide, and a body in binary mode grows by its headers and by base64.
    let bytes_max = rules.limits.request_bytes.min(u32::MAX as usize / 2);
    if body.len() > bytes_max {
        return Err(PublishError::request_too_large(bytes_max));
    }
    let form = BodyForm::of(rules, head)?;
    let body = without_byte_order_mark(body);
    let body = match form {
        BodyForm::Binary => assemble(rules, head, &body)?,
        _ => body,
    };
    let text = rules.text(&body)?;
    let mut reader = EventReader {
        rules,
        text,
        scanner: JsonScanner::new(text),
    };
    let mode = reader.mode(form)?;
    let events = match mode {
        PublishMode::Batch => reader.batch(&mut route)?,
        PublishMode::Single | PublishMode::Binary => vec![reader.event(0, &mut route)?],
    };
    reader.scanner.end().map_err(|e| rules.broken(e))?;
    Ok(ParsedPublishRequest { body, events, mode })
}

/// Forms of the body that the headers allow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyForm {
    Array,
    Object,
    Either,
    Binary,
}

impl BodyForm {
    fn of(rules: &EventRules<'_>, head: &PublishHeaders<'_>) -> Result<BodyForm, PublishError> {
        if rules.schema != EventSchema::CloudEvent {
            // Lenient: a missing or unusual content type means JSON, and a single event needs no
            // array.
            return Ok(BodyForm::Either);
        }
        let media_type = media_type(head.content_type);
        if head.ce_headers.iter().any(|(name, _)| switches_to_binary(name)) {
            return match media_type.as_str() {
                media_type if media_type.starts_with("application/cloudevents") => {
                    Err(PublishError::ce_modes_mixed())
                }
                "application/json" => Ok(BodyForm::Binary),
                _ if rules.road == PublishApi::Edge => Ok(BodyForm::Binary),
                _ => Err(PublishError::content_type_unsupported()),
            };
        }
        match media_type.as_str() {
            "application/cloudevents+json" | "application/json" => Ok(BodyForm::Object),
            "application/cloudevents-batch+json" => Ok(BodyForm::Array),
            _ => Err(PublishError::content_type_unsupported()),
        }
    }
}

/// The members of an event that the rules concern.
#[derive(Clone, Copy)]
enum EventField {
    Id,
    /// CloudEvents: `source`.
    Topic,
    Subject,
    Type,
    Time,
    /// CloudEvents: `dataschema`.
    DataVersion,
    /// EventGrid: `metadataVersion`; CloudEvents: `specversion`.
    Version,
    Data,
    DataBase64,
    DataContentType,
}

const FIELDS: usize = 10;

const EVENT_GRID: &[(&str, EventField)] = &[
    ("id", EventField::Id),
    ("subject", EventField::Subject),
    ("data", EventField::Data),
    ("eventType", EventField::Type),
    ("eventTime", EventField::Time),
    ("dataVersion", EventField::DataVersion),
    ("topic", EventField::Topic),
    ("metadataVersion", EventField::Version),
];

const CLOUD_EVENT: &[(&str, EventField)] = &[
    ("id", EventField::Id),
    ("source", EventField::Topic),
    ("data", EventField::Data),
    ("type", EventField::Type),
    ("time", EventField::Time),
    ("specversion", EventField::Version),
    ("subject", EventField::Subject),
    ("datacontenttype", EventField::DataContentType),
    ("data_base64", EventField::DataBase64),
    ("dataschema", EventField::DataVersion),
];

/// The members of an event by field, and the span of its `topic`.
#[derive(Default)]
struct EventFieldValues<'b> {
    values: [Option<RawJson<'b>>; FIELDS],
    topic: ByteSpan,
}

impl<'b> EventFieldValues<'b> {
    fn get(&self, field: EventField) -> Option<RawJson<'b>> {
        self.values[field as usize]
    }

    fn set(&self, field: EventField) -> Option<RawJson<'b>> {
        set(self.get(field))
    }
}

/// Null counts as absent.
fn set(value: Option<RawJson<'_>>) -> Option<RawJson<'_>> {
    value.filter(|value| !value.is_null())
}

struct EventReader<'r, 'b> {
    rules: &'r EventRules<'r>,
    text: &'b str,
    scanner: JsonScanner<'b>,
}

impl<'b> EventReader<'_, 'b> {
    fn mode(&mut self, form: BodyForm) -> Result<PublishMode, PublishError> {
        match (form, self.scanner.peek()) {
            (BodyForm::Array | BodyForm::Either, Some(b'[')) => Ok(PublishMode::Batch),
            (BodyForm::Object | BodyForm::Either, Some(b'{')) => Ok(PublishMode::Single),
            (BodyForm::Binary, _) => Ok(PublishMode::Binary),
            (BodyForm::Object, _) => Err(self.unexpected("StartObject")),
            (BodyForm::Array | BodyForm::Either, _) => Err(self.unexpected("StartArray")),
        }
    }

    fn batch(
        &mut self,
        route: &mut impl FnMut(&ParsedEvent<'_>) -> u32,
    ) -> Result<Vec<EventRef>, PublishError> {
        let rules = self.rules;
        let events_max = rules.limits.events_max;
        let mut events = Vec::with_capacity((self.text.len() / 1024 + 1).min(events_max));
        let mut first = true;
        self.scanner.open(b'[').map_err(|e| rules.broken(e))?;
        while self
            .scanner
            .next_element(&mut first)
            .map_err(|e| rules.broken(e))?
        {
            if events.len() == events_max {
                return Err(PublishError::events_too_many(events_max));
            }
            events.push(self.event(events.len(), route)?);
        }
        if events.is_empty() {
            return Err(PublishError::nonconforming(rules.schema, ""));
        }
        Ok(events)
    }

    fn event(
        &mut self,
        index: usize,
        route: &mut impl FnMut(&ParsedEvent<'_>) -> u32,
    ) -> Result<EventRef, PublishError> {
        let rules = self.rules;
        if self.scanner.peek() != Some(b'{') {
            return Err(self.unexpected("StartObject"));
        }
        let start = self.scanner.at();
        let members = match rules.schema {
            EventSchema::EventGrid => self.members(EVENT_GRID)?,
            EventSchema::CloudEvent => self.members(CLOUD_EVENT)?,
            EventSchema::Custom => {
                self.scanner.value().map_err(|e| rules.broken(e))?;
                EventFieldValues::default()
            }
        };
        let end = self.scanner.at();
        if end - start > rules.limits.event_bytes {
            return Err(PublishError::event_too_large(index, rules.limits.event_bytes));
        }
        let object = RawJson::trusted(&self.text[start..end]);
        let envelope = match rules.schema {
            EventSchema::Custom => EventEnvelope::read(EventSchema::Custom, object, rules.mapping),
            schema => EventEnvelope {
                schema,
                object,
                id: members.get(EventField::Id),
                topic: members.get(EventField::Topic),
                subject: members.get(EventField::Subject),
                event_type: members.get(EventField::Type),
                time: members.get(EventField::Time),
                data_version: members.get(EventField::DataVersion),
                data: members.get(EventField::Data),
                mapping: None,
            },
        };
        match rules.schema {
            EventSchema::EventGrid => rules.check_event_grid(&members)?,
            EventSchema::CloudEvent => rules.check_cloud_event(&members)?,
            EventSchema::Custom => rules.check_custom(&envelope)?,
        }
        let event = ParsedEvent {
            index,
            envelope,
            domain_topic: rules.domain_topic(&envelope)?,
        };
        let mut event_ref = EventRef {
            object: ByteSpan::new(start, end),
            matched: route(&event),
            ..EventRef::default()
        };
        if rules.schema != EventSchema::CloudEvent {
            event_ref.data_version = self.inside_quotes(envelope.data_version);
        }
        if rules.schema == EventSchema::EventGrid {
            event_ref.topic = members.topic;
            event_ref.lacks = MissingMembers {
                topic: members.set(EventField::Topic).is_none(),
                data_version: members.get(EventField::DataVersion).is_none(),
                metadata_version: members.get(EventField::Version).is_none(),
            };
        }
        Ok(event_ref)
    }

    fn members(&mut self, names: &[(&str, EventField)]) -> Result<EventFieldValues<'b>, PublishError> {
        let rules = self.rules;
        let mut members = EventFieldValues::default();
        let mut first = true;
        self.scanner.open(b'{').map_err(|e| rules.broken(e))?;
        while let Some(name) = self.scanner.next_name(&mut first).map_err(|e| rules.broken(e))? {
            let value = self.scanner.value().map_err(|e| rules.broken(e))?;
            let Some(&(name_plain, field)) = rules.known(names, name) else {
                continue;
            };
            // Parsers disagree about which of two duplicates counts, so duplicates are refused.
            if members.values[field as usize].replace(value).is_some() {
                let why = format!("Property '{name_plain}' is repeated.");
                return Err(PublishError::nonconforming(rules.schema, &why));
            }
            if let EventField::Topic = field {
                members.topic = ByteSpan::new(offset(self.text, name) - 1, self.scanner.at());
            }
        }
        Ok(members)
    }

    fn unexpected(&mut self, expected: &str) -> PublishError {
        match self.scanner.value() {
            Ok(value) => PublishError::unexpected_token(self.rules.schema, expected, token(value)),
            Err(e) => self.rules.broken(e),
        }
    }

    fn inside_quotes(&self, value: Option<RawJson<'b>>) -> ByteSpan {
        match value {
            Some(value) if value.kind() == JsonKind::String => {
                let start = offset(self.text, value.text());
                ByteSpan::new(start + 1, start + value.text().len() - 1)
            }
            _ => ByteSpan::default(),
        }
    }
}

impl EventRules<'_> {
    fn check_event_grid(&self, members: &EventFieldValues<'_>) -> Result<(), PublishError> {
        self.required(members.set(EventField::Subject), "subject")?;
        self.required_filled(members.set(EventField::Id), "id")?;
        self.required_filled(members.set(EventField::Type), "eventType")?;
        let time = self.required(members.set(EventField::Time), "eventTime")?;
        self.date_time(time, "eventTime")?;
        match self.road {
            PublishApi::Cloud => self.optional(members.set(EventField::DataVersion))?,
            PublishApi::Edge => {
                self.required(members.set(EventField::DataVersion), "dataVersion")?;
            }
        }
        if let Some(version) = members.set(EventField::Version)
            && version.as_str().as_deref() != Some("1")
        {
            return Err(PublishError::property_fixed(self.schema, "metadataVersion", "1"));
        }
        let Some(topic) = members.set(EventField::Topic) else {
            return Ok(());
        };
        self.string(topic)?;
        let topic = topic.as_str().unwrap_or_default();
        if self.domain || topic == self.topic_id {
            return Ok(());
        }
        Err(match self.road {
            PublishApi::Cloud => PublishError::cloud_topic_mismatch(&topic),
            PublishApi::Edge => PublishError::edge_topic_mismatch(&topic, self.topic_id),
        })
    }

    fn check_cloud_event(&self, members: &EventFieldValues<'_>) -> Result<(), PublishError> {
        let version = self.required_filled(members.set(EventField::Version), "specversion")?;
        let version = version.as_str().unwrap_or_default();
        if version != "1.0" && !(self.road == PublishApi::Edge && version == "1.0-rc1") {
            return Err(PublishError::property_fixed(self.schema, "specversion", "1.0"));
        }
        // The service names the properties of its own schema here.
        self.required_filled(members.set(EventField::Type), "eventType")?;
        self.required_filled(members.set(EventField::Topic), "source")?;
        self.required_filled(members.set(EventField::Id), "id")?;
        for field in [
            EventField::Subject,
            EventField::Time,
            EventField::DataVersion,
            EventField::DataContentType,
            EventField::DataBase64,
        ] {
            self.optional(members.set(field))?;
        }
        if let Some(time) = members.set(EventField::Time) {
            self.date_time(time, "time")?;
        }
        if members.set(EventField::Data).is_some() && members.set(EventField::DataBase64).is_some() {
            let why = "Only one of the properties 'data' and 'data_base64' may be set.";
            return Err(PublishError::nonconforming(self.schema, why));
        }
        Ok(())
    }

    fn check_custom(&self, envelope: &EventEnvelope<'_>) -> Result<(), PublishError> {
        let Some(mapping) = self.mapping else {
            return Ok(());
        };
        match set(envelope.subject) {
            None if mapping.subject.default_value.is_some() => {}
            subject => {
                self.required(subject, source_name(&mapping.subject, "subject"))?;
            }
        }
        match set(envelope.event_type) {
            None if mapping.event_type.default_value.is_some() => {}
            event_type => {
                self.required_filled(event_type, source_name(&mapping.event_type, "eventType"))?;
            }
        }
        self.optional(set(envelope.id))?;
        self.optional(set(envelope.data_version))?;
        self.optional(set(envelope.time))?;
        if let Some(time) = set(envelope.time) {
            self.date_time(time, source_name(&mapping.event_time, "eventTime"))?;
        }
        Ok(())
    }

    /// The domain topic that an event is for: its name, or `<domain id>/topics/<name>`.
    fn domain_topic<'e>(&self, envelope: &EventEnvelope<'e>) -> Result<Option<Cow<'e, str>>, PublishError> {
        if !self.domain {
            return Ok(None);
        }
        let mapped = self.mapping.map(|mapping| &mapping.topic);
        let found = match set(envelope.topic) {
            Some(topic) => {
                self.string(topic)?;
                topic.as_str().unwrap_or_default()
            }
            None => match mapped.and_then(|mapped| mapped.default_value.clone()) {
                Some(default) => Cow::Owned(default),
                None => {
                    let name = mapped.map_or("topic", |mapped| source_name(mapped, "topic"));
                    return Err(PublishError::property_missing(self.schema, name));
                }
            },
        };
        let name_start = after_prefix(&found, 0, self.topic_id)
            .and_then(|at| after_prefix(&found, at, "/topics/"))
            .unwrap_or(0);
        let name = &found[name_start..];
        // A colon means an absolute URI, a slash any other path: neither is a name.
        if name.is_empty() || name.contains(['/', ':']) {
            return Err(PublishError::domain_topic_invalid(&found));
        }
        Ok(Some(match found {
            Cow::Borrowed(found) => Cow::Borrowed(&found[name_start..]),
            Cow::Owned(mut found) => {
                found.drain(..name_start);
                Cow::Owned(found)
            }
        }))
    }

    /// A string, which may be empty.
    fn required<'v>(&self, value: Option<RawJson<'v>>, name: &str) -> Result<RawJson<'v>, PublishError> {
        let value = value.ok_or_else(|| PublishError::property_missing(self.schema, name))?;
        self.string(value)?;
        Ok(value)
    }

    /// A non-empty string.
    fn required_filled<'v>(
        &self,
        value: Option<RawJson<'v>>,
        name: &str,
    ) -> Result<RawJson<'v>, PublishError> {
        let value = self.required(value, name)?;
        match value.text() {
            "\"\"" => Err(PublishError::property_missing(self.schema, name)),
            _ => Ok(value),
        }
    }

    fn optional(&self, value: Option<RawJson<'_>>) -> Result<(), PublishError> {
        value.map_or(Ok(()), |value| self.string(value))
    }

    fn string(&self, value: RawJson<'_>) -> Result<(), PublishError> {
        match value.kind() {
            JsonKind::String => Ok(()),
            _ => Err(PublishError::unexpected_token(
                self.schema,
                "String",
                token(value),
            )),
        }
    }

    /// The edge module accepts any string as a time.
    fn date_time(&self, value: RawJson<'_>, name: &str) -> Result<(), PublishError> {
        if self.road == PublishApi::Edge || value.as_str().is_some_and(|text| is_date_time(&text)) {
            return Ok(());
        }
        let why = format!("Property '{name}' is not a date-time.");
        Err(PublishError::nonconforming(self.schema, &why))
    }

    /// Finds a field by the member's name as written. Almost every name is one of these, without
    /// escapes.
    fn known<'n>(&self, names: &'n [(&'n str, EventField)], name: &str) -> Option<&'n (&'n str, EventField)> {
        let found = names.iter().find(|(plain, _)| *plain == name);
        if found.is_some() || (self.road == PublishApi::Cloud && !name.contains('\\')) {
            return found;
        }
        let name = json::unescape(name);
        names.iter().find(|(plain, _)| match self.road {
            PublishApi::Cloud => *plain == name,
            PublishApi::Edge => plain.eq_ignore_ascii_case(&name),
        })
    }

    fn text<'b>(&self, body: &'b [u8]) -> Result<&'b str, PublishError> {
        std::str::from_utf8(body).map_err(|e| {
            let why = format!("It is not valid UTF-8 at byte {}.", e.valid_up_to());
            PublishError::nonconforming(self.schema, &why)
        })
    }

    fn broken(&self, error: json::Error) -> PublishError {
        PublishError::nonconforming(self.schema, &format!("It is not valid JSON: {error}."))
    }
}

/// Converts a CloudEvent in binary mode to structured mode.
fn assemble(rules: &EventRules<'_>, head: &PublishHeaders<'_>, body: &[u8]) -> Result<Bytes, PublishError> {
    let mut attributes: Vec<(String, Cow<'_, str>)> = Vec::with_capacity(head.ce_headers.len());
    for &(header, value) in head.ce_headers {
        let Some(name) = ce_attribute(header) else {
            continue;
        };
        let value = percent_decode_str(value)
            .decode_utf8()
            .map_err(|_| PublishError::ce_header_invalid(header))?;
        if attributes.iter().any(|(known, _)| *known == name) {
            return Err(PublishError::ce_header_invalid(header));
        }
        attributes.push((name, value));
    }
    for required in ["specversion", "type", "source", "id"] {
        match attributes.iter().find(|(name, _)| name == required) {
            None => return Err(PublishError::ce_header_missing(&format!("ce-{required}"))),
            Some((_, value)) if value.is_empty() => {
                return Err(PublishError::ce_header_empty(&format!("ce-{required}")));
            }
            Some(_) => {}
        }
    }
    // The request's own `Content-Type` header is that of the data.
    attributes.retain(|(name, _)| name != "datacontenttype");
    if let Some(content_type) = head.content_type {
        attributes.push(("datacontenttype".into(), content_type.into()));
    }

    let mut out = Vec::with_capacity(body.len() + 512);
    for (name, value) in &attributes {
        out.push(if out.is_empty() { b'{' } else { b',' });
        json::write_string(name, &mut out);
        out.push(b':');
        json::write_string(value, &mut out);
    }
    let media_type = media_type(head.content_type);
    let is_json =
        ["", "application/json", "text/json"].contains(&media_type.as_str()) || media_type.ends_with("+json");
    if body.is_empty() && rules.road == PublishApi::Cloud {
        return Err(PublishError::nonconforming(rules.schema, "The body is empty."));
    } else if body.is_empty() {
        // The CloudEvents HTTP binding allows an event without data.
    } else if is_json {
        // Parsed separately, so that the data cannot close the object and begin another member.
        let data = RawJson::parse(rules.text(body)?).map_err(|e| rules.broken(e))?;
        out.extend_from_slice(b",\"data\":");
        out.extend_from_slice(data.text().as_bytes());
    } else {
        out.extend_from_slice(b",\"data_base64\":\"");
        out.extend_from_slice(BASE64_STANDARD.encode(body).as_bytes());
        out.push(b'"');
    }
    out.push(b'}');
    Ok(out.into())
}

/// The attribute that a `ce-` header stands for.
fn ce_attribute(header: &str) -> Option<String> {
    let prefix = header.get(..3)?;
    prefix
        .eq_ignore_ascii_case("ce-")
        .then(|| header[3..].to_ascii_lowercase())
}

fn switches_to_binary(header: &str) -> bool {
    let attribute = ce_attribute(header).unwrap_or_default();
    ["specversion", "type", "source", "id"].contains(&attribute.as_str())
}

/// A content type in lower case, without parameters; empty if absent.
fn media_type(content_type: Option<&str>) -> String {
    let content_type = content_type.unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default();
    media_type.trim().to_ascii_lowercase()
}

fn without_byte_order_mark(body: Bytes) -> Bytes {
    match body.starts_with(b"\xEF\xBB\xBF") {
        true => body.slice(3..),
        false => body,
    }
}

/// The field that a publisher sends for a mapped property; without a mapping, the property itself.
fn source_name<'m>(mapped: &'m MappedField, property: &'m str) -> &'m str {
    mapped.source_field.as_deref().unwrap_or(property)
}

/// The end of `prefix` in `text`, if `text` has it at `at` in any case.
fn after_prefix(text: &str, at: usize, prefix: &str) -> Option<usize> {
    let end = at + prefix.len();
    text.get(at..end)?.eq_ignore_ascii_case(prefix).then_some(end)
}

/// The offset of `part`, a slice of `text`, in it.
fn offset(text: &str, part: &str) -> usize {
    part.as_ptr() as usize - text.as_ptr() as usize
}

/// The service's name for a JSON token of this kind.
fn token(value: RawJson<'_>) -> &'static str {
    match value.kind() {
        JsonKind::Null => "Null",
        JsonKind::Bool => "Boolean",
        JsonKind::Number if value.text().contains(['.', 'e', 'E']) => "Float",
        JsonKind::Number => "Integer",
        JsonKind::String => "String",
        JsonKind::Array => "StartArray",
        JsonKind::Object => "StartObject",
    }
}

/// Whether a text is a date and time. Years outside the range of [`Timestamp`] are accepted: .NET
/// writes the year 1 for an unset time.
fn is_date_time(text: &str) -> bool {
    is_rfc_3339(text.as_bytes()).unwrap_or(false) || Timestamp::parse(text).is_some()
}

/// Parses the common form without the cost of a general parser. The offset is optional.
fn is_rfc_3339(text: &[u8]) -> Option<bool> {
    let number = |from: usize, len: usize| {
        text.get(from..from + len)?.iter().try_fold(0, |number, digit| {
            digit
                .is_ascii_digit()
                .then(|| number * 10 + u32::from(digit - b'0'))
        })
    };
    let (date, time) = (text.get(..10)?, text.get(10..19)?);
    if date[4] != b'-'
        || date[7] != b'-'
        || !matches!(time[0], b'T' | b't' | b' ')
        || time[3] != b':'
        || time[6] != b':'
    {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 2)?, number(8, 2)?);
    let (hour, minute, second) = (number(11, 2)?, number(14, 2)?, number(17, 2)?);
    let mut at = 19;
    if text.get(at) == Some(&b'.') {
        let digits = text[20..].iter().take_while(|b| b.is_ascii_digit()).count();
        if digits == 0 {
            return None;
        }
        at += 1 + digits;
    }
    let offset_is_good = match &text[at..] {
        [] | [b'Z' | b'z'] => true,
        [b'+' | b'-', _, _, b':', _, _] => number(at + 1, 2)? < 24 && number(at + 4, 2)? < 60,
        _ => false,
    };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        _ => 0,
    };
    let date_is_good = year > 0 && (1..=days).contains(&day);
    Some(date_is_good && hour < 24 && minute < 60 && second < 60 && offset_is_good)
}

#[cfg(test)]
mod tests;
